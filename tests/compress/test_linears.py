"""Linears in other formats: weights against naive loops, biases by hand, errors on the inputs they are made for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slimformer.compress.linears import SimulatedLinear, StaticInput, WeightRounding, in_format, input_rounding
from slimformer.compress.observing import Moments
from slimformer.transformer.blocks import BlockLinear, unpacked_blocks
from slimformer.transformer.int8 import StaticLinear
from slimformer.transformer.layer_config import BLOCK_BITS, INT4_BLOCKS, INT8_DYNAMIC, INT8_STATIC
from slimformer.transformer.layers import linear
from slimformer.transformer.quantization import FormattedLinear

CPU = torch.device("cpu")
TINY = float(torch.finfo(torch.float32).tiny)
CALIBRATED = ((INT8_STATIC, 8), (INT8_STATIC, 7), *((form, 8) for form in BLOCK_BITS))
INPUTS, OUTPUTS = 64, 24
NEAREST = WeightRounding(8, compensate=False, correct_bias=False)


def correlated(rows: int = 300) -> Tensor:
    """Inputs that share directions, differ in size and are not 0 on the mean."""
    return torch.randn(rows, INPUTS // 4) @ torch.randn(INPUTS // 4, INPUTS) + torch.randn(INPUTS) + 0.1


def awkward(inputs: int = INPUTS) -> Tensor:
    """Random rows, with a row of zeros, tiny and tiniest rows, an outlier, and a block of zeros."""
    weight = torch.randn(OUTPUTS, inputs) * 0.05
    weight[0] = 0
    weight[1] *= 1e-9
    weight[2] *= 1e-40
    weight[3, inputs // 2] = 30.0
    weight[4, :32] = 0
    return weight


def spread() -> Tensor:
    return torch.logspace(-1, 1, INPUTS)[torch.randperm(INPUTS)]


def input_of(form: str, x: Tensor, factor: Tensor | None = None) -> StaticInput | None:
    """What calibration with minmax finds on the inputs (N, I)."""
    if form != INT8_STATIC:
        return None
    factor = torch.ones(x.shape[1]) if factor is None else factor
    return StaticInput(factor, min(0.0, float((x * factor).min())), max(0.0, float((x * factor).max())))


def moments_of(form: str, given: StaticInput | None, x: Tensor) -> Moments:
    moments = Moments(input_rounding(form, given), x.shape[1], CPU)
    for part in (x if given is None else x * given.factor).split(50):
        moments.add(part)
    return moments


def made(
    form: str, weight: Tensor, bias: Tensor, x: Tensor, how: WeightRounding, factor: Tensor | None = None
) -> nn.Module:
    """The linear's module, its tensors loaded strictly."""
    given = input_of(form, x, factor)
    found = in_format(weight, bias, form, how, given, moments_of(form, given, x))
    module = linear(inputs=weight.shape[1], outputs=weight.shape[0], form=form)
    expected = {name: value.dtype for name, value in module.state_dict().items()}
    assert {name: value.dtype for name, value in found.tensors.items()} == expected
    module.load_state_dict(dict(found.tensors), strict=True)
    return module


def integers_of(found: FormattedLinear) -> np.ndarray:
    """(O, I)."""
    weight = found.tensors["weight"]
    if found.form in BLOCK_BITS:
        weight = unpacked_blocks(weight, BLOCK_BITS[found.form]).flatten(1)
    return weight.numpy().astype(np.int64)


def naive(row: np.ndarray, limit: int, block: int) -> tuple[list[int], list[float]]:
    """Nearest integers of a row and the scale of each block."""
    integers, scales = [], []
    for start in range(0, len(row), block):
        part = row[start : start + block].astype(np.float64)
        scale = max(max(abs(value) for value in part) / limit, TINY)
        integers += [int(np.rint(value / scale)) for value in part]
        scales.append(scale)
    return integers, scales


def shape_of(form: str, bits: int) -> tuple[int, int, int]:
    """Least and greatest integer, and columns of a scale."""
    if form == INT8_STATIC:
        return {8: (-127, 127, INPUTS), 7: (-64, 64, INPUTS)}[bits]
    return {8: (-128, 127, 32), 4: (-8, 7, 32)}[BLOCK_BITS[form]]


