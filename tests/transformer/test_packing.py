"""Packing by hand: where each token of a mask stands."""

import pytest
import torch
from torch import Tensor

from slimformer.transformer.packing import Packing

# mask, flat, positions, lengths, packed place of each non-empty row's first token
CASES = {
    "whole": ([[1, 1], [1, 1]], [0, 1, 2, 3], [0, 1, 0, 1], [2, 2], {0: 0, 1: 2}),
    "right": ([[1, 1, 0], [1, 0, 0]], [0, 1, 3], [0, 1, 0], [2, 1], {0: 0, 1: 2}),
    "left": ([[0, 1, 1], [0, 0, 1]], [1, 2, 5], [0, 1, 0], [2, 1], {0: 0, 1: 2}),
    "between": ([[1, 0, 1], [0, 1, 0]], [0, 2, 4], [0, 1, 0], [2, 1], {0: 0, 1: 2}),
    "empty first": ([[0, 0], [1, 1], [0, 1]], [2, 3, 5], [0, 1, 0], [0, 2, 1], {1: 0, 2: 2}),
    "empty middle and last": ([[1, 1], [0, 0], [0, 1], [0, 0]], [0, 1, 5], [0, 1, 0], [2, 0, 1, 0], {0: 0, 2: 2}),
    "all empty": ([[0, 0], [0, 0]], [0], [0], [0, 0], {}),
    "one": ([[1]], [0], [0], [1], {0: 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str) -> None:
    mask, flat, positions, lengths, first = CASES[name]
    packing = Packing.from_mask(torch.tensor(mask))
    assert packing.mask.tolist() == [[bool(value) for value in row] for row in mask]
    assert packing.flat.tolist() == flat
    assert packing.positions.tolist() == positions
    assert packing.lengths.tolist() == lengths
    assert {row: int(packing.first[row]) for row in first} == first
    assert packing.slots.shape == packing.mask.shape
    assert 0 <= int(packing.slots.min()) <= int(packing.slots.max()) < len(flat)
    assert 0 <= int(packing.first.min()) <= int(packing.first.max()) < len(flat)


def test_any_nonzero_value_is_a_token() -> None:
    assert Packing.from_mask(torch.tensor([[2.0, 0.0, -1.0]])).flat.tolist() == [0, 2]


@pytest.mark.parametrize("name", [name for name in CASES if name != "all empty"])
def test_rows_and_tokens_are_inverse(name: str) -> None:
    mask = torch.tensor(CASES[name][0]).bool()
    packing = Packing.from_mask(mask)
    rows = torch.randn(*mask.shape, 3)
    tokens = packing.pack(rows)
    assert torch.equal(tokens, rows[mask])
    assert torch.equal(packing.pack(packing.rows_of(tokens)), tokens)
    assert torch.equal(packing.rows_of(tokens)[mask], rows[mask])
    assert torch.equal(packing.padded(tokens), rows * mask[..., None])


def test_pack_takes_any_trailing_axes() -> None:
    packing = Packing.from_mask(torch.tensor([[0, 1], [1, 1]]))
    ids = torch.tensor([[7, 8], [9, 10]])
    assert packing.pack(ids).tolist() == [8, 9, 10]
    assert packing.pack(ids[..., None, None]).shape == (3, 1, 1)


def naive(mask: Tensor) -> tuple[list[int], list[int]]:
    flat, positions = [], []
    for row, values in enumerate(mask.tolist()):
        for column, value in enumerate(values):
            if value:
                flat.append(row * len(values) + column)
                positions.append(sum(values[:column]))
    return flat, positions


def test_equals_a_loop_on_random_masks() -> None:
    for seed in range(20):
        mask = (torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) > 0.5).long()
        packing = Packing.from_mask(mask)
        assert (packing.flat.tolist(), packing.positions.tolist()) == naive(mask)


def test_padding_gets_no_gradient() -> None:
    packing = Packing.from_mask(torch.tensor([[1, 0, 1], [0, 0, 0]]))
    tokens = torch.ones(2, 1, requires_grad=True)
    packing.padded(tokens).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.tolist() == [[1.0], [1.0]]
