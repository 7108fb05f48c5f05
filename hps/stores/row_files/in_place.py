"""Lets devices read a table of row files in place: its file, and a map of the rows that were changed since it was sealed.

The file is pinned where it is mapped, read only, or else copied to memory that can be pinned. Changed rows are copied to a hash
map (`stores/hash_map`), which devices read as they read any other one: they see a change before it is acknowledged. The map's
rows have one more word, which is not 0 for a deleted key.

**A pair** of a file and a map is replaced as a whole, by one layout: a new file comes with a new map, which has only the
changes that the file lacks. No map is changed after its pair was replaced, so a device that still reads it has what was true
when it began. Versions of the stripes begin at a number of their own for each pair, so no version of one map is one of another.
A layout has no map until a row is changed: devices then read the file alone. A file that is still being downloaded is pinned
once it is complete; until then there is no layout.
"""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hps.errors import CapacityError, DatabaseError, DeviceError, HPSError, InvalidInputError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.key_sets import last_of_each
from hps.ground.memory.capacity import available_memory, check_fits
from hps.ground.memory.host_tables import (
    SEGMENTS_AT,
    VERSIONS_AT,
    BucketChanges,
    FileLayout,
    HostLayout,
    HostTable,
    Pinner,
)
from hps.ground.threads.thread_pool import POOL
from hps.ground.threads.workers import new_thread
from hps.stores.hash_map import kernels
from hps.stores.hash_map.layout import VERSION_BYTES
from hps.stores.hash_map.memory import Pages
from hps.stores.hash_map.table import SLICE_ROWS, HashMapTable
from hps.stores.row_files.row_file import RowFile
from hps.types import BoolArray, FloatArray, KeyArray

_log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 1 << 30
_COPY_BYTES: Final = 16 << 20
_QUICK_BYTES: Final = 256 << 20  # of a file that is unpinned in milliseconds
_NUMBER_SHIFT: Final = 33  # of a version, above the bits that count writes; see `version_without_map` in `cuda/row_file.cuh`
_NO_MAP: Final = np.zeros(SEGMENTS_AT, np.uint64)
_NO_SLABS: Final = np.empty(0, np.uint64)
_ALLOCATED_BYTES: Final = 64 << 20
_TIMEOUT_S: Final = 30.0


class ChangingTable(Protocol):
    """What devices need of a table; see `RowTable`."""

    width: int

    @property
    def file(self) -> RowFile | None: ...

    def changed_keys(self) -> Iterator[KeyArray]: ...

    def changes_of(self, keys: KeyArray) -> tuple[BoolArray, FloatArray, BoolArray]: ...

    def alone(self, doing: str) -> AbstractContextManager[None]: ...

    def keeping_file(self, doing: str) -> AbstractContextManager[None]: ...


