"""Encoders of recurrent cells as graphs, against the eager model: every cell, padding and pooling."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from models import MIXERS, POSITIONS, TOKENIZER, decoder_config, ragged, random_state, tiny_config
from writing import END, START, run, session, texts, writer

from slimformer.export import export
from slimformer.export.encoder import build_encoder
from slimformer.export.machine import int8_weight_bits
from slimformer.export.runtime import load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    ClassificationHead,
    EmbeddingHead,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    TransformerConfig,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, generate
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import pad

CELLS = ("rnn", "lstm", "gru", "ssru")
HEADS = {
    "last": ClassificationHead(("a", "b", "c"), pooler=False, pooling="last"),
    "first": ClassificationHead(("a", "b", "c")),
    "mean": EmbeddingHead("mean", normalize=False),
}


def model(kind: str, head: str = "last") -> Checkpoint:
    layers = [LayerConfig(MIXERS[kind], FeedForwardConfig(24, "relu")), LayerConfig(MIXERS[kind], None)]
    config = tiny_config(HEADS[head], layers)
    return Checkpoint(config, random_state(config, 3), TOKENIZER, {"source": "tiny"})


def both(checkpoint: Checkpoint, ids: torch.Tensor, mask: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The last output of the graph, and the model's result."""
    state = {name: value.numpy() for name, value in checkpoint.state.items()}
    graph = build_encoder(checkpoint.config, state).SerializeToString()
    opened = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    found = opened.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[-1]
    with torch.inference_mode():
        expected = checkpoint.to_torch()(ids, mask).result
    assert expected is not None
    return found, expected.numpy()


@pytest.mark.parametrize("side", ["right", "left", "between"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", CELLS)
def test_results_are_those_of_the_eager_model(kind: str, head: str, side: str) -> None:
    found, expected = both(model(kind, head), *ragged([3, 12, 1, 0, 7, 12], side=side, columns=13))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert np.ptp(expected, axis=0).min() > 1e-3


@pytest.mark.parametrize("lengths", [[0, 0], [5], [4, 4, 4]], ids=str)
def test_no_token_at_all_and_no_padding(lengths: list[int]) -> None:
    found, expected = both(model("lstm"), *ragged(lengths, columns=max(*lengths, 2)))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_the_last_tokens_state_has_seen_the_first_token() -> None:
    ids, mask = ragged([6], columns=8)
    changed = ids.clone()
    changed[0, 0] += 1
    first, second = (both(model("gru"), one, mask)[0] for one in (ids, changed))
    assert np.abs(first - second).max() > 1e-4


@pytest.mark.parametrize("kind", CELLS)
def test_int8_equals_eager_int8(kind: str) -> None:
    checkpoint = model(kind)
    ids, mask = ragged([3, 12, 1, 7], columns=13)
    found, expected = both(quantized(checkpoint, bits=7), ids, mask)
    noise = np.abs(expected - both(checkpoint, ids, mask)[1]).max()
    assert noise > 1e-3
    assert np.abs(found - expected).max() < noise / 20


def test_a_bundle_classifies_and_has_no_name_in_other_tools(tmp_path: Path) -> None:
    checkpoint = model("lstm")
    bundle = export(checkpoint, tmp_path / "bundle", format="int8")
    assert not (bundle / "config.json").exists()
    assert (export(model("attention", "first"), tmp_path / "attention") / "config.json").exists()
    given = ["sort the rows", "print"]
    ids, mask = map(torch.from_numpy, pad(checkpoint.text_encoder().encode(given)))
    _, expected = both(quantized(checkpoint, bits=int8_weight_bits()), ids, mask)
    np.testing.assert_allclose(load_bundle(bundle).logits(given), expected, atol=1e-3)
    with pytest.raises(InputError, match="the padded layout has no lstm cells: take packed"):
        export(checkpoint, tmp_path / "padded", layout="padded")
    assert not (tmp_path / "padded").exists()


def test_a_translator_reads_with_cells() -> None:
    head = LanguageHead(START, END, tied=False, bias=True)
    start = decoder_config(2, 2, MIXERS["ssru"], head=head)
    config: TransformerConfig = replace(
        start, encoder=tuple(replace(layer, mixer=MIXERS["gru"]) for layer in start.encoder)
    )
    checkpoint = writer(config, 5, 2.0)
    sources = [[5, 9, 3], [7], list(range(5, 5 + POSITIONS // 2)), []]
    for beams in (1, 3):
        options = Decoding(max_new_tokens=9, beams=beams, n_best=beams)
        sequences, scores = run(session(checkpoint), sources, options)
        expected = generate(checkpoint.to_torch(), sources, options)
        assert texts(sequences) == texts(expected.sequences)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)
