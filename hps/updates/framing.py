"""Encodes and decodes update messages: changes to rows of one table, in the `HPS1` or the HugeCTR framing.

Everything is little-endian, without padding. A producer in any language can be written from these tables.

`HPS1`, a header of 40 bytes, then the table's name, then the rows:

    at        bytes   type     what
    0         4       bytes    "HPS1"
    4         4       uint32   CRC-32 (zlib's) of the message without these 4 bytes
    8         8       int64    sequence: 1 to 2^62. Of two changes of a key the one with the higher sequence is the later one,
                               on every replica. It ascends strictly from message to message of a partition:
                               max(microseconds since 1970, last + 1)
    16        8       int64    when the changes were made, in microseconds since 1970, at most 2^62; 0: unknown
    24        4       uint32   n, rows that are inserted or replaced
    28        4       uint32   m, keys that are deleted
    32        4       uint32   dim, elements of a vector; ignored if n is 0
    36        1       uint8    dtype of the vectors: 0 float32, 1 float16, 2 bfloat16 (the upper half of a float32)
    37        1       uint8    t, bytes of the table's name; 0: the table is the topic's
    38        2       uint16   0; another value is of a later version, and refused
    40        t       ASCII    the table's name, to be compared with the topic's
    40 + t    8 n     int64    keys of the rows
    ...       8 m     int64    deleted keys
    ...       s n dim          vectors, row by row; s is 4 for float32, else 2. All are finite.

Of a key that occurs twice the last row counts; a key among the deleted keys is deleted. A message without rows is legal.
All changes of a key go to one partition. Beside its vector a row takes 8 bytes, plus at most 8 more of header from 5 rows on.

HugeCTR's framing has no order, time, deletions or checksum:

    0         4       bytes    "HCTR"
    4         4       uint32   v, bytes of a vector (4 dim)
    8         ...              rows: a key (int64, or uint32 where `supportlonglong` is false), then a vector (float32)

A message of only the first 8 bytes is a beacon. The width of a key is not stated: a wrong width shows only in a size that does
not fit, and if the number of rows with 4-byte keys is a multiple of dim + 2 the size fits 8-byte keys, too.
"""

import struct
import zlib
from functools import cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.errors import InvalidDtypeError, InvalidInputError, UpdateFormatError
from hps.types import FloatArray, KeyArray

VectorDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]

HEADER_BYTES: Final = 40
"""Bytes of an `HPS1` header, without the table's name."""

HIGHEST_SEQUENCE: Final = 1 << 62

_HEADER = struct.Struct("<4sIqqIIIBBH")
_DTYPES: dict[str, tuple[int, np.dtype[np.generic]]] = {
    "float32": (0, np.dtype("<f4")),
    "float16": (1, np.dtype("<f2")),
    "bfloat16": (2, np.dtype("<u2")),
}
_BY_CODE = [dtype for _, dtype in _DTYPES.values()]
_BFLOAT16 = 2


class Changes(NamedTuple):
    """The changes in one message. *Immutable.* The arrays may be views of the message.

    Attributes:
        keys: (n,) int64. Of a key that occurs twice the last row counts.
        vectors: (n, dim) float32, finite.
        deleted_keys: (m,) int64; these win over `keys`.
        sequence: place of these changes in the order of the table; 0 if the message has none.
        time_us: time of the changes in microseconds since 1970; 0 if unknown.
        table: name of the table; empty: the topic's.
    """

    keys: KeyArray
    vectors: FloatArray
    deleted_keys: KeyArray
    sequence: int = 0
    time_us: int = 0
    table: str = ""


