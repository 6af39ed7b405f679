"""The quantize step: what it turns into which format, what it says, what it refuses, and what is exported of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from models import SENTENCES, decoder_config, pair_data, random_state, translator
from models import TOKENIZER as WRITERS_TOKENIZER
from tiny import LABELS, labelled_data, layer, search_data, sentences, tiny, tiny_config, with_head

from slimformer.compress import quantize as module
from slimformer.compress.calibration import Calibration
from slimformer.compress.quantize import Quantize
from slimformer.compress.recipe import read_recipe
from slimformer.compress.step import StepContext
from slimformer.export.bundle import export
from slimformer.export.decoding_parity import check_decoding
from slimformer.export.validation import check_parity
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import ClassificationHead, LanguageHead
from slimformer.transformer.data import Data, SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.layer_config import BLOCK_BITS, HALVES, INT8_DYNAMIC, INT8_PER_TOKEN, INT8_STATIC, RANGED
from slimformer.transformer.quantization import halved, linear_names

MODEL = tiny(tiny_config((layer(), layer(0), layer(neurons=0))))


def test_details_and_what_is_int8() -> None:
    result = Quantize(format=INT8_DYNAMIC, bits=8)(MODEL, StepContext(search_data()))
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
    monkeypatch.setattr(module, "int8_weight_bits", lambda target: {None: machine}[target])
    result = Quantize()(MODEL)
    assert result.details["weight_bits"] == machine
    assert result.checkpoint.provenance["int8_weight_bits"] == machine
    most = result.checkpoint.state["encoder.0.ffn.up.weight"].abs().max().item()
    assert most == {7: 64, 8: 127}[machine]


@pytest.mark.parametrize(("target", "bits"), [("avx2", 7), ("avx512", 7), ("vnni", 8), ("amx", 8), ("neon", 8)])
def test_bits_0_takes_what_the_target_needs(target: str, bits: int) -> None:
    context = StepContext(search_data(), target=target)
    assert Quantize(format=INT8_DYNAMIC)(MODEL, context).checkpoint.provenance["int8_weight_bits"] == bits
    assert Quantize(format=INT8_DYNAMIC, bits=15 - bits)(MODEL, context).details["weight_bits"] == 15 - bits


@pytest.mark.parametrize("form", HALVES)
def test_half_precision_needs_no_texts_and_no_bits(form: str) -> None:
    result = Quantize(format=form, tables=False)(MODEL)
    assert result.checkpoint.config == halved(MODEL, form).config
    wanted = halved(MODEL, form).state
    assert all(torch.equal(result.checkpoint.state[name], value) for name, value in wanted.items())
    assert result.details["formats"] == {form: 8}
    assert "int8_weight_bits" not in result.checkpoint.provenance
    assert not result.checkpoint.config.depends_on_batch


def test_half_precision_beside_calibrated_linears() -> None:
    """Those that are calibrated are as if the others had stayed in float32."""
    options: dict[str, Any] = {"format": "int8_static", "bits": 7, "samples": 12, "smoothing": 0.5}
    mixed, plain = (
        Quantize(**options, formats=(f"encoder.0.ffn.*={form}",))(MODEL, StepContext(search_data())).checkpoint
        for form in ("float16", "float32")
    )
    for name, value in plain.state.items():
        half = name.startswith(("encoder.0.ffn.up.", "encoder.0.ffn.down."))
        assert torch.equal(mixed.state[name], value.half() if half else value), name
    mixed.check("mixed")
    assert mixed.provenance["int8_weight_bits"] == 7


def test_half_precision_is_no_candidate() -> None:
    with pytest.raises(InputError, match="a candidate is 'float16', not one of float32, int8_dynamic"):
        Quantize(candidates=("float16", "float32"))


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


# --- formats ---

WIDE = tiny(tiny_config((layer(2, 16, 64), layer(3, 8, 40, "relu")), d_model=32))  # 24 and 40 columns in its last
CONTEXT = StepContext(search_data())
NAMES = linear_names(WIDE.config)
QUICK: dict[str, Any] = {"bits": 7, "smoothing": 0.5, "samples": 12}


def forms_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Formats by sub-layer, before and after its middle."""
    return {
        f"{stack}.{i}.{part}.{side}": getattr(sub, f"{side}_format")
        for stack in ("encoder", "decoder")
        for i, one in enumerate(getattr(checkpoint.config, stack))
        for part in ("mixer", "cross", "ffn")
        for side in ("input", "output")
        if (sub := getattr(one, part)) is not None
    }


