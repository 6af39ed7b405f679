"""Ranges of activations for static int8: one scale and zero point per tensor, found on calibration texts.

A range low <= 0 <= high gives the unsigned 8 bit integers of ONNX's QuantizeLinear, rounding half to even:

    scale = (high - low) / 255, zero = round(clip(-low / scale, 0, 255)), q = clip(round(x / scale) + zero, 0, 255),

which stand for (q - zero) * scale. A first pass over the texts keeps extremes, a second one counts values in 4096 equal
bins between them; both take the same memory for any number of texts. From them come the ranges

    minmax      the least and the greatest value
    average     the means, over the texts, of each text's least and greatest value: the moving averages of Jacob et al.
                2018, section 3.1, as plain means, so that the order of the texts does not matter
    percentile  the fewest bins that leave out at most (100 - percentile) / 2 % of the values on either side (Wu et al.
                2020, "Integer quantization for deep learning inference", on one side of the magnitudes)
    mse         least sum of (x - (q - zero) * scale)^2 over the centres x of the bins, each as often as its bin has
                values (Choukroun et al. 2019; Banner et al. 2019 take the sum from fitted densities)
    entropy     least sum of P log(P / Q): P are the counts of the bins in the range, the tails' added to its outermost
                bins that have any, Q the counts without the tails', averaged over the bins that have any in each of 256
                equal levels (Migacz 2017, "8-bit inference with TensorRT", for one end)

Migacz scales Q to the sum of P, by which a range with values in one bin only is perfect; here Q is not scaled, so that
what is cut off counts. The bin of 0 counts no more than the greater of those beside it, since 0, half of what a ReLU
gives, is represented exactly. mse and entropy are searched by shrinking both ends, each by itself, by factors 2^(-k/4)
down to 1/64 and then 2^(k/32) around the best; no range has fewer than 256 bins, for no step to be finer than what was
counted.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..transformer.errors import InputError
from ..transformer.int8 import TINY

RANGE_METHODS = ("minmax", "average", "percentile", "mse", "entropy")
BINS = 4096
LEVELS = 256
COARSE = 2.0 ** (-torch.arange(25, dtype=torch.float64) / 4)
FINE = 2.0 ** (-torch.arange(-8, 9, dtype=torch.float64) / 32)

Cost = Callable[[Tensor, Tensor], Tensor]  # of ranges from (C,) to (C,), as places among the bins: (C,)


class Extremes:
    """First pass: the least and the greatest value of one tensor, over all texts and on the mean of the texts.

    Attributes:
        texts: how many had a token.
        low, high: the least and the greatest value, 0 where none is negative, or none positive.
    """

    def __init__(self) -> None:
        self.texts = 0
        self.low, self.high = 0.0, 0.0
        self._lows, self._highs = 0.0, 0.0

    def add(self, x: Tensor) -> None:
        """Count the activations (N, I) of one text; a text without tokens is none.

        Raises:
            InputError: a value is NaN or infinite.
        """
        if not x.numel():
            return
        least, greatest = torch.stack(torch.aminmax(x)).tolist()
        if not (math.isfinite(least) and math.isfinite(greatest)):
            raise InputError(
                "the model gives values that are not finite on a calibration text, of which static int8 has no range: "
                f"they reach from {least} to {greatest}; check its weights"
            )
        self.texts += 1
        self.low, self.high = min(self.low, least), max(self.high, greatest)
        self._lows += least
        self._highs += greatest

    @property
    def average(self) -> tuple[float, float]:
        """The means of the texts' least and greatest values, moved to 0 where 0 is not between them."""
        texts = max(self.texts, 1)
        return min(0.0, self._lows / texts), max(0.0, self._highs / texts)


