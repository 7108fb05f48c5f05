"""Rows that age beside a clock that is set: by `time.time_ns` here, which the tests play."""

import time

import numpy as np
import pytest

import hps
from hps.engine import aging
from hps.errors import DatabaseError
from hps.stores.base import RowChanges
from tests.servers.running_service import document_of, model_of
from tests.tables.row_aging import DIM, FILED, GRACE_US, ONLINE, TTL_S, TTL_US, apply, found, starting, vectors_of

SECOND = 1_000_000


class PlayedClock:
    """Stands in for the wall clock."""

    def __init__(self) -> None:
        self.us = time.time_ns() // 1000

    def time_ns(self) -> int:
        return self.us * 1000

    def time(self) -> float:
        return self.us / 1e6


@pytest.fixture
def clock(monkeypatch):
    clock = PlayedClock()
    monkeypatch.setattr(time, "time_ns", clock.time_ns)
    monkeypatch.setattr(time, "time", clock.time)
    return clock


@pytest.fixture
def start(tmp_path, clock):
    with starting(tmp_path) as starts:
        yield starts


def sweep_by_hand(server):
    """Stop the sweeper's thread; return its state of the table and what makes a round."""
    sweeper = server.model("m").aging
    sweeper.close()
    (table,) = sweeper._tables.values()
    return table, sweeper._round


def expires_at(server, clock, keys, expires_us):
    """Whether keys are answered just before a time, and not just after it."""
    clock.us = expires_us - 1
    before = found(server, keys).all()
    clock.us = expires_us + GRACE_US
    return bool(before and not found(server, keys).any())


@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db"])
@pytest.mark.parametrize("back_s", [30, 3600], ids=["less", "more"])  # than the time to live
def test_rows_written_after_the_clock_was_set_back_live_as_long_as_others(start, clock, tiers, back_s):
    server = start(tiers)
    _, sweep = sweep_by_hand(server)
    apply(server, FILED[:5], clock.us)
    sweep()
    clock.us -= back_s * SECOND
    sweep()
    written = clock.us
    assert apply(server, ONLINE[:10], written) == 10
    server.insert(ONLINE[10:20], vectors_of(ONLINE[10:20]), "m", "a")
    sweep()
    assert found(server, ONLINE[:20]).all()
    assert expires_at(server, clock, ONLINE[:10], written + TTL_US)
    server.delete(ONLINE[10:20], "m", "a")


@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db"])
def test_a_direct_write_after_the_clock_was_set_back_expires_by_its_time(start, clock, tiers):
    server = start(tiers)
    _, sweep = sweep_by_hand(server)
    server.insert(ONLINE[:5], vectors_of(ONLINE[:5]), "m", "a")
    sweep()
    clock.us -= 3600 * SECOND
    written = clock.us
    server.insert(ONLINE[5:10], vectors_of(ONLINE[5:10]), "m", "a")
    sweep()
    assert expires_at(server, clock, ONLINE[5:10], written + TTL_US)
    assert expires_at(server, clock, ONLINE[:5], written + 3600 * SECOND + TTL_US)


@pytest.mark.parametrize("log", [False, True])
def test_a_direct_write_after_a_restart_with_the_clock_set_back_expires_by_its_time(start, clock, log):
    server, before = start("rocks_db_alone"), clock.us
    if log:
        apply(server, ONLINE[:5], before)
    else:
        server.insert(ONLINE[:5], vectors_of(ONLINE[:5]), "m", "a")
    start.opened.close()
    clock.us -= 3600 * SECOND
    server = start("rocks_db_alone")
    _, sweep = sweep_by_hand(server)
    written = before + 1 if log else clock.us  # later than all changes of the log
    server.insert(ONLINE[5:10], vectors_of(ONLINE[5:10]), "m", "a")
    if log:
        clock.us += TTL_US
        sweep()
    assert expires_at(server, clock, ONLINE[5:10], written + TTL_US)


@pytest.mark.parametrize("step_s", [-30, 3600])
def test_a_direct_write_during_which_the_clock_is_set_expires_by_its_time(start, clock, monkeypatch, step_s):
    server = start()
    sweep_by_hand(server)
    deployment = server.model("m")
    database, written = deployment.chain.databases[-1], clock.us
    inserted = database.insert

    def insert(*arguments):
        inserted(*arguments)
        clock.us += step_s * SECOND

    monkeypatch.setattr(database, "insert", insert)
    server.insert(ONLINE[:5], vectors_of(ONLINE[:5]), "m", "a")
    if step_s < 0:
        assert expires_at(server, clock, ONLINE[:5], written + TTL_US)
    else:
        assert not found(server, ONLINE[:5]).any()


