"""Replies of Redis, read as their bytes arrive: kernels pass over headers, vectors and misses without an object a key.

A reply to HMGET holds, for each field, `$<4 dim>` and a vector, or `$-1`. A kernel never waits for the size that it expects:
it reads what is there, checks every header that it passes, and says how far it got.
"""

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.databases.redis.protocol import FLAGS, INT, INTEGERS, KEYS, READ, WRITTEN_ROWS, kernel, njit
from hps.errors import DatabaseCorruptError
from hps.types import IndexArray

Bytes: TypeAlias = npt.NDArray[np.uint8]

HEADER, ROWS, WHOLE, REFUSED, WRONG_LENGTH, GARBAGE = range(6)
"""How far a reply to HMGET is read: before its first line, in its rows, after it; or why it cannot be: it is an error of
Redis, a value has another length, the bytes are no such reply."""
PHASE, ROW, HITS, LENGTH = range(4)
"""What the four numbers of its reader's state are: the phase, rows passed, rows found, the wrong length."""
INCOMPLETE: Final = -1
NO_REPLY: Final = -2

_CR, _LF, _DOLLAR, _STAR, _MINUS, _COLON, _PLUS, _ZERO, _NINE = (np.uint8(ord(c)) for c in "\r\n$*-:+09")


@njit(inline="always", cache=True)
def _number(buffer, at, end):  # type: ignore[no-untyped-def]
    """The number of a header line from behind its type, and the position after its line.

    The position is INCOMPLETE when the line has not wholly arrived and NO_REPLY when it holds anything else.
    """
    value = np.int64(0)
    sign = 1
    digits = 0
    while at < end and digits <= 19:
        byte = buffer[at]
        if byte == _CR:
            if at + 1 >= end:
                return 0, INCOMPLETE
            if buffer[at + 1] != _LF or digits == 0:
                return 0, NO_REPLY
            return sign * value, at + 2
        if byte == _MINUS and digits == 0 and sign == 1:
            sign = -1
        elif _ZERO <= byte <= _NINE:
            value = 10 * value + np.int64(byte - _ZERO)
            digits += 1
        else:
            return 0, NO_REPLY
        at += 1
    return 0, INCOMPLETE if digits <= 19 else NO_REPLY


@njit(nogil=True, cache=True)
def _miss(buffer, at, end, header_size, width, state):  # type: ignore[no-untyped-def]
    """Pass over a miss; returns -1 where it is none: a row of which a part has arrived, or, as `state` then says, an error."""
    if at >= end:
        return -1
    length, after = np.int64(0), np.int64(NO_REPLY)
    if buffer[at] == _DOLLAR:
        length, after = _number(buffer, at + 1, end)
    if after == INCOMPLETE:
        return -1
    if after == NO_REPLY or length < -1:
        state[PHASE] = GARBAGE
        return -1
    if length == -1:
        return after
    if length != width:
        state[PHASE] = WRONG_LENGTH
        state[LENGTH] = length
    elif after - at != header_size:
        state[PHASE] = GARBAGE  # the right length, written in another way: no Redis does that
    return -1


@kernel(INT, READ, INT, INT, INTEGERS, KEYS, READ, WRITTEN_ROWS, FLAGS)
def read_rows(buffer, at, end, state, order, header, out, found):  # type: ignore[no-untyped-def]
    """Read what has arrived of a reply to HMGET: each value into its row of `out`, which is then marked in `found`.

    Args:
        buffer: bytes of replies; those of [at, end) have arrived and are not yet read.
        state: (4,) int64: phase, rows passed, rows found, the wrong length; changed.
        order: (rows,) int64: the row of `out` of each value, in the order of the request.
        header: what must precede a value, `$<4 dim>` and its line end.
        out: (n, 4 dim) uint8.
        found: (n,) bool.

    Returns:
        The first byte that is not read: at a row that has not wholly arrived, after the reply, or at what is wrong.
    """
    if state[PHASE] == HEADER and at < end:
        if buffer[at] == _MINUS:
            state[PHASE] = REFUSED
            return at
        if buffer[at] != _STAR:
            state[PHASE] = GARBAGE
            return at
        count, after = _number(buffer, at + 1, end)
        if after == INCOMPLETE:
            return at
        if after == NO_REPLY or count != order.size:
            state[PHASE] = GARBAGE
            return at
        at = after
        state[PHASE] = ROWS
    if state[PHASE] != ROWS:
        return at
    # Unsigned, since numba looks whether a signed index counts from the end, and then copies byte by byte.
    width, start, header_size = np.uint64(out.shape[1]), np.uint64(at), np.uint64(header.size)
    size = header_size + width + np.uint64(2)
    row = state[ROW]
    while row < order.size:
        whole = np.uint64(end) - start >= size
        if whole:
            for j in range(header_size):
                whole &= buffer[start + j] == header[j]
        if whole:
            if buffer[start + size - np.uint64(2)] != _CR or buffer[start + size - np.uint64(1)] != _LF:
                state[PHASE] = GARBAGE
                break
            place, value = np.uint64(order[row]), start + header_size
            for j in range(width):
                out[place, j] = buffer[value + j]
            found[place] = True
            state[HITS] += 1
            start += size
        else:
            after = _miss(buffer, np.int64(start), end, header.size, out.shape[1], state)
            if after < 0:
                break
            start = np.uint64(after)
        row += 1
    state[ROW] = row
    if row == order.size and state[PHASE] == ROWS:
        state[PHASE] = WHOLE
    return np.int64(start)


