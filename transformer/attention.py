"""Multi-head attention (Vaswani et al. 2017, section 3.2): within a text as a token mixer, and to another text.

softmax(Q K^T / sqrt(K)) V, each head on its own columns. Within a text queries, keys and values come from one merged
linear; to another text, queries come from the tokens, keys and values from the others by a merged linear. There are G
heads of keys and values, each for the H / G heads of queries that lie beside each other (Ainslie et al. 2023).
"""

import torch
from torch import Tensor, nn

from .cache import KeyValues, State
from .kernels import Attend
from .packing import Packing


class Attention(nn.Module):
    """Heads of any number and width: the linears come from outside, so that their form is the config's choice."""

    def __init__(
        self, *, qkv: nn.Module, out: nn.Module, heads: int, groups: int, causal: bool, attend: Attend
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.out = out
        self.heads = heads
        self.groups = groups
        self.causal = causal
        self.attend = attend

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> (N, D)."""
        result: Tensor = self.out(self.mix(x, packing))
        return result

    def mix(self, x: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> the heads' outputs side by side, (N, H * K)."""
        return self._mix(x, packing)[0]

    def start(self, x: Tensor, packing: Packing) -> tuple[Tensor, State]:
        """`forward`, and the keys and values (B, G, T, K) for the steps that follow."""
        mixed, state = self._mix(x, packing)
        return self.out(mixed), state

    def _mix(self, x: Tensor, packing: Packing) -> tuple[Tensor, State]:
        q, k, v = _heads(packing.rows_of(self.qkv(x)), self.heads, self.groups, self.groups)
        return packing.pack(_attended(self.attend, q, k, v, _seen(packing, causal=self.causal))), (k, v)

    def step(self, x: Tensor, state: State, seen: Tensor) -> tuple[Tensor, State]:
        """One token a row (R, D), what was before, and the columns (R, S + 1) that hold a token -> (R, D) and state."""
        q, k, v = _heads(self.qkv(x)[:, None], self.heads, self.groups, self.groups)
        k, v = (torch.cat([old, new], 2) for old, new in zip(state, (k, v), strict=True))
        return self.out(_attended(self.attend, q, k, v, _columns(seen))[:, 0]), (k, v)


class CrossAttention(nn.Module):
    """Tokens of one text attend to those of another."""

    def __init__(self, *, q: nn.Module, kv: nn.Module, out: nn.Module, heads: int, groups: int, attend: Attend) -> None:
        super().__init__()
        self.q = q
        self.kv = kv
        self.out = out
        self.heads = heads
        self.groups = groups
        self.attend = attend

    def memory(self, tokens: Tensor, packing: Packing) -> KeyValues:
        """The other text's tokens (N', D) -> their keys and values, computed once."""
        return KeyValues(*_heads(packing.rows_of(self.kv(tokens)), self.groups, self.groups))

    def forward(self, x: Tensor, packing: Packing, memory: KeyValues, seen: Tensor) -> Tensor:
        """(N, D) with the other text's keys and values and which of them are meant (B, S) -> (N, D)."""
        result: Tensor = self.out(self.mix(x, packing, memory, seen))
        return result

    def mix(self, x: Tensor, packing: Packing, memory: KeyValues, seen: Tensor) -> Tensor:
        """The same without the last linear: the heads' outputs side by side, (N, H * K)."""
        (q,) = _heads(packing.rows_of(self.q(x)), self.heads)
        return packing.pack(_attended(self.attend, q, memory.keys, memory.values, _columns(seen)))

    def step(self, x: Tensor, memory: KeyValues, seen: Tensor) -> Tensor:
        """`forward` for one token a row: (R, D) -> (R, D)."""
        (q,) = _heads(self.q(x)[:, None], self.heads)
        result: Tensor = self.out(_attended(self.attend, q, memory.keys, memory.values, _columns(seen))[:, 0])
        return result


def _heads(rows: Tensor, *counts: int) -> tuple[Tensor, ...]:
    """(B, T, K of all heads) -> (B, H, T, K) for each number of heads."""
    batch, tokens, width = rows.shape
    heads = rows.view(batch, tokens, sum(counts), width // sum(counts)).transpose(1, 2)
    return torch.split(heads, list(counts), 1)


def _attended(attend: Attend, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Queries (B, H, T, K), keys and values (B, G, S, K) -> the heads' outputs side by side, (B, T, H * K)."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    return attend(q, k, v, seen).transpose(1, 2).flatten(2)


def _columns(seen: Tensor) -> Tensor | None:
    """(B, S) -> (B, 1, 1, S); None where all are seen."""
    return None if bool(seen.all()) else seen[:, None, None, :]


def _seen(packing: Packing, *, causal: bool) -> Tensor | None:
    """Which keys a query sees, (B, 1, 1 or T, T): the valid ones, and of those with `causal` none after itself."""
    if not causal:
        return _columns(packing.mask)
    places = torch.arange(packing.mask.shape[1], device=packing.mask.device)
    return (places <= places[:, None]) & packing.mask[:, None, None, :]
