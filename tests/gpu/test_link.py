"""A CUDA cache that is attached to hash map tables: its lookups go on into the map by themselves."""

import ctypes

import numpy as np
import pytest

from hps.errors import DeviceError, InvalidInputError, NotReadyError
from hps.stores.hash_map.layout import SEGMENTS, STRIPES, VERSION_BYTES, VERSIONS
from hps.tensors.batch import Batch
from hps.testing.caches import AWKWARD_KEYS, DEFAULT, distinct_keys
from tests.gpu.cupy_if_installed import cupy
from tests.gpu.linked_tables import LinkedTables, rows_of

if cupy:
    from hps.cache.cuda import lookup as lookups
    from hps.cache.cuda.links import CudaPinner

pytestmark = pytest.mark.gpu

SMALL, LARGE = 700, 20_000
"""Keys of a lookup that probes the map in the kernel of the query, and of one that orders its misses first."""


def check(keys: np.ndarray, out: np.ndarray, known: np.ndarray, version: int = 0) -> None:
    """Every row is that of its key, or the default where the key is not `known`."""
    there = np.isin(keys, known)
    expected = np.where(there[:, None], rows_of(keys, out.shape[1], version), np.float32(DEFAULT))
    wrong = (out != expected).any(1)
    assert not wrong.any(), f"{wrong.sum()} of {keys.size} vectors are wrong; the first is of key {keys[wrong][0]}"


def mixed(known: np.ndarray, n: int, seed: int = 3) -> np.ndarray:
    """n keys: most of them known, some twice and more, every fifth absent."""
    rng = np.random.default_rng(seed)
    absent = np.setdiff1d(distinct_keys(n, seed=77), known)
    return rng.permutation(np.concatenate([rng.choice(known, n - n // 5), rng.choice(absent, n // 5)]))


@pytest.fixture(autouse=True, params=[False, True], ids=["", "index"])
def index(request, monkeypatch):
    """Every test is made with the index of the map in host memory, and on the device."""
    monkeypatch.setattr(LinkedTables, "index", request.param)
    return request.param


@pytest.mark.parametrize("n", [1, 33, SMALL, LARGE])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 32, 100, 128, 300])
def test_lookups_answer_what_the_map_holds(dim, n):
    known = np.union1d(distinct_keys(30_000), AWKWARD_KEYS)
    with LinkedTables([dim], 100_000) as tables:
        tables.insert(known)
        keys = mixed(known, n) if n > 1 else known[:1]
        there = np.isin(keys, known)
        for asked_again in (False, True):
            out, found, lookup = tables.ask(keys)
            check(keys, out, known)
            assert np.array_equal(found, there)
            assert sum(lookup.absent) == (~there).sum()
            if not asked_again:
                assert list(lookup.linked) == [there.sum()]


DENSE = 30_000
EDGES = np.array([-1, -DENSE, DENSE, DENSE + 1, 2**32, 2**32 + 5, 2**63 - 1, -(2**63)])
"""Keys beside those of a dense table, which are 0 to DENSE - 1."""


@pytest.mark.parametrize("n", [1, 33, SMALL, LARGE])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 32, 100, 128, 300])
@pytest.mark.parametrize("others", [0, 10_000])
def test_lookups_answer_what_a_dense_table_holds(dim, n, others):
    known = np.concatenate([np.random.default_rng(4).permutation(DENSE), EDGES[3:], distinct_keys(others)])
    with LinkedTables([dim], 0, dense=DENSE) as tables:
        tables.insert(known)
        keys = np.concatenate([mixed(known, n), EDGES, [0, DENSE - 1]]) if n > 1 else np.array([DENSE - 1])
        for missing in ([], [0, 77, DENSE - 1], []):  # holes come and go
            if missing:
                tables.delete(np.array(missing))
            else:
                tables.insert(known)
            out, found, lookup = tables.ask(keys)
            there = np.setdiff1d(known, missing)
            check(keys, out, there)
            assert np.array_equal(found, np.isin(keys, there))
            assert sum(lookup.linked) == found.sum()


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize("place_of_keys", ["host", "device"])
@pytest.mark.parametrize("place_of_out", ["host", "device"])
def test_keys_and_outputs_may_be_in_host_memory(n, place_of_keys, place_of_out):
    known = distinct_keys(30_000)
    with LinkedTables([100], 1000) as tables:
        tables.insert(known)
        keys, out, found = mixed(known, n), np.full((n, 100), np.nan, np.float32), np.zeros(n, np.bool_)
        on_device = cupy.asarray(out)
        batch = Batch.of(
            0, keys if place_of_keys == "host" else cupy.asarray(keys), out if place_of_out == "host" else on_device, found
        )
        lookup = tables.cache.create_lookup()
        assert lookup.query(batch) == 0
        lookup.finish()
        check(keys, out if place_of_out == "host" else cupy.asnumpy(on_device), known)
        assert np.array_equal(found, np.isin(keys, known))


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_map_that_is_not_authoritative_leaves_what_it_has_not(n):
    known = distinct_keys(30_000)
    upper, rest = known[:20_000], known[20_000:]
    with LinkedTables([32], 1000, authoritative=False) as tables:
        tables.insert(upper)
        keys = np.random.default_rng(1).choice(known, n)
        batch, lookup = tables.batch(keys), tables.cache.create_lookup()
        below = np.isin(keys, rest)
        assert lookup.query(batch) == below.sum()
        assert lookup.counts == [below.sum()]
        assert list(lookup.linked) == [(~below).sum()]
        assert not sum(lookup.absent)
        [missed] = lookup.unique()
        assert np.array_equal(missed.keys, np.unique(keys[below]))
        found = missed.keys % 2 == 0
        missed.buffer()[found] = rows_of(missed.keys[found], 32)
        missed.stage(0, found.size)
        missed.scatter(found)
        missed.insert(found)
        lookup.finish()
        check(keys, cupy.asnumpy(batch.outs[0]), np.union1d(upper, rest[rest % 2 == 0]))


