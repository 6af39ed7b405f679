"""Config and tensors -> the ONNX graphs that write a token at a time, named as Optimum names them.

An encoder-decoder has three: `encoder_model` runs once; `decoder_model` reads the first tokens and works out keys and
values of the encoder's; `decoder_with_past_model` reads one token more. A decoder by itself has one, `model`, whose
past may have length 0. The first tokens begin with the start token: only the graph of the whole decode adds it itself.

Layer i keeps `past_key_values.{i}.decoder.key` and `.value` (B, G, P, K) beside `.encoder.key` and `.value` (B, G, S,
K), without `.decoder` where there is no encoder. What comes out is named `present` instead; of the encoder's only
`decoder_model` gives it, since it stays. No other tool has names for what cells keep: here they are `.state` (B, U)
and, of an LSTM, `.cell` too, in the place of `.key` and `.value`. An absent sub-layer keeps nothing. Where positions
count and no keys tell how many tokens came before, `decoder_with_past_model` takes `cache_position` (1,), Optimum's
name.

Shapes: B rows, T tokens now, P before, S of the encoder, D model width, G heads of keys and values, K head width, U
units, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from ..transformer.config import AttentionConfig, LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.layer_config import MixerConfig
from .attention import hidden_scores
from .columns import Columns, Mixing, all_columns, masked_columns
from .cross_attention import PaddedSources, Source, source_of
from .decoder import Decoder
from .encoder import Axes, build_encoder
from .graph import Graph
from .mixers import keys_and_values, linear
from .names import DECODER_FILE, DECODER_WITH_PAST_FILE, ENCODER_FILE, MODEL_FILE, PAST, PRESENT
from .tensors import Array, Weights

FLOAT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
SOURCE_MASK: Axes = {"encoder_attention_mask": ["batch", "encoder_sequence"]}


def build_steps(config: TransformerConfig, state: Mapping[str, Array]) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Each graph and its place in a bundle, one after another: they may be large.

    Raises:
        InputError: the model has no language head, or its encoder's mixers are cells.
    """
    if not isinstance(config.head, LanguageHead):
        raise InputError("graphs that write are made of a decoder with a language head")
    weights = Weights(state)
    if not config.encoder:
        yield MODEL_FILE, _alone(config, config.head, weights)
        return
    yield ENCODER_FILE, build_encoder(config, state)
    yield DECODER_FILE, _first(config, config.head, weights)
    yield DECODER_WITH_PAST_FILE, _with_past(config, config.head, weights)


def _alone(config: TransformerConfig, head: LanguageHead, weights: Weights) -> onnx.ModelProto:
    """`input_ids` (B, T), `attention_mask` (B, P + T) and the past -> `logits` (B, T, V) and the present."""
    graph = Graph()
    decoder = Decoder(config, head, weights, None)
    past = _kept(config, PAST, "past_sequence")
    outputs = _write(decoder, masked_columns(graph), list(past))
    inputs: Axes = {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "total_sequence"], **past}
    return _model(graph, inputs, {**outputs, **_kept(config, PRESENT, "total_sequence")}, past)


def _first(config: TransformerConfig, head: LanguageHead, weights: Weights) -> onnx.ModelProto:
    """`input_ids` (B, T), `encoder_hidden_states` (B, S, D) and their mask -> `logits` (B, T, V) and every present."""
    graph, states = Graph(), "encoder_hidden_states"
    layers: list[Source | None] = [None] * len(config.decoder)
    tokens = graph.add("Reshape", states, graph.constant([-1, config.d_model]))
    rows = graph.add("Concat", graph.add("Shape", states, start=0, end=2), graph.constant([-1]), axis=0)
    for i, layer in enumerate(config.decoder):
        if layer.cross is not None:
            merged = linear(graph, weights.at(f"decoder.{i}.cross.kv"), layer.cross.input_format, tokens)
            keys, values = keys_and_values(graph, layer.cross, graph.add("Reshape", merged, rows))
            layers[i] = source_of(graph, layer.cross, keys, values)
            graph.name_output(keys, f"{PRESENT}.{i}.encoder.key")
            graph.name_output(values, f"{PRESENT}.{i}.encoder.value")
    decoder = Decoder(config, head, weights, PaddedSources(tuple(layers), _hidden(graph)))
    outputs = _write(decoder, all_columns(graph, graph.constant(0)), None)
    inputs: Axes = {"input_ids": ["batch", "sequence"], states: ["batch", "encoder_sequence", config.d_model]}
    outputs |= _by_layer({**_kept(config, PRESENT, "sequence"), **_of_sources(config, PRESENT)})
    return _model(graph, {**inputs, **SOURCE_MASK}, outputs, [states])


