"""Token mixers of a decoder in ONNX, one token a row: attention to what is in the caches, and recurrent cells.

Formulas in `transformer.attention` and `transformer.recurrent`. A cache of attention grows by a copy of itself at every
round. What lies in `Old` is not copied; scores and sums over both are put together.

Shapes: R rows, S tokens so far, P old ones, D model width, H heads, G heads of keys and values, K head width, U units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..transformer.config import FLOAT32, AttentionConfig, RecurrentConfig
from ..transformer.layer_config import MixerConfig
from .attention import parts_of
from .graph import CONTRIB, Graph
from .linears import own, turned
from .tensors import Weights

Mixed = tuple[str, list[str]]  # tokens, and the caches with them


@dataclass(frozen=True)
class Old:
    """Tokens before those in the caches of attention.

    Attributes:
        keys: (R, G, K, P).
        values: (R, G, P, K).
        hidden: (R, 1, 1, P) what is added to their scores; "": all are seen.
        some: () whether P is above 0; "": it is.
    """

    keys: str
    values: str
    hidden: str = ""
    some: str = ""


def linear(g: Graph, weights: Weights, form: str, x: str) -> str:
    """Tokens (N, I) -> (N, O) in the config's format."""
    return own(g, weights, form, x, turned)


def step(
    g: Graph, config: MixerConfig, weights: Weights, y: str, caches: Sequence[str], hidden: str, old: Old | None
) -> Mixed:
    """One token of each row (R, D) -> the same mixed with those before it; `hidden` and `old` are for `attention`."""
    if isinstance(config, AttentionConfig):
        return attention(g, config, weights, y, caches, hidden, old)
    gates = linear(g, weights.at("inputs"), config.input_format, y)
    output, state = cell(g, config, weights, gates, caches)
    return projected(g, config, weights, output), state


def cache_count(mixer: MixerConfig | None) -> int:
    """How many tensors a mixer keeps."""
    return len(_empty_shapes(mixer))


def empty_caches(g: Graph, mixer: MixerConfig | None, rows: str) -> list[str]:
    """What a mixer keeps before the first token of `rows` (1,) rows."""
    shapes = _empty_shapes(mixer)
    return [g.add("ConstantOfShape", g.add("Concat", rows, g.constant(shape), axis=0)) for shape in shapes]


def _empty_shapes(mixer: MixerConfig | None) -> list[list[int]]:
    if mixer is None:
        return []
    if isinstance(mixer, AttentionConfig):
        return [[mixer.groups, 0, mixer.head_width]] * 2
    return [[mixer.units]] * (2 if mixer.kind == "lstm" else 1)


# --- attention ---


def attention(
    g: Graph, config: AttentionConfig, weights: Weights, y: str, caches: Sequence[str], hidden: str, old: Old | None
) -> Mixed:
    """(R, D), keys and values (R, G, S, K) -> (R, D) and both with one token more.

    `hidden` (R, 1, 1, S + 1) is added to the scores; "": all is seen.
    """
    rows = g.add("Unsqueeze", linear(g, weights.at("qkv"), config.input_format, y), g.constant([1]))
    parts = parts_of(g, rows, config)  # (R, 1, H or G * K)
    among = _among if config.group == 1 else _among_groups
    if old is None:
        mixed, *kept = among(g, config, parts, caches, hidden)
    elif old.some:
        mixed, *kept = g.choose(
            old.some,
            lambda b: _among_both(b, config, parts, caches, old),
            lambda b: among(b, config, parts, caches, hidden),
        )
    else:
        mixed, *kept = _among_both(g, config, parts, caches, old)
    mixed = g.add("Reshape", mixed, g.constant([-1, config.width]))
    return linear(g, weights.at("out"), config.output_format, mixed), kept


def _among(g: Graph, config: AttentionConfig, parts: Sequence[str], caches: Sequence[str], hidden: str) -> list[str]:
    """Queries, keys and values of the new tokens -> what is mixed, and the caches; in one operator of onnxruntime."""
    return list(
        g.add_many(
            "MultiHeadAttention",
            *(*parts, "", "", hidden, *caches),
            outputs=3,
            domain=CONTRIB,
            num_heads=config.heads,
            scale=1 / math.sqrt(config.head_width),
        )
    )


def _among_both(g: Graph, config: AttentionConfig, parts: Sequence[str], caches: Sequence[str], old: Old) -> list[str]:
    """The same with old tokens before those of the caches."""
    q, keys, values = _grown(g, config, parts, caches)
    before = g.add("MatMul", q, old.keys)
    before = g.add("Add", before, old.hidden) if old.hidden else before
    after = g.add("MatMul", q, turned_keys(g, keys))
    weights = g.add("Softmax", g.add("Concat", before, after, axis=3), axis=-1)
    sizes = (g.add("Shape", part, start=2, end=3) for part in (old.values, values))
    first, last = g.add_many("Split", weights, g.add("Concat", *sizes, axis=0), outputs=2, axis=3)
    return [g.add("Add", g.add("MatMul", first, old.values), g.add("MatMul", last, values)), keys, values]


