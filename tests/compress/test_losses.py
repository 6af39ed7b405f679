"""Losses against values worked out by hand and by numpy, and their gradients against differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from slimformer.compress.losses import (
    cka_loss,
    cosine_loss,
    hidden_loss,
    index_loss,
    label_loss,
    likeliest_loss,
    logits_loss,
    nested_loss,
    similarity_loss,
)

RANDOM = np.random.default_rng(0)
STUDENT, TEACHER = RANDOM.normal(size=(5, 4)), RANDOM.normal(size=(5, 4))
WIDE = RANDOM.normal(size=(5, 7))


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a @ b.T) / np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))


def test_logits_loss_by_hand() -> None:
    """p = softmax([1, 0]) = (0.731059, 0.268941), q = (0.5, 0.5): 4 sum p ln(p / q); its gradient is 2 (q - p)."""
    student = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    loss = logits_loss(student, torch.tensor([[2.0, 0.0]], dtype=torch.float64), 2.0)
    assert loss.item() == pytest.approx(0.443776, abs=1e-6)
    loss.backward()
    assert student.grad is not None
    assert student.grad.tolist() == [pytest.approx([-0.462117, 0.462117], abs=1e-6)]


def test_logits_loss_is_a_mean_over_texts_and_a_sum_over_classes() -> None:
    student = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    loss = logits_loss(student, teacher, 2.0)
    assert loss.item() == pytest.approx(2 * 0.443776 / 3, abs=1e-6)
    loss.backward()
    assert student.grad is not None
    expected = np.array([[-1, 1], [0, 0], [1, -1]]) * 0.462117 / 3
    np.testing.assert_allclose(student.grad.numpy(), expected, atol=1e-6)


def test_logits_loss_at_temperature_one_is_the_divergence() -> None:
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (TEACHER, STUDENT))
    expected = (p * np.log(p / q)).sum(1).mean()
    assert logits_loss(tensor(STUDENT), tensor(TEACHER), 1.0).item() == pytest.approx(expected)


def likeliest(student: torch.Tensor, keep: int, temperature: float = 3.0) -> torch.Tensor:
    """The loss against the `keep` likeliest classes of TEACHER."""
    found = (torch.tensor(TEACHER) / temperature).log_softmax(1).topk(keep)
    return likeliest_loss(student, found.indices, found.values, temperature)


def test_likeliest_loss_by_hand_has_one_class_for_the_others() -> None:
    """Teacher (1/2, 1/4, 1/4), student (1/3, 1/3, 1/3), first class kept: ln(3/2) / 2 + ln(3/4) / 2."""
    teacher = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    loss = likeliest_loss(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[0]]), teacher[:, :1].log(), 1.0)
    assert loss.item() == pytest.approx((math.log(3 / 2) + math.log(3 / 4)) / 2)


def test_likeliest_loss_grows_with_the_classes_to_that_of_all() -> None:
    losses = [likeliest(tensor(STUDENT), keep).item() for keep in (1, 2, 3, 4)]
    assert losses == sorted(losses)
    assert losses[0] < losses[2]
    assert losses[3] == pytest.approx(logits_loss(tensor(STUDENT), tensor(TEACHER), 3.0).item())


def test_likeliest_loss_of_a_teacher_who_is_sure_is_finite() -> None:
    sure = torch.tensor([[0.0, 0.0]])
    assert math.isfinite(likeliest_loss(torch.tensor([[99.0, 0.0, 0.0]]), torch.tensor([[0, 1]]), sure, 1.0).item())


def test_cosine_loss_by_numpy() -> None:
    expected = 1 - np.diag(cosines(STUDENT, TEACHER)).mean()
    assert cosine_loss(tensor(STUDENT), tensor(TEACHER)).item() == pytest.approx(expected)
    assert cosine_loss(tensor(STUDENT), tensor(3 * STUDENT)).item() == pytest.approx(0, abs=1e-12)
    assert cosine_loss(tensor(STUDENT), tensor(-STUDENT)).item() == pytest.approx(2)


def test_similarity_loss_by_numpy_for_other_widths() -> None:
    expected = ((cosines(STUDENT, STUDENT) - cosines(WIDE, WIDE)) ** 2).mean()
    assert similarity_loss(tensor(STUDENT), tensor(WIDE)).item() == pytest.approx(expected)
    turned = np.linalg.qr(RANDOM.normal(size=(4, 4)))[0]
    assert similarity_loss(tensor(STUDENT), tensor(STUDENT @ turned)).item() == pytest.approx(0, abs=1e-12)


def test_hidden_loss_is_relative_to_the_teacher() -> None:
    expected = ((STUDENT - TEACHER) ** 2).mean()
    assert hidden_loss(tensor(STUDENT), tensor(TEACHER), 1.0).item() == pytest.approx(expected)
    assert hidden_loss(tensor(STUDENT), tensor(TEACHER), 4.0).item() == pytest.approx(expected / 4)


def test_label_loss_by_hand_leaves_out_texts_without_a_label() -> None:
    """-ln softmax([0, ln 3])[1] = ln(4/3); the second text has no label, the third is -ln(1/2)."""
    logits = torch.tensor([[0.0, math.log(3)], [9.0, -9.0], [5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    loss = label_loss(logits, torch.tensor([1, -1, 0]))
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0, 0]
    assert logits.grad[0].tolist() == pytest.approx([0.125, -0.125])


def test_label_loss_without_any_label_is_zero() -> None:
    assert label_loss(torch.ones(2, 3), torch.tensor([-1, -1])).item() == 0


LOSSES = {
    "cosine": lambda s: cosine_loss(s, torch.tensor(TEACHER)),
    "similarity": lambda s: similarity_loss(s, torch.tensor(WIDE)),
    "hidden": lambda s: hidden_loss(s, torch.tensor(TEACHER), 0.7),
    "logits": lambda s: logits_loss(s, torch.tensor(TEACHER), 3.0),
    "likeliest": lambda s: likeliest(s, 2),
    "nested": lambda s: nested_loss(s, torch.tensor(WIDE), (2, 3)),
    "label": lambda s: label_loss(s, torch.tensor([0, 3, -1, 2, 1])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    assert gradcheck(LOSSES[name], (tensor(STUDENT),), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", [similarity_loss, cka_loss, lambda s, t: index_loss(s, t, t)])
def test_products_keep_their_precision_where_others_are_mixed(loss: Callable[..., torch.Tensor]) -> None:
    student, teacher = (torch.tensor(one, dtype=torch.float32) for one in (STUDENT, TEACHER))
    expected = loss(student, teacher).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (student @ teacher.T).dtype == torch.bfloat16
        assert loss(student, teacher).item() == expected


def test_index_loss_is_of_the_student_against_the_teachers_texts() -> None:
    index = TEACHER[1:4] + 0.1
    expected = ((cosines(STUDENT, index) - cosines(TEACHER, index)) ** 2).mean()
    assert index_loss(tensor(STUDENT), tensor(TEACHER), tensor(index)).item() == pytest.approx(expected)
    turned = TEACHER[:, [1, 0, 3, 2]]  # as alike among themselves, and to no text of the teacher as they should be
    assert similarity_loss(tensor(turned), tensor(TEACHER)).item() == pytest.approx(0, abs=1e-15)
    assert index_loss(tensor(turned), tensor(TEACHER), tensor(TEACHER)).item() > 0.1
    assert gradcheck(lambda x: index_loss(x, torch.tensor(TEACHER), torch.tensor(index)), tensor(STUDENT))


def test_nested_loss_is_of_first_columns_and_whole_teachers() -> None:
    apart = [((cosines(STUDENT[:, :m], STUDENT[:, :m]) - cosines(WIDE, WIDE)) ** 2).mean() for m in (1, 3)]
    assert nested_loss(tensor(STUDENT), tensor(WIDE), (1, 3)).item() == pytest.approx(sum(apart) / 2)
    assert nested_loss(tensor(STUDENT), tensor(WIDE), (3,)).item() == pytest.approx(apart[1])


def test_cka_loss_is_that_of_centered_kernels() -> None:
    """Of Gram matrices between tokens, as HSIC has them: tr(K H L H) over the root of those of each with itself."""
    center = np.eye(5) - 1 / 5

    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.trace(a @ a.T @ center @ b @ b.T @ center))

    expected = 1 - hsic(STUDENT, WIDE) / np.sqrt(hsic(STUDENT, STUDENT) * hsic(WIDE, WIDE))
    assert cka_loss(tensor(STUDENT), tensor(WIDE)).item() == pytest.approx(expected)
    assert 0.05 < expected < 1
    assert gradcheck(lambda x: cka_loss(x, torch.tensor(WIDE)), tensor(STUDENT))


def test_cka_loss_knows_neither_turns_nor_scales_nor_shifts() -> None:
    turn, _ = np.linalg.qr(RANDOM.normal(size=(4, 4)))
    assert cka_loss(tensor(3 * TEACHER @ turn + 7), tensor(TEACHER)).item() == pytest.approx(0, abs=1e-12)
    alike = tensor(np.ones((5, 4)))  # no token differs from another
    loss = cka_loss(alike, tensor(TEACHER))
    assert loss.item() == pytest.approx(1)
    loss.backward()
    assert alike.grad is not None
    assert bool(alike.grad.isfinite().all())
