"""A pinner without a device: it commits the memory, as pinning does, and keeps account of what is pinned."""

import ctypes
import threading

import numpy as np
import numpy.typing as npt

from hps.errors import DeviceError
from hps.stores.hash_map.memory import PAGE_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


class PopulatingPinner:
    """Pins by rules that CUDA has, too: whole pages that are mapped, none of them twice. *Thread-safe.*

    Attributes:
        refuse_at: which call of `pin` is refused, counted from 1, and all after it; None for none.
        pinned: size by address of what is pinned at present.
        calls: of `pin` so far.
    """

    def __init__(self, refuse_at: int | None = None) -> None:
        self.refuse_at = refuse_at
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self.faults: list[str] = []
        self._lock = threading.RLock()  # garbage that is collected under it may unpin

    def pin(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        with self._lock:
            self.calls += 1
            if self.refuse_at is not None and self.calls >= self.refuse_at:
                raise DeviceError(f"pinning {size_bytes} bytes: the limit on locked memory is reached")
            if address % PAGE_BYTES or size_bytes % PAGE_BYTES:
                self.faults.append("a part of a page")
            if any(address < start + size and start < address + size_bytes for start, size in list(self.pinned.items())):
                self.faults.append("memory that is pinned already")
            self.pinned[address] = size_bytes
        _LIBC.madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_POPULATE_READ if read_only else _MADV_POPULATE_WRITE
        )

    def unpin(self, address: int) -> None:
        with self._lock:
            size_bytes = self.pinned.pop(address, 0)
            states = (ctypes.c_ubyte * max(size_bytes // PAGE_BYTES, 1))()
            if not size_bytes:
                self.faults.append("memory that is not pinned is unpinned")
            elif _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), states):
                self.faults.append("memory is unmapped before it is unpinned")

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether all of some memory is pinned, in one piece or in adjacent ones."""
        with self._lock:
            pinned = sorted(self.pinned.items())
        for start, size in pinned:
            if start <= address < start + size:
                size_bytes -= start + size - address
                address = start + size
        return size_bytes <= 0


def named_by(words: npt.NDArray[np.uint64], slabs: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Address and size of all memory that a layout of the hash map names: versions, segments and slabs."""
    _, shift, vector_bytes, _, _, versions, _, _, _, *segments = words.tolist()
    buckets = [(address, 128 * count) for address, count in zip(segments[::2], segments[1::2], strict=True)]
    return [(versions, 1024 * 64), *buckets] + [(address, vector_bytes << shift) for address in slabs.tolist()]
