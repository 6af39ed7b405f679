"""How much each head, neuron and layer matters to what a model says.

Fisher information of multiplicative masks, all 1 (Kwon et al. 2022, section 4.1): removing the units R costs about
1/2 sum over i, j in R of E[g_i g_j], g being the gradient of one text's log-likelihood with respect to the masks. The
likelihood is the model's own, its labels drawn from it, so that nothing has to be labelled:

- classification: y ~ softmax(logits), log p(y);
- embedding: y ~ N(f(x), I), whose gradient is that of <eps, f(x)> with eps ~ N(0, I), so that E[g g^T] = J^T J, the
  mean squared change of the output; a model without a head is treated so on its tokens.

A mask multiplies what enters the output projection, so its gradient is the sum over a text's tokens of activation
times gradient; texts do not see each other, so one backward pass gives every text of a batch its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..transformer.config import ClassificationHead, TransformerConfig
from ..transformer.layers import AbsentSublayer
from ..transformer.model import Output, Transformer
from ..transformer.progress import SILENT, Progress
from .surgery import State

Batch = tuple[Tensor, Tensor]  # input_ids and attention_mask, each (B, T) int64
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MaskGradients:
    """Gradients of S log-likelihoods with respect to masks.

    Attributes:
        layers: (S, L) of masks on what a layer changes: m = 1 is the layer, m = 0 the identity.
        heads: per layer (S, H); (S, 0) without a mixer.
        neurons: per layer (S, F); (S, 0) without an FFN.
    """

    layers: Tensor
    heads: tuple[Tensor, ...]
    neurons: tuple[Tensor, ...]

    def scores(self) -> "Scores":
        """Mean squares: the diagonal of the Fisher information."""
        return Scores(_fisher(self.layers), _mean_squares(self.heads), _mean_squares(self.neurons))


@dataclass(frozen=True)
class Scores:
    """What removing units costs, by any criterion.

    Attributes:
        layers: (L, L), whose sum over R x R is the cost of removing the layers R.
        heads: (H,) of each layer.
        neurons: (F,) of each layer.
    """

    layers: Floats
    heads: tuple[Floats, ...]
    neurons: tuple[Floats, ...]


def block(gradients: Tensor) -> Floats:
    """One layer's gradients (S, U) -> its block of the Fisher information (U, U)."""
    return _fisher(gradients)


def _fisher(gradients: Tensor) -> Floats:
    wide = gradients.double()
    result: Floats = (wide.T @ wide / max(len(wide), 1)).cpu().numpy()
    return result


def _mean_squares(layers: Sequence[Tensor]) -> tuple[Floats, ...]:
    return tuple(gradients.double().square().mean(0).cpu().numpy() for gradients in layers)


def mask_gradients(
    model: Transformer, batches: Sequence[Batch], seed: int, *, draws: int = 1, progress: Progress = SILENT
) -> MaskGradients:
    """Per-text gradients, in the batches' order and `draws` times with labels drawn anew.

    The model's parameters get no gradient and its hooks are gone afterwards.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = []
    with _Capture(model) as capture:
        for ids, mask in batches:
            capture.inputs.clear()
            output = model(ids, mask, with_states=True)
            for draw in range(draws):
                score = _log_likelihood(model.config, output, generator)
                parts.append(capture.gradients(output, score, keep=draw + 1 < draws))
            progress.advance(len(ids))
    whole = [torch.cat(column) for column in zip(*parts, strict=True)]
    count = len(model.encoder)
    return MaskGradients(whole[0], tuple(whole[1 : count + 1]), tuple(whole[count + 1 :]))


def _log_likelihood(config: TransformerConfig, output: Output, generator: torch.Generator) -> Tensor:
    """Sum over a batch of log-likelihoods of drawn labels, up to terms without gradient."""
    result = output.hidden if output.result is None else output.result
    if isinstance(config.head, ClassificationHead):
        drawn = torch.multinomial(result.detach().softmax(1).cpu(), 1, generator=generator).squeeze(1)
        return -F.cross_entropy(result, drawn.to(result.device), reduction="sum")
    noise = torch.randn(result.shape, generator=generator).to(result.device)
    return (noise * result).sum()


class _Capture:
    """Keeps what enters the output projections of a model, with gradients, while it is entered."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.inputs: dict[str, Tensor] = {}
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "_Capture":
        for parameter in self._trainable:
            parameter.requires_grad_(False)
        self._handles.append(self.model.embeddings.register_forward_hook(lambda m, i, x: x.requires_grad_()))
        for number, layer in enumerate(self.model.encoder):
            for name, projection in (("mixer", "out"), ("ffn", "down")):
                part = getattr(layer, name)
                if not isinstance(part, AbsentSublayer):
                    self._watch(f"{number}.{name}", getattr(part, projection))
        return self

    def _watch(self, name: str, module: nn.Module) -> None:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.inputs[name] = inputs[0]

        self._handles.append(module.register_forward_pre_hook(keep))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._trainable:
            parameter.requires_grad_(True)

    def gradients(self, output: Output, score: Tensor, *, keep: bool) -> list[Tensor]:
        """Mask gradients of one batch: layers (B, L), then each layer's heads, then each layer's neurons."""
        names = list(self.inputs)
        states = output.states
        wanted = [self.inputs[name] for name in names] + list(states[1:])
        grads = torch.autograd.grad(score, wanted, retain_graph=keep)
        products = {n: self.inputs[n].detach() * g for n, g in zip(names, grads[: len(names)], strict=True)}
        packing = output.packing
        owner, batch = packing.flat // packing.mask.shape[1], len(packing.mask)

        def per_text(x: Tensor) -> Tensor:  # (N, U) -> (B, U)
            return torch.zeros(batch, x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, owner, x)

        changes = [
            ((new - old).detach() * g).sum(1)
            for old, new, g in zip(states, states[1:], grads[len(names) :], strict=False)
        ]
        result = [per_text(torch.stack(changes, 1))]
        nothing = torch.zeros(len(owner), 0, device=score.device)
        for number, layer in enumerate(self.model.config.encoder):
            x = products.get(f"{number}.mixer", nothing)
            if (m := layer.attention) is not None:
                x = x.view(len(x), m.heads, m.head_width).sum(2)
            result.append(per_text(x))
        return result + [per_text(products.get(f"{i}.ffn", nothing)) for i in range(len(self.model.encoder))]


def magnitude_scores(config: TransformerConfig, state: State) -> Scores:
    """Squared L2 norm of every unit's weights, those that lead in and those that lead out; no data needed."""
    heads, neurons, layers = [], [], []
    for i, layer in enumerate(config.encoder):
        nothing = torch.zeros(0, dtype=torch.float64)
        head, neuron = nothing, nothing
        if (m := layer.attention) is not None:
            leading_in = state[f"encoder.{i}.mixer.qkv.weight"].double().square().sum(1).view(3, m.heads, m.head_width)
            leading_out = state[f"encoder.{i}.mixer.out.weight"].double().square().sum(0).view(m.heads, m.head_width)
            head = leading_in.sum((0, 2)) + leading_out.sum(1)
        if layer.ffn is not None:
            leading_in = state[f"encoder.{i}.ffn.up.weight"].double().square().sum(1)
            neuron = leading_in + state[f"encoder.{i}.ffn.down.weight"].double().square().sum(0)
        heads.append(head.cpu().numpy())
        neurons.append(neuron.cpu().numpy())
        layers.append(float(head.sum() + neuron.sum()))
    return Scores(np.diag(np.array(layers)), tuple(heads), tuple(neurons))
