"""The two forms in which the encoder's graph can be laid out; `encoder.py` says what they are for.

Shapes: B batch, T tokens, N packed tokens, D model width, H heads, K head width. "Tokens" means (N, ·) in the packed
layout and (B, T, ·) in the padded one.
"""

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import onnx

from ..transformer.layer_config import FLOAT32, AttentionConfig
from .attention import ATTENTION, Rows, hidden_scores
from .forms import Forms
from .graph import CONTRIB, Graph
from .grouping import Grouping, places_of
from .linears import own, standard, stored
from .tensors import Weights

FLOAT, INT32, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.BOOL
INT64 = onnx.TensorProto.INT64
DEFAULT = Forms()
Linears = Callable[[Graph, Weights, str, str], str]  # weights, format and tokens -> tokens


class Layout(Protocol):
    """How tokens are laid out, and the operators that follow from it."""

    forms: Forms
    token_ids: str
    positions: str

    def __init__(self, graph: Graph, input_ids: str, attention_mask: str, *, forms: Forms = DEFAULT) -> None: ...

    def attention(self, qkv: Rows, config: AttentionConfig) -> str:
        """Queries, keys and values, tokens (·, (H + 2 * G) * K) or three: (·, H or G * K) -> tokens (·, H * K).

        Behind quantized linears sums are in the order that PyTorch's int8 models repeat (`transformer.kernels`).
        """

    def linear(self, weights: Weights, form: str, x: str) -> str:
        """Tokens (·, I) -> tokens (·, O), the linear being in a format of the config."""

    def activation(self, kind: str, x: str) -> str:
        """An activation of the config's name."""

    def activated(self, weights: Weights, form: str, kind: str, x: str) -> str:
        """`linear`, then `activation`."""

    def padded_rows(self, x: str) -> str:
        """Tokens -> (B, T, D), zero at padding."""

    def first_token(self, x: str) -> str:
        """Tokens -> (B, D) of each row's first valid token, zero for a row without one."""

    def last_token(self, x: str) -> str:
        """Tokens -> (B, D) of each row's last valid token, zero for a row without one."""

    def mean(self, rows: str) -> str:
        """(B, T, D), zero at padding -> (B, D) over the valid tokens."""

    def maximum(self, rows: str) -> str:
        """(B, T, D) -> (B, D) over the valid tokens, zero for a row without one."""

    def zero_empty(self, vectors: str) -> str:
        """(B, E) -> the same, zero for rows without a valid token."""


class _Rows:
    """What both layouts take from the mask, and what stands after the encoder."""

    def __init__(self, graph: Graph, attention_mask: str, forms: Forms, linears: Linears) -> None:
        self.graph, self.forms, self.form, self.linears = graph, forms, ATTENTION[forms.attention], linears
        self.mask = graph.add("Cast", attention_mask, to=BOOL)
        self.counted = graph.add("Cast", self.mask, to=INT32)
        self.length = graph.add("ReduceSum", self.counted, graph.constant([1]), keepdims=1)  # (B, 1)
        before = graph.add("CumSum", self.counted, graph.constant(1))
        self.row_positions = graph.add("Sub", before, graph.constant(1, np.int32))  # (B, T); -1 before the first token

    def hidden(self) -> str:
        """See `hidden_scores`."""
        return hidden_scores(self.graph, self.mask)

    def hides(self) -> str:
        """What attention hides padding with."""
        return self.counted if self.forms.attention == "fused" else self.form.hide(self.graph, self.mask)

    def linear(self, weights: Weights, form: str, x: str) -> str:
        """See `Layout.linear`."""
        return self.linears(self.graph, weights, form, x)

    def activation(self, kind: str, x: str) -> str:
        """See `Layout.activation`."""
        return (standard_activation if self.forms.gelu == "erf" else own_activation)(self.graph, kind, x)

    def activated(self, weights: Weights, form: str, kind: str, x: str) -> str:
        """See `Layout.activated`."""
        if (self.forms.gelu, kind, form) == ("bias", "gelu", FLOAT32) and "bias" in weights:
            product = self.graph.add("MatMul", x, stored(self.graph, weights))
            bias = self.graph.weight(weights.full("bias"), weights["bias"])
            return self.graph.add("BiasGelu", product, bias, domain=CONTRIB)
        return self.activation(kind, self.linear(weights, form, x))

    def first_place(self) -> str:
        """(B, 1) place of each row's first valid token."""
        return self.graph.add("ArgMax", self.counted, axis=1, keepdims=1)

    def last_place(self) -> str:
        """(B, 1) place of each row's last valid token."""
        return self.graph.add("ArgMax", self.row_positions, axis=1, keepdims=1)

    def column(self, values: str) -> str:
        """(…) -> (…, 1)."""
        return self.graph.add("Unsqueeze", values, self.graph.constant([-1]))

    def mean(self, rows: str) -> str:
        """See `Layout.mean`."""
        total = self.graph.add("ReduceSum", rows, self.graph.constant([1]), keepdims=0)
        count = self.graph.add("Max", self.length, self.graph.constant(1, np.int32))
        return self.graph.add("Div", total, self.graph.add("Cast", count, to=FLOAT))

    def maximum(self, rows: str) -> str:
        """See `Layout.maximum`."""
        lowest = self.graph.constant(np.finfo(np.float32).min, np.float32)
        seen = self.graph.add("Where", self.column(self.mask), rows, lowest)
        return self.zero_empty(self.graph.add("ReduceMax", seen, self.graph.constant([1]), keepdims=0))

    def zero_empty(self, vectors: str) -> str:
        """See `Layout.zero_empty`."""
        some = self.graph.add("Greater", self.length, self.graph.constant([[0]], np.int32))
        return self.graph.add("Where", some, vectors, self.graph.constant(0, np.float32))


