import threading

import numpy as np
import pytest

from hps.engine.chain import DatabaseChain
from hps.engine.circuit_breaker import CircuitBreaker
from hps.errors import DatabaseError
from hps.statistics.metrics import Metrics
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.unavailable import UnavailableDatabase
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec
from tests.fakes.clock import Clock
from tests.fakes.faulty_database import FaultyDatabase
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase
from tests.fakes.shared_memory_database import SharedMemoryDatabase

TABLE = TableSpec("model", "table", 4, 0.5, 1000)


def vectors_of(keys, version=0):
    return np.asarray(keys, np.float32)[:, None] + np.asarray(version, np.float32) / 8 + np.arange(4, dtype=np.float32) / 1024


def never_open():
    return CircuitBreaker(failures=10**9)


class Host:
    """A chain over two databases that fail on command, and what is in them."""

    def __init__(self, volatile=True, persistent=True, promote=False, breaker=never_open):
        self.volatile = FaultyDatabase(MemoryDatabase()) if volatile else None
        self.persistent = FaultyDatabase(MemoryDatabase()) if persistent is True else persistent or None
        self.metrics = Metrics()
        settings = {"promote": promote, "breaker": breaker, "modification_timeout_s": 60}
        self.chain = DatabaseChain(self.volatile, self.persistent, metrics=self.metrics, **settings)
        self.chain.open_table(TABLE)

    def put(self, database, keys, version=0):
        if database:
            database.inner.insert(TABLE.tag, np.asarray(keys, np.int64), vectors_of(keys, version))

    def fetch(self, keys, table=TABLE, landed=None):
        keys = np.ascontiguousarray(keys, np.int64)
        out, found = np.full((keys.size, 4), -1, np.float32), np.zeros(keys.size, np.bool_)
        said = landed and (lambda start, stop: landed(start, stop, out))
        assert self.chain.fetch(table, keys, out, found, said) == found.sum()
        return out, found

    def check(self, key, version):
        np.testing.assert_array_equal(self.fetch([key])[0], vectors_of([key], version))

    def insert(self, version, keys=(1,), told=lambda written: None):
        self.chain.insert(TABLE, np.array(keys), vectors_of(keys, version), told)

    def metric(self, name, tier, operation):
        return self.metrics.registry.get_sample_value(name, {"model": TABLE.model_name, "tier": tier, "operation": operation})

    def resident(self, database):
        return sorted(key for keys, _ in database.inner.scan(TABLE.tag, 100) for key in keys.tolist())


@pytest.fixture
def make():
    """Make hosts whose chains are closed after the test."""
    made = []

    def make(**options):
        made.append(Host(**options))
        return made[-1]

    yield make
    for one in made:
        one.chain.close()


@pytest.fixture
def host(make):
    return make()


@pytest.mark.parametrize(
    ("above", "below", "failing", "hits", "misses"),
    [
        ([1, 2], [1, 2, 3], "", [2, 1], [2, 1]),  # what is above is answered from there
        ([1, 2, 3, 4], [1], "", [4, 0], [0, 0]),  # the lower one is not asked
        *[([], [4, 2], "", [0, 2], [4, 2]), ([1], [1, 2], "fetch", [0, 2], [0, 2])],
        ([1], [1, 2], "drop", [0, 2], [4, 2]),  # by another process, or with all that a shared server had
        *[([1, 2], None, "", [2, 0], [2, 0]), (None, [1, 2], "", [0, 2], [0, 2]), (None, None, "", [0, 0], [0, 0])],
    ],
)
def test_each_key_is_answered_by_the_first_database_that_has_it(make, above, below, failing, hits, misses):
    host, asked = make(volatile=above is not None, persistent=below is not None), np.array([1, 2, 3, 4])
    host.put(host.volatile, above or [], version=1)
    host.put(host.persistent, below or [])
    if failing == "fetch":
        host.volatile.failing = {"fetch"}
    elif failing == "drop":
        host.volatile.drop_table(TABLE.tag)
    out, found = host.fetch(asked)
    above = [] if failing or not above else above
    versions = [1 if key in above else 0 for key in asked]
    assert found.tolist() == [key in above or key in (below or []) for key in asked]
    np.testing.assert_array_equal(out[found], vectors_of(asked, np.array(versions)[:, None])[found])
    np.testing.assert_array_equal(out[~found], -1)
    counters = host.metrics.table("model", "table")
    assert (counters.hits, counters.misses) == ([0, *hits], [0, *misses])
    if below:
        assert host.persistent.calls.get("fetch", 0) == (len(above) < 4)
    if failing == "drop":
        assert host.resident(host.volatile) == []  # it was opened again
        assert host.metric("hps_tier_errors_total", "volatile_db", "read") == 0


