"""A decoder's pass over some columns of tokens that goes on from what was kept of the columns before.

Keys and values are kept as Optimum has them, not transposed; a cell keeps its state. Formulas as in `mixers`.

Shapes: B rows, T columns, P columns before, N tokens in the columns, D model width, H heads, K head width, U units, G
gates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ..transformer.config import AttentionConfig, RecurrentConfig
from ..transformer.layer_config import MixerConfig
from .attention import LOWEST, parts_of
from .graph import Graph
from .layout import PackedLayout
from .mixers import Mixed, cache_count, cell, linear, projected, turned_keys
from .tensors import Weights

BOOL, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.INT64


@dataclass(frozen=True)
class Columns:
    """The tokens of `input_ids` (B, T).

    Attributes:
        graph: where they are.
        ids: (N,) the tokens, row after row.
        positions: (N,) their positions.
        hidden: (B, 1, T, P + T) or (T, P + T) what is added to the scores: 0, or very little where a key is not seen.
        form: which columns hold tokens; None: all do, N is B * T.
    """

    graph: Graph
    ids: str
    positions: str
    hidden: str
    form: PackedLayout | None

    def rows(self, x: str) -> str:
        """(N, W) -> (B, T, W); at padding stands some token."""
        if self.form is not None:
            return self.graph.add("Gather", x, self.form.slots, axis=0)
        shape = self.graph.add("Concat", self.graph.add("Shape", "input_ids"), self.graph.constant([-1]), axis=0)
        return self.graph.add("Reshape", x, shape)

    def tokens(self, rows: str) -> str:
        """(B, T, W) -> (N, W)."""
        if self.form is not None:
            return self.graph.add("GatherND", rows, self.form.places)
        return self.graph.add("Flatten", rows, axis=2)


def all_columns(g: Graph, past: str) -> Columns:
    """Every column holds a token; `past` () is P."""
    shape = g.add("Shape", "input_ids")
    end = g.add("Add", past, g.add("Squeeze", g.add("Shape", "input_ids", start=1, end=2)))
    places = g.add("Range", past, end, g.constant(1))
    positions = g.add("Reshape", g.add("Expand", places, shape), g.constant([-1]))
    ids = g.add("Reshape", "input_ids", g.constant([-1]))
    return Columns(g, ids, positions, _hidden(g, _until(g, places, end)), None)


def masked_columns(g: Graph) -> Columns:
    """`attention_mask` (B, P + T) says which columns hold tokens, before and now."""
    count, whole = (g.add("Squeeze", g.add("Shape", x, start=1, end=2)) for x in ("input_ids", "attention_mask"))
    past = g.add("Sub", whole, count)
    start, end = (g.add("Reshape", x, g.constant([1])) for x in (past, whole))
    before = g.add("Slice", "attention_mask", g.constant([0]), start, g.constant([1]))
    form = PackedLayout(g, "input_ids", g.add("Slice", "attention_mask", start, end, g.constant([1])), causal=True)
    tokens = g.add("ReduceSum", before, g.constant([1]), keepdims=1)  # (B, 1) before these columns
    positions = g.add("Add", g.add("Cast", form.row_positions, to=INT64), tokens)
    causal = _until(g, g.add("Range", past, whole, g.constant(1)), whole)
    mask = g.add("Unsqueeze", g.add("Cast", "attention_mask", to=BOOL), g.constant([1, 2]))
    hidden = _hidden(g, g.add("And", mask, causal))
    return Columns(g, form.token_ids, g.add("GatherND", positions, form.places), hidden, form)


def _until(g: Graph, places: str, end: str) -> str:
    """Places (T,) of some columns among P + T () -> (T, P + T) whether a column comes not after one of these."""
    every = g.add("Range", g.constant(0), end, g.constant(1))
    return g.add("LessOrEqual", every, g.add("Unsqueeze", places, g.constant([1])))


def _hidden(g: Graph, seen: str) -> str:
    """(…, T, P + T) whether a key is seen -> what is added to its score."""
    return g.add("Where", seen, g.constant(0, np.float32), g.constant(LOWEST, np.float32))


class Mixing:
    """The mixers' pass over the columns."""

    def __init__(self, columns: Columns, past: Sequence[str] | None) -> None:
        """`past`: what the mixers kept, layer by layer; None: nothing comes before."""
        self.columns, self.graph = columns, columns.graph
        self.past: Iterator[str] | None = None if past is None else iter(past)

    def mix(self, config: MixerConfig, weights: Weights, y: str) -> Mixed:
        """(N, D) -> (N, D) and what is kept."""
        past = None if self.past is None else [next(self.past) for _ in range(cache_count(config))]
        if isinstance(config, AttentionConfig):
            return self._attention(config, weights, y, past)
        return self._cell(config, weights, y, past)

    def _attention(self, config: AttentionConfig, weights: Weights, y: str, past: Sequence[str] | None) -> Mixed:
        """Keys and values (B, G, P, K) -> the same with T columns more."""
        g = self.graph
        qkv = self.columns.rows(linear(g, weights.at("qkv"), config.input_format, y))
        q, *new = (self._heads(part, config.head_width) for part in parts_of(g, qkv, config))
        kept = new if past is None else [g.add("Concat", *pair, axis=2) for pair in zip(past, new, strict=True)]
        root = g.constant(1 / math.sqrt(config.head_width), np.float32)
        keys, values = (self._for_each(part, config) for part in kept)
        scores = g.add("MatMul", g.add("Mul", q, root), turned_keys(g, keys))
        chances = g.add("Softmax", g.add("Add", scores, self.columns.hidden), axis=-1)
        mixed = g.add("Transpose", g.add("MatMul", chances, values), perm=[0, 2, 1, 3])  # (B, T, H, K)
        mixed = g.add("Reshape", mixed, g.constant([0, 0, config.width]))
        return linear(g, weights.at("out"), config.output_format, self.columns.tokens(mixed)), kept

    def _heads(self, part: str, width: int) -> str:
        """(B, T, heads * K) -> (B, heads, T, K)."""
        g = self.graph
        return g.add("Transpose", g.add("Reshape", part, g.constant([0, 0, -1, width])), perm=[0, 2, 1, 3])

    def _for_each(self, part: str, config: AttentionConfig) -> str:
        """Keys or values (B, G, S, K) -> (B, H, S, K), those that heads share as often as they do."""
        g = self.graph
        if config.group == 1:
            return part
        repeated = g.add("Expand", g.add("Unsqueeze", part, g.constant([2])), g.constant([1, 1, config.group, 1, 1]))
        return g.add("Reshape", repeated, g.constant([0, config.heads, -1, config.head_width]))

    def _cell(self, config: RecurrentConfig, weights: Weights, y: str, past: Sequence[str] | None) -> Mixed:
        """A loop over the columns; at padding the state (B, U) stays."""
        g, form = self.graph, self.columns.form
        gates = self.columns.rows(linear(g, weights.at("inputs"), config.input_format, y))
        turns = g.add("Transpose", gates, perm=[1, 0, 2])  # (T, B, gates * U)
        mask = None if form is None else g.add("Unsqueeze", g.add("Transpose", form.mask), g.constant([2]))

        def body(b: Graph, place: str, state: Sequence[str]) -> tuple[str, list[str], list[str]]:
            output, new = cell(b, config, weights, b.add("Gather", turns, place, axis=0), state)
            if mask is not None:
                inside = b.add("Gather", mask, place, axis=0)
                new = [b.add("Where", inside, after, before) for after, before in zip(new, state, strict=True)]
            return b.constant(True, np.bool_), new, [output]

        count = g.add("Squeeze", g.add("Shape", "input_ids", start=1, end=2))
        state, (outputs,) = g.loop(count, past or self._zero(config), body, scanned=1)  # (T, B, U)
        mixed = self.columns.tokens(g.add("Transpose", outputs, perm=[1, 0, 2]))
        return projected(g, config, weights, mixed), list(state)

    def _zero(self, config: RecurrentConfig) -> list[str]:
        g = self.graph
        shape = g.add("Concat", g.add("Shape", "input_ids", start=0, end=1), g.constant([config.units]), axis=0)
        return [g.add("ConstantOfShape", shape)] * cache_count(config)
