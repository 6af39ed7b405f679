"""The teacher's outputs, computed once and read from disk through a memory map.

The folder's name is a digest of the teacher's config and weights, the token ids and what was asked for: a changed
teacher or text is never mixed in. A folder is written under another name and renamed when whole.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..export.bundle import export
from ..export.runtime import load_bundle
from ..transformer.batching import sorted_batches, tensors
from ..transformer.checkpoint import Checkpoint
from ..transformer.config import ClassificationHead
from ..transformer.errors import InputError
from ..transformer.files import atomic_directory
from ..transformer.progress import Progress
from ..transformer.tokenizer import pad
from ..transformer.weights import to_numpy
from .inside import Inside

TORCH, ONNXRUNTIME = RUNTIMES = ("torch", "onnxruntime")
PASS_TOKENS = 4096
SAMPLED = 4096
RESULTS = "results.npy"

Floats = NDArray[np.float32]
Ask = Callable[[Sequence[list[int]]], tuple[Floats, list[Floats]]]  # ids -> (B, E), and (N, D) of each thing wanted


@dataclass(frozen=True, eq=False)
class Targets:
    """The teacher's answers to the training texts.

    Attributes:
        results: (n, E) embeddings or logits, float32.
        tokens: by name (`teach`), what all tokens came to (sum of lengths, D), float16, text after text.
        starts: (n,) first token of each text there.
    """

    results: NDArray[np.float32]
    tokens: Mapping[str, NDArray[np.float16]]
    starts: NDArray[np.int64]
    reused: bool

    def results_of(self, texts: Sequence[int]) -> torch.Tensor:
        """(B, E) of some texts."""
        return torch.from_numpy(self.results[list(texts)])

    def tokens_of(self, name: str, texts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """(N, D) of some texts, one after the other, as a packed batch has them."""
        kept = self.tokens[name]
        spans = [kept[self.starts[i] : self.starts[i] + lengths[i]] for i in texts]
        return torch.from_numpy(np.concatenate(spans).astype(np.float32))

    def square(self, name: str) -> float:
        """Mean square of what tokens came to, of at most `SAMPLED` of them at even distances."""
        kept = self.tokens[name]
        some = kept[:: -(-len(kept) // SAMPLED)].astype(np.float64)
        return max(float(np.square(some).mean()), 1e-12)


def teach(
    teacher: Checkpoint,
    ids: Sequence[list[int]],
    *,
    tokens: Sequence[str] = (),
    runtime: str = TORCH,
    threads: int | None = None,
    folder: Path | None,
    device: str,
    progress: Progress,
) -> Targets:
    """The teacher's answers to token ids, from `folder` where they are there already.

    Args:
        teacher: a checkpoint with a head.
        ids: token ids of each text.
        tokens: what of each token is wanted too: "hidden", the last state; "states.3", the state behind the encoder's
            layer 3; "qkv.3", queries, keys and values of that layer.
        runtime: "torch", or "onnxruntime", which gives no more of the tokens than "hidden".
        threads: of onnxruntime; None: the cores that this process may use.
        folder: where to keep them; None: in memory.
        device: of the teacher in torch.
        progress: told of the texts done.

    Raises:
        InputError: there are no texts, or the teacher has no head.
    """
    if not ids:
        raise InputError("distill: there is no text to train on")
    if teacher.config.head is None:
        raise InputError("the teacher has no head: it gives neither embeddings nor logits to learn from")
    starts = np.concatenate([[0], np.cumsum([len(one) for one in ids])])[:-1].astype(np.int64)

    def compute(place: Path | None) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="slimformer-") as temporary:
            if runtime == TORCH:
                ask = in_torch(teacher, tokens, device)
            else:
                ask = in_onnxruntime(teacher, tokens, threads, Path(temporary))
            return _compute(ask, ids, starts, tokens, place, progress)

    names = [RESULTS, *map(_file, tokens)]
    place = None if folder is None else folder / f"teacher-{digest(teacher, ids, tokens, runtime)}"
    found, reused = kept(place, names, compute)
    return Targets(found[0], dict(zip(tokens, found[1:], strict=True)), starts, reused)


def kept(
    place: Path | None, names: Sequence[str], compute: Callable[[Path | None], Sequence[Any]]
) -> tuple[list[Any], bool]:
    """The arrays of a folder, and whether they were there; a folder that is not whole is computed again.

    Args:
        place: the folder; None: in memory.
        names: the files that `compute` makes there.
        compute: makes the arrays, in a folder with `array_at`.
    """
    if place is None:
        return list(compute(None)), False
    if (known := _mapped(place, names)) is not None:
        return known, True
    with atomic_directory(place, force=True) as partial:
        for array in compute(partial):
            if isinstance(array, np.memmap):
                array.flush()
    made = _mapped(place, names)
    assert made is not None
    return made, False


def digest(teacher: Checkpoint, ids: Sequence[list[int]], tokens: Sequence[str] = (), runtime: str = TORCH) -> str:
    """16 hex digits of the teacher, the ids and the wish."""
    state = hashlib.sha256(teacher.config.to_json().encode())
    for name in sorted(teacher.state):
        state.update(name.encode())
        state.update(to_numpy(teacher.state[name]).tobytes())
    for one in ids:
        state.update(np.asarray([len(one), *one], np.int64).tobytes())
    state.update(repr([*tokens, runtime]).encode())
    return state.hexdigest()[:16]


def _mapped(place: Path, names: Sequence[str]) -> list[Any] | None:
    """The files as memory maps; None where one is not there whole."""
    try:
        return [np.load(place / name, mmap_mode="r") for name in names]
    except (OSError, ValueError, EOFError):
        return None


def in_torch(teacher: Checkpoint, tokens: Sequence[str], device: str) -> Ask:
    """Asks the model in evaluation mode."""
    model = teacher.to_torch().to(device)
    inside = Inside(model, tokens)

    def ask(ids: Sequence[list[int]]) -> tuple[Floats, list[Floats]]:
        with torch.inference_mode():
            rows = tensors(ids, teacher.config.text.pad_id, device)
            output = model(*rows, with_states=inside.with_states)
        assert output.result is not None
        return output.result.cpu().numpy(), [inside.of(name, output).cpu().numpy() for name in tokens]

    return ask


def in_onnxruntime(teacher: Checkpoint, tokens: Sequence[str], threads: int | None, folder: Path) -> Ask:
    """Asks the exported model, a bundle in `folder`."""
    bundle = load_bundle(export(teacher, folder / "teacher"), threads=threads)
    result = "logits" if isinstance(teacher.config.head, ClassificationHead) else "sentence_embedding"

    def ask(ids: Sequence[list[int]]) -> tuple[Floats, list[Floats]]:
        rows, mask = pad(ids, teacher.config.text.pad_id)
        found = bundle.run(rows, mask)
        return found[result], [found["last_hidden_state"][mask != 0] for _ in tokens]

    return ask


def _compute(
    ask: Ask,
    ids: Sequence[list[int]],
    starts: NDArray[np.int64],
    tokens: Sequence[str],
    place: Path | None,
    progress: Progress,
) -> list[Any]:
    """Results, and what is wanted of the tokens."""
    lengths = [len(one) for one in ids]
    arrays: dict[str, Any] = {}

    def array(name: str, rows: int, like: Floats, dtype: type[np.generic]) -> Any:
        if name not in arrays:
            arrays[name] = array_at(place, name, (rows, like.shape[1]), dtype)
        return arrays[name]

    progress.start("teacher", len(ids), "texts")
    for batch in sorted_batches(lengths, tokens=PASS_TOKENS):
        results, inner = ask([ids[i] for i in batch])
        array(RESULTS, len(ids), results, np.float32)[batch] = results
        for name, found in zip(tokens, inner, strict=True):
            kept = array(_file(name), sum(lengths), found, np.float16)
            for i, part in zip(batch, np.split(found, np.cumsum([lengths[i] for i in batch])[:-1]), strict=True):
                kept[starts[i] : starts[i] + lengths[i]] = part.astype(np.float16)
        progress.advance(len(batch))
    progress.done()
    return [arrays[name] for name in (RESULTS, *map(_file, tokens))]


def _file(tokens: str) -> str:
    return f"{tokens}.npy"


def array_at(place: Path | None, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
    """An array of zeros to write to, in a file of the folder or (None) in memory."""
    if place is None:
        return np.zeros(shape, dtype)
    array = np.lib.format.open_memmap(place / name, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # a full disk is an error here; found while writing to the map, it is a SIGBUS
        with (place / name).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array
