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
from torch import Tensor, nn

from ..transformer.config import AttentionConfig, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.model import Transformer
from ..transformer.packing import Packing
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
    """The loss of a student that learns the relations of one layer of its teacher in its last layer with attention."""

    def __init__(self, student: Transformer, teacher: TransformerConfig, layer: int, heads: int) -> None:
        """`layer` of the teacher; `heads` of relations, 0: as many as the teacher has of keys there.

        Raises:
            InputError: there is no attention, or its columns do not go into so many heads.
        """
        place = last_attention(student.config)
        ours, theirs = student.config.encoder[place].attention, teacher.encoder[layer].attention
        assert ours is not None
        assert theirs is not None
        self.ours, self.theirs = ours, theirs
        self.heads = heads or self.theirs.groups
        _check_heads(self.heads, self.ours, self.theirs)
        self.tokens = Watched(student, place)

    def loss(self, targets: Tensor, packing: Packing) -> Tensor:
        """Of the tokens that the student was given last, and of what its teacher gave for them, as `Watched` has it."""
        pairs = zip(_parts(self.tokens.last, self.ours), _parts(targets, self.theirs), strict=True)
        return torch.stack([relation_loss(own, other, packing, self.heads) for own, other in pairs]).sum()


class Watched:
    """What the merged linear of a layer's attention gives: queries, keys and values (N, (H + 2 * G) * K)."""

    def __init__(self, model: Transformer, layer: int) -> None:
        self._last: Tensor | None = None
        model.get_submodule(f"encoder.{layer}.mixer.qkv").register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._last = output

    @property
    def last(self) -> Tensor:
        """Of the last forward pass."""
        assert self._last is not None
        return self._last


def last_attention(config: TransformerConfig) -> int:
    """The number of the encoder's last layer whose mixer is attention.

    Raises:
        InputError: there is none.
    """
    found = [i for i, layer in enumerate(config.encoder) if isinstance(layer.mixer, AttentionConfig)]
    if not found:
        raise InputError("distill: relations are those of attention, and no layer of the model has it")
    return found[-1]


def layer_of(config: TransformerConfig, wanted: int | None) -> int:
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


def _parts(tokens: Tensor, config: AttentionConfig) -> tuple[Tensor, ...]:
    """Queries, keys and values, each by itself."""
    return torch.split(tokens, [config.width, config.key_width, config.key_width], 1)
