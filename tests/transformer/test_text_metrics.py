"""Metrics of texts against the packages' own corpus scores, and of tokens against cases worked out by hand."""

import hashlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from math import log

import numpy as np
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from slimformer.transformer.errors import InputError
from slimformer.transformer.metrics import TaskMetrics, changed_answers, joined
from slimformer.transformer.splits import TextRow
from slimformer.transformer.statistics import paired_intervals
from slimformer.transformer.text_metrics import (
    DECIDING,
    TOKENIZATIONS,
    Reading,
    pair_metrics,
    pair_signatures,
    perplexity_metrics,
    reading_metrics,
    signatures,
    stable_answers,
    summary_metrics,
    token_accuracy_metrics,
    translation_metrics,
)

SENTENCE = "the cat sat on a mat , and 3.5 dogs (big) ran -- home . Grüße 中文 don't it's é"
WORDS = SENTENCE.split()


def corpus(n: int, seed: int, noise: float = 0.3) -> tuple[list[str], list[str]]:
    """References, and texts like them: words changed, some cut short, one empty, one of the reference itself."""
    rng = np.random.default_rng(seed)
    references = [" ".join(rng.choice(WORDS, rng.integers(1, 25))) for _ in range(n)]
    hypotheses = [
        " ".join(str(rng.choice(WORDS)) if rng.random() < noise else word for word in text.split()[: rng.integers(30)])
        for text in references
    ]
    return ["", references[1], *hypotheses[2:]], references


def groups(n: int) -> list[str]:
    return [str(i) for i in range(n)]


@pytest.mark.parametrize("tokenization", TOKENIZATIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_bleu_and_chrf_are_sacrebleus_to_the_last_bit(seed: int, tokenization: str) -> None:
    hypotheses, references = corpus(40, seed)
    metrics = translation_metrics(hypotheses, references, groups(40), tokenization=tokenization)
    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenization, force=True).score
    assert metrics.values() == {"BLEU": bleu, "chrF": sacrebleu.corpus_chrf(hypotheses, [references]).score}
    assert 20 < bleu < 80
    assert (metrics.names, metrics.deciding) == (("BLEU", "chrF"), "BLEU")


@pytest.mark.parametrize("text", ["", "a", "entirely other words", "the cat"])
def test_corpora_with_hardly_a_match_are_scored_as_sacrebleu_scores_them(text: str) -> None:
    metrics = translation_metrics([text], ["the cat sat on the mat"], ["1"])
    bleu = sacrebleu.corpus_bleu([text], [["the cat sat on the mat"]]).score
    assert metrics.values() == {"BLEU": bleu, "chrF": sacrebleu.corpus_chrf([text], [["the cat sat on the mat"]]).score}


def test_bleu_by_hand() -> None:
    # of 5, 4, 3 and 2 n-grams 4, 3, 2 and 1 are in the reference, which is two words longer
    metrics = translation_metrics(["a b c d x"], ["a b c d e f g"], ["1"])
    precision = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert metrics.values()["BLEU"] == pytest.approx(100 * np.exp(1 - 7 / 5) * precision)
    assert translation_metrics(["a b c d"], ["a b c d"], ["1"]).values() == pytest.approx({"BLEU": 100, "chrF": 100})


def test_a_resample_is_scored_as_a_corpus() -> None:
    first, references = corpus(30, 2)
    second, _ = corpus(30, 2, noise=0.6)
    names = np.array(["x"] * 12 + ["y"] * 18)
    metrics = [translation_metrics(texts, references, names.tolist()) for texts in (first, second)]
    intervals = paired_intervals(metrics[0].statistics, metrics[1].statistics, names, metrics[0].aggregate)

    def score(name: str, texts: list[str], chosen: np.ndarray) -> float:
        corpus_score = {"BLEU": sacrebleu.corpus_bleu, "chrF": sacrebleu.corpus_chrf}[name]
        return corpus_score([texts[i] for i in chosen], [[references[i] for i in chosen]]).score

    x, y = (np.flatnonzero(names == name) for name in ("x", "y"))
    for name in ("BLEU", "chrF"):
        draws = [np.concatenate(draw) for draw in ((x, x), (x, y), (y, y))]
        differences = [score(name, second, draw) - score(name, first, draw) for draw in draws]
        assert (intervals[name].low, intervals[name].high) == (min(differences), max(differences))
        assert intervals[name].difference == differences[1] < 0


