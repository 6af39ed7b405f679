"""Movement: scores by hand, the schedule kept, what is cut equals what was masked, broken runs go on, refusals."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from masking import masked
from models import pair_data, translator
from tiny import LABELS, labelled_data, layer, search_data, tiny, tiny_config, with_head
from torch import Tensor

from slimformer.compress import distill, distill_writers
from slimformer.compress import movement as module
from slimformer.compress.distill import Distill
from slimformer.compress.movement import Movement
from slimformer.compress.prune import Prune
from slimformer.compress.step import StepContext, StepResult
from slimformer.compress.surgery import remove_from
from slimformer.compress.units import Kept, sublayers
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead, RecurrentConfig, TransformerConfig
from slimformer.transformer.data import TextData, TextRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.model import Transformer
from slimformer.transformer.parts import Part
from slimformer.transformer.quantization import quantized
from slimformer.transformer.training import Update

DATA = search_data()
TRAINING: dict[str, Any] = {"batch_tokens": 150, "warmup": 1, "pages": 4, "lr": 3e-3}
SHARED = {one.name for one in fields(Distill)} & {one.name for one in fields(Movement)}
FIRST = tiny()
TEACHER = tiny(seed=9)
IDS, SEEN = torch.tensor([[2, 9, 17, 3], [2, 30, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


def movement(**options: Any) -> Movement:
    return Movement(**{"cost": 0.5, "steps": 12, "warm": 0.25, "cool": 0.25, "multiple": 1, **TRAINING, **options})


def same(one: Checkpoint, other: Checkpoint) -> bool:
    alike = one.config == other.config and one.state.keys() == other.state.keys()
    return alike and all(torch.equal(value, other.state[name]) for name, value in one.state.items())


def run(step: Movement, first: Checkpoint = FIRST, **context: Any) -> StepResult:
    return step(first, StepContext(**{"data": DATA, "teacher": TEACHER, **context}))


@dataclass
class Record:
    """What happened in a training: batches with the weights and masks that they met, and steps."""

    lessons: list[Any] = field(default_factory=list)
    batches: list[tuple[int, list[int], dict[str, Tensor], Tensor]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    shapers: list[Any] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def masks_of(self, masks: Tensor, config: TransformerConfig) -> dict[str, Tensor]:
        """By sub-layer."""
        subs = sublayers(config)
        return {sub.name: own for sub, own in zip(subs, masks.split([sub.count for sub in subs]), strict=True)}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    found = Record()
    for place in (distill, distill_writers):
        real_loss = place._Lesson.loss  # type: ignore[attr-defined]

        def loss(lesson: Any, batch: Part, real: Any = real_loss) -> Tensor:
            if batch.seen is not None:  # the first of two passes
                return real(lesson, batch)
            if not found.lessons:
                found.lessons.append(lesson)
            if lesson is found.lessons[0]:
                state = {name: value.clone() for name, value in lesson.state_dict().items() if "shaper" not in name}
                found.batches.append((len(found.updates), list(batch), state, lesson.shaper.masks.clone()))
            return real(lesson, batch)

        monkeypatch.setattr(place._Lesson, "loss", loss)  # type: ignore[attr-defined]

    class Recorded(module._Shaper):
        def after_step(self, update: Update) -> None:
            super().after_step(update)
            if self not in found.shapers:
                found.shapers.append(self)
            found.updates.append(update)
            found.scores.append(self.masks.scores.clone())

    monkeypatch.setattr(module, "_Shaper", Recorded)
    return found


def test_scores_are_the_sum_of_rates_times_gradients_by_hand(record: Record) -> None:
    """Two batches a step, whose loss is that of one of both; W' = W m stands in for the masked projection, and
    gradients are clipped as the weights' are.

    The rate falls from `lr` after one step of warm-up to 0 in a straight line.
    """
    run(movement(accumulate=2, hidden=0.3, similarity=9.0))
    (lesson,) = record.lessons
    given = lesson.examples, lesson.inner.what, lesson.targets
    twin = distill._Lesson(lesson.options, FIRST, TEACHER, *given, StepContext(DATA))
    outs = {sub: twin.student.get_submodule(_out(sub.name)).weight for sub in sublayers(FIRST.config)}
    scores, shares = {sub.name: torch.zeros(sub.count) for sub in outs}, []
    for step, update in enumerate(record.updates):
        met = [one for one in record.batches if one[0] == step]
        twin.zero_grad()
        _, _, state, masks = met[0]
        twin.load_state_dict(state)
        own = record.masks_of(masks, FIRST.config)
        for sub, weight in outs.items():
            weight.data *= own[sub.name].repeat_interleave(sub.width)
        twin.loss(Part([i for one in met for i in one[1]])).backward()
        gradients = {}
        for sub, weight in outs.items():
            products = weight.grad * state[f"student.{_out(sub.name)}.weight"]
            gradients[sub.name] = products.sum(0).view(sub.count, sub.width).sum(1)
            weight.grad *= own[sub.name].repeat_interleave(sub.width)  # by W itself
        norm = torch.stack([p.grad.square().sum() for p in twin.parameters() if p.grad is not None]).sum().sqrt()
        shares.append(min(1.0, 1.0 / float(norm)))
        rate = 3e-3 * (1 if step == 0 else (12 - step) / 11) * shares[-1]
        assert (update.step, update.steps, update.rate) == (step + 1, 12, pytest.approx(rate, rel=1e-4))
        for name, gradient in gradients.items():
            scores[name] -= rate * gradient
    assert len(record.updates) == 12
    assert len(record.batches) > 12
    assert min(shares) < 1.0
    found = record.masks_of(record.scores[-1], FIRST.config)
    for name, expected in scores.items():
        assert torch.allclose(found[name], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def _out(name: str) -> str:
    return f"{name}.{'down' if name.endswith('ffn') else 'out'}"


def test_masks_follow_the_schedule_by_hand(record: Record) -> None:
    """Of 12 steps 3 warm up and 3 cool down: of what is to go, (k/6)^3 is left k steps before the masks are fixed."""
    run(movement())
    whole, d_model = FIRST.config.multiply_adds(), FIRST.config.d_model
    by_step = {step: masks for step, _, _, masks in record.batches}
    for step in range(12):
        own = record.masks_of(by_step[step], FIRST.config)
        spent = sum(sub.unit_cost(d_model) * float(own[sub.name].sum()) for sub in sublayers(FIRST.config))
        left = 1.0 if step <= 3 else (max(0, 9 - step) / 6) ** 3
        target = 0.5 + 0.5 * left
        assert target * whole - 2 * d_model < spent <= target * whole + 1e-6
    assert torch.equal(by_step[9], by_step[10])
    assert torch.equal(by_step[9], by_step[11])
    assert not torch.equal(record.scores[8], record.scores[11])


@pytest.mark.parametrize("kind", ["embedder", "classifier", "translator"])
def test_what_is_cut_equals_what_was_masked(kind: str, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[tuple[Checkpoint, Kept]] = []

    def spy(checkpoint: Checkpoint, kept: Kept) -> Checkpoint:
        cuts.append((checkpoint, kept))
        return remove_from(checkpoint, kept)

    monkeypatch.setattr(module, "remove_from", spy)
    first, data = {
        "embedder": (FIRST, DATA),
        "classifier": (with_head(ClassificationHead(LABELS)), labelled_data()),
        "translator": (translator(), pair_data()),
    }[kind]
    result = run(movement(beams=0), first, data=data, teacher=None)
    ((dense, _),) = cuts
    assert dense.config == first.config
    last = record.masks_of(record.batches[-1][3], first.config)
    kept = {name: own.nonzero().flatten().tolist() for name, own in last.items()}
    assert any(0 < len(kept[sub.name]) < sub.count for sub in sublayers(first.config))
    targets = {"target_ids": IDS, "target_mask": SEEN} if kind == "translator" else {}
    model, small = dense.to_torch(), result.checkpoint.check("cut").to_torch()
    with torch.no_grad(), masked(model, last):
        expected = model(IDS, SEEN, **targets).result
        plain = small(IDS, SEEN, **targets).result
    assert torch.allclose(plain, expected, rtol=1e-5, atol=1e-5)
    units = Kept.from_dict(result.checkpoint.provenance["kept"]).units
    assert {name: list(units.get(name, ())) for name in kept} == kept
    assert result.checkpoint.config.multiply_adds() <= 0.5 * first.config.multiply_adds()
    assert first.state.keys() == dense.state.keys()
    assert not same(dense, first)


def test_details(record: Record) -> None:
    result = run(movement(multiple=8, cost=0.6))
    details, config = result.details, result.checkpoint.config
    heads = [one.mixer.heads if one.mixer else 0 for one in config.encoder]  # type: ignore[union-attr]
    neurons = [one.ffn.width if one.ffn else 0 for one in config.encoder]
    assert (details["heads"], details["neurons"], details["kept_layers"]) == (heads, neurons, [0, 1])
    assert all(width % 8 == 0 for width in neurons)
    share = config.multiply_adds() / FIRST.config.multiply_adds()
    assert details["multiply_adds_kept"] == pytest.approx(share, abs=1e-4)
    assert share <= 0.6
    assert (details["steps"], details["warm_steps"], details["cool_steps"]) == (12, 3, 3)
    assert details["distill"]["steps"] == 12
    assert len(details["distill"]["losses"]) == 12
    assert details["seconds"] >= details["distill"]["seconds"] - 0.1
    history = [masks for _, _, _, masks in record.batches]
    back = torch.zeros(len(history[0]), dtype=torch.bool)
    for before, after in pairwise(history):
        back |= after > before
    by_name = record.masks_of(back, FIRST.config)
    for kind, part in (("heads", "mixer"), ("neurons", "ffn")):
        assert details["came_back"][kind] == sum(int(own.sum()) for name, own in by_name.items() if part in name)


def test_details_of_a_decoder() -> None:
    first = translator()
    result = run(movement(beams=0), first, data=pair_data(), teacher=None)
    assert len(result.details["heads"]) == 1
    decoder = result.checkpoint.config.decoder
    told = result.details["decoder"]
    assert told["cross_heads"] == [one.cross.heads if one.cross else 0 for one in decoder]
    assert told["neurons"] == [one.ffn.width if one.ffn else 0 for one in decoder]
    assert set(result.details["came_back"]) == {"heads", "cross_heads", "neurons"}


def test_a_language_model() -> None:
    data = TextData((TextRow("open the first table and sort one column", "a"),) * 6, (), (), ("print", "save a page"))
    first = translator(encoder=0)
    result = run(movement(steps=8), first, data=data, teacher=None)
    assert "kept_layers" not in result.details
    assert result.details["decoder"]["kept_layers"] == [0, 1]
    assert result.checkpoint.config.multiply_adds() <= 0.5 * first.config.multiply_adds()


@pytest.mark.parametrize("aware", [{}, {"quantization_aware": True, "aware_of": "int8_static", "bits": 8}])
def test_with_the_whole_cost_it_is_distill(aware: dict[str, Any]) -> None:
    step = movement(cost=1.0, accumulate=2, hidden=0.1, fragments=0.5, texts=30, **aware)
    taught = Distill(**{name: getattr(step, name) for name in SHARED})(FIRST, StepContext(DATA, teacher=TEACHER))
    result = run(step)
    assert same(result.checkpoint, taught.checkpoint)
    assert result.details["distill"]["losses"] == taught.details["losses"]
    assert result.details["came_back"] == {"heads": 0, "neurons": 0}


def test_options_have_the_defaults_of_distill_and_prune() -> None:
    step, taught = Movement(), Distill()
    assert {name: getattr(step, name) for name in SHARED} == {name: getattr(taught, name) for name in SHARED}
    assert (step.cost, step.multiple, step.minutes) == (0.5, Prune().multiple, 10.0)


def test_neither_student_nor_teacher_is_touched_and_seeds_decide() -> None:
    one, two, other = (run(movement(), seed=seed).checkpoint for seed in (0, 0, 1))
    assert same(FIRST, tiny())
    assert same(TEACHER, tiny(seed=9))
    assert same(one, two)
    assert one.config != other.config or not same(one, other)


def planted() -> tuple[Checkpoint, Checkpoint]:
    """A teacher with one FFN of 8 neurons, of which only number 5 ever fires, and a student where it is small.

    The others have large weights, and biases under which none of them is above 0.
    """
    teacher = tiny(tiny_config((layer(0, 8, 8, "relu"),)))
    state = {name: value.clone() for name, value in teacher.state.items()}
    state["encoder.0.ffn.up.bias"][:] = -60.0
    state["encoder.0.ffn.up.bias"][5] = 1.0
    teacher = replace(teacher, state=state)
    state = {name: value.clone() for name, value in state.items()}
    state["encoder.0.ffn.down.weight"][:, 5] *= 0.2
    state["encoder.0.ffn.up.weight"][5] *= 0.5
    return replace(teacher, state=state), teacher


def test_a_small_unit_that_the_teacher_needs_stays() -> None:
    student, teacher = planted()
    wanted = {"encoder.0.ffn": (5,)}
    step = movement(cost=1 / 8, steps=20)
    result = run(step, student, teacher=teacher)
    assert Kept.from_dict(result.checkpoint.provenance["kept"]).units == wanted
    by_size = Prune(cost=1 / 8, importance="magnitude", multiple=1, refit=False)(student, StepContext(DATA)).checkpoint
    assert Kept.from_dict(by_size.provenance["kept"]).units != wanted
    losses = {}
    for name, one in (("movement", result.checkpoint), ("size", by_size), ("teacher", teacher)):
        with torch.no_grad():
            losses[name] = one.to_torch()(IDS, SEEN).result
    near, far = ((losses[name] - losses["teacher"]).square().sum() for name in ("movement", "size"))
    assert near < 0.5 * far


class Interrupt(Exception):
    pass


class Stop:
    """Progress that ends the work at a step of the training."""

    def __init__(self, step: int) -> None:
        self.step, self.title, self.count = step, "", 0

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.count = title, 0

    def advance(self, n: int = 1, note: str = "") -> None:
        self.count += n
        if self.title == "distill" and self.count >= self.step:
            raise Interrupt

    def done(self, note: str = "") -> None: ...


def ticking() -> Callable[[], float]:
    """A clock that goes on by a minute and more whenever it is read: every step's state is kept."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 61.0
        return now

    return clock


