"""Exported graphs against the eager model: every config, layout, shape and padding; and int8 linears bit by bit."""

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from tiny import VOCAB, layer, tiny, tiny_config, with_head

from slimformer.export.encoder import build_encoder
from slimformer.export.forms import Forms
from slimformer.export.graph import Graph
from slimformer.export.layout import Grouping, PackedLayout
from slimformer.export.validation import parity_batches, run_eager
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    ACTIVATIONS,
    ClassificationHead,
    DenseConfig,
    EmbeddingHead,
    TransformerConfig,
)
from slimformer.transformer.quantization import quantized


def embedded(**changes: Any) -> TransformerConfig:
    """The tiny config with another embedding."""
    return replace(tiny_config(), embedding=replace(tiny_config().embedding, **changes))


LABELS = ClassificationHead(("a", "b", "c"))
DENSE = (DenseConfig(16, 10, activation="tanh"), DenseConfig(10, 12, bias=False, activation=None))
CONFIGS: dict[str, TransformerConfig] = {
    "different heads": tiny_config((layer(1, 16), layer(4, 3), layer(3, 5, 7))),
    "grouped heads": tiny_config((layer(6, 4, group=3), layer(4, 3, 5, group=4), layer(4, 4, group=2))),
    "absent mixer": tiny_config((layer(0), layer())),
    "absent ffn": tiny_config((layer(neurons=0), layer())),
    "only norms": tiny_config((layer(0, neurons=0),)),
    "no layers": tiny_config(()),
    "no token types": tiny_config(token_types=0),
    "large eps": replace(tiny_config(), norm_eps=1e-2),
    "pre-norm": replace(tiny_config(), norm_place="pre", final_norm=True),
    "post-norm with a final norm": replace(tiny_config((layer(0), layer(neurons=0))), final_norm=True),
    "sinusoids": embedded(position_kind="sinusoidal", scaled=True, norm=False),
    "no positions": embedded(position_kind="none"),
    "no positions, no types, no norm": embedded(position_kind="none", token_types=0, norm=False),
    "cls": tiny_config(head=EmbeddingHead("cls")),
    "max": tiny_config(head=EmbeddingHead("max")),
    "not unit": tiny_config(head=EmbeddingHead("mean", normalize=False)),
    "dense": tiny_config(head=EmbeddingHead("mean", DENSE)),
    "dense max not unit": tiny_config(head=EmbeddingHead("max", DENSE[:1], normalize=False)),
    "classifier": tiny_config(head=LABELS),
    "classifier without pooler": tiny_config(head=replace(LABELS, pooler=False)),
    "no head": tiny_config(head=None),
    **{f"{name} ffn": tiny_config((layer(activation=name),)) for name in ACTIVATIONS},
    **{
        f"{name} dense": tiny_config(head=EmbeddingHead(dense=(DenseConfig(16, 6, activation=name),)))
        for name in ACTIVATIONS
    },
}
LAYOUTS = ("packed", "padded")


def build(checkpoint: Checkpoint, layout: str) -> onnx.ModelProto:
    state = {name: value.numpy() for name, value in checkpoint.state.items()}
    return build_encoder(checkpoint.config, state, Forms.of_layout(layout))


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def outputs(opened: onnxruntime.InferenceSession, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(names, {"input_ids": ids, "attention_mask": mask}), strict=True))


def nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """All nodes, those of branches too."""
    inner = [nodes(a.g) for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [*graph.node, *chain.from_iterable(inner)]


def more_batches(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What parity_batches leaves out: many empty rows at the ends, all of many rows empty, one token among padding."""
    random = np.random.default_rng(seed)
    batches = []
    for lengths in ([0] * 6 + [9, 1, 4], [20] + [0] * 11, [0] * 9, [1] * 15 + [30], [0, 3] * 8):
        mask = (np.arange(max(max(lengths), 5)) < np.array(lengths)[:, None]).astype(np.int64)
        mask = random.permuted(mask, axis=1)
        batches.append((random.integers(0, VOCAB, mask.shape, dtype=np.int64), mask))
    return batches


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_graph_equals_the_eager_model(name: str, layout: str) -> None:
    checkpoint = tiny(CONFIGS[name], seed=len(name))
    model, eager = build(checkpoint, layout), checkpoint.to_torch()
    onnx.checker.check_model(model, full_check=layout == "padded")  # contrib operators have no shape inference in onnx
    opened = session(model)
    for ids, mask in parity_batches(checkpoint.config, seed=0) + more_batches(seed=0):
        expected = run_eager(eager, ids, mask)
        found = outputs(opened, ids, mask)
        head = checkpoint.config.head
        if isinstance(head, ClassificationHead):
            assert set(found) == {"logits"}
        else:
            assert set(found) == {"last_hidden_state"} | ({"sentence_embedding"} if head else set())
        for output, value in found.items():
            assert value.shape == expected[output].shape
            np.testing.assert_allclose(value, expected[output], atol=2e-5, rtol=1e-5, err_msg=f"{output} {mask.shape}")


def test_what_the_eager_model_computes_depends_on_every_part() -> None:
    """Else equality would show nothing: changing any tensor changes the output."""
    checkpoint = tiny(CONFIGS["dense"])
    ids, mask = parity_batches(checkpoint.config, seed=1)[3]
    before = outputs(session(build(checkpoint, "packed")), ids, mask)["sentence_embedding"]
    for name, value in checkpoint.state.items():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        changed = replace(checkpoint, state={**checkpoint.state, name: value + noise})
        after = outputs(session(build(changed, "packed")), ids, mask)["sentence_embedding"]
        assert np.abs(after - before).max() > 1e-4, name


def attention_ifs(model: onnx.ModelProto) -> tuple[onnx.NodeProto, list[onnx.NodeProto], list[onnx.NodeProto]]:
    """The plan of the groups; for each layer the choice of rows without padding, and in its other branch of groups."""
    plan, *dense = [node for node in model.graph.node if node.op_type == "If"]
    others = [next(a.g for a in node.attribute if a.name == "else_branch") for node in dense]
    return plan, dense, [next(node for node in branch.node if node.op_type == "If") for branch in others]


def grouped_or_not(checkpoint: Checkpoint) -> tuple[onnxruntime.InferenceSession, ...]:
    """The packed graph with the condition of its grouping as an output; and the graphs that always and never group."""
    forms = []
    for forced in (None, True, False):
        model = build(checkpoint, "packed")
        plan, dense, attentions = attention_ifs(model)
        (condition,) = {node.input[0] for node in attentions}
        assert condition == plan.output[0]
        assert len(attentions) == len(checkpoint.config.encoder)
        if forced is None:
            model.graph.output.append(onnx.helper.make_tensor_value_info(condition, onnx.TensorProto.BOOL, []))
        else:
            for name, value, chosen in (("forced", forced, (plan, *attentions)), ("never", False, dense)):
                model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
                for node in chosen:
                    node.input[0] = name
        forms.append(session(model))
    return tuple(forms)


def lengths_mask(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return np.random.default_rng(0).integers(0, VOCAB, mask.shape, dtype=np.int64), mask


WASTEFUL = [3, 40, 5, 2, 7, 4, 30, 3, 6, 2, 9, 5, 3]
CASES = [
    (WASTEFUL, True),
    (sorted(WASTEFUL), True),  # what counts is the waste, not the order
    ([20] * 16, False),
    (list(range(20, 36)), False),  # length-sorted service batch: alike
    ([3, 40, 5, 2], False),  # too few rows for the groups to pay
    ([1] * 15 + [40], True),
    ([0] * 9 + [40] * 3, True),
]


@pytest.mark.parametrize(("lengths", "grouped"), CASES, ids=str)
def test_rows_are_grouped_where_padding_wastes_and_both_branches_agree(lengths: list[int], grouped: bool) -> None:
    checkpoint = tiny(tiny_config((layer(2, 8), layer(3, 4))))
    asked, always, never = grouped_or_not(checkpoint)
    ids, mask = lengths_mask(lengths)
    found = outputs(asked, ids, mask)
    (condition,) = set(found) - {"last_hidden_state", "sentence_embedding"}
    assert bool(found[condition]) is grouped
    one, other = outputs(always, ids, mask), outputs(never, ids, mask)
    expected = run_eager(checkpoint.to_torch(), ids, mask)
    for name in ("last_hidden_state", "sentence_embedding"):
        np.testing.assert_allclose(one[name], other[name], atol=1e-5)
        np.testing.assert_allclose(one[name], expected[name], atol=2e-5)


@pytest.mark.parametrize(("lengths", "dense"), [([20] * 3, True), ([20], True), ([20, 19], False), ([0, 0], False)])
def test_rows_without_padding_are_taken_as_they_are(lengths: list[int], dense: bool) -> None:
    checkpoint = tiny(tiny_config((layer(2, 8), layer(3, 4))))
    model = build(checkpoint, "packed")
    _, chosen, _ = attention_ifs(model)
    (condition,) = {node.input[0] for node in chosen}
    model.graph.output.append(onnx.helper.make_tensor_value_info(condition, onnx.TensorProto.BOOL, []))
    ids, mask = lengths_mask([*lengths, 20])
    ids, mask = ids[:-1], mask[:-1]
    found = outputs(session(model), ids, mask)
    assert bool(found.pop(condition)) is dense
    _, _, never = grouped_or_not(checkpoint)
    for name, value in outputs(never, ids, mask).items():
        np.testing.assert_allclose(found[name], value, atol=1e-5)


def test_int8_attention_always_has_a_mask() -> None:
    """Without one onnxruntime sums in another order than PyTorch's int8 models do."""

    def masked(graph: onnx.GraphProto) -> list[bool]:
        found = []
        for node in graph.node:
            if node.op_type == "MultiHeadAttention":
                found.append(len(node.input) > 4 and bool(node.input[4]))
            found += [one for attribute in node.attribute if attribute.HasField("g") for one in masked(attribute.g)]
        return found

    checkpoint = tiny(tiny_config((layer(2, 8), layer(3, 4))))
    of_int8, of_float = (masked(build(one, "packed").graph) for one in (quantized(checkpoint, bits=7), checkpoint))
    assert of_int8 == [True] * len(of_float)
    assert of_float.count(False) == 2  # a branch of each layer


def test_groups_of_rows_with_padding_anywhere() -> None:
    """Where in its row a token stands changes nothing, grouped or not."""
    checkpoint = tiny(tiny_config((layer(2, 8), layer(3, 4))))
    _, always, never = grouped_or_not(checkpoint)
    ids, mask = lengths_mask(WASTEFUL)
    scattered = np.random.default_rng(1).permuted(mask, axis=1)
    moved = np.zeros_like(ids)
    moved[scattered != 0] = ids[mask != 0]
    expected = run_eager(checkpoint.to_torch(), ids, mask)["sentence_embedding"]
    for graph in (always, never):
        found = outputs(graph, moved, scattered)["sentence_embedding"]
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_grouping_condition_is_that_of_its_formula() -> None:
    """batch >= 8 and B * T / 1.25 > sum over 4 groups, in falling order of length, of rows times longest."""
    graph = Graph()
    layout = PackedLayout(graph, "input_ids", "attention_mask")
    assert isinstance(layout.grouping, Grouping)
    graph.name_output(graph.add("Cast", layout.grouping.worthwhile, to=onnx.TensorProto.FLOAT), "out")
    axes = ["batch", "sequence"]
    model = graph.model({"input_ids": axes, "attention_mask": axes}, {"out": []}, contrib=True)
    opened, random = session(model), np.random.default_rng(0)
    answers = []
    for _ in range(200):
        rows = int(random.integers(1, 40))
        lengths = random.integers(1, random.integers(2, 40), rows)
        ids, mask = lengths_mask(lengths.tolist())
        falling = sorted(lengths, reverse=True)
        bounds = [rows * i // 4 for i in range(5)]
        area = sum((b - a) * falling[a] for a, b in pairwise(bounds) if b > a)
        expected = rows >= 8 and mask.size / 1.25 > area
        (out,) = opened.run(None, {"input_ids": ids, "attention_mask": mask})
        assert bool(out) is bool(expected), lengths
        answers.append(expected)
    assert 20 < sum(answers) < 180


@pytest.mark.parametrize("int8", [False, True])
def test_the_padded_layout_is_standard_onnx_and_the_packed_one_is_not(int8: bool) -> None:
    checkpoint = tiny(CONFIGS["dense"])
    checkpoint = quantized(checkpoint, bits=7) if int8 else checkpoint
    padded, packed = build(checkpoint, "padded"), build(checkpoint, "packed")
    assert {node.domain for node in nodes(padded.graph)} == {""}
    assert {(entry.domain, entry.version) for entry in padded.opset_import} == {("", 18)}
    own = {node.op_type for node in nodes(packed.graph) if node.domain == "com.microsoft"}
    assert own == {"MultiHeadAttention", "Gelu"} | ({"DynamicQuantizeMatMul"} if int8 else set())
    assert {entry.domain for entry in packed.opset_import} == {"", "com.microsoft"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_padding_changes_no_other_row(layout: str) -> None:
    checkpoint = tiny()
    opened = session(build(checkpoint, layout))
    ids, mask = lengths_mask([5, 9, 1, 7])
    alone = outputs(opened, ids, mask)
    with_empty = outputs(opened, np.insert(ids, 2, 1, axis=0), np.insert(mask, 2, 0, axis=0))
    for name, value in alone.items():
        np.testing.assert_allclose(np.delete(with_empty[name], 2, axis=0), value, atol=1e-6)
        assert not with_empty[name][2].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stands_at_padding_does_not_matter(layout: str) -> None:
    for checkpoint in (tiny(), quantized(tiny(), bits=7)):
        opened = session(build(checkpoint, layout))
        ids, mask = lengths_mask([5, 9, 1, 7])
        other = np.where(mask > 0, ids, (ids + 3) % VOCAB)
        one, two = outputs(opened, ids, mask), outputs(opened, other, mask)
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])


# --- int8 ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_weights_are_stored_as_int8_and_nothing_twice(layout: str) -> None:
    checkpoint = quantized(tiny(tiny_config((layer(4, 16, 256), layer(4, 16, 256)), d_model=64)), bits=7)
    model = build(checkpoint, layout)
    stored = {one.name: one for one in model.graph.initializer}
    whole = {name for name, value in checkpoint.state.items() if value.dtype == torch.int8}
    assert len(whole) == 10
    for name in whole:
        assert stored[name].data_type == onnx.TensorProto.INT8
    floats = [one for one in stored.values() if one.data_type == onnx.TensorProto.FLOAT]
    assert max(int(np.prod(one.dims)) for one in floats) <= 256
    int8_bytes = sum(checkpoint.state[name].numel() for name in whole)
    small = sum(value.numel() * 4 for name, value in checkpoint.state.items() if name not in whole)
    assert int8_bytes + small - 300 <= len(model.SerializeToString()) <= int8_bytes + small + 30_000
    assert not [node for node in nodes(model.graph) if node.op_type == "DequantizeLinear"]


def test_int8_tables_equal_the_pytorch_module() -> None:
    """A model of no layers without its head is its tables and a norm."""
    checkpoint = quantized(tiny(tiny_config((), head=None)), bits=7)
    ids, mask = parity_batches(checkpoint.config, seed=2)[2]
    for layout in LAYOUTS:
        found = outputs(session(build(checkpoint, layout)), ids, mask)["last_hidden_state"]
        np.testing.assert_allclose(found, run_eager(checkpoint.to_torch(), ids, mask)["last_hidden_state"], atol=1e-6)


def test_the_int8_table_is_read_by_hand() -> None:
    checkpoint = quantized(tiny(), bits=7)
    weight, scale = (checkpoint.state[f"embeddings.tokens.{name}"].numpy() for name in ("weight", "scale"))
    float_rows = tiny().state["embeddings.tokens.weight"].numpy()
    np.testing.assert_allclose(weight * scale[:, None], float_rows, atol=np.abs(float_rows).max() / 127 / 2 + 1e-6)


def close_int8(one: np.ndarray, other: np.ndarray) -> float:
    """Median relative difference of rows."""
    return float(np.median(np.linalg.norm(one - other, axis=-1) / np.linalg.norm(other, axis=-1)))


@pytest.mark.parametrize("lengths", [[7], [12, 5, 9, 3], WASTEFUL], ids=str)
def test_int8_embeddings_of_both_layouts_agree_because_padding_copies_tokens(lengths: list[int]) -> None:
    plain = tiny()
    checkpoint = quantized(plain, bits=7)
    ids, mask = lengths_mask(lengths)
    packed, padded = (outputs(session(build(checkpoint, one)), ids, mask)["sentence_embedding"] for one in LAYOUTS)
    eager = run_eager(checkpoint.to_torch(), ids, mask)["sentence_embedding"]
    fp32 = run_eager(plain.to_torch(), ids, mask)["sentence_embedding"]
    noise = close_int8(eager, fp32)
    assert noise > 1e-3
    assert close_int8(padded, packed) < noise / 5
    assert close_int8(packed, eager) < noise / 5


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_classifier_of_another_pooling(layout: str, pooling: str) -> None:
    """Padding before, between and after the tokens; a row has none."""
    checkpoint = with_head(ClassificationHead(("a", "b", "c"), pooler=False, pooling=pooling))
    ids, mask = lengths_mask([4, 0, 11, 6])
    mask[0] = np.roll(mask[0], 3)
    mask[2, 4] = 0
    found = outputs(session(build(checkpoint, layout)), ids, mask)["logits"]
    np.testing.assert_allclose(found, run_eager(checkpoint.to_torch(), ids, mask)["logits"], atol=1e-5)


@pytest.mark.parametrize("head", [EmbeddingHead("cls"), EmbeddingHead("max"), LABELS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_models_with_absent_parts(layout: str, head: EmbeddingHead | ClassificationHead) -> None:
    plain = with_head(head, layers=(layer(0), layer(neurons=0), layer(3, 5)))
    checkpoint = quantized(plain, bits=7)
    ids, mask = lengths_mask([4, 11, 6])
    output = "logits" if isinstance(head, ClassificationHead) else "sentence_embedding"
    found = outputs(session(build(checkpoint, layout)), ids, mask)[output]
    eager = run_eager(checkpoint.to_torch(), ids, mask)[output]
    assert close_int8(found, eager) < 0.02
