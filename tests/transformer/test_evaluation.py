"""Evaluation with a stub of known vectors: metrics by hand, prompts, and what is embedded how often."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import pytest
from models import EMBEDDING, LABELS, decoder_config, tiny_config

from slimformer.transformer.config import LanguageHead, TransformerConfig
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
from slimformer.transformer.evaluation import Memory, evaluate, evaluate_forms, has_split, prompt_for
from slimformer.transformer.metrics import changed_answers
from slimformer.transformer.text_metrics import Reading
from slimformer.transformer.vectors import WHOLE, VectorForm

SUMMARIES = LanguageHead(2, 3, bias=True, kind="summarization")
PAGES = tuple(Page(name, f"title {name}", f"page {name}") for name in "abcd")
VALID = (Query("near a", ("a",), "a"), Query("between b and c", ("c", "d"), "g"))
TEST = (Query("near d", ("d",), "d"),)
SEARCH = SearchData(PAGES, VALID, TEST, ("some text",))
ANGLES = {
    "page a": 0,
    "page b": 30,
    "page c": 60,
    "page d": 90,
    "near a": 5,  # a, b, c, d
    "between b and c": 40,  # b, c, a, d
    "near d": 20,  # b, a, c, d
}


class Stub:
    """A model whose vectors stand at known angles, and that notes what it was asked."""

    def __init__(self, config: TransformerConfig, angles: Mapping[str, float] = ANGLES) -> None:
        self.config, self.angles = config, angles
        self.asked: list[tuple[tuple[str, ...], str | None]] = []

    def embed(self, texts: Sequence[str], *, prompt: str | None = None, progress: Any = None) -> Any:
        self.asked.append((tuple(texts), prompt))
        radians = np.deg2rad([self.angles[text] for text in texts])
        return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)

    def logits(self, texts: Sequence[str], *, progress: Any = None) -> Any:
        self.asked.append((tuple(texts), None))
        places = {"chart": 0, "file": 1, "table": 2}
        return np.array([np.eye(3)[places[text.split()[-1]]] for text in texts], np.float32)

    def translate(self, texts: Sequence[str], *, progress: Any = None, beams: int = 1) -> list[str]:
        self.asked.append((tuple(texts), None if beams == 1 else f"{beams} beams"))
        return [text.upper() for text in texts]

    def summarize(self, texts: Sequence[str], *, progress: Any = None, beams: int = 1) -> list[str]:
        self.asked.append((tuple(texts), "summarize"))
        return [text.split()[0] for text in texts]

    def read(self, texts: Sequence[str], *, progress: Any = None) -> list[Reading]:
        self.asked.append((tuple(texts), "read"))
        return [
            Reading(i, np.full(1, len(word), np.float32), np.array([len(word)]))
            for i, text in enumerate(texts)
            for word in text.split()
        ]


def test_search_by_hand() -> None:
    model = Stub(tiny_config(EMBEDDING))
    valid = evaluate(SEARCH, model, "valid")
    second = (1 / log2(3) + 1 / log2(5)) / (1 + 1 / log2(3))  # c is second, d fourth
    expected = {"nDCG@10": (1 + second) / 2, "recall@1": (1 + 0) / 2, "recall@10": 1, "MRR": (1 + 1 / 2) / 2}
    assert valid.values() == pytest.approx({name: 100 * value for name, value in expected.items()})
    assert (valid.deciding, valid.groups.tolist(), valid.answers.tolist()) == ("nDCG@10", ["a", "g"], [0, 1])
    test = evaluate(SEARCH, model, "test")
    assert test.values() == pytest.approx({"nDCG@10": 100 / log2(5), "recall@1": 0, "recall@10": 100, "MRR": 25})
    assert test.answers.tolist() == [1]


def test_pages_are_embedded_once_for_both_splits() -> None:
    model, memory = Stub(tiny_config(EMBEDDING)), Memory()
    first = evaluate(SEARCH, model, "valid", memory=memory)
    evaluate(SEARCH, model, "test", memory=memory)
    pages = tuple(page.text for page in PAGES)
    assert model.asked == [
        (pages, None),
        (("near a", "between b and c"), None),
        (("near d",), None),
    ]
    alone = Stub(tiny_config(EMBEDDING))
    assert evaluate(SEARCH, alone, "valid").values() == first.values()
    evaluate(SEARCH, alone, "valid")
    assert [texts for texts, _ in alone.asked].count(pages) == 2  # no memory, no leak from call to call


def test_queries_are_searched_in_the_pages_of_another_model() -> None:
    """Turned by 42 degrees a model finds the same in pages of its own, and in another's those that stand 42 further."""
    first, index = Stub(tiny_config(EMBEDDING)), Memory()
    own = evaluate(SEARCH, first, "valid", memory=index)
    turned = Stub(tiny_config(EMBEDDING), {text: angle + 42 for text, angle in ANGLES.items()})
    assert evaluate(SEARCH, turned, "valid").values() == own.values()
    turned.asked.clear()
    found = evaluate(SEARCH, turned, "valid", index=index)
    assert turned.asked == [(("near a", "between b and c"), None)]
    # at 47 degrees: c, b, d, and a, which was meant; at 82: d and c, which were
    assert found.values()["nDCG@10"] == pytest.approx(100 * (1 / log2(5) + 1) / 2)
    index.vectors["pages"] = np.zeros((4, 3), np.float32)
    with pytest.raises(InputError, match="the queries' vectors have 2 numbers, the index has 3"):
        evaluate(SEARCH, turned, "valid", index=index)


