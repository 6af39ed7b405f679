"""Simulated linears in the place of others: the error by hand, and the model as it was afterwards."""

import pytest
import torch
from tiny import search_data, tiny
from torch import nn

from slimformer.compress.calibration import Calibration
from slimformer.compress.simulating import Simulation, hidden_error
from slimformer.compress.step import StepContext


def simulation() -> Simulation:
    model, context = tiny(), StepContext(search_data())
    examples = Calibration.of(model, context, 6, 0.5).batches(6, "cpu", size=1)
    return Simulation(model.to_torch(), examples)


def test_hidden_error_by_hand() -> None:
    expected = [torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0]])]
    found = [torch.tensor([[3.0, 5.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0]])]
    assert hidden_error(found, expected) == pytest.approx((0.2 + 0 + 1) / 3)
    assert hidden_error([torch.zeros(1, 2)], [torch.zeros(1, 2)]) == 0  # not NaN


def test_the_error_of_a_linear_that_is_put_in_and_taken_out_again() -> None:
    one = simulation()
    name = "encoder.1.ffn.down"
    kept = one.model.get_submodule(name)
    assert isinstance(kept, nn.Linear)
    other = nn.Linear(kept.in_features, kept.out_features)
    other.weight, other.bias = kept.weight, nn.Parameter(kept.bias + torch.linspace(-1, 1, 16))
    assert one.error({}) == 0
    found = one.error({name: other})
    assert one.model.get_submodule(name) is kept
    assert one.error({}) == 0
    kept.bias.data += torch.linspace(-1, 1, 16)
    with torch.no_grad():
        expected = hidden_error([example.run(one.model).hidden for example in one.examples], one.expected)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > 0.01


def test_the_model_is_what_it_was_after_a_failure() -> None:
    one = simulation()
    kept = one.model.get_submodule("encoder.0.ffn.up")
    with pytest.raises(RuntimeError):
        one.error({"encoder.0.ffn.up": nn.Linear(3, 3)})
    assert one.model.get_submodule("encoder.0.ffn.up") is kept
