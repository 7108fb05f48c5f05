"""Computes the memory of the embedding cache on a CUDA device and in pinned host memory. Imports no CuPy."""

from collections.abc import Sequence

from hps.cache.base import ALONE, STATIC_LOAD, CachePlan, DeviceSharing
from hps.cache.cuda import kernels
from hps.ground.memory.capacity import Need
from hps.types import TableSpec, rows_text

COUNTERS = 8  # keys admitted, evicted and erased; then those of static tables, see `cuda/static_tables.cuh`
LOOKUP_COUNTERS = slice(4, 6)  # absent and unread keys of enqueued lookups of complete tables
COMPLETE_AT = 8 * 6  # bytes from the first counter to the flag of complete static tables
RESERVE_BYTES = 64 << 20  # reserved for the lookups and the driver
GRANULE_BYTES = 1 << 21
"""Memory of several devices under one range of addresses is a multiple of this."""
LEAST_KEYS = 1 << 14  # initial size of a lookup's lists


def bucket_bytes(pairs: int) -> int:
    return -(-kernels.PAIR_BYTES * pairs // 256) * 256


def row_bytes(pairs: int, width: int) -> int:
    return -(-2 * kernels.SLOTS * pairs * 4 * width // 256) * 256


def size_bytes(pairs: int, width: int) -> int:
    """Return the bytes of a table: buckets, rows, counters."""
    return bucket_bytes(pairs) + row_bytes(pairs, width) + 8 * COUNTERS if pairs else 0


def copy_bytes(pairs: int) -> int:
    """Return the bytes of each copy of the buckets of a shared table, with its `Sharing`."""
    return granules(kernels.SHARING_BYTES + bucket_bytes(pairs)) * GRANULE_BYTES


def part_bytes(pairs: int, width: int, devices: int) -> list[int]:
    """Return the bytes of the rows of a shared table on each device, by the pairs that lie there; the counters on the last."""
    total = granules(row_bytes(pairs, width) + 8 * COUNTERS)
    each = -(-pairs // devices) * 2 * kernels.SLOTS * 4 * width
    stops = [min(total, granules(each * nth)) for nth in range(1, devices)]
    starts = [0, *stops]
    return [GRANULE_BYTES * (stop - start) for start, stop in zip(starts, [*stops, total], strict=True)]


def owned_pairs(pairs: int, width: int, devices: int, nth: int) -> tuple[int, int]:
    """Return the first pair of a shared table whose rows start on the nth device, and the number of such pairs."""
    parts, pair_bytes = part_bytes(pairs, width, devices), 2 * kernels.SLOTS * 4 * width
    first, stop = (min(pairs, -(-sum(parts[:end]) // pair_bytes)) for end in (nth, nth + 1))
    return first, stop - first


def bytes_on_device(pairs: int, width: int, devices: int, near_pairs: int = 0) -> int:
    """Return the most bytes that a table takes on one of its devices, with its near table."""
    if devices == 1 or not pairs:
        return size_bytes(pairs, width)
    return copy_bytes(pairs) + max(part_bytes(pairs, width, devices)) + size_bytes(near_pairs, width)


def granules(needed: int) -> int:
    return -(-needed // GRANULE_BYTES)


def grown(needed: int) -> int:
    """Return the size of a buffer for `needed` bytes."""
    return max(1 << 16, 1 << (needed - 1).bit_length()) if needed < 1 << 28 else -(-needed // (1 << 26)) << 26


def list_bytes(keys: int) -> int:
    """Return the bytes of a lookup's lists of `keys` keys, a power of two."""
    return 24 * keys


def count_bytes(tables: int) -> int:
    """Return the bytes of a lookup's counts: two tallies, misses, keys left and leaders by segment, then `Progress`."""
    return 4 * (5 * tables + 4)


class CudaPlan(CachePlan):
    """Memory needs of caches on CUDA devices. *Immutable.*"""

    @classmethod
    def room_for(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> list[Need]:
        """Return the device memory of the tables; see `CachePlan.room_for`."""
        pairs = [kernels.pairs_for(rows, static) for rows in capacity_rows]
        used = f", static: {STATIC_LOAD:.0%} used" if static else ""
        devices = max(1, len(sharing.device_ids))
        near = [kernels.pairs_for(rows) for rows in sharing.near_rows] or [0] * len(tables)
        return [
            Need(
                "gpu",
                f"{2 * kernels.SLOTS * (-(-count // devices) + near_count):,} rows of table {table.table_name!r} "
                f"({rows_text(table)}{used})",
                bytes_on_device(count, table.width, devices, near_count),
                table.table_name,
            )
            for table, count, near_count in zip(tables, pairs, near, strict=True)
        ]

    @classmethod
    def workspaces_for(cls, tables: Sequence[TableSpec], workspaces: int) -> list[Need]:
        """Return the maximum memory of lookups: each of the largest size allowed, with keys and outputs in host memory.

        A lookup starts with lists of 16,384 keys, and grows to the largest that it served.
        """
        keys = sum(table.max_keys for table in tables)
        floats = sum(4 * table.max_keys * table.dim for table in tables)
        listed = 1 << (max(keys, LEAST_KEYS) - 1).bit_length()
        on_device = grown(list_bytes(listed)) + grown(count_bytes(len(tables))) + grown(floats)
        # keys, masks and outputs; fetched vectors and their masks
        on_host = grown(9 * keys + 2 * floats + keys) + grown(8 * listed) + (1 << 16)
        return [
            Need("gpu", f"{workspaces} workspaces of lookups, at most", workspaces * on_device),
            Need("pinned", f"{workspaces} workspaces of lookups, at most", workspaces * on_host),
        ]
