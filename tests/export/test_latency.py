import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from slimformer.export import latency, latency_worker
from slimformer.export.latency import (
    LatencyResult,
    Workload,
    compare,
    plan_rounds,
    shape_workload,
    text_workloads,
    writing,
)
from slimformer.transformer.errors import InputError

VOCAB, WIDTH = 50, 128
SHAPE = {"8x64": shape_workload(8, 64, VOCAB, 0)}


def write_model(path: Path, matmuls: int, extra_input: str | None = None) -> Path:
    """An embedding table and a chain of `matmuls` square matrices, on `input_ids` (B, T) alone."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((VOCAB, WIDTH)), "w": rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5}
    nodes = [onnx.helper.make_node("Gather", ["table", "input_ids"], ["h0"])]
    nodes += [onnx.helper.make_node("MatMul", [f"h{i}", "w"], [f"h{i + 1}"]) for i in range(matmuls)]
    inputs = ["input_ids", *([extra_input] if extra_input else [])]
    graph = onnx.helper.make_graph(
        nodes,
        "chain",
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["B", "T"]) for name in inputs],
        [onnx.helper.make_tensor_value_info(f"h{matmuls}", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)
    return path


class Recorder:
    """A progress listener that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.planned = 0
        self.ended = 0

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.planned += total or 0

    def advance(self, n: int = 1, note: str = "") -> None:
        self.notes.append(note)

    def done(self, note: str = "") -> None:
        self.ended += 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"big": write_model(folder / "big.onnx", 8), "small": write_model(folder / "small.onnx", 1)}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Every process that `compare` starts."""
    found: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(latency.subprocess, "Popen", Recorded)
    return found


@pytest.fixture(scope="module")
def measured(models: dict[str, Path]) -> tuple[LatencyResult, Recorder, int]:
    """Both models on two workloads, asked for by a process that itself holds much memory."""
    ballast = np.ones(50_000_000)
    work = {**SHAPE, "two": Workload("two", SHAPE["8x64"].batches * 2)}
    recorder = Recorder()
    result = compare(models, work, 1, rounds=3, processes=2, minimum=0.02, progress=recorder)
    return result, recorder, ballast.nbytes


def test_the_smaller_model_is_faster(measured: tuple[LatencyResult, Recorder, int]) -> None:
    result = measured[0]
    for workload in ("8x64", "two"):
        small, big = result.timing("small", workload), result.timing("big", workload)
        assert small.ratio_low <= small.ratio <= small.ratio_high
        assert small.ratio > 1.5  # an eighth of the products
        assert (big.ratio, big.ratio_low, big.ratio_high) == (1, 1, 1)
        assert small.p50_ms < big.p50_ms
        assert small.p50_ms <= small.p90_ms <= small.p99_ms
        assert small.texts_per_second > big.texts_per_second
        assert small.tokens_per_second == pytest.approx(64 * small.texts_per_second)


def test_a_round_is_whole_passes_until_the_minimum(tmp_path: Path, models: dict[str, Path]) -> None:
    feeds = tmp_path / "feeds.npz"
    latency._write_feeds({**SHAPE, "two": Workload("two", SHAPE["8x64"].batches * 2)}, feeds)
    model = latency_worker.Model(str(models["small"]), feeds, "CPUExecutionProvider", 1)
    assert [np.shape(model.round(workload, minimum=0)) for workload in (0, 1)] == [(1, 1), (1, 2)]
    many = np.array(model.round(1, minimum=0.1))
    assert many.shape[0] > 1
    assert many.shape[1] == 2
    assert many[:-1].sum() < 0.1  # the last pass begins before the minimum is over


def test_rounds_are_interleaved_and_their_order_rotates(measured: tuple[LatencyResult, Recorder, int]) -> None:
    result, recorder, _ = measured
    first = ["big", "small"]
    names = {0: first, 1: first[::-1], 2: first}
    once = [f"{workload}: {name}" for number in range(3) for workload in ("8x64", "two") for name in names[number]]
    assert recorder.notes == once * 2
    assert recorder.planned == len(recorder.notes)
    assert recorder.ended == 2
    assert np.shape(result.timing("small", "two").pass_seconds) == (2, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_memory_is_the_workers_own(measured: tuple[LatencyResult, Recorder, int]) -> None:
    result, _, ballast = measured
    assert all(20 < cost.peak_mib < ballast / 2**20 for cost in result.models)


def test_the_result_is_plain_json(measured: tuple[LatencyResult, Recorder, int]) -> None:
    plain = json.loads(json.dumps(measured[0].to_dict()))
    assert plain["baseline"] == "big"
    assert plain["workloads"][1] == {
        "name": "two", "batches": 2, "rows": 16, "tokens": 1024, "padded_tokens": 1024, "rounds": 3,
    }  # fmt: skip
    assert plain["timings"][1]["ratio"] == measured[0].timing("small", "8x64").ratio


def test_statistics_of_hand_made_rounds() -> None:
    """Passes of two batches; the baseline's take 4 s and 8 s, the model's 2 s, once the median of 1, 2 and 9."""
    restart = latency._Restart(
        passes={
            ("base", "w"): [[[1.0, 3.0]], [[4.0, 4.0]]],
            ("fast", "w"): [[[0.5, 0.5], [1.0, 1.0], [4.0, 5.0]], [[1.0, 1.0]]],
        },
        load_seconds={},
        peak_mib={},
        plan={},
    )
    work = Workload("w", SHAPE["8x64"].batches)  # 8 texts, 512 tokens
    timing = latency._timing("fast", "base", work, "w", [restart], seed=0)
    assert timing.pass_seconds == ((2.0, 2.0),)
    assert timing.ratio == pytest.approx(3.0)  # the median of 2 and 4
    assert 2.0 <= timing.ratio_low < 3.0 < timing.ratio_high <= 4.0
    assert timing.p50_ms == 1000.0  # of 0.5 0.5 1 1 1 1 4 5
    assert timing.p90_ms == pytest.approx(4300.0)
    assert (timing.texts_per_second, timing.tokens_per_second) == (4.0, 256.0)


@pytest.mark.parametrize(
    ("seconds", "most", "plan"),
    [
        (20, 7, {"dear": 3, "cheap": 7}),  # 10 s buy the 6 cheap ones; 14 s buy one dear one, but 3 is the least
        (61, 7, {"dear": 6, "cheap": 7}),  # 55 s are left for 5 more
        (-5, 7, {"dear": 3, "cheap": 3}),
        (1000, 2, {"dear": 2, "cheap": 2}),
    ],
)
def test_the_budget_decides_the_rounds(seconds: float, most: int, plan: dict[str, int]) -> None:
    assert plan_rounds({"dear": 10.0, "cheap": 1.0}, seconds, most) == plan


def test_rounds_adapt_to_the_time_there_is(models: dict[str, Path]) -> None:
    hurried = compare(models, SHAPE, 1, rounds=50, processes=1, seconds=0, minimum=0.0)
    assert hurried.workloads[0].rounds == 3
    patient = compare(models, SHAPE, 1, rounds=5, processes=1, seconds=1000, minimum=0.0)
    assert patient.workloads[0].rounds == 5


def rows(workload: Workload) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(ids[mask == 1].tolist())
        for batch in workload.batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    )


def test_composition_of_text_workloads() -> None:
    queries = [[11], [12, 13]]
    titles = [[21, 22, 23, 24]]
    made = text_workloads([queries, titles], seed=0, batch=3, count=5)  # two of each field; the one title twice
    everything = Counter({(11,): 1, (12, 13): 1, (21, 22, 23, 24): 2})
    assert rows(made["sorted"]) == rows(made["mixed"]) == everything
    short, long = made["sorted"].batches
    np.testing.assert_array_equal(short["input_ids"], [[11, 0, 0, 0], [12, 13, 0, 0], [21, 22, 23, 24]])
    np.testing.assert_array_equal(short["attention_mask"], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(long["input_ids"], [[21, 22, 23, 24]])
    assert short["input_ids"].dtype == short["attention_mask"].dtype == np.int64
    assert (made["sorted"].rows, made["sorted"].tokens, made["sorted"].padded_tokens) == (4, 11, 16)
    assert len(made["single"].batches) == made["single"].rows == 64
    assert rows(made["single"]) == {(11,): 32, (12, 13): 32}


def test_default_sizes_and_the_effect_of_the_seed() -> None:
    rng = np.random.default_rng(0)
    fields = [[list(range(1, 1 + rng.integers(1, 40))) for _ in range(500)] for _ in range(3)]
    fields[1] = [[100, *text] for text in fields[1]]
    first, again, other = (text_workloads(fields, seed) for seed in (1, 1, 2))
    assert {name: len(work.batches) for name, work in first.items()} == {"sorted": 12, "mixed": 12, "single": 64}
    assert sum(count for text, count in rows(first["mixed"]).items() if text[0] == 100) == 128
    widths = [batch["input_ids"].shape[1] for batch in first["sorted"].batches]
    assert widths == sorted(widths)
    assert first["sorted"].padded_tokens < first["mixed"].padded_tokens
    for name, work in first.items():
        for a, b in zip(work.batches, again[name].batches, strict=True):
            np.testing.assert_array_equal(a["input_ids"], b["input_ids"])
        assert rows(work) != rows(other[name])


def test_shape_workload() -> None:
    one, again, other = (shape_workload(2, 300, 5, seed) for seed in (0, 0, 1))
    (batch,) = one.batches
    assert one.name == "2x300"
    assert (one.rows, one.tokens, one.padded_tokens) == (2, 600, 600)
    assert set(np.unique(batch["input_ids"])) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(batch["input_ids"], again.batches[0]["input_ids"])
    assert not np.array_equal(batch["input_ids"], other.batches[0]["input_ids"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: text_workloads([], 0), "at least one text field"),
        (lambda: text_workloads([[[1]], []], 0), "text field 2 of 2 is empty"),
        (lambda: text_workloads([[[1], []]], 0), "text 2 of text field 1 has no tokens"),
        (lambda: text_workloads([[[1]], [[1]]], 0, count=1), "one text for each of 2"),
        (lambda: shape_workload(0, 8, 5, 0), "shape 0x8"),
    ],
)
def test_refused_workloads(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        compare({"a": tmp_path / "none.onnx"}, {"w": Workload("w", ())}, 1, rounds=0, seconds=float("nan"))
    for part in ("model a: there is no file", "workload w has no batches", "rounds 0", "seconds nan"):
        assert part in str(caught.value)


def assert_one_line(error: InputError, *parts: str) -> None:
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


def test_a_file_that_is_no_model(tmp_path: Path, models: dict[str, Path], started: list[subprocess.Popen[str]]) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"not a model")
    with pytest.raises(InputError) as caught:
        compare({**models, "bad": bad}, SHAPE, 1)
    assert_one_line(caught.value, "model bad", str(bad), "exit code 1", "ONNXRuntimeError")
    assert len(started) == 3
    assert all(process.returncode is not None for process in started)


def test_a_model_that_fails_on_the_workload(models: dict[str, Path], started: list[subprocess.Popen[str]]) -> None:
    ids = np.full((1, 4), VOCAB)
    work = {"out of range": Workload("w", ({"input_ids": ids, "attention_mask": np.ones_like(ids)},))}
    with pytest.raises(InputError) as caught:
        compare(models, work, 1)
    assert_one_line(caught.value, "model big", "out of data bounds")
    assert all(process.returncode is not None for process in started)


def test_an_input_that_no_workload_has(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.onnx", 1, extra_input="pixel_values")
    with pytest.raises(InputError, match="wants the input 'pixel_values'"):
        compare({"m": model}, SHAPE, 1)


def test_a_worker_killed_between_rounds(models: dict[str, Path], started: list[subprocess.Popen[str]]) -> None:
    class Killer(Recorder):
        def advance(self, n: int = 1, note: str = "") -> None:
            started[0].kill()

    with pytest.raises(InputError) as caught:
        compare(models, SHAPE, 1, progress=Killer())
    assert_one_line(caught.value, "model big", "killed by SIGKILL", "no message")
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_an_error_of_the_listener_ends_the_workers(
    models: dict[str, Path], started: list[subprocess.Popen[str]]
) -> None:
    class Faulty(Recorder):
        def advance(self, n: int = 1, note: str = "") -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(models, SHAPE, 1, progress=Faulty())
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def states(parent: int) -> dict[int, str]:
    """The state letter of each child of a process (R running, S sleeping, T stopped, Z dead)."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(child): state(int(child)) for child in children}


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_workers_stop_in_turn_and_die_with_their_parent(models: dict[str, Path], number: signal.Signals) -> None:
    script = (  # a shell that starts tests in the background has them ignore Ctrl-C
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys; from pathlib import Path; from slimformer.export.latency import compare, shape_workload\n"
        "models = {path: Path(path) for path in sys.argv[1:]}\n"
        "compare(models, {'w': shape_workload(8, 64, 50, 0)}, 1, rounds=10**6, seconds=1e6, minimum=0.5)"
    )
    command = [sys.executable, "-c", script, *map(str, models.values())]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: sorted(states(parent.pid).values()) == ["R", "T"])
        children = list(states(parent.pid))
        os.kill(parent.pid, number)
        _, error = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert (b"KeyboardInterrupt" in error) == (number == signal.SIGINT)
    wait_for(lambda: all(state(child) == "Z" for child in children), 10)


