"""What is asked: keys of one table, drawn or recorded, of which each lookup takes a stretch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hps import errors
from hps.key_traces import read_traces
from hps.types import KeyArray
from hps.workloads import hot_ranks, ids_of_ranks, power_law_ranks

POOL_KEYS = 1 << 21
"""Drawn keys of a table; lookups that need more ask for the same ones again, cut elsewhere."""

MOST_ROWS = 1 << 28
"""That keys are drawn from: their permutation takes 8 bytes each."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How keys are drawn. *Immutable.*

    Attributes:
        distribution: the popularity of keys.
        alpha: of the power law.
        hot_share, hot_coverage: a share of the keys gets so much of the requests.
        seed: of all random numbers.
    """

    distribution: Literal["power-law", "hot-keys", "uniform"] = "power-law"
    alpha: float = 0.99
    hot_share: float = 0.2
    hot_coverage: float = 0.8
    seed: int = 1

    @property
    def text(self) -> str:
        """What it is, for people."""
        match self.distribution:
            case "power-law":
                return f"power law, alpha {self.alpha:g}"
            case "hot-keys":
                return f"hot keys: {self.hot_share:.3g} of them get {self.hot_coverage:.3g} of the requests"
            case _:
                return "uniform"

    def draw(self, rows: int, place: int = 0, ids: KeyArray | None = None) -> KeyArray:
        """Draw the keys of one table.

        Args:
            rows: keys that there are.
            place: of the table among the others, which get other keys.
            ids: (rows,) int64, those keys; None: 0 to rows - 1.

        Returns:
            (POOL_KEYS,) int64.

        Raises:
            InvalidInputError: there are no keys, or too many for this machine to draw from.
        """
        if not 0 < rows <= MOST_ROWS:
            raise errors.InvalidInputError(
                f"drawing keys: got {rows:,} rows, expected 1 to {MOST_ROWS:,}; --rows chooses fewer"
            )
        rng = np.random.default_rng((self.seed, place))
        match self.distribution:
            case "power-law":
                ranks = power_law_ranks(rng, POOL_KEYS, rows, self.alpha)
            case "hot-keys":
                ranks = hot_ranks(rng, POOL_KEYS, rows, self.hot_share, self.hot_coverage)
            case _:
                ranks = rng.integers(0, rows, POOL_KEYS, dtype=np.int64)
        keys = ids_of_ranks(ranks, rows)
        return keys if ids is None else ids[keys]


def recorded_keys(path: str | os.PathLike[str], model: str, tables: Sequence[str]) -> dict[str, KeyArray]:
    """Read recorded keys, in the order in which they were asked for.

    Args:
        path: a recording of `hps serve --record-trace`, or a .npy file of int64, which is taken for every table.

    Returns:
        (n,) int64 by table.

    Raises:
        InvalidInputError: the file has no keys of a table, or hashes of them.
        ModelFileError: it is no recording.
    """
    doing = f"reading recorded keys of model {model!r} from {path}"
    if Path(path).suffix == ".npy":
        try:
            keys = np.load(path)
        except (OSError, ValueError) as error:
            raise errors.InvalidInputError(f"{doing}: {error}") from error
        if keys.dtype != np.int64 or keys.ndim != 1 or not keys.size:
            raise errors.InvalidInputError(f"{doing}: got {keys.shape} {keys.dtype}, expected (n,) int64 with at least one key")
        return dict.fromkeys(tables, keys)
    traces = {one.table: one for one in read_traces(path) if one.model == model and one.keys.size}
    if missing := [table for table in tables if table not in traces]:
        raise errors.InvalidInputError(
            f"{doing}: got no keys of {', '.join(missing)}; --table chooses those that were recorded"
        )
    if any(traces[table].hashed for table in tables):
        raise errors.InvalidInputError(f"{doing}: got hashes of keys, which nobody can look up; record without --hash-keys")
    return {table: traces[table].keys for table in tables}


class KeyPool:
    """The keys of all tables of a profile. *Immutable.*

    Args:
        keys: (n,) int64 by table; read only from now on.
        batch: keys of each table in a lookup.
    """

    def __init__(self, keys: dict[str, KeyArray], batch: int) -> None:
        self.batch = batch
        self._keys = {name: np.ascontiguousarray(np.resize(some, max(some.size, batch))) for name, some in keys.items()}

    def take(self, number: int) -> dict[str, KeyArray]:
        """The keys of one lookup, by table: (batch,) int64 each, views."""
        n = self.batch
        starts = ((name, keys, number * n % (keys.size - n + 1)) for name, keys in self._keys.items())
        return {name: keys[start : start + n] for name, keys, start in starts}
