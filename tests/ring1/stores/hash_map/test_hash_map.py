"""The hash map database: its contract, its memory and its limits."""

import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from hps.configuration.tiers import VolatileDbConfig
from hps.errors import (
    DatabaseError,
    DatabaseTimeoutError,
    InvalidDtypeError,
    InvalidInputError,
    NotReadyError,
)
from hps.ground.registry import implementation
from hps.stores.base import LoadRecord, LogPosition
from hps.stores.hash_map import memory as hash_map_memory
from hps.stores.hash_map import table as hash_map_table
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.kernels import fetch
from hps.stores.hash_map.layout import DENSE_ROWS, FRESH_ROWS, MOVED
from hps.stores.hash_map.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Slabs, dense_rows
from hps.testing.databases import (
    AWKWARD_KEYS,
    DIM,
    TAG,
    AgingRowsContract,
    DatabaseContract,
    OrderedWritesContract,
    applied,
    changes_of,
    distinct_keys,
    fetched,
    vectors_of,
)
from hps.testing.readers import reading
from tests.tables.hash_map_inspection import colliding_keys, inspect, keys_with_hash, placed


class TestHashMapDatabase(DatabaseContract, OrderedWritesContract, AgingRowsContract):
    """With as few buckets as can be, which grow until they are segments; in segments from the start, and with stamps."""

    @pytest.fixture(params=["one bucket", "oldest"])
    def database(self, request):
        options = {"initial_buckets": 1, "allocation_rate": 1}
        if request.param == "oldest":
            options = {
                "initial_buckets": 4096,
                "max_batch_size": 1000,
                "overflow_margin": 10**6,
                "overflow_policy": "evict_oldest",
            }
        with closing(HashMapDatabase(**options)) as database:
            yield database

    def raw_rows(self, database, tag):
        return inspect(database, tag).vectors


@pytest.fixture(params=["one array", "segments"])
def database(request, monkeypatch):
    if request.param == "segments":
        monkeypatch.setattr(hash_map_memory, "SEGMENTED_FROM", 2)
    database = opened(initial_buckets=1)
    yield database
    database.close()


def opened(dim=DIM, **options):
    database = HashMapDatabase(**options)
    database.open_table(TAG, dim)
    return database


def filled(database, keys, dim=DIM, version=0):
    database.open_table(TAG, dim)
    database.insert(TAG, keys, vectors_of(keys, dim, version))
    return database


def assert_holds(database, keys, dim=DIM, version=0):
    out, found = fetched(database, TAG, keys, dim)
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(keys, dim, version))


def test_it_is_opened_as_configured():
    bounds = {"overflow_margin": 100, "overflow_policy": "evict_oldest", "overflow_resolution_target": 0.5}
    sizes = {"num_partitions": 3, "allocation_rate": 1 << 20, "max_batch_size": 10}
    for name in ("hash_map", "parallel_hash_map"):
        assert implementation("database", name) is HashMapDatabase
        database = HashMapDatabase.from_config(VolatileDbConfig(type=name, **bounds, **sizes))
        database.open_table(TAG, DIM)
        assert database.stats(TAG).capacity_rows == 300
        assert (database._overflow.target_rows, database._overflow.policy) == (50, "evict_oldest")
        options = database._new_table.keywords
        assert (options["batch_rows"], options["allocation_rate"]) == (10, 1 << 20)
    database = filled(HashMapDatabase.from_config(VolatileDbConfig(type="hash_map")), distinct_keys(10))
    assert database.stats(TAG).capacity_rows == 2**64 - 1  # by default nothing is evicted, and no stamp kept
    assert inspect(database, TAG).stamps == {}


def test_rows_of_deleted_keys_are_used_again(database):
    keys = distinct_keys(1000)
    filled(database, keys)
    overhead = database.stats(TAG).overhead_bytes
    for round_ in range(5):
        database.delete(TAG, keys)
        keys = distinct_keys(1000, seed=round_ + 10)
        filled(database, keys)
    assert database.stats(TAG).overhead_bytes == overhead
    more = distinct_keys(10, seed=99)
    filled(database, more)  # more than were deleted
    assert_holds(database, np.concatenate([keys, more]))


