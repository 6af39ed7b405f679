"""Tokenizers against transformers' own, and the arrays made of their ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import BertTokenizerFast

from slimformer.transformer.errors import InputError
from slimformer.transformer.tokenizer import TextEncoder, length_batches, pad, windows, wordpiece_from_vocab

try:
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy
except ModuleNotFoundError:  # transformers 4, which the tools of `make test-slow` need
    from transformers.models.bert.tokenization_bert import BertTokenizer as BertTokenizerLegacy

WORDS = (
    "the freeze first row of a sheet cafe café naïve un ##freeze ##s ##ing print ##er über uber The Freeze 中 文 中文"
)
SYMBOLS = "! ' ( ) , - . : ; ? [ ] ## @ % & * + = < > | $ € 0 1 2 3 ##0 ##1 ##2 ##3"
VOCAB = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *SYMBOLS.split()]) + "\n"
SENTENCES = [
    "Freeze the first row of a sheet.",
    "unfreezes, PRINTERS; printing?",
    "Café naïve über — the",
    "the\tfirst\u00a0row\u200b of\r\nsheets\x00\ufffd",
    "中文 the 中 first文",
    "unknownword 2013-10-23 $3.20 [MASK] the",
    "",
    "   ",
    "x" * 101 + " the",
]
DECOMPOSED = "cafe\u0301 u\u0308ber"  # transformers' two tokenizers differ here: only the slow one composes first
BASIC = wordpiece_from_vocab(VOCAB)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [None, True, False])
@pytest.mark.parametrize("chinese", [True, False])
def test_wordpiece_equals_transformers(
    lowercase: bool, strip_accents: bool | None, chinese: bool, tmp_path: Path
) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(VOCAB, encoding="utf-8")
    options = {"do_lower_case": lowercase, "strip_accents": strip_accents, "tokenize_chinese_chars": chinese}
    encoder = TextEncoder(wordpiece_from_vocab(VOCAB, lowercase, strip_accents, chinese), max_length=64)
    slow, fast = BertTokenizerLegacy(str(path), **options), BertTokenizerFast(str(path), **options)
    assert encoder.encode(SENTENCES) == [slow.encode(sentence) for sentence in SENTENCES]
    assert encoder.encode([*SENTENCES, DECOMPOSED]) == [fast.encode(sentence) for sentence in [*SENTENCES, DECOMPOSED]]


def test_options_change_the_ids() -> None:
    encoders = [
        TextEncoder(wordpiece_from_vocab(VOCAB, **options), 64)
        for options in ({}, {"lowercase": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False})
    ]
    assert len({str(encoder.encode(SENTENCES)) for encoder in encoders}) == 4


def test_wordpiece_pair_and_decoder_equal_transformers(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(VOCAB, encoding="utf-8")
    reference = BertTokenizerFast(str(path))
    ours, theirs = Tokenizer.from_str(BASIC), reference("the row", "unfreezes a sheet")
    coded = ours.encode("the row", "unfreezes a sheet")
    assert (coded.ids, coded.type_ids) == (theirs["input_ids"], theirs["token_type_ids"])
    assert ours.decode(coded.ids) == reference.decode(coded.ids, skip_special_tokens=True)


def test_vocab_lines_are_ids() -> None:
    vocab = "[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\na\u2028b\r\nthe\r\n\r\n"
    encoder = TextEncoder(wordpiece_from_vocab(vocab), 8)
    assert encoder.encode(["the"]) == [[2, 5, 3]]  # a line separator within a token starts no line
    assert encoder.vocab_size == 6


def test_vocab_size_covers_the_highest_id() -> None:
    assert TextEncoder(BASIC, 8).vocab_size == len(VOCAB.splitlines())
    doubled = "[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\nrow\nthe\nend\n"
    encoder = TextEncoder(wordpiece_from_vocab(doubled), 8)
    assert (encoder.vocab_size, encoder.encode(["the end"])) == (8, [[2, 6, 7, 3]])


@pytest.mark.parametrize("lost", ["[UNK]", "[CLS]", "[SEP]"])
def test_vocab_without_special_token_is_refused(lost: str) -> None:
    with pytest.raises(InputError, match=rf"lacks \[{lost[1:-1]}\]"):
        wordpiece_from_vocab(VOCAB.replace(lost, "other"))


def test_truncation_keeps_the_special_tokens() -> None:
    whole, cut = TextEncoder(BASIC, 64), TextEncoder(BASIC, 4)
    (ids,) = whole.encode(["the first row of a sheet"])
    assert cut.encode(["the first row of a sheet", "row"]) == [[*ids[:3], ids[-1]], [ids[0], ids[3], ids[-1]]]


@pytest.mark.parametrize(("positions", "sizes"), [(9, [8]), (8, [8]), (7, [7, 1]), (4, [4, 4]), (3, [3, 3, 2])])
def test_windows(positions: int, sizes: list[int]) -> None:
    """Six words and two marks, never cut off; a text of no word, its marks."""
    (ids,) = TextEncoder(BASIC, 64).encode(["the first row of a sheet"])
    found = windows(["", "the first row of a sheet"], BASIC, positions)
    assert found[0] == (0, [ids[0], ids[-1]])
    assert [number for number, _ in found[1:]] == [1] * len(sizes)
    assert [len(window) for _, window in found[1:]] == sizes
    assert [token for _, window in found[1:] for token in window] == ids


def test_padding_and_truncation_of_the_json_are_overridden() -> None:
    tokenizer = Tokenizer.from_str(BASIC)
    tokenizer.enable_padding(length=32, pad_id=7)
    tokenizer.enable_truncation(3, direction="left")
    encoder = TextEncoder(tokenizer.to_str(), max_length=16)
    assert encoder.encode(["the first row"]) == TextEncoder(BASIC, 16).encode(["the first row"])
    assert encoder.pad_id == 7
    assert (encoder.max_length, encoder.tokenizer_json) == (16, tokenizer.to_str())


def test_pad_id_is_that_of_the_pad_token() -> None:
    moved = "[UNK]\n[CLS]\n[SEP]\n[PAD]\nthe\n"
    assert TextEncoder(wordpiece_from_vocab(moved), 8).pad_id == 3
    assert TextEncoder(wordpiece_from_vocab("[UNK]\n[CLS]\n[SEP]\nthe\n"), 8).pad_id == 0


def test_more_texts_than_one_chunk_keep_their_order() -> None:
    encoder = TextEncoder(BASIC, 8)
    words = [WORDS.split()[i % 5] for i in range(4100)]
    assert encoder.encode(words) == [encoder.encode([word])[0] for word in words]
    assert encoder.encode([]) == []


def test_decoding_is_that_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text(VOCAB, encoding="utf-8")
    reference, encoder = BertTokenizerFast(str(path)), TextEncoder(BASIC, 64)
    rows = encoder.encode(SENTENCES)
    expected = [reference.decode(row, skip_special_tokens=True) for row in rows]
    assert encoder.decode_batch(rows) == [encoder.decode(row) for row in rows] == expected
    assert expected[0] == "freeze the first row of a sheet."
    assert encoder.decode_batch([[], rows[0]]) == ["", expected[0]]
    assert encoder.decode_batch([]) == []
    assert encoder.decode(np.array([*rows[0], 0, 0])) == expected[0]


@pytest.mark.parametrize("wrong", [-1, len(VOCAB.splitlines()), 2**40])
def test_decoding_refuses_ids_outside_of_the_vocabulary(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"the id {wrong} is not in the vocabulary of {len(VOCAB.splitlines())}"):
        TextEncoder(BASIC, 8).decode_batch([[2, 3], [5, wrong]])


def test_what_later_tokens_can_change_is_not_settled() -> None:
    """Bytes at the end, and tokens without text, which do not end a run of bytes."""
    vocabulary = {"<pad>": 0, "</s>": 1, "the": 2, "<0xE4>": 3, "<0xBD>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([AddedToken("<de>", special=True)])
    tokenizer.add_tokens([AddedToken("plain", special=False)])
    encoder = TextEncoder(tokenizer.to_str(), 8)
    special, plain = tokenizer.token_to_id("<de>"), tokenizer.token_to_id("plain")
    rows = [[], [2], [3], [2, 3, 4], [3, 2], [2, 3, special], [2, 3, 0, 1, 4], [2, special], [2, 3, plain], [1, 2, 1]]
    assert [encoder.settled(ids) for ids in rows] == [0, 1, 0, 1, 2, 1, 1, 1, 3, 2]


def test_one_text_instead_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match="list of texts"):
        TextEncoder(BASIC, 8).encode("the")


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"version": "1.0"}), BASIC.replace("WordPiece", "Other")])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json") as caught:
        TextEncoder(text, 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [2, 0, -1])
def test_max_length_without_room_is_refused(length: int) -> None:
    with pytest.raises(InputError, match="at least 3 tokens"):
        TextEncoder(BASIC, length)


def test_pad() -> None:
    ids, mask = pad([[5, 6, 7], [8], []], pad_id=9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert ids.dtype == mask.dtype == np.int64
    assert pad([])[0].shape == (0, 0)
    assert pad([[1], [2, 3]])[0].tolist() == [[1, 0], [2, 3]]


def test_length_batches() -> None:
    batches = length_batches([3, 1, 2, 1, 3], size=2)
    assert [batch.tolist() for batch in batches] == [[1, 3], [2, 0], [4]]
    assert length_batches([], size=2) == []
    with pytest.raises(InputError, match="at least 1"):
        length_batches([1], size=0)
