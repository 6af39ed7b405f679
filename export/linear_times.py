"""How long a linear takes in each format, alone, in onnxruntime on this machine (`timing`)."""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median

import numpy as np
import onnx
import onnxruntime

from ..transformer.layers import linear
from .graph import Graph
from .linears import own, stored
from .machine import available_threads
from .tensors import Array, Weights
from .timing import interleaved, module_state, open_session

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

    def timed(kind: Kind) -> float:
        begun = time.perf_counter()
        sessions[kind].run(None, feeds[kind[0]])
        return time.perf_counter() - begun

    passes = {kind: partial(timed, kind) for kind in sessions}
    seconds = interleaved(passes, seconds=0.0, fewest=ROUNDS, most=ROUNDS)
    return {kind: median(found) for kind, found in seconds.items()}


def _session(inputs: int, outputs: int, form: str, threads: int) -> onnxruntime.InferenceSession:
    state = module_state(linear(inputs=inputs, outputs=outputs, form=form))
    return open_session(_model(state, inputs, outputs, form).SerializeToString(), threads=threads)


def _model(state: Mapping[str, Array], inputs: int, outputs: int, form: str) -> onnx.ModelProto:
    graph = Graph()
    graph.name_output(own(graph, Weights(state), form, "x", stored), "y")
    float32 = onnx.TensorProto.FLOAT
    return graph.model({"x": ["n", inputs]}, {"y": ["n", outputs]}, contrib=True, types={"x": float32})
