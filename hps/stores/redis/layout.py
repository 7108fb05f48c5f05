"""The keys of a table in Redis: those of HugeCTR HPS (4.2 and later), and our additional ones.

A table of tag T is split into partitions by the mixing hash of its keys. KeyPartition i is these keys of Redis, which share one
hash slot:

    hps_et{T/p<i>}v   hash: field = 8 little-endian bytes of a key, value = its vector, raw float32      HugeCTR's
    hps_et{T/p<i>}t   hash: field = the same, value = when or how often it was used; by overflow policy   HugeCTR's
    hps_et{T/p<i>}m   string: the partition's mark, see marks.py                                          ours
    hps_et{T/p<i>}s   hash: field = the same as in v, value = sequence of the last change, see below        ours

The tag T is the whole `hps_et.<model>.<table>`, so a key reads `hps_et{hps_et.shop.item/p0}v`. With evict_oldest a value of
`t` is 8 little-endian bytes of seconds since 1970, with evict_least_used a decimal count; evict_random writes none. HugeCTR
neither reads nor writes `m`.

If no database below has the rows of a table that follows a log of updates, `s` has the sequence of each key's last change as 8
big-endian bytes, also of deleted and evicted rows, and in the field `h` the highest applied one. It lasts as long as the
incarnation of the partition.

Beside the partitions there is one hash of the table itself, in a slot of its own:

    hps_et{T}m        hash: dim, num_partitions, loaded (how far which model was loaded), and
                            `log <partition>` (how far that partition of a log of updates was applied)    ours
    hps_et{T}l        string: the process that loads it; expires                                          ours
    hps_et{T}u        hash: the processes that use it, see users.py; expires                              ours
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from redis.crc import key_slot

from hps.errors import DatabaseCorruptError
from hps.stores.redis.codec import Bytes
from hps.types import KeyArray

ANY_KEY: Final = b"hps_et{*}?"
"""Pattern of every key of every table."""
_KEY: Final = re.compile(rb"hps_et\{(?P<tag>[^{}/]+)(?:/p(?P<partition>\d+))?\}(?P<kind>[vtmslu])")


@dataclass(frozen=True)
class KeyPartition:
    tag: str
    index: int

    @cached_property
    def slot(self) -> int:
        return key_slot(self.values)

    @cached_property
    def values(self) -> bytes:
        return self._key("v")

    @cached_property
    def uses(self) -> bytes:
        return self._key("t")

    @cached_property
    def mark(self) -> bytes:
        return self._key("m")

    @cached_property
    def sequences(self) -> bytes:
        return self._key("s")

    def _key(self, kind: str) -> bytes:
        return f"hps_et{{{self.tag}/p{self.index}}}{kind}".encode()


@dataclass(frozen=True)
class RedisLayout:
    """The keys of one table, and the framing of its vectors. *Immutable.*"""

    tag: str
    dim: int
    partitions: tuple[KeyPartition, ...]

    @classmethod
    def of(cls, tag: str, dim: int, num_partitions: int) -> "RedisLayout":
        return cls(tag, dim, tuple(KeyPartition(tag, i) for i in range(num_partitions)))

    @cached_property
    def header(self) -> Bytes:
        """The header of a vector in requests and replies."""
        return np.frombuffer(b"$%d\r\n" % (4 * self.dim), np.uint8)

    @cached_property
    def about(self) -> bytes:
        return f"hps_et{{{self.tag}}}m".encode()

    @cached_property
    def lease(self) -> bytes:
        return f"hps_et{{{self.tag}}}l".encode()

    @cached_property
    def users(self) -> bytes:
        return f"hps_et{{{self.tag}}}u".encode()

    @cached_property
    def slot(self) -> int:
        """The hash slot of these three."""
        return key_slot(self.about)


def tag_of(key: bytes) -> str | None:
    """Return the tag of the table of a key; None for keys of other programs and for keys that expire."""
    found = _KEY.fullmatch(key)
    return found["tag"].decode(errors="replace") if found and found["kind"] not in b"lu" else None


def partition_number(key: bytes) -> int:
    """Return the partition of a key; -1 for the keys of the table itself."""
    found = _KEY.fullmatch(key)
    return int(found["partition"]) if found and found["partition"] else -1


def keys_of(fields: list[bytes], key: bytes) -> KeyArray:
    """Convert fields of the hash `key` to keys of a table."""
    for field in fields:
        if len(field) != 8:
            raise DatabaseCorruptError(
                f"redis: {key!r}: got a field of {len(field)} bytes, expected the 8 bytes of a key; "
                "was it written with 32-bit keys, or by another program?"
            )
    return np.frombuffer(bytearray().join(fields), np.int64)
