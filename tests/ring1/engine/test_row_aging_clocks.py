"""Rows that age beside a clock that is set: by `time.time_ns` here, which the tests play."""

import time

import numpy as np
import pytest

from hps.stores.base import RowChanges
from tests.tables.row_aging import FILED, GRACE_US, ONLINE, TTL_US, apply, found, starting, vectors_of

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


def test_a_direct_write_after_a_restart_with_the_clock_set_back_expires_by_its_time(start, clock):
    server = start("rocks_db_alone")
    server.insert(ONLINE[:5], vectors_of(ONLINE[:5]), "m", "a")
    start.opened.close()
    clock.us -= 3600 * SECOND
    server = start("rocks_db_alone")
    sweep_by_hand(server)
    written = clock.us
    server.insert(ONLINE[5:10], vectors_of(ONLINE[5:10]), "m", "a")
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
