"""BERT directories both ways, against the transformers library."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    ABSENT,
    DENSE,
    LABELS,
    POSITIONS,
    SENTENCES,
    TOKENIZER,
    VOCAB,
    VOCAB_SIZE,
    WHOLE,
    WIDTH,
    bert_directory,
    ragged,
    tiny,
)
from safetensors.torch import load_file, save_file

from slimformer.transformer.config import AttentionConfig, ClassificationHead, FeedForwardConfig, LayerConfig
from slimformer.transformer.errors import InputError
from slimformer.transformer.families.bert import (
    config_from,
    config_to,
    load_bert,
    name_table,
    save_bert,
    state_from,
    state_to,
)
from slimformer.transformer.quantization import quantized

ALIKE = (LayerConfig(AttentionConfig(heads=4, head_width=8), FeedForwardConfig(width=48)),) * 2
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
BASE = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 24,
}


@pytest.mark.parametrize("head", [None, LABELS], ids=["none", "labels"])
def test_the_name_table_is_inverted(head: ClassificationHead | None) -> None:
    table, state = name_table(2, classifier=head is not None), tiny(head, ALIKE).state
    assert table.keys() == state.keys()
    theirs = state_to(state, table)
    again, left_out = state_from(theirs, table)
    assert left_out == []
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
    twice = state_to(again, table)
    assert all(torch.equal(twice[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_the_names_are_those_of_the_library(labels: tuple[str, ...], tmp_path: Path) -> None:
    model = bert_directory(tmp_path, labels=labels)
    theirs = {name.removeprefix("bert.") for name in model.state_dict() if not name.endswith("position_ids")}
    table = name_table(2, classifier=bool(labels))
    unused = set() if labels else {"pooler.dense.weight", "pooler.dense.bias"}
    assert {name for names in table.values() for name in names} == theirs - unused


def rewrite(directory: Path, rename: Any) -> None:
    """Rename the tensors of a directory (None leaves one out)."""
    state = load_file(directory / "model.safetensors")
    named = {rename(name): value.clone() for name, value in state.items()}
    save_file({name: value for name, value in named.items() if name}, directory / "model.safetensors")


def test_prefix_and_old_norm_names(tmp_path: Path) -> None:
    bert_directory(tmp_path)
    expected = load_bert(tmp_path)
    rewrite(
        tmp_path,
        lambda name: "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"),
    )
    assert any("gamma" in name for name in load_file(tmp_path / "model.safetensors"))
    found = load_bert(tmp_path)
    assert found.config == expected.config
    assert all(torch.equal(found.state[name], expected.state[name]) for name in expected.state)


def test_what_is_left_out_is_listed(tmp_path: Path) -> None:
    bert_directory(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    more = {"cls.predictions.bias": torch.ones(2), "embeddings.position_ids": torch.arange(24)}
    save_file({**state, **more}, tmp_path / "model.safetensors")
    assert load_bert(tmp_path).provenance == {
        "source": tmp_path.name,
        "family": "bert",
        "left_out": ["cls.predictions.bias", "pooler.dense.bias", "pooler.dense.weight"],
    }


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    bert_directory(tmp_path)
    rewrite(tmp_path, lambda name: None if name.startswith("encoder.layer.1.attention.self.key") else name)
    with pytest.raises(InputError, match=r"encoder.layer.1.attention.self.key.bias is missing, and 1 more") as caught:
        load_bert(tmp_path)
    assert str(caught.value).count(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32, 16), r"query.weight and what is stacked .* \[32, 16\]"),
        ((16, 32), r"qkv.weight is \[80, 32\], .*\[96, 32\]"),
    ],
)
def test_tensors_of_a_wrong_shape(shape: tuple[int, int], message: str, tmp_path: Path) -> None:
    bert_directory(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["encoder.layer.0.attention.self.value.weight"] = torch.ones(shape)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_bert(tmp_path)


def test_nan_is_named_by_parameter(tmp_path: Path) -> None:
    bert_directory(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["encoder.layer.1.output.dense.weight"][0, 0] = float("nan")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"NaN or infinity in encoder.1.ffn.down.weight$"):
        load_bert(tmp_path)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    bert_directory(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, tmp_path / "model.safetensors")
    found = load_bert(tmp_path).state["encoder.0.mixer.out.weight"]
    assert torch.equal(found, state["encoder.layer.0.attention.output.dense.weight"].bfloat16().float())


def test_config_by_hand() -> None:
    config = config_from({**BASE, "hidden_act": "gelu_new", "layer_norm_eps": 1e-6, "pad_token_id": 7}, "c")
    layer = LayerConfig(AttentionConfig(4, 8), FeedForwardConfig(48, "gelu_tanh"))
    assert config.encoder == (layer,) * 3
    assert (config.d_model, config.embedding.vocab_size, config.embedding.positions) == (32, 50, 24)
    assert (config.embedding.token_types, config.norm_eps, config.head) == (2, 1e-6, None)
    assert (config.text.max_length, config.text.pad_id) == (24, 7)


def test_labels_come_in_the_order_of_their_numbers() -> None:
    names = {str(i): f"label {i}" for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    architecture = {"architectures": ["BertForSequenceClassification"]}
    head = config_from({**BASE, **architecture, "id2label": names}, "c").head
    assert head == ClassificationHead(tuple(f"label {i}" for i in range(11)))
    assert config_from({**BASE, **architecture}, "c").head == ClassificationHead(("LABEL_0", "LABEL_1"))
    assert config_from({**BASE, "id2label": names}, "c").head is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"is_decoder": True}, "is_decoder is true, an encoder is needed"),
        ({"hidden_act": "swish1702"}, "hidden_act 'swish1702' is not one of gelu"),
        ({"hidden_act": ["gelu"]}, "hidden_act"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of 5 heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "32"}, "hidden_size is '32', not a whole number"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"model_type": "xlm-roberta"}, "model_type 'xlm-roberta' is not supported; bert is"),
        ({"problem_type": "multi_label_classification"}, "problem_type 'multi_label_classification' is not supported"),
        ({"layer_norm_eps": "tiny"}, "norm_eps is 'tiny'"),
        ({"type_vocab_size": -1}, "token_types is -1"),
        ({"pad_token_id": 50}, "pad_id 50 is not below vocab_size 50"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a"}}, "1 label"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"1": "a", "2": "b"}}, "id2label does not"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "a"}}, "occurs twice"),
    ],
)
def test_options_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        config_from({**BASE, **changes}, "some/config.json")
    assert str(caught.value).startswith("some/config.json: ")


def test_all_missing_fields_are_named_at_once() -> None:
    data = {name: value for name, value in BASE.items() if name not in ("hidden_size", "vocab_size")}
    with pytest.raises(InputError, match=r"'hidden_size' is missing; .*'vocab_size' is missing"):
        config_from(data, "c")
    with pytest.raises(InputError, match="c: not an object"):
        config_from([], "c")


def as_pickle(directory: Path, state: dict[str, Any]) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(state, directory / "pytorch_model.bin")


def test_pytorch_model_bin(tmp_path: Path) -> None:
    bert_directory(tmp_path)
    expected = load_bert(tmp_path)
    as_pickle(tmp_path, load_file(tmp_path / "model.safetensors"))
    found = load_bert(tmp_path)
    assert all(torch.equal(found.state[name], expected.state[name]) for name in expected.state)


class Executed:
    """Pickled, it is a call that makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_with_code_is_never_executed(tmp_path: Path) -> None:
    bert_directory(tmp_path / "bert")
    as_pickle(
        tmp_path / "bert", {**load_file(tmp_path / "bert" / "model.safetensors"), "x": Executed(tmp_path / "made")}
    )
    with pytest.raises(InputError, match=r"pytorch_model.bin: .*not plain tensors, so it was not loaded"):
        load_bert(tmp_path / "bert")
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Executed(tmp_path / "made")))
    assert (tmp_path / "made").exists()  # it was armed


