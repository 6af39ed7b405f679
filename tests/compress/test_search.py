"""The search for formats against every assignment there is, and what it does at the ends of the budget."""

import itertools
import math

import numpy as np
import pytest

from slimformer.compress.search import Candidate, Forms, choose

Candidates = dict[str, dict[str, Candidate]]


def together(candidates: Candidates, forms: Forms) -> float:
    return math.sqrt(sum(candidates[name][form].error ** 2 for name, form in forms.items()))


def seconds(candidates: Candidates, forms: Forms) -> float:
    return sum(candidates[name][form].seconds for name, form in forms.items())


BY_HAND: Candidates = {
    "a": {"static": Candidate(0.3, 1.0), "dynamic": Candidate(0.2, 1.5), "float32": Candidate(0.0, 3.0)},
    "b": {"static": Candidate(0.4, 1.0), "dynamic": Candidate(0.4, 2.0), "float32": Candidate(0.0, 2.0)},
}


@pytest.mark.parametrize(
    ("budget", "forms", "measured"),
    [
        (0.5, {"a": "static", "b": "static"}, 1),  # sqrt(0.09 + 0.16) is within it
        (0.35, {"a": "static", "b": "float32"}, 2),  # b: 0.16 for 1 s; a: 0.05 for 0.5 s or 0.09 for 2 s
        (0.25, {"a": "dynamic", "b": "float32"}, 3),  # a: 0.05 for 0.5 s before 0.09 for 2 s; measured in between
        (0.1, {"a": "float32", "b": "float32"}, 4),
    ],
)
def test_by_hand(budget: float, forms: Forms, measured: int) -> None:
    """Errors measured are a little over what is predicted, so that each change is followed by a measurement."""
    found = choose(BY_HAND, budget, lambda forms: together(BY_HAND, forms))
    assert found.forms == forms
    assert found.error == pytest.approx(together(BY_HAND, forms))
    assert found.met
    assert found.measured <= measured


def test_a_format_that_is_better_in_both_is_taken_first() -> None:
    candidates = {"a": {"fast": Candidate(0.5, 1.0), "same": Candidate(0.1, 1.0), "float32": Candidate(0.0, 9.0)}}
    assert choose(candidates, 1.0, lambda forms: 0.0).forms == {"a": "same"}  # of equals in time the better one


def test_what_is_measured_counts_and_not_what_is_added_up() -> None:
    """Errors that add up to more than their squares do need more changes; what cannot be met is said."""
    found = choose(BY_HAND, 0.45, lambda forms: 3 * together(BY_HAND, forms))
    assert (found.forms, found.met) == (
        {"a": "float32", "b": "float32"},
        True,
    )  # b alone leaves 3 * 0.3, a's dynamic 0.6
    stubborn = choose(BY_HAND, 0.45, lambda forms: 1.0)
    assert (stubborn.forms, stubborn.met, stubborn.error) == ({"a": "float32", "b": "float32"}, False, 1.0)


def test_many_changes_are_made_before_all_are_measured_again() -> None:
    """Of 40 equal linears 30 have to stay float: half the error needs a quarter of the squares."""
    one = {"static": Candidate(0.1, 1.0), "float32": Candidate(0.0, 2.0)}
    candidates: Candidates = {f"l{i}": one for i in range(40)}
    found = choose(candidates, math.sqrt(0.1) + 1e-9, lambda forms: together(candidates, forms))
    assert list(found.forms.values()).count("float32") == 30
    assert found.measured == 2


def test_against_every_assignment() -> None:
    """On random problems it is never over the budget, and at most a few per cent slower than the best on the mean."""
    random = np.random.default_rng(0)
    lost = []
    for _ in range(60):
        candidates: Candidates = {}
        for i in range(5):
            own = {form: Candidate(float(random.uniform(0.01, 1)), float(random.uniform(1, 2))) for form in "xy"}
            candidates[f"l{i}"] = {**own, "float32": Candidate(0.0, float(random.uniform(2, 4)))}
        budget = float(random.uniform(0.2, 1.2))
        found = choose(candidates, budget, lambda forms, own=candidates: together(own, forms))
        assert found.met
        assert together(candidates, found.forms) <= budget * (1 + 1e-9)
        names = list(candidates)
        every = (dict(zip(names, forms, strict=True)) for forms in itertools.product(*candidates.values()))
        allowed = [seconds(candidates, forms) for forms in every if together(candidates, forms) <= budget]
        lost.append(seconds(candidates, found.forms) / min(allowed) - 1)
    assert min(lost) >= -1e-9
    assert np.mean(lost) < 0.05
    assert np.mean(np.array(lost) < 1e-9) > 0.3  # often it is the best
