"""Where bytes are, of tensors and graphs whose sizes are worked out by hand; and that what is said of them is so."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import DENSE, LABELS, MIXERS, VOCAB_SIZE, WRITERS, decoder_config, random_state, tiny, tiny_config
from models import TOKENIZER as VOCABULARY
from onnx import numpy_helper

from slimformer.export import accounting
from slimformer.export.accounting import Stored, account, account_bundle
from slimformer.export.bundle import export
from slimformer.export.contents import stored_bytes
from slimformer.export.inspection import inspect_model
from slimformer.transformer.blocks import BLOCK
from slimformer.transformer.checkpoint import Checkpoint
from slimformer.transformer.config import FeedForwardConfig, LanguageHead, LayerConfig, TransformerConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.layer_config import HALVES
from slimformer.transformer.quantization import quantized

FLOAT = "not quantized: quantize makes it a quarter"
STAYS = "stays float32: "
ROWS = "float32: one for each row of the weight"
UP = "encoder.0.ffn.up.weight"


def checkpoint(config: TransformerConfig) -> Checkpoint:
    return Checkpoint(config, random_state(config), VOCABULARY, {"source": "tiny"})


def stored(model: Checkpoint) -> list[Stored]:
    return [
        Stored(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.numel() * value.element_size())
        for name, value in model.state.items()
    ]


def added_up(found: dict[str, Any], key: str = "bytes") -> float:
    parts = [*found["tensors"], found["smaller"], found["graphs"]]
    return float(sum(part[key] for part in parts))


def lines(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tensors by name, each of which is there once."""
    by_name = {entry["name"]: entry for entry in found["tensors"]}
    assert len(by_name) == len(found["tensors"])
    return by_name


