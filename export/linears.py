"""Linears in ONNX, in every format of the config (`transformer.int8`, `transformer.blocks`, `transformer.half`).

`own` uses onnxruntime's operators, one each; `standard` those of ONNX alone.
"""

from collections.abc import Callable

import numpy as np
import onnx

from ..transformer.errors import InputError
from ..transformer.layer_config import BFLOAT16, BLOCK, BLOCK_BITS, FLOAT16, FLOAT32, INT8_PER_TOKEN, INT8_STATIC
from .graph import CONTRIB, Graph
from .tensors import Weights

FLOAT = onnx.TensorProto.FLOAT
HALF_TYPES = {FLOAT16: onnx.TensorProto.FLOAT16, BFLOAT16: onnx.TensorProto.BFLOAT16}
ROUNDED = 4  # MatMulNBits: activations are rounded to 8 bits in blocks too, and products are of integers

Place = Callable[[Graph, Weights], str]


def stored(g: Graph, weights: Weights) -> str:
    """A weight (O, I) stored as products take it, (I, O)."""
    return g.weight(weights.full("weight"), weights["weight"].T)


def turned(g: Graph, weights: Weights) -> str:
    """A weight stored as it is, turned to (I, O) in the graph: see `Graph.turned`."""
    return g.turned(weights.full("weight"), weights["weight"])


def own(g: Graph, weights: Weights, form: str, x: str, place: Place) -> str:
    """Tokens (N, I) -> (N, O) in the config's format; `place` stores matrices."""
    bias = _bias(g, weights)
    if form == FLOAT32:
        return _with_bias(g, g.add("MatMul", x, place(g, weights)), bias)
    if form in HALF_TYPES:
        return _half(g, HALF_TYPES[form], x, place(g, weights), bias)
    if form in BLOCK_BITS:
        return _block_matmul(g, weights, BLOCK_BITS[form], x, bias)
    weight, scale = place(g, weights), _vector(g, weights, "scale")
    if form == INT8_STATIC:
        rounded, x_scale, zero = _rounded(g, weights, x)
        return g.add("MatMulIntegerToFloat", rounded, weight, x_scale, scale, zero, "", bias, domain=CONTRIB)
    if form == INT8_PER_TOKEN:
        rounded, of_token = _rounded_by_rows(g, weights, x)
        product = g.add(
            "MatMulIntegerToFloat", rounded, weight, g.constant(1, np.float32), scale, "", "", "", domain=CONTRIB
        )
        return _with_bias(g, g.add("Mul", product, of_token), bias)
    return dynamic_matmul(g, x, weight, scale, bias)


def standard(g: Graph, weights: Weights, form: str, x: str) -> str:
    """(…, I) -> (…, O) in the config's format.

    Raises:
        InputError: the weight is in blocks, for which there is no standard operator.
    """
    if form in BLOCK_BITS:
        raise InputError(f"the padded layout has no linears of the format {form}: take packed")
    bias, weight = _bias(g, weights), stored(g, weights)
    if form == FLOAT32:
        return _with_bias(g, g.add("MatMul", x, weight), bias)
    if form in HALF_TYPES:
        return _half(g, HALF_TYPES[form], x, weight, bias)
    scale = _vector(g, weights, "scale")
    if form == INT8_PER_TOKEN:
        rounded, of_token = _rounded_by_rows(g, weights, g.add("Flatten", x, axis=-1))
        product = g.add("Cast", g.add("MatMulInteger", rounded, weight), to=FLOAT)
        rows = _with_bias(g, g.add("Mul", g.add("Mul", product, scale), of_token), bias)
        leading = g.add("Slice", g.add("Shape", x), g.constant([0]), g.constant([-1]))
        return g.add("Reshape", rows, g.add("Concat", leading, g.constant([-1]), axis=0))
    if form == INT8_STATIC:
        rounded, x_scale, zero = _rounded(g, weights, x)
    else:
        rounded, x_scale, zero = g.add_many("DynamicQuantizeLinear", x, outputs=3)
    product = g.add("Cast", g.add("MatMulInteger", rounded, weight, zero), to=FLOAT)
    return _with_bias(g, g.add("Mul", product, g.add("Mul", x_scale, scale)), bias)


def dynamic_matmul(g: Graph, x: str, weight: str, scale: str, bias: str) -> str:
    """x (…, I) quantized as it comes, int8 (I, O), (O,) and (O,) or "" -> (…, O), in one operator of onnxruntime."""
    return g.add("DynamicQuantizeMatMul", x, weight, scale, "", bias, domain=CONTRIB)


def _bias(g: Graph, weights: Weights) -> str:
    return _vector(g, weights, "bias") if "bias" in weights else ""


def _vector(g: Graph, weights: Weights, name: str) -> str:
    return g.weight(weights.full(name), weights[name])


def _with_bias(g: Graph, product: str, bias: str) -> str:
    return g.add("Add", product, bias) if bias else product


def _half(g: Graph, kind: int, x: str, weight: str, bias: str) -> str:
    """x (…, I), weight (I, O) and bias (O,) or "" of the type `kind` -> (…, O), computed in that type."""
    product = g.add("MatMul", g.add("Cast", x, to=kind), weight)
    return g.add("Cast", _with_bias(g, product, bias), to=FLOAT)


def _rounded(g: Graph, weights: Weights, x: str) -> tuple[str, str, str]:
    """x (…, I) -> integers, their scale () and zero point (); a factor of ones is left out."""
    if np.any(weights["factor"] != 1):
        x = g.add("Mul", x, _vector(g, weights, "factor"))
    scale, zero = _vector(g, weights, "input_scale"), _vector(g, weights, "input_zero")
    return g.add("QuantizeLinear", x, scale, zero), scale, zero


def _rounded_by_rows(g: Graph, weights: Weights, x: str) -> tuple[str, str]:
    """x (N, I) -> integers and the scale of each row (N, 1), as `transformer.int8.quantize_tokens` has them."""
    if weights["input_bound"] != 0:
        x = g.add("Add", x, _vector(g, weights, "input_bound"))
    scale = g.add("Div", g.add("ReduceMax", x, g.constant([-1]), keepdims=0), g.constant(255, np.float32))
    scale = g.add("Max", scale, g.constant(np.finfo(np.float32).tiny, np.float32))
    return g.add("QuantizeLinear", x, scale, axis=0), g.add("Unsqueeze", scale, g.constant([1]))


def _block_matmul(g: Graph, weights: Weights, bits: int, x: str, bias: str) -> str:
    packed = weights["weight"]  # (O, blocks, bytes)
    weight = g.turned(weights.full("weight"), packed.swapaxes(0, 1))  # so that a loop's body has it for itself
    return g.add(
        "MatMulNBits",
        x,
        weight,
        g.weight(weights.full("scale"), weights["scale"]),
        "",
        "",
        bias,
        domain=CONTRIB,
        K=BLOCK * packed.shape[1],
        N=len(packed),
        bits=bits,
        block_size=BLOCK,
        accuracy_level=ROUNDED,
    )
