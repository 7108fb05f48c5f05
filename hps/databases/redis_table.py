"""One table in Redis: its vectors fetched, inserted, deleted and scanned, partition by partition."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from hps.databases.base import TableStats
from hps.databases.redis_commands import Ask, Command, request
from hps.databases.redis_dispatch import Dispatcher
from hps.databases.redis_layout import Layout, Partition
from hps.databases.redis_overflow import Overflow
from hps.databases.redis_protocol import group_by_partition
from hps.databases.redis_replies import Bytes
from hps.databases.redis_row_commands import FetchRows, StoreRows
from hps.databases.redis_scan import scan_hash
from hps.errors import DatabaseError, TableWidthError, UnknownTableError
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_CHUNK_FIELDS: Final = 4096
_CHUNK_BYTES: Final = 1 << 20
_UNBOUNDED: Final = 2**64 - 1


class RedisTable:
    """The rows of one table. *Thread-safe.*

    Args:
        layout: its keys.
        marks: of its partitions, as they were when it was opened; a partition that has another one has lost its rows.
        current_marks: asks what the marks are now; None where the table is not there as it was opened.
        dispatcher: runs the commands.
        overflow: notes uses and evicts.
        batch: most keys that have one timeout, and after which margins are looked at (`max_batch_size`).
    """

    def __init__(
        self,
        layout: Layout,
        marks: list[bytes],
        current_marks: Callable[[Layout], list[bytes] | None],
        dispatcher: Dispatcher,
        overflow: Overflow,
        batch: int,
    ) -> None:
        self.layout = layout
        self._marks = marks
        self._current_marks = current_marks
        self._dispatcher = dispatcher
        self._overflow = overflow
        self._batch = batch
        self._chunk = max(1, min(_CHUNK_FIELDS, batch, _CHUNK_BYTES // (4 * layout.dim)))

    @property
    def marks(self) -> list[bytes]:
        """The marks that its partitions are known by."""
        return self._marks

    def fetch(self, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        """As `Database.fetch`; keys of a partition that has lost its rows are a failure, not absent."""
        before = int(np.count_nonzero(found))
        for _ in range(2):
            marks = self._marks
            lost = self._fetch(marks, keys, out, found)
            if not lost:
                return int(np.count_nonzero(found)) - before
            # Dropped or lost. If it has been made anew meanwhile, what it has now is the truth.
            if marks is self._marks:
                self._adopt_marks(lost[0])
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
            order, offsets = self._group(batch, np.zeros(batch.size, np.bool_))
            for index in np.flatnonzero(np.diff(offsets)).tolist():
                pieces = order[offsets[index] : offsets[index + 1]]
                removed += self._overflow.delete(self.layout.partitions[index], batch, pieces)
        return removed

    def touch(self, keys: KeyArray) -> None:
        """Note a use of keys that were found."""
        order, offsets = self._group(keys, np.zeros(keys.size, np.bool_))
        commands: list[Command] = []
        for index in np.flatnonzero(np.diff(offsets)).tolist():
            partition = self.layout.partitions[index]
            commands += self._overflow.note_uses(partition, keys, order[offsets[index] : offsets[index + 1]])
        self._dispatcher.run(commands)

    def scan(self, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """As `Database.scan`; fails where rows were lost meanwhile."""
        width = 4 * self.layout.dim
        for partition in self.layout.partitions:
            mark = self._marks[partition.index]
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
            check = Ask(partition.slot, partition.get_mark)
            self._dispatcher.run([check])
            if check.reply != mark:
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

    def _fetch(self, marks: list[bytes], keys: KeyArray, out: FloatArray, found: BoolArray) -> list[Partition]:
        order, offsets = self._group(keys, found)
        rows = out.view(np.uint8)
        header = self.layout.header
        commands: list[Command] = []
        checks: list[tuple[Partition, list[FetchRows], Ask]] = []
        for index in np.flatnonzero(np.diff(offsets)).tolist():
            partition = self.layout.partitions[index]
            pieces = [
                FetchRows(partition.slot, partition.get_values, keys, piece, header, rows, found)
                for piece in self._pieces(order, offsets, index)
            ]
            # Behind the vectors: if the mark is still there, what was absent before it was not lost.
            check = Ask(partition.slot, partition.get_mark)
            commands += pieces
            commands.append(check)
            checks.append((partition, pieces, check))
        self._run(commands, keys.size, "fetching")
        return [
            partition
            for partition, pieces, check in checks
            if check.reply != marks[partition.index] and any(piece.hits < piece.weight for piece in pieces)
        ]

    def _insert(self, keys: KeyArray, rows: Bytes, same_marks: bool) -> None:
        order, offsets = self._group(keys, np.zeros(keys.size, np.bool_))
        bounded = self._overflow.rule.margin < _UNBOUNDED
        marks = self._marks
        commands: list[Command] = []
        counts: list[tuple[Partition, Ask]] = []
        checks: list[tuple[Partition, Ask]] = []
        for index in np.flatnonzero(np.diff(offsets)).tolist():
            partition = self.layout.partitions[index]
            commands += self._overflow.note_uses(partition, keys, order[offsets[index] : offsets[index + 1]])
            for piece in self._pieces(order, offsets, index):
                commands.append(StoreRows(partition.slot, partition.set_values, keys, piece, self.layout.header, rows))
            if bounded:
                counts.append((partition, Ask(partition.slot, partition.count_values)))
                commands.append(counts[-1][1])
            checks.append((partition, Ask(partition.slot, partition.get_mark)))
            commands.append(checks[-1][1])
        self._run(commands, keys.size, "inserting")
        for partition, count in counts:
            self._overflow.resolve(partition, count.reply)
        for partition, check in checks:
            if check.reply != marks[partition.index]:
                if same_marks:
                    raise self._lost(partition)
                self._adopt_marks(partition)
                return

    def _run(self, commands: list[Command], keys: int, doing: str) -> None:
        batches = -(-keys // self._batch)
        try:
            self._dispatcher.run(commands, batches * self._dispatcher.timeout_s)
        except DatabaseError as error:
            raise type(error)(f"{error} ({doing} {keys} keys of table {self.layout.tag})") from error

    def _pieces(self, order: IndexArray, offsets: IndexArray, index: int) -> list[IndexArray]:
        start, stop = int(offsets[index]), int(offsets[index + 1])
        return [order[low : min(low + self._chunk, stop)] for low in range(start, stop, self._chunk)]

    def _group(self, keys: KeyArray, found: BoolArray) -> tuple[IndexArray, IndexArray]:
        order = np.empty(keys.size, np.int64)
        offsets = np.empty(len(self.layout.partitions) + 1, np.int64)
        group_by_partition(keys, found, np.uint64(len(self.layout.partitions)), order, offsets)
        return order, offsets

    def _adopt_marks(self, partition: Partition) -> None:
        marks = self._current_marks(self.layout)
        if marks is None:
            raise self._lost(partition)
        self._marks = marks

    def _lost(self, partition: Partition) -> UnknownTableError:
        return UnknownTableError(
            f"redis: partition {partition.index} of table {self.layout.tag} is not what it was when it was opened: Redis was "
            "emptied or restarted without its data, or another process dropped the table; open it again, and load it"
        )
