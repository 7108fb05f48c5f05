"""Compiles hps's numba kernels and caches the machine code, which is never stale.

numba checks the file that defines a kernel, but not what the kernel calls or inlines. So machine code lies in a directory whose
name is a hash of *all* kernel sources of this package and of the versions of the compiler: after any edit or upgrade the name
differs. Two rules make that complete, and `tests/repo/test_kernels.py` checks both: a module that defines a kernel or a part of
one decorates it with `@kernel`, `@njit` or `@intrinsic` by that name, and a kernel uses functions and constants of such modules
only.

    @njit(inline="always")                        # a part of kernels: plain numba, never cached by itself
    def _doubled(value): ...

    @kernel(void, read_only(int64[::1]), int64[::1])    # what Python calls: one signature, nogil, cached
    def double(values, out): ...

    compile_kernels()                             # where a tier is constructed, before the first lookup

A cached kernel has exactly one signature. numba numbers the files of several by their order of arrival: two processes that
compile at the same time might mix them up.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
from numba import njit
from numba.core import event

from hps.ground.compilations import COMPILATIONS

_log = logging.getLogger(__name__)

_PACKAGE: Final = Path(__file__).parents[1]
_DEFINES_KERNELS: Final = re.compile(rb"^@(kernel|njit|intrinsic)\b", re.MULTILINE)
_PREFIX: Final = "hps-kernels-"
_KEPT_DIRECTORIES: Final = 4
_IN_USE_S: Final = 3600
_SECONDS_A_KERNEL: Final = 0.4

_config: Any = numba.config
_lock = threading.Lock()
_compiling = threading.Lock()
_uncompiled: list[tuple[Any, Any]] = []


def kernel(returns: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a kernel of one signature that runs without the GIL; `compile_kernels` compiles it.

    Once compiled, an argument of any other dtype or layout raises TypeError. Division by zero behaves as in C.

    Args:
        returns: numba type of the result.
        arguments: numba types of the arguments; see `read_only`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        with _lock:
            directory = _directory()
            options: Any = {"nogil": True, "error_model": "numpy", "cache": directory is not None}
            own = _config.CACHE_DIR
            _config.CACHE_DIR = str(directory or "")  # numba reads it here; kernels of the application keep their place
            try:
                made: Any = njit(**options)(function)
            finally:
                _config.CACHE_DIR = own
        _uncompiled.append((made, returns(*arguments)))
        return made  # type: ignore[no-any-return]

    return decorate


def read_only(array: Any) -> Any:
    """Return the type of an array that a kernel only reads: it accepts read-only and writable arrays."""
    return array.copy(readonly=True)


def compile_kernels() -> None:
    """Compile all kernels of the imported modules, or load their machine code. Cheap if already done.

    Called when a tier is constructed, so that no lookup waits for a compiler. *Thread-safe*. Processes that start at the same
    time may do the same work; the last result written is used.
    """
    with _compiling:
        if not _uncompiled:
            return
        announcement = _Announcement(len(_uncompiled))
        with event.install_listener("numba:compile", announcement):
            while _uncompiled:
                made, signature = _uncompiled.pop()
                made.compile(signature)
                made.disable_compile()
        announcement.close()


class _Announcement(event.Listener):
    """Logs the first compilation and the total duration; loading is not logged."""

    def __init__(self, kernels: int) -> None:
        self._kernels = kernels
        self._started_at: float | None = None
        self._compiled = 0

    def on_start(self, event: Any) -> None:
        if self._started_at is None:
            self._started_at = time.monotonic()
            _log.info(
                "compiling kernels for this machine, which takes about %d s; later starts load them from %s",
                math.ceil(self._kernels * _SECONDS_A_KERNEL),
                _directory() or "nowhere: each start compiles",
            )

    def on_end(self, event: Any) -> None:
        self._compiled += 1

    def close(self) -> None:
        if self._started_at is not None:
            seconds = time.monotonic() - self._started_at
            COMPILATIONS.add("numba", self._compiled, seconds)
            _log.info("compiled the kernels in %.1f s", seconds)


def kernel_sources() -> list[Path]:
    """Return the files of this package that define kernels, parts of kernels, or how they are compiled."""
    return [
        path
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.name.startswith("numba_") or _DEFINES_KERNELS.search(path.read_bytes())
    ]


@functools.cache
def _directory() -> Path | None:
    """Return the machine code directory of exactly these sources; None if none is writable."""
    name = _PREFIX + _fingerprint()
    parents = list(_parents())
    for parent in parents:
        if _open(parent / name):
            return parent / name
    private = _private_temporary_directory()
    directory = private / name if private and _open(private / name) else None
    _log.warning(
        "cannot keep compiled kernels in %s; %s. Set NUMBA_CACHE_DIR to a directory that this user can write to",
        " or ".join(str(parent) for parent in parents),
        f"they go to {directory}, which may not outlive a reboot" if directory else "every start compiles them again",
    )
    return directory


def _fingerprint() -> str:
    hashed = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    for path in kernel_sources():
        source = path.read_bytes()
        hashed.update(f"\n{path.relative_to(_PACKAGE)} {len(source)}\n".encode())
        hashed.update(source)
    return hashed.hexdigest()[:16]


def _parents() -> Iterator[Path]:
    """List the candidate parent directories, best first. numba itself distinguishes the processors of a shared directory."""
    if _config.CACHE_DIR:
        yield Path(_config.CACHE_DIR)
        return
    yield _PACKAGE / "__pycache__"
    with contextlib.suppress(RuntimeError):  # this user has no home directory
        yield Path.home() / ".cache" / "hps"


def _open(directory: Path) -> bool:
    """Make a directory for the machine code of these sources beside those of older ones; return False if it is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)  # records the last use for `_prune`
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    _prune(directory)
    return True


def _private_temporary_directory() -> Path | None:
    """Return a directory private to this user: a process that can write machine code there can run it here."""
    try:
        directory = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return directory if private else None


def _prune(own: Path) -> None:
    """Remove the machine code of older sources, except the last few and those that another process may be writing."""
    with contextlib.suppress(OSError):  # another process does the same
        others = [path for path in own.parent.glob(f"{_PREFIX}*") if path != own]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[_KEPT_DIRECTORIES:]:
            if time.time() - path.stat().st_mtime > _IN_USE_S:
                shutil.rmtree(path, ignore_errors=True)
