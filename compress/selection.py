"""Which heads and neurons stay under a budget.

Every sub-layer offers some numbers of units, each with what is lost and what it costs; the losses add up and so do the
costs. Dynamic programming over the sub-layers finds the numbers with the smallest loss within the budget (Frantar &
Alistarh 2022, "SPDY", section 3.1: costs in whole steps of the budget, rounded up). Then, with the numbers fixed, units
of a sub-layer change places by its block of the Fisher information, which knows of units that stand in for each other
(Kwon et al. 2022, algorithm 2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from .units import Indices

Floats = NDArray[np.float64]
EXHAUSTIVE = 20_000  # sets of layers that are all tried; beyond, greedy
STEPS = 20_000  # into which a budget is cut


@dataclass(frozen=True)
class Offer:
    """What a sub-layer may be cut to.

    Attributes:
        counts: numbers of units, ascending.
        losses: what is lost with each.
        costs: what each costs, in any unit, at least 0.
    """

    counts: Sequence[int]
    losses: Sequence[float]
    costs: Sequence[float]


def choose_counts(offers: Mapping[str, Offer], budget: float) -> dict[str, int] | None:
    """The number of units of each sub-layer with the smallest sum of losses whose costs sum to at most `budget`.

    None where even the cheapest numbers cost more. Costs are rounded up to a twenty-thousandth of the budget each, so
    that of two choices that are closer than that the cheaper one may be taken.
    """
    best = np.zeros(STEPS + 1)  # by the steps that may be spent
    choices = []
    for offer in offers.values():
        steps = _steps(offer.costs, budget)
        totals = np.full((len(steps), STEPS + 1), np.inf)
        for row, step, loss in zip(totals, steps, offer.losses, strict=True):
            if step <= STEPS:
                row[step:] = best[: STEPS + 1 - step] + loss
        choices.append((steps, totals.argmin(0)))
        best = totals.min(0)
    left = STEPS
    if budget < 0 or not np.isfinite(best[left]):
        return None
    found = {}
    for (name, offer), (steps, choice) in zip(reversed(list(offers.items())), reversed(choices), strict=True):
        place = int(choice[left])
        found[name] = offer.counts[place]
        left -= int(steps[place])
    return {name: found[name] for name in offers}


def _steps(costs: Sequence[float], budget: float) -> NDArray[np.int64]:
    """Whole steps that costs take; more than there are where the budget does not hold them."""
    if budget <= 0:
        return np.where(np.asarray(costs) > budget, STEPS + 1, 0)
    shares = np.asarray(costs, np.float64) / budget * STEPS
    steps: NDArray[np.int64] = np.minimum(np.ceil(shares - 1e-6), STEPS + 1).astype(np.int64)
    return steps


def rearrange(fisher: Floats, kept: Indices) -> Indices:
    """Kept units, as many as given, such that no single swap lowers the cost of what is removed.

    Args:
        fisher: (U, U) mean products of mask gradients of one layer's units.
        kept: the units to start from.

    The cost of removing the set R is the sum of `fisher` over R x R; each round makes the best swap.
    """
    inside = np.array(sorted(kept), dtype=np.int64)
    outside = np.setdiff1d(np.arange(len(fisher)), inside)
    if not len(inside) or not len(outside):
        return tuple(map(int, inside))
    diagonal = np.diag(fisher)
    pull = fisher[:, outside].sum(1)
    slack = 1e-9 * float(diagonal.sum())
    for _ in range(4 * len(fisher)):
        back = diagonal[outside] - 2 * pull[outside]
        gone = diagonal[inside] + 2 * pull[inside]
        change = gone[:, None] + back[None, :] - 2 * fisher[np.ix_(inside, outside)]
        i, o = np.unravel_index(int(change.argmin()), change.shape)
        if change[i, o] >= -slack:
            break
        pull += fisher[:, inside[i]] - fisher[:, outside[o]]
        inside[i], outside[o] = outside[o], inside[i]
    return tuple(sorted(map(int, inside)))


def select_layers(fisher: Floats, count: int) -> Indices:
    """The `count` layers whose complement R has the smallest sum of `fisher` (L, L) over R x R.

    All sets are tried up to some twenty thousand of them; beyond, `rearrange` from the highest diagonal entries.
    """
    layers = range(len(fisher))
    if comb(len(fisher), count) > EXHAUSTIVE:
        return rearrange(fisher, tuple(map(int, np.argsort(-np.diag(fisher), kind="stable")[:count])))

    def lost(removed: Indices) -> float:
        return float(fisher[np.ix_(removed, removed)].sum())

    removed = min(combinations(layers, len(fisher) - count), key=lost)
    return tuple(layer for layer in layers if layer not in removed)
