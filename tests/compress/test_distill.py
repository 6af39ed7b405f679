"""Distillation: it learns, from what it may see alone, and goes on after an interruption as if there had been none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import LABELS, labelled_data, layer, search_data, sentences, tiny, tiny_config, with_head

from slimformer.compress import distill as module
from slimformer.compress.distill import Distill
from slimformer.compress.examples import gather_examples
from slimformer.compress.losses import cka_loss, cosine_loss, index_loss, nested_loss, similarity_loss
from slimformer.compress.step import StepContext, StepResult
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead, EmbeddingHead
from slimformer.transformer.data import LabelledData, Page, SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.quantization import quantized

TEACHER = tiny()
DATA = search_data()
SMALL = {"steps": 6, "batch_tokens": 150, "warmup": 1, "pages": 4}


def student_of(teacher: Checkpoint) -> Checkpoint:
    """The teacher without its second layer."""
    config = teacher.config.with_layers(teacher.config.encoder[:1])
    state = {name: value for name, value in teacher.state.items() if not name.startswith("encoder.1.")}
    return replace(teacher, config=config, state=state).check("student")


def vectors(checkpoint: Checkpoint, texts: list[str]) -> np.ndarray:
    rows = []
    model = checkpoint.to_torch()
    for ids in checkpoint.text_encoder().encode(texts):
        with torch.inference_mode():
            rows.append(model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)).result.numpy()[0])
    return np.stack(rows)


def tokens(checkpoint: Checkpoint, texts: Any) -> Any:
    """The last states of all tokens, text after text."""
    model = checkpoint.to_torch()
    rows = checkpoint.text_encoder().encode(list(texts))
    with torch.inference_mode():
        return torch.cat(
            [model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64)).hidden for row in rows]
        )


def run(options: Distill, student: Checkpoint, **context: Any) -> StepResult:
    context = {"data": DATA, "teacher": TEACHER, **context}
    return options(student, StepContext(**context))


def same(one: Checkpoint, other: Checkpoint) -> bool:
    return one.state.keys() == other.state.keys() and all(torch.equal(v, other.state[k]) for k, v in one.state.items())


def test_it_learns_what_the_teacher_says_of_unseen_texts() -> None:
    student = student_of(TEACHER)
    unseen = sentences(30, seed=99)
    result = run(Distill(**{**SMALL, "steps": 60}, lr=3e-3, hidden=0.2), student)
    expected = vectors(TEACHER, unseen)
    before, after = ((vectors(one, unseen) * expected).sum(1).mean() for one in (student, result.checkpoint))
    assert 1 - after < 0.7 * (1 - before)
    losses = result.details["losses"]
    assert losses[-1] < 0.7 * losses[0]
    assert result.details["steps"] == 60
    result.checkpoint.check("trained")
    assert result.checkpoint.config == student.config


def test_neither_student_nor_teacher_is_touched() -> None:
    student, teacher = student_of(TEACHER), tiny()
    trained = run(Distill(**SMALL), student, teacher=teacher).checkpoint
    assert same(student, student_of(tiny()))
    assert same(teacher, tiny())
    assert not same(trained, student)
    assert not any(value.requires_grad for value in trained.state.values())


def test_the_teacher_is_the_model_itself_where_none_is_given() -> None:
    details = run(Distill(**SMALL, lr=1e-6), student_of(TEACHER), teacher=None).details
    assert max(details["losses"]) < 1e-5


def test_details_count_what_was_seen() -> None:
    details = run(Distill(**SMALL, fragments=1.0), student_of(TEACHER)).details
    assert details["pages"] == 4
    assert 0 < details["fragments"] <= 80
    assert details["texts"] == 80 + details["fragments"] + 4
    assert details["tokens"] > 3 * details["texts"]
    assert details["texts_seen"] != details["texts"]
    assert details["teacher_reused"] is False


def closed(data: SearchData | LabelledData) -> Any:
    """The same data, which fails the test when valid or test are asked for."""
    kind = type(data)

    class Closed(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in ("valid", "test"):
                raise AssertionError(f"{name} was read")
            return super().__getattribute__(name)

    values = {name: getattr(data, name) for name in data.__dataclass_fields__}
    return Closed(**values)


def test_queries_are_never_read() -> None:
    result = run(Distill(**SMALL), student_of(TEACHER), data=closed(DATA))
    other = replace(DATA, valid=DATA.valid[:1], test=())
    assert same(result.checkpoint, run(Distill(**SMALL), student_of(TEACHER), data=other).checkpoint)


def test_labelled_valid_and_test_rows_are_never_read() -> None:
    model = with_head(ClassificationHead(LABELS))
    run(Distill(**SMALL), student_of(model), teacher=model, data=closed(labelled_data()))


def test_examples_of_search() -> None:
    prompts = (("query", "find "), ("document", "read "))
    model = with_head(EmbeddingHead(), prompts=prompts)
    pages = tuple(Page(f"p{i}", "", text) for i, text in enumerate(sentences(9, seed=50)))
    data = replace(DATA, pages=pages, texts=DATA.texts[:10])
    options = Distill(fragments=1.0, fragment_words=(2, 2), pages=5)
    examples = gather_examples(options, model, StepContext(data, seed=3))
    encoder = model.text_encoder()
    assert sorted(examples.ids[:10]) == sorted(encoder.encode(["read " + text for text in data.texts]))
    parts = examples.ids[10 : 10 + examples.fragments]
    assert len(parts) == 10
    assert {tuple(ids[:2]) for ids in parts} == {tuple(encoder.encode(["find"])[0][:2])}
    assert all(len(ids) == 5 for ids in parts)  # [CLS] find word word [SEP]
    whole = {tuple(ids) for ids in encoder.encode(["read " + page.text for page in pages])}
    chosen = [tuple(ids) for ids in examples.ids[10 + examples.fragments :]]
    assert len(set(chosen)) == examples.pages == 5
    assert set(chosen) <= whole
    other = gather_examples(options, model, StepContext(data, seed=4))
    assert other.ids != examples.ids
    assert set(examples.labels) == {-1}


def test_texts_are_drawn_by_seed_where_fewer_are_wanted() -> None:
    options = Distill(texts=7, fragments=0, pages=0)
    drawn = [gather_examples(options, TEACHER, StepContext(DATA, seed=seed)).ids for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    known = {tuple(ids) for ids in TEACHER.text_encoder().encode(DATA.texts)}
    assert all(len({tuple(ids) for ids in one} & known) == len(one) == 7 for one in drawn)


def test_labels_are_those_of_training_rows_alone() -> None:
    data = labelled_data()
    data = replace(data, texts=(*data.texts, data.valid[0].text, data.train[0].text))
    model = with_head(ClassificationHead(LABELS))
    examples = gather_examples(Distill(), model, StepContext(data))
    assert examples.labels[:60] == [LABELS.index(row.label) for row in data.train]
    assert examples.labels[60:] == [-1] * 21
    assert len(examples.ids) == 81
    assert (examples.fragments, examples.pages) == (0, 0)


def test_a_classifier_learns_labels_and_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = with_head(ClassificationHead(LABELS))
    seen: list[float] = []
    real = module.logits_loss

    def spy(student: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
        seen.append(temperature)
        return real(student, target, temperature)

    monkeypatch.setattr(module, "logits_loss", spy)
    options = Distill(**{**SMALL, "steps": 40}, lr=3e-3, temperature=3.0, labels=1.0)
    details = run(options, student_of(teacher), teacher=teacher, data=labelled_data()).details
    assert set(seen) == {3.0}
    assert details["losses"][-1] < 0.9 * details["losses"][0]


def test_hidden_states_go_through_a_map_to_the_teachers_width() -> None:
    """The map is no part of the student; without it the loss of unlike widths could not be computed."""
    student = tiny(tiny_config((layer(2, 6, 16),), d_model=12))
    options = Distill(**{**SMALL, "steps": 60}, lr=3e-3, hidden=1.0, cosine=0.0, similarity=0.0)
    result = run(options, student)
    assert result.details["losses"][-1] < 0.8 * result.details["losses"][0]
    result.checkpoint.check("narrow")


def test_embeddings_of_another_width_learn_similarities() -> None:
    student, unseen = tiny(tiny_config((layer(2, 6, 16),), d_model=12)), sentences(30, seed=98)
    result = run(Distill(**{**SMALL, "steps": 80}, lr=3e-3), student)
    trained = result.checkpoint
    assert result.details["skipped"] == {"cosine": "the student's vectors have 12 columns, the teacher's 16"}
    expected, before, after = (one @ one.T for one in (vectors(m, unseen) for m in (TEACHER, student, trained)))
    assert np.square(after - expected).mean() < 0.8 * np.square(before - expected).mean()


def test_layers_that_are_computed_again_learn_the_same() -> None:
    """Of relations and states too, which are seen inside of layers."""
    options = Distill(**SMALL, hidden=0.3, relations=1.0, dropout=0.1)
    plain, again = (
        run(one, student_of(TEACHER)).checkpoint for one in (options, replace(options, gradient_checkpointing=True))
    )
    assert same(plain, again)
    assert not same(plain, student_of(TEACHER))
    with pytest.raises(InputError, match="moves the ranges of aware_of int8_static twice"):
        Distill(quantization_aware=True, aware_of="int8_static", gradient_checkpointing=True)


def test_a_teacher_in_onnxruntime_teaches_the_same() -> None:
    plain, other = (
        run(Distill(**SMALL, hidden=0.2, teacher_runtime=runtime), student_of(TEACHER)).details["losses"]
        for runtime in ("torch", "onnxruntime")
    )
    assert other == pytest.approx(plain, rel=1e-3)
    with pytest.raises(InputError, match="teacher_runtime is 'tensorflow', not one of torch, onnxruntime"):
        Distill(teacher_runtime="tensorflow")
    with pytest.raises(InputError, match="'onnxruntime', which does not give attention, layers"):
        Distill(teacher_runtime="onnxruntime", attention=1.0, layers="even")


def test_what_another_run_left_is_not_taken_up(tmp_path: Path) -> None:
    first = run(Distill(**SMALL), student_of(TEACHER), workdir=tmp_path)
    other = run(Distill(**SMALL, hidden=0.3), student_of(TEACHER), workdir=tmp_path)
    assert not same(first.checkpoint, other.checkpoint)
    assert same(run(Distill(**SMALL), student_of(TEACHER), workdir=tmp_path).checkpoint, first.checkpoint)
    assert len(list(tmp_path.glob("distill-*"))) == 2


def test_nothing_to_learn_is_refused() -> None:
    student = tiny(tiny_config((layer(2, 6, 16),), d_model=12))
    with pytest.raises(InputError, match="vectors of 12 cannot learn those of 16 by cosine alone"):
        run(Distill(**{**SMALL, "similarity": 0.0}), student)


class Interrupt(Exception):
    pass


class Stop:
    """Progress that ends the work at a step of one piece of work."""

    def __init__(self, title: str, step: int) -> None:
        self.wanted, self.step, self.title, self.count = title, step, "", 0

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.count = title, 0

    def advance(self, n: int = 1, note: str = "") -> None:
        self.count += n
        if self.title == self.wanted and self.count >= self.step:
            raise Interrupt

    def done(self, note: str = "") -> None: ...


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that goes on by `seconds` whenever it is read."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    return clock


@pytest.mark.parametrize("seconds", [0.0, 61.0], ids=["state of the start", "state of every step"])
@pytest.mark.parametrize(("title", "step"), [("teacher", 40), ("distill", 1), ("distill", 5), ("distill", 9)])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(title: str, step: int, seconds: float, tmp_path: Path) -> None:
    """9 steps over some 2 epochs: interrupted in the first, or in the last step."""
    options = Distill(**{**SMALL, "steps": 9, "batch_tokens": 300}, lr=3e-3, hidden=0.1, accumulate=2)
    student = student_of(TEACHER)
    whole = run(options, student, workdir=tmp_path / "whole")
    work = tmp_path / "broken"
    with pytest.raises(Interrupt):
        run(options, student, workdir=work, progress=Stop(title, step), clock=ticking(seconds))
    resumed = run(options, student, workdir=work)
    assert same(resumed.checkpoint, whole.checkpoint)
    assert resumed.details["losses"] == whole.details["losses"]
    assert resumed.details["epochs"] == whole.details["epochs"] > 1
    assert resumed.details["teacher_reused"] is (title == "distill")


def test_an_interrupted_run_goes_on_with_its_ranges(tmp_path: Path) -> None:
    """Static int8's ranges are a state of the training, as the optimizer's is, and no part of the model."""
    options = Distill(
        **{**SMALL, "steps": 9, "batch_tokens": 300}, lr=3e-3, accumulate=2, quantization_aware=True, bits=8,
        aware_of="int8_static", dropout=0.1,
    )  # fmt: skip
    student = student_of(TEACHER)
    whole = run(options, student, workdir=tmp_path / "whole")
    for step in (1, 5, 9):
        work = tmp_path / f"broken at {step}"
        with pytest.raises(Interrupt):
            run(options, student, workdir=work, progress=Stop("distill", step), clock=ticking(61.0))
        kept = torch.load(next(work.glob("distill-*/state.pt")), weights_only=True)["modules"]
        assert sum(name.startswith("ranges.") for name in kept) == 3 * 4
        resumed = run(options, student, workdir=work)
        assert same(resumed.checkpoint, whole.checkpoint)
        assert resumed.details["losses"] == whole.details["losses"]
    assert whole.checkpoint.state.keys() == student.state.keys()


def test_seeds_decide(tmp_path: Path) -> None:
    student, options = student_of(TEACHER), Distill(**SMALL, lr=3e-3)
    one, two, other = (run(options, student, seed=seed).checkpoint for seed in (0, 0, 1))
    assert same(one, two)
    assert not same(one, other)


def test_minutes_become_steps_once(tmp_path: Path) -> None:
    """A batch takes one tick of 1 s and the optimizer a tenth: 9 s are 8 steps, also after an interruption."""
    options = Distill(**{**SMALL, "steps": None}, minutes=0.15, lr=3e-3)
    student = student_of(TEACHER)
    with pytest.raises(Interrupt):
        run(options, student, workdir=tmp_path / "broken", progress=Stop("distill", 3), clock=ticking(1.0))
    resumed = run(options, student, workdir=tmp_path / "broken", clock=ticking(0.01))
    assert resumed.details["steps"] == 8
    fixed = run(replace(options, minutes=None, steps=8), student)
    assert same(resumed.checkpoint, fixed.checkpoint)


OTHER_LABELS = with_head(ClassificationHead(("x", "y")))
MISFITS: dict[str, tuple[Checkpoint, Checkpoint, str]] = {
    "int8": (quantized(TEACHER, bits=7), TEACHER, "put distill before quantize"),
    "no head": (tiny(tiny_config(head=None)), TEACHER, "no head"),
    "teacher without head": (TEACHER, tiny(tiny_config(head=None)), "no head"),
    "other labels": (OTHER_LABELS, with_head(ClassificationHead(LABELS)), "labels are not the teacher's"),
    "other kind": (TEACHER, OTHER_LABELS, "the student's head is embedding, the teacher's classification"),
    "other kind the other way": (OTHER_LABELS, TEACHER, "distill"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_models_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    student, teacher, message = MISFITS[name]
    with pytest.raises(InputError, match=message):
        run(Distill(**SMALL), student, teacher=teacher, workdir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(InputError, match=r"no texts to learn from: give DATA a texts\.jsonl"):
        run(Distill(**SMALL), student_of(TEACHER), data=replace(DATA, texts=()))


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "words": ({"fragment_words": (3, 2)}, "fragment_words 3 to 2"),
    "no words": ({"fragment_words": (0, 2)}, "fragment_words 0 to 2"),
    "weight": ({"similarity": -0.1}, "similarity is -0.1, below 0"),
    "pages": ({"pages": -1}, "pages is -1, below 0"),
    "temperature": ({"temperature": 0.0}, "temperature is 0.0"),
    "batch": ({"batch_tokens": 0}, "batch_tokens is 0"),
    "nested order": ({"nested": (8, 4)}, r"nested is \[8, 4\], not rising whole numbers"),
    "nested twice": ({"nested": (4, 4)}, r"nested is \[4, 4\], not rising"),
    "nested none": ({"nested": (0, 4)}, r"nested is \[0, 4\], not rising"),
    "nested weight": ({"nested": (4,), "similarity": 0.0}, "nested has the weight of similarity, which is 0: set it"),
    "both": ({"steps": 3, "minutes": 2.0}, "either minutes or steps"),
    "time": ({"minutes": 0.0}, "minutes is 0.0"),
    "rate": ({"steps": 1, "lr": 2.0}, "lr is 2.0"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_out_of_range_are_refused(name: str) -> None:
    options, message = BAD_OPTIONS[name]
    with pytest.raises(InputError, match=message):
        Distill(**options)


def test_the_default_is_ten_minutes() -> None:
    assert Distill().minutes == 10.0
    assert Distill(steps=5).minutes is None


def test_zeros_of_a_sparse_student_stay() -> None:
    linears = ["encoder.0.mixer.qkv", "encoder.0.ffn.down"]
    start = student_of(TEACHER)
    state = {name: value.clone() for name, value in start.state.items()}
    for name in linears:
        state[f"{name}.weight"][:, ::2] = 0.0
    start = replace(start, state=state).with_provenance(sparse={"linears": [*linears, "encoder.5.ffn.up"]})
    for aware in ({}, {"quantization_aware": True}):
        trained = run(Distill(**SMALL, **aware), start).checkpoint
        assert trained.provenance["sparse"] == start.provenance["sparse"]
        for name in linears:
            weight = trained.state[f"{name}.weight"]
            assert torch.equal(weight == 0, start.state[f"{name}.weight"] == 0)
            assert not torch.equal(weight, start.state[f"{name}.weight"])


def test_a_student_with_another_vocabulary_is_refused() -> None:
    """Its ids are given to the teacher, for whom they would be other words."""
    student = student_of(TEACHER)
    other = replace(student, tokenizer=student.tokenizer.replace('"border"', '"frame"'))
    assert other.tokenizer != student.tokenizer
    with pytest.raises(InputError, match=r"1 of the student's .* such as 'frame': take .* put trim after distill"):
        run(Distill(**SMALL), other, teacher=TEACHER)


def test_where_the_index_is_kept_students_learn_to_search_it() -> None:
    """The similarities are those to the teacher's texts; a student of other vectors, or of none, is refused."""
    step = Distill(steps=1, cosine=0.0, fragments=0.0, pages=0, batch_tokens=10_000)
    student, teacher = tiny(seed=1), tiny(seed=2)
    context = StepContext(search_data(), teacher=teacher)
    kept = replace(context, keep_index=True)
    found = {one.keep_index: step(student, one).details["losses"][0] for one in (context, kept)}
    ours, theirs = (torch.from_numpy(vectors(one, context.training_texts())) for one in (student, teacher))
    assert found[False] == pytest.approx(similarity_loss(ours, theirs).item(), rel=1e-4)
    assert found[True] == pytest.approx(index_loss(ours, theirs, theirs).item(), rel=1e-4)
    narrow = tiny(tiny_config(d_model=8))
    with pytest.raises(InputError, match="the student's vectors have 8 numbers, the index has 16: leave out"):
        step(narrow, kept)
    step(narrow, context)
    labels = with_head(ClassificationHead(LABELS))
    with pytest.raises(InputError, match="an index is of vectors, and the model gives none"):
        step(labels, replace(kept, data=labelled_data(), teacher=labels))