BESIDE = {"input": "int4_blocks", "output": "int8_static"}
# exceptions to int8_dynamic, and what then is something else
EXCEPTIONS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "a name": (("encoder.0.ffn.down=float32",), {"encoder.0.ffn.output": "float32"}),
    "any run of letters": (
        ("*.ffn.*=float32",),
        {f"encoder.{i}.ffn.{side}": "float32" for i in (0, 1) for side in ("input", "output")},
    ),
    "in between": (("encoder.*.out=float32",), {f"encoder.{i}.mixer.output": "float32" for i in (0, 1)}),
    "the last one counts": (
        ("encoder.0.*=float32", "*.up=int8_dynamic", "encoder.0.mixer.qkv=int8_dynamic"),
        {"encoder.0.mixer.output": "float32", "encoder.0.ffn.output": "float32"},
    ),
    "and no other": (
        ("*.up=int8_dynamic", "encoder.0.mixer.qkv=int8_dynamic", "encoder.0.*=float32"),
        {f"encoder.0.{part}.{side}": "float32" for part in ("mixer", "ffn") for side in ("input", "output")},
    ),
    "calibrated ones": (
        ("*.up=int4_blocks", "encoder.?.ffn.down=int8_static"),
        {f"encoder.{i}.ffn.{side}": form for i in (0, 1) for side, form in BESIDE.items()},
    ),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions(name: str) -> None:
    formats, others = EXCEPTIONS[name]
    step = Quantize(format=INT8_DYNAMIC, formats=formats, **QUICK)
    step.check(WIDE.config)
    result = step(WIDE, CONTEXT)
    expected = {**dict.fromkeys(forms_of(WIDE), INT8_DYNAMIC), **others}
    assert forms_of(result.checkpoint.check("formats")) == expected
    kinds = list(expected.values())
    assert result.details["formats"] == {kind: kinds.count(kind) for kind in set(kinds) - {"float32"}}
    assert result.details["linears"] == len(kinds) - kinds.count("float32")
    assert "other_format" not in result.details
    ends = {"mixer.input": "mixer.qkv", "mixer.output": "mixer.out", "ffn.input": "ffn.up", "ffn.output": "ffn.down"}
    left = {place[: -len(end)] + own for place in others for end, own in ends.items() if place.endswith(end)}
    left = {linear for linear in left if result.checkpoint.state[f"{linear}.weight"].is_floating_point()}
    said = result.details["left_in_float"]
    assert {linear for linear, reason in said.items() if reason == "asked for"} == left
    assert len(left) == kinds.count("float32")
    assert all(torch.equal(result.checkpoint.state[f"{one}.weight"], WIDE.state[f"{one}.weight"]) for one in left)


def test_all_linears_may_stay_in_float() -> None:
    result = Quantize(format="float32", bits=8)(WIDE)
    assert result.checkpoint.config.formats == {"float32", "int8_rows"}
    assert set(result.details["left_in_float"]) == {"norms, biases, token types", "head", *NAMES}
    assert (result.details["linears"], result.details["formats"]) == (0, {})
    assert "int8_weight_bits" not in result.checkpoint.provenance
    one = Quantize(format="float32", formats=("*.qkv=int8_dynamic",), bits=8)(WIDE)
    assert one.details["formats"] == {INT8_DYNAMIC: 2}
    assert one.checkpoint.provenance["int8_weight_bits"] == 8


