"""Linears of every format in onnxruntime against their PyTorch modules, on weights and inputs that are awkward."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from slimformer.export.graph import Graph
from slimformer.export.linears import own, standard, stored, turned
from slimformer.export.tensors import Weights
from slimformer.transformer.blocks import BlockLinear, packed_blocks
from slimformer.transformer.errors import InputError
from slimformer.transformer.int8 import (
    Int8Linear,
    PerTokenLinear,
    StaticLinear,
    quantize_activations,
    quantize_rows,
)
from slimformer.transformer.layer_config import (
    BLOCK_BITS,
    FLOAT32,
    HALVES,
    INT8_DYNAMIC,
    INT8_PER_TOKEN,
    INT8_STATIC,
    LINEAR_FORMATS,
)

WRITERS = {
    "own, stored": lambda g, form: own(g, Weights(g.state), form, "x", stored),
    "own, turned": lambda g, form: own(g, Weights(g.state), form, "x", turned),
    "standard": lambda g, form: standard(g, Weights(g.state), form, "x"),
}
OUTPUTS = 40
TINY = np.finfo(np.float32).tiny


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def built(module: nn.Module, form: str, writer: str) -> onnx.ModelProto:
    """The linear alone, (N, I) -> (N, O)."""
    graph = Graph()
    graph.state = {name: value.numpy() for name, value in module.state_dict().items()}  # type: ignore[attr-defined]
    graph.name_output(WRITERS[writer](graph, form), "y")
    model = graph.model({}, {"y": ["n", OUTPUTS]}, contrib=True)
    model.graph.input.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", "i"]))
    return model


def run(module: nn.Module, form: str, writer: str, x: torch.Tensor) -> np.ndarray:
    (found,) = session(built(module, form, writer)).run(None, {"x": x.numpy()})
    assert np.isfinite(found).all()
    return found


def awkward_weight(inputs: int) -> torch.Tensor:
    """Random rows, with a row of zeros, tiny and tiniest rows, and outliers."""
    weight = torch.randn(OUTPUTS, inputs, generator=torch.Generator().manual_seed(inputs)) * 0.05
    weight[0] = 0
    weight[1] *= 1e-9
    weight[2] *= 1e-40
    weight[3, inputs // 2] = 30.0
    return weight


def awkward_inputs(inputs: int) -> dict[str, torch.Tensor]:
    x = torch.randn(13, inputs, generator=torch.Generator().manual_seed(7))
    outlier = x.clone()
    outlier[2, 3] = 80.0
    return {
        "normal": x,
        "outlier": outlier,
        "positive": x.abs() + 1,
        "negative": -x.abs() - 1,
        "zero": torch.zeros_like(x),
        "one token": x[:1],
        "ties": (x * 4).round() / 4,
        "small": x * 1e-12,
    }


def dynamic(inputs: int, bias: torch.Tensor) -> Int8Linear:
    module = Int8Linear(inputs=inputs, outputs=OUTPUTS)
    module.weight, module.scale = quantize_rows(awkward_weight(inputs), 7)
    module.bias = bias
    return module


def static(inputs: int, bias: torch.Tensor, *, even: bool = False) -> StaticLinear:
    """Made for values of -2 to 4 times the factor, so that some of the inputs saturate."""
    module = StaticLinear(inputs=inputs, outputs=OUTPUTS)
    factor = torch.ones(inputs) if even else torch.logspace(-1, 1, inputs)
    module.factor = factor
    module.weight, module.scale = quantize_rows(awkward_weight(inputs) / factor, 7)
    module.bias = bias
    _, module.input_scale, zero = quantize_activations(torch.tensor([-2.0, 4.0]))
    module.input_zero = zero.to(torch.uint8)
    return module


def per_token(inputs: int, bias: torch.Tensor) -> PerTokenLinear:
    """Made for values from -0.25, so that some of the inputs saturate."""
    module = PerTokenLinear(inputs=inputs, outputs=OUTPUTS)
    module.weight, module.scale = quantize_rows(awkward_weight(inputs), 7)
    module.bias, module.input_bound = bias, torch.tensor(0.25)
    return module


INT8 = {INT8_DYNAMIC: dynamic, INT8_STATIC: static, INT8_PER_TOKEN: per_token}


def in_blocks(inputs: int, form: str, bias: torch.Tensor) -> BlockLinear:
    """Integers over the whole range of the format, with scales that differ from block to block."""
    bits = BLOCK_BITS[form]
    generator = torch.Generator().manual_seed(inputs)
    module = BlockLinear(inputs=inputs, outputs=OUTPUTS, bits=bits)
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (OUTPUTS, inputs), generator=generator)
    integers[0] = 0
    module.weight = packed_blocks(integers, bits)
    module.scale = torch.rand(OUTPUTS, inputs // 32, generator=generator) * 0.01 + 1e-4
    module.scale[1] = 1e-9
    module.bias = bias
    return module


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance of float32 values in units in the last place of the greater one."""
    unit = np.spacing(np.maximum(np.abs(a), np.abs(b)).astype(np.float32))
    return np.abs(a.astype(np.float64) - b.astype(np.float64)) / unit


