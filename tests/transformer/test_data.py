"""Tables in every form, and every way in which they can be wrong."""

import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slimformer.transformer.data import (
    LabelledData,
    LabelledRow,
    Page,
    Pair,
    PairData,
    Query,
    SearchData,
    TextData,
    TextRow,
    find_table,
    load_data,
    load_pairs,
    load_texts,
    read_rows,
    task_of,
)
from slimformer.transformer.errors import InputError

Rows = list[dict[str, Any]]

PAGES = [{"id": "a", "title": "A", "text": "first page"}, {"id": "b", "text": 'second, "page"\nwith two lines'}]
VALID = [{"query": "first", "pages": ["a"]}]
TEST = [{"query": "both", "pages": ["b", "a"]}, {"query": "grüße 中", "pages": ["b"], "group": "g"}]
TEXTS = [{"text": "some text"}, {"text": "more\u2028text"}]
PAIRS = [{"source": "ein Haus", "target": "a house"}, {"source": "Grüße", "target": "regards", "group": "doc"}]
SUMMARIES = [{"text": "a long story", "summary": "story"}, {"text": "Grüße", "summary": "regards", "group": "doc"}]
PLAIN = [{"text": "first story"}, {"text": "second story", "group": "author"}]
LABELLED = [{"text": "one", "label": "x"}, {"text": "two", "label": "y", "group": "doc"}]


def jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def separated(delimiter: str) -> Callable[[Path, Rows], None]:
    def write(path: Path, rows: Rows) -> None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, names, delimiter=delimiter)
            table.writeheader()
            for row in rows:
                table.writerow({key: "|".join(value) if key == "pages" else value for key, value in row.items()})

    return write


def parquet(path: Path, rows: Rows) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)


def zipped(write: Callable[[Path, Rows], None]) -> Callable[[Path, Rows], None]:
    def write_zipped(path: Path, rows: Rows) -> None:
        plain = path.with_suffix("")
        write(plain, rows)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()

    return write_zipped


FORMATS = {
    ".jsonl": jsonl,
    ".csv": separated(","),
    ".tsv": separated("\t"),
    ".parquet": parquet,
    ".jsonl.gz": zipped(jsonl),
    ".csv.gz": zipped(separated(",")),
    ".tsv.gz": zipped(separated("\t")),
}


def put(folder: Path, **tables: Rows) -> Path:
    for stem, rows in tables.items():
        jsonl(folder / f"{stem.replace('_', '-')}.jsonl", rows)
    return folder


