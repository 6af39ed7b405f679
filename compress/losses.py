"""Distillation losses, each a function of the student's and the teacher's tensors; padding never enters them.

Shapes: B texts, N tokens, E embedding width, C classes, D hidden width.
"""

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")


def in_full(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A loss that multiplies matrices in float32, or in its widest argument's precision, in mixed precision too."""

    @wraps(loss)
    def computed(*args: P.args, **options: P.kwargs) -> Tensor:
        tensors = [one for one in args if isinstance(one, Tensor)]
        wide = reduce(torch.promote_types, (one.dtype for one in tensors), torch.float32)
        widened = (one.to(wide) if isinstance(one, Tensor) else one for one in args)
        with torch.autocast(tensors[0].device.type, enabled=False):
            return loss(*widened, **options)  # type: ignore[arg-type]

    return computed


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over texts of 1 - cos(student, teacher); (B, E) each (Reimers & Gurevych 2020, with cosine for MSE)."""
    return (1 - F.cosine_similarity(student, teacher, dim=1)).mean()


@in_full
def similarity_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of the texts' cosine matrices (Tung & Mori 2019, on cosines); widths may differ."""
    s, t = F.normalize(student, dim=1), F.normalize(teacher, dim=1)
    return F.mse_loss(s @ s.T, t @ t.T)


@in_full
def index_loss(student: Tensor, teacher: Tensor, index: Tensor) -> Tensor:
    """The same of texts by the student against an index (M, E) that the teacher made.

    Mean squared difference of cos(student_i, index_j) and cos(teacher_i, index_j).
    """
    s, t, others = (F.normalize(one, dim=1) for one in (student, teacher, index))
    return F.mse_loss(s @ others.T, t @ others.T)


def hidden_loss(student: Tensor, teacher: Tensor, square: float) -> Tensor:
    """Squared error of tokens' states (N, D), over the mean square of the teacher's (Jiao et al. 2020, equation 8)."""
    return F.mse_loss(student, teacher) / square


def nested_loss(student: Tensor, teacher: Tensor, widths: Sequence[int]) -> Tensor:
    """Mean over m of `similarity_loss` of the student's first m columns and the teacher's whole vectors.

    Nested vectors (Kusupati et al. 2022, eq. 1, every m with the same weight): the whole teacher says how alike texts
    are, for its own first columns, which were not taught to stand alone, say it worse.

    Args:
        student: (B, E) vectors.
        teacher: (B, E') vectors.
        widths: at least one m, each at most E.
    """
    return torch.stack([similarity_loss(student[:, :m], teacher) for m in widths]).mean()


@in_full
def cka_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - linear centered kernel alignment of tokens' states (N, D) and (N, D') (Kornblith et al. 2019, section 3).

    Widths may differ and need no map between them: turning or scaling either side changes nothing.
    """
    s, t = (x - x.mean(0) for x in (student, teacher))
    across, own, other = ((a.T @ b).square().sum() for a, b in ((s, t), (s, s), (t, t)))
    return 1 - across / (own * other).clamp(min=1e-24).sqrt()


def logits_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over texts (Hinton et al. 2015, section 2)."""
    log_student = F.log_softmax(student / temperature, dim=1)
    log_teacher = F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2


def likeliest_loss(student: Tensor, places: Tensor, log_teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) over the K classes that the teacher holds likeliest, and all others as one class.

    A lower bound of `logits_loss` (log sum inequality), and the same where K is C.

    Args:
        student: (B, C) logits.
        places: (B, K) classes.
        log_teacher: (B, K) log softmax(teacher / T) there.
        temperature: T.
    """
    log_student = F.log_softmax(student / temperature, dim=1).gather(1, places)
    total = F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    if places.shape[1] < student.shape[1]:
        rest, other = (_rest(one) for one in (log_teacher, log_student))
        total = total + (rest * (rest.log() - other.log())).mean()
    return total * temperature**2


def _rest(logs: Tensor) -> Tensor:
    """(B,) chance of all classes but those given, not below what single precision can tell."""
    return (1 - logs.exp().sum(1)).clamp(min=1e-7)


def label_loss(student: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over the texts that have a label; -1 means none. Zero where no text of the batch has one."""
    known = labels >= 0
    if not bool(known.any()):
        return torch.zeros((), dtype=student.dtype, device=student.device)
    return F.cross_entropy(student[known], labels[known])
