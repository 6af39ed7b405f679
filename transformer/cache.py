"""What a decoder keeps from token to token: keys and values, or a cell's state, and what the encoder gave.

Rows R are those of the decode (texts times beams); columns S those of the cache, one for each step, some of them
padding where prompts have unequal lengths.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of attention, each (R, H, S, K)."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class LayerCache:
    """One layer's part.

    Attributes:
        state: the mixer's tensors, rows first; none where the mixer is absent.
        cross: keys and values of the encoder's tokens; None without cross-attention.
    """

    state: State
    cross: KeyValues | None


@dataclass(frozen=True)
class Cache:
    """All that the next step needs of the tokens before it.

    Attributes:
        layers: a part for each layer of the decoder.
        seen: (R, S) bool, which columns of the mixers' caches hold a token.
        source_seen: (R, T) bool, which of the encoder's tokens are meant; None without an encoder.
    """

    layers: tuple[LayerCache, ...]
    seen: Tensor
    source_seen: Tensor | None

    @property
    def positions(self) -> Tensor:
        """(R,) place of the next token in each row."""
        return self.seen.sum(1)

    def take(self, rows: Tensor) -> "Cache":
        """The cache of other rows: `rows` (R',) of this one, in that order."""

        def part(layer: LayerCache) -> LayerCache:
            state = tuple(one.index_select(0, rows) for one in layer.state)
            if layer.cross is None:
                return replace(layer, state=state)
            keys, values = (one.index_select(0, rows) for one in (layer.cross.keys, layer.cross.values))
            return LayerCache(state, KeyValues(keys, values))

        source = None if self.source_seen is None else self.source_seen.index_select(0, rows)
        return Cache(tuple(part(layer) for layer in self.layers), self.seen.index_select(0, rows), source)

    def with_token(self) -> Tensor:
        """(R, S + 1): `seen` once each row has one token more."""
        return torch.cat([self.seen, self.seen.new_ones(len(self.seen), 1)], 1)
