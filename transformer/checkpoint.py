"""A model at rest: config, tensors, tokenizer and where they come from.

On disk: `config.json`, `model.safetensors`, `tokenizer.json`, `provenance.json`.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from .config import TransformerConfig
from .errors import InputError
from .files import atomic_directory, write_file
from .model import Transformer
from .tokenizer import TextEncoder
from .weights import SAFETENSORS, check_finite, check_shapes, read_weights, to_numpy

CONFIG, TOKENIZER, PROVENANCE = "config.json", "tokenizer.json", "provenance.json"
NEW = "new"  # the source, in its provenance, of a model that began with drawn weights


@dataclass(frozen=True)
class Checkpoint:
    """A model that loads strictly.

    Attributes:
        config: every width and form.
        state: the tensors, named as in `Transformer(config).state_dict()`.
        tokenizer: the text of a tokenizer.json.
        provenance: JSON-ready notes: source, what was left out, which original units each step kept.
    """

    config: TransformerConfig
    state: dict[str, Tensor]
    tokenizer: str
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_torch(self, *, dropout: float = 0.0) -> Transformer:
        """A new nn.Module in evaluation mode with its own copy of the weights; trainable, then with this dropout."""
        with torch.device("meta"):
            model = Transformer(self.config, dropout=dropout)
        model.load_state_dict({name: value.clone() for name, value in self.state.items()}, strict=True, assign=True)
        return model.eval()

    def text_encoder(self) -> TextEncoder:
        """Text -> ids, cut at the config's max_length."""
        return TextEncoder(self.tokenizer, self.config.text.max_length)

    def check(self, source: str) -> "Checkpoint":
        """Return self where tensors fit the config, are finite and the tokenizer fits the table; else InputError."""
        with torch.device("meta"):
            expected = Transformer(self.config).state_dict()
        check_shapes(self.state, expected, source)
        check_finite(self.state, source)
        try:
            rows, largest = self.config.embedding.vocab_size, self.text_encoder().vocab_size
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
        if largest > rows:
            raise InputError(
                f"{source}: the tokenizer has {largest} entries, the embedding table {rows} rows; "
                "they are not of one model"
            )
        return self

    def fingerprint(self) -> str:
        """SHA-256 over config, tokenizer and tensors."""
        digest = hashlib.sha256(f"{self.config.to_json()}{self.tokenizer}".encode())
        for name in sorted(self.state):
            digest.update(name.encode() + to_numpy(self.state[name]).tobytes())
        return digest.hexdigest()

    def with_provenance(self, **notes: Any) -> "Checkpoint":
        """The same model with more notes."""
        return replace(self, provenance={**self.provenance, **notes})

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write a checkpoint directory whole, or nothing.

        Raises:
            InputError: `path` exists and `force` is false, or the disk is full.
        """
        path = Path(path)
        with atomic_directory(path, force=force) as partial:
            self.write(partial)
        return path

    def write(self, directory: Path) -> None:
        """Write the four files into an existing directory."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state.items()}
        write_file(directory / CONFIG, self.config.to_json())
        write_file(directory / SAFETENSORS, save(tensors))
        write_file(directory / TOKENIZER, self.tokenizer)
        write_file(directory / PROVENANCE, json.dumps(self.provenance, indent=2) + "\n")


def read_text(path: Path) -> str:
    """A UTF-8 file's text, or an InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_json(path: Path) -> Any:
    """A file's JSON value, or an InputError."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON ({error})") from error


def load_own(directory: Path) -> Checkpoint:
    """Read a directory that `Checkpoint.save` wrote.

    Raises:
        InputError: a file is missing, broken, or does not fit the others.
    """
    config = TransformerConfig.from_json(read_text(directory / CONFIG), str(directory / CONFIG))
    notes = read_json(directory / PROVENANCE) if (directory / PROVENANCE).is_file() else {}
    if not isinstance(notes, dict):
        raise InputError(f"{directory / PROVENANCE}: not an object")
    tokenizer = read_text(directory / TOKENIZER)
    return Checkpoint(config, read_weights(directory), tokenizer, notes).check(str(directory))
