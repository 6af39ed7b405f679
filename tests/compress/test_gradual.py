"""Gradual pruning: each round's target is met, kept units are those of the first model, and broken runs go on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import pair_data, translator
from tiny import LABELS, labelled_data, search_data, tiny, with_head

from slimformer.compress import gradual as module
from slimformer.compress.distill import Distill
from slimformer.compress.gradual import Gradual
from slimformer.compress.prune import Prune
from slimformer.compress.step import StepContext, StepResult
from slimformer.compress.units import Kept
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.quantization import quantized

DATA = search_data()
PRUNING: dict[str, Any] = {"importance": "fisher", "samples": 16, "agreement": 0.0, "multiple": 1}
TRAINING: dict[str, Any] = {"batch_tokens": 150, "warmup": 1, "pages": 4, "lr": 1e-3}


def gradual(**options: Any) -> Gradual:
    return Gradual(**{"rounds": 3, "cost": 0.5, "steps": 7, **PRUNING, **TRAINING, **options})


def same(one: Checkpoint, other: Checkpoint) -> bool:
    alike = one.config == other.config and one.state.keys() == other.state.keys()
    return alike and all(torch.equal(value, other.state[name]) for name, value in one.state.items())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "cubic", "rounds": 4, "cost": 0.2}, [1 - 0.8 * r for r in (37 / 64, 56 / 64, 63 / 64, 1)]),
        ({"schedule": "linear", "rounds": 4, "cost": 0.2}, [0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "rounds": 2, "cost": None}, [0.75, 0.5]),
        ({"schedule": "linear", "rounds": 2, "cost": None, "speedup": 4.0}, [0.625, 0.25]),
    ],
)
def test_targets_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    step = gradual(**options)
    assert [step.target(t + 1) for t in range(step.rounds)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cubic"])
def test_each_round_follows_the_schedule_and_keeps_units_of_the_first_model(schedule: str) -> None:
    first = tiny()
    result = gradual(schedule=schedule)(first, StepContext(DATA))
    whole = first.config.multiply_adds()
    unit = 4 * 8 * 16 / whole  # a head
    for told, left in zip(result.details["rounds"], {"linear": (2, 1, 0), "cubic": (8, 1, 0)}[schedule], strict=True):
        target = 0.5 + 0.5 * left / {"linear": 3, "cubic": 27}[schedule]
        assert told["wanted"] == pytest.approx(target, abs=1e-4)
        assert target - unit < told["reached"] <= target + 1e-4
    assert [told["distill"]["steps"] for told in result.details["rounds"]] == [3, 2, 2]
    assert result.details["steps"] == 7
    share = result.checkpoint.config.multiply_adds() / whole
    assert 0.5 - unit < share <= 0.5
    assert result.details["multiply_adds_kept"] == pytest.approx(share, abs=1e-4)
    kept = Kept.from_dict(result.checkpoint.provenance["kept"])
    shapes = [result.checkpoint.config.encoder[i].ffn for i in range(2)]
    assert [len(kept.units.get(f"encoder.{i}.ffn", ())) for i in range(2)] == [
        ffn.width if ffn else 0 for ffn in shapes
    ]
    assert result.checkpoint.provenance["kept_of"]["neurons"] == [32, 32]
    assert same(first, tiny())


@pytest.mark.parametrize("seed", [0, 5])
def test_one_round_is_prune_then_distill(seed: int) -> None:
    first, context = tiny(), StepContext(DATA, seed=seed)
    result = gradual(rounds=1)(first, context).checkpoint
    pruned = Prune(cost=0.5, **PRUNING)(first, context).checkpoint
    taught = StepContext(DATA, teacher=first, seed=seed)
    assert same(result, Distill(steps=7, **TRAINING)(pruned, taught).checkpoint)


def test_two_rounds_are_the_steps_by_hand() -> None:
    first = tiny()
    result = gradual(rounds=2, schedule="linear", steps=4)(first, StepContext(DATA, seed=3)).checkpoint
    model = first
    for number, target in enumerate((0.75, 0.5)):
        context = StepContext(DATA, teacher=first, seed=3 + number)
        share = target * first.config.multiply_adds() / model.config.multiply_adds()
        model = Distill(steps=2, **TRAINING)(
            Prune(cost=share, **PRUNING)(model, context).checkpoint, context
        ).checkpoint
    assert same(result, model)


@pytest.mark.parametrize("broken", [("distill", 1), ("prune", 2), ("distill", 2)])
def test_a_broken_run_goes_on_as_if_it_had_not_been(
    broken: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, first, real = gradual(rounds=2), tiny(), module._kept
    unbroken = step(first, StepContext(DATA))
    ran: list[str] = []

    def counted(name: str, own: Any, model: Checkpoint, context: StepContext) -> StepResult:
        def call(*given: Any) -> StepResult:
            ran.append(name)
            if ran.count(name) == broken[1] and name == broken[0]:
                raise KeyboardInterrupt
            return own(*given)

        return real(name, call, model, context)

    monkeypatch.setattr(module, "_kept", counted)
    with pytest.raises(KeyboardInterrupt):
        step(first, StepContext(DATA, workdir=tmp_path))
    monkeypatch.setattr(module, "_kept", real)
    done = len(list(tmp_path.glob("gradual-*/round-*/*.json")))
    assert done == len(ran) - 1
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("gradual-*/round-*/*.json")}
    resumed = step(first, StepContext(DATA, workdir=tmp_path))
    assert same(resumed.checkpoint, unbroken.checkpoint)
    assert resumed.checkpoint.provenance == unbroken.checkpoint.provenance
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


def test_rounds_of_another_seed_are_not_taken_up(tmp_path: Path) -> None:
    step = gradual(rounds=1)
    step(tiny(), StepContext(DATA, workdir=tmp_path))
    other = step(tiny(), StepContext(DATA, workdir=tmp_path, seed=1)).checkpoint
    assert same(other, step(tiny(), StepContext(DATA, seed=1)).checkpoint)
    assert len(list(tmp_path.glob("gradual-*"))) == 2


def test_speed_asks_for_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    measured = iter((1.25, 2.0))

    def told(name: str, own: Any, model: Checkpoint, context: StepContext) -> StepResult:
        if name == "distill":
            return StepResult(model, {"steps": 1})
        asked.append(own.speedup)
        return StepResult(model, {"speed": {"measured": next(measured)}})

    monkeypatch.setattr(module, "_kept", told)
    result = gradual(rounds=2, schedule="linear", cost=None, speedup=2.0)(tiny(), StepContext(DATA))
    assert asked == pytest.approx([1 / 0.75, 0.8 / 0.5])  # 0.8 of the time is left after the first round
    assert result.details["speedup"] == 2.5


def test_a_classifier_and_a_translator() -> None:
    cases = ((with_head(ClassificationHead(LABELS)), labelled_data()), (translator(), pair_data()))
    for first, data in cases:
        result = gradual(rounds=2, cost=0.6, beams=0)(first, StepContext(data))
        assert result.checkpoint.config.multiply_adds() <= 0.6 * first.config.multiply_adds()
        result.checkpoint.check("gradual")
        assert result.checkpoint.provenance["kept"]


def test_all_problems_are_named() -> None:
    with pytest.raises(InputError) as refused:
        gradual(rounds=0, schedule="square", cost=2.0, lr=3.0)
    for part in ("rounds is 0", "schedule is 'square'", "cost is 2.0", "lr is 3.0"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 2}, "steps is 2, fewer than the 3 rounds"),
        ({"speedup": 2.0}, "cost and speedup are both given"),
        ({"minutes": 2.0}, "give either minutes or steps"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        gradual(**options)


def test_int8_and_headless_models_are_refused() -> None:
    with pytest.raises(InputError, match="int8"):
        gradual().check(quantized(tiny(), bits=8).config)
    with pytest.raises(InputError, match="no head"):
        gradual().check(with_head(None).config)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="this decoder writes nothing"):
        gradual(cost=None, speedup=2.0).check(replace(translator().config, head=None))
    gradual(cost=None, speedup=2.0).check(translator().config)


def test_minutes_are_shared_out() -> None:
    assert Gradual(rounds=4)._distill(2).minutes == 2.5
