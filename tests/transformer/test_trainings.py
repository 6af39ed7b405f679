"""Which training some data ask for, and what a new model is like where little is said."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from slimformer.transformer.config import RecurrentConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.finetuning import finetune
from slimformer.transformer.language import teach_texts
from slimformer.transformer.trainings import NewModel, training_for
from slimformer.transformer.translation import teach_pairs

SMALL = {"width": 8, "heads": 2, "neurons": 8}
ROWS: dict[str, dict[str, str]] = {
    "classification": {"text": "some words", "label": "a"},
    "translation": {"source": "some words", "target": "einige Worte"},
    "summarization": {"text": "some words", "summary": "words"},
    "language": {"text": "some words"},
}


def directory(folder: Path, task: str) -> Path:
    """A row in each split; of labels, two."""
    rows = [ROWS[task]] + ([{**ROWS[task], "label": "b"}] if task == "classification" else [])
    for split in ("train", "valid", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def chosen(folder: Path, new: NewModel, **options: Any) -> partial[Any]:
    found: Callable[..., Any] = training_for(folder, None, new, options)
    assert isinstance(found, partial)
    return found


@pytest.mark.parametrize(
    ("task", "teach", "layers"),
    [
        ("translation", teach_pairs, (6, 6)),
        ("summarization", teach_pairs, (6, 6)),
        ("language", teach_texts, (0, 6)),
    ],
)
def test_new_models_that_write(task: str, teach: Any, layers: tuple[int, int], tmp_path: Path) -> None:
    found = chosen(directory(tmp_path, task), NewModel(shape=SMALL, vocabulary=300), steps=7)
    assert found.func is teach
    config = found.args[0].config
    assert (len(config.encoder), len(config.decoder), config.d_model) == (*layers, 8)
    assert found.keywords["options"].steps == 7
    shown = NewModel(layers=(layers[0], 1), shape={**SMALL, "mixer": "gru"}, vocabulary=300)
    assert chosen(tmp_path, shown).args[0].config.decoder[0].mixer == RecurrentConfig("gru", 8, project=False)


def test_the_task_may_be_said(tmp_path: Path) -> None:
    """Rows with labels are texts all the same."""
    folder = directory(tmp_path, "classification")
    found = training_for(folder, None, NewModel(shape=SMALL, vocabulary=300), {}, "language")
    assert isinstance(found, partial)
    assert found.func is teach_texts
    assert [row.text for row in found.args[1].train] == ["some words", "some words"]


def test_classifiers(tmp_path: Path) -> None:
    folder = directory(tmp_path, "classification")
    found = chosen(folder, NewModel((1, 0), SMALL, vocabulary=300))
    assert found.func is finetune
    assert found.args[0].config.head.labels == ("a", "b")
    assert (found.keywords["options"].lr, found.keywords["options"].dropout) == (1e-3, 0.1)
    assert chosen(folder, NewModel((1, 0), SMALL, vocabulary=300), lr=0.01).keywords["options"].lr == 0.01
    model = tiny().save(tmp_path / "model")
    given = training_for(folder, str(model), NewModel(), {})
    assert isinstance(given, partial)
    assert given.keywords["options"].dropout == 0
    with pytest.raises(InputError, match=r"name the MODEL to fine-tune, or the --layers"):
        training_for(folder, None, NewModel(), {})
    with pytest.raises(InputError, match="a classifier has none"):
        training_for(folder, None, NewModel((1, 1), SMALL, vocabulary=300), {})


@pytest.mark.parametrize("task", ["language", "translation"])
def test_a_cut_is_for_classifiers_and_summaries(task: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--max-length is for classifiers and summaries"):
        training_for(directory(tmp_path, task), None, NewModel(), {"max_length": 9})


def test_texts_to_summarize_are_cut_where_it_is_said(tmp_path: Path) -> None:
    folder = directory(tmp_path, "summarization")
    new = NewModel((1, 1), SMALL, vocabulary=300)
    assert chosen(folder, new).args[0].config.text.max_length == 256
    found = chosen(folder, new, max_length=9)
    assert (found.args[0].config.text.max_length, found.args[0].config.embedding.positions) == (9, 256)
    assert found.args[1].task == "summarization"
    found.args[0].save(tmp_path / "model")
    given = training_for(folder, str(tmp_path / "model"), NewModel(), {"max_length": 7})
    assert isinstance(given, partial)
    assert given.args[0].config.text.max_length == 7
    with pytest.raises(InputError, match="max_length 257 is over the 256 positions"):
        training_for(folder, None, new, {"max_length": 257})
