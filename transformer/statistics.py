"""Confidence intervals of paired accuracy differences and of measured time ratios.

Accuracy: the cluster bootstrap. Examples of one group (the queries that lead to one page, the sentences of a document)
are not independent, so whole groups are drawn with replacement, for both models alike, and the difference of the
metric is computed in each draw; its percentiles are the interval (Efron & Tibshirani 1993, chapter 13; Davison &
Hinkley 1997, section 3.8). Metrics are functions of summed statistics, so a draw costs one row of a matrix product.

Time: the hierarchical bootstrap of Kalibera & Jones (2013, "Rigorous benchmarking in reasonable time"): processes are
drawn with replacement, then rounds within each drawn process, so the interval holds what changes between restarts.

Few groups or processes give intervals that are too narrow, as every percentile bootstrap does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError
from .metrics import Aggregate, FloatArray

_LEVEL = 0.95
_BLOCK = 256  # resamples at once: bounds the memory of the matrix of counts (block, groups)


@dataclass(frozen=True)
class Interval:
    """Candidate minus baseline in the metric's unit (points): 95 % two-sided `low` to `high`, and one-sided below.

    The difference is above `one_sided_low` with 95 % confidence: what `--max-drop` is compared with.
    """

    difference: float
    low: float
    high: float
    one_sided_low: float


@dataclass(frozen=True)
class RatioInterval:
    """A ratio of times and its 95 % two-sided interval."""

    ratio: float
    low: float
    high: float


def paired_interval(
    baseline: ArrayLike,
    candidate: ArrayLike,
    groups: ArrayLike,
    aggregate: Aggregate,
    resamples: int = 2000,
    seed: int = 0,
    metric: str | None = None,
) -> Interval:
    """Return the interval of candidate - baseline in one metric (default: the first name of `aggregate`).

    Arguments and errors are those of `paired_intervals`.
    """
    intervals = paired_intervals(baseline, candidate, groups, aggregate, resamples, seed)
    return intervals[aggregate.names[0] if metric is None else metric]


def paired_intervals(
    baseline: ArrayLike,
    candidate: ArrayLike,
    groups: ArrayLike,
    aggregate: Aggregate,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return the interval of candidate - baseline in every metric of `aggregate`, all from the same draws.

    baseline, candidate: (n, k) statistics of the same n examples under two models; groups: (n,), equal for examples
    that are drawn together. Raises InputError where fewer than two groups leave nothing to resample or a statistic is
    not finite, ValueError where the shapes do not fit.
    """
    first, second, names = _checked(baseline, candidate, groups, resamples)
    sums, sizes = _group_sums(np.hstack([first, second]), names)
    k = first.shape[1]
    rng = np.random.default_rng(seed)
    drawn: dict[str, list[FloatArray]] = {name: [] for name in aggregate.names}
    for start in range(0, resamples, _BLOCK):
        rows = min(_BLOCK, resamples - start)
        counts = _draws(rng, rows, len(sizes))
        for name, values in _difference(counts @ sums, counts @ sizes, k, aggregate).items():
            drawn[name].append(values)
    whole = _difference(sums.sum(axis=0, keepdims=True), sizes.sum(keepdims=True), k, aggregate)
    return {name: _interval(float(whole[name][0]), np.concatenate(drawn[name])) for name in aggregate.names}


def ratio_interval(ratios_by_process: Sequence[Sequence[float]], resamples: int = 2000, seed: int = 0) -> RatioInterval:
    """Return the median over processes of the median ratio over a process's rounds, with its 95 % interval.

    ratios_by_process: for each process restart the ratio (baseline's time over candidate's) of each interleaved round.
    With one process the interval cannot hold what changes between restarts. Raises InputError for no process, a process
    without rounds, or a ratio that is not a positive number.
    """
    processes = [np.asarray(rounds, dtype=np.float64) for rounds in ratios_by_process]
    if not processes or any(rounds.size == 0 for rounds in processes):
        raise InputError("a ratio needs at least one process with at least one timed round in each")
    for number, rounds in enumerate(processes, start=1):
        bad = rounds[~(np.isfinite(rounds) & (rounds > 0))]
        if bad.size:
            raise InputError(f"the ratio {bad[0]} of process {number} is not a positive number: measure again")
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(processes), size=(resamples, len(processes)))
    medians = np.empty(picks.shape)
    for number, rounds in enumerate(processes):
        places = np.nonzero(picks == number)
        chosen = rng.integers(rounds.size, size=(len(places[0]), rounds.size))
        medians[places] = np.median(rounds[chosen], axis=1)
    low, high = np.quantile(np.median(medians, axis=1), _tails())
    return RatioInterval(float(np.median([np.median(rounds) for rounds in processes])), float(low), float(high))


def _tails() -> tuple[float, float]:
    return (1 - _LEVEL) / 2, (1 + _LEVEL) / 2


def _checked(
    baseline: ArrayLike, candidate: ArrayLike, groups: ArrayLike, resamples: int
) -> tuple[FloatArray, FloatArray, NDArray[np.str_]]:
    first, second = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    names = np.asarray(groups).astype(np.str_)
    if first.ndim != 2 or first.shape != second.shape or names.shape != first.shape[:1]:
        shapes = f"{first.shape}, {second.shape} and {names.shape}"
        raise ValueError(f"baseline, candidate and groups must be (n, k), (n, k) and (n,), not {shapes}")
    if resamples < 40:
        raise ValueError(f"{resamples} resamples hold no 2.5th percentile: give at least 40")
    for which, values in (("baseline", first), ("candidate", second)):
        rows = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if rows.size:
            raise InputError(f"{rows.size} of the {which}'s {len(values)} examples (first: {rows[0]}) are not finite")
    if len(np.unique(names)) < 2:
        raise InputError(f"{len(names)} examples in one group give no interval: evaluate on at least two groups")
    return first, second, names


def _group_sums(statistics: FloatArray, groups: NDArray[np.str_]) -> tuple[FloatArray, FloatArray]:
    """Sums (G, k) and numbers of examples (G,) of the G groups, in the order of their names."""
    names, which = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), statistics.shape[1]))
    np.add.at(sums, which, statistics)
    return sums, np.bincount(which, minlength=len(names)).astype(np.float64)


def _draws(rng: np.random.Generator, rows: int, groups: int) -> FloatArray:
    """How often each group occurs in each of `rows` draws of as many groups with replacement, (rows, groups)."""
    drawn = rng.integers(groups, size=(rows, groups)) + groups * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups).astype(np.float64)


def _difference(total: FloatArray, count: FloatArray, k: int, aggregate: Aggregate) -> dict[str, FloatArray]:
    """Candidate - baseline of each metric, (R,), from sums (R, 2k): the baseline's columns, then the candidate's."""
    before, after = aggregate(total[:, :k], count), aggregate(total[:, k:], count)
    return {name: after[name] - before[name] for name in aggregate.names}


def _interval(difference: float, drawn: FloatArray) -> Interval:
    low, one_sided, high = np.quantile(drawn, [_tails()[0], 1 - _LEVEL, _tails()[1]])
    return Interval(difference, float(low), float(high), float(one_sided))
