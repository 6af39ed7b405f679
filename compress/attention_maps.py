"""Attention maps: the student learns the scores of its teacher's heads (TinyBERT; Jiao et al. 2020, equation 7).

With A = Q K^T / sqrt(K) of one head and text, before the softmax, the loss is the mean of (A of the student - A of the
teacher)^2 over the pairs of a text's tokens, heads and texts. Heads are compared one by one, so both sides have to have
as many.
"""

import math

import torch
from torch import Tensor

from ..transformer.config import AttentionConfig
from ..transformer.errors import InputError
from ..transformer.packing import Packing
from .losses import in_full
from .relations import qkv_of


@in_full
def attention_loss(
    student: Tensor, teacher: Tensor, packing: Packing, own: AttentionConfig, other: AttentionConfig
) -> Tensor:
    """See the module.

    Args:
        student, teacher: queries, keys and values (N, (H + 2 * G) * K) of the same tokens.
        packing: of these.
        own, other: the attention of student and teacher.
    """
    apart = (_scores(student, packing, own) - _scores(teacher, packing, other)).square()
    pairs = packing.mask[:, :, None] & packing.mask[:, None, :]
    return apart.masked_fill(~pairs[:, None], 0.0).sum() / (pairs.sum() * own.heads).clamp(min=1)


def _scores(tokens: Tensor, packing: Packing, config: AttentionConfig) -> Tensor:
    """(B, H, T, T)."""
    queries, keys, _ = qkv_of(tokens, config)
    q, k = (packing.rows_of(one) for one in (queries, keys))
    q = q.view(*q.shape[:2], config.heads, -1).transpose(1, 2)
    k = k.view(*k.shape[:2], config.groups, -1).transpose(1, 2)
    k = torch.repeat_interleave(k, config.heads // config.groups, 1)
    scores: Tensor = q @ k.transpose(2, 3) / math.sqrt(config.head_width)
    return scores


def check_maps(own: AttentionConfig, other: AttentionConfig) -> None:
    """Raise InputError where heads cannot be compared one by one."""
    if own.heads != other.heads:
        raise InputError(
            f"distill: attention compares heads one by one, and a layer of the student has {own.heads}, of the teacher "
            f"{other.heads}: take relations, which need not be as many"
        )
