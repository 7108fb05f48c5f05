"""RocksDB through rocksdict's raw mode: bytes in, bytes out, typed errors, bounded waits. No other module imports rocksdict.

Undocumented behaviour of the binding that this module handles (all observed with rocksdict 0.3.29):

- `write`, `ingest_external_file` and every `SstFileWriter` call hold the interpreter lock; multi-gets, `flush`, `flush_wal`
  and `compact_range` do not.
- An iterator that meets a damaged block ends as if at the last row; only `RdictIter.status` reports the damage.
- Iterators keep the database open, and its directory locked, until they are freed. None outlives a call here.
- `compact_range` reports no error; RocksDB counts it as a background error.
- Errors are bare `Exception`s with the engine's text.
"""

import ctypes
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any

import rocksdict

from hps.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseLockedError,
    DatabaseTimeoutError,
    ForkedProcessError,
    ReadOnlyError,
)
from hps.ground.threads.lifetimes import disown_in_children
from hps.ground.threads.pacing import pieces
from hps.stores.rocks_db.write_ahead_log import RESTORE, LogSeal

_log = logging.getLogger(__name__)

Family = Any
"""A column family: rocksdict.Rdict."""

DEFAULT = "default"
"""RocksDB's own column family."""

TIMES = "hps-written/"
"""Prefix of the column family with the write times of a table's rows; the tag follows."""

_SETTINGS = Path(__file__).parent / "settings"
BLOCK_BYTES = 2048
_LOAD_FILES = 256  # unmerged ingested files at level 0: below the usual limit of 1024 open files
_MERGE_READ_BYTES = 64 << 10  # read ahead, per file and merging thread
_MERGE_THREADS = 4  # even on fewer cores: a thread waits for the disk half of its time
_MERGE_PARTS = 16
_FILE_BYTES = (16 << 20, 256 << 20)  # of a merged file, minimum and maximum: few open files for any table size
WRITE_BUFFERS_BYTES = 128 << 20  # for all tables together
_MANIFEST_BYTES = 1 << 20  # then RocksDB starts a new one; reached after creating, loading and dropping 4,000 tables
_TIMES_BUFFER_BYTES = 4 << 20
_STALL_POLL_S = 0.01
_MANY_LOGS = 128  # each sync seals their ends: 0.1 ms for this many
_PACED_ROWS = 128  # between two pauses of a paced thread: 0.1 ms without lookups
_SIDE_BY_SIDE = "num-files-at-level0"


class _Threads:
    """RocksDB's own threads, shared by all databases of a process and alive after they close."""

    # A forked child lacks them, but RocksDB does not detect that: a flush waits for them forever, and RocksDB's exit handler
    # joins them, which is a segmentation fault.

    def __init__(self) -> None:
        self.missing = False

    def use(self, path: Path) -> None:
        if self.missing:
            raise ForkedProcessError(
                f"opening the database {path}: this process was forked from one that had used RocksDB, and RocksDB's threads "
                "are not forked with it. Fork before the first HPS is created, or start a new process (multiprocessing: spawn)"
            )
        disown_in_children(self)

    def disown(self) -> None:
        """In a forked child: exit without RocksDB's exit handler."""
        if not self.missing:
            self.missing = True
            libc = ctypes.CDLL(None)
            if hasattr(libc, "on_exit"):  # glibc's: runs first, as registered last, with the exit status
                libc.on_exit(libc._exit, None)


_threads = _Threads()


