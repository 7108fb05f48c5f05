"""Files on this machine."""

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import unquote

from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed, replaced, too_short

_LOCK_PAUSE_S = 0.01
_ABSENT = (FileNotFoundError, NotADirectoryError)


class LocalFileSystem(FileSystem):
    """Reads and writes files by path, relative to the working directory or absolute, or by `file://` URI. *Immutable.*

    The version of a file is its modification and change times, size and inode: it changes when the file is written, even if its
    modification time is reset, or replaced, even by a file of the same size and time. The change time of a file that its mode
    lets nobody write to does not count: servers that link and drop a row file change it.
    """

    is_local = renames_directories = True
    part_bytes = 1 << 40  # one thread reads 8 GB/s from the page cache: splitting a read gains nothing

    @property
    def parallel_reads(self) -> int:
        """Two; more with more cores, since a GPU accepts data faster than two threads read."""
        return 4 if (os.cpu_count() or 1) >= 8 else 2

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists; an unreadable path is an error."""
        try:
            self._stat(path, "looking for")
        except ModelFileNotFoundError:
            return False
        return True

    def status(self, path: str) -> FileStatus:
        """Return size and version of a regular file."""
        return _status_of(path, self._stat(path, "opening"))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` from byte `offset`. Opens the file again, so each call reads the current file of that name."""
        try:
            # O_NONBLOCK: a named pipe in place of the file must not block. No effect on regular files.
            descriptor = os.open(local_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _refusal("opening", path, error) from error
        try:
            done = 0
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    raise too_short(path, offset + done, offset, offset + len(buffer))
                done += count
            # Checked last, to detect a write during the read, too.
            if version and (now := _status_of(path, os.fstat(descriptor)).version) != version:
                raise changed(path, version, now)
        except OSError as error:
            raise _refusal("reading", path, error) from error
        finally:
            os.close(descriptor)

    def may_change_unseen(self, path: str, version: str) -> bool:
        """Return True if a process has the file open for writing; False also if that is unknown."""
        # Stores through a memory map rarely update the times of a file. But Linux grants a read lease only on a file that no
        # process has open, or mapped, for writing; none at all to a user who does not own it, or on network file systems.
        try:
            descriptor = os.open(local_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _refusal("opening", path, error) from error
        try:
            if (now := _status_of(path, os.fstat(descriptor)).version) != version:
                raise changed(path, version, now)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except BlockingIOError:
            return True
        except (OSError, AttributeError):  # AttributeError: not Linux
            return False
        finally:
            os.close(descriptor)
        return False

    def directories(self, path: str) -> list[str]:
        """Return the sorted names of a directory's subdirectories, and of links to directories."""
        return self._names(path, os.DirEntry.is_dir)

    def _names(self, path: str, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        try:
            with os.scandir(local_path(path)) as entries:
                return sorted(entry.name for entry in entries if wanted(entry))
        except NotADirectoryError as error:
            raise ModelFileError(f"listing {path}: it is a file, expected a directory") from error
        except OSError as error:
            raise _refusal("listing", path, error) from error

    def list(self, path: str) -> list[str]:
        return self._names(path, lambda entry: True)

    def create(self, path: str) -> FileWriter:
        """Start to write a file under a temporary name in its directory."""
        return _LocalWriter(path)

    def replace(self, path: str, content: bytes, version: str) -> str:
        # Writers exclude each other by a lock on `.<name>.lock` beside the file, which ends with its process. It works between
        # machines where the file system's locks do (NFS 4, and NFS 3 with lockd).
        writer = _LocalWriter(path)
        try:
            writer.write(memoryview(content))
            with self._locked(path):
                now = self.status(path).version if self.exists(path) else ""
                if now != version:
                    if now and now == self.version_holding(path, content):
                        return now
                    raise replaced(path, version, now)
                writer.commit()
                return self.status(path).version
        except OSError as error:
            if isinstance(error, ModelFileError):
                raise
            raise _refusal("writing", path, error) from error
        finally:
            writer.abort()

    @contextmanager
    def _locked(self, path: str) -> Iterator[None]:
        directory, name = os.path.split(local_path(path))
        lock = os.path.join(directory, f".{name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + self.settings.timeout_s
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        raise ModelFileError(
                            f"writing {path}: another process has held {lock} for {self.settings.timeout_s:g} s; try again "
                            "when it is done"
                        ) from error
                    time.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(descriptor)

    def delete(self, path: str) -> None:
        try:
            os.unlink(local_path(path))
        except _ABSENT:
            return
        except OSError as error:
            raise _refusal("removing", path, error) from error

    def rename(self, path: str, new_path: str) -> None:
        """Rename a directory durably."""
        try:
            os.rename(local_path(path), local_path(new_path))
            sync_directory(os.path.dirname(local_path(new_path)) or ".")
        except OSError as error:
            raise _refusal("renaming", f"{path} to {new_path}", error) from error

    def _stat(self, path: str, doing: str) -> os.stat_result:
        try:
            return os.stat(local_path(path))
        except OSError as error:
            raise _refusal(doing, path, error) from error


class _LocalWriter(FileWriter):
    """A file under a temporary name. A killed process leaves `.<name>.<random>.tmp` behind."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._target = local_path(path)
        directory, name = os.path.split(self._target)
        self._temporary = os.path.join(directory, f".{name[:100]}.{secrets.token_hex(6)}.tmp")
        try:
            os.makedirs(directory or ".", exist_ok=True)
            self._file = open(self._temporary, "xb")  # noqa: SIM115 - commit or abort closes it
        except OSError as error:
            raise _refusal("writing", path, error) from error

    def write(self, data: memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _refusal("writing", self._path, error) from error

    def commit(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self._target)
            sync_directory(os.path.dirname(self._target) or ".")
        except OSError as error:
            raise _refusal("writing", self._path, error) from error

    def abort(self) -> None:
        with suppress(OSError):
            self._file.close()
            os.unlink(self._temporary)


def _status_of(path: str, status: os.stat_result) -> FileStatus:
    if stat.S_ISREG(status.st_mode):
        changed_ns = status.st_ctime_ns if status.st_mode & 0o222 else 0
        return FileStatus(status.st_size, f"{status.st_mtime_ns}-{changed_ns}-{status.st_size}-{status.st_ino}")
    what = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
    raise ModelFileError(f"opening {path}: it is {what}, expected a file")


def local_path(path: str) -> str:
    """Return the path of a `file:` URI (RFC 8089), with percent signs decoded; any other path unchanged.

    Raises:
        ModelFileError: the URI names another host, or the path is no legal file name.
    """
    place = path
    if path[:5].lower() == "file:":
        place = unquote(path[5:])
        if place.startswith("//"):
            host, slash, rest = place[2:].partition("/")
            if host not in ("", "localhost") or not slash:
                raise ModelFileError(f"opening {path}: got host {host!r} in a file URI, expected file:///absolute/path")
            place = "/" + rest
    try:
        if b"\0" not in os.fsencode(place):
            return place
    except UnicodeEncodeError:
        pass
    raise ModelFileError(f"opening {path!r}: a NUL or undecodable character is in the path; no file can have this name")


def _refusal(doing: str, path: str, error: OSError) -> ModelFileError:
    if isinstance(error, _ABSENT):
        return ModelFileNotFoundError(f"{doing} {path}: there is no such file or directory")
    if isinstance(error, PermissionError):
        return ModelFileError(f"{doing} {path}: permission denied; let the user that runs hps read it")
    return ModelFileError(f"{doing} {path}: {error.strerror or error}")


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