def test_rows_whose_removal_is_under_way_are_removed_although_the_clock_is_set_back(start, clock, monkeypatch):
    server = start("rocks_db")
    table, sweep = sweep_by_hand(server)
    apply(server, ONLINE, clock.us)
    clock.us += TTL_US + GRACE_US // 2
    monkeypatch.setattr("hps.engine.aging._BUSY_S", -1.0)
    sweep()
    assert table.due.size == ONLINE.size
    clock.us -= 30 * SECOND
    monkeypatch.setattr("hps.engine.aging._BUSY_S", 10.0)
    assert not found(server, ONLINE).any()
    sweep()
    assert table.due.size == 0
    assert not server.model("m").chain.last_changes(server.model("m").tables[0], ONLINE).any()


def test_a_glitch_forward_costs_no_later_write(start, clock):
    server = start()
    _, sweep = sweep_by_hand(server)
    clock.us += 3600 * SECOND
    sweep()
    clock.us -= 3600 * SECOND
    sweep()
    apply(server, ONLINE, clock.us)
    sweep()
    assert found(server, ONLINE).all()


def test_a_change_admitted_before_the_clock_is_set_back_is_noted_as_it_is_written(start, clock):
    server = start()
    _, sweep = sweep_by_hand(server)
    deployment, written = server.model("m"), clock.us
    changes = deployment.aging.admit(0, RowChanges(ONLINE, vectors_of(ONLINE), np.full(ONLINE.size, written)))
    clock.us -= 30 * SECOND
    deployment.chain.apply(deployment.tables[0], changes, {}, lambda latest: None, deployment._changing(0, changes))
    sweep()
    assert expires_at(server, clock, ONLINE, written + TTL_US)


def test_replicas_whose_clocks_differ_each_expire_by_their_own(start, clock):
    behind, ahead = start(), start()
    for server in (behind, ahead):
        sweep_by_hand(server)
    written = clock.us
    for server, offset in ((behind, 0), (ahead, 5 * SECOND)):
        clock.us = written + offset
        apply(server, ONLINE, written)
    clock.us = written + TTL_US - 1
    assert found(behind, ONLINE).all()
    clock.us = written + TTL_US + GRACE_US
    assert not found(ahead, ONLINE).any()
    assert not found(behind, ONLINE).any()


def test_a_change_from_a_clock_ahead_ages_from_its_arrival(start, clock):
    server = start()
    sweep_by_hand(server)
    arrived = clock.us
    apply(server, ONLINE[:5], arrived + GRACE_US)
    apply(server, ONLINE[5:], arrived + GRACE_US + 1)
    assert expires_at(server, clock, ONLINE[5:], arrived + TTL_US)
    assert found(server, ONLINE[:5]).all() or clock.us >= arrived + GRACE_US + TTL_US


@pytest.mark.parametrize("tiers", ["rocks_db_alone", "row_files"])
def test_a_direct_write_while_no_time_to_live_is_set_ages_from_its_time_afterwards(start, clock, tiers):
    start(tiers)
    start.opened.close()
    clock.us += 10 * TTL_US
    server = start(tiers, ttl_s=0)
    written = clock.us
    server.insert(ONLINE[:5], vectors_of(ONLINE[:5]), "m", "a")
    start.opened.close()
    server = start(tiers)
    sweep_by_hand(server)
    assert expires_at(server, clock, ONLINE[:5], written + TTL_US)


def test_a_direct_write_after_a_change_from_a_clock_ahead_expires_after_that(start, clock):
    server = start()
    _, sweep = sweep_by_hand(server)
    ahead = clock.us + GRACE_US // 4
    apply(server, ONLINE[:1], ahead)
    server.insert(ONLINE, vectors_of(ONLINE), "m", "a")
    clock.us = ahead + TTL_US
    sweep()
    assert found(server, ONLINE).all()
    assert expires_at(server, clock, ONLINE, ahead + 1 + TTL_US)


def test_changes_that_have_expired_on_arrival_leave_lookups_and_deletions_alone(start, clock):
    server = start()
    _, sweep = sweep_by_hand(server)
    sweep()
    sweeper, deployment = server.model("m").aging, server.model("m")
    valid_until_ns = sweeper.valid_until_ns
    times = np.where(np.arange(10) < 5, clock.us - TTL_US - 1, clock.us)
    deployment.apply(0, RowChanges(FILED[:10].copy(), vectors_of(FILED[:10], 1), times, np.arange(10) >= 5), {})
    assert sweeper.valid_until_ns == valid_until_ns
    assert found(server, FILED[:11]).tolist() == [False] * 10 + [True]


