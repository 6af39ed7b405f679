"""Graphs that write, for the tests: opened, run as `Decoding` asks, and their texts without what follows the end."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from models import TOKENIZER, random_state

from slimformer.export.generator import build_generator
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import TransformerConfig
from slimformer.transformer.generation import Decoding
from slimformer.transformer.tokenizer import pad

START, END = 2, 3


def writer(config: TransformerConfig, seed: int, ending: float) -> Checkpoint:
    """Random weights; `ending` lets texts end where the head has a table of its own, lest it repeat itself."""
    state = random_state(config, seed)
    if "head.tokens.weight" in state:
        state["head.tokens.weight"] *= 2
        state["head.bias"][END] = ending
    return Checkpoint(config, state, TOKENIZER)


def session(checkpoint: Checkpoint) -> onnxruntime.InferenceSession:
    """The checked graph on one thread."""
    state = {name: value.numpy() for name, value in checkpoint.state.items()}
    graph = build_generator(checkpoint.config, state)
    onnx.checker.check_model(graph)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(
    opened: onnxruntime.InferenceSession, read: Sequence[Sequence[int]], options: Decoding
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences and scores for sources or prompts, padded on the right."""
    return run_padded(opened, *pad(read), options)


def run_padded(
    opened: onnxruntime.InferenceSession, ids: Any, mask: Any, options: Decoding
) -> tuple[np.ndarray, np.ndarray]:
    """The same for ids and a mask of any padding."""
    given: dict[str, Any] = {
        "input_ids": np.asarray(ids),
        "attention_mask": np.asarray(mask),
        "max_new_tokens": np.array(options.max_new_tokens),
        "num_beams": np.array(options.beams),
        "length_penalty": np.array(options.length_penalty, np.float32),
    }
    if options.sample:
        given |= {"seed": np.array(options.seed), "temperature": np.array(options.temperature, np.float32)}
        given |= {"top_k": np.array(options.top_k), "top_p": np.array(options.top_p, np.float32)}
    sequences, scores = opened.run(["sequences", "scores"], given)
    return sequences, scores


def texts(sequences: np.ndarray | torch.Tensor) -> list[list[list[int]]]:
    """Ids of every text up to its end token."""
    return [[ids[: ids.index(END) + 1] if END in ids else ids for ids in rows] for rows in sequences.tolist()]
