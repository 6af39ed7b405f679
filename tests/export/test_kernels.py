"""The ordered kernels against onnxruntime: the same bits where its x86-64 kernels are at work, and what that is for."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from slimformer.export.bundle import export
from slimformer.export.machine import cpu_flags, int8_weight_bits
from slimformer.export.runtime import load_bundle
from slimformer.export.validation import run_eager
from slimformer.transformer.kernels import OrderedNorm, erf_gelu, ordered_attend
from slimformer.transformer.loading import load
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import pad

ROOT = Path(__file__).resolve().parents[2]
FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32


def assert_same(found: np.ndarray, ours: np.ndarray) -> None:
    """The same bits where the processor has the kernels that ours repeat, else as close as float allows."""
    if cpu_flags()["avx2"]:
        np.testing.assert_array_equal(found, ours)
    else:
        np.testing.assert_allclose(found, ours, atol=2e-6, rtol=1e-6)


def run(operator: str, inputs: dict[str, Tensor], domain: str = "", **attributes: Any) -> np.ndarray:
    """One operator in onnxruntime; absent optional inputs are named by a leading underscore."""
    names = ["" if name.startswith("_") else name for name in inputs]
    given = {name: value.numpy() for name, value in inputs.items() if name in names}
    kinds = {name: INT32 if value.dtype == np.int32 else FLOAT for name, value in given.items()}
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(operator, names, ["y"], domain=domain, **attributes)],
        "one",
        [onnx.helper.make_tensor_value_info(name, kind, given[name].shape) for name, kind in kinds.items()],
        [onnx.helper.make_tensor_value_info("y", FLOAT, None)],
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    opened = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(opened.run(None, given)[0])


@torch.inference_mode()
def test_norms_are_equal_bit_by_bit() -> None:
    x = torch.randn(300, 384) * torch.logspace(-2, 2, 300)[:, None]
    x[:, 5] += 8
    norm = OrderedNorm(384, eps=1e-12)
    norm.weight, norm.bias = torch.nn.Parameter(torch.rand(384) + 0.5), torch.nn.Parameter(torch.randn(384))
    inputs = {"x": x, "w": norm.weight.detach(), "b": norm.bias.detach()}
    assert_same(run("LayerNormalization", inputs, axis=-1, epsilon=1e-12), norm(x).numpy())


@torch.inference_mode()
def test_attention_is_equal_bit_by_bit() -> None:
    """With torch.softmax six in ten values are equal, with the fused kernel one in ten."""
    q, k, v = (torch.randn(2, 12, 96, 32) * 1.5 for _ in range(3))
    rows = {name: value.transpose(1, 2).reshape(2, 96, 384) for name, value in (("q", q), ("k", k), ("v", v))}
    seen = torch.arange(96) < torch.tensor([96, 61])[:, None]
    found = run(
        "MultiHeadAttention",
        {**rows, "_bias": q, "mask": seen.int()},
        "com.microsoft",
        num_heads=12,
        scale=1 / math.sqrt(32),
    )
    ours = ordered_attend(q, k, v, seen[:, None, None]).transpose(1, 2).reshape(2, 96, 384).numpy()
    assert_same(found[seen.numpy()], ours[seen.numpy()])


@torch.inference_mode()
def test_gelu_is_equal_bit_by_bit() -> None:
    """Of the fused kernel's values two thirds are equal."""
    x = torch.randn(200, 512) * 2
    assert_same(run("Gelu", {"x": x}, "com.microsoft"), erf_gelu(x).numpy())


@pytest.mark.skipif(not cpu_flags()["avx2"], reason="this processor has no AVX2, whose sums ours repeat")
def test_int8_of_whole_pages_is_that_of_onnxruntime(minilm: Path, tmp_path: Path) -> None:
    """128 tokens and six layers, where one flipped rounding would grow to a third of int8's own error; none flips."""
    with gzip.open(ROOT / "examples/help-search/pages.jsonl.gz", "rt", encoding="utf-8") as file:
        pages = [json.loads(line)["text"] for line in list(file)[::100]]
    plain = load(minilm)
    plain = replace(plain, config=replace(plain.config, text=replace(plain.config.text, max_length=128)))
    model = quantized(plain, bits=int8_weight_bits())
    graph = load_bundle(export(model, tmp_path / "b"), threads=1)
    eager, original = model.to_torch(), plain.to_torch()
    apart, noise = [], []
    for ids in model.text_encoder().encode(pages):
        one = pad([ids])
        vectors = [run_eager(each, *one)["sentence_embedding"][0] for each in (eager, original)]
        apart.append(np.linalg.norm(graph.run(*one)["sentence_embedding"][0] - vectors[0]))
        noise.append(np.linalg.norm(vectors[0] - vectors[1]))
    assert len(pages) == 25
    assert np.median(noise) > 0.05
    assert max(apart) < 1e-6
