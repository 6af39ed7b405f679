"""Recurrent mixers against PyTorch's, SSRU against a loop over numbers, and steps against whole rows."""

import math

import numpy as np
import pytest
import torch
from models import ragged
from torch import Tensor, nn

from slimformer.transformer.layer_config import GATES
from slimformer.transformer.packing import Packing
from slimformer.transformer.recurrent import CELLS, Recurrent

WIDTH, UNITS = 6, 5
THEIRS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
CLOSE = {"atol": 1e-6, "rtol": 1e-5}
LENGTHS = (4, 1, 7)


def mixer(kind: str, *, project: bool = False, seed: int = 0) -> Recurrent:
    torch.manual_seed(seed)
    columns = GATES[kind] * UNITS
    made = Recurrent(
        inputs=nn.Linear(WIDTH, columns),
        recur=None if kind == "ssru" else nn.Linear(UNITS, columns),
        out=nn.Linear(UNITS, WIDTH) if project else None,
        kind=kind,
        units=UNITS,
    )
    for value in made.parameters():
        nn.init.normal_(value, std=0.7)
    return made


def rows(side: str = "right") -> tuple[Tensor, Packing]:
    """The same tokens whatever the padding, and where they stand."""
    _, mask = ragged(LENGTHS, side=side, columns=9)
    tokens = torch.randn(sum(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(7))
    return tokens, Packing.from_mask(mask)


@pytest.mark.parametrize("kind", THEIRS)
@torch.inference_mode()
def test_equals_pytorch(kind: str) -> None:
    ours = mixer(kind)
    theirs = THEIRS[kind](WIDTH, UNITS, batch_first=True)
    theirs.load_state_dict(
        {
            "weight_ih_l0": ours.inputs.weight,
            "bias_ih_l0": ours.inputs.bias,
            "weight_hh_l0": ours.recur.weight,
            "bias_hh_l0": ours.recur.bias,
        }
    )
    tokens, packing = rows()
    found, state = ours.start(tokens, packing)
    for place, one in enumerate(tokens.split(LENGTHS)):
        expected, last = theirs(one[None])
        start = sum(LENGTHS[:place])
        torch.testing.assert_close(found[start : start + LENGTHS[place]], expected[0], **CLOSE)
        for ours_last, theirs_last in zip(state, last if kind == "lstm" else (last,), strict=True):
            torch.testing.assert_close(ours_last[place], theirs_last[0, 0], **CLOSE)


@torch.inference_mode()
def test_ssru_number_by_number() -> None:
    """Kim et al. 2019: f = sigma(W_f x + b_f), c = f c + (1 - f) W x, o = relu(c)."""
    ours = mixer("ssru")
    tokens, packing = rows()
    found = ours(tokens, packing).numpy()
    weight, bias = ours.inputs.weight.double().numpy(), ours.inputs.bias.double().numpy()
    place = 0
    for length in LENGTHS:
        cell = [0.0] * UNITS
        for x in tokens[place : place + length].double().numpy():
            for unit in range(UNITS):
                forget = 1 / (1 + math.exp(-(weight[UNITS + unit] @ x + bias[UNITS + unit])))
                cell[unit] = forget * cell[unit] + (1 - forget) * (weight[unit] @ x + bias[unit])
            np.testing.assert_allclose(found[place], [max(0.0, one) for one in cell], atol=1e-6)
            place += 1


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("side", ["left", "between"])
@torch.inference_mode()
def test_padding_changes_nothing(side: str, kind: str) -> None:
    ours = mixer(kind, project=True)
    expected, state = ours.start(*rows())
    found, other = ours.start(*rows(side))
    assert found.shape == (sum(LENGTHS), WIDTH)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    torch.testing.assert_close(other, state, atol=0, rtol=0)


@pytest.mark.parametrize("kind", CELLS)
@torch.inference_mode()
def test_steps_are_the_whole_row(kind: str) -> None:
    ours = mixer(kind, project=True)
    tokens = torch.randn(2, 6, WIDTH)
    mask = torch.ones(2, 6)
    whole = ours(tokens.flatten(0, 1), Packing.from_mask(mask)).view(2, 6, WIDTH)
    _, state = ours.start(tokens[:, :2].flatten(0, 1), Packing.from_mask(mask[:, :2]))
    for place in range(2, 6):
        one, state = ours.step(tokens[:, place], state, torch.ones(2, place + 1, dtype=torch.bool))
        torch.testing.assert_close(one, whole[:, place], **CLOSE)


@pytest.mark.parametrize("kind", CELLS)
@torch.inference_mode()
def test_a_row_of_padding_alone_has_the_state_of_the_start(kind: str) -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    found, state = mixer(kind).start(torch.randn(2, WIDTH), Packing.from_mask(mask))
    assert bool(found.isfinite().all())
    for one in state:
        assert one[1].tolist() == [0.0] * UNITS


def test_every_kind_of_the_config_has_a_cell() -> None:
    assert set(CELLS) == set(GATES)


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_reach_the_first_token(kind: str) -> None:
    tokens = torch.randn(5, WIDTH, requires_grad=True)
    mixer(kind)(tokens, Packing.from_mask(torch.ones(1, 5)))[-1].sum().backward()
    assert tokens.grad is not None
    assert float(tokens.grad[0].abs().max()) > 0
