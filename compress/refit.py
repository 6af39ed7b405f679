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
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..transformer.layers import Layer
from ..transformer.model import Transformer
from ..transformer.progress import SILENT, Progress
from ..transformer.recurrent import Recurrent
from .calibration import Batch
from .least_squares import LeastSquares
from .sides import Sides, activations, depths, inner, outer, output, parts, passed, projection
from .units import Kept


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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "before": round(self.before, 4), "after": round(self.after, 4)}


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
    progress.start("Re-fitting", sum(len(parts(layer)) for layer in layers), "sub-layers")
    fits: list[SublayerFit] = []
    with torch.no_grad():
        for stack, old, sides in depths(full, pruned, batches):
            layer = cast(Layer, getattr(full, stack)[old])
            if old not in kept.layers[stack]:
                for one, _ in sides:
                    one.tokens = passed(layer, one)
                continue
            new = kept.layers[stack].index(old)
            for part in parts(layer):
                errors = fit_projection(layer, getattr(pruned, stack)[new], part, sides, channels, damping)
                fits.append(SublayerFit(stack, new, part, *errors))
                progress.advance()
    progress.done()
    return {name: value.detach().cpu() for name, value in pruned.state_dict().items()}, fits


def fit_projection(
    full: Layer,
    pruned: Layer,
    part: str,
    sides: Sides,
    channels: slice | list[int],
    damping: float,
    *,
    sparse: bool = False,
) -> tuple[float, float]:
    """Fit a sub-layer's last linear and move both models' tokens past it; the errors before and after.

    `sparse`: weights that are 0 stay so.
    """
    module = getattr(pruned, part)
    weight, bias = projection(module)
    fit = LeastSquares(inputs=weight.shape[1], outputs=weight.shape[0], device=weight.device)
    energy = 0.0
    for one, two in sides:
        wanted = one.tokens + output(getattr(full, part), inner(full, part, one), one)
        given = activations(module, inner(pruned, part, two), two)
        target = wanted[:, channels] - two.tokens
        fit.add(given, target - given @ weight.T - bias)
        energy += float(target.double().square().sum())
        one.tokens = outer(full, part, wanted)
    change, shift = fit.solve_at(weight != 0, damping) if sparse else fit.solve(damping)
    if isinstance(module, Recurrent) and module.out is None:
        change, shift = torch.zeros_like(change), torch.zeros_like(shift)
    weight += change.to(weight.dtype)
    bias += shift.to(bias.dtype)
    for _, two in sides:
        two.tokens = outer(pruned, part, two.tokens + output(module, inner(pruned, part, two), two))
    before, after = ((error / max(energy, 1e-30)) ** 0.5 for error in (fit.before, fit.after(change, shift)))
    return before, after
