import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache, NumpyLookup
from hps.engine.chain import DatabaseChain
from hps.engine.circuit_breaker import CircuitBreaker
from hps.engine.coalescing import FetchCoalescer
from hps.engine.session import CachedSession, DirectSession, SessionSettings
from hps.errors import DatabaseError, DeviceError, NotReadyError, TooManyKeysError, WorkspaceTimeoutError
from hps.statistics.metrics import Metrics
from hps.statistics.tracing import traced
from hps.tensors.batch import Batch
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec
from tests.fakes.faulty_database import FaultyDatabase, fetched_keys
from tests.fakes.memory_database import MemoryDatabase

TABLES = (TableSpec("model", "a", 3, -1.0, 100), TableSpec("model", "b", 8, 0.5, 50))


def vectors_of(keys, dim, version=0):
    keys = np.asarray(keys, np.int64)
    return (keys[:, None] * 64 + np.arange(dim) + 1000 * version).astype(np.float32)


class Served:
    """A session over a persistent database that can be made to fail, holding keys 0..39 of both tables."""

    def __init__(self, capacity=1000, rows_worth_a_thread=None, **settings):
        self.database, self.metrics = FaultyDatabase(MemoryDatabase()), Metrics()
        if rows_worth_a_thread:
            self.database.rows_worth_a_thread = rows_worth_a_thread
        breaker = lambda: CircuitBreaker(failures=10**9)  # noqa: E731
        self.chain = DatabaseChain(None, self.database, metrics=self.metrics, breaker=breaker, modification_timeout_s=60)
        for table in TABLES:
            self.chain.open_table(table)
            keys = np.arange(40)
            self.database.inner.insert(table.tag, keys, vectors_of(keys, table.dim))
        self.coalescer = FetchCoalescer(self.chain.fetch, self.metrics)
        settings = SessionSettings(**{"hit_rate_threshold": 1.1, "workspace_timeout_s": PATIENCE_S, **settings})
        self.cache = NumpyCache.create(TABLES, [capacity, capacity], 0)
        self.session = CachedSession(TABLES, self.cache, self.chain, self.coalescer, settings, self.metrics)

    def lookup(self, requests, session=None):
        batches = []
        for table, keys in requests.items():
            keys = np.asarray(keys, np.int64)
            out = np.full((keys.size, TABLES[table].dim), np.nan, np.float32)
            batches.append(Batch.of(table, keys, out, np.zeros(keys.size, np.bool_)))
        (session or self.session).run(Batch.merged(batches))
        return batches

    @contextmanager
    def looking_up(self, requests, gate="gate", error=None):
        """A lookup whose fetch waits at a gate, before it or after it has read, until the block ends."""
        setattr(self.database, gate, threading.Event())
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.lookup, requests)
            assert self.database.entered.acquire(timeout=PATIENCE_S)
            try:
                yield answer
            finally:
                getattr(self.database, gate).set()
            assert type(answer.exception(PATIENCE_S)) is (error or type(None))

    def check(self, batches, version=0):
        for batch in batches:
            table, present = TABLES[batch.tables[0]], (batch.keys[0] >= 0) & (batch.keys[0] < 40)
            np.testing.assert_array_equal(batch.founds[0], present)
            np.testing.assert_array_equal(batch.outs[0][present], vectors_of(batch.keys[0][present], table.dim, version))
            np.testing.assert_array_equal(batch.outs[0][~present], np.float32(table.default_value))


@pytest.fixture
def serve():
    served = []

    def start(**settings):
        served.append(Served(**settings))
        return served[-1]

    yield start
    for each in served:
        for gate in (each.database.gate, each.database.gate_late):
            if gate:
                gate.set()
        each.session.close(1)
        each.chain.close()


def test_missing_keys_are_fetched_once_and_every_key_is_counted(serve):
    served = serve()
    keys = [5, 99, 5, 0, -1, 39]
    served.check(served.lookup({1: keys, 0: keys}))
    assert sorted(fetched_keys(served.database).tolist()) == sorted([5, 99, 0, -1, 39] * 2)
    served.database.failing = {"fetch"}
    served.check(served.lookup({0: [39, 5, 0]}))
    counters = served.metrics.table("model", "a")
    assert (counters.keys, counters.hits, counters.misses, counters.defaults) == (9, [3, 0, 3], [6, 0, 2], 2)


