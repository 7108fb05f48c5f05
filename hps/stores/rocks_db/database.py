"""The persistent database: every vector of every table, in a RocksDB directory with HugeCTR HPS' layout.

**Layout** (HugeCTR's, so that each can read the other's databases): one column family per table, named by its tag; a row is the
8 raw little-endian bytes of its key and its raw float32 vector. Our load records are in RocksDB's default column family, which
HugeCTR does not use.

**Durability.** `insert` and `delete` return after syncing the write-ahead log to disk once per call, as HugeCTR does;
`load_chunk` returns when the rows, and then the record that counts them, are on disk. The next opening finds all acknowledged
rows or is refused (write_ahead_log.py); a damaged end behind them, as after a power cut, is dropped.

**Failed writes.** When the disk is full or descriptors run out, RocksDB refuses all later writes, but still reads. So the next
write checks whether there is room again, and then RocksDB is reopened while all calls wait. A start on a full disk opens a
read-only view of the directory, and recovers in the same way.

**Waiting.** RocksDB has no timeouts: a call takes as long as the disk does. Where RocksDB would stall a write, we wait instead,
at most `write_timeout_s`. Two locks are held while RocksDB works: one per table, which serialises its writers, and one that
serialises opening and dropping tables. No fetch takes either.
"""

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakSet

from hps.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseTimeoutError,
    InvalidInputError,
    ReadOnlyError,
    TableWidthError,
    UnknownTableError,
)
from hps.ground.memory.capacity import Need, check_fits
from hps.ground.progress import size_text
from hps.ground.threads.lifetimes import disown_in_children
from hps.ground.threads.open_calls import OpenCalls
from hps.stores.base import (
    LOAD_ADVICE,
    AgingRows,
    DatabaseReport,
    DiskSpace,
    ExpiredRows,
    LoadRecord,
    LogPosition,
    Partition,
    PersistentDatabase,
    RowChanges,
    TableStats,
    exclusive,
)
from hps.stores.rocks_db import directory
from hps.stores.rocks_db.engine import (
    BLOCK_BYTES,
    DEFAULT,
    SEALED,
    TIMES,
    WRITE_BUFFERS_BYTES,
    DiskFullError,
    Engine,
    database_error,
)
from hps.stores.rocks_db.inspection import inspect, oldest_needed_log
from hps.stores.rocks_db.load_records import LoadRecords
from hps.stores.rocks_db.table import RocksTable, width_of
from hps.stores.rocks_db.write_ahead_log import CheckedLogs, check_logs, damaged, logs_in
from hps.tensors.array_checks import check_positive
from hps.types import BoolArray, CheckResult, FloatArray, IndexArray, KeyArray, TableSpec, stored_text

_log = logging.getLogger(__name__)
_Chunk = TypeVar("_Chunk")

_LOAD_POLL_S = 0.02
_RECOVER_EVERY_S = 0.5  # between two checks of a database that refuses writes
_DRAIN_TIMEOUT_S = 0.1  # for other calls, such as a merge, before it is reopened
_DATABASE_BYTES = 28 << 10  # options, manifest and logs of an idle database
_TABLE_BYTES = 2 << 10
_ROW_BYTES = 21.1  # beside the vector: key, sequence, lengths, filter, and the index within a block
_BLOCK_OVERHEAD_BYTES = 25  # per block: trailer, properties and index entry
_FILTER_BYTES = 1.25  # a row
_MERGED = "a second copy of a table that is being merged"
_ROOM_BYTES = 4 << 20  # written by RocksDB at an opening, beside the content of the write-ahead logs


_open_for_writing: WeakSet["RocksDatabase"] = WeakSet()


def check_room_of(where: str, state: str, place: Path, needed: int, replaced: int, writer: int) -> CheckResult:
    """Return whether a database can be opened and has room on its disk.

    Args:
        where: the setting that names the database. state: what is there. place: an existing directory on its file system.
        needed: bytes to load. replaced: number of tables that a start drops. writer: process that has it open, or 0.
    """
    if replaced:
        state += f", of which a start drops {replaced} of another width, with its online writes, to load it anew"
    if writer:
        locked = f"{state}; process {writer} has it open, and only one may write to it: stop that process first"
        return CheckResult("unreachable", where, locked)
    free = shutil.disk_usage(place).free
    room = f"{size_text(needed)} to load, {size_text(free)} free" if needed else f"{size_text(free)} free"
    if needed > free:
        return CheckResult("wrong", where, f"{state}; {room}: free some, or give a path on a larger disk")
    return CheckResult("good", where, f"{state}; {room}")


