"""How many rows a refresh fetches at once, and how often it rests."""

from typing import Any

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.lookup import refresh as module
from hps.lookup.chain import DatabaseChain
from hps.lookup.refresh import Pace, RefreshReport, refresh
from hps.statistics.metrics import Metrics
from hps.types import TableSpec
from tests.fakes.clock import Clock, Pauses
from tests.fakes.faulty_database import FaultyDatabase
from tests.fakes.memory_database import MemoryDatabase

TABLE = TableSpec("shop", "item", 3, 0.0, 1000)
ROW_BYTES = 8 + 4 * 3


@pytest.mark.parametrize(
    ("rows", "fraction", "paced", "fetched"),
    [
        (300, 0.0, False, [100, 100, 100]),
        (301, 0.0, False, [100, 100, 100, 1]),
        (99, 0.0, False, [99]),
        (0, 0.0, False, []),
        (300, 1.0, False, [100, 100, 100]),  # a chunk of memory at most
        (300, 7.0, False, [100, 100, 100]),
        (200, 0.08, False, [80, 80, 40]),  # of 1,008 rows
        (200, 0.01, False, [64, 64, 64, 8]),  # fewer are not worth a step
        (200, 0.0, True, [50, 50, 50, 50]),
        (130, 0.5, True, [50, 50, 30]),
    ],
)
def test_rows_are_fetched_in_steps(
    monkeypatch: pytest.MonkeyPatch, rows: int, fraction: float, paced: bool, fetched: list[int]
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 100 * ROW_BYTES + ROW_BYTES // 2)
    monkeypatch.setattr(module, "_PACED_ROWS", 50)
    keys, database = np.arange(rows), FaultyDatabase(MemoryDatabase())
    chain = DatabaseChain(None, database, metrics=Metrics())
    chain.open_table(TABLE)
    database.insert(TABLE.tag, keys, np.ones((rows, 3), np.float32))
    cache = NumpyCache.create([TABLE], [1008], 0)
    cache.insert(0, keys, np.zeros((rows, 3), np.float32))
    assert cache.dump(0).size == rows
    clock = Clock()
    pauses = Pauses(100, clock)
    pace = Pace(0.5, pauses.wait, clock) if paced else None
    assert refresh(cache, 0, TABLE, chain, fraction, pace) == RefreshReport(rows, 0)
    assert [one.size for one in database.fetched] == fetched
    assert len(pauses.pauses) == (len(fetched) if paced else 0)
    chain.close()


@pytest.mark.parametrize(("paced_bytes", "step"), [(10 * ROW_BYTES, 10), (11 * ROW_BYTES - 1, 10), (1, 1)])
def test_a_step_beside_lookups_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, paced_bytes: int, step: int) -> None:
    monkeypatch.setattr(module, "_PACED_BYTES", paced_bytes)
    seen: list[int] = []

    def chunk(*arguments: Any) -> int:
        seen.append(arguments[4].size)
        return int(arguments[4].size)

    monkeypatch.setattr(module, "_refresh_chunk", chunk)
    cache = NumpyCache.create([TABLE], [100], 0)
    cache.insert(0, np.arange(20), np.zeros((20, 3), np.float32))
    refresh(cache, 0, TABLE, DatabaseChain(None, None, metrics=Metrics()), 0.0, Pace(1.0, lambda _: False))
    assert seen == [step] * (20 // step)
