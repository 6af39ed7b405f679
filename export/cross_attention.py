"""A decoder's attention to the encoder's tokens: their keys and values once, and the queries of each step.

Shapes: B texts, R rows (beams of a text stand side by side), T tokens of the sources, D model width, H heads, K head
width.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..transformer.config import AttentionConfig, TransformerConfig
from .graph import Graph
from .layout import PackedLayout
from .mixers import keys_and_values, linear, turned_keys
from .tensors import Weights


@dataclass(frozen=True)
class Source:
    """Of one layer: keys (B, H, K, T), over the root of K, values (B, H, T, K), and the queries' shape: B, -1, H, K."""

    keys: str
    values: str
    shape: str


@dataclass(frozen=True)
class Sources:
    """Of every layer, None without cross-attention.

    `hidden` (B, 1, 1, T) is added to the scores: 0, or very little at padding.
    """

    layers: tuple[Source | None, ...]
    hidden: str


def read_sources(graph: Graph, form: PackedLayout, config: TransformerConfig, weights: Weights, x: str) -> Sources:
    """Of the encoder's tokens."""
    layers: list[Source | None] = []
    for i, layer in enumerate(config.decoder):
        if layer.cross is None:
            layers.append(None)
            continue
        merged = linear(graph, weights.at(f"decoder.{i}.cross.kv"), layer.cross.input_format, x)
        layers.append(source_of(graph, layer.cross, *keys_and_values(graph, layer.cross, form.padded_rows(merged))))
    return Sources(tuple(layers), form.hidden())


def source_of(g: Graph, config: AttentionConfig, keys: str, values: str) -> Source:
    """Keys and values (B, H, T, K) as steps want them."""
    root = g.constant(1 / math.sqrt(config.head_width), np.float32)
    sizes = g.constant([-1, config.heads, config.head_width])
    shape = g.add("Concat", g.add("Shape", keys, start=0, end=1), sizes, axis=0)
    return Source(g.add("Mul", turned_keys(g, keys), root), values, shape)


def attend_to(g: Graph, config: AttentionConfig, weights: Weights, source: Source, hidden: str, y: str) -> str:
    """The beams of a text are its queries, side by side: (R, D) -> (B, H, beams, K) and back."""
    q = linear(g, weights.at("q"), config.input_format, y)
    q = g.add("Transpose", g.add("Reshape", q, source.shape), perm=[0, 2, 1, 3])
    scores = g.add("Add", g.add("MatMul", q, source.keys), hidden)
    mixed = g.add("MatMul", g.add("Softmax", scores, axis=-1), source.values)
    mixed = g.add("Reshape", g.add("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([-1, config.width]))
    return linear(g, weights.at("out"), config.output_format, mixed)
