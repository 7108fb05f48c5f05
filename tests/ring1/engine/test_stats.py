"""`HPS.stats`: what a parameter server holds, without waiting for anybody."""

import threading
from dataclasses import asdict, fields

import numpy as np
import orjson
import pytest

import hps
from hps.errors import DatabaseError
from hps.statistics.prometheus import update_families
from hps.statistics.snapshot import UpdateStatus
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.versions.collection import StatisticsCollector
from tests.fakes.clock import Clock
from tests.servers.running_service import document_of, model_of

ROWS, DIM = 1000, 4


@pytest.fixture
def files(tmp_path):
    keys = np.arange(ROWS)
    hps.write_sparse_model(tmp_path / "t", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    return tmp_path / "t"


@pytest.fixture
def server(files, tmp_path):
    model = model_of("m", [files] * 2, {"a": DIM, "b": DIM}, gpucacheper=0.5, hit_rate_threshold=1.1)
    with hps.HPS(document_of(model, persistent=tmp_path / "rocks")) as server:
        yield server


def tiers_of(server, table=0):
    return {tier.tier: tier for tier in server.stats().models[0].tables[table].tiers}


def measured(server):
    server.stats()
    wait_until(lambda: server.stats().devices[0].memory_bytes, "all have answered")
    return server.stats()


def test_sizes_and_counts_are_those_of_the_tiers(server):
    for keys in (np.arange(300), np.r_[np.arange(300), -1]):
        server.lookup(keys, "m", "a")
    stats = measured(server)
    [model] = stats.models
    assert (model.name, model.version, model.versions) == ("m", "1", (("1", "serving"),))
    assert (model.lookups.count, model.stages["query"].count, model.workspaces, model.busy_workspaces) == (2, 2, 1, 0)
    table = model.tables[0]
    assert (table.name, table.dim, table.rows, table.keys, table.defaults) == ("a", DIM, ROWS, 601, 1)
    cache, volatile, persistent = table.tiers
    assert (cache.kind, cache.device, cache.rows, cache.inserts, cache.evictions) == ("cpu", "cpu", 300, 300, 0)
    assert cache.capacity_rows >= ROWS / 2
    assert (cache.vector_bytes, cache.hits, cache.misses) == (4 * DIM * cache.capacity_rows, 300, 301)
    assert (volatile.kind, volatile.rows, volatile.hits, volatile.capacity_rows) == ("hash_map", ROWS, 300, None)
    assert (persistent.kind, persistent.rows, persistent.hits, persistent.misses) == ("rocks_db", ROWS, 0, 1)
    assert all(tier.available for tier in table.tiers)
    [device] = stats.devices
    assert device.device == "cpu"
    assert device.memory_bytes >= device.free_bytes > 0
    assert device.cache_bytes == sum(t.tiers[0].vector_bytes + t.tiers[0].overhead_bytes for t in model.tables)
    assert stats.memory_bytes > 0
    assert stats.queues == {"insertion": 0}
    assert orjson.loads(orjson.dumps(asdict(stats)))["models"][0]["tables"][1]["name"] == "b"
    assert (volatile.inserts, persistent.inserts) == (0, 0)  # loading does not count, and what is written online does
    server.insert([1, 2, 5000], np.ones((3, DIM), np.float32), "m", "a")
    server.delete([1], "m", "a")
    for table, inserts in ((0, 3), (1, 0)):
        assert [tiers_of(server, table)[tier].inserts for tier in ("volatile_db", "persistent_db")] == [inserts] * 2


def test_a_database_that_does_not_answer_holds_nobody_up(server):
    gate, database = threading.Event(), server.model("m").chain.databases[1]
    stats, calls = database.stats, []

    def slow(tag):
        calls.append(tag)
        assert gate.wait(PATIENCE_S)
        return stats(tag)

    database.stats = slow
    for _ in range(20):
        assert tiers_of(server)["persistent_db"].rows is None
    wait_until(lambda: calls, "the database is asked")
    assert tiers_of(server)["volatile_db"].rows == ROWS  # nor does it keep others from being asked
    assert len(calls) == 1
    gate.set()
    assert measured(server)


def test_it_asks_every_15_seconds_while_somebody_asks_it_and_keeps_what_it_knew(server, caplog):
    clock, database, asked = Clock(), server.model("m").chain.databases[1], []
    collector, stats = StatisticsCollector(server.live, server.metrics, clock=clock), database.stats

    def persistent():
        return collector.statistics().models[0].tables[0].tiers[2]

    def answer(tag):
        asked.append(tag)
        if len(asked) > 2:
            raise DatabaseError("down")
        return stats(tag)

    database.stats = answer
    persistent()
    wait_until(lambda: collector.statistics().devices[0].memory_bytes, "all have answered")
    clock.now += 14
    assert persistent().age_s == 14
    assert len(asked) == 2  # each table once
    clock.now += 1  # 15 s to the moment
    wait_until(lambda: persistent() and len(asked) == 4, "it is asked again")
    database.stats = lambda tag: [][0]  # a defect
    clock.now += 15
    wait_until(lambda: persistent() and "querying databases" in caplog.text, "it is logged")
    database.stats, asked[:] = answer, []
    clock.now += 15
    wait_until(lambda: persistent() and len(asked) == 2, "it is asked again")
    wait_until(lambda: persistent().age_s == 0, "it has answered")
    collector.close()
    assert persistent().rows == ROWS
    clock.now += 100
    assert persistent().age_s == 100
    assert len(asked) == 2  # closed


def test_counts_are_those_of_one_moment(server):
    cache = server.model("m").caches[0]
    stats = cache.stats
    cache.stats = lambda table: server.lookup([1, 2, 3], "m", "a") is None or stats(table)  # another thread does, meanwhile
    for table in server.stats().models[0].tables:
        assert table.keys == table.tiers[0].hits + table.tiers[0].misses


def test_what_was_known_stays_while_it_is_asked_again_and_goes_with_its_tables(server):
    collector, [cache], seen = server.statistics, server.model("m").caches, []
    database, ask = server.model("m").chain.databases[1], cache.device_memory
    collector.measure()
    memory = collector.statistics().devices[0].memory_bytes

    def slow():
        seen.append(collector.statistics().devices[0].memory_bytes)
        return ask()

    cache.device_memory = slow
    collector.measure()
    assert set(seen) == {memory}
    of_tables = lambda: collector._known[database].keys() - {"/"}  # noqa: E731 - which is its disk
    assert len(of_tables()) == 2
    server.undeploy("m")
    collector.measure()
    assert not of_tables()


def test_a_process_without_a_further_thread_knows_what_needs_none(server, monkeypatch):
    def none_left(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert tiers_of(server)["volatile_db"].rows == ROWS
    assert server.stats().devices[0].memory_bytes == 0
    server.close()


def test_a_tier_that_fails_is_not_available(server, monkeypatch):
    def down(*_):
        raise DatabaseError("down")

    assert tiers_of(server)["volatile_db"].available
    monkeypatch.setattr(server.model("m").chain.databases[0], "fetch", down)
    for key in range(3):
        server.lookup([key], "m", "b")
    assert not tiers_of(server)["volatile_db"].available
    assert tiers_of(server)["persistent_db"].available


def test_three_models_share_a_device_and_each_counts_for_itself(files):
    shares = {"a": 0.1, "b": 0.5, "c": 1.0}
    models = [model_of(name, [files], {"t": DIM}, gpucacheper=share) for name, share in shares.items()]
    with hps.HPS(document_of(*models)) as server:
        for name in "abbccc":
            server.lookup([1, 2], name, "t")
        stats = measured(server)
        found = [(model.name, model.lookups.count, model.tables[0].keys) for model in stats.models]
        assert found == [("a", 1, 2), ("b", 2, 4), ("c", 3, 6)]
        caches = [model.tables[0].tiers[0] for model in stats.models]
        assert len({cache.capacity_rows for cache in caches}) == 3
        [device] = stats.devices
        assert device.cache_bytes == sum(cache.vector_bytes + cache.overhead_bytes for cache in caches)
        taken = server.model("b").session(0)._lookups.take()
        assert [model.busy_workspaces for model in server.stats().models] == [0, 1, 0]
        server.model("b").session(0)._lookups.give_back(taken)


def following(version, table, lag_s, behind=0, connected=True):
    known = {"version": version, "table": table, "lag_s": lag_s, "behind": behind, "connected": connected, "model": "m"}
    rest = {one.name: "" if one.type is str else 0 for one in fields(UpdateStatus)}
    return UpdateStatus(**{**rest, **known, "positions": {}, "dead_letters": {}})


class Feed(list[UpdateStatus]):
    """Versions of a model that follow the same log."""

    def shown(self):
        return self


@pytest.mark.parametrize(("lags", "worst"), [((5.0, 9.0, 2.0), 9.0), ((5.0, None, 2.0), None), ((None, 1.0, 2.0), None)])
def test_the_version_that_is_furthest_behind_counts_whatever_the_order(server, lags, worst):
    feed = Feed([*(following(str(number), "a", lag) for number, lag in enumerate(lags, 9)), following("9", "b", 0.5)])
    server.metrics.feeds.add(feed.shown)
    assert server.stats().updates == {"m.a": worst, "m.b": 0.5}


def test_metrics_of_updates_show_the_worst_of_three_versions_of_each_table():
    a = [following("1", "a", 5.0, 50), following("2", "a", 9.0, 90, connected=False), following("3", "a", 2.0, 20)]
    b = [following("1", "b", 1.0, 10), following("2", "b", None, None), following("3", "b", 2.0, 20)]
    lines = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for family in update_families(a + b) for line in family.lines}
    for table, values in (("a", ["9.0", "90", "0"]), ("b", ["NaN", "NaN", "1"])):
        of = f'{{model="m",table="{table}"}}'
        names = [f"hps_update_{what}{of}" for what in ("lag_seconds", "lag_messages", "connected")]
        assert {where: value for where, value in lines.items() if of in where} == dict(zip(names, values, strict=True))
