"""BERT (Devlin et al. 2019) as the `transformers` library stores it, both ways.

One table of names: ours on the left, theirs on the right; several of theirs are stacked on the first axis. The table
is read forwards to load and backwards to save.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..checkpoint import Checkpoint, read_json, read_text
from ..config import (
    AttentionConfig,
    ClassificationHead,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    TextConfig,
    TransformerConfig,
)
from ..errors import InputError
from ..files import atomic_directory, write_file
from ..tokenizer import wordpiece_from_vocab
from ..weights import SAFETENSORS, read_weights

MODEL: dict[str, tuple[str, ...]] = {
    "embeddings.tokens.weight": ("embeddings.word_embeddings.weight",),
    "embeddings.positions.weight": ("embeddings.position_embeddings.weight",),
    "embeddings.token_types.weight": ("embeddings.token_type_embeddings.weight",),
    "embeddings.norm.weight": ("embeddings.LayerNorm.weight",),
    "embeddings.norm.bias": ("embeddings.LayerNorm.bias",),
}
_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
LAYER: dict[str, tuple[str, ...]] = {
    "mixer.qkv": _QKV,
    "mixer.out": ("attention.output.dense",),
    "mixer_norm": ("attention.output.LayerNorm",),
    "ffn.up": ("intermediate.dense",),
    "ffn.down": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}
CLASSIFIER: dict[str, tuple[str, ...]] = {
    "head.pooler.weight": ("pooler.dense.weight",),
    "head.pooler.bias": ("pooler.dense.bias",),
    "head.classifier.weight": ("classifier.weight",),
    "head.classifier.bias": ("classifier.bias",),
}
ACTIVATION = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
WIDTHS = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
PREFIX = "bert."
CLASSIFIER_ARCHITECTURE = "BertForSequenceClassification"


def name_table(layers: int, *, classifier: bool) -> dict[str, tuple[str, ...]]:
    """Our name -> their names, for a model of `layers` layers."""
    table = dict(MODEL)
    for i in range(layers):
        for ours, theirs in LAYER.items():
            for part in ("weight", "bias"):
                table[f"encoder.{i}.{ours}.{part}"] = tuple(f"encoder.layer.{i}.{name}.{part}" for name in theirs)
    return {**table, **CLASSIFIER} if classifier else table


def state_from(
    theirs: Mapping[str, Tensor], table: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Tensor], list[str]]:
    """Their tensors under our names, in float32, and the names of theirs that no entry wants.

    Raises:
        InputError: a tensor of the table is missing, or parts to be stacked do not fit each other.
    """
    plain = {_plain(name): value for name, value in theirs.items()}
    missing = sorted(name for names in table.values() for name in names if name not in plain)
    if missing:
        raise InputError(f"{missing[0]} is missing" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""))
    state: dict[str, Tensor] = {}
    for ours, names in table.items():
        parts = [plain[name].float() for name in names]
        if any(part.ndim == 0 or part.shape[1:] != parts[0].shape[1:] for part in parts):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise InputError(f"{names[0]} and what is stacked with it have the shapes {shapes}")
        state[ours] = torch.cat(parts)
    wanted = {name for names in table.values() for name in names}
    return state, sorted(name for name in plain if name not in wanted and not name.endswith("position_ids"))


def state_to(ours: Mapping[str, Tensor], table: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """Our tensors under their names: the inverse of `state_from`."""
    theirs: dict[str, Tensor] = {}
    for name, names in table.items():
        theirs.update(zip(names, (part.contiguous() for part in ours[name].chunk(len(names))), strict=True))
    return theirs


def _plain(name: str) -> str:
    name = name.removeprefix(PREFIX)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def config_from(data: Any, source: str) -> TransformerConfig:
    """Translate their config.json.

    Raises:
        InputError: a value that changes the computation is not one of those supported.
    """
    problems = _problems(data)
    if problems:
        raise InputError(f"{source}: {'; '.join(problems)}")
    width, heads, positions = data["hidden_size"], data["num_attention_heads"], data["max_position_embeddings"]
    activation = ACTIVATION[data.get("hidden_act", "gelu")]
    types = data.get("type_vocab_size", 2)
    try:
        layer = LayerConfig(
            mixer=AttentionConfig(heads=heads, head_width=width // heads),
            ffn=FeedForwardConfig(width=data["intermediate_size"], activation=activation),
        )
        return TransformerConfig(
            d_model=width,
            embedding=EmbeddingConfig(vocab_size=data["vocab_size"], positions=positions, token_types=types),
            encoder=(layer,) * data["num_hidden_layers"],
            text=TextConfig(max_length=positions, pad_id=data.get("pad_token_id") or 0),
            head=_classifier(data),
            norm_eps=data.get("layer_norm_eps", 1e-12),
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _problems(data: Any) -> list[str]:
    """What of their config is missing, no number, or changes the computation in a way that is not supported."""
    if not isinstance(data, dict):
        return ["not an object"]
    problems = [f"the field {name!r} is missing" for name in WIDTHS if name not in data]
    wrong = [name for name in WIDTHS if name in data and (type(data[name]) is not int or data[name] < 1)]
    problems += [f"{name} is {data[name]!r}, not a whole number of at least 1" for name in wrong]
    if data.get("model_type", "bert") != "bert":
        problems.append(f"model_type {data['model_type']!r} is not supported; bert is")
    if str(data.get("hidden_act", "gelu")) not in ACTIVATION:
        problems.append(f"hidden_act {data['hidden_act']!r} is not one of {', '.join(ACTIVATION)}")
    if data.get("position_embedding_type", "absolute") != "absolute":
        problems.append(f"position_embedding_type {data['position_embedding_type']!r} is not supported")
    if data.get("is_decoder"):
        problems.append("is_decoder is true, an encoder is needed")
    if data.get("problem_type") not in (None, "single_label_classification"):
        problems.append(f"problem_type {data['problem_type']!r} is not supported; single_label_classification is")
    if not problems and data["hidden_size"] % data["num_attention_heads"]:
        problems.append(f"hidden_size {data['hidden_size']} is not a multiple of {data['num_attention_heads']} heads")
    return problems


def _classifier(data: Mapping[str, Any]) -> ClassificationHead | None:
    if CLASSIFIER_ARCHITECTURE not in (data.get("architectures") or []):
        return None
    names = data.get("id2label") or {str(i): f"LABEL_{i}" for i in range(data.get("num_labels", 2))}
    if not isinstance(names, dict) or sorted(names) != sorted(str(i) for i in range(len(names))):
        raise InputError("id2label does not name the labels 0, 1, 2 and so on")
    return ClassificationHead(labels=tuple(str(names[str(i)]) for i in range(len(names))))


def config_to(config: TransformerConfig) -> dict[str, Any]:
    """Our config as theirs, for layers that are all alike and whole; the head of sentence encoders is not in it.

    Raises:
        InputError: the layers differ or lack a part, or something else that their format cannot say.
    """
    config.check_attention_encoder("writing a BERT directory")
    if not config.is_float:
        raise InputError("int8 weights cannot be written as a BERT directory")
    if problems := _not_bert(config):
        raise InputError(f"a model {' and '.join(problems)} is no BERT")
    shapes = set(config.encoder)
    first = config.encoder[0] if config.encoder else None
    if len(shapes) != 1 or first is None or first.attention is None or first.ffn is None:
        raise InputError("layers of different or absent parts cannot be written as a BERT config")
    heads = first.attention
    if heads.group > 1:
        raise InputError(f"{heads.group} heads to each head of keys and values are nothing that BERT has")
    if heads.width != config.d_model:
        raise InputError(f"{heads.heads} heads of {heads.head_width} do not fill d_model {config.d_model}")
    names = {ours: theirs for theirs, ours in reversed(ACTIVATION.items())}
    if first.ffn.activation not in names:
        raise InputError(f"the activation {first.ffn.activation} is not one of BERT's: {', '.join(names)}")
    data = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": config.d_model,
        "num_attention_heads": heads.heads,
        "num_hidden_layers": len(config.encoder),
        "intermediate_size": first.ffn.width,
        "hidden_act": names[first.ffn.activation],
        "vocab_size": config.embedding.vocab_size,
        "max_position_embeddings": config.embedding.positions,
        "type_vocab_size": config.embedding.token_types,
        "layer_norm_eps": config.norm_eps,
        "pad_token_id": config.text.pad_id,
    }
    if isinstance(config.head, ClassificationHead):
        data["architectures"] = [CLASSIFIER_ARCHITECTURE]
        data["id2label"] = {str(i): label for i, label in enumerate(config.head.labels)}
        data["label2id"] = {label: i for i, label in enumerate(config.head.labels)}
    return data


def _not_bert(config: TransformerConfig) -> list[str]:
    """What the model has that BERT has not."""
    embedding, head = config.embedding, config.head
    found = {
        "with its norms elsewhere": config.norm_place != "post" or config.final_norm or not embedding.norm,
        "with scaled embeddings": embedding.scaled,
        "without learned positions": embedding.position_kind != "learned",
        "without token types": not embedding.token_types,
        "with a classifier without pooler": isinstance(head, ClassificationHead) and not head.pooler,
        "with a classifier of another token": isinstance(head, ClassificationHead) and head.pooling != "cls",
    }
    return [what for what, there in found.items() if there]


def load_bert(directory: Path) -> Checkpoint:
    """Read a BERT directory of the `transformers` library.

    Raises:
        InputError: a file is missing or broken, or says what this family does not cover.
    """
    source = str(directory / "config.json")
    config = config_from(read_json(directory / "config.json"), source)
    table = name_table(len(config.encoder), classifier=config.head is not None)
    try:
        state, left_out = state_from(read_weights(directory), table)
    except InputError as error:
        raise InputError(f"{directory}: {str(error).removeprefix(f'{directory}: ')}") from error
    notes = {"source": directory.name, "family": "bert", "left_out": left_out}
    return Checkpoint(config, state, read_tokenizer(directory), notes).check(str(directory))


def read_tokenizer(directory: Path) -> str:
    """The text of tokenizer.json, or a WordPiece tokenizer made from vocab.txt and tokenizer_config.json."""
    if (directory / "tokenizer.json").is_file():
        return read_text(directory / "tokenizer.json")
    if not (directory / "vocab.txt").is_file():
        raise InputError(f"{directory}: no tokenizer.json (nor vocab.txt) in it")
    options = directory / "tokenizer_config.json"
    said = read_json(options) if options.is_file() else {}
    if not isinstance(said, dict):
        raise InputError(f"{options}: not an object")
    return wordpiece_from_vocab(
        read_text(directory / "vocab.txt"),
        lowercase=said.get("do_lower_case", True),
        strip_accents=said.get("strip_accents"),
        tokenize_chinese_chars=said.get("tokenize_chinese_chars", True),
    )


def save_bert(checkpoint: Checkpoint, directory: Path, *, force: bool = False) -> None:
    """Write an uncompressed checkpoint as a BERT directory that the `transformers` library loads.

    The pooling and Dense maps of a sentence encoder have no place in it and are not written.

    Raises:
        InputError: the model cannot be said as a BERT; `directory` exists and `force` is false; or the disk is full.
    """
    config, head = config_to(checkpoint.config), checkpoint.config.head
    classifies = isinstance(head, ClassificationHead)
    state = state_to(checkpoint.state, name_table(len(checkpoint.config.encoder), classifier=classifies))
    if classifies:  # the library's classifiers have an encoder of this name inside
        state = {name if name.startswith("classifier.") else PREFIX + name: value for name, value in state.items()}
    with atomic_directory(directory, force=force) as partial:
        weights = save(state, metadata={"format": "pt"})
        write_file(partial / SAFETENSORS, weights)
        write_file(partial / "config.json", json.dumps(config, indent=2) + "\n")
        write_file(partial / "tokenizer.json", checkpoint.tokenizer)
