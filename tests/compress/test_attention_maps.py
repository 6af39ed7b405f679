"""Attention maps: a loop over texts, heads and pairs, padding without effect, unlike heads refused."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from slimformer.compress.attention_maps import attention_loss, check_maps
from slimformer.transformer.config import AttentionConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.packing import Packing

LENGTHS = [3, 1, 5]
OWN, OTHER = AttentionConfig(4, 3, group=2), AttentionConfig(4, 5)


def packing(padded: int = 0) -> Packing:
    """Of rows of 3, 1 and 5 tokens, with columns of padding on both sides."""
    mask = torch.zeros(3, 5 + 2 * padded, dtype=torch.int64)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[padded : padded + length] = 1
    return Packing.from_mask(mask)


def qkv(config: AttentionConfig, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(9, config.width + 2 * config.key_width, dtype=torch.float64, generator=random)


def scores(tokens: np.ndarray, config: AttentionConfig, head: int) -> np.ndarray:
    """Of one head and text, group by group."""
    width, group = config.head_width, head // config.group
    q = tokens[:, head * width : (head + 1) * width]
    k = tokens[:, config.width + group * width : config.width + (group + 1) * width]
    return q @ k.T / math.sqrt(width)


def by_loop(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ends = np.cumsum([0, *LENGTHS])
    found = []
    for start, end in pairwise(ends):
        for head in range(4):
            own, other = (scores(one[start:end].numpy(), of, head) for one, of in ((ours, OWN), (theirs, OTHER)))
            found += ((own - other) ** 2).flatten().tolist()
    return float(np.mean(found))


@pytest.mark.parametrize("padded", [0, 100])
def test_the_loss_is_that_of_a_loop_whatever_the_padding(padded: int) -> None:
    ours, theirs = qkv(OWN, 1), qkv(OTHER, 2)
    loss = attention_loss(ours, theirs, packing(padded), OWN, OTHER)
    assert loss.item() == pytest.approx(by_loop(ours, theirs), rel=1e-12)
    assert attention_loss(theirs, theirs, packing(padded), OTHER, OTHER).item() == 0


def test_gradients() -> None:
    theirs = qkv(OTHER, 2)
    own = qkv(OWN, 1).requires_grad_()
    assert gradcheck(lambda x: attention_loss(x, theirs, packing(1), OWN, OTHER), (own,))
    attention_loss(own, theirs, packing(1), OWN, OTHER).backward()
    assert own.grad is not None
    assert own.grad[:, OWN.width + OWN.key_width :].abs().max() == 0  # values have no part in scores


def test_unlike_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"the student has 2, of the teacher 4: take relations"):
        check_maps(AttentionConfig(2, 3), OTHER)
    check_maps(OWN, OTHER)
