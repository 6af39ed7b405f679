"""Graphs that write a token at a time, for the tests: opened, and driven from numpy as a caller would."""

from typing import Any

import numpy as np
import onnx
import onnxruntime

from slimformer.export.names import DECODER_FILE, DECODER_WITH_PAST_FILE, ENCODER_FILE, MODEL_FILE
from slimformer.export.steps import build_steps
from slimformer.transformer.checkpoint import Checkpoint


def step_graphs(checkpoint: Checkpoint) -> dict[str, onnx.ModelProto]:
    """The checked graphs by their place in a bundle."""
    graphs = dict(build_steps(checkpoint.config, {name: value.numpy() for name, value in checkpoint.state.items()}))
    for graph in graphs.values():
        onnx.checker.check_model(graph)
    return graphs


def axes(values: Any) -> dict[str, list[str | int]]:
    """Inputs or outputs and their axes."""
    return {one.name: [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim] for one in values}


class Driver:
    """What a caller does: hand the present back as the past."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.sessions = {
            name: onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
            for name, graph in step_graphs(checkpoint).items()
        }
        self.given: dict[str, np.ndarray] = {}
        self.columns = 0

    def read(self, ids: Any, mask: Any) -> np.ndarray:
        """Sources (B, S) -> what the encoder gives."""
        given = {"input_ids": np.asarray(ids), "attention_mask": np.asarray(mask)}
        states = self.sessions[ENCODER_FILE].run(["last_hidden_state"], given)[0]
        self.given = {"encoder_hidden_states": states, "encoder_attention_mask": np.asarray(mask)}
        self.columns = 0
        return states

    def feed(self, ids: Any, mask: Any = None) -> np.ndarray:
        """Tokens (B, T), and of a decoder by itself what they are (B, T) -> logits (B, T, V)."""
        ids = np.asarray(ids)
        if MODEL_FILE in self.sessions:
            session = self.sessions[MODEL_FILE]
            now = np.ones_like(ids) if mask is None else np.asarray(mask)
            before = self.given.get("attention_mask", now[:, :0])
            self.given = {**self._empty(session, len(ids)), **self.given}
            self.given["attention_mask"] = np.concatenate([before, now], 1)
        else:
            session = self.sessions[DECODER_WITH_PAST_FILE if self.columns else DECODER_FILE]
        own = {"input_ids": ids, "cache_position": np.array([self.columns])}
        names = [one.name for one in session.get_outputs()]
        feed = {one.name: {**own, **self.given}[one.name] for one in session.get_inputs()}
        found = dict(zip(names, session.run(names, feed), strict=True))
        self.columns += ids.shape[1]
        logits: np.ndarray = found.pop("logits")
        self.given |= {name.replace("present", "past_key_values"): value for name, value in found.items()}
        return logits

    @staticmethod
    def _empty(session: onnxruntime.InferenceSession, rows: int) -> dict[str, np.ndarray]:
        shapes = {one.name: one.shape for one in session.get_inputs() if one.name.startswith("past")}
        return {
            name: np.zeros([rows, *(0 if isinstance(axis, str) else axis for axis in shape[1:])], np.float32)
            for name, shape in shapes.items()
        }
