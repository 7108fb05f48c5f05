"""The common part of S3, Google Cloud Storage and Azure: directories as prefixes, reads of ranges, retries."""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed, too_short
from hps.filesystems.retries import MOST_THREADS, ReadTarget, bounded, fill, retried, share

_PAGE_NAMES = 1000  # the limit of S3 and GCS
_MOST_PAGES = 100
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectAddress:
    """Address of an object or a prefix. *Immutable.*

    Attributes:
        uri: as given; without secrets.
        key: object name, decoded, without trailing slashes; empty for the bucket itself.
        region: region in the address, if any; of Azure the account.
    """

    uri: str
    bucket: str
    key: str
    region: str = ""

    @property
    def prefix(self) -> str:
        """Common prefix of the keys below this address."""
        return f"{self.key}/" if self.key else ""


class RangeRefusedError(Exception):
    """The store refused a range: the object is gone, has another version, or ends before the range begins."""


def range_mismatch(content_range: str, length: int, offset: int, end: int) -> str:
    """Return how the range of an answer differs from the bytes from `offset` to `end`; empty if it is right or ends early.

    Args:
        content_range: the header; an answer without it begins at byte 0.
        length: length of the body in bytes.
    """
    match = re.match(r"bytes (\d+)-", content_range)
    first = int(match[1]) if match else 0
    if first == offset and first + length <= end:
        return ""
    got, expected = f"bytes {first} to {first + length}", f"bytes {offset} to {end}"
    return f"got {got}, expected {expected}; the server does not serve ranges as it should"


