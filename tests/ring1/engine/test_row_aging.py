"""Rows that age: when they count as absent, on every combination of tiers. Written times of a log of updates are the tests'."""

import time
from contextlib import ExitStack

import numpy as np
import pytest

import hps
from hps.engine import aging
from hps.errors import DatabaseError, ReadOnlyError
from hps.stores.base import RowChanges
from hps.testing.waiting import wait_until
from tests.servers.running_service import document_of, model_of

DIM, DEFAULT, TTL_S = 4, -2.0, 100.0
FILED, ONLINE = np.arange(100), np.arange(1000, 1100)
TTL_US, GRACE_US = round(TTL_S * 1e6), 1_000_000

TIERS = {
    "hash_map": {},
    "rocks_db": {"persistent": "rocks_db"},
    "rocks_db_alone": {"persistent": "rocks_db", "volatile_db": {"type": "disabled"}},
    "row_files": {"persistent": "row_files", "volatile_db": {"type": "disabled"}},
    "hash_map_above_row_files": {"persistent": "row_files"},
}


def now_us():
    return time.time_ns() // 1000


def vectors_of(keys, version=0):
    return (np.asarray(keys, np.int64)[:, None] * 8 + np.arange(DIM) + 10_000 * version).astype(np.float32)


@pytest.fixture
def start(tmp_path):
    """Start a parameter server of a table with FILED rows, whose online rows age."""
    hps.write_sparse_model(tmp_path / "a", (FILED, vectors_of(FILED)))
    with ExitStack() as opened:

        def start(tiers="hash_map", ttl_s=TTL_S, *, read_only=False, **changes):
            settings = {"gpucacheper": 2.0, "default_value_for_each_table": [DEFAULT], "row_ttl_s": ttl_s} | changes
            document = document_of(model_of("m", [tmp_path / "a"], {"a": DIM}, **settings))
            options = dict(TIERS[tiers])
            if kind := options.pop("persistent", None):
                options["persistent_db"] = {"type": kind, "path": str(tmp_path / kind), "read_only": read_only}
            return opened.enter_context(hps.HPS({**document, **options}))

        start.opened = opened
        yield start


def apply(server, keys, written_us, version=1):
    """Apply changes of a log that were written then."""
    keys, times = keys.copy(), np.broadcast_to(np.asarray(written_us, np.int64), keys.shape).copy()
    return server.model("m").apply(0, RowChanges(keys, vectors_of(keys, version), times), {})


def found(server, keys):
    """Look keys up, compare their vectors with those of any version, and return which were found."""
    vectors, there = server.lookup(keys, "m", "a", return_found=True)
    assert (vectors[~there] == DEFAULT).all()
    np.testing.assert_array_equal((vectors[there] - vectors_of(keys[there])) % 10_000, 0)
    return there


def follow(server, keys, written_us, until):
    """Look keys up until an answer satisfies `until`; each must agree with the times at which the rows were written."""
    expires = np.asarray(written_us) + TTL_US

    def judged():
        before = now_us()
        there = found(server, keys)
        after = now_us()
        assert there[after < expires].all(), "expired early"
        assert not there[before > expires + GRACE_US].any(), "answered too late"
        return until(there)

    wait_until(judged, "rows come and go")


def sample(server, name):
    return server.metrics.registry.get_sample_value(f"hps_{name}_total", {"model": "m", "table": "a"})


@pytest.mark.parametrize("tiers", TIERS)
def test_rows_expire_by_the_time_they_were_written_on_every_tier(start, tiers):
    server = start(tiers)
    assert found(server, FILED).all()
    written = now_us() - TTL_US + np.linspace(100_000, 500_000, ONLINE.size).astype(np.int64)
    keys = np.concatenate([ONLINE, FILED[:10]])  # rows of files, written again
    times = np.concatenate([written, written[:10]])
    assert apply(server, keys, times) == keys.size
    follow(server, keys, times, lambda there: not there.any())
    assert found(server, FILED[10:]).all()
    assert sample(server, "expired_rows") == keys.size
    for database in server.model("m").chain.databases:
        tag = database.stored(server.model("m").tables[0]).tag
        stored = np.concatenate([chunk for chunk, _ in database.scan(tag, 1000)])
        np.testing.assert_array_equal(np.sort(stored), FILED[10:])


