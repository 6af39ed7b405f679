"""Calibration against hooks of its own and numpy: each text alone, in any order, in memory that does not grow."""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import PRE, TOKENIZER, WORDS, decoder_config, pair_data, random_state, tiny, tiny_config, translator, writer
from torch import Tensor

from slimformer.compress import calibrated as module
from slimformer.compress.calibrated import STRENGTHS
from slimformer.compress.linears import StaticInput, TokenInput, WeightRounding, in_format, input_rounding
from slimformer.compress.observing import Moments
from slimformer.compress.quantize import Quantize
from slimformer.compress.ranges import RANGE_METHODS, Extremes, Histogram, find_range, scale_and_zero
from slimformer.compress.smoothing import factors
from slimformer.compress.step import StepContext, StepResult
from slimformer.transformer.batching import tensors
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import AttentionConfig, FeedForwardConfig, LayerConfig
from slimformer.transformer.data import Data, Pair, PairData, SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.layer_config import BLOCK_BITS, INT8_BLOCKS, INT8_DYNAMIC, INT8_PER_TOKEN, INT8_STATIC
from slimformer.transformer.model import Transformer
from slimformer.transformer.quantization import linear_names


def sentences(count: int, seed: int = 0) -> tuple[str, ...]:
    """Distinct texts of 1 to 20 words, so 3 to 22 tokens."""
    random, found = np.random.default_rng(seed), dict[str, None]()
    words = [word for word in WORDS.split() if word.isalpha()]
    while len(found) < count:
        found[" ".join(random.choice(words, int(random.integers(1, 21))))] = None
    return tuple(found)


TEXTS, PAIRS = sentences(9), replace(pair_data(), train=pair_data().train[:9])
MODEL = tiny()  # GELU, then ReLU
PRE_CONFIG = replace(tiny_config(), **PRE)
PRE_NORM = Checkpoint(PRE_CONFIG, random_state(PRE_CONFIG), TOKENIZER)
PLAIN: dict[str, Any] = {
    "bits": 8,
    "tables": False,
    "percentile": 99.0,
    "smoothing": 0.0,
    "compensate": False,
    "correct_bias": False,
}
FULL: dict[str, Any] = {"smoothing": None, "compensate": True, "correct_bias": True}


def searching(texts: Sequence[str] = TEXTS) -> SearchData:
    return SearchData((), (), (), tuple(texts))


def calibrate(
    checkpoint: Checkpoint, forms: str | Mapping[str, str], data: Data | None = None, *, seed: int = 0, **options: Any
) -> StepResult:
    """All linears in a format, or some by name and the others in float; to nearest unless the options say otherwise."""
    if isinstance(forms, str):
        chosen: dict[str, Any] = {"format": forms}
    else:
        chosen = {"format": "float32", "formats": tuple(f"{name}={form}" for name, form in forms.items())}
    result = Quantize(**{**PLAIN, **chosen, **options})(checkpoint, StepContext(data or searching(), seed=seed))
    result.checkpoint.check("calibrated")
    return result


