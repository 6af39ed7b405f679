"""Config and tensors -> one ONNX graph that writes: what is read, once, then the decoder in a Loop.

It writes what `transformer.generation` writes, greedily, by beam search or by sampling, from the same tensors. Beside
an encoder the decoder begins with the start token: the encoder runs on packed tokens, each layer's cross-attention keys
and values are computed once, and serve all beams of a text, which stand side by side as queries. By itself it goes on
from prompts. The loop carries the mixers' caches, grown by one column a step, and stops when no text can gain.

Shapes: B texts, K beams, S tokens written, T tokens read.
"""

from collections.abc import Mapping, Sequence

import onnx

from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from .beams import beam_search
from .cross_attention import Sources, grouped_sources, padded_sources, read_sources
from .decoder import Decoder, FromNothing, Steps
from .encoder import INPUTS as SOURCE_INPUTS
from .encoder import Axes, encode
from .graph import Graph
from .layout import PackedLayout
from .prompts import read_prompts
from .sampling import DEFAULTS, TYPES
from .sampling import INPUTS as SAMPLING_INPUTS
from .single import single_text
from .tensors import Array, Weights

INPUTS: Axes = {**SOURCE_INPUTS, "max_new_tokens": [], "num_beams": [], "length_penalty": [], **SAMPLING_INPUTS}
OUTPUTS: Axes = {"sequences": ["batch", "beams", "tokens"], "scores": ["batch", "beams"]}


def build_generator(config: TransformerConfig, state: Mapping[str, Array]) -> onnx.ModelProto:
    """The whole graph.

    Inputs: `input_ids` and `attention_mask` (B, T), `max_new_tokens` (), `num_beams` () and `length_penalty` (). Ids
    are the encoder's texts, or the prompts of a decoder by itself, before each of which it puts the start token; a row
    of padding alone is an empty one. A decoder by itself stops where the longest row has no further positions. With one
    beam and a `seed` () that is not below 0 tokens are drawn, by `temperature` (), `top_k` () and `top_p` () as
    `transformer.decoding.Decoding` has them; these four may be left out.
    Outputs: `sequences` (B, K, S) with the end token and without the start token and the prompt, then padding, best
    first, and `scores` (B, K), -inf where there are fewer texts than beams.

    Raises:
        InputError: the model has no language head, or its encoder's mixers are cells.
    """
    if not isinstance(config.head, LanguageHead):
        raise InputError("a graph that writes is made of a decoder with a language head")
    graph = Graph()
    for name, value in DEFAULTS.items():
        graph.give(name, value)
    build = _after_sources if config.encoder else _after_prompts
    sequences, scores = build(graph, config, config.head, Weights(state))
    graph.name_output(sequences, "sequences")
    graph.name_output(scores, "scores")
    types = {"length_penalty": onnx.TensorProto.FLOAT, "sequences": onnx.TensorProto.INT64, **TYPES}
    return graph.model(INPUTS, OUTPUTS, contrib=True, types=types)


def _after_prompts(graph: Graph, config: TransformerConfig, head: LanguageHead, weights: Weights) -> Sequence[str]:
    decoder = Decoder(config, head, weights, None)
    return _written(graph, decoder, read_prompts(graph, decoder))


def _after_sources(graph: Graph, config: TransformerConfig, head: LanguageHead, weights: Weights) -> Sequence[str]:
    """Texts in groups of like length are written in that order, and put back in their places."""
    form = PackedLayout(graph, "input_ids", "attention_mask")
    merged = read_sources(graph, config, weights, encode(graph, form, config, weights))
    places, hidden = form.filled, form.hidden()
    rows = graph.add("Shape", "input_ids", start=0, end=1)

    def write(g: Graph, sources: Sources) -> Sequence[str]:
        decoder = Decoder(config, head, weights, sources)
        return _written(g, decoder, FromNothing(decoder, rows))

    def in_groups(g: Graph) -> Sequence[str]:
        sources = grouped_sources(g, form, config, merged)
        return [g.add("Gather", one, sources.back, axis=0) for one in write(g, sources)]

    return graph.choose(
        form.grouping.worthwhile,
        in_groups,
        lambda g: write(g, padded_sources(g, config, merged, places, hidden)),
    )


def _written(graph: Graph, decoder: Decoder, steps: Steps) -> Sequence[str]:
    """Sequences (B, K, S) and scores (B, K)."""
    single = graph.add("Equal", "num_beams", graph.constant(1))
    return graph.choose(single, lambda g: single_text(g, decoder, steps), lambda g: beam_search(g, decoder, steps))
