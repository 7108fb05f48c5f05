"""Refuses keys of shares of a table that other servers hold: to this server they look absent, and are not."""

import numpy as np

from hps.errors import MisplacedKeysError
from hps.ground.shares import share_indices
from hps.types import KeyArray, TableSpec


def refuse_misplaced(doing: str, table: TableSpec, keys: KeyArray) -> None:
    """Refuse keys, (n,) int64, of another share; a table without shares has none.

    Lookups check only keys that no tier has, since no tier has a key of another share.

    Raises:
        MisplacedKeysError: at least one key belongs to another share.
    """
    share = table.share
    if share is None or not keys.size:
        return
    indices = share_indices(keys, share.of)
    misplaced = np.flatnonzero(indices != share.index)
    if misplaced.size:
        first = misplaced[0]
        raise MisplacedKeysError(
            f"{doing}: {misplaced.size} of {keys.size} keys belong to other shares than {share} of this server, the first, "
            f'{keys[first]}, to {indices[first]}/{share.of}; connect to servers of all shares with route="keys"'
        )
