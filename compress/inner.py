"""What a student learns of the inside of its teacher: states of tokens, attention maps, relations.

Without a layer map it is the last states, and the last layers with attention; with one (`layer_maps`) states and
attention of each pair of layers, their losses as a mean over pairs. Relations are those of one layer of the teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..transformer.config import AttentionConfig, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.model import Output, Transformer
from ..transformer.parts import Part
from .attention_maps import attention_loss, check_maps
from .inside import HIDDEN, QKV, STATES, Inside, layer_of
from .layer_maps import NONE, LayerMap
from .losses import cka_loss, hidden_loss
from .relations import Relations, last_attention, relation_layer
from .teacher import Targets

if TYPE_CHECKING:
    from .distill import Distill

BY_MAP, BY_CKA = "map", "cka"
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Compared:
    """Names (`inside`) of what is compared, the student's first, and relations."""

    states: Pairs = ()
    attention: Pairs = ()
    relations: Relations | None = None

    @property
    def pairs(self) -> Pairs:
        """All of them."""
        related = () if self.relations is None else ((self.relations.ours, self.relations.theirs),)
        return (*self.states, *self.attention, *related)

    @property
    def theirs(self) -> tuple[str, ...]:
        """What the teacher is asked for, each once."""
        return tuple(dict.fromkeys(theirs for _, theirs in self.pairs))


def compared(
    options: "Distill", student: TransformerConfig, teacher: TransformerConfig, layers: LayerMap | None
) -> Compared:
    """What the options ask for, under a layer map or (None) of the last layers.

    Raises:
        InputError: attention is asked for where there is none, or of unlike heads.
    """
    found = () if layers is None else tuple((i, j) for i, j in enumerate(layers) if j != NONE)
    states: Pairs = ()
    if options.hidden:
        states = ((HIDDEN, HIDDEN),)
        if layers is not None:
            states = tuple((f"{STATES}.{i}", f"{STATES}.{j}") for i, j in found)
    attention: Pairs = ()
    if options.attention:
        if layers is None:
            found = ((last_attention(student), last_attention(teacher)),)
        mixers = {(i, j): (student.encoder[i].mixer, teacher.encoder[j].mixer) for i, j in found}
        both = [pair for pair in found if all(isinstance(one, AttentionConfig) for one in mixers[pair])]
        if not both:
            raise InputError("distill: attention is of layers that have it, and layers pairs none of both models")
        for i, j in both:
            check_maps(_attention(student, f"{QKV}.{i}"), _attention(teacher, f"{QKV}.{j}"))
        attention = tuple((f"{QKV}.{i}", f"{QKV}.{j}") for i, j in both)
    relations = None
    if options.relations:
        layer = relation_layer(teacher, options.relation_layer)
        relations = Relations(student, teacher, layer, options.relation_heads)
    return Compared(states, attention, relations)


def _attention(config: TransformerConfig, name: str) -> AttentionConfig:
    found = config.encoder[layer_of(name)].attention
    assert found is not None
    return found


class Inner(nn.Module):
    """The losses, and the maps that hidden states go through to the teacher's width."""

    def __init__(
        self,
        options: "Distill",
        what: Compared,
        student: Transformer,
        teacher: TransformerConfig,
        targets: Targets,
        lengths: Sequence[int],
        device: str,
    ) -> None:
        super().__init__()
        self.options, self.what, self.targets, self.lengths, self.device = options, what, targets, lengths, device
        self.squares = [length * length for length in lengths]
        self.own, self.other = student.config, teacher
        self.inside = Inside(student, [ours for ours, _ in what.pairs])
        self.maps = nn.ModuleList()
        if options.hidden_by == BY_MAP:
            self.maps.extend(_map(self.own.d_model, teacher.d_model, device) for _ in what.states)

    @property
    def coupled(self) -> bool:
        """Whether a loss sets tokens of several texts beside each other."""
        return bool(self.what.states) and self.options.hidden_by == BY_CKA

    def loss(self, output: Output, part: Part) -> Tensor:
        """The part's share of the weighted losses, of the student's last forward pass."""
        options, what = self.options, self.what
        total = output.hidden.new_zeros(())
        if what.states:
            found = [self._of_states(place, output, part) for place in range(len(what.states))]
            total = total + options.hidden * torch.stack(found).mean()
        if what.attention:
            found = [self._of_attention(*pair, output, part) for pair in what.attention]
            total = total + part.share_of(self.squares) * options.attention * torch.stack(found).mean()
        if what.relations is not None:
            ours, theirs = self.inside.of(what.relations.ours, output), self._theirs(what.relations.theirs, part)
            apart = what.relations.loss(ours, theirs, output.packing)
            total = total + part.share_of(self.lengths) * options.relations * apart
        return total

    def _of_states(self, place: int, output: Output, part: Part) -> Tensor:
        """A mean over tokens, or the alignment of all."""
        ours, theirs = self.what.states[place]
        states = self.inside.of(ours, output)
        if self.options.hidden_by == BY_CKA:
            return part.coupled(cka_loss(part.joined(states), self._theirs(theirs, part.whole)))
        apart = hidden_loss(self.maps[place](states), self._theirs(theirs, part), self.targets.square(theirs))
        return part.share_of(self.lengths) * apart

    def _of_attention(self, ours: str, theirs: str, output: Output, part: Part) -> Tensor:
        own, other = _attention(self.own, ours), _attention(self.other, theirs)
        return attention_loss(self.inside.of(ours, output), self._theirs(theirs, part), output.packing, own, other)

    def _theirs(self, name: str, examples: Sequence[int]) -> Tensor:
        return self.targets.tokens_of(name, examples, self.lengths).to(self.device)


def _map(width: int, other: int, device: str) -> nn.Linear:
    """A linear map that begins as the identity."""
    linear = nn.Linear(width, other, device=device)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
