"""Distilling translators: what is learnt, by hand; that it is learnt; a cell for attention; resuming; refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import POSITIONS, TOKENIZER, pair_data, translator

from slimformer.compress import distill_writers as module
from slimformer.compress import teacher_tokens
from slimformer.compress.distill import Distill
from slimformer.compress.distill_writers import with_mixer
from slimformer.compress.step import StepContext, StepResult
from slimformer.export.bundle import export
from slimformer.export.decoding_parity import check_decoding
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import RecurrentConfig
from slimformer.transformer.data import Pair, PairData, SearchData, TextData, TextRow
from slimformer.transformer.errors import InputError
from slimformer.transformer.parts import Part
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import TextEncoder

QUICK = {"steps": 6, "batch_tokens": 120, "warmup": 1}
DATA = pair_data()
TEACHER = translator()
ALONE, OTHER = translator(encoder=0), translator(encoder=0, seed=5)


def student() -> Checkpoint:
    """The teacher without its second layer of the decoder."""
    config = replace(TEACHER.config, decoder=TEACHER.config.decoder[:1])
    state = {name: value for name, value in TEACHER.state.items() if not name.startswith("decoder.1.")}
    return replace(TEACHER, config=config, state=state).check("student")


def run(options: Distill, start: Checkpoint | None = None, **context: Any) -> StepResult:
    return options(start or student(), StepContext(**{"data": DATA, "teacher": TEACHER, **context}))


def same(one: Checkpoint, other: Checkpoint) -> bool:
    return one.state.keys() == other.state.keys() and all(torch.equal(v, other.state[k]) for k, v in one.state.items())


def logits_of(checkpoint: Checkpoint, source: list[int], target: list[int]) -> torch.Tensor:
    begun = torch.tensor([[2, *target[:-1]]])
    with torch.inference_mode():
        return checkpoint.to_torch()(
            torch.tensor([source]), torch.ones(1, len(source)), target_ids=begun, target_mask=torch.ones_like(begun)
        ).result.double()


ROWS = TEACHER.config.output_width
PAIRS = [([5, 6, 3], [8, 9, 10, 3]), ([7, 3], [11, 3])]


def lesson_of(options: Distill) -> module._Lesson:
    targets = module._distributions(options, TEACHER, ROWS, PAIRS, StepContext(DATA)) if options.logits else None
    return module._Lesson(options, student(), PAIRS, targets, "cpu")


@pytest.mark.parametrize("likeliest", [5, 10_000])
def test_the_loss_by_hand(likeliest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over the tokens of both texts: smoothed cross-entropy, and T^2 KL(teacher || student), with one class for
    all tokens that are not among the teacher's likeliest."""
    monkeypatch.setattr(teacher_tokens, "LIKELIEST", likeliest)
    options = Distill(steps=1, labels=0.3, logits=0.7, temperature=2.0, smoothing=0.1)
    expected = []
    for source, target in PAIRS:
        mine, other = logits_of(student(), source, target), logits_of(TEACHER, source, target)
        for place, token in enumerate(target):
            chances = mine[place].log_softmax(0)
            hard = -0.9 * float(chances[token]) - 0.1 * float(chances.mean())
            p, q = ((one[place] / 2).softmax(0) for one in (other, mine))
            order = p.argsort(descending=True)
            first, left = order[:likeliest], order[likeliest:]
            soft = float((p[first] * (p[first] / q[first]).log()).sum())
            if len(left):
                soft += float(p[left].sum() * (p[left].sum() / q[left].sum()).log())
            expected.append(0.3 * hard + 0.7 * 4 * soft)
    lesson = lesson_of(options)
    assert float(lesson.loss(Part([0, 1])).detach()) == pytest.approx(np.mean(expected), rel=1e-5)
    assert not any("teacher" in name for name, _ in lesson.named_parameters())


def test_without_logits_the_teacher_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "teach_tokens", lambda *_, **__: pytest.fail("the teacher was asked"))
    details = run(Distill(**QUICK, beams=0, logits=0.0)).details
    assert "teacher_reused" not in details


