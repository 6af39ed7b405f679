import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import MIXERS, WHOLE, WRITERS, pair_data, tiny_config, writer
from tiny import layer, search_data, tiny
from tiny import tiny_config as small_config

from slimformer.compress import costs as module
from slimformer.compress.costs import ATTEMPTS, Attempt, MultiplyAdds, Seconds, Serving, reach
from slimformer.compress.latencies import as_long, build_workloads
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.compress.units import Indices, stacks, sublayers
from slimformer.export.forms import Forms
from slimformer.export.latency import Workload
from slimformer.export.sublayer_times import SublayerTimes
from slimformer.transformer.config import FeedForwardConfig, LayerConfig, RecurrentConfig, TransformerConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.statistics import RatioInterval

CELLS = tiny_config(
    layers=[*WHOLE, *(LayerConfig(MIXERS[kind], FeedForwardConfig(24)) for kind in ("rnn", "lstm", "gru", "ssru"))]
)
CONFIGS = {**WRITERS, "encoder": tiny_config(), "cells": CELLS}


@pytest.mark.parametrize("kind", CONFIGS)
def test_multiply_adds_of_all_units_and_cells_are_the_models(kind: str) -> None:
    config = CONFIGS[kind]
    costs = MultiplyAdds(config)
    everything = {stack: tuple(range(len(layers))) for stack, layers in stacks(config).items()}
    whole = costs.without_units(everything) + sum(costs.of(sub, sub.count) for sub in sublayers(config))
    assert whole == config.multiply_adds()


def test_multiply_adds_by_hand() -> None:
    """Of width 32: a head of 8 has 4 matrices of 8 x 32, a neuron 2 of 1 x 32."""
    config = tiny_config()
    costs, (heads, neurons, *_) = MultiplyAdds(config), sublayers(config)
    assert [costs.of(heads, 0), costs.of(heads, 1), costs.of(heads, 3)] == [0, 1024, 3072]
    assert [costs.of(neurons, 0), costs.of(neurons, 5)] == [0, 320]
    assert costs.without_units({"encoder": (0, 1)}) == 0


def test_cells_cost_while_their_layers_stay() -> None:
    """LSTM of 20 units of width 32: 4 * 20 * (32 + 20) and the projection's 20 * 32."""
    costs, lstm = MultiplyAdds(CELLS), 4 * 20 * 52 + 640
    assert costs.without_units({"encoder": (0, 3)}) == lstm
    both = MIXERS["rnn"], MIXERS["lstm"]
    assert costs.without_units({"encoder": (1, 2, 3)}) == sum(
        cell.multiply_adds(32) for cell in both if isinstance(cell, RecurrentConfig)
    )
    alone = MultiplyAdds(WRITERS["lstm"])
    assert alone.without_units({"encoder": (0, 1), "decoder": (1,)}) == lstm


HEADS, WIDE = "heads of 8, float32 float32", "heads of 4, float32 float32"
NEURONS, CELL = "gelu neurons, float32 float32", "lstm of 20 units, float32 float32"
TIMES = SublayerTimes(
    outside=5.0,
    layer=0.5,
    points={
        HEADS: ((0, 0.0), (2, 1.0), (4, 4.0)),
        WIDE: ((0, 0.0), (2, 8.0)),
        NEURONS: ((0, 0.0), (32, 2.0), (96, 4.0)),
        CELL: ((0, 0.0), (1, 7.0)),
    },
)
TIMED = small_config(
    (layer(4, 8, 96), layer(2, 4, 64), LayerConfig(RecurrentConfig("lstm", 20), FeedForwardConfig(32)))
)


def test_seconds_of_units_are_of_their_own_kind() -> None:
    costs = Seconds(TIMES, TIMED)
    found = {sub.name: [costs.of(sub, count) for count in (0, 1, sub.count)] for sub in sublayers(TIMED)}
    assert found == {
        "encoder.0.mixer": [0.0, 0.5, 4.0],
        "encoder.0.ffn": [0.0, 2 / 32, 4.0],
        "encoder.1.mixer": [0.0, 4.0, 8.0],
        "encoder.1.ffn": [0.0, 2 / 32, 3.0],
        "encoder.2.ffn": [0.0, 2 / 32, 2.0],
    }


@pytest.mark.parametrize(("layers", "empty"), [((0, 1, 2), 13.5), ((0, 1), 6.0), ((2,), 12.5)])
def test_seconds_without_units_are_layers_cells_and_what_is_outside(layers: Indices, empty: float) -> None:
    costs = Seconds(TIMES, TIMED)
    assert costs.without_units({"encoder": layers}) == empty
    subs = [costs.of(sub, sub.count) for sub in sublayers(TIMED) if sub.layer in layers]
    whole = TIMED.with_layers(tuple(TIMED.encoder[i] for i in layers))
    assert empty + sum(subs) == pytest.approx(TIMES.total(whole))