@pytest.mark.parametrize("factor", [None, spread])
@pytest.mark.parametrize(("form", "bits"), [pair for pair in CALIBRATED if pair[0] != INT4_BLOCKS])
def test_without_compensation_weights_are_the_nearest(form: str, bits: int, factor: Any) -> None:
    weight, bias, x = awkward(), torch.randn(OUTPUTS), correlated()
    _, limit, block = shape_of(form, bits)
    given = input_of(form, x, factor and factor())
    how = WeightRounding(bits, compensate=False, correct_bias=False)
    scaled = weight if given is None else weight / given.factor
    for moments in (None, moments_of(form, given, x)):
        found = in_format(weight, bias, form, how, given, moments)
        expected = [naive(row, limit, block) for row in scaled.numpy()]
        assert integers_of(found).tolist() == [integers for integers, _ in expected]
        scales = found.tensors["scale"].numpy().reshape(OUTPUTS, -1)
        np.testing.assert_allclose(scales, [scales for _, scales in expected], rtol=1e-6)
        assert torch.equal(found.tensors["bias"], bias)
        assert np.abs(integers_of(found)[3]).max() == limit


def test_a_scale_of_four_bits_is_the_one_of_thirteen_that_loses_least() -> None:
    weight = awkward()
    found = in_format(
        weight, torch.zeros(OUTPUTS), INT4_BLOCKS, WeightRounding(8, compensate=False, correct_bias=False)
    )
    integers, scales = integers_of(found), found.tensors["scale"].numpy().astype(np.float64)
    shrunk = 0
    for row in range(OUTPUTS):
        for number, scale in enumerate(scales[row]):
            part = weight[row, 32 * number : 32 * number + 32].numpy().astype(np.float64)
            nearest = np.clip(np.rint(part / scale), -8, 7)
            np.testing.assert_array_equal(integers[row, 32 * number : 32 * number + 32], nearest)
            widest = max(np.abs(part).max() / 7, TINY)
            if widest <= 1e-30:
                continue  # squares of such weights are 0 in float32, and the widest scale stays
            tried = [widest * (1 - 0.4 * k / 12) for k in range(13)]
            errors = [np.square(np.clip(np.rint(part / one), -8, 7) * one - part).sum() for one in tried]
            assert np.square(nearest * scale - part).sum() <= min(errors) * (1 + 1e-4)
            shrunk += scale < 0.99 * widest
    assert shrunk > 5  # blocks whose greatest weight is better cut


@pytest.mark.parametrize("compensate", [True, False])
@pytest.mark.parametrize(("form", "bits"), CALIBRATED)
def test_scales_are_finite_and_above_0(form: str, bits: int, compensate: bool) -> None:
    weight, x = awkward(), correlated()
    given = input_of(form, x, spread())
    how = WeightRounding(bits, compensate=compensate, correct_bias=True)
    found = in_format(weight, torch.zeros(OUTPUTS), form, how, given, moments_of(form, given, x))
    scale, integers = found.tensors["scale"], integers_of(found)
    assert bool((scale.isfinite() & (scale > 0)).all())
    assert bool(found.tensors["bias"].isfinite().all())
    assert not integers[0].any()
    assert not integers[2].any()  # below half of the least scale
    assert integers[1].any()
    if not compensate:
        assert not integers[4, :32].any()


@pytest.mark.parametrize(("form", "bits"), CALIBRATED)
def test_compensated_weights_have_the_scales_of_the_nearest(form: str, bits: int) -> None:
    weight, x = awkward(), correlated()
    given = input_of(form, x, spread())
    scale, nearest = (
        in_format(weight, torch.zeros(OUTPUTS), form, how, given, moments_of(form, given, x)).tensors["scale"]
        for how in (WeightRounding(bits, compensate=True, correct_bias=True), replace(NEAREST, bits=bits))
    )
    torch.testing.assert_close(scale, nearest, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("form", "bits"), CALIBRATED)
def test_integers_end_at_the_limits(form: str, bits: int) -> None:
    """Compensation asks for more than the greatest weight, on both sides."""
    weight, x = torch.randn(200, INPUTS).sign() * (1 - 0.01 * torch.rand(200, INPUTS)), correlated()
    low, high, _ = shape_of(form, bits)
    given = input_of(form, x)
    how = WeightRounding(bits, compensate=True, correct_bias=False)
    integers = integers_of(in_format(weight, torch.zeros(200), form, how, given, moments_of(form, given, x)))
    assert (integers.min(), integers.max()) == (low, high)


