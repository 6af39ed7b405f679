"""The training that students of all kinds share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from ..transformer.batching import token_batches
from ..transformer.model import Transformer
from ..transformer.parts import Part
from ..transformer.training import TrainingLog, Update, train
from .step import StepContext

if TYPE_CHECKING:
    from .distill import Distill

STATE = "distill-state.pt"


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


def train_student(
    options: "Distill",
    lesson: StudentLesson,
    lengths: Sequence[int],
    context: StepContext,
    shaper: Shaper | None = None,
) -> tuple[dict[str, Tensor], TrainingLog]:
    """Train on examples of `lengths` tokens each; the student's weights, and what happened."""
    assert isinstance(lesson, nn.Module)
    if shaper is not None:
        lesson.add_module("shaper", shaper.begin(lesson.student))
    log = train(
        lesson,
        lambda epoch: token_batches(lengths, tokens=options.batch_tokens, seed=context.seed, epoch=epoch),
        lesson.loss,
        options.training(context.seed),
        state_path=None if context.workdir is None else context.workdir / STATE,
        title="distill",
        progress=context.progress,
        clock=context.clock,
        after_step=None if shaper is None else shaper.after_step,
        coupled=lesson.coupled,
        processes=context.processes,
    )
    return {name: value.detach().cpu().clone() for name, value in lesson.student.state_dict().items()}, log
