"""The contract of a database tier, volatile or persistent.

Every tier implements `Database`. A database is of one of three kinds, and may have further capabilities, for which callers
test with `isinstance` once, when they are built.

    Database
    ├── InProcessDatabase      tables in the memory of this process (the hash map)
    └── LastingDatabase        tables and load records outlive this process
        ├── SharedDatabase     several processes share the tables, and one of them loads each (Redis)
        └── PersistentDatabase holds every row (RocksDB)

    OrderedWrites              keeps the order of changes, so that a log of updates can be followed (all three engines)
    └── AgingRows              removes rows by the time of their last change (all three engines)
    MergesRows                 loads a table from another one and changes (row files)
    DeviceReadable             devices read its tables in place (the hash map, row files)
    AdoptsRowFiles             takes row files of model versions as they are (row files)
"""

import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self, TypeAlias

import numpy as np

from hps.errors import DatabaseTimeoutError
from hps.ground.memory.capacity import Need
from hps.ground.memory.host_tables import HostTable
from hps.ground.shares import may_be_empty
from hps.statistics.snapshot import FileStatistics
from hps.types import BoolArray, CheckResult, FloatArray, IndexArray, KeyArray, RowArray, TableSpec

CopyOutcome: TypeAlias = Literal["complete", "refused", "interrupted"]
"""How a copy into a shared database ended; `refused`: other processes have modified the table."""

UNBOUNDED_ROWS: Final = 2**64 - 1
"""The capacity of a table that never evicts; HugeCTR's default `overflow_margin`."""

LOAD_ADVICE: Final = "Load its model again with `hps load CONFIG --force`, which replaces the table"
"""The advice for a table that is damaged or contradicts the configuration."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """How much of a model a table holds. *Immutable.*

    Attributes:
        fingerprint: identifies the model files (place, sizes, versions); two loads of the same files have the same one.
        rows_done: leading rows of the files that the table holds.
        rows_total: rows of the files.
        modified: whether `insert` or `delete` has modified the table since the load.
        source: path or URI of the files, for messages.
        size_bytes: total size of both files; 0 if unknown.
        checksum: CRC-32 of the loaded keys in file order, then of their vectors, 8 hexadecimal digits each; empty if unknown.
        loaded_at_us: time of the last loaded rows in microseconds since 1970, set by the database; 0 if unknown. Not compared.
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

    @property
    def promises_rows(self) -> bool:
        """Whether the loaded table has a row: without any, it was damaged."""
        loaded = self.complete and self.rows_total > 0 and not self.modified
        return loaded and not may_be_empty(self.fingerprint, self.rows_total)


@dataclass(frozen=True, slots=True, eq=False)
class RowChanges:
    """Changes to rows of one table, each with its place in the order of all changes. *Immutable.*

    Attributes:
        keys: (n,) int64, distinct.
        vectors: (n, dim) float32; unspecified for deleted rows.
        sequences: (n,) int64, at least 1; the later of two changes to a row has the higher sequence.
        deleted: (n,) bool, True for deletions; None if there are none.
        exact: if `vectors` are rows in fewer bits, the vectors that they encode, (n, dim) float32; else None.
    """

    keys: KeyArray
    vectors: FloatArray
    sequences: IndexArray
    deleted: BoolArray | None = None
    exact: FloatArray | None = None

    def at(self, rows: BoolArray | IndexArray | slice) -> "RowChanges":
        """Select rows by a mask, (n,), by positions or by a slice."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_ and rows.all():
            return self
        deleted = None if self.deleted is None else self.deleted[rows]
        exact = None if self.exact is None else self.exact[rows]
        return RowChanges(self.keys[rows], self.vectors[rows], self.sequences[rows], deleted, exact)

    def split(self) -> tuple[KeyArray, FloatArray, KeyArray]:
        """Return the inserted keys, their vectors, and the deleted keys."""
        if self.deleted is None or not self.deleted.any():
            return self.keys, self.vectors, self.keys[:0]
        return self.keys[~self.deleted], self.vectors[~self.deleted], self.keys[self.deleted]


class Partition(str):
    """A partition of a topic of a log of online updates: its name, `topic/number`. *Immutable.*"""

    __slots__ = ()

    def __new__(cls, topic: str, number: int | None = None) -> "Partition":
        """Join a topic and a number, or parse a name."""
        return super().__new__(cls, topic if number is None else f"{topic}/{number}")

    @property
    def topic(self) -> str:
        """The topic, which may contain slashes."""
        return self.rpartition("/")[0]

    @property
    def number(self) -> int:
        return int(self.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a table has followed one partition of a log of online updates. *Immutable.*

    Attributes:
        position: position of the last applied message, as the log writes it; empty before the first.
        sequence: highest sequence of a change in that partition so far.
    """

    position: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class TableCheck:
    """The readable part of one table. *Immutable.*

    Attributes:
        dim: floats per vector; 0 if the table is empty or its first row is unreadable.
        damage: why other rows are unreadable; empty if all are readable.
    """

    tag: str
    dim: int
    rows: int
    damage: str


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    """The state of a persistent database after an inspection. *One per thread.*

    Attributes:
        cures: steps that save the readable rows and discard the others.
    """

    tables: list[TableCheck]
    damages: list[str]
    cures: list[str]


