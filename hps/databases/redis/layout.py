"""Where a table lies in Redis: HugeCTR HPS' keys (4.2 and later), and what is kept beside them.

A table of tag T is cut into partitions by `partition_of`. Partition i is these keys, which one hash slot holds:

    hps_et{T/p<i>}v   hash: field = 8 little-endian bytes of a key, value = its vector, raw float32      HugeCTR's
    hps_et{T/p<i>}t   hash: field = the same, value = when or how often it was used; by overflow policy   HugeCTR's
    hps_et{T/p<i>}m   string: a random mark, made when the partition was first opened                     ours

The tag T is the whole `hps_et.<model>.<table>`, so a key reads `hps_et{hps_et.shop.item/p0}v`. With evict_oldest a value of
`t` is 8 little-endian bytes of seconds since 1970, with evict_least_used a decimal count; evict_random writes none. HugeCTR
neither reads nor writes `m`.

The mark tells an absent key from one that was lost. A server that is emptied, or restarted without its data, has no marks,
so that what it does not have is no longer taken for absent.

Beside the partitions there is one hash of the table itself, in a slot of its own:

    hps_et{T}m        hash: dim, num_partitions, loaded (how far which model was loaded)                  ours
    hps_et{T}l        string: who loads it now; expires                                                   ours
"""

import re
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hps.databases.redis.commands import as_bytes, bulk, request
from hps.databases.redis.replies import Bytes
from hps.databases.redis.topology import slot_of

ANY_KEY: Final = b"hps_et{*}?"
"""Pattern of every key of every table."""
_KEY: Final = re.compile(rb"hps_et\{(?P<tag>[^{}/]+)(?:/p(?P<partition>\d+))?\}(?P<kind>[vtml])")
LOADED: Final = b"loaded"
"""Field of the table's hash: how far which model was loaded."""
_MARK_BYTES: Final = 16


@dataclass(frozen=True)
class Partition:
    """The keys of one partition, and the constant parts of the requests for it. *Immutable.*"""

    tag: str
    index: int

    @cached_property
    def slot(self) -> int:
        return slot_of(self.values)

    @cached_property
    def values(self) -> bytes:
        return self._key("v")

    @cached_property
    def uses(self) -> bytes:
        return self._key("t")

    @cached_property
    def mark(self) -> bytes:
        return self._key("m")

    # Whole requests, and what stands between the first line and the first field of the others.

    @cached_property
    def get_mark(self) -> bytes:
        return request(b"GET", self.mark)

    @cached_property
    def count_values(self) -> bytes:
        return request(b"HLEN", self.values)

    @cached_property
    def get_values(self) -> bytes:
        return bulk(b"HMGET") + bulk(self.values)

    @cached_property
    def set_values(self) -> bytes:
        return bulk(b"HSET") + bulk(self.values)

    @cached_property
    def delete_values(self) -> bytes:
        return bulk(b"HDEL") + bulk(self.values)

    @cached_property
    def set_uses(self) -> bytes:
        return bulk(b"HSET") + bulk(self.uses)

    @cached_property
    def count_uses(self) -> bytes:
        return bulk(b"HINCRBY") + bulk(self.uses)

    @cached_property
    def delete_uses(self) -> bytes:
        return bulk(b"HDEL") + bulk(self.uses)

    def _key(self, kind: str) -> bytes:
        return f"hps_et{{{self.tag}/p{self.index}}}{kind}".encode()


@dataclass(frozen=True)
class Layout:
    """A table's keys and the framing of its vectors. *Immutable.*"""

    tag: str
    dim: int
    partitions: tuple[Partition, ...]

    @classmethod
    def of(cls, tag: str, dim: int, num_partitions: int) -> "Layout":
        return cls(tag, dim, tuple(Partition(tag, i) for i in range(num_partitions)))

    @cached_property
    def header(self) -> Bytes:
        """What precedes a vector in requests and replies."""
        return as_bytes(b"$%d\r\n" % (4 * self.dim))

    @cached_property
    def about(self) -> bytes:
        """Key of the hash of the table itself."""
        return f"hps_et{{{self.tag}}}m".encode()

    @cached_property
    def lease(self) -> bytes:
        """Key of who loads the table."""
        return f"hps_et{{{self.tag}}}l".encode()

    @cached_property
    def slot(self) -> int:
        """Slot of these two."""
        return slot_of(self.about)


def new_mark() -> bytes:
    """A mark that no other partition has ever had."""
    return secrets.token_hex(_MARK_BYTES // 2).encode()


def tag_of(key: bytes) -> str | None:
    """The tag of the table that a key belongs to; None for a key of another program, and for a mere lease."""
    found = _KEY.fullmatch(key)
    return found["tag"].decode(errors="replace") if found and found["kind"] != b"l" else None


def partition_number(key: bytes) -> int:
    """The partition that a key belongs to; -1 for the keys of the table itself."""
    found = _KEY.fullmatch(key)
    return int(found["partition"]) if found and found["partition"] else -1
