"""The NumPy embedding cache: the contract, and what is its own."""

import numpy as np

from hps.cache.base import EmbeddingCache
from hps.cache.numpy_cache import NumpyCache
from tests.contracts.cache_contract import CacheContract


class TestNumpyCache(CacheContract):
    cache_class = NumpyCache

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

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
