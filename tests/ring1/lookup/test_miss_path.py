"""Which path is quicker, and for which keys that is timed. What the paths then do is in `test_misses.py`."""

import numpy as np
import pytest

from hps.lookup import miss_path
from hps.lookup.miss_path import Timing
from hps.types import TableSpec
from tests.fakes.memory_database import MemoryDatabase


@pytest.mark.parametrize(("link", "copy", "faster"), [(2e6, 1e6, True), (1e6, 1e6, True), (1e6, 1.001e6, False)])
def test_a_device_reads_in_place_unless_the_host_is_quicker(link: float, copy: float, faster: bool) -> None:
    timing = Timing(link, copy)
    assert timing.link_is_faster is faster
    assert str(timing) == f"a test answered {link / 1e6:.1f} M keys/s in place and {copy / 1e6:.1f} M/s through the host"


@pytest.mark.parametrize(
    ("rows", "max_keys", "dim", "size"),
    [
        (0, 1000, 4, 0),
        (3, 1000, 4, 3),
        (50, 20, 4, 20),
        (20, 20, 4, 20),
        (21, 20, 4, 20),
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
