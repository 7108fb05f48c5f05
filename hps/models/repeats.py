"""Finds keys of the first rows of a model that occur again in later rows.

Of the rows of one key the last counts. Whoever holds every row gets that by itself: the later row replaces the earlier one.
Whoever holds only the first rows would answer another vector than the rest of the hierarchy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hps.errors import ModelFileError
from hps.models.files import CHUNK_BYTES, SparseModel
from hps.models.key_set import KeySet
from hps.types import KeyArray


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
    first_rows = KeySet(rows)
    found, first_key, first_row = 0, 0, 0
    for _, keys in _chunks(model, 0, rows):
        first_rows.enter(keys)
    for start, keys in _chunks(model, rows, model.rows):
        repeated = first_rows.contains(keys)
        more = int(np.count_nonzero(repeated))
        if more and not found:
            position = int(np.argmax(repeated))
            first_key, first_row = int(keys[position]), start + position
        found += more
    return Repeats(found, first_key, first_row) if found else None


def _chunks(model: SparseModel, first: int, last: int) -> Iterator[tuple[int, KeyArray]]:
    buffer = np.empty(min(last - first, CHUNK_BYTES // 8), np.int64)
    for start in range(first, last, buffer.size):
        keys = buffer[: min(buffer.size, last - start)]
        model.read_keys(start, keys)
        yield start, keys