def test_many_rows_are_removed_in_pieces_and_forgotten(start, clock):
    server = start()
    table, sweep = sweep_by_hand(server)
    apply(server, ONLINE, clock.us)
    table.piece_rows = 7
    clock.us += TTL_US
    sweep()
    assert (table.due.size, table.fresh.size, len(table.calendar)) == (0, 0, 0)
    assert not server.model("m").chain.last_changes(server.model("m").tables[0], ONLINE).any()
    assert not found(server, ONLINE).any()


def test_a_change_that_is_noted_during_a_sweep_keeps_lookups_from_trusting_it(start, clock, monkeypatch):
    server = start()
    _, sweep = sweep_by_hand(server)
    deployment = server.model("m")
    expire, late = deployment.chain.expire, clock.us - 5 * SECOND
    changes = RowChanges(ONLINE[1:], vectors_of(ONLINE[1:]), np.full(ONLINE.size - 1, late))
    apply(server, ONLINE[:1], clock.us)

    def expire_beside_a_writer(*arguments, **options):
        changing = deployment._changing(0, changes)
        deployment.chain.apply(deployment.tables[0], changes, {}, lambda latest: None, changing)
        return expire(*arguments, **options)

    monkeypatch.setattr(deployment.chain, "expire", expire_beside_a_writer)
    clock.us += TTL_US
    sweep()
    monkeypatch.setattr(deployment.chain, "expire", expire)
    clock.us = late + TTL_US + GRACE_US
    assert not found(server, ONLINE).any()


def test_a_clock_that_jumps_past_the_calendar_has_lookups_wait_for_the_database(start, clock, monkeypatch):
    monkeypatch.setattr(aging, "_MOST_CHANGES", 60)
    server = start("rocks_db")
    table, _ = sweep_by_hand(server)
    later = clock.us
    apply(server, ONLINE[:50], later - 30 * SECOND)
    apply(server, ONLINE[50:], later)
    assert not table.calendar.complete
    clock.us = later + TTL_US + GRACE_US
    assert not found(server, ONLINE).any()


def test_rows_that_expire_between_two_looks_of_a_round_leave_the_caches(start, clock, monkeypatch):
    server = start("rocks_db")
    table, sweep = sweep_by_hand(server)
    times = clock.us + (np.arange(ONLINE.size) // 34 - 2) * SECOND
    apply(server, ONLINE, times)
    assert found(server, ONLINE).all()  # in the caches from here on

    def fail(*arguments, **options):
        clock.us += rounds.pop() * SECOND
        raise DatabaseError("no room")

    rounds = [1, 0]
    monkeypatch.setattr(server.model("m").chain, "expire", fail)
    for second in range(2):
        clock.us = int(times[0]) + TTL_US + second * SECOND
        with pytest.raises(DatabaseError, match="no room"):
            sweep()
    assert table.hidden
    assert not found(server, ONLINE).any()


def test_lookups_trust_no_table_longer_than_the_one_that_was_swept_least(start, clock, tmp_path, monkeypatch):
    hps.write_sparse_model(tmp_path / "b", (FILED, vectors_of(FILED)))
    model = model_of("m", [tmp_path / "a", tmp_path / "b"], {"a": DIM, "b": DIM}, row_ttl_s=TTL_S)
    server = start.opened.enter_context(hps.HPS(document_of(model)))
    deployment = server.model("m")
    deployment.aging.close()
    apply(server, ONLINE, clock.us)
    expire = deployment.chain.expire

    def fail(table, *arguments, **options):
        if table.table_name == "a":
            raise DatabaseError("no room")
        return expire(table, *arguments, **options)

    monkeypatch.setattr(deployment.chain, "expire", fail)
    monkeypatch.setattr(deployment.chain, "hide", fail)
    clock.us += TTL_US + GRACE_US
    with pytest.raises(DatabaseError, match="no room"):
        server.lookup(ONLINE, "m", "a")


def test_a_reading_of_the_database_that_fails_is_started_again(start, clock, monkeypatch):
    monkeypatch.setattr(aging, "_MOST_CHANGES", 60)
    server = start("rocks_db")
    table, sweep = sweep_by_hand(server)
    apply(server, ONLINE[:50], clock.us - 30 * SECOND)
    apply(server, ONLINE[50:], clock.us)
    chain = server.model("m").chain
    changed_rows = chain.changed_rows

    def failing(spec):
        yield from ()
        raise DatabaseError("no answer")

    monkeypatch.setattr(chain, "changed_rows", failing)
    monkeypatch.setattr(aging, "_READ_AHEAD_US", 2 * TTL_US)
    with pytest.raises(DatabaseError, match="no answer"):
        sweep()
    assert not table.calendar.complete
    monkeypatch.setattr(chain, "changed_rows", changed_rows)
    sweep()
    assert table.reading is None
    clock.us += TTL_US + GRACE_US
    assert not found(server, ONLINE).any()
