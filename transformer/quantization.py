"""A checkpoint with int8 linears and tables in place of float ones (the arithmetic is in `int8.py`).

Weights get one symmetric scale per output channel, table rows one each. Norms, biases, the token-type row and the
head stay in float32: together they are under one part in a hundred of a model.
"""

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from .checkpoint import Checkpoint
from .config import (
    FLOAT32,
    INT8_DYNAMIC,
    INT8_ROWS,
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    RecurrentConfig,
    TransformerConfig,
)
from .int8 import quantize_rows

PARTS = ("mixer", "cross", "ffn")
SubConfig = AttentionConfig | RecurrentConfig | FeedForwardConfig
TABLE_BITS = 8


def quantized(checkpoint: Checkpoint, *, bits: int, tables: bool = True) -> Checkpoint:
    """Every float linear of the layers and, with `tables`, the token and position tables in int8.

    Args:
        checkpoint: the model; what is int8 already stays as it is.
        bits: 8, or 7 for processors whose u8 x s8 products saturate.
        tables: whether tables become int8.
    """
    config, state = checkpoint.config, dict(checkpoint.state)
    linears = linear_names(config)
    for name in linears:
        _quantize(state, name, bits)
    for name in table_names(config) if tables else []:
        _quantize(state, name, TABLE_BITS)
    notes = {**checkpoint.provenance, **({"int8_weight_bits": bits} if linears else {})}
    return Checkpoint(quantized_config(config, tables=tables), state, checkpoint.tokenizer, notes)


def linear_names(config: TransformerConfig) -> list[str]:
    """State-dict prefixes of the layers' float linears, but for those from unit to unit of recurrent cells."""
    names = []
    for stack, layers in (("encoder", config.encoder), ("decoder", config.decoder)):
        for i, layer in enumerate(layers):
            for part in PARTS:
                sub = getattr(layer, part)
                if sub is None:
                    continue
                before, after = _linears(part, sub)
                before = before if sub.input_format == FLOAT32 else ()
                after = after if sub.output_format == FLOAT32 else ()
                names += [f"{stack}.{i}.{part}.{name}" for name in before + after]
    return names


def _linears(part: str, sub: SubConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the linears before and after a sub-layer's middle."""
    if isinstance(sub, FeedForwardConfig):
        return ("up",), ("down",)
    if isinstance(sub, RecurrentConfig):
        return ("inputs",), ("out",) if sub.project else ()
    return ("q", "kv") if part == "cross" else ("qkv",), ("out",)


def table_names(config: TransformerConfig) -> list[str]:
    """State-dict prefixes of the float tables."""
    names = []
    for prefix, embedding in (("embeddings", config.embedding), ("target", config.target)):
        if embedding is None:
            continue
        if embedding.tokens_format == FLOAT32:
            names.append(f"{prefix}.tokens")
        if embedding.position_kind == "learned" and embedding.positions_format == FLOAT32:
            names.append(f"{prefix}.positions")
    if isinstance(config.head, LanguageHead) and not config.head.tied and config.head.format == FLOAT32:
        names.append("head.tokens")
    return names


def quantized_config(config: TransformerConfig, *, tables: bool) -> TransformerConfig:
    """The config with every linear (and table) in int8."""

    def part(sub: Any) -> Any:
        return None if sub is None else replace(sub, input_format=INT8_DYNAMIC, output_format=INT8_DYNAMIC)

    def layer(old: LayerConfig) -> LayerConfig:
        return LayerConfig(*(part(getattr(old, field.name)) for field in fields(old)))

    def table(embedding: EmbeddingConfig) -> EmbeddingConfig:
        learned = embedding.position_kind == "learned"
        positions = INT8_ROWS if learned else embedding.positions_format
        return replace(embedding, tokens_format=INT8_ROWS, positions_format=positions)

    new = replace(config, encoder=tuple(map(layer, config.encoder)), decoder=tuple(map(layer, config.decoder)))
    if not tables:
        return new
    head = config.head
    if isinstance(head, LanguageHead) and not head.tied:
        head = replace(head, format=INT8_ROWS)
    target = None if config.target is None else table(config.target)
    return replace(new, embedding=table(config.embedding), target=target, head=head)


def _quantize(state: dict[str, Tensor], name: str, bits: int) -> None:
    state[f"{name}.weight"], state[f"{name}.scale"] = quantize_rows(state[f"{name}.weight"], bits)
