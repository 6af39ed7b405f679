import numpy as np
import pytest
import torch

from slimformer.compress.least_squares import LeastSquares, conjugate_gradients


def streamed(a: np.ndarray, r: np.ndarray) -> LeastSquares:
    fit = LeastSquares(inputs=a.shape[1], outputs=r.shape[1], device=torch.device("cpu"))
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


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_some_places_are_each_rows_own_least_squares(damping: float) -> None:
    """Row by row by numpy with the columns of its places alone, centred; ridge rows as strong as for all columns."""
    rng = np.random.default_rng(3)
    a, r = rng.normal(size=(80, 6)) @ rng.normal(size=(6, 6)) + 2, rng.normal(size=(80, 4)) + 1
    places = rng.random((4, 6)) < 0.5
    places[0], places[1] = True, False
    weight, bias = streamed(a, r).solve_at(torch.from_numpy(places), damping)
    centred, about = a - a.mean(0), r - r.mean(0)
    strength = damping * (centred**2).sum(0).mean()
    for row, columns in enumerate(places):
        count = int(columns.sum())
        rows = np.vstack([centred[:, columns], np.sqrt(strength) * np.eye(count)])
        expected = np.linalg.lstsq(rows, np.append(about[:, row], np.zeros(count)), rcond=None)[0]
        np.testing.assert_allclose(weight[row, columns].numpy(), expected, atol=1e-5)
        assert not weight[row, ~columns].any()
        assert float(bias[row]) == pytest.approx(r[:, row].mean() - a[:, columns].mean(0) @ expected, abs=1e-5)
    whole, _ = streamed(a, r).solve(damping)
    np.testing.assert_allclose(weight[0].numpy(), whole[0].numpy(), atol=1e-5)


def test_some_places_of_copied_and_empty_columns_without_damping_still_fit() -> None:
    rng = np.random.default_rng(4)
    a = rng.normal(size=(30, 3))
    a = np.hstack([a, a[:, :1], np.zeros((30, 1))])
    r = a[:, :2] @ rng.normal(size=(2, 2))
    fit = streamed(a, r)
    weight, bias = fit.solve_at(torch.tensor([[True, True, False, True, True], [False, True, True, True, True]]), 0.0)
    assert bool(weight.isfinite().all())
    assert fit.after(weight, bias) < 1e-10 * fit.before


def test_conjugate_gradients_solve_badly_scaled_rows() -> None:
    """Diagonals from 1e-6 to 1e6, and rows of sizes as unlike: each is solved to its own precision."""
    rng = np.random.default_rng(5)
    scales = 10.0 ** np.linspace(-3, 3, 12)
    mixed = rng.normal(size=(40, 12))
    gram = (mixed.T @ mixed / 40) * np.outer(scales, scales)
    wanted = rng.normal(size=(3, 12)) * scales * np.array([[1e-6], [1.0], [1e6]])
    places = rng.random((3, 12)) < 0.6
    found = conjugate_gradients(*map(torch.from_numpy, (gram, wanted, places))).numpy()
    for row, columns in enumerate(places):
        own = gram[np.ix_(columns, columns)]
        left = np.linalg.norm(own @ found[row, columns] - wanted[row, columns])
        assert left < 1e-5 * np.linalg.norm(wanted[row, columns])


def test_nothing_to_change_changes_nothing() -> None:
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    assert torch.equal(conjugate_gradients(torch.zeros(3, 3).double(), zeros, zeros == 0), zeros)
