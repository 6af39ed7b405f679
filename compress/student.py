"""The training that students of all kinds share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..transformer.batching import token_batches
from ..transformer.checkpoint import Checkpoint
from ..transformer.curves import Board
from ..transformer.files import writing
from ..transformer.model import Transformer
from ..transformer.parts import Part
from ..transformer.training import TrainingLog, Update, train
from .checks import Checks
from .step import StepContext, run_digest

if TYPE_CHECKING:
    from .distill import Distill

STATE = "state.pt"


class StudentLesson(Protocol):
    """A module that holds the student and whatever else learns."""

    student: Transformer

    @property
    def coupled(self) -> bool:
        """Whether the loss wants rows of other parts (`train`)."""

    def loss(self, part: Part) -> Tensor:
        """A part's share of the mean loss of a step's examples."""


class Shaper(Protocol):
    """Changes what a student computes while it learns."""

    def begin(self, student: Transformer) -> nn.Module:
        """Take hold of the student, on its device; the module's state is kept and taken up with the training's."""

    def after_step(self, update: Update) -> None:
        """See `train`."""


@dataclass(frozen=True)
class Trained:
    """The student's weights, what happened, and what checks found."""

    state: dict[str, Tensor]
    log: TrainingLog
    checks: Checks | None

    @property
    def details(self) -> dict[str, Any]:
        """What the report says of it."""
        found = self.log.to_dict()
        if self.checks is not None:
            found |= {"checks": self.checks.history, "best_step": self.checks.best["step"]}
        return found


def train_student(
    options: "Distill",
    checkpoint: Checkpoint,
    lesson: StudentLesson,
    lengths: Sequence[int],
    context: StepContext,
    shaper: Shaper | None = None,
) -> Trained:
    """Train the student of a checkpoint's config on examples of `lengths` tokens each."""
    assert isinstance(lesson, nn.Module)
    if shaper is not None:
        lesson.add_module("shaper", shaper.begin(lesson.student))
    for layer in (*lesson.student.encoder, *lesson.student.decoder):
        layer.recompute = options.gradient_checkpointing
    place = None
    if context.workdir is not None:
        place = context.workdir / f"distill-{run_digest(options, checkpoint, context)}"
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
    board = Board(context.board) if context.board is not None and context.processes.main else None
    checks = None
    if options.checks:
        ways = {"number": options.checks, "patience": options.patience}
        checks = Checks(checkpoint, lesson.student, context, **ways, place=place, board=board)

    def after_step(update: Update) -> bool:
        if shaper is not None:
            shaper.after_step(update)
        return checks is not None and checks.after_step(update)

    log = train(
        lesson,
        lambda epoch: token_batches(lengths, tokens=options.batch_tokens, seed=context.seed, epoch=epoch),
        lesson.loss,
        options.training(context.seed),
        state_path=None if place is None else place / STATE,
        title="distill",
        progress=context.progress,
        clock=context.clock,
        after_step=after_step,
        watch=None if board is None else board.point,
        coupled=lesson.coupled,
        processes=context.processes,
    )
    if board is not None:
        board.close()
    last = {name: value.detach().cpu().clone() for name, value in lesson.student.state_dict().items()}
    return Trained(last if checks is None else checks.best_state(), log, checks)
