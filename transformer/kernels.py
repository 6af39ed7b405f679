"""The float operators between linears: PyTorch's fused kernels, or the same rounded as onnxruntime rounds them.

An int8 model rounds its activations to 256 steps. Where PyTorch and onnxruntime differ in the last bit of a float, a
value close to the middle between two steps is rounded apart; that happens about once in a text of 128 tokens, and the
difference grows from layer to layer to the size of int8's own error, and where it moves a batch's common range, from
text to text. So int8 models compute norms, softmax and GELU as onnxruntime's x86-64 kernels do, step by step with the
same constants (1.32: norms and GELU of AVX2, softmax of AVX512 or AVX2), in whose place others' are merely as exact.
Float models do not feel the last bit and keep the fused kernels, which are faster.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_LANES = 8
SOFTMAX_LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
BLOCK = 16384  # values worked on at once: their doubles stay in the cache, and threads are not worth starting
ROUNDER = 1.5 * 2**23  # added and taken away again, it rounds to whole numbers
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 6.93145752e-1, 1.42860677e-6
LOWEST_POWER = -88.3762626647949
# Polynomials, highest power first: of e^r where softmax needs it, of e^r within the error function, and of the error
# function itself, below ERF_SPLIT in x^2 and above it the exponent.
EXP = (1.37805939e-3, 8.37312452e-3, 4.16695364e-2, 1.66664720e-1, 4.99999851e-1, 1.0, 1.0)
ERF_EXP = (1.38319808e-3, 8.37550033e-3, 4.16689515e-2, 1.66664466e-1, 4.99999851e-1, 1.0, 1.0)
ERF_SMALL = (-5.99104969e-4, 4.99339588e-3, -2.67667342e-2, 1.12818025e-1, -3.76124859e-1, 1.28379151e-1)
ERF_BIG = (1.72948930e-5, -3.83208680e-4, 3.88393435e-3, -2.42545605e-2, 1.06777847e-1, 6.34846687e-1, 1.28717512e-1)
ERF_SPLIT, ERF_END = 0.921875, 3.925

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
    powers = _in_blocks(lambda x: _exp(x, EXP), scores - scores.amax(-1, keepdim=True))
    totals = _lanes(powers, SOFTMAX_LANES, lambda total, block: total + block)
    if SOFTMAX_LANES == 16:
        low, high = totals.chunk(2, -1)
        totals = low + high
    while totals.shape[-1] > 1:
        totals = totals[..., 0::2] + totals[..., 1::2]
    return (powers * (1 / totals)) @ v


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
    return 0.5 * x * (_in_blocks(_erf, x * math.sqrt(0.5)) + 1)


def _in_blocks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function (N,) -> (N,) of x (…)."""
    return torch.cat([function(block) for block in torch.split(x.flatten(), BLOCK)]).view(x.shape)


def _exp(x: Tensor, polynomial: Sequence[float]) -> Tensor:
    """e^x of x (N,) <= 0, as 2^m p(r) with x = m ln 2 + r, ln 2 in two parts (Cody & Waite 1980, chapter 6)."""
    x = x.clamp(min=LOWEST_POWER)
    m = _multiply_add(x, _float32(LOG2_E), _float32(ROUNDER)) - ROUNDER
    r = _multiply_add(m, -_float32(LN2_LOW), _multiply_add(m, -_float32(LN2_HIGH), x))
    return torch.ldexp(_polynomial(r, polynomial), m)


def _erf(x: Tensor) -> Tensor:
    """The error function of x (N,): x + x p(x^2) near 0, else 1 - e^-(x + x q(x)), with the sign of x."""
    size = x.abs().clamp(max=ERF_END)
    small = _multiply_add(_polynomial(size * size, ERF_SMALL), size, size)
    big = 1 - _exp(-_multiply_add(_polynomial(size, ERF_BIG), size, size), ERF_EXP)
    return torch.where(size > ERF_SPLIT, big, small).copysign(x)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's scheme on x (N,), each step a fused multiply-add."""
    first, *others = (_float32(one) for one in coefficients)
    wide = x.double()
    total = torch.full_like(x, first)
    for one in others:
        total = total.double().mul_(wide).add_(one).float()
    return total


def _float32(number: float) -> float:
    """The nearest number of single precision."""
    return float(np.float32(number))


def _lanes(x: Tensor, count: int, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(…, D) -> (…, count): `add` over blocks of `count` columns, one after another, the last one filled with zeros."""
    filled = F.pad(x, (0, -x.shape[-1] % count))
    total = torch.zeros_like(filled[..., :count])
    for block in torch.split(filled, count, -1):
        total = add(total, block)
    return total


def _multiply_add(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c of float32 values, the product exact, as a fused multiply-add has it."""
    return a.double().mul_(b).add_(c).float()


ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": lambda x: x.tanh(),
}
FUSED = Kernels(norm=nn.LayerNorm, attend=fused_attend, activation=ACTIVATION)
ORDERED = Kernels(norm=OrderedNorm, attend=ordered_attend, activation={**ACTIVATION, "gelu": erf_gelu})
