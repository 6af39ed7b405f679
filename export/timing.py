"""Graphs timed side by side in one process, and weights for graphs whose time alone is wanted.

Sessions have spinning turned off, or the idle ones would slow the others down; rounds are interleaved and their order
rotates, so that what the machine does besides falls on all alike.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import onnxruntime
import torch
from torch import nn

from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.model import Transformer
from ..transformer.weights import to_numpy
from .encoder import build_encoder
from .forms import Forms
from .generator import build_generator
from .latency import Workload
from .machine import PROVIDERS
from .tensors import Array

Pass = Callable[[], Sequence[float]]  # one pass through each workload -> its seconds
Name = TypeVar("Name", bound=Hashable)
NEUTRAL = {"factor": 1.0, "input_bound": 0.0}  # tensors that would be left out of the graph with these values


def graph_pass(
    config: TransformerConfig,
    state: Mapping[str, Array],
    forms: Forms,
    works: Sequence[Workload],
    *,
    threads: int,
    provider: str = "cpu",
) -> Pass:
    """A session of an encoder's graph in these forms, or of the graph of a model that writes, which has but one."""
    writes = isinstance(config.head, LanguageHead)
    graph = build_generator(config, state) if writes else build_encoder(config, state, forms)
    session = open_session(graph.SerializeToString(), threads=threads, provider=provider)

    def timed(work: Workload) -> float:
        begun = time.perf_counter()
        for batch in work.batches:
            session.run(None, dict(batch))
        return time.perf_counter() - begun

    return lambda: [timed(work) for work in works]


def open_session(graph: bytes, *, threads: int, provider: str = "cpu") -> onnxruntime.InferenceSession:
    """A session whose threads rest while it is idle."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(graph, options, providers=[PROVIDERS[provider]])


def interleaved(
    passes: Mapping[Name, Callable[[], float]],
    *,
    seconds: float,
    fewest: int,
    most: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """What each pass gives, round by round, after one that warms up: until `seconds` are over, within the bounds."""
    names = list(passes)
    for name in names:
        passes[name]()
    found: dict[Name, list[float]] = {name: [] for name in names}
    end = clock() + seconds
    for number in range(most):
        if number >= fewest and clock() >= end:
            break
        turn = number % max(len(names), 1)
        for name in [*names[turn:], *names[:turn]]:
            found[name].append(passes[name]())
    return found


def placeholder_state(config: TransformerConfig) -> dict[str, Array]:
    """Tensors of a config, as new modules have them: time does not depend on their values."""
    with torch.random.fork_rng(devices=[]):
        state = Transformer(config).state_dict()
    return {name: placeholder(name, value) for name, value in state.items()}


def module_state(module: nn.Module) -> dict[str, Array]:
    """The same of a new module."""
    return {name: placeholder(name, value) for name, value in module.state_dict().items()}


def placeholder(name: str, value: torch.Tensor) -> Array:
    """One of them, with another value where the graph would be simpler with it."""
    neutral = NEUTRAL.get(name.rpartition(".")[2])
    array: Array = to_numpy(value) if neutral is None else np.full(tuple(value.shape), neutral + 1, np.float32)
    return array
