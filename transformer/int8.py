"""int8 linears and tables: the same integers in PyTorch as in onnxruntime.

Weights: symmetric, one scale per output channel (per row of a table). Activations: one scale and zero point,

    q = clip(round(x / scale) + zero, 0, 255), rounding half to even; then
    y = float(sum (q - zero) * w) * (scale * w_scale) + bias,

either dynamic, taken at every call from the values at hand as ONNX's DynamicQuantizeLinear defines them,

    lo = min(0, min x), hi = max(0, max x), scale = (hi - lo) / 255, zero = round(clip(-lo / scale, 0, 255)),

so that a text's result depends on the texts beside it; or static, found once in calibration, so that it does not; or
per token (after Yao et al. 2022, "ZeroQuant", section 4.1), for inputs that do not go below -bound, such as GELU's,

    scale_n = (max_i x_ni + bound) / 255,    q = clip(round((x + bound) / scale_n), 0, 255),
    y = float(sum q * w) * w_scale * scale_n + bias,

where all 255 steps lie between the bound, found in calibration, and the token's greatest value. What the bound adds to
the sum, bound * sum of w * w_scale, is one for all tokens, and the bias has it taken off. Static linears first multiply
each input channel by a factor, which evens out channels of unlike size (Xiao et al. 2022, "SmoothQuant", equation 3);
what that is to undo stands in the weight.
"""

import torch
from torch import Tensor, nn

TINY = torch.finfo(torch.float32).tiny
EXACT_COLUMNS = 512  # 255 * 127 * 512 < 2**24: float32 sums of such products are exact, in any order


def quantize_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Weight (O, I) float -> int8 (O, I) and scales (O,): symmetric, round half to even, per row.

    `bits` 8 uses -127..127. 7 uses -64..64: on CPUs without VNNI, onnxruntime adds u8 x s8 products in pairs of int16,
    which overflows beyond 2 * 255 * 64. Scales are finite and positive; a row of zeros stays zeros.
    """
    limit = {8: 127, 7: 64}[bits]
    scale = (weight.abs().amax(1) / limit).clamp(min=TINY)
    return (weight / scale[:, None]).round().clamp(-limit, limit).to(torch.int8), scale


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (any shape) -> integers 0..255 (as float32, same shape), scale () and zero point ()."""
    low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
    scale = (high - low) / 255
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero = (-low / scale).clamp(0, 255).round()
    return quantize_with(x, scale, zero), scale, zero


def quantize_with(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x (any shape), scale () and zero point () -> integers 0..255 (as x's type, same shape)."""
    return (x / scale).round_().add_(zero).clamp_(0, 255)


def quantize_tokens(x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """x (…, I) and bound () -> integers 0..255 (as x's type, same shape), which stand for q * scale - bound, and the
    scale of each token (…, 1).
    """
    above = x + bound
    scale = (above.amax(-1, keepdim=True) / 255).clamp(min=TINY)
    return (above / scale).round_().clamp_(0, 255), scale


def accumulate(centred: Tensor, weight: Tensor) -> Tensor:
    """Exact integer product of activations (N, I), |.| <= 255, and int8 weight (O, I): (N, O) int32."""
    total = torch.zeros(*centred.shape[:-1], weight.shape[0], dtype=torch.int32, device=centred.device)
    for start in range(0, weight.shape[1], EXACT_COLUMNS):
        columns = slice(start, start + EXACT_COLUMNS)
        total += (centred[..., columns] @ weight[:, columns].T.to(centred.dtype)).to(torch.int32)
    return total


def int8_product(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x (…, I) quantized as it comes, times weight (O, I) with scales (O,) -> (…, O)."""
    q, scale, zero = quantize_activations(x)
    return accumulate(q - zero, weight).to(x.dtype) * (scale * weight_scale)


class Int8Linear(nn.Module):
    """A linear (I -> O) with int8 weight, and activations quantized at run time."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, *, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(outputs))
        self.register_buffer("bias", torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return int8_product(x, self.weight, self.scale) + self.bias


class StaticLinear(Int8Linear):
    """A linear (I -> O) with int8 weight, and activations quantized by what calibration found."""

    factor: Tensor
    input_scale: Tensor
    input_zero: Tensor

    def __init__(self, *, inputs: int, outputs: int) -> None:
        super().__init__(inputs=inputs, outputs=outputs)
        self.register_buffer("factor", torch.ones(inputs))
        self.register_buffer("input_scale", torch.ones(()))
        self.register_buffer("input_zero", torch.zeros((), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        zero = self.input_zero.to(x.dtype)
        q = quantize_with(x * self.factor, self.input_scale, zero)
        total = accumulate(q.sub_(zero), self.weight).to(x.dtype)
        return total * (self.input_scale * self.scale) + self.bias


class PerTokenLinear(Int8Linear):
    """A linear (I -> O) with int8 weight, and activations quantized token by token.

    The bias is the float linear's, less `input_bound` times each row's sum of weight * scale.
    """

    input_bound: Tensor

    def __init__(self, *, inputs: int, outputs: int) -> None:
        super().__init__(inputs=inputs, outputs=outputs)
        self.register_buffer("input_bound", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        q, scale = quantize_tokens(x, self.input_bound)
        total = accumulate(q, self.weight).to(x.dtype)
        return total * self.scale * scale + self.bias


class Int8Embedding(nn.Module):
    """A table (V, D) of int8 rows with one scale a row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, *, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, width, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(rows))

    def forward(self, ids: Tensor) -> Tensor:
        """(N,) -> (N, D)."""
        return self.weight[ids].to(self.scale.dtype) * self.scale[ids][:, None]

    def logits(self, x: Tensor) -> Tensor:
        """(N, D) -> (N, V): the table as the weight of an int8 linear."""
        return int8_product(x, self.weight, self.scale)
