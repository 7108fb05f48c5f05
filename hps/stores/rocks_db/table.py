"""One table of the persistent database, between arrays and RocksDB's lists of bytes.

A row is HugeCTR's: the key is the 8 raw little-endian bytes of an int64, the value the raw little-endian float32 vector.
RocksDB compares keys byte by byte, so its order is that of the key's bytes read as one big-endian number.

The time of a row's last online write is the value of the same key in a second column family, from the same write, so that a
table keeps HugeCTR's layout. If the table has followed a log of updates, the time is followed by the change's place in the
order of all changes (`change_order.py`), and deleted rows have values, too.

The engine takes and returns lists of `bytes`. C code builds and joins them (`tolist`, `join`, `map`), never a Python loop.
"""

import resource
import secrets
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress, repeat
from operator import is_not, itemgetter, methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseCorruptError, UnknownTableError
from hps.ground.threads.pacing import pieces
from hps.ground.threads.thread_pool import DISK_POOL, POOL
from hps.stores.base import LOAD_ADVICE, ExpiredRows, LoadRecord, LogPosition, Partition, RowChanges, exclusive
from hps.stores.rocks_db.change_order import LATEST, OLDER, UNCERTAIN, ChangeOrder
from hps.stores.rocks_db.engine import BLOCK_BYTES, DEFAULT, SEALED, TIMES, Engine, after
from hps.stores.rocks_db.load_records import LoadRecords
from hps.tensors.array_checks import check_fetch, check_keys, check_rows
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_KEY_BYTES = 8
_TIME = struct.Struct("<q")  # time of the write in microseconds since 1970; later releases may append to the value
_CHANGE = struct.Struct("<qq")  # that, and the sequence of the change
_PIECE_ROWS = 4096  # about a millisecond of engine calls
_PIECE_BYTES = 1 << 20
_FETCH_ROWS = 2048  # a multi-get allocates for all its keys at once; a tenth faster than with 10,000
_ROWS_WORTH_A_THREAD = 1024
_COLD_ROWS = 16  # of a multi-get that waits for the disk for each row
_COLD_SHARE = 32  # one row of so many that is read from the disk makes a fetch cold
_BLOCKS_A_ROW = BLOCK_BYTES // 512
_FEW_TIMES = 128  # in the memtable, which RocksDB sorts for each read of a key
_UNKNOWN = 1 << 62
_EXACT_ROWS = 1 << 17  # tables up to this size are counted, which takes some 50 ms


