import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slimformer.transformer.finetuning as finetuning
import slimformer.transformer.lesson as lesson_module
from slimformer.transformer import load
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    ClassificationHead,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.data import LabelledData, LabelledRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.finetuning import FineTuning, finetune, with_classifier
from slimformer.transformer.lesson import NOTES
from slimformer.transformer.model import Transformer, initialize
from slimformer.transformer.parts import Part
from slimformer.transformer.processes import Processes
from slimformer.transformer.tokenizer import pad, wordpiece_from_vocab

WORDS = [a + b + c for a in "bdfgkl" for b in "aeiou" for c in "mn"]
OPTIONS = FineTuning(epochs=3, lr=0.003, batch_tokens=64)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def encoder() -> Checkpoint:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    layer = LayerConfig(AttentionConfig(heads=2, head_width=8), FeedForwardConfig(width=32))
    config = TransformerConfig(
        d_model=16,
        embedding=EmbeddingConfig(vocab_size=len(vocabulary), positions=20),
        encoder=(layer,),
        text=TextConfig(max_length=20),
    )
    model = Transformer(config)
    initialize(model, 0)
    return Checkpoint(config, dict(model.state_dict()), wordpiece_from_vocab("\n".join(vocabulary)))


def rows(count: int, seed: int) -> tuple[LabelledRow, ...]:
    """Two labels with words of their own."""
    rng = random.Random(seed)
    halves = WORDS[:30], WORDS[30:]
    return tuple(
        LabelledRow(" ".join(rng.choices(halves[i % 2], k=5)), ("first", "second")[i % 2], str(i)) for i in range(count)
    )


@pytest.fixture
def data() -> LabelledData:
    return LabelledData(rows(40, 0), rows(20, 1), rows(20, 2), ())


def answers(model: Checkpoint, texts: list[str]) -> list[str]:
    ids, mask = pad(model.text_encoder().encode(texts))
    with torch.inference_mode():
        logits = model.to_torch()(torch.from_numpy(ids), torch.from_numpy(mask)).result
    assert isinstance(model.config.head, ClassificationHead)
    return [model.config.head.labels[i] for i in logits.argmax(1).tolist()]