def writer_of(path: Path) -> int:
    """Return the process that has a database open for writing; 0 if there is none."""
    # RocksDB's lock is a POSIX record lock, which a process loses when it closes any descriptor of the file. So the lock of
    # this process must not be queried through the file.
    ours = any(database.path == path and not database.closed for database in list(_open_for_writing))
    return os.getpid() if ours else directory.locking_process(path)


class RocksDatabase(PersistentDatabase, AgingRows):
    """Tables of vectors in a RocksDB directory. *Thread-safe.*

    `size` counts a table of up to 131,072 rows. For a larger one it returns RocksDB's estimate, which counts a row again for
    each replacement since the last merge.

    Args:
        path: the directory; created with its parents if missing. One process at a time may write to it.
        read_only: write nothing: for a read-only volume, or beside a writing process, whose later writes are not seen. Opening
            waits for a table that the other process is loading.
        max_batch_size: maximum rows of one multi-get or write.
        block_cache_bytes: memory for blocks of the files. Fetching is a sixth faster if it holds all rows in use, and a fifth
            slower if it holds a quarter of them.
        write_timeout_s: how long a write waits for a slow disk.
        close_timeout_s: how long `close` waits for running calls.
        load_timeout_s: with `read_only`, how long `open_table` waits for a table that another process is loading.
        beside_files: whether it holds the changes to row files (`stores/row_files`), deletions included, and no load.

    Raises:
        DatabaseLockedError, DatabaseCorruptError, DatabaseError: see `Database.from_config`.
    """

    kind = "rocks_db"
    load_bytes = 48 << 20  # fewer files to merge: a tenth faster than 16 MB, and 64 MB gain nothing more

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_threads: int = 16,
        read_only: bool = False,
        max_batch_size: int = 65_536,
        block_cache_bytes: int = 0,
        write_timeout_s: float = 30.0,
        close_timeout_s: float = 30.0,
        load_timeout_s: float = 10.0,
        beside_files: bool = False,
    ) -> None:
        self.path = self.directory = Path(path).absolute()  # a relative path would change with the working directory
        self.read_only = read_only
        self._max_batch_size = max_batch_size
        self._write_timeout_s = write_timeout_s
        self._close_timeout_s = close_timeout_s
        self._load_timeout_s = load_timeout_s
        self._beside_files = beside_files
        self._calls = OpenCalls(f"the database {self.path}")
        self._tables_lock = threading.Lock()
        self._tables: dict[str, RocksTable] = {}
        self._staged = count()
        self._seal_lock = threading.Lock()
        self._seal: directory.Seal | None = None
        self._view: directory.View | None = None
        self._lock_file = -1  # the file that keeps other processes out while a view is open
        self._released = False
        self._recovering = threading.Lock()
        self._recover_at = 0.0
        self._refusal: DatabaseError | None = None  # of the last recovery, if it failed
        self._new_engine = partial(
            Engine,
            self.path,
            read_only=read_only,
            num_threads=num_threads,
            block_cache_bytes=block_cache_bytes,
            write_timeout_s=write_timeout_s,
        )
        self._engine = self._new_engine()
        self._records = LoadRecords(self._engine)
        self._open()
        disown_in_children(self)

    def _open(self) -> None:
        """Open the engine if all acknowledged rows are present; on a full disk open a view, which `_recover` replaces."""
        self._close_view()
        if self.read_only:
            self._view = self._opened_in_view(self._engine)
            return
        exists, logs = self._check_files()
        open_at = partial(self._engine.open, exists=exists, torn=logs.sealed)
        try:
            directory.cut_logs(self.path, logs.ends)
            open_at(self.path)
            _open_for_writing.add(self)
            directory.clear_staging(self.path)
            self._finish_drops()
            self._seal_now()
        except DiskFullError as error:
            self._engine.close()
            if not exists:
                raise DatabaseError(
                    f"creating a database in {self.path}: the disk is full ({error.__cause__ or error}); make room, or give "
                    "another path"
                ) from error
            self._lock_file = directory.lock_directory(self.path)
            try:
                self._view = directory.opened_in_view(self.path, open_at, logs.ends, in_memory=True)
            except DatabaseError:
                self._close_view()
                raise
            self._refusal = type(error)(*error.args)
            _log.error("%s. Until then this process serves the existing rows", error)
        except DatabaseError:
            self._engine.close()
            raise

    def _check_files(self) -> tuple[bool, CheckedLogs]:
        """Return whether the database exists, and the state of its logs; raise if one is damaged."""
        exists = directory.check_directory(self.path, self.read_only)
        logs = (
            check_logs(self.path, partial(oldest_needed_log, self.path))
            if exists
            else CheckedLogs(sealed=True, damages={}, ends={})
        )
        for name, damage in logs.damages.items():
            raise damaged(self.path, name, damage)
        return exists, logs

    def _opened_in_view(self, engine: Engine) -> directory.View:

        def attempt() -> directory.View:
            files = directory.files_of(self.path)
            exists, logs = self._check_files()
            view = directory.opened_in_view(self.path, partial(engine.open, exists=exists, torn=logs.sealed), logs.ends)
            view.files = files
            return view

        return directory.settled(self.path, attempt)

    @property
    def closed(self) -> bool:
        return self._released

    def _close_view(self) -> None:
        if self._view:
            self._view.cleanup()
            self._view = None
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(
            config.path,
            num_threads=config.num_threads,
            read_only=config.read_only,
            max_batch_size=config.max_batch_size,
        )

    @classmethod
    def probe(cls, config: Any, tables: Mapping[TableSpec, int]) -> list[CheckResult]:
        path, where = Path(config.path).absolute(), "persistent_db.path"
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        if not place.is_dir():
            return [CheckResult("wrong", where, f"{place} is no directory; give another path")]
        if not config.read_only and not os.access(place, os.W_OK | os.X_OK):
            return [CheckResult("wrong", where, f"{place}: this user may not write there; give it the right, or another path")]
        present: set[str] = set()
        replaced: set[str] = set()
        loads = config.initialize_after_startup
        writer = 0 if config.read_only else writer_of(path)
        try:
            if config.read_only or (path == place and directory.check_directory(path, read_only=False)):
                with closing(cls(path, read_only=True, num_threads=1, load_timeout_s=0)) as database:
                    present = set(database.tags())
                    for spec in tables:
                        if spec.tag in present and config.read_only:
                            database.open_table(spec.tag, spec.width)
                        elif spec.tag in present and loads and database.must_drop(spec.tag, spec.width):
                            replaced.add(spec.tag)
                        elif spec.tag in present:
                            database.check_table(spec.tag, spec.width)
        except DatabaseError as error:
            temporary = writer or isinstance(error, DatabaseTimeoutError)
            return [CheckResult("unreachable" if temporary else "wrong", where, str(error))]
        found = sum(spec.tag in present for spec in tables)
        state = (
            f"{path} holds {found} of {len(tables)} tables"
            if present
            else f"{path} would be created"
            if path != place
            else f"{path}"
        )
        needed = sum(size for spec, size in tables.items() if spec.tag not in present - replaced) if loads else 0
        return [check_room_of(where, state, place, needed, len(replaced), writer)]

    @classmethod
    def inspect(cls, path: Path) -> DatabaseReport:
        return inspect(Path(path).absolute())

    # -- tables -------------------------------------------------------------------------------------------------------

    def open_table(self, tag: str, dim: int) -> None:
        check_positive(f"opening table {tag}", "dim", dim)
        if tag == DEFAULT:
            raise InvalidInputError(f"opening table {tag}: got the name of RocksDB's own column family, expected another tag")
        if self.read_only:
            self._wait_for_table(tag)
        elif not self._engine.is_open or self._engine.family(tag) is None:
            self._recover()
        with self._calls, self._tables_lock:
            table = self._tables.get(tag)
            if table is None:
                self._width(tag, dim)
            elif table.dim != dim:
                raise self._width_error(tag, table.dim, dim)
            if table is None:
                self._tables[tag] = self._make_table(tag, dim)

    def _width(self, tag: str, dim: int) -> None:
        """Create a table if it does not exist; check that it can be opened with this width."""
        if self._engine.family(tag) is None:
            self._drop_families(tag)  # an earlier release left the times of a dropped table
            self._engine.create(tag)
            self._seal_now()
        elif (stored := width_of(self._engine, tag)) not in (dim, None):
            raise self._width_error(tag, stored, dim)
        elif stored is None and (defect := self._defect(tag)) and self._is_complete(tag):
            raise DatabaseCorruptError(f"opening table {tag} in {self.path}: {defect}. {LOAD_ADVICE}")

    def _width_error(self, tag: str, stored: int | None, dim: int) -> TableWidthError:
        return TableWidthError(
            f"opening table {tag} in {self.path}: it holds vectors of {stored} floats, expected {dim}. Correct the configured "
            f"width, or load other rows: {LOAD_ADVICE}"
        )

    def _is_complete(self, tag: str) -> bool:
        record = self._records.get(tag)
        return record is not None and record.complete

    def check_table(self, tag: str, dim: int) -> None:
        with self._calls, self._tables_lock:
            self._width(tag, dim)

    def must_drop(self, tag: str, dim: int, *, force: bool = False) -> bool:
        with self._calls, self._tables_lock:
            if tag == DEFAULT or tag in self._tables or self._engine.family(tag) is None:
                return False
            if force:
                return True
            try:
                recorded = self._records.get(tag) is not None
                self._width(tag, dim)
            except TableWidthError:
                return recorded
            except DatabaseCorruptError:
                return False
            return False

    def _wait_for_table(self, tag: str) -> None:
        """Wait until a table that another process is loading is complete, renewing the view when that process has written.

        Raises:
            DatabaseTimeoutError: it was not complete in time.
            ReadOnlyError: it does not exist, and no process writes to the directory.
            DatabaseError: it has no rows, although its load record counts some, or it has no record.
        """
        doing, deadline = f"opening table {tag} in {self.path} with read_only", time.monotonic() + self._load_timeout_s
        while True:
            with self._calls:
                defect = self._defect(tag)
            if not defect:
                return
            before = self._view.files if self._view else None
            writer, changed = writer_of(self.path), directory.files_of(self.path) != before
            if not (writer or changed):
                with self._calls:
                    self._check_defect(tag, doing, defect)
                return
            if time.monotonic() >= deadline:
                name = f"process {writer}" if writer > 0 else "another process"
                raise DatabaseTimeoutError(
                    f"{doing}: {defect}, and {name} writes there: its load is running and did not end within "
                    f"{self._load_timeout_s:g} s. Try again when it is"
                )
            if changed:
                self._renew_view(doing)
            else:
                time.sleep(_LOAD_POLL_S)

    def _check_defect(self, tag: str, doing: str, defect: str) -> None:
        if self._engine.family(tag) is None:
            tables = ", ".join(sorted(self._engine.names())) or "none"
            raise ReadOnlyError(f"{doing}: {defect}; existing tables: {tables}. Load it first, without read_only")
        record = self._records.get(tag)
        if record is None or record.complete:  # else the record shows an interrupted load
            raise DatabaseError(f"{doing}: {defect}. {LOAD_ADVICE}")

    def _defect(self, tag: str) -> str:
        """Describe why a table cannot be complete; empty if it can."""
        if tag in self._tables:
            return ""
        if self._engine.family(tag) is None:
            return "it does not exist"
        record = self._records.get(tag)
        if record is None:
            return "it has no rows, and no load of it is recorded" if not self._beside_files and self._is_empty(tag) else ""
        if not record.complete:
            return f"it holds {record.rows_done} of {record.rows_total} rows of a load"
        if record.promises_rows and self._is_empty(tag):
            return f"its load record counts {record.rows_total} rows, and it has none"
        return ""

    def _is_empty(self, tag: str) -> bool:
        return not self._engine.read_keys(self._engine.family(tag), b"", 1, f"opening table {tag}")

    def _renew_view(self, doing: str) -> None:
        """Replace the view by one of the current state.

        Raises:
            DatabaseError: a table in use may have other rows there.
        """
        engine = self._new_engine()
        view: directory.View | None = self._opened_in_view(engine)
        records = LoadRecords(engine)
        try:
            with self._calls.exclusive(self._close_timeout_s), self._tables_lock:
                for tag in self._tables:
                    before = self._records.get(tag)
                    if before is None or before.modified or before != records.get(tag):
                        raise DatabaseError(
                            f"{doing}: it was loaded after this process opened the database, and so, perhaps, were other rows "
                            f"of table {tag}, which is in use here. Start this process again to use both"
                        )
                self._engine, engine = engine, self._engine
                self._records, self._view, view = records, view, self._view
                for table in self._tables.values():
                    table.renew(self._engine, self._records)
        finally:  # close the engine and the view that are not in use
            engine.close()
            if view:
                view.cleanup()

    def is_written_by_others(self) -> bool:
        """Return whether another process has it open for writing."""
        return writer_of(self.path) not in (0, os.getpid())

    def release_table(self, tag: str) -> None:
        if self.read_only:  # the next opening may then show a later state
            with self._tables_lock:
                self._tables.pop(tag, None)

    def _make_table(self, tag: str, dim: int) -> RocksTable:
        return RocksTable(
            self._engine,
            self._records,
            tag,
            dim,
            max_batch_size=self._max_batch_size,
            write_timeout_s=self._write_timeout_s,
            keeps_deletions=self._beside_files,
        )

    def _table(self, tag: str) -> RocksTable:
        try:
            return self._tables[tag]
        except KeyError:
            opened = ", ".join(list(self._tables)) or "none"
            raise UnknownTableError(f"table {tag} is not open in {self.path}; open tables: {opened}") from None

    @classmethod
    def room_for(cls, config: Any, tables: Sequence[tuple[str, int, int]]) -> list[Need]:
        if config.read_only:
            return []
        sizes = [(tag, dim, rows, _table_bytes(dim, rows)) for tag, dim, rows in tables]
        needs = [
            Need("disk", f"{rows:,} rows of table {tag} ({stored_text(tag, dim)})", size, tag) for tag, dim, rows, size in sizes
        ]
        read = sum((_FILTER_BYTES + _BLOCK_OVERHEAD_BYTES / _rows_of_a_block(dim)) * rows for _, dim, rows, _ in sizes)
        return [
            *needs,
            Need("disk", "RocksDB's own files", _DATABASE_BYTES),
            Need("disk", _MERGED, max([size for *_, size in sizes], default=0), temporary=True),
            Need("ram", "RocksDB's indices and filters", int(read)),
            Need("ram", "RocksDB's write buffers", WRITE_BUFFERS_BYTES, temporary=True),
        ]

    def disk_space(self) -> DiskSpace:
        return DiskSpace.of(self.path)

    def check_room(self, tables: Sequence[tuple[str, int, int]]) -> None:
        if self.read_only:
            return
        needs, largest = {}, 0
        with self._calls:
            for tag, dim, rows in tables:
                family = self._engine.family(tag)
                present = self._engine.figure(family, "estimate-num-keys") if family is not None else 0
                if rows > present:
                    needs[f"{rows - present:,} rows of table {tag} ({stored_text(tag, dim)})"] = _table_bytes(
                        dim, rows - present
                    )
                    largest = max(largest, _table_bytes(dim, rows))
        needs[_MERGED] = largest
        check_fits(
            f"making room for tables in {self.path}",
            needs,
            self.disk_space().free_bytes,
            "on its file system",
            "drop tables of models or versions that are no longer needed, remove other files there, or use a larger volume",
        )

    def tags(self) -> list[str]:
        with self._calls:
            return sorted(self._engine.names())

    def drop_table(self, tag: str) -> None:
        self._recover()
        with self._calls:
            with self._tables_lock:
                if tag == DEFAULT or self._engine.family(tag) is None:
                    return
                self._engine.check_writable(f"dropping table {tag}")
                if tag in self._tables:
                    self._tables[tag].retire()
                    del self._tables[tag]
                # First: the record must never count dropped rows, and after a crash the next opening completes the drop.
                self._records.mark_dropped(tag)
                links = directory.link_files(self.path, f"dropped-{next(self._staged)}")
                self._drop_families(tag)
                self._records.remove(tag)
                self._seal_now()
            shutil.rmtree(links, ignore_errors=True)

    def _finish_drops(self) -> None:
        """Complete interrupted drops: remaining rows would count as rows of the next load."""
        for tag in self._records.dropped():
            self._drop_families(tag)
            self._records.remove(tag)

    def _drop_families(self, tag: str) -> None:
        for name in (TIMES + tag, SEALED + tag, tag):
            if self._engine.family(name) is not None:
                self._engine.drop(name)

    def _recover(self) -> None:
        """Reopen RocksDB if it refuses writes after a failed one, and there is room again.

        Other calls wait until the content of the write-ahead logs is written out.

        Raises:
            DatabaseError: it cannot be opened, or writes would fail again. The next call retries; reads continue if it was not
                closed.
        """
        if not self._engine.stuck:
            return
        busy = f"{self.path}: another call was still reopening it after {self._write_timeout_s:g} s; try again"
        with exclusive(self._recovering, self._write_timeout_s, busy):
            if not self._engine.stuck or self._released:
                return
            if time.monotonic() < self._recover_at:
                self._refuse()
                return
            self._recover_at, self._refusal = time.monotonic() + _RECOVER_EVERY_S, None
            try:
                self._reopen()
            except DatabaseError as error:
                self._refusal = type(error)(*error.args)
            self._refuse()

    def _refuse(self) -> None:
        if self._refusal:  # a copy, since a raised error keeps its frames alive
            raise type(self._refusal)(*self._refusal.args)

    def _reopen(self) -> None:
        try:
            logs = sum(os.path.getsize(self.path / name) for name in logs_in(self.path).values())
            directory.check_room(self.path, logs + _ROOM_BYTES)
        except OSError as error:
            raise database_error(str(error), "reopening the database after a failed write", self.path) from error
        with self._calls.exclusive(_DRAIN_TIMEOUT_S), self._tables_lock:
            _log.warning("%s refuses writes since one failed: reopening it", self.path)
            self._engine.close()
            self._open()
            for table in self._tables.values():
                table.renew(self._engine, self._records)

    def close(self) -> None:
        if not self._calls.close(self._close_timeout_s):  # new calls stay refused, and `close` may be called again
            raise DatabaseTimeoutError(
                f"closing the database {self.path}: calls still running after {self._close_timeout_s:g} s: "
                f"{self._calls.running}; close it again when they have ended"
            )
        with self._recovering, self._tables_lock:
            if self._released:
                return
            self._released = True
            self._tables.clear()
            self._engine.close()
            try:
                self._seal_now()  # with RocksDB's last additions; the next opening begins a new MANIFEST
            except DatabaseError as error:
                _log.warning("%s; it is closed and complete, but later damage to its list of files may go unnoticed", error)
            self._close_view()

    def disown(self) -> None:
        """In a forked child: leave the files and RocksDB's threads to the parent."""
        self._tables_lock = threading.Lock()
        self._recovering = threading.Lock()
        self._released = True

    def _seal_now(self) -> None:
        if not self._view:
            with self._seal_lock:
                self._seal = directory.seal(self.path, self._seal)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, dim)
        found: BoolArray,  # (n,)
    ) -> int:
        if not self._engine.is_open:
            self._recover()
        with self._calls:
            return self._table(tag).fetch(keys, out, found)

    def insert(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        self._recover()
        with self._calls:
            self._table_with_times(tag).insert(keys, vectors)

    def delete(self, tag: str, keys: KeyArray) -> int:
        self._recover()
        with self._calls:
            table = self._table(tag)
            keeps = table.follows_log or self._beside_files
            return (self._table_with_times(tag) if keeps else table).delete(keys)

    def follow_log(self, tag: str) -> dict[Partition, LogPosition]:
        with self._calls:
            return self._table(tag).follow_log()

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        self._recover()
        with self._calls:
            return self._table_with_times(tag).apply(changes, positions)

    def order_by_time(self, tag: str) -> None:
        self._recover()
        with self._calls:
            self._table_with_times(tag).order_by_time()

    def changed_rows_of(self, tag: str) -> Iterator[tuple[KeyArray, IndexArray]]:
        return self._piecewise(self._table(tag).changed_rows())

    def last_changes(self, tag: str, keys: KeyArray) -> IndexArray:
        with self._calls:
            return self._table(tag).last_changes(keys)

    def expire(self, tag: str, keys: KeyArray, sequence: int, *, loaded: bool = False) -> ExpiredRows:
        self._recover()
        with self._calls:
            return self._table_with_times(tag).expire(keys, sequence, loaded=loaded)

    def _table_with_times(self, tag: str) -> RocksTable:
        table = self._table(tag)
        if not (table.remembers_times or self.read_only):
            with self._tables_lock:
                table = self._table(tag)
                table.remember_times()
                self._seal_now()
        return table

    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        doing = f"scanning table {tag}"
        check_positive(doing, "chunk_rows", chunk_rows)
        with self._calls:
            return self._chunks(self._table(tag), chunk_rows, doing)

    def _chunks(self, table: RocksTable, chunk_rows: int, doing: str) -> Iterator[tuple[KeyArray, FloatArray]]:
        start = b""
        while True:
            with self._calls:  # not across the yield: an unfinished scan must not keep the database open
                keys, vectors, start = table.chunk(start, chunk_rows, doing)
            if not keys.size:
                return
            yield keys, vectors

    def size(self, tag: str) -> int:
        with self._calls:
            return self._table(tag).size()

    def stats(self, tag: str) -> TableStats:
        with self._calls:
            table = self._table(tag)
            rows = table.size()
            vector_bytes = rows * table.dim * 4
            return TableStats(rows, vector_bytes, max(0, table.stored_bytes() - vector_bytes))

    def written_at(self, tag: str, keys: KeyArray) -> IndexArray:
        with self._calls:
            return self._table(tag).written_at(keys)

    def writer_token(self, tag: str) -> str | None:
        with self._calls:
            return self._table(tag).writer_token()

    def renew_writer_token(self, tag: str) -> str | None:
        if not self._engine.in_view:
            self._recover()
        with self._calls:
            return self._table(tag).renew_writer_token()

    # -- changes beside a row file ------------------------------------------------------------------------------------

    def changed_keys(self, tag: str) -> Iterator[KeyArray]:
        """Yield the keys of all changes of a table, deletions included, that were not forgotten."""
        return self._piecewise(self._table(tag).changed_keys())

    def _piecewise(self, chunks: Iterator[_Chunk]) -> Iterator[_Chunk]:
        while True:
            with self._calls:  # not across the yield
                some = next(chunks, None)
            if some is None:
                return
            yield some

    def are_changed(self, tag: str, keys: KeyArray) -> BoolArray:
        """Return which keys, (n,), have a change that was not forgotten."""
        with self._calls:
            return self._table(tag).are_changed(keys)

    def forget(self, tag: str, keys: KeyArray) -> None:
        """Remove the rows and changes of keys, (n,), which a row file has; what orders later changes stays."""
        self._recover()
        with self._calls, self._tables_lock:
            self._table(tag).forget(keys)
            self._seal_now()

    def forget_log(self, tag: str) -> None:
        """Forget the log that a table followed, if any: its rows are then older than any change."""
        self._recover()
        with self._calls, self._tables_lock:
            if self._table(tag).follows_log:
                self._table(tag).forget_log()
                self._seal_now()

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_record(self, tag: str) -> LoadRecord | None:
        with self._calls:
            self._table(tag)
            return self._records.get(tag)

    def load_chunk(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
        record: LoadRecord,
    ) -> None:
        self._recover()
        with self._calls:
            if self._table(tag).is_replaced_by(keys, record):
                with self._tables_lock:
                    self._table(tag).forget_log()
            self._table(tag).load(keys, vectors, record, self.path / directory.STAGING / f"{next(self._staged)}.sst")
            self._seal_now()

    def finish_load(self, tag: str) -> None:
        self._recover()
        with self._calls:
            self._table(tag).settle()
            self._seal_now()


def _rows_of_a_block(dim: int) -> int:
    return math.ceil(BLOCK_BYTES / (_ROW_BYTES + 4 * dim))


def _table_bytes(dim: int, rows: int) -> int:
    """Estimate the size of a table's files after its load, within 1.5 % from 10,000 rows on (dim 1 to 1000)."""
    return _TABLE_BYTES + math.ceil(rows * (_ROW_BYTES + 4 * dim + _BLOCK_OVERHEAD_BYTES / _rows_of_a_block(dim)))
