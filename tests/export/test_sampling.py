"""Tokens drawn by the graph: the generator in whole numbers, then texts against eager decoding."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from models import MIXERS, TOKENIZER, decoder_config, random_state
from writing import END, START, run, session, texts

from slimformer.export.generator import INPUTS
from slimformer.export.graph import Graph
from slimformer.export.sampling import DEFAULTS, TYPES, Sampling, hashes
from slimformer.export.sampling import INPUTS as SAMPLING_INPUTS
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import LanguageHead
from slimformer.transformer.generation import Decoding, generate, uniform

UINT64 = onnx.TensorProto.UINT64
READ = [[9], [5, 9, 11], list(range(5, 16)), [20, 21]]
SEEDS = (0, 1, 7, 2**31, 2**32 - 1)


def finalizer(x: int) -> int:
    """MurmurHash3's for 32 bits, as its author printed it, of x and the golden ratio."""
    h = (x + 0x9E3779B9) % 2**32
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def opened(graph: onnx.ModelProto) -> onnxruntime.InferenceSession:
    onnx.checker.check_model(graph)
    return onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])


def test_hashes_are_murmurs_finalizer() -> None:
    numbers = [0, 1, 2, 12345, 0x7FFFFFFF, 0x80000000, 0x61C88647, 2**32 - 1, *range(3, 2**32, 2**32 // 300)]
    g = Graph()
    g.name_output(hashes(g, "x"), "y")
    model = g.model({"x": ["n"]}, {"y": ["n"]}, contrib=False, types={"x": UINT64, "y": UINT64})
    (found,) = opened(model).run(None, {"x": np.array(numbers, np.uint64)})
    assert found.tolist() == [finalizer(x) for x in numbers]
    assert len(set(found.tolist())) == len(numbers)


def drawing() -> onnxruntime.InferenceSession:
    """Logits (R, V) and the number of the round -> the tokens of that round."""
    g = Graph()
    for name, value in DEFAULTS.items():
        g.give(name, value)
    g.name_output(
        Sampling(g, 5, "most", g.add("Shape", "logits", start=0, end=1)).tokens(g, "logits", "place"), "tokens"
    )
    inputs: dict[str, Any] = {"logits": ["rows", 5], "place": [], "most": [], **SAMPLING_INPUTS}
    types = {"logits": onnx.TensorProto.FLOAT, "tokens": onnx.TensorProto.INT64, **TYPES}
    return opened(g.model(inputs, {"tokens": ["rows", 1]}, contrib=False, types=types))


CHANCES = [0.1, 0.4, 0.1, 0.25, 0.15]


@pytest.mark.parametrize(
    ("options", "order", "sums"),
    [
        ({}, [1, 3, 4, 0, 2], [0.4, 0.65, 0.8, 0.9, 1.0]),  # of equal ones the first stands first
        ({"top_k": 2}, [1, 3], [0.4, 0.65]),
        ({"top_k": 99}, [1, 3, 4, 0, 2], [0.4, 0.65, 0.8, 0.9, 1.0]),
        ({"top_p": 0.7}, [1, 3, 4], [0.4, 0.65, 0.8]),
        ({"top_p": 0.3}, [1], [0.4]),
        ({"top_k": 3, "top_p": 0.6}, [1, 3], [0.5, 0.8125]),
        ({"temperature": 0.5}, [1, 3, 4, 0, 2], np.cumsum([0.16, 0.0625, 0.0225, 0.01, 0.01]).tolist()),
    ],
)
def test_a_token_is_drawn_where_the_sum_passes_the_number(
    options: dict[str, float], order: list[int], sums: list[float]
) -> None:
    """By hand: the first token, greatest first, whose summed probability is over a share of what was kept."""
    tool = drawing()
    given = {name: np.array(value, DEFAULTS[name].dtype) for name, value in options.items()}
    logits = np.log(np.array([CHANCES, CHANCES[::-1]], np.float32))
    for place in range(40):
        wanted = finalizer(finalizer(11) + place) // 2**8 / 2**24 * sums[-1]
        feed = {"logits": logits, "place": np.array(place), "most": np.array(40), "seed": np.array(11), **given}
        (tokens,) = tool.run(["tokens"], feed)
        token = next(one for one, total in zip(order, sums, strict=True) if total > wanted)
        assert tokens[0, 0] == token
    (tokens,) = tool.run(["tokens"], {"logits": logits, "place": np.array(0), "most": np.array(40)})
    assert tokens.tolist() == [[1], [3]]


def model(encoder: int, mixer: str = "attention") -> Checkpoint:
    config = decoder_config(encoder, 1, MIXERS[mixer], head=LanguageHead(START, END, tied=False, bias=True))
    state = random_state(config, 8)
    return Checkpoint(config, state, TOKENIZER)


def eagerly(checkpoint: Checkpoint, read: list[list[int]], options: Decoding) -> Any:
    if checkpoint.config.encoder:
        return generate(checkpoint.to_torch(), read, options)
    return generate(checkpoint.to_torch(), None, options, prefixes=read)


@pytest.mark.parametrize(("encoder", "mixer"), [(1, "attention"), (0, "attention"), (0, "gru")])
def test_texts_are_those_that_pytorch_draws_alone_and_in_a_batch(encoder: int, mixer: str) -> None:
    checkpoint = model(encoder, mixer)
    tool = session(checkpoint)
    found = set()
    for seed, more in zip(SEEDS, ({}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 2.0}, {"top_k": 1}), strict=True):
        options = Decoding(max_new_tokens=12, sample=True, seed=seed, **more)
        sequences, scores = run(tool, READ, options)
        expected = eagerly(checkpoint, READ, options)
        assert texts(sequences) == texts(expected.sequences)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=2e-4, rtol=1e-4)
        assert texts(run(tool, READ[1:2], options)[0])[0] == texts(sequences)[1]
        found.add(tuple(texts(sequences)[0][0]))
    assert len(found) > 3
    greedy = texts(run(tool, READ, Decoding(max_new_tokens=12))[0])
    assert greedy == texts(eagerly(checkpoint, READ, Decoding(max_new_tokens=12)).sequences)
    assert greedy == texts(run(tool, READ, Decoding(max_new_tokens=12, sample=True, seed=3, top_k=1))[0])
    assert texts(run(tool, READ, Decoding(max_new_tokens=0, sample=True))[0]) == [[[]]] * 4


def test_what_is_drawn_has_the_probabilities_of_the_first_token() -> None:
    """A thousand seeds; a share may be 4 standard deviations from its probability."""
    checkpoint = model(0)
    tool = session(checkpoint)
    options = Decoding(max_new_tokens=1, sample=True)
    drawn = [run(tool, [[7]], replace(options, seed=seed)) for seed in range(1000)]
    tokens = np.array([sequences[0, 0, 0] for sequences, _ in drawn])
    chances = {int(token): np.exp(score[0, 0]) for token, (_, score) in zip(tokens, drawn, strict=True)}
    common = {token: chance for token, chance in chances.items() if chance > 0.02}
    assert len(common) > 5
    for token, chance in common.items():
        assert abs((tokens == token).mean() - chance) < 4 * np.sqrt(chance * (1 - chance) / 1000)


def test_the_four_inputs_may_be_left_out_and_are_not_folded_away() -> None:
    tool = session(model(1))
    assert {one.name for one in tool.get_inputs()} == set(INPUTS) - set(SAMPLING_INPUTS)
    assert {one.name for one in tool.get_overridable_initializers()} == set(SAMPLING_INPUTS)
    assert uniform(7, 3) == finalizer(finalizer(7) + 3) // 2**8 / 2**24
