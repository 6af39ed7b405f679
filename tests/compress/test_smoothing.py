"""Factors by hand and against float64; where they are put into what makes the channels, the float function stays."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from models import ABSENT, PRE, TOKENIZER, WRITERS, ragged, random_state, tiny_config
from torch import Tensor

from slimformer.compress.calibration import Batch
from slimformer.compress.smoothing import LEAST, factors, fold
from slimformer.transformer.blocks import in_blocks, packed_blocks, unpacked_blocks
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import FeedForwardConfig, LayerConfig, TransformerConfig
from slimformer.transformer.int8 import quantize_rows
from slimformer.transformer.layer_config import BLOCK_BITS, FLOAT32, INT8_STATIC
from slimformer.transformer.quantization import FormattedLinear, linear_names

ONES = [1.0, 1.0, 1.0]
# greatest inputs, greatest weights, strength, factors
BY_HAND = {
    "all into the weights": ([1.0, 4.0, 16.0], [2.0, 2.0, 2.0], 1.0, [4.0, 1.0, 0.25]),
    "the weights do not count then": ([1.0, 4.0, 16.0], [7.0, 1.0, 3.0], 1.0, [4.0, 1.0, 0.25]),
    "half of it": ([1.0, 4.0, 16.0], [3.0, 3.0, 3.0], 0.5, [2.0, 1.0, 0.5]),
    "a quarter of it": ([1.0, 16.0, 256.0], [3.0, 3.0, 3.0], 0.25, [2.0, 1.0, 0.5]),
    "half of the weights'": ([3.0, 3.0, 3.0], [1.0, 4.0, 16.0], 0.5, [0.5, 1.0, 2.0]),
    "all of the weights'": ([5.0, 1.0, 2.0], [1.0, 4.0, 16.0], 0.0, [0.25, 1.0, 4.0]),
    "three quarters of the weights'": ([2.0, 2.0, 2.0], [1.0, 16.0, 256.0], 0.25, [0.125, 1.0, 8.0]),
    "both": ([1.0, 4.0, 16.0], [16.0, 4.0, 1.0], 0.5, [4.0, 1.0, 0.25]),
    "one against the other": ([1.0, 4.0, 16.0], [1.0, 4.0, 16.0], 0.5, ONES),
    "one channel": ([9.0], [0.1], 0.5, [1.0]),
    "no inputs": ([0.0, 0.0, 0.0], [2.0, 2.0, 2.0], 1.0, ONES),
    "no inputs and no weights": ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.5, ONES),
    "no weights": ([1.0, 4.0, 16.0], [0.0, 0.0, 0.0], 0.5, [2.0, 1.0, 0.5]),
    # 0 and 1e-40 count as 1e-5 of 10: 1e-4, 10 and 1e-4 have the middle 10^(-7 / 3)
    "dead channels": ([0.0, 10.0, 1e-40], [1.0, 1.0, 1.0], 1.0, [10 ** (5 / 3), 10 ** (-10 / 3), 10 ** (5 / 3)]),
    "dead weights": ([1.0, 1.0, 1.0], [10.0, 0.0, 1e-40], 0.0, [10 ** (10 / 3), 10 ** (-5 / 3), 10 ** (-5 / 3)]),
    "all of them tiny": ([1e-40, 4e-40, 16e-40], [3.0, 3.0, 3.0], 0.5, [2.0, 1.0, 0.5]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_factors_by_hand(name: str) -> None:
    greatest, weights, strength, expected = BY_HAND[name]
    weight = torch.tensor([[0.1 * one for one in weights], [-one for one in weights]])
    found = factors(torch.tensor(greatest), weight, strength)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=0)  # 1e-40 has 5 digits


@pytest.mark.parametrize("strength", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_factors_are_the_formula(strength: float) -> None:
    random = np.random.default_rng(1)
    greatest, weight = np.exp(random.normal(size=9) * 2), random.normal(size=(5, 9)) * np.exp(random.normal(size=9))
    plain = np.abs(weight).max(0) ** (1 - strength) / greatest**strength
    found = factors(torch.from_numpy(greatest).float(), torch.from_numpy(weight).float(), strength)
    np.testing.assert_allclose(found.numpy(), plain / plain.prod() ** (1 / 9), rtol=1e-5)
    assert float(found.double().log().mean()) == pytest.approx(0, abs=1e-6)
    assert found.max() > 2 * found.min()


def test_what_factors_even_out() -> None:
    """At 1 the inputs' sizes, at 0 the weights', at a half either is as uneven as the other."""
    greatest, weight = torch.rand(8) + 0.1, torch.randn(6, 8)

    def sizes(strength: float) -> tuple[Tensor, Tensor]:
        factor = factors(greatest, weight, strength)
        return greatest * factor, (weight / factor).abs().amax(0)

    inputs, _ = sizes(1.0)
    torch.testing.assert_close(inputs, inputs[:1].expand(8))
    _, weights = sizes(0.0)
    torch.testing.assert_close(weights, weights[:1].expand(8))
    inputs, weights = sizes(0.5)
    torch.testing.assert_close(inputs / inputs[0], weights / weights[0])


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-20, 1e20, 3e38])
def test_factors_are_finite_and_above_0(size: float, strength: float) -> None:
    """Of sizes beside 1 and among each other; none is further than 1 / LEAST from another's."""
    for greatest, weights in (([size, 1.0], [1.0, size]), ([size, size], [size, 1.0]), ([1.0, size], [size, size])):
        found = factors(torch.tensor(greatest), torch.tensor([weights]), strength)
        assert bool((found.isfinite() & (found > 0)).all())
        assert float(found.max() / found.min()) <= 1.001 / LEAST


