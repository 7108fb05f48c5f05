"""Rows in fewer bits, byte by byte: their layout, and what a format refuses. What encoding loses is tested as properties."""

import struct

import numpy as np
import pytest

from hps.errors import InvalidInputError
from hps.ground.rows import decode, encode, encode_rows
from hps.types import ROW_DTYPES


def test_int8_is_codes_zeros_a_scale_and_an_offset():
    """All codes of a row from 0 to 255, whose step is 1/2 and whose smallest element is -3."""
    codes = np.array([7, 255, 0, 254, 128], np.uint8)
    [row] = encode("testing", (codes * np.float32(0.5) - 3)[None], "int8")
    assert row.tobytes() == codes.tobytes() + bytes(3) + struct.pack("<ee", 0.5, -3.0)
    assert decode(row[None], 5, "int8").tolist() == [(codes * 0.5 - 3).tolist()]


@pytest.mark.parametrize("elements", [[-0.0], [-0.0, -0.0, -0.0], [-0.0, 255.0], [255.0, -0.0, 0.0], [-1e-9, 1.0]])
def test_int8_has_one_zero(elements: list[float]):
    """A decoded element is a sum with a product, which is +0: an offset of -0 would become 0 when the row is encoded again."""
    [row] = encode("testing", np.array([elements], np.float32), "int8")
    assert row.view(np.uint16)[-1] == 0
    vectors = decode(row[None], len(elements), "int8")
    assert not np.signbit(vectors).any()
    assert encode("testing", vectors, "int8").tobytes() == row.tobytes()


@pytest.mark.parametrize(
    ("row_dtype", "refused", "held"),
    [
        ("int8", [np.inf, -np.inf, np.nan, 1.7e7, -65_520.0, 3e38], [65_504.0, -65_504.0]),
        ("float16", [65_520.0, -65_520.0, 3e38], [65_519.0, np.inf, -np.inf, np.nan]),
        ("bfloat16", [3.4e38, -3.4e38], [3.38e38, np.inf, np.nan]),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_its_key(row_dtype: str, refused: list[float], held: list[float]):
    keys, vectors = np.array([11, 22, 33]), np.ones((3, 3), np.float32)
    for value in held:
        vectors[1, 2] = value
        assert len(encode("testing", vectors, row_dtype, keys)) == 3
    for value in refused:
        vectors[1, 2] = value
        with pytest.raises(InvalidInputError, match=rf"testing: got \S+ as element 2 of key 22, which row_dtype {row_dtype} "):
            encode("testing", vectors, row_dtype, keys)
        with pytest.raises(InvalidInputError, match="element 2 of row 1,"):
            encode("testing", vectors, row_dtype)
        rows = np.zeros((3, 2), np.float32)
        assert encode_rows(vectors, rows, ROW_DTYPES.index(row_dtype)) == 1


def test_an_int8_row_of_a_tiny_range_is_refused_by_its_key():
    """Its elements would all be 0, or one number."""
    keys, vectors = np.array([11, 22, 33]), np.ones((3, 3), np.float32)
    for size in (0.0, 1e-2, 1.0):
        vectors[1] = np.array([-size, 0, size])
        encode("testing", vectors, "int8", keys)
    for size in (1e-9, 1e-6):
        vectors[1] = np.array([-size, size / 3, size])
        with pytest.raises(InvalidInputError, match=r"the elements of key 22, up to \S+, are too small for row_dtype int8"):
            encode("testing", vectors, "int8", keys)


@pytest.mark.parametrize(("row_dtype", "size"), [("float16", 1e-9), ("bfloat16", 1e-45)])
def test_16_bits_round_what_is_too_small_to_zero(row_dtype: str, size: float):
    assert decode(encode("testing", np.full((1, 2), size, np.float32), row_dtype), 2, row_dtype).tolist() == [[0.0, 0.0]]