@pytest.mark.parametrize(
    ("keys", "step"),
    [
        (np.unique(np.concatenate([AWKWARD_KEYS, distinct_keys(30_000), colliding_keys(200)])), 777),
        (keys_with_hash(np.arange(5000, dtype=np.uint64) << np.uint64(40)), 100),  # crafted to fall into one segment
    ],
    ids=["any keys", "one segment"],
)
def test_growth_keeps_every_row(database, keys, step):
    for start in range(0, keys.size, step):
        filled(database, keys[start : start + step])
    assert_holds(database, keys)
    assert set(inspect(database, TAG).vectors) == set(keys.tolist())


def test_growth_that_was_interrupted_is_finished_by_the_next_writer_and_readers_are_sent_on(database, monkeypatch):
    keys = distinct_keys(9)
    filled(database, keys)
    old = database._tables[TAG]._buckets

    def interrupted(layout, number):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hash_map_memory, "retire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            filled(database, distinct_keys(10, seed=5))
    assert database._tables[TAG]._buckets is not old
    database.delete(TAG, keys[:1])
    assert_holds(database, keys[1:])
    out, found = np.full((keys.size, DIM), 3.0, np.float32), np.zeros(keys.size, np.bool_)
    assert fetch(old.layout, keys, out, found, out[0].copy(), 0, 0, 0) == (0, 0, MOVED)
    assert not found.any()
    assert (out == 3.0).all()


# -- the order of rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "dim", "stripes"), [(1000, 32, 1), (2**17, 32, 16), (2**20, 32, 128), (2**24, 128, 1024)])
def test_what_is_reserved_is_one_extent_of_stripes_of_a_megabyte_or_more(rows, dim, stripes):
    slabs = Slabs("table", 4 * dim, False, 1 << 28)
    slabs.reserve(rows)
    (extent,) = slabs.extents
    assert 1 << extent.stripe_bits == stripes
    assert 0 <= slabs.capacity_rows - rows <= rows / 256 + slabs.rows_per_slab
    slabs.reserve(rows)
    assert len(slabs.extents) == 1


def test_rows_that_were_reserved_lie_in_the_order_of_their_buckets_and_stay_so(monkeypatch):
    monkeypatch.setattr(hash_map_memory, "_STRIPE_BYTES", 1 << 16)
    database, keys = opened(32), distinct_keys(40_000)
    database.reserve(TAG, 20_000)
    full = database._tables[TAG]._slabs.capacity_rows
    filled(database, keys[:full], 32)
    (extent,) = database._tables[TAG]._slabs.extents
    for _ in range(2):
        hashes, rows = placed(database, TAG)
        of_keys = (hashes >> np.uint64(64 - extent.stripe_bits)).astype(np.int64)
        apart = (rows // extent.stripe_rows - of_keys) % (1 << extent.stripe_bits)
        assert extent.stripe_bits >= 4
        assert 0 < np.count_nonzero(apart) <= 0.15 * apart.size
        assert apart.mean() <= 0.4  # those that are not in their key's stripe are in the next, around the end
        database.delete(TAG, keys[:10_000])
        filled(database, keys[full : full + 10_000], 32)  # others take the places of half of them


def test_huge_pages_that_nobody_reserved_are_few_until_they_are_used():
    slabs = Slabs("table", 512, False, 1 << 28)
    while slabs.capacity_rows < 2**23:
        slabs.extend()
        extent = slabs.extents[-1]
        if extent.commit_bytes == HUGE_PAGE_BYTES:
            assert HUGE_PAGE_BYTES << extent.stripe_bits <= 2 * extent.first_row
        slabs.counters[FRESH_ROWS] = 0  # as if all had been used
    assert slabs.extents[-1].stripe_bits == 2


def test_a_pinned_table_grows_by_a_sixty_fourth():
    slabs = Slabs("table", 512, False, 1 << 28)
    slabs.reserve(2**20)
    slabs.pinned, before = True, slabs.count
    slabs.extend()
    assert slabs.count == before + before // 64


# -- dense tables -------------------------------------------------------------------------------------------------------


def dense_rows_of(database, tag=TAG):
    return int(database._tables[tag]._buckets.layout[DENSE_ROWS])


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (np.arange(2000), 2000),
        (np.arange(2000)[::-1].copy(), 2000),
        (np.random.default_rng(1).permutation(2000), 2000),
        (np.arange(1), 1),
        (np.arange(1, 2001), 2001),
        (np.concatenate([np.arange(1900), np.arange(100)]), 1900),  # repeated keys
        (np.arange(2000).repeat(2), 2000),
        (np.delete(np.arange(5000), np.arange(7, 71)), 5000),  # 64 are missing
        (np.delete(np.arange(5000), np.arange(7, 72)), 0),
        (np.delete(np.arange(500), np.arange(7, 37)), 0),  # few, but of few
        (np.concatenate([np.arange(1600), distinct_keys(106)]), 1600),  # a sixteenth is elsewhere
        (np.concatenate([np.arange(1590), distinct_keys(107)]), 0),
        (np.append(np.arange(2000), [-1, 2**63 - 1, -(2**63), 2**32]), 2000),
        (np.arange(0, 4000, 2), 0),
        (-np.arange(2000), 0),
        (np.arange(2000) << 32, 0),
        (np.arange(10**6, 10**6 + 2000), 0),
        (distinct_keys(2000), 0),
        (np.empty(0, np.int64), 0),
    ],
)
def test_a_table_is_dense_if_it_has_nearly_all_keys_from_0_on_and_few_others(keys, rows):
    for parts in (1, 7):
        assert dense_rows(keys.size, np.array_split(keys.astype(np.int64), parts)) == rows


