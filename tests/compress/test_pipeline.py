"""The whole job on a tiny model: what it writes and says, and that no interruption changes what comes out."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from models import pair_data, translator
from tiny import LABELS, SPECIAL, WORDS, labelled_data, search_data, tiny, tiny_config, with_head

from slimformer.compress import latencies, pipeline
from slimformer.compress import stage as stage_module
from slimformer.compress.budget import MaxDrop
from slimformer.compress.distill import Distill
from slimformer.compress.latencies import Latencies
from slimformer.compress.pipeline import Result, compress
from slimformer.compress.prune import Prune
from slimformer.compress.quantize import Quantize
from slimformer.compress.recipe import Recipe
from slimformer.compress.stage import Stage, read_stage
from slimformer.compress.step import StepContext, StepResult
from slimformer.compress.trim import Trim
from slimformer.export import decoding_parity, form_times, machine, validation
from slimformer.export.bundle import export
from slimformer.export.form_times import Chosen
from slimformer.export.forms import Forms
from slimformer.export.report import write_report
from slimformer.export.runtime import load_bundle
from slimformer.export.summary import report_text
from slimformer.export.validation import TEXTS as PARITY_TEXTS
from slimformer.export.validation import Parity, check_parity
from slimformer.transformer import training
from slimformer.transformer.architecture import Architecture, new_classifier
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import ClassificationHead, TransformerConfig
from slimformer.transformer.data import SearchData, TextData, TextRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.evaluation import Memory, evaluate
from slimformer.transformer.quantization import halved, quantized
from slimformer.transformer.statistics import Interval
from slimformer.transformer.subwords import train_subwords
from slimformer.transformer.text_metrics import pair_signatures, reading_metrics, signatures, summary_metrics
from slimformer.transformer.tokenizer import wordpiece_from_vocab

MODEL, DATA, PAIRS = tiny(), search_data(), pair_data()
TEXTS = TextData(
    *(tuple(TextRow(pair.source, pair.group) for pair in rows) for rows in (PAIRS.train, PAIRS.valid, PAIRS.test)),
    PAIRS.texts,
)
INT8 = Quantize(bits=7, samples=16)
WRITTEN = 8  # texts of parity
RECIPE = Recipe(
    (
        Prune(cost=0.6, samples=8, agreement=0.0, refit_samples=16, multiple=8),
        Distill(steps=4, batch_tokens=200, pages=4, lr=1e-3),
        INT8,
    )
)
NAMES = ["original", "prune", "distill", "quantize"]
STAGE = {"model", "bundle", "stage.json", "vectors.npz"}


def summarizer() -> Checkpoint:
    """The translator, made to write summaries."""
    made = translator()
    return replace(made, config=replace(made.config, head=replace(made.config.head, kind="summarization")))


LAST = "encoder.1.ffn.down.weight"
FOLDERS = [f"{i}-{name}" for i, name in enumerate(NAMES)]


def fake_latencies(stages: Sequence[Stage], *_: Any, **__: Any) -> Latencies:
    """Timings out of the air: each stage twice as fast as the one before."""
    timings = {}
    for i, stage in enumerate(stages):
        one = {"ratio": 2.0**i, "low": 1.9**i, "high": 2.1**i, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0}
        one["texts_per_second"] = 9.0
        timings[stage.folder.name] = {workload: one for workload in ("sorted", "mixed", "single")}  # noqa: C420
    return Latencies(timings, dict.fromkeys(timings, 50.0), {"sorted": "texts in order"})


def plain_report(report: dict[str, Any], out: Path) -> None:
    """The report without its pages, which take longer than a stage of a tiny model."""
    (out / "report.json").write_text(json.dumps(report), encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Neither latencies nor forms are measured and no pages drawn, but where a test undoes this.

    Parity takes few texts: on as many as by default it takes longer than all the rest of a run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "measure_stages", fake_latencies)
        patch.setattr(pipeline, "write_report", plain_report)
        patch.setattr(form_times, "SECONDS", 0.0)
        patch.setattr(decoding_parity, "TEXTS", WRITTEN)
        patch.setattr(validation, "TEXTS", 16)
        yield


def go(out: Path, **options: Any) -> Result:
    given = {"model": MODEL, "data": DATA, "recipe": RECIPE, "threads": 1, **options}
    return compress(given.pop("model"), given.pop("data"), out=out, **given)


@dataclass(frozen=True)
class Finished:
    out: Path
    result: Result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("run") / "deep" / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "write_report", write_report)
        return Finished(out, go(out, max_drop="90", command="slimformer compress tiny"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def outcome(out: Path) -> tuple[dict[str, bytes], list[Any]]:
    """What must be the same in equal runs: the delivered model, the bundle's graph, every stage's numbers."""
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    delivered = {f"model/{name}": data for name, data in files(out / "model").items()}
    delivered["graph"] = (out / "bundle/onnx/model.onnx").read_bytes()
    kept = ("name", "options", "accuracy", "parity", "bytes")
    entries = [{key: stage[key] for key in kept} for stage in report["stages"]]
    losses = [stage["details"].get("losses") for stage in report["stages"]]
    return delivered, [entries, losses, report["verdict"]]


# --- what a run leaves ---


def test_the_output_has_all_parts_and_nothing_else(finished: Finished) -> None:
    out = finished.out
    parts = {path.name for path in out.iterdir()}
    assert parts == {"run.json", "report.json", "report.md", "report.html", "stages", "model", "bundle", "forms.json"}
    assert sorted(path.name for path in (out / "stages").iterdir()) == FOLDERS
    for folder in FOLDERS:
        assert {path.name for path in (out / "stages" / folder).iterdir()} == STAGE
    assert files(out / "model") == files(out / "stages/3-quantize/model")
    assert files(out / "bundle") == files(out / "stages/3-quantize/bundle")


def test_the_result_is_what_was_delivered(finished: Finished) -> None:
    result, out = finished.result, finished.out
    own = load_own(out / "model")
    assert own.config == result.checkpoint.config
    assert all(torch.equal(own.state[name], value) for name, value in result.checkpoint.state.items())
    assert result.bundle == out / "bundle"
    assert load_bundle(result.bundle).embed(["open the file"]).shape == (1, 16)
    assert (result.met, result.exit_code) == (True, 0)
    assert (result.speedup.ratio, result.speedup.low, result.speedup.high) == (8.0, 1.9**3, 2.1**3)
    assert json.loads(json.dumps(result.report)) == json.loads((out / "report.json").read_text(encoding="utf-8"))


def test_the_report_says_what_was_done(finished: Finished) -> None:
    report = finished.result.report
    assert report["format"] == 1
    assert report["command"] == "slimformer compress tiny"
    assert report["model"]["source"] == "tiny"
    assert report["model"]["parameters"] == sum(value.numel() for value in MODEL.state.values())
    assert report["data"]["rows"] == {"pages": 16, "valid": 12, "test": 12, "texts": 80}
    assert report["data"]["fingerprints"] == DATA.fingerprints()
    assert report["data"]["overlaps"] == DATA.overlaps()
    assert report["data"]["task"] == "embedding"
    assert (report["threads"], report["provider"], report["seed"]) == (1, "cpu", 0)
    assert report["deciding"] == "nDCG@10"
    assert report["metric_names"] == ["nDCG@10", "recall@1", "recall@10", "MRR"]
    assert [step["name"] for step in report["recipe"]] == NAMES[1:]
    assert report["workloads"] == {"sorted": "texts in order"}
    assert report["verdict"]["budgets"][0]["flag"] == "--max-drop"


def test_the_report_has_every_stage_with_its_numbers(finished: Finished) -> None:
    stages = finished.result.report["stages"]
    assert [stage["name"] for stage in stages] == NAMES
    assert [stage["layout"] for stage in stages] == ["padded", "packed", "packed", "packed"]
    assert [stage["format"] for stage in stages] == ["fp32", "fp32", "fp32", "int8"]
    for stage, folder in zip(stages, FOLDERS, strict=True):
        model = load_own(finished.out / "stages" / folder / "model")
        graph = finished.out / "stages" / folder / "bundle/onnx/model.onnx"
        assert stage["bytes"] == graph.stat().st_size
        assert stage["parameters"] == sum(value.numel() for value in model.state.values())
        assert stage["multiply_adds"] == model.config.multiply_adds()
        assert stage["parity"]["passed"]
        assert stage["peak_memory_mib"] == 50.0
        for split in ("valid", "test"):
            said = stage["accuracy"][split]
            assert set(said["metrics"]) == {"nDCG@10", "recall@1", "recall@10", "MRR"}
            assert ("difference" in said) is ("changed" in said) is (stage["name"] != "original")
    assert stages[1]["multiply_adds"] <= 0.6 * stages[0]["multiply_adds"]
    assert stages[3]["parity"]["quantization_relative"] > 0
    assert [stage["parity"]["quantization_relative"] for stage in stages[:3]] == [None] * 3
    assert [stage["latency"]["mixed"]["ratio"] for stage in stages] == [1, 2, 4, 8]


def test_the_report_says_where_the_bytes_of_every_stage_are(finished: Finished) -> None:
    for stage, folder in zip(finished.result.report["stages"], FOLDERS, strict=True):
        found, bundle = stage["accounting"], finished.out / "stages" / folder / "bundle"
        assert sum(part["bytes"] for part in (*found["tensors"], found["smaller"], found["graphs"])) == stage["bytes"]
        tensors = {entry["name"]: entry for entry in found["tensors"]}
        size = MODEL.state["embeddings.tokens.weight"].numel() * (1 if stage["name"] == "quantize" else 4)
        assert tensors["embeddings.tokens.weight"]["bytes"] == size
        assert found["beside"]["files"] == sum(path.is_file() for path in bundle.rglob("*")) - 1
    said = "## Where the bytes are\n\nAfter quantize: tensors over 1 % of"
    assert said in (finished.out / "report.md").read_text(encoding="utf-8")
    assert "Where the bytes are" in (finished.out / "report.html").read_text(encoding="utf-8")


def test_the_differences_are_those_of_the_bundles(finished: Finished) -> None:
    """nDCG@10 of each stage worked out from its bundle's vectors, one relevant page a query."""
    values = []
    for folder, stage in zip(FOLDERS, finished.result.report["stages"], strict=True):
        bundle = load_bundle(finished.out / "stages" / folder / "bundle", threads=1)
        pages = bundle.embed([page.text for page in DATA.pages])
        queries = bundle.embed([query.query for query in DATA.test])
        places = [page.id for page in DATA.pages]
        right = [places.index(query.pages[0]) for query in DATA.test]
        scores = queries @ pages.T
        ranks = (scores > scores[np.arange(len(right)), right][:, None]).sum(1)
        values.append(100 * np.mean(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0)))
        assert stage["accuracy"]["test"]["metrics"]["nDCG@10"] == pytest.approx(values[-1], abs=1e-3)
        if folder != FOLDERS[0]:
            difference = stage["accuracy"]["test"]["difference"]["nDCG@10"]["difference"]
            assert difference == pytest.approx(values[-1] - values[0], abs=1e-3)
    assert finished.result.drop.difference == pytest.approx(values[-1] - values[0], abs=1e-3)


