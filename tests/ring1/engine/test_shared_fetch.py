"""A fetch of many rows that several threads share, through the chain of databases and the sessions."""

import numpy as np
import pytest

from hps.engine.circuit_breaker import CircuitBreaker
from hps.engine.session import DirectSession
from hps.errors import DatabaseError
from hps.testing.waiting import PATIENCE_S
from tests.ring1.engine import test_lookup_session as sessions
from tests.ring1.engine.test_database_chain import TABLE, vectors_of
from tests.ring1.engine.test_database_chain import make as make
from tests.ring1.engine.test_lookup_session import serve as serve  # fixtures

pytestmark = pytest.mark.usefixtures("four_threads")
ROWS = 400
KEYS = np.arange(ROWS)


@pytest.fixture
def host(make):
    return filled(make(breaker=lambda: CircuitBreaker(failures=2)))


def filled(host):
    """Databases that are asked for ten rows at once; the lower one has all rows, the upper one every other."""
    for database, step in ((host.volatile, 2), (host.persistent, 1)):
        database.rows_worth_a_thread = 10
        host.put(database, KEYS[::step])
    return host


def value(host, name, **labels):
    return host.metrics.registry.get_sample_value(name, {"model": TABLE.model_name, **labels})


def test_many_rows_are_fetched_in_pieces_that_count_as_one_call(host):
    out, found = host.fetch(KEYS)
    assert found.all()
    np.testing.assert_array_equal(out, vectors_of(KEYS))
    for database, tier in ((host.volatile, "volatile_db"), (host.persistent, "persistent_db")):
        assert database.calls["fetch"] > 4
        assert value(host, "hps_fetch_seconds_count", tier=tier) == 1
    counters = host.metrics.table("model", "table")
    assert (counters.hits, counters.misses) == ([0, ROWS // 2, ROWS // 2], [0, ROWS // 2, 0])


@pytest.mark.parametrize(("missing", "calls"), [(15, 1), (50, 5)])
def test_few_missing_rows_of_many_are_fetched_in_few_pieces(host, missing, calls):
    host.volatile.inner.drop_table(TABLE.tag)
    host.chain.open_table(TABLE)
    host.put(host.volatile, np.sort(np.random.default_rng(1).permutation(KEYS)[missing:]))
    assert host.fetch(KEYS)[1].all()
    assert host.persistent.calls["fetch"] == calls


def test_failed_piece_is_one_failure_to_the_breaker_and_the_tier_below_answers_if_there_is_one(host):
    host.volatile.failing = {"fetch"}
    for failures in (1, 2):
        out, found = host.fetch(KEYS)
        assert found.all()
        np.testing.assert_array_equal(out, vectors_of(KEYS))
        assert value(host, "hps_tier_errors_total", tier="volatile_db", operation="read") == failures
        assert host.chain.tiers()[0].read == (failures < 2)
    host.persistent.failing_halfway = {"fetch"}
    with pytest.raises(DatabaseError):
        host.fetch(KEYS)


@pytest.mark.parametrize("failing", [None, "failing", "failing_halfway"])
@pytest.mark.parametrize("step", [1, 2], ids=["both", "upper"])
def test_rows_are_reported_once_in_order_and_do_not_change_after(host, failing, step):
    if failing:
        setattr(host.volatile, failing, {"fetch"})
    keys, reported = KEYS[::step], [0]

    def landed(start, stop, out):
        assert start == reported[-1]
        np.testing.assert_array_equal(out[start:stop], vectors_of(keys[start:stop]))
        reported.append(stop)

    host.fetch(keys, landed=landed)
    assert reported[-1] == keys.size
    if step == 2 and not failing:
        assert len(reported) > 2  # early, since all was above


def test_vectors_of_all_pieces_are_promoted_in_one_batch(make):
    host = filled(make(promote=True))
    host.fetch(KEYS)
    assert host.chain.drain(PATIENCE_S)
    assert (host.volatile.calls["insert"], host.volatile.size(TABLE.tag)) == (1, ROWS)


def test_table_that_is_lost_below_a_piece_is_opened_again(host):
    host.volatile.inner.drop_table(TABLE.tag)
    assert host.fetch(KEYS)[1].all()
    assert TABLE.tag in host.volatile.tags()


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_large_lookup_is_answered_from_all_pieces(serve, direct):
    served = serve(rows_worth_a_thread=4)
    session = DirectSession(sessions.TABLES, served.chain, served.metrics) if direct else served.session
    keys = np.random.default_rng(1).permutation(np.arange(-5, 45))
    served.check(served.lookup({0: keys, 1: keys[:50]}, session))
    assert served.database.calls["fetch"] > 6
    if not direct:
        assert sorted(served.cache.dump(0).tolist()) == list(range(40))


def test_lookup_that_fails_returns_when_no_piece_writes_any_more(serve):
    served = serve(workspaces=1, rows_worth_a_thread=4)
    with served.looking_up({0: np.arange(40)}, error=DatabaseError) as answer:
        for _ in range(3):
            assert served.database.entered.acquire(timeout=PATIENCE_S)
        served.database.failing = {"fetch"}
        assert not answer.done()
    assert served.database.calls["fetch"] <= 2 * 4  # pieces that had not begun are not begun
    served.database.failing = set()
    served.check(served.lookup({0: np.arange(40)}))


def test_modification_between_two_pieces_keeps_what_was_fetched_from_becoming_resident(serve):
    served, keys = serve(rows_worth_a_thread=4), np.arange(40)
    with served.looking_up({0: keys}, "gate_late"):
        for _ in range(3):
            assert served.database.entered.acquire(timeout=PATIENCE_S)
        new = sessions.vectors_of(keys[:8], 3, 1)
        served.chain.insert(sessions.TABLES[0], keys[:8], new, lambda written: None)
    assert not served.cache.dump(0).size


def test_session_that_closes_waits_for_the_pieces_of_a_lookup(serve):
    served = serve(rows_worth_a_thread=4)
    with served.looking_up({0: np.arange(40)}) as answer:
        assert not served.session.close(0.05)
    served.check(answer.result())
    assert served.session.close(PATIENCE_S)
