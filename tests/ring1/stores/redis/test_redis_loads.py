"""Several processes and one Redis: a model is loaded once, by one of them, and by another when that one dies."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

from hps.errors import DatabaseCorruptError, DatabaseError, HPSError, NotReadyError, UnknownTableError
from hps.ground.progress import NoProgress
from hps.models.writer import write_sparse_model
from hps.stores.base import LoadRecord
from hps.stores.redis.load_leases import LoadLeases
from hps.stores.rocks_db.database import RocksDatabase
from hps.testing.databases import distinct_keys, fetched, vectors_of
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec
from tests.tables.deltas import Change, Versions, held_of, spec
from tests.tables.table_loads import DIM as ITEM_DIM
from tests.tables.table_loads import KEYS as ITEM_KEYS
from tests.tables.table_loads import VECTORS as ITEM_VECTORS
from tests.tables.table_loads import load_table, nothing_to_do

pytestmark = pytest.mark.redis
TABLE = TableSpec("shop", "item", 8, 0.0, 1000)
TAG, DIM = TABLE.tag, TABLE.dim
KEYS = distinct_keys(600)
VECTORS = vectors_of(KEYS, DIM)


@pytest.fixture
def node(opened):
    """Make databases, each as another process would; their table is open."""

    def make(**settings):
        database = opened(**settings)
        database.open_table(TAG, DIM)
        return database

    return make


@pytest.fixture
def files(tmp_path):
    write_sparse_model(tmp_path / "item.model", (KEYS, VECTORS))
    return str(tmp_path / "item.model")


def chunk(database, start, stop, fingerprint="v1", version=0):
    keys = KEYS[start:stop]
    database.load_chunk(TAG, keys, vectors_of(keys, DIM, version), LoadRecord(fingerprint, stop, 600))


def loads(database, fingerprint="v1", count=600, version=0):
    """Load what is missing of a model; tell from where on."""
    first = database.claim_load(TAG, fingerprint, count, wait_s=PATIENCE_S)
    if first < count:
        chunk(database, first, count, fingerprint, version)
        database.finish_load(TAG)
    return first


def holds(database, count, version=0):
    out, found = fetched(database, TAG, KEYS, DIM)
    assert found.tolist() == [True] * count + [False] * (600 - count)
    np.testing.assert_array_equal(out[:count], vectors_of(KEYS[:count], DIM, version))


def test_one_loads_and_the_others_find_it_loaded(node, client):
    first, second = node(), node()
    assert first.claim_load(TAG, "v1", 600) == 0
    assert second.claim_load(TAG, "v1", 600) is None
    chunk(first, 0, 300)
    assert second.claim_load(TAG, "v1", 600) is None
    chunk(first, 300, 600)
    first.finish_load(TAG)
    assert second.claim_load(TAG, "v1", 600) == 600
    assert node().claim_load(TAG, "v1", 600) == 600
    holds(second, 600)
    assert not client.exists(f"hps_et{{{TAG}}}l")


def test_who_gets_the_right_to_load_when_all_is_loaded_gives_it_back(node, client, monkeypatch):
    first, second = node(), node()
    first.claim_load(TAG, "v1", 600)
    acquire = LoadLeases._acquire

    def finish_and_acquire(leases, layout):
        """The first process ends its load after the second has looked, and before it gets the lease."""
        monkeypatch.undo()
        chunk(first, 0, 600)
        first.finish_load(TAG)
        return acquire(leases, layout)

    monkeypatch.setattr(LoadLeases, "_acquire", finish_and_acquire)
    assert second.claim_load(TAG, "v1", 600) == 600
    assert not client.exists(f"hps_et{{{TAG}}}l")
    assert node().claim_load(TAG, "v2", 600) == 0


def test_a_load_whose_loader_died_when_all_rows_were_there_has_ended(node):
    first, second = node(lease_s=0.3), node()
    assert first.claim_load(TAG, "v1", 600) == 0
    chunk(first, 0, 600)
    assert second.claim_load(TAG, "v1", 600, wait_s=PATIENCE_S) == 600
    holds(first, 600)


def test_another_goes_on_when_the_loader_dies(node):
    first, second = node(lease_s=0.3), node()
    assert first.claim_load(TAG, "v1", 600) == 0
    chunk(first, 0, 200)
    assert second.claim_load(TAG, "v1", 600, wait_s=PATIENCE_S) == 200
    with pytest.raises(DatabaseError, match="another one has taken over the load"):
        chunk(first, 200, 400)
    assert loads(second) == 200  # it may claim it again, as after a failure
    holds(second, 600)
    assert first.claim_load(TAG, "v1", 600) == 600


def test_a_loader_that_was_slow_goes_on_where_nobody_took_over(node, client):
    first = node(lease_s=0.05)
    first.claim_load(TAG, "v1", 600)
    wait_until(lambda: not client.exists(f"hps_et{{{TAG}}}l"), "the lease has ended")
    chunk(first, 0, 600)
    first.finish_load(TAG)
    assert node().claim_load(TAG, "v1", 600) == 600


def test_another_model_replaces_the_rows(node):
    first, second = node(), node()
    loads(first)
    assert second.claim_load(TAG, "v2", 300) == 0
    with pytest.raises(DatabaseError, match="being loaded"):  # and not 600 absent keys
        fetched(first, TAG, KEYS, DIM)
    chunk(second, 0, 200, "v2", version=2)
    with pytest.raises(DatabaseError, match="being loaded"):
        fetched(first, TAG, KEYS[:200], DIM)
    chunk(second, 200, 300, "v2", version=2)
    second.finish_load(TAG)
    holds(first, 300, version=2)


def test_rows_that_another_process_uses_stay_if_it_has_nothing_below(node):
    first, second = node(), node()
    loads(first)
    for _ in range(2):
        assert not second.clear_table(TAG, "v2")
        assert second.clear_table(TAG, "v1")
        second.open_table(TAG, DIM)
        with pytest.raises(DatabaseError, match="other processes use it"):
            second.claim_load(TAG, "v2", 300, replaces=False)
        holds(first, 600)
    assert node().claim_load(TAG, "v1", 600, replaces=False) == 600
    first.close()


@pytest.mark.parametrize("cleared", [True, False])
def test_rows_that_no_other_process_uses_are_replaced(node, cleared):
    first, second = node(), node()
    loads(first)
    first.close()
    if cleared:
        assert second.clear_table(TAG, "v2")
        second.open_table(TAG, DIM)
    assert second.claim_load(TAG, "v2", 300, replaces=False) == 0
    assert loads(second, "v2", 300, 2) == 0
    holds(second, 300, version=2)


def test_rows_that_nobody_recorded_stay_and_are_overwritten(node):
    database = node()
    database.insert(TAG, KEYS, vectors_of(KEYS, DIM, version=5))
    assert loads(database, count=100) == 0
    assert database.size(TAG) == 600
    np.testing.assert_array_equal(fetched(database, TAG, KEYS[:100], DIM)[0], VECTORS[:100])


def test_a_larger_share_is_completed_and_a_smaller_one_is_there(node):
    database = node()
    for count, first in ((300, 0), (100, 100), (600, 300)):
        assert loads(database, count=count) == first
    holds(database, 600)


def test_a_load_into_a_table_that_is_dropped_meanwhile_fails(node):
    first, second = node(), node()
    first.claim_load(TAG, "v1", 600)
    chunk(first, 0, 300)
    second.drop_table(TAG)
    second.open_table(TAG, DIM)
    with pytest.raises(UnknownTableError):  # or half of the model would be taken for all of it
        chunk(first, 300, 600)
    assert first.claim_load(TAG, "v1", 600) == 0


def test_a_note_that_cannot_be_read_is_an_error(node, client):
    database = node()
    client.hset(f"hps_et{{{TAG}}}m", "loaded", "{}")
    with pytest.raises(DatabaseCorruptError, match="Load its model again with `hps load"):
        database.claim_load(TAG, "v1", 600)


class TestLost:
    """With nothing below, rows that Redis lost are an error until they are loaded again, never absent keys."""

    @pytest.fixture
    def reader(self, node):
        reader = node()
        loads(reader)
        return reader

    @staticmethod
    def refuses(reader, reason="was lost after it was opened"):
        """Every call fails, and each time as the first."""
        for _ in range(2):
            for call in (
                lambda: fetched(reader, TAG, KEYS, DIM),
                lambda: list(reader.scan(TAG, 100)),
                lambda: reader.insert(TAG, KEYS, VECTORS),
                lambda: reader.delete(TAG, KEYS),
            ):
                with pytest.raises(HPSError, match=reason):
                    call()

    @pytest.mark.parametrize("what", ["everything", "partition", "dropped"])
    def test_a_table_that_another_process_opened_to_load_it_is_not_empty(self, node, reader, client, what):
        if what == "everything":
            client.flushall()
        elif what == "partition":
            client.delete(f"hps_et{{{TAG}/p2}}v", f"hps_et{{{TAG}/p2}}m")
        else:
            node().drop_table(TAG)
        self.refuses(reader)
        dead, another = node(lease_s=0.3), node()  # which have opened it, and load it later
        self.refuses(reader)
        assert dead.claim_load(TAG, "v1", 600) == 0
        chunk(dead, 0, 200)
        waiting = node()
        for process in (reader, waiting) if what != "partition" else ():  # its other rows were never away
            self.refuses(process, "being loaded")
        assert loads(another) == 200
        for process in (reader, another, waiting):
            holds(process, 600)

    def test_neither_is_one_that_was_lost_again_before_its_load(self, node, reader, client):
        for _ in range(2):
            client.flushall()
            loader = node()
            self.refuses(reader)
        client.flushall()
        assert loader.claim_load(TAG, "v1", 600) == 0
        self.refuses(reader, "being loaded")
        client.flushall()
        with pytest.raises(UnknownTableError):
            chunk(loader, 0, 600)
        node()
        self.refuses(reader)  # it has seen the load that was lost
        assert loads(loader) == 0
        holds(reader, 600)

    def test_rows_that_hugectr_writes_again_count_once_the_table_is_opened_again(self, node, reader, client):
        rows = {f"hps_et{{{TAG}/p{i}}}v": client.hgetall(f"hps_et{{{TAG}/p{i}}}v") for i in range(4)}
        client.flushall()
        for name, row in list(rows.items())[:2]:
            client.hset(name, mapping=row)
        another = node()
        self.refuses(reader)  # nobody knows whether these are all
        for name, row in rows.items():
            client.hset(name, mapping=row)
        for process in (reader, another):
            process.open_table(TAG, DIM)
            holds(process, 600)


class TestLoadTable:
    def test_nodes_that_start_together_load_once(self, node, files):
        nodes = [node() for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            reports = list(pool.map(lambda database: load_table(TABLE, files, [database]), nodes))
        assert sorted(load.rows for report in reports for load in report.loads) == [0, 0, 600]
        for database in nodes:
            holds(database, 600)

    def test_each_node_fills_its_own_persistent_database_meanwhile(self, node, files, tmp_path):
        with ThreadPoolExecutor(2) as pool, ExitStack() as closed:
            own = [closed.enter_context(closing(RocksDatabase(tmp_path / str(i)))) for i in range(2)]
            pairs = [[node(), rocks] for rocks in own]
            reports = list(pool.map(lambda databases: load_table(TABLE, files, databases), pairs))
            assert sorted(report.loads[0].rows for report in reports) == [0, 600]
            assert [report.loads[1].rows for report in reports] == [600, 600]
            assert [database.size(TAG) for database in own] == [600, 600]

    def test_a_progress_listener_may_end_the_wait(self, node, files):
        told = []

        class Stopping(NoProgress):
            def advance(self, tag, rows):
                told.append(rows)
                if len(told) == 2:
                    raise NotReadyError("the service stops")

        loading = node(lease_s=60.0)
        loading.claim_load(TAG, load_table(TABLE, files, []).model.fingerprint, 600)
        with pytest.raises(NotReadyError, match="the service stops"):
            load_table(TABLE, files, [node()], progress=Stopping())
        assert told == [0, 0]


@pytest.fixture
def versions(tmp_path):
    """1 is whole, 2 is a delta."""
    made = Versions(tmp_path / "shop", (ITEM_KEYS, ITEM_VECTORS))
    made.add(Change((ITEM_KEYS[5:9], ITEM_VECTORS[:4]), ITEM_KEYS[8:20]))
    return made


def test_one_process_loads_a_delta_and_the_others_find_it_loaded(opened, versions, client):
    first, second = opened(), opened()
    for version in ("1", "2"):
        versions.load(version, [first])
        assert held_of(first, version) == versions.expected(version)
        assert nothing_to_do(versions.load(version, [second]))
        assert held_of(second, version) == versions.expected(version)
        assert not client.exists(f"hps_et{{{spec(version).tag}}}l")


def test_a_delta_that_another_process_did_not_finish_is_loaded_from_the_start(opened, versions, monkeypatch):
    dying, other = opened(lease_s=0.2), opened(lease_s=0.2)
    monkeypatch.setattr(dying, "finish_load", lambda tag: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        versions.load("2", [dying])
    versions.load("2", [other])
    assert held_of(other, "2") == versions.expected("2")
    assert nothing_to_do(versions.load("2", [opened()]))


def test_a_modified_delta_is_no_longer_what_redis_was_loaded_with(opened, versions, tmp_path):
    with closing(RocksDatabase(tmp_path / "a")) as rocks:
        versions.load("2", [opened(), rocks])
        rocks.insert(spec("2").tag, ITEM_KEYS[:1], ITEM_VECTORS[9:10])
        redis = opened()
        assert versions.load("2", [redis, rocks]).differs
        out, found = np.empty((1, ITEM_DIM), np.float32), np.zeros(1, np.bool_)
        redis.fetch(spec("2").tag, ITEM_KEYS[:1], out, found)
        assert not found[0] or out.tobytes() == ITEM_VECTORS[9].tobytes()


@pytest.fixture
def above(node, tmp_path):
    """Make databases, each as of a process with all rows in a RocksDB of its own below; return both."""
    with ExitStack() as stack:

        def make(name, **settings):
            rocks = stack.enter_context(closing(RocksDatabase(str(tmp_path / name))))
            rocks.open_table(TAG, DIM)
            if rocks.load_record(TAG) is None:
                rocks.load_chunk(TAG, KEYS, VECTORS, LoadRecord("v1", 600, 600, checksum="sum"))
            redis = node(**settings)
            redis.stand_above(TAG, rocks)
            return redis, rocks

        yield make


def copies(database, keys=KEYS, outcome="complete"):
    stored = database.copy_rows(TAG, keys, vectors_of(keys, DIM))
    database.end_copy(TAG, outcome if stored else "refused")
    return stored


def test_a_table_that_lost_its_rows_is_copied_by_one_process_and_whole_for_all(above, node, client):
    first, second = (above(name)[0] for name in "ab")
    loads(first)
    for _ in range(2):
        assert not first.lacks_rows(TAG)
        assert not first.claim_copy(TAG, "v1", 600)
        client.flushall()
        for database in (first, second):
            assert database.lacks_rows(TAG)
            database.open_table(TAG, DIM)
            assert database.lacks_rows(TAG)
        assert first.claim_copy(TAG, "v1", 600)
        assert not second.claim_copy(TAG, "v1", 600)
        assert copies(first)
        for database in (first, second):
            holds(database, 600)
    assert loads(node()) == 600, "a process with nothing below finds it loaded"


def test_another_process_copies_when_one_dies_that_did(above, client):
    first, second = above("a", lease_s=0.3)[0], above("b")[0]
    assert first.claim_copy(TAG, "v1", 600)
    first.copy_rows(TAG, KEYS[:100], VECTORS[:100])
    wait_until(lambda: second.claim_copy(TAG, "v1", 600), "its lease runs out")
    with pytest.raises(DatabaseError, match="another one has taken over the copy"):
        first.copy_rows(TAG, KEYS[100:200], VECTORS[100:200])
    first.end_copy(TAG, "interrupted")
    assert copies(second)
    holds(first, 600)


@pytest.mark.parametrize("before", [True, False])
def test_a_copy_replaces_no_row_that_another_process_has_modified(above, before):
    (first, _), (second, rocks) = above("a"), above("b")
    assert first.claim_copy(TAG, "v1", 600)
    if not before:
        assert first.copy_rows(TAG, KEYS[:300], VECTORS[:300])
    newer = vectors_of(KEYS[:1], DIM, 9)
    rocks.insert(TAG, KEYS[:1], newer)
    second.insert(TAG, KEYS[:1], newer)
    assert not copies(first)
    np.testing.assert_array_equal(fetched(second, TAG, KEYS[:1], DIM)[0], newer)
    assert not first.lacks_rows(TAG), "it is not tried again and again"
    assert second.lacks_rows(TAG), "the process that modified it may"
    assert second.claim_copy(TAG, "v1", 600)
    rows = VECTORS.copy()
    rows[0] = newer
    assert second.copy_rows(TAG, KEYS, rows)
    second.end_copy(TAG, "complete")
    np.testing.assert_array_equal(fetched(second, TAG, KEYS, DIM)[0], rows)


def test_the_first_modification_after_a_copy_leaves_the_other_rows(above, client):
    """A copy modifies nothing: the process is entered among the writers by its first modification, as without a copy."""
    first, rocks = above("a")
    assert first.claim_copy(TAG, "v1", 600)
    assert copies(first)
    newer = vectors_of(KEYS[:1], DIM, 9)
    rocks.insert(TAG, KEYS[:1], newer)
    first.insert(TAG, KEYS[:1], newer)
    out, found = fetched(first, TAG, KEYS, DIM)
    assert found.all()
    np.testing.assert_array_equal(out[0], newer[0])
    assert not first.lacks_rows(TAG)


def test_rows_that_are_lost_during_a_copy_are_not_said_to_be_there(above, client):
    first = above("a")[0]
    assert first.claim_copy(TAG, "v1", 600)
    assert first.copy_rows(TAG, KEYS[:300], VECTORS[:300])
    client.flushall()
    first.open_table(TAG, DIM)
    assert copies(first, KEYS[300:])
    assert first.lacks_rows(TAG)


def test_lookups_here_fail_while_this_process_loads_a_table_again_with_nothing_below(node, client):
    first, second = node(), node()
    loads(first)
    client.flushall()
    assert first.lacks_rows(TAG)
    assert not first.holds_writes(TAG)
    assert first.claim_load(TAG, "v1", 600) == 0
    chunk(first, 0, 300)
    for database in (first, second):
        with pytest.raises(DatabaseError, match=r"is being loaded|was lost after it was opened"):
            fetched(database, TAG, KEYS, DIM)
        with pytest.raises(DatabaseError):
            database.insert(TAG, KEYS[:1], VECTORS[:1])
    chunk(first, 300, 600)
    first.finish_load(TAG)
    for database in (first, second):
        holds(database, 600)
        assert not database.lacks_rows(TAG)
    first.insert(TAG, KEYS[:1], VECTORS[:1])
    assert first.holds_writes(TAG)
