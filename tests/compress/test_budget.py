"""How a greatest drop is written, and when the interval proves it."""

import pytest

from slimformer.compress.budget import MaxDrop
from slimformer.transformer.errors import InputError
from slimformer.transformer.statistics import Interval


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", MaxDrop(1.0)),
        ("1pt", MaxDrop(1.0)),
        (" 0.5 pt ", MaxDrop(0.5)),
        ("2%", MaxDrop(2.0, relative=True)),
        ("2.5 %", MaxDrop(2.5, relative=True)),
        (2, MaxDrop(2.0)),
        (1.5, MaxDrop(1.5)),
        ("0", MaxDrop(0.0)),
    ],
)
def test_forms(text: str | float, expected: MaxDrop) -> None:
    assert MaxDrop.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "1e3", "one", "1 point", "%", "pt", "1%%", "1,5", "nan", "inf", ".5", "1\n2", -1]
)
def test_refusals_say_how_to_write_it(text: str | float) -> None:
    with pytest.raises(InputError, match="write points as 1 or 1pt, or a share of the original as 2%"):
        MaxDrop.parse(text)


def test_points_of_a_share() -> None:
    assert MaxDrop(2.0, relative=True).points(60.0) == pytest.approx(1.2)
    assert MaxDrop(2.0).points(60.0) == 2.0


@pytest.mark.parametrize(
    ("bound", "held"), [(-1.999, True), (-2.0, True), (-2.0000001, False), (3.0, True), (float("nan"), False)]
)
def test_the_one_sided_bound_decides(bound: float, held: bool) -> None:
    interval = Interval(difference=-1.0, low=-9.0, high=9.0, one_sided_low=bound)
    assert MaxDrop(2.0).held(interval, original=60.0) is held
    assert MaxDrop(4.0, relative=True).held(interval, original=50.0) is held
