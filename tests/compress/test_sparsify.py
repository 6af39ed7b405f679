"""The step: what becomes 0 and what does not, in which order, what is said of it, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import DENSE, decoder_config, pair_data, tiny, writer
from torch import Tensor

from slimformer.compress import sparsify as module
from slimformer.compress.calibration import Batch, Calibration
from slimformer.compress.sparse_refit import refit_sparse
from slimformer.compress.sparsegpt import Pattern, magnitude, sparsegpt, wanda
from slimformer.compress.sparsify import Sparsify
from slimformer.compress.step import StepContext, StepResult
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.data import Data, Page, SearchData, TextData, TextRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.quantization import linear_names, quantized

WORDS = ["freeze", "first", "row", "sheet", "insert", "chart", "page", "number", "table", "cell", "sort", "date"]


def texts(count: int = 30) -> tuple[str, ...]:
    random = np.random.default_rng(0)
    return tuple(" ".join(random.choice(WORDS, int(random.integers(3, 15)))) for _ in range(count))


SEARCH = SearchData((Page("1", "", "sort a table by date"),), (), (), texts())
ROWS = tuple(TextRow(text, str(i)) for i, text in enumerate(texts()))
TEXTS = TextData(ROWS[:20], ROWS[20:25], ROWS[25:], ())
MODELS: dict[str, tuple[Checkpoint, Data]] = {
    "encoder": (tiny(), SEARCH),
    "encoder-decoder": (writer("pre"), pair_data()),
    "cells": (writer("lstm"), pair_data()),
    "decoder": (writer("alone"), TEXTS),
}
CHOICES: dict[str, dict[str, Any]] = {
    "half": {},
    "0.3": {"sparsity": 0.3},
    "2:4": {"pattern": "2:4"},
    "1:4": {"pattern": "1:4", "sparsity": 0.75},
}


def run(options: Sparsify, model: str = "encoder", **context: Any) -> StepResult:
    checkpoint, data = MODELS[model]
    return options(checkpoint, StepContext(data, **context))


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: checkpoint.state[f"{name}.weight"] for name in linear_names(checkpoint.config)}


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("model", MODELS)
def test_all_linears_of_the_layers_and_nothing_else(model: str, choice: str, method: str) -> None:
    checkpoint = MODELS[model][0]
    before = {name: value.clone() for name, value in checkpoint.state.items()}
    result = run(Sparsify(method=method, samples=8, refit=False, **CHOICES[choice]), model)
    found, share = weights(result.checkpoint), {"half": 0.5, "0.3": 0.3, "2:4": 0.5, "1:4": 0.75}[choice]
    names = [f"{name}.weight" for name in found]
    for weight in found.values():
        if choice[1] == ":":
            kept = (weight.reshape(len(weight), -1, 4) != 0).sum(2)
            assert bool((kept == int(choice[0])).all())
        outputs, inputs = weight.shape
        count = outputs * round(share * inputs) if method == "wanda" else round(share * weight.numel())
        assert int((weight == 0).sum()) == count
    assert len(names) > 3
    for name, value in checkpoint.state.items():
        assert torch.equal(value, before[name])
        assert torch.equal(value, result.checkpoint.state[name]) == (name not in names)
    assert result.checkpoint.config == checkpoint.config
    assert not any(value.requires_grad for value in result.checkpoint.state.values())
    result.checkpoint.check("sparse")


def grams_of(checkpoint: Checkpoint, names: list[str], examples: list[Batch]) -> dict[str, Tensor]:
    """x x^T of the linears' inputs, each in one product."""
    model = checkpoint.to_torch()
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        hear = seen[name]
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, hear=hear: hear.append(given[0].flatten(0, -2).double())
        )
    with torch.inference_mode():
        for example in examples:
            example.run(model)
    return {name: torch.cat(hear).T @ torch.cat(hear) for name, hear in seen.items()}


