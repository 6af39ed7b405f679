"""The cache of measured forms: what it is keyed by, and that no state of its file ever stops the work."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import LABELS, tiny_config

from slimformer.export import time_store
from slimformer.export.time_store import FORMS_FILE, TimeStore, machine_store
from slimformer.transformer.config import ClassificationHead

CONTENT = {"forms": {"norm": "skip"}, "whole": True}


def store(*files: Path, **changes: Any) -> TimeStore:
    given: dict[str, Any] = {
        "threads": 2,
        "provider": "cpu",
        "config": tiny_config(),
        "workloads": ("a",),
        "seconds": 3,
    }
    return TimeStore(files, **{**given, **changes})


def parse(data: Any) -> Any:
    return data["forms"]["norm"]


def test_what_is_written_is_read_again_and_other_entries_stay(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "forms.json"
    assert store(file).read(parse) == (None, [])
    assert store(file).write(CONTENT) == []
    assert store(file, threads=1).write({**CONTENT, "forms": {"norm": "separate"}}) == []
    assert store(file).read(parse) == ("skip", [])
    assert store(file, threads=1).read(parse) == ("separate", [])
    assert len(json.loads(file.read_text())["entries"]) == 2
    assert [path.name for path in file.parent.iterdir()] == ["forms.json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 1},
        {"provider": "cuda"},
        {"config": replace(tiny_config(), d_model=32)},
        {"workloads": ("b",)},
        {"seconds": 4},
    ],
    ids=str,
)
def test_another_measurement_is_another_entry(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "forms.json"
    store(file).write(CONTENT)
    assert store(file, **changes).read(parse) == (None, [])


@pytest.mark.parametrize("changed", ["cpu", "flags", "onnxruntime"])
def test_another_machine_is_another_entry(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "forms.json"
    store(file).write(CONTENT)
    machine = time_store.describe_machine()
    if changed == "onnxruntime":
        machine["versions"] = {**machine["versions"], "onnxruntime": "9.9"}
    else:
        machine[changed] = {"none": True} if changed == "flags" else "another CPU"
    monkeypatch.setattr(time_store, "describe_machine", lambda: machine)
    assert store(file).read(parse) == (None, [])


def test_names_and_the_cut_of_texts_are_no_part_of_the_shape() -> None:
    config = tiny_config(head=ClassificationHead(LABELS))
    renamed = replace(config, head=ClassificationHead(("x", "y")), text=replace(config.text, max_length=9))
    assert store(config=config).key == store(config=renamed).key
    more = replace(config, head=ClassificationHead(("x", "y", "z")))
    assert store(config=config).key != store(config=more).key


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "it is damaged"),
        ("[]", "it is not of this slimformer"),
        ('{"format": 99, "entries": {}}', "it is not of this slimformer"),
        ("\udcff", "it is damaged"),
        ("entry", "it is damaged"),
        ("unknown", "it is damaged"),
    ],
)
def test_a_broken_cache_is_told_and_replaced(content: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "place" / "forms.json"
    file.parent.mkdir()
    if content in ("entry", "unknown"):
        broken = {"found": {"strange": 1}} if content == "unknown" else "text"
        content = json.dumps({"format": time_store.FORMAT, "entries": {store().key: broken}})
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert store(file).read(parse) == (None, [f"the cache place/forms.json was not used: {why}"])
    assert store(file).write(CONTENT) == []
    assert store(file).read(parse) == ("skip", [])


def test_a_cache_that_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    file = tmp_path / "forms.json"
    file.mkdir()
    found, (read,) = store(file).read(parse)
    assert found is None
    assert read.endswith("was not used: Is a directory")
    (written,) = store(file).write(CONTENT)
    assert "was not written: cannot write" in written
    (tmp_path / "file").write_text("")
    (blocked,) = store(tmp_path / "file" / "forms.json").write(CONTENT)
    assert "the cache file/forms.json was not written" in blocked


def test_the_first_file_that_knows_tells_the_others(tmp_path: Path) -> None:
    run, machine = tmp_path / "run.json", tmp_path / "machine.json"
    store(machine).write(CONTENT)
    assert store(run, machine).read(parse) == ("skip", [])
    machine.unlink()
    assert store(run).read(parse) == ("skip", [])


def test_the_last_file_keeps_nothing_that_was_cut_short(tmp_path: Path) -> None:
    """Neither when it is measured nor when another file knows it."""
    run, machine = tmp_path / "run.json", tmp_path / "machine.json"
    assert store(run, machine).write({**CONTENT, "whole": False}) == []
    assert store(run, machine).read(parse) == ("skip", [])
    assert not machine.exists()


def test_the_machine_s_cache_is_where_caches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_store(FORMS_FILE) == tmp_path / "slimformer" / "forms.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert machine_store(FORMS_FILE) == tmp_path / "home" / ".cache" / "slimformer" / "forms.json"
