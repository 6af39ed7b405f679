"""Several teachers as one: what they give is averaged, and the student learns that.

Of classifiers it is the mean of their chances (Hinton et al. 2015, section 3), as logits. Vectors of embedders, of any
widths, stand beside each other at unit length: the cosine of two texts is then the mean of the teachers' cosines. So a
student learns similarities from them, but no vectors. Of the inside, the first teacher's alone is learnt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import ClassificationHead, EmbeddingHead
from ..transformer.errors import InputError
from .teacher import Targets

Floats = NDArray[np.float32]


def joined(targets: Sequence[Targets], *, classifies: bool) -> Targets:
    """What all teachers say of the same texts; the first one's tokens."""
    if len(targets) == 1:
        return targets[0]
    every = [one.results.astype(np.float64) for one in targets]
    results = _mean_chances(every) if classifies else _beside(every)
    return replace(targets[0], results=results, reused=all(one.reused for one in targets))


def check_teachers(teachers: Sequence[Checkpoint]) -> None:
    """Raise InputError where teachers cannot be asked for the same."""
    first = teachers[0]
    for number, other in enumerate(teachers[1:], start=1):
        if other.tokenizer != first.tokenizer:
            raise InputError(
                f"distill: teacher {number} has not the first one's vocabulary: all have to read the same ids"
            )
        heads = [one.config.head for one in (first, other)]
        embeds = all(isinstance(head, EmbeddingHead) for head in heads)
        if not embeds and (heads[0] != heads[1] or not isinstance(heads[1], ClassificationHead)):
            raise InputError(
                f"distill: teacher {number} gives something else than the first: embeddings, or other labels"
            )


def _mean_chances(logits: Sequence[NDArray[np.float64]]) -> Floats:
    """(n, C) each -> the log of the mean of their softmax."""
    chances = np.stack([log_softmax(one, axis=1) for one in logits])
    mean: Floats = (logsumexp(chances, axis=0) - np.log(len(logits))).astype(np.float32)
    return mean


def _beside(vectors: Sequence[NDArray[np.float64]]) -> Floats:
    """(n, E) each -> (n, sum of E), of unit length."""
    parts = [one / np.linalg.norm(one, axis=1, keepdims=True).clip(1e-12) for one in vectors]
    beside: Floats = (np.concatenate(parts, 1) / np.sqrt(len(vectors))).astype(np.float32)
    return beside