@pytest.mark.parametrize(
    ("names", "page", "query"),
    [
        (("query", "document"), "document", "query"),
        (("query", "passage"), "passage", "query"),
        (("passage", "document", "query"), "document", "query"),
        (("corpus",), "corpus", None),
        (("title", "other"), None, None),
    ],
)
def test_prompts(names: tuple[str, ...], page: str | None, query: str | None) -> None:
    model = Stub(tiny_config(EMBEDDING, prompts=tuple((name, f"{name}: ") for name in names)))
    evaluate(SEARCH, model, "test")
    assert [prompt for _, prompt in model.asked] == [page, query]


def test_prompt_for_takes_the_first_that_is_there() -> None:
    config = tiny_config(EMBEDDING, prompts=(("b", "1"), ("a", "2")))
    assert prompt_for(config, ("x", "a", "b")) == "a"
    assert prompt_for(config, ("x",)) is None


def rows(*pairs: tuple[str, str]) -> tuple[LabelledRow, ...]:
    return tuple(LabelledRow(text, label, str(number)) for number, (text, label) in enumerate(pairs))


def labelled(valid: tuple[LabelledRow, ...], test: tuple[LabelledRow, ...] = ()) -> LabelledData:
    return LabelledData(rows(("x", "chart")), valid, test, ())


def test_classification_by_hand() -> None:
    data = labelled(rows(("a chart", "chart"), ("b chart", "table"), ("c table", "table"), ("d table", "table")))
    found = evaluate(data, Stub(tiny_config(LABELS)), "valid")
    # chart: 1 hit, 1 true, 2 predicted; table: 2 hits, 3 true, 2 predicted; file occurs nowhere
    assert found.values() == pytest.approx({"accuracy": 75, "macro_f1": 100 * (2 / 3 + 4 / 5) / 2})
    assert found.answers.tolist() == [0, 0, 2, 2]
    assert found.groups.tolist() == ["0", "1", "2", "3"]


def test_a_label_that_the_model_does_not_know() -> None:
    data = labelled(rows(("a chart", "chart")), rows(("b", "sheet"), ("c", "chart"), ("d", "macro")))
    model = Stub(tiny_config(LABELS))
    evaluate(data, model, "valid")
    with pytest.raises(InputError, match="label 'macro' of test is unknown to the model; it has chart, file, table"):
        evaluate(data, model, "test")


