"""Several processes that train together: what they learn is what one learns, they share the work, and they go on."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import together
import torch

from slimformer.transformer.errors import InputError

RANKS = (0, 1)
pytestmark = pytest.mark.timeout(900)  # other processes do the work, where cores are few one after the other


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainings of two processes, gloo on CPU."""
    out = tmp_path_factory.mktemp("two")
    together.start(together.__file__, str(out))
    return out


def of(out: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / f"{name}-{rank}.pt")
    return found


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The greatest difference of weights."""
    assert one["state"].keys() == other["state"].keys()
    return max(float((value - other["state"][name]).abs().max()) for name, value in one["state"].items())


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("task", together.TASKS)
def test_two_processes_learn_what_one_does(task: str, cut: int, two: Path) -> None:
    """In float64, whether or not batches are accumulated; so does one with batches cut in two."""
    whole = together.alone(task)
    assert apart(whole, {"state": together.TASKS[task]().lesson.double().state_dict()}) > 1e-3
    for found in (*(of(two, f"{task}-{cut}", rank) for rank in RANKS), together.alone(task, cut=cut)):
        assert apart(whole, found) < 1e-9
        assert found["losses"] == pytest.approx(whole["losses"], abs=1e-9)
        assert found["texts"] == whole["texts"]


@pytest.mark.parametrize("task", together.TASKS)
def test_in_single_precision_losses_and_outputs_agree(task: str, two: Path) -> None:
    one, other = together.alone(task, double=False), of(two, f"{task}-single")
    assert one["outputs"].dtype == torch.float32
    assert torch.allclose(one["outputs"], other["outputs"], rtol=0, atol=1e-4)
    assert one["losses"] == pytest.approx(other["losses"], abs=1e-4)


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("task", together.TASKS)
def test_the_processes_share_every_batch(task: str, cut: int, two: Path) -> None:
    """Nothing is left out and nothing given twice; of a batch of one text the other process has none that counts."""
    given = [of(two, f"{task}-{cut}", rank)["given"] for rank in RANKS]
    training, step = together.TASKS[task](), 0
    for epoch in range(99):
        for batch in training.batches(epoch, cut):
            if step == len(given[0]):
                break
            counted = [one[step][0] if one[step][1] else [] for one in given]
            assert Counter(i for examples in counted for i in examples) == Counter(batch)
            assert abs(len(counted[0]) - len(counted[1])) <= 1
            step += 1
    assert step == len(given[0]) == len(given[1])
    assert any(not counted for _, counted in given[1])


def test_parameters_without_a_gradient_are_named_and_stay(two: Path) -> None:
    """Relations are of queries, keys and values: what comes behind them in the last layer has no part in them."""
    one, other = together.alone("idle"), of(two, "idle-1")
    assert one["idle"] == other["idle"]
    assert "student.encoder.0.ffn.up.weight" in one["idle"]
    assert "student.encoder.0.mixer.qkv.weight" not in one["idle"]
    begun = together.TASKS["idle"]().lesson.double().state_dict()
    assert all(torch.equal(other["state"][name], begun[name]) for name in one["idle"])
    assert together.alone("embedder")["idle"] == ()


def test_killed_and_resumed_they_end_as_uninterrupted_ones(two: Path) -> None:
    """With dropout, whose random numbers are each process's own."""
    for rank in RANKS:
        whole, resumed = of(two, "whole", rank), of(two, "resumed", rank)
        assert apart(whole, resumed) == 0
        assert whole["losses"] == resumed["losses"]
        assert whole["given"][6:] == resumed["given"]
    assert of(two, "whole", 0)["seed"] != of(two, "whole", 1)["seed"]
    assert apart(of(two, "whole"), together.alone("embedder")) > 1e-3


def test_a_state_of_two_processes_is_not_taken_up_by_one(two: Path) -> None:
    with pytest.raises(InputError, match="of a training by 2 processes, and there are 1: start as many"):
        together.embedder(dropout=0.1).run(together.ALONE, state_path=two / "state.pt")
