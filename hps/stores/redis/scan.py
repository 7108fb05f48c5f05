"""Scans a hash piece by piece (HSCAN), each field once."""

from collections.abc import Iterator

import numpy as np

from hps.errors import DatabaseCorruptError
from hps.ground.key_sets import KeySet
from hps.stores.redis.nodes import RedisNodes
from hps.types import KeyArray


def scan_hash(nodes: RedisNodes, slot: int, key: bytes, count: int) -> Iterator[tuple[KeyArray, list[bytes]]]:
    """Yield the fields of a hash as keys of a table, with their values, about `count` at a time.

    Fields that are added or removed meanwhile may or may not be seen. Repeated fields of Redis' replies are dropped.

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
    """Convert fields of the hash `key` to keys of a table.

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
