"""Everything that lies in a hash, read piece by piece (HSCAN), each field once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hps.databases.redis.commands import Ask, request
from hps.databases.redis.dispatch import Dispatcher
from hps.databases.redis.protocol import FLAGS, INT, INTEGERS, KEYS, kernel
from hps.databases.redis.replies import Bytes, elements, gather
from hps.errors import DatabaseCorruptError
from hps.hashing import mix
from hps.types import BoolArray, IndexArray, KeyArray

_LEAST_PLACES: Final = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Some fields of a hash with their values. *Immutable.*

    Attributes:
        keys: (n,) int64: the fields.
        raw: bytes in which the values lie.
        starts: (n,) int64: where each value begins in `raw`.
        lengths: (n,) int64: and how long it is.
    """

    keys: KeyArray
    raw: Bytes
    starts: IndexArray
    lengths: IndexArray

    def part(self, start: int, stop: int) -> "Piece":
        """Some of its fields."""
        return Piece(self.keys[start:stop], self.raw, self.starts[start:stop], self.lengths[start:stop])

    def values(self, length: int) -> Bytes:  # (n, length) uint8
        """The values, all of which must be `length` bytes long."""
        return gather(self.raw, self.starts, length)

    def integers(self) -> IndexArray:  # (n,)
        """The values read as 8 little-endian bytes; 0 for what is of another length."""
        numbers = np.zeros(self.keys.size, np.int64)
        good = self.lengths == 8
        numbers[good] = gather(self.raw, self.starts[good], 8).view(np.int64).ravel()
        return numbers

    def counts(self) -> IndexArray:  # (n,)
        """The values read as decimal numbers; 0 for what is none."""
        width = min(int(self.lengths.max(initial=1)), 20)
        places = np.arange(width)
        inside = places < self.lengths[:, None]
        digits = self.raw[np.minimum(self.starts[:, None] + places, self.raw.size - 1)].astype(np.int64) - ord("0")
        good = ((digits >= 0) & (digits <= 9) | ~inside).all(axis=1) & (self.lengths <= 18) & (self.lengths > 0)
        counts = np.zeros(self.lengths.size, np.int64)
        for place in range(min(width, 18)):
            counts = np.where(inside[:, place], 10 * counts + digits[:, place], counts)
        return np.where(good, counts, 0)


def scan_hash(dispatcher: Dispatcher, slot: int, key: bytes, count: int) -> Iterator[Piece]:
    """Yield all fields of a hash whose fields are 8 bytes long, about `count` at a time.

    Fields that are added or removed meanwhile may or may not be seen. Redis may return a field twice; this does not.

    Raises:
        DatabaseError: the node failed, or a field is no key.
    """
    seen = KeySet()
    cursor = b"0"
    while True:
        command = Ask(slot, request(b"HSCAN", key, cursor, b"COUNT", b"%d" % max(1, count)))
        dispatcher.run([command])
        cursor, piece = _read(key, command.raw)
        if piece.keys.size:
            new = seen.add(piece.keys)
            yield Piece(piece.keys[new], piece.raw, piece.starts[new], piece.lengths[new])
        if cursor == b"0":
            return


def keys_of(raw: bytes, what: bytes) -> KeyArray:
    """The keys in a flat reply of fields, in an array that the caller owns.

    Raises:
        DatabaseCorruptError: a field is no key.
    """
    array = np.frombuffer(raw, np.uint8)
    starts, lengths = elements(array, raw.index(b"\n") + 1, array.size)
    return _keys(array, starts, lengths, what)


def _read(key: bytes, raw: bytes) -> tuple[bytes, Piece]:
    # *2, $<n>, the cursor, *<2 m>, and then m fields and values
    lines = raw.split(b"\r\n", 4)
    if len(lines) != 5 or lines[0] != b"*2" or not lines[2].isdigit() or not lines[3].startswith(b"*"):
        raise DatabaseCorruptError(f"redis: scanning {key!r}: got {raw[:60]!r}, wanted a cursor and an array")
    array = np.frombuffer(raw, np.uint8)
    starts, lengths = elements(array, len(raw) - len(lines[4]), array.size)
    return lines[2], Piece(_keys(array, starts[::2], lengths[::2], key), array, starts[1::2], lengths[1::2])


def _keys(array: Bytes, starts: IndexArray, lengths: IndexArray, what: bytes) -> KeyArray:
    if (lengths != 8).any():
        raise DatabaseCorruptError(
            f"redis: {what!r}: got a field of {int(lengths[lengths != 8][0])} bytes, wanted the 8 bytes of a key; "
            "was it written with 32-bit keys, or by another program?"
        )
    return gather(array, starts, 8).view(np.int64).ravel()


class KeySet:
    """The keys that a scan has seen. *One per thread.*"""

    def __init__(self) -> None:
        self._size = 0
        self._keys = np.empty(_LEAST_PLACES, np.int64)
        self._taken = np.zeros(_LEAST_PLACES, np.bool_)

    def add(self, keys: KeyArray) -> BoolArray:
        """Add keys; returns which of them are new, a key that is given twice only once."""
        if 2 * (self._size + keys.size) > self._keys.size:
            old = self._keys[self._taken]
            places = 1 << (4 * (self._size + keys.size)).bit_length()
            self._keys, self._taken = np.empty(places, np.int64), np.zeros(places, np.bool_)
            _add(old, self._keys, self._taken, np.empty(old.size, np.bool_))
        new: npt.NDArray[np.bool_] = np.empty(keys.size, np.bool_)
        self._size += _add(keys, self._keys, self._taken, new)
        return new


@kernel(INT, KEYS, INTEGERS, FLAGS, FLAGS)
def _add(keys, table, taken, new):  # type: ignore[no-untyped-def]
    mask = np.uint64(table.size - 1)
    added = 0
    for i in range(keys.size):
        place = mix(keys[i]) & mask
        while taken[place] and table[place] != keys[i]:
            place = (place + np.uint64(1)) & mask
        new[i] = not taken[place]
        if new[i]:
            taken[place] = True
            table[place] = keys[i]
            added += 1
    return added
