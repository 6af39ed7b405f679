"""The float operators between linears: PyTorch's fused kernels, or the same rounded as onnxruntime rounds them.

An int8 model rounds its activations to 256 steps. Where PyTorch and onnxruntime differ in the last bit of a float, a
value close to the middle between two steps is rounded apart; that happens about once in a text of 128 tokens, and the
difference grows from layer to layer to the size of int8's own error. So int8 models compute norms, softmax and GELU in
the order of onnxruntime's x86-64 kernels (1.32: norms of AVX2, softmax of AVX512), in whose place other processors'
are merely as exact. Float models do not feel the last bit and keep the fused kernels, which are faster.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_LANES = 8
SOFTMAX_LANES = 16

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Kernels:
    """One set of them.

    Attributes:
        norm: the class of layer norms.
        attend: queries (B, H, T, K), keys and values (B, H, S, K) and which keys are seen (B, 1, 1 or T, S), None for
            all, -> softmax(Q K^T / sqrt(K)) V (B, H, T, K).
        activation: elementwise functions by the config's name.
    """

    norm: type[nn.LayerNorm]
    attend: Attend
    activation: Mapping[str, Callable[[Tensor], Tensor]]


def fused_attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """See `Kernels.attend`."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1 / math.sqrt(q.shape[-1]))


def ordered_attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """See `Kernels.attend`; the exponentials are summed in lanes, and multiplied by the reciprocal of their sum."""
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    totals = _lanes(powers, SOFTMAX_LANES, lambda total, block: total + block)
    low, high = totals.chunk(2, -1)
    pairs = (low + high).reshape(*low.shape[:-1], 2, 2, 2)
    weights = powers * (1 / pairs.sum(-1).sum(-1).sum(-1, keepdim=True))
    return weights @ v


class OrderedNorm(nn.LayerNorm):
    """A layer norm whose variance is summed in lanes, each step a fused multiply-add; the mean is exact."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) -> (N, D)."""
        columns = x.shape[-1]
        centred = x - x.double().mean(-1, keepdim=True).float()
        squares = _lanes(centred, NORM_LANES, lambda total, block: _multiply_add(block, block, total))
        while squares.shape[-1] > 1:
            low, high = squares.chunk(2, -1)
            squares = low + high
        deviation = (squares / columns + self.eps).double().sqrt().float()  # float sqrt is not exact in every build
        return _multiply_add(centred * (1 / deviation), self.weight, self.bias)


def erf_gelu(x: Tensor) -> Tensor:
    """x (erf(x / sqrt 2) + 1) / 2 (Hendrycks & Gimpel 2016, equation 1) (…) -> (…), each step rounded."""
    return 0.5 * x * (torch.erf(x * math.sqrt(0.5)) + 1)


def _lanes(x: Tensor, count: int, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(…, D) -> (…, count): `add` over blocks of `count` columns, one after another, the last one filled with zeros."""
    filled = F.pad(x, (0, -x.shape[-1] % count))
    total = torch.zeros_like(filled[..., :count])
    for block in torch.split(filled, count, -1):
        total = add(total, block)
    return total


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 values, the product exact, as a fused multiply-add has it."""
    return (a.double() * b + c).float()


ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": lambda x: x.tanh(),
}
FUSED = Kernels(norm=nn.LayerNorm, attend=fused_attend, activation=ACTIVATION)
ORDERED = Kernels(norm=OrderedNorm, attend=ordered_attend, activation={**ACTIVATION, "gelu": erf_gelu})
