"""Lookups over the link beside threads that insert, update, delete, evict, grow and drop: no answer is wrong.

All answers are checked on the device; the counts are printed. A vector holds its key's low bits, its key's high bits, and the
operation that wrote it, over and over. Each writer numbers its operations, which follow one another: *steady* keys are written
by every one, *churning* keys by the odd ones, and deleted by the even ones. So the writes that were acknowledged when a lookup
began, and the operations that had begun when it ended, say what it may answer.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hps.tensors.batch import Batch
from hps.testing.caches import DEFAULT, distinct_keys
from hps.types import FloatArray, KeyArray
from tests.gpu.cupy_if_installed import cupy
from tests.gpu.linked_tables import LinkedTables, homes_of

pytestmark = pytest.mark.gpu

SECONDS = float(os.environ.get("HPS_STRESS_SECONDS", "4"))
WRITERS = 2
_PAUSE_S = 0.003
"""Between two writes, so that lookups may admit what they read."""
SMALL, LARGE = 1000, 40_000
"""Keys of lookups that probe the map in the kernel of the query, though all miss, and of those that order misses first."""
FAULTS = ("torn or another's", "stale or from the future", "lost", "invented", "not the default")
Lookup = Callable[[Any, Any, Any], None]
"""lookup(keys, out, found) of CuPy's arrays; it may return before the device is done."""


@pytest.fixture(autouse=True, params=[False, True], ids=["", "index"])
def index(request, monkeypatch):
    """Every test is made with the index of the map in host memory, and on the device."""
    monkeypatch.setattr(LinkedTables, "index", request.param)
    return request.param


def vectors_of(keys: KeyArray, dim: int, operation: int) -> FloatArray:
    columns = np.arange(dim) % 3
    low, high = (keys & 0xFFFFF)[:, None], ((keys >> 20) & 0xFFFFF)[:, None]
    return np.where(columns == 0, low, np.where(columns == 1, high, operation)).astype(np.float32)


