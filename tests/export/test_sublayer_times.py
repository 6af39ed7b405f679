"""Times of sub-layers, with seconds out of the air; and once with a real graph."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import WRITERS
from tiny import VOCAB, layer, tiny_config

from slimformer.export import sublayer_times as module
from slimformer.export.forms import Forms
from slimformer.export.generator import build_generator
from slimformer.export.latency import Workload, shape_workload, writing
from slimformer.export.sublayer_times import SublayerTimes, kind_of, speed, sublayer_times, units
from slimformer.export.timing import open_session
from slimformer.transformer.config import (
    AttentionConfig,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    RecurrentConfig,
    TransformerConfig,
)
from slimformer.transformer.layer_config import FLOAT32, INT8_DYNAMIC
from slimformer.transformer.quantization import linear_names, with_formats

WORKS = (shape_workload(2, 8, VOCAB, seed=0),)
HEADS, NEURONS, CELL = (
    "heads of 8, float32 float32",
    "gelu neurons, float32 float32",
    "lstm of 20 units, float32 float32",
)
OUTSIDE, LAYER, HEAD, NEURON, LSTM = 1.0, 0.25, 0.125, 0.0078125, 0.5  # of two, so that sums are exact


class Machine:
    """Seconds of a config: a sum over what is in it; products in int8 take half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[TransformerConfig] = []
        self.fed: list[Sequence[Workload]] = []
        self.how: list[dict[str, Any]] = []
        monkeypatch.setattr(module, "opened", self.open)

    def open(self, config: TransformerConfig, works: Sequence[Workload], **how: Any) -> Callable[[], float]:
        self.opened.append(config)
        self.fed.append(works)
        self.how.append(how)
        rounds = count()
        # one round in three is an outlier, which the median passes over
        return lambda: self.seconds(config) * (50.0 if next(rounds) % 3 == 1 else 1.0)

    @staticmethod
    def seconds(config: TransformerConfig) -> float:
        total = OUTSIDE + LAYER * len(config.encoder)
        for one in config.encoder:
            for sub in (one.mixer, one.ffn):
                if sub is None:
                    continue
                unit = HEAD if isinstance(sub, AttentionConfig) else NEURON
                whole = LSTM if isinstance(sub, RecurrentConfig) else unit * units(sub)
                total += whole * (1.0 if sub.input_format == FLOAT32 else 0.5)
        return total


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def timed(config: TransformerConfig, works: Sequence[Workload] = WORKS, **options: Any) -> SublayerTimes:
    return sublayer_times(config, works, **{"forms": Forms(), "threads": 1, "seconds": 0.0, **options})


CONFIG = tiny_config((layer(4, 8, 96), layer(10, 8, 40), layer(2, 4, 0, "relu"), layer(0, neurons=64)))


def test_the_table_has_what_units_add(machine: Machine) -> None:
    """Shares of 10 heads, rounded to the nearest even: 1, 2 (of 2.5), 5, 8 (of 7.5) and 10; of 96 neurons 32 and 64."""
    found = timed(CONFIG)
    assert (found.outside, found.layer) == (OUTSIDE, LAYER)
    assert set(found.points) == {HEADS, "heads of 4, float32 float32", NEURONS}
    assert found.points[HEADS] == tuple((n, n * HEAD) for n in (0, 1, 2, 5, 8, 10))
    assert found.points["heads of 4, float32 float32"] == tuple((n, n * HEAD) for n in (0, 1, 2))
    assert found.points[NEURONS] == tuple((n, n * NEURON) for n in (0, 32, 64, 96))
    assert found.measured == "measured"
    assert found.total(CONFIG) == machine.seconds(CONFIG)


def test_graphs_are_of_one_layer_with_one_sublayer(machine: Machine) -> None:
    timed(CONFIG)
    layers = [config.encoder for config in machine.opened]
    assert layers[:2] == [(), (LayerConfig(None, None),)]
    assert len(layers) == 2 + 5 + 2 + 3
    for own in layers[2:]:
        assert len(own) == 1
        assert (own[0].mixer is None) != (own[0].ffn is None)
    assert (LayerConfig(AttentionConfig(5, 8), None),) in layers
    assert (LayerConfig(None, FeedForwardConfig(64)),) in layers
    assert machine.how == [{"forms": Forms(), "threads": 1, "provider": "cpu"}] * len(layers)


