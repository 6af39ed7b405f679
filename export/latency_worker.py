"""One model in one process, timed on demand: the child that `latency.compare` starts, stops and asks.

usage: python -m slimformer.export.latency_worker MODEL.onnx FEEDS.npz PROVIDER THREADS PARENT_PID

`FEEDS.npz` holds arrays named `workload/batch/input`. When the model is loaded the worker writes one JSON line, then
answers each JSON line on stdin with one on stdout:
    {"do": "warm", "workload": 0}                  -> {}                       every input shape once
    {"do": "round", "workload": 0, "minimum": 0.2} -> {"seconds": [[...], ...]} passes x batches
    {"do": "memory"}                               -> {"peak_mib": 123.4}
Any failure is one line on stderr and exit code 1.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]
TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends, even while it is stopped; exit if that has happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that asked for the measurement has ended")


def read_workloads(path: Path) -> list[list[Feed]]:
    """The batches of each workload, in the order in which `latency.compare` numbered them."""
    workloads: dict[int, dict[int, Feed]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key, array in arrays.items():
            workload, batch, name = key.split("/", 2)
            workloads.setdefault(int(workload), {}).setdefault(int(batch), {})[name] = array
    return [[batches[batch] for batch in sorted(batches)] for _, batches in sorted(workloads.items())]


def fit(feed: Feed, inputs: dict[str, str]) -> Feed:
    """The arrays that a model with `inputs` (name -> onnxruntime type) takes; a missing `token_type_ids` is zeros.

    Raises ValueError for another input that the workload lacks or a type other than those in `TYPES`.
    """
    fitted = {}
    for name, kind in inputs.items():
        if name not in feed and name != "token_type_ids":
            raise ValueError(f"the model wants the input {name!r}; the workload has {', '.join(sorted(feed))}")
        if kind not in TYPES:
            raise ValueError(f"the model's input {name!r} is a {kind}; known are {', '.join(TYPES)}")
        array = feed[name] if name in feed else np.zeros_like(feed["input_ids"])
        fitted[name] = array.astype(TYPES[kind])
    return fitted


def tokens(feed: Feed) -> int:
    """Valid tokens of a batch, by its mask."""
    return int(feed["attention_mask"].sum())


def warm_up_order(batches: list[Feed]) -> list[int]:
    """One batch for each input shape: the one with the most valid tokens, which needs the most memory.

    onnxruntime plans its memory at the first run of each input shape, so each shape is run once before it is timed.
    """
    fullest: dict[tuple[int, ...], int] = {}
    for index, feed in enumerate(batches):
        shape = feed["input_ids"].shape
        if shape not in fullest or tokens(feed) > tokens(batches[fullest[shape]]):
            fullest[shape] = index
    return list(fullest.values())


def peak_mib() -> float:
    """Peak resident memory of this process in MiB.

    On Linux `ru_maxrss` starts at the peak of the process that forked this one, so the kernel's `VmHWM`, which starts
    afresh, is read first.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    if sys.platform == "win32":
        return float("nan")
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class Model:
    """An onnxruntime session with default options apart from its thread count, and the workloads it is timed on."""

    def __init__(self, path: str, feeds: Path, provider: str, threads: int) -> None:
        import onnxruntime

        if provider == "CUDAExecutionProvider":
            onnxruntime.preload_dlls()  # CUDA and cuDNN from the packages that came with torch
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        begin = time.perf_counter()
        self.session = onnxruntime.InferenceSession(path, options, providers=[provider])
        self.load_seconds = time.perf_counter() - begin
        used = self.session.get_providers()[0]
        if used != provider:
            raise ValueError(f"{provider} did not start and onnxruntime fell back to {used}: check driver and device")
        inputs = {value.name: value.type for value in self.session.get_inputs()}
        plain = read_workloads(feeds)
        self.workloads = [[fit(feed, inputs) for feed in batches] for batches in plain]
        self.warm_ups = [warm_up_order(batches) for batches in plain]
        self.smallest = [int(np.argmin([tokens(feed) for feed in batches])) for batches in plain]

    def warm(self, workload: int) -> None:
        """Run each input shape of the workload once."""
        for index in self.warm_ups[workload]:
            self.session.run(None, self.workloads[workload][index])

    def round(self, workload: int, minimum: float) -> list[list[float]]:
        """Seconds of each batch (passes x batches): whole passes until `minimum` seconds are over.

        Other models ran since the last round, so the smallest batch is run once untimed to wake threads and caches.
        """
        batches = self.workloads[workload]
        self.session.run(None, batches[self.smallest[workload]])
        passes: list[list[float]] = []
        begin = time.perf_counter()
        while not passes or time.perf_counter() - begin < minimum:
            seconds = []
            for feed in batches:
                start = time.perf_counter()
                self.session.run(None, feed)
                seconds.append(time.perf_counter() - start)
            passes.append(seconds)
        return passes


def answer(model: Model, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks. Raises ValueError for an unknown one."""
    if request["do"] == "warm":
        model.warm(request["workload"])
        return {}
    if request["do"] == "round":
        return {"seconds": model.round(request["workload"], request["minimum"])}
    if request["do"] == "memory":
        return {"peak_mib": peak_mib()}
    raise ValueError(f"unknown request {request['do']!r}")


def serve(arguments: list[str], requests: TextIO, replies: TextIO) -> None:
    """Load the model, say so, and answer until `requests` ends."""
    path, feeds, provider, threads, parent = arguments
    die_with(int(parent))

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    model = Model(path, Path(feeds), provider, int(threads))
    reply({"load_seconds": model.load_seconds})
    for line in requests:
        reply(answer(model, json.loads(line)))


def main() -> None:
    """Keep stdout for the replies alone (libraries write to stderr instead) and turn a failure into one line."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.argv[1:], sys.stdin, replies)
    except Exception as error:  # the boundary of the process: whatever it is, the parent reports it
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
