"""What the processes of a soak know in common: the versions that were written, and what was counted and found wrong.

A vector says of itself which key of which table it belongs to, by which write it came, and, in its other elements, a checksum
of that. So any reader can judge any answer, whoever wrote the vector, given what was acknowledged before the question was
asked and what had been begun when the answer was there.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hps.types import BoolArray, FloatArray, KeyArray

ROWS, ABSENT = 20_000, 2_000  # keys from ROWS on are in no table
DEFAULT = -1.0
PROCESSES = ("a", "b", "user")  # two servers, and one that is used in process alone


class Table(NamedTuple):
    """A table of the soak; its number is its place in `TABLES`."""

    model: str
    name: str
    dim: int


TABLES = tuple(Table(model, name, dim) for model in ("steady", "reloaded") for name, dim in (("item", 16), ("user", 8)))
COUNTERS = (
    *("answers", "vectors", "refused", "refused_reloading"),  # of good clients and of checkers in process
    "lost_with_front",  # connections of clients and probes that a front took with it
    *("acknowledged", "failed_writes", "deletes", "audits", "forks"),  # of processes
    *("probes", "scrapes", "attacks", "violations"),
)
_ACTORS = 64
_NEVER_NS = 1 << 62
KILLED, STOPPED, ENGINELESS = range(3)  # a front is killed, a front is stopped, the engine was killed: see `Ledger.during`
_PORTS = 1 << 16
_MAX_NOTED = 20  # violations of a kind that a process describes; it counts all
_STOP, _START, _SEQUENCE = range(3)
_SEQUENCE_LOCK, _CONTESTED_LOCK = range(2)
_A, _B, _C = (np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))


def encode(
    table: int,
    keys: npt.ArrayLike,  # (n,)
    versions: npt.ArrayLike,  # (n,), or one for all
) -> FloatArray:  # (n, dim)
    """The vectors of keys as a write made them; 0 is the version of the model files. Keys and versions stay below 2^24."""
    keys, versions = np.broadcast_arrays(np.asarray(keys, np.int64), np.asarray(versions, np.int64))
    dim = TABLES[table].dim
    heads = keys.astype(np.uint64) * _A ^ versions.astype(np.uint64) * _B + np.uint64(table)
    bits = heads[:, None] + np.arange(dim, dtype=np.uint64) * _C
    bits = (bits ^ bits >> np.uint64(31)) * _A >> np.uint64(40)
    vectors = bits.astype(np.float32)
    vectors[:, 0], vectors[:, 1], vectors[:, 2] = keys, table, versions
    return vectors


@dataclass(slots=True)
class Opened:
    """Which connection a client has opened, and when."""

    generation: int  # of the process
    port: int = 0  # of the client
    began_ns: int = field(default_factory=time.monotonic_ns)
    connected_ns: int = _NEVER_NS

    def to(self, connection: socket.socket) -> None:
        self.port, self.connected_ns = connection.getsockname()[1], time.monotonic_ns()


class Bounds(NamedTuple):
    """What was known of some keys before they were asked for. *Immutable.*"""

    table: int
    keys: KeyArray  # (n,)
    floor: npt.NDArray[np.int64]  # (n,) the last write of each that the process which is asked had acknowledged


class Ledger:
    """Arrays and notes in files that all processes of a soak share. *Thread-safe.*

    Every write has a number of its own, in the order in which the writes of a key happened: writes of one key never overlap,
    since a key has one writer, or is written under a lock of all writers.

    Args:
        directory: where the files are; made by the first.
        actor: which row of the counts is this process's.
        name: of this process, in notes.
    """

    def __init__(self, directory: Path, actor: int, name: str) -> None:
        self.directory, self.name = directory, name
        keys = ROWS + ABSENT
        self.begun = self._array("begun", len(TABLES), keys)  # the last write of each key that was begun, deletes included
        self.deleted = self._array("deleted", len(TABLES), keys)  # the last delete of each key that was begun
        self.acknowledged = self._array("acknowledged", len(PROCESSES), len(TABLES), keys)  # by each process
        self.generation = self._array("generation", len(PROCESSES))  # odd while the process is meant to be up
        self._disturbed = self._array("disturbed", len(PROCESSES), 3, 2)  # when each kind last began and ended
        self._lost = self._array("lost", len(PROCESSES), _PORTS)  # when the front of a client's port was killed
        self.counts = self._array("counts", _ACTORS, len(COUNTERS))
        self._state = self._array("state", 3)
        self._own = self.counts[actor]
        self._lock = threading.Lock()
        self._locks = os.open(directory / "locks", os.O_RDWR | os.O_CREAT)
        self._notes = os.open(directory / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._noted: Counter[str] = Counter()

    def _array(self, name: str, *shape: int) -> npt.NDArray[np.int64]:
        path = self.directory / name
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(8 * int(np.prod(shape)))
        return np.memmap(path, np.int64, "r+", shape=shape)

    @property
    def stopped(self) -> bool:
        return bool(self._state[_STOP])

    def begin(self) -> None:
        """Start the clock of the notes."""
        self._state[_START] = time.monotonic_ns()

    def stop(self) -> None:
        """Tell all processes to end."""
        self._state[_STOP] = 1

    @contextmanager
    def during(self, process: int, what: int) -> Iterator[None]:
        """Tell all judges what is done to a process meanwhile."""
        self._disturbed[process, what] = time.monotonic_ns(), _NEVER_NS
        try:
            yield
        finally:
            self._disturbed[process, what, 1] = time.monotonic_ns()

    def ended(self, process: int, what: int, since_ns: int) -> int:
        """Return when something that went on after a time had ended; 0 if nothing did. Times are `time.monotonic_ns`."""
        began_ns, ended_ns = self._disturbed[process, what]
        return int(ended_ns) if began_ns and ended_ns >= since_ns else 0

    def lose(self, process: int, ports: Iterable[int]) -> None:
        """Tell the clients of these ports that the front which has their connections is killed now."""
        self._lost[process, list(ports)] = time.monotonic_ns()

    def is_lost(self, process: int, opened: Opened) -> bool:
        """Return whether a front that was killed had a connection, or may have had it: it was opened meanwhile."""
        if self._lost[process, opened.port] >= opened.began_ns:
            return True
        began_ns, ended_ns = self._disturbed[process, KILLED]
        return bool(began_ns <= opened.connected_ns and opened.began_ns <= ended_ns)

    def count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._own[COUNTERS.index(name)] += amount

    def total(self, name: str, actors: slice = slice(None)) -> int:
        return int(self.counts[actors, COUNTERS.index(name)].sum())

    def violation(self, kind: str, **details: Any) -> None:
        """Count and write down something that must not be."""
        self.count(violations=1)
        with self._lock:
            self._noted[kind] += 1
            if self._noted[kind] > _MAX_NOTED:
                details = {}
        self.note(kind=kind, by=self.name, **details)

    def violations(self) -> list[dict[str, Any]]:
        """What all processes wrote down as wrong, each with the last event before it."""
        event, violations = "", []
        for line in (self.directory / "notes").read_text().splitlines():
            note = json.loads(line)
            event = note.get("event", event)
            if "kind" in note:
                violations.append({**note, "after": event})
        return violations

    def note(self, **details: Any) -> None:
        """Write down something that happened: an event, an attack, a violation."""
        at = round((time.monotonic_ns() - int(self._state[_START])) / 1e9, 3)
        os.write(self._notes, json.dumps({"at": at, **details}).encode() + b"\n")

    @contextmanager
    def writing(self, table: int, keys: KeyArray, *, delete: bool, contested: bool) -> Iterator[int]:
        """Give a write its number, and note it as begun. The locks of a process that is killed are free at once."""
        if contested:
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, _CONTESTED_LOCK)
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, _SEQUENCE_LOCK)
            self._state[_SEQUENCE] += 1
            number = int(self._state[_SEQUENCE])
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, _SEQUENCE_LOCK)
            self.begun[table, keys] = number
            if delete:
                self.deleted[table, keys] = number
            yield number
        finally:
            if contested:
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, _CONTESTED_LOCK)

    def bounds(self, process: int, table: int, keys: KeyArray) -> Bounds:
        """To be taken before the question is sent to a process."""
        return Bounds(table, keys, self.acknowledged[process, table, keys])

    def judge(
        self,
        bounds: Bounds,
        vectors: FloatArray,  # (n, dim)
        found: BoolArray | None = None,  # (n,)
    ) -> dict[str, BoolArray]:
        """Judge an answer.

        Returns:
            Which of the vectors are wrong, by what is wrong with them, where anything is.
            default: the default vector, of a key that is there.
            torn: not a vector that anybody ever wrote.
            foreign: the vector of another key or table.
            invented: of a key that is in no table, or of a write that had not begun.
            stale: older than the last write that the process which was asked had acknowledged.
            mask: the found-mask contradicts the vector.
        """
        table, keys, floor = bounds
        ceiling, deleted = self.begun[table, keys], self.deleted[table, keys]
        if vectors.shape != (keys.size, TABLES[table].dim):
            return {"shape": np.ones(keys.size, np.bool_)}
        default = (vectors == DEFAULT).all(axis=1)
        may_lack = (keys >= ROWS) | ((deleted > 0) & (deleted >= floor))
        with np.errstate(invalid="ignore"):
            heads = vectors[:, :3].astype(np.int64)
            number = np.where((heads[:, 1] >= 0) & (heads[:, 1] < len(TABLES)), heads[:, 1], table)
        whole = np.zeros(keys.size, np.bool_)
        for other in np.unique(number):
            if TABLES[other].dim == vectors.shape[1]:
                rows = np.flatnonzero(number == other)
                whole[rows] = (vectors[rows] == encode(int(other), heads[rows, 0], heads[rows, 2])).all(axis=1)
        own = whole & (heads[:, 0] == keys) & (heads[:, 1] == table)
        wrong = {
            "default": default & ~may_lack,
            "torn": ~default & ~whole,
            "foreign": whole & ~own,
            "invented": own & ((keys >= ROWS) | (heads[:, 2] > ceiling)),
            "stale": own & (heads[:, 2] < floor),
        }
        if found is not None:
            wrong["mask"] = found == default
        return {kind: rows for kind, rows in wrong.items() if rows.any()}

    def check(self, process: int, how: str, bounds: Bounds, vectors: FloatArray, found: BoolArray | None = None) -> bool:
        """Judge an answer of a process, count it, and write down what is wrong. Returns whether it is right."""
        wrong = self.judge(bounds, vectors, found)
        self.count(answers=1, vectors=bounds.keys.size)
        for kind, rows in wrong.items():
            self.violation(kind, process=PROCESSES[process], how=how, **self._evidence(bounds, vectors, rows))
        return not wrong

    def _evidence(self, bounds: Bounds, vectors: FloatArray, rows: BoolArray) -> dict[str, Any]:
        row = int(np.flatnonzero(rows)[0])
        key = int(bounds.keys[row])
        return {
            "table": ".".join(TABLES[bounds.table][:2]),
            "keys": int(np.count_nonzero(rows)),
            "of": int(rows.size),
            "key": key,
            "got": [float(value) for value in vectors[row, :6]],
            "acknowledged": int(bounds.floor[row]),
            "begun": int(self.begun[bounds.table, key]),
            "deleted": int(self.deleted[bounds.table, key]),
            "acknowledged_by_all": [int(one) for one in self.acknowledged[:, bounds.table, key]],
        }


def draw(rng: np.random.Generator, count: int, *, absent: bool = True) -> KeyArray:
    """Keys of a question: half from a few popular ones, the others from all; one in 20 in no table."""
    spread = rng.integers(0, ROWS + ABSENT if absent else ROWS, count)
    return np.where(rng.random(count) < 0.5, rng.integers(0, 1024, count), spread)
