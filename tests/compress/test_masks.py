"""Masks that movement chooses: the schedule by hand, the choice against all choices, scores against gradients by W'."""

from collections.abc import Iterator, Mapping
from itertools import combinations, product

import numpy as np
import pytest
import torch
from masking import OUTPUT, masked
from models import MIXERS, decoder_config, random_state, tiny, tiny_config
from torch import Tensor

from slimformer.compress.costs import MultiplyAdds
from slimformer.compress.masks import Schedule, UnitMasks, strongest
from slimformer.compress.units import Indices, sublayers
from slimformer.transformer.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from slimformer.transformer.model import Transformer

IDS = torch.tensor([[2, 9, 17, 3], [2, 30, 3, 0]])
SEEN = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def test_the_schedule_by_hand() -> None:
    schedule = Schedule(0.2, warm=2, fixed=6)
    shares = [1, 1, 1, 0.2 + 0.8 * 27 / 64, 0.2 + 0.8 / 8, 0.2 + 0.8 / 64, 0.2, 0.2]
    assert [schedule.share(step) for step in range(8)] == pytest.approx(shares)
    assert schedule.share(6) == 0.2
    assert [step for step in range(9) if schedule.chooses(step)] == [3, 4, 5, 6]


def layered(*widths: tuple[int, int]) -> TransformerConfig:
    """Layers of so many heads of 2 columns, which cost as much as 4 neurons each, and of so many neurons."""
    return tiny_config(layers=[LayerConfig(AttentionConfig(h, 2), FeedForwardConfig(f)) for h, f in widths])


HEAD, NEURON = 8 * 32, 2 * 32  # multiply-adds of a unit of `layered`


def random_scores(config: TransformerConfig, seed: int, mean: float) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {sub.name: random.normal(mean, 1.0, sub.count) for sub in sublayers(config)}


def choices(config: TransformerConfig, multiple: int) -> Iterator[dict[str, Indices]]:
    """All that may stay."""
    subs = sublayers(config)

    def own(count: int, step: int) -> list[Indices]:
        return [units for size in {*range(0, count, step), count} for units in combinations(range(count), size)]

    for sets in product(*(own(sub.count, multiple if sub.part == "ffn" else 1) for sub in subs)):
        yield {sub.name: units for sub, units in zip(subs, sets, strict=True)}


def cost(config: TransformerConfig, kept: Mapping[str, Indices]) -> float:
    return sum(MultiplyAdds(config).of(sub, len(kept[sub.name])) for sub in sublayers(config))


def total(scores: Mapping[str, np.ndarray], kept: Mapping[str, Indices]) -> float:
    return sum(float(scores[name][list(units)].sum()) for name, units in kept.items())


@pytest.mark.parametrize(("seed", "mean"), [(0, 1.0), (1, 0.0), (2, -2.0)])
def test_where_all_costs_are_alike_no_choice_has_more(seed: int, mean: float) -> None:
    """Blocks of 4 neurons cost what a head costs. Scores below 0 are no reason to spend less than the budget."""
    config = layered((3, 8), (2, 4))
    scores = random_scores(config, seed, mean)
    known = [(cost(config, kept), total(scores, kept)) for kept in choices(config, 4)]
    for number in range(9):
        kept = strongest(config, scores, number * HEAD + 10, multiple=4)
        assert cost(config, kept) == number * HEAD if number <= 8 else 8 * HEAD
        assert total(scores, kept) == pytest.approx(max(sum_ for spent, sum_ in known if spent == number * HEAD))


