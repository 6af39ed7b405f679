"""The whole int8 graph of all-MiniLM-L6-v2 against its integer matrix products alone: how far it is from its floor.

usage: .venv/bin/python benchmarks/gemm_floor.py [BUNDLE] [--batch 8] [--seq 128] [--rounds 9] [--quick]

BUNDLE is an int8 encoder's; without one, MiniLM with activations in int8 by their range at run time is exported. Out
of its graph every integer product's weights go into a graph of `MatMulInteger` nodes alone: u8 inputs of batch x seq
rows, each product with its own, which are initializers that are also inputs of the graph, so that onnxruntime may not
compute anything ahead of time. Neither rounding the activations nor scaling the int32 sums back to float is counted;
of each product one row is read afterwards, so that it has to be computed and need not be copied out.
Both graphs run in processes of their own, in interleaved rounds, with one thread and with two. onnxruntime's own
profile of a run says which products each of them really computes.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from help_search.setting import DATA, minilm
from onnx import TensorProto, helper, numpy_helper

from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.export import export
from slimformer.export.latency import Workload, compare, shape_workload
from slimformer.export.machine import advice, available_threads
from slimformer.export.names import MODEL_FILE
from slimformer.transformer.data import load_data

WEIGHT = {"MatMulInteger": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1}  # place among the inputs
OPSET = 18


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The int8 weights (K, N) of a graph's integer products, in order, by the name of the weight."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    names = [node.input[WEIGHT[node.op_type]] for node in model.graph.node if node.op_type in WEIGHT]
    return {name: numpy_helper.to_array(tensors[name]) for name in names}


def products(matrices: dict[str, np.ndarray], rows: int) -> onnx.ModelProto:
    """A graph that multiplies random u8 inputs (rows, K) by each matrix (K, N) and gives the first row of each.

    It takes `input_ids`, as `compare` does, and looks at none of it but its size.
    """
    random = np.random.default_rng(0)
    nodes, constants, inputs, outputs = [], [], [], []
    constants.append(numpy_helper.from_array(np.array([0]), "first"))
    constants.append(numpy_helper.from_array(np.array(128, np.uint8), "zero_point"))
    inputs.append(helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]))
    nodes.append(helper.make_node("Size", ["input_ids"], ["tokens"]))
    outputs.append(helper.make_tensor_value_info("tokens", TensorProto.INT64, []))
    for name, matrix in matrices.items():
        given, product, row = f"{name}/input", f"{name}/product", f"{name}/row"
        values = random.integers(0, 256, (rows, len(matrix)), dtype=np.uint8)
        inputs.append(helper.make_tensor_value_info(given, TensorProto.UINT8, values.shape))
        constants += [numpy_helper.from_array(values, given), numpy_helper.from_array(matrix, name)]
        nodes.append(helper.make_node("MatMulInteger", [given, name, "zero_point"], [product], name=name))
        nodes.append(helper.make_node("Gather", [product, "first"], [row], axis=0))
        outputs.append(helper.make_tensor_value_info(row, TensorProto.INT32, [1, matrix.shape[1]]))
    graph = helper.make_graph(nodes, "products", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def computed(graph: Path, workload: Workload, folder: Path) -> Counter[str]:
    """How often a run computes each kind of integer product, by onnxruntime's profile."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / graph.stem)
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    feed = {value.name: workload.batches[0][value.name] for value in session.get_inputs()}
    session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    kernels = [event["args"]["op_name"] for event in events if event["name"].endswith("_kernel_time")]
    return Counter(kernel for kernel in kernels if kernel in WEIGHT)


def exported(folder: Path) -> Path:
    """MiniLM in int8, whatever its scores: time does not depend on the values of weights."""
    model, data = minilm(), load_data(DATA)
    return export(Quantize(format="int8_dynamic")(model, StepContext(data)).checkpoint, folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9, help="of each of two restarts of the processes")
    parser.add_argument("--quick", action="store_true", help="two rounds of one restart, to see that it runs")
    options = parser.parse_args()
    rounds, processes = (2, 1) if options.quick else (options.rounds, 2)
    workload = shape_workload(options.batch, options.seq, 1000, seed=0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = (options.bundle or exported(folder / "bundle")) / MODEL_FILE
        matrices = weights(onnx.load(whole))
        alone = folder / "products.onnx"
        onnx.save(products(matrices, options.batch * options.seq), alone)
        size = 2e-9 * options.batch * options.seq * sum(matrix.size for matrix in matrices.values())
        print("\n".join([*advice(), f"{workload.name}: {len(matrices)} integer products of {size:.1f} GOP in all"]))
        for name, graph in {"whole graph": whole, "products alone": alone}.items():
            kinds = computed(graph, workload, folder)
            print(f"{name} computes {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
            if kinds.total() != len(matrices):
                raise SystemExit(f"{name} computes {kinds.total()} integer products and not {len(matrices)}")
        for threads in dict.fromkeys(map(available_threads, (1, 2))):
            models = {"whole": whole, "alone": alone}
            timed = compare(
                models, {"dense": workload}, threads, rounds=rounds, processes=processes, seconds=3600, minimum=0.5
            )
            first, found = (timed.timing(name, "dense") for name in models)
            print(
                f"{threads} thread(s): whole {first.p50_ms:.1f} ms, products alone {found.p50_ms:.1f} ms "
                f"({1e3 * size / found.p50_ms:.0f} GOP/s): whole / alone "
                f"{found.ratio:.2f} [{found.ratio_low:.2f}, {found.ratio_high:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
