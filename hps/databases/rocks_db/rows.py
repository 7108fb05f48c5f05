"""Rows as RocksDB holds them and as arrays: no RocksDB in here, only their bytes and their order.

A row is HugeCTR's: the key is the 8 raw little-endian bytes of an int64, the value the raw little-endian float32 vector.
RocksDB compares keys byte by byte, so its order is that of the key's bytes read as one big-endian number.

The engine takes and gives lists of `bytes`. They are made and joined by C code (`tolist`, `join`, `map`), never in a Python
loop; but C code that runs over a list does not let go of the interpreter lock either, so callers work in pieces of
`piece_rows`, between which other threads get their turn.
"""

from collections.abc import Sequence
from itertools import compress, repeat
from operator import is_not

import numpy as np
import numpy.typing as npt

from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

KEY_BYTES = 8
_PIECE_ROWS = 4096  # about a millisecond of engine calls
_PIECE_BYTES = 1 << 20


class WrongSizeError(Exception):
    """A row does not have the size of the table's rows. `row` is its index within the call."""

    def __init__(self, row: int, got: str, wanted: str) -> None:
        super().__init__(row, got, wanted)
        self.row = row
        self.got = got
        self.wanted = wanted


def piece_rows(dim: int) -> int:
    """Rows to convert, write or scan without letting other threads run in between."""
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES // (KEY_BYTES + 4 * dim)))


def engine_order(keys: KeyArray) -> IndexArray:
    """Indices, (n,), that put `keys` into RocksDB's order; equal keys in any order."""
    order: IndexArray = np.argsort(_ranks(keys))
    return order


def last_of_each(keys: KeyArray) -> IndexArray:
    """Indices, (m,), of the last row of each distinct key, in RocksDB's order."""
    ranks = _ranks(keys)
    order: IndexArray = np.argsort(ranks)  # several times faster than a stable sort, which only duplicates need
    ranked = ranks[order]
    repeats = ranked[1:] == ranked[:-1]
    if repeats.any():
        order = np.argsort(ranks, kind="stable")[np.append(~repeats, True)]
    return order


def _ranks(keys: KeyArray) -> npt.NDArray[np.uint64]:
    ranks: npt.NDArray[np.uint64] = keys.astype("<i8", copy=False).view(">u8").astype(np.uint64)
    return ranks


def key_list(keys: KeyArray) -> list[bytes]:
    """The keys as the engine takes them."""
    encoded: list[bytes] = keys.astype("<i8", copy=False).view("V8").tolist()
    return encoded


def vector_list(
    vectors: FloatArray,  # (n, dim)
) -> list[bytes]:
    """The vectors as the engine takes them."""
    little = vectors.astype("<f4", copy=False)
    encoded: list[bytes] = little.view(f"V{little.shape[1] * 4}").ravel().tolist()
    return encoded


def present(keys: Sequence[bytes], values: Sequence[bytes | None]) -> list[bytes]:
    """Those keys whose value is there."""
    return list(compress(keys, map(is_not, values, repeat(None))))


def vectors_of(values: Sequence[bytes | None], dim: int) -> tuple[FloatArray, BoolArray | None]:
    """Join what a multi-get returned.

    Args:
        values: one value a key, None where the key is absent.
        dim: floats of a vector.

    Returns:
        The vectors of the keys that are there, (m, dim), read only; and which those are, (n,), or None for all of them.

    Raises:
        WrongSizeError: a value is no vector of this width.
    """
    there = None
    present: Sequence[bytes | None] = values
    try:
        sizes = set(map(len, values))  # type: ignore[arg-type]
    except TypeError:  # None has no length: a key is absent
        there = np.fromiter(map(is_not, values, repeat(None)), np.bool_, len(values))
        present = list(compress(values, there))
        sizes = set(map(len, present))  # type: ignore[arg-type]
    if not sizes <= {4 * dim}:
        row = next(i for i, value in enumerate(values) if value is not None and len(value) != 4 * dim)
        raise _wrong_size(row, "a vector", len(values[row] or b""), 4 * dim)
    joined = np.frombuffer(b"".join(present), "<f4").reshape(-1, dim)  # type: ignore[arg-type]
    return joined.astype(np.float32, copy=False), there


def rows_of(flat: Sequence[bytes], dim: int) -> tuple[KeyArray, FloatArray]:
    """Join what an iterator returned.

    Args:
        flat: key, value, key, value, ...
        dim: floats of a vector.

    Returns:
        The keys, (n,), and their vectors, (n, dim); read only and strided.

    Raises:
        WrongSizeError: a key has not 8 bytes, or a value is no vector of this width.
    """
    for what, fields, size in (("a key", flat[::2], KEY_BYTES), ("a vector", flat[1::2], 4 * dim)):
        if not set(map(len, fields)) <= {size}:
            row = next(i for i, field in enumerate(fields) if len(field) != size)
            raise _wrong_size(row, what, len(fields[row]), size)
    rows = np.frombuffer(b"".join(flat), np.dtype([("key", "<i8"), ("vector", "<f4", (dim,))]))
    return rows["key"].astype(np.int64, copy=False), rows["vector"].astype(np.float32, copy=False)


def _wrong_size(row: int, what: str, got: int, wanted: int) -> WrongSizeError:
    return WrongSizeError(row, f"{what} of {got} bytes", f"{what} of {wanted} bytes")