@pytest.mark.parametrize("stop", [2, 6, 9, 12])
def test_a_broken_run_goes_on_as_if_it_had_not_been(stop: int, tmp_path: Path, record: Record) -> None:
    """Broken in the warm-up, while masks change, and in the cool-down."""
    step = movement(multiple=4)
    whole = run(step, workdir=tmp_path / "whole")
    scores = record.scores[-1]
    with pytest.raises(Interrupt):
        run(step, workdir=tmp_path / "broken", progress=Stop(stop), clock=ticking())
    before = len(record.updates)
    resumed = run(step, workdir=tmp_path / "broken")
    assert same(resumed.checkpoint, whole.checkpoint)
    assert resumed.checkpoint.provenance == whole.checkpoint.provenance
    for name in ("heads", "neurons", "came_back", "warm_steps", "cool_steps"):
        assert resumed.details[name] == whole.details[name]
    assert resumed.details["distill"]["losses"] == whole.details["distill"]["losses"]
    assert len(record.updates) - before == 12 - stop + 1
    assert torch.equal(record.scores[-1], scores)
    assert whole.details["came_back"]["neurons"] > 0


def test_a_state_of_other_options_is_not_taken_up(tmp_path: Path) -> None:
    run(movement(), workdir=tmp_path)
    other = run(movement(cost=0.6), workdir=tmp_path).checkpoint
    assert same(other, run(movement(cost=0.6)).checkpoint)
    assert len(list(tmp_path.glob("movement-*/distill-*/*.pt"))) == 2


