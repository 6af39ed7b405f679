"""Measurements are kept, and taken up on the machine that made them alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import translator, writer
from tiny import layer, search_data, tiny, tiny_config

from slimformer.compress import latencies
from slimformer.compress.latencies import Latencies, as_long, build_workloads, measure_stages, most_written
from slimformer.export.latency import LatencyResult, ModelCost, Timing, Workload, WorkloadSize, shape_workload
from slimformer.transformer.data import Pair, PairData, TextData, TextRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.progress import SILENT
from slimformer.transformer.quantization import quantized
from slimformer.transformer.translation import read_pairs


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that models are timed; every ratio is the number of that time."""
    found: list[int] = []

    def compare(graphs: dict[str, Path], workloads: dict[str, Any], **_: Any) -> Any:
        found.append(len(found) + 1)
        numbers = dict.fromkeys(("ratio", "ratio_low", "ratio_high"), float(found[-1]))
        numbers |= dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "texts_per_second"), 1.0)
        timings = [SimpleNamespace(model=graph, workload=one, **numbers) for graph in graphs for one in workloads]
        models = [SimpleNamespace(name=graph, peak_mib=1.0) for graph in graphs]
        return SimpleNamespace(timings=timings, models=models, workloads=(), to_dict=dict)

    monkeypatch.setattr(latencies, "compare", compare)
    return found


def measured(path: Path) -> Latencies:
    stage = SimpleNamespace(
        checkpoint=tiny(), entry={"layout": "padded"}, folder=Path("0-original"), graph=Path("model.onnx")
    )
    return measure_stages(
        [stage],  # type: ignore[list-item]
        search_data(),
        path,
        threads=1,
        provider="cpu",
        seed=0,
        progress=SILENT,
    )


def test_a_measurement_is_kept(tmp_path: Path, rounds: list[int]) -> None:
    first = measured(tmp_path / "latency.json")
    assert measured(tmp_path / "latency.json") == first
    assert rounds == [1]
    assert first.timings["0-original"]["single"]["ratio"] == 1.0


def test_stages_of_one_shape_and_other_forms_are_timed_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def compare(graphs: dict[str, Path], workloads: dict[str, Any], **_: Any) -> Any:
        timed.extend(graphs)
        raise InterruptedError

    monkeypatch.setattr(latencies, "compare", compare)
    forms: list[dict[str, Any]] = [{}, {"forms": {"norm": "skip"}}, {"forms": {"norm": "separate"}}]
    stages = [
        SimpleNamespace(
            checkpoint=tiny(), entry={"layout": "packed", "forms": form}, folder=Path(str(i)), graph=Path("model.onnx")
        )
        for i, form in enumerate([*forms, forms[1]])
    ]
    with pytest.raises(InterruptedError):
        measure_stages(
            stages,  # type: ignore[arg-type]
            search_data(),
            tmp_path / "latency.json",
            threads=1,
            provider="cpu",
            seed=0,
            progress=SILENT,
        )
    assert timed == ["0", "1", "2"]


def test_a_measurement_of_another_machine_is_not_taken_up(
    tmp_path: Path, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tmp_path / "latency.json")
    other = {**latencies.describe_machine(), "cpu": "another"}
    monkeypatch.setattr(latencies, "describe_machine", lambda: other)
    assert measured(tmp_path / "latency.json").timings["0-original"]["single"]["ratio"] == 2.0
    assert rounds == [1, 2]


def test_a_damaged_measurement_is_named(tmp_path: Path, rounds: list[int]) -> None:
    path = tmp_path / "latency.json"
    path.write_text('{"machine": {}}', encoding="utf-8")
    with pytest.raises(InputError, match=r"latency\.json: damaged; remove it"):
        measured(path)
    assert not rounds


# --- language models ---

TEXTS = TextData((), (), tuple(TextRow(text, "") for text in ("open", "open the file", "print the page " * 9)), ())


