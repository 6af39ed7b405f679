"""Measurements are kept, and taken up on the machine that made them alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import search_data, tiny

from slimformer.compress import latencies
from slimformer.compress.latencies import Latencies, measure_stages
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
