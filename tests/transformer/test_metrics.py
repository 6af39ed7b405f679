"""Metrics against hand-worked cases and naive loops."""

from math import log2

import numpy as np
import pytest

from slimformer.transformer.errors import InputError
from slimformer.transformer.metrics import (
    ClassCounts,
    Mean,
    TaskMetrics,
    agreement_metrics,
    changed_answers,
    classification_metrics,
    joined,
    ranks,
    search_metrics,
    search_statistics,
)


def circle(*degrees: float) -> np.ndarray:
    """Vectors of length 1 at these angles: the nearer the angle, the higher the cosine."""
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def naive_search(queries: np.ndarray, pages: np.ndarray, relevant: list[list[int]]) -> np.ndarray:
    rows = []
    for query, wanted in zip(queries, relevant, strict=True):
        cosines = [query @ page / (np.linalg.norm(query) * np.linalg.norm(page)) for page in pages]
        order = sorted(range(len(pages)), key=lambda i: (-np.float32(cosines[i]), i))
        gain = sum(1 / log2(place + 2) for place, page in enumerate(order[:10]) if page in wanted)
        ideal = sum(1 / log2(place + 2) for place in range(min(10, len(wanted))))
        first = min(order.index(page) for page in wanted)
        found = [sum(page in wanted for page in order[:k]) / len(wanted) for k in (1, 10)]
        rows.append([gain / ideal, *found, 1 / (1 + first)])
    return np.array(rows)


def test_search_by_hand() -> None:
    # pages by nearness to 0 degrees: 2, 0, 3, 1
    pages = circle(20, 80, 10, 30)
    statistics, answers = search_statistics(circle(0, 0), pages, [[3], [0, 1]])
    assert answers.tolist() == [2, 2]
    assert statistics[0] == pytest.approx([1 / log2(4), 0, 1, 1 / 3])
    assert statistics[1] == pytest.approx([(1 / log2(3) + 1 / log2(5)) / (1 + 1 / log2(3)), 0, 1, 1 / 2])


def test_search_equals_a_naive_ranking() -> None:
    rng = np.random.default_rng(0)
    queries, pages = rng.normal(size=(300, 5)), rng.normal(size=(40, 5))  # more queries than one block
    relevant = [rng.choice(40, size=rng.integers(1, 14), replace=False).tolist() for _ in range(300)]
    statistics, _ = search_statistics(queries, pages, relevant)
    np.testing.assert_allclose(statistics, naive_search(queries, pages, relevant), atol=1e-12)


def test_cutoff_is_an_argument() -> None:
    statistics, _ = search_statistics(circle(0), circle(10, 20, 30), [[1, 2]], k=2)
    assert statistics[0] == pytest.approx([(1 / log2(3)) / (1 + 1 / log2(3)), 0, 0.5, 0.5])


def test_equal_pages_rank_in_their_order() -> None:
    page = np.random.default_rng(1).normal(size=384)
    pages = np.tile(page, (9, 1)).astype(np.float32)
    queries = np.random.default_rng(2).normal(size=(9, 384)).astype(np.float32)
    statistics, answers = search_statistics(queries, pages, [[i] for i in range(9)])
    assert statistics[:, 3].tolist() == [1 / (1 + i) for i in range(9)]
    assert answers.tolist() == [0] * 9
    assert ranks(queries, pages, [[i] for i in range(9)]).tolist() == [1] * 9


def test_ranks_count_the_pages_that_score_higher() -> None:
    pages = circle(20, 80, 10, 30)
    assert ranks(circle(0, 0, 90), pages, [[3], [0, 1], [2]]).tolist() == [3, 2, 4]


def test_length_of_vectors_does_not_matter_and_zeros_score_zero() -> None:
    pages = circle(20, 80, 10, 170)
    scaled = pages * np.array([[0.1], [5], [2], [100]])
    assert ranks(3 * circle(0), scaled, [[0]]).tolist() == ranks(circle(0), pages, [[0]]).tolist() == [2]
    scaled[2] = 0
    assert ranks(circle(0), scaled, [[2]]).tolist() == [3]  # before the page at 170 degrees, whose cosine is negative


