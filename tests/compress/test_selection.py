from itertools import combinations, product

import numpy as np
import pytest

from slimformer.compress.selection import EXHAUSTIVE, STEPS, Offer, choose_counts, rearrange, select_layers


def random_offers(seed: int, *, whole: bool) -> dict[str, Offer]:
    """Four sub-layers: losses that fall and costs that rise, in whole numbers or not."""
    random = np.random.default_rng(seed)
    offers = {}
    for name, size in zip("abcd", random.integers(2, 6, 4), strict=True):
        costs = np.sort(random.integers(1, 30, size) if whole else random.random(size) * 30)
        losses = np.sort(random.random(size))[::-1]
        counts = [3 * k for k in range(size)]
        offers[name] = Offer(counts, losses.tolist(), [0.0, *costs[1:].tolist()])
    return offers


def totals(offers: dict[str, Offer]) -> list[tuple[float, float, dict[str, int]]]:
    """Loss, cost and counts of every combination."""
    found = []
    for places in product(*(range(len(offer.counts)) for offer in offers.values())):
        chosen = list(zip(offers.items(), places, strict=True))
        loss = sum(offer.losses[place] for (_, offer), place in chosen)
        cost = sum(offer.costs[place] for (_, offer), place in chosen)
        found.append((loss, cost, {name: offer.counts[place] for (name, offer), place in chosen}))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_counts_are_the_best_of_all_combinations(seed: int, share: float) -> None:
    """Costs are rounded up to a 20,000th of the budget: four of them, so that much of it may stay unused."""
    offers = random_offers(seed, whole=False)
    every = totals(offers)
    budget = share * max(cost for _, cost, _ in every)
    chosen = choose_counts(offers, budget)
    loss, cost, _ = next(one for one in every if one[2] == chosen)
    assert cost <= budget
    assert loss >= min(loss for loss, cost, _ in every if cost <= budget)
    assert loss <= min(loss for loss, cost, _ in every if cost <= budget * (1 - len(offers) / STEPS))


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_of_whole_costs_is_used_to_the_last(seed: int) -> None:
    """Steps of a 20,000th divide 1: with a budget of 32, whole costs need no rounding."""
    offers = random_offers(seed, whole=True)
    chosen = choose_counts(offers, 32)
    best = min(totals(offers), key=lambda one: (one[1] > 32, one[0]))
    assert chosen == best[2]


def test_counts_have_the_order_of_the_offers() -> None:
    chosen = choose_counts({"z": Offer([0, 5], [1.0, 0.0], [0.0, 1.0]), "a": Offer([0, 7], [1.0, 0.0], [0.0, 1.0])}, 2)
    assert list((chosen or {}).items()) == [("z", 5), ("a", 7)]


def test_where_the_cheapest_does_not_fit_nothing_is_chosen() -> None:
    offers = {"a": Offer([2, 4], [1.0, 0.0], [3.0, 6.0]), "b": Offer([1, 2], [1.0, 0.0], [2.0, 4.0])}
    assert choose_counts(offers, 5.0) == {"a": 2, "b": 1}
    assert choose_counts(offers, 4.99) is None
    assert choose_counts({"a": Offer([2], [1.0], [3.0])}, 2.9) is None


def test_without_a_budget_only_what_is_free_is_chosen() -> None:
    offers = {"a": Offer([0, 1, 2], [4.0, 1.0, 0.5], [0.0, 0.0, 1e-9])}
    assert choose_counts(offers, 0.0) == {"a": 1}
    assert choose_counts(offers, -1.0) is None
    assert choose_counts({"a": Offer([1], [0.0], [1.0])}, 0.0) is None


def test_where_nothing_is_offered_a_budget_below_zero_is_not_kept_either() -> None:
    assert choose_counts({}, 0.0) == {}
    assert choose_counts({}, -1.0) is None


def test_of_equal_losses_the_fewest_units_stay() -> None:
    assert choose_counts({"a": Offer([0, 1, 2], [1.0, 0.5, 0.5], [0.0, 1.0, 2.0])}, 9.0) == {"a": 1}


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
