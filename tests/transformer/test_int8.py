"""int8 arithmetic on integers worked out by hand, and against float64 and int64 references."""

import numpy as np
import pytest
import torch

from slimformer.transformer.int8 import (
    EXACT_COLUMNS,
    TINY,
    Int8Embedding,
    Int8Linear,
    PerTokenLinear,
    StaticLinear,
    accumulate,
    quantize_activations,
    quantize_rows,
    quantize_tokens,
)


def test_rows_by_hand() -> None:
    weight = torch.tensor([[127.0, -64.0, 0.5, 1.5], [-254.0, 127.0, 3.0, 1.0]])
    q, scale = quantize_rows(weight, 8)
    assert scale.tolist() == [1.0, 2.0]
    assert q.tolist() == [[127, -64, 0, 2], [-127, 64, 2, 0]]  # 0.5 -> 0, 63.5 -> 64, 1.5 -> 2: half to even
    q, scale = quantize_rows(torch.tensor([[64.0, -32.0, 0.5, 2.5], [-128.0, 127.0, 3.0, 5.0]]), 7)
    assert scale.tolist() == [1.0, 2.0]
    assert q.tolist() == [[64, -32, 0, 2], [-64, 64, 2, 2]]  # 63.5 -> 64, 1.5 -> 2, 2.5 -> 2
    assert q.dtype == torch.int8


@pytest.mark.parametrize(("bits", "limit"), [(8, 127), (7, 64)])
def test_every_scale_is_finite_and_positive(bits: int, limit: int) -> None:
    row = torch.tensor([1.0, -0.5, 0.25, 0.0])
    factors = torch.tensor([0.0, 1e-45, 1e-40, 1e-38, 1e-9, 1.0, 1e9, 3e38])
    q, scale = quantize_rows(factors[:, None] * row, bits)
    assert bool((scale.isfinite() & (scale > 0)).all())
    assert q[0].tolist() == [0, 0, 0, 0]
    assert int(q.abs().max()) == limit
    assert q[4:, 0].tolist() == [limit] * 4
    error = (q.double() * scale.double()[:, None] - factors.double()[:, None] * row.double()).abs()
    assert bool((error <= scale.double()[:, None] / 2 * (1 + 1e-4)).all())


def test_an_outlier_takes_the_range_of_its_own_row_only() -> None:
    weight = torch.tensor([[1000.0, 1.0, -1.0, 3.9], [1.0, 1.0, -1.0, 0.5]])
    q, scale = quantize_rows(weight, 8)
    assert q.tolist() == [[127, 0, 0, 0], [127, 127, -127, 64]]
    np.testing.assert_allclose(scale.numpy(), [1000 / 127, 1 / 127], rtol=1e-6)


def test_other_bits_are_refused() -> None:
    with pytest.raises(KeyError):
        quantize_rows(torch.ones(1, 1), 6)


def test_seven_bits_never_overflow_pairs_of_int16() -> None:
    q, _ = quantize_rows(torch.randn(50, 40) * torch.logspace(-6, 6, 50)[:, None], 7)
    greatest = int(q.abs().max())
    assert greatest == 64
    assert 2 * 255 * greatest < 2**15 <= 2 * 255 * 127