@pytest.mark.parametrize("tiers", TIERS)
def test_a_row_that_is_written_again_lives_on(start, tiers):
    server = start(tiers)
    soon = now_us() - TTL_US + 300_000
    apply(server, ONLINE, soon)
    apply(server, ONLINE[:30], now_us(), 2)
    server.insert(ONLINE[30:60], vectors_of(ONLINE[30:60], 3), "m", "a")
    lasting = np.arange(ONLINE.size) < 60
    times = np.where(lasting, now_us(), soon)
    follow(server, ONLINE, times, lambda there: (there == lasting).all())


@pytest.mark.parametrize("tiers", TIERS)
def test_records_that_have_expired_do_not_appear_and_cost_the_row_of_the_files(start, tiers):
    server = start(tiers)
    keys = np.concatenate([ONLINE[:5], FILED[:5]])
    apply(server, keys, now_us() - TTL_US - 1)
    assert not found(server, keys).any()
    assert sample(server, "expired_rows") == keys.size
    apply(server, keys, now_us(), 2)
    apply(server, keys, now_us() - TTL_US - 1)  # replayed
    assert found(server, keys).all()


@pytest.mark.parametrize("tiers", ["rocks_db_alone", "row_files"])
def test_rows_that_expire_while_the_process_is_down_are_gone_when_it_starts(start, tiers):
    server = start(tiers)
    written = now_us() - TTL_US + np.where(np.arange(ONLINE.size) < 50, 1_500_000, 60_000_000)
    apply(server, ONLINE, written)
    follow(server, ONLINE, written, lambda there: there.all())
    start.opened.close()
    wait_until(lambda: now_us() > written[0] + TTL_US, "rows expire meanwhile")
    server = start(tiers)
    follow(server, ONLINE, written, lambda there: not there[:50].any())
    assert found(server, ONLINE[50:]).all()
    assert found(server, FILED).all()


def test_times_ahead_of_the_clock_count_as_written_on_arrival(start):
    server = start(ttl_s=0.5)
    apply(server, ONLINE, now_us() + 3_600_000_000)
    assert sample(server, "future_rows") == ONLINE.size
    wait_until(lambda: not found(server, ONLINE).any(), "they expire")
    apply(server, ONLINE[:1], now_us(), 2)
    assert found(server, ONLINE[:1]).all()


def test_direct_writes_age_and_tables_without_a_time_to_live_do_not(start, tmp_path):
    hps.write_sparse_model(tmp_path / "b", (FILED, vectors_of(FILED)))
    document = document_of(model_of("m", [tmp_path / "a", tmp_path / "b"], {"a": DIM, "b": DIM}, row_ttl_s=[0.4, 0]))
    server = start.opened.enter_context(hps.HPS(document))
    for table in ("a", "b"):
        server.insert(ONLINE, vectors_of(ONLINE), "m", table)
    server.delete(FILED[:5], "m", "a")
    wait_until(lambda: not server.lookup(ONLINE, "m", "a", return_found=True)[1].any(), "they expire")
    assert server.lookup(ONLINE, "m", "b", return_found=True)[1].all()
    assert not server.lookup(FILED[:5], "m", "a", return_found=True)[1].any()  # a deletion is not undone


@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db"])
def test_a_lookup_removes_expired_rows_itself_where_the_sweeper_is_late(start, tiers):
    server = start(tiers)
    sweeper = server.model("m").aging
    written = now_us() - TTL_US + 300_000
    apply(server, ONLINE, written)
    assert found(server, ONLINE).all()
    sweeper.close()  # as if its thread got no processor
    follow(server, ONLINE, np.full(ONLINE.size, written), lambda there: not there.any())


