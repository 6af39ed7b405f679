import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import TOKENIZER, WRITERS, decoder_config, grouped, random_state, writer
from models import WORDS as VOCABULARY

from slimformer.compress import costs
from slimformer.compress.calibration import Calibration
from slimformer.compress.criteria import CRITERIA
from slimformer.compress.decision import Agreement, Decision
from slimformer.compress.prune import Prune
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.compress.units import Kept
from slimformer.export import export, sublayer_times
from slimformer.export.decoding_parity import check_decoding
from slimformer.export.sublayer_times import SublayerTimes, kind_of
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.config import LanguageHead, RecurrentConfig, TransformerConfig
from slimformer.transformer.data import (
    LabelledData,
    LabelledRow,
    Page,
    Pair,
    PairData,
    Query,
    SearchData,
    TextData,
    TextRow,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.quantization import quantized
from slimformer.transformer.statistics import RatioInterval
from slimformer.transformer.tokenizer import pad

WORDS = np.random.default_rng(0)
TEXTS = tuple(" ".join(f"w{i}" for i in WORDS.integers(0, 20, WORDS.integers(1, 9))) for _ in range(60))
UNSEEN = SearchData((Page("p", "", "w1"),), (Query("w2", ("p",), "p"),), (), TEXTS)


def prune(**options: Any) -> Prune:
    """A step that asks for no agreement: units of random models hardly differ."""
    return Prune(**{"agreement": 0.0, **options})


class Recorder:
    def __init__(self) -> None:
        self.work: list[list] = []

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.work.append([title, total, 0])

    def advance(self, n: int = 1, note: str = "") -> None:
        self.work[-1][2] += n

    def done(self, note: str = "") -> None:
        pass


def outputs(checkpoint: Checkpoint) -> torch.Tensor:
    ids, mask = pad(checkpoint.text_encoder().encode(TEXTS))
    with torch.no_grad():
        return checkpoint.to_torch()(torch.from_numpy(ids), torch.from_numpy(mask)).result


def distance(first: Checkpoint, second: Checkpoint) -> float:
    return float((outputs(first) - outputs(second)).square().sum(1).mean())


@pytest.mark.parametrize("importance", CRITERIA)
@pytest.mark.parametrize("cost", [0.3, 0.5, 0.8])
def test_cost_is_kept_and_nearly_used(uneven: Checkpoint, cost: float, importance: str) -> None:
    result = prune(cost=cost, importance=importance, multiple=2)(uneven, StepContext(UNSEEN))
    share = result.checkpoint.config.multiply_adds() / uneven.config.multiply_adds()
    unit = 2 * 2 * 8 / uneven.config.multiply_adds()
    assert cost - unit < share <= cost
    assert result.details["multiply_adds_kept"] == pytest.approx(share, abs=1e-4)
    assert all(layer.ffn is None or layer.ffn.width % 2 == 0 for layer in result.checkpoint.config.encoder)


def test_fisher_and_refit_each_bring_the_output_closer(uneven: Checkpoint) -> None:
    context = StepContext(UNSEEN)
    options = {"cost": 0.6, "multiple": 1}
    magnitude, fisher, refitted = (
        distance(uneven, prune(**options, importance=importance, refit=refit)(uneven, context).checkpoint)
        for importance, refit in (("magnitude", False), ("fisher", False), ("fisher", True))
    )
    assert refitted < 0.8 * fisher
    assert fisher < 0.8 * magnitude


def test_result_is_dense_saves_and_loads(uneven: Checkpoint, tmp_path: Path) -> None:
    result = prune(multiple=2)(uneven, StepContext(UNSEEN)).checkpoint
    result.save(tmp_path / "small")
    again = load_own(tmp_path / "small")
    assert torch.equal(outputs(again), outputs(result))
    kept = again.provenance["kept"]
    assert [len(units) for units in kept["heads"]] == [
        0 if layer.mixer is None else layer.mixer.heads for layer in again.config.encoder
    ]


def test_input_is_untouched(uneven: Checkpoint) -> None:
    before = {name: value.clone() for name, value in uneven.state.items()}
    prune(multiple=2)(uneven, StepContext(UNSEEN))
    assert all(torch.equal(uneven.state[name], value) for name, value in before.items())


def test_the_same_seed_gives_the_same_model(uneven: Checkpoint) -> None:
    first, again, other = (
        prune(multiple=2, refit_samples=30)(uneven, StepContext(UNSEEN, seed=seed)).checkpoint for seed in (1, 1, 2)
    )
    assert all(torch.equal(first.state[name], value) for name, value in again.state.items())
    assert not torch.equal(outputs(first), outputs(other))


@pytest.mark.parametrize("importance", ["fisher", "magnitude"])
def test_layers_are_chosen_first_and_the_rest_of_the_budget_cuts_units(uneven: Checkpoint, importance: str) -> None:
    options = {"layers": 2, "importance": importance, "multiple": 1}
    whole = prune(cost=1.0, **options)(uneven, StepContext(UNSEEN))
    kept = whole.details["kept_layers"]
    assert len(kept) == 2
    assert whole.checkpoint.config.encoder == tuple(uneven.config.encoder[i] for i in kept)
    less = prune(cost=0.4, **options)(uneven, StepContext(UNSEEN))
    assert less.details["kept_layers"] == kept
    assert less.checkpoint.config.multiply_adds() <= 0.4 * uneven.config.multiply_adds()


def test_named_layers_stay(uneven: Checkpoint) -> None:
    result = prune(cost=1.0, keep_layers=(0, 2), refit=False)(uneven, StepContext(UNSEEN))
    assert result.checkpoint.provenance["kept"]["layers"] == [0, 2]
    assert torch.equal(result.checkpoint.state["encoder.1.ffn.up.weight"], uneven.state["encoder.2.ffn.up.weight"])


def test_details_say_what_was_done(uneven: Checkpoint) -> None:
    recorder = Recorder()
    step = prune(samples=20, refit_samples=1000, multiple=2, pages=0.0)
    details = step(uneven, StepContext(UNSEEN, progress=recorder)).details
    assert json.loads(json.dumps(details)) == details
    count = len(set(TEXTS))
    assert details["calibration"]["decision"]["texts"] == 20
    assert details["calibration"]["refit"]["texts"] == count
    assert details["calibration"]["refit"]["tokens"] == sum(map(len, uneven.text_encoder().encode(sorted(set(TEXTS)))))
    assert [(row["layer"], row["part"]) for row in details["output_error"]][:2] == [(0, "mixer"), (0, "ffn")]
    assert all(row["after"] <= row["before"] for row in details["output_error"])
    assert [(title, total) for title, total, _ in recorder.work] == [
        ("curvature of the projections", 10),
        ("curvature of the projections", 10),
        ("order heads and neurons", 6),
        ("try sub-layers cut alone", 24),
        ("Re-fitting", 6),
    ]
    assert all(done == total for _, total, done in recorder.work)
    assert details["seconds"] >= 0


def test_what_was_not_done_is_named(uneven: Checkpoint) -> None:
    details = prune(refit=False, multiple=2)(uneven, StepContext(UNSEEN)).details
    assert details["skipped"] == {"refit": "the option refit is false"}
    result = prune(cost=1.0)(uneven, StepContext(UNSEEN))
    assert result.details["skipped"]["removal"] == "the whole model is within cost 1.0"
    assert all(torch.equal(result.checkpoint.state[name], value) for name, value in uneven.state.items())


def test_only_training_texts_are_read(uneven: Checkpoint) -> None:
    page = Page("q", "t", "w9 w9")
    asked = SearchData((page,), (Query("w7", ("q",), "q"),), (Query("w6", ("q",), "q"),), TEXTS)
    others = (asked, SearchData((page,), (), (), TEXTS))
    first, second = (prune(multiple=2)(uneven, StepContext(data)).checkpoint for data in others)
    assert all(torch.equal(first.state[name], value) for name, value in second.state.items())


def test_a_share_of_the_calibration_texts_are_pages(uneven: Checkpoint) -> None:
    """16 texts of one word and 16 pages of nine: with [CLS] and [SEP] 3 and 11 tokens each."""
    pages = tuple(Page(str(i), "t", " ".join(f"w{(i + k) % 10}" for k in range(9))) for i in range(16))
    context = StepContext(SearchData(pages, (), (), tuple(f"w{i}" for i in range(10))))
    for share, texts, tokens in ((0.0, 8, 8 * 3), (0.5, 8, 4 * 3 + 4 * 11), (1.0, 8, 8 * 11)):
        found = prune(multiple=2, samples=8, pages=share, refit=False)(uneven, context).details["calibration"]
        assert found["decision"] == {"texts": texts, "tokens": tokens}


def test_magnitude_without_refit_needs_no_texts(uneven: Checkpoint) -> None:
    nothing = SearchData((), (), (), ())
    result = prune(importance="magnitude", refit=False, multiple=2)(uneven, StepContext(nothing))
    assert result.details["calibration"]["refit"] == {"texts": 0, "tokens": 0}
    with pytest.raises(InputError, match="no texts to learn from"):
        prune()(uneven, StepContext(nothing))


def test_a_classifier_is_pruned_on_its_training_rows(uneven_classifier: Checkpoint) -> None:
    rows = tuple(LabelledRow(text, "a", str(i)) for i, text in enumerate(TEXTS))
    result = prune(multiple=2)(uneven_classifier, StepContext(LabelledData(rows, (), (), ())))
    assert outputs(result.checkpoint).shape == (len(TEXTS), 3)
    assert result.checkpoint.config.head == uneven_classifier.config.head


def test_pruned_twice_names_the_first_models_units(uneven: Checkpoint) -> None:
    context = StepContext(UNSEEN)
    once = prune(cost=1.0, keep_layers=(0, 2), multiple=1)(uneven, context).checkpoint
    twice = prune(cost=0.5, keep_layers=(1,), multiple=1)(once, context).checkpoint
    kept = twice.provenance["kept"]
    assert kept["layers"] == [2]
    names = list(kept["neurons"][0])
    assert torch.equal(twice.state["encoder.0.ffn.up.weight"], uneven.state["encoder.2.ffn.up.weight"][names])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": 0.0}, r"cost is 0.0, not a share over 0 and at most 1"),
        ({"cost": 1.5}, r"cost is 1.5"),
        ({"cost": float("nan")}, r"cost is nan"),
        ({"importance": "luck"}, r"importance is 'luck', not one of surgeon, fisher, diagonal, taylor, magnitude"),
        ({"layer_importance": "taylor"}, r"layer_importance is 'taylor', not one of fisher, influence, magnitude"),
        ({"cost": 0.5, "speedup": 2.0}, r"cost and speedup are both given, which are two budgets"),
        ({"speedup": 0.5}, r"speedup is 0.5, not a number of at least 1"),
        ({"speedup": float("inf")}, r"speedup is inf"),
        ({"format": "int8"}, r"format is int8, which is about speedup"),
        ({"speedup": 2.0, "format": "auto"}, r"format is 'auto', not one of int8, float32"),
        ({"width": 0}, r"width is 0, at least 1 channel"),
        ({"agreement": 1.0}, r"agreement is 1.0, not a share from 0 to less than 1"),
        ({"agreement": float("nan")}, r"agreement is nan"),
        ({"layers": 0}, r"layers is 0, at least 1"),
        ({"layers": 1, "keep_layers": (0,)}, r"layers and keep_layers are both given"),
        ({"decoder_layers": 0}, r"decoder_layers is 0, at least 1"),
        ({"decoder_layers": 1, "keep_decoder_layers": (0,)}, r"decoder_layers and keep_decoder_layers are both given"),
        ({"samples": 0}, r"samples is 0"),
        ({"damping": -1.0}, r"damping is -1.0"),
        ({"pages": 1.5}, r"pages is 1.5, not a share from 0 to 1"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prune(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 4}, r"layers is 4, the model has 3"),
        ({"decoder_layers": 1}, r"decoder_layers is 1, the model has 0 in its decoder"),
        ({"keep_layers": (0, 3)}, r"keep_layers \[0, 3\] are not ascending numbers below 3"),
        ({"keep_layers": (1, 0)}, r"keep_layers \[1, 0\]"),
        ({"cost": 0.001}, r"cost 0.001 leaves no head and no 32 neurons"),
    ],
)
def test_what_the_model_cannot_give_is_refused(uneven: Checkpoint, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prune(**options)(uneven, StepContext(UNSEEN))


def test_int8_models_are_refused(uneven: Checkpoint) -> None:
    small = quantized(uneven, bits=8)
    with pytest.raises(InputError, match="prune first, quantize afterwards"):
        prune()(small, StepContext(UNSEEN))


# --- models that write ---


def sayings(count: int, seed: int) -> list[str]:
    random, words = np.random.default_rng(seed), [word for word in VOCABULARY.split() if word[0].isalpha()]
    return [" ".join(random.choice(words, random.integers(2, 12))) for _ in range(count)]


PAIRS = PairData(
    tuple(Pair(a, b, str(i)) for i, (a, b) in enumerate(zip(sayings(80, 1), sayings(80, 2), strict=True))),
    (Pair("sort", "print", "v"),),
    (Pair("sort", "print", "t"),),
    ("table",),
)
FEW = {"samples": 12, "refit_samples": 16}
LINES = TextData(tuple(TextRow(text, str(i)) for i, text in enumerate(sayings(80, 3))), (), (), ())


def context_of(model: Checkpoint, seed: int = 0) -> StepContext:
    return StepContext(PAIRS if model.config.encoder else LINES, seed=seed)


def divergence(first: Checkpoint, second: Checkpoint) -> float:
    """Mean Kullback-Leibler divergence of the next token, on the training data."""
    examples = Calibration.of(first, context_of(first), 80, 0.0)
    total = tokens = 0.0
    for batch in examples.batches(80, "cpu"):
        with torch.no_grad():
            p, q = (batch.run(one.to_torch()).result.log_softmax(1) for one in (first, second))
        total += float((p.exp() * (p - q)).sum())
        tokens += len(p)
    return total / tokens


@pytest.mark.parametrize("importance", CRITERIA)
@pytest.mark.parametrize("kind", WRITERS)
def test_cost_of_models_that_write_is_kept_and_nearly_used(kind: str, importance: str) -> None:
    whole = writer(kind)
    result = prune(cost=0.7, importance=importance, multiple=4, **FEW)(whole, context_of(whole))
    small, costs = result.checkpoint.check("small"), whole.config.multiply_adds()
    share = small.config.multiply_adds() / costs
    assert 0.7 - 4 * 2 * 32 / costs < share <= 0.7
    assert result.details["multiply_adds_kept"] == pytest.approx(share, abs=1e-4)
    for before, after in zip(whole.config.decoder, small.config.decoder, strict=True):
        assert not isinstance(before.mixer, RecurrentConfig) or after.mixer == before.mixer
    assert small.config.encoder != whole.config.encoder or not whole.config.encoder
    assert small.config.decoder != whole.config.decoder


@pytest.mark.parametrize("kind", ["post", "pre", "alone, pre"])
def test_fisher_and_refit_each_bring_what_is_written_closer(kind: str) -> None:
    whole, options = writer(kind), {"cost": 0.6, "multiple": 1}
    magnitude, fisher, refitted = (
        divergence(whole, prune(**options, importance=importance, refit=refit)(whole, context_of(whole)).checkpoint)
        for importance, refit in (("magnitude", False), ("fisher", False), ("fisher", True))
    )
    assert refitted < 0.8 * fisher
    assert fisher < 0.9 * magnitude


def test_layers_of_each_stack_are_chosen_or_named() -> None:
    whole = writer("post")
    step = prune(cost=1.0, layers=2, decoder_layers=1, refit=False)
    details = step(whole, context_of(whole)).details
    assert (len(details["kept_layers"]), len(details["decoder"]["kept_layers"])) == (2, 1)
    named = prune(cost=1.0, keep_layers=(0, 1), keep_decoder_layers=(2,), refit=False)(whole, context_of(whole))
    kept = Kept.from_dict(named.checkpoint.provenance["kept"])
    assert kept == Kept.everything(whole.config, {"encoder": (0, 1), "decoder": (2,)})
    assert torch.equal(named.checkpoint.state["decoder.0.cross.q.weight"], whole.state["decoder.2.cross.q.weight"])


def test_details_of_both_stacks() -> None:
    whole, recorder = writer("post"), Recorder()
    step = prune(cost=0.6, samples=20, multiple=4, keep_decoder_layers=(0, 2))
    result = step(whole, StepContext(PAIRS, progress=recorder))
    details, after = result.details, result.checkpoint.config
    assert json.loads(json.dumps(details)) == details
    assert details["heads"] == [0 if layer.mixer is None else layer.mixer.heads for layer in after.encoder]
    assert details["decoder"] == {
        "kept_layers": [0, 2],
        "heads": [0 if layer.mixer is None else layer.mixer.heads for layer in after.decoder],
        "cross_heads": [0 if layer.cross is None else layer.cross.heads for layer in after.decoder],
        "neurons": [0 if layer.ffn is None else layer.ffn.width for layer in after.decoder],
    }
    assert details["calibration"]["decision"]["pairs"] == 20
    assert details["calibration"]["refit"]["pairs"] == 80
    rows = [(row["stack"], row["layer"], row["part"]) for row in details["output_error"]]
    assert rows[:3] == [("encoder", 0, "mixer"), ("encoder", 0, "ffn"), ("encoder", 1, "mixer")]
    assert rows[6:] == [("decoder", i, part) for i in (0, 1) for part in ("mixer", "cross", "ffn")]
    assert recorder.work[0] == ["curvature of the projections", 10, 10]
    assert recorder.work[-1] == ["Re-fitting", 12, 12]
    assert details["skipped"] == {}
    alone = prune(multiple=4)(writer("alone"), StepContext(LINES)).details
    assert "kept_layers" not in alone
    assert list(alone["decoder"]) == ["kept_layers", "heads", "neurons"]
    assert alone["calibration"]["decision"]["texts"] == 80


def test_cells_are_named_as_left_whole() -> None:
    details = prune(multiple=4, cost=0.7, **FEW)(writer("ssru"), StepContext(PAIRS)).details
    assert details["skipped"]["cells"] == "mixers of the kind ssru have no units to remove, their layers keep them"
    assert details["skipped"]["refit of cells"] == "without a projection there is nothing to fit"
    projected = prune(multiple=4, cost=0.7, **FEW)(writer("lstm"), StepContext(PAIRS)).details
    assert "refit of cells" not in projected["skipped"]
    assert "lstm" in projected["skipped"]["cells"]
    assert {row["part"] for row in projected["output_error"]} == {"mixer", "cross", "ffn"}


def test_pairs_that_are_too_long_are_counted() -> None:
    long = Pair("print " * 30, "print", "long")
    data = PairData((*PAIRS.train[:9], long), (), (), ())
    details = prune(multiple=4, cost=0.7)(writer("post"), StepContext(data)).details
    assert details["calibration"]["decision"]["pairs"] == 9
    assert details["skipped"]["pairs"] == "1 of those drawn are empty or over the model's positions"


def test_the_same_seed_gives_the_same_translator() -> None:
    whole = writer("own table")
    step = prune(cost=0.6, multiple=4, **FEW)
    first, again, other = (step(whole, context_of(whole, seed)).checkpoint for seed in (1, 1, 2))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_a_pruned_translator_is_pruned_again() -> None:
    whole = writer("pre")
    once = prune(cost=0.8, multiple=4, decoder_layers=2, **FEW)(whole, context_of(whole)).checkpoint
    twice = prune(cost=0.6, multiple=4, **FEW)(once, context_of(whole)).checkpoint
    kept = Kept.from_dict(twice.provenance["kept"])
    for i, old in enumerate(kept.layers["decoder"]):
        names = list(kept.units.get(f"decoder.{old}.ffn", ()))
        if names:
            expected = whole.state[f"decoder.{old}.ffn.up.weight"][names]
            assert torch.equal(twice.state[f"decoder.{i}.ffn.up.weight"], expected)
    assert len(kept.layers["decoder"]) == 2


def test_valid_and_test_pairs_are_not_read() -> None:
    whole, others = writer("post"), (PAIRS, PairData(PAIRS.train, (), (), ()))
    first, second = (prune(multiple=4, cost=0.7, **FEW)(whole, StepContext(data)).checkpoint for data in others)
    assert first.fingerprint() == second.fingerprint()


def test_what_a_translator_cannot_give_is_refused() -> None:
    whole = writer("ssru")
    with pytest.raises(InputError, match="calibrated on pairs"):
        prune()(whole, StepContext(UNSEEN))
    with pytest.raises(InputError, match=r"keep_decoder_layers \[0, 3\] are not ascending numbers below 3"):
        prune(keep_decoder_layers=(0, 3)).check(whole.config)
    with pytest.raises(InputError, match=r"layers is 1, the model has 0 in its encoder"):
        prune(layers=1).check(WRITERS["alone"])
    cells = sum(layer.mixer.multiply_adds(32) for layer in whole.config.decoder)
    with pytest.raises(InputError, match=r"leaves no head and no 32 neurons"):
        prune(cost=cells / whole.config.multiply_adds(), **FEW)(whole, StepContext(PAIRS))
    with pytest.raises(InputError, match="prune first, quantize afterwards"):
        prune().check(quantized(whole, bits=7).config)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_a_pruned_translator_writes_in_onnx_what_it_writes_here(format: str, shared: bool, tmp_path: Path) -> None:
    """The decoder's last layer has no cross-attention any more."""
    config = decoder_config(2, 2, head=LanguageHead(2, 3, tied=False, bias=True))
    config = grouped(config) if shared else config
    state = random_state(config, 4)
    state["head.tokens.weight"] *= 2
    state["decoder.1.cross.out.weight"] *= 1e-3
    pruned = prune(cost=0.5, multiple=8, **FEW)(Checkpoint(config, state, TOKENIZER), StepContext(PAIRS)).checkpoint
    assert pruned.config.decoder[1].cross is None
    if format == "int8":
        pruned = Quantize(bits=7, samples=16)(pruned, StepContext(PAIRS)).checkpoint
    parity = check_decoding(pruned, export(pruned, tmp_path / "bundle"), sayings(8, 9), threads=1)
    assert parity.passed, parity


# --- speed, width and agreement ---


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> Callable[[TransformerConfig], float]:
    """Times of encoders that are known: a layer 1, a head 2, a neuron 1/8, all else 3; whole graphs a tenth more."""

    def seconds(config: TransformerConfig) -> float:
        total = 3.0
        for layer in config.encoder:
            total += 1.0 + (0 if layer.mixer is None else 2 * layer.mixer.heads)
            total += 0 if layer.ffn is None else layer.ffn.width / 8
        return total

    def table(config: TransformerConfig, *_: Any, **__: Any) -> SublayerTimes:
        points = {}
        for layer in config.encoder:
            points[kind_of(layer.mixer)] = ((0, 0.0), (64, 128.0))
            points[kind_of(layer.ffn)] = ((0, 0.0), (800, 100.0))
        return SublayerTimes(3.0, 1.0, points)

    def whole(first: TransformerConfig, second: TransformerConfig, *_: Any, **__: Any) -> RatioInterval:
        ratio = seconds(first) / (seconds(second) * 1.1)
        return RatioInterval(ratio, ratio - 0.1, ratio + 0.1)

    monkeypatch.setattr(costs, "sublayer_times", table)
    monkeypatch.setattr(costs, "speed", whole)
    return seconds


@pytest.mark.parametrize("format", ["float32", "int8", "int8_dynamic"])
def test_the_speed_that_was_asked_for_is_reached(
    format: str, uneven: Checkpoint, exact_times: Callable[[TransformerConfig], float]
) -> None:
    """The whole graph is slower than the sum of times, so that more has to go than the sum says."""
    step = prune(speedup=1.6, format=format, multiple=1, importance="fisher")
    result = step(uneven, StepContext(UNSEEN))
    reached = exact_times(uneven.config) / (1.1 * exact_times(result.checkpoint.config))
    assert reached == pytest.approx(1.6, rel=0.05)  # units of a tiny model are coarse
    speed = result.details["speed"]
    assert (speed["wanted"], speed["format"], speed["workload"], speed["times"]) == (1.6, format, "sorted", "measured")
    assert speed["measured"] == pytest.approx(reached, abs=1e-3)
    assert speed["predicted"] == pytest.approx(1.1 * reached, abs=1e-3)
    assert len(speed["attempts"]) > 1
    assert speed["attempts"][0]["measured"] < 1.6 / 1.05
    assert json.loads(json.dumps(result.details)) == result.details


def test_whether_texts_are_enough_for_a_speed_is_asked_of_as_many_multiply_adds(
    uneven: Checkpoint, exact_times: Callable[[TransformerConfig], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    real = Decision.within

    def within(decision: Decision, costs: Any, budget: float, *, estimate: bool = False) -> Kept | None:
        asked.extend([budget] if estimate else [])
        return real(decision, costs, budget, estimate=estimate)

    monkeypatch.setattr(Decision, "within", within)
    step = prune(speedup=1.6, multiple=1, importance="fisher", samples=8, agreement=1e-6)
    step(uneven, StepContext(UNSEEN))
    assert asked == [pytest.approx(uneven.config.multiply_adds() / 1.6)]


def test_a_speed_out_of_reach_is_refused_with_the_greatest(
    uneven: Checkpoint, exact_times: Callable[[TransformerConfig], float]
) -> None:
    """All that must stay is one neuron, of 1/8."""
    most = exact_times(uneven.config) / (3 + len(uneven.config.encoder) + 1 / 8)
    with pytest.raises(InputError, match=rf"speedup 50.0 is out of reach: .* {int(100 * most) / 100} times as fast"):
        prune(speedup=50.0, multiple=1)(uneven, StepContext(UNSEEN))


@pytest.mark.parametrize("kind", ["post", "grouped", "alone", "ssru"])
def test_a_model_that_writes_reaches_its_speed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are tokens' multiply-adds, three times as many of the decoder; a graph's own are not counted."""

    def seconds(config: TransformerConfig) -> float:
        weights = [layer.multiply_adds(config.d_model) for layer in config.encoder]
        weights += [3 * layer.multiply_adds(config.d_model) for layer in config.decoder]
        return 1e-6 * (20000 * bool(config.decoder) + sum(weights))

    def opened(config: TransformerConfig, *_: Any, **__: Any) -> Callable[[], float]:
        return lambda: seconds(config)

    monkeypatch.setattr(sublayer_times, "opened", opened)
    model = writer(kind)
    data = PAIRS if model.config.encoder else replace(LINES, valid=LINES.train)
    result = prune(speedup=1.5, multiple=1, importance="fisher", **FEW)(model, StepContext(data))
    reached = seconds(model.config) / seconds(result.checkpoint.config)
    assert reached == pytest.approx(1.5, rel=0.05)
    speed = result.details["speed"]
    assert (speed["measured"], speed["predicted"]) == (pytest.approx(reached, abs=1e-3),) * 2
    assert "missed" not in speed
    assert any(row["part"].startswith("decoder relu neurons") for row in speed["sublayers"])


def test_a_decoder_that_writes_nothing_has_no_speed() -> None:
    with pytest.raises(InputError, match="this decoder writes nothing; give cost"):
        prune(speedup=2.0).check(replace(WRITERS["post"], head=None))


def test_the_least_cost_that_leaves_a_unit_is_named(uneven: Checkpoint) -> None:
    with pytest.raises(InputError, match=r"leaves no head and no 32 neurons; ask for ([\d.]+)") as caught:
        prune(cost=0.001)(uneven, StepContext(UNSEEN))
    least = float(str(caught.value).rsplit(" ", 1)[1])
    assert prune(cost=least)(uneven, StepContext(UNSEEN)).details["multiply_adds_kept"] <= least
    with pytest.raises(InputError, match="ask for"):
        prune(cost=least - 1e-4)(uneven, StepContext(UNSEEN))


@pytest.mark.parametrize("importance", ["surgeon", "magnitude"])
def test_channels_go_before_heads_and_neurons(importance: str, uneven: Checkpoint) -> None:
    result = prune(cost=0.5, width=6, importance=importance, multiple=1)(uneven, StepContext(UNSEEN))
    config = result.checkpoint.config
    assert config.d_model == 6
    assert config.multiply_adds() <= 0.5 * uneven.config.multiply_adds()
    assert result.checkpoint.check("pruned") is result.checkpoint
    channels = result.checkpoint.provenance["kept"]["channels"]
    assert (len(channels), result.details["channels"]) == (6, 6)
    tables = (one.state["embeddings.tokens.weight"] for one in (uneven, result.checkpoint))
    whole, cut = tables
    assert torch.equal(whole[:, channels], cut)
    with pytest.raises(InputError, match="width is 9, the model has 8 channels; ask for fewer"):
        prune(width=9).check(uneven.config)


def test_too_few_texts_to_decide_by_are_refused(uneven: Checkpoint) -> None:
    """Two texts say little; with none to compare by, nothing is asked."""
    few = SearchData((), (), (), TEXTS[:2])
    with pytest.raises(InputError, match=r"prune: 2 calibration examples are too few .* lower agreement") as caught:
        Prune(cost=0.5, multiple=1, pages=0.0)(uneven, StepContext(few))
    enough = int(str(caught.value).split("with some ")[1].split()[0])
    assert enough > 2
    result = Prune(cost=0.5, multiple=1, agreement=0.05)(uneven, StepContext(UNSEEN))
    assert 0.05 <= result.details["agreement"]["share"] <= 1
    assert "agreement" not in Prune(cost=0.5, multiple=1, importance="magnitude")(uneven, StepContext(few)).details


def test_more_texts_are_taken_where_decisions_do_not_agree(uneven: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many, if there are; what was measured of the first ones is kept, cuts are tried once."""
    seen: list[int] = []

    def agreement(decision: Decision, _: Kept) -> Agreement:
        seen.append(decision.seen.rows)
        return Agreement(seen[-1], 0.95 if seen[-1] >= 9 else 0.85)

    monkeypatch.setattr(Decision, "agreement", agreement)
    recorder, step = Recorder(), Prune(cost=0.5, multiple=1, samples=4, pages=0.0)
    details = step(uneven, StepContext(UNSEEN, progress=recorder)).details
    assert seen == [4, 16]
    assert details["agreement"] == {"examples": 16, "share": 0.95, "wanted": 0.9, "examples_enough": 5}
    assert details["calibration"]["decision"]["texts"] == 16
    assert [total for title, total, _ in recorder.work if title.startswith("curvature")] == [2, 2, 6, 6]
    assert len([title for title, _, _ in recorder.work if title.startswith("try")]) == 1
    with pytest.raises(InputError, match=r"prune: 8 calibration examples are too few .* would agree on 85 %"):
        replace(step, samples=2)(uneven, StepContext(UNSEEN))
    assert seen[2:] == [2, 8]
    assert step(uneven, StepContext(replace(UNSEEN, texts=UNSEEN.texts[:12]))).details["agreement"]["examples"] == 12
    replace(step, samples=10)(uneven, StepContext(UNSEEN))
    assert seen[4:] == [4, 12, 10, 10]
