"""One table in Redis: its vectors fetched, inserted, deleted and scanned, partition by partition."""

import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from hps.databases.base import UNBOUNDED_ROWS, TableStats
from hps.databases.redis.catalog import Catalog
from hps.databases.redis.codec import Bytes, group_by_partition
from hps.databases.redis.layout import Partition, RedisLayout
from hps.databases.redis.nodes import RedisNodes
from hps.databases.redis.overflow import Overflow
from hps.databases.redis.requests import Call, FetchRows, GetMark, Request, StoreRows
from hps.databases.redis.scan import scan_hash
from hps.errors import DatabaseError, TableWidthError, UnknownTableError
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_CHUNK_FIELDS: Final = 4096
_CHUNK_BYTES: Final = 1 << 20


class RedisTable:
    """The rows of one table. *Thread-safe.*

    Attributes:
        layout: its keys in Redis.
        marks: those that its partitions are known by.

    Args:
        layout: its keys in Redis.
        marks: of its partitions, as they were when it was opened; a partition that has another one has lost its rows.
        catalog: says what the marks are now.
        nodes: run the requests.
        overflow: notes uses and evicts.
        batch: most keys that have one timeout, and after which margins are enforced (`max_batch_size`).
    """

    def __init__(
        self, layout: RedisLayout, marks: list[bytes], catalog: Catalog, nodes: RedisNodes, overflow: Overflow, batch: int
    ) -> None:
        self.layout = layout
        self.marks = marks
        self._catalog = catalog
        self._nodes = nodes
        self._overflow = overflow
        self._batch = batch
        self._chunk = max(1, min(_CHUNK_FIELDS, batch, _CHUNK_BYTES // (4 * layout.dim)))

    def fetch(self, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        """As `Database.fetch`; keys of a partition that has lost its rows are a failure, not absent."""
        before = int(np.count_nonzero(found))
        deadline = self._deadline(keys)
        marks = self.marks
        lost = self._fetch(marks, keys, out, found, deadline)
        if lost is not None:
            # Dropped or lost. If it has been made anew meanwhile, what it has now is the truth.
            if marks is self.marks:
                self._adopt_marks(lost, deadline, whole=True)
            lost = self._fetch(self.marks, keys, out, found, deadline)
            if lost is not None:
                raise self._lost(lost)
        return int(np.count_nonzero(found)) - before

    def insert(self, keys: KeyArray, vectors: FloatArray, *, same_marks: bool = False) -> None:
        """As `Database.insert`. With `same_marks`, fails where the table has been made anew since it was opened."""
        rows = vectors.view(np.uint8)
        for start in range(0, keys.size, self._batch):
            self._insert(keys[start : start + self._batch], rows[start : start + self._batch], same_marks)

    def delete(self, keys: KeyArray) -> int:
        """As `Database.delete`."""
        batches = (keys[start : start + self._batch] for start in range(0, keys.size, self._batch))
        return sum(self._overflow.delete(self._shares(batch), batch) for batch in batches)

    def touch(self, keys: KeyArray) -> None:
        """Note a use of keys that were found."""
        requests: list[Request] = []
        for partition, share in self._shares(keys):
            requests += self._overflow.note_uses(partition, keys, share)
        self._nodes.run(requests)

    def scan(self, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """As `Database.scan`; fails where rows were lost meanwhile."""
        width, dim = 4 * self.layout.dim, self.layout.dim
        for partition in self.layout.partitions:
            for keys, values in scan_hash(self._nodes, partition.slot, partition.values, min(chunk_rows, self._chunk)):
                for key, value in zip(keys, values, strict=True):
                    if len(value) != width:
                        raise TableWidthError(
                            f"redis: scanning table {self.layout.tag}: key {key} has a value of {len(value)} bytes, "
                            f"expected {width} ({dim} float32)"
                        )
                vectors = np.frombuffer(bytearray().join(values), np.float32).reshape(-1, dim)
                for start in range(0, keys.size, chunk_rows):
                    yield keys[start : start + chunk_rows], vectors[start : start + chunk_rows]
            if self._nodes.ask(partition.slot, "GET", partition.mark) != self.marks[partition.index]:
                raise self._lost(partition)

    def size(self) -> int:
        """As `Database.size`."""
        counts = [Call(partition.slot, "HLEN", partition.values) for partition in self.layout.partitions]
        self._nodes.run(counts)
        return sum(count.reply for count in counts)

    def stats(self) -> TableStats:
        """As `Database.stats`; the overhead is Redis' own estimate from a few rows of each partition."""
        rows = self.size()
        vector_bytes = 4 * self.layout.dim * rows
        sizes = [
            Call(partition.slot, "MEMORY", "USAGE", key)
            for partition in self.layout.partitions
            for key in (partition.values, partition.uses, partition.mark)
        ]
        self._nodes.run(sizes)
        overhead = max(0, sum(size.reply or 0 for size in sizes) - vector_bytes)
        capacity = min(UNBOUNDED_ROWS, self._overflow.margin * len(self.layout.partitions))
        return TableStats(rows, vector_bytes, overhead, capacity)

    def _fetch(
        self, marks: list[bytes], keys: KeyArray, out: FloatArray, found: BoolArray, deadline: float
    ) -> Partition | None:
        """Fetch once; returns a partition that has lost rows and lacks some of the keys, or None."""
        rows = out.view(np.uint8)
        requests: list[Request] = []
        checks: list[tuple[Partition, list[FetchRows], GetMark]] = []
        for partition, share in self._shares(keys, found):
            pieces = [
                FetchRows(partition.slot, partition.values, keys, piece, self.layout.header, rows, found)
                for piece in self._pieces(share)
            ]
            # Behind the vectors: if the mark is still there, what was absent before it was not lost.
            mark = GetMark(partition.slot, partition.mark, marks[partition.index])
            requests += [*pieces, mark]
            checks.append((partition, pieces, mark))
        self._run(requests, deadline, f"fetching {keys.size} keys of table {self.layout.tag}")
        for partition, pieces, mark in checks:
            if mark.reply != mark.expected and any(piece.reply < piece.count for piece in pieces):
                return partition
        return None

    def _insert(self, keys: KeyArray, rows: Bytes, same_marks: bool) -> None:
        bounded = self._overflow.margin < UNBOUNDED_ROWS
        known = self.marks
        requests: list[Request] = []
        counts: list[tuple[Partition, Call]] = []
        marks: list[tuple[Partition, Call]] = []
        for partition, share in self._shares(keys):
            requests += self._overflow.note_uses(partition, keys, share)
            for piece in self._pieces(share):
                requests.append(StoreRows(partition.slot, partition.values, keys, piece, self.layout.header, rows))
            if bounded:
                counts.append((partition, Call(partition.slot, "HLEN", partition.values)))
                requests.append(counts[-1][1])
            marks.append((partition, Call(partition.slot, "GET", partition.mark)))
            requests.append(marks[-1][1])
        self._run(requests, self._deadline(keys), f"inserting {keys.size} keys into table {self.layout.tag}")
        for partition, count in counts:
            self._overflow.resolve(partition, count.reply)
        for partition, mark in marks:
            if mark.reply != known[partition.index]:
                if same_marks:
                    raise self._lost(partition)
                self._adopt_marks(partition, self._deadline(keys), whole=False)
                return

    def _deadline(self, keys: KeyArray) -> float:
        return time.monotonic() + max(1, -(-keys.size // self._batch)) * self._nodes.timeout_s

    def _run(self, requests: list[Request], deadline: float, doing: str) -> None:
        try:
            self._nodes.run(requests, deadline)
        except DatabaseError as error:
            raise type(error)(f"{error} ({doing})") from error

    def _pieces(self, share: IndexArray) -> list[IndexArray]:
        return [share[start : start + self._chunk] for start in range(0, share.size, self._chunk)]

    def _shares(self, keys: KeyArray, found: BoolArray | None = None) -> list[tuple[Partition, IndexArray]]:
        """The positions of the keys that are not `found`, of each partition that has any."""
        partitions = self.layout.partitions
        order, offsets = np.empty(keys.size, np.int64), np.empty(len(partitions) + 1, np.int64)
        found = np.zeros(keys.size, np.bool_) if found is None else found
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
