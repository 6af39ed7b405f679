from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from slimformer.compress import ladders
from slimformer.compress.curvature import LEAST_DAMPING, Curvature
from slimformer.compress.ladders import Ladder, by_block, by_scores, by_surgeon


def curvature(units: int, outputs: int, seed: int = 0) -> Curvature:
    """Of 40 tokens whose inputs depend on each other."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(units, units, generator=random, dtype=torch.float64)
    given = torch.randn(40, units, generator=random, dtype=torch.float64) @ mixing
    gradients = torch.randn(40, outputs, generator=random, dtype=torch.float64)
    centred = given - given.mean(0)
    return Curvature(centred.T @ centred / 40, given.mean(0), gradients.T @ gradients / 8, 40, 8)


def weight_of(outputs: int, columns: int) -> Tensor:
    return torch.randn(outputs, columns, generator=torch.Generator().manual_seed(9))


def refit_loss(weight: Tensor, factors: Curvature, kept: Sequence[int], damping: float) -> float:
    """Least of tr(G dW A dW^T) where only these columns may differ from 0, solved from scratch."""
    gram = factors.inputs + damping * factors.inputs.diagonal().mean() * torch.eye(len(factors.inputs))
    wide, columns = weight.double(), list(kept)
    changed = torch.zeros_like(wide)
    if columns:
        root = torch.linalg.cholesky(gram).T
        changed[:, columns] = torch.linalg.lstsq(root[:, columns], root @ wide.T).solution.T
    apart = wide - changed
    return float(torch.trace(factors.outputs @ apart @ gram @ apart.T))


def columns_of(units: Sequence[int], width: int) -> list[int]:
    return [unit * width + k for unit in sorted(units) for k in range(width)]


def naive(
    weight: Tensor, factors: Curvature, width: int, damping: float, many: int = 1
) -> tuple[list[int], dict[int, float]]:
    """The order, and the loss by the number of units that stay, after each step of `many` units."""
    left = list(range(weight.shape[1] // width))
    order, losses = [], {len(left): 0.0}
    while left:

        def lost(gone: Sequence[int]) -> float:
            stay = [unit for unit in left if unit not in gone]  # noqa: B023
            return refit_loss(weight, factors, columns_of(stay, width), damping)

        worst = sorted(left, key=lambda unit: lost([unit]))[:many]
        losses[len(left) - len(worst)] = lost(worst)
        order += worst
        left = [unit for unit in left if unit not in worst]
    return order[::-1], losses


@pytest.mark.parametrize(("units", "width"), [(7, 1), (5, 3), (1, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_the_surgeon_takes_what_a_refit_misses_least(units: int, width: int, seed: int) -> None:
    weight, factors = weight_of(4, units * width), curvature(units * width, 4, seed)
    found = by_surgeon(weight, factors, width=width, damping=1e-3)
    order, losses = naive(weight, factors, width, 1e-3)
    assert found.order == tuple(order)
    np.testing.assert_allclose(found.losses, [losses[k] for k in range(units + 1)], rtol=1e-7, atol=1e-9)
    assert found.fisher is None


def test_the_metric_of_the_outputs_decides() -> None:
    """Column 0 is the larger one, but what it gives does not matter."""
    eye = torch.eye(2, dtype=torch.float64)
    weight = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    factors = Curvature(eye, torch.zeros(2), torch.diag(torch.tensor([0.01, 1.0], dtype=torch.float64)), 4, 4)
    found = by_surgeon(weight, factors, width=1, damping=0.0)
    assert found.order == (1, 0)
    np.testing.assert_allclose(found.losses, np.array([1.09, 0.09, 0.0]) * (1 + LEAST_DAMPING), rtol=1e-9)


@pytest.mark.parametrize("units", [12, 13])
def test_neurons_go_several_at_once_and_their_common_cost_is_exact(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladders, "AT_ONCE", 4)
    weight, factors = weight_of(4, units), curvature(units, 4)
    found = by_surgeon(weight, factors, width=1, damping=1e-2)
    order, losses = naive(weight, factors, 1, 1e-2, many=3)
    assert found.order == tuple(order)
    assert len(losses) == 1 + -(-units // 3)
    for count, loss in losses.items():
        assert found.losses[count] == pytest.approx(loss, rel=1e-7, abs=1e-9)
    between = np.interp(np.arange(units + 1), sorted(losses), [losses[count] for count in sorted(losses)])
    np.testing.assert_allclose(found.losses, between, rtol=1e-7, atol=1e-9)


def test_heads_go_one_by_one_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladders, "AT_ONCE", 2)
    weight, factors = weight_of(3, 12), curvature(12, 3)
    order, losses = naive(weight, factors, 2, 1e-2)
    found = by_surgeon(weight, factors, width=2, damping=1e-2)
    assert found.order == tuple(order)
    np.testing.assert_allclose(found.losses, [losses[k] for k in range(7)], rtol=1e-7, atol=1e-9)


def test_a_ladder_of_many_neurons_has_32_steps() -> None:
    found = by_surgeon(weight_of(4, 96), curvature(96, 4), width=1, damping=0.1)
    steps = -np.diff(found.losses)
    assert sorted(found.order) == list(range(96))
    for more in (1, 2):
        np.testing.assert_allclose(steps[::3], steps[more::3], rtol=1e-6, atol=1e-12)
    assert len(np.unique(steps.round(9))) == 32


def test_dead_neurons_go_first_and_cost_nothing() -> None:
    """Without damping the Gram matrix has no inverse: the least of it is added."""
    factors = curvature(4, 3)
    inputs = factors.inputs.clone()
    inputs[1], inputs[:, 1] = 0.0, 0.0
    dead = Curvature(inputs, factors.mean, factors.outputs, 40, 8)
    found = by_surgeon(weight_of(3, 4), dead, width=1, damping=0.0)
    assert found.order[-1] == 1
    assert found.losses[3] == pytest.approx(0.0, abs=10 * LEAST_DAMPING * found.losses[0])
    nothing = Curvature(torch.zeros_like(inputs), factors.mean, factors.outputs, 40, 8)
    assert np.isfinite(by_surgeon(weight_of(3, 4), nothing, width=1, damping=0.0).losses).all()


def test_nothing_that_is_given_changes() -> None:
    weight, factors = weight_of(3, 6), curvature(6, 3)
    before = [one.clone() for one in (weight, factors.inputs, factors.outputs)]
    by_surgeon(weight, factors, width=2, damping=0.1)
    assert all(torch.equal(*pair) for pair in zip(before, (weight, factors.inputs, factors.outputs), strict=True))
    fisher = np.diag([3.0, 1.0, 2.0])
    by_block(fisher)
    assert (fisher == np.diag([3.0, 1.0, 2.0])).all()


def test_scores_by_hand() -> None:
    """2 stays longest, then 0 before 3, which is equal, then 1: 1, 1 + 2, 1 + 2 + 2 and 1 + 2 + 2 + 5 are lost."""
    found = by_scores(np.array([2.0, 1.0, 5.0, 2.0]))
    assert found.order == (2, 0, 3, 1)
    assert found.losses.tolist() == [10.0, 5.0, 3.0, 1.0, 0.0]
    assert found.fisher is None
    assert [found.kept(count) for count in range(5)] == [(), (2,), (0, 2), (0, 2, 3), (0, 1, 2, 3)]


def random_fisher(seed: int, units: int = 6) -> np.ndarray:
    gradients = np.random.default_rng(seed).normal(size=(4, units))
    return gradients.T @ gradients / 4


def removal_cost(fisher: np.ndarray, gone: Sequence[int]) -> float:
    return float(fisher[np.ix_(list(gone), list(gone))].sum())


@pytest.mark.parametrize("seed", range(6))
def test_a_block_tries_every_unit_at_every_step(seed: int) -> None:
    """A step that lowers the sum counts as 0: what stays in vain loses nothing when it goes."""
    fisher = random_fisher(seed)
    gone: list[int] = []
    losses = [0.0]
    while len(gone) < len(fisher):
        left = [unit for unit in range(len(fisher)) if unit not in gone]
        unit = min(left, key=lambda unit: removal_cost(fisher, [*gone, unit]))
        step = removal_cost(fisher, [*gone, unit]) - removal_cost(fisher, gone)
        losses.append(losses[-1] + max(step, 0.0))
        gone.append(unit)
    found = by_block(fisher)
    assert found.order == tuple(gone[::-1])
    np.testing.assert_allclose(found.losses, losses[::-1], atol=1e-12)
    assert found.fisher is fisher


def test_a_block_knows_of_twins() -> None:
    """0 and 1 do the same, each 2: the first goes for 2, then the other costs 6; before it 2 and 3 go for 3 each."""
    fisher = np.array([[2.0, 2, 0, 0], [2, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]])
    found = by_block(fisher)
    assert found.order == (1, 3, 2, 0)
    assert found.losses.tolist() == [14.0, 8.0, 5.0, 2.0, 0.0]


def test_with_a_block_units_change_places_once_more() -> None:
    """The order says (0, 1); the pair whose complement costs least is taken, from wherever one swap leads to it."""
    fisher = np.array([[2.0, 2, 0, 0], [2, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]])
    assert Ladder((3, 2, 1, 0), np.zeros(5)).kept(2) == (2, 3)
    kept = Ladder((3, 2, 1, 0), np.zeros(5), fisher).kept(2)
    best = min(removal_cost(fisher, gone) for gone in combinations(range(4), 2))
    assert kept != (2, 3)
    assert removal_cost(fisher, [unit for unit in range(4) if unit not in kept]) == best


@pytest.mark.parametrize("seed", range(4))
def test_losses_do_not_grow_with_the_units_that_stay(seed: int) -> None:
    scores = np.random.default_rng(seed).random(6)
    surgeon = by_surgeon(weight_of(4, 6), curvature(6, 4, seed), width=1, damping=1e-3)
    for found in (by_scores(scores), by_block(random_fisher(seed)), surgeon):
        assert sorted(found.order) == list(range(6))
        assert len(found.losses) == 7
        assert (np.diff(found.losses) <= 0).all()
        assert found.losses[-1] == 0
        assert found.losses[0] > 0
