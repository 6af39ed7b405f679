"""Which layers, heads, neurons and channels of a model stay within a budget, and whether other texts would say so too.

Two halves of the calibration examples decide once more, each by itself, on the numbers of units that were chosen. The
share of the kept units on which they differ falls as one over the root of the examples, which gives the share for all
examples and how many would be enough.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..transformer.config import TransformerConfig
from ..transformer.errors import InputError
from .costs import Costs
from .criteria import CRITERIA, MAGNITUDE, SURGEON, Examination, Ladders, tried
from .ladders import Ladder
from .selection import Offer, choose_counts
from .surgery import remove_from
from .units import Indices, Kept, Sublayer, sublayers


@dataclass(frozen=True)
class Agreement:
    """Of two decisions by other examples.

    Attributes:
        examples: of each.
        share: of the kept heads and neurons on which they agree.
    """

    examples: int
    share: float

    def enough(self, wanted: float) -> int:
        """How many examples would agree on a share."""
        return max(1, math.ceil(self.examples * ((1 - self.share) / (1 - wanted)) ** 2))

    def to_dict(self, wanted: float) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "examples": self.examples,
            "share": round(self.share, 3),
            "wanted": wanted,
            "examples_enough": self.enough(wanted),
        }

    def refuse(self, wanted: float) -> None:
        """Raise InputError where the share is less than the one wanted."""
        if self.share < wanted:
            raise InputError(
                f"prune: {self.examples} calibration examples are too few to decide by: two decisions by so many "
                f"others would agree on {100 * self.share:.0f} % of the heads and neurons that stay; with some "
                f"{self.enough(wanted)} on {100 * wanted:.0f} %; give more texts and raise samples, or lower agreement"
            )


@dataclass(frozen=True)
class Decision:
    """What may go of a model whose layers and channels are chosen.

    Attributes:
        seen: the model, examined.
        layers: for each stack those that stay.
        channels: those that stay; None: all.
        importance: the criterion of heads and neurons.
        multiple: FFN widths are cut to multiples of it.
    """

    seen: Examination
    layers: Mapping[str, Indices]
    channels: Indices | None
    importance: str
    multiple: int

    @property
    def whole(self) -> Kept:
        """All units of these layers and channels."""
        everything = Kept.everything(self.config, self.layers)
        return Kept(everything.layers, everything.units, self.channels)

    @property
    def config(self) -> TransformerConfig:
        """Of the model as it is."""
        return self.seen.checkpoint.config

    @cached_property
    def narrow(self) -> TransformerConfig:
        """The same with the channels that stay."""
        if self.channels is None:
            return self.config
        everything = Kept.everything(self.config)
        return remove_from(self.seen.checkpoint, Kept(everything.layers, everything.units, self.channels)).config

    @cached_property
    def estimated(self) -> Ladders:
        """In which order units go, and what the criterion says is lost."""
        return CRITERIA[self.importance](self.seen)

    @cached_property
    def ladders(self) -> Ladders:
        """In which order units go, and what is lost: of the surgeon what is measured."""
        return tried(self.seen, self.estimated) if self.importance == SURGEON else self.estimated

    @cached_property
    def _halves(self) -> list[Ladders]:
        """The same by either half of the examples."""
        return [CRITERIA[self.importance](part) for part in self.seen.parts]

    def within(self, costs: Costs, budget: float, *, estimate: bool = False) -> Kept | None:
        """The units that stay within a budget; None where it does not even hold the layers without units.

        `estimate`: by what the criterion says is lost, nothing being measured.
        """
        subs = [sub for sub in sublayers(self.config) if sub.name in self.whole.units]
        left = budget - costs.without_units(self.whole.layers)
        if sum(costs.of(sub, sub.count) for sub in subs) <= left:
            return self.whole
        ladders = self.estimated if estimate else self.ladders
        counts = choose_counts({sub.name: self._offer(sub, ladders[sub.name], costs) for sub in subs}, left)
        if counts is None:
            return None
        units = {name: ladders[name].kept(count) for name, count in counts.items()}
        return Kept(self.whole.layers, units, self.channels)

    def least(self, costs: Costs) -> float:
        """What the cheapest model costs that has a unit."""
        subs = [sub for sub in sublayers(self.config) if sub.name in self.whole.units]
        units = [costs.of(sub, min(count for count in self._counts(sub) if count)) for sub in subs]
        return costs.without_units(self.whole.layers) + min(units, default=0.0)

    def agreement(self, kept: Kept) -> Agreement | None:
        """How far decisions by other examples agree on the kept units; None where no data or no choice was involved."""
        counts = {sub.name: len(kept.units.get(sub.name, ())) for sub in sublayers(self.config)}
        cut = {sub.name for sub in sublayers(self.config) if 0 < counts[sub.name] < sub.count}
        if self.importance == MAGNITUDE or not cut:
            return None
        kept_by = [{(name, unit) for name in cut for unit in half[name].kept(counts[name])} for half in self._halves]
        differing = 1.0 if len(kept_by) < 2 else 1 - len(kept_by[0] & kept_by[1]) / len(kept_by[0])
        return Agreement(self.seen.rows, 1 - differing / math.sqrt(2))

    def _offer(self, sub: Sublayer, ladder: Ladder, costs: Costs) -> Offer:
        counts = self._counts(sub)
        losses = [float(ladder.losses[count]) for count in counts]
        return Offer(counts, losses, [costs.of(sub, count) for count in counts])

    def _counts(self, sub: Sublayer) -> list[int]:
        """Numbers of units that may stay."""
        step = self.multiple if sub.part == "ffn" else 1
        return [*range(0, sub.count, step), sub.count]
