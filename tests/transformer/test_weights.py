"""Reading tensors: what is broken or executable is refused with the file's name."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slimformer.transformer.errors import InputError
from slimformer.transformer.weights import check_finite, check_shapes, read_safetensors, read_weights, to_numpy

STATE = {"a.weight": torch.arange(12.0).view(3, 4), "a.bias": torch.tensor([1.5, -2.0], dtype=torch.float16)}


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_safetensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    assert same(read_weights(tmp_path))


def test_numbers_of_every_type_as_numpy() -> None:
    for kind in (torch.float32, torch.float16, torch.int8, torch.uint8):
        value = torch.arange(6).view(2, 3).to(kind).T
        found = to_numpy(value)
        assert (str(found.dtype), found.tolist()) == (str(kind).removeprefix("torch."), value.tolist())
        assert found.flags.c_contiguous
    bits = to_numpy(torch.tensor([[1.0, -2.0], [0.0, 3.0]], dtype=torch.bfloat16).T)  # the upper half of float32's
    assert (str(bits.dtype), bits.tolist()) == ("uint16", [[0x3F80, 0x0000], [0xC000, 0x4040]])


@pytest.mark.parametrize("new", [True, False])
def test_pickle_of_plain_tensors(new: bool, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    assert same(read_weights(tmp_path))


def test_safetensors_come_first(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert same(read_weights(tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_truncated_safetensors(share: float, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(InputError, match=r"model.safetensors: not a whole safetensors file") as caught:
        read_safetensors(path)
    assert "\n" not in str(caught.value)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model.safetensors"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="several files are not supported"):
        read_weights(tmp_path)


class Executed:
    """Pickled, it is a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("form", ["torch", "torch legacy", "plain pickle"])
def test_a_pickle_with_code_is_refused_and_not_executed(form: str, tmp_path: Path) -> None:
    path, made = tmp_path / "pytorch_model.bin", tmp_path / "made"
    state = {**STATE, "evil": Executed(made)}
    if form == "plain pickle":
        path.write_bytes(pickle.dumps(state["evil"], protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(InputError, match=r"pytorch_model.bin: .*not plain tensors, so it was not loaded") as caught:
        read_weights(tmp_path)
    assert "\n" not in str(caught.value)
    assert not made.exists()
    if form != "plain pickle":
        torch.load(path, weights_only=False)
        assert made.exists()  # the file was armed


def test_any_damage_to_a_pickle_is_an_input_error(tmp_path: Path) -> None:
    path, source = tmp_path / "pytorch_model.bin", random.Random(0)
    damaged = [b"", b"\x00", b"not a pickle"]
    for new in (True, False):
        torch.save(STATE, path, _use_new_zipfile_serialization=new)
        whole = path.read_bytes()
        damaged += [whole[:n] for n in range(0, len(whole), len(whole) // 20)]
    damaged += [source.randbytes(source.randrange(1, 100)) for _ in range(100)]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"was not loaded|not a dict of plain tensors"):
            read_weights(tmp_path)


@pytest.mark.parametrize("content", [torch.ones(2), {"a": 1}, {"a": [torch.ones(1)]}, {0: torch.ones(1)}, [1]])
def test_a_pickle_of_something_else(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"not a dict of plain tensors; save the model as model.safetensors"):
        read_weights(tmp_path)


def test_parameters_that_are_not_finite_are_named() -> None:
    nan, inf = torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf")])
    check_finite({"a": torch.ones(2), "b": torch.tensor([1], dtype=torch.int8)}, "m")
    with pytest.raises(InputError, match=r"^m: NaN or infinity in b, d$"):
        check_finite({"a": torch.ones(2), "b": nan, "c": torch.ones(1), "d": inf}, "m")
    with pytest.raises(InputError, match=r"in p0, p1, p2 and 2 more$"):
        check_finite({f"p{i}": nan for i in range(5)}, "m")


def test_every_difference_in_shape_is_named() -> None:
    expected = {"a": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(1), "d": torch.ones(1)}
    check_shapes(dict(expected), expected, "m")
    state = {"a": torch.ones(3, 2), "b": torch.ones(2).half(), "d": torch.ones(1), "e": torch.ones(1)}
    with pytest.raises(InputError) as caught:
        check_shapes(state, expected, "m")
    assert str(caught.value) == (
        "m: a is [3, 2], the config says [2, 3]; b is torch.float16, the config says torch.float32; "
        "c is missing; e is unexpected"
    )
    with pytest.raises(InputError, match=r"p0 is missing; .*p3 is missing; and 3 more$"):
        check_shapes({}, {f"p{i}": torch.ones(1) for i in range(7)}, "m")
