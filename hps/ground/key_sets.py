"""Sets of keys: finds distinct keys, new keys, and the positions of keys in an array.

All are hash tables with linear probing. A `KeySet` stores the keys. The others store positions in an array of keys that is
passed with the slots, of which there are a power of two, at least twice the number of keys; -1 marks a free slot.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, njit, types, uint64

from hps.ground.hashing import mix, scale
from hps.ground.kernels.numba_kernels import compile_kernels, kernel, read_only
from hps.ground.threads.thread_pool import POOL
from hps.types import BoolArray, IndexArray, KeyArray

SHARED_KEYS: Final = 16_384
"""Minimum number of keys for threads: with fewer, a thread that wakes late costs more than it helps."""
PIECE_KEYS: Final = 2048
"""Minimum number of keys in a piece of work."""
_PARTS: Final = 256  # partitions of a large set, so that threads share it and the slots of each stay in their caches
_PART_SHIFT = np.uint64(56)  # 64 bits less those of the partition number
_SLOTS_A_KEY: Final = 1.6
_U0, _U1 = np.uint64(0), np.uint64(1)

_void: Any = types.void
_WORDS, _SLOTS, _FLAGS = int64[::1], uint64[::1], boolean[::1]
_KEYS = read_only(_WORDS)


# -- growing set -------------------------------------------------------------------------------------------------------


class KeySet:
    """A set of keys, in about 13 bytes each if their number is known. One thread may add; others may read meanwhile.

    Args:
        most: expected number of added keys, duplicates included; with more keys the set grows and takes twice the memory.
    """

    def __init__(self, most: int = 0) -> None:
        compile_kernels(*set_kernels())
        self._size = 0
        self._slots = free_slots(most)

    def add(self, keys: KeyArray) -> BoolArray:
        """Add keys, (n,) int64, C-contiguous; return which of them are new: of equal keys, the first."""
        if slots_for(self._size + keys.size) > self._slots.size:
            larger = free_slots(2 * (self._size + keys.size))
            _add_hashes(self._slots, larger)
            self._slots = larger  # only now: readers must miss no key
        new: BoolArray = np.empty(keys.size, np.bool_)
        self._size += _add_keys(keys, self._slots, new)
        return new

    def __len__(self) -> int:
        return self._size

    def contains(self, keys: KeyArray) -> BoolArray:
        """Return which of the keys, (n,) int64, C-contiguous, are in the set: (n,) bool."""
        found: BoolArray = np.empty(keys.size, np.bool_)
        _contains(keys, self._slots, found)
        return found


def set_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of `KeySet` and `last_of_each`."""
    return _add_keys, _add_hashes, _contains, _mark_last


def slots_for(keys: int) -> int:
    return int(keys * _SLOTS_A_KEY) + 2


def free_slots(keys: int) -> npt.NDArray[np.uint64]:
    return np.zeros(slots_for(keys), np.uint64)


# A slot holds the mixed key, which identifies the key, since `mix` is a bijection; 0 is free. The last slot holds 1 if the
# set has the one key that is mixed to 0.


@njit(inline="always")
def slot_of_hash(hashed: np.uint64, slots: npt.NDArray[np.uint64]) -> int:
    """Find the slot of a mixed key, or the free slot for it."""
    last = slots.size - 1
    if hashed == _U0:
        return last
    slot = int(scale(hashed, np.int64(last)))
    while slots[slot] != _U0 and slots[slot] != hashed:
        slot += 1
        if slot == last:
            slot = 0
    return slot


@kernel(int64, _KEYS, _SLOTS, _FLAGS)
def _add_keys(keys: KeyArray, slots: npt.NDArray[np.uint64], new: BoolArray) -> int:
    added = 0
    for i in range(keys.size):
        hashed = mix(keys[i])
        slot = slot_of_hash(hashed, slots)
        new[i] = slots[slot] == _U0
        added += new[i]
        slots[slot] = max(hashed, _U1)
    return added


@kernel(_void, _SLOTS, _SLOTS)
def _add_hashes(old: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64]) -> None:
    for i in range(old.size - 1):
        if old[i] != _U0:
            slots[slot_of_hash(old[i], slots)] = old[i]
    slots[slots.size - 1] = old[old.size - 1]


@kernel(_void, _KEYS, read_only(_SLOTS), _FLAGS)
def _contains(keys: KeyArray, slots: npt.NDArray[np.uint64], found: BoolArray) -> None:
    for i in range(keys.size):
        found[i] = slots[slot_of_hash(mix(keys[i]), slots)] != _U0


# -- positions of keys -------------------------------------------------------------------------------------------------


@njit(inline="always")
def slot_of(hashed: np.uint64, key: np.int64, keys: KeyArray, slots: npt.NDArray[Any], wrap: np.uint64) -> np.uint64:
    """Find the slot with the position of a key in `keys`, or the free slot for it."""
    # The number is unsigned, so that numba does not check for negative ones, which takes a third of the time.
    slot = hashed & wrap
    while slots[slot] >= 0 and keys[slots[slot]] != key:
        slot = (slot + _U1) & wrap
    return slot


