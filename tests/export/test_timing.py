from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny import tiny, tiny_config

from slimformer.export.forms import Forms
from slimformer.export.latency import Workload, shape_workload
from slimformer.export.timing import graph_pass, interleaved, module_state, placeholder_state
from slimformer.transformer.layer_config import INT8_PER_TOKEN, INT8_STATIC
from slimformer.transformer.model import Transformer
from slimformer.transformer.quantization import linear_names, with_formats


class Clock:
    """Goes on by what passes take; `calls` are their names in order."""

    def __init__(self, **seconds: float) -> None:
        self.now, self.calls, self.seconds = 0.0, list[str](), seconds

    def passes(self) -> dict[str, Callable[[], float]]:
        def one(name: str) -> Callable[[], float]:
            def run() -> float:
                self.calls.append(name)
                self.now += self.seconds[name]
                return self.seconds[name] + 100 * self.calls.count(name)

            return run

        return {name: one(name) for name in self.seconds}

    def interleaved(self, seconds: float, fewest: int, most: int) -> dict[str, list[float]]:
        return interleaved(self.passes(), seconds=seconds, fewest=fewest, most=most, clock=lambda: self.now)


def test_rounds_rotate_after_one_that_warms_up() -> None:
    clock = Clock(a=1.0, b=2.0, c=3.0)
    found = clock.interleaved(seconds=0.0, fewest=4, most=9)
    assert "".join(clock.calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [201, 301, 401, 501], "b": [202, 302, 402, 502], "c": [203, 303, 403, 503]}


@pytest.mark.parametrize(
    ("seconds", "fewest", "most", "rounds"),
    [(0.0, 3, 10, 3), (20.0, 1, 10, 4), (17.9, 1, 10, 3), (18.0, 1, 10, 3), (18.1, 1, 10, 4), (1e9, 1, 5, 5)],
)
def test_rounds_go_on_until_the_time_is_over(seconds: float, fewest: int, most: int, rounds: int) -> None:
    """A round takes 6 s, and the one that warms up does not count."""
    found = Clock(a=1.0, b=2.0, c=3.0).interleaved(seconds, fewest, most)
    assert {len(own) for own in found.values()} == {rounds}


def test_nothing_is_timed_where_there_is_nothing() -> None:
    assert interleaved({}, seconds=0.0, fewest=1, most=2) == {}


def test_a_pass_gives_the_seconds_of_each_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []

    class Session:
        def run(self, outputs: None, feed: dict[str, np.ndarray]) -> None:
            assert outputs is None
            ran.append(feed["input_ids"].shape)

    opened: list[dict] = []
    monkeypatch.setattr("slimformer.export.timing.open_session", lambda graph, **how: opened.append(how) or Session())
    ticks = iter([10.0, 10.5, 20.0, 22.0])
    monkeypatch.setattr("slimformer.export.timing.time.perf_counter", lambda: next(ticks))
    first, second = shape_workload(1, 4, 40, seed=0), shape_workload(2, 3, 40, seed=0)
    works = (first, Workload("two", (*second.batches, *first.batches)))
    model = tiny()
    run = graph_pass(
        model.config, {name: value.numpy() for name, value in model.state.items()}, Forms(), works, threads=3
    )
    assert opened == [{"threads": 3, "provider": "cpu"}]
    assert ran == []
    assert run() == [0.5, 2.0]
    assert ran == [(1, 4), (2, 3), (1, 4)]


def test_a_graph_of_placeholders_runs() -> None:
    config = tiny_config()
    run = graph_pass(config, placeholder_state(config), Forms(), (shape_workload(2, 4, 40, seed=0),), threads=1)
    (seconds,) = run()
    assert 0 < seconds < 5


def test_placeholders_have_names_and_shapes_and_change_nothing_drawn() -> None:
    config = with_formats(tiny_config(), dict.fromkeys(linear_names(tiny_config()), INT8_STATIC))
    config = with_formats(config, {"encoder.1.ffn.up": INT8_PER_TOKEN})
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    state = placeholder_state(config)
    assert torch.equal(torch.rand(3), expected)
    shapes = {name: tuple(value.shape) for name, value in Transformer(config).state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == shapes
    ends = {name: value for name, value in state.items() if name.endswith(("factor", "input_bound"))}
    assert {name.split(".")[-1]: set(value.reshape(-1).tolist()) for name, value in ends.items()} == {
        "factor": {2.0},
        "input_bound": {1.0},
    }


def test_a_module_by_itself_has_placeholders_too() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(3))
            self.register_buffer("weight", torch.full((2,), 5.0))

    found = module_state(Scaled())
    assert found["factor"].tolist() == [2.0, 2.0, 2.0]
    assert found["factor"].dtype == np.float32
    assert found["weight"].tolist() == [5.0, 5.0]