# --- fold ---

OTHERS = ("gelu_tanh", "silu", "tanh")
CONFIGS = {
    "encoder": tiny_config(),  # GELU, then ReLU
    "encoder, pre": replace(tiny_config(), **PRE),
    "other activations": tiny_config(layers=[LayerConfig(None, FeedForwardConfig(40, one)) for one in OTHERS]),
    "absent": tiny_config(layers=ABSENT),
    **WRITERS,
}
FIRST = ("*.qkv", "*.q", "*.kv", "*.inputs", "*.up")  # linears before a sub-layer's middle: some make channels
# which linears keep their factors; FFNs of models that write have ReLU
KEPT = {
    "encoder": (*FIRST, "encoder.0.ffn.down"),
    "encoder, pre": ("encoder.0.ffn.down",),
    "other activations": ("*",),
    "absent": (*FIRST, "encoder.0.ffn.down"),
    "post": FIRST,
    "own table": FIRST,
    "pre": ("*.kv",),
    "lstm": ("*.kv", "decoder.*.mixer.out"),
    "ssru": FIRST,
    "alone": FIRST,
    "alone, pre": (),
    "grouped": (*FIRST, "*.mixer.out", "*.cross.out"),
    "alone, grouped": (*FIRST, "*.mixer.out"),
}
SOURCES, TARGETS = ragged((5, 9, 2)), ragged((4, 1, 7), seed=1)