def _room(keys: int) -> int:
    return 1 << (2 * keys - 1).bit_length()


class KeyPlaces:
    """The positions of distinct keys, (u,) int64, C-contiguous, which it references and must not change. *Immutable.*"""

    __slots__ = ("_keys", "_slots")

    def __init__(self, keys: KeyArray) -> None:
        self._keys = keys
        self._slots: IndexArray = np.empty(_room(keys.size), np.int64)
        _index(keys, self._slots)

    def match(self, others: KeyArray) -> tuple[IndexArray, IndexArray]:
        """Match other keys, (n,) int64, C-contiguous; return the positions of matches: in `others`, ascending, and in these."""
        there, here = np.empty((2, others.size), np.int64)
        count = _match(others, self._keys, self._slots, there, here)
        return there[:count], here[:count]


@kernel(_void, _KEYS, _WORDS)
def _index(keys: KeyArray, slots: IndexArray) -> None:
    wrap = np.uint64(slots.size - 1)
    slots[:] = -1
    for i in range(keys.size):
        slots[slot_of(mix(keys[i]), keys[i], keys, slots, wrap)] = i


@kernel(int64, _KEYS, _KEYS, _WORDS, _WORDS, _WORDS)
def _match(others: KeyArray, keys: KeyArray, slots: IndexArray, there: IndexArray, here: IndexArray) -> int:
    wrap = np.uint64(slots.size - 1)
    count = 0
    for i in range(others.size):
        slot = slot_of(mix(others[i]), others[i], keys, slots, wrap)
        if slots[slot] >= 0:
            there[count], here[count] = i, slots[slot]
            count += 1
    return count


def places_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of `KeyPlaces`."""
    return _index, _match


def last_of_each(keys: KeyArray) -> BoolArray:
    """Return which of fewer than 2^31 keys, (n,) int64, C-contiguous, are the last occurrence: (n,) bool."""
    last: BoolArray = np.empty(keys.size, np.bool_)
    _mark_last(keys, last)
    return last


@kernel(_void, _KEYS, _FLAGS)
def _mark_last(keys: KeyArray, last: BoolArray) -> None:
    room = 1
    while room < 2 * keys.size:
        room *= 2
    slots, wrap = np.full(room, -1, np.int32), np.uint64(room - 1)
    for i in range(keys.size - 1, -1, -1):
        slot = slot_of(mix(keys[i]), keys[i], keys, slots, wrap)
        last[i] = slots[slot] < 0
        if last[i]:
            slots[slot] = i


# -- distinct keys -----------------------------------------------------------------------------------------------------


class DistinctKeys:
    """Finds distinct keys; threads share large inputs. *One per thread*: its scratch memory grows."""

    __slots__ = ("_members", "_parted", "_slots")

    def __init__(self) -> None:
        compile_kernels(*distinct_kernels())
        self._slots: IndexArray = np.empty(0, np.int64)
        self._members: IndexArray = np.empty(0, np.int64)
        self._parted: IndexArray = np.empty((3, 0), np.int64)

    def find(
        self,
        keys: KeyArray,  # (n,) int64, C-contiguous
        places: IndexArray,  # (m,) int64, at least one
        inverse: IndexArray,  # (at least m,) int64, written
    ) -> KeyArray:
        """Return the distinct keys at the given positions, in unspecified order, in a new array.

        `inverse` gets the index in it of the key at each position.
        """
        if places.size >= SHARED_KEYS:
            return self._find_by_threads(keys, places, inverse)
        room = _room(places.size)
        if self._slots.size < room:
            self._slots, self._members = np.empty(room, np.int64), np.empty(room, np.int64)
        count = _find_distinct(keys, places, self._slots[:room], self._members, inverse)
        distinct: KeyArray = self._members[:count].copy()
        return distinct

    def _find_by_threads(self, keys: KeyArray, places: IndexArray, inverse: IndexArray) -> KeyArray:
        """Partition the keys by the upper bits of their hash, the best order to read a hash map in, and list each partition."""
        count = places.size
        if self._parted.shape[1] < count:
            self._parted = np.empty((3, 1 << (count - 1).bit_length()), np.int64)
        parted, origins, members = self._parted
        pieces = count // PIECE_KEYS
        ends = np.linspace(0, count, pieces + 1).astype(np.int64)
        counts = np.zeros((pieces, _PARTS), np.int64)

        def count_piece(start: int, stop: int) -> None:
            for piece in range(start, stop):
                _count_parts(keys, places[ends[piece] : ends[piece + 1]], counts[piece])

        POOL.run(pieces, 1, count_piece)
        bounds = np.concatenate(([0], np.cumsum(counts.sum(0))))
        starts = bounds[:-1] + np.cumsum(counts, 0) - counts  # (pieces, _PARTS)

        def part_piece(start: int, stop: int) -> None:
            for piece in range(start, stop):
                first, last = ends[piece], ends[piece + 1]
                _fill_parts(keys, places[first:last], first, starts[piece], parted, origins)

        POOL.run(pieces, 1, part_piece)
        sizes = np.empty(_PARTS, np.int64)
        least = max(1, _PARTS * PIECE_KEYS // count)
        POOL.run(
            _PARTS,
            least,
            lambda start, stop: _find_distinct_of_parts(parted, origins, bounds, start, stop, members, inverse, sizes),
        )
        firsts = np.concatenate(([0], np.cumsum(sizes)))
        together: KeyArray = np.empty(firsts[-1], np.int64)
        POOL.run(
            _PARTS,
            least,
            lambda start, stop: _close_ranks(origins, bounds, firsts, start, stop, members, inverse, together),
        )
        return together


def distinct_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of `DistinctKeys`."""
    return _find_distinct, _count_parts, _fill_parts, _find_distinct_of_parts, _close_ranks


