"""The format of each linear, by what it costs in error and in measured time.

Every unit (a linear, or those of cross-attention that share a format) is tried in every candidate format alone: its
error is that of the last layer's tokens, and errors of many units add up as squares, so far as they are independent.
The search begins with the fastest format of each unit. While the error of all together is over the budget, the change
that takes away most squared error for a second of time is made: a greedy solution of the knapsack whose weights are
times (Dong et al. 2019, "HAWQ-V2", choose precisions by sensitivity and size in this way). All together are measured,
not added up: the sum only says how many changes to make before the next measurement.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Forms = dict[str, str]  # units and their formats


@dataclass(frozen=True)
class Candidate:
    """A unit in a format: the error that it makes alone, and the seconds that it takes."""

    error: float
    seconds: float


@dataclass(frozen=True)
class Choice:
    """What the search came to.

    Attributes:
        forms: the format of each unit.
        error: of all together, as measured.
        met: whether that is within the budget.
        measured: how many times all together were measured.
    """

    forms: Forms
    error: float
    met: bool
    measured: int


def choose(
    candidates: Mapping[str, Mapping[str, Candidate]], budget: float, measure: Callable[[Forms], float]
) -> Choice:
    """Give every unit the fastest format that the budget allows.

    Args:
        candidates: of each unit, by format.
        budget: greatest error of all together.
        measure: the error of units in their formats together.
    """
    forms = {name: min(own, key=lambda form: (own[form].seconds, own[form].error)) for name, own in candidates.items()}
    error, measured = measure(forms), 1
    while error > budget:
        wanted = _predicted(candidates, forms) * budget / error
        changed = False
        while (change := _best_change(candidates, forms)) is not None:
            forms, changed = {**forms, **change}, True
            if _predicted(candidates, forms) <= wanted:
                break
        if not changed:
            break
        error, measured = measure(forms), measured + 1
    return Choice(forms, error, error <= budget, measured)


def _predicted(candidates: Mapping[str, Mapping[str, Candidate]], forms: Forms) -> float:
    return math.sqrt(sum(candidates[name][form].error ** 2 for name, form in forms.items()))


def _best_change(candidates: Mapping[str, Mapping[str, Candidate]], forms: Forms) -> Forms | None:
    """The change with most squared error for the time.

    None with less error takes no more time: it would have been chosen before.
    """
    found = []
    for name, form in forms.items():
        now = candidates[name][form]
        for other, then in candidates[name].items():
            gain, time = now.error**2 - then.error**2, then.seconds - now.seconds
            if gain > 0:
                found.append((gain / time, gain, name, other))
    if not found:
        return None
    _, _, name, other = max(found)
    return {name: other}
