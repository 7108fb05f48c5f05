"""Checks of a RocksDB directory for damage that RocksDB does not detect, and views for reading it.

**A MANIFEST cut short.** RocksDB's list of its files is append-only, and RocksDB takes a list that ends early for an older one:
it opens, every later row is absent, and the files of those rows are deleted. So we store the length and the checksum of the
list ("seal" it), and compare them before opening.

**Read-only opening.** The binding writes its log and settings into the directory even then, and fails if it cannot. So it opens
a directory of links to the files instead, which also works on a read-only volume. A start on a full disk does the same, with
the links in memory.
"""

import fcntl
import json
import logging
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from weakref import finalize

from hps.errors import DatabaseCorruptError, DatabaseError, DatabaseTimeoutError
from hps.stores.rocks_db.engine import database_error
from hps.stores.rocks_db.write_ahead_log import RESTORE, check_manifest, checksum_of, logs_in, unreadable
from hps.stores.rocks_db.write_ahead_log import SEAL as LOG_SEAL

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

STAGING = "hps-ingest"
"""Subdirectory for files to load, on the database's file system, so that they can be moved into it."""
_SEAL = "hps-manifest.json"
_CURRENT = "CURRENT"
_NOT_LINKED = frozenset({_CURRENT, "LOCK", "LOG", "rocksdict-config.json", _SEAL, LOG_SEAL})
_READ_BYTES = 1 << 20
_SETTLE_TIMEOUT_S = 10.0  # for a moment in which another process does not change the list of files
_MEMORY = "/dev/shm"
_FLOCK = "hhqqi"  # struct flock of Linux: type, whence, start, length, process


class Files(NamedTuple):
    """Figures that change when a process writes to a database. Empty without a database."""

    manifest: str = ""
    identity: tuple[int, ...] = ()  # inode, size and time of the MANIFEST
    logs: tuple[int, ...] = ()  # numbers, ascending
    log_bytes: int = 0  # of the newest

    @property
    def list_of_files(self) -> tuple[str, tuple[int, ...]]:
        return self.manifest, self.identity

    @property
    def names(self) -> tuple[object, ...]:
        return self[:-1]


def files_of(path: Path) -> Files:
    """Read the state of the MANIFEST and of the newest log of a database."""
    try:
        name = (path / _CURRENT).read_text().strip()
        manifest = os.stat(path / name)
        logs = logs_in(path)
        size = os.stat(path / logs[max(logs)]).st_size if logs else 0
    except (OSError, ValueError):  # missing, or just being replaced
        return Files()
    return Files(name, (manifest.st_ino, manifest.st_size, manifest.st_mtime_ns), tuple(sorted(logs)), size)


@dataclass(frozen=True, slots=True)
class Seal:
    """The known length and checksum of a MANIFEST. *Immutable.*"""

    manifest: str
    size_bytes: int
    crc32: int


def check_directory(path: Path, read_only: bool) -> bool:
    """Check a directory before RocksDB opens it, and create it unless `read_only`; return whether it holds a database.

    Raises:
        DatabaseError: it is not a directory, or holds no database although `read_only` needs one.
        DatabaseCorruptError: the first file of a database is missing, or its list of files was cut short.
    """
    try:
        if not read_only:
            path.mkdir(parents=True, exist_ok=True)
        names = os.listdir(path) if path.exists() else []
    except OSError as error:
        raise DatabaseError(f"opening the database {path}: {error}; expected a directory that this process may use") from error
    if _CURRENT in names:
        _check_seal(path)
        check_manifest(path)
        return True
    leftover = sorted(name for name in names if name.startswith("MANIFEST-") or name.endswith(".sst"))
    if leftover:
        raise DatabaseCorruptError(
            f"opening the database {path}: the file {_CURRENT} is missing, but {len(leftover)} files of a database are there "
            f"(such as {leftover[0]}). {RESTORE}"
        )
    if read_only:
        raise DatabaseError(
            f"opening the database {path} with read_only: no database exists there. Load the models first (without read_only), "
            "or correct the path"
        )
    return False