@pytest.mark.parametrize("inputs", [16, 384, 1536])
@pytest.mark.parametrize("form", list(INT8))
@pytest.mark.parametrize("writer", WRITERS)
def test_int8_linears_equal_their_modules(writer: str, form: str, inputs: int) -> None:
    """Without a bias the outputs are the scaled accumulators, and 2 ulp leave no room for another integer."""
    module = INT8[form](inputs, torch.zeros(OUTPUTS))
    opened = session(built(module, form, writer))
    for name, x in awkward_inputs(inputs).items():
        (found,) = opened.run(None, {"x": x.numpy()})
        expected = module(x).numpy()
        assert np.isfinite(found).all(), name
        normal = np.abs(expected) > TINY
        assert ulps(found, expected)[normal].max(initial=0) <= 2, name
        assert np.abs(found - expected)[~normal].max(initial=0) <= TINY, name


@pytest.mark.parametrize("writer", WRITERS)
def test_tokens_without_a_bound_have_scales_as_small_as_they_are(writer: str) -> None:
    module = per_token(64, torch.zeros(OUTPUTS))
    module.input_bound = torch.tensor(0.0)
    x = awkward_inputs(64)["normal"].abs() * torch.logspace(-30, 0, 13)[:, None]
    found, expected = run(module, INT8_PER_TOKEN, writer, x), module(x).numpy()
    normal = np.abs(expected) > TINY
    assert normal[:, 4:].all()  # rows 0 to 2 of the weight are zeros and tiny
    assert ulps(found, expected)[normal].max() <= 2


