"""Memory that a client shares with a server on the same machine, by Triton's system shared memory extension."""

import mmap
import os
import secrets
import weakref
from contextlib import suppress
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from hps.errors import CapacityError

_DIRECTORY: Final = "/dev/shm"
_ALIGNED: Final = 64


class Reference(NamedTuple):
    """Where an array lies in shared memory, in bytes."""

    region: str
    offset: int
    size: int

    @property
    def parameters(self) -> dict[str, str | int]:
        """Parameters of a tensor that lies there."""
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.size,
        }


class SharedMemory:
    """Memory for the arrays of lookups on the same machine: `Client.shared_memory` makes it. *One thread*, except `place`.

    Keys and outputs that lie in it do not pass through the socket. Only this user may read it.

    Attributes:
        name: of the region, and of its file in /dev/shm.
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self.name = f"hps-client-{os.getpid()}-{secrets.token_hex(8)}"
        self.size = size
        descriptor = os.open(
            f"{_DIRECTORY}/{self.name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        self.close = weakref.finalize(self, _remove, self.name, os.getpid())
        """Removes the file, as does the end of this object. Its arrays stay valid."""
        try:
            # Without allocation, a full /dev/shm would kill the process by SIGBUS at the first write to a page.
            os.posix_fallocate(descriptor, 0, size)
            self._bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        except OSError as error:
            self.close()
            raise CapacityError(f"sharing {size} bytes of memory: {error.strerror} in {_DIRECTORY}") from error
        finally:
            os.close(descriptor)
        self._address = self._bytes.ctypes.data
        self._used = 0

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Make an array that lies here; its elements are zero at first.

        Raises:
            CapacityError: there is no room for it.
        """
        dimensions = (shape,) if isinstance(shape, int) else shape
        size = prod(dimensions) * np.dtype(dtype).itemsize
        start = -(-self._used // _ALIGNED) * _ALIGNED
        if start + size > self.size:
            raise CapacityError(f"making an array of {size} bytes: {self.size - start} of {self.size} bytes are left")
        self._used = start + size
        return np.ndarray(dimensions, dtype, self._bytes, start)

    def place(self, array: Any) -> Reference | None:
        """Return where an array lies here; None if it lies elsewhere, or is not contiguous."""
        if type(array) is not np.ndarray or not array.flags.c_contiguous or not array.size:
            return None
        offset = array.__array_interface__["data"][0] - self._address
        return Reference(self.name, offset, array.nbytes) if 0 <= offset <= self.size - array.nbytes else None


def _remove(name: str, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        with suppress(FileNotFoundError):
            os.unlink(f"{_DIRECTORY}/{name}")
