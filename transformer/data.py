"""Tables of texts, labels, pages and queries from a DATA directory, checked before anything is trained.

A table is `STEM.{jsonl,csv,tsv,parquet}`, the first three also with `.gz`; text is UTF-8. Stems and their fields (in
brackets: may be missing):

    train, valid, test             text, label, [group]
    texts                          text
    pages                          id, text, [title]
    queries-valid, queries-test    query, pages, [group]

`pages` of a query is a list of page ids, in CSV and TSV separated by `|`. Rows count from 1: the line in JSONL, the
record after the header in CSV and TSV. `group` names what is resampled together in intervals (a document, an author).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from .errors import InputError
from .tables import Problems, Row, file_names, find_table, numbered_rows, read_rows, shorten, shown, some

__all__ = [
    "LAYOUT",
    "TASKS",
    "LabelledData",
    "LabelledRow",
    "Page",
    "Query",
    "SearchData",
    "find_table",
    "load_data",
    "read_rows",
]

TASKS = ("embedding", "classification")
LAYOUT = (
    "train, valid and test with the fields text and label; or pages (id, text), queries-valid and queries-test "
    "(query, pages) and texts (text); or texts alone; each as .jsonl, .csv, .tsv (also .gz) or .parquet"
)

_SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class LabelledRow:
    """A text and its class; `group` is the row number unless the table has the field."""

    text: str
    label: str
    group: str


@dataclass(frozen=True)
class Page:
    """One page of the collection to search in; the title may be empty."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Query:
    """A query and the ids of its relevant pages; `group` is the first of them unless the table has the field."""

    query: str
    pages: tuple[str, ...]
    group: str


class _Splits(ABC):
    """What both kinds of data say of their texts."""

    @abstractmethod
    def _texts(self) -> dict[str, list[str]]:
        """The texts of each split."""

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 over the texts of each split that has any: proof of what was trained, chosen and tested on."""
        return {split: _fingerprint(texts) for split, texts in self._texts().items() if texts}

    def overlaps(self) -> dict[str, int]:
        """How many distinct texts two splits share, without regard to case and white space, as `train~test`."""
        known = {name: {_normal(text) for text in texts} for name, texts in self._texts().items() if name != "pages"}
        pairs = [pair for pair in combinations(known, 2) if pair != ("texts", "train")]
        return {f"{a}~{b}": len(known[a] & known[b]) for a, b in pairs if known[a] and known[b]}


@dataclass(frozen=True)
class LabelledData(_Splits):
    """Rows for classification, and unlabelled texts."""

    train: tuple[LabelledRow, ...]
    valid: tuple[LabelledRow, ...]
    test: tuple[LabelledRow, ...]
    texts: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The distinct labels of train (of all rows where there is no train), sorted."""
        rows = self.train or self.valid + self.test
        return tuple(sorted({row.label for row in rows}))

    def _texts(self) -> dict[str, list[str]]:
        rows = {"train": self.train, "valid": self.valid, "test": self.test}
        return {"texts": list(self.texts)} | {name: [row.text for row in split] for name, split in rows.items()}


@dataclass(frozen=True)
class SearchData(_Splits):
    """Pages and queries for search, and unlabelled texts; without pages there are only texts to compare models on."""

    pages: tuple[Page, ...]
    valid: tuple[Query, ...]
    test: tuple[Query, ...]
    texts: tuple[str, ...]

    def _texts(self) -> dict[str, list[str]]:
        pages = [f"{page.title}\n{page.text}" for page in self.pages]
        queries = {"valid": [row.query for row in self.valid], "test": [row.query for row in self.test]}
        return {"pages": pages, "texts": list(self.texts)} | queries


