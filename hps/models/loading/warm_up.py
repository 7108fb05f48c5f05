"""Fills an embedding cache from model files, or from a database that holds their rows."""

import logging
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.ground.key_sets import last_of_each
from hps.ground.rows import decode, encode
from hps.models.deltas import DeltaModel, Merge, first_rows
from hps.models.files import SparseModel, rows_of_a_chunk
from hps.models.loading.read_ahead import Allocate, read_ahead
from hps.models.sealed import SealedModel
from hps.stores.base import Database
from hps.types import FloatArray, KeyArray, RowArray, TableSpec

_log = logging.getLogger(__name__)

_MIN_STEP_ROWS = 64  # HugeCTR's smallest step of a warm-up: one of its sets


@dataclass(frozen=True, slots=True)
class DatabaseRows:
    """The rows of a table in a database of this process, each key once. *Immutable, thread-safe.*"""

    database: Database
    table: TableSpec

    @property
    def stored(self) -> TableSpec:
        """The table as the database stores it."""
        return self.database.stored(self.table)

    @property
    def place(self) -> str:
        return f"{self.stored.tag} in {self.database.kind}"

    @property
    def rows(self) -> int:
        """Number of rows; an estimate if the database counts lazily."""
        return self.database.size(self.stored.tag)

    @property
    def chunk_rows(self) -> int:
        return rows_of_a_chunk(self.stored.width)

    def chunks(self, chunk_rows: int, row_dtype: str) -> Generator[tuple[KeyArray, RowArray], None, None]:
        """Yield every row once, in a format, in chunks as of `Database.scan`.

        Raises:
            InvalidInputError: the format cannot hold a row.
        """
        for keys, rows in self.database.scan(self.stored.tag, chunk_rows):
            yield keys, self._formatted(keys, rows, row_dtype)

    def read(self, keys: KeyArray, row_dtype: str) -> tuple[KeyArray, RowArray]:
        """Read rows by their keys, (n,) int64, in a format; return the found ones, with their keys."""
        rows, found = np.empty((keys.size, self.stored.width), np.float32), np.zeros(keys.size, np.bool_)
        self.database.fetch(self.stored.tag, keys, rows, found)
        return keys[found], self._formatted(keys[found], rows[found], row_dtype)

    def _formatted(self, keys: KeyArray, rows: RowArray, row_dtype: str) -> RowArray:
        stored = self.stored
        if stored.row_dtype == row_dtype:
            return rows
        return encode(f"reading table {self.place}", decode(rows, stored.dim, stored.row_dtype), row_dtype, keys)

    def is_open_for_writing(self) -> bool:
        """Return False: modifications of the database reach caches, too."""
        return False


WarmUpSource: TypeAlias = SparseModel | SealedModel | DeltaModel | DatabaseRows


def warm_up(
    cache: EmbeddingCache, table_index: int, table: TableSpec, sparse_model: WarmUpSource, fraction_per_iteration: float
) -> int:
    """Fill one table of an embedding cache with the first rows of its model files, reading ahead of the insertion.

    Args:
        fraction_per_iteration: `cache_refresh_percentage_per_iteration`, the share of the capacity that one step fills and
            logs; 1.0 for one step, 0 for no warm-up. Memory does not depend on it, since a step is read in chunks.

    Returns:
        Number of rows read: all, or as many as fill the capacity.

    Raises:
        ModelFileError: the files cannot be read, or changed since they were opened.
    """
    capacity = cache.stats(table_index).capacity_rows
    rows = min(capacity, sparse_model.rows)
    if (
        isinstance(sparse_model, SparseModel | SealedModel) and sparse_model.share is not None
    ):  # a part of the files' rows is inserted
        rows = min(capacity * sparse_model.share.of, sparse_model.rows)
    if rows == 0 or fraction_per_iteration <= 0:
        return 0
    step = max(_MIN_STEP_ROWS, int(capacity * min(fraction_per_iteration, 1.0)))
    _log.info('EC initialization for model: "%s", num_tables: %d', table.model_name, len(cache.tables))
    _log.info("EC initialization on device: %d for %s", cache.device_id, table.tag)
    _log.info(  # as HugeCTR logs it, less a doubled word
        "Initialize the embedding cache by inserting the same size model file with embedding cache from beginning"
    )
    with closing(_chunks(sparse_model, rows, step, cache.host_buffer)) as chunks:
        for start, keys, rows_read in chunks:
            if start % step == 0:
                count = min(step, rows - start)
                _log.info(
                    "Initialize the embedding table %d for iteration %d with number of %d keys.",
                    table_index,
                    start // step,
                    count,
                )
            if not isinstance(sparse_model, DatabaseRows):
                rows_read = encode(f"warming up table {table.tag}", rows_read, table.row_dtype, keys)
            cache.insert(table_index, *last_rows(keys, rows_read))
    return rows


def _chunks(
    source: WarmUpSource, rows: int, step: int, allocate: Allocate
) -> Generator[tuple[int, KeyArray, FloatArray], None, None]:
    """Yield (number of the first row, keys, vectors) of the first rows; later rows may have keys of these.

    Of `DatabaseRows`, rows as the cache stores them instead of vectors.
    """
    if isinstance(source, SparseModel | SealedModel):
        source.verify()
        for start, keys, vectors in read_ahead(source, _pieces(rows, step, source.chunk_rows), allocate):
            yield start, *source.owned(keys, vectors)
        return
    start = 0
    if isinstance(source, DeltaModel):
        source.verify()
        for keys, vectors in first_rows(Merge(source).chunks(), rows):
            yield start, keys, vectors
            start += keys.size
        return
    for keys, vectors in source.chunks(source.chunk_rows, source.table.row_dtype):
        yield start, keys[: rows - start], vectors[: rows - start]
        if (start := start + keys.size) >= rows:
            return


def _pieces(rows: int, step: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Cut [0, rows) at every multiple of `step`, and further into pieces of at most `chunk_rows`."""
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for low in range(start, stop, chunk_rows):
            yield low, min(low + chunk_rows, stop)


def last_rows(keys: KeyArray, vectors: FloatArray) -> tuple[KeyArray, FloatArray]:
    """Keep only the last row of each key."""
    # Databases keep the last of repeated keys in one call, caches an unspecified one.
    if keys.size < 2 or np.all(keys[1:] > keys[:-1]):
        return keys, vectors
    last = last_of_each(keys)
    return (keys, vectors) if last.all() else (keys[last], vectors[last])