@pytest.mark.parametrize(("persistent", "failing"), [(True, "fetch"), (False, "fetch"), (False, "drop")])
def test_a_failed_authoritative_database_is_an_error_and_not_an_absent_key(make, persistent, failing):
    host = make(persistent=persistent)
    host.put(host.volatile, [1])
    last = host.persistent or host.volatile
    if failing == "drop":
        last.drop_table(TABLE.tag)
    else:
        last.failing = {"fetch"}
    for _ in range(2):
        with pytest.raises(DatabaseError, match=TABLE.tag if failing == "drop" else "told to fail"):
            host.fetch([1, 2])
    if persistent:
        assert host.fetch([1])[1].all()


def test_rows_found_before_the_call_are_left_alone_and_counters_are_seen_while_they_are_zero(host):
    host.put(host.persistent, [1, 2])
    out = np.full((2, 4), 7, np.float32)
    assert host.chain.fetch(TABLE, np.array([1, 2]), out, np.array([True, False])) == 1
    np.testing.assert_array_equal(out[0], 7)
    for tier in ("volatile_db", "persistent_db"):
        assert [host.metric("hps_tier_errors_total", tier, operation) for operation in ("read", "write")] == [0, 0]
    for name in ("hps_promoted_keys_total", "hps_coalesced_keys_total"):
        assert host.metrics.registry.get_sample_value(name, {"model": "model", "table": "table"}) == 0


def test_open_breaker_stops_asking_the_volatile_database_and_a_probe_brings_it_back(make):
    clock = Clock()
    host = make(breaker=lambda: CircuitBreaker(failures=2, open_s=1, clock=clock))
    host.put(host.persistent, [1])
    host.volatile.failing = {"fetch"}
    assert all(host.fetch([1])[1].all() for _ in range(5))
    assert host.volatile.calls["fetch"] == 2
    host.volatile.failing, clock.now = set(), 1.5
    assert all(host.fetch([1])[1].all() for _ in range(3))
    assert host.volatile.calls["fetch"] == 5


@pytest.mark.parametrize("volatile", [False, True])
def test_writes_that_all_fail_do_not_stop_reads_and_are_probed_until_they_succeed(make, volatile):
    """A full disk: nothing can be written, and every row can be read."""
    clock = Clock()
    host = make(volatile=volatile, breaker=lambda: CircuitBreaker(failures=2, open_s=1, clock=clock))
    host.put(host.persistent, [1, 2])
    host.persistent.failing = {"insert", "delete"}

    def metrics():
        errors = [host.metric("hps_tier_errors_total", "persistent_db", operation) for operation in ("read", "write")]
        state = host.chain.tiers()[-1]
        return [state.read, state.written, *errors]

    for _ in range(2):
        for _ in range(3):
            with pytest.raises(DatabaseError):
                host.insert(1)
        out, found = host.fetch([1, 2, 3])
        assert found.tolist() == [True, True, False]
        np.testing.assert_array_equal(out[:2], vectors_of([1, 2]))
    assert host.persistent.calls["insert"] == 2
    assert metrics() == [1, 0, 0, 2]
    clock.now = 1.5  # the probe fails, too
    with pytest.raises(DatabaseError):
        host.insert(1)
    assert host.persistent.calls["insert"] == 3
    host.persistent.failing, clock.now = set(), 3
    host.insert(1)
    host.insert(1)
    host.check(1, 1)
    assert metrics() == [1, 1, 0, 3]