def test_the_keys_of_a_table_are_read_only_until_it_cannot_be_dense(monkeypatch):
    read = []

    def chunks():
        for start in range(0, 10_000, 1000):
            read.append(start)
            yield distinct_keys(10_000)[start : start + 1000]

    assert dense_rows(10_000, chunks()) == 0
    assert read == [0]
    monkeypatch.setattr(hash_map_memory, "MAX_ROWS", 2000)  # more than a table can have are not dense
    assert [dense_rows(rows, [np.arange(rows)]) for rows in (2000, 2001)] == [2000, 0]


@pytest.mark.parametrize("why", ["it evicts", "it has rows", "it had rows", "it was reserved", "nobody knows its keys"])
def test_a_table_is_not_dense_if(why):
    database = opened(**({"overflow_margin": 10_000} if why == "it evicts" else {}))
    if why in ("it has rows", "it had rows"):
        filled(database, np.arange(10))
    if why == "it had rows":
        database.delete(TAG, np.arange(10))
    if why == "it was reserved":
        database.reserve(TAG, 10)
    database.reserve(TAG, 1000, () if why == "nobody knows its keys" else [np.arange(1000)])
    assert dense_rows_of(database) == 0
    filled(database, np.arange(1000))
    assert_holds(database, np.arange(1000))
    inspect(database, TAG)


@pytest.mark.parametrize("chunk_rows", [1, 4096, 10**9])
def test_scan_yields_more_rows_of_one_home_than_a_step_holds(database, chunk_rows):
    keys = np.concatenate([colliding_keys(6000, 2**31), distinct_keys(500)])
    filled(database, keys)
    chunks = [chunk for chunk, _ in database.scan(TAG, chunk_rows)]
    assert max(chunk.size for chunk in chunks) <= chunk_rows
    np.testing.assert_array_equal(np.sort(np.concatenate(chunks)), np.sort(keys))


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "dim"), [(None, 1), ("evict_oldest", 32)])
def test_memory_beyond_the_vectors_is_at_most_24_bytes_a_row_at_any_size(policy, dim):
    database = opened(dim, **({"overflow_margin": 10**6, "overflow_policy": policy} if policy else {}))
    keys = distinct_keys(60_000)
    worst = 0.0
    for start in range(0, keys.size, 500):
        database.insert(TAG, keys[start : start + 500], np.zeros((500, dim), np.float32))
        stats = database.stats(TAG)
        if stats.rows >= 10_000:
            worst = max(worst, stats.overhead_bytes / stats.rows)
    assert 14 < worst <= 24


