"""Parallel files, and every way in which two files are not parallel."""

import gzip
from pathlib import Path

import pytest

from slimformer.transformer.errors import InputError
from slimformer.transformer.parallel import read_parallel
from slimformer.transformer.splits import Pair


def put(folder: Path, source: str, target: str) -> tuple[Path, Path]:
    paths = folder / "train.de", folder / "train.en"
    for path, text in zip(paths, (source, target), strict=True):
        path.write_bytes(text.encode())
    return paths


def refusal(source: Path, target: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_parallel(source, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_lines_are_paired_by_number(tmp_path: Path) -> None:
    paths = put(tmp_path, "ein Haus\nGrüße \u2028 an\u0085alle\n\tdrei ", "a house\r\nregards\r\nthree\r\n")
    expected = (
        Pair("ein Haus", "a house", "1"),
        Pair("Grüße \u2028 an\u0085alle", "regards", "2"),
        Pair("\tdrei ", "three", "3"),
    )
    assert read_parallel(*paths) == expected
    assert read_parallel(str(paths[0]), str(paths[1])) == expected


def test_gzipped_files(tmp_path: Path) -> None:
    source, target = put(tmp_path, "ein\nzwei\n", "one\ntwo\n")
    packed = tmp_path / "train.de.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert read_parallel(packed, target) == (Pair("ein", "one", "1"), Pair("zwei", "two", "2"))


def test_unequal_numbers_of_lines(tmp_path: Path) -> None:
    source, target = put(tmp_path, "ein\nzwei\ndrei\nvier\n", "one\ntwo\n")
    counts = f"{source} has 4 lines and {target} has 2"
    assert refusal(source, target) == f"{counts}: row 3 of {source}, 'drei', has no partner"
    counts = f"{target} has 2 lines and {source} has 4"
    assert refusal(target, source) == f"{counts}: row 3 of {source}, 'drei', has no partner"


def test_a_line_without_partner_is_cut_short(tmp_path: Path) -> None:
    message = refusal(*put(tmp_path, "ein\n", "one\n" + "word " * 1000))
    assert "row 2 of" in message
    assert "'word word" in message
    assert len(message) < 200 + 3 * len(str(tmp_path))


def test_empty_lines_of_both_files_are_named(tmp_path: Path) -> None:
    source, target = put(tmp_path, "ein\n\ndrei\n \t\n", "\r\ntwo\nthree\nfour")
    places = f"{target}, row 1; {source}, row 2; {source}, row 4"
    assert refusal(source, target) == f"{places} are empty: fill the line or remove it from both files"
    source, target = put(tmp_path, "ein\nzwei", "one\n\n")
    assert refusal(source, target) == f"{target}, row 2 is empty: fill the line or remove it from both files"


def test_five_empty_lines_are_named(tmp_path: Path) -> None:
    message = refusal(*put(tmp_path, "\n" * 7, "word\n" * 7))
    assert "row 5; and 2 more are empty" in message
    assert "row 6" not in message


def test_files_without_lines_or_that_are_no_text(tmp_path: Path) -> None:
    source, target = put(tmp_path, "", "one\n")
    assert refusal(source, target) == f"{source} has no lines: it is empty"
    source.write_bytes("ein\nGrüße\n".encode("latin-1"))
    assert "train.de: the byte 0xfc on line 2 is not UTF-8" in refusal(source, target)
    assert "none.de cannot be read: No such file" in refusal(tmp_path / "none.de", target)
