"""Checks the memory of a hash map table against `layout.py` while no writer is active."""

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseCorruptError
from hps.ground.hashing import mix
from hps.stores.hash_map.eviction import HashMapOverflow
from hps.stores.hash_map.layout import ENTRIES, FRESH_ROWS, LIST_BITS, LISTS, STRIPES, VERSION_BYTES
from hps.stores.hash_map.memory import Buckets, Slabs
from hps.types import KeyArray

BUCKET = np.dtype(
    [("version", "<u4"), ("mask", "<u2"), ("overflow", "<u2"), ("keys", "<i8", ENTRIES), ("rows", "<u4", ENTRIES)]
)
_NO_ROW = 2**32 - 1
_STUCK = 0xFFFF  # an overflow count that reached it is never lowered

_Numbers = npt.NDArray[np.int64]


class TableIntegrity:
    """Checks one table. *One thread*, the table's writer."""

    def __init__(self, tag: str, buckets: Buckets, slabs: Slabs) -> None:
        self.doing = f"hash map: checking table {tag!r}"
        self._buckets = buckets
        self._slabs = slabs

    def check(self, partition_rows: _Numbers, overflow: HashMapOverflow | None) -> None:
        segments = [self._segment(number) for number in range(len(self._buckets.pages))]
        keys, rows = (np.concatenate(parts) for parts in zip(*segments, strict=True))
        present, free_count, *_ = self._slabs.counters.tolist()
        self._same("distinct keys and the count of rows", np.unique(keys).size, present)
        self._same("linked rows and the count of rows", keys.size, present)
        free = np.fromiter(self._free_rows(), np.int64)
        self._same("rows on the free lists and their count", free.size, free_count)
        used = np.sort(np.concatenate([rows, free]))
        self._same("distinct rows, each linked or free once", np.unique(used).size, used.size)
        self._rows(keys, rows, used)
        if overflow:
            partitions = (_mixed(keys) % np.uint64(overflow.partitions)).astype(np.int64)
            counted = np.bincount(partitions, minlength=overflow.partitions)
            self._same("rows of each partition", counted, partition_rows)
            self._require(bool((counted <= overflow.margin).all()), f"a partition holds more than {overflow.margin} rows")

    def _segment(self, number: int) -> tuple[KeyArray, _Numbers]:
        """Check the buckets of a segment; return its keys and their row numbers."""
        pages, bits = self._buckets.pages[number], len(self._buckets.pages).bit_length() - 1
        buckets = pages.words().view(np.uint8)[: pages.size_bytes // BUCKET.itemsize * BUCKET.itemsize].view(BUCKET)
        self._require(pages.address % BUCKET.itemsize == 0, "a segment is not aligned")
        self._require(not (buckets["version"] & 1).any(), "a bucket is half-written")
        self._require(bool((buckets["mask"] < 1 << ENTRIES).all()), "a bucket has more entries than it can")
        occupied = (buckets["mask"][:, None] >> np.arange(ENTRIES)) & 1 == 1
        self._require(not buckets["keys"][~occupied].any(), "the key field of a free entry is not 0")
        keys, places = buckets["keys"][occupied], np.nonzero(occupied)[0]
        self._same("rows of a segment", keys.size, int(self._buckets.segment_rows[number]))
        hashes = _mixed(keys)
        self._require(
            bits == 0 or bool((hashes >> np.uint64(64 - bits) == number).all()), "a key is in another segment than its own"
        )
        homes = ((((hashes << np.uint64(bits)) >> np.uint64(32)) * np.uint64(buckets.size)) >> np.uint64(32)).astype(np.int64)
        passed, displaced = np.zeros(buckets.size, np.int64), homes != places
        for home, place in zip(homes[displaced].tolist(), places[displaced].tolist(), strict=True):
            passed[(home + np.arange((place - home) % buckets.size)) % buckets.size] += 1
        counts = buckets["overflow"] != _STUCK
        self._same("overflow counts", buckets["overflow"][counts], passed[counts])
        return keys, buckets["rows"][occupied].astype(np.int64)

    def _free_rows(self) -> Iterable[int]:
        slabs, counters = self._slabs, self._slabs.counters.tolist()
        addresses, within = slabs.addresses_so_far().tolist(), slabs.rows_per_slab - 1
        limit = slabs.capacity_rows  # a longer list is a circle
        for row in counters[LISTS : LISTS + (1 << counters[LIST_BITS])]:
            while row >= 0 and limit >= 0:
                yield row
                limit -= 1
                following = ctypes.c_uint32.from_address(
                    addresses[row >> slabs.shift] + (row & within) * slabs.vector_bytes
                ).value
                row = -1 if following == _NO_ROW else following

    def _rows(self, keys: KeyArray, rows: _Numbers, used: _Numbers) -> None:
        """Check that each row that has memory is linked, free, fresh, or that of an absent dense key."""
        slabs = self._slabs
        capacity, dense = slabs.capacity_rows, slabs.dense_rows
        fresh = int(slabs.counters[FRESH_ROWS])
        if dense:
            end = slabs.extents[1].first_row if len(slabs.extents) > 1 else capacity
            is_dense = (keys >= 0) & (keys < dense)
            self._same("rows of dense keys and the keys", rows[is_dense], keys[is_dense])
            self._same("rows below the end of the dense extent", int((used < end).sum()), int(is_dense.sum()))
            capacity -= end - int(is_dense.sum())
            self._holes(np.setdiff1d(np.arange(dense), keys[is_dense]))
        unused = sum((extent.stripe_rows << extent.stripe_bits) - int(in_use.sum()) for extent, in_use in slabs.unfilled)
        self._same("linked, free and unused rows, and those that have memory", used.size + fresh + unused, capacity)
        if not slabs.extents:
            return
        current, used_of_stripes = slabs.current()
        size = current.stripe_rows << current.stripe_bits
        self._same("unused rows of the current extent", fresh, size - int(used_of_stripes.sum()))
        if not dense or current.first_row:  # the rows of dense keys are in no order of stripes
            numbers = used[(used >= current.first_row) & (used < current.first_row + size)] - current.first_row
            filled = (np.arange(current.stripe_rows)[None, :] < used_of_stripes[:, None]).reshape(-1)
            self._same("used rows of each stripe, from its start", numbers, np.flatnonzero(filled))

    def _holes(self, absent: KeyArray) -> None:
        slabs = self._slabs
        holes = np.bincount((_mixed(absent) >> np.uint64(54)).astype(np.int64), minlength=STRIPES)
        if slabs.holes:
            self._same("holes of each stripe", slabs.holes.words().view(np.uint32)[:STRIPES], holes)
        if slabs.versions:
            versions = slabs.versions.words()[:: VERSION_BYTES // 8]
            self._same("stripes with holes", versions >> np.uint64(63) == 1, holes > 0)

    def _same(self, quantity: str, got: Any, expected: Any) -> None:
        if not np.array_equal(got, expected):
            raise DatabaseCorruptError(f"{self.doing}: {quantity} differ: got {got}, expected {expected}")

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise DatabaseCorruptError(f"{self.doing}: {otherwise}")


def _mixed(keys: KeyArray) -> npt.NDArray[np.uint64]:
    function: Any = mix.py_func
    with np.errstate(over="ignore"):
        mixed: npt.NDArray[np.uint64] = function(keys.view(np.uint64).copy())  # it works in place on an array
    return mixed