@pytest.mark.parametrize("head", [EMBEDDING, None])
def test_a_model_without_a_classifier(head: Any) -> None:
    with pytest.raises(InputError, match="the model has no classifier: fine-tune it first with slimformer train"):
        evaluate(labelled(rows(("a chart", "chart"))), Stub(tiny_config(head)), "valid")


@pytest.mark.parametrize("head", [LABELS, None])
def test_a_model_that_does_not_embed(head: Any) -> None:
    model = Stub(tiny_config(head))
    for data in (SEARCH, SearchData((), (), (), tuple(ANGLES))):
        with pytest.raises(InputError, match="the model gives no embeddings"):
            evaluate(data, model, "test")
    assert model.asked == []


def test_splits_that_are_not_there() -> None:
    model = Stub(tiny_config(EMBEDDING))
    with pytest.raises(InputError, match=r"there are no test queries: add queries-test.jsonl"):
        evaluate(SearchData(PAGES, VALID, (), ()), model, "test")
    with pytest.raises(InputError, match=r"there are no test rows: add test.jsonl"):
        evaluate(labelled(rows(("a chart", "chart"))), Stub(tiny_config(LABELS)), "test")
    assert model.asked == []


def test_has_split() -> None:
    texts = SearchData((), (), (), ("a", "b"))
    assert [has_split(texts, split) for split in ("valid", "test")] == [False, True]
    assert [has_split(SearchData(PAGES, (), TEST, ()), split) for split in ("valid", "test")] == [False, True]
    assert [has_split(labelled(rows(("a", "b"))), split) for split in ("valid", "test")] == [True, False]


def test_agreement_with_the_original() -> None:
    texts = tuple(str(i) for i in range(4))
    data = SearchData((), (), (), texts)
    original = Stub(tiny_config(EMBEDDING), dict(zip(texts, (0, 10, 30, 70), strict=True)))
    candidate = Stub(tiny_config(EMBEDDING), dict(zip(texts, (0, 25, 30, 70), strict=True)))
    first, second = Memory(), Memory()
    itself = evaluate(data, original, "test", memory=first)
    assert itself.values() == pytest.approx({"overlap@3": 100, "cosine": 100})
    found = evaluate(data, candidate, "test", memory=second, original=first)
    assert found.values() == pytest.approx({"overlap@3": 100, "cosine": 100 * (3 + np.cos(np.deg2rad(15))) / 4})
    assert (itself.answers.tolist(), found.answers.tolist()) == ([1, 0, 1, 2], [1, 2, 1, 2])
    evaluate(data, candidate, "test", memory=second, original=first)
    assert (len(original.asked), len(candidate.asked)) == (1, 1)


def test_translations_are_judged_by_sacrebleu() -> None:
    import sacrebleu

    sources = ("the red car drives fast", "a house stands on the hill", "good evening to all of you")
    targets = ("THE RED CAR DRIVES SLOW", "A HOUSE STANDS ON THE HILL", "BYE")
    pairs = tuple(Pair(*sides, group) for *sides, group in zip(sources, targets, "aab", strict=True))
    data, model = PairData((), pairs[:1], pairs, ()), Stub(decoder_config())
    found = evaluate(data, model, "test")
    assert model.asked == [(sources, None)]
    written = [text.upper() for text in sources]
    bleu, chrf = sacrebleu.corpus_bleu(written, [targets]), sacrebleu.corpus_chrf(written, [targets])
    assert found.values() == pytest.approx({"BLEU": bleu.score, "chrF": chrf.score}, rel=1e-12)
    assert (found.deciding, found.groups.tolist()) == ("BLEU", ["a", "a", "b"])
    assert len(evaluate(data, model, "valid").answers) == 1
    assert [has_split(replace(data, valid=()), split) for split in ("valid", "test")] == [False, True]
    with pytest.raises(InputError, match="there are no valid pairs"):
        evaluate(replace(data, valid=()), model, "valid")
    for model in (tiny_config(EMBEDDING), decoder_config(0)):
        with pytest.raises(InputError, match="the data is for translation and the model is no translator"):
            evaluate(data, Stub(model), "test")


