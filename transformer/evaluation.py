"""What a model is worth on the user's data: queries against pages, labelled rows, translations or summaries against
references, texts by how likely they are, or agreement with the original.

Models are anything with `embed`, `logits`, `translate`, `summarize` or `read`, so that what is judged is what is
delivered.
Queries are embedded under the prompt `query` and pages under `document` (or `passage`), where a model has prompts of
these names. Translations and summaries are greedy, or written with beams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .config import ClassificationHead, EmbeddingHead, LanguageHead, TransformerConfig
from .data import Data, LabelledData, PairData, SearchData, TextData
from .errors import InputError
from .layer_config import FLOAT32
from .metrics import TaskMetrics, agreement_metrics, classification_metrics, search_metrics
from .progress import SILENT, Progress
from .sources import summarizes
from .splits import SUMMARIZATION
from .text_metrics import Reading, pair_metrics, reading_metrics
from .vectors import BINARY, INT8, WHOLE, VectorForm, find_ranges, given_back, keep

Floats = NDArray[np.float32]
PAGE_PROMPTS = ("document", "passage", "corpus")
QUERY_PROMPTS = ("query",)


class Model(Protocol):
    """What evaluation needs of a model."""

    config: TransformerConfig

    def embed(self, texts: Sequence[str], *, prompt: str | None = None, progress: Progress = SILENT) -> Floats:
        """Texts -> (n, E)."""

    def logits(self, texts: Sequence[str], *, progress: Progress = SILENT) -> Floats:
        """Texts -> (n, C)."""

    def translate(self, texts: Sequence[str], *, progress: Progress = SILENT, beams: int = 1) -> list[str]:
        """Texts -> the translation of each."""

    def summarize(self, texts: Sequence[str], *, progress: Progress = SILENT, beams: int = 1) -> list[str]:
        """Texts -> the summary of each."""

    def read(self, texts: Sequence[str], *, progress: Progress = SILENT) -> list[Reading]:
        """Texts -> how likely their tokens are, window by window."""


@dataclass
class Memory:
    """Vectors of one model that several evaluations share (those of the pages)."""

    vectors: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FormMetrics:
    """What a form of a model's vectors of `width` columns is worth, searched by queries in it or by float ones."""

    form: VectorForm
    queries: str
    width: int
    metrics: TaskMetrics

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, in points and bytes."""
        size = {"dimensions": self.form.columns(self.width), "bytes": self.form.size(self.width)}
        return {"precision": self.form.precision, "queries": self.queries, **size, "metrics": self.metrics.values()}


@dataclass(frozen=True, eq=False)
class _Searched:
    """Vectors of queries (Q, E) and pages (P, E), each query's relevant pages and its group."""

    queries: Floats
    pages: Floats
    relevant: list[list[int]]
    groups: list[str]

    @property
    def width(self) -> int:
        return int(self.pages.shape[1])

    def metrics(self, form: VectorForm = WHOLE, queries: str = FLOAT32) -> TaskMetrics:
        """Of pages in a form, searched by queries in the same precision or in float32."""
        same = queries == form.precision
        asked = form if same else VectorForm(form.dimensions)
        ranges = find_ranges(self.pages, form.dimensions) if form.precision == INT8 else None
        mine, theirs = keep(self.queries, asked, ranges), keep(self.pages, form, ranges)
        back = None if same else ranges
        return search_metrics(
            given_back(mine, asked, self.width),
            given_back(theirs, form, self.width, back),
            self.relevant,
            self.groups,
            signs=form.precision == BINARY,
        )


def evaluate(
    data: Data,
    model: Model,
    split: str,
    *,
    memory: Memory | None = None,
    original: Memory | None = None,
    index: Memory | None = None,
    beams: int = 1,
    progress: Progress = SILENT,
) -> TaskMetrics:
    """Judge a model on `valid` or `test`.

    Args:
        data: the user's data.
        model: the model.
        split: "valid" or "test".
        memory: keeps what a later call for the same model can use again.
        original: the memory of the original, for data without labels, which is compared with it.
        index: the memory of a model that was judged on queries before: its pages are searched, not the model's own.
        beams: of models that write; with 1 they do so greedily.
        progress: told of the texts embedded.

    Raises:
        InputError: the split is empty, the model's head does not fit the data, or beams are asked of a model that does
            not write.
    """
    memory = Memory() if memory is None else memory
    if isinstance(data, PairData):
        return _pairs(data, model, split, beams, progress)
    if beams > 1:
        raise InputError(f"beams is {beams}, which is for models that write: leave it out")
    if isinstance(data, LabelledData):
        return _classification(data, model, split, progress)
    if isinstance(data, TextData):
        return _language(data, model, split, progress)
    _check_embeds(model)
    if data.pages:
        return _searched(data, model, split, memory if index is None else index, progress).metrics()
    return _agreement(data, model, memory, memory if original is None else original, progress)


