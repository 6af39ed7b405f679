"""How reports write numbers: points and ratios with two decimals, megabytes with one, '-' for what is not there."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "-"
LONGEST_LIST = 100  # characters of a list of numbers before it is cut, its length stated


def at(value: Any, *keys: str) -> Any:
    """The value below nested keys, or None where any of them is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def mapped(value: Any) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number as float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def decimals(value: Any, places: int, unit: str = "", sign: str = "") -> str:
    """A number with thousands separators and fixed decimals; `sign` "+" writes it before positive numbers too."""
    plain = number(value)
    if plain is None:
        return MISSING
    text = f"{plain:{sign},.{places}f}"
    return (text.lstrip("+-") if float(text.replace(",", "")) == 0 else text) + unit


def points(value: Any) -> str:
    """A metric in points: 61.40."""
    return decimals(value, 2)


def ratio(value: Any) -> str:
    """A ratio: 9.10x."""
    return decimals(value, 2, "x")


def megabytes(value: Any) -> str:
    """Bytes in MB of 10^6: 90.9."""
    plain = number(value)
    return MISSING if plain is None else decimals(plain / 1e6, 1)


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    return decimals(value, 0)


def scientific(value: Any) -> str:
    """A small error: 1.2e-06."""
    plain = number(value)
    return MISSING if plain is None else "0" if plain == 0 else f"{plain:.1e}"


def between(low: Any, high: Any, unit: str = "") -> str:
    """An interval: [-1.82, -0.08]; empty where an end is missing."""
    if number(low) is None or number(high) is None:
        return ""
    return f"[{decimals(low, 2)}, {decimals(high, 2)}]{unit}"


def difference(entry: Any) -> str:
    """A paired difference with its interval: -0.94 [-1.82, -0.08]."""
    text = decimals(at(entry, "difference"), 2, sign="+")
    return f"{text} {between(at(entry, 'low'), at(entry, 'high'))}".strip()


def plain(value: Any) -> str:
    """Any JSON scalar, or list of scalars, as text."""
    if value is None or value == [] or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        if number(value) is None:
            return MISSING
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return _listed(value)
    return str(value)


def _listed(values: Sequence[Any]) -> str:
    """Values by comma; runs of whole numbers as 3-7, and a long list cut with its length."""
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    parts = ranges(values) if whole and len(values) > 2 else [plain(value) for value in values]
    text = ", ".join(parts)
    if not whole or len(text) <= LONGEST_LIST:
        return text
    return f"{text[:LONGEST_LIST].rpartition(', ')[0]}, … ({len(values)} in all)"


def ranges(values: Sequence[int]) -> list[str]:
    """Runs of three or more consecutive numbers as first-last, the others by themselves."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(value) for value in run]
    return texts


def sources_cut(data: Any) -> str:
    """How many sources of each split are longer than what a summarizer reads; empty where nothing is cut."""
    known, rows = dict(mapped(at(data, "sources_cut"))), mapped(at(data, "rows"))
    limit = known.pop("at", None)
    parts = [f"{name} {count(number)} of {count(rows.get(name))}" for name, number in known.items()]
    return f"at {plain(limit)} tokens, {', '.join(parts)}" if parts else ""
