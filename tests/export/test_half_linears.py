"""Linears in half precision as graphs: what is stored, which operators, and what is computed.

onnxruntime has no bfloat16 products on a CPU, so bfloat16 is run by ONNX's reference evaluator; it rounds where ONNX
says. onnxruntime's CPU computes float16 in float32 instead. Only a GPU runs both as they are served.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from models import SENTENCES, WRITERS, ragged, tiny, writer
from onnx.reference import ReferenceEvaluator

from slimformer.export import bundle as bundle_module
from slimformer.export.bundle import export
from slimformer.export.contents import graph_file
from slimformer.export.decoding_parity import check_decoding
from slimformer.export.encoder import build_encoder
from slimformer.export.forms import Forms
from slimformer.export.graph import Graph
from slimformer.export.inspection import inspect_model
from slimformer.export.linears import own, standard, stored, turned
from slimformer.export.machine import PROVIDERS, available_providers
from slimformer.export.tensors import Weights
from slimformer.export.validation import check_parity, run_eager
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.half import HalfLinear, to_half
from slimformer.transformer.layer_config import BFLOAT16, FLOAT16, HALVES
from slimformer.transformer.quantization import halved
from slimformer.transformer.weights import to_numpy

PLACES: dict[str, Any] = {
    "own, stored": lambda g, weights, form: own(g, weights, form, "x", stored),
    "own, turned": lambda g, weights, form: own(g, weights, form, "x", turned),
    "standard": lambda g, weights, form: standard(g, weights, form, "x"),
}
TYPES = {FLOAT16: onnx.TensorProto.FLOAT16, BFLOAT16: onnx.TensorProto.BFLOAT16}
INPUTS, OUTPUTS = 48, 40


def linear(form: str) -> HalfLinear:
    made = HalfLinear(inputs=INPUTS, outputs=OUTPUTS, form=form)
    made.weight = to_half(torch.randn(OUTPUTS, INPUTS) * 0.3, form, "weight")
    made.bias = to_half(torch.randn(OUTPUTS), form, "bias")
    return made


def built(module: HalfLinear, form: str, place: str) -> onnx.ModelProto:
    """The linear alone, (N, I) -> (N, O)."""
    graph = Graph()
    state = {name: to_numpy(value) for name, value in module.state_dict().items()}
    graph.name_output(PLACES[place](graph, Weights(state), form), "y")
    model = graph.model({"x": ["n", INPUTS]}, {"y": ["n", OUTPUTS]}, contrib=False, types={"x": onnx.TensorProto.FLOAT})
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("form", HALVES)
@pytest.mark.parametrize("place", PLACES)
def test_the_graph_rounds_where_the_module_does(place: str, form: str) -> None:
    module, x = linear(form), torch.randn(9, INPUTS) * 3
    model = built(module, form, place)
    operators = ["Cast", "MatMul", "Add", "Cast", "Identity"]
    assert sorted(node.op_type for node in model.graph.node) == sorted(operators + ["Transpose"] * ("turned" in place))
    assert {item.name: item.data_type for item in model.graph.initializer} == dict.fromkeys(
        ("weight", "bias"), TYPES[form]
    )
    (found,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    assert found.dtype == np.float32
    expected = module(x).numpy()
    apart = np.abs(found - expected) > 0  # sums in another order: now and then a rounding falls to the other side
    assert apart.mean() <= 0.02
    assert (np.abs(found - expected) <= 4 * HALVES[form] * np.abs(expected) + 1e-2 * HALVES[form]).all()


@pytest.mark.parametrize("place", PLACES)
def test_float16_in_onnxruntime(place: str) -> None:
    """It rounds the weights, the bias and the input, or not even that one; the module product and sum too."""
    module, x = linear(FLOAT16), torch.randn(50, INPUTS)
    session = onnxruntime.InferenceSession(
        built(module, FLOAT16, place).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {"x": x.numpy()})
    expected = module(x).detach().numpy()
    terms = np.abs(x.numpy()) @ np.abs(module.weight.float().numpy()).T + np.abs(module.bias.float().numpy())
    assert (np.abs(found - expected) <= 3 * HALVES[FLOAT16] * terms).all()


@pytest.mark.parametrize("form", HALVES)
def test_an_encoder_in_the_reference_evaluator(form: str) -> None:
    """Every rounding of the padded graph falls where PyTorch's does: nearly all tokens are equal to float noise."""
    model = halved(tiny(), form)
    state = {name: to_numpy(value) for name, value in model.state.items()}
    graph = build_encoder(model.config, state, Forms.of_layout("padded"))
    onnx.checker.check_model(graph)
    axes = {node.input[1] for node in graph.graph.node if node.op_type == "CumSum"}
    for item in graph.graph.initializer:  # the evaluator wants them as scalars
        if item.name in axes:
            del item.dims[:]
    ids, mask = (one.numpy() for one in ragged([5, 9, 2]))
    evaluator = ReferenceEvaluator(graph)
    found = dict(
        zip(evaluator.output_names, evaluator.run(None, {"input_ids": ids, "attention_mask": mask}), strict=True)
    )
    for name, expected in run_eager(model.to_torch(), ids, mask).items():
        values, wanted = found[name].reshape(-1, found[name].shape[-1]), expected.reshape(-1, expected.shape[-1])
        relative = np.linalg.norm(values - wanted, axis=1) / np.maximum(np.linalg.norm(wanted, axis=1), 1e-30)
        assert np.median(relative) < 1e-6
        assert relative.max() < HALVES[form]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_float16_bundle_on_the_cpu(layout: str, tmp_path: Path) -> None:
    model = halved(tiny(), FLOAT16)
    bundle = export(model, tmp_path / "bundle", layout=layout)
    stored = {item.name: item for item in onnx.load(bundle / "onnx/model.onnx").graph.initializer}
    for name, value in model.state.items():
        if value.dtype == torch.float16:
            there = onnx.numpy_helper.to_array(stored[name])
            assert there.dtype == np.float16
            np.testing.assert_array_equal(there.T, value.numpy())
    parity = check_parity(model, bundle, texts=SENTENCES, original=tiny(), threads=1)
    assert parity.passed
    assert parity.quantization_relative is not None
    assert 0 < parity.quantization_relative < 0.01