def test_a_tiny_table_takes_a_few_pages_whatever_the_allocation_rate():
    database = filled(HashMapDatabase(allocation_rate=1 << 40), distinct_keys(10))
    assert database.stats(TAG).overhead_bytes <= 4 * PAGE_BYTES


def test_reserving_keeps_the_rows_never_shrinks_and_spares_growth(database):
    filled(database, distinct_keys(100, seed=9))
    database.reserve(TAG, 20_000)
    reserved = database._tables[TAG]._buckets
    filled(database, distinct_keys(19_900))
    database.reserve(TAG, 10)
    assert database._tables[TAG]._buckets is reserved
    stats = database.stats(TAG)
    assert stats.overhead_bytes / stats.rows < 22
    filled(database, distinct_keys(9000, seed=7))
    assert database._tables[TAG]._buckets is not reserved
    assert_holds(database, distinct_keys(100, seed=9))
    bounded = opened(num_partitions=2, overflow_margin=400)
    bounded.reserve(TAG, 10**9)  # no more than the margin lets in
    assert sum(bounded._tables[TAG]._buckets._counts()) <= 512


def test_more_rows_than_row_numbers_are_refused_before_anything_changes(database, monkeypatch):
    monkeypatch.setattr(hash_map_table, "MAX_ROWS", 100)
    keys = distinct_keys(101)
    filled(database, keys[:100])
    before = inspect(database, TAG).vectors
    with pytest.raises(DatabaseError, match=r"inserting 101 keys .* has 100: it would have more than 100 rows"):
        filled(database, keys, version=1)
    with pytest.raises(DatabaseError, match="reserving 101 rows"):
        database.reserve(TAG, 101)
    assert inspect(database, TAG).vectors == before
    filled(database, keys[:100], version=2)
    assert_holds(database, keys[:100], version=2)


def test_arguments_that_do_not_fit_are_refused_in_words(database):
    keys, out, found = distinct_keys(2), np.zeros((2, DIM), np.float32), np.zeros(2, np.bool_)
    unaligned = np.zeros(17, np.uint8)[1:].view(np.int64)
    for call, message in [
        (lambda: database.fetch(TAG, [1, 2], out, found), r"fetching from table .*: keys: got list, .* NumPy"),
        (lambda: database.fetch(TAG, unaligned, out, found), "aligned"),
        (lambda: database.fetch(TAG, keys, out[:, 1:].copy(), found), r"got shape \(2, 7\), expected \(2, 8\)"),
        (lambda: database.insert(TAG, keys, np.zeros((2, DIM))), f"{TAG}: vectors: got dtype float64, .* float32"),
    ]:
        with pytest.raises((InvalidInputError, InvalidDtypeError), match=message):
            call()


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_writer_that_waits_too_long_says_so_and_readers_go_on():
    database = filled(HashMapDatabase(timeout_s=0.05), distinct_keys(10))
    with database._tables[TAG]._writer:
        with pytest.raises(DatabaseTimeoutError, match="inserting 10 keys"):
            filled(database, distinct_keys(10), version=1)
        with pytest.raises(DatabaseTimeoutError, match="deleting 10 keys"):
            database.delete(TAG, distinct_keys(10))
        with pytest.raises(DatabaseTimeoutError, match="scanning"):
            next(database.scan(TAG, 10))
        assert_holds(database, distinct_keys(10))
        assert database.size(TAG) == 10
        assert database.stats(TAG).rows == 10
    filled(database, distinct_keys(10), version=1)
    assert_holds(database, distinct_keys(10), version=1)


