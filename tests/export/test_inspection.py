"""What inspection finds in tiny models whose every size is worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import SENTENCES, tiny

from slimformer.compress.quantize import Quantize
from slimformer.compress.step import StepContext
from slimformer.compress.surgery import remove_from
from slimformer.compress.units import Kept
from slimformer.export import export, inspection
from slimformer.export.accounting import form_of
from slimformer.export.encoder import build_encoder
from slimformer.export.forms import Forms
from slimformer.export.inspection import inspect_model, render_inspection
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import (
    AttentionConfig,
    DenseConfig,
    EmbeddingConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    RecurrentConfig,
    TextConfig,
    TransformerConfig,
)
from slimformer.transformer.data import SearchData
from slimformer.transformer.errors import InputError
from slimformer.transformer.model import Transformer
from slimformer.transformer.quantization import quantized
from slimformer.transformer.tokenizer import wordpiece_from_vocab

# D 8; layer 0: 2 heads of 3 and 5 neurons; layer 1: no attention, 4 neurons; 40 rows, 16 positions, 2 token types.
CONFIG = TransformerConfig(
    d_model=8,
    embedding=EmbeddingConfig(vocab_size=40, positions=16, token_types=2),
    encoder=(
        LayerConfig(AttentionConfig(heads=2, head_width=3), FeedForwardConfig(width=5)),
        LayerConfig(None, FeedForwardConfig(width=4)),
    ),
    text=TextConfig(max_length=16),
    head=EmbeddingHead(),
)
ATTENTION, FFN_0, FFN_1 = 4 * 8 * 6, 2 * 8 * 5, 2 * 8 * 4  # weights: q, k, v and out; up and down
SMALL = 2 * 8 + 2 * 8 + (18 + 8 + 5 + 8) + (8 + 4 + 8) + 4 * 2 * 8  # types, norm; biases; absent, biases; 4 norms
KEPT = {"layers": [1, 3], "heads": [[0, 2], []], "neurons": [[0, 1, 2, 3, 7], [1, 2, 5, 6]]}
VOCAB = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]) + "\n"


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(CONFIG, Transformer(CONFIG).state_dict(), wordpiece_from_vocab(VOCAB), {"source": "whole"})


def write_bundle(model: Checkpoint, path: Path, layout: str = "packed") -> Path:
    """The two files of a bundle that are read."""
    (path / "onnx").mkdir(parents=True)
    arrays = {name: value.numpy() for name, value in model.state.items()}
    graph = build_encoder(model.config, arrays, Forms.of_layout(layout))
    (path / "onnx" / "model.onnx").write_bytes(graph.SerializeToString())
    own = {"format_version": 1, "config": model.config.to_dict(), "layout": layout, "format": "fp32"}
    own |= {"provenance": model.provenance, "measured": {}}
    (path / "slimformer.json").write_text(json.dumps(own))
    return path


def sizes(info: dict[str, Any], key: str = "bytes") -> dict[str, Any]:
    return {group["name"]: group[key] for group in info["groups"]}


def test_every_byte_of_a_checkpoint_has_its_place(checkpoint: Checkpoint, tmp_path: Path) -> None:
    info = inspect_model(checkpoint.save(tmp_path / "model"))
    parameters = {
        "token table": 40 * 8,
        "position table": 16 * 8,
        "norms, biases, token types": SMALL,
        "layer 0 attention": ATTENTION,
        "layer 0 FFN": FFN_0,
        "layer 1 FFN": FFN_1,
    }
    assert sizes(info, "parameters") == parameters
    assert sizes(info) == {name: 4 * count for name, count in parameters.items()}
    assert info["parameters"] == sum(parameters.values()) == sum(p.numel() for p in checkpoint.to_torch().parameters())
    assert sizes(info, "share")["token table"] == pytest.approx(320 / sum(parameters.values()))
    assert info["multiply_adds"] == ATTENTION + FFN_0 + FFN_1
    first, second = info["layers"]
    assert (first["heads"], first["head_width"], first["neurons"]) == (2, 3, 5)
    assert (first["mixer_multiply_adds"], first["ffn_multiply_adds"]) == (192, 80)
    assert (second["heads"], second["mixer_format"], second["mixer_bytes"]) == (0, None, 0)
    assert first["original_layer"] is first["original_heads"] is None
    assert json.loads(json.dumps(info)) == info


def test_int8_is_a_quarter_and_as_many_parameters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    info = inspect_model(quantized(checkpoint, bits=7).save(tmp_path / "int8"))
    assert sizes(info)["token table"] == 40 * 8 + 4 * 40  # int8 rows and a float scale for each
    assert sizes(info)["layer 0 attention"] == ATTENTION + 4 * (18 + 8)
    assert info["parameters"] == sum(p.numel() for p in checkpoint.to_torch().parameters())
    assert info["formats"]["int8"] == {"tensors": 2 + 2 + 2 + 2, "bytes": 40 * 8 + 16 * 8 + ATTENTION + FFN_0 + FFN_1}
    assert info["layers"][0]["ffn_format"] == "int8_dynamic"
    assert not any("token table" in line for line in info["advice"])


def test_the_originals_of_kept_units_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    info = inspect_model(checkpoint.with_provenance(kept=KEPT).save(tmp_path / "model"))
    assert [layer["original_layer"] for layer in info["layers"]] == [1, 3]
    assert [layer["original_heads"] for layer in info["layers"]] == [[0, 2], []]
    assert info["layers"][1]["original_neurons"] == [1, 2, 5, 6]
    shorter = inspect_model(checkpoint.with_provenance(kept={"layers": [1]}).save(tmp_path / "other"))
    assert [layer["original_layer"] for layer in shorter["layers"]] == [None, None]


def test_kept_units_are_drawn_of_a_model_and_of_its_bundle(checkpoint: Checkpoint, tmp_path: Path) -> None:
    of = {"layers": 4, "heads": [3, 3, 3, 3], "neurons": [8, 8, 8, 8], "channels": 8}
    pruned = checkpoint.with_provenance(kept=KEPT, kept_of=of)
    for path in (pruned.save(tmp_path / "model"), write_bundle(pruned, tmp_path / "bundle")):
        info = inspect_model(path)
        assert (info["kept"], info["kept_of"]) == (KEPT, of)
        picture = next(block for block in render_inspection(info).split("\n\n") if block.startswith("what stayed"))
        assert picture.splitlines() == [
            "what stayed of the original: ■ a unit, □ one that went, ▁ to █ the share of a stretch of them",
            "layer  heads    neurons",
            "    0  removed",
            "    1  ■□■ 2/3  ████   █ 5/8",
            "    2  removed",
            "    3  □□□ 0/3   ██  ██  4/8",
        ]


@pytest.mark.parametrize("notes", [{}, {"kept": KEPT}, {"kept": 3, "kept_of": {}}, {"kept_of": {"layers": 4}}])
def test_nothing_is_drawn_without_both_notes(notes: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path) -> None:
    info = inspect_model(checkpoint.with_provenance(**notes).save(tmp_path / "model"))
    assert "what stayed" not in render_inspection(info)


def test_what_surgery_notes_is_drawn(tmp_path: Path) -> None:
    whole = tiny()  # 4 and 2 heads, 64 and 40 neurons, 32 channels
    units = {"encoder.0.mixer": (0, 3), "encoder.0.ffn": tuple(range(48))}
    channels = (*range(8), *range(16, 32))
    pruned = remove_from(whole, Kept({"encoder": (0,)}, units, channels))
    lines = render_inspection(inspect_model(pruned.save(tmp_path / "model"))).splitlines()
    assert f"0         ■□□■ 2/4  {'█' * 24}{' ' * 8} 48/64" in lines
    assert "1         removed" in lines
    assert f"channels            {'█' * 8}{' ' * 8}{'█' * 16} 24/32" in lines


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_bundle_says_what_its_graph_holds(layout: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = quantized(checkpoint, bits=7)
    path = write_bundle(model, tmp_path / "bundle", layout)
    info = inspect_model(path)
    assert info["kind"] == "bundle"
    assert info["bytes"] == (path / "onnx" / "model.onnx").stat().st_size
    assert sizes(info)["layer 0 attention"] == ATTENTION + 4 * (18 + 8)
    assert info["parameters"] == inspect_model(model.save(tmp_path / "model"))["parameters"] - 8  # one token type
    graph = onnx.load(path / "onnx" / "model.onnx").graph
    operators = info["onnx"]["operators"]
    assert operators["LayerNormalization"] == 5
    assert operators[{"packed": "DynamicQuantizeMatMul", "padded": "MatMulInteger"}[layout]] == 6
    assert sum(operators.values()) >= len(graph.node)
    assert ("If" in operators) == (layout == "packed")
    assert sum(entry["tensors"] for entry in info["onnx"]["initializers"].values()) == len(graph.initializer)
    assert info["onnx"]["initializers"]["int8"]["tensors"] == 8
    assert any("padded" in line for line in info["advice"]) == (layout == "padded")


def test_a_translator_by_its_stacks(tmp_path: Path) -> None:
    """D 8, an encoder of one layer, a decoder of two with cells of 8 units, 3 cross heads of 2, 5 neurons."""
    ffn, cross = FeedForwardConfig(5, "relu"), AttentionConfig(3, 2)
    config = TransformerConfig(
        d_model=8,
        embedding=EmbeddingConfig(40, 16, position_kind="sinusoidal", norm=False),
        encoder=(LayerConfig(AttentionConfig(2, 3), ffn),),
        decoder=(LayerConfig(RecurrentConfig("ssru", 8, project=False), ffn, cross), LayerConfig(None, ffn, cross)),
        text=TextConfig(16),
        head=LanguageHead(1, 2),
    )
    kept = {"layers": [2], "heads": [[1, 2]], "neurons": [[0, 1, 2, 3, 4]]}
    kept["decoder"] = {"layers": [0, 3], "heads": [[], []], "cross_heads": [[0, 1, 4], [2, 3, 4]], "neurons": [[], []]}
    state = Transformer(config).state_dict()
    model = Checkpoint(config, state, wordpiece_from_vocab(VOCAB), {"source": "whole", "kept": kept})
    info = inspect_model(model.save(tmp_path / "model"))
    cross_weights = 8 * 6 + 8 * 12 + 6 * 8
    expected = {
        "token table": 40 * 8,
        "layer 0 attention": ATTENTION,
        "layer 0 FFN": 2 * 8 * 5,
        "decoder layer 0 ssru": 8 * 16,
        **{f"decoder layer {i} cross-attention": cross_weights for i in (0, 1)},
        **{f"decoder layer {i} FFN": 2 * 8 * 5 for i in (0, 1)},
    }
    assert {name: size for name, size in sizes(info, "parameters").items() if name in expected} == expected
    assert set(sizes(info)) == {*expected, "norms, biases, token types"}
    first, cell, last = info["layers"]
    assert (first["stack"], first["original_layer"], first["original_heads"]) == ("encoder", 2, [1, 2])
    assert (cell["stack"], cell["layer"], cell["mixer"], cell["heads"]) == ("decoder", 0, "ssru", 0)
    assert (cell["cross_heads"], cell["original_cross_heads"], cell["mixer_multiply_adds"]) == (3, [0, 1, 4], 128)
    assert (last["original_layer"], last["mixer"], last["cross_multiply_adds"]) == (3, None, 4 * 8 * 6)
    assert (
        sum(layer[f"{part}_multiply_adds"] for layer in info["layers"] for part in ("mixer", "cross", "ffn"))
        == (info["multiply_adds"])
    )
    text = render_inspection(info).splitlines()
    row = next(line for line in text if line.startswith("decoder 0"))
    assert row.split()[:6] == ["decoder", "0", "0", "ssru", "-", "3"]
    bundle = export(model, tmp_path / "bundle")
    again = inspect_model(bundle)
    assert sizes(again, "parameters")["decoder layer 0 ssru"] == 128
    assert again["onnx"]["operators"]["Loop"] == 6  # of blocks, of rounds, of beams, each with and without groups


def test_dense_maps_belong_to_the_head(tmp_path: Path) -> None:
    config = replace(CONFIG, head=EmbeddingHead(dense=(DenseConfig(8, 3), DenseConfig(3, 2, bias=False))))
    model = Checkpoint(config, Transformer(config).state_dict(), wordpiece_from_vocab(VOCAB), {})
    for path in (model.save(tmp_path / "model"), export(model, tmp_path / "bundle")):
        assert sizes(inspect_model(path))["head"] == 4 * (8 * 3 + 3 + 3 * 2)


def test_nodes_in_branches_are_counted() -> None:
    make = onnx.helper
    branch = make.make_graph([make.make_node("Neg", ["x"], ["y"])], "branch", [], [])
    nodes = [
        make.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        make.make_node("Neg", ["y"], ["z"]),
    ]
    assert inspection._operators(make.make_graph(nodes, "graph", [], [])) == {"Neg": 3, "If": 1}


@pytest.mark.parametrize(
    ("form", "size"), [("FLOAT", 4), ("FLOAT16", 2), ("BFLOAT16", 2), ("DOUBLE", 8), ("INT8", 1), ("INT64", 8)]
)
def test_bytes_of_an_initializer(form: str, size: int) -> None:
    tensor = onnx.TensorProto(name="w", dims=[3, 5], data_type=onnx.TensorProto.DataType.Value(form))
    assert inspection._Weight("w", form_of(tensor), (3, 5)).bytes == 15 * size


def test_advice_is_of_this_machine_and_this_model(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "advice", lambda: ["the machine's line"])
    monkeypatch.setattr(inspection, "int8_weight_bits", lambda: 7)
    plain = inspect_model(checkpoint.save(tmp_path / "model"))
    share = 100 * sizes(plain, "share")["token table"]
    assert plain["advice"] == [
        "the machine's line",
        f"the token table is {share:.0f} % of the file and float32: quantize makes it a quarter",
        "d_model is 8: int8 gains little, because calls cost as much as arithmetic; prune first",
    ]
    eight = inspect_model(quantized(checkpoint, bits=8).save(tmp_path / "eight"))
    assert [line for line in eight["advice"] if "saturate" in line]
    seven = inspect_model(quantized(checkpoint, bits=7).save(tmp_path / "seven"))
    beside = "a text's result depends a little on those beside it, whose range it shares; that of int8_static does not"
    assert seven["advice"] == ["the machine's line", beside]


def test_the_text_holds_the_numbers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_bundle(checkpoint.with_provenance(kept=KEPT), tmp_path / "bundle")
    text = render_inspection(inspect_model(path))
    lines = text.splitlines()
    assert lines[0] == f"{path}: bundle of whole, fp32 packed"
    assert "2 layers, d 8, head embedding, up to 16 tokens, 336 multiply-adds a token" in lines[1]
    row = next(line for line in lines if line.startswith("    0 "))
    assert row.split() == ["0", "1", "2", "0,", "2", "5", "0.0", "272", "float32", "float32"]
    assert any(line.split() == ["LayerNormalization", "5"] for line in lines)
    assert "nan" not in text


def test_groups_of_heads_are_told(tmp_path: Path) -> None:
    first = replace(CONFIG.encoder[0], mixer=AttentionConfig(heads=4, head_width=3, group=2))
    config = CONFIG.with_layers((first, CONFIG.encoder[1]))
    model = Checkpoint(config, Transformer(config).state_dict(), wordpiece_from_vocab(VOCAB), {"source": "whole"})
    info = inspect_model(model.save(tmp_path / "model"))
    assert [(one["heads"], one["group"], one["mixer_multiply_adds"]) for one in info["layers"]] == [
        (4, 2, 8 * (12 + 6 + 6 + 12)),
        (0, None, 0),
    ]
    rows = render_inspection(info).splitlines()
    assert any("  4 in groups of 2  " in row for row in rows)
    assert not any("groups of 1" in row for row in rows)


def table(text: str) -> list[str]:
    """The lines on where the bytes are."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return next(block for block in blocks if block[0].startswith("where the bytes are: "))