@pytest.mark.parametrize("kind", WRITERS)
def test_a_float16_model_writes_as_pytorch_does(kind: str, tmp_path: Path) -> None:
    model = halved(writer(kind), FLOAT16)
    parity = check_decoding(model, export(model, tmp_path / "bundle"), SENTENCES[:3], threads=1)
    assert parity.passed
    assert parity.tokens > 0


@pytest.mark.parametrize("model", [tiny(), writer("ssru")], ids=["encoder", "writer"])
def test_a_bfloat16_bundle_is_written_and_inspected_where_there_is_no_cuda(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "require_provider", lambda name: PROVIDERS[name])
    bundle = export(model, tmp_path / "bundle", format="bf16", provider="cuda")
    half = halved(model, BFLOAT16)
    names = {name for name, value in half.state.items() if value.dtype == torch.bfloat16}
    stored = {item.name: item for item in onnx.load(bundle / graph_file(model.config)).graph.initializer}
    assert {name for name, item in stored.items() if item.data_type == TYPES[BFLOAT16]} == names
    for name in names:
        value = onnx.numpy_helper.to_array(stored[name]).astype(np.float32)
        expected = half.state[name].float().numpy()
        assert any(np.array_equal(one, expected) for one in (value, value.T)), name
    found = inspect_model(bundle)
    assert found["format"] == "bf16"
    assert found["onnx"]["initializers"]["bfloat16"]["tensors"] == len(names)
    listed = {entry["name"]: entry for entry in found["accounting"]["tensors"]}
    large = max(names, key=lambda name: half.state[name].numel())
    assert (listed[large]["format"], listed[large]["bytes"]) == ("bfloat16", 2 * half.state[large].numel())


@pytest.mark.gpu
@pytest.mark.skipif(PROVIDERS["cuda"] not in available_providers(), reason="onnxruntime has no CUDA provider here")
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("form", HALVES)
def test_bundles_on_cuda(form: str, layout: str, tmp_path: Path) -> None:
    model = halved(tiny(), form)
    bundle = export(model, tmp_path / "bundle", layout=layout, provider="cuda")
    assert check_parity(model, bundle, texts=SENTENCES, original=tiny(), provider="cuda", threads=1).passed