@pytest.mark.parametrize(("precision", "within"), [("float32", "highest"), ("bfloat16", "medium")])
def test_teacher_and_student_multiply_in_the_precision_asked_for(
    precision: str, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def spy(*given: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        return real(*given)

    real = module.forced_logits
    for place in (module, teacher_tokens):
        monkeypatch.setattr(place, "forced_logits", spy)
    run(Distill(**QUICK, beams=0, precision=precision))
    assert len(seen) > QUICK["steps"]
    assert set(seen) == {within}


def test_it_learns_what_the_teacher_writes() -> None:
    result = run(Distill(steps=60, batch_tokens=200, warmup=5, lr=3e-3))
    losses = result.details["losses"]
    assert losses[-1] < 0.6 * losses[0]
    assert result.details["steps"] == 60
    result.checkpoint.check("trained")
    assert result.checkpoint.config == student().config
    assert not any(value.requires_grad for value in result.checkpoint.state.values())


def test_targets_are_the_teachers_texts_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of train and texts, each once; a text of the teacher that was cut off teaches nothing."""
    seen: dict[str, Any] = {}

    def fake(teacher: Checkpoint, sources: list[list[int]], *, beams: int, **_: Any) -> list[list[int]]:
        seen.update(teacher=teacher, sources=sources, beams=beams)
        return [[7, 3] if i % 3 else [7, 8] for i in range(len(sources))]

    monkeypatch.setattr(module, "teacher_texts", fake)
    details = run(Distill(**QUICK, beams=2)).details
    texts = list(dict.fromkeys([*(pair.source for pair in DATA.train), *DATA.texts]))
    assert (seen["teacher"], seen["beams"]) == (TEACHER, 2)
    assert seen["sources"] == TEACHER.text_encoder().encode(texts)
    cut = -(-len(texts) // 3)
    assert (details["pairs"], details["unfinished"], details["over_positions"]) == (len(texts) - cut, cut, 0)
    assert details["tokens"] == sum(len(ids) + 2 for i, ids in enumerate(seen["sources"]) if i % 3)


def test_references_are_learnt_where_no_beam_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "teacher_texts", lambda *_, **__: pytest.fail("the teacher wrote"))
    details = run(Distill(**QUICK, beams=0)).details
    assert details["pairs"] == len(DATA.train)


def test_a_summarizers_sources_are_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for the teacher's texts and for the references; a translator leaves out what is too long."""
    long = Pair("page number " * 20, "page", "0")
    more = replace(DATA, train=(*DATA.train, long))
    head, text = replace(TEACHER.config.head, kind="summarization"), replace(TEACHER.config.text, max_length=9)
    made = replace(TEACHER, config=replace(TEACHER.config, head=head, text=text))
    seen: list[list[int]] = []

    def fake(teacher: Checkpoint, sources: list[list[int]], **_: Any) -> list[list[int]]:
        seen.extend(sources)
        return [[7, 3] for _ in sources]

    monkeypatch.setattr(module, "teacher_texts", fake)
    data = replace(more, task="summarization")
    for beams in (0, 2):
        details = run(Distill(**QUICK, beams=beams), made, teacher=made, data=data).details
        assert (details["sources_cut"], details["over_positions"]) == (1, 0)
    assert made.text_encoder().encode([long.source])[0] in seen
    assert max(map(len, seen)) == 9
    for beams in (0, 2):
        details = run(Distill(**QUICK, beams=beams), data=more).details
        assert details["over_positions"] == 1
        assert "sources_cut" not in details


def test_valid_and_test_are_never_read() -> None:
    class Closed(PairData):
        def __getattribute__(self, name: str) -> Any:
            if name in ("valid", "test"):
                raise AssertionError(f"{name} was read")
            return super().__getattribute__(name)

    closed = Closed(DATA.train, DATA.valid, DATA.test, DATA.texts)
    assert same(run(Distill(**QUICK), data=closed).checkpoint, run(Distill(**QUICK)).checkpoint)


def test_a_cell_takes_attentions_place() -> None:
    swapped = with_mixer(TEACHER, "ssru", seed=1).check("swapped")
    cell = RecurrentConfig("ssru", 32, project=False)
    assert [layer.mixer for layer in swapped.config.decoder] == [cell, cell]
    assert swapped.config.encoder == TEACHER.config.encoder
    kept = [name for name in TEACHER.state if ".mixer." not in name or name.startswith("encoder.")]
    assert all(torch.equal(swapped.state[name], TEACHER.state[name]) for name in kept)
    weights = [swapped.state[f"decoder.{i}.mixer.inputs.weight"] for i in (0, 1)]
    bound = (6 / (32 + 64)) ** 0.5
    assert 0.95 * bound < float(weights[0].abs().max()) <= bound
    assert not torch.equal(*weights)
    assert torch.equal(weights[0], with_mixer(TEACHER, "ssru", 1).state["decoder.0.mixer.inputs.weight"])
    assert not torch.equal(weights[0], with_mixer(TEACHER, "ssru", 2).state["decoder.0.mixer.inputs.weight"])
    with pytest.raises(InputError, match="no layer of the decoder has attention"):
        with_mixer(swapped, "gru", 0)


def test_a_student_with_a_cell_is_trained_quantized_and_exported(tmp_path: Path) -> None:
    trained = run(Distill(**QUICK, mixer="ssru", quantization_aware=True, bits=7, dropout=0.1)).checkpoint
    assert trained.provenance["mixer"] == "ssru"
    assert trained.config.is_float
    small = quantized(trained, bits=7)
    texts = [pair.source for pair in DATA.test]
    for name, one in (("fp32", trained), ("int8", small)):
        assert check_decoding(one, export(one, tmp_path / name), texts, threads=1).tokens_equal >= 0.98


class Stopped(Exception):
    """The interruption."""


STATIC = {"quantization_aware": True, "bits": 8, "aware_of": "int8_static"}


@pytest.mark.parametrize("aware", [{}, STATIC], ids=["float", "static"])
def test_broken_off_and_resumed_is_the_same(
    aware: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slimformer.transformer import training

    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    options = Distill(**QUICK, dropout=0.2, **aware)
    whole = run(options, workdir=tmp_path / "whole")

    class Breaking:
        """Progress that ends the training in its third step."""

        def start(self, title: str, *_: Any) -> None:
            self.left = 3 if title == "distill" else 1_000

        def advance(self, *_: Any, **__: Any) -> None:
            self.left -= 1
            if not self.left:
                raise Stopped

        def done(self) -> None:
            self.left = 1_000

    with pytest.raises(Stopped):
        run(options, workdir=tmp_path / "broken", progress=Breaking())
    kept = torch.load(next((tmp_path / "broken").glob("distill-*/state.pt")), weights_only=True)["modules"]
    assert any(name.startswith("ranges.") for name in kept) is bool(aware)
    steps, loss = list[int](), module._Lesson.loss
    monkeypatch.setattr(module._Lesson, "loss", lambda self, batch: steps.append(len(batch)) or loss(self, batch))
    resumed = run(options, workdir=tmp_path / "broken")
    assert 0 < len(steps) < QUICK["steps"]
    assert same(whole.checkpoint, resumed.checkpoint)
    assert whole.details["losses"] == resumed.details["losses"]
    assert resumed.checkpoint.state.keys() == student().state.keys()


def other_words() -> Checkpoint:
    return replace(TEACHER, tokenizer=TOKENIZER.replace('"sheet"', '"sheep"'))


NOT_PAIRS = SearchData((), (), (), ("a", "b"))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "int8": (lambda: run(Distill(**QUICK), quantized(student(), bits=7)), "is int8 already"),
    "other data": (lambda: run(Distill(**QUICK), data=NOT_PAIRS), "learns from pairs: give data of source and target"),
    "other kind": (lambda: run(Distill(**QUICK), teacher=ALONE), "teacher does not write what the student writes"),
    "vocabulary": (lambda: run(Distill(**QUICK), teacher=other_words()), "1 of the student's .* such as 'sheet'"),
    "hidden": (lambda: run(Distill(**QUICK, hidden=1.0)), "hidden is for encoders"),
    "relations": (lambda: run(Distill(**QUICK, relations=1.0)), "relations is for encoders"),
    "nested": (lambda: run(Distill(**QUICK, nested=(2,))), "nested is for vectors, and the model gives none"),
    "masked": (lambda: run(Distill(**QUICK, masked=0.5)), "masked is for encoders"),
    "teacher_runtime": (
        lambda: run(Distill(**QUICK, teacher_runtime="onnxruntime")),
        "teacher_runtime is for encoders",
    ),
    "nothing": (lambda: run(Distill(**QUICK, labels=0, logits=0)), "nothing is left to learn"),
    "mixer": (lambda: Distill(mixer="attention"), "mixer is 'attention', not one of rnn, lstm, gru, ssru"),
    "rerank": (lambda: Distill(rerank=True, beams=1), "rerank chooses among beams, and beams is 1: ask for 2 at least"),
    "rerank of given": (
        lambda: run(Distill(**QUICK, rerank=True), ALONE, teacher=ALONE),
        "learns from given",
    ),
    "dropout": (lambda: Distill(dropout=1.0), "dropout is 1.0, not from 0 to below 1"),
    "smoothing": (lambda: Distill(smoothing=-0.1), "smoothing is -0.1"),
    "beams": (lambda: Distill(beams=-1), "beams is -1, below 0"),
    "precision": (lambda: Distill(precision="half"), "precision is 'half', not one of float32, bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, line = REFUSED[name]
    with pytest.raises(InputError, match=line):
        call()


def test_a_cell_for_an_encoder_is_refused() -> None:
    from models import tiny

    with pytest.raises(InputError, match="which is for decoders"):
        Distill(mixer="gru").check(tiny().config)


# --- language models ---


def test_a_language_model_learns_windows_of_texts_from_its_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text, the long one in parts; each token's loss by hand, as for a translator without its source."""
    seen, real = list[Any](), module._Lesson
    monkeypatch.setattr(module, "_Lesson", lambda *given: seen.append(given) or real(*given))
    long = TextRow("open the file " * 12, "x")
    texts = TextData((TextRow("print the page", "a"), long), (), (), ("open the file",))
    options = Distill(**QUICK, labels=0.3, temperature=2.0, dropout=0.0)
    details = run(options, ALONE, teacher=OTHER, data=texts).details
    pairs, targets = seen[0][2], seen[0][3]
    wanted = [
        ids[at : at + POSITIONS]
        for ids in TextEncoder(TOKENIZER, 1000).encode(["print the page", long.text, "open the file"])
        for at in range(0, len(ids), POSITIONS)
    ]
    assert pairs == [([], window) for window in wanted]
    assert len(wanted) > 3
    assert (details["windows"], details["tokens"]) == (len(wanted), sum(map(len, wanted)))
    assert details["windows_seen"] >= QUICK["steps"]
    expected = []
    for window in wanted[:2]:
        begun = torch.tensor([[2, *window[:-1]]])
        mine, other = (one.to_torch()(begun, torch.ones_like(begun)).result.detach().double() for one in (ALONE, OTHER))
        for place, token in enumerate(window):
            p, q = ((one[place] / 2).log_softmax(0) for one in (other, mine))
            first = p.argsort(descending=True)[: teacher_tokens.LIKELIEST]
            rest = [1 - one[first].exp().sum() for one in (p, q)]
            soft = (p[first].exp() * (p[first] - q[first])).sum() + rest[0] * (rest[0] / rest[1]).log()
            expected.append(float(-0.3 * mine[place].log_softmax(0)[token] + 4 * soft))
    fresh = real(options, ALONE, pairs, targets, "cpu")
    assert float(fresh.loss(Part([0, 1])).detach()) == pytest.approx(np.mean(expected), rel=1e-4)


def test_a_language_model_gets_cells(tmp_path: Path) -> None:
    texts = TextData((TextRow("print the page", "a"),), (), (), ("open the file",))
    trained = run(Distill(**QUICK, mixer="gru"), ALONE, teacher=ALONE, data=texts).checkpoint
    assert all(isinstance(layer.mixer, RecurrentConfig) for layer in trained.config.decoder)
    assert check_decoding(trained, export(trained, tmp_path / "b"), ["print the"], threads=1).passed


def test_zeros_of_a_sparse_student_stay() -> None:
    linears = ["decoder.0.mixer.qkv", "decoder.0.ffn.down"]
    state = {name: value.clone() for name, value in student().state.items()}
    for name in linears:
        state[f"{name}.weight"][:, ::2] = 0.0
    start = replace(student(), state=state).with_provenance(sparse={"linears": linears})
    trained = run(Distill(**QUICK, beams=0), start).checkpoint
    for name in linears:
        weight = trained.state[f"{name}.weight"]
        assert torch.equal(weight == 0, state[f"{name}.weight"] == 0)
        assert not torch.equal(weight, state[f"{name}.weight"])