class PackedLayout(_Rows):
    """N valid tokens; linears in onnxruntime's own operators."""

    def __init__(
        self, graph: Graph, input_ids: str, attention_mask: str, *, causal: bool = False, forms: Forms = DEFAULT
    ) -> None:
        """`causal`: no token attends to one after it."""
        super().__init__(graph, attention_mask, forms, partial(own, place=stored))
        self.causal = causal
        self.places = self._keep_one(places_of(graph, self.mask))  # (N, 2)
        self.starts = graph.add("CumSum", self.length, graph.constant(0), exclusive=1)  # (B, 1)
        # (B, T) the packed token; at padding the one before, -1: the last
        self.slots = graph.add("Add", self.row_positions, self.starts)
        self.token_ids = graph.add("GatherND", input_ids, self.places)
        self.positions = graph.add("GatherND", self.row_positions, self.places)

    @cached_property
    def grouping(self) -> Grouping:
        """The groups of rows; made where attention is."""
        return Grouping(self.graph, self.mask, self.length, self.form, causal=self.causal)

    @cached_property
    def hiding(self) -> str:
        """See `hides`; made where attention is."""
        return self.hides()

    @cached_property
    def dense(self) -> str:
        """() whether there is no padding."""
        valid = self.graph.add("ReduceSum", self.graph.add("Cast", self.length, to=INT64), keepdims=0)
        return self.graph.add("Equal", valid, self.graph.add("Size", self.mask))

    def _keep_one(self, places: str) -> str:
        """The places, or the very first one where there is none: no tensor gets empty."""
        g = self.graph
        first = g.add("Slice", g.constant([[0, 0]]), g.add("Shape", places, start=0, end=1), g.constant([1]))
        return g.add("Concat", places, first, axis=0)

    def attention(self, qkv: Rows, config: AttentionConfig) -> str:
        """See `Layout.attention`."""
        return self.graph.choose(
            self.dense,
            lambda g: [self._dense_attention(g, qkv, config)],
            lambda g: g.choose(
                self.grouping.worthwhile,
                lambda g: [self.grouping.attention(g, qkv, config)],
                lambda g: [self._padded_attention(g, qkv, config)],
            ),
        )[0]

    def _dense_attention(self, g: Graph, qkv: Rows, config: AttentionConfig) -> str:
        """Without padding the packed tokens are the rows.

        Without a mask onnxruntime has a faster kernel, whose sums are in another order.
        """
        shape = g.add("Concat", g.add("Shape", self.mask), g.constant([-1]), axis=0)
        hiding = "" if config.input_format == FLOAT32 else self.hiding
        rows = tuple(g.add("Reshape", part, shape) for part in qkv)
        mixed = self.form.mix(g, rows, hiding, config, causal=self.causal)
        return g.add("Reshape", mixed, g.constant([-1, config.width]))

    def _padded_attention(self, g: Graph, qkv: Rows, config: AttentionConfig) -> str:
        rows = tuple(g.add("Gather", part, self.slots, axis=0) for part in qkv)
        mixed = self.form.mix(g, rows, self.hiding, config, causal=self.causal)
        return g.add("GatherND", mixed, self.places)

    def padded_rows(self, x: str) -> str:
        """See `Layout.padded_rows`."""
        return padded(self.graph, x, self.filled)

    @cached_property
    def filled(self) -> str:
        """(B, T) the packed token; at padding -1."""
        return self.graph.add("Where", self.mask, self.slots, self.graph.constant(-1, np.int32))

    def first_token(self, x: str) -> str:
        """See `Layout.first_token`."""
        return self._token_at(x, self.first_place())

    def last_token(self, x: str) -> str:
        """See `Layout.last_token`."""
        return self._token_at(x, self.last_place())

    def _token_at(self, x: str, places: str) -> str:
        """(N, D) and places (B, 1) of valid tokens -> (B, D)."""
        place = self.graph.add("GatherElements", self.slots, places, axis=1)
        tokens = self.graph.add("Gather", x, self.graph.add("Reshape", place, self.graph.constant([-1])), axis=0)
        return self.zero_empty(tokens)


