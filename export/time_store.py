"""Measurements of `form_times` and `sublayer_times` in JSON files: the user's cache of this machine, and that of a run.

A measurement holds for one machine, number of threads, onnxruntime, slimformer, provider, shape of model and workload;
all that is in its key. A file that cannot be read or written costs a line and a new measurement, never the work.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__
from ..transformer.config import ClassificationHead, TransformerConfig
from ..transformer.errors import InputError
from ..transformer.files import write_file
from .machine import describe_machine

FORMAT = 2
FORMS_FILE = "forms.json"
SUBLAYERS_FILE = "sublayers.json"
WHOLE = "whole"  # whether all was timed
Read = TypeVar("Read")


def machine_store(name: str) -> Path:
    """A file in the user's cache of this machine, below $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "slimformer" / name


class TimeStore:
    """The entries of one measurement in several files."""

    def __init__(
        self,
        files: Sequence[Path],
        threads: int,
        provider: str,
        config: TransformerConfig,
        workloads: Sequence[str],
        **more: Any,
    ) -> None:
        """What the measurement depends on, JSON-ready; `workloads` in words that tell their shapes."""
        machine = describe_machine()
        self.files = files
        self.about = {
            "cpu": machine["cpu"],
            "flags": machine["flags"],
            "threads": threads,
            "onnxruntime": machine["versions"]["onnxruntime"] or machine["versions"]["onnxruntime-gpu"],
            "slimformer": __version__,
            "provider": provider,
            "shape": _digest(_shape(config)),
            "workloads": list(workloads),
            **more,
        }
        self.key = _digest(self.about)

    def read(self, parse: Callable[[Mapping[str, Any]], Read]) -> tuple[Read | None, list[str]]:
        """The first file's entry, given to the others, or None; and why files were not used."""
        notes: list[str] = []
        for file in self.files:
            try:
                entry = _entries(file).get(self.key)
                if entry is not None:
                    parsed = parse(entry["found"])
                    return parsed, notes + self.write(entry["found"])
            except (InputError, KeyError, TypeError, AttributeError, ValueError) as error:
                notes.append(f"the cache {file.parent.name}/{file.name} was not used: {_reason(error)}")
        return None, notes

    def write(self, found: Mapping[str, Any]) -> list[str]:
        """Put an entry into all files, what is not `WHOLE` into all but the last; why that failed."""
        notes = []
        for file in self.files if found.get(WHOLE) else self.files[:-1]:
            try:
                entries = _entries(file)
            except (InputError, ValueError):
                entries = {}
            entry = {"about": self.about, "found": found}
            if entries.get(self.key) == entry:
                continue
            entries[self.key] = entry
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_file(file, json.dumps({"format": FORMAT, "entries": entries}, indent=2) + "\n")
            except (InputError, OSError) as error:
                notes.append(f"the cache {file.parent.name}/{file.name} was not written: {_reason(error)}")
        return notes


def _entries(file: Path) -> dict[str, Any]:
    """All entries; none where there is no file. InputError or ValueError where it is not a store."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(error.strerror or "it cannot be read") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("entries"), dict):
        raise InputError("it is not of this slimformer")
    entries: dict[str, Any] = content["entries"]
    return entries


def _reason(error: Exception) -> str:
    return "it is damaged" if not isinstance(error, InputError | OSError) else str(error)


def _shape(config: TransformerConfig) -> dict[str, Any]:
    """The config without what changes no time: the names of labels and prompts, and the cut of texts."""
    data = {name: value for name, value in config.to_dict().items() if name != "text"}
    if isinstance(config.head, ClassificationHead):
        data["head"] = {**data["head"], "labels": len(config.head.labels)}
    return data


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