def test_where_costs_differ_it_loses_no_more_than_the_unit_that_did_not_fit() -> None:
    config = layered((2, 5), (1, 4))
    scores = random_scores(config, 3, 1.0)
    scores = {name: np.abs(own) * (3 if "mixer" in name else 1) for name, own in scores.items()}
    known = [(cost(config, kept), total(scores, kept)) for kept in choices(config, 1)]
    exact, greatest = 0, max(float(own.max()) for own in scores.values())
    for budget in range(0, 21 * NEURON, NEURON // 2):
        kept = strongest(config, scores, budget, multiple=1)
        best = max(sum_ for spent, sum_ in known if spent <= budget)
        assert cost(config, kept) <= budget
        assert best - greatest < total(scores, kept) <= best + 1e-9
        exact += total(scores, kept) == pytest.approx(best)
    assert exact > 20


def test_a_head_has_to_bring_as_much_as_the_neurons_that_cost_as_much() -> None:
    config = layered((1, 4))
    head, ffn = "encoder.0.mixer", "encoder.0.ffn"
    for score, kept in ((3.9, (0, 4)), (4.1, (1, 0))):
        found = strongest(config, {head: np.array([score]), ffn: np.ones(4)}, HEAD, multiple=1)
        assert (len(found[head]), len(found[ffn])) == kept


def test_what_does_not_fit_leaves_room_for_what_does() -> None:
    """Neurons go by fours, the last two by themselves, and not before those with better scores."""
    config = layered((1, 10))
    scores = {"encoder.0.mixer": np.array([9.0]), "encoder.0.ffn": np.array([5, 1, 5, 1, 2, 5, 2, 5, 2, 2.0])}
    kept = {
        0: (),
        2: (),
        4: (0, 2, 5, 7),
        7: (0, 2, 5, 7),
        8: (0, 2, 5, 7),
        12: (0, 2, 4, 5, 6, 7, 8, 9),
        13: (0, 2, 4, 5, 6, 7, 8, 9),
    }
    for neurons, expected in kept.items():
        found = strongest(config, scores, neurons * NEURON, multiple=4)
        assert found["encoder.0.ffn"] == expected
        assert found["encoder.0.mixer"] == ((0,) if neurons >= 8 else ())
    assert strongest(config, scores, 14 * NEURON, multiple=4)["encoder.0.ffn"] == tuple(range(10))


ENCODER = tiny().config
WRITER = decoder_config(1, 2)
CELLS = decoder_config(1, 1, MIXERS["lstm"])
CONFIGS = {"encoder": ENCODER, "encoder and decoder": WRITER, "cells": CELLS}


def model_of(kind: str) -> Transformer:
    model = Transformer(CONFIGS[kind])
    model.load_state_dict(random_state(CONFIGS[kind]))
    return model


def output(model: Transformer) -> Tensor:
    targets = {"target_ids": IDS, "target_mask": SEEN} if model.config.decoder else {}
    return model(IDS, SEEN, **targets).result


def loss(model: Transformer) -> Tensor:
    result = output(model)
    return (result * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum()


def random_masks(masks: UnitMasks, seed: int = 0) -> dict[str, Tensor]:
    """Masks at random, by sub-layer; also set."""
    masks.masks.copy_(torch.rand(len(masks.masks), generator=torch.Generator().manual_seed(seed)) < 0.6)
    parts = masks.masks.split([sub.count for sub in sublayers(masks.config)])
    return {sub.name: part for sub, part in zip(sublayers(masks.config), parts, strict=True)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_masks_act_on_what_enters_output_projections(kind: str) -> None:
    plain, model = model_of(kind), model_of(kind)
    masks = UnitMasks(model, multiple=1)
    with torch.no_grad():
        assert torch.equal(output(model), output(plain))
        with masked(plain, random_masks(masks)):
            expected = output(plain)
        assert torch.equal(output(model), expected)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert set(masks.state_dict()) == {"masks", "scores", "returned"}
    assert not list(masks.parameters())


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_follow_the_gradient_by_masked_weights_times_weights(kind: str) -> None:
    """S = - rate * dL/dW' * W over two backward passes, W' = W m being what the projection computes with."""
    model = model_of(kind)
    masks = UnitMasks(model, multiple=1)
    own = random_masks(masks)
    for factor in (1.0, 0.5):
        (factor * loss(model)).backward()
    with torch.no_grad():
        output(model)
    plain = model_of(kind)
    before, masked_, moved = {}, {}, 0
    for sub in sublayers(plain.config):
        projection = plain.get_submodule(f"{sub.name}.{OUTPUT[sub.part]}")
        before[sub.name] = projection.weight.detach().clone()
        projection.weight.data *= own[sub.name].repeat_interleave(sub.width)
        masked_[sub.name] = projection.weight
    (1.5 * loss(plain)).backward()
    masks.move(0.25)
    parts = dict(zip(own, masks.scores.split([len(one) for one in own.values()]), strict=True))
    for sub in sublayers(plain.config):
        slopes = (masked_[sub.name].grad * before[sub.name]).sum(0).view(sub.count, sub.width).sum(1)
        assert torch.allclose(parts[sub.name], -0.25 * slopes, rtol=1e-3, atol=1e-4 * float(slopes.abs().max()))
        moved += int((parts[sub.name][own[sub.name] == 0] != 0).sum())
    assert moved > 10  # of the masked units, too
    scores = masks.scores.clone()
    masks.move(0.25)
    assert torch.equal(masks.scores, scores)


def test_masked_units_come_back_when_they_are_worth_it() -> None:
    """Two heads and four neurons, which cost as much as a head: the budget holds two thirds of that."""
    masks = UnitMasks(Transformer(layered((2, 4))), multiple=2)
    masks.scores.copy_(torch.tensor([8.0, 1.0, 3.0, 0.0, 2.0, 0.5]))
    masks.choose(2 / 3)
    assert masks.kept().units == {"encoder.0.mixer": (0,), "encoder.0.ffn": (0, 1, 2, 3)}
    assert masks.came_back() == {"encoder.0.mixer": 0, "encoder.0.ffn": 0}
    masks.scores[:2] = torch.tensor([12.0, 11.0])
    masks.choose(2 / 3)
    assert masks.kept().units == {"encoder.0.mixer": (0, 1), "encoder.0.ffn": ()}
    assert masks.came_back() == {"encoder.0.mixer": 1, "encoder.0.ffn": 0}
    masks.scores[1] = 5.0
    masks.choose(0.5)
    assert masks.kept().units == {"encoder.0.mixer": (0,), "encoder.0.ffn": (0, 2)}
    masks.choose(1.0)
    assert masks.kept().layers == {"encoder": (0,)}
    assert masks.kept().units == {"encoder.0.mixer": (0, 1), "encoder.0.ffn": (0, 1, 2, 3)}
    assert masks.came_back() == {"encoder.0.mixer": 1, "encoder.0.ffn": 4}


def test_cells_are_paid_for_from_the_budget() -> None:
    config = decoder_config(1, 1, MIXERS["lstm"])
    masks = UnitMasks(Transformer(config), multiple=1)
    masks.scores.copy_(torch.arange(len(masks.scores)))
    cells = config.decoder[0].mixer.multiply_adds(config.d_model)  # type: ignore[union-attr]
    for share in (0.4, 0.7):
        masks.choose(share)
        spent = cost(config, masks.kept().units)
        assert share * config.multiply_adds() - 4 * 12 * 32 < spent + cells <= share * config.multiply_adds()
