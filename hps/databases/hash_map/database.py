"""The hash map: every table in the memory of this process."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self, get_args

import numpy as np

from hps.databases.base import InProcessDatabase, TableStats
from hps.databases.hash_map.eviction import OverflowRule, Policy
from hps.databases.hash_map.memory import MAX_ROWS
from hps.databases.hash_map.table import SLICE_ROWS, Table
from hps.errors import ConfigError, InvalidInputError, NotReadyError, TableWidthError, UnknownTableError
from hps.input_checks import check_fetch, check_keys, check_positive, check_rows
from hps.types import BoolArray, FloatArray, KeyArray

_UNBOUNDED: Final = 2**64 - 1


class HashMapDatabase(InProcessDatabase):
    """A volatile database in process memory (`"type": "hash_map"` or `"parallel_hash_map"`). *Thread-safe.*

    Lookups take no lock, release the GIL, and go on beside one writer a table (`hash_map_layout.py` says why no vector is
    torn). Many threads, or partitions, are not needed to make them fast; partitions count for `overflow_margin` alone.

    Memory of a table beyond its vectors, bytes a row: a bucket of 128 bytes has ten entries; it holds, on average, nine
    rows when its segment grows, and 7.2 after that, for a segment grows by a quarter: 14.2 to 17.8. A stamp, for
    `evict_least_used` and `evict_oldest`, takes 4. Slabs are committed by the page (by 2 MB from 2^20 rows on, which may
    leave 2 bytes a row unused), the list of free rows lies in the free rows themselves, and without a margin there is
    nothing else. So 14 to 20, with stamps to 24, and a sixteenth of 14 for the moment of a growth; tables of less than
    10,000 rows take some pages more. Rows that were deleted or evicted keep their memory for the rows that come after them.
    """

    kind = "hash_map"

    def __init__(
        self,
        *,
        num_partitions: int = 16,
        allocation_rate: int = 256 << 20,
        overflow_margin: int = _UNBOUNDED,
        overflow_policy: Policy = "evict_random",
        overflow_resolution_target: float = 0.8,
        max_batch_size: int = 65_536,
        timeout_s: float = 10.0,
        initial_buckets: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a database without tables.

        Args:
            num_partitions: parts of a table that `overflow_margin` bounds, each by itself.
            allocation_rate: bytes to ask the system for at once, at most, when a table grows.
            overflow_margin: most rows of a partition; see `hash_map_eviction.py`.
            overflow_policy: which rows go when a partition would exceed it.
            overflow_resolution_target: share of the margin to leave in a partition that would exceed it.
            max_batch_size: rows that the overflow rule takes for one batch; an insertion of more is as many, one by one.
            timeout_s: how long a call waits for other writers.
            initial_buckets: buckets of an empty table.
            clock: seconds that never go back; `evict_oldest` tells them apart to a sixteenth.

        Raises:
            ConfigError: an argument is out of range.
        """
        problems = [
            f"{name}: got {value!r}, wanted {wanted}"
            for name, value, wanted, good in (
                ("num_partitions", num_partitions, "at least 1", num_partitions >= 1),
                ("allocation_rate", allocation_rate, "at least 1 byte", allocation_rate >= 1),
                ("overflow_margin", overflow_margin, "at least 1", overflow_margin >= 1),
                ("overflow_policy", overflow_policy, f"one of {get_args(Policy)}", overflow_policy in get_args(Policy)),
                ("overflow_resolution_target", overflow_resolution_target, "0 to 1", 0 <= overflow_resolution_target <= 1),
                ("max_batch_size", max_batch_size, "1 to 2^31 - 1", 1 <= max_batch_size < 2**31),
                ("timeout_s", timeout_s, "more than 0", timeout_s > 0),
                ("initial_buckets", initial_buckets, "1 to 2^29", 1 <= initial_buckets <= 2**29),
            )
            if not good
        ]
        if problems:
            raise ConfigError(self.kind, problems)
        self._overflow: OverflowRule | None = None
        if overflow_margin <= MAX_ROWS:  # a larger one cannot be exceeded
            target_rows = round(overflow_margin * overflow_resolution_target)
            self._overflow = OverflowRule(num_partitions, overflow_margin, target_rows, overflow_policy)
        self._allocation_rate = allocation_rate
        self._batch_rows = max_batch_size if self._overflow else SLICE_ROWS
        self._timeout_s = timeout_s
        self._initial_buckets = initial_buckets
        self._clock = clock
        self._tables: dict[str, Table] = {}
        self._closed = False

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(
            num_partitions=config.num_partitions,
            allocation_rate=config.allocation_rate,
            overflow_margin=config.overflow_margin,
            overflow_policy=config.overflow_policy,
            overflow_resolution_target=config.overflow_resolution_target,
            max_batch_size=config.max_batch_size,
        )

    def open_table(self, tag: str, dim: int) -> None:
        self._check_open()
        check_positive(f"hash map: opening table {tag}", "dim", dim)
        table = self._tables.get(tag)
        if table is None:
            table = self._tables.setdefault(
                tag,
                Table(
                    tag,
                    dim,
                    allocation_rate=self._allocation_rate,
                    initial_buckets=self._initial_buckets,
                    batch_rows=self._batch_rows,
                    overflow=self._overflow,
                    timeout_s=self._timeout_s,
                    clock=self._clock,
                ),
            )
        if table.dim != dim:
            raise TableWidthError(
                f"hash map: opening table {tag!r}: got vectors of {dim} elements, wanted {table.dim}, which it holds; "
                "drop the table first, or give it another name"
            )

    def fetch(self, tag: str, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        table, doing = self._table(tag), f"hash map: fetching from table {tag}"
        keys, out, found = check_fetch(doing, keys, out, found, table.dim)
        _check_aligned(doing, keys, out)
        return table.fetch(keys, out, found)

    def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None:
        table, doing = self._table(tag), f"hash map: inserting into table {tag}"
        keys, vectors = check_rows(doing, keys, vectors, table.dim)
        _check_aligned(doing, keys, vectors)
        table.insert(keys, vectors)

    def delete(self, tag: str, keys: KeyArray) -> int:
        table, doing = self._table(tag), f"hash map: deleting from table {tag}"
        keys = check_keys(doing, keys)
        _check_aligned(doing, keys, keys)
        return table.delete(keys)

    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        table = self._table(tag)
        check_positive(f"hash map: scanning table {tag}", "chunk_rows", chunk_rows)
        return table.scan(chunk_rows)

    def size(self, tag: str) -> int:
        return self._table(tag).rows

    def stats(self, tag: str) -> TableStats:
        return self._table(tag).stats()

    def tags(self) -> list[str]:
        self._check_open()
        return sorted(self._tables)

    def drop_table(self, tag: str) -> None:
        self._check_open()
        self._tables.pop(tag, None)

    def close(self) -> None:
        self._closed = True
        self._tables = {}

    def reserve(self, tag: str, rows: int) -> None:
        """Make room in the buckets of a table for `rows` in all, so that inserting them need not grow it step by step.

        A hint for loaders; memory for the vectors is committed by the rows that really come.

        Raises:
            DatabaseError: no memory, or more rows than there can be.
        """
        self._table(tag).reserve(rows)

    def _check_open(self) -> None:
        if self._closed:
            raise NotReadyError("hash map: this database is closed; open another")

    def _table(self, tag: str) -> Table:
        try:
            return self._tables[tag]
        except KeyError:
            self._check_open()
            raise UnknownTableError(f"hash map: there is no table {tag!r}; open_table makes one") from None


def _check_aligned(doing: str, first: np.ndarray, second: np.ndarray) -> None:
    """Refuse arrays that numba's kernels cannot take."""
    if not (first.flags.aligned and second.flags.aligned):
        raise InvalidInputError(f"{doing}: got an array whose elements are not aligned in memory; copy it")
