"""A fetch of many rows that several threads share, through the chain of databases and the sessions."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.errors import DatabaseError
from hps.lookup.chain import DatabaseChain
from hps.lookup.circuit_breaker import CircuitBreaker
from hps.lookup.session import DirectSession
from hps.statistics.metrics import Metrics
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec
from tests.fakes.faulty_database import FaultyDatabase, fetched_keys
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase
from tests.ring1.lookup.test_lookup_session import TABLES, Served, vectors_of

pytestmark = pytest.mark.usefixtures("four_threads")
TABLE = TableSpec("model", "table", 4, 0.5, 1000)
ROWS = 400


class Host:
    """A chain whose databases are asked for ten rows at once; the lower one has all rows, the upper one every other."""

    def __init__(self, promote=False):
        self.volatile, self.persistent = FaultyDatabase(MemoryDatabase()), FaultyDatabase(PersistentMemoryDatabase())
        self.metrics, self.breakers = Metrics(), []
        self.chain = DatabaseChain(
            self.volatile,
            self.persistent,
            metrics=self.metrics,
            promote=promote,
            breaker=self.breaker,
            modification_timeout_s=60,
        )
        self.chain.open_table(TABLE)
        self.keys = np.arange(ROWS)
        for database, step in ((self.volatile, 2), (self.persistent, 1)):
            database.rows_worth_a_thread = 10
            database.inner.insert(TABLE.tag, self.keys[::step], vectors_of(self.keys[::step], 4))

    def breaker(self):
        self.breakers.append(CircuitBreaker(failures=2))
        return self.breakers[-1]

    def fetch(self, keys, landed=None):
        out, found = np.full((keys.size, 4), -1, np.float32), np.zeros(keys.size, np.bool_)
        count = self.chain.fetch(TABLE, keys, out, found, landed and (lambda start, stop: landed(start, stop, out)))
        assert count == found.sum()
        return out, found

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def host():
    host = Host()
    yield host
    host.chain.close()


@pytest.fixture
def serve():
    served = []

    def start(**settings):
        served.append(Served(**settings))
        served[-1].database.rows_worth_a_thread = 4
        return served[-1]

    yield start
    for each in served:
        if each.database.gate:
            each.database.gate.set()
        each.session.close(1)
        each.chain.close()


def test_many_rows_are_fetched_in_pieces_that_count_as_one_call(host):
    out, found = host.fetch(host.keys)
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(host.keys, 4))
    assert host.volatile.calls["fetch"] > 4
    assert host.persistent.calls["fetch"] > 4
    for tier in ("volatile_db", "persistent_db"):
        assert host.value("hps_fetch_seconds_count", model=TABLE.model_name, tier=tier) == 1
    counters = host.metrics.table("model", "table")
    assert counters.hits == [0, ROWS // 2, ROWS // 2]
    assert counters.misses == [0, ROWS // 2, 0]


@pytest.mark.parametrize(("missing", "calls"), [(15, 1), (50, 5)])
def test_few_missing_rows_of_many_are_fetched_in_few_pieces(host, missing, calls):
    above = np.sort(np.random.default_rng(1).permutation(host.keys)[missing:])
    host.volatile.inner.drop_table(TABLE.tag)
    host.chain.open_table(TABLE)
    host.volatile.inner.insert(TABLE.tag, above, vectors_of(above, 4))
    assert host.fetch(host.keys)[1].all()
    assert host.persistent.calls["fetch"] == calls


def test_failed_piece_is_one_failure_to_the_breaker_and_the_tier_below_answers(host):
    host.volatile.failing = {"fetch"}
    for failures in (1, 2):
        out, found = host.fetch(host.keys)
        assert found.all()
        np.testing.assert_array_equal(out, vectors_of(host.keys, 4))
        assert host.value("hps_tier_errors_total", model=TABLE.model_name, tier="volatile_db", operation="read") == failures
        assert host.breakers[0].is_open == (failures == 2)


def test_failed_piece_of_the_authoritative_database_fails_the_fetch(host):
    host.persistent.failing_halfway = {"fetch"}
    with pytest.raises(DatabaseError):
        host.fetch(host.keys)


@pytest.mark.parametrize("failing", [(), ("failing", 0), ("failing_halfway", 0)])
@pytest.mark.parametrize("step", [1, 2], ids=["both", "upper"])
def test_rows_are_reported_once_in_order_and_do_not_change_after(host, failing, step):
    if failing:
        setattr(host.volatile, failing[0], {"fetch"})
    keys, reported = host.keys[::step], [0]

    def landed(start, stop, out):
        assert start == reported[-1]
        np.testing.assert_array_equal(out[start:stop], vectors_of(keys[start:stop], 4))
        reported.append(stop)

    host.fetch(np.ascontiguousarray(keys), landed)
    assert reported[-1] == keys.size
    if step == 2 and not failing:
        assert len(reported) > 2  # early, since all was above


def test_vectors_of_all_pieces_are_promoted_in_one_batch():
    host = Host(promote=True)
    host.fetch(host.keys)
    assert host.chain.drain(PATIENCE_S)
    assert host.volatile.calls["insert"] == 1
    assert host.volatile.size(TABLE.tag) == ROWS
    host.chain.close()


def test_table_that_is_lost_below_a_piece_is_opened_again(host):
    host.volatile.inner.drop_table(TABLE.tag)
    assert host.fetch(host.keys)[1].all()
    assert TABLE.tag in host.volatile.tags()


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_large_lookup_is_answered_from_all_pieces(serve, direct):
    served = serve()
    session = DirectSession(TABLES, served.chain, served.metrics) if direct else served.session
    keys = np.random.default_rng(1).permutation(np.arange(-5, 45))
    served.check(served.lookup({0: keys, 1: keys[:50]}, session))
    assert served.database.calls["fetch"] > 6
    if not direct:
        assert sorted(served.cache.dump(0).tolist()) == list(range(40))


def test_lookup_that_fails_returns_when_no_piece_writes_any_more(serve):
    served = serve(workspaces=1)
    served.database.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.lookup, {0: np.arange(40)})
        for _ in range(4):
            assert served.database.entered.acquire(timeout=PATIENCE_S)
        served.database.failing = {"fetch"}
        assert not answer.done()
        served.database.gate.set()
        with pytest.raises(DatabaseError):
            answer.result(PATIENCE_S)
    assert served.database.calls["fetch"] <= 2 * 4  # pieces that had not begun are not begun
    served.database.failing = set()
    served.check(served.lookup({0: np.arange(40)}))


def test_modification_between_two_pieces_keeps_what_was_fetched_from_becoming_resident(serve):
    served = serve()
    served.database.gate_late = threading.Event()
    keys = np.arange(40)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.lookup, {0: keys})
        for _ in range(4):
            assert served.database.entered.acquire(timeout=PATIENCE_S)
        served.chain.insert(TABLES[0], keys[:8], vectors_of(keys[:8], 3, 1), lambda written: None)
        served.database.gate_late.set()
        answer.result(PATIENCE_S)
    assert not served.cache.dump(0).size


def test_keys_that_two_large_lookups_miss_are_fetched_once(serve):
    served = serve(workspaces=2)
    served.database.gate = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        answers = []
        for keys in (np.arange(0, 30), np.arange(10, 40)):
            answers.append(pool.submit(served.lookup, {0: keys}))
            assert served.database.entered.acquire(timeout=PATIENCE_S)
            wait_until(lambda: len(served.coalescer._flights[TABLES[0].tag]) == len(answers), "its fetch is known")
        served.database.gate.set()
        for answer in answers:
            served.check(answer.result(PATIENCE_S))
    assert sorted(fetched_keys(served.database).tolist()) == list(range(40))


def test_session_that_closes_waits_for_the_pieces_of_a_lookup(serve):
    served = serve()
    served.database.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.lookup, {0: np.arange(40)})
        assert served.database.entered.acquire(timeout=PATIENCE_S)
        assert not served.session.close(0.05)
        served.database.gate.set()
        served.check(answer.result(PATIENCE_S))
    assert served.session.close(PATIENCE_S)