@pytest.mark.parametrize("tiers", ["rocks_db", "rocks_db_alone"])
def test_rows_that_a_database_cannot_remove_are_answered_as_absent(start, monkeypatch, tiers):
    server = start(tiers)
    database = server.model("m").chain.databases[-1]
    times = np.where(np.arange(ONLINE.size) < 50, now_us() - TTL_US + 300_000, now_us())
    apply(server, ONLINE, times)

    def fail(*arguments):
        raise DatabaseError("no room")

    monkeypatch.setattr(database, "expire", fail)
    follow(server, ONLINE, times, lambda there: not there[:50].any())
    assert found(server, ONLINE[50:]).all()
    assert found(server, FILED).all()
    assert sample(server, "expired_rows") == 0
    monkeypatch.undo()
    wait_until(lambda: sample(server, "expired_rows") == 50, "they are removed")


def test_lookups_fail_rather_than_answer_rows_that_can_neither_be_removed_nor_hidden(start, monkeypatch):
    server = start("rocks_db")
    written = now_us() - TTL_US + 300_000
    apply(server, ONLINE, np.full(ONLINE.size, written))

    def fail(*arguments):
        raise DatabaseError("no room")

    for method in ("expire", "hide"):
        monkeypatch.setattr(server.model("m").chain, method, fail)

    def refused():
        before = now_us()
        try:
            there = found(server, ONLINE)
        except DatabaseError:
            return True
        assert before < written + TTL_US + GRACE_US or not there.any()
        return False

    wait_until(refused, "lookups fail")
    monkeypatch.undo()
    follow(server, ONLINE, np.full(ONLINE.size, written), lambda there: not there.any())


def test_a_change_of_settings_keeps_the_times(start):
    server = start("rocks_db")
    written = now_us() - TTL_US + 1_000_000
    apply(server, ONLINE, written)
    before = server.model("m")
    server.deploy(server.model("m").config.model_copy(update={"hit_rate_threshold": 1.2}))
    assert server.model("m") is not before
    follow(server, ONLINE, np.full(ONLINE.size, written), lambda there: not there.any())


def test_rows_that_expire_while_their_version_is_kept_are_gone_after_a_roll_back(start):
    server = start("hash_map_above_row_files")
    config = server.model("m").config
    written = now_us() - TTL_US + np.where(np.arange(ONLINE.size) < 50, 1_000_000, 60_000_000)
    apply(server, ONLINE, written)
    assert found(server, ONLINE).all()
    server.deploy(config.model_copy(update={"version": "2"}))
    assert not found(server, ONLINE).any()
    wait_until(lambda: now_us() > written[0] + TTL_US, "rows expire meanwhile")
    server.rollback("m")
    assert server.model("m").version == "1"
    assert found(server, ONLINE).tolist() == [False] * 50 + [True] * 50
    assert found(server, FILED).all()


def test_rows_beyond_the_calendar_are_read_again_from_the_database(start, monkeypatch):
    monkeypatch.setattr(aging, "_MOST_CHANGES", 60)
    server = start("rocks_db")
    soon = now_us() - TTL_US + 400_000
    written = np.where(np.arange(ONLINE.size) < 50, soon, soon + 30_000_000)
    apply(server, ONLINE[:50], written[:50])
    apply(server, ONLINE[50:], written[50:])
    (table,) = server.model("m").aging._tables.values()
    assert not table.calendar.complete
    follow(server, ONLINE, written, lambda there: there.sum() == 50)
    wait_until(lambda: table.calendar.complete and len(table.calendar) == 50, "the others are read")


def test_a_database_that_may_not_be_written_to_is_refused(start, tmp_path):
    start("rocks_db_alone")
    start.opened.close()
    with pytest.raises(ReadOnlyError, match=r"removing old rows of table .*persistent_db\.read_only"):
        start("rocks_db_alone", read_only=True)