# --- the speed that is reached ---


class Machine:
    """Choices are numbers: the measured speed is a function of what is asked."""

    def __init__(self, speed: Callable[[float], float], most: float = math.inf) -> None:
        self.speed, self.most, self.asked = speed, most, list[float]()

    def attempt(self, asked: float) -> tuple[str, Attempt] | None:
        self.asked.append(asked)
        if asked > self.most:
            return None
        ratio = self.speed(asked)
        return f"model {len(self.asked)}", Attempt(asked, asked, RatioInterval(ratio, 0.9 * ratio, 1.1 * ratio))


def test_a_speed_that_is_hit_at_once_is_taken() -> None:
    machine = Machine(lambda asked: asked * 1.019)
    found = reach(2.0, machine.attempt)
    assert found is not None
    assert (found.choice, machine.asked, len(found.attempts)) == ("model 1", [2.0], 1)
    assert found.taken is found.attempts[0]


def test_what_is_asked_is_corrected_by_what_was_measured() -> None:
    """A graph that is 0.8 times as fast as the sum says: 3 asks for 3.75 and gets 3."""
    machine = Machine(lambda asked: 0.8 * asked)
    found = reach(3.0, machine.attempt)
    assert found is not None
    assert machine.asked == pytest.approx([3.0, 3.75])
    assert found.choice == "model 2"
    assert found.taken.measured.ratio == pytest.approx(3.0)
    assert [one.asked for one in found.attempts] == machine.asked


def test_a_machine_that_slows_down_more_and_more_is_followed() -> None:
    """A tenth of the time is in what cannot be cut."""
    machine = Machine(lambda asked: 1 / (0.1 + 0.9 / asked))
    found = reach(2.5, machine.attempt)
    assert found is not None
    assert 1 < len(found.attempts) <= ATTEMPTS
    for before, after in zip(found.attempts, found.attempts[1:], strict=False):
        assert after.asked == pytest.approx(before.asked * 2.5 / before.measured.ratio)
    errors = [abs(one.measured.ratio / 2.5 - 1) for one in found.attempts]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= 0.02


def test_of_all_attempts_the_nearest_is_taken_by_ratio() -> None:
    """Of 1.6, 2.6 and 2.4 the last; of 4.1 and 1 the one that is twice off; of 3.9 and 1 the one that is less."""
    speeds = iter([1.6, 2.6, 2.4, 1.2, 2.0])
    machine = Machine(lambda asked: next(speeds))
    found = reach(2.0, machine.attempt)
    assert found is not None
    assert len(machine.asked) == ATTEMPTS == 4
    assert found.choice == "model 3"
    assert found.taken.measured.ratio == 2.4
    speeds = iter([4.1, 1.0, 4.1, 4.1])
    found = reach(2.0, Machine(lambda asked: next(speeds)).attempt)
    assert found is not None
    assert found.taken.measured.ratio == 1.0
    speeds = iter([3.9, 1.0, 1.0, 1.0])
    found = reach(2.0, Machine(lambda asked: next(speeds)).attempt)
    assert found is not None
    assert found.taken.measured.ratio == 3.9


def test_what_is_out_of_reach_at_once_is_nothing() -> None:
    machine = Machine(lambda asked: asked, most=1.9)
    assert reach(2.0, machine.attempt) is None
    assert machine.asked == [2.0]


def test_what_is_out_of_reach_later_leaves_what_was_found() -> None:
    machine = Machine(lambda asked: 0.5 * asked, most=3.0)
    found = reach(2.0, machine.attempt)
    assert found is not None
    assert machine.asked == [2.0, 4.0]
    assert (found.choice, len(found.attempts)) == ("model 1", 1)


@pytest.mark.parametrize(("ratio", "attempts"), [(2.039, 1), (2.041, 4), (1.961, 1), (1.959, 4)])
def test_two_in_a_hundred_are_close(ratio: float, attempts: int) -> None:
    found = reach(2.0, Machine(lambda asked: ratio).attempt)
    assert found is not None
    assert len(found.attempts) == attempts


def test_attempts_are_told_in_three_decimals() -> None:
    found = reach(2.0, Machine(lambda asked: asked / 1.23456).attempt)
    assert found is not None
    first = {"asked": 2.0, "predicted": 2.0, "measured": 1.62, "low": 1.458, "high": 1.782}
    second = {"asked": 2.469, "predicted": 2.469, "measured": 2.0, "low": 1.8, "high": 2.2}
    assert found.to_dict() == {**second, "attempts": [first, second]}


