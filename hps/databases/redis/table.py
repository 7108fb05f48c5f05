"""One table in Redis: its vectors fetched, inserted, deleted and scanned, partition by partition."""

import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from hps.databases.base import TableStats
from hps.databases.redis.catalog import Catalog
from hps.databases.redis.commands import Ask, CheckMark, Command, request
from hps.databases.redis.dispatch import Dispatcher
from hps.databases.redis.layout import Layout, Partition
from hps.databases.redis.overflow import Overflow
from hps.databases.redis.protocol import group_by_partition
from hps.databases.redis.replies import Bytes
from hps.databases.redis.row_commands import FetchRows, StoreRows
from hps.databases.redis.scan import scan_hash
from hps.errors import DatabaseError, TableWidthError, UnknownTableError
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_CHUNK_FIELDS: Final = 4096
_CHUNK_BYTES: Final = 1 << 20
_UNBOUNDED: Final = 2**64 - 1


class RedisTable:
    """The rows of one table. *Thread-safe.*

    Attributes:
        layout: its keys.
        marks: those that its partitions are known by.

    Args:
        layout: its keys.
        marks: of its partitions, as they were when it was opened; a partition that has another one has lost its rows.
        catalog: says what the marks are now.
        dispatcher: runs the commands.
        overflow: notes uses and evicts.
        batch: most keys that have one timeout, and after which margins are looked at (`max_batch_size`).
    """

    def __init__(
        self,
        layout: Layout,
        marks: list[bytes],
        catalog: Catalog,
        dispatcher: Dispatcher,
        overflow: Overflow,
        batch: int,
    ) -> None:
        self.layout = layout
        self.marks = marks
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._overflow = overflow
        self._batch = batch
        self._chunk = max(1, min(_CHUNK_FIELDS, batch, _CHUNK_BYTES // (4 * layout.dim)))

    def fetch(self, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        """As `Database.fetch`; keys of a partition that has lost its rows are a failure, not absent."""
        before = int(np.count_nonzero(found))
        deadline = time.monotonic() + self._timeout_s(keys)
        for _ in range(2):
            marks = self.marks
            lost = self._fetch(marks, keys, out, found, deadline)
            if not lost:
                return int(np.count_nonzero(found)) - before
            # Dropped or lost. If it has been made anew meanwhile, what it has now is the truth.
            if marks is self.marks:
                self._adopt_marks(lost[0], deadline, whole=True)
        raise self._lost(lost[0])

    def insert(self, keys: KeyArray, vectors: FloatArray, *, same_marks: bool = False) -> None:
        """As `Database.insert`. With `same_marks`, fails where the table has been made anew since it was opened."""
        rows = vectors.view(np.uint8)
        for start in range(0, keys.size, self._batch):
            self._insert(keys[start : start + self._batch], rows[start : start + self._batch], same_marks)

    def delete(self, keys: KeyArray) -> int:
        """As `Database.delete`."""
        removed = 0
        for start in range(0, keys.size, self._batch):
            batch = keys[start : start + self._batch]
            removed += self._overflow.delete(self._shares(batch, np.zeros(batch.size, np.bool_)), batch)
        return removed

    def touch(self, keys: KeyArray) -> None:
        """Note a use of keys that were found."""
        commands: list[Command] = []
        for partition, share in self._shares(keys, np.zeros(keys.size, np.bool_)):
            commands += self._overflow.note_uses(partition, keys, share)
        self._dispatcher.run(commands)

    def scan(self, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """As `Database.scan`; fails where rows were lost meanwhile."""
        width = 4 * self.layout.dim
        for partition in self.layout.partitions:
            check = CheckMark(partition.slot, partition.get_mark, self.marks[partition.index])
            for piece in scan_hash(self._dispatcher, partition.slot, partition.values, min(chunk_rows, self._chunk)):
                wrong = piece.lengths != width
                if wrong.any():
                    raise TableWidthError(
                        f"redis: scanning table {self.layout.tag}: key {piece.keys[wrong][0]} has a value of "
                        f"{piece.lengths[wrong][0]} bytes, wanted {width} ({self.layout.dim} float32)"
                    )
                for start in range(0, piece.keys.size, chunk_rows):
                    stop = start + chunk_rows
                    vectors = piece.part(start, stop).values(width).view(np.float32)
                    yield piece.keys[start:stop], vectors.reshape(-1, self.layout.dim)
            self._dispatcher.run([check])
            if not check.same:
                raise self._lost(partition)

    def size(self) -> int:
        """As `Database.size`."""
        counts = [Ask(partition.slot, partition.count_values) for partition in self.layout.partitions]
        self._dispatcher.run(counts)
        return sum(count.reply for count in counts)

    def stats(self) -> TableStats:
        """As `Database.stats`; the overhead is Redis' own estimate from a few rows of each partition."""
        rows = self.size()
        vector_bytes = 4 * self.layout.dim * rows
        sizes = [
            Ask(partition.slot, request(b"MEMORY", b"USAGE", key))
            for partition in self.layout.partitions
            for key in (partition.values, partition.uses, partition.mark)
        ]
        overhead = -1
        try:
            self._dispatcher.run(sizes)
            overhead = max(0, sum(size.reply or 0 for size in sizes) - vector_bytes)
        except DatabaseError:
            if not any(size.refusal for size in sizes):
                raise
        capacity = min(_UNBOUNDED, self._overflow.rule.margin * len(self.layout.partitions))
        return TableStats(rows, vector_bytes, overhead, capacity)

    def _fetch(self, marks: list[bytes], keys: KeyArray, out: FloatArray, found: BoolArray, deadline: float) -> list[Partition]:
        """Fetch once; returns the partitions that have lost rows, and lack some of the keys."""
        rows = out.view(np.uint8)
        header = self.layout.header
        commands: list[Command] = []
        checks: list[tuple[Partition, list[FetchRows], CheckMark]] = []
        for partition, share in self._shares(keys, found):
            pieces = [
                FetchRows(partition.slot, partition.get_values, keys, piece, header, rows, found)
                for piece in self._pieces(share)
            ]
            # Behind the vectors: if the mark is still there, what was absent before it was not lost.
            check = CheckMark(partition.slot, partition.get_mark, marks[partition.index])
            commands += pieces
            commands.append(check)
            checks.append((partition, pieces, check))
        self._run(commands, deadline, f"fetching {keys.size} keys of table {self.layout.tag}")
        return [
            partition
            for partition, pieces, check in checks
            if not check.same and any(piece.hits < piece.count for piece in pieces)
        ]

    def _insert(self, keys: KeyArray, rows: Bytes, same_marks: bool) -> None:
        deadline = time.monotonic() + self._timeout_s(keys)
        bounded = self._overflow.rule.margin < _UNBOUNDED
        marks = self.marks
        commands: list[Command] = []
        counts: list[tuple[Partition, Ask]] = []
        checks: list[tuple[Partition, CheckMark]] = []
        for partition, share in self._shares(keys, np.zeros(keys.size, np.bool_)):
            commands += self._overflow.note_uses(partition, keys, share)
            for piece in self._pieces(share):
                commands.append(StoreRows(partition.slot, partition.set_values, keys, piece, self.layout.header, rows))
            if bounded:
                counts.append((partition, Ask(partition.slot, partition.count_values)))
                commands.append(counts[-1][1])
            checks.append((partition, CheckMark(partition.slot, partition.get_mark, marks[partition.index])))
            commands.append(checks[-1][1])
        self._run(commands, deadline, f"inserting {keys.size} keys into table {self.layout.tag}")
        for partition, count in counts:
            self._overflow.resolve(partition, count.reply)
        for partition, check in checks:
            if not check.same:
                if same_marks:
                    raise self._lost(partition)
                self._adopt_marks(partition, time.monotonic() + self._timeout_s(keys), whole=False)
                return

    def _timeout_s(self, keys: KeyArray) -> float:
        return max(1, -(-keys.size // self._batch)) * self._dispatcher.timeout_s

    def _run(self, commands: list[Command], deadline: float, doing: str) -> None:
        try:
            self._dispatcher.run(commands, deadline)
        except DatabaseError as error:
            raise type(error)(f"{error} ({doing})") from error

    def _pieces(self, share: IndexArray) -> list[IndexArray]:
        return [share[start : start + self._chunk] for start in range(0, share.size, self._chunk)]

    def _shares(self, keys: KeyArray, found: BoolArray) -> list[tuple[Partition, IndexArray]]:
        """The positions of the keys that are not `found`, of each partition that has any."""
        partitions = self.layout.partitions
        order, offsets = np.empty(keys.size, np.int64), np.empty(len(partitions) + 1, np.int64)
        group_by_partition(keys, found, np.uint64(len(partitions)), order, offsets)
        bounds = offsets.tolist()
        return [
            (partition, order[start:stop])
            for partition, start, stop in zip(partitions, bounds, bounds[1:], strict=False)
            if start < stop
        ]

    def _adopt_marks(self, partition: Partition, deadline: float, *, whole: bool) -> None:
        marks = self._catalog.marks(self.layout, deadline, whole=whole)
        if marks is None:
            raise self._lost(partition)
        self.marks = marks

    def _lost(self, partition: Partition) -> UnknownTableError:
        return UnknownTableError(
            f"redis: partition {partition.index} of table {self.layout.tag} is not what it was when it was opened: Redis was "
            "emptied or restarted without its data, or another process dropped the table; open it again, and load it"
        )