def test_exceptions_that_name_nothing_are_refused() -> None:
    """When they are checked, before anything is done, and when they are used."""
    step = Quantize(formats=("encoder.*=int8_static", "encoder.2.*=float32"))
    for attempt in (lambda: step.check(WIDE.config), lambda: step(WIDE, CONTEXT)):
        with pytest.raises(InputError, match=r"no float linear is named encoder\.2\.\*; they are") as caught:
            attempt()
        assert str(caught.value).endswith(", ".join(NAMES))
    with pytest.raises(InputError, match=r"no float linear is named \*\.up; they are none"):
        Quantize(formats=("*.up=float32",))(Quantize(bits=8)(WIDE).checkpoint)
    with pytest.raises(InputError, match="no float linear is named Encoder"):  # letters count as they are
        Quantize(formats=("Encoder*=float32",)).check(WIDE.config)


def test_queries_and_keys_of_cross_attention_have_one_format() -> None:
    model, context = translator(1, 1), StepContext(pair_data())
    for formats in (("*.q=float32",), ("*.kv=float32",), ("*.cross.*=float32", "decoder.0.cross.kv=int8_static")):
        for attempt in (lambda step: step.check(model.config), lambda step: step(model, context)):
            with pytest.raises(
                InputError, match=r"decoder\.0\.cross\.kv and decoder\.0\.cross\.q have one format: ask"
            ):
                attempt(Quantize(formats=formats))
    for formats in (("decoder.0.cross.*=float32",), ("*.q=float32", "*.cross.kv=float32")):
        assert forms_of(Quantize(formats=formats, bits=8)(model).checkpoint)["decoder.0.cross.input"] == "float32"


@pytest.mark.parametrize("form", list(BLOCK_BITS))
def test_columns_that_are_not_whole_blocks_are_int8_dynamic(form: str) -> None:
    result = Quantize(format=form, **QUICK)(WIDE, CONTEXT)
    assert result.details["other_format"] == {
        "encoder.1.mixer.out": "int8_dynamic: its 24 columns are not whole blocks of 32",
        "encoder.1.ffn.down": "int8_dynamic: its 40 columns are not whole blocks of 32",
    }
    assert result.details["formats"] == {form: 6, INT8_DYNAMIC: 2}
    forms = forms_of(result.checkpoint.check("blocks"))
    assert [place for place, one in forms.items() if one != form] == ["encoder.1.mixer.output", "encoder.1.ffn.output"]
    plain = Quantize(bits=7)(WIDE).checkpoint.state
    for name in result.details["other_format"]:
        for part in ("weight", "scale", "bias"):
            assert torch.equal(result.checkpoint.state[f"{name}.{part}"], plain[f"{name}.{part}"])
    assert result.checkpoint.provenance["int8_weight_bits"] == 7
    even = Quantize(format=form, formats=("encoder.1.*=float32",), **QUICK)(WIDE, CONTEXT)
    assert "other_format" not in even.details
    assert "int8_weight_bits" not in even.checkpoint.provenance  # blocks have bits of their own


# --- int8: calibrated or dynamic ---


def same_model(one: Checkpoint, other: Checkpoint) -> bool:
    return one.config == other.config and all(
        torch.equal(value, other.state[name]) for name, value in one.state.items()
    )


def test_int8_is_calibrated_where_that_loses_no_more() -> None:
    """Static, but for what activations are given to; exceptions stand."""
    result = Quantize(formats=("encoder.0.mixer.out=float32",), **QUICK)(WIDE, CONTEXT)
    formats = ("*.ffn.down=int8_per_token", "encoder.0.mixer.out=float32")
    expected = Quantize(format=INT8_STATIC, formats=formats, **QUICK)(WIDE, CONTEXT)
    assert same_model(result.checkpoint, expected.checkpoint)
    assert result.details["formats"] == {INT8_STATIC: 5, INT8_PER_TOKEN: 2}
    error, dynamic = (result.details["hidden_error"][key] for key in ("quantized", INT8_DYNAMIC))
    assert error < dynamic
    said = f"calibrated: tokens of the last layer are off by {error:.4f} of their length, with"
    assert result.details["choice"] == f"{said} {INT8_DYNAMIC} by {dynamic:.4f}"


