"""Trim: entries of the vocabulary that the user's texts do not need go, from the tokenizer and from every table.

Tables are half of many models, and most of their rows are of words that one user never reads (Abdaoui et al. 2020,
"Load What You Need: Smaller Versions of Multilingual BERT"). An entry stays where the texts that may be learnt from
need it; what stays anyway, and why texts of kept entries get the same tokens, is in `transformer.trimming`. With kept
old ids k_0 < k_1 < … and a table W (V, D), row i of the new table is row k_i of W: nothing is computed, so an encoder
gives the same as before for every text of which no entry went, and a decoder the same logits of the entries that stay.
The step may stand before or after quantize.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..transformer.checkpoint import Checkpoint
from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.data import PairData, SearchData
from ..transformer.errors import InputError
from ..transformer.layer_config import count, positive, truth
from ..transformer.progress import SILENT, Progress
from ..transformer.tables import read_text
from ..transformer.tokenizer import parse
from ..transformer.trimming import Entries, from_ranges, to_ranges, trim_tokenizer
from .step import StepContext, StepResult

KEPT = "kept_entries"
CHUNK = 4096  # texts tokenized at once
HELD_OUT = 10  # one text in so many is held out, to see what unseen texts lose


@dataclass(frozen=True)
class Trim:
    """Options of the step.

    Attributes:
        least: how often the texts must need an entry for it to stay.
        entries: how many stay at most, the most needed of them; 0: no limit.
        pages: whether titles and texts of pages count too, where the data has pages.
        words: path of a text file, one text a line, whose entries stay however rare they are; None: there is none.
    """

    least: int = 1
    entries: int = 0
    pages: bool = True
    words: str | None = None

    name: ClassVar[str] = "trim"
    trains: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = positive("least", self.least) + count("entries", self.entries) + truth("pages", self.pages)
        if problems:
            raise InputError("trim: " + "; ".join(problems))

    def check(self, config: TransformerConfig) -> None:
        """See `Step.check`: any model has tables; the file of words can be read and is not empty."""
        self._words()

    def __call__(self, checkpoint: Checkpoint, context: StepContext) -> StepResult:
        """A model with fewer entries; the same one, and the reason under `skipped`, where all are needed.

        Raises:
            InputError: there are no texts, the file of words is missing or empty, more must stay than `entries`, or
                the tokenizer is of a kind whose entries cannot go.
        """
        started = time.monotonic()
        entries, config = Entries.of(checkpoint.tokenizer), checkpoint.config
        texts, reader = self._corpus(context), _Reader(checkpoint.tokenizer, config)
        always = entries.closed([*config_ids(config), *reader.counts(self._words())])
        self._check_room(len(always))
        order = [texts[place] for place in np.random.default_rng(context.seed).permutation(len(texts))]
        split = len(order) // HELD_OUT
        context.progress.start("Counting entries", len(texts), "texts")
        unseen, seen = (reader.counts(part, context.progress) for part in (order[:split], order[split:]))
        context.progress.done()
        small, kept = trim_tokenizer(entries, self._chosen(entries, seen + unseen, always))
        change = {"corpus": reader.compare(small, kept, texts, entries.unknown)}
        if split:
            guess = trim_tokenizer(entries, self._chosen(entries, seen, always))
            change["held_out"] = reader.compare(*guess, order[:split], entries.unknown)
        trimmed = with_entries(checkpoint, small, kept)
        rows, left = (one.config.embedding.vocab_size for one in (checkpoint, trimmed))
        details = {
            "entries": {"before": rows, "after": left, "always": len(always)},
            "table_bytes": {"before": table_bytes(checkpoint), "after": table_bytes(trimmed)},
            **change,
            "skipped": _skipped(trimmed is checkpoint, len(texts)),
        }
        return StepResult(trimmed, {**details, "seconds": round(time.monotonic() - started, 1)})

    def _corpus(self, context: StepContext) -> list[str]:
        """The texts whose entries count, each once: what may be learnt from, pages, and of pairs the targets."""
        data = context.data
        pages = data.pages if isinstance(data, SearchData) and self.pages else ()
        found = [text for page in pages for text in (page.title, page.text) if text]
        found += data.texts if found else context.training_texts()
        found += [pair.target for pair in data.train] if isinstance(data, PairData) else []
        return list(dict.fromkeys(found))

    def _words(self) -> list[str]:
        """The lines of the file of words, as at the start of a text and as within one."""
        if self.words is None:
            return []
        lines = [line.strip() for line in read_text(Path(self.words)).splitlines() if line.strip()]
        if not lines:
            raise InputError(f"trim: {self.words} holds no word: write one text a line, or leave the option words out")
        return [before + line for line in lines for before in ("", " ")]

    def _check_room(self, always: int) -> None:
        if self.entries and always > self.entries:
            raise InputError(
                f"trim: entries is {self.entries}, but {always} stay in any case (marks, single characters, entries of "
                f"words): ask for at least {always}, or for 0, which is no limit"
            )

    def _chosen(self, entries: Entries, counts: Mapping[int, int], always: Set[int]) -> set[int]:
        """The ids that stay."""
        need = entries.needed(counts)
        more = [number for number, times in need.items() if times >= self.least and number not in always]
        return {*always, *(more[: self.entries - len(always)] if self.entries else more)}


def kept_entries(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """Of each id of a trimmed model that of its first model; None where no entry went."""
    ranges = checkpoint.provenance.get(KEPT)
    return None if ranges is None else from_ranges(ranges)


def config_ids(config: TransformerConfig) -> set[int]:
    """The ids that a config names: of padding, and of what begins and ends a text that is written."""
    head = config.head
    return {config.text.pad_id, *((head.start_id, head.end_id) if isinstance(head, LanguageHead) else ())}


def with_entries(checkpoint: Checkpoint, tokenizer: str, kept: Sequence[int]) -> Checkpoint:
    """The model with these rows of its tables alone, and their tokenizer; itself where all of them stay.

    Its provenance names, as `kept_entries`, the kept ids by their numbers in the first model: "0,100-103".

    Args:
        checkpoint: the model, its tables in float or int8.
        tokenizer: of the kept ids, from `trim_tokenizer`.
        kept: ascending ids, those of `config_ids` among them.

    Raises:
        InputError: a table has no row of an id.
    """
    config, rows = checkpoint.config, torch.tensor(kept)
    tables = {"embedding": config.embedding, "target": config.target}
    sizes = {name: table.vocab_size for name, table in tables.items() if table is not None}
    for name, size in sizes.items():
        if kept[-1] >= size:
            raise InputError(f"trim: the id {kept[-1]} must stay, the table of {name} has {size} rows: no row for it")
    if set(sizes.values()) == {len(kept)}:
        return checkpoint
    state = dict(checkpoint.state)
    for name in table_tensors(checkpoint):
        state[name] = state[name][rows]
    earlier = kept_entries(checkpoint)
    first = kept if earlier is None else [earlier[number] for number in kept]
    small = replace(checkpoint, config=_renumbered(config, kept), state=state, tokenizer=tokenizer)
    return small.with_provenance(**{KEPT: to_ranges(first)})


def table_tensors(checkpoint: Checkpoint) -> list[str]:
    """Names of the tensors with a row for each entry: tables of tokens, their scales, the output layer and its bias."""
    rows = ("embeddings.tokens.", "target.tokens.", "head.tokens.")
    bias = {"head.bias"} if isinstance(checkpoint.config.head, LanguageHead) else set()
    return [name for name in checkpoint.state if name.startswith(rows) or name in bias]


def table_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of those tensors."""
    return sum(checkpoint.state[name].nbytes for name in table_tensors(checkpoint))


