"""Reads a table as a device does: by a `HostLayout` alone, and by the rules of `databases/hash_map/layout.py`."""

import numpy as np
from numba import njit

from hps.databases.hash_map.layout import (
    DONE,
    SLAB_SHIFT,
    VECTOR_BYTES,
    copy,
    home_of,
    locate,
    segment_of,
)
from hps.hashing import mix
from hps.host_tables import HostLayout
from hps.numba_atomics import fence_acquire, load_relaxed
from hps.types import BoolArray, FloatArray, KeyArray


@njit()
def _read(words, slabs, keys, out, answered):  # type: ignore[no-untyped-def]
    target = np.uint64(out.ctypes.data)
    shift, vector_bytes = words[SLAB_SHIFT], words[VECTOR_BYTES]
    for i in range(keys.size):
        hashed = mix(keys[i])
        segment = segment_of(words, hashed)
        state, bucket, header, row = locate(words, segment, home_of(words, segment, hashed), keys[i])
        slab = np.int64(row >> shift)
        if state != DONE or slab >= slabs.size:
            continue
        place = row & ((np.uint64(1) << shift) - np.uint64(1))
        copy(target + np.uint64(i) * vector_bytes, slabs[slab] + place * vector_bytes, vector_bytes)
        fence_acquire()
        answered[i] = load_relaxed(bucket) == header


def read_in_place(layout: HostLayout, keys: KeyArray) -> tuple[FloatArray, BoolArray]:
    """What a device that looks once at each key answers: (n, dim) vectors, and (n,) which rows of them are valid."""
    out = np.full((keys.size, int(layout.words[VECTOR_BYTES]) // 4), np.nan, np.float32)
    answered = np.zeros(keys.size, np.bool_)
    _read(layout.words, layout.slabs, keys, out, answered)
    return out, answered
