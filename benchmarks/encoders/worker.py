"""One encoder in one process, timed on demand; runs in any environment that has its engine.

usage: python worker.py CONTENDER.json FEEDS.npz

CONTENDER.json: {"engine": "onnxruntime" | "openvino" | "ctranslate2", "file": …, "threads": 2, "options": {…}};
FEEDS.npz holds arrays named `workload/batch/input`. What an engine wants of its inputs (their type, zeros for token
types, parts of a batch for several streams, a model compiled for the shape) is made before the clock starts.
Answers each JSON line on stdin with one on stdout:
    {"do": "warm", "workload": "sorted"}                      -> {}                  every batch once
    {"do": "round", "workload": "sorted", "minimum": 0.2}     -> {"seconds": [...]}  of whole passes
    {"do": "embed", "rows": [[101, …], …], "file": "out.npy"} -> {}                  unit vectors (rows, E)
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Outputs = dict[str, NDArray[np.float32]]
BATCH = 32  # texts that are embedded at once


class Engine(Protocol):
    """A model at work."""

    def prepare(self, ids: Ids, mask: Ids) -> Any:
        """Whatever `run` takes for a batch (B, T)."""

    def run(self, prepared: Any) -> Outputs:
        """Compute every output of a batch."""


def divided(array: Ids, parts: int) -> list[Ids]:
    """An array in up to `parts` parts of its rows."""
    return [part for part in np.array_split(array, parts) if len(part)]


class Onnxruntime:
    """A session: of `options` "config" are entries by name, the rest attributes of SessionOptions."""

    def __init__(self, file: str, threads: int, options: dict[str, Any]) -> None:
        import onnxruntime

        chosen = onnxruntime.SessionOptions()
        chosen.intra_op_num_threads = threads
        chosen.log_severity_level = 3
        for name, value in options.get("config", {}).items():
            chosen.add_session_config_entry(name, value)
        if "optimization" in options:
            chosen.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, options["optimization"])
        self.session = onnxruntime.InferenceSession(file, chosen, providers=["CPUExecutionProvider"])
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def prepare(self, ids: Ids, mask: Ids) -> dict[str, Ids]:
        """The session's inputs."""
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        return {name: given[name] for name in self.inputs}

    def run(self, prepared: dict[str, Ids]) -> Outputs:
        """Run it."""
        return dict(zip(self.outputs, self.session.run(self.outputs, prepared), strict=True))


class Openvino:
    """A compiled model, for one shape each where `static`; `parts` requests run beside each other."""

    def __init__(self, file: str, threads: int, options: dict[str, Any]) -> None:
        import openvino

        self.core = openvino.Core()
        self.model = self.core.read_model(file)
        self.properties = {"INFERENCE_NUM_THREADS": threads, **options.get("properties", {})}
        self.parts, self.static = options.get("parts", 1), options.get("static", False)
        every = {"input_ids", "attention_mask", "token_type_ids"}  # a model's input may have more than one name
        self.names = [(value.get_names() & every).pop() for value in self.model.inputs]
        self.requests: dict[tuple[int, ...], list[Any]] = {}
        if not self.static:
            self.requests[()] = self._requests(self.model)

    def _requests(self, model: Any) -> list[Any]:
        compiled = self.core.compile_model(model, "CPU", self.properties)
        return [compiled.create_infer_request() for _ in range(self.parts)]

    def _compiled(self, shape: tuple[int, ...]) -> list[Any]:
        """The requests of a shape."""
        key = shape if self.static else ()
        if key not in self.requests:
            model = self.model.clone()
            model.reshape(dict.fromkeys(self.names, shape))
            self.requests[key] = self._requests(model)
        return self.requests[key]

    def prepare(self, ids: Ids, mask: Ids) -> list[tuple[Any, dict[str, Ids]]]:
        """For each part of the batch its request and inputs."""
        prepared = []
        for at, (part, valid) in enumerate(zip(divided(ids, self.parts), divided(mask, self.parts), strict=True)):
            given = {"input_ids": part, "attention_mask": valid, "token_type_ids": np.zeros_like(part)}
            prepared.append((self._compiled(part.shape)[at], {name: given[name] for name in self.names}))
        return prepared

    def run(self, prepared: list[tuple[Any, dict[str, Ids]]]) -> Outputs:
        """Run all parts."""
        if len(prepared) == 1:
            request, given = prepared[0]
            request.infer(given, share_inputs=True, share_outputs=True)
            return {"last_hidden_state": request.get_output_tensor(0).data}
        for request, given in prepared:
            request.start_async(given, share_inputs=True)
        for request, _ in prepared:
            request.wait()
        return {"last_hidden_state": np.concatenate([request.get_output_tensor(0).data for request, _ in prepared])}