def refusal(folder: Path, *arguments: Any, load: Callable[..., object] = load_data, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(folder, *arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", FORMATS)
def test_search_data_in_every_format(suffix: str, tmp_path: Path) -> None:
    tables = {"pages": PAGES, "queries-valid": VALID, "queries-test": TEST, "texts": TEXTS}
    for stem, rows in tables.items():
        FORMATS[suffix](tmp_path / f"{stem}{suffix}", rows)
    assert load_data(tmp_path) == SearchData(
        pages=(Page("a", "A", "first page"), Page("b", "", 'second, "page"\nwith two lines')),
        valid=(Query("first", ("a",), "a"),),
        test=(Query("both", ("b", "a"), "b"), Query("grüße 中", ("b",), "g")),
        texts=("some text", "more\u2028text"),
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_labelled_data_in_every_format(suffix: str, tmp_path: Path) -> None:
    for stem in ("train", "valid", "test"):
        FORMATS[suffix](tmp_path / f"{stem}{suffix}", LABELLED)
    rows = (LabelledRow("one", "x", "1"), LabelledRow("two", "y", "doc"))
    data = load_data(tmp_path)
    assert data == LabelledData(rows, rows, rows, ())
    assert isinstance(data, LabelledData)
    assert data.labels == ("x", "y")


def test_numbers_as_labels_ids_and_groups_become_text(tmp_path: Path) -> None:
    parquet(tmp_path / "test.parquet", [{"text": "one", "label": 1, "group": 7}])
    data = load_data(tmp_path, require=("test",))
    assert isinstance(data, LabelledData)
    assert data.test == (LabelledRow("one", "1", "7"),)
    assert data.labels == ("1",)
    assert (data.train, data.valid) == ((), ())


def test_rows_are_numbered_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('\ufeff{"text": "one", "label": "x"}\r\n\r\n{"text": "two", "label": "x"}', encoding="utf-8")
    data = load_data(tmp_path, require=())
    assert isinstance(data, LabelledData)
    assert [row.group for row in data.train] == ["1", "3"]


def test_a_page_named_twice_by_a_query_counts_once(tmp_path: Path) -> None:
    data = load_data(put(tmp_path, pages=PAGES, queries_test=[{"query": "q", "pages": ["b", "b"]}]))
    assert isinstance(data, SearchData)
    assert data.test[0].pages == ("b",)
    assert data.valid == ()


def test_long_csv_cells_are_read_and_the_global_limit_is_kept(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    separated(",")(tmp_path / "texts.csv", [{"text": "word " * 40_000}])
    data = load_data(tmp_path)
    assert len(data.texts[0]) == 200_000
    assert csv.field_size_limit() == limit


def test_task_follows_from_the_tables(tmp_path: Path) -> None:
    texts = load_data(put(tmp_path, texts=TEXTS))
    assert texts == SearchData((), (), (), ("some text", "more\u2028text"))
    assert isinstance(load_data(put(tmp_path, train=LABELLED, valid=LABELLED, test=LABELLED)), LabelledData)
    assert isinstance(load_data(put(tmp_path, pages=PAGES, queries_test=TEST)), SearchData)
    assert isinstance(load_data(tmp_path, "classification"), LabelledData)


def test_directory_without_known_tables_says_what_belongs_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    message = refusal(tmp_path)
    assert "no table that is known" in message
    assert "train, valid and test with the fields text and label" in message
    assert "has only queries-test" in refusal(put(tmp_path, queries_test=TEST))


def test_missing_directory_and_unknown_task(tmp_path: Path) -> None:
    assert "nowhere does not exist" in refusal(tmp_path / "nowhere")
    choices = "embedding, classification, translation, summarization, language"
    assert f"'sorting' does not exist: choose from {choices}" in refusal(tmp_path, "sorting")


def test_missing_splits_are_named_with_what_was_looked_for(tmp_path: Path) -> None:
    put(tmp_path, train=LABELLED)
    message = refusal(tmp_path)
    assert "lacks valid and test" in message
    assert "valid.jsonl, valid.csv, valid.tsv, valid.parquet, valid.jsonl.gz, valid.csv.gz, valid.tsv.gz" in message
    assert "lacks texts" in refusal(tmp_path, require=("train", "texts"))
    assert load_data(tmp_path, require=("train",)).texts == ()


def test_missing_search_splits(tmp_path: Path) -> None:
    put(tmp_path, pages=PAGES)
    assert "neither queries-valid nor queries-test" in refusal(tmp_path, "embedding")
    assert "lacks queries-test" in refusal(tmp_path, "embedding", require=("test",))
    (tmp_path / "pages.jsonl").unlink()
    put(tmp_path, queries_test=TEST)
    assert "lacks pages" in refusal(tmp_path, "embedding")
    assert "lacks pages" in refusal(tmp_path, "embedding", require=("test",))
    (tmp_path / "queries-test.jsonl").unlink()
    assert "lacks texts" in refusal(tmp_path, "embedding")
    with pytest.raises(ValueError, match="'tests'"):
        load_data(tmp_path, "embedding", require=("tests",))


def test_two_files_for_one_stem(tmp_path: Path) -> None:
    separated(",")(put(tmp_path, texts=TEXTS) / "texts.csv", TEXTS)
    assert "holds texts.jsonl and texts.csv: keep one" in refusal(tmp_path)


def test_find_table(tmp_path: Path) -> None:
    assert find_table(tmp_path, "texts") is None
    (tmp_path / "texts.tsv.gz").touch()
    assert find_table(tmp_path, "texts") == tmp_path / "texts.tsv.gz"
    (tmp_path / "train.parquet.gz").touch()
    with pytest.raises(InputError, match=r"unpack the file to train\.parquet"):
        find_table(tmp_path, "train")


@pytest.mark.parametrize("suffix", FORMATS)
def test_missing_field_and_empty_text_name_file_and_row(suffix: str, tmp_path: Path) -> None:
    rows = [{"text": "fine", "label": "x"}, {"text": " ", "label": "x"}, {"text": "fine", "label": None}]
    FORMATS[suffix](tmp_path / f"train{suffix}", rows)
    message = refusal(tmp_path, require=())
    assert message.startswith(
        f"{tmp_path / f'train{suffix}'}, row 2: the field 'text' is empty; row 3: the field 'label'"
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_missing_column(suffix: str, tmp_path: Path) -> None:
    FORMATS[suffix](tmp_path / f"texts{suffix}", [{"body": "one"}])
    assert "row 1: the field 'text' is missing" in refusal(tmp_path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".jsonl.gz"])
def test_table_without_rows(suffix: str, tmp_path: Path) -> None:
    FORMATS[suffix](tmp_path / f"texts{suffix}", [])
    assert f"texts{suffix} has no rows" in refusal(tmp_path)


def test_parquet_and_header_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "texts.parquet")
    assert "texts.parquet has no rows" in refusal(tmp_path)
    (tmp_path / "texts.parquet").unlink()
    (tmp_path / "texts.csv").write_text("text\n")
    assert "texts.csv has no rows" in refusal(tmp_path)


def test_problems_of_a_file_are_collected_up_to_five(tmp_path: Path) -> None:
    lines = ['{"text": "fine"}', "{", "[1]", '{"text": 3}', '{"text": ""}', '{"text": "\\ud800"}', "{}", "nonsense"]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    message = refusal(tmp_path)
    parts = message.split("; ")
    assert parts[0].startswith(f"{tmp_path / 'texts.jsonl'}, row 2: not JSON")
    assert [part.split(":")[0] for part in parts[1:5]] == ["row 3", "row 4", "row 5", "row 6"]
    assert parts[5:] == ["and 2 more"]
    assert "should be text, not 3" in message
    assert "half a surrogate pair" in message


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"query": "q", "pages": "a"}], "row 1: the field 'pages' should be a list of page ids, not 'a'"),
        ([{"query": "q", "pages": []}], "row 1: the field 'pages' is an empty list"),
        ([{"query": "q", "pages": ["a", 1.5]}], "row 1: the field 'pages' should be text or a whole number, not 1.5"),
        ([{"query": "q", "pages": ["a"], "group": True}], "row 1: the field 'group' should be text or a whole number"),
        ([{"query": "q", "pages": ["a"]}, {"query": "r", "pages": ["z"]}], "row 2: the page id 'z' is not in pages"),
    ],
)
def test_wrong_queries(rows: Rows, expected: str, tmp_path: Path) -> None:
    assert f"queries-test.jsonl, {expected}" in refusal(put(tmp_path, pages=PAGES, queries_test=rows))


