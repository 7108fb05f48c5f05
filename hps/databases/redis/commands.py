"""A request to Redis and the reader of its reply: the base of them all, and the one for short requests."""

from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np

from hps.databases.redis.replies import NO_REPLY, Bytes, find_end, parse
from hps.errors import DatabaseCorruptError

ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
"""What goes before a request to a node that is only about to get the slot."""


def bulk(value: bytes) -> bytes:
    """A string as an element of a request."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


def request(*arguments: bytes) -> bytes:
    """A whole request."""
    return b"*%d\r\n" % len(arguments) + b"".join(map(bulk, arguments))


def as_bytes(value: bytes) -> Bytes:
    """Bytes as kernels take them: (n,) uint8, read only."""
    return np.frombuffer(value, np.uint8)


class Buffer:
    """Bytes that are to be sent or have arrived, for kernels and for sockets. *One per connection.*"""

    __slots__ = ("array", "view")

    def __init__(self, size: int) -> None:
        self.array: Bytes = np.empty(size, np.uint8)
        self.view = self.array.data

    def grow(self, size: int, keep: int) -> None:
        """Make it at least `size` bytes and keep its first `keep`."""
        if size > self.array.size:
            array = np.empty(max(size, 2 * self.array.size), np.uint8)
            array[:keep] = self.array[:keep]
            self.array, self.view = array, array.data


def garbage(array: Bytes, at: int, end: int) -> DatabaseCorruptError:
    """The error for bytes [at, end) that are no reply to what was asked."""
    return DatabaseCorruptError(f"got {array[at : min(end, at + 40)].tobytes()!r}, wanted a reply to the request")


class Command(ABC):
    """One request and the reader of its reply. *One per call*; it may be sent again as long as no reply has come.

    Attributes:
        slot: hash slot of the one key that it names; the node that serves the slot gets it.
        size: most bytes that `write` writes.
        weight: bytes of the request or of its reply, whichever is known to take more.
        refusal: the error that Redis replied, or empty.
        done: whether the whole reply has been read.
    """

    __slots__ = ("done", "refusal", "size", "slot", "weight")

    def __init__(self, slot: int, size: int, weight: int = 0) -> None:
        self.slot = slot
        self.size = size
        self.weight = max(size, weight)
        self.refusal = ""
        self.done = False

    @abstractmethod
    def write(self, buffer: Buffer, at: int) -> int:
        """Write the request; returns where it ends."""

    @abstractmethod
    def read(self, array: Bytes, at: int, end: int) -> int:
        """Read what has arrived of the reply, [at, end); returns the first byte that is not read, and sets `done` at the end.

        Raises:
            DatabaseError: the reply is not one to this request; nothing that follows on the connection can be read.
        """

    def again(self) -> None:
        """Forget an error reply, to be sent again."""
        self.refusal = ""
        self.done = False

    def asking(self) -> list["Command"]:
        """What to send to a node that is only about to get the slot: `ASKING` goes before each request."""
        return [Ask(self.slot, ASKING), self]

    def read_refusal(self, array: Bytes, at: int, end: int) -> int:
        """Read an error reply, as `read` does."""
        line = array[at:end].tobytes()
        length = line.find(b"\r\n")
        if length < 0:
            return at
        self.refusal = line[1:length].decode(errors="backslashreplace")
        self.done = True
        return at + length + 2


class Ask(Command):
    """A request without many fields, or whose reply is kept whole: for everything but the vectors of a lookup.

    Attributes:
        raw: the reply as it came; empty until it is done.
    """

    __slots__ = ("_extent", "_request", "raw")

    def __init__(self, slot: int, request: bytes) -> None:
        super().__init__(slot, len(request))
        self._request = request
        self._extent = np.array([0, 1], np.int64)
        self.raw = b""

    @property
    def reply(self) -> Any:
        """The reply: bytes, int, None or a list of these."""
        return parse(self.raw)

    def write(self, buffer: Buffer, at: int) -> int:
        end = at + len(self._request)
        buffer.view[at:end] = self._request
        return end

    def again(self) -> None:
        super().again()
        self._extent[:] = 0, 1

    def read(self, array: Bytes, at: int, end: int) -> int:
        if at < end and array[at] == ord("-"):
            return self.read_refusal(array, at, end)
        after: int = find_end(array, at, end, self._extent)
        if after == NO_REPLY:
            raise garbage(array, at, end)
        if after < 0:
            return at
        self.raw = array[at:after].tobytes()
        self.done = True
        return after


class CheckMark(Ask):
    """GET of a partition's mark.

    Attributes:
        same: whether it is the one that was wanted.
    """

    __slots__ = ("_wanted", "same")

    def __init__(self, slot: int, request: bytes, mark: bytes) -> None:
        super().__init__(slot, request)
        self._wanted = bulk(mark)
        self.same = False

    def read(self, array: Bytes, at: int, end: int) -> int:
        after = at + len(self._wanted)
        if array[at : min(after, end)].tobytes() == self._wanted:
            self.same = self.done = True
            return after
        return super().read(array, at, end)
