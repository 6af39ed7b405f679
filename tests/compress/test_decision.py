import math
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from models import MIXERS, ragged, random_state, tiny_config, writer

from slimformer.compress import decision as module
from slimformer.compress.calibration import Batch
from slimformer.compress.costs import MultiplyAdds, Seconds
from slimformer.compress.criteria import CRITERIA, Examination
from slimformer.compress.decision import Decision
from slimformer.compress.ladders import Ladder
from slimformer.compress.selection import STEPS
from slimformer.compress.step import StepContext
from slimformer.compress.surgery import remove_from
from slimformer.compress.units import Indices, Kept, Sublayer, stacks, sublayers
from slimformer.export.sublayer_times import SublayerTimes, kind_of
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import LayerConfig, TransformerConfig
from slimformer.transformer.data import SearchData
from slimformer.transformer.errors import InputError

CONTEXT = StepContext(SearchData((), (), (), ()))
BATCHES = [Batch(ids % 24, mask) for ids, mask in (ragged(own, seed=len(own)) for own in ([5, 3, 4], [6, 2], [7]))]


def ladders_of(config: TransformerConfig, seed: int = 0) -> dict[str, Ladder]:
    """Random orders and losses that fall."""
    random = np.random.default_rng(seed)
    found = {}
    for sub in sublayers(config):
        steps = random.random(sub.count) * sub.width
        losses = np.concatenate([np.cumsum(steps[::-1])[::-1], [0.0]])
        found[sub.name] = Ladder(tuple(map(int, random.permutation(sub.count))), losses)
    return found


def decided(
    checkpoint: Checkpoint,
    *,
    layers: Mapping[str, Indices] | None = None,
    channels: Indices | None = None,
    multiple: int = 2,
    ladders: Mapping[str, Ladder] | None = None,
    importance: str = "fisher",
    seen: Examination | None = None,
) -> Decision:
    """A decision with ladders out of the air."""
    seen = seen or Examination(checkpoint, [], CONTEXT, 1e-3)
    chosen = layers or {stack: tuple(range(len(own))) for stack, own in stacks(checkpoint.config).items()}
    result = Decision(seen, chosen, channels, importance, multiple)
    result.__dict__["ladders"] = dict(ladders or ladders_of(checkpoint.config))
    return result


def allowed(sub: Sublayer, multiple: int) -> list[int]:
    return [k for k in range(sub.count + 1) if sub.part != "ffn" or k % multiple == 0 or k == sub.count]


def best_loss(decision: Decision, budget: float, sizes: Mapping[str, int]) -> float:
    """The least loss of all combinations whose model, cut out, has at most so many multiply-adds."""
    subs = [sub for sub in sublayers(decision.config) if sub.layer in decision.layers[sub.stack]]
    best = math.inf
    for counts in product(*(allowed(sub, decision.multiple) for sub in subs)):
        named = dict(zip([sub.name for sub in subs], counts, strict=True))
        if sum(sizes[name] * count for name, count in named.items()) <= budget:
            best = min(best, sum(decision.ladders[name].losses[count] for name, count in named.items()))
    return best


def loss_of(decision: Decision, kept: Kept) -> float:
    return sum(float(decision.ladders[name].losses[len(units)]) for name, units in kept.units.items())


@pytest.mark.parametrize("share", [0.2, 0.45, 0.7, 0.9])
@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2), (1,)])
def test_the_units_that_stay_are_the_best_within_the_budget(uneven: Checkpoint, share: float, layers: Indices) -> None:
    """Of width 8: a head of K costs 32 K, a neuron 16; a 20,000th of the budget is lost to rounding at most."""
    decision = decided(uneven, layers={"encoder": layers}, ladders=ladders_of(uneven.config, seed=len(layers)))
    sizes = {sub.name: 16 if sub.part == "ffn" else 32 * sub.width for sub in sublayers(uneven.config)}
    whole = sum(sizes[sub.name] * sub.count for sub in sublayers(uneven.config) if sub.layer in layers)
    budget = share * whole
    kept = decision.within(MultiplyAdds(uneven.config), budget)
    assert kept is not None
    assert kept.layers == {"encoder": layers}
    assert {name.split(".")[1] for name in kept.units} == set(map(str, layers))
    assert remove_from(uneven, kept).config.multiply_adds() <= budget
    loss = loss_of(decision, kept)
    assert best_loss(decision, budget, sizes) - 1e-9 <= loss
    assert loss <= best_loss(decision, budget * (1 - 6 / STEPS), sizes) + 1e-9
    for sub in sublayers(uneven.config):
        if sub.name in kept.units:
            units = kept.units[sub.name]
            assert units == tuple(sorted(decision.ladders[sub.name].order[: len(units)]))
            assert len(units) in allowed(sub, 2)