def test_beams_are_for_models_that_write() -> None:
    pairs = (Pair("a b", "A B", "0"),)
    model = Stub(decoder_config())
    evaluate(PairData((), pairs, pairs, ()), model, "test", beams=4)
    assert model.asked == [(("a b",), "4 beams")]
    with pytest.raises(InputError, match="beams is 4, which is for models that write: leave it out"):
        evaluate(SEARCH, Stub(tiny_config(EMBEDDING)), "test", beams=4)


def test_summaries_are_judged_by_rouge() -> None:
    """First words against summaries: the same; one of two and one of one; none."""
    sources, targets = ("Cars drive fast", "A house stands", "Good evening"), ("cars", "a mansion", "bye")
    pairs = tuple(Pair(*sides, group) for *sides, group in zip(sources, targets, "aab", strict=True))
    data, model = PairData((), pairs[:1], pairs, (), "summarization"), Stub(decoder_config(head=SUMMARIES))
    found = evaluate(data, model, "test")
    assert model.asked == [(sources, "summarize")]
    assert found.values() == pytest.approx({"ROUGE-1": 500 / 9, "ROUGE-2": 0, "ROUGE-L": 500 / 9})
    assert (found.deciding, found.groups.tolist()) == ("ROUGE-L", ["a", "a", "b"])
    with pytest.raises(InputError, match="the data is for summarization and the model is a translator"):
        evaluate(data, Stub(decoder_config()), "test")
    with pytest.raises(InputError, match="the data is for translation and the model is a summarizer"):
        evaluate(replace(data, task="translation"), model, "test")
    with pytest.raises(InputError, match="the data is for summarization and the model is no summarizer"):
        evaluate(data, Stub(tiny_config(LABELS)), "test")


def test_texts_are_judged_by_how_likely_they_are() -> None:
    """A word is a window of one token, whose loss in nats is its length: 9 of 4 tokens, 1 of 1."""
    rows = (TextRow("ab cd a wxyz", "p"), TextRow("b", "q"))
    data, model = TextData((), rows[:1], rows, ()), Stub(decoder_config(0))
    found = evaluate(data, model, "test")
    assert model.asked == [(("ab cd a wxyz", "b"), "read")]
    bits = 10 / (13 * np.log(2))
    assert found.values() == pytest.approx(
        {"likelihood": 100 * np.exp(-2), "perplexity": np.exp(2), "bits_per_byte": bits}
    )
    assert (found.deciding, found.groups.tolist()) == ("likelihood", ["p", "q"])
    other = evaluate(replace(data, test=(TextRow("ab cd a wxyz", "p"), TextRow("bc", "q"))), model, "test")
    assert changed_answers(found, other) == 0.5
    assert len(evaluate(data, model, "valid").answers) == 1
    with pytest.raises(InputError, match="there are no valid texts: add valid"):
        evaluate(replace(data, valid=()), model, "valid")
    for config in (tiny_config(EMBEDDING), decoder_config()):
        with pytest.raises(InputError, match="the data is for language and the model is no language model"):
            evaluate(data, Stub(config), "test")


class Spread:
    """A model of random vectors of 32 columns, of any length, that counts what it embeds."""

    def __init__(self) -> None:
        self.config, self.vectors, self.asked = tiny_config(EMBEDDING), {}, 0
        rng = np.random.default_rng(7)
        texts = [page.text for page in MANY.pages] + [query.query for query in MANY.valid]
        for text in texts:
            base = self.vectors.get(text.removeprefix("like "), np.zeros(32))
            self.vectors[text] = (base + rng.normal(size=32)).astype(np.float32)

    def embed(self, texts: Sequence[str], *, prompt: str | None = None, progress: Any = None) -> Any:
        self.asked += len(texts)
        return np.stack([self.vectors[text] for text in texts])


