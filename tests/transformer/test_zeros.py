"""Zeros stay exactly 0 in training, whatever the loop does; all else learns as without."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import tiny, writer
from torch import Tensor, nn

from slimformer.transformer.parts import Part
from slimformer.transformer.training import train
from slimformer.transformer.training_options import TrainingOptions
from slimformer.transformer.zeros import SPARSE, keep_zeros, sparse_linears

NAMES = ["encoder.0.mixer.qkv", "encoder.1.ffn.down"]
OPTIONS = TrainingOptions(steps=8, lr=0.05, warmup=1, weight_decay=0.5, clip=0.1, accumulate=2)


class Lesson(nn.Module):
    """A model that learns any vectors."""

    def __init__(self, zeros: float = 0.5) -> None:
        super().__init__()
        self.student = tiny().to_torch()
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name in NAMES:
                weight = self.student.get_parameter(f"{name}.weight")
                weight[torch.rand(weight.shape, generator=random) < zeros] = 0.0
        self.ids = torch.randint(5, 30, (8, 12), generator=random)
        self.wanted = torch.randn(8, 32, generator=random)

    def loss(self, part: Part) -> Tensor:
        ids = self.ids[list(part)]
        result = self.student(ids, torch.ones_like(ids)).result
        return part.share * (result - self.wanted[list(part)]).square().mean()

    def weights(self) -> dict[str, Tensor]:
        return {name: self.student.get_parameter(f"{name}.weight").detach().clone() for name in NAMES}


def trained(lesson: Lesson, **options: Any) -> Lesson:
    train(lesson, lambda _: [[0, 1], [2, 3], [4, 5], [6, 7]], lesson.loss, replace(OPTIONS, **options))
    return lesson


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_zeros_stay_and_all_else_learns(precision: str) -> None:
    lesson = Lesson()
    before = lesson.weights()
    assert keep_zeros(lesson.student, NAMES) == NAMES
    after = trained(lesson, precision=precision).weights()
    for name in NAMES:
        assert 0.4 < float((before[name] == 0).double().mean()) < 0.6
        assert torch.equal(after[name] == 0, before[name] == 0)
        moved = after[name] != before[name]
        assert torch.equal(moved, before[name] != 0)


def test_without_it_they_do_not() -> None:
    lesson = Lesson()
    assert all(bool((weight != 0).all()) for weight in trained(lesson).weights().values())


def test_only_the_linears_that_are_named_are_held() -> None:
    lesson = Lesson()
    before = lesson.weights()
    keep_zeros(lesson.student, NAMES[:1])
    after = trained(lesson).weights()
    assert torch.equal(after[NAMES[0]] == 0, before[NAMES[0]] == 0)
    assert bool((after[NAMES[1]] != 0).all())


def test_a_weight_that_becomes_0_later_may_leave_it() -> None:
    lesson = Lesson(zeros=0.1)
    keep_zeros(lesson.student, NAMES)
    weight = lesson.student.get_parameter(f"{NAMES[0]}.weight")
    given = weight.detach() == 0
    with torch.no_grad():
        weight.zero_()
    trained(lesson)
    assert torch.equal(weight == 0, given)


def test_the_gradients_of_others_are_those_without_it() -> None:
    one, other = Lesson(), Lesson()
    keep_zeros(one.student, NAMES)
    gradients = []
    for lesson in (one, other):
        lesson.loss(Part([0, 1, 2])).backward()
        gradients.append({name: value.grad for name, value in lesson.student.named_parameters()})
    for name, value in gradients[1].items():
        assert value is not None
        zeros = one.student.get_parameter(name) == 0 if name.removesuffix(".weight") in NAMES else torch.zeros(())
        assert torch.equal(gradients[0][name], value.masked_fill(zeros.bool(), 0.0))


def test_linears_that_are_gone_or_have_no_zeros_are_passed_over() -> None:
    model = tiny().to_torch()
    assert keep_zeros(model, ["encoder.7.ffn.up", "encoder.0.ffn.up", "encoder"]) == []


def test_names_come_from_the_provenance() -> None:
    model = writer("alone")
    assert sparse_linears(model) == ()
    assert sparse_linears(model.with_provenance(**{SPARSE: {"method": "wanda", "linears": NAMES}})) == tuple(NAMES)
