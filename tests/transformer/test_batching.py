"""Batches of texts: every text once, within the limit, the same again under the same seed."""

import numpy as np
import pytest
import torch

from slimformer.transformer.batching import CHUNK_BATCHES, sorted_batches, tensors, token_batches

LENGTHS = np.random.default_rng(0).integers(1, 60, 5000).tolist()
TOKENS = 300


def test_sorted_by_hand() -> None:
    assert sorted_batches([5, 1, 3, 9, 2], tokens=6) == [[1, 4, 2], [0], [3]]
    assert sorted_batches([4, 4, 4], tokens=8) == [[0, 1], [2]]  # equal lengths in their order
    assert sorted_batches([], tokens=8) == []
    assert sorted_batches([0, 0], tokens=1) == [[0, 1]]


@pytest.mark.parametrize("tokens", [1, 59, TOKENS, 10**6])
def test_every_text_once_and_never_too_many_tokens(tokens: int) -> None:
    for batches in (token_batches(LENGTHS, tokens=tokens, seed=3, epoch=1), sorted_batches(LENGTHS, tokens=tokens)):
        assert sorted(i for batch in batches for i in batch) == list(range(len(LENGTHS)))
        assert all(batch for batch in batches)
        assert all(len(batch) == 1 or sum(LENGTHS[i] for i in batch) <= tokens for batch in batches)


def test_batches_are_nearly_full_and_of_like_lengths() -> None:
    batches = token_batches(LENGTHS, tokens=TOKENS, seed=0, epoch=0)
    assert len(LENGTHS) > 5 * CHUNK_BATCHES  # several chunks
    padded = sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in batches)
    shuffled = np.random.default_rng(0).permutation(LENGTHS).reshape(-1, 10)
    assert padded < 1.1 * sum(LENGTHS) < 10 * int(shuffled.max(1).sum()) / 1.5
    assert len(batches) < 1.2 * sum(LENGTHS) / TOKENS


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first = token_batches(LENGTHS, tokens=TOKENS, seed=0, epoch=0)
    assert token_batches(LENGTHS, tokens=TOKENS, seed=0, epoch=0) == first
    assert token_batches(LENGTHS, tokens=TOKENS, seed=0, epoch=1) != first
    assert token_batches(LENGTHS, tokens=TOKENS, seed=1, epoch=0) != first
    sizes = [LENGTHS[batch[0]] for batch in first]
    assert abs(float(np.corrcoef(sizes, np.arange(len(sizes)))[0, 1])) < 0.2  # long ones do not come last


def test_batches_mix_from_epoch_to_epoch() -> None:
    companions = [
        next(set(batch) for batch in token_batches(LENGTHS, tokens=TOKENS, seed=0, epoch=epoch) if 17 in batch)
        for epoch in range(5)
    ]
    assert set.intersection(*companions) == {17}


def test_tensors_by_hand() -> None:
    ids, mask = tensors([[7, 8, 9], [5], []], pad_id=3)
    assert ids.tolist() == [[7, 8, 9], [5, 3, 3], [3, 3, 3]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.int64)
    assert tensors([[1]], 0, device="meta")[0].is_meta
