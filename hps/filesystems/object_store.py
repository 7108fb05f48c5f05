"""What S3 and Google Cloud Storage have in common: directories that are prefixes, reads of ranges, writes in parts."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed, too_short
from hps.filesystems.retries import retried

_PAGE_NAMES = 1000  # the limit of both services
_MOST_PAGES = 100
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class ObjectAddress:
    """Where an object, or a prefix of objects, is. *Immutable.*

    Attributes:
        uri: as it was given; holds no secrets.
        bucket: its name.
        key: name of the object, decoded, without slashes at its end; empty for the bucket itself.
        region: that the address names, if it names one.
    """

    uri: str
    bucket: str
    key: str
    region: str = ""

    @property
    def prefix(self) -> str:
        """What the keys of the objects below it begin with."""
        return f"{self.key}/" if self.key else ""


def without_secrets(uri: str) -> str:
    """An address as a message may show it: without credentials, and without the query of an https address."""
    place = re.sub(r"//(?:[^/]*|[^/]*:.*)@", "//...@", uri, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?...", place, flags=re.DOTALL) if place[:5].lower() == "https" else place


class RangeRefusedError(Exception):
    """The store refused a range: the object is gone, has another version, or ends before the range begins."""


class BodyBrokenError(Exception):
    """The body of an answer ended early or did not come."""


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """The answer to a read of a range. *One thread.*

    Attributes:
        version: of the object that it is part of.
        content_range: the header of that name; empty for a whole object.
        length: of the body, in bytes.
        receive: gives the next bytes, at most as many as it is asked for, and none at the end. Raises `BodyBrokenError`.
    """

    version: str
    content_range: str
    length: int
    receive: Callable[[int], bytes]


@dataclass(slots=True)
class _Reading:
    """What is still missing of a range. *One thread.*"""

    address: ObjectAddress
    offset: int
    rest: memoryview
    version: str

    @property
    def end(self) -> int:
        return self.offset + len(self.rest)


class ObjectStore(FileSystem):
    """Reads and writes objects by address. *Thread-safe.*

    A directory is a prefix: it exists as long as the key of an object begins with its name and a slash. A bucket always is a
    directory. A bucket that does not exist is an error, also of `exists`: nothing can be put there.

    A subclass asks its service. Each of its methods asks once, ends by `deadline` (of `time.monotonic`), and raises
    `ModelSourceError` for a failure that may pass, another `ModelFileError` for a refusal.
    """

    receive_bytes: ClassVar[int]
    """How many bytes of a body are received at a time."""

    @abstractmethod
    def _address(self, uri: str) -> ObjectAddress:
        """Take an address apart. Raises `ModelFileError` if it is none."""

    @abstractmethod
    def _find(self, doing: str, address: ObjectAddress, deadline: float) -> FileStatus | None:
        """Status of an object; None where there is none."""

    @abstractmethod
    def _page(self, doing: str, address: ObjectAddress, most: int, token: str, deadline: float) -> tuple[list[str], str]:
        """At most so many keys and prefixes right below an address, and the token of the next page if there is one.

        Raises:
            ModelFileNotFoundError: there is no such bucket.
        """

    @abstractmethod
    def _range(
        self, address: ObjectAddress, offset: int, end: int, version: str, deadline: float
    ) -> AbstractContextManager[RangeAnswer]:
        """Ask for bytes of an object, of this version unless it is empty.

        Raises:
            RangeRefusedError: there are no such bytes.
        """

    @abstractmethod
    def _remove(self, address: ObjectAddress, deadline: float) -> None:
        """Remove an object if it is there."""

    def exists(self, path: str) -> bool:
        """Tell whether an object or a prefix of objects is there."""
        address, doing = self._address(path), "looking for"

        def attempt(deadline: float) -> bool:
            found = address.key and self._find(doing, address, deadline) is not None
            return bool(found) or self._is_directory(doing, address, deadline)

        return retried(self.settings, attempt)

    def status(self, path: str) -> FileStatus:
        """Size and version of an object."""
        address = self._object(path, "opening")
        return retried(self.settings, lambda deadline: self._status("opening", address, deadline))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` from byte `offset`. A read that breaks off goes on where it stopped, with the same version."""
        reading = _Reading(self._object(path, "reading"), offset, buffer, version)
        if buffer.nbytes:
            retried(self.settings, lambda deadline: self._read(reading, deadline))

    def directories(self, path: str) -> list[str]:
        """Names of the prefixes right below a prefix, sorted; at most 100,000."""
        return sorted(name.rstrip("/") for name in self._names(path) if name.endswith("/"))

    def list(self, path: str) -> list[str]:
        """Names of the objects and prefixes right below a prefix, sorted; at most 100,000."""
        return sorted({name.rstrip("/") for name in self._names(path)})

    def _names(self, path: str) -> set[str]:
        address = self._address(path)
        return retried(self.settings, lambda deadline: self._list(address, deadline))

    def delete(self, path: str) -> None:
        """Remove an object."""
        address = self._object(path, "removing")
        retried(self.settings, lambda deadline: self._remove(address, deadline))

    def _object(self, path: str, doing: str) -> ObjectAddress:
        address = self._address(path)
        if not address.key:
            raise ModelFileError(f"{doing} {path}: it is the bucket {address.bucket!r} itself, expected an object in it")
        return address

    def _status(self, doing: str, address: ObjectAddress, deadline: float) -> FileStatus:
        if (found := self._find(doing, address, deadline)) is not None:
            return found
        if self._is_directory(doing, address, deadline):
            raise ModelFileError(f"{doing} {address.uri}: it is a directory (a prefix of objects), expected an object")
        raise ModelFileNotFoundError(f"{doing} {address.uri}: there is no such object in bucket {address.bucket!r}")

    def _is_directory(self, doing: str, address: ObjectAddress, deadline: float) -> bool:
        found, _ = self._page(doing, address, 1, "", deadline)
        return bool(found) or not address.key

    def _list(self, address: ObjectAddress, deadline: float) -> set[str]:
        """Names of what is right below an address; those of prefixes end with a slash."""
        found: set[str] = set()
        token = ""
        for _ in range(_MOST_PAGES):
            page, token = self._page("listing", address, _PAGE_NAMES, token, deadline)
            found.update(name.removeprefix(address.prefix) for name in page)
            if not token:
                break
        else:
            raise ModelFileError(
                f"listing {address.uri}: it holds more than {len(found)} names, expected the directory of a model"
            )
        if found or not address.key:
            return {name for name in found if name.rstrip("/")}  # some tools put an empty object where a directory is
        if self._find("listing", address, deadline) is not None:
            raise ModelFileError(f"listing {address.uri}: it is an object, expected a directory (a prefix of objects)")
        raise ModelFileNotFoundError(f"listing {address.uri}: there is no such directory in bucket {address.bucket!r}")

    def _read(self, reading: _Reading, deadline: float) -> None:
        # Half of what is left, so that there is time for another connection when this one only trickles.
        begun = time.monotonic()
        deadline = min(deadline, begun + max((deadline - begun) / 2, self.settings.timeout_s))
        address, end = reading.address, reading.end
        try:
            with self._range(address, reading.offset, end, reading.version, deadline) as answer:
                _check(reading, answer)
                while reading.rest:
                    if time.monotonic() > deadline:
                        raise BodyBrokenError("it came too slowly")
                    piece = answer.receive(min(len(reading.rest), self.receive_bytes))
                    if not piece:
                        raise BodyBrokenError("it ended early")
                    reading.rest[: len(piece)] = piece
                    reading.rest = reading.rest[len(piece) :]
                    reading.offset += len(piece)
        except BodyBrokenError as error:
            raise ModelSourceError(
                f"reading {address.uri}: the body broke off ({error}), {len(reading.rest)} bytes of a part are missing; check "
                "the network and the store; if they are slow, lower model_source.parallel_reads or raise its deadline_s"
            ) from error
        except RangeRefusedError as error:
            now = self._status("reading", address, deadline)  # raises if the object is gone
            if reading.version and now.version != reading.version:
                raise changed(address.uri, reading.version, now.version) from error
            if now.size_bytes < end:
                raise too_short(address.uri, now.size_bytes, reading.offset, end) from error
            raise ModelSourceError(f"reading {address.uri}: got {error} for version {now.version}, which is there") from error