def test_signs_rank_by_hamming_distance_and_equal_ones_in_their_order() -> None:
    """Among 40 pages of 12 signs most distances are shared, half of all signs apart among them."""
    rng = np.random.default_rng(8)
    queries, pages = (np.where(rng.random(size=(n, 12)) < 0.5, 1.0, -1.0) for n in (300, 40))
    relevant = [rng.choice(40, size=rng.integers(1, 5), replace=False).tolist() for _ in range(300)]
    statistics, answers = search_statistics(queries, pages, relevant, signs=True)
    for query, wanted, row, answer in zip(queries, relevant, statistics, answers, strict=True):
        order = sorted(range(40), key=lambda i, query=query: (int((query != pages[i]).sum()), i))
        assert answer == order[0]
        assert row[3] == 1 / (1 + min(order.index(page) for page in wanted))


def test_search_metrics_are_points() -> None:
    metrics = search_metrics(circle(0, 0), circle(20, 80, 10, 30), [[3], [2]], ["p", "q"])
    assert metrics.values() == pytest.approx({"nDCG@10": 75, "recall@1": 50, "recall@10": 100, "MRR": 100 * 2 / 3})
    assert (metrics.deciding, metrics.groups.tolist()) == ("nDCG@10", ["p", "q"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused(bad: float) -> None:
    vectors = circle(0, 10, 20)
    vectors[1, 0] = bad
    with pytest.raises(InputError, match=r"queries' vectors of 1 of 3 .*first: example 1"):
        ranks(vectors, circle(0), [[0]] * 3)
    with pytest.raises(InputError, match="pages' vectors"):
        search_statistics(circle(0), vectors, [[0]])
    with pytest.raises(InputError, match="candidate's vectors"):
        agreement_metrics(circle(0, 10, 20), vectors)
    with pytest.raises(InputError, match="logits of 1 of 3"):
        classification_metrics(vectors, [0, 0, 0], ["a", "b", "c"])


@pytest.mark.parametrize("relevant", [[], [-1], [2], [0, 0]])
def test_wrong_relevant_pages_are_refused(relevant: list[int]) -> None:
    with pytest.raises(ValueError, match="query 0: "):
        ranks(circle(0), circle(0, 10), [relevant])


def test_classification_by_hand() -> None:
    predicted, true = [0, 0, 1, 1, 2, 0], [0, 1, 1, 1, 0, 0]
    metrics = classification_metrics(np.eye(4)[predicted], true, list("aabbcc"))
    # F1: class 0: 2 * 2 / (3 + 3); class 1: 2 * 2 / (3 + 2); class 2: predicted, never true: 0; class 3: absent
    assert metrics.values() == pytest.approx({"accuracy": 100 * 4 / 6, "macro_f1": 100 * (2 / 3 + 4 / 5 + 0) / 3})
    assert metrics.answers.tolist() == predicted
    assert metrics.deciding == "accuracy"
    assert classification_metrics(np.eye(4)[predicted], true, list("aabbcc"), "macro_f1").deciding == "macro_f1"


def test_classes_aggregate_many_resamples_at_once() -> None:
    rng = np.random.default_rng(3)
    metrics = classification_metrics(rng.normal(size=(30, 3)), rng.integers(3, size=30).tolist(), ["g"] * 30)
    weights = rng.integers(3, size=(7, 30)).astype(float)
    together = ClassCounts(3)(weights @ metrics.statistics, weights.sum(axis=1))
    for row, weight in enumerate(weights):
        chosen = np.repeat(np.arange(30), weight.astype(int))
        alone = TaskMetrics(
            ClassCounts(3), metrics.statistics[chosen], metrics.groups[chosen], metrics.answers[chosen], "accuracy"
        ).values()
        assert {name: values[row] for name, values in together.items()} == pytest.approx(alone)


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 3], [0, 1, -1]])
def test_labels_that_do_not_fit_the_logits_are_refused(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="3 indices below 3"):
        classification_metrics(np.eye(3), labels, ["a", "b", "c"])


def test_agreement_by_hand() -> None:
    # two nearest: original 0: {1, 2}, 1: {0, 2}, 2: {1, 3}, 3: {2, 1}; the candidate swaps the texts 0 and 3
    original, candidate = circle(0, 10, 25, 45), circle(45, 10, 25, 0)
    metrics = agreement_metrics(original, candidate, k=2)
    # candidate 0 (45): {2, 1}; 1 (10): {3, 2}; 2 (25): {1, 0}; 3 (0): {1, 2}
    assert metrics.statistics[:, 0].tolist() == [1, 0.5, 0.5, 1]
    assert metrics.statistics[:, 1] == pytest.approx([np.cos(np.pi / 4), 1, 1, np.cos(np.pi / 4)])
    assert metrics.answers.tolist() == [2, 3, 1, 1]
    assert (metrics.names, metrics.deciding) == (("overlap@2", "cosine"), "overlap@2")
    assert metrics.groups.tolist() == ["0", "1", "2", "3"]


