"""Config and tensors -> ONNX graph of an encoder, in one of two layouts.

`packed` drops the padding inside the graph: every linear, norm and activation runs on the N valid tokens, and rows
exist only around attention, where rows of like length are grouped if that saves enough. By default it uses
onnxruntime's own operators. `padded` computes on (B, T) throughout, by default in standard ONNX operators alone; its
padding tokens are copies of the row's first token, so that they leave the range of dynamic quantization as it is. What
else may be chosen is in `forms`.

Both compute what `transformer.model` computes, from the same tensors; every export is checked against it.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import torch

from ..transformer.config import (
    FLOAT32,
    ClassificationHead,
    EmbeddingConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LayerConfig,
    RecurrentConfig,
    TransformerConfig,
)
from ..transformer.errors import InputError
from ..transformer.heads import NORM_FLOOR
from ..transformer.layer_config import MixerConfig
from ..transformer.model import sinusoids
from .forms import Forms
from .graph import CONTRIB, Graph
from .layout import DEFAULT, Layout, PackedLayout, PaddedLayout
from .reading import CellReading
from .tensors import Array, Weights

LAYOUTS: dict[str, type[Layout]] = {"packed": PackedLayout, "padded": PaddedLayout}
Axes = dict[str, list[str | int]]
INPUTS: Axes = {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "sequence"]}


def build_encoder(config: TransformerConfig, state: Mapping[str, Array], forms: Forms = DEFAULT) -> onnx.ModelProto:
    """The whole graph: `input_ids` and `attention_mask` (B, T) -> the head's outputs.

    Embedders give `last_hidden_state` (B, T, D), zero at padding, and `sentence_embedding` (B, E); classifiers give
    `logits` (B, C); a model without a head gives `last_hidden_state`.
    """
    graph = Graph()
    form = LAYOUTS[forms.layout](graph, "input_ids", "attention_mask", forms=forms)
    weights = Weights(state)
    x = encode(graph, form, config, weights)
    outputs = _head(graph, form, config, weights.at("head"), x)
    return graph.model(INPUTS, outputs, contrib=not forms.standard)


def encode(graph: Graph, form: Layout, config: TransformerConfig, weights: Weights) -> str:
    """Tokens after the encoder's last layer."""
    x = embed(graph, config, config.embedding, weights.at("embeddings"), form.token_ids, form.positions)
    cells = _cells(graph, form, config)
    for i, layer in enumerate(config.encoder):
        x = _layer(graph, form, cells, config, layer, weights.at(f"encoder.{i}"), x)
    return norm(graph, weights.at("encoder_norm"), x, config.norm_eps) if config.final_norm and config.encoder else x


def embed(
    graph: Graph, config: TransformerConfig, embedding: EmbeddingConfig, weights: Weights, ids: str, positions: str
) -> str:
    """Ids and positions (…) -> (…, D), as `transformer.model.Embeddings` has it; token types are 0."""
    x = _lookup(graph, weights.at("tokens"), ids)
    if embedding.scaled:
        x = graph.add("Mul", x, graph.constant(math.sqrt(config.d_model), np.float32))
    table = _position_table(graph, config, embedding, weights)
    if "token_types.weight" in weights:
        row = graph.weight(weights.full("token_types.row0"), weights["token_types.weight"][0])
        table = row if table is None else graph.add("Add", table, row)
    if table is not None:
        told = embedding.position_kind != "none"
        x = graph.add("Add", x, graph.add("Gather", table, positions, axis=0) if told else table)
    return norm(graph, weights.at("norm"), x, config.norm_eps) if embedding.norm else x


def _position_table(
    graph: Graph, config: TransformerConfig, embedding: EmbeddingConfig, weights: Weights
) -> str | None:
    """(P, D), learned or computed; None where positions are not told."""
    if embedding.position_kind == "learned":
        return _dequantized(graph, weights.at("positions"))
    if embedding.position_kind == "none":
        return None
    values = sinusoids(torch.arange(embedding.positions), config.d_model)
    return graph.weight(weights.full("positions.sinusoids"), values.numpy())


def _lookup(graph: Graph, weights: Weights, ids: str) -> str:
    """Rows of a large table, which stays as it is stored."""
    rows = graph.add("Gather", graph.weight(weights.full("weight"), weights["weight"]), ids, axis=0)
    if "scale" not in weights:
        return rows
    plain = graph.add("Cast", rows, to=onnx.TensorProto.FLOAT)
    return graph.add("Mul", plain, graph.add("Gather", scales(graph, weights), ids, axis=0))


def _dequantized(graph: Graph, weights: Weights) -> str:
    """A small table in float, whatever it is stored as: a constant expression, computed when the graph is loaded."""
    table = graph.weight(weights.full("weight"), weights["weight"])
    if "scale" not in weights:
        return table
    return graph.add("Mul", graph.add("Cast", table, to=onnx.TensorProto.FLOAT), scales(graph, weights))


def scales(graph: Graph, weights: Weights) -> str:
    """An int8 table's scales (V, 1)."""
    return graph.weight(weights.full("scale"), weights["scale"][:, None])


def norm(graph: Graph, weights: Weights, x: str, eps: float) -> str:
    """Layer norm over the last axis."""
    scale = graph.weight(weights.full("weight"), weights["weight"])
    bias = graph.weight(weights.full("bias"), weights["bias"])
    return graph.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=eps)


