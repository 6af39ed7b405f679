"""Every form of a graph computes what PyTorch does, and the default is what it always was."""

import json
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tiny import layer, search_data, sentences, tiny, tiny_config

from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.export.accounting import account_bundle
from slimformer.export.bundle import export
from slimformer.export.encoder import build_encoder
from slimformer.export.forms import CHOICES, Forms, not_offered
from slimformer.export.runtime import load_bundle
from slimformer.export.validation import check_parity, parity_batches, run_eager
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import RecurrentConfig, TransformerConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.quantization import quantized
from slimformer.transformer.weights import to_numpy

UNEVEN = tiny_config((layer(3, 5, 7), layer(0), layer(6, 3, neurons=0, group=2), layer(neurons=9, activation="relu")))
SINGLE = [Forms(**{choice: value}) for choice, values in CHOICES.items() for value in values[1:]]
ALL = [replace(Forms("packed", "skip", "decomposed", "separate"), gelu=gelu) for gelu in CHOICES["gelu"]]
EVERY = [*SINGLE, *ALL, *(replace(form, layout="padded") for form in ALL), Forms.of_layout("padded")]
OF_INT8 = [form for form in SINGLE if form not in (Forms(attention="decomposed"), Forms(gelu="bias"))]


def build(checkpoint: Checkpoint, forms: Forms | None = None) -> onnx.ModelProto:
    state = {name: to_numpy(value) for name, value in checkpoint.state.items()}
    return build_encoder(checkpoint.config, state, *([forms] if forms else []))


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(opened: onnxruntime.InferenceSession, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(names, {"input_ids": ids, "attention_mask": mask}), strict=True))


def operators(model: onnx.ModelProto) -> Counter[str]:
    """How often each operator is there, in branches too."""

    def of(graph: onnx.GraphProto) -> list[str]:
        inner = [of(a.g) for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        return [*(node.op_type for node in graph.node), *chain.from_iterable(inner)]

    return Counter(of(model.graph))


@pytest.mark.parametrize("forms", EVERY, ids=lambda forms: "-".join(forms.to_dict().values()))
def test_fp32_graph_of_each_form_equals_the_eager_model(forms: Forms) -> None:
    """With padding on either side, in the middle, and with rows of padding alone; grouped rows and dense ones."""
    checkpoint = tiny(UNEVEN)
    opened, eager = session(build(checkpoint, forms)), checkpoint.to_torch()
    for ids, mask in parity_batches(checkpoint.config, seed=0):
        expected = run_eager(eager, ids, mask)
        for name, value in run(opened, ids, mask).items():
            np.testing.assert_allclose(value, expected[name], atol=2e-5, rtol=1e-5, err_msg=f"{name} {mask.shape}")


@pytest.mark.parametrize("forms", [Forms(), *OF_INT8], ids=lambda forms: "-".join(forms.to_dict().values()))
def test_int8_bundle_of_each_offered_form_holds_parity(forms: Forms, tmp_path: Path) -> None:
    plain = tiny(tiny_config((layer(3, 5, 7), layer(0), layer(4, 3, group=2))))
    model = quantized(plain, bits=7)
    assert all((choice, value) not in not_offered(model.config) for choice, value in forms.to_dict().items())
    bundle = export(model, tmp_path / "b", forms=forms)
    parity = check_parity(model, bundle, texts=sentences(24, seed=8), original=plain, threads=1)
    assert parity.passed, parity


@pytest.mark.parametrize("format", ["int8_static", "int8_per_token", "int8_blocks", "int4_blocks", "float16"])
def test_separate_products_of_every_format_give_what_the_merged_one_gives(format: str) -> None:
    plain = tiny(tiny_config((layer(2, 16, 32), layer(4, 8, 32, group=2)), d_model=32))
    step = Quantize(format=format, bits=7 if format in ("int8_static", "int8_per_token") else 0)
    checkpoint = step(plain, StepContext(data=search_data())).checkpoint
    ids, mask = parity_batches(checkpoint.config, seed=0)[4]
    merged, separate = (run(session(build(checkpoint, Forms(qkv=value))), ids, mask) for value in CHOICES["qkv"])
    np.testing.assert_allclose(separate["last_hidden_state"], merged["last_hidden_state"], atol=1e-5)


def test_the_default_is_the_graph_that_it_was() -> None:
    """Two of three layers attend, and each of them has three branches."""
    checkpoint = tiny(tiny_config((layer(2, 8), layer(0), layer(2, 8))))
    default = build(checkpoint)
    assert default.SerializeToString() == build(checkpoint, Forms()).SerializeToString()
    found = operators(default)
    fused = {"MultiHeadAttention": 2 * 6, "Gelu": 3, "LayerNormalization": 7, "MatMul": 2 * 2 + 3 * 2}
    assert {name: found[name] for name in fused} == fused
    assert not {"SkipLayerNormalization", "BiasGelu", "Softmax", "Erf"} & set(found)
    padded = operators(build(checkpoint, Forms.of_layout("padded")))
    assert (padded["Softmax"], padded["Erf"], padded["LayerNormalization"]) == (2, 3, 7)
    assert not {"MultiHeadAttention", "Gelu", "If"} & set(padded)


@pytest.mark.parametrize(
    ("forms", "there", "gone"),
    [
        (Forms(layout="padded"), {"MultiHeadAttention": 2, "Gelu": 3}, "If"),
        (Forms(norm="skip"), {"SkipLayerNormalization": 5, "LayerNormalization": 2}, ""),  # one has no change to add
        (Forms(attention="decomposed"), {"Softmax": 2 * 6}, "MultiHeadAttention"),
        (Forms(qkv="separate"), {"MatMul": 2 * 4 + 3 * 2}, ""),
        (Forms(gelu="erf"), {"Erf": 3}, "Gelu"),
        (Forms(gelu="bias"), {"BiasGelu": 3}, "Gelu"),
    ],
    ids=str,
)
def test_a_form_is_really_in_the_graph(forms: Forms, there: dict[str, int], gone: str) -> None:
    found = operators(build(tiny(tiny_config((layer(2, 8), layer(0), layer(2, 8)))), forms))
    assert {name: found[name] for name in there} == there
    assert gone not in found


def test_only_graphs_of_standard_operators_ask_for_no_others() -> None:
    checkpoint = tiny()
    for forms in (Forms.of_layout("padded"), *EVERY):
        model = build(checkpoint, forms)
        domains = {item.domain for item in model.opset_import}
        assert forms.standard is ("com.microsoft" not in domains)
        onnx.checker.check_model(model)


@pytest.mark.parametrize("forms", [Forms(norm="skip"), Forms(gelu="bias"), Forms(gelu="erf")], ids=str)
def test_what_the_model_has_no_place_for_changes_nothing(forms: Forms) -> None:
    checkpoint = tiny(replace(tiny_config((layer(activation="relu"),)), norm_place="pre"))
    assert build(checkpoint, forms).SerializeToString() == build(checkpoint).SerializeToString()


RELU, ABSENT = tiny_config((layer(activation="relu"),)), tiny_config((layer(0, neurons=0),))
CELLS = tiny_config((replace(layer(), mixer=RecurrentConfig("lstm", 8)),))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny_config(), set()),
        (quantized(tiny(), bits=7).config, {("attention", "decomposed"), ("gelu", "bias")}),
        (replace(tiny_config(), norm_place="pre"), {("norm", "skip")}),
        (RELU, {("gelu", "erf"), ("gelu", "bias")}),
        (CELLS, {("layout", "padded"), ("attention", "decomposed"), ("qkv", "separate")}),
        (
            ABSENT,
            {("norm", "skip"), ("attention", "decomposed"), ("qkv", "separate"), ("gelu", "erf"), ("gelu", "bias")},
        ),
    ],
)
def test_what_is_not_offered_has_its_reason(config: TransformerConfig, expected: set[tuple[str, str]]) -> None:
    found = not_offered(config)
    assert set(found) == expected
    assert all(found.values())