def decode(
    value: bytes, dim: int, key_bytes: int = 8, *, key: bytes = b"", table: str = "", most_bytes: int = 0
) -> Changes | None:
    """Decode a message of either framing.

    Args:
        dim: elements of a vector of the table.
        key_bytes: 8, or 4 if `supportlonglong` is false: HugeCTR's keys are then uint32, and ours must lie in [0, 2^32).
        key: Kafka's message key, which must be empty.
        table: name of the topic's table; empty accepts any.
        most_bytes: maximum message size; 0: unlimited.

    Returns:
        The changes; None for a beacon. Arrays are C-contiguous, aligned and in host memory; views of `value` are read only.

    Raises:
        UpdateFormatError: the message is invalid; `reason` is `keyed`, `too_large`, `magic`, `size`, `checksum`, `dtype`,
            `width`, `table`, `sequence`, `key` or `not_finite`. None of it may be applied.
    """
    if key:
        raise _wrong("keyed", f"a message key of {len(key)} bytes", "none: a compacted topic would drop changes")
    if most_bytes and len(value) > most_bytes:
        raise _wrong("too_large", f"{len(value)} bytes", f"at most update_source.max_message_bytes = {most_bytes}")
    magic = bytes(value[:4])
    if magic == b"HPS1":
        changes = _decode_hps1(value, dim, key_bytes, table)
    elif magic == b"HCTR":
        if len(value) == 8:
            return None
        changes = _decode_hugectr(value, dim, key_bytes)
    else:
        raise _wrong("magic", f"{len(value)} bytes that begin with {magic!r}", "HPS1 or HCTR")
    if not np.isfinite(changes.vectors).all():
        row = int(np.argmin(np.isfinite(changes.vectors).all(axis=1)))
        raise _wrong("not_finite", f"a NaN or an infinite element for key {changes.keys[row]}", "finite vectors")
    return changes


def sequence_of(value: bytes) -> int:
    """Return the sequence of a message of any table; 0 unless it is a complete `HPS1` message."""
    if value[:4] != b"HPS1" or len(value) < HEADER_BYTES:
        return 0
    _, crc, sequence, *_ = _HEADER.unpack_from(value)
    return sequence if crc == _checksum(value) and 1 <= sequence <= HIGHEST_SEQUENCE else 0


def encode(
    keys: KeyArray,  # (n,)
    vectors: FloatArray,  # (n, dim)
    deleted_keys: KeyArray | None = None,  # (m,)
    *,
    sequence: int,
    time_us: int = 0,
    table: str = "",
    dtype: VectorDtype = "float32",
) -> bytes:
    """Encode an `HPS1` message.

    Args:
        keys: (n,) int64, in host memory.
        vectors: (n, dim) float32; rounded to the nearest value of `dtype`.
        deleted_keys: (m,) int64; none by default.
        sequence, time_us, table: as in the layout above.

    Raises:
        InvalidInputError: a value is out of range, or a vector is not finite as `dtype`.
    """
    code, stored = _DTYPES[dtype]
    deleted = np.empty(0, np.int64) if deleted_keys is None else deleted_keys
    for array in (keys, deleted):
        if array.dtype != np.int64 or array.ndim != 1:
            raise InvalidDtypeError(f"encoding an update: got keys {array.dtype} {array.shape}, expected int64 (n,)")
    if vectors.dtype != np.float32:
        raise InvalidDtypeError(f"encoding an update: got vectors {vectors.dtype}, expected float32")
    if vectors.ndim != 2 or vectors.shape[0] != keys.size:
        raise InvalidInputError(f"encoding an update: got vectors {vectors.shape} for {keys.size} keys, expected (n, dim)")
    keys, deleted = np.ascontiguousarray(keys), np.ascontiguousarray(deleted)
    vectors = np.ascontiguousarray(vectors)
    name = table.encode("ascii", "replace")
    if not 1 <= sequence <= HIGHEST_SEQUENCE or not 0 <= time_us <= HIGHEST_SEQUENCE or len(name) > 255:
        raise InvalidInputError(
            f"encoding an update: got sequence {sequence}, time {time_us} us, table {table!r}; expected 1 <= sequence <= 2^62, "
            "0 <= time <= 2^62 and a name of at most 255 bytes"
        )
    if code == _BFLOAT16:
        bits = vectors.view(np.uint32)
        elements = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
        finite = bool(((elements & 0x7F80) != 0x7F80).all())
    else:
        with np.errstate(over="ignore"):
            elements = np.ascontiguousarray(vectors, stored)
        finite = bool(np.isfinite(elements).all())
    if not finite or not np.isfinite(vectors).all():
        raise InvalidInputError(f"encoding an update: a vector is not finite as {dtype}; expected finite vectors")
    header = _HEADER.pack(b"HPS1", 0, sequence, time_us, keys.size, deleted.size, vectors.shape[1], code, len(name), 0)
    parts: list[Any] = [header[8:], name, keys.data, deleted.data, elements.data]
    crc = zlib.crc32(header[:4])
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([header[:4], crc.to_bytes(4, "little"), *parts])