class ObjectStore(FileSystem):
    """Reads and writes objects by address. *Thread-safe.*

    A directory is a prefix: it exists while the key of an object begins with its name and a slash. A bucket is always a
    directory. A missing bucket is an error, even for `exists`: no object can be put there.

    A subclass talks to its service. Its methods below make one attempt, with timeouts of their client, and raise the client's
    errors.
    """

    client_errors: ClassVar[tuple[type[Exception], ...]]
    """Exceptions of the client, except programming errors."""

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self.threads = threading.BoundedSemaphore(MOST_THREADS)

    @abstractmethod
    def _address(self, uri: str) -> ObjectAddress:
        """Parse an address. Raises `ModelFileError` for an invalid one."""

    @abstractmethod
    def _failure(self, doing: str, address: ObjectAddress, error: Exception) -> ModelFileError:
        """Translate one of `client_errors`: `ModelSourceError` if it is transient, else another `ModelFileError`."""

    @abstractmethod
    def _find(self, address: ObjectAddress) -> FileStatus | None:
        """Return the status of an object; None if it does not exist."""

    @abstractmethod
    def _pages(self, address: ObjectAddress, most: int) -> Iterator[list[str]]:
        """Yield the keys and prefixes directly below an address, at most `most` of each page; prefixes may be repeated."""

    @abstractmethod
    def _range(self, address: ObjectAddress, offset: int, end: int, version: str, target: ReadTarget) -> str:
        """Read bytes of an object, of `version` unless it is empty; return their version.

        Raises:
            RangeRefusedError: there are no such bytes.
        """

    @abstractmethod
    def _put(self, address: ObjectAddress, content: bytes, version: str) -> str:
        """Write an object if it has this version, or if there is none for an empty one; return its new version.

        Raises:
            ModelFileChangedError: it has another version.
        """

    @abstractmethod
    def _remove(self, address: ObjectAddress) -> None:
        """Remove an object, if it exists."""

    def request(self, doing: str, address: ObjectAddress, call: Callable[[], T]) -> T:
        """Call a function with retries, each on a thread that is abandoned at its deadline."""

        def attempt(deadline: float) -> T:
            return self.request_once(doing, address, share(self.settings, deadline), call)

        return retried(self.settings, attempt)

    def request_once(self, doing: str, address: ObjectAddress, seconds: float, call: Callable[[], T]) -> T:
        """Call a function on a thread that is abandoned after `seconds`."""
        try:
            return bounded(f"{doing} {address.uri}", seconds, self.threads, call)
        except ModelFileError:
            raise
        except self.client_errors as error:
            raise self._failure(doing, address, error) from error

    def exists(self, path: str) -> bool:
        """Return whether an object or a prefix of objects exists."""
        address = self._address(path)

        def call() -> bool:
            return bool(address.key and self._find(address)) or self._is_directory(address)

        return self.request("looking for", address, call)

    def status(self, path: str) -> FileStatus:
        address = self._object(path, "opening")
        return self.request("opening", address, lambda: self._status("opening", address))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        address, end = self._object(path, "reading"), offset + buffer.nbytes

        def attempt(target: ReadTarget, seconds: float) -> None:
            self.request_once("reading", address, seconds, lambda: self._read(address, offset, end, version, target))

        if buffer.nbytes:
            fill(self.settings, path, buffer, attempt)

    def directories(self, path: str) -> list[str]:
        """Return the sorted names of the prefixes directly below a prefix; at most 100,000."""
        return sorted(name.rstrip("/") for name in self._names(path) if name.endswith("/"))

    def list(self, path: str) -> list[str]:
        """Return the sorted names of the objects and prefixes directly below a prefix; at most 100,000."""
        return sorted({name.rstrip("/") for name in self._names(path)})

    def replace(self, path: str, content: bytes, version: str) -> str:
        """Write a small object if it still has a version, by a condition that the store checks."""
        address = self._object(path, "writing")
        try:
            return self.request("writing", address, lambda: self._put(address, content, version))
        except ModelFileChangedError:
            if not (written := self.version_holding(path, content)):
                raise
            return written

    def delete(self, path: str) -> None:
        address = self._object(path, "removing")
        self.request("removing", address, lambda: self._remove(address))

    def _object(self, path: str, doing: str) -> ObjectAddress:
        address = self._address(path)
        if not address.key:
            raise ModelFileError(f"{doing} {path}: it is the bucket {address.bucket!r} itself, expected an object in it")
        return address

    def _status(self, doing: str, address: ObjectAddress) -> FileStatus:
        if (found := self._find(address)) is not None:
            return found
        if self._is_directory(address):
            raise ModelFileError(f"{doing} {address.uri}: it is a directory (a prefix of objects), expected an object")
        raise ModelFileNotFoundError(f"{doing} {address.uri}: there is no such object in bucket {address.bucket!r}")

    def _is_directory(self, address: ObjectAddress) -> bool:
        return bool(next(self._pages(address, 1), [])) or not address.key

    def _names(self, path: str) -> set[str]:
        address = self._address(path)
        return self.request("listing", address, lambda: self._list(address))

    def _list(self, address: ObjectAddress) -> set[str]:
        """List the names directly below an address; those of prefixes end with a slash."""
        found: set[str] = set()
        for number, page in enumerate(self._pages(address, _PAGE_NAMES)):
            if number == _MOST_PAGES:
                raise ModelFileError(
                    f"listing {address.uri}: it holds more than {len(found)} names, expected the directory of a model"
                )
            found.update(name.removeprefix(address.prefix) for name in page)
        if found or not address.key:
            return {name for name in found if name.rstrip("/")}  # some tools create an empty object for a directory
        if self._find(address) is not None:
            raise ModelFileError(f"listing {address.uri}: it is an object, expected a directory (a prefix of objects)")
        raise ModelFileNotFoundError(f"listing {address.uri}: there is no such directory in bucket {address.bucket!r}")

    def _read(self, address: ObjectAddress, offset: int, end: int, version: str, target: ReadTarget) -> None:
        try:
            got = self._range(address, offset, end, version, target)
        except RangeRefusedError as error:
            now = self._status("reading", address)  # raises if the object is gone
            if version and now.version != version:
                raise changed(address.uri, version, now.version) from error
            if now.size_bytes < end:
                raise too_short(address.uri, now.size_bytes, offset, end) from error
            raise ModelSourceError(f"reading {address.uri}: got {error} for version {now.version}, which is there") from error
        if version and got != version:
            raise changed(address.uri, version, got)
        if target.missing:
            raise too_short(address.uri, end - target.missing, offset, end)


class ObjectWriter(FileWriter, ABC):
    """An object that is being written; buffers its last part. *One thread.*"""

    def __init__(self, address: ObjectAddress) -> None:
        self._address = address
        self._pending = bytearray()

    @abstractmethod
    def part_bytes(self) -> int:
        """Size of the current part."""

    @abstractmethod
    def _send(self, part: bytes) -> None:
        """Send a part that is not the last."""

    def write(self, data: memoryview) -> None:
        """Append bytes. A full part is sent once it is known not to be the last."""
        data = data.cast("B")
        while data:
            if len(self._pending) == self.part_bytes():
                self._send(self.take_pending())
            room = self.part_bytes() - len(self._pending)
            self._pending += data[:room]
            data = data[room:]

    def take_pending(self) -> bytes:
        """Return a copy of the pending bytes: an abandoned request may still be sending them."""
        part = bytes(self._pending)
        self._pending.clear()
        return part