def test_signatures_are_sacrebleus() -> None:
    bleu, chrf = sacrebleu.BLEU(tokenize="zh"), sacrebleu.CHRF()
    for metric in (bleu, chrf):
        metric.corpus_score(["a b"], [["a b"]])
    assert signatures("zh") == {"BLEU": str(bleu.get_signature()), "chrF": str(chrf.get_signature())}
    assert signatures()["BLEU"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_answers_are_the_same_for_the_same_text() -> None:
    answers = stable_answers(["ein Haus", "a", "ein Haus", "ein  Haus", ""])
    assert len(set(answers.tolist())) == 4
    assert answers[0] == answers[2] == np.frombuffer(hashlib.sha256(b"ein Haus").digest()[:8], "<i8")[0]
    references = ["a b", "c d", "e f"]
    before = translation_metrics(["a", "b", "c"], references, groups(3))
    after = translation_metrics(["a", "x", "c"], references, groups(3))
    assert changed_answers(before, after) == pytest.approx(1 / 3)
    assert changed_answers(summary_metrics(["a", "b", "c"], references, groups(3)), after) == pytest.approx(1 / 3)
    assert stable_answers(["half a pair: \ud800"]).shape == (1,)


def test_texts_that_already_end_in_tokenized_full_stops_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    translation_metrics(["the cat ."] * 200, ["the cat ."] * 200, groups(200))
    assert caplog.records == []


def test_rouge_by_hand() -> None:
    # words in common: the, cat; bigrams: the cat; longest common subsequence: the cat
    metrics = summary_metrics(["The cat sat."], ["the cat on the mat"], ["1"])
    expected = {"ROUGE-1": 200 * 2 / (3 + 5), "ROUGE-2": 200 * 1 / (2 + 4), "ROUGE-L": 200 * 2 / (3 + 5)}
    assert metrics.values() == pytest.approx(expected)
    swapped = summary_metrics(["sat the cat"], ["the cat sat"], ["1"])
    assert swapped.values() == pytest.approx({"ROUGE-1": 100, "ROUGE-2": 50, "ROUGE-L": 100 * 2 / 3})
    assert metrics.deciding == "ROUGE-L"


@pytest.mark.parametrize("stem", [False, True])
def test_rouge_is_the_mean_of_rouge_scores_f_measures(stem: bool) -> None:
    hypotheses, references = corpus(40, 3)
    metrics = summary_metrics(hypotheses, references, groups(40), stem=stem)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=stem)
    scores = [scorer.score(target, text) for text, target in zip(hypotheses, references, strict=True)]
    for name, kind in (("ROUGE-1", "rouge1"), ("ROUGE-2", "rouge2"), ("ROUGE-L", "rougeL")):
        assert metrics.values()[name] == pytest.approx(100 * np.mean([score[kind].fmeasure for score in scores]))
    stems = summary_metrics(["running fast"], ["runs fast"], ["1"], stem=stem)
    assert stems.values()["ROUGE-1"] == (100 if stem else 50)


def test_pairs_are_scored_by_their_task() -> None:
    hypotheses, references = corpus(30, 5)
    found = pair_metrics("summarization", hypotheses, references, groups(30))
    scorer = RougeScorer(["rougeL"])
    words = [["".join(c for c in text if c.isascii()) for text in texts] for texts in (hypotheses, references)]
    scores = [scorer.score(target, text)["rougeL"].fmeasure for text, target in zip(*words, strict=True)]
    of_ascii = pair_metrics("summarization", *words, groups(30))
    assert of_ascii.values()["ROUGE-L"] == pytest.approx(100 * np.mean(scores), rel=1e-12)
    assert (found.deciding, found.names) == (DECIDING["summarization"], ("ROUGE-1", "ROUGE-2", "ROUGE-L"))
    # of 4 words "grün ist der Baum" and 3 words "der grüne Baum": der and Baum are common, in this order
    by_hand = pair_metrics("summarization", ["Grün ist der Baum."], ["der grüne Baum"], ["1"]).values()
    assert by_hand == pytest.approx({"ROUGE-1": 100 * 4 / 7, "ROUGE-2": 0, "ROUGE-L": 100 * 4 / 7})
    translated = pair_metrics("translation", hypotheses, references, groups(30))
    assert translated.values() == translation_metrics(hypotheses, references, groups(30)).values()
    assert translated.deciding == DECIDING["translation"] == "BLEU"
    assert pair_signatures("translation") == signatures()
    assert pair_signatures("summarization").keys() == {"ROUGE"}
    assert f"rouge-score:{version('rouge-score')}" in pair_signatures("summarization")["ROUGE"]


