"""One process alone, and what launchers leave in the environment; several are tested in `compress/test_together.py`."""

import sys
from typing import Any

import pytest
import torch

from slimformer.transformer import processes as module
from slimformer.transformer.errors import InputError
from slimformer.transformer.processes import ALONE, Launched, launched


def test_alone_everything_is_its_own() -> None:
    rows = torch.ones(2, 3)
    assert (ALONE.number, ALONE.rank, ALONE.main) == (1, 0, True)
    assert ALONE.gathered(rows)[0] is rows
    assert ALONE.totals([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.all_of("a") == ["a"]
    assert ALONE.from_main("a") == "a"
    with ALONE.main_first() as first, ALONE.holding(torch.nn.Identity()) as held:
        assert (first, held) == (None, None)


@pytest.mark.parametrize("name", module.LAUNCHED)
def test_a_launcher_is_known_by_what_it_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in module.LAUNCHED:
        monkeypatch.delenv(other, raising=False)
    assert launched("cpu") is ALONE
    monkeypatch.setenv(name, "0")
    monkeypatch.setattr(module, "Launched", lambda device: ("launched", device))
    assert launched("cuda") == ("launched", "cuda")


def test_without_accelerate_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(InputError, match=r"several processes need accelerate: pip install slimformer\[distributed\]"):
        Launched("cpu")


def test_ways_to_train_that_are_not_offered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate
    from accelerate.utils import DistributedType

    class Sharded:
        distributed_type = DistributedType.FSDP

        def __init__(self, **_: Any) -> None: ...

    monkeypatch.setattr(accelerate, "Accelerator", Sharded)
    with pytest.raises(InputError, match="accelerate is to train by FSDP, which slimformer does not: choose"):
        Launched("cuda")
