from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import ragged, random_state, writer

from slimformer.compress import criteria
from slimformer.compress.calibration import Batch
from slimformer.compress.criteria import CRITERIA, LAYER_CRITERIA, Examination, channel_scores, tried
from slimformer.compress.curvature import Curvature, curvatures
from slimformer.compress.importance import MaskGradients, mask_gradients
from slimformer.compress.ladders import Floats, Ladder, by_surgeon
from slimformer.compress.step import StepContext
from slimformer.compress.units import sublayers
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import RecurrentConfig
from slimformer.transformer.data import SearchData
from slimformer.transformer.layer_config import LayerConfig

NOTHING = SearchData((), (), (), ())
BATCHES = [Batch(ids % 24, mask) for ids, mask in (ragged(own, seed=len(own)) for own in ([5, 3, 4], [6, 2], [7]))]


class Recorder:
    def __init__(self) -> None:
        self.work: list[list] = []

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.work.append([title, total, unit, 0, False])

    def advance(self, n: int = 1, note: str = "") -> None:
        self.work[-1][3] += n

    def done(self, note: str = "") -> None:
        self.work[-1][4] = True


def examined(checkpoint: Checkpoint, batches: Sequence[Batch] = BATCHES, seed: int = 5) -> Examination:
    return Examination(checkpoint, batches, StepContext(NOTHING, seed=seed), 1e-3)


def gradients_of(checkpoint: Checkpoint, batches: Sequence[Batch] = BATCHES) -> MaskGradients:
    return mask_gradients(checkpoint.to_torch(), batches, 5)


def check_scores(ladder: Ladder, scores: Floats) -> None:
    """The one with the least score goes first, and what is lost is the sum."""
    ascending = sorted(range(len(scores)), key=lambda unit: scores[unit])
    assert ladder.order == tuple(ascending[::-1])
    sums = [sum(scores[unit] for unit in ascending[: len(scores) - k]) for k in range(len(scores) + 1)]
    np.testing.assert_allclose(ladder.losses, sums, rtol=1e-5, atol=1e-12)
    assert ladder.fisher is None


@pytest.mark.parametrize("name", ["taylor", "diagonal"])
def test_first_and_second_order_are_means_over_texts(uneven: Checkpoint, name: str) -> None:
    found = CRITERIA[name](examined(uneven))
    units = gradients_of(uneven).units
    assert set(found) == set(units)
    for sub, gradients in units.items():
        rows = [[abs(float(g)) if name == "taylor" else float(g) ** 2 for g in row] for row in gradients]
        assert len(rows) == 6
        check_scores(found[sub], np.array(rows).mean(0))


def test_magnitude_is_the_squared_norm_of_what_leads_in_and_out(uneven: Checkpoint) -> None:
    found = CRITERIA["magnitude"](Examination(uneven, [], StepContext(NOTHING), 0.0))
    state = {name: value.double().numpy() for name, value in uneven.state.items()}
    assert list(found) == [sub.name for sub in sublayers(uneven.config)]
    for i, layer in enumerate(uneven.config.encoder):
        assert layer.ffn is not None
        up, down = state[f"encoder.{i}.ffn.up.weight"], state[f"encoder.{i}.ffn.down.weight"]
        norms = [(up[n] ** 2).sum() + (down[:, n] ** 2).sum() for n in range(layer.ffn.width)]
        check_scores(found[f"encoder.{i}.ffn"], np.array(norms))


def test_fisher_has_each_sublayers_whole_block(uneven: Checkpoint) -> None:
    found = CRITERIA["fisher"](examined(uneven))
    for sub, gradients in gradients_of(uneven).units.items():
        rows = gradients.double().numpy()
        block = sum(np.outer(row, row) for row in rows) / 6
        fisher = found[sub].fisher
        assert fisher is not None
        np.testing.assert_allclose(fisher, block, rtol=1e-5, atol=1e-12)
        assert found[sub].order[-1] == int(np.diag(block).argmin())
        assert found[sub].losses[-2] == pytest.approx(np.diag(block).min(), rel=1e-5)


@pytest.mark.parametrize("kind", ["post", "lstm"])
def test_the_surgeon_has_projection_factors_width_and_damping(kind: str) -> None:
    model = writer(kind)
    batches = [Batch(*ragged([5, 3], seed=1), *ragged([4, 6], seed=2))]
    recorder = Recorder()
    context = StepContext(NOTHING, seed=5, progress=recorder)
    found = CRITERIA["surgeon"](Examination(model, batches, context, 0.07))
    factors = curvatures(model.to_torch(), batches, 5)
    assert list(found) == [sub.name for sub in sublayers(model.config)]
    for sub in sublayers(model.config):
        weight = model.state[f"{sub.name}.{'down' if sub.part == 'ffn' else 'out'}.weight"]
        expected = by_surgeon(weight, factors[sub.name], width=sub.width, damping=0.07)
        assert found[sub.name].order == expected.order
        np.testing.assert_allclose(found[sub.name].losses, expected.losses, rtol=1e-6)
    subs = len(sublayers(model.config))
    assert recorder.work == [
        ["curvature of the projections", 2, "pairs", 2, True],
        ["order heads and neurons", subs, "sub-layers", subs, True],
    ]


def cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


def test_influence_is_how_far_a_layer_turns_tokens(uneven: Checkpoint) -> None:
    found = LAYER_CRITERIA["influence"](examined(uneven))
    with torch.no_grad():
        outputs = [batch.run(uneven.to_torch()) for batch in BATCHES]
    states = [np.concatenate([output.states[i].numpy() for output in outputs]) for i in range(4)]
    assert len(states[0]) == 5 + 3 + 4 + 6 + 2 + 7
    expected = [1 - cosines(states[i], states[i + 1]).mean() for i in range(3)]
    assert len({round(float(one), 3) for one in expected}) == 3
    np.testing.assert_allclose(found["encoder"], np.diag(expected), rtol=1e-5, atol=1e-6)


def test_influence_of_two_stacks_is_of_their_own_tokens() -> None:
    model, batches = writer("post"), [Batch(*ragged([5, 3], seed=1), *ragged([4, 6], seed=2))]
    found = LAYER_CRITERIA["influence"](examined(model, batches))
    with torch.no_grad():
        states = [state.numpy() for state in batches[0].run(model.to_torch()).states]
    assert [len(state) for state in states] == [8] * 4 + [10] * 4
    for stack, start in (("encoder", 0), ("decoder", 4)):
        expected = [1 - cosines(states[start + i], states[start + i + 1]).mean() for i in range(3)]
        np.testing.assert_allclose(found[stack], np.diag(expected), rtol=1e-5, atol=1e-6)


def test_layers_by_fisher_are_products_of_mask_gradients(uneven: Checkpoint) -> None:
    rows = gradients_of(uneven).layers["encoder"].double().numpy()
    found = LAYER_CRITERIA["fisher"](examined(uneven))["encoder"]
    np.testing.assert_allclose(found, sum(np.outer(row, row) for row in rows) / 6, rtol=1e-5)


def test_layers_by_magnitude_are_the_sum_of_their_units(uneven: Checkpoint) -> None:
    seen = Examination(uneven, [], StepContext(NOTHING), 0.0)
    units = CRITERIA["magnitude"](seen)
    sums = [units[f"encoder.{i}.mixer"].losses[0] + units[f"encoder.{i}.ffn"].losses[0] for i in range(3)]
    np.testing.assert_allclose(LAYER_CRITERIA["magnitude"](seen)["encoder"], np.diag(sums), rtol=1e-9)


def test_channels_are_scored_as_units_are(uneven: Checkpoint) -> None:
    squares = gradients_of(uneven).channels.double().square().mean(0).numpy()
    for importance in ("surgeon", "fisher", "taylor"):
        np.testing.assert_allclose(channel_scores(examined(uneven), importance), squares, rtol=1e-5)
    without_data = channel_scores(Examination(uneven, [], StepContext(NOTHING), 0.0), "magnitude")
    assert without_data.shape == (8,)
    assert not np.allclose(without_data / without_data.sum(), squares / squares.sum(), rtol=0.1)