def parts(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """A linear's tensors."""
    head = f"{name}."
    return {key.removeprefix(head): value for key, value in checkpoint.state.items() if key.startswith(head)}


def told(result: StepResult) -> dict[str, Any]:
    """The details, but for how long it took."""
    return {key: value for key, value in result.details.items() if key != "seconds"}


def run_alone(checkpoint: Checkpoint, data: Data, model: Transformer | None = None) -> list[Tensor]:
    """The last layer's tokens for each example of the data by itself."""
    model, encoder, found = model or checkpoint.to_torch(), checkpoint.text_encoder(), []
    with torch.inference_mode():
        if checkpoint.config.encoder and checkpoint.config.decoder:
            assert isinstance(data, PairData)
            for pair in data.train:
                source, target = encoder.encode([pair.source, pair.target])
                ids, mask = tensors([[2, *target[:-1]]], 0)
                found.append(model(*tensors([source], 0), target_ids=ids, target_mask=mask).hidden)
        else:
            for ids in encoder.encode(list(StepContext(data).training_texts())):
                read = [2, *ids[:-1]] if checkpoint.config.decoder else ids
                found.append(model(*tensors([read], 0)).hidden)
    return found


def inputs_of(checkpoint: Checkpoint, data: Data) -> dict[str, list[Tensor]]:
    """What each linear is given, text by text."""
    model, seen = checkpoint.to_torch(), dict[str, list[Tensor]]()

    def note(name: str) -> Any:
        return lambda linear, given: seen[name].append(given[0].clone())

    for name in linear_names(checkpoint.config):
        seen[name] = []
        model.get_submodule(name).register_forward_pre_hook(note(name))
    run_alone(checkpoint, data, model)
    return seen


def ends(x: Sequence[Tensor]) -> tuple[float, float]:
    return min(0.0, *(float(one.min()) for one in x)), max(0.0, *(float(one.max()) for one in x))


# --- what comes of the inputs ---


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_ranges_are_those_of_each_text_alone(method: str) -> None:
    """`average` has each text's own extremes; the others all values at once."""
    result = calibrate(MODEL, INT8_STATIC, range=method)
    assert result.details["range"] == method
    for name, texts in inputs_of(MODEL, searching()).items():
        low, high = ends(texts)
        if method == "average":
            least, greatest = ([float(end(one)) for one in texts] for end in (torch.min, torch.max))
            low, high = min(0.0, np.mean(least)), max(0.0, np.mean(greatest))
        elif method != "minmax":
            extremes, histogram = Extremes(), Histogram(low, high)
            extremes.add(torch.cat(texts))
            histogram.add(torch.cat(texts))
            low, high = find_range(method, extremes, histogram, percentile=99.0)
        found = parts(result.checkpoint, name)
        assert float(found["input_scale"]) == pytest.approx((high - low) / 255, rel=1e-6)
        assert int(found["input_zero"]) == round(-low / ((high - low) / 255))
        assert torch.equal(found["factor"], torch.ones(texts[0].shape[1]))


def test_percentiles_are_those_asked_for() -> None:
    made = [calibrate(MODEL, INT8_STATIC, range="percentile", percentile=share) for share in (100.0, 99.0, 80.0)]
    first, second, third = (float(one.checkpoint.state["encoder.0.ffn.up.input_scale"]) for one in made)
    assert first > 1.02 * second > 1.1 * third


@pytest.mark.parametrize("strength", [0.3, 1.0])
@pytest.mark.parametrize("kind", ["encoder", "encoder, pre", "post", "lstm", "alone"])
def test_smoothed_linears_by_the_formula(kind: str, strength: float) -> None:
    """Whether factors stay or are put into what makes the channels, ranges and weights are those of x f and W / f."""
    checkpoint = {"encoder": MODEL, "encoder, pre": PRE_NORM}.get(kind) or writer(kind)
    data = PAIRS if checkpoint.config.decoder else searching()
    result = calibrate(checkpoint, INT8_STATIC, data, smoothing=strength)
    kept = 0
    for name, texts in inputs_of(checkpoint, data).items():
        weight, found = checkpoint.state[f"{name}.weight"], parts(result.checkpoint, name)
        factor = factors(torch.cat(texts).abs().amax(0), weight, strength)
        scale, zero = scale_and_zero(*ends([one * factor for one in texts]))
        torch.testing.assert_close(found["input_scale"], scale, rtol=1e-5, atol=0)
        assert abs(int(found["input_zero"]) - int(zero)) <= 1
        scaled = weight / factor
        away = found["weight"] - scaled / scaled.abs().amax(1, keepdim=True) * 127
        assert float(away.abs().max()) < 0.501
        if bool((found["factor"] != 1).any()):
            torch.testing.assert_close(found["factor"], factor, rtol=1e-5, atol=0)
            kept += 1
    assert result.details["smoothing"] == {"strength": strength, "linears_that_multiply": kept}
    assert 0 < kept < len(linear_names(checkpoint.config))


@pytest.mark.parametrize("form", [INT8_STATIC, *BLOCK_BITS])
def test_weights_and_biases_are_those_for_the_inputs(form: str) -> None:
    checkpoint = tiny(layers=[LayerConfig(AttentionConfig(4, 8), FeedForwardConfig(64))] * 2)
    result = calibrate(checkpoint, form, compensate=True, correct_bias=True)
    for name, texts in inputs_of(checkpoint, searching()).items():
        columns = texts[0].shape[1]
        given = StaticInput(torch.ones(columns), *ends(texts)) if form == INT8_STATIC else None
        moments = Moments(input_rounding(form, given), columns, torch.device("cpu"))
        for text in texts:
            moments.add(text)
        old = parts(checkpoint, name)
        how = WeightRounding(8, compensate=True, correct_bias=True)
        expected = in_format(old["weight"], old["bias"], form, how, given, moments).tensors
        found = parts(result.checkpoint, name)
        assert found.keys() == expected.keys()
        assert torch.equal(found["weight"], expected["weight"])
        assert all(torch.allclose(found[part], value, rtol=1e-6, atol=1e-6) for part, value in expected.items())
        assert not torch.equal(found["bias"], old["bias"])
    assert ("range" in result.details) is ("smoothing" in result.details) is (form == INT8_STATIC)


@pytest.mark.parametrize("compensate", [True, False])
def test_options_reach_the_weights(compensate: bool) -> None:
    result = calibrate(MODEL, INT8_STATIC, compensate=compensate, correct_bias=not compensate, bits=7)
    for name in linear_names(MODEL.config):
        old, found = parts(MODEL, name), parts(result.checkpoint, name)
        nearest = (old["weight"] / (old["weight"].abs().amax(1, keepdim=True) / 64)).round()
        assert torch.equal(found["weight"].float(), nearest) is not compensate
        assert torch.equal(found["bias"], old["bias"]) is compensate
        assert int(found["weight"].abs().max()) == 64


def test_formats_side_by_side() -> None:
    """Each is what it is alone, for none of these makes the channels of another one that is smoothed."""
    forms = {
        "encoder.0.mixer.qkv": INT8_DYNAMIC,
        "encoder.0.ffn.up": INT8_STATIC,
        "encoder.0.ffn.down": INT8_BLOCKS,
        "encoder.1.mixer.qkv": INT8_STATIC,
    }
    options = {"smoothing": 0.5, "compensate": True, "correct_bias": True}
    result = calibrate(MODEL, forms, **options)
    assert set(linear_names(MODEL.config)) - set(linear_names(result.checkpoint.config)) == set(forms)
    for name, form in forms.items():
        alone, found = parts(calibrate(MODEL, {name: form}, **options).checkpoint, name), parts(result.checkpoint, name)
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[part], value) for part, value in alone.items())
    rest = [key for key in MODEL.state if not key.startswith(tuple(f"{name}." for name in forms))]
    assert all(torch.equal(result.checkpoint.state[key], MODEL.state[key]) for key in rest)


