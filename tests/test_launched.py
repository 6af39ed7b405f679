"""Whole commands in two processes, as `accelerate launch` and torchrun start them: one of them judges and writes."""

import json
from pathlib import Path

import pytest
import together
from tiny import labelled_data, tiny

from slimformer.transformer.loading import load

COMPRESS = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/compress"]
import test_pipeline as t
from slimformer.compress.distill import Distill
from slimformer.compress.gradual import Gradual
from slimformer.compress.recipe import Recipe
t.pipeline.measure_stages = t.fake_latencies
t.form_times.SECONDS = 0.0
steps = (Gradual(rounds=2, steps=4, cost=0.6, batch_tokens=150), Distill(steps=6, batch_tokens=150, hidden=0.1))
result = t.go(t.Path({out!r}), recipe=Recipe(steps), resume={resume})
print(result.drop.difference, result.bundle, flush=True)
"""
TESTS = Path(__file__).parent
pytestmark = pytest.mark.timeout(900)  # other processes do the work, where cores are few one after the other


def compressed(out: Path, number: int, *, resume: bool = False) -> list[str]:
    """What each process prints of its result."""
    return together.start("-c", COMPRESS.format(tests=str(TESTS), out=str(out), resume=resume), number=number)


def test_compress(tmp_path: Path) -> None:
    """Pruning by the main process alone, rounds and distillation by all: what comes out is what one process makes."""
    (alone,), (main, other) = compressed(tmp_path / "one", 1), compressed(tmp_path / "two", 2)
    assert main == other
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    for before, after in zip(one["stages"], two["stages"], strict=True):
        assert after["accuracy"]["test"]["metrics"] == pytest.approx(before["accuracy"]["test"]["metrics"], abs=0.5)
    assert two["stages"][2]["details"]["losses"] == pytest.approx(one["stages"][2]["details"]["losses"], rel=1e-3)
    assert float(main.split()[0]) == pytest.approx(float(alone.split()[0]), abs=0.5)
    before = (tmp_path / "two/report.json").stat().st_mtime_ns
    assert compressed(tmp_path / "two", 2, resume=True) == [main, other]
    assert (tmp_path / "two/report.json").stat().st_mtime_ns >= before


def test_train(tmp_path: Path) -> None:
    """Epochs are judged by the main process, which alone prints; the model is that of one process."""
    data = labelled_data()
    (tmp_path / "data").mkdir()
    for name in ("train", "valid", "test"):
        rows = [json.dumps({"text": row.text, "label": row.label}) + "\n" for row in getattr(data, name)]
        (tmp_path / f"data/{name}.jsonl").write_text("".join(rows))
    tiny().save(tmp_path / "model")
    found = {}
    for number in (1, 2):
        out = tmp_path / f"out{number}"
        command = ["train", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--epochs", "2", "-o", str(out)]
        printed = together.start("-m", "slimformer.cli", *command, number=number)
        assert "test, once, with epoch" in printed[0]
        assert printed[1:] == [""] * (number - 1)
        assert not (tmp_path / f".out{number}.training").exists()
        found[number] = load(out)
    for name, value in found[1].state.items():
        assert (value - found[2].state[name]).abs().max() < 1e-3
    log = [one.provenance["training"]["log"] for one in found.values()]
    assert log[0]["losses"] == pytest.approx(log[1]["losses"], abs=1e-4)
