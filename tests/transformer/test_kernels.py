"""The ordered kernels against float64, and their order of sums against scalar loops."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import tiny_config
from torch import Tensor

from slimformer.transformer import kernels
from slimformer.transformer.kernels import (
    BLOCK,
    ERF_BIG,
    ERF_END,
    ERF_EXP,
    ERF_SMALL,
    ERF_SPLIT,
    EXP,
    OrderedNorm,
    _exp,
    erf_gelu,
    fused_attend,
    ordered_attend,
)
from slimformer.transformer.layer_config import FLOAT32, INT4_BLOCKS, INT8_BLOCKS, INT8_DYNAMIC, INT8_STATIC
from slimformer.transformer.model import Transformer
from slimformer.transformer.quantization import with_formats

F32 = np.float32


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ordered_norm(width: int, eps: float = 1e-12) -> OrderedNorm:
    norm = OrderedNorm(width, eps=eps)
    with torch.no_grad():
        norm.weight.copy_(random(width, seed=1))
        norm.bias.copy_(random(width, seed=2))
    return norm


def norm_by_hand(row: np.ndarray, norm: OrderedNorm) -> list[np.floating]:
    """One row, number by number: eight running sums, each step rounded once; then the halves added."""
    mean = F32(row.astype(np.float64).mean())
    sums = [F32(0)] * 8
    for i, value in enumerate(row):
        centred = value - mean
        sums[i % 8] = F32(np.float64(centred) * np.float64(centred) + np.float64(sums[i % 8]))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [low + high for low, high in zip(sums[:half], sums[half:], strict=True)]
    scale = F32(1) / np.sqrt(sums[0] / F32(len(row)) + F32(norm.eps))
    weight, bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    normal = [(value - mean) * scale for value in row]
    return [F32(np.float64(x) * np.float64(w) + np.float64(b)) for x, w, b in zip(normal, weight, bias, strict=True)]


@pytest.mark.parametrize("width", [1, 5, 8, 20, 384])
@torch.inference_mode()
def test_a_norm_bit_by_bit(width: int) -> None:
    x, norm = random(6, width) * torch.logspace(-3, 3, 6)[:, None] + 1, ordered_norm(width)
    x[:, width // 2] += 8
    result = norm(x)
    for row, found in zip(x.numpy(), result.numpy(), strict=True):
        assert found.tolist() == [float(value) for value in norm_by_hand(row, norm)]


@torch.inference_mode()
def test_the_order_of_a_norm_matters() -> None:
    """Otherwise the test before would not know one order from another."""
    x, norm = random(64, 384), ordered_norm(384)
    plain = F.layer_norm(x, (384,), norm.weight, norm.bias, norm.eps)
    assert 0.01 < float((norm(x) != plain).float().mean()) < 0.9


@pytest.mark.parametrize("eps", [1e-12, 1e-2])
@torch.inference_mode()
def test_a_norm_against_float64(eps: float) -> None:
    x, norm = random(50, 384) * torch.logspace(-4, 4, 50)[:, None], ordered_norm(384, eps)
    exact = F.layer_norm(x.double(), (384,), norm.weight.double(), norm.bias.double(), eps)
    torch.testing.assert_close(norm(x).double(), exact, atol=1e-6, rtol=1e-6)


@torch.inference_mode()
def test_a_constant_row_and_no_row() -> None:
    norm = ordered_norm(16)
    torch.testing.assert_close(norm(torch.full((2, 16), 3.7)), norm.bias.expand(2, 16), atol=0, rtol=0)
    assert norm(torch.zeros(0, 16)).shape == (0, 16)


def fused(a: float, b: float, c: float) -> np.floating:
    """a * b + c of single precision, rounded once."""
    return F32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def power_by_hand(x: np.floating, polynomial: Sequence[float]) -> np.floating:
    """e^x of one number x <= 0 in exact fractions, each step rounded once to single precision."""
    x = max(x, F32(-88.3762626647949))
    whole = round(fused(x, F32(math.log2(math.e)), 0))
    rest = fused(whole, F32(-1.42860677e-6), fused(whole, F32(-0.693145752), x))
    total = F32(polynomial[0])
    for coefficient in polynomial[1:]:
        total = fused(total, rest, F32(coefficient))
    return F32(float(total) * 2.0**whole)


def softmax_by_hand(scores: np.ndarray, lanes: int) -> np.ndarray:
    """One row: 16 or 8 running sums of the exponentials, those 16 folded to 8, then neighbours added."""
    powers = np.array([power_by_hand(value, EXP) for value in scores - scores.max()])
    sums = [F32(0)] * lanes
    for i, power in enumerate(powers):
        sums[i % lanes] = sums[i % lanes] + power
    sums = [sums[i] + sums[i + 8] for i in range(8)] if lanes == 16 else sums
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
    return powers * (F32(1) / sums[0])


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("tokens", [1, 7, 16, 100])
@torch.inference_mode()
def test_softmax_bit_by_bit(tokens: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that form a unit matrix show the weights themselves; one column a head keeps the scores plain."""
    monkeypatch.setattr(kernels, "SOFTMAX_LANES", lanes)
    q, k = random(1, 3, tokens, 1, seed=3) * 2, random(1, 3, tokens, 1, seed=4)
    scores = (q[0] @ k[0].transpose(1, 2)).numpy()
    expected = np.array([[softmax_by_hand(row, lanes) for row in head] for head in scores])  # (H, T, T)
    for column in range(tokens):
        v = torch.zeros(1, 3, tokens, 1)
        v[..., column, :] = 1
        np.testing.assert_array_equal(ordered_attend(q, k, v, None).numpy()[0, ..., 0], expected[..., column])


