"""Reads a table as a device does: by a `HostLayout` alone, and by the rules of `stores/hash_map/layout.py`."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hps.stores.hash_map.layout import BUCKET_BYTES, DENSE_ROWS, SEGMENTS, SLAB_SHIFT, STRIPES, VECTOR_BYTES, VERSION_BYTES

# isort: split
from hps.stores.hash_map.layout import VERSIONS, after, copy, home_of, lowest_bit, mask_of, match_keys, overflow_of, row_of

# isort: split
from hps.ground.hashing import mix
from hps.ground.kernels.numba_atomics import fence_acquire, load_acquire, load_relaxed
from hps.ground.memory.host_tables import BucketChanges, HostLayout, HostTable
from hps.stores.hash_map.layout import segment_of
from hps.stores.row_files.reading import SCRATCH, fetch_records
from hps.types import BoolArray, FloatArray, KeyArray

_RETIRED = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit()
def _read(words, slabs, copies, copied_at, keys, out, answered, copied):  # type: ignore[no-untyped-def]
    target = np.uint64(out.ctypes.data)
    shift, vector_bytes = words[SLAB_SHIFT], words[VECTOR_BYTES]
    for i in range(keys.size):
        hashed = mix(keys[i])
        version_at = words[VERSIONS] + (hashed >> np.uint64(54)) * np.uint64(VERSION_BYTES)
        version = load_acquire(version_at)
        copied[i] = copied_at[np.int64(hashed >> np.uint64(54))] == version
        fence_acquire()
        places = copies if copied[i] else words
        if np.uint64(keys[i]) < words[DENSE_ROWS] and not version >> np.uint64(63):
            row = np.uint64(keys[i])
        else:
            segment = segment_of(places, hashed)
            bucket = home_of(places, segment, hashed)
            header = load_relaxed(bucket)
            hit = match_keys(bucket, keys[i]) & mask_of(header)
            while not hit and header != _RETIRED and overflow_of(header):
                bucket = after(places, segment, bucket)
                header = load_relaxed(bucket)
                hit = match_keys(bucket, keys[i]) & mask_of(header)
            if not hit or header == _RETIRED:
                continue
            row = row_of(bucket, lowest_bit(hit))
        slab = np.int64(row >> shift)
        if slab >= slabs.size:
            continue
        place = row & ((np.uint64(1) << shift) - np.uint64(1))
        copy(target + np.uint64(i) * vector_bytes, slabs[slab] + place * vector_bytes, vector_bytes)
        fence_acquire()
        answered[i] = version & np.uint64(1) == 0 and load_relaxed(version_at) == version


def without_buckets(layout: HostLayout, zeros: Callable[[int], np.ndarray] = lambda n: np.zeros(n, np.uint8)) -> HostLayout:
    """The layout with empty buckets: by it, only dense keys are read, and only those of stripes without holes.

    Args:
        zeros: makes memory of so many bytes that the reader can read.
    """
    words, pages = layout.words.copy(), []
    for position in range(SEGMENTS, words.size, 2):
        pages.append(zeros(int(words[position + 1]) * BUCKET_BYTES))
        words[position] = pages[-1].ctypes.data
    return replace(layout, words=words, memory=(layout.memory, pages))


def read_in_place(layout: HostLayout, keys: KeyArray) -> tuple[FloatArray, BoolArray]:
    """What a device that looks once at each key answers: (n, dim) vectors, and (n,) which rows of them are valid."""
    return _read_keys(layout, layout.words, np.full(STRIPES, 1, np.uint64), keys)[:2]


def array_at(address: int, dtype: npt.DTypeLike, *shape: int) -> npt.NDArray[Any]:
    """A copy of what stands in memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


def read_pair(layout: HostLayout, keys: KeyArray, width: int = 0) -> tuple[FloatArray, BoolArray]:
    """As `read_in_place`, of a table of row files: the map of changes first, if any, then the file.

    Args:
        width: words of a row, which a layout without a file and a map does not say.
    """
    file = layout.file
    if file is not None:
        width = file.record_bytes // 4 - 2
    elif layout.words[VERSIONS]:
        width = int(layout.words[VECTOR_BYTES]) // 4 - 1
    rows, found = np.zeros((keys.size, width), np.float32), np.zeros(keys.size, np.bool_)
    if file is not None:
        places = [file.records, file.rows, width + 2, file.starts, file.buckets, file.fingerprints]
        parts = np.array([*places, 0, 0, 0, 2**64 - 1], np.uint64).view(np.int64)  # without checksums, for all hashes
        none, scratch = np.empty(0, np.int64), np.empty(SCRATCH, np.int64)
        fetch_records(keys, rows.view(np.uint32), found, found, parts, none, scratch, False, 0)
    if layout.words[VERSIONS]:
        changed, there = read_in_place(layout, keys)
        rows[there], found[there] = changed[there, :-1], changed[there, -1].view(np.uint32) == 0
    return rows, found


def _read_keys(
    layout: HostLayout, copies: npt.NDArray[np.uint64], copied_at: npt.NDArray[np.uint64], keys: KeyArray
) -> tuple[FloatArray, BoolArray, BoolArray]:
    out = np.full((keys.size, int(layout.words[VECTOR_BYTES]) // 4), np.nan, np.float32)
    answered, copied = np.zeros(keys.size, np.bool_), np.zeros(keys.size, np.bool_)
    _read(layout.words, layout.slabs, copies, copied_at, keys, out, answered, copied)
    return out, answered, copied


class MirroredTable:
    """A pinned table, and a copy of its buckets as a device keeps one.

    Attributes:
        updates: the changes that it was told of.
        late: it takes no notice of changes.
    """

    def __init__(self, table: HostTable) -> None:
        self.updates: list[BucketChanges] = []
        self.late = self._lags = False
        self._table = table
        self._show(table.layout())
        self._end_watch, self._end_mirror = table.watch(self._show), table.mirror(self._update)

    def read(self, keys: KeyArray) -> tuple[FloatArray, BoolArray, BoolArray]:
        """As `read_in_place`; and (n,) which keys were looked up in the copy."""
        layout, copies, copied_at = self._shown
        return _read_keys(layout, copies, copied_at, keys)

    def close(self) -> None:
        self._end_mirror()
        self._end_watch()

    def _show(self, layout: HostLayout | None) -> None:
        if layout is None:
            return
        words = layout.words.copy()
        self._arrays = [_aligned(BUCKET_BYTES * int(count)) for count in words[SEGMENTS + 1 :: 2]]
        words[SEGMENTS::2] = [array.ctypes.data for array in self._arrays]
        self._shown = (layout, words, np.full(STRIPES, 2**64 - 1, np.uint64))

    def _update(self, changes: BucketChanges) -> None:
        self.updates.append(changes)
        self._lags |= self.late
        if self.late:
            return
        everything, self._lags = self._lags or changes.buckets is None, False
        layout, _words, copied_at = self._shown
        starts, counts = layout.words[SEGMENTS::2].tolist(), layout.words[SEGMENTS + 1 :: 2].tolist()
        for start, count, array in zip(starts, counts, self._arrays, strict=True):
            inside = range(start, start + BUCKET_BYTES * count, BUCKET_BYTES)
            for at in inside if everything else changes.buckets.tolist():
                if at in inside:
                    array[at - start :][:BUCKET_BYTES] = np.frombuffer(ctypes.string_at(at, BUCKET_BYTES), np.uint8)
        copied_at[:] = changes.versions


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    memory = np.zeros(size_bytes + BUCKET_BYTES, np.uint8)
    skip = -memory.ctypes.data % BUCKET_BYTES
    return memory[skip : skip + size_bytes]