@pytest.mark.parametrize("lowercase", [True, False, None])
def test_vocab_txt_alone(lowercase: bool | None, tmp_path: Path) -> None:
    bert_directory(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text(VOCAB)
    if lowercase is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    texts = ["The First row", "the first row"]
    ids = load_bert(tmp_path).text_encoder().encode(texts)
    assert ids[1] == [2, *(5 + VOCAB.split()[5:].index(word) for word in ("the", "first", "row")), 3]
    assert ids[0] == (ids[1] if lowercase is not False else [2, 1, 1, ids[1][3], 3])


def test_no_tokenizer_and_one_that_does_not_fit(tmp_path: Path) -> None:
    bert_directory(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer.json \(nor vocab.txt\) in it"):
        load_bert(tmp_path)
    (tmp_path / "vocab.txt").write_text(VOCAB + "more\n")
    with pytest.raises(InputError, match=rf"has {VOCAB_SIZE + 1} entries, the embedding table {VOCAB_SIZE} rows"):
        load_bert(tmp_path)
    (tmp_path / "vocab.txt").write_text(VOCAB)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config.json: not an object"):
        load_bert(tmp_path)


def test_a_saved_encoder_is_the_librarys(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertModel

    checkpoint = tiny(None, ALIKE)
    save_bert(checkpoint, tmp_path / "bert")
    theirs, info = BertModel.from_pretrained(
        tmp_path / "bert", attn_implementation="eager", add_pooling_layer=False, output_loading_info=True
    )
    assert {name: list(found) for name, found in info.items() if found} == {}
    ids, mask = ragged((4, 7, 2))
    with torch.inference_mode():
        expected = theirs.eval()(ids, mask).last_hidden_state[mask.bool()]
        torch.testing.assert_close(checkpoint.to_torch()(ids, mask).hidden, expected, **CLOSE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    assert tokenizer(list(SENTENCES))["input_ids"] == checkpoint.text_encoder().encode(SENTENCES)
    again = load_bert(tmp_path / "bert")
    assert again.config == checkpoint.config
    assert all(torch.equal(again.state[name], checkpoint.state[name]) for name in again.state)


def test_a_saved_classifier_is_the_librarys(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    checkpoint = tiny(LABELS, ALIKE, pad_id=3)
    save_bert(checkpoint, tmp_path / "bert")
    theirs = BertForSequenceClassification.from_pretrained(tmp_path / "bert", attn_implementation="eager").eval()
    assert theirs.config.id2label == dict(enumerate(LABELS.labels))
    assert set(load_file(tmp_path / "bert" / "model.safetensors")) == {name for name, _ in theirs.named_parameters()}
    ids, mask = ragged((4, 7, 2))
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.to_torch()(ids, mask).result, theirs(ids, mask).logits, **CLOSE)
    assert load_bert(tmp_path / "bert").config == checkpoint.config


def test_a_sentence_encoder_is_saved_without_its_head(tmp_path: Path) -> None:
    checkpoint = tiny(DENSE, ALIKE)
    save_bert(checkpoint, tmp_path / "bert")
    assert load_bert(tmp_path / "bert").config == replace(checkpoint.config, head=None)


def test_what_is_no_bert_is_not_saved(tmp_path: Path) -> None:
    whole = tiny(None, ALIKE)
    shared = (LayerConfig(AttentionConfig(4, 8, group=2), FeedForwardConfig(48)),)
    thin = (LayerConfig(AttentionConfig(3, 8), FeedForwardConfig(48)),)
    tanh = (LayerConfig(AttentionConfig(4, 8), FeedForwardConfig(48, "tanh")),)
    untyped = replace(whole.config, embedding=replace(whole.config.embedding, token_types=0))
    for checkpoint, message in (
        (tiny(None, WHOLE), "layers of different or absent parts"),
        (tiny(None, ABSENT), "layers of different or absent parts"),
        (tiny(None, ()), "layers of different or absent parts"),
        (tiny(None, shared), "2 heads to each head of keys and values are nothing that BERT has"),
        (tiny(None, thin), "3 heads of 8 do not fill d_model 32"),
        (tiny(None, tanh), "the activation tanh is not one of BERT's"),
        (quantized(whole, bits=8), "int8 weights cannot be written"),
        (replace(whole, config=untyped), "without token types"),
        (tiny(replace(LABELS, pooler=False), ALIKE), "classifier without pooler"),
        (tiny(replace(LABELS, pooling="mean"), ALIKE), "classifier of another token"),
    ):
        with pytest.raises(InputError, match=message):
            save_bert(checkpoint, tmp_path / "bert")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    with pytest.raises(InputError, match="exists; choose another output"):
        save_bert(tiny(None, ALIKE), tmp_path / "bert")
    save_bert(tiny(None, ALIKE), tmp_path / "bert", force=True)
    assert (tmp_path / "bert" / "tokenizer.json").read_text() == TOKENIZER


def test_config_to_and_from_are_inverse() -> None:
    for head in (None, LABELS):
        config = tiny(head, ALIKE).config
        assert config_from(config_to(config), "c") == config
    assert (config_to(config)["hidden_size"], config_to(config)["max_position_embeddings"]) == (WIDTH, POSITIONS)
