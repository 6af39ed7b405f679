"""Cheaper forms of vectors against numbers worked out by hand and naive loops."""

from pathlib import Path

import numpy as np
import pytest

from slimformer.transformer.errors import InputError
from slimformer.transformer.vectors import (
    WHOLE,
    Floats,
    VectorForm,
    cut,
    find_ranges,
    given_back,
    keep,
    read_vectors,
)

INT8, BITS = VectorForm(precision="int8"), VectorForm(precision="binary")


def floats(*rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


RANDOM: Floats = np.random.default_rng(0).normal(size=(30, 13)).astype(np.float32)


def test_cut_vectors_have_length_one_again() -> None:
    found = cut(floats([3, 4, 12], [0, 0, 5]), 2)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0]], atol=1e-7)
    np.testing.assert_allclose(cut(floats([3, 4, 12])), [[3 / 13, 4 / 13, 12 / 13]], atol=1e-7)
    assert (found.dtype, keep(RANDOM, VectorForm(5)).dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(keep(RANDOM, VectorForm(5)), cut(RANDOM, 5))


def test_whole_float_vectors_are_left_as_they_are() -> None:
    assert keep(RANDOM, WHOLE) is RANDOM
    assert given_back(RANDOM, WHOLE, 13).tolist() == RANDOM.tolist()


def test_int8_by_hand() -> None:
    """Pages of length one: ranges 0.8 and 0.96; a query beyond is clipped, one of zeros stays zero."""
    ranges = find_ranges(floats([0.6, -0.8], [-0.8, 0.6], [2.8, 9.6]))
    np.testing.assert_allclose(ranges, [0.8, 0.96], atol=1e-7)
    codes = keep(floats([0.6, -0.8], [-9, 0], [0, 0], [0.28, 0.96]), INT8, ranges)
    assert codes.dtype == np.int8
    assert codes.tolist() == [[95, -106], [-127, 0], [0, 0], [44, 127]]  # 95.25, -105.83; 44.45
    assert given_back(codes, INT8, 2).tolist() == codes.tolist()
    back = given_back(codes, INT8, 2, ranges)
    np.testing.assert_allclose(back[0], [95 * 0.8 / 127, -106 * 0.96 / 127], rtol=1e-6)


def test_int8_gives_vectors_back_within_half_a_step() -> None:
    ranges = find_ranges(RANDOM, 8)
    form = VectorForm(8, "int8")
    back = given_back(keep(RANDOM, form, ranges), form, 13, ranges)
    assert np.all(np.abs(back - cut(RANDOM, 8)) <= 0.5001 * ranges / 127)


def test_a_column_of_float_noise_stays_zero() -> None:
    pages = floats([0.6, 0.8, 1e-30], [0.8, 0.6, -1e-30])
    codes = keep(floats([0.6, 0.6, 0.5]), INT8, find_ranges(pages))
    assert codes[0, 2] == 0
    assert codes[0, 0] > 0


def test_ranges_are_of_cut_vectors() -> None:
    ranges = find_ranges(RANDOM, 5)
    expected = [max(abs(row[i]) / np.sqrt(sum(x * x for x in row[:5])) for row in RANDOM) for i in range(5)]
    np.testing.assert_allclose(ranges, expected, rtol=1e-6)
    np.testing.assert_allclose(find_ranges(cut(RANDOM, 5), 5), ranges, rtol=1e-6)


def test_bits_by_hand() -> None:
    """0 is no bit; ten columns take two bytes, the last six bits of which are 0."""
    vectors = floats([1, -1, 0, 2, -3, 4, -5, 6, 7, -8])
    packed = keep(vectors, BITS)
    assert (packed.dtype, packed.tolist()) == (np.uint8, [[0b10010101, 0b10000000]])
    assert given_back(packed, BITS, 10).tolist() == [[1, -1, -1, 1, -1, 1, -1, 1, 1, -1]]
    assert keep(vectors, VectorForm(4, "binary")).tolist() == [[0b10010000]]
    assert given_back(keep(vectors, VectorForm(4, "binary")), VectorForm(4, "binary"), 10).shape == (1, 4)


@pytest.mark.parametrize(
    ("form", "size"),
    [(WHOLE, 40), (VectorForm(9), 36), (INT8, 10), (VectorForm(9, "int8"), 9), (BITS, 2), (VectorForm(8, "binary"), 1)],
)
def test_bytes_of_a_vector_are_those_of_its_array(form: VectorForm, size: int) -> None:
    vectors = RANDOM[:, :10]
    assert form.size(10) == size
    assert keep(vectors, form, find_ranges(vectors, form.dimensions))[0].nbytes == size


def test_forms_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        InputError, match="dimensions is -1, below 0; precision is 'int4', not one of float32, int8, bin"
    ):
        VectorForm(-1, "int4")
    with pytest.raises(InputError, match="dimensions is 14, and the vectors have 13 columns: give fewer"):
        keep(RANDOM, VectorForm(14))
    assert keep(RANDOM, VectorForm(13)).shape == (30, 13)
    with pytest.raises(InputError, match="int8 needs the range of each column"):
        keep(RANDOM, INT8)
    with pytest.raises(InputError, match=r"ranges are of shape \(13,\), not \(5,\): find them with as many columns"):
        keep(RANDOM, VectorForm(5, "int8"), find_ranges(RANDOM))
    for pages in (RANDOM[0], RANDOM[:0], np.full((2, 3), np.nan, np.float32)):
        with pytest.raises(InputError, match="int8 takes its ranges from"):
            find_ranges(pages)


def test_files_of_vectors(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", RANDOM)
    np.testing.assert_array_equal(read_vectors(tmp_path / "v.npy"), RANDOM)
    np.save(tmp_path / "v.npy", RANDOM.astype(np.int8))
    np.savez(tmp_path / "v.npz", vectors=RANDOM)
    for name in ("v.npy", "v.npz"):
        with pytest.raises(InputError, match="its numbers are not float32; write them with predict"):
            read_vectors(tmp_path / name)
    (tmp_path / "v.npy").write_text("words")
    for name in ("v.npy", "nowhere.npy"):
        with pytest.raises(InputError, match=r"no \.npy of vectors"):
            read_vectors(tmp_path / name)
