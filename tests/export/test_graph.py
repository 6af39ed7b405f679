"""The graph builder: names, constants, branches, and a model that onnx accepts and onnxruntime runs."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest

from slimformer.export.graph import OPSET, Graph


def run(graph: Graph, **values: np.ndarray) -> list[np.ndarray]:
    model = graph.model({name: ["n"] for name in values}, {"out": ["m"]}, contrib=False)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, values)


def test_names_are_never_used_twice() -> None:
    graph = Graph()
    child = Graph(graph)
    names = [graph.fresh("x"), child.fresh("x"), Graph(child).fresh("x"), graph.fresh("x")]
    assert len(set(names)) == 4
    outputs = [*graph.add_many("Split", "x", outputs=3), graph.add("Neg", "x"), child.add("Neg", "x")]
    nodes = [node.name for node in [*graph.nodes, *child.nodes]]
    assert len(set(outputs + nodes)) == len(outputs) + len(nodes)


def test_equal_constants_are_stored_once_and_in_the_root() -> None:
    graph = Graph()
    child = Graph(Graph(graph))
    first = graph.constant([1, 2])
    assert child.constant([1, 2]) == first
    assert child.constant(np.array([1, 2])) == first
    different = [graph.constant([[1, 2]]), graph.constant([1, 2], np.int32), graph.constant([1, 3]), graph.constant(1)]
    assert len({first, *different}) == 5
    assert len(graph.initializers) == 5
    assert not child.initializers


def test_plus_and_minus_zero_are_different_constants() -> None:
    graph = Graph()
    assert graph.constant(0.0, np.float32) != graph.constant(-0.0, np.float32)


def test_a_scalar_has_no_axes() -> None:
    graph = Graph()
    shapes = [list(graph.initializers[graph.constant(value)].dims) for value in (3, [3], [[3]])]
    assert shapes == [[], [1], [1, 1]]


def test_a_weight_is_stored_once_as_it_lies_in_memory() -> None:
    graph = Graph()
    value = np.arange(6, dtype=np.int8).reshape(2, 3)
    assert graph.weight("w", value.T) == graph.weight("w", value.T) == "w"
    stored = onnx.numpy_helper.to_array(graph.initializers["w"])
    assert stored.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert stored.dtype == np.int8
    assert len(graph.initializers) == 1


def test_uint16_holds_the_bits_of_bfloat16() -> None:
    graph = Graph()
    graph.weight("w", np.array([[0x3F80, 0x4040], [0xC000, 0x0000]], np.uint16).T)
    stored = graph.initializers["w"]
    assert stored.data_type == onnx.TensorProto.BFLOAT16
    assert onnx.numpy_helper.to_array(stored).astype(np.float32).tolist() == [[1.0, -2.0], [3.0, 0.0]]


@pytest.mark.parametrize(("numbers", "expected"), [([1, 2, 3], [11, 12, 13]), ([4, 5, 6], [8, 10, 12])])
def test_choose_runs_one_branch_and_branches_see_outer_values(numbers: list[int], expected: list[int]) -> None:
    """Sum below 10: x + 10, else 2 x; the constant 10 is one initializer for condition and branch."""
    graph = Graph()
    ten = graph.constant(10)
    total = graph.add("ReduceSum", "x", keepdims=0)
    small = graph.add("Less", total, ten)
    chosen = graph.choose(
        small,
        lambda g: [g.add("Add", "x", g.constant(10)), total],
        lambda g: [g.add("Add", "x", "x"), g.add("Neg", total)],
    )
    assert len(chosen) == 2
    graph.name_output(graph.add("Cast", chosen[0], to=onnx.TensorProto.FLOAT), "out")
    (out,) = run(graph, x=np.array(numbers, np.int64))
    assert out.tolist() == expected
    assert len(graph.initializers) == 1


def test_choose_nested_in_a_branch() -> None:
    graph = Graph()
    (flag,) = [graph.add("Cast", graph.add("ReduceMax", "x", keepdims=0), to=onnx.TensorProto.BOOL)]
    (value,) = graph.choose(
        flag,
        lambda g: list(g.choose(flag, lambda h: [h.constant([7])], lambda h: [h.constant([8])])),
        lambda g: [g.constant([9])],
    )
    graph.name_output(graph.add("Cast", value, to=onnx.TensorProto.FLOAT), "out")
    assert run(graph, x=np.array([1], np.int64))[0].tolist() == [7]
    assert run(graph, x=np.array([0], np.int64))[0].tolist() == [9]


def test_the_model_says_its_opsets() -> None:
    graph = Graph()
    graph.name_output(graph.add("Cast", "x", to=onnx.TensorProto.FLOAT), "out")
    plain = graph.model({"x": ["n"]}, {"out": ["n"]}, contrib=False)
    own = graph.model({"x": ["n"]}, {"out": ["n"]}, contrib=True)
    assert {entry.domain: entry.version for entry in plain.opset_import} == {"": OPSET}
    assert {entry.domain: entry.version for entry in own.opset_import} == {"": OPSET, "com.microsoft": 1}
    assert plain.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"


def test_a_turned_matrix_is_stored_once_and_turned_in_each_graph_by_itself() -> None:
    """onnxruntime packs matrices of the very graph that multiplies by them, so none may be turned outside it."""
    graph = Graph()
    value = np.arange(6, dtype=np.float32).reshape(2, 3)  # (O, I)
    condition = graph.add("Less", graph.add("ReduceSum", "x", keepdims=0), graph.constant(10.0, np.float32))

    def branch(g: Graph) -> list[str]:
        assert g.turned("w", value) == g.turned("w", value)
        return [g.add("MatMul", "x", g.turned("w", value))]

    (result,) = graph.choose(condition, branch, lambda g: [g.add("Neg", *branch(g))])
    graph.name_output(result, "out")
    assert onnx.numpy_helper.to_array(graph.initializers["w"]).tolist() == value.tolist()
    assert "Transpose" not in [node.op_type for node in graph.nodes]
    model = graph.model({"x": ["n"]}, {"out": ["m"]}, contrib=False, types={"x": onnx.TensorProto.FLOAT})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.array([1, 0, 2], np.float32)})[0].tolist() == [4, 13]
    assert session.run(None, {"x": np.array([10, 0, 2], np.float32)})[0].tolist() == [-4, -40]


def test_own_values_leave_a_body_without_a_copy_and_others_with_one() -> None:
    """A copy of a cache at every round costs as much as its attention."""
    graph = Graph()
    outer = graph.add("Neg", "x")

    def body(b: Graph, place: str, carried: Sequence[str]) -> tuple[str, list[str], list[str]]:
        own = b.add("Add", carried[0], "x")
        return b.constant(True, np.bool_), [own, carried[1], outer], [own]

    final, (scanned,) = graph.loop(graph.constant(3), ["x", "x", "x"], body, scanned=1)
    every = graph.add("Concat", *final, graph.add("Reshape", scanned, graph.constant([-1])), axis=0)
    graph.name_output(graph.add("Cast", every, to=onnx.TensorProto.FLOAT), "out")
    (loop,) = [node for node in graph.nodes if node.op_type == "Loop"]
    inside = loop.attribute[0].g
    copied = [node.input[0] for node in inside.node if node.op_type == "Identity"]
    sums = inside.node[0].output[0]
    assert [node.op_type for node in inside.node].count("Identity") == 4  # go on, carried, outer, and the sum again
    assert copied.count(sums) == 1
    assert [output.name for output in inside.output].count(sums) == 1
    assert run(graph, x=np.array([2, 5]))[0].tolist() == [8, 20, 2, 5, -2, -5, 4, 10, 6, 15, 8, 20]
