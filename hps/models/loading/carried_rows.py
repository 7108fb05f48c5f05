"""Carries what was written online from one table to another of the same model files, whose rows have another format."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

import numpy as np

from hps.ground.progress import Progress
from hps.ground.rows import decode, encode
from hps.stores.base import Database, LoadRecord, LogPosition, Partition, RowChanges
from hps.types import BoolArray, FloatArray, KeyArray, RowArray, TableSpec

_MOST_NOTED: Final = 1 << 20
"""Noted keys after which equal ones are merged, so that there are at most as many again as distinct ones."""


class WrittenTable(Protocol):
    """A deployed table: takes modifications on all its tiers. `Deployment` is one."""

    def insert(self, index: int, keys: KeyArray, vectors: FloatArray) -> None: ...

    def delete(self, index: int, keys: KeyArray) -> None: ...

    def apply(self, index: int, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> int: ...


class CarriedTable:
    """A table of another row format, from which the online writes are carried over. *Thread-safe*; one thread carries.

    The new table is loaded from the files, whose rows `rows_of` replaces where the old table has other ones: a row without
    online writes is as precise as the files have it. `copy` does the rest: rows that are not in the files, deletions, and the
    order of changes. What is written to the old table meanwhile is noted, and `catch_up` writes it again.

    The order of changes goes along: a row that has a place in it is applied with its sequence, and the new table follows the
    log from where the old one stood before the copy.

    Args:
        source: database of the old table, which holds every row.
        old: the old table, as `source` stores it.
        new: the new one, of the same dim.
    """

    def __init__(self, source: Database, old: TableSpec, new: TableSpec) -> None:
        self._source = source
        self.old = old
        self.new = new
        self._doing = f"carrying rows of {old.tag} over to {new.tag}"
        self._noting = threading.Lock()
        self._noted: list[KeyArray] = []
        self._noted_keys = 0
        self._merge_at = _MOST_NOTED
        self._record: LoadRecord | None = None
        self._unmodified: bool | None = None
        self._differs = False

    @property
    def noted(self) -> int:
        """Keys that are noted and not caught up with; equal ones may count several times."""
        return self._noted_keys

    def note(self, keys: KeyArray) -> None:
        """Note keys that were written to the old table, to be carried over again."""
        with self._noting:
            self._noted.append(keys.copy())
            self._noted_keys += keys.size
            if self._noted_keys > self._merge_at:
                self._noted = [np.unique(np.concatenate(self._noted))]
                self._noted_keys = self._noted[0].size
                self._merge_at = max(_MOST_NOTED, 2 * self._noted_keys)

    def begun(self, record: LoadRecord) -> LoadRecord:
        """Return the load record of the new table until `take_over`: neither that of the files nor that of a copy of them."""
        self._record = record
        return replace(record, fingerprint=f"carrying {record.fingerprint}", size_bytes=0)

    def take_over(self, database: Database) -> None:
        """Complete the load record of the new table and give up that of the old one, so that a start takes the new one.

        Args:
            database: the authoritative database, which holds both; no process writes to the old one any more.
        """
        old, new = self.old, database.stored(self.new)
        held = database.load_record(new.tag) if database.persistent else None
        if held is None or self._record is None:
            return
        files, modified = self._record, held.modified or self._differs
        whole = replace(held, fingerprint=files.fingerprint, size_bytes=files.size_bytes, modified=modified)
        gone = LoadRecord(f"carried over to {new.tag}", 0, 1)
        for table, record in ((new, whole), (old, gone)):
            database.load_chunk(table.tag, np.empty(0, np.int64), np.empty((0, table.width), np.float32), record)

    def rows_of(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
        rows: RowArray,  # (n, width)
    ) -> tuple[FloatArray, RowArray]:
        """Return vectors and rows of the files, or in their places those that were written online.

        Args:
            vectors: as the files have them.
            rows: the same in the new format.
        """
        if self._is_unmodified():
            return vectors, rows
        before, present = _read(self._source, self.old, keys)
        written = present & ~_equal(before, encode(self._doing, vectors, self.old.row_dtype, keys))
        if not written.any():
            return vectors, rows
        self._differs = True
        vectors, rows = vectors.copy(), rows.copy()
        vectors[written], rows[written] = self._renewed(before[written], keys[written])
        return vectors, rows

    def copy(self, target: Database, chunk_rows: int, progress: Progress) -> None:
        """Bring the new table, loaded from `rows_of` of the files, to the state of the old one.

        Raises:
            InvalidInputError: the new format cannot hold a row.
            DatabaseError: a database failed.
        """
        if self._is_unmodified():
            return
        source, old, stored = self._source, self.old.tag, target.stored(self.new)
        new = stored.tag
        positions = source.follow_log(old) if source.persistent else {}
        progress.start(new, rows := source.size(old), rows * (8 + 4 * self.old.dim))
        for keys, _ in source.scan(old, chunk_rows):
            absent = keys[~_read(target, stored, keys)[1]]
            changes = self._changes(absent, stored)
            added, added_rows, _gone = changes.at(changes.sequences == 0).split()
            if added.size:
                target.insert(new, added, added_rows)
            progress.advance(new, keys.size)
        for keys, _ in target.scan(new, chunk_rows):
            gone = keys[~_read(source, self.old, keys)[1]]
            if gone.size:
                target.delete(new, gone)
        for keys in source.changed_keys(old, chunk_rows):  # last: an insertion is later than what was applied before it
            changes = self._changes(keys, stored)
            ordered = changes.at(changes.sequences > 0)
            if ordered.keys.size:
                target.apply(new, ordered, {})
        if positions:
            target.follow_log(new)
            target.apply(new, self._changes(np.empty(0, np.int64), stored), positions)
        progress.finish(new)

    def catch_up(self, target: WrittenTable, index: int) -> None:
        """Carry over what was noted.

        Args:
            target: the deployment with the new table.
            index: of the table.

        Raises:
            As `copy`.
        """
        with self._noting:
            noted, self._noted, self._noted_keys = self._noted, [], 0
        if not noted:
            return
        changes = self._changes(np.unique(np.concatenate(noted)), self.new.stored_as("float32"))
        ordered = changes.sequences > 0
        if ordered.any():
            target.apply(index, changes.at(ordered), {})
        keys, vectors, gone = changes.at(~ordered).split()
        if keys.size:
            target.insert(index, keys, vectors)
        if gone.size:
            target.delete(index, gone)

    def _is_unmodified(self) -> bool:
        """Whether the old table had the rows of the files when this was first asked; later writes are noted."""
        if self._unmodified is None:
            self._source.open_table(self.old.tag, self.old.width)
            record = self._source.load_record(self.old.tag) if self._source.persistent else None
            self._unmodified = record is not None and record.complete and not record.modified
        return self._unmodified

    def _changes(self, keys: KeyArray, new: TableSpec) -> RowChanges:
        """Read the present state of keys in the old table, as rows of another one.

        Raises:
            InvalidInputError: the format of the new table cannot hold one.
        """
        sequences = self._source.sequences_of(self.old.tag, keys)  # first: a row may be newer than its sequence, never older
        rows, found = _read(self._source, self.old, keys)
        vectors, renewed = self._renewed(rows, keys)
        return RowChanges(keys, vectors if new.row_dtype == "float32" else renewed, sequences, ~found)

    def _renewed(self, rows: RowArray, keys: KeyArray) -> tuple[FloatArray, RowArray]:
        """Convert rows of the old table to vectors and to the new format."""
        vectors = decode(rows, self.old.dim, self.old.row_dtype)
        return vectors, encode(self._doing, vectors, self.new.row_dtype, keys)


def _read(database: Database, stored: TableSpec, keys: KeyArray) -> tuple[RowArray, BoolArray]:
    rows, found = np.zeros((keys.size, stored.width), np.float32), np.zeros(keys.size, np.bool_)
    database.fetch(stored.tag, keys, rows, found)
    return rows, found


def _equal(
    rows: RowArray,  # (n, width)
    others: RowArray,  # (n, width)
) -> BoolArray:
    """Compare rows bit for bit, (n,)."""
    same: BoolArray = (rows.view(np.uint32) == others.view(np.uint32)).all(axis=1)
    return same
