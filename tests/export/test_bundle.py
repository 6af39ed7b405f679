"""What a bundle holds, what is refused, and that a failed export leaves nothing."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tiny import POSITIONS, TOKENIZER, VOCAB, layer, tiny, tiny_config, with_head

from slimformer.export import machine
from slimformer.export.bundle import check_served, export, format_of, in_format
from slimformer.export.runtime import load_bundle
from slimformer.transformer.config import ClassificationHead, DenseConfig, EmbeddingHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.families.bert import save_bert
from slimformer.transformer.loading import load
from slimformer.transformer.quantization import halved, linear_names, quantized, with_formats

DENSE = (DenseConfig(16, 10, activation="tanh"), DenseConfig(10, 12, bias=False, activation=None))
COMMON = {
    "config.json",
    "onnx/model.onnx",
    "slimformer.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
SENTENCE = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_an_embedder_has_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    prompts = (("query", "ask: "), ("document", ""))
    model = with_head(EmbeddingHead("max", DENSE), prompts=prompts, default_prompt="query", max_length=20)
    bundle = export(model, tmp_path / "bundle")
    dense = {f"{i}_Dense/{name}" for i in (2, 3) for name in ("config.json", "model.safetensors")}
    assert files(bundle) == COMMON | SENTENCE | dense
    assert (bundle / "4_Normalize").is_dir()
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    paths = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    assert read(bundle / "modules.json") == [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    assert read(bundle / "1_Pooling/config.json") == {
        "word_embedding_dimension": 16,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": True,
    }
    assert read(bundle / "sentence_bert_config.json") == {"max_seq_length": 20, "do_lower_case": False}
    said = read(bundle / "config_sentence_transformers.json")
    assert said == {"prompts": {"query": "ask: ", "document": ""}, "default_prompt_name": "query"}
    assert (bundle / "tokenizer.json").read_text(encoding="utf-8") == TOKENIZER


def test_the_sentence_files_are_read_back_by_the_family_reader(tmp_path: Path) -> None:
    """With the weights of the encoder beside them, all files together are the model that was exported."""
    prompts = (("query", "ask: "), ("document", ""))
    model = with_head(EmbeddingHead("mean", DENSE), prompts=prompts, default_prompt="query", max_length=20)
    bundle = export(model, tmp_path / "bundle")
    save_bert(model, tmp_path / "bert")
    for name in ("config.json", "model.safetensors"):
        (bundle / name).write_bytes((tmp_path / "bert" / name).read_bytes())
    again = load(bundle)
    assert again.config == model.config
    assert again.state.keys() == model.state.keys()
    assert all(torch.equal(again.state[name], value) for name, value in model.state.items())


def test_pooling_alone_without_unit_length(tmp_path: Path) -> None:
    bundle = export(with_head(EmbeddingHead("mean", normalize=False)), tmp_path / "bundle")
    assert files(bundle) == COMMON | SENTENCE
    assert [module["type"].rsplit(".", 1)[1] for module in read(bundle / "modules.json")] == ["Transformer", "Pooling"]


def test_the_config_is_one_that_other_tools_read(tmp_path: Path) -> None:
    model = with_head(ClassificationHead(("no", "yes")), layers=(layer(1, 16, 8), layer(3, 4, 40), layer(0)))
    bundle = export(model, tmp_path / "bundle")
    assert files(bundle) == COMMON
    config = read(bundle / "config.json")
    assert config == {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "id2label": {"0": "no", "1": "yes"},
        "label2id": {"no": 0, "yes": 1},
    }
    special = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    special["mask_token"] = "[MASK]"
    assert read(bundle / "special_tokens_map.json") == special
    assert read(bundle / "tokenizer_config.json") == {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 24,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def test_a_model_without_layers_or_head(tmp_path: Path) -> None:
    bundle = export(tiny(tiny_config((), head=None)), tmp_path / "bundle")
    assert files(bundle) == COMMON
    config = read(bundle / "config.json")
    assert (config["num_attention_heads"], config["intermediate_size"], config["architectures"]) == (
        1,
        1,
        ["BertModel"],
    )


def test_inputs_and_outputs_have_dynamic_axes(tmp_path: Path) -> None:
    model = onnx.load(export(tiny(), tmp_path / "bundle") / "onnx/model.onnx")
    axes = {
        value.name: [one.dim_param or one.dim_value for one in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    assert axes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "last_hidden_state": ["batch", "sequence", 16],
        "sentence_embedding": ["batch", 16],
    }
    assert {value.type.tensor_type.elem_type for value in model.graph.input} == {onnx.TensorProto.INT64}


@pytest.mark.parametrize(("format", "layout"), [(None, None), ("fp32", "padded"), ("int8", "packed"), ("int8", None)])
def test_slimformer_json_says_what_was_made(format: str | None, layout: str | None, tmp_path: Path) -> None:
    measured = {"nDCG@10": 61.5, "speed-up": {"mixed": 9.0}}
    bundle = export(tiny(), tmp_path / "bundle", format=format, layout=layout, measured=measured)
    own = read(bundle / "slimformer.json")
    assert own["format_version"] == 1
    assert own["format"] == (format or "fp32")
    assert own["layout"] == (layout or "packed")
    assert own["measured"] == measured
    assert own["provenance"]["source"] == "tiny"
    expected = quantized(tiny(), bits=7).config if format == "int8" else tiny().config
    assert load_bundle(bundle).config == expected


def test_the_target_decides_the_bits_and_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this CPU by itself would take 8 bits."""
    monkeypatch.setattr(machine, "has_int8_dot", lambda files: True)
    own = read(export(tiny(), tmp_path / "avx2", format="int8", target="avx2") / "slimformer.json")
    assert (own["provenance"]["target"], own["provenance"]["int8_weight_bits"]) == ("avx2", 7)
    assert "target" not in read(export(tiny(), tmp_path / "here", format="int8") / "slimformer.json")["provenance"]
    made = in_format(tiny(), "int8", "avx2").state["encoder.0.ffn.up.weight"]
    assert made.abs().max() == 64


