"""The hash map: a database in the memory of this process."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from hps.errors import DatabaseCorruptError, TableWidthError, UnknownTableError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.memory.capacity import Need, available_memory, by_purpose, check_fits
from hps.ground.memory.host_tables import HostTable
from hps.ground.threads.lifetimes import disown_in_children, refusal
from hps.stores.base import (
    UNBOUNDED_ROWS,
    AgingRows,
    DeviceReadable,
    ExpiredRows,
    InProcessDatabase,
    LoadRecord,
    LogPosition,
    Partition,
    RowChanges,
    TableStats,
)
from hps.stores.hash_map import kernels
from hps.stores.hash_map.eviction import EVICTION_KERNELS, HashMapOverflow, Policy
from hps.stores.hash_map.memory import MAX_ROWS, size_of_buckets
from hps.stores.hash_map.sequence_table import SequenceTable
from hps.stores.hash_map.table import SLICE_ROWS, HashMapTable
from hps.tensors.array_checks import check_fetch, check_keys, check_positive, check_rows
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, stored_text

_CHUNK_ROWS = 65_536  # of changes at a time


class HashMapDatabase(InProcessDatabase, AgingRows, DeviceReadable):
    """A volatile database in process memory (`"type": "hash_map"` or `"parallel_hash_map"`). *Thread-safe.*

    Lookups take no lock, release the GIL, and run beside one writer per table; `layout.py` explains why no vector is torn. They
    need neither threads nor partitions; partitions matter only to `overflow_margin`.

    **Memory beyond the vectors** is 14 to 20 bytes per row. A bucket of 128 bytes holds nine rows on average when its segment
    grows, and 7.2 afterwards: 14.2 to 17.8 bytes per row. A stamp, for `evict_least_used` and `evict_oldest`, takes 4 more.
    Slabs are committed by the page (by 2 MB from 2^20 rows on, which may leave 2 bytes per row unused). Deleted and evicted
    rows keep their memory for later rows. Reserved rows from 64 MB on soon take all their memory, with a 256th to spare. The
    memory of a table that devices read in place is committed and pinned, and grows by a sixty-fourth at a time.
    """

    kind = "hash_map"
    rows_worth_a_thread = 1024

    def __init__(
        self,
        *,
        num_partitions: int = 16,
        allocation_rate: int = 256 << 20,
        overflow_margin: int = UNBOUNDED_ROWS,
        overflow_policy: Policy = "evict_random",
        overflow_resolution_target: float = 0.8,
        max_batch_size: int = 65_536,
        timeout_s: float = 10.0,
        initial_buckets: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a database without tables. `max_batch_size` bounds the batches of the overflow rule (`eviction.py`).

        Args:
            timeout_s: how long a call waits for other writers.
            initial_buckets: buckets of an empty table.
            clock: monotonic seconds; `evict_oldest` distinguishes sixteenths of a second.
        """
        compile_kernels(*_kernels(overflow_margin))
        self._overflow: HashMapOverflow | None = None
        if _evicts(overflow_margin):
            target_rows = round(overflow_margin * overflow_resolution_target)
            self._overflow = HashMapOverflow(num_partitions, overflow_margin, target_rows, overflow_policy)
        self._new_table = partial(
            HashMapTable,
            allocation_rate=allocation_rate,
            initial_buckets=initial_buckets,
            batch_rows=max_batch_size if self._overflow else SLICE_ROWS,
            overflow=self._overflow,
            timeout_s=timeout_s,
            clock=clock,
        )
        self._timeout_s = timeout_s
        self._tables: dict[str, HashMapTable] = {}
        self._orders: dict[str, SequenceTable] = {}  # of the tables that follow a log
        self._closed = False
        disown_in_children(self)

    @classmethod
    def kernels(cls, config: Any) -> Sequence[Callable[..., Any]]:
        return _kernels(config.overflow_margin)

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
        table = self._tables.get(tag) or self._tables.setdefault(tag, self._new_table(tag, dim))
        if table.dim != dim:
            raise TableWidthError(
                f"hash map: opening table {tag!r}: got vectors of {dim} elements, expected {table.dim}, which it holds; "
                "drop the table first, or give it another name"
            )

    def fetch(self, tag: str, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        table, doing = self._table(tag), f"hash map: fetching from table {tag}"
        return table.fetch(*check_fetch(doing, keys, out, found, table.dim, aligned=True))

    def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None:
        table, doing = self._table(tag), f"hash map: inserting into table {tag}"
        (self._orders.get(tag) or table).insert(*check_rows(doing, keys, vectors, table.dim, aligned=True))

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        self._orders.pop(tag, None)  # the rows are older than any change
        self.insert(tag, keys, vectors)

    def delete(self, tag: str, keys: KeyArray) -> int:
        table = self._table(tag)
        return (self._orders.get(tag) or table).delete(check_keys(f"hash map: deleting from table {tag}", keys, aligned=True))

    def follow_log(self, tag: str) -> dict[Partition, LogPosition]:
        return dict(self._order(tag).positions)

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        order, dim = self._order(tag), self._table(tag).dim
        check_rows(f"hash map: updating table {tag}", changes.keys, changes.vectors, dim, aligned=True)
        return order.apply(changes, positions)

    def order_by_time(self, tag: str) -> None:
        self._order(tag).by_time = True

    def changed_rows_of(self, tag: str) -> Iterator[tuple[KeyArray, IndexArray]]:
        return self._order(tag).changed_rows(_CHUNK_ROWS)

    def last_changes(self, tag: str, keys: KeyArray) -> IndexArray:
        return self._order(tag).last_changes(check_keys(f"hash map: reading changes of table {tag}", keys, aligned=True))

    def expire(self, tag: str, keys: KeyArray, sequence: int, *, loaded: bool = False) -> ExpiredRows:
        keys = check_keys(f"hash map: expiring rows of table {tag}", keys, aligned=True)
        return self._order(tag).expire(keys, sequence, loaded=loaded)

    def _order(self, tag: str) -> SequenceTable:
        table, order = self._table(tag), self._orders.get(tag)
        if order is None:
            sequences = self._new_table(f"{tag} (sequences)", 2, batch_rows=SLICE_ROWS, overflow=None)
            order = self._orders.setdefault(tag, SequenceTable(table, sequences, self._timeout_s))
        return order

    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        table = self._table(tag)
        check_positive(f"hash map: scanning table {tag}", "chunk_rows", chunk_rows)
        return table.scan(chunk_rows)

    def stats(self, tag: str) -> TableStats:
        return self._table(tag).stats()

    @classmethod
    def room_for(cls, config: Any, tables: Sequence[tuple[str, int, int]]) -> list[Need]:
        database = cls.from_config(config)
        try:
            return database._needs(tables)
        finally:
            database.close()

    @classmethod
    def index_bytes(cls, rows: int) -> int:
        return size_of_buckets(rows)

    def _needs(self, tables: Sequence[tuple[str, int, int]]) -> list[Need]:
        found = []
        for tag, dim, rows in tables:
            table = self._tables.get(tag)
            size_bytes = table.further_bytes(rows) if table else self._new_table(tag, dim).bytes_for(rows)
            found.append(Need("ram", f"{rows:,} rows of table {tag} ({stored_text(tag, dim)})", size_bytes, tag))
        return found

    def check_room(self, tables: Sequence[tuple[str, int, int]]) -> None:
        self._check_open()
        check_fits(
            "hash map: making room for tables",
            by_purpose(self._needs(tables)),
            *available_memory(),
            "undeploy models or versions, give the process more memory, or bound the tables with overflow_margin",
        )

    def drop_table(self, tag: str) -> None:
        self._check_open()
        self._orders.pop(tag, None)
        table = self._tables.pop(tag, None)
        if table:
            table.in_place.close()

    def close(self) -> None:
        self._closed = True
        for tag in list(self._orders):
            self._orders.pop(tag, None)
        tables, self._tables = self._tables, {}
        for table in tables.values():
            table.in_place.close()

    def disown(self) -> None:
        """Refuse every call in a forked child, where the parent's writers may have stopped in the middle of a bucket."""
        self._closed = True
        self._inherited, self._tables = self._tables, {}  # still referenced: only the parent may unpin their memory

    def host_table(self, tag: str) -> HostTable:
        return self._table(tag).in_place

    def reserve(self, tag: str, rows: int, keys: Iterable[KeyArray] = ()) -> None:
        """Reserve memory for `rows` in total; vectors are then ordered, in a dense table by key."""
        self._table(tag).reserve(rows, keys)

    def check_integrity(self) -> list[str]:
        """Return the first broken invariant of each table. Writers of a table wait meanwhile: seconds for 10 M rows."""
        findings = []
        for table in list(self._tables.values()):
            try:
                table.check_integrity()
            except DatabaseCorruptError as error:
                findings.append(str(error))
        return findings

    def _check_open(self) -> None:
        if self._closed:
            raise refusal(self, "a hash map")

    def _table(self, tag: str) -> HashMapTable:
        try:
            return self._tables[tag]
        except KeyError:
            self._check_open()
            raise UnknownTableError(f"hash map: there is no table {tag!r}; open_table makes one") from None


def _evicts(overflow_margin: int) -> bool:
    return overflow_margin <= MAX_ROWS  # a larger margin cannot be exceeded


def _kernels(overflow_margin: int) -> tuple[Callable[..., Any], ...]:
    """Return the kernels of lookups, loads and writes; scans compile theirs."""
    used = (
        kernels.fetch,
        kernels.insert,
        kernels.delete,
        kernels.rehash,
        kernels.retire,
        kernels.count_by_hash,
        kernels.count_present,
    )
    dense = (kernels.mark_keys, kernels.count_holes, kernels.show_all_holes)
    return (*used, *EVICTION_KERNELS) if _evicts(overflow_margin) else (*used, *dense)
