"""The volatile database that several processes share: a Redis server or a Redis Cluster."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, Self, Unpack

from hps.errors import DatabaseError, UnknownTableError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.memory.capacity import Need
from hps.ground.threads.workers import WorkQueue
from hps.statistics.metrics import Metrics
from hps.stores.base import (
    UNBOUNDED_ROWS,
    AgingRows,
    CopyOutcome,
    ExpiredRows,
    LoadRecord,
    LogPosition,
    Partition,
    PersistentDatabase,
    RowChanges,
    SharedDatabase,
    TableStats,
)
from hps.stores.redis.catalog import Catalog
from hps.stores.redis.codec import group_by_partition, read_rows, write_fields, write_rows
from hps.stores.redis.layout import RedisLayout
from hps.stores.redis.load_leases import LoadLeases
from hps.stores.redis.marks import TableAuthority
from hps.stores.redis.nodes import Access, RedisNodes, access_of, evicts_any_key
from hps.stores.redis.overflow import Overflow, Policy
from hps.stores.redis.server_check import check_room, check_server, partition_bytes
from hps.stores.redis.table import RedisTable
from hps.stores.redis.users import TableUsers
from hps.tensors.array_checks import check_fetch, check_keys, check_positive, check_rows
from hps.types import BoolArray, CheckResult, FloatArray, IndexArray, KeyArray, TableSpec, stored_text

_log = logging.getLogger(__name__)
_KERNELS: Final = (group_by_partition, write_fields, write_rows, read_rows)
_OPENINGS: Final = 8  # attempts while other processes empty the table
_USES_PAUSE_S: Final = 1.0  # after a failure
_USES_WAITING: Final = 64  # batches of found keys to record; more are dropped


class RedisDatabase(SharedDatabase, AgingRows):
    """Tables in Redis (`"type": "redis_cluster"` or `"redis"`), laid out as HugeCTR HPS does. *Thread-safe.*

    A node reports whether it is a cluster. Every wait has a timeout: a dead, paused or slow node fails the call. Connections
    are bounded; a failed one is never reused. See `layout.py` for the keys and `docs/redis.md` for failures.
    """

    kind = "redis_cluster"

    def __init__(
        self,
        address: str = "127.0.0.1:7000",
        *,
        num_partitions: int = 16,
        max_batch_size: int = 65_536,
        overflow_margin: int = UNBOUNDED_ROWS,
        overflow_policy: Policy = "evict_random",
        overflow_resolution_target: float = 0.8,
        lease_s: float = 30.0,
        use_lease_s: float = 60.0,
        metrics: Metrics | None = None,
        **access: Unpack[Access],
    ) -> None:
        """Connect. Arguments that the configuration has, too, are as in `volatile_db`.

        Args:
            access: as for `RedisNodes`.
            max_batch_size: maximum keys per timeout; a call with more has several.
            lease_s: maximum silence of a loading process before another takes over.
            use_lease_s: how long a dead process counts as a user of its open tables.
            metrics: counts dropped records of uses.

        Raises:
            DatabaseError: no node can be reached, or it refuses the user.
        """
        compile_kernels(*_KERNELS)
        self._batch = max_batch_size
        self._num_partitions = num_partitions
        self._nodes = RedisNodes(address, **access)
        self._warn_of_eviction(self._nodes.facts)
        target_rows = round(overflow_margin * overflow_resolution_target)
        self._overflow = Overflow(self._nodes, overflow_margin, target_rows, overflow_policy)
        self._catalog = Catalog(self._nodes, num_partitions)
        self._users = TableUsers(self._nodes, self._catalog, use_lease_s)
        self._leases = LoadLeases(self._nodes, self._catalog, self._users, lease_s)
        self._tables: dict[str, RedisTable] = {}
        self._below: dict[str, TableAuthority] = {}
        self._uses: WorkQueue | None = None
        self._uses_after = 0.0  # none are recorded before this time
        if self._overflow.records_uses:
            self._uses = WorkQueue("redis_uses", _USES_WAITING, 1, metrics or Metrics())
            self._uses.stop_with(self)

    @classmethod
    def kernels(cls, config: Any) -> Sequence[Callable[..., Any]]:
        return _KERNELS

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(
            config.address,
            num_partitions=config.num_partitions,
            max_batch_size=config.max_batch_size,
            overflow_margin=config.overflow_margin,
            overflow_policy=config.overflow_policy,
            overflow_resolution_target=config.overflow_resolution_target,
            **access_of(config),
        )

    @classmethod
    def probe(cls, config: Any, tables: Mapping[TableSpec, int]) -> list[CheckResult]:
        return check_server(config, tables)

    @property
    def clustered(self) -> bool:
        return self._nodes.clustered

    @property
    def open_connections(self) -> int:
        return self._nodes.open_connections

    def open_table(self, tag: str, dim: int) -> None:
        check_positive(f"redis: opening table {tag}", "dim", dim)
        layout = RedisLayout.of(tag, dim, self._num_partitions)
        self._users.register(layout)
        try:
            table = self._tables.get(tag)
            if table is None or table.layout != layout:
                below = self._below.setdefault(tag, TableAuthority(tag))
                table = RedisTable(layout, below, self._catalog, self._nodes, self._overflow, self._batch)
            for attempt in count(1):
                self._catalog.open(layout)
                try:
                    table.refresh_marks(opens=True)
                    break
                except UnknownTableError:  # a process that starts to load it has just emptied it
                    if attempt == _OPENINGS:
                        raise
            self._tables[tag] = table
        except BaseException:
            if tag not in self._tables:
                with suppress(DatabaseError):
                    self._users.unregister(layout)
            raise

    def stand_above(self, tag: str, database: PersistentDatabase, below: str = "") -> None:
        table = self._table(tag)
        self._below[tag] = table.below = TableAuthority(below or tag, database)
        table.refresh_marks(opens=True)
        if table.marks is None:
            _log.warning(
                "redis: table %s has the rows of another model than the database below; it is not used until that changes", tag
            )

    def fetch(self, tag: str, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        table = self._table(tag)
        keys, out, found = check_fetch(f"redis: fetching from table {tag}", keys, out, found, table.layout.dim)
        if not self._uses:
            return table.fetch(keys, out, found)
        before = found.copy()
        filled = table.fetch(keys, out, found)
        if filled:
            used = keys[found & ~before]
            self._uses.submit(lambda: self._record_uses(table, used))
        return filled

    def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None:
        table = self._table(tag)
        table.insert(*check_rows(f"redis: inserting into table {tag}", keys, vectors, table.layout.dim))

    def promote(self, tag: str, keys: KeyArray, vectors: FloatArray) -> int:
        table = self._table(tag)
        return table.promote(*check_rows(f"redis: promoting into table {tag}", keys, vectors, table.layout.dim))

    def delete(self, tag: str, keys: KeyArray) -> int:
        table = self._table(tag)
        return table.delete(check_keys(f"redis: deleting from table {tag}", keys))

    def follow_log(self, tag: str) -> dict[Partition, LogPosition]:
        return self._table(tag).follow_log()

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        table = self._table(tag)
        check_rows(f"redis: updating table {tag}", changes.keys, changes.vectors, table.layout.dim)
        return table.apply(changes, positions)

    def order_by_time(self, tag: str) -> None:
        self._table(tag).order_by_time()

    def changed_rows_of(self, tag: str) -> Iterator[tuple[KeyArray, IndexArray]]:
        return self._table(tag).changed_rows()

    def last_changes(self, tag: str, keys: KeyArray) -> IndexArray:
        return self._table(tag).last_changes(check_keys(f"redis: reading changes of table {tag}", keys))

    def expire(self, tag: str, keys: KeyArray, sequence: int, *, loaded: bool = False) -> ExpiredRows:
        return self._table(tag).expire(check_keys(f"redis: expiring rows of table {tag}", keys), sequence, loaded=loaded)

    def copy_changes(self, tag: str, changes: RowChanges) -> None:
        table = self._table(tag)
        check_rows(f"redis: updating table {tag}", changes.keys, changes.vectors, table.layout.dim)
        table.copy_changes(changes)

    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        table = self._table(tag)
        check_positive(f"redis: scanning table {tag}", "chunk_rows", chunk_rows)
        return table.scan(chunk_rows)

    def size(self, tag: str) -> int:
        return self._table(tag).size()

    def stats(self, tag: str) -> TableStats:
        return self._table(tag).stats()

    @classmethod
    def room_for(cls, config: Any, tables: Sequence[tuple[str, int, int]]) -> list[Need]:
        parts, margin = config.num_partitions, config.overflow_margin
        return [
            Need(
                "redis",
                f"{rows:,} rows of table {tag} ({stored_text(tag, dim)})",
                parts * partition_bytes(dim, min(-(-rows // parts), margin)),
                tag,
            )
            for tag, dim, rows in tables
        ]

    def check_room(self, tables: Sequence[tuple[str, int, int]]) -> None:
        check_room(self._nodes, tables, self._num_partitions, self._overflow.margin)

    def tags(self) -> list[str]:
        return self._catalog.tags()

    def drop_table(self, tag: str) -> None:
        self._tables.pop(tag, None)
        self._users.unregister(self._any_layout(tag))
        self._catalog.drop(tag)

    def discard_table(self, tag: str) -> bool:
        self._forget(tag)
        return self._users.discard(self._any_layout(tag))

    def empty_table(self, tag: str) -> bool:
        self._forget(tag)
        return self._users.discard(self._any_layout(tag), spare_foreign=False)

    def clear_table(self, tag: str, fingerprint: str) -> bool:
        def is_free() -> bool:
            progress = self._catalog.load_progress(layout)
            return progress is None or progress.fingerprint == fingerprint

        layout = self._any_layout(tag)
        if is_free() or self.discard_table(tag):
            return True
        # Other processes may drop it now, or load these files. In this order: one that drops it may use it next with these
        # files.
        return not self._users.has_others(layout) or is_free()

    def used_by_others(self, tag: str) -> bool:
        return self._users.has_others(self._any_layout(tag))

    def load_record(self, tag: str) -> LoadRecord | None:
        return self._catalog.load_record(tag)

    def claim_load(self, tag: str, fingerprint: str, rows: int, wait_s: float = 0.0, *, replaces: bool = True) -> int | None:
        return self._leases.claim(self._table(tag), fingerprint, rows, wait_s, replaces=replaces)

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        table = self._table(tag)
        keys, vectors = check_rows(f"redis: loading into table {tag}", keys, vectors, table.layout.dim)
        table.insert(keys, vectors, loading=self._leases.renew_claim(table))
        self._leases.advance(table, record.rows_done)

    def finish_load(self, tag: str) -> None:
        self._leases.end(self._table(tag))

    def lacks_rows(self, tag: str) -> bool:
        return self._leases.lacks_rows(self._table(tag))

    def holds_writes(self, tag: str) -> bool:
        return self._leases.has_writes(self._table(tag))

    def claim_copy(self, tag: str, fingerprint: str, rows: int) -> bool:
        return self._leases.claim_copy(self._table(tag), fingerprint, rows)

    def copy_rows(self, tag: str, keys: KeyArray, vectors: FloatArray) -> bool:
        table = self._table(tag)
        keys, vectors = check_rows(f"redis: filling table {tag}", keys, vectors, table.layout.dim)
        self._leases.renew_copy(table)
        return table.copy_rows(keys, vectors)

    def end_copy(self, tag: str, outcome: CopyOutcome) -> None:
        self._leases.end_copy(self._table(tag), outcome)

    def close(self) -> None:
        if self._uses:
            self._uses.close()
        self._users.close()
        self._nodes.close()

    def drain(self, timeout_s: float) -> bool:
        """Wait until recorded uses are in Redis; return False at the timeout."""
        return self._uses is None or self._uses.drain(timeout_s)

    def _record_uses(self, table: RedisTable, keys: KeyArray) -> None:
        if time.monotonic() < self._uses_after:
            return  # batches queued behind a failure would fail as well, each after its timeout
        try:
            table.touch(keys)
        except DatabaseError:
            self._uses_after = time.monotonic() + _USES_PAUSE_S
            raise

    def _warn_of_eviction(self, facts: dict[str, Any]) -> None:
        if evicts_any_key(facts) and facts.get("maxmemory") != 0:
            _log.warning(
                "redis: maxmemory-policy is %s: a full Redis evicts complete partitions, whose keys then count as absent; "
                "set it to noeviction, and bound the tables with overflow_margin",
                facts["maxmemory_policy"],
            )

    def _forget(self, tag: str) -> None:
        self._below.pop(tag, None)
        table = self._tables.pop(tag, None)
        if table is not None:
            self._leases.abandon(table)

    def _any_layout(self, tag: str) -> RedisLayout:
        return RedisLayout.of(tag, 1, self._num_partitions)

    def _table(self, tag: str) -> RedisTable:
        try:
            return self._tables[tag]
        except KeyError:
            raise UnknownTableError(f"redis: table {tag} was not opened; open_table makes or finds it") from None