def test_words_beyond_ascii() -> None:
    def rouge(hypothesis: str, reference: str, words: str) -> float:
        return summary_metrics([hypothesis], [reference], ["1"], words=words).values()["ROUGE-1"]

    assert rouge("grün blau", "grüne blau", "ascii") == pytest.approx(100 * 2 / 3)  # gr n blau, gr ne blau
    assert rouge("GRÜN_Blau", "grüne blau", "unicode") == 50
    assert rouge("дом, кот", "дом и кот", "unicode") == pytest.approx(100 * 4 / 5)
    assert rouge("हिन्दी", "हिन्दा", "unicode") == 0  # one word each: vowel signs belong to it
    assert rouge("我 爱你", "我爱他", "char") == pytest.approx(100 * 2 / 3)
    assert rouge("the cat", "--", "unicode") == 0
    hypotheses, references = (["".join(c for c in text if c.isascii()) for text in texts] for texts in corpus(30, 4))
    ascii_words, unicode_words = (
        summary_metrics(hypotheses, references, groups(30), words=words).values() for words in ("ascii", "unicode")
    )
    assert ascii_words == unicode_words


def test_ascii_words_of_another_script_are_refused() -> None:
    with pytest.raises(InputError, match="10 of the 15 letters of the references are not a-z") as caught:
        summary_metrics(["дом"] * 2, ["большой", "house дом"], groups(2))
    assert "choose the words unicode or char" in str(caught.value)
    assert summary_metrics(["cat"] * 2, ["дом", "cat"], groups(2)).values()["ROUGE-1"] == 50


def test_what_the_metrics_of_texts_refuse() -> None:
    for metrics in (translation_metrics, summary_metrics):
        with pytest.raises(ValueError, match="not 1, 2 and 2"):
            metrics(["a"], ["a", "b"], ["1", "2"])
        with pytest.raises(ValueError, match="not 1, 1 and 2"):
            metrics(["a"], ["a"], ["1", "2"])
        with pytest.raises(InputError, match="no example"):
            metrics([], [], [])
    with pytest.raises(InputError, match="'14a' does not exist: choose from 13a, intl, zh, char, none"):
        translation_metrics(["a"], ["a"], ["1"], tokenization="14a")
    with pytest.raises(InputError, match="'bytes' do not exist: choose from ascii, unicode, char"):
        summary_metrics(["a"], ["a"], ["1"], words="bytes")
    with pytest.raises(InputError, match="'unicode' have no stems"):
        summary_metrics(["a"], ["a"], ["1"], words="unicode", stem=True)


