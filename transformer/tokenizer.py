"""From texts to token ids and padded arrays.

A tokenizer is the text of a `tokenizer.json` (https://github.com/huggingface/tokenizers); older BERT checkpoints hold a
`vocab.txt`, from which the same text is built (Devlin et al. 2019: normalise, split at spaces and punctuation, then the
longest matching word pieces from the left). The training side and the serving side read this file: it needs no torch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from .errors import InputError

IntArray = NDArray[np.int64]

_WHOLE = 2**30  # tokens: no text is cut before it is in windows
_CHUNK = 4096  # texts tokenized at once: what truncation cuts off is kept in memory until the chunk is done
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))  # what vocabularies of characters fall back on
MASK_TOKENS = ("[MASK]", "<mask>")
_PAD_TOKENS = ("[PAD]", "<pad>", "<PAD>")

# Padding, start and end of the vocabularies that `subwords` trains: marks between texts, never a part of one.
CONTROL_TOKENS = ("<pad>", "<s>", "</s>")


class TextEncoder:
    """Texts to lists of token ids, special tokens included, cut at `max_length` tokens.

    The padding and the truncation that the tokenizer.json asks for are replaced: nothing is padded here, and the cut
    is on the right at `max_length`. `vocab_size` is the highest id + 1, the rows that an embedding table must have.
    `pad_id` is the id that the tokenizer pads with (0 where it names none), `mask_id` that of its mask token, if any.
    """

    def __init__(self, tokenizer_json: str, max_length: int) -> None:
        """Read the tokenizer; raises InputError for text that is no tokenizer and for a `max_length` without room."""
        tokenizer = parse(tokenizer_json)
        special = tokenizer.num_special_tokens_to_add(is_pair=False)
        if max_length <= special:
            raise InputError(f"max_length {max_length} leaves no room for text: give at least {special + 1} tokens")
        self.tokenizer_json = tokenizer_json
        self.max_length = max_length
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.pad_id = _pad_id(tokenizer)
        found = [number for token in MASK_TOKENS if (number := tokenizer.token_to_id(token)) is not None]
        self.mask_id: int | None = found[0] if found else None
        self._control = {tokenizer.token_to_id(token) for token in CONTROL_TOKENS} - {None}
        silent = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._unsettled = self._control | silent | {tokenizer.token_to_id(token) for token in _BYTE_TOKENS} - {None}
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length, stride=0, strategy="longest_first", direction="right")
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, at most `max_length` each, not padded."""
        if isinstance(texts, str):
            raise TypeError("encode takes a list of texts, not one text")
        ids: list[list[int]] = []
        for start in range(0, len(texts), _CHUNK):
            ids += [coded.ids for coded in self._tokenizer.encode_batch_fast(list(texts[start : start + _CHUNK]))]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out; see `decode_batch`."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of token ids, special tokens left out.

        It is the text that was encoded where the tokenizer keeps all of it, as those of `subwords` do (up to NFC); word
        pieces lose spaces and case. Bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id outside of the
        vocabulary.
        """
        kept = []
        for row in rows:
            ids = [int(number) for number in row]
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                wrong = next(number for number in ids if not 0 <= number < self.vocab_size)
                raise ValueError(f"the id {wrong} is not in the vocabulary of {self.vocab_size} tokens")
            kept.append([number for number in ids if number not in self._control])
        return self._tokenizer.decode_batch(kept, skip_special_tokens=True)

    def settled(self, ids: Sequence[int]) -> int:
        """How many of the first of these ids keep their text whatever follows, but for U+FFFD at its end.

        A run of bytes (`<0xE2>`) is decoded as a whole, and tokens that are left out do not end it.
        """
        count = len(ids)
        while count and ids[count - 1] in self._unsettled:
            count -= 1
        return count


def parse(tokenizer_json: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json; raises InputError for text that is none."""
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the bindings raise the bare Exception for every fault in the text
        reason = " ".join(str(error).split())
        raise InputError(f"the tokenizer.json is not a tokenizer that can be read: {reason}") from error


def _pad_id(tokenizer: Tokenizer) -> int:
    if tokenizer.padding is not None:
        return int(tokenizer.padding["pad_id"])
    known = (tokenizer.token_to_id(token) for token in _PAD_TOKENS)
    return next((number for number in known if number is not None), 0)


def wordpiece_from_vocab(
    vocab: str, lowercase: bool = True, strip_accents: bool | None = None, tokenize_chinese_chars: bool = True
) -> str:
    """Return the tokenizer.json text of the BERT tokenizer with this vocab.txt text, one token a line, id = line - 1.

    `strip_accents=None` strips them when `lowercase` does, as BERT does; `tokenize_chinese_chars` makes each Chinese
    character a word. Of a token on two lines the last counts, as in BERT. Raises InputError where [UNK], [CLS] or [SEP]
    is missing.
    """
    lines = vocab.replace("\r\n", "\n").rstrip("\n").split("\n")
    ids = {token: number for number, token in enumerate(lines)}
    missing = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in ids]
    if missing:
        raise InputError(f"vocab.txt with {len(lines)} lines lacks {', '.join(missing)}: it is no BERT vocabulary")
    tokenizer = Tokenizer(WordPiece(ids, unk_token="[UNK]", continuing_subword_prefix="##"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=tokenize_chinese_chars,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    special = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token in ids]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer.to_str(pretty=True)


def windows(texts: Sequence[str], tokenizer_json: str, positions: int) -> list[tuple[int, list[int]]]:
    """Every text's number, once for each of its windows of at most `positions` tokens, and the window's token ids."""
    found = []
    for number, ids in enumerate(TextEncoder(tokenizer_json, _WHOLE).encode(texts)):
        found += [(number, ids[at : at + positions]) for at in range(0, len(ids), positions)]
    return found


def pad(ids: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[IntArray, IntArray]:
    """Token ids as (input_ids, attention_mask), both (B, T) int64, padded on the right to the longest row T.

    T is at least 1 where there is a row: rows of no token at all become rows of padding.
    """
    longest = max((max(len(row), 1) for row in ids), default=0)
    input_ids = np.full((len(ids), longest), pad_id, dtype=np.int64)
    mask = np.zeros((len(ids), longest), dtype=np.int64)
    for number, row in enumerate(ids):
        input_ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return input_ids, mask


def length_batches(lengths: Sequence[int], size: int) -> list[IntArray]:
    """Indices of `lengths` in ascending order of length (equal lengths in their order), `size` at a time.

    Batches of like lengths carry the least padding. Raises InputError for a size below 1.
    """
    if size < 1:
        raise InputError(f"batch size {size} is too small: give at least 1")
    order = np.argsort(np.asarray(lengths, dtype=np.int64), kind="stable").astype(np.int64)
    return [order[start : start + size] for start in range(0, len(order), size)]
