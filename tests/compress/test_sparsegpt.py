"""Zeros by hand, against naive references with every inverse from scratch, and against what each method should lose."""

import pytest
import torch
from torch import Tensor

from slimformer.compress.sparsegpt import Choice, Pattern, magnitude, sparsegpt, wanda
from slimformer.transformer.errors import InputError

TWO_OF_FOUR = Pattern(2, 4)


def correlated(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weight (O, I), and x x^T of inputs that share directions and differ in size."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(400, inputs, generator=random).double() @ torch.randn(inputs, inputs, generator=random).double()
    x *= torch.rand(inputs, generator=random) + 0.2
    return torch.randn(outputs, inputs, generator=random), x.T @ x


def output_error(weight: Tensor, sparse: Tensor, gram: Tensor) -> float:
    change = weight.double() - sparse.double()
    return float((change @ gram * change).sum())


def naive(weight: Tensor, gram: Tensor, choice: Choice, columns: int, damping: float = 0.01) -> Tensor:
    """Each column moves those behind it by the inverse of what is left of the Hessian, row by row."""
    outputs, inputs = weight.shape
    hessian = gram + damping * gram.diagonal().mean() * torch.eye(inputs)
    inverses = [torch.linalg.inv(hessian[i:, i:]) for i in range(inputs)]
    left, done = weight.double().clone(), 0
    group = choice.group if isinstance(choice, Pattern) else columns
    for i in range(inputs):
        if i % group == 0:
            last = min(i + group, inputs)
            scores = {
                (row, j): float(left[row, j] ** 2 / inverses[j][0, 0]) for row in range(outputs) for j in range(i, last)
            }
            gone: set[tuple[int, int]] = set()
            if isinstance(choice, Pattern):
                for row in range(outputs):
                    own = sorted((place for place in scores if place[0] == row), key=scores.__getitem__)
                    gone |= set(own[: choice.group - choice.kept])
            else:
                count = round(choice * outputs * last)
                gone = set(sorted(scores, key=scores.__getitem__)[: count - done])
                done = count
        for row in range(outputs):
            if (row, i) in gone:
                left[row, i:] -= left[row, i] / inverses[i][0, 0] * inverses[i][0]
                left[row, i] = 0.0
    return left


@pytest.mark.parametrize("inputs", [24, 140])
@pytest.mark.parametrize(
    ("choice", "columns"),
    [(0.5, 8), (0.3, 12), (0.7, 128), (Pattern(2, 4), 128), (Pattern(1, 3), 128), (Pattern(2, 6), 128)],
)
def test_sparsegpt_is_the_update_by_explicit_inverses(choice: Choice, columns: int, inputs: int) -> None:
    if isinstance(choice, Pattern):
        inputs -= inputs % choice.group
    weight, gram = correlated(3, inputs)
    expected = naive(weight, gram, choice, columns)
    found = sparsegpt(weight.double(), gram, choice, columns=columns)
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_columns_over_a_lazy_batch_are_chosen_at_once() -> None:
    weight, gram = correlated(3, 210)
    expected = naive(weight, gram, 0.5, 200)
    torch.testing.assert_close(sparsegpt(weight.double(), gram, 0.5, columns=200), expected, rtol=1e-7, atol=1e-7)


def test_inputs_without_correlation_are_chosen_by_magnitude_and_move_nothing() -> None:
    weight, _ = correlated(6, 256)
    found = sparsegpt(weight, torch.eye(256), 0.25, damping=0.0)
    for half in (slice(0, 128), slice(128, 256)):
        least = weight[:, half].abs().flatten().sort().values[: 6 * 32]
        assert torch.equal(found[:, half], weight[:, half] * (weight[:, half].abs() > least[-1]))


WEIGHT = torch.tensor([[1.0, -5.0, 2.0, 6.0], [-3.0, 4.0, 7.0, -8.0]])
GRAM = torch.diag(torch.tensor([100.0, 1.0, 4.0, 0.01]))  # lengths 10, 1, 2, 0.1
BY_HAND = {
    "magnitude, whole matrix": (magnitude(WEIGHT, 0.5), [[0, -5, 0, 6], [0, 0, 7, -8]]),
    "magnitude, an odd share": (magnitude(WEIGHT, 0.375), [[0, -5, 0, 6], [0, 4, 7, -8]]),
    "magnitude, 2:4": (magnitude(WEIGHT, TWO_OF_FOUR), [[0, -5, 0, 6], [0, 0, 7, -8]]),
    "magnitude, 1:2": (magnitude(WEIGHT, Pattern(1, 2)), [[0, -5, 0, 6], [0, 4, 0, -8]]),
    # scores: 10 5 4 0.6; 30 4 14 0.8
    "Wanda, half of each row": (wanda(WEIGHT, GRAM, 0.5), [[1, -5, 0, 0], [-3, 0, 7, 0]]),
    "Wanda, a quarter of each row": (wanda(WEIGHT, GRAM, 0.25), [[1, -5, 2, 0], [-3, 4, 7, 0]]),
    "Wanda, 1:2": (wanda(WEIGHT, GRAM, Pattern(1, 2)), [[1, 0, 2, 0], [-3, 0, 7, 0]]),
    # scores: 100 25 16 0.36; 900 16 196 0.64
    "SparseGPT, half": (sparsegpt(WEIGHT, GRAM, 0.5, damping=0.0), [[1, -5, 0, 0], [-3, 0, 7, 0]]),
    "SparseGPT, three quarters": (sparsegpt(WEIGHT, GRAM, 0.75, damping=0.0), [[0, 0, 0, 0], [-3, 0, 7, 0]]),
    "SparseGPT, 1:2": (sparsegpt(WEIGHT, GRAM, Pattern(1, 2), damping=0.0), [[1, 0, 2, 0], [-3, 0, 7, 0]]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    found, expected = BY_HAND[name]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_what_stays_makes_up_for_what_goes() -> None:
    """0.4 goes; of inputs with x1 x2 = 0.5, the best second weight is 1 + 0.4 * 0.5."""
    gram = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    found = sparsegpt(torch.tensor([[0.4, 1.0]]), gram, Pattern(1, 2), damping=0.0)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.2]]))


