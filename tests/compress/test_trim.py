"""The trim step: which entries stay, that a model gives the same as before, what it says and what it refuses."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import POSITIONS, WIDTH, WRITERS, random_state
from models import tiny_config as encoder_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from slimformer.compress import trim as module
from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.compress.trim import Trim, kept_entries, table_bytes, with_entries
from slimformer.export import export
from slimformer.export.decoding_parity import check_decoding
from slimformer.export.runtime import load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import EmbeddingConfig, LanguageHead, TextConfig, TransformerConfig
from slimformer.transformer.data import (
    Data,
    LabelledData,
    LabelledRow,
    Page,
    Pair,
    PairData,
    Query,
    SearchData,
    TextData,
    TextRow,
)
from slimformer.transformer.errors import InputError
from slimformer.transformer.loading import load
from slimformer.transformer.subwords import train_subwords
from slimformer.transformer.tokenizer import pad, wordpiece_from_vocab

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
NAMES = "open close print save table cell row column text page chart font image style list file help menu"
WORDS = NAMES.split()
VOCAB = [
    *WORDS[:3], "[PAD]", *WORDS[3:6], "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS[6:], "##ing", "##s",
    *ALPHABET, *(f"##{letter}" for letter in ALPHABET if letter != "s"),
]  # fmt: skip
PAD, CLS, SEP = (VOCAB.index(mark) for mark in ("[PAD]", "[CLS]", "[SEP]"))
LETTERS = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ALPHABET, *(f"##{letter}" for letter in ALPHABET)}
TOKENIZER = wordpiece_from_vocab("\n".join(VOCAB))


def fitted(config: TransformerConfig, rows: int = len(VOCAB), **changes: Any) -> TransformerConfig:
    """The config over this vocabulary, with ids that trimming moves."""
    head = config.head
    if isinstance(head, LanguageHead):
        head = replace(head, start_id=CLS, end_id=SEP)
    target = None if config.target is None else replace(config.target, vocab_size=rows)
    table, text = replace(config.embedding, vocab_size=rows), replace(config.text, pad_id=PAD)
    return replace(config, **{"embedding": table, "target": target, "text": text, "head": head, **changes})


def model(config: TransformerConfig | None = None, tokenizer: str = TOKENIZER, **changes: Any) -> Checkpoint:
    config = fitted(config or encoder_config(), **changes)
    return Checkpoint(config, random_state(config, 3), tokenizer, {"source": "tiny"}).check("tiny")


def texts_of(words: Sequence[str], count: int = 12, seed: int = 0) -> tuple[str, ...]:
    """Distinct seeded runs of words, each word in the first text."""
    random = np.random.default_rng(seed)
    rows = [" ".join(random.choice(words, int(random.integers(2, 6)))) for _ in range(3 * count)]
    return tuple(dict.fromkeys([" ".join(words), *rows]))[:count]


def searched(texts: Sequence[str], pages: Sequence[Page] = ()) -> SearchData:
    unseen = (Query("style", ("p",), "p"),)
    return SearchData(tuple(pages), unseen, unseen, tuple(texts))


def paired(*rows: Sequence[tuple[str, str]], texts: Sequence[str] = ()) -> PairData:
    splits = [tuple(Pair(source, target, str(i)) for i, (source, target) in enumerate(split)) for split in rows]
    return PairData(splits[0], splits[1], splits[2], tuple(texts))


def entries(checkpoint: Checkpoint) -> set[str]:
    vocab = json.loads(checkpoint.tokenizer)["model"]["vocab"]
    return set(vocab)


def longer(checkpoint: Checkpoint) -> set[str]:
    """Entries beside marks and single letters."""
    return entries(checkpoint) - LETTERS


def tensors(checkpoint: Checkpoint, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    ids, mask = pad(checkpoint.text_encoder().encode(texts), checkpoint.config.text.pad_id)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def result(checkpoint: Checkpoint, texts: Sequence[str]) -> Tensor:
    """Embeddings of an encoder; logits of a decoder that reads the texts, beside an encoder as its target."""
    ids, mask = tensors(checkpoint, texts)
    both = {"target_ids": ids, "target_mask": mask} if checkpoint.config.encoder and checkpoint.config.decoder else {}
    with torch.inference_mode():
        found = checkpoint.to_torch()(ids, mask, **both).result
    assert found is not None
    return found


SEEN = ["open", "table", "cell", "rows", "printing"]
KEPT = {"open", "table", "cell", "row", "print", "##ing"}
CONTEXT = StepContext(searched(texts_of(SEEN)))
DYNAMIC = Quantize(format="int8_dynamic", bits=7)


# --- the same outputs ---


def test_an_encoder_gives_the_same_to_the_bit() -> None:
    whole = model()
    small = Trim()(whole, CONTEXT).checkpoint.check("small")
    assert longer(small) == KEPT
    assert small.config.embedding.vocab_size == len(small.state["embeddings.tokens.weight"]) == len(LETTERS) + len(KEPT)
    assert small.config.text.pad_id == PAD - len({"close"})
    texts = [*CONTEXT.data.texts, "cell printing rows", "opening tables"]
    assert torch.equal(result(whole, texts), result(small, texts))
    assert not torch.equal(result(whole, ["close"]), result(small, ["close"]))
    assert small.text_encoder().encode(["close"])[0] != whole.text_encoder().encode(["close"])[0]


def test_int8_and_trimming_come_to_one_in_either_order() -> None:
    whole = model()
    before = Trim()(DYNAMIC(whole).checkpoint, CONTEXT).checkpoint.check("before")
    after = DYNAMIC(Trim()(whole, CONTEXT).checkpoint).checkpoint.check("after")
    assert before.config == after.config
    assert before.tokenizer == after.tokenizer
    assert before.state.keys() == after.state.keys()
    assert all(torch.equal(before.state[name], value) for name, value in after.state.items())
    assert before.state["embeddings.tokens.scale"].shape == (before.config.embedding.vocab_size,)
    texts = list(CONTEXT.data.texts)
    assert torch.equal(result(DYNAMIC(whole).checkpoint, texts), result(before, texts))


def test_the_input_is_untouched() -> None:
    whole = model()
    before = whole.fingerprint()
    small = Trim()(whole, CONTEXT).checkpoint
    assert whole.fingerprint() == before
    small.state["embeddings.tokens.weight"].zero_()
    assert whole.fingerprint() == before


@pytest.mark.parametrize("quantize", ["never", "before", "after"])
def test_saved_and_exported(quantize: str, tmp_path: Path) -> None:
    checkpoint = DYNAMIC(model()).checkpoint if quantize == "before" else model()
    checkpoint = Trim()(checkpoint, CONTEXT).checkpoint
    checkpoint = DYNAMIC(checkpoint).checkpoint if quantize == "after" else checkpoint
    again = load(checkpoint.save(tmp_path / "model"))
    assert again.fingerprint() == checkpoint.fingerprint()
    assert again.provenance == checkpoint.provenance
    bundle = load_bundle(export(again, tmp_path / "bundle"), threads=1)
    texts = ["cell printing rows", "a closed table", "open"]
    for text in texts:
        np.testing.assert_allclose(bundle.embed([text]), result(checkpoint, [text]).numpy(), atol=1e-5)


# --- decoders ---

PAIRS = paired([(text, "save") for text in texts_of(SEEN)], [("font", "chart")], [("help", "menu")])
UNTIED = replace(WRITERS["post"], head=LanguageHead(2, 3, tied=False, bias=True))
WRITING: dict[str, TransformerConfig] = {**WRITERS, "untied, bias": UNTIED}


@pytest.mark.parametrize("kind", WRITING)
@pytest.mark.parametrize("int8", [False, True])
def test_a_decoder_gives_the_same_logits_of_the_entries_that_stay(kind: str, int8: bool) -> None:
    whole = model(WRITING[kind])
    whole = DYNAMIC(whole).checkpoint if int8 else whole
    small = Trim()(whole, StepContext(PAIRS)).checkpoint.check(kind)
    assert longer(small) == KEPT | {"save"}
    kept = kept_entries(small)
    assert kept is not None
    head = small.config.head
    assert isinstance(head, LanguageHead)
    assert [kept[i] for i in (head.start_id, head.end_id, small.config.text.pad_id)] == [CLS, SEP, PAD]
    texts = [*texts_of(SEEN), "save"]
    before, after = result(whole, texts), result(small, texts)
    assert after.shape == (len(before), len(kept))
    torch.testing.assert_close(after, before[:, list(kept)], rtol=0, atol=1e-5)
    own = "target.tokens." if small.config.target else "head.tokens." if not head.tied else "embeddings.tokens."
    rows = {name: len(value) for name, value in small.state.items() if name.startswith(own) or name == "head.bias"}
    assert set(rows.values()) == {len(kept)}
    assert len(rows) == 1 + int8 + head.bias


@pytest.mark.parametrize("int8", [False, True])
def test_a_trimmed_translator_is_exported(int8: bool, tmp_path: Path) -> None:
    whole = model(UNTIED)
    whole.state["head.bias"][SEP] = 2.0
    small = Trim()(whole, StepContext(PAIRS)).checkpoint
    small = DYNAMIC(small).checkpoint if int8 else small
    again = load(small.save(tmp_path / "model"))
    parity = check_decoding(again, export(again, tmp_path / "bundle"), list(texts_of(SEEN))[:4], threads=1)
    assert parity.passed
    assert parity.tokens > 4


def test_a_table_of_targets_that_lacks_rows_is_refused() -> None:
    whole = model(WRITERS["own table"])
    last = len(VOCAB) - 1
    short = replace(whole.config, target=EmbeddingConfig(last, POSITIONS))
    with pytest.raises(InputError, match=f"the id {last} must stay, the table of target has {last} rows"):
        Trim()(replace(whole, config=short), StepContext(PAIRS))


# --- which entries stay ---


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (searched(["open"], [Page("p", "cell", "row text")]), {"open", "cell", "row", "text"}),
        (searched([], [Page("p", "", "row text")]), {"row", "text"}),
        (paired([("open", "cell")], [("row", "text")], [("file", "page")], texts=["menu"]), {"open", "cell", "menu"}),
        (
            LabelledData(
                (LabelledRow("open", "page", "1"),), (LabelledRow("row", "a", "1"),), (LabelledRow("file", "a", "1"),),
                ("menu",),
            ),
            {"open", "menu"},
        ),
        (
            TextData((TextRow("open", "1"),), (TextRow("row", "1"),), (TextRow("file", "1"),), ("menu",)),
            {"open", "menu"},
        ),
    ],
)  # fmt: skip
def test_texts_that_may_be_learnt_from_count(data: Data, wanted: set[str]) -> None:
    assert longer(Trim()(model(), StepContext(data)).checkpoint) == wanted


def test_pages_can_be_left_out() -> None:
    context = StepContext(searched(["open"], [Page("p", "cell", "row text")]))
    assert longer(Trim(pages=False)(model(), context).checkpoint) == {"open"}
    with pytest.raises(InputError, match="no texts to learn from"):
        Trim(pages=False)(model(), StepContext(searched([], [Page("p", "cell", "row")])))
    with pytest.raises(InputError, match="no texts to learn from"):
        Trim()(model(), StepContext(searched([])))


COUNTED = StepContext(searched(["open open cell", "row open", "cell table cell", "row"]))  # 3, 3, 2, 1 times


def test_rare_entries_go() -> None:
    by_least = {least: longer(Trim(least=least)(model(), COUNTED).checkpoint) for least in (1, 2, 3, 4)}
    assert by_least == {
        1: {"open", "cell", "row", "table"}, 2: {"open", "cell", "row"}, 3: {"open", "cell"}, 4: set()
    }  # fmt: skip


def test_the_most_frequent_stay() -> None:
    room = len(LETTERS)
    by_most = {more: longer(Trim(entries=room + more)(model(), COUNTED).checkpoint) for more in range(6)}
    assert by_most == {
        0: set(),
        1: {"open"},  # as often as cell, and of lower id
        2: {"open", "cell"},
        3: {"open", "cell", "row"},
        4: {"open", "cell", "row", "table"},
        5: {"open", "cell", "row", "table"},
    }
    assert longer(Trim(entries=room + 3, least=3)(model(), COUNTED).checkpoint) == {"open", "cell"}
    letters = StepContext(searched(["a a b b open"]))  # they stay in any case, and take no room from others
    assert longer(Trim(entries=room + 1)(model(), letters).checkpoint) == {"open"}


def test_a_text_counts_once() -> None:
    data = SearchData((Page("p", "row", "cell"), Page("q", "row", "open cell")), (), (), ("cell",))
    assert longer(Trim(least=2)(model(), StepContext(data)).checkpoint) == {"cell"}


def test_words_stay_however_rare_they_are(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("menus help\n\n  FONT\r\n", encoding="utf-8")
    step = Trim(words=str(path), least=3)
    step.check(model().config)
    small = step(model(), COUNTED)
    assert longer(small.checkpoint) == {"menu", "help", "font", "open", "cell"}
    assert small.details["entries"]["always"] == len(LETTERS) + 3
    capped = Trim(words=str(path), entries=len(LETTERS) + 4)(model(), COUNTED).checkpoint
    assert longer(capped) == {"menu", "help", "font", "open"}


def test_words_stay_at_the_start_of_a_text_and_behind_a_space(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("freeze", encoding="utf-8")
    data = json.loads(train_subwords(["open"], kind="unigram", vocab_size=259))
    data["model"]["vocab"] += [["freeze", -0.5], ["Ġfreeze", -0.5], ["Ġgarten", -0.5]]
    whole = model(tokenizer=json.dumps(data), rows=len(data["model"]["vocab"]))
    small = Trim(words=str(path), least=99)(whole, StepContext(searched(["x"]))).checkpoint
    assert {piece for piece in pieces(small) if len(piece) > 1} == {"<pad>", "<s>", "</s>", "freeze", "Ġfreeze"}
    assert len(small.text_encoder().encode(["freeze freeze"])[0]) == 2 + len(["</s>"])


def pieces(checkpoint: Checkpoint) -> set[str]:
    """Entries of a unigram vocabulary."""
    return {piece for piece, _ in json.loads(checkpoint.tokenizer)["model"]["vocab"]}


def test_prompts_stay_and_texts_are_read_behind_them() -> None:
    text = TextConfig(POSITIONS, (("query", "open cell: "), ("passage", "text")), "query", PAD)
    small = Trim()(model(text=text), StepContext(searched(["s", "ing"])))
    assert longer(small.checkpoint) == {"open", "cell", "text", "##ing"}  # "text" and "ing" are read as one word
    assert small.details["corpus"]["tokens"]["before"] == (1 + 3) + (4 + 6) + (2 + 2)
    assert (small.details["corpus"]["texts"], small.details["corpus"]["texts_changed"]) == (2, 0)
    rare = Trim(least=3)(model(text=text), StepContext(searched(["s", "ing"]))).details["corpus"]
    assert rare["texts_changed"] == 2  # open, cell and text go, which occur twice, and ##ing
    assert rare["tokens"]["after"] == rare["tokens"]["before"] + 2 * 3 * (4 - 1) + (3 - 1)


def test_what_the_config_names_stays() -> None:
    small = Trim()(model(text=TextConfig(POSITIONS, pad_id=VOCAB.index("chart"))), COUNTED).checkpoint
    assert longer(small) == {"open", "cell", "row", "table", "chart"}
    head = LanguageHead(VOCAB.index("font"), VOCAB.index("image"))
    small = Trim()(model(WRITERS["alone"], head=head), COUNTED).checkpoint
    assert longer(small) == {"open", "cell", "row", "table", "font", "image"}


def test_rows_without_an_entry_go_unless_the_config_names_them() -> None:
    whole = model(rows=len(VOCAB) + 5)
    small = Trim()(whole, CONTEXT).checkpoint.check("small")
    assert small.config.embedding.vocab_size == len(LETTERS) + len(KEPT)
    every = StepContext(searched([" ".join([*WORDS, "rows", "printing"])]))
    assert Trim()(whole, every).checkpoint.config.embedding.vocab_size == len(VOCAB)
    named = model(rows=len(VOCAB) + 5, text=TextConfig(POSITIONS, pad_id=len(VOCAB) + 2))
    padded = Trim()(named, CONTEXT).checkpoint.check("padded")
    assert padded.config.text.pad_id == len(LETTERS) + len(KEPT)
    assert padded.config.embedding.vocab_size == padded.config.text.pad_id + 1
    row = padded.state["embeddings.tokens.weight"][-1]
    assert torch.equal(row, named.state["embeddings.tokens.weight"][len(VOCAB) + 2])


# --- what is said ---


def test_details_by_hand() -> None:
    """menu and image are rarer than 2: they become m ##e ##n ##u and i ##m ##a ##g ##e."""
    texts = ["open open menu", "cell", "cell image", "open"]
    details = Trim(least=2)(model(), StepContext(searched(texts))).details
    rows = {"before": len(VOCAB), "after": len(LETTERS) + 2}
    assert details["entries"] == {**rows, "always": len(LETTERS)}
    assert details["table_bytes"] == {when: count * 4 * WIDTH for when, count in rows.items()}
    assert details["corpus"] == {
        "texts": 4,
        "texts_changed": 2,
        "tokens": {"before": 7, "after": 14},
        "tokens_kept": round(5 / 7, 6),
        "growth": 2.0,
        "unknown": {"before": 0, "after": 0},
    }
    assert details["skipped"] == {"held_out": "4 texts, of which a tenth is less than one"}
    json.dumps(details)