def test_decoders_have_no_linears_per_token_by_default() -> None:
    """One token at a time, what these cost beside is more than the product."""
    result = Quantize(tables=False, **QUICK)(translator(1, 1), StepContext(pair_data()))
    assert result.details["formats"] == {INT8_STATIC: 10, INT8_PER_TOKEN: 1}
    assert result.checkpoint.config.encoder[0].ffn.output_format == INT8_PER_TOKEN


def test_int8_is_dynamic_where_calibration_loses_more() -> None:
    """Its ranges are those of one word, times the percentile."""
    narrow: dict[str, Any] = {"bits": 7, "smoothing": 0.0, "range": "percentile", "percentile": 20.0}
    result = Quantize(**narrow)(WIDE, CONTEXT)
    assert same_model(result.checkpoint, Quantize(format=INT8_DYNAMIC, bits=7)(WIDE).checkpoint)
    calibrated = Quantize(format=INT8_STATIC, formats=("*.ffn.down=int8_per_token",), **narrow)(WIDE, CONTEXT)
    error, dynamic = (calibrated.details["hidden_error"][key] for key in ("quantized", INT8_DYNAMIC))
    assert error > dynamic
    assert result.details["choice"].startswith(
        f"int8_dynamic: calibrated, tokens of the last layer are off by {error:.4f} "
    )
    assert "calibration" not in result.details


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (None, "there are no texts to calibrate on"),
        (StepContext(SearchData((), (), (), ())), "no texts to learn from: give DATA a texts.jsonl"),
    ],
)
def test_int8_is_dynamic_without_texts(context: StepContext | None, reason: str) -> None:
    result = Quantize(bits=7)(WIDE, context)
    assert same_model(result.checkpoint, Quantize(format=INT8_DYNAMIC, bits=7)(WIDE).checkpoint)
    assert result.details["choice"].startswith(f"int8_dynamic: {reason}")


def test_int8_where_nothing_is_left_to_calibrate() -> None:
    result = Quantize(formats=("*=float32",), bits=7)(WIDE, CONTEXT)
    assert result.details["choice"] == "no linear is left to calibrate"
    assert same_model(result.checkpoint, Quantize(format="float32", bits=7)(WIDE).checkpoint)


def test_hidden_errors_are_those_of_the_models() -> None:
    """On texts one at a time, all of which are judged here; the dynamic model is simulated in float."""
    details = Quantize(format=INT8_STATIC, tables=False, **QUICK)(WIDE, CONTEXT).details
    dynamic = Quantize(format=INT8_DYNAMIC, tables=False, bits=7)(WIDE).checkpoint
    static = Quantize(format=INT8_STATIC, tables=False, **QUICK)(WIDE, CONTEXT).checkpoint
    texts = Calibration.of(WIDE, CONTEXT, 12, 0.5).batches(12, "cpu", size=1)
    errors = []
    with torch.inference_mode():
        for quantized in (static, dynamic):
            shares = []
            for text in texts:
                mine, expected = (text.run(one.to_torch()).hidden.double() for one in (quantized, WIDE))
                shares += ((mine - expected).norm(dim=1) / expected.norm(dim=1)).tolist()
            errors.append(np.mean(shares))
    assert details["hidden_error"]["quantized"] == pytest.approx(errors[0], rel=0.02)
    assert details["hidden_error"][INT8_DYNAMIC] == pytest.approx(errors[1], rel=0.02)


# --- calibration ---