def _check(reading: _Reading, answer: RangeAnswer) -> None:
    """Check that an answer has the expected version and range, before a byte of it is used."""
    if reading.version and answer.version != reading.version:
        raise changed(reading.address.uri, reading.version, answer.version)
    reading.version = answer.version
    match = _CONTENT_RANGE.fullmatch(answer.content_range)
    first, last = (int(match[1]), int(match[2])) if match else (0, answer.length - 1)
    if (first, last) == (reading.offset, reading.end - 1):
        return
    if match and first == reading.offset and last < reading.end - 1:
        raise too_short(reading.address.uri, last + 1, first, reading.end)
    raise ModelSourceError(
        f"reading {reading.address.uri}: got bytes {first} to {last + 1}, expected bytes {reading.offset} to {reading.end}; "
        "the server does not serve ranges as it should"
    )


class ObjectWriter(FileWriter, ABC):
    """An object that is being written; the last part of it is held here. *One thread.*

    An object that fits into one part is sent at once by `commit`, a longer one part by part.
    """

    def __init__(self, settings: ModelSourceConfig, address: ObjectAddress) -> None:
        self._settings = settings
        self._address = address
        self._size_bytes = 0
        self._pending = bytearray()
        self._upload = ""  # names the upload in parts, from the first part until it has ended

    @abstractmethod
    def _part_bytes(self) -> int:
        """Size of the part that is being collected."""

    @abstractmethod
    def _send(self, part: bytes) -> None:
        """Send a part that is not the last."""

    @abstractmethod
    def _finish(self, part: bytes) -> None:
        """Send the last part, and check that the object is the right one. Once it is there, `_upload` is empty."""

    @abstractmethod
    def _cancel(self) -> None:
        """Drop the parts of `_upload`, if the service answers. Never raises."""

    def write(self, data: memoryview) -> None:
        """Append bytes. A full part is sent once it is known not to be the last."""
        data = data.cast("B")
        self._size_bytes += len(data)
        while data:
            if len(self._pending) == self._part_bytes():
                self._send(self._take())
            room = self._part_bytes() - len(self._pending)
            self._pending += data[:room]
            data = data[room:]

    def commit(self) -> None:
        """Make the object whole; it replaces one of the same name."""
        self._finish(self._take())

    def abort(self) -> None:
        """Drop what was sent."""
        self._pending.clear()
        if self._upload:
            self._cancel()
            self._upload = ""

    def _take(self) -> bytes:
        """What is pending, as bytes of its own: a request that was left behind may still be sending them."""
        part = bytes(self._pending)
        self._pending.clear()
        return part