def test_page_ids_that_occur_twice(tmp_path: Path) -> None:
    put(tmp_path, pages=[*PAGES, {"id": "a", "text": "again"}], queries_test=TEST)
    assert "pages.jsonl, row 3: the id 'a' is that of row 1" in refusal(tmp_path)


def test_labels_that_train_lacks(tmp_path: Path) -> None:
    other = [*LABELLED, {"text": "three", "label": "z"}, {"text": "four", "label": "z"}]
    put(tmp_path, train=LABELLED, valid=LABELLED, test=other)
    assert refusal(tmp_path) == f"label 'z' ({tmp_path / 'test.jsonl'}, row 3) does not occur in train: x, y"
    put(tmp_path, valid=[{"text": "one", "label": "b"}, {"text": "two", "label": "a"}])
    path = tmp_path / "valid.jsonl"
    assert refusal(tmp_path) == f"label 'b' ({path}, row 1), label 'a' ({path}, row 2) do not occur in train: x, y"


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_bytes("text\nfine\ngrüße\n".encode("latin-1"))
    assert "texts.csv: the byte 0xfc on line 3 is not UTF-8" in refusal(tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"plain text", lambda data: data[:20]])
def test_damaged_gzip(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    zipped(jsonl)(tmp_path / "texts.jsonl.gz", TEXTS)
    path = tmp_path / "texts.jsonl.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert "texts.jsonl.gz is not a whole gzip file" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1 is how it starts", b"text\none\n"])
def test_damaged_parquet(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "texts.parquet").write_bytes(content)
    assert "texts.parquet cannot be read as Parquet" in refusal(tmp_path)


