"""Multi-head self-attention (Vaswani et al. 2017, section 3.2) as a token mixer.

softmax(Q K^T / sqrt(K)) V, each head on its own columns; queries, keys and values come from one merged linear.
"""

from collections.abc import Callable

from torch import Tensor, nn

from .packing import Packing


class Attention(nn.Module):
    """Heads of any number and width: the linears come from outside, so that their form is the config's choice."""

    def __init__(
        self,
        *,
        qkv: nn.Module,
        out: nn.Module,
        heads: int,
        head_width: int,
        attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.out = out
        self.heads = heads
        self.head_width = head_width
        self.attend = attend

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> (N, D)."""
        result: Tensor = self.out(self.mix(x, packing))
        return result

    def mix(self, x: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> the heads' outputs side by side, (N, H * K)."""
        rows = packing.rows_of(self.qkv(x))  # (B, T, 3 * H * K)
        batch, tokens, _ = rows.shape
        split = rows.view(batch, tokens, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)  # (3, B, H, T, K)
        seen = None if bool(packing.mask.all()) else packing.mask[:, None, None, :]
        q, k, v = split
        return packing.pack(self.attend(q, k, v, seen).transpose(1, 2).reshape(batch, tokens, -1))
