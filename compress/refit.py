"""Fitting what is left to what was there: least squares, one sub-layer after the other.

From the first layer to the last, the output projection (W, b) of each pruned sub-layer is replaced by the one that
minimises, over the tokens of calibration texts,

    || x + A W^T + b - (x' + f(x')) ||^2 + damping * scale * || W - W_old ||^2,

x and A (N, U) being the pruned model's tokens and activations after everything before has been re-fitted, x' the
tokens of the unpruned model, f its sub-layer (its norm included where that comes first; their sum cut to the channels
that the pruned model has) and `scale` the mean of the activations' variances (Kwon et al. 2022, section 4.3, fit one
scale per unit to the sub-layer's output alone; here the whole projection also corrects what the sub-layers before left
over). An absent sub-layer keeps the best constant, the mean; a cell without a projection stays as it is. A decoder
comes after its encoder and attends in either model to what that model's encoder gives. W, b come in closed form from
sums over batches, so memory does not grow with the tokens but for the tokens of the two models at one depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..transformer.attention import Attention, CrossAttention
from ..transformer.layers import AbsentSublayer, FeedForward, Layer
from ..transformer.model import Source, Transformer
from ..transformer.packing import Packing
from ..transformer.progress import SILENT, Progress
from ..transformer.recurrent import Recurrent
from .calibration import Batch
from .units import KINDS, Kept, stacks


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
    """How far a sub-layer's output was from its target: square roots of squared error over squared target.

    `layer` is its number in the pruned model.
    """

    stack: str
    layer: int
    part: str
    before: float
    after: float


@dataclass
class _Side:
    """One model's tokens (N, D) of a batch at one depth, and what its decoder attends to."""

    packing: Packing
    tokens: Tensor
    source: Source | None = None


Sides = list[tuple[_Side, _Side]]  # of the unpruned and of the pruned model, batch by batch


def refit(
    full: Transformer,
    pruned: Transformer,
    kept: Kept,
    batches: Sequence[Batch],
    *,
    damping: float = 1e-3,
    progress: Progress = SILENT,
) -> tuple[dict[str, Tensor], list[SublayerFit]]:
    """The re-fitted state of a pruned model, and the errors by sub-layer.

    Args:
        full: the unpruned model, in evaluation mode.
        pruned: the model to fit, on the same device; it is changed in place, so give it away.
        kept: the layers and channels of `full` that `pruned` has.
        batches: calibration examples.
        damping: strength of the pull towards the given weights, as a share of the mean variance.
        progress: told of every sub-layer.
    """
    layers = [cast(Layer, layer) for layer in (*pruned.encoder, *pruned.decoder)]
    channels = slice(None) if kept.channels is None else list(kept.channels)
    progress.start("Re-fitting", sum(len(_parts(layer)) for layer in layers), "sub-layers")
    fits: list[SublayerFit] = []
    with torch.no_grad():
        sides: Sides = [(_embedded(full, batch), _embedded(pruned, batch)) for batch in batches]
        for stack in stacks(full.config):
            if stack == "decoder" and full.encoder:
                sides = [
                    (_embedded(full, batch, _source(full, one)), _embedded(pruned, batch, _source(pruned, two)))
                    for batch, (one, two) in zip(batches, sides, strict=True)
                ]
            for old, layer in enumerate(getattr(full, stack)):
                if old not in kept.layers[stack]:
                    for one, _ in sides:
                        one.tokens = _passed(layer, one)
                    continue
                new = kept.layers[stack].index(old)
                for part in _parts(layer):
                    errors = _refit_part(layer, getattr(pruned, stack)[new], part, sides, channels, damping)
                    fits.append(SublayerFit(stack, new, part, *errors))
                    progress.advance()
    progress.done()
    return {name: value.detach().cpu() for name, value in pruned.state_dict().items()}, fits


def _parts(layer: Layer) -> list[str]:
    """Those that the layer has, be they absent sub-layers."""
    return [part for part in KINDS if getattr(layer, part) is not None]