def load_data(
    directory: str | Path, task: str | None = None, require: Collection[str] | None = None
) -> SearchData | LabelledData:
    """Read and check the tables of a directory.

    task: "embedding", "classification", or None to go by the tables that are there: pages with queries, or texts alone,
    are for embedding; train, valid or test for classification. require: the splits that must be there (of train, valid,
    test, texts, pages); by default classification needs train, valid and test, and pages need queries of either split;
    queries always need pages. What is there is read whether required or not. Raises InputError for a missing directory
    or split and for anything wrong in a table, naming file and row, up to five problems of a file.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError(f"the data directory {folder} does not exist; it should hold {LAYOUT}")
    if task is not None and task not in TASKS:
        raise InputError(f"the task {task!r} does not exist: choose from {', '.join(TASKS)}")
    stems = (*_SPLITS, "texts", "pages", "queries-valid", "queries-test")
    tables = {stem: path for stem in stems if (path := find_table(folder, stem))}
    if (task or _infer(folder, tables)) == "classification":
        _need(folder, tables, _SPLITS if require is None else require)
        return _labelled(tables)
    _need(folder, tables, _search_needs(folder, tables, require), {"valid", "test"})
    return _search(tables)


def _infer(folder: Path, tables: Mapping[str, Path]) -> str:
    queries = [stem for stem in tables if stem.startswith("queries-")]
    if "pages" in tables and queries:
        return "embedding"
    if any(split in tables for split in _SPLITS):
        return "classification"
    if "texts" in tables and "pages" not in tables and not queries:
        return "embedding"
    found = f"has only {', '.join(sorted(tables))}" if tables else "has no table that is known"
    raise InputError(f"{folder} {found}; a data directory holds {LAYOUT}")


def _search_needs(folder: Path, tables: Mapping[str, Path], require: Collection[str] | None) -> list[str]:
    queries = "queries-valid" in tables or "queries-test" in tables
    if require is None and "pages" in tables and not queries:
        raise InputError(f"{folder} has pages but neither queries-valid nor queries-test: add one, or keep texts alone")
    if require is None:
        return ["pages"] if queries else ["texts"]
    return [*require, "pages"] if queries and "pages" not in require else list(require)


def _need(folder: Path, tables: Mapping[str, Path], splits: Collection[str], queries: Collection[str] = ()) -> None:
    unknown = set(splits) - {*_SPLITS, "texts", "pages"}
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not splits")
    stems = [f"queries-{split}" if split in queries else split for split in splits]
    missing = [stem for stem in stems if stem not in tables]
    if missing:
        looked = "; ".join(", ".join(file_names(stem)) for stem in missing)
        raise InputError(f"{folder} lacks {' and '.join(missing)}: looked for {looked}")


def _labelled(tables: Mapping[str, Path]) -> LabelledData:
    raw = {split: numbered_rows(tables[split], ("text", "label"), ("group",)) for split in _SPLITS if split in tables}
    for split in ("valid", "test"):
        if split in raw and "train" in raw:
            _check_labels(tables[split], raw[split], {row["label"] for _, row in raw["train"]})
    rows = {
        split: tuple(
            LabelledRow(row["text"], row["label"], row.get("group", str(number))) for number, row in raw.get(split, [])
        )
        for split in _SPLITS
    }
    return LabelledData(rows["train"], rows["valid"], rows["test"], _plain_texts(tables))


def _check_labels(path: Path, rows: Sequence[tuple[int, Row]], known: Collection[str]) -> None:
    first = {row["label"]: number for number, row in reversed(rows) if row["label"] not in known}
    if first:
        places = sorted((number, label) for label, number in first.items())
        unseen = some([f"label {shown(label)} ({path}, row {number})" for number, label in places], ", ")
        verb = "does" if len(first) == 1 else "do"
        raise InputError(f"{unseen} {verb} not occur in train: {shorten(', '.join(sorted(known)))}")


def _search(tables: Mapping[str, Path]) -> SearchData:
    pages: dict[str, Page] = {}
    if path := tables.get("pages"):
        problems = Problems(path)
        seen: dict[str, int] = {}
        for number, row in numbered_rows(path, ("id", "text"), ("title",)):
            if (first := seen.setdefault(row["id"], number)) != number:
                problems.add(number, f"the id {shown(row['id'])} is that of row {first}")
            pages[row["id"]] = Page(row["id"], row.get("title", ""), row["text"])
        problems.check()
    valid, test = (_queries(tables.get(f"queries-{split}"), pages) for split in ("valid", "test"))
    return SearchData(tuple(pages.values()), valid, test, _plain_texts(tables))


def _queries(path: Path | None, pages: Mapping[str, Page]) -> tuple[Query, ...]:
    if path is None:
        return ()
    problems = Problems(path)
    queries = []
    for number, row in numbered_rows(path, ("query", "pages"), ("group",)):
        wanted = tuple(dict.fromkeys(row["pages"]))
        for page in wanted:
            if page not in pages:
                problems.add(number, f"the page id {shown(page)} is not in pages")
        queries.append(Query(row["query"], wanted, row.get("group", wanted[0])))
    problems.check()
    return tuple(queries)


def _plain_texts(tables: Mapping[str, Path]) -> tuple[str, ...]:
    path = tables.get("texts")
    return tuple(row["text"] for _, row in numbered_rows(path, ("text",))) if path else ()


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _fingerprint(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
