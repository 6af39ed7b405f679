"""Fitting what is left to what was there: least squares, one sub-layer after the other.

From the first layer to the last, the output projection (W, b) of each pruned sub-layer is replaced by the one that
minimises, over the tokens of calibration texts,

    || x + A W^T + b - (x' + f(x')) ||^2 + damping * scale * || W - W_old ||^2,

x and A (N, U) being the pruned model's tokens and activations after everything before has been re-fitted, x' the
tokens of the unpruned model, f its sub-layer and `scale` the mean of the activations' variances (Kwon et al. 2022,
section 4.3, fit one scale per unit to the sub-layer's output alone; here the whole projection also corrects what the
sub-layers before left over). An absent sub-layer keeps the best constant, the mean. W, b come in closed form from
sums over batches, so memory does not grow with the tokens but for the tokens of the two models at one depth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..transformer.attention import Attention
from ..transformer.layers import AbsentSublayer, FeedForward, Layer
from ..transformer.model import Transformer
from ..transformer.packing import Packing
from ..transformer.progress import SILENT, Progress
from .importance import Batch
from .surgery import Indices

PARTS = ("mixer", "ffn")


class LeastSquares:
    """Streams rows (activations, residuals) and gives the change of weight and bias that explains the residuals.

    Products are taken in the rows' own precision, batch by batch, and summed in float64.
    """

    def __init__(self, *, inputs: int, outputs: int, device: torch.device) -> None:
        self._rows = 0
        self._gram = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64, device=device)
        self._cross = torch.zeros(inputs + 1, outputs, dtype=torch.float64, device=device)
        self._energy = 0.0

    def add(self, activations: Tensor, residuals: Tensor) -> None:
        """Count N more rows: activations (N, I), residuals (N, O)."""
        a = torch.cat([activations, activations.new_ones(len(activations), 1)], 1)
        self._gram += a.T @ a
        self._cross += a.T @ residuals
        self._energy += float(residuals.double().square().sum())
        self._rows += len(a)

    @property
    def before(self) -> float:
        """Sum of the squared residuals."""
        return self._energy

    def solve(self, damping: float) -> tuple[Tensor, Tensor]:
        """Change of the weight (O, I) and of the bias (O,), both float64; the bias is not damped."""
        count = max(self._rows, 1)
        mean, target = self._gram[-1, :-1] / count, self._cross[-1] / count
        gram = self._gram[:-1, :-1] - count * torch.outer(mean, mean)
        cross = self._cross[:-1] - count * torch.outer(mean, target)
        if len(gram):
            gram.diagonal().add_(damping * gram.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(gram)
        copies = bool(failed)  # columns that are constant or copies of others, and no damping
        change = torch.linalg.pinv(gram, hermitian=True) @ cross if copies else torch.cholesky_solve(cross, factor)
        return change.T.contiguous(), target - mean @ change

    def after(self, weight: Tensor, bias: Tensor) -> float:
        """Sum of the squared residuals once `weight` (O, I) and `bias` (O,) are added."""
        whole = torch.cat([weight.T, bias[None]])
        explained = 2 * (whole * self._cross).sum() - (whole * (self._gram @ whole)).sum()
        return max(self._energy - float(explained), 0.0)


@dataclass(frozen=True)
class SublayerFit:
    """How far a sub-layer's output was from its target: square roots of squared error over squared target."""

    layer: int
    part: str
    before: float
    after: float


@dataclass
class _Side:
    """The tokens of one batch at one depth of the two models."""

    packing: Packing
    full: Tensor
    pruned: Tensor


def refit(
    full: Transformer,
    pruned: Transformer,
    layers: Indices,
    batches: Sequence[Batch],
    *,
    damping: float = 1e-3,
    progress: Progress = SILENT,
) -> tuple[dict[str, Tensor], list[SublayerFit]]:
    """The re-fitted state of a pruned model, and the errors by sub-layer.

    Args:
        full: the unpruned model, in evaluation mode.
        pruned: the model to fit, on the same device; it is changed in place, so give it away.
        layers: the number in `full` of each layer of `pruned`.
        batches: calibration texts as (input_ids, attention_mask).
        damping: strength of the pull towards the given weights, as a share of the mean variance.
    """
    fits: list[SublayerFit] = []
    with torch.no_grad():
        sides = list(_embed(full, batches))
        for new, (before, old) in enumerate(pairwise((-1, *layers))):
            for skipped in full.encoder[before + 1 : old]:
                for side in sides:
                    side.full = skipped(side.full, side.packing)
            for part in PARTS:
                fits.append(_refit_part(full.encoder[old], pruned.encoder[new], part, new, sides, damping))
                progress.advance()
    return {name: value.detach().cpu() for name, value in pruned.state_dict().items()}, fits


def _embed(model: Transformer, batches: Sequence[Batch]) -> Iterator[_Side]:
    for ids, mask in batches:
        packing = Packing.from_mask(mask)
        x = model.embeddings(packing.pack(ids), packing.positions, None)
        yield _Side(packing, x, x)


def _refit_part(
    full: nn.Module, pruned: nn.Module, part: str, number: int, sides: Sequence[_Side], damping: float
) -> SublayerFit:
    """Fit one sub-layer and move both models' tokens past it."""
    assert isinstance(full, Layer)
    assert isinstance(pruned, Layer)
    module = getattr(pruned, part)
    weight, bias = _projection(module)
    fit = LeastSquares(inputs=weight.shape[1], outputs=weight.shape[0], device=weight.device)
    energy = 0.0
    for side in sides:
        wanted = side.full + _output(getattr(full, part), side.full, side.packing)
        activations = _activations(module, side.pruned, side.packing)
        target = wanted - side.pruned
        fit.add(activations, target - activations @ weight.T - bias)
        energy += float(target.double().square().sum())
        side.full = getattr(full, f"{part}_norm")(wanted)
    change, shift = fit.solve(damping)
    weight += change.to(weight.dtype)
    bias += shift.to(bias.dtype)
    for side in sides:
        side.pruned = getattr(pruned, f"{part}_norm")(side.pruned + _output(module, side.pruned, side.packing))
    before, after = ((error / max(energy, 1e-30)) ** 0.5 for error in (fit.before, fit.after(change, shift)))
    return SublayerFit(number, part, before, after)


def _projection(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight (D, U) and bias (D,) of a sub-layer's last linear; of an absent one, (D, 0) and its bias."""
    if isinstance(module, AbsentSublayer):
        return module.bias.new_zeros(len(module.bias), 0), module.bias
    assert isinstance(module, Attention | FeedForward)
    last = module.out if isinstance(module, Attention) else module.down
    assert isinstance(last, nn.Linear)
    return last.weight, last.bias


def _activations(module: nn.Module, x: Tensor, packing: Packing) -> Tensor:
    """Tokens (N, D) -> what the last linear is given, (N, U)."""
    if isinstance(module, AbsentSublayer):
        return x.new_zeros(len(x), 0)
    assert isinstance(module, Attention | FeedForward)
    return module.mix(x, packing) if isinstance(module, Attention) else module.activation(module.up(x))


def _output(module: nn.Module, x: Tensor, packing: Packing) -> Tensor:
    """Tokens (N, D) -> the sub-layer's output, (N, D)."""
    weight, bias = _projection(module)
    return _activations(module, x, packing) @ weight.T + bias
