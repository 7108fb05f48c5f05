"""The contract of a file system that holds sparse model files."""

from abc import ABC, abstractmethod


class FileSystem(ABC):
    """Reads files by path. *Thread-safe.* Every wait is bounded by a timeout."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Tell whether a file or directory is there."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Size of a file in bytes.

        Raises:
            ModelFileNotFoundError: there is no such file.
            ModelFileError: it is there and cannot be used (a directory, no permission).
        """

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer` (writable bytes) from byte `offset` of the file.

        Raises:
            ModelFileError: the file ends early or cannot be read; the buffer's content is then unspecified.
        """

    @abstractmethod
    def version(self, path: str) -> str:
        """A text that changes when the content of the file is replaced (modification time, ETag)."""

    @abstractmethod
    def list(self, path: str) -> list[str]:
        """Names (not paths) of what a directory holds, sorted."""
