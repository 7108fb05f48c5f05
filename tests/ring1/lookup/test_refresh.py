"""Embedding caches are refreshed from the databases."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.errors import DatabaseError
from hps.lookup.chain import DatabaseChain
from hps.lookup.refresh import RefreshReport, refresh
from hps.models.sample import sample_vectors
from hps.statistics.metrics import Metrics
from hps.tensors.segments import Segment
from hps.types import FloatArray, KeyArray
from tests.fakes.faulty_database import FaultyDatabase
from tests.fakes.memory_database import MemoryDatabase
from tests.tables.table_loads import (
    CHUNK_ROWS,
    DIM,
    KEYS,
    ROWS,
    TABLE,
    TAG,
    VECTORS,
    cut_into_small_chunks,
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_small_chunks(monkeypatch)


def lookup(cache: NumpyCache, keys: KeyArray) -> tuple[FloatArray, np.ndarray]:
    out, found = np.empty((keys.size, DIM), np.float32), np.zeros(keys.size, np.bool_)
    cache.create_lookup().query([Segment(0, keys, out, found)])
    return out, found


@pytest.fixture
def tiers() -> Iterator[tuple[NumpyCache, DatabaseChain, FaultyDatabase]]:
    """A cache of 500 of the rows, and a chain over a database that holds all of them."""
    database = FaultyDatabase(MemoryDatabase())
    chain = DatabaseChain(None, database, metrics=Metrics())
    chain.open_table(TABLE)
    database.insert(TAG, KEYS, VECTORS)
    cache = NumpyCache([TABLE], [2000])
    cache.insert(0, KEYS[:500], VECTORS[:500])
    yield cache, chain, database
    chain.close()


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 1.0])
def test_refresh_brings_new_vectors_and_erases_deleted_keys(
    tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase], fraction: float
) -> None:
    cache, chain, database = tiers
    new = sample_vectors(KEYS, DIM, 9)
    database.insert(TAG, KEYS[:200], new[:200])
    database.delete(TAG, KEYS[450:])
    assert refresh(cache, 0, TABLE, chain, fraction) == RefreshReport(updated=450, erased=50)
    out, found = lookup(cache, KEYS)
    np.testing.assert_array_equal(found, np.arange(ROWS) < 450)
    np.testing.assert_array_equal(out[:200], new[:200])
    np.testing.assert_array_equal(out[200:450], VECTORS[200:450])
    assert max(fetched.size for fetched in database.fetched) <= CHUNK_ROWS


def test_refresh_of_an_empty_cache_asks_nothing(tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase]) -> None:
    _, chain, database = tiers
    assert refresh(NumpyCache([TABLE], [700]), 0, TABLE, chain, 0.5) == RefreshReport(0, 0)
    assert refresh(NumpyCache([TABLE], [0]), 0, TABLE, chain, 0.5) == RefreshReport(0, 0)
    assert database.fetched == []


def test_a_database_that_fails_erases_nothing(tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase]) -> None:
    cache, chain, database = tiers
    database.failing = {"fetch"}
    with pytest.raises(DatabaseError):
        refresh(cache, 0, TABLE, chain, 0.5)
    out, found = lookup(cache, KEYS[:500])
    assert found.all()
    np.testing.assert_array_equal(out, VECTORS[:500])


def test_a_modification_during_a_refresh_is_not_undone(tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase]) -> None:
    """Between the fetch and the update of the cache, the vectors change in the database and in the cache."""
    cache, chain, database = tiers
    new = sample_vectors(KEYS, DIM, 9)
    database.gate_late = threading.Event()
    reports: list[RefreshReport] = []
    refreshing = threading.Thread(target=lambda: reports.append(refresh(cache, 0, TABLE, chain, 1.0)))
    refreshing.start()
    assert database.entered.acquire(timeout=30)  # the first chunk is fetched, not yet written
    try:
        chain.insert(TABLE, KEYS, new, lambda done: cache.update(0, KEYS[:500], new[:500]))
    finally:
        database.gate_late.set()
        refreshing.join(60)
    assert reports == [RefreshReport(updated=500, erased=0)]
    out, found = lookup(cache, KEYS[:500])
    assert found.all()
    np.testing.assert_array_equal(out, new[:500])


def test_a_table_that_never_rests_is_erased_rather_than_left_old(
    tiers: tuple[NumpyCache, DatabaseChain, FaultyDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, chain, _ = tiers
    fetch = chain.fetch

    def modified_meanwhile(*args: Any) -> int:
        count = fetch(*args)
        chain.insert(TABLE, KEYS[:1], VECTORS[:1], lambda done: None)
        return count

    monkeypatch.setattr(chain, "fetch", modified_meanwhile)
    monkeypatch.setattr("hps.lookup.refresh.time.sleep", lambda seconds: None)
    assert refresh(cache, 0, TABLE, chain, 1.0) == RefreshReport(updated=0, erased=500)
    assert not lookup(cache, KEYS)[1].any()