def test_it_learns_and_says_what_the_saved_model_gives(encoder: Checkpoint, data: LabelledData, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in encoder.state.items()}
    tuned = finetune(encoder, data, tmp_path / "out", replace(OPTIONS, epochs=8, lr=0.01))
    notes = load(tmp_path / "out").provenance[NOTES]
    assert [entry["epoch"] for entry in notes["epochs"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    right = np.mean(
        [a == row.label for a, row in zip(answers(tuned, [r.text for r in data.test]), data.test, strict=True)]
    )
    assert notes["test"]["accuracy"] == pytest.approx(100 * right)
    assert notes["test"]["accuracy"] > 80
    best = max(reversed(notes["epochs"]), key=lambda entry: entry["accuracy"])
    assert notes["best"] == best["epoch"]
    again = answers(load(tmp_path / "out"), [row.text for row in data.valid])
    assert best["accuracy"] == pytest.approx(
        100 * np.mean([a == row.label for a, row in zip(again, data.valid, strict=True)])
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(torch.equal(value, encoder.state[name]) for name, value in before.items())
    assert encoder.config.head is None


def test_the_best_epoch_is_kept(
    encoder: Checkpoint, data: LabelledData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The valid accuracies are made up: the second of four epochs and the third are best, and the later one is kept."""
    real, made_up = finetuning._Lesson.measure, iter([50.0, 90.0, 90.0, 70.0])

    def measure(self: Any, judged: Any) -> dict[str, float]:
        values = real(self, judged)
        return {**values, "accuracy": next(made_up)} if judged == "valid" else values

    monkeypatch.setattr(finetuning._Lesson, "measure", measure)
    snapshots: list[dict[str, torch.Tensor]] = []
    judged = lesson_module._Judge.__call__

    def call(self: Any, epoch: int, step: int) -> None:
        snapshots.append({name: value.clone() for name, value in self.lesson.model.state_dict().items()})
        judged(self, epoch, step)

    monkeypatch.setattr(lesson_module._Judge, "__call__", call)
    tuned = finetune(encoder, data, tmp_path / "out", replace(OPTIONS, epochs=4))
    assert tuned.provenance[NOTES]["best"] == 3
    assert all(torch.equal(value, snapshots[2][name]) for name, value in tuned.state.items())
    for other in (snapshots[1], snapshots[3]):
        assert not all(torch.equal(value, other[name]) for name, value in tuned.state.items())


def test_broken_off_and_resumed_is_the_same(
    encoder: Checkpoint, data: LabelledData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finetune(encoder, data, tmp_path / "whole", OPTIONS)
    monkeypatch.setattr("slimformer.transformer.training.SAVE_SECONDS", -1.0)  # the state is kept after every step
    real, calls = finetuning._Lesson.loss, 0

    def loss(self: Any, batch: list[int]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return real(self, batch)

    monkeypatch.setattr(finetuning._Lesson, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        finetune(encoder, data, tmp_path / "out", OPTIONS)
    work = tmp_path / ".out.training"
    assert len(json.loads((work / "history.json").read_text())) >= 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="--resume goes on"):
        finetune(encoder, data, tmp_path / "out", OPTIONS)
    with pytest.raises(InputError, match="begun with another options"):
        finetune(encoder, data, tmp_path / "out", replace(OPTIONS, lr=0.1), resume=True)
    resumed = finetune(encoder, data, tmp_path / "out", OPTIONS, resume=True)
    assert resumed.provenance[NOTES]["epochs"] == whole.provenance[NOTES]["epochs"]
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())
    assert calls < 2 * whole.provenance[NOTES]["log"]["steps"]
    assert not work.exists()
    monkeypatch.setattr(lesson_module, "train", lambda *a, **k: pytest.fail("trained again"))
    finished = finetune(encoder, data, tmp_path / "out", OPTIONS, resume=True)
    assert all(torch.equal(value, whole.state[name]) for name, value in finished.state.items())
    with pytest.raises(InputError, match="trained with another data"):
        finetune(encoder, replace(data, train=rows(30, 5)), tmp_path / "out", OPTIONS, resume=True)


def test_steps_end_within_an_epoch(encoder: Checkpoint, data: LabelledData, tmp_path: Path) -> None:
    tuned = finetune(encoder, data, tmp_path / "out", FineTuning(steps=2, batch_tokens=64))
    notes = tuned.provenance[NOTES]
    assert notes["log"]["steps"] == 2
    assert [entry["epoch"] for entry in notes["epochs"]] == [1]


def test_a_new_head_and_a_known_one(encoder: Checkpoint) -> None:
    headed = with_classifier(encoder, ("a", "b", "c"), seed=3)
    shapes = {name: tuple(value.shape) for name, value in headed.state.items() if name.startswith("head.")}
    assert shapes == {
        "head.pooler.weight": (16, 16),
        "head.pooler.bias": (16,),
        "head.classifier.weight": (3, 16),
        "head.classifier.bias": (3,),
    }
    headed.check("head")
    assert with_classifier(headed, ("c", "b", "a"), seed=4) is headed
    same, other = (with_classifier(encoder, ("a", "b", "c"), seed=seed).state for seed in (3, 4))
    assert torch.equal(same["head.classifier.weight"], headed.state["head.classifier.weight"])
    assert not torch.equal(other["head.classifier.weight"], headed.state["head.classifier.weight"])
    assert with_classifier(headed, ("a", "b"), seed=3).state["head.classifier.weight"].shape == (2, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "minutes": 2.0}, "epochs and minutes are given"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"lr": 1.5}, "lr is 1.5"),
        ({"steps": 0}, "steps is 0"),
        ({"minutes": float("inf")}, "minutes is inf"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FineTuning(**options)


def test_bad_data_models_and_outputs(encoder: Checkpoint, data: LabelledData, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = replace(data, train=tuple(row for row in data.train if row.label == "first"))
    with pytest.raises(InputError, match="the one label 'first'"):
        finetune(encoder, one, out, OPTIONS)
    with pytest.raises(InputError, match="no rows of valid and test"):
        finetune(encoder, replace(data, valid=(), test=()), out, OPTIONS)
    with pytest.raises(InputError, match="max_length 21 is over the 20 positions"):
        finetune(encoder, data, out, replace(OPTIONS, max_length=21))
    with pytest.raises(InputError, match="device nowhere cannot be used"):
        finetune(encoder, data, out, OPTIONS, device="nowhere")
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    with pytest.raises(InputError, match="exists"):
        finetune(encoder, data, out, OPTIONS)
    assert list(out.iterdir()) == []


def test_zeros_of_a_sparse_encoder_stay(encoder: Checkpoint, data: LabelledData, tmp_path: Path) -> None:
    linears = ["encoder.0.mixer.qkv", "encoder.0.ffn.down"]
    state = {name: value.clone() for name, value in encoder.state.items()}
    for name in linears:
        state[f"{name}.weight"][:, ::2] = 0.0
    start = replace(encoder, state=state).with_provenance(sparse={"linears": linears})
    trained = finetune(start, data, tmp_path / "out", replace(OPTIONS, epochs=1))
    for name in linears:
        weight = trained.state[f"{name}.weight"]
        assert torch.equal(weight == 0, state[f"{name}.weight"] == 0)
        assert not torch.equal(weight, state[f"{name}.weight"])


def test_a_process_that_follows_writes_nothing(
    encoder: Checkpoint, data: LabelledData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it gives back is what the main one has written."""

    class Second(Processes):
        main = False

    written = finetune(encoder, data, tmp_path / "out", OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    monkeypatch.setattr(lesson_module, "_write", lambda *_, **__: pytest.fail("a second process wrote"))
    found = finetune(encoder, data, tmp_path / "out", OPTIONS, processes=Second())
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before
    assert all(torch.equal(value, found.state[name]) for name, value in written.state.items())


def test_parts_of_a_step_add_up_to_its_loss(encoder: Checkpoint, data: LabelledData) -> None:
    lesson = finetuning._Lesson(finetuning._start(encoder, data, OPTIONS), data, OPTIONS, "cpu")
    parts = [lesson.loss(Part(part, [0, 1, 2, 3, 4])).item() for part in ([0], [1, 2, 3, 4])]
    assert sum(parts) == pytest.approx(lesson.loss(Part([0, 1, 2, 3, 4])).item(), rel=1e-5)