def test_details_of_a_calibrated_model() -> None:
    details = Quantize(format=INT8_STATIC, range="percentile", **QUICK)(WIDE, CONTEXT).details
    assert json.loads(json.dumps(details)) == details
    assert details["calibration"]["texts"] == 12
    assert details["range"] == "percentile"
    assert details["smoothing"]["strength"] == 0.5
    assert details["seconds"] >= 0
    assert (details["weight_bits"], details["linears"], details["formats"]) == (7, 8, {INT8_STATIC: 8})
    assert "calibration" not in Quantize(format=INT8_DYNAMIC, bits=7)(WIDE, CONTEXT).details


def test_the_input_is_untouched_by_calibration() -> None:
    before = {name: value.clone() for name, value in WIDE.state.items()}
    result = Quantize(format=INT8_STATIC, **QUICK)(WIDE, CONTEXT)
    assert all(torch.equal(WIDE.state[name], value) for name, value in before.items())
    again = Quantize(format=INT8_STATIC, **{**QUICK, "bits": 8})(result.checkpoint)  # nothing left to calibrate
    assert all(torch.equal(again.checkpoint.state[name], value) for name, value in result.checkpoint.state.items())


OPTIONS: dict[str, list[Any]] = {
    "range": ["minmax", "average", "percentile", "mse", "entropy"],
    "percentile": [50.0, 95.0],
    "smoothing": [0.0, 0.4, 1.0],
    "compensate": [True, False],
    "correct_bias": [True, False],
    "samples": [1, 5],
    "pages": [0.0, 1.0],
    "bits": [7, 8],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_model(option: str) -> None:
    given = {**QUICK, "range": "percentile" if option == "percentile" else "minmax", "percentile": 99.0}
    made = [Quantize(format=INT8_STATIC, **{**given, option: value})(WIDE, CONTEXT) for value in OPTIONS[option]]
    prints = {one.checkpoint.check(option).fingerprint() for one in made}
    assert len(prints) == len(made)


@pytest.mark.parametrize("form", [*RANGED, *BLOCK_BITS])
def test_no_data_is_refused(form: str) -> None:
    for step in (Quantize(format=form), Quantize(formats=(f"encoder.0.mixer.qkv={form}",))):
        with pytest.raises(InputError, match="is calibrated on texts: give a context with data"):
            step(WIDE)
        with pytest.raises(InputError, match="no texts to learn from"):
            step(WIDE, StepContext(SearchData((), (), (), ())))
    with pytest.raises(InputError, match="calibrated on pairs"):
        Quantize(format=form)(translator(1, 1), CONTEXT)


# --- options ---

OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"format": "int9"}, "format is 'int9', not one of int8, float32, int8_dynamic, int8_static, int8_per_token, int8"),
    ({"formats": ("encoder.0",)}, "formats has 'encoder.0', which is not NAME=FORMAT"),
    ({"formats": ("=float32",)}, "formats has '=float32', which is not NAME=FORMAT"),
    ({"formats": ("*.up=",)}, "the format of *.up is '', not one of float32"),
    ({"formats": ("*.up=float32", "*.down=int8")}, "the format of *.down is 'int8', not one of float32"),
    ({"range": "max"}, "range is 'max', not one of minmax, average, percentile, mse, entropy"),
    ({"percentile": 0.0}, "percentile is 0.0, not above 0 and at most 100"),
    ({"percentile": 100.1}, "percentile is 100.1, not above 0 and at most 100"),
    ({"percentile": float("nan")}, "percentile is nan"),
    ({"smoothing": -0.1}, "smoothing is -0.1, not from 0 to 1"),
    ({"smoothing": 1.1}, "smoothing is 1.1, not from 0 to 1"),
    ({"smoothing": float("nan")}, "smoothing is nan"),
    ({"samples": 0}, "samples is 0, not a whole number of at least 1"),
    ({"pages": -0.1}, "pages is -0.1, not a share from 0 to 1"),
    ({"pages": 1.1}, "pages is 1.1, not a share from 0 to 1"),
]


