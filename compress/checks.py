"""Checks of a student on valid while it learns: the best one is kept, and training may end early.

A check exports the student as it is and judges it in onnxruntime as its stage will be. The time that checks take does
not count as training.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..export.bundle import export
from ..export.runtime import load_bundle
from ..transformer.checkpoint import Checkpoint, read_json
from ..transformer.curves import Board
from ..transformer.errors import InputError
from ..transformer.evaluation import Memory, evaluate, has_split
from ..transformer.files import write_file
from ..transformer.metrics import TaskMetrics
from ..transformer.model import Transformer
from ..transformer.training import Update
from ..transformer.weights import read_safetensors
from .step import StepContext

HISTORY, BEST = "checks.json", "best.safetensors"


class Checks:
    """The student's metrics at some steps, and its weights at the best of these.

    Attributes:
        history: `step` and the deciding metric of each check.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        student: Transformer,
        context: StepContext,
        *,
        number: int,
        patience: int,
        place: Path | None,
        board: Board | None,
    ) -> None:
        """Of `number` checks at even distances; `patience` checks without a better one end the training (0: none do).

        What is found is kept in `place`, for a training that is taken up, and told to `board`.

        Raises:
            InputError: there is nothing to judge a student on.
        """
        if not has_split(context.data, "valid"):
            raise InputError("distill: checks are made on valid, and the data has none: leave them out")
        self.checkpoint, self.student, self.context, self.board = checkpoint, student, context, board
        self.number, self.patience, self.place = number, patience, place
        self.history: list[dict[str, Any]] = []
        self._best: dict[str, Tensor] = {}
        if place is not None and (place / HISTORY).is_file():
            self.history, self._best = read_json(place / HISTORY), read_safetensors(place / BEST)
        self._index: Memory | None = None

    def after_step(self, update: Update) -> bool:
        """Check the student where it is time to; whether to end here."""
        every = max(1, update.steps // self.number)
        if update.step % every and update.step != update.steps:
            return False
        known = [entry["step"] for entry in self.history]
        if update.step not in known and self.context.processes.main:
            self._check(update.step)
        self.history = self.context.processes.from_main(self.history)
        return self._is_enough(update.step)

    def _check(self, step: int) -> None:
        state = {name: value.detach().cpu().clone() for name, value in self.student.state_dict().items()}
        found = self._judged(replace(self.checkpoint, state=state))
        value = found.values()[found.deciding]
        better = not self.history or value > max(entry[found.deciding] for entry in self.history)
        self.history = [*self.history, {"step": step, found.deciding: value}]
        if self.board is not None:
            self.board.metrics(step, {found.deciding: value})
        if better:
            self._best = state
        if self.place is not None:
            if better:
                write_file(self.place / BEST, save(state))
            write_file(self.place / HISTORY, json.dumps(self.history) + "\n")

    def _judged(self, model: Checkpoint) -> TaskMetrics:
        context = self.context
        if context.keep_index and self._index is None:
            self._index, teacher = Memory(), context.teacher
            assert teacher is not None
            self._evaluated(teacher, self._index, None)
        return self._evaluated(model, Memory(), self._index)

    def _evaluated(self, model: Checkpoint, memory: Memory, index: Memory | None) -> TaskMetrics:
        with tempfile.TemporaryDirectory(prefix="slimformer-") as folder:
            bundle = load_bundle(export(model, Path(folder) / "student"), threads=self.context.threads)
            return evaluate(self.context.data, bundle, "valid", memory=memory, index=index)

    @property
    def best(self) -> dict[str, Any]:
        """The entry of the best check, the first of equals."""
        name = next(key for key in self.history[0] if key != "step")
        return max(self.history, key=lambda entry: entry[name])

    def best_state(self) -> dict[str, Tensor]:
        """The student's weights there, in every process."""
        return self.context.processes.from_main(self._best)

    def _is_enough(self, step: int) -> bool:
        since = [entry for entry in self.history if self.best["step"] < entry["step"] <= step]
        return bool(self.patience) and len(since) >= self.patience
