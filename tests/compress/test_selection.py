from itertools import combinations, product

import numpy as np
import pytest

from slimformer.compress.selection import EXHAUSTIVE, rearrange, select_layers, select_units


def subsets(count):
    return [units for size in range(count + 1) for units in combinations(range(count), size)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [6, 11, 17])
def test_units_are_the_best_of_all_subsets(seed: int, budget: int) -> None:
    """With cost 1 a neuron the paper's search is exact: the rest of the budget is always used up."""
    rng = np.random.default_rng(seed)
    heads = [rng.random(2) * 5, rng.random(2) * 5]
    neurons = [rng.random(4), rng.random(3)]
    chosen = select_units(heads, neurons, [4, 4], 1, budget)
    best = min(
        sum(h.sum() for h in heads + neurons)
        - sum(heads[i][list(kept)].sum() for i, kept in enumerate(kept_heads))
        - sum(neurons[i][list(kept)].sum() for i, kept in enumerate(kept_neurons))
        for kept_heads in product(subsets(2), subsets(2))
        for kept_neurons in product(subsets(4), subsets(3))
        if 4 * sum(map(len, kept_heads)) + sum(map(len, kept_neurons)) <= budget
    )
    lost = sum(np.delete(h, list(k)).sum() for h, k in zip(heads, chosen.heads, strict=True))
    lost += sum(np.delete(n, list(k)).sum() for n, k in zip(neurons, chosen.neurons, strict=True))
    assert chosen.lost == pytest.approx(lost)
    assert lost == pytest.approx(best)
    assert 4 * sum(map(len, chosen.heads)) + sum(map(len, chosen.neurons)) <= budget


def test_a_budget_for_everything_keeps_everything() -> None:
    chosen = select_units([np.ones(2), np.ones(0)], [np.ones(3), np.ones(5)], [4, 0], 1, 16, multiple=2)
    assert chosen.heads == ((0, 1), ())
    assert chosen.neurons == ((0, 1, 2), (0, 1, 2, 3, 4))
    assert chosen.lost == 0


def test_no_budget_keeps_nothing() -> None:
    chosen = select_units([np.ones(2)], [np.ones(4)], [4], 1, 1, multiple=2)
    assert (chosen.heads, chosen.neurons, chosen.lost) == (((),), ((),), 6)


def test_dead_units_still_fill_the_budget() -> None:
    chosen = select_units([np.zeros(2)], [np.zeros(4)], [2], 1, 3)
    assert len(chosen.neurons[0]) == 3


@pytest.mark.parametrize("budget", range(3, 40, 3))
def test_widths_are_multiples_or_whole(budget: int) -> None:
    rng = np.random.default_rng(budget)
    neurons = [rng.random(14), rng.random(9) * 3, rng.random(8)]
    chosen = select_units([np.zeros(0)] * 3, neurons, [0, 0, 0], 1, budget, multiple=4)
    for scores, kept in zip(neurons, chosen.neurons, strict=True):
        assert len(kept) % 4 == 0 or len(kept) == len(scores)
        assert set(kept) == set(np.argsort(-scores)[: len(kept)])
    assert budget - 4 < sum(map(len, chosen.neurons)) <= budget or sum(map(len, chosen.neurons)) == 31


def random_fisher(seed: int, units: int) -> np.ndarray:
    gradients = np.random.default_rng(seed).normal(size=(5, units))
    return gradients.T @ gradients / 5


def removal_cost(fisher: np.ndarray, kept) -> float:
    removed = [unit for unit in range(len(fisher)) if unit not in kept]
    return float(fisher[np.ix_(removed, removed)].sum())


@pytest.mark.parametrize("seed", range(20))
def test_rearranging_reaches_a_set_no_swap_improves(seed: int) -> None:
    fisher = random_fisher(seed, 9)
    start = (0, 1, 2, 3)
    kept = rearrange(fisher, start)
    assert len(set(kept)) == 4
    assert removal_cost(fisher, kept) <= removal_cost(fisher, start) + 1e-12
    for gone, back in product(kept, set(range(9)) - set(kept)):
        swapped = [unit for unit in kept if unit != gone] + [back]
        assert removal_cost(fisher, swapped) >= removal_cost(fisher, kept) - 1e-9


def test_rearranging_finds_the_best_set_of_all() -> None:
    """One swap away from the best: from the second-best neighbours every start ends there."""
    fisher = random_fisher(3, 8)
    best = min(combinations(range(8), 3), key=lambda kept: removal_cost(fisher, kept))
    for gone, back in product(best, set(range(8)) - set(best)):
        start = tuple(sorted({*best, back} - {gone}))
        assert removal_cost(fisher, rearrange(fisher, start)) <= removal_cost(fisher, start)
    assert rearrange(fisher, best) == best


def test_rearranging_sees_twins() -> None:
    """Units 0 and 1 do the same: the diagonal would drop both (2 + 2 < 3 + 3), which costs 8; one of each is best."""
    fisher = np.array([[2.0, 2, 0, 0], [2, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]])
    kept = rearrange(fisher, (2, 3))
    assert removal_cost(fisher, (2, 3)) == 8
    assert removal_cost(fisher, kept) == 5
    assert len({0, 1} & set(kept)) == 1


@pytest.mark.parametrize("kept", [(), (0, 1, 2)])
def test_rearranging_nothing_or_everything(kept) -> None:
    assert rearrange(random_fisher(0, 3), kept) == kept


def test_layers_count_what_they_undo() -> None:
    """Layers 1 and 2 undo each other: removing both costs nothing, either alone 4."""
    fisher = np.array([[1.0, 0, 0, 0], [0, 4, -4, 0], [0, -4, 4, 0], [0, 0, 0, 1]])
    assert select_layers(fisher, 2) == (0, 3)
    assert select_layers(fisher, 4) == (0, 1, 2, 3)
    assert select_layers(fisher, 3) in [(0, 1, 2), (1, 2, 3)]


def test_many_layers_are_chosen_without_trying_all_sets() -> None:
    fisher = np.diag(np.arange(40.0))
    assert select_layers(fisher, 20) == tuple(range(20, 40))
    assert EXHAUSTIVE < 137_846_528_820
