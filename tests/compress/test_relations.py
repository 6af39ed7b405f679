"""Relations against a loop over texts, heads and tokens, by hand, and under padding; and a student that learns them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import layer, search_data, sentences, tiny, tiny_config
from torch import Tensor
from torch.autograd import gradcheck

from slimformer.compress.distill import Distill
from slimformer.compress.inside import Inside
from slimformer.compress.relations import Relations, relation_layer, relation_loss
from slimformer.compress.step import StepContext
from slimformer.compress.teacher import teach
from slimformer.transformer.batching import tensors
from slimformer.transformer.config import LayerConfig, RecurrentConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.packing import Packing
from slimformer.transformer.progress import SILENT

LENGTHS = (3, 1, 4)


def packing(lengths: tuple[int, ...] = LENGTHS, columns: int = 0) -> Packing:
    width = max(columns, *lengths)
    return Packing.from_mask(torch.arange(width) < torch.tensor(lengths)[:, None])


def drawn(width: int, seed: int, tokens: int = sum(LENGTHS)) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(student: np.ndarray, teacher: np.ndarray, heads: int) -> float:
    """Token by token; each text by itself."""

    def chances(tokens: np.ndarray, head: int) -> np.ndarray:
        width = tokens.shape[1] // heads
        own = tokens[:, head * width : (head + 1) * width]
        scores = np.exp(own @ own.T / np.sqrt(width))
        return scores / scores.sum(1, keepdims=True)

    total, start = 0.0, 0
    for length in LENGTHS:
        text = slice(start, start + length)
        start += length
        for head in range(heads):
            p, q = chances(teacher[text], head), chances(student[text], head)
            total += float((p * np.log(p / q)).sum())
    return total / (heads * sum(LENGTHS))


def test_a_text_of_two_tokens_by_hand() -> None:
    """The teacher's first token has scores (1, 0): p = 0.731059; the student's are all 1/2. Its other row is even."""
    loss = relation_loss(torch.zeros(2, 1).double(), torch.tensor([[1.0], [0.0]]).double(), packing((2,)), 1)
    assert loss.item() == pytest.approx(0.110944 / 2, abs=1e-6)


@pytest.mark.parametrize(("ours", "theirs", "heads"), [(4, 4, 1), (6, 12, 3), (8, 2, 2), (3, 9, 3)])
def test_relations_are_those_of_a_loop(ours: int, theirs: int, heads: int) -> None:
    student, teacher = drawn(ours, 1), drawn(theirs, 2)
    found = relation_loss(student, teacher, packing(), heads)
    assert found.item() == pytest.approx(naive(student.numpy(), teacher.numpy(), heads), rel=1e-12)
    assert found.item() > 0.01
    assert relation_loss(teacher, teacher, packing(), heads).item() == pytest.approx(0, abs=1e-15)


def test_padding_changes_neither_value_nor_gradient() -> None:
    student, teacher = drawn(6, 1).requires_grad_(), drawn(6, 2)
    losses, gradients = [], []
    for columns in (0, 104):
        loss = relation_loss(student, teacher, packing(columns=columns), 2)
        losses.append(loss.item())
        gradients += torch.autograd.grad(loss, student)
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)
    assert float(gradients[0].abs().max()) > 1e-3


def test_gradients_are_exact() -> None:
    teacher = drawn(6, 2)
    assert gradcheck(lambda x: relation_loss(x, teacher, packing(), 3), drawn(3, 1).requires_grad_())


# --- in training ---

TEACHER = tiny(tiny_config((layer(4, 6), layer(2, 9), LayerConfig(RecurrentConfig("gru", 16), None))), seed=1)
STUDENT = tiny(tiny_config((layer(2, 12, group=2), layer(0)), d_model=8), seed=2)
IDS = TEACHER.text_encoder().encode(sentences(12, seed=4))


def test_what_is_kept_is_what_the_teachers_layer_gives(tmp_path: Path) -> None:
    ways: dict[str, Any] = {"folder": tmp_path, "device": "cpu", "progress": SILENT}
    targets = teach(TEACHER, IDS, tokens=["qkv.0"], **ways)
    assert targets.tokens["qkv.0"].shape == (sum(map(len, IDS)), 3 * 24)
    lengths = [len(one) for one in IDS]
    model = TEACHER.to_torch()
    seen = Inside(model, ["qkv.0"])
    chosen = [3, 0, 11]
    with torch.inference_mode():
        output = model(*tensors([IDS[i] for i in chosen], TEACHER.config.text.pad_id, "cpu"))
    found = targets.tokens_of("qkv.0", chosen, lengths)
    torch.testing.assert_close(found, seen.of("qkv.0", output), atol=4e-3, rtol=1e-3)
    assert teach(TEACHER, IDS, tokens=["qkv.0"], **ways).reused
    other = teach(TEACHER, IDS, tokens=["qkv.1"], **ways)
    assert not other.reused
    assert other.tokens["qkv.1"].shape[1] == 3 * 18
    assert not teach(TEACHER, IDS, **ways).reused
    assert len(list(tmp_path.rglob("qkv.*.npy"))) == 2


def test_the_loss_is_of_queries_keys_and_values_apart() -> None:
    """A student whose layer is the teacher's has none; each of the three that is another adds to it."""
    model, relations = TEACHER.to_torch(), Relations(TEACHER.config, TEACHER.config, 1, 0)
    assert relations.heads == 2
    assert (relations.ours, relations.theirs) == ("qkv.1", "qkv.1")
    inside = Inside(model, ["qkv.1"])
    output = model(*tensors(IDS[:4], TEACHER.config.text.pad_id, "cpu"))
    own, packed = inside.of("qkv.1", output).detach(), output.packing
    assert relations.loss(own, own, packed).item() == pytest.approx(0, abs=1e-6)
    parts = [relation_loss(one, 2 * one, packed, 2).item() for one in own.split(18, 1)]
    assert min(parts) > 1e-3
    assert relations.loss(own, 2 * own, packed).item() == pytest.approx(sum(parts), rel=1e-5)
    for i in range(3):
        changed = own.clone()
        changed[:, 18 * i : 18 * i + 18] *= 2
        assert relations.loss(own, changed, packed).item() == pytest.approx(parts[i], rel=1e-4)


