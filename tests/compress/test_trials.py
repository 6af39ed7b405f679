from dataclasses import replace

import numpy as np
import pytest
import torch
from models import EMBEDDING, LABELS, ragged, tiny, writer
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from slimformer.compress import trials
from slimformer.compress.calibration import Batch
from slimformer.compress.curvature import Curvature, curvatures
from slimformer.compress.ladders import Ladder
from slimformer.compress.trials import distance, refitted, trial_losses
from slimformer.compress.units import Sublayer, sublayers
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead, Head, TransformerConfig

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0], [2, 11, 12, 3, 0]])
MASK = (IDS != 0).long()
BATCHES = [Batch(IDS[:2], MASK[:2]), Batch(IDS[2:], MASK[2:])]
LENGTHS = (14, 3, 9, 12, 5, 8, 11, 4)


def source(side: int) -> list[tuple[Tensor, Tensor]]:
    """Two batches of more tokens than a sub-layer has units, so that a cut costs something."""
    turned = LENGTHS[side:] + LENGTHS[:side]
    return [ragged(turned[:5], seed=2 * side), ragged(turned[5:], seed=2 * side + 1)]


LINES = [Batch(*one) for one in source(1)]
PAIRS = [Batch(*own, *other) for own, other in zip(source(1), source(2), strict=True)]
LAST = {"mixer": "out", "cross": "out", "ffn": "down"}
DAMPING = 1e-2


def shuffled(config: TransformerConfig) -> dict[str, Ladder]:
    """Orders without meaning."""
    random = np.random.default_rng(0)
    return {
        sub.name: Ladder(tuple(map(int, random.permutation(sub.count))), np.zeros(sub.count + 1))
        for sub in sublayers(config)
    }


def least_squares(weight: Tensor, factors: Curvature, columns: list[int], damping: float) -> Tensor:
    """(D, U) of these columns alone, in float64, with the least tr(dW (A + damping) dW^T)."""
    gram = factors.inputs + damping * factors.inputs.diagonal().mean() * torch.eye(len(factors.inputs))
    root, result = torch.linalg.cholesky(gram).T, torch.zeros_like(weight, dtype=torch.float64)
    if columns:
        result[:, columns] = torch.linalg.lstsq(root[:, columns], root @ weight.double().T).solution.T
    return result


def divergence(config: TransformerConfig, p: Tensor, q: Tensor) -> float:
    if config.head is not None and config.head.kind != "embedding":
        return float(kl_divergence(Categorical(logits=p.double()), Categorical(logits=q.double())).sum())
    return float(kl_divergence(Normal(p.double(), 1.0), Normal(q.double(), 1.0)).sum())


def cut(checkpoint: Checkpoint, sub: Sublayer, kept: tuple[int, ...], factors: Curvature) -> Checkpoint:
    """The checkpoint with a projection of the kept units alone and a bias that makes up for the mean."""
    name = f"{sub.name}.{LAST[sub.part]}"
    columns = [unit * sub.width + k for unit in kept for k in range(sub.width)]
    weight = checkpoint.state[f"{name}.weight"]
    new = least_squares(weight, factors, columns, DAMPING)
    bias = checkpoint.state[f"{name}.bias"].double() + (weight.double() - new) @ factors.mean
    return replace(checkpoint, state={**checkpoint.state, f"{name}.weight": new.float(), f"{name}.bias": bias.float()})


def check_tried(checkpoint: Checkpoint, batches: list[Batch]) -> None:
    config, model = checkpoint.config, checkpoint.to_torch()
    ladders, factors = shuffled(config), curvatures(checkpoint.to_torch(), batches, seed=0)
    found = trial_losses(model, batches, ladders, factors, damping=DAMPING)
    assert list(found) == [sub.name for sub in sublayers(config)]
    texts = sum(len(batch.ids) for batch in batches)
    for sub in sublayers(config):
        for count in {0, round(sub.count / 4), sub.count // 2}:
            other = cut(checkpoint, sub, ladders[sub.name].kept(count), factors[sub.name]).to_torch()
            total = 0.0
            for batch in batches:
                with torch.no_grad():
                    p, q = (one.hidden if one.result is None else one.result for one in map(batch.run, (model, other)))
                total += divergence(config, p, q)
            assert found[sub.name][count] == pytest.approx(total / texts, rel=1e-2, abs=2e-6), (sub.name, count)
        assert len(found[sub.name]) == sub.count + 1
        assert found[sub.name][-1] == 0
        assert found[sub.name][0] > 1e-3


@pytest.mark.parametrize("head", [EMBEDDING, LABELS, None])
def test_cuts_of_an_encoder_are_those_by_hand(head: Head | None) -> None:
    check_tried(tiny(head), LINES)


@pytest.mark.parametrize("kind", ["pre", "lstm"])
def test_cuts_of_an_encoder_decoder_are_those_by_hand(kind: str) -> None:
    check_tried(writer(kind), PAIRS)


def test_cuts_of_a_decoder_alone_are_those_by_hand() -> None:
    check_tried(writer("alone"), LINES)


@pytest.mark.parametrize("kept", [(0, 2), (1,), (), (0, 1, 2)])
@pytest.mark.parametrize("damping", [1e-4, 0.1])
def test_a_projection_is_refitted_by_damped_least_squares(kept: tuple[int, ...], damping: float) -> None:
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(30, 6, generator=random, dtype=torch.float64)
    factors = Curvature(rows.T @ rows / 30, rows.mean(0), torch.eye(4), 30, 3)
    weight, before = torch.randn(4, 6, generator=random), factors.inputs.clone()
    found = refitted(weight, factors, kept, Sublayer("encoder", 0, "mixer", 3, 2), damping)
    columns = [2 * unit + k for unit in kept for k in range(2)]
    torch.testing.assert_close(found.double(), least_squares(weight, factors, columns, damping), rtol=1e-5, atol=1e-5)
    assert found.dtype == torch.float32
    assert not found[:, [column for column in range(6) if column not in columns]].any()
    assert torch.equal(factors.inputs, before)


def test_a_projection_without_inputs_is_refitted_to_something_finite() -> None:
    factors = Curvature(torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4), torch.eye(2), 3, 1)
    found = refitted(torch.ones(2, 4), factors, (1,), Sublayer("encoder", 0, "ffn", 4, 1), 0.0)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1, 0, 0]] * 2))