def test_fit_feeds_what_the_model_takes() -> None:
    feed = {"input_ids": np.array([[3, 4]]), "attention_mask": np.array([[1, 0]])}
    fitted = latency_worker.fit(feed, {"input_ids": "tensor(int32)", "token_type_ids": "tensor(int64)"})
    assert list(fitted) == ["input_ids", "token_type_ids"]
    assert fitted["input_ids"].dtype == np.int32
    np.testing.assert_array_equal(fitted["input_ids"], [[3, 4]])
    np.testing.assert_array_equal(fitted["token_type_ids"], [[0, 0]])
    with pytest.raises(ValueError, match="tensor\\(string\\)"):
        latency_worker.fit(feed, {"input_ids": "tensor(string)"})


def test_each_shape_is_warmed_up_by_its_fullest_batch() -> None:
    def feed(lengths: list[int], width: int) -> dict[str, Any]:
        mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
        return {"input_ids": mask, "attention_mask": mask}

    batches = [feed([4, 1], 4), feed([4, 3], 4), feed([2, 2], 4), feed([5], 5)]
    assert latency_worker.warm_up_order(batches) == [1, 3]


class FallenBack:
    """A session that asked for CUDA and got the CPU, as onnxruntime gives it where the driver is missing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


def test_a_provider_that_falls_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", FallenBack)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    with pytest.raises(ValueError, match=r"CUDAExecutionProvider did not start .* CPUExecutionProvider"):
        latency_worker.Model("m.onnx", Path("feeds.npz"), "CUDAExecutionProvider", 1)


def test_a_missing_provider_is_an_error(models: dict[str, Path], started: list[subprocess.Popen[str]]) -> None:
    with pytest.raises(InputError, match="provider 'npu' is unknown"):
        compare(models, SHAPE, 1, provider="npu")
    assert started == []


def test_a_full_disk_is_an_input_error(monkeypatch: pytest.MonkeyPatch, models: dict[str, Path]) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(latency.np, "savez", full)
    with pytest.raises(InputError, match="No space left on device"):
        compare(models, SHAPE, 1)


def test_batches_of_graphs_that_write() -> None:
    ids = np.array([[5, 6, 7], [8, 0, 0]])
    feeds = tuple(
        {"input_ids": one, "attention_mask": (one > 0).astype(np.int64)} for one in (ids, np.repeat(ids, 9, 1))
    )
    found = writing(Workload("sorted", feeds), most=50, beams=4)
    assert (found.name, found.rows, found.tokens) == ("sorted", 4, 40)
    assert [int(batch["max_new_tokens"]) for batch in found.batches] == [2 * 3 + 10, 50]
    for batch in found.batches:
        assert int(batch["num_beams"]) == 4
        assert (float(batch["length_penalty"]), batch["length_penalty"].dtype) == (1.0, np.float32)
    assert int(writing(Workload("one", feeds[:1]), most=50).batches[0]["num_beams"]) == 1


def test_a_model_with_a_vocabulary_of_its_own_gets_its_own_ids(tmp_path: Path) -> None:
    """Ids that no table has fail in the model that they are given to, and in no other."""
    models = {"first": write_model(tmp_path / "a.onnx", 1), "second": write_model(tmp_path / "b.onnx", 1)}
    (batch,) = SHAPE["8x64"].batches
    beyond = {"8x64": Workload("8x64", ({key: value + VOCAB for key, value in batch.items()},))}
    ways: dict[str, Any] = {"rounds": 1, "processes": 1, "minimum": 0.0}
    with pytest.raises(InputError, match="second"):
        compare(models, SHAPE, 1, own={"second": beyond}, **ways)
    with pytest.raises(InputError, match="first"):
        compare(models, beyond, 1, own={"second": SHAPE}, **ways)
    result = compare(models, beyond, 1, own=dict.fromkeys(models, SHAPE), **ways)
    assert [timing.model for timing in result.timings] == ["first", "second"]
    with pytest.raises(InputError, match="model second: its own workload 8x64 has not as many batches"):
        compare(models, SHAPE, 1, own={"second": {}})
