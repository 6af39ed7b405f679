"""A training as a directory: run or taken up, judged after every epoch, the best one kept, the whole written at once.

While it runs, the state lies in `.NAME.training` beside the output NAME. After every epoch the model is judged on
`valid`, and the best epoch by the lesson's deciding metric is kept; `test` is opened once, at the end. What happened is
the checkpoint's provenance `training`, and the curve of it (`curves`) lies beside it.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save
from torch import Tensor

from .checkpoint import Checkpoint, load_own, read_json
from .curves import Board, write_curve
from .errors import InputError
from .files import atomic_directory, refuse_existing, write_file, writing
from .model import Transformer
from .parts import Part
from .processes import ALONE, Processes
from .progress import SILENT, Progress
from .training import TrainingLog, check_device, train
from .training_options import TrainingOptions
from .weights import read_safetensors

ASKED, STATE, BEST, HISTORY = "asked.json", "state.pt", "best.safetensors", "history.json"
NOTES = "training"  # of the checkpoint's provenance


class Lesson(Protocol):
    """What is learnt, and how it is judged."""

    model: Transformer
    deciding: str

    def batches(self, epoch: int) -> list[list[int]]:
        """Indices of examples of train, batch by batch."""

    def loss(self, part: Part) -> Tensor:
        """A part's share of the mean loss of a step's examples."""

    def measure(self, split: str) -> dict[str, float]:
        """Metrics on "valid" or "test"; `deciding` among them, better when higher."""


class HowLong(Protocol):
    """Options of a training: how often over the rows, and the loop's options for so many steps."""

    @property
    def epochs(self) -> int | None:
        """Passes over train, where they were given."""

    def training(self, epochs_steps: int) -> TrainingOptions:
        """The loop's options; `epochs_steps` is the number of steps of all epochs, if it is they that count."""


def asked_of(checkpoint: Checkpoint, data: Any, options: Any) -> dict[str, Any]:
    """What has to be the same in a resumed training, JSON-ready."""
    return {"model": checkpoint.fingerprint(), "data": data.fingerprints(), "options": asdict(options)}


def check_splits(data: Any, rows: str) -> None:
    """Raise InputError where train, valid or test has none of the rows."""
    if empty := [name for name in ("train", "valid", "test") if not getattr(data, name)]:
        raise InputError(f"training: there are no {rows} of {' and '.join(empty)}")


def teach(
    start: Checkpoint,
    lesson: Callable[[], Lesson],
    options: HowLong,
    epochs: int,
    asked: dict[str, Any],
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
    board: Path | None = None,
    processes: Processes = ALONE,
) -> Checkpoint:
    """Train, write a checkpoint directory whole, and return it.

    Args:
        start: the model before its first step.
        lesson: makes what is learnt, once it is known that there is something to do.
        options: how to train.
        epochs: passes over train where the options do not say how long.
        asked: what has to be the same in a resumed training (`asked_of`).
        out: the directory to make.
        device: the torch device.
        resume: go on with a training that was broken off; one that is finished is read and returned.
        force: replace `out`, and start anew.
        progress: told of every step.
        board: the directory of a TensorBoard to write to while it runs.
        processes: those that train together, each of which calls this; the main one judges and writes.

    Raises:
        InputError: something given cannot be used; `out` is then untouched.
    """
    if processes.from_main(out.exists() and resume and not force):
        return _finished(out, asked)
    check_device(device)
    work, watcher = out.with_name(f".{out.name}.training"), None
    if processes.main:
        refuse_existing(out, force=force)
        watcher = Board(board) if board is not None else None
    taught = lesson()
    steps = sum(len(taught.batches(epoch)) for epoch in range(options.epochs or epochs))
    loop = options.training(steps)
    if processes.main:
        _open(work, asked, resume=resume, force=force)
    judge = _Judge(taught, work, watcher)
    log = train(
        taught.model,
        taught.batches,
        taught.loss,
        loop,
        state_path=work / STATE,
        title="train",
        progress=progress,
        after_epoch=judge,
        watch=None if watcher is None else watcher.point,
        processes=processes,
    )
    if processes.main:
        _write(start, taught, judge, log, asked, out, force=force)
    processes.all_of(None)  # it is written
    return load_own(out)


