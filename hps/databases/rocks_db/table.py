"""One table of the persistent database: arrays above, lists of bytes below."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hps.databases.base import LoadRecord
from hps.databases.rocks_db.engine import Engine, Family, after
from hps.databases.rocks_db.record import LoadRecords
from hps.databases.rocks_db.rows import (
    KEY_BYTES,
    WrongSizeError,
    engine_order,
    key_list,
    last_of_each,
    piece_rows,
    present,
    rows_of,
    vector_list,
    vectors_of,
)
from hps.errors import DatabaseCorruptError, DatabaseTimeoutError, UnknownTableError
from hps.types import BoolArray, FloatArray, KeyArray

_FETCH_ROWS = 2048  # a multi-get allocates for all its keys at once; a tenth faster than with 10,000
_EXACT_ROWS = 1 << 17  # a table is counted up to here, which takes some 50 ms


class RocksTable:
    """Rows of one column family. *Thread-safe.*

    One lock serialises writers, so that a load and its record are not mistaken for unmodified. It is held while they write;
    readers never take it.

    Args:
        engine: RocksDB.
        records: what is loaded.
        path: of the database, for messages.
        tag: of the table.
        dim: floats of a vector.
        family: its column family.
        max_batch_size: most rows of one multi-get or write.
        write_timeout_s: how long a writer waits for another.
    """

    def __init__(
        self,
        engine: Engine,
        records: LoadRecords,
        path: Path,
        tag: str,
        dim: int,
        family: Family,
        *,
        max_batch_size: int,
        write_timeout_s: float,
    ) -> None:
        self.tag = tag
        self.dim = dim
        self._engine = engine
        self._records = records
        self._path = path
        self._family = family
        self._writing = threading.Lock()
        self._write_timeout_s = write_timeout_s
        self._loading = False  # until `settle`, files lie side by side
        self._dropped = False
        self._marked = False  # its record, if any, says that it was modified
        self._piece_rows = piece_rows(dim)
        self._fetch_rows = min(max_batch_size, _FETCH_ROWS)
        self._write_rows = min(max_batch_size, self._piece_rows)

    def fetch(
        self,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, dim)
        found: BoolArray,  # (n,)
        doing: str,
    ) -> int:
        """Fill the rows of `out` that are not yet `found`, and mark them; see `Database.fetch`."""
        wanted = np.flatnonzero(~found)
        wanted = wanted[engine_order(keys[wanted])]
        filled = 0
        for start in range(0, wanted.size, self._fetch_rows):
            rows = wanted[start : start + self._fetch_rows]
            batch = key_list(keys[rows])
            values = self._engine.get(self._family, batch, doing)
            try:
                vectors, there = vectors_of(values, self.dim)
            except WrongSizeError as error:
                raise self._damaged(batch[error.row], error) from None
            if there is not None:
                rows = rows[there]
            out[rows] = vectors
            found[rows] = True
            filled += rows.size
        return filled

    def insert(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
        doing: str,
    ) -> None:
        """Add or replace rows; on disk on return."""
        with self._alone(doing):
            self._mark_modified()
            for start in range(0, keys.size, self._write_rows):
                rows = slice(start, start + self._write_rows)
                self._engine.put(self.tag, key_list(keys[rows]), vector_list(vectors[rows]), doing)
            self._engine.sync(doing)

    def delete(self, keys: KeyArray, doing: str) -> int:
        """Remove rows; returns how many there were. On disk on return."""
        distinct = keys[last_of_each(keys)]
        deleted = 0
        with self._alone(doing):
            self._mark_modified()
            for start in range(0, distinct.size, self._write_rows):
                batch = key_list(distinct[start : start + self._write_rows])
                # To mark absent keys as deleted would make every later read slower.
                batch = present(batch, self._engine.get(self._family, batch, doing))
                self._engine.remove(self.tag, batch, doing)
                deleted += len(batch)
            self._engine.sync(doing)
        return deleted

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        if not self._writing.acquire(timeout=self._write_timeout_s):
            raise DatabaseTimeoutError(
                f"{doing} in {self._path}: another write to the table did not end within {self._write_timeout_s:g} s; try again"
            )
        try:
            if self._dropped:
                raise UnknownTableError(f"{doing} in {self._path}: the table was dropped meanwhile; open it again")
            yield
        finally:
            self._writing.release()

    def retire(self, doing: str) -> None:
        """Refuse writes from now on: RocksDB knows the table by its name, and another may soon have that."""
        with self._alone(doing):
            self._dropped = True

    def _mark_modified(self) -> None:
        if not self._marked:
            self._records.mark_modified(self.tag)
            self._marked = True

    def chunk(self, start: bytes, rows: int, doing: str) -> tuple[KeyArray, FloatArray, bytes]:
        """Read up to `rows` rows from the engine's key `start` on, and say where the next chunk starts."""
        pieces = [(np.empty(0, np.int64), np.empty((0, self.dim), np.float32))]
        while rows:
            flat = self._engine.read(self._family, start, min(rows, self._piece_rows), doing)
            if not flat:
                break
            try:
                pieces.append(rows_of(flat, self.dim))
            except WrongSizeError as error:
                raise self._damaged(flat[2 * error.row], error) from None
            start = after(flat[-2])
            rows -= len(flat) // 2
        return np.concatenate([keys for keys, _ in pieces]), np.concatenate([vectors for _, vectors in pieces]), start

    def size(self, doing: str) -> int:
        """Count the rows of a small table; estimate those of a large one."""
        estimate = self._engine.figure(self._family, "estimate-num-keys")
        if estimate > _EXACT_ROWS:
            return estimate
        rows, start = 0, b""
        while rows <= _EXACT_ROWS:
            keys = self._engine.read_keys(self._family, start, self._piece_rows, doing)
            if not keys:
                return rows
            rows, start = rows + len(keys), after(keys[-1])
        return max(rows, estimate)

    def held_bytes(self) -> int:
        """Bytes of its files and of what is not yet written to them."""
        return self._engine.figure(self._family, "live-sst-files-size") + self._engine.figure(
            self._family, "cur-size-all-mem-tables"
        )

    def load(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
        record: LoadRecord,
        staged: Path,
        doing: str,
    ) -> None:
        """Add or replace rows in bulk, by way of the file `staged`, then remember `record`; both are on disk on return."""
        with self._alone(doing):
            if keys.size:
                if not self._loading:
                    self._engine.begin_load(self._family, doing)
                    self._loading = True
                try:
                    self._engine.stage(self._sorted_pieces(keys, vectors), staged, doing)
                    before = self._records.get(self.tag)
                    if before is None or before.fingerprint != record.fingerprint:
                        # Rows without a record would be taken for HugeCTR's, and whole.
                        nothing = replace(record, rows_done=0, rows_total=max(1, record.rows_total), checksum="")
                        self._records.advance(self.tag, nothing)
                    self._engine.ingest(self._family, staged, doing)
                finally:
                    staged.unlink(missing_ok=True)
            self._marked = self._records.advance(self.tag, record).modified

    def _sorted_pieces(self, keys: KeyArray, vectors: FloatArray) -> Iterator[tuple[list[bytes], list[bytes]]]:
        order = last_of_each(keys)
        for start in range(0, order.size, self._piece_rows):
            rows = order[start : start + self._piece_rows]
            yield key_list(keys[rows]), vector_list(vectors[rows])

    def settle(self, doing: str) -> None:
        """Merge what was ingested. Writers need not wait: what they add is merged in its turn."""
        self._engine.settle(self._family, doing)
        self._loading = False

    def _damaged(self, key: bytes, error: WrongSizeError) -> DatabaseCorruptError:
        name = int.from_bytes(key, "little", signed=True) if len(key) == KEY_BYTES else f"0x{key.hex()}"
        return DatabaseCorruptError(
            f"reading table {self.tag} in {self._path}: the row of key {name} has {error.got}, wanted {error.wanted}. "
            "Something else wrote it: insert the key again, or drop the table and load it again"
        )


def width_of(
    engine: Engine,
    path: Path,
    tag: str,
    family: Family,
) -> int | None:
    """The width of the vectors that a column family holds, None while it holds none.

    Raises:
        DatabaseCorruptError: its first row is none of ours.
    """
    first = engine.read(family, b"", 1, f"opening table {tag}")
    if not first:
        return None
    key, value = first
    if len(key) != KEY_BYTES or len(value) % 4 or not value:
        raise DatabaseCorruptError(
            f"opening table {tag} in {path}: its first row has a key of {len(key)} bytes and a value of {len(value)}, wanted "
            f"{KEY_BYTES} and a multiple of 4. Drop the table and load it again (as a table of 32-bit keys must be, too)"
        )
    return len(value) // 4
