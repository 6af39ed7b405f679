"""A tokenizer.json with fewer entries: the same pieces for every text whose pieces stay, shorter ones for the rest.

Entries go from WordPiece, BPE and unigram vocabularies (Abdaoui et al. 2020, "Load What You Need: Smaller Versions of
Multilingual BERT", take from a model's table what a language does not use). Some always stay:

- added tokens, marks (`<s>`), the unknown token, what padding and the post-processor name, bytes (`<0xE2>`);
- symbols: entries of one character, in every form that the model has (a, ##a, a</w>);
- entries with a character that is no symbol: nothing else could spell it;
- of unigram the piece of lowest score, from which the library takes the score of what is unknown.

So a text whose characters are symbols has no unknown token afterwards if it had none before. Why pieces stay the same:
WordPiece takes the longest match, and of the matches that are left the old one is still the longest; unigram takes the
best path, and of the paths that are left the old one is still the best. BPE (Sennrich et al. 2016) applies the first of
its merges that fits, so what a kept entry is merged from has to stay too: the parts of every merge that makes it, and
theirs. Then all merges of such a text are still there, in their order.

Ids keep their order: the new id of an entry is its rank among the old ids that stay.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import InputError
from .tokenizer import CONTROL_TOKENS, TextEncoder, parse

__all__ = ["Entries", "from_ranges", "to_ranges", "trim_tokenizer"]

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_WHOLE = 2**30  # tokens: a cut that no text reaches
_KINDS = ("WordPiece", "BPE", "Unigram")

Json = dict[str, Any]


@dataclass(frozen=True)
class Entries:
    """The entries of a tokenizer and what they need.

    Attributes:
        ids: of every entry, added tokens included, by its text.
        always: ids that stay whatever is asked for.
        lengths: characters of each entry of the model, by its id.
        unknown: the id of the unknown token, where there is one.
        parts: of BPE: the ids of what an entry is merged from, by its id; of every merge that makes it.
        data: the tokenizer.json, as the library writes it.
    """

    ids: Mapping[str, int]
    always: frozenset[int]
    lengths: Mapping[int, int]
    unknown: int | None
    parts: Mapping[int, frozenset[int]]
    data: Json = field(repr=False)

    @classmethod
    def of(cls, tokenizer_json: str) -> "Entries":
        """Read the text of a tokenizer.json.

        Raises:
            InputError: it is no tokenizer, of another kind than those three, or names ids that are not its own.
        """
        tokenizer = parse(tokenizer_json)
        data: Json = json.loads(tokenizer.to_str())
        model, ids = data["model"], tokenizer.get_vocab(with_added_tokens=True)
        if model["type"] not in _KINDS:
            raise InputError(
                f"the tokenizer's model is {model['type']}; entries can go from {', '.join(_KINDS)}, which spell a "
                "word by shorter pieces where its own is gone"
            )
        named = _named(data)
        if strangers := sorted(named - set(ids.values())):
            raise InputError(f"the tokenizer.json names the id {strangers[0]}, which is no entry of it: correct it")
        marks = {number for entry, number in ids.items() if entry in CONTROL_TOKENS or _BYTE.fullmatch(entry)}
        pad = {TextEncoder(tokenizer_json, _WHOLE).pad_id} & set(ids.values())
        spelled = {number: _symbols(model, entry) for entry, number in _model_ids(model).items()}
        lengths = {number: len(symbols) for number, symbols in spelled.items()}
        always = named | marks | pad | _alone(spelled) | _lowest(model)
        return cls(ids, frozenset(always), lengths, _unknown(model), _parts(model), data)

    def closed(self, ids: Iterable[int]) -> set[int]:
        """These ids, what always stays, and what either is merged from."""
        found, waiting = set[int](), [*ids, *self.always]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.parts.get(number, ())
        return found

    def needed(self, counts: Mapping[int, int]) -> dict[int, int]:
        """How often each entry that occurs is needed, from how often it occurs: as often as what is merged from it.

        The most needed come first, of those needed equally the shorter, then the one of lower id: so all that an entry
        is merged from comes before it.
        """
        need = {number: count for number, count in counts.items() if count}
        for whole in sorted(self.parts, key=self.lengths.__getitem__, reverse=True):
            for part in self.parts[whole] if whole in need else ():
                need[part] = max(need.get(part, 0), need[whole])
        order = sorted(need, key=lambda number: (-need[number], self.lengths.get(number, 1), number))
        return {number: need[number] for number in order}


def trim_tokenizer(tokenizer_json: str | Entries, ids: Collection[int]) -> tuple[str, tuple[int, ...]]:
    """The tokenizer.json of the entries that stay, and their old ids in the order of the new ones.

    Args:
        tokenizer_json: the text, or what was read of it.
        ids: the ids to keep; what `Entries.closed` adds stays too. Ids that are no entry have a row in a table alone:
            the new ids count them.

    Raises:
        InputError: see `Entries.of`; or the library does not take the new ids.
    """
    entries = tokenizer_json if isinstance(tokenizer_json, Entries) else Entries.of(tokenizer_json)
    kept = tuple(sorted(entries.closed(ids)))
    new = {old: rank for rank, old in enumerate(kept)}
    tokenizer = parse(json.dumps(_renumbered(entries.data, new), ensure_ascii=False))
    wanted = {entry: new[old] for entry, old in entries.ids.items() if old in new}
    if tokenizer.get_vocab(with_added_tokens=True) != wanted:
        raise InputError(
            "the tokenizer.json cannot be renumbered: an id that must stay is no entry of it and stands between others"
        )
    return tokenizer.to_str(pretty=True), kept


def to_ranges(ids: Sequence[int]) -> str:
    """Ascending ids as text, each run by its first and its last: "0,100-103"."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_ranges(ranges: str) -> tuple[int, ...]:
    """What `to_ranges` was given."""
    runs = [run.split("-") for run in ranges.split(",")] if ranges else []
    return tuple(number for run in runs for number in range(int(run[0]), int(run[-1]) + 1))


