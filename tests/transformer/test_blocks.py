"""Weights in blocks: integers and bytes by hand, and the linear against sums of products in float64."""

import numpy as np
import pytest
import torch

from slimformer.transformer.blocks import BlockLinear, packed_blocks, rounded_blocks, unpacked_blocks
from slimformer.transformer.errors import InputError


def test_four_bits_by_hand() -> None:
    row = torch.zeros(1, 64, dtype=torch.int8)
    row[0, :4] = torch.tensor([-8, 7, 1, -1])
    row[0, 63] = 7
    packed = packed_blocks(row, 4)
    assert packed.dtype == torch.uint8
    assert packed.shape == (1, 2, 16)
    assert packed[0, 0, :3].tolist() == [0xF0, 0x79, 0x88]  # low half first; 8 stands for 0
    assert packed[0, 1, -1].item() == 0xF8


def test_eight_bits_by_hand() -> None:
    row = torch.zeros(1, 32, dtype=torch.int8)
    row[0, :4] = torch.tensor([-128, 127, 1, -1])
    assert packed_blocks(row, 8)[0, 0, :5].tolist() == [0, 255, 129, 127, 128]


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_packed_is_unpacked(bits: int) -> None:
    half = 2 ** (bits - 1)
    integers = torch.randint(-half, half, (5, 96), generator=torch.Generator().manual_seed(bits))
    integers[0, :2] = torch.tensor([-half, half - 1])
    assert torch.equal(unpacked_blocks(packed_blocks(integers, bits), bits).flatten(1).long(), integers)


def test_activations_by_hand() -> None:
    x = torch.zeros(2, 64)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])  # a step of 1: half to even
    x[0, 32:34] = torch.tensor([-254.0, 3.0])  # a step of 2: 1.5 of them are 2
    x[1, 0], x[1, 32] = 1e-30, 1e-40
    found = rounded_blocks(x).flatten(1)
    assert found[0, :5].tolist() == [127, 0, 2, -2, 0]
    assert found[0, 32:35].tolist() == [-254, 4, 0]
    assert found[1, 0].item() == pytest.approx(1e-30)
    assert bool((found[1, 1:] == 0).all())  # the least are lost, and nothing is infinite


def test_rows_and_blocks_do_not_see_each_other() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    louder = x.clone()
    louder[2, 40] = 1000.0
    one, other = rounded_blocks(x), rounded_blocks(louder)
    assert torch.equal(one[[0, 1, 3]], other[[0, 1, 3]])
    assert torch.equal(one[2, 0], other[2, 0])
    assert not torch.equal(one[2, 1], other[2, 1])


@pytest.mark.parametrize("bits", [4, 8])
def test_linear_against_float64(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    module = BlockLinear(inputs=96, outputs=7, bits=bits)
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (7, 96), generator=generator)
    module.weight = packed_blocks(integers, bits)
    module.scale = torch.rand(7, 3, generator=generator)
    module.bias = torch.randn(7, generator=generator)
    x = torch.randn(2, 5, 96, generator=generator)
    expected = np.empty((2, 5, 7))
    for place in np.ndindex(2, 5):
        row = x[place].numpy().astype(np.float64)
        for o in range(7):
            total = float(module.bias[o])
            for block in range(3):
                part = row[32 * block : 32 * block + 32]
                step = np.abs(part).max() / 127
                steps = np.rint(part / step)
                total += step * float(module.scale[o, block]) * (steps @ integers[o, 32 * block :][:32].numpy())
            expected[(*place, o)] = total
    np.testing.assert_allclose(module(x).numpy(), expected, rtol=1e-5, atol=1e-4 if bits == 8 else 1e-5)


def test_other_widths_are_refused() -> None:
    with pytest.raises(InputError, match="a linear of 48 columns is not made of blocks of 32"):
        BlockLinear(inputs=48, outputs=2, bits=4)
