"""Who is compared: an artefact of a tool and a way to run it, in a process of its own that is stopped while others run.

An artefact decides the results, a setting the time (and results by rounding at most). `WAYS` are those that the tools
document.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from slimformer.export.latency import Workload
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.evaluation import Floats
from slimformer.transformer.progress import SILENT, Progress

WORKER = Path(__file__).parent / "worker.py"


@dataclass(frozen=True)
class Artefact:
    """What a tool made: `options` are those of the engine that decide the results."""

    rival: str
    name: str
    file: Path
    engine: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def megabytes(self) -> float:
        """Its size, with the weights that lie beside an OpenVINO model."""
        files = [self.file, self.file.with_suffix(".bin")] if self.engine == "openvino" else [self.file]
        return sum(file.stat().st_size for file in files) / 1e6


@dataclass(frozen=True)
class Setting:
    """A way to run artefacts: options of the engine, and variables of the process's environment."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Contender:
    """An artefact in a setting."""

    artefact: Artefact
    setting: Setting

    def __str__(self) -> str:
        return f"{self.artefact.name}; {self.setting.name}"


def _onnxruntime(_: int) -> list[Setting]:
    return [
        Setting("default session"),
        Setting("extended optimizations", {"optimization": "ORT_ENABLE_EXTENDED"}),
        Setting("basic optimizations", {"optimization": "ORT_ENABLE_BASIC"}),
        Setting("no spinning", {"config": {"session.intra_op.allow_spinning": "0"}}),
        Setting("denormals as zero", {"config": {"session.set_denormal_as_zero": "1"}}),
        Setting("dynamic blocks", {"config": {"session.dynamic_block_base": "4"}}),
    ]


def _openvino(threads: int) -> list[Setting]:
    """Hints, streams and pinning, each with dynamic shapes and with a model compiled for every shape."""
    latency, throughput = {"PERFORMANCE_HINT": "LATENCY"}, {"PERFORMANCE_HINT": "THROUGHPUT"}
    ways = {
        "latency": {"properties": latency},
        "latency, 1 stream, not pinned": {"properties": {**latency, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}},
        "throughput, 1 stream": {"properties": {**throughput, "NUM_STREAMS": 1}},
    }
    if threads > 1:
        streams = {"properties": {**throughput, "NUM_STREAMS": threads}, "parts": threads}
        ways[f"throughput, {threads} streams, batch in {threads}"] = streams
    return [
        Setting(f"{name}, {shapes} shapes", {**way, "static": shapes == "static"})
        for shapes in ("dynamic", "static")
        for name, way in ways.items()
    ]


def _ctranslate2(threads: int) -> list[Setting]:
    """Back ends, and threads for a batch or a part of the batch for each."""
    backends = {
        "default": {},
        "MKL": {"CT2_USE_MKL": "1"},
        "MKL, packed": {"CT2_USE_MKL": "1", "CT2_USE_EXPERIMENTAL_PACKED_GEMM": "1"},
        "without MKL": {"CT2_USE_MKL": "0"},
    }
    splits = {f"1 x {threads} threads": {"inter": 1, "intra": threads}}
    if threads > 1:
        splits[f"{threads} x 1 threads, batch in {threads}"] = {"inter": threads, "intra": 1, "parts": threads}
    return [
        Setting(f"{backend}, {split}", options, environment)
        for split, options in splits.items()
        for backend, environment in backends.items()
    ]


WAYS = {"onnxruntime": _onnxruntime, "openvino": _openvino, "ctranslate2": _ctranslate2}


@dataclass(frozen=True)
class Bench:
    """What all processes share: the rivals' Python, the file of the workloads, threads, and whether to try few ways."""

    python: Path
    feeds: Path
    threads: int
    few: bool

    def settings(self, engine: str) -> list[Setting]:
        """What an engine's documentation offers, its default first."""
        return WAYS[engine](self.threads)[: 2 if self.few else None]

    def plain(self, artefact: Artefact) -> Contender:
        """An artefact in its engine's default setting."""
        return Contender(artefact, self.settings(artefact.engine)[0])

    @contextmanager
    def open(self, contender: Contender) -> Iterator["Running"]:
        """A contender's process, loaded and stopped; ours and all graphs for onnxruntime run in our environment."""
        artefact, setting = contender.artefact, contender.setting
        said = {
            "engine": artefact.engine,
            "file": str(artefact.file),
            "threads": self.threads,
            "options": {**artefact.options, **setting.options},
        }
        python = sys.executable if artefact.engine == "onnxruntime" else self.python
        with TemporaryDirectory() as folder:
            file = Path(folder) / "contender.json"
            file.write_text(json.dumps(said), encoding="utf-8")
            command = [str(python), str(WORKER), str(file), str(self.feeds)]
            running = Running(contender, command, setting.environment, Path(folder))
            try:
                running.receive()
                yield running
            finally:
                running.process.kill()
                running.process.communicate()


class Running:
    """A contender's process."""

    def __init__(
        self, contender: Contender, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.contender, self.folder, self.log = contender, folder, folder / "log"
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
            )

    def ask(self, **request: Any) -> Any:
        """Let it run for one request and its answer."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.receive()

    def receive(self) -> Any:
        """Wait for a line, then stop the process. Raises RuntimeError with the log's last line where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = [*self.log.read_text(encoding="utf-8", errors="replace").splitlines(), ""]
            raise RuntimeError(f"{self.contender}: {' '.join(last[-2:-1])[:300]} (exit code {self.process.wait()})")
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def embed(self, rows: Sequence[Sequence[int]]) -> Floats:
        """Token ids -> unit vectors."""
        file = self.folder / "vectors.npy"
        self.ask(do="embed", rows=rows, file=str(file))
        vectors: Floats = np.load(file)
        return vectors


class Embedder:
    """A process as evaluation sees it: texts become tokens here, and vectors there."""

    def __init__(self, running: Running, checkpoint: Checkpoint) -> None:
        self.running, self.config, self.encoder = running, checkpoint.config, checkpoint.text_encoder()

    def embed(self, texts: Sequence[str], *, prompt: str | None = None, progress: Progress = SILENT) -> Floats:
        """Texts -> vectors (n, E)."""
        return self.running.embed(self.encoder.encode([self.config.text.prompt(prompt) + text for text in texts]))


def write_feeds(workloads: Mapping[str, Workload], file: Path) -> Path:
    """The batches as the processes read them."""
    arrays = {
        f"{name}/{at}/{key}": array
        for name, workload in workloads.items()
        for at, batch in enumerate(workload.batches)
        for key, array in batch.items()
    }
    np.savez(file, **arrays)
    return file