def _decode_hps1(value: bytes, dim: int, key_bytes: int, table: str) -> Changes:
    if len(value) < HEADER_BYTES:
        raise _wrong("size", f"{len(value)} bytes", f"an HPS1 header of {HEADER_BYTES}")
    _, crc, sequence, time_us, n, m, width, code, name_bytes, version = _HEADER.unpack_from(value)
    if code < len(_BY_CODE) and not version:  # else the size is unknown
        expected = HEADER_BYTES + name_bytes + 8 * (n + m) + _BY_CODE[code].itemsize * n * width
        if len(value) != expected:
            raise _wrong("size", f"{len(value)} bytes", f"{expected} for {n} rows of width {width} and {m} deleted keys")
    if (got := _checksum(value)) != crc:
        raise _wrong("checksum", f"content of CRC-32 {got:08x}", f"its stated {crc:08x}; it was damaged in transit")
    if code >= len(_BY_CODE) or version:
        raise _wrong("dtype", f"dtype {code}, version {version}", "dtype 0 (float32), 1 (float16) or 2 (bfloat16), version 0")
    if n and width != dim:
        raise _wrong("width", f"vectors of {width} elements", f"the table's {dim}")
    if not 1 <= sequence <= HIGHEST_SEQUENCE or not 0 <= time_us <= HIGHEST_SEQUENCE:
        raise _wrong("sequence", f"sequence {sequence}, time {time_us} us", "1 <= sequence <= 2^62, 0 <= time <= 2^62")
    name = bytes(value[HEADER_BYTES : HEADER_BYTES + name_bytes]).decode("ascii", "backslashreplace")
    if table and name and name != table:
        raise _wrong("table", f"table {name!r}", f"the topic's: {table!r}")
    at = HEADER_BYTES + name_bytes
    keys, deleted = (np.frombuffer(value, "<i8", count, start) for count, start in ((n, at), (m, at + 8 * n)))
    for array in (keys, deleted):
        if key_bytes == 4 and array.size and not 0 <= array.min() <= array.max() < 1 << 32:
            raise _wrong("key", f"keys from {array.min()} to {array.max()}", "keys in [0, 2^32), or supportlonglong: true")
    elements = np.frombuffer(value, _BY_CODE[code], n * dim, at + 8 * (n + m)).reshape(n, dim)
    if code == _BFLOAT16:
        vectors = np.left_shift(elements, 16, dtype=np.uint32).view(np.float32)
    else:
        vectors = elements.astype(np.float32, copy=False)
    return Changes(_aligned(keys), _aligned(vectors), _aligned(deleted), sequence, time_us, name)


def _decode_hugectr(value: bytes, dim: int, key_bytes: int) -> Changes:
    if len(value) < 8:
        raise _wrong("size", f"{len(value)} bytes", "an HCTR header of 8")
    vector_bytes, payload = int.from_bytes(value[4:8], "little"), len(value) - 8
    if vector_bytes != 4 * dim:
        raise _wrong("width", f"vectors of {vector_bytes} bytes", f"{4 * dim}: {dim} float32")
    if payload % (key_bytes + vector_bytes):
        other_bytes = 12 - key_bytes
        fits = payload % (other_bytes + vector_bytes) == 0
        cure = f"; the size fits keys of {other_bytes} bytes: see supportlonglong" if fits else ""
        raise _wrong(
            "size", f"{payload} bytes of rows", f"{key_bytes + vector_bytes} for each: {key_bytes} + {vector_bytes}{cure}"
        )
    rows = np.frombuffer(value, _hugectr_row(dim, key_bytes), offset=8)
    keys, vectors = rows["key"].astype(np.int64), np.ascontiguousarray(rows["vector"])
    return Changes(keys, _aligned(vectors), keys[:0])


def _checksum(value: bytes) -> int:
    view = memoryview(value)
    return zlib.crc32(view[8:], zlib.crc32(view[:4]))


@cache
def _hugectr_row(dim: int, key_bytes: int) -> npt.DTypeLike:
    return np.dtype([("key", "<u4" if key_bytes == 4 else "<i8"), ("vector", "<f4", (dim,))])


def _aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or an aligned copy if the table's name has shifted it."""
    return array if array.flags.aligned else array.copy()


def _wrong(reason: str, got: str, expected: str) -> UpdateFormatError:
    return UpdateFormatError(reason, f"reading a message of updates: got {got}, expected {expected}")
