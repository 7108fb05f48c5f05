"""The order of changes to one table of the hash map: the sequence of each row's last change, including deleted rows."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import numpy as np

from hps.stores.base import ExpiredRows, LogPosition, Partition, RowChanges, exclusive
from hps.stores.hash_map.table import HashMapTable
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray


class SequenceTable:
    """Changes a table that follows a log, one call at a time. *Thread-safe.*

    Sequences are stored as the bits of another table's vectors. That table never evicts, or an older change could count as the
    latest. So it takes 22 to 28 bytes for each key that was ever changed online.

    Args:
        sequences: an empty table of width 2.
        timeout_s: time limit of a call for running ones.

    Attributes:
        by_time: whether insertions and deletions take their time as sequence.
    """

    def __init__(self, table: HashMapTable, sequences: HashMapTable, timeout_s: float) -> None:
        self.positions: dict[Partition, LogPosition] = {}
        self.by_time = False
        self._table = table
        self._sequences = sequences
        self._highest = 0  # applied sequence
        self._changing = threading.Lock()
        self._timeout_s = timeout_s

    def insert(self, keys: KeyArray, vectors: FloatArray) -> None:
        with self._alone("inserting"):
            self._table.insert(keys, vectors)
            self._changed_now(keys)

    def delete(self, keys: KeyArray) -> int:
        with self._alone("deleting"):
            deleted = self._table.delete(keys)
            self._changed_now(keys)
        return deleted

    def apply(self, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        with self._alone("updating"):
            before = np.zeros(changes.keys.size, np.int64)
            self._sequences.fetch(changes.keys, _bits(before), np.zeros(before.size, np.bool_))
            latest: BoolArray = before <= changes.sequences
            made = changes.at(latest)
            # The sequences first: a lookup never reads them, and an interrupted call must not leave a row that an older change
            # could still replace. If the rows then fail, the changes that were not made get their former sequences back.
            self._sequences.insert(made.keys, _bits(made.sequences))
            keys, vectors, deleted = made.split()
            try:
                self._table.insert(keys, vectors)
                self._table.delete(deleted)
            except BaseException:
                undone = ~self._are_made(made)
                self._sequences.insert(made.keys[undone], _bits(before[latest][undone]))
                raise
            self._highest = max(self._highest, int(made.sequences.max(initial=0)))
            self.positions = self.positions | dict(positions)
        return latest

    def changed_rows(self, chunk_rows: int) -> Iterator[tuple[KeyArray, IndexArray]]:
        """As `AgingRows.changed_rows_of`."""
        for keys, bits in self._sequences.scan(chunk_rows):
            yield keys, np.ascontiguousarray(bits).view(np.int64).reshape(-1)

    def last_changes(self, keys: KeyArray) -> IndexArray:
        """As `AgingRows.last_changes`."""
        last = np.zeros(keys.size, np.int64)
        self._sequences.fetch(keys, _bits(last), np.zeros(last.size, np.bool_))
        return last

    def expire(self, keys: KeyArray, sequence: int, *, loaded: bool) -> ExpiredRows:
        """As `AgingRows.expire`."""
        with self._alone("expiring"):
            last = self.last_changes(keys)
            due = keys[(last <= sequence) & ((last > 0) | loaded)]
            removed = self._table.delete(due)  # first: an interrupted call must not leave a row without its time
            self._sequences.delete(due)
        return ExpiredRows(last > sequence, removed)

    def _changed_now(self, keys: KeyArray) -> None:
        sequence = self._highest + 1 if self._highest else 0  # 0: the rows are older than any change of a log
        if self.by_time:
            sequence = max(sequence, time.time_ns() // 1000)
        if sequence:
            self._sequences.insert(keys, _bits(np.full(keys.size, sequence, np.int64)))

    def _are_made(self, changes: RowChanges) -> BoolArray:
        vectors, found = np.empty_like(changes.vectors), np.zeros(changes.keys.size, np.bool_)
        self._table.fetch(changes.keys, vectors, found)
        equal = found & (vectors.view(np.uint32) == changes.vectors.view(np.uint32)).all(axis=1)
        return equal if changes.deleted is None else np.where(changes.deleted, ~found, equal)

    def _alone(self, doing: str) -> AbstractContextManager[None]:
        busy = (
            f"hash map: {doing} rows of a table that follows a log: other threads changed it for all of {self._timeout_s} s; "
            "write fewer rows at once, or from fewer threads"
        )
        return exclusive(self._changing, self._timeout_s, busy)


def _bits(sequences: IndexArray) -> FloatArray:
    """Return sequences as vectors, (n, 2), over the same memory."""
    return sequences.view(np.float32).reshape(-1, 2)
