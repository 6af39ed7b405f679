"""Batches of texts by number of tokens, in order of length within chunks, shuffled by seed and epoch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .tokenizer import pad

CHUNK_BATCHES = 60


def token_batches(lengths: Sequence[int], *, tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of texts in batches of at most `tokens` valid tokens (one text at least): all texts, each once.

    Texts are shuffled, cut into chunks of about CHUNK_BATCHES batches, sorted by length within a chunk so that rows of
    a batch are alike, and the batches shuffled.
    """
    random = np.random.default_rng([seed, epoch])
    size = np.asarray(lengths)
    batches: list[list[int]] = []
    chunk: list[int] = []
    total = 0
    for i in random.permutation(len(size)):
        chunk.append(int(i))
        total += int(size[i])
        if total >= tokens * CHUNK_BATCHES:
            batches += _cut(chunk, size, tokens)
            chunk, total = [], 0
    batches += _cut(chunk, size, tokens)
    return [batches[i] for i in random.permutation(len(batches))]


def sorted_batches(lengths: Sequence[int], *, tokens: int) -> list[list[int]]:
    """The same without shuffling: for passes that only read."""
    return _cut(list(range(len(lengths))), np.asarray(lengths), tokens)


def _cut(chunk: list[int], size: "np.ndarray[tuple[int], np.dtype[np.int64]]", tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    held = tokens + 1
    for i in sorted(chunk, key=lambda i: int(size[i])):
        if held + int(size[i]) > tokens:
            batches.append([])
            held = 0
        batches[-1].append(i)
        held += int(size[i])
    return batches


def tensors(ids: Sequence[Sequence[int]], pad_id: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Token ids of some texts -> input_ids and attention_mask (B, T) on a device."""
    rows, mask = pad(ids, pad_id)
    return torch.from_numpy(rows).to(device), torch.from_numpy(mask).to(device)
