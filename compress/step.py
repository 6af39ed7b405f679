"""The one call shape of every step: `step(checkpoint, context) -> StepResult`."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import TransformerConfig
from ..transformer.data import Data, PairData, SearchData
from ..transformer.errors import InputError
from ..transformer.processes import ALONE, Processes
from ..transformer.progress import SILENT, Progress


@dataclass(frozen=True)
class StepContext:
    """What a step may use beside the checkpoint it is given.

    Attributes:
        data: the user's data; a step reads `training_texts` and training rows, never valid or test.
        teacher: the untouched model, for steps that learn from it; None: the checkpoint itself.
        workdir: where a step may keep caches and resume points; None: it keeps none.
        seed: of every random choice.
        device: the torch device of training and calibration.
        target: the kind of CPU that serves (`export.machine.TARGETS`), for the bits of int8 weights; None: this one.
        workload: "sorted", "mixed" or "single": what is served, where a step measures times.
        provider: what serves it.
        threads: of onnxruntime; None: the cores that this process may use.
        keep_index: whether queries by the new model will be searched in what the teacher made of the pages.
        stores: files for measurements of this machine, which are read from there when they were made before.
        progress: who is told how far long work is.
        processes: those that train together, each of which calls a step that trains.
        board: a directory for TensorBoard, which trainings write to while they run; None: none.
        clock: seconds, for time budgets.
    """

    data: Data
    teacher: Checkpoint | None = None
    workdir: Path | None = None
    seed: int = 0
    device: str = "cpu"
    target: str | None = None
    workload: str = "sorted"
    provider: str = "cpu"
    threads: int | None = None
    keep_index: bool = False
    stores: tuple[Path, ...] = ()
    progress: Progress = SILENT
    processes: Processes = ALONE
    board: Path | None = None
    clock: Callable[[], float] = time.monotonic

    def training_texts(self) -> tuple[str, ...]:
        """Texts that may be learnt from, each once: those of the training rows, of pairs the sources, and `texts`."""
        data = self.data
        if isinstance(data, SearchData):
            rows = []
        elif isinstance(data, PairData):
            rows = [pair.source for pair in data.train]
        else:
            rows = [row.text for row in data.train]
        texts = tuple(dict.fromkeys([*rows, *data.texts]))
        if not texts:
            raise InputError("no texts to learn from: give DATA a texts.jsonl (rows with a text) or a train file")
        return texts


@dataclass(frozen=True)
class StepResult:
    """A new checkpoint, and what the report says of how it came about (JSON-ready)."""

    checkpoint: Checkpoint
    details: dict[str, Any] = field(default_factory=dict)


class Step(Protocol):
    """A frozen dataclass whose fields are the step's options.

    Attributes:
        trains: whether all processes call it, where several train together; else the main one alone does.
    """

    name: ClassVar[str]
    trains: ClassVar[bool]

    def check(self, config: TransformerConfig) -> None:
        """Raise InputError where a model of this config cannot take the step: asked before anything is written."""

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """Return a new checkpoint; the given one is untouched."""


def run_digest(step: Step, checkpoint: Checkpoint, context: StepContext) -> str:
    """Of all that a step's result depends on: what is kept under another one is of another run."""
    models = (checkpoint.fingerprint(), (context.teacher or checkpoint).fingerprint())
    served = (context.target, context.workload, context.provider, context.threads, context.keep_index)
    parts = (step, *models, context.seed, context.device, served, context.data)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