class Engine:
    """A RocksDB database. *Thread-safe*, except that no call may overlap `open` or `close`, or come between `close` and `open`.

    Column families are valid until `close`. The arguments are those of `RocksDatabase`; `path` is named in errors.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool,
        num_threads: int,
        block_cache_bytes: int,
        write_timeout_s: float,
    ) -> None:
        _threads.use(path)
        self.path = path
        self.read_only = read_only
        self._write_timeout_s = write_timeout_s
        with self._errors("reading RocksDB's settings"):
            self._options = _options(num_threads, block_cache_bytes)
            self._times_options = _times_options(_options(num_threads, 0))
        # A write holds the interpreter lock, so it must never wait inside RocksDB: it fails instead, and `write` waits.
        self._refuse = rocksdict.WriteOptions()
        self._refuse.no_slowdown = True
        self._move = rocksdict.IngestExternalFileOptions()
        self._move.set_move_files(True)
        self._db: Any = None
        self._families: dict[str, Family] = {}
        self._logs: LogSeal | None = None
        self.stuck = False
        """Whether it is closed or a write failed. RocksDB then refuses all writes until it is opened again."""
        self.in_view = False
        """Whether a view is open, where nothing can be written."""

    def open(self, place: Path, *, exists: bool, torn: bool) -> None:
        """Open RocksDB.

        Args:
            place: the directory: `path`, or a view of it.
            exists: whether the database exists.
            torn: whether to drop damaged records at the end of the write-ahead logs, not only an incomplete one.
        """
        in_view = place != self.path
        modes, access = rocksdict.DBRecoveryMode, rocksdict.AccessType
        self._options.set_wal_recovery_mode(modes.point_in_time() if torn else modes.tolerate_corrupted_tail_records())
        with self._errors("opening the database"):
            names = rocksdict.Rdict.list_cf(str(place)) if exists else [DEFAULT]
            families = {name: self._options_of(name) for name in names}
            how = access.read_only(False) if in_view else access.read_write()
            self._db = rocksdict.Rdict(str(place), self._options, families, how)
            self._families = {name: self._db.get_column_family(name) for name in names}
            self.in_view, self.stuck = in_view, in_view and not self.read_only
            if not in_view:
                try:
                    self._logs = LogSeal(self.path)
                except OSError:
                    self.close()
                    raise

    def _errors(self, doing: str) -> "_TypedErrors":
        return _TypedErrors(doing, self.path)

    def _write_errors(self, doing: str) -> "_TypedErrors":
        return _TypedErrors(doing, self.path, self._on_write_error)

    def _on_write_error(self, error: DatabaseError) -> None:
        self.stuck = self.stuck or not (self.read_only or isinstance(error, WriteStalledError))

    def names(self) -> list[str]:
        return [name for name in list(self._families) if name != DEFAULT and not name.startswith(TIMES)]

    def family(self, name: str) -> Family | None:
        return self._families.get(name)

    def create(self, name: str) -> Family:
        """Add a column family. Only one thread at a time may create or drop."""
        with self._write_errors(f"creating table {name}"):
            family = self._families[name] = self._db.create_column_family(name, self._options_of(name))
        return family

    def _options_of(self, name: str) -> "rocksdict.Options":
        return self._times_options if name.startswith(TIMES) else self._options

    def drop(self, name: str) -> None:
        """Remove a column family; calls that are reading it may continue."""
        with self._write_errors(f"dropping table {name}"):
            self._db.drop_column_family(name)
        del self._families[name]

    def close(self) -> None:
        """Release the directory. A failure loses nothing: the write-ahead log holds all unflushed writes."""
        while self._families:
            _, family = self._families.popitem()
            self._close(family)
        if self._db is not None:
            self._close(self._db)
            self._db = None
        self.stuck = True
        if self._logs is not None:
            self._logs.close()
            self._logs = None

    @property
    def is_open(self) -> bool:
        return self._db is not None

    def _close(self, database: Any) -> None:
        try:
            with self._errors("closing the database"):
                database.close()
        except DatabaseError as error:
            _log.warning("%s; it is closed, and the next opening reads its write-ahead log", error)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, family: Family, keys: list[bytes], doing: str) -> list[bytes | None]:
        """Return the values of keys, given in RocksDB's order; None for an absent key."""
        with self._errors(doing):
            values: list[bytes | None] = family.get(keys)
        return values

    def read(self, family: Family, start: bytes, rows: int, doing: str) -> list[bytes]:
        """Return key, value, key, value, ... of at most `rows` rows from `start` on; fewer only at the end of the table."""
        return self._iterate(lambda at: chain.from_iterable(family.items(from_key=at)), 2, family, start, rows, doing)

    def read_keys(self, family: Family, start: bytes, rows: int, doing: str) -> list[bytes]:
        """Return the keys of at most `rows` rows from `start` on; fewer only at the end of the table."""
        return self._iterate(lambda at: family.keys(from_key=at), 1, family, start, rows, doing)

    def _iterate(
        self, open_at: Callable[[bytes], Iterable[bytes]], width: int, family: Family, start: bytes, rows: int, doing: str
    ) -> list[bytes]:
        fields: list[bytes] = []
        with self._errors(doing):
            while (missing := rows * width - len(fields)) > 0:
                found = iter(open_at(start))
                for piece in pieces(missing, missing, _PACED_ROWS * width):
                    fields += islice(found, piece.stop - piece.start)
                del found  # an iterator keeps the database open
                start = after(fields[-width]) if fields else start
                if len(fields) < rows * width and not self._has_more(family, start):
                    break
        return fields

    def _has_more(self, family: Family, start: bytes) -> bool:
        probe = family.iter()
        try:
            probe.seek(start)
            valid: bool = probe.valid()
            if not valid:
                probe.status()
            return valid
        finally:
            del probe  # an error's traceback would keep the iterator, and so the database, open

    def figure(self, family: Family, name: str) -> int:
        """Return an integer property of a column family, such as `estimate-num-keys`; 0 if RocksDB does not know it."""
        with self._errors("reading properties"):
            return int(family.property_value(f"rocksdb.{name}") or 0)

    def last_sequence(self) -> int:
        return int(self._db.latest_sequence_number())

    # -- writing ------------------------------------------------------------------------------------------------------

    def check_writable(self, doing: str) -> None:
        if self.read_only:
            raise ReadOnlyError(f"{doing} in {self.path}: it was opened with read_only; open it without, where one may write")

    def write(
        self, puts: Mapping[str, tuple[Iterable[bytes], Iterable[bytes]]], removals: Mapping[str, Iterable[bytes]], doing: str
    ) -> None:
        """Put rows into column families and remove others, atomically; they are on disk after `sync`.

        Args:
            puts: keys and values by family name; the last of equal keys counts. May be iterated more than once.
            removals: keys by family name, likewise.
        """
        changes: list[tuple[str, str, tuple[Iterable[bytes], ...]]] = [
            (name, "__setitem__", rows) for name, rows in puts.items()
        ]
        changes += [(name, "__delitem__", (keys,)) for name, keys in removals.items()]
        deadline = time.monotonic() + self._write_timeout_s
        while True:
            with self._errors(doing):
                batch = rocksdict.WriteBatch(raw_mode=True)
                for name, change, arguments in changes:
                    batch.set_default_column_family(self._db.get_column_family_handle(name))
                    deque(map(getattr(batch, change), *arguments), maxlen=0)
            try:
                with self._write_errors(doing):
                    self._db.write(batch, self._refuse)
                return
            except WriteStalledError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_STALL_POLL_S)

    def flush(self, family: Family, doing: str) -> None:
        """Flush a column family's memtables to a file."""
        with self._write_errors(doing):
            family.flush()

    @property
    def logs_pile_up(self) -> bool:
        """Whether there are many write-ahead logs. A flush starts a new one; logs with unflushed rows of any family stay."""
        return self._logs is not None and self._logs.closed_logs >= _MANY_LOGS

    def sync(self, doing: str) -> None:
        """Return when every earlier write is on disk; its later loss is detected on opening."""
        with self._write_errors(doing):
            reached = self._logs.reached() if self._logs else None
            self._db.flush_wal(True)
            if self._logs and reached:
                self._logs.seal(reached)

    # -- loading ------------------------------------------------------------------------------------------------------

    def start_load(self, family: Family, doing: str) -> None:
        """Leave ingested files unmerged until `settle`."""
        # Merging during the load would write every row many times.
        with self._errors(doing):
            family.set_options({"disable_auto_compactions": "true"})

    def stage(self, pieces: Iterable[tuple[list[bytes], list[bytes]]], staged: Path, doing: str) -> None:
        """Write rows to a file for `ingest`.

        Args:
            pieces: keys and values, strictly ascending over all pieces, at least one row.
            staged: output file, on the file system of the database.
        """
        with self._errors(doing):
            writer = rocksdict.SstFileWriter(self._options)
            writer.open(str(staged))
            for keys, values in pieces:
                deque(map(writer.__setitem__, keys, values), maxlen=0)
            writer.finish()

    def ingest(self, family: Family, staged: Path, doing: str) -> None:
        """Move a staged file into the database, adding or replacing its rows. They are on disk on return."""
        if self.figure(family, _SIDE_BY_SIDE) >= _LOAD_FILES:
            self._merge(family, doing)
        with self._write_errors(doing):
            family.flush()  # otherwise the ingest flushes with the interpreter lock held
            family.ingest_external_file([str(staged)], self._move)

    def settle(self, family: Family, doing: str) -> None:
        """Merge the ingested files, so that a read examines one file, and re-enable automatic compaction.

        Raises:
            DatabaseError: the merge failed. All rows are present.
        """
        self.flush(family, doing)
        if self.figure(family, _SIDE_BY_SIDE):
            self._merge(family, doing)
        with self._errors(doing):
            family.set_options({"disable_auto_compactions": "false"})

    def _merge(self, family: Family, doing: str) -> None:
        needed, free = self.figure(family, "live-sst-files-size"), shutil.disk_usage(self.path).free
        if free < needed:
            _log.warning(
                "%s in %s: its files are not merged, so reads are slow: %d bytes free, %d needed",
                doing,
                self.path,
                free,
                needed,
            )
            return
        options = rocksdict.CompactOptions()
        options.set_exclusive_manual_compaction(False)
        failures = self.figure(family, "background-errors")
        least, most = _FILE_BYTES
        with self._errors(doing):
            # A thread merges at least one file. With files of the usual size a small table would be one file, and one thread's
            # work.
            family.set_options({"target_file_size_base": str(max(least, min(needed // _MERGE_PARTS, most)))})
            family.compact_range(None, None, options)
            family.set_options({"target_file_size_base": str(most)})
        if self.figure(family, "background-errors") > failures:
            self.stuck = True
            raise DatabaseError(f"{doing} in {self.path}: merging its files failed; see the newest LOG there")


class _TypedErrors:
    """Converts the engine's bare exceptions to typed errors. *One per use.*"""

    # A class, since a generator would take a twentieth of a small fetch's time.
    __slots__ = ("_doing", "_on_error", "_path")

    def __init__(self, doing: str, path: Path, on_error: Callable[[DatabaseError], None] | None = None) -> None:
        self._doing = doing
        self._path = path
        self._on_error = on_error

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The binding raises these; other exceptions are bugs of ours.
        if type(error) is Exception or isinstance(error, OSError | rocksdict.DbClosedError):
            typed = database_error(str(error), self._doing, self._path)
            if self._on_error:
                self._on_error(typed)
            raise typed from error


class WriteStalledError(DatabaseTimeoutError):
    """The engine accepts no writes until it has flushed its memory."""


class DiskFullError(DatabaseError):
    """The file system takes no more bytes."""


# Phrases in the engine's messages, the resulting error, and the advice.
_MEANINGS: tuple[tuple[tuple[str, ...], type[DatabaseError], str], ...] = (
    (
        ("lock hold by current process", "While lock file"),
        DatabaseLockedError,
        "Another process (or another part of this one) has the directory open: stop it (`fuser {path}/LOCK` names it), give "
        "this one another path, or open it with read_only",
    ),
    (
        ("No space left on device", "File too large", "Disk quota exceeded"),
        DiskFullError,
        "The disk is full; existing rows can still be read. Make room, and writing resumes by itself",
    ),
    (("Write stall",), WriteStalledError, "The disk does not keep up with the writes; write less, or use a faster disk"),
    (("Too many open files",), DatabaseError, "Raise the limit of open files (`ulimit -n`); writing resumes by itself"),
    (
        (
            "Permission denied",
            "Operation not permitted",
            "Read-only file system",
            "Not a directory",
            "File exists",
            "File name too long",
        ),
        DatabaseError,
        "It must be a directory that this process may write to, or be opened with read_only",
    ),
    (
        ("Corruption", "No such file or directory"),  # RocksDB names only files that it has written
        DatabaseCorruptError,
        "Files are damaged or missing, so nothing is read from there; `hps check-database {path}` lists what is readable. "
        + RESTORE,
    ),
)


def database_error(message: str, doing: str, path: Path) -> DatabaseError:
    """Return the typed error for an engine message, with the operation, the cause and the advice."""
    text = f"{doing} in {path}: {' '.join(message.split())}"
    for phrases, kind, cure in _MEANINGS:
        if any(phrase in message for phrase in phrases):
            return kind(f"{text}. {cure.format(path=path)}")
    return DatabaseError(text)


def after(key: bytes) -> bytes:
    return key + b"\0"


def _options(num_threads: int, block_cache_bytes: int) -> "rocksdict.Options":
    block = rocksdict.BlockBasedOptions()
    block.set_format_version(5)  # readable by RocksDB 6.6 and later, including HugeCTR's
    block.set_block_size(BLOCK_BYTES)
    block.set_block_restart_interval(4)
    block.set_index_block_restart_interval(4)  # no slower than 1, with two fifths less memory at dim 128
    block.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    block.set_data_block_hash_ratio(0.75)
    block.set_bloom_filter(10, False)
    if block_cache_bytes:
        block.set_block_cache(rocksdict.Cache.new_hyper_clock_cache(block_cache_bytes, BLOCK_BYTES))
    else:
        # Blocks are not compressed, so the kernel's page cache holds the same bytes and releases them under pressure. A block
        # cache smaller than the rows in use costs more than it saves (benchmarks/bench_rocks_db.py). Memory-mapped reads would
        # be faster still, but a truncated file would then kill the process.
        block.disable_cache()
    options, _ = rocksdict.Options.load_latest(str(_SETTINGS))  # in raw mode
    options.create_if_missing(True)
    options.set_block_based_table_factory(block)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_memtable_prefix_bloom_ratio(0.02)
    options.set_memtable_whole_key_filtering(True)
    options.increase_parallelism(num_threads)
    options.set_max_subcompactions(min(num_threads, _MERGE_THREADS))
    options.set_compaction_readahead_size(_MERGE_READ_BYTES)
    options.set_target_file_size_base(_FILE_BYTES[1])
    options.set_allow_concurrent_memtable_write(False)  # writes are serialised, and a tenth faster without; see _times_options
    options.set_db_write_buffer_size(WRITE_BUFFERS_BYTES)
    options.set_max_write_buffer_number(4)  # with 2 here and for the times, applying a log is a tenth slower
    options.set_max_total_wal_size(2 * WRITE_BUFFERS_BYTES)
    # Unmerged files slow reads down; holding back writes would not help those reads.
    options.set_level_zero_slowdown_writes_trigger(1 << 20)
    options.set_level_zero_stop_writes_trigger(1 << 20)
    options.set_soft_pending_compaction_bytes_limit(0)
    options.set_hard_pending_compaction_bytes_limit(0)
    options.set_keep_log_file_num(4)
    options.set_max_manifest_file_size(_MANIFEST_BYTES)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def _times_options(options: "rocksdict.Options") -> "rocksdict.Options":
    """Return settings for write times, written with every row and rarely read."""
    # Inserting into a vector takes a tenth of the time of a skip list, which would slow insertions by a third. A read sorts the
    # vector, so it is kept small: 4 MB are 120,000 rows and some 30 ms.
    options.set_memtable_prefix_bloom_ratio(0.0)
    options.set_memtable_whole_key_filtering(False)
    options.set_memtable_factory(rocksdict.MemtableFactory.vector())
    options.set_write_buffer_size(_TIMES_BUFFER_BYTES)
    options.set_max_write_buffer_number(8)
    return options
