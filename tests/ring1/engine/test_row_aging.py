"""Rows that age: when they count as absent. All combinations of tiers are in tests/ring2/updates."""

import numpy as np
import pytest

import hps
from hps.configuration.load import load_configuration
from hps.engine import aging
from hps.errors import ConfigError, DatabaseError, ModelFileError
from hps.stores.base import RowChanges
from hps.testing.waiting import wait_until
from tests.servers.running_service import document_of, model_of
from tests.tables.row_aging import (
    DIM,
    FILED,
    GRACE_US,
    ONLINE,
    TTL_S,
    TTL_US,
    apply,
    follow,
    found,
    now_us,
    sample,
    starting,
    stored_keys,
    vectors_of,
)


@pytest.fixture
def start(tmp_path):
    with starting(tmp_path) as starts:
        yield starts


def table_of(server):
    """The state of the table's sweeper."""
    (table,) = server.model("m").aging._tables.values()
    return table


def test_a_row_expires_by_its_last_write_on_every_replica(start):
    servers = start(), start()
    soon = now_us() - TTL_US + 300_000
    times = np.where(np.arange(ONLINE.size) < 30, now_us(), soon)
    for server in servers:
        apply(server, ONLINE, soon)
        apply(server, ONLINE[:30], times[:30], 2)
        apply(server, FILED[:5], now_us() - TTL_US - 1)  # has expired on arrival
    for server in servers:
        follow(server, ONLINE, times, lambda there: there.sum() == 30)
        assert found(server, FILED).tolist() == [False] * 5 + [True] * 95
        assert sample(server, "expired_rows") == 75


def test_a_write_that_takes_long_ages_from_its_own_time(start, monkeypatch):
    monkeypatch.setattr(aging, "_LONG_S", -1.0)
    server = start()
    deployment = server.model("m")
    server.insert(ONLINE, vectors_of(ONLINE), "m", "a")
    server.delete(FILED[:5], "m", "a")
    noted = np.concatenate([times for parts in table_of(server).calendar._periods.values() for _, times in parts])
    keys = np.concatenate([ONLINE, FILED[:5]])
    np.testing.assert_array_equal(np.sort(noted), np.sort(deployment.chain.last_changes(deployment.tables[0], keys)))


def test_lookups_do_not_wait_until_changes_that_have_expired_on_arrival_are_forgotten(start):
    server = start()
    sweeper = server.model("m").aging
    sweeper.close()
    valid_until_ns = sweeper.valid_until_ns
    apply(server, ONLINE, now_us() - TTL_US - 5_000_000)
    assert sweeper.valid_until_ns == valid_until_ns
    sweeper._round()
    assert len(table_of(server).calendar) == 0
    assert not server.model("m").chain.last_changes(server.model("m").tables[0], ONLINE).any()


def test_a_change_that_expires_while_it_waits_for_its_turn_is_never_answered(start):
    server = start()
    deployment, written = server.model("m"), now_us() - TTL_US - 5 * GRACE_US
    deployment.aging.close()
    changes = RowChanges(ONLINE, vectors_of(ONLINE), np.full(ONLINE.size, written))  # admitted before
    deployment.chain.apply(deployment.tables[0], changes, {}, lambda latest: None, deployment._changing(0, changes))
    assert not found(server, ONLINE).any()


def test_those_who_answer_by_themselves_are_told_until_when(start):
    told = []

    class Loop:
        def trust_until(self, valid_until_ns):
            told.append(valid_until_ns)

    sweeper, loop = start().model("m").aging, Loop()
    sweeper.close()
    sweeper.watch(loop.trust_until)
    sweeper._round()
    assert told[0] < told[-1] == sweeper.valid_until_ns


@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db"])
def test_rows_hidden_by_two_deployments_are_shown_once_both_have_removed_them(start, tiers):
    server = start(tiers)
    deployment, nothing = server.model("m"), np.empty(0, np.int64)
    (table,), chain, first, second = deployment.tables, deployment.chain, object(), object()
    apply(server, ONLINE, now_us())
    until = now_us()
    deployment.hide(0, first, ONLINE[:2], ONLINE[:2], until)
    deployment.hide(0, second, ONLINE[2:4], ONLINE[2:4], until)
    assert found(server, ONLINE[:5]).tolist() == [False] * 4 + [True]
    chain.show(table, second)
    assert found(server, ONLINE[:5]).tolist() == [False] * 2 + [True] * 3
    deployment.hide(0, second, None, nothing, 0)  # all rows that only a load wrote
    assert found(server, FILED[:3]).tolist() == [False] * 3
    chain.show(table, first)
    assert found(server, ONLINE[:5]).all()
    chain.show(table, second)
    assert found(server, FILED[:3]).all()


