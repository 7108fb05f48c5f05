"""The contract of a file system for sparse model files."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError


def without_secrets(uri: str) -> str:
    """Return an address for messages: without credentials, and without the query of an https address."""
    place = re.sub(r"//(?:[^/]*|[^/]*:.*)@", "//...@", uri, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?...", place, flags=re.DOTALL) if place[:5].lower() == "https" else place


@dataclass(frozen=True, slots=True)
class FileStatus:
    """Size of a file, and a version that changes when its content is replaced (modification time, ETag). *Immutable.*"""

    size_bytes: int
    version: str


class FileWriter(ABC):
    """A file that is being written. *One thread.* Invisible before `commit`, complete afterwards."""

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append bytes, which the caller may change afterwards.

        Raises:
            ModelFileError: they could not be written.
        """

    @abstractmethod
    def commit(self) -> None:
        """Give the file its name, replacing an existing file. The file is durable on return.

        Raises:
            ModelFileError: this failed; an existing file keeps the name.
        """

    @abstractmethod
    def abort(self) -> None:
        """Discard the written bytes, if the file system answers. Does nothing after `commit`, and never raises."""


class FileSystem(ABC):
    """Reads and writes files by path or URI. *Thread-safe.* Every wait is bounded.

    Operations retry transient failures (no answer, an internal error of the server, a broken connection) within the limits of
    the settings.

    Raises of every operation:
        ModelFileNotFoundError: there is no such file.
        ModelFileError: it exists and cannot be used: a directory, no permission. The message names path, cause and cure.
        ModelSourceError: its host did not answer within the deadline, or kept failing until then.
    """

    is_local: ClassVar[bool] = False
    """Whether the files are local, addressed by path."""

    # Parts of 8 MB were up to a third faster from servers on the same machine, but a load from S3 took 40 MB more memory.
    part_bytes: ClassVar[int] = 4 << 20
    """Longer reads are split into parts of this size, read in parallel."""

    renames_directories: ClassVar[bool] = False
    """Whether `rename` exists: a complete directory gets its name in one step."""

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        self.settings = settings or ModelSourceConfig()

    @property
    def parallel_reads(self) -> int:
        """Number of parts to read at a time."""
        return self.settings.parallel_reads

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""

    @abstractmethod
    def status(self, path: str) -> FileStatus:
        """Return size and version of a file."""

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` (writable bytes) completely from byte `offset` of the file.

        Args:
            buffer: bytes to fill. Their content is unspecified after an error. No write occurs after the call has ended.
            version: from `status`; if given, every byte is of that version.

        Raises:
            ModelFileError: the file ends early.
            ModelFileChangedError: it has another version.
        """

    def may_change_unseen(self, path: str, version: str) -> bool:
        """Return whether the content of a file of this version may change later while its version stays."""
        return False

    def directories(self, path: str) -> list[str]:
        """Return the sorted names (not paths) of a directory's subdirectories, in as many requests as `list`.

        A file system that cannot distinguish them from files may include the files.
        """
        return self.list(path)

    @abstractmethod
    def list(self, path: str) -> list[str]:
        """Return the sorted names (not paths) of a directory's entries."""

    @abstractmethod
    def create(self, path: str) -> FileWriter:
        """Start to write a file; missing parent directories are created."""

    def replace(self, path: str, content: bytes, version: str) -> str:
        """Write a small file if it still has a version; readers see the old or the new content, never none.

        Of several writers that expect the same version, one succeeds. A file that already has `content` counts as written,
        since an attempt whose answer was lost may have done it; so `content` must be unique to the writer.

        Args:
            version: expected version, from `status`; empty if there must be no file.

        Returns:
            The version of the new file.

        Raises:
            ModelFileChangedError: the file has another version, and is left as it is.
            ModelSourceError: no answer; the file may have been written.
        """
        raise ModelFileError(f"writing {path}: this file system cannot compare versions; keep this file in one that can")

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""

    def rename(self, path: str, new_path: str) -> None:
        """Rename a directory durably to an unused name; only if `renames_directories` is set."""
        raise ModelFileError(f"renaming {path}: this file system renames no directories; write the files where they belong")

    def version_holding(self, path: str, content: bytes) -> str:
        """Return the version of a file if it has exactly this content; empty otherwise."""
        try:
            status = self.status(path)
            if status.size_bytes != len(content):
                return ""
            found = bytearray(len(content))
            self.read_into(path, 0, memoryview(found), status.version)
        except (ModelFileNotFoundError, ModelFileChangedError):
            return ""
        return status.version if found == content else ""


def changed(path: str, expected: str, got: str = "") -> ModelFileChangedError:
    """Return the error for a file whose version changed during the read."""
    now = f", now {got}" if got else ""
    return ModelFileChangedError(
        f"reading {path}: it changed while it was being read (version {expected}{now}); "
        "load the model again when its writer is done, and write models to a new directory"
    )


def replaced(path: str, expected: str, got: str = "") -> ModelFileChangedError:
    """Return the error for a file that another writer has written or removed; `got` is its version, if known."""
    now = f", got {got}" if got else ""
    return ModelFileChangedError(
        f"writing {path}: expected {f'version {expected}' if expected else 'no file'}{now}; another writer changed it, and "
        "nothing was written"
    )


def too_short(path: str, size: int, offset: int, end: int) -> ModelFileError:
    """Return the error for a file that ends at byte `size`, within the bytes from `offset` to `end`."""
    return ModelFileError(
        f"reading {path}: it ends at byte {size}, expected bytes {offset} to {end}; it was cut short, or is being replaced"
    )
