"""Pooling and heads by hand."""

import math

import pytest
import torch

from slimformer.transformer.config import ClassificationHead, DenseConfig, EmbeddingHead
from slimformer.transformer.heads import build_head, pool
from slimformer.transformer.packing import Packing

# three rows: tokens (1, -2), (3, -4); none; (-5, 6), with padding on every side
MASK = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
TOKENS = torch.tensor([[1.0, -2.0], [3.0, -4.0], [-5.0, 6.0]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [[2.0, -3.0], [0.0, 0.0], [-5.0, 6.0]]),
        ("cls", [[1.0, -2.0], [0.0, 0.0], [-5.0, 6.0]]),
        ("last", [[3.0, -4.0], [0.0, 0.0], [-5.0, 6.0]]),
        ("max", [[3.0, -2.0], [0.0, 0.0], [-5.0, 6.0]]),
    ],
)
def test_pooling(how: str, expected: list[list[float]]) -> None:
    assert pool(TOKENS, Packing.from_mask(MASK), how).tolist() == expected


@pytest.mark.parametrize("how", ["mean", "cls", "last", "max"])
def test_pooling_of_nothing_is_zero(how: str) -> None:
    assert pool(torch.tensor([[7.0, 8.0]]), Packing.from_mask(torch.zeros(2, 3)), how).tolist() == [[0.0, 0.0]] * 2


def test_unit_length() -> None:
    head = build_head(EmbeddingHead(pooling="cls"), width=2)
    result = head(TOKENS * 1e-6, Packing.from_mask(MASK))
    expected = [[1 / math.sqrt(5), -2 / math.sqrt(5)], [0, 0], [-5 / math.sqrt(61), 6 / math.sqrt(61)]]
    torch.testing.assert_close(result, torch.tensor(expected))


def test_dense_maps_and_their_order() -> None:
    dense = (DenseConfig(2, 2, activation="relu"), DenseConfig(2, 1, bias=False, activation=None))
    head = build_head(EmbeddingHead(pooling="cls", dense=dense, normalize=False), width=2)
    head.load_state_dict(
        {
            "dense.0.linear.weight": torch.tensor([[1.0, 1.0], [0.0, -1.0]]),
            "dense.0.linear.bias": torch.tensor([2.0, 1.0]),
            "dense.1.linear.weight": torch.tensor([[10.0, 1.0]]),
        }
    )
    # (1, -2) -> relu(1, 3) -> 13; nothing -> 0 in spite of the bias; (-5, 6) -> relu(3, -5) -> 30
    assert head(TOKENS, Packing.from_mask(MASK)).tolist() == [[13.0], [0.0], [30.0]]


@pytest.mark.parametrize("pooler", [True, False])
def test_classifier(pooler: bool) -> None:
    head = build_head(ClassificationHead(("a", "b", "c"), pooler=pooler), width=2)
    state = {
        "classifier.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        "classifier.bias": torch.tensor([0.0, 0.0, 5.0]),
    }
    if pooler:
        state |= {"pooler.weight": torch.tensor([[0.0, 1.0], [1.0, 0.0]]), "pooler.bias": torch.tensor([0.5, 0.0])}
    head.load_state_dict(state, strict=True)
    first = [(1.0, -2.0), (0.0, 0.0), (-5.0, 6.0)]
    inner = [(math.tanh(y + 0.5), math.tanh(x)) for x, y in first] if pooler else first
    expected = torch.tensor([[x, y, x + y + 5] for x, y in inner])
    torch.testing.assert_close(head(TOKENS, Packing.from_mask(MASK)), expected)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_a_classifier_of_another_vector(pooling: str) -> None:
    head = build_head(ClassificationHead(("a", "b"), pooler=False, pooling=pooling), width=2)
    head.load_state_dict({"classifier.weight": torch.eye(2), "classifier.bias": torch.zeros(2)})
    packing = Packing.from_mask(MASK)
    assert torch.equal(head(TOKENS, packing), pool(TOKENS, packing, pooling))
