"""Intervals against enumeration by hand and the normal approximation."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from slimformer.transformer.errors import InputError
from slimformer.transformer.metrics import ClassCounts, Mean
from slimformer.transformer.statistics import Interval, paired_interval, paired_intervals, ratio_interval

ONE = Mean(("score",))


def column(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=float)[:, None]


def test_two_groups_by_hand() -> None:
    # group a: mean difference (1 + 1 + 0) / 3; group b: -1. Draws: aa 1/4, ab 1/2, bb 1/4.
    baseline, candidate = column([0, 0, 1, 1]), column([1, 1, 1, 0])
    interval = paired_interval(baseline, candidate, ["a", "a", "a", "b"], ONE)
    assert interval.difference == pytest.approx(100 * (2 - 1) / 4)
    assert (interval.low, interval.one_sided_low) == (-100, -100)
    assert interval.high == pytest.approx(100 * 2 / 3)


def test_three_groups_tell_the_one_sided_bound_from_the_two_sided() -> None:
    # Of 27 draws 1 has the difference 0 three times (3.7 %) and 3 have it twice: the 2.5th percentile is 0,
    # the 5th is the mean of (0, 0, 0.3).
    baseline, candidate = np.zeros((3, 1)), column([0, 0.3, 0.9])
    interval = paired_interval(baseline, candidate, ["x", "y", "z"], ONE, resamples=20000)
    draws = sorted(100 * float(np.mean(draw)) for draw in product([0, 0.3, 0.9], repeat=3))
    assert interval.low == pytest.approx(draws[0], abs=1e-9)
    assert interval.one_sided_low == pytest.approx(draws[1], abs=1e-9)
    assert interval.high == pytest.approx(draws[-1], abs=1e-9)


def test_independent_examples_agree_with_the_normal_interval() -> None:
    rng = np.random.default_rng(3)
    baseline = rng.normal(size=(800, 1))
    candidate = baseline + rng.normal(0.1, 0.5, size=(800, 1))
    interval = paired_interval(baseline, candidate, np.arange(800), ONE)
    difference = 100 * (candidate - baseline)[:, 0]
    mean, error = difference.mean(), stats.sem(difference)
    assert interval.difference == pytest.approx(mean)
    low, high = stats.norm.interval(0.95, mean, error)
    expected = [low, high, stats.norm.ppf(0.05, mean, error)]
    # 2000 draws place the 2.5th percentile within 0.06 standard errors (1 sigma)
    assert [interval.low, interval.high, interval.one_sided_low] == pytest.approx(expected, abs=0.2 * error)


def test_repeating_every_example_within_its_group_changes_no_interval() -> None:
    rng = np.random.default_rng(4)
    baseline, candidate = rng.random((50, 2)), rng.random((50, 2))
    groups = np.arange(50)
    metric = Mean(("a", "b"))
    once = paired_intervals(baseline, candidate, groups, metric)
    many = paired_intervals(np.repeat(baseline, 9, 0), np.repeat(candidate, 9, 0), np.repeat(groups, 9), metric)
    apart = paired_intervals(np.repeat(baseline, 9, 0), np.repeat(candidate, 9, 0), np.arange(450), metric)
    for name in ("a", "b"):
        assert vars(many[name]) == pytest.approx(vars(once[name]))
        assert apart[name].high - apart[name].low < 0.5 * (once[name].high - once[name].low)


def test_equal_models_differ_by_exactly_nothing() -> None:
    values = np.random.default_rng(0).random((30, 1))
    assert paired_interval(values, values, np.arange(30) // 3, ONE) == Interval(0.0, 0.0, 0.0, 0.0)


def test_a_metric_that_is_no_mean_equals_resampling_the_examples() -> None:
    rng = np.random.default_rng(5)
    true, first, second = (rng.integers(3, size=60) for _ in range(3))
    groups = rng.integers(12, size=60)
    eye = np.eye(3)

    def rows(predicted: np.ndarray) -> np.ndarray:
        return np.hstack([eye[true] * (true == predicted)[:, None], eye[true], eye[predicted]])

    def macro_f1(predicted: np.ndarray, chosen: np.ndarray) -> float:
        scores = []
        for label in range(3):
            is_true, is_predicted = true[chosen] == label, predicted[chosen] == label
            scores.append(2 * np.sum(is_true & is_predicted) / max(1, is_true.sum() + is_predicted.sum()))
        return 100 * float(np.mean(scores))

    interval = paired_intervals(rows(first), rows(second), groups, ClassCounts(3), resamples=4000)["macro_f1"]
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    naive = []
    for _ in range(4000):
        chosen = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        naive.append(macro_f1(second, chosen) - macro_f1(first, chosen))
    whole = np.arange(60)
    assert interval.difference == pytest.approx(macro_f1(second, whole) - macro_f1(first, whole))
    spread = float(np.std(naive))  # both sides have sampling error of about 0.04 spreads
    expected = np.quantile(naive, [0.025, 0.975, 0.05])
    assert [interval.low, interval.high, interval.one_sided_low] == pytest.approx(expected, abs=0.25 * spread)


def test_seed_decides_the_draws() -> None:
    rng = np.random.default_rng(6)
    arguments = (rng.random((40, 1)), rng.random((40, 1)), np.arange(40), ONE)
    assert paired_interval(*arguments, seed=1) == paired_interval(*arguments, seed=1)
    assert paired_interval(*arguments, seed=1) != paired_interval(*arguments, seed=2)


def test_metric_is_chosen_by_name() -> None:
    baseline, candidate = np.zeros((4, 2)), np.tile([0.1, 0.2], (4, 1))
    metric = Mean(("a", "b"))
    assert paired_interval(baseline, candidate, np.arange(4), metric).difference == pytest.approx(10)
    assert paired_interval(baseline, candidate, np.arange(4), metric, metric="b").difference == pytest.approx(20)


def test_what_gives_no_interval_is_refused() -> None:
    values = np.ones((4, 1))
    with pytest.raises(InputError, match="4 examples in one group"):
        paired_interval(values, values, ["p"] * 4, ONE)
    with pytest.raises(InputError, match=r"1 of the candidate's 4 examples \(first: 2\)"):
        paired_interval(values, column([1, 1, np.nan, 1]), np.arange(4), ONE)
    with pytest.raises(ValueError, match=r"\(4, 1\), \(3, 1\)"):
        paired_interval(values, values[:3], np.arange(4), ONE)
    with pytest.raises(ValueError, match=r"and \(3,\)"):
        paired_interval(values, values, np.arange(3), ONE)
    with pytest.raises(ValueError, match="at least 40"):
        paired_interval(values, values, np.arange(4), ONE, resamples=39)


def test_ratio_of_two_processes_by_hand() -> None:
    # one round each: draws are (2, 2), (2, 4), (4, 4) with 1/4, 1/2, 1/4
    interval = ratio_interval([[2.0], [4.0]])
    assert (interval.ratio, interval.low, interval.high) == (3, 2, 4)


def test_ratio_of_one_process_is_the_median_of_its_rounds() -> None:
    rounds = np.random.default_rng(0).normal(5, 0.2, size=201)
    interval = ratio_interval([rounds.tolist()])
    assert interval.ratio == np.median(rounds)
    reference = stats.bootstrap((rounds,), np.median, method="percentile", n_resamples=4000, rng=1).confidence_interval
    assert [interval.low, interval.high] == pytest.approx([reference.low, reference.high], abs=0.01)


def test_ratio_interval_holds_what_changes_between_restarts() -> None:
    rng = np.random.default_rng(2)
    levels = rng.normal(5, 0.5, size=8)
    apart = ratio_interval([(level + rng.normal(0, 0.01, size=30)).tolist() for level in levels])
    alike = ratio_interval([(5 + rng.normal(0, 0.01, size=30)).tolist() for _ in levels])
    assert apart.low <= apart.ratio <= apart.high
    assert apart.high - apart.low > 10 * (alike.high - alike.low)


def test_ratio_counts_each_process_once_whatever_its_rounds() -> None:
    interval = ratio_interval([[1.0], [2.0], [9.0] * 50])
    assert (interval.ratio, interval.low, interval.high) == (2, 1, 9)
    assert ratio_interval([[1.0, 1.2], [2.0]], seed=1) == ratio_interval([[1.0, 1.2], [2.0]], seed=1)


@pytest.mark.parametrize("ratios", [[], [[]], [[1.0], []], [[1.0, float("nan")]], [[0.0]], [[-1.0]], [[float("inf")]]])
def test_ratios_that_were_not_measured_are_refused(ratios: list[list[float]]) -> None:
    with pytest.raises(InputError, match="ratio"):
        ratio_interval(ratios)
