"""Which heads and neurons stay under a cost budget.

Kwon et al. 2022, section 4: with the Fisher information taken as diagonal, removing a set of units costs the sum of
their scores, so that for every number of kept heads the best ones stay and the rest of the budget goes to the best
neurons; the number with the smallest sum of removed scores wins (algorithm 1). Then, one sub-layer after the other and
with the counts fixed, units change places by the sub-layer's whole block of the Fisher information, which knows of
units that stand in for each other (algorithm 2).

Neurons go in chunks of `multiple`, so that every FFN width is one of its multiples (or untouched): kernels run at such
widths. Chunks are cut from each FFN's neurons in order of score, so their scores per neuron fall and the best chunks
overall are the first ones of every FFN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from .units import Indices

Floats = NDArray[np.float64]
EXHAUSTIVE = 20_000  # sets of layers that are all tried; beyond, greedy


@dataclass(frozen=True)
class Selection:
    """Kept heads of every attention, neurons of every FFN, ascending; the sum of the scores of what was not kept."""

    heads: tuple[Indices, ...]
    neurons: tuple[Indices, ...]
    lost: float


@dataclass(frozen=True)
class _Chunk:
    sublayer: int
    units: Indices
    score: float
    cost: int

    @property
    def density(self) -> float:
        return self.score / self.cost


def select_units(
    heads: Sequence[Floats],
    neurons: Sequence[Floats],
    head_costs: Sequence[int],
    neuron_cost: int,
    budget: int,
    multiple: int = 1,
) -> Selection:
    """Kept units whose cost is within `budget` and whose removed scores sum to as little as the method finds.

    Args:
        heads: scores (H,) of each attention's heads, at least 0.
        neurons: scores (F,) of each FFN's neurons.
        head_costs: cost of one head of each attention.
        neuron_cost: cost of one neuron.
        budget: highest total cost.
        multiple: FFN widths are cut to multiples of it.
    """
    total = sum(float(scores.sum()) for scores in [*heads, *neurons])
    ranked = sorted(_head_chunks(heads, head_costs), key=_order)
    chunks = sorted(_neuron_chunks(neurons, neuron_cost, multiple), key=_order)
    best: tuple[float, list[_Chunk]] = (-1.0, [])
    for count in range(len(ranked) + 1):
        left = budget - sum(head.cost for head in ranked[:count])
        if left < 0:
            break
        chosen = ranked[:count] + _fill(chunks, left)
        value = sum(chunk.score for chunk in chosen)
        if value > best[0]:
            best = (value, chosen)
    kept_heads: list[list[int]] = [[] for _ in heads]
    kept_neurons: list[list[int]] = [[] for _ in neurons]
    known = set(map(id, ranked))
    for chunk in best[1]:
        (kept_heads if id(chunk) in known else kept_neurons)[chunk.sublayer].extend(chunk.units)
    return Selection(_ascending(kept_heads), _ascending(kept_neurons), total - max(best[0], 0.0))


def _order(chunk: _Chunk) -> tuple[float, int]:
    return -chunk.density, chunk.sublayer


def _ascending(kept: list[list[int]]) -> tuple[Indices, ...]:
    return tuple(tuple(sorted(units)) for units in kept)


def _head_chunks(heads: Sequence[Floats], costs: Sequence[int]) -> list[_Chunk]:
    return [
        _Chunk(attention, (unit,), float(score), cost)
        for attention, (scores, cost) in enumerate(zip(heads, costs, strict=True))
        for unit, score in enumerate(scores)
    ]


def _neuron_chunks(neurons: Sequence[Floats], cost: int, multiple: int) -> list[_Chunk]:
    chunks = []
    for ffn, scores in enumerate(neurons):
        order = np.argsort(-scores, kind="stable")
        for start in range(0, len(order), multiple):
            units = order[start : start + multiple]
            chunks.append(_Chunk(ffn, tuple(map(int, units)), float(scores[units].sum()), cost * len(units)))
    return chunks


def _fill(chunks: Sequence[_Chunk], budget: int) -> list[_Chunk]:
    """The densest chunks that fit; after the first one of an FFN that does not, no more of that FFN."""
    chosen, closed = [], set()
    for chunk in chunks:
        if chunk.sublayer in closed:
            continue
        if chunk.cost > budget:
            closed.add(chunk.sublayer)
            continue
        chosen.append(chunk)
        budget -= chunk.cost
    return chosen


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
