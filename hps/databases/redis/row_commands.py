"""Requests with many keys of one partition, written and read in bulk: one class a kind of request."""

from typing import Final

import numpy as np

from hps.databases.redis.commands import ASKING, Buffer, Command, as_bytes, bulk, garbage
from hps.databases.redis.protocol import FIELD_BYTES, write_counts, write_fields, write_rows
from hps.databases.redis.replies import (
    GARBAGE,
    HITS,
    LENGTH,
    PHASE,
    REFUSED,
    ROW,
    WHOLE,
    WRONG_LENGTH,
    Bytes,
    read_rows,
)
from hps.errors import DatabaseCorruptError, TableWidthError
from hps.types import BoolArray, IndexArray, KeyArray

_NOTHING: Final = np.empty(0, np.uint8)
# What stands in place of a count was written under another policy; such a row counts as not used, and goes first.
_NO_COUNT: Final = ("ERR hash value is not an integer", "ERR increment or decrement would overflow")
_COUNT_BYTES: Final = 26  # of a count in decimal, as an element


class FetchRows(Command):
    """HMGET of keys of one partition; found vectors land in the caller's arrays.

    Args:
        prefix: the request from behind its first line to the first field.
        keys: (n,) int64.
        order: (count,) int64: positions in `keys` that are asked for.
        header: what precedes a vector in the reply.
        out: (n, 4 dim) uint8.
        found: (n,) bool.

    Attributes:
        count: how many keys are asked for.
    """

    __slots__ = ("_found", "_header", "_keys", "_order", "_out", "_prefix", "_state", "count")

    def __init__(
        self, slot: int, prefix: bytes, keys: KeyArray, order: IndexArray, header: Bytes, out: Bytes, found: BoolArray
    ) -> None:
        self.count = order.size
        super().__init__(slot, _start_bytes(prefix) + FIELD_BYTES * order.size, (header.size + out.shape[1] + 2) * order.size)
        self._prefix = prefix
        self._keys = keys
        self._order = order
        self._header = header
        self._out = out
        self._found = found
        self._state = np.zeros(4, np.int64)

    @property
    def hits(self) -> int:
        """Vectors found so far."""
        return int(self._state[HITS])

    def write(self, buffer: Buffer, at: int) -> int:
        at = _write_start(buffer, at, self.count + 2, self._prefix)
        end: int = write_fields(self._keys, self._order, _NOTHING, _NOTHING, buffer.array, at)
        return end

    def read(self, array: Bytes, at: int, end: int) -> int:
        state = self._state
        after: int = read_rows(array, at, end, state, self._order, self._header, self._out, self._found)
        phase = state[PHASE]
        if phase == WHOLE:
            self.done = True
        elif phase == REFUSED:
            after = self.read_refusal(array, after, end)
        elif phase == WRONG_LENGTH:
            raise self._wrong_length()
        elif phase == GARBAGE:
            raise garbage(array, after, end)
        return after

    def again(self) -> None:
        super().again()
        self._state[:] = 0

    def _wrong_length(self) -> Exception:
        key = int(self._keys[self._order[self._state[ROW]]])
        length, width = int(self._state[LENGTH]), self._out.shape[1]
        text = f"key {key} has a value of {length} bytes, wanted {width} ({width // 4} float32)"
        if length and length % 4 == 0:
            return TableWidthError(f"{text}: the table holds vectors of {length // 4} elements; drop it, or mend the width")
        return DatabaseCorruptError(f"{text}: it is no vector; insert the key again, or drop the table")


class _Integer(Command):
    """A request whose reply is a number.

    Attributes:
        number: the reply.
    """

    __slots__ = ("number",)

    def __init__(self, slot: int, size: int) -> None:
        super().__init__(slot, size)
        self.number = 0

    def read(self, array: Bytes, at: int, end: int) -> int:
        if at == end:
            return at
        if array[at] == ord("-"):
            return self.read_refusal(array, at, end)
        line = array[at : min(end, at + 24)].tobytes()
        length = line.find(b"\r\n")
        if (length < 0 and len(line) == 24) or line[:1] != b":" or (length > 0 and not line[1:length].lstrip(b"-").isdigit()):
            raise garbage(array, at, end)
        if length < 0:
            return at
        self.number = int(line[1:length])
        self.done = True
        return at + length + 2