def test_strengths_are_judged_by_static_linears_alone() -> None:
    static = {"encoder.0.ffn.up": INT8_STATIC, "encoder.1.mixer.qkv": INT8_STATIC}
    forms = {**static, "encoder.0.mixer.qkv": INT8_BLOCKS, "encoder.0.ffn.down": INT8_DYNAMIC}
    alone, beside = (calibrate(MODEL, one, **FULL).details["smoothing"] for one in (static, forms))
    assert alone == beside
    assert "smoothing" not in calibrate(MODEL, {"encoder.0.mixer.qkv": INT8_BLOCKS}, **FULL).details


# --- tokens with scales of their own ---


def test_per_token_linears_by_the_formula() -> None:
    """Bounds are what the inputs reach below 0, which behind a ReLU is nothing; the bias has them taken off."""
    result = calibrate(MODEL, INT8_PER_TOKEN, smoothing=0.6)
    assert not {"smoothing", "range"} & result.details.keys()
    for name, texts in inputs_of(MODEL, searching()).items():
        weight, found = MODEL.state[f"{name}.weight"], parts(result.checkpoint, name)
        x, bound = torch.cat(texts), float(found["input_bound"])
        assert set(found) == {"weight", "scale", "bias", "input_bound"}
        assert bound == pytest.approx(-float(x.min()), rel=1e-5)
        assert (bound == 0) is (name == "encoder.1.ffn.down")
        away = found["weight"] - weight / weight.abs().amax(1, keepdim=True) * 127
        assert float(away.abs().max()) < 0.501
        taken_off = bound * (found["weight"].double() * found["scale"].double()[:, None]).sum(1)
        expected = MODEL.state[f"{name}.bias"] - taken_off
        torch.testing.assert_close(found["bias"].double(), expected, rtol=1e-6, atol=1e-7)


