"""Parts of a step: shares, rows of others, and that cutting changes neither a loss nor its gradient."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slimformer.transformer.parts import Part, collect, parts_of
from slimformer.transformer.processes import ALONE, Processes

X = torch.linspace(-1, 1, 20, dtype=torch.float64).view(10, 2).sin()


class Pretended(Processes):
    """One of several processes, whose others give what they are told to."""

    def __init__(self, number: int, rank: int, others: Sequence[Tensor] = ()) -> None:
        self.number, self.rank, self.others = number, rank, list(others)

    def gathered(self, rows: Tensor) -> list[Tensor]:
        return [*self.others[: self.rank], rows, *self.others[self.rank :]]


def test_every_process_gets_its_part_of_every_batch() -> None:
    batches = [[5, 1, 4, 2], [7], [3, 0]]
    found = [parts_of(batches, Pretended(2, rank)) for rank in (0, 1)]
    assert [[list(part) for part in parts] for parts in found] == [[[5, 4], [7], [3]], [[1, 2], [7], [0]]]
    assert [[part.counted for part in parts] for parts in found] == [[True, True, True], [True, False, True]]
    assert found[0][0].whole == found[1][2].whole == [5, 4, 1, 2, 7, 3, 0]
    assert sum(part.share for parts in found for part in parts if part.counted) == pytest.approx(1)
    alone = parts_of(batches, ALONE)
    assert [list(part) for part in alone] == batches
    assert alone[1].whole == [5, 1, 4, 2, 7, 3, 0]


def test_shares_by_hand() -> None:
    part = Part([1, 2], [0, 1, 2, 3])
    assert part.share == 0.5
    assert part.share_of([1, 5, 1, 3]) == 0.6
    assert part.share_of([0, 0, 0, 0]) == 0
    assert Part([3, 4]).share == 1
    assert (part[0], part[0:2], len(part), list(part)) == (1, [1, 2], 2, [1, 2])


def test_rows_of_other_processes_stand_where_they_belong() -> None:
    own, others = X[[3, 4]], (X[[7]], X[[5, 6]])
    live = own.clone().requires_grad_()
    part = Part([3, 4], [7, 3, 4, 5, 6], processes=Pretended(3, 1, others))
    joined = part.joined(live)
    assert torch.equal(joined, X[part.whole])
    joined.square().sum().backward()
    assert torch.equal(live.grad, 2 * own)
    empty = Part([7], counted=False, processes=Pretended(2, 0, others[1:]))
    assert torch.equal(empty.joined(X[[7]]), X[[7]])
    assert empty.whole == [7]


def coupled(weight: Tensor, part: Part) -> Tensor:
    """Squared cosines of all pairs of projected rows and the cube of their sum, and a mean over rows of its own."""
    rows = X[list(part)] @ weight
    whole, once_more = part.joined(rows), part.joined(rows.sum(1, keepdim=True))
    loss = (whole @ whole.T).square().mean() + once_more.sum() ** 3
    return part.coupled(loss) + part.share * rows.exp().mean()


@pytest.mark.parametrize("batches", [[[4, 9, 2], [0, 1]], [[3], [8], [6, 7, 5]], [[1, 2, 3]]])
def test_cut_losses_and_gradients_are_those_of_the_whole(batches: list[list[int]]) -> None:
    weight = torch.tensor([[0.7, -0.2, 0.4], [0.1, 0.9, -0.6]], dtype=torch.float64)
    whole, cut = (weight.clone().requires_grad_() for _ in range(2))
    expected = coupled(whole, Part([i for batch in batches for i in batch]))
    expected.backward()
    parts = parts_of(batches, ALONE)
    collect(parts, lambda part: coupled(cut, part), ALONE)
    values = [coupled(cut, part) for part in parts]
    for value in values:
        value.backward()
    assert sum(value.item() for value in values) == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-12, atol=1e-12)


def test_rows_are_collected_with_the_dropout_that_follows() -> None:
    torch.manual_seed(3)
    parts, drawn = parts_of([[0, 1], [2]], ALONE), list[Tensor]()

    def loss(part: Part) -> Tensor:
        drawn.append(torch.rand(2))
        return part.joined(X[list(part)]).sum()

    collect(parts, loss, ALONE)
    for part in parts:
        loss(part)
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
