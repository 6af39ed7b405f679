"""Training that feels int8: linears compute with rounded weights and activations, and learn as if they did not round.

Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
section 3, with the straight-through estimator of Bengio et al. 2013: forwards the values are those of the int8 model,
scales taken from the values at hand as `transformer.int8` defines them; backwards the rounding is the identity. The
parameters stay float and keep their names, so that what is trained is the float model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..transformer.int8 import quantize_activations, quantize_rows
from ..transformer.model import Transformer
from ..transformer.quantization import linear_names


def make_aware(model: Transformer, bits: int) -> None:
    """Put an `AwareLinear` with the same parameters in the place of every linear that quantization will turn to int8.

    Args:
        model: a float model, changed in place.
        bits: of the weights, 8 or 7, as for `quantized`.
    """
    for name in linear_names(model.config):
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(model.get_submodule(parent), child, AwareLinear(linear, bits))


class AwareLinear(nn.Module):
    """A float linear (I -> O) that computes what its int8 form will, up to the order of sums."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        """(N, I) -> (N, O)."""
        return F.linear(rounded_activations(x), rounded_weight(self.weight, self.bits), self.bias)


def rounded_activations(x: Tensor) -> Tensor:
    """x (any shape) on the values that `quantize_activations` gives it; its gradient passes unchanged."""

    def rounded(x: Tensor) -> Tensor:
        q, scale, zero = quantize_activations(x)
        return q.sub_(zero).mul_(scale)

    return _StraightThrough.of(x, rounded)


def rounded_weight(weight: Tensor, bits: int) -> Tensor:
    """weight (O, I) on the values that `quantize_rows` gives it; its gradient passes unchanged."""

    def rounded(weight: Tensor) -> Tensor:
        integers, scale = quantize_rows(weight, bits)
        return integers * scale[:, None]

    return _StraightThrough.of(weight, rounded)


class _StraightThrough(torch.autograd.Function):
    """A function's value forwards, the identity backwards."""

    @staticmethod
    def forward(context: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None

    @classmethod
    def of(cls, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        result: Tensor = cls.apply(x, function)  # type: ignore[no-untyped-call]
        return result
