"""The teacher's outputs, computed once and read from disk through a memory map.

The folder's name is a digest of the teacher's config and weights, the token ids and what was asked for: a changed
teacher or text is never mixed in. A folder is written under another name and renamed when whole.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from .relations import Watched

PASS_TOKENS = 4096
SAMPLED = 4096
RESULTS, HIDDEN, RELATIONS = "results.npy", "hidden.npy", "relations.npy"


@dataclass(frozen=True, eq=False)
class Targets:
    """The teacher's answers to the training texts.

    Attributes:
        results: (n, E) embeddings or logits, float32.
        hidden: (sum of lengths, D) last states of all tokens, float16, text after text; None if not asked for.
        starts: (n,) first token of each text in `hidden` and `relations`.
        relations: (sum of lengths, (H + 2 * G) * K) queries, keys and values of one layer, float16; None likewise.
    """

    results: NDArray[np.float32]
    hidden: NDArray[np.float16] | None
    starts: NDArray[np.int64]
    reused: bool
    relations: NDArray[np.float16] | None = None

    def results_of(self, texts: Sequence[int]) -> torch.Tensor:
        """(B, E) of some texts."""
        return torch.from_numpy(self.results[list(texts)])

    def hidden_of(self, texts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """(N, D) of some texts, one after the other, as a packed batch has them."""
        return self._tokens(self.hidden, texts, lengths)

    @cached_property
    def hidden_square(self) -> float:
        """Mean square of the states, from at most `SAMPLED` tokens at even distances."""
        assert self.hidden is not None
        some = self.hidden[:: -(-len(self.hidden) // SAMPLED)].astype(np.float64)
        return max(float(np.square(some).mean()), 1e-12)

    def relations_of(self, texts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """(N, (H + 2 * G) * K) likewise."""
        return self._tokens(self.relations, texts, lengths)

    def _tokens(self, kept: NDArray[np.float16] | None, texts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        assert kept is not None
        spans = [kept[self.starts[i] : self.starts[i] + lengths[i]] for i in texts]
        return torch.from_numpy(np.concatenate(spans).astype(np.float32))


def teach(
    teacher: Checkpoint,
    ids: Sequence[list[int]],
    *,
    hidden: bool,
    folder: Path | None,
    device: str,
    progress: Progress,
    relations: int | None = None,
) -> Targets:
    """The teacher's answers to token ids, from `folder` where they are there already.

    Args:
        teacher: a checkpoint with a head.
        ids: token ids of each text.
        hidden: whether the states of all tokens are wanted too.
        folder: where to keep them; None: in memory.
        device: of the teacher.
        progress: told of the texts done.
        relations: the encoder's layer whose queries, keys and values are wanted too.

    Raises:
        InputError: there are no texts, or the teacher has no head.
    """
    if not ids:
        raise InputError("distill: there is no text to train on")
    starts = np.concatenate([[0], np.cumsum([len(one) for one in ids])])[:-1].astype(np.int64)

    def compute(place: Path | None) -> list[Any]:
        return _compute(teacher, ids, starts, names, place, device, progress, relations)

    names = [RESULTS, *([HIDDEN] if hidden else []), *([] if relations is None else [RELATIONS])]
    place = None if folder is None else folder / f"teacher-{digest(teacher, ids, hidden, relations)}"
    found, reused = kept(place, names, compute)
    by_name = dict(zip(names, found, strict=True))
    return Targets(by_name[RESULTS], by_name.get(HIDDEN), starts, reused, by_name.get(RELATIONS))


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


def digest(teacher: Checkpoint, ids: Sequence[list[int]], hidden: bool, relations: int | None = None) -> str:
    """16 hex digits of the teacher, the ids and the wish."""
    state = hashlib.sha256(teacher.config.to_json().encode())
    for name in sorted(teacher.state):
        state.update(name.encode())
        state.update(to_numpy(teacher.state[name]).tobytes())
    for one in ids:
        state.update(np.asarray([len(one), *one], np.int64).tobytes())
    state.update(bytes([hidden]) if relations is None else bytes([hidden, 1, relations]))
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
    names: Sequence[str],
    place: Path | None,
    device: str,
    progress: Progress,
    relations: int | None,
) -> list[Any]:
    """The arrays of these names."""
    model = teacher.to_torch().to(device)
    lengths = [len(one) for one in ids]
    arrays: dict[str, Any] = {}
    watched = None if relations is None else Watched(model, relations)

    def fill(name: str, batch: Sequence[int], tokens: torch.Tensor) -> None:
        if name not in arrays:
            arrays[name] = array_at(place, name, (sum(lengths), tokens.shape[1]), np.float16)
        for i, part in zip(batch, torch.split(tokens.cpu(), [lengths[i] for i in batch]), strict=True):
            arrays[name][starts[i] : starts[i] + lengths[i]] = part.numpy().astype(np.float16)

    progress.start("teacher", len(ids), "texts")
    for batch in sorted_batches(lengths, tokens=PASS_TOKENS):
        rows = tensors([ids[i] for i in batch], teacher.config.text.pad_id, device)
        with torch.inference_mode():
            output = model(*rows)
        if output.result is None:
            raise InputError("the teacher has no head: it gives neither embeddings nor logits to learn from")
        if RESULTS not in arrays:
            arrays[RESULTS] = array_at(place, RESULTS, (len(ids), output.result.shape[1]), np.float32)
        arrays[RESULTS][batch] = output.result.cpu().numpy()
        if HIDDEN in names:
            fill(HIDDEN, batch, output.hidden)
        if watched is not None:
            fill(RELATIONS, batch, watched.last)
        progress.advance(len(batch))
    progress.done()
    return [arrays[name] for name in names]


def array_at(place: Path | None, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
    """An array of zeros to write to, in a file of the folder or (None) in memory."""
    if place is None:
        return np.zeros(shape, dtype)
    array = np.lib.format.open_memmap(place / name, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # a full disk is an error here; found while writing to the map, it is a SIGBUS
        with (place / name).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array
