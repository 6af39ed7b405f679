"""A checkpoint with int8 linears and tables in place of float ones (the arithmetic is in `int8.py`).

Weights get one symmetric scale per output channel, table rows one each. Norms, biases, the token-type row and the
head stay in float32: together they are under one part in a hundred of a model.
"""

from dataclasses import replace

from torch import Tensor

from .checkpoint import Checkpoint
from .config import FLOAT32, INT8_DYNAMIC, INT8_ROWS, LayerConfig, TransformerConfig
from .int8 import quantize_rows

LINEARS = {"mixer": ("qkv", "out"), "ffn": ("up", "down")}
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
    """State-dict prefixes of the layers' float linears."""
    names = []
    for i, layer in enumerate(config.encoder):
        for part, (first, second) in LINEARS.items():
            sub = getattr(layer, part)
            if sub is not None and sub.input_format == FLOAT32:
                names.append(f"encoder.{i}.{part}.{first}")
            if sub is not None and sub.output_format == FLOAT32:
                names.append(f"encoder.{i}.{part}.{second}")
    return names


def table_names(config: TransformerConfig) -> list[str]:
    """State-dict prefixes of the float tables."""
    formats = {"tokens": config.embedding.tokens_format, "positions": config.embedding.positions_format}
    return [f"embeddings.{name}" for name, form in formats.items() if form == FLOAT32]


def quantized_config(config: TransformerConfig, *, tables: bool) -> TransformerConfig:
    """The config with every linear (and table) in int8."""

    def layer(old: LayerConfig) -> LayerConfig:
        mixer, ffn = old.mixer, old.ffn
        if mixer is not None:
            mixer = replace(mixer, input_format=INT8_DYNAMIC, output_format=INT8_DYNAMIC)
        if ffn is not None:
            ffn = replace(ffn, input_format=INT8_DYNAMIC, output_format=INT8_DYNAMIC)
        return LayerConfig(mixer, ffn)

    embedding = config.embedding
    if tables:
        embedding = replace(embedding, tokens_format=INT8_ROWS, positions_format=INT8_ROWS)
    return replace(config, encoder=tuple(layer(old) for old in config.encoder), embedding=embedding)


def _quantize(state: dict[str, Tensor], name: str, bits: int) -> None:
    state[f"{name}.weight"], state[f"{name}.scale"] = quantize_rows(state[f"{name}.weight"], bits)