@kernel(INT, READ, INT, INT, INTEGERS)
def find_end(buffer, at, end, state):  # type: ignore[no-untyped-def]
    """Find the end of any reply, nested ones included.

    Args:
        buffer: bytes of replies; those of [at, end) have arrived.
        state: (2,) int64: bytes of the reply that are already known to be whole, and elements that must still follow;
            (0, 1) at first; changed.

    Returns:
        The position after the reply, -1 when more bytes must arrive, -2 when the bytes are no reply.
    """
    position = at + state[0]
    while state[1] > 0:
        if position >= end:
            return INCOMPLETE
        kind = buffer[position]
        if kind in (_DOLLAR, _STAR):
            number, after = _number(buffer, position + 1, end)
            if after < 0:
                return after
            if number < -1 or number > 1 << 30:
                return NO_REPLY
            if kind == _STAR:
                state[1] += max(number, 0)
            elif number >= 0:
                after += number + 2
                if after > end:
                    return INCOMPLETE
                if buffer[after - 2] != _CR or buffer[after - 1] != _LF:
                    return NO_REPLY
        elif kind in (_PLUS, _MINUS, _COLON):
            after = position + 1
            while after < end and buffer[after] != _LF:
                after += 1
            if after == end:
                return INCOMPLETE if after - position < 65536 else NO_REPLY
            after += 1
        else:
            return NO_REPLY
        position = after
        state[0] = position - at
        state[1] -= 1
    return position


@kernel(INT, READ, INT, INT, INTEGERS, INTEGERS)
def _find_elements(raw, at, end, starts, lengths):  # type: ignore[no-untyped-def]
    """List where the bulk strings of [at, end) are; returns how many there are, NO_REPLY for anything but bulk strings."""
    n = 0
    while at < end:
        if raw[at] != _DOLLAR:
            return NO_REPLY
        length, after = _number(raw, at + 1, end)
        if after < 0 or length < 0 or after + length + 2 > end or n == starts.size:
            return NO_REPLY
        starts[n] = after
        lengths[n] = length
        at = after + length + 2
        n += 1
    return n


def elements(raw: Bytes, at: int, end: int) -> tuple[IndexArray, IndexArray]:
    """Where the bulk strings of a flat reply begin, and how long each is: [at, end) is behind its `*<n>` lines.

    Raises:
        DatabaseCorruptError: there is anything else.
    """
    most = (end - at) // 5 + 1  # the shortest is "$0", two line ends
    starts, lengths = np.empty(most, np.int64), np.empty(most, np.int64)
    count = _find_elements(raw, at, end, starts, lengths)
    if count < 0:
        raise DatabaseCorruptError("redis: got an array of other things, wanted one of strings")
    return starts[:count], lengths[:count]


def gather(raw: Bytes, starts: IndexArray, length: int) -> Bytes:
    """Copy strings of one length out of a reply, as (n, length) bytes that the caller owns."""
    copied: Bytes = raw[starts[:, None] + np.arange(length)]
    return copied


def parse(raw: bytes) -> Any:
    """Read a whole reply, not too long a one: bytes, int, None or a list of these.

    Raises:
        DatabaseCorruptError: it is none.
    """
    try:
        value, end = _parse(raw, 0)
    except (ValueError, IndexError):
        end = -1
    if end != len(raw):
        raise DatabaseCorruptError(f"redis: got {raw[:80]!r}, wanted a reply of RESP version 2")
    return value


def _parse(raw: bytes, at: int) -> tuple[Any, int]:
    line_end = raw.index(b"\r\n", at)
    kind, line, after = raw[at : at + 1], raw[at + 1 : line_end], line_end + 2
    if kind == b"+":
        return line, after
    if kind == b":":
        return int(line), after
    number = int(line)
    if number < 0:
        return None, after
    if kind == b"$":
        return raw[after : after + number], after + number + 2
    if kind != b"*":
        raise ValueError(kind)
    values = []
    for _ in range(number):
        value, after = _parse(raw, after)
        values.append(value)
    return values, after