@pytest.mark.parametrize("choice", [0.5, 0.8, TWO_OF_FOUR])
def test_the_output_is_kept_best_by_sparsegpt_and_better_by_wanda_than_by_magnitude(choice: Choice) -> None:
    weight, gram = correlated(40, 160)
    made = [sparsegpt(weight, gram, choice), wanda(weight, gram, choice), magnitude(weight, choice)]
    assert len({int((one == 0).sum()) for one in made}) == 1
    errors = [output_error(weight, one, gram) for one in made]
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.5, 0.77, 0.999])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_zeros_are_counted_exactly(method: str, share: float) -> None:
    weight, gram = correlated(7, 300)
    found = made(method, weight, gram, share)
    if method == "wanda":
        assert (found == 0).sum(1).tolist() == [round(share * 300)] * 7
    assert int((found == 0).sum()) == (7 * round(share * 300) if method == "wanda" else round(share * 7 * 300))
    assert found.dtype == weight.dtype
    assert found.is_contiguous()


def made(method: str, weight: Tensor, gram: Tensor, choice: Choice) -> Tensor:
    if method == "magnitude":
        return magnitude(weight, choice)
    return wanda(weight, gram, choice) if method == "wanda" else sparsegpt(weight, gram, choice)


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(4, 8), Pattern(1, 3)])
def test_a_pattern_holds_in_every_group(method: str, pattern: Pattern) -> None:
    weight, gram = correlated(9, 264)
    groups = made(method, weight, gram, pattern).reshape(9, -1, pattern.group)
    assert bool(((groups != 0).sum(2) == pattern.kept).all())


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_no_sparsity_changes_nothing_and_what_is_given_is_untouched(method: str) -> None:
    weight, gram = correlated(4, 140)
    before = weight.clone(), gram.clone()
    assert torch.equal(made(method, weight, gram, 0.0), weight)
    made(method, weight, gram, 0.5)
    assert torch.equal(weight, before[0])
    assert torch.equal(gram, before[1])


