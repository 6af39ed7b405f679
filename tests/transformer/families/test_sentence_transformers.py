"""sentence-transformers directories: every option that changes the vectors is read or refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import POSITIONS, SENTENCES, WIDTH, bert_directory, ragged
from safetensors.torch import save_file

from slimformer.transformer.config import DenseConfig, EmbeddingHead
from slimformer.transformer.errors import InputError
from slimformer.transformer.families.sentence_transformers import load_sentence_transformer
from slimformer.transformer.loading import load
from slimformer.transformer.tokenizer import wordpiece_from_vocab

PLACES = {
    "Transformer": "",
    "Pooling": "1_Pooling",
    "Dense": "2_Dense",
    "Dense2": "3_Dense",
    "Normalize": "4_Normalize",
}
TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def dense_tensors(outputs: int, inputs: int, *, bias: bool, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    return {"linear.weight": weight} | ({"linear.bias": torch.randn(outputs, generator=random)} if bias else {})


def dense(path: Path, inputs: int, outputs: int, *, activation: str = TANH, bias: bool = True, **more: Any) -> None:
    said = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}
    write_json(path / "config.json", {**said, **more})
    save_file(dense_tensors(outputs, inputs, bias=bias, seed=outputs), path / "model.safetensors")


def directory(
    path: Path, *kinds: str, pooling: Any = MEAN, package: str = "sentence_transformers.models", encoder: str = ""
) -> Any:
    """A directory with these modules; returns the library's encoder."""
    model = bert_directory(path / encoder)
    places = {**PLACES, "Transformer": encoder}
    modules = [
        {"idx": i, "name": str(i), "path": places[kind], "type": f"{package}.{kind.rstrip('2')}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(path / "modules.json", modules)
    write_json(path / "1_Pooling" / "config.json", pooling)
    dense(path / "2_Dense", WIDTH, 12)
    dense(path / "3_Dense", 12, 5, activation=IDENTITY, bias=False)
    return model


def vectors(path: Path, checkpoint: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ours, and the library's hidden states with their mask."""
    from transformers import BertModel

    ids, mask = ragged((5, 2, 8))
    theirs = BertModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        return checkpoint.to_torch()(ids, mask).result, theirs(ids, mask).last_hidden_state, mask[..., None]


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_weightedmean_tokens": False}, "max"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
    ],
)
def test_pooling_modes(said: dict[str, Any], mode: str, tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling", pooling={"word_embedding_dimension": WIDTH, **said})
    checkpoint = load(tmp_path)
    assert checkpoint.config.head == EmbeddingHead(pooling=mode, normalize=False)
    found, hidden, mask = vectors(tmp_path, checkpoint)
    expected = {
        "mean": (hidden * mask).sum(1) / mask.sum(1),
        "cls": hidden[:, 0],
        "max": hidden.masked_fill(mask == 0, -math.inf).amax(1),
    }
    torch.testing.assert_close(found, expected[mode], atol=1e-5, rtol=1e-5)


def test_dense_maps_and_unit_length_in_their_order(tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling", "Dense", "Dense2", "Normalize")
    checkpoint = load(tmp_path)
    maps = (DenseConfig(WIDTH, 12), DenseConfig(12, 5, bias=False, activation=None))
    assert checkpoint.config.head == EmbeddingHead(pooling="mean", dense=maps, normalize=True)
    found, hidden, mask = vectors(tmp_path, checkpoint)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    first, second = dense_tensors(12, WIDTH, bias=True, seed=12), dense_tensors(5, 12, bias=False, seed=5)
    mapped = torch.tanh(mean @ first["linear.weight"].T + first["linear.bias"]) @ second["linear.weight"].T
    torch.testing.assert_close(found, mapped / mapped.norm(dim=1, keepdim=True), atol=1e-5, rtol=1e-5)


def test_dense_map_from_a_pickle_and_in_half_precision(tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling", "Dense")
    expected = load(tmp_path).state["head.dense.0.linear.weight"]
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    tensors = dense_tensors(12, WIDTH, bias=True, seed=12)
    torch.save({name: value.half() for name, value in tensors.items()}, tmp_path / "2_Dense" / "pytorch_model.bin")
    assert torch.equal(load(tmp_path).state["head.dense.0.linear.weight"], expected.half().float())


def test_the_encoder_may_have_its_own_folder_and_modules_new_names(tmp_path: Path) -> None:
    package = "sentence_transformers.sentence_transformer.modules"
    directory(tmp_path, "Transformer", "Pooling", "Normalize", package=package, encoder="0_Transformer")
    write_json(tmp_path / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 11})
    checkpoint = load(tmp_path)
    assert checkpoint.config.text.max_length == 11
    assert checkpoint.provenance == {
        "source": tmp_path.name,
        "family": "sentence-transformers",
        "left_out": ["pooler.dense.bias", "pooler.dense.weight"],
    }


def test_max_seq_length_and_prompts(tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling")
    assert load(tmp_path).config.text.max_length == POSITIONS
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": False})
    prompts = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", {"__version__": {}, **prompts})
    text = load(tmp_path).config.text
    assert (text.max_length, text.prompts, text.default_prompt) == (9, (("query", "find: "), ("document", "")), "query")
    assert [len(ids) for ids in load(tmp_path).text_encoder().encode(SENTENCES[:2])] == [9, 5]


def test_minilm(minilm: Path) -> None:
    checkpoint = load(minilm)
    assert checkpoint.config.head == EmbeddingHead(pooling="mean", normalize=True)
    assert (checkpoint.config.text.max_length, checkpoint.config.embedding.positions) == (256, 512)
    assert len(checkpoint.config.encoder) == 6


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["Transformer", "Pooling", "Normalize", "Dense"], "Normalize must come last"),
        (["Transformer", "Pooling", "Normalize", "Normalize"], "Normalize must come last"),
        (["Transformer"], r"modules.json: Transformer is not Transformer > Pooling"),
        (["Pooling", "Transformer"], r"Pooling > Transformer is not Transformer > Pooling"),
        (["Transformer", "Pooling", "Pooling"], r"is not Transformer > Pooling"),
    ],
)
def test_other_orders_are_refused(kinds: list[str], message: str, tmp_path: Path) -> None:
    directory(tmp_path, *kinds)
    with pytest.raises(InputError, match=message):
        load_sentence_transformer(tmp_path)


def test_classes_from_elsewhere_are_refused(tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling", package="custom_code")
    with pytest.raises(InputError, match=r"custom_code.Transformer > custom_code.Pooling is not"):
        load_sentence_transformer(tmp_path)


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("modules.json", {}, "modules.json: not a list of modules"),
        ("modules.json", [{"type": "sentence_transformers.models.Transformer"}], "not a list of modules"),
        ("1_Pooling/config.json", [], "1_Pooling/config.json: not an object"),
        ("1_Pooling/config.json", {}, "pooling by nothing is not one of mean, cls, max"),
        ("1_Pooling/config.json", {**MEAN, "pooling_mode_cls_token": True}, "pooling by .* is not one of"),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True}, "pooling by pooling_mode_lasttoken is not"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pooling by lasttoken is not"),
        ("1_Pooling/config.json", {**MEAN, "include_prompt": False}, "include_prompt is false"),
        ("2_Dense/config.json", {"out_features": 12}, "the field 'in_features' is missing"),
        ("2_Dense/config.json", {"in_features": 0, "out_features": 12}, "2_Dense/config.json: Dense inputs is 0"),
        (
            "2_Dense/config.json",
            {"in_features": 31, "out_features": 12},
            "a Dense map takes 31 columns, it is given 32",
        ),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 13}, r"head.dense.0.linear.weight is \[12, 32\]"),
        (
            "2_Dense/config.json",
            {"in_features": 32, "out_features": 12, "activation_function": "torch.nn.Softmax"},
            "activation Softmax is not one of Identity",
        ),
        (
            "2_Dense/config.json",
            {"in_features": 32, "out_features": 12, "module_input_name": "token_embeddings"},
            "a Dense map of token_embeddings is not supported",
        ),
        ("sentence_bert_config.json", {"max_seq_length": 25}, "max_length 25 is over the 24 positions"),
        ("sentence_bert_config.json", {"max_seq_length": -3}, "max_length is -3"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt 'x' is not one of"),
        ("config.json", {"model_type": "xlm-roberta"}, "model_type 'xlm-roberta' is not supported"),
    ],
)
def test_what_would_change_the_vectors_is_refused(file: str, value: Any, message: str, tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling", "Dense")
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "find: "}})
    write_json(tmp_path / file, value)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_prompts_that_are_empty_do_not_need_to_be_left_out(tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling", pooling={**MEAN, "include_prompt": False})
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": ""}})
    assert load(tmp_path).config.text.prompts == (("query", ""),)


def test_lower_case_must_be_the_tokenizers_own(tmp_path: Path) -> None:
    directory(tmp_path, "Transformer", "Pooling")
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True})
    assert load(tmp_path).config.text.max_length == 9
    (tmp_path / "tokenizer.json").write_text(
        wordpiece_from_vocab("[PAD]\n[UNK]\n[CLS]\n[SEP]\nA\na\n", lowercase=False)
    )
    with pytest.raises(InputError, match="do_lower_case is true, but the tokenizer keeps case"):
        load(tmp_path)