MANY = SearchData(
    tuple(Page(str(i), str(i), f"page {i}") for i in range(60)),
    tuple(Query(f"like page {i}", (str(i),), str(i)) for i in range(60)),
    (),
    (),
)


def mean_reciprocal_rank(scores: np.ndarray) -> float:
    """Of page i for query i, the highest score first, equal ones in their order."""
    orders = [sorted(range(len(row)), key=lambda j, row=row: (-row[j], j)) for row in scores]
    return 100 * float(np.mean([1 / (1 + order.index(i)) for i, order in enumerate(orders)]))


def test_forms_of_vectors_by_numpy() -> None:
    """Of the first 12 of 32 columns: ranges are the pages', queries alike or float, bits by the number that differ."""
    model: Any = Spread()
    forms = [VectorForm(12), VectorForm(12, "int8"), VectorForm(12, "binary"), VectorForm(12)]
    found = evaluate_forms(MANY, model, "valid", forms)
    assert model.asked == 120
    kinds = [(one.form, one.queries) for one in found]
    assert kinds == [
        (WHOLE, "float32"),
        (VectorForm(12), "float32"),
        *((VectorForm(12, name), queries) for name in ("int8", "binary") for queries in (name, "float32")),
    ]
    whole, other = (np.stack([model.vectors[t] for t in texts]) for texts in zip(*PAIRED, strict=True))
    queries, pages = ((x / np.linalg.norm(x, axis=1, keepdims=True)) for x in (whole[:, :12], other[:, :12]))
    greatest = np.abs(pages).max(axis=0)
    coded, codes = (np.clip(np.round(127 * x / greatest), -127, 127) for x in (queries, pages))
    assert np.abs(127 * queries / greatest).max() > 128  # queries beyond the pages' ranges are among them
    apart = (queries[:, None] > 0) != (pages[None] > 0)
    back = codes * greatest / 127

    def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)

    expected = [
        cosines(whole, other),
        queries @ pages.T,
        cosines(coded, codes),
        cosines(queries, back),
        -apart.sum(axis=2),
        queries @ np.where(pages > 0, 1, -1).T,
    ]
    values = [one.metrics.values()["MRR"] for one in found]
    assert values == pytest.approx([mean_reciprocal_rank(one) for one in expected])
    assert len(set(values[2:])) == 4
    assert found[2].to_dict() == {
        "precision": "int8",
        "queries": "int8",
        "dimensions": 12,
        "bytes": 12,
        "metrics": found[2].metrics.values(),
    }
    assert [one.to_dict()["bytes"] for one in found] == [128, 48, 12, 12, 2, 2]


PAIRED = [(query.query, page.text) for query, page in zip(MANY.valid, MANY.pages, strict=True)]


def test_forms_are_searched_in_the_index_and_refused_before_anything_is_embedded() -> None:
    model: Any = Spread()
    index = Memory({"pages": np.stack([model.vectors[page.text] for page in MANY.pages])[::-1]})
    found = evaluate_forms(MANY, model, "valid", [VectorForm(12)], index=index)
    assert model.asked == 60
    assert found[1].metrics.values()["MRR"] < 20  # the pages stand in the wrong order
    with pytest.raises(InputError, match="dimensions is 33, and the vectors have 32 columns"):
        evaluate_forms(MANY, model, "valid", [VectorForm(33)])
    assert model.asked == 60
    with pytest.raises(InputError, match="the model gives no embeddings"):
        evaluate_forms(SEARCH, Stub(tiny_config(LABELS)), "valid", [VectorForm(1)])
