"""Which units of the first model stayed after pruning, drawn in text.

A row for each layer that the first model had: a mark for each head, and for neurons a bar of cells, each the share that
stayed of one stretch of them. `kept` and `kept_of` are the notes of `compress.surgery.remove_from` in the provenance:
which units stayed, and of how many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .numbers import MISSING, at, listed

STAYED, WENT = "■□"
SHARES = " ▁▂▃▄▅▆▇█"
CELLS = 32  # of a bar
CROSSED_CELLS = 16  # of a bar of heads where cross-attention has one too: lines stay within 110 columns
PARTS = {"heads": "heads", "cross_heads": "cross heads", "neurons": "neurons"}
LEGEND = (
    f"what stayed of the original: {STAYED} a unit, {WENT} one that went, "
    f"{SHARES[1]} to {SHARES[-1]} the share of a stretch of them"
)

Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class _Layer:
    """A layer of the first model: whether it stayed, and of each kind the units that did and how many there were."""

    name: str
    stayed: bool
    units: dict[str, tuple[list[int], int]]


def kept_table(kept: Any, kept_of: Any) -> Table | None:
    """Heads of columns and rows of cells; None where the notes are not there or damaged."""
    layers = []
    for stack in ("encoder", "decoder"):
        notes, counts = ((at(note, stack) if stack == "decoder" else note) for note in (kept, kept_of))
        if counts is None and stack == "decoder":
            continue
        found = _layers(stack, notes, counts)
        if found is None:
            return None
        layers += found
    parts = [part for part in PARTS if any(layer.units[part][1] for layer in layers)]
    cells = CROSSED_CELLS if "cross_heads" in parts else CELLS
    rows = [[layer.name, *_row(layer, parts, cells)] for layer in layers]
    channels, width = at(kept, "channels"), at(kept_of, "channels")
    if parts and _are_units(channels, width):
        rows.append(["channels", *[""] * (len(parts) - 1), _bar(channels, width, CELLS)])
    return (["layer", *(PARTS[part] for part in parts)], rows) if parts else None


def _layers(stack: str, notes: Any, counts: Any) -> list[_Layer] | None:
    """All layers that a stack of the first model had; None where the notes do not fit each other."""
    stayed, total = at(notes, "layers"), at(counts, "layers")
    known = {part: (listed(at(notes, part)), listed(at(counts, part))) for part in PARTS}
    known = {part: lists for part, lists in known.items() if any(lists)}
    if not _are_units(stayed, total) or any((len(own), len(of)) != (len(stayed), total) for own, of in known.values()):
        return None
    layers = []
    for i in range(total if known else 0):
        units = dict.fromkeys(PARTS, (list[int](), 0))
        for part, (own, of) in known.items():
            units[part] = (own[stayed.index(i)] if i in stayed else [], of[i])
        if not all(_are_units(*one) for one in units.values()):
            return None
        layers.append(_Layer(str(i) if stack == "encoder" else f"{stack} {i}", i in stayed, units))
    return layers


def _are_units(own: Any, count: Any) -> bool:
    """Whether `own` is a list of ascending numbers below `count`."""
    if not isinstance(own, list) or any(type(number) is not int for number in (*own, count)) or count < 0:
        return False
    return all(0 <= unit < count for unit in own) and all(one < two for one, two in pairwise(own))


def _row(layer: _Layer, parts: Sequence[str], cells: int) -> list[str]:
    if not layer.stayed:
        return ["removed", *[""] * (len(parts) - 1)]
    row = []
    for part in parts:
        own, count = layer.units[part]
        if not count:
            row.append(MISSING)
        elif part == "neurons":
            row.append(_bar(own, count, CELLS))
        else:
            row.append(_marks(own, count) if count <= cells else _bar(own, count, cells))
    return row


def _marks(own: Sequence[int], count: int) -> str:
    """A mark for each unit and the numbers: ■□■ 2/3."""
    return "".join(STAYED if unit in own else WENT for unit in range(count)) + f" {len(own)}/{count}"


def _bar(own: Sequence[int], count: int, cells: int) -> str:
    """A cell for each stretch of units and the numbers: █▄ 3/4; none stayed is empty, all full, and no others are."""
    bounds = [i * count // min(cells, count) for i in range(min(cells, count) + 1)]
    bar = ""
    for start, end in pairwise(bounds):
        there, size = sum(start <= unit < end for unit in own), end - start
        bar += SHARES[8 if there == size else 1 + 7 * there // size if there else 0]
    return f"{bar} {len(own)}/{count}"
