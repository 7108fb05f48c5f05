"""The contract of a database tier, volatile or persistent.

`Database` is what every tier does. Three subclasses add what only some of them can do; the loader asks for them:

- `InProcessDatabase`: its tables are in the memory of this process and end with it (the hash map).
- `SharedDatabase`: several processes share its tables, and one of them loads each (Redis).
- `PersistentDatabase`: it holds every row, and remembers which model files they came from (RocksDB).
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np

from hps.capacity import Need
from hps.errors import DatabaseError
from hps.findings import Finding
from hps.host_tables import HostTable
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, TableSpec

UNBOUNDED_ROWS: Final = 2**64 - 1
"""The capacity of a table that never evicts; HugeCTR's default `overflow_margin`."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """How much of a model a table holds. *Immutable.*

    Attributes:
        fingerprint: identifies the model files (place, sizes, versions); two loads of the same files have the same one.
        rows_done: leading rows of the files that the table holds.
        rows_total: rows of the files.
        modified: whether `insert` or `delete` has modified the table since: it no longer equals the files.
        source: path or URI of the files, for people.
        size_bytes: size of both files together; 0 if unknown.
        checksum: CRC-32 of the loaded keys, in the order of the files, then that of their vectors, eight hexadecimal digits
            each; empty if unknown.
        loaded_at_us: when the database took the last rows of the load, in microseconds since 1970; 0 if unknown. The database
            sets it; records that differ in it alone are equal.
    """

    fingerprint: str
    rows_done: int
    rows_total: int
    modified: bool = False
    source: str = ""
    size_bytes: int = 0
    checksum: str = ""
    loaded_at_us: int = field(default=0, compare=False)

    @property
    def complete(self) -> bool:
        return self.rows_done == self.rows_total


@dataclass(frozen=True, slots=True, eq=False)
class RowChanges:
    """Changes of rows of one table, each with its place in the order of all changes of the table. *Immutable.*

    Attributes:
        keys: (n,) int64, distinct.
        vectors: (n, dim) float32; what stands there for a deleted row says nothing.
        sequences: (n,) int64, at least 1: of two changes of a row the one with the higher sequence is the later one.
        deleted: (n,) bool, True where the row is removed; None where none is.
    """

    keys: KeyArray
    vectors: FloatArray
    sequences: IndexArray
    deleted: BoolArray | None = None

    def at(self, rows: BoolArray) -> "RowChanges":
        """Those of the rows that are marked, (n,)."""
        if rows.all():
            return self
        deleted = None if self.deleted is None else self.deleted[rows]
        return RowChanges(self.keys[rows], self.vectors[rows], self.sequences[rows], deleted)

    def split(self) -> tuple[KeyArray, FloatArray, KeyArray]:
        """The keys and vectors that are inserted, and the keys that are deleted."""
        if self.deleted is None or not self.deleted.any():
            return self.keys, self.vectors, self.keys[:0]
        return self.keys[~self.deleted], self.vectors[~self.deleted], self.keys[self.deleted]


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a table has followed one partition of a log of online updates. *Immutable.*

    Attributes:
        position: of the last message that is applied, as the log writes it; empty before the first.
        sequence: the highest one that a change in that partition had so far.
    """

    position: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class TableReport:
    """What can be read of one table. *Immutable.*

    Attributes:
        tag: of the table.
        dim: floats of a vector; 0 if the table is empty or its first row cannot be read.
        rows: that can be read.
        damage: why no more can be read; empty if all can.
    """

    tag: str
    dim: int
    rows: int
    damage: str


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    """What is damaged in a persistent database. *One per thread.*

    Attributes:
        tables: what can be read; empty if nothing can.
        damages: what is damaged and how; empty if nothing is.
        cures: steps that save what can be read and give up the rest.
    """

    tables: list[TableReport]
    damages: list[str]
    cures: list[str]


