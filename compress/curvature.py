"""What changes of a sub-layer's output projection cost: the Fisher information in Kronecker-factored form.

Changing a projection by dW changes the model's log-likelihood, to second order, by

    1/2 tr(G dW A dW^T),    A = E[a a^T],    G = E[g g^T],

a (U,) being what the projection is given at a token and g (D,) the gradient of the log-likelihood with respect to what
it gives (Martens & Grosse 2015, "K-FAC", section 3, whose terms between two tokens are left out: a fit of the
projection and its bias leaves errors without a common part). Likelihoods are those of `importance`; both expectations
are sums over tokens here, divided by the texts once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn

from ..transformer.model import Transformer
from ..transformer.progress import SILENT, Progress
from .calibration import Batch
from .gptq import Gram
from .importance import log_likelihood
from .units import OUTPUT, sublayers

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
    generator = torch.Generator().manual_seed(seed)
    with _Watch(model) as watch:
        for batch in batches:
            watch.tokens.clear()
            score = log_likelihood(model.config, batch.run(model), generator)
            watch.add(score)
            progress.advance(len(batch.ids))
    texts = max(sum(len(batch.ids) for batch in batches), 1)
    return {name: sums.curvature(texts) for name, sums in watch.sums.items()}


class _Sums:
    """Streams what one projection is given and the gradients of what it gives."""

    def __init__(self, module: nn.Linear) -> None:
        inputs, outputs, device = module.in_features, module.out_features, module.weight.device
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


class _Watch:
    """Keeps what enters and leaves the output projections of a model, with gradients, while it is entered."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.tokens: dict[str, tuple[Tensor, Tensor]] = {}
        self.sums: dict[str, _Sums] = {}
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "_Watch":
        for parameter in self._trainable:
            parameter.requires_grad_(False)
        for table in (self.model.embeddings, self.model.target):
            if table is not None:
                self._handles.append(table.register_forward_hook(lambda m, i, x: x.requires_grad_()))
        for sub in sublayers(self.model.config):
            module = self.model.get_submodule(f"{sub.name}.{OUTPUT[sub.part]}")
            assert isinstance(module, nn.Linear)
            self.sums[sub.name] = _Sums(module)
            self._watch(sub.name, module)
        return self

    def _watch(self, name: str, module: nn.Module) -> None:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.tokens[name] = inputs[0], output

        self._handles.append(module.register_forward_hook(keep))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._trainable:
            parameter.requires_grad_(True)

    def add(self, score: Tensor) -> None:
        """Count the tokens of one batch."""
        outputs = [output for _, output in self.tokens.values()]
        found = torch.autograd.grad(score, outputs, allow_unused=True, materialize_grads=True) if outputs else ()
        for (name, (given, _)), gradient in zip(self.tokens.items(), found, strict=True):
            self.sums[name].add(given, gradient)
