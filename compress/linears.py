"""A float linear in another format, with what calibration saw of its inputs.

Activations of `int8_static` and `int8_per_token` get their range first, then the weight is rounded for the inputs as
they are rounded (`gptq`), and at last the bias takes up the mean of what is left over:

    b' = b + W E[x] - Q E[x'],    x' being the rounded inputs and Q what the rounded weight stands for

(bias correction: Nagel et al. 2019, "Data-free quantization", section 4.2, with means that were measured).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..transformer.blocks import packed_blocks, rounded_blocks
from ..transformer.int8 import TINY, quantize_tokens, quantize_with
from ..transformer.layer_config import BLOCK, BLOCK_BITS, INT8_DYNAMIC, RANGED
from ..transformer.quantization import FormattedLinear, dynamic_linear
from .awareness import rounded_activations
from .gptq import round_compensated
from .observing import Moments, Rounding
from .ranges import scale_and_zero

FEW = 7  # greatest integer up to which a scale is worth a search
SHRINKING = torch.linspace(1, 0.6, 13)  # of the widest scale


@dataclass(frozen=True)
class StaticInput:
    """How a static linear rounds what it is given.

    Attributes:
        factor: (I,) of its channels.
        low, high: the range of the channels times their factors.
    """

    factor: Tensor
    low: float
    high: float

    def round(self, x: Tensor) -> Tensor:
        """Inputs (N, I), already multiplied by their factors, on the values that stand for them."""
        scale, zero = scale_and_zero(self.low, self.high)
        scale, point = scale.to(x.device), zero.to(x.device, x.dtype)
        return quantize_with(x, scale, point).sub_(point).mul_(scale)

    def tensors(self) -> dict[str, Tensor]:
        """What the linear keeps of it."""
        scale, zero = scale_and_zero(self.low, self.high)
        return {"factor": self.factor, "input_scale": scale, "input_zero": zero}

    def added(self, weight: Tensor) -> Tensor:
        """Weight (O, I) -> (O,): what rounded inputs have too much of in its products, for the bias to take off."""
        return weight.new_zeros(len(weight))


@dataclass(frozen=True)
class TokenInput:
    """How a per-token linear rounds what it is given.

    Attributes:
        bound: no input is less than -bound.
    """

    bound: float

    @property
    def factor(self) -> Tensor:
        """() one: channels are taken as they are."""
        return torch.ones(())

    def round(self, x: Tensor) -> Tensor:
        """Inputs (N, I) on the values that stand for them."""
        q, scale = quantize_tokens(x, torch.tensor(self.bound, dtype=x.dtype, device=x.device))
        return q.mul_(scale).sub_(self.bound)

    def tensors(self) -> dict[str, Tensor]:
        """What the linear keeps of it."""
        return {"input_bound": torch.tensor(self.bound)}

    def added(self, weight: Tensor) -> Tensor:
        """See `StaticInput.added`."""
        return self.tensors()["input_bound"].double() * weight.sum(1)


Input = StaticInput | TokenInput


@dataclass(frozen=True)
class WeightRounding:
    """How weights are rounded.

    Attributes:
        bits: of int8 weights with one scale a row, 8 or 7.
        compensate: whether errors are made up for (`gptq`); otherwise weights are rounded to nearest.
        correct_bias: whether the bias takes up what is left over on the mean.
    """

    bits: int
    compensate: bool
    correct_bias: bool


def input_rounding(form: str, given: Input | None) -> Rounding:
    """What a linear of a format takes in the place of its inputs."""
    if form in RANGED:
        assert given is not None
        return given.round
    return rounded_activations if form == INT8_DYNAMIC else lambda x: rounded_blocks(x).flatten(-2)


def in_format(
    weight: Tensor,
    bias: Tensor,
    form: str,
    how: WeightRounding,
    given: Input | None = None,
    moments: Moments | None = None,
) -> FormattedLinear:
    """Weight (O, I) and bias (O,) in a format that is not float.

    Args:
        weight: of the linear.
        bias: of the linear.
        form: the format.
        how: how weights are rounded; `int8_dynamic`, for which there is no calibration, takes nearest alone.
        given: of the formats in RANGED.
        moments: of the inputs times their factors; None: nearest, and the bias stays.
    """
    if form == INT8_DYNAMIC:
        return dynamic_linear(weight, how.bits)
    scaled = weight if given is None else weight / given.factor
    if moments is None or not how.compensate:
        integers, scale = _nearest(scaled, form, how.bits)
    else:
        least, limit, block = _grid(form, how.bits, weight.shape[1])
        scales, gram = partial(_scales, limit=limit), moments.gram.matrix.cpu()
        integers, scale = round_compensated(scaled, gram, scales, limits=(least, limit), block=block)
    if moments is not None and how.correct_bias:
        means, rounded = (mean.cpu() for mean in moments.means)
        missing = scaled.double() @ means - _stands_for(integers, scale) @ rounded
        bias = (bias.double() + missing).float()
    if form in RANGED:
        assert given is not None
        bias = (bias.double() - given.added(_stands_for(integers, scale))).float()
        return FormattedLinear(form, {"weight": integers, "scale": scale[:, 0], "bias": bias, **given.tensors()})
    return FormattedLinear(form, {"weight": packed_blocks(integers, BLOCK_BITS[form]), "scale": scale, "bias": bias})


class SimulatedLinear(nn.Module):
    """What a linear rounded to nearest computes in a format, up to the order of sums, in float and so faster."""

    weight: Tensor
    bias: Tensor
    factor: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, form: str, bits: int, given: Input | None = None) -> None:
        super().__init__()
        factor = torch.ones(weight.shape[1]) if given is None else given.factor
        self.register_buffer("weight", _stands_for(*_nearest(weight / factor, form, bits)).float())
        self.register_buffer("bias", bias)
        self.register_buffer("factor", factor)
        self.rounding = input_rounding(form, given)

    def forward(self, x: Tensor) -> Tensor:
        """(…, I) -> (…, O)."""
        return F.linear(self.rounding(x * self.factor), self.weight, self.bias)


def _nearest(weight: Tensor, form: str, bits: int) -> tuple[Tensor, Tensor]:
    """Weight (O, I) -> the nearest integers (O, I) int8 and scales (O, blocks)."""
    least, limit, block = _grid(form, bits, weight.shape[1])
    blocks = weight.reshape(len(weight), -1, block)
    scale = _scales(blocks.flatten(0, 1), limit=limit).view(blocks.shape[:2])
    return (blocks / scale[..., None]).round().clamp(least, limit).flatten(1).to(torch.int8), scale


def _stands_for(integers: Tensor, scale: Tensor) -> Tensor:
    """Integers (O, I) and scales (O, blocks) -> the weights that they mean (O, I), float64."""
    return (integers.double().reshape(*scale.shape, -1) * scale.double()[..., None]).flatten(1)


def _grid(form: str, bits: int, inputs: int) -> tuple[int, int, int]:
    """The least and the greatest integer, and how many columns share a scale."""
    if form not in BLOCK_BITS:
        limit = {8: 127, 7: 64}[bits]
        return -limit, limit, inputs
    half = 2 ** (BLOCK_BITS[form] - 1)
    return -half, half - 1, BLOCK


def _scales(weights: Tensor, *, limit: int) -> Tensor:
    """(O, b) -> (O,): the greatest weight is the greatest integer; with few integers, what loses least if it is cut."""
    widest = (weights.abs().amax(1) / limit).clamp(min=TINY)
    if limit > FEW:
        return widest
    scales = (widest[:, None] * SHRINKING.to(widest)).clamp(min=TINY)  # (O, C)
    steps = (weights[:, None] / scales[..., None]).round_().clamp_(-limit - 1, limit)
    errors = (steps.mul_(scales[..., None]) - weights[:, None]).square_().sum(2)
    return scales.gather(1, errors.argmin(1, keepdim=True))[:, 0]
