"""Finds keys of the first rows of a model that occur again in later rows.

The last row of a key counts. A tier with every row gets it naturally, since the later row replaces the earlier one. A tier
with only the first rows would answer another vector than the rest of the hierarchy.
"""

from dataclasses import dataclass

import numpy as np

from hps.errors import ModelFileError
from hps.ground.key_sets import KeySet
from hps.models.files import SparseModel


@dataclass(frozen=True, slots=True)
class Repeats:
    """Later rows with keys of the first rows. *Immutable.*

    Attributes:
        rows: number of these rows.
        key, row: the first of them.
    """

    rows: int
    key: int
    row: int

    def refusal(self, doing: str, holder: str, rows: int) -> ModelFileError:
        """Return the error for a tier with only the first `rows` rows, if no database has the later ones."""
        return ModelFileError(
            f"{doing}: {self.rows} rows have keys of earlier rows, the first in row {self.row}: "
            f"key {self.key}. The later row counts, but {holder} takes the first {rows} rows only, and no database the others: "
            "remove the earlier rows, give it room for all rows, or configure persistent_db"
        )


def find_repeats(model: SparseModel, rows: int) -> Repeats | None:
    """Search the rows from `rows` on for keys of earlier rows; None if there are none.

    Reads only the keys, once. Takes about 13 bytes per row of the first ones.

    Raises:
        ModelFileError: the files changed, or cannot be read.
    """
    if not 0 < rows < model.rows:
        return None
    first_rows = KeySet(rows)
    found, first_key, first_row = 0, 0, 0
    for _, keys in model.keys.key_chunks(0, rows):
        first_rows.add(keys)
    for start, keys in model.keys.key_chunks(rows):
        repeated = first_rows.contains(keys)
        more = int(np.count_nonzero(repeated))
        if more and not found:
            position = int(np.argmax(repeated))
            first_key, first_row = int(keys[position]), start + position
        found += more
    return Repeats(found, first_key, first_row) if found else None