def test_more_keys_than_configured_are_refused_before_anything_is_asked(serve):
    served = serve()
    with pytest.raises(TooManyKeysError, match=r"table 'b' of model 'model': got 51 keys, expected at most 50"):
        served.lookup({0: [1], 1: np.zeros(51)})
    assert served.database.fetched == []
    served.check(served.lookup({0: [1], 1: np.zeros(50)}))


def test_at_the_threshold_of_a_table_missing_keys_get_defaults_now_and_vectors_later(serve):
    served = serve(hit_rate_threshold=0.5)
    served.check(served.lookup({0: [1], 1: [1]}))
    a, b = served.lookup({0: [1, 1, 2, 3], 1: [1, 2, 3]})
    assert a.founds[0].tolist() == [True, True, False, False]
    np.testing.assert_array_equal(a.outs[0][2:], np.float32(-1))
    served.check([b])  # below the threshold
    assert served.metrics.table("model", "a").deferred == 2
    assert served.session.drain(PATIENCE_S)
    served.database.failing = {"fetch"}
    served.check(served.lookup({0: [1, 2, 3]}))


def test_key_that_waits_for_insertion_is_not_queued_again(serve):
    served = serve(hit_rate_threshold=0.0)
    served.database.gate = threading.Event()
    for _ in range(5):
        served.lookup({0: [1, 2]})
    served.database.gate.set()
    assert served.session.drain(PATIENCE_S)
    assert fetched_keys(served.database).tolist() == [1, 2]
    served.check(served.lookup({0: [1, 2]}))


def test_full_queue_drops_batches_and_the_keys_are_fetched_another_time(serve):
    served = serve(hit_rate_threshold=0.0, insert_queue_length=1)
    served.database.gate = threading.Event()
    served.lookup({0: [1]})
    assert served.database.entered.acquire(timeout=PATIENCE_S)  # key 1 is being fetched, the queue is empty
    for key in (2, 3, 4):
        served.lookup({0: [key]})
    served.database.gate.set()
    for resident in ([1, 2], [1, 2, 3]):
        assert served.session.drain(PATIENCE_S)
        assert sorted(served.cache.dump(0).tolist()) == resident
        served.lookup({0: [3]})


def test_failed_database_is_an_error_now_or_counted_later_and_can_be_tried_again(serve):
    for threshold in (1.1, 0.0):
        served = serve(hit_rate_threshold=threshold, workspaces=1)
        served.database.failing = {"fetch"}
        for tries in range(1, 4):
            with pytest.raises(DatabaseError) if threshold else nullcontext():
                served.lookup({0: [1]})
            assert served.session.drain(PATIENCE_S)
            assert served.metrics.background_errors.labels("insertion").value == (0 if threshold else tries)
        served.database.failing = set()
        served.lookup({0: [1]})
        assert served.session.drain(PATIENCE_S)
        served.check(served.lookup({0: [1]}))


def test_busy_workspaces_end_in_a_typed_error_after_the_timeout(serve):
    served = serve(workspaces=1, workspace_timeout_s=0.05)
    with served.looking_up({0: [1]}), pytest.raises(WorkspaceTimeoutError, match="num_of_worker_buffer_in_pool"):
        served.lookup({0: [2]})
    served.check(served.lookup({0: [2]}))


@pytest.fixture
def lost(serve, monkeypatch):
    """A session whose device is lost."""

    def fail(*_):
        raise DeviceError("an illegal memory access")

    monkeypatch.setattr(NumpyLookup, "query", fail)
    monkeypatch.setattr(NumpyCache, "failure", "an illegal memory access")
    return serve(databases_complete=True)


def test_lookups_without_their_device_are_timed_from_their_beginning(lost):
    began_ns = time.perf_counter_ns() - 10**12
    lost.session.run(Batch.of(0, np.arange(3), np.empty((3, 3), np.float32)), began_ns)
    assert lost.metrics.lookup_times("model").total.total_ns >= 10**12


def test_the_loss_of_a_device_is_notified_once(lost):
    notified = []
    lost.session.on_loss.append(lambda: notified.append(lost.session.lost))
    for _ in range(2):
        lost.session.run(Batch.of(0, np.arange(3), np.empty((3, 3), np.float32)))
    assert notified == [True]