def evaluate_forms(
    data: SearchData,
    model: Model,
    split: str,
    forms: Sequence[VectorForm],
    *,
    index: Memory | None = None,
    progress: Progress = SILENT,
) -> list[FormMetrics]:
    """Judge the whole float vectors of a model, then other forms of them, on queries and pages of `valid` or `test`.

    Of int8 and binary pages, queries in the same form are judged and float ones; see `vectors`. Arguments and errors
    are those of `evaluate`; a form with more columns than the vectors have is an InputError too.
    """
    _check_embeds(model)
    for form in forms:
        form.columns(model.config.output_width)
    found = _searched(data, model, split, Memory() if index is None else index, progress)
    judged = [FormMetrics(WHOLE, FLOAT32, found.width, found.metrics())]
    for form in dict.fromkeys(forms):
        for queries in dict.fromkeys((form.precision, FLOAT32)):
            if form != WHOLE:
                judged.append(FormMetrics(form, queries, found.width, found.metrics(form, queries)))
    return judged


def check_writes(config: TransformerConfig, task: str) -> None:
    """Raise InputError unless a model writes what the pairs of a task say: translations, or summaries."""
    wanted, other = ("summarizer", "translator") if task == SUMMARIZATION else ("translator", "summarizer")
    if not (isinstance(config.head, LanguageHead) and config.encoder):
        raise InputError(f"the data is for {task} and the model is no {wanted}: train one first with slimformer train")
    if summarizes(config) != (task == SUMMARIZATION):
        raise InputError(
            f"the data is for {task} and the model is a {other}: give the other data, or train it with slimformer train"
        )


def check_goes_on(config: TransformerConfig) -> None:
    """Raise InputError unless a model is a language model: a decoder by itself."""
    if not config.continues:
        raise InputError(
            "the data is for language and the model is no language model: train one first with slimformer train"
        )


def has_split(data: Data, split: str) -> bool:
    """Whether `evaluate` can judge on a split; data without labels has the one split `test`."""
    if isinstance(data, SearchData) and not data.pages:
        return split == "test"
    return bool(data.valid if split == "valid" else data.test)


def prompt_for(config: TransformerConfig, names: Sequence[str]) -> str | None:
    """The first of `names` that the model has a prompt of."""
    known = dict(config.text.prompts)
    return next((name for name in names if name in known), None)


def _check_embeds(model: Model) -> None:
    if not isinstance(model.config.head, EmbeddingHead):
        raise InputError("the model gives no embeddings: it has no pooling; take a sentence encoder")


def _searched(data: SearchData, model: Model, split: str, memory: Memory, progress: Progress) -> _Searched:
    """Embed the queries, and the pages where `memory` has none."""
    queries = data.valid if split == "valid" else data.test
    if not queries:
        raise InputError(f"there are no {split} queries: add queries-{split}.jsonl")
    if "pages" not in memory.vectors:
        prompt = prompt_for(model.config, PAGE_PROMPTS)
        memory.vectors["pages"] = model.embed([page.text for page in data.pages], prompt=prompt, progress=progress)
    places = {page.id: i for i, page in enumerate(data.pages)}
    prompt = prompt_for(model.config, QUERY_PROMPTS)
    vectors = model.embed([query.query for query in queries], prompt=prompt, progress=progress)
    pages = memory.vectors["pages"]
    if vectors.shape[1] != pages.shape[1]:
        raise InputError(f"the queries' vectors have {vectors.shape[1]} numbers, the index has {pages.shape[1]}")
    relevant = [[places[page] for page in query.pages] for query in queries]
    return _Searched(vectors, pages, relevant, [query.group for query in queries])


def _agreement(data: SearchData, model: Model, memory: Memory, original: Memory, progress: Progress) -> TaskMetrics:
    if "texts" not in memory.vectors:
        memory.vectors["texts"] = model.embed(data.texts, progress=progress)
    return agreement_metrics(original.vectors["texts"], memory.vectors["texts"])


def _pairs(data: PairData, model: Model, split: str, beams: int, progress: Progress) -> TaskMetrics:
    pairs = data.valid if split == "valid" else data.test
    if not pairs:
        raise InputError(f"there are no {split} pairs: add {split}.jsonl")
    check_writes(model.config, data.task)
    write = model.summarize if data.task == SUMMARIZATION else model.translate
    written = write([pair.source for pair in pairs], progress=progress, beams=beams)
    return pair_metrics(data.task, written, [pair.target for pair in pairs], [pair.group for pair in pairs])


def _language(data: TextData, model: Model, split: str, progress: Progress) -> TaskMetrics:
    rows = data.valid if split == "valid" else data.test
    if not rows:
        raise InputError(f"there are no {split} texts: add {split}.jsonl")
    check_goes_on(model.config)
    return reading_metrics(rows, model.read([row.text for row in rows], progress=progress))


def _classification(data: LabelledData, model: Model, split: str, progress: Progress) -> TaskMetrics:
    rows = data.valid if split == "valid" else data.test
    if not rows:
        raise InputError(f"there are no {split} rows: add {split}.jsonl")
    head: Any = model.config.head
    if not isinstance(head, ClassificationHead):
        raise InputError("the model has no classifier: fine-tune it first with slimformer train")
    places = {label: i for i, label in enumerate(head.labels)}
    unknown = sorted({row.label for row in rows} - set(places))
    if unknown:
        raise InputError(f"label {unknown[0]!r} of {split} is unknown to the model; it has {', '.join(head.labels)}")
    logits = model.logits([row.text for row in rows], progress=progress)
    return classification_metrics(logits, [places[row.label] for row in rows], [row.group for row in rows])