def test_bias_by_hand() -> None:
    """Steps of 1 for inputs and for weights: 0.4 is lost of the weights, and 0.4 of the first input.

    x = (0.4, 1) and (2.4, 5) are rounded to (0, 1) and (2, 5): means (1.4, 3) and (1, 3). The weights 127 and 0.4
    become 127 and 0, and 127 * 1.4 + 0.4 * 3 - 127 * 1 = 52 is what the bias takes up.
    """
    x = torch.tensor([[0.4, 1.0], [2.4, 5.0]])
    given = StaticInput(torch.ones(2), 0.0, 255.0)
    weight, bias = torch.tensor([[127.0, 0.4]]), torch.tensor([10.0])
    moments = moments_of(INT8_STATIC, given, x)
    found = in_format(weight, bias, INT8_STATIC, WeightRounding(8, compensate=False, correct_bias=True), given, moments)
    assert found.tensors["weight"].tolist() == [[127, 0]]
    assert found.tensors["scale"].tolist() == [1.0]
    assert found.tensors["bias"].tolist() == pytest.approx([62.0], rel=1e-6)
    assert (float(found.tensors["input_scale"]), int(found.tensors["input_zero"])) == (1.0, 0)


def test_bias_by_hand_with_a_factor() -> None:
    """The same after channels of half and double the size, which factors of 2 and 0.5 undo."""
    x = torch.tensor([[0.2, 2.0], [1.2, 10.0]])
    given = StaticInput(torch.tensor([2.0, 0.5]), 0.0, 255.0)
    weight, bias = torch.tensor([[254.0, 0.2]]), torch.tensor([10.0])
    moments = moments_of(INT8_STATIC, given, x)
    found = in_format(weight, bias, INT8_STATIC, WeightRounding(8, compensate=False, correct_bias=True), given, moments)
    assert found.tensors["weight"].tolist() == [[127, 0]]
    assert found.tensors["bias"].tolist() == pytest.approx([62.0], rel=1e-6)
    assert found.tensors["factor"].tolist() == [2.0, 0.5]


@pytest.mark.parametrize("compensate", [True, False])
@pytest.mark.parametrize(("form", "bits"), CALIBRATED)
def test_with_a_corrected_bias_the_mean_of_the_output_is_the_float_linears(
    form: str, bits: int, compensate: bool
) -> None:
    weight, bias, x = awkward(), torch.randn(OUTPUTS), correlated()
    expected = (x.double() @ weight.double().T + bias.double()).mean(0)

    def distance(*, correct_bias: bool) -> float:
        module = made(form, weight, bias, x, WeightRounding(bits, compensate, correct_bias), spread())
        return float((module(x).double().mean(0) - expected).abs().max())

    assert distance(correct_bias=True) < 2e-5
    assert distance(correct_bias=False) > 1e-3


@pytest.mark.parametrize("correct_bias", [True, False])
@pytest.mark.parametrize(("form", "bits"), CALIBRATED)
def test_with_compensation_the_output_is_nearer(form: str, bits: int, correct_bias: bool) -> None:
    """Of the error of nearest 0.27 to 0.9 is left, and 0.1 to 0.3 of the part for which weights can make up.

    The other part, what inputs lose when they are rounded, is most of it where factors leave them uneven.
    """
    weight, bias, x = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS), correlated()
    factor = spread()
    given = input_of(form, x, factor)
    rounded = input_rounding(form, given)(x if given is None else x * given.factor)
    of_rounded = rounded @ (weight if given is None else weight / given.factor).T + bias

    def errors(*, compensate: bool) -> tuple[float, float]:
        found = made(form, weight, bias, x, WeightRounding(bits, compensate, correct_bias), factor)(x)
        return float((found - (x @ weight.T + bias)).norm()), float((found - of_rounded).norm())

    whole, part = errors(compensate=True)
    whole_of_nearest, part_of_nearest = errors(compensate=False)
    assert 0 < whole < 0.95 * whole_of_nearest
    assert 0 < part < 0.4 * part_of_nearest