def test_minutes_become_steps_and_their_timing_leaves_no_trace(record: Record) -> None:
    """A batch takes one tick of 61 s and the optimizer a tenth of that: 14 minutes are 12 steps."""
    timed = run(movement(steps=None, minutes=14.0), clock=ticking())
    assert timed.details["steps"] == 12
    assert same(timed.checkpoint, run(movement()).checkpoint)


def test_zeros_of_a_sparse_student_stay() -> None:
    linears = ["encoder.0.mixer.qkv", "encoder.1.ffn.up"]
    state = {name: value.clone() for name, value in FIRST.state.items()}
    for name in linears:
        state[f"{name}.weight"][:, ::2] = 0.0
    start = replace(FIRST, state=state).with_provenance(sparse={"linears": linears})
    result = run(movement(cost=0.7), start).checkpoint
    assert result.provenance["sparse"] == start.provenance["sparse"]
    present = [f"{name}.weight" for name in linears if f"{name}.weight" in result.state]
    assert present
    for name in present:
        assert bool((result.state[name][:, ::2] == 0).all())
        assert bool((result.state[name][:, 1::2] != 0).all())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no cost": ({"cost": 0.0}, "cost is 0.0, not a share over 0 and at most 1"),
    "cost": ({"cost": 1.1}, "cost is 1.1"),
    "no number": ({"cost": float("nan")}, "cost is nan"),
    "warm": ({"warm": -0.1}, "warm is -0.1, not a share from 0 to less than 1"),
    "cool": ({"cool": 1.0}, "cool is 1.0, not a share"),
    "both shares": ({"warm": 0.6, "cool": 0.4}, r"warm 0\.6 and cool 0\.4 leave no steps to prune in"),
    "few steps": ({"steps": 2}, "2 steps, 1 of them in the warm-up and 1 in the cool-down, leave none to prune in"),
    "multiple": ({"multiple": 0}, "multiple is 0, not at least 1"),
    "two lengths": ({"minutes": 2.0}, "give either minutes or steps"),
    "rate": ({"lr": 3.0}, "lr is 3.0"),
    "no steps": ({"steps": 0}, "steps is 0, not at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_out_of_range_are_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(InputError, match=rf"^movement: .*{message}"):
        movement(**options)


def test_all_problems_are_named() -> None:
    with pytest.raises(InputError) as refused:
        movement(cost=2.0, warm=1.5, multiple=0, lr=3.0)
    for part in ("cost is 2.0", "warm is 1.5", "multiple is 0", "lr is 3.0"):
        assert part in str(refused.value)


def test_the_fewest_steps() -> None:
    assert run(movement(steps=3, warm=0.3, cool=0.3)).details["warm_steps"] == 1
    details = run(movement(steps=1, warm=0.0, cool=0.0)).details
    assert (details["steps"], details["warm_steps"], details["cool_steps"]) == (1, 0, 0)
    assert details["multiply_adds_kept"] <= 0.5


def test_minutes_for_too_few_steps_are_refused() -> None:
    with pytest.raises(InputError, match="movement: 2 steps, 1 of them in the warm-up"):
        run(movement(steps=None, minutes=2.5), clock=ticking())


def test_a_cost_that_leaves_no_unit_is_refused_with_the_least() -> None:
    """A head costs 4 * 8 * 16 multiply-adds, 8 neurons 2 * 8 * 16, of 2 * (4 * 16 * 16 + 2 * 32 * 16)."""
    message = r"movement: cost 0\.01 leaves no head and no 8 neurons; ask for 0\.0625"
    with pytest.raises(InputError, match=message):
        movement(cost=0.01, multiple=8).check(FIRST.config)
    least = run(movement(cost=0.0625, multiple=8))
    assert least.details["multiply_adds_kept"] == 0.0625


def test_the_least_of_models_without_heads() -> None:
    """FFNs of fewer neurons than `multiple` stay whole or go; cells stay."""
    config = tiny_config((layer(0, 8, 8), layer(0, 8, 24)))
    with pytest.raises(InputError, match=r"no 32 neurons; ask for 0\.25"):
        movement(cost=0.2, multiple=32).check(config)
    movement(cost=0.25, multiple=32).check(config)
    cells = tiny_config((replace(layer(0, 8, 32), mixer=RecurrentConfig("lstm", 8)),) * 2)
    least = (cells.multiply_adds() - 2 * 2 * 32 * 16 + 2 * 8 * 16) / cells.multiply_adds()
    movement(cost=least + 1e-6, multiple=8).check(cells)
    with pytest.raises(InputError, match=rf"ask for {math.ceil(1e4 * least) / 1e4}"):
        movement(cost=least - 1e-6, multiple=8).check(cells)


def test_models_that_cannot_be_taught_are_refused() -> None:
    with pytest.raises(InputError, match="movement: the model is int8 already; put movement before quantize"):
        movement().check(quantized(tiny(), bits=8).config)
    with pytest.raises(InputError, match="no head"):
        movement().check(tiny_config(head=None))
    cells = tiny_config((replace(layer(0, 8, 0), mixer=RecurrentConfig("lstm", 8)),))
    with pytest.raises(InputError, match="movement: the model has neither heads nor neurons"):
        movement().check(cells)
    config = translator(encoder=0).config
    with pytest.raises(InputError, match="hidden is for encoders"):
        movement(hidden=0.5).check(config)


def test_the_student_of_the_device_is_masked_there() -> None:
    """Masks lie where the weights do."""
    model = Transformer(FIRST.config).to("meta")
    shaper = module._Shaper(movement())
    assert {value.device.type for value in shaper.begin(model).buffers()} == {"meta"}