def test_a_lookup_beside_the_removal_of_rows_that_a_sealed_file_has_finds_none(start, monkeypatch):
    server = start("row_files")
    deployment, written = server.model("m"), now_us()
    (table,), changes, seen = deployment.tables, deployment.chain.databases[-1]._changes, []
    apply(server, FILED[:50], written)
    deployment.hide(0, object(), FILED[:50], FILED[:50], written)
    written_to_disk = changes.apply

    def observed(*arguments):
        applied = written_to_disk(*arguments)
        there = np.zeros(50, np.bool_)
        deployment.chain.fetch(table, FILED[:50], np.empty((50, DIM), np.float32), there)
        seen.append(there.any())
        return applied

    monkeypatch.setattr(changes, "apply", observed)
    deployment.expire(0, FILED[:50], written + 1000)
    assert seen == [False]


def test_a_closed_deployment_hides_nothing(start):
    server = start()
    deployment = server.model("m")
    sweeper, table = deployment.aging, table_of(server)
    deployment.hide(0, table.hides, ONLINE, ONLINE, now_us())
    deployment.hide(0, table.hides_files, None, ONLINE[:0], now_us())
    assert not found(server, FILED).any()
    server.deploy(deployment.config.model_copy(update={"row_ttl_s": (2 * TTL_S,)}))
    assert server.model("m").aging is not sweeper
    assert found(server, FILED).all()


@pytest.mark.parametrize("tiers", ["hash_map", "rocks_db_alone"])
def test_rows_of_files_that_expired_before_the_start_are_never_answered(start, tiers):
    start.files_were_written(now_us() - TTL_US - 1)
    for _ in range(2):
        server = start(tiers, row_ttl_files=True)
        assert not found(server, FILED).any()
        assert stored_keys(server)[-1] == []
        start.opened.close()


def test_rows_of_files_that_cannot_be_removed_are_answered_as_absent(start, monkeypatch):
    written = now_us() - TTL_US + 1_000_000
    start.files_were_written(written)
    server = start("rocks_db", row_ttl_files=True)
    apply(server, ONLINE, now_us(), 2)
    assert found(server, FILED).all()

    def fail(*arguments, **options):
        raise DatabaseError("no room")

    monkeypatch.setattr(server.model("m").chain.databases[-1], "expire", fail)
    follow(server, FILED, np.full(FILED.size, written), lambda there: not there.any())
    assert found(server, ONLINE).all()
    monkeypatch.undo()
    wait_until(lambda: sample(server, "expired_rows") == FILED.size, "they are removed")


def test_rows_of_files_without_a_known_time_are_refused_and_stay_unless_asked(start):
    with pytest.raises(ModelFileError, match=r"row_ttl_files is set, and no version\.json says when .*`hps\.write_version`"):
        start(row_ttl_files=True)
    server = start()
    start.files_were_written(now_us() - TTL_US - 1)
    assert found(server, FILED).all()
    server.deploy(server.model("m").config.model_copy(update={"row_ttl_files": True}))
    assert not found(server, FILED).any()


