import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slimformer.compress.prune import Prune
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.transformer.checkpoint import Checkpoint, load_own
from slimformer.transformer.data import LabelledData, LabelledRow, Page, Query, SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.tokenizer import pad

WORDS = np.random.default_rng(0)
TEXTS = tuple(" ".join(f"w{i}" for i in WORDS.integers(0, 20, WORDS.integers(1, 9))) for _ in range(60))
UNSEEN = SearchData((Page("p", "", "w1"),), (Query("w2", ("p",), "p"),), (), TEXTS)


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


@pytest.mark.parametrize("importance", ["fisher", "magnitude"])
@pytest.mark.parametrize("cost", [0.3, 0.5, 0.8])
def test_cost_is_kept_and_nearly_used(uneven: Checkpoint, cost: float, importance: str) -> None:
    result = Prune(cost=cost, importance=importance, multiple=2)(uneven, StepContext(UNSEEN))
    share = result.checkpoint.config.multiply_adds() / uneven.config.multiply_adds()
    unit = 2 * 2 * 8 / uneven.config.multiply_adds()
    assert cost - unit < share <= cost
    assert result.details["multiply_adds_kept"] == pytest.approx(share, abs=1e-4)
    assert all(layer.ffn is None or layer.ffn.width % 2 == 0 for layer in result.checkpoint.config.encoder)


def test_fisher_and_refit_each_bring_the_output_closer(uneven: Checkpoint) -> None:
    context = StepContext(UNSEEN)
    options = {"cost": 0.6, "multiple": 1}
    magnitude, fisher, refitted = (
        distance(uneven, Prune(**options, importance=importance, refit=refit)(uneven, context).checkpoint)
        for importance, refit in (("magnitude", False), ("fisher", False), ("fisher", True))
    )
    assert refitted < 0.8 * fisher
    assert fisher < 0.8 * magnitude


def test_result_is_dense_saves_and_loads(uneven: Checkpoint, tmp_path: Path) -> None:
    result = Prune(multiple=2)(uneven, StepContext(UNSEEN)).checkpoint
    result.save(tmp_path / "small")
    again = load_own(tmp_path / "small")
    assert torch.equal(outputs(again), outputs(result))
    kept = again.provenance["kept"]
    assert [len(units) for units in kept["heads"]] == [
        0 if layer.mixer is None else layer.mixer.heads for layer in again.config.encoder
    ]


def test_input_is_untouched(uneven: Checkpoint) -> None:
    before = {name: value.clone() for name, value in uneven.state.items()}
    Prune(multiple=2)(uneven, StepContext(UNSEEN))
    assert all(torch.equal(uneven.state[name], value) for name, value in before.items())


def test_the_same_seed_gives_the_same_model(uneven: Checkpoint) -> None:
    first, again, other = (
        Prune(multiple=2, refit_samples=30)(uneven, StepContext(UNSEEN, seed=seed)).checkpoint for seed in (1, 1, 2)
    )
    assert all(torch.equal(first.state[name], value) for name, value in again.state.items())
    assert not torch.equal(outputs(first), outputs(other))


@pytest.mark.parametrize("importance", ["fisher", "magnitude"])
def test_layers_are_chosen_first_and_the_rest_of_the_budget_cuts_units(uneven: Checkpoint, importance: str) -> None:
    options = {"layers": 2, "importance": importance, "multiple": 1}
    whole = Prune(cost=1.0, **options)(uneven, StepContext(UNSEEN))
    kept = whole.details["kept_layers"]
    assert len(kept) == 2
    assert whole.checkpoint.config.encoder == tuple(uneven.config.encoder[i] for i in kept)
    less = Prune(cost=0.4, **options)(uneven, StepContext(UNSEEN))
    assert less.details["kept_layers"] == kept
    assert less.checkpoint.config.multiply_adds() <= 0.4 * uneven.config.multiply_adds()


def test_named_layers_stay(uneven: Checkpoint) -> None:
    result = Prune(cost=1.0, keep_layers=(0, 2), refit=False)(uneven, StepContext(UNSEEN))
    assert result.checkpoint.provenance["kept"]["layers"] == [0, 2]
    assert torch.equal(result.checkpoint.state["encoder.1.ffn.up.weight"], uneven.state["encoder.2.ffn.up.weight"])


def test_details_say_what_was_done(uneven: Checkpoint) -> None:
    recorder = Recorder()
    step = Prune(samples=20, refit_samples=1000, multiple=2, pages=0.0)
    details = step(uneven, StepContext(UNSEEN, progress=recorder)).details
    assert json.loads(json.dumps(details)) == details
    count = len(set(TEXTS))
    assert details["calibration"]["fisher"]["texts"] == 20
    assert details["calibration"]["refit"]["texts"] == count
    assert details["calibration"]["refit"]["tokens"] == sum(map(len, uneven.text_encoder().encode(sorted(set(TEXTS)))))
    assert [(row["layer"], row["part"]) for row in details["output_error"]][:2] == [(0, "mixer"), (0, "ffn")]
    assert all(row["after"] <= row["before"] for row in details["output_error"])
    assert recorder.work == [["Fisher information", 20, 20], ["Re-fitting", 6, 6]]
    assert details["seconds"] >= 0