def reasons(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Why each tensor is not smaller, those of under 1 % too."""
    monkeypatch.setattr(accounting, "OVER", -1.0)
    return {name: entry["why"] for name, entry in lines(account(model.config, stored(model), 10**6)).items()}


# --- what is listed, and that it adds up ---


def test_over_one_per_cent_is_listed_and_the_rest_summed() -> None:
    """Of 2,900 bytes 1 % is 29, a share that floats do not have exactly."""
    tensors = [
        Stored("encoder_norm.bias", "float32", (7,), 28),
        Stored("encoder_norm.weight", "float32", (29,), 29),
        Stored(UP, "float32", (3, 10), 120),
        Stored("embeddings.tokens.weight", "float32", (5, 100), 2000),
        Stored("constant_1", "int64", (30,), 30, "model.onnx"),
        Stored("constant_2", "int64", (29,), 29, "model.onnx"),
    ]
    found = account(tiny_config(), tensors, 2900, of="all files", graphs=1, beside={"a": 5, "b/c": 9})
    assert [(entry["name"], entry["shape"], entry["bytes"]) for entry in found["tensors"]] == [
        ("embeddings.tokens.weight", [5, 100], 2000),
        (UP, [3, 10], 120),
        ("constant_1 (model.onnx)", [30], 30),
    ]
    assert found["tensors"][1]["share"] == 120 / 2900
    assert found["tensors"][2]["why"] == "a constant of the graph"
    assert found["smaller"] == {"tensors": 2, "bytes": 57, "share": 57 / 2900}
    assert found["graphs"] == {"files": 1, "bytes": 693, "share": 693 / 2900}  # constant_2 is among them
    assert found["beside"] == {"files": 2, "bytes": 14, "largest": "b/c"}
    assert (found["of"], found["bytes"], found["over"]) == ("all files", 2900, 0.01)
    assert added_up(found) == 2900
    assert json.loads(json.dumps(found)) == found


def test_layers_come_in_their_order() -> None:
    """Equal sizes by name, whatever the order they are given in; layer 10 after layer 9."""
    names = [f"encoder.{i}.ffn.up.weight" for i in (10, 2, 9)]
    found = account(tiny_config(), [Stored(name, "float32", (5,), 20) for name in names], 100)
    assert list(lines(found)) == [f"encoder.{i}.ffn.up.weight" for i in (2, 9, 10)]


def test_a_model_of_nothing() -> None:
    found = account(tiny_config(), [], 0)
    assert (found["tensors"], found["smaller"]["bytes"], found["graphs"]["share"]) == ([], 0, 0)
    assert found["beside"] == {"files": 0, "bytes": 0, "largest": None}


def test_every_byte_of_a_checkpoint() -> None:
    model = tiny()
    whole = 4 * sum(value.numel() for value in model.state.values())
    found = account(model.config, stored(model), whole)
    assert added_up(found) == whole
    assert found["graphs"]["bytes"] == 0
    assert lines(found)["embeddings.tokens.weight"]["bytes"] == 4 * VOCAB_SIZE * 32
    assert found["smaller"]["tensors"] == len(model.state) - len(found["tensors"])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_byte_of_an_encoders_bundle(layout: str, tmp_path: Path) -> None:
    model = quantized(tiny(DENSE), bits=7)
    bundle = export(model, tmp_path / "bundle", layout=layout)
    found = account_bundle(bundle, model.config)
    size = (bundle / "onnx/model.onnx").stat().st_size
    assert added_up(found) == found["bytes"] == size
    assert added_up(found, "share") == pytest.approx(1)
    assert found["of"] == "all files in onnx/"
    listed = lines(found)
    assert listed["embeddings.tokens.weight"]["bytes"] == VOCAB_SIZE * 32
    qkv = listed["encoder.0.mixer.qkv.weight"]
    assert (qkv["format"], qkv["shape"], qkv["bytes"]) == ("int8", [32, 96], 32 * 96)
    assert (listed["head.dense.0.linear.weight"]["format"], listed["head.dense.0.linear.weight"]["bytes"]) == (
        "float32",
        4 * 32 * 20,
    )
    kept = sum(value.numel() * value.element_size() for value in model.state.values()) - 4 * 32  # one token type
    assert found["graphs"] == {"files": 1, "bytes": size - kept, "share": (size - kept) / size}
    assert found["smaller"]["tensors"] == len(model.state) - len(listed)
    assert inspect_model(bundle)["accounting"] == found


def test_what_lies_beside_is_told_and_not_counted(tmp_path: Path) -> None:
    bundle = export(tiny(DENSE), tmp_path / "bundle")
    beside = account_bundle(bundle, tiny_config(DENSE))["beside"]
    everything = [file for file in bundle.rglob("*") if file.is_file()]
    assert beside["files"] == len(everything) - 1
    assert beside["bytes"] == sum(file.stat().st_size for file in everything) - stored_bytes(bundle)
    largest = max((file for file in everything if file.suffix != ".onnx"), key=lambda file: file.stat().st_size)
    assert bundle / beside["largest"] == largest
    assert {"tokenizer.json", "2_Dense/model.safetensors"} <= {str(file.relative_to(bundle)) for file in everything}


# --- what graphs share ---


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator with one table for all, exported."""
    return export(checkpoint(WRITERS["post"]), tmp_path_factory.mktemp("tied") / "bundle")


def graphs_with(bundle: Path, name: str) -> list[Path]:
    graphs = {
        file: onnx.load(file, load_external_data=False).graph for file in sorted((bundle / "onnx").glob("*.onnx"))
    }
    return [file for file, graph in graphs.items() if name in [item.name for item in graph.initializer]]


def test_a_table_that_graphs_and_uses_share_counts_once(tied: Path) -> None:
    name, size = "embeddings.tokens.weight", 4 * VOCAB_SIZE * 32
    assert len(graphs_with(tied, name)) == 4
    found = account_bundle(tied, WRITERS["post"])
    entry = lines(found)[name]
    assert (entry["bytes"], entry["format"], entry["shape"]) == (size, "float32", [VOCAB_SIZE, 32])
    assert entry["why"] == f"{FLOAT}; also the decoder's table and the output layer: stored once"
    assert added_up(found) == found["bytes"] == stored_bytes(tied)
    state = random_state(WRITERS["post"])
    weights = 4 * (sum(value.numel() for value in state.values()) + 24 * 32)  # the positions' formula is a table there
    graphs = sum(file.stat().st_size for file in (tied / "onnx").glob("*.onnx"))
    gaps = (tied / "onnx/weights.data").stat().st_size - weights
    assert found["graphs"]["bytes"] == graphs + gaps
    assert 0 <= gaps < 64 * (len(state) + 1)
    assert found["graphs"]["files"] == 4
    assert found["smaller"]["tensors"] == len(state) + 1 - len(found["tensors"])


def test_weights_that_graphs_hold_themselves_count_as_often(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other tools save such a bundle: every graph with its weights, and no file of them."""
    monkeypatch.setattr(accounting, "OVER", 0.001)
    (tmp_path / "onnx").mkdir()
    for file in (tied / "onnx").glob("*.onnx"):
        onnx.save(onnx.load(file), tmp_path / "onnx" / file.name)
    found = account_bundle(tmp_path, WRITERS["post"])
    tables = [entry for entry in found["tensors"] if entry["name"] == "embeddings.tokens.weight"]
    assert [entry["bytes"] for entry in tables] == [4 * VOCAB_SIZE * 32] * 4
    assert added_up(found) == stored_bytes(tmp_path)


def test_constants_count_with_their_graph(tied: Path, tmp_path: Path) -> None:
    bundle = export(tiny(), tmp_path / "bundle")
    before = account_bundle(bundle, tiny_config())
    path = bundle / "onnx/model.onnx"
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((60, 50), np.float32), "constant_x"))
    plain = onnx.helper.make_tensor(
        "constant_y", onnx.TensorProto.FLOAT, [2000], [1.0] * 2000
    )  # its numbers one by one
    assert not plain.raw_data
    model.graph.initializer.append(plain)
    onnx.save(model, path)
    found = account_bundle(bundle, tiny_config())
    listed = lines(found)
    assert (listed["constant_x (model.onnx)"]["bytes"], listed["constant_y (model.onnx)"]["bytes"]) == (12000, 8000)
    assert listed["constant_x (model.onnx)"]["format"] == "float32"
    assert added_up(found) == stored_bytes(bundle)
    assert 0 < found["graphs"]["bytes"] - before["graphs"]["bytes"] < 100  # names and shapes


def test_numbers_of_half_a_byte_take_half_a_byte(tmp_path: Path) -> None:
    """5,000 of them in the graph and 3,000 beside it, where the file says how long they are."""
    kind = onnx.TensorProto.UINT4
    within = onnx.TensorProto(name=UP, data_type=kind, dims=[50, 100], raw_data=bytes(2500))
    beside = onnx.TensorProto(name="encoder.0.ffn.down.weight", data_type=kind, dims=[3000])
    beside.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "weights.data"), ("offset", "64"), ("length", "1500")):
        beside.external_data.add(key=key, value=value)
    (tmp_path / "onnx").mkdir()
    graph = onnx.helper.make_graph([], "graph", [], [], [within, beside])
    (tmp_path / "onnx/model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    (tmp_path / "onnx/weights.data").write_bytes(bytes(64 + 1500))
    found = account_bundle(tmp_path, tiny_config())
    assert {name: entry["bytes"] for name, entry in lines(found).items()} == {within.name: 2500, beside.name: 1500}
    assert added_up(found) == stored_bytes(tmp_path)


def test_a_graph_that_cannot_be_read_is_named(tied: Path, tmp_path: Path) -> None:
    bundle = export(tiny(), tmp_path / "bundle")
    (bundle / "onnx/other.onnx").write_bytes(b"no protobuf at all")
    with pytest.raises(InputError, match=r"other\.onnx: not an ONNX model"):
        account_bundle(bundle, tiny_config())


# --- why it is not smaller ---

CONFIGS = {
    "embedding": tiny_config(DENSE),
    "classification": tiny_config(LABELS),
    **WRITERS,
    "alone, untied": decoder_config(0, 1, head=LanguageHead(2, 3, tied=False)),
    **{kind: decoder_config(2, 2, MIXERS[kind]) for kind in ("rnn", "gru")},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_quantize_would_make_smaller_is_what_it_makes_smaller(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(CONFIGS[kind])
    small = quantized(model, bits=8)
    before, after = reasons(model, monkeypatch), reasons(small, monkeypatch)
    changed = {name for name, value in small.state.items() if value.dtype != getattr(model.state.get(name), "dtype", 0)}
    assert before.keys() == model.state.keys()
    assert {name for name, why in before.items() if why.startswith(FLOAT)} == changed & before.keys()
    assert {name for name, why in before.items() if not why.startswith((FLOAT, STAYS))} == set()
    assert {name for name, why in after.items() if why.startswith("8 bits: ")} == changed & before.keys()
    assert {name for name, why in after.items() if why == ROWS} == changed - before.keys()
    assert {name: why for name, why in after.items() if why.startswith(STAYS)} == {
        name: why for name, why in before.items() if why.startswith(STAYS)
    }


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("embedding", UP, FLOAT),
        ("embedding", "embeddings.positions.weight", FLOAT),
        ("embedding", "embeddings.tokens.weight", FLOAT),
        ("embedding", "head.dense.0.linear.weight", f"{STAYS}quantize leaves heads, which run once a text"),
        ("embedding", "encoder.0.ffn_norm.weight", f"{STAYS}quantize leaves norms, biases and token types"),
        ("embedding", "encoder.0.ffn.up.bias", f"{STAYS}quantize leaves norms, biases and token types"),
        ("embedding", "embeddings.token_types.weight", f"{STAYS}quantize leaves norms, biases and token types"),
        ("classification", "head.pooler.weight", f"{STAYS}quantize leaves heads, which run once a text"),
        ("lstm", "decoder.0.mixer.recur.weight", f"{STAYS}it runs at every token, and its errors add up"),
        ("lstm", "decoder.0.mixer.recur.bias", f"{STAYS}quantize leaves norms, biases and token types"),
        ("lstm", "decoder.0.mixer.inputs.weight", FLOAT),
        ("lstm", "decoder.1.cross.kv.weight", FLOAT),
        ("post", "embeddings.tokens.weight", f"{FLOAT}; also the decoder's table and the output layer: stored once"),
        ("pre", "embeddings.tokens.weight", f"{FLOAT}; also the decoder's table: stored once"),
        ("pre", "head.tokens.weight", FLOAT),
        ("own table", "embeddings.tokens.weight", FLOAT),
        ("own table", "target.tokens.weight", f"{FLOAT}; also the output layer: stored once"),
        ("own table", "target.positions.weight", FLOAT),
        ("alone", "embeddings.tokens.weight", f"{FLOAT}; also the output layer: stored once"),
        ("alone, untied", "embeddings.tokens.weight", FLOAT),
    ],
)
def test_why_a_float_is_not_smaller(kind: str, name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(checkpoint(CONFIGS[kind]), monkeypatch)[name] == why


def test_why_an_integer_is_not_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reasons(quantized(checkpoint(WRITERS["own table"]), bits=8), monkeypatch)
    assert found[UP] == "8 bits: 4-bit blocks would take 5/8, and lose more"
    assert found["embeddings.tokens.weight"] == "8 bits: no format of tables has fewer"
    assert found["target.tokens.weight"] == (
        "8 bits: no format of tables has fewer; also the output layer: stored once"
    )
    assert found["target.tokens.scale"] == ROWS


def test_an_untied_head_has_a_format_of_its_own() -> None:
    config = decoder_config(0, 1, head=LanguageHead(2, 3, tied=False, format="int8_rows"))
    tensors = [Stored(f"{owner}.tokens.weight", "-", (4, 32), 128) for owner in ("embeddings", "head")]
    found = account(config, tensors, 256)["tensors"]
    assert [entry["why"] for entry in found] == [FLOAT, "8 bits: no format of tables has fewer"]


def test_blocks_are_named_where_columns_are_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """d_model and the first layer's heads are 32 columns wide, the FFNs 64 and 40, the second layer's heads 24."""
    assert accounting.BLOCK == BLOCK
    found = reasons(quantized(tiny(), bits=8), monkeypatch)
    whole = ("0.mixer.out", "0.ffn.down", "1.mixer.qkv", "1.ffn.up")
    assert {found[f"encoder.{name}.weight"] for name in whole} == {accounting.EIGHT_BITS}
    uneven = "8 bits: its {} columns are not whole blocks of 32, as 4 bits need"
    assert found["encoder.1.mixer.out.weight"] == uneven.format(24)
    assert found["encoder.1.ffn.down.weight"] == uneven.format(40)
    cells = reasons(quantized(checkpoint(WRITERS["lstm"]), bits=8), monkeypatch)
    assert cells["decoder.0.mixer.out.weight"] == uneven.format(20)
    assert cells["decoder.0.mixer.inputs.weight"] == accounting.EIGHT_BITS


def test_positions_by_a_formula_are_a_table_of_the_graph(tmp_path: Path) -> None:
    """A table with all the positions is there, and quantize leaves it."""
    config = decoder_config(0, 1)
    for i, model in enumerate((checkpoint(config), quantized(checkpoint(config), bits=8))):
        entry = lines(account_bundle(export(model, tmp_path / str(i)), model.config))["embeddings.positions.sinusoids"]
        assert (entry["bytes"], entry["why"]) == (4 * 24 * 32, f"{STAYS}positions by formula, which quantize leaves")


@pytest.mark.parametrize("form", HALVES)
def test_half_precision_has_words(form: str) -> None:
    """For weight and bias; the bias of a linear in another format stays as it is."""
    ffn = FeedForwardConfig(20, input_format=form)
    tensors = [
        Stored(UP, form, (20, 32), 1280),
        Stored("encoder.0.ffn.up.bias", form, (20,), 40),
        Stored("encoder.0.ffn.down.bias", "float32", (32,), 128),
    ]
    found = lines(account(tiny_config(layers=[LayerConfig(None, ffn)]), tensors, 2000))
    assert [(entry["format"], entry["why"]) for entry in found.values()] == [
        (form, "16 bits: int8 would halve it, and lose more"),
        ("float32", f"{STAYS}quantize leaves norms, biases and token types"),
        (form, f"{form}: part of {form}"),
    ]


@pytest.mark.parametrize(
    ("form", "packed", "why", "scale"),
    [
        ("int8_static", "uint8", "8 bits: 4-bit blocks would take 5/8, and lose more", ROWS),
        (
            "int8_blocks",
            "uint8 blocks of 8 bits",
            "8 bits: 4-bit blocks would halve it, and lose more",
            "float32: one for each block of the weight",
        ),
        (
            "int4_blocks",
            "uint8 blocks of 4 bits",
            "4 bits: no format has fewer",
            "float32: one for each block of the weight",
        ),
        ("int2_blocks", "uint8 (int2_blocks)", "stored as int2_blocks", "float32: part of int2_blocks"),
    ],
)
def test_formats_have_words(form: str, packed: str, why: str, scale: str) -> None:
    """Also one that nobody knows; linears on the other side of the FFN have a format of their own."""
    ffn = FeedForwardConfig(20)
    object.__setattr__(ffn, "input_format", form)  # a config refuses what is unknown
    config = tiny_config(layers=[LayerConfig(None, ffn)])
    tensors = [
        Stored(UP, "uint8", (64, 1, 16), 1024),
        Stored("encoder.0.ffn.up.scale", "float32", (64, 1), 256),
        Stored("encoder.0.ffn.up.factor", "float32", (32,), 128),
        Stored("encoder.0.ffn.up.bias", "float32", (20,), 80),
        Stored("encoder.0.ffn.down.weight", "float32", (4, 4), 64),
    ]
    found = lines(account(config, tensors, 2000))
    assert [(entry["format"], entry["why"]) for entry in found.values()] == [
        (packed, why),
        ("float32", scale),
        ("float32", f"float32: part of {form}"),
        ("float32", f"{STAYS}quantize leaves norms, biases and token types"),
        ("float32", FLOAT),
    ]
