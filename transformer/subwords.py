"""Subword vocabularies learned from texts, as the text of a tokenizer.json.

Two ways to learn one: byte-pair merges (`bpe`, Sennrich et al. 2016) and the unigram language model (`unigram`, Kudo
2018). Both work on bytes, not on characters: a text in NFC is cut into words, numbers and signs, each with the space
before it, as GPT-2 does (Radford et al. 2019), and its UTF-8 bytes are what pieces are made of. All 256 bytes are in
the vocabulary, so nothing is ever unknown, there is no `<unk>`, and decoding gives the NFC text back to the last space.
Characters with bytes to fall back on would lose one thing: the mark for spaces, where a text holds it itself.

`<pad>`, `<s>` and `</s>` have the ids 0, 1 and 2 and come from no text: one that spells `</s>` is cut into `</`, `s`
and `>`. Encoding puts `</s>` behind a text. The start of a target is the caller's: with `ids` an encoded target, a
decoder is given `[start] + ids[:-1]` and is to predict `ids`; `special_ids` names the numbers.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .errors import InputError
from .tokenizer import CONTROL_TOKENS, parse

__all__ = ["KINDS", "special_ids", "train_subwords"]

KINDS = ("bpe", "unigram")

_MIN_COUNT = 2  # of a pair of pieces to be merged
_DECIMALS = 4  # of the unigram scores, natural logarithms: what the order of float sums changes is far below
_SPREAD = 256.5e-4  # a step of 1e-4 for each byte


def train_subwords(
    texts: Sequence[str], *, kind: str = "bpe", vocab_size: int = 8000, special_tokens: Sequence[str] = ()
) -> str:
    """Learn a vocabulary of at most `vocab_size` tokens and return it as the text of a tokenizer.json.

    special_tokens: more tokens, from id 3 on, such as the tags of languages; unlike `<pad>`, `<s>` and `</s>` they are
    found in texts, and decoding leaves them out. The vocabulary is smaller where the texts hold no more pieces. Equal
    texts give an equal result: bpe has nothing random; unigram sums floats in the order of a hash map, so its scores
    are rounded (see `_scores`). Raises InputError for texts of which none has a character that is not white space, and
    for a `vocab_size` that does not hold the special tokens and 256 bytes.
    """
    if isinstance(texts, str):
        raise TypeError("train_subwords takes a list of texts, not one text")
    _check(kind, vocab_size, special_tokens)
    if not any(text.strip() for text in texts):
        raise InputError(f"none of {len(texts)} texts holds a word: a vocabulary is learned from texts")
    tokenizer = _pipeline(models.BPE() if kind == "bpe" else models.Unigram())
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": [*CONTROL_TOKENS, *special_tokens],
        "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
        "show_progress": False,
    }
    if kind == "bpe":
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(min_frequency=_MIN_COUNT, **options))
        return _finished(_pipeline(tokenizer.model), special_tokens)
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(**options))
    scores = _scores(tokenizer, len(options["special_tokens"]), vocab_size)
    return _finished(_pipeline(models.Unigram(scores)), special_tokens)


def special_ids(tokenizer_json: str) -> dict[str, int]:
    """The ids of `<pad>`, `<s>` and `</s>`, then of the further special tokens of a tokenizer.json, by their text.

    Raises InputError for text that is no tokenizer, and for a tokenizer without one of the three.
    """
    tokenizer = parse(tokenizer_json)
    found = {token: number for token in CONTROL_TOKENS if (number := tokenizer.token_to_id(token)) is not None}
    if missing := [token for token in CONTROL_TOKENS if token not in found]:
        raise InputError(f"the tokenizer.json has no {' and no '.join(missing)}: train one by train_subwords")
    added = tokenizer.get_added_tokens_decoder().items()
    return found | {token.content: number for number, token in sorted(added) if token.special}


def _check(kind: str, vocab_size: int, special_tokens: Sequence[str]) -> None:
    if kind not in KINDS:
        raise InputError(f"the kind {kind!r} does not exist: choose from {', '.join(KINDS)}")
    every = [*CONTROL_TOKENS, *special_tokens]
    twice = sorted({token for token in every if every.count(token) > 1})
    if twice:
        there = f"{', '.join(CONTROL_TOKENS)} are always there"
        raise InputError(f"{', '.join(twice)} occurs twice among the special tokens: name each once; {there}")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = [token for token in special_tokens if len(words.pre_tokenize_str(token)) < 2]
    if plain:
        raise InputError(f"the special token {plain[0]!r} could be a word or a part of one: write it as <de> is")
    least = len(every) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < least:
        raise InputError(
            f"vocab_size {vocab_size} is too small: {len(every)} special tokens and 256 bytes need at least {least}"
        )


def _pipeline(model: models.Model) -> Tokenizer:
    """A tokenizer of bytes around a model."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _finished(tokenizer: Tokenizer, special_tokens: Sequence[str]) -> str:
    """The text of the tokenizer with `</s>` behind every text; the control tokens are in the model's vocabulary alone.

    Were they added tokens, they would be found in texts.
    """
    end = CONTROL_TOKENS[-1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B:1 {end}:1", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer.to_str(pretty=True)


def _scores(tokenizer: Tokenizer, specials: int, vocab_size: int) -> list[tuple[str, float]]:
    """Pieces and scores of a trained unigram model, in an order that does not depend on chance.

    The trainer spreads the bytes that it has hardly seen over `_SPREAD` above the lowest score, in the order of a hash
    map: here they share the lowest. It sums expected counts in such an order too, which moves a score by 4e-11 at most
    (measured), so scores are rounded; equal ones are in the order of their text. Where little more than the bytes is
    asked for, it returns more than that, and the lowest pieces are left out.
    """
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    learned = [(piece, round(score, _DECIMALS)) for piece, score in vocabulary[specials:]]
    lowest = min(score for _, score in learned)
    single = [(byte, lowest if score <= lowest + _SPREAD else score) for byte, score in learned if len(byte) == 1]
    longer = sorted((entry for entry in learned if len(entry[0]) > 1), key=_rank)[: vocab_size - specials - len(single)]
    return [(token, 0.0) for token, _ in vocabulary[:specials]] + sorted(single + longer, key=_rank)


def _rank(entry: tuple[str, float]) -> tuple[float, str]:
    return -entry[1], entry[0]
