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
DENSE_ACTIVATION = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


def load_sentence_transformer(directory: Path) -> Checkpoint:
    """Read a sentence-transformers directory whose encoder is a BERT.

    Raises:
        InputError: a module or option that would change the vectors is not supported.
    """
    modules = read_json(directory / "modules.json")
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= {"Dense", "Normalize"}:
        raise InputError(
            f"{directory}/modules.json: {' > '.join(kinds)} is not Transformer > Pooling > Dense > Normalize"
        )
    if "Normalize" in kinds[:-1]:
        raise InputError(f"{directory}/modules.json: Normalize must come last")
    encoder = load_bert(directory / modules[0]["path"])
    pooling = _pooling(directory / modules[1]["path"] / "config.json")
    dense, state = [], dict(encoder.state)
    for module in modules[2:]:
        if str(module["type"]).endswith("Dense"):
            config, tensors = _dense(directory / module["path"])
            state.update({f"head.dense.{len(dense)}.{name}": value for name, value in tensors.items()})
            dense.append(config)
    head = EmbeddingHead(pooling=pooling, dense=tuple(dense), normalize="Normalize" in kinds)
    text = _text(directory, directory / modules[0]["path"], encoder.config.text)
    config = replace(encoder.config, head=head, text=text)
    notes = {**encoder.provenance, "source": directory.name, "family": "sentence-transformers"}
    return Checkpoint(config, state, encoder.tokenizer, notes).check(str(directory))


def _pooling(path: Path) -> str:
    said = read_json(path)
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
    said = read_json(directory / "config.json")
    name = str(said.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if name not in DENSE_ACTIVATION:
        raise InputError(f"{directory}/config.json: activation {name} is not one of {', '.join(DENSE_ACTIVATION)}")
    config = DenseConfig(
        inputs=said["in_features"],
        outputs=said["out_features"],
        bias=said.get("bias", True),
        activation=DENSE_ACTIVATION[name],
    )
    return config, {key: value.float() for key, value in read_weights(directory).items()}


def _text(directory: Path, encoder: Path, plain: TextConfig) -> TextConfig:
    said: dict[str, Any] = {}
    for name in (encoder / "sentence_bert_config.json", directory / "config_sentence_transformers.json"):
        if name.is_file():
            said.update(read_json(name))
    return replace(
        plain,
        max_length=said.get("max_seq_length") or plain.max_length,
        prompts=tuple((said.get("prompts") or {}).items()),
        default_prompt=said.get("default_prompt_name"),
    )
