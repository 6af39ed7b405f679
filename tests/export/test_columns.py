"""Columns of tokens read in parts: whatever the parts and wherever the padding, as if they were read at once."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from models import MIXERS, decoder_config, ragged
from stepping import Driver
from writing import END, START, writer

from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import LanguageHead, LayerConfig
from slimformer.transformer.quantization import quantized

KINDS = {
    **{name: (name, name) for name in ("attention", "grouped", "lstm", "ssru")},
    "mixed": ("absent", "lstm", "attention", "ssru"),
}

PARTS = {"one by one": list(range(13)), "two": [0, 5, 12], "three": [0, 1, 9, 12], "once": [0, 12]}


def model(kind: str) -> Checkpoint:
    config = decoder_config(0, 1, head=LanguageHead(START, END, tied=False, bias=True))
    layers = tuple(LayerConfig(MIXERS[name], config.decoder[0].ffn) for name in KINDS[kind])
    return writer(replace(config, decoder=layers), 5, 1.0)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("side", ["right", "left", "between"])
@pytest.mark.parametrize("name", KINDS)
def test_parts_give_what_one_pass_gives(name: str, side: str, parts: str) -> None:
    """A part may have no token of a row, and the first none at all."""
    checkpoint = model(name)
    driver = Driver(checkpoint)
    ids, mask = ragged([1, 3, 12, 7], side=side, columns=12)
    edges = PARTS[parts]
    found = np.concatenate([driver.feed(ids[:, a:b], mask[:, a:b]) for a, b in pairwise(edges)], 1)
    with torch.inference_mode():
        expected = checkpoint.to_torch()(ids, mask).result.numpy()
    np.testing.assert_allclose(found[mask.bool()], expected, atol=1e-5, rtol=1e-5)


def test_a_part_of_padding_alone_changes_nothing() -> None:
    checkpoint = model("mixed")
    ids, mask = ragged([4, 2], side="left", columns=4)
    plain, padded = Driver(checkpoint), Driver(checkpoint)
    padded.feed(np.full((2, 3), 9), np.zeros((2, 3), np.int64))
    expected, found = (driver.feed(ids, mask) for driver in (plain, padded))
    np.testing.assert_allclose(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


def test_int8_ranges_are_those_of_the_tokens_alone() -> None:
    """Other ids at padding change not a bit."""
    driver = Driver(quantized(model("attention"), bits=7))
    ids, mask = ragged([3, 9, 5], side="left", columns=9)
    one = driver.feed(ids, mask)
    driver.given = {}
    other = driver.feed(torch.where(mask.bool(), ids, 17), mask)
    np.testing.assert_array_equal(one[mask.bool()], other[mask.bool()])
