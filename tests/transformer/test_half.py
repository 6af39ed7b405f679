"""Half precision on numbers worked out by hand."""

import pytest
import torch

from slimformer.transformer.errors import InputError
from slimformer.transformer.half import HalfLinear, to_half
from slimformer.transformer.layer_config import BFLOAT16, FLOAT16, HALVES
from slimformer.transformer.layers import linear


def module(form: str, weight: list[list[float]], bias: list[float]) -> HalfLinear:
    made = linear(inputs=len(weight[0]), outputs=len(weight), form=form)
    assert isinstance(made, HalfLinear)
    made.load_state_dict(
        {"weight": to_half(torch.tensor(weight), form, "w"), "bias": to_half(torch.tensor(bias), form, "b")}
    )
    return made


# float16 counts by 2 from 2048 on, bfloat16 from 256 on; ties go to even multiples
STEPS = {FLOAT16: 2048.0, BFLOAT16: 256.0}


@pytest.mark.parametrize("form", HALVES)
def test_inputs_products_and_sums_are_rounded(form: str) -> None:
    top = STEPS[form]
    two = module(form, [[1.0, 0.0], [1.0, 1.0]], [0.0, 0.0])
    assert two(torch.tensor([[top + 1, -top], [top + 3, -top]]))[:, 1].tolist() == [0, 4]  # the input
    assert two(torch.tensor([[top, 1.0], [top, 3.0]])).tolist() == [[top, top], [top, top + 4]]  # the product
    biased = module(form, [[1.0]], [1.0])
    assert biased(torch.tensor([[top], [top + 2]])).tolist() == [[top], [top + 4]]  # the sum
    twice = module(form, [[1.0, 1.0]], [1.0])  # product, then sum: top + 1 + 1 at once would be top + 2
    assert twice(torch.tensor([[top, 1.0]])).tolist() == [[top]]


@pytest.mark.parametrize("form", HALVES)
def test_sums_within_a_product_are_of_float32(form: str) -> None:
    """top + 1 + 1 is top + 2; with each sum rounded it would stay top."""
    ones = module(form, [[1.0, 1.0, 1.0]], [0.0])
    assert ones(torch.tensor([[STEPS[form], 1.0, 1.0]])).tolist() == [[STEPS[form] + 2]]


@pytest.mark.parametrize("form", HALVES)
def test_types_and_shapes(form: str) -> None:
    made = linear(inputs=3, outputs=2, form=form)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in made.state_dict().items()} == {
        "weight": (getattr(torch, form), (2, 3)),
        "bias": (getattr(torch, form), (2,)),
    }
    for shape in ((5, 3), (2, 5, 3)):
        found = made(torch.ones(shape))
        assert (found.dtype, found.shape) == (torch.float32, (*shape[:-1], 2))


@pytest.mark.parametrize("form", HALVES)
def test_the_greatest_error_of_rounding(form: str) -> None:
    """1 + u is a tie, which goes to 1; anything above goes up, by less than u of itself."""
    u = HALVES[form]
    assert to_half(torch.tensor([1 + u, 1 + 3 * u]), form, "w").tolist() == [1.0, 1 + 4 * u]
    values = torch.rand(10_000, dtype=torch.float64).float() + 1
    errors = ((to_half(values, form, "w").double() - values.double()) / values.double()).abs()
    assert 0.9 * u < errors.max() <= u


def test_beyond_the_range_is_refused() -> None:
    large = torch.tensor([1.0, -70_000.0])
    with pytest.raises(InputError, match=r"up\.weight has 7e\+04, and float16 ends at 6\.55e\+04: leave it in float32"):
        to_half(large, FLOAT16, "up.weight")
    assert to_half(large, BFLOAT16, "up.weight")[1] == -70_144  # counts by 512 there
