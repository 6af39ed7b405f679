"""The choice of forms, with times out of the air; and that what is measured is what is built."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from models import translator
from tiny import layer, tiny, tiny_config

from slimformer.export import form_times
from slimformer.export.form_times import FEWEST, LOST, MOST, Chosen, choose, default_workloads, measured
from slimformer.export.forms import CHOICES, Forms
from slimformer.export.latency import shape_workload
from slimformer.transformer.errors import InputError
from slimformer.transformer.quantization import quantized

WORKS = (shape_workload(2, 8, 40, seed=0),)
VALUES = [(choice, value) for choice, values in CHOICES.items() for value in values[1:]]


class Machine:
    """Seconds of a pass: the product of what `gains` says of each "choice value", and noise on all but the default."""

    def __init__(self, gains: Mapping[str, float], noise: Sequence[float] = (1.0,)) -> None:
        self.gains, self.noise, self.now = gains, noise, 0.0
        self.passes: list[Forms] = []

    def open(self, forms: Forms) -> Callable[[], list[float]]:
        gain = math.prod(self.gains.get(" ".join(item), 1.0) for item in forms.to_dict().items())

        def run() -> list[float]:
            noise = self.noise[self.passes.count(forms) % len(self.noise)]
            seconds = gain if forms == Forms() else gain * noise
            self.passes.append(forms)
            self.now += seconds
            return [seconds, 3 * seconds]

        return run

    def choose(self, refused: Mapping[tuple[str, str], str] | None = None, seconds: float = 1e6) -> Chosen:
        forms, decisions = choose(Forms(), refused or {}, self.open, seconds=seconds, clock=lambda: self.now)
        return Chosen(forms, tuple(decisions), (), "today")


def test_what_is_faster_is_taken_one_choice_after_the_other() -> None:
    machine = Machine({"norm skip": 0.9, "qkv separate": 1.1, "gelu erf": 0.8, "gelu bias": 0.7, "layout padded": 1.2})
    chosen = machine.choose()
    assert chosen.forms == Forms(norm="skip", gelu="bias")
    by_value = {(one["choice"], one["value"]): one for one in chosen.decisions}
    assert set(by_value) == {*VALUES, ("together", "norm skip, gelu bias")}
    assert [key for key, one in by_value.items() if one["taken"]] == [
        ("norm", "skip"), ("gelu", "bias"), ("together", "norm skip, gelu bias")
    ]  # fmt: skip
    assert by_value["gelu", "erf"]["why"] == "another one is faster"
    assert by_value["norm", "skip"]["speed"]["ratio"] == pytest.approx(1 / 0.9)
    assert by_value["gelu", "bias"]["speed"]["ratio"] == pytest.approx(1 / 0.7)
    last = by_value["together", "norm skip, gelu bias"]
    assert last["speed"]["ratio"] == pytest.approx(1 / 0.63)
    assert last["against"] == "the default"
    assert {one["rounds"] for one in by_value.values() if one["speed"]["ratio"] < 1} == {LOST}


def test_later_choices_are_timed_on_top_of_what_was_taken() -> None:
    machine = Machine({"layout padded": 0.5})
    machine.choose()
    norms = [forms for forms in machine.passes if forms.norm == "skip"]
    assert norms
    assert {forms.layout for forms in norms} == {"padded"}


def test_what_is_not_proven_is_not_taken() -> None:
    """Faster in the median and slower in almost as many rounds: the interval holds 1."""
    chosen = Machine({}, noise=(1.2, 0.9)).choose()
    assert chosen.forms == Forms()
    norm = next(one for one in chosen.decisions if one["choice"] == "norm")
    assert norm["speed"]["low"] <= 1 < norm["speed"]["ratio"]
    assert norm["why"] == "not proven to be faster"


def test_equal_forms_leave_the_default() -> None:
    chosen = Machine({}).choose()
    assert chosen.forms == Forms()
    assert not any(one["taken"] for one in chosen.decisions)


def test_what_does_not_hold_in_new_sessions_is_dropped() -> None:
    class Fickle(Machine):
        """Each graph is fast only when it is opened first."""

        def open(self, forms: Forms) -> Callable[[], list[float]]:
            known = forms in self.passes
            self.gains = {} if known else {"norm skip": 0.8}
            return super().open(forms)

    chosen = Fickle({}).choose()
    assert chosen.forms == Forms()
    assert not any(one["taken"] for one in chosen.decisions)
    norm, last = (next(o for o in chosen.decisions if o["choice"] == name) for name in ("norm", "together"))
    assert norm["speed"]["low"] > 1
    assert norm["why"] == form_times.DROPPED
    assert last["speed"]["low"] <= 1


def test_what_is_not_offered_is_not_timed() -> None:
    refused = {("norm", "skip"): "no norms here", ("gelu", "erf"): "no GELU", ("gelu", "bias"): "no GELU"}
    machine = Machine({"norm skip": 0.5, "gelu bias": 0.5})
    chosen = machine.choose(refused)
    assert chosen.forms == Forms()
    assert {(forms.norm, forms.gelu) for forms in machine.passes} == {("separate", "fused")}
    whys = {one["value"]: one["why"] for one in chosen.decisions}
    assert whys["skip"] == "not offered: no norms here"
    assert whys["bias"] == "not offered: no GELU"


def test_no_choice_is_begun_after_the_time() -> None:
    machine = Machine({"layout padded": 0.9})
    chosen = machine.choose(seconds=5.0)
    assert {forms.norm for forms in machine.passes} == {"separate"}
    assert chosen.forms.layout == "padded"
    untimed = [one for one in chosen.decisions if one["why"] == "not timed: 5 s were over"]
    assert {one["choice"] for one in untimed} == {"norm", "attention", "qkv", "gelu"}
    assert next(one for one in chosen.decisions if one["choice"] == "layout")["rounds"] == FEWEST


def test_the_first_pass_of_a_graph_does_not_count() -> None:
    machine = Machine({"layout padded": 1.2})
    machine.choose()
    assert machine.passes.count(Forms(layout="padded")) == 1 + LOST


def test_time_buys_rounds_up_to_the_most() -> None:
    machines = [Machine({"layout padded": 0.9}) for _ in range(3)]
    rounds = [one.choose(seconds=s).decisions[0]["rounds"] for one, s in zip(machines, (1.0, 150.0, 1e6), strict=True)]
    assert rounds[0] == FEWEST < rounds[1] < rounds[2] == MOST


def test_lines_say_choice_speed_and_reason() -> None:
    timed = {"choice": "norm", "value": "skip", "taken": False, "why": "not proven to be faster", "rounds": 7}
    timed |= {"speed": {"ratio": 0.98, "low": 0.95, "high": 1.01}, "against": "separate"}
    other = {"choice": "gelu", "value": "erf", "taken": False, "why": "not offered: no GELU"}
    assert Chosen(Forms(), (timed, other), (), "today", ("from the cache",)).lines() == [
        "from the cache",
        "norm skip: 0.980x [0.950, 1.010] as fast as separate, 7 rounds: not proven to be faster",
        "gelu erf: not offered: no GELU",
    ]
    assert Chosen.fixed(Forms(gelu="erf"), "as asked").lines() == ["as asked"]


def test_chosen_goes_through_json() -> None:
    chosen = Machine({"norm skip": 0.9}).choose()
    assert Chosen.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


def test_default_workloads_are_one_text_dense_batches_and_mixed_lengths() -> None:
    works = default_workloads(tiny_config())
    assert [work.name for work in works] == ["1x16", "8x48", "32x48", "32 of mixed lengths"]  # 48 positions
    assert [work.padded_tokens - work.tokens > 0 for work in works] == [False, False, False, True]
    mask = works[-1].batches[0]["attention_mask"]
    assert mask.shape == (32, 48)
    assert mask.sum(1).min() == 4
    assert mask.sum(1).max() == 48
    assert len(set(mask.sum(1))) > 10


def test_a_model_is_measured_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Forms] = []
    real = form_times.graph_pass
    monkeypatch.setattr(form_times, "graph_pass", lambda *a, **k: built.append(a[2]) or real(*a, **k))
    monkeypatch.setattr(form_times, "MOST", 2)
    stores = [tmp_path / "run" / "forms.json", tmp_path / "machine" / "forms.json"]
    config = tiny_config((layer(),))
    found = measured(tiny(config), WORKS, threads=1, seconds=60, stores=stores)
    assert built[0] == Forms()
    assert {forms.gelu for forms in built} == set(CHOICES["gelu"])
    assert found.workloads == ("2x8: 1 batch, 2 rows, 16 tokens, 16 with padding",)
    assert found.notes == ()
    built.clear()
    stores[0].unlink()
    again = measured(tiny(config, seed=1), WORKS, threads=1, seconds=60, stores=stores)
    assert built == []
    assert (again.forms, again.decisions) == (found.forms, found.decisions)
    assert again.notes == (f"from the cache, measured on {found.measured}",)
    assert stores[0].is_file()  # the run keeps what the machine knew
    measured(quantized(tiny(config), bits=7), WORKS, threads=1, seconds=60, stores=stores)
    assert built
    assert {forms.attention for forms in built} == {"fused"}


def test_what_time_cut_short_is_kept_by_the_run_alone(tmp_path: Path) -> None:
    run, machine = tmp_path / "run.json", tmp_path / "machine.json"
    chosen = measured(tiny(), WORKS, threads=1, seconds=0, stores=[run, machine])
    assert chosen.forms == Forms()
    assert {one["why"] for one in chosen.decisions} == {"not timed: 0 s were over"}
    assert measured(tiny(), WORKS, threads=1, seconds=0, stores=[run, machine]).measured == chosen.measured
    assert not machine.exists()


def test_where_nothing_is_offered_the_machine_learns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_times, "not_offered", lambda config: dict.fromkeys(VALUES, "not here"))
    run, machine = tmp_path / "run.json", tmp_path / "machine.json"
    chosen = measured(tiny(), WORKS, threads=1, seconds=60, stores=[run, machine])
    assert {one["why"] for one in chosen.decisions} == {"not offered: not here"}
    assert run.is_file()
    assert not machine.exists()


def test_models_that_write_have_no_forms() -> None:
    with pytest.raises(InputError, match="models that write have no forms"):
        measured(translator(), WORKS)
