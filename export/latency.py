"""Latency of models side by side, measured as whoever serves them would see it.

Each model runs in a process of its own (idle sessions in one process slow each other down) with onnxruntime's default
options and an explicit number of threads. Rounds are interleaved and their order rotates, so that what the machine
does besides falls on all models alike, and the others are stopped while one runs. A round's ratio is the baseline's
time for one pass through a workload over the model's, and its interval covers rounds and restarts of the processes.
"""

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..transformer.errors import InputError
from ..transformer.progress import SILENT, Progress
from ..transformer.statistics import ratio_interval
from ..transformer.tokenizer import pad
from .machine import available_threads, require_provider

Feed = Mapping[str, NDArray[Any]]
WORKER = "slimformer.export.latency_worker"
FEWEST_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Workload:
    """Batches that are run one after the other, each {"input_ids": (B, T) int64, "attention_mask": (B, T) int64}.

    Those for graphs that write also say how (`writing`).
    """

    name: str
    batches: tuple[Feed, ...]

    @property
    def rows(self) -> int:
        """Number of texts."""
        return sum(len(batch["input_ids"]) for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Number of valid tokens."""
        return sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    @property
    def padded_tokens(self) -> int:
        """Number of tokens with the padding."""
        return sum(batch["input_ids"].size for batch in self.batches)


def _batched(name: str, texts: Sequence[Sequence[int]], batch: int) -> Workload:
    padded = [pad(texts[at : at + batch]) for at in range(0, len(texts), batch)]
    return Workload(name, tuple({"input_ids": ids, "attention_mask": mask} for ids, mask in padded))


def _check_fields(fields: Sequence[Sequence[list[int]]]) -> None:
    if not fields:
        raise InputError("a workload needs at least one text field")
    for number, field in enumerate(fields, 1):
        if not field:
            raise InputError(f"text field {number} of {len(fields)} is empty: a workload takes equal parts of each")
        for row, text in enumerate(field, 1):
            if not text:
                raise InputError(f"text {row} of text field {number} has no tokens")


def text_workloads(
    fields: Sequence[Sequence[list[int]]], seed: int, batch: int = 32, count: int = 384
) -> dict[str, Workload]:
    """The three workloads made of a user's own texts.

    fields: for each text field (queries, titles, page texts) the token ids of its texts, special tokens included.
    `sorted`: `count // len(fields)` texts drawn from each field, in order of length, in batches of `batch`: what a
    careful user does. `mixed`: the same texts shuffled: what arrives at a service. `single`: 64 texts of the first
    field, one at a time. A field with fewer texts than its part gives them again in the same order, so the parts stay
    equal. The same seed gives the same workloads. Raises InputError for an empty field or text, or a `count` below
    one text a field.
    """
    _check_fields(fields)
    if batch < 1 or count < len(fields):
        raise InputError(f"batch {batch}, count {count}: at least 1 and at least one text for each of {len(fields)}")
    random = np.random.default_rng(seed)
    drawn = [[field[i] for i in random.permutation(len(field))] for field in fields]
    part = count // len(fields)
    chosen = [field[i % len(field)] for field in drawn for i in range(part)]
    singles = [drawn[0][i % len(drawn[0])] for i in range(64)]
    shuffled = [chosen[i] for i in random.permutation(len(chosen))]
    return {
        "sorted": _batched("sorted", sorted(chosen, key=len), batch),
        "mixed": _batched("mixed", shuffled, batch),
        "single": _batched("single", singles, 1),
    }


def shape_workload(batch: int, seq: int, vocab: int, seed: int) -> Workload:
    """One batch of `batch` x `seq` random token ids from [0, vocab) without padding, named "{batch}x{seq}".

    Raises InputError unless all three are at least 1.
    """
    if min(batch, seq, vocab) < 1:
        raise InputError(f"shape {batch}x{seq} with {vocab} tokens: each must be at least 1")
    ids = np.random.default_rng(seed).integers(0, vocab, (batch, seq), dtype=np.int64)
    return Workload(f"{batch}x{seq}", ({"input_ids": ids, "attention_mask": np.ones_like(ids)},))


def writing(workload: Workload, *, most: int, beams: int = 1) -> Workload:
    """The same batches for graphs that write, greedily or with `beams`, each text until it ends.

    A batch writes at most twice the tokens of its longest text and 10 more, and never over `most`.
    """
    batches = []
    for batch in workload.batches:
        limit = min(most, 2 * batch["input_ids"].shape[1] + 10)
        how = {"max_new_tokens": np.array(limit), "num_beams": np.array(beams)}
        batches.append({**batch, **how, "length_penalty": np.array(1.0, np.float32)})
    return Workload(workload.name, tuple(batches))


@dataclass(frozen=True)
class WorkloadSize:
    """What a workload held and how many rounds of it each process timed."""

    name: str
    batches: int
    rows: int
    tokens: int
    padded_tokens: int
    rounds: int


@dataclass(frozen=True)
class ModelCost:
    """A model's session: median seconds to open it, and the peak memory of its process in MiB (Python's included)."""

    name: str
    path: str
    load_seconds: float
    peak_mib: float


@dataclass(frozen=True)
class Timing:
    """One model on one workload.

    ratio: the baseline's time over the model's, with its 95 % interval; percentiles: milliseconds of a batch over all
    batches and rounds; texts and valid tokens a second: by the median round; pass_seconds: the median pass of each
    round, processes x rounds.
    """

    model: str
    workload: str
    ratio: float
    ratio_low: float
    ratio_high: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    texts_per_second: float
    tokens_per_second: float
    pass_seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LatencyResult:
    """All that `compare` measured; `threads` is what was used, `threads_wished` what was asked for."""

    baseline: str
    provider: str
    threads: int
    threads_wished: int | None
    processes: int
    elapsed_seconds: float
    workloads: tuple[WorkloadSize, ...]
    models: tuple[ModelCost, ...]
    timings: tuple[Timing, ...]

    def timing(self, model: str, workload: str) -> Timing:
        """The timing of one model on one workload. Raises KeyError if it was not measured."""
        for timing in self.timings:
            if (timing.model, timing.workload) == (model, workload):
                return timing
        raise KeyError((model, workload))

    def to_dict(self) -> dict[str, Any]:
        """The result as dicts, lists, numbers and strings, ready for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