def test_a_target_that_cannot_be_proven_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_int8_dot", lambda files: False)
    eight = quantized(tiny(), bits=8)
    for model, format, target, message in (
        (tiny(), "int8", "vnni", "8 bits, for the target vnni, saturate on this CPU"),
        (eight, None, "vnni", "8 bits, for the target vnni, saturate on this CPU"),
        (eight, None, "avx2", "8 bits saturate on the target avx2"),
        (tiny(), None, "sparc", "target 'sparc' is unknown"),
    ):
        with pytest.raises(InputError, match=message):
            export(model, tmp_path / "bundle", format=format, target=target)
    assert not list(tmp_path.iterdir())
    export(quantized(tiny(), bits=7), tmp_path / "seven", target="vnni")
    export(tiny(), tmp_path / "float", format="fp32", target="vnni")


def test_int8_of_an_int8_model_is_that_model(tmp_path: Path) -> None:
    model = quantized(tiny(), bits=7)
    one, two = (export(model, tmp_path / str(format), format=format) for format in (None, "int8"))
    assert (one / "onnx/model.onnx").read_bytes() == (two / "onnx/model.onnx").read_bytes()
    assert format_of(model.config) == "int8"


def test_the_input_is_left_as_it_was(tmp_path: Path) -> None:
    model, same = tiny(), tiny()
    export(model, tmp_path / "bundle", format="int8")
    assert model.config == same.config
    assert all(torch.equal(model.state[name], value) for name, value in same.state.items())


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "int4"}, "format 'int4' is not one of fp32, fp16, bf16, int8"),
    "layout": ({"layout": "ragged"}, "layout 'ragged' is not one of packed, padded"),
    "provider": ({"provider": "tpu"}, "'tpu'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_unknown_options_are_refused(name: str, tmp_path: Path) -> None:
    options, message = REFUSALS[name]
    with pytest.raises(InputError, match=message):
        export(tiny(), tmp_path / "bundle", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("made", "format"), [("int8", "fp32"), ("int8", "fp16"), ("fp16", "fp32"), ("fp16", "int8")])
def test_another_format_of_a_quantized_model_is_refused(made: str, format: str, tmp_path: Path) -> None:
    model = quantized(tiny(), bits=8) if made == "int8" else halved(tiny(), "float16")
    with pytest.raises(InputError, match=f"quantized already; .* --format {format}"):
        export(model, tmp_path / "bundle", format=format)
    assert not list(tmp_path.iterdir())


def test_fp16_is_half_precision_of_the_linears(tmp_path: Path) -> None:
    bundle = export(tiny(), tmp_path / "bundle", format="fp16")
    assert read(bundle / "slimformer.json")["format"] == "fp16"
    assert load_bundle(bundle).config == halved(tiny(), "float16").config
    again = export(halved(tiny(), "float16"), tmp_path / "again", format="fp16")
    assert (again / "onnx/model.onnx").read_bytes() == (bundle / "onnx/model.onnx").read_bytes()


def test_bfloat16_is_for_cuda(tmp_path: Path) -> None:
    for model, format in ((tiny(), "bf16"), (halved(tiny(), "bfloat16"), None)):
        with pytest.raises(
            InputError, match=r"no bfloat16 products on a CPU: take float16 \(fp16\), or --provider cuda"
        ):
            export(model, tmp_path / "bundle", format=format)
    assert not list(tmp_path.iterdir())
    assert format_of(in_format(tiny(), "bf16").config) == "bf16"
    check_served({"bfloat16", "float32"}, "cuda")


def test_names_of_mixed_formats() -> None:
    linears = linear_names(tiny().config)
    for forms, name in (
        (("float16", "float32"), "fp16"),
        (("float16", "bfloat16"), "int8"),
        (("int4_blocks",), "int4"),
    ):
        chosen = {one: forms[i % len(forms)] for i, one in enumerate(linears)}
        assert format_of(with_formats(tiny().config, chosen)) == name


def test_a_dense_activation_that_no_tool_names_is_refused(tmp_path: Path) -> None:
    model = with_head(EmbeddingHead(dense=(DenseConfig(16, 4, activation="gelu_tanh"),)))
    with pytest.raises(InputError, match="gelu_tanh"):
        export(model, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_an_existing_output_stays_unless_forced(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    place.mkdir()
    (place / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        export(tiny(), place)
    assert files(place) == {"mine.txt"}
    export(tiny(), place, force=True)
    assert files(place) == COMMON | SENTENCE
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("number", range(8))
def test_a_full_disk_leaves_nothing_and_loses_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "bundle"
    place.mkdir()
    (place / "mine.txt").write_text("mine")
    real, count = Path.write_bytes, 0

    def full(path: Path, data: bytes) -> int:
        nonlocal count
        count += 1
        if count == number + 1:
            real(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left on device"):
        export(tiny(), place, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert (place / "mine.txt").read_text() == "mine"
    assert files(place) == {"mine.txt"}


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_two_exports_are_equal_byte_by_byte(format: str, tmp_path: Path) -> None:
    model = with_head(EmbeddingHead(dense=DENSE))
    one, two = (export(model, tmp_path / name, format=format) for name in ("one", "two"))
    assert files(one) == files(two)
    for name in files(one):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.heavy
@pytest.mark.parametrize("format", ["fp32", "int8"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_sentence_transformers_gives_the_vectors_of_our_runtime(layout: str, format: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is in the extra test-heavy")
    pytest.importorskip("optimum.onnxruntime", reason="optimum-onnx is in the extra test-heavy")
    head = EmbeddingHead("mean", DENSE)
    bundle = export(with_head(head), tmp_path / "bundle", layout=layout, format=format)
    texts = ["open the save menu", "row", "print page text chart font image style list file help"]
    theirs = library.SentenceTransformer(str(bundle), backend="onnx", device="cpu")
    if format == "fp32":
        np.testing.assert_allclose(theirs.encode(texts), load_bundle(bundle).embed(texts), atol=1e-5)
        return
    for text in texts:  # int8 ranges are those of a batch, so the batches have to be the same
        np.testing.assert_allclose(theirs.encode([text]), load_bundle(bundle).embed([text]), atol=1e-5)