@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
@pytest.mark.parametrize("model", ["encoder", "encoder-decoder"])
def test_layers_are_judged_by_what_sparse_ones_before_them_give(model: str, method: str) -> None:
    options = Sparsify(method=method, samples=16, damping=0.05, refit=False)
    checkpoint, data = MODELS[model]
    context = StepContext(data, seed=1)
    examples = Calibration.of(checkpoint, context, 16, 0.5).batches(16, "cpu", size=1)
    expected, rows = checkpoint, run(options, model, seed=1).details["linears"]
    names = linear_names(checkpoint.config)
    for layer in dict.fromkeys(name.split(".ffn")[0].split(".mixer")[0].split(".cross")[0] for name in names):
        state = dict(expected.state)
        grams = grams_of(expected, [name for name in names if name.startswith(f"{layer}.")], examples)
        for name, gram in grams.items():
            weight = state[f"{name}.weight"]
            made = sparsegpt(weight, gram, 0.5, damping=0.05) if method == "sparsegpt" else wanda(weight, gram, 0.5)
            change = (weight - made).double()
            error, size = (float((one @ gram * one).sum()) for one in (change, weight.double()))
            row = next(row for row in rows if row["name"] == name)
            assert row["output_error"] == pytest.approx((error / size) ** 0.5, abs=2e-4)
            state[f"{name}.weight"] = made
        expected = replace(expected, state=state)
    found = run(options, model, seed=1).checkpoint
    for name, weight in weights(expected).items():
        torch.testing.assert_close(found.state[f"{name}.weight"], weight, rtol=1e-3, atol=1e-4)


def test_linears_whose_sums_do_not_fit_together_are_judged_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(Sparsify(samples=12, refit=False)).checkpoint
    monkeypatch.setattr(module, "GRAM_BYTES", 1)
    found = run(Sparsify(samples=12, refit=False))
    first, later = "encoder.0.mixer.qkv.weight", "encoder.0.ffn.down.weight"
    assert torch.equal(found.checkpoint.state[first], whole.state[first])
    assert not torch.equal(found.checkpoint.state[later], whole.state[later])
    assert found.details["zeros"] == pytest.approx(0.5, abs=1e-6)


def test_magnitude_is_linear_by_linear_and_needs_no_texts() -> None:
    result = run(Sparsify(method="magnitude", sparsity=0.4, refit=False), "decoder")
    for name, weight in weights(MODELS["decoder"][0]).items():
        assert torch.equal(result.checkpoint.state[f"{name}.weight"], magnitude(weight, 0.4))
    empty = TextData((), (), (), ())
    without = Sparsify(method="magnitude", refit=False)(MODELS["decoder"][0], StepContext(empty))
    assert without.details["calibration"]["texts"] == 0
    for method in ("magnitude", "sparsegpt"):
        with pytest.raises(InputError, match="no texts to learn from"):
            Sparsify(method=method)(MODELS["decoder"][0], StepContext(empty))


@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
@pytest.mark.parametrize("model", ["encoder", "cells"])
def test_what_stays_is_fitted_to_the_model_as_it_was(model: str, method: str) -> None:
    """The same zeros, and weights and biases as of the fit by itself; all else is untouched."""
    checkpoint, data = MODELS[model]
    options = Sparsify(method=method, samples=20, damping=0.05)
    result, bare = run(options, model).checkpoint, run(replace(options, refit=False), model).checkpoint
    fitted = bare.to_torch()
    batches = Calibration.of(checkpoint, StepContext(data), 20, 0.5).batches(20, "cpu")
    fits = refit_sparse(checkpoint.to_torch(), fitted, batches, damping=0.05)
    for name, value in fitted.state_dict().items():
        torch.testing.assert_close(result.state[name], value, atol=1e-5, rtol=1e-5)
        assert torch.equal(result.state[name] == 0, bare.state[name] == 0)
    assert run(options, model).details["output_error"] == [fit.to_dict() for fit in fits]
    assert not torch.equal(result.state["encoder.1.ffn.up.bias"], checkpoint.state["encoder.1.ffn.up.bias"])