@pytest.mark.parametrize(("form", "bits"), [*CALIBRATED, (INT8_DYNAMIC, 8), (INT8_DYNAMIC, 7)])
def test_a_simulated_linear_is_one_of_the_format_rounded_to_nearest(form: str, bits: int) -> None:
    """On inputs in a static range and beyond it, with factors, up to float noise."""
    weight, bias, x = awkward(), torch.randn(OUTPUTS), correlated()
    given = input_of(form, x[:30] * 0.5, spread())
    assert given is None or float((x * given.factor).max()) > 1.2 * given.high
    how = WeightRounding(bits, compensate=False, correct_bias=False)
    module = linear(inputs=INPUTS, outputs=OUTPUTS, form=form)
    module.load_state_dict({"bias": bias, **in_format(weight, bias, form, how, given).tensors})
    simulated = SimulatedLinear(weight, bias, form, bits, given)
    torch.testing.assert_close(simulated(x), module(x), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(simulated(x.view(3, 100, INPUTS)).flatten(0, 1), simulated(x))
    assert float((simulated(x) - (x @ weight.T + bias)).abs().max()) > 0.01


# --- inputs ---


def test_inputs_are_rounded_by_hand() -> None:
    """The range -1 to 254 has a scale of 1 and its 0 at 1: half goes to even, what is beyond to the ends."""
    x = torch.tensor([[-9.0, -1.0, -0.5, 0.5, 1.5, 2.6, 254.0, 300.0]])
    given = StaticInput(torch.ones(8), -1.0, 254.0)
    assert given.round(x).tolist() == [[-1.0, -1.0, 0.0, 0.0, 2.0, 3.0, 254.0, 254.0]]
    assert x[0, 0] == -9.0
    assert given.tensors()["input_scale"].item() == 1.0
    assert given.tensors()["input_zero"].item() == 1


@pytest.mark.parametrize(("low", "high"), [(-2.0, 3.0), (0.0, 7.5), (-0.3, 0.0), (0.0, 0.0), (-1e-30, 1e-42)])
def test_inputs_are_rounded_as_numpy_does(low: float, high: float) -> None:
    x = torch.randn(40, 6) * 3
    scale = np.float32(max((high - low) / 255, TINY)) if low < high else np.float32(1.0)
    zero = np.rint(np.clip(-np.float32(low) / scale, 0, 255))
    expected = (np.clip(np.rint(x.numpy() / scale) + zero, 0, 255) - zero) * scale
    given = StaticInput(torch.ones(6), low, high)
    np.testing.assert_allclose(given.round(x).numpy(), expected, rtol=1e-6)
    assert input_rounding(INT8_STATIC, given)(x).tolist() == given.round(x).tolist()


@pytest.mark.parametrize("form", list(BLOCK_BITS))
def test_blocks_of_inputs_have_a_step_each(form: str) -> None:
    x = correlated(20)
    expected = np.zeros(x.shape)
    for row in range(20):
        for start in range(0, INPUTS, 32):
            part = x[row, start : start + 32].numpy()
            step = np.abs(part).max() / 127
            expected[row, start : start + 32] = np.rint(part / step) * step
    np.testing.assert_allclose(input_rounding(form, None)(x).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(("form", "bits"), CALIBRATED)
def test_what_inputs_are_rounded_to_is_what_the_linear_takes(form: str, bits: int) -> None:
    """A linear whose weights are the greatest integers of their rows, or 0, loses nothing itself."""
    weight, x = torch.eye(INPUTS), correlated()
    given = input_of(form, x, spread())
    rounded = input_rounding(form, given)(x if given is None else x * given.factor)
    found = made(form, weight, torch.zeros(INPUTS), x, NEAREST, None if given is None else given.factor)(x)
    torch.testing.assert_close(found, rounded if given is None else rounded / given.factor, rtol=1e-5, atol=1e-6)
    assert float((found - x).abs().max()) > 1e-3


# --- what is left as it is ---


def test_dynamic_linears_are_rounded_to_nearest_and_keep_their_bias() -> None:
    weight = awkward()
    for how in (NEAREST, WeightRounding(8, compensate=True, correct_bias=True)):
        found = in_format(weight, torch.ones(OUTPUTS), INT8_DYNAMIC, how)
        assert found.form == INT8_DYNAMIC
        assert found.tensors.keys() == {"weight", "scale"}
        assert integers_of(found).tolist() == [naive(row, 127, INPUTS)[0] for row in weight.numpy()]


@pytest.mark.parametrize(("form", "bits"), CALIBRATED)
def test_what_is_given_is_not_changed(form: str, bits: int) -> None:
    weight, bias, x = awkward(), torch.randn(OUTPUTS), correlated()
    before = weight.clone(), bias.clone(), x.clone()
    made(form, weight, bias, x, WeightRounding(bits, compensate=True, correct_bias=True), spread())
    assert all(torch.equal(one, other) for one, other in zip((weight, bias, x), before, strict=True))


def test_modules_are_those_of_the_formats() -> None:
    x = correlated(50)
    kinds = [type(made(form, awkward(), torch.zeros(OUTPUTS), x, NEAREST)) for form in (INT8_STATIC, *BLOCK_BITS)]
    assert kinds == [StaticLinear, BlockLinear, BlockLinear]
