from dataclasses import replace

import numpy as np
import pytest
import torch

from slimformer.compress.refit import LeastSquares, refit
from slimformer.compress.surgery import Kept, remove_from
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.packing import Packing

CPU = torch.device("cpu")
LENGTHS = torch.arange(40) % 6 + 3
MASK = (torch.arange(8) < LENGTHS[:, None]).long()
IDS = torch.randint(4, 24, MASK.shape, generator=torch.Generator().manual_seed(0)) * MASK
BATCHES = [(IDS[:15], MASK[:15]), (IDS[15:], MASK[15:])]


def streamed(a: np.ndarray, r: np.ndarray) -> LeastSquares:
    fit = LeastSquares(inputs=a.shape[1], outputs=r.shape[1], device=CPU)
    for rows in np.array_split(np.arange(len(a)), 4):
        fit.add(torch.from_numpy(a[rows]), torch.from_numpy(r[rows]))
    return fit


def test_least_squares_is_numpys() -> None:
    rng = np.random.default_rng(0)
    a, r = rng.normal(size=(60, 5)) + 3, rng.normal(size=(60, 2)) - 1
    weight, bias = streamed(a, r).solve(0.0)
    expected, residuals, *_ = np.linalg.lstsq(np.hstack([a, np.ones((60, 1))]), r, rcond=None)
    np.testing.assert_allclose(weight.numpy(), expected[:-1].T, atol=1e-10)
    np.testing.assert_allclose(bias.numpy(), expected[-1], atol=1e-10)
    fit = streamed(a, r)
    assert fit.before == pytest.approx((r**2).sum())
    assert fit.after(weight, bias) == pytest.approx(residuals.sum())


def test_damping_is_ridge_without_the_bias() -> None:
    """The same as rows sqrt(damping * scale) * I with target 0 under the centred activations."""
    rng = np.random.default_rng(1)
    a, r = rng.normal(size=(40, 4)) * [1, 2, 3, 4] + 5, rng.normal(size=(40, 3))
    weight, bias = streamed(a, r).solve(0.3)
    centred = a - a.mean(0)
    strength = 0.3 * (centred**2).sum(0).mean()
    rows = np.vstack([centred, np.sqrt(strength) * np.eye(4)])
    expected, *_ = np.linalg.lstsq(rows, np.vstack([r - r.mean(0), np.zeros((4, 3))]), rcond=None)
    np.testing.assert_allclose(weight.numpy(), expected.T, atol=1e-10)
    np.testing.assert_allclose(bias.numpy(), r.mean(0) - a.mean(0) @ expected, atol=1e-10)


def test_copied_columns_without_damping_still_fit() -> None:
    rng = np.random.default_rng(2)
    a = rng.normal(size=(30, 2))
    a = np.hstack([a, a[:, :1], np.zeros((30, 1))])
    r = a[:, :2] @ rng.normal(size=(2, 2))
    fit = streamed(a, r)
    weight, bias = fit.solve(0.0)
    assert fit.after(weight, bias) < 1e-12 * fit.before


def test_no_inputs_give_the_mean() -> None:
    r = np.array([[1.0, 2.0], [3.0, 6.0]])
    weight, bias = streamed(np.zeros((2, 0)), r).solve(1e-3)
    assert weight.shape == (2, 0)
    assert bias.tolist() == [2.0, 4.0]


