"""Reads the memory of a hash map table as `hash_map/layout.py` describes it, for tests to compare with what they wrote."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.table import HashMapTable
from hps.types import KeyArray

BUCKET = np.dtype([("version", "<u4"), ("mask", "<u2"), ("overflow", "<u2"), ("keys", "<i8", 10), ("rows", "<u4", 10)])
M1, M2 = 0xA24BAED4963EE407, 0x9FB21C651E98DF25


def mixed(keys: KeyArray) -> npt.NDArray[np.uint64]:
    """The mixing hash, written a second time."""
    x = keys.view(np.uint64)
    x = x ^ _rotated(x, 25) ^ _rotated(x, 50)
    x = x * np.uint64(M1)
    x = x ^ _rotated(x, 24) ^ _rotated(x, 49)
    x = x * np.uint64(M2)
    return x ^ (x >> np.uint64(28))


def keys_with_hash(hashes: npt.NDArray[np.uint64]) -> KeyArray:
    """The keys whose mixing hash is given: the mixer is a bijection, so any collision can be made.

    x ^ ror(x, a) ^ ror(x, b) to the 64th power is the identity (over GF(2), and rotations by 64 are none), so its 63rd
    power is its inverse.
    """
    x = hashes ^ (hashes >> np.uint64(28)) ^ (hashes >> np.uint64(56))
    x = x * np.uint64(pow(M2, -1, 2**64))
    for _ in range(63):
        x = x ^ _rotated(x, 24) ^ _rotated(x, 49)
    x = x * np.uint64(pow(M1, -1, 2**64))
    for _ in range(63):
        x = x ^ _rotated(x, 25) ^ _rotated(x, 50)
    return x.view(np.int64)


def colliding_keys(n: int, upper: int = 2**32 - 1) -> KeyArray:
    """n keys that share the upper half of their hash, and so their home in any table: by default its last bucket."""
    return keys_with_hash((np.uint64(upper) << np.uint64(32)) + np.arange(n, dtype=np.uint64))


def _rotated(x: npt.NDArray[np.uint64], by: int) -> npt.NDArray[np.uint64]:
    return (x >> np.uint64(by)) | (x << np.uint64(64 - by))


@dataclass(frozen=True)
class Inspection:
    """What the memory of a table holds."""

    vectors: dict[int, bytes]  # of each key
    stamps: dict[int, int]  # of each key, where the table keeps them
    segments: list[npt.NDArray[np.void]]  # (buckets,) of dtype BUCKET each, the memory itself
    free_rows: list[int]  # on the list of free ones

    @property
    def buckets(self) -> npt.NDArray[np.void]:
        """A copy of all buckets."""
        return np.concatenate(self.segments)


def _memory(address: int, dtype: np.dtype, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


def inspect(database: HashMapDatabase, tag: str) -> Inspection:
    """Read a table that nobody writes to, and check that it is sound."""
    table = database._tables[tag]
    table.check_integrity()
    slab_table, shift, vector_bytes, stamp_offset = table._buckets.layout.tolist()[:4]
    slabs = _memory(slab_table, np.dtype(np.uint64), table._slabs.capacity_rows >> shift)

    def read(row: int, offset: int, size: int) -> bytes:
        return ctypes.string_at(int(slabs[row >> shift]) + offset + (row % (1 << shift)) * size, size)

    segments = _segments(table)
    keys, numbers = (np.concatenate(parts).tolist() for parts in zip(*map(_entries, segments), strict=True))
    stamps = {key: int.from_bytes(read(row, stamp_offset, 4), "little") for key, row in zip(keys, numbers, strict=True)}
    vectors = {key: read(row, 0, vector_bytes) for key, row in zip(keys, numbers, strict=True)}
    first, lists = 7, 1 << int(table._slabs.counters[6])
    free_rows = []
    for free in table._slabs.counters[first : first + lists].tolist():
        while free >= 0:
            free_rows.append(free)
            following = int.from_bytes(read(free, 0, vector_bytes)[:4], "little")
            free = -1 if following == 2**32 - 1 else following
    return Inspection(vectors, stamps if stamp_offset else {}, segments, free_rows)


def placed(database: HashMapDatabase, tag: str) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The hashes of all keys of a table that nobody writes to, and their row numbers."""
    parts = [_entries(segment) for segment in _segments(database._tables[tag])]
    return mixed(np.concatenate([keys for keys, _ in parts])), np.concatenate([rows for _, rows in parts]).astype(np.int64)


def _segments(table: HashMapTable) -> list[npt.NDArray[np.void]]:
    places = table._buckets.layout.tolist()[9:]
    return [_memory(address, BUCKET, count) for address, count in zip(places[::2], places[1::2], strict=True)]


def _entries(buckets: npt.NDArray[np.void]) -> tuple[KeyArray, npt.NDArray[np.uint32]]:
    """The keys of a segment and their row numbers."""
    occupied = (buckets["mask"][:, None] >> np.arange(10)) & 1 == 1
    return buckets["keys"][occupied], buckets["rows"][occupied]