@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_inputs_that_were_never_seen_go_first_and_move_no_other(method: str) -> None:
    weight, gram = correlated(6, 40)
    unseen = torch.zeros(40, dtype=torch.bool)
    unseen[[3, 17, 39, 20]] = True
    gram = gram.masked_fill(unseen | unseen[:, None], 0.0)
    found = wanda(weight, gram, 0.1) if method == "wanda" else sparsegpt(weight, gram, 0.1, damping=0.0)
    assert bool((found[:, unseen] == 0).all())
    torch.testing.assert_close(found[:, ~unseen], weight[:, ~unseen], rtol=0, atol=0)


def test_of_inputs_that_were_never_seen_the_least_weights_go() -> None:
    """They count with what damping adds: a hundredth of the mean diagonal, 1, of those that were seen."""
    gram = torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    found = sparsegpt(torch.tensor([[1.0, 3.0, 2.0, 0.5], [1.0, 11.0, 9.0, 1.0]]), gram, 0.25)
    # w^2 d: 1.01 0.09 0.04 0.25; 1.01 1.21 0.81 1.01
    assert torch.equal(found, torch.tensor([[1.0, 0.0, 0.0, 0.5], [1.0, 11.0, 9.0, 1.0]]))


def test_an_unseen_column_weighs_what_damping_adds() -> None:
    gram = torch.diag(torch.tensor([1.0, 0.0]))
    for weight, gone in ((9.9, 1), (10.1, 0)):  # 1.01 against 0.01 w^2, which are equal at w = 10.05
        found = sparsegpt(torch.tensor([[1.0, weight]]), gram, 0.5)
        assert (found[0] == 0).tolist() == [gone == 0, gone == 1]


def test_zeros_that_are_there_count() -> None:
    weight, gram = correlated(8, 64)
    half = magnitude(weight, 0.5)
    assert torch.equal(magnitude(half, 0.5), half)
    assert torch.equal(half, magnitude(weight, 0.5))
    gone = sparsegpt(half, gram, 0.7) == 0
    assert int(gone.sum()) == round(0.7 * 8 * 64)


def test_equal_values_go_in_order() -> None:
    assert magnitude(torch.ones(2, 3), 0.5).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert wanda(torch.ones(2, 3), torch.eye(3), 1 / 3).tolist() == [[0, 1, 1], [0, 1, 1]]


def test_patterns_are_read() -> None:
    assert Pattern.parse("2:4") == Pattern(2, 4)
    assert Pattern.parse("16:32") == Pattern(16, 32)
    assert Pattern(1, 4).sparsity == 0.75


@pytest.mark.parametrize("text", ["", "2", "2/4", "2:4:8", " 2:4", "-1:4", "a:b", "2:", "٢:٤", "2:4\n"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not N:M such as 2:4"):
        Pattern.parse(text)


@pytest.mark.parametrize("text", ["0:4", "4:4", "5:4"])
def test_patterns_that_keep_nothing_or_all_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"pattern {text} is not N:M with N from 1 to below M"):
        Pattern.parse(text)


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_groups_that_are_not_whole_are_refused(method: str) -> None:
    weight, gram = correlated(4, 10)  # 40 weights: whole groups, but across rows
    with pytest.raises(InputError, match="not whole groups of 4"):
        made(method, weight, gram, TWO_OF_FOUR)


@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused(method: str, value: float) -> None:
    weight, gram = correlated(4, 12)
    gram[2, 2] = value
    with pytest.raises(InputError, match="not finite"):
        made(method, weight, gram, 0.5)
