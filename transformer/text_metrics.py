"""What generated texts and predicted tokens are worth, as statistics per example whose sums give every metric.

Translation: BLEU (Papineni et al. 2002) and chrF (Popović 2015) of the whole corpus, as sacrebleu computes them (Post
2018). The statistics are sacrebleu's own n-gram counts of each sentence, so a resample is scored as a corpus is.
Summaries: the mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004), as google's rouge-score computes them.

Tokens, predicted one by one given the text before them, with N tokens, B bytes of UTF-8 and L the sum of the negative
log likelihoods in nats:

    token_accuracy = 100 × correct / N        likelihood    = 100 / perplexity = 100 exp(−L / N)
    perplexity     = exp(L / N)               bits_per_byte = L / (B ln 2)

Budgets and intervals take a fall of the deciding metric for a loss, so what decides must be better when higher:
token_accuracy or likelihood, the geometric mean of the tokens' probabilities in per cent. A likelihood that falls by
2 % of its value is a perplexity that rises by 2.04 % of its own. Perplexity and bits per byte are better when lower,
are no points from 0 to 100, and never decide; bits per byte alone compares models with different tokens.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError
from .metrics import FloatArray, IntArray, Mean, TaskMetrics, joined
from .splits import SUMMARIZATION, TRANSLATION, TextRow

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

TRANSLATION_NAMES = ("BLEU", "chrF")
SUMMARY_NAMES = ("ROUGE-1", "ROUGE-2", "ROUGE-L")
DECIDING = {TRANSLATION: TRANSLATION_NAMES[0], SUMMARIZATION: SUMMARY_NAMES[-1]}
NEEDS_SACREBLEU = "BLEU and chrF need sacrebleu: pip install 'slimformer[translation]'"
TOKENIZATIONS = ("13a", "intl", "zh", "char", "none")  # those of sacrebleu that need no further package or download

_ROUGE = ("rouge1", "rouge2", "rougeL")
_WIDTHS = {"BLEU": 10, "chrF": 18}  # two lengths, hits and n-grams of 4 orders; three counts of 6 orders


@dataclass(frozen=True)
class CorpusScores:
    """BLEU and chrF from 10 + 18 columns of sacrebleu's counts, scored by sacrebleu: equal to the last bit."""

    tokenization: str
    names: tuple[str, ...] = TRANSLATION_NAMES

    def __call__(self, total: FloatArray, count: FloatArray) -> dict[str, FloatArray]:
        """See `Aggregate`."""
        values: dict[str, FloatArray] = {}
        column = 0
        for name, metric in _scorers(self.tokenization).items():
            rows = total[:, column : column + _WIDTHS[name]].astype(np.int64).tolist()
            values[name] = np.array([metric._compute_score_from_stats(row).score for row in rows], dtype=np.float64)
            column += _WIDTHS[name]
        return values


@dataclass(frozen=True)
class Ratio:
    """100 times the sum of the first column over the sum of the second."""

    names: tuple[str]

    def __call__(self, total: FloatArray, count: FloatArray) -> dict[str, FloatArray]:
        """See `Aggregate`."""
        return {self.names[0]: 100 * total[:, 0] / total[:, 1]}


@dataclass(frozen=True)
class Likelihood:
    """Likelihood, perplexity and bits per byte from the columns L, N and B of the module's docstring."""

    names: tuple[str, ...] = ("likelihood", "perplexity", "bits_per_byte")

    def __call__(self, total: FloatArray, count: FloatArray) -> dict[str, FloatArray]:
        """See `Aggregate`. A perplexity too large for a double is infinite."""
        nll, tokens, num_bytes = total.T
        with np.errstate(over="ignore"):
            perplexity = np.exp(nll / tokens)
        return {
            "likelihood": 100 * np.exp(-nll / tokens),
            "perplexity": perplexity,
            "bits_per_byte": nll / (num_bytes * np.log(2)),
        }


