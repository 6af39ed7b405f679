"""Ranges on values worked out by hand, against numpy over all values at once, and against naive searches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.special import ndtr, rel_entr
from torch import Tensor

from slimformer.compress.ranges import (
    BINS,
    RANGE_METHODS,
    Extremes,
    Histogram,
    divergences,
    find_range,
    scale_and_zero,
    squared_errors,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.int8 import quantize_activations

TINY = float(torch.finfo(torch.float32).tiny)
COUNTED = ("percentile", "mse", "entropy")


def extremes_of(texts: Sequence[Tensor]) -> Extremes:
    extremes = Extremes()
    for x in texts:
        extremes.add(x)
    return extremes


def streamed(texts: Sequence[Tensor]) -> tuple[Extremes, Histogram]:
    extremes = extremes_of(texts)
    histogram = Histogram(extremes.low, extremes.high)
    for x in texts:
        histogram.add(x)
    return extremes, histogram


def found(method: str, texts: Sequence[Tensor], percentile: float = 99.99) -> tuple[float, float]:
    return find_range(method, *streamed(texts), percentile=percentile)


def random_texts(count: int = 30, width: int = 8) -> list[Tensor]:
    """Texts of 1 to 20 tokens, each with its own spread."""
    lengths = torch.randint(1, 21, (count,)).tolist()
    return [torch.randn(length, width) * (0.5 + torch.rand(1)) + 0.3 for length in lengths]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * ndtr(x)


def samples(name: str) -> Tensor:
    """4000 values (4000, 1) of a kind."""
    random = np.random.default_rng(7)
    normal = random.normal(size=4000)
    values = {
        "normal": normal,
        "laplace": random.laplace(size=4000),
        "uniform": random.uniform(-1, 1, 4000),
        "uniform, far from 0": random.uniform(5, 10, 4000),
        "negative": -np.abs(normal) - 1,
        "relu": np.maximum(normal, 0),
        "gelu": gelu(2 * normal - 1),
        "heavy tails": random.standard_t(3, 4000),
        "one outlier": np.append(normal[1:], 15),
        "two outliers": np.append(normal[2:], [15, -9]),
        "an outlier below 0 of gelu": np.append(gelu(2 * normal[1:] - 1), -4),
    }[name]
    return torch.from_numpy(values).float()[:, None]


KINDS = (
    "normal",
    "laplace",
    "uniform",
    "uniform, far from 0",
    "negative",
    "relu",
    "gelu",
    "heavy tails",
    "one outlier",
    "two outliers",
    "an outlier below 0 of gelu",
)


def test_extremes_by_hand() -> None:
    extremes = extremes_of([torch.tensor([[1.0, -3.0], [2.0, 0.0]]), torch.tensor([[5.0, -1.0]])])
    assert (extremes.low, extremes.high, extremes.texts) == (-3.0, 5.0, 2)
    assert extremes.average == (-2.0, 3.5)
    assert find_range("minmax", extremes, None) == (-3.0, 5.0)
    assert find_range("average", extremes, None) == (-2.0, 3.5)


@pytest.mark.parametrize(("sign", "expected"), [(1, ((0.0, 6.0), (0.0, 5.0))), (-1, ((-6.0, 0.0), (-5.0, 0.0)))])
def test_extremes_include_zero(sign: int, expected: tuple[tuple[float, float], tuple[float, float]]) -> None:
    extremes = extremes_of([sign * torch.tensor([[2.0, 4.0]]), sign * torch.tensor([[6.0], [3.0]])])
    assert ((extremes.low, extremes.high), extremes.average) == expected


def test_extremes_and_averages_are_numpys() -> None:
    texts = [x + shift for x, shift in zip(random_texts(), torch.randn(30), strict=True)]
    arrays = [x.double().numpy() for x in texts]
    extremes = extremes_of(texts)
    whole = np.concatenate(arrays)
    assert (extremes.low, extremes.high) == (whole.min(), whole.max())
    expected = np.mean([x.min() for x in arrays]), np.mean([x.max() for x in arrays])
    assert extremes.average == pytest.approx(expected, rel=1e-12)


def test_texts_without_tokens_are_none() -> None:
    texts = [torch.zeros(0, 2), torch.tensor([[4.0, -2.0]]), torch.zeros(0, 2)]
    extremes, histogram = streamed(texts)
    assert (extremes.texts, extremes.average, int(histogram.counts.sum())) == (1, (-2.0, 4.0), 2)
    assert (Extremes().low, Extremes().high, Extremes().average) == (0.0, 0.0, (0.0, 0.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 7, 11])
def test_values_that_are_not_finite_are_refused(value: float, place: int) -> None:
    extremes = extremes_of([torch.tensor([[1.0, -1.0]])])
    x = torch.randn(12)
    x[place] = value
    with pytest.raises(InputError, match="the model gives values that are not finite") as caught:
        extremes.add(x.view(3, 4))
    assert "\n" not in str(caught.value)
    assert (extremes.low, extremes.high, extremes.texts, extremes.average) == (-1.0, 1.0, 1, (-1.0, 1.0))


def test_bins_by_hand() -> None:
    histogram = Histogram(-96.0, 4000.0)  # of width 1
    histogram.add(torch.tensor([[-96.0, -95.5, -95.0], [-0.5, 0.0, 0.5], [3998.5, 3999.0, 4000.0]]))
    histogram.add(torch.tensor([[-1e30, 1e30]]))  # beyond the ends
    places = {0: 3, 1: 1, 95: 1, 96: 2, 4094: 1, 4095: 3}
    assert histogram.counts.dtype == torch.int64
    assert {int(i): int(histogram.counts[i]) for i in histogram.counts.nonzero()[:, 0]} == places
    assert histogram.zero == 96
    assert [histogram.edge(i) for i in (0, 96, 100, BINS)] == [-96.0, 0.0, 4.0, 4000.0]


@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("name", KINDS)
def test_counts_are_numpys(name: str, unit: float) -> None:
    x = samples(name) * unit
    extremes, histogram = streamed(x.split(700))
    expected, edges = np.histogram(x.double().numpy(), BINS, (extremes.low, extremes.high))
    np.testing.assert_array_equal(histogram.counts.numpy(), expected)
    np.testing.assert_allclose([histogram.edge(i) for i in range(BINS + 1)], edges, rtol=1e-9, atol=1e-12 * unit)


def test_float32_would_count_some_values_in_other_bins() -> None:
    x = samples("normal") + 1000
    _, histogram = streamed([x])
    low, high = 0.0, float(x.max())
    single = torch.bincount((x.flatten() / (high - low) * BINS).long().clamp(max=BINS - 1), minlength=BINS)
    assert not torch.equal(single, histogram.counts)
    np.testing.assert_array_equal(histogram.counts.numpy(), np.histogram(x.double().numpy(), BINS, (low, high))[0])


def test_activations_are_not_changed() -> None:
    for x in (torch.randn(5, 3), torch.randn(5, 3, dtype=torch.float64)):
        before = x.clone()
        streamed([x])
        assert torch.equal(x, before)


def test_memory_does_not_grow() -> None:
    def held(*objects: object) -> int:
        values = [value for each in objects for value in vars(each).values()]
        assert all(isinstance(value, int | float | Tensor) for value in values)
        return sum(value.numel() if isinstance(value, Tensor) else 1 for value in values)

    extremes, histogram = Extremes(), Histogram(-3.0, 4.0)
    empty = held(extremes, histogram)
    for x in random_texts():
        extremes.add(x)
        histogram.add(x)
    assert held(extremes, histogram) == empty < BINS + 10


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_the_order_of_the_texts_does_not_matter(method: str) -> None:
    texts = random_texts()
    shuffled = [texts[i] for i in torch.randperm(len(texts))]
    assert found(method, texts) == pytest.approx(found(method, shuffled), rel=1e-13)


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_where_texts_are_cut_matters_to_the_average_alone(method: str) -> None:
    texts = random_texts()
    rows = torch.cat(texts)
    rows = rows[torch.randperm(len(rows))]
    ranges = {found(method, cut) for cut in (texts, [rows], rows.split(1), rows.split(13))}
    assert len(ranges) == (4 if method == "average" else 1)


@pytest.mark.parametrize("method", RANGE_METHODS)
@pytest.mark.parametrize("name", KINDS)
def test_a_range_holds_zero_and_lies_within_the_extremes(method: str, name: str) -> None:
    x = samples(name)
    low, high = found(method, [x])
    assert min(0.0, float(x.min())) <= low <= 0 <= high <= max(0.0, float(x.max()))
    assert low < high


@pytest.mark.parametrize("method", RANGE_METHODS)
@pytest.mark.parametrize("unit", [2.0**-140, 2.0**90])
def test_a_range_goes_with_the_unit(method: str, unit: float) -> None:
    """About 1e-40, where float32 is denormal, and 1e30; whole numbers keep all their bits."""
    texts = [(40 * x).round() for x in random_texts()]
    scaled = [(x.double() * unit).float() for x in texts]
    assert all(torch.equal(x.double(), y.double() / unit) for x, y in zip(texts, scaled, strict=True))
    low, high = found(method, texts)
    assert found(method, scaled) == (low * unit, high * unit)
    scale, _ = scale_and_zero(low * unit, high * unit)
    assert TINY <= float(scale) < float("inf")


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_zeros(method: str) -> None:
    extremes, histogram = streamed([torch.zeros(3, 4), torch.zeros(1, 4)])
    assert int(histogram.counts[0]) == int(histogram.counts.sum()) == 16
    assert find_range(method, extremes, histogram) == (0.0, 0.0)


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_no_texts(method: str) -> None:
    assert found(method, []) == found(method, [torch.zeros(0, 4)]) == (0.0, 0.0)


@pytest.mark.parametrize("method", RANGE_METHODS)
@pytest.mark.parametrize("value", [3.0, -3.0])
def test_one_value(method: str, value: float) -> None:
    assert found(method, [torch.full((5, 4), value)]) == (min(0.0, value), max(0.0, value))


def test_what_was_not_counted_has_no_range() -> None:
    texts = random_texts()
    extremes, histogram = streamed(texts)
    with pytest.raises(AssertionError):
        find_range("median", extremes, histogram)
    _, wider = streamed([*texts, torch.tensor([[20.0]])])
    for method in COUNTED:
        for other in (None, Histogram(extremes.low, extremes.high), wider):
            with pytest.raises(AssertionError):
                find_range(method, extremes, other)


def test_percentile_by_hand() -> None:
    """2, 1, 16, 1 values in bins of width 1: a tail of 10 % may have 2 of the 20 values, one of 4 % none."""
    x = torch.tensor([-96.0, -96.0, -50.5] + [10.5] * 15 + [20.5, 4000.0])[:, None]
    assert found("percentile", [x], 80) == (-51.0, 11.0)
    assert found("percentile", [x], 90) == (-96.0, 21.0)
    assert found("percentile", [x], 92) == (-96.0, 4000.0)
    assert found("percentile", [x], 50) == (0.0, 11.0)
    assert found("percentile", [-x], 80) == (-11.0, 51.0)


def test_percentile_counts_more_values_than_float32() -> None:
    extremes, histogram = extremes_of([torch.tensor([[-96.0, 4000.0]])]), Histogram(-96.0, 4000.0)
    histogram.counts[0] = 2**26 + 1
    histogram.counts[200], histogram.counts[BINS - 1] = 2**27 - 1, 2**26  # of 2**28, a tail may have 2**26
    assert find_range("percentile", extremes, histogram, percentile=50) == (-96.0, 105.0)


@pytest.mark.parametrize(("percentile", "left"), [(100.0, 0), (99.99, 0), (99.9, 2), (99.0, 20), (80.0, 400)])
@pytest.mark.parametrize("name", KINDS)
def test_percentile_is_numpys_within_a_bin(name: str, percentile: float, left: int) -> None:
    """Of 4000 values, `left` may be left out on either side; the next one is kept, and no more than its bin."""
    x = samples(name)
    extremes, histogram = streamed([x])
    low, high = find_range("percentile", extremes, histogram, percentile=percentile)
    values, share = x.double().numpy().ravel(), (left + 0.5) / 4000
    width = (extremes.high - extremes.low) / BINS * (1 + 1e-9)
    kept_low = min(0.0, np.quantile(values, share, method="inverted_cdf"))
    kept_high = max(0.0, np.quantile(values, 1 - share, method="inverted_cdf"))
    assert kept_low - width <= low <= kept_low
    assert kept_high <= high <= kept_high + width
    assert max(np.sum(values < low), np.sum(values > high)) <= left


@pytest.mark.parametrize("percentile", [0.0, 100.1])
def test_percentiles_are_above_0_and_at_most_100(percentile: float) -> None:
    with pytest.raises(AssertionError):
        found("percentile", random_texts(), percentile)


def round_trip(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """What is left of x after quantization, in float64."""
    scale = (high - low) / 255
    zero = np.rint(np.clip(-low / scale, 0, 255))
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


def error(x: np.ndarray, weights: np.ndarray, low: float, high: float) -> float:
    return float(np.average(np.square(x - round_trip(x, low, high)), weights=weights))


@pytest.mark.parametrize("name", KINDS)
def test_mse_is_near_the_best_of_all_ranges(name: str) -> None:
    """The 10 least and the 10 greatest values occur once, the others 100 times; 0.8 % is what the search loses most."""
    x = samples(name).sort(dim=0).values
    texts = [x[:10], x[10:-10].repeat(100, 1), x[-10:]]
    extremes = extremes_of(texts)
    values, weights = np.unique(torch.cat(texts).double().numpy(), return_counts=True)
    factors = np.linspace(0.02, 1, 50)
    lows = extremes.low * factors if extremes.low else np.zeros(1)
    highs = extremes.high * factors if extremes.high else np.zeros(1)
    best = min(error(values, weights, low, high) for low in lows for high in highs)
    reached = error(values, weights, *found("mse", texts))
    assert reached <= error(values, weights, extremes.low, extremes.high)
    assert reached <= 1.01 * best


def test_no_step_is_finer_than_a_bin() -> None:
    """Else the steps that happen to meet the centre of the one full bin would win."""
    extremes, histogram = extremes_of([torch.tensor([[4096.0]])]), Histogram(0.0, 4096.0)
    histogram.counts[100], histogram.counts[-1] = 10**12, 1
    _, high = find_range("mse", extremes, histogram)
    assert 256 <= high < 4096


def test_mse_clips_where_that_pays() -> None:
    assert found("mse", [samples("uniform")]) == found("minmax", [samples("uniform")])
    outlier, others = samples("an outlier below 0 of gelu"), samples("gelu")
    low, _ = found("mse", [outlier])
    assert low < -3  # one of 4000 values
    low, high = found("mse", [outlier, others.repeat(100, 1)])
    assert -1 < low < -0.15  # one of 404,000
    assert high > 5


def random_counts(kind: str) -> tuple[Tensor, float]:
    """Counts in the bins and the place of 0."""
    random = np.random.default_rng(3)
    centres, zero = np.arange(BINS), 1000.3
    counts = random.poisson(50 * np.exp(-(((centres - 1500) / 400) ** 2)))
    if kind == "sparse":
        counts = counts * (random.random(BINS) < 0.02)
    if kind == "peak at 0":
        counts[1000] = 10**6
    if kind == "from 0":
        zero = 0.0
    counts[[0, -1]] = 1, 2
    return torch.from_numpy(counts), zero


def random_places(zero: float) -> tuple[np.ndarray, np.ndarray]:
    """40 ranges of 256 bins or more that hold 0, the widest first."""
    random = np.random.default_rng(5)
    lows = zero * (1 - np.append(1.0, random.random(39)))
    highs = np.maximum(zero + (BINS - zero) * np.append(1.0, random.random(39) ** 2), lows + 256)
    return lows, np.minimum(highs, BINS)


@pytest.mark.parametrize("kind", ["smooth", "sparse", "peak at 0", "from 0"])
def test_squared_errors_are_those_of_the_centres(kind: str) -> None:
    counts, zero = random_counts(kind)
    lows, highs = random_places(zero)
    result = squared_errors(counts, zero, torch.from_numpy(lows), torch.from_numpy(highs))
    centres = np.arange(BINS) + 0.5 - zero
    expected = [
        (counts.numpy() * np.square(centres - round_trip(centres, low - zero, high - zero))).sum()
        for low, high in zip(lows, highs, strict=True)
    ]
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-7)


def divergence(counts: np.ndarray, first: int, end: int) -> float:
    """Of the bins first..end - 1, written out bin by bin."""
    kept = counts[first:end].astype(float)
    filled = np.flatnonzero(kept)
    if not len(filled):
        return float("inf")
    p, q = kept.copy(), np.zeros_like(kept)
    p[filled[0]] += counts[:first].sum()
    p[filled[-1]] += counts[end:].sum()
    for level in range(256):
        bins = np.arange(len(kept) * level // 256, len(kept) * (level + 1) // 256)
        used = bins[kept[bins] > 0]
        if len(used):
            q[used] = kept[used].mean()
    return float(rel_entr(p, q).sum())


@pytest.mark.parametrize("kind", ["smooth", "sparse", "peak at 0", "from 0"])
def test_divergences_are_those_of_every_bin(kind: str) -> None:
    counts, zero = random_counts(kind)
    lows, highs = random_places(zero)
    result = divergences(counts, zero, torch.from_numpy(lows), torch.from_numpy(highs))
    limited = counts.numpy().copy()
    at = int(zero)
    limited[at] = min(limited[at], max(limited[max(at - 1, 0)] if at else 0, limited[at + 1]))
    pairs = zip(lows, highs, strict=True)
    expected = [divergence(limited, int(np.floor(low)), int(np.ceil(high))) for low, high in pairs]
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-9, atol=1e-6)


def test_divergences_where_few_bins_have_values() -> None:
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[700], counts[2000], counts[3000] = 30, 4, 10
    ends = [(0, 4096), (1000, 4096), (0, 2500), (1900, 2500), (2100, 2500)]
    lows, highs = torch.tensor(ends, dtype=torch.float64).T
    result = divergences(counts, 2300.0, lows, highs)
    kept_two = [34 * np.log(34 / 4), 14 * np.log(14 / 4)]  # the tail goes to the bin of 4
    expected = [0.0, *kept_two, 44 * np.log(44 / 4), float("inf")]  # all three; two; one, with both tails; none
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_entropy_clips_an_outlier_of_a_normal_distribution() -> None:
    values = torch.cat([torch.randn(200_000, 1), torch.tensor([[40.0]])])
    low, high = found("entropy", [values])
    assert -5.5 < low < -3
    assert 3 < high < 6
    low, high = found("entropy", [torch.cat([values, torch.tensor([[-30.0]])])])
    assert -6 < low < -3
    assert 3 < high < 6


@pytest.mark.parametrize(("least", "greatest"), [(-1, 1), (0, 1), (-0.1, 1), (-3, 1), (5, 10), (-10, -5)])
def test_entropy_keeps_a_uniform_distribution(least: float, greatest: float) -> None:
    x = least + (greatest - least) * torch.rand(200_000, 1)
    assert found("entropy", [x]) == pytest.approx(found("minmax", [x]), rel=0.05)


def test_entropy_is_not_misled_by_the_zeros_of_a_relu() -> None:
    x = torch.randn(200_000, 1)
    _, high = found("entropy", [x.clamp(min=0)])
    assert high > 3
    _, alone = found("entropy", [x[x > 0][:, None]])
    assert high == pytest.approx(alone, rel=0.1)


def test_entropy_works_with_a_small_low_end() -> None:
    """GELU gives -0.17 to 8 here: 80 of the bins are below 0."""
    x = torch.nn.functional.gelu(2 * torch.randn(200_000, 1) - 1)
    low, high = found("entropy", [x])
    assert low == pytest.approx(-0.17, abs=0.005)
    assert 3 < high < 9
    low, high = found("entropy", [torch.cat([x, torch.tensor([[60.0]])])])
    assert low == pytest.approx(-0.17, abs=0.005)
    assert 3 < high < 12


# low, high, scale, zero point
SCALES = [
    (-1.0, 1.55, 0.01, 100),
    (0.0, 255.0, 1.0, 0),
    (-255.0, 0.0, 1.0, 255),
    (-0.5, 254.5, 1.0, 0),  # half to even
    (-1.5, 253.5, 1.0, 2),
    (-510.0, 0.0, 2.0, 255),
    (0.0, 0.0, 1.0, 0),
]


@pytest.mark.parametrize(("low", "high", "scale", "zero"), SCALES)
def test_scales_by_hand(low: float, high: float, scale: float, zero: int) -> None:
    result, point = scale_and_zero(low, high)
    assert (result.dtype, result.shape, point.dtype, point.shape) == (torch.float32, (), torch.uint8, ())
    assert result.item() == pytest.approx(scale, rel=1e-6)
    assert point.item() == zero


def test_scales_are_those_of_activations_quantized_as_they_come() -> None:
    for exponents in (torch.randn(500, 2) * 3, torch.rand(500, 2) * 70 - 35):
        ends = 10**exponents * torch.tensor([-1, 1])
        ends[:50, 0], ends[50:100, 1] = 0, 0
        for low, high in ends.tolist():
            _, scale, zero = quantize_activations(torch.tensor([low, high]))
            result, point = scale_and_zero(low, high)
            assert (result.item(), point.item()) == (scale.item(), zero.item())


@pytest.mark.parametrize("high", [5e-324, 1e-60, 1e-45, 1e-40, 1e-37, 1e-36, 1.0, 1e30, 3.4e38])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_every_scale_is_finite_and_normal(high: float, share: float) -> None:
    for low, end in ((-share * high, high), (-high, share * high)):
        scale, zero = scale_and_zero(low, end)
        assert float(scale) == pytest.approx(max((end - low) / 255, TINY), rel=1e-6)
        assert float(zero) == pytest.approx(-low / float(scale), abs=0.51)


@pytest.mark.parametrize("ends", [(0.1, 1.0), (-1.0, -0.1)])
def test_a_range_without_zero_has_no_scale(ends: tuple[float, float]) -> None:
    with pytest.raises(AssertionError):
        scale_and_zero(*ends)
    with pytest.raises(AssertionError):
        Histogram(*ends)
