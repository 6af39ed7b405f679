"""Attention over packed tokens in rows of like length.

A batch of mixed lengths is mostly padding once its rows stand beside the longest one. So the rows are taken in order
of length, in GROUPS groups, and each group is padded to its own longest row. Whether that pays is decided once a run,
from the mask: where rows are of like length already, or few, they stay together.
"""

import math

import numpy as np
import onnx

from .graph import CONTRIB, Graph

FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
GROUPS = 4
WASTE = 1.25  # group once the padded area is this many times the grouped one


def attend(g: Graph, parts: tuple[str, ...], slots: str, mask: str, flat: str, heads: int, head_width: int) -> str:
    """Packed queries, keys, values (N, H * K) -> attention over rows (B, T) -> the tokens of `flat` (M, H * K)."""
    rows = [g.add("Gather", part, slots, axis=0) for part in parts]
    scale = 1 / math.sqrt(head_width)
    mixed = g.add("MultiHeadAttention", *rows, "", mask, domain=CONTRIB, num_heads=heads, scale=scale)
    return g.add("Gather", g.add("Reshape", mixed, g.constant([-1, heads * head_width])), flat, axis=0)


class Grouping:
    """The groups of a batch: for each, what `attend` needs; and where each packed token went."""

    def __init__(self, graph: Graph, mask: str, length: str) -> None:
        """Plan for a mask (B, T) and the rows' lengths (B, 1); a small batch costs one comparison."""
        self.mask, self.length = mask, length
        batch = graph.add("Shape", mask, start=0, end=1)
        many = graph.add("GreaterOrEqual", batch, graph.constant([2 * GROUPS]))
        many = graph.add("Reshape", many, graph.constant([], np.int64))
        self.worthwhile, *self.members = graph.choose(many, lambda g: self._plan(g, batch), self._nothing)

    def _plan(self, g: Graph, batch: str) -> list[str]:
        lengths = g.add("Reshape", self.length, g.constant([-1]))
        ordered, order = g.add_many("TopK", lengths, batch, outputs=2, axis=0)
        starts = g.add("Sub", g.add("CumSum", lengths, g.constant(0)), lengths)
        edges = [g.add("Div", g.add("Mul", batch, g.constant([i])), g.constant([GROUPS])) for i in range(GROUPS + 1)]
        members, areas, tokens = list[str](), list[str](), list[str]()
        for i in range(GROUPS):
            span = edges[i], edges[i + 1]
            slots, mask = self._rows(
                g, g.add("Slice", ordered, *span), g.add("Gather", starts, g.add("Slice", order, *span))
            )
            flat = g.add("Reshape", g.add("NonZero", g.add("Reshape", mask, g.constant([-1]))), g.constant([-1]))
            areas.append(g.add("Cast", g.add("Size", mask), to=FLOAT))
            tokens.append(g.add("Gather", g.add("Reshape", slots, g.constant([-1])), flat))
            members += [slots, g.add("Cast", mask, to=INT32), flat]
        moved = g.add("Concat", *tokens, axis=0)  # (N,) the packed token at each place of the groups
        back = g.add("Range", g.constant(0), g.add("Size", moved), g.constant(1))
        return [self._worthwhile(g, areas, moved), *members, g.add("ScatterElements", moved, moved, back, axis=0)]

    @staticmethod
    def _rows(g: Graph, lengths: str, starts: str) -> tuple[str, str]:
        """Lengths and first packed tokens of b rows -> slots and mask (b, t), t being the longest."""
        longest = g.add("Max", g.add("ReduceMax", lengths, keepdims=0), g.constant(1))
        place = g.add("Range", g.constant(0), longest, g.constant(1))
        mask = g.add("Less", place, g.add("Unsqueeze", lengths, g.constant([1])))
        slots = g.add("Add", g.add("Unsqueeze", starts, g.constant([1])), place)
        return g.add("Where", mask, slots, g.constant(0)), mask

    def _worthwhile(self, g: Graph, areas: list[str], moved: str) -> str:
        """Whether the whole area is WASTE times that of the groups; never for a batch without any token."""
        full = g.add("Cast", g.add("Size", self.mask), to=FLOAT)
        grouped = g.add("Mul", g.add("Sum", *areas), g.constant(WASTE, np.float32))
        some = g.add("Greater", g.add("Size", moved), g.constant(0))
        return g.add("And", some, g.add("Greater", full, grouped))

    @staticmethod
    def _nothing(g: Graph) -> list[str]:
        rows, ids = g.constant([[0]]), g.constant([0])
        return [g.constant(False, np.bool_)] + [rows, g.constant([[1]], np.int32), ids] * GROUPS + [ids]

    def attention(self, g: Graph, parts: tuple[str, ...], heads: int, head_width: int) -> str:
        """Packed (N, H * K) -> (N, H * K), group by group."""
        groups = [self.members[3 * i : 3 * i + 3] for i in range(GROUPS)]
        mixed = [attend(g, parts, slots, mask, flat, heads, head_width) for slots, mask, flat in groups]
        return g.add("Gather", g.add("Concat", *mixed, axis=0), self.members[-1], axis=0)
