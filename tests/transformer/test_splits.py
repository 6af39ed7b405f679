"""Proof of which texts were used, and how many two splits share."""

import hashlib

from slimformer.transformer.splits import (
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


def sha256(*texts: str) -> str:
    """Of each text its length in 8 bytes, then its UTF-8."""
    lengths = [len(text.encode()).to_bytes(8, "little") for text in texts]
    return hashlib.sha256(b"".join(a + b.encode() for a, b in zip(lengths, texts, strict=True))).hexdigest()


def test_fingerprints_tell_texts_and_their_order_apart() -> None:
    def of(*texts: str) -> dict[str, str]:
        return SearchData((), (), (), texts).fingerprints()

    assert of("one", "ü") == {"texts": sha256("one", "ü")}
    assert len({of(*texts)["texts"] for texts in (("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc",))}) == 4


def test_fingerprints_of_search_data_hold_titles_and_queries() -> None:
    query = Query("how", ("a",), "a")
    data = SearchData((Page("a", "Title", "text"),), (query,), (query, query), ("more",))
    assert data.fingerprints() == {
        "pages": sha256("Title\ntext"),
        "texts": sha256("more"),
        "valid": sha256("how"),
        "test": sha256("how", "how"),
    }


def test_fingerprints_of_pairs_hold_both_sides() -> None:
    rows = (Pair("ein Haus", "a house", "1"), Pair("zwei", "two", "2"))
    data = PairData(rows, rows[:1], (), ("noch ein Text",))
    assert data.fingerprints() == {
        "texts": sha256("noch ein Text"),
        "train": sha256("ein Haus", "a house", "zwei", "two"),
        "valid": sha256("ein Haus", "a house"),
    }


def test_fingerprints_of_texts() -> None:
    data = TextData((TextRow("one", "1"),), (), (TextRow("two", "1"), TextRow("one", "2")), ())
    assert data.fingerprints() == {"train": sha256("one"), "test": sha256("two", "one")}


def test_overlaps_count_texts_without_case_and_space() -> None:
    queries = tuple(Query(text, ("a",), "a") for text in ("Freeze  Row", "freeze row", "print"))
    data = SearchData((Page("a", "print", "print"),), queries, queries[:1], ("freeze\nrow", "other", "STRASSE"))
    assert data.overlaps() == {"texts~valid": 1, "texts~test": 1, "valid~test": 1}
    rows = tuple(LabelledRow(text, "x", "1") for text in ("One", "two", "three"))
    labelled = LabelledData(rows, rows[:2], (LabelledRow(" tWO", "x", "1"),), ())
    assert labelled.overlaps() == {"train~valid": 2, "train~test": 1, "valid~test": 1}


def test_overlaps_of_pairs_are_those_of_their_sources() -> None:
    train = (Pair("ein  Haus", "a house", "1"), Pair("zwei", "two", "2"), Pair("drei", "three", "3"))
    test = (Pair("Ein Haus", "one house", "1"), Pair("vier", "two", "2"))
    data = PairData(train, train[1:], test, ("VIER",))
    expected = {"texts~valid": 0, "texts~test": 1, "train~valid": 2, "train~test": 1, "valid~test": 0}
    assert data.overlaps() == expected


def test_overlaps_of_texts() -> None:
    rows = tuple(TextRow(text, "1") for text in ("One", "two", "three"))
    data = TextData(rows, rows[:2], (TextRow(" tWO", "1"),), ())
    assert data.overlaps() == {"train~valid": 2, "train~test": 1, "valid~test": 1}
