"""Lets devices read a table in place: pins its memory and keeps it while they read.

Devices see only a `HostLayout`. The writer pins new memory and publishes a new layout before it links a row of new slabs and
before it retires replaced buckets. A layout references the pins of its memory, and a pin its pages. So memory that a kernel may
read, that of the layout which its launcher references, is neither unpinned nor unmapped.
"""

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hps.errors import DeviceError, InvalidInputError
from hps.ground.memory.host_tables import BucketChanges, HostLayout, HostTable, Pinner
from hps.stores.hash_map.layout import CHANGES_LIMIT, VERSION_BYTES
from hps.stores.hash_map.memory import Buckets, Pages, Slabs

_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 20
"""Maximum bytes to pin at once, a multiple of any page, so that the process stalls briefly and progress is visible."""


class SharedTable(Protocol):
    """What devices need of a table; see `HashMapTable`."""

    @property
    def records_accesses(self) -> bool: ...

    @property
    def memory(self) -> tuple[Buckets, Slabs]: ...

    def share(self) -> None: ...

    def log_changes(self) -> None: ...

    def writing(self, doing: str) -> AbstractContextManager[None]: ...


class PinnedPages:
    """Pages that devices may read. They are unpinned with the last reference, before they are unmapped."""

    __slots__ = ("_pages", "_pieces", "_pinner")

    def __init__(self, pages: Pages, pinner: Pinner, pinned: Callable[[int], None]) -> None:
        """Pin all of `pages`, or nothing; `pinned` is called with the bytes of each piece."""
        self._pages, self._pinner = pages, pinner
        self._pieces: list[int] = []
        pages.exclude_from_forks()
        try:
            for start in range(0, pages.page_bytes, PIECE_BYTES):
                size_bytes = min(PIECE_BYTES, pages.page_bytes - start)
                pinner.pin(pages.address + start, size_bytes)
                self._pieces.append(pages.address + start)
                pinned(size_bytes)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        while self._pieces:
            self._pinner.unpin(self._pieces.pop())

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the pinner's modules are gone, and the system unpins the memory of an ended process
            self.undo()


class TableInPlace(HostTable):
    """A table of the hash map as devices read it. *Thread-safe*; only the writer calls `show`.

    The first pinner pins for all devices of the process, since memory registered with one is registered with all.
    """

    def __init__(self, tag: str, table: SharedTable) -> None:
        """Offer a table, which owns this object; no reference to it is kept."""
        super().__init__(tag)
        self._table = weakref.ref(table)
        self._changing = threading.Lock()  # guards the layout and `_closed`; watchers are called under it
        self._pinner: Pinner | None = None
        self._pins: dict[Pages, PinnedPages] = {}
        self._closed = False
        self._mirrors: dict[object, Callable[[BucketChanges], None]] = {}
        self._mirrored: npt.NDArray[np.uint64] | None = None  # versions of the last notification; None: mirrors copy all

    @property
    def pinned_bytes(self) -> int:
        return sum(pages.page_bytes for pages in self._pins)

    def pin(self, pinner: Pinner, progress: Callable[[int, int], None] | None = None) -> None:
        """As `HostTable.pin`; writers wait only while the table grows."""
        with self._pinning():
            if self._pinner is None:
                self._pin(pinner, progress or (lambda done, total: None))

    def mirror(self, mirror: Callable[[BucketChanges], None]) -> Callable[[], None]:
        table, token = self._table(), object()
        if table is None or self._layout is None:
            raise self._refused("it is not pinned, or was dropped")
        with table.writing("starting a mirror of its buckets"):
            table.log_changes()
            self._mirrors[token] = mirror
            self._mirrored = None
        return lambda: self._mirrors.pop(token, None) and None

    def end_write(self, slabs: Slabs) -> None:
        if not self._mirrors or self._layout is None or slabs.versions is None or slabs.changes is None:
            return
        log, versions = slabs.changes.words(), slabs.versions.words()[:: VERSION_BYTES // 8].copy()
        recorded, before = int(log[0]), self._mirrored
        if before is not None and not recorded and np.array_equal(before, versions):
            return
        buckets = None if before is None or recorded > CHANGES_LIMIT else log[1 : 1 + recorded].copy()
        log[0] = 0
        self._mirrored = versions
        for mirror in list(self._mirrors.values()):
            mirror(BucketChanges(buckets, versions))

    def close(self) -> None:
        with self._changing:
            if not self._closed:
                self._closed, self._pinner, self._pins = True, None, {}
                self._notify(None)

    def show(self, buckets: Buckets, slabs: Slabs) -> None:
        """Pin new memory of a pinned table and show it to devices, as the writer. Cheap if there is none."""
        pinner, shown = self._pinner, self._layout
        if pinner is None or (shown and shown.words is buckets.layout and shown.slabs.size == slabs.count):
            return
        pins = dict(self._pins)
        try:
            _add(pins, (buckets, slabs), pinner, lambda done, total: None)
        except DeviceError as error:
            _log.warning(
                "hash map: table %r grew, and devices cannot read its new memory: %s. Its vectors now reach them "
                "through the CPU, which is slower; raise the limit on locked memory, then restart",
                self._tag,
                str(error),  # the error itself would keep the pins alive in stored log records
            )
            self.close()
        else:
            self._show(buckets, slabs, pinner, pins)

    def _pin(self, pinner: Pinner, progress: Callable[[int, int], None]) -> None:
        table = self._table()
        if table is None or self._closed:
            raise self._refused("it was dropped, or memory that it grew by could not be pinned")
        if table.records_accesses:
            raise self._refused("its overflow_policy needs accesses, which a device does not record; expected evict_random")
        pins: dict[Pages, PinnedPages] = {}
        with table.writing("making versions of its stripes"):
            table.share()
        # Pinning takes seconds for some GB, so most of it is done while writers continue. Only memory that they added meanwhile
        # is pinned with the writer's lock held.
        try:
            _add(pins, table.memory, pinner, progress)
            with table.writing("pinning the memory"):
                _add(pins, table.memory, pinner, progress)
                if not self._show(*table.memory, pinner, pins):
                    raise self._refused("it was dropped meanwhile")
        except BaseException:
            if self._pinner is None:
                for pin in pins.values():
                    pin.undo()
            raise

    def _show(self, buckets: Buckets, slabs: Slabs, pinner: Pinner, pins: dict[Pages, PinnedPages]) -> bool:
        with self._changing:
            if self._closed:
                return False
            self._pinner = pinner
            self._pins = {pages: pins[pages] for pages in _pages_of(buckets, slabs)}
            slabs.pinned = True
            self._mirrored = None
            self._notify(HostLayout(buckets.layout, slabs.addresses_so_far(), tuple(self._pins.values())))
        return True

    def _refused(self, why: str) -> InvalidInputError:
        return InvalidInputError(f"hash map: table {self._tag!r} cannot be read by devices in place: {why}")


def _pages_of(buckets: Buckets, slabs: Slabs) -> list[Pages]:
    versions = [slabs.versions] if slabs.versions else []
    return [*buckets.pages, *(extent.pages for extent in slabs.extents), *versions]


def _add(
    pins: dict[Pages, PinnedPages], memory: tuple[Buckets, Slabs], pinner: Pinner, progress: Callable[[int, int], None]
) -> None:
    missing = [pages for pages in _pages_of(*memory) if pages not in pins]
    total = sum(pages.page_bytes for pages in (*pins, *missing))
    done = total - sum(pages.page_bytes for pages in missing)

    def pinned(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress(done, total)

    for pages in missing:
        pins[pages] = PinnedPages(pages, pinner, pinned)
