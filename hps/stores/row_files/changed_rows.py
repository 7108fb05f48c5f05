"""The keys that were changed since a file was sealed, with the rows of as many as memory is given for.

A lookup probes this set for each key in the kernel that reads the file (`reading.py`): one that was changed gets its row from
here, or is left to RocksDB if its place is `ELSEWHERE`. A row is written once and never changed; a key that is changed again
gets a new place. So a reader needs neither a lock nor a version: whichever place it sees, the row there is whole.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, njit, types, uint32, uint64

from hps.ground.hashing import mix
from hps.ground.kernels.numba_atomics import address_of, load_acquire, store_release
from hps.ground.kernels.numba_kernels import compile_kernels, kernel, read_only
from hps.ground.key_sets import free_slots, slot_of_hash, slots_for
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

MOST_BYTES: Final = 256 << 20
"""Memory for the changed rows of a table. RocksDB answers for the others, at a twentieth of the rate."""
ELSEWHERE: Final = -1
"""The place of a changed row that is in RocksDB alone, or was deleted."""
_FEWEST: Final = 1024
_MARKS_A_SLOT: Final = 8

_void: Any = types.void
_KEYS = read_only(int64[::1])
_ROWS = read_only(uint32[:, ::1])


class ChangesView(NamedTuple):
    """The set at one moment. Later changes may be seen in it or not."""

    marks: npt.NDArray[np.uint64]  # (m,) a bit for each hash in the set, by its lower bits: most other keys have none
    slots: npt.NDArray[np.uint64]  # (s,) hashes of keys, as in `KeySet`
    places: IndexArray  # (s,) of the rows of these keys in `rows`, or ELSEWHERE
    rows: npt.NDArray[np.uint32]  # (m, width)
    parts: IndexArray  # (6,) addresses and sizes of these for `reading.fetch_records`


def _view_of(
    marks: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64], places: IndexArray, rows: npt.NDArray[np.uint32]
) -> ChangesView:
    sized = [part for array in (marks, slots) for part in (array.ctypes.data, array.size)]
    parts: IndexArray = np.array([*sized, places.ctypes.data, rows.ctypes.data], np.int64)
    return ChangesView(marks, slots, places, rows, parts)


class ChangedRows:
    """A set of changed keys, and rows. One thread may change it; others may read meanwhile.

    Args:
        width: words of a row.
        most_bytes: memory for rows.
    """

    def __init__(self, width: int, most_bytes: int = MOST_BYTES) -> None:
        compile_kernels(*changes_kernels())
        self._most = most_bytes // (4 * width)
        self._size = self._used = 0
        slots = free_slots(0)
        self.view = _view_of(
            _marks_for(slots.size), slots, np.full(slots.size, ELSEWHERE, np.int64), np.empty((0, width), np.uint32)
        )

    def __len__(self) -> int:
        return self._size

    def contains(self, keys: KeyArray) -> BoolArray:
        """Return which of the keys, (n,) int64, C-contiguous, were changed: (n,) bool."""
        changed: BoolArray = np.empty(keys.size, np.bool_)
        _contains(keys, self.view.slots, changed)
        return changed

    def add(
        self,
        keys: KeyArray,  # (n,)
        rows: FloatArray | None = None,  # (n, width)
        present: BoolArray | None = None,  # (n,)
    ) -> None:
        """Add changed keys. Of equal keys, the last counts.

        Args:
            rows: what RocksDB has for them by now; None if that is not at hand.
            present: which of the rows these are, not deletions.
        """
        if rows is not None and self._used + keys.size > len(self.view.rows):
            self.add(keys)  # the rows that are replaced leave room
            if not self._make_room(keys.size):
                return
        if rows is None:
            rows, present = np.empty((0, self.view.rows.shape[1]), np.float32), np.zeros(keys.size, np.bool_)
        elif present is None:
            present = np.ones(keys.size, np.bool_)
        view = self.view
        if slots_for(self._size + keys.size) > view.slots.size:
            slots = free_slots(2 * (self._size + keys.size))
            marks, places = _marks_for(slots.size), np.full(slots.size, ELSEWHERE, np.int64)
            _copy_slots(view.slots, view.places, marks, slots, places)
            view = _view_of(marks, slots, places, view.rows)
        added = _add(keys, np.ascontiguousarray(rows).view(np.uint32), present, *view[:4], self._used)
        self._size += added
        self._used += int(present.sum())
        self.view = view

    def _make_room(self, count: int) -> bool:
        """Have room for further rows, by leaving out replaced ones, or by growing; return False if memory does not suffice."""
        view = self.view
        live = int((view.places != ELSEWHERE).sum())
        if live + count > self._most:
            return False
        room = min(self._most, max(_FEWEST, 2 * (live + count)))
        rows = np.empty((room, view.rows.shape[1]), np.uint32)
        places = view.places.copy()
        _copy_rows(view.places, view.rows, places, rows)
        self._used, self.view = live, _view_of(view.marks, view.slots, places, rows)
        return True

    def known(self, keys: KeyArray) -> tuple[FloatArray, BoolArray]:
        """Return rows of keys, (n, width), and which of them are known here, (n,)."""
        rows, there = np.zeros((keys.size, self.view.rows.shape[1]), np.uint32), np.zeros(keys.size, np.bool_)
        _read(keys, *self.view[1:4], rows, there)
        return rows.view(np.float32), there


def _marks_for(slots: int) -> npt.NDArray[np.uint64]:
    return np.zeros(1 << (_MARKS_A_SLOT * slots // 64).bit_length(), np.uint64)


@njit(inline="always")
def mark_of(marks, hashed):  # type: ignore[no-untyped-def]
    """Return the number of the word with the mark of a hash."""
    return (hashed >> np.uint64(6)) & np.uint64(marks.size - 1)


@njit(inline="always")
def is_marked(marks, hashed):  # type: ignore[no-untyped-def]
    """Return whether a key with this hash may be in the set."""
    return (marks[mark_of(marks, hashed)] >> (hashed & np.uint64(63))) & np.uint64(1) != np.uint64(0)


@njit(inline="always")
def _mark(marks, hashed):  # type: ignore[no-untyped-def]
    marks[mark_of(marks, hashed)] |= np.uint64(1) << (hashed & np.uint64(63))


@kernel(_void, _KEYS, read_only(uint64[::1]), boolean[::1])
def _contains(keys, slots, changed):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        changed[i] = slots[slot_of_hash(mix(keys[i]), slots)] != np.uint64(0)


@kernel(_void, read_only(uint64[::1]), _KEYS, uint64[::1], uint64[::1], int64[::1])
def _copy_slots(old_slots, old_places, marks, slots, places):  # type: ignore[no-untyped-def]
    for i in range(old_slots.size - 1):
        if old_slots[i] != np.uint64(0):
            slot = slot_of_hash(old_slots[i], slots)
            _mark(marks, old_slots[i])
            slots[slot], places[slot] = old_slots[i], old_places[i]
    if old_slots[old_slots.size - 1] != np.uint64(0):
        _mark(marks, np.uint64(0))
    slots[slots.size - 1] = old_slots[old_slots.size - 1]
    places[slots.size - 1] = old_places[old_slots.size - 1]


@kernel(_void, _KEYS, _ROWS, int64[::1], uint32[:, ::1])
def _copy_rows(old_places, old_rows, places, rows):  # type: ignore[no-untyped-def]
    """Copy the rows that have a place, and write their new ones."""
    used = 0
    for i in range(old_places.size):
        if old_places[i] != ELSEWHERE:
            for word in range(rows.shape[1]):
                rows[used, word] = old_rows[old_places[i], word]
            places[i] = used
            used += 1


@kernel(int64, _KEYS, _ROWS, read_only(boolean[::1]), uint64[::1], uint64[::1], int64[::1], uint32[:, ::1], int64)
def _add(keys, new_rows, present, marks, slots, places, rows, used):  # type: ignore[no-untyped-def]
    """Write rows from place `used` on, then their places, then the keys; return how many keys are new."""
    added = 0
    for i in range(keys.size):
        hashed = mix(keys[i])
        slot = slot_of_hash(hashed, slots)
        added += slots[slot] == np.uint64(0)
        _mark(marks, hashed)
        place = np.int64(ELSEWHERE)
        if present[i]:
            place = used
            used += 1
            for word in range(rows.shape[1]):
                rows[place, word] = new_rows[i, word]
        store_release(address_of(places) + 8 * slot, place)
        store_release(address_of(slots) + 8 * slot, np.int64(max(hashed, np.uint64(1))))
    return added


@kernel(_void, _KEYS, read_only(uint64[::1]), _KEYS, _ROWS, uint32[:, ::1], boolean[::1])
def _read(keys, slots, places, rows, out, there):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        slot = slot_of_hash(mix(keys[i]), slots)
        if slots[slot] != np.uint64(0):
            place = load_acquire(address_of(places) + 8 * slot)
            there[i] = place >= 0
            if place >= 0:
                for word in range(out.shape[1]):
                    out[i, word] = rows[place, word]


def changes_kernels() -> tuple[Callable[..., Any], ...]:
    """Return the kernels of `ChangedRows`."""
    return _contains, _copy_slots, _copy_rows, _add, _read