def test_how_many_texts_are_read_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, wanted = model(), Trim(least=99)(model(), CONTEXT).details
    monkeypatch.setattr(module, "CHUNK", 5)
    assert {**Trim(least=99)(whole, CONTEXT).details, "seconds": 0} == {**wanted, "seconds": 0}
    assert wanted["corpus"]["texts_changed"] > 0


def test_unknown_tokens_are_counted() -> None:
    said = Trim()(model(), StepContext(searched(["open é 中 cell", "中 open"]))).details["corpus"]
    assert said["unknown"] == {"before": 2, "after": 2}
    assert said["tokens_kept"] == said["growth"] == 1.0
    assert said["texts_changed"] == 0


def held(texts: Sequence[str], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = Trim()(model(), StepContext(searched(texts), seed=seed)).details["held_out"]
    return found


def test_a_tenth_is_held_out_to_see_what_unseen_texts_lose() -> None:
    """Every text has one word of its own, which the others do not need."""
    texts = [f"open {word}" for word in WORDS[1:]] + ["open a", "open b", "open c"]
    details = Trim()(model(), StepContext(searched(texts))).details
    assert details["corpus"]["texts_changed"] == 0
    held_out = details["held_out"]
    assert held_out["texts"] == 2
    assert held_out["tokens"]["before"] == 4
    assert held_out["tokens_kept"] == 1 - held_out["texts_changed"] / 4
    changed = {seed: held(texts, seed) for seed in range(6)}
    assert held(texts, 0) == held_out
    assert max(one["texts_changed"] for one in changed.values()) == 2
    assert len({json.dumps(one) for one in changed.values()}) > 1


def test_bytes_of_every_table() -> None:
    whole = model(UNTIED)
    assert table_bytes(whole) == len(VOCAB) * 4 * (2 * WIDTH + 1)
    assert table_bytes(DYNAMIC(whole).checkpoint) == len(VOCAB) * (2 * (WIDTH + 4) + 4)
    assert table_bytes(model(WRITERS["own table"])) == len(VOCAB) * 4 * 2 * WIDTH
    assert table_bytes(model()) == len(VOCAB) * 4 * WIDTH


def test_provenance_names_the_first_models_entries() -> None:
    whole = model()
    once = Trim()(whole, CONTEXT).checkpoint
    twice = Trim(least=2)(once, StepContext(searched(["open cell", "cell row"]))).checkpoint
    for small in (once, twice):
        kept = kept_entries(small)
        assert kept is not None
        vocab = json.loads(small.tokenizer)["model"]["vocab"]
        assert [VOCAB[i] for i in kept] == sorted(vocab, key=vocab.__getitem__)
        assert torch.equal(small.state["embeddings.tokens.weight"], whole.state["embeddings.tokens.weight"][list(kept)])
    assert longer(twice) == {"cell"}
    assert twice.provenance["source"] == "tiny"
    assert twice.provenance["kept_entries"] == "3,6-10,24-75"
    assert kept_entries(whole) is None


def test_nothing_to_trim_is_said() -> None:
    whole = model()
    found = Trim()(whole, StepContext(searched([" ".join([*WORDS, "rows", "printing"])])))
    assert found.checkpoint is whole
    assert found.details["skipped"]["removal"] == "every entry is needed or stays in any case"
    assert found.details["entries"]["before"] == found.details["entries"]["after"] == len(VOCAB)
    assert "removal" not in Trim()(whole, CONTEXT).details["skipped"]


class Told:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int | None, str]] = []
        self.count = 0
        self.ended = 0

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.started.append((title, total, unit))

    def advance(self, n: int = 1, note: str = "") -> None:
        self.count += n

    def done(self, note: str = "") -> None:
        self.ended += 1