def test_first_columns_learn_the_similarities_of_whole_vectors() -> None:
    student, teacher = tiny(seed=1), tiny(seed=2)
    context = StepContext(search_data(), teacher=teacher)
    ours, theirs = (torch.from_numpy(vectors(one, context.training_texts())) for one in (student, teacher))
    alike = similarity_loss(ours, theirs) + nested_loss(ours, theirs, (2, 8))
    expected = cosine_loss(ours, theirs) + 0.7 * alike
    step = Distill(steps=1, similarity=0.7, nested=(2, 8), fragments=0.0, pages=0, batch_tokens=10_000)
    result = step(student, context)
    assert result.details["losses"][0] == pytest.approx(expected.item(), rel=1e-4)


def test_nested_is_refused_where_there_is_nothing_to_cut() -> None:
    assert Distill(nested=[8, 16]).nested == (8, 16)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nested has 16, and the vectors have 16 columns: give fewer"):
        run(Distill(**SMALL, nested=(8, 16)), TEACHER)
    labels = with_head(ClassificationHead(LABELS))
    with pytest.raises(InputError, match="nested is for vectors, and the model gives none: leave it out"):
        run(Distill(**SMALL, nested=(2,)), labels, data=labelled_data(), teacher=labels)
    with pytest.raises(InputError, match="nested is for vectors that are cut, and --keep-index keeps"):
        run(Distill(**SMALL, nested=(2,)), TEACHER, keep_index=True)


