"""A set of keys that was made to be asked for many keys at once."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, njit, types, uint64

from hps.hashing import mix, scale
from hps.numba_kernels import compile_kernels, kernel, read_only
from hps.types import BoolArray, KeyArray

_SLOTS_A_KEY = 1.6
_void: Any = types.void


class KeySet:
    """Up to a number of keys, in 13 bytes each. *One thread.*

    Args:
        most: how many keys may be entered, repeated ones included.
    """

    def __init__(self, most: int) -> None:
        compile_kernels()
        self._slots = np.zeros(int(most * _SLOTS_A_KEY) + 2, np.uint64)

    def enter(self, keys: KeyArray) -> None:
        """Add keys, (n,) int64, C-contiguous."""
        _enter(keys, self._slots)

    def contains(self, keys: KeyArray) -> BoolArray:
        """Which of the keys, (n,) int64, C-contiguous, are in the set: (n,) bool."""
        found = np.empty(keys.size, np.bool_)
        _contains(keys, self._slots, found)
        return found


# A slot holds the mixed key, which is as good as the key, since `mix` is a bijection; 0 is free. The one key that is mixed to 0
# is in the last slot.


@njit(inline="always")
def _place_of(hashed: np.uint64, slots: npt.NDArray[np.uint64]) -> int:
    """The slot of a mixed key: where it stands, or the free one where it would."""
    most = slots.size - 1
    if hashed == np.uint64(0):
        return most
    slot = int(scale(hashed, np.int64(most)))
    while slots[slot] != np.uint64(0) and slots[slot] != hashed:
        slot += 1
        if slot == most:
            slot = 0
    return slot


@kernel(_void, read_only(int64[::1]), uint64[::1])
def _enter(keys: KeyArray, slots: npt.NDArray[np.uint64]) -> None:
    for i in range(keys.size):
        hashed = mix(keys[i])
        slots[_place_of(hashed, slots)] = max(hashed, np.uint64(1))


@kernel(_void, read_only(int64[::1]), read_only(uint64[::1]), boolean[::1])
def _contains(keys: KeyArray, slots: npt.NDArray[np.uint64], found: BoolArray) -> None:
    for i in range(keys.size):
        found[i] = slots[_place_of(mix(keys[i]), slots)] != np.uint64(0)
