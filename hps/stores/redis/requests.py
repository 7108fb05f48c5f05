"""Requests to Redis: short commands, and commands with many keys, which the bulk codec encodes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from hiredis import pack_command

from hps.errors import DatabaseCorruptError, TableWidthError
from hps.stores.redis.codec import (
    COMPLETE,
    FIELD_BYTES,
    GARBAGE,
    HITS,
    LENGTH,
    PHASE,
    ROW,
    WRONG_LENGTH,
    Bytes,
    read_rows,
    write_fields,
    write_rows,
)
from hps.types import BoolArray, IndexArray, KeyArray

# Touches a mark that differs from the expected one, so that Redis aborts a transaction that watches it. A full Redis allows the
# SET because a DEL precedes it.
_TOUCH_UNLESS: Final = """
local mark = redis.call('get', KEYS[1])
if mark ~= ARGV[1] then
    redis.call('del', KEYS[1])
    redis.call('set', KEYS[1], mark or '')
    if not mark then redis.call('del', KEYS[1]) end
end
return 1
"""
_UNDER_MARK: Final = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return -1 end
return redis.call(ARGV[2], KEYS[2], unpack(ARGV, 3))
"""
# Compares two sequences, 8 big-endian bytes each, as two 32-bit numbers: string comparison depends on the server's locale, and
# Lua's numbers have 53 bits.
_SEQUENCE: Final = """
local function above(a, b)
    local high, low = struct.unpack('>I4I4', a)
    local other_high, other_low = struct.unpack('>I4I4', b)
    return high > other_high or high == other_high and low > other_low
end
if redis.call('get', KEYS[1]) ~= ARGV[1] then return -1 end
local highest = redis.call('hget', KEYS[3], 'h')
"""
# Writes or removes rows, with the sequence after the highest applied one. A full Redis allows the second HSET because a write
# command precedes it.
_LAST: Final = (
    _SEQUENCE
    + """
if not highest or above(ARGV[3], highest) then highest = ARGV[3] end
local full = #string.match(highest, '\\255*$')
local last = string.sub(highest, 1, 7 - full) .. string.char(string.byte(highest, 8 - full) + 1) .. string.rep('\\0', full)
local reply, recorded = redis.call(ARGV[2], KEYS[2], unpack(ARGV, 4)), {'h', highest}
for i = 4, #ARGV, ARGV[2] == 'HSET' and 2 or 1 do
    recorded[#recorded + 1] = ARGV[i]
    recorded[#recorded + 1] = last
end
redis.call('hset', KEYS[3], unpack(recorded))
return reply
"""
)
# Applies changes, all of one kind, that are not older than the last change of their row, and reports which. Changes above the
# highest applied sequence skip the comparison per row.
_APPLY: Final = (
    _SEQUENCE
    + """
local rows = 5 + 2 * ARGV[2]
local write = (#ARGV - rows + 1) > tonumber(ARGV[2]) and 'hset' or 'hdel'
if not highest or above(ARGV[3], highest) then
    redis.call(write, KEYS[2], unpack(ARGV, rows))
    redis.call('hset', KEYS[3], 'h', ARGV[4], unpack(ARGV, 5, rows - 1))
    return 1
end
local fields, made, given, recorded = {}, {}, {}, {}
for i = 5, rows - 2, 2 do fields[#fields + 1] = ARGV[i] end
local known = redis.call('hmget', KEYS[3], unpack(fields))
for i, field in ipairs(fields) do
    local sequence = ARGV[4 + 2 * i]
    if known[i] and above(known[i], sequence) then
        made[i] = '0'
    else
        made[i] = '1'
        recorded[#recorded + 1] = field
        recorded[#recorded + 1] = sequence
        if write == 'hset' then
            given[#given + 1] = field
            given[#given + 1] = ARGV[rows - 1 + 2 * i]
        else
            given[#given + 1] = field
        end
    end
end
if #recorded > 0 then
    redis.call(write, KEYS[2], unpack(given))
    redis.call('hset', KEYS[3], 'h', above(ARGV[4], highest) and ARGV[4] or highest, unpack(recorded))
end
return table.concat(made)
"""
)
# Removes rows, and their sequences, whose last change is not above a sequence; rows without a change only if asked (1). Reports
# per row if it was removed (1), has a later change (2), or neither (0).
_EXPIRE: Final = (
    _SEQUENCE
    + """
local fields, found, due = {}, {}, {}
for i = 4, #ARGV do fields[#fields + 1] = ARGV[i] end
local known = redis.call('hmget', KEYS[3], unpack(fields))
for i, field in ipairs(fields) do
    if not known[i] and (ARGV[2] == '0' or redis.call('hexists', KEYS[2], field) == 0) then
        found[i] = '0'
    elseif known[i] and above(known[i], ARGV[3]) then
        found[i] = '2'
    else
        found[i] = '1'
        due[#due + 1] = field
    end
end
if #due > 0 then
    redis.call('hdel', KEYS[2], unpack(due))
    redis.call('hdel', KEYS[3], unpack(due))
end
return table.concat(found)
"""
)
_PROMOTE: Final = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return -1 end
local added = 0
for i = 2, #ARGV, 2 do added = added + redis.call('hsetnx', KEYS[2], ARGV[i], ARGV[i + 1]) end
return added
"""


# Up to this many keys, a script that compares the mark and writes is faster than a transaction; for thousands of keys it takes
# three times as long.
_SCRIPTED_KEYS: Final = 256
MOST_ORDERED: Final = 1024
"""Keys that a script writes with their sequences. Lua passes at most 8,000 words to a command."""


class Buffer:
    """A buffer of outgoing or received bytes, for kernels and sockets. *One per connection.*"""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.view = memoryview(self.bytes)
        self.array: Bytes = np.frombuffer(self.bytes, np.uint8)

    def grow(self, size: int, used: int) -> None:
        """Grow to at least `size` bytes, preserving the first `used`."""
        if size > len(self.bytes):
            larger = Buffer(max(size, 2 * len(self.bytes)))
            larger.view[:used] = self.view[:used]
            self.bytes, self.view, self.array = larger.bytes, larger.view, larger.array


class Request(ABC):
    """A request and its reply. *One per call*; may be sent repeatedly until its reply arrives.

    Attributes:
        slot: hash slot of its key, which determines the node.
        size: maximum bytes that `write` writes.
        weight: bytes of the request or its reply, the larger as far as known.
        asking: whether to send ASKING first, to a node that is importing the slot.
        once: whether it must not be repeated if its outcome is unknown. Its reply is then None.
        preceding: number of replies before its own.
        redirected: whether it was sent to another node, possibly after requests that followed it in the call.
        refused: whether Redis replied with a refusal.
        error: Redis' error reply, or None.
    """

    asking = False
    once = False
    preceding = 0
    redirected = False
    refused = False
    reply: Any = None
    error: Exception | None = None

    def __init__(self, slot: int, size: int, weight: int = 0) -> None:
        self.slot = slot
        self.size = size
        self.weight = max(size, weight)

    @abstractmethod
    def write(self, buffer: Buffer, at: int) -> int:
        """Write the request at `at`; return its end."""


class Call(Request):
    """A short command. Its reply is parsed by redis-py: bytes, int, None or a list of these."""

    def __init__(self, slot: int, *words: str | bytes | int) -> None:
        self._packed: bytes = pack_command(words)  # type: ignore[arg-type]
        super().__init__(slot, len(self._packed))

    def write(self, buffer: Buffer, at: int) -> int:
        end = at + self.size
        buffer.view[at:end] = self._packed
        return end


class GetMark(Call):
    """GET of a partition's mark. The expected reply is recognised without the parser."""

    def __init__(self, slot: int, key: bytes, expected: bytes) -> None:
        super().__init__(slot, "GET", key)
        self.expected = expected
        self.likely = b"$%d\r\n%b\r\n" % (len(expected), expected)


