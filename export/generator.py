"""Config and tensors -> one ONNX graph that writes: what is read, once, then the decoder in a Loop.

It writes what `transformer.generation` writes, greedily, by beam search or by sampling, from the same tensors. Beside
an encoder the decoder begins with the start token: the encoder runs on packed tokens, each layer's cross-attention keys
and values are computed once, and serve all beams of a text, which stand side by side as queries. By itself it goes on
from prompts. The loop carries the mixers' caches, grown by one column a step, and stops when no text can gain.

Shapes: B texts, K beams, S tokens written, T tokens read.
"""

from collections.abc import Mapping

import onnx

from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from .beams import beam_search
from .cross_attention import read_sources
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
    decoder, steps = _read(graph, config, config.head, Weights(state))
    single = graph.add("Equal", "num_beams", graph.constant(1))
    sequences, scores = graph.choose(
        single, lambda g: single_text(g, decoder, steps), lambda g: beam_search(g, decoder, steps)
    )
    graph.name_output(sequences, "sequences")
    graph.name_output(scores, "scores")
    types = {"length_penalty": onnx.TensorProto.FLOAT, "sequences": onnx.TensorProto.INT64, **TYPES}
    return graph.model(INPUTS, OUTPUTS, contrib=True, types=types)


def _read(graph: Graph, config: TransformerConfig, head: LanguageHead, weights: Weights) -> tuple[Decoder, Steps]:
    """The sources or the prompts."""
    if not config.encoder:
        decoder = Decoder(graph, config, head, weights, None)
        return decoder, read_prompts(graph, decoder)
    form = PackedLayout(graph, "input_ids", "attention_mask")
    x = encode(graph, form, config, weights)
    decoder = Decoder(graph, config, head, weights, read_sources(graph, form, config, weights, x))
    return decoder, FromNothing(decoder, graph.add("Shape", "input_ids", start=0, end=1))