def test_a_reader_of_a_bucket_that_stays_half_written_says_so_and_finds_the_rest():
    database = filled(HashMapDatabase(timeout_s=0.05), distinct_keys(200))
    (buckets,) = inspect(database, TAG).segments
    stuck = int(np.flatnonzero(buckets["mask"])[3])
    buckets["version"][stuck] += 1
    out, found = np.full((200, DIM), 3.0, np.float32), np.zeros(200, np.bool_)
    with pytest.raises(DatabaseTimeoutError, match="half-written"):
        database.fetch(TAG, distinct_keys(200), out, found)
    assert 0 < found.sum() < 200
    np.testing.assert_array_equal(out[found], vectors_of(distinct_keys(200)[found], DIM))
    assert (out[~found] == 3.0).all()
    buckets["version"][stuck] += 1
    assert_holds(database, distinct_keys(200))


def test_a_reader_waits_for_a_writer_that_lost_the_processor(monkeypatch):
    database = filled(HashMapDatabase(timeout_s=1e9), distinct_keys(200))
    (buckets,) = inspect(database, TAG).segments
    buckets["version"] += 1

    def gets_it_back(_seconds):
        buckets["version"] += 1

    monkeypatch.setattr(hash_map_table, "time", SimpleNamespace(monotonic=time.monotonic, sleep=gets_it_back))
    assert_holds(database, distinct_keys(200))


# -- concurrency ------------------------------------------------------------------------------------------------------


