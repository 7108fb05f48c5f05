"""The persistent database of row files: each table a sealed file, with the changes since then in RocksDB.

**Layout** of the directory: `tables/<tag>.json` is the record of a table, without which it does not exist; `tables/<tag>.rows`
its file (`layout.py`), if any; `changes/` a RocksDB database of what was written online (`stores/rocks_db`). Tags are
percent-encoded.

**Loads** are gathered in memory, what does not fit there in temporary files, and become a file by `finish_load`: a load that is
interrupted starts over. A loaded file is served at once, and becomes durable in the background.

**Seals.** Once many rows of a table have changed, a thread makes a new file of the old one and the changes, at a pace that
leaves half of the time to lookups.
"""

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, Self

from hps.errors import (
    DatabaseCorruptError,
    DatabaseError,
    DatabaseTimeoutError,
    NotReadyError,
    ReadOnlyError,
    TableWidthError,
    UnknownTableError,
)
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.key_sets import set_kernels
from hps.ground.memory.capacity import Need, available_memory, check_fits
from hps.ground.memory.host_tables import HostTable
from hps.ground.shares import share_in
from hps.ground.threads.lifetimes import disown_in_children
from hps.ground.threads.open_calls import OpenCalls
from hps.ground.threads.pacing import paced
from hps.ground.threads.workers import PeriodicTask, Stop
from hps.stores.base import (
    LOAD_ADVICE,
    Adoption,
    AdoptsRowFiles,
    AgingRows,
    DatabaseReport,
    DeviceReadable,
    DiskSpace,
    ExpiredRows,
    LoadRecord,
    LogPosition,
    MergesRows,
    Partition,
    PersistentDatabase,
    RowChanges,
    RowFileSource,
    SealStats,
    SharedRowFile,
    TableStats,
)
from hps.stores.rocks_db.database import RocksDatabase, check_room_of, writer_of
from hps.stores.row_files import adoption
from hps.stores.row_files.download import EXTENTS_SUFFIX, PARTIAL_SUFFIX
from hps.stores.row_files.inspection import CHANGES, FILES, inspect, is_directory_of_row_files
from hps.stores.row_files.layout import FileHead, buckets_for
from hps.stores.row_files.row_file import RowFile, read_kernels
from hps.stores.row_files.table import RECORD_SUFFIX, ROWS_SUFFIX, RowTable, TableRecord, file_name, tag_of
from hps.stores.row_files.writer import TEMPORARY, write_kernels
from hps.tensors.array_checks import check_positive
from hps.types import BoolArray, CheckResult, FloatArray, IndexArray, KeyArray, RowArray, TableSpec, stored_text

_log = logging.getLogger(__name__)

_SEAL_EVERY_S: Final = 1.0  # between two looks at the numbers of changed rows
_SEAL_AGAIN_S: Final = 60.0  # after a failure
_MOST_PAUSE_S: Final = 0.1
_LOAD_POLL_S: Final = 0.02

_PROGRESS_S: Final = 0.5


