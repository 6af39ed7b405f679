"""The teacher's outputs, computed once and read from disk through a memory map.

The folder's name is a digest of the teacher's config and weights, the token ids and what was asked for: a changed
teacher or text is never mixed in. A folder is written under another name and renamed when whole.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..transformer.batching import sorted_batches, tensors
from ..transformer.checkpoint import Checkpoint
from ..transformer.errors import InputError
from ..transformer.files import atomic_directory
from ..transformer.progress import Progress
from ..transformer.weights import to_numpy
from .inside import Inside

PASS_TOKENS = 4096
SAMPLED = 4096
RESULTS = "results.npy"


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
        folder: where to keep them; None: in memory.
        device: of the teacher.
        progress: told of the texts done.

    Raises:
        InputError: there are no texts, or the teacher has no head.
    """
    if not ids:
        raise InputError("distill: there is no text to train on")
    starts = np.concatenate([[0], np.cumsum([len(one) for one in ids])])[:-1].astype(np.int64)

    def compute(place: Path | None) -> list[Any]:
        return _compute(teacher, ids, starts, tokens, place, device, progress)

    names = [RESULTS, *map(_file, tokens)]
    place = None if folder is None else folder / f"teacher-{digest(teacher, ids, tokens)}"
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


def digest(teacher: Checkpoint, ids: Sequence[list[int]], tokens: Sequence[str] = ()) -> str:
    """16 hex digits of the teacher, the ids and the wish."""
    state = hashlib.sha256(teacher.config.to_json().encode())
    for name in sorted(teacher.state):
        state.update(name.encode())
        state.update(to_numpy(teacher.state[name]).tobytes())
    for one in ids:
        state.update(np.asarray([len(one), *one], np.int64).tobytes())
    state.update(repr(list(tokens)).encode())
    return state.hexdigest()[:16]


def _mapped(place: Path, names: Sequence[str]) -> list[Any] | None:
    """The files as memory maps; None where one is not there whole."""
    try:
        return [np.load(place / name, mmap_mode="r") for name in names]
    except (OSError, ValueError, EOFError):
        return None


def _compute(
    teacher: Checkpoint,
    ids: Sequence[list[int]],
    starts: NDArray[np.int64],
    tokens: Sequence[str],
    place: Path | None,
    device: str,
    progress: Progress,
) -> list[Any]:
    """Results, and what is wanted of the tokens."""
    model = teacher.to_torch().to(device)
    lengths = [len(one) for one in ids]
    arrays: dict[str, Any] = {}
    inside = Inside(model, tokens)

    def array(name: str, rows: int, like: torch.Tensor, dtype: type[np.generic]) -> Any:
        if name not in arrays:
            arrays[name] = array_at(place, name, (rows, like.shape[1]), dtype)
        return arrays[name]

    progress.start("teacher", len(ids), "texts")
    for batch in sorted_batches(lengths, tokens=PASS_TOKENS):
        rows = tensors([ids[i] for i in batch], teacher.config.text.pad_id, device)
        with torch.inference_mode():
            output = model(*rows, with_states=inside.with_states)
        if output.result is None:
            raise InputError("the teacher has no head: it gives neither embeddings nor logits to learn from")
        array(RESULTS, len(ids), output.result, np.float32)[batch] = output.result.cpu().numpy()
        for name in tokens:
            found = inside.of(name, output).cpu()
            kept = array(_file(name), sum(lengths), found, np.float16)
            for i, part in zip(batch, torch.split(found, [lengths[i] for i in batch]), strict=True):
                kept[starts[i] : starts[i] + lengths[i]] = part.numpy().astype(np.float16)
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
