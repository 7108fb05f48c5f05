"""The hash map with many rows: what it takes of the machine's memory, by the system's own account, and where its rows lie."""

import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.stores.hash_map import memory as hash_map_memory
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.memory import PAGE_BYTES
from hps.testing.databases import TAG, distinct_keys, fetched, vectors_of
from tests.servers.child_processes import run_alone
from tests.tables.hash_map_inspection import colliding_keys, inspect


def opened(dim, **options):
    database = HashMapDatabase(**options)
    database.open_table(TAG, dim)
    return database


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def check_growth(dim, rows, reserved, dense=False):
    keys = np.arange(rows) if dense else distinct_keys(rows)
    vectors = np.ones((50_000, dim), np.float32)
    warm = opened(dim)
    warm.insert(TAG, keys[:1000], vectors[:1000])
    before = resident_bytes()
    database = opened(dim)
    database.reserve(TAG, reserved, [keys] if dense else ())
    for start in range(0, keys.size, 50_000):
        database.insert(TAG, keys[start : start + 50_000], vectors)
    grown = resident_bytes() - before
    stats = database.stats(TAG)
    assert abs(grown - stats.vector_bytes - stats.overhead_bytes) < 1 << 20
    if dense or not reserved:
        assert grown / stats.rows <= 4 * dim + 24


def check_growth_of_tables():
    for dim, rows, reserved in ((1, 400_000, 0), (32, 150_000, 450_000)):
        check_growth(dim, rows, reserved)
    for dim, rows in ((32, 50_000), (1, 400_000)):
        check_growth(dim, rows, rows, dense=True)


def test_the_process_grows_by_what_the_statistics_say():
    run_alone(check_growth_of_tables, real=True)


def check_refused_memory(segmented_from):
    hash_map_memory.SEGMENTED_FROM = segmented_from or hash_map_memory.SEGMENTED_FROM
    database = opened(1, initial_buckets=1)
    keys = distinct_keys(200_000)
    vectors = vectors_of(keys, 64)
    database.open_table("big", 64)
    database.insert("big", keys[:1000], vectors[:1000])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 20), hard))
    try:
        with pytest.raises(
            DatabaseError, match=r"table 'big': \d+ (more rows|buckets): the system refused \d+ bytes"
        ) as caught:
            database.insert("big", keys, vectors)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert isinstance(caught.value.__cause__, OSError)
    assert 1000 <= len(inspect(database, "big").vectors) < 200_000
    database.insert("big", keys, vectors)
    out, found = fetched(database, "big", keys, 64)
    assert found.all()
    np.testing.assert_array_equal(out, vectors)


@pytest.mark.parametrize("segmented_from", [0, 2], ids=["one array", "segments"])
def test_a_table_that_gets_no_memory_says_so_and_stays_whole(segmented_from):
    run_alone(check_refused_memory, segmented_from)


def test_a_dropped_table_gives_its_memory_back_once_its_last_reader_is_done():
    with closing(opened(dim=128)) as database:
        keys = np.arange(100_000)
        database.insert(TAG, keys, np.ones((keys.size, 128), np.float32))
        held = database.stats(TAG)
        scan = database.scan(TAG, 1000)
        before = resident_bytes()
        database.drop_table(TAG)
        assert next(scan)[1].all()
        assert before - resident_bytes() < held.vector_bytes / 2
        del scan
        assert before - resident_bytes() > 0.95 * (held.vector_bytes + held.overhead_bytes)


def test_an_overflow_count_that_reached_its_limit_stays_and_nothing_is_lost():
    database = HashMapDatabase(initial_buckets=10_000)
    keys = colliding_keys(66_000)
    database.open_table(TAG, 1)
    database.insert(TAG, keys, vectors_of(keys, 1))
    database.delete(TAG, keys[:65_000])
    out, found = fetched(database, TAG, keys[65_000:], 1)
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(keys[65_000:], 1))
    assert not fetched(database, TAG, keys[:65_000:100].copy(), 1)[1].any()
    assert (inspect(database, TAG).buckets["overflow"] == 0xFFFF).any()


def test_tables_that_are_open_at_the_exit_are_not_unpinned_while_modules_are_taken_apart():
    script = """
import sys
import numpy as np
import hps
from hps.stores.hash_map.database import HashMapDatabase

class Pinner:
    def pin(self, address, size_bytes, *, read_only=False): pass
    def unpin(self, address, ending=sys.is_finalizing): assert not ending(), "the modules that unpin may be gone"

database = HashMapDatabase()
database.open_table("t", 4)
database.insert("t", np.arange(9), np.zeros((9, 4), np.float32))
table = database.host_table("t")
table.pin(Pinner())
hps.kept = table.layout()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