def locking_process(path: Path) -> int:
    """Return the process that has a database open for writing, -1 if its number is unknown, 0 if there is none."""
    try:
        with open(path / "LOCK", "rb") as file:
            lock = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, lock))
    except OSError:
        return 0
    return 0 if kind == fcntl.F_UNLCK else process or -1


def lock_directory(path: Path) -> int:
    """Lock a database against other writers, as RocksDB does, until the returned file is closed."""
    doing = "locking the database"
    try:
        file = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise database_error(str(error), doing, path) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise database_error(f"While lock file: {error}", doing, path) from error
    return file


def seal(path: Path, previous: Seal | None) -> Seal | None:
    """Store the present length and checksum of the MANIFEST; `previous` saves reading the sealed part."""
    try:
        name = (path / _CURRENT).read_text().strip()
        size, crc = (previous.size_bytes, previous.crc32) if previous and previous.manifest == name else (0, 0)
        with open(path / name, "rb") as manifest:
            os.fsync(manifest.fileno())  # the seal must not promise more than survives a power cut
            manifest.seek(size)
            while data := manifest.read(_READ_BYTES):
                crc = zlib.crc32(data, crc)
                size += len(data)
        current = Seal(name, size, crc)
        if current != previous:
            fresh = path / f"{_SEAL}.{os.getpid()}.tmp"
            fresh.write_text(json.dumps(asdict(current)) + "\n")
            fresh.replace(path / _SEAL)
    except FileNotFoundError:
        return None  # RocksDB has just replaced its MANIFEST; the next seal covers the new one
    except OSError as error:
        raise database_error(str(error), "sealing the database", path) from error
    return current


def _check_seal(path: Path) -> None:
    try:
        sealed = Seal(**json.loads((path / _SEAL).read_text()))
        name = (path / _CURRENT).read_text().strip()
    except (FileNotFoundError, ValueError, TypeError):
        return  # not sealed: HugeCTR's, or killed before the first seal
    except OSError as error:
        raise unreadable(path, error) from error
    # RocksDB starts a new list at each opening, and HugeCTR may have opened the database since the seal.
    if name != sealed.manifest:
        return
    try:
        size, crc = checksum_of(path / name, sealed.size_bytes)
    except FileNotFoundError:
        return  # RocksDB reports it
    if (size, crc) != (sealed.size_bytes, sealed.crc32):
        raise DatabaseCorruptError(
            f"opening the database {path}: {name} was cut short or changed: its first {sealed.size_bytes} bytes had checksum "
            f"{sealed.crc32:#010x}, and now {size} bytes with {crc:#010x} are there. Rows would be missing unnoticed. "
            f"{RESTORE}"
        )


def cut_logs(path: Path, ends: dict[str, int]) -> None:
    """Cut off the damaged, unacknowledged ends of logs, by name: they would hang RocksDB."""
    for name, size in ends.items():
        _log.warning("opening the database %s: cut the damaged, unacknowledged end of %s at %d bytes", path, name, size)
        try:
            os.truncate(path / name, size)
        except OSError as error:
            raise database_error(str(error), f"cutting {name} to {size} bytes", path) from error


def check_room(path: Path, size_bytes: int) -> None:
    """Check that a file of this size can be written."""
    trial = path / STAGING / "room"
    trial.parent.mkdir(exist_ok=True)  # a start on a full disk may not have made one
    try:
        with open(trial, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    finally:
        trial.unlink(missing_ok=True)


def clear_staging(path: Path) -> None:
    # On the file system of the database, since RocksDB moves a staged file into it instead of copying.
    staging = path / STAGING
    try:
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
    except OSError as error:
        raise database_error(str(error), f"clearing {STAGING}", path) from error


def link_files(path: Path, name: str) -> Path:
    """Link the files of all tables into a new directory; return the directory."""
    # RocksDB deletes the files of a dropped table with the interpreter lock held, and a file system takes a second to free a
    # GB. While a link is left, deleting frees nothing. The caller then removes the links with `shutil.rmtree`, which stalls no
    # other thread. Files that cannot be linked stall the process.
    links = path / STAGING / name
    with suppress(OSError):
        links.mkdir()
        for file in path.glob("*.sst"):
            with suppress(FileNotFoundError):  # merged away just now
                os.link(file, links / file.name)
    return links


class View:
    """A temporary directory for links. *Thread-safe.*

    `cleanup` removes it, as do its last reference and the exit of the process that made it, but not of a forked child.

    Attributes:
        files: the linked state, or an earlier one.
    """

    files = Files()

    def __init__(self, parent: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="hps-rocks-db-", dir=parent))
        self.cleanup = finalize(self, _remove_owned, self.path, os.getpid())