def test_closing_waits_for_lookups_that_go_on_without_a_lost_device(lost):
    with lost.looking_up({0: [1]}):
        assert not lost.session.close(0.05)
    assert lost.session.close(PATIENCE_S)


@pytest.mark.parametrize("threshold", [1.1, 0.0], ids=["lookup", "background"])
def test_vector_that_was_read_before_an_update_does_not_become_resident(serve, threshold):
    served, key, new = serve(hit_rate_threshold=threshold), np.array([1]), vectors_of([1], 3, version=1)
    with served.looking_up({0: [1]}, "gate_late"):
        served.chain.insert(TABLES[0], key, new, lambda written: served.cache.update(0, key, new))
    assert served.session.drain(PATIENCE_S)
    assert not served.cache.dump(0).size


def test_queued_insertions_end_before_the_cache_closes(serve, monkeypatch):
    served = serve(hit_rate_threshold=0.0)
    served.database.gate = threading.Event()
    closed, resident = threading.Event(), []

    def close_cache():
        monkeypatch.undo()
        resident.extend(served.cache.dump(0).tolist())
        closed.set()
        served.cache.close()

    monkeypatch.setattr(served.cache, "close", close_cache)
    served.lookup({0: [1, 2]})
    assert served.database.entered.acquire(timeout=PATIENCE_S)
    closing = threading.Thread(target=served.session.close, args=(10,))
    closing.start()
    wait_until(lambda: closed.is_set() or served.session._inserts.stop.is_set(), "the queue is being closed")
    assert not closed.is_set()
    served.database.gate.set()
    closing.join(PATIENCE_S)
    assert closed.is_set()
    assert resident == [1, 2]
    with pytest.raises(NotReadyError):
        served.lookup({0: [1]})


def test_two_sessions_fetch_a_key_that_both_miss_once(serve):
    served = serve()
    settings, cache = SessionSettings(hit_rate_threshold=1.1), NumpyCache.create(TABLES, [100, 100], 1)
    other = CachedSession(TABLES, cache, served.chain, served.coalescer, settings, served.metrics)
    served.database.gate = threading.Event()

    def lookup(keys, session):
        with traced() as trace:
            return served.lookup({0: keys}, session), trace.tables["a"]

    with ThreadPoolExecutor(2) as pool:
        answers = []
        for keys, session in (([1, 2], served.session), ([2, 3, 2], other)):
            answers.append(pool.submit(lookup, keys, session))
            assert served.database.entered.acquire(timeout=PATIENCE_S)
        served.database.gate.set()
        for answer in answers:
            looked_up, counted = answer.result(PATIENCE_S)
            served.check(looked_up)
            assert counted.keys == counted.persistent_db  # whoever fetched them
    assert sorted(fetched_keys(served.database).tolist()) == [1, 2, 3]
    assert served.metrics.registry.get_sample_value("hps_coalesced_keys_total", {"model": "model", "table": "a"}) == 1
    other.close(10)


def test_lookup_without_a_cache_asks_for_every_key_whatever_the_mask_held(serve):
    served = serve()
    batch = Batch.of(1, np.array([5, 99, 5, -1, 39]), np.full((5, 8), np.nan, np.float32), np.ones(5, np.bool_))
    DirectSession(TABLES, served.chain, served.metrics).run(batch)
    served.check([batch])
    assert served.metrics.table("model", "b").keys == 5


@pytest.mark.parametrize("kind", ["now", "later", "direct"])
def test_keys_that_no_tier_has_are_counted_as_defaults_as_often_as_they_are_asked_for(serve, kind):
    served = serve(hit_rate_threshold=0.0 if kind == "later" else 1.1)
    session = DirectSession(TABLES, served.chain, served.metrics) if kind == "direct" else served.session
    a, b = (served.metrics.table("model", name) for name in ("a", "b"))
    for _ in range(2):
        served.lookup({0: [1, 98, 99, 98], 1: [2]}, session)
        assert session.drain(PATIENCE_S)
    # Keys that are fetched later count as often as the missing keys of the lookup did: 4 positions of 3 keys, then 3 of 2.
    assert (a.defaults, b.defaults) == (6, 0)
    before = a.keys - a.defaults
    served.lookup({0: [99] * 100}, session)
    assert session.drain(PATIENCE_S)
    assert a.keys - a.defaults == before  # the alert's ratio, of this lookup: 1