@pytest.mark.parametrize("promote", [False, True])
def test_writes_reach_both_databases_and_only_vectors_that_exist_are_promoted_where_configured(make, promote):
    host, told = make(promote=promote), []
    host.put(host.persistent, [1, 2])
    host.fetch([1, 2, 3])
    assert host.chain.drain(PATIENCE_S)
    promoted = [1, 2] if promote else []
    assert host.resident(host.volatile) == promoted
    host.insert(0, [5, 6], told.append)
    host.chain.delete(TABLE, np.array([5]), told.append)
    assert (host.resident(host.volatile), host.resident(host.persistent)) == ([*promoted, 6], [1, 2, 6])
    assert told == [True, True]


def test_promotion_of_a_vector_read_before_an_update_is_dropped(make):
    host = make(promote=True)
    host.put(host.persistent, [1], version=0)
    host.persistent.gate_late = threading.Event()
    thread = threading.Thread(target=host.fetch, args=([1],))
    thread.start()
    assert host.persistent.entered.acquire(timeout=PATIENCE_S)
    host.insert(1)
    host.persistent.gate_late.set()
    thread.join(PATIENCE_S)
    assert host.chain.drain(PATIENCE_S)
    host.check(1, 1)


def test_insert_that_fails_above_or_below_shows_what_the_lower_database_has(make):
    for fails in ("above", "below"):
        host, told = make(), []
        for database in (host.volatile, host.persistent):
            host.put(database, [1], version=0)
        if fails == "below":
            host.persistent.failing = {"insert"}
            with pytest.raises(DatabaseError):
                host.insert(1, told=told.append)
            host.check(1, 0)
        else:
            host.volatile.failing = {"insert"}
            host.insert(1, told=told.append)
            for failing, quarantined in (({"insert", "drop_table"}, [TABLE.tag]), (set(), [])):
                assert host.chain.quarantined == [TABLE.tag]
                host.volatile.failing = failing
                host.check(1, 1)
                assert host.chain.quarantined == quarantined
        assert told == [fails == "above"]
        assert host.resident(host.volatile) == []


def test_writes_wait_while_the_table_is_healed(host, monkeypatch):
    """Else one of them might be noted as missing above after the note was cleared, or fail unseen."""
    done = threading.Event()

    def insert(version, failing=frozenset()):
        host.volatile.failing = failing
        host.insert(version)

    def write():
        insert(2)
        insert(3, {"insert"})
        done.set()

    def open_table(tag, dim):
        """The last step of healing: writes begin now."""
        monkeypatch.undo()
        host.volatile.open_table(tag, dim)
        threading.Thread(target=write, daemon=True).start()
        wait_until(lambda: done.is_set() or host.chain.fence(TABLE)._modifying, "the write has come")
        assert not done.is_set()

    insert(1, {"insert"})
    host.volatile.failing = set()
    monkeypatch.setattr(host.volatile, "open_table", open_table)
    host.fetch([1])
    assert done.wait(PATIENCE_S)
    host.check(1, 3)


def test_queued_promotion_does_not_enter_a_table_that_was_released_meanwhile(make):
    """The table may have been opened again, by another model of the same name."""
    host, other = make(promote=True), TableSpec("model", "other", 4, 0.5, 1000)
    entered, gate, insert = threading.Event(), threading.Event(), host.volatile.inner.insert

    def wait_and_insert(*arguments):
        entered.set()
        assert gate.wait(PATIENCE_S)
        insert(*arguments)

    host.volatile.inner.insert = wait_and_insert
    for table in (other, TABLE):
        host.chain.open_table(table)
        host.persistent.insert(table.tag, np.array([1]), vectors_of([1]))
        host.fetch([1], table)
        assert entered.wait(PATIENCE_S)  # the promotion into the other table waits there, and this table's behind it
    host.chain.release_table(TABLE)
    host.chain.open_table(TABLE)
    gate.set()
    assert host.chain.drain(PATIENCE_S)
    assert [host.volatile.size(table.tag) for table in (other, TABLE)] == [1, 0]


