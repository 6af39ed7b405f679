"""What a model is worth on a task, as statistics per example whose sums give every metric.

For each example there is a row of k numbers; a metric is a function of the sum of the rows and of their count. So a
resample of the examples costs one sum, and metrics that are no means (macro-F1) get intervals as means do.

Search: nDCG@10 with binary gains (Järvelin & Kekäläinen 2002), recall@1, recall@10 and the reciprocal rank of the first
relevant page. Pages of equal score rank in their order. Classification: accuracy and macro-F1, the mean of the classes'
F1 = 2 tp / (true + predicted) over the classes that occur in the truth or in the predictions. Agreement, where there
are no labels: the cosine to the original's vector and the share of the original's ten nearest neighbours kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SEARCH_NAMES = ("nDCG@10", "recall@1", "recall@10", "MRR")
CLASSIFICATION_NAMES = ("accuracy", "macro_f1")

_BLOCK = 256  # rows of a similarity matrix computed at once


class Aggregate(Protocol):
    """From summed statistics to metrics; the first of `names` is the one that decides unless a task says otherwise."""

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics, in the order they are shown."""

    def __call__(self, total: FloatArray, count: FloatArray) -> dict[str, FloatArray]:
        """Metrics (R,) in points, from sums of statistics (R, k) over counts (R,) of examples."""


@dataclass(frozen=True)
class Mean:
    """Each metric is 100 times the mean of its own column."""

    names: tuple[str, ...]

    def __call__(self, total: FloatArray, count: FloatArray) -> dict[str, FloatArray]:
        """See `Aggregate`."""
        return {name: 100 * total[:, column] / count for column, name in enumerate(self.names)}


@dataclass(frozen=True)
class ClassCounts:
    """Accuracy and macro-F1 of C classes from 3C columns: hits, true and predicted examples of each class.

    These hold all that the confusion matrix says about both metrics, in 3C columns where it has C * C.
    """

    classes: int
    names: tuple[str, ...] = CLASSIFICATION_NAMES

    def __call__(self, total: FloatArray, count: FloatArray) -> dict[str, FloatArray]:
        """See `Aggregate`."""
        hits, true, predicted = (total[:, i * self.classes : (i + 1) * self.classes] for i in range(3))
        present = true + predicted > 0
        f1 = 2 * hits / np.where(present, true + predicted, 1)  # (R, C)
        return {"accuracy": 100 * hits.sum(axis=1) / count, "macro_f1": 100 * f1.sum(axis=1) / present.sum(axis=1)}


@dataclass(frozen=True)
class Joined:
    """Several aggregates, each on its own columns, side by side."""

    parts: tuple[Aggregate, ...]
    widths: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics of all parts, in their order."""
        return tuple(name for part in self.parts for name in part.names)

    def __call__(self, total: FloatArray, count: FloatArray) -> dict[str, FloatArray]:
        """See `Aggregate`."""
        values: dict[str, FloatArray] = {}
        for part, columns in zip(self.parts, np.split(total, np.cumsum(self.widths)[:-1], axis=1), strict=True):
            values |= part(columns, count)
        return values


@dataclass(frozen=True, eq=False)
class TaskMetrics:
    """One model on one task.

    statistics (n, k): a row per example; groups (n,): what is resampled together; answers (n,): the top page, class or
    neighbour of each example, for the share of answers that change; deciding: the metric that a budget is set on.
    """

    aggregate: Aggregate
    statistics: FloatArray
    groups: NDArray[np.str_]
    answers: IntArray
    deciding: str

    def __post_init__(self) -> None:
        n = len(self.statistics)
        if self.statistics.ndim != 2 or self.groups.shape != (n,) or self.answers.shape != (n,):
            shapes = f"{self.statistics.shape}, {self.groups.shape} and {self.answers.shape}"
            raise ValueError(f"statistics, groups and answers must be (n, k), (n,) and (n,), not {shapes}")
        if n == 0:
            raise InputError("there is no example to evaluate on")
        if self.deciding not in self.names:
            raise InputError(f"the metric {self.deciding!r} does not exist here: choose from {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics, in the order they are shown."""
        return self.aggregate.names

    def values(self) -> dict[str, float]:
        """Every metric over all examples, in points (0 to 100)."""
        total = self.statistics.sum(axis=0, keepdims=True)
        metrics = self.aggregate(total, np.array([float(len(self.statistics))]))
        return {name: float(metrics[name][0]) for name in self.names}


