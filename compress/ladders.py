"""In which order a sub-layer's units go, and what is lost with each number of them that stays.

Three ways, whose losses estimate how much the model's log-likelihood changes, so that sub-layers can be compared:

- by scores alone: the sum of those that went (LeCun et al. 1990, with a diagonal Hessian);
- by a block of the Fisher information F: removing the set R costs the sum of F over R x R, which knows of units that
  stand in for each other (Kwon et al. 2022); at every step the unit goes that adds least;
- by the optimal brain surgeon on structures (Kurtic et al. 2023, "ZipLM", equations 2 to 4): with the projection W
  (D, U * K), the Gram matrix A of its inputs and the metric G of its outputs (`curvature`), removing the columns S and
  re-fitting the others costs tr(G W_S [(A^-1)_SS]^-1 W_S^T); then W -= W_S [(A^-1)_SS]^-1 (A^-1)_S: and A^-1 loses
  those columns by a step of Gaussian elimination.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .curvature import Curvature
from .selection import rearrange
from .units import Indices

Floats = NDArray[np.float64]
AT_ONCE = 32  # steps in which the units of one column of a sub-layer go


@dataclass(frozen=True)
class Ladder:
    """The units of one sub-layer.

    Attributes:
        order: (U,) units, the one that stays longest first.
        losses: (U + 1,) what is lost where the first k stay, k from 0 to U.
        fisher: (U, U), by which units of one number change places once more (`selection.rearrange`); None: they do not.
    """

    order: Indices
    losses: Floats
    fisher: Floats | None = None

    def kept(self, count: int) -> Indices:
        """The units that stay where `count` do, ascending."""
        chosen = tuple(sorted(self.order[:count]))
        return chosen if self.fisher is None else rearrange(self.fisher, chosen)


def by_scores(scores: Floats) -> Ladder:
    """Scores (U,) of at least 0 -> the highest stay."""
    order = np.argsort(-scores, kind="stable")
    return Ladder(tuple(map(int, order)), _losses(scores[order]))


def by_block(fisher: Floats) -> Ladder:
    """Mean products of mask gradients (U, U) -> the unit goes that adds least to the sum over those gone."""
    count = len(fisher)
    adds = np.diag(fisher).copy()  # to the sum over R x R, R being those gone
    left = np.ones(count, bool)
    order, steps = [], np.zeros(count)
    for step in range(count):
        unit = int(np.where(left, adds, np.inf).argmin())
        order.append(unit)
        steps[step] = max(adds[unit], 0.0)
        left[unit] = False
        adds += 2 * fisher[unit]
    return Ladder(tuple(reversed(order)), _losses(steps[::-1]), fisher)


def by_surgeon(weight: Tensor, curvature: Curvature, *, width: int, damping: float) -> Ladder:
    """A projection (D, U * width) and its curvature -> its ladder.

    Units of one column go several at once, whose common cost is counted exactly; `damping` is a share of the mean of
    the Gram matrix's diagonal.
    """
    outputs, weight, inverse = curvature.outputs, weight.double(), torch.linalg.inv(curvature.damped(damping))
    count = weight.shape[1] // width
    many = max(1, count // AT_ONCE) if width == 1 else 1
    columns = torch.arange(count * width).view(count, width)
    left, order, steps = torch.ones(count, dtype=torch.bool), list[int](), list[float]()
    while len(order) < count:
        costs = _costs(weight, inverse, outputs, left)
        units = costs.argsort(stable=True)[: min(many, count - len(order))]
        gone = columns[units].flatten()
        taken, middle = weight[:, gone], inverse[gone][:, gone]
        pull = torch.linalg.solve(middle, inverse[gone])  # (S, U * K)
        cost = float(((outputs @ taken) * torch.linalg.solve(middle, taken.T).T).sum())
        weight = weight - taken @ pull
        inverse = inverse - inverse[:, gone] @ pull
        left[units] = False
        order += units.tolist()
        steps += [max(cost, 0.0) / len(units)] * len(units)
    return Ladder(tuple(reversed(order)), _losses(np.array(steps[::-1])))


def _costs(weight: Tensor, inverse: Tensor, outputs: Tensor, left: Tensor) -> Tensor:
    """tr(G W_S [(A^-1)_SS]^-1 W_S^T) of every unit that is left (U,), and infinity of the others."""
    count, width = len(left), len(inverse) // len(left)
    blocks = inverse.view(count, width, count, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()  # (U, K, K)
    blocks[~left] = torch.eye(width, dtype=blocks.dtype)
    parts, weighted = (x.view(len(weight), count, width).transpose(0, 1) for x in (weight, outputs @ weight))
    costs: Tensor = (weighted.transpose(1, 2) * torch.linalg.solve(blocks, parts.transpose(1, 2))).sum((1, 2))
    return costs.masked_fill(~left, torch.inf)


def _losses(steps: Floats) -> Floats:
    """What each unit adds when it goes, the one that stays longest first -> the losses of k that stay."""
    result: Floats = np.concatenate([np.cumsum(steps[::-1])[::-1], [0.0]])
    return result