class _Worker:
    """One model's process: stopped except while it answers."""

    def __init__(self, name: str, path: Path, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.path = path
        self._log = log
        command = [sys.executable, "-P", "-m", WORKER, str(path), *arguments, str(os.getpid())]
        with log.open("wb") as stderr:
            # a session of its own: Ctrl-C reaches this process alone, which then kills its workers
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
            )

    def _send_signal(self, name: str) -> None:
        number = getattr(signal, name, None)  # Windows has neither SIGSTOP nor SIGCONT
        if number is not None:
            self.process.send_signal(number)

    def receive(self) -> dict[str, Any]:
        """Wait for one reply, then stop the process. Raises InputError if it died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise self._death()
        self._send_signal("SIGSTOP")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, **request: Any) -> dict[str, Any]:
        """Continue the process, send a request and wait for its reply. Raises InputError if it died."""
        assert self.process.stdin is not None
        self._send_signal("SIGCONT")
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._death() from None
        return self.receive()

    def _death(self) -> InputError:
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return InputError(f"model {self.name} ({self.path}) cannot be measured: its process ended ({how}): {last}")

    def kill(self) -> None:
        """End the process whatever its state: SIGKILL reaches a stopped one too."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):  # a request that the dead process never read
                    stream.close()


@dataclass(frozen=True)
class _Setup:
    """What every restart of the processes shares; `arguments` are the worker's after the model's path and its feeds."""

    models: Mapping[str, Path]
    workloads: Mapping[str, Workload]
    own: Mapping[str, Mapping[str, Workload]]
    arguments: tuple[str, ...]
    folder: Path
    rounds: int
    processes: int
    seconds: float
    minimum: float
    progress: Progress

    def feeds(self, model: str) -> Path:
        """The file of what a model is given: its own, or the one of all that have none."""
        return self.folder / (f"feeds-{list(self.own).index(model)}.npz" if model in self.own else "feeds.npz")


@dataclass(frozen=True)
class _Restart:
    """What one start of all processes gave; passes: (model, workload) -> rounds of passes of seconds per batch."""

    passes: dict[tuple[str, str], list[list[list[float]]]]
    load_seconds: dict[str, float]
    peak_mib: dict[str, float]
    plan: dict[str, int]

    def pass_seconds(self, model: str, workload: str) -> list[float]:
        """Median seconds of a pass, for each round: a pass that something else interrupted does not count."""
        return [statistics.median(map(sum, passes)) for passes in self.passes[model, workload]]