def changed_answers(baseline: TaskMetrics, candidate: TaskMetrics) -> float:
    """Share (0 to 1) of the examples whose answer differs between two models."""
    if baseline.answers.shape != candidate.answers.shape:
        raise ValueError(f"{len(baseline.answers)} answers cannot be compared with {len(candidate.answers)}")
    return float(np.mean(baseline.answers != candidate.answers))


def joined(first: TaskMetrics, *others: TaskMetrics) -> TaskMetrics:
    """All metrics of the same examples as one; groups, answers and what decides are the first's.

    Raises ValueError where the examples or groups differ or two metrics have one name.
    """
    every = (first, *others)
    if any(not np.array_equal(one.groups, first.groups) for one in others):
        raise ValueError("metrics of other examples or groups cannot be joined")
    aggregate = Joined(tuple(one.aggregate for one in every), tuple(one.statistics.shape[1] for one in every))
    if len(set(aggregate.names)) < len(aggregate.names):
        raise ValueError(f"a metric occurs twice among {', '.join(aggregate.names)}")
    statistics = np.hstack([one.statistics for one in every])
    return TaskMetrics(aggregate, statistics, first.groups, first.answers, first.deciding)


def ranks(query_vectors: ArrayLike, page_vectors: ArrayLike, relevant: Sequence[Sequence[int]]) -> IntArray:
    """Rank (Q,) of each query's best relevant page by cosine: 1 + the number of pages that score strictly higher.

    query_vectors (Q, d), page_vectors (P, d); relevant: for each query the indices of its pages. Raises InputError for
    vectors that are not finite.
    """
    out = np.empty(len(relevant), dtype=np.int64)
    for query, scores in _scored(query_vectors, page_vectors, relevant):
        out[query] = 1 + np.count_nonzero(scores > scores[list(relevant[query])].max())
    return out


def search_statistics(
    query_vectors: ArrayLike,
    page_vectors: ArrayLike,
    relevant: Sequence[Sequence[int]],
    k: int = 10,
    *,
    signs: bool = False,
) -> tuple[FloatArray, IntArray]:
    """Return statistics (Q, 4), nDCG@k, recall@1, recall@k and reciprocal rank from 0 to 1, and the top pages (Q,).

    Recall is the share of a query's relevant pages among the first. Arguments and errors are those of `ranks`. With
    `signs` the pages' numbers are -1 or 1: pages of one length rank by their products with the query as they are, so
    that d - 2h of queries of signs stays whole, and Hamming distances h that are equal tie.
    """
    statistics = np.empty((len(relevant), 4))
    answers = np.empty(len(relevant), dtype=np.int64)
    gains = 1 / np.log2(np.arange(2, k + 2))
    for query, scores in _scored(query_vectors, page_vectors, relevant, signs):
        positions = _positions(scores, relevant[query])
        ideal = gains[: len(positions)].sum()
        ndcg = gains[positions[positions < k]].sum() / ideal
        statistics[query] = ndcg, np.mean(positions < 1), np.mean(positions < k), 1 / (1 + positions.min())
        answers[query] = scores.argmax()
    return statistics, answers


def search_metrics(
    query_vectors: ArrayLike,
    page_vectors: ArrayLike,
    relevant: Sequence[Sequence[int]],
    groups: Sequence[str],
    *,
    signs: bool = False,
) -> TaskMetrics:
    """nDCG@10 (deciding), recall@1, recall@10 and MRR of ranking pages by cosine. Arguments: `search_statistics`."""
    statistics, answers = search_statistics(query_vectors, page_vectors, relevant, k=10, signs=signs)
    return TaskMetrics(Mean(SEARCH_NAMES), statistics, np.array(groups, dtype=np.str_), answers, SEARCH_NAMES[0])


def classification_metrics(
    logits: ArrayLike, labels: Sequence[int], groups: Sequence[str], deciding: str = "accuracy"
) -> TaskMetrics:
    """Accuracy and macro-F1 of logits (n, C) against label indices (n,). Raises InputError for logits not finite."""
    scores, true = _finite(logits, "logits"), np.asarray(labels, dtype=np.int64)
    classes = scores.shape[1]
    if true.shape != scores.shape[:1] or np.any((true < 0) | (true >= classes)):
        raise ValueError(f"labels must be {len(scores)} indices below {classes}")
    predicted = scores.argmax(axis=1).astype(np.int64)
    one_hot = np.eye(classes)
    hits = one_hot[true] * (true == predicted)[:, None]
    statistics = np.hstack([hits, one_hot[true], one_hot[predicted]])
    return TaskMetrics(ClassCounts(classes), statistics, np.array(groups, dtype=np.str_), predicted, deciding)


