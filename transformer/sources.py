"""Sources of an encoder-decoder as token ids, within what it reads.

A translation of half a text is none, so a source that is too long for a translator is left to the caller. A summary of
a text's beginning is one, so a summarizer reads the beginning, and what was cut is counted. It needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .config import LanguageHead, TransformerConfig
from .splits import PairData
from .tokenizer import TextEncoder


@dataclass(frozen=True)
class Sources:
    """Texts as a model reads them.

    Attributes:
        ids: token ids of each text; None: it is longer than what the model reads, and cannot be cut.
        cut: whether the text is longer, and only its beginning is in its ids.
    """

    ids: list[list[int] | None]
    cut: list[bool]


def summarizes(config: TransformerConfig) -> bool:
    """Whether a model writes summaries, and so cuts its sources."""
    return isinstance(config.head, LanguageHead) and config.head.summarizes


def position_limits(config: TransformerConfig) -> tuple[int, int]:
    """The greatest numbers of tokens of a source, at which a summarizer cuts it, and of a target."""
    source = config.text.max_length if summarizes(config) else config.embedding.positions
    return source, config.decoder_embedding.positions


class SourceReader:
    """The tokenizer of an encoder-decoder, for its sources."""

    def __init__(self, config: TransformerConfig, tokenizer: str) -> None:
        """Read a tokenizer.json's text; InputError as of `TextEncoder`."""
        self.limit, _ = position_limits(config)
        self._whole = TextEncoder(tokenizer, self.limit + 1)
        self._begun = TextEncoder(tokenizer, self.limit) if summarizes(config) else None

    def read(self, texts: Sequence[str]) -> Sources:
        """Token ids of each text, at most `limit`."""
        whole = self._whole.encode(texts)
        over = [len(ids) > self.limit for ids in whole]
        if self._begun is None:
            return Sources([None if long else ids for ids, long in zip(whole, over, strict=True)], [False] * len(over))
        begun = iter(self._begun.encode([text for text, long in zip(texts, over, strict=True) if long]))
        return Sources([next(begun) if long else ids for ids, long in zip(whole, over, strict=True)], over)

    def cut(self, texts: Sequence[str]) -> int:
        """How many of the texts are cut."""
        return sum(self.read(texts).cut)


def cut_by_split(reader: SourceReader, data: PairData) -> dict[str, int]:
    """How many sources are cut of each split that has any."""
    splits = {name: getattr(data, name) for name in ("train", "valid", "test")}
    return {name: reader.cut([pair.source for pair in pairs]) for name, pairs in splits.items() if pairs}