class Histogram:
    """Second pass: how many values of one tensor lie in each of BINS equal bins from low to high.

    Bin k has the values with k <= (x - low) / (high - low) * BINS < k + 1, computed in float64; the first and the last
    bin have those beyond them too.

    Attributes:
        low, high: the ends, low <= 0 <= high, as the first pass found them.
        counts: (BINS,) int64, on the CPU.
    """

    def __init__(self, low: float, high: float) -> None:
        assert low <= 0 <= high
        self.low, self.high = low, high
        self.counts = torch.zeros(BINS, dtype=torch.int64)

    def add(self, x: Tensor) -> None:
        """Count the activations (N, I) of one text: finite, since the first pass has seen them."""
        places = (x.flatten().double() - self.low).div_(self._span).mul_(BINS).clamp_(0, BINS - 1)
        self.counts += torch.bincount(places.long(), minlength=BINS).cpu()

    @property
    def _span(self) -> float:
        return self.high - self.low or 1.0

    @property
    def zero(self) -> float:
        """Where among the bins 0 is, 0..BINS."""
        return -self.low / self._span * BINS

    def edge(self, place: int) -> float:
        """The value where bin `place` begins; that of BINS is the high end."""
        share = place / BINS
        return self.low * (1 - share) + self.high * share


def find_range(
    method: str, extremes: Extremes, histogram: Histogram | None, *, percentile: float = 99.99
) -> tuple[float, float]:
    """The range (low, high), low <= 0 <= high, in the tensor's unit; (0, 0) where all values are 0.

    Args:
        method: one of RANGE_METHODS; the module's docstring has their formulas.
        extremes: of the first pass.
        histogram: of the second pass, with the same ends; minmax and average need none.
        percentile: above 0, at most 100; of the method of that name.
    """
    assert method in RANGE_METHODS
    if method == "minmax":
        return extremes.low, extremes.high
    if method == "average":
        return extremes.average
    assert histogram is not None
    assert (histogram.low, histogram.high) == (extremes.low, extremes.high)
    if extremes.low == extremes.high:
        return 0.0, 0.0
    assert histogram.counts.any()
    if method == "percentile":
        return _percentile(histogram, percentile)
    costs = squared_errors if method == "mse" else divergences
    low, high = _search(partial(costs, histogram.counts, histogram.zero), histogram.zero)
    return extremes.low * low, extremes.high * high


def scale_and_zero(low: float, high: float) -> tuple[Tensor, Tensor]:
    """Scale () float32 and zero point () uint8 of a range low <= 0 <= high.

    They are those that `quantize_activations` takes for a tensor with these extremes, but that a scale is never below
    float32's least normal number, and finite where high - low is not. The scale of (0, 0) is 1.
    """
    assert low <= 0 <= high
    least, greatest = torch.tensor([low, high])
    scale = (greatest - least) / 255
    if not scale.isfinite():
        scale = greatest / 255 - least / 255
    scale = scale.clamp(min=TINY) if low < high else torch.ones_like(scale)
    return scale, (-least / scale).clamp(0, 255).round().to(torch.uint8)


def squared_errors(counts: Tensor, zero: float, lows: Tensor, highs: Tensor) -> Tensor:
    """Sums over the values of squared errors, in squares of a bin's width, as `mse` has them.

    Values v_0..v_255 one scale apart, with borders b_1..b_255 halfway between them, have sum (x - v)^2 =
    sum (x - v_255)^2 - 2 scale * sum_k G(b_k) with G(b) = sum max(b - x, 0), which is linear between the bins' centres.

    Args:
        counts: (BINS,) values in each bin.
        zero: where among the bins 0 is.
        lows, highs: (C,) float64 ends of the ranges, in bins from the first; zero lies between them.

    Returns:
        (C,) float64.
    """
    scale = (highs - lows) / 255
    point = ((zero - lows) / scale).clamp(0, 255).round()
    greatest = zero + (255 - point) * scale
    borders = zero + (torch.arange(0.5, 255, dtype=torch.float64) - point[:, None]) * scale[:, None]  # (C, 255)

    weights, centres = counts.double(), torch.arange(0.5, BINS, dtype=torch.float64)
    passed = weights.cumsum(0)
    ramp = _sums_before(passed)
    place = (borders - 0.5).clamp_(min=0)
    centre = place.long().clamp_(max=BINS - 1)
    gained = (ramp[centre] + (place - centre) * passed[centre]).sum(1)

    sums = passed[-1], (weights * centres).sum(), (weights * centres.square()).sum()
    return sums[2] - 2 * greatest * sums[1] + greatest.square() * sums[0] - 2 * scale * gained


