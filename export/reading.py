"""Recurrent cells over packed tokens in ONNX: all rows side by side, each as far as it goes.

Formulas in `transformer.recurrent`; the cells themselves are those of the steps (`mixers`).

Shapes: B rows, S' places of the longest one, N packed tokens, D model width, U units, G gates.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import onnx

from ..transformer.config import RecurrentConfig
from .graph import Graph
from .layout import PackedLayout
from .mixers import Mixed, cache_count, cell, linear, projected
from .tensors import Weights

INT64 = onnx.TensorProto.INT64


class CellReading:
    """The cells' pass over the tokens of a layout."""

    def __init__(self, graph: Graph, form: PackedLayout) -> None:
        self.graph, self.form = graph, form

    def mix(self, config: RecurrentConfig, weights: Weights, y: str) -> Mixed:
        """(N, D) -> (N, D) and the states (B, U) after each row's last token."""
        g, length = self.graph, self.form.length
        slots, back = self._turns
        gates = linear(g, weights.at("inputs"), config.input_format, y)
        turns = g.add("Gather", gates, slots, axis=0)  # (S', B, G * U)

        def body(b: Graph, place: str, state: Sequence[str]) -> tuple[str, list[str], list[str]]:
            output, new = cell(b, config, weights, b.add("Gather", turns, place, axis=0), state)
            inside = b.add("Less", b.add("Cast", place, to=onnx.TensorProto.INT32), length)  # (B, 1)
            kept = [b.add("Where", inside, after, before) for after, before in zip(new, state, strict=True)]
            return b.constant(True, np.bool_), kept, [output]

        shape = g.add("Concat", g.add("Shape", length, start=0, end=1), g.constant([config.units]), axis=0)
        count = g.add("Squeeze", g.add("Shape", slots, start=0, end=1))
        empty = [g.add("ConstantOfShape", shape)] * cache_count(config)
        state, (outputs,) = g.loop(count, empty, body, scanned=1)  # (S', B, U)
        packed = g.add("Gather", g.add("Reshape", outputs, g.constant([-1, config.units])), back, axis=0)
        return projected(g, config, weights, packed), list(state)

    @cached_property
    def _turns(self) -> tuple[str, str]:
        """(S', B) packed token of every place of every row, S' being the longest; (N,) where each token stands there.

        After a row's end follow other tokens.
        """
        g, form = self.graph, self.form
        longest = g.add("Cast", g.add("ReduceMax", form.length, keepdims=0), to=INT64)
        longest = g.add("Max", longest, g.constant(1))
        places = g.add("Range", g.constant(0), longest, g.constant(1))
        starts = g.add("Cast", g.add("Transpose", form.starts), to=INT64)  # (1, B)
        slots = g.add("Add", g.add("Unsqueeze", places, g.constant([1])), starts)
        last = g.add("Sub", g.add("Size", form.token_ids), g.constant(1))
        row = g.add("Squeeze", g.add("Gather", form.places, g.constant([0]), axis=1), g.constant([1]))
        back = g.add("Mul", g.add("Cast", form.positions, to=INT64), g.add("Size", form.length))
        return g.add("Min", slots, last), g.add("Add", back, row)
