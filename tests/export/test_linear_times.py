"""Times of linears: each kind once, above 0, and more where there is much more to do."""

import onnx
import pytest

from slimformer.export.linear_times import _model, linear_times
from slimformer.export.timing import module_state
from slimformer.transformer.layer_config import (
    FLOAT32,
    HALVES,
    INT8_BLOCKS,
    INT8_DYNAMIC,
    INT8_PER_TOKEN,
    INT8_STATIC,
    LINEAR_FORMATS,
)
from slimformer.transformer.layers import linear


def test_every_format_is_timed() -> None:
    kinds = [(64, 32, form) for form in LINEAR_FORMATS if form not in HALVES]
    found = linear_times([*kinds, kinds[0]], tokens=8, threads=1)
    assert list(found) == kinds
    assert all(seconds > 0 for seconds in found.values())


def test_a_thousand_times_the_work_takes_longer() -> None:
    kinds = [(32, 32, FLOAT32), (1024, 1024, FLOAT32)]
    small, large = (linear_times(kinds, tokens=64, threads=1)[kind] for kind in kinds)
    assert large > 5 * small


@pytest.mark.parametrize(
    ("form", "operators"),
    [
        (FLOAT32, ["MatMul", "Add"]),
        (INT8_DYNAMIC, ["DynamicQuantizeMatMul"]),
        (INT8_STATIC, ["Mul", "QuantizeLinear", "MatMulIntegerToFloat"]),
        (
            INT8_PER_TOKEN,
            ["Add", "ReduceMax", "Div", "Max", "QuantizeLinear", "Unsqueeze", "MatMulIntegerToFloat", "Mul", "Add"],
        ),
        (INT8_BLOCKS, ["Transpose", "MatMulNBits"]),
    ],
)
def test_what_is_timed_is_what_is_exported(form: str, operators: list[str]) -> None:
    model = _model(module_state(linear(inputs=64, outputs=32, form=form)), 64, 32, form)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == [*operators, "Identity"]
