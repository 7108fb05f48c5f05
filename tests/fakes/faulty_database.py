"""A database that fails on command, around a real one."""

import threading
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from hps.errors import DatabaseError
from hps.stores.base import Database, LoadRecord, LogPosition, OrderedWrites, Partition, PersistentDatabase, RowChanges
from hps.types import BoolArray, FloatArray, KeyArray


def _passed(name: str, counted: bool = False) -> Any:
    def call(self: "FaultyDatabase", *arguments: Any) -> Any:
        if counted:
            self._enter(name)
        return getattr(self.inner, name)(*arguments)

    return call


class FaultyDatabase(PersistentDatabase, OrderedWrites):
    """Passes calls on to another database, unless told otherwise.

    Attributes:
        failing: names of the calls that fail before they do anything.
        failing_halfway: names of the calls that do their work for the first half of the keys and then fail.
        gate: when set, `fetch` waits for it (at most 10 s) after announcing itself through `entered`.
        gate_late: when set, `fetch` does its work, announces itself through `entered`, and then waits for it.
        calls: how often each call arrived, failed ones included.
    """

    kind = "faulty"

    def __init__(self, inner: Database) -> None:
        self.inner = inner
        self.failing: set[str] = set()
        self.failing_halfway: set[str] = set()
        self.gate: threading.Event | None = None
        self.gate_late: threading.Event | None = None
        self.entered = threading.Semaphore(0)
        self.calls: dict[str, int] = {}
        self.fetched: list[KeyArray] = []

    @classmethod
    def from_config(cls, config: Any) -> Self:
        raise NotImplementedError

    def _enter(self, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        if call in self.failing:
            raise DatabaseError(f"{call} was told to fail")

    def _half(self, call: str, n: int) -> slice:
        return slice(0, n // 2) if call in self.failing_halfway else slice(0, n)

    def _leave(self, call: str) -> None:
        if call in self.failing_halfway:
            raise DatabaseError(f"{call} was told to fail halfway")

    open_table, follow_log, copy_changes, drop_table = (
        _passed(name, counted=True) for name in ("open_table", "follow_log", "copy_changes", "drop_table")
    )
    scan, size, stats, tags, close = map(_passed, ("scan", "size", "stats", "tags", "close"))

    def load_record(self, tag: str) -> LoadRecord | None:
        return None

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        self.insert(tag, keys, vectors)

    def fetch(self, tag: str, keys: KeyArray, out: FloatArray, found: BoolArray) -> int:
        self.fetched.append(keys[~found])
        if self.gate_late is None:
            self.entered.release()
        if self.gate is not None and not self.gate.wait(30):
            raise DatabaseError("the gate stayed closed")
        self._enter("fetch")
        rows = self._half("fetch", keys.size)
        filled = self.inner.fetch(tag, keys[rows], out[rows], found[rows])
        self._leave("fetch")
        if self.gate_late is not None:
            self.entered.release()
            if not self.gate_late.wait(30):
                raise DatabaseError("the gate stayed closed")
        return filled

    def insert(self, tag: str, keys: KeyArray, vectors: FloatArray) -> None:
        self._enter("insert")
        rows = self._half("insert", keys.size)
        self.inner.insert(tag, keys[rows], vectors[rows])
        self._leave("insert")

    def delete(self, tag: str, keys: KeyArray) -> int:
        self._enter("delete")
        removed = self.inner.delete(tag, keys[self._half("delete", keys.size)])
        self._leave("delete")
        return removed

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        """As the inner one; of a call that fails halfway the first half of the changes is made, and no position stored."""
        self._enter("apply")
        if "apply" in self.failing_halfway:
            first = np.arange(changes.keys.size) < changes.keys.size // 2
            self.inner.apply(tag, changes.at(first), {})
            self._leave("apply")
        return self.inner.apply(tag, changes, positions)


def fetched_keys(database: FaultyDatabase) -> KeyArray:
    """All keys that fetches asked for, in order, duplicates kept."""
    return np.concatenate([*database.fetched, np.empty(0, np.int64)]).astype(np.int64)