class StoreRows(_Integer):
    """HSET of vectors; the number is of fields that were new. Arguments as for `FetchRows`, `rows` (n, 4 dim) uint8."""

    __slots__ = ("_header", "_keys", "_order", "_prefix", "_rows")

    def __init__(self, slot: int, prefix: bytes, keys: KeyArray, order: IndexArray, header: Bytes, rows: Bytes) -> None:
        super().__init__(slot, _start_bytes(prefix) + (FIELD_BYTES + header.size + rows.shape[1] + 2) * order.size)
        self._prefix = prefix
        self._keys = keys
        self._order = order
        self._header = header
        self._rows = rows

    def write(self, buffer: Buffer, at: int) -> int:
        at = _write_start(buffer, at, 2 * self._order.size + 2, self._prefix)
        end: int = write_rows(self._keys, self._rows, self._order, self._header, buffer.array, at)
        return end


class WriteFields(_Integer):
    """A request with many fields (HDEL), or many fields of one value (HSET): the value is `after`, as an element.

    `before` is how many elements the prefix has.
    """

    __slots__ = ("_after", "_before", "_keys", "_order", "_prefix")

    def __init__(
        self, slot: int, prefix: bytes, keys: KeyArray, order: IndexArray, after: bytes = b"", before: int = 2
    ) -> None:
        super().__init__(slot, _start_bytes(prefix) + (FIELD_BYTES + len(after)) * order.size)
        self._prefix = prefix
        self._keys = keys
        self._order = order
        self._after = as_bytes(after)
        self._before = before

    def write(self, buffer: Buffer, at: int) -> int:
        elements = self._before + (2 if self._after.size else 1) * self._order.size
        at = _write_start(buffer, at, elements, self._prefix)
        end: int = write_fields(self._keys, self._order, _NOTHING, self._after, buffer.array, at)
        return end


class WriteCounts(_Integer):
    """HSET of a number, in decimal, for each key."""

    __slots__ = ("_counts", "_keys", "_prefix")

    def __init__(self, slot: int, prefix: bytes, keys: KeyArray, counts: IndexArray) -> None:
        super().__init__(slot, _start_bytes(prefix) + (FIELD_BYTES + _COUNT_BYTES) * keys.size)
        self._prefix = prefix
        self._keys = keys
        self._counts = counts

    def write(self, buffer: Buffer, at: int) -> int:
        at = _write_start(buffer, at, 2 * self._keys.size + 2, self._prefix)
        end: int = write_counts(self._keys, self._counts, buffer.array, at)
        return end


class Increments(Command):
    """HINCRBY by 1 of each key: a request and a reply for each, since Redis has none for several fields."""

    __slots__ = ("_after", "_before", "_keys", "_lines", "_order")

    def __init__(self, slot: int, prefix: bytes, keys: KeyArray, order: IndexArray) -> None:
        self._before = as_bytes(b"*4\r\n" + prefix)
        self._after = as_bytes(bulk(b"1"))
        super().__init__(slot, (len(ASKING) + self._before.size + FIELD_BYTES + self._after.size) * order.size)
        self._keys = keys
        self._order = order
        self._lines = order.size

    def write(self, buffer: Buffer, at: int) -> int:
        end: int = write_fields(self._keys, self._order, self._before, self._after, buffer.array, at)
        return end

    def read(self, array: Bytes, at: int, end: int) -> int:
        ends = at + np.flatnonzero(array[at:end] == ord("\n"))[: self._lines]
        starts = np.concatenate([[at], ends + 1])[: ends.size]
        for start, stop in zip(starts[array[starts] == ord("-")], ends[array[starts] == ord("-")], strict=True):
            refusal = array[start + 1 : stop - 1].tobytes().decode(errors="backslashreplace")
            if not refusal.startswith(_NO_COUNT):
                self.refusal = refusal
        if not np.isin(array[starts], (ord(":"), ord("-"), ord("+"))).all():
            raise garbage(array, at, end)
        self._lines -= ends.size
        self.done = self._lines == 0
        return int(ends[-1]) + 1 if ends.size else at

    def again(self) -> None:
        super().again()
        self._lines = self._order.size

    def asking(self) -> list[Command]:
        if not self._before.tobytes().startswith(ASKING):
            self._before = as_bytes(ASKING + self._before.tobytes())
        self._lines = 2 * self._order.size
        return [self]


def _start_bytes(prefix: bytes) -> int:
    return len(prefix) + 16


def _write_start(buffer: Buffer, at: int, elements: int, prefix: bytes) -> int:
    start = b"*%d\r\n%b" % (elements, prefix)
    end = at + len(start)
    buffer.view[at:end] = start
    return end
