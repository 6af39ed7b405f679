"""Which directory is what, and the hub where there is none."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from models import bert_directory, tiny

from slimformer.transformer.checkpoint import NEW
from slimformer.transformer.errors import InputError
from slimformer.transformer.loading import HUB_FILES, load


def test_each_kind_of_directory(tmp_path: Path) -> None:
    tiny().save(tmp_path / "own")
    bert_directory(tmp_path / "bert")
    bert_directory(tmp_path / "sentence")
    (tmp_path / "sentence" / "1_Pooling").mkdir()
    (tmp_path / "sentence" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "sentence" / "modules.json").write_text(json.dumps(modules))
    found = {name: load(tmp_path / name).provenance.get("family") for name in ("own", "bert", "sentence")}
    assert found == {"own": None, "bert": "bert", "sentence": "sentence-transformers"}
    assert load(str(tmp_path / "bert")).config == load(tmp_path / "bert").config


def test_a_model_made_here_is_named_after_its_directory(tmp_path: Path) -> None:
    """Not one that began as another, whose name says more."""
    made = tiny().with_provenance(source=NEW, seed=3)
    made.save(tmp_path / "teacher")
    assert load(tmp_path / "teacher").provenance == {"source": "teacher", "seed": 3}
    made.with_provenance(source="MiniLM").save(tmp_path / "topics")
    assert load(tmp_path / "topics").provenance["source"] == "MiniLM"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"model: no config.json in it, so it is not a model directory"),
        ("{", r"config.json: not JSON"),
        ("[]", r"config.json: not an object"),
        ('{"model_type": "roberta"}', r"config.json: .*model_type 'roberta' is not supported; bert is"),
        ('{"d_model": 3}', r"config.json: config lacks the field 'embedding'"),
    ],
)
def test_a_directory_that_is_no_model(config: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(config)
    with pytest.raises(InputError, match=message):
        load(tmp_path / "model")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model.safetensors is a file; give the model's directory"):
        load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["./model", "/model", "~/model", "model/", "some/where/model"])
def test_what_can_only_be_a_path_never_reaches_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(InputError, match=r"^\S+: no such directory$"):
        load(name)


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    tiny(seed=3).save(tmp_path / "snapshot")

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("someone/model").config == tiny().config
    assert asked == [("someone/model", HUB_FILES)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(LocalEntryNotFoundError("no network\nmore"), "no network"), (OSError(), "OSError"), (OSError(5, "why"), "why")],
)
def test_no_hub(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match=rf"someone/model: .*not to be had from the hub \(.*{reason}\)$"):
        load("someone/model")
