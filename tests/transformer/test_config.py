"""The config as data: what it writes it reads, and what it cannot mean it refuses by name."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from models import ABSENT, DENSE, EMBEDDING, LABELS, WHOLE, WIDTH, decoder_config, tiny_config

from slimformer.transformer.config import (
    AttentionConfig,
    ClassificationHead,
    DenseConfig,
    EmbeddingHead,
    FeedForwardConfig,
    LanguageHead,
    LayerConfig,
    TransformerConfig,
)
from slimformer.transformer.errors import InputError

INT8_LAYER = replace(
    WHOLE[0],
    mixer=AttentionConfig(4, 8, input_format="int8_dynamic"),
    ffn=FeedForwardConfig(9, output_format="int8_dynamic"),
)
CONFIGS = {
    "embedding": tiny_config(EMBEDDING),
    "dense": tiny_config(DENSE, prompts=(("query", "q: "), ("document", "")), default_prompt="query", pad_id=3),
    "classification": tiny_config(LABELS, ABSENT),
    "no head, no layers": tiny_config(None, ()),
    "mixed formats": tiny_config(EMBEDDING, (INT8_LAYER,)),
    "translator": decoder_config(),
    "summarizer": decoder_config(head=LanguageHead(2, 3, kind="summarization")),
}


def edited(config: TransformerConfig, path: str, value: Any) -> dict[str, Any]:
    """The config as JSON holds it, with one value set; `path` like encoder.0.mixer.heads; ... removes it."""
    data = json.loads(config.to_json())
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str) -> None:
    config = CONFIGS[name]
    assert TransformerConfig.from_json(config.to_json(), "config.json") == config
    assert TransformerConfig.from_dict(config.to_dict()) == config


def test_json_holds_every_width_and_the_version() -> None:
    data = json.loads(CONFIGS["classification"].to_json())
    assert (data["format_version"], data["d_model"]) == (1, 32)
    head = {"labels": ["chart", "file", "table"], "pooler": True, "pooling": "cls", "kind": "classification"}
    assert data["head"] == head
    assert data["encoder"][0]["mixer"] is None
    assert data["encoder"][1]["mixer"] == {
        "heads": 1,
        "head_width": 8,
        "input_format": "float32",
        "output_format": "float32",
        "kind": "attention",
        "group": 1,
    }


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ("embedding", "surprise"),
        ("embedding", "embedding.surprise"),
        ("embedding", "text.surprise"),
        ("embedding", "encoder.1.surprise"),
        ("embedding", "encoder.1.mixer.surprise"),
        ("embedding", "encoder.0.ffn.surprise"),
        ("embedding", "head.surprise"),
        ("classification", "head.surprise"),
        ("dense", "head.dense.0.surprise"),
    ],
)
def test_an_unknown_field_is_named(config: str, path: str) -> None:
    where = "config." + path.rpartition(".")[0].replace(".0", "[0]").replace(".1", "[1]")
    with pytest.raises(InputError, match="unknown field 'surprise'") as caught:
        TransformerConfig.from_dict(edited(CONFIGS[config], path, 1))
    assert str(caught.value).startswith(where.rstrip("."))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ("embedding", "d_model"),
        ("embedding", "encoder"),
        ("embedding", "embedding"),
        ("embedding", "text"),
        ("embedding", "embedding.vocab_size"),
        ("embedding", "embedding.positions"),
        ("embedding", "text.max_length"),
        ("embedding", "encoder.0.ffn"),
        ("embedding", "encoder.1.mixer.heads"),
        ("embedding", "encoder.1.mixer.head_width"),
        ("embedding", "encoder.0.ffn.width"),
        ("classification", "head.labels"),
        ("dense", "head.dense.1.outputs"),
    ],
)
def test_a_missing_field_is_named(config: str, path: str) -> None:
    with pytest.raises(InputError, match=f"lacks the field '{path.rpartition('.')[2]}'"):
        TransformerConfig.from_dict(edited(CONFIGS[config], path, ...))


def test_all_problems_of_an_object_come_at_once() -> None:
    data = edited(CONFIGS["embedding"], "one", 1) | {"two": 2}
    del data["d_model"]
    with pytest.raises(InputError, match=r"'one'.*'two'.*'d_model'"):
        TransformerConfig.from_dict(data)


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        ("embedding", "d_model", 0, "d_model is 0"),
        ("embedding", "d_model", "32", "d_model is '32'"),
        ("embedding", "d_model", True, "d_model is True"),
        ("embedding", "norm_eps", 0.0, "norm_eps is 0.0"),
        ("embedding", "norm_eps", "x", "norm_eps is 'x'"),
        ("embedding", "encoder", {}, "config.encoder is not a list"),
        ("embedding", "encoder.0", 3, r"config.encoder\[0\] is not an object"),
        ("embedding", "encoder.1.mixer.heads", 0, r"config.encoder\[1\].mixer: heads is 0"),
        ("embedding", "encoder.1.mixer.group", 0, "group is 0"),
        ("embedding", "encoder.1.mixer.group", True, "group is True"),
        ("embedding", "encoder.0.mixer.group", 3, "4 heads do not go into groups of 3"),
        ("embedding", "encoder.1.mixer.head_width", 2.5, "head_width is 2.5"),
        ("embedding", "encoder.1.mixer.kind", "fnet", "mixer kind is 'fnet'"),
        ("embedding", "encoder.1.mixer.input_format", "int4", "input_format is 'int4'"),
        ("embedding", "encoder.0.ffn.width", -1, "FFN width is -1"),
        ("embedding", "encoder.0.ffn.activation", "swish", "activation is 'swish'"),
        ("embedding", "encoder.0.ffn.output_format", "int8_rows", "output_format is 'int8_rows'"),
        ("embedding", "embedding.vocab_size", 0, "config.embedding: vocab_size is 0"),
        ("embedding", "embedding.token_types", -1, "token_types is -1"),
        ("embedding", "embedding.tokens_format", "int8_dynamic", "tokens_format is 'int8_dynamic'"),
        ("embedding", "embedding.positions", 23, "max_length 24 is over the 23 positions"),
        ("embedding", "text.max_length", 0, "max_length is 0"),
        ("embedding", "text.pad_id", -1, "pad_id is -1"),
        ("embedding", "text.pad_id", 4000, "pad_id 4000 is not below vocab_size"),
        ("embedding", "text.default_prompt", "query", "default_prompt 'query' is not one of the prompts"),
        ("embedding", "text.default_prompt", [], r"default_prompt \[\] is not one of the prompts"),
        ("embedding", "text.prompts", ["query"], "prompts is not a list of pairs"),
        ("embedding", "text.prompts", "query", "prompts is not a list"),
        ("embedding", "text.prompts", [["query", 1]], "prompts is not a list of pairs"),
        ("embedding", "head.kind", "translation", "kind 'translation'"),
        ("embedding", "head.pooling", "sum", "pooling is 'sum'"),
        ("embedding", "head.normalize", "no", "normalize is 'no'"),
        ("embedding", "head", [], "kind None"),
        ("dense", "head.dense", {}, "config.head.dense is not a list"),
        ("dense", "head.dense.0.inputs", 31, "a Dense map takes 31 columns, it is given 32"),
        ("dense", "head.dense.1.inputs", 21, "a Dense map takes 21 columns, it is given 20"),
        ("dense", "head.dense.0.outputs", 0, r"config.head.dense\[0\]: Dense outputs is 0"),
        ("dense", "head.dense.1.bias", 1, "Dense bias is 1"),
        ("dense", "head.dense.1.activation", "softmax", "Dense activation is 'softmax'"),
        ("classification", "head.labels", ["a"], r"1 label\(s\), at least 2"),
        ("classification", "head.labels", ["a", "b", "a"], "a label occurs twice"),
        ("classification", "head.labels", ["a", 1], "a label is not text"),
        ("classification", "head.labels", "abc", "config.head.labels is not a list"),
        ("classification", "head.pooler", None, "pooler is None"),
    ],
)
def test_a_wrong_value_is_named(config: str, path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TransformerConfig.from_dict(edited(CONFIGS[config], path, value))


def test_another_format_version_is_said_before_its_unknown_fields() -> None:
    data = edited(CONFIGS["embedding"], "format_version", 2) | {"new": 1}
    with pytest.raises(InputError, match="format_version is 2, this slimformer reads 1"):
        TransformerConfig.from_dict(data)
    with pytest.raises(InputError, match="format_version is 2"):
        replace(CONFIGS["embedding"], format_version=2)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "config is not an object"), ("{}", "lacks")])
def test_text_that_is_no_config_names_its_file(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        TransformerConfig.from_json(text, "some/config.json")
    assert str(caught.value).startswith("some/config.json: ")


def test_heads_know_their_kind() -> None:
    with pytest.raises(InputError, match="head kind"):
        EmbeddingHead(kind="classification")
    with pytest.raises(InputError, match="head kind"):
        ClassificationHead(("a", "b"), kind="embedding")


def test_dense_chain_of_fitting_widths_is_taken() -> None:
    chain = (DenseConfig(WIDTH, 5), DenseConfig(5, 7), DenseConfig(7, 2))
    assert tiny_config(EmbeddingHead(dense=chain)).head == EmbeddingHead(dense=chain)


def test_prompts() -> None:
    text = CONFIGS["dense"].text
    assert [text.prompt(), text.prompt("query"), text.prompt("document")] == ["q: ", "q: ", ""]
    assert CONFIGS["embedding"].text.prompt() == ""
    with pytest.raises(InputError, match="no prompt named 'passage'; the model has: query, document"):
        text.prompt("passage")
    with pytest.raises(InputError, match="the model has: none"):
        CONFIGS["embedding"].text.prompt("query")


def test_formats() -> None:
    assert CONFIGS["embedding"].formats == {"float32"}
    assert CONFIGS["embedding"].is_float
    assert CONFIGS["mixed formats"].formats == {"float32", "int8_dynamic"}
    assert not CONFIGS["mixed formats"].is_float
    tables = replace(CONFIGS["embedding"].embedding, positions_format="int8_rows")
    assert replace(CONFIGS["embedding"], embedding=tables).formats == {"float32", "int8_rows"}


def test_a_head_of_summaries_says_so_and_needs_an_encoder() -> None:
    heads = [CONFIGS[name].head for name in ("translator", "summarizer")]
    assert [isinstance(head, LanguageHead) and head.summarizes for head in heads] == [False, True]
    assert json.loads(CONFIGS["summarizer"].to_json())["head"]["kind"] == "summarization"
    with pytest.raises(InputError, match="a head of summaries needs an encoder"):
        decoder_config(0, head=LanguageHead(2, 3, kind="summarization"))
    with pytest.raises(InputError, match="head kind is 'poetry', not one of language, summarization"):
        LanguageHead(2, 3, kind="poetry")


def test_multiply_adds_by_hand() -> None:
    first, second = 4 * 32 * 32 + 2 * 32 * 64, 4 * 32 * 24 + 2 * 32 * 40
    assert CONFIGS["embedding"].multiply_adds() == first + second
    assert CONFIGS["dense"].multiply_adds(encoder_only=False) == first + second + 32 * 20 + 20 * 6
    assert CONFIGS["classification"].multiply_adds() == 2 * 32 * 48 + 4 * 32 * 8
    assert CONFIGS["embedding"].with_layers(WHOLE[:1]).multiply_adds() == first
    shared = LayerConfig(AttentionConfig(6, 5, group=3), None)  # 30 queries, 10 keys, 10 values, 30 columns out
    assert CONFIGS["embedding"].with_layers((shared,)).multiply_adds() == 32 * (30 + 10 + 10 + 30)


def test_the_config_is_read_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import slimformer.transformer.config"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