def test_what_fits_whole_stays_whole_and_nothing_is_measured(uneven: Checkpoint) -> None:
    decision = Decision(Examination(uneven, [], CONTEXT, 0.0), {"encoder": (0, 2)}, (1, 3), "surgeon", 2)
    costs = MultiplyAdds(uneven.config)
    whole = 3 * 4 * 32 + 10 * 16 + 4 * 2 * 32 + 6 * 16
    kept = decision.within(costs, whole)
    assert kept == decision.whole
    assert kept.channels == (1, 3)
    assert kept.units == {
        "encoder.0.mixer": (0, 1, 2), "encoder.0.ffn": tuple(range(10)),
        "encoder.2.mixer": (0, 1, 2, 3), "encoder.2.ffn": tuple(range(6)),
    }  # fmt: skip
    assert "ladders" not in decision.__dict__


def test_less_than_nothing_holds_nothing() -> None:
    config = tiny_config(layers=[LayerConfig(MIXERS["lstm"], None), LayerConfig(MIXERS["attention"], None)])
    checkpoint = Checkpoint(config, random_state(config), "")
    decision, cell = decided(checkpoint), 4 * 20 * 52 + 640
    assert decision.within(MultiplyAdds(config), cell - 1) is None
    least = decision.within(MultiplyAdds(config), cell)
    assert least is not None
    assert least.units == {"encoder.1.mixer": ()}
    one = decision.within(MultiplyAdds(config), cell + 1024)
    assert one is not None
    assert [len(units) for units in one.units.values()] == [1]
    cells = tiny_config(layers=[LayerConfig(MIXERS["lstm"], None)])
    alone = decided(Checkpoint(cells, random_state(cells), ""))
    assert alone.within(MultiplyAdds(cells), cell - 1) is None
    assert alone.within(MultiplyAdds(cells), cell) == Kept({"encoder": (0,)}, {})


def test_stacks_compete_and_channels_are_kept_along() -> None:
    model = writer("post")
    decision = decided(model, channels=tuple(range(0, 32, 2)), multiple=16)
    costs = MultiplyAdds(decision.narrow)
    kept = decision.within(costs, 0.4 * decision.narrow.multiply_adds())
    assert kept is not None
    small = remove_from(model, kept).config
    assert small.d_model == 16
    assert small.multiply_adds() <= 0.4 * decision.narrow.multiply_adds()
    assert kept.channels == tuple(range(0, 32, 2))
    assert {name.split(".")[0] for name in kept.units} == {"encoder", "decoder"}


def test_costs_may_be_seconds(uneven: Checkpoint) -> None:
    """A second a head and nothing a neuron: within 4 seconds over what is without units four heads stay."""
    points = {}
    for layer in uneven.config.encoder:
        assert layer.mixer is not None
        assert layer.ffn is not None
        points[kind_of(layer.mixer)] = ((0, 0.0), (4, 4.0))
        points[kind_of(layer.ffn)] = ((0, 0.0), (10, 0.0))
    costs = Seconds(SublayerTimes(3.0, 0.5, points), uneven.config)
    ladders = {name: Ladder(one.order, one.losses + 0.0) for name, one in ladders_of(uneven.config).items()}
    decision = decided(uneven, ladders=ladders)
    kept = decision.within(costs, 3.0 + 3 * 0.5 + 4.0)
    assert kept is not None
    sizes = {sub.name: 0 if sub.part == "ffn" else 1 for sub in sublayers(uneven.config)}
    assert sum(sizes[name] * len(units) for name, units in kept.units.items()) == 4
    assert loss_of(decision, kept) == pytest.approx(best_loss(decision, 4, sizes))
    assert decision.within(costs, 4.49) is None


@pytest.mark.parametrize(("multiple", "least"), [(2, 2 * 16), (4, 4 * 16), (32, 2 * 32)])
def test_the_least_is_one_unit_of_the_cheapest_sublayer(uneven: Checkpoint, multiple: int, least: int) -> None:
    """Neurons go by multiples, or all of a narrow FFN: 6 of 16 each; a head of layer 2 costs 2 * 32."""
    decision = decided(uneven, multiple=multiple)
    found = decision.least(MultiplyAdds(uneven.config))
    assert found == least
    costs = MultiplyAdds(uneven.config)
    every = [costs.of(sub, count) for sub in sublayers(uneven.config) for count in allowed(sub, multiple) if count]
    assert found == min(every)