def test_blocks_are_not_offered_padded() -> None:
    plain = tiny(tiny_config((layer(2, 16, 32),), d_model=32))
    model = Quantize(format="int8_blocks")(plain, StepContext(data=search_data())).checkpoint
    assert ("layout", "padded") in not_offered(model.config)


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(InputError, match="gelu is 'tanh', not one of fused, erf, bias"):
        Forms(gelu="tanh")
    with pytest.raises(InputError, match="no choice 'colour': it has layout, norm"):
        Forms.from_dict({**Forms().to_dict(), "colour": "red"})
    chosen = Forms("padded", norm="skip")
    assert Forms.from_dict(chosen.to_dict()) == chosen


def test_the_bundle_says_its_forms_and_runs(tmp_path: Path) -> None:
    chosen = Forms(norm="skip", qkv="separate", gelu="bias")
    bundle = export(tiny(), tmp_path / "b", forms=chosen)
    own = json.loads((bundle / "slimformer.json").read_text())
    assert (own["forms"], own["layout"]) == (chosen.to_dict(), "packed")
    plain = export(tiny(), tmp_path / "plain")
    texts = sentences(5, seed=1)
    vectors = [load_bundle(one, threads=1).embed(texts) for one in (bundle, plain)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
    padded = json.loads((export(tiny(), tmp_path / "p", layout="padded") / "slimformer.json").read_text())
    assert padded["forms"] == Forms.of_layout("padded").to_dict()


def test_separate_weights_are_told_as_what_they_are(tmp_path: Path) -> None:
    """An account of bytes knows the format of each part."""
    wide = tiny(tiny_config((layer(4, 32, 64),), d_model=64))
    bundle = export(quantized(wide, bits=7), tmp_path / "b", forms=Forms(qkv="separate"))
    entries = {one["name"]: one for one in account_bundle(bundle, quantized(wide, bits=7).config)["tensors"]}
    for part in "qkv":
        entry = entries[f"encoder.0.mixer.{part}.weight"]
        assert (entry["shape"], entry["format"]) == ([64, 128], "int8")
        assert entry["why"].startswith("8 bits")


def test_forms_and_another_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layout padded and forms of the layout packed are both given"):
        export(tiny(), tmp_path / "b", layout="padded", forms=Forms(norm="skip"))
