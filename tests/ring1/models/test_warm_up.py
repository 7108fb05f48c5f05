"""Embedding caches are filled from model files."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.errors import ModelFileError
from hps.models.files import open_sparse_model
from hps.models.loading.warm_up import DatabaseRows, warm_up
from hps.models.writer import write_sparse_model
from hps.tensors.batch import Batch
from hps.types import FloatArray, KeyArray
from tests.fakes.memory_database import MemoryDatabase
from tests.tables.table_loads import CHUNK_ROWS, DIM, KEYS, ROWS, TABLE, TAG, VECTORS, content, readers, rows_of

pytestmark = pytest.mark.usefixtures("small_chunks")


def lookup(cache: NumpyCache, keys: KeyArray) -> tuple[FloatArray, np.ndarray]:
    out, found = np.empty((keys.size, DIM), np.float32), np.zeros(keys.size, np.bool_)
    cache.create_lookup().query(Batch.of(0, keys, out, found))
    return out, found


class RecordingCache(NumpyCache):
    """Remembers the keys of every insertion."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inserted: list[KeyArray] = []

    def insert(self, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        self.inserted.append(keys.copy())
        super().insert(table, keys, vectors)


def assert_warm(cache: NumpyCache, keys: KeyArray, vectors: FloatArray, rows: int) -> None:
    out, found = lookup(cache, keys)
    np.testing.assert_array_equal(out[found], vectors[found])
    assert not found[rows:].any()
    assert found.sum() == cache.stats(0).resident_rows


@pytest.mark.parametrize(
    ("capacity", "fraction"), [(140, 0.3), (700, 0.2), (700, 0.999), (700, 1.0), (2000, 7.0), (700, 0.0), (700, -1.0), (0, 0.5)]
)
def test_the_whole_cache_is_filled_whatever_the_step(source: str, capacity: int, fraction: float) -> None:
    cache = RecordingCache([TABLE], [capacity])
    rows = min(cache.stats(0).capacity_rows, ROWS) if fraction > 0 else 0
    assert warm_up(cache, 0, TABLE, open_sparse_model(source, DIM), fraction) == rows
    np.testing.assert_array_equal(np.concatenate([KEYS[:0], *cache.inserted]), KEYS[:rows])
    assert max(map(len, cache.inserted), default=0) <= CHUNK_ROWS
    assert_warm(cache, KEYS, VECTORS, rows)


def test_a_cache_is_filled_from_a_database_with_no_more_rows_than_it_holds() -> None:
    cache, database = RecordingCache([TABLE], [700]), MemoryDatabase()
    database.open_table(TAG, DIM)
    database.insert(TAG, KEYS, VECTORS)
    assert warm_up(cache, 0, TABLE, DatabaseRows(database, TABLE), 1.0) == 700
    assert sum(keys.size for keys in cache.inserted) == 700


def test_a_warm_up_from_changed_files_or_into_a_broken_cache_fails(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, model = RecordingCache([TABLE], [700]), open_sparse_model(source, DIM)
    inserted = iter(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "insert", lambda *_: next(inserted))
        with pytest.raises(StopIteration):
            warm_up(cache, 0, TABLE, model, 0.5)
    assert readers() == []
    write_sparse_model(source, rows_of(ROWS, seed=2), overwrite=True)
    with pytest.raises(ModelFileError, match="changed"):
        warm_up(cache, 0, TABLE, model, 0.5)


def test_the_log_lines_of_hugectrs_warm_up_are_kept_the_last_step_included(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heads = (
        'EC initialization for model: "shop", num_tables: 1',
        f"EC initialization on device: 0 for {TAG}",
        "Initialize the embedding cache by inserting the same size model file with embedding cache from beginning",
    )
    for capacity, fraction, steps in (
        *((700, 0.3, (210, 210, 210, 70)), (700, 1.0, (700,))),
        (140, 1e-9, (64, 64, 12)),  # never a step of no rows
    ):
        caplog.clear()
        warm_up(NumpyCache([TABLE], [capacity]), 0, TABLE, open_sparse_model(source, DIM), fraction)
        assert [record.getMessage() for record in caplog.records] == [
            *heads,
            *(f"Initialize the embedding table 0 for iteration {i} with number of {n} keys." for i, n in enumerate(steps)),
        ]


def test_a_warm_cache_agrees_with_the_databases_on_keys_that_stand_twice(tmp_path: Path) -> None:
    keys, vectors = rows_of(CHUNK_ROWS)
    keys[40:] = keys[:24]
    keys[10] = keys[11] = keys[12]
    write_sparse_model(tmp_path / "m", (keys, vectors))
    cache = RecordingCache([TABLE], [1400])
    warm_up(cache, 0, TABLE, open_sparse_model(tmp_path / "m", DIM), 1.0)
    distinct = np.unique(keys)
    assert sum(map(len, cache.inserted)) == distinct.size  # of two rows at once, a cache keeps either
    out, found = lookup(cache, distinct)
    assert found.all()
    wanted = content(keys, vectors)
    assert content(distinct, out) == wanted
