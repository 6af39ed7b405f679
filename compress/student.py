"""The training that students of all kinds share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from ..transformer.batching import token_batches
from ..transformer.model import Transformer
from ..transformer.training import TrainingLog, train
from .step import StepContext

if TYPE_CHECKING:
    from .distill import Distill

STATE = "distill-state.pt"


class StudentLesson(Protocol):
    """A module that holds the student and whatever else learns."""

    student: Transformer

    def loss(self, batch: Sequence[int]) -> Tensor:
        """Mean loss of some examples."""


def train_student(
    options: "Distill", lesson: StudentLesson, lengths: Sequence[int], context: StepContext
) -> tuple[dict[str, Tensor], TrainingLog]:
    """Train on examples of `lengths` tokens each; the student's weights, and what happened."""
    assert isinstance(lesson, nn.Module)
    log = train(
        lesson,
        lambda epoch: token_batches(lengths, tokens=options.batch_tokens, seed=context.seed, epoch=epoch),
        lesson.loss,
        options.training(context.seed),
        state_path=None if context.workdir is None else context.workdir / STATE,
        title="distill",
        progress=context.progress,
        clock=context.clock,
    )
    return {name: value.detach().cpu().clone() for name, value in lesson.student.state_dict().items()}, log