@kernel(int64, _KEYS, _WORDS, _WORDS, _WORDS, _WORDS)
def _find_distinct(
    keys: KeyArray,
    places: IndexArray,
    slots: IndexArray,
    members: KeyArray,  # (at least m,) int64
    inverse: IndexArray,
) -> int:
    """Write the distinct keys to `members`, in order of appearance; return their number."""
    wrap = np.uint64(slots.size - 1)
    slots[:] = -1
    size = 0
    for i in range(places.size):
        key = keys[places[i]]
        slot = slot_of(mix(key), key, members, slots, wrap)
        if slots[slot] < 0:
            slots[slot] = size
            members[size] = key
            size += 1
        inverse[i] = slots[slot]
    return size


@kernel(_void, _KEYS, _WORDS, _WORDS)
def _count_parts(keys: KeyArray, places: IndexArray, counts: IndexArray) -> None:
    """Add to `counts` the number of keys at the given positions in each partition: the upper bits of their hash."""
    for i in range(places.size):
        counts[np.int64(mix(keys[places[i]]) >> _PART_SHIFT)] += 1


@kernel(_void, _KEYS, _WORDS, int64, _WORDS, _WORDS, _WORDS)
def _fill_parts(
    keys: KeyArray, places: IndexArray, first: int, starts: IndexArray, parted: KeyArray, origins: IndexArray
) -> None:
    """Write the keys at the given positions to `parted`, by partition, and `first` + i to `origins`."""
    for i in range(places.size):
        key = keys[places[i]]
        part = np.int64(mix(key) >> _PART_SHIFT)
        parted[starts[part]] = key
        origins[starts[part]] = first + i
        starts[part] += 1


@kernel(_void, _WORDS, _WORDS, _WORDS, int64, int64, _WORDS, _WORDS, _WORDS)
def _find_distinct_of_parts(
    parted: KeyArray,
    origins: IndexArray,
    bounds: IndexArray,  # (_PARTS + 1,) int64
    start: int,
    stop: int,
    members: KeyArray,
    inverse: IndexArray,
    sizes: IndexArray,  # (_PARTS,) int64
) -> None:
    """Write the distinct keys of partitions [start, stop) to `members`, from the bound of each on, and their numbers."""
    most = 0
    for part in range(start, stop):
        most = max(most, bounds[part + 1] - bounds[part])
    room = 2
    while room < 2 * most:
        room *= 2
    slots = np.empty(room, np.int64)
    for part in range(start, stop):
        first, last = bounds[part], bounds[part + 1]
        room = 2
        while room < 2 * (last - first):
            room *= 2
        slots[:room] = -1
        wrap = np.uint64(room - 1)
        size = first
        for i in range(first, last):
            slot = slot_of(mix(parted[i]), parted[i], members, slots, wrap)
            if slots[slot] < 0:
                slots[slot] = size
                members[size] = parted[i]
                size += 1
            inverse[origins[i]] = slots[slot]
        sizes[part] = size - first


@kernel(_void, _WORDS, _WORDS, _WORDS, int64, int64, _WORDS, _WORDS, _WORDS)
def _close_ranks(
    origins: IndexArray,
    bounds: IndexArray,  # (_PARTS + 1,) int64
    firsts: IndexArray,  # (_PARTS + 1,) int64
    start: int,
    stop: int,
    members: KeyArray,
    inverse: IndexArray,
    together: KeyArray,  # (u,) int64
) -> None:
    """Move the members of partitions [start, stop) from their bounds to `firsts`, which closes the gaps."""
    for part in range(start, stop):
        moved = bounds[part] - firsts[part]
        for i in range(firsts[part], firsts[part + 1]):
            together[i] = members[i + moved]
        if moved != 0:
            for i in range(bounds[part], bounds[part + 1]):
                inverse[origins[i]] -= moved
