"""Layers that are computed again in the backward pass: the same gradients, less kept."""

from typing import Any

import pytest
import torch
from models import WRITERS, tiny, writer
from torch import Tensor

from slimformer.transformer.model import Transformer

IDS = torch.tensor([[2, 7, 8, 9, 3], [2, 11, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def gradients(model: Transformer, *, recompute: bool) -> tuple[dict[str, Tensor], int]:
    """Of the summed squares of the last states with dropout, and the numbers that the forward pass kept for them."""
    model.train().zero_grad()
    for layer in (*model.encoder, *model.decoder):
        layer.recompute = recompute
    written: dict[str, Any] = {"target_ids": IDS[:, :4], "target_mask": MASK[:, :4]} if len(model.decoder) else {}
    kept = 0

    def keep(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.numel()
        return value

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        hidden = model(IDS, MASK, **(written if len(model.encoder) else {})).hidden
    hidden.square().sum().backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return found, kept


@pytest.mark.parametrize("kind", ["encoder", *WRITERS])
def test_gradients_are_the_same_and_less_is_kept(kind: str) -> None:
    model = (tiny() if kind == "encoder" else writer(kind)).to_torch(dropout=0.2)
    plain, kept = gradients(model, recompute=False)
    again, kept_again = gradients(model, recompute=True)
    assert plain.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in plain.items())
    assert sum(float(value.abs().sum()) for value in plain.values()) > 0
    assert kept_again < 0.7 * kept


def test_nothing_is_computed_twice_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny().to_torch()
    for layer in model.encoder:
        layer.recompute = True
    monkeypatch.setattr("slimformer.transformer.layers.checkpoint", lambda *_, **__: pytest.fail("kept for nothing"))
    with torch.inference_mode():
        model(IDS, MASK)
