"""Fitting the weights that are not 0 to the model as it was: least squares, one linear after the other.

From the first layer to the last, in each sub-layer first the linears that lead in, then the projection that leads out.
With x what a linear (W, b) of the untouched model is given and x' what the sparse one is given, all before it being
fitted, those that lead in are replaced by the ones that minimise over the tokens of calibration examples

    || W' x' + b' - (W x + b) ||^2 + damping * scale * || W' - W_sparse ||^2,    W'_ij = 0 where W_sparse is,

and projections as in `refit`, towards what makes both models' tokens alike behind them, so that they take up the
errors of all that came before; `scale` is the mean of the variances of x'. SparseGPT by itself (Frantar & Alistarh
2023) keeps each linear's output for the inputs x' instead, and compensates in the columns to the right alone. Given
the places of the zeros, each row of a weight is solved for at its own (`least_squares`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..transformer.attention import Attention, CrossAttention
from ..transformer.layers import FeedForward, Layer
from ..transformer.model import Transformer
from ..transformer.progress import SILENT, Progress
from ..transformer.recurrent import Recurrent
from .calibration import Batch
from .least_squares import LeastSquares
from .refit import SublayerFit, fit_projection
from .sides import Side, Sides, depths, inner, parts

INPUTS = {Attention: ("qkv",), CrossAttention: ("q", "kv"), FeedForward: ("up",), Recurrent: ("inputs",)}


def refit_sparse(
    full: Transformer,
    sparse: Transformer,
    batches: Sequence[Batch],
    *,
    damping: float,
    progress: Progress = SILENT,
) -> list[SublayerFit]:
    """Fit a sparse model's weights and biases in place; the errors by sub-layer.

    Args:
        full: the model as it was, in evaluation mode.
        sparse: the same with zeros, on the same device.
        batches: calibration examples.
        damping: strength of the pull towards the given weights, as a share of the mean variance.
        progress: told of every sub-layer.
    """
    layers = [cast(Layer, layer) for layer in (*full.encoder, *full.decoder)]
    progress.start("Re-fitting", sum(len(parts(layer)) for layer in layers), "sub-layers")
    fits = []
    with torch.no_grad():
        for stack, number, sides in depths(full, sparse, batches):
            pair = _Pair(*(cast(Layer, getattr(model, stack)[number]) for model in (full, sparse)))
            for part in parts(pair.full):
                pair.fit_inputs(part, sides, damping)
                errors = fit_projection(pair.full, pair.sparse, part, sides, slice(None), damping, sparse=True)
                fits.append(SublayerFit(stack, number, part, *errors))
                progress.advance()
    progress.done()
    return fits


@dataclass(frozen=True)
class _Pair:
    """A layer of either model."""

    full: Layer
    sparse: Layer

    def fit_inputs(self, part: str, sides: Sides, damping: float) -> None:
        """Fit the linears that lead into a sub-layer."""
        for name in INPUTS.get(type(getattr(self.full, part)), ()):
            whole, linear = (getattr(getattr(layer, part), name) for layer in (self.full, self.sparse))
            assert isinstance(linear, nn.Linear)
            fit = LeastSquares(inputs=linear.in_features, outputs=linear.out_features, device=linear.weight.device)
            for one, two in sides:
                given = _given(self.sparse, part, name, two)
                fit.add(given, whole(_given(self.full, part, name, one)) - linear(given))
            change, shift = fit.solve_at(linear.weight != 0, damping)
            linear.weight.add_(change)
            linear.bias.add_(shift)


def _given(layer: Layer, part: str, name: str, side: Side) -> Tensor:
    """What a linear that leads in is given: keys and values of cross-attention come from the source."""
    if name == "kv":
        assert side.source is not None
        return side.source.tokens
    return inner(layer, part, side)
