"""Training that feels int8: linears compute with rounded weights and activations, and learn as if they did not round.

Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
section 3, with the straight-through estimator of Bengio et al. 2013: forwards the values are those of the int8 model
(`transformer.int8`); backwards the rounding is the identity. The parameters stay float and keep their names, so that
what is trained is the float model.

Activations have the range that their format gives them: `int8_dynamic` that of the values at hand, of which nothing is
cut off; `int8_static` one that moves with the batches (section 3.1), the mean of their extremes so far and, from the
100th batch on, the exponential moving average:

    low <- low + (min(0, min x) - low) / min(n, 100), and high alike, n being the batches seen, this one counted.

What lies outside is cut off there, as QuantizeLinear does, and has no gradient, since its int8 value does not change.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..transformer.int8 import quantize_activations, quantize_rows, quantize_with
from ..transformer.layer_config import INT8_DYNAMIC, INT8_STATIC
from ..transformer.model import Transformer
from ..transformer.quantization import linear_names
from .ranges import scale_and_zero

AWARE_FORMATS = (INT8_DYNAMIC, INT8_STATIC)
BATCHES = 100  # of which a moving range is the mean


def make_aware(model: Transformer, bits: int, form: str = INT8_DYNAMIC) -> nn.ModuleList:
    """Put an `AwareLinear` with the same parameters in the place of every linear that quantization will turn to int8.

    Args:
        model: a float model on its device, changed in place.
        bits: of the weights, 8 or 7, as for `quantized`.
        form: one of AWARE_FORMATS.

    Returns:
        The moving ranges of `int8_static`, in the order of `linear_names`; none for `int8_dynamic`. They are no part of
        the model, whose state dict stays that of the float one: whoever keeps the state of a training keeps them too.
    """
    assert form in AWARE_FORMATS
    ranges = nn.ModuleList()
    for name in linear_names(model.config):
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        moving = MovingRange(linear.weight.device) if form == INT8_STATIC else None
        if moving is not None:
            ranges.append(moving)
        setattr(model.get_submodule(parent), child, AwareLinear(linear, bits, moving))
    return ranges


class MovingRange(nn.Module):
    """The range of one linear's inputs over the batches: buffers `low` <= 0 <= `high` and `batches`, all ()."""

    low: Tensor
    high: Tensor
    batches: Tensor

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros((), device=device))
        self.register_buffer("high", torch.zeros((), device=device))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def move(self, x: Tensor) -> None:
        """Take in the inputs (N, I) of one batch.

        NaN counts as 0: the loss, which it reaches all the same, is where training says so.
        """
        self.batches += 1
        share = 1 / self.batches.clamp(max=BATCHES)
        least, greatest = torch.stack(torch.aminmax(x)).nan_to_num()
        self.low += (least.clamp(max=0) - self.low) * share
        self.high += (greatest.clamp(min=0) - self.high) * share

    def round(self, x: Tensor) -> Tensor:
        """x (any shape) on the values that a static linear with this range takes in its place."""
        scale, point = (one.to(x) for one in scale_and_zero(float(self.low), float(self.high)))
        within = x.clamp(-point * scale, (255 - point) * scale)
        return _StraightThrough.of(within, lambda x: quantize_with(x, scale, point).sub_(point).mul_(scale))


class AwareLinear(nn.Module):
    """A float linear (I -> O) that computes what its int8 form will, up to the order of sums."""

    def __init__(self, linear: nn.Linear, bits: int, moving: MovingRange | None = None) -> None:
        """`moving`: of `int8_static`; it is used and, in training mode, moved, but is no part of this module."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.bits = bits
        self._moving = (moving,)  # in a tuple, which nn.Module does not look into

    def forward(self, x: Tensor) -> Tensor:
        """(N, I) -> (N, O)."""
        (moving,) = self._moving
        if moving is None:
            rounded = rounded_activations(x)
        else:
            if self.training:
                moving.move(x)
            rounded = moving.round(x)
        return F.linear(rounded, rounded_weight(self.weight, self.bits), self.bias)


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
