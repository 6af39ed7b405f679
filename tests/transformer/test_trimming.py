"""Trimmed tokenizers: what stays, every number in the file, and that texts of kept entries get the same tokens."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from slimformer.transformer.errors import InputError
from slimformer.transformer.subwords import KINDS, special_ids, train_subwords
from slimformer.transformer.tokenizer import TextEncoder, wordpiece_from_vocab
from slimformer.transformer.trimming import Entries, from_ranges, to_ranges, trim_tokenizer

RUNS = settings(deadline=None, max_examples=200, derandomize=True)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcd"
STEMS = ["haus", "garten", "über", "größe", "freundlich", "open", "close", "freeze", "row", "2023", "schließen"]


def subword_texts() -> list[str]:
    """Seeded runs of words with endings."""
    rng = np.random.default_rng(0)
    return [
        " ".join(str(rng.choice(STEMS)) + str(rng.choice(["", "s", "en", "ung"])) for _ in range(rng.integers(3, 12)))
        for _ in range(200)
    ]


SUBWORDS = {kind: train_subwords(subword_texts(), kind=kind, vocab_size=420, special_tokens=["<de>"]) for kind in KINDS}


def pieces(tokenizer: str, text: str) -> list[str]:
    return Tokenizer.from_str(tokenizer).encode(text, add_special_tokens=False).tokens


def entry_texts(tokenizer: str) -> list[str]:
    """Every entry in the order of the ids."""
    vocab = Tokenizer.from_str(tokenizer).get_vocab()
    assert sorted(vocab.values()) == list(range(len(vocab)))
    return sorted(vocab, key=vocab.__getitem__)


def kept_texts(tokenizer: str, wanted: Sequence[str]) -> list[str]:
    """What stays beside the entries wanted; the new file must number it by rank."""
    ids = Tokenizer.from_str(tokenizer).get_vocab()
    small, kept = trim_tokenizer(tokenizer, [ids[entry] for entry in wanted])
    by_id = {number: entry for entry, number in ids.items()}
    assert list(kept) == sorted(set(kept))
    assert entry_texts(small) == [by_id[number] for number in kept]
    return entry_texts(small)


# --- the same tokens ---


def longest_matches(vocab: set[str], word: str) -> list[str]:
    """WordPiece, as Devlin et al. wrote it down."""
    found: list[str] = []
    while word:
        prefix = "##" if found else ""
        ends = [end for end in range(len(word), 0, -1) if prefix + word[:end] in vocab]
        if not ends:
            return ["[UNK]"]
        found.append(prefix + word[: ends[0]])
        word = word[ends[0] :]
    return found


SYMBOLS = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
PARTS = st.text(LETTERS, min_size=2, max_size=4)
PIECES = st.sets(st.one_of(PARTS, PARTS.map("##{}".format)), min_size=1, max_size=40)


@RUNS
@given(PIECES, st.data(), st.lists(st.text(LETTERS, min_size=1, max_size=9), min_size=1, max_size=8))
def test_wordpiece_keeps_the_tokens_of_kept_entries(longer: set[str], data: Any, words: list[str]) -> None:
    vocab = [*SPECIAL, *sorted(longer), *SYMBOLS]
    wanted = data.draw(st.sets(st.sampled_from(sorted(longer))))
    tokenizer = wordpiece_from_vocab("\n".join(vocab))
    small, _ = trim_tokenizer(tokenizer, [vocab.index(entry) for entry in wanted])
    known = {*SYMBOLS, *wanted}
    assert set(entry_texts(small)) == known | set(SPECIAL)
    for word in words:
        before, after = pieces(tokenizer, word), pieces(small, word)
        assert after == longest_matches(known, word)
        assert after == before or not known.issuperset(before)


@pytest.mark.parametrize("kind", KINDS)
def test_subwords_keep_the_tokens_of_kept_entries(kind: str) -> None:
    """Of every word by itself: a third of the entries goes, and some words lose a piece and others none."""
    tokenizer, same, other = SUBWORDS[kind], 0, 0
    old, words = Tokenizer.from_str(tokenizer), sorted({word for text in subword_texts() for word in text.split()})
    for offset in range(3):
        small, kept = trim_tokenizer(tokenizer, [i for i in range(old.get_vocab_size()) if i % 3 != offset])
        assert len(kept) < old.get_vocab_size()
        new, stays = Tokenizer.from_str(small), set(kept)
        for word in [before + word for word in words for before in ("", " ")]:
            before, after = (one.encode(word, add_special_tokens=False) for one in (old, new))
            assert new.decode(after.ids) == word
            if stays.issuperset(before.ids):
                assert after.tokens == before.tokens
                assert [kept[i] for i in after.ids] == before.ids
                same += 1
            else:
                assert len(after.ids) > len(before.ids)
                other += 1
    assert min(same, other) > 20


PARTLY = st.lists(st.sampled_from(["haus", "gar", "ten", "en", "ung", "ü", "s", " ", "2", "<de>", "中"]), max_size=8)


@RUNS
@given(PARTLY.map("".join), st.sets(st.integers(0, 200)))
def test_subwords_of_any_text(text: str, gone: set[int]) -> None:
    for tokenizer in SUBWORDS.values():
        old = Tokenizer.from_str(tokenizer)
        small, kept = trim_tokenizer(tokenizer, sorted(set(range(old.get_vocab_size())) - {260 + i for i in gone}))
        new = Tokenizer.from_str(small)
        before, after = old.encode(text), new.encode(text)
        assert new.decode(after.ids) == old.decode(before.ids)
        assert after.tokens == before.tokens or not set(kept).issuperset(before.ids)


LOOPED = models.BPE(
    {"a": 0, "b": 1, "c": 2, "ab": 3, "ba": 4, "aba": 5, "abac": 6, "bc": 7, "cc": 8},
    [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a"), ("aba", "c"), ("b", "c")],
)


def test_bpe_keeps_the_parts_of_every_merge_that_makes_an_entry() -> None:
    tokenizer = Tokenizer(LOOPED).to_str()
    assert kept_texts(tokenizer, ["abac"]) == ["a", "b", "c", "ab", "ba", "aba", "abac"]
    assert kept_texts(tokenizer, ["ba", "cc"]) == ["a", "b", "c", "ba", "cc"]
    small, kept = trim_tokenizer(tokenizer, [6])
    assert kept == (0, 1, 2, 3, 4, 5, 6)
    assert json.loads(small)["model"]["merges"] == [
        ["b", "a"], ["a", "b"], ["a", "ba"], ["ab", "a"], ["aba", "c"]
    ]  # fmt: skip
    assert json.loads(trim_tokenizer(tokenizer, [4])[0])["model"]["merges"] == [["b", "a"]]


def test_merges_as_older_files_write_them() -> None:
    data = json.loads(Tokenizer(LOOPED).to_str())
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    assert trim_tokenizer(json.dumps(data), [5]) == trim_tokenizer(Tokenizer(LOOPED).to_str(), [5])


def test_unigram_keeps_the_lowest_score_which_says_what_is_unknown_costs() -> None:
    """An unknown x costs 10 more than the lowest score: -52 makes xa|b|c (-60) better than x|abc (-63)."""
    scores = [("<unk>", 0.0), ("a", -30.0), ("b", -20.0), ("c", -20.0), ("z", -5.0)]
    longer = [("bb", -3.0), ("xa", -20.0), ("abc", -1.0), ("zz", -52.0)]
    tokenizer = Tokenizer(models.Unigram(scores + longer, unk_id=0)).to_str()
    assert pieces(tokenizer, "xabc") == ["xa", "b", "c"]
    small, kept = trim_tokenizer(tokenizer, [7])
    assert kept == (0, 1, 2, 3, 4, 6, 7, 8)
    assert pieces(small, "xabc") == ["xa", "b", "c"]


# --- what stays ---


def test_what_always_stays_of_wordpiece() -> None:
    vocab = ["dog", "cat", *SPECIAL, "c", "a", "t", "##a", "##t", "##at", "zoo", "o", "##", "#", "###", "##o", "##dog"]
    tokenizer = wordpiece_from_vocab("\n".join(vocab))
    gone = {"cat", "##at", "##"}  # zoo, dog: there is no z, no ##g
    assert kept_texts(tokenizer, []) == [entry for entry in vocab if entry not in gone]
    assert kept_texts(tokenizer, ["##at"]) == [entry for entry in vocab if entry not in gone - {"##at"}]
    signless = [*SPECIAL, "a", "##a", "aa", "##"]
    assert kept_texts(wordpiece_from_vocab("\n".join(signless)), []) == [*SPECIAL, "a", "##a", "##"]


def test_what_always_stays_of_subwords() -> None:
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    for tokenizer in SUBWORDS.values():
        small, kept = trim_tokenizer(tokenizer, [])
        assert set(entry_texts(small)) == {"<pad>", "<s>", "</s>", "<de>"} | alphabet
        assert kept[:4] == (0, 1, 2, 3)
        assert special_ids(small) == {"<pad>": 0, "<s>": 1, "</s>": 2, "<de>": 3}


def test_bytes_and_the_unknown_token_stay() -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = ["a", "ab", "b", "<0xGG>", "<0x00>>", "bab", "<unknown>", *bytes_, *"<0xG>"]
    ids = {entry: number for number, entry in enumerate(vocab)}
    merges = [("a", "b"), ("b", "ab")]
    bpe = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unknown>"))
    assert kept_texts(bpe.to_str(), []) == ["a", "b", "<unknown>", *bytes_, *"<0xG>"]
    small, _ = trim_tokenizer(bpe.to_str(), [])
    assert pieces(small, "abé") == ["a", "b", "<0xC3>", "<0xA9>"]
    scores = [("b", -1.0), ("ab", -9.0), ("aa", -2.0), ("a", -3.0), ("<0x0A>", -4.0), ("ba", -5.0)]
    unigram = Tokenizer(models.Unigram(scores, unk_id=2)).to_str()
    assert kept_texts(unigram, []) == ["b", "ab", "aa", "a", "<0x0A>"]  # ab has the lowest score
    assert Entries.of(unigram).unknown == 2
    assert json.loads(trim_tokenizer(unigram.replace("-9.0", "-4.5"), [])[0])["model"]["unk_id"] == 1


def test_symbols_within_and_at_the_end_of_words() -> None:
    """As in GPT (Radford et al. 2018): a word's last character is an entry of its own kind."""
    vocab = ["a", "##a", "a</w>", "##b</w>", "##b", "ab</w>", "aa", "aab</w>", "</w>", "##ab</w>", "q</w>", "aq</w>"]
    ids = {entry: number for number, entry in enumerate(vocab)}
    merges = [("a", "##b</w>"), ("a", "##a"), ("aa", "##b</w>"), ("##a", "##b</w>"), ("a", "##b</w>")]
    model = models.BPE(ids, merges, continuing_subword_prefix="##", end_of_word_suffix="</w>", unk_token="a")
    tokenizer = Tokenizer(model).to_str()
    unspelled = ["</w>", "aq</w>"]  # no <, no ##q</w>
    symbols = ["a", "##a", "a</w>", "##b</w>", "##b"]
    assert kept_texts(tokenizer, []) == [*symbols, "</w>", "q</w>", "aq</w>"]
    assert set(kept_texts(tokenizer, ["aab</w>"])) == {*symbols, "aa", "aab</w>", "q</w>", *unspelled}
    small, _ = trim_tokenizer(tokenizer, [ids["aab</w>"]])
    assert json.loads(small)["model"]["merges"] == [["a", "##a"], ["aa", "##b</w>"]]
    assert pieces(small, "aab") == pieces(tokenizer, "aab") == ["aab</w>"]
    assert pieces(small, "ab") == ["a", "##b</w>"]


