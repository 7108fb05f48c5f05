"""An embedding cache against a model, by random sequences of calls; a cache on a device subclasses `CacheMachine`.

The model knows which vector each key would have if it were resident: a cache may forget, and never lie.
"""

from typing import ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hps.ground.rows import decode, encode
from hps.tensors.bags import COMBINERS
from hps.tensors.batch import Batch
from hps.testing.caches import AWKWARD_KEYS, DEFAULT, CacheContract, bits, vectors_of
from hps.testing.pooling_oracle import pooled
from hps.types import FloatArray, KeyArray, RowArray, TableSpec
from tests.ring1.cache.test_numpy_cache import TestNumpyCache as NumpyContract

DIMS = (1, 5, 20)
POOL = np.concatenate([AWKWARD_KEYS[::3], np.arange(40) * 14])
"""Few enough keys that they meet again, and more than the small caches hold."""

keys_strategy = st.lists(st.sampled_from(POOL.tolist()), max_size=60).map(lambda keys: np.array(keys, np.int64))
cuts_strategy = st.lists(st.integers(0, 60), max_size=20)
table_strategy = st.integers(0, len(DIMS) - 1)


class CacheMachine(RuleBasedStateMachine):
    """Give `contract`, the contract test of the cache: it creates it and carries arrays to it and back."""

    contract: ClassVar[CacheContract]
    row_dtypes: ClassVar[tuple[str, ...]] = ("float32",) * len(DIMS)
    """How each table stores its rows."""
    static: ClassVar[bool] = False

    @initialize(capacities=st.tuples(*[st.sampled_from([0, 1, 14, 29, 300])] * len(DIMS)))
    def start(self, capacities: tuple[int, ...]) -> None:
        formats = zip(DIMS, self.row_dtypes, strict=True)
        tables = [TableSpec("shop", f"t{dim}", dim, DEFAULT, 1000, row_dtype=dtype) for dim, dtype in formats]
        self.cache = self.contract.cache_class.create(tables, capacities, 0, self.static)
        self.lookup = self.cache.create_lookup()
        self.known: list[dict[int, int]] = [{} for _ in DIMS]  # key -> version of the vector it has where it is resident
        self.overflowed = [False] * len(DIMS)  # whether more keys than a set holds were ever there at once
        self.version = 0

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

    def next_rows(self, table: int, keys: KeyArray) -> RowArray:
        self.version += 1
        return self.rows_of(table, keys, self.version)

    def rows_of(self, table: int, keys: KeyArray, version: int | np.ndarray) -> RowArray:
        """The stored rows of a version; its number is within what float16 tells apart."""
        return encode("storing", vectors_of(keys, DIMS[table], version) * np.float32(2.0**-9), self.row_dtypes[table])

    def vectors_of(self, table: int, keys: KeyArray, version: int | np.ndarray) -> FloatArray:
        """What lookups answer."""
        return decode(self.rows_of(table, keys, version), DIMS[table], self.row_dtypes[table])

    @rule(table=table_strategy, keys=keys_strategy)
    def insert(self, table: int, keys: KeyArray) -> None:
        unplaced = self.cache.stats(table).unplaced
        self.cache.insert(table, keys, self.next_rows(table, keys))
        self.known[table].update(dict.fromkeys(keys.tolist(), self.version))
        self.overflowed[table] |= len(self.known[table]) > self.contract.ways
        held = set(self.cache.dump(table).tolist())
        stats = self.cache.stats(table)
        if stats.unplaced != unplaced:  # of a static table
            assert stats.resident_rows > 0.9 * stats.capacity_rows
            refused = set(keys.tolist()) - held
            assert len(refused) <= stats.unplaced - unplaced
            self.known[table] = {key: version for key, version in self.known[table].items() if key not in refused}
            assert held == set(self.known[table])
            return
        if stats.capacity_rows and not stats.evictions:
            assert held == set(self.known[table])
        if stats.capacity_rows and len(set(keys.tolist())) == 1:
            assert set(keys.tolist()) <= held
        if len(self.known[table]) <= self.contract.ways and not self.overflowed[table]:
            assert not stats.evictions

    @rule(table=table_strategy, keys=keys_strategy)
    def update(self, table: int, keys: KeyArray) -> None:
        before = set(self.cache.dump(table).tolist())
        self.cache.update(table, keys, self.next_rows(table, keys))
        self.known[table].update(dict.fromkeys(before.intersection(keys.tolist()), self.version))
        assert set(self.cache.dump(table).tolist()) == before

    @rule(table=table_strategy, keys=keys_strategy)
    def erase(self, table: int, keys: KeyArray) -> None:
        self.cache.erase(table, keys)
        for key in keys.tolist():
            self.known[table].pop(key, None)
        assert not set(self.cache.dump(table).tolist()) & set(keys.tolist())

    @rule(
        requests=st.lists(st.tuples(table_strategy, keys_strategy), max_size=len(DIMS), unique_by=lambda request: request[0]),
        present=st.sets(st.sampled_from(POOL.tolist())),
        with_found=st.booleans(),
        answer=st.sampled_from(["fetch", "default", "nothing"]),
    )
    def look_up(self, requests: list[tuple[int, KeyArray]], present: set[int], with_found: bool, answer: str) -> None:
        """Query tables at once; then fetch the `present` keys from below, or fill in defaults, or do nothing more."""
        cache, lookup = self.cache, self.lookup
        batch = Batch.merged([self.contract.batch(cache, table, keys, with_found=with_found) for table, keys in requests])
        resident = [set(cache.dump(table).tolist()) for table, _keys in requests]
        missing = lookup.query(batch)
        hit = [np.isin(keys, list(held)) for (_table, keys), held in zip(requests, resident, strict=True)]
        assert lookup.counts == [int(np.count_nonzero(~row)) for row in hit]
        assert missing == sum(lookup.counts)
        expected = [self.vectors_of(table, keys, self.versions(table, keys)) for table, keys in requests]
        answered = [row.copy() for row in hit]
        if answer == "fetch":
            places = {table: index for index, (table, _keys) in enumerate(requests) if not hit[index].all()}
            for missed in lookup.unique():
                index = places.pop(missed.table)
                table, keys = requests[index]
                np.testing.assert_array_equal(np.sort(missed.keys), np.unique(keys[~hit[index]]))
                found = np.isin(missed.keys, list(present))
                missed.buffer()[:] = self.next_rows(table, missed.keys)
                for part in (0, found.size // 2), (found.size // 2, found.size):
                    missed.stage(*part)
                missed.scatter(found)
                missed.insert(found)
                self.known[table].update(dict.fromkeys(missed.keys[found].tolist(), self.version))
                self.overflowed[table] |= len(self.known[table]) > self.contract.ways
                refused = set(missed.keys[found].tolist()) - set(cache.dump(table).tolist())
                assert not refused or self.overflowed[table] or self.static or not cache.stats(table).capacity_rows
                for key in refused:
                    del self.known[table][key]
                answered[index] = hit[index] | np.isin(keys, list(present))
                fetched = answered[index] & ~hit[index]
                expected[index][fetched] = self.vectors_of(table, keys, self.version)[fetched]
                expected[index][~answered[index]] = DEFAULT
            assert not places
        elif answer == "default":
            for missed in lookup.unique():
                missed.scatter(np.zeros(missed.keys.size, np.bool_))
            for row, rows in zip(hit, expected, strict=True):
                rows[~row] = DEFAULT
        lookup.finish()
        for place, (row, was_answered, rows) in enumerate(zip(hit, answered, expected, strict=True)):
            compared = row if answer == "nothing" else slice(None)
            np.testing.assert_array_equal(bits(self.contract.to_host(batch.outs[place])[compared]), bits(rows[compared]))
            if with_found:
                np.testing.assert_array_equal(self.contract.to_host(batch.founds[place]), was_answered)

    @rule(
        table=table_strategy, keys=keys_strategy, cuts=st.lists(st.integers(0, 60)), combiner=st.sampled_from(tuple(COMBINERS))
    )
    def look_up_bags(self, table: int, keys: KeyArray, cuts: list[int], combiner: str) -> None:
        """Pool bags, with defaults for what is not resident."""
        bounds = np.array([0, *sorted(min(cut, keys.size) for cut in cuts), keys.size], np.int64)
        resident = np.isin(keys, self.cache.dump(table))
        batch = self.contract.bags(self.cache, table, keys, bounds, combiner=combiner)
        assert self.lookup.query(batch) == np.count_nonzero(~resident)
        for missed in self.lookup.unique():
            missed.scatter(np.zeros(missed.keys.size, np.bool_))
        self.lookup.finish()
        vectors = self.vectors_of(table, keys, self.versions(table, keys))
        vectors[~resident] = DEFAULT
        pooled(vectors, keys, bounds, combiner=combiner).check(self.contract.to_host(batch.outs[0]))

    def versions(self, table: int, keys: KeyArray) -> np.ndarray:
        return np.array([self.known[table].get(key, 0) for key in keys.tolist()], np.int64)

    @invariant()
    def what_is_resident_is_whole_and_current(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.check_integrity() == []
        for table, known in enumerate(self.known):
            rows = self.contract.raw_rows(self.cache, table)
            stats = self.cache.stats(table)
            assert len(rows) == stats.resident_rows <= stats.capacity_rows
            assert sorted(rows) == sorted(self.cache.dump(table).tolist())
            assert rows.keys() <= known.keys()
            held = np.array(list(rows), np.int64)
            current = self.rows_of(table, held, self.versions(table, held))
            assert list(rows.values()) == [vector.tobytes() for vector in current]


class NumpyCacheMachine(CacheMachine):
    contract = NumpyContract()


class RowFormatsMachine(NumpyCacheMachine):
    """Tables of several formats, which one lookup answers."""

    row_dtypes = ("float16", "bfloat16", "int8")


class Int8Machine(NumpyCacheMachine):
    row_dtypes = ("int8", "float32", "float16")


class StaticMachine(NumpyCacheMachine):
    """Small static tables, up to more keys than they have slots."""

    static = True

    @rule(table=table_strategy, order=st.permutations(POOL.tolist()))
    def fill(self, table: int, order: list[int]) -> None:
        self.insert(table, np.array(order, np.int64))


TestNumpyCacheAgainstAModel = NumpyCacheMachine.TestCase
TestRowFormatsAgainstAModel = RowFormatsMachine.TestCase
TestInt8RowsAgainstAModel = Int8Machine.TestCase
TestStaticTablesAgainstAModel = StaticMachine.TestCase
TestNumpyCacheAgainstAModel.settings = settings(max_examples=15, stateful_step_count=25)
# tests/nightly/cache has more
TestStaticTablesAgainstAModel.settings = settings(max_examples=15, stateful_step_count=40)
TestRowFormatsAgainstAModel.settings = TestInt8RowsAgainstAModel.settings = settings(max_examples=10, stateful_step_count=25)
