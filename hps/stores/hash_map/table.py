"""One table of the hash map: serialises its writers, and grows."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseError, DatabaseTimeoutError
from hps.ground.log_limits import LineLimit
from hps.stores.base import UNBOUNDED_ROWS, TableStats
from hps.stores.hash_map.eviction import ACCESS, HashMapOverflow
from hps.stores.hash_map.in_place import TableInPlace
from hps.stores.hash_map.integrity import TableIntegrity
from hps.stores.hash_map.kernels import (
    NO_BUCKETS,
    NO_ROWS,
    count_holes,
    count_present,
    delete,
    fetch,
    insert,
    scan,
    show_all_holes,
)
from hps.stores.hash_map.layout import BUSY, DONE, KEEP, ROWS, STAMP
from hps.stores.hash_map.memory import MAX_ROWS, Buckets, Slabs, dense_rows
from hps.types import BoolArray, FloatArray, KeyArray

SLICE_ROWS: Final = 16_384
"""Rows that an insertion or a deletion writes before another writer may take its turn."""
_SCAN_ROWS: Final = 4096
_BACKOFF_S: Final = 50e-6
_STAMPS_A_SECOND: Final = 16
_STAMP_LIMIT: Final = 2**32 - 1
_ALL_KEYS: Final = np.empty(0, np.bool_)
_log = logging.getLogger(__name__)


class HashMapTable:
    """Vectors of one width by key. *Thread-safe.*

    Readers take no lock. They wait only while a writer changes the bucket that they read. Writers wait for one another, and a
    long call lets others in between its slices.

    Readers keep references to the buckets and to the table, and so to its slabs. So outgrown buckets are unmapped, and a
    dropped table is freed, when the last reader has finished.
    """

    def __init__(
        self,
        tag: str,
        dim: int,
        *,
        allocation_rate: int,
        initial_buckets: int,
        batch_rows: int,
        overflow: HashMapOverflow | None,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.dim = dim
        self._tag = tag
        self._timeout_s = timeout_s
        self._clock = clock
        self._opened_at = clock()
        self._overflow = overflow
        self._batch_rows = batch_rows
        self._access = ACCESS[overflow.policy] if overflow else KEEP
        self._slabs = Slabs(tag, dim * 4, self._access != KEEP, allocation_rate)
        self._buckets = Buckets.empty(tag, self._slabs, initial_buckets)
        self._partition_rows: npt.NDArray[np.int64] = np.zeros(overflow.partitions if overflow else 0, np.int64)
        self._random: npt.NDArray[np.uint64] = np.zeros(2, np.uint64)
        self._evictions = self._evictions_logged = 0
        self._eviction_lines = LineLimit()
        self._writer = threading.Lock()
        self._outgrown: Buckets | None = None
        self.in_place = TableInPlace(tag, self)

    def fetch(
        self,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, dim)
        found: BoolArray,  # (n,)
    ) -> int:
        filled: int = 0
        position = 0
        now = self._now()
        deadline = None
        spare = np.empty(self.dim, np.float32)
        while True:
            buckets = self._buckets  # this reference keeps the memory mapped while the kernel reads it
            more, position, state = fetch(buckets.layout, keys, out, found, spare, position, self._access, now)
            filled += more
            if state == DONE:
                return filled
            if state == BUSY:
                # The writer was descheduled in the middle of a bucket, and may need this processor to finish it. The
                # kernel has retried before.
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise DatabaseTimeoutError(
                        f"hash map: fetching {keys.size} keys of table {self._tag!r}: a bucket stayed half-written for "
                        f"{self._timeout_s} s; the machine is overloaded, or the writing thread was stopped by a debugger"
                    )
                time.sleep(_BACKOFF_S)

    def insert(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """As `Database.insert`, in batches; the overflow rule applies to each."""
        for start in range(0, keys.size, self._batch_rows):
            batch = slice(start, start + self._batch_rows)
            with self.writing(f"inserting {keys.size} keys"):
                if start == 0:
                    self._check_row_numbers(keys)
                self._enter(keys[batch], vectors[batch])
            if self._evictions > self._evictions_logged and self._eviction_lines.take():
                self._log_evictions()

    def delete(self, keys: KeyArray) -> int:
        deleted = 0
        for start in range(0, keys.size, SLICE_ROWS):
            with self.writing(f"deleting {keys.size} keys"):
                deleted += delete(
                    self._buckets.layout,
                    self._slabs.counters,
                    self._buckets.segment_rows,
                    self._partition_rows,
                    keys[start : start + SLICE_ROWS],
                )
        return deleted

    def scan(self, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """As `Database.scan`. Writers write between two steps of the scan."""
        cursor, state = np.zeros(1, np.uint64), NO_ROWS
        room = max(min(chunk_rows, self.rows), _SCAN_ROWS)
        while state != DONE:
            keys, vectors = np.empty(room, np.int64), np.empty((room, self.dim), np.float32)
            with self.writing("scanning"):
                rows, state = scan(self._buckets.layout, cursor, keys, vectors)
            if rows == 0:
                room *= 2
            for start in range(0, rows, chunk_rows):
                stop = min(start + chunk_rows, rows)
                yield keys[start:stop], vectors[start:stop]

    def reserve(self, rows: int, keys: Iterable[KeyArray] = ()) -> None:
        """Map memory for `rows` in total at once: growth in steps would move buckets and spread rows over extents.

        Args:
            keys: the keys of these rows, if known: an empty table is dense if they are. Read without a lock.
        """
        dense = dense_rows(rows, keys) if self._overflow is None and not self._slabs.extents and rows <= MAX_ROWS else 0
        with self.writing(f"reserving {rows} rows"):
            if rows > MAX_ROWS:
                raise self._too_many(f"reserving {rows} rows")
            if self._overflow:
                rows = min(rows, self.capacity_rows)
            larger = self._buckets
            if dense and not self._slabs.extents:
                self._slabs.reserve_dense(dense)
                larger = larger.with_current_slabs()
                count_holes(larger.layout)
                show_all_holes(larger.layout)
                _log.info(
                    "hash map: table %r is dense: its rows lie at the numbers of their keys, 0 to %d", self._tag, dense - 1
                )
            self._slabs.reserve(rows)
            self._replace_buckets(larger.with_room_for(rows))

    @property
    def rows(self) -> int:
        return int(self._slabs.counters[ROWS])

    @property
    def capacity_rows(self) -> int:
        """Number of rows at which the table evicts, or `UNBOUNDED_ROWS`."""
        return self._overflow.partitions * self._overflow.margin if self._overflow else UNBOUNDED_ROWS

    @property
    def records_accesses(self) -> bool:
        return self._access != KEEP

    @property
    def memory(self) -> tuple[Buckets, Slabs]:
        return self._buckets, self._slabs

    def share(self) -> None:
        self._slabs.share()
        self._buckets = self._buckets.with_current_slabs()
        show_all_holes(self._buckets.layout)

    def log_changes(self) -> None:
        self._slabs.log_changes()
        self._buckets = self._buckets.with_current_slabs()
        self._show_growth()

    def stats(self) -> TableStats:
        """Return the size; the overhead is the committed memory beside the vectors: buckets, stamps, free rows."""
        rows = self.rows
        vector_bytes = rows * self._slabs.vector_bytes
        committed = self._buckets.size_bytes + self._slabs.committed_bytes() + self._partition_rows.nbytes
        return TableStats(rows, vector_bytes, committed - vector_bytes, self.capacity_rows, self._evictions)

    def check_integrity(self) -> None:
        """Check the invariants of `layout.py`, while writers wait; it takes seconds for 10 M rows."""
        with self.writing("checking"):
            TableIntegrity(self._tag, self._buckets, self._slabs).check(self._partition_rows, self._overflow)

    def further_bytes(self, rows: int) -> int:
        """Estimate how many more bytes the table needs for a total of `rows`, or for as many as it may hold."""
        rows = min(rows, self.capacity_rows)
        return self._slabs.further_bytes(rows) + self._buckets.bytes_with_room_for(rows) - self._buckets.size_bytes

    def bytes_for(self, rows: int) -> int:
        empty = self.stats()
        return empty.overhead_bytes + self.further_bytes(rows)

    def _now(self) -> int:
        if self._access != STAMP:
            return 0
        return min(int((self._clock() - self._opened_at) * _STAMPS_A_SECOND), _STAMP_LIMIT)

    @contextmanager
    def writing(self, doing: str) -> Iterator[None]:
        if not self._writer.acquire(timeout=self._timeout_s):
            raise DatabaseTimeoutError(
                f"hash map: {doing} of table {self._tag!r}: other threads wrote to it for all of {self._timeout_s} s; "
                "write fewer rows at once, or from fewer threads"
            )
        try:
            self._show_growth()  # left by a write that an interrupt ended
            yield
        finally:
            try:
                self.in_place.end_write(self._slabs)
            finally:
                self._writer.release()

    def _log_evictions(self) -> None:
        evicted, self._evictions_logged = self._evictions - self._evictions_logged, self._evictions
        _log.info(
            "hash map: table %r is full, %d rows were evicted since the last such line; its partitions hold at most "
            "%d rows (volatile_db.num_partitions x overflow_margin)",
            self._tag,
            evicted,
            self.capacity_rows,
        )

    def _check_row_numbers(self, keys: KeyArray) -> None:
        if self.rows + keys.size > MAX_ROWS:
            distinct = np.unique(keys)
            if self.rows + distinct.size - count_present(self._buckets.layout, distinct) > MAX_ROWS:
                raise self._too_many(f"inserting {keys.size} keys")

    def _too_many(self, doing: str) -> DatabaseError:
        return DatabaseError(
            f"hash map: {doing} of table {self._tag!r}, which has {self.rows}: it would have more than {MAX_ROWS} rows, the "
            "maximum; nothing was changed. Bound it with overflow_margin, or use a persistent database alone"
        )

    def _enter(self, keys: KeyArray, vectors: FloatArray) -> None:
        chosen = _ALL_KEYS
        if self._overflow:
            before = self.rows
            chosen = self._overflow.make_room(
                self._buckets.layout,
                self._slabs.counters,
                self._buckets.segment_rows,
                self._partition_rows,
                self._random,
                keys,
                self._slabs.capacity_rows,
            )
            self._evictions += before - self.rows
        position = 0
        while True:
            position, state, segment = insert(
                self._buckets.layout,
                self._slabs.counters,
                self._buckets.segment_rows,
                self._partition_rows,
                keys,
                vectors,
                chosen,
                (position, keys.size),
                (self._access, self._now()),
            )
            if state == DONE:
                return
            if state == NO_BUCKETS:
                self._replace_buckets(self._buckets.grown(segment))
            else:
                self._slabs.extend()
                self._show_growth()

    def _replace_buckets(self, larger: Buckets) -> None:
        """Redirect readers to larger buckets with the same rows, as the writer."""
        # Two generations exist until the old one is retired. If an interrupt ends this call in between, readers of the old one
        # still find every row, and the next writer retires it before it changes anything.
        self._outgrown = self._buckets
        self._buckets = larger
        self._show_growth()

    def _show_growth(self) -> None:
        """Show new memory to devices, and redirect readers of outgrown buckets, before the next write."""
        self.in_place.show(self._buckets, self._slabs)
        if self._outgrown is not None:
            self._outgrown.retire_segments_outside(self._buckets)
        self._outgrown = None