class Ctranslate2:
    """An Encoder; `parts` of a batch go to its `inter` workers of `intra` threads beside each other."""

    def __init__(self, file: str, threads: int, options: dict[str, Any]) -> None:
        import ctranslate2

        self.parts = options.get("parts", 1)
        self.encoder = ctranslate2.Encoder(
            os.path.dirname(file),
            compute_type=options["compute_type"],
            inter_threads=options.get("inter", 1),
            intra_threads=options.get("intra", threads),
        )
        self.view = ctranslate2.StorageView
        self.pool = ThreadPoolExecutor(self.parts)

    def prepare(self, ids: Ids, mask: Ids) -> list[Any]:
        """Views of each part's ids and lengths, and the arrays behind them, whose memory they share."""
        parts = zip(divided(ids, self.parts), divided(mask, self.parts), strict=True)
        arrays = [(part.astype(np.int32), valid.sum(1, dtype=np.int32)) for part, valid in parts]
        return [([self.view.from_array(array) for array in pair], pair) for pair in arrays]

    def _forward(self, part: Any) -> NDArray[np.float32]:
        return np.asarray(self.encoder.forward_batch(*part[0]).last_hidden_state)

    def run(self, prepared: list[Any]) -> Outputs:
        """Run all parts."""
        if len(prepared) == 1:
            return {"last_hidden_state": self._forward(prepared[0])}
        return {"last_hidden_state": np.concatenate(list(self.pool.map(self._forward, prepared)))}


ENGINES: dict[str, Callable[[str, int, dict[str, Any]], Engine]] = {
    "onnxruntime": Onnxruntime,
    "openvino": Openvino,
    "ctranslate2": Ctranslate2,
}


def embed(engine: Engine, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Token ids -> unit vectors (rows, E), in batches of texts of like length."""
    vectors: dict[int, NDArray[np.float32]] = {}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for at in range(0, len(order), BATCH):
        chosen = order[at : at + BATCH]
        ids = np.zeros((len(chosen), max(len(rows[i]) for i in chosen)), np.int64)
        mask = np.zeros_like(ids)
        for place, i in enumerate(chosen):
            ids[place, : len(rows[i])], mask[place, : len(rows[i])] = rows[i], 1
        outputs = engine.run(engine.prepare(ids, mask))
        found = outputs.get("sentence_embedding")
        if found is None:
            found = (outputs["last_hidden_state"] * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        found = found / np.linalg.norm(found, axis=1, keepdims=True)
        vectors.update(zip(chosen, found.astype(np.float32), strict=True))
    return np.stack([vectors[i] for i in range(len(rows))])


class Workloads:
    """Prepared batches by workload, made when a workload is first asked for."""

    def __init__(self, engine: Engine, file: str) -> None:
        self.engine, self.arrays = engine, dict(np.load(file))
        self.ready: dict[str, list[Any]] = {}

    def batches(self, name: str) -> list[Any]:
        """What the engine takes for each batch of a workload."""
        if name not in self.ready:
            count = sum(key.startswith(f"{name}/") and key.endswith("/input_ids") for key in self.arrays)
            pairs = [
                [self.arrays[f"{name}/{i}/{key}"] for key in ("input_ids", "attention_mask")] for i in range(count)
            ]
            self.ready[name] = [self.engine.prepare(*pair) for pair in pairs]
        return self.ready[name]

    def seconds(self, name: str, minimum: float) -> list[float]:
        """Seconds of whole passes until `minimum` is over, one batch after the other."""
        batches = self.batches(name)
        passes: list[float] = []
        self.engine.run(batches[0])  # others ran since: wake threads and caches
        while sum(passes) < minimum or not passes:
            begin = time.perf_counter()
            for batch in batches:
                self.engine.run(batch)
            passes.append(time.perf_counter() - begin)
        return passes


def main() -> None:
    """Answer until stdin ends; what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open(sys.argv[1], encoding="utf-8") as file:
        said = json.load(file)
    engine = ENGINES[said["engine"]](said["file"], said["threads"], said["options"])
    workloads = Workloads(engine, sys.argv[2])
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        asked, answer = json.loads(line), {}
        if asked["do"] == "warm":
            for batch in workloads.batches(asked["workload"]):
                engine.run(batch)
        elif asked["do"] == "round":
            answer = {"seconds": workloads.seconds(asked["workload"], asked["minimum"])}
        else:
            np.save(asked["file"], embed(engine, asked["rows"]))
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
