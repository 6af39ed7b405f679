"""Masks of 0 or 1 on heads and neurons that are chosen while the model learns, by movement pruning.

Sanh, Wolf & Rush 2020, "Movement Pruning: Adaptive Sparsity by Fine-Tuning", section 4, on the units of Lagunas et al.
2021, "Block Pruning For Faster Transformers": all weights of a unit share one score. A mask m multiplies what enters
the output projection W, which computes with W' = W m then; dL/dm is the sum over the unit's columns of dL/dW' * W. The
choice of masks by scores S counts as the identity backwards (straight-through), so that

    S = - sum over the steps of rate * dL/dm,

for masked units too: one that would lower the loss if it were back rises until it is. Weights that move away from 0
give a positive score, those that move to it a negative one.

Scores follow the plain gradient, not AdamW, which divides by the root of the mean square and so lets all units move
alike. As they are, they are losses: up to one factor, how much more would be lost without the unit, to first order.
They can be added up, and those of heads compared with those of neurons.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..transformer.config import TransformerConfig
from ..transformer.model import Transformer
from .costs import MultiplyAdds
from .units import OUTPUT, Indices, Kept, sublayers

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """The share of the cost that is left after each step: the paper's cubic one (section 5).

    Attributes:
        cost: the share at the end.
        warm: steps after which all units are still there.
        fixed: the step after which masks change no more.
    """

    cost: float
    warm: int
    fixed: int

    def chooses(self, step: int) -> bool:
        """Whether masks are chosen after a step."""
        return self.warm < step <= self.fixed

    def share(self, step: int) -> float:
        """After so many steps: cost + (1 - cost) (1 - (step - warm) / (fixed - warm))^3, between the two."""
        done = min(1.0, max(0.0, (step - self.warm) / (self.fixed - self.warm)))
        return float(self.cost + (1 - self.cost) * (1 - done) ** 3)


class UnitMasks(nn.Module):
    """Masks on all units of a model, which stays as it is but for hooks, and their scores.

    Attributes:
        masks: (U,) units of all sub-layers one after the other, in the order of `sublayers`.
        scores: (U,).
        slopes: (U,) dL/dm, summed over the backward passes since the last step.
        returned: (U,) whether a unit came back after it had been masked.
    """

    masks: Tensor
    scores: Tensor
    slopes: Tensor
    returned: Tensor

    def __init__(self, model: Transformer, *, multiple: int) -> None:
        """`multiple`: FFNs keep multiples of it, or all."""
        super().__init__()
        self.config, self.multiple, self.places = model.config, multiple, _places(model.config)
        subs, device = sublayers(model.config), next(model.parameters()).device
        count = sum(sub.count for sub in subs)
        self.register_buffer("masks", torch.ones(count, device=device))
        self.register_buffer("scores", torch.zeros(count, device=device))
        self.register_buffer("slopes", torch.zeros(count, device=device), persistent=False)
        self.register_buffer("returned", torch.zeros(count, dtype=torch.bool, device=device))
        for sub in subs:
            projection = model.get_submodule(f"{sub.name}.{OUTPUT[sub.part]}")
            projection.register_forward_pre_hook(self._masking(self.places[sub.name], sub.width))

    def _masking(self, part: slice, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
        def note(gradient: Tensor) -> None:
            self.slopes[part].add_(gradient)

        def masked(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            mask = self.masks[part]
            if torch.is_grad_enabled():
                mask = mask.clone().requires_grad_()
                mask.register_hook(note)  # type: ignore[no-untyped-call]
            return inputs[0] * mask.repeat_interleave(width)

        return masked

    def move(self, rate: float) -> None:
        """Let the scores follow the gradients of a step."""
        self.scores -= rate * self.slopes
        self.slopes.zero_()

    def choose(self, share: float) -> None:
        """Mask all units but the `strongest` within a share of the model's multiply-adds."""
        whole = MultiplyAdds(self.config)
        left = share * self.config.multiply_adds() - whole.without_units(Kept.everything(self.config).layers)
        scores = self.scores.double().cpu().numpy()
        by_name = {name: scores[place] for name, place in self.places.items()}
        new = np.zeros(len(scores), np.float32)
        for name, units in strongest(self.config, by_name, left, multiple=self.multiple).items():
            new[self.places[name]][list(units)] = 1
        masks = torch.from_numpy(new).to(self.masks)
        self.returned |= masks > self.masks
        self.masks.copy_(masks)

    def kept(self) -> Kept:
        """The units that are not masked; all layers stay."""
        found = {name: self.masks[place].nonzero().flatten().tolist() for name, place in self.places.items()}
        return Kept(Kept.everything(self.config).layers, {name: tuple(units) for name, units in found.items()})

    def came_back(self) -> dict[str, int]:
        """How many units of each sub-layer came back."""
        return {name: int(self.returned[place].sum()) for name, place in self.places.items()}


def strongest(
    config: TransformerConfig, scores: Mapping[str, Floats], budget: float, *, multiple: int
) -> dict[str, Indices]:
    """The units of each sub-layer that stay within a budget of multiply-adds, ascending.

    Args:
        config: of the model.
        scores: (H,) or (F,) of every sub-layer, by name.
        budget: for all units together.
        multiple: neurons of a sub-layer are taken by so many, the best ones first; those left over by themselves.

    A head costs as much as many neurons, 2 K of them in self-attention: where it has a greater score than each of them,
    they may still bring more together. So what counts is the score per multiply-add. The best goes in first, as long as
    it fits, which gives the greatest sum of scores that so many multiply-adds can have, but for what the last of them
    leave over (Dantzig 1957). Scores below 0 are taken too: the budget says how much goes, the scores only what.
    """
    costs, subs = MultiplyAdds(config), sublayers(config)
    orders = {sub.name: np.argsort(-scores[sub.name], kind="stable") for sub in subs}
    taken, left = dict.fromkeys(orders, 0), budget
    waiting = list[tuple[float, int, int]]()  # what each sub-layer would take next: -score per multiply-add, place, end

    def offer(place: int) -> None:
        sub = subs[place]
        start = taken[sub.name]
        end = min(sub.count, start + (multiple if sub.part == "ffn" else 1))
        if end > start:
            score = float(scores[sub.name][orders[sub.name][start:end]].sum())
            heapq.heappush(waiting, (-score / costs.of(sub, end - start), place, end))

    for place in range(len(subs)):
        offer(place)
    while waiting:
        _, place, end = heapq.heappop(waiting)
        sub = subs[place]
        cost = costs.of(sub, end - taken[sub.name])
        if cost <= left:
            left -= cost
            taken[sub.name] = end
            offer(place)
    return {name: tuple(sorted(map(int, order[: taken[name]]))) for name, order in orders.items()}


def _places(config: TransformerConfig) -> dict[str, slice]:
    """Where the units of each sub-layer are among all."""
    subs = sublayers(config)
    ends = np.cumsum([sub.count for sub in subs]).tolist()
    return {sub.name: slice(end - sub.count, end) for sub, end in zip(subs, ends, strict=True)}