class RowFilesDatabase(PersistentDatabase, AgingRows, DeviceReadable, MergesRows, AdoptsRowFiles):
    """Tables of rows in sealed files. *Thread-safe.*

    Args:
        path: the directory; created with its parents if missing. One process at a time may write to it.
        num_threads: of RocksDB, which holds what is written online.
        read_only: write nothing.
        verify: compare each page of a row with its checksum before the row is answered.
        resident: regular expressions; the files of tables whose tag one of them matches are read at once and locked in memory.
        wait_for_download: serve a file from elsewhere only once it is complete here, not at once.
        write_timeout_s: how long a write waits for another write or a slow disk.
        close_timeout_s: how long `close` waits for running calls.
        load_timeout_s: with `read_only`, how long `open_table` waits for a table that another process is loading.
        seal_share: share of a file's rows that may change before a new one is made; 0 to make none.
        least_sealed_rows: fewer changed rows are not sealed.
        most_changed_bytes: changes of a table in bytes that are sealed at any share.
        most_load_bytes: memory for the rows of a load or a seal; by default a quarter of what is free.

    Raises:
        DatabaseLockedError: another process has it open for writing.
        DatabaseError: the path cannot be opened.
    """

    kind = "row_files"
    always_indexed = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_threads: int = 16,
        read_only: bool = False,
        max_batch_size: int = 65_536,
        verify: bool = False,
        resident: Sequence[str] = (),
        wait_for_download: bool = False,
        write_timeout_s: float = 30.0,
        close_timeout_s: float = 30.0,
        load_timeout_s: float = 10.0,
        seal_share: float = 0.1,
        least_sealed_rows: int = 65_536,
        most_changed_bytes: int = 1 << 30,
        most_load_bytes: int | None = None,
    ) -> None:
        self.path = self.directory = Path(path).absolute()
        self.read_only = read_only
        self._verify = verify
        self._resident = [re.compile(expression) for expression in resident]
        self._wait_for_download = wait_for_download
        self._write_timeout_s = write_timeout_s
        self._close_timeout_s = close_timeout_s
        self._load_timeout_s = load_timeout_s
        self._seal_when = (seal_share, least_sealed_rows, most_changed_bytes)
        self._most_load_bytes = most_load_bytes
        self._calls = OpenCalls(f"the database {self.path}")
        self._tables_lock = threading.Lock()
        self._tables: dict[str, RowTable] = {}
        self._files = self.path / FILES
        compile_kernels(*self.kernels(None))
        try:
            if not read_only:
                self._files.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(f"opening the database {path}: {error}; expected a directory that it may write") from error
        self._changes = RocksDatabase(
            self.path / CHANGES,
            num_threads=num_threads,
            read_only=read_only,
            max_batch_size=max_batch_size,
            write_timeout_s=write_timeout_s,
            close_timeout_s=close_timeout_s,
            load_timeout_s=load_timeout_s,
            beside_files=True,
        )
        self._sealer: PeriodicTask | None = None
        self._retry_at: dict[str, float] = {}  # when a table is sealed again after a failure
        if not read_only:
            self._remove_the_rest()
            if seal_share:
                self._sealer = PeriodicTask("sealer", self.seal_due, _SEAL_EVERY_S, what=f"sealing tables of {self.path}")
        disown_in_children(self)

    def _remove_the_rest(self) -> None:
        """Complete interrupted drops, and remove what interrupted loads wrote."""
        records = set(self._recorded())
        for path in self._files.iterdir():
            unfinished = path.suffix in (PARTIAL_SUFFIX, EXTENTS_SUFFIX)
            if (
                path.name.endswith(TEMPORARY)
                or (path.suffix in (ROWS_SUFFIX, PARTIAL_SUFFIX, EXTENTS_SUFFIX) and tag_of(path) not in records)
                or (unfinished and path.with_name(path.name.removesuffix(path.suffix) + ROWS_SUFFIX).exists())
            ):
                path.unlink()
        for tag in self._changes.tags():
            if tag not in records:
                self._changes.drop_table(tag)

    def _recorded(self) -> list[str]:
        return sorted(tag_of(path) for path in self._files.glob(f"*{RECORD_SUFFIX}"))

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(
            config.path,
            num_threads=config.num_threads,
            read_only=config.read_only,
            max_batch_size=config.max_batch_size,
            verify=config.verify,
            seal_share=config.seal_share,
            wait_for_download=config.ready == "complete",
            resident=config.resident,
        )

    @classmethod
    def probe(cls, config: Any, tables: Mapping[TableSpec, int]) -> list[CheckResult]:
        path, where = Path(config.path).absolute(), "persistent_db.path"
        place = next(parent for parent in (path, *path.parents) if parent.exists())
        if not place.is_dir():
            return [CheckResult("wrong", where, f"{place} is no directory; give another path")]
        if not config.read_only and not os.access(place, os.W_OK | os.X_OK):
            return [CheckResult("wrong", where, f"{place}: this user may not write there; give it the right, or another path")]
        if path == place and not is_directory_of_row_files(path) and any(path.iterdir()):
            return [CheckResult("wrong", where, f"{path} holds other files; give the path of an empty directory")]
        present = {tag_of(record) for record in (path / FILES).glob(f"*{RECORD_SUFFIX}")}
        loads, replaced = config.initialize_after_startup, set()
        try:
            for spec in tables:
                record = TableRecord.read(path / FILES / (file_name(spec.tag) + RECORD_SUFFIX))
                if record and record.width != spec.width and not (loads and record.load):
                    raise TableWidthError(f"{path}: table {spec.tag} holds rows of {record.width} words, expected {spec.width}")
                if record and record.width != spec.width:
                    replaced.add(spec.tag)
                elif (rows := path / FILES / (file_name(spec.tag) + ROWS_SUFFIX)).exists():
                    RowFile(rows)
        except DatabaseError as error:
            return [CheckResult("wrong", where, str(error))]
        found = sum(spec.tag in present for spec in tables)
        state = f"{path} holds {found} of {len(tables)} tables" if present else f"{path} would be created"
        writer = 0 if config.read_only else writer_of(path / CHANGES)
        needed = sum(size for spec, size in tables.items() if spec.tag not in present - replaced) if loads else 0
        return [check_room_of(where, state, place, needed, len(replaced), writer)]

    @classmethod
    def inspect(cls, path: Path) -> DatabaseReport:
        return inspect(Path(path).absolute())

    @classmethod
    def kernels(cls, config: Any) -> Sequence[Callable[..., Any]]:
        return (*read_kernels(), *write_kernels(), *set_kernels())

    # -- tables -------------------------------------------------------------------------------------------------------

    def open_table(self, tag: str, dim: int) -> None:
        check_positive(f"opening table {tag}", "dim", dim)
        with self._calls, self._tables_lock:
            if tag in self._tables:
                self._check_width(tag, self._tables[tag].width, dim)
                return
            path = self._files / (file_name(tag) + RECORD_SUFFIX)
            record = self._loaded_record(tag) if self.read_only else TableRecord.read(path)
            if record is None:
                record = TableRecord(dim)
                record.write(path)
            self._check_width(tag, record.width, dim)
            self._tables[tag] = RowTable(
                self._files,
                self._changes,
                tag,
                record,
                verify=self._verify,
                resident=self._is_resident(tag),
                write_timeout_s=self._write_timeout_s,
                most_load_bytes=self._most_load_bytes,
            )

    def _is_resident(self, tag: str) -> bool:
        return any(expression.search(tag) for expression in self._resident)

    def _loaded_record(self, tag: str) -> TableRecord:
        """Wait until a table that another process is loading is complete; return its record."""
        doing, deadline = f"opening table {tag} in {self.path} with read_only", time.monotonic() + self._load_timeout_s
        while True:
            record = TableRecord.read(self._files / (file_name(tag) + RECORD_SUFFIX))
            if record and (record.load is None or record.load.complete):
                return record
            if not self._changes.is_written_by_others():
                if record is None:
                    tables = ", ".join(self._recorded()) or "none"
                    raise ReadOnlyError(
                        f"{doing}: it does not exist; existing tables: {tables}. Load it first, without read_only"
                    )
                raise DatabaseError(f"{doing}: its load was interrupted. Complete it with `hps load`")
            if time.monotonic() >= deadline:
                raise DatabaseTimeoutError(
                    f"{doing}: another process writes there, and the table was not complete and durable within "
                    f"{self._load_timeout_s:g} s. Try again when it is"
                )
            time.sleep(_LOAD_POLL_S)

    def _check_width(self, tag: str, held: int, dim: int) -> None:
        if held != dim:
            raise TableWidthError(
                f"opening table {tag} in {self.path}: it holds vectors of {held} floats, expected {dim}. Correct the "
                f"configured width, or load other rows: {LOAD_ADVICE}"
            )

    def _table(self, tag: str) -> RowTable:
        try:
            return self._tables[tag]
        except KeyError:
            opened = ", ".join(list(self._tables)) or "none"
            raise UnknownTableError(f"table {tag} is not open in {self.path}; open are: {opened}") from None

    def tags(self) -> list[str]:
        with self._calls:
            return self._recorded()

    def must_drop(self, tag: str, dim: int, *, force: bool = False) -> bool:
        with self._calls, self._tables_lock:
            if tag in self._tables:
                return False
            try:
                record = TableRecord.read(self._files / (file_name(tag) + RECORD_SUFFIX))
            except DatabaseCorruptError:
                return force
            return record is not None and (force or (record.width != dim and record.load is not None))

    def drop_table(self, tag: str) -> None:
        with self._calls, self._tables_lock:
            if (table := self._tables.get(tag)) is not None:
                table.retire()
                del self._tables[tag]
            self._retry_at.pop(tag, None)
            name = file_name(tag)
            for suffix in (
                RECORD_SUFFIX,
                ROWS_SUFFIX,
                PARTIAL_SUFFIX,
                EXTENTS_SUFFIX,
            ):  # the record first: what is left without one goes at the next start
                (self._files / (name + suffix)).unlink(missing_ok=True)
            self._changes.drop_table(tag)

    def close(self) -> None:
        """As `Database.close`. Waits until loaded files are durable, and ends a seal, which the next start repeats."""
        if self._sealer:
            self._sealer.stop.set()  # a seal that runs ends at its next step
        for table in list(self._tables.values()):
            table.wait_until_durable()
        if self._sealer:
            self._sealer.join(self._close_timeout_s)
        if not self._calls.close(self._close_timeout_s):
            raise DatabaseTimeoutError(
                f"closing the database {self.path}: calls still running after {self._close_timeout_s:g} s: "
                f"{self._calls.running}; close it again when they have ended"
            )
        with self._tables_lock:
            for table in self._tables.values():
                table.stop_download()
                table.in_place.close()
            self._tables.clear()
            self._changes.close()

    def disown(self) -> None:
        """In a forked child: leave the files to the parent."""
        self._tables_lock = threading.Lock()
        self._sealer = None

    # -- room ---------------------------------------------------------------------------------------------------------

    @classmethod
    def room_for(cls, config: Any, tables: Sequence[tuple[str, int, int]]) -> list[Need]:
        sizes = [(tag, dim, rows, _file_bytes(tag, dim, rows)) for tag, dim, rows in tables]
        held = [re.compile(expression) for expression in config.resident]
        needs = [
            Need("disk", f"{rows:,} rows of table {tag} ({stored_text(tag, dim)})", size, tag) for tag, dim, rows, size in sizes
        ]
        needs += [
            Need("ram", f"{rows:,} resident rows of table {tag} ({stored_text(tag, dim)})", size, tag)
            for tag, dim, rows, size in sizes
            if any(expression.search(tag) for expression in held)
        ]
        return [*needs, *RocksDatabase.room_for(config, [])]

    def disk_space(self) -> DiskSpace:
        return DiskSpace.of(self.path)

    def check_room(self, tables: Sequence[tuple[str, int, int]]) -> None:
        if self.read_only:
            return
        needs = {}
        with self._calls:
            for tag, dim, rows in tables:
                held = self._tables[tag].size() if tag in self._tables else 0
                if rows > held:
                    needs[f"{rows:,} rows of table {tag} ({stored_text(tag, dim)})"] = _file_bytes(tag, dim, rows)
        check_fits(
            f"making room for tables in {self.path}",
            needs,
            self.disk_space().free_bytes,
            "on its file system",
            "drop tables of models or versions that are no longer needed, remove other files there, or use a larger volume "
            "(persistent_db.path; for a repository --state of `hps serve`)",
        )
        resident = {
            f"{rows:,} resident rows of table {tag} ({stored_text(tag, dim)})": _file_bytes(tag, dim, rows)
            for tag, dim, rows in tables
            if rows and tag not in self._tables and self._is_resident(tag)
        }
        check_fits(
            f"holding resident tables of {self.path} in memory",
            resident,
            *available_memory(),
            "give the process (or its container, where page cache counts) more memory, or leave them out of `resident`",
        )

    # -- rows ---------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, dim)
        found: BoolArray,  # (n,)
    ) -> int:
        with self._calls:
            return self._table(tag).fetch(keys, out, found)

    def insert(
        self,
        tag: str,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        with self._calls:
            self._table(tag).insert(keys, vectors)

    def delete(self, tag: str, keys: KeyArray) -> int:
        with self._calls:
            return self._table(tag).delete(keys)

    def follow_log(self, tag: str) -> dict[Partition, LogPosition]:
        with self._calls:
            return self._table(tag).follow_log()

    def apply(self, tag: str, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        with self._calls:
            return self._table(tag).apply(changes, positions)

    def order_by_time(self, tag: str) -> None:
        self._table(tag)
        self._changes.order_by_time(tag)

    def changed_rows_of(self, tag: str) -> Iterator[tuple[KeyArray, IndexArray]]:
        self._table(tag)
        return self._changes.changed_rows_of(tag)

    def last_changes(self, tag: str, keys: KeyArray) -> IndexArray:
        self._table(tag)
        return self._changes.last_changes(tag, keys)

    def expire(self, tag: str, keys: KeyArray, sequence: int, *, loaded: bool = False) -> ExpiredRows:
        with self._calls:
            return self._table(tag).expire(keys, sequence, loaded=loaded)

    def seal(self, tag: str) -> int:
        """Write a new file with all changes so far, and forget these; return how many there were. Readers never wait."""
        with self._calls:
            return self._table(tag).seal()

    def wait_until_durable(self, tag: str) -> None:
        """Wait until the last load of a table is on the disk, or has failed to get there."""
        with self._calls:
            self._table(tag).wait_until_durable()

    def seal_due(self) -> None:
        """Seal the tables of which many rows have changed, at a pace; called periodically.

        Raises:
            DatabaseError: a table could not be sealed; the others were. It is tried again after a while.
        """
        failure: DatabaseError | None = None
        for tag, table in list(self._tables.items()):
            if not table.is_due(*self._seal_when) or time.monotonic() < self._retry_at.get(tag, 0.0):
                continue
            try:
                with paced():
                    rows = table.seal(_Pace(self._sealer.stop if self._sealer else None))
                _log.info("Table: %s; sealed %d changed rows.", tag, rows)
            except (NotReadyError, UnknownTableError):  # closed or dropped meanwhile
                continue
            except DatabaseError as error:
                self._retry_at[tag] = time.monotonic() + _SEAL_AGAIN_S
                failure = failure or error
        if failure:
            raise failure

    def changed_rows(self, tag: str) -> int:
        """Return how many rows of a table have changed since its file was made."""
        return self._table(tag).changed_rows

    def host_table(self, tag: str) -> HostTable:
        with self._calls:
            return self._table(tag).in_place

    @classmethod
    def index_bytes(cls, rows: int) -> int:
        return rows + 4 * (buckets_for(rows) + 1)

    def scan(self, tag: str, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        check_positive(f"scanning table {tag}", "chunk_rows", chunk_rows)
        with self._calls:
            return self._chunks(self._table(tag).chunks(chunk_rows))

    def _chunks(self, chunks: Iterator[tuple[KeyArray, FloatArray]]) -> Iterator[tuple[KeyArray, FloatArray]]:
        with closing(chunks):  # type: ignore[type-var]
            while True:
                with self._calls:  # not across the yield: an unfinished scan must not keep the database open
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk

    def stats(self, tag: str) -> TableStats:
        with self._calls:
            table = self._table(tag)
            rows = table.size()
            vector_bytes = rows * table.width * 4
            counts = table.counts
            sealing = SealStats(table.changed_rows, counts.seals, counts.rows, counts.seconds, counts.failures)
            overhead_bytes = max(0, table.disk_bytes() - vector_bytes)
            return TableStats(rows, vector_bytes, overhead_bytes, sealing=sealing, file=table.file_statistics())

    def size(self, tag: str) -> int:
        with self._calls:
            return self._table(tag).size()

    def written_at(self, tag: str, keys: KeyArray) -> IndexArray:
        with self._calls:
            return self._table(tag).written_at(keys)

    def writer_token(self, tag: str) -> str | None:
        return self._changes.writer_token(tag)

    def renew_writer_token(self, tag: str) -> str | None:
        return self._changes.renew_writer_token(tag)

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_record(self, tag: str) -> LoadRecord | None:
        with self._calls:
            return self._table(tag).load_record()

    def load_chunk(self, tag: str, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        with self._calls:
            self._table(tag).load_chunk(keys, vectors, record)

    def keeps_changes(self, tag: str) -> bool:
        with self._calls:
            return self._table(tag).keeps_changes

    def load_merged(
        self, tag: str, base_tag: str, changes: Iterable[tuple[KeyArray, RowArray | None]], rows: int, record: LoadRecord
    ) -> bool:
        with self._calls:
            return self._table(tag).merge(self._table(base_tag), changes, rows, record)

    def finish_load(self, tag: str) -> None:
        with self._calls:
            self._table(tag).finish_load()

    def copies(self, file: RowFileSource) -> bool:
        return not adoption.may_link(file, self._files)

    def adopt(
        self, tag: str, file: RowFileSource, record: LoadRecord, progress: Callable[[int], None] = lambda rows: None
    ) -> Adoption:
        with self._calls:
            table = self._table(tag)
            head = adoption.checked_head(file, tag, table.width)
        if file.path is None:
            return self._download(table, file, head, record, progress)
        if not table.can_adopt(head):
            return "refused"
        fresh = self._files / f"{file_name(tag)}.{secrets.token_hex(4)}{TEMPORARY}"
        how: Adoption = "linked"
        try:
            if not adoption.link(file, fresh):
                how = "copied"
                share = share_in(record.fingerprint)
                adoption.copy(file, file.path, fresh, lambda size: progress(size // head.record_bytes), share=share)
            with self._calls:
                return how if table.adopt(fresh, record) else "refused"
        finally:
            with suppress(OSError):
                fresh.unlink()

    def _download(
        self, table: RowTable, file: RowFileSource, head: FileHead, record: LoadRecord, progress: Callable[[int], None]
    ) -> Adoption:
        if table.has_adopted(head, record):
            return "copied"
        beside = [other.file for other in list(self._tables.values()) if other is not table and other.file]
        download = table.download(file, head, record, beside)
        if download is None:
            return "refused"
        done = 0
        while self._wait_for_download and not download.wait(_PROGRESS_S):
            there = download.bytes_there // head.record_bytes
            progress(max(0, there - done))
            done = max(done, there)
        return "downloading"

    def shared_file(self, content: str) -> SharedRowFile | None:
        with self._calls:
            files = [table.shared_file(content) for table in list(self._tables.values())]
        return next((file for file in files if file is not None), None)

    def downloads(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that are here, and all, of each file that is being downloaded, by table."""
        with self._calls:
            found = {tag: table.download_progress() for tag, table in list(self._tables.items())}
        return {tag: progress for tag, progress in found.items() if progress is not None}


class _Pace:
    """Pauses after each step for as long as it took, so that lookups get half of the time. *One thread.*"""

    def __init__(self, stop: Stop | None) -> None:
        self._stop = stop
        self._since = time.monotonic()

    def __call__(self, rows: int) -> None:
        if self._stop and self._stop.wait(min(_MOST_PAUSE_S, time.monotonic() - self._since)):
            raise NotReadyError("sealing: the database is being closed")
        self._since = time.monotonic()


def _file_bytes(tag: str, dim: int, rows: int) -> int:
    return FileHead(tag, dim, rows, buckets_for(rows), "", 0).size_bytes
