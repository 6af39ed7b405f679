"""How long a linear takes in each format, alone, in onnxruntime on this machine.

Sessions live in one process with spinning turned off for all, or the idle ones would slow the others down; rounds are
interleaved, so that what the machine does besides falls on all alike. Weights are those of a new module: time does not
depend on their values.
"""

import time
from collections.abc import Iterable, Mapping
from statistics import median

import numpy as np
import onnx
import onnxruntime

from ..transformer.layers import linear
from .graph import Graph
from .linears import own, stored
from .machine import available_threads
from .tensors import Array, Weights

ROUNDS = 15
Kind = tuple[int, int, str]  # inputs, outputs, format


def linear_times(kinds: Iterable[Kind], *, tokens: int, threads: int | None = None) -> dict[Kind, float]:
    """Median seconds of each linear on (tokens, inputs) random numbers.

    Args:
        kinds: inputs, outputs and format of each, none in half precision.
        tokens: rows that it is given at once.
        threads: of onnxruntime; None: the cores that this process may use.
    """
    sessions = {kind: _session(*kind, available_threads(threads)) for kind in dict.fromkeys(kinds)}
    random = np.random.default_rng(0)
    feeds = {inputs: {"x": random.standard_normal((tokens, inputs), np.float32)} for inputs, _, _ in sessions}
    seconds: dict[Kind, list[float]] = {kind: [] for kind in sessions}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for kind, session in sessions.items():
            begun = time.perf_counter()
            session.run(None, feeds[kind[0]])
            seconds[kind].append(time.perf_counter() - begun)
    return {kind: median(found[1:]) for kind, found in seconds.items()}


def _session(inputs: int, outputs: int, form: str, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = _model(_state(inputs, outputs, form), inputs, outputs, form)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _state(inputs: int, outputs: int, form: str) -> dict[str, Array]:
    state = {
        name: value.numpy() for name, value in linear(inputs=inputs, outputs=outputs, form=form).state_dict().items()
    }
    for name, neutral in (("factor", 1), ("input_bound", 0)):
        if name in state:
            state[name] = np.full_like(state[name], neutral + 1)  # what is neutral would be left out of the graph
    return state


def _model(state: Mapping[str, Array], inputs: int, outputs: int, form: str) -> onnx.ModelProto:
    graph = Graph()
    graph.name_output(own(graph, Weights(state), form, "x", stored), "y")
    float32 = onnx.TensorProto.FLOAT
    return graph.model({"x": ["n", inputs]}, {"y": ["n", outputs]}, contrib=True, types={"x": float32})
