"""The bundle at work, its refusals, and that it needs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import LABELS, TOKENIZER, sentences, tiny, tiny_config, with_head
from tokenizers import Tokenizer

from slimformer.export.bundle import export
from slimformer.export.contents import is_bundle
from slimformer.export.runtime import load_bundle
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead, EmbeddingHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.vectors import VectorForm, find_ranges, keep

PROMPTS = (("query", "find "), ("document", ""))
TEXTS = ["save", "print the page text chart font image style list file help menu", *sentences(40, seed=5), "", "row"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = with_head(EmbeddingHead(), prompts=PROMPTS, max_length=12)
    return export(model, tmp_path_factory.mktemp("embedder") / "bundle")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(with_head(ClassificationHead(LABELS)), tmp_path_factory.mktemp("classifier") / "bundle")


def eager(checkpoint: Checkpoint, texts: list[str]) -> np.ndarray:
    """One text at a time, in the model's own way."""
    model, rows = checkpoint.to_torch(), []
    for ids in checkpoint.text_encoder().encode(texts):
        with torch.inference_mode():
            rows.append(model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)).result.numpy()[0])
    return np.stack(rows)


@pytest.mark.parametrize("batch", [1, 7, 32, 100])
def test_embed_equals_eager_in_the_order_given(embedder: Path, batch: int) -> None:
    expected = eager(with_head(EmbeddingHead(), max_length=12), TEXTS)
    found = load_bundle(embedder, threads=1).embed(TEXTS, batch=batch)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_embed_gives_the_forms_that_are_judged(embedder: Path) -> None:
    bundle = load_bundle(embedder, threads=1)
    whole, queries = bundle.embed(TEXTS[:20]), bundle.embed(TEXTS[20:])
    ranges = find_ranges(whole, 10)
    for precision, kind, width in (("float32", np.float32, 10), ("int8", np.int8, 10), ("binary", np.uint8, 2)):
        found = bundle.embed(TEXTS[20:], dimensions=10, precision=precision, ranges=ranges)
        assert (found.dtype, found.shape) == (kind, (len(queries), width))
        np.testing.assert_array_equal(found, keep(queries, VectorForm(10, precision), ranges))
    first = queries[:, :10] / np.linalg.norm(queries[:, :10], axis=1, keepdims=True)
    np.testing.assert_allclose(bundle.embed(TEXTS[20:], dimensions=10), first, atol=1e-6)
    np.testing.assert_array_equal(bundle.embed(TEXTS[20:], precision="binary"), np.packbits(queries > 0, axis=1))


