"""A batch as tests read it: one table after the other."""

from typing import Any, NamedTuple

from hps.tensors.bags import Pooling
from hps.tensors.batch import Batch


class OneTable(NamedTuple):
    """The entries of one table in the columns of a batch."""

    table: int
    n: int
    keys: Any
    out: Any
    found: Any
    pooling: Pooling | None


def by_table(batch: Batch) -> list[OneTable]:
    """Return the entries of each table."""
    founds, poolings = batch.founds or [None] * len(batch.tables), batch.poolings or [None] * len(batch.tables)
    columns = batch.tables, batch.sizes, batch.keys, batch.outs, founds, poolings
    return [OneTable(*entries) for entries in zip(*columns, strict=True)]