@pytest.mark.parametrize(("options", "message"), OUT_OF_RANGE)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Quantize(**options)
    assert str(caught.value).startswith("quantize: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        Quantize(format="int9", formats=("a", "b=c"), bits=6, range="max", smoothing=2.0, samples=0)
    message = str(caught.value).removeprefix("quantize: ")
    assert {one.split()[0] for one in message.split("; ")} == {
        "format", "formats", "the", "bits", "range", "smoothing", "samples"
    }  # fmt: skip
    assert len(message.split("; ")) == 7


def test_ends_of_the_options_are_taken() -> None:
    Quantize(percentile=100.0, smoothing=0.0, samples=1, pages=0.0)
    Quantize(percentile=1e-3, smoothing=1.0, pages=1.0, formats=())


RECIPE = """
[[step]]
name = "quantize"
format = "int8_static"
formats = ["*.ffn.down=float32", "encoder.0.*=int4_blocks"]
bits = 7
tables = false
range = "percentile"
percentile = 99.9
smoothing = 1
compensate = false
correct_bias = false
samples = 64
pages = 0.25
"""


def test_a_recipe_has_the_options_of_calibration(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    expected: dict[str, Any] = {
        "format": "int8_static",
        "formats": ("*.ffn.down=float32", "encoder.0.*=int4_blocks"),
        "bits": 7,
        "tables": False,
        "range": "percentile",
        "percentile": 99.9,
        "smoothing": 1.0,
        "compensate": False,
        "correct_bias": False,
        "samples": 64,
        "pages": 0.25,
    }
    (step,) = read_recipe(path).steps
    assert step == Quantize(**expected)
    assert all(getattr(step, option) == value != getattr(Quantize(), option) for option, value in expected.items())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('formats = "*.up=float32"', "formats is '*.up=float32', which is not tuple"),
        ("formats = [1]", "formats is [1], which is not tuple"),
        ('smoothing = "auto"', "smoothing is 'auto', which is not float | None"),
        ("samples = 1.5", "samples is 1.5, which is not int"),
        ('formats = ["*.up=int9"]', "the format of *.up is 'int9'"),
        ("percentile = nan", "percentile is nan"),
    ],
)
def test_a_recipe_with_another_value_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'[[step]]\nname = "quantize"\n{line}', encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


# --- the whole way ---


def language_model() -> Checkpoint:
    config = decoder_config(0, 1, head=LanguageHead(2, 3, tied=False, bias=True))
    state = random_state(config, 4)
    state["head.tokens.weight"] *= 2
    return Checkpoint(config, state, WRITERS_TOKENIZER)


LABELLED = with_head(ClassificationHead(LABELS), layers=(layer(2, 16, 64),), d_model=32)
PRE_NORM = replace(WIDE, config=replace(WIDE.config, norm_place="pre"))
WHOLE: dict[str, tuple[Checkpoint, Data]] = {
    "embedder": (WIDE, search_data()),
    "embedder, pre": (PRE_NORM, search_data()),
    "classifier": (LABELLED, labelled_data()),
    "translator": (translator(1, 1), pair_data()),
    "language model": (language_model(), pair_data()),
}


@pytest.mark.parametrize(
    ("kind", "form"), [*((kind, form) for kind in WHOLE for form in RANGED), ("embedder, pre", "int4_blocks")]
)
def test_from_the_step_to_the_graph(kind: str, form: str, tmp_path: Path) -> None:
    """With 7 bits, with which every processor's integer products are exact."""
    model, data = WHOLE[kind]
    result = Quantize(format=form, **QUICK)(model, StepContext(data))
    small = result.checkpoint.check(kind)
    again = load_own(small.save(tmp_path / "model"))
    assert again.fingerprint() == small.fingerprint()
    assert again.config.formats <= {form, INT8_DYNAMIC, "int8_rows", "float32"}
    assert form in again.config.formats
    bundle = export(again, tmp_path / "bundle")
    if model.config.decoder:
        parity = check_decoding(again, bundle, SENTENCES[:3], threads=1)
        assert parity.tokens > 20
    else:
        parity = check_parity(again, bundle, texts=sentences(12, seed=8), original=model, threads=1)
        assert 1e-4 < parity.quantization_relative < 0.1
    assert parity.passed