def test_a_student_of_other_heads_and_width_learns_them() -> None:
    """Heads of the student share keys; 3 relation heads go into 24 and 12 of its columns and into 24 of the teacher."""
    step = Distill(
        steps=60,
        lr=5e-3,
        warmup=1,
        cosine=0.0,
        similarity=0.0,
        relations=1.0,
        relation_heads=3,
        relation_layer=0,
        fragments=0.0,
        pages=0,
    )
    result = step(STUDENT, StepContext(search_data(), teacher=TEACHER))
    losses = result.details["losses"]
    assert losses[-1] < 0.7 * losses[0]
    assert result.details["skipped"] == {}


def test_relations_count_by_their_weight() -> None:
    once = Distill(steps=1, cosine=0.0, similarity=0.0, relations=0.25, relation_heads=3, relation_layer=0, pages=0)
    context = StepContext(search_data(), teacher=TEACHER)
    first, second = (step(STUDENT, context).details["losses"][0] for step in (once, replace(once, relations=0.75)))
    assert second == pytest.approx(3 * first, rel=1e-4)
    assert first > 1e-3


def test_a_student_that_also_learns_vectors_of_other_widths() -> None:
    both = Distill(steps=2, relations=0.5, relation_heads=3, relation_layer=0, pages=0)
    result = both(STUDENT, StepContext(search_data(), teacher=TEACHER))
    assert list(result.details["skipped"]) == ["cosine"]
    alone = replace(both, similarity=0.0)
    assert list(alone(STUDENT, StepContext(search_data(), teacher=TEACHER)).details["skipped"]) == ["cosine"]
    int8 = replace(both, quantization_aware=True)
    assert int8(STUDENT, StepContext(search_data(), teacher=TEACHER)).checkpoint.config == STUDENT.config


def test_layers_and_heads_that_do_not_fit_are_refused() -> None:
    assert relation_layer(TEACHER.config, None) == 1
    for wanted in (2, 3, -1):
        with pytest.raises(InputError, match=f"relation_layer is {wanted}, where the teacher has no attention"):
            relation_layer(TEACHER.config, wanted)
    cells = tiny_config((LayerConfig(RecurrentConfig("gru", 16), None),))
    with pytest.raises(InputError, match="no layer of the model has it"):
        Distill(relations=1.0).check(cells)
    for heads, columns in ((5, 12), (8, 12), (24, 12)):
        with pytest.raises(InputError, match=f"{columns} columns .* do not go into {heads} relation heads"):
            Relations(STUDENT.config, TEACHER.config, 0, heads)
    with pytest.raises(InputError, match="relation_heads and relation_layer are of relations, whose weight is 0"):
        Distill(relation_heads=2)
    with pytest.raises(InputError, match="distill: there is no text to train on"):
        teach(TEACHER, [], folder=None, device="cpu", progress=SILENT)
    with pytest.raises(InputError, match="relations is -1, below 0"):
        Distill(relations=-1)