@contextmanager
def _workers(setup: _Setup) -> Iterator[tuple[list[_Worker], dict[str, float]]]:
    """Every model's process, loaded and stopped, and its seconds to load; none is alive afterwards."""
    workers: list[_Worker] = []
    loads = {}
    try:
        for number, (name, path) in enumerate(setup.models.items()):
            arguments = (str(setup.feeds(name)), *setup.arguments)
            workers.append(_Worker(name, path, arguments, setup.folder / f"{number}.log"))
            loads[name] = float(workers[-1].receive()["load_seconds"])
        yield workers, loads
    finally:
        for worker in workers:
            worker.kill()


def plan_rounds(costs: Mapping[str, float], seconds: float, most: int) -> dict[str, int]:
    """Rounds of each workload in one process, the first included, which has been timed.

    costs: seconds that one round of all models took; seconds: what is left to spend, in equal parts on the workloads,
    where one that needs less leaves the rest to the dearer ones. Between 3 (or `most` if lower) and `most`.
    """
    plan = {}
    least = min(FEWEST_ROUNDS, most)
    for done, (name, cost) in enumerate(sorted(costs.items(), key=lambda item: item[1])):
        share = max(seconds, 0.0) / (len(costs) - done)
        plan[name] = min(most, max(least, 1 + int(share / cost)))
        seconds -= (plan[name] - 1) * cost
    return plan


def _round(setup: _Setup, workers: Sequence[_Worker], workload: str, number: int, result: _Restart) -> float:
    """Time one round of a workload on every model, beginning with another each time; the seconds it took in all."""
    begin = time.perf_counter()
    at = list(setup.workloads).index(workload)
    turn = number % len(workers)
    for worker in [*workers[turn:], *workers[:turn]]:
        passes = worker.ask(do="round", workload=at, minimum=setup.minimum)["seconds"]
        result.passes[worker.name, workload].append(passes)
        setup.progress.advance(1, f"{workload}: {worker.name}")
    return time.perf_counter() - begin


def _restart(setup: _Setup, plan: Mapping[str, int] | None) -> _Restart:
    """Start all processes, warm them up, and time them by `plan`, or make the plan from the first round."""
    begin = time.perf_counter()
    empty: dict[tuple[str, str], list[list[list[float]]]] = {(m, w): [] for m in setup.models for w in setup.workloads}
    if plan is None:
        setup.progress.start("latency: first round", len(empty), "timings")
    with _workers(setup) as (workers, loads):
        result = _Restart(empty, loads, {}, dict(plan or {}))
        costs = {}
        for at, name in enumerate(setup.workloads):
            for worker in workers:
                worker.ask(do="warm", workload=at)
            costs[name] = _round(setup, workers, name, 0, result)
        if plan is None:
            left = setup.seconds / setup.processes - (time.perf_counter() - begin)
            result.plan.update(plan_rounds(costs, left, setup.rounds))
            rest = setup.processes * sum(result.plan.values()) - len(costs)
            setup.progress.done()
            setup.progress.start("latency", rest * len(setup.models), "timings")
        for number in range(1, max(result.plan.values())):
            for name in setup.workloads:
                if number < result.plan[name]:
                    _round(setup, workers, name, number, result)
        result.peak_mib.update({worker.name: float(worker.ask(do="memory")["peak_mib"]) for worker in workers})
    return result


def _timing(
    model: str, baseline: str, workload: Workload, name: str, restarts: Sequence[_Restart], seed: int
) -> Timing:
    """Summarise one model on one workload over all restarts."""
    seconds = [restart.pass_seconds(model, name) for restart in restarts]
    against = [restart.pass_seconds(baseline, name) for restart in restarts]
    ratios = [[b / s for b, s in zip(*pair, strict=True)] for pair in zip(against, seconds, strict=True)]
    interval = ratio_interval(ratios, seed=seed)
    rounds = [passes for restart in restarts for passes in restart.passes[model, name]]
    batches = [second for passes in rounds for one in passes for second in one]
    p50, p90, p99 = (1e3 * float(value) for value in np.quantile(batches, [0.5, 0.9, 0.99]))
    typical = statistics.median(second for restart in seconds for second in restart)
    return Timing(
        model=model,
        workload=name,
        ratio=float(interval.ratio),
        ratio_low=float(interval.low),
        ratio_high=float(interval.high),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        texts_per_second=workload.rows / typical,
        tokens_per_second=workload.tokens / typical,
        pass_seconds=tuple(map(tuple, seconds)),
    )


