"""Fragments of texts that imitate queries: a few neighbouring words, as people type them."""

from collections.abc import Sequence

import numpy as np


def fragments(texts: Sequence[str], *, share: float, words: tuple[int, int], seed: int) -> list[str]:
    """For about `share` of the texts, each drawn at most once a round, a run of words[0] to words[1] of its words.

    A share above 1 draws in rounds: 1.5 gives every text one fragment and half of them a second. Texts that are no
    longer than the fragment are passed over.
    """
    random = np.random.default_rng(seed)
    found: list[str] = []
    for round_share in [1.0] * int(share) + [share % 1]:
        drawn = random.random(len(texts)) < round_share
        for text, chosen in zip(texts, drawn, strict=True):
            count = int(random.integers(words[0], words[1] + 1))
            split = text.split()
            if chosen and len(split) > count:
                start = int(random.integers(0, len(split) - count + 1))
                found.append(" ".join(split[start : start + count]))
    return found
