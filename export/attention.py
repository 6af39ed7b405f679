"""Attention of tokens in rows, in either form of a graph (`forms`): softmax(Q K^T / sqrt(K)) V.

Shapes: B batch, T tokens, H heads, K head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx

from .graph import CONTRIB, Graph

INT32 = onnx.TensorProto.INT32
LOWEST = -1e9  # added to the scores of padding; finite, so that a row of padding alone gives no NaN
Rows = tuple[str, ...]  # queries, keys and values: (B, T, 3 * H * K), or three of (B, T, H * K)


class Mix(Protocol):
    """What attention does."""

    def __call__(self, g: Graph, rows: Rows, hiding: str, heads: int, head_width: int, *, causal: bool) -> str:
        """Attention of tokens in rows.

        Args:
            g: the graph, or a branch of it.
            rows: see `Rows`.
            hiding: what `AttentionForm.hide` gives; "": all tokens are meant.
            heads: H.
            head_width: K.
            causal: no token attends to one after it.

        Returns:
            (B, T, H * K).
        """


@dataclass(frozen=True)
class AttentionForm:
    """`hide` turns a mask (B, T) of the tokens that are meant into what `mix` hides the others with."""

    hide: Callable[[Graph, str], str]
    mix: Mix


def counted(g: Graph, mask: str) -> str:
    """(B, T) as int32, 1 where a token is meant."""
    return g.add("Cast", mask, to=INT32)


def hidden_scores(g: Graph, mask: str) -> str:
    """A mask (B, T) -> (B, 1, 1, T) what is added to the scores of keys: 0, or very little at padding."""
    rows = g.add("Where", mask, g.constant(0, np.float32), g.constant(LOWEST, np.float32))
    return g.add("Unsqueeze", rows, g.constant([1, 2]))


def attend(g: Graph, rows: Rows, hiding: str, heads: int, head_width: int, *, causal: bool) -> str:
    """See `Mix`; in one operator of onnxruntime."""
    parts = _parts(g, rows, heads * head_width)
    masked = ["", hiding] if hiding else []
    scale, order = 1 / math.sqrt(head_width), int(causal)
    return g.add(
        "MultiHeadAttention", *parts, *masked, domain=CONTRIB, num_heads=heads, scale=scale, unidirectional=order
    )


def attend_in_steps(g: Graph, rows: Rows, hiding: str, heads: int, head_width: int, *, causal: bool) -> str:
    """See `Mix`; in standard operators, for encoders."""
    assert not causal
    width = heads * head_width
    queries, keys, values = _parts(g, rows, width)
    shape = g.constant([0, 0, heads, head_width])
    scaled = g.add("Mul", queries, g.constant(1 / math.sqrt(head_width), np.float32))
    q = g.add("Transpose", g.add("Reshape", scaled, shape), perm=[0, 2, 1, 3])
    k = g.add("Transpose", g.add("Reshape", keys, shape), perm=[0, 2, 3, 1])
    v = g.add("Transpose", g.add("Reshape", values, shape), perm=[0, 2, 1, 3])
    scores = g.add("MatMul", q, k)
    weights = g.add("Softmax", g.add("Add", scores, hiding) if hiding else scores, axis=-1)
    mixed = g.add("Transpose", g.add("MatMul", weights, v), perm=[0, 2, 1, 3])
    return g.add("Reshape", mixed, g.constant([0, 0, width]))


def _parts(g: Graph, rows: Rows, width: int) -> Rows:
    return rows if len(rows) == 3 else g.add_many("Split", *rows, g.constant([width] * 3), outputs=3, axis=2)


ATTENTION = {
    "fused": AttentionForm(counted, attend),
    "decomposed": AttentionForm(hidden_scores, attend_in_steps),
}
