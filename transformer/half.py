"""Linears in half precision, float16 or bfloat16, for devices that multiply them (CUDA).

    y = float32(half(half(half(x) @ half(W).T) + half(b))),

each half(·) rounding to nearest, even at ties. The product's own sums are in float32, in which its products are exact:
as on tensor cores, and on a CPU seven times as fast as PyTorch's product of half precision, whose sums they nearly are.
The order of sums, and whether product and bias are rounded once or twice, is each device's own.
"""

import torch
from torch import Tensor, nn

from .errors import InputError
from .layer_config import HALVES

TYPES = {form: getattr(torch, form) for form in HALVES}


def to_half(value: Tensor, form: str, name: str) -> Tensor:
    """A float tensor in a half format; InputError where a number of it is beyond that format's greatest."""
    rounded = value.to(TYPES[form])
    if not bool(rounded.isfinite().all()):
        greatest = torch.finfo(TYPES[form]).max
        raise InputError(f"{name} has {value.abs().max():.3g}, and {form} ends at {greatest:.3g}: leave it in float32")
    return rounded


class HalfLinear(nn.Module):
    """A linear (I -> O) whose weight, bias, input and output are in half precision."""

    weight: Tensor
    bias: Tensor

    def __init__(self, *, inputs: int, outputs: int, form: str) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=TYPES[form]))
        self.register_buffer("bias", torch.zeros(outputs, dtype=TYPES[form]))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), both in x's type."""
        half = self.weight.dtype
        product = x.to(half).float() @ self.weight.float().T
        return (product.to(half) + self.bias).to(x.dtype)
