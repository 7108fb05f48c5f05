"""The CuPy cache and its NumPy twin, driven by the same random operations."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from hps.cache.base import EmbeddingCache
from hps.cache.cpu.cache import NumpyCache
from hps.tensors.segments import Segment
from hps.testing.caches import AWKWARD_KEYS, DEFAULT, bits, spec, vectors_of
from hps.types import BoolArray, FloatArray, KeyArray
from tests.gpu.cupy_if_installed import CupyCache, cupy

pytestmark = pytest.mark.gpu

KEYS = np.concatenate([AWKWARD_KEYS[:30], np.arange(1000, 1300)])
CHOICES = st.lists(st.integers(0, KEYS.size - 1), max_size=400).map(lambda picks: KEYS[np.array(picks, np.int64)])
CAPACITY = 2000  # nothing is evicted: what differs between the two is which keys an eviction takes


class TwoCaches(RuleBasedStateMachine):
    """Both caches and a dict are given the same operations; queries, dumps and statistics agree."""

    @initialize(dim=st.sampled_from([1, 2, 4, 7, 32, 100, 260]), on_host=st.booleans())
    def create(self, dim: int, on_host: bool) -> None:
        self.dim, self.version = dim, 0
        self.to_device: Any = np.array if on_host else cupy.asarray
        self.caches: list[EmbeddingCache] = [
            cache_class.create([spec(dim), spec(3, "other")], [CAPACITY, 100], 0) for cache_class in (NumpyCache, CupyCache)
        ]
        self.lookups = [cache.create_lookup() for cache in self.caches]
        self.model: dict[int, int] = {}

    def teardown(self) -> None:
        for cache in getattr(self, "caches", []):
            cache.close()

    def _query(self, index: int, keys: KeyArray, stored: KeyArray) -> tuple[FloatArray, BoolArray]:
        lookup = self.lookups[index]
        place = self.to_device if index else np.array
        segment = Segment(
            0, place(keys), place(np.full((keys.size, self.dim), np.nan, np.float32)), place(np.zeros(keys.size, bool))
        )
        lookup.query([segment])
        for missed in lookup.unique():
            found = np.isin(missed.keys, stored)
            if stored.size:
                missed.buffer()[...] = vectors_of(missed.keys, self.dim, self.version)
                missed.stage(0, missed.keys.size)
            missed.scatter(found)
            if stored.size:
                missed.insert(found)
        lookup.finish()
        return cupy.asnumpy(segment.out), cupy.asnumpy(segment.found)

    @rule(keys=CHOICES, known=st.sampled_from([0, 1, 2, 3]))
    def lookup(self, keys: KeyArray, known: int) -> None:
        """Look keys up; the database below has every `known`-th of all keys, or none."""
        self.version += 1
        stored = KEYS[::known] if known else KEYS[:0]
        fetched = [int(key) for key in np.unique(keys) if int(key) not in self.model and key in stored]
        self.model.update(dict.fromkeys(fetched, self.version))
        resident = np.array([int(key) in self.model for key in keys], bool)
        versions = np.array([self.model.get(int(key), 0) for key in keys], np.int64)
        expected = vectors_of(keys, self.dim, versions)
        expected[~resident] = DEFAULT
        for index in range(2):
            out, found = self._query(index, keys, stored)
            np.testing.assert_array_equal(found, resident)
            np.testing.assert_array_equal(bits(out), bits(expected))

    @rule(keys=CHOICES)
    def insert(self, keys: KeyArray) -> None:
        self.version += 1
        for cache in self.caches:
            cache.insert(0, keys, vectors_of(keys, self.dim, self.version))
        self.model.update(dict.fromkeys(keys.tolist(), self.version))

    @rule(keys=CHOICES)
    def update(self, keys: KeyArray) -> None:
        self.version += 1
        for cache in self.caches:
            cache.update(0, keys, vectors_of(keys, self.dim, self.version))
        self.model.update({key: self.version for key in keys.tolist() if key in self.model})

    @rule(keys=CHOICES)
    def erase(self, keys: KeyArray) -> None:
        for cache in self.caches:
            cache.erase(0, keys)
        for key in keys.tolist():
            self.model.pop(key, None)

    @invariant()
    def dumps_and_statistics_agree(self) -> None:
        for cache in getattr(self, "caches", []):
            assert set(cache.dump(0).tolist()) == set(self.model)
            stats = cache.stats(0)
            assert stats.resident_rows == len(self.model)
            assert stats.evictions == 0
            assert cache.dump(1).size == 0


def test_the_two_caches_agree_on_any_sequence_of_operations():
    run_state_machine_as_test(
        TwoCaches,
        settings=settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)),
    )