def test_numbers_of_neurons_are_multiples_of_32_or_all(machine: Machine) -> None:
    found = timed(tiny_config((layer(0, neurons=1024),)))
    # 1024 times 1/48, 1/12, 1/6, 1/3, 1/2, 3/4, in whole 32s, at least one
    assert [number for number, _ in found.points[NEURONS]] == [0, 32, 96, 160, 352, 512, 768, 1024]
    fewer = timed(tiny_config((layer(0, neurons=640),)))
    assert [number for number, _ in fewer.points[NEURONS]] == [0, 32, 64, 96, 224, 320, 480, 640]
    few = timed(tiny_config((layer(0, neurons=20),)))
    assert [number for number, _ in few.points[NEURONS]] == [0, 20]


def test_between_measured_numbers_time_is_linear() -> None:
    times = SublayerTimes(1.0, 0.1, {NEURONS: ((0, 0.0), (32, 1.0), (96, 2.0)), HEADS: ((0, 0.0), (2, 5.0))})
    assert [times.of(NEURONS, n) for n in (0, 16, 32, 64, 96)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert times.of(HEADS, 1) == 2.5
    with pytest.raises(KeyError):
        times.of(CELL, 1)
    config = tiny_config((layer(1, 8, 64), layer(0, neurons=16), LayerConfig(None, None)))
    assert times.total(config) == pytest.approx(1.0 + 3 * 0.1 + 2.5 + 1.5 + 0.5)


def test_recurrent_cells_are_timed_whole(machine: Machine) -> None:
    config = tiny_config((LayerConfig(RecurrentConfig("lstm", 20), FeedForwardConfig(32)),))
    found = timed(config)
    assert found.points[CELL] == ((0, 0.0), (1, LSTM))
    assert found.total(config) == machine.seconds(config)
    assert (LayerConfig(RecurrentConfig("lstm", 20), None),) in [one.encoder for one in machine.opened]


def test_formats_are_kinds_of_their_own(machine: Machine) -> None:
    names = [name for name in linear_names(CONFIG) if name.startswith("encoder.0.")]
    config = with_formats(CONFIG, dict.fromkeys(names, INT8_DYNAMIC))
    found = timed(config)
    whole = {kind: points[-1] for kind, points in found.points.items()}
    assert whole == {
        "heads of 8, int8_dynamic int8_dynamic": (4, 4 * HEAD / 2),
        "gelu neurons, int8_dynamic int8_dynamic": (96, 96 * NEURON / 2),
        HEADS: (10, 10 * HEAD),
        NEURONS: (64, 64 * NEURON),
        "heads of 4, float32 float32": (2, 2 * HEAD),
    }
    assert found.total(config) == machine.seconds(config) < machine.seconds(CONFIG)
    assert kind_of(FeedForwardConfig(8, "relu", INT8_DYNAMIC, FLOAT32)) == "relu neurons, int8_dynamic float32"


def test_groups_of_heads_are_timed_whole(machine: Machine) -> None:
    config = tiny_config((layer(12, 8, 0, group=3),))
    kind = "heads of 8 in groups of 3, float32 float32"
    times = timed(config)
    assert kind_of(config.encoder[0].mixer) == kind
    assert units(config.encoder[0].mixer) == 4
    assert times.points[kind] == tuple((number, HEAD * number) for number in (0, 1, 2, 3, 4))
    heads = {(one.mixer.heads, one.mixer.group) for opened in machine.opened for one in opened.encoder if one.mixer}
    assert heads == {(3, 3), (6, 3), (9, 3), (12, 3)}


def test_times_are_never_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that seems to cost nothing, and heads that seem to make it faster."""
    seconds = {0: 2.0, 1: 1.5}
    monkeypatch.setattr(
        module, "opened", lambda config, works, **how: lambda: seconds[len(config.encoder)] - 0.1 * bool(config.layers)
    )
    found = timed(tiny_config((layer(2, 8, 0),)))
    assert (found.outside, found.layer) == (2.0, 0.0)
    assert {second for _, second in found.points[HEADS]} == {0.0}


def test_tables_are_small_and_ids_are_in_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 16)
    config = tiny_config((layer(),), pad_id=20)
    before = WORKS[0].batches[0]["input_ids"].copy()
    timed(config)
    assert {one.embedding.vocab_size for one in machine.opened} == {16}
    assert {one.text.pad_id for one in machine.opened} == {15}
    for works in machine.fed:
        assert (works[0].batches[0]["input_ids"] == before % 16).all()
        assert works[0].name == WORKS[0].name
        assert (works[0].batches[0]["attention_mask"] == WORKS[0].batches[0]["attention_mask"]).all()
    assert (WORKS[0].batches[0]["input_ids"] == before).all()
    machine.opened.clear()
    monkeypatch.setattr(module, "ROWS", 2048)
    timed(config)
    assert {one.embedding.vocab_size for one in machine.opened} == {VOCAB}


def test_a_machine_is_measured_once(machine: Machine, tmp_path: Path) -> None:
    stores = [tmp_path / "run.json", tmp_path / "cache" / "sublayers.json"]
    first = timed(CONFIG, stores=stores)
    count_of = len(machine.opened)
    again = timed(CONFIG, stores=stores)
    assert len(machine.opened) == count_of > 0
    assert again == replace(first, measured="from the cache")
    stores[0].unlink()
    assert timed(CONFIG, stores=stores) == again
    assert stores[0].is_file()  # the run keeps what the machine knew
    assert len(machine.opened) == count_of


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ("forms", {"forms": Forms(layout="padded")}),
        ("threads", {"threads": 2}),
        ("seconds", {"seconds": 0.001}),
        ("workload", {"works": (shape_workload(2, 9, VOCAB, seed=0),)}),
        ("formats", {"config": with_formats(CONFIG, dict.fromkeys(linear_names(CONFIG), INT8_DYNAMIC))}),
        ("more units", {"config": CONFIG.with_layers((layer(4, 8, 97), *CONFIG.encoder[1:]))}),
    ],
)
def test_what_was_not_measured_is(machine: Machine, tmp_path: Path, changed: str, options: dict[str, Any]) -> None:
    stores = [tmp_path / "run.json"]
    timed(CONFIG, stores=stores)
    machine.opened.clear()
    timed(options.pop("config", CONFIG), options.pop("works", WORKS), stores=stores, **options)
    assert machine.opened, changed
    machine.opened.clear()
    timed(CONFIG, stores=stores)
    assert not machine.opened


def test_a_model_with_fewer_layers_of_the_same_kinds_needs_no_more(machine: Machine, tmp_path: Path) -> None:
    stores = [tmp_path / "run.json"]
    timed(CONFIG, stores=stores)
    machine.opened.clear()
    timed(CONFIG.with_layers((*CONFIG.encoder, layer(3, 8, 50))), stores=stores)
    assert not machine.opened


def test_graphs_are_told_of() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.work: list[list] = []

        def start(self, title: str, total: int | None, unit: str) -> None:
            self.work.append([title, total, unit, 0, False])

        def advance(self, n: int = 1, note: str = "") -> None:
            self.work[-1][3] += n

        def done(self, note: str = "") -> None:
            self.work[-1][4] = True

    recorder = Recorder()
    config = tiny_config((layer(1, 8, 16),))
    timed(config, progress=recorder)
    assert recorder.work == [["time heads and neurons", 4, "graphs", 4, True]]


def test_times_go_through_json() -> None:
    times = SublayerTimes(1.5, 0.25, {NEURONS: ((0, 0.0), (32, 1.0)), HEADS: ((0, 0.0), (2, 5.0))})
    assert SublayerTimes.from_dict(json.loads(json.dumps(times.to_dict()))) == replace(times, measured="from the cache")
    for broken in (
        {},
        {"outside": 1.0, "layer": 1.0, "points": {"a": [[1]]}},
        {"outside": "x", "layer": 1, "points": {}},
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            SublayerTimes.from_dict(broken)


def test_speed_is_the_median_ratio_of_whole_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes 6 s and the second 2; each is slow in one round of its own."""
    opened: list[tuple[TransformerConfig, Any, dict[str, Any]]] = []

    def open_one(config: TransformerConfig, works: Any, **how: Any) -> Callable[[], float]:
        opened.append((config, works, how))
        first, rounds = config == CONFIG, count()
        return lambda: (6.0 if first else 2.0) * (9.0 if next(rounds) == (2 if first else 4) else 1.0)

    monkeypatch.setattr(module, "opened", open_one)
    found = speed(CONFIG, tiny_config((layer(),)), WORKS, forms=Forms(), threads=2, seconds=0.0)
    assert found.ratio == 3.0
    assert found.low < 3.0 < found.high
    how = {"forms": Forms(), "threads": 2, "provider": "cpu"}
    assert opened == [(CONFIG, WORKS, how), (tiny_config((layer(),)), WORKS, how)]  # whole tables


# --- models that write ---

OF_WRITERS = {
    "decoder heads": 0.5,
    "cross heads": 0.375,
    "decoder neurons": 0.015625,
    "second layer": 2.0,
    "row": 0.125,
}
WRITING = tuple(writing(work, most=5) for work in WORKS)


def seconds_of_a_writer(config: TransformerConfig) -> float:
    """Its encoder runs where something attends to it; the output layer takes what its rows do."""
    rate = OF_WRITERS
    total = 16.0 + rate["row"] * config.decoder_embedding.vocab_size + rate["second layer"] * len(config.decoder)
    for one in config.decoder:
        total += 0 if one.mixer is None else rate["decoder heads"] * units(one.mixer)
        total += 0 if one.cross is None else rate["cross heads"] * units(one.cross)
        total += 0 if one.ffn is None else rate["decoder neurons"] * one.ffn.width
    read = any(one.cross is not None for one in config.decoder)
    return total + (Machine.seconds(replace(config, decoder=(), head=None, target=None)) if read else 0.0)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TransformerConfig, Sequence[Workload]]]:
    opened: list[tuple[TransformerConfig, Sequence[Workload]]] = []

    def open_one(config: TransformerConfig, works: Sequence[Workload], **how: Any) -> Callable[[], float]:
        opened.append((config, works))
        found = seconds_of_a_writer(config) if config.decoder else Machine.seconds(config)
        return lambda: found

    monkeypatch.setattr(module, "opened", open_one)
    return opened