def _with_past(config: TransformerConfig, head: LanguageHead, weights: Weights) -> onnx.ModelProto:
    """`input_ids` (B, 1), `encoder_attention_mask` (B, S) and the past -> `logits` (B, 1, V) and the present."""
    graph = Graph()
    own, sources = _kept(config, PAST, "past_sequence"), _of_sources(config, PAST)
    layers: list[Source | None] = [None] * len(config.decoder)
    for i, layer in enumerate(config.decoder):
        if layer.cross is not None:
            past_keys, past_values = (f"{PAST}.{i}.encoder.{name}" for name in ("key", "value"))
            layers[i] = source_of(graph, layer.cross, past_keys, past_values)
    decoder = Decoder(config, head, weights, PaddedSources(tuple(layers), _hidden(graph)))
    keys = [name for name in own if name.endswith(".key")]
    told = config.decoder_embedding.position_kind != "none" and not keys
    inputs: Axes = {"input_ids": ["batch", 1], **SOURCE_MASK, **({"cache_position": [1]} if told else {})}
    if keys:
        past = graph.add("Squeeze", graph.add("Shape", keys[0], start=2, end=3))
    else:
        past = graph.add("Squeeze", "cache_position") if told else graph.constant(0)
    outputs = _write(decoder, all_columns(graph, past), list(own))
    inputs |= _by_layer({**own, **sources})
    return _model(graph, inputs, {**outputs, **_kept(config, PRESENT, "total_sequence")}, [*own, *sources])


def _write(decoder: Decoder, columns: Columns, past: Sequence[str] | None) -> Axes:
    """Name the logits and what the mixers keep; the axes of the logits."""
    g, config = columns.graph, decoder.config
    x, new = decoder.layers(g, columns.ids, columns.positions, Mixing(columns, past).mix)
    g.name_output(_logits(decoder, columns, x), "logits")
    for value, name in zip(new, _kept(config, PRESENT, ""), strict=True):
        g.name_output(value, name)
    return {"logits": ["batch", "sequence", decoder.vocabulary]}


def _logits(decoder: Decoder, columns: Columns, x: str) -> str:
    """Tokens after the last layer (N, D) -> (B, T, V).

    In int8 the last column has a range of its own, as in the whole decode, which needs no logits of the others.
    """
    g, axis = columns.graph, columns.graph.constant([1])
    rows = columns.rows(x)

    def head(b: Graph, part: str) -> str:
        shape = b.add("Concat", b.add("Shape", part, start=0, end=2), b.constant([decoder.vocabulary]), axis=0)
        flat = b.add("Reshape", part, b.constant([-1, decoder.config.d_model]))
        return b.add("Reshape", decoder.logits(b, flat), shape)

    def apart(b: Graph) -> list[str]:
        last = b.constant([-1])
        before = b.add("Slice", rows, b.constant([0]), last, axis)
        after = b.add("Slice", rows, last, b.constant([np.iinfo(np.int64).max]), axis)
        return [b.add("Concat", head(b, before), head(b, after), axis=1)]

    if not decoder.quantized_head:
        return head(g, rows)
    alone = g.add("Equal", g.add("Squeeze", g.add("Shape", "input_ids", start=1, end=2)), g.constant(1))
    return g.choose(alone, lambda b: [head(b, rows)], apart)[0]


def _kept(config: TransformerConfig, begin: str, columns: str) -> Axes:
    """Public names and axes of what the mixers keep."""
    place = f"{begin}.{{}}.decoder" if config.encoder else f"{begin}.{{}}"
    return {
        f"{place.format(i)}.{name}": axes
        for i, layer in enumerate(config.decoder)
        for name, axes in _parts(layer.mixer, columns).items()
    }


def _of_sources(config: TransformerConfig, begin: str) -> Axes:
    """The same of keys and values of the encoder's tokens."""
    return {
        f"{begin}.{i}.encoder.{name}": axes
        for i, layer in enumerate(config.decoder)
        for name, axes in _parts(layer.cross, "encoder_sequence").items()
    }


def _parts(mixer: MixerConfig | None, columns: str) -> Axes:
    """What one keeps: the ends of the names, and the axes."""
    if mixer is None:
        return {}
    if isinstance(mixer, AttentionConfig):
        return {name: ["batch", mixer.groups, columns, mixer.head_width] for name in ("key", "value")}
    return {name: ["batch", mixer.units] for name in (("state", "cell") if mixer.kind == "lstm" else ("state",))}


def _by_layer(named: Axes) -> Axes:
    """Layer by layer, the mixer's before the encoder's: Optimum gives the past in this order."""
    return dict(sorted(named.items(), key=lambda item: int(item[0].split(".")[1])))


def _hidden(g: Graph) -> str:
    """(B, 1, 1, S), see `cross_attention.PaddedSources`."""
    return hidden_scores(g, g.add("Cast", "encoder_attention_mask", to=BOOL))


def _model(graph: Graph, inputs: Axes, outputs: Axes, floats: Sequence[str] | Axes) -> onnx.ModelProto:
    return graph.model(inputs, outputs, contrib=True, types=dict.fromkeys(floats, FLOAT))