@dataclass(frozen=True, slots=True)
class TableStats:
    """Size of one table. *Immutable.*

    Attributes:
        rows: vectors that it holds.
        vector_bytes: memory or disk that they take.
        overhead_bytes: what it takes beside the vectors, -1 if the engine cannot say.
        capacity_rows: rows at which it evicts (overflow_margin x num_partitions), or `UNBOUNDED_ROWS`.
        evictions: rows that this process has evicted since it opened the table; None where nobody counts.
    """

    rows: int
    vector_bytes: int
    overhead_bytes: int
    capacity_rows: int = UNBOUNDED_ROWS
    evictions: int | None = None


class Database(ABC):
    """A key-value store of embedding tables, each addressed by its tag. *Thread-safe.*

    Arrays in, arrays out: no call loops over keys in Python. Keys are any int64. If a batch holds a key twice, the last one
    wins. An absent key is not an error; a database that cannot answer raises `DatabaseError` (or a subclass), so that a
    failure is never reported as an absent key. Every wait has a timeout. A call with a tag that was never opened raises
    `UnknownTableError`; a call after `close` raises `NotReadyError`.
    """

    kind: ClassVar[str]
    """The configuration value that selects this database, e.g. `rocks_db`."""

    rows_worth_a_thread: int = 0
    """Rows of a `fetch` from which it pays to fetch them in a thread of their own: as many as take some 100 us. 0 where threads
    gain nothing, or the database shares a fetch out by itself."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Self:
        """Open the database that `config` (a `VolatileDbConfig` or `PersistentDbConfig`) describes.

        Raises:
            DatabaseError: the engine cannot be reached or opened (`DatabaseLockedError`, `DatabaseCorruptError`).
        """

    @classmethod
    def probe(cls, config: Any, tables: Mapping[TableSpec, int]) -> list[Finding]:
        """Find out whether the database that `config` describes could be opened and filled. Nothing is written there.

        Not for a process that has it open.

        Args:
            tables: that are to be in it, and the bytes of their files.

        Returns:
            What was found; nothing where there is nothing to look at.
        """
        return []

    @abstractmethod
    def open_table(self, tag: str, dim: int) -> None:
        """Make a table ready for use, and create it empty if it does not exist. Opening an open table changes nothing.

        Raises:
            TableWidthError: the table exists with vectors of another width.
        """

    @abstractmethod
    def fetch(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, dim)
        found: BoolArray,  # (n,)
    ) -> int:
        """Fill the rows of `out` that are not yet `found`, and mark them.

        Rows that are already marked, and rows whose key is not in the table, are left as they are.

        Args:
            keys: (n,) int64, C-contiguous, in host memory; read only. Duplicates are allowed.
            out: (n, dim) float32, C-contiguous, in host memory; only rows whose vector is found are written.
            found: (n,) bool, C-contiguous, in host memory; set to True where a vector is found, never to False.

        Returns:
            How many rows this call filled.

        Raises:
            DatabaseError: the database failed. `out` and `found` may be partly filled; every row that is marked as found
                holds its whole vector, others may have been written.
        """

    @abstractmethod
    def insert(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Add or replace vectors. A concurrent `fetch` sees, for each key, the old or the new vector, whole."""

    def promote(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> int:
        """Add vectors that the database below was found to have. A database that others write to, too, replaces none.

        Returns:
            How many vectors were taken; the others are dropped, which costs a later miss and nothing else.
        """
        self.insert(tag, keys, vectors)
        return keys.size

    @abstractmethod
    def delete(self, tag: str, keys: KeyArray) -> int:
        """Remove keys; returns how many distinct ones were there, -1 if the engine cannot say cheaply."""

    def follow_log(self, tag: str) -> dict[str, LogPosition]:
        """Keep the order of changes to an open table from now on, also over the next start if the rows stay that long.

        Returns:
            What `apply` was told last of each partition of the log, by its name; empty for a table that never followed one.

        Raises:
            DatabaseError: this database cannot.
        """
        raise DatabaseError(f"following a log of updates for table {tag}: databases of type {self.kind} cannot keep its order")

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[str, LogPosition]) -> BoolArray:
        """Make those changes of a table that are not older than the last change of their row.

        A row that was deleted is remembered as deleted at that sequence; one that only a load wrote is older than any change.
        An `insert` or a `delete` is later than all changes that were applied before it, and earlier than those with a higher
        sequence than these. The same change again is made again, and leaves the same row.

        Args:
            tag: of a table for which `follow_log` was called.
            changes: what is to change; perhaps nothing.
            positions: how far the log had been applied to *every* tier before these changes were read; it is stored with them,
                so that after a crash at any moment the log is read from there, and what is then applied again changes nothing.

        Returns:
            (n,) bool: whether the row now is what the change makes of it; False where a later change had been made. All of it
            is as durable as an `insert`.

        Raises:
            DatabaseError: each of the rows has its old or its new state, with the sequence that belongs to it.
        """
        raise DatabaseError(f"updating table {tag}: databases of type {self.kind} cannot keep the order of updates")

    def copy_changes(self, tag: str, changes: RowChanges) -> None:
        """Make changes that the database below has just made; a database that others write to, too, may only drop the rows."""
        keys, vectors, deleted = changes.split()
        if keys.size:
            self.insert(tag, keys, vectors)
        if deleted.size:
            self.delete(tag, deleted)

    @abstractmethod
    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield every row once, in chunks of at most `chunk_rows`, in unspecified order, as arrays that the caller owns.

        The scan may or may not see rows that are inserted or deleted while it runs; no vector is torn.
        """

    @abstractmethod
    def size(self, tag: str) -> int:
        """Count the rows of a table; an estimate if the engine counts lazily."""

    @abstractmethod
    def stats(self, tag: str) -> TableStats:
        """Rows and bytes of a table."""

    @classmethod
    def room_for(cls, config: Any, tables: Sequence[tuple[str, int, int]]) -> list[Need]:
        """What an empty database of this configuration would take for tables; nothing is connected to, opened or made.

        Args:
            config: as for `from_config`.
            tables: tag, dim and rows of each, as for `check_room`.

        Returns:
            By table, and what the database takes for itself. Nothing by default.
        """
        return []

    def check_room(self, tables: Sequence[tuple[str, int, int]]) -> None:  # noqa: B027 - optional
        """Refuse tables that do not fit beside what is there, before anything of them is loaded.

        The answer is of the moment and reserves nothing. Nothing need be open, and nothing is made.

        Args:
            tables: tag, dim and rows of each, asked together: what one takes is not there for the next. The rows are those that
                the table is to hold in all; what it holds already under that tag needs no more room.

        Raises:
            CapacityError: they do not fit; the message says what each needs, what is free and what would make room.
            DatabaseError: the engine does not say.
        """

    def written_at(self, tag: str, keys: KeyArray) -> IndexArray:
        """When rows were last written, (n,) int64: microseconds since 1970; 0 for an absent key, and where nobody knows.

        A row that came by a load was written when it was loaded. For people, a few keys at a time: it is not a lookup.
        """
        return np.zeros(keys.size, np.int64)

    @abstractmethod
    def tags(self) -> list[str]:
        """Tags of all tables that exist, opened by this process or not, sorted."""

    @abstractmethod
    def drop_table(self, tag: str) -> None:
        """Remove a table with its rows and its load record. Dropping a table that does not exist changes nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine. Closing twice changes nothing."""

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        """Insert one chunk of a model in bulk; `record` says what the table holds once it is done."""
        self.insert(tag, keys, vectors)

    def finish_load(self, tag: str) -> None:  # noqa: B027 - optional
        """Let the engine settle (flush, compact, give up a lease). Called once, after the last `load_chunk` of a table."""


class InProcessDatabase(Database):
    """A volatile database in the memory of this process. A table that no deployed model uses is dropped."""

    @abstractmethod
    def reserve(self, tag: str, rows: int) -> None:
        """Make room for `rows` in all, so that loading them need not grow the table step by step."""

    def host_table(self, tag: str) -> HostTable | None:
        """The table as devices may read it in place; None where this database has none such."""
        return None


class SharedDatabase(Database):
    """A volatile database that several processes share. It lets one of them load a table at a time."""

    @abstractmethod
    def claim_load(self, tag: str, fingerprint: str, rows: int, wait_s: float = 0.0, *, afresh: bool = False) -> int | None:
        """Ask for the right to load a table, before the first `load_chunk`.

        The database remembers what it has loaded, and empties a table that holds another model. Who gets the claim loads the
        rows in their order and then calls `finish_load`. If that process dies, another may claim the rest after a while.

        Args:
            tag: of an open table.
            fingerprint: identifies the model files.
            rows: how many of their leading rows the table is to hold.
            wait_s: how long to wait while another process loads.
            afresh: empty the table first, whatever it holds. The caller must then open it again.

        Returns:
            The first row that is still needed, `rows` if the table has them all; None if another process is still loading
            them after `wait_s`.
        """

    def discard_table(self, tag: str) -> bool:
        """Say that this process does not use a table any more, whether or not it had opened it. The last user's is dropped.

        A process uses a table from `open_table` until it discards or drops it, closes the database, or dies; of one that died,
        the use counts for a while. A table that other programs may use is left alone. A call of this process with the tag then
        raises `UnknownTableError`, until it opens the table again.

        Returns:
            Whether the table was dropped. By default it never is: its rows may be another process' only ones.
        """
        return False

    def stand_above(self, tag: str, database: "PersistentDatabase") -> None:
        """Hear which database of this process holds every row of an open table.

        From then on this one is used only as far as it cannot show a row that is older than a modification that this process
        has made, also one that it made before it was started: where it cannot tell, it has no rows, and takes none.
        """


class PersistentDatabase(Database):
    """A database that holds every row, and remembers which model files they came from."""

    @classmethod
    def inspect(cls, path: Path) -> DatabaseReport:
        """Read a whole database that no process writes to, and change nothing there.

        Raises:
            DatabaseError: it cannot be looked at, or this kind of database cannot be looked at so.
        """
        raise DatabaseError(f"inspecting {path}: databases of type {cls.kind} cannot be inspected")

    load_bytes: int = 0
    """Bytes of keys and vectors in a `load_chunk` that the engine takes best; 0 if any size will do."""

    read_only: bool = False
    """Whether it refuses modifications."""

    def writer_token(self, tag: str) -> str | None:
        """The token by which a shared database knows what was modified here; None if nothing was since the table was loaded.

        The first `insert` or `delete` stores one, durably, before it changes a row. By default there always is one, and another
        one for each object, so that a shared database never counts on what an earlier process wrote to it.
        """
        tokens: dict[str, str] = self.__dict__.setdefault("_writer_tokens", {})
        return tokens.setdefault(tag, secrets.token_hex(6))

    def renew_writer_token(self, tag: str) -> str | None:
        """Store another token in place of the one that is there, if any; durably, and before the next modification returns.

        A shared database then no longer counts on what it holds of the table.

        Returns:
            The token that is stored now.
        """
        if self.writer_token(tag) is not None:
            self.__dict__["_writer_tokens"][tag] = secrets.token_hex(6)
        return self.writer_token(tag)

    @abstractmethod
    def load_record(self, tag: str) -> LoadRecord | None:
        """What is known of the model files in a table; None if nothing is.

        The first `insert` or `delete` after a load marks the record as modified, durably, before it changes a row.
        """

    @abstractmethod
    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        """Insert one chunk of a model in bulk, then remember `record`, which counts this chunk.

        A process that is killed between the two leaves the older record; loading the chunk again changes nothing.
        """