def test_the_text_says_where_the_bytes_are(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """939 numbers: 10 of them are over 1 %, 9 are not."""
    info = inspect_model(checkpoint.save(tmp_path / "model"))
    lead, heads, *rows = table(render_inspection(info))
    assert lead == "where the bytes are: tensors over 1 % of 0.00 MB (all tensors), then the rest"
    assert heads == ("tensor                         format    shape    MB   share  why it is not smaller")
    shown = {row.split("  ")[0]: row for row in rows}
    assert shown["embeddings.tokens.weight"] == (
        "embeddings.tokens.weight       float32  40 x 8  0.00  34.1 %  not quantized: quantize makes it a quarter"
    )
    biases = [name for name, row in shown.items() if "norms, biases and token types" in row]
    assert biases == ["encoder.0.mixer.qkv.bias", "embeddings.token_types.weight"]  # 18 and 16 numbers
    assert len(rows) == 4 + 6 + 1  # weights of the layers, tables and the bias, the rest
    assert rows[-1].split() == ["16", "smaller", "tensors", "0.00", "12.9", "%"]  # 121 of 939
    assert sum(entry["bytes"] for entry in info["accounting"]["tensors"]) == 4 * (939 - 121)


def test_a_second_reason_has_a_line_of_its_own(tmp_path: Path) -> None:
    config = TransformerConfig(
        d_model=8,
        embedding=EmbeddingConfig(40, 16, position_kind="none"),
        encoder=(),
        decoder=(LayerConfig(None, FeedForwardConfig(4)),),
        text=TextConfig(16),
        head=LanguageHead(1, 2),
    )
    model = Checkpoint(config, Transformer(config).state_dict(), wordpiece_from_vocab(VOCAB), {})
    path = export(model, tmp_path / "bundle")
    lines = table(render_inspection(inspect_model(path)))
    i = next(i for i, line in enumerate(lines) if line.startswith("embeddings.tokens.weight"))
    column = lines[1].index("why it is")
    assert lines[i][column:] == "not quantized: quantize makes it a quarter"
    assert lines[i + 1] == " " * column + "also the output layer: stored once"
    beside = [file for file in path.rglob("*") if file.is_file() and file.parent.name != "onnx"]
    size = sum(file.stat().st_size for file in beside) / 1e6
    assert lines[-1] == f"not counted: tokenizer.json and {len(beside) - 1} smaller files, {size:.2f} MB"
    assert lines[-2].split()[:2] == ["2", "graphs"]
    assert lines[-2].endswith("nodes and constants")


def test_a_model_without_layers_is_shown(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = CONFIG.with_layers(())
    state = {name: value for name, value in checkpoint.state.items() if not name.startswith("encoder.")}
    empty = Checkpoint(config, state, checkpoint.tokenizer)
    assert "0 layers" in render_inspection(inspect_model(empty.save(tmp_path / "empty")))


def test_broken_models_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        inspect_model(tmp_path / "absent")
    bundle = write_bundle(checkpoint, tmp_path / "bundle")
    (bundle / "onnx" / "model.onnx").write_bytes(b"no protobuf at all")
    with pytest.raises(InputError, match=r"model\.onnx: not an ONNX model"):
        inspect_model(bundle)
    (bundle / "onnx" / "model.onnx").unlink()
    with pytest.raises(InputError, match="cannot read"):
        inspect_model(bundle)
    (bundle / "slimformer.json").write_text('{"format_version": 1, "config": {"d_model": 8}}')
    with pytest.raises(InputError, match=r"slimformer\.json: config lacks"):
        inspect_model(bundle)
    (bundle / "slimformer.json").write_text('{"format_version": 1}')
    with pytest.raises(InputError, match=r"slimformer\.json: config lacks"):
        inspect_model(bundle)


def test_inspecting_changes_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "model")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    inspect_model(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("form", ["int8_static", "int8_per_token", "int8_blocks", "int4_blocks"])
def test_quantizing_leaves_the_parameters_as_many(form: str, tmp_path: Path) -> None:
    """Scales, factors and ranges are none, and two halves of a byte are two."""
    plain = tiny()
    made = Quantize(format=form, bits=8)(plain, StepContext(SearchData((), (), (), SENTENCES))).checkpoint
    found = [inspect_model(one.save(tmp_path / str(i)))["parameters"] for i, one in enumerate((plain, made))]
    assert found[0] == found[1] == sum(value.numel() for value in plain.state.values())


@pytest.mark.parametrize(("bits", "warned"), [(8, True), (7, False)])
def test_static_weights_that_saturate_here_are_said_to(
    bits: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "int8_weight_bits", lambda: 7)
    step = Quantize(format="int8_static", bits=bits, smoothing=0.5)
    made = step(tiny(), StepContext(SearchData((), (), (), SENTENCES))).checkpoint
    advice = inspect_model(made.save(tmp_path / "static"))["advice"]
    assert any("saturate" in line for line in advice) is warned
    assert not any("beside" in line for line in advice)
