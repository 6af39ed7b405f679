"""Parity: good bundles pass, a bundle with another weight does not, and what is said of int8."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tiny import LABELS, TOKENIZER, layer, sentences, tiny, tiny_config, with_head

from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.export.bundle import export
from slimformer.export.validation import FLOAT_LIMIT, _quantized_limit, check_parity, parity_batches, run_eager
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import ClassificationHead, EmbeddingHead
from slimformer.transformer.data import SearchData
from slimformer.transformer.quantization import formatted, halved, linear_names, quantized, with_formats

TEXTS = sentences(24, seed=8)


def change_weight(bundle: Path, name: str, by: float) -> None:
    """Add to one value of one initializer."""
    path = bundle / "onnx/model.onnx"
    model = onnx.load(path)
    stored = next(one for one in model.graph.initializer if one.name == name)
    value = numpy_helper.to_array(stored).copy()
    value.reshape(-1)[7] += by
    stored.CopyFrom(numpy_helper.from_array(value, name))
    onnx.save(model, path)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(
    "head", [EmbeddingHead("cls"), ClassificationHead(LABELS), None], ids=["embed", "class", "none"]
)
def test_a_good_fp32_bundle_passes(
    head: EmbeddingHead | ClassificationHead | None, layout: str, tmp_path: Path
) -> None:
    model = tiny(tiny_config((layer(), layer(0), layer(neurons=0)), head))
    parity = check_parity(model, export(model, tmp_path / "b", layout=layout), texts=TEXTS, threads=1)
    assert parity.passed
    assert parity.empty_rows
    assert 0 < parity.max_absolute < 2e-5
    assert 0 < parity.max_relative < 1e-4
    assert parity.median_relative is not None
    assert parity.median_relative < 1e-5
    assert parity.quantization_relative is None
    assert (parity.measured, parity.limit) == ("max_absolute", FLOAT_LIMIT)
    assert parity.shapes == len(parity_batches(model.config, 0))


@pytest.mark.parametrize(
    "name", ["encoder.1.ffn.down.weight", "encoder.0.mixer_norm.bias", "embeddings.positions.weight"]
)
def test_one_changed_weight_fails(name: str, tmp_path: Path) -> None:
    model = tiny()
    bundle = export(model, tmp_path / "b")
    change_weight(bundle, name, 0.05)
    parity = check_parity(model, bundle, threads=1)
    assert not parity.passed
    assert parity.max_absolute > FLOAT_LIMIT


def test_nan_fails(tmp_path: Path) -> None:
    model = tiny()
    bundle = export(model, tmp_path / "b")
    change_weight(bundle, "encoder.0.ffn_norm.bias", math.nan)
    parity = check_parity(model, bundle, texts=TEXTS, threads=1)
    assert not parity.passed
    assert not parity.empty_rows
    assert parity.max_absolute == math.inf


def test_int8_is_judged_by_the_distance_to_its_original(tmp_path: Path) -> None:
    plain = tiny(tiny_config((layer(4, 16, 128),), d_model=64))
    model = quantized(plain, bits=7)
    bundle = export(model, tmp_path / "b")
    parity = check_parity(model, bundle, texts=TEXTS, original=plain, threads=1)
    assert parity.passed
    assert parity.measured == "median_relative"
    vectors = []
    for checkpoint in (model, plain):
        rows = []
        for ids in checkpoint.text_encoder().encode(TEXTS):
            row = np.array([ids])
            rows.append(run_eager(checkpoint.to_torch(), row, np.ones_like(row))["sentence_embedding"][0])
        vectors.append(np.stack(rows))
    noise = np.median(np.linalg.norm(vectors[0] - vectors[1], axis=1) / np.linalg.norm(vectors[1], axis=1))
    assert parity.quantization_relative == pytest.approx(noise, rel=1e-4)
    assert parity.limit == pytest.approx(0.2 * noise, rel=1e-4)
    assert parity.alone_vs_beside is not None
    assert 0 < parity.alone_vs_beside <= 0.03
    assert parity.median_relative is not None
    assert parity.median_relative <= parity.limit


def test_int8_with_another_scale_fails(tmp_path: Path) -> None:
    plain = tiny()
    model = quantized(plain, bits=7)
    bundle = export(model, tmp_path / "b")
    change_weight(bundle, "encoder.0.ffn.down.scale", 0.5)
    assert not check_parity(model, bundle, texts=TEXTS, original=plain, threads=1).passed


@pytest.mark.parametrize("count", [1, 2, 6])
def test_half_precision_is_judged_by_its_roundings(count: int, tmp_path: Path) -> None:
    """Half of the limit is not reached, and one linear's weight that is 5 % off is beyond it."""
    model = halved(tiny(tiny_config((layer(4, 16, 128),) * count, d_model=64), seed=count), "float16")
    bundle = export(model, tmp_path / "b")
    parity = check_parity(model, bundle, texts=TEXTS, threads=1)
    assert parity.measured == "median_relative"
    assert parity.limit == pytest.approx(2**-11 * (4 * count) ** 0.5)
    assert parity.median_relative is not None
    assert 0.1 * parity.limit < parity.median_relative < 0.5 * parity.limit
    assert parity.passed
    state = {**model.state, "encoder.0.ffn.down.weight": model.state["encoder.0.ffn.down.weight"] * 1.05}
    assert not check_parity(replace(model, state=state), bundle, texts=TEXTS, threads=1).passed


