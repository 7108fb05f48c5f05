"""Checks the invariants of a table's buckets, on a copy of them in host memory. Imports no CuPy."""

import numpy as np

from hps.cache.cuda import structs
from hps.cache.cuda.kernels import SLOTS
from hps.cache.integrity import check_keys_of_sets, hashes_of
from hps.types import IndexArray

_OCCUPIED_SHIFT, _STRAYS_SHIFT = 16, 24  # of bytes 2 and 3 of a header


def check_buckets(tag: str, buckets: IndexArray, packed: bytes, *, static: bool, counted_rows: int) -> list[str]:
    """Check the buckets of a table at rest; `cuda/embedding_cache.cuh` and `cuda/walk.cuh` describe them.

    Args:
        buckets: (2 pairs, 8) int64: headers and keys.
        packed: the table's `structs.TABLE`.
        counted_rows: resident rows by its counters.

    Returns:
        A sentence for each broken invariant.
    """
    headers, slots = buckets[:, 0], buckets[:, 1:]
    owned = int(np.count_nonzero(headers & 1))
    if static:
        occupied = (headers[:, None] >> _OCCUPIED_SHIFT >> np.arange(SLOTS) & 1).astype(np.bool_)
        return check_keys_of_sets(tag, slots[occupied], owned, 0, counted_rows)
    _buckets, _rows, _counters, zero_filler, zero_pair, pairs, *_ = structs.TABLE.unpack(packed)
    fillers = np.zeros(2 * pairs, np.int64)
    fillers[2 * zero_pair : 2 * zero_pair + 2] = zero_filler
    places, _slots = held_at = np.nonzero(slots != fillers[:, None])
    keys = slots[held_at]
    homes = ((hashes_of(keys) >> np.uint64(32)) * np.uint64(2 * pairs) >> np.uint64(32)).astype(np.int64)
    findings = check_keys_of_sets(tag, keys, owned, int(np.count_nonzero(homes // 2 != places // 2)), counted_rows)
    strays = np.bincount(homes[homes != places], minlength=2 * pairs)
    if wrong := np.count_nonzero(strays != headers >> _STRAYS_SHIFT & 0xFF):
        findings.append(f"cached table {tag}: {wrong} buckets count a wrong number of strays in their neighbours")
    return findings
