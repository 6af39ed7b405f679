"""A checkpoint with quantized linears and tables in place of float ones (arithmetic: `int8.py` and `blocks.py`).

Weights get one symmetric scale per output channel, table rows one each. Norms, biases, the token-type row and the
head stay in float32: together they are under one part in a hundred of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from .half import to_half
from .int8 import quantize_rows

PARTS = ("mixer", "cross", "ffn")
SubConfig = AttentionConfig | RecurrentConfig | FeedForwardConfig
TABLE_BITS = 8


@dataclass(frozen=True)
class FormattedLinear:
    """A linear in another format.

    Attributes:
        form: the format.
        tensors: what stands in the place of its weight and, if given, its bias, by their names in the linear.
    """

    form: str
    tensors: Mapping[str, Tensor]


def quantized(checkpoint: Checkpoint, *, bits: int, tables: bool = True) -> Checkpoint:
    """Every float linear of the layers in int8 with dynamic activations and, with `tables`, the tables in int8.

    Args:
        checkpoint: the model; what is int8 already stays as it is.
        bits: 8, or 7 for processors whose u8 x s8 products saturate.
        tables: whether the token and position tables become int8.
    """
    state = checkpoint.state
    linears = {name: dynamic_linear(state[f"{name}.weight"], bits) for name in linear_names(checkpoint.config)}
    notes = {"int8_weight_bits": bits} if linears else {}
    return formatted(checkpoint, linears, bits=bits, tables=tables).with_provenance(**notes)


def halved(checkpoint: Checkpoint, form: str) -> Checkpoint:
    """Every float linear of the layers in a half format; tables, norms and the head stay as they are.

    Raises:
        InputError: a weight is beyond the format's range.
    """
    linears = {name: half_linear(checkpoint.state, name, form) for name in linear_names(checkpoint.config)}
    return formatted(checkpoint, linears, bits=TABLE_BITS, tables=False)


def half_linear(state: Mapping[str, Tensor], name: str, form: str) -> FormattedLinear:
    """The linear of this prefix in the state dict, its weight and bias rounded to a half format."""
    parts = ("weight", "bias")
    return FormattedLinear(form, {part: to_half(state[f"{name}.{part}"], form, f"{name}.{part}") for part in parts})


def dynamic_linear(weight: Tensor, bits: int) -> FormattedLinear:
    """Weight (O, I) rounded to nearest."""
    integers, scale = quantize_rows(weight, bits)
    return FormattedLinear(INT8_DYNAMIC, {"weight": integers, "scale": scale})


def formatted(checkpoint: Checkpoint, linears: Mapping[str, FormattedLinear], *, bits: int, tables: bool) -> Checkpoint:
    """The checkpoint with linears, by their prefixes in the state dict, and with `tables` its tables in int8.

    Tables have 8 bits, but that of the output layer, which takes part in products, has `bits`.
    """
    config, state = checkpoint.config, dict(checkpoint.state)
    for name, linear in linears.items():
        state |= {f"{name}.{part}": value for part, value in linear.tensors.items()}
    if tables:
        for name in table_names(config):
            used = bits if name == output_table(config) else TABLE_BITS
            state[f"{name}.weight"], state[f"{name}.scale"] = quantize_rows(state[f"{name}.weight"], used)
        config = with_tables(config)
    config = with_formats(config, {name: linear.form for name, linear in linears.items()})
    return replace(checkpoint, config=config, state=state)


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


def output_table(config: TransformerConfig) -> str | None:
    """State-dict prefix of the table that is the output layer, None where there is none."""
    if not isinstance(config.head, LanguageHead):
        return None
    if not config.head.tied:
        return "head.tokens"
    return "embeddings.tokens" if config.target is None else "target.tokens"


def with_formats(config: TransformerConfig, forms: Mapping[str, str]) -> TransformerConfig:
    """The config with linears, by their prefixes in the state dict, in other formats.

    Linears that share a field of the config, the queries' and the keys' of cross-attention, are given one format.
    """

    def part(prefix: str, kind: str, sub: Any) -> Any:
        if sub is None:
            return None
        old = (sub.input_format, sub.output_format)
        new: list[str] = []
        for names, form in zip(_linears(kind, sub), old, strict=True):
            asked = {forms.get(f"{prefix}.{name}", form) for name in names} or {form}
            assert len(asked) == 1, f"{prefix} is asked for in {asked}"
            new += asked
        return replace(sub, input_format=new[0], output_format=new[1])

    def stack(name: str, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
        return tuple(
            replace(old, **{kind: part(f"{name}.{i}.{kind}", kind, getattr(old, kind)) for kind in PARTS})
            for i, old in enumerate(layers)
        )

    return config.with_layers(stack("encoder", config.encoder), stack("decoder", config.decoder))


def with_tables(config: TransformerConfig) -> TransformerConfig:
    """The config with every table in int8."""

    def table(embedding: EmbeddingConfig) -> EmbeddingConfig:
        learned = embedding.position_kind == "learned"
        positions = INT8_ROWS if learned else embedding.positions_format
        return replace(embedding, tokens_format=INT8_ROWS, positions_format=positions)

    head = config.head
    if isinstance(head, LanguageHead) and not head.tied:
        head = replace(head, format=INT8_ROWS)
    target = None if config.target is None else table(config.target)
    return replace(config, embedding=table(config.embedding), target=target, head=head)
