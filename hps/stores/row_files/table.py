"""One table: a sealed row file, and its changes in RocksDB.

**What a lookup reads.** A set in memory has the keys that were changed since the file was sealed, deleted ones included. Rows
of these are RocksDB's, all others are the file's. A writer adds a key to the set once its row is in RocksDB, before it
acknowledges.

**A state** is a file and its set. A new file and its set replace both at once; only then the changes that the file has are
removed from RocksDB. So a reader that finds a changed key nowhere in RocksDB knows that it was deleted if the state is still
the current one, and reads again if it is not.

**A load** ends when its file is complete in the page cache: from then on it is served. Making it durable takes as long as the
disk does, and a thread of its own. Until then the durable record says that nothing is loaded and, once a row is written online,
that the load had *ended*: after a crash the same files are loaded again, below the changes in RocksDB, which are later.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import numpy as np

from hps.errors import DatabaseCorruptError, DatabaseError, DatabaseTimeoutError, UnknownTableError
from hps.ground.key_sets import KeySet
from hps.ground.log_limits import LineLimit
from hps.ground.progress import size_text
from hps.ground.shares import TableShare, share_in
from hps.ground.threads.workers import new_thread
from hps.statistics.snapshot import FileStatistics
from hps.stores.base import LOAD_ADVICE, ExpiredRows, LoadRecord, LogPosition, Partition, RowChanges, RowFileSource, exclusive
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.row_files.changed_rows import ChangedRows
from hps.stores.row_files.cold_reads import ColdReads
from hps.stores.row_files.collector import RowCollector
from hps.stores.row_files.download import Download, TransferCounts
from hps.stores.row_files.in_place import RowFileInPlace
from hps.stores.row_files.layout import FileHead, RowFacts
from hps.stores.row_files.row_file import RowFile
from hps.stores.row_files.sharing import TableFile
from hps.stores.row_files.writer import TEMPORARY, Run, build_row_file, sync_directory, sync_file, write_row_file
from hps.tensors.array_checks import check_fetch, check_keys, check_rows
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray, row_dtype_of

_log = logging.getLogger(__name__)

ROWS_SUFFIX: Final = ".rows"
RECORD_SUFFIX: Final = ".json"
_LOG_S: Final = 5.0
_FORGET_ROWS: Final = 16_384  # writers wait while these are removed
_FILE_TIMEOUT_S: Final = 600.0  # for another load or seal of the table
_SLOWEST_DISK: Final = 20 << 20  # bytes a second, to bound waiting for it
_CHANGE_BYTES: Final = 64  # of a changed row in memory and in RocksDB, beside its vector


@dataclass(frozen=True, slots=True)
class TableRecord:
    """What is durably known of a table; without it the table does not exist. *Immutable.*"""

    width: int
    load: LoadRecord | None = None
    ended: bool = False  # the load had ended before a crash, so that changes are later than it

    def write(self, path: Path) -> None:
        """Replace the record of a table, durably on return."""
        fresh = path.with_name(f"{path.name}{TEMPORARY}")
        try:
            with open(fresh, "w") as file:
                json.dump(asdict(self), file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            sync_directory(path.parent)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink()
            raise DatabaseError(f"writing {path}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "TableRecord | None":
        """Read the record of a table; None if there is none."""
        try:
            fields = json.loads(path.read_text())
            return cls(fields["width"], fields["load"] and LoadRecord(**fields["load"]), fields.get("ended", False))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatabaseError(f"reading {path}: {error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise DatabaseCorruptError(f"reading {path}: {error}; expected the record of a table. {LOAD_ADVICE}") from error


def file_name(tag: str) -> str:
    """Return the name, without suffix, of a table's files."""
    return quote(tag, safe="")


def tag_of(path: Path) -> str:
    """Return the table of one of its files."""
    return unquote(path.stem)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """A file, if any, and the keys of changes that it lacks."""

    file: RowFile | None
    changed: ChangedRows


@dataclass(slots=True)
class _Load:
    """A load that has not been finished."""

    record: LoadRecord
    rows: RowCollector
    older: KeyArray = field(default_factory=lambda: np.empty(0, np.int64))  # changed before they were loaded; ascending

    def note_changed(self, keys: KeyArray) -> None:
        """Note that keys are changed now, which is later than their load so far."""
        if self.older.size:
            at = np.minimum(np.searchsorted(self.older, keys), self.older.size - 1)
            self.older = np.delete(self.older, at[self.older[at] == keys])


@dataclass(slots=True, eq=False)
class _Settling:
    """A loaded file on its way to the disk."""

    file: Path  # temporary
    size_bytes: int
    fingerprint: str
    done: threading.Event = field(default_factory=threading.Event)  # also after a failure


