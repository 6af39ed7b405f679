"""Distillation losses, each a function of the student's and the teacher's tensors; padding never enters them.

Shapes: B texts, N tokens, E embedding width, C classes, D hidden width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over texts of 1 - cos(student, teacher); (B, E) each (Reimers & Gurevych 2020, with cosine for MSE)."""
    return (1 - F.cosine_similarity(student, teacher, dim=1)).mean()


def similarity_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of the texts' cosine matrices (Tung & Mori 2019, on cosines); widths may differ."""
    s, t = F.normalize(student, dim=1), F.normalize(teacher, dim=1)
    return F.mse_loss(s @ s.T, t @ t.T)


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of tokens' states (N, D), over the teacher's mean square (Jiao et al. 2020, eq. 8, normalised)."""
    return F.mse_loss(student, teacher) / teacher.square().mean().clamp(min=1e-12)


def logits_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over texts (Hinton et al. 2015, section 2)."""
    log_student = F.log_softmax(student / temperature, dim=1)
    log_teacher = F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2


def label_loss(student: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over the texts that have a label; -1 means none. Zero where no text of the batch has one."""
    known = labels >= 0
    if not bool(known.any()):
        return torch.zeros((), dtype=student.dtype, device=student.device)
    return F.cross_entropy(student[known], labels[known])
