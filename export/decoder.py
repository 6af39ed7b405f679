"""A decoder's layers and logits in ONNX, whatever its mixers are given: a token of each row, or whole prompts.

Shapes: R rows of the loop (texts times beams), N packed tokens, D model width, V vocabulary. "Tokens" means (R, ·) in a
step and (N, ·) in prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ..transformer.config import AttentionConfig, LanguageHead, TransformerConfig
from ..transformer.layer_config import MixerConfig
from . import mixers
from .cross_attention import Sources, attend_to
from .encoder import add_change, embed, norm, scales
from .graph import Graph
from .layout import own_activation
from .linears import dynamic_matmul, turned
from .tensors import Weights

Mix = Callable[[MixerConfig, Weights, str], mixers.Mixed]


class Decoder:
    """The weights, and the tokens' way through them."""

    def __init__(
        self, config: TransformerConfig, head: LanguageHead, weights: Weights, sources: Sources | None
    ) -> None:
        """`sources` are what an encoder gave; None for a decoder by itself."""
        self.config, self.head, self.weights, self.sources = config, head, weights, sources
        self.tables = "embeddings" if config.target is None else "target"
        self.vocabulary = config.decoder_embedding.vocab_size

    def step(
        self,
        g: Graph,
        tokens: str,
        places: str,
        caches: Sequence[str],
        hidden: str = "",
        olds: Sequence[mixers.Old] | None = None,
    ) -> tuple[str, list[str]]:
        """A token of each row (R,) -> logits (R, V) of what follows, and the caches with it.

        `places` are () or (R,); `hidden` as `mixers.attention` has it; `olds`, where there are any, has one for each
        layer with attention.
        """
        left, before = iter(caches), iter(olds or ())

        def mix(config: MixerConfig, weights: Weights, y: str) -> mixers.Mixed:
            own = list(islice(left, mixers.cache_count(config)))
            old = next(before, None) if isinstance(config, AttentionConfig) else None
            return mixers.step(g, config, weights, y, own, hidden, old)

        x, kept = self.layers(g, tokens, places, mix)
        return self.logits(g, x), kept

    def layers(self, g: Graph, ids: str, places: str, mix: Mix) -> tuple[str, list[str]]:
        """Ids and positions of tokens -> the tokens after the last layer, and the caches that the mixers gave."""
        x = embed(g, self.config, self.config.decoder_embedding, self.weights.at(self.tables), ids, places)
        kept: list[str] = []
        for i in range(len(self.config.decoder)):
            x, new = self._layer(g, i, x, mix)
            kept += new
        return x, kept

    def _layer(self, g: Graph, i: int, x: str, mix: Mix) -> tuple[str, list[str]]:
        layer, weights, sources = self.config.decoder[i], self.weights.at(f"decoder.{i}"), self.sources
        kept: list[str] = []

        def add(x: str, part: str, change: Callable[[str], str]) -> str:
            return add_change(g, self.config, weights.at(f"{part}_norm"), x, change)

        def absent(part: str) -> str:
            return g.weight(weights.full(f"{part}.bias"), weights[f"{part}.bias"])

        def mixed(y: str) -> str:
            if layer.mixer is None:
                return absent("mixer")
            result, new = mix(layer.mixer, weights.at("mixer"), y)
            kept.extend(new)
            return result

        def attend(y: str) -> str:
            assert sources is not None
            if layer.cross is None:
                return absent("cross")
            return attend_to(g, layer.cross, weights.at("cross"), sources, i, y)

        def feed(y: str) -> str:
            if layer.ffn is None:
                return absent("ffn")
            up = mixers.linear(g, weights.at("ffn.up"), layer.ffn.input_format, y)
            active = own_activation(g, layer.ffn.activation, up)
            return mixers.linear(g, weights.at("ffn.down"), layer.ffn.output_format, active)

        x = add(x, "mixer", mixed)
        x = add(x, "cross", attend) if sources is not None else x
        return add(x, "ffn", feed), kept

    def logits(self, g: Graph, x: str) -> str:
        """Tokens after the last layer (R, D) -> (R, V)."""
        x = norm(g, self.weights.at("decoder_norm"), x, self.config.norm_eps) if self.config.final_norm else x
        weights = self.weights.at(self._head_table())
        bias = g.weight("head.bias", self.weights["head.bias"]) if self.head.bias else ""
        table = turned(g, weights)  # (D, V)
        if self.quantized_head:
            return dynamic_matmul(g, x, table, g.add("Reshape", scales(g, weights), g.constant([-1])), bias)
        logits = g.add("MatMul", x, table)
        return g.add("Add", logits, bias) if bias else logits

    @property
    def quantized_head(self) -> bool:
        """Whether the logits come from int8 products, whose range is that of all tokens together."""
        return "scale" in self.weights.at(self._head_table())

    def _head_table(self) -> str:
        return f"{self.tables}.tokens" if self.head.tied else "head.tokens"


class Steps(Protocol):
    """What a loop begins with, and how it gets on; R are its rows."""

    @property
    def rows(self) -> str:
        """(1,) R."""

    @property
    def most(self) -> str:
        """() greatest number of rounds."""

    def caches(self, g: Graph) -> list[str]:
        """Those before the first round."""

    def old(self, g: Graph, place: str) -> tuple[str, str]:
        """Of what the caches hold before round `place` (), as `mixers.Old` has it: `hidden`, and `some`."""

    def logits(
        self, g: Graph, place: str, tokens: str, caches: Sequence[str], olds: Sequence[mixers.Old] | None = None
    ) -> tuple[str, list[str]]:
        """Number of the round () and the last tokens (R,) -> logits (R, V) of the next ones, and the caches.

        The caches hold all tokens so far, or those after `olds`.
        """

    def with_beams(self, g: Graph, beams: str) -> "Steps":
        """The same with `beams` (1,) rows for each one."""


@dataclass(frozen=True)
class FromNothing:
    """Steps from the start token alone."""

    decoder: Decoder
    rows: str
    most: str = "max_new_tokens"

    def caches(self, g: Graph) -> list[str]:
        """See `Steps`."""
        layers = self.decoder.config.decoder
        return [cache for layer in layers for cache in mixers.empty_caches(g, layer.mixer, self.rows)]

    def old(self, g: Graph, place: str) -> tuple[str, str]:
        """See `Steps`."""
        return "", g.add("Greater", place, g.constant(0))

    def logits(
        self, g: Graph, place: str, tokens: str, caches: Sequence[str], olds: Sequence[mixers.Old] | None = None
    ) -> tuple[str, list[str]]:
        """See `Steps`."""
        return self.decoder.step(g, tokens, place, caches, olds=olds)

    def with_beams(self, g: Graph, beams: str) -> "FromNothing":
        """See `Steps`."""
        return FromNothing(self.decoder, g.add("Mul", self.rows, beams))
