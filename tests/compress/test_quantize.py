"""The quantize step: what it turns into int8, what it says, what it refuses."""

import numpy as np
import pytest
import torch
from tiny import layer, search_data, tiny, tiny_config

from slimformer.compress import quantize as module
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.transformer.errors import InputError

MODEL = tiny(tiny_config((layer(), layer(0), layer(neurons=0))))


def test_details_and_what_is_int8() -> None:
    result = Quantize(bits=8)(MODEL, StepContext(search_data()))
    assert result.details["weight_bits"] == 8
    assert result.details["linears"] == 8  # qkv, out, up, down; up, down; qkv, out
    assert result.details["tables"] == 2
    assert set(result.details["left_in_float"]) == {"norms, biases, token types", "head"}
    whole = {name for name, value in result.checkpoint.state.items() if value.dtype == torch.int8}
    assert whole == {
        *(f"encoder.0.{part}.weight" for part in ("mixer.qkv", "mixer.out", "ffn.up", "ffn.down")),
        *(f"encoder.1.ffn.{part}.weight" for part in ("up", "down")),
        *(f"encoder.2.mixer.{part}.weight" for part in ("qkv", "out")),
        "embeddings.tokens.weight",
        "embeddings.positions.weight",
    }
    assert result.checkpoint.config.formats == {"int8_dynamic", "int8_rows"}
    result.checkpoint.check("int8")


@pytest.mark.parametrize(("bits", "limit"), [(7, 64), (8, 127)])
def test_weights_are_the_nearest_integers_of_each_row(bits: int, limit: int) -> None:
    state = Quantize(bits=bits)(MODEL).checkpoint.state
    plain = MODEL.state["encoder.0.ffn.up.weight"].numpy().astype(np.float64)
    scale = np.abs(plain).max(1, keepdims=True) / limit
    np.testing.assert_array_equal(state["encoder.0.ffn.up.weight"].numpy(), np.rint(plain / scale))
    np.testing.assert_allclose(state["encoder.0.ffn.up.scale"].numpy(), scale[:, 0], rtol=1e-6)
    table = state["embeddings.tokens.weight"].numpy()
    assert np.abs(table).max() == 127  # tables take no part in integer products


@pytest.mark.parametrize("machine", [7, 8])
def test_bits_0_takes_what_the_machine_needs(machine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "int8_weight_bits", lambda: machine)
    result = Quantize()(MODEL)
    assert result.details["weight_bits"] == machine
    assert result.checkpoint.provenance["int8_weight_bits"] == machine
    most = result.checkpoint.state["encoder.0.ffn.up.weight"].abs().max().item()
    assert most == {7: 64, 8: 127}[machine]


def test_tables_can_stay_float() -> None:
    result = Quantize(bits=8, tables=False)(MODEL)
    assert result.details["tables"] == 0
    assert result.details["left_in_float"]["tables"] == "the option tables is false"
    assert torch.equal(result.checkpoint.state["embeddings.tokens.weight"], MODEL.state["embeddings.tokens.weight"])
    assert result.checkpoint.config.formats == {"int8_dynamic", "float32"}


def test_the_input_is_untouched_and_int8_stays_as_it_is() -> None:
    before = {name: value.clone() for name, value in MODEL.state.items()}
    once = Quantize(bits=7)(MODEL)
    assert all(torch.equal(MODEL.state[name], value) for name, value in before.items())
    again = Quantize(bits=8)(once.checkpoint)
    assert again.checkpoint.config == once.checkpoint.config
    assert all(torch.equal(again.checkpoint.state[name], value) for name, value in once.checkpoint.state.items())
    assert (again.details["linears"], again.details["tables"]) == (0, 0)


@pytest.mark.parametrize("bits", [6, 9, -1, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(InputError, match=f"bits is {bits}, not 8, 7 or 0"):
        Quantize(bits=bits)
