"""Tables of a report as plain text in cells, and free-form details of a step made into lines and tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .numbers import plain

PER_LAYER = ("layers", "kept_layers", "heads", "cross_heads", "neurons")  # lists with an entry for each layer


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, what qualifies it, and "good", "bad" or nothing."""

    text: str
    note: str = ""
    mark: str = ""


def cell(text: str) -> Cell:
    """A cell of text alone."""
    return Cell(text)


@dataclass(frozen=True)
class Table:
    """Rows below heads; the first column names the row, the others are numbers where `numeric`."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: bool = True
    title: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.heads) for row in self.rows), self.heads

    @classmethod
    def of(
        cls, heads: Iterable[str], rows: Iterable[Sequence[Cell]], *, numeric: bool = True, title: str = ""
    ) -> "Table":
        """A table of lists."""
        return cls(tuple(heads), tuple(tuple(row) for row in rows), numeric, title)


def flatten(details: Mapping[str, Any], path: str = "") -> tuple[list[tuple[str, str]], list[Table]]:
    """Nested details -> (name, value) lines, and a table for every list of objects and for what is said per layer."""
    lines: list[tuple[str, str]] = []
    tables: list[Table] = []
    layered = _per_layer(details)
    if layered:
        tables.append(_layer_table(layered, path))
    for key, value in details.items():
        name = f"{path}: {_words(key)}" if path else _words(key)
        if key in layered:
            continue
        if isinstance(value, Mapping) and value:
            inner, found = flatten(value, name)
            lines += inner
            tables += found
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            tables.append(_record_table(value, name))
        else:
            lines.append((name, "none" if value in ({}, []) else plain(value)))
    return lines, tables


def _words(key: str) -> str:
    return str(key).replace("_", " ")


def _per_layer(details: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The lists of PER_LAYER that have the same length, where there are two or more."""
    lists = {key: details[key] for key in PER_LAYER if isinstance(details.get(key), list) and details[key]}
    same = len({len(values) for values in lists.values()}) == 1
    return lists if len(lists) > 1 and same else {}


def _layer_table(lists: Mapping[str, list[Any]], path: str) -> Table:
    rows = [[Cell(str(i)), *map(_units, values)] for i, values in enumerate(zip(*lists.values(), strict=True))]
    title = f"{path}: per layer" if path else "per layer"
    return Table.of(["Layer", *(_words(key) for key in lists)], rows, title=title)


def _units(value: Any) -> Cell:
    """A number, or how many units there are and which."""
    return Cell(str(len(value)), plain(value)) if isinstance(value, list) else Cell(plain(value))


def _record_table(records: Sequence[Mapping[str, Any]], title: str) -> Table:
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_value(record.get(key)) for key in keys] for record in records]
    return Table.of([_words(key) for key in keys], rows, title=title)


def _value(value: Any) -> Cell:
    if isinstance(value, Mapping):
        return Cell(", ".join(f"{_words(key)} {plain(item)}" for key, item in value.items()))
    return Cell(plain(value))
