"""Tables in this process's memory that a device reads in place.

A hash map (`stores/hash_map/`) and row files (`stores/row_files/`) provide `HostTable`s. An embedding cache (`cache/`) provides
the `Pinner` that makes memory readable by its device, and reads by the rules of `stores/hash_map/layout.py` and of
`stores/row_files/in_place.py`. Neither imports the other.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from hps.errors import DeviceError

VERSIONS_AT = 5
"""Position in `HostLayout.words` of the address of the stripes' versions; 0 if there is no map."""
DENSE_ROWS_AT = 6
"""Position in `HostLayout.words` of the number of dense keys, which are found without buckets."""
SEGMENTS_AT = 9
"""Position in `HostLayout.words` of the first segment: address and number of buckets of each."""
BUCKET_BYTES = 128
_PIN_TIMEOUT_S: Final = 600.0


class Pinner(Protocol):
    """Makes host memory readable by devices. *Thread-safe.*"""

    def pin(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        """Pin and map page-aligned memory at the same address on the devices, which also commits it.

        Args:
            read_only: it is a mapping of a file that this process cannot write.

        Raises:
            DeviceError: the system or the device refuses, for instance because of its limit on locked memory; nothing is
                pinned.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped and after the device work that uses it. Does not raise."""


@dataclass(frozen=True, slots=True, eq=False)
class FileLayout:
    """Location of the parts of a row file, which never change. *Immutable.* See `stores/row_files/layout.py`.

    Attributes:
        records, starts, fingerprints: addresses of these parts, all pinned while the `HostLayout` that names it lives.
    """

    records: int
    starts: int
    fingerprints: int
    rows: int
    buckets: int
    record_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HostLayout:
    """Location of the rows of a table at one moment. *Immutable.* The memory stays mapped and pinned while this object lives.

    Rows inserted later may lie in slabs that it does not list, and a segment replaced by a larger one reads as *retired*. A
    reader that meets either gets the current layout, or leaves the key to the host.

    Attributes:
        words: (SEGMENTS_AT + 2 * segments,) uint64; see `layout` in `stores/hash_map/layout.py`.
        slabs: (slabs,) uint64, the addresses of the slabs so far: those of rows below slabs << words[SLAB_SHIFT].
        memory: keeps the memory mapped.
        file: holds the rows that the map lacks, if the table has one; see `stores/row_files/in_place.py`. Without a map,
            `words` are 0.
        number: of a file and its map, which no others of the table have.
    """

    words: npt.NDArray[np.uint64]
    slabs: npt.NDArray[np.uint64]
    memory: Any
    file: FileLayout | None = None
    number: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BucketChanges:
    """Buckets that a write has changed. *Immutable.* Valid during the call that passes it.

    Attributes:
        buckets: (n,) uint64, addresses of the changed buckets, perhaps repeated; None if any may have changed.
        versions: (stripes,) uint64, even, the version of each stripe after the write.
    """

    buckets: npt.NDArray[np.uint64] | None
    versions: npt.NDArray[np.uint64]


class HostTable(ABC):
    """A table that devices may read in place. *Thread-safe.*

    Attributes:
        has_files: its layouts may name row files.
    """

    has_files: ClassVar[bool] = False

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._layout: HostLayout | None = None
        self._watchers: dict[object, Callable[[HostLayout | None], None]] = {}
        self._one_pins = threading.Lock()

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""

    @abstractmethod
    def pin(self, pinner: Pinner, progress: Callable[[int, int], None] | None = None) -> None:
        """Pin all memory of the table, in pieces, and from now on its growth. Pinning it again changes nothing.

        The memory of a table that is still being downloaded is pinned later, when there is a layout.

        Args:
            progress: called after each piece with the pinned and the total bytes.

        Raises:
            DeviceError: part of it cannot be pinned; the rest is unpinned again.
            InvalidInputError: this table cannot be read in place, for instance because accesses have to be recorded.
        """

    def layout(self) -> HostLayout | None:
        """Return the current layout: the same object until the table grows. Cheap, since every lookup calls it.

        None before `pin` and while the table is being downloaded, and permanently after the table was dropped or its growth
        could not be pinned.
        """
        return self._layout

    def watch(self, watcher: Callable[[HostLayout | None], None]) -> Callable[[], None]:
        """Call `watcher` with each new layout, or None, before the old one may be freed.

        The writing thread calls it during the write, so it must be quick, and must neither write to the table nor raise.

        Returns:
            Function that unregisters the watcher, which may be called once more meanwhile.
        """
        token = object()
        self._watchers[token] = watcher
        return lambda: self._watchers.pop(token, None) and None

    @abstractmethod
    def mirror(self, mirror: Callable[[BucketChanges], None]) -> Callable[[], None]:
        """Call `mirror` now and at the end of each later write, for a copy of the buckets.

        The writing thread calls it while no other write can begin, so all buckets have the given versions. It must be quick,
        and must neither write to the table nor raise. `buckets` is None now, and after a new layout was shown to watchers.

        Returns:
            Function that unregisters the mirror.

        Raises:
            DatabaseTimeoutError: other threads kept writing.
            InvalidInputError: the table is not pinned, or was dropped.
        """

    @abstractmethod
    def close(self) -> None:
        """End reading in place permanently: `layout` returns None from now on, and watchers are called."""

    def _notify(self, layout: HostLayout | None) -> None:
        self._layout = layout
        for watcher in list(self._watchers.values()):
            watcher(layout)

    @contextmanager
    def _pinning(self) -> Iterator[None]:
        """Exclude other calls that pin the table.

        Raises:
            DeviceError: one of them has been running for long.
        """
        if not self._one_pins.acquire(timeout=_PIN_TIMEOUT_S):
            raise DeviceError(f"pinning table {self._tag!r}: another call has been doing so for {_PIN_TIMEOUT_S} s")
        try:
            yield
        finally:
            self._one_pins.release()