class RocksTable:
    """Rows of one column family. *Thread-safe.*

    One lock serialises writers, so that a load and its record never count as unmodified. Readers never take it.
    """

    def __init__(
        self,
        engine: Engine,
        records: LoadRecords,
        tag: str,
        dim: int,
        *,
        max_batch_size: int,
        write_timeout_s: float,
        keeps_deletions: bool = False,
    ) -> None:
        self.tag = tag
        self.dim = dim
        self._engine = engine
        self._records = records
        self._family = engine.family(tag)
        self._times = engine.family(TIMES + tag)
        self._writing = threading.Lock()
        self._write_timeout_s = write_timeout_s
        self._loading = False  # until `settle`, files are unmerged
        self._dropped = False
        self._changes = 0  # finished writes
        self._counted = (-1, 0)  # `_changes` at the last count of rows, and the count
        self._cold = False  # whether the last fetch read from the disk
        self._marked = False  # whether its record, if any, counts it as modified
        self._writer = records.writer(tag)
        self._writer_waits = False  # to be stored once the disk has room
        self._keeps_deletions = keeps_deletions
        self._unflushed = _UNKNOWN  # entries in the memtable of the times family
        self._sealed = engine.family(SEALED + tag)
        self._unflushed_sealed = _UNKNOWN
        self._order = ChangeOrder(engine, tag, always=keeps_deletions)
        # That C code holds the interpreter lock, so the table works in pieces, between which other threads can run.
        self._piece_rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES // (_KEY_BYTES + 4 * dim)))
        self._fetch_rows = min(max_batch_size, _FETCH_ROWS)
        self._write_rows = min(max_batch_size, self._piece_rows)

    # -- reading ------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, dim)
        found: BoolArray,  # (n,)
    ) -> int:
        doing = f"fetching from table {self.tag}"
        keys, out, found = check_fetch(doing, keys, out, found, self.dim)
        missing = np.flatnonzero(~found)
        missing = missing[np.argsort(_ranks(keys[missing]))]
        filled: list[int] = []
        blocks: list[int] = []

        def part(first: int, last: int) -> None:
            before = _blocks_read()
            for start in range(first, last, self._fetch_rows):
                rows = missing[start : min(start + self._fetch_rows, last)]
                batch = _key_list(keys[rows])
                values = self._engine.get(self._family, batch, doing)
                vectors, mask = self._joined(batch, values)
                if mask is not None:
                    rows = rows[mask]
                out[rows] = vectors
                found[rows] = True
                filled.append(rows.size)
            blocks.append(_blocks_read() - before)

        # Each part is in RocksDB's order. A multi-get reads one block after another from the disk: if the last fetch had to,
        # many small ones do.
        if self._cold:
            DISK_POOL.run(missing.size, _COLD_ROWS, part)
        else:
            POOL.run(missing.size, _ROWS_WORTH_A_THREAD, part)
        if missing.size:
            self._cold = sum(blocks) * _COLD_SHARE > missing.size * _BLOCKS_A_ROW
        return sum(filled)

    def chunk(self, start: bytes, rows: int, doing: str) -> tuple[KeyArray, FloatArray, bytes]:
        """Read up to `rows` rows from the engine's key `start` on; return them and the start of the next chunk."""
        pieces = [(np.empty(0, np.int64), np.empty((0, self.dim), np.float32))]
        while rows:
            flat = self._engine.read(self._family, start, min(rows, self._piece_rows), doing)
            if not flat:
                break
            pieces.append(self._split_rows(flat))
            start = after(flat[-2])
            rows -= len(flat) // 2
        return np.concatenate([keys for keys, _ in pieces]), np.concatenate([vectors for _, vectors in pieces]), start

    def size(self) -> int:
        """Count the rows of a small table if it changed since the last count; estimate those of a large one."""
        estimate = self._engine.figure(self._family, "estimate-num-keys")
        if estimate > _EXACT_ROWS:
            return estimate
        changes = self._changes
        if self._counted[0] != changes:
            self._counted = changes, self._count(estimate)
        return self._counted[1]

    def _count(self, estimate: int) -> int:
        rows, start = 0, b""
        while rows <= _EXACT_ROWS:
            keys = self._engine.read_keys(self._family, start, self._piece_rows, f"counting table {self.tag}")
            if not keys:
                return rows
            rows, start = rows + len(keys), after(keys[-1])
        return max(rows, estimate)

    def written_at(self, keys: KeyArray) -> IndexArray:
        """As `PersistentDatabase.written_at`; of a load and an online write, the later time counts."""
        doing = f"reading when rows of table {self.tag} were written"
        keys = check_keys(doing, keys)
        record = self._records.get(self.tag)
        loaded_at = record.loaded_at_us if record else 0
        written: IndexArray = np.zeros(keys.size, np.int64)
        order = np.argsort(_ranks(keys))
        for start in range(0, keys.size, self._fetch_rows):
            rows = order[start : start + self._fetch_rows]
            batch = _key_list(keys[rows])
            present = np.fromiter(_presence(self._engine.get(self._family, batch, doing)), np.bool_, rows.size)
            written[rows[present]] = np.maximum(self._last_changes(batch, doing)[present, 0], loaded_at)
        return written

    def _last_changes(self, keys: list[bytes], doing: str) -> IndexArray:
        """Read time and sequence of the last change of rows, (n, 2); zeros if unknown."""
        last: IndexArray = np.zeros((len(keys), 2), np.int64)
        for family in (self._sealed, self._times):  # the later change last
            if family is None:
                continue
            values = self._engine.get(family, keys, doing)
            known = np.fromiter(_presence(values), np.bool_, len(keys))
            present: Any = compress(values, known)
            last[known] = _changes(present)
        return last

    def stored_bytes(self) -> int:
        figures = ("live-sst-files-size", "cur-size-all-mem-tables")
        families = [family for family in (self._family, self._times) if family is not None]
        return sum(self._engine.figure(family, figure) for family in families for figure in figures)

    def _joined(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> tuple[FloatArray, BoolArray | None]:
        """Join the values of a multi-get, None for absent keys.

        Returns:
            The vectors of present keys, (m, dim), read only; and a mask of these keys, (n,), or None for all.

        Raises:
            DatabaseCorruptError: a value is not a vector of this width.
        """
        mask = None
        present: Sequence[bytes | None] = values
        try:
            sizes = set(map(len, values))  # type: ignore[arg-type]
        except TypeError:  # None has no length: a key is absent
            mask = np.fromiter(_presence(values), np.bool_, len(values))
            present = list(compress(values, mask))
            sizes = set(map(len, present))  # type: ignore[arg-type]
        if not sizes <= {4 * self.dim}:
            raise self._damaged((key, value) for key, value in zip(keys, values, strict=True) if value is not None)
        joined = np.frombuffer(b"".join(present), "<f4").reshape(-1, self.dim)  # type: ignore[arg-type]
        return joined.astype(np.float32, copy=False), mask

    def _split_rows(self, flat: Sequence[bytes]) -> tuple[KeyArray, FloatArray]:
        """Join keys and values of an iterator: key, value, key, value, ...

        Returns:
            The keys, (n,), and their vectors, (n, dim); read only and strided.

        Raises:
            DatabaseCorruptError: a key does not have 8 bytes, or a value is not a vector of this width.
        """
        keys, values = flat[::2], flat[1::2]
        if not (set(map(len, keys)) <= {_KEY_BYTES} and set(map(len, values)) <= {4 * self.dim}):
            raise self._damaged(zip(keys, values, strict=True))
        rows = np.frombuffer(b"".join(flat), np.dtype([("key", "<i8"), ("vector", "<f4", (self.dim,))]))
        return rows["key"].astype(np.int64, copy=False), rows["vector"].astype(np.float32, copy=False)

    def _damaged(self, rows: Iterable[tuple[bytes, bytes]]) -> DatabaseCorruptError:
        """Build the error for the first row of a wrong size."""
        key, value = next(row for row in rows if (len(row[0]), len(row[1])) != (_KEY_BYTES, 4 * self.dim))
        name = int.from_bytes(key, "little", signed=True) if len(key) == _KEY_BYTES else f"0x{key.hex()}"
        return DatabaseCorruptError(
            f"reading table {self.tag} in {self._engine.path}: the row of key {name} has a vector of {len(value)} bytes, "
            f"expected keys of {_KEY_BYTES} and vectors of {4 * self.dim} bytes. Another program wrote it: insert the key "
            f"again, or: {LOAD_ADVICE}"
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def insert(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        doing = f"inserting into table {self.tag}"
        keys, vectors = check_rows(doing, keys, vectors, self.dim)
        with self._alone(doing):
            self._mark_modified()
            written = self._changed_now(keys)
            self._unflushed += keys.size
            for piece, values in self._sorted_pieces(keys, vectors, self._write_rows):  # a fifth faster than unsorted
                self._engine.write({self.tag: (piece, values), TIMES + self.tag: (piece, written)}, {}, doing)
            self._engine.sync(doing)

    def delete(self, keys: KeyArray) -> int:
        doing = f"deleting from table {self.tag}"
        keys = check_keys(doing, keys)
        distinct = keys[_last_of_each(keys)]
        times, deleted = TIMES + self.tag, 0
        with self._alone(doing):
            self._mark_modified()
            written = self._changed_now(keys)
            for rows in pieces(distinct.size, self._write_rows):
                batch = _key_list(distinct[rows])
                present = self._present(batch, doing)
                self._unflushed += len(batch)
                if self._order.next:
                    self._engine.write({times: (batch, written)}, {self.tag: present}, doing)
                else:
                    names = [self.tag] if self._times is None else [self.tag, times]
                    self._engine.write({}, dict.fromkeys(names, present), doing)
                deleted += len(present)
            self._engine.sync(doing)
        return deleted

    def _changed_now(self, keys: KeyArray) -> Iterable[bytes]:
        """Yield, without end, the times family's value for rows that are inserted or deleted now."""
        now, sequence = time.time_ns() // 1000, self._order.next
        self._order.record(keys, np.full(keys.size, sequence, np.int64))
        return repeat(_CHANGE.pack(now, sequence) if sequence else _TIME.pack(now))

    def _present(self, keys: list[bytes], doing: str) -> list[bytes]:
        """Select the present keys."""
        # A deletion writes a mark even for an absent key, and each mark slows down later reads.
        return list(compress(keys, _presence(self._engine.get(self._family, keys, doing)))) if keys else []

    # -- changes beside a row file ------------------------------------------------------------------------------------

    def changed_keys(self) -> Iterator[KeyArray]:
        """Yield the keys of all changes, deletions included, that were not forgotten."""
        start = b""
        while self._times is not None:
            keys = self._engine.read_keys(self._times, start, self._piece_rows, f"reading the changes of table {self.tag}")
            if not keys:
                return
            start = after(keys[-1])
            yield np.frombuffer(b"".join(keys), "<i8").astype(np.int64)

    def are_changed(self, keys: KeyArray) -> BoolArray:
        """Return which keys, (n,), have a change that was not forgotten."""
        changed: BoolArray = np.zeros(keys.size, np.bool_)
        if self._times is not None:
            order = np.argsort(_ranks(keys))
            doing = f"reading the changes of table {self.tag}"
            self._flush_times(doing)
            for rows in pieces(keys.size, self._fetch_rows):
                values = self._engine.get(self._times, _key_list(keys[order[rows]]), doing)
                changed[order[rows]] = np.fromiter(_presence(values), np.bool_, len(values))
        return changed

    def forget(self, keys: KeyArray) -> None:
        """Remove the rows and changes of keys, (n,). If the table follows a log, their times and sequences stay."""
        doing = f"forgetting changes of table {self.tag}"
        times = TIMES + self.tag
        order = np.argsort(_ranks(keys))
        with self._alone(doing):
            if self.follows_log and self._sealed is None:
                self._sealed = self._engine.create(SEALED + self.tag)
            stored: list[bytes | None] = []
            if self._sealed is not None:
                self._flush_times(doing)
                for rows in pieces(keys.size, self._fetch_rows):
                    stored += self._engine.get(self._times, _key_list(keys[order[rows]]), doing)
            for rows in pieces(keys.size, self._write_rows):
                batch = _key_list(keys[order[rows]])
                values = stored[rows]
                known = [*_presence(values)]
                puts = {SEALED + self.tag: (list(compress(batch, known)), list(compress(values, known)))} if known else {}
                self._unflushed += len(batch)
                self._unflushed_sealed += len(batch)
                self._engine.write(puts, {self.tag: batch, times: batch}, doing)  # type: ignore[arg-type]
            self._engine.sync(doing)

    # -- updates of a log ---------------------------------------------------------------------------------------------

    def follow_log(self) -> dict[Partition, LogPosition]:
        with self._alone(f"following a log of updates for table {self.tag}"):
            return dict(self._order.positions)

    def apply(self, changes: RowChanges, positions: Mapping[Partition, LogPosition]) -> BoolArray:
        """As `OrderedWrites.apply`."""
        # The first write has the highest sequence, so that no row ever has a higher one; the last write has the positions, so
        # that they never count missing rows. A crash in between leaves a state from which the batch can be applied again.
        doing = f"updating table {self.tag}"
        check_rows(doing, changes.keys, changes.vectors, self.dim)
        with self._alone(doing):
            latest = self._are_latest(changes.keys, changes.sequences, doing)
            made = changes.at(latest)
            if made.keys.size:
                self._mark_modified()
            self._order.record(made.keys, made.sequences)
            order, highest = np.argsort(_ranks(made.keys)), int(made.sequences.max(initial=0))
            for piece in pieces(max(1, order.size), self._write_rows):
                records = self._order.raised(highest) if piece.start == 0 else {}
                if piece.stop >= order.size:
                    records |= self._order.moved(positions)
                self._write_changes(made, order[piece], records, doing)
                self._order.highest = max(self._order.highest, highest)
            self._order.positions |= positions
            self._engine.sync(doing)
        return latest

    # -- rows that age ------------------------------------------------------------------------------------------------

    def order_by_time(self) -> None:
        """As `AgingRows.order_by_time`."""
        # A table counts as one that follows a log from then on: a deletion is remembered, and sealing keeps the sequences.
        doing = f"ordering changes of table {self.tag} by time"
        with self._alone(doing):
            if not (self._order.by_time and self._order.follows):
                self._engine.write({DEFAULT: _unzipped(self._order.ordered_by_time())}, {}, doing)
                self._engine.sync(doing)
                self._order.by_time, self._order.highest = True, max(self._order.highest, 1)
            self._order.invalidate()  # rows may have later sequences than its bounds

    def changed_rows(self) -> Iterator[tuple[KeyArray, IndexArray]]:
        """As `AgingRows.changed_rows_of`."""
        doing = f"reading the changes of table {self.tag}"
        for family in (self._sealed, self._times):
            start = b""
            while family is not None and (flat := self._engine.read(family, start, self._fetch_rows, doing)):
                start = after(flat[-2])
                yield np.frombuffer(b"".join(flat[::2]), "<i8").astype(np.int64), _sequences(_changes(flat[1::2]))

    def last_changes(self, keys: KeyArray) -> IndexArray:
        """As `AgingRows.last_changes`."""
        doing = f"reading the last changes of table {self.tag}"
        last: IndexArray = np.zeros(keys.size, np.int64)
        order = np.argsort(_ranks(keys))
        if keys.size:
            self._flush_times(doing)
        for piece in pieces(keys.size, self._fetch_rows):
            rows = order[piece]
            last[rows] = _sequences(self._last_changes(_key_list(keys[rows]), doing))
        return last

    def _flush_times(self, doing: str) -> None:
        """Write the memtables of times to files before keys are read from them, unless they have only a few."""
        if self._times is not None and self._unflushed > _FEW_TIMES:
            self._unflushed = 0  # before: what is written meanwhile counts
            self._engine.flush(self._times, doing)
        if self._sealed is not None and self._unflushed_sealed > _FEW_TIMES:
            self._unflushed_sealed = 0
            self._engine.flush(self._sealed, doing)

    def expire(self, keys: KeyArray, sequence: int, *, loaded: bool) -> ExpiredRows:
        """As `AgingRows.expire`."""
        # Not synced: what a crash undoes is expired at the next start, too.
        doing, removed = f"expiring rows of table {self.tag}", 0
        keys = check_keys(doing, keys)
        with self._alone(doing):
            kept: BoolArray = self._order.judge(keys, np.full(keys.size, sequence, np.int64)) == OLDER
            doubtful = np.flatnonzero(~kept)
            last = self.last_changes(keys[doubtful])
            kept[doubtful] = last > sequence
            due = keys[doubtful[(last <= sequence) & ((last > 0) | loaded)]]
            due = due[np.argsort(_ranks(due))]
            if due.size:
                self._mark_modified()
            records = [TIMES + self.tag] if self._sealed is None else [TIMES + self.tag, SEALED + self.tag]
            for rows in pieces(due.size, self._write_rows):
                batch = _key_list(due[rows])
                present = self._present(batch, doing)
                self._unflushed += len(batch)
                self._unflushed_sealed += len(batch)
                self._engine.write({}, {self.tag: present} | dict.fromkeys(records, batch), doing)
                removed += len(present)
            self._flush_times(doing)  # here, and not in the next lookup
        return ExpiredRows(kept, removed)

    def _are_latest(self, keys: KeyArray, sequences: IndexArray, doing: str) -> BoolArray:
        verdicts = self._order.judge(keys, sequences)
        doubtful = np.flatnonzero(verdicts == UNCERTAIN)
        if doubtful.size and self._times is not None:
            # The memtable of the times is an unsorted vector, which RocksDB sorts for each read of a key. So it is written to a
            # file first. That also starts a new log each time, and logs with unflushed rows of other families stay: these are
            # flushed once there are many.
            self._flush_times(doing)
            if self._engine.logs_pile_up:
                for family in (self._family, self._engine.family(DEFAULT)):
                    self._engine.flush(family, doing)
        doubtful = doubtful[np.argsort(_ranks(keys[doubtful]))]
        for start in range(0, doubtful.size, self._fetch_rows):
            rows = doubtful[start : start + self._fetch_rows]
            stored = self._last_changes(_key_list(keys[rows]), doing)[:, 1]
            verdicts[rows] = np.where(stored <= sequences[rows], LATEST, OLDER)
        latest: BoolArray = verdicts == LATEST
        return latest

    def _write_changes(self, changes: RowChanges, rows: IndexArray, records: Mapping[bytes, bytes], doing: str) -> None:
        """Apply the chosen changes, (n,) in RocksDB's order, and store records, atomically."""
        written = np.empty((rows.size, 2), "<i8")
        written[:, 0], written[:, 1] = time.time_ns() // 1000, changes.sequences[rows]
        keys = _key_list(changes.keys[rows])
        upserts, removed = keys, []
        if changes.deleted is not None:
            deleted = changes.deleted[rows]
            upserts, removed = list(compress(keys, ~deleted)), self._present(list(compress(keys, deleted)), doing)
            rows = rows[~deleted]
        puts: dict[str, tuple[Iterable[bytes], Iterable[bytes]]] = {
            self.tag: (upserts, _vector_list(changes.vectors[rows])),
            TIMES + self.tag: (keys, written.view(f"V{_CHANGE.size}").ravel().tolist()),
        }
        if records:
            puts[DEFAULT] = _unzipped(records)
        self._unflushed += len(keys)
        self._engine.write(puts, {self.tag: removed}, doing)

    def load(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
        record: LoadRecord,
        staged: Path,
    ) -> None:
        """Add or replace rows in bulk through the file `staged`, then store `record`; durably on return."""
        doing = f"loading table {self.tag}"
        keys, vectors = check_rows(doing, keys, vectors, self.dim)
        with self._alone(doing):
            if keys.size:
                if not self._loading:
                    self._engine.start_load(self._family, doing)
                    self._loading = True
                try:
                    self._engine.stage(self._sorted_pieces(keys, vectors, self._piece_rows), staged, doing)
                    before = self._records.get(self.tag)
                    if before is None or before.fingerprint != record.fingerprint:
                        # Rows without a record would count as HugeCTR's, and as a complete table.
                        empty = replace(record, rows_done=0, rows_total=max(1, record.rows_total), checksum="")
                        self._records.advance(self.tag, empty)
                    self._engine.ingest(self._family, staged, doing)
                finally:
                    staged.unlink(missing_ok=True)
            if keys.size:
                record = replace(record, loaded_at_us=time.time_ns() // 1000)
            self._marked = self._records.advance(self.tag, record).modified

    @property
    def remembers_times(self) -> bool:
        """Whether the times family exists, which `insert` needs."""
        return self._times is not None

    def remember_times(self) -> None:
        """Create the times family. One thread at a time may create or drop column families."""
        if self._times is None:
            self._times = self._engine.create(TIMES + self.tag)

    @property
    def follows_log(self) -> bool:
        """Whether it ever followed a log of updates."""
        return self._order.follows

    def is_replaced_by(self, keys: KeyArray, record: LoadRecord) -> bool:
        """Return whether a chunk starts a load of other files into a table that has followed a log."""
        if not self.follows_log or (not keys.size and record.complete):  # the record of moved files
            return False
        before = self._records.get(self.tag)
        return before is None or before.fingerprint != record.fingerprint

    def forget_log(self) -> None:
        """Forget the log; the rows are then older than any change. One thread at a time, as `remember_times`."""
        doing = f"forgetting the log of table {self.tag}"
        with self._alone(doing):
            if self._keeps_deletions:
                self._level_changes(doing)
            else:
                if self._times is not None:
                    self._engine.drop(TIMES + self.tag)  # first: this is repeated while the records exist
                self._times = self._engine.create(TIMES + self.tag)
            if self._sealed is not None:
                self._engine.drop(SEALED + self.tag)
                self._sealed = None
            self._order.forget()

    def _level_changes(self, doing: str) -> None:
        """Give all changes the lowest sequence: they say which rows are not the file's, so they stay."""
        for keys in self.changed_keys():
            batch = _key_list(keys)
            times = _CHANGE.pack(time.time_ns() // 1000, 1)
            self._unflushed += len(batch)
            self._engine.write({TIMES + self.tag: (batch, [times] * len(batch))}, {}, doing)

    def settle(self) -> None:
        """Merge the ingested files. Writers need not wait."""
        doing = f"finishing the load of table {self.tag}"
        self._engine.check_writable(doing)
        self._engine.settle(self._family, doing)
        self._loading = False

    def renew(self, engine: Engine, records: LoadRecords) -> None:
        """Switch to a reopened or another engine; no other call may run."""
        self._engine, self._records = engine, records
        self._family, self._times = self._engine.family(self.tag), self._engine.family(TIMES + self.tag)
        self._sealed = self._engine.family(SEALED + self.tag)
        self._unflushed = self._unflushed_sealed = _UNKNOWN
        self._order = ChangeOrder(self._engine, self.tag, always=self._keeps_deletions)
        self._loading = False  # the engine merges by itself again
        if self._writer_waits and not self._engine.in_view:
            self._name_writer(str(self._writer))

    def retire(self) -> None:
        """Refuse writes from now on."""
        # RocksDB addresses families by name in a batch, and another table may soon have this one's name.
        with self._alone(f"dropping table {self.tag}"):
            self._dropped = True

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        self._engine.check_writable(doing)
        busy = (
            f"{doing} in {self._engine.path}: another write to the table did not end within {self._write_timeout_s:g} s; "
            "try again"
        )
        with exclusive(self._writing, self._write_timeout_s, busy):
            try:
                if self._dropped:
                    raise UnknownTableError(f"{doing} in {self._engine.path}: the table was dropped meanwhile; open it again")
                yield
            except BaseException:
                self._order.invalidate()  # it may have recorded unwritten changes
                raise
            finally:
                self._changes += 1

    def writer_token(self) -> str | None:
        """Return the stored token of a modified table; a new one if an older release modified it."""
        if self._writer is None and (record := self._records.get(self.tag)) is not None and record.modified:
            return secrets.token_hex(6)
        return self._writer

    def renew_writer_token(self) -> str | None:
        """Store and return another token if the table was modified, durably on return; on a full disk when it is reopened."""
        with self._alone(f"naming the writer of table {self.tag}"):
            if self.writer_token() is not None:
                self._name_writer(secrets.token_hex(6))
            return self._writer

    def _name_writer(self, token: str) -> None:
        self._writer_waits = self._engine.in_view
        if not self._writer_waits:
            self._records.name_writer(self.tag, token)
        self._writer = token

    def _mark_modified(self) -> None:
        if not self._marked:
            self._records.mark_modified(self.tag)
            self._marked = True
        if self._writer is None:
            self._name_writer(secrets.token_hex(6))

    def _sorted_pieces(self, keys: KeyArray, vectors: FloatArray, piece_rows: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
        order = _last_of_each(keys)
        for piece in pieces(order.size, piece_rows):
            rows = order[piece]
            yield _key_list(keys[rows]), _vector_list(vectors[rows])


def width_of(engine: Engine, tag: str) -> int | None:
    """Read the width of the vectors in an existing table; None if it is empty.

    Raises:
        DatabaseCorruptError: its first row has another layout.
    """
    first = engine.read(engine.family(tag), b"", 1, f"opening table {tag}")
    if not first:
        return None
    key, value = first
    if len(key) != _KEY_BYTES or len(value) % 4 or not value:
        raise DatabaseCorruptError(
            f"opening table {tag} in {engine.path}: its first row has a key of {len(key)} bytes and a value of {len(value)}, "
            f"expected {_KEY_BYTES} and a multiple of 4 (also if its keys had 32 bits). {LOAD_ADVICE}"
        )
    return len(value) // 4


# -- rows as bytes and as arrays ---------------------------------------------------------------------------------------


def _ranks(keys: KeyArray) -> npt.NDArray[np.uint64]:
    """Map keys to numbers, (n,), in RocksDB's order."""
    ranks: npt.NDArray[np.uint64] = keys.astype("<i8", copy=False).view(">u8").astype(np.uint64)
    return ranks


def _last_of_each(keys: KeyArray) -> IndexArray:
    """Find the last row of each distinct key, (m,), in RocksDB's order."""
    ranks = _ranks(keys)
    order: IndexArray = np.argsort(ranks)  # several times faster than a stable sort, which only duplicates need
    ranked = ranks[order]
    repeats = ranked[1:] == ranked[:-1]
    if repeats.any():
        order = np.argsort(ranks, kind="stable")[np.append(~repeats, True)]
    return order


def _key_list(keys: KeyArray) -> list[bytes]:
    encoded: list[bytes] = keys.astype("<i8", copy=False).view("V8").tolist()
    return encoded


def _vector_list(
    vectors: FloatArray,  # (n, dim)
) -> list[bytes]:
    little = vectors.astype("<f4", copy=False)
    encoded: list[bytes] = little.view(f"V{little.shape[1] * 4}").ravel().tolist()
    return encoded


def _presence(values: Sequence[bytes | None]) -> Iterator[bool]:
    return map(is_not, values, repeat(None))


def _changes(values: Iterable[bytes]) -> IndexArray:
    """Decode values of a times family: time and sequence, (n, 2); 0 for a missing sequence."""
    padded = map(methodcaller("ljust", _CHANGE.size, b"\0"), map(itemgetter(slice(_CHANGE.size)), values))
    return np.frombuffer(b"".join(padded), "<i8").reshape(-1, 2).astype(np.int64, copy=False)


def _sequences(changes: IndexArray) -> IndexArray:
    """Return the sequences of changes, (n, 2); a row written before its table followed a log has its time."""
    sequences: IndexArray = np.where(changes[:, 1] > 0, changes[:, 1], changes[:, 0])
    return sequences


def _unzipped(records: Mapping[bytes, bytes]) -> tuple[Iterable[bytes], Iterable[bytes]]:
    return records.keys(), records.values()


def _blocks_read() -> int:
    """Return the blocks of 512 bytes that this thread has read from disks so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
