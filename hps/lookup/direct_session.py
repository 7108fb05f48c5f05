"""Lookups of a model that has no embedding cache: straight from the databases into the caller's host memory."""

import time
from collections.abc import Sequence

import numpy as np

from hps.cache.base import Segment
from hps.lookup.chain import DatabaseChain
from hps.lookup.key_limits import refuse_too_many_keys
from hps.metrics import Metrics
from hps.types import TableSpec


class DirectSession:
    """Answers lookups from the databases, then the default vector. *Thread-safe.* Keys and outputs are in host memory.

    Keys are not made unique first: the databases answer duplicates, and the vectors land where they are wanted.

    Args:
        tables: the model's tables, in the order of their ids.
        chain: the host tiers.
    """

    def __init__(self, tables: Sequence[TableSpec], chain: DatabaseChain, metrics: Metrics) -> None:
        self.tables = tuple(tables)
        self.cache = None
        self._chain = chain
        self._metrics = metrics
        self._max_keys = [table.max_keys for table in self.tables]
        self._counters = [metrics.table(table.model_name, table.table_name) for table in self.tables]
        self._seconds = metrics.lookup_seconds.labels(self.tables[0].model_name)

    def lookup(self, segments: Sequence[Segment]) -> None:
        """Write the vector of every key to its row of `out`, and `found` where asked.

        Raises:
            TooManyKeysError: a segment has more keys than the table's `max_keys`.
            DatabaseError: keys are missing and the authoritative database did not answer; `out` is then unspecified.
        """
        start = time.perf_counter()
        refuse_too_many_keys(self.tables, self._max_keys, segments)
        for segment in segments:
            table = self.tables[segment.table]
            found = np.zeros(segment.n, np.bool_) if segment.found is None else segment.found
            found[...] = False
            absent = found.size - self._chain.fetch(table, segment.keys, segment.out, found)
            if absent:
                segment.out[~found] = table.default_value
            with self._metrics.lock:
                counters = self._counters[segment.table]
                counters.keys += found.size
                counters.defaults += absent
        self._seconds.observe(time.perf_counter() - start)

    def drain(self, timeout_s: float) -> bool:
        """Nothing runs in the background."""
        return True

    def close(self) -> None:
        """Nothing to release."""
