"""The Transformer as a plain nn.Module, built from a config and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import INT8_DYNAMIC, EmbeddingConfig, TransformerConfig
from .heads import build_head
from .kernels import FUSED, ORDERED
from .layers import encoder_layer, table
from .packing import Packing


@dataclass(frozen=True)
class Output:
    """What a forward pass gives.

    Attributes:
        hidden: (N, D) the last layer's packed tokens.
        packing: where they belong.
        result: (B, E) embeddings or (B, C) logits; None without a head.
        states: the tokens after the embedding and after every layer, where they were asked for.
    """

    hidden: Tensor
    packing: Packing
    result: Tensor | None
    states: tuple[Tensor, ...] = ()


class Embeddings(nn.Module):
    """norm(token + (position + token type))."""

    def __init__(self, config: EmbeddingConfig, *, width: int, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.tokens = table(rows=config.vocab_size, width=width, form=config.tokens_format)
        self.positions = table(rows=config.positions, width=width, form=config.positions_format)
        self.token_types = nn.Embedding(config.token_types, width) if config.token_types else None
        self.norm = norm

    def forward(self, ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """(N,) ids, positions and token types (None: all 0) -> (N, D)."""
        place = self.positions(positions)
        if self.token_types is not None:
            place = place + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        result: Tensor = self.norm(self.tokens(ids) + place)
        return result


class Transformer(nn.Module):
    """An encoder of packed tokens with an optional head."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, eps = config.d_model, config.norm_eps
        self.config = config
        kernels = ORDERED if INT8_DYNAMIC in config.formats else FUSED
        self.embeddings = Embeddings(config.embedding, width=width, norm=kernels.norm(width, eps=eps))
        self.encoder = nn.ModuleList(
            encoder_layer(layer, width=width, eps=eps, kernels=kernels) for layer in config.encoder
        )
        self.head = None if config.head is None else build_head(config.head, width=width)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        with_states: bool = False,
    ) -> Output:
        """Ids, mask and token types, each (B, T) int64 -> Output."""
        packing = Packing.from_mask(attention_mask)
        types = None if token_type_ids is None else packing.pack(token_type_ids)
        x = self.embeddings(packing.pack(input_ids), packing.positions, types)
        states = [x]
        for layer in self.encoder:
            x = layer(x, packing)
            states.append(x)
        result = None if self.head is None else self.head(x, packing)
        return Output(hidden=x, packing=packing, result=result, states=tuple(states) if with_states else ())


def initialize(model: Transformer, seed: int) -> None:
    """Fill the float weights of a new model in place: normal of deviation 0.02, biases 0, norms 1 (BERT's way)."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