@dataclass(frozen=True, slots=True)
class Guard:
    """The mark required for writes to a partition. *Immutable.*

    Attributes:
        key: key of the mark.
        mark: required value.
        sequences: key of the hash with the order of changes; empty if not kept. Writes become the latest change; at most
            `MOST_ORDERED` keys at once.
        highest: highest sequence known to be applied, 8 big-endian bytes.
    """

    key: bytes
    mark: bytes
    sequences: bytes = b""
    highest: bytes = bytes(8)

    PRECEDING = 5  # replies: to WATCH, EVAL, MULTI, GET, and QUEUED for the command

    @property
    def start(self) -> bytes:
        # A script that compares the mark and writes is slow for many keys. So a transaction watches the mark, and a short
        # script touches a wrong one, which aborts the transaction. The GET inside makes a node refuse the transaction if it
        # migrates the slot and has moved the mark already: the keys may then be on two nodes.
        watch, touch = ("WATCH", self.key), ("EVAL", _TOUCH_UNLESS, 1, self.key, self.mark)
        return b"".join(map(pack_command, (watch, touch, ("MULTI",), ("GET", self.key))))  # type: ignore[arg-type]

    end = b"*1\r\n$4\r\nEXEC\r\n"


@lru_cache(maxsize=16)
def _framed(value: bytes) -> Bytes:
    """Encode a value as in a request; an empty value stands for none."""
    return np.frombuffer(b"$%d\r\n%b\r\n" % (len(value), value) if value else b"", np.uint8)