def _embedded(model: Transformer, batch: Batch, source: Source | None = None) -> _Side:
    """What the first stack begins with, or with a source the decoder beside it."""
    ids, mask, table = batch.ids, batch.mask, model.embeddings
    if source is not None:
        assert batch.target_ids is not None
        assert batch.target_mask is not None
        ids, mask, table = batch.target_ids, batch.target_mask, model.target or model.embeddings
    packing = Packing.from_mask(mask)
    return _Side(packing, table(packing.pack(ids), packing.positions), source)


def _source(model: Transformer, side: _Side) -> Source:
    """What the encoder gives, once its layers are passed."""
    tokens = side.tokens if model.encoder_norm is None else model.encoder_norm(side.tokens)
    return Source(tokens, side.packing)


def _passed(layer: Layer, side: _Side) -> Tensor:
    """The tokens after a layer."""
    source = side.source
    memory = () if source is None else (layer.memory(source.tokens, source.packing), source.packing.mask)
    result: Tensor = layer(side.tokens, side.packing, *memory)
    return result


def _refit_part(
    full: Layer, pruned: Layer, part: str, sides: Sides, channels: slice | list[int], damping: float
) -> tuple[float, float]:
    """Fit one sub-layer and move both models' tokens past it; the errors before and after."""
    module = getattr(pruned, part)
    weight, bias = _projection(module)
    fit = LeastSquares(inputs=weight.shape[1], outputs=weight.shape[0], device=weight.device)
    energy = 0.0
    for one, two in sides:
        wanted = one.tokens + _output(getattr(full, part), _inner(full, part, one), one)
        activations = _activations(module, _inner(pruned, part, two), two)
        target = wanted[:, channels] - two.tokens
        fit.add(activations, target - activations @ weight.T - bias)
        energy += float(target.double().square().sum())
        one.tokens = _outer(full, part, wanted)
    change, shift = fit.solve(damping)
    if isinstance(module, Recurrent) and module.out is None:
        change, shift = torch.zeros_like(change), torch.zeros_like(shift)
    weight += change.to(weight.dtype)
    bias += shift.to(bias.dtype)
    for _, two in sides:
        two.tokens = _outer(pruned, part, two.tokens + _output(module, _inner(pruned, part, two), two))
    before, after = ((error / max(energy, 1e-30)) ** 0.5 for error in (fit.before, fit.after(change, shift)))
    return before, after


def _inner(layer: Layer, part: str, side: _Side) -> Tensor:
    """What a sub-layer is given, (N, D)."""
    given: Tensor = getattr(layer, f"{part}_norm")(side.tokens) if layer.pre else side.tokens
    return given


def _outer(layer: Layer, part: str, total: Tensor) -> Tensor:
    """The tokens after a sub-layer, from their sum with its output."""
    after: Tensor = total if layer.pre else getattr(layer, f"{part}_norm")(total)
    return after


def _projection(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight (D, U) and bias (D,) of a sub-layer's last linear.

    An absent one has (D, 0) and its bias, a cell without projection copies of the identity and of 0.
    """
    if isinstance(module, AbsentSublayer):
        return module.bias.new_zeros(len(module.bias), 0), module.bias
    assert isinstance(module, Attention | CrossAttention | Recurrent | FeedForward)
    last = module.down if isinstance(module, FeedForward) else module.out
    if last is None:
        assert isinstance(module, Recurrent)
        like = next(module.parameters())
        return torch.eye(module.units, dtype=like.dtype, device=like.device), like.new_zeros(module.units)
    assert isinstance(last, nn.Linear)
    return last.weight, last.bias


def _activations(module: nn.Module, x: Tensor, side: _Side) -> Tensor:
    """What the last linear is given, (N, U), where the sub-layer is given x (N, D)."""
    if isinstance(module, CrossAttention):
        assert side.source is not None
        memory = module.memory(side.source.tokens, side.source.packing)
        return module.mix(x, side.packing, memory, side.source.packing.mask)
    if isinstance(module, Attention | Recurrent):
        return module.mix(x, side.packing)
    return module.activation(module.up(x)) if isinstance(module, FeedForward) else x.new_zeros(len(x), 0)


def _output(module: nn.Module, x: Tensor, side: _Side) -> Tensor:
    """What a sub-layer that is given x (N, D) adds, (N, D)."""
    weight, bias = _projection(module)
    return _activations(module, x, side) @ weight.T + bias
