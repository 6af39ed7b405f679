"""Vocabularies learned from texts: nothing is lost, nothing is left to chance, and marks come from no text."""

import json
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slimformer.transformer.errors import InputError
from slimformer.transformer.subwords import KINDS, special_ids, train_subwords
from slimformer.transformer.tables import read_rows
from slimformer.transformer.tokenizer import CONTROL_TOKENS, TextEncoder, wordpiece_from_vocab

ROOT = Path(__file__).resolve().parents[2]
STEMS = ["haus", "garten", "über", "größe", "freundlich", "open", "close", "freeze", "row", "2023", "schließen"]
HARD = [
    "Grüße aus der Straße — 1,5 Ω",
    "emoji 🙂👩\u200d👩\u200d👧 flags 🇩🇪",
    "\ttabs\t\tand   many    spaces  ",
    " leading, \n\nlines\r\n and \u2028 \u00a0 \u3000 more",
    "中文字符 日本語 हिन्दी עברית",
    "a▁b Ġc ċ <unk> <0x0A>",  # what marks spaces and bytes in other vocabularies
    "marks <s> </s> <pad> </s></s> and <mask>",
    "\x00\x01 control \ufeff\ufffd \U0010ffff",
    "",
]


def texts(count: int = 200, seed: int = 0) -> list[str]:
    """Seeded runs of words with endings."""
    rng = np.random.default_rng(seed)
    return [
        " ".join(str(rng.choice(STEMS)) + str(rng.choice(["", "s", "en", "ung"])) for _ in range(rng.integers(3, 12)))
        for _ in range(count)
    ]


TRAINED = {kind: train_subwords(texts(), kind=kind, vocab_size=320, special_tokens=["<de>"]) for kind in KINDS}
ENCODERS = {kind: TextEncoder(text, 10_000) for kind, text in TRAINED.items()}


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_text_back(kind: str, text: str) -> None:
    encoder = ENCODERS[kind]
    ids = encoder.encode([text])[0]
    assert encoder.decode(ids) == unicodedata.normalize("NFC", text)
    assert max(ids) < encoder.vocab_size <= 320


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.text(max_size=40).filter(lambda text: "<de>" not in text))
def test_decoding_gives_any_text_back(text: str) -> None:
    for encoder in ENCODERS.values():
        assert encoder.decode_batch(encoder.encode([text])) == [unicodedata.normalize("NFC", text)]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_composed_first(kind: str) -> None:
    encoder = ENCODERS[kind]
    assert encoder.encode(["gro\u0308ße"]) == encoder.encode(["größe"])
    assert encoder.decode(encoder.encode(["gro\u0308ße"])[0]) == "größe"


