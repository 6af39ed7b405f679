"""The rows that models are trained and judged on, in memory, with proof of which texts they were.

Text that a split shares with another one makes a test too easy: `overlaps` counts it. `fingerprints` tells whether two
runs saw the same texts in the same order.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

TRANSLATION, SUMMARIZATION = "translation", "summarization"


@dataclass(frozen=True)
class LabelledRow:
    """A text and its class; `group` is the row number unless the table has the field."""

    text: str
    label: str
    group: str


@dataclass(frozen=True)
class Page:
    """One page of the collection to search in; the title may be empty."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Query:
    """A query and the ids of its relevant pages; `group` is the first of them unless the table has the field."""

    query: str
    pages: tuple[str, ...]
    group: str


@dataclass(frozen=True)
class Pair:
    """A text and what it becomes: its translation, its summary. `group` is the row number unless the table has it."""

    source: str
    target: str
    group: str


@dataclass(frozen=True)
class TextRow:
    """A text to be predicted token by token; `group` is the row number unless the table has the field."""

    text: str
    group: str


class _Splits(ABC):
    """What every kind of data says of its texts."""

    @abstractmethod
    def _texts(self) -> dict[str, list[str]]:
        """The texts of each split."""

    def _inputs(self) -> dict[str, list[str]]:
        """What must not come up again in another split: the texts, unless a row is more than what a model is given."""
        return self._texts()

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 over the texts of each split that has any: proof of what was trained, chosen and tested on."""
        return {split: _fingerprint(texts) for split, texts in self._texts().items() if texts}

    def overlaps(self) -> dict[str, int]:
        """How many distinct texts two splits share, without regard to case and white space, as `train~test`."""
        known = {name: {_normal(text) for text in texts} for name, texts in self._inputs().items() if name != "pages"}
        pairs = [pair for pair in combinations(known, 2) if pair != ("texts", "train")]
        return {f"{a}~{b}": len(known[a] & known[b]) for a, b in pairs if known[a] and known[b]}


@dataclass(frozen=True)
class LabelledData(_Splits):
    """Rows for classification, and unlabelled texts."""

    train: tuple[LabelledRow, ...]
    valid: tuple[LabelledRow, ...]
    test: tuple[LabelledRow, ...]
    texts: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The distinct labels of train (of all rows where there is no train), sorted."""
        rows = self.train or self.valid + self.test
        return tuple(sorted({row.label for row in rows}))

    def _texts(self) -> dict[str, list[str]]:
        return _row_texts(self)


@dataclass(frozen=True)
class SearchData(_Splits):
    """Pages and queries for search, and unlabelled texts; without pages there are only texts to compare models on."""

    pages: tuple[Page, ...]
    valid: tuple[Query, ...]
    test: tuple[Query, ...]
    texts: tuple[str, ...]

    def _texts(self) -> dict[str, list[str]]:
        pages = [f"{page.title}\n{page.text}" for page in self.pages]
        queries = {"valid": [row.query for row in self.valid], "test": [row.query for row in self.test]}
        return {"pages": pages, "texts": list(self.texts)} | queries


@dataclass(frozen=True)
class PairData(_Splits):
    """Pairs for translation or summarization, whichever `task` says, and texts like the sources that have no target.

    A fingerprint holds sources and targets; an overlap is of sources alone, for a known source with another target is
    known all the same.
    """

    train: tuple[Pair, ...]
    valid: tuple[Pair, ...]
    test: tuple[Pair, ...]
    texts: tuple[str, ...]
    task: str = TRANSLATION

    def _rows(self) -> dict[str, tuple[Pair, ...]]:
        return {"train": self.train, "valid": self.valid, "test": self.test}

    def _texts(self) -> dict[str, list[str]]:
        both = {
            name: [side for one in rows for side in (one.source, one.target)] for name, rows in self._rows().items()
        }
        return {"texts": list(self.texts)} | both

    def _inputs(self) -> dict[str, list[str]]:
        sources = {name: [row.source for row in rows] for name, rows in self._rows().items()}
        return {"texts": list(self.texts)} | sources


@dataclass(frozen=True)
class TextData(_Splits):
    """Texts for causal language modelling, and more texts of the kind that are in no split."""

    train: tuple[TextRow, ...]
    valid: tuple[TextRow, ...]
    test: tuple[TextRow, ...]
    texts: tuple[str, ...]

    def _texts(self) -> dict[str, list[str]]:
        return _row_texts(self)


def _row_texts(data: LabelledData | TextData) -> dict[str, list[str]]:
    rows = {"train": data.train, "valid": data.valid, "test": data.test}
    return {"texts": list(data.texts)} | {name: [row.text for row in split] for name, split in rows.items()}


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _fingerprint(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