@pytest.mark.parametrize(
    ("module", "score", "extra"),
    [
        ("sacrebleu.metrics.bleu", lambda: translation_metrics(["a"], ["a"], ["1"]), "translation"),
        ("sacrebleu.metrics.chrf", signatures, "translation"),
        ("rouge_score.rouge_scorer", lambda: summary_metrics(["a"], ["a"], ["1"]), "summarization"),
    ],
)
def test_a_package_that_is_missing_is_named(
    module: str, score: Callable[[], object], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'slimformer\[{extra}\]'"):
        score()


def test_token_accuracy_is_of_tokens_not_of_examples() -> None:
    metrics = token_accuracy_metrics([1, 0, 6], [1, 3, 6], ["a", "b", "b"])
    assert metrics.values() == pytest.approx({"token_accuracy": 100 * 7 / 10})
    assert metrics.answers.tolist() == [1, 0, 6]
    assert token_accuracy_metrics([1], [1], ["a"], answers=stable_answers(["5 7"])).answers == stable_answers(["5 7"])


def test_perplexity_by_hand() -> None:
    # 4 tokens of probability 1/4 over 6 bytes, 2 tokens of 1/16 over 10: 16 bits
    metrics = perplexity_metrics([4 * log(4), 2 * log(16)], [4, 2], [6, 10], ["a", "b"])
    assert metrics.values() == pytest.approx(
        {"likelihood": 100 * 2 ** (-16 / 6), "perplexity": 2 ** (16 / 6), "bits_per_byte": 16 / 16}
    )
    assert metrics.deciding == metrics.names[0] == "likelihood"
    assert metrics.answers.tolist() == [139, 277]  # hundredths of 1.386 and 2.773 nats
    counted = perplexity_metrics([4 * log(4), 2 * log(16)], [4, 2], [6, 10], ["a", "b"], correct=[3, 0])
    assert counted.values() == pytest.approx(metrics.values() | {"token_accuracy": 50})
    assert counted.names == ("token_accuracy", "likelihood", "perplexity", "bits_per_byte")
    assert counted.deciding == "token_accuracy"
    assert counted.answers.tolist() == [3, 0]
    told = perplexity_metrics([1.0], [2], [3], ["a"], correct=[1], answers=[7])
    assert told.answers.tolist() == perplexity_metrics([1.0], [2], [3], ["a"], answers=[7]).answers.tolist() == [7]


def test_what_decides_falls_where_a_model_gets_worse() -> None:
    rng = np.random.default_rng(5)
    tokens, size = rng.integers(5, 50, 60), rng.integers(50, 200, 60)
    correct = rng.integers(0, tokens)
    nll = tokens * rng.normal(3, 0.2, 60)
    good = perplexity_metrics(nll, tokens, size, groups(60), correct=correct)
    worse = perplexity_metrics(1.05 * nll, tokens, size, groups(60), correct=correct - (correct > 0))
    intervals = paired_intervals(good.statistics, worse.statistics, good.groups, good.aggregate)
    for name in ("token_accuracy", "likelihood"):
        assert intervals[name].high < 0
    for name in ("perplexity", "bits_per_byte"):
        assert intervals[name].low > 0
    values, fallen = good.values(), worse.values()
    assert fallen["perplexity"] / values["perplexity"] == pytest.approx(values["likelihood"] / fallen["likelihood"])


def test_intervals_of_perplexity_equal_resampling_the_texts() -> None:
    nll, other = np.array([10.0, 4.0, 9.0]), np.array([11.0, 4.0, 6.0])
    tokens, size, names = np.array([5, 3, 2]), np.array([20, 9, 7]), np.array(["x", "x", "y"])
    first, second = (perplexity_metrics(one, tokens, size, names.tolist()) for one in (nll, other))
    interval = paired_intervals(first.statistics, second.statistics, names, first.aggregate)["perplexity"]
    differences = []
    for draw in ([0, 1, 0, 1], [0, 1, 2], [2, 2]):
        before, after = (np.exp(one[draw].sum() / tokens[draw].sum()) for one in (nll, other))
        differences.append(after - before)
    assert interval.difference == pytest.approx(differences[1])
    assert (interval.low, interval.high) == pytest.approx((min(differences), max(differences)))


def test_a_perplexity_beyond_a_double_is_infinite() -> None:
    values = perplexity_metrics([2000.0], [2], [4], ["a"]).values()
    assert (values["perplexity"], values["likelihood"]) == (np.inf, 0)


def test_token_accuracy_stands_beside_bleu() -> None:
    hypotheses, references = corpus(10, 6)
    bleu = translation_metrics(hypotheses, references, groups(10))
    both: TaskMetrics = joined(bleu, token_accuracy_metrics([3] * 10, [4] * 10, groups(10)))
    assert both.values() == bleu.values() | {"token_accuracy": 75}
    assert both.deciding == "BLEU"


@pytest.mark.parametrize(
    ("correct", "tokens", "expected"),
    [
        ([1], [1, 2], "correct must be 2 whole numbers of at least 0"),
        ([-1, 0], [1, 2], "correct must be 2 whole numbers of at least 0"),
        ([0.5, 0], [1, 2], "correct must be"),
        ([np.nan, 0], [1, 2], "correct must be"),
        ([0, 0], [1, 0], "tokens must be 2 whole numbers of at least 1"),
        ([1, 3], [1, 2], "example 1 has more correct tokens than tokens"),
    ],
)
def test_counts_that_do_not_fit_are_refused(correct: list[float], tokens: list[int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        token_accuracy_metrics(correct, tokens, ["a", "b"])
    with pytest.raises(ValueError, match=expected):
        perplexity_metrics([1.0, 1.0], tokens, [1, 1], ["a", "b"], correct=correct)


def test_likelihoods_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"likelihoods of 2 of 3 examples are not finite \(first: example 1\)"):
        perplexity_metrics([1.0, np.nan, np.inf], [1, 1, 1], [1, 1, 1], ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"nll must be \(2,\), not \(1,\)"):
        perplexity_metrics([1.0], [1, 1], [1, 1], ["a", "b"])
    with pytest.raises(ValueError, match="num_bytes must be 1 whole numbers of at least 1"):
        perplexity_metrics([1.0], [1], [0], ["a"])
    with pytest.raises(InputError, match="no example"):
        perplexity_metrics([], [], [], [])


def test_readings_of_windows_belong_to_their_texts() -> None:
    """Windows of (1, 2) and (3) nats for the first text, (0.5) for the second; every likeliest token is an answer."""
    rows = (TextRow("grün", "a"), TextRow("x", "b"))

    def read(*likeliest: int) -> TaskMetrics:
        windows = [(0, [1.0, 2.0], likeliest[:2]), (1, [0.5], likeliest[2:3]), (0, [3.0], likeliest[3:])]
        return reading_metrics(
            rows, [Reading(i, np.array(x, np.float32), np.array(best, np.int64)) for i, x, best in windows]
        )

    found = read(7, 8, 9, 4)
    assert found.statistics.tolist() == [[6, 3, 5], [0.5, 1, 1]]
    assert found.values()["perplexity"] == pytest.approx(np.exp(6.5 / 4))
    changes = [
        changed_answers(found, read(*other)) for other in ((7, 8, 9, 4), (7, 5, 9, 4), (7, 8, 9, 5), (7, 8, 3, 3))
    ]
    assert changes == [0, 0.5, 0.5, 1]