def test_the_limit_of_several_formats() -> None:
    """Half precision alone by its roundings, the coarser of two; beside int8 by the distance to the float model."""
    linears = linear_names(tiny().config)  # eight

    def limit(*forms: str) -> float:
        chosen = {name: forms[i % len(forms)] for i, name in enumerate(linears)}
        return _quantized_limit(with_formats(tiny().config, chosen), 0.3)

    assert limit("float16") == pytest.approx(2**-11 * 8**0.5)
    assert limit("float16", "bfloat16") == pytest.approx(2**-8 * 8**0.5)
    assert limit("float16", "float32") == pytest.approx(2**-11 * 4**0.5)
    assert limit("float16", "int8_dynamic") == 0.3
    assert limit("int8_dynamic", "int8_static") == pytest.approx(0.2 * 0.3)
    assert _quantized_limit(quantized(tiny(), bits=7).config, None) == 0.05
    tables = formatted(tiny(), {}, bits=8, tables=True).config
    assert _quantized_limit(tables, 0.3) == pytest.approx(0.2 * 0.3)


def test_activations_beyond_half_precision_fail(tmp_path: Path) -> None:
    """The eager model overflows, and so would a device that multiplies float16."""
    plain = tiny()
    state = {**plain.state, "encoder.0.ffn.up.bias": plain.state["encoder.0.ffn.up.bias"] + 6e4}
    state["encoder.0.ffn.down.weight"] = state["encoder.0.ffn.down.weight"] * 50
    model = halved(replace(plain, state=state), "float16")
    assert not check_parity(model, export(model, tmp_path / "b"), texts=TEXTS, threads=1).passed


def test_int8_without_texts_is_judged_all_the_same(tmp_path: Path) -> None:
    """No text is no reason to pass a wrong graph."""
    model = quantized(tiny(), bits=7)
    bundle = export(model, tmp_path / "b")
    good = check_parity(model, bundle, threads=1)
    assert good.passed
    change_weight(bundle, "encoder.0.ffn.down.scale", 2.0)
    assert not check_parity(model, bundle, threads=1).passed


def test_alone_beside_longer_ones(tmp_path: Path) -> None:
    """In fp32 a batch changes nothing; in int8 with an outlier token in another text it does, and too much fails."""
    plain = tiny()
    assert check_parity(plain, export(plain, tmp_path / "a"), texts=TEXTS, threads=1).alone_vs_beside == pytest.approx(
        0, abs=1e-6
    )
    loud = dict(plain.state)
    row = plain.text_encoder().encode(["macro"])[0][1]
    loud["embeddings.tokens.weight"] = loud["embeddings.tokens.weight"].clone()
    norm = torch.ones(16)
    norm[3] = 60.0
    loud["embeddings.tokens.weight"][row] = 0
    loud["embeddings.tokens.weight"][row, 3] = 500.0
    loud["embeddings.norm.weight"] = norm
    model = quantized(replace(plain, state=loud), bits=7)
    quiet = [text for text in TEXTS if "macro" not in text]
    texts = [*quiet, "macro " * 16]
    parity = check_parity(model, export(model, tmp_path / "b"), texts=texts, threads=1)
    assert parity.alone_vs_beside is not None
    calm = check_parity(model, tmp_path / "b", texts=quiet, threads=1)
    assert calm.alone_vs_beside is not None
    assert parity.alone_vs_beside > 3 * calm.alone_vs_beside
    assert parity.passed is (parity.alone_vs_beside <= 0.03)


def test_a_text_without_tokens_among_the_texts(tmp_path: Path) -> None:
    bare_tokenizer = json.loads(TOKENIZER)
    bare_tokenizer["post_processor"] = None
    model = Checkpoint(tiny().config, tiny().state, json.dumps(bare_tokenizer))
    parity = check_parity(model, export(model, tmp_path / "b"), texts=["", *TEXTS], threads=1)
    assert parity.passed


def test_batches_are_of_every_kind() -> None:
    batches = parity_batches(tiny().config, seed=0)
    shapes = {ids.shape for ids, _ in batches}
    longest = tiny().config.embedding.positions
    assert {(1, 1), (1, longest)} <= shapes
    masks = [mask for _, mask in batches]

    def is_some(kind: str) -> bool:
        falls = [np.diff(mask, axis=1) for mask in masks]
        return {
            "right": any((f == -1).any() and not (f == 1).any() for f in falls),
            "left": any((f == 1).any() and not (f == -1).any() for f in falls),
            "interior": any(((f == 1).any(1) & (f == -1).any(1)).any() for f in falls),
            "one empty row": any((m.sum(1) == 0).sum() == 1 and m.any() for m in masks),
            "all empty": any(not m.any() for m in masks),
            "many rows": any(len(m) >= 16 for m in masks),
        }[kind]

    assert all(map(is_some, ("right", "left", "interior", "one empty row", "all empty", "many rows")))
    again = parity_batches(tiny().config, seed=0)
    assert all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in zip(batches, again, strict=True))


def test_parity_is_ready_for_json(tmp_path: Path) -> None:
    model = with_head(EmbeddingHead())
    parity = check_parity(model, export(model, tmp_path / "b"), threads=1)
    assert json.loads(json.dumps(parity.to_dict()))["passed"] is True


@pytest.mark.parametrize(("form", "share"), [("int8_static", 0.2), ("int8_blocks", 1.0), ("int4_blocks", 1.0)])
def test_the_limit_is_a_share_of_what_quantization_loses(form: str, share: float, tmp_path: Path) -> None:
    """All of it for blocks, whose roundings flip more often."""
    plain = tiny(tiny_config((layer(4, 8, 64),), d_model=32))
    texts = tuple(sentences(20, seed=5))
    step = Quantize(format=form, formats=("*.qkv=float32",), bits=7, samples=20)
    model = step(plain, StepContext(SearchData((), (), (), texts))).checkpoint
    parity = check_parity(model, export(model, tmp_path / "b"), texts=texts, original=plain)
    assert parity.quantization_relative is not None
    assert parity.limit == pytest.approx(share * parity.quantization_relative)
    assert parity.passed
