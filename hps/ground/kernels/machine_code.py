"""Stores the machine code of kernels, numba's and CUDA's, in files that are never stale or incomplete.

Code lies in a directory whose name is a hash of *all* kernel sources of this package and of the versions of numba's compiler,
so that any edit or upgrade changes the name. It is read from several places:

1. `NUMBA_CACHE_DIR`, or by default `~/.cache/hps` and a private directory below the temporary one: compiled by this user;
2. `__pycache__` of the installed package, which may be read-only: compiled ahead (`hps compile`).

It is written to the first writable one of `NUMBA_CACHE_DIR`, or by default of the package's `__pycache__`, `~/.cache/hps` and
the private directory. Files depend on neither paths nor time stamps, so images and archives may contain them. Each begins with
a hash of its key and its content; a corrupt or foreign file counts as missing, and is replaced.
"""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba

from hps.errors import InvalidInputError

_log = logging.getLogger(__name__)

_PACKAGE: Final = Path(__file__).parents[2]
_DEFINES_KERNELS: Final = re.compile(rb"^@(kernel|njit|intrinsic)\b", re.MULTILINE)
_PREFIX: Final = "hps-kernels-"
_BASELINES: Final = {
    "x86_64": (
        "x86-64-v3",
        "+64bit,+avx,+avx2,+bmi,+bmi2,+cx16,+cx8,+f16c,+fma,+fxsr,+lzcnt,+mmx,+movbe,+popcnt,+sahf,+sse,+sse2,+sse3,+sse4.1,"
        "+sse4.2,+ssse3,+xsave",
    ),
    "aarch64": ("generic", "+neon"),
}
BASELINE = _BASELINES.get(platform.machine())
"""LLVM's name and features of the processor for machine code that several machines share; None without one."""
_KEPT_DIRECTORIES: Final = 4
_IN_USE_S: Final = 3600

_config: Any = numba.config


def read(name: str, key: str) -> bytes | None:
    """Return the code in a file of this name and key; None if there is none."""
    for place in _places():
        with contextlib.suppress(OSError):
            content = (place / name).read_bytes()
            digest, code = content[:32], content[32:]
            if digest == _digest(key, code):
                _record_use(place)
                return code
    return None


def write(name: str, key: str, code: bytes) -> bool:
    """Write code to a file; return False if no directory is writable. The last of concurrent writers wins."""
    place = directory()
    if place is None:
        return False
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".writing-", delete=False) as file:
            try:
                file.write(_digest(key, code) + code)
                file.close()
                Path(file.name).chmod(0o644)
                Path(file.name).replace(place / name)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:  # a full disk; this process uses the code all the same
        _log.warning("cannot keep a compiled kernel in %s: %s", place, error)
        return False
    return True


def refuse_baseline() -> None:
    """Use machine code for the processor at hand only."""
    global BASELINE
    BASELINE = None


def choose_baseline() -> None:
    """Compile for `BASELINE`. Called before the first import of a module that uses numba's decorators.

    Raises:
        InvalidInputError: no baseline is defined for processors of this kind.
    """
    if BASELINE is None:
        known = " and ".join(_BASELINES)
        raise InvalidInputError(f"compiling for a baseline: got a processor {platform.machine()}, expected {known}")
    _config.CPU_NAME, _config.CPU_FEATURES = BASELINE


def _digest(key: str, code: bytes) -> bytes:
    head = f"{_name()} {len(key)} {key} ".encode()
    return hashlib.sha256(head + code).digest()


def kernel_sources() -> list[Path]:
    """Return the files of this package that define kernels, their parts or constants, or their compilation."""
    return [
        path
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.name.startswith("numba_")
        or path.name in ("layout.py", "shares.py")  # constants of kernels
        or path == Path(__file__)
        or _DEFINES_KERNELS.search(path.read_bytes())
    ]


@functools.cache
def directory() -> Path | None:
    """Return the directory to write machine code to; None if none is writable."""
    parents = list(_parents())
    for parent in parents:
        if _open(parent / _name()):
            return parent / _name()
    private = _private_temporary_directory(make=True)
    found = private / _name() if private and _open(private / _name()) else None
    _log.warning(
        "cannot keep compiled kernels in %s; %s. Set NUMBA_CACHE_DIR to a directory that this user can write to",
        " or ".join(str(parent) for parent in parents),
        f"they go to {found}, which may not outlive a reboot" if found else "every start compiles them again",
    )
    return found


@functools.cache
def _name() -> str:
    """Return the name of the directory for these sources."""
    hashed = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    for path in kernel_sources():
        source = path.read_bytes()
        hashed.update(f"\n{path.relative_to(_PACKAGE)} {len(source)}\n".encode())
        hashed.update(source)
    return _PREFIX + hashed.hexdigest()[:16]


def _places() -> Iterator[Path]:
    """List the directories to read from, best first."""
    parents = list(_parents())
    if not _config.CACHE_DIR:
        parents.reverse()  # code of this user before that of the installation
    if private := _private_temporary_directory(make=False):
        parents.append(private)
    for parent in dict.fromkeys([*parents, _PACKAGE / "__pycache__"]):
        yield parent / _name()


def _parents() -> Iterator[Path]:
    """List the candidate parents of the directory to write to, best first."""
    if _config.CACHE_DIR:
        yield Path(_config.CACHE_DIR)
        return
    yield _PACKAGE / "__pycache__"
    with contextlib.suppress(RuntimeError):  # this user has no home directory
        yield Path.home() / ".cache" / "hps"


def _open(path: Path) -> bool:
    """Make a directory for the machine code of these sources; return False if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        os.utime(path)  # records the last use for `_prune`
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    _prune(path)
    return True


@functools.cache
def _record_use(path: Path) -> None:
    """Record the last use for `_prune`."""
    with contextlib.suppress(OSError):  # read-only
        os.utime(path)


def _private_temporary_directory(*, make: bool) -> Path | None:
    """Return a directory private to this user."""
    # Whoever can write machine code there runs it in this process.
    try:
        path = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}"
        if make:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return path if private else None


def _prune(own: Path) -> None:
    """Remove the machine code of older sources, except the last few and those that another process may be writing."""
    with contextlib.suppress(OSError):  # another process prunes, too
        others = [path for path in own.parent.glob(f"{_PREFIX}*") if path != own]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[_KEPT_DIRECTORIES:]:
            if time.time() - path.stat().st_mtime > _IN_USE_S:
                shutil.rmtree(path, ignore_errors=True)