def _renumbered(config: TransformerConfig, kept: Sequence[int]) -> TransformerConfig:
    """The config of a model with the kept ids alone."""
    new, size, head, target = {old: rank for rank, old in enumerate(kept)}, len(kept), config.head, config.target
    if isinstance(head, LanguageHead):
        head = replace(head, start_id=new[head.start_id], end_id=new[head.end_id])
    return replace(
        config,
        embedding=replace(config.embedding, vocab_size=size),
        target=None if target is None else replace(target, vocab_size=size),
        text=replace(config.text, pad_id=new[config.text.pad_id]),
        head=head,
    )


class _Reader:
    """Texts to ids as the model is given them, whole and without marks: each by itself and behind every prompt."""

    def __init__(self, tokenizer_json: str, config: TransformerConfig) -> None:
        self._config = config
        self._before = tuple(dict.fromkeys(["", *(prompt for _, prompt in config.text.prompts)]))
        self._tokenizer = parse(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text behind every prompt, those of one text beside each other."""
        given = [before + text for text in texts for before in self._before]
        return [coded.ids for coded in self._tokenizer.encode_batch_fast(given, add_special_tokens=False)]

    def counts(self, texts: Sequence[str], progress: Progress = SILENT) -> Counter[int]:
        """How often each id occurs."""
        found = Counter[int]()
        for chunk in _chunks(texts):
            for row in self.read(chunk):
                found.update(row)
            progress.advance(len(chunk))
        return found

    def compare(self, small: str, kept: Sequence[int], texts: Sequence[str], unknown: int | None) -> dict[str, Any]:
        """What a trimmed tokenizer, which kept these ids, makes of texts."""
        other, stays, sums = _Reader(small, self._config), set(kept), Counter[str]()
        mark, each = -1 if unknown is None else unknown, len(self._before)
        for chunk in _chunks(texts):
            rows, new = self.read(chunk), [[kept[number] for number in row] for row in other.read(chunk)]
            sums["changed"] += sum(rows[i : i + each] != new[i : i + each] for i in range(0, len(rows), each))
            sums["stay"] += sum(number in stays for row in rows for number in row)
            for when, said in (("before", rows), ("after", new)):
                sums[when] += sum(map(len, said))
                sums[f"unknown {when}"] += sum(row.count(mark) for row in said)
        return {
            "texts": len(texts),
            "texts_changed": sums["changed"],
            "tokens": {when: sums[when] for when in ("before", "after")},
            "tokens_kept": _ratio(sums["stay"], sums["before"]),
            "growth": _ratio(sums["after"], sums["before"]),
            "unknown": {when: sums[f"unknown {when}"] for when in ("before", "after")},
        }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 1.0


def _chunks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), CHUNK):
        yield texts[start : start + CHUNK]


def _skipped(whole: bool, texts: int) -> dict[str, str]:
    """What was not done, with its reason."""
    skipped = {}
    if whole:
        skipped["removal"] = "every entry is needed or stays in any case"
    if texts < HELD_OUT:
        skipped["held_out"] = f"{texts} texts, of which a tenth is less than one"
    return skipped
