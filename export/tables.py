"""Tables of a report as plain text in cells; free-form details of a step, and where bytes are, made into such."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .numbers import MISSING, at, count, decimals, listed, number, plain

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
    """Rows below heads; the first column names the row, the others are numbers where `numeric`, but for `words`."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: bool = True
    title: str = ""
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.heads) for row in self.rows), self.heads

    @classmethod
    def of(
        cls,
        heads: Iterable[str],
        rows: Iterable[Sequence[Cell]],
        *,
        numeric: bool = True,
        title: str = "",
        words: tuple[str, ...] = (),
    ) -> "Table":
        """A table of lists."""
        return cls(tuple(heads), tuple(tuple(row) for row in rows), numeric, title, words)


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


def bytes_table(accounting: Mapping[str, Any]) -> Table:
    """What `accounting.account` lists, a tensor a row, and below them the rest: rows that add up to the whole."""
    rows = [_tensor_row(entry) for entry in listed(accounting.get("tensors")) if isinstance(entry, Mapping)]
    smaller, graphs = at(accounting, "smaller", "tensors"), at(accounting, "graphs", "files")
    if smaller:
        name = "1 smaller tensor" if smaller == 1 else f"{count(smaller)} smaller tensors"
        rows.append([Cell(name), Cell(""), Cell(""), *_bytes_and_share(accounting["smaller"]), Cell("")])
    if graphs:
        name = "the graph" if graphs == 1 else f"{count(graphs)} graphs"
        what = Cell("nodes and constants")
        rows.append([Cell(name), Cell(""), Cell(""), *_bytes_and_share(accounting["graphs"]), what])
    heads = ("Tensor", "Format", "Shape", "MB", "Share", "Why it is not smaller")
    return Table.of(heads, rows, words=("Format", "Why it is not smaller"))


def bytes_lead(accounting: Mapping[str, Any]) -> str:
    """What the rows of `bytes_table` are of."""
    over, (whole, _) = number(accounting.get("over")), _bytes_and_share(accounting)
    least = MISSING if over is None else f"{100 * over:g} %"
    return f"tensors over {least} of {whole.text} MB ({plain(accounting.get('of'))}), then the rest"


def bytes_beside(accounting: Mapping[str, Any]) -> str:
    """Which files the whole leaves out, and their bytes; empty where there are none."""
    files = number(at(accounting, "beside", "files")) or 0
    if not files:
        return ""
    others = {1: "", 2: " and a smaller file"}.get(int(files), f" and {count(files - 1)} smaller files")
    size = _bytes_and_share(accounting["beside"])[0].text
    return f"{plain(at(accounting, 'beside', 'largest'))}{others}, {size} MB"


def _tensor_row(entry: Mapping[str, Any]) -> list[Cell]:
    shape = " x ".join(str(length) for length in listed(entry.get("shape")))
    reason, _, note = str(entry.get("why") or "").partition("; ")
    name, form = (cell(plain(entry.get(key))) for key in ("name", "format"))
    return [name, form, cell(shape or MISSING), *_bytes_and_share(entry), Cell(reason, note)]


def _bytes_and_share(entry: Mapping[str, Any]) -> list[Cell]:
    """In MB and per cent; MB with two decimals, for one in a hundred of a small model to show."""
    size, share = number(entry.get("bytes")), number(entry.get("share"))
    return [
        cell(MISSING if size is None else decimals(size / 1e6, 2)),
        cell(MISSING if share is None else decimals(100 * share, 1, " %")),
    ]