def test_forms_are_refused_before_anything_is_embedded(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = load_bundle(embedder, threads=1)
    monkeypatch.setattr(bundle, "_run", None)
    with pytest.raises(InputError, match="int8 needs the range of each column in the pages' vectors"):
        bundle.embed(TEXTS, precision="int8")
    with pytest.raises(InputError, match="dimensions is 17, and the vectors have 16 columns"):
        bundle.embed(TEXTS, dimensions=17)
    with pytest.raises(InputError, match="precision is 'ubinary', not one of float32, int8, binary"):
        bundle.embed(TEXTS, precision="ubinary")


def test_logits_and_classes_equal_eager(classifier: Path) -> None:
    expected = eager(with_head(ClassificationHead(LABELS)), TEXTS)
    bundle = load_bundle(classifier, threads=1)
    np.testing.assert_allclose(bundle.logits(TEXTS, batch=5), expected, atol=1e-5)
    likely = torch.softmax(torch.tensor(expected), 1).numpy()
    classes = bundle.classify(TEXTS)
    assert [label for label, _ in classes] == [LABELS[i] for i in expected.argmax(1)]
    np.testing.assert_allclose([share for _, share in classes], likely.max(1), atol=1e-5)
    assert {label for label, _ in classes} == set(LABELS)


def test_prompts_stand_before_the_text(embedder: Path, tmp_path: Path) -> None:
    bundle = load_bundle(embedder, threads=1)
    plain = bundle.embed(["find row", "row"])
    np.testing.assert_allclose(bundle.embed(["row"], prompt="query")[0], plain[0], atol=1e-6)
    np.testing.assert_allclose(bundle.embed(["row"], prompt="document")[0], plain[1], atol=1e-6)
    with pytest.raises(InputError, match=r"no prompt named 'passage'; the model has: query, document"):
        bundle.embed(["row"], prompt="passage")
    other = with_head(EmbeddingHead(), prompts=PROMPTS, default_prompt="query", max_length=12)
    default = load_bundle(export(other, tmp_path / "bundle"), threads=1)
    np.testing.assert_allclose(default.embed(["row"])[0], plain[0], atol=1e-6)


def test_no_texts_and_a_text_of_nothing(embedder: Path, classifier: Path) -> None:
    bundle = load_bundle(embedder, threads=1)
    assert bundle.embed([]).shape == (0, 16)
    assert np.linalg.norm(bundle.embed([""])) == pytest.approx(1, abs=1e-5)  # [CLS] [SEP]
    assert load_bundle(classifier, threads=1).classify([]) == []


def test_texts_without_any_token_give_zero(tmp_path: Path) -> None:
    """A tokenizer that adds no special tokens turns an empty text into no tokens at all."""
    content = json.loads(TOKENIZER)
    content["post_processor"] = None
    bare = Checkpoint(tiny().config, tiny().state, json.dumps(content))
    assert Tokenizer.from_str(bare.tokenizer).encode("").ids == []
    bundle = load_bundle(export(bare, tmp_path / "bundle"), threads=1)
    found = bundle.embed(["row", "", "open save"])
    assert not found[1].any()
    assert found[0].any()
    assert found[2].any()
    np.testing.assert_array_equal(bundle.embed(["", ""]), np.zeros((2, 16)))


def test_progress_is_told_of_every_text(embedder: Path) -> None:
    class Listener:
        def __init__(self) -> None:
            self.started: list[tuple[str, int | None, str]] = []
            self.counted = self.ended = 0

        def start(self, title: str, total: int | None, unit: str) -> None:
            self.started.append((title, total, unit))

        def advance(self, n: int = 1, note: str = "") -> None:
            self.counted += n

        def done(self, note: str = "") -> None:
            self.ended += 1

    listener = Listener()
    load_bundle(embedder, threads=1).embed(TEXTS, progress=listener)
    assert listener.started == [("embed", len(TEXTS), "texts")]
    assert (listener.counted, listener.ended) == (len(TEXTS), 1)


def test_the_wrong_head_is_refused(embedder: Path, classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not classify; it has the head embedding"):
        load_bundle(embedder).classify(["row"])
    with pytest.raises(InputError, match="does not embed; it has the head classification"):
        load_bundle(classifier).embed(["row"])
    none = load_bundle(export(tiny(tiny_config(head=None)), tmp_path / "bundle"))
    with pytest.raises(InputError, match="the head none"):
        none.embed(["row"])


def test_run_gives_every_output_by_name(embedder: Path) -> None:
    values = load_bundle(embedder).run(np.array([[2, 9, 3]]), np.ones((1, 3), np.int64))
    assert {name: value.shape for name, value in values.items()} == {
        "last_hidden_state": (1, 3, 16),
        "sentence_embedding": (1, 16),
    }


def damage(path: Path, content: str | bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


DAMAGES: dict[str, tuple[str, str | bytes | None, str]] = {
    "no own file": ("slimformer.json", None, "is not a bundle"),
    "not JSON": ("slimformer.json", "{", "damaged"),
    "not an object": ("slimformer.json", "[1]", "damaged"),
    "not text": ("slimformer.json", b"\xff\xfe\x00", "cannot read"),
    "no version": ("slimformer.json", "{}", "damaged"),
    "another version": ("slimformer.json", '{"format_version": 99}', "format_version 99, this slimformer reads 1"),
    "no config": ("slimformer.json", '{"format_version": 1}', "damaged"),
    "broken config": ("slimformer.json", '{"format_version": 1, "config": {"d_model": 3}}', r"slimformer\.json"),
    "no graph": ("onnx/model.onnx", None, r"model\.onnx"),
    "cut graph": ("onnx/model.onnx", b"\x08\x0a", r"model\.onnx"),
    "no tokenizer": ("tokenizer.json", None, r"cannot read .*tokenizer\.json"),
    "broken tokenizer": ("tokenizer.json", "{}", r"tokenizer\.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_bundle_gets_one_clear_line(name: str, tmp_path: Path) -> None:
    file, content, message = DAMAGES[name]
    bundle = export(tiny(), tmp_path / "bundle")
    damage(bundle / file, content)
    with pytest.raises(InputError, match=message) as caught:
        load_bundle(bundle)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "tokenizer" in name


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    assert not is_bundle(tmp_path)
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="is not a bundle"):
            load_bundle(place)


def test_a_provider_that_is_not_there_is_refused(embedder: Path) -> None:
    with pytest.raises(InputError, match="tpu"):
        load_bundle(embedder, provider="tpu")


def test_the_runtime_needs_no_torch(embedder: Path) -> None:
    program = (
        "import sys\n"
        "from slimformer.export.runtime import load_bundle\n"
        f"vectors = load_bundle({str(embedder)!r}, threads=1).embed(['open the file'])\n"
        "print(vectors.shape, sorted({'torch', 'onnx', 'safetensors', 'scipy', 'click'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 16) []"
