"""Segments of shared memory that clients on this machine register, by Triton's system shared memory extension.

The engine's application keeps the registry and publishes it; each frontend opens a segment when a request first names it.
Segments are read and written with `preadv` and `pwritev`, never mapped: if a client shrinks its segment, its request fails,
while a mapping would raise SIGBUS in a frontend.

Source: docs/protocol/extension_shared_memory.md of triton-inference-server/server.
"""

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from hps.errors import CapacityError, InvalidInputError
from hps.serve.http.authorization import FORWARDED, is_loopback
from hps.serve.http.http_answer import RequestError

MOST_REGIONS: Final = 64
_DIRECTORY: Final = "/dev/shm"
_KEY: Final = re.compile(r"/*[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_FOR_ALL: Final = stat.S_IROTH | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Region:
    """A registered part of a segment. *Immutable.*"""

    name: str
    key: str  # name of the segment in /dev/shm
    offset: int  # in bytes
    byte_size: int
    identity: tuple[int, int]  # device and inode of the segment when it was registered

    def exists(self) -> bool:
        """Return True if the segment still has its name."""
        try:
            found = os.lstat(f"{_DIRECTORY}/{self.key.lstrip('/')}")
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity


def check_local(client: str, headers: Mapping[bytes, bytes]) -> None:
    """Refuse a client that may be on another machine.

    Args:
        client: its address; empty for a unix socket.

    Raises:
        RequestError: 403, it is not on loopback, or was forwarded by a proxy, or comes from a page in a browser.
    """
    if (client and not is_loopback(client)) or any(name in headers for name in (*FORWARDED, b"origin")):
        expected = "expected one on this machine, without a proxy or a browser"
        raise RequestError(403, f"sharing memory: got client {client[:40]!r}, {expected}")


def open_segment(key: str) -> tuple[int, os.stat_result]:
    """Open a segment, and return its file descriptor.

    Raises:
        InvalidInputError: there is none, or it is not shared with this service.
    """
    doing = f"sharing memory: segment {key[:120]!r}"
    if not _KEY.fullmatch(key):
        raise InvalidInputError(f"{doing}: expected a name in {_DIRECTORY} of letters, digits, '-', '_' and '.'")
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(f"{_DIRECTORY}/{key.lstrip('/')}", flags)
    except OSError as error:
        raise InvalidInputError(f"{doing}: {error.strerror}") from error
    found = os.fstat(descriptor)
    shared = found.st_uid == os.geteuid() or found.st_mode & _FOR_ALL == _FOR_ALL
    if not stat.S_ISREG(found.st_mode) or not shared:
        os.close(descriptor)
        raise InvalidInputError(f"{doing}: expected a file of the service's user, or one that everyone may read and write")
    return descriptor, found


class SharedMemoryRegistry:
    """The registered regions. *One per event loop.*

    Args:
        limit: returns the limit on the bytes of all regions (`service.shared_memory_bytes`); 0: none are accepted.
        changed: called after each change.
    """

    def __init__(self, limit: Callable[[], int], changed: Callable[[], None]) -> None:
        self._limit = limit
        self._changed = changed
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region.

        Raises:
            InvalidInputError: shared memory is off, the name is taken, or the segment is not as large or not shared.
            CapacityError: a limit is reached.
        """
        limit = self._limit()
        if not limit:
            raise InvalidInputError("sharing memory: it is off; set service.shared_memory_bytes")
        if name in self._regions:
            raise InvalidInputError(f"shared memory region '{name[:120]}' already in manager")
        if not name or len(name) > 255 or offset < 0 or byte_size <= 0:
            raise InvalidInputError(f"sharing memory: got name {name[:40]!r}, offset {offset} and byte_size {byte_size}")
        descriptor, found = open_segment(key)
        os.close(descriptor)
        if offset + byte_size > found.st_size:
            raise InvalidInputError(
                f"sharing memory: segment {key!r} has {found.st_size} bytes, expected at least {offset + byte_size}"
            )
        held = self._registered_bytes()
        if held + byte_size > limit or len(self._regions) >= MOST_REGIONS:
            self._regions = {known: region for known, region in self._regions.items() if region.exists()}
            held = self._registered_bytes()
        if held + byte_size > limit or len(self._regions) >= MOST_REGIONS:
            raise CapacityError(
                f"sharing memory: got {byte_size} bytes beside {held} in {len(self._regions)} regions, expected at most "
                f"{limit} (service.shared_memory_bytes) in {MOST_REGIONS}; unregister some"
            )
        self._regions[name] = Region(name, key, offset, byte_size, (found.st_dev, found.st_ino))
        self._changed()

    def _registered_bytes(self) -> int:
        return sum(region.byte_size for region in self._regions.values())

    def unregister(self, name: str | None) -> None:
        """Unregister a region, or all; unknown names are no error, as in Triton."""
        for region in list(self._regions) if name is None else [name]:
            self._regions.pop(region, None)
        self._changed()

    def regions(self, name: str | None = None) -> list[Region]:
        """Return all regions, or one; raise InvalidInputError if it does not exist."""
        if name is None:
            return list(self._regions.values())
        if name not in self._regions:
            raise InvalidInputError(f"Unable to find system shared memory region: '{name[:120]}'")
        return [self._regions[name]]

    def published(self) -> list[dict[str, Any]]:
        """Return the regions for the frontends' snapshot."""
        return [{**asdict(region), "identity": list(region.identity)} for region in list(self._regions.values())]