def test_neighbours_equal_a_naive_search_with_ties() -> None:
    rng = np.random.default_rng(4)
    original = rng.normal(size=(300, 4))[rng.integers(120, size=300)]  # many texts occur more than once
    candidate = original + 0.3 * rng.normal(size=original.shape)
    metrics = agreement_metrics(original, candidate)
    near = []
    for vectors in (original, candidate):
        units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = (units @ units.T).astype(np.float32)
        near.append([sorted({*range(300)} - {i}, key=lambda j, row=cosines[i]: (-row[j], j))[:10] for i in range(300)])
    expected = [len({*a} & {*b}) / 10 for a, b in zip(*near, strict=True)]
    np.testing.assert_allclose(metrics.statistics[:, 0], expected)
    assert metrics.answers.tolist() == [row[0] for row in near[1]]


def test_agreement_with_itself_is_whole_and_few_texts_have_fewer_neighbours() -> None:
    vectors = np.random.default_rng(5).normal(size=(5, 3))
    metrics = agreement_metrics(vectors, 7 * vectors)
    assert metrics.values() == pytest.approx({"overlap@4": 100, "cosine": 100})
    assert changed_answers(metrics, metrics) == 0
    with pytest.raises(InputError, match="at least two texts"):
        agreement_metrics(vectors[:1], vectors[:1])


def test_agreement_of_other_widths_has_no_cosine() -> None:
    vectors = np.random.default_rng(6).normal(size=(5, 3))
    narrow = agreement_metrics(vectors, np.pad(vectors, [(0, 0), (0, 2)]))
    assert narrow.values() == {"overlap@4": 100}


def test_changed_answers() -> None:
    def metrics(answers: list[int]) -> TaskMetrics:
        n = len(answers)
        return TaskMetrics(Mean(("m",)), np.zeros((n, 1)), np.array(["g"] * n), np.array(answers), "m")

    assert changed_answers(metrics([1, 2, 3, 4]), metrics([1, 2, 0, 4])) == 0.25
    with pytest.raises(ValueError, match="4 answers cannot be compared with 3"):
        changed_answers(metrics([1, 2, 3, 4]), metrics([1, 2, 3]))


def test_joined_metrics_keep_their_values_in_every_resample() -> None:
    rng = np.random.default_rng(7)
    names = [str(i) for i in range(30)]
    classes = classification_metrics(rng.normal(size=(30, 3)), rng.integers(3, size=30).tolist(), names)
    means = TaskMetrics(Mean(("a", "b")), rng.random((30, 2)), classes.groups, np.arange(30), "b")
    both = joined(classes, means)
    assert both.values() == classes.values() | means.values()
    assert (both.names, both.deciding) == (("accuracy", "macro_f1", "a", "b"), "accuracy")
    assert both.answers.tolist() == classes.answers.tolist()
    weights = rng.integers(3, size=(7, 30)).astype(float)
    together = both.aggregate(weights @ both.statistics, weights.sum(axis=1))
    for one in (classes, means):
        for name, values in one.aggregate(weights @ one.statistics, weights.sum(axis=1)).items():
            np.testing.assert_array_equal(together[name], values)


def test_metrics_of_other_examples_or_of_one_name_are_not_joined() -> None:
    def metrics(names: str, metric: str) -> TaskMetrics:
        return TaskMetrics(Mean((metric,)), np.zeros((2, 1)), np.array(list(names)), np.array([0, 1]), metric)

    with pytest.raises(ValueError, match="other examples or groups"):
        joined(metrics("ab", "x"), metrics("ac", "y"))
    with pytest.raises(ValueError, match="twice among x, y, x"):
        joined(metrics("ab", "x"), metrics("ab", "y"), metrics("ab", "x"))


def test_task_metrics_that_do_not_fit_are_refused() -> None:
    groups, answers = np.array(["a", "b"]), np.array([0, 1])
    with pytest.raises(InputError, match="'other' does not exist here: choose from m"):
        TaskMetrics(Mean(("m",)), np.zeros((2, 1)), groups, answers, "other")
    with pytest.raises(ValueError, match=r"\(3, 1\), \(2,\) and \(2,\)"):
        TaskMetrics(Mean(("m",)), np.zeros((3, 1)), groups, answers, "m")
    with pytest.raises(InputError, match="no example"):
        TaskMetrics(Mean(("m",)), np.zeros((0, 1)), groups[:0], answers[:0], "m")
