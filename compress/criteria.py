"""What decides which units stay: every criterion is a function of an `Examination`, and orders units and layers.

- `magnitude`: the norm of a unit's weights. No data.
- `taylor`: the mean magnitude of a mask's gradient, the first order of what its removal changes (Molchanov et al. 2019,
  "Importance Estimation for Neural Network Pruning", equation 8, with masks as in their section 3.2).
- `diagonal`: its mean square, the diagonal of the Fisher information (Theis et al. 2018).
- `fisher`: each sub-layer's whole block of it (Kwon et al. 2022).
- `surgeon`: the optimal brain surgeon on structures (Kurtic et al. 2023, "ZipLM"), which knows that what stays is
  re-fitted; how much a sub-layer can lose is measured (`trials`), as in their section 3.3.

Whole layers are ordered by the Fisher information of their masks, by magnitude where units are, or by `influence`: one
minus the mean cosine between a token before and after the layer (Men et al. 2024, "ShortGPT", equation 1).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from ..transformer.checkpoint import Checkpoint
from ..transformer.model import Transformer
from .calibration import Batch
from .curvature import Curvature, curvatures
from .importance import MaskGradients, block, magnitude_scores, mask_gradients, states_of
from .ladders import Floats, Ladder, by_block, by_scores, by_surgeon
from .step import StepContext
from .trials import trial_losses
from .units import OUTPUT, stacks, sublayers

MAGNITUDE, TAYLOR, DIAGONAL, FISHER, SURGEON = "magnitude", "taylor", "diagonal", "fisher", "surgeon"
INFLUENCE = "influence"
Measured = TypeVar("Measured")
TRIED = 64  # texts on which cuts are tried


@dataclass(frozen=True)
class Examination:
    """A model and the calibration examples by which it is examined, each measurement made once.

    Attributes:
        batches: of examples, on the context's device; those of the parts where there are parts.
        damping: share of the mean variance by which fits are damped.
        parts: examinations of parts of the batches, whose measurements together are this one's.
    """

    checkpoint: Checkpoint
    batches: Sequence[Batch]
    context: StepContext
    damping: float
    parts: tuple["Examination", ...] = ()

    @classmethod
    def in_halves(
        cls, checkpoint: Checkpoint, batches: Sequence[Batch], context: StepContext, damping: float
    ) -> "Examination":
        """One whose parts have every other batch each, so that examples of all lengths are in both."""
        parts = tuple(cls(checkpoint, half, context, damping) for half in (batches[::2], batches[1::2]) if half)
        return cls(checkpoint, batches, context, damping, parts)

    def with_more(self, batches: Sequence[Batch]) -> "Examination":
        """The same with more examples in each half; what was measured is kept."""
        more = Examination.in_halves(self.checkpoint, batches, self.context, self.damping).parts
        halves = tuple(
            replace(old, batches=[*old.batches, *new.batches], parts=(old, new))
            for old, new in zip(self.parts, more, strict=True)
        )
        return replace(self, batches=[*self.batches, *batches], parts=halves)

    @property
    def rows(self) -> int:
        """How many examples there are."""
        return sum(len(batch.ids) for batch in self.batches)

    @cached_property
    def model(self) -> Transformer:
        """In evaluation mode, on the context's device."""
        return self.checkpoint.to_torch().to(self.context.device)

    @cached_property
    def gradients(self) -> MaskGradients:
        """Of all masks, text by text."""
        if self.parts:
            return MaskGradients.joined([part.gradients for part in self.parts])
        return self._examined("Fisher information", mask_gradients)

    @cached_property
    def curvatures(self) -> dict[str, Curvature]:
        """Of all output projections."""
        if self.parts:
            found = [part.curvatures for part in self.parts]
            return {name: Curvature.joined([one[name] for one in found]) for name in found[0]}
        return self._examined("curvature of the projections", curvatures)

    def _examined(self, title: str, examine: Callable[..., Measured]) -> Measured:
        progress = self.context.progress
        paired = any(batch.target_ids is not None for batch in self.batches)
        progress.start(title, self.rows, "pairs" if paired else "texts")
        found = examine(self.model, self.batches, self.context.seed, progress=progress)
        progress.done()
        return found


