"""The contract of a file system that holds sparse model files."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileChangedError, ModelFileError


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What a file is at one moment. *Immutable.*

    Attributes:
        size_bytes: how long it is.
        version: a text that changes when the content is replaced (modification time, ETag, generation).
    """

    size_bytes: int
    version: str


class FileWriter(ABC):
    """A file that is being written. *One thread.* Nobody sees it before `commit`; then everybody sees all of it."""

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append bytes, which the caller may change afterwards.

        Raises:
            ModelFileError: it could not be written.
        """

    @abstractmethod
    def commit(self) -> None:
        """Give the file its name; a file that had the name is replaced. The new one is durable on return.

        Raises:
            ModelFileError: this failed; the file that had the name still has it.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop what was written, if the file system answers. It changes nothing after `commit`, and never raises."""


class FileSystem(ABC):
    """Reads and writes files by path or URI. *Thread-safe.* Every wait is bounded.

    An operation that fails for a reason that may pass (no answer, an internal error of the server, a connection that breaks) is
    tried again within the limits of the settings.

    Args:
        settings: timeouts, attempts and addresses.

    Raises of every operation:
        ModelFileNotFoundError: there is no such file.
        ModelFileError: it exists and cannot be used: a directory, no permission. The message names path, cause and cure.
        ModelSourceError: its host did not answer within the deadline, or failed until then.
    """

    is_local: ClassVar[bool] = False
    """Whether its files are on this machine, by path."""

    part_bytes: ClassVar[int] = 4 << 20
    """Longer reads are cut into parts of this size, which are read in parallel.

    Parts of 8 MB were up to a third faster from servers on the same machine, but a load from S3 held 40 MB more with them.
    """

    renames_directories: ClassVar[bool] = False
    """Whether `rename` exists: a directory that is whole gets its name in one step."""

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        self.settings = settings or ModelSourceConfig()

    @property
    def parallel_reads(self) -> int:
        """How many parts to read at a time."""
        return self.settings.parallel_reads

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Tell whether a file or directory is there."""

    @abstractmethod
    def status(self, path: str) -> FileStatus:
        """Size and version of a file."""

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill the whole of `buffer` (writable bytes) from byte `offset` of the file.

        Args:
            path: of the file.
            offset: of the first byte.
            buffer: to fill. Its content is unspecified after an error. Nothing writes to it once the call has ended.
            version: from `status`. If it is given, every byte is of that version.

        Raises:
            ModelFileError: the file ends early.
            ModelFileChangedError: it has another version.
        """

    def may_change_unseen(self, path: str, version: str) -> bool:
        """Whether the content of a file of this version may change from now on while its version stays."""
        return False

    def directories(self, path: str) -> list[str]:
        """Names (not paths) of the directories in a directory, sorted, in as many requests as `list`.

        A file system that cannot tell them from files may name the files, too.
        """
        return self.list(path)

    @abstractmethod
    def list(self, path: str) -> list[str]:
        """Names (not paths) of what a directory holds, sorted."""

    @abstractmethod
    def create(self, path: str) -> FileWriter:
        """Begin to write a file; directories above it are made."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file. Removing one that is not there changes nothing."""

    def rename(self, path: str, new_path: str) -> None:
        """Give a directory another name, which nothing may have, durably; only where `renames_directories` says so."""
        raise ModelFileError(f"renaming {path}: this file system renames no directories; write the files where they belong")


def changed(path: str, expected: str, got: str = "") -> ModelFileChangedError:
    """The error for a file whose version is not the one that is being read."""
    now = f", now {got}" if got else ""
    return ModelFileChangedError(
        f"reading {path}: it changed while it was being read (version {expected}{now}); "
        "load the model again when its writer is done, and write models to a new directory"
    )


def too_short(path: str, size: int, offset: int, end: int) -> ModelFileError:
    """The error for a file that ends at byte `size`, before all of the bytes from `offset` to `end`."""
    return ModelFileError(
        f"reading {path}: it ends at byte {size}, expected bytes {offset} to {end}; it was cut short, or is being replaced"
    )