@pytest.mark.parametrize("kind", KINDS)
def test_marks_have_their_ids_and_come_from_no_text(kind: str) -> None:
    assert special_ids(TRAINED[kind]) == {"<pad>": 0, "<s>": 1, "</s>": 2, "<de>": 3}
    encoder = ENCODERS[kind]
    assert encoder.pad_id == 0
    (ids,) = encoder.encode(["<pad> <s>x</s> </s>"])
    assert ids[-1] == 2
    assert min(ids[:-1]) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_marks_that_fill_the_training_texts_are_learned_as_text(kind: str) -> None:
    trained = train_subwords(["<s>strike</s> <pad>"] * 50, kind=kind, vocab_size=300)
    assert special_ids(trained) == {"<pad>": 0, "<s>": 1, "</s>": 2}
    encoder = TextEncoder(trained, 100)
    (ids,) = encoder.encode(["<s>strike</s> <pad>"])
    assert encoder.decode(ids) == "<s>strike</s> <pad>"
    assert min(ids[:-1]) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_is_put_behind_every_text_and_survives_the_cut(kind: str) -> None:
    encoder, cut = ENCODERS[kind], TextEncoder(TRAINED[kind], 4)
    (ids,) = encoder.encode(["freeze the gardens"])
    assert ids.count(2) == 1
    assert ids[-1] == 2
    assert cut.encode(["freeze the gardens", ""]) == [[*ids[:3], 2], [2]]
    pair = Tokenizer.from_str(TRAINED[kind]).encode("a", "b")
    assert (pair.ids.count(2), pair.ids[-1], pair.type_ids[-1]) == (2, 2, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_further_special_tokens_are_found_in_texts_and_left_out_of_them(kind: str) -> None:
    encoder = ENCODERS[kind]
    (with_tag,), (without,) = encoder.encode(["<de>haus"]), encoder.encode(["haus"])
    assert with_tag == [3, *without]
    assert encoder.decode([1, *with_tag, 0, 0]) == "haus"


@pytest.mark.parametrize("kind", KINDS)
def test_all_bytes_are_in_the_smallest_vocabulary(kind: str) -> None:
    trained = train_subwords(texts(), kind=kind, vocab_size=259)
    encoder = TextEncoder(trained, 10_000)
    assert encoder.vocab_size == 259
    (ids,) = encoder.encode(["größe 🙂"])
    assert len(ids) == len("größe 🙂".encode()) + 1
    assert len(set(encoder.encode(["".join(map(chr, range(0x80)))])[0])) == 128 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_more_words_are_one_token_in_a_larger_vocabulary(kind: str) -> None:
    encoders = [TextEncoder(train_subwords(texts(), kind=kind, vocab_size=size), 1000) for size in (260, 280, 330)]
    lengths = [sum(map(len, encoder.encode(texts(20, seed=1)))) for encoder in encoders]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[2] < 0.7 * lengths[0]


def test_bpe_merges_the_pair_that_occurs_most() -> None:
    """Against merges worked out by counting pairs: equal counts do not occur among the first ones."""
    words = Counter({"abab": 50, "abc": 20, "bcd": 9})
    corpus = [word for word, count in words.items() for _ in range(count)]
    segments = {word: list(word) for word in words}
    expected = []
    for _ in range(3):
        pairs = Counter()
        for word, parts in segments.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = pairs.most_common(1)[0][0]
        expected.append(list(best))
        for word, parts in segments.items():
            text = " ".join(parts).replace(" ".join(best), "".join(best))
            segments[word] = text.split()
    model = json.loads(train_subwords(corpus, vocab_size=262))["model"]
    assert model["merges"] == expected == [["a", "b"], ["ab", "ab"], ["ab", "c"]]
    assert [model["vocab"][token] for token in ("ab", "abab", "abc")] == [259, 260, 261]


def test_a_pair_that_occurs_once_is_not_merged() -> None:
    assert TextEncoder(train_subwords(["abcdefgh"], vocab_size=500), 10).vocab_size == 259


def test_unigram_prefers_the_pieces_that_occur_most() -> None:
    vocabulary = json.loads(TRAINED["unigram"])["model"]["vocab"]
    scores = [score for _, score in vocabulary[4:]]
    assert scores == sorted(scores, reverse=True)
    assert vocabulary[:4] == [[token, 0.0] for token in (*CONTROL_TOKENS, "<de>")]
    known = dict(vocabulary)
    assert known["Ġ"] > known["Ġopen"] > known["x"]
    assert known["x"] == known["Ø"] == scores[-1]  # neither occurs


@pytest.mark.parametrize(("count", "size"), [(200, 260), (200, 330), (1000, 1000)])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_texts_give_an_equal_vocabulary(kind: str, count: int, size: int) -> None:
    """The trainers' hash maps have another order in every one of them."""
    rows = read_rows(ROOT / "examples" / "help-search" / "texts.jsonl.gz", ("text",))[:count]
    runs = {train_subwords([row["text"] for row in rows], kind=kind, vocab_size=size) for _ in range(8)}
    assert len(runs) == 1
    assert TextEncoder(runs.pop(), 8).vocab_size == size


def test_another_process_gives_an_equal_vocabulary() -> None:
    code = (
        "import sys; from slimformer.transformer.subwords import train_subwords\n"
        "for kind in ('bpe', 'unigram'): print(train_subwords(sys.argv[1:], kind=kind, vocab_size=300))"
    )
    words = texts(50)
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert run.stdout == "".join(f"{train_subwords(words, kind=kind, vocab_size=300)}\n" for kind in KINDS)


@pytest.mark.parametrize(("special", "least"), [([], 259), (["<de>", "<en>"], 261)])
@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_that_do_not_hold_all_bytes_are_refused(kind: str, special: list[str], least: int) -> None:
    expected = f"vocab_size {least - 1} is too small: {least - 256} special tokens and 256 bytes need at least {least}"
    with pytest.raises(InputError, match=expected):
        train_subwords(texts(), kind=kind, vocab_size=least - 1, special_tokens=special)


@pytest.mark.parametrize("empty", [[], ["", " \n\t"]])
def test_texts_without_words_are_refused(empty: list[str]) -> None:
    with pytest.raises(InputError, match=f"none of {len(empty)} texts holds a word"):
        train_subwords(empty)
    with pytest.raises(TypeError, match="list of texts"):
        train_subwords("one text")


@pytest.mark.parametrize("token", ["", "de", " de", "<", "<<", "7"])
def test_special_tokens_that_could_be_words_are_refused(token: str) -> None:
    with pytest.raises(InputError, match="could be a word or a part of one: write it as <de> is"):
        train_subwords(texts(), special_tokens=["<en>", token])


def test_special_tokens_named_twice_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="<de> occurs twice among the special tokens"):
        train_subwords(texts(), special_tokens=["<de>", "<en>", "<de>"])
    with pytest.raises(InputError, match="</s> occurs twice among the special tokens: name each once; <pad>, <s>"):
        train_subwords(texts(), special_tokens=["</s>"])
    with pytest.raises(InputError, match="'word' does not exist: choose from bpe, unigram"):
        train_subwords(texts(), kind="word")


def test_tokenizers_without_the_marks_have_no_special_ids() -> None:
    bert = wordpiece_from_vocab("[PAD]\n[UNK]\n[CLS]\n[SEP]\n<s>\nthe\n")
    with pytest.raises(InputError, match=r"has no <pad> and no </s>: train one by train_subwords"):
        special_ids(bert)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        special_ids("{")
