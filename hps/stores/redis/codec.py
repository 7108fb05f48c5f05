"""The bulk codec encodes requests and parses replies with many keys, without a Python object per key.

A request to Redis is an array of strings: `*<n>`, then `$<length>` and the bytes of each; CR LF ends every line (RESP). A
key is a field of a hash, as its 8 little-endian bytes, so that a field always takes the same 14 bytes. The reply to HMGET is
`*<n>`, then `$<4 dim>` and a vector, or `$-1`, for each field.

The kernel that reads it does not wait for the complete reply: it reads the arrived bytes, checks every header, and reports its
position.
"""

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, njit, uint8, uint64, void

from hps.ground.hashing import mix
from hps.ground.kernels.numba_kernels import kernel, read_only

Bytes: TypeAlias = npt.NDArray[np.uint8]

FIELD_BYTES: Final = 14
"""Bytes of a key as the field of a hash."""

HEADER, ROWS, COMPLETE, WRONG_LENGTH, GARBAGE = range(5)
"""Phases of reading a reply to HMGET: before its first line, in its rows, after it; or why it cannot be read: a value has
another length, or the bytes are no such reply."""
PHASE, ROW, HITS, LENGTH = range(4)
"""The four numbers of a reader's state: the phase, rows passed, rows found, the wrong length."""

_INCOMPLETE: Final = -1
_NO_NUMBER: Final = -2
_CR, _LF, _DOLLAR, _STAR, _MINUS, _ZERO, _EIGHT, _NINE = (np.uint8(ord(c)) for c in "\r\n$*-089")

_BYTES: Any = uint8[::1]
_READ: Any = read_only(_BYTES)
_KEYS: Any = read_only(int64[::1])
_ROWS: Any = uint8[:, ::1]
_FLAGS: Any = boolean[::1]


@kernel(void, _KEYS, read_only(_FLAGS), uint64, int64[::1], int64[::1])
def group_by_partition(keys, found, partitions, order, offsets):  # type: ignore[no-untyped-def]
    """List the positions of the keys that are not `found` by partition; within a partition they keep their order.

    Args:
        keys: (n,) int64.
        found: (n,) bool.
        partitions: how many there are.
        order: (n,) int64, out: positions in `keys`; those of partition p are `order[offsets[p] : offsets[p + 1]]`.
        offsets: (partitions + 1,) int64, out.
    """
    part = np.empty(keys.size, np.int64)
    offsets[:] = 0
    for i in range(keys.size):
        if not found[i]:
            part[i] = mix(keys[i]) % partitions
            offsets[part[i] + 1] += 1
    for p in range(offsets.size - 1):
        offsets[p + 1] += offsets[p]
    place = offsets.copy()
    for i in range(keys.size):
        if not found[i]:
            order[place[part[i]]] = i
            place[part[i]] += 1


@njit(inline="always")
def _put_field(key, buffer, at):  # type: ignore[no-untyped-def]
    buffer[at] = _DOLLAR
    buffer[at + np.uint64(1)] = _EIGHT
    buffer[at + np.uint64(2)] = _CR
    buffer[at + np.uint64(3)] = _LF
    bits = np.uint64(key)
    for j in range(8):
        buffer[at + np.uint64(4 + j)] = np.uint8((bits >> np.uint64(8 * j)) & np.uint64(255))
    buffer[at + np.uint64(12)] = _CR
    buffer[at + np.uint64(13)] = _LF


@kernel(int64, _KEYS, _KEYS, _READ, _BYTES, int64)
def write_fields(keys, order, after, buffer, at):  # type: ignore[no-untyped-def]
    """Write each of `keys[order]` as a field, and constant bytes after it; return the end."""
    after_size, start = np.uint64(after.size), np.uint64(at)
    for i in range(order.size):
        _put_field(keys[np.uint64(order[i])], buffer, start)
        start += np.uint64(14)
        for j in range(after_size):
            buffer[start + j] = after[j]
        start += after_size
    return np.int64(start)