@pytest.mark.parametrize("how", ["failing", "failing_halfway"])
def test_what_a_failed_promotion_may_have_left_is_not_read(make, how):
    host = make(promote=True)
    host.put(host.persistent, [1, 2])
    setattr(host.volatile, how, {"insert"})
    host.fetch([1, 2])
    assert host.chain.drain(PATIENCE_S)
    assert host.chain.quarantined == [TABLE.tag]
    host.volatile.failing, host.volatile.failing_halfway = {"drop_table"}, set()
    host.put(host.volatile, [1], version=1)  # it lands late
    host.check(1, 0)
    host.volatile.failing = set()
    host.check(1, 0)
    assert host.chain.quarantined == []


def test_a_promotion_that_was_not_tried_quarantines_nothing(make):
    other, clock = TableSpec("model", "other", 4, 0.5, 1000), Clock()
    host = make(promote=True, breaker=lambda: CircuitBreaker(failures=1, open_s=1, clock=clock))
    host.chain.open_table(other)
    host.put(host.persistent, [1])
    host.volatile.failing = {"insert"}
    host.chain.insert(other, np.array([1]), vectors_of([1]), lambda written: None)
    host.fetch([1])
    assert host.chain.drain(PATIENCE_S)
    assert host.volatile.calls["insert"] == 1
    assert host.chain.quarantined == [other.tag]


def test_a_modification_that_the_volatile_database_lacks_is_remembered_before_it_returns(make):
    host = make(persistent=PersistentMemoryDatabase())

    def insert(version):
        host.insert(version)
        return host.persistent.writer_token(TABLE.tag)

    before = host.persistent.writer_token(TABLE.tag)
    assert insert(0) == before
    host.volatile.failing = {"insert"}
    doubted = insert(1)
    assert doubted != before
    host.volatile.failing = set()
    assert insert(2) == doubted  # remembered once
    assert host.volatile.calls["insert"] == 2  # what is to be dropped is not written to
    host.check(1, 2)
    assert host.chain.quarantined == []
    insert(3)
    assert host.resident(host.volatile) == [1]
    host.volatile.failing = {"insert"}
    assert insert(4) != doubted


def test_a_table_that_one_database_cannot_drop_stays_in_those_below_where_it_is_found_again(make):
    host = make(persistent=PersistentMemoryDatabase())
    tags = lambda: [database.tags() for database in (host.volatile, host.persistent)]  # noqa: E731 - asked twice
    host.volatile.failing = {"drop_table"}
    host.chain.release_table(TABLE, everywhere=True)
    assert tags() == [[TABLE.tag]] * 2
    host.volatile.failing = set()
    host.chain.discard({host.volatile: [TABLE.tag], host.persistent: [TABLE.tag]})
    assert tags() == [[], []]


def test_devices_do_not_read_float32_rows_in_place_where_a_table_has_fewer_bits():
    table, database = TableSpec("model", "table", 4, 0.5, 1000, row_dtype="int8"), HashMapDatabase()
    for exact in (False, True):
        database.row_dtype = "float32" if exact else None
        chain = DatabaseChain(database, None, metrics=Metrics())
        chain.open_table(table)
        assert (chain.host_table(table) is None) == exact
    chain.close()


# -- circuit breakers ----------------------------------------------------------------------------------------------------

FAILED, SUCCEEDED, ALLOWED, REFUSED = "failed", "succeeded", True, False