def _model_ids(model: Json) -> dict[str, int]:
    """The entries of the model itself and their ids."""
    vocab = model["vocab"]
    return dict(vocab) if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}


def _affixes(model: Json) -> tuple[str, str]:
    """What stands before the pieces within a word, and behind the last piece of one."""
    return model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""


def _symbols(model: Json, entry: str) -> list[str]:
    """The entries of one character that together spell an entry: ##ab is ##a and ##b, ab is a and ##b."""
    prefix, suffix = _affixes(model)
    inner = bool(prefix) and entry.startswith(prefix) and len(entry) > len(prefix)
    core = entry.removeprefix(prefix) if inner else entry
    last = bool(suffix) and core.endswith(suffix) and len(core) > len(suffix)
    core = core.removesuffix(suffix) if last else core
    found = [f"{prefix if inner or place else ''}{character}" for place, character in enumerate(core)]
    return [*found[:-1], found[-1] + suffix] if last else found


def _alone(spelled: Mapping[int, Sequence[str]]) -> set[int]:
    """Entries of one character, and those with a character that is none of these, from the symbols of each entry."""
    known = {symbols[0] for symbols in spelled.values() if len(symbols) == 1}
    return {number for number, symbols in spelled.items() if len(symbols) == 1 or not known.issuperset(symbols)}


def _parts(model: Json) -> dict[int, frozenset[int]]:
    """Of each entry that is merged, the ids of the parts of all merges that make it."""
    found: dict[int, frozenset[int]] = {}
    for first, second in model.get("merges", ()):
        ids = model["vocab"]
        whole = ids[_merged(model, first, second)]
        found[whole] = found.get(whole, frozenset()) | {ids[first], ids[second]}
    return found


def _merged(model: Json, first: str, second: str) -> str:
    return first + second[len(_affixes(model)[0]) :]


def _lowest(model: Json) -> set[int]:
    """The piece of lowest score, of a unigram model."""
    if model["type"] != "Unigram" or not model["vocab"]:
        return set()
    scores = [score for _, score in model["vocab"]]
    return {scores.index(min(scores))}


def _unknown(model: Json) -> int | None:
    found: int | None = model["unk_id"] if model["type"] == "Unigram" else model["vocab"].get(model["unk_token"])
    return found


def _named(data: Json) -> set[int]:
    """Ids of entries that the tokenizer.json names outside of the model's vocabulary."""
    unknown = _unknown(data["model"])
    found = {token["id"] for token in data["added_tokens"]} | (set() if unknown is None else {unknown})
    found |= set() if data["padding"] is None else {data["padding"]["pad_id"]}
    return found | _processor_ids(data["post_processor"])


def _processor_ids(processor: Json | None) -> set[int]:
    if processor is None:
        return set()
    inner = [number for one in processor.get("processors", ()) for number in _processor_ids(one)]
    templates = processor.get("special_tokens", {}).values()
    ends = [processor[mark][1] for mark in ("sep", "cls") if mark in processor]
    return {*inner, *ends, *(number for template in templates for number in template["ids"])}


def _renumbered(data: Json, new: Mapping[int, int]) -> Json:
    """A tokenizer.json of the entries with a new id."""
    padding = data["padding"]
    return {
        **data,
        "added_tokens": [{**token, "id": new[token["id"]]} for token in data["added_tokens"]],
        "padding": None if padding is None else {**padding, "pad_id": new[padding["pad_id"]]},
        "post_processor": _renumbered_processor(data["post_processor"], new),
        "model": _renumbered_model(data["model"], new),
    }


def _renumbered_model(model: Json, new: Mapping[int, int]) -> Json:
    if model["type"] == "Unigram":
        pieces = [piece for number, piece in enumerate(model["vocab"]) if number in new]
        return {**model, "vocab": pieces, "unk_id": None if model["unk_id"] is None else new[model["unk_id"]]}
    vocab = {entry: new[number] for entry, number in model["vocab"].items() if number in new}
    if model["type"] != "BPE":
        return {**model, "vocab": vocab}
    merges = [
        [first, second]
        for first, second in model["merges"]
        if first in vocab and second in vocab and _merged(model, first, second) in vocab
    ]
    return {**model, "vocab": vocab, "merges": merges}


def _renumbered_processor(processor: Json | None, new: Mapping[int, int]) -> Json | None:
    if processor is None:
        return None
    ends = [mark for mark in ("sep", "cls") if mark in processor]
    changed: Json = {mark: [processor[mark][0], new[processor[mark][1]]] for mark in ends}
    if "processors" in processor:
        changed["processors"] = [_renumbered_processor(one, new) for one in processor["processors"]]
    if "special_tokens" in processor:
        changed["special_tokens"] = {
            name: {**template, "ids": [new[number] for number in template["ids"]]}
            for name, template in processor["special_tokens"].items()
        }
    return {**processor, **changed}
