"""A small builder of ONNX graphs: nodes in order, weights stored once, names that tell where they come from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
IR_VERSION = 10  # the lowest that onnxruntime 1.16 and later read
CONTRIB = "com.microsoft"


class Graph:
    """Nodes and initializers; branches of `If` and bodies of `Loop` are children that share the root's."""

    def __init__(self, parent: "Graph | None" = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.root: Graph = parent.root if parent is not None else self
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._turned: dict[str, str] = {}
        self._count = 0

    def fresh(self, hint: str) -> str:
        """A name that no other value has."""
        self.root._count += 1
        return f"{hint}_{self.root._count}"

    def weight(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """Store a weight under its name, once; uint16 holds the bits of bfloat16 (`transformer.weights`)."""
        if name not in self.root.initializers:
            tensor = numpy_helper.from_array(np.asarray(value, order="C"), name)
            if value.dtype == np.uint16:
                tensor.data_type = TensorProto.BFLOAT16
            self.root.initializers[name] = tensor
        return name

    def turned(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """A stored tensor (O, I, …) as (I, O, …), turned in this very graph.

        onnxruntime does that when it loads the graph, and packs the result for its products once; a matrix of an outer
        graph it packs at every product anew, in a loop at every round.
        """
        if name not in self._turned:
            self._turned[name] = self.add("Transpose", self.weight(name, value), perm=[1, 0, *range(2, value.ndim)])
        return self._turned[name]

    def give(self, name: str, value: np.ndarray[Any, Any]) -> None:
        """Give an input a value of its own, so that callers may leave it out."""
        self.root.initializers[name] = numpy_helper.from_array(value, name)

    def constant(self, value: Any, dtype: type[np.generic] = np.int64) -> str:
        """A small constant; equal ones are stored once."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        constants = self.root._constants
        if key not in constants:
            constants[key] = self.weight(self.fresh("constant"), array)
        return constants[key]

    def add(self, op: str, *inputs: str, domain: str = "", name: str = "", **attributes: Any) -> str:
        """Append a node of one output and return that output's name."""
        return self.add_many(op, *inputs, outputs=1, domain=domain, name=name, **attributes)[0]

    def add_many(
        self, op: str, *inputs: str, outputs: int, domain: str = "", name: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Append a node of several outputs and return their names."""
        names = tuple(self.fresh(name or op) for _ in range(outputs))
        self.nodes.append(helper.make_node(op, inputs, names, name=self.fresh(name or op), domain=domain, **attributes))
        return names

    def choose(
        self, condition: str, then: Callable[["Graph"], Sequence[str]], otherwise: Callable[["Graph"], Sequence[str]]
    ) -> tuple[str, ...]:
        """`If`: the values of one of two branches, each of which may use all values of this graph."""
        branches = []
        for build in (then, otherwise):
            child = Graph(self)
            names = child._outputs(build(child))
            infos = [helper.make_empty_tensor_value_info(name) for name in names]
            branches.append((helper.make_graph(child.nodes, self.fresh("branch"), [], infos), len(names)))
        count = branches[0][1]
        return self.add_many("If", condition, outputs=count, then_branch=branches[0][0], else_branch=branches[1][0])

    def loop(
        self,
        most: str,
        initial: Sequence[str],
        body: Callable[["Graph", str, Sequence[str]], tuple[str, Sequence[str], Sequence[str]]],
        *,
        scanned: int,
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`Loop`, at most `most` () times.

        `body` gets a child graph that may use all values of this one, the number of the round () from 0, and the
        carried values; it gives whether to go on, the carried values again, and `scanned` values that are stacked round
        by round. Returns the carried values after the last round, and the stacks.
        """
        child = Graph(self)
        place, before = child.fresh("round"), child.fresh("go_on")
        carried = [child.fresh("carried") for _ in initial]
        go_on, after, scans = body(child, place, carried)
        results = child._outputs([go_on, *after, *scans])
        inputs = [helper.make_tensor_value_info(place, TensorProto.INT64, [])]
        inputs += [helper.make_tensor_value_info(before, TensorProto.BOOL, [])]
        inputs += [helper.make_empty_tensor_value_info(name) for name in carried]
        infos = [helper.make_empty_tensor_value_info(name) for name in results]
        graph = helper.make_graph(child.nodes, self.fresh("body"), inputs, infos)
        outputs = self.add_many("Loop", most, "", *initial, outputs=len(carried) + scanned, body=graph)
        return outputs[: len(carried)], outputs[len(carried) :]

    def _outputs(self, values: Sequence[str]) -> list[str]:
        """Values as outputs of this child: its own as they are, once; copies of those from outside, and of others."""
        own = {name for node in self.nodes for name in node.output}
        names: list[str] = []
        for value in values:
            names.append(value if value in own and value not in names else self.add("Identity", value))
        return names

    def name_output(self, value: str, name: str) -> str:
        """Give a value its public name, and return that name for those who read the value."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"output_{name}"))
        return name

    def model(
        self,
        inputs: Mapping[str, Sequence[str | int]],
        outputs: Mapping[str, Sequence[str | int]],
        *,
        contrib: bool,
        types: Mapping[str, int] | None = None,
    ) -> onnx.ModelProto:
        """The finished model: inputs and outputs with their axes, int64 and float where `types` says nothing else."""
        kinds = {
            **dict.fromkeys(inputs, TensorProto.INT64),
            **dict.fromkeys(outputs, TensorProto.FLOAT),
            **(types or {}),
        }
        graph = helper.make_graph(
            self.nodes,
            "slimformer",
            [helper.make_tensor_value_info(n, kinds[n], list(axes)) for n, axes in inputs.items()],
            [helper.make_tensor_value_info(n, kinds[n], list(axes)) for n, axes in outputs.items()],
            list(self.initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)] + ([helper.make_opsetid(CONTRIB, 1)] if contrib else [])
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="slimformer")