@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_writer_takes_is_the_sum_of_its_parts(
    kind: str, writers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole tables, though most graphs have small ones."""
    monkeypatch.setattr(module, "ROWS", 16)
    config = WRITERS[kind]
    if any(isinstance(one.mixer, RecurrentConfig) for one in config.decoder):
        config = config.with_layers(config.encoder, tuple(replace(one, mixer=None) for one in config.decoder))
    found = timed(config, WRITING)
    assert found.total(config) == seconds_of_a_writer(config)
    assert found.decoder_layer == OF_WRITERS["second layer"]
    assert found.layer == (LAYER if config.encoder else 0.0)
    fewer = config.with_layers(config.encoder[:1], config.decoder[1:])
    assert found.total(fewer) == seconds_of_a_writer(fewer)
    assert SublayerTimes.from_dict(json.loads(json.dumps(found.to_dict()))) == replace(found, measured="from the cache")


def test_graphs_that_write_have_one_layer_and_the_encoder_stands_alone(
    writers: list[tuple[TransformerConfig, Sequence[Workload]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS", 16)
    config = replace(WRITERS["own table"], head=LanguageHead(20, 21))
    timed(config, WRITING)
    encoders = [(one, works) for one, works in writers if not one.decoder]
    whole, *small = [(one, works) for one, works in writers if one.decoder]
    assert {tuple(batch) for _, works in encoders for work in works for batch in work.batches} == {
        ("input_ids", "attention_mask")
    }
    assert all(one.head is None and one.target is None for one, _ in encoders)
    assert whole[0].decoder_embedding.vocab_size == config.decoder_embedding.vocab_size
    assert whole[1] == WRITING
    assert {one.decoder_embedding.vocab_size for one, _ in small} == {16}
    assert {(one.head.start_id, one.head.end_id) for one, _ in small if isinstance(one.head, LanguageHead)} == {
        (15, 15)
    }
    assert {int(batch["max_new_tokens"]) for _, works in small for work in works for batch in work.batches} == {5}
    assert [len(one.decoder) for one, _ in small[:2]] == [1, 2]
    assert all(len(one.decoder) == 1 for one, _ in small[2:])
    assert {one.encoder for one, _ in small} == {(LayerConfig(None, None),)}


def test_how_much_is_written_is_part_of_what_was_timed(writers: list[Any], tmp_path: Path) -> None:
    stores = [tmp_path / "run.json"]
    timed(WRITERS["alone"], WRITING, stores=stores)
    count_of = len(writers)
    timed(WRITERS["alone"], WRITING, stores=stores)
    assert len(writers) == count_of
    timed(WRITERS["alone"], [writing(work, most=6) for work in WORKS], stores=stores)
    assert len(writers) == 2 * count_of


def test_no_text_of_a_timed_graph_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[TransformerConfig, dict[str, np.ndarray]]] = []

    def passes(
        config: TransformerConfig, state: dict[str, np.ndarray], *_: Any, **__: Any
    ) -> Callable[[], list[float]]:
        given.append((config, state))
        return lambda: [1.0]

    monkeypatch.setattr(module, "graph_pass", passes)
    for kind in ("post", "alone"):
        module.opened(WRITERS[kind], WRITING, forms=Forms(), threads=1, provider="cpu")
        config, state = given.pop()
        (ends,) = np.nonzero(state["head.bias"] < -1e8)
        assert ends.tolist() == [config.head.end_id]
        session = open_session(build_generator(config, state).SerializeToString(), threads=1)
        sequences = session.run(["sequences"], dict(WRITING[0].batches[0]))[0]
        assert sequences.shape == (2, 1, 5)
        assert not (sequences == config.head.end_id).any()


@pytest.mark.parametrize("kind", ["post", "grouped", "lstm", "alone"])
def test_real_graphs_that_write_are_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST", 1)
    config = WRITERS[kind]
    found = timed(config, WRITING)
    assert found.total(config) > found.outside >= 0  # a fit to few and noisy times may leave nothing outside
    assert any(name.startswith("cross heads of ") for name in found.points) == bool(config.encoder)
    assert any(name.startswith("decoder relu neurons") for name in found.points)
    assert ("the decoder's layer without sub-layers" in {row["part"] for row in found.rows()}) == bool(
        found.decoder_layer
    )
    one = speed(config, config, WRITING, forms=Forms(), threads=1, seconds=0.0)
    assert 0 < one.low <= one.ratio <= one.high


def test_a_pass_is_the_sum_over_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "graph_pass", lambda *given, **how: lambda: [0.5, 2.0])
    assert module.opened(CONFIG, WORKS, forms=Forms(), threads=1, provider="cpu")() == 2.5


def test_real_graphs_of_every_kind_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST", 1)
    cell = LayerConfig(RecurrentConfig("gru", 20), None)
    config = tiny_config((layer(2, 8, 40), cell))
    config = with_formats(config, dict.fromkeys(["encoder.0.ffn.up", "encoder.0.ffn.down"], INT8_DYNAMIC))
    found = timed(config)
    assert found.outside > 0
    assert found.layer >= 0
    assert {kind: [n for n, _ in own] for kind, own in found.points.items()} == {
        HEADS: [0, 1, 2],
        "gelu neurons, int8_dynamic int8_dynamic": [0, 32, 40],
        "gru of 20 units, float32 float32": [0, 1],
    }
    assert all(np.isfinite(seconds) and seconds >= 0 for own in found.points.values() for _, seconds in own)
    assert found.total(config) > 0
    one = speed(config, config, WORKS, forms=Forms(), threads=1, seconds=0.0)
    assert 0 < one.low <= one.ratio <= one.high