@dataclass(frozen=True, slots=True)
class SealStats:
    """Changes of a table beside its sealed file. *Immutable.*

    Attributes:
        changed_rows: rows that changed since the file was made.
        seals, sealed_rows, seal_seconds: new files since the table was opened, the changes that they took, and their duration.
        seal_failures: seals that failed, and loads that could not be made durable.
    """

    changed_rows: int
    seals: int
    sealed_rows: int
    seal_seconds: float
    seal_failures: int


@dataclass(frozen=True, slots=True)
class TableStats:
    """Size of one table. *Immutable.*

    Attributes:
        vector_bytes: memory or disk space of the vectors.
        overhead_bytes: memory or disk space of everything else; -1 if unknown.
        capacity_rows: rows at which the table evicts (overflow_margin x num_partitions), or `UNBOUNDED_ROWS`.
        evictions: rows evicted by this process since it opened the table; None if not counted.
        sealing: its changes beside a sealed file; None if it has no such file.
        file: of a table in a row file.
    """

    rows: int
    vector_bytes: int
    overhead_bytes: int
    capacity_rows: int = UNBOUNDED_ROWS
    evictions: int | None = None
    sealing: SealStats | None = None
    file: FileStatistics | None = None


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The file system that a database is on."""

    free_bytes: int  # for this user
    total_bytes: int

    @classmethod
    def of(cls, path: Path) -> "DiskSpace":
        """Ask the system; raise OSError if the path is gone."""
        usage = shutil.disk_usage(path)
        return cls(usage.free, usage.total)


class Database(ABC):
    """A key-value store of embedding tables, each addressed by its tag. *Thread-safe.*

    A vector is a row as the table stores it, and `dim` the number of its 4-byte words (`ground/rows.py`).

    No call loops over keys in Python. Keys are any int64. If a batch has a key twice, the last one wins. An absent key is
    not an error; a database that cannot answer raises `DatabaseError` (or a subclass), so that a failure is never reported as
    an absent key. Every wait has a timeout. A call with a tag that was never opened raises
    `UnknownTableError`; a call after `close` raises `NotReadyError`.
    """

    kind: ClassVar[str]
    """The configuration value that selects this database, e.g. `rocks_db`."""

    in_process: ClassVar[bool] = False
    """Whether tables are in the memory of this process and end with it."""

    shared: ClassVar[bool] = False
    """Whether other processes use and modify its tables."""

    persistent: ClassVar[bool] = False
    """Whether it has every row of a table and preserves it over restarts."""

    read_only: bool = False
    """Whether it refuses modifications."""

    row_dtype: Literal["float32"] | None = None
    """The format of all its rows; None for the format of each table."""

    load_bytes: int = 0
    """Preferred size of a `load_chunk` in bytes of keys and vectors; 0 for any."""

    rows_worth_a_thread: int = 0
    """Minimum number of rows for another thread in a `fetch` (about 100 us of work); 0 if threads gain nothing, or the database
    distributes a fetch by itself."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Self:
        """Open the database that `config` (a `VolatileDbConfig` or `PersistentDbConfig`) describes.

        Raises:
            DatabaseError: the engine cannot be reached or opened (`DatabaseLockedError`, `DatabaseCorruptError`).
        """

    def stored(self, table: TableSpec) -> TableSpec:
        """Return a table as this database stores it: with the tag and the width to use here."""
        return table.stored_as(self.row_dtype)

    @classmethod
    def kernels(cls, config: Any) -> Sequence[Callable[..., Any]]:
        """Return the numba kernels of lookups and loads with this configuration, to be compiled at once with others."""
        return ()

    @abstractmethod
    def open_table(self, tag: str, dim: int) -> None:
        """Open a table; create it empty if it does not exist. Opening an open table changes nothing.

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
                has its complete vector, others may have been written.
        """

    @abstractmethod
    def insert(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Add or replace vectors. A concurrent `fetch` gets the complete old or new vector of each key."""

    def promote(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> int:
        """Add vectors that the database below has. A shared database replaces no row.

        Returns:
            How many vectors were added. The others are dropped, which only costs a later miss.
        """
        self.insert(tag, keys, vectors)
        return keys.size

    @abstractmethod
    def delete(self, tag: str, keys: KeyArray) -> int:
        """Remove keys; return how many distinct ones were present, or -1 if counting is expensive."""

    def copy_changes(self, tag: str, changes: RowChanges) -> None:
        """Apply changes that the database below has just applied; a shared database may drop the rows instead."""
        keys, vectors, deleted = changes.split()
        if keys.size:
            self.insert(tag, keys, vectors)
        if deleted.size:
            self.delete(tag, deleted)

    @abstractmethod
    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield every row once, in chunks of at most `chunk_rows`, in unspecified order, as arrays for the caller to keep.

        The scan may or may not see rows that are inserted or deleted while it runs; no vector is torn.
        """

    @abstractmethod
    def stats(self, tag: str) -> TableStats:
        """Return the size of a table. Its rows may be an estimate."""

    def size(self, tag: str) -> int:
        """Count the rows of a table; an estimate if the engine counts lazily."""
        return self.stats(tag).rows

    def disk_space(self) -> DiskSpace | None:
        """Return the space of this database's file system; None, the default, if it is not on a disk of this machine.

        Raises:
            OSError: its directory is gone.
        """
        return None

    @classmethod
    def room_for(cls, config: Any, tables: Sequence[tuple[str, int, int]]) -> list[Need]:
        """Estimate the needs of tables in an empty database of this configuration, without opening or connecting to one.

        Args:
            config: as for `from_config`.
            tables: tag, dim and rows of each, as for `check_room`.

        Returns:
            Needs by table, and of the database itself. None by default.
        """
        return []

    def check_room(self, tables: Sequence[tuple[str, int, int]]) -> None:  # noqa: B027 - optional
        """Refuse tables that do not fit in addition to the present ones, before any row is loaded. Nothing is reserved or
        created.

        Args:
            tables: tag, dim and total rows of each, all to be loaded. Rows that a table has already need no more room.

        Raises:
            CapacityError: they do not fit; the message has the need of each, the free room and how to make more.
            DatabaseError: the engine did not answer.
        """

    @abstractmethod
    def drop_table(self, tag: str) -> None:
        """Remove a table with its rows and its load record. Dropping a table that does not exist changes nothing."""

    def release_table(self, tag: str) -> None:  # noqa: B027 - optional
        """Free this process' memory of a table that no deployed model uses. Rows elsewhere stay."""

    def discard_table(self, tag: str) -> bool:
        """Drop a table, opened or not, that no process uses; return whether it was dropped."""
        if self.read_only:
            return False
        self.drop_table(tag)
        return True

    @abstractmethod
    def close(self) -> None:
        """Release the engine. Closing twice changes nothing."""

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        """Insert one chunk of a model in bulk; `record` describes the table after it."""
        self.insert(tag, keys, vectors)


class OrderedWrites(ABC):
    """Keeps the order of changes to rows. A database with every row needs it to follow a log of updates."""

    @abstractmethod
    def follow_log(self, tag: str) -> dict[Partition, LogPosition]:
        """Start keeping the order of changes to an open table, for as long as its rows exist.

        Returns:
            The last positions given to `apply`, by partition; empty for a table that never followed a log.
        """

    @abstractmethod
    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        """Apply the changes that are not older than the last change of their row.

        A deleted row is remembered with the sequence of its deletion. A row that only a load wrote is older than any change. An
        `insert` or a `delete` is later than all changes applied before it, and earlier than changes with a higher sequence
        than those. Applying a change again leaves the same row.

        Args:
            tag: a table for which `follow_log` was called.
            changes: may be empty.
            positions: how far the log had been applied to *every* tier before these changes were read. They are stored with the
                changes, so that reading continues there after a crash; applying changes again has no effect.

        Returns:
            (n,) bool: True for applied changes, False for rows with a later change. As durable as an `insert`.

        Raises:
            DatabaseError: each row has its old or its new state, with the matching sequence.
        """


class ExpiredRows(NamedTuple):
    """What `AgingRows.expire` found."""

    kept: BoolArray  # (n,): keys with a later change
    removed: int  # rows that were removed; -1 if counting is expensive


class AgingRows(OrderedWrites):
    """Knows when each row was last changed online. In an aging table sequences are times, in microseconds since 1970."""

    @abstractmethod
    def order_by_time(self, tag: str) -> None:
        """Start keeping the order of changes to an open table by their time, durably, for as long as its rows exist.

        From then on, an `insert` or a `delete` takes the current time as its sequence, or one more than the highest one.
        """

    @abstractmethod
    def changed_rows_of(self, tag: str) -> Iterator[tuple[KeyArray, IndexArray]]:
        """Yield all keys with a change that is remembered, and the sequence of the last one, in chunks, in any order.

        Includes deleted rows, but no row that only a load wrote. May or may not see concurrent changes. A key may occur twice.
        """

    @abstractmethod
    def last_changes(self, tag: str, keys: KeyArray) -> IndexArray:
        """Return the sequences of the last changes of keys, (n,); 0 without one."""

    @abstractmethod
    def expire(self, tag: str, keys: KeyArray, sequence: int, *, loaded: bool = False) -> ExpiredRows:
        """Remove the rows whose last change has at most this sequence. A crash may undo it.

        The caller refuses older changes from then on, so that a database forgets these where it can.

        Args:
            keys: (n,) int64, distinct.
            loaded: remove rows that only a load wrote, too; else they stay.

        Raises:
            DatabaseError: each row is as before, or removed.
        """


class PeerRead(NamedTuple):
    """How reading a range from other replicas ended."""

    peer: str  # which of them filled the buffer; empty if none did, so that the range must be read elsewhere
    failures: int  # how many failed to, other than by not having it


class FilePeers(ABC):
    """Other replicas, which may have parts of the same row files. *Thread-safe.* No method raises."""

    @abstractmethod
    def read(self, content: str, size_bytes: int, offset: int, buffer: memoryview) -> PeerRead:
        """Fill a buffer from a byte of the file of this content on; unspecified bytes are left there if no peer can.

        The bytes are those that a peer sent: only the checksums of their pages say whether they are right.
        """

    @abstractmethod
    def report_damage(self, peer: str, content: str) -> None:
        """Ask a peer no more for a while: it sent wrong bytes."""


class SharedRowFile(ABC):
    """A row file of this process that other replicas may read. *Thread-safe.* It stays readable after its table is dropped."""

    size_bytes: int

    @abstractmethod
    def has(self, start: int, stop: int) -> bool:
        """Return whether bytes [start, stop) are here."""

    @abstractmethod
    def read(self, start: int, stop: int) -> memoryview:
        """Copy bytes [start, stop), which are here. Without the GIL, since the disk may be slow."""


@dataclass(frozen=True, slots=True)
class RowFileSource:
    """A row file of a model version, opened at one version. *Immutable, thread-safe.*

    Attributes:
        place: path or URI.
        version: changes when the file is replaced.
        path: local path; None if the file is elsewhere.
        read: fills a buffer from a byte on; raises `ModelFileError`, also if the file has another version by now.
        parallel_reads: number of ranges to read at a time.
        part_bytes: largest range to read at once.
        peers: have the file perhaps, and are asked first.
    """

    place: str
    version: str
    size_bytes: int
    path: Path | None
    read: Callable[[int, memoryview], None] = field(repr=False, compare=False)
    parallel_reads: int = 8
    part_bytes: int = 4 << 20
    peers: FilePeers | None = field(default=None, repr=False, compare=False)


Adoption: TypeAlias = Literal["refused", "linked", "copied", "downloading"]
"""How a database took a row file; `refused`: it has rows that the file would have to be merged with."""


class AdoptsRowFiles(ABC):
    """Takes a row file of a model version as it is, instead of loading its rows."""

    @abstractmethod
    def adopt(
        self, tag: str, file: RowFileSource, record: LoadRecord, progress: Callable[[int], None] = lambda rows: None
    ) -> Adoption:
        """Make a row file the rows of an open table that has none but online changes, or a part of this very file.

        A file on the same file system that nobody else may write to is linked: no byte is copied, and it survives the deletion
        of its source. Any other is copied, each page compared with its checksum. A file elsewhere is served at once while it
        is copied in the background, unless the database waits for it. Later changes of other origin stay.

        Args:
            record: of the complete load.
            progress: called with the number of further rows, if any are copied.

        Raises:
            ModelFileError: the file is damaged, of another table or cannot be read. The table has no row of it.
            DatabaseError: the database failed.
        """

    @abstractmethod
    def copies(self, file: RowFileSource) -> bool:
        """Return whether adopting a file takes disk space for another copy."""

    def shared_file(self, content: str) -> SharedRowFile | None:
        """Return the file of an open table by the fingerprint of its content, complete or not; None if no table has it."""
        return None


class DeviceReadable(ABC):
    """Its tables are in memory that devices can map and read in place.

    Attributes:
        always_indexed: a device that reads a table keeps a copy of its index, also without `index_on_device`.
    """

    always_indexed: ClassVar[bool] = False

    @abstractmethod
    def host_table(self, tag: str) -> HostTable:
        """Return an open table for devices."""

    @classmethod
    @abstractmethod
    def index_bytes(cls, rows: int) -> int:
        """Return the size of a copy of the index of a reserved table."""


class MergesRows(ABC):
    """Loads a table from another one of it and the changes between them, without passing the other's rows through Python."""

    @abstractmethod
    def load_merged(
        self, tag: str, base_tag: str, changes: Iterable[tuple[KeyArray, RowArray | None]], rows: int, record: LoadRecord
    ) -> bool:
        """Load an open, empty table with the rows of another open one that no caller modifies, and changes.

        Args:
            changes: keys and rows of changed rows, or keys and None of deleted ones, later ones count; read once.
            rows: about how many there are.
            record: describes the table afterwards, as by `load_chunk`; nothing remains to be finished.

        Returns:
            False if this is not possible, as when the other table was modified; nothing was read or changed then.
        """


class InProcessDatabase(Database):
    """A volatile database in the memory of this process."""

    in_process = True

    def reserve(self, tag: str, rows: int, keys: Iterable[KeyArray] = ()) -> None:
        """Reserve memory for `rows` in total, so that loading need not grow the table step by step.

        Args:
            keys: the keys to be loaded, at least most of them, in parts, each of which may overwrite the last; read if useful.
        """

    def release_table(self, tag: str) -> None:
        self.drop_table(tag)


class LastingDatabase(Database):
    """A database whose tables outlive this process, each with a record of its load."""

    @classmethod
    def probe(cls, config: Any, tables: Mapping[TableSpec, int]) -> list[CheckResult]:
        """Check that the database of `config` can be opened and filled. Nothing is written. Not for a process that has it open.

        Args:
            tables: the tables to load, with the bytes of their files.

        Returns:
            The results; empty by default.
        """
        return []

    @abstractmethod
    def tags(self) -> list[str]:
        """List the tags of all tables, opened by this process or not, sorted."""

    @abstractmethod
    def load_record(self, tag: str) -> LoadRecord | None:
        """Return which model files a table holds; None if unknown.

        The first `insert` or `delete` after a load marks the record as modified, durably, before it changes a row.
        """

    def finish_load(self, tag: str) -> None:
        """Finish the load of a table (flush, compact, release a lease). Called once, after its last `load_chunk`."""


class SharedDatabase(LastingDatabase):
    """A volatile database that several processes share. One of them at a time loads a table."""

    shared = True

    @abstractmethod
    def claim_load(self, tag: str, fingerprint: str, rows: int, wait_s: float = 0.0, *, replaces: bool = True) -> int | None:
        """Claim the right to load an open table, before the first `load_chunk`.

        The database records the loaded rows, and empties a table with another model's rows. The process with the claim
        loads the rows in order and then calls `finish_load`. If it dies, another may claim the rest after a while.

        Args:
            fingerprint: identifies the model files. rows: how many leading rows of the files to load. wait_s: how long to wait
            while another process loads. replaces: whether to empty a table with another model's rows while other processes use
            it, which then need a database
                below.

        Returns:
            The first row to load; `rows` if the table has them all; None if another process is still loading after `wait_s`.

        Raises:
            DatabaseError: other processes use another model's rows, which must stay.
        """

    def stand_above(self, tag: str, database: "PersistentDatabase", below: str = "") -> None:
        """Set the database of this process that has every row of an open table.

        Args:
            below: the tag of the table there; by default the same.

        From then on this database returns no row older than a modification by this process, including modifications before
        its start. In doubt it has no rows and accepts none.
        """

    def used_by_others(self, tag: str) -> bool:
        """Return whether other processes use a table, opened by this one or not; False by default."""
        return False

    def clear_table(self, tag: str, fingerprint: str) -> bool:
        """Drop a table with the rows of other files, opened or not, unless another process uses it.

        Returns:
            Whether these files can be loaded into it without taking rows from another process.
        """
        return True

    def empty_table(self, tag: str) -> bool:
        """Drop a table, opened or not and of any origin, unless another process uses it; return whether it was dropped."""
        self.drop_table(tag)
        return True

    def lacks_rows(self, tag: str) -> bool:
        """Return whether an open table lost loaded rows, or its load or copy did not end; False by default."""
        return False

    def holds_writes(self, tag: str) -> bool:
        """Return whether an open table has rows that processes modified online; False by default."""
        return False

    def claim_copy(self, tag: str, fingerprint: str, rows: int) -> bool:
        """Claim the right to fill an open table that lacks rows from the database below, while all processes use it.

        If the process with the claim dies, another may have it after a while.

        Args:
            fingerprint, rows: as for `claim_load`; recorded when the copy is complete.

        Returns:
            False if the table lacks no rows or cannot be filled, or if another process fills or loads it.
        """
        return False

    def copy_rows(self, tag: str, keys: KeyArray, vectors: FloatArray) -> bool:
        """Add or replace rows with those of the database below. No modification by this process may run meanwhile.

        Returns:
            Whether all were stored. Rows are skipped if other processes have modified the table: theirs may be newer.
        """
        return False

    def end_copy(self, tag: str, outcome: CopyOutcome) -> None:
        """End a copy. After a `refused` copy a table does not count as lacking rows until it loses more."""

    def discard_table(self, tag: str) -> bool:
        """Stop using a table; the last user drops it. Return whether it was dropped, by default never.

        A process uses a table from `open_table` until it discards or drops it, closes the database, or dies; the use of a dead
        process counts for a while. Tables that other programs may use are left alone. Later calls of this process with the tag
        raise `UnknownTableError` until it opens the table again.
        """
        return False


class PersistentDatabase(LastingDatabase):
    """A database with every row of a table and a record of the model files they came from."""

    persistent = True

    directory: Path | None = None
    """Local directory that lasts as long as the tables, for files of callers; None if there is none."""

    def must_drop(self, tag: str, dim: int, *, force: bool = False) -> bool:
        """Return whether a table, not open here, must be dropped before it is loaded: it was loaded with another width.

        Args:
            dim: of the table to be loaded.
            force: also if it is damaged, or its rows may not be from files.
        """
        return False

    def keeps_changes(self, tag: str) -> bool:
        """Return whether an incomplete load of a table had ended before, without being durable.

        Modifications since then are later than the load: loading the same files again keeps them.
        """
        return False

    def written_at(self, tag: str, keys: KeyArray) -> IndexArray:
        """Return when rows were last written or loaded, (n,) int64, microseconds since 1970; 0 for absent keys or if unknown.

        For a few keys at a time: this is slower than a lookup.
        """
        return np.zeros(keys.size, np.int64)

    def writer_token(self, tag: str) -> str | None:
        """Return the token of this table's modifications, for shared databases above; None if unmodified since the load.

        The first `insert` or `delete` stores one durably before it changes a row.
        """
        # By default tokens differ by object, so that a shared database never relies on writes of an earlier process.
        tokens: dict[str, str] = self.__dict__.setdefault("_writer_tokens", {})
        return tokens.setdefault(tag, secrets.token_hex(6))

    def renew_writer_token(self, tag: str) -> str | None:
        """Replace the token, if there is one, durably before the next modification returns; return the new token.

        A shared database then no longer relies on its rows of the table.
        """
        if self.writer_token(tag) is not None:
            self.__dict__["_writer_tokens"][tag] = secrets.token_hex(6)
        return self.writer_token(tag)

    @abstractmethod
    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        """Insert one chunk of a model in bulk, then store `record`, which counts this chunk.

        A process that is killed between the two leaves the older record; loading the chunk again has no effect.
        """


@contextmanager
def exclusive(lock: Lock, timeout_s: float, busy: str) -> Iterator[None]:
    """Hold a lock within the block.

    Raises:
        DatabaseTimeoutError: other threads held it for too long; the message is `busy`.
    """
    if not lock.acquire(timeout=max(0.0, timeout_s)):
        raise DatabaseTimeoutError(busy)
    try:
        yield
    finally:
        lock.release()
