"""Least squares in closed form, from sums over batches of rows."""

import torch
from torch import Tensor

ITERATIONS = 200  # of conjugate gradients, at most
PRECISION = 1e-6  # share of the given side that may be left over


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
        gram, cross, mean, target = self._centred(damping)
        factor, failed = torch.linalg.cholesky_ex(gram)
        copies = bool(failed)  # columns that are constant or copies of others, and no damping
        change = torch.linalg.pinv(gram, hermitian=True) @ cross if copies else torch.cholesky_solve(cross, factor)
        return change.T.contiguous(), target - mean @ change

    def solve_at(self, places: Tensor, damping: float) -> tuple[Tensor, Tensor]:
        """The same where the weight may change at some `places` (O, I) alone, which are other ones in every row."""
        gram, cross, mean, target = self._centred(damping)
        change = conjugate_gradients(gram, cross.T, places)
        return change, target - change @ mean

    def _centred(self, damping: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums (I, I), damped, and (I, O) about the means (I,) and (O,)."""
        count = max(self._rows, 1)
        mean, target = self._gram[-1, :-1] / count, self._cross[-1] / count
        gram = self._gram[:-1, :-1] - count * torch.outer(mean, mean)
        cross = self._cross[:-1] - count * torch.outer(mean, target)
        if len(gram):
            gram.diagonal().add_(damping * gram.diagonal().mean())
        return gram, cross, mean, target

    def after(self, weight: Tensor, bias: Tensor) -> float:
        """Sum of the squared residuals once `weight` (O, I) and `bias` (O,) are added."""
        whole = torch.cat([weight.T, bias[None]])
        explained = 2 * (whole * self._cross).sum() - (whole * (self._gram @ whole)).sum()
        return max(self._energy - float(explained), 0.0)


def conjugate_gradients(gram: Tensor, wanted: Tensor, places: Tensor) -> Tensor:
    """X (O, I), 0 but at `places`, with X A = `wanted` at these: row by row the least of x A x^T / 2 - x wanted^T.

    All rows go at once, preconditioned by the diagonal of A (I, I), which is positive semidefinite (Hestenes & Stiefel
    1952).
    """
    diagonal = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny)
    found, left = torch.zeros_like(wanted), wanted * places
    enough = PRECISION * left.norm(dim=1, keepdim=True)
    scaled = left / diagonal
    way, size = scaled, (left * scaled).sum(1, keepdim=True)
    for _ in range(ITERATIONS):
        going = left.norm(dim=1, keepdim=True) > enough
        if not bool(going.any()):
            break
        pull = (way @ gram) * places
        bend = (way * pull).sum(1, keepdim=True)
        step = torch.where(going & (bend > 0), size / bend, 0.0)
        found, left = found + step * way, left - step * pull
        scaled = left / diagonal
        before, size = size, (left * scaled).sum(1, keepdim=True)
        way = scaled + torch.where(before > 0, size / before, 0.0) * way
    return found