@lru_cache(maxsize=16)
def _framed_size(size: int) -> Bytes:
    return np.frombuffer(b"$%d\r\n" % size, np.uint8)


@lru_cache(maxsize=4096)
def _packed(words: tuple[Any, ...]) -> bytes:
    """Encode the words of a command without their count; cached, since commands repeat."""
    packed: bytes = pack_command(words)
    return packed[packed.index(b"\r") :]


class SendKeys(Request):
    """A command that ends with the keys `keys[order]` (HDEL), or with such keys and values (HSET). Its reply is a number.

    Args:
        words: words before the keys.
        keys: (n,) int64.
        order: (count,) int64: positions of the sent keys in `keys`.
        value: value of every key; empty if keys have none, or if a subclass writes them.
        value_bytes: encoded bytes of one key's value, if a subclass writes it.
        reply_bytes: maximum bytes of the reply per key.
        last_word: of `words`, if it differs from call to call.
        guard: required mark; with another mark Redis refuses the command, and the reply is None or -1.
    """

    def __init__(
        self,
        slot: int,
        words: tuple[Any, ...],
        keys: KeyArray,
        order: IndexArray,
        value: bytes = b"",
        *,
        value_bytes: int = 0,
        reply_bytes: int = 0,
        last_word: bytes = b"",
        guard: Guard | None = None,
    ) -> None:
        self._keys = keys
        self._order = order
        self._value = _framed(value)
        self.count = order.size
        value_bytes += self._value.size
        if guard and guard.sequences:
            command, key = words
            keys_of = (guard.key, key, guard.sequences)
            last_word = guard.highest
            words, self.once, guard = ("EVAL", _LAST, 3, *keys_of, guard.mark, command), True, None
        elif guard and (self.count <= _SCRIPTED_KEYS or not value_bytes):  # a full Redis queues nothing, but scripts may delete
            command, key = words
            words, self.once, guard = ("EVAL", _UNDER_MARK, 2, guard.key, key, guard.mark, command), True, None
        count = len(words) + bool(last_word) + (2 if value_bytes else 1) * self.count
        self._start = b"*%d%b" % (count, _packed(words))
        if last_word:
            self._start += b"$%d\r\n%b\r\n" % (len(last_word), last_word)
        self._end = b""
        if guard:
            self._start, self._end = guard.start + self._start, guard.end
            self.once, self.preceding = True, guard.PRECEDING
        size = len(self._start) + (FIELD_BYTES + value_bytes) * self.count + len(self._end)
        super().__init__(slot, size, reply_bytes * self.count)

    def write(self, buffer: Buffer, at: int) -> int:
        end = at + len(self._start)
        buffer.view[at:end] = self._start
        start = self._write_keys(buffer.array, end)
        end = start + len(self._end)
        buffer.view[start:end] = self._end
        return end

    def _write_keys(self, array: Bytes, at: int) -> int:
        end: int = write_fields(self._keys, self._order, self._value, array, at)
        return end


class StoreRows(SendKeys):
    """HSET of vectors. Its reply is the number of new keys.

    Args:
        rows: (n, 4 dim) uint8.
        promotion: add absent keys only; with another mark the reply is -1. Other arguments as for `SendKeys`.
    """

    def __init__(
        self,
        slot: int,
        key: bytes,
        keys: KeyArray,
        order: IndexArray,
        header: Bytes,
        rows: Bytes,
        guard: Guard | None = None,
        *,
        promotion: bool = False,
    ) -> None:
        self._header = header
        self._rows = rows
        words: tuple[Any, ...] = ("HSET", key)
        if guard and promotion:
            words, self.once, guard = ("EVAL", _PROMOTE, 2, guard.key, key, guard.mark), True, None
        super().__init__(slot, words, keys, order, value_bytes=header.size + rows.shape[1] + 2, guard=guard)

    def _write_keys(self, array: Bytes, at: int) -> int:
        end: int = write_rows(self._keys, self._order, self._header, self._rows, array, at)
        return end