def _check(setup: _Setup) -> None:
    """Raise one InputError with all that is wrong, before any process is started."""
    problems = [f"model {name}: there is no file {path}" for name, path in setup.models.items() if not path.is_file()]
    problems += [f"workload {name} has no batches" for name, work in setup.workloads.items() if not work.batches]
    for model, works in setup.own.items():
        for name, work in setup.workloads.items():
            if name not in works or len(works[name].batches) != len(work.batches):
                problems.append(f"model {model}: its own workload {name} has not as many batches")
    problems += ["no model was given"] if not setup.models else []
    problems += ["no workload was given"] if not setup.workloads else []
    if min(setup.rounds, setup.processes) < 1:
        problems.append(f"rounds {setup.rounds} and processes {setup.processes} must be at least 1")
    if not (math.isfinite(setup.seconds) and math.isfinite(setup.minimum) and min(setup.seconds, setup.minimum) >= 0):
        problems.append(f"seconds {setup.seconds} and minimum {setup.minimum} must be finite and not negative")
    if problems:
        raise InputError("; ".join(problems))


def _write_feeds(workloads: Mapping[str, Workload], path: Path) -> None:
    """Write every batch as arrays named `workload/batch/input`, by number. Raises InputError if the disk is full."""
    arrays = {
        f"{at}/{number}/{key}": array
        for at, workload in enumerate(workloads.values())
        for number, batch in enumerate(workload.batches)
        for key, array in batch.items()
    }
    try:
        np.savez(path, allow_pickle=False, **arrays)
    except OSError as error:
        raise InputError(f"the workloads cannot be written to {path}: {error.strerror}") from error


def _workload_sizes(setup: _Setup, plan: Mapping[str, int]) -> tuple[WorkloadSize, ...]:
    return tuple(
        WorkloadSize(name, len(work.batches), work.rows, work.tokens, work.padded_tokens, plan[name])
        for name, work in setup.workloads.items()
    )


def _model_costs(setup: _Setup, restarts: Sequence[_Restart]) -> tuple[ModelCost, ...]:
    costs = []
    for name, path in setup.models.items():
        load = statistics.median(restart.load_seconds[name] for restart in restarts)
        costs.append(ModelCost(name, str(path), load, max(restart.peak_mib[name] for restart in restarts)))
    return tuple(costs)


def compare(
    models: Mapping[str, Path],
    workloads: Mapping[str, Workload],
    threads: int | None = None,
    provider: str = "cpu",
    *,
    own: Mapping[str, Mapping[str, Workload]] | None = None,
    rounds: int = 7,
    processes: int = 2,
    seconds: float = 75.0,
    minimum: float = 0.2,
    seed: int = 0,
    progress: Progress = SILENT,
) -> LatencyResult:
    """Time ONNX files side by side; the first model is the baseline of every ratio.

    own: for models that have a vocabulary of their own, the same texts of each workload by its ids, in as many batches.
    threads: onnxruntime's threads, cut to what the process may use (None: all of it). Each workload runs for up to
    `rounds` rounds in each of `processes` restarts of all models; a round repeats whole passes for at least `minimum`
    seconds. `seconds` is what all may take: the first round decides how many rounds fit, never fewer than 3 (or
    `rounds` if lower), so large models can take longer. `seed` draws the resamples of the intervals alone.

    Raises InputError if a file, workload or number cannot be used, the provider is missing, or a model's process
    fails, with that process's last line. No process outlives the call, whatever ends it.
    """
    begin = time.perf_counter()
    used, full = available_threads(threads), require_provider(provider)
    with tempfile.TemporaryDirectory(prefix="slimformer-latency-") as temporary:
        paths, ways = {name: Path(path) for name, path in models.items()}, (full, str(used))
        setup = _Setup(
            paths, workloads, own or {}, ways, Path(temporary), rounds, processes, seconds, minimum, progress
        )
        _check(setup)
        for name, works in {"": workloads, **setup.own}.items():
            _write_feeds(works, setup.feeds(name))
        restarts: list[_Restart] = []
        for _ in range(processes):
            restarts.append(_restart(setup, restarts[0].plan if restarts else None))
    progress.done()
    first = next(iter(setup.models))
    return LatencyResult(
        baseline=first,
        provider=provider,
        threads=used,
        threads_wished=threads,
        processes=processes,
        elapsed_seconds=time.perf_counter() - begin,
        workloads=_workload_sizes(setup, restarts[0].plan),
        models=_model_costs(setup, restarts),
        timings=tuple(
            _timing(model, first, work, name, restarts, seed) for name, work in workloads.items() for model in models
        ),
    )