# --- every number in the file ---

PROCESSED = ["low", "oo", "ol", "lw", "wo", "ll", "l", "o", "w", "##l", "##o", "##w", "lowl"]
BEGIN, END = ("lw", 3), ("ol", 2)
PROCESSORS = {
    "template": processors.TemplateProcessing(
        single="lw $A ol ol", pair="lw $A $B ol", special_tokens=[("lw", 3), ("ol", 2)]
    ),
    "bert": processors.BertProcessing(END, BEGIN),
    "roberta": processors.RobertaProcessing(END, BEGIN, add_prefix_space=False),
}
PROCESSORS["sequence"] = processors.Sequence([processors.ByteLevel(trim_offsets=False), PROCESSORS["roberta"]])


@pytest.mark.parametrize("kind", PROCESSORS)
def test_every_id_is_renumbered(kind: str) -> None:
    """Entries that could be spelled by shorter ones stay where something beside the vocabulary names them."""
    tokenizer = Tokenizer(models.WordPiece({entry: i for i, entry in enumerate(PROCESSED)}, unk_token="ll"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = PROCESSORS[kind]
    tokenizer.add_special_tokens(["wo", "new"])
    tokenizer.add_tokens([AddedToken("extra", single_word=True)])
    tokenizer.enable_padding(pad_id=1, pad_token="oo", length=12)
    tokenizer.enable_truncation(11)
    small, kept = trim_tokenizer(tokenizer.to_str(), [])
    new = Tokenizer.from_str(small)
    assert kept == (*range(1, 12), 13, 14)
    before, after = tokenizer.encode("lo o wo newl extra zo"), new.encode("lo o wo newl extra zo")
    assert after.tokens == before.tokens
    assert [kept[number] for number in after.ids] == before.ids
    assert set(before.ids) >= {1, 2, 3, 4, 5, 13, 14}
    assert [kept[number] for number in new.encode("lo", "wo w").ids] == tokenizer.encode("lo", "wo w").ids
    assert pieces(small, "low")[:3] == ["l", "##o", "##w"]
    ids = {token["content"]: token["id"] for token in json.loads(small)["added_tokens"]}
    assert ids == {"wo": 3, "new": 11, "extra": 12}
    rest = {key: json.loads(tokenizer.to_str())[key] for key in ("truncation", "normalizer", "decoder")}
    assert {key: json.loads(small)[key] for key in rest} == rest


def test_all_that_stays_is_the_same_tokenizer() -> None:
    for tokenizer in (*SUBWORDS.values(), wordpiece_from_vocab("\n".join([*SPECIAL, *SYMBOLS, "ab"]))):
        size = Tokenizer.from_str(tokenizer).get_vocab_size()
        small, kept = trim_tokenizer(tokenizer, range(size))
        assert kept == tuple(range(size))
        assert json.loads(small) == json.loads(tokenizer)
        assert trim_tokenizer(Entries.of(tokenizer), range(size)) == (small, kept)


def test_trimming_again_is_trimming_at_once() -> None:
    for tokenizer in SUBWORDS.values():
        once, first = trim_tokenizer(tokenizer, range(0, 420, 2))
        twice, second = trim_tokenizer(once, [first.index(i) for i in first if i % 4 == 0])
        assert (twice, tuple(first[i] for i in second)) == trim_tokenizer(tokenizer, [i for i in first if i % 4 == 0])


def test_the_id_that_stands_for_padding_stays() -> None:
    vocab = ["low", "o", "##o", "##w", "l", "[UNK]"]
    tokenizer = Tokenizer(models.WordPiece({entry: i for i, entry in enumerate(vocab)}, unk_token="[UNK]")).to_str()
    assert TextEncoder(tokenizer, 9).pad_id == 0  # where none is named
    assert kept_texts(tokenizer, []) == vocab


def test_ids_that_are_no_entry_are_counted() -> None:
    vocab = {"[UNK]": 0, "a": 1, "##a": 2, "aa": 3, "aaa": 4}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]")).to_str()
    small, kept = trim_tokenizer(tokenizer, [4, 9])
    assert kept == (0, 1, 2, 4, 9)
    assert Tokenizer.from_str(small).get_vocab() == {"[UNK]": 0, "a": 1, "##a": 2, "aaa": 3}


# --- need ---


def test_what_is_merged_needs_its_parts_as_often() -> None:
    entries = Entries.of(Tokenizer(LOOPED).to_str())
    assert entries.parts == {3: {0, 1}, 4: {0, 1}, 5: {0, 1, 3, 4} - {1} | {0}, 6: {5, 2}, 7: {1, 2}}
    assert list(entries.needed({6: 4, 7: 9, 0: 1, 8: 5, 3: 0}).items()) == [
        (1, 9), (2, 9), (7, 9), (8, 5), (0, 4), (3, 4), (4, 4), (5, 4), (6, 4)
    ]  # fmt: skip
    assert entries.needed({}) == {}
    backwards = models.BPE({"aab": 0, "ab": 1, "b": 2, "a": 3}, [("a", "b"), ("a", "ab")])
    assert list(Entries.of(Tokenizer(backwards).to_str()).needed({0: 2})) == [2, 3, 1, 0]


@RUNS
@given(st.dictionaries(st.integers(4, 380), st.integers(1, 9)), st.integers(1, 200))
def test_the_most_needed_are_closed_under_merges(counts: dict[int, int], most: int) -> None:
    entries = Entries.of(SUBWORDS["bpe"])
    counts = {number: count for number, count in counts.items() if number < len(entries.ids)}
    chosen = set(list(entries.needed(counts))[:most])
    assert entries.closed(chosen) == chosen | entries.always
    if most > 190:
        assert set(counts) <= set(entries.needed(counts))


# --- ranges ---


def test_ranges_by_hand() -> None:
    assert to_ranges([0, 100, 101, 103, 104, 105]) == "0,100-101,103-105"
    assert from_ranges("0,100-101,103-105") == (0, 100, 101, 103, 104, 105)
    assert from_ranges(to_ranges([])) == ()


@RUNS
@given(st.sets(st.integers(0, 99)))
def test_ranges_give_the_ids_back(ids: set[int]) -> None:
    assert from_ranges(to_ranges(sorted(ids))) == tuple(sorted(ids))


# --- refusals ---


def test_words_without_pieces_are_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str()
    with pytest.raises(InputError, match="the tokenizer's model is WordLevel; entries can go from WordPiece, BPE, Uni"):
        trim_tokenizer(words, [0])


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match="is not a tokenizer that can be read"):
        trim_tokenizer("{}", [0])


def test_padding_that_is_no_entry_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.enable_padding(pad_id=7)
    with pytest.raises(InputError, match="names the id 7, which is no entry of it"):
        trim_tokenizer(tokenizer.to_str(), [0])


def test_a_row_between_entries_is_refused() -> None:
    """The library numbers added tokens behind the model's own, one after the other."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 3, "ba": 7}, [("a", "b"), ("b", "a")]))
    tokenizer.add_special_tokens(["<x>"])
    assert tokenizer.token_to_id("<x>") == 4
    assert trim_tokenizer(tokenizer.to_str(), [3])[1] == (0, 1, 3, 4)
    with pytest.raises(InputError, match="an id that must stay is no entry of it and stands between others"):
        trim_tokenizer(tokenizer.to_str(), [2, 3])