def test_the_seed_draws_the_texts() -> None:
    one, same, other = (weights(run(Sparsify(samples=4), seed=seed).checkpoint) for seed in (0, 0, 1))
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_is_said() -> None:
    result = run(Sparsify(samples=4, pattern="1:4"))
    checkpoint = result.checkpoint
    names = linear_names(checkpoint.config)
    told = {"method": "sparsegpt", "pattern": "1:4", "sparsity": 0.75}
    assert checkpoint.provenance["sparse"] == {**told, "linears": names}
    assert checkpoint.provenance["source"] == "tiny"
    assert {name: result.details[name] for name in told} == told
    assert result.details["zeros"] == 0.75
    whole = sum(value.numel() for value in checkpoint.state.values())
    linears = sum(weight.numel() for weight in weights(checkpoint).values())
    assert result.details["of_all_weights"] == pytest.approx(0.75 * linears / whole, abs=1e-6)
    assert [row["name"] for row in result.details["linears"]] == names
    assert all(row["zeros"] == 0.75 and 0 < row["output_error"] < 1 for row in result.details["linears"])
    assert result.details["calibration"]["texts"] == 4
    assert "no time is gained" in result.details["speed"]
    without = run(Sparsify(method="magnitude", refit=False)).checkpoint.provenance["sparse"]
    assert (without["method"], without["pattern"], without["sparsity"]) == ("magnitude", "", 0.5)


def test_progress_counts_every_pass() -> None:
    class Counting:
        total = seen = 0

        def start(self, title: str, total: int, unit: str) -> None:
            self.total = total

        def advance(self, count: int = 1, note: str = "") -> None:
            self.seen += count

        def done(self) -> None:
            assert self.seen == self.total

    progress = Counting()
    run(Sparsify(samples=31, refit=False), progress=progress)
    assert progress.seen == 2  # two layers, one batch


def test_a_sparsity_that_is_the_patterns_may_stand_beside_it() -> None:
    assert Sparsify(pattern="1:3", sparsity=0.667).choice == Pattern(1, 3)
    assert Sparsify(sparsity=0.2).choice == 0.2
    assert Sparsify(sparsity=0.0).choice == 0.0
    assert Sparsify().choice == 0.5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "wander"}, "method is 'wander', not one of sparsegpt, wanda, magnitude"),
    "sparsity 1": ({"sparsity": 1.0}, "sparsity is 1.0, not from 0 to below 1"),
    "sparsity below 0": ({"sparsity": -0.1}, "sparsity is -0.1, not from 0 to below 1"),
    "no number": ({"sparsity": float("nan")}, "sparsity is nan"),
    "pattern": ({"pattern": "4:2"}, "pattern 4:2 is not N:M with N from 1 to below M"),
    "text": ({"pattern": "half"}, "pattern is 'half', not N:M such as 2:4"),
    "both": ({"pattern": "2:4", "sparsity": 0.6}, "sparsity is 0.6 and pattern 2:4 has 0.5: leave one of them out"),
    "samples": ({"samples": 0}, "samples is 0"),
    "pages": ({"pages": 1.5}, "pages is 1.5, not a share from 0 to 1"),
    "damping": ({"damping": -1.0}, "damping is -1.0, not a number from 0 up"),
    "endless damping": ({"damping": float("inf")}, "damping is inf"),
    "all at once": ({"pages": -1, "samples": -2}, "samples is -2.*; pages is -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_are_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(InputError, match=f"sparsify: .*{message}"):
        Sparsify(**options)


def test_quantized_models_are_refused() -> None:
    model = quantized(tiny(), bits=8)
    for refuse in (lambda: Sparsify().check(model.config), lambda: Sparsify()(model, StepContext(SEARCH))):
        with pytest.raises(InputError, match="quantized already; put sparsify before quantize"):
            refuse()


def test_groups_that_are_not_whole_are_refused_before_anything_is_done() -> None:
    config = decoder_config(0, 1)  # 32, 32, 32 and 48 inputs
    Sparsify(pattern="8:16").check(config)
    with pytest.raises(InputError, match=r"sparsify: decoder.0.ffn.down has 48 inputs, .*whole groups of 32"):
        Sparsify(pattern="16:32").check(config)


def test_heads_with_layers_of_their_own_stay_whole() -> None:
    model = tiny(DENSE)
    found = Sparsify(samples=4)(model, StepContext(SEARCH)).checkpoint.state
    assert all(torch.equal(value, found[name]) for name, value in model.state.items() if name.startswith("head."))
