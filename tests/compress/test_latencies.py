"""Measurements are kept, and taken up on the machine that made them alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import translator
from tiny import search_data, tiny

from slimformer.compress import latencies
from slimformer.compress.latencies import Latencies, build_workloads, measure_stages, most_written
from slimformer.export.latency import shape_workload
from slimformer.transformer.data import TextData, TextRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.progress import SILENT


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
        return SimpleNamespace(timings=timings, models=models, to_dict=dict)

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
