"""The parts that the examples of one step are cut into, when they are too many to go through the model at once.

Batches whose gradients are added up are parts, and so is each process's share of a batch. Each part's loss is its share
of the loss of all: what a mean over texts or tokens comes to is weighed by the part's share of these, and a loss that
sets texts beside each other sees the rows of all parts, of which only the part's own have a gradient (Gao et al. 2021,
"Scaling deep contrastive learning batch size under memory limited setup"). So the cut changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from .processes import ALONE, Processes
from .randomness import random_states, restore_random


class Part(Sequence[int]):
    """Examples of one step that go through the model together.

    Attributes:
        counted: false where a batch has no example for this process: it then goes through one whose loss weighs 0,
            because all processes have to do the same.
    """

    def __init__(
        self,
        examples: Sequence[int],
        whole: Sequence[int] | None = None,
        *,
        counted: bool = True,
        processes: Processes = ALONE,
    ) -> None:
        self._examples = list(examples)
        self._whole = self._examples if whole is None else list(whole)
        self.counted, self._processes = counted, processes
        self.seen: list[Tensor] | None = None  # rows of each call of `joined`, while they are collected
        self.known: list[tuple[Tensor, Tensor]] | None = None  # rows before and behind them, once they are
        self._call = 0

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._examples[place]

    def __len__(self) -> int:
        return len(self._examples)

    def __iter__(self) -> Iterator[int]:
        return iter(self._examples)

    @property
    def whole(self) -> list[int]:
        """All examples of the step, part after part; while rows are collected, this part's alone."""
        return self._whole if self.seen is None else self._examples

    @property
    def share(self) -> float:
        """Of the step's examples."""
        return len(self) / len(self.whole)

    def share_of(self, weights: Sequence[float]) -> float:
        """Of the sum of the examples' weights (each example's tokens, say) over the step; 0 where that is 0."""
        total = sum(weights[i] for i in self.whole)
        return sum(weights[i] for i in self) / total if total else 0.0

    def joined(self, rows: Tensor) -> Tensor:
        """Rows of all examples of the step, in the order of `whole`; of them `rows`, this part's, have a gradient."""
        if self.seen is not None:
            self.seen.append(rows.detach())
            return rows
        if self.known is not None and self.counted:
            before, behind = self.known[self._call]
            self._call += 1
            return torch.cat([before, rows, behind])
        if self.known is not None:
            return rows
        others = self._processes.gathered(rows.detach() if self.counted else rows.detach()[:0])
        if not self.counted:
            return rows
        others[self._processes.rank] = rows
        return torch.cat(others)

    def coupled(self, loss: Tensor) -> Tensor:
        """A loss of all joined rows as this part's: its gradient whole, of its value the part's share."""
        return loss - (1 - self.share) * loss.detach()


def parts_of(batches: Sequence[Sequence[int]], processes: Processes) -> list[Part]:
    """This process's part of each of a step's batches: every n-th example of one, from the one that its rank says."""
    cut = [[list(batch[rank :: processes.number]) for rank in range(processes.number)] for batch in batches]
    whole = [one for batch in cut for examples in batch for one in examples]
    parts = []
    for batch, examples in zip(batches, (batch[processes.rank] for batch in cut), strict=True):
        if examples:
            parts.append(Part(examples, whole, processes=processes))
        else:
            parts.append(Part(batch[:1], counted=False, processes=processes))
    return parts


def collect(parts: Sequence[Part], loss: Callable[[Part], object], processes: Processes) -> None:
    """Let each part know the rows that its loss will want of the others: all run once, without gradients.

    Random states are put back, so that dropout then falls on the same places.
    """
    before = random_states()
    with torch.no_grad():
        for part in parts:
            part.seen = []
            loss(part)
    restore_random(before)
    seen = [part.seen or [] for part in parts]
    for part in parts:
        part.seen, part.known = None, []
    for call in range(len(seen[0])):
        own = [rows[call] if part.counted else rows[call][:0] for part, rows in zip(parts, seen, strict=True)]
        pieces = [piece for rows in own for piece in processes.gathered(rows)]
        none = own[0][:0]
        for number, part in enumerate(parts):
            place = number * processes.number + processes.rank
            assert part.known is not None
            part.known.append((torch.cat([none, *pieces[:place]]), torch.cat([*pieces[place + 1 :], none])))