Ladders = dict[str, Ladder]  # by sub-layer


def _by_magnitude(seen: Examination) -> Ladders:
    scores = magnitude_scores(seen.checkpoint.config, seen.checkpoint.state)
    return {name: by_scores(own) for name, own in scores.units.items()}


def _by_taylor(seen: Examination) -> Ladders:
    return {name: by_scores(own.double().abs().mean(0).cpu().numpy()) for name, own in seen.gradients.units.items()}


def _by_diagonal(seen: Examination) -> Ladders:
    return {name: by_scores(own) for name, own in seen.gradients.scores().units.items()}


def _by_fisher(seen: Examination) -> Ladders:
    return {name: by_block(block(own)) for name, own in seen.gradients.units.items()}


def _by_surgeon(seen: Examination) -> Ladders:
    subs, progress, found = sublayers(seen.checkpoint.config), seen.context.progress, Ladders()
    factors = seen.curvatures
    progress.start("order heads and neurons", len(subs), "sub-layers")
    for sub in subs:
        weight = seen.checkpoint.state[f"{sub.name}.{OUTPUT[sub.part]}.weight"]
        found[sub.name] = by_surgeon(weight, factors[sub.name], width=sub.width, damping=seen.damping)
        progress.advance()
    progress.done()
    return found


CRITERIA: dict[str, Callable[[Examination], Ladders]] = {
    SURGEON: _by_surgeon,
    FISHER: _by_fisher,
    DIAGONAL: _by_diagonal,
    TAYLOR: _by_taylor,
    MAGNITUDE: _by_magnitude,
}


def tried(seen: Examination, ladders: Ladders) -> Ladders:
    """The same with the losses that cuts of single sub-layers are measured to have."""
    losses = trial_losses(
        seen.model,
        _some(seen.batches),
        ladders,
        seen.curvatures,
        damping=seen.damping,
        progress=seen.context.progress,
    )
    return {name: replace(ladder, losses=losses[name]) for name, ladder in ladders.items()}


def _some(batches: Sequence[Batch]) -> list[Batch]:
    """Of every so many rows one, `TRIED` or so in all."""
    step = max(1, sum(len(batch.ids) for batch in batches) // TRIED)
    return [batch.every(step) for batch in batches]


def _layers_by_fisher(seen: Examination) -> Mapping[str, Floats]:
    return seen.gradients.scores().layers


def _layers_by_magnitude(seen: Examination) -> Mapping[str, Floats]:
    return magnitude_scores(seen.checkpoint.config, seen.checkpoint.state).layers


def _layers_by_influence(seen: Examination) -> Mapping[str, Floats]:
    config = seen.checkpoint.config
    sums = {stack: np.zeros(len(layers)) for stack, layers in stacks(config).items()}
    tokens = dict.fromkeys(sums, 0)
    with torch.no_grad():
        for batch in seen.batches:
            for stack, states in states_of(config, batch.run(seen.model)).items():
                cosines = [F.cosine_similarity(old, new, dim=1) for old, new in pairwise(states)]
                sums[stack] += [float((1 - cosine).double().sum()) for cosine in cosines]
                tokens[stack] += len(states[0])
    return {stack: np.diag(own / max(tokens[stack], 1)) for stack, own in sums.items()}


LAYER_CRITERIA: dict[str, Callable[[Examination], Mapping[str, Floats]]] = {
    FISHER: _layers_by_fisher,
    INFLUENCE: _layers_by_influence,
    MAGNITUDE: _layers_by_magnitude,
}


def channel_scores(seen: Examination, importance: str) -> Floats:
    """(D,) of the channels of the residual stream: by magnitude where units are, else by the Fisher information."""
    if importance == MAGNITUDE:
        return magnitude_scores(seen.checkpoint.config, seen.checkpoint.state).channels
    return seen.gradients.scores().channels
