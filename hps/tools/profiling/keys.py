"""Keys to look up in one table, drawn or recorded; each lookup takes a slice."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hps import errors
from hps.models.formats.numpy_files import read_keys
from hps.statistics.key_traces import read_traces
from hps.tools.profiling.workloads import hot_ranks, ids_of_ranks, power_law_ranks
from hps.types import KeyArray

POOL_KEYS = 1 << 21
"""Keys drawn per table; longer runs reuse them, sliced elsewhere."""

MOST_ROWS = 1 << 28
"""Maximum number of rows to draw from: their permutation takes 8 bytes each."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Key distribution of a profile. *Immutable.*"""

    distribution: Literal["power-law", "hot-keys", "uniform"] = "power-law"
    alpha: float = 0.99  # exponent of the power law
    hot_share: float = 0.2  # share of the keys that are hot
    hot_coverage: float = 0.8  # share of the requests for hot keys
    seed: int = 1

    @property
    def text(self) -> str:
        match self.distribution:
            case "power-law":
                return f"power law, alpha {self.alpha:g}"
            case "hot-keys":
                return f"hot keys: {self.hot_share:.3g} of them get {self.hot_coverage:.3g} of the requests"
            case _:
                return "uniform"

    def draw(self, rows: int, table_index: int = 0, ids: KeyArray | None = None) -> KeyArray:
        """Draw the keys of one table.

        Args:
            rows: number of keys in the table.
            place: index of the table; each table gets different keys.
            ids: (rows,) int64, the table's keys; None: 0 to rows - 1.

        Returns:
            (POOL_KEYS,) int64.

        Raises:
            InvalidInputError: there are no keys, or too many for this machine to draw from.
        """
        if not 0 < rows <= MOST_ROWS:
            raise errors.InvalidInputError(
                f"drawing keys: got {rows:,} rows, expected 1 to {MOST_ROWS:,}; --rows chooses fewer"
            )
        rng = np.random.default_rng((self.seed, table_index))
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
    """Read recorded keys, in the order in which they were looked up.

    Args:
        path: recordings of `hps serve --record-trace`, of which the one with the most keys of a table is used; or an int64
            .npy file, used for every table.

    Returns:
        (n,) int64 by table.

    Raises:
        InvalidInputError: the file lacks a table's keys, or has only hashes of them.
        ModelFileError: the file is no recording, or no file of keys.
    """
    doing = f"reading recorded keys of model {model!r} from {path}"
    if Path(path).suffix == ".npy":
        if not (keys := read_keys(str(path))).size:
            raise errors.InvalidInputError(f"{doing}: got no keys, expected at least one")
        return dict.fromkeys(tables, keys)
    traces_of_model = [trace for trace in read_traces(path) if trace.model == model and trace.keys.size]
    traces = {trace.table: trace for trace in sorted(traces_of_model, key=lambda trace: trace.keys.size)}
    if missing := [table for table in tables if table not in traces]:
        raise errors.InvalidInputError(
            f"{doing}: got no keys of {', '.join(missing)}; --table chooses those that were recorded"
        )
    if any(traces[table].hashed for table in tables):
        raise errors.InvalidInputError(f"{doing}: got hashes of keys, which cannot be looked up; record without --hash-keys")
    return {table: traces[table].keys for table in tables}


class KeyPool:
    """The keys of all tables of a profile. *Immutable.*

    Args:
        keys: (n,) int64 by table; read only from now on.
        batch: keys of each table per lookup.
    """

    def __init__(self, keys: dict[str, KeyArray], batch: int) -> None:
        self.batch = batch
        self._keys = {name: np.ascontiguousarray(np.resize(part, max(part.size, batch))) for name, part in keys.items()}

    def take(self, number: int) -> dict[str, KeyArray]:
        """Return the keys of one lookup, by table: (batch,) int64 each, views."""
        n = self.batch
        starts = ((name, keys, number * n % (keys.size - n + 1)) for name, keys in self._keys.items())
        return {name: keys[start : start + n] for name, keys, start in starts}
