"""Compensated rounding by hand, against the recursion with every inverse from scratch, and against all integers."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from slimformer.compress.gptq import LAZY, Gram, Scales, round_compensated
from slimformer.transformer.errors import InputError

CPU = torch.device("cpu")


def greatest(limit: int) -> Scales:
    return lambda weight: (weight.abs().amax(1) / limit).clamp(min=1e-30)


def fixed(scale: float) -> Scales:
    return lambda weight: torch.full((len(weight),), scale, dtype=torch.float64)


def correlated(outputs: int, inputs: int, rows: int = 500) -> tuple[Tensor, Tensor]:
    """Weight (O, I), and x x^T of inputs that share directions and differ in size."""
    x = torch.randn(rows, inputs).double() @ torch.randn(inputs, inputs).double() * (torch.rand(inputs) + 0.2)
    return torch.randn(outputs, inputs), x.T @ x


def nearest(weight: Tensor, scale: Tensor, limits: tuple[int, int]) -> Tensor:
    return (weight.double() / scale.double()).round().clamp(*limits)


def output_error(weight: Tensor, rounded: Tensor, gram: Tensor) -> float:
    change = weight.double() - rounded.double()
    return float((change @ gram * change).sum())


def obq(
    weight: Tensor,
    gram: Tensor,
    scales: Scales,
    *,
    limits: tuple[int, int],
    block: int,
    damping: float = 0.01,
    ordered: bool = True,
) -> tuple[Tensor, Tensor]:
    """Each column moves those behind it by the inverse of what is left of the Hessian, from scratch each time."""
    inputs = weight.shape[1]
    hessian = gram + damping * gram.diagonal().mean() * torch.eye(inputs)
    rest = sorted(range(inputs), key=lambda i: -float(gram[i, i])) if ordered else list(range(inputs))
    given = weight.double()
    left, integers, steps = given.clone(), torch.zeros_like(given), torch.zeros(len(weight), -(-inputs // block))
    for number in range(steps.shape[1]):
        steps[:, number] = scales(given[:, number * block : number * block + block])
    while rest:
        i = rest[0]
        if not ordered and i % block == 0:
            steps[:, i // block] = scales(left[:, i : i + block])
        step = steps[:, i // block].double()
        integers[:, i] = nearest(left[:, i], step, limits)
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        left[:, rest] -= torch.outer((left[:, i] - integers[:, i] * step) / inverse[0, 0], inverse[0])
        rest.pop(0)
    return integers, steps


# weights, x x^T, limits, ordered, integers; the scale is 1 and nothing is damped
BY_HAND = {
    # 0.4 -> 0 leaves 0.4; given that, 0.4 + 0.4 * 0.5 = 0.6 is the best second weight -> 1
    "an error moves the next": ([0.4, 0.4], [[1.0, 0.5], [0.5, 1.0]], (-8, 7), False, [0, 1]),
    "against its direction": ([0.4, 0.4], [[1.0, -0.5], [-0.5, 1.0]], (-8, 7), False, [0, 0]),  # 0.4 - 0.2
    # 0.45 -> 0; 0.45 + 0.45 * 1 / 4 = 0.5625 -> 1
    "left to right": ([0.45, 0.45], [[1.0, 1.0], [1.0, 4.0]], (-8, 7), False, [0, 1]),
    # the second first: 0.45 -> 0; 0.45 + 0.45 * 1 / 1 = 0.9 -> 1
    "greatest diagonal first": ([0.45, 0.45], [[1.0, 1.0], [1.0, 4.0]], (-8, 7), True, [1, 0]),
    # 3 -> 1 leaves 2; 0.3 + 2 * 0.25 = 0.8 -> 1, which nearest would have at 0
    "what is cut off counts": ([3.0, 0.3], [[1.0, 0.25], [0.25, 1.0]], (-1, 1), False, [1, 1]),
    "half to even": ([0.5, 1.5, 2.5], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], (-8, 7), False, [0, 2, 2]),
    # 0.5 -> 0; 1.25 + 0.5 * 2 / 4 = 1.5 -> 2, and with any damping 1; a column without inputs asks for none
    "beside one unseen": (
        [0.5, 1.25, 0.6],
        [[2.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]],
        (-8, 7),
        False,
        [0, 2, 1],
    ),
    # 0.4 -> 0 leaves 0.4; [1 0.5; 0.5 1] c = 0.4 [0.5 0.5] has c = [0.1333 0.1333], so 0.5333 -> 1 and 0.3333, which
    # half of 0.5333 - 1 moves to 0.1 -> 0
    "three": ([0.4, 0.4, 0.2], [[1.0, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 1.0]], (-8, 7), False, [0, 1, 0]),
    # 0.4 -> 0; 0.3 + 0.1333 = 0.4333 -> 0; 0.4 + 0.1333 + 0.4333 / 2 = 0.75 -> 1
    "two errors on one": (
        [0.4, 0.3, 0.4],
        [[1.0, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 1.0]],
        (-8, 7),
        False,
        [0, 0, 1],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    weight, gram, limits, ordered, expected = BY_HAND[name]
    found, scale = round_compensated(
        torch.tensor([weight]),
        torch.tensor(gram, dtype=torch.float64),
        fixed(1.0),
        limits=limits,
        block=len(weight),
        damping=0.0,
        ordered=ordered,
    )
    assert found.tolist() == [expected]
    assert scale.tolist() == [[1.0]]
    assert (found.dtype, scale.dtype) == (torch.int8, torch.float32)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [
        (1, 1, 1),
        (3, 2, 2),
        (6, 24, 24),
        (6, 24, 99),  # one scale a row
        (6, 24, 8),
        (5, 30, 8),  # the last block has 6 columns
        (4, 7, 1),
    ],
)
@pytest.mark.parametrize(
    ("limits", "damping"), [((-127, 127), 0.01), ((-64, 64), 0.1), ((-8, 7), 0.0), ((-2, 1), 0.01)]
)
def test_integers_are_those_of_the_recursion(
    outputs: int, inputs: int, block: int, limits: tuple[int, int], damping: float, ordered: bool
) -> None:
    weight, gram = correlated(outputs, inputs)
    options = {"limits": limits, "block": block, "damping": damping, "ordered": ordered}
    found, scale = round_compensated(weight, gram, greatest(-limits[0]), **options)
    expected, steps = obq(weight, gram, greatest(-limits[0]), **options)
    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(scale, steps)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("block", [32, 60, 150, 200])
def test_batches_of_columns_change_nothing(block: int, ordered: bool) -> None:
    """Blocks that divide a batch, do not, are wider than one, and are all."""
    weight, gram = correlated(4, 200)
    assert LAZY < 200 < 2 * LAZY
    options = {"limits": (-8, 7), "block": block, "ordered": ordered}
    found, scale = round_compensated(weight, gram, greatest(8), **options)
    expected, steps = obq(weight, gram, greatest(8), **options)
    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(scale, steps)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("limits", [(-127, 127), (-64, 64), (-8, 7), (-1, 1)])
def test_inputs_apart_are_rounded_to_nearest(limits: tuple[int, int], ordered: bool) -> None:
    weight = torch.randn(7, 20) * 3
    gram = torch.diag(torch.rand(20).double() + 0.1)
    scale = (weight.abs().amax(1) / limits[1]).clamp(min=1e-30)[:, None]
    found, steps = round_compensated(weight, gram, greatest(limits[1]), limits=limits, block=20, ordered=ordered)
    assert torch.equal(steps, scale)
    assert found.tolist() == nearest(weight, scale, limits).tolist()


def test_integers_fit_the_scale_in_float32() -> None:
    """0.75 / 0.1 is 7.5, which would be 8; the float32 next to 0.1 lies above it."""
    weight = torch.tensor([[0.75]], dtype=torch.float64)
    found, scale = round_compensated(weight, torch.eye(1).double(), fixed(0.1), limits=(-127, 127), block=1)
    assert found.item() == 7
    assert scale.item() == np.float32(0.1)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("block", [32, 96])
@pytest.mark.parametrize("limit", [8, 127])
def test_the_output_is_nearer_than_with_nearest_rounding(limit: int, block: int, ordered: bool) -> None:
    """In order 0.30 to 0.35 of its error is left, from left to right 0.47 to 0.56."""
    weight, gram = correlated(40, 96)
    limits = (-limit, limit - 1)
    found, scale = round_compensated(weight, gram, greatest(limit), limits=limits, block=block, ordered=ordered)
    assert scale.shape == (40, 96 // block)
    plain = (weight.view(40, -1, block).abs().amax(2) / limit).repeat_interleave(block, 1)
    before = output_error(weight, nearest(weight, plain, limits) * plain, gram)
    after = output_error(weight, found * scale.repeat_interleave(block, 1), gram)
    assert 0 < after < (0.4 if ordered else 0.6) * before


def test_between_the_best_integers_and_the_nearest() -> None:
    limits, errors = (-2, 1), []
    every = torch.tensor(list(product(range(-2, 2), repeat=4))).double()
    for _ in range(60):
        weight, gram = correlated(1, 4, rows=20)
        found, scale = round_compensated(weight, gram, greatest(2), limits=limits, block=4, damping=0.0)
        best = min(output_error(weight, integers * scale.double(), gram) for integers in every)
        mine, plain = (output_error(weight, q * scale.double(), gram) for q in (found, nearest(weight, scale, limits)))
        assert mine >= best * (1 - 1e-9)
        errors.append((best, mine, plain))
    best, mine, plain = np.array(errors).T
    assert (mine - best).sum() < 0.3 * (plain - best).sum()  # 0.17
    assert (mine <= plain).mean() > 0.8  # 0.93


@pytest.mark.parametrize("ordered", [True, False])
def test_columns_without_inputs_are_rounded_and_move_nothing(ordered: bool) -> None:
    weight, gram = correlated(6, 20)
    unseen = torch.tensor([0, 7, 8, 19])
    seen = torch.tensor([i for i in range(20) if i not in unseen.tolist()])
    gram.diagonal()[unseen] = 0.0  # what stands beside it does not count: squares that vanish in float32 may leave it
    options = {"limits": (-8, 7), "ordered": ordered}
    found, _ = round_compensated(weight, gram, fixed(0.3), block=20, **options)
    alone, _ = round_compensated(weight[:, seen], gram[seen][:, seen], fixed(0.3), block=16, **options)
    assert found[:, unseen].tolist() == nearest(weight[:, unseen], torch.tensor(0.3), (-8, 7)).tolist()
    assert torch.equal(found[:, seen], alone)


def test_no_inputs_at_all_is_nearest_rounding() -> None:
    weight = torch.randn(3, 5)
    found, _ = round_compensated(weight, torch.zeros(5, 5).double(), fixed(0.5), limits=(-2, 1), block=2, damping=0.0)
    assert found.tolist() == nearest(weight, torch.tensor(0.5), (-2, 1)).tolist()


def test_rows_of_zeros_stay_zeros() -> None:
    weight, gram = correlated(4, 150)
    weight[1] = 0.0
    weight[2, 40:80] = 0.0
    found, scale = round_compensated(weight, gram, greatest(127), limits=(-127, 127), block=40)
    assert not found[1].any()
    assert found[2].any()
    assert bool((scale.isfinite() & (scale > 0)).all())


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("damping", [0.0, 1e-12, 0.01])
def test_fewer_rows_than_columns(damping: float, ordered: bool) -> None:
    weight, gram = correlated(8, 60, rows=15)
    found, scale = round_compensated(
        weight, gram, greatest(8), limits=(-8, 7), block=60, damping=damping, ordered=ordered
    )
    plain = output_error(weight, nearest(weight, scale, (-8, 7)) * scale.double(), gram)
    assert output_error(weight, found * scale, gram) < (0.06 if ordered else 0.2) * plain  # 0.04 and 0.13


def test_copies_share_an_error_without_damping() -> None:
    """Three copies, each 0.4: the first adds 0.2 to either of the others; 0.6 -> 1, then 0.6 - 0.4 = 0.2 -> 0."""
    found, _ = round_compensated(
        torch.tensor([[0.4, 0.4, 0.4]]),
        torch.ones(3, 3).double(),
        fixed(1.0),
        limits=(-8, 7),
        block=3,
        damping=0.0,
        ordered=False,
    )
    assert found.tolist() == [[0, 1, 0]]


def test_pivots_of_nothing_but_rounding_are_damped() -> None:
    """Of a column and 0.7 of it the second pivot is 0 but for rounding: by chance above 0, and then it factors."""
    factored = 0
    for _ in range(40):
        x = torch.randn(50, 8).double()
        x[:, 7] = 0.7 * x[:, 6]
        weight, gram = torch.randn(6, 8), x.T @ x
        factored += not torch.linalg.cholesky_ex(gram.flip(0, 1))[1]
        options = {"limits": (-8, 7), "block": 8, "ordered": False}
        found, _ = round_compensated(weight, gram, greatest(8), damping=0.0, **options)
        assert found.tolist() == obq(weight, gram, greatest(8), damping=1e-8, **options)[0].tolist()
    assert factored > 0


def test_damping_grows_tenfold_until_it_does() -> None:
    """[1 5; 5 1] + d factors beyond d = 4: of 0.01, 0.1, 1, 10 with the last, and 0.45 + 0.45 * 5 / 11 = 0.65 -> 1.

    With 100 the second weight would be 0.45 + 0.45 * 5 / 101 = 0.47 -> 0.
    """
    gram = torch.tensor([[1.0, 5.0], [5.0, 1.0]]).double()
    found, _ = round_compensated(torch.tensor([[0.45, 0.45]]), gram, fixed(1.0), limits=(-8, 7), block=2)
    assert found.tolist() == [[0, 1]]


@pytest.mark.parametrize("ordered", [True, False])
def test_outliers(ordered: bool) -> None:
    """One input a thousand times as large, one weight a hundred times: as the recursion has them, at the limits."""
    weight, gram = correlated(6, 30)
    size = torch.ones(30).index_fill(0, torch.tensor(11), 1000.0)
    gram *= torch.outer(size, size)
    weight[2, 5], weight[3, 6] = 100.0, -100.0
    options = {"limits": (-8, 7), "block": 10, "ordered": ordered, "damping": 1e-6}
    found, scale = round_compensated(weight, gram, greatest(8), **options)
    assert found.tolist() == obq(weight, gram, greatest(8), **options)[0].tolist()
    assert int(found[2].max()) == 7
    assert int(found[3].min()) == -8
    assert scale[2:4, 0].tolist() == [12.5, 12.5]


@pytest.mark.parametrize("limits", [(-127, 127), (-64, 64), (-8, 7), (-2, 1)])
def test_integers_end_at_the_limits(limits: tuple[int, int]) -> None:
    weight, gram = correlated(10, 140)
    found, _ = round_compensated(weight * 300, gram, fixed(1.0), limits=limits, block=140)
    assert (int(found.min()), int(found.max())) == limits


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_given_stays_as_it_is(dtype: torch.dtype, ordered: bool) -> None:
    weight, gram = correlated(4, 12)
    weight = weight.to(dtype).requires_grad_()
    gram[3], gram[:, 3] = 0.0, 0.0
    before = weight.detach().clone(), gram.clone()
    _, scale = round_compensated(weight, gram, greatest(8), limits=(-8, 7), block=5, ordered=ordered)
    assert torch.equal(weight.detach(), before[0])
    assert torch.equal(gram, before[1])
    assert not scale.requires_grad


def test_a_linear_without_inputs() -> None:
    found, scale = round_compensated(
        torch.zeros(3, 0), torch.zeros(0, 0).double(), greatest(8), limits=(-8, 7), block=4
    )
    assert (found.shape, scale.shape) == ((3, 0), (3, 0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    weight, gram = correlated(2, 3)
    gram[1, 2] = value
    with pytest.raises(InputError, match="not finite"):
        round_compensated(weight, gram, greatest(8), limits=(-8, 7), block=3)


def test_what_never_factors_is_refused() -> None:
    with pytest.raises(InputError, match="no sum of squares"):
        round_compensated(torch.ones(1, 2), -torch.eye(2).double(), greatest(8), limits=(-8, 7), block=2)


def test_gram_is_numpys() -> None:
    x = np.random.default_rng(0).normal(size=(70, 9)) + 2
    gram = Gram(inputs=9, device=CPU)
    for rows in np.array_split(x, [0, 1, 30, 64]):  # the first without rows
        gram.add(torch.from_numpy(rows))
    np.testing.assert_allclose(gram.matrix.numpy(), np.einsum("ni,nj->ij", x, x), rtol=1e-12)
    assert gram.rows == 70


def test_gram_sums_float32_rows_in_float64() -> None:
    gram = Gram(inputs=1, device=CPU)
    for value in (4096.0, 1.0, 1.0, 1.0):  # beyond 2**24 float32 does not count by ones
        gram.add(torch.tensor([[value]], requires_grad=True))
    assert gram.matrix.tolist() == [[2.0**24 + 3]]
    assert gram.matrix.dtype == torch.float64
    assert not gram.matrix.requires_grad


@pytest.mark.parametrize(("block", "ordered"), [(9, True), (3, False)])
def test_weights_of_exactly_0_stay_and_the_others_make_up_for_them(block: int, ordered: bool) -> None:
    torch.manual_seed(3)
    weight, gram = correlated(6, 9)
    weight[torch.rand(6, 9) < 0.5] = 0.0
    integers, scale = round_compensated(weight, gram, greatest(8), limits=(-8, 7), block=block, ordered=ordered)
    assert bool((integers[weight == 0] == 0).all())
    columns = torch.arange(9) // block
    error = weight.double() - integers.double() * scale.double()[:, columns]
    plain = (weight.double() / scale.double()[:, columns]).round().clamp(-8, 7) * scale.double()[:, columns]
    rounded = weight.double() - plain
    assert float(((error @ gram) * error).sum()) < float(((rounded @ gram) * rounded).sum())
