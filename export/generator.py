"""Config and tensors -> one ONNX graph that translates: the encoder once, then the decoder in a Loop.

It writes what `transformer.generation` writes, greedily or by beam search, from the same tensors. The encoder runs on
packed tokens; each layer's cross-attention keys and values are computed once, and serve all beams of a text, which
stand side by side as queries. The loop carries the mixers' caches, grown by one column a step, and stops when no text
can gain. Keys lie in the caches transposed, ready to be multiplied.

Shapes: B texts, K beams, R = B * K rows, S tokens so far, T tokens of the sources, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..transformer.config import FLOAT32, AttentionConfig, LanguageHead, RecurrentConfig, TransformerConfig
from ..transformer.errors import InputError
from .encoder import INPUTS as SOURCE_INPUTS
from .encoder import Array, Axes, Weights, add_change, embed, encode, norm, scales
from .graph import Graph
from .layout import LOWEST, PackedLayout, dynamic_matmul, own_activation

BOOL, FLOAT, INT64 = onnx.TensorProto.BOOL, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
INPUTS: Axes = {**SOURCE_INPUTS, "max_new_tokens": [], "num_beams": [], "length_penalty": []}
OUTPUTS: Axes = {"sequences": ["batch", "beams", "tokens"], "scores": ["batch", "beams"]}


def build_generator(config: TransformerConfig, state: Mapping[str, Array]) -> onnx.ModelProto:
    """The whole graph.

    Inputs: `input_ids` and `attention_mask` (B, T), `max_new_tokens` (), `num_beams` () and `length_penalty` ().
    Outputs: `sequences` (B, K, S) with the end token and without the start token, then padding, best first, and
    `scores` (B, K), -inf where there are fewer texts than beams.

    Raises:
        InputError: the model is no encoder-decoder with a language head, or its encoder's mixers are cells.
    """
    if not (config.encoder and isinstance(config.head, LanguageHead)):
        raise InputError("a graph that translates is made of an encoder-decoder with a language head")
    graph, weights = Graph(), Weights(state)
    form = PackedLayout(graph, "input_ids", "attention_mask")
    x = encode(graph, form, config, weights)
    decoder = _Decoder(graph, config, config.head, weights, _sources(graph, form, config, weights, x))
    greedy = graph.add("Equal", "num_beams", graph.constant(1))
    sequences, scores = graph.choose(greedy, decoder.greedy, decoder.beams)
    graph.name_output(sequences, "sequences")
    graph.name_output(scores, "scores")
    return graph.model(INPUTS, OUTPUTS, contrib=True, types={"length_penalty": FLOAT, "sequences": INT64})


@dataclass(frozen=True)
class _Source:
    """What one layer attends to: keys (B, H, K, T), values (B, H, T, K)."""

    keys: str
    values: str


@dataclass(frozen=True)
class _Sources:
    """Every layer's, and what is added to the scores (B, 1, 1, T): 0, or very little at padding."""

    layers: tuple[_Source | None, ...]
    bias: str


def _sources(graph: Graph, form: PackedLayout, config: TransformerConfig, weights: Weights, x: str) -> _Sources:
    layers: list[_Source | None] = []
    for i, layer in enumerate(config.decoder):
        if layer.cross is None:
            layers.append(None)
            continue
        cross = layer.cross
        merged = _linear(graph, weights.at(f"decoder.{i}.cross.kv"), cross.input_format, x)
        rows = graph.add("Reshape", form.padded_rows(merged), graph.constant([0, 0, 2, cross.heads, cross.head_width]))
        keys, values = graph.add_many("Split", rows, outputs=2, axis=2, num_outputs=2)  # (B, T, 1, H, K)
        shapes = graph.constant([2])
        keys = graph.add("Transpose", graph.add("Squeeze", keys, shapes), perm=[0, 2, 3, 1])
        values = graph.add("Transpose", graph.add("Squeeze", values, shapes), perm=[0, 2, 1, 3])
        layers.append(_Source(keys, values))
    lowest = graph.constant(LOWEST, np.float32)
    hidden = graph.add("Where", form.mask, graph.constant(0, np.float32), lowest)
    return _Sources(tuple(layers), graph.add("Unsqueeze", hidden, graph.constant([1, 2])))