# --- how it is served ---


def test_a_decoder_that_writes_nothing_is_not_timed() -> None:
    for config in (tiny_config(), WRITERS["post"], WRITERS["alone"]):
        Serving.check(config)
        if config.decoder:
            with pytest.raises(InputError, match="this decoder writes nothing; give cost"):
                Serving.check(replace(config, head=None))


def test_seconds_of_a_decoders_units_are_of_its_own_kinds() -> None:
    config = WRITERS["lstm"]  # 2 layers of 4 heads, and 3 of LSTM, 2 cross heads and 48 neurons; 48 neurons in both
    times = SublayerTimes(
        10.0,
        0.5,
        {
            "heads of 8, float32 float32": ((0, 0.0), (4, 4.0)),
            "relu neurons, float32 float32": ((0, 0.0), (48, 12.0)),
            "decoder lstm of 20 units, float32 float32": ((0, 0.0), (1, 7.0)),
            "cross heads of 12, float32 float32": ((0, 0.0), (2, 6.0)),
            "decoder relu neurons, float32 float32": ((0, 0.0), (48, 24.0)),
        },
        decoder_layer=0.25,
    )
    costs = Seconds(times, config)
    found = {sub.name: costs.of(sub, 1) for sub in sublayers(config) if sub.layer == 1}
    assert found == {"encoder.1.mixer": 1, "encoder.1.ffn": 0.25, "decoder.1.cross": 3, "decoder.1.ffn": 0.5}
    assert costs.without_units({"encoder": (1,), "decoder": (0, 2)}) == 10 + 0.5 + 2 * (0.25 + 7)
    assert times.total(config) == 10 + 2 * (0.5 + 4 + 12) + 3 * (0.25 + 7 + 6 + 24)


def test_a_translator_is_served_with_texts_of_that_length() -> None:
    model, data = writer("post"), pair_data()
    serving = Serving.of(model, "float32", StepContext(data))
    assert [work.name for work in serving.works] == ["sorted"]
    whole = build_workloads(model, data, 0)[0]["sorted"]
    wanted = as_long(whole, model, data)
    lengths = [[int(batch["max_new_tokens"]) for batch in work.batches] for work in (serving.works[0], wanted, whole)]
    assert lengths[0] == lengths[1]
    assert sum(lengths[0]) < sum(lengths[2])


@pytest.mark.parametrize(("provider", "workload"), [("cpu", "sorted"), ("cpu", "single"), ("cuda", "mixed")])
def test_serving_is_what_the_context_says(provider: str, workload: str) -> None:
    context = StepContext(search_data(), provider=provider, workload=workload)
    serving = Serving.of(tiny(), "float32", context)
    assert [work.name for work in serving.works] == [workload]
    assert serving.forms == Forms.of_layout("packed" if provider == "cpu" else "padded")
    assert serving.context is context


def test_times_are_of_the_format_that_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[TransformerConfig, tuple[Workload, ...], dict[str, Any]]] = []
    speeds: list[tuple[TransformerConfig, TransformerConfig, tuple[Workload, ...], dict[str, Any]]] = []

    def times(config: TransformerConfig, works: tuple[Workload, ...], **how: Any) -> SublayerTimes:
        asked.append((config, works, how))
        return TIMES

    def speed(first: TransformerConfig, second: TransformerConfig, works: Any, **how: Any) -> RatioInterval:
        speeds.append((first, second, works, how))
        return RatioInterval(2.0, 1.9, 2.1)

    monkeypatch.setattr(module, "sublayer_times", times)
    monkeypatch.setattr(module, "speed", speed)
    stores = (tmp_path / "sublayers.json",)
    context = StepContext(search_data(), threads=1, stores=stores)
    checkpoint, smaller = tiny(), small_config((layer(),))
    for form in ("float32", "int8"):
        serving = Serving.of(checkpoint, form, context)
        costs = serving.costs(checkpoint.config)
        served = checkpoint.config if form == "float32" else Quantize(format="int8").planned(checkpoint.config)
        assert (costs.times, costs.config) == (TIMES, served)
        how = {"forms": serving.forms, "threads": 1, "provider": "cpu"}
        assert asked.pop() == (served, serving.works, {**how, "stores": stores, "progress": context.progress})
        assert serving.speed(checkpoint.config, smaller).ratio == 2.0
        assert speeds.pop() == (served, serving.config(smaller), serving.works, how)
        assert served.is_float == serving.config(smaller).is_float == (form == "float32")
