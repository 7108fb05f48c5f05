"""A row file, mapped into memory and read in place."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.errors import DatabaseCorruptError, DatabaseError
from hps.ground.threads.thread_pool import POOL
from hps.stores.base import LOAD_ADVICE
from hps.stores.row_files import layout
from hps.stores.row_files.layout import PAGE_BYTES, Head
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

_ROWS_WORTH_A_THREAD: Final = 512
_PAGES_A_PIECE: Final = 4096

Records = npt.NDArray[np.uint32]
"""(n, 2 + width) uint32, in the order of the keys' hash: a key in two words, then its row."""


class RowFile:
    """A sealed file of the rows of one table. *Thread-safe*: nothing of it ever changes.

    The file may be replaced or removed by name while it is open: the mapping keeps what it had. Only cutting it short would end
    the process, so a file that others may write to is refused.

    Attributes:
        head: what the file says of itself.
        records: (rows, 2 + width) uint32, mapped, read only.
        starts, fingerprints: the other parts that a lookup reads, likewise; see `layout.py`.

    Raises:
        DatabaseCorruptError: it is no row file, of another version of the format, cut short, or its head is damaged.
        DatabaseError: it cannot be read, or others may write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb", buffering=0) as file:
                there = os.fstat(file.fileno())
                if there.st_mode & 0o022:
                    raise DatabaseError(
                        f"opening the row file {path}: others than its owner may write to it (mode {there.st_mode & 0o777:o}), "
                        "and cutting it short would end this process; expected mode 444: `chmod go-w` it"
                    )
                self.head = Head.unpacked(file.read(PAGE_BYTES))
                if there.st_size != self.head.size_bytes:
                    raise ValueError(f"it has {there.st_size:,} bytes, expected {self.head.size_bytes:,}")
                self._memory = mmap.mmap(file.fileno(), there.st_size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DatabaseError(f"opening the row file {path}: {error}") from error
        except (ValueError, TypeError) as error:
            raise DatabaseCorruptError(f"opening the row file {path}: {error}. {LOAD_ADVICE}") from error
        head = self.head
        self.records: Records = self._part(np.uint32, head.records_at, head.rows * (2 + head.width)).reshape(
            head.rows, 2 + head.width
        )
        self.starts = self._part(np.uint32, head.starts_at, head.buckets + 1)
        self.fingerprints = self._part(np.uint8, head.fingerprints_at, head.rows)
        self._sums = self._part(np.uint64, head.sums_at, head.pages)
        self._words = self._part(np.uint64, head.records_at, head.pages * PAGE_BYTES // 8)

    def _part(self, dtype: Any, start: int, count: int) -> Any:
        return np.frombuffer(self._memory, dtype, count, start) if count else np.empty(0, dtype)

    @property
    def readable_bytes(self) -> npt.NDArray[np.uint8]:
        """All parts that a lookup reads, whole pages, as bytes."""
        found: npt.NDArray[np.uint8] = self._part(np.uint8, self.head.records_at, self.head.sums_at - self.head.records_at)
        return found

    @property
    def readable(self) -> tuple[int, int]:
        """Address and size of `readable_bytes`."""
        return self.readable_bytes.ctypes.data, self.head.sums_at - self.head.records_at

    def numbers(self, keys: KeyArray) -> IndexArray:
        """Return the number of each key's record, (n,) int64; -1 for absent keys."""
        numbers = np.empty(keys.size, np.int64)
        self._find(keys, numbers)
        return numbers

    def _find(self, keys: KeyArray, numbers: IndexArray) -> None:
        layout.find_records(keys, self.records, self.starts, self.fingerprints, numbers, np.empty(96, np.int64))

    def fetch(
        self,
        keys: KeyArray,  # (n,)
        out: FloatArray,  # (n, width)
        found: BoolArray,  # (n,)
        *,
        verify: bool = False,
    ) -> int:
        """Fill the rows of `out` that are not yet `found`, and mark them; return how many. Arguments as of `Database.fetch`.

        Args:
            verify: compare each page of a found record with its checksum before the row is answered.

        Raises:
            DatabaseCorruptError: a page is damaged.
        """
        words, filled = out.view(np.uint32), []

        def part(first: int, last: int) -> None:
            piece = slice(first, last)
            numbers = self.numbers(keys[piece])
            if verify:
                self._check(layout.damaged_record(self._words, self._sums, numbers, self.head.record_bytes))
            filled.append(layout.copy_records(self.records, numbers, words[piece], found[piece]))

        POOL.run(keys.size, _ROWS_WORTH_A_THREAD, part)
        return sum(filled)

    def chunks(self, rows: int) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield all keys and rows in the file's order, `rows` at a time, in arrays that the caller owns."""
        for start in range(0, self.head.rows, rows):
            count = min(rows, self.head.rows - start)
            keys, vectors = np.empty(count, np.int64), np.empty((count, self.head.width), np.float32)
            layout.split_records(self.records, start, start + count, 0, keys, vectors.view(np.uint32))
            yield keys, vectors

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare every page with its checksum.

        Raises:
            DatabaseCorruptError: one differs.
        """
        if layout.checksum(self._sums.view(np.uint8)) != self.head.sums:
            raise DatabaseCorruptError(f"checking the row file {self.path}: its checksums are damaged. {LOAD_ADVICE}")
        for start in range(0, self.head.pages, _PAGES_A_PIECE):
            stop = min(start + _PAGES_A_PIECE, self.head.pages)
            self._check(layout.damaged_page(self._words, self._sums, start, stop))
            if progress:
                progress(stop, self.head.pages)

    def _check(self, page: int) -> None:
        if page >= 0:
            at = self.head.records_at + page * PAGE_BYTES
            raise DatabaseCorruptError(
                f"reading the row file {self.path}: the page at byte {at:,} is damaged: it contradicts its checksum. "
                f"{LOAD_ADVICE}"
            )


def read_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of a fetch."""
    return layout.find_records, layout.copy_records, layout.sum_pages
