"""Everything that lies in a hash, read piece by piece (HSCAN), each field once."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numba import boolean, int64

from hps.databases.redis.nodes import RedisNodes
from hps.errors import DatabaseCorruptError
from hps.hashing import mix
from hps.numba_kernels import kernel, read_only
from hps.types import BoolArray, KeyArray

_LEAST_PLACES: Final = 1024


def scan_hash(nodes: RedisNodes, slot: int, key: bytes, count: int) -> Iterator[tuple[KeyArray, list[bytes]]]:
    """Yield the fields of a hash, which are keys of a table, and their values, about `count` at a time.

    Fields that are added or removed meanwhile may or may not be seen. Redis may return a field twice; this does not.

    Raises:
        DatabaseError: the node failed, or a field is no key.
    """
    seen = KeySet()
    cursor = b"0"
    while True:
        cursor, flat = nodes.ask(slot, "HSCAN", key, cursor, "COUNT", max(1, count))
        keys = keys_of(flat[::2], key)
        if keys.size:
            new = seen.add(keys)
            values = flat[1::2]
            yield keys[new], values if new.all() else [values[i] for i in np.flatnonzero(new)]
        if cursor == b"0":
            return


def keys_of(fields: list[bytes], key: bytes) -> KeyArray:
    """The keys of a table that these fields of the hash `key` are.

    Raises:
        DatabaseCorruptError: a field is no key.
    """
    for field in fields:
        if len(field) != 8:
            raise DatabaseCorruptError(
                f"redis: {key!r}: got a field of {len(field)} bytes, expected the 8 bytes of a key; "
                "was it written with 32-bit keys, or by another program?"
            )
    return np.frombuffer(bytearray().join(fields), np.int64)


@kernel(int64, read_only(int64[::1]), int64[::1], boolean[::1], boolean[::1])
def _add_keys(keys, places, taken, new):  # type: ignore[no-untyped-def]
    mask = np.uint64(places.size - 1)
    added = 0
    for i in range(keys.size):
        place = mix(keys[i]) & mask
        while taken[place] and places[place] != keys[i]:
            place = (place + np.uint64(1)) & mask
        new[i] = not taken[place]
        if new[i]:
            taken[place] = True
            places[place] = keys[i]
            added += 1
    return added


class KeySet:
    """A set of keys: those that a scan has seen. *One per thread.*"""

    def __init__(self) -> None:
        self._size = 0
        self._keys = np.empty(_LEAST_PLACES, np.int64)
        self._taken = np.zeros(_LEAST_PLACES, np.bool_)

    def add(self, keys: KeyArray) -> BoolArray:
        """Add keys; returns which of them are new. Of a key that is given twice, the first is."""
        if 2 * (self._size + keys.size) > self._keys.size:
            old = self._keys[self._taken]
            places = 1 << (4 * (self._size + keys.size)).bit_length()
            self._keys, self._taken = np.empty(places, np.int64), np.zeros(places, np.bool_)
            _add_keys(old, self._keys, self._taken, np.empty(old.size, np.bool_))
        new: BoolArray = np.empty(keys.size, np.bool_)
        self._size += _add_keys(keys, self._keys, self._taken, new)
        return new
