"""A decoder's attention to the encoder's tokens: their keys and values once, and the queries of each step.

A batch of mixed lengths is mostly padding, and every step would read it. Where groups of like length pay (`grouping`),
texts are written in order of length, and each group's keys and values are padded to its own longest text.

Shapes: B texts, R rows (beams of a text stand side by side), N' packed tokens of the sources, T tokens of the longest,
D model width, H heads, G heads of keys and values, K head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..transformer.config import AttentionConfig, TransformerConfig
from .attention import below, beside, hidden_scores
from .graph import Graph
from .layout import PackedLayout, padded
from .mixers import keys_and_values, linear, turned_keys
from .tensors import Weights


class Sources(Protocol):
    """What a decoder attends to."""

    def attend(self, g: Graph, layer: int, q: str) -> str:
        """Queries (R, H * K) of a layer -> what they found (B, beams, G, H / G * K)."""


@dataclass(frozen=True)
class Source:
    """Of one layer: keys (B, G, K, T), over the root of K, values (B, G, T, K), and the queries' shape.

    That is B, -1, G, and K of all heads that share keys.
    """

    config: AttentionConfig
    keys: str
    values: str
    shape: str


@dataclass(frozen=True)
class PaddedSources:
    """Texts beside each other: every layer's `Source`, None without cross-attention.

    `hidden` (B, 1, 1, T) is added to the scores: 0, or very little at padding.
    """

    layers: tuple[Source | None, ...]
    hidden: str

    def attend(self, g: Graph, layer: int, q: str) -> str:
        """See `Sources`; the beams of a text are its queries, side by side: (B, G, beams * H / G, K)."""
        source = self.layers[layer]
        assert source is not None
        rows = below(g, g.add("Reshape", q, source.shape), source.config)
        scores = g.add("Add", g.add("MatMul", rows, source.keys), self.hidden)
        mixed = g.add("MatMul", g.add("Softmax", scores, axis=-1), source.values)
        return beside(g, mixed, source.config)


@dataclass(frozen=True)
class GroupedSources:
    """Texts in order of length, group after group.

    Attributes:
        groups: the texts of each.
        counts: (groups,) how many.
        batch: () B.
        back: (B,) where in this order each text of the batch stands.
    """

    groups: tuple[PaddedSources, ...]
    counts: str
    batch: str
    back: str

    def attend(self, g: Graph, layer: int, q: str) -> str:
        """See `Sources`."""
        beams = g.add("Div", g.add("Shape", q, start=0, end=1), self.batch)
        parts = g.add_many("Split", q, g.add("Mul", self.counts, beams), outputs=len(self.groups), axis=0)
        mixed = [group.attend(g, layer, part) for group, part in zip(self.groups, parts, strict=True)]
        return g.add("Concat", *mixed, axis=0)


def read_sources(graph: Graph, config: TransformerConfig, weights: Weights, x: str) -> list[str | None]:
    """The encoder's tokens (N', D) -> merged keys and values (N', 2 * G * K) of every layer with cross-attention."""

    def merged(layer: int, config: AttentionConfig) -> str:
        return linear(graph, weights.at(f"decoder.{layer}.cross.kv"), config.input_format, x)

    crosses = [layer.cross for layer in config.decoder]
    return [None if cross is None else merged(i, cross) for i, cross in enumerate(crosses)]


def padded_sources(
    g: Graph, config: TransformerConfig, merged: Sequence[str | None], places: str, hidden: str
) -> PaddedSources:
    """Merged keys and values as rows; `places` (B, T) are those of the tokens, -1 at padding."""
    layers: list[Source | None] = []
    for layer, one in zip(config.decoder, merged, strict=True):
        if layer.cross is None or one is None:
            layers.append(None)
        else:
            layers.append(source_of(g, layer.cross, *keys_and_values(g, layer.cross, padded(g, one, places))))
    return PaddedSources(tuple(layers), hidden)


def grouped_sources(
    g: Graph, form: PackedLayout, config: TransformerConfig, merged: Sequence[str | None]
) -> GroupedSources:
    """The same in groups."""
    grouping = form.grouping
    groups = tuple(
        padded_sources(g, config, merged, g.add("Where", mask, slots, g.constant(-1)), hidden_scores(g, mask))
        for slots, mask in grouping.groups(g)
    )
    every = g.add("Range", g.constant(0), grouping.batch, g.constant(1))
    back = g.add("ScatterElements", grouping.order, grouping.order, every, axis=0)
    return GroupedSources(groups, grouping.counts(g), grouping.batch, back)


def source_of(g: Graph, config: AttentionConfig, keys: str, values: str) -> Source:
    """Keys and values (B, G, T, K) as steps want them."""
    root = g.constant(1 / math.sqrt(config.head_width), np.float32)
    sizes = g.constant([-1, config.groups, config.group * config.head_width])
    shape = g.add("Concat", g.add("Shape", keys, start=0, end=1), sizes, axis=0)
    return Source(config, g.add("Mul", turned_keys(g, keys), root), values, shape)


def attend_to(g: Graph, config: AttentionConfig, weights: Weights, sources: Sources, layer: int, y: str) -> str:
    """A layer's cross-attention: (R, D) -> (R, D)."""
    q = linear(g, weights.at("q"), config.input_format, y)
    mixed = g.add("Reshape", sources.attend(g, layer, q), g.constant([-1, config.width]))
    return linear(g, weights.at("out"), config.output_format, mixed)
