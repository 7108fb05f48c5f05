"""Which lookups that wait for nothing find a workspace that has room for them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hps.cache.base import LookupGraph, StreamOrdered, StreamOrderedCounts
from hps.cache.cpu.cache import NumpyCache, NumpyLookup
from hps.engine.stream_ordered import StreamOrderedLookups
from hps.errors import DatabaseError, DeviceError, NotReadyError
from hps.statistics.metrics import Metrics
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch
from hps.types import TableSpec


class DeviceLookup(NumpyLookup):
    """A lookup on the CPU that says how often it was prepared and enqueued."""

    prepared = enqueued = 0

    def prepare(self, batch: Batch) -> None:
        self.prepared += 1

    def enqueue(self, batch: Batch, captured: bool = False) -> None:
        self.enqueued += 1


class DeviceCache(NumpyCache, StreamOrdered):
    def create_lookup(self) -> DeviceLookup:
        self.last = DeviceLookup(self)
        return self.last

    def stream_ordered_counts(self, table: int) -> StreamOrderedCounts:
        return StreamOrderedCounts(0, 0, 0, 0)

    def capture_of(self, batch: Batch) -> None:
        return None

    def record(self, batch: Batch, enqueue: Callable[[Batch], None]) -> LookupGraph:
        raise NotImplementedError


def bags_of(lengths: Sequence[int], hotness: int = 4, weighted: bool = False) -> Batch:
    """A batch of all tables, with so many bags of `hotness` keys."""
    batches = []
    for table, count in enumerate(lengths):
        n = count * hotness
        weights = np.ones(n, np.float32) if weighted else None
        pooling = Pooling(count, None, hotness, weights, Combiner.SUM, 0.0, None)
        batches.append(Batch.of(table, np.zeros(n, np.int64), np.empty((count, 8), np.float32), None, n, pooling))
    return Batch.merged(batches)


def opened() -> tuple[DeviceCache, StreamOrderedLookups]:
    """A cache of two tables, and its lookups, of which one has run."""
    tables = [TableSpec("m", name, 8, 0.0, 1 << 20) for name in "ab"]
    cache = DeviceCache.create(tables, [100, 100], 0)
    lookups = StreamOrderedLookups(tables, cache, {}, Metrics())
    lookups.enqueue(bags_of([8, 8]), lambda: DeviceLookup(cache), lambda lookup: None)
    return cache, lookups


@pytest.mark.parametrize(
    ("asked", "has_room"),
    [
        *[(bags_of([8, 8]), True), (bags_of([3, 5]), True), (bags_of([9, 7]), True), (bags_of([9, 8]), False)],
        *[(bags_of([16, 16], hotness=1), False), (bags_of([8, 8], weighted=True), False), (bags_of([8]), False)],
        (Batch((0, 1), (4, 4), [np.zeros(4, np.int64)] * 2, [np.empty((4, 8), np.float32)] * 2), False),
    ],
)
def test_a_workspace_is_prepared_once_for_all_lookups_that_are_no_larger(asked: Batch, has_room: bool) -> None:
    cache, lookups = opened()
    assert cache.last.prepared == 1
    taken: list[DeviceLookup] = []

    def take() -> DeviceLookup:
        taken.append(DeviceLookup(cache))
        return taken[-1]

    lookups.enqueue(asked, take, lambda lookup: None)
    assert (cache.last.prepared, len(taken)) == ((1, 1) if has_room else (2, 0))


def test_closed_lookups_are_refused_also_after_their_device_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise DeviceError("reading counters: an illegal memory access was encountered")

    for lost in (False, True):
        cache, lookups = opened()
        if lost:
            monkeypatch.setattr(DeviceCache, "stream_ordered_counts", fail)
        for _ in range(2):
            assert lookups.close()
            with pytest.raises(NotReadyError, match="was undeployed"):
                lookups.enqueue(bags_of([9, 9]), cache.create_lookup, lambda lookup: None)
        lookups.settle()  # nothing is asked of the device any more


def test_misses_of_graphs_that_were_captured_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    _cache, lookups = opened()
    missed = [0, 0]
    monkeypatch.setattr(DeviceCache, "stream_ordered_counts", lambda _, table: StreamOrderedCounts(missed[table], 0, 0, 0))
    counters = lookups._counters[0]
    missed[:] = [500, 500]
    lookups.forget()
    missed[0] += 3
    lookups.settle()
    assert (counters.hits[0], counters.misses[0]) == (8 * 4 - 3, 3)


def test_what_was_not_read_before_a_graph_was_captured_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _cache, lookups = opened()
    monkeypatch.setattr(DeviceCache, "stream_ordered_counts", lambda *_: StreamOrderedCounts(2, 0, 0, 2))
    lookups.forget()
    with pytest.raises(DatabaseError, match="could not read 2 keys"):
        lookups.check(bags_of([1, 1]))
