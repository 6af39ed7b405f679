"""How much each head, neuron, channel and layer matters to what a model says.

Fisher information of multiplicative masks, all 1 (Kwon et al. 2022, section 4.1): removing the units R costs about
1/2 sum over i, j in R of E[g_i g_j], g being the gradient of one text's log-likelihood with respect to the masks. The
likelihood is the model's own, so that nothing has to be labelled. With J the derivative of the model's output by the
masks that mean is J^T F J, F being the Fisher information of the output itself:

- classification, y ~ softmax(logits): diag(p) - p p^T;
- language, at every token of a text as it is the next one y ~ softmax(logits): the same, summed over the text;
- embedding, y ~ N(f(x), I): the identity, the mean squared change of the output; a model without a head is treated so
  on its tokens.

Here g is the gradient of <v, output> with v ~ N(0, F) (`drawn_score`), not that of log p(y) with y drawn: the means of
g g^T are the same, but labels of texts that a model is sure of are nearly always those whose gradient is next to 0, and
what such texts are worth would lie in few rare draws.

A mask multiplies what enters the output projection, so its gradient is the sum over a text's tokens of activation
times gradient; texts do not see each other, so one backward pass gives every text of a batch its own. With a decoder
beside an encoder a text is a pair: its masks act on the tokens of the source or on those of the target. The mask of a
channel multiplies it in all states at once: after the embedding and after every layer, of both stacks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..transformer.config import ClassificationHead, LanguageHead, TransformerConfig
from ..transformer.model import Output, Transformer
from ..transformer.packing import Packing
from ..transformer.progress import SILENT, Progress
from .calibration import Batch
from .channels import channel_axes
from .projections import Projections
from .surgery import State
from .units import OUTPUT, stacks, sublayers

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MaskGradients:
    """Gradients of S draws with respect to masks.

    Attributes:
        layers: per stack (S, L) of masks on what a layer changes: m = 1 is the layer, m = 0 the identity.
        units: (S, H) or (S, F) of every sub-layer that has heads or neurons, by name.
        channels: (S, D) of masks on the channels of the residual stream.
    """

    layers: Mapping[str, Tensor]
    units: Mapping[str, Tensor]
    channels: Tensor

    @classmethod
    def joined(cls, parts: Sequence["MaskGradients"]) -> "MaskGradients":
        """Those of all parts' texts."""
        first = parts[0]
        return cls(
            {stack: torch.cat([part.layers[stack] for part in parts]) for stack in first.layers},
            {name: torch.cat([part.units[name] for part in parts]) for name in first.units},
            torch.cat([part.channels for part in parts]),
        )

    def scores(self) -> "Scores":
        """Mean squares: the diagonal of the Fisher information."""
        return Scores(
            {stack: block(gradients) for stack, gradients in self.layers.items()},
            {name: _mean_squares(x) for name, x in self.units.items()},
            _mean_squares(self.channels),
        )


def _mean_squares(gradients: Tensor) -> Floats:
    result: Floats = gradients.double().square().mean(0).cpu().numpy()
    return result


@dataclass(frozen=True)
class Scores:
    """What removing units costs, by any criterion.

    Attributes:
        layers: per stack (L, L), whose sum over R x R is the cost of removing the layers R.
        units: (H,) or (F,) of every sub-layer that has heads or neurons, by name.
        channels: (D,).
    """

    layers: Mapping[str, Floats]
    units: Mapping[str, Floats]
    channels: Floats


def block(gradients: Tensor) -> Floats:
    """Gradients (S, U) of one sub-layer's units, or of one stack's layers -> their Fisher information (U, U)."""
    wide = gradients.double()
    result: Floats = (wide.T @ wide / max(len(wide), 1)).cpu().numpy()
    return result


