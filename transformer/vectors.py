"""Vectors that cost less to keep: their first columns alone, in int8, or as bits.

For a vector x, m of whose columns are kept:

- cut: y = x[:m] / |x[:m]|, for vectors that are nested (Kusupati et al. 2022, section 3);
- int8: c = round(127 y / r), at most 127 in size, r being the greatest size of each column in the pages' vectors alone.
  A column that is 0 there but for float noise stays 0;
- binary: the bits y > 0, eight to a byte as `np.packbits` packs them.

Databases rank int8 by the cosine of c and bits by Hamming distance. A query that stays float is compared with y as c or
the bits give it back: r c / 127, or -1 and 1. Equal scores rank in the order of the pages.

int8 has one range a column, and none is shifted: a shift, as ranges from least to greatest have it, spoils the cosines
of c.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .layer_config import FLOAT32, one_of

Floats = NDArray[np.float32]
Kept = NDArray[Any]  # float32, int8, or uint8 of packed bits
INT8, BINARY = "int8", "binary"
PRECISIONS = (FLOAT32, INT8, BINARY)
_NOISE = 1e-6  # of a vector of length 1: float32 tells no less


@dataclass(frozen=True)
class VectorForm:
    """How vectors are kept.

    Attributes:
        dimensions: how many first columns; 0: all.
        precision: "float32", "int8" or "binary".
    """

    dimensions: int = 0
    precision: str = FLOAT32

    def __post_init__(self) -> None:
        problems = [] if self.dimensions >= 0 else [f"dimensions is {self.dimensions}, below 0"]
        problems += one_of("precision", self.precision, PRECISIONS)
        if problems:
            raise InputError("; ".join(problems))

    def columns(self, width: int) -> int:
        """How many of `width` columns are kept, or an InputError where there are fewer than wanted."""
        if self.dimensions > width:
            raise InputError(f"dimensions is {self.dimensions}, and the vectors have {width} columns: give fewer")
        return self.dimensions or width

    def check(self, width: int, ranges: Floats | None) -> None:
        """Raise InputError unless vectors of `width` columns can be kept so, with the ranges that int8 needs."""
        columns = self.columns(width)
        if self.precision != INT8:
            return
        if ranges is None:
            raise InputError(
                "int8 needs the range of each column in the pages' vectors: embed pages in float32 and give these "
                "(find_ranges, or --calibration of predict)"
            )
        if ranges.shape != (columns,):
            raise InputError(
                f"the ranges are of shape {ranges.shape}, not ({columns},): find them with as many columns"
            )

    def size(self, width: int) -> int:
        """Bytes of one vector."""
        columns = self.columns(width)
        return {FLOAT32: 4 * columns, INT8: columns, BINARY: -(-columns // 8)}[self.precision]


WHOLE = VectorForm()


def cut(vectors: Floats, dimensions: int = 0) -> Floats:
    """Vectors (n, E) -> their first columns (n, m), 0: all, scaled to length 1; those of zeros stay zero."""
    first = vectors[:, : VectorForm(dimensions).columns(vectors.shape[1])]
    norms = np.linalg.norm(first, axis=1, keepdims=True)
    return (first / np.where(norms > 0, norms, 1)).astype(np.float32)


def find_ranges(pages: Floats, dimensions: int = 0) -> Floats:
    """Float vectors of the pages (P, E) -> the greatest size (m,) of each column after `cut`."""
    if pages.ndim != 2 or not len(pages) or not np.isfinite(pages).all():
        raise InputError(f"int8 takes its ranges from pages' finite vectors (n, columns), not from these {pages.shape}")
    greatest: Floats = np.abs(cut(pages, dimensions)).max(axis=0)
    return greatest


def keep(vectors: Floats, form: VectorForm, ranges: Floats | None = None) -> Kept:
    """Vectors (n, E) -> these in another form; whole ones in float32 are left as they are.

    Args:
        vectors: float vectors.
        form: the form.
        ranges: of int8: what `find_ranges` gives for the pages, whether these are pages or queries.

    Raises:
        InputError: there are fewer columns than wanted, or no ranges of as many.
    """
    if form == WHOLE:
        return vectors
    form.check(vectors.shape[1], ranges)
    first = cut(vectors, form.dimensions)
    if form.precision == BINARY:
        return np.packbits(first > 0, axis=1)
    if ranges is None or form.precision == FLOAT32:
        return first
    told = ranges > _NOISE
    codes = np.clip(np.rint(127 * first / np.where(told, ranges, 1)), -127, 127) * told
    return codes.astype(np.int8)


def given_back(kept: Kept, form: VectorForm, width: int, ranges: Floats | None = None) -> Floats:
    """What `keep` made of vectors of `width` columns -> numbers (n, m): of bits -1 and 1, of int8 c, or r c / 127.

    Args:
        kept: what `keep` gave.
        form: its form.
        width: columns that the vectors had.
        ranges: of int8, for what a float query is compared with; None: c.
    """
    if form.precision == BINARY:
        bits = np.unpackbits(kept, axis=1, count=form.columns(width))
        return 2 * bits.astype(np.float32) - 1
    numbers: Floats = kept.astype(np.float32)
    return numbers if ranges is None else numbers * ranges / np.float32(127)


def read_vectors(path: Path) -> Floats:
    """The float vectors of a .npy file, as `slimformer predict -o` writes them."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: no .npy of vectors ({error})") from error
    if not isinstance(found, np.ndarray) or found.dtype != np.float32:
        raise InputError(f"{path}: its numbers are not float32; write them with predict --precision float32")
    return found