def placed(rows: list[list[int]], side: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask with padding on one side of each row or between its tokens, 4 columns more than the longest."""
    width = max(map(len, rows)) + 4
    ids, mask = np.full((len(rows), width), 9, np.int64), np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        places = np.sort(np.random.default_rng(i).choice(width, len(row), replace=False))
        if side != "between":
            places = np.arange(len(row)) + (width - len(row) if side == "left" else 0)
        ids[i, places], mask[i, places] = row, 1
    return ids, mask


@pytest.mark.parametrize("form", [INT8_DYNAMIC, INT8_STATIC])
def test_a_table_that_is_the_output_layer_has_the_bits_of_products(form: str) -> None:
    model, data = WHOLE["language model"]
    small = Quantize(format=form, **QUICK)(model, StepContext(data)).checkpoint
    greatest = [int(small.state[f"{name}.weight"].abs().max()) for name in ("head.tokens", "embeddings.tokens")]
    assert greatest == [64, 127]


@pytest.mark.parametrize(
    ("kind", "options", "depends"),
    [
        ("embedder", {"format": INT8_STATIC}, False),
        ("embedder", {"format": INT8_DYNAMIC}, True),
        ("embedder", {"format": INT8_PER_TOKEN}, False),
        ("embedder", {}, False),
        ("embedder", {"format": INT8_STATIC, "formats": ("*.0.ffn.down=int8_dynamic",)}, True),
        ("embedder", {"format": "float32"}, False),
        ("embedder", {"format": "int4_blocks"}, True),  # some of its columns are not whole blocks
        ("classifier", {"format": "int4_blocks"}, False),
        ("language model", {"format": INT8_STATIC}, True),  # its output layer is a table with a range at run time
        ("language model", {"format": INT8_STATIC, "tables": False}, False),
    ],
)
def test_details_say_whether_texts_depend_on_those_beside(kind: str, options: dict[str, Any], depends: bool) -> None:
    model, data = WHOLE[kind]
    said = Quantize(**{**QUICK, **options})(model, StepContext(data)).details["beside_other_texts"]
    assert ("depends a little on those beside it" in said, "the same alone" in said) == (depends, not depends)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_texts_embedding_is_the_same_beside_others(layout: str, tmp_path: Path) -> None:
    """It differs by 1e-7; with one range for all texts at run time by 5e-3."""
    rows = WIDE.text_encoder().encode(sentences(8, seed=5, low=1, high=3) + sentences(4, seed=6, low=14, high=18))
    for form, alike in ((INT8_STATIC, True), (INT8_PER_TOKEN, True), (INT8_DYNAMIC, False)):
        small = Quantize(format=form, **QUICK)(WIDE, CONTEXT).checkpoint
        path = export(small, tmp_path / form, layout=layout) / "onnx/model.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        model = small.to_torch()

        def in_torch(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return model(torch.from_numpy(ids), torch.from_numpy(mask)).result.numpy()  # noqa: B023

        def in_graph(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            (found,) = session.run(["sentence_embedding"], {"input_ids": ids, "attention_mask": mask})  # noqa: B023
            return found

        for run in (in_torch, in_graph):
            alone = np.concatenate([run(np.array([row]), np.ones((1, len(row)), np.int64)) for row in rows])
            for side in ("right", "left", "between"):
                away = np.abs(run(*placed(rows, side)) - alone).max()
                assert bool(away < 1e-3) is alike, (form, run.__name__, side, away)
