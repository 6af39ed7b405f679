"""Language models: likelihoods text by text, windows of long texts, learning, and what cannot be taught."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import slimformer.transformer.language as language
from slimformer.transformer.architecture import Architecture, new_model
from slimformer.transformer.errors import InputError
from slimformer.transformer.generation import Decoding, generate
from slimformer.transformer.language import teach_texts
from slimformer.transformer.lesson import NOTES
from slimformer.transformer.parts import Part
from slimformer.transformer.quantization import quantized
from slimformer.transformer.splits import TextData, TextRow
from slimformer.transformer.subwords import train_subwords
from slimformer.transformer.teaching import Teaching
from slimformer.transformer.tokenizer import TextEncoder

LETTERS = "abcdefghij"
TOKENIZER = train_subwords(4 * [" ".join(LETTERS)], vocab_size=300)
TINY = Architecture(encoder=0, decoder=1, width=32, heads=2, neurons=64, positions=12)
QUICK = Teaching(steps=20, batch_tokens=200, warmup=5)


def rows(count: int, seed: int) -> tuple[TextRow, ...]:
    """Parts of the alphabet, in its order, over and over: after the first letter nothing is open but the end."""
    draw = random.Random(seed)
    starts = [(draw.randrange(10), draw.randint(2, 6)) for _ in range(count)]
    texts = [" ".join(LETTERS[(start + i) % 10] for i in range(length)) for start, length in starts]
    return tuple(TextRow(text, str(i)) for i, text in enumerate(texts))


DATA = TextData(rows(80, 0), rows(12, 1), rows(12, 2), ())


@torch.inference_mode()
def test_measures_by_hand() -> None:
    """Token by token in float64: perplexity of a token with the end, bits of a byte of the text."""
    checkpoint = new_model(TINY, TOKENIZER, 0)
    model, encoder = checkpoint.to_torch(), checkpoint.text_encoder()
    nats, tokens, size = 0.0, 0, 0
    for row in DATA.test:
        (ids,) = encoder.encode([row.text])
        begun = torch.tensor([[checkpoint.config.head.start_id, *ids[:-1]]])
        chances = model(begun, torch.ones_like(begun)).result.double().log_softmax(1)
        nats -= float(chances[range(len(ids)), ids].sum())
        tokens, size = tokens + len(ids), size + len(row.text.encode())
    found = language._Lesson(checkpoint, DATA, QUICK, "cpu").measure("test")
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["likelihood"] == pytest.approx(100 * math.exp(-nats / tokens), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_a_long_text_is_read_in_windows() -> None:
    """30 letters and the end: two windows of the 12 positions, and the rest; all count for their text."""
    long = TextRow(" ".join(LETTERS * 3), "0")
    checkpoint = new_model(TINY, TOKENIZER, 0)
    lesson = language._Lesson(checkpoint, replace(DATA, train=(*DATA.train[:1], long)), QUICK, "cpu")
    encoder = TextEncoder(TOKENIZER, 1000)
    ids = encoder.encode([long.text])[0]
    assert [len(window) for window in lesson.windows[1:]] == [12, 12, len(ids) - 24]
    assert [token for window in lesson.windows[1:] for token in window] == ids
    both = lesson.judge([long, DATA.test[0]])
    assert both.statistics[:, 1].tolist() == [len(ids), len(encoder.encode([DATA.test[0].text])[0])]
    model, nats = checkpoint.to_torch(), 0.0
    for window in lesson.windows[1:]:
        begun = torch.tensor([[checkpoint.config.head.start_id, *window[:-1]]])
        with torch.inference_mode():
            chances = model(begun, torch.ones_like(begun)).result.double().log_softmax(1)
        nats -= float(chances[range(len(window)), window].sum())
    assert both.statistics[0, 0] == pytest.approx(nats, rel=1e-5)
    parts = [encoder.decode(window) for window in lesson.windows[1:]]
    assert "".join(parts) == long.text


def test_the_alphabet_is_learnt(tmp_path: Path) -> None:
    """Open are the first letter, of 10, and the length, of 5: at least exp((ln 10 + ln 5) / 5) = 2.2 for 5 tokens."""
    options = Teaching(steps=250, batch_tokens=400, warmup=30, lr=5e-3, dropout=0.0, smoothing=0.0)
    tuned = teach_texts(new_model(TINY, TOKENIZER, 0), replace(DATA, train=rows(400, 3)), tmp_path / "out", options)
    assert tuned.provenance[NOTES]["test"]["perplexity"] < 2.4
    encoder = tuned.text_encoder()
    ids = encoder.encode(["c"])[0][:-1]
    found = generate(tuned.to_torch(), None, Decoding(max_new_tokens=3), prefixes=[ids])
    assert encoder.decode(ids + found.sequences[0, 0].tolist()).startswith("c d e")


def test_broken_off_and_resumed_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = new_model(replace(TINY, mixer="lstm"), TOKENIZER, 0)
    whole = teach_texts(start, DATA, tmp_path / "whole", QUICK)
    monkeypatch.setattr("slimformer.transformer.training.SAVE_SECONDS", -1.0)
    real, calls = language._Lesson.loss, 0

    def loss(self: Any, batch: list[int]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return real(self, batch)

    monkeypatch.setattr(language._Lesson, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        teach_texts(start, DATA, tmp_path / "out", QUICK)
    resumed = teach_texts(start, DATA, tmp_path / "out", QUICK, resume=True)
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())


def test_refusals(tmp_path: Path) -> None:
    start, out = new_model(TINY, TOKENIZER, 0), tmp_path / "out"
    with pytest.raises(InputError, match="there are no texts of valid"):
        teach_texts(start, replace(DATA, valid=()), out, QUICK)
    with pytest.raises(InputError, match="needs a decoder by itself with a language head, in float"):
        teach_texts(new_model(replace(TINY, encoder=1), TOKENIZER, 0), DATA, out, QUICK)
    with pytest.raises(InputError, match="in float"):
        teach_texts(quantized(start, bits=7), DATA, out, QUICK)
    assert list(tmp_path.iterdir()) == []


def test_zeros_of_a_sparse_model_stay(tmp_path: Path) -> None:
    start, name = new_model(TINY, TOKENIZER, 0), "decoder.0.ffn.up"
    state = {key: value.clone() for key, value in start.state.items()}
    state[f"{name}.weight"][:, ::2] = 0.0
    sparse = replace(start, state=state).with_provenance(sparse={"linears": [name]})
    weight = teach_texts(sparse, DATA, tmp_path / "out", QUICK).state[f"{name}.weight"]
    assert torch.equal(weight == 0, state[f"{name}.weight"] == 0)
    assert not torch.equal(weight, state[f"{name}.weight"])


def test_parts_of_a_step_weigh_by_their_tokens() -> None:
    """Windows of unlike lengths: what the parts come to is the loss of all."""
    lesson = language._Lesson(new_model(TINY, TOKENIZER, 0), DATA, QUICK, "cpu")
    order = sorted(range(len(lesson.windows)), key=lambda i: lesson.lengths[i])
    assert lesson.lengths[order[0]] < lesson.lengths[order[-1]]
    cut = [[order[0]], order[1:]]
    parts = [lesson.loss(Part(part, [*cut[0], *cut[1]])).item() for part in cut]
    assert sum(parts) == pytest.approx(lesson.loss(Part(order)).item(), rel=1e-5)