def stable_answers(texts: Sequence[str]) -> IntArray:
    """A number (n,) for each text, equal for equal texts on every machine: the first 8 bytes of its SHA-256."""
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8] for text in texts]
    return np.array([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=np.int64)


def pair_metrics(task: str, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> TaskMetrics:
    """What texts that were written are worth for a task of pairs: `translation_metrics`, or `summary_metrics`.

    Of summaries the words are those of any script, which on English are ROUGE's own.
    """
    if task == SUMMARIZATION:
        return summary_metrics(hypotheses, references, groups, words="unicode")
    return translation_metrics(hypotheses, references, groups)


def pair_signatures(task: str) -> dict[str, str]:
    """How `pair_metrics` were computed, to be printed beside their values."""
    if task == SUMMARIZATION:
        return {"ROUGE": f"F-measure|words:unicode|stem:no|rouge-score:{version('rouge-score')}"}
    return signatures()


def translation_metrics(
    hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str], *, tokenization: str = "13a"
) -> TaskMetrics:
    """BLEU (deciding) and chrF of texts against one reference each, as sacrebleu's corpus scores.

    tokenization: sacrebleu's, of BLEU's words: "13a" (its default), "intl", "zh" for Chinese, "char", or "none" for
    text that is split at spaces already. An answer is a number that stands for the text. Raises InputError for another
    tokenization, without examples, and where sacrebleu is not installed.
    """
    _check_texts(hypotheses, references, groups)
    scorers = _scorers(tokenization)
    statistics = np.hstack([_counts(name, scorers[name], hypotheses, references) for name in TRANSLATION_NAMES])
    answers = stable_answers(hypotheses)
    return TaskMetrics(CorpusScores(tokenization), statistics, _names(groups), answers, TRANSLATION_NAMES[0])


def signatures(tokenization: str = "13a") -> dict[str, str]:
    """sacrebleu's signature of each metric of `translation_metrics`, to be printed beside its value."""
    found = {}
    for name, metric in _scorers(tokenization).items():
        metric.corpus_score(["a"], [["a"]])  # a signature holds the number of references, known once one was scored
        found[name] = metric.get_signature().format()
    return found


def summary_metrics(
    hypotheses: Sequence[str],
    references: Sequence[str],
    groups: Sequence[str],
    *,
    words: str = "ascii",
    stem: bool = False,
) -> TaskMetrics:
    """Mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (deciding) against one reference each.

    words: "ascii" takes runs of a-z and 0-9 for words, as ROUGE does (of "grün" it makes "gr" and "n"); "unicode" runs
    of letters and digits of any script, the same as "ascii" on English; "char" every character, for scripts without
    spaces. stem: compare the Porter stems of English words ("ascii" alone). An answer is a number that stands for the
    text; a reference without words scores 0. Raises InputError for "ascii" where most letters are others, without
    examples, and where rouge-score is not installed.
    """
    _check_texts(hypotheses, references, groups)
    scorer = _rouge(words, stem)
    if words == "ascii":
        _check_letters(references)
    scores = [scorer.score(target, text) for text, target in zip(hypotheses, references, strict=True)]
    statistics = np.array([[score[kind].fmeasure for kind in _ROUGE] for score in scores]).reshape(-1, len(_ROUGE))
    return TaskMetrics(Mean(SUMMARY_NAMES), statistics, _names(groups), stable_answers(hypotheses), SUMMARY_NAMES[-1])


def token_accuracy_metrics(
    correct: ArrayLike, tokens: ArrayLike, groups: Sequence[str], *, answers: ArrayLike | None = None
) -> TaskMetrics:
    """The share of tokens that the model puts first, given the true text before them: of all tokens, not of examples.

    correct, tokens (n,): counts of each example. For sequence-to-sequence it needs no generation; `joined` puts it
    beside BLEU. answers (n,): numbers that stand for the predictions (`stable_answers`); the correct counts if None.
    """
    hits, counts = _whole(correct, "correct", len(groups), 0), _whole(tokens, "tokens", len(groups), 1)
    if np.any(hits > counts):
        raise ValueError(f"example {np.argmax(hits > counts)} has more correct tokens than tokens")
    shown = hits if answers is None else np.asarray(answers, dtype=np.int64)
    statistics = np.stack([hits, counts], axis=1).astype(np.float64)
    return TaskMetrics(Ratio(("token_accuracy",)), statistics, _names(groups), shown, "token_accuracy")


def perplexity_metrics(
    nll: ArrayLike,
    tokens: ArrayLike,
    num_bytes: ArrayLike,
    groups: Sequence[str],
    *,
    correct: ArrayLike | None = None,
    answers: ArrayLike | None = None,
) -> TaskMetrics:
    """Likelihood, perplexity per token and bits per byte, after token_accuracy where `correct` is given.

    nll (n,): the sum of each example's negative log likelihoods in nats; tokens, num_bytes, correct (n,): how many
    tokens were predicted, how many bytes of UTF-8 they stand for, how many were right. Token accuracy decides where it
    is known, else the likelihood: the module's docstring says why perplexity does not. answers (n,): numbers that stand
    for the predictions (`stable_answers`); if None the correct counts, or nll per token to a hundredth of a nat. Raises
    InputError for likelihoods that are not finite, ValueError for arrays or counts that do not fit.
    """
    losses = np.asarray(nll, dtype=np.float64)
    if losses.shape != (len(groups),):
        raise ValueError(f"nll must be ({len(groups)},), not {losses.shape}")
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        many = f"{bad.size} of {len(losses)} examples are not finite (first: example {bad[0]})"
        raise InputError(f"the likelihoods of {many}: the model or its numeric format is broken")
    counts, size = _whole(tokens, "tokens", len(groups), 1), _whole(num_bytes, "num_bytes", len(groups), 1)
    shown = np.rint(100 * losses / counts) if answers is None else answers
    likelihood = TaskMetrics(
        Likelihood(),
        np.stack([losses, counts, size], axis=1),
        _names(groups),
        np.asarray(shown).astype(np.int64),
        "likelihood",
    )
    if correct is None:
        return likelihood
    return joined(token_accuracy_metrics(correct, tokens, groups, answers=answers), likelihood)


class Reading(NamedTuple):
    """How a language model read a window of a text (`tokenizer.windows`).

    Attributes:
        text: the text's number.
        losses: (T,) negative log likelihoods of the window's tokens, each given those before it, in nats.
        likeliest: (T,) the tokens that the model puts first.
    """

    text: int
    losses: NDArray[np.float32]
    likeliest: IntArray


def reading_metrics(rows: Sequence[TextRow], readings: Sequence[Reading]) -> TaskMetrics:
    """`perplexity_metrics` of texts, of which every window was read; an answer stands for the likeliest tokens."""
    by_text: list[list[Reading]] = [[] for _ in rows]
    for reading in readings:
        by_text[reading.text].append(reading)
    losses = [sum(float(one.losses.sum(dtype=np.float64)) for one in parts) for parts in by_text]
    tokens = [sum(len(one.losses) for one in parts) for parts in by_text]
    answers = stable_answers([" ".join(str(number) for one in parts for number in one.likeliest) for parts in by_text])
    sizes, groups = [len(row.text.encode()) for row in rows], [row.group for row in rows]
    return perplexity_metrics(losses, tokens, sizes, groups, answers=answers)


def sentence_bleu(texts: Sequence[str], reference: str) -> list[float]:
    """BLEU of each text by itself against a reference, smoothed as sacrebleu does for sentences.

    Raises:
        InputError: sacrebleu is not installed.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError as error:
        raise InputError(NEEDS_SACREBLEU) from error
    metric = BLEU(effective_order=True)
    return [float(metric.sentence_score(text, [reference]).score) for text in texts]


def _scorers(tokenization: str) -> "dict[str, Metric]":
    """sacrebleu's metrics by name, in the order of their columns."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ModuleNotFoundError as error:
        raise InputError(NEEDS_SACREBLEU) from error
    if tokenization not in TOKENIZATIONS:
        raise InputError(f"the tokenization {tokenization!r} does not exist: choose from {', '.join(TOKENIZATIONS)}")
    return {"BLEU": BLEU(tokenize=tokenization, force=True), "chrF": CHRF()}  # force: no warnings on a log


def _counts(name: str, metric: "Metric", hypotheses: Sequence[str], references: Sequence[str]) -> FloatArray:
    """sacrebleu's counts of each sentence, (n, width): those that its own significance tests resample."""
    counts = metric._extract_corpus_statistics(hypotheses, [references])
    return np.array(counts, dtype=np.float64).reshape(-1, _WIDTHS[name])


def _unicode_words(text: str) -> list[str]:
    """Runs of letters, digits and the marks on them."""
    return "".join(sign if sign.isalnum() or unicodedata.category(sign)[0] == "M" else " " for sign in text).split()


def _characters(text: str) -> list[str]:
    return list("".join(text.split()))


_WORDS: dict[str, Callable[[str], list[str]] | None] = {
    "ascii": None,  # rouge-score's own
    "unicode": _unicode_words,
    "char": _characters,
}


class _Words:
    """A tokenizer in the form that rouge-score takes."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in lower case."""
        return self._split(text.lower())


def _rouge(words: str, stem: bool) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise InputError("ROUGE needs rouge-score: pip install 'slimformer[summarization]'") from error
    if words not in _WORDS:
        raise InputError(f"the words {words!r} do not exist: choose from {', '.join(_WORDS)}")
    if stem and words != "ascii":
        raise InputError(f"the words {words!r} have no stems: take ascii, or leave the stems out")
    split = _WORDS[words]
    return RougeScorer(_ROUGE, use_stemmer=stem, tokenizer=None if split is None else _Words(split))


def _check_letters(references: Sequence[str]) -> None:
    letters = sum(sign.isalpha() for text in references for sign in text)
    latin = sum(sign.isalpha() and sign.isascii() for text in references for sign in text)
    if 2 * latin < letters:
        found = f"{letters - latin} of the {letters} letters of the references are not a-z"
        raise InputError(f"{found}, and ascii words would leave them out: choose the words unicode or char")


def _check_texts(hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str]) -> None:
    if not len(hypotheses) == len(references) == len(groups):
        lengths = f"{len(hypotheses)}, {len(references)} and {len(groups)}"
        raise ValueError(f"hypotheses, references and groups must be as many as each other, not {lengths}")


def _names(groups: Sequence[str]) -> NDArray[np.str_]:
    return np.array(groups, dtype=np.str_)


def _whole(values: ArrayLike, what: str, n: int, least: int) -> IntArray:
    counts = np.asarray(values)
    if counts.shape != (n,) or np.any((counts < least) | (counts != np.rint(counts))):
        raise ValueError(f"{what} must be {n} whole numbers of at least {least}")
    return counts.astype(np.int64)
