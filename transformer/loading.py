"""From a path or a hub id to a Checkpoint."""

from pathlib import Path

from .checkpoint import NEW, Checkpoint, load_own, read_json
from .errors import InputError
from .families.bert import load_bert
from .families.sentence_transformers import load_sentence_transformer

HUB_FILES = ("*.json", "*.safetensors", "pytorch_model.bin", "vocab.txt", "*/config.json", "*/*.safetensors")


def load(model: str | Path) -> Checkpoint:
    """Read a slimformer checkpoint, a sentence-transformers or BERT directory, or a hub id.

    A model that was trained from nothing is named after its directory in `provenance`.

    Raises:
        InputError: nothing is there, or it is broken or not supported; the message says which file and why.
    """
    directory = Path(model)
    if directory.is_file():
        raise InputError(f"{directory} is a file; give the model's directory")
    if not directory.is_dir():
        directory = _from_hub(str(model))
    if (directory / "modules.json").is_file():
        return load_sentence_transformer(directory)
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory}: no config.json in it, so it is not a model directory")
    data = read_json(directory / "config.json")
    if not isinstance(data, dict):
        raise InputError(f"{directory}/config.json: not an object")
    if "model_type" not in data:
        checkpoint = load_own(directory)
        made_here = checkpoint.provenance.get("source") == NEW
        return checkpoint.with_provenance(source=directory.resolve().name) if made_here else checkpoint
    return load_bert(directory)


def _from_hub(name: str) -> Path:
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise InputError(f"{name}: no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name}: no such directory, and not to be had from the hub ({reason})") from error
