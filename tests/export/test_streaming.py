"""Text as its tokens come: what is final, when it comes, and that it is the text of the whole decode."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import MIXERS, POSITIONS, SENTENCES, decoder_config
from tiny import tiny
from tokenizers import Tokenizer, decoders, models
from writing import END, START, writer

from slimformer.export import streaming
from slimformer.export.bundle import export
from slimformer.export.runtime import Bundle, Search, load_bundle
from slimformer.export.streaming import choose, pieces
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import EmbeddingConfig, LanguageHead
from slimformer.transformer.decoding import Decoding, uniform
from slimformer.transformer.errors import InputError
from slimformer.transformer.subwords import train_subwords
from slimformer.transformer.tokenizer import TextEncoder, windows

UNTIED = LanguageHead(START, END, tied=False, bias=True)
DRAWN: Search = {"sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 3}
FOREIGN = "Größe: 漢字 😀, naïve"


def model(encoder: int, mixer: str = "attention") -> Checkpoint:
    return writer(decoder_config(encoder, 2, MIXERS[mixer], head=UNTIED), 5, 1.0)


@pytest.fixture(scope="module", params=[1, 0], ids=["beside", "alone"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(export(model(request.param), tmp_path_factory.mktemp("b") / "b"), threads=1)


def whole(bundle: Bundle, text: str, **options: Any) -> str:
    write = bundle.translate if bundle.config.encoder else bundle.generate
    return write([text], **options)[0]


# --- bundles ---


@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("mixer", ["attention", "lstm", "ssru"])
@pytest.mark.parametrize("encoder", [1, 0])
def test_the_pieces_are_the_text_of_the_whole_decode(encoder: int, mixer: str, format: str, tmp_path: Path) -> None:
    bundle = load_bundle(export(model(encoder, mixer), tmp_path / "b", format=format), threads=1)
    seen = set()
    for text in (*SENTENCES[:4], "sort"):
        for options in ({}, DRAWN):
            given = list(bundle.stream(text, max_new_tokens=6, **options))
            assert "".join(given) == whole(bundle, text, max_new_tokens=6, **options)
            assert all(given)
            seen.add(tuple(given))
    assert len(seen) > 4
    assert max(map(len, seen)) > 2


def test_pieces_come_while_it_is_written(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is run for each piece asked for, and none after the last token."""
    real, runs = streaming.Stepper._run, list[int]()
    monkeypatch.setattr(
        streaming.Stepper, "_run", staticmethod(lambda graph, ids, *a: runs.append(len(ids)) or real(graph, ids, *a))
    )
    given = opened.stream("print", max_new_tokens=4)
    assert runs == []
    first = next(given)
    assert len(runs) <= 2
    rest = list(given)
    assert len(runs) == 4
    assert first + "".join(rest) == whole(opened, "print", max_new_tokens=4)


def test_it_stops_at_the_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for encoder in (1, 0):
        ending = writer(decoder_config(encoder, 1, head=UNTIED), 5, 50.0)
        bundle = load_bundle(export(ending, tmp_path / str(encoder)), threads=1)
        assert list(bundle.write_one([5, 6, 7], 9)) == [END]
        assert list(bundle.stream("print")) == []


def test_without_a_limit_it_goes_on_to_the_last_position(tmp_path: Path) -> None:
    for encoder in (1, 0):
        endless = writer(decoder_config(encoder, 1, head=UNTIED), 5, -50.0)
        bundle = load_bundle(export(endless, tmp_path / str(encoder)), threads=1)
        read = [5, 6, 7]
        assert list(bundle.write_one(read)) == bundle.write([read])[0]
        assert len(list(bundle.write_one(read))) == (POSITIONS if encoder else POSITIONS - len(read))


def test_no_token_and_texts_of_nothing(opened: Bundle) -> None:
    assert list(opened.stream("print", max_new_tokens=0)) == []
    for text in ("", "  "):
        assert "".join(opened.stream(text, max_new_tokens=5)) == whole(opened, text, max_new_tokens=5)


def test_a_summarizer_streams_what_it_says_of_a_texts_beginning(tmp_path: Path) -> None:
    config = decoder_config(1, 2, head=replace(UNTIED, kind="summarization"))
    bundle = load_bundle(export(writer(config, 5, 1.0), tmp_path / "b"), threads=1)
    text = "sort the rows and print the file " * 12
    (expected,) = bundle.summarize([text], max_new_tokens=6)
    assert "".join(bundle.stream(text, max_new_tokens=6)) == expected != ""