def test_states_are_compared_by_alignment_without_a_map() -> None:
    """A student of another width learns them, and nothing beside it does."""
    step = Distill(steps=60, lr=5e-3, warmup=1, cosine=0.0, similarity=0.0, hidden=1.0, hidden_by="cka", fragments=0.0)
    narrow = tiny(tiny_config(d_model=8), seed=3)
    result = step(narrow, StepContext(search_data(), teacher=TEACHER))
    losses = result.details["losses"]
    assert losses[-1] < 0.6 * losses[0]
    texts = StepContext(search_data()).training_texts()
    ours, theirs = (tokens(one, texts) for one in (narrow, TEACHER))
    alone = replace(step, steps=1, pages=0, batch_tokens=10_000)
    first = alone(narrow, StepContext(search_data(), teacher=TEACHER)).details["losses"]
    assert first[0] == pytest.approx(cka_loss(ours, theirs).item(), rel=1e-3)  # kept in 16 bits
    half = replace(step, steps=1, hidden=0.5)(narrow, StepContext(search_data(), teacher=TEACHER)).details["losses"]
    whole = replace(step, steps=1)(narrow, StepContext(search_data(), teacher=TEACHER)).details["losses"]
    assert whole[0] == pytest.approx(2 * half[0], rel=1e-5)
    with pytest.raises(InputError, match="hidden_by is 'cosine', not one of map, cka"):
        Distill(hidden=1.0, hidden_by="cosine")
    with pytest.raises(InputError, match="hidden_by is 'cka', of hidden, whose weight is 0"):
        Distill(hidden_by="cka")
