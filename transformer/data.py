"""Tables of texts, labels, pairs, pages and queries from a DATA directory, checked before anything is trained.

A table is `STEM.{jsonl,csv,tsv,parquet}`, the first three also with `.gz`; text is UTF-8. Stems and their fields (in
brackets: may be missing):

    train, valid, test             text, label, [group]        classification
    train, valid, test             source, target, [group]     translation
    train, valid, test             text, summary, [group]      summarization
    train, valid, test             text, [group]               language modelling
    texts                          text
    pages                          id, text, [title]
    queries-valid, queries-test    query, pages, [group]

`pages` of a query is a list of page ids, in CSV and TSV separated by `|`. Rows count from 1: the line in JSONL, the
record after the header in CSV and TSV. `group` names what is resampled together in intervals (a document, an author).
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .errors import InputError
from .splits import (
    SUMMARIZATION,
    TRANSLATION,
    LabelledData,
    LabelledRow,
    Page,
    Pair,
    PairData,
    Query,
    SearchData,
    TextData,
    TextRow,
)
from .tables import Problems, Row, field_names, file_names, find_table, numbered_rows, read_rows, shorten, shown, some

__all__ = [
    "LAYOUT",
    "PAIR_FIELDS",
    "TASKS",
    "Data",
    "LabelledData",
    "LabelledRow",
    "Page",
    "Pair",
    "PairData",
    "Query",
    "SearchData",
    "TextData",
    "TextRow",
    "find_table",
    "load_data",
    "load_pairs",
    "load_texts",
    "read_rows",
    "task_of",
]

Data = SearchData | LabelledData | PairData | TextData

TASKS = ("embedding", "classification", TRANSLATION, SUMMARIZATION, "language")
PAIR_FIELDS = {TRANSLATION: ("source", "target"), SUMMARIZATION: ("text", "summary")}
LAYOUT = (
    "train, valid and test with the fields text and label, or source and target, or text and summary, or text alone; "
    "or pages (id, text), queries-valid and queries-test (query, pages) and texts (text); or texts alone; "
    "each as .jsonl, .csv, .tsv (also .gz) or .parquet"
)

_SPLITS = ("train", "valid", "test")


def load_data(directory: str | Path, task: str | None = None, require: Collection[str] | None = None) -> Data:
    """Read and check the tables of a directory, whatever they are for.

    task: one of `TASKS`, or None for what `task_of` says.
    require: the splits that must be there (of train, valid, test, texts, pages); by default train, valid and test are
    needed, for embedding pages with queries of either split, or texts; queries always need pages. What is there is read
    whether required or not. Raises InputError for a missing directory or split and for anything wrong in a table,
    naming file and row, up to five problems of a file.
    """
    if task is not None and task not in TASKS:
        raise InputError(f"the task {task!r} does not exist: choose from {', '.join(TASKS)}")
    folder = Path(directory)
    tables = _tables(folder)
    found = _infer(folder, tables) if task is None else task
    if found == "embedding":
        _need(folder, tables, _search_needs(folder, tables, require), {"valid", "test"})
        return _search(tables)
    _need(folder, tables, _SPLITS if require is None else require)
    if found in PAIR_FIELDS:
        return _pairs(tables, found)
    return _language(tables) if found == "language" else _labelled(tables)


def load_pairs(directory: str | Path, require: Collection[str] | None = None) -> PairData:
    """Read and check the tables of sources and targets, or of texts and summaries.

    Arguments and errors are those of `load_data`; the task is what the tables say, and translation where that is none
    with pairs.
    """
    found = task_of(directory)
    data = load_data(directory, found if found in PAIR_FIELDS else TRANSLATION, require)
    assert isinstance(data, PairData)
    return data


def load_texts(directory: str | Path, require: Collection[str] | None = None) -> TextData:
    """Read and check the tables of texts for a language model. Arguments and errors are those of `load_data`."""
    data = load_data(directory, "language", require)
    assert isinstance(data, TextData)
    return data


def task_of(directory: str | Path) -> str:
    """The one of `TASKS` that a directory's tables are for.

    Pages with queries, or texts alone, are for embedding. Otherwise the first of train, valid and test decides: text
    with label is for classification, source with target for translation, text with summary for summarization, and text
    without these for language, if none of the three has a field beside text and group, which could be a label by
    another name. Raises InputError where such a field leaves the task open, and for a directory that is missing or has
    no known table.
    """
    folder = Path(directory)
    return _infer(folder, _tables(folder))


def _tables(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"the data directory {folder} does not exist; it should hold {LAYOUT}")
    stems = (*_SPLITS, "texts", "pages", "queries-valid", "queries-test")
    return {stem: path for stem in stems if (path := find_table(folder, stem))}


def _infer(folder: Path, tables: Mapping[str, Path]) -> str:
    queries = [stem for stem in tables if stem.startswith("queries-")]
    if "pages" in tables and queries:
        return "embedding"
    splits = [tables[split] for split in _SPLITS if split in tables]
    if splits:
        return _split_task(splits)
    if "texts" in tables and "pages" not in tables and not queries:
        return "embedding"
    found = f"has only {', '.join(sorted(tables))}" if tables else "has no table that is known"
    raise InputError(f"{folder} {found}; a data directory holds {LAYOUT}")


def _split_task(paths: Sequence[Path]) -> str:
    """The task of tables of train, valid and test, by their fields."""
    fields = field_names(paths[0])
    if "label" in fields and "text" in fields:
        return "classification"
    if {"source", "target"} <= fields or ("text" not in fields and fields & {"source", "target"}):
        return TRANSLATION
    if "summary" in fields:
        return SUMMARIZATION
    if "text" not in fields:
        return "classification"
    for path in paths:
        if others := sorted(field_names(path) - {"text", "group"}):
            unlabelled = f"{paths[0]} has text but no label, and {path} has {shorten(', '.join(others))}"
            raise InputError(
                f"{unlabelled}: say the task (language), or call the field of the classes label, of summaries summary"
            )
    return "language"


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


def _pairs(tables: Mapping[str, Path], task: str) -> PairData:
    source, target = PAIR_FIELDS[task]

    def read(split: str) -> tuple[Pair, ...]:
        rows = numbered_rows(tables[split], (source, target), ("group",)) if split in tables else []
        return tuple(Pair(row[source], row[target], row.get("group", str(number))) for number, row in rows)

    return PairData(read("train"), read("valid"), read("test"), _plain_texts(tables), task)


def _language(tables: Mapping[str, Path]) -> TextData:
    def read(split: str) -> tuple[TextRow, ...]:
        rows = numbered_rows(tables[split], ("text",), ("group",)) if split in tables else []
        return tuple(TextRow(row["text"], row.get("group", str(number))) for number, row in rows)

    return TextData(read("train"), read("valid"), read("test"), _plain_texts(tables))


def _plain_texts(tables: Mapping[str, Path]) -> tuple[str, ...]:
    path = tables.get("texts")
    return tuple(row["text"] for _, row in numbered_rows(path, ("text",))) if path else ()
