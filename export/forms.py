"""The equivalent forms of an encoder's graph: what may be frozen into it, equal up to the rounding of floats.

The first value of each choice makes the portable default. Which is fastest depends on machine and shapes: `form_times`
measures it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.layer_config import BLOCK_BITS, FLOAT32, AttentionConfig, FeedForwardConfig, check, one_of
from .numbers import decimals

CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("packed", "padded"),
    "norm": ("separate", "skip"),
    "attention": ("fused", "decomposed"),
    "qkv": ("merged", "separate"),
    "gelu": ("fused", "erf", "bias"),
}
Value = tuple[str, str]  # a choice and one of its values


@dataclass(frozen=True)
class Forms:
    """The forms of one graph. What the model has no place for changes nothing.

    Attributes:
        layout: tokens `packed` without padding, or `padded` (`encoder.py`).
        norm: `separate`: Add and LayerNormalization; `skip`: SkipLayerNormalization, where the norm follows the sum.
        attention: `fused`: MultiHeadAttention; `decomposed`: MatMul, Softmax, MatMul.
        qkv: queries, keys and values by one `merged` product or by three `separate` ones.
        gelu: `fused`: Gelu; `erf`: standard operators; `bias`: BiasGelu behind float linears.
    """

    layout: str = "packed"
    norm: str = "separate"
    attention: str = "fused"
    qkv: str = "merged"
    gelu: str = "fused"

    def __post_init__(self) -> None:
        check([problem for name, values in CHOICES.items() for problem in one_of(name, getattr(self, name), values)])

    @classmethod
    def of_layout(cls, layout: str) -> "Forms":
        """The default of a layout: padded graphs are of standard operators alone."""
        return cls(layout, attention="decomposed", gelu="erf") if layout == "padded" else cls(layout)

    @property
    def standard(self) -> bool:
        """Whether all operators are of ONNX itself."""
        return (self.layout, self.norm, self.attention, self.gelu) == ("padded", "separate", "decomposed", "erf")

    def to_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Forms":
        """`to_dict` undone; InputError for unknown choices and values."""
        if strange := sorted(set(data) - set(CHOICES)):
            raise InputError(f"the graph has no choice {strange[0]!r}: it has {', '.join(CHOICES)}")
        return cls(**data)


def only_packed(config: TransformerConfig) -> bool:
    """Whether the model has the packed layout alone: those that write, encoders with recurrent cells, and blocks."""
    blocks = config.formats & set(BLOCK_BITS)
    return isinstance(config.head, LanguageHead) or bool(config.encoder_cells) or bool(blocks)


def not_offered(config: TransformerConfig) -> dict[Value, str]:
    """Values that an encoder has no place for or may not have, and why.

    Where activations are rounded, PyTorch repeats the order of sums of MultiHeadAttention (`transformer.kernels`): in
    another order roundings would fall apart, so attention stays as it is.
    """
    return dict(_refusals(config))


def _refusals(config: TransformerConfig) -> Iterator[tuple[Value, str]]:
    mixers = [layer.mixer for layer in config.encoder if isinstance(layer.mixer, AttentionConfig)]
    feeds = [layer.ffn for layer in config.encoder if layer.ffn is not None]
    if only_packed(config):
        yield ("layout", "padded"), "cells and blocks have the packed layout alone"
    if config.norm_place == "pre":
        yield ("norm", "skip"), "the norms stand before the sub-layers"
    elif not mixers and not feeds:
        yield ("norm", "skip"), "there is no sub-layer"
    if not mixers:
        yield ("attention", "decomposed"), "there is no attention"
        yield ("qkv", "separate"), "there is no attention"
    elif config.rounds_activations:
        yield ("attention", "decomposed"), "int8 models repeat the sums of MultiHeadAttention in PyTorch"
    yield from _gelu_refusals(feeds)


def _gelu_refusals(feeds: list[FeedForwardConfig]) -> Iterator[tuple[Value, str]]:
    curved = [feed for feed in feeds if feed.activation == "gelu"]
    if not curved:
        yield ("gelu", "erf"), "there is no GELU"
        yield ("gelu", "bias"), "there is no GELU"
    elif not any(feed.input_format == FLOAT32 for feed in curved):
        yield ("gelu", "bias"), "no linear before a GELU is in float"


def decision_text(decision: Mapping[str, Any]) -> str:
    """What was measured of a value (`form_times.Chosen`), and what followed."""
    speed = decision.get("speed")
    if not isinstance(speed, Mapping):
        return str(decision.get("why"))
    ratio, low, high = (decimals(speed.get(name), 3) for name in ("ratio", "low", "high"))
    rounds = f"{decision.get('rounds')} rounds"
    return f"{ratio}x [{low}, {high}] as fast as {decision.get('against')}, {rounds}: {decision.get('why')}"