@kernel(int64, _KEYS, _KEYS, _READ, read_only(_ROWS), _BYTES, int64)
def write_rows(keys, order, header, rows, buffer, at):  # type: ignore[no-untyped-def]
    """Write each of `keys[order]` as a field and the bytes of its row as its value; return the end."""
    # Indices are unsigned, because for a signed one numba tests whether it counts from the end, and then copies byte by byte.
    width, header_size, start = np.uint64(rows.shape[1]), np.uint64(header.size), np.uint64(at)
    for i in range(order.size):
        place = np.uint64(order[i])
        _put_field(keys[place], buffer, start)
        start += np.uint64(14)
        for j in range(header_size):
            buffer[start + j] = header[j]
        start += header_size
        for j in range(width):
            buffer[start + j] = rows[place, j]
        start += width
        buffer[start] = _CR
        buffer[start + np.uint64(1)] = _LF
        start += np.uint64(2)
    return np.int64(start)


@njit(inline="always")
def _number(buffer, at, end):  # type: ignore[no-untyped-def]
    """Read the number of a header line that starts at `at`; return it and the position after its line.

    The position is _INCOMPLETE for an incomplete line, and _NO_NUMBER for a line without a number.
    """
    value = np.int64(0)
    sign = 1
    digits = 0
    while at < end and digits <= 19:
        byte = buffer[at]
        if byte == _CR:
            if at + 1 >= end:
                return 0, _INCOMPLETE
            if buffer[at + 1] != _LF or digits == 0:
                return 0, _NO_NUMBER
            return sign * value, at + 2
        if byte == _MINUS and digits == 0 and sign == 1:
            sign = -1
        elif _ZERO <= byte <= _NINE:
            value = 10 * value + np.int64(byte - _ZERO)
            digits += 1
        else:
            return 0, _NO_NUMBER
        at += 1
    return 0, _INCOMPLETE if digits <= 19 else _NO_NUMBER


@njit
def _miss(buffer, at, end, header_size, width, state):  # type: ignore[no-untyped-def]
    """Skip a miss; return -1 if there is none: the row is incomplete, or `state` has the fault."""
    if at >= end:
        return -1
    length, after = np.int64(0), np.int64(_NO_NUMBER)
    if buffer[at] == _DOLLAR:
        length, after = _number(buffer, at + 1, end)
    if after == _INCOMPLETE:
        return -1
    if after == _NO_NUMBER or length < -1:
        state[PHASE] = GARBAGE
        return -1
    if length == -1:
        return after
    if length != width:
        state[PHASE] = WRONG_LENGTH
        state[LENGTH] = length
    elif after - at != header_size:
        state[PHASE] = GARBAGE  # the right length, written as no Redis writes it
    return -1


@kernel(int64, _READ, int64, int64, int64[::1], _KEYS, _READ, _ROWS, _FLAGS)
def read_rows(buffer, at, end, state, order, header, out, found):  # type: ignore[no-untyped-def]
    """Read the arrived part of a reply to HMGET into the requested rows.

    Args:
        buffer: the bytes; those of [at, end) have arrived and are not yet read.
        state: (4,) int64: how far the reply is read (PHASE, ROW, HITS, LENGTH); zeros at first; changed.
        order: (count,) int64: which row of `out` each value belongs to.
        header: what precedes each value.
        out: (n, 4 dim) uint8.
        found: (n,) bool; set for complete rows.

    Returns:
        The first unread position: of an incomplete row, after the reply, or at an error.
    """
    if state[PHASE] == HEADER and at < end:
        count, after = np.int64(0), np.int64(_NO_NUMBER)
        if buffer[at] == _STAR:
            count, after = _number(buffer, at + 1, end)
        if after == _INCOMPLETE:
            return at
        if after == _NO_NUMBER or count != order.size:
            state[PHASE] = GARBAGE
            return at
        at = after
        state[PHASE] = ROWS
    if state[PHASE] != ROWS:
        return at
    width, start, header_size = np.uint64(out.shape[1]), np.uint64(at), np.uint64(header.size)
    size = header_size + width + np.uint64(2)
    row = state[ROW]
    while row < order.size:
        complete = np.uint64(end) - start >= size
        if complete:
            for j in range(header_size):
                complete &= buffer[start + j] == header[j]
        if complete:
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
        state[PHASE] = COMPLETE
    return np.int64(start)