def test_ranges_of_tokens_are_their_own_whatever_the_method() -> None:
    forms = {"encoder.0.ffn.up": INT8_STATIC, "encoder.0.ffn.down": INT8_PER_TOKEN}
    result = calibrate(MODEL, forms, range="percentile", percentile=50.0)
    below = -min(float(text.min()) for text in inputs_of(MODEL, searching())["encoder.0.ffn.down"])
    assert float(parts(result.checkpoint, "encoder.0.ffn.down")["input_bound"]) == pytest.approx(below, rel=1e-5)


def test_per_token_inputs_are_rounded_as_the_linear_does() -> None:
    x = torch.tensor([[245.0, -10.0, 0.5], [41.0, -1e6, 0.1], [-9.0, -12.0, -10.0], [-11.0, -20.0, -30.0]])
    expected = torch.tensor([[245.0, -10.0, 0.0], [41.0, -10.0, 0.0], [-9.0, -10.0, -10.0], [-10.0, -10.0, -10.0]])
    torch.testing.assert_close(TokenInput(10.0).round(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(TokenInput(0.0).round(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_an_outlying_token_is_not_cut_off() -> None:
    """A token is 300 times as large as the greatest one that calibration saw."""
    for form, lost in ((INT8_STATIC, True), (INT8_PER_TOKEN, False)):
        checkpoint = calibrate(MODEL, {"encoder.1.ffn.down": form}).checkpoint
        linear, plain = (one.to_torch().get_submodule("encoder.1.ffn.down") for one in (checkpoint, MODEL))
        texts = torch.cat(inputs_of(MODEL, searching())["encoder.1.ffn.down"])
        x = 300 * texts[texts.amax(1).argmax()][None]
        with torch.inference_mode():
            away = (linear(x) - plain(x)).norm() / plain(x).norm()
        assert (float(away) > 0.2, float(away) < 0.02) == (lost, not lost), away


def test_tokens_with_scales_of_their_own_change_nothing_for_static_linears() -> None:
    alone = calibrate(MODEL, {"encoder.0.ffn.up": INT8_STATIC}, **FULL).details["smoothing"]
    both = calibrate(MODEL, {"encoder.0.ffn.up": INT8_STATIC, "encoder.0.ffn.down": INT8_PER_TOKEN}, **FULL)
    assert both.details["smoothing"] == alone
    assert alone["strength"] > 0


# --- what does not count ---


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """Integers are equal, floats to what the order of sums leaves."""
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, other.state[name], rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(value, other.state[name]), name


@pytest.mark.parametrize(("method", "smoothing"), [("minmax", None), ("average", 0.5), ("percentile", 0.5)])
def test_the_order_of_texts_does_not_count(method: str, smoothing: float | None) -> None:
    options = {**FULL, "range": method, "smoothing": smoothing}
    result = calibrate(MODEL, INT8_STATIC, **options)
    again = calibrate(MODEL, INT8_STATIC, searching(TEXTS[::-1]), seed=5, **options)
    assert_same(result.checkpoint, again.checkpoint)
    assert told(result) == told(again)
    assert result.details["calibration"] == {
        "texts": 9,
        "tokens": sum(map(len, MODEL.text_encoder().encode(TEXTS))),
    }


@pytest.mark.parametrize("form", [INT8_STATIC, INT8_BLOCKS])
def test_the_order_of_pairs_does_not_count(form: str) -> None:
    """The blocks' of 32 columns among static ones."""
    model, options = Checkpoint(decoder_config(1, 1), random_state(decoder_config(1, 1)), TOKENIZER), {**FULL}
    options["smoothing"] = 0.5
    names = linear_names(model.config)
    forms = {name: form if model.state[f"{name}.weight"].shape[1] == 32 else INT8_STATIC for name in names}
    result = calibrate(model, forms, PAIRS, **options)
    again = calibrate(model, forms, replace(PAIRS, train=PAIRS.train[::-1]), seed=3, **options)
    assert_same(result.checkpoint, again.checkpoint)
    assert result.details["calibration"]["pairs"] == len(PAIRS.train)


def test_what_stands_at_padding_does_not_count() -> None:
    """The padding token's row of the table is in no text."""
    table = MODEL.state["embeddings.tokens.weight"].clone()
    table[0] = 1e4
    other = replace(MODEL, state={**MODEL.state, "embeddings.tokens.weight": table})
    options = {**FULL, "range": "average", "smoothing": 0.5}
    result, again = (calibrate(one, INT8_STATIC, **options) for one in (MODEL, other))
    for name, value in result.checkpoint.state.items():
        assert torch.equal(again.checkpoint.state[name], value) is (name != "embeddings.tokens.weight")
    assert told(result) == told(again)


def test_texts_that_are_not_drawn_do_not_count() -> None:
    """Of one text alone, by seeds that draw several, ranges are that text's own."""
    own = [ends([one]) for one in inputs_of(MODEL, searching())["encoder.1.ffn.up"]]
    drawn = set()
    for seed in range(4):
        result = calibrate(MODEL, INT8_STATIC, samples=1, seed=seed)
        assert result.details["calibration"]["texts"] == 1
        scale = float(result.checkpoint.state["encoder.1.ffn.up.input_scale"])
        (text,) = [i for i, (low, high) in enumerate(own) if scale == pytest.approx((high - low) / 255, rel=1e-6)]
        drawn.add(text)
    assert len(drawn) > 1


def test_what_is_given_is_not_changed() -> None:
    """Although norms take factors here; and what is made can be trained."""
    before = random_state(PRE_CONFIG)
    after = calibrate(PRE_NORM, INT8_STATIC, **{**FULL, "smoothing": 0.7}).checkpoint.state
    assert all(torch.equal(PRE_NORM.state[name], value) for name, value in before.items())
    assert not torch.equal(after["encoder.0.ffn_norm.weight"], before["encoder.0.ffn_norm.weight"])
    assert not any(value.is_inference() or value.requires_grad for value in after.values())


# --- strength ---


def error_of(checkpoint: Checkpoint, result: StepResult, data: Data) -> float:
    """By what share of its length a token of the quantized model is off, on the mean of all tokens."""
    mine, expected = (torch.cat(run_alone(one, data)).double() for one in (result.checkpoint, checkpoint))
    return float(np.mean([float((a - b).norm() / b.norm()) for a, b in zip(mine, expected, strict=True)]))


@pytest.mark.parametrize("kind", ["encoder", "translator"])
def test_the_strength_with_the_least_error_is_taken(kind: str) -> None:
    """Errors are those of models rounded to nearest; float noise between the two may flip a rounding."""
    checkpoint, data = (MODEL, searching()) if kind == "encoder" else (translator(1, 1), PAIRS)
    result = calibrate(checkpoint, INT8_STATIC, data, **FULL)
    said = result.details["smoothing"]
    errors = {float(strength): error for strength, error in said["hidden_error"].items()}
    assert tuple(errors) == STRENGTHS
    assert errors[said["strength"]] == min(errors.values()) < max(errors.values())
    for strength in (0.0, 0.6, 0.85):
        alone = calibrate(checkpoint, INT8_STATIC, data, smoothing=strength)
        assert errors[strength] == pytest.approx(error_of(checkpoint, alone, data), rel=0.03)
    again = calibrate(checkpoint, INT8_STATIC, data, **{**FULL, "smoothing": said["strength"]})
    assert_same(result.checkpoint, again.checkpoint)


def with_outliers() -> Checkpoint:
    """A pre-norm encoder two channels of whose norms are 50 times as large, which the linears behind them undo."""
    state = random_state(PRE_CONFIG)
    for i in (0, 1):
        for norm, linear in (("mixer_norm", "mixer.qkv"), ("ffn_norm", "ffn.up")):
            channels = [3 + i, 17]
            for part in ("weight", "bias"):
                state[f"encoder.{i}.{norm}.{part}"][channels] *= 50
            state[f"encoder.{i}.{linear}.weight"][:, channels] /= 50
    return Checkpoint(PRE_CONFIG, state, TOKENIZER)


def test_outlying_channels_are_smoothed() -> None:
    """Of an error of 0.18 0.007 is left."""
    checkpoint = with_outliers()
    same, plain = (torch.cat(run_alone(one, searching())) for one in (checkpoint, PRE_NORM))
    torch.testing.assert_close(same, plain, atol=1e-4, rtol=1e-4)
    result = calibrate(checkpoint, INT8_STATIC, **FULL)
    without = calibrate(checkpoint, INT8_STATIC, **{**FULL, "smoothing": 0.0})
    said = result.details["smoothing"]
    assert said["strength"] > 0
    assert said["hidden_error"][f"{said['strength']:g}"] < 0.5 * said["hidden_error"]["0"]
    assert error_of(checkpoint, result, searching()) < 0.5 * error_of(checkpoint, without, searching())


# --- passes and memory ---


class Listener:
    """Notes each piece of work and, where it shall look, the most bytes of tensors alive while it goes on."""

    def __init__(self, looks: int = 0) -> None:
        self.work: list[list[Any]] = []
        self.looks, self.most = looks, 0
        gc.collect()
        self._before = living() if looks else 0

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.work.append([title, total, 0])

    def advance(self, n: int = 1, note: str = "") -> None:
        self.work[-1][2] += n
        _, total, done = self.work[-1]
        if self.looks and done % max(1, total // self.looks) == 0:
            self.most = max(self.most, living() - self._before)

    def done(self, note: str = "") -> None: ...


def living() -> int:
    """Bytes of all tensors, each storage once."""
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and one.device.type != "meta":
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def watched(
    checkpoint: Checkpoint, texts: Sequence[str], looks: int = 0, **options: Any
) -> tuple[StepResult, Listener]:
    listener = Listener(looks)
    step = Quantize(**{**PLAIN, **FULL, "format": INT8_STATIC, **options})
    return step(checkpoint, StepContext(searching(texts), progress=listener)), listener


def test_every_pass_is_reported() -> None:
    _, listener = watched(MODEL, TEXTS, range="average")
    assert listener.work == [
        ["ranges of activations", 9, 9],
        ["strength of smoothing", len(STRENGTHS), len(STRENGTHS)],
        ["ranges of activations, average", 9, 9],
        ["sums over activations", 9, 9],
        ["rounding of weights", 8, 8],
        ["error of the last layer", 2, 2],
    ]


def test_sums_that_do_not_fit_at_once_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32, 32, 32, 64, 32, 24, 32 and 40 columns two of 32 fit, or one of 32 and one of 24."""
    whole, _ = watched(MODEL, TEXTS, smoothing=0.5)
    monkeypatch.setattr(module, "GRAM_BYTES", 2 * 8 * 32**2)
    result, listener = watched(MODEL, TEXTS, smoothing=0.5)
    sizes = [total for title, total, _ in listener.work if title == "rounding of weights"]
    assert sizes == [2, 1, 1, 2, 1, 1]
    assert [title for title, *_ in listener.work].count("sums over activations") == 6
    assert all(torch.equal(result.checkpoint.state[name], value) for name, value in whole.checkpoint.state.items())


def test_memory_does_not_grow_with_the_texts() -> None:
    """What is alive is the model, sums and histograms, under 1 MB; 20 times the texts add 8 %, their ids.

    The inputs of one linear of 64 columns alone, kept for 400 texts, would double it.
    """
    layers = [LayerConfig(AttentionConfig(2, 32), FeedForwardConfig(256))]
    config = replace(tiny_config(layers=layers), d_model=64)
    checkpoint, texts = Checkpoint(config, random_state(config), TOKENIZER), sentences(400, seed=9)
    few, many = (
        watched(checkpoint, texts[:count], looks=2, range="percentile", smoothing=0.5)[1].most for count in (20, 400)
    )
    assert 2**19 < few < many <= 1.2 * few


# --- what cannot be calibrated on ---


def test_texts_without_tokens() -> None:
    """A tokenizer without marks around a text gives an empty one none."""
    checkpoint = replace(MODEL, tokenizer=json.dumps({**json.loads(TOKENIZER), "post_processor": None}))
    assert checkpoint.text_encoder().encode(["", "print"])[0] == []
    with pytest.raises(InputError, match="quantize: the texts have no tokens to calibrate on"):
        calibrate(checkpoint, INT8_STATIC, searching(["", " "]))
    result = calibrate(checkpoint, INT8_STATIC, searching(["", "print", "sort"]))
    assert result.details["calibration"] == {"texts": 2, "tokens": 2}


def test_pairs_that_are_too_long_are_said() -> None:
    model = translator(1, 1)
    long = replace(PAIRS, train=(*PAIRS.train, Pair("print " * 40, "print", "long")))
    with_it, without = (calibrate(model, INT8_STATIC, data).details["calibration"] for data in (long, PAIRS))
    assert with_it == {**without, "left_out": 1}
    assert without["pairs"] == len(PAIRS.train)


@pytest.mark.parametrize("form", [INT8_STATIC, INT8_BLOCKS])
def test_values_that_are_not_finite(form: str) -> None:
    broken = {**MODEL.state, "encoder.0.ffn.down.weight": MODEL.state["encoder.0.ffn.down.weight"] * 1e38}
    forms = {"encoder.1.mixer.qkv": form, "encoder.1.ffn.up": form}
    with pytest.raises(InputError, match="not finite") as caught:
        calibrate(replace(MODEL, state=broken), forms, compensate=True)
    assert "\n" not in str(caught.value)


def test_inputs_that_are_all_zero_are_no_fault() -> None:
    """Neurons that a ReLU never lets through: the range (0, 0) has a scale of 1, and no bias to correct."""
    dead = {**MODEL.state, "encoder.1.ffn.up.bias": torch.full((40,), -1e4)}
    checkpoint = replace(MODEL, state=dead)
    result = calibrate(checkpoint, INT8_STATIC, **FULL)
    found = parts(result.checkpoint, "encoder.1.ffn.down")
    assert (float(found["input_scale"]), int(found["input_zero"])) == (1.0, 0)
    torch.testing.assert_close(found["bias"], checkpoint.state["encoder.1.ffn.down.bias"])
    assert error_of(checkpoint, result, searching()) < 0.1
