"""Tables in this process's memory that a device reads in place: what it must know of them, and how they stay readable.

A hash map (`databases/hash_map/`) offers `HostTable`s; an embedding cache (`cache/`) brings the `Pinner` that makes memory
readable by its device, and reads by the rules of `databases/hash_map/layout.py`. Neither knows the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Pinner(Protocol):
    """Makes host memory readable by devices. *Thread-safe.*"""

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin and map memory, at the same address on the devices; it is committed, if it was not. The address is page aligned.

        Raises:
            DeviceError: the system or the device refuses, for instance for its limit on locked memory; nothing was pinned.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped; what a device has launched must be done with it. Raises nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class HostLayout:
    """Where the rows of a table lie at one moment. *Immutable.* All that it names stays mapped and pinned while it is held.

    Rows of keys that were inserted later may lie in slabs that it does not name, and a segment that was replaced by a larger
    one reads as *retired*: a reader that meets either asks for the present layout, or leaves the key to the host.

    Attributes:
        words: (6 + 2 * segments,) uint64; see `layout` in `databases/hash_map/layout.py`.
        slabs: (slabs,) uint64, the addresses of the slabs so far: those of rows below slabs << words[SLAB_SHIFT].
        memory: what keeps the memory in place.
    """

    words: npt.NDArray[np.uint64]
    slabs: npt.NDArray[np.uint64]
    memory: Any


class HostTable(ABC):
    """A table that devices may read in place. *Thread-safe.*"""

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes of memory that are pinned now."""

    @abstractmethod
    def pin(self, pinner: Pinner, progress: Callable[[int, int], None] | None = None) -> None:
        """Pin all memory of the table, in pieces, and from now on what it grows by. Pinning it again changes nothing.

        Args:
            progress: called after each piece with the bytes that are pinned and those that will be.

        Raises:
            DeviceError: not all of it can be pinned; what was is unpinned again.
            InvalidInputError: this table cannot be read in place, for instance since a reader must note each access.
        """

    @abstractmethod
    def layout(self) -> HostLayout | None:
        """The present layout: the same object until the table grows. None while it cannot be read in place.

        That is so before `pin`, for good after the table was dropped, and for good once memory that it grew by could not be
        pinned. Cheap: lookups ask each time.
        """

    @abstractmethod
    def watch(self, watcher: Callable[[HostLayout | None], None]) -> Callable[[], None]:
        """Call `watcher` with each new layout, or None, before readers of the old one are sent on and before it may be freed.

        It is called by the writing thread, holds up the write, and must not write to the table.

        Returns:
            What ends it.
        """

    @abstractmethod
    def close(self) -> None:
        """End reading in place for good: `layout` returns None from now on, and watchers are told."""