def test_a_finished_run_resumed_does_no_work(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    for name in ("make_stage", "evaluate", "load_bundle"):
        monkeypatch.setattr(pipeline, name, lambda *_, **__: pytest.fail("work was done again"))
    before = outcome(out)
    again = go(out, max_drop="90", resume=True)
    assert outcome(out) == before
    assert again.drop == finished.result.drop
    assert again.exit_code == 0


def test_a_drop_that_cannot_be_proven_ends_with_3_and_still_delivers(finished: Finished, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    shutil.rmtree(out / "bundle")
    path = out / "stages/3-quantize/stage.json"
    entry = json.loads(path.read_text(encoding="utf-8"))
    entry["accuracy"]["test"]["difference"]["nDCG@10"].update(difference=-0.1, one_sided_low=-2.01)
    path.write_text(json.dumps(entry), encoding="utf-8")
    result = go(out, max_drop="2", resume=True)
    assert (result.drop.difference, result.drop.one_sided_low) == (-0.1, -2.01)
    assert (result.met, result.exit_code) == (False, 3)
    assert result.report["verdict"]["budgets"][0]["met"] is False
    assert load_bundle(out / "bundle").embed(["row"]).shape == (1, 16)


def test_without_a_budget_nothing_has_to_be_proven(finished: Finished, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    result = go(out, resume=True)
    assert (result.exit_code, result.report["verdict"]["budgets"]) == (0, [])


def test_a_graph_that_is_not_the_model_ends_with_3(finished: Finished, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    path = out / "stages/1-prune/stage.json"
    entry = json.loads(path.read_text(encoding="utf-8"))
    entry["parity"]["passed"] = False
    path.write_text(json.dumps(entry), encoding="utf-8")
    result = go(out, max_drop="90", resume=True)
    assert result.exit_code == 3
    assert "prune: the exported graph is not close enough" in result.report["verdict"]["lines"][0]


# --- forms of the graphs ---


def own(stage: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage / "bundle/slimformer.json").read_text(encoding="utf-8"))
    return found


def test_forms_are_measured_for_every_stage_but_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(Forms(norm="skip", qkv="separate"), (), ("these texts",), "today")
    asked: list[Any] = []
    monkeypatch.setattr(pipeline, "measured", lambda *words, **ways: asked.append((words, ways)) or chosen)
    recipe = Recipe((Prune(cost=0.6, samples=8, agreement=0.0, refit_samples=16, multiple=8), INT8))
    result = go(tmp_path / "out", recipe=recipe, workload="mixed", max_drop="99")
    stages = [tmp_path / "out/stages" / name for name in ("0-original", "1-prune", "2-quantize")]
    assert own(stages[0])["forms"] == Forms.of_layout("padded").to_dict()
    for stage, entry in zip(stages[1:], result.report["stages"][1:], strict=True):
        assert own(stage)["forms"] == chosen.forms.to_dict()
        assert (entry["forms"]["forms"], entry["layout"]) == (chosen.forms.to_dict(), "packed")
        assert entry["parity"]["passed"]
    assert "forms" not in result.report["stages"][0]
    assert [words[0].config.is_float for words, _ in asked] == [True, False]
    assert [[work.name for work in words[1]] for words, _ in asked] == [["mixed"]] * 2
    assert {ways["threads"] for _, ways in asked} == {1}
    assert {ways["stores"][0] for _, ways in asked} == {tmp_path / "out/forms.json"}


def test_a_portable_run_times_no_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "measured", None)
    out = tmp_path / "out"
    result = go(out, recipe=Recipe((INT8,)), portable=True)
    assert result.report["stages"][1]["forms"]["forms"] == Forms().to_dict()
    assert result.report["stages"][1]["forms"]["notes"] == ["the portable default"]
    assert own(out / "stages/1-quantize")["forms"] == Forms().to_dict()
    with pytest.raises(InputError, match="made with another portable"):
        go(out, recipe=Recipe((INT8,)), resume=True)


def test_an_index_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries by each stage, pages by the original; with pages of its own beside it, in the report, too."""
    monkeypatch.setattr(pipeline, "write_report", write_report)
    contexts: list[StepContext] = []

    def distill(step: Distill, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        contexts.append(context)
        return StepResult(replace(checkpoint, state={**checkpoint.state, LAST: 2 * checkpoint.state[LAST]}))

    monkeypatch.setattr(Distill, "__call__", distill)
    out, recipe = tmp_path / "out", Recipe((Distill(steps=1), INT8))
    result = go(out, recipe=recipe, keep_index=True)
    assert [context.keep_index for context in contexts] == [True]
    index, stages = Memory(), result.report["stages"]
    bundles = [load_bundle(out / f"stages/{name}/bundle", threads=1) for name in ("0-original", "1-distill")]
    whole = evaluate(DATA, bundles[0], "test", memory=index)
    kept, own_pages = (evaluate(DATA, bundles[1], "test", index=one) for one in (index, None))
    found = stages[1]["accuracy"]["test"]
    assert found["metrics"] == kept.values() != own_pages.values() == found["own_pages"]["metrics"]
    for one, entry in ((kept, found), (own_pages, found["own_pages"])):
        drop = one.values()["nDCG@10"] - whole.values()["nDCG@10"]
        assert entry["difference"]["nDCG@10"]["difference"] == pytest.approx(drop)
        assert set(entry) >= {"metrics", "difference", "changed"}
    assert stages[0]["accuracy"]["test"]["metrics"] == whole.values()
    assert set(stages[0]["accuracy"]["valid"]["own_pages"]) == {"metrics"}
    assert result.drop.difference == stages[2]["accuracy"]["test"]["difference"]["nDCG@10"]["difference"]
    page = (out / "report.md").read_text(encoding="utf-8")
    for title in ("queries by each model, pages by the original", "queries and pages by each model"):
        assert f"### On test: {title}\n" in page
    assert "pages by the original" in (out / "report.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="made with another keep_index"):
        go(out, recipe=recipe, resume=True)
    for data in (replace(DATA, pages=(), valid=(), test=()), labelled_data()):
        model = MODEL if isinstance(data, SearchData) else with_head(ClassificationHead(LABELS))
        with pytest.raises(InputError, match="there are no pages that an index could be kept of"):
            go(tmp_path / "other", data=data, model=model, keep_index=True)


def test_a_resumed_run_takes_the_forms_that_it_measured(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    store = out / "forms.json"
    kept = json.loads(store.read_text())
    for entry in kept["entries"].values():
        entry["found"]["forms"]["qkv"] = "separate"
    store.write_text(json.dumps(kept))
    shutil.rmtree(out / "stages/2-distill")
    shutil.rmtree(out / "stages/3-quantize")
    monkeypatch.setattr(form_times, "choose", None)
    result = go(out, resume=True)
    assert [stage["forms"]["forms"]["qkv"] for stage in result.report["stages"][2:]] == ["separate"] * 2
    assert "from the cache" in result.report["stages"][3]["forms"]["notes"][-1]


def test_a_graph_too_far_from_pytorch_gets_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(Forms(norm="skip"), (), (), "today")
    real = stage_module.check_parity

    def check(model: Checkpoint, bundle: Path, **ways: Any) -> Parity:
        parity = real(model, bundle, **ways)
        return replace(parity, passed=own(bundle.parent)["forms"]["norm"] == "separate")

    monkeypatch.setattr(pipeline, "measured", lambda *_, **__: chosen)
    monkeypatch.setattr(stage_module, "check_parity", check)
    result = go(tmp_path / "out", recipe=Recipe((INT8,)), max_drop="99")
    last = result.report["stages"][1]
    assert last["parity"]["passed"]
    assert last["forms"]["forms"] == own(tmp_path / "out/stages/1-quantize")["forms"] == Forms().to_dict()
    assert last["forms"]["notes"] == [
        "not close enough to PyTorch, so the default: layout packed, norm skip, attention fused, qkv merged, gelu fused"
    ]
    assert result.exit_code == 0


# --- interruptions ---


class Fault(Exception):
    pass


def inject(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything the pipeline calls fails the first time, once before it is done and once after."""
    failed: list[str] = []

    def wrap(owner: Any, name: str, label: Callable[..., str]) -> None:
        real, fixed = getattr(owner, name), isinstance(vars(owner)[name], staticmethod)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            for moment in ("before", "after"):
                key = f"{name} {label(*args, **kwargs)} {moment}"
                if moment == "after":
                    value = real(*args, **kwargs)
                if key not in failed:
                    failed.append(key)
                    raise Fault(key)
            return value

        monkeypatch.setattr(owner, name, staticmethod(faulty) if fixed else faulty)

    wrap(pipeline, "make_stage", lambda folder, *_, **__: folder.name)
    wrap(pipeline, "measure_stages", lambda *_, **__: "")
    wrap(pipeline, "evaluate", lambda data, bundle, split, **_: f"{bundle.path.parent.name} {split}")
    wrap(Stage, "finish", lambda stage: f"{stage.folder.name} {sorted(stage.entry.get('accuracy', ()))}")
    wrap(pipeline._Run, "_deliver", lambda source, target: target.name)
    for kind in (Prune, Distill, Quantize):
        wrap(kind, "__call__", lambda step, *_: step.name)
    return failed


def test_failures_anywhere_change_nothing(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run, broken off at every call in turn and resumed each time."""
    failed = inject(monkeypatch)
    out, result = tmp_path / "out", None
    while result is None:
        try:
            result = go(out, max_drop="90", command="slimformer compress tiny", resume=True)
        except Fault:
            assert len(failed) < 100
    assert len(failed) >= 2 * (4 + 1 + 8 + 8 + 2 + 3)
    assert outcome(out) == outcome(finished.out)
    assert files(out).keys() == files(finished.out).keys() - {"report.md", "report.html"}


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_pipeline as t
from slimformer.transformer import training

training.SAVE_SECONDS = 0.0

class Kill:
    def start(self, title, total, unit):
        self.title, self.count = title, 0
    def advance(self, n=1, note=""):
        self.count += n
        if self.title == {title!r} and self.count >= {count}:
            os.kill(os.getpid(), signal.SIGKILL)
    def done(self, note=""):
        pass

t.pipeline.measure_stages = t.fake_latencies
t.form_times.SECONDS = 0.0
t.go(t.Path({out!r}), max_drop="90", command="slimformer compress tiny", progress=Kill())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "count"),
    [
        ("curvature of the projections", 1),
        ("Re-fitting", 2),
        ("teacher", 20),
        ("distill", 1),
        ("distill", 3),
        ("embed", 10),
    ],
)
def test_killed_and_resumed(title: str, count: int, finished: Finished, tmp_path: Path) -> None:
    out, tests = tmp_path / "out", Path(__file__).parent
    program = KILLED.format(tests=str(tests), out=str(out), title=title, count=count)
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (out / "bundle").exists()
    go(out, max_drop="90", command="slimformer compress tiny", resume=True)
    assert outcome(out) == outcome(finished.out)
    assert {path.name for path in (out / "stages/2-distill").iterdir()} == STAGE
    assert not [path for path in out.rglob("*") if "partial" in path.name]


def test_a_stage_half_written_is_made_again(finished: Finished, tmp_path: Path) -> None:
    """What a kill leaves: no stage.json, half a bundle, temporary folders, a cut state of training."""
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    for path in ("report.json", "report.md", "report.html"):
        (out / path).unlink()
    shutil.rmtree(out / "stages/3-quantize")
    stage = out / "stages/2-distill"
    (stage / "stage.json").unlink()
    (stage / "bundle/slimformer.json").unlink()
    (stage / ".bundle.partial-99").mkdir()
    (stage / ".stage.json.partial-99").write_text("{")
    go(out, max_drop="90", command="slimformer compress tiny", resume=True)
    assert outcome(out) == outcome(finished.out)
    assert {path.name for path in stage.iterdir()} == STAGE


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": Recipe((INT8,))}, "recipe"),
        ({"recipe": replace(RECIPE, max_length=20)}, "model, max_length"),
        ({"seed": 1}, "seed"),
        ({"target": "avx2"}, "target"),
        ({"model": tiny(seed=1)}, "model"),
        ({"data": replace(DATA, texts=DATA.texts[1:])}, "data"),
        ({"data": replace(DATA, test=DATA.test[1:])}, "data"),
    ],
    ids=["recipe", "max_length", "seed", "target", "model", "texts", "test"],
)
def test_another_run_is_not_resumed(changes: dict[str, Any], named: str, finished: Finished) -> None:
    before = files(finished.out)
    with pytest.raises(InputError, match=f"was made with another {named}: --force starts anew"):
        go(finished.out, resume=True, **changes)
    assert files(finished.out) == before


def test_an_existing_output_is_kept(finished: Finished, tmp_path: Path) -> None:
    before = files(finished.out)
    with pytest.raises(InputError, match="exists"):
        go(finished.out)
    assert files(finished.out) == before
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not the output of a run"):
        go(tmp_path, resume=True)
    assert files(tmp_path) == {"mine.txt": b"mine"}


def test_force_starts_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(out, recipe=Recipe((INT8,)))
    (out / "old.txt").write_text("of the run before")
    result = go(out, recipe=Recipe((INT8,)), force=True)
    assert result.exit_code == 0
    assert not (out / "old.txt").exists()


def test_force_removes_no_directory_of_others(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not the output of a run"):
        go(tmp_path, recipe=Recipe((INT8,)), force=True)
    assert files(tmp_path) == {"mine.txt": b"mine"}


def test_a_step_that_cannot_be_taken_leaves_the_last_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(out, recipe=Recipe((INT8,)))
    before = files(out)
    with pytest.raises(InputError, match="layers is 9, the model has"):
        go(out, recipe=Recipe((Prune(layers=9),)), force=True)
    assert files(out) == before


def test_a_target_that_cannot_be_proven_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_int8_dot", lambda files: False)
    with pytest.raises(InputError, match="for the target vnni, saturate on this CPU"):
        go(tmp_path / "out", target="vnni", recipe=Recipe((Prune(cost=0.6), Quantize())))
    assert not list(tmp_path.iterdir())


def test_bits_that_a_run_comes_to() -> None:
    steps = (Prune(), Distill(bits=8), Distill(quantization_aware=True, bits=7), Quantize(bits=8), Quantize())
    assert pipeline.int8_bits(Recipe(steps), MODEL) == [7, 8, 0]
    assert pipeline.int8_bits(Recipe(steps[:2]), quantized(MODEL, bits=7)) == [7]


def test_a_target_is_recorded_and_decides_the_bits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "write_report", write_report)
        patch.setattr(machine, "has_int8_dot", lambda files: True)
        report = go(out, target="avx2", recipe=Recipe((Quantize(format="int8_dynamic"),))).report
    assert report["target"] == "avx2"
    assert report["advice"] == machine.advice("avx2")
    assert report["stages"][1]["details"]["weight_bits"] == 7
    notes = json.loads((out / "bundle/slimformer.json").read_text(encoding="utf-8"))["provenance"]
    assert (notes["target"], notes["int8_weight_bits"]) == ("avx2", 7)
    said = "avx2, for the bits of int8 weights"
    assert said in (out / "report.md").read_text(encoding="utf-8")
    assert said in (out / "report.html").read_text(encoding="utf-8")


LABELLED = labelled_data()
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "/nowhere/model"}, "/nowhere/model"),
    "data": ({"data": "/nowhere/data"}, "/nowhere/data"),
    "provider": ({"provider": "tpu"}, "tpu"),
    "device": ({"device": "abacus"}, "abacus"),
    "target": ({"target": "sparc"}, "target 'sparc' is unknown: choose amx, vnni, neon, avx512, avx2"),
    "bfloat16 on a CPU": ({"recipe": Recipe((Prune(), Quantize(format="bfloat16")))}, "no bfloat16 products on a CPU"),
    "some bfloat16 on a CPU": (
        {"recipe": Recipe((Prune(), Quantize(formats=("*.up=bfloat16",))))},
        "no bfloat16 products on a CPU",
    ),
    "a bfloat16 model on a CPU": (
        {"model": halved(MODEL, "bfloat16"), "recipe": Recipe((Quantize(),))},
        "no bfloat16 products on a CPU",
    ),
    "bits of a target": (
        {"target": "avx2", "recipe": Recipe((Distill(quantization_aware=True, bits=8), Quantize()))},
        "8 bits saturate on the target avx2",
    ),
    "bits of the model": (
        {"target": "avx512", "model": quantized(MODEL, bits=8), "recipe": Recipe((Quantize(),))},
        "8 bits saturate on the target avx512",
    ),
    "workload": ({"workload": "fast"}, "'fast' is not one of sorted, mixed, single"),
    "max drop": ({"max_drop": "one"}, "--max-drop is 'one'"),
    "step": ({"recipe": None, "steps": ["fold"]}, "no step is named 'fold'"),
    "no step": ({"recipe": None, "steps": []}, "a recipe needs a step"),
    "max_length": ({"recipe": replace(RECIPE, max_length=4000)}, "max_length 4000 is over the 48 positions"),
    "nothing to judge on": ({"data": replace(DATA, valid=(), test=())}, "neither valid nor test"),
    "nothing to learn from": ({"data": replace(DATA, texts=())}, "no texts to learn from"),
    "int8 model": ({"model": quantized(MODEL, bits=7)}, "is in int8; prune first, quantize afterwards"),
    "labels for an embedder": ({"data": LABELLED}, "no classifier: fine-tune it first"),
    "search for a classifier": ({"model": with_head(ClassificationHead(LABELS))}, "the model classifies"),
    "search for a translator": ({"model": translator()}, "the model writes: give data with source and target"),
    "pairs for an embedder": ({"data": PAIRS}, "the data is for translation and the model is no translator"),
    "summaries for a translator": (
        {"model": translator(), "data": replace(PAIRS, task="summarization")},
        "the data is for summarization and the model is a translator",
    ),
    "translations for a summarizer": (
        {"model": summarizer(), "data": PAIRS},
        "the data is for translation and the model is a summarizer",
    ),
    "search for a summarizer": ({"model": summarizer()}, "the model writes: give data with text and summary"),
    "cut of pairs": (
        {"model": translator(), "data": PAIRS, "recipe": Recipe((Quantize(),), max_length=9)},
        "a translation of half a text is none",
    ),
    "pairs for a language model": (
        {"model": translator(encoder=0), "data": PAIRS},
        "the data is for translation and the model is no translator",
    ),
    "texts for a translator": (
        {"model": translator(), "data": TEXTS},
        "the data is for language and the model is no language model",
    ),
    "search for a language model": ({"model": translator(encoder=0)}, "the model goes on from texts: give data with"),
    "cut of texts": (
        {"model": translator(encoder=0), "data": TEXTS, "recipe": Recipe((Quantize(),), max_length=9)},
        "a language model reads them in windows",
    ),
    "unknown label": (
        {"model": with_head(ClassificationHead(("early", "x"))), "data": LABELLED},
        "label 'late' of the data is not among the model's: early, x",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_writes_nothing(name: str, tmp_path: Path) -> None:
    options, message = BAD[name]
    with pytest.raises(InputError) as caught:
        go(tmp_path / "out", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


# --- other data and models ---


def test_a_classifier(tmp_path: Path) -> None:
    model = with_head(ClassificationHead(LABELS))
    result = go(tmp_path / "out", model=model, data=LABELLED, max_drop="100")
    report = result.report
    assert (report["deciding"], report["metric_names"]) == ("accuracy", ["accuracy", "macro_f1"])
    assert report["data"]["task"] == "classification"
    assert report["data"]["rows"] == {"train": 60, "valid": 20, "test": 20, "texts": 20}
    logits = load_bundle(tmp_path / "out/stages/0-original/bundle").logits([row.text for row in LABELLED.test])
    right = np.mean([LABELS[i] == row.label for i, row in zip(logits.argmax(1), LABELLED.test, strict=True)])
    assert report["stages"][0]["accuracy"]["test"]["metrics"]["accuracy"] == pytest.approx(100 * right)
    assert result.exit_code == 0


def test_a_classifier_of_recurrent_cells(tmp_path: Path) -> None:
    """Its FFN is pruned, its cells stay whole; no other layout than the packed one exists."""
    shape = Architecture(encoder=2, decoder=0, width=16, heads=1, neurons=40, mixer="gru")
    model = new_classifier(shape, train_subwords(["open the file and sort"], vocab_size=300), LABELS, 0)
    recipe = Recipe((Prune(cost=0.8), Distill(steps=2, batch_tokens=200), INT8))
    result = go(tmp_path / "out", model=model, data=LABELLED, recipe=recipe, max_drop="100")
    stages = result.report["stages"]
    assert [stage["layout"] for stage in stages] == ["packed"] * 4
    assert all(stage["parity"]["passed"] for stage in stages)
    before, after = model.config.encoder, result.checkpoint.config.encoder
    assert sum(layer.ffn.width for layer in after if layer.ffn) < sum(layer.ffn.width for layer in before if layer.ffn)
    assert [getattr(layer.mixer, "units", 0) for layer in after] == [16, 16]
    assert load_bundle(result.bundle).logits(["open the file"]).shape == (1, len(LABELS))


def test_a_translator(tmp_path: Path) -> None:
    """Distilled, quantized and judged by sacrebleu; the report has its signatures and the parity of what is written."""
    import sacrebleu

    recipe = Recipe((Distill(steps=3, batch_tokens=120, mixer="ssru", beams=2), INT8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "write_report", write_report)
        result = go(tmp_path / "out", model=translator(), data=PAIRS, recipe=recipe, max_drop="100")
    report = result.report
    assert (report["deciding"], report["metric_names"]) == ("BLEU", ["BLEU", "chrF"])
    assert report["data"]["task"] == "translation"
    assert report["data"]["rows"] == {"train": 30, "valid": 6, "test": 6, "texts": 10}
    assert report["data"]["signatures"] == signatures()
    written = load_bundle(result.bundle).translate([pair.source for pair in PAIRS.test])
    score = sacrebleu.corpus_bleu(written, [[pair.target for pair in PAIRS.test]]).score
    stages = report["stages"]
    assert stages[2]["accuracy"]["test"]["metrics"]["BLEU"] == pytest.approx(score, rel=1e-9)
    assert [stage["layers"] for stage in stages] == [3, 3, 3]
    whole, small = "greedy_equal, beams_equal and steps_equal", "tokens_equal and steps_equal"
    assert [stage["parity"]["measured"] for stage in stages[1:]] == [whole, small]
    assert all(stage["parity"]["texts"] == WRITTEN and stage["parity"]["passed"] for stage in stages)
    assert stages[2]["bytes"] == sum(file.stat().st_size for file in (result.bundle / "onnx").iterdir())
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "Tokens chosen alike" in page
    assert signatures()["BLEU"] in page
    assert result.exit_code == 0


def test_a_summarizer(tmp_path: Path) -> None:
    """Judged by ROUGE of what is written for the beginnings of its sources, which are counted."""
    data = replace(PAIRS, task="summarization")
    recipe = Recipe((Distill(steps=2, batch_tokens=120, beams=0), INT8), max_length=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "write_report", write_report)
        result = go(tmp_path / "out", model=summarizer(), data=data, recipe=recipe, max_drop="100")
    report = result.report
    assert (report["deciding"], report["metric_names"]) == ("ROUGE-L", ["ROUGE-1", "ROUGE-2", "ROUGE-L"])
    assert (report["data"]["task"], report["model"]["max_length"]) == ("summarization", 5)
    cut = {name: sum(len(pair.source.split()) > 3 for pair in getattr(PAIRS, name)) for name in ("train", "test")}
    assert 0 < cut["test"] < len(PAIRS.test)
    assert {name: report["data"]["sources_cut"][name] for name in ("at", *cut)} == {"at": 5, **cut}
    assert report["stages"][1]["details"]["sources_cut"] == cut["train"]
    written = load_bundle(result.bundle).summarize([" ".join(pair.source.split()[:3]) for pair in PAIRS.test])
    pairs = [pair.target for pair in PAIRS.test]
    expected = summary_metrics(written, pairs, pairs).values()
    assert report["stages"][2]["accuracy"]["test"]["metrics"] == pytest.approx(expected)
    assert expected["ROUGE-1"] > 0
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert f"at 5 tokens, train {cut['train']} of 30, valid " in page
    assert pair_signatures("summarization")["ROUGE"] in page
    assert f"sources cut: at 5 tokens, train {cut['train']} of 30, valid " in report_text(report)
    assert result.exit_code == 0


def test_a_language_model(tmp_path: Path) -> None:
    """Pruned, distilled, quantized, and judged by how likely its bundle finds the texts of test."""
    recipe = Recipe(
        (
            Prune(cost=0.6, samples=8, agreement=0.0, refit_samples=16, multiple=8),
            Distill(steps=3, batch_tokens=120),
            INT8,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "write_report", write_report)
        result = go(tmp_path / "out", model=translator(encoder=0), data=TEXTS, recipe=recipe, max_drop="100")
    report = result.report
    assert (report["deciding"], report["metric_names"]) == ("likelihood", ["likelihood", "perplexity", "bits_per_byte"])
    assert report["data"]["task"] == "language"
    assert report["data"]["rows"] == {"train": 30, "valid": 6, "test": 6, "texts": 10}
    stages = report["stages"]
    expected = reading_metrics(TEXTS.test, load_bundle(result.bundle).read([row.text for row in TEXTS.test])).values()
    assert stages[3]["accuracy"]["test"]["metrics"] == pytest.approx(expected)
    assert stages[3]["multiply_adds"] < 0.7 * stages[0]["multiply_adds"]
    assert all(stage["parity"]["texts"] == WRITTEN and stage["parity"]["passed"] for stage in stages)
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "perplexity" in page
    assert result.exit_code == 0


def test_texts_alone_are_judged_by_agreement_also_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SearchData((), (), (), DATA.texts[:40])
    recipe = Recipe((INT8,))
    failed = inject(monkeypatch)
    result = None
    while result is None:
        try:
            result = go(tmp_path / "out", data=data, recipe=recipe, resume=True)
        except Fault:
            assert len(failed) < 100
    assert result.report["deciding"] == "overlap@10"
    bundles = [tmp_path / f"out/stages/{name}/bundle" for name in ("0-original", "1-quantize")]
    before, after = (load_bundle(path).embed(data.texts) for path in bundles)
    cosine = 100 * np.mean((before * after).sum(1))
    assert result.report["stages"][1]["accuracy"]["test"]["metrics"]["cosine"] == pytest.approx(cosine, abs=1e-3)


def test_valid_alone_decides_where_there_is_no_test(tmp_path: Path) -> None:
    result = go(tmp_path / "out", data=replace(DATA, test=()), recipe=Recipe((INT8,)), max_drop="90")
    assert set(result.report["stages"][1]["accuracy"]) == {"valid"}
    assert result.exit_code == 0


def test_a_model_without_a_head_gets_one_and_the_report_says_so(tmp_path: Path) -> None:
    result = go(tmp_path / "out", model=tiny(tiny_config(head=None)), recipe=Recipe((INT8,)))
    (skipped,) = result.report["skipped"]
    assert skipped["what"] == "pooling"
    assert result.checkpoint.config.head is not None


def test_max_length_of_the_recipe_cuts_texts(tmp_path: Path) -> None:
    result = go(tmp_path / "out", recipe=Recipe((INT8,), max_length=5))
    assert result.checkpoint.config.text.max_length == 5
    bundle = load_bundle(result.bundle)
    np.testing.assert_array_equal(bundle.embed(["open save print"]), bundle.embed(["open save print menu row"]))


@dataclass(frozen=True)
class Spy:
    """A step that looks at what it is given."""

    name: ClassVar[str] = "spy"
    trains: ClassVar[bool] = False

    def check(self, config: TransformerConfig) -> None: ...

    def __call__(self, checkpoint: Any, context: Any) -> Any:
        SEEN.append(context)
        return Quantize(bits=7)(checkpoint)


SEEN: list[Any] = []


def test_parity_is_measured_on_pages_and_texts_and_never_on_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def note(*given: Any, texts: Sequence[str], **options: Any) -> Parity:
        seen.extend(texts[:PARITY_TEXTS])
        return check_parity(*given, texts=texts, **options)

    monkeypatch.setattr(stage_module, "check_parity", note)
    go(tmp_path / "out", recipe=Recipe((INT8,)))
    pages, texts = [page.text for page in DATA.pages], list(DATA.texts)
    half = PARITY_TEXTS // 2
    once = [*pages[:half], *texts][:PARITY_TEXTS]
    assert seen == 2 * once
    assert set(seen) & set(pages)
    assert set(seen) & set(texts)


def test_test_queries_are_opened_after_the_last_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_stage, real_evaluate = pipeline.make_stage, pipeline.evaluate

    def stage(folder: Path, *args: Any, **kwargs: Any) -> Stage:
        order.append(folder.name)
        return real_stage(folder, *args, **kwargs)

    def judge(data: Any, bundle: Any, split: str, **kwargs: Any) -> Any:
        order.append(split)
        return real_evaluate(data, bundle, split, **kwargs)

    monkeypatch.setattr(pipeline, "make_stage", stage)
    monkeypatch.setattr(pipeline, "evaluate", judge)
    go(tmp_path / "out", recipe=Recipe((Spy(),)), seed=5)  # type: ignore[arg-type]
    assert order == ["0-original", "valid", "1-spy", "valid", "test", "test"]
    (context,) = SEEN
    assert (context.seed, context.device, context.data) == (5, "cpu", DATA)
    assert context.teacher.config == MODEL.config
    assert context.workdir == tmp_path / "out/stages/1-spy/work"
    assert not context.workdir.exists()


@pytest.mark.slow
def test_with_real_latencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "measure_stages", latencies.measure_stages)
    monkeypatch.setattr(latencies, "SECONDS", 4.0)
    out = tmp_path / "out"
    result = go(out, recipe=Recipe((INT8,)))
    stages = result.report["stages"]
    for workload in ("sorted", "mixed", "single", *(set(result.report["workloads"]) - {"sorted", "mixed", "single"})):
        timing = stages[1]["latency"][workload]
        assert 0 < timing["low"] <= timing["ratio"] <= timing["high"]
        assert 0 < timing["p50_ms"] <= timing["p90_ms"] <= timing["p99_ms"]
        assert stages[0]["latency"][workload]["ratio"] == pytest.approx(1)
    assert stages[1]["peak_memory_mib"] > 0
    assert len(result.report["workloads"]) == 4
    monkeypatch.setattr(latencies, "compare", lambda *_, **__: pytest.fail("measured again"))
    again = go(out, recipe=Recipe((INT8,)), resume=True)
    assert again.speedup == result.speedup


def test_read_stage_wants_the_whole_stage(finished: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    assert read_stage(folder) is None
    shutil.copytree(finished.out / "stages/1-prune", folder)
    stage = read_stage(folder)
    assert stage is not None
    assert stage.entry["name"] == "prune"
    assert set(stage.memory.vectors) == {"pages"}
    (folder / "stage.json").unlink()
    assert read_stage(folder) is None


def test_export_of_a_stage_is_the_stages_bundle(finished: Finished, tmp_path: Path) -> None:
    bundle = export(load_own(finished.out / "model"), tmp_path / "bundle")
    assert files(bundle) == files(finished.out / "bundle")


def test_training_state_is_kept_often_enough_to_matter() -> None:
    assert training.SAVE_SECONDS <= 60


@pytest.mark.parametrize(("high", "slow"), [(0.97, True), (1.02, False)])
def test_int8_that_is_proven_to_be_slower_recommends_the_float_stage(tmp_path: Path, high: float, slow: bool) -> None:
    def timed(stages: Sequence[Stage], *arguments: Any, **more: Any) -> Latencies:
        ratio = {"sorted": {"ratio": 0.93, "low": 0.9, "high": high}, "mixed": {"ratio": 0.5, "low": 0.5, "high": 0.5}}
        return replace(fake_latencies(stages), over_float={stages[-1].folder.name: ratio})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "measure_stages", timed)
        result = go(tmp_path / "out", recipe=Recipe((Quantize(),)))
    line = f"quantize: slower than the float model before it, 0.93x [0.90, {high:.2f}] on sorted; "
    line += "for speed take stages/0-original/bundle"
    assert result.report["verdict"]["slower"] == ([line] if slow else [])
    assert result.exit_code == 0
    assert (f"verdict: {line}" in report_text(result.report)) is slow


@pytest.mark.parametrize(
    ("difference", "bound", "state"), [(-0.5, -1.9, "met"), (-1.5, -2.25, "not proven"), (-2.5, -3.0, "missed")]
)
def test_a_budget_of_two_points(difference: float, bound: float, state: str) -> None:
    drop = Interval(difference, bound, 0.0, bound)
    found = pipeline.verdict(MaxDrop(2.0), drop, 62.25, "nDCG@10", [])
    assert found["budgets"][0]["state"] == state
    assert found["exit_code"] == (0 if state == "met" else 3)


def test_a_trimmed_model_is_timed_on_its_own_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of the whole vocabulary would be beyond its table, which keeps letters and a few words."""
    letters = [mark + letter for mark in ("", "##") for letter in ascii_lowercase]
    tokenizer = wordpiece_from_vocab("\n".join([*SPECIAL, *letters, *WORDS]))
    table = replace(MODEL.config.embedding, vocab_size=len(SPECIAL) + len(letters) + len(WORDS))
    model = replace(tiny(replace(MODEL.config, embedding=table)), tokenizer=tokenizer)
    given: list[dict[str, Any]] = []
    real = latencies.compare

    def spied(*arguments: Any, **options: Any) -> Any:
        given.append(options["own"])
        return real(*arguments, **{**options, "rounds": 1, "processes": 1, "minimum": 0.0})

    monkeypatch.setattr(latencies, "compare", spied)
    monkeypatch.setattr(pipeline, "measure_stages", latencies.measure_stages)
    recipe = Recipe((Quantize(format="int8_dynamic", bits=7), Trim(entries=len(SPECIAL) + len(letters) + 9)))
    result = go(tmp_path / "out", model=model, recipe=recipe)
    rows = result.checkpoint.config.embedding.vocab_size
    assert rows == len(SPECIAL) + len(letters) + 9
    assert list(given[0]) == ["2-trim"]
    assert max(int(batch["input_ids"].max()) for batch in given[0]["2-trim"]["sorted"].batches) < rows


def test_trim_comes_after_distill_and_may_follow_quantize() -> None:
    with pytest.raises(
        InputError, match="distill comes after trim and needs the teacher's vocabulary: put trim after it"
    ):
        Recipe((Trim(), Distill(steps=1)))
    assert Recipe((Distill(steps=1), Trim(), Quantize())).steps[1] == Trim()
    assert Recipe((Quantize(), Trim())).steps[1] == Trim()
