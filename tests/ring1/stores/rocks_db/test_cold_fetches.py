"""Fetches of rows that are not in memory: many small multi-gets wait for the disk at once."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest

from hps.stores.rocks_db import table as table_module
from hps.stores.rocks_db.database import RocksDatabase

TAG, DIM, ROWS = "hps_et.m.t", 3, 500


@pytest.fixture
def pieces(path: Path, monkeypatch):
    """Yield a fetch, which returns the sizes of its multi-gets, and a switch for what the kernel counts as read."""
    database = RocksDatabase(path)
    database.open_table(TAG, DIM)
    keys = np.arange(ROWS)
    vectors = np.random.default_rng(1).random((ROWS, DIM), np.float32)
    database.insert(TAG, keys, vectors)
    sizes: list[int] = []
    engine = database._tables[TAG]._engine
    get = engine.get
    monkeypatch.setattr(engine, "get", lambda family, batch, doing: sizes.append(len(batch)) or get(family, batch, doing))
    blocks = {"a call": 0}
    calls = count()
    monkeypatch.setattr(table_module, "_blocks_read", lambda: next(calls) * blocks["a call"])

    def fetch() -> list[int]:
        sizes.clear()
        out, found = np.empty((ROWS, DIM), np.float32), np.zeros(ROWS, np.bool_)
        assert database.fetch(TAG, keys, out, found) == ROWS
        assert np.array_equal(out, vectors)
        return list(sizes)

    yield fetch, blocks
    database.close()


def test_a_warm_fetch_is_one_multi_get(pieces):
    fetch, _ = pieces
    assert fetch() == [ROWS]
    assert fetch() == [ROWS]


def test_after_a_cold_fetch_many_multi_gets_wait_for_the_disk_at_once(pieces):
    fetch, blocks = pieces
    blocks["a call"] = 100 * ROWS
    assert fetch() == [ROWS]
    assert max(fetch()) <= 16
    blocks["a call"] = 0
    assert max(fetch()) <= 16
    assert fetch() == [ROWS]


def test_a_few_reads_do_not_make_a_fetch_cold(pieces):
    fetch, blocks = pieces
    blocks["a call"] = 8
    assert fetch() == fetch() == [ROWS]


def test_this_system_counts_reads():
    assert table_module._blocks_read() >= 0
