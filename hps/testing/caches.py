"""The behaviour of embedding caches: a contract for every cache, and one for each capability that a cache may have.

class TestNumpyCache(VersionedCacheContract, StaticTablesContract):
    cache_class = NumpyCache

    def raw_rows(self, cache, table):
        ...
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest

from hps.cache.base import CacheLookup, EmbeddingCache, StaticTables
from hps.errors import CapacityError, InvalidDtypeError, InvalidInputError, NotReadyError
from hps.tensors.bags import COMBINERS, Combiner, Pooling
from hps.tensors.batch import Batch
from hps.testing.pooling_oracle import Expected, pooled
from hps.types import BoolArray, DeviceArray, FloatArray, IndexArray, KeyArray, TableSpec

INT64 = np.iinfo(np.int64)
AWKWARD_KEYS = np.unique(
    np.array([0, -1, INT64.min, INT64.max, INT64.min + 1, INT64.max - 1, *(1 << np.arange(62)), *(np.arange(-20, 20) << 32)])
)
"""Keys that an implementation may use as a sentinel, or that a poor hash clusters."""
DEFAULT = -7.25
GIVEN = ["host", "device", "int32", "short", "hotness"]
"""Forms of the offsets of bags."""
Create = Callable[..., EmbeddingCache]
CreateStatic = Callable[..., StaticTables]


def vectors_of(keys: KeyArray, dim: int, version: int | np.ndarray = 0) -> FloatArray:
    """Vectors that encode their key, their position and a version below 2^24: element 0 is the version."""
    versions = np.broadcast_to(np.asarray(version, np.uint64), keys.shape)
    words = keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + versions * np.uint64(0xD1B54A32D192ED03)
    words = (words[:, None] + np.arange(dim, dtype=np.uint64)[None, :]) * np.uint64(0x2545F4914F6CDD1D)
    vectors = ((words ^ (words >> np.uint64(31))) >> np.uint64(40)).astype(np.float32)
    vectors[:, 0] = versions
    return vectors


def small_vectors_of(keys: KeyArray, dim: int) -> FloatArray:
    """Vectors that encode their key and their position in [-1, 1), to be added up."""
    return vectors_of(keys, dim + 1)[:, 1:] / np.float32(1 << 23) - np.float32(1.0)


def distinct_keys(n: int, seed: int = 1) -> KeyArray:
    """n different keys from the whole int64 range, in random order."""
    keys = np.unique(np.random.default_rng(seed).integers(INT64.min, INT64.max, n + 16, dtype=np.int64, endpoint=True))
    return np.random.default_rng(seed + 1).permutation(keys)[:n]


def bits(vectors: FloatArray) -> np.ndarray:
    """The bit patterns, so that NaN equals NaN and -0.0 differs from 0.0."""
    return np.ascontiguousarray(vectors).view(np.uint32)


def spec(dim: int, name: str = "item", max_keys: int = 1 << 20) -> TableSpec:
    return TableSpec("shop", name, dim, DEFAULT, max_keys)


class CacheContract:
    """Subclass it with `cache_class` and `raw_rows`; override `to_device` and `to_host` if arrays are on a device."""

    cache_class: ClassVar[type[EmbeddingCache]]
    ways: ClassVar[int] = 14
    """Keys of a set: a cache of this capacity is one set."""
    probation: ClassVar[int] = 15
    """Epochs by which a key that became resident without a request ranks behind one that was just hit."""
    stress_queries: ClassVar[int] = 200
    """Queries of each reader in the stress test."""

    def to_device(self, array: np.ndarray) -> DeviceArray:
        """Copy a host array to where callers' arrays are."""
        return array.copy()

    def to_host(self, array: DeviceArray) -> np.ndarray:
        """Copy such an array to host memory."""
        copy: np.ndarray = array.copy()
        return copy

    def raw_rows(self, cache: EmbeddingCache, table: int) -> dict[int, bytes]:
        """All resident rows of a table as key -> bytes of its vector, read without the methods under test."""
        raise NotImplementedError("a subclass reads the memory itself")

    def crowd(self, cache: EmbeddingCache) -> tuple[KeyArray, int]:
        """Return keys that fill a table 0 of `ways` rows, and the number of keys without room."""
        return distinct_keys(self.ways + 3), 3

    @pytest.fixture
    def create(self) -> Iterator[Create]:
        """create(tables, capacity_rows, static) makes caches that are closed after the test."""
        caches: list[EmbeddingCache] = []

        def make(
            tables: Sequence[TableSpec] | TableSpec, capacity_rows: Sequence[int] | int, static: bool = False
        ) -> EmbeddingCache:
            tables = [tables] if isinstance(tables, TableSpec) else tables
            capacity_rows = [capacity_rows] if isinstance(capacity_rows, int) else capacity_rows
            caches.append(self.make_cache(tables, capacity_rows, static))
            return caches[-1]

        yield make
        for cache in caches:
            cache.close()

    def make_cache(self, tables: Sequence[TableSpec], capacity_rows: Sequence[int], static: bool) -> EmbeddingCache:
        return self.cache_class.create(tables, capacity_rows, 0, static)

    # -- what a session does, on host arrays ---------------------------------------------------------------------------

    def batch(self, cache: EmbeddingCache, table: int, keys: KeyArray, *, with_found: bool = True) -> Batch:
        """Make a batch on the device, with NaN in its output and noise in its found-mask."""
        out = np.full((keys.size, cache.tables[table].dim), np.nan, np.float32)
        found = self.to_device(np.arange(keys.size) % 2 == 0) if with_found else None
        return Batch.of(table, self.to_device(keys), self.to_device(out), found)

    def query(
        self, cache: EmbeddingCache, keys: KeyArray, table: int = 0, lookup: CacheLookup | None = None
    ) -> tuple[FloatArray, BoolArray]:
        """Query one table; returns `out` and `found`."""
        lookup, batch = lookup or cache.create_lookup(), self.batch(cache, table, keys)
        missing = lookup.query(batch)
        lookup.finish()
        found = self.to_host(batch.founds[0])
        assert missing == keys.size - np.count_nonzero(found)
        assert lookup.counts == [missing]
        return self.to_host(batch.outs[0]), found

    def resident(self, cache: EmbeddingCache, keys: KeyArray, table: int = 0) -> BoolArray:
        return np.isin(keys, np.array(list(self.raw_rows(cache, table)), np.int64))

    def lookup(
        self,
        cache: EmbeddingCache,
        batch: Batch,
        stored_keys: KeyArray,
        lookup: CacheLookup | None = None,
        vectors_below: Callable[[KeyArray, int], FloatArray] = lambda keys, dim: vectors_of(keys, dim, 1),
    ) -> list[int]:
        """Run a complete lookup; the database has version 1 of the `stored_keys`. Returns the misses of each table."""
        lookup = lookup or cache.create_lookup()
        missing = lookup.query(batch)
        assert missing == sum(lookup.counts)
        for missed in lookup.unique():
            buffer = missed.buffer()
            found = np.isin(missed.keys, stored_keys)
            half = missed.keys.size // 2
            vectors = vectors_below(missed.keys, buffer.shape[1])
            for start, stop in ((0, half), (half, missed.keys.size)):
                buffer[start:stop][found[start:stop]] = vectors[start:stop][found[start:stop]]
                missed.stage(start, stop)
            missed.scatter(found)
            missed.insert(found)
        lookup.finish()
        return lookup.counts

    def pass_epoch(self, cache: EmbeddingCache, table: int = 0) -> None:
        """Query as many absent keys as the table has slots, so that later uses count as more recent than all before."""
        self.query(cache, distinct_keys(cache.stats(table).capacity_rows, seed=99), table)

    # -- query, unique, scatter ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("dim", "n"),
        [(1, 1800), (2, 31), (3, 32), (7, 1), (16, 255), (31, 33), (100, 257), (128, 2), (5, 5000)],
    )
    def test_resident_vectors_come_back_bit_for_bit(self, create: Create, dim: int, n: int) -> None:
        cache, keys = create(spec(dim), max(4000, 4 * n)), distinct_keys(n)
        cache.insert(0, keys[: n // 2], vectors_of(keys[: n // 2], dim))
        out, found = self.query(cache, keys)
        np.testing.assert_array_equal(found, self.resident(cache, keys))
        assert np.count_nonzero(found) >= n // 2 - 10  # a set may overflow
        np.testing.assert_array_equal(bits(out[found]), bits(vectors_of(keys, dim)[found]))

    def test_bit_patterns_survive(self, create: Create) -> None:
        patterns = np.array([0x7FC12345, 0xFFC00001, 0x80000000, 0x00000001, 0x7F800000, 0x7F7FFFFF], np.uint32)
        cache, keys = create(spec(6), 100), np.array([5], np.int64)
        cache.insert(0, keys, patterns.view(np.float32)[None, :])
        out, _found = self.query(cache, keys)
        np.testing.assert_array_equal(bits(out)[0], patterns)

    def test_every_int64_is_a_legal_key(self, create: Create) -> None:
        cache = create(spec(4), 4000)
        _out, found = self.query(cache, AWKWARD_KEYS)
        assert not found.any()
        cache.insert(0, AWKWARD_KEYS, vectors_of(AWKWARD_KEYS, 4))
        out, found = self.query(cache, AWKWARD_KEYS)
        assert found.all()
        np.testing.assert_array_equal(bits(out), bits(vectors_of(AWKWARD_KEYS, 4)))

    def test_duplicate_keys_of_a_query_are_all_answered(self, create: Create) -> None:
        cache, keys = create(spec(8), 1000), distinct_keys(20)
        requested = np.random.default_rng(3).choice(keys, 3000)
        cache.insert(0, keys[:10], vectors_of(keys[:10], 8))
        batch = self.batch(cache, 0, requested)
        assert self.lookup(cache, batch, keys) == [np.count_nonzero(np.isin(requested, keys[10:]))]
        expected = vectors_of(requested, 8, np.isin(requested, keys[10:]))
        np.testing.assert_array_equal(bits(self.to_host(batch.outs[0])), bits(expected))
        assert self.to_host(batch.founds[0]).all()

    def test_missing_keys_are_listed_once_and_outlive_the_lookup(self, create: Create) -> None:
        cache, keys = create([spec(4, "a"), spec(4, "b")], [1000, 1000]), distinct_keys(300)
        requested = np.concatenate([keys, keys[:50], keys[100:200]])
        lookup = cache.create_lookup()
        lookup.query(self.batch(cache, 1, requested, with_found=False))
        (missed,) = lookup.unique()
        assert missed.table == 1
        assert missed.keys.dtype == np.int64
        lookup.query(self.batch(cache, 1, distinct_keys(500, seed=9)))
        lookup.unique()
        np.testing.assert_array_equal(np.sort(missed.keys), np.sort(keys))

    @pytest.mark.parametrize("missing", [1, 40, 3000])
    def test_misses_amid_hits_are_fetched_and_become_resident(self, create: Create, missing: int) -> None:
        cache, keys = create(spec(16), 40_000), distinct_keys(3000 + missing)
        cache.insert(0, keys[missing:], vectors_of(keys[missing:], 16))
        was_resident = self.resident(cache, keys)
        order = np.random.default_rng(4).permutation(np.arange(keys.size))
        batch = self.batch(cache, 0, keys[order])
        assert self.lookup(cache, batch, keys) == [np.count_nonzero(~was_resident)]
        expected = vectors_of(keys, 16, ~was_resident)[order]
        np.testing.assert_array_equal(bits(self.to_host(batch.outs[0])), bits(expected))
        out, found = self.query(cache, keys)
        np.testing.assert_array_equal(found, self.resident(cache, keys))
        assert np.count_nonzero(found) >= keys.size - 5
        np.testing.assert_array_equal(bits(out[found]), bits(vectors_of(keys, 16, ~was_resident)[found]))

    @pytest.mark.usefixtures("four_threads")
    @pytest.mark.parametrize("with_found", [True, False])
    def test_many_misses_with_duplicates_are_listed_once_and_answered_at_every_position(
        self, create: Create, with_found: bool
    ) -> None:
        cache, keys = create(spec(5), 60_000), distinct_keys(40_000)
        cache.insert(0, keys[:2000], vectors_of(keys[:2000], 5))
        was_resident = self.resident(cache, keys)
        draw = np.random.default_rng(6).zipf(1.2, 80_000) - 1
        order = np.concatenate([np.arange(40_000), draw[draw < 40_000]])
        batch = self.batch(cache, 0, keys[order], with_found=with_found)
        lookup = cache.create_lookup()
        for part in (order, order[3000:3100], order):  # its memory serves large and small lookups in any order
            lookup.query(self.batch(cache, 0, keys[part]))
            distinct = np.unique(keys[part][~was_resident[part]])
            assert [np.sort(missed_keys.keys).tolist() for missed_keys in lookup.unique()] == [distinct.tolist()] * bool(
                distinct.size
            )
        assert lookup.query(batch) == np.count_nonzero(~was_resident[order])
        (missed,) = lookup.unique()
        np.testing.assert_array_equal(np.sort(missed.keys), np.sort(keys[~was_resident]))
        is_known = missed.keys % 3 != 0
        missed.buffer()[:] = vectors_of(missed.keys, 5, 1)
        missed.stage(0, missed.keys.size)
        assert missed.absent(is_known) == np.count_nonzero(~was_resident[order] & (keys[order] % 3 == 0))
        assert missed.absent(np.ones_like(is_known)) == 0
        assert missed.absent(np.zeros_like(is_known)) == np.count_nonzero(~was_resident[order])
        missed.scatter(is_known)
        missed.insert(is_known)
        lookup.finish()
        expected = vectors_of(keys, 5, ~was_resident)
        expected[~was_resident & (keys % 3 == 0)] = DEFAULT
        np.testing.assert_array_equal(bits(self.to_host(batch.outs[0])), bits(expected[order]))
        if with_found:
            np.testing.assert_array_equal(self.to_host(batch.founds[0]), (was_resident | (keys % 3 != 0))[order])
        assert set(self.raw_rows(cache, 0)) <= set(keys[was_resident | (keys % 3 != 0)].tolist())

    @pytest.mark.parametrize("with_found", [True, False])
    def test_absent_keys_get_the_default_vector_and_never_become_resident(self, create: Create, with_found: bool) -> None:
        cache, keys = create(spec(3), 2000), distinct_keys(200)
        known = keys[:120]
        cache.insert(0, keys[:30], vectors_of(keys[:30], 3))
        batch = self.batch(cache, 0, keys, with_found=with_found)
        assert self.lookup(cache, batch, known) == [170]
        out = self.to_host(batch.outs[0])
        np.testing.assert_array_equal(bits(out[:120]), bits(vectors_of(known, 3, np.arange(120) >= 30)))
        assert (out[120:] == DEFAULT).all()
        if with_found:
            np.testing.assert_array_equal(self.to_host(batch.founds[0]), np.arange(200) < 120)
        assert set(self.raw_rows(cache, 0)) == set(known.tolist())
        assert set(cache.dump(0).tolist()) == set(known.tolist())
        _out, found = self.query(cache, keys)
        np.testing.assert_array_equal(found, np.arange(200) < 120)

    def test_a_vector_that_became_resident_meanwhile_is_kept(self, create: Create) -> None:
        cache, keys = create(spec(3), 2000), distinct_keys(20)
        lookup, all_found = cache.create_lookup(), np.ones(20, np.bool_)
        lookup.query(self.batch(cache, 0, keys))
        (missed,) = lookup.unique()
        missed.buffer()[:] = vectors_of(missed.keys, 3)
        missed.stage(0, 20)
        cache.insert(0, keys[:5], vectors_of(keys[:5], 3, 1))
        missed.scatter(all_found)
        missed.insert(all_found)
        lookup.finish()
        out, _ = self.query(cache, keys)
        np.testing.assert_array_equal(bits(out), bits(vectors_of(keys, 3, np.arange(20) < 5)))

    def test_scattering_nothing_found_answers_all_misses_and_leaves_the_hits_of_another_table(self, create: Create) -> None:
        cache = create([spec(4, "a"), spec(9, "b")], [1000, 1000])
        keys = distinct_keys(80)
        cache.insert(1, keys[:50], vectors_of(keys[:50], 9))
        lookup, batches = cache.create_lookup(), [self.batch(cache, 1, keys), self.batch(cache, 0, keys)]
        assert lookup.query(Batch.merged(batches)) == 110
        for missed in lookup.unique():
            missed.scatter(np.zeros(missed.keys.size, np.bool_))
        lookup.finish()
        out = self.to_host(batches[0].outs[0])
        np.testing.assert_array_equal(bits(out[:50]), bits(vectors_of(keys[:50], 9)))
        assert (out[50:] == DEFAULT).all()
        assert (self.to_host(batches[1].outs[0]) == DEFAULT).all()
        np.testing.assert_array_equal(self.to_host(batches[0].founds[0]), np.arange(80) < 50)
        assert lookup.counts == [30, 80]
        assert set(self.raw_rows(cache, 1)) == set(keys[:50].tolist())

    def test_one_lookup_serves_tables_of_different_widths_in_any_order(self, create: Create) -> None:
        dims = [1, 3, 7, 16, 100, 128]
        cache = create([spec(dim, f"t{dim}") for dim in dims], [3000] * 6)
        keys = [distinct_keys(10 + 40 * table, seed=table) for table in range(6)]
        for table, dim in enumerate(dims):
            cache.insert(table, keys[table][:5], vectors_of(keys[table][:5], dim))
        order = [4, 0, 5, 2, 1]
        batches = [self.batch(cache, table, keys[table]) for table in order]
        counts = self.lookup(cache, Batch.merged(batches), np.concatenate(keys))
        assert counts == [keys[table].size - 5 for table in order]
        for table, batch in zip(order, batches, strict=True):
            expected = vectors_of(keys[table], dims[table], np.arange(keys[table].size) >= 5)
            np.testing.assert_array_equal(bits(self.to_host(batch.outs[0])), bits(expected))
        assert set(self.raw_rows(cache, 3)) == set(keys[3][:5].tolist())

    def test_no_keys_are_a_whole_lookup(self, create: Create) -> None:
        cache, keys = create([spec(4, "a"), spec(5, "b")], [500, 500]), distinct_keys(9)
        none = np.empty(0, np.int64)
        assert cache.create_lookup().query(Batch.merged([])) == 0
        empty, other = self.batch(cache, 0, none), self.batch(cache, 1, keys)
        assert self.lookup(cache, Batch.merged([empty, other]), keys) == [0, 9]
        assert self.lookup(cache, self.batch(cache, 0, none), keys) == [0]
        np.testing.assert_array_equal(bits(self.to_host(other.outs[0])), bits(vectors_of(keys, 5, 1)))
        cache.insert(0, none, np.empty((0, 4), np.float32))
        cache.update(0, none, np.empty((0, 4), np.float32))
        cache.erase(0, none)
        assert cache.dump(0).size == 0

    def test_a_lookup_without_misses_is_finished_by_the_query(self, create: Create) -> None:
        cache, keys = create(spec(4), 4000), distinct_keys(50)
        cache.insert(0, keys, vectors_of(keys, 4))
        lookup, batch = cache.create_lookup(), self.batch(cache, 0, keys)
        assert lookup.query(batch) == 0
        np.testing.assert_array_equal(self.to_host(batch.outs[0]), vectors_of(keys, 4))
        assert self.to_host(batch.founds[0]).all()

    def test_a_lookup_serves_one_request_after_another(self, create: Create) -> None:
        cache = create([spec(4, "a"), spec(6, "b")], [4000, 4000])
        lookup = cache.create_lookup()
        for n in (3, 700, 20, 1500, 1):
            keys = distinct_keys(n, seed=n)
            batches = [self.batch(cache, 1, keys), self.batch(cache, 0, keys)]
            self.lookup(cache, Batch.merged(batches), keys, lookup)
            np.testing.assert_array_equal(bits(self.to_host(batches[0].outs[0])), bits(vectors_of(keys, 6, 1)))
            np.testing.assert_array_equal(bits(self.to_host(batches[1].outs[0])), bits(vectors_of(keys, 4, 1)))

    # -- insert, update, erase, dump -----------------------------------------------------------------------------------

    def test_duplicates_of_a_batch_leave_one_whole_vector(self, create: Create) -> None:
        cache, keys = create(spec(24), 1000), distinct_keys(7)
        versions = np.arange(1, 2101) % 300
        repeated = np.repeat(keys, 300)
        cache.insert(0, repeated, vectors_of(repeated, 24, versions))
        assert sorted(self.raw_rows(cache, 0)) == sorted(keys.tolist())
        out, found = self.query(cache, keys)
        assert found.all()
        np.testing.assert_array_equal(bits(out), bits(vectors_of(keys, 24, out[:, 0].astype(np.int64))))
        cache.update(0, repeated, vectors_of(repeated, 24, versions + 1000))
        out, _found = self.query(cache, keys)
        np.testing.assert_array_equal(bits(out), bits(vectors_of(keys, 24, out[:, 0].astype(np.int64))))
        assert (out[:, 0] >= 1000).all()

    def test_insert_replaces_resident_vectors_and_update_changes_no_others(self, create: Create) -> None:
        cache, keys = create(spec(8), 1000), distinct_keys(100)
        cache.insert(0, keys[:60], vectors_of(keys[:60], 8))
        cache.insert(0, keys[50:80], vectors_of(keys[50:80], 8, 2))
        cache.update(0, keys[70:], vectors_of(keys[70:], 8, 3))
        out, found = self.query(cache, keys)
        np.testing.assert_array_equal(found, np.arange(100) < 80)
        np.testing.assert_array_equal(bits(out[:80]), bits(vectors_of(keys[:80], 8, np.repeat([0, 2, 3], [50, 20, 10]))))
        assert cache.stats(0).resident_rows == 80

    def test_erased_keys_are_missing_until_they_are_inserted_again(self, create: Create) -> None:
        cache, keys = create(spec(8), 1000), np.concatenate([AWKWARD_KEYS[:20], distinct_keys(80)])
        cache.insert(0, keys, vectors_of(keys, 8))
        cache.erase(0, np.concatenate([keys[40:70], keys[40:50], distinct_keys(50, seed=8)]))
        _out, found = self.query(cache, keys)
        np.testing.assert_array_equal(found, (np.arange(100) < 40) | (np.arange(100) >= 70))
        assert cache.stats(0).resident_rows == 70
        cache.update(0, keys, vectors_of(keys, 8, 1))
        assert not self.resident(cache, keys[40:70]).any()
        cache.insert(0, keys[40:70], vectors_of(keys[40:70], 8, 2))
        out, found = self.query(cache, keys)
        assert found.all()
        np.testing.assert_array_equal(out[:, 0], np.where((np.arange(100) >= 40) & (np.arange(100) < 70), 2, 1))

    def test_dump_lists_the_resident_keys_in_an_array_of_its_own(self, create: Create) -> None:
        cache, keys = create(spec(2), 500), np.concatenate([AWKWARD_KEYS[:7], distinct_keys(93)])
        assert cache.dump(0).size == 0
        cache.insert(0, keys, vectors_of(keys, 2))
        dumped = cache.dump(0)
        cache.erase(0, keys[:50])
        assert dumped.dtype == np.int64
        np.testing.assert_array_equal(np.sort(dumped), np.sort(keys))
        np.testing.assert_array_equal(np.sort(cache.dump(0)), np.sort(keys[50:]))

    def test_read_only_arrays_are_taken(self, create: Create) -> None:
        cache, keys = create(spec(4), 500), distinct_keys(40)
        vectors = vectors_of(keys, 4)
        for array in (keys, vectors):
            array.flags.writeable = False
        cache.insert(0, keys, vectors)
        cache.update(0, keys, vectors)
        out, _found = self.query(cache, keys)
        np.testing.assert_array_equal(bits(out), bits(vectors))
        cache.erase(0, keys)
        assert not self.raw_rows(cache, 0)

    def test_arrays_that_do_not_fit_are_typed_errors(self, create: Create) -> None:
        cache, keys = create(spec(4), 500), distinct_keys(40)
        with pytest.raises(InvalidInputError, match=r"\(39, 4\)"):
            cache.insert(0, keys, np.zeros((39, 4), np.float32))
        with pytest.raises(InvalidInputError, match=r"\(40, 5\)"):
            cache.update(0, keys, np.zeros((40, 5), np.float32))
        with pytest.raises(InvalidDtypeError, match="float64"):
            cache.insert(0, keys, np.zeros((40, 4), "float64"))
        with pytest.raises(InvalidDtypeError, match="int32"):
            cache.erase(0, keys.astype(np.int32))
        assert not self.raw_rows(cache, 0)

    # -- bags ----------------------------------------------------------------------------------------------------------

    def bags(
        self,
        cache: EmbeddingCache,
        table: int,
        keys: KeyArray,
        bounds: IndexArray,  # (B + 1,)
        given: str = "host",
        *,
        weights: FloatArray | None = None,
        combiner: str = "sum",
        max_norm: float | None = None,
        padding_key: int | None = None,
    ) -> Batch:
        """A batch with bags on the device, its output full of NaN.

        Args:
            given: offsets on the `host`, on the `device`, as `int32` there, `short` without the last, or by `hotness`.
        """
        count, hotness = bounds.size - 1, int(bounds[-1]) // max(1, bounds.size - 1) if given == "hotness" else 0
        offsets: DeviceArray | None = None if given == "hotness" else bounds
        if given in ("device", "int32", "short"):
            given_bounds = bounds[:-1] if given == "short" else bounds
            offsets = self.to_device(given_bounds.astype(np.int32 if given == "int32" else np.int64))
        pooling = Pooling(
            count,
            offsets,
            hotness,
            None if weights is None else self.to_device(weights),
            Combiner[combiner.upper()],
            max_norm or 0.0,
            padding_key,
        )
        out = self.to_device(np.full((count, cache.tables[table].dim), np.nan, np.float32))
        return Batch.of(table, self.to_device(keys), out, None, keys.size, pooling)

    def check_bags(
        self, cache: EmbeddingCache, cases: Sequence[dict[str, Any]], known: KeyArray, lookup: CacheLookup | None = None
    ) -> None:
        """Look up bags of several tables at once, twice, and compare them with the oracle; absent keys have default vectors."""
        lookup = lookup or cache.create_lookup()
        expected = [self.expected_bags(cache, case, known) for case in cases]
        for _ in range(2):
            batches = [self.bags(cache, **case) for case in cases]
            missing = [self.missing_in_bags(cache, case) for case in cases]
            assert self.lookup(cache, Batch.merged(batches), known, lookup, small_vectors_of) == missing
            paddings = [int(np.count_nonzero(case["keys"] == case.get("padding_key"))) for case in cases]
            padded = any(case.get("padding_key") is not None for case in cases)
            assert list(lookup.padding) == (paddings if padded else [])
            for expected_bags_, batch in zip(expected, batches, strict=True):
                expected_bags_.check(self.to_host(batch.outs[0]))

    def missing_in_bags(self, cache: EmbeddingCache, case: dict[str, Any]) -> int:
        counted = case["keys"] != case.get("padding_key")
        return int(np.count_nonzero(counted & ~self.resident(cache, case["keys"], case["table"])))

    def expected_bags(self, cache: EmbeddingCache, case: dict[str, Any], known: KeyArray) -> Expected:
        keys = case["keys"]
        vectors = small_vectors_of(keys, cache.tables[case["table"]].dim)
        vectors[~np.isin(keys, known)] = DEFAULT
        options = {name: case.get(name) for name in ("weights", "max_norm", "padding_key")}
        return pooled(vectors, keys, case["bounds"], combiner=case.get("combiner", "sum"), **options)

    def random_bags(self, pool: KeyArray, given: str, seed: int, count: int = 40) -> dict[str, Any]:
        """Keys with duplicates, bounds and weights; with fixed hotness all bags are of one length, else many are empty."""
        rng = np.random.default_rng(seed)
        lengths = np.full(count, 5) if given == "hotness" else rng.choice([0, 0, 1, 2, 9, 33, 70], count)
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        keys = rng.choice(pool, bounds[-1])
        weights = rng.choice(np.array([-0.5, 0.0, 0.125, 1.0, 3.0], np.float32), bounds[-1])
        return {"keys": keys, "bounds": bounds, "weights": weights, "given": given}

    @pytest.mark.parametrize("dim", [1, 3, 7, 16, 32, 100, 128, 200, 512, 1000])
    def test_bags_of_any_width_are_pooled(self, create: Create, dim: int) -> None:
        """With options of which every pair meets."""
        cache, keys = create(spec(dim), 2000), distinct_keys(200)
        for nth in range(20):
            resident = (0, 90, 180)[(nth + nth // 3) % 3]
            cache.erase(0, keys[resident:])
            cache.insert(0, keys[:resident], small_vectors_of(keys[:resident], dim))
            case = {"table": 0, **self.random_bags(keys, GIVEN[nth % 5], nth)}
            case |= {"combiner": tuple(COMBINERS)[nth // 5], "max_norm": (None, 0.8)[nth % 2]}
            case |= {"padding_key": (None, int(keys[3]))[nth // 2 % 2]}
            case["weights"] = case["weights"] if nth // 4 % 2 and case["combiner"] != "max" else None
            self.check_bags(cache, [case], keys[:180])

    @pytest.mark.parametrize("given", [["host"], ["device", "int32", "short"], GIVEN], ids=["host", "device", "mixed"])
    def test_bags_of_many_tables_are_pooled_at_once(self, create: Create, given: list[str]) -> None:
        dims = [(1, 7, 16, 32, 64, 128, 200)[index % 7] for index in range(40)]
        cache = create([spec(dim, f"t{index}") for index, dim in enumerate(dims)], [1000] * len(dims))
        keys, lookup = distinct_keys(100), cache.create_lookup()
        for index, dim in enumerate(dims):
            chosen = keys[: index * 2]
            cache.insert(index, chosen, small_vectors_of(chosen, dim))
        for count in (1, 33, 40):
            cases = []
            for index in range(count):
                case = self.random_bags(keys, given[index % len(given)], index, count=index % 9)
                case |= {"table": index, "combiner": tuple(COMBINERS)[index % 3], "padding_key": int(keys[index])}
                case |= {"weights": case["weights"] if index % 2 else None, "max_norm": 0.7 if index % 4 == 0 else None}
                if index > 33:
                    case |= {"combiner": "max", "weights": None}
                cases.append(case)
            self.check_bags(cache, cases, keys[:90], lookup)

    @pytest.mark.parametrize(
        ("lengths", "resident"),
        [
            ([0, 60_000, 0, 0, 3], 0),
            ([0, 60_000, 0, 0, 3], 900),
            ([1] * 30_000, 500),
            ([0] * 5000 + [50_000, 1] + [0] * 500, 900),
            ([7] * 9000, 0),
        ],
        ids=["long", "long and resident", "short", "most are empty", "equal"],
    )
    def test_bags_are_longer_than_any_block_and_more_than_any_piece(
        self, create: Create, lengths: list[int], resident: int
    ) -> None:
        cache, keys = create(spec(12), 30_000), distinct_keys(1000)
        cache.insert(0, keys[:resident], small_vectors_of(keys[:resident], 12))
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        requested = np.random.default_rng(len(lengths)).choice(keys, bounds[-1])
        case = {"table": 0, "keys": requested, "bounds": bounds, "combiner": "mean", "padding_key": int(keys[0])}
        self.check_bags(cache, [case], keys[:900])

    def test_bags_without_keys_that_count_are_zeros(self, create: Create) -> None:
        cache, keys = create([spec(5, "a"), spec(6, "b"), spec(7, "c"), spec(8, "d")], [100] * 4), distinct_keys(4)
        bounds, weights = np.array([0, 0, 2, 4, 4]), np.array([1, -1, 0, 0], np.float32)
        none: dict[str, Any] = {"keys": keys[:0], "table": 2, "combiner": "sqrtn"}
        batches = [
            self.bags(cache, 0, keys, bounds, combiner="mean", weights=weights),
            self.bags(cache, 1, keys[[0, 0, 0, 0]], bounds, combiner="sqrtn", padding_key=int(keys[0])),
            self.bags(cache, **none, bounds=np.zeros(4, np.int64), given="device"),
            self.bags(cache, 3, keys[:0], np.zeros(1, np.int64)),
        ]
        assert self.lookup(cache, Batch.merged(batches), keys, vectors_below=small_vectors_of) == [4, 0, 0, 0]
        assert [self.to_host(batch.outs[0]).shape for batch in batches] == [(4, 5), (4, 6), (3, 7), (0, 8)]
        assert not any(self.to_host(batch.outs[0]).any() for batch in batches)

    def test_a_maximum_is_zeros_without_keys_and_nan_where_its_first_vector_is(self, create: Create) -> None:
        """As of torch, whichever of the vectors are resident."""
        keys, nan = distinct_keys(4), np.nan
        vectors = np.array([[1, nan, -3], [nan, -1, -2], [-np.inf] * 3, [9, 9, 9]], np.float32)
        positions = [0, 1, 1, 0, 3, 0, 2, 2, 3, 0]
        bounds = np.array([0, 2, 4, 4, 7, 8, 9, 10])
        expected = [[1, nan, -2], [nan, -1, -2], [0] * 3, [1, nan, -3], [-np.inf] * 3, [0] * 3, [1, nan, -3]]
        for resident in itertools.product([False, True], repeat=3):
            cache = create(spec(3), 100)
            chosen = np.flatnonzero(resident)
            cache.insert(0, keys[chosen], vectors[chosen])
            batch = self.bags(cache, 0, keys[positions], bounds, combiner="max", padding_key=int(keys[3]))

            def vectors_below(missed: KeyArray, _dim: int) -> FloatArray:
                return np.asarray(vectors[np.argmax(missed[:, None] == keys, 1)], np.float32)

            self.lookup(cache, batch, keys, vectors_below=vectors_below)
            np.testing.assert_array_equal(self.to_host(batch.outs[0]), expected)

    def test_bags_that_are_answered_without_the_database_get_defaults(self, create: Create) -> None:
        cache, keys = create(spec(6), 1000), distinct_keys(60)
        cache.insert(0, keys[:40], small_vectors_of(keys[:40], 6))
        case = {"table": 0, **self.random_bags(keys, "host", 1)}
        batch, lookup = self.bags(cache, **case), cache.create_lookup()
        lookup.query(batch)
        (missed,) = lookup.unique()
        missed.scatter(np.zeros(missed.keys.size, np.bool_))
        lookup.finish()
        self.expected_bags(cache, case, keys[self.resident(cache, keys)]).check(self.to_host(batch.outs[0]))

    @pytest.mark.parametrize(
        ("fault", "n"),
        [(fault, 10) for fault in ("falls", "begins late", "begins early", "passes the end", "ends early", "huge")]
        + [("falls", 20_000), ("passes the end", 20_000)],
    )
    def test_offsets_on_the_device_that_are_wrong_are_refused(self, create: Create, fault: str, n: int) -> None:
        cache, lookup, keys = create(spec(4), 1000), None, distinct_keys(n)
        cache.insert(0, keys[:100], small_vectors_of(keys[:100], 4))
        right = np.linspace(0, n, 9).astype(np.int64)
        bad = right.copy()
        position, value = {
            "falls": (4, right[2]),
            "begins late": (0, 1),
            "begins early": (0, -1),
            "passes the end": (-1, n + 1),
            "ends early": (-1, n - 1),
            "huge": (5, INT64.max),
        }[fault]
        bad[position] = value
        lookup = cache.create_lookup()
        batch = self.bags(cache, 0, keys, bad, "device")
        with pytest.raises(InvalidInputError, match="offsets"):
            self.lookup(cache, batch, keys, lookup, small_vectors_of)
        self.check_bags(cache, [{"table": 0, "keys": keys, "bounds": right, "given": "device"}], keys, lookup)

    @pytest.mark.parametrize(("dim", "static"), [(4, False), (33, False), (128, False), (33, True)])
    def test_no_vector_that_is_pooled_is_torn_or_stale(self, create: Create, dim: int, static: bool) -> None:
        """Vectors are a version plus a pattern of their key, in small integers: the sum of a bag, less the patterns, is the
        same in every element, the sum of versions that were current."""
        capacity, hotness = self.ways, 4
        keys = distinct_keys(2 * capacity)
        patterns = vectors_of(keys, dim + 1)[:, 1:] % 1024
        cache = create(spec(dim), capacity, static)
        started, complete = np.zeros(keys.size, np.int64), np.zeros(keys.size, np.int64)
        cache.insert(0, keys, patterns)
        done = threading.Event()

        def write() -> None:
            rng = np.random.default_rng(1)
            while not done.is_set():
                chosen = rng.permutation(keys.size)[:8]
                started[chosen] = (complete[chosen] + 1) % 100_000
                cache.insert(0, keys[chosen], patterns[chosen] + started[chosen, None].astype(np.float32))
                complete[chosen] = started[chosen]

        def read(seed: int) -> None:
            rng, lookup = np.random.default_rng(seed), cache.create_lookup()
            for turn in range(self.stress_queries):
                hot = 1 if turn % 2 else hotness
                requested = rng.integers(0, keys.size, (500, hot))
                if turn % 4 == 2:
                    requested[:] = requested[:, :1]  # bags of one key
                bounds = np.arange(requested.shape[0] + 1) * requested.shape[1]
                oldest = complete[requested].sum(1)
                batch = self.bags(cache, 0, keys[requested].reshape(-1), bounds, "hotness")
                lookup.query(batch)
                for missed in lookup.unique():
                    rows = np.array([np.flatnonzero(keys == key)[0] for key in missed.keys])
                    missed.buffer()[:] = patterns[rows] + complete[rows, None].astype(np.float32)
                    missed.stage(0, rows.size)
                    missed.scatter(np.ones(rows.size, np.bool_))
                lookup.finish()
                newest = started[requested].sum(1)
                versions = self.to_host(batch.outs[0]) - patterns[requested].sum(1)
                np.testing.assert_array_equal(versions, np.broadcast_to(versions[:, :1], versions.shape))
                assert (versions[:, 0] >= oldest).all()
                assert (versions[:, 0] <= newest).all()

        with ThreadPoolExecutor(3) as pool:
            writing = pool.submit(write)
            try:
                for reader in [pool.submit(read, seed) for seed in range(2)]:
                    reader.result(timeout=300)
            finally:
                done.set()
            writing.result(timeout=60)

    # -- capacity and eviction -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("capacity", [1, 14, 15, 100, 1000])
    def test_a_table_never_holds_more_than_its_capacity(self, create: Create, capacity: int) -> None:
        cache = create(spec(4), capacity)
        limit = cache.stats(0).capacity_rows
        assert capacity <= limit < capacity + self.ways
        for seed in range(5):
            keys = distinct_keys(3 * limit, seed=seed)
            cache.insert(0, keys, vectors_of(keys, 4))
            rows = self.raw_rows(cache, 0)
            assert len(rows) <= limit
            resident_keys = np.array(list(rows), np.int64)
            assert rows == {int(key): vectors_of(resident_keys, 4)[i].tobytes() for i, key in enumerate(resident_keys)}
            assert cache.stats(0).resident_rows == len(rows) == cache.dump(0).size
        assert len(rows) == limit  # 15 times as many keys as slots: every set is full

    def test_what_could_not_be_allocated_is_refused_before(self) -> None:
        self.cache_class.check_room([spec(16), spec(4, "other")], [1000, 0], 0)
        with pytest.raises(
            CapacityError, match=r"got [\d,]{13,} bytes.*rows of table 'other'.*at most the [\d,]+ .*gpucacheper"
        ):
            self.cache_class.check_room([spec(16), spec(4096, "other")], [1000, 1 << 31], 0)

    def test_a_capacity_of_zero_caches_nothing(self, create: Create) -> None:
        cache = create([spec(4, "a"), spec(4, "b")], [0, 100])
        keys = distinct_keys(50)
        cache.insert(0, keys, vectors_of(keys, 4))
        cache.update(0, keys, vectors_of(keys, 4))
        cache.erase(0, keys[:3])
        batch = self.batch(cache, 0, keys)
        assert self.lookup(cache, batch, keys) == [50]
        assert self.lookup(cache, batch, keys) == [50]
        np.testing.assert_array_equal(bits(self.to_host(batch.outs[0])), bits(vectors_of(keys, 4, 1)))
        assert not self.query(cache, keys)[1].any()
        assert cache.dump(0).size == 0
        assert cache.stats(0).capacity_rows == cache.stats(0).resident_rows == 0

    @pytest.mark.parametrize("stride", [1, 64, 715, 1 << 32, -(1 << 40)])
    def test_strided_keys_do_not_pile_up(self, create: Create, stride: int) -> None:
        cache = create(spec(1), 715 * self.ways)
        keys = np.arange(5000, dtype=np.int64) * stride
        cache.insert(0, keys, vectors_of(keys, 1))
        assert cache.stats(0).resident_rows >= 4900  # half full; a random hash keeps about 4,990

    def test_a_full_set_evicts_what_was_used_least_recently(self, create: Create) -> None:
        cache, keys = create(spec(4), self.ways), distinct_keys(2 * self.ways)
        old, new = keys[: self.ways], keys[self.ways :]
        cache.insert(0, old, vectors_of(old, 4))
        assert set(self.raw_rows(cache, 0)) == set(old.tolist())
        order = np.random.default_rng(5).permutation(old)
        for key in order:
            self.query(cache, np.array([key]))
            self.pass_epoch(cache)
        for count in range(1, self.ways + 1):
            cache.insert(0, new[count - 1 : count], vectors_of(new[count - 1 : count], 4))
            self.query(cache, new[count - 1 : count])
            assert set(self.raw_rows(cache, 0)) == {*order[count:].tolist(), *new[:count].tolist()}
        assert cache.stats(0).evictions == self.ways

    def test_neither_update_nor_replacement_counts_as_a_use(self, create: Create) -> None:
        cache, keys = create(spec(4), self.ways), distinct_keys(self.ways + 2)
        cache.insert(0, keys[: self.ways], vectors_of(keys[: self.ways], 4))
        for key in keys[: self.ways]:
            self.query(cache, np.array([key]))
            self.pass_epoch(cache)
        cache.update(0, keys[:1], vectors_of(keys[:1], 4, 1))
        cache.insert(0, keys[-1:], vectors_of(keys[-1:], 4))
        self.query(cache, keys[-1:])
        assert not self.resident(cache, keys[:1]).any()
        cache.insert(0, keys[1:2], vectors_of(keys[1:2], 4, 1))
        cache.insert(0, keys[-2:-1], vectors_of(keys[-2:-1], 4))
        assert not self.resident(cache, keys[1:2]).any()

    def test_a_new_key_is_on_probation_until_it_is_used(self, create: Create) -> None:
        cache, keys = create(spec(4), self.ways), distinct_keys(self.ways + 4)
        old, (a, b, c, d) = keys[: self.ways], keys[self.ways :, None]
        cache.insert(0, old, vectors_of(old, 4))
        self.query(cache, old)
        for key in (a, b):
            cache.insert(0, key, vectors_of(key, 4))
        np.testing.assert_array_equal(self.resident(cache, np.concatenate([a, b])), [False, True])
        for _ in range(self.probation + 2):
            self.pass_epoch(cache)
        for key in (c, d):
            cache.insert(0, key, vectors_of(key, 4))
        np.testing.assert_array_equal(self.resident(cache, np.concatenate([b, c, d])), [False, True, True])

    @pytest.mark.parametrize("inserted", [False, True])
    def test_a_missed_key_evicts_none_that_is_in_use_and_an_inserted_one_does(self, create: Create, inserted: bool) -> None:
        cache, new = create(spec(4), self.ways), distinct_keys(3, seed=13)
        keys, _evicted = self.crowd(cache)
        cache.insert(0, keys, vectors_of(keys, 4))
        resident_keys, evictions = cache.dump(0), cache.stats(0).evictions
        self.query(cache, resident_keys)
        if inserted:
            cache.insert(0, new, vectors_of(new, 4, 1))
        else:
            batch = self.batch(cache, 0, new)
            assert self.lookup(cache, batch, new) == [3]
            np.testing.assert_array_equal(bits(self.to_host(batch.outs[0])), bits(vectors_of(new, 4, 1)))
        assert cache.stats(0).evictions == evictions + 3 * inserted
        assert self.resident(cache, resident_keys).all() == (not inserted)
        assert self.resident(cache, new).any() == inserted

    def test_the_used_tenth_stays_while_others_stream_through(self, create: Create) -> None:
        cache = create(spec(4), 100 * self.ways)
        hot, cold = distinct_keys(10 * self.ways, seed=1), distinct_keys(2000 * self.ways, seed=2)
        cache.insert(0, hot, vectors_of(hot, 4))
        for chunk in np.array_split(cold, 40):
            self.query(cache, hot)
            cache.insert(0, chunk, vectors_of(chunk, 4))
        assert self.resident(cache, hot).all()

    def test_stats_count_what_happened(self, create: Create) -> None:
        cache = create([spec(4, "a"), spec(32, "b")], [self.ways, 1000])
        keys, evicted = self.crowd(cache)
        assert cache.stats(0).inserts == cache.stats(0).evictions == cache.stats(0).resident_rows == 0
        assert cache.stats(1).size_bytes >= 1000 * (32 * 4 + 8)
        cache.insert(0, keys, vectors_of(keys, 4))
        stats = cache.stats(0)
        assert (stats.inserts, stats.evictions, stats.resident_rows) == (keys.size, evicted, self.ways)
        cache.insert(0, cache.dump(0), np.zeros((self.ways, 4), np.float32))
        cache.erase(0, cache.dump(0)[:5])
        stats = cache.stats(0)
        assert (stats.inserts, stats.evictions, stats.resident_rows) == (keys.size, evicted, self.ways - 5)
        assert cache.stats(1).inserts == 0

    # -- life and concurrency ------------------------------------------------------------------------------------------

    def test_a_closed_cache_says_so(self, create: Create) -> None:
        cache, keys = create(spec(4), 100), distinct_keys(5)
        lookup, batch = cache.create_lookup(), self.batch(cache, 0, keys)
        cache.close()
        cache.close()
        with pytest.raises(NotReadyError):
            lookup.query(batch)
        with pytest.raises(NotReadyError):
            cache.insert(0, keys, vectors_of(keys, 4))

    @pytest.mark.parametrize(
        ("dim", "capacity", "static"), [(4, 28, False), (33, 56, False), (128, 28, False), (4, 42, True), (33, 98, True)]
    )
    def test_no_vector_is_torn_stale_or_anothers(self, create: Create, dim: int, capacity: int, static: bool) -> None:
        """Readers query skewed keys with duplicates while each writer inserts, updates and erases keys of its own.

        A vector that a query returns must be whole, its own key's, and of a version that was current during the query:
        not older than what was complete when it began, not newer than what was begun when it ended.
        """
        writers, keys = 3, distinct_keys(2 * capacity)
        cache = create(spec(dim), capacity, static)
        started, complete = np.zeros(keys.size, np.int64), np.zeros(keys.size, np.int64)
        done = threading.Event()

        def write(index: int) -> None:
            rng = np.random.default_rng(index)
            own_keys = np.arange(index, keys.size, writers)
            version = 0
            while not done.is_set():
                version = (version + 1) % (1 << 24)
                chosen = (
                    own_keys
                    if version % 8 == 0
                    else own_keys[:1]
                    if version % 2
                    else own_keys[rng.integers(0, own_keys.size, 8)]
                )
                vectors = vectors_of(keys[chosen], dim, version)
                batch, rows = np.tile(keys[chosen], 40), np.tile(vectors, (40, 1))
                started[chosen] = version
                action = rng.integers(0, 10)
                if action < 5:
                    cache.insert(0, batch, rows)
                elif action < 9:
                    cache.update(0, batch, rows)
                else:
                    cache.erase(0, batch)
                complete[chosen] = version

        def read(index: int) -> int:
            rng = np.random.default_rng(100 + index)
            lookup = cache.create_lookup()
            checked = 0
            for _ in range(self.stress_queries):
                requested = np.minimum(rng.zipf(1.3, 5000) - 1, keys.size - 1)
                oldest = complete[requested]
                out, found = self.query(cache, keys[requested], lookup=lookup)
                newest = started[requested]
                versions = out[found, 0].astype(np.int64)
                expected = vectors_of(keys[requested][found], dim, versions)
                np.testing.assert_array_equal(bits(out[found]), bits(expected))
                assert (versions >= oldest[found]).all()
                assert (versions <= newest[found]).all()
                checked += versions.size
            return checked

        with ThreadPoolExecutor(writers + 2) as pool:
            writing = [pool.submit(write, index) for index in range(writers)]
            try:
                reading = [pool.submit(read, index) for index in range(2)]
                checked = sum(reader.result(timeout=300) for reader in reading)
            finally:
                done.set()
            for writer in writing:
                writer.result(timeout=60)
        assert checked > 2 * self.stress_queries * 5000 // 20
        rows = self.raw_rows(cache, 0)
        stats = cache.stats(0)
        assert len(rows) == stats.resident_rows == cache.dump(0).size <= stats.capacity_rows


class StaticTablesContract(CacheContract):
    """Also the behaviour of a cache that can keep every row of a table (`hps.cache.base.StaticTables`)."""

    cache_class: ClassVar[type[StaticTables]]

    def check_static(self, cache: StaticTables, keys: KeyArray, version: int | np.ndarray) -> None:
        """Every key is resident, with its vector, on every path; nothing else is."""
        dim, versions = cache.tables[0].dim, np.broadcast_to(np.asarray(version), keys.shape)
        vectors = vectors_of(keys, dim, versions)
        out, found = self.query(cache, keys)
        assert found.all()
        np.testing.assert_array_equal(bits(out), bits(vectors))
        assert self.raw_rows(cache, 0) == {int(key): row.tobytes() for key, row in zip(keys, vectors, strict=True)}
        np.testing.assert_array_equal(np.sort(cache.dump(0)), np.sort(keys))
        stats = cache.stats(0)
        assert (stats.resident_rows, stats.evictions, stats.unplaced) == (keys.size, 0, 0)

    @pytest.mark.parametrize(
        ("dim", "rows"),
        [(4, 1), (1, 14), (4, 15), (33, 28), (2, 29), (4, 42), (5, 43), (16, 997), (128, 3000), (3, 9973)],
    )
    def test_every_row_of_a_static_table_is_resident_again_and_again(self, create: CreateStatic, dim: int, rows: int) -> None:
        cache = create(spec(dim), rows, static=True)
        for seed in range(2):  # nothing of the first round is left to the second
            keys = np.arange(rows) if seed else distinct_keys(rows)
            version = np.zeros(rows, np.int64)
            cache.insert(0, keys, vectors_of(keys, dim))
            self.check_static(cache, keys, version)
            erased, written, unchanged = np.split(np.random.default_rng(seed).permutation(rows), [rows // 3, 2 * rows // 3])
            cache.update(0, keys[written], vectors_of(keys[written], dim, 1))
            cache.erase(0, keys[erased])
            version[written] = 1
            self.check_static(
                cache,
                keys[np.sort(np.concatenate([written, unchanged]))],
                version[np.sort(np.concatenate([written, unchanged]))],
            )
            assert not self.query(cache, keys[erased])[1].any()
            cache.update(0, keys[erased], vectors_of(keys[erased], dim, 2))
            assert not self.query(cache, keys[erased])[1].any()
            reinserted = np.concatenate([erased, unchanged, erased[:5]])  # some twice
            cache.insert(0, keys[reinserted], vectors_of(keys[reinserted], dim, 3))
            version[reinserted] = 3
            self.check_static(cache, keys, version)
            cache.erase(0, keys)
            assert cache.dump(0).size == cache.stats(0).resident_rows == 0

    def test_an_overfull_static_table_counts_keys_without_a_place_and_evicts_nothing(self, create: CreateStatic) -> None:
        cache = create(spec(4), 1000, static=True)
        slots = cache.stats(0).capacity_rows
        keys = np.concatenate([AWKWARD_KEYS, np.setdiff1d(distinct_keys(slots + 100), AWKWARD_KEYS)])[: slots + 100]
        cache.insert(0, keys, vectors_of(keys, 4))
        stats, resident = cache.stats(0), np.sort(cache.dump(0))
        assert stats.unplaced >= 100
        assert (stats.resident_rows + stats.unplaced, stats.evictions) == (keys.size, 0)
        assert stats.resident_rows > 0.95 * slots
        assert cache.check_integrity() == []
        out, found = self.query(cache, keys)
        np.testing.assert_array_equal(np.sort(keys[found]), resident)
        np.testing.assert_array_equal(out[found], vectors_of(keys[found], 4))
        cache.erase(0, keys[found])
        cache.insert(0, keys[~found], vectors_of(keys[~found], 4))  # all that it forgot has room now
        assert self.query(cache, keys[~found])[1].all()
        assert cache.check_integrity() == []

    @pytest.mark.parametrize("key", [INT64.min, -1, 0, 1 << 32, INT64.max])
    def test_every_int64_is_a_key_of_a_static_table_only_when_it_is_inserted(self, create: CreateStatic, key: int) -> None:
        cache, keys = create(spec(4), 60, static=True), distinct_keys(60)
        for start in range(0, 60, 20):  # emptier and fuller
            assert not self.query(cache, np.array([key, 0, 1, -1]))[1].any()
            cache.insert(0, keys[start : start + 20], vectors_of(keys[start : start + 20], 4))
        cache.insert(0, np.array([key]), vectors_of(np.array([key]), 4))
        self.check_static(cache, np.append(keys, key), 0)

    def test_bags_of_a_full_static_table_are_pooled(self, create: CreateStatic) -> None:
        cache = create(spec(16), 3000, static=True)
        keys = distinct_keys(int(0.94 * cache.stats(0).capacity_rows) + 20)
        cache.insert(0, keys[:-20], small_vectors_of(keys[:-20], 16))
        case = {"table": 0, **self.random_bags(keys, "host", 1, count=400), "combiner": "mean"}
        self.check_bags(cache, [case], keys[:-20])

    def test_a_lookup_makes_nothing_resident_in_a_static_table(self, create: CreateStatic) -> None:
        cache, keys = create(spec(4), 100, static=True), distinct_keys(30)
        cache.insert(0, keys[:20], vectors_of(keys[:20], 4, 1))
        for _ in range(2):
            batch = self.batch(cache, 0, keys)
            assert self.lookup(cache, batch, keys) == [10]
            np.testing.assert_array_equal(self.to_host(batch.outs[0]), vectors_of(keys, 4, 1))
        self.check_static(cache, keys[:20], 1)

    def test_a_complete_cache_answers_absent_keys_itself(self, create: CreateStatic) -> None:
        cache, keys = create([spec(4, "a"), spec(7, "b")], [100, 100], static=True), distinct_keys(60)
        for table, dim in enumerate((4, 7)):
            cache.insert(table, keys[:40], vectors_of(keys[:40], dim))
        lookup = cache.create_lookup()
        assert not cache.complete
        assert lookup.query(self.batch(cache, 0, keys)) == 20
        lookup.finish()
        cache.mark_complete(complete=True)
        for absent in (20, 21):  # with a key that is deleted in the second round
            batches = [self.batch(cache, 1, keys), self.batch(cache, 0, keys[:5], with_found=False)]
            assert lookup.query(Batch.merged(batches)) == 0
            assert (list(lookup.absent), sum(lookup.linked)) == ([absent, absent - 20], 0)
            out, found = self.to_host(batches[0].outs[0]), self.to_host(batches[0].founds[0])
            np.testing.assert_array_equal(found, np.isin(keys, keys[absent - 20 : 40]))
            np.testing.assert_array_equal(out[found], vectors_of(keys[found], 7))
            assert (out[~found] == np.float32(DEFAULT)).all()
            assert lookup.query(self.batch(cache, 1, keys[absent - 20 : 40])) == 0
            assert not any(lookup.absent)
            cache.erase(0, keys[:1])
            cache.erase(1, keys[:1])

    def test_a_cache_is_complete_until_a_row_is_dropped_or_finds_no_place(self, create: CreateStatic) -> None:
        cache, keys = create(spec(4), 42, static=True), distinct_keys(600)
        cache.insert(0, keys[:40], vectors_of(keys[:40], 4))
        cache.mark_complete(complete=True)
        cache.write(0, keys[39:42], vectors_of(keys[39:42], 4, 1))
        complete = cache.complete
        assert complete
        out, _found = self.query(cache, keys[39:42])
        np.testing.assert_array_equal(out, vectors_of(keys[39:42], 4, 1))
        cache.write(0, keys[42:], vectors_of(keys[42:], 4))
        assert not cache.complete
        resident = cache.dump(0)
        unplaced = keys[~np.isin(keys, resident)]
        assert unplaced.size == cache.stats(0).unplaced > 0
        lookup = cache.create_lookup()
        assert lookup.query(self.batch(cache, 0, unplaced)) == unplaced.size
        lookup.finish()
        cache.erase(0, resident)
        cache.insert(0, keys[:40], vectors_of(keys[:40], 4))
        cache.mark_complete(complete=True)
        cache.drop(0, keys[:2])
        assert not cache.complete
        assert lookup.query(self.batch(cache, 0, keys[:40])) == 2
        lookup.finish()

    def test_keys_that_stay_are_found_beside_keys_that_come_and_go(self, create: CreateStatic) -> None:
        """The others make keys move between their sets. In a complete cache, a key that a writer keeps is left, not absent."""
        cache = create(spec(4), 3000, static=True)
        keys = distinct_keys(int(0.93 * cache.stats(0).capacity_rows))
        stay, go = keys[::2], keys[1::2]
        cache.insert(0, keys, vectors_of(keys, 4))
        assert cache.stats(0).unplaced == 0
        cache.mark_complete(complete=True)
        failures: list[str] = []
        began, end = threading.Event(), threading.Event()

        def read() -> None:
            lookup = cache.create_lookup()
            while not end.is_set():
                began.set()
                batch = self.batch(cache, 0, stay)
                lookup.query(batch)
                lookup.finish()
                out, found = self.to_host(batch.outs[0]), self.to_host(batch.founds[0]).astype(np.bool_)
                if not np.array_equal(out[found], vectors_of(stay[found], 4)):
                    failures.append("a vector was wrong")
                if sum(lookup.absent):
                    failures.append("a key that stays was absent")

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            try:
                assert began.wait(60)
                for seed in range(30):
                    some = np.random.default_rng(seed).permutation(go)[: go.size // 2]
                    cache.erase(0, some)
                    cache.insert(0, some, vectors_of(some, 4))
            finally:
                end.set()
            reader.result(60)
        assert failures == []
        assert cache.check_integrity() == []
        self.check_static(cache, keys, 0)

    def test_only_static_caches_are_complete(self, create: CreateStatic) -> None:
        cache, keys = create(spec(4), 100), distinct_keys(3)
        cache.mark_complete(complete=True)
        assert not cache.complete
        cache.write(0, keys, vectors_of(keys, 4))
        assert not self.query(cache, keys)[1].any()  # it updates


class VersionedCacheContract(CacheContract):
    """Also the behaviour of a cache whose sets have versions; needs `raw_sets` and `raw_version`, too."""

    def raw_sets(self, cache: EmbeddingCache) -> np.ndarray:
        """A copy of the sets of table 0: keys, versions and recency."""
        raise NotImplementedError("a subclass reads the memory itself")

    def raw_version(self, cache: EmbeddingCache) -> DeviceArray:
        """(1,) uint16, the version of the first set of table 0, in place."""
        raise NotImplementedError("a subclass reads the memory itself")

    def keys_of_first_set(self, cache: EmbeddingCache, count: int) -> KeyArray:
        """Return different keys of the first set of table 0, which has `ways` rows."""
        return distinct_keys(count)

    def test_calls_that_change_nothing_leave_versions_alone(self, create: Create) -> None:
        cache, keys = create(spec(4), self.ways), distinct_keys(8)
        cache.insert(0, keys[:4], vectors_of(keys[:4], 4))
        before = self.raw_sets(cache)
        cache.update(0, keys[4:], vectors_of(keys[4:], 4))
        cache.erase(0, keys[4:])
        cache.dump(0)
        self.query(cache, keys[4:])
        np.testing.assert_array_equal(self.raw_sets(cache), before)

    def test_a_query_does_not_wait_for_a_set_that_a_writer_keeps(self, create: Create) -> None:
        cache = create(spec(4), self.ways)
        keys = self.keys_of_first_set(cache, 3)
        cache.insert(0, keys, vectors_of(keys, 4))
        assert len(self.raw_rows(cache, 0)) == 3
        version = self.raw_version(cache)
        version |= 1
        assert int(version[0]) & 1
        _out, found = self.query(cache, keys)
        assert not found.any()
        version ^= 1
        assert not int(version[0]) & 1
        _out, found = self.query(cache, keys)
        assert found.all()
