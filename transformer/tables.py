"""Tables of named fields from JSONL, CSV, TSV and Parquet files, every row checked.

Text files are UTF-8 and may be gzipped (`.gz`). Rows count from 1: the line in JSONL, the record after the header in
CSV and TSV. All that is wrong with a file is collected and raised as one line that names the first five problems.
"""

import csv
import gzip
import io
import json
import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import InputError

Row = dict[str, Any]

_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
_SHOWN = 5  # problems of one file named in its error
_LISTS = ("pages",)  # fields that hold a list of page ids
_KEYS = ("id", "label", "group")  # fields that may be whole numbers
_CSV_LIMIT = threading.Lock()


def find_table(directory: str | Path, stem: str) -> Path | None:
    """Return the table STEM of a directory, or None; two files for one stem are an InputError."""
    folder = Path(directory)
    packed = folder / f"{stem}.parquet.gz"
    if packed.is_file():
        raise InputError(f"{packed}: Parquet compresses by itself; unpack the file to {stem}.parquet")
    found = [path for name in file_names(stem) if (path := folder / name).is_file()]
    if len(found) > 1:
        raise InputError(f"{folder} holds {' and '.join(path.name for path in found)}: keep one of them")
    return found[0] if found else None


def read_rows(path: str | Path, fields: Collection[str], optional: Collection[str] = ()) -> list[Row]:
    """Return the rows of a table with the named fields alone, white space kept; optional ones may be missing.

    `pages` is a tuple of strings, every other field a string that is not blank (`title` may be). Raises InputError that
    names file and rows for what is missing, empty, of the wrong type or unreadable, and for a table without rows.
    """
    return [row for _, row in numbered_rows(Path(path), fields, optional)]


def field_names(path: Path) -> set[str]:
    """Every field that a row of the table has.

    Raises InputError for a file that cannot be read; what is wrong with single rows is left to `read_rows`.
    """
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return set(file.schema_arrow.names)
    return {name for _, row in _raw_rows(path, (), Problems(path)) for name in row}


def file_names(stem: str) -> list[str]:
    """Every name that a table of this stem may have."""
    names = [f"{stem}{suffix}" for suffix in _SUFFIXES]
    return names + [f"{name}.gz" for name in names if not name.endswith(".parquet")]


class Problems:
    """Collects what is wrong with the rows of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[tuple[int, str]] = []

    def add(self, row: int, problem: str) -> None:
        """Note one problem of the row with this number."""
        self.found.append((row, problem))

    def check(self) -> None:
        """Raise InputError with the first problems as one line, if there are any."""
        if self.found:
            listed = some([f"row {row}: {problem}" for row, problem in self.found], "; ")
            raise InputError(f"{self.path}, {listed}")


def some(parts: Sequence[str], separator: str) -> str:
    """The first five parts joined, and how many more there are."""
    more = len(parts) - _SHOWN
    return separator.join(parts[:_SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")


def shown(value: object) -> str:
    """The value as Python writes it, cut short."""
    return shorten(repr(value))


def shorten(text: str, limit: int = 80) -> str:
    """The text, cut to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def numbered_rows(path: Path, fields: Collection[str], optional: Collection[str] = ()) -> list[tuple[int, Row]]:
    """Return what `read_rows` does, each row with its number."""
    problems = Problems(path)
    rows: list[tuple[int, Row]] = []
    for number, raw in _raw_rows(path, (*fields, *optional), problems):
        row: Row = {}
        for field in (*fields, *optional):
            value = raw.get(field)
            if field in optional and (value is None or (isinstance(value, str) and not value.strip())):
                continue
            try:
                row[field] = _value(field, value, raw)
            except ValueError as error:
                problems.add(number, str(error))
        rows.append((number, row))
    problems.check()
    if not rows:
        raise InputError(f"{path} has no rows: add some or remove the file")
    return rows


def _value(field: str, value: Any, row: Row) -> str | tuple[str, ...]:
    """Check one field's value; raises ValueError with the problem."""
    if value is None:
        there = ", ".join(str(name) for name in row) or "none"
        raise ValueError(f"the field {field!r} is missing (fields there: {shorten(there)})")
    if field in _LISTS:
        if not isinstance(value, list):
            raise ValueError(f"the field {field!r} should be a list of page ids, not {shown(value)}")
        if not value:
            raise ValueError(f"the field {field!r} is an empty list")
        return tuple(_string(field, item, numbers=True) for item in value)
    return _string(field, value, numbers=field in _KEYS)


def _string(field: str, value: Any, numbers: bool) -> str:
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        kind = "text or a whole number" if numbers else "text"
        raise ValueError(f"the field {field!r} should be {kind}, not {shown(value)}")
    if not value.strip():
        raise ValueError(f"the field {field!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair ({value[error.start]!r})"
        raise ValueError(f"the field {field!r} holds {half}, which is no character") from error
    return value


def _raw_rows(path: Path, fields: Sequence[str], problems: Problems) -> Iterator[tuple[int, Row]]:
    """Number and fields of each row, as the file has them."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return _json_rows(read_text(path), problems)
    if name.endswith((".csv", ".tsv")):
        return _csv_rows(_records(path, read_text(path), "," if name.endswith(".csv") else "\t"), path, problems)
    if path.name.endswith(".parquet"):
        return _parquet_rows(path, fields)
    raise InputError(f"{path} is no table that can be read: give .jsonl, .csv or .tsv (also .gz), or .parquet")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, gzipped where its name ends so; raises InputError for what cannot be read."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}): copy it again") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        wrong = f"the byte 0x{data[error.start]:02x} on line {line} is not UTF-8"
        raise InputError(f"{path}: {wrong}; save the file as UTF-8") from error


def _json_rows(text: str, problems: Problems) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.add(number, f"not JSON ({shorten(str(error))}): {shorten(line.strip(), 40)!r}")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            problems.add(number, f'a JSON object such as {{"text": …}} is needed, not {shown(row)}')


def _csv_rows(records: list[list[str]], path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    header = records[0] if records else []
    if len(set(header)) < len(header):
        raise InputError(f"{path}: the header names a column twice: {shorten(', '.join(header))}")
    for number, cells in enumerate(records[1:], start=1):
        if len(cells) != len(header):
            problems.add(number, f"{len(cells)} cells where the header has {len(header)}")
            continue
        row: Row = dict(zip(header, cells, strict=True))
        for field in _LISTS:
            if field in row:
                row[field] = [part.strip() for part in cells[header.index(field)].split("|")]
        yield number, row


def _records(path: Path, text: str, delimiter: str) -> list[list[str]]:
    """All records that are not blank; the reader's limit on a cell's length, which is global, is lifted meanwhile."""
    records: list[list[str]] = []
    with _CSV_LIMIT:
        limit = csv.field_size_limit(max(len(text), 1))
        try:
            for cells in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
                if cells:
                    records.append(cells)
        except csv.Error as error:
            raise InputError(f"{path}, row {len(records)}: {error}; check the quotation marks") from error
        finally:
            csv.field_size_limit(limit)
    return records


def _parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, Row]]:
    with _parquet(path) as file:
        there = file.schema_arrow.names
        rows = file.read(columns=[field for field in fields if field in there]).to_pylist()
    yield from enumerate(rows, start=1)


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The opened file; what goes wrong while it is read is an InputError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {shorten(' '.join(str(error).split()))}") from error
