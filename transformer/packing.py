"""Which token of which row stands where: packed tokens `(N, d)` around rows `(B, T)`.

Position-wise layers run on the N valid tokens alone; a mixer that needs rows makes them with `rows_of` and packs its
result with `pack`. A token's position counts the valid tokens before it in its row, so padding on either side
or in between changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The valid tokens of a batch.

    Attributes:
        mask: (B, T) bool, true at valid tokens.
        flat: (N,) place of each valid token in the flattened (B * T) rows.
        slots: (B, T) packed place of each valid token; at padding, of some token (to be masked).
        positions: (N,) number of valid tokens before this one in its row.
        first: (B,) packed place of each row's first valid token.
    """

    mask: Tensor
    flat: Tensor
    slots: Tensor
    positions: Tensor
    first: Tensor

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> "Packing":
        """Pack an attention mask (B, T), nonzero at valid tokens.

        A batch without any valid token keeps its very first one, so that no tensor is empty; no row counts it.
        """
        mask = attention_mask != 0
        kept = mask.flatten()
        if not bool(kept.any()):
            kept = torch.zeros_like(kept)
            kept[0] = True
        flat = kept.nonzero().squeeze(1)
        slots = (kept.cumsum(0) - 1).clamp(min=0).view(mask.shape)
        counted = mask.cumsum(1)
        positions = (counted - 1).clamp(min=0).flatten()[flat]
        first = slots.gather(1, mask.to(torch.int8).argmax(1, keepdim=True)).squeeze(1)
        return cls(mask=mask, flat=flat, slots=slots, positions=positions, first=first)

    @property
    def lengths(self) -> Tensor:
        """(B,) valid tokens of each row."""
        return self.mask.sum(1)

    def pack(self, rows: Tensor) -> Tensor:
        """(B, T, ...) -> (N, ...)."""
        return rows.flatten(0, 1).index_select(0, self.flat)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """(N, ...) -> (B, T, ...); what stands at padding is arbitrary and finite."""
        return tokens.index_select(0, self.slots.flatten()).view(*self.slots.shape, *tokens.shape[1:])

    def padded(self, tokens: Tensor) -> Tensor:
        """(N, d) -> (B, T, d), zero at padding."""
        return torch.where(self.mask[..., None], self.rows_of(tokens), 0.0)

    def left_aligned(self, tokens: Tensor) -> Tensor:
        """(N, ...) -> (B, T', ...) without padding before or between a row's tokens; T' is the longest row, at least 1.

        What stands after a row's last token is arbitrary and finite.
        """
        starts = self.lengths.cumsum(0) - self.lengths
        places = torch.arange(max(1, int(self.lengths.max())), device=starts.device)
        slots = (starts[:, None] + places).clamp(max=len(self.flat) - 1)
        return tokens.index_select(0, slots.flatten()).view(*slots.shape, *tokens.shape[1:])

    def pack_left_aligned(self, rows: Tensor) -> Tensor:
        """(B, T', ...) of `left_aligned` -> (N, ...)."""
        owner = self.flat // self.mask.shape[1]
        return rows.flatten(0, 1).index_select(0, owner * rows.shape[1] + self.positions)