class PinnedFile:
    """The records and the index of a row file, readable by devices. Unpinned with the last reference, before it is unmapped.

    Attributes:
        layout: where they lie.
        size_bytes: pinned memory.
    """

    def __init__(self, file: RowFile, pinner: Pinner, progress: Callable[[int, int], None]) -> None:
        """Pin all of a file, or nothing. It is read from the disk as far as it is not in memory.

        Raises:
            DeviceError: the system or the device refuses, or the memory does not hold the file.
        """
        self._file, self._pinner = file, pinner
        self._pieces: list[int] = []
        self._copy: Pages | None = None
        head, address, self.size_bytes = file.head, file.content.ctypes.data, file.content.size
        self._check_room("pinning it")
        try:
            self._pin(address, progress, read_only=True)
        except DeviceError as error:
            self.undo()
            _log.info("%s: the device does not read its mapping (%s); it is copied to memory", file.path, error)
            self._check_room("copying it to memory that a device reads")
            try:
                self._copy = self._copied()
                self._pin(self._copy.address, progress, read_only=False)
            except DatabaseError as refused:
                raise DeviceError(str(refused)) from refused
            except BaseException:
                self.undo()
                raise
        except BaseException:
            self.undo()
            raise
        start = (self._copy.address if self._copy else address) - head.records_at  # of the file, if it began there
        self.layout = FileLayout(
            records=start + head.records_at,
            starts=start + head.starts_at,
            fingerprints=start + head.fingerprints_at,
            rows=head.rows,
            buckets=head.buckets,
            record_bytes=head.record_bytes,
        )

    def _pin(self, address: int, progress: Callable[[int, int], None], *, read_only: bool) -> None:
        for start in range(0, self.size_bytes, _PIECE_BYTES):
            size_bytes = min(_PIECE_BYTES, self.size_bytes - start)
            self._pinner.pin(address + start, size_bytes, read_only=read_only)
            self._pieces.append(address + start)
            progress(start + size_bytes, self.size_bytes)

    def _copied(self) -> Pages:
        source = self._file.content
        pages = Pages(source.size, f"a copy of {self._file.path}", huge=True)
        target = pages.words().view(np.uint8)

        def copy(first: int, last: int) -> None:
            for at in range(first * _COPY_BYTES, min(last * _COPY_BYTES, source.size), _COPY_BYTES):
                target[at : at + _COPY_BYTES] = source[at : at + _COPY_BYTES]

        POOL.run(-(-source.size // _COPY_BYTES), 1, copy)
        pages.exclude_from_forks()
        return pages

    def _check_room(self, doing: str) -> None:
        try:
            free_bytes, where = available_memory()
            check_fits(f"{self._file.path}: {doing}", {"the file": self.size_bytes}, free_bytes, where, "use miss_path: copy")
        except CapacityError as error:
            raise DeviceError(str(error)) from error

    def is_of(self, file: RowFile) -> bool:
        return self._file is file

    def undo(self) -> None:
        _unpin(self._pinner, self._pieces, self._file, self._copy)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or not self._pieces:  # as for `PinnedPages`
            return
        if self.size_bytes < _QUICK_BYTES:
            self.undo()
        else:  # the last reference may be that of a lookup, which is not to wait
            work = partial(_unpin, self._pinner, self._pieces, self._file, self._copy)
            new_thread("unpin", work, lasting=False).start()


def _unpin(pinner: Pinner, pieces: list[int], *_memory: object) -> None:
    """Unpin memory, which the caller keeps mapped by passing it."""
    while pieces:
        pinner.unpin(pieces.pop())


class RowFileInPlace(HostTable):
    """A table of row files as devices read it. *Thread-safe*; only the writer calls `changed` and `replaced`."""

    has_files = True

    def __init__(self, tag: str, table: ChangingTable) -> None:
        """Offer a table, which owns this object; no reference to it is kept."""
        super().__init__(tag)
        self._owner = weakref.ref(table)
        self._changing = threading.Lock()  # guards the layout and `_closed`; watchers are called under it
        self._pinner: Pinner | None = None
        self._awaiting: Pinner | None = None  # of devices that will read the file once it is complete
        self._file: PinnedFile | None = None
        self._next: PinnedFile | None = None  # of a file that is about to replace the present one
        self._map: HashMapTable | None = None
        self._has_changes = self._shown = self._closed = False
        self._filling = False  # while a new map lacks changes; it must not be shown, though it grows
        self._number = 0
        self._mirrors: dict[object, Callable[[BucketChanges], None]] = {}
        self._ends: dict[object, Callable[[], None]] = {}  # of mirrors of the present map

    @property
    def _table(self) -> ChangingTable:
        table = self._owner()
        if table is None:
            raise self._refused("it was dropped")
        return table

    @property
    def pinned_bytes(self) -> int:
        file, changes = self._file, self._map
        return (file.size_bytes if file else 0) + (changes.in_place.pinned_bytes if changes else 0)

    def pin(self, pinner: Pinner, progress: Callable[[int, int], None] | None = None) -> None:
        """As `HostTable.pin`; writers continue while the file is pinned and earlier changes are copied, and seals wait.

        A file that is still being downloaded is pinned by `completed`, and there is no layout until then.
        """
        doing = f"pinning table {self._tag!r} of row files"
        with self._pinning(), self._table.keeping_file(doing):
            if self._shown and not self._closed:
                return
            if self._closed:
                raise self._refused("it was dropped, or devices could no longer read it")
            compile_kernels(
                kernels.insert, kernels.delete, kernels.rehash, kernels.retire, kernels.count_by_hash, kernels.show_all_holes
            )
            file = self._table.file
            if file and not file.is_whole:
                raise self._refused("its file has other shares of the table")
            if file and not file.is_complete:
                self._awaiting = pinner
                return
            pinned = PinnedFile(file, pinner, progress or (lambda done, total: None)) if file and file.head.rows else None
            try:
                with self._table.alone(doing):
                    self._pinner, self._file = pinner, pinned
                    self._new_map()
                for keys in self._table.changed_keys():
                    for start in range(0, keys.size, SLICE_ROWS):
                        with self._table.alone(doing):
                            self._copy_changes(keys[start : start + SLICE_ROWS])
                with self._table.alone(doing):
                    if self._closed:
                        raise self._refused("it was dropped meanwhile")
                    self._shown = True
                    self._publish()
            except BaseException:
                if not self._shown:
                    self._pinner = self._file = self._map = None
                raise

    def mirror(self, mirror: Callable[[BucketChanges], None]) -> Callable[[], None]:
        if self._layout is None and (self._awaiting is None or self._closed):
            raise self._refused("it is not pinned, or was dropped")
        token = object()
        with self._table.alone("starting a mirror of the changed rows' buckets"):
            self._mirrors[token] = mirror
            self._start_mirrors()

        def end() -> None:
            self._mirrors.pop(token, None)
            if stop := self._ends.pop(token, None):
                stop()

        return end

    def close(self) -> None:
        with self._changing:
            if not self._closed:
                self._closed, self._awaiting = True, None
                self._pinner, self._file, self._next, self._map = None, None, None, None
                self._ends.clear()
                self._notify(None)

    # -- for the writer --------------------------------------------------------------------------------------------------

    def changed(
        self,
        keys: KeyArray,  # (n,)
        rows: FloatArray | None = None,  # (n, width)
        present: BoolArray | None = None,  # (n,)
    ) -> None:
        """Show devices what became of some keys before it is acknowledged. Devices read no more where that fails.

        Args:
            rows, present: as of `ChangedRows.add`.
        """
        if self._pinner is None or not keys.size:
            return
        with self._or_give_up("a change could not be copied for them"):
            for start in range(0, keys.size, SLICE_ROWS):
                piece = slice(start, start + SLICE_ROWS)
                if rows is None:
                    self._copy_changes(keys[piece])
                else:
                    self._show_changes(keys[piece], rows[piece], None if present is None else present[piece])

    def completed(self) -> None:
        """Show devices a file that was downloaded, if they wait for it. Slow; does not raise."""
        if (pinner := self._awaiting) is not None:
            with self._or_give_up("its downloaded file could not be pinned for them"):
                self.pin(pinner)

    def prepare(self, file: RowFile) -> None:
        """Pin a file that is about to replace the present one. Slow; does not raise."""
        pinner = self._pinner
        if pinner is None or not file.head.rows:
            return
        with self._or_give_up("a new file could not be pinned for them"):
            self._next = PinnedFile(file, pinner, lambda done, total: None)

    def replaced(self) -> None:
        """Show devices the present file, with the changes that it lacks. Does not raise."""
        pinner, file, pinned = self._pinner, self._table.file, self._next
        self._next = None
        if pinner is None:
            return
        with self._or_give_up("a new file could not be shown to them"):
            if file is None or not file.head.rows:
                pinned = None
            elif pinned is None or not pinned.is_of(file):
                pinned = PinnedFile(file, pinner, lambda done, total: None)
            self._file = pinned
            self._new_map()
            self._filling = True
            try:
                for keys in self._table.changed_keys():
                    for start in range(0, keys.size, SLICE_ROWS):
                        self._copy_changes(keys[start : start + SLICE_ROWS], show=False)
            finally:
                self._filling = False
            if self._shown:
                self._publish()

    def _copy_changes(self, keys: KeyArray, *, show: bool = True) -> None:
        """Copy the present state of keys to the map, and remove those that are the file's again."""
        table, changes = self._table, self._map
        if changes is None:
            return
        keys = np.unique(keys)
        is_changed, rows, there = table.changes_of(keys)
        if self._has_changes and not is_changed.all():
            changes.delete(keys[~is_changed])
        if is_changed.any():
            self._show_changes(keys[is_changed], rows, there, show=show)

    def _show_changes(
        self,
        keys: KeyArray,  # (n,)
        rows: FloatArray,  # (n, width)
        present: BoolArray | None,  # (n,)
        *,
        show: bool = True,
    ) -> None:
        """Copy changed rows to the map; of equal keys, the last counts."""
        changes = self._map
        if changes is None:
            return
        last = last_of_each(keys)
        marked: npt.NDArray[np.uint32] = np.zeros((int(last.sum()), rows.shape[1] + 1), np.uint32)
        marked[:, :-1] = rows[last].view(np.uint32)
        if present is not None:
            marked[:, -1] = ~present[last]
        changes.insert(keys[last], marked.view(np.float32))
        if not self._has_changes:
            self._has_changes = True
            if show and self._shown:
                self._publish()

    def _new_map(self) -> None:
        """Make the map of the next pair, without rows."""
        pinner = self._pinner
        if pinner is None:
            return
        self._number += 1
        self._ends.clear()  # the old map is changed no more
        changes = HashMapTable(
            f"{self._tag} (changes)",
            self._table.width + 1,
            allocation_rate=_ALLOCATED_BYTES,
            initial_buckets=32,
            batch_rows=SLICE_ROWS,
            overflow=None,
            timeout_s=_TIMEOUT_S,
            clock=time.monotonic,
        )
        changes.in_place.pin(pinner)
        versions = changes.memory[1].versions
        if versions is None:
            raise self._refused("its map of changes has no versions")
        versions.words()[:: VERSION_BYTES // 8] = self._number << _NUMBER_SHIFT
        changes.in_place.watch(partial(self._grown, self._number))
        self._map, self._has_changes = changes, False

    def _grown(self, number: int, layout: HostLayout | None) -> None:
        if number != self._number or not self._shown or self._filling:
            return
        if layout is None:
            self.close()
        elif self._has_changes:
            self._show(layout)

    def _publish(self) -> None:
        """Show the present pair, as the writer."""
        of_map = None
        if self._map is not None and self._has_changes and (of_map := self._map.in_place.layout()) is None:
            raise self._refused("its map of changes cannot be read")
        self._show(of_map)
        self._start_mirrors()

    def _show(self, of_map: HostLayout | None) -> None:
        with self._changing:
            if self._closed:
                return
            file = self._file
            words, slabs = (of_map.words, of_map.slabs) if of_map else (_NO_MAP, _NO_SLABS)
            self._notify(HostLayout(words, slabs, (of_map, file), file.layout if file else None, self._number))

    def _start_mirrors(self) -> None:
        changes = self._map
        if changes is None or self._layout is None or not self._layout.words[VERSIONS_AT]:
            return
        for token, mirror in list(self._mirrors.items()):
            if token not in self._ends:
                self._ends[token] = changes.in_place.mirror(mirror)

    @contextmanager
    def _or_give_up(self, why: str) -> Iterator[None]:
        """Let devices read no more after an error: they would lack what the block shows them."""
        try:
            yield
        except HPSError as error:
            if not self._closed:
                _log.warning(
                    "row files: devices no longer read table %r, since %s: %s. Its vectors now reach them through the CPU, "
                    "which is slower",
                    self._tag,
                    why,
                    str(error),
                )
                self.close()
        except BaseException:
            self.close()
            raise

    def _refused(self, why: str) -> InvalidInputError:
        return InvalidInputError(f"row files: table {self._tag!r} cannot be read by devices in place: {why}")