def test_progress_counts_texts() -> None:
    told = Told()
    Trim()(model(), replace(CONTEXT, progress=told))
    assert told.started == [("Counting entries", 12, "texts")]
    assert (told.count, told.ended) == (12, 1)


# --- refusals ---


def test_options_out_of_range_are_refused_together() -> None:
    with pytest.raises(InputError) as caught:
        Trim(least=0, entries=-1, pages=1)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "trim: least is 0, not a whole number of at least 1; entries is -1, not a whole number of at least 0; "
        "pages is 1, not true or false"
    )


def test_a_file_of_words_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n", encoding="utf-8")
    for path, message in ((empty, "holds no word: write one text a line"), (tmp_path / "none", "cannot be read")):
        step = Trim(words=str(path))
        for work in (lambda step=step: step.check(model().config), lambda step=step: step(model(), CONTEXT)):
            with pytest.raises(InputError, match=message) as caught:
                work()
            assert str(path) in str(caught.value)


def test_a_cap_below_what_must_stay_is_refused() -> None:
    with pytest.raises(InputError, match=f"entries is {len(LETTERS) - 1}, but {len(LETTERS)} stay in any case"):
        Trim(entries=len(LETTERS) - 1)(model(), CONTEXT)


def test_words_without_pieces_are_refused() -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="[UNK]")).to_str()
    with pytest.raises(InputError, match="the tokenizer's model is WordLevel"):
        Trim()(model(tokenizer=tokenizer), CONTEXT)


def test_rows_are_those_of_the_ids() -> None:
    whole = model()
    kept = [i for i in range(len(VOCAB)) if i % 2 or i in (PAD, len(VOCAB) - 1)]
    small = with_entries(whole, "{}", kept)
    assert small.tokenizer == "{}"
    assert torch.equal(small.state["embeddings.tokens.weight"], whole.state["embeddings.tokens.weight"][kept])
    assert small.state["embeddings.positions.weight"] is whole.state["embeddings.positions.weight"]