class PaddedLayout(_Rows):
    """(B, T) throughout; linears in standard ONNX operators."""

    def __init__(self, graph: Graph, input_ids: str, attention_mask: str, *, forms: Forms = DEFAULT) -> None:
        super().__init__(graph, attention_mask, forms, standard)
        self.first = self.first_place()
        first_id = graph.add("GatherElements", input_ids, self.first, axis=1)
        self.token_ids = graph.add("Where", self.mask, input_ids, first_id)
        self.positions = graph.add("Where", self.mask, self.row_positions, graph.constant(0, np.int32))
        self.hiding = self.hides()

    def attention(self, qkv: Rows, config: AttentionConfig) -> str:
        """See `Layout.attention`."""
        return self.form.mix(self.graph, qkv, self.hiding, config, causal=False)

    def padded_rows(self, x: str) -> str:
        """See `Layout.padded_rows`."""
        return self.graph.add("Where", self.column(self.mask), x, self.graph.constant(0, np.float32))

    def first_token(self, x: str) -> str:
        """See `Layout.first_token`."""
        return self._token_at(x, self.first)

    def last_token(self, x: str) -> str:
        """See `Layout.last_token`."""
        return self._token_at(x, self.last_place())

    def _token_at(self, x: str, places: str) -> str:
        """(B, T, D) and places (B, 1) of valid tokens -> (B, D)."""
        g = self.graph
        place = g.add("Concat", g.add("Range", g.constant(0), g.add("Size", places), g.constant(1)), axis=0)
        pairs = g.add("Concat", g.add("Unsqueeze", place, g.constant([1])), places, axis=1)
        return self.zero_empty(g.add("GatherND", x, pairs))


def padded(g: Graph, x: str, places: str) -> str:
    """Packed tokens (N, W) and the places (B, T) of tokens, -1 at padding -> (B, T, W), zero there.

    Padding gathers a row of zeros that is put after the tokens.
    """
    return g.add("Gather", g.add("Pad", x, g.constant([0, 0, 1, 0])), places, axis=0)


def own_activation(g: Graph, kind: str, x: str) -> str:
    """`standard_activation`, with onnxruntime's GELU."""
    return g.add("Gelu", x, domain=CONTRIB) if kind == "gelu" else standard_activation(g, kind, x)


def standard_activation(g: Graph, kind: str, x: str) -> str:
    """GELU by Erf (exact) or tanh (approximate), ReLU, SiLU, tanh."""
    number: Any = np.float32
    if kind == "gelu":
        erf = g.add("Erf", g.add("Div", x, g.constant(math.sqrt(2), number)))
        return g.add("Mul", g.add("Mul", x, g.add("Add", erf, g.constant(1, number))), g.constant(0.5, number))
    if kind == "gelu_tanh":
        cube = g.add("Mul", g.add("Mul", g.add("Mul", x, x), x), g.constant(0.044715, number))
        inner = g.add("Mul", g.add("Add", x, cube), g.constant(math.sqrt(2 / math.pi), number))
        tanh = g.add("Add", g.add("Tanh", inner), g.constant(1, number))
        return g.add("Mul", g.add("Mul", x, tanh), g.constant(0.5, number))
    if kind == "silu":
        return g.add("Mul", x, g.add("Sigmoid", x))
    return g.add({"relu": "Relu", "tanh": "Tanh"}[kind], x)