def test_the_least_counts_cells_and_only_layers_that_stay() -> None:
    cell = 4 * 20 * 52 + 640
    config = tiny_config(layers=[LayerConfig(MIXERS["lstm"], None), LayerConfig(MIXERS["attention"], None)])
    checkpoint = Checkpoint(config, random_state(config), "")
    assert decided(checkpoint).least(MultiplyAdds(config)) == cell + 1024
    assert decided(checkpoint, layers={"encoder": (1,)}).least(MultiplyAdds(config)) == 1024
    assert decided(checkpoint, layers={"encoder": (0,)}).least(MultiplyAdds(config)) == cell


def test_narrow_has_fewer_channels_and_all_units(uneven: Checkpoint) -> None:
    decision = decided(uneven, channels=(0, 2, 5), layers={"encoder": (1,)})
    assert decision.narrow.d_model == 3
    assert decision.narrow.encoder == uneven.config.encoder
    assert decided(uneven).narrow is uneven.config
    assert decision.config is uneven.config


def test_ladders_are_of_the_criterion_and_the_surgeons_are_tried(
    uneven: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(module, "tried", lambda seen, found: tried.append(seen) or {"tried": found})
    seen = Examination(uneven, BATCHES, CONTEXT, 1e-3)
    layers = {"encoder": (0, 1, 2)}
    fisher = Decision(seen, layers, None, "fisher", 2)
    expected = CRITERIA["fisher"](seen)
    assert {name: one.order for name, one in fisher.ladders.items()} == {n: one.order for n, one in expected.items()}
    assert fisher.ladders is fisher.ladders
    assert tried == []
    surgeon = Decision(seen, layers, None, "surgeon", 2)
    assert list(surgeon.ladders) == ["tried"]
    assert tried == [seen]


# --- whether other texts would say so too ---


class Said:
    """Two halves whose orders are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, uneven: Checkpoint, orders: list[dict[str, Indices]]) -> None:
        parts = tuple(Examination(uneven, [batch], CONTEXT, 0.0) for batch in BATCHES[: len(orders)])
        said = {id(part): own for part, own in zip(parts, orders, strict=True)}

        def criterion(seen: Examination) -> dict[str, Ladder]:
            own = said[id(seen)]
            return {name: Ladder(order, np.zeros(len(order) + 1)) for name, order in own.items()}

        monkeypatch.setitem(CRITERIA, "fisher", criterion)
        self.decision = decided(uneven, seen=Examination(uneven, BATCHES, CONTEXT, 0.0, parts))


FORWARD = {
    "encoder.0.mixer": (0, 1, 2), "encoder.0.ffn": tuple(range(10)), "encoder.1.mixer": (0, 1),
    "encoder.1.ffn": tuple(range(8)), "encoder.2.mixer": (0, 1, 2, 3), "encoder.2.ffn": tuple(range(6)),
}  # fmt: skip


def kept_of(**counts: int) -> Kept:
    """So many units of "part_layer", all of the others."""
    units = {
        name: own[: counts.get(f"{name.split('.')[2]}_{name.split('.')[1]}", len(own))] for name, own in FORWARD.items()
    }
    return Kept({"encoder": (0, 1, 2)}, units)


def agreed(decision: Decision, kept: Kept, wanted: float) -> dict[str, Any] | None:
    """What the report says, unless it is refused."""
    found = decision.agreement(kept)
    if found is None:
        return None
    found.refuse(wanted)
    return found.to_dict(wanted)


def test_agreement_by_hand(monkeypatch: pytest.MonkeyPatch, uneven: Checkpoint) -> None:
    """Of 4 neurons and 1 head that stay the halves share 3: they differ on 2 of 5, so 6 examples on 0.4 / sqrt(2)."""
    other = {**FORWARD, "encoder.0.ffn": (0, 1, 2, 9, 3, 4, 5, 6, 7, 8), "encoder.1.mixer": (1, 0)}
    other["encoder.2.ffn"] = (5, 4, 3, 2, 1, 0)  # all stay: not decided
    decision = Said(monkeypatch, uneven, [FORWARD, other]).decision
    kept = kept_of(ffn_0=4, mixer_1=1)
    expected = 1 - 0.4 / math.sqrt(2)
    found = agreed(decision, kept, 0.7)
    assert found == {"examples": 6, "share": round(expected, 3), "wanted": 0.7, "examples_enough": 6}
    assert math.ceil(6 / 2 * (0.4 / 0.3) ** 2) == 6
    with pytest.raises(InputError) as error:
        agreed(decision, kept, 0.9)
    enough = math.ceil(6 / 2 * (0.4 / 0.1) ** 2 - 1e-9)
    assert enough == 48
    numbers = re.findall(r"\d+", str(error.value))
    assert numbers[:2] == ["6", "72"]
    assert int(numbers[2]) in (48, 49)  # 0.4 and 0.1 are not exact
    assert numbers[3] == "90"
    assert "give more texts and raise samples, or lower agreement" in str(error.value)


def test_the_examples_that_are_enough_give_what_is_wanted(monkeypatch: pytest.MonkeyPatch, uneven: Checkpoint) -> None:
    """The share of differences falls as one over the root of the examples; one example fewer is not enough."""
    other = {**FORWARD, "encoder.0.ffn": (9, 8, 2, 3, 4, 5, 6, 7, 0, 1)}
    decision = Said(monkeypatch, uneven, [FORWARD, other]).decision
    for wanted in (0.1, 0.33, 0.5):
        found = agreed(decision, kept_of(ffn_0=4), wanted)
        assert found is not None
        enough = found["examples_enough"]
        assert 1 - 0.5 * math.sqrt(3 / enough) >= wanted - 1e-12
        assert enough == 1 or 1 - 0.5 * math.sqrt(3 / (enough - 1)) < wanted


def test_halves_that_agree_need_one_example(monkeypatch: pytest.MonkeyPatch, uneven: Checkpoint) -> None:
    found = agreed(Said(monkeypatch, uneven, [FORWARD, dict(FORWARD)]).decision, kept_of(ffn_0=4), 0.99)
    assert found == {"examples": 6, "share": 1.0, "wanted": 0.99, "examples_enough": 1}


def test_with_one_part_nothing_is_known_to_agree(monkeypatch: pytest.MonkeyPatch, uneven: Checkpoint) -> None:
    decision = Said(monkeypatch, uneven, [FORWARD]).decision
    with pytest.raises(InputError, match=r"6 calibration examples are too few .* agree on 29 %"):
        agreed(decision, kept_of(ffn_0=4), 0.5)


def test_agreement_is_not_asked_where_nothing_was_decided_by_data(
    monkeypatch: pytest.MonkeyPatch, uneven: Checkpoint
) -> None:
    decision = Said(monkeypatch, uneven, [FORWARD, {name: own[::-1] for name, own in FORWARD.items()}]).decision
    assert agreed(decision, kept_of(), 0.9) is None
    assert agreed(decision, kept_of(ffn_0=0, mixer_2=0), 0.9) is None
    whole_layers = Kept({"encoder": (1,)}, {name: own for name, own in FORWARD.items() if ".1." in name})
    assert agreed(decision, whole_layers, 0.9) is None
    assert agreed(decided(uneven, importance="magnitude"), kept_of(ffn_0=4), 0.9) is None
    with pytest.raises(InputError):
        agreed(decision, kept_of(ffn_0=4), 0.9)


def test_texts_that_are_all_alike_decide_alike(uneven: Checkpoint) -> None:
    """The same batch twice, and labels of one seed."""
    seen = Examination.in_halves(uneven, [BATCHES[0]] * 2, CONTEXT, 1e-3)
    for importance in ("surgeon", "fisher", "diagonal", "taylor"):
        decision = Decision(seen, {"encoder": (0, 1, 2)}, None, importance, 2)
        kept = kept_of(ffn_0=4, mixer_1=1, mixer_2=2)
        assert agreed(decision, kept, 0.9) == {"examples": 6, "share": 1.0, "wanted": 0.9, "examples_enough": 1}


def test_swaps_of_a_block_count_as_each_half_makes_them(monkeypatch: pytest.MonkeyPatch, uneven: Checkpoint) -> None:
    fisher = np.array([[2.0, 2, 0, 0], [2, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 3]])
    assert Ladder((3, 2, 1, 0), np.zeros(5), fisher).kept(2) != (2, 3)
    said = Said(monkeypatch, uneven, [FORWARD, dict(FORWARD)])
    ladders = {name: Ladder(own, np.zeros(len(own) + 1)) for name, own in FORWARD.items()}
    plain, swapped = dict(ladders), {**ladders, "encoder.2.mixer": Ladder((3, 2, 1, 0), np.zeros(5), fisher)}
    plain["encoder.2.mixer"] = Ladder((3, 2, 1, 0), np.zeros(5))
    halves = iter([plain, swapped])
    monkeypatch.setitem(CRITERIA, "fisher", lambda seen: next(halves))
    found = agreed(said.decision, kept_of(mixer_2=2), 0.1)
    assert found is not None
    assert found["share"] == round(1 - 0.5 / math.sqrt(2), 3)
