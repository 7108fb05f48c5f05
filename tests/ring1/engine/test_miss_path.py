"""Which path is quicker, and for which keys that is timed. What the paths then do is in `test_misses.py`."""

from types import SimpleNamespace

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.engine import miss_path
from hps.engine.chain import DatabaseChain
from hps.engine.miss_path import Timing
from hps.engine.session import CachedSession
from hps.statistics.metrics import Metrics
from hps.stores.row_files.database import RowFilesDatabase
from hps.tensors.batch import Batch
from hps.types import TableSpec
from tests.fakes.clock import Clock
from tests.fakes.memory_database import MemoryDatabase


@pytest.mark.parametrize(("link", "copy", "faster"), [(2e6, 1e6, True), (1e6, 1e6, True), (1e6, 1.001e6, False)])
def test_a_device_reads_in_place_unless_the_host_is_quicker(link: float, copy: float, faster: bool) -> None:
    timing = Timing(link, copy)
    assert timing.link_is_faster is faster
    assert str(timing) == f"a test answered {link / 1e6:.1f} M keys/s in place and {copy / 1e6:.1f} M/s through the host"


@pytest.mark.parametrize("above", [None, MemoryDatabase])
def test_no_table_below_another_database_is_read_in_place(tmp_path, above) -> None:
    """Other servers write to a database that they share, and what is below it does not know."""
    table = TableSpec("m", "t", 4, 0.0, 1000)
    chain = DatabaseChain(above() if above else None, RowFilesDatabase(tmp_path), metrics=Metrics())
    chain.open_table(table)
    assert (chain.host_table(table) is None) == (above is not None)
    chain.close()


@pytest.mark.parametrize(
    ("rows", "max_keys", "dim", "size"),
    [
        *[(0, 1000, 4, 0), (3, 1000, 4, 3), (50, 20, 4, 20), (20, 20, 4, 20), (21, 20, 4, 20)],
        (300, 1000, 4, 64),  # as many keys as a sample has
        (300, 1000, 25, 10),  # as many bytes
        (300, 1000, 10_000, 1),  # one at least
    ],
)
def test_a_sample_is_one_lookup_of_keys_from_several_places(
    monkeypatch: pytest.MonkeyPatch, rows: int, max_keys: int, dim: int, size: int
) -> None:
    monkeypatch.setattr(miss_path, "_SAMPLE_KEYS", 64)
    monkeypatch.setattr(miss_path, "_SAMPLE_BYTES", 1000 + 24)
    table, database = TableSpec("m", "t", dim, 0.0, max_keys), MemoryDatabase()
    database.open_table(table.tag, dim)
    database.insert(table.tag, np.arange(rows), np.zeros((rows, dim), np.float32))
    sample = miss_path._sample(database, table)
    assert sample.size == size
    assert len(set(sample.tolist())) == size
    assert set(sample.tolist()) <= set(range(rows))
    if rows == 300 and size == 64:
        assert sample.max() >= 64, "keys of one place alone"
        assert sample.tolist() != sorted(sample.tolist())


def test_a_path_is_as_quick_as_its_best_round_and_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rounds, asked = Clock(7.0), iter([9.0, 4.0, 2.0, 3.0]), []
    table = TableSpec("m", "t", 4, 0.0, 1000)
    chain = DatabaseChain(MemoryDatabase(), None, metrics=Metrics())
    cache = NumpyCache.create([table], [100], 0)

    def run(self: CachedSession, batch: Batch) -> None:
        clock.now += next(rounds)
        asked.append(batch.keys[0].tolist())
        cache.insert(0, batch.keys[0], np.zeros((10, 4), np.float32))

    monkeypatch.setattr(miss_path, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(CachedSession, "run", run)
    assert miss_path._keys_per_s(cache, chain, 0, np.arange(10)) == 10 / 2.0
    assert asked == [list(range(10))] * 4
    assert not cache.dump(0).size
    assert miss_path._keys_per_s(cache, chain, 0, np.empty(0, np.int64)) == 0.0
    assert len(asked) == 4
    cache.close()
