"""Linears whose weight is stored in blocks of 32 columns, each with a scale of its own, in 8 or 4 bits.

This is onnxruntime's MatMulNBits at accuracy level 4, Z = 2^(bits - 1) standing for 0:

    q = round(w / scale) + Z in 0..2^bits - 1; of each row of x and block, s = max |x| / 127 and
    x' = s * round(x * (127 / max |x|)), rounding half to even; then y = sum x' * scale * (q - Z) + bias.

A row's result does not depend on other rows. The sum over a block is an exact integer there; blocks are added as floats
in an order of its own, so results agree to the precision of float, not to the last bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import InputError
from .layer_config import BLOCK

STEPS = 127  # of activations, on either side of 0
LEAST = STEPS * torch.finfo(torch.float32).tiny  # their greatest value counts as no less: STEPS / LEAST is finite


def in_blocks(x: Tensor) -> Tensor:
    """(…, I) -> (…, blocks, 32)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def packed_blocks(integers: Tensor, bits: int) -> Tensor:
    """Integers (O, I) of -2^(bits - 1) to 2^(bits - 1) - 1 -> uint8 (O, blocks, 32 * bits / 8), low halves first."""
    stored = (in_blocks(integers).to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    return stored if bits == 8 else torch.bitwise_or(stored[..., 0::2], stored[..., 1::2] << 4)


def unpacked_blocks(packed: Tensor, bits: int) -> Tensor:
    """`packed_blocks` undone: (O, blocks, bytes) -> integers (O, blocks, 32), int16."""
    stored = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return stored.to(torch.int16).sub_(2 ** (bits - 1))


def rounded_blocks(x: Tensor) -> Tensor:
    """x (…, I) -> the nearest values (…, blocks, 32) on the 255 steps of its row and block."""
    blocks = in_blocks(x)
    most = blocks.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return (blocks * (STEPS / most)).round_().mul_(most / STEPS)


class BlockLinear(nn.Module):
    """A linear (I -> O) with its weight in blocks; InputError where I is no multiple of 32."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, *, inputs: int, outputs: int, bits: int) -> None:
        super().__init__()
        if inputs % BLOCK:
            raise InputError(f"a linear of {inputs} columns is not made of blocks of {BLOCK}")
        self.bits = bits
        self.register_buffer("weight", packed_blocks(torch.zeros(outputs, inputs), bits))
        self.register_buffer("scale", torch.ones(outputs, inputs // BLOCK))
        self.register_buffer("bias", torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        weight = unpacked_blocks(self.weight, self.bits).to(x.dtype) * self.scale[..., None]
        return F.linear(rounded_blocks(x).flatten(-2), weight.flatten(1), self.bias)
