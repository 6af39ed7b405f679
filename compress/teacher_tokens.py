"""The teacher's distribution of every token that the student learns to write, computed once and read from disk.

Of a vocabulary of 8,000 the whole would take gigabytes. Kept are the likeliest tokens and their chances; what is left
is the chance of any other token (`losses.likeliest_loss`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..transformer.batching import sorted_batches
from ..transformer.checkpoint import Checkpoint
from ..transformer.progress import Progress
from ..transformer.training import products
from ..transformer.translation import TokenPair, forced_logits
from .teacher import PASS_TOKENS, array_at, digest, kept

LIKELIEST = 32
PLACES, CHANCES = "likeliest.npy", "chances.npy"


@dataclass(frozen=True, eq=False)
class TokenTargets:
    """What the teacher holds likely at each token of each pair's target, given those before it.

    Attributes:
        places: (N, K) token ids, likeliest first, int32; target after target.
        chances: (N, K) log probabilities of these at the temperature, float32.
        starts: (n + 1,) first token of each target, and N.
    """

    places: NDArray[np.int32]
    chances: NDArray[np.float32]
    starts: NDArray[np.int64]
    reused: bool

    def of(self, pairs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, K) ids and log probabilities of some pairs, one after the other, as `forced_logits` has them."""
        rows = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in pairs])
        return torch.from_numpy(self.places[rows].astype(np.int64)), torch.from_numpy(self.chances[rows])


def teach_tokens(
    teacher: Checkpoint,
    pairs: Sequence[TokenPair],
    *,
    rows: int,
    temperature: float,
    precision: str,
    folder: Path | None,
    device: str,
    progress: Progress,
) -> TokenTargets:
    """The teacher's distributions, from `folder` where they are there already.

    Args:
        teacher: a model that writes.
        pairs: token ids of sources (none are looked at for a language model) and targets.
        rows: of the vocabulary, from its first; the chances of these are those of a choice among them alone.
        temperature: of the softmax.
        precision: of products, as in `TrainingOptions`.
        folder: where to keep them; None: in memory.
        device: of the teacher.
        progress: told of the texts done.
    """
    starts = np.cumsum([0, *(len(target) for _, target in pairs)]).astype(np.int64)
    shape = int(starts[-1]), min(LIKELIEST, rows)

    def compute(place: Path | None) -> list[Any]:
        places = array_at(place, PLACES, shape, np.int32)
        chances = array_at(place, CHANCES, shape, np.float32)
        model = teacher.to_torch().to(device)
        progress.start("the teacher's distributions", len(pairs), "texts")
        for batch in sorted_batches([len(source) + len(target) for source, target in pairs], tokens=PASS_TOKENS):
            with torch.inference_mode(), products(precision):
                logits, _ = forced_logits(model, [pairs[i] for i in batch], device)
                found = (logits[:, :rows] / temperature).log_softmax(1).topk(shape[1])
            places_of = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in batch])
            places[places_of], chances[places_of] = found.indices.cpu().numpy(), found.values.cpu().numpy()
            progress.advance(len(batch))
        progress.done()
        return [places, chances]

    seen = digest(teacher, [ids for pair in pairs for ids in pair])
    name = f"tokens-{seen}-{LIKELIEST}-{rows}-{temperature:g}-{precision}"
    (places, chances), reused = kept(None if folder is None else folder / name, (PLACES, CHANCES), compute)
    return TokenTargets(places, chances, starts, reused)
