"""A stage on disk: `model/`, `bundle/`, `vectors.npz`, and last of all `stage.json`, which says that it is whole."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..export.accounting import account_bundle
from ..export.bundle import export, format_of, served_layout
from ..export.contents import graph_file, stored_bytes
from ..export.decoding_parity import DecodingParity, check_decoding
from ..export.form_times import Chosen
from ..export.forms import Forms, only_packed
from ..export.validation import Parity, check_parity
from ..transformer.checkpoint import Checkpoint, read_json
from ..transformer.config import LanguageHead
from ..transformer.evaluation import Memory
from ..transformer.files import atomic_directory, write_file
from ..transformer.loading import load

STAGE_FILE, MODEL, BUNDLE, VECTORS = "stage.json", "model", "bundle", "vectors.npz"


@dataclass(frozen=True)
class Stage:
    """A stage's folder, its model, its line in the report and the vectors that evaluations share."""

    folder: Path
    checkpoint: Checkpoint
    entry: dict[str, Any]
    memory: Memory

    @property
    def bundle(self) -> Path:
        """The exported bundle."""
        return self.folder / BUNDLE

    @property
    def graph(self) -> Path:
        """The ONNX file."""
        return self.bundle / graph_file(self.checkpoint.config)

    def finish(self) -> None:
        """Write what a resumed run takes up; from here on the stage counts as done."""
        vectors = io.BytesIO()
        np.savez(vectors, **self.memory.vectors)  # type: ignore[arg-type]
        write_file(self.folder / VECTORS, vectors.getvalue())
        write_file(self.folder / STAGE_FILE, json.dumps(self.entry, indent=2) + "\n")


def read_stage(folder: Path) -> Stage | None:
    """A stage that is done, or None."""
    if not (folder / STAGE_FILE).is_file():
        return None
    with np.load(folder / VECTORS) as vectors:
        memory = Memory({name: vectors[name] for name in vectors.files})
    return Stage(folder, load(folder / MODEL), read_json(folder / STAGE_FILE), memory)


def make_stage(
    folder: Path,
    checkpoint: Checkpoint,
    entry: dict[str, Any],
    *,
    baseline: bool,
    chosen: Chosen | None,
    provider: str,
    threads: int,
    texts: tuple[str, ...],
    original: Checkpoint | None,
    seed: int,
) -> Stage:
    """Save and export a stage's model and check the graph against PyTorch.

    The baseline is padded, as others export it, if there is such a graph of it. `chosen` are the forms of an encoder's
    graph; where PyTorch and such a graph are too far apart, the default is taken in their place.
    """
    with atomic_directory(folder / MODEL, force=True) as partial:
        checkpoint.write(partial)
    writes = isinstance(checkpoint.config.head, LanguageHead)
    config = checkpoint.config
    layout = "padded" if baseline and not only_packed(config) else served_layout(config, provider)
    forms = None if chosen is None else chosen.forms
    export(
        checkpoint,
        folder / BUNDLE,
        layout=layout if forms is None else None,
        forms=forms,
        provider=provider,
        force=True,
    )
    parity: Parity | DecodingParity
    if writes:
        parity = check_decoding(checkpoint, folder / BUNDLE, texts, provider=provider, threads=threads)
    else:
        ways: dict[str, Any] = {"texts": texts, "original": original, "provider": provider, "threads": threads}
        parity = check_parity(checkpoint, folder / BUNDLE, seed=seed, **ways)
        if chosen is not None and chosen.forms != Forms() and not parity.passed:
            chosen = chosen.without_parity()
            export(checkpoint, folder / BUNDLE, forms=chosen.forms, provider=provider, force=True)
            parity = check_parity(checkpoint, folder / BUNDLE, seed=seed, **ways)
    facts = {
        "bytes": stored_bytes(folder / BUNDLE),
        "parameters": sum(value.numel() for value in checkpoint.state.values()),
        "multiply_adds": checkpoint.config.multiply_adds(),
        "layers": len(checkpoint.config.layers),
        "format": format_of(checkpoint.config),
        "layout": layout if chosen is None else chosen.forms.layout,
        **({} if chosen is None else {"forms": chosen.to_dict()}),
        "parity": parity.to_dict(),
        "accounting": account_bundle(folder / BUNDLE, checkpoint.config),
    }
    return Stage(folder, checkpoint, {**entry, **facts}, Memory())
