"""Attention of tokens in rows, in either form of a graph (`forms`): softmax(Q K^T / sqrt(K)) V.

Where S heads share keys and values, G = H / S; those of a group lie beside each other.

Shapes: B batch, T tokens, H heads, G heads of keys and values, K head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx

from ..transformer.layer_config import AttentionConfig
from .graph import CONTRIB, Graph

INT32 = onnx.TensorProto.INT32
LOWEST = -1e9  # added to the scores of padding; finite, so that a row of padding alone gives no NaN
Rows = tuple[str, ...]  # queries, keys and values: (B, T, (H + 2 * G) * K), or three: (B, T, H or G * K)


class Mix(Protocol):
    """What attention does."""

    def __call__(self, g: Graph, rows: Rows, hiding: str, config: AttentionConfig, *, causal: bool) -> str:
        """Attention of tokens in rows.

        Args:
            g: the graph, or a branch of it.
            rows: see `Rows`.
            hiding: what `AttentionForm.hide` gives; "": all tokens are meant.
            config: the heads.
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


def attend(g: Graph, rows: Rows, hiding: str, config: AttentionConfig, *, causal: bool) -> str:
    """See `Mix`; in one operator of onnxruntime."""
    queries, *shared = rows if len(rows) == 3 else parts_of(g, rows[0], config)
    keys, values = (_repeated(g, part, config) for part in shared)
    masked = ["", hiding] if hiding else []
    return g.add(
        "MultiHeadAttention",
        *(queries, keys, values, *masked),
        domain=CONTRIB,
        num_heads=config.heads,
        scale=1 / math.sqrt(config.head_width),
        unidirectional=int(causal),
    )


def attend_in_steps(g: Graph, rows: Rows, hiding: str, config: AttentionConfig, *, causal: bool) -> str:
    """See `Mix`; in standard operators, for encoders."""
    assert not causal
    queries, keys, values = rows if len(rows) == 3 else parts_of(g, rows[0], config)
    shape = g.constant([0, 0, config.groups, config.head_width])
    scaled = g.add("Mul", queries, g.constant(1 / math.sqrt(config.head_width), np.float32))
    of_group = g.constant([0, 0, config.groups, config.group * config.head_width])
    q = below(g, g.add("Reshape", scaled, of_group), config)
    k = g.add("Transpose", g.add("Reshape", keys, shape), perm=[0, 2, 3, 1])
    v = g.add("Transpose", g.add("Reshape", values, shape), perm=[0, 2, 1, 3])
    scores = g.add("MatMul", q, k)
    weights = g.add("Softmax", g.add("Add", scores, hiding) if hiding else scores, axis=-1)
    mixed = beside(g, g.add("MatMul", weights, v), config)
    return g.add("Reshape", mixed, g.constant([0, 0, config.width]))


def parts_of(g: Graph, merged: str, config: AttentionConfig) -> Rows:
    """Merged (B, T, (H + 2 * G) * K) -> queries (B, T, H * K), keys and values (B, T, G * K)."""
    sizes = g.constant([config.width, config.key_width, config.key_width])
    return g.add_many("Split", merged, sizes, outputs=3, axis=2)


def below(g: Graph, queries: str, config: AttentionConfig) -> str:
    """(B, T, G, S * K) -> (B, G, T * S, K): those that share keys one below the other, for products with them."""
    turned = g.add("Transpose", queries, perm=[0, 2, 1, 3])
    return turned if config.group == 1 else g.add("Reshape", turned, g.constant([0, 0, -1, config.head_width]))


def beside(g: Graph, mixed: str, config: AttentionConfig) -> str:
    """`below` undone: (B, G, T * S, K) -> (B, T, G, S * K)."""
    if config.group > 1:
        mixed = g.add("Reshape", mixed, g.constant([0, 0, -1, config.group * config.head_width]))
    return g.add("Transpose", mixed, perm=[0, 2, 1, 3])


def _repeated(g: Graph, part: str, config: AttentionConfig) -> str:
    """Keys or values (B, T, G * K) -> (B, T, H * K): onnxruntime's operator has a head of each for each of queries."""
    if config.group == 1:
        return part
    alone = g.add("Reshape", part, g.constant([0, 0, config.groups, 1, config.head_width]))
    repeated = g.add("Expand", alone, g.constant([1, 1, 1, config.group, 1]))
    return g.add("Reshape", repeated, g.constant([0, 0, config.width]))


ATTENTION = {
    "fused": AttentionForm(counted, attend),
    "decomposed": AttentionForm(hidden_scores, attend_in_steps),
}