def _cells(graph: Graph, form: Layout, config: TransformerConfig) -> CellReading | None:
    """What reads the tokens with recurrent cells, one for all layers; None where there are none."""
    if not config.encoder_cells:
        return None
    if not isinstance(form, PackedLayout):
        raise InputError(f"the padded layout has no {', '.join(config.encoder_cells)} cells: take packed")
    return CellReading(graph, form)


def _layer(
    graph: Graph,
    form: Layout,
    cells: CellReading | None,
    config: TransformerConfig,
    layer: LayerConfig,
    weights: Weights,
    x: str,
) -> str:
    def add(x: str, part: str, sub: MixerConfig | FeedForwardConfig | None, change: Callable[[str], str]) -> str:
        normed = skip_norm if form.forms.norm == "skip" and sub is not None else norm_of_sum
        return add_change(graph, config, weights.at(f"{part}_norm"), x, change, normed)

    x = add(x, "mixer", layer.mixer, lambda y: _mixed(graph, form, cells, layer.mixer, weights.at("mixer"), y))
    return add(x, "ffn", layer.ffn, lambda y: _feed_forward(graph, form, layer.ffn, weights.at("ffn"), y))


def norm_of_sum(graph: Graph, weights: Weights, x: str, change: str, eps: float) -> str:
    """The norm of x + change."""
    return norm(graph, weights, graph.add("Add", x, change), eps)


def skip_norm(graph: Graph, weights: Weights, x: str, change: str, eps: float) -> str:
    """The same of a change that is a tensor of x's shape, in one operator of onnxruntime."""
    scale = graph.weight(weights.full("weight"), weights["weight"])
    bias = graph.weight(weights.full("bias"), weights["bias"])
    return graph.add("SkipLayerNormalization", x, change, scale, bias, domain=CONTRIB, epsilon=eps)


def add_change(
    graph: Graph,
    config: TransformerConfig,
    weights: Weights,
    x: str,
    change: Callable[[str], str],
    normed: Callable[[Graph, Weights, str, str, float], str] = norm_of_sum,
) -> str:
    """One sub-layer with its norm, after the sum or before the change."""
    if config.norm_place == "pre":
        return graph.add("Add", x, change(norm(graph, weights, x, config.norm_eps)))
    return normed(graph, weights, x, change(x), config.norm_eps)


def _mixed(
    graph: Graph, form: Layout, cells: CellReading | None, config: MixerConfig | None, weights: Weights, x: str
) -> str:
    if config is None:
        return graph.weight(weights.full("bias"), weights["bias"])
    if isinstance(config, RecurrentConfig):
        assert cells is not None
        return cells.mix(config, weights, x)[0]
    merged = form.forms.qkv == "merged"
    sizes = {"q": config.width, "k": config.key_width, "v": config.key_width}
    parts = [weights.at("qkv")] if merged else weights.cut("qkv", sizes)
    qkv = tuple(form.linear(part, config.input_format, x) for part in parts)
    mixed = form.attention(qkv, config)
    return form.linear(weights.at("out"), config.output_format, mixed)


def _feed_forward(graph: Graph, form: Layout, config: FeedForwardConfig | None, weights: Weights, x: str) -> str:
    if config is None:
        return graph.weight(weights.full("bias"), weights["bias"])
    active = form.activated(weights.at("up"), config.input_format, config.activation, x)
    return form.linear(weights.at("down"), config.output_format, active)


def _head(graph: Graph, form: Layout, config: TransformerConfig, weights: Weights, x: str) -> Axes:
    if isinstance(config.head, ClassificationHead):
        vector = _pooled(form, config.head.pooling, x)
        if config.head.pooler:
            vector = graph.add("Tanh", form.linear(weights.at("pooler"), FLOAT32, vector))
        graph.name_output(form.linear(weights.at("classifier"), FLOAT32, vector), "logits")
        return {"logits": ["batch", len(config.head.labels)]}
    rows = graph.name_output(form.padded_rows(x), "last_hidden_state")
    outputs: Axes = {"last_hidden_state": ["batch", "sequence", config.d_model]}
    if isinstance(config.head, EmbeddingHead):
        vector, width = _sentence(graph, form, config, config.head, weights, x, rows)
        graph.name_output(vector, "sentence_embedding")
        outputs["sentence_embedding"] = ["batch", width]
    return outputs


def _pooled(form: Layout, pooling: str, x: str) -> str:
    """Tokens -> (B, D) of a classifier."""
    if pooling == "mean":
        return form.mean(form.padded_rows(x))
    return form.first_token(x) if pooling == "cls" else form.last_token(x)


def _sentence(
    graph: Graph, form: Layout, config: TransformerConfig, head: EmbeddingHead, weights: Weights, x: str, rows: str
) -> tuple[str, int]:
    pooled = (
        {"mean": form.mean, "max": form.maximum}[head.pooling](rows) if head.pooling != "cls" else form.first_token(x)
    )
    width = config.d_model
    for i, dense in enumerate(head.dense):
        pooled = form.linear(weights.at(f"dense.{i}.linear"), FLOAT32, pooled)
        if dense.activation is not None:
            pooled = form.activation(dense.activation, pooled)
        width = dense.outputs
    if head.dense:
        pooled = form.zero_empty(pooled)
    if head.normalize:
        length = graph.add("ReduceL2", pooled, graph.constant([1]), keepdims=1)
        pooled = graph.add("Div", pooled, graph.add("Max", length, graph.constant(NORM_FLOOR, np.float32)))
    return pooled, width
