"""Reads the memory of a hash map table as `hash_map/layout.py` describes it, with nothing of the code that wrote it."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hps.stores.hash_map.database import HashMapDatabase
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
    slab_table, shift, vector_bytes, stamp_offset, bits, versions_at, dense, holes_at, _, *places = (
        table._buckets.layout.tolist()
    )
    rows, free_count, fresh, first_row, stripe_rows, stripe_bits, list_bits, *lists = table._slabs.counters.tolist()
    capacity = table._slabs.capacity_rows
    slabs = _memory(slab_table, np.dtype(np.uint64), capacity >> shift)
    assert len(places) == 2 << bits

    def vector(row: int) -> bytes:
        return ctypes.string_at(int(slabs[row >> shift]) + (row % (1 << shift)) * vector_bytes, vector_bytes)

    def stamp(row: int) -> int:
        place = int(slabs[row >> shift]) + stamp_offset + (row % (1 << shift)) * 4
        return int.from_bytes(ctypes.string_at(place, 4), "little")

    segments, all_keys, all_numbers = [], [], []
    for number, (address, count) in enumerate(zip(places[::2], places[1::2], strict=True)):
        assert address % 128 == 0
        segments.append(_memory(address, BUCKET, count))
        keys, numbers = _segment(segments[-1], number, bits)
        assert table._buckets.segment_rows[number] == keys.size, "rows of the segment"
        all_keys.append(keys)
        all_numbers.append(numbers)
    keys, numbers = np.concatenate(all_keys), np.concatenate(all_numbers).tolist()
    free_rows = []
    for free in lists[: 1 << list_bits]:
        while free >= 0:
            free_rows.append(free)
            following = int.from_bytes(vector(free)[:4], "little")
            free = -1 if following == 2**32 - 1 else following
    assert len(set(keys.tolist())) == keys.size == rows, "each key once, and as many as counted"
    assert len(free_rows) == free_count
    handed_out = sorted(numbers + free_rows)
    assert len(set(handed_out)) == len(handed_out), "each row number linked or free, and once"
    used = lists[1 << list_bits :][: 1 << stripe_bits]
    assert fresh == (stripe_rows << stripe_bits) - sum(used)
    left = sum((extent.stripe_rows << extent.stripe_bits) - int(was_used.sum()) for extent, was_used in table._slabs._left)
    own = [key for key in keys.tolist() if 0 <= key < dense]
    if dense:
        end = table._slabs.extents[1].first_row if len(table._slabs.extents) > 1 else capacity
        capacity -= end - len(own)
        numbers_of = dict(zip(keys.tolist(), numbers, strict=True))
        assert all(numbers_of[key] == key for key in own), "a dense key at its own row"
        assert len(own) == sum(row < end for row in handed_out), "a dense key's row is nobody else's"
        _check_holes(np.setdiff1d(np.arange(dense), own), holes_at, versions_at)
    assert len(handed_out) + fresh + left == capacity, "no row number is lost"
    if dense and not first_row:
        stripe_rows = stripe_bits = 0
        used = []
    here = [row - first_row for row in handed_out if 0 <= row - first_row < stripe_rows << stripe_bits]
    places = [stripe * stripe_rows + place for stripe, count in enumerate(used) for place in range(count)]
    assert here == places, "rows of a stripe are used from its start"
    stamps = {int(key): stamp(row) for key, row in zip(keys, numbers, strict=True)} if stamp_offset else {}
    vectors = {int(key): vector(row) for key, row in zip(keys, numbers, strict=True)}
    if table._overflow:
        partitions = table._overflow.partitions
        counted = np.bincount((mixed(keys) % np.uint64(partitions)).astype(np.int64), minlength=partitions)
        np.testing.assert_array_equal(table._partition_rows, counted, "rows of each partition")
        assert (counted <= table._overflow.margin).all(), "a partition beyond its margin"
    return Inspection(vectors, stamps, segments, free_rows)


def _check_holes(absent: KeyArray, holes_at: int, versions_at: int) -> None:
    """Check what a table knows of its absent dense keys, and tells devices."""
    holes = np.bincount((mixed(absent) >> np.uint64(54)).astype(np.int64), minlength=1024)
    np.testing.assert_array_equal(_memory(holes_at, np.dtype(np.uint32), 1024), holes, "holes of each stripe")
    if versions_at:
        versions = _memory(versions_at, np.dtype(np.uint64), 8 * 1024)[::8]
        np.testing.assert_array_equal(versions >> np.uint64(63) == 1, holes > 0, "stripes with holes")


def placed(database: HashMapDatabase, tag: str) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The hashes of all keys of a table that nobody writes to, and their row numbers."""
    _, _, _, _, bits, _versions, _dense, _holes, _changes, *places = database._tables[tag]._buckets.layout.tolist()
    segments = zip(places[::2], places[1::2], strict=True)
    parts = [_segment(_memory(address, BUCKET, count), i, bits) for i, (address, count) in enumerate(segments)]
    return mixed(np.concatenate([keys for keys, _ in parts])), np.concatenate([rows for _, rows in parts]).astype(np.int64)


def _segment(buckets: npt.NDArray[np.void], number: int, bits: int) -> tuple[KeyArray, npt.NDArray[np.uint32]]:
    """The keys of a segment, once it was found sound, and their row numbers."""
    assert not (buckets["version"] & 1).any(), "a bucket was left half-written"
    assert (buckets["mask"] < 1 << 10).all()
    occupied = (buckets["mask"][:, None] >> np.arange(10)) & 1 == 1
    assert not buckets["keys"][~occupied].any(), "the key field of a free entry is 0"
    here = np.broadcast_to(np.arange(buckets.size)[:, None], occupied.shape)[occupied]
    hashes = mixed(buckets["keys"][occupied])
    assert [number] * hashes.size == [int(hashed) >> (64 - bits) for hashed in hashes], "keys of another segment"
    within = (hashes << np.uint64(bits)) >> np.uint64(32)
    homes = ((within * np.uint64(buckets.size)) >> np.uint64(32)).astype(np.int64)
    passed = np.zeros(buckets.size, np.int64)
    for home, place in zip(homes[homes != here].tolist(), here[homes != here].tolist(), strict=True):
        passed[(home + np.arange((place - home) % buckets.size)) % buckets.size] += 1
    stuck = buckets["overflow"] == 0xFFFF
    np.testing.assert_array_equal(buckets["overflow"][~stuck], passed[~stuck], "overflow counts")
    return buckets["keys"][occupied], buckets["rows"][occupied]
