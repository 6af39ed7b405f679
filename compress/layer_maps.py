"""Which layer of the teacher each layer of a student learns from: by a rule, or by a search.

Of M layers of the student and N of the teacher, "even" pairs layer i, from 1, with floor(i N / M) (Jiao et al. 2020,
section 3.1), "top" with i + N - M. "search" takes the rising map under which the states of the student as it begins are
nearest to the teacher's by centered kernel alignment, found by dynamic programming over all maps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transformer.batching import sorted_batches, tensors
from ..transformer.checkpoint import Checkpoint
from ..transformer.errors import InputError
from .losses import cka_loss
from .teacher import PASS_TOKENS

LAST, EVEN, TOP, SEARCH = RULES = ("last", "even", "top", "search")
NONE = -1  # in a map that is given: the layer learns from none
SEARCHED = 128  # texts

LayerMap = tuple[int, ...]


def map_by_rule(rule: str, layers: int, others: int) -> LayerMap:
    """The teacher's layer, from 0, of each of the student's, by "even" or "top".

    Raises:
        InputError: the student has more layers.
    """
    if layers > others:
        raise InputError(
            f"distill: the student has {layers} layers, the teacher {others}: give the layers to learn from, "
            f"each layer's own ({NONE} for none)"
        )
    if rule == TOP:
        return tuple(range(others - layers, others))
    return tuple((i + 1) * others // layers - 1 for i in range(layers))


def check_map(given: Sequence[int], layers: int, others: int) -> LayerMap:
    """A map that was given.

    Raises:
        InputError: it has not a layer for each of the student's, or one that the teacher has not.
    """
    if len(given) != layers:
        raise InputError(f"distill: layers names {len(given)} layers, one for each of the student's {layers} is needed")
    if strange := [layer for layer in given if not NONE <= layer < others]:
        raise InputError(f"distill: layers names {strange[0]}, the teacher has 0 to {others - 1} ({NONE}: none)")
    return tuple(given)


def searched_map(student: Checkpoint, teacher: Checkpoint, ids: Sequence[list[int]]) -> LayerMap:
    """The map that the states of some texts ask for.

    Raises:
        InputError: the student has more layers.
    """
    map_by_rule(EVEN, len(student.config.encoder), len(teacher.config.encoder))
    some = ids[:: -(-len(ids) // SEARCHED)]
    own, other = (_states(model, some) for model in (student, teacher))
    return best_rising([[float(cka_loss(mine, theirs)) for theirs in other] for mine in own])


def best_rising(costs: Sequence[Sequence[float]]) -> LayerMap:
    """Of costs (M, N), the map of rows to rising columns whose sum is least; of equal ones that of lower columns."""
    best: list[tuple[float, LayerMap]] = [(cost, (j,)) for j, cost in enumerate(costs[0])]
    for row in costs[1:]:
        before = [min(best[: j + 1]) for j in range(len(best))]
        best = [
            (before[j - 1][0] + cost, (*before[j - 1][1], j)) if j else (float("inf"), ()) for j, cost in enumerate(row)
        ]
    return min(best)[1]


def _states(checkpoint: Checkpoint, ids: Sequence[list[int]]) -> list[Tensor]:
    """(N, D) behind each layer."""
    model, found = checkpoint.to_torch(), list[list[Tensor]]()
    for batch in sorted_batches([len(one) for one in ids], tokens=PASS_TOKENS):
        with torch.inference_mode():
            rows = tensors([ids[i] for i in batch], checkpoint.config.text.pad_id)
            found.append(list(model(*rows, with_states=True).states[1:]))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]
