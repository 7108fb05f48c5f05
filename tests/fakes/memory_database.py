"""Databases on dicts that obey the contract: slow, small, and easy to be sure of."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np

from hps.errors import NotReadyError, TableWidthError, UnknownTableError
from hps.stores.base import (
    Database,
    LoadRecord,
    LogPosition,
    OrderedWrites,
    Partition,
    PersistentDatabase,
    RowChanges,
    TableStats,
)
from hps.types import BoolArray, FloatArray, KeyArray


class MemoryDatabase(Database, OrderedWrites):
    """Keeps every table as a dict from key to row. Thread-safe through one lock."""

    kind = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, dict[int, FloatArray]] = {}
        self._dims: dict[str, int] = {}
        self._sequences: dict[str, dict[int, int]] = {}  # of each change of a row, also of rows that are gone
        self._applied: dict[str, int] = {}  # the highest sequence that was applied
        self._positions: dict[str, dict[Partition, LogPosition]] = {}
        self._closed = False

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls()

    def _table(self, tag: str) -> dict[int, FloatArray]:
        if self._closed:
            raise NotReadyError("the memory database is closed")
        try:
            return self._rows[tag]
        except KeyError:
            raise UnknownTableError(f"table {tag!r} is not open") from None

    def open_table(self, tag: str, dim: int) -> None:
        with self._lock:
            if self._closed:
                raise NotReadyError("the memory database is closed")
            if self._dims.setdefault(tag, dim) != dim:
                raise TableWidthError(f"opening {tag!r}: it holds vectors of {self._dims[tag]}, wanted {dim}")
            self._rows.setdefault(tag, {})

    def fetch(self, tag: str, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        filled = 0
        with self._lock:
            rows = self._table(tag)
            for i, key in enumerate(keys.tolist()):
                if not found[i] and key in rows:
                    out[i] = rows[key]
                    found[i] = True
                    filled += 1
        return filled

    def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None:
        with self._lock:
            self._table(tag).update(zip(keys.tolist(), np.array(vectors), strict=True))
            self._number(tag, keys)

    def delete(self, tag: str, keys: KeyArray) -> int:
        with self._lock:
            rows = self._table(tag)
            self._number(tag, keys)
            return sum(rows.pop(key, None) is not None for key in keys.tolist())

    def _number(self, tag: str, keys: KeyArray) -> None:
        if highest := self._applied.get(tag, 0):
            self._sequences[tag] |= dict.fromkeys(keys.tolist(), highest + 1)

    def follow_log(self, tag: str) -> dict[Partition, LogPosition]:
        with self._lock:
            self._table(tag)
            return dict(self._positions.setdefault(tag, {}))

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        with self._lock:
            rows, known = self._table(tag), self._sequences.setdefault(tag, {})
            numbers = zip(changes.keys.tolist(), changes.sequences.tolist(), strict=True)
            latest = np.array([known.get(key, 0) <= sequence for key, sequence in numbers], np.bool_)
            made = changes.at(latest)
            inserted, vectors, deleted = made.split()
            rows.update(zip(inserted.tolist(), np.array(vectors), strict=True))
            for key in deleted.tolist():
                rows.pop(key, None)
            known.update(zip(made.keys.tolist(), made.sequences.tolist(), strict=True))
            self._applied[tag] = max([self._applied.get(tag, 0), *changes.sequences.tolist()])
            self._positions.setdefault(tag, {}).update(positions)
            return latest

    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        with self._lock:
            items = list(self._table(tag).items())
        for start in range(0, len(items), chunk_rows):
            chunk = items[start : start + chunk_rows]
            yield np.array([key for key, _ in chunk], np.int64), np.array([row for _, row in chunk])

    def size(self, tag: str) -> int:
        with self._lock:
            return len(self._table(tag))

    def stats(self, tag: str) -> TableStats:
        with self._lock:
            rows = len(self._table(tag))
            return TableStats(rows, rows * self._dims[tag] * 4, -1)

    def tags(self) -> list[str]:
        with self._lock:
            return sorted(self._rows)

    def drop_table(self, tag: str) -> None:
        with self._lock:
            for of_tables in (self._rows, self._dims, self._sequences, self._applied, self._positions):
                of_tables.pop(tag, None)

    def close(self) -> None:
        self._closed = True


class PersistentMemoryDatabase(MemoryDatabase, PersistentDatabase):
    """A memory database that remembers its loads, as a persistent one does, and in what order it was loaded.

    Attributes:
        records: of its tables.
        told: ("load_chunk", rows), ("finish_load", rows of the table) and ("drop_table", 0), in their order.
        before_chunk: called with the first row of each chunk before it is loaded; an error that it raises ends the load.
    """

    kind = "persistent_memory"

    def __init__(self, load_bytes: int = 0) -> None:
        super().__init__()
        self.load_bytes = load_bytes
        self.records: dict[str, LoadRecord] = {}
        self.told: list[tuple[str, int]] = []
        self.before_chunk: Callable[[int], None] = lambda row: None

    @property
    def chunks(self) -> list[int]:
        """Rows of the chunks that were loaded."""
        return [rows for what, rows in self.told if what == "load_chunk"]

    def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None:
        self._mark_modified(tag)
        super().insert(tag, keys, vectors)

    def delete(self, tag: str, keys: KeyArray) -> int:
        self._mark_modified(tag)
        return super().delete(tag, keys)

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        if changes.keys.size:
            self._mark_modified(tag)
        return super().apply(tag, changes, positions)

    def _mark_modified(self, tag: str) -> None:
        if tag in self.records:
            self.records[tag] = replace(self.records[tag], modified=True)

    def load_record(self, tag: str) -> LoadRecord | None:
        return self.records.get(tag)

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        self.before_chunk(record.rows_done - keys.size)
        super().insert(tag, keys, vectors)
        self.told.append(("load_chunk", keys.size))
        before = self.records.get(tag)
        modified = before is not None and before.modified and before.fingerprint == record.fingerprint
        self.records[tag] = replace(record, modified=record.modified or modified)

    def finish_load(self, tag: str) -> None:
        self.told.append(("finish_load", self.size(tag)))

    def drop_table(self, tag: str) -> None:
        super().drop_table(tag)
        self.records.pop(tag, None)
        self.told.append(("drop_table", 0))
