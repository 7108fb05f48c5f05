"""Checks of a RocksDB directory for damage that RocksDB does not notice, and views for reading it.

**A MANIFEST cut short.** RocksDB's list of its files is append-only, and to RocksDB a list that ends early is an older one: it
opens, every later row is absent, and the files of those rows are deleted. So we store the length and the checksum of the list
("seal" it), and compare them before opening. A list of another name is not compared, since RocksDB starts a new one at each
opening, and HugeCTR may have written here meanwhile.

**Read-only opening.** The binding writes its log and settings into the directory even then, and fails if it cannot. So it opens
a directory of links to the files instead, which also works on a read-only volume. So does a start on a full disk, with
the links in memory.
"""

import fcntl
import json
import logging
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import finalize

from hps.databases.rocks_db.engine import database_error
from hps.databases.rocks_db.write_ahead_log import SEAL as LOG_SEAL
from hps.databases.rocks_db.write_ahead_log import check_manifest, checksum_of
from hps.errors import DatabaseCorruptError, DatabaseError

_log = logging.getLogger(__name__)

STAGING = "hps-ingest"
"""Subdirectory for files to load, on the database's file system, so that they can be moved into it."""
_SEAL = "hps-manifest.json"
_CURRENT = "CURRENT"
_NOT_LINKED = frozenset({_CURRENT, "LOCK", "LOG", "rocksdict-config.json", _SEAL, LOG_SEAL})
_READ_BYTES = 1 << 20
_VIEW_ATTEMPTS = 3
_MEMORY = "/dev/shm"
_FLOCK = "hhqqi"  # struct flock of Linux: type, whence, start, length, process


@dataclass(frozen=True, slots=True)
class Seal:
    """The known length of a MANIFEST, with its checksum. *Immutable.*"""

    manifest: str
    size_bytes: int
    crc32: int


def check_directory(path: Path, read_only: bool) -> bool:
    """Check a directory before RocksDB opens it, and create it unless `read_only`; return whether it holds a database.

    Raises:
        DatabaseError: it is not a directory, or holds no database although `read_only` needs one.
        DatabaseCorruptError: a database is there, but its first file is missing, or its list of files was cut short.
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
            f"(such as {leftover[0]}). Restore it from a backup, or remove the directory and load the models again"
        )
    if read_only:
        raise DatabaseError(
            f"opening the database {path} with read_only: no database is there. Load the models first (without read_only), "
            "or correct the path"
        )
    return False


def holder(path: Path) -> int:
    """Return the process that has a database open for writing; 0 if none has."""
    try:
        with open(path / "LOCK", "rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return 0
    return 0 if kind == fcntl.F_UNLCK else process or -1


def hold(path: Path) -> int:
    """Keep other processes from opening a database for writing, as RocksDB does, until the returned file is closed.

    Raises:
        DatabaseError: another process has it open, or the file cannot be opened.
    """
    doing = "holding the database"
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
    """Store the present length and checksum of the MANIFEST; `previous` saves reading the sealed part.

    Raises:
        DatabaseError: the seal cannot be written.
    """
    try:
        name = (path / _CURRENT).read_text().strip()
        size, crc = (previous.size_bytes, previous.crc32) if previous and previous.manifest == name else (0, 0)
        with open(path / name, "rb") as manifest:
            os.fsync(manifest.fileno())  # so that the seal never promises more than survives a power cut
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
        raise DatabaseError(f"opening the database {path}: {error}; it must be possible to read it") from error
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
            "Restore it from a backup, or remove the directory and load the models again"
        )


def cut_logs(path: Path, ends: dict[str, int]) -> None:
    """Cut off damaged ends of logs, by name: they were not acknowledged, and would hang RocksDB.

    Raises:
        DatabaseError: a log cannot be written.
    """
    for name, size in ends.items():
        _log.warning("opening the database %s: cut the damaged, unacknowledged end of %s at %d bytes", path, name, size)
        try:
            os.truncate(path / name, size)
        except OSError as error:
            raise database_error(str(error), f"cutting {name} to {size} bytes", path) from error


def check_room(path: Path, size_bytes: int) -> None:
    """Check that a file of this size can be written.

    Raises:
        OSError: it could not.
    """
    trial = path / STAGING / "room"
    trial.parent.mkdir(exist_ok=True)  # a start on a full disk may have left none
    try:
        with open(trial, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    finally:
        trial.unlink(missing_ok=True)


def clear_staging(path: Path) -> None:
    """Make an empty directory for files to load, without those of a killed process."""
    staging = path / STAGING
    try:
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
    except OSError as error:
        raise database_error(str(error), f"clearing {STAGING}", path) from error


def link_files(path: Path, name: str) -> Path:
    """Link the files of all tables into a new directory, so that RocksDB frees no space by deleting one; return the directory.

    RocksDB deletes the files of a dropped table with the interpreter lock held, and a file system takes a second to free a GB.
    Removing the last links with `shutil.rmtree` stalls nothing. Files that cannot be linked stall the process.
    """
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
    """

    def __init__(self, parent: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="hps-rocks-db-", dir=parent))
        self.cleanup = finalize(self, _remove_own, self.path, os.getpid())


def _remove_own(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def opened_in_view(
    path: Path, open_at: Callable[[Path], None], ends: dict[str, int] | None = None, *, in_memory: bool = False
) -> View:
    """Call `open_at` with a temporary directory of links to the files of a database; return it, for cleaning up afterwards.

    Args:
        ends: sizes to which files are copied, by name; 0 leaves a file out.
        in_memory: make the directory on a file system in memory, if there is one: the disk of others may be full.

    Raises:
        DatabaseError: the last error of `open_at`.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            view = View(_MEMORY if in_memory and os.access(_MEMORY, os.W_OK | os.X_OK) else None)
        except OSError as error:
            raise database_error(str(error), "making a directory of links", path) from error
        try:
            _link_files(path, view.path, ends or {})
            open_at(view.path)
            return view
        except DatabaseCorruptError:
            view.cleanup()
            if attempts == _VIEW_ATTEMPTS:  # a process that writes may replace files after we listed them
                raise
        except BaseException:
            view.cleanup()
            raise


def _link_files(path: Path, view: Path, ends: dict[str, int]) -> None:
    try:
        # Copied first: a link would follow a writer to a new MANIFEST, which is not linked here.
        shutil.copyfile(path / _CURRENT, view / _CURRENT)
        for entry in os.scandir(path):
            if entry.name in _NOT_LINKED or entry.name.startswith("LOG.") or not entry.is_file():
                continue
            end = ends.get(entry.name)
            if end:
                shutil.copyfile(entry.path, view / entry.name)
                os.truncate(view / entry.name, end)
            elif end is None:
                os.symlink(os.path.abspath(entry.path), view / entry.name)
    except OSError as error:
        raise DatabaseError(f"opening the database {path} with read_only: {error}; it must be possible to read it") from error