@pytest.mark.parametrize(
    ("failures", "events", "is_open"),
    [
        *[(1, [ALLOWED, FAILED, REFUSED], True), (3, [FAILED, FAILED, ALLOWED, ALLOWED], False)],
        *[(3, [FAILED, FAILED, FAILED, REFUSED, REFUSED], True), (3, [FAILED, FAILED, FAILED, FAILED, REFUSED], True)],
        (2, [FAILED, SUCCEEDED, FAILED, SUCCEEDED, FAILED, ALLOWED], False),  # never two in a row
        (2, [FAILED, FAILED, 4.999, REFUSED], True),
        (2, [FAILED, FAILED, 5, ALLOWED, REFUSED, 9.999, REFUSED, 10, ALLOWED, REFUSED], True),  # a probe in five seconds
        (2, [FAILED, 3, FAILED, 7.999, REFUSED, 8, ALLOWED], True),  # five seconds from the second failure
        (2, [FAILED, FAILED, 5, ALLOWED, 6, FAILED, 10.999, REFUSED, 11, ALLOWED], True),  # the probe failed
        (2, [FAILED, FAILED, 5, ALLOWED, SUCCEEDED, ALLOWED, ALLOWED], False),
        (2, [FAILED, FAILED, 5, SUCCEEDED, FAILED, ALLOWED, FAILED, REFUSED, 10, ALLOWED], True),  # the second round
    ],
)
def test_calls_are_let_through_or_refused(failures: int, events: list[str | bool | float], is_open: bool) -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures=failures, open_s=5, clock=clock)
    for nth, event in enumerate(events):
        if isinstance(event, bool):
            assert breaker.allow() is event, f"event {nth}"
        elif isinstance(event, str):
            getattr(breaker, event)()
        else:
            clock.now = event
    assert breaker.is_open is is_open


def test_a_table_that_is_left_out_is_neither_read_nor_promoted_above_but_written(make):
    host = make(promote=True)
    host.put(host.persistent, [1, 2])
    host.put(host.volatile, [1], version=7)  # would be wrong
    host.chain.leave_out(TABLE)
    for _ in range(2):
        host.check(1, 0)
    assert host.chain.drain(PATIENCE_S)
    assert "fetch" not in host.volatile.calls
    assert host.resident(host.volatile) == [1]
    assert [state.read for state in host.chain.tiers(TABLE)] == [False, True]
    assert [state.read for state in host.chain.tiers()] == [True, True]
    assert host.chain.locate(TABLE, np.array([1]), np.zeros((1, 4), np.float32)) == "persistent_db"
    host.insert(3)
    host.chain.read_again(TABLE)
    host.check(1, 3)
    assert host.resident(host.volatile) == [1]


def test_a_modification_of_a_table_that_is_not_open_above_is_recorded_and_its_rows_there_go(make):
    """A database that comes back with its rows has those from before the modification."""
    persistent = PersistentMemoryDatabase()
    host = make(volatile=False, persistent=persistent)
    metrics, above = Metrics(), FaultyDatabase(MemoryDatabase())
    above.open_table(TABLE.tag, 4)
    host.put(above, [1, 2])
    chain = DatabaseChain(
        UnavailableDatabase("redis", None, "gone"), persistent, metrics=metrics, breaker=never_open, away="gone"
    )
    chain.open_table(TABLE)
    persistent.insert(TABLE.tag, np.array([1, 2]), vectors_of([1, 2]))
    token = persistent.writer_token(TABLE.tag)
    assert chain.databases == [persistent]
    chain.insert(TABLE, np.array([1]), vectors_of([1], 5), lambda written: None)
    assert persistent.writer_token(TABLE.tag) != token
    assert chain.quarantined == [TABLE.tag]
    chain.take_in(above)
    assert chain.databases == [above, persistent]
    chain.read_again(TABLE)
    assert chain.left_out == [TABLE.tag], "it must be admitted first"
    above.failing.add("drop_table")
    assert not chain.admit(TABLE)
    above.failing.clear()
    assert chain.admit(TABLE)
    assert host.resident(above) == []
    chain.read_again(TABLE)
    assert (chain.left_out, chain.quarantined) == ([], [])
    chain.insert(TABLE, np.array([2]), vectors_of([2], 6), lambda written: None)
    assert host.resident(above) == [2]


def test_only_a_shared_database_above_a_persistent_one_is_put_away(make):
    assert not make().chain.put_away("full"), "it is of this process"
    alone = DatabaseChain(SharedMemoryDatabase(), None, metrics=Metrics())
    assert not alone.put_away("full"), "it is the only holder of rows"
    chain = DatabaseChain(SharedMemoryDatabase(), PersistentMemoryDatabase(), metrics=Metrics())
    assert chain.put_away("full")
    assert (chain.away, len(chain.databases), len(chain.tiers())) == ("full", 1, 2)
    chain.take_in()
    assert (chain.away, len(chain.databases)) == ("", 2)