class Population:
    """Keys of writers, some of each churning, and a fifth that nobody ever writes; and what may be answered for them."""

    def __init__(self, keys: KeyArray, *, evicts: bool = False, churning: int = 3, dense: int = 0) -> None:
        """Choose what becomes of keys: of those that are written, one in `churning` churns; 0 to `dense` - 1 are written."""
        self.keys, self.never = np.split(np.random.default_rng(7).permutation(keys), [keys.size * 4 // 5])
        if dense:
            self.keys, self.never = np.random.default_rng(7).permutation(dense), np.append(self.never, [-1, dense, 1 << 32])
        self.evicts = evicts
        self.begun, self.complete = np.zeros(WRITERS, np.int64), np.zeros(WRITERS, np.int64)
        owner = np.arange(self.keys.size) % WRITERS
        churns = np.arange(self.keys.size) % churning == 0
        self.steady = [np.flatnonzero((owner == writer) & ~churns) for writer in range(WRITERS)]  # places in `keys`
        self.acknowledged = np.zeros(self.keys.size + self.never.size, np.int64)  # by place, the last operation on the key
        self.churning = [self.keys[(owner == writer) & churns] for writer in range(WRITERS)]
        self._all = cupy.asarray(np.concatenate([self.keys, self.never]))
        self._owner = cupy.asarray(np.concatenate([owner, np.full(self.never.size, -1)]))
        self._churns = cupy.asarray(np.concatenate([churns, np.zeros(self.never.size, np.bool_)]))

    def draw(self, n: int, random: Any) -> Any:
        """Places of n keys, the first ones far more often than the last."""
        return (random.random(n) ** 4 * self._all.size).astype(cupy.int64)

    def keys_at(self, places: Any) -> Any:
        return self._all[places]

    def judge(
        self, places: Any, out: Any, found: Any, acknowledged: np.ndarray, complete: np.ndarray, begun: np.ndarray
    ) -> Any:
        """How many answers have each of the FAULTS."""
        keys, owner = self._all[places], self._owner[places]
        oldest = cupy.where(owner < 0, 0, cupy.maximum(cupy.asarray(complete)[owner], cupy.asarray(acknowledged)[places]))
        newest = cupy.where(owner < 0, -1, cupy.asarray(begun)[owner])
        columns = cupy.arange(out.shape[1]) % 3
        operation = out[:, min(2, out.shape[1] - 1)]
        encoded = cupy.where(columns == 0, (keys & 0xFFFFF)[:, None], ((keys >> 20) & 0xFFFFF)[:, None])
        whole = cupy.where(columns == 2, operation[:, None], encoded.astype(cupy.float32)) == out
        if self.evicts:
            may_be_absent = cupy.ones_like(found)
        else:
            may_be_absent = (owner < 0) | (oldest == 0) | (self._churns[places] & ((oldest % 2 == 0) | (newest > oldest)))
        return cupy.stack(
            [
                (found & ~whole.all(1)).sum(),
                (found & (owner >= 0) & ((operation < oldest) | (operation > newest))).sum(),
                (~found & ~may_be_absent).sum(),
                (found & (owner < 0)).sum(),
                (~found & (out != DEFAULT).any(1)).sum(),
            ]
        )


def stress(
    population: Population,
    dim: int,
    make_lookup: Callable[[int], Lookup],
    write: Callable[[KeyArray, FloatArray], None],
    delete: Callable[[KeyArray], None],
    *,
    also: Callable[[threading.Event], None] = threading.Event.wait,
    enough: Callable[[], bool] = lambda: True,
    readers: int = 4,
) -> str:
    """Read and write for a while, check all that is read, and say how much that was.

    Args:
        make_lookup: the lookup of a reader, by its number; called on the thread and the stream that use it.
        also: runs beside them until the event is set.
        enough: whether what was to happen meanwhile has happened.
    """
    done, checked = threading.Event(), [0] * readers

    def operate(writer: int) -> int:
        pick, operation = np.random.default_rng(writer), 0
        try:
            while not done.is_set():
                operation += 1
                population.begun[writer] = operation
                for places in np.array_split(pick.permutation(population.steady[writer]), 8):
                    part = population.keys[places]
                    write(part, vectors_of(part, dim, operation))
                    population.acknowledged[places] = operation
                    done.wait(_PAUSE_S)
                for part in np.array_split(pick.permutation(population.churning[writer]), 4):
                    if operation % 2:
                        write(part, vectors_of(part, dim, operation))
                    else:
                        delete(part)
                    done.wait(_PAUSE_S)
                population.complete[writer] = operation
        finally:
            done.set()
        return operation

    def read(reader: int) -> Any:
        n, faults = (SMALL, LARGE)[reader % 2], np.zeros(len(FAULTS), np.int64)
        stream = cupy.cuda.Stream(non_blocking=True)
        try:
            with stream:
                lookup, random = make_lookup(reader), cupy.random.default_rng(reader)
                while not done.is_set():
                    places = population.draw(n, random)
                    keys = population.keys_at(places)
                    out, found = cupy.full((n, dim), cupy.nan, cupy.float32), cupy.zeros(n, cupy.bool_)
                    stream.synchronize()
                    acknowledged, complete = population.acknowledged.copy(), population.complete.copy()
                    lookup(keys, out, found)
                    stream.synchronize()
                    begun = population.begun.copy()
                    faults += cupy.asnumpy(population.judge(places, out, found, acknowledged, complete, begun))
                    checked[reader] += int(found.sum())
        finally:
            done.set()
        return faults

    places = population.draw(8, cupy.random.default_rng(0))  # compile what judges before the time runs
    nothing = cupy.zeros((8, dim), cupy.float32), cupy.zeros(8, cupy.bool_)
    population.judge(places, *nothing, population.acknowledged, population.complete, population.begun)
    with ThreadPoolExecutor(WRITERS + readers + 1) as pool:
        writing = [pool.submit(operate, writer) for writer in range(WRITERS)]
        reading = [pool.submit(read, reader) for reader in range(readers)]
        beside = pool.submit(also, done)
        patience = time.monotonic() + 90  # a slow machine needs longer until there is something to confuse
        done.wait(SECONDS)
        while (population.complete.min() < 3 or sum(checked) <= 20_000 or not enough()) and time.monotonic() < patience:
            if done.wait(0.05):
                break
        done.set()
        operations = [writer.result(timeout=60) for writer in writing]
        faults = sum(reader.result(timeout=60) for reader in reading)
        beside.result(timeout=60)
    said = dict(zip(FAULTS, faults.tolist(), strict=True))
    assert not faults.any(), f"of {sum(checked)} vectors: {said}"
    assert sum(checked) > 20_000
    assert min(operations) >= 3
    return f"{sum(checked) / 1e6:.1f} M vectors checked, {operations} operations written"


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")


def link_lookups(tables: LinkedTables) -> Callable[[int], Lookup]:
    """Readers 0 and 1 wait and let the host answer what is left; of 2 and 3, every other lookup is only enqueued."""

    def make(reader: int) -> Lookup:
        lookup, calls = tables.cache.create_lookup(), 0

        def look_up(keys: Any, out: Any, found: Any) -> None:
            nonlocal calls
            calls += 1
            batch = Batch.of(0, keys, out, found)
            if reader >= 2 and calls % 2:
                before = tables.cache.stream_ordered_counts(0).unread
                lookup.enqueue(batch)
                cupy.cuda.get_current_stream().synchronize()
                after = tables.cache.stream_ordered_counts(0).unread
                if after == before:  # else some have the default, though they may be there
                    return
            tables.finish_on_host(lookup, lookup.query(batch))

        return look_up

    return make


@pytest.mark.parametrize(
    ("dim", "capacity", "options"),
    [
        (3, 0, {}),
        (32, 28, {}),
        (32, 3000, {"initial_buckets": 4096}),
        (128, 5000, {}),
        (300, 500, {}),
        (32, 3000, {"overflow_margin": 2500, "num_partitions": 8}),
        (3, 0, {"dense": 24_000}),
        (32, 3000, {"dense": 24_000}),
        (32, 0, {"dense": 24_000, "churning": 400}),
        (128, 5000, {"dense": 24_000, "churning": 400}),
        (300, 500, {"dense": 24_000, "churning": 400}),
    ],
)
def test_no_vector_is_wrong_beside_writers_of_the_map(dim, capacity, options, capsys):
    """Of a dense table, where few keys churn most stripes have no holes."""
    options = dict(options)
    churning, dense = options.pop("churning", 3), options.get("dense", 0)
    population = Population(distinct_keys(30_000), evicts="overflow_margin" in options, churning=churning, dense=dense)
    with LinkedTables([dim], capacity, **options) as tables:

        def grow(done: threading.Event) -> None:
            """Rows that nobody asks for, so that buckets are replaced, and places of deleted rows are taken."""
            others = np.setdiff1d(distinct_keys(40_000, seed=50), np.concatenate([population.keys, population.never]))
            for times in range(10):
                for part in np.array_split(others + (times << 8), 40):
                    if done.wait(0.005):
                        return
                    fresh = np.setdiff1d(part, np.concatenate([population.keys, population.never]))
                    tables.write(fresh, vectors_of(fresh, dim, 1))

        cache = tables.cache
        full: Callable[[], bool] = lambda: capacity == 0 or cache.stats(0).inserts > capacity  # noqa: E731
        said = stress(population, dim, link_lookups(tables), tables.write, tables.delete, also=grow, enough=full)
        stats, unread = cache.stats(0), cache.stream_ordered_counts(0).unread
        resident = cache.dump(0)
        assert stats.resident_rows == resident.size == np.unique(resident).size
        assert capacity == 0 or stats.inserts > capacity
        rows = tables.database.size(tables.specs[0].tag)
    say(capsys, f"dim {dim}, {capacity} rows cached of {rows}, {options}: {said}, {stats.inserts} admitted, {unread} unread")


def test_no_vector_is_wrong_where_many_keys_crowd_a_few_buckets(capsys):
    candidates = distinct_keys(2_000_000, seed=3)
    crowd = candidates[homes_of(candidates, 4000) // 5 == 123][:2500]
    population = Population(crowd)
    with LinkedTables([32], 280) as tables:
        tables.database.reserve(tables.specs[0].tag, 30_000)
        said = stress(population, 32, link_lookups(tables), tables.write, tables.delete)
    say(capsys, f"{crowd.size} keys of neighbouring buckets: {said}")


@pytest.mark.parametrize("dense", [0, 16_000])
def test_no_vector_is_wrong_while_the_table_is_dropped_and_made_anew(dense, capsys):
    """What a lookup finds is what stood there at some moment of it; what is gone is nobody else's."""
    dim, keys = 64, distinct_keys(20_000)
    drops = 0
    population = Population(keys, dense=dense)
    for writer in range(WRITERS):
        population.churning[writer] = np.concatenate([population.churning[writer], population.keys[population.steady[writer]]])
        population.steady[writer] = population.steady[writer][:0]
    population.evicts = True  # of a dropped table everything may be gone
    one = threading.Lock()
    with LinkedTables([dim], 2000, dense=dense) as tables:
        tag = tables.specs[0].tag

        def write(part: KeyArray, vectors: FloatArray) -> None:
            with one:
                tables.write(part, vectors)

        def delete(_part: KeyArray) -> None:
            nonlocal drops
            with one, tables.cache.changing(0):
                tables.database.drop_table(tag)
                tables.cache.erase(0, tables.cache.dump(0))
                tables.cache.detach(0)
                tables.database.open_table(tag, dim)
                tables.database.reserve(tag, dense, [np.arange(dense)])
                tables.attach()
                drops += 1

        def make(_reader: int) -> Lookup:
            lookup = tables.cache.create_lookup()

            def look_up(keys: Any, out: Any, found: Any) -> None:
                tables.finish_on_host(lookup, lookup.query(Batch.of(0, keys, out, found)))

            return look_up

        said = stress(population, dim, make, write, delete)
    say(capsys, f"{drops} drops of {dense} dense keys: {said}")
