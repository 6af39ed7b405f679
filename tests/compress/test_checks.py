"""Checks while a student learns: the best is kept, training ends early, a resumed run is the same, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import search_data, tiny

from slimformer.compress import checks as module
from slimformer.compress.checks import Checks
from slimformer.compress.distill import Distill
from slimformer.compress.step import StepContext, StepResult
from slimformer.export.bundle import export
from slimformer.export.runtime import load_bundle
from slimformer.transformer import training
from slimformer.transformer.errors import InputError
from slimformer.transformer.evaluation import Memory, evaluate

DATA, TEACHER, STUDENT = search_data(), tiny(), tiny(seed=7)
STEP = Distill(steps=12, lr=3e-3, batch_tokens=200, warmup=1, checks=4, pages=4)


def run(step: Distill = STEP, **context: Any) -> StepResult:
    return step(STUDENT, StepContext(DATA, **{"teacher": TEACHER, **context}))


class Scored:
    """Metrics in the place of those of an evaluation."""

    deciding = "nDCG@10"

    def __init__(self, value: float) -> None:
        self.value = value

    def values(self) -> dict[str, float]:
        return {self.deciding: self.value}


def scored(monkeypatch: pytest.MonkeyPatch, *values: float) -> list[dict[str, torch.Tensor]]:
    """Checks find these values; the states that they were given."""
    given, left = list[dict[str, torch.Tensor]](), iter(values)

    def judged(self: Checks, model: Any) -> Any:
        given.append(model.state)
        return Scored(next(left))

    monkeypatch.setattr(Checks, "_judged", judged)
    return given


def test_the_best_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = scored(monkeypatch, 10.0, 30.0, 20.0, 30.0)
    result = run()
    assert [entry["step"] for entry in result.details["checks"]] == [3, 6, 9, 12]
    assert result.details["best_step"] == 6
    assert all(torch.equal(value, given[1][name]) for name, value in result.checkpoint.state.items())
    assert not all(torch.equal(value, given[0][name]) for name, value in result.checkpoint.state.items())


@pytest.mark.parametrize(("patience", "steps"), [(0, 12), (1, 9), (2, 12), (3, 12)])
def test_training_ends_after_checks_without_a_better_one(
    patience: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 10.0, 30.0, 20.0, 30.0)
    details = run(replace(STEP, patience=patience)).details
    assert (details["steps"], details["best_step"]) == (steps, 6)
    assert len(details["checks"]) == steps // 3


@pytest.mark.parametrize("keep_index", [False, True])
def test_a_check_is_an_evaluation_of_the_exported_student(keep_index: bool, tmp_path: Path) -> None:
    result = run(replace(STEP, checks=1), keep_index=keep_index)
    memory = Memory()
    evaluate(DATA, load_bundle(export(TEACHER, tmp_path / "teacher")), "valid", memory=memory)
    bundle = load_bundle(export(result.checkpoint, tmp_path / "student"))
    expected = evaluate(DATA, bundle, "valid", index=memory if keep_index else None).values()["nDCG@10"]
    assert result.details["checks"] == [{"step": 12, "nDCG@10": pytest.approx(expected)}]


def test_checks_change_nothing_of_what_is_learnt() -> None:
    last = run(replace(STEP, checks=1)).checkpoint.state
    plain = run(replace(STEP, checks=0))
    assert "checks" not in plain.details
    assert all(torch.equal(value, last[name]) for name, value in plain.checkpoint.state.items())


@pytest.mark.parametrize("kept_every", [-1.0, 1e9])
@pytest.mark.parametrize("at", [2, 7, 10])
def test_killed_and_resumed_is_the_same(
    at: int, kept_every: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the state of the last step, or from that of the start, whose checks are then known."""
    whole = run(workdir=tmp_path / "whole")
    monkeypatch.setattr(training, "SAVE_SECONDS", kept_every)
    real, calls = module.Checks.after_step, 0

    def after_step(self: Checks, update: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return real(self, update)

    (tmp_path / "work").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module.Checks, "after_step", after_step)
        with pytest.raises(KeyboardInterrupt):
            run(workdir=tmp_path / "work")
    again = run(workdir=tmp_path / "work")
    assert again.details["checks"] == whole.details["checks"]
    assert again.details["best_step"] == whole.details["best_step"]
    assert all(torch.equal(value, again.checkpoint.state[name]) for name, value in whole.checkpoint.state.items())
    assert len(json.loads(next((tmp_path / "work").glob(f"distill-*/{module.HISTORY}")).read_text())) == 4


def test_an_ended_training_stays_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(monkeypatch, 30.0, 20.0)
    step = replace(STEP, patience=1)
    first, second = run(step, workdir=tmp_path), run(step, workdir=tmp_path)
    assert first.details["steps"] == second.details["steps"] == 6
    assert all(torch.equal(v, second.checkpoint.state[name]) for name, v in first.checkpoint.state.items())


def test_a_board_is_written_while_the_student_learns(tmp_path: Path) -> None:
    """Losses of training and metrics of checks, in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    details = run(board=tmp_path / "board").details
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    found = [(event.step, event.value) for event in events.Scalars("valid/nDCG@10")]
    assert found == [(entry["step"], pytest.approx(entry["nDCG@10"], rel=1e-5)) for entry in details["checks"]]


def test_checks_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="patience is 2, of checks, of which there are none"):
        Distill(patience=2)
    with pytest.raises(InputError, match="checks is -1, below 0"):
        Distill(checks=-1)
    with pytest.raises(InputError, match="checks are made on valid, and the data has none"):
        STEP(STUDENT, StepContext(replace(DATA, valid=()), teacher=TEACHER))
