"""Training that feels int8: linears compute with rounded weights and activations, and learn as if they did not round.

Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
section 3, with the straight-through estimator of Bengio et al. 2013: forwards the values are those of the int8 model,
scales taken from the values at hand as `transformer.int8` defines them; backwards the rounding is the identity. The
parameters stay float and keep their names, so that what is trained is the float model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..transformer.int8 import WEIGHT_LIMIT, activation_scale, row_scales
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
    """A float linear (I -> O) that computes what its int8 form would, up to the order of sums."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        """(N, I) -> (N, O)."""
        return F.linear(rounded_activations(x), rounded_weight(self.weight, self.bits), self.bias)


def rounded_activations(x: Tensor) -> Tensor:
    """x (any shape) on the 256 values that `quantize_activations` gives it; its gradient passes unchanged."""
    scale, zero = activation_scale(x.detach())
    return torch.fake_quantize_per_tensor_affine(x, scale, zero.to(torch.int32), 0, 255)


def rounded_weight(weight: Tensor, bits: int) -> Tensor:
    """weight (O, I) on the values that `quantize_rows` gives it; its gradient passes unchanged."""
    limit = WEIGHT_LIMIT[bits]
    scale = row_scales(weight.detach(), bits)
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -limit, limit)
