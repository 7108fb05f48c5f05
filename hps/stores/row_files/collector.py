"""Gathers rows for a row file in memory, up to a bound, and the others in temporary files."""

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from hps.errors import DatabaseError
from hps.ground.memory.capacity import available_memory
from hps.stores.row_files.row_file import Records
from hps.stores.row_files.sorting import Hashes
from hps.stores.row_files.writer import TEMPORARY, Run, append, ordered_run, write_records
from hps.types import BoolArray, FloatArray, KeyArray

_ORDER_BYTES: Final = 40  # a row: its hash, and while it is sorted order and hash twice
_MEMORY_SHARE: Final = 4  # one of so many parts of the free memory is used
_LEAST_BYTES: Final = 64 << 20
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0)


class RowCollector:
    """Gathers rows in the order of their arrival. *One per thread.*

    Args:
        path: of the file to be made; temporary files are beside it and have no name.
        width: words of 4 bytes of a row.
        expected_rows: how many rows will probably come; memory is reserved for them.
        most_bytes: memory to use; by default a quarter of what is free, but at least 64 MB.

    Raises:
        DatabaseError: no memory, or a temporary file could not be written.
    """

    def __init__(self, path: Path, width: int, expected_rows: int, most_bytes: int | None = None) -> None:
        self._path = path
        self._words = 2 + width
        a_row = 4 * self._words + _ORDER_BYTES
        most = max(_LEAST_BYTES, available_memory()[0] // _MEMORY_SHARE) if most_bytes is None else most_bytes
        self._most_rows = max(1, most // a_row)  # in memory
        self._rows = max(1, min(expected_rows, self._most_rows))
        self._records: Records | None = None
        self._hashes: Hashes = np.empty(0, np.uint64)
        self._deleted: BoolArray | None = None
        self._count = 0
        self._full: list[Run] = []  # the latest first
        self.rows = 0
        """Rows gathered so far, those of repeated keys included."""

    def add(
        self,
        keys: KeyArray,  # (n,)
        rows: FloatArray,  # (n, width)
        deleted: BoolArray | None = None,  # (n,)
    ) -> None:
        """Copy rows. Rows that are `deleted` will be absent from the file."""
        start = 0
        while start < keys.size:
            if self._count == self._rows:
                self._start_another()
            stop = min(keys.size, start + self._rows - self._count)
            self._add(keys[start:stop], rows[start:stop], None if deleted is None else deleted[start:stop])
            start = stop
        self.rows += keys.size

    def _add(self, keys: KeyArray, rows: FloatArray, deleted: BoolArray | None) -> None:
        if self._records is None:
            self._records = _reserved(self._rows, self._words)
            self._hashes = np.empty(self._rows, np.uint64)
        append(keys, rows, self._count, self._records, self._hashes)
        if deleted is not None and self._deleted is None:
            self._deleted = np.zeros(self._rows, np.bool_)
        if deleted is not None and self._deleted is not None:
            self._deleted[self._count : self._count + keys.size] = deleted
        self._count += keys.size

    def runs(self) -> list[Run]:
        """Return the rows, the latest first. The collector must not be used afterwards."""
        return [*([self._run()] if self._count else []), *self._full]

    def _run(self) -> Run:
        if self._records is None:
            raise ValueError("no rows were gathered")
        deleted = None if self._deleted is None else self._deleted[: self._count]
        return ordered_run(self._records[: self._count], self._hashes[: self._count], deleted)

    def _start_another(self) -> None:
        """Sort the rows gathered so far into a run; keep it in memory if there is room for as many more, else in a file."""
        run, left = self._run(), self._most_rows - self._rows
        if left > 0:
            self._most_rows, self._rows = left, min(left, 2 * self._rows)
        else:
            run = self._spilled(run)
        self._full.insert(0, run)
        self._count, self._deleted, self._records = 0, None, None

    def _spilled(self, run: Run) -> Run:
        """Write a run to a file without a name, which goes with its mapping."""
        path = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.run{TEMPORARY}")
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                path.unlink()
                write_records(file, run)
                mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(file)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise DatabaseError(f"writing rows of a load to a temporary file beside {self._path}: {error}") from error
        records: Records = np.frombuffer(mapped, np.uint32, run.rows * self._words).reshape(-1, self._words)
        return Run(records, None if run.deleted is None else run.deleted[run.order])


def _reserved(rows: int, words: int) -> Records:
    """Reserve memory, which the system gives page by page at the first touch."""
    size = max(1, 4 * rows * words)
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError, MemoryError) as error:
        raise DatabaseError(f"loading rows: the system refused {size:,} bytes of memory ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system was built without them; small pages work, more slowly
            mapped.madvise(mmap.MADV_HUGEPAGE)
    records: Records = np.frombuffer(mapped, np.uint32, rows * words).reshape(rows, words)
    return records