def test_refusals_come_at_once(opened: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="2 beams know no token before the last one: stream with one beam"):
        opened.stream("sort", beams=2)
    with pytest.raises(InputError, match="is over the model's 24 tokens"):
        opened.stream("print " * 40)
    with pytest.raises(InputError, match=r"max_new_tokens 25.* is over the model's 24 positions"):
        opened.stream("sort", max_new_tokens=25)
    with pytest.raises(InputError, match="temperature must be above 0"):
        opened.stream("sort", sample=True, temperature=0.0)
    with pytest.raises(TypeError, match="a graph does not know n_best"):
        opened.stream("sort", n_best=1)
    embedder = load_bundle(export(tiny(), tmp_path / "e"), threads=1)
    with pytest.raises(InputError, match="does not write; it has the head embedding"):
        embedder.stream("sort")


def test_streaming_needs_no_torch(opened: Bundle) -> None:
    program = (
        "import sys\n"
        "from slimformer.export.runtime import load_bundle\n"
        f"text = ''.join(load_bundle({str(opened.path)!r}, threads=1).stream('sort', max_new_tokens=3))\n"
        "print([text], sorted({'torch', 'onnx', 'safetensors', 'scipy', 'click'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.stdout == f"{[whole(opened, 'sort', max_new_tokens=3)]} []\n", done.stderr


def test_bytes_that_are_no_characters_yet_are_held_back(tmp_path: Path) -> None:
    """A model that draws bytes: some are parts of characters, some never become one."""
    tokenizer = train_subwords([FOREIGN, "a b c"], vocab_size=259)
    rows = TextEncoder(tokenizer, 9).vocab_size
    table = EmbeddingConfig(rows, 64, position_kind="sinusoidal", norm=False)
    config = replace(decoder_config(0, 1, head=LanguageHead(1, 2, tied=False, bias=True)), embedding=table)
    made = writer(config, 5, 1.0)
    made.state["head.tokens.weight"] *= 0.01
    made.state["head.bias"][:] = -9.0
    for ids in TextEncoder(tokenizer, 64).encode(["éé漢😀 a"]):
        made.state["head.bias"][ids[:-1]] = 1.0
    bundle = load_bundle(export(Checkpoint(config, made.state, tokenizer), tmp_path / "b"), threads=1)
    kinds = set()
    for seed in range(12):
        options: Search = {"sample": True, "seed": seed}
        given = list(bundle.stream("a", max_new_tokens=20, **options))
        expected = whole(bundle, "a", max_new_tokens=20, **options)
        assert "".join(given) == expected
        kinds |= set(expected)
    assert {"\ufffd", " "} < kinds
    assert any(ord(sign) > 127 and sign != "\ufffd" for sign in kinds)


# --- pieces ---


def streamed(encoder: TextEncoder, ids: list[int]) -> list[str]:
    return list(pieces(iter(ids), encoder.decode, encoder.settled))


def test_characters_of_several_tokens_come_whole() -> None:
    """Each byte is a token here; a piece is a character."""
    encoder = TextEncoder(train_subwords(["a"], vocab_size=259), 99)
    (ids,) = encoder.encode([FOREIGN])
    assert len(ids) == len(FOREIGN.encode()) + 1
    assert streamed(encoder, ids) == list(FOREIGN)
    cut = ids[: len("Größe: 漢".encode()) + 1]  # the first of three bytes is the last one written
    assert streamed(encoder, cut) == [*"Größe: 漢", "\ufffd"]


def test_word_pieces_come_with_the_space_before_them() -> None:
    made = model(0)
    encoder = made.text_encoder()
    (ids,) = encoder.encode(["how do i sort cells? print!"])
    assert "".join(streamed(encoder, ids)) == encoder.decode(ids)
    assert streamed(encoder, ids)[:3] == ["how", " do", " i"]


def falling_back() -> TextEncoder:
    """Characters, and bytes to fall back on; a run of bytes that is no UTF-8 becomes U+FFFD, byte by byte."""
    vocabulary = {"a": 0, "b": 1, "▁": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return TextEncoder(tokenizer.to_str(), 99)


def test_a_run_of_bytes_is_given_when_it_ends() -> None:
    """The three bytes of one character are that character until a fourth byte makes nothing of all of them."""
    encoder = falling_back()
    sign = [3 + byte for byte in "你".encode()]
    assert encoder.decode([0, *sign]) == "a你"
    assert encoder.decode([0, *sign, sign[0]]) == "a" + "\ufffd" * 4
    assert streamed(encoder, [0, *sign, sign[0]]) == ["a", "\ufffd" * 4]
    assert streamed(encoder, [0, *sign, *sign, 1, 2, 0]) == ["a", "你你b", " ", "a"]
    assert streamed(encoder, [0, *sign]) == ["a", "你"]


def test_a_tokenizer_that_takes_text_back_is_found_out() -> None:
    def text(ids: Any) -> str:
        return "".join("ab"[i] for i in ids).replace("ab", "c")

    given = pieces([0, 1], text, len)
    assert next(given) == "a"
    with pytest.raises(InputError, match="the tokenizer made 'c' of 'a': this model writes whole texts only"):
        next(given)


def test_a_token_without_text_gives_no_piece() -> None:
    def tokens() -> Iterator[int]:
        yield from (1, 0, 1, 0)

    assert list(pieces(tokens(), lambda ids: "x" * sum(ids), len)) == ["x", "x"]


# --- the choice of a token ---

CHANCES = np.array([0.1, 0.4, 0.2, 0.2, 0.1])
ORDER = [1, 2, 3, 0, 4]  # of equal ones the first


@pytest.mark.parametrize(
    ("options", "edges"),
    [
        ({}, [0.4, 0.6, 0.8, 0.9]),
        ({"top_k": 3}, [0.5, 0.75]),
        ({"top_k": 1}, []),
        ({"top_p": 0.7}, [0.5, 0.75]),  # 0.4 and 0.6 lie below
        ({"top_k": 4, "top_p": 0.5}, [2 / 3]),  # of 0.9: 0.44, 0.67
        ({"top_k": 9}, [0.4, 0.6, 0.8, 0.9]),
        ({"temperature": 0.5}, [0.16 / 0.26, 0.2 / 0.26, 0.24 / 0.26, 0.25 / 0.26]),  # squares
    ],
)
def test_draws_worked_out_by_hand(options: dict[str, Any], edges: list[float]) -> None:
    logits = np.log(CHANCES).astype(np.float32) + np.float32(3)
    found = [choose(logits, Decoding(sample=True, seed=8, **options), step) for step in range(200)]
    assert found == [ORDER[sum(edge <= uniform(8, step) for edge in edges)] for step in range(200)]


def test_the_best_token_is_the_first_of_equal_ones() -> None:
    assert choose(np.array([0, 2, 2, 1], np.float32), Decoding(), 0) == 1


# --- reading ---


@pytest.mark.parametrize("mixer", ["attention", "lstm", "ssru"])
def test_a_bundle_reads_as_pytorch_does(mixer: str, tmp_path: Path) -> None:
    """One text is longer than the positions; batches of any size are alike."""
    checkpoint = model(0, mixer)
    bundle = load_bundle(export(checkpoint, tmp_path / "b"), threads=1)
    texts = [*SENTENCES[:5], " ".join(SENTENCES) * 2, "sort"]
    net, expected = checkpoint.to_torch(), []
    for number, window in windows(texts, checkpoint.tokenizer, POSITIONS):
        with torch.inference_mode():
            begun = torch.tensor([[START, *window[:-1]]])
            logits = net(begun, torch.ones_like(begun)).result.double()
        chances = logits.log_softmax(1)[range(len(window)), window]
        expected.append((number, -chances, logits.argmax(1)))
    assert len(expected) > len(texts)
    for batch in (1, 3, 8):
        found = bundle.read(texts, batch=batch)
        assert [one.text for one in found] == [number for number, *_ in expected]
        for one, (_, losses, likeliest) in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.losses, losses, atol=1e-4)
            assert one.likeliest.tolist() == likeliest.tolist()
    assert bundle.read([]) == []


def test_texts_are_read_with_a_past_of_as_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime takes a single row, too, which is not what the graph's axes say."""
    seen, real = list[dict[str, Any]](), streaming._Graph.run
    monkeypatch.setattr(streaming._Graph, "run", lambda self, given: seen.append(given) or real(self, given))
    load_bundle(export(model(0), tmp_path / "b"), threads=1).read(SENTENCES[:3])
    assert {len(value.numpy()) for value in seen[0].values()} == {3}


def test_only_a_language_model_reads(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was made to translate, not to generate"):
        load_bundle(export(model(1), tmp_path / "b"), threads=1).read(["sort"])
    with pytest.raises(InputError, match="does not write"):
        load_bundle(export(tiny(), tmp_path / "e"), threads=1).read(["sort"])