def test_settings_that_cannot_be_are_refused(start, tmp_path):
    disabled = {"volatile_db": {"type": "disabled"}}
    below = {"persistent_db": {"type": "rocks_db", "path": str(tmp_path / "r"), "read_only": True}}
    for entry, tiers, text in (
        (start.entry(row_ttl_files=True, embedding_cache_type="static"), {}, r"row_ttl_files: got true with .* static"),
        (start.entry(), disabled, r"model m: got row_ttl_s, but there is no database to keep online changes; configure"),
        (start.entry(), below, r"got row_ttl_s, but persistent_db\.read_only does not allow online changes; set it to false"),
        (start.entry(ttl_s=-1), {}, "row_ttl_s"),
        (start.entry(ttl_s=1e10), {}, "row_ttl_s"),
        (start.entry(ttl_s=[1, 2]), {}, "2 lifetimes for 1 sparse_files"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_configuration({**document_of(entry), **tiers})
    assert load_configuration({**document_of(start.entry(embedding_cache_type="static")), **disabled})  # has a hash map


def test_a_time_to_live_that_is_changed_removed_and_set_again_counts_from_the_writes(start):
    server = start()
    written = now_us() - TTL_US + 40_000_000
    apply(server, ONLINE, written)

    def deploy(ttl_s):
        server.deploy(server.model("m").config.model_copy(update={"row_ttl_s": (ttl_s,)}))
        return found(server, ONLINE).all()

    assert deploy(TTL_S / 2) is np.False_
    apply(server, ONLINE, written, 2)
    assert not found(server, ONLINE).any()
    assert deploy(0.0) is np.False_
    apply(server, ONLINE, written, 2)
    assert found(server, ONLINE).all()
    assert deploy(1e9)
    assert deploy(TTL_S)
    assert not deploy(TTL_S / 2)
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


def test_a_row_without_a_cache_has_expired_where_the_sweeper_is_late(start):
    server = start("rocks_db_alone", gpucache=False)
    sweeper = server.model("m").aging
    written = now_us() - TTL_US + 300_000
    apply(server, ONLINE, written)
    sweeper.close()
    wait_until(lambda: now_us() > written + TTL_US + GRACE_US, "they expire")
    assert server.row(int(ONLINE[0]), "m", "a").tier is None


@pytest.mark.parametrize("tiers", ["rocks_db", "rocks_db_alone"])
def test_rows_that_a_database_cannot_remove_are_answered_as_absent(start, monkeypatch, tiers):
    server = start(tiers)
    database = server.model("m").chain.databases[-1]
    times = np.where(np.arange(ONLINE.size) < 50, now_us() - TTL_US + 300_000, now_us())
    apply(server, ONLINE, times)

    def fail(*arguments, **options):
        raise DatabaseError("no room")

    monkeypatch.setattr(database, "expire", fail)
    follow(server, ONLINE, times, lambda there: not there[:50].any())
    assert found(server, ONLINE[50:]).all()
    assert found(server, FILED).all()
    assert sample(server, "expired_rows") == 0
    monkeypatch.undo()
    wait_until(lambda: sample(server, "expired_rows") == 50, "they are removed")


def test_rows_that_expire_while_others_cannot_be_removed_leave_the_caches_too(start, monkeypatch):
    server = start("rocks_db")
    times = np.where(np.arange(ONLINE.size) < 50, now_us() - TTL_US + 300_000, now_us() - TTL_US + 1_000_000)
    apply(server, ONLINE, times)

    def fail(*arguments, **options):
        raise DatabaseError("no room")

    monkeypatch.setattr(server.model("m").chain.databases[-1], "expire", fail)
    follow(server, ONLINE, times, lambda there: not there.any())


def test_a_round_that_has_no_time_left_hides_the_expired_rows_of_all_tables(start, tmp_path, monkeypatch):
    monkeypatch.setattr(aging, "_BUSY_S", -1.0)
    hps.write_sparse_model(tmp_path / "b", (FILED, vectors_of(FILED)))
    model = model_of("m", [tmp_path / "a", tmp_path / "b"], {"a": DIM, "b": DIM}, row_ttl_s=0.4, gpucacheper=2.0)
    server = start.opened.enter_context(hps.HPS(document_of(model)))
    for table in ("a", "b"):
        server.insert(ONLINE, vectors_of(ONLINE), "m", table)
    there = lambda table: server.lookup(ONLINE, "m", table, return_found=True)[1]  # noqa: E731
    wait_until(lambda: not there("a").any() and not there("b").any(), "they expire")
    assert sample(server, "expired_rows") == 0
    monkeypatch.undo()
    wait_until(lambda: sample(server, "expired_rows") == ONLINE.size, "they are removed")
    wait_until(lambda: not server.model("m").chain._hidden, "nothing is hidden any more")


@pytest.mark.parametrize("keys", [ONLINE, FILED], ids=["online", "files"])
def test_lookups_fail_rather_than_answer_rows_that_can_neither_be_removed_nor_hidden(start, monkeypatch, keys):
    written = now_us() - TTL_US + 500_000
    start.files_were_written(written)
    server = start("rocks_db", row_ttl_files=True)
    apply(server, ONLINE, np.full(ONLINE.size, written if keys is ONLINE else now_us()))

    def fail(*arguments, **options):
        raise DatabaseError("no room")

    for method in ("expire", "hide"):
        monkeypatch.setattr(server.model("m").chain, method, fail)

    def refused():
        before = now_us()
        try:
            there = found(server, keys)
        except DatabaseError:
            return True
        assert before < written + TTL_US + GRACE_US or not there.any()
        return False

    wait_until(refused, "lookups fail")
    monkeypatch.undo()
    follow(server, keys, np.full(keys.size, written), lambda there: not there.any())


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
    table = table_of(server)
    assert not table.calendar.complete
    follow(server, ONLINE, written, lambda there: there.sum() == 50)
    monkeypatch.setattr(aging, "_READ_AHEAD_US", 60_000_000)
    wait_until(lambda: table.calendar.complete and len(table.calendar) == 50, "the others are read")