@pytest.fixture
def repeats(monkeypatch):
    """The flags of each repeat."""
    flags, real = [], lookups.launch_and_wait

    def counted(*arguments):
        flags.append(real(*arguments))
        return flags[-1]

    monkeypatch.setattr(lookups, "launch_and_wait", counted)
    return flags


def plain(keys, dim, table=0):
    """A batch that a lookup can repeat."""
    return Batch.of(table, cupy.asarray(keys), cupy.full((keys.size, dim), cupy.nan, cupy.float32))


def test_repeats_read_the_table_as_it_is(repeats):
    known = distinct_keys(200_000)
    with LinkedTables([32, 100], 2000) as tables:
        lookup, there = tables.cache.create_lookup(), 0
        for version, size in enumerate((300, 3000, 30_000, 30_000, 200_000)):  # gets segments, and other layouts
            for table in (0, 1):
                tables.insert(known[there:size], version, table)
                tables.insert(known[: size // 2], version, table)
            for seed in range(6):
                n, table = (33, SMALL, 3000)[seed % 3], seed % 2
                keys = np.random.default_rng(10 * version + seed).choice(known[: size // 2], n)
                keys[::9] = np.setdiff1d(distinct_keys(400, seed=78), known)[: keys[::9].size]
                batch = plain(keys, tables.specs[table].dim, table)
                assert lookup.query(batch) == 0
                lookup.finish()
                check(keys, cupy.asnumpy(batch.outs[0]), known[: size // 2], version)
                assert sum(lookup.absent) == keys[::9].size
            there = size
        assert repeats.count(1) >= 20


def test_keys_that_a_repeat_leaves_are_answered_by_the_host(repeats):
    known = distinct_keys(30_000)
    upper, rest = known[:20_000], known[20_000:]
    with LinkedTables([32], 1000, authoritative=False) as tables:
        tables.insert(upper)
        lookup = tables.cache.create_lookup()
        for seed in range(12):
            keys = np.random.default_rng(seed).choice(known if seed % 3 == 2 else upper, SMALL)
            batch, below = plain(keys, 32), np.isin(keys, rest)
            left = lookup.query(batch)
            assert left == sum(lookup.counts if left else []) == below.sum()
            for missed in lookup.unique() if left else ():
                assert np.array_equal(missed.keys, np.unique(keys[below]))
                missed.buffer()[:] = rows_of(missed.keys, 32)
                missed.stage(0, missed.keys.size)
                missed.scatter(np.ones(missed.keys.size, np.bool_))
            lookup.finish()
            check(keys, cupy.asnumpy(batch.outs[0]), known)
        assert repeats.count(1) >= 3
        assert repeats.count(lookups.LEFT | 1) >= 3


def test_repeats_leave_a_dropped_table_to_the_host(repeats):
    known = distinct_keys(3000)
    with LinkedTables([32], 28) as tables:
        tables.insert(known)
        lookup = tables.cache.create_lookup()
        for _ in range(3):
            batch = plain(known, 32)
            assert lookup.query(batch) == 0
            check(known, cupy.asnumpy(batch.outs[0]), known)
        tables.database.drop_table(tables.specs[0].tag)
        tables.cache.erase(0, known)
        for _ in range(3):
            assert lookup.query(plain(known, 32)) == known.size
            lookup.unique()
            lookup.finish()
        assert repeats.count(1) >= 2


def test_a_table_may_grow_between_lookups():
    known = distinct_keys(300_000)
    with LinkedTables([32], 1000) as tables:
        there = 0
        for size in (0, 1, 300, 3000, 30_000, 100_000, 300_000):  # buckets double, get segments, which grow one by one
            tables.insert(known[there:size])
            there = size
            for n in (SMALL, LARGE):
                keys = np.concatenate([mixed(known, n), known[max(0, size - 200) : size]])
                check(keys, tables.ask(keys)[0], known[:size])


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_dropped_table_is_left_to_the_host(n):
    known = distinct_keys(n)
    with LinkedTables([32], 28) as tables:
        tables.insert(known)
        check(known, tables.ask(known)[0], known)
        tables.database.drop_table(tables.specs[0].tag)
        tables.cache.erase(0, known)
        assert tables.left(known) == n
        tables.database.open_table(tables.specs[0].tag, 32)  # another table of that name
        tables.insert(known, 1)
        assert tables.left(known) == n
        tables.attach()
        check(known, tables.ask(known)[0], known, 1)


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_nothing_is_admitted_while_the_table_changes(n):
    known = distinct_keys(n)
    with LinkedTables([32], 8 * n) as tables:
        tables.insert(known)
        with tables.cache.changing(0):
            for _ in range(4):
                check(known, tables.ask(known)[0], known)
            cupy.cuda.Device().synchronize()
            assert tables.cache.dump(0).size == 0
        for _ in range(4):
            check(known, tables.ask(known)[0], known)
        assert tables.cache.dump(0).size >= 0.98 * n


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_lookup_that_is_only_enqueued_answers_what_the_map_holds(n):
    known = distinct_keys(30_000)
    with LinkedTables([32, 100], 1000) as tables:
        for table in (0, 1):
            tables.insert(known, table, table=table)
        keys, lookup = mixed(known, n), tables.cache.create_lookup()
        there = np.isin(keys, known)
        batches = [tables.batch(keys, table) for table in (0, 1)]
        lookup.enqueue(Batch.merged(batches))
        cupy.cuda.get_current_stream().synchronize()
        for table, batch in enumerate(batches):
            check(keys, cupy.asnumpy(batch.outs[0]), known, table)
            assert np.array_equal(cupy.asnumpy(batch.founds[0]), there)
            counts = tables.cache.stream_ordered_counts(table)
            assert (counts.misses, counts.linked, counts.absent, counts.unread) == (n, there.sum(), (~there).sum(), 0)


@pytest.mark.parametrize("n", [50, 30_000])
def test_misses_of_a_lookup_that_was_only_enqueued_are_not_those_of_the_next(n):
    known = distinct_keys(40_000)
    with LinkedTables([32], 400_000) as tables:
        tables.insert(known)
        lookup, resident = tables.cache.create_lookup(), known[-1000:]
        for _ in range(3):
            tables.cache.erase(0, known[:n])
            tables.cache.insert(0, resident, rows_of(resident, 32))
            resident = resident[np.isin(resident, tables.cache.dump(0))]
            lookup.enqueue(Batch.of(0, cupy.asarray(known[:n]), cupy.empty((n, 32), np.float32)))
            out, _found, _lookup = tables.ask(resident, 0, lookup)
            check(resident, out, known)
            assert (sum(lookup.linked), sum(lookup.absent)) == (0, 0)


def test_a_lookup_that_needs_the_host_cannot_be_only_enqueued():
    known = distinct_keys(100)
    with LinkedTables([32, 32, 32], 28, attached=[0]) as tables:
        tables.attach(2, authoritative=False)
        lookup = tables.cache.create_lookup()
        for table in (1, 2):
            with pytest.raises(InvalidInputError):
                lookup.enqueue(tables.batch(known, table))
        with pytest.raises(InvalidInputError):
            lookup.enqueue(Batch.of(0, known, np.empty((known.size, 32), np.float32)))


def test_a_table_that_cannot_be_pinned_is_left_to_the_host(monkeypatch):
    """Neither when it is attached, nor when it has grown; the database itself is unharmed."""
    known, pin, limit = distinct_keys(400_000), CudaPinner.pin, [0]

    def limited(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        if size_bytes > limit[0]:
            raise DeviceError(f"pinning {size_bytes} bytes: the limit on locked memory is reached; raise ulimit -l")
        pin(self, address, size_bytes)
        limit[0] -= size_bytes

    monkeypatch.setattr(CudaPinner, "pin", limited)
    with LinkedTables([32], 28, attached=[]) as tables:
        tables.insert(known[:SMALL])
        host = tables.database.host_table(tables.specs[0].tag)
        assert "locked memory" in tables.cache.attach(0, host, authoritative=True)
        assert tables.left(known[:SMALL]) == SMALL
        limit[0] = 200 << 20
        tables.attach()
        check(known[:SMALL], tables.ask(known[:SMALL])[0], known)
        limit[0] = 0
        tables.insert(known)
        batch, lookup = tables.batch(known), tables.cache.create_lookup()
        left = lookup.query(batch)
        assert left >= known.size - 28
        tables.finish_on_host(lookup, left)
        check(known, cupy.asnumpy(batch.outs[0]), known)


def test_enqueued_lookups_of_a_dropped_table_count_what_nobody_read():
    known = distinct_keys(SMALL)
    with LinkedTables([32], 0) as tables:
        tables.insert(known)
        lookup, batch = tables.cache.create_lookup(), tables.batch(known)
        lookup.enqueue(batch)
        cupy.cuda.get_current_stream().synchronize()
        before = tables.cache.stream_ordered_counts(0)
        tables.database.drop_table(tables.specs[0].tag)
        try:
            lookup.enqueue(tables.batch(known))
        except NotReadyError:  # it may as well be refused
            return
        cupy.cuda.get_current_stream().synchronize()
        after = tables.cache.stream_ordered_counts(0)
        assert after.absent == before.absent == 0
        assert after.unread - before.unread == SMALL


def test_the_index_on_the_device_is_current_after_every_write(index):
    keys, random = distinct_keys(60_000), np.random.default_rng(5)
    with LinkedTables([16], 1000) as tables:

        def check_copy():
            mirror = tables.cache._links[0].present.mirror
            assert (mirror is not None) == index
            if index:
                words = tables.database.host_table(tables.specs[0].tag).layout().words.tolist()
                assert copied(mirror.where, 8 * STRIPES).view(np.uint64).tolist() == versions_at(words[VERSIONS])
                for copy, at, count in zip(mirror.segments, words[SEGMENTS::2], words[SEGMENTS + 1 :: 2], strict=True):
                    here = np.frombuffer(ctypes.string_at(at, 128 * count), np.uint32).reshape(count, 32)
                    there = copied(copy, 128 * count).view(np.uint32).reshape(count, 32)
                    np.testing.assert_array_equal(there[:, 1:], here[:, 1:])  # word 0 also changes with vectors

        check_copy()
        for turn in range(12):
            tables.insert(keys[: 5000 * (turn + 1)], turn)  # grows at first a bucket array, then segments
            check_copy()
            gone = random.choice(keys, 40)
            tables.delete(gone)
            check_copy()
        asked = mixed(keys, SMALL)
        out, _, _ = tables.ask(asked)
        check(asked, out, np.setdiff1d(keys, gone), 11)


def copied(address: int, size_bytes: int) -> np.ndarray:
    """What stands in device memory."""
    found = np.empty(size_bytes, np.uint8)
    cupy.cuda.runtime.memcpy(found.ctypes.data, address, size_bytes, cupy.cuda.runtime.memcpyDeviceToHost)
    return found


def versions_at(address: int) -> list[int]:
    memory = np.frombuffer(ctypes.string_at(address, STRIPES * VERSION_BYTES), np.uint64)
    return memory[:: VERSION_BYTES // 8].tolist()
