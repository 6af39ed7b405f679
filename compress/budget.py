"""What the user allows to be lost, and whether the measured interval proves that no more was."""

import re
from dataclasses import dataclass

from ..transformer.errors import InputError
from ..transformer.statistics import Interval


@dataclass(frozen=True)
class MaxDrop:
    """The greatest drop of the deciding metric: points, or per cent of the original's value."""

    value: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str | float) -> "MaxDrop":
        """`1`, `1pt` (points) or `2%` (of the original's value)."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(pt|%)?\s*", str(text))
        if found is None:
            raise InputError(f"--max-drop is {text!r}; write points as 1 or 1pt, or a share of the original as 2%")
        return cls(float(found[1]), relative=found[2] == "%")

    def points(self, original: float) -> float:
        """The drop in points for an original's value in points."""
        return self.value * original / 100 if self.relative else self.value

    def held(self, interval: Interval, original: float) -> bool:
        """Whether the one-sided 95 % bound of candidate - original stays within."""
        return interval.one_sided_low >= -self.points(original)