def agreement_metrics(
    original: ArrayLike, candidate: ArrayLike, groups: Sequence[str] | None = None, k: int = 10
) -> TaskMetrics:
    """Agreement of a candidate's vectors (n, d') of n texts with the original's (n, d), for want of labels.

    overlap@k (deciding): the share of a text's k nearest other texts, by cosine in the original, that are among its k
    nearest in the candidate (k is n - 1 where there are fewer); cosine: of the two vectors, where d' = d. The answer is
    the nearest text. Each text is its own group unless `groups` says otherwise. Raises InputError for fewer than two
    texts or vectors that are not finite.
    """
    before, after = _units(original, "the original's vectors"), _units(candidate, "the candidate's vectors")
    n = len(before)
    if len(after) != n:
        raise ValueError(f"{n} vectors cannot be compared with {len(after)}")
    if n < 2:
        raise InputError(f"{n} text has no neighbours: give at least two texts to compare the models on")
    kept = min(k, n - 1)
    near, nearest = _neighbours(before, kept), _neighbours(after, kept)
    columns = [np.array([np.isin(a, b).mean() for a, b in zip(near, nearest, strict=True)])]
    names = [f"overlap@{kept}"]
    if before.shape == after.shape:
        columns.append((before * after).sum(axis=1))
        names.append("cosine")
    marks = np.arange(n).astype(np.str_) if groups is None else np.array(groups, dtype=np.str_)
    return TaskMetrics(Mean(tuple(names)), np.stack(columns, axis=1), marks, nearest[:, 0], names[0])


def _finite(values: ArrayLike, what: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2:
        raise ValueError(f"{what} must have two axes, not {array.ndim}")
    rows = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if rows.size:
        raise InputError(f"{what} of {rows.size} of {len(array)} examples are not finite (first: example {rows[0]})")
    return array


def _units(values: ArrayLike, what: str) -> FloatArray:
    """Rows scaled to length 1; a row of zeros (a text without tokens) stays zero and has the cosine 0 to all."""
    array = _finite(values, what)
    norms = np.linalg.norm(array, axis=1, keepdims=True)
    return array / np.where(norms > 0, norms, 1)


def _cosines(rows: FloatArray, columns: FloatArray) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Blocks of cosines (of rows of length 1) as (number of the first row, (block, P)).

    Computed in double and rounded to single precision: so equal vectors tie, whatever the order of a block's sums.
    """
    for start in range(0, len(rows), _BLOCK):
        yield start, (rows[start : start + _BLOCK] @ columns.T).astype(np.float32)


def _scored(
    query_vectors: ArrayLike, page_vectors: ArrayLike, relevant: Sequence[Sequence[int]], signs: bool = False
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Each query's number and its pages' scores (P,)."""
    read = _finite if signs else _units
    queries, pages = read(query_vectors, "the queries' vectors"), read(page_vectors, "the pages' vectors")
    if len(relevant) != len(queries):
        raise ValueError(f"{len(queries)} queries need as many lists of relevant pages, not {len(relevant)}")
    for number, indices in enumerate(relevant):
        if not indices or min(indices) < 0 or max(indices) >= len(pages) or len(set(indices)) < len(indices):
            raise ValueError(f"query {number}: {list(indices)} are not distinct indices of {len(pages)} pages")
    for start, block in _cosines(queries, pages):
        yield from enumerate(block, start=start)


def _positions(scores: NDArray[np.float32], indices: Sequence[int]) -> IntArray:
    """Places (from 0) of the pages `indices` in the ranking by falling score, equal scores in their order."""
    places = [np.count_nonzero(scores > scores[i]) + np.count_nonzero(scores[:i] == scores[i]) for i in indices]
    return np.array(places, dtype=np.int64)


def _neighbours(vectors: FloatArray, k: int) -> IntArray:
    """The k nearest other rows (n, k) of each row by cosine, nearest first, equal ones in their order."""
    out = np.empty((len(vectors), k), dtype=np.int64)
    for start, block in _cosines(vectors, vectors):
        block[np.arange(len(block)), np.arange(start, start + len(block))] = -np.inf
        bounds = np.partition(block, -k, axis=1)[:, -k]
        for row, (scores, bound) in enumerate(zip(block, bounds, strict=True), start=start):
            near = np.flatnonzero(scores >= bound)
            out[row] = near[np.argsort(-scores[near], kind="stable")[:k]]
    return out
