"""The NumPy embedding cache: the contract, and what is its own."""

import gc
import math
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from hps.cache.base import EmbeddingCache, resident_rows
from hps.cache.cpu.cache import NumpyCache
from hps.cache.cpu.sets import CLOCK, PROBATION, STATE_WORDS, WAYS, WRAPS
from hps.errors import DeviceMemoryError, InvalidInputError
from hps.ground.key_sets import SHARED_KEYS
from hps.ground.rows import encode
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch
from hps.tensors.pooling import pool_rows
from hps.testing.caches import (
    Create,
    StaticTablesContract,
    VersionedCacheContract,
    distinct_keys,
    spec,
    vectors_of,
)
from hps.testing.waiting import PATIENCE_S
from hps.types import ROW_DTYPES, TableSpec


class TestNumpyCache(VersionedCacheContract, StaticTablesContract):
    cache_class = NumpyCache
    stress_queries = 12  # tests/nightly/cache has the storms

    def raw_rows(self, cache: EmbeddingCache, table: int) -> dict[int, bytes]:
        memory = cache._open[table]
        ages = memory.lines.view(np.uint8)[:, 2:16]
        keys = memory.lines[:, 2:]
        rows = {}
        for index, way in np.argwhere(ages != 0):
            key = int(keys[index, way])
            assert key not in rows
            rows[key] = memory.vectors[index * 14 + way].tobytes()
        return rows

    def raw_sets(self, cache: EmbeddingCache) -> np.ndarray:
        return cache._open[0].lines.copy()

    def raw_version(self, cache: EmbeddingCache) -> np.ndarray:
        return cache._open[0].lines.view(np.uint16)[:1, 0]

    @pytest.mark.usefixtures("four_threads")
    @pytest.mark.parametrize("n", [SHARED_KEYS - 1, SHARED_KEYS])
    def test_misses_become_resident_whether_or_not_threads_share_them(self, create: Create, n: int) -> None:
        cache, keys = create(spec(4), 4 * n), distinct_keys(n)
        assert self.lookup(cache, self.batch(cache, 0, keys), keys) == [n]
        assert self.resident(cache, keys).all()

    @pytest.mark.usefixtures("four_threads")
    def test_threads_share_few_long_bags_of_wide_missing_vectors(self, create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
        cache, keys, bounds = create(spec(512), 100), distinct_keys(50), np.arange(9) * (SHARED_KEYS // 4)
        shared = Mock(side_effect=pool_rows)
        monkeypatch.setattr("hps.cache.cpu.cache.pool_rows", shared)
        self.lookup(cache, self.bags(cache, 0, np.resize(keys, bounds[-1]), bounds), keys)
        assert shared.call_count > 1


@pytest.fixture
def cache() -> Iterator[NumpyCache]:
    cache = NumpyCache.create([spec(4)], [WAYS], 0)
    yield cache
    cache.close()


class TestSets:
    def test_a_set_lies_within_its_own_cache_lines(self):
        cache = NumpyCache.create([spec(16), spec(5, "other")], [1000, 15], 0)
        for table in cache._open:
            assert table.lines.ctypes.data % 128 == 0
            assert table.vectors.ctypes.data % 128 == 0

    def test_a_version_that_wraps_is_counted_and_the_set_works_on(self, cache: NumpyCache):
        memory, keys = cache._open[0], distinct_keys(5)
        version = memory.lines.view(np.uint16)[:, 0]
        version[:] = 0xFFFC
        for count, key in enumerate(keys[:, None]):
            cache.insert(0, key, vectors_of(key, 4, count))
            assert version[0] == (0xFFFC + 2 * (count + 1)) % (1 << 16)
            assert memory.state[WRAPS] == (count >= 1)
        out = np.empty((5, 4), np.float32)
        assert cache.create_lookup().query(Batch.of(0, keys, out)) == 0
        np.testing.assert_array_equal(out, vectors_of(keys, 4, np.arange(5)))

    @pytest.mark.parametrize(("epochs", "admitted"), [(PROBATION - 1, 0), (PROBATION, 1)])
    def test_a_missed_key_evicts_one_that_was_idle_for_the_probation(self, cache: NumpyCache, epochs: int, admitted: int):
        keys, state = distinct_keys(WAYS + 1), cache._open[0].state
        cache.insert(0, keys[:WAYS], vectors_of(keys[:WAYS], 4))
        lookup = cache.create_lookup()
        lookup.query(Batch.of(0, keys[:WAYS], np.empty((WAYS, 4), np.float32)))
        state[CLOCK] = epochs * WAYS
        lookup.query(Batch.of(0, keys[WAYS:], np.empty((1, 4), np.float32)))
        (missed,) = lookup.unique()
        missed.buffer()[:] = 0
        missed.insert(np.array([True]))
        assert cache.stats(0).evictions == admitted

    @pytest.mark.parametrize("epoch", [0, 100, 240])
    def test_what_a_thread_of_a_later_epoch_has_used_is_not_evicted_first(self, cache: NumpyCache, epoch: int):
        """That thread counted its keys after ours had read the clock; counted modulo 255, its age looks 254 epochs old."""
        memory, keys = cache._open[0], distinct_keys(WAYS + 1)
        memory.state[CLOCK] = epoch * WAYS
        cache.insert(0, keys[:WAYS], vectors_of(keys[:WAYS], 4))
        ages = memory.lines.view(np.uint8)[0, 2:16]
        later = np.arange(1, WAYS)  # epochs, for all slots but the first
        ages[0], ages[1:] = (epoch - 1) % 255 + 1, (epoch + later) % 255 + 1  # one epoch old; the others are in the future
        first = int(memory.lines[0, 2])
        cache.insert(0, keys[WAYS:], vectors_of(keys[WAYS:], 4))
        assert set(cache.dump(0).tolist()) == set(keys.tolist()) - {first}


class TestMemory:
    def test_more_memory_than_the_machine_has_is_a_typed_error_that_names_the_table(self):
        with pytest.raises(DeviceMemoryError, match=r"model 'shop'.*rows of table 'big'.*gpucacheper of at most") as caught:
            NumpyCache.create([spec(4, "small"), spec(1024, "big")], [1000, 1 << 40], 0)
        assert isinstance(caught.value, MemoryError)

    @pytest.mark.parametrize("static", [False, True])
    def test_a_cache_takes_the_memory_that_is_said(self, static: bool):
        tables, rows = [spec(4), spec(5, "other")], [10_000, 7]
        cache = NumpyCache.create(tables, rows, 0, static)
        for index, need in enumerate(NumpyCache.room_for(tables, rows, static)):
            assert cache.stats(index).size_bytes == need.size_bytes + 8 * STATE_WORDS
        cache.close()

    def test_running_calls_keep_the_memory_that_close_lets_go(self, cache: NumpyCache):
        memory = weakref.ref(cache._open[0].lines)
        running = cache._open
        cache.close()
        gc.collect()
        assert memory() is not None
        del running
        gc.collect()
        assert memory() is None


@pytest.mark.parametrize(("row_dtype", "static"), [("int8", False), ("float16", True), ("bfloat16", False)])
def test_no_row_in_fewer_bits_is_torn(row_dtype: str, static: bool) -> None:
    """Elements of a vector are its version, but for the first two, while a writer replaces it without a pause."""
    dim, keys, done = 4000, distinct_keys(1), threading.Event()
    vectors = np.repeat(np.arange(16, 256, 16, dtype=np.float32)[:, None], dim, axis=1)
    vectors[:, 0], vectors[:, 1] = 0, 255  # so that int8 has these elements as codes
    rows = encode("testing", vectors, row_dtype)
    cache = NumpyCache.create([replace(spec(dim), row_dtype=row_dtype)], [WAYS], 0, static)
    cache.insert(0, keys, rows[:1])

    def write() -> None:
        while not done.is_set():
            cache.insert(0, np.repeat(keys, len(rows)), rows)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            lookup, asked, answered = cache.create_lookup(), np.repeat(keys, 50), 0
            for query in range(6000):
                if query >= 60 and answered:  # on a busy machine the writer owns the set nearly always
                    break
                out, found = np.zeros((asked.size, dim), np.float32), np.zeros(asked.size, np.bool_)
                lookup.query(Batch.of(0, asked, out, found))
                lookup.finish()
                answered += np.count_nonzero(found)
                assert (out[found, 2:] == out[found, 2:3]).all()
                assert np.isin(out[found, 2], vectors[:, 2]).all()
        finally:
            done.set()
            writing.result(PATIENCE_S)
    assert answered
    cache.close()


class TestArrays:
    @pytest.mark.parametrize(
        "batch",
        [
            Batch.of(0, np.zeros(3, np.int64), np.empty((3, 5), np.float32)),
            Batch.of(0, np.zeros(3, np.int64), np.empty((2, 4), np.float32)),
            Batch.of(0, np.zeros(3, np.int64), np.empty(12, np.float32)),
            Batch.of(0, np.zeros(3, np.int64), np.empty((3, 4), np.float64)),
            Batch.of(0, np.zeros(3, np.int64), np.empty((3, 8), np.float32)[:, ::2]),
            Batch.of(0, np.zeros(3, np.int32), np.empty((3, 4), np.float32)),
            Batch.of(0, np.zeros((3, 1), np.int64), np.empty((3, 4), np.float32)),
            Batch.of(0, np.zeros(3, np.int64), np.empty((3, 4), np.float32), np.empty(2, np.bool_)),
            Batch.of(0, np.zeros(3, np.int64), np.broadcast_to(np.float32(0), (3, 4))),
            Batch.of(0, np.zeros(3, np.int64), np.frombuffer(bytearray(49), np.float32, 12, 1).reshape(3, 4)),
        ],
    )
    def test_batches_that_do_not_fit_are_refused_before_anything_is_written(self, cache: NumpyCache, batch: Batch):
        with pytest.raises(
            InvalidInputError, match=r"querying the cached table hps_et\.shop\.item: (keys|out|found): got .*expected"
        ):
            cache.create_lookup().query(batch)

    @pytest.mark.parametrize("shape", [(2, 4), (4, 4), (3, 5), (3, 3), (3,), (12,), (3, 4, 1)])
    def test_bags_whose_output_does_not_fit_are_refused(self, cache: NumpyCache, shape: tuple[int, ...]):
        pooling = Pooling(3, None, 2, None, Combiner.SUM, 0.0, None)
        batch = Batch.of(0, np.arange(6), np.empty(shape, np.float32), None, 6, pooling)
        with pytest.raises(InvalidInputError, match=r"hps_et\.shop\.item: out: got .*expected"):
            cache.create_lookup().query(batch)

    def test_keys_that_are_not_aligned_are_copied_and_strided_modifications_refused(self, cache: NumpyCache):
        keys, out = np.frombuffer(b"\0" + distinct_keys(6).tobytes(), np.int64, 6, 1), np.empty((6, 4), np.float32)
        cache.insert(0, distinct_keys(6), vectors_of(distinct_keys(6), 4))
        assert cache.create_lookup().query(Batch.of(0, keys, out)) == 0
        np.testing.assert_array_equal(out, vectors_of(distinct_keys(6), 4))
        rows = np.zeros((3, 8), np.float32)
        for asked, given in ((distinct_keys(6)[::2], rows[:, :4].copy()), (distinct_keys(3), rows[:, ::2])):
            with pytest.raises(InvalidInputError, match="contiguous"):
                cache.insert(0, asked, given)


@pytest.mark.parametrize("row_dtype", ROW_DTYPES[1:])
def test_vectors_in_the_place_of_rows_are_refused(row_dtype: str):
    cache = NumpyCache.create([replace(spec(8), row_dtype=row_dtype)], [100], 0)
    with pytest.raises(InvalidInputError):
        cache.insert(0, distinct_keys(3), np.zeros((3, 8), np.float32))
    assert not cache.dump(0).size
    cache.close()


@pytest.mark.parametrize(("rows", "share"), [(7_000, 1.0), (7_000, 2.0), (7_000, 0.5), (50_000, 1.0), (14, 1.0), (7_000, 4.0)])
def test_a_cache_comes_to_hold_what_is_said(rows: int, share: float) -> None:
    """0.894 of the rows with room for as many, since sets overflow by chance; what does not fit is missing for ever."""
    capacity = math.ceil(share * rows)
    cache = NumpyCache.create([TableSpec("shop", "item", 4, 0.0, rows)], [capacity], 0)
    keys = np.arange(rows, dtype=np.int64)
    for _ in range(3):
        cache.insert(0, keys, np.ones((rows, 4), np.float32))
    said = resident_rows(rows, capacity)
    assert abs(cache.stats(0).resident_rows - said) <= max(4 * math.sqrt(rows) / 4, 4)
    assert said == rows or share < 4
    assert resident_rows(0, capacity) == resident_rows(rows, 0) == 0