# x, integers, scale, zero point
ACTIVATIONS = {
    "both signs": ([-1.0, 0.0, 1.55], [0, 100, 255], 0.01, 100),
    "positive: the range starts at 0": ([51.0, 255.0, 102.0], [51, 255, 102], 1.0, 0),
    "negative: the range ends at 0": ([-255.0, -51.0, -1.0], [0, 204, 254], 1.0, 255),
    "half to even": ([0.5, 1.5, 2.5, 3.5, 255.0], [0, 2, 2, 4, 255], 1.0, 0),
    "half to even, negative": ([-0.5, -1.5, -2.5, -255.0], [255, 253, 253, 0], 1.0, 255),
    "zero point half to even": ([-0.5, 254.5], [0, 254], 1.0, 0),
    "zeros": ([0.0, 0.0], [0, 0], 1.0, 0),
    "one value": ([-510.0], [0], 2.0, 255),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_by_hand(name: str) -> None:
    x, integers, scale, zero = ACTIVATIONS[name]
    q, found_scale, found_zero = quantize_activations(torch.tensor(x))
    assert q.tolist() == integers
    assert found_scale.item() == pytest.approx(scale, rel=1e-6)
    assert found_zero.item() == zero


def test_activations_are_measured_over_all_axes() -> None:
    x = torch.tensor([[[0.0, 10.0]], [[-245.0, 3.0]]])
    q, scale, zero = quantize_activations(x)
    assert (q.tolist(), scale.item(), zero.item()) == ([[[245, 255]], [[0, 248]]], 1.0, 245)


@pytest.mark.parametrize("columns", [1, EXACT_COLUMNS - 1, EXACT_COLUMNS, EXACT_COLUMNS + 1, 1536, 4096])
def test_accumulators_are_exact(columns: int) -> None:
    random = np.random.default_rng(columns)
    centred = random.integers(-255, 256, (7, columns))
    weight = random.integers(-127, 128, (5, columns))
    centred[0], weight[0] = 255, 127  # the greatest sum there is
    centred[1] = -255
    found = accumulate(torch.from_numpy(centred).float(), torch.from_numpy(weight).to(torch.int8))
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found.numpy(), centred.astype(np.int64) @ weight.astype(np.int64).T)


def test_float32_sums_are_exact_within_a_block_of_columns() -> None:
    assert 255 * 128 * EXACT_COLUMNS < 2**24


def int8_linear(inputs: int, outputs: int, *, bias: bool) -> Int8Linear:
    layer = Int8Linear(inputs=inputs, outputs=outputs)
    layer.weight, layer.scale = quantize_rows(torch.randn(outputs, inputs), 8)
    if bias:
        layer.bias = torch.randn(outputs)
    return layer


