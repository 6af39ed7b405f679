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
        rounded, of_token, zero = _rounded_by_rows(g, weights, x)
        one = g.constant(1, np.float32)
        product = g.add("MatMulIntegerToFloat", rounded, weight, one, scale, zero, "", "", domain=CONTRIB)
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
    if form == INT8_STATIC:
        rounded, x_scale, zero = _rounded(g, weights, x)
    elif form == INT8_PER_TOKEN:
        rounded, x_scale, zero = _rounded_by_tokens(g, weights, x)
    else:
        rounded, x_scale, zero = g.add_many("DynamicQuantizeLinear", x, outputs=3)
    product = g.add("Cast", g.add("MatMulInteger", rounded, weight, zero), to=FLOAT)
    if form == INT8_PER_TOKEN:
        scaled = g.add("Mul", g.add("Mul", product, scale), x_scale)
    else:
        scaled = g.add("Mul", product, g.add("Mul", x_scale, scale))
    return _with_bias(g, scaled, bias)


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
    """x (…, I) -> integers, their scale () and zero point ()."""
    scale, zero = _vector(g, weights, "input_scale"), _vector(g, weights, "input_zero")
    return g.add("QuantizeLinear", _times_factor(g, weights, x), scale, zero), scale, zero


def _rounded_by_rows(g: Graph, weights: Weights, x: str) -> tuple[str, str, str]:
    """x (N, I) -> integers, the scale of each row (N, 1), and their zero point ().

    QuantizeLinear takes a scale for each row, but then a zero point for each too.
    """
    x = _times_factor(g, weights, x)
    scale, zero, rows = _token_scales(g, weights, x), _vector(g, weights, "input_zero"), g.constant([1])
    scales = g.add("Squeeze", scale, rows)
    zeros = g.add("Expand", zero, g.add("Shape", scales))
    return g.add("QuantizeLinear", x, scales, zeros, axis=0), scale, zero


def _rounded_by_tokens(g: Graph, weights: Weights, x: str) -> tuple[str, str, str]:
    """x (…, I) -> integers, the scale of each token (…, 1), and their zero point ()."""
    x = _times_factor(g, weights, x)
    scale, zero = _token_scales(g, weights, x), _vector(g, weights, "input_zero")
    return g.add("QuantizeLinear", g.add("Div", x, scale), g.constant(1, np.float32), zero), scale, zero


def _times_factor(g: Graph, weights: Weights, x: str) -> str:
    """Channels times their factors; ones are left out."""
    return g.add("Mul", x, _vector(g, weights, "factor")) if np.any(weights["factor"] != 1) else x


def _token_scales(g: Graph, weights: Weights, x: str) -> str:
    """(…, I) -> (…, 1), as `transformer.int8.token_scales` has it."""
    greatest = g.add("ReduceMax", g.add("Abs", x), g.constant([-1]), keepdims=1)
    scale = g.add("Mul", greatest, _vector(g, weights, "input_scale"))
    return g.add("Max", scale, g.constant(np.finfo(np.float32).tiny, np.float32))


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
