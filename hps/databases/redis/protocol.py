"""Requests to Redis, written in bulk: kernels fill a buffer without a Python object a key.

A request is an array of bulk strings: `*<n>`, then `$<length>` and the bytes of each, every line ended by CR LF (RESP). The
field of a hash is the 8 little-endian bytes of a key, so it always takes the same 14 bytes: `$8`, the key, the line ends.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import boolean, int64, uint8, uint64
from numba import njit as _untyped_njit
from numba import types as _untyped_types

from hps.hashing import mix

types: Any = _untyped_types
njit: Any = _untyped_njit

# Types of the kernels' arguments. A kernel that only reads an array also takes a read-only one.
READ: Any = types.Array(uint8, 1, "C", readonly=True)
WRITTEN: Any = types.Array(uint8, 1, "C")
READ_ROWS: Any = types.Array(uint8, 2, "C", readonly=True)
WRITTEN_ROWS: Any = types.Array(uint8, 2, "C")
KEYS: Any = types.Array(int64, 1, "C", readonly=True)
INTEGERS: Any = types.Array(int64, 1, "C")
FLAGS: Any = types.Array(boolean, 1, "C")
FLAGS_READ: Any = types.Array(boolean, 1, "C", readonly=True)
INT: Any = int64
UINT: Any = uint64

FIELD_BYTES: Final = 14
"""What a key takes as the field of a hash."""

_CR, _LF, _DOLLAR, _ZERO, _ONE, _EIGHT = (np.uint8(ord(c)) for c in "\r\n$018")


def kernel(returns: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile for one signature when imported, so that no lookup waits for a compiler; runs without the GIL."""
    compiler: Any = njit([returns(*arguments)], nogil=True, cache=True, error_model="numpy")

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = compiler(function)
        return made

    return compiled


@kernel(types.void, KEYS, FLAGS_READ, UINT, INTEGERS, INTEGERS)
def group_by_partition(keys, found, partitions, order, offsets):  # type: ignore[no-untyped-def]
    """List the positions of the keys that are not `found` by partition, each partition's in their order.

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


@njit(inline="always", cache=True)
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


@kernel(INT, KEYS, KEYS, READ, READ, WRITTEN, INT)
def write_fields(keys, order, before, after, buffer, at):  # type: ignore[no-untyped-def]
    """Write each of `keys[order]` as a field, with constant bytes before and after it; returns where it stopped."""
    before_size, after_size, start = np.uint64(before.size), np.uint64(after.size), np.uint64(at)
    for i in range(order.size):
        for j in range(before_size):
            buffer[start + j] = before[j]
        start += before_size
        _put_field(keys[np.uint64(order[i])], buffer, start)
        start += np.uint64(14)
        for j in range(after_size):
            buffer[start + j] = after[j]
        start += after_size
    return np.int64(start)


@kernel(INT, KEYS, READ_ROWS, KEYS, READ, WRITTEN, INT)
def write_rows(keys, rows, order, header, buffer, at):  # type: ignore[no-untyped-def]
    """Write each of `keys[order]` as a field and the bytes of its row as its value; returns where it stopped."""
    # Unsigned, since numba looks whether a signed index counts from the end, and then copies byte by byte.
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


@kernel(INT, KEYS, KEYS, WRITTEN, INT)
def write_counts(keys, counts, buffer, at):  # type: ignore[no-untyped-def]
    """Write each key as a field and its count, not below 0, as a decimal value; returns where it stopped."""
    for i in range(keys.size):
        _put_field(keys[i], buffer, np.uint64(at))
        at += 14
        digits, rest = 1, counts[i] // 10
        while rest > 0:
            digits += 1
            rest //= 10
        buffer[at] = _DOLLAR
        at += 1
        if digits > 9:
            buffer[at] = _ONE
            at += 1
        buffer[at] = _ZERO + np.uint8(digits % 10)
        buffer[at + 1] = _CR
        buffer[at + 2] = _LF
        at += 3
        rest = counts[i]
        for j in range(digits - 1, -1, -1):
            buffer[at + j] = _ZERO + np.uint8(rest % 10)
            rest //= 10
        buffer[at + digits] = _CR
        buffer[at + digits + 1] = _LF
        at += digits + 2
    return at