def _write(
    start: Checkpoint,
    taught: Lesson,
    judge: "_Judge",
    log: TrainingLog,
    asked: dict[str, Any],
    out: Path,
    *,
    force: bool,
) -> None:
    """The best epoch's model, as a checkpoint directory."""
    for epoch in range(len(judge.history), log.epochs):  # the last one, where it was not whole
        judge(epoch, log.steps)
    if judge.board is not None:
        judge.board.close()
    taught.model.load_state_dict(judge.best_state(), strict=True)
    notes = {"asked": asked, "epochs": judge.history, "best": judge.best, "log": log.to_dict()}
    state = {name: value.detach().cpu().clone() for name, value in taught.model.state_dict().items()}
    tuned = replace(start, state=state).with_provenance(**{NOTES: {**notes, "test": taught.measure("test")}})
    with atomic_directory(out, force=force) as partial:
        tuned.write(partial)
        write_curve(partial, log.curve, judge.history, taught.deciding)
    shutil.rmtree(judge.work, ignore_errors=True)


def _changed(before: Any, asked: dict[str, Any]) -> str:
    """The names of what is not as it was."""
    known = before if isinstance(before, dict) else {}
    return ", ".join(key for key in asked if known.get(key) != asked[key])


def _finished(out: Path, asked: dict[str, Any]) -> Checkpoint:
    tuned = load_own(out)
    notes = tuned.provenance.get(NOTES)
    if notes is None:
        raise InputError(f"{out} is not the output of a training: give another -o, or --force to replace it")
    if changed := _changed(notes.get("asked"), asked):
        raise InputError(f"{out} was trained with another {changed}: --force starts anew")
    return tuned


def _open(work: Path, asked: dict[str, Any], *, resume: bool, force: bool) -> None:
    """Make the folder of the state, or check that the one that is there is of the same training."""
    if force:
        shutil.rmtree(work, ignore_errors=True)
    if (work / ASKED).is_file():
        if not resume:
            raise InputError(f"{work} holds a training that was broken off: --resume goes on, --force starts anew")
        if changed := _changed(read_json(work / ASKED), asked):
            raise InputError(f"{work} was begun with another {changed}: --force starts anew")
        return
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
    write_file(work / ASKED, json.dumps(asked, indent=2) + "\n")


class _Judge:
    """Measures the model on valid after an epoch and keeps the best one on disk."""

    def __init__(self, lesson: Lesson, work: Path, board: Board | None) -> None:
        self.lesson, self.work, self.board = lesson, work, board
        known = read_json(work / HISTORY) if (work / HISTORY).is_file() else []
        self.history: list[dict[str, Any]] = known

    def __call__(self, epoch: int, step: int) -> None:
        """Enter an epoch (from 0), which ended with a step, unless it is entered."""
        if epoch < len(self.history):
            return
        entry = {"epoch": epoch + 1, "step": step, **self.lesson.measure("valid")}
        deciding = self.lesson.deciding
        if not self.history or entry[deciding] >= max(other[deciding] for other in self.history):
            tensors_now = {name: value.cpu().contiguous() for name, value in self.lesson.model.state_dict().items()}
            write_file(self.work / BEST, save(tensors_now))
        self.history.append(entry)
        write_file(self.work / HISTORY, json.dumps(self.history, indent=2) + "\n")
        if self.board is not None:
            self.board.metrics(step, {name: entry[name] for name in entry if name not in ("epoch", "step")})

    @property
    def best(self) -> int:
        """The best epoch (from 1), the last of equals, which learnt the longest."""
        return int(max(reversed(self.history), key=lambda entry: entry[self.lesson.deciding])["epoch"])

    def best_state(self) -> dict[str, Tensor]:
        """Its weights."""
        return read_safetensors(self.work / BEST)