def test_first_two_sublayers_are_numpys_on_the_concatenated_tokens(uneven: Checkpoint) -> None:
    """Written out once more with numpy: targets are the unpruned sums x + f(x) less the pruned model's tokens."""
    kept = Kept((0, 1, 2), ((0, 2), (1,), (0, 3)), ((1, 2, 3), (0, 7), (3,)))
    small = remove_from(uneven, kept)
    full, pruned = uneven.to_torch(), small.to_torch()
    state, fits = refit(uneven.to_torch(), small.to_torch(), kept.layers, BATCHES, damping=0.0)
    packing = Packing.from_mask(MASK)
    with torch.no_grad():
        x = full.embeddings(packing.pack(IDS), packing.positions, None)
        wanted = x + full.encoder[0].mixer(x, packing)
        a = pruned.encoder[0].mixer.mix(x, packing)
        solution, *_ = np.linalg.lstsq(with_ones(a), (wanted - x).double().numpy(), rcond=None)
        fitted = torch.from_numpy(with_ones(a) @ solution).float()
        below, y = full.encoder[0].mixer_norm(wanted), pruned.encoder[0].mixer_norm(x + fitted)
        wanted = below + full.encoder[0].ffn(below)
        b = pruned.encoder[0].ffn.activation(pruned.encoder[0].ffn.up(y))
        target = (wanted - y).double().numpy()
        second, *_ = np.linalg.lstsq(with_ones(b), target, rcond=None)
    mine = state["encoder.0.mixer.out.weight"] @ a.T + state["encoder.0.mixer.out.bias"][:, None]
    np.testing.assert_allclose(mine.T.numpy(), fitted.numpy(), atol=1e-4)
    np.testing.assert_allclose(state["encoder.0.ffn.down.weight"].numpy(), second[:-1].T, atol=1e-3)
    np.testing.assert_allclose(state["encoder.0.ffn.down.bias"].numpy(), second[-1], atol=1e-3)
    error = np.linalg.norm(with_ones(b) @ second - target) / np.linalg.norm(target)
    assert fits[1].after == pytest.approx(error, abs=1e-3)
    assert all(fit.after <= fit.before + 1e-6 for fit in fits)
    assert [(fit.layer, fit.part) for fit in fits[:3]] == [(0, "mixer"), (0, "ffn"), (1, "mixer")]


def with_ones(a: torch.Tensor) -> np.ndarray:
    return np.hstack([a.double().numpy(), np.ones((len(a), 1))])


def test_absent_sublayer_gets_the_mean_of_its_target(uneven: Checkpoint) -> None:
    kept = Kept((0, 1, 2), ((), (0, 1), (0, 1, 2, 3)), (tuple(range(10)), tuple(range(8)), tuple(range(6))))
    small = remove_from(uneven, kept)
    state, _ = refit(uneven.to_torch(), small.to_torch(), kept.layers, BATCHES)
    packing, full = Packing.from_mask(MASK), uneven.to_torch()
    with torch.no_grad():
        x = full.embeddings(packing.pack(IDS), packing.positions, None)
        expected = full.encoder[0].mixer(x, packing).mean(0)
    torch.testing.assert_close(state["encoder.0.mixer.bias"], expected, atol=1e-5, rtol=1e-5)


def test_nothing_removed_stays_as_it_is(uneven: Checkpoint) -> None:
    state, fits = refit(uneven.to_torch(), uneven.to_torch(), (0, 1, 2), BATCHES)
    assert max(fit.before for fit in fits) < 1e-6
    again = replace(uneven, state=state).to_torch()(IDS, MASK)
    torch.testing.assert_close(again.hidden, uneven.to_torch()(IDS, MASK).hidden, atol=1e-5, rtol=1e-5)


def test_skipped_layers_are_passed_by_the_unpruned_model(uneven: Checkpoint) -> None:
    """The only layer left, number 2, aims at the unpruned tokens after layer 2's mixer."""
    kept = Kept.everything(uneven.config, (2,))
    small = remove_from(uneven, kept)
    _, fits = refit(uneven.to_torch(), small.to_torch(), kept.layers, BATCHES, damping=1e-3)
    packing, full = Packing.from_mask(MASK), uneven.to_torch()
    with torch.no_grad():
        x = full.embeddings(packing.pack(IDS), packing.positions, None)
        deep = full.encoder[1](full.encoder[0](x, packing), packing)
        target = deep + full.encoder[2].mixer(deep, packing) - x
        error = (target - full.encoder[2].mixer(x, packing)).norm() / target.norm()
    assert fits[0].before == pytest.approx(float(error), rel=1e-4)
    assert fits[0].after < fits[0].before