class ApplyRows(Request):
    """Changes of a log that store vectors, or that remove rows. Changes older than the last one of their row have no effect.

    The reply is -1 with another mark.

    Args:
        guard: required mark, with the hash of the order of changes.
        keys: (n,) int64, distinct.
        order: (count,) int64: positions of the sent keys, 1 to `MOST_ORDERED`.
        sequences: (n, 8) uint8, big-endian.
        rows: (n, 4 dim) uint8; None to remove the rows.
    """

    once = True

    def __init__(
        self,
        slot: int,
        key: bytes,
        guard: Guard,
        keys: KeyArray,
        order: IndexArray,
        sequences: Bytes,
        header: Bytes,
        rows: Bytes | None,
    ) -> None:
        self.order = order
        self._keys = keys
        self._sequences = sequences
        self._header = header
        self._rows = rows
        count = order.size
        sent = sequences[order].view(">i8")
        ends = (int(sent.min()).to_bytes(8), int(sent.max()).to_bytes(8))
        words = ("EVAL", _APPLY, 3, guard.key, key, guard.sequences, guard.mark, count, *ends)
        packed: bytes = pack_command(words)  # type: ignore[arg-type]
        self._start = b"*%d%b" % (len(words) + (3 if rows is None else 4) * count, packed[packed.index(b"\r") :])
        row_bytes = 0 if rows is None else header.size + rows.shape[1] + 2
        super().__init__(slot, len(self._start) + (3 * FIELD_BYTES + row_bytes) * count)

    def write(self, buffer: Buffer, at: int) -> int:
        end = at + len(self._start)
        buffer.view[at:end] = self._start
        end = write_rows(self._keys, self.order, _framed_size(8), self._sequences, buffer.array, end)
        if self._rows is None:
            return int(write_fields(self._keys, self.order, _framed(b""), buffer.array, end))
        return int(write_rows(self._keys, self.order, self._header, self._rows, buffer.array, end))

    def applied(self) -> BoolArray:
        flags = b"1" * self.order.size if self.reply == 1 else self.reply
        applied: BoolArray = np.frombuffer(flags, np.uint8) == ord("1")
        return applied


class ExpireRows(SendKeys):
    """Removes the rows whose last change has at most this sequence, and their place in the order of changes.

    The reply is -1 with another mark.

    Args:
        guard: required mark, with the hash of the order of changes.
        order: (count,) int64: positions of the sent keys, 1 to `MOST_ORDERED`. Other arguments as for `SendKeys`.
        loaded: remove rows without a change, too.
    """

    once = True

    def __init__(
        self, slot: int, key: bytes, guard: Guard, keys: KeyArray, order: IndexArray, sequence: int, *, loaded: bool
    ) -> None:
        self.order = order
        words = ("EVAL", _EXPIRE, 3, guard.key, key, guard.sequences, guard.mark, int(loaded))
        super().__init__(slot, words, keys, order, last_word=sequence.to_bytes(8))

    def found(self) -> Bytes:
        """Return 1 for each removed row, 2 for each with a later change, and 0 for the others, (count,)."""
        digits: Bytes = np.frombuffer(self.reply, np.uint8) - ord("0")
        return digits


class FetchRows(SendKeys):
    """HMGET of vectors into the caller's arrays. Its reply is the number of keys found.

    Args:
        out: (n, 4 dim) uint8; rows of found keys are written.
        found: (n,) bool; set for each row once it is complete. Other arguments as for `SendKeys`.
    """

    def __init__(
        self, slot: int, key: bytes, keys: KeyArray, order: IndexArray, header: Bytes, out: Bytes, found: BoolArray
    ) -> None:
        self._header = header
        self._out = out
        self._found = found
        self._state = np.zeros(4, np.int64)
        super().__init__(slot, ("HMGET", key), keys, order, reply_bytes=header.size + out.shape[1] + 2)

    def read(self, array: Bytes, at: int, end: int) -> int:
        """Read the received part of the reply, [at, end); return the first unread position.

        `reply` is set at the end of the reply.

        Raises:
            DatabaseCorruptError: the bytes are no reply to this request, or a value is no vector.
            TableWidthError: a vector has another width.
        """
        state = self._state
        after: int = read_rows(array, at, end, state, self._order, self._header, self._out, self._found)
        phase = state[PHASE]
        if phase == COMPLETE:
            self.reply = int(state[HITS])
        elif phase == WRONG_LENGTH:
            raise self._wrong_length()
        elif phase == GARBAGE:
            raise DatabaseCorruptError(f"got {array[after : min(end, after + 40)].tobytes()!r}, expected a reply to HMGET")
        return after

    def _wrong_length(self) -> Exception:
        key = int(self._keys[self._order[self._state[ROW]]])
        length, width = int(self._state[LENGTH]), self._out.shape[1]
        text = f"key {key} has a value of {length} bytes, expected {width} ({width // 4} float32)"
        if length and length % 4 == 0:
            return TableWidthError(f"{text}: the table holds vectors of {length // 4} elements; drop it, or correct the width")
        return DatabaseCorruptError(f"{text}: it is no vector; insert the key again, or drop the table")
