"""The greatest of many columns in two rounds: the greatest value of every block of them, then inside the best blocks.

The greatest value of a block is a reduction that processors do many columns at a time; places are sought in few columns
alone. A block that is not among the M best holds none of the M best values, as M blocks begin with others that are not
less. Of equal values the first comes first, as in one round. With 32 rows of 8,000 columns that takes a tenth of it.

Shapes: R rows, B texts, K beams, V columns, n blocks of w columns, M wanted.
"""

import math

from .graph import Graph


def block_width(columns: int) -> int | None:
    """The divisor of V nearest its root, if blocks of it save anything; None: one round is as good."""
    root = math.isqrt(columns)
    width = next(width for width in range(root, 0, -1) if columns % width == 0)
    return columns // width if width >= 8 else None


def block_starts(g: Graph, rows: str, columns: int) -> str:
    """`rows` (1,) -> (R,) where each row's blocks begin among those of all, if there are blocks."""
    count = g.constant(columns // (block_width(columns) or columns))
    row = g.add("Range", g.constant(0), g.add("Squeeze", rows), g.constant(1))
    return g.add("Mul", row, count)


def best_column(g: Graph, values: str, columns: int, starts: str) -> str:
    """Values (R, V) with their `block_starts` -> the place of each row's greatest (R, 1)."""
    width = block_width(columns)
    if width is None:
        return g.add("ArgMax", values, axis=1, keepdims=1)
    one = g.constant([1])
    block = g.add("ArgMax", _greatest(g, values, columns, width), axis=1, keepdims=1)
    found = g.add("Gather", _blocks(g, values, width), g.add("Add", starts, g.add("Squeeze", block, one)), axis=0)
    return g.add("Add", g.add("Mul", block, g.constant(width)), g.add("ArgMax", found, axis=1, keepdims=1))


def best_sums(g: Graph, scores: str, values: str, columns: int, count: str) -> tuple[str, str]:
    """The M = `count` (1,) greatest of each text's scores (B, K) plus values (B * K, V).

    Returns:
        the sums (B, M), best first, and their places (B, M) in the text's K * V columns.
    """
    width = block_width(columns)
    if width is None:
        return _greatest_sums(g, g.add("Add", g.add("Reshape", scores, g.constant([-1, 1])), values), scores, count)
    blocks, axis = columns // width, g.constant([2])
    sums = g.add("Add", _greatest(g, values, columns, width), g.add("Reshape", scores, g.constant([-1, 1])))
    size = g.add("Mul", g.add("Shape", scores, start=1, end=2), g.constant([blocks]))  # K * n
    some = g.add("Min", count, size)
    _, chosen = _greatest_sums(g, sums, scores, some)
    chosen, _ = g.add_many("TopK", chosen, some, outputs=2, axis=1, largest=0)  # (B, M), in order of place
    batch = g.add("Squeeze", g.add("Shape", scores, start=0, end=1))
    first = g.add("Mul", g.add("Range", g.constant(0), batch, g.constant(1)), size)
    rows = g.add("Add", chosen, g.add("Unsqueeze", first, g.constant([1])))
    of_row = g.add("GatherElements", scores, g.add("Div", chosen, g.constant(blocks)), axis=1)
    found = g.add("Add", g.add("Unsqueeze", of_row, axis), g.add("Gather", _blocks(g, values, width), rows, axis=0))
    best, places = _greatest_sums(g, found, scores, count)
    block = g.add("Div", places, g.constant(width))
    inside = g.add("Sub", places, g.add("Mul", block, g.constant(width)))
    return best, g.add("Add", g.add("Mul", g.add("GatherElements", chosen, block, axis=1), g.constant(width)), inside)


def _greatest_sums(g: Graph, sums: str, scores: str, count: str) -> tuple[str, str]:
    """Sums (…) of B texts -> the greatest (B, M) of each text, and their places."""
    batch = g.add("Shape", scores, start=0, end=1)
    rows = g.add("Reshape", sums, g.add("Concat", batch, g.constant([-1]), axis=0))
    best, places = g.add_many("TopK", rows, count, outputs=2, axis=1)
    return best, places


def _greatest(g: Graph, values: str, columns: int, width: int) -> str:
    """(R, V) -> (R, n)."""
    shape = g.constant([-1, columns // width, width])
    return g.add("ReduceMax", g.add("Reshape", values, shape), g.constant([2]), keepdims=0)


def _blocks(g: Graph, values: str, width: int) -> str:
    """(R, V) -> (R * n, w)."""
    return g.add("Reshape", values, g.constant([-1, width]))
