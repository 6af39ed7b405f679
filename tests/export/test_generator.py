"""The graph that translates against eager decoding: tokens and scores, greedy and with beams, for every mixer."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from models import MIXERS, POSITIONS, TOKENIZER, VOCAB_SIZE, WIDTH, decoder_config, grouped, random_state
from writing import END, START, run, session, texts, writer

from slimformer.export import grouping
from slimformer.export.generator import build_generator
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    EmbeddingConfig,
    LanguageHead,
    LayerConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, generate
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import pad

UNTIED = LanguageHead(START, END, tied=False, bias=True)
CONFIGS: dict[str, TransformerConfig] = {
    **{name: decoder_config(1, 2, mixer, head=UNTIED) for name, mixer in MIXERS.items()},
    "shared keys": grouped(decoder_config(2, 2, head=UNTIED)),
    "pre-norm": decoder_config(2, 2, norm_place="pre", final_norm=True, head=UNTIED),
    "tied": decoder_config(1, 1, head=LanguageHead(START, END)),
    "another table": decoder_config(
        1, 1, head=UNTIED, target=EmbeddingConfig(30, POSITIONS, position_kind="learned", scaled=True)
    ),
    "no positions": replace(
        decoder_config(1, 1, MIXERS["gru"], head=UNTIED),
        target=EmbeddingConfig(VOCAB_SIZE, POSITIONS, position_kind="none", norm=False),
    ),
    "absent cross and ffn": replace(
        decoder_config(1, 1, head=UNTIED),
        decoder=(LayerConfig(AttentionConfig(2, 8), None, AttentionConfig(2, 8)), LayerConfig(None, None, None)),
    ),
}
SOURCES = [[5, 9, 3], [7], list(range(5, 22)), [20, 21, 22, 23, 3]]


def model(name: str, ending: float = 2.0) -> Checkpoint:
    return writer(CONFIGS[name], 5, ending)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_scores_are_those_of_eager_decoding(name: str) -> None:
    checkpoint = model(name)
    opened, net = session(checkpoint), checkpoint.to_torch()
    seen = set()
    for beams in (1, 2, 4):
        for penalty, longest in ((1.0, 12), (0.0, 7), (1.6, 12)):
            options = Decoding(max_new_tokens=longest, beams=beams, n_best=beams, length_penalty=penalty)
            sequences, scores = run(opened, SOURCES, options)
            expected = generate(net, SOURCES, options)
            assert texts(sequences) == texts(expected.sequences)
            np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)
            seen |= {tuple(one) for rows in texts(sequences) for one in rows}
    assert len(seen) > 4


def test_long_and_short_sources_in_one_batch() -> None:
    """1, 3, 17, 64 and 90 tokens; and each gives what it gives alone."""
    config = replace(
        CONFIGS["pre-norm"], embedding=EmbeddingConfig(VOCAB_SIZE, 96, position_kind="sinusoidal"), text=TextConfig(96)
    )
    state = random_state(config, 7)
    state["head.tokens.weight"] *= 2
    checkpoint = Checkpoint(config, state, TOKENIZER)
    opened, net = session(checkpoint), checkpoint.to_torch()
    draw = np.random.default_rng(0)
    sources = [draw.integers(5, VOCAB_SIZE, length).tolist() for length in (1, 3, 17, 64, 90)]
    for options in (Decoding(max_new_tokens=40), Decoding(max_new_tokens=40, beams=4, n_best=4)):
        sequences, scores = run(opened, sources, options)
        expected = generate(net, sources, options)
        assert texts(sequences) == texts(expected.sequences)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=5e-4, rtol=1e-4)
        for row, source in enumerate(sources):
            assert texts(run(opened, [source], options)[0])[0] == texts(sequences)[row]


MANY = [
    np.random.default_rng(length).integers(5, VOCAB_SIZE, length).tolist()
    for length in (1, 3, 17, 0, 2, 20, 1, 2, 14, 5, 4, 0, 9)
]
SEARCHES = [
    *[Decoding(max_new_tokens=9, beams=beams, n_best=beams) for beams in (1, 3)],
    Decoding(max_new_tokens=9, sample=True, seed=7),
]


@pytest.mark.parametrize("name", ["attention", "ssru", "absent cross and ffn"])
def test_sources_of_many_lengths_are_written_in_groups_and_put_back(name: str) -> None:
    """Eight rows and more are grouped by length; every text has to come back at its own place."""
    opened, net = session(model(name)), model(name).to_torch()
    for options in SEARCHES:
        sequences, scores = run(opened, MANY, options)
        expected = generate(net, MANY, options)
        assert texts(sequences) == texts(expected.sequences)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)
    assert len({tuple(rows[0]) for rows in texts(expected.sequences)}) > 6


def test_in_int8_groups_write_what_rows_beside_each_other_write(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = quantized(model("attention"), bits=7)
    grouped = session(checkpoint)
    monkeypatch.setattr(grouping, "WASTE", 1e9)
    beside = session(checkpoint)
    for options in SEARCHES:
        for one, other in zip(run(grouped, MANY, options), run(beside, MANY, options), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("beams", [1, 3])
def test_no_token_one_token_and_an_empty_source(beams: int) -> None:
    checkpoint = model("attention")
    opened, net = session(checkpoint), checkpoint.to_torch()
    sequences, scores = run(opened, SOURCES, Decoding(max_new_tokens=0, beams=beams))
    assert sequences.shape == (4, beams, 0)
    assert scores.tolist() == [[0.0] * beams] * 4
    options = Decoding(max_new_tokens=1, beams=beams, n_best=beams)
    sequences, _ = run(opened, SOURCES, options)
    assert texts(sequences) == texts(generate(net, SOURCES, options).sequences)
    ids, mask = pad([[5, 6], []])
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": np.array(4), "num_beams": np.array(beams)}
    sequences, scores = opened.run(None, {**given, "length_penalty": np.array(1.0, np.float32)})
    assert np.isfinite(scores[:, 0]).all()
    alone, _ = run(opened, [[5, 6]], Decoding(max_new_tokens=4, beams=beams))
    assert texts(sequences)[0] == texts(alone)[0]


def test_it_stops_when_all_have_ended() -> None:
    """A thousand steps are allowed, the positions hold 24: steps after the ends would leave the table."""
    sequences, _ = run(session(model("attention", ending=50.0)), SOURCES, Decoding(max_new_tokens=1000))
    assert sequences.tolist() == [[[END]]] * 4
    sequences, _ = run(session(model("attention", ending=50.0)), SOURCES, Decoding(max_new_tokens=1000, beams=2))
    assert sequences.shape[2] < 24


@pytest.mark.parametrize("name", ["attention", "ssru", "lstm", "pre-norm", "tied", "another table"])
def test_int8_writes_what_eager_int8_writes(name: str) -> None:
    """A flipped rounding may move a choice between tokens that are nearly equal, and all that follows it."""
    checkpoint = quantized(model(name), bits=7)
    opened, net = session(checkpoint), checkpoint.to_torch()
    sequences, _ = run(opened, SOURCES, Decoding(max_new_tokens=10))
    expected = texts(generate(net, SOURCES, Decoding(max_new_tokens=10)).sequences)
    same = [found == wanted for found, wanted in zip(texts(sequences), expected, strict=True)]
    assert np.mean(same) >= 0.75


def test_int8_weights_stay_int8_and_a_tied_table_is_stored_once() -> None:
    checkpoint = quantized(model("tied"), bits=7)
    graph = build_generator(checkpoint.config, {name: value.numpy() for name, value in checkpoint.state.items()})
    large = {one.name: one.data_type for one in graph.graph.initializer if np.prod(one.dims) >= 500}
    sinusoids = {name for name in large if name.endswith("sinusoids")}
    assert {large[name] for name in set(large) - sinusoids} == {onnx.TensorProto.INT8}
    tables = [one.name for one in graph.graph.initializer if list(one.dims) == [VOCAB_SIZE, WIDTH]]
    assert tables == ["embeddings.tokens.weight"]


def test_what_no_such_graph_is_made_of() -> None:
    config = decoder_config(1, 1, head=None)
    state = {name: value.numpy() for name, value in random_state(config).items()}
    with pytest.raises(InputError, match="made of a decoder with a language head"):
        build_generator(config, state)