def _linear(g: Graph, weights: Weights, form: str, x: str) -> str:
    weight = g.weight(weights.full("weight"), weights["weight"].T)
    bias = g.weight(weights.full("bias"), weights["bias"])
    if form == FLOAT32:
        return g.add("Add", g.add("MatMul", x, weight), bias)
    return dynamic_matmul(g, x, weight, g.weight(weights.full("scale"), weights["scale"]), bias)


class _Decoder:
    """The decoder's step, and the two loops around it."""

    def __init__(
        self, graph: Graph, config: TransformerConfig, head: LanguageHead, weights: Weights, sources: _Sources
    ) -> None:
        self.config, self.head, self.weights, self.sources = config, head, weights, sources
        self.tables = "embeddings" if config.target is None else "target"
        self.vocabulary = config.decoder_embedding.vocab_size
        table = weights.at(self._head_table())
        self.turned: tuple[str, str] | None = None
        if "scale" in table:  # int8: (D, V) and (V,), made once, when the graph is loaded
            turned = graph.add("Transpose", graph.weight(table.full("weight"), table["weight"]), perm=[1, 0])
            self.turned = turned, graph.add("Reshape", scales(graph, table), graph.constant([-1]))

    # --- one step ---

    def step(self, g: Graph, tokens: str, place: str, caches: Sequence[str]) -> tuple[str, list[str]]:
        """Tokens (R,) at a place (), and the caches -> logits (R, V) of what follows, and the caches with them."""
        config, embedding = self.config, self.config.decoder_embedding
        x = embed(g, config, embedding, self.weights.at(self.tables), tokens, place)
        left = list(caches)
        kept: list[str] = []
        for i, layer in enumerate(config.decoder):
            part = self.weights.at(f"decoder.{i}")
            x, new = self._layer(g, i, part, x, left[: _cache_count(layer.mixer)])
            kept += new
            left = left[_cache_count(layer.mixer) :]
        x = norm(g, self.weights.at("decoder_norm"), x, config.norm_eps) if config.final_norm else x
        return self._logits(g, x), kept

    def _layer(self, g: Graph, i: int, weights: Weights, x: str, caches: Sequence[str]) -> tuple[str, list[str]]:
        layer, source = self.config.decoder[i], self.sources.layers[i]
        kept: list[str] = []

        def add(x: str, part: str, change: Callable[[str], str]) -> str:
            return add_change(g, self.config, weights.at(f"{part}_norm"), x, change)

        def absent(part: str) -> str:
            return g.weight(weights.full(f"{part}.bias"), weights[f"{part}.bias"])

        def mix(y: str) -> str:
            if layer.mixer is None:
                return absent("mixer")
            if isinstance(layer.mixer, AttentionConfig):
                mixed, new = _attention(g, layer.mixer, weights.at("mixer"), y, caches)
            else:
                mixed, new = _cell(g, layer.mixer, weights.at("mixer"), y, caches)
            kept.extend(new)
            return mixed

        def attend(y: str) -> str:
            if layer.cross is None or source is None:
                return absent("cross")
            return self._cross(g, layer.cross, weights.at("cross"), source, y)

        def feed(y: str) -> str:
            if layer.ffn is None:
                return absent("ffn")
            up = _linear(g, weights.at("ffn.up"), layer.ffn.input_format, y)
            return _linear(
                g, weights.at("ffn.down"), layer.ffn.output_format, own_activation(g, layer.ffn.activation, up)
            )

        x = add(x, "mixer", mix)
        x = add(x, "cross", attend)
        return add(x, "ffn", feed), kept

    def _cross(self, g: Graph, config: AttentionConfig, weights: Weights, source: _Source, y: str) -> str:
        """The beams of a text are its queries, side by side: (R, D) -> (B, H, K beams, K) and back."""
        q = g.add("Mul", _linear(g, weights.at("q"), config.input_format, y), _root(g, config))
        batch = g.add("Shape", source.keys, start=0, end=1)
        shape = g.add("Concat", batch, g.constant([-1, config.heads, config.head_width]), axis=0)
        q = g.add("Transpose", g.add("Reshape", q, shape), perm=[0, 2, 1, 3])
        scores = g.add("Add", g.add("MatMul", q, source.keys), self.sources.bias)
        mixed = g.add("MatMul", g.add("Softmax", scores, axis=-1), source.values)
        mixed = g.add("Reshape", g.add("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([-1, config.width]))
        return _linear(g, weights.at("out"), config.output_format, mixed)

    def _logits(self, g: Graph, x: str) -> str:
        weights = self.weights.at(self._head_table())
        bias = g.weight("head.bias", self.weights["head.bias"]) if self.head.bias else ""
        if self.turned is not None:
            return dynamic_matmul(g, x, *self.turned, bias)
        table = g.weight(weights.full("weight"), weights["weight"])
        return g.add("Gemm", x, table, *([bias] if bias else []), transB=1)

    def _head_table(self) -> str:
        return f"{self.tables}.tokens" if self.head.tied else "head.tokens"

    # --- loops ---

    def _empty_caches(self, g: Graph, rows: str) -> list[str]:
        """The caches before the first token, of `rows` (1,) rows."""
        shapes: list[list[int]] = []
        for layer in self.config.decoder:
            if isinstance(layer.mixer, AttentionConfig):
                shapes += [
                    [layer.mixer.heads, layer.mixer.head_width, 0],
                    [layer.mixer.heads, 0, layer.mixer.head_width],
                ]
            elif layer.mixer is not None:
                shapes += [[layer.mixer.units]] * _cache_count(layer.mixer)
        return [g.add("ConstantOfShape", g.add("Concat", rows, g.constant(shape), axis=0)) for shape in shapes]

    def greedy(self, g: Graph) -> list[str]:
        """One text a row."""
        rows = g.add("Shape", "input_ids", start=0, end=1)
        start = g.add("Expand", g.constant(self.head.start_id), rows)
        ended = g.add("Expand", g.constant(False, np.bool_), rows)
        zero = g.add("Expand", g.constant(0, np.float32), rows)
        count = g.add("Expand", g.constant(0), rows)

        def body(b: Graph, place: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
            tokens, ended, score, count, *caches = carried
            logits, caches = self.step(b, tokens, place, caches)
            best = b.add("ArgMax", logits, axis=1, keepdims=1)
            chance = b.add("GatherElements", b.add("LogSoftmax", logits, axis=1), best, axis=1)
            chosen = b.add("Squeeze", best, b.constant([1]))
            score = b.add("Where", ended, score, b.add("Add", score, b.add("Squeeze", chance, b.constant([1]))))
            count = b.add("Where", ended, count, b.add("Add", count, b.constant(1)))
            written = b.add("Where", ended, b.constant(self.config.text.pad_id), chosen)
            ended = b.add("Or", ended, b.add("Equal", chosen, b.constant(self.head.end_id)))
            return _not_all(b, ended), [chosen, ended, score, count, *caches], [written]

        initial = [start, ended, zero, count, *self._empty_caches(g, rows)]
        final, (written,) = g.loop("max_new_tokens", initial, body, scanned=1)
        length = g.add("Cast", g.add("Max", final[3], g.constant(1)), to=FLOAT)
        scores = g.add("Div", final[2], g.add("Pow", length, "length_penalty"))
        axis = g.constant([1])
        by_row = g.add(
            "Transpose", g.add("Reshape", written, g.add("Concat", g.constant([-1]), rows, axis=0)), perm=[1, 0]
        )
        return [g.add("Unsqueeze", by_row, axis), g.add("Unsqueeze", scores, axis)]

    def beams(self, g: Graph) -> list[str]:
        """K texts a row; see `transformer.generation._Beams`."""
        beams = g.add("Reshape", "num_beams", g.constant([1]))
        batch = g.add("Shape", "input_ids", start=0, end=1)
        rows = g.add("Mul", batch, beams)
        grid = g.add("Concat", batch, beams, axis=0)
        first = g.add("Equal", g.add("Range", g.constant(0), "num_beams", g.constant(1)), g.constant(0))
        lowest = g.constant(-np.inf, np.float32)
        scores = g.add("Expand", g.add("Where", first, g.constant(0, np.float32), lowest), grid)
        nothing = g.add("Expand", lowest, grid)
        texts = g.add("ConstantOfShape", g.add("Concat", grid, g.constant([0]), axis=0), value=_zero(np.int64))
        still = g.add("Expand", g.constant(True, np.bool_), batch)
        start = g.add("Expand", g.constant(self.head.start_id), rows)

        def body(b: Graph, place: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
            tokens, running, scores, finished, best, still, *caches = carried
            logits, caches = self.step(b, tokens, place, caches)
            chances = b.add("LogSoftmax", logits, axis=1)
            state: tuple[str, ...] = (running, scores, finished, best, still)
            tokens, state, taken = self._advance(b, place, chances, state, grid, beams)
            caches = [b.add("Gather", cache, taken, axis=0) for cache in caches]
            more = b.add("Cast", b.add("ReduceMax", b.add("Cast", state[4], to=INT64), keepdims=0), to=BOOL)
            return more, [tokens, *state, *caches], []

        initial = [start, texts, scores, texts, nothing, still, *self._empty_caches(g, rows)]
        final, _ = g.loop("max_new_tokens", initial, body, scanned=0)
        return [final[3], final[4]]

    def _advance(
        self, b: Graph, place: str, chances: str, state: tuple[str, ...], grid: str, beams: str
    ) -> tuple[str, tuple[str, ...], str]:
        """Log-probabilities (R, V) -> next tokens (R,), the state after them, and which rows (R,) they come from."""
        running, scores, finished, best, still = state
        one, size = b.constant(1), b.constant(self.vocabulary)
        number = b.add("Add", place, one)
        total = b.add("Add", b.add("Reshape", scores, b.constant([-1, 1])), chances)
        total = b.add(
            "Reshape",
            total,
            b.add("Concat", b.add("Slice", grid, b.constant([0]), b.constant([1])), b.constant([-1]), axis=0),
        )
        width = b.add("Min", b.add("Mul", beams, b.constant([2])), b.add("Mul", beams, size))
        scores, places = b.add_many("TopK", total, width, outputs=2, axis=1)
        origin = b.add("Div", places, size)
        tokens = b.add("Sub", places, b.add("Mul", origin, size))
        texts = b.add("Gather", _rows(b, running), self._flat(b, origin, beams), axis=0)
        column = b.add("Unsqueeze", tokens, b.constant([2]))
        texts = b.add("Concat", texts, column, axis=2)
        last = b.add("Equal", number, "max_new_tokens")
        ends = b.add("Or", b.add("Equal", tokens, b.constant(self.head.end_id)), last)
        order = b.add("Range", b.constant(0), b.add("Squeeze", width), one)
        allowed = b.add("And", ends, b.add("Less", order, beams))
        allowed = b.add("And", allowed, b.add("Unsqueeze", still, b.constant([1])))
        lowest = b.constant(-np.inf, np.float32)
        length = b.add("Pow", b.add("Cast", number, to=FLOAT), "length_penalty")
        fresh = b.add("Where", allowed, b.add("Div", scores, length), lowest)
        pad = b.add("Expand", b.constant(self.config.text.pad_id), b.add("Concat", grid, b.constant([1]), axis=0))
        every = b.add("Concat", b.add("Concat", finished, pad, axis=2), texts, axis=1)
        best, chosen = b.add_many("TopK", b.add("Concat", best, fresh, axis=1), beams, outputs=2, axis=1)
        finished = b.add("Gather", _rows(b, every), self._flat(b, chosen, b.add("Add", beams, width)), axis=0)
        scores, kept = b.add_many("TopK", b.add("Where", ends, lowest, scores), beams, outputs=2, axis=1)
        running = b.add("Gather", _rows(b, texts), self._flat(b, kept, width), axis=0)
        tokens = b.add("Reshape", b.add("GatherElements", tokens, kept, axis=1), b.constant([-1]))
        taken = b.add("GatherElements", origin, kept, axis=1)
        taken = b.add("Reshape", self._flat(b, taken, beams), b.constant([-1]))
        worst = b.add("ReduceMin", best, b.constant([1]), keepdims=0)
        reachable = b.add("Div", b.add("ReduceMax", scores, b.constant([1]), keepdims=0), length)
        done = b.add("And", b.add("Greater", worst, lowest), b.add("LessOrEqual", reachable, worst))
        still = b.add("And", still, b.add("Not", done))
        return tokens, (running, scores, finished, best, still), taken

    @staticmethod
    def _flat(b: Graph, columns: str, width: str) -> str:
        """Columns (B, M) of rows that are `width` (1,) wide -> places in the flattened rows."""
        count = b.add("Squeeze", b.add("Shape", columns, start=0, end=1))
        first = b.add("Mul", b.add("Range", b.constant(0), count, b.constant(1)), width)
        return b.add("Add", columns, b.add("Unsqueeze", first, b.constant([1])))


def _cache_count(mixer: AttentionConfig | RecurrentConfig | None) -> int:
    if mixer is None:
        return 0
    return 2 if isinstance(mixer, AttentionConfig) or mixer.kind == "lstm" else 1


def _root(g: Graph, config: AttentionConfig) -> str:
    return g.constant(1 / math.sqrt(config.head_width), np.float32)


def _attention(
    g: Graph, config: AttentionConfig, weights: Weights, y: str, caches: Sequence[str]
) -> tuple[str, list[str]]:
    """(R, D), keys (R, H, K, S) and values (R, H, S, K) -> (R, D) and both with one column more."""
    qkv = _linear(g, weights.at("qkv"), config.input_format, y)
    rows = g.add("Reshape", qkv, g.constant([-1, 3, config.heads, config.head_width]))
    q, k, v = (
        g.add("Squeeze", part, g.constant([1])) for part in g.add_many("Split", rows, outputs=3, axis=1, num_outputs=3)
    )  # (R, H, K)
    keys = g.add("Concat", caches[0], g.add("Unsqueeze", k, g.constant([3])), axis=3)
    values = g.add("Concat", caches[1], g.add("Unsqueeze", v, g.constant([2])), axis=2)
    q = g.add("Unsqueeze", g.add("Mul", q, _root(g, config)), g.constant([2]))
    mixed = g.add("MatMul", g.add("Softmax", g.add("MatMul", q, keys), axis=-1), values)  # (R, H, 1, K)
    mixed = g.add("Reshape", mixed, g.constant([-1, config.width]))
    return _linear(g, weights.at("out"), config.output_format, mixed), [keys, values]


def _cell(g: Graph, config: RecurrentConfig, weights: Weights, y: str, caches: Sequence[str]) -> tuple[str, list[str]]:
    """(R, D) and the state (R, U) -> (R, D) and the state; formulas in `transformer.recurrent`."""
    gates = _linear(g, weights.at("inputs"), config.input_format, y)
    if config.kind == "ssru":
        candidate, forget = g.add_many("Split", gates, outputs=2, axis=1, num_outputs=2)
        keep = g.add("Sigmoid", forget)
        state = [_blend(g, keep, caches[0], candidate)]
        output = g.add("Relu", state[0])
    else:
        back = _linear(g, weights.at("recur"), FLOAT32, caches[0])
        state = {"rnn": _rnn, "lstm": _lstm, "gru": _gru}[config.kind](g, gates, back, caches)
        output = state[0]
    return (_linear(g, weights.at("out"), config.output_format, output) if config.project else output), state


def _blend(g: Graph, keep: str, old: str, new: str) -> str:
    """keep * old + (1 - keep) * new."""
    rest = g.add("Sub", g.constant(1, np.float32), keep)
    return g.add("Add", g.add("Mul", keep, old), g.add("Mul", rest, new))


def _rnn(g: Graph, gates: str, back: str, caches: Sequence[str]) -> list[str]:
    return [g.add("Tanh", g.add("Add", gates, back))]


def _lstm(g: Graph, gates: str, back: str, caches: Sequence[str]) -> list[str]:
    i, f, c, o = g.add_many("Split", g.add("Add", gates, back), outputs=4, axis=1, num_outputs=4)
    kept = g.add("Mul", g.add("Sigmoid", f), caches[1])
    cell = g.add("Add", kept, g.add("Mul", g.add("Sigmoid", i), g.add("Tanh", c)))
    return [g.add("Mul", g.add("Sigmoid", o), g.add("Tanh", cell)), cell]


def _gru(g: Graph, gates: str, back: str, caches: Sequence[str]) -> list[str]:
    r, z, n = g.add_many("Split", gates, outputs=3, axis=1, num_outputs=3)
    back_r, back_z, back_n = g.add_many("Split", back, outputs=3, axis=1, num_outputs=3)
    reset = g.add("Sigmoid", g.add("Add", r, back_r))
    new = g.add("Tanh", g.add("Add", n, g.add("Mul", reset, back_n)))
    return [_blend(g, g.add("Sigmoid", g.add("Add", z, back_z)), caches[0], new)]


def _rows(b: Graph, texts: str) -> str:
    """(B, M, S) -> (B * M, S)."""
    tail = b.add("Shape", texts, start=2, end=3)
    return b.add("Reshape", texts, b.add("Concat", b.constant([-1]), tail, axis=0), allowzero=1)


def _not_all(b: Graph, flags: str) -> str:
    least = b.add("ReduceMin", b.add("Cast", flags, to=INT64), keepdims=0)
    return b.add("Equal", least, b.constant(0))


def _zero(dtype: type[np.generic]) -> onnx.TensorProto:
    value: Any = np.zeros(1, dtype)
    return onnx.numpy_helper.from_array(value)
