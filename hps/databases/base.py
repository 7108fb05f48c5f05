"""The contract of a database tier: what the volatile and the persistent database both do."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from hps.types import BoolArray, FloatArray, KeyArray


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """How far a table holds the rows of a model. Immutable.

    Attributes:
        fingerprint: identifies the model files (place, sizes, versions); two loads of the same files have the same one.
        rows_done: leading rows of the files that the table holds.
        rows_total: rows of the files.
        modified: the table was modified since, by `insert` or `delete`: it no longer equals the files.
        source: path or URI of the files, for people.
        size_bytes: of both files together; 0 where it is not known.
        checksum: CRC-32 of the keys that were loaded, in the order of the files, and that of their vectors, each in eight
            hexadecimal digits; empty where it is not known.
    """

    fingerprint: str
    rows_done: int
    rows_total: int
    modified: bool = False
    source: str = ""
    size_bytes: int = 0
    checksum: str = ""

    @property
    def complete(self) -> bool:
        return self.rows_done == self.rows_total


@dataclass(frozen=True, slots=True)
class TableStats:
    """Size of one table.

    Attributes:
        rows: vectors that it holds.
        vector_bytes: what they take.
        overhead_bytes: what is held beside the vectors, -1 where the engine cannot say.
        capacity_rows: rows at which it evicts (overflow_margin x num_partitions); 2^64 - 1, as in HugeCTR, where it never does.
    """

    rows: int
    vector_bytes: int
    overhead_bytes: int
    capacity_rows: int = 2**64 - 1


class Database(ABC):
    """A key-value store of embedding tables, each addressed by its tag. *Thread-safe.*

    Arrays in, arrays out: no call loops over keys in Python. Keys are any int64. Where one batch holds a key twice, the
    last one wins. A key that is not there is no error; a database that cannot answer raises `DatabaseError` (or a
    subclass) and has then answered nothing: a failure is never reported as an absent key. Every wait is bounded by a
    timeout. A call for a tag that was never opened raises `UnknownTableError`; one after `close` raises `NotReadyError`.
    """

    kind: ClassVar[str]
    """The configuration value that selects this database, e.g. `rocks_db`."""

    persistent: ClassVar[bool] = False
    """Whether it holds every row and remembers, by `load_record`, what was loaded: True for a persistent database."""

    load_bytes: ClassVar[int] = 0
    """Keys and vectors that a `load_chunk` is best called with; 0 where it does not matter."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any) -> Self:
        """Open the database that `config` (a `VolatileDbConfig` or `PersistentDbConfig`) describes.

        Raises:
            DatabaseError: the engine cannot be reached or opened (`DatabaseLockedError`, `DatabaseCorruptError`).
        """

    @abstractmethod
    def open_table(self, tag: str, dim: int) -> None:
        """Make a table ready for use, created empty where it does not exist. Opening an open table changes nothing.

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

        Rows whose `found` is already True, and rows whose key is not in the table, are left as they are.

        Args:
            keys: (n,) int64, C-contiguous, in host memory; read only. Duplicates are allowed.
            out: (n, dim) float32, C-contiguous, in host memory; written only where a vector is found.
            found: (n,) bool, C-contiguous, in host memory; set to True where a vector is found, never to False.

        Returns:
            How many rows this call filled.

        Raises:
            DatabaseError: the database failed; `out` and `found` may be partly filled, and every row that is marked
                as found then holds its whole vector.
        """

    @abstractmethod
    def insert(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Add or replace vectors. A concurrent `fetch` sees, for each key, the old or the new vector, whole."""

    @abstractmethod
    def delete(self, tag: str, keys: KeyArray) -> int:
        """Remove keys; returns how many distinct keys were there, -1 where the engine cannot say cheaply."""

    @abstractmethod
    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield all rows once, in chunks of at most `chunk_rows`, in unspecified order, as arrays the caller owns.

        Rows that are inserted or deleted while the scan runs may or may not be seen; no vector is torn.
        """

    @abstractmethod
    def size(self, tag: str) -> int:
        """Number of rows of a table; an estimate where the engine counts lazily."""

    @abstractmethod
    def stats(self, tag: str) -> TableStats:
        """Rows and bytes of a table."""

    @abstractmethod
    def tags(self) -> list[str]:
        """Tags of all tables that exist, opened by this process or not, sorted."""

    @abstractmethod
    def drop_table(self, tag: str) -> None:
        """Remove a table, its rows and its load record. Dropping a table that does not exist changes nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine. Closing twice changes nothing."""

    def claim_load(self, tag: str, fingerprint: str, rows: int, wait_s: float = 0.0, *, afresh: bool = False) -> int | None:
        """Ask which rows of a model to load into a table, before `load_chunk`, where `load_record` is None.

        A database that several processes share lets one of them load a table at a time, remembers what it has loaded, and
        empties a table that holds another model. Whoever gets a claim loads the rows in their order and then calls
        `finish_load`; if it dies, another may claim what is left after a while.

        Args:
            tag: of an open table.
            fingerprint: identifies the model files.
            rows: how many of their leading rows the table is to hold.
            wait_s: how long to wait while another process loads.
            afresh: empty the table and load it again, whatever it holds. It must be opened again then.

        Returns:
            The first row that is still needed, `rows` where the table has them all; None when another process is loading
            them after `wait_s`.
        """
        if afresh:
            self.drop_table(tag)
        return 0

    def load_record(self, tag: str) -> LoadRecord | None:
        """What is known of the model files in a table; None where nothing is, as in any volatile database.

        A database that keeps records marks one as modified, durably, before the first `insert` or `delete` that follows it.
        """
        return None

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        """Insert one chunk of a model in bulk, then remember `record`, which counts this chunk.

        A process that is killed between the two finds the older record; loading the chunk again changes nothing.
        """
        self.insert(tag, keys, vectors)

    def release_table(self, tag: str) -> None:  # noqa: B027 - optional
        """Called when no model of this process uses a table any more: a database in its memory drops the table."""

    def reserve(self, tag: str, rows: int) -> None:  # noqa: B027 - optional
        """Make room for so many rows in all before they are loaded, where that saves growing step by step."""

    def finish_load(self, tag: str) -> None:
        """Called once after the last `load_chunk` of a table, to let the engine settle (flush, compact)."""
        return