def test_distances_are_divergences_of_what_is_drawn_from(uneven: Checkpoint, uneven_classifier: Checkpoint) -> None:
    bare = replace(uneven, config=replace(uneven.config, head=None))
    for checkpoint, batch in (
        (uneven, BATCHES[0]), (bare, BATCHES[0]), (uneven_classifier, BATCHES[0]), (writer("post"), PAIRS[0])
    ):  # fmt: skip
        other = replace(checkpoint, state={name: value * 1.1 for name, value in checkpoint.state.items()})
        with torch.no_grad():
            first, second = (batch.run(one.to_torch()) for one in (checkpoint, other))
        p, q = (one.hidden if one.result is None else one.result for one in (first, second))
        expected = divergence(checkpoint.config, p, q)
        assert expected > 1e-3
        assert distance(checkpoint.config, first, second) == pytest.approx(expected, rel=1e-4)
        assert distance(checkpoint.config, first, first) == pytest.approx(0.0, abs=1e-5)
    assert isinstance(uneven_classifier.config.head, ClassificationHead)


def with_losses(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, losses: dict[str, list[float]]
) -> dict[str, np.ndarray]:
    """The trial with losses out of the air, by sub-layer and cut."""
    left = {name: list(own) for name, own in losses.items()}
    monkeypatch.setattr(trials, "_lost", lambda m, b, w, sub: left[sub.name].pop(0))
    factors = curvatures(checkpoint.to_torch(), BATCHES, seed=0)
    found = trial_losses(checkpoint.to_torch(), BATCHES, shuffled(checkpoint.config), factors, damping=DAMPING)
    assert not any(left.values())
    return found


def test_between_cuts_the_logarithm_of_the_loss_is_linear(uneven: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 neurons 0, 1, 2, 4 and 6 are tried, of 2 heads 0 and 1; less than a millionth of the greatest is that."""
    losses = {
        sub.name: [1.0] * len({0, *(round(s * sub.count) for s in trials.SHARES)}) for sub in sublayers(uneven.config)
    }
    losses["encoder.1.ffn"] = [16.0, 8.0, 4.0, 1.0, 0.25]
    losses["encoder.1.mixer"] = [3.0, 0.0]
    found = with_losses(monkeypatch, uneven, losses)
    half, last = (4.0 * 1.0) ** 0.5, (0.25 * 16e-6) ** 0.5
    np.testing.assert_allclose(found["encoder.1.ffn"], [16, 8, 4, half, 1, 0.5, 0.25, last, 0], rtol=1e-9)
    np.testing.assert_allclose(found["encoder.1.mixer"], [3, 3e-6, 0], rtol=1e-9)


def test_the_numbers_tried_are_some_shares_of_all(uneven: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept units of the tried numbers are what projections are fitted to; heads: 0, 1, 2 of 2, 3 and 4."""
    asked: list[tuple[str, int]] = []

    def noted(weight: Tensor, factors: Curvature, kept: tuple[int, ...], sub: Sublayer, damping: float) -> Tensor:
        asked.append((sub.name, len(kept)))
        return refitted(weight, factors, kept, sub, damping)

    monkeypatch.setattr(trials, "refitted", noted)
    factors = curvatures(uneven.to_torch(), BATCHES, seed=0)
    recorder = Recorder()
    trial_losses(uneven.to_torch(), BATCHES, shuffled(uneven.config), factors, damping=DAMPING, progress=recorder)
    by_name: dict[str, list[int]] = {}
    for name, count in asked:
        by_name.setdefault(name, []).append(count)
    assert by_name["encoder.0.mixer"] == [0, 1, 2]
    assert by_name["encoder.1.mixer"] == [0, 1]
    assert by_name["encoder.2.mixer"] == [0, 1, 2, 3]
    assert by_name["encoder.0.ffn"] == [0, 1, 2, 5, 8]
    assert by_name["encoder.1.ffn"] == [0, 1, 2, 4, 6]
    assert recorder.work == [["try sub-layers cut alone", len(asked), len(asked), True]]


def test_the_model_is_as_before_bit_for_bit(uneven: Checkpoint) -> None:
    model = uneven.to_torch()
    factors = curvatures(uneven.to_torch(), BATCHES, seed=0)
    trial_losses(model, BATCHES, shuffled(uneven.config), factors, damping=DAMPING)
    assert all(torch.equal(value, uneven.state[name]) for name, value in model.state_dict().items())
    assert all(value.requires_grad for value in model.parameters())


class Recorder:
    def __init__(self) -> None:
        self.work: list[list] = []

    def start(self, title: str, total: int | None, unit: str) -> None:
        assert unit == "cuts"
        self.work.append([title, total, 0, False])

    def advance(self, n: int = 1, note: str = "") -> None:
        self.work[-1][2] += n

    def done(self, note: str = "") -> None:
        self.work[-1][3] = True
