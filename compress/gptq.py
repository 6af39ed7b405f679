"""Rounding a linear's weights one column after the other, each column's error made up for by those still to come.

For inputs x the integers shall keep the output: minimise tr((W - Q) H (W - Q)^T) with H = sum x x^T + damping. Column i
is rounded to nearest; its error then moves every column j behind it to where the output changes least,

    e_i = (w_i - q_i) / U_ii,    w_j -= e_i U_ij,    U upper triangular with U^T U = H^-1

(Frantar et al. 2022, "GPTQ", algorithm 1 and section 3.3, with lazy batches of columns; the step is that of Frantar &
Alistarh 2022, "Optimal Brain Compression", in one order for all rows). U comes without H^-1: R = U^-1 is the upper
triangle with R R^T = H, which is the Cholesky factor of H with rows and columns reversed, reversed once more.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..transformer.errors import InputError

Scales = Callable[[Tensor], Tensor]  # weights (O, b) float64 of a block of columns -> the scale of each row there (O,)

LAZY = 128  # columns whose errors reach the columns behind them in one product
LEAST_DAMPING = 1e-8  # what a matrix that does not factor as it is gets first
ATTEMPTS = 16  # tenfold each; a matrix with |g_ij|^2 <= g_ii g_jj has factored once the damping exceeds its columns


class Gram:
    """Streams rows x and sums x^T x. Products are taken in the rows' own precision, call by call, summed in float64."""

    def __init__(self, *, inputs: int, device: torch.device) -> None:
        self._matrix = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self._rows = 0

    def add(self, x: Tensor) -> None:
        """Count N more rows, (N, I)."""
        x = x.detach()
        self._matrix += x.T @ x
        self._rows += len(x)

    @property
    def matrix(self) -> Tensor:
        """The sum, (I, I) float64."""
        return self._matrix

    @property
    def rows(self) -> int:
        """How many there were."""
        return self._rows


def round_compensated(
    weight: Tensor,
    gram: Tensor,
    scales: Scales,
    *,
    limits: tuple[int, int],
    block: int,
    damping: float = 0.01,
    ordered: bool = True,
) -> tuple[Tensor, Tensor]:
    """Weight (O, I) float -> integers (O, I) int8 and scales (O, blocks) float32 that keep the output for the inputs.

    A column that never saw an input is rounded to nearest and moves no other; a weight that is exactly 0 stays so.
    Where `gram` does not factor, as with fewer rows than columns and no damping, the damping grows tenfold until it
    does.

    Args:
        weight: of the linear.
        gram: sum of x x^T over its inputs, up to a factor, (I, I) on the same device.
        scales: gives the scale of each row, finite and positive, from the weights of a block of columns.
        limits: the least and the greatest integer; half is rounded to even.
        block: columns that share a scale in each row, the last block what is left; I or more is one scale a row.
        damping: added to the diagonal of `gram`, as a share of its mean over the columns that saw an input.
        ordered: from the column with the greatest diagonal to that with the least, scales being those of the given
            weights; otherwise from left to right, scales being those of a block's weights as compensated so far.

    Raises:
        InputError: `gram` is not finite, or no sum of squares at all.
    """
    outputs, inputs = weight.shape
    order = torch.arange(inputs, device=gram.device)
    if ordered:
        order = gram.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(gram.double()[order][:, order], damping)  # U, (I, I)
    given = weight.detach().double()
    zeros = (given == 0).T
    left = given.T[order].contiguous()  # (I, O): first weights as compensated so far, then errors e
    steps = torch.empty(-(-inputs // block), outputs, dtype=torch.float32, device=weight.device)  # (blocks, O)
    if ordered:
        for number in range(len(steps)):
            steps[number] = scales(given[:, number * block : (number + 1) * block])
    integers = torch.empty(inputs, outputs, dtype=torch.int8, device=weight.device)
    columns = order.tolist()
    for first, last in _batches(inputs, block):
        for i in range(first, last):
            if not ordered and i % block == 0:
                steps[i // block] = scales(left[i : i + block].T)
            step = steps[columns[i] // block].double()
            rounded = (left[i] / step).round_().clamp_(*limits).masked_fill_(zeros[columns[i]], 0.0)
            integers[columns[i]] = rounded.to(torch.int8)
            left[i] = (left[i] - rounded * step) / factor[i, i]
            left[i + 1 : last].addr_(factor[i, i + 1 : last], left[i], alpha=-1)
        left[last:].addmm_(factor[first:last, last:].T, left[first:last], alpha=-1)
    return integers.T.contiguous(), steps.T.contiguous()


def _batches(inputs: int, block: int) -> Iterator[tuple[int, int]]:
    """First and last column of each lazy batch; a block begins with one or is whole in one: its weights are current."""
    wide = max(block, LAZY // block * block)
    for start in range(0, inputs, wide):
        stop = min(start + wide, inputs)
        for first in range(start, stop, LAZY):
            yield first, min(first + LAZY, stop)


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """U (I, I), upper triangular, with U^T U the inverse of the damped matrix; unseen columns stand alone."""
    if not bool(gram.isfinite().all()):
        raise InputError("calibration gives inputs that are not finite: check the model's weights and its texts")
    diagonal = gram.diagonal()
    unseen = diagonal == 0
    mean = diagonal[~unseen].mean() if bool((~unseen).any()) else diagonal.new_ones(())
    hessian = gram.masked_fill(unseen[:, None] | unseen, 0.0)
    hessian.diagonal()[unseen] = mean
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    rounding = len(gram) * torch.finfo(gram.dtype).eps  # a pivot below this share of its diagonal is noise
    for _ in range(ATTEMPTS):
        damped = (hessian + damping * mean * identity).flip(0, 1)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed and bool((lower.diagonal().square() > rounding * damped.diagonal()).all()):
            inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
            return inverse.flip(0, 1)
        damping = max(10 * damping, LEAST_DAMPING)
    raise InputError("the sum of calibration's x x^T is no sum of squares, even damped: calibrate with other texts")