def is_one(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def in_form(weight: Tensor, bias: Tensor, form: str, factor: Tensor) -> FormattedLinear:
    """Rounded to nearest; only static linears have the factor."""
    if form == INT8_STATIC:
        integers, scale = quantize_rows(weight / factor, 8)
        return FormattedLinear(form, {"weight": integers, "scale": scale, "bias": bias, "factor": factor})
    most = 2 ** (BLOCK_BITS[form] - 1) - 1
    scale = in_blocks(weight).abs().amax(-1) / most
    integers = (in_blocks(weight) / scale[..., None]).round().flatten(1)
    return FormattedLinear(form, {"weight": packed_blocks(integers, BLOCK_BITS[form]), "scale": scale, "bias": bias})


def formatted_linears(checkpoint: Checkpoint, first: str) -> dict[str, FormattedLinear]:
    """Linears with factors from 0.4 to 2.7, the first ones of sub-layers in a format of their own; none in float."""
    random, done = torch.Generator().manual_seed(5), {}
    for name in linear_names(checkpoint.config):
        weight, bias = checkpoint.state[f"{name}.weight"], checkpoint.state[f"{name}.bias"]
        form = first if is_one(name, FIRST) else INT8_STATIC
        factor = torch.exp(2 * torch.rand(weight.shape[1], generator=random) - 1)
        if form != FLOAT32:
            done[name] = in_form(weight, bias, form, factor)
    return done


def stands_for(linear: FormattedLinear) -> Tensor:
    """The weight for inputs that were not multiplied by the factor."""
    weight, scale = linear.tensors["weight"], linear.tensors["scale"]
    if linear.form == INT8_STATIC:
        return weight * scale[:, None] * linear.tensors["factor"]
    return (unpacked_blocks(weight, BLOCK_BITS[linear.form]) * scale[..., None]).flatten(1)


def hidden(config: TransformerConfig, state: Mapping[str, Tensor], linears: Mapping[str, FormattedLinear]) -> Tensor:
    """What the float model with these weights computes: nothing in it rounds."""
    new = dict(state)
    for name, linear in linears.items():
        new |= {f"{name}.weight": stands_for(linear), f"{name}.bias": linear.tensors["bias"]}
    both = (*SOURCES, *TARGETS) if config.encoder and config.decoder else SOURCES
    with torch.inference_mode():
        return Batch(*both).run(Checkpoint(config, new, TOKENIZER).to_torch()).hidden


@pytest.mark.parametrize("first", [FLOAT32, INT8_STATIC, *BLOCK_BITS])
@pytest.mark.parametrize("kind", CONFIGS)
def test_folding_leaves_the_function_as_it_is(kind: str, first: str) -> None:
    config = CONFIGS[kind]
    checkpoint = Checkpoint(config, random_state(config), TOKENIZER)
    linears = formatted_linears(checkpoint, first)
    given = {name: dict(linear.tensors) for name, linear in linears.items()}
    before = hidden(config, checkpoint.state, linears)
    state, folded = fold(config, checkpoint.state, linears)
    torch.testing.assert_close(hidden(config, state, folded), before, atol=1e-5, rtol=1e-5)

    with_factor = {name for name, linear in linears.items() if "factor" in linear.tensors}
    gone = {name for name in with_factor if bool((folded[name].tensors["factor"] == 1).all())}
    kept = {name for name in with_factor if is_one(name, KEPT[kind])}
    assert gone == with_factor - kept
    assert all(torch.equal(folded[name].tensors["factor"], given[name]["factor"]) for name in kept)
    if gone:
        half = {
            name: replace(one, tensors={**given[name], "factor": folded[name].tensors["factor"]})
            for name, one in linears.items()
            if name in with_factor
        }
        without = hidden(config, checkpoint.state, {**linears, **half})  # what makes the channels unchanged
        assert (without - before).norm() > 0.01 * before.norm()


@pytest.mark.parametrize("first", [INT8_STATIC, *BLOCK_BITS])
@pytest.mark.parametrize("kind", ["encoder", "pre", "lstm"])
def test_integers_stay_and_scales_and_biases_take_the_factor(kind: str, first: str) -> None:
    checkpoint = Checkpoint(CONFIGS[kind], random_state(CONFIGS[kind]), TOKENIZER)
    linears = formatted_linears(checkpoint, first)
    _, folded = fold(checkpoint.config, checkpoint.state, linears)
    assert list(folded) == list(linears)
    for name, linear in linears.items():
        assert folded[name].form == linear.form
        assert folded[name].tensors.keys() == linear.tensors.keys()
        assert torch.equal(folded[name].tensors["weight"], linear.tensors["weight"])
        assert folded[name].tensors["weight"].dtype == linear.tensors["weight"].dtype
        assert folded[name].tensors["scale"].shape == linear.tensors["scale"].shape
    stack = "decoder" if checkpoint.config.decoder else "encoder"
    sub = "cross" if stack == "decoder" else "mixer"
    consumer, maker = f"{stack}.1.{sub}.out", f"{stack}.1.{sub}.{'kv' if sub == 'cross' else 'qkv'}"
    factor = linears[consumer].tensors["factor"]
    for part in ("scale", "bias"):
        old, new = linears[maker].tensors[part], folded[maker].tensors[part]
        values = len(factor)  # the last of queries, keys and values
        torch.testing.assert_close(new[-values:], torch.einsum("i...,i->i...", old[-values:], factor))
        assert torch.equal(new[:-values], old[:-values])


@pytest.mark.parametrize("kind", ["encoder, pre", "pre"])
def test_the_order_of_linears_does_not_count(kind: str) -> None:
    """What makes channels for one linear and takes those of a norm is looked at before and after it."""
    checkpoint = Checkpoint(CONFIGS[kind], random_state(CONFIGS[kind]), TOKENIZER)
    linears = formatted_linears(checkpoint, INT8_STATIC)
    state, folded = fold(checkpoint.config, checkpoint.state, linears)
    other, again = fold(checkpoint.config, checkpoint.state, dict(reversed(linears.items())))
    assert all(torch.equal(other[name], value) for name, value in state.items())
    for name, linear in folded.items():
        assert all(torch.equal(again[name].tensors[part], value) for part, value in linear.tensors.items())


@pytest.mark.parametrize("kind", ["encoder", "encoder, pre", "post"])
def test_what_is_given_is_not_changed(kind: str) -> None:
    checkpoint, twin = (Checkpoint(CONFIGS[kind], random_state(CONFIGS[kind]), TOKENIZER) for _ in range(2))
    linears, twins = (formatted_linears(one, INT8_STATIC) for one in (checkpoint, twin))
    state, folded = fold(checkpoint.config, checkpoint.state, linears)
    assert state is not checkpoint.state
    assert all(torch.equal(checkpoint.state[name], value) for name, value in twin.state.items())
    for name, linear in linears.items():
        assert all(torch.equal(value, twins[name].tensors[part]) for part, value in linear.tensors.items())
    changed = {name for name, value in state.items() if not torch.equal(value, twin.state[name])}
    norms = {
        f"encoder.{i}.{part}_norm.{own}" for i in (0, 1) for part in ("mixer", "ffn") for own in ("weight", "bias")
    }
    assert changed == (norms if kind == "encoder, pre" else set())
    assert any(not torch.equal(folded[name].tensors["scale"], linears[name].tensors["scale"]) for name in linears)


def test_without_factors_nothing_is_put_anywhere() -> None:
    checkpoint = Checkpoint(CONFIGS["pre"], random_state(CONFIGS["pre"]), TOKENIZER)
    linears = {
        name: FormattedLinear(one.form, {part: value for part, value in one.tensors.items() if part != "factor"})
        for name, one in formatted_linears(checkpoint, INT8_STATIC).items()
    }
    state, folded = fold(checkpoint.config, checkpoint.state, linears)
    assert folded == linears
    assert all(torch.equal(state[name], value) for name, value in checkpoint.state.items())