def test_halves_have_every_other_batch_and_together_all_of_it(uneven: Checkpoint) -> None:
    context = StepContext(NOTHING, seed=5)
    seen = Examination.in_halves(uneven, BATCHES, context, 0.3)
    assert [list(part.batches) for part in seen.parts] == [[BATCHES[0], BATCHES[2]], [BATCHES[1]]]
    assert [part.rows for part in (seen, *seen.parts)] == [6, 4, 2]
    assert {part.damping for part in seen.parts} == {0.3}
    parts = [gradients_of(uneven, BATCHES[::2]), gradients_of(uneven, BATCHES[1::2])]
    for name, own in seen.gradients.units.items():
        torch.testing.assert_close(own, torch.cat([part.units[name] for part in parts]))
    torch.testing.assert_close(seen.gradients.channels, torch.cat([part.channels for part in parts]))
    halves = [curvatures(uneven.to_torch(), own, 5) for own in (BATCHES[::2], BATCHES[1::2])]
    whole = curvatures(uneven.to_torch(), BATCHES, 5)
    for name, factors in seen.curvatures.items():
        torch.testing.assert_close(factors.inputs, whole[name].inputs, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(factors.mean, whole[name].mean, rtol=1e-5, atol=1e-7)
        expected = (4 * halves[0][name].outputs + 2 * halves[1][name].outputs) / 6
        torch.testing.assert_close(factors.outputs, expected)


def test_a_single_batch_is_one_part(uneven: Checkpoint) -> None:
    seen = Examination.in_halves(uneven, BATCHES[:1], StepContext(NOTHING), 0.0)
    assert [list(part.batches) for part in seen.parts] == [BATCHES[:1]]
    assert Examination.in_halves(uneven, [], StepContext(NOTHING), 0.0).parts == ()


def test_every_measurement_is_made_once(uneven: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def counted(name: str, real):
        def examine(model, batches, seed, *, progress):
            made.append((name, len(batches)))
            return real(model, batches, seed, progress=progress)

        return examine

    monkeypatch.setattr(criteria, "mask_gradients", counted("gradients", mask_gradients))
    monkeypatch.setattr(criteria, "curvatures", counted("curvatures", curvatures))
    recorder = Recorder()
    seen = Examination.in_halves(uneven, BATCHES, StepContext(NOTHING, progress=recorder), 1e-3)
    for _ in range(2):
        for one in (*seen.parts, seen):
            for criterion in CRITERIA.values():
                criterion(one)
            for criterion in LAYER_CRITERIA.values():
                criterion(one)
    assert sorted(made) == [("curvatures", 1), ("curvatures", 2), ("gradients", 1), ("gradients", 2)]
    titles = [work[:4] for work in recorder.work if work[0] == "Fisher information"]
    assert sorted(titles, key=str) == [["Fisher information", 2, "texts", 2], ["Fisher information", 4, "texts", 4]]
    assert all(done for *_, done in recorder.work)
    assert seen.model is seen.model


def test_the_model_is_of_the_checkpoint_and_leaves_it_alone(uneven: Checkpoint) -> None:
    seen = examined(uneven)
    before = {name: value.clone() for name, value in uneven.state.items()}
    tried(seen, CRITERIA["surgeon"](seen))
    assert not seen.model.training
    for name, value in before.items():
        assert torch.equal(value, uneven.state[name])
        assert torch.equal(value, seen.model.state_dict()[name])


def test_cuts_are_tried_on_some_of_the_texts_evenly(uneven: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 texts for 2 every third of each batch."""
    given: dict[str, object] = {}

    def losses(model, batches, ladders, factors: dict[str, Curvature], *, damping, progress):
        given.update(batches=batches, damping=damping, factors=factors, ladders=ladders)
        return {name: np.arange(len(ladder.losses))[::-1] * 7.0 for name, ladder in ladders.items()}

    monkeypatch.setattr(criteria, "trial_losses", losses)
    monkeypatch.setattr(criteria, "TRIED", 2)
    seen = examined(uneven)
    ladders = CRITERIA["surgeon"](seen)
    found = tried(seen, ladders)
    batches = given["batches"]
    assert isinstance(batches, list)
    assert [one.ids.tolist() for one in batches] == [one.ids[::3].tolist() for one in BATCHES]
    assert given["damping"] == 1e-3
    assert given["factors"] is seen.curvatures
    for name, ladder in ladders.items():
        assert found[name].order == ladder.order
        assert found[name].losses.tolist() == [7.0 * k for k in range(len(ladder.order), -1, -1)]
    monkeypatch.setattr(criteria, "TRIED", 64)
    tried(seen, ladders)
    assert [len(one.ids) for one in given["batches"]] == [3, 2, 1]  # type: ignore[attr-defined]


def test_layers_without_units_have_no_ladders(uneven: Checkpoint) -> None:
    cells = tuple(LayerConfig(RecurrentConfig("rnn", 8), None) for _ in range(2))
    config = replace(uneven.config, encoder=cells)
    bare = Checkpoint(config, random_state(config), uneven.tokenizer)
    for name, criterion in CRITERIA.items():
        assert criterion(examined(bare)) == {}, name


def test_more_examples_join_those_that_were_measured(uneven: Checkpoint) -> None:
    """Each half gets its own, and what was measured of the first ones is not measured again."""
    context = StepContext(NOTHING, seed=5)
    first = Examination.in_halves(uneven, BATCHES[:2], context, 1e-3)
    early = [part.gradients for part in first.parts]
    both = first.with_more([BATCHES[2], BATCHES[0]])
    assert both.rows == 3 + 2 + 1 + 3
    assert [part.parts[0].gradients for part in both.parts] == early
    expected = [gradients_of(uneven, [batch]) for batch in (BATCHES[0], BATCHES[2], BATCHES[1], BATCHES[0])]
    for name, found in both.gradients.units.items():
        torch.testing.assert_close(found, torch.cat([one.units[name] for one in expected]), rtol=0, atol=0)
