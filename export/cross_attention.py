"""A decoder's attention to the encoder's tokens: their keys and values once, and the queries of each step.

Shapes: B texts, R rows (beams of a text stand side by side), T tokens of the sources, D model width, H heads, K head
width.
"""

from dataclasses import dataclass

from ..transformer.config import AttentionConfig, TransformerConfig
from .encoder import Weights
from .graph import Graph
from .layout import PackedLayout
from .mixers import keys_and_values, linear, root


@dataclass(frozen=True)
class Sources:
    """Every layer's keys (B, H, K, T) and values (B, H, T, K), None where it has no cross-attention.

    `hidden` (B, 1, 1, T) is added to the scores: 0, or very little at padding.
    """

    layers: tuple[tuple[str, str] | None, ...]
    hidden: str


def read_sources(graph: Graph, form: PackedLayout, config: TransformerConfig, weights: Weights, x: str) -> Sources:
    """Of the encoder's tokens."""
    layers: list[tuple[str, str] | None] = []
    for i, layer in enumerate(config.decoder):
        if layer.cross is None:
            layers.append(None)
            continue
        merged = linear(graph, weights.at(f"decoder.{i}.cross.kv"), layer.cross.input_format, x)
        keys, values = keys_and_values(graph, layer.cross, form.padded_rows(merged))
        layers.append((keys, values))
    return Sources(tuple(layers), form.hidden())


def attend_to(g: Graph, config: AttentionConfig, weights: Weights, source: tuple[str, str], hidden: str, y: str) -> str:
    """The beams of a text are its queries, side by side: (R, D) -> (B, H, beams, K) and back."""
    keys, values = source
    q = g.add("Mul", linear(g, weights.at("q"), config.input_format, y), root(g, config))
    batch = g.add("Shape", keys, start=0, end=1)
    shape = g.add("Concat", batch, g.constant([-1, config.heads, config.head_width]), axis=0)
    q = g.add("Transpose", g.add("Reshape", q, shape), perm=[0, 2, 1, 3])
    scores = g.add("Add", g.add("MatMul", q, keys), hidden)
    mixed = g.add("MatMul", g.add("Softmax", scores, axis=-1), values)
    mixed = g.add("Reshape", g.add("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([-1, config.width]))
    return linear(g, weights.at("out"), config.output_format, mixed)
