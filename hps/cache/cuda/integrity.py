"""Checks the invariants of a table's buckets, on a copy of them in host memory. Imports no CuPy."""

import numpy as np

from hps.cache.cuda import structs
from hps.cache.cuda.kernels import SLOTS
from hps.cache.integrity import check_keys_of_sets, hashes_of, second_sets
from hps.types import IndexArray

_OCCUPIED_SHIFT, _STRAYS_SHIFT = 16, 24  # of bytes 2 and 3 of a header
_MOST_STRAYS = 255  # of a static table: may be any number


def check_buckets(tag: str, buckets: IndexArray, packed: bytes, *, static: bool, counted_rows: int) -> list[str]:
    """Check the buckets of a table at rest; `cuda/embedding_cache.cuh` and `cuda/static_tables.cuh` describe them.

    Args:
        buckets: (2 pairs, 8) int64: headers and keys.
        packed: the table's `structs.TABLE`.
        counted_rows: resident rows by its counters.

    Returns:
        A sentence for each broken invariant.
    """
    headers, slots = buckets[:, 0], buckets[:, 1:]
    _buckets, _rows, _counters, zero_filler, zero_pair, pairs, *_ = structs.TABLE.unpack(packed)
    if static:
        held = (headers[:, None] >> _OCCUPIED_SHIFT >> np.arange(SLOTS) & 1).astype(np.bool_)
    else:
        fillers = np.zeros(2 * pairs, np.int64)
        fillers[2 * zero_pair : 2 * zero_pair + 2] = zero_filler
        held = slots != fillers[:, None]
    places, _slots = np.nonzero(held)
    keys = slots[held]
    hashes = hashes_of(keys)
    homes = (hashes >> np.uint64(32)) * np.uint64(2 * pairs) >> np.uint64(32)
    others = homes ^ np.uint64(1)
    if static:
        others = np.uint64(2) * second_sets(hashes, homes // np.uint64(2), pairs) + homes % np.uint64(2)
    homes, others = homes.astype(np.int64), others.astype(np.int64)
    misplaced = int(np.count_nonzero((places != homes) & (places != others)))
    findings = check_keys_of_sets(tag, keys, int(np.count_nonzero(headers & 1)), misplaced, counted_rows)
    strays, counted = np.bincount(homes[homes != places], minlength=2 * pairs), headers >> _STRAYS_SHIFT & 0xFF
    if wrong := np.count_nonzero((strays != counted) & ~(static & (counted == _MOST_STRAYS))):
        findings.append(f"cached table {tag}: {wrong} buckets count a wrong number of strays")
    return findings