def test_no_vector_is_torn_in_a_bucket_that_is_written_all_the_time():
    """Eight keys of one bucket are replaced without a pause, and two of them deleted and inserted.

    A vector of eight kilobytes takes as long to copy as to write, so that many fetches would be torn without the check.
    """
    dim = 2000
    database = opened(dim, initial_buckets=1)
    keys = distinct_keys(8)
    versions = np.stack([vectors_of(keys, dim, version) for version in range(8)])
    database.insert(TAG, keys, versions[0])

    def read(rng):
        picks = rng.integers(0, 8, 256)
        out, found = np.full((256, dim), np.nan, np.float32), np.zeros(256, np.bool_)
        assert database.fetch(TAG, keys[picks], out, found) == np.count_nonzero(found)
        assert found[picks < 6].all(), "a key that was never deleted was absent"
        assert np.isnan(out[~found]).all(), "a row that was not found was written"
        ends = versions[:, :, [0, -1]][:, picks[found]] == out[:, [0, -1]][found]
        assert ends.all(axis=2).any(axis=0).all(), "a vector of two moments"
        return 256

    each = np.arange(160)
    many, changing = np.tile(keys, 20), versions[each // 8 % 8, each % 8]
    with reading(read, threads=2) as checked:
        while min(checked) < 10_000:  # inside one call for long
            database.insert(TAG, many, changing)
            database.delete(TAG, keys[6:])


def test_a_scan_of_a_closed_database_ends_what_it_began():
    database = filled(HashMapDatabase(), distinct_keys(100))
    scan = database.scan(TAG, 10)
    first = next(scan)[0]
    database.close()
    assert first.size + sum(keys.size for keys, _ in scan) == 100
    with pytest.raises(NotReadyError):
        database.scan(TAG, 10)


@pytest.mark.parametrize(
    ("rows", "margin"), [(100, {}), (60_000, {}), (60_000, {"overflow_margin": 1000, "overflow_policy": "evict_oldest"})]
)
def test_the_room_that_is_asked_for_is_what_a_load_then_takes(rows, margin):
    with closing(opened(**margin)) as database:
        keys = distinct_keys(rows)
        database.insert(TAG, keys[:50], vectors_of(keys[:50], DIM))
        table, before = database._tables[TAG], database.stats(TAG)
        asked = table.further_bytes(rows)
        database.reserve(TAG, rows)
        database.insert(TAG, keys, vectors_of(keys, DIM))
        after = database.stats(TAG)
        taken = after.vector_bytes + after.overhead_bytes - before.vector_bytes - before.overhead_bytes
        assert abs(asked - taken) <= 0.02 * taken + 4 * PAGE_BYTES
        assert table.further_bytes(after.rows) == 0


# -- updates of a log --------------------------------------------------------------------------------------------------


def test_the_order_outlives_the_eviction_of_a_row():
    database = opened(num_partitions=1, overflow_margin=100, overflow_policy="evict_oldest", max_batch_size=10)
    keys = distinct_keys(1000)
    database.follow_log(TAG)
    for start in range(0, 1000, 50):
        assert all(applied(database, TAG, changes_of(keys[start : start + 50], 10)))
    assert database.size(TAG) <= 100
    assert not any(applied(database, TAG, changes_of(keys, 9)))
    assert database.stats(TAG).capacity_rows == 100
    database.close()


def test_sequences_of_any_bits_are_kept(database):
    keys = distinct_keys(6)
    sequences = np.array([1, 2**63 - 1, 0x7FA00001_FFA00001, 0x7FC00000_7F800001, 2**32 - 1, 1 << 31])
    assert all(applied(database, TAG, changes_of(keys, sequences.tolist(), version=1)))
    assert applied(database, TAG, changes_of(keys, (sequences - 1).tolist(), version=2)) == [False] * 6
    assert all(applied(database, TAG, changes_of(keys, sequences.tolist(), version=3)))


def test_after_a_change_that_failed_halfway_each_row_has_the_sequence_of_its_state(database, monkeypatch):
    def fail(table, keys):
        raise DatabaseError("was told to fail")

    keys = distinct_keys(5)
    applied(database, TAG, changes_of(keys[:3], 10, version=1))
    applied(database, TAG, changes_of(keys[4:], 40, version=1))
    changes = changes_of(keys[[4, 0, 1, 2, 3]], 30, [False, False, True, True, False], 3)  # the first is outdated
    with monkeypatch.context() as patched:
        patched.setattr("hps.stores.hash_map.table.HashMapTable.delete", fail)
        with pytest.raises(DatabaseError, match="told"):
            database.apply(TAG, changes, {"p": LogPosition("18", 30)})
    assert database.follow_log(TAG) == {}
    assert applied(database, TAG, changes_of(keys, [20, 20, 9, 29, 39], version=2)) == [False, True, False, False, False]
    wanted = [vectors_of(keys[i : i + 1], DIM, version)[0] for i, version in enumerate((3, 2, 1, 3, 1))]
    np.testing.assert_array_equal(fetched(database, TAG, keys, DIM)[0], wanted)


def test_a_load_is_older_than_any_change_also_of_a_table_that_followed_a_log(database):
    keys = distinct_keys(5)
    applied(database, TAG, changes_of(keys, 10), {"p": LogPosition("1", 10)})
    database.load_chunk(TAG, keys, vectors_of(keys, DIM), LoadRecord("other", 5, 5))
    assert database.follow_log(TAG) == {}
    assert all(applied(database, TAG, changes_of(keys, 9)))


# -- integrity -----------------------------------------------------------------------------------------------------------


def damage_version(table, bucket):
    bucket["version"] |= 1


def damage_overflow(table, bucket):
    bucket["overflow"] += 1


def damage_row(table, bucket):
    bucket["rows"][0] = bucket["rows"][1]


def damage_count(table, bucket):
    table._slabs.counters[0] += 1


def damage_free_list(table, bucket):
    table._slabs.counters[1] += 1


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damage_version, "a bucket is half-written"),
        (damage_overflow, "overflow counts differ"),
        (damage_row, "distinct rows, each linked or free once differ"),
        (damage_count, "distinct keys and the count of rows differ"),
        (damage_free_list, "rows on the free lists and their count differ"),
    ],
)
def test_a_damaged_table_is_named(damage, complaint):
    database, keys = opened(), distinct_keys(500)
    database.insert(TAG, keys, vectors_of(keys, DIM))
    database.delete(TAG, keys[:100])
    assert database.check_integrity() == []
    segments = inspect(database, TAG).segments
    bucket = next(bucket for segment in segments for bucket in segment if bucket["mask"] & 3 == 3)
    damage(database._tables[TAG], bucket)
    [finding] = database.check_integrity()
    assert f"checking table '{TAG}': {complaint}" in finding
    database.close()