class _Recent:
    """Keys that were written while a new file is made."""

    def __init__(self) -> None:
        self.keys = KeySet()
        self.parts: list[KeyArray] = []

    def add(self, keys: KeyArray) -> None:
        if (new := keys[self.keys.add(keys)]).size:
            self.parts.append(new)


@dataclass(slots=True)
class SealCounts:
    """What sealing did since the start."""

    seals: int = 0
    rows: int = 0  # changes that came into files
    seconds: float = 0.0
    failures: int = 0  # of seals, and of loads that could not be made durable


def check_belongs(head: FileHead, place: object, tag: str, width: int) -> None:
    """Check that a file has rows of a table; those of model versions name none.

    Raises:
        DatabaseCorruptError: it has others.
    """
    expected = (tag, width, row_dtype_of(tag))
    if (head.tag or tag, head.width, head.row_dtype) != expected:
        raise DatabaseCorruptError(
            f"opening table {tag}: {place} holds rows of {head.width} words ({head.row_dtype}) of table {head.tag or 'any'}, "
            f"expected {width} ({row_dtype_of(tag)}). {LOAD_ADVICE}"
        )


class RowTable:
    """Rows of one table. *Thread-safe.* One lock serialises writers; readers never take it."""

    def __init__(
        self,
        directory: Path,
        changes: RocksDatabase,
        tag: str,
        record: TableRecord,
        *,
        verify: bool,
        resident: bool,
        write_timeout_s: float,
        most_load_bytes: int | None = None,
    ) -> None:
        self.tag = tag
        self.width = record.width
        self._rows_path = directory / (file_name(tag) + ROWS_SUFFIX)
        self._record_path = directory / (file_name(tag) + RECORD_SUFFIX)
        self._changes = changes
        self._verify = verify
        self._resident = resident
        self._cold_reads = ColdReads()
        self._write_timeout_s = write_timeout_s
        self._most_load_bytes = most_load_bytes
        self._writing = threading.Lock()
        self._sealing = threading.Lock()
        self._record = record
        self._load: _Load | None = None
        self._dropped = False
        self._recent: _Recent | None = None  # while a new file is made
        self._settling: _Settling | None = None  # until its file is durable
        self._leftover = False  # whether RocksDB has changes that are not in the set, since a seal failed
        self.counts = SealCounts()
        self._transfers = TransferCounts()
        self._download: Download | None = None  # of the file that lookups read meanwhile
        changes.open_table(tag, record.width)
        self._state = _State(self._opened(), self._changed())
        self._shadowed = self._count_shadowed(self._state)
        self.in_place = RowFileInPlace(tag, self)

    def _opened(self) -> RowFile | None:
        if not self._rows_path.exists():
            load = self._record.load
            if load and load.promises_rows:
                raise DatabaseCorruptError(
                    f"opening table {self.tag}: {self._rows_path} is missing, and {load.rows_total:,} rows were loaded. "
                    f"{LOAD_ADVICE}"
                )
            return None
        load = self._record.load
        file = self._open_file(share=share_in(load.fingerprint) if load else None)
        check_belongs(file.head, self._rows_path, self.tag, self.width)
        if load and load.complete and not file.has_share:
            raise DatabaseCorruptError(
                f"opening table {self.tag}: {self._rows_path} has share {file.head.share}, expected {file.share}. {LOAD_ADVICE}"
            )
        if self._resident:
            file.hold(required=True, progress=self._holding())
        return file

    def _open_file(self, path: Path | None = None, *, share: TableShare | None) -> RowFile:
        return RowFile(path or self._rows_path, cold_reads=self._cold_reads, share=share)

    def _replacement(self, path: Path | None = None, *, share: TableShare | None) -> RowFile:
        """Open a new file, held in memory if the table is resident and that is possible."""
        file = self._open_file(path, share=share)
        if self._resident:
            file.hold(required=False, progress=self._holding())
        return file

    def _holding(self) -> Callable[[int, int], None]:
        lines = LineLimit(1, _LOG_S)
        lines.take()  # nothing is logged in the first seconds

        def advance(done: int, total: int) -> None:
            if lines.take():
                _log.info("%s: %s of %s held in memory", self.tag, size_text(done), size_text(total))

        return advance

    def _changed(self) -> ChangedRows:
        changed = ChangedRows(self.width)
        for keys in self._changes.changed_keys(self.tag):
            changed.add(keys)
        return changed

    def _count_shadowed(self, state: _State) -> int:
        """Count the rows of the file that changes replace or delete."""
        if state.file is None or not len(state.changed):
            return 0
        return sum(int(state.file.contains(keys).sum()) for keys in self._changes.changed_keys(self.tag))

    # -- reading ------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, width)
        found: BoolArray,  # (n,)
    ) -> int:
        keys, out, found = check_fetch(f"fetching from table {self.tag}", keys, out, found, self.width)
        filled = 0
        while True:
            state = self._state
            left: BoolArray | None = None
            if state.file is None:
                left = state.changed.contains(keys) & ~found
            elif not len(state.changed):
                return filled + state.file.fetch(keys, out, found, verify=self._verify)
            else:
                left = np.zeros(keys.size, np.bool_)
                filled += state.file.fetch(keys, out, found, verify=self._verify, changes=state.changed.view, left=left)
            rows = np.flatnonzero(left)
            if not rows.size:
                return filled
            vectors, there = np.empty((rows.size, self.width), np.float32), np.zeros(rows.size, np.bool_)
            filled += self._changes.fetch(self.tag, keys[rows], vectors, there)
            out[rows[there]] = vectors[there]
            found[rows[there]] = True
            if there.all() or state is self._state:
                return filled

    def _present(self, keys: KeyArray) -> BoolArray:
        """Return which keys have a row. No writer may run."""
        state = self._state
        found: BoolArray = np.zeros(keys.size, np.bool_)
        changed = state.changed.contains(keys)
        if state.file:
            found[~changed] = state.file.contains(keys[~changed])
        rows = np.flatnonzero(changed)
        there = np.zeros(rows.size, np.bool_)
        self._changes.fetch(self.tag, keys[rows], np.empty((rows.size, self.width), np.float32), there)
        found[rows] = there
        return found

    def chunks(self, chunk_rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield every row once: the file's unchanged ones, then the changed ones as they are by then."""
        while True:
            state = self._state
            changed = [np.empty(0, np.int64), *self._changes.changed_keys(self.tag)] if len(state.changed) else []
            if state is self._state:  # else a seal may have forgotten some of them
                break
        beside = KeySet()
        for keys in changed:
            beside.add(keys)
        if state.file:
            for keys, rows in state.file.chunks(chunk_rows):
                if changed:
                    stay = ~beside.contains(keys)
                    keys, rows = keys[stay], rows[stay]
                if keys.size:
                    yield keys, rows
        for all_keys in changed:
            for start in range(0, all_keys.size, chunk_rows):
                keys = all_keys[start : start + chunk_rows]
                vectors, found = np.empty((keys.size, self.width), np.float32), np.zeros(keys.size, np.bool_)
                self.fetch(keys, vectors, found)
                if found.any():
                    yield keys[found], vectors[found]

    def size(self) -> int:
        state = self._state
        rows = state.file.rows if state.file else 0
        return rows - self._shadowed + (self._changes.size(self.tag) if len(state.changed) else 0)

    def file_statistics(self) -> FileStatistics | None:
        """Describe its file, if any; some milliseconds."""
        file, cold = self._state.file, self._cold_reads.counts()
        if file is None:
            return None
        there = self.download_progress() or (0, 0)
        transfers = self._transfers
        return FileStatistics(
            file.resident_share(),
            file.held_bytes,
            *cold,
            missing_bytes=there[1] - there[0],
            from_peers=transfers.from_peers,
            from_source=transfers.from_source,
            peer_failures=transfers.failures,
        )

    def disk_bytes(self) -> int:
        """Return the size of its file and of its changes."""
        state, changes = self._state, self._changes.stats(self.tag)
        return (state.file.size_bytes if state.file else 0) + changes.vector_bytes + max(0, changes.overhead_bytes)

    def written_at(self, keys: KeyArray) -> IndexArray:
        found: BoolArray = np.zeros(keys.size, np.bool_)
        self.fetch(keys, np.empty((keys.size, self.width), np.float32), found)
        load = self._record.load
        loaded: IndexArray = np.where(found, load.loaded_at_us if load else 0, 0)
        return np.maximum(self._changes.written_at(self.tag, keys), loaded)

    # -- writing ------------------------------------------------------------------------------------------------------

    def insert(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, width)
    ) -> None:
        doing = f"inserting into table {self.tag}"
        keys, vectors = check_rows(doing, keys, vectors, self.width)
        with self._alone(doing):
            self._mark_modified()
            with self._noting(keys, vectors):
                self._changes.insert(self.tag, keys, vectors)

    def delete(self, keys: KeyArray) -> int:
        doing = f"deleting from table {self.tag}"
        with self._alone(doing):
            self._mark_modified()
            distinct = np.unique(check_keys(doing, keys))
            count = int(self._present(distinct).sum()) if self._download is None else -1
            with self._noting(distinct, None):
                self._changes.delete(self.tag, distinct)
            return count

    def apply(self, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        doing = f"updating table {self.tag}"
        check_rows(doing, changes.keys, changes.vectors, self.width)
        with self._alone(doing):
            if changes.keys.size:
                self._mark_modified()
            present = None if changes.deleted is None else ~changes.deleted
            with self._noting(changes.keys, changes.vectors, present) as made:
                made[:] = applied = self._changes.apply(self.tag, changes, positions)
            return applied

    def expire(self, keys: KeyArray, sequence: int, *, loaded: bool) -> ExpiredRows:
        """As `AgingRows.expire`. A row that the file has, too, is deleted beside it instead, until the next seal."""
        doing = f"expiring rows of table {self.tag}"
        keys = check_keys(doing, keys)
        with self._alone(doing):
            file, removed = self._state.file, 0
            kept: BoolArray = np.zeros(keys.size, np.bool_)
            if self._recent is not None or self._download is not None or self._load is not None:
                filed: BoolArray = np.ones(keys.size, np.bool_)  # a new file may get any of them
            else:
                filed = file.contains(keys) if file else np.zeros(keys.size, np.bool_)
            if (only := keys[~filed]).size:
                with self._noting(only, None) as made:
                    expired = self._changes.expire(self.tag, only, sequence, loaded=loaded)
                    made[:] = ~expired.kept
                kept[~filed], removed = expired.kept, expired.removed
            last = self._changes.last_changes(self.tag, keys[filed])
            kept[filed] = last > sequence
            due = (last <= sequence) & ((last > 0) | loaded)
            if (also := keys[filed][due]).size:
                self._mark_modified()
                removed += int(self._present(also).sum()) if self._download is None else also.size
                # A lookup that still finds the file's row compares its last change with what is hidden: it must not seem later.
                order, deleted = np.maximum(last[due], 1), np.ones(also.size, np.bool_)
                changes = RowChanges(also, np.zeros((also.size, self.width), np.float32), order, deleted)
                with self._noting(also, None):
                    self._changes.apply(self.tag, changes, {})
            return ExpiredRows(kept, removed)

    def follow_log(self) -> dict[Partition, LogPosition]:
        return self._changes.follow_log(self.tag)

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        if not self._writing.acquire(timeout=self._write_timeout_s):
            raise DatabaseTimeoutError(
                f"{doing}: another write to the table did not end within {self._write_timeout_s:g} s; try again"
            )
        try:
            if self._dropped:
                raise UnknownTableError(f"{doing}: the table was dropped meanwhile; open it again")
            yield
        finally:
            self._writing.release()

    @contextmanager
    def _noting(self, keys: KeyArray, rows: FloatArray | None, present: BoolArray | None = None) -> Iterator[BoolArray]:
        """Add the keys that a write changed, all unless the block clears its mask, (n,); also after a failed write.

        Args:
            rows, present: see `ChangedRows.add`.
        """
        made: BoolArray = np.ones(keys.size, np.bool_)
        try:
            yield made
        except BaseException:
            with suppress(DatabaseError):  # else the next start reads them
                made[:] = self._changes.are_changed(self.tag, keys)
                self._add(keys[made])
            raise
        if made.all():
            self._add(keys, rows, present)
        else:
            self._add(keys[made], None if rows is None else rows[made], None if present is None else present[made])

    def _add(self, keys: KeyArray, rows: FloatArray | None = None, present: BoolArray | None = None) -> None:
        state = self._state
        if self._recent is not None:
            self._recent.add(keys)
        if self._load is not None:
            self._load.note_changed(keys)
        if state.file and self._download is None:
            new = np.unique(keys[~state.changed.contains(keys)])
            self._shadowed += int(state.file.contains(new).sum())
        state.changed.add(keys, rows, present)
        self.in_place.changed(keys, rows, present)

    def _mark_modified(self) -> None:
        load = self._record.load
        if load is not None and not load.modified:
            modified = replace(load, modified=True)
            if self._settling and self._settling.fingerprint == load.fingerprint:
                self._write_ended(modified)
                self._record = replace(self._record, load=modified)
            else:
                self._put(modified)

    # -- for devices --------------------------------------------------------------------------------------------------

    @property
    def file(self) -> RowFile | None:
        return self._state.file

    def changed_keys(self) -> Iterator[KeyArray]:
        """Yield the keys of all changes, perhaps with some that the file has."""
        return self._changes.changed_keys(self.tag)

    def changes_of(self, keys: KeyArray) -> tuple[BoolArray, FloatArray, BoolArray]:
        """Read the changes of keys, (n,), as the writer.

        Returns:
            (n,) bool, which keys were changed since the file was sealed; of these, (m, width) rows, and (m,) which have one.
        """
        is_changed = self._state.changed.contains(keys)
        some = keys[is_changed]
        rows, there = np.zeros((some.size, self.width), np.float32), np.zeros(some.size, np.bool_)
        self._changes.fetch(self.tag, some, rows, there)
        return is_changed, rows, there

    def alone(self, doing: str) -> AbstractContextManager[None]:
        """Let no other thread write."""
        return self._alone(doing)

    def keeping_file(self, doing: str) -> AbstractContextManager[None]:
        """Keep the file from being replaced, by a load, a seal or a download."""
        busy = f"{doing}: a load or seal of the table did not end within {_FILE_TIMEOUT_S:g} s; try again"
        return exclusive(self._sealing, _FILE_TIMEOUT_S, busy)

    def _put(self, load: LoadRecord | None) -> None:
        same = load is not None and self._record.load is not None and self._record.load.fingerprint == load.fingerprint
        record = replace(self._record, load=load, ended=self._record.ended and same and load is not None and not load.complete)
        record.write(self._record_path)
        self._record = record

    def _write_ended(self, load: LoadRecord) -> None:
        """Store durably that a load had ended whose file is not durable."""
        nothing = replace(load, rows_done=0, rows_total=max(1, load.rows_total), checksum="")
        TableRecord(self.width, nothing, ended=True).write(self._record_path)

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_record(self) -> LoadRecord | None:
        return self._load.record if self._load else self._record.load

    @property
    def keeps_changes(self) -> bool:
        """Whether its changes are later than the load that is recorded as incomplete."""
        return self._record.ended

    def load_chunk(self, keys: KeyArray, vectors: FloatArray, record: LoadRecord) -> None:
        """Gather rows of a load for `finish_load`. Without rows the record alone is stored, durably on return."""
        doing = f"loading table {self.tag}"
        keys, vectors = check_rows(doing, keys, vectors, self.width)
        with self._alone(doing):
            before = self.load_record()
            if before is None or before.fingerprint != record.fingerprint:
                if keys.size or not record.complete:  # else the files were only moved
                    self._end_settling()
                    self._changes.forget_log(self.tag)
                    self._put(replace(record, rows_done=0, rows_total=max(1, record.rows_total), checksum=""))
            elif before.modified:
                record = replace(record, modified=True)
            if not keys.size:
                if self._load is not None:
                    self._load.record = record
                elif self._settling:
                    self._record = replace(self._record, load=record)  # stored with the file
                else:
                    self._put(record)
                return
            if self._load is None or self._load.record.fingerprint != record.fingerprint:
                rows = RowCollector(self._rows_path, self.width, record.rows_total, self._most_load_bytes)
                self._load = _Load(record, rows)
            self._load.record = record
            self._load.rows.add(keys, vectors)
            if not self._record.ended:
                changed = self._changes.are_changed(self.tag, keys) if self._leftover else self._state.changed.contains(keys)
                if changed.any():
                    self._load.older = np.union1d(self._load.older, keys[changed])

    def finish_load(self) -> None:
        """Make a file of the loaded rows, and serve it. A thread then makes it durable; writers wait for short pieces only."""
        doing = f"finishing the load of table {self.tag}"
        with self._making_a_file(doing):
            if self._load is None:
                return
            file = self._state.file
            try:
                runs = [*self._load.rows.runs(), *([Run(file.records)] if file else [])]
                self._load_file(runs, self._load.record, doing, self._load)
            finally:
                self._load = None  # after a failure the durable record counts, which says that nothing is loaded

    def merge(
        self, base: "RowTable", changes: Iterable[tuple[KeyArray, FloatArray | None]], rows: int, record: LoadRecord
    ) -> bool:
        """As `MergesRows.load_merged`."""
        doing = f"loading table {self.tag} from the rows of table {base.tag}"
        with self._making_a_file(doing):
            state = base._state
            if state.file is None or len(state.changed) or base.width != self.width or self._state.file is not None:
                return False
            if state.file.share != share_in(record.fingerprint):
                return False
            changed = RowCollector(self._rows_path, self.width, rows, self._most_load_bytes)
            for keys, vectors in changes:
                if vectors is None:
                    changed.add(keys, np.zeros((keys.size, self.width), np.float32), np.ones(keys.size, np.bool_))
                else:
                    changed.add(*check_rows(doing, keys, vectors, self.width))
            self._load_file([*changed.runs(), Run(state.file.records)], record, doing)
            return True

    def _load_file(self, runs: list[Run], record: LoadRecord, doing: str, load: _Load | None = None) -> None:
        share = share_in(record.fingerprint)
        fresh, head = build_row_file(self._rows_path, self.tag, self.width, runs, source=record.fingerprint, share=share)
        settling = _Settling(fresh, head.size_bytes, record.fingerprint)
        with self._removed_on_failure(fresh):
            file = self._replacement(fresh, share=share)
            self.in_place.prepare(file)
        with self._removed_on_failure(fresh), self._alone(doing):
            stored = self._record.load
            modified = record.modified or bool(stored and stored.fingerprint == record.fingerprint and stored.modified)
            record = replace(record, modified=modified, loaded_at_us=time.time_ns() // 1000)
            self._replace_older(file, load.older if load else np.empty(0, np.int64))
            if modified:  # changes are later from now on
                self._write_ended(record)
            if self._settling:  # one that failed
                self._settling.file.unlink(missing_ok=True)
            self._record, self._settling = replace(self._record, load=record), settling
        new_thread(f"settle-{file_name(self.tag)[:40]}", partial(self._settle, settling), lasting=False).start()

    @contextmanager
    def _removed_on_failure(self, fresh: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise

    @contextmanager
    def _making_a_file(self, doing: str) -> Iterator[None]:
        """Wait until no other file of the table is made or on its way to the disk, and exclude others."""
        with self.keeping_file(doing):
            self.wait_until_durable()
            yield

    # -- durability of loads ------------------------------------------------------------------------------------------

    def wait_until_durable(self) -> None:
        """Wait until the last loaded file is on the disk, or has failed to get there.

        Raises:
            DatabaseTimeoutError: it took too long.
        """
        if settling := self._settling:
            limit = self._write_timeout_s + settling.size_bytes / _SLOWEST_DISK
            if not settling.done.wait(limit):
                raise DatabaseTimeoutError(
                    f"writing table {self.tag} to the disk: {settling.size_bytes:,} bytes were not durable after {limit:.0f} s;"
                    " its rows are served, and a start would load them again"
                )

    def _settle(self, settling: _Settling) -> None:
        """Make a loaded file durable, then its record."""
        try:
            sync_file(settling.file)
            with self._writing:
                if self._settling is not settling or self._dropped:
                    return
                settling.file.replace(self._rows_path)
                if file := self._state.file:
                    file.path = self._rows_path
            sync_directory(self._rows_path.parent)
            with self._writing:
                if self._settling is settling and not self._dropped:
                    self._put(self._record.load)
                    self._settling = None  # last: who waits for it looks without the lock
        except (OSError, DatabaseError) as error:
            if not self._dropped:  # else its file was removed
                self._settling_failed(settling, error)
        finally:
            settling.done.set()

    def _settling_failed(self, settling: _Settling, error: Exception) -> None:
        # After a failed fsync the system may drop pages that never reached the disk. So rows are compared with their checksums.
        self._verify = True
        self.counts.failures += 1
        _log.error(
            "table %s: the loaded rows could not be made durable: %s. They are served, each compared with its checksum; the "
            "next start loads them again",
            self.tag,
            error,
        )
        with self._writing:  # `_settling` stays, so that the durable record goes on to say that the load is incomplete
            if self._settling is settling and (load := self._record.load) and not self._dropped:
                self._record = replace(
                    self._record, load=replace(load, rows_done=0, rows_total=max(1, load.rows_total)), ended=True
                )

    def _end_settling(self) -> None:
        """Forget a file that failed to become durable, since other rows replace it."""
        if self._settling and self._settling.done.is_set():
            self._settling = None

    # -- sealing ------------------------------------------------------------------------------------------------------

    @property
    def changed_rows(self) -> int:
        """Number of rows that were changed since the file was made."""
        return len(self._state.changed)

    @property
    def changed_bytes(self) -> int:
        return self.changed_rows * (4 * self.width + _CHANGE_BYTES)

    def is_due(self, share: float, least_rows: int, most_bytes: int) -> bool:
        """Return whether its changes are to be sealed: they exceed a share of the file's rows, or so many bytes."""
        file, changed = self._state.file, self.changed_rows
        enough = changed > share * (file.rows if file else 0) or self.changed_bytes > most_bytes
        return changed >= least_rows and enough and self._may_seal()

    def _may_seal(self) -> bool:
        """Return whether no files are to be loaded below the changes: they would replace what was sealed before."""
        load = self._record.load
        return self._load is None and self._download is None and (load is None or load.complete)

    def _replace(self, file: RowFile, changed: ChangedRows, parts: list[KeyArray] | None = None) -> None:
        """Serve a file; `parts` are the changed keys, by default all that RocksDB has."""
        state = _State(file, changed)
        shadowed = self._count_shadowed(state) if parts is None else sum(int(file.contains(keys).sum()) for keys in parts)
        before, self._state, self._shadowed = self._state.file, state, shadowed
        self.in_place.replaced()
        if before:
            before.release()

    def _replace_older(self, file: RowFile, older: KeyArray) -> None:
        """Serve a file whose rows are later than some changes, and forget these: lookups never find neither.

        Args:
            older: distinct keys of these changes.
        """
        if not older.size:
            self._replace(file, self._state.changed)
            return
        changed = ChangedRows(self.width)
        for keys in self._changes.changed_keys(self.tag):
            later = keys[~np.isin(keys, older, assume_unique=True)]
            changed.add(later, *self._state.changed.known(later))
        self._replace(file, changed)
        leftover, self._leftover = self._leftover, True
        self._changes.forget(self.tag, older)
        self._leftover = leftover
        self._shadowed = self._count_shadowed(self._state)

    def seal(self, progress: Callable[[int], None] | None = None) -> int:
        """Write a new file with all changes so far, and forget these; return how many there were. Readers never wait.

        Args:
            progress: called now and then with the number of rows that were read or written, without a lock; may raise.
        """
        doing, started = f"sealing table {self.tag}", time.monotonic()
        with self._making_a_file(doing):
            with self._alone(doing):
                if self._settling or not self._may_seal() or not self.changed_rows:
                    return 0
                self._recent = _Recent()
                file = self._state.file
            try:
                rows, sealed = RowCollector(self._rows_path, self.width, self.changed_rows, self._most_load_bytes), []
                for keys in self._changes.changed_keys(self.tag):
                    vectors, there = np.zeros((keys.size, self.width), np.float32), np.zeros(keys.size, np.bool_)
                    self._changes.fetch(self.tag, keys, vectors, there)
                    rows.add(keys, vectors, ~there)
                    sealed.append(keys)
                    if progress:
                        progress(keys.size)
                runs = [*rows.runs(), *([Run(file.records)] if file else [])]
                source, facts, share = "", RowFacts(row_dtype_of(self.tag)), None
                if file:  # what is written online may have any key, and is not counted
                    source, facts, share = file.head.source, facts._replace(dim=file.head.dim), file.share
                write_row_file(
                    self._rows_path, self.tag, self.width, runs, source=source, facts=facts, share=share, progress=progress
                )
                fresh = self._replacement(share=share)
                self.in_place.prepare(fresh)
                with self._alone(doing):
                    changed, parts = ChangedRows(self.width), self._recent.parts
                    for keys in parts:
                        changed.add(keys, *self._state.changed.known(keys))
                    self._replace(fresh, changed, parts)
                    self._recent = None
                self._forget(sealed, doing, progress)
            except BaseException:
                self.counts.failures += 1
                raise
            finally:
                self._recent = None
            self.counts.seals += 1
            self.counts.rows += rows.rows
            self.counts.seconds += time.monotonic() - started
            return rows.rows

    def _forget(self, sealed: list[KeyArray], doing: str, progress: Callable[[int], None] | None) -> None:
        """Remove sealed changes from RocksDB, unless the row was changed again."""
        keys, start = np.concatenate([np.empty(0, np.int64), *sealed]), 0  # none if all changes have expired
        try:
            for start in range(0, keys.size, _FORGET_ROWS):
                piece = keys[start : start + _FORGET_ROWS]
                with self._alone(doing):
                    self._changes.forget(self.tag, piece[~self._state.changed.contains(piece)])
                start += piece.size
                if progress:
                    progress(piece.size)
        except BaseException:
            self._leftover = True  # what RocksDB still has is a change, as for the next start
            with suppress(DatabaseError), self._alone(doing):
                self._add(keys[start:][self._changes.are_changed(self.tag, keys[start:])])
                self._leftover = False
            raise

    def can_adopt(self, head: FileHead) -> bool:
        """Return whether a file may become that of the table: it has none, or this one."""
        file = self._state.file
        return self._load is None and (file is None or (bool(file.head.content) and file.head.content == head.content))

    def adopt(self, fresh: Path, record: LoadRecord) -> bool:
        """Make a complete file under another name that of the table, as a load would; return False if it has another."""
        doing = f"adopting a file for table {self.tag}"
        with self.keeping_file(doing), self._alone(doing):
            file, before = RowFile(fresh, share=share_in(record.fingerprint)), self._record.load
            check_belongs(file.head, fresh, self.tag, self.width)
            if not self.can_adopt(file.head):
                return False
            same = before is not None and before.fingerprint == record.fingerprint
            if not same:
                self._changes.forget_log(self.tag)
                self._put(replace(record, rows_done=0, rows_total=max(1, record.rows_total), checksum=""))
            fresh.replace(self._rows_path)
            sync_directory(self._rows_path.parent)
            older = [np.empty(0, np.int64)]
            if not same and len(self._state.changed):  # the loaded rows are later than rows of unknown origin
                older += [keys[file.contains(keys)] for keys in self._changes.changed_keys(self.tag)]
            self._replace_older(self._replacement(share=file.share), np.concatenate(older))
            modified = same and before is not None and before.modified
            self._put(replace(record, modified=modified, loaded_at_us=time.time_ns() // 1000))
            return True

    def download(
        self, file: RowFileSource, head: FileHead, record: LoadRecord, beside: Sequence[RowFile] = ()
    ) -> Download | None:
        """Serve a file from elsewhere while it is copied, as `adopt` does a complete one; None if the table has other rows.

        Args:
            beside: see `Download`.
        """
        doing = f"adopting {file.place} for table {self.tag}"
        with self.keeping_file(doing):
            before, share = self._record.load, share_in(record.fingerprint)
            same = before is not None and before.fingerprint == record.fingerprint
            if self._download is not None:
                return self._download if same and self._download.head.content == head.content else None
            if self._load is not None or self._state.file is not None or (not same and len(self._state.changed)):
                return None
            name = self._rows_path.with_name(self._rows_path.name.removesuffix(ROWS_SUFFIX))
            download = Download(
                file, head, name, lambda: self._finish_download(download), share=share, counts=self._transfers, beside=beside
            )
            try:
                opened = RowFile(download.partial, download, self._cold_reads, share=share)
                download.start(opened.range.runs(head))
                state = _State(opened, self._state.changed)
                with self._alone(doing):
                    if not same:
                        self._changes.forget_log(self.tag)
                    modified = same and before is not None and before.modified
                    self._put(replace(record, rows_done=0, checksum="", modified=modified))
                    self._state, self._download, self._shadowed = state, download, 0
                    if self.in_place.layout() is not None:
                        self.in_place.close()  # what is not here yet cannot be pinned
            except BaseException:
                download.stop(self._write_timeout_s)
                raise
            return download

    def _finish_download(self, download: Download) -> None:
        """Make the complete file that of the table."""
        doing = f"completing the download of table {self.tag}"
        with self.keeping_file(doing), self._alone(doing):
            load = self._record.load
            if self._download is not download or load is None:
                raise DatabaseError(f"completing the download of table {self.tag}: the table has another file")
            download.rename(self._rows_path)
            self._replace(self._replacement(share=share_in(load.fingerprint)), self._state.changed)
            self._put(replace(load, rows_done=load.rows_total, loaded_at_us=time.time_ns() // 1000))
            self._download = None
        self.in_place.completed()

    def has_adopted(self, head: FileHead, record: LoadRecord) -> bool:
        """Return whether the table has a complete file of this content already, which was adopted with this record."""
        doing = f"adopting a file for table {self.tag}"
        with self.keeping_file(doing), self._alone(doing):
            file, load = self._state.file, self._record.load
            if file is None or self._download is not None or load is None or load.fingerprint != record.fingerprint:
                return False
            if not head.content or file.head.content != head.content:
                return False
            if file.share != share_in(record.fingerprint) or not file.has_share:
                return False
            if not load.complete:  # the process ended between the file's name and the record
                self._put(replace(record, modified=load.modified, loaded_at_us=time.time_ns() // 1000))
            return True

    def download_progress(self) -> tuple[int, int] | None:
        """Return the bytes that are here, and all, of a file that is being downloaded; None if there is none."""
        download = self._download
        return None if download is None else (download.bytes_there, download.size_bytes)

    def shared_file(self, content: str) -> TableFile | None:
        """Return its file for other replicas, if it is that of this content."""
        file = self._state.file
        return TableFile(file) if file is not None and content and file.head.content == content else None

    def stop_download(self) -> None:
        """End a download, which a later one of the same file continues."""
        if (download := self._download) is not None:
            download.stop(self._write_timeout_s)

    def retire(self) -> None:
        """Refuse writes from now on, and remove a file that is not durable yet."""
        doing = f"dropping table {self.tag}"
        with self.keeping_file(doing), self._alone(doing):
            self._dropped = True
            if self._settling:
                self._settling.file.unlink(missing_ok=True)
            self.in_place.close()
            if self._state.file:
                self._state.file.release()
        self.stop_download()
