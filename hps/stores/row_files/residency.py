"""Keeps row files in memory: reads them by all processors, and locks them there."""

import ctypes
import logging
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.errors import CapacityError, DatabaseError
from hps.ground.memory.capacity import available_memory, check_fits
from hps.ground.threads.thread_pool import POOL
from hps.stores.row_files.layout import PAGE_BYTES

_log = logging.getLogger(__name__)
_library: Final = ctypes.CDLL(None, use_errno=True)
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, Linux 5.14
_PIECE_BYTES: Final = 16 << 20
_LOCKED_BYTES: Final = 1 << 30
_MAY_LOCK: Final = 1 << 14  # CAP_IPC_LOCK


class LockedFile:
    """Holds a mapped file in memory until `close`, or until it is unmapped. *One per thread*, except `close`.

    Args:
        parts: of whole pages, (size,) uint8, mapped.
        progress: called with the bytes that are in memory so far, and all.

    Raises:
        CapacityError: memory, or the limit of locked memory, does not hold it; nothing is locked.
        DatabaseError: the system refuses.
    """

    def __init__(
        self,
        path: Path,
        parts: Sequence[npt.NDArray[np.uint8]],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.size_bytes = sum(part.size for part in parts)
        self._locked: list[npt.NDArray[np.uint8]] = []
        done = 0
        doing = f"holding the row file {path} in memory"
        free, where = available_memory()  # page cache counts as free, so what is there of the file is not counted twice
        cure = "give the process (or its container, where page cache counts) more memory, or leave the table out of `resident`"
        check_fits(doing, {"the file": self.size_bytes}, free, where, cure)
        check_fits(
            doing,
            {"the file": self.size_bytes},
            lockable_bytes(),
            "below the limit of locked memory",
            "raise it (`ulimit -l unlimited`, `--ulimit memlock=-1` for a container, LimitMEMLOCK=infinity for systemd), or "
            "leave the table out of `resident`",
        )
        try:
            for piece in (part[at : at + _LOCKED_BYTES] for part in parts for at in range(0, part.size, _LOCKED_BYTES)):
                POOL.run(-(-piece.size // _PIECE_BYTES), 1, lambda first, last, piece=piece: _populate(piece, first, last))  # type: ignore[misc]
                if _library.mlock(_at(piece), ctypes.c_size_t(piece.size)):
                    error = OSError(ctypes.get_errno(), "mlock")
                    raise DatabaseError(f"{doing}: the system refuses ({error}); leave the table out of `resident`")
                self._locked.append(piece)
                done += piece.size
                progress(done, self.size_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock it. Idempotent."""
        while self._locked:
            piece = self._locked.pop()
            _library.munlock(_at(piece), ctypes.c_size_t(piece.size))


def _populate(mapped: npt.NDArray[np.uint8], first: int, last: int) -> None:
    for start in range(first * _PIECE_BYTES, min(last * _PIECE_BYTES, mapped.size), _PIECE_BYTES):
        piece = mapped[start : start + _PIECE_BYTES]
        if _library.madvise(_at(piece), ctypes.c_size_t(piece.size), _POPULATE_READ):
            piece[::PAGE_BYTES].max()  # an older kernel


def _at(mapped: npt.NDArray[np.uint8]) -> ctypes.c_void_p:
    return ctypes.c_void_p(mapped.ctypes.data)


def lockable_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the memory that this process may still lock."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields: dict[str, str] = {}
    with suppress(OSError):
        fields = {
            name: text.split()[0]
            for name, _, text in (line.partition(":") for line in status.read_text().splitlines())
            if text.split()
        }
    if limit == resource.RLIM_INFINITY or int(fields.get("CapEff", "0"), 16) & _MAY_LOCK:
        return 1 << 62
    return max(0, limit - 1024 * int(fields.get("VmLck", "0")))


def try_locking(path: Path, parts: Sequence[npt.NDArray[np.uint8]]) -> LockedFile | None:
    """Lock a file that replaces another one in service; if that is not possible, serve it unlocked and log why."""
    try:
        return LockedFile(path, parts)
    except (CapacityError, DatabaseError) as error:
        _log.warning("%s. The new file is served without being locked", error)
        return None
