"""Relations between the tokens of a text, as MiniLMv2 has them (Wang et al. 2021, section 3.1).

Queries, keys and values of one layer of the teacher, the heads' columns side by side, are cut anew into relation heads
of W columns; so are the student's, of W' columns. A of one relation head and text gives

    R = softmax(A A^T / sqrt(W)),    loss = KL(R of the teacher || R of the student),

summed over a token's row, mean over relation heads and tokens, for queries, keys and values each. So the student may
have another width and other heads than its teacher. Padding is in no row and in no sum.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..transformer.config import AttentionConfig, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.packing import Packing
from .inside import QKV
from .losses import in_full

HIDDEN = -1e9  # the score of padding: its chance is 0, and a row of padding alone gives no NaN


@in_full
def relation_loss(student: Tensor, teacher: Tensor, packing: Packing, heads: int) -> Tensor:
    """Of queries, keys or values: see the module.

    Args:
        student: (N, heads * W').
        teacher: (N, heads * W).
        packing: of the N tokens.
        heads: of relations.
    """
    ours, theirs = (_relations(tokens, packing, heads) for tokens in (student, teacher))
    rows = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(3)  # (B, heads, T)
    return packing.pack(rows.transpose(1, 2)).mean()


def _relations(tokens: Tensor, packing: Packing, heads: int) -> Tensor:
    """(N, heads * W) -> log R (B, heads, T, T)."""
    rows = packing.rows_of(tokens)
    parts = rows.view(*rows.shape[:2], heads, -1).transpose(1, 2)  # (B, heads, T, W)
    scores = parts @ parts.transpose(2, 3) / math.sqrt(parts.shape[3])
    return scores.masked_fill(~packing.mask[:, None, None, :], HIDDEN).log_softmax(3)


class Relations:
    """The loss of a student that learns the relations of one layer of its teacher in its last layer with attention.

    Attributes:
        ours, theirs: names of what it compares (`inside`), of student and teacher.
    """

    def __init__(self, student: TransformerConfig, teacher: TransformerConfig, layer: int, heads: int) -> None:
        """`layer` of the teacher; `heads` of relations, 0: as many as the teacher has of keys there.

        Raises:
            InputError: there is no attention, or its columns do not go into so many heads.
        """
        place = last_attention(student)
        own, other = student.encoder[place].attention, teacher.encoder[layer].attention
        assert own is not None
        assert other is not None
        self._own, self._other = own, other
        self.heads = heads or other.groups
        _check_heads(self.heads, own, other)
        self.ours, self.theirs = f"{QKV}.{place}", f"{QKV}.{layer}"

    def loss(self, student: Tensor, teacher: Tensor, packing: Packing) -> Tensor:
        """Of queries, keys and values of the same tokens, (N, (H + 2 * G) * K) of each."""
        pairs = zip(qkv_of(student, self._own), qkv_of(teacher, self._other), strict=True)
        return torch.stack([relation_loss(own, other, packing, self.heads) for own, other in pairs]).sum()


def last_attention(config: TransformerConfig) -> int:
    """The number of the encoder's last layer whose mixer is attention.

    Raises:
        InputError: there is none.
    """
    found = [i for i, layer in enumerate(config.encoder) if isinstance(layer.mixer, AttentionConfig)]
    if not found:
        raise InputError("distill: relations are those of attention, and no layer of the model has it")
    return found[-1]


def relation_layer(config: TransformerConfig, wanted: int | None) -> int:
    """The teacher's layer whose relations are learnt: the one wanted, None: its last one with attention.

    Raises:
        InputError: there is no such layer, or it has no attention.
    """
    layer = last_attention(config) if wanted is None else wanted
    if not 0 <= layer < len(config.encoder) or not isinstance(config.encoder[layer].mixer, AttentionConfig):
        raise InputError(f"distill: relation_layer is {layer}, where the teacher has no attention")
    return layer


def _check_heads(heads: int, *attentions: AttentionConfig) -> None:
    for columns in sorted({width for one in attentions for width in (one.width, one.key_width)}):
        if columns % heads:
            raise InputError(
                f"distill: {columns} columns of queries, keys or values do not go into {heads} relation heads: "
                "give another number as relation_heads"
            )


def qkv_of(tokens: Tensor, config: AttentionConfig) -> tuple[Tensor, ...]:
    """Queries, keys and values, each by itself."""
    return torch.split(tokens, [config.width, config.key_width, config.key_width], 1)
