"""The Transformer as a plain nn.Module, built from a config and nothing else: encoder, decoder, or both."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .cache import Cache, KeyValues
from .config import EmbeddingConfig, LayerConfig, TransformerConfig
from .dropout import Dropout
from .heads import NextToken, build_head
from .kernels import FUSED, ORDERED
from .layers import Layer, build_layer, table
from .packing import Packing


@dataclass(frozen=True)
class Output:
    """What a forward pass gives.

    Attributes:
        hidden: (N, D) the last layer's packed tokens, the decoder's where there is one.
        packing: where they belong.
        result: (B, E) embeddings, (B, C) logits of classes or (N, V) of each token's next one; None without a head.
        states: the tokens after the embedding and after every layer, where they were asked for; of an encoder-decoder
            those of the encoder, then those of the decoder, which begin with its own embedding.
    """

    hidden: Tensor
    packing: Packing
    result: Tensor | None
    states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a decoder attends to: the encoder's tokens (N', D), and where they belong."""

    tokens: Tensor
    packing: Packing


class Embeddings(nn.Module):
    """norm(token + (position + token type)), token vectors times sqrt(D) where the config says so, then dropout."""

    def __init__(self, config: EmbeddingConfig, *, width: int, norm: nn.LayerNorm | None, dropout: float) -> None:
        super().__init__()
        self.tokens = table(rows=config.vocab_size, width=width, form=config.tokens_format)
        learned = config.position_kind == "learned"
        self.positions = table(rows=config.positions, width=width, form=config.positions_format) if learned else None
        self.token_types = nn.Embedding(config.token_types, width) if config.token_types else None
        self.norm = norm
        self.factor = math.sqrt(width) if config.scaled else None
        self.sinusoidal = config.position_kind == "sinusoidal"
        self.dropout = Dropout(dropout)

    def forward(self, ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """(N,) ids, positions and token types (None: all 0) -> (N, D)."""
        x = self.tokens(ids)
        if self.factor is not None:
            x = x * self.factor
        place = self._place(positions, x)
        if self.token_types is not None:
            kind = self.token_types.weight[0] if token_types is None else self.token_types(token_types)
            place = kind if place is None else place + kind
        x = x if place is None else x + place
        result: Tensor = self.dropout(x if self.norm is None else self.norm(x))
        return result

    def _place(self, positions: Tensor, like: Tensor) -> Tensor | None:
        if self.positions is not None:
            found: Tensor = self.positions(positions)
            return found
        return sinusoids(positions, like.shape[1]).to(like.dtype) if self.sinusoidal else None


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Positions (N,) -> (N, D): sin and cos of p / 10000^(2i / D) in columns 2i and 2i + 1 (Vaswani et al., 3.5)."""
    columns = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angles = positions[:, None] * torch.exp(columns * (-math.log(10000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1).float()


class Transformer(nn.Module):
    """Layers on packed tokens with an optional head."""

    def __init__(self, config: TransformerConfig, *, dropout: float = 0.0) -> None:
        """Build what the config describes; `dropout` acts in training mode alone."""
        super().__init__()
        kernels = ORDERED if config.rounds_activations else FUSED

        def norm(there: bool) -> nn.LayerNorm | None:
            return kernels.norm(config.d_model, eps=config.norm_eps) if there else None

        def embeddings(one: EmbeddingConfig) -> Embeddings:
            return Embeddings(one, width=config.d_model, norm=norm(one.norm), dropout=dropout)

        def layer(one: LayerConfig, *, causal: bool, crossed: bool) -> Layer:
            return build_layer(
                one,
                width=config.d_model,
                eps=config.norm_eps,
                kernels=kernels,
                pre=config.norm_place == "pre",
                causal=causal,
                crossed=crossed,
                dropout=dropout,
            )

        self.config = config
        self.embeddings = embeddings(config.embedding)
        self.target = None if config.target is None else embeddings(config.target)
        self.encoder = nn.ModuleList(layer(one, causal=False, crossed=False) for one in config.encoder)
        self.encoder_norm = norm(config.final_norm and bool(config.encoder))
        self.decoder = nn.ModuleList(layer(one, causal=True, crossed=bool(config.encoder)) for one in config.decoder)
        self.decoder_norm = norm(config.final_norm and bool(config.decoder))
        rows = config.decoder_embedding.vocab_size
        self.head = None if config.head is None else build_head(config.head, width=config.d_model, rows=rows)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        target_ids: Tensor | None = None,
        target_mask: Tensor | None = None,
        with_states: bool = False,
    ) -> Output:
        """Ids, mask and token types, each (B, T) int64 -> Output.

        A decoder beside an encoder also takes ids and mask of the target, (B, T'), as far as it is known.
        """
        packing = Packing.from_mask(attention_mask)
        types = None if token_type_ids is None else packing.pack(token_type_ids)
        states: list[Tensor] = []
        x = self._encode(packing.pack(input_ids), packing, types, states)
        if self.decoder:
            source = Source(x, packing) if self.encoder else None
            if source is not None:
                assert target_ids is not None
                assert target_mask is not None
                packing = Packing.from_mask(target_mask)
                x = self._written(packing.pack(target_ids), packing.positions)
                states.append(x)
            for layer, memory in self._decoder_layers(source):
                x = layer(x, packing, memory, None if source is None else source.packing.mask)
                states.append(x)
            x = x if self.decoder_norm is None else self.decoder_norm(x)
        result = None if self.head is None else self._result(x, packing)
        return Output(hidden=x, packing=packing, result=result, states=tuple(states) if with_states else ())

    def from_layer(self, number: int, tokens: Tensor, packing: Packing) -> Output:
        """What `forward` gives an encoder alone, from the tokens (N, D) before its layer of this number on."""
        x = tokens
        for layer in self.encoder[number:]:
            x = layer(x, packing)
        x = x if self.encoder_norm is None else self.encoder_norm(x)
        return Output(hidden=x, packing=packing, result=None if self.head is None else self._result(x, packing))

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Source:
        """Ids and mask (B, T) -> what the decoder attends to."""
        packing = Packing.from_mask(attention_mask)
        return Source(self._encode(packing.pack(input_ids), packing, None, []), packing)

    def _encode(self, ids: Tensor, packing: Packing, types: Tensor | None, states: list[Tensor]) -> Tensor:
        """Packed ids -> (N, D) after the encoder's last layer; `states` gets the tokens before, between and after."""
        x: Tensor = self.embeddings(ids, packing.positions, types)
        states.append(x)
        for layer in self.encoder:
            x = layer(x, packing)
            states.append(x)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def start(self, ids: Tensor, mask: Tensor, source: Source | None = None) -> tuple[Tensor, Cache]:
        """A prefix (B, T) of at least one token a row -> logits (B, V) of what follows it, and the cache."""
        packing = Packing.from_mask(mask)
        x = self._written(packing.pack(ids), packing.positions)
        seen = None if source is None else source.packing.mask
        caches = []
        for layer, memory in self._decoder_layers(source):
            x, cache = layer.start(x, packing, memory, seen)
            caches.append(cache)
        last = packing.lengths.cumsum(0) - 1
        return self._next(x.index_select(0, last)), Cache(tuple(caches), packing.mask, seen)

    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """One more token of each row (R,) -> logits (R, V) of what follows it, and the cache with it."""
        x = self._written(tokens, cache.positions)
        seen = cache.with_token()
        caches = []
        for layer, part in zip(self.decoder, cache.layers, strict=True):
            x, new = cast(Layer, layer).step(x, part, seen, cache.source_seen)
            caches.append(new)
        return self._next(x), Cache(tuple(caches), seen, cache.source_seen)

    @property
    def _written(self) -> Embeddings:
        """The embeddings of the decoder's tokens."""
        return self.embeddings if self.target is None else self.target

    def _decoder_layers(self, source: Source | None) -> list[tuple[Layer, KeyValues | None]]:
        """The layers, each with what it takes of the source."""
        layers = [cast(Layer, layer) for layer in self.decoder]
        return [(layer, None if source is None else layer.memory(source.tokens, source.packing)) for layer in layers]

    def _next(self, x: Tensor) -> Tensor:
        """(R, D) -> (R, V)."""
        x = x if self.decoder_norm is None else self.decoder_norm(x)
        return self._logits(x)

    def _result(self, x: Tensor, packing: Packing) -> Tensor:
        if isinstance(self.head, NextToken):
            return self._logits(x)
        assert self.head is not None
        result: Tensor = self.head(x, packing)
        return result

    def _logits(self, x: Tensor) -> Tensor:
        """(N, D) -> (N, V)."""
        assert isinstance(self.head, NextToken)
        result: Tensor = self.head(x, self._written.tokens)
        return result


def initialize(model: Transformer, seed: int) -> None:
    """Fill the float weights of a new model in place: normal of deviation 0.02, biases 0, norms 1 (BERT's way)."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
