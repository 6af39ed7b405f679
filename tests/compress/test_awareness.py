"""Linears that round as in int8 forwards and not at all backwards."""

import pytest
import torch
from tiny import search_data, tiny

from slimformer.compress.awareness import AwareLinear, make_aware, rounded_activations, rounded_weight
from slimformer.compress.distill import Distill
from slimformer.compress.step import StepContext
from slimformer.transformer.batching import tensors
from slimformer.transformer.errors import InputError
from slimformer.transformer.int8 import quantize_activations, quantize_rows
from slimformer.transformer.quantization import quantized

IDS, MASK = tensors([[2, 5, 6, 7, 3], [2, 9, 3], [2, 11, 12, 13, 14, 15, 3]], 0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_activations_by_hand() -> None:
    """From -1 to 4.1: steps of 0.02, zero at 50; 0.031 is nearer to 0.04 than to 0.02, 0.029 to 0.02."""
    x = torch.tensor([[-1.0, 0.0, 0.031], [0.029, 4.1, 1.0]])
    expected = torch.tensor([[-1.0, 0.0, 0.04], [0.02, 4.1, 1.0]])
    torch.testing.assert_close(rounded_activations(x), expected)


def test_weights_by_hand() -> None:
    """Each row has its own step, a 127th or a 64th of its greatest value; a row of zeros stays."""
    weight = torch.tensor([[12.7, 0.26, -0.14], [0.0, 0.0, 0.0], [-1.27, 0.004, 0.006]])
    expected = torch.tensor([[12.7, 0.3, -0.1], [0.0, 0.0, 0.0], [-1.27, 0.0, 0.01]])
    torch.testing.assert_close(rounded_weight(weight, 8), expected)
    torch.testing.assert_close(rounded_weight(torch.tensor([[6.4, 0.26]]), 7), torch.tensor([[6.4, 0.3]]))


@pytest.mark.parametrize("bits", [8, 7])
def test_values_are_those_of_int8(bits: int) -> None:
    x, weight = random(400, 300), random(200, 300, seed=1)
    q, scale, zero = quantize_activations(x)
    assert torch.equal(rounded_activations(x), (q - zero) * scale)
    integers, scales = quantize_rows(weight, bits)
    assert torch.equal(rounded_weight(weight, bits), integers * scales[:, None])


def test_the_gradient_passes_unchanged() -> None:
    x, weight = random(9, 6).requires_grad_(), random(4, 6, seed=1).requires_grad_()
    upstream = random(9, 6, seed=2)
    (rounded_activations(x) * upstream).sum().backward()  # type: ignore[no-untyped-call]
    (rounded_weight(weight, 8) * upstream[:4]).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, upstream)
    torch.testing.assert_close(weight.grad, upstream[:4])


def test_zeros_stay_finite() -> None:
    assert torch.equal(rounded_activations(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_a_model_computes_what_its_int8_form_will() -> None:
    checkpoint = tiny()
    plain, aware = checkpoint.to_torch(), checkpoint.to_torch()
    make_aware(aware, 8)
    int8 = quantized(checkpoint, bits=8, tables=False).to_torch()
    with torch.no_grad():
        outputs = [model(IDS, MASK).hidden for model in (plain, aware, int8)]
    float_away, aware_away = ((one - outputs[2]).norm() for one in outputs[:2])
    assert float_away > 1e-3
    assert aware_away < 0.2 * float_away


def test_every_linear_of_the_layers_is_replaced_and_keeps_its_parameters() -> None:
    checkpoint = tiny()
    model = checkpoint.to_torch()
    make_aware(model, 8)
    assert sum(isinstance(module, AwareLinear) for module in model.modules()) == 4 * len(checkpoint.config.encoder)
    assert model.state_dict().keys() == checkpoint.state.keys()
    assert all(torch.equal(value, checkpoint.state[name]) for name, value in model.state_dict().items())


def test_distilling_so_gives_a_float_model_that_differs() -> None:
    """The student learns from other values than without, and comes out in float."""
    checkpoint, context = tiny(seed=1), StepContext(search_data(), teacher=tiny())
    options = {"steps": 3, "batch_tokens": 200, "pages": 4}
    aware = Distill(**options, quantization_aware=True, bits=8)(checkpoint, context).checkpoint
    plain = Distill(**options)(checkpoint, context).checkpoint
    assert aware.config == plain.config
    assert aware.config.is_float
    assert any(not torch.equal(aware.state[name], plain.state[name]) for name in plain.state)


def test_bits_are_8_or_7() -> None:
    with pytest.raises(InputError, match="bits is 4, not 8, 7 or 0"):
        Distill(bits=4)
