"""Recorded keys: what a server was asked, sampled, for plans and replays."""

import os
from dataclasses import dataclass

from hps.types import IndexArray, KeyArray


@dataclass(frozen=True, slots=True)
class KeyTrace:
    """The recorded keys of one table, in the order of their lookups. *Immutable.*

    Attributes:
        model, table: whose keys these are.
        keys: (n,) int64; a hash of each where `hashed`.
        lookups: (n,) int64, ascending: the number of the lookup that each key was in.
        rate: the share of all distinct keys that was recorded, in (0, 1]; whether a key is recorded depends on the key alone
            (SHARDS), so that every recorded key is there each time it was asked for.
        seconds: how long the recording took.
        hashed: whether `keys` are hashes of the ids.
    """

    model: str
    table: str
    keys: KeyArray
    lookups: IndexArray
    rate: float
    seconds: float
    hashed: bool


def read_traces(path: str | os.PathLike[str]) -> list[KeyTrace]:
    """Read a recording.

    Raises:
        ModelFileError: it is not one, or is damaged.
    """
    raise NotImplementedError
