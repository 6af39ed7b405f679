"""What changes of a sub-layer's output projection cost: the Fisher information in Kronecker-factored form.

Changing a projection by dW changes the model's log-likelihood, to second order, by

    1/2 tr(G dW A dW^T),    A = E[a a^T],    G = E[g g^T],

a (U,) being what the projection is given at a token and g (D,) the gradient with respect to what it gives, whose
likelihoods and draws are those of `importance` (Martens & Grosse 2015, "K-FAC", section 3, whose terms between two
tokens are left out: a fit of the projection and its bias leaves errors without a common part). Both expectations are
sums over tokens here, divided by the texts once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transformer.model import Transformer
from ..transformer.progress import SILENT, Progress
from .calibration import Batch
from .gptq import Gram
from .importance import drawn_score
from .projections import Projections

LEAST_DAMPING = 1e-4  # products are summed in float32 a batch, and the means taken out afterwards


@dataclass(frozen=True)
class Curvature:
    """The two factors of one projection (D, U).

    Attributes:
        inputs: the mean of a a^T over tokens, minus the product of the means: what a bias explains costs nothing.
        mean: of a, (U,).
        outputs: the sum of g g^T over tokens, over the texts; (D, D). All float64.
        tokens, texts: how many there were.
    """

    inputs: Tensor
    mean: Tensor
    outputs: Tensor
    tokens: int
    texts: int

    def damped(self, damping: float) -> Tensor:
        """`inputs` with a share of the mean of its diagonal added to that, never less than rounding asks for."""
        matrix = self.inputs.clone()
        matrix.diagonal().add_(max(damping, LEAST_DAMPING) * (float(matrix.diagonal().mean()) or 1.0))
        return matrix

    @classmethod
    def joined(cls, parts: Sequence["Curvature"]) -> "Curvature":
        """Over the examples of all parts."""
        tokens, texts = (sum(getattr(part, name) for part in parts) for name in ("tokens", "texts"))
        shares = [part.tokens / max(tokens, 1) for part in parts]
        mean = torch.stack([share * part.mean for share, part in zip(shares, parts, strict=True)]).sum(0)
        inputs, outputs = torch.zeros_like(parts[0].inputs), torch.zeros_like(parts[0].outputs)
        for share, part in zip(shares, parts, strict=True):
            apart = part.mean - mean
            inputs += share * (part.inputs + torch.outer(apart, apart))
            outputs += part.outputs * (part.texts / max(texts, 1))
        return cls(inputs, mean, outputs, tokens, texts)


def curvatures(
    model: Transformer, batches: Sequence[Batch], seed: int, *, progress: Progress = SILENT
) -> dict[str, Curvature]:
    """The factors of every sub-layer that has units, by name; the model's parameters get no gradient."""
    generator, sums = torch.Generator().manual_seed(seed), dict[str, _Sums]()
    with Projections(model) as projections:
        for batch in batches:
            projections.clear()
            score = drawn_score(model.config, batch.run(model), generator)
            wanted = list(projections.outputs.values())
            found = torch.autograd.grad(score, wanted, allow_unused=True, materialize_grads=True) if wanted else ()
            for (name, given), gradient in zip(projections.inputs.items(), found, strict=True):
                sums.setdefault(name, _Sums(given, gradient)).add(given, gradient)
            progress.advance(len(batch.ids))
    texts = max(sum(len(batch.ids) for batch in batches), 1)
    return {name: own.curvature(texts) for name, own in sums.items()}


class _Sums:
    """Streams what one projection is given and the gradients of what it gives."""

    def __init__(self, given: Tensor, gradient: Tensor) -> None:
        inputs, outputs, device = given.shape[1], gradient.shape[1], given.device
        self.given = Gram(inputs=inputs, device=device)
        self.total = torch.zeros(inputs, dtype=torch.float64, device=device)
        self.gradients = Gram(inputs=outputs, device=device)

    def add(self, given: Tensor, gradient: Tensor) -> None:
        """Count N more tokens: (N, U) and (N, D)."""
        self.given.add(given)
        self.total += given.detach().sum(0, dtype=torch.float64)
        self.gradients.add(gradient)

    def curvature(self, texts: int) -> Curvature:
        """The factors over so many texts."""
        rows = max(self.given.rows, 1)
        mean = self.total / rows
        inputs = self.given.matrix / rows - torch.outer(mean, mean)
        return Curvature(inputs.cpu(), mean.cpu(), (self.gradients.matrix / texts).cpu(), self.given.rows, texts)