@pytest.mark.parametrize("form", list(INT8))
def test_standard_linears_keep_leading_axes(form: str) -> None:
    module, x = INT8[form](64, torch.linspace(-2, 2, OUTPUTS)), awkward_inputs(64)["normal"][:12].view(3, 4, 64)
    model = built(module, form, "standard")
    for value, axes in ((model.graph.input[0], (None, None, 64)), (model.graph.output[0], (None, None, OUTPUTS))):
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, axes))
    (found,) = session(model).run(None, {"x": x.numpy()})
    assert found.shape == (3, 4, OUTPUTS)
    np.testing.assert_allclose(found, module(x).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", list(INT8))
@pytest.mark.parametrize("writer", WRITERS)
def test_int8_linears_add_their_bias(writer: str, form: str) -> None:
    bias = torch.linspace(-2, 2, OUTPUTS)
    module = INT8[form](64, bias)
    x = awkward_inputs(64)["normal"]
    found, expected = run(module, form, writer, x), module(x).numpy()
    terms = np.maximum(np.abs(bias.numpy()), np.abs(expected - bias.numpy()))
    assert (np.abs(found - expected) <= 2 * np.spacing(terms.astype(np.float32))).all()
    np.testing.assert_allclose(
        found - (module(x) - bias).numpy(), np.broadcast_to(bias.numpy(), found.shape), atol=1e-5
    )


@pytest.mark.parametrize("writer", ["own, stored", "own, turned"])
@pytest.mark.parametrize("inputs", [32, 384, 1536])
@pytest.mark.parametrize("form", list(BLOCK_BITS))
def test_linears_in_blocks_equal_their_modules(form: str, inputs: int, writer: str) -> None:
    """To the precision of float sums of products with q and of the Z that is taken away again afterwards."""
    module = in_blocks(inputs, form, torch.linspace(-0.1, 0.1, OUTPUTS))
    opened = session(built(module, form, writer))
    for name, x in awkward_inputs(inputs).items():
        (found,) = opened.run(None, {"x": x.numpy()})
        expected = module(x).numpy()
        zeros = 2 ** (BLOCK_BITS[form] - 1) * np.repeat(module.scale.numpy(), 32, axis=1)
        terms = np.abs(x.numpy()) @ (np.abs(in_float(module, form)) + zeros).T + np.abs(module.bias.numpy())
        assert (np.abs(found - expected) <= 5e-7 * terms + TINY).all(), name


def in_float(module: BlockLinear, form: str) -> np.ndarray:
    """What the stored weight stands for, read byte by byte."""
    bits, rows = BLOCK_BITS[form], []
    for row, scales in zip(module.weight.tolist(), module.scale.tolist(), strict=True):
        values = []
        for block, scale in zip(row, scales, strict=True):
            integers = block if bits == 8 else [half for byte in block for half in (byte % 16, byte // 16)]
            values += [(integer - 2 ** (bits - 1)) * scale for integer in integers]
        rows.append(values)
    return np.array(rows)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_float_linear_is_a_product_and_a_sum(writer: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(24, OUTPUTS), torch.randn(5, 24)
    with torch.inference_mode():
        np.testing.assert_allclose(run(module, FLOAT32, writer, x), module(x).numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", list(BLOCK_BITS))
def test_blocks_have_no_standard_operator(form: str) -> None:
    with pytest.raises(InputError, match=f"no linears of the format {form}: take packed"):
        built(in_blocks(32, form, torch.zeros(OUTPUTS)), form, "standard")


@pytest.mark.parametrize(("even", "operators"), [(True, []), (False, ["Mul"])])
def test_a_factor_of_ones_is_left_out(even: bool, operators: list[str]) -> None:
    model = built(static(32, torch.zeros(OUTPUTS), even=even), INT8_STATIC, "own, stored")
    found = [node.op_type for node in model.graph.node]
    assert found == [*operators, "QuantizeLinear", "MatMulIntegerToFloat", "Identity"]
    assert ("factor" in [item.name for item in model.graph.initializer]) is not even


@pytest.mark.parametrize(("bound", "operators"), [(0.0, []), (0.25, ["Add"])])
def test_a_bound_of_zero_is_left_out(bound: float, operators: list[str]) -> None:
    module = per_token(32, torch.zeros(OUTPUTS))
    module.input_bound = torch.tensor(bound)
    found = [node.op_type for node in built(module, INT8_PER_TOKEN, "own, stored").graph.node]
    rounding = [*operators, "ReduceMax", "Div", "Max", "QuantizeLinear", "Unsqueeze"]
    assert found == [*rounding, "MatMulIntegerToFloat", "Mul", "Add", "Identity"]


def test_every_format_is_tested_here() -> None:
    assert set(LINEAR_FORMATS) - set(HALVES) == {FLOAT32, *INT8, *BLOCK_BITS}  # those: `test_half_linears`


def integer_session(weight: np.ndarray) -> onnxruntime.InferenceSession:
    graph = Graph()
    quantized_x, _, zero = graph.add_many("DynamicQuantizeLinear", "x", outputs=3)
    graph.nodes.append(
        onnx.helper.make_node("MatMulInteger", [quantized_x, graph.weight("w", weight.T), zero], ["y"], name="product")
    )
    model = graph.model({}, {}, contrib=False)
    tensor, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
    model.graph.input.append(tensor("x", kinds.FLOAT, ["n", weight.shape[1]]))
    model.graph.output.append(tensor("y", kinds.INT32, ["n", weight.shape[0]]))
    return session(model)


@pytest.mark.parametrize("inputs", [16, 384, 1536])
def test_int32_accumulators_are_identical(inputs: int) -> None:
    weight, _ = quantize_rows(awkward_weight(inputs), 7)
    opened = integer_session(weight.numpy())
    for name, x in awkward_inputs(inputs).items():
        (found,) = opened.run(None, {"x": x.numpy()})
        q, _, zero = quantize_activations(x)
        expected = (q - zero).numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
        np.testing.assert_array_equal(found, expected, err_msg=name)