def test_what_was_not_done_is_named(uneven: Checkpoint) -> None:
    details = Prune(refit=False, multiple=2)(uneven, StepContext(UNSEEN)).details
    assert details["skipped"] == {"refit": "the option refit is false"}
    result = Prune(cost=1.0)(uneven, StepContext(UNSEEN))
    assert result.details["skipped"]["removal"] == "the whole model is within cost 1.0"
    assert all(torch.equal(result.checkpoint.state[name], value) for name, value in uneven.state.items())


def test_only_training_texts_are_read(uneven: Checkpoint) -> None:
    page = Page("q", "t", "w9 w9")
    asked = SearchData((page,), (Query("w7", ("q",), "q"),), (Query("w6", ("q",), "q"),), TEXTS)
    others = (asked, SearchData((page,), (), (), TEXTS))
    first, second = (Prune(multiple=2)(uneven, StepContext(data)).checkpoint for data in others)
    assert all(torch.equal(first.state[name], value) for name, value in second.state.items())


def test_a_share_of_the_calibration_texts_are_pages(uneven: Checkpoint) -> None:
    """16 texts of one word and 16 pages of nine: with [CLS] and [SEP] 3 and 11 tokens each."""
    pages = tuple(Page(str(i), "t", " ".join(f"w{(i + k) % 10}" for k in range(9))) for i in range(16))
    context = StepContext(SearchData(pages, (), (), tuple(f"w{i}" for i in range(10))))
    for share, texts, tokens in ((0.0, 8, 8 * 3), (0.5, 8, 4 * 3 + 4 * 11), (1.0, 8, 8 * 11)):
        found = Prune(multiple=2, samples=8, pages=share, refit=False)(uneven, context).details["calibration"]
        assert found["fisher"] == {"texts": texts, "tokens": tokens}


def test_magnitude_without_refit_needs_no_texts(uneven: Checkpoint) -> None:
    nothing = SearchData((), (), (), ())
    result = Prune(importance="magnitude", refit=False, multiple=2)(uneven, StepContext(nothing))
    assert result.details["calibration"]["refit"] == {"texts": 0, "tokens": 0}
    with pytest.raises(InputError, match="no texts to learn from"):
        Prune()(uneven, StepContext(nothing))


def test_a_classifier_is_pruned_on_its_training_rows(uneven_classifier: Checkpoint) -> None:
    rows = tuple(LabelledRow(text, "a", str(i)) for i, text in enumerate(TEXTS))
    result = Prune(multiple=2)(uneven_classifier, StepContext(LabelledData(rows, (), (), ())))
    assert outputs(result.checkpoint).shape == (len(TEXTS), 3)
    assert result.checkpoint.config.head == uneven_classifier.config.head


def test_pruned_twice_names_the_first_models_units(uneven: Checkpoint) -> None:
    context = StepContext(UNSEEN)
    once = Prune(cost=1.0, keep_layers=(0, 2), multiple=1)(uneven, context).checkpoint
    twice = Prune(cost=0.5, keep_layers=(1,), multiple=1)(once, context).checkpoint
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
        ({"importance": "taylor"}, r"importance is 'taylor', not fisher or magnitude"),
        ({"layers": 0}, r"layers is 0, at least 1"),
        ({"layers": 1, "keep_layers": (0,)}, r"both given"),
        ({"samples": 0}, r"samples is 0"),
        ({"damping": -1.0}, r"damping is -1.0"),
        ({"pages": 1.5}, r"pages is 1.5, not a share from 0 to 1"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Prune(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 4}, r"layers is 4, the model has 3"),
        ({"keep_layers": (0, 3)}, r"keep_layers \[0, 3\] are not ascending numbers below 3"),
        ({"keep_layers": (1, 0)}, r"keep_layers \[1, 0\]"),
        ({"cost": 0.001}, r"cost 0.001 leaves no head and no 32 neurons"),
    ],
)
def test_what_the_model_cannot_give_is_refused(uneven: Checkpoint, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Prune(**options)(uneven, StepContext(UNSEEN))


def test_int8_models_are_refused(uneven: Checkpoint) -> None:
    quantized = Quantize(bits=8)(uneven, StepContext(UNSEEN)).checkpoint
    with pytest.raises(InputError, match="prune first, quantize afterwards"):
        Prune()(quantized, StepContext(UNSEEN))
