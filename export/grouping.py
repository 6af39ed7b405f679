"""Attention over packed tokens in rows of like length.

A batch of mixed lengths is mostly padding once its rows stand beside the longest one. So the rows are taken in order
of length, in GROUPS groups, and each group is padded to its own longest row. Whether that pays is decided once a run,
from the mask: where rows are of like length already, or few, they stay together.
"""

from collections.abc import Iterator

import numpy as np
import onnx

from ..transformer.layer_config import AttentionConfig
from .attention import AttentionForm, Rows
from .graph import Graph

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
GROUPS = 4
WASTE = 1.25  # group once the padded area is this many times the grouped one


def places_of(g: Graph, mask: str) -> str:
    """(B, T) -> (N, 2) row and column of each nonzero element."""
    return g.add("Transpose", g.add("NonZero", mask), perm=[1, 0])


class Grouping:
    """The groups of a batch. Only the order of rows is kept; the rest is worked out where rows are grouped."""

    def __init__(self, graph: Graph, mask: str, length: str, form: AttentionForm, *, causal: bool) -> None:
        """Plan for a mask (B, T) and the rows' lengths (B, 1); a small batch costs one comparison."""
        self.mask, self.length, self.form, self.causal = mask, length, form, causal
        self.batch = graph.add("Size", length)
        many = graph.add("GreaterOrEqual", self.batch, graph.constant(2 * GROUPS))
        self.worthwhile, self.order = graph.choose(
            many, self._plan, lambda g: [g.constant(False, np.bool_), g.constant([0])]
        )

    def _edges(self, g: Graph) -> str:
        """(GROUPS + 1,) where each group begins, and the last one ends."""
        return g.add("Div", g.add("Mul", self.batch, g.constant(range(GROUPS + 1))), g.constant(GROUPS))

    def _lengths(self, g: Graph) -> str:
        """(B,) int64."""
        return g.add("Cast", g.add("Reshape", self.length, g.constant([-1])), to=INT64)

    def _plan(self, g: Graph) -> list[str]:
        """Whether the whole area is WASTE times that of the groups (never without any token); rows, longest first."""
        all_rows = g.add("Reshape", self.batch, g.constant([1]))
        ordered, order = g.add_many("TopK", self._lengths(g), all_rows, outputs=2, axis=0)
        first, last = self._firsts_and_lasts(g)
        longest = g.add("Gather", ordered, first)
        area = g.add("ReduceSum", g.add("Mul", g.add("Sub", last, first), longest), keepdims=0)
        grouped = g.add("Mul", g.add("Cast", area, to=FLOAT), g.constant(WASTE, np.float32))
        full = g.add("Cast", g.add("Size", self.mask), to=FLOAT)
        some = g.add("Greater", area, g.constant(0))
        return [g.add("And", some, g.add("Greater", full, grouped)), order]

    def counts(self, g: Graph) -> str:
        """(GROUPS,) rows of each group."""
        first, last = self._firsts_and_lasts(g)
        return g.add("Sub", last, first)

    def groups(self, g: Graph) -> Iterator[tuple[str, str]]:
        """Slots and mask (b, t) of each group, t being its longest row."""
        lengths, edges = self._lengths(g), self._edges(g)
        starts = g.add("Sub", g.add("CumSum", lengths, g.constant(0)), lengths)
        for i in range(GROUPS):
            span = (g.add("Slice", edges, g.constant([at]), g.constant([at + 1])) for at in (i, i + 1))
            rows = g.add("Slice", self.order, *span)
            yield self._rows(g, g.add("Gather", lengths, rows), g.add("Gather", starts, rows))

    def _firsts_and_lasts(self, g: Graph) -> tuple[str, ...]:
        """(GROUPS,) where each group begins and (GROUPS,) where it ends."""
        edges = self._edges(g)
        return tuple(g.add("Slice", edges, g.constant([i]), g.constant([i + GROUPS])) for i in range(2))

    def attention(self, g: Graph, qkv: Rows, config: AttentionConfig) -> str:
        """Packed tokens (N, ·) -> (N, H * K), group by group."""
        tokens, mixed = list[str](), list[str]()
        for slots, mask in self.groups(g):
            places = places_of(g, mask)
            tokens.append(g.add("GatherND", slots, places))
            hiding = self.form.hide(g, mask)
            gathered = tuple(g.add("Gather", part, slots, axis=0) for part in qkv)
            together = self.form.mix(g, gathered, hiding, config, causal=self.causal)
            mixed.append(g.add("GatherND", together, places))
        moved = g.add("Concat", *tokens, axis=0)  # (N,) the packed token at each place of the groups
        back = g.add("Range", g.constant(0), g.add("Size", moved), g.constant(1))
        back = g.add("ScatterElements", moved, moved, back, axis=0)
        return g.add("Gather", g.add("Concat", *mixed, axis=0), back, axis=0)

    @staticmethod
    def _rows(g: Graph, lengths: str, starts: str) -> tuple[str, str]:
        """Lengths and first packed tokens of b rows -> slots and mask (b, t), t being the longest."""
        longest = g.add("Max", g.add("ReduceMax", lengths, keepdims=0), g.constant(1))
        place = g.add("Range", g.constant(0), longest, g.constant(1))
        mask = g.add("Less", place, g.add("Unsqueeze", lengths, g.constant([1])))
        slots = g.add("Add", g.add("Unsqueeze", starts, g.constant([1])), place)
        return g.add("Where", mask, slots, g.constant(0)), mask