def divergences(counts: Tensor, zero: float, lows: Tensor, highs: Tensor) -> Tensor:
    """Sums of P log(P / Q) over the bins that each range touches, as `entropy` has them; infinite where all are empty.

    Arguments and result are those of `squared_errors`, for ranges of LEVELS bins or more.
    """
    values, bins = _limited_at_zero(counts, zero).double(), torch.arange(BINS)
    first, end = lows.floor().long().clamp(min=0), highs.ceil().long().clamp(max=BINS)
    before, filled = _sums_before(values), _sums_before((values > 0).double())
    edges = first[:, None] + (end - first)[:, None] * torch.arange(LEVELS + 1) // LEVELS  # (C, 257)
    mean = before[edges].diff(dim=1) / filled[edges].diff(dim=1).clamp(min=1)  # (C, 256): Q

    left = torch.where(values > 0, bins, BINS).flip(0).cummin(0).values.flip(0)[first].minimum(end - 1)
    right = torch.where(values > 0, bins, -1).cummax(0).values[end - 1].maximum(first)
    tails = torch.stack([before[first], before[-1] - before[end]])  # (2, C)
    tails = torch.where(left == right, torch.stack([tails.sum(0), torch.zeros_like(tails[0])]), tails)

    inside = _sums_before(values.xlogy(values))
    total = inside[end] - inside[first] - before[edges].diff(dim=1).xlogy(mean).sum(1)
    for place, tail in zip((left, right), tails, strict=True):
        level = ((place - first + 1) * LEVELS - 1) // (end - first)
        own, whole = values[place], values[place] + tail
        total += whole.xlogy(whole) - own.xlogy(own) - tail.xlogy(mean.gather(1, level[:, None])[:, 0])
    return total


def _percentile(histogram: Histogram, percentile: float) -> tuple[float, float]:
    assert 0 < percentile <= 100
    share = (100 - percentile) / 200
    tail = math.floor(round(share * int(histogram.counts.sum()), 6))  # 100 - 99.9 is less than 0.1 in binary
    first = int((histogram.counts.cumsum(0) <= tail).sum())
    after = BINS - int((histogram.counts.flip(0).cumsum(0) <= tail).sum())
    return min(0.0, histogram.edge(first)), max(0.0, histogram.edge(after))


def _search(cost: Cost, zero: float) -> tuple[float, float]:
    """Factors of the low and the high end, of the range that costs least."""
    low, high = _cheapest(cost, zero, COARSE, COARSE)
    return _cheapest(cost, zero, *((factor * FINE).clamp(max=1) for factor in (low, high)))


def _cheapest(cost: Cost, zero: float, lows: Tensor, highs: Tensor) -> tuple[float, float]:
    """One of the factors of each end, from the widest down; the widest of equals."""
    below, above = zero, BINS - zero
    low, high = torch.meshgrid(lows if below else lows[:1], highs if above else highs[:1], indexing="ij")
    wide = below * low + above * high >= LEVELS
    low, high = low[wide], high[wide]
    best = cost(zero - below * low, zero + above * high).argmin()
    return float(low[best]), float(high[best])


def _limited_at_zero(counts: Tensor, zero: float) -> Tensor:
    """The counts (BINS,), that of the bin of 0 no more than the greater one beside it."""
    at = min(int(zero), BINS - 1)
    beside = torch.cat([counts[max(at - 1, 0) : at], counts[at + 1 : at + 2]])
    limited = counts.clone()
    limited[at] = torch.minimum(counts[at], beside.max())
    return limited


def _sums_before(x: Tensor) -> Tensor:
    """(K,) -> (K + 1,): the sum of what is before each place."""
    return torch.cat([x.new_zeros(1), x.cumsum(0)])