def _among_groups(
    g: Graph, config: AttentionConfig, parts: Sequence[str], caches: Sequence[str], hidden: str
) -> list[str]:
    """`_among` where heads share keys, which onnxruntime's operator does not know."""
    q, keys, values = _grown(g, config, parts, caches)
    scores = g.add("MatMul", q, turned_keys(g, keys))
    weights = g.add("Softmax", g.add("Add", scores, hidden) if hidden else scores, axis=-1)
    return [g.add("MatMul", weights, values), keys, values]


def _grown(g: Graph, config: AttentionConfig, parts: Sequence[str], caches: Sequence[str]) -> tuple[str, str, str]:
    """Queries (R, G, H / G, K) over the root of K, and the caches with the new tokens."""
    of_queries, of_keys = (g.constant([-1, config.groups, each, config.head_width]) for each in (config.group, 1))
    q = g.add("Mul", g.add("Reshape", parts[0], of_queries), g.constant(1 / math.sqrt(config.head_width), np.float32))
    new = (g.add("Reshape", part, of_keys) for part in parts[1:])
    keys, values = (g.add("Concat", *pair, axis=2) for pair in zip(caches, new, strict=True))
    return q, keys, values


def turned_keys(g: Graph, keys: str) -> str:
    """(R, G, S, K) -> (R, G, K, S), ready to be multiplied by queries."""
    return g.add("Transpose", keys, perm=[0, 1, 3, 2])


def keys_and_values(g: Graph, config: AttentionConfig, rows: str) -> list[str]:
    """Merged (R, S, 2 * G * K) -> keys and values (R, G, S, K)."""
    rows = g.add("Reshape", rows, g.constant([0, 0, 2, config.groups, config.head_width]))
    parts = g.add_many("Split", rows, outputs=2, axis=2, num_outputs=2)  # (R, S, 1, G, K)
    return [g.add("Transpose", g.add("Squeeze", part, g.constant([2])), perm=[0, 2, 1, 3]) for part in parts]


# --- cells ---


def cell(g: Graph, config: RecurrentConfig, weights: Weights, gates: str, state: Sequence[str]) -> Mixed:
    """W x (R, gates * U) and the state (R, U) -> the output (R, U) and the state."""
    if config.kind == "ssru":
        candidate, forget = g.add_many("Split", gates, outputs=2, axis=1, num_outputs=2)
        new = [_blend(g, g.add("Sigmoid", forget), state[0], candidate)]
        return g.add("Relu", new[0]), new
    back = linear(g, weights.at("recur"), FLOAT32, state[0])
    new = {"rnn": _rnn, "lstm": _lstm, "gru": _gru}[config.kind](g, gates, back, state)
    return new[0], new


def projected(g: Graph, config: RecurrentConfig, weights: Weights, output: str) -> str:
    """A cell's output (…, U) -> (…, D)."""
    return linear(g, weights.at("out"), config.output_format, output) if config.project else output


def _blend(g: Graph, keep: str, old: str, new: str) -> str:
    """keep * old + (1 - keep) * new."""
    rest = g.add("Sub", g.constant(1, np.float32), keep)
    return g.add("Add", g.add("Mul", keep, old), g.add("Mul", rest, new))


def _rnn(g: Graph, gates: str, back: str, state: Sequence[str]) -> list[str]:
    return [g.add("Tanh", g.add("Add", gates, back))]


def _lstm(g: Graph, gates: str, back: str, state: Sequence[str]) -> list[str]:
    i, f, c, o = g.add_many("Split", g.add("Add", gates, back), outputs=4, axis=1, num_outputs=4)
    kept = g.add("Mul", g.add("Sigmoid", f), state[1])
    new = g.add("Add", kept, g.add("Mul", g.add("Sigmoid", i), g.add("Tanh", c)))
    return [g.add("Mul", g.add("Sigmoid", o), g.add("Tanh", new)), new]


def _gru(g: Graph, gates: str, back: str, state: Sequence[str]) -> list[str]:
    r, z, n = g.add_many("Split", gates, outputs=3, axis=1, num_outputs=3)
    back_r, back_z, back_n = g.add_many("Split", back, outputs=3, axis=1, num_outputs=3)
    reset = g.add("Sigmoid", g.add("Add", r, back_r))
    new = g.add("Tanh", g.add("Add", n, g.add("Mul", reset, back_n)))
    return [_blend(g, g.add("Sigmoid", g.add("Add", z, back_z)), state[0], new)]
