"""What a bundle holds, read from its files without onnx and onnxruntime; see `bundle` for the files."""

import json
from pathlib import Path
from typing import Any

from ..transformer.config import LanguageHead, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.tokenizer import TextEncoder
from .names import BUNDLE_VERSION, GENERATE_FILE, MODEL_FILE, OWN_FILE


def graph_file(config: TransformerConfig) -> str:
    """The graph's place in a bundle; of models that write, that of the whole decode."""
    return GENERATE_FILE if isinstance(config.head, LanguageHead) else MODEL_FILE


def stored_bytes(bundle: Path) -> int:
    """Bytes of all graphs and of the weights beside them."""
    return sum(file.stat().st_size for file in (bundle / MODEL_FILE).parent.iterdir() if file.is_file())


def is_bundle(path: Path) -> bool:
    """Whether a directory looks like a bundle of ours."""
    return (path / OWN_FILE).is_file()


def read_own(path: Path) -> dict[str, Any]:
    """The content of a bundle's slimformer.json, or an InputError; also where a file of weights is not whole."""
    if not is_bundle(path):
        raise InputError(f"{path} is not a bundle: it has no {OWN_FILE}; make one with slimformer export")
    try:
        own = dict(json.loads(read_file(path / OWN_FILE)))
        version, weights = own["format_version"], dict(own.get("weights", {}))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path / OWN_FILE}: damaged ({error}); export the bundle again") from error
    if version != BUNDLE_VERSION:
        raise InputError(f"{path / OWN_FILE}: format_version {version}, this slimformer reads {BUNDLE_VERSION}")
    for name, size in weights.items():
        _check_weights(path / name, size)
    return own


def _check_weights(file: Path, size: int) -> None:
    """Refuse a file that is not there or has lost its end."""
    if not file.is_file():
        raise InputError(f"{file} is missing, the weights are in it; export the bundle again")
    if (found := file.stat().st_size) != size:
        raise InputError(f"{file} has {found} bytes of {size}; export the bundle again")


def read_config(own: dict[str, Any], path: Path) -> TransformerConfig:
    """The config in a slimformer.json, which is at `path`, or an InputError."""
    if "config" not in own:
        raise InputError(f"{path}: damaged (it has no 'config'); export the bundle again")
    try:
        return TransformerConfig.from_dict(own["config"])
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error


def read_tokenizer(path: Path, max_length: int) -> TextEncoder:
    """The tokenizer.json at `path`, or an InputError."""
    text = read_file(path)
    try:
        return TextEncoder(text, max_length)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read_file(path: Path) -> str:
    """Its text, or an InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
