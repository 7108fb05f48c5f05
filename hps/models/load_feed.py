"""The rows of a model on their way into one database."""

import zlib
from dataclasses import replace

import numpy as np

from hps.databases.base import Database, LoadRecord, PersistentDatabase
from hps.types import FloatArray, KeyArray

_MOST_ROWS = 1 << 20  # sorting them takes 25 bytes a row


class LoadFeed:
    """Gathers chunks into batches of the size that a database takes best, and counts them in its load record. *One thread.*

    Args:
        database: to load; its table is open.
        tag: of the table.
        dim: floats of a vector.
        record: what it holds already: `rows_done` is the first row to load, `checksum` that of the rows before.
        last_row: the row behind the last to load.
    """

    def __init__(self, database: Database, tag: str, dim: int, record: LoadRecord, last_row: int) -> None:
        self._database, self._tag = database, tag
        self._record, self._last_row = record, last_row
        self._remembers = isinstance(database, PersistentDatabase)
        load_bytes = database.load_bytes if isinstance(database, PersistentDatabase) else 0
        rows = min(load_bytes // (8 + 4 * dim), _MOST_ROWS, last_row - record.rows_done)
        self._keys, self._vectors = np.empty(rows, np.int64), np.empty((rows, dim), np.float32)
        self._held = 0

    def add(
        self,
        start: int,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Take those rows of a chunk that are still to be loaded. They may be in the database only after `end`.

        Args:
            start: the chunk's first row; chunks come in order, without gaps.
            keys: (n,) int64, C-contiguous; may be changed afterwards.
            vectors: (n, dim) float32, C-contiguous; may be changed afterwards.
        """
        rows = slice(max(self._record.rows_done - start, 0), max(self._last_row - start, 0))
        keys, vectors = keys[rows], vectors[rows]
        if not keys.size:
            return
        if self._held + keys.size > self._keys.size:
            self._flush()
        checksum = extended(self._record.checksum, keys, vectors) if self._remembers else ""
        self._record = replace(self._record, rows_done=start + rows.start + keys.size, checksum=checksum)
        if keys.size > self._keys.size:
            self._database.load_chunk(self._tag, keys, vectors, self._record)
            return
        held = slice(self._held, self._held + keys.size)
        self._keys[held], self._vectors[held] = keys, vectors
        self._held = held.stop

    def end(self) -> None:
        """Load what was gathered, and free the memory for it."""
        self._flush()
        self._keys, self._vectors = self._keys[:0].copy(), self._vectors[:0].copy()

    def _flush(self) -> None:
        if self._held:
            self._database.load_chunk(self._tag, self._keys[: self._held], self._vectors[: self._held], self._record)
            self._held = 0


def extended(checksum: str, keys: KeyArray, vectors: FloatArray) -> str:
    """The checksum of what was loaded before and then these rows, however they are cut into chunks.

    zlib's CRC-32 takes 4 GB/s, a load 0.3 GB/s.
    """
    before = int(checksum[:8] or "0", 16), int(checksum[8:] or "0", 16)
    return f"{zlib.crc32(keys.data.cast('B'), before[0]):08x}{zlib.crc32(vectors.data.cast('B'), before[1]):08x}"