def _remove_owned(path: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def opened_in_view(
    path: Path, open_at: Callable[[Path], None], ends: dict[str, int] | None = None, *, in_memory: bool = False
) -> View:
    """Call `open_at` with a temporary directory of links to the files of a database; return the directory.

    Args:
        ends: sizes to which files are copied, by name; 0 leaves a file out.
        in_memory: create the directory on a file system in memory, if there is one: other disks may be full. This process has
            then locked the database, so that its files do not change.

    Raises:
        DatabaseError: the last error of `open_at`.
    """

    def attempt() -> View:
        try:
            view = View(_MEMORY if in_memory and os.access(_MEMORY, os.W_OK | os.X_OK) else None)
        except OSError as error:
            raise database_error(str(error), "making a directory of links", path) from error
        try:
            _link_files(path, view.path, ends or {}, locked=in_memory)
            open_at(view.path)
        except BaseException:
            view.cleanup()
            raise
        return view

    return attempt() if in_memory else settled(path, attempt)


def settled(path: Path, attempt: Callable[[], _Result]) -> _Result:
    """Return the result of `attempt`; for some seconds, retry it if it failed while another process changed the database.

    Raises:
        DatabaseError: the error of `attempt`, if the database did not change.
        DatabaseTimeoutError: the database kept changing.
    """
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        before = files_of(path)
        try:
            return attempt()
        except DatabaseTimeoutError:
            raise
        except DatabaseError as error:
            if files_of(path).names == before.names:  # RocksDB deletes logs some time after it has changed its list
                raise
            if time.monotonic() >= deadline:
                raise DatabaseTimeoutError(
                    f"opening the database {path}: another process kept replacing its files for {_SETTLE_TIMEOUT_S:g} s, the "
                    f"last time with: {error}. Try again when it writes less"
                ) from error


def _link_files(path: Path, view: Path, ends: dict[str, int], *, locked: bool) -> None:
    """Link or copy the files of one moment.

    Args:
        ends: as for `opened_in_view`.
        locked: whether this process has locked the database, so that no file need be copied.
    """
    try:
        state = files_of(path)
        names = {entry.name for entry in os.scandir(path) if entry.is_file()}
        ends = dict(ends)
        if not locked:
            # RocksDB reads the list of tables, then the list of files, then the newest log. If another process replaced a table
            # in between, the log would count rows that the list of files lacks: an empty table without an error. So the list is
            # copied, not linked, with the newest log up to its size at that moment; later logs are left out.
            manifest = (path / state.manifest).read_bytes() if state.manifest else b""
            if files_of(path).list_of_files != state.list_of_files:
                raise DatabaseError(f"opening the database {path} with read_only: another process is changing it; try again")
            if state.manifest:
                (view / state.manifest).write_bytes(manifest)
                names = {name for name in names if not name.startswith("MANIFEST-")}
            newest = max(state.logs, default=-1)
            for number, name in logs_in(path).items():
                if number >= newest:
                    ends[name] = min(ends.get(name, state.log_bytes), state.log_bytes if number == newest else 0)
        if state.manifest:
            (view / _CURRENT).write_text(state.manifest + "\n")
        else:
            shutil.copyfile(path / _CURRENT, view / _CURRENT)
        for name in names - _NOT_LINKED:
            if name.startswith("LOG."):
                continue
            end = ends.get(name)
            if end:
                _copy_beginning(path / name, view / name, end)
            elif end is None:
                os.symlink(os.path.abspath(path / name), view / name)
    except OSError as error:
        raise unreadable(path, error) from error


def _copy_beginning(source: Path, target: Path, size: int) -> None:
    with open(source, "rb") as read, open(target, "wb") as written:
        while size and (sent := os.sendfile(written.fileno(), read.fileno(), None, size)):
            size -= sent
