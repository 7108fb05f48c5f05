"""Reads a table as a device does: by a `HostLayout` alone, and by the rules of `databases/hash_map/layout.py`."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numba import njit

from hps.databases.hash_map.layout import (
    BUCKET_BYTES,
    DENSE_ROWS,
    SEGMENTS,
    SLAB_SHIFT,
    VECTOR_BYTES,
    VERSION_BYTES,
    VERSIONS,
    after,
    copy,
    home_of,
    lowest_bit,
    mask_of,
    match_keys,
    overflow_of,
    row_of,
    segment_of,
)
from hps.ground.hashing import mix
from hps.ground.host_tables import HostLayout
from hps.ground.numba_atomics import fence_acquire, load_acquire, load_relaxed
from hps.types import BoolArray, FloatArray, KeyArray

_RETIRED = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit()
def _read(words, slabs, keys, out, answered):  # type: ignore[no-untyped-def]
    target = np.uint64(out.ctypes.data)
    shift, vector_bytes = words[SLAB_SHIFT], words[VECTOR_BYTES]
    for i in range(keys.size):
        hashed = mix(keys[i])
        version_at = words[VERSIONS] + (hashed >> np.uint64(54)) * np.uint64(VERSION_BYTES)
        version = load_acquire(version_at)
        if np.uint64(keys[i]) < words[DENSE_ROWS] and not version >> np.uint64(63):
            row = np.uint64(keys[i])
        else:
            segment = segment_of(words, hashed)
            bucket = home_of(words, segment, hashed)
            header = load_relaxed(bucket)
            hit = match_keys(bucket, keys[i]) & mask_of(header)
            while not hit and header != _RETIRED and overflow_of(header):
                bucket = after(words, segment, bucket)
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
    out = np.full((keys.size, int(layout.words[VECTOR_BYTES]) // 4), np.nan, np.float32)
    answered = np.zeros(keys.size, np.bool_)
    _read(layout.words, layout.slabs, keys, out, answered)
    return out, answered
