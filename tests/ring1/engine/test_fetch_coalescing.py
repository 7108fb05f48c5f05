import threading

import numpy as np
import pytest

from hps.engine.coalescing import FetchCoalescer
from hps.engine.fences import TableFence
from hps.errors import DatabaseError
from hps.statistics.metrics import Metrics
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec

TABLE = TableSpec("model", "table", 2, 0.0, 1000)


class Source:
    """A fetch that can be held at a gate, fails on command, and remembers what was asked."""

    def __init__(self):
        self.asked = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.fail_next = 0
        self.version = 0

    def fetch(self, table, keys, out, found, landed=None):
        self.asked.append(keys[~found].tolist())
        version, fail = self.version, self.fail_next > 0
        self.fail_next -= fail
        self.entered.release()
        assert self.gate.wait(PATIENCE_S)
        if fail:
            raise DatabaseError("told to fail")
        present = (keys % 2 == 0) & ~found
        out[present] = (keys[present] + version)[:, None]
        found[present] = True
        return int(present.sum())


class Lookup(threading.Thread):
    def __init__(self, coalescer, fence, keys):
        super().__init__(daemon=True)
        self.arguments = coalescer, fence, np.asarray(keys, np.int64)
        self.error = None
        self.start()

    def run(self):
        coalescer, fence, keys = self.arguments
        self.out = np.full((keys.size, 2), -1, np.float32)
        self.found = np.zeros(keys.size, np.bool_)
        try:
            coalescer.fetch(TABLE, fence, keys, self.out, self.found)
        except DatabaseError as error:
            self.error = error

    def check(self, version=0):
        self.join(PATIENCE_S)
        assert not self.is_alive()
        assert self.error is None
        keys = self.arguments[2]
        np.testing.assert_array_equal(self.found, keys % 2 == 0)
        np.testing.assert_array_equal(self.out[self.found], np.repeat((keys[self.found] + version)[:, None], 2, 1))
        np.testing.assert_array_equal(self.out[~self.found], -1)


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def coalescer(source):
    return FetchCoalescer(source.fetch, Metrics(), timeout_s=2 * PATIENCE_S)


def begin(source, coalescer, fence, keys):
    """A lookup whose fetch has come to the source's gate."""
    lookup = Lookup(coalescer, fence, keys)
    assert source.entered.acquire(timeout=PATIENCE_S)
    return lookup


def join(coalescer, fence, keys):
    """A lookup that waits for the first fetch."""
    lookup = Lookup(coalescer, fence, keys)
    wait_until(lambda: coalescer._flights[TABLE.tag][0].landed, "it waits for the first")
    return lookup


def test_lookup_whose_keys_are_all_under_way_fetches_nothing(source, coalescer):
    fence = TableFence()
    lookups = [begin(source, coalescer, fence, [2, 3, 4]), join(coalescer, fence, [2, 4])]
    source.gate.set()
    for lookup in lookups:
        lookup.check()
    assert source.asked == [[2, 3, 4]]
    assert coalescer._joined.labels(TABLE.model_name, TABLE.table_name).value == 2


def test_lookup_fetches_for_itself_when_the_one_it_joined_fails(source, coalescer):
    fence, source.fail_next = TableFence(), 1
    first, second = begin(source, coalescer, fence, [2, 4]), join(coalescer, fence, [4])
    source.gate.set()
    second.check()
    first.join(PATIENCE_S)
    assert first.error is not None
    assert source.asked == [[2, 4], [4]]
    assert not coalescer._flights


def test_lookup_waits_for_another_no_longer_than_its_timeout_and_then_fetches_for_itself(source):
    coalescer, fence = FetchCoalescer(source.fetch, Metrics(), timeout_s=0.01), TableFence()
    lookups = [begin(source, coalescer, fence, keys) for keys in ([2, 4], [4])]  # although the first has not ended
    source.gate.set()
    for lookup in lookups:
        lookup.check()
    assert source.asked == [[2, 4], [4]]


def test_fetch_that_began_before_a_modification_is_not_joined(source, coalescer):
    fence = TableFence()
    first = begin(source, coalescer, fence, [2])
    with fence.modifying(1):
        source.version = 100
    second = begin(source, coalescer, fence, [2])
    source.gate.set()
    first.check()
    second.check(version=100)


@pytest.mark.parametrize(
    ("lookups", "asked"),
    [
        *[([[1, 2, 3, 4]], [[1, 2, 3, 4]]), ([[2, 4, 5], [0, 4, 5, 6]], [[2, 4, 5], [0, 6]])],
        ([[5, 2, 4], [6, 5, 0, 4]], [[5, 2, 4], [6, 0]]),
        ([list(range(0, 3000, 2)), list(range(3000, 0, -3))], [list(range(0, 3000, 2)), [3000, *range(2997, 0, -6)]]),
        ([[2, 4, 6], [4, 6, 8], [0, 2, 8, 10]], [[2, 4, 6], [8], [0, 10]]),
    ],
)
def test_key_missing_in_several_lookups_is_fetched_once(source, coalescer, lookups, asked):
    fence = TableFence()
    running = [begin(source, coalescer, fence, keys) for keys in lookups]
    source.gate.set()
    for lookup in running:
        lookup.check()
    assert source.asked == asked


def test_lookup_gets_what_was_fetched_although_the_fetching_one_uses_its_buffer_again():
    gates = {key: threading.Event() for key in (2, 4)}
    entered = threading.Semaphore(0)

    def fetch(table, keys, out, found, landed):
        entered.release()
        assert gates[int(keys[0])].wait(PATIENCE_S)
        out[:] = keys[:, None]
        found[:] = True
        return keys.size

    coalescer, fence = FetchCoalescer(fetch, Metrics(), timeout_s=2 * PATIENCE_S), TableFence()
    slow = Lookup(coalescer, fence, [2])
    assert entered.acquire(timeout=PATIENCE_S)
    quick = Lookup(coalescer, fence, [4])
    assert entered.acquire(timeout=PATIENCE_S)
    third = Lookup(coalescer, fence, [2, 4])  # waits for key 2 first, and only then looks at key 4
    wait_until(lambda: all(flight.landed for flight in coalescer._flights[TABLE.tag]), "the third waits for both")
    gates[4].set()
    quick.check()
    quick.out[:], quick.found[:] = -7, False
    gates[2].set()
    slow.check()
    third.check()
