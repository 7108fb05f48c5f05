"""A database on dicts that obeys the contract: slow, small, and easy to be sure of."""

import threading
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from hps.databases.base import Database, TableStats
from hps.errors import NotReadyError, TableWidthError, UnknownTableError
from hps.types import BoolArray, FloatArray, KeyArray


class MemoryDatabase(Database):
    """Keeps every table as a dict from key to row. Thread-safe through one lock."""

    kind = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, dict[int, FloatArray]] = {}
        self._dims: dict[str, int] = {}
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

    def delete(self, tag: str, keys: KeyArray) -> int:
        with self._lock:
            rows = self._table(tag)
            return sum(rows.pop(key, None) is not None for key in keys.tolist())

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
            self._rows.pop(tag, None)
            self._dims.pop(tag, None)

    def close(self) -> None:
        self._closed = True
