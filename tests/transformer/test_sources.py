"""Sources as a model reads them: what is too long for a translator, and what a summarizer cuts and counts."""

from dataclasses import replace

from models import TOKENIZER, decoder_config

from slimformer.transformer.config import LanguageHead, TextConfig
from slimformer.transformer.sources import SourceReader, cut_by_split, position_limits, summarizes
from slimformer.transformer.splits import Pair, PairData
from slimformer.transformer.tokenizer import TextEncoder

TRANSLATOR = decoder_config()
SUMMARIZER = replace(TRANSLATOR, head=LanguageHead(2, 3, bias=True, kind="summarization"), text=TextConfig(6))
SHORT, EXACT, LONG = "print", "how do i freeze", "how do i freeze the first row"  # 3, 6 and 9 tokens


def test_limits() -> None:
    """A summarizer reads `max_length` tokens, a translator all positions."""
    assert position_limits(replace(TRANSLATOR, text=TextConfig(6))) == (24, 24)
    assert position_limits(SUMMARIZER) == (6, 24)
    assert [summarizes(config) for config in (TRANSLATOR, SUMMARIZER)] == [False, True]


def test_a_summarizers_sources_are_cut_and_end_as_whole_ones_do() -> None:
    read = SourceReader(SUMMARIZER, TOKENIZER).read([LONG, SHORT, EXACT, LONG])
    cls, how, do, i, freeze, sep = TextEncoder(TOKENIZER, 24).encode([EXACT])[0]
    assert read.ids[0] == read.ids[2] == read.ids[3] == [cls, how, do, i, freeze, sep]
    assert read.ids[1] == TextEncoder(TOKENIZER, 24).encode([SHORT])[0]
    assert read.cut == [True, False, False, True]


def test_a_translators_sources_are_whole_or_none() -> None:
    at_limit, over = "print " * 22, "print " * 23
    read = SourceReader(TRANSLATOR, TOKENIZER).read([SHORT, at_limit, over])
    assert [ids and len(ids) for ids in read.ids] == [3, 24, None]
    assert read.cut == [False, False, False]


def test_cut_sources_are_counted_by_split() -> None:
    short, long = (Pair(text, "row", "0") for text in (EXACT, LONG))
    data = PairData((short, long, long), (), (long, short), (LONG,), "summarization")
    assert cut_by_split(SourceReader(SUMMARIZER, TOKENIZER), data) == {"train": 2, "test": 1}