def test_truncated_parquet(tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    parquet(path, TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    assert "texts.parquet cannot be read as Parquet" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text,label\none,x\ntwo\n", "row 2: 1 cells where the header has 2"),
        ('text,label\none,x\n"two"tail,x\n', "row 2: ',' expected after '\"'"),
        ('text,label\none,x\n"two,x\n', "row 2: unexpected end of data"),
        ("text,text\none,x\n", "the header names a column twice: text, text"),
    ],
)
def test_malformed_csv(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(content)
    assert expected in refusal(tmp_path, require=())


def test_read_rows_keeps_the_named_fields_alone(tmp_path: Path) -> None:
    jsonl(tmp_path / "any.jsonl", [{"text": " one ", "label": "x", "more": 1, "title": ""}])
    assert read_rows(tmp_path / "any.jsonl", ["text"], ["title", "group"]) == [{"text": " one "}]
    with pytest.raises(InputError, match="no table that can be read"):
        read_rows(tmp_path / "any.json", ["text"])
    with pytest.raises(InputError, match=r"none\.csv cannot be read: No such file"):
        read_rows(tmp_path / "none.csv", ["text"])


@pytest.mark.parametrize("suffix", FORMATS)
def test_pairs_in_every_format(suffix: str, tmp_path: Path) -> None:
    for stem in ("train", "valid", "test"):
        FORMATS[suffix](tmp_path / f"{stem}{suffix}", PAIRS)
    FORMATS[suffix](tmp_path / f"texts{suffix}", TEXTS)
    rows = (Pair("ein Haus", "a house", "1"), Pair("Grüße", "regards", "doc"))
    assert load_data(tmp_path) == PairData(rows, rows, rows, ("some text", "more\u2028text"))
    assert load_pairs(tmp_path) == load_data(tmp_path, "translation") == load_data(tmp_path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_summaries_in_every_format(suffix: str, tmp_path: Path) -> None:
    for stem in ("train", "valid", "test"):
        FORMATS[suffix](tmp_path / f"{stem}{suffix}", SUMMARIES)
    FORMATS[suffix](tmp_path / f"texts{suffix}", TEXTS)
    rows = (Pair("a long story", "story", "1"), Pair("Grüße", "regards", "doc"))
    expected = PairData(rows, rows, rows, ("some text", "more\u2028text"), "summarization")
    assert load_data(tmp_path) == load_data(tmp_path, "summarization") == load_pairs(tmp_path) == expected
    assert expected != replace(expected, task="translation")


def test_columns_of_the_other_task_are_refused_with_their_row(tmp_path: Path) -> None:
    put(tmp_path, train=SUMMARIES, valid=SUMMARIES, test=[SUMMARIES[0], PAIRS[0]])
    wrong = f"{tmp_path / 'test.jsonl'}, row 2: the field 'text' is missing (fields there: source, target)"
    assert refusal(tmp_path).startswith(wrong)
    put(tmp_path, test=[{"text": "a", "summary": " "}, {"article": "a", "summary": "b"}])
    assert "test.jsonl, row 1: the field 'summary' is empty; row 2: the field 'text' is missing" in refusal(tmp_path)
    missing = "row 1: the field 'source' is missing (fields there: text, summary)"
    assert missing in refusal(tmp_path, "translation")
    put(tmp_path, train=PAIRS, valid=PAIRS, test=PAIRS)
    missing = "row 1: the field 'text' is missing (fields there: source, target)"
    assert missing in refusal(tmp_path, "summarization")


def test_splits_keep_their_names(tmp_path: Path) -> None:
    pairs = load_pairs(put(tmp_path, train=PAIRS, valid=PAIRS[:1], test=PAIRS[1:]))
    assert [len(rows) for rows in (pairs.train, pairs.valid, pairs.test)] == [2, 1, 1]
    assert (pairs.valid[0].target, pairs.test[0].target) == ("a house", "regards")
    texts = load_texts(put(tmp_path, train=PLAIN, valid=PLAIN[:1], test=PLAIN[1:], texts=TEXTS))
    assert [len(rows) for rows in (texts.train, texts.valid, texts.test)] == [2, 1, 1]
    assert (texts.valid[0].text, texts.test[0].text) == ("first story", "second story")
    assert texts.texts == ("some text", "more\u2028text")


@pytest.mark.parametrize("suffix", FORMATS)
def test_texts_of_a_language_model_in_every_format(suffix: str, tmp_path: Path) -> None:
    for stem in ("train", "valid", "test"):
        FORMATS[suffix](tmp_path / f"{stem}{suffix}", PLAIN)
    rows = (TextRow("first story", "1"), TextRow("second story", "author"))
    assert load_data(tmp_path) == TextData(rows, rows, rows, ())
    assert load_texts(tmp_path) == load_data(tmp_path, "language") == load_data(tmp_path)


def test_any_data_are_loaded_by_what_is_there(tmp_path: Path) -> None:
    assert isinstance(load_data(put(tmp_path, texts=TEXTS)), SearchData)
    assert isinstance(load_data(put(tmp_path, train=LABELLED, valid=LABELLED, test=LABELLED)), LabelledData)
    assert load_data(tmp_path, "embedding") == SearchData((), (), (), ("some text", "more\u2028text"))


@pytest.mark.parametrize(
    ("tables", "task"),
    [
        ({"train": PAIRS}, "translation"),
        ({"train": [PAIRS[0] | {"text": "of the pair"}]}, "translation"),
        ({"train": [PAIRS[0] | {"label": "good"}]}, "translation"),
        ({"train": [{"source": "ein Haus"}]}, "translation"),  # so that what is said to be missing is the target
        ({"test": [{"target": "a house"}]}, "translation"),
        ({"train": SUMMARIES}, "summarization"),
        ({"test": [{"text": "a story"}, {"text": "b", "summary": "c"}]}, "summarization"),
        ({"train": [{"article": "a story", "summary": "b"}]}, "summarization"),  # so that the text is what is missing
        ({"train": [SUMMARIES[0] | {"label": "x"}]}, "classification"),
        ({"train": [SUMMARIES[0] | PAIRS[0]]}, "translation"),
        ({"train": PLAIN}, "language"),
        ({"test": PLAIN, "texts": TEXTS}, "language"),
        ({"train": LABELLED}, "classification"),
        ({"train": [LABELLED[0] | {"source": "a web site"}]}, "classification"),
        ({"train": [LABELLED[0] | PAIRS[0]]}, "classification"),
        ({"train": [{"text": "one"}, {"text": "two", "label": "x"}]}, "classification"),
        ({"train": LABELLED, "test": PLAIN}, "classification"),
        ({"train": [{"body": "one"}]}, "classification"),
        ({"pages": PAGES, "queries_test": TEST, "train": PAIRS}, "embedding"),
        ({"texts": TEXTS}, "embedding"),
    ],
)
def test_fields_say_the_task(tables: dict[str, Rows], task: str, tmp_path: Path) -> None:
    assert task_of(put(tmp_path, **tables)) == task


@pytest.mark.parametrize("suffix", FORMATS)
def test_texts_with_other_fields_leave_the_task_open(suffix: str, tmp_path: Path) -> None:
    FORMATS[suffix](tmp_path / f"train{suffix}", [{"text": "one", "class": "x"}])
    place = tmp_path / f"train{suffix}"
    expected = f"{place} has text but no label, and {place} has class: say the task (language), or call"
    assert refusal(tmp_path).startswith(expected)
    data = load_data(tmp_path, "language", require=("train",))
    assert data == TextData((TextRow("one", "1"),), (), (), ())


def test_a_split_with_labels_beside_one_without_leaves_the_task_open(tmp_path: Path) -> None:
    put(tmp_path, train=PLAIN, valid=PLAIN, test=LABELLED)
    assert "train.jsonl has text but no label, and" in refusal(tmp_path, load=task_of)
    assert "test.jsonl has label: say the task (language)" in refusal(tmp_path, load=task_of)


@pytest.mark.parametrize("suffix", FORMATS)
def test_empty_and_missing_sides_of_pairs_name_file_and_row(suffix: str, tmp_path: Path) -> None:
    rows = [PAIRS[0], {"source": " ", "target": "a"}, {"source": "ein", "target": ""}, {"source": "b", "target": None}]
    FORMATS[suffix](tmp_path / f"test{suffix}", rows)
    message = refusal(tmp_path, load=load_pairs, require=("test",))
    problems = "row 2: the field 'source' is empty; row 3: the field 'target' is empty; row 4: the field 'target' is"
    assert message.startswith(f"{tmp_path / f'test{suffix}'}, {problems}")
    FORMATS[suffix](tmp_path / f"test{suffix}", [{"source": "ein"}])
    missing = "row 1: the field 'target' is missing (fields there: source)"
    assert missing in refusal(tmp_path, load=load_pairs, require=("test",))


def test_missing_splits_of_pairs_and_texts(tmp_path: Path) -> None:
    assert "lacks valid and test" in refusal(put(tmp_path, train=PAIRS), load=load_pairs)
    assert load_pairs(tmp_path, require=()).valid == ()
    assert "lacks valid and test" in refusal(put(tmp_path, train=PLAIN), load=load_texts)
    assert load_texts(tmp_path, require=("train",)).test == ()
    assert "row 1: the field 'source' is missing" in refusal(tmp_path, load=load_pairs, require=())
    assert "nowhere does not exist" in refusal(tmp_path / "nowhere", load=task_of)
