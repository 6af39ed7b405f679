"""Zeros in one weight: chosen by magnitude, by Wanda or by SparseGPT, in any places or N of M.

A weight (O, I) keeps its shape; a share of its values becomes exactly 0. What goes is what has the least score:

    magnitude    |w_ij|                    over the whole matrix
    Wanda        |w_ij| ||x_j||            over each row (Sun et al. 2023, equation 1)
    SparseGPT    w_ij^2 / U_jj^2           over a batch of columns (Frantar & Alistarh 2023, algorithm 1)

x_j being all values of input j. SparseGPT goes from left to right; the error of a column moves those behind it,

    e_j = w_j / U_jj where w_j becomes 0, else 0;    w_k -= e_j U_jk for k > j,    U^T U = (sum x x^T + damping)^-1

with U of `gptq`, upper triangular: U_jj^2 is [H^-1]_jj of the columns from j on. With a pattern each group of M inputs
is chosen by itself in every row, when its first column is reached.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transformer.errors import InputError
from .gptq import LAZY, inverse_factor


@dataclass(frozen=True)
class Pattern:
    """N:M, at most `kept` weights that are not 0 in every `group` consecutive inputs of a row."""

    kept: int
    group: int

    def __post_init__(self) -> None:
        if not 1 <= self.kept < self.group:
            raise InputError(f"pattern {self.kept}:{self.group} is not N:M with N from 1 to below M, such as 2:4")

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Read "N:M"."""
        found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text, re.ASCII)
        if found is None:
            raise InputError(f"pattern is {text!r}, not N:M such as 2:4")
        return cls(int(found[1]), int(found[2]))

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return 1 - self.kept / self.group

    def check(self, inputs: int, name: str = "weight") -> None:
        """Raise InputError where a row of so many inputs has no whole groups."""
        if inputs % self.group:
            raise InputError(
                f"{name} has {inputs} inputs, which are not whole groups of {self.group}: "
                "take another pattern, or a sparsity without one"
            )


Choice = float | Pattern  # the share of zeros in any places, or in which groups


def magnitude(weight: Tensor, choice: Choice) -> Tensor:
    """Weight (O, I) with the least values at 0."""
    scores = weight.detach().abs()
    zeros = _of_groups(scores, choice) if isinstance(choice, Pattern) else _of_all(scores, _count(choice, scores))
    return weight.detach().masked_fill(zeros, 0.0)


def wanda(weight: Tensor, gram: Tensor, choice: Choice) -> Tensor:
    """Weight (O, I) with those values at 0 that have the least part in the output for such inputs.

    Args:
        weight: of the linear.
        gram: sum of x x^T over its inputs (I, I) on the same device; the diagonal alone counts.
        choice: how many zeros, in each row.

    Raises:
        InputError: `gram` is not finite.
    """
    squares = gram.diagonal()
    if not bool(squares.isfinite().all()):
        raise InputError("calibration gives inputs that are not finite: check the model's weights and its texts")
    scores = weight.detach().abs() * squares.sqrt()
    zeros = _of_groups(scores, choice) if isinstance(choice, Pattern) else _of_rows(scores, _count(choice, scores[0]))
    return weight.detach().masked_fill(zeros, 0.0)


def sparsegpt(weight: Tensor, gram: Tensor, choice: Choice, *, damping: float = 0.01, columns: int = LAZY) -> Tensor:
    """Weight (O, I) with zeros, and with the other values moved to keep the output for such inputs.

    A column that never saw an input moves no other and is scored by what the damping adds to its diagonal.

    Args:
        weight: of the linear.
        gram: sum of x x^T over its inputs, up to a factor, (I, I) on the same device.
        choice: how many zeros.
        damping: added to the diagonal of `gram`, as a share of its mean over the columns that saw an input.
        columns: among which zeros are chosen at once, but for a pattern.

    Raises:
        InputError: `gram` is not finite, or no sum of squares at all.
    """
    factor = inverse_factor(gram.double(), damping)  # U, (I, I)
    worth = factor.diagonal().square().reciprocal()  # 1 / U_jj^2, (I,)
    worth[gram.diagonal() == 0] *= damping / (1 + damping)
    left = weight.detach().double().T.contiguous()  # (I, O): weights as compensated so far
    group = choice.group if isinstance(choice, Pattern) else columns
    wide = max(group, LAZY // group * group)
    for first in range(0, len(left), wide):
        last = min(first + wide, len(left))
        errors = torch.zeros_like(left[first:last])
        for i in range(first, last):
            if i % group == 0:
                until = min(i + group, last)
                zeros = _chosen(left, worth, choice, i, until)
            gone = zeros[i % group]
            errors[i - first] = torch.where(gone, left[i], 0.0) / factor[i, i]
            left[i].masked_fill_(gone, 0.0)
            left[i + 1 : last].addr_(factor[i, i + 1 : last], errors[i - first], alpha=-1)
        left[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return left.T.to(weight.dtype).contiguous()


def _chosen(left: Tensor, worth: Tensor, choice: Choice, first: int, last: int) -> Tensor:
    """Which weights (b, O) of the columns from `first` to before `last` become 0."""
    scores = left[first:last].square() * worth[first:last, None]
    if isinstance(choice, Pattern):
        return _of_groups(scores.T, choice).T
    return _of_all(scores, _count(choice, left[:last]) - _count(choice, left[:first]))


def _count(share: float, among: Tensor) -> int:
    """How many of the values become 0."""
    return round(share * among.numel())


def _of_all(scores: Tensor, count: int) -> Tensor:
    """The places of the least `count` values, of equal ones the first."""
    return _of_rows(scores.reshape(1, -1), count).view_as(scores)


def _of_rows(scores: Tensor, count: int) -> Tensor:
    """The places of each row's least `count` values."""
    least = scores.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, least, True)


def _of_groups(scores: Tensor, pattern: Pattern) -> Tensor:
    """The places of each group's least values."""
    pattern.check(scores.shape[1])
    grouped = scores.reshape(-1, pattern.group)
    return _of_rows(grouped, pattern.group - pattern.kept).view(scores.shape)