def reference(layer: Int8Linear, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Products and sums in float64, from integers in float32 as the definition has them."""
    values = x.numpy()
    low, high = np.float32(min(0, values.min())), np.float32(max(0, values.max()))
    scale = np.float32((high - low) / np.float32(255))
    zero = int(np.rint(np.clip(-low / scale, 0, 255)))
    q = np.clip(np.rint(values / scale) + zero, 0, 255).astype(np.int64)
    product = (q - zero) @ layer.weight.numpy().astype(np.int64).T * (np.float64(scale) * layer.scale.double().numpy())
    return product, product + layer.bias.double().numpy()


@pytest.mark.parametrize(("inputs", "bias"), [(32, False), (384, False), (384, True), (1536, True)])
def test_linear_equals_float64_within_two_units(inputs: int, bias: bool) -> None:
    layer, x = int8_linear(inputs, 24, bias=bias), torch.randn(50, inputs)
    found = layer(x)
    product, expected = reference(layer, x)
    unit = np.spacing(np.maximum(np.abs(product), np.abs(expected)).astype(np.float32)).astype(np.float64)
    assert found.dtype == torch.float32
    assert float((np.abs(found.double().numpy() - expected) / unit).max()) <= 2


def test_a_static_linear_by_hand() -> None:
    layer = StaticLinear(inputs=3, outputs=2)
    layer.weight = torch.tensor([[1, -2, 3], [0, 0, 127]], dtype=torch.int8)
    layer.scale = torch.tensor([0.5, 2.0])
    layer.bias = torch.tensor([10.0, 0.0])
    layer.factor = torch.tensor([1.0, 2.0, 0.5])
    layer.input_scale, layer.input_zero = torch.tensor(0.25), torch.tensor(100, dtype=torch.uint8)
    x = torch.tensor([[1.0, -2.0, 0.25], [1000.0, -1000.0, 0.0]])
    # times the factor: 1, -4, 0.125 and 1000, -2000, 0; in steps of 0.25: 4, -16, 0 (half to even) and 155, -100 (the
    # ends of the range), 0
    assert layer(x).tolist() == [[(4 + 32) * 0.125 + 10, 0], [(155 + 200) * 0.125 + 10, 0]]


def test_a_per_token_linear_by_hand() -> None:
    layer = PerTokenLinear(inputs=3, outputs=2)
    layer.weight = torch.tensor([[1, -2, 3], [0, 0, 127]], dtype=torch.int8)
    layer.scale = torch.tensor([0.5, 2.0])
    layer.input_bound = torch.tensor(10.0)
    float_bias = torch.tensor([7.0, 0.0])
    layer.bias = float_bias - 10 * torch.tensor([(1 - 2 + 3) * 0.5, 127 * 2])
    x = torch.tensor([[[245.0, -10.0, 0.5], [41.0, -1e6, 0.0], [-9.0, -12.0, -10.0], [-11.0, -20.0, -30.0]]])
    # steps of 1 from -10: 255, 0, 10 (10.5, half to even), that is 245, -10, 0
    # of 0.2: 255, 0, 50, that is 41, -10, 0
    # of 1 / 255: 255, 0, 0, that is -9, -10, -10
    # nothing is above the bound: three times -10
    expected = [
        [(245 + 20) * 0.5 + 7, 0],
        [(41 + 20) * 0.5 + 7, 0],
        [(-9 + 20 - 30) * 0.5 + 7, -10 * 127 * 2],
        [(-10 + 20 - 30) * 0.5 + 7, -10 * 127 * 2],
    ]
    torch.testing.assert_close(layer(x), torch.tensor([expected]), rtol=1e-6, atol=1e-3)


def test_scales_of_tokens_are_finite_and_positive() -> None:
    greatest = [-float("inf"), -3e38, -10.0, -9.0, -1e-40, 0.0, 1e-40, 1.0, 3e38]
    x = torch.tensor([[one, -float("inf")] for one in greatest])
    for bound in (0.0, 1e-40, 10.0):
        q, scale = quantize_tokens(x, torch.tensor(bound))
        assert bool((scale.isfinite() & (scale > 0)).all())
        expected = [max((one + bound) / 255, TINY) for one in greatest]
        torch.testing.assert_close(scale[:, 0], torch.tensor(expected), rtol=1e-6, atol=0)
        assert bool(((q >= 0) & (q <= 255)).all())
        assert q[:, 1].tolist() == [0] * len(greatest)


def test_a_static_linear_gives_a_row_the_same_whatever_stands_beside_it() -> None:
    layer = StaticLinear(inputs=64, outputs=8)
    layer.input_scale, layer.input_zero = torch.tensor(0.05), torch.tensor(128, dtype=torch.uint8)
    assert_alike_beside_others(layer)


def test_a_per_token_linear_gives_a_row_the_same_whatever_stands_beside_it() -> None:
    assert_alike_beside_others(PerTokenLinear(inputs=64, outputs=8))


def assert_alike_beside_others(layer: StaticLinear | PerTokenLinear) -> None:
    torch.manual_seed(0)
    layer.weight, layer.scale = quantize_rows(torch.randn(8, 64), 8)
    row = torch.randn(1, 64)
    beside = torch.cat([row, 100 * torch.randn(3, 64)])
    assert torch.equal(layer(row), layer(beside)[:1])


def test_linear_is_within_a_step_of_the_float_one() -> None:
    layer, x = int8_linear(384, 24, bias=True), torch.randn(50, 384)
    weight = layer.weight * layer.scale[:, None]
    step = (x.max() - x.min()) / 255
    error = (layer(x) - (x @ weight.T + layer.bias)).abs()
    assert bool((error <= step * weight.abs().sum(1)).all())  # each of the 384 activations is off by a step at most
    assert float(error.max()) > 0.01


def test_linear_takes_any_leading_axes_and_zeros() -> None:
    layer = int8_linear(16, 3, bias=True)
    x = torch.randn(2, 5, 16)
    assert torch.equal(layer(x), layer(x.flatten(0, 1)).view(2, 5, 3))
    assert torch.equal(layer(torch.zeros(4, 16)), layer.bias.expand(4, 3))


def test_saturated_inputs() -> None:
    layer = Int8Linear(inputs=512, outputs=2)
    layer.weight[0], layer.weight[1] = 127, -127
    assert layer(torch.full((1, 512), 255.0)).tolist() == [[255.0 * 127 * 512, -255.0 * 127 * 512]]


def test_embedding_by_hand() -> None:
    table = Int8Embedding(rows=3, width=2)
    table.weight, table.scale = quantize_rows(torch.tensor([[1.27, -0.64], [0.0, 0.0], [254.0, 3.0]]), 8)
    expected = [[254.0, 4.0], [1.27, -0.64], [0.0, 0.0], [254.0, 4.0]]
    torch.testing.assert_close(table(torch.tensor([2, 0, 1, 2])), torch.tensor(expected))
