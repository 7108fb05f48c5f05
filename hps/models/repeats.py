"""Finds keys of the first rows of a model that occur again in later rows.

Of the rows of one key the last counts. Whoever holds every row gets that by itself: the later row replaces the earlier one.
Whoever holds only the first rows would answer another vector than the rest of the hierarchy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import int64, njit, types, uint64

from hps.errors import ModelFileError
from hps.hashing import mix, scale
from hps.models.files import CHUNK_BYTES, SparseModel
from hps.numba_kernels import compile_kernels, kernel, read_only
from hps.types import KeyArray

_tuple: Any = types.UniTuple
_PAIR = _tuple(int64, 2)
_SLOTS_A_ROW = 1.6  # 13 bytes a row, while the rest of the keys is read


@dataclass(frozen=True, slots=True)
class Repeats:
    """Later rows whose keys stand in the first rows. *Immutable.*

    Attributes:
        rows: how many there are.
        key, row: of the first of them.
    """

    rows: int
    key: int
    row: int

    def refusal(self, doing: str, holder: str, rows: int) -> ModelFileError:
        """The error where `holder` has the first `rows` rows, and no database has the later ones."""
        return ModelFileError(
            f"{doing}: {self.rows} rows have keys that stand in earlier rows, too, the first in row {self.row}: "
            f"key {self.key}. The later row counts, but {holder} holds the first {rows} rows only, and no database the others: "
            "remove the earlier rows, let it hold all rows, or configure persistent_db"
        )


def find_repeats(model: SparseModel, rows: int) -> Repeats | None:
    """Search the rows from `rows` on for keys of the rows before; None if there are none.

    Reads the keys alone, once. Takes some 13 bytes for each of the first rows, and nothing for the others.

    Raises:
        ModelFileError: the files changed, or cannot be read.
    """
    if not 0 < rows < model.rows:
        return None
    compile_kernels()
    slots = np.zeros(int(rows * _SLOTS_A_ROW) + 2, np.uint64)
    found, first_key, first_row = 0, 0, 0
    for _, keys in _chunks(model, 0, rows):
        _enter(keys, slots)
    for start, keys in _chunks(model, rows, model.rows):
        more, position = _count(keys, slots)
        if more and not found:
            first_key, first_row = int(keys[position]), start + position
        found += more
    return Repeats(found, first_key, first_row) if found else None


def _chunks(model: SparseModel, first: int, last: int) -> Iterator[tuple[int, KeyArray]]:
    buffer = np.empty(min(last - first, CHUNK_BYTES // 8), np.int64)
    for start in range(first, last, buffer.size):
        keys = buffer[: min(buffer.size, last - start)]
        model.read_keys(start, keys)
        yield start, keys


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


@kernel(types.void, read_only(int64[::1]), uint64[::1])
def _enter(keys: KeyArray, slots: npt.NDArray[np.uint64]) -> None:
    for i in range(keys.size):
        hashed = mix(keys[i])
        slots[_place_of(hashed, slots)] = max(hashed, np.uint64(1))


@kernel(_PAIR, read_only(int64[::1]), uint64[::1])
def _count(keys: KeyArray, slots: npt.NDArray[np.uint64]) -> tuple[int, int]:
    """How many of the keys are entered, and the position of the first of them."""
    found, first = 0, -1
    for i in range(keys.size):
        if slots[_place_of(mix(keys[i]), slots)] != np.uint64(0):
            if first < 0:
                first = i
            found += 1
    return found, first