@pytest.mark.parametrize("attend", [ordered_attend, fused_attend])
@torch.inference_mode()
def test_attention_against_float64(attend: Callable[..., Tensor]) -> None:
    q, k, v = (random(3, 2, 20, 8, seed=seed) * 3 for seed in (5, 6, 7))
    seen = torch.arange(20) < torch.tensor([20, 13, 1])[:, None]
    scores = (q.double() @ k.double().transpose(-1, -2) / math.sqrt(8)).masked_fill(~seen[:, None, None], -math.inf)
    exact = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(attend(q, k, v, seen[:, None, None]).double(), exact, atol=5e-6, rtol=1e-5)
    exact = (q.double() @ k.double().transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ v.double()
    torch.testing.assert_close(attend(q, k, v, None).double(), exact, atol=5e-6, rtol=1e-5)


@torch.inference_mode()
def test_a_row_that_sees_nothing_is_finite() -> None:
    q, k, v = (random(2, 1, 4, 8, seed=seed) for seed in (5, 6, 7))
    seen = torch.tensor([[True] * 4, [False] * 4])[:, None, None]
    assert bool(ordered_attend(q, k, v, seen).isfinite().all())


def erf_by_hand(x: np.floating) -> np.floating:
    """The error function of one number in exact fractions, each step rounded once."""
    size = min(abs(x), F32(ERF_END))
    inner, coefficients = (size, ERF_BIG) if size > F32(ERF_SPLIT) else (size * size, ERF_SMALL)
    total = F32(coefficients[0])
    for coefficient in coefficients[1:]:
        total = fused(total, inner, F32(coefficient))
    total = fused(total, size, size)
    total = F32(1) - power_by_hand(-total, ERF_EXP) if size > F32(ERF_SPLIT) else total
    return np.copysign(total, x)


@torch.inference_mode()
def test_gelu_bit_by_bit() -> None:
    x = torch.cat([random(300, seed=8) * 2, torch.tensor([0.0, -0.0, 1.3, -1.31, 6.0, -6.0, 40.0])])
    root = F32(math.sqrt(0.5))
    expected = [F32(0.5) * value * (erf_by_hand(value * root) + F32(1)) for value in x.numpy()]
    assert erf_gelu(x).tolist() == [float(value) for value in expected]


@pytest.mark.parametrize("columns", [BLOCK - 1, BLOCK + 1])
@torch.inference_mode()
def test_blocks_make_no_difference(columns: int) -> None:
    x = random(2, columns, seed=9)
    assert torch.equal(erf_gelu(x)[1, -5:], erf_gelu(x[1, -5:].clone()))


@torch.inference_mode()
def test_exponentials_against_float64() -> None:
    x = -torch.linspace(0, 87, 5001)
    torch.testing.assert_close(_exp(x, EXP).double(), x.double().exp(), rtol=2e-7, atol=0)
    assert _exp(torch.tensor([-torch.inf, -1e30]), EXP).tolist() == pytest.approx([0, 0], abs=1e-38)


def test_gelu_against_the_math_library() -> None:
    x = torch.linspace(-8, 8, 2001)
    exact = [value * 0.5 * (math.erf(value / math.sqrt(2)) + 1) for value in x.tolist()]
    np.testing.assert_allclose(erf_gelu(x).numpy(), exact, atol=5e-7, rtol=2e-7)
    assert erf_gelu(torch.tensor([0.0, 40.0, -40.0])).tolist() == [0.0, 40.0, 0.0]


@pytest.mark.parametrize("form", [FLOAT32, INT8_DYNAMIC, INT8_STATIC, INT8_BLOCKS, INT4_BLOCKS])
def test_models_that_round_activations_take_the_ordered_kernels_and_float_models_the_fused_ones(form: str) -> None:
    config, ordered = tiny_config(), form != FLOAT32
    model = Transformer(with_formats(config, {"encoder.1.mixer.qkv": form}))
    one = model.encoder[0]
    for norm in (model.embeddings.norm, one.mixer_norm, one.ffn_norm):
        assert isinstance(norm, OrderedNorm) is ordered
    assert one.mixer.attend is (ordered_attend if ordered else fused_attend)
    assert one.ffn.activation is (erf_gelu if ordered else F.gelu)