def mask_gradients(
    model: Transformer, batches: Sequence[Batch], seed: int, *, draws: int = 1, progress: Progress = SILENT
) -> MaskGradients:
    """Per-text gradients, in the batches' order and `draws` times anew.

    The model's parameters get no gradient and its hooks are gone afterwards.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[MaskGradients] = []
    with Projections(model) as projections:
        for batch in batches:
            projections.clear()
            output = batch.run(model)
            for draw in range(draws):
                score = drawn_score(model.config, output, generator)
                parts.append(_gradients(projections, batch, output, score, keep=draw + 1 < draws))
            progress.advance(len(batch.ids))
    return MaskGradients.joined(parts)


def drawn_score(config: TransformerConfig, output: Output, generator: torch.Generator) -> Tensor:
    """Sum over a batch of <v, output>, v being drawn with the Fisher information of the output as its covariance.

    Of logits that is v = sqrt(p) * e - p <sqrt(p), e> with e ~ N(0, I).
    """
    result = output.hidden if output.result is None else output.result
    drawn = torch.randn(result.shape, generator=generator).to(result.device)
    if isinstance(config.head, ClassificationHead | LanguageHead):
        p = result.detach().softmax(1)
        drawn *= p.sqrt()
        drawn -= p * drawn.sum(1, keepdim=True)
    return (drawn * result).sum()


def _gradients(projections: Projections, batch: Batch, output: Output, score: Tensor, *, keep: bool) -> MaskGradients:
    """Mask gradients of one batch, with B rows each."""
    config = projections.model.config
    states = states_of(config, output)
    wanted = [*projections.inputs.values(), *(state for stack in states.values() for state in stack)]
    # an encoder that no layer attends to has no part in the score
    found = iter(torch.autograd.grad(score, wanted, retain_graph=keep, allow_unused=True, materialize_grads=True))
    products = {name: x.detach() * next(found) for name, x in projections.inputs.items()}
    changes, streams = {}, {}
    for stack, tokens in states.items():
        streams[stack] = tokens[0].detach() * next(found)
        changes[stack] = tokens[0].new_zeros(len(tokens[0]), len(tokens) - 1)
        for i, (old, new) in enumerate(pairwise(tokens)):
            gradient = next(found)
            changes[stack][:, i] = ((new - old).detach() * gradient).sum(1)
            streams[stack] += new.detach() * gradient
    owners = {stack: _owner(batch, stack) for stack in states}

    def per_text(x: Tensor, stack: str) -> Tensor:  # (N, U) -> (B, U)
        return x.new_zeros(len(batch.ids), x.shape[1]).index_add_(0, owners[stack], x)

    units = {}
    for sub in sublayers(config):
        x = products[sub.name]
        units[sub.name] = per_text(x.view(len(x), sub.count, sub.width).sum(2), sub.stack)
    channels = torch.stack([per_text(x, stack) for stack, x in streams.items()]).sum(0)
    return MaskGradients({stack: per_text(x, stack) for stack, x in changes.items()}, units, channels)


def states_of(config: TransformerConfig, output: Output) -> dict[str, tuple[Tensor, ...]]:
    """The tokens before, between and after the layers of each stack."""
    found, start = {}, 0
    for stack, layers in stacks(config).items():
        end = start + len(layers) + 1
        found[stack] = output.states[start:end]
        start = end
    return found


def _owner(batch: Batch, stack: str) -> Tensor:
    """(N,) the row of every packed token of a stack."""
    mask = batch.mask if stack == "encoder" or batch.target_mask is None else batch.target_mask
    return Packing.from_mask(mask).flat // mask.shape[1]


def magnitude_scores(config: TransformerConfig, state: State) -> Scores:
    """Squared L2 norm of every unit's weights, those that lead in and those that lead out; no data needed.

    A channel's weights are its columns and rows of all matrices, tables and head included.
    """
    units: dict[str, Floats] = {}
    layers = {name: np.zeros(len(layers)) for name, layers in stacks(config).items()}
    for sub in sublayers(config):
        out = state[f"{sub.name}.{OUTPUT[sub.part]}.weight"].double().square().sum(0).view(sub.count, sub.width).sum(1)
        for linear, widths in sub.inputs.items():
            rows = state[f"{sub.name}.{linear}.weight"].double().square().sum(1)
            for part, width in zip(torch.split(rows, [sub.count * width for width in widths]), widths, strict=True):
                out += part.view(sub.count, width).sum(1)
        units[sub.name] = out.cpu().numpy()
        layers[sub.stack][sub.layer] += float(out.sum())
    channels = np.zeros(config.d_model)
    for name, value in state.items():
        for axis in channel_axes(name) if value.ndim == 2 else ():
            channels += value.double().square().sum(1 - axis).cpu().numpy()
    return Scores({stack: np.diag(sums) for stack, sums in layers.items()}, units, channels)
