"""The command line from end to end on tiny random models: what it prints, writes, refuses and returns."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from slimformer.cli import _stream, main
from slimformer.compress import judging, latencies
from slimformer.export import decoding_parity, form_times
from slimformer.export.forms import Forms
from slimformer.export.machine import TARGETS
from slimformer.export.runtime import Bundle, load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    EmbeddingConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LayerConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.families.bert import save_bert
from slimformer.transformer.model import Transformer, initialize
from slimformer.transformer.tokenizer import wordpiece_from_vocab
from slimformer.transformer.vectors import find_ranges

WORDS = [a + b + c for a in "bdfgkl" for b in "aeiou" for c in "mnrst"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
STEPS = '[[step]]\nname = "prune"\nlayers = 1\ncost = 0.5\nmultiple = 8\nagreement = 0\n'
INT8 = '[[step]]\nname = "quantize"\nsamples = 16\n'
RECIPE = f'max_length = 24\n{STEPS}[[step]]\nname = "distill"\nsteps = 4\n{INT8}'
CUDA = torch.cuda.is_available()
PARITY_TEXTS = decoding_parity.TEXTS
HURRIED = {"rounds": 1, "processes": 1, "minimum": 0.0}  # of latencies


def tiny_model(seed: int = 0) -> Checkpoint:
    layer = LayerConfig(AttentionConfig(heads=2, head_width=16), FeedForwardConfig(width=64))
    config = TransformerConfig(
        d_model=32,
        embedding=EmbeddingConfig(vocab_size=len(VOCABULARY), positions=40, token_types=2),
        encoder=(layer, layer),
        text=TextConfig(max_length=40),
    )
    model = Transformer(config)
    initialize(model, seed)
    state = {name: value * (8 if "tokens" in name else 1) for name, value in model.state_dict().items()}
    return Checkpoint(config, state, wordpiece_from_vocab("\n".join(VOCABULARY)))


def sentence(random: random.Random, words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(words))


def write_rows(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_bert(tiny_model(), path)
    return path


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 pages; a query is three words of its page's text."""
    path, rng = tmp_path_factory.mktemp("search"), random.Random(0)
    pages = [{"id": f"p{i}", "title": sentence(rng, 2), "text": sentence(rng, 12)} for i in range(30)]
    write_rows(path / "pages.jsonl", pages)
    for split, first in (("valid", 0), ("test", 4)):
        cut = [" ".join(page["text"].split()[first : first + 3]) for page in pages]
        rows = [{"query": text, "pages": [page["id"]]} for text, page in zip(cut, pages, strict=True)]
        write_rows(path / f"queries-{split}.jsonl", rows)
    write_rows(path / "texts.jsonl", [{"text": sentence(rng, 9)} for _ in range(60)])
    return path


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three labels, each with its own words."""
    path, rng = tmp_path_factory.mktemp("topics"), random.Random(1)
    for split, count in (("train", 60), ("valid", 24), ("test", 24)):
        rows = []
        for i in range(count):
            own = WORDS[50 * (i % 3) : 50 * (i % 3) + 50]
            rows.append({"text": " ".join(rng.choice(own) for _ in range(6)), "label": f"topic {i % 3}"})
        write_rows(path / f"{split}.jsonl", rows)
    return path


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Rounds of some milliseconds, for these models' speed is of no interest; and few texts for parity."""
    patch = pytest.MonkeyPatch()
    real = latencies.compare
    patch.setattr(decoding_parity, "TEXTS", 8)
    patch.setattr(form_times, "SECONDS", 0.0)  # no form of a graph is timed
    patch.setattr(latencies, "compare", lambda *a, **k: real(*a, **{**k, **HURRIED}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other cost more than such small sums
    yield
    torch.set_num_threads(threads)
    patch.undo()


def run(*words: object, given: str | bytes = "") -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=given)


def refused(*words: object, given: str | bytes = "") -> str:
    """The one line of a refusal."""
    result = run(*words, given=given)
    assert result.exit_code == 2, result.output + str(result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def succeeded(*words: object, given: str | bytes = "", code: int = 0) -> str:
    result = run(*words, given=given)
    assert result.exit_code == code, result.output + str(result.exception)
    return result.stdout


@pytest.fixture(scope="module")
def finished(model: Path, search: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of all three steps, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.toml").write_text(RECIPE)
    words = ("--data", search, "--recipe", folder / "recipe.toml", "--max-drop", "99", "--threads", 1)
    return folder, succeeded("compress", model, *words, "-o", folder / "out")


def test_compress_prints_budget_stages_and_verdict(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    lines = printed.splitlines()
    assert lines[0] == "deciding metric nDCG@10; --max-drop 99.00 points"
    assert [line.split()[0] for line in lines if line.split()[0] in {"original", "prune", "distill", "quantize"}] == [
        "original",
        "prune",
        "distill",
        "quantize",
    ]
    assert any(line.startswith("--max-drop met: ") for line in lines)
    assert "texts shared: " in printed
    assert lines[-2:] == [f"bundle: {folder / 'out' / 'bundle'}", f"report: {folder / 'out' / 'report.html'}"]
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["command"].startswith("slimformer compress ")
    assert report["data"]["directory"].startswith("/")
    bytes_of = [stage["bytes"] for stage in report["stages"]]
    assert bytes_of[-1] < bytes_of[0]
    assert f"{bytes_of[0] / 1e6:.1f}" in printed


def test_a_finished_run_is_resumed_without_work(
    finished: tuple[Path, str], model: Path, search: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = finished
    for place in ("compress.student.train", "compress.stage.export", "compress.pipeline.evaluate"):
        monkeypatch.setattr(f"slimformer.{place}", lambda *a, **k: pytest.fail("work was done again"))
    words = ("--data", search, "--recipe", folder / "recipe.toml", "--max-drop", "99", "--threads", 1, "--resume")
    again = succeeded("compress", model, *words, "-o", folder / "out")
    assert again == printed


def test_resume_refuses_another_recipe(finished: tuple[Path, str], model: Path, search: Path) -> None:
    folder, _ = finished
    before = (folder / "out" / "report.json").read_bytes()
    line = refused("compress", model, "--data", search, "--steps", "int8", "--resume", "-o", folder / "out")
    assert "recipe" in line.split("made with another ")[1]
    assert (folder / "out" / "report.json").read_bytes() == before


def test_a_missed_budget_exits_3_and_json_stands_alone(model: Path, search: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[[step]]\nname = "distill"\nsteps = 3\nlr = 0.5\n')  # ruins any model
    words = ("--data", search, "--recipe", tmp_path / "recipe.toml", "--max-drop", "0.01", "--json", "--threads", 1)
    result = run("compress", model, *words, "-o", tmp_path / "out")
    assert result.exit_code == 3, result.output
    found = json.loads(result.stdout)
    assert found["met"] is False
    assert found["verdict"]["exit_code"] == 3
    assert [stage["name"] for stage in found["stages"]] == ["original", "distill"]
    assert "deciding metric nDCG@10; --max-drop 0.01 points" in result.stderr
    assert (tmp_path / "out" / "bundle" / "onnx" / "model.onnx").is_file()


def test_the_texts_of_minutes_and_steps_fit_the_recipe(model: Path, search: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--data", search, "--steps", "int8", "--max-length", "20", "--threads", 1)
    assert "no budget given" in succeeded("compress", model, *words, "-o", out)
    report = json.loads((out / "report.json").read_text())
    assert [step["name"] for step in report["recipe"]] == ["quantize"]
    assert report["model"]["max_length"] == 20


def test_a_model_is_pruned_to_be_as_many_times_as_fast(model: Path, search: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [word for text in ("speedup=1.2", "agreement=0", "multiple=4") for word in ("--prune", text)]
    words = ("--data", search, "--steps", "prune", *options, "--max-length", "20", "--threads", 1, "-o", out)
    succeeded("compress", model, *words)
    step = json.loads((out / "report.json").read_text())["stages"][1]
    assert (step["options"]["speedup"], step["options"]["cost"]) == (1.2, None)
    speed = step["details"]["speed"]
    assert (speed["wanted"], speed["format"], speed["workload"]) == (1.2, "float32", "sorted")
    assert 0 < speed["low"] <= speed["measured"] <= speed["high"]
    assert (out / "sublayers.json").is_file()
    assert "made with another workload" in refused("compress", model, *words, "--workload", "single", "--resume")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipe", "r.toml", "--steps", "int8"), "both given"),
        (("--steps", "int8", "--minutes", "3"), "distill"),
        (("--recipe", "r.toml", "--minutes", "3"), "--minutes goes with --steps"),
        (("--recipe", "r.toml", "--prune", "cost=0.5"), "--prune goes with --steps"),
        (("--steps", "int8", "--prune", "cost=0.5"), "--prune is about the prune step"),
        (("--steps", "prune", "--prune", "cost"), "'cost' is not NAME=VALUE"),
        (("--steps", "prune", "--prune", "rate=0.5"), "prune has no option 'rate'"),
        (("--steps", "prune", "--prune", "cost=half"), "cost is 'half'"),
        (("--steps", "prune", "--prune", "speedup=0.5"), "speedup is 0.5, not a number of at least 1"),
        (("--provider", "tpu"), "tpu"),
        (("--workload", "fast"), "fast"),
        (("--target", "sparc"), "sparc"),
        (("--minutes", "0"), "0"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_bad_usage_of_compress(words: Sequence[str], message: str, model: Path, search: Path, tmp_path: Path) -> None:
    result = run("compress", model, "--data", search, "-o", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("depth = 3\n" + STEPS, "unknown key 'depth'"),
        ('[[step]]\nname = "shrink"\n', "no step is named 'shrink'"),
        ('[[step]]\nname = "prune"\nlayer = 3\n', "prune has no option 'layer'"),
        ('[[step]]\nname = "prune"\ncost = 7\n', "cost is 7"),
        ("[[step]\n", "not TOML"),
        ("max_length = 41\n" + STEPS, "max_length 41 is over the 40 positions"),
    ],
)
def test_bad_recipes(recipe: str, message: str, model: Path, search: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(recipe)
    words = ("--data", search, "--recipe", tmp_path / "recipe.toml")
    assert message in refused("compress", model, *words, "-o", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize("drop", ["nonsense", "-1", "2 percent", "nan", "", "inf"])
def test_a_budget_that_is_none(drop: str, model: Path, search: Path, tmp_path: Path) -> None:
    line = refused("compress", model, "--data", search, "--max-drop", drop, "-o", tmp_path / "out")
    assert f"--max-drop is {drop!r}" in line
    assert not (tmp_path / "out").exists()


def spoil(model: Path, path: Path, change: Callable[[Path], None]) -> Path:
    """A copy of a model with something wrong."""
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    change(path)
    return path


def with_nan(path: Path) -> None:
    state = load_file(path / "model.safetensors")
    state["encoder.layer.1.output.dense.bias"][3] = float("nan")
    save_file(state, path / "model.safetensors")


def truncated(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_type(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan, "NaN or infinity in encoder.1.ffn.down.bias"),
        (truncated, "model.safetensors: not a whole safetensors file"),
        (lambda path: (path / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "not JSON"),
        (other_type, "model_type 't5' is not supported"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer"),
    ],
)
def test_bad_models(change: Callable[[Path], None], message: str, model: Path, search: Path, tmp_path: Path) -> None:
    broken = spoil(model, tmp_path / "broken", change)
    for words in (("compress", broken, "--data", search), ("export", broken)):
        assert message in refused(*words, "-o", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_model_that_is_not_there(search: Path, tmp_path: Path) -> None:
    missing = tmp_path / "a" / "b"
    assert f"{missing}: no such directory" in refused("compress", missing, "--data", search, "-o", tmp_path / "out")


@pytest.mark.parametrize(
    ("stem", "rows", "message"),
    [
        ("pages", [{"id": "p0", "text": "a"}, {"id": "p1"}], "pages.jsonl, row 2: the field 'text' is missing"),
        ("queries-test", [{"query": "x", "pages": ["p0"]}, {"query": "x", "pages": ["q"]}], "row 2: the page id 'q'"),
        ("texts", [], "texts.jsonl has no rows"),
    ],
)
def test_bad_data(stem: str, rows: list[object], message: str, model: Path, search: Path, tmp_path: Path) -> None:
    data = spoil(search, tmp_path / "data", lambda path: write_rows(path / f"{stem}.jsonl", rows))
    assert message in refused("compress", model, "--data", data, "-o", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_labels_and_no_classifier(model: Path, topics: Path, tmp_path: Path) -> None:
    line = refused("compress", model, "--data", topics, "-o", tmp_path / "out")
    assert "fine-tune it first with slimformer train" in line
    line = refused("compress", model, "--data", topics, "--task", "embedding", "-o", tmp_path / "out")
    assert "lacks texts" in line


def test_an_existing_output_is_kept(model: Path, search: Path, topics: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    for words in (
        ("compress", model, "--data", search),
        ("export", model),
        ("train", model, "--data", topics),
        ("latency", model),
    ):
        assert f"{tmp_path / 'out'} exists" in refused(*words, "-o", tmp_path / "out")
    resumed = refused("compress", model, "--data", search, "--resume", "-o", tmp_path / "out")
    assert "is not the output of a run" in resumed
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
def test_cuda_that_is_not_there(model: Path, search: Path, tmp_path: Path) -> None:
    words = (model, "--data", search, "-o", tmp_path / "out")
    assert "provider cuda is not in the installed onnxruntime" in refused("compress", *words, "--provider", "cuda")
    assert "device cuda cannot be used by torch" in refused("compress", *words, "--device", "cuda")
    assert "provider cuda" in refused("export", model, "--provider", "cuda", "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def bundles(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """fp32 and int8 of the model, with an embedding head, exported by the command."""
    folder = tmp_path_factory.mktemp("bundles")
    headed = tiny_model()
    replace(headed, config=replace(headed.config, head=EmbeddingHead())).save(folder / "model")
    for form in ("fp32", "int8"):
        printed = succeeded("export", folder / "model", "-o", folder / form, "--format", form)
        assert f"{folder / form}/onnx/model.onnx: " in printed
        assert f" MB, {form}, packed" in printed
        assert "parity held: " in printed
    return folder / "fp32", folder / "int8"


def test_half_precision_is_for_cuda(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    model = bundles[0].parent / "model"
    printed = succeeded("export", model, "-o", tmp_path / "fp16", "--format", "fp16")
    assert " MB, fp16, packed" in printed
    assert "advice: on a CPU onnxruntime computes float16 linears in float32" in printed
    assert "parity held: median_relative" in printed
    assert "nothing faster" in succeeded("inspect", tmp_path / "fp16")
    assert "nothing faster" not in succeeded("inspect", bundles[0])
    assert "--provider cuda" in refused("export", model, "-o", tmp_path / "bf16", "--format", "bf16")
    assert not (tmp_path / "bf16").exists()


def test_a_target_is_taken_and_recorded(
    bundles: tuple[Path, Path], search: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimformer.export.machine.has_int8_dot", lambda files: True)
    model = bundles[0].parent / "model"
    printed = succeeded("export", model, "-o", tmp_path / "bundle", "--format", "int8", "--target", "avx2")
    assert " MB, int8, packed, for avx2" in printed
    words = ("--data", search, "--steps", "int8", "--threads", 1, "--target", "avx2", "-o", tmp_path / "out")
    assert "advice: the target avx2 has no VNNI" in succeeded("compress", model, *words)
    for bundle in (tmp_path / "bundle", tmp_path / "out/bundle"):
        notes = json.loads((bundle / "slimformer.json").read_text())["provenance"]
        assert (notes["target"], notes["int8_weight_bits"]) == ("avx2", 7)


def test_every_target_is_a_choice() -> None:
    for command in ("compress", "export"):
        (option,) = (one for one in main.commands[command].params if one.name == "target")
        assert set(option.type.to_info_dict()["choices"]) == set(TARGETS)


def test_a_target_that_cannot_be_proven_here(
    model: Path, search: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimformer.export.machine.has_int8_dot", lambda files: False)
    for words in (("export", model, "--format", "int8"), ("compress", model, "--data", search)):
        line = refused(*words, "--target", "vnni", "-o", tmp_path / "out")
        assert "saturate on this CPU" in line
        assert "--target avx2" in line
    assert not list(tmp_path.iterdir())


def test_export_that_misses_parity_exits_3(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimformer.export.validation.FLOAT_LIMIT", -1.0)
    printed = succeeded("export", model, "-o", tmp_path / "out", "--layout", "padded", code=3)
    assert "parity NOT held" in printed
    assert "padded" in printed
    assert (tmp_path / "out" / "onnx" / "model.onnx").is_file()


def test_export_of_the_fastest_forms_lists_what_was_timed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[Path] = []
    timed = {"choice": "norm", "value": "skip", "taken": True, "why": "taken", "against": "separate", "rounds": 7}
    timed |= {"speed": {"ratio": 1.2, "low": 1.1, "high": 1.3}}
    chosen = form_times.Chosen(Forms(norm="skip"), (timed,), ("1x16",), "today")
    monkeypatch.setattr(form_times, "measured", lambda *_, **ways: stores.extend(ways["stores"]) or chosen)
    printed = succeeded("export", model, "--fastest", "-o", tmp_path / "out")
    assert "\nform norm skip: 1.200x [1.100, 1.300] as fast as separate, 7 rounds: taken\n" in printed
    assert "parity held" in printed
    assert [store.name for store in stores] == ["forms.json"]
    own = json.loads((tmp_path / "out" / "slimformer.json").read_text())
    assert own["forms"]["norm"] == "skip"
    assert own["measured"]["forms"]["decisions"] == [timed]
    succeeded("export", model, "-o", tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "slimformer.json").read_text())["forms"] == Forms().to_dict()


@pytest.mark.parametrize("words", [("--layout", "packed"), ("--provider", "cuda")])
def test_the_fastest_forms_have_their_layout_and_the_cpu(words: Sequence[str], model: Path, tmp_path: Path) -> None:
    result = run("export", model, "--fastest", *words, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "--fastest takes the layout by time" in result.stderr


def test_portable_runs_time_no_forms(
    model: Path, search: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimformer.compress.pipeline.measured", None)
    words = ("--data", search, "--steps", "int8", "--max-length", "20", "--threads", 1, "--portable")
    succeeded("compress", model, *words, "-o", tmp_path / "out")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "- graph forms: layout packed, norm separate, attention fused, qkv merged, gelu fused\n" in report
    assert "- graph forms, how: the portable default\n" in report


def test_predict_embeds_stdin_and_files(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    texts = ["bam bem", "", "fum gat kit lor"]
    expected = load_bundle(bundles[0]).embed(texts)
    printed = succeeded("predict", bundles[0], given="bam bem\n\nfum gat kit lor\n")
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["text"] for row in rows] == texts
    np.testing.assert_array_equal(np.array([row["embedding"] for row in rows], np.float32), expected)
    (tmp_path / "texts.txt").write_bytes(b"bam bem\r\n\r\nfum gat kit lor")
    assert succeeded("predict", bundles[0], tmp_path / "texts.txt", "-o", tmp_path / "v.npy") == ""
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), expected)


def test_predict_gives_cheaper_vectors(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    """Queries in the ranges of pages, which are float vectors that predict wrote."""
    (tmp_path / "pages.txt").write_text("bam bem\nfum gat\nkit lor\n")
    succeeded("predict", bundles[0], tmp_path / "pages.txt", "-o", tmp_path / "pages.npy")
    bundle, given = load_bundle(bundles[0]), "bam lor\nfum\n"
    ranges = find_ranges(np.load(tmp_path / "pages.npy"), 8)
    coded = ("--dimensions", 8, "--precision", "int8", "--calibration", tmp_path / "pages.npy")
    printed = succeeded("predict", bundles[0], *coded, given=given)
    expected = bundle.embed(given.splitlines(), dimensions=8, precision="int8", ranges=ranges)
    assert [json.loads(line)["embedding"] for line in printed.splitlines()] == expected.tolist()
    assert "." not in printed
    succeeded("predict", bundles[0], "--precision", "binary", "-o", tmp_path / "v.npy", given=given)
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), bundle.embed(given.splitlines(), precision="binary"))
    assert "int8 needs the range" in refused("predict", bundles[0], *coded[:4], given=given)
    assert "--calibration is of --precision int8" in refused("predict", bundles[0], *coded[4:], given=given)


def test_predict_refuses(bundles: tuple[Path, Path], model: Path, tmp_path: Path) -> None:
    assert "is not a bundle" in refused("predict", model, given="bam\n")
    assert "has no lines" in refused("predict", bundles[0], given="")
    assert "not UTF-8" in refused("predict", bundles[0], given=b"\xff\xfe bam")
    assert ".npy" in refused("predict", bundles[0], "-o", tmp_path / "v.txt", given="bam\n")
    assert "does not write; it has the head" in refused("predict", bundles[0], "--stream", given="bam\n")
    assert "no prompt named 'query'" in refused("predict", bundles[0], "--prompt", "query", given="bam\n")
    (tmp_path / "v.npy").write_text("kept")
    assert "exists" in refused("predict", bundles[0], "-o", tmp_path / "v.npy", given="bam\n")
    assert (tmp_path / "v.npy").read_text() == "kept"


def test_evaluate_against_the_original(bundles: tuple[Path, Path], model: Path, search: Path) -> None:
    words = ("evaluate", bundles[1], "--data", search, "--against", model)
    found = json.loads(succeeded(*words, "--json"))
    assert found["examples"] == 30
    for name, interval in found["difference"].items():
        assert interval["difference"] == pytest.approx(found["metrics"][name] - found["against_metrics"][name])
        assert interval["low"] <= interval["difference"] <= interval["high"]
    printed = succeeded(*words)
    assert f"{found['metrics']['nDCG@10']:.2f}" in printed
    assert f"answers changed: {found['changed']:.2f} %" in printed
    assert "that the model of --against embedded" in refused(*words[:4], "--keep-index")
    alone = json.loads(succeeded("evaluate", bundles[1], "--data", search, "--split", "valid", "--json"))
    assert set(alone) == {"model", "split", "examples", "metrics"}
    itself = json.loads(succeeded("evaluate", bundles[0], "--data", search, "--against", model, "--json"))
    assert itself["changed"] == 0
    assert itself["difference"]["MRR"]["high"] == pytest.approx(0, abs=1e-9)


def test_evaluate_forms_of_the_vectors(bundles: tuple[Path, Path], model: Path, search: Path, tmp_path: Path) -> None:
    words = ("evaluate", bundles[0], "--data", search, "--dimensions", "8,16", "--precision", "int8, binary")
    found = json.loads(succeeded(*words, "--json"))
    whole, *others = found["forms"]
    assert whole["metrics"] == found["metrics"]
    assert "difference" not in whole
    kept = [("int8", "int8"), ("int8", "float32"), ("binary", "binary"), ("binary", "float32")]
    kinds = [(form["dimensions"], form["precision"], form["queries"]) for form in others]
    wide = whole["dimensions"]
    cut = [(m, *one) for m in (8, 16) for one in [("float32", "float32"), *kept]]
    assert kinds == [*((wide, *one) for one in kept), *cut]
    assert (whole["bytes"], others[0]["bytes"], others[-1]["bytes"]) == (4 * wide, wide, 2)
    for form in others:
        for name, interval in form["difference"].items():
            assert interval["difference"] == pytest.approx(form["metrics"][name] - whole["metrics"][name])
            assert interval["low"] <= interval["difference"] <= interval["high"]
    assert any(form["changed"] > 0 for form in others)
    printed = succeeded(*words)
    drop = others[-1]["difference"]["nDCG@10"]["difference"]
    assert re.search(
        rf"16 binary, float32 queries +2 +{others[-1]['metrics']['nDCG@10']:.2f} .*{drop:+.2f} \[", printed
    )
    both = json.loads(succeeded("evaluate", bundles[1], *words[2:6], "--against", model, "--json"))
    assert [form["dimensions"] for form in both["forms"]] == [wide, 8, 16]
    assert both["forms"][0]["metrics"] == both["metrics"] != both["against_metrics"]
    (tmp_path / "texts.jsonl").write_text('{"text": "bam"}\n{"text": "bem"}\n')
    alone = ("evaluate", bundles[0], "--data", tmp_path, "--against", model, *words[6:])
    assert "are about vectors of pages that are searched" in refused(*alone)
    assert "precision is 'int4', not one of" in refused(*words[:6], "--precision", "int4")
    assert "beams is 2, which is for models that write" in refused(*words, "--beams", 2)


def test_evaluate_with_the_originals_index(
    bundles: tuple[Path, Path], model: Path, search: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are embedded once, by the original."""
    embedded: list[int] = []
    real = Bundle.embed

    def embed(bundle: Bundle, texts: Sequence[str], **ways: Any) -> Any:
        embedded.append(len(texts))
        return real(bundle, texts, **ways)

    monkeypatch.setattr(Bundle, "embed", embed)
    words = ("evaluate", bundles[1], "--data", search, "--against", model, "--json")
    whole = json.loads(succeeded(*words))
    pages, queries, *_ = embedded
    assert embedded == [pages, queries] * 2
    embedded.clear()
    kept = json.loads(succeeded(*words, "--keep-index"))
    assert embedded == [pages, queries, queries]
    assert kept["against_metrics"] == whole["against_metrics"]
    embedded.clear()
    cut = json.loads(succeeded(*words, "--keep-index", "--dimensions", 8))
    assert embedded == [pages, queries, queries]
    assert cut["metrics"] == cut["forms"][0]["metrics"] == kept["metrics"]


def test_evaluate_without_labels(bundles: tuple[Path, Path], model: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    write_rows(tmp_path / "texts.jsonl", [{"text": sentence(rng, 5)} for _ in range(40)])
    assert "--against" in refused("evaluate", bundles[1], "--data", tmp_path)
    found = json.loads(succeeded("evaluate", bundles[0], "--data", tmp_path, "--against", model, "--json"))
    assert found["metrics"] == pytest.approx({"overlap@10": 100, "cosine": 100}, abs=1e-3)


def test_inspect(bundles: tuple[Path, Path], model: Path) -> None:
    found = json.loads(succeeded("inspect", bundles[1], "--json"))
    assert (found["kind"], found["format"], len(found["layers"])) == ("bundle", "int8", 2)
    assert "attention" in succeeded("inspect", model)
    assert "no such directory" in refused("inspect", model / "a" / "b")


def test_latency_of_bundle_and_model(
    bundles: tuple[Path, Path], model: Path, search: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = judging.compare
    monkeypatch.setattr(judging, "compare", lambda *a, **k: real(*a, **{**k, **HURRIED}))
    words = ("latency", model, bundles[1], "--data", search, "--batch", "2", "--seq", "7", "--threads", "1")
    printed = succeeded(*words, "-o", tmp_path / "times.json")
    for workload in ("sorted", "mixed", "single", "2x7"):
        assert f"{workload}: {bundles[1]}" in printed
    (found,) = json.loads((tmp_path / "times.json").read_text())["runs"]
    assert found["baseline"] == str(model)
    assert found["threads"] == 1


def test_latency_refuses(bundles: tuple[Path, Path]) -> None:
    assert "named twice" in refused("latency", bundles[0], bundles[0])
    assert "--seq 99 is over the 40 positions" in refused("latency", bundles[0], "--seq", "99")
    result = run("latency", bundles[0], "--batch", "1,x")
    assert result.exit_code == 2
    assert "'1,x' is not whole numbers" in result.stderr


def test_report_renders_again_and_compares(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder, printed = finished
    (folder / "out" / "report.html").unlink()
    shown = succeeded("report", folder / "out").splitlines()
    assert (folder / "out" / "report.html").is_file()
    assert shown == [line for line in printed.splitlines()[1:] if line in shown]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_bytes((folder / "out" / "report.json").read_bytes())
    table = succeeded("report", folder / "out", tmp_path / "other")
    assert str(tmp_path / "other") in table.splitlines()[0]
    assert "no such file" in refused("report", tmp_path)


def test_train_compress_and_predict_a_classifier(model: Path, topics: Path, tmp_path: Path) -> None:
    words = ("train", model, "--data", topics, "--epochs", "6", "--lr", "0.003", "--batch-tokens", "64")
    printed = succeeded(*words, "-o", tmp_path / "tuned")
    assert "test, once, with epoch " in printed
    assert float(printed.split("accuracy ")[1].split(",")[0]) > 60  # a guess is right in 33 of 100
    assert succeeded(*words, "-o", tmp_path / "tuned", "--resume") == printed
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("compress", tmp_path / "tuned", "--data", topics, "--recipe", tmp_path / "recipe.toml", "--threads", 1)
    assert "deciding metric accuracy; no budget given" in succeeded(*words, "-o", tmp_path / "out")
    texts = [json.loads(line)["text"] for line in (topics / "test.jsonl").read_text().splitlines()[:2]]
    assert "--dimensions is of vectors" in refused("predict", tmp_path / "out" / "bundle", "--dimensions", 4, given="a")
    rows = succeeded("predict", tmp_path / "out" / "bundle", given="\t".join(texts) + "\n").splitlines()
    label, share, text = rows[0].split("\t")
    assert label.startswith("topic ")
    assert 1 / 3 < float(share) <= 1
    assert text == " ".join(texts)
    found = json.loads(succeeded("evaluate", tmp_path / "out" / "bundle", "--data", topics, "--json"))
    assert set(found["metrics"]) == {"accuracy", "macro_f1"}


@pytest.mark.parametrize("mixer", ["attention", "gru"])
def test_train_a_new_classifier(mixer: str, topics: Path, tmp_path: Path) -> None:
    new = ("--layers", "1-0", "--width", 16, "--heads", 2, "--neurons", 16, "--mixer", mixer, "--vocabulary", 400)
    words = ("train", "--data", topics, "--epochs", 25, "--lr", 0.01, "--batch-tokens", 200, "-o", tmp_path / "new")
    printed = succeeded(*words, *new)
    assert float(printed.split("accuracy ")[1].split(",")[0]) > 60  # a guess is right in 33 of 100
    head = json.loads((tmp_path / "new" / "config.json").read_text())["head"]
    assert (head["pooling"], head["labels"]) == (
        "mean" if mixer == "attention" else "last",
        [f"topic {i}" for i in range(3)],
    )
    assert "parity held" in succeeded("export", tmp_path / "new", "-o", tmp_path / "bundle")
    assert succeeded("predict", tmp_path / "bundle", given="one\n").startswith("topic ")


def test_train_refuses(model: Path, topics: Path, search: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    assert "lacks train" in refused("train", model, "--data", search, *out)
    assert "epochs and steps are given" in refused("train", model, "--data", topics, "--epochs", 1, "--steps", 2, *out)
    assert "lr is 3.0" in refused("train", model, "--data", topics, "--lr", 3, *out)
    assert "name the MODEL to fine-tune" in refused("train", "--data", topics, *out)
    assert "--layers is of a new model" in refused("train", model, "--data", topics, "--layers", "2-1", *out)
    assert "a classifier has none" in refused("train", "--data", topics, "--layers", "2-1", *out)
    assert list(tmp_path.iterdir()) == []


def test_train_export_and_predict_a_new_translator(search: Path, tmp_path: Path) -> None:
    for split, count in (("train", 40), ("valid", 6), ("test", 6)):
        rows = [{"source": f"word {i % 7} of {split} {i}", "target": f"Wort {i % 7}"} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = ("--layers", "2-1", "--width", 16, "--heads", 2, "--neurons", 16, "--mixer", "ssru", "--vocabulary", 300)
    words = ("train", "--data", tmp_path, "--steps", 3, "--batch-tokens", 200, "-o", tmp_path / "out")
    printed = succeeded(*words, *new)
    assert printed.splitlines()[0].split() == ["epoch", "BLEU,", "valid", "chrF,", "valid", "token_accuracy,", "valid"]
    assert ": BLEU " in printed.split("test, once, with epoch ")[1]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [len(config[stack]) for stack in ("encoder", "decoder")] == [2, 1]
    assert config["decoder"][0]["mixer"]["kind"] == "ssru"
    assert config["embedding"]["vocab_size"] <= 300
    assert succeeded(*words, *new, "--resume") == printed
    assert "2 x attention, then 1 x ssru" in succeeded("report", tmp_path / "out")
    assert (tmp_path / "out" / "training.html").is_file()
    again = ("train", tmp_path / "out", "--data", tmp_path, "--steps", 1, "-o", tmp_path / "again")
    assert "test, once" in succeeded(*again, "--tensorboard", tmp_path / "board")
    assert len(list((tmp_path / "board").iterdir())) == 1
    side = succeeded("report", tmp_path / "out", tmp_path / "again", "-o", tmp_path / "side.html")
    assert len(side.splitlines()) == 4
    assert "exists" in refused("report", tmp_path / "out", "-o", tmp_path / "side.html")
    other = ("-o", tmp_path / "other")
    assert "leave it out, or MODEL" in refused(*again[:-2], *other, "--width", 16)
    wrong = run("train", "--data", tmp_path, *other, "--layers", 6)
    assert wrong.exit_code == 2
    assert "'6' is not two whole numbers" in wrong.stderr
    assert "needs an encoder-decoder" in refused("train", "--data", tmp_path, *other, *new[2:], "--layers", "0-1")
    (tmp_path / "vectors.txt").write_text("word " + " ".join(["0.5"] * 16) + "\n")
    taught = (*words[:-1], tmp_path / "vectors", *new, "--vectors", tmp_path / "vectors.txt")
    assert "test, once" in succeeded(*taught)
    notes = json.loads((tmp_path / "vectors" / "provenance.json").read_text())
    assert notes["vectors"]["file"] == "vectors.txt"
    assert "--vectors is of a new model" in refused(*again[:-2], *other, "--vectors", tmp_path / "vectors.txt")
    assert "longer pairs are left out" in refused("train", "--data", tmp_path, *other, "--max-length", 9)
    assert "the model writes: give data with source and target" in refused(
        "compress", tmp_path / "out", "--data", search, *other
    )
    assert not (tmp_path / "other").exists()
    for form in ("fp32", "int8"):
        made = succeeded("export", tmp_path / "out", "-o", tmp_path / form, "--format", form)
        assert made.splitlines()[0].startswith(str(tmp_path / form / "onnx" / "generate.onnx"))
        assert "parity held: 100% of 8 texts equal greedily" in made
    lines = "word 1 of test 1\n\nword 2 of test 2\n"
    written = succeeded("predict", tmp_path / "fp32", "--beams", 2, "--max-new-tokens", 5, given=lines)
    assert len(written.split("\n")) == 4
    assert written.split("\n")[1] == ""
    stream = ("predict", tmp_path / "fp32", "--max-new-tokens", 5)
    assert succeeded(*stream, "--stream", given=lines) == succeeded(*stream, given=lines)
    assert "packed" in refused("export", tmp_path / "out", "--layout", "padded", *other)


def test_what_is_streamed_is_printed_piece_by_piece_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    class Writing:
        def stream(self, text: str, **way: Any) -> Iterator[str]:
            assert way == {"sample": True}
            for piece in ("a", " b\r", "\nc", "\n", "\nd\n") if text == "x" else ():
                yield piece
                seen.append(capsys.readouterr().out)

    _stream(Writing(), ["x", "y"], {"sample": True})
    assert seen == ["a", " b", " c", "", "  d"]
    assert "".join(seen) == " ".join("a b\r\nc\n\nd\n".splitlines())
    assert capsys.readouterr().out == "\n\n"


def test_compress_evaluate_and_time_a_translator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", 40), ("valid", 6), ("test", 6)):
        rows = [{"source": f"word {i % 7} of {split} {i}", "target": f"Wort {i % 7}"} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = ("--layers", "1-2", "--width", 16, "--heads", 2, "--neurons", 16, "--vocabulary", 300)
    succeeded("train", "--data", tmp_path, "--steps", 3, "--batch-tokens", 200, "-o", tmp_path / "model", *new)
    words = ("compress", tmp_path / "model", "--data", tmp_path, "--recipe", tmp_path / "recipe.toml", "--threads", 1)
    steps = '[[step]]\nname = "distill"\nsteps = 2\nbatch_tokens = 200\nmixer = "ssru"\n'
    (tmp_path / "recipe.toml").write_text(steps)
    untaught = run(*words, "-o", tmp_path / "untaught")
    assert untaught.exit_code == 2
    assert "the teacher ends none of its 40 texts" in untaught.stderr.splitlines()[-1]
    (tmp_path / "recipe.toml").write_text(steps + f"beams = 0\n{INT8}")
    printed = succeeded(*words, "-o", tmp_path / "out")
    assert printed.startswith("deciding metric BLEU; no budget given")
    assert "speed-up, sorted: " in printed
    bundle = tmp_path / "out" / "bundle"
    found = json.loads(
        succeeded("evaluate", bundle, "--data", tmp_path, "--against", tmp_path / "model", "--json", "--threads", 1)
    )
    assert set(found["metrics"]) == {"BLEU", "chrF"}
    assert found["difference"]["BLEU"]["low"] <= found["difference"]["BLEU"]["high"]
    best = json.loads(succeeded("evaluate", bundle, "--data", tmp_path, "--beams", 3, "--json", "--threads", 1))
    assert set(best["metrics"]) == {"BLEU", "chrF"}
    inspected = json.loads(succeeded("inspect", bundle, "--json"))
    assert inspected["onnx"]["operators"]["Loop"] == 6
    real = judging.compare
    monkeypatch.setattr(judging, "compare", lambda *a, **k: real(*a, **{**k, **HURRIED}))
    timed = succeeded("latency", tmp_path / "model", bundle, "--batch", "2", "--seq", "7", "--threads", "1")
    assert f"2x7: {bundle}" in timed


def test_train_compress_evaluate_and_predict_a_summarizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filler = " and so on" * 9
    for split, count in (("train", 40), ("valid", 6), ("test", 6)):
        rows = [{"text": f"word {i % 7} of {split} {i}{filler * (i % 2)}", "summary": f"{i % 7}"} for i in range(count)]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    new = ("--layers", "1-2", "--width", 16, "--heads", 2, "--neurons", 16, "--vocabulary", 300)
    words = ("train", "--data", tmp_path, "--steps", 40, "--lr", 0.01, "--batch-tokens", 200, "--max-length", 20)
    printed = succeeded(*words, *new, "-o", tmp_path / "model")
    assert "texts cut at 20 tokens: 20 of train" in printed
    assert [f"ROUGE-{kind}, valid" in printed.splitlines()[0] for kind in "12L"] == [True] * 3
    notes = json.loads((tmp_path / "model" / "provenance.json").read_text())
    assert (notes["pairs_left_out"], notes["sources_cut"]) == (0, 20)
    assert "ROUGE-L" in succeeded("report", tmp_path / "model")
    steps = '[[step]]\nname = "distill"\nsteps = 2\nbatch_tokens = 200\nmixer = "ssru"\nbeams = 0\n'
    (tmp_path / "recipe.toml").write_text(
        f'[[step]]\nname = "prune"\ncost = 0.8\nmultiple = 4\nagreement = 0\n{steps}{INT8}'
    )
    words = ("compress", tmp_path / "model", "--data", tmp_path, "--recipe", tmp_path / "recipe.toml", "--threads", 1)
    printed = succeeded(*words, "--max-drop", "100", "-o", tmp_path / "out")
    assert printed.startswith("deciding metric ROUGE-L; --max-drop 100.00 points")
    assert "sources cut: at 20 tokens, train 20 of 40, valid 3 of 6, test 3 of 6" in printed
    assert succeeded("report", tmp_path / "out").splitlines()[0].split()[1] == "ROUGE-L,"
    bundle = tmp_path / "out" / "bundle"
    words = ("evaluate", bundle, "--data", tmp_path, "--against", tmp_path / "model", "--threads", 1)
    found = json.loads(succeeded(*words, "--task", "summarization", "--json"))
    assert set(found["metrics"]) == set(found["difference"]) == {"ROUGE-1", "ROUGE-2", "ROUGE-L"}
    assert (found["sources_cut"], found["against_sources_cut"], found["cut_at"]) == (3, 3, 20)
    assert succeeded(*words).endswith("sources cut at 20 tokens: 3\n")
    assert "the field 'source' is missing" in refused(*words, "--task", "translation")
    assert "head summarization, up to 20 tokens" in succeeded("inspect", bundle)
    real = judging.compare
    monkeypatch.setattr(judging, "compare", lambda *a, **k: real(*a, **{**k, **HURRIED}))
    timed = succeeded("latency", tmp_path / "model", bundle, "--data", tmp_path, "--threads", "1")
    assert f"sorted: {bundle}" in timed
    made = succeeded("export", tmp_path / "model", "-o", tmp_path / "int8", "--format", "int8")
    assert "parity held" in made
    result = run("predict", tmp_path / "int8", "--beams", 2, given=f"word 1\n\nword 2{filler}\n")
    assert (result.exit_code, len(result.stdout.split("\n")), result.stdout.split("\n")[1]) == (0, 4, "")
    assert "cut at 20 tokens: 1 of 3 lines" in result.stderr
    written = succeeded("predict", tmp_path / "int8", given="word 1\n")
    assert "cut at" not in run("predict", tmp_path / "int8", given="word 1\n").stderr
    assert written.splitlines() == load_bundle(tmp_path / "int8").summarize(["word 1"])


def test_train_export_and_predict_a_new_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_parity, "TEXTS", PARITY_TEXTS)
    for split, count in (("train", 40), ("valid", 6), ("test", 6)):
        rows = [{"text": f"word {i % 7} of {split} {i}"} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new = ("--layers", "0-2", "--width", 16, "--heads", 2, "--group", 2, "--neurons", 16, "--vocabulary", 300)
    words = ("train", "--data", tmp_path, "--steps", 3, "--batch-tokens", 200)
    printed = succeeded(*words, *new, "-o", tmp_path / "out")
    assert "test, once, with epoch " in printed
    assert ": likelihood " in printed
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [len(config[stack]) for stack in ("encoder", "decoder")] == [0, 2]
    assert config["decoder"][1]["mixer"]["group"] == 2
    assert "needs a decoder by itself" in refused(*words, *new[2:], "--layers", "1-1", "-o", tmp_path / "other")
    made = succeeded("export", tmp_path / "out", "-o", tmp_path / "bundle")
    assert "parity held: 100% of 32 texts equal greedily" in made
    lines = "word 1\n\nof\n"
    written = succeeded("predict", tmp_path / "bundle", "--beams", 2, "--max-new-tokens", 5, given=lines)
    assert len(written.split("\n")) == 4
    draw = ("predict", tmp_path / "bundle", "--max-new-tokens", 5, "--sample")
    more = ("--temperature", 2, "--top-k", 50, "--top-p", 0.9, "--seed")
    drawn = [succeeded(*draw, *more, seed, given=lines) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert succeeded(*draw, "--stream", *more, 2, given=lines) == drawn[2]
    assert "--beams 2 knows no token before the last one" in refused(*draw, "--stream", "--beams", 2, given=lines)
    assert "--stream prints" in refused(*draw, "--stream", "-o", tmp_path / "x.txt", given=lines)
    assert not (tmp_path / "x.txt").exists()
    assert "beams is 2" in refused(*draw, "--beams", 2, given=lines)
    assert "leave out --top-k, --seed" in refused(*draw[:-1], "--top-k", 5, "--seed", 1, given=lines)


def test_a_language_model_is_compressed_judged_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts that have labels too: the task is said."""
    for split, count in (("train", 40), ("valid", 6), ("test", 6)):
        rows = [{"text": f"word {i % 7} of {split} {i}", "label": "ab"[i % 2]} for i in range(count)]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    data = ("--data", tmp_path, "--task", "language")
    new = ("--layers", "0-2", "--width", 16, "--heads", 2, "--neurons", 16, "--vocabulary", 300)
    succeeded("train", *data, "--steps", 3, "--batch-tokens", 200, *new, "-o", tmp_path / "model")
    steps = '[[step]]\nname = "prune"\ncost = 0.8\nmultiple = 4\nagreement = 0\n'
    (tmp_path / "recipe.toml").write_text(steps + INT8)
    real = latencies.compare
    for place in (latencies, judging):
        monkeypatch.setattr(place, "compare", lambda *a, **k: real(*a, **{**k, **HURRIED}))
    words = ("compress", tmp_path / "model", *data, "--recipe", tmp_path / "recipe.toml", "--threads", 1)
    printed = succeeded(*words, "--max-drop", "100", "-o", tmp_path / "out")
    assert printed.startswith("deciding metric likelihood; --max-drop 100.00 points")
    bundle = tmp_path / "out" / "bundle"
    judged = ("evaluate", bundle, *data[:2], "--against", tmp_path / "model", "--threads", 1)
    found = json.loads(succeeded(*judged, *data[2:], "--json"))
    assert set(found["metrics"]) == set(found["difference"]) == {"likelihood", "perplexity", "bits_per_byte"}
    assert found["metrics"]["perplexity"] == pytest.approx(100 / found["metrics"]["likelihood"])
    assert "the model goes on from texts: give data with text alone, or say that its task is language" in refused(
        *judged
    )
    timed = succeeded("latency", tmp_path / "model", bundle, *data, "--threads", 1, "--batch", 2, "--seq", 8)
    assert f"sorted: {bundle}" in timed
    assert f"2x8: {bundle}" in timed
    limits = "256 tokens leave a model of 256 positions none to write to"
    assert limits in refused("latency", tmp_path / "model", bundle, "--threads", 1, "--batch", 1, "--seq", 256)


def test_ctrl_c_says_how_to_go_on(model: Path, search: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slimformer.transformer.data.load_data", stop)
    result = run("compress", model, "--data", search, "-o", tmp_path / "out")
    assert (result.exit_code, result.stderr) == (130, "stopped; --resume goes on\n")
    monkeypatch.setattr("slimformer.export.report.load_report", stop)
    assert (run("report", tmp_path).exit_code, run("report", tmp_path).stderr) == (130, "stopped\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "/x/y"), "error: the disk does not take more (/x/y): No space left"),
        (MemoryError(), "error: the memory does not suffice"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "error: the memory does not suffice"),
    ],
)
def test_what_runs_out_is_one_line(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("slimformer.export.report.load_report", fail)
    assert refused("report", "x").startswith(line)


def test_a_failure_of_ours_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("slimformer.export.report.load_report", fail)
    result = run("report", "x")
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_has_an_example(command: str) -> None:
    text = succeeded(command, "--help")
    assert "Example" in text
    assert f"slimformer {command} " in text


def test_help_and_predict_load_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom slimformer.cli import main\nmain(sys.argv[1:])"
    for words in (["compress", "--help"], ["--version"], ["predict", "nowhere"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, input="x\n")
        assert (done.returncode, "Traceback" in done.stderr) == (2 if words[0] == "predict" else 0, False)
    heavy = (
        "import sys, slimformer.cli; print([m for m in ('torch', 'onnx', 'onnxruntime', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "[]\n"


def test_the_version_is_printed() -> None:
    assert succeeded("--version") == "slimformer, version 0.1.0\n"
