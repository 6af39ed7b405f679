"""Directories of the sentence-transformers library: an encoder, then pooling, Dense maps and unit length.

Read from modules.json, sentence_bert_config.json (max_seq_length), config_sentence_transformers.json (prompts), and
each module's own folder.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint import Checkpoint, read_json
from ..config import DenseConfig, EmbeddingHead, TextConfig
from ..errors import InputError
from ..weights import read_weights
from .bert import load_bert

POOLING = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
LOWERCASE = ('"lowercase":true', '"type":"Lowercase"')  # in a tokenizer.json
DENSE_ACTIVATION = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


def load_sentence_transformer(directory: Path) -> Checkpoint:
    """Read a sentence-transformers directory whose encoder is a BERT.

    Raises:
        InputError: a module or option that would change the vectors is not supported.
    """
    modules = _modules(directory / "modules.json")
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= {"Dense", "Normalize"}:
        raise InputError(
            f"{directory}/modules.json: {' > '.join(kinds)} is not Transformer > Pooling > Dense > Normalize"
        )
    if "Normalize" in kinds[:-1]:
        raise InputError(f"{directory}/modules.json: Normalize must come last")
    encoder = load_bert(directory / modules[0][1])
    text = _text(directory, directory / modules[0][1], encoder)
    pooling = _pooling(directory / modules[1][1] / "config.json", prompted=any(prompt for _, prompt in text.prompts))
    dense: list[DenseConfig] = []
    state = dict(encoder.state)
    for kind, path in modules[2:]:
        if kind == "Dense":
            described, tensors = _dense(directory / path)
            state.update({f"head.dense.{len(dense)}.{name}": value for name, value in tensors.items()})
            dense.append(described)
    head = EmbeddingHead(pooling=pooling, dense=tuple(dense), normalize="Normalize" in kinds)
    try:
        config = replace(encoder.config, head=head, text=text)
    except InputError as error:
        raise InputError(f"{directory}: {error}") from error
    notes = {**encoder.provenance, "source": directory.name, "family": "sentence-transformers"}
    return Checkpoint(config, state, encoder.tokenizer, notes).check(str(directory))


def _modules(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module; a class from outside the library keeps its full name."""
    found = read_json(path)
    if not isinstance(found, list) or not all(isinstance(m, dict) and isinstance(m.get("path"), str) for m in found):
        raise InputError(f"{path}: not a list of modules with type and path")
    pairs = []
    for module in found:
        kind = str(module.get("type"))
        package, _, name = kind.rpartition(".")
        pairs.append((name if package.startswith("sentence_transformers.") else kind, str(module["path"])))
    return pairs


def _object(path: Path) -> dict[str, Any]:
    said = read_json(path)
    if not isinstance(said, dict):
        raise InputError(f"{path}: not an object")
    return said


def _pooling(path: Path, *, prompted: bool) -> str:
    said = _object(path)
    if prompted and said.get("include_prompt") is False:
        raise InputError(f"{path}: include_prompt is false: prompts left out of the pooling are not supported")
    if "pooling_mode" in said:
        modes = [str(said["pooling_mode"])]
        chosen = [mode for mode in modes if mode in POOLING.values()]
    else:
        modes = [key for key, value in said.items() if key.startswith("pooling_mode_") and value]
        chosen = [POOLING[mode] for mode in modes if mode in POOLING]
    if len(modes) != 1 or len(chosen) != 1:
        raise InputError(f"{path}: pooling by {' + '.join(modes) or 'nothing'} is not one of mean, cls, max")
    return chosen[0]


def _dense(directory: Path) -> tuple[DenseConfig, dict[str, Tensor]]:
    said = _object(directory / "config.json")
    missing = [key for key in ("in_features", "out_features") if key not in said]
    if missing:
        raise InputError(f"{directory}/config.json: the field {missing[0]!r} is missing")
    if said.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise InputError(f"{directory}/config.json: a Dense map of {said['module_input_name']} is not supported")
    name = str(said.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if name not in DENSE_ACTIVATION:
        raise InputError(f"{directory}/config.json: activation {name} is not one of {', '.join(DENSE_ACTIVATION)}")
    try:
        config = DenseConfig(
            inputs=said["in_features"],
            outputs=said["out_features"],
            bias=said.get("bias", True),
            activation=DENSE_ACTIVATION[name],
        )
    except InputError as error:
        raise InputError(f"{directory}/config.json: {error}") from error
    return config, {key: value.float() for key, value in read_weights(directory).items()}


def _text(directory: Path, folder: Path, encoder: Checkpoint) -> TextConfig:
    said: dict[str, Any] = {}
    for name in (folder / "sentence_bert_config.json", directory / "config_sentence_transformers.json"):
        if name.is_file():
            said.update(_object(name))
    tokenizer = "".join(encoder.tokenizer.split())
    if said.get("do_lower_case") and not any(mark in tokenizer for mark in LOWERCASE):
        raise InputError(f"{folder}: do_lower_case is true, but the tokenizer keeps case; this is not supported")
    try:
        return replace(
            encoder.config.text,
            max_length=said.get("max_seq_length") or encoder.config.text.max_length,
            prompts=tuple((said.get("prompts") or {}).items()),
            default_prompt=said.get("default_prompt_name"),
        )
    except InputError as error:
        raise InputError(f"{directory}: {error}") from error