def test_a_language_model_goes_on_from_the_beginnings_of_texts() -> None:
    """24 positions: prompts of at most 12 tokens, never the end token (3), and 12 tokens more at most."""
    model = translator(encoder=0)
    workloads, descriptions = build_workloads(model, TEXTS, seed=0, texts=3)
    whole = model.text_encoder().encode([row.text for row in TEXTS.test])
    prompts = sorted([ids[:-1] for ids in whole[:2]] + [whole[2][:12]], key=len)
    (batch,) = workloads["sorted"].batches
    assert [
        row[mask > 0].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ] == prompts
    assert {int(one.batches[0]["max_new_tokens"]) for one in workloads.values()} <= {12, 2 * 2 + 10, 2 * 4 + 10}
    assert int(batch["max_new_tokens"]) == 12
    expected = "3 texts in equal parts from rows, cut at 12 tokens; batches of 32, shuffled; written greedily, "
    assert descriptions["mixed"] == f"{expected}up to 12 tokens more"
    assert int(workloads["4 beams"].batches[0]["num_beams"]) == 4


def test_a_prompt_has_to_leave_a_position() -> None:
    model = translator(encoder=0)
    short, long = (shape_workload(1, length, 50, 0) for length in (20, 24))
    assert most_written(model.config, [short]) == 4
    with pytest.raises(InputError, match="24 tokens leave a model of 24 positions none to write to: give less"):
        most_written(model.config, [short, long])
    assert most_written(translator().config, [long]) == 24


def quantized_over_float(
    monkeypatch: pytest.MonkeyPatch, path: Path, seconds: dict[str, tuple[float, ...]]
) -> Latencies:
    """Four stages, the last two quantized, timed in two processes of so many rounds on every workload."""

    def compare(graphs: dict[str, Path], workloads: dict[str, Any], **_: Any) -> LatencyResult:
        return LatencyResult(
            baseline="0-original",
            provider="cpu",
            threads=1,
            threads_wished=1,
            processes=2,
            elapsed_seconds=0.0,
            workloads=tuple(WorkloadSize(one, 1, 1, 1, 1, 3) for one in workloads),
            models=tuple(ModelCost(graph, "", 0.0, 1.0) for graph in graphs),
            timings=tuple(
                Timing(graph, one, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, (seconds[graph], seconds[graph]))
                for graph in graphs
                for one in workloads
            ),
        )

    monkeypatch.setattr(latencies, "compare", compare)
    pruned = tiny(tiny_config((layer(1), layer())))
    models = {"0-original": tiny(), "1-prune": pruned, "2-quantize": quantized(pruned, bits=8, tables=False)}
    models["3-quantize"] = quantized(models["2-quantize"], bits=8)
    stages: list[Any] = [
        SimpleNamespace(checkpoint=model, entry={"layout": "packed"}, folder=Path(name), graph=Path("model.onnx"))
        for name, model in models.items()
    ]
    return measure_stages(stages, search_data(), path, threads=1, provider="cpu", seed=0, progress=SILENT)


def test_a_quantized_stage_is_held_against_the_float_stage_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round: 2 / 4, 3 / 4 and 2.4 / 4, whose median is 0.6; the original, slower than both, is not asked."""
    seconds = {"0-original": (9.0, 9.0, 9.0), "1-prune": (2.0, 3.0, 2.4), "2-quantize": (4.0, 4.0, 4.0)}
    seconds["3-quantize"] = (1.0, 1.0, 1.0)  # of no interest: what comes before it is quantized already
    found = quantized_over_float(monkeypatch, tmp_path / "latency.json", seconds)
    assert list(found.over_float) == ["2-quantize"]
    for ratio in found.over_float["2-quantize"].values():
        assert ratio["ratio"] == pytest.approx(0.6)
        assert 0.5 <= ratio["low"] <= 0.6 <= ratio["high"] <= 0.75
    assert set(found.over_float["2-quantize"]) == set(found.descriptions)
    assert quantized_over_float(monkeypatch, tmp_path / "latency.json", {}) == found  # read back


def test_batches_write_as_long_as_training_pairs_are() -> None:
    """Five words, as many tokens and two more; targets of one word: 3 tokens for 7."""
    model = writer("post")
    pairs = tuple(Pair("print one column by date", "print", str(i)) for i in range(4))
    assert [(len(source), len(target)) for source, target in read_pairs(model, pairs).ids] == [(7, 3)] * 4
    batches = [{"input_ids": np.zeros((2, tokens), np.int64), "max_new_tokens": np.array(9)} for tokens in (10, 22, 1)]
    work = Workload("sorted", tuple(batches))
    found = as_long(work, model, PairData(pairs, (), (), ()))
    assert [int(batch["max_new_tokens"]) for batch in found.batches] == [4, 9, 1]
    assert [int(batch["max_new_tokens"]) for batch in work.batches] == [9, 9, 9]
    assert as_long(work, model, PairData((), (), (), ())) is work
