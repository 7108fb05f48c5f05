"""Models that follow a log of online updates: from the message to every tier, through restarts, versions and roll-backs."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import UpdateSourceConfig
from hps.errors import NotReadyError
from hps.ground.progress import NoProgress
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.models.writer import write_version
from hps.statistics.snapshot import UpdateStatus
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.updates.publisher import Publisher, open_writer
from tests.fakes import entry_points
from tests.fakes.memory_log import MemoryBroker
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of

DIMS = {"user": 4, "item": 7}
KEYS = np.arange(1, 2001)
PARTITIONS = 3
_names = itertools.count()


def vectors_of(keys: Any, dim: int, change: int) -> np.ndarray:
    """Vectors that say of which key and which change they are; change 0 is that of the model files."""
    return (np.asarray(keys)[:, None] * 16 + np.arange(dim) + change * 100_000).astype(np.float32)


class Log:
    """A log, and what publishes to it."""

    def __init__(self, settings: dict[str, Any], broker: MemoryBroker | None = None) -> None:
        self.settings = settings
        self.memory = broker
        writer = open_writer(UpdateSourceConfig(**settings))
        self._publishers = {
            table: Publisher(writer, f"hps_et.ranker.{table}", dim=dim, create_partitions=PARTITIONS, owned=True)
            for table, dim in DIMS.items()
        }

    def publish(self, change: int, keys: Any = KEYS[::2], deleted: Any = KEYS[:0]) -> dict[str, dict[str, str]]:
        """Change rows of both tables; returns the positions of the last messages, by table."""
        positions = {}
        for table, publisher in self._publishers.items():
            publisher.insert(np.asarray(keys), vectors_of(keys, DIMS[table], change))
            publisher.delete(np.asarray(deleted))
            positions[table] = publisher.flush()
        return positions

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()


@contextmanager
def opened(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """A log of this kind, with a server of its own."""
    with ExitStack() as stack:
        memory = None
        if kind == "kafka":
            from tests.servers.kafka_broker import KafkaBroker

            kafka = stack.enter_context(KafkaBroker(directory / "kafka"))
            settings = {"type": kind, "brokers": kafka.address, "config": kafka.config}
        elif kind == "redis_stream":
            redis = stack.enter_context(RedisServer(directory / "streams"))
            settings = {"type": kind, "address": redis.address}
        else:
            monkeypatch.setitem(IMPLEMENTATIONS["update_log"], kind, BuiltIn("tests.fakes.memory_log:MemoryLog"))
            monkeypatch.setitem(IMPLEMENTATIONS["update_log_writer"], kind, BuiltIn("tests.fakes.memory_log:MemoryLogWriter"))
            name = f"memory-{next(_names)}"
            settings, memory = {"type": kind, "brokers": name}, MemoryBroker.by_name[name]
        yield stack.enter_context(closing(Log(settings, memory)))


@pytest.fixture
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    with opened(getattr(request, "param", "memory"), tmp_path, monkeypatch) as log:
        yield log


Make = Callable[..., dict[str, Any]]


@pytest.fixture
def document(tmp_path: Path, request: pytest.FixtureRequest, log: Log) -> Make:
    """A model of two tables that follows the log."""

    def make(host: str = "rocks_db", *, updates: Any = None, versions: int = 1, **source: Any) -> dict[str, Any]:
        for number in range(1, versions + 1):
            if not (tmp_path / str(number)).exists():
                tables = {table: (KEYS, vectors_of(KEYS, dim, 0)) for table, dim in DIMS.items()}
                write_version(tmp_path / str(number), tables, updates=updates)
        model = model_of("ranker", [tmp_path / "1" / table for table in DIMS], DIMS, max_batch_size=3000)
        model |= {"gpucacheper": 0.5, "cache_refresh_percentage_per_iteration": 1.0, "hit_rate_threshold": 1.1, "checks": False}
        model["versions"] = [
            {"version": number, "sparse_files": [str(tmp_path / str(number) / table) for table in DIMS]}
            for number in range(2, versions + 1)
        ]
        kind = host.split(",")[0]
        persistent = tmp_path / "database" if kind in ("rocks_db", "row_files") else None
        whole = document_of(
            model, persistent=persistent, kind=kind, update_source={**log.settings, "poll_timeout_ms": 50, **source}
        )
        if "redis" in host:
            server = RedisServer(tmp_path / "redis").start()
            request.addfinalizer(server.kill)
            whole["volatile_db"] = {"type": "redis_cluster", "address": server.address, "num_partitions": 4}
        return whole

    return make


def caught_up(server: hps.HPS, positions: dict[str, dict[str, str]], version: str = "1") -> list[UpdateStatus]:
    """Wait until every table is where its last message is."""

    def statuses() -> list[UpdateStatus]:
        return [update for update in server.updates() if update.version == version]

    wait_until(lambda: {status.table: status.positions for status in statuses()} == positions, f"{positions}, got {statuses()}")
    return statuses()


def check(server: hps.HPS, expected: Callable[[np.ndarray], np.ndarray], version: str | None = None) -> None:
    """Every path has, of each key, the vector of the change that `expected` says: -1 for the default vector."""
    changes = expected(KEYS)
    deployment = server.model("ranker", version)
    for index, (table, dim) in enumerate(DIMS.items()):
        wanted = np.where((changes < 0)[:, None], 0, vectors_of(KEYS, dim, 0) + 100_000 * changes[:, None]).astype(np.float32)
        for _ in range(2):  # from wherever, then from the cache
            if version is None:
                np.testing.assert_array_equal(server.lookup(KEYS, "ranker", table), wanted)
        for database in deployment.chain.databases:
            out, found = np.zeros_like(wanted), np.zeros(KEYS.size, np.bool_)
            database.fetch(deployment.tables[index].tag, KEYS, out, found)
            if database is deployment.chain.databases[-1]:
                np.testing.assert_array_equal(found, changes >= 0)
            np.testing.assert_array_equal(out[found], wanted[found])
        for cache in deployment.caches:
            for key in cache.dump(index)[::50].tolist():
                row = server.row(key, "ranker", table, version=deployment.version)
                assert row.tier == "embedding_cache"
                np.testing.assert_array_equal(row.vector, wanted[key - 1])


def feeds() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hps-updates")]


@pytest.mark.parametrize("host", ["hash_map", "rocks_db", "row_files"])
def test_what_is_published_is_in_every_tier(host: str, document: Make, log: Log) -> None:
    with hps.HPS(document(host)) as server:
        check(server, np.zeros_like)
        for change in (1, 2):
            positions = log.publish(change, KEYS[change::3], deleted=KEYS[:: 7 * change])
            statuses = caught_up(server, positions)
        assert [(status.table, status.behind, status.lag_s, status.problem) for status in statuses] == [
            ("item", 0, 0, ""),
            ("user", 0, 0, ""),
        ]

        def expected(keys: np.ndarray) -> np.ndarray:
            changes = np.zeros_like(keys)
            for change in (1, 2):
                changes[change::3] = change
                changes[:: 7 * change] = -1
            return changes

        check(server, expected)
    assert feeds() == []


@pytest.mark.parametrize("copied", [["item"], ["item", "user"]])
def test_a_table_of_which_the_network_has_a_copy_follows_once_that_may_be_stale(
    copied: list[str], document: Make, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_points.install(tmp_path / "engine", "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
    monkeypatch.syspath_prepend(tmp_path / "engine")
    (tmp_path / "dense.json").write_text("{}")
    whole, reads = document(), {"item": {"table": "item"}}
    dense = {"format": "arrays", "file": str(tmp_path / "dense.json"), "inputs": reads, "outputs": ["score"]}
    whole["models"][0]["dense"] = {**dense, "stale_copies": copied}
    row = KEYS[:1], np.zeros((1, DIMS["item"]), np.float32), "ranker", "item"
    with hps.HPS(whole) as server:
        [entry] = server.config.models
        for change in (1, 2):
            positions = log.publish(change)
            statuses = caught_up(server, {table: {} if table in copied else positions[table] for table in DIMS})
            assert {status.table for status in statuses if "has a copy" in status.problem and not status.connected} == set(
                copied
            )
            np.testing.assert_array_equal(server.lookup(KEYS, "ranker", "item"), vectors_of(KEYS, DIMS["item"], 0))
            for refused in (lambda: server.insert(*row), lambda: server.delete(row[0], *row[2:])):
                with pytest.raises(hps.StaleCopyError, match=r"copy of 'item'.*allow_stale_copy"):
                    refused()
            assert (entry.dense is not None, server.versions("ranker")[0].stale_copies) == (True, tuple(copied))
            allowed = entry.dense.model_copy(update={"allow_stale_copy": True})
            server.deploy(entry.model_copy(update={"dense": allowed}))
            assert not any(one.problem for one in caught_up(server, positions))
            check(server, lambda keys, change=change: change * (keys % 2))
            if change == 1:
                server.undeploy("ranker")
                server.deploy(entry, force=True)
        assert server.insert(*row) == "1"
        server.undeploy("ranker")
        assert (server.updates(), feeds()) == ([], [])


@pytest.mark.parametrize("host", ["hash_map", "rocks_db", "row_files"])
def test_a_restart_goes_on_where_it_stopped(host: str, document: Make, log: Log) -> None:
    whole = document(host)
    with hps.HPS(whole) as server:
        caught_up(server, log.publish(1))
    positions = log.publish(2, KEYS[::3])
    with hps.HPS(whole) as server:
        rows = {one.table: one.rows for one in caught_up(server, positions)}
        read = KEYS[::3].size + (KEYS[::2].size if host == "hash_map" else 0)  # which has its rows from the files again
        assert rows == {"user": read, "item": read}
        check(server, lambda keys: np.where(keys % 3 == 1, 2, keys % 2))


def test_an_empty_volume_catches_up_from_where_its_files_end(document: Make, log: Log) -> None:
    """The first change is in the files, as far as anybody can tell: to apply it would take the rows back."""
    contained = log.publish(1)
    positions = log.publish(2, KEYS[::4])
    by_number = {table: {at.rpartition("/")[2]: one for at, one in held.items()} for table, held in contained.items()}
    with hps.HPS(document(updates={"user": contained["user"], "item": by_number["item"]})) as server:
        assert {one.rows for one in caught_up(server, positions)} == {KEYS[::4].size}
        check(server, lambda keys: np.where(keys % 4 == 1, 2, 0))


def test_all_versions_in_service_follow_the_log_and_kept_ones_catch_up_when_they_serve_again(document: Make, log: Log) -> None:
    whole = document(versions=3)
    whole["models"][0]["version_policy"] = {"specific": {"versions": [1, 2]}}
    with hps.HPS(whole) as server:
        positions = log.publish(1)
        for version in ("1", "2"):
            caught_up(server, positions, version)
            check(server, lambda keys: keys % 2, version)
        server.undeploy("ranker", "1")
        assert {update.version for update in server.updates()} == {"2"}
        server.deploy("ranker", "3")  # 2 stays: the policy names it
        assert {update.version for update in server.updates()} == {"2", "3"}
    assert feeds() == []


def test_a_roll_back_follows_the_log_from_where_its_version_was(document: Make, log: Log) -> None:
    with hps.HPS(document(versions=2), deploy_models=False) as server:
        server.deploy("ranker", "1")
        caught_up(server, log.publish(1))
        server.deploy("ranker", "2")
        wait_until(lambda: {update.version for update in server.updates()} == {"2"}, "the feed of version 1 to end")
        positions = log.publish(2, KEYS[::3])
        caught_up(server, positions, "2")
        server.rollback("ranker")
        assert {one.rows for one in caught_up(server, positions)} == {KEYS[::3].size}
        check(server, lambda keys: np.where(keys % 3 == 1, 2, keys % 2))


def test_a_feed_that_gave_up_begins_again_with_a_successor(document: Make, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document()) as server:
        caught_up(server, log.publish(1))
        (feed,) = server._updates._feeds

        def refuse(*_: Any) -> int:
            raise NotReadyError("retired")

        with monkeypatch.context() as patched:
            patched.setattr("hps.updates.feed._REPLACEMENT_WAIT_S", 0.0)
            patched.setattr(type(feed._target), "apply", refuse)
            positions = log.publish(2, KEYS[::3])
            wait_until(lambda: not feed.alive, "the feed to give up")
        [entry], before = server.config.models, server.model("ranker")
        for cached in (1.0, 0.7):
            server.deploy(entry.model_copy(update={"gpucacheper": cached}))
            assert server.model("ranker") is not before
            caught_up(server, positions)
            assert len(feeds()) == 1
        check(server, lambda keys: np.where(keys % 3 == 1, 2, keys % 2))
        (one,) = server._updates._feeds
        server.deploy(entry.model_copy(update={"gpucacheper": 1.0}))
        caught_up(server, log.publish(3))
        check(server, lambda keys: np.where(keys % 2 == 1, 3, np.where(keys % 3 == 1, 2, 0)))
        assert [*server._updates._feeds] == [one], "other settings of the same tables take it over"
        server.undeploy("ranker")
        assert (server.updates(), feeds()) == ([], [])


def test_a_version_does_not_wait_for_a_topic_that_nobody_has_made_and_says_what_it_waits_for(document: Make, log: Log) -> None:
    """A table that is behind, one whose database fails, and one of which nothing is known yet."""
    assert log.memory is not None
    log.memory.drop("hps_et.ranker.user")
    counts = dict.fromkeys(("rows_per_s", "rows", "stale_rows", "future_times"), 0)
    update = partial(UpdateStatus, "m", "1", topic="t", positions={}, dead_letters={}, connected=True, **counts)
    behind = update(table="a", behind=7, lag_s=9.5, problem="")
    failing = update(table="b", behind=7, lag_s=9.5, problem="the disk is full")
    unknown = update(table="c", behind=None, lag_s=None, problem="")
    with hps.HPS(document(ready_lag_s=0.5, ready_wait_s=PATIENCE_S)) as server:
        item, user = server.updates()
        assert (item.lag_s, user.lag_s, user.problem) == (0.0, None, "there is no topic hps_et.ranker.user")
        awaited = server._updates._waiting_text
        assert awaited([behind]) == "waiting for the updates of m.a (lag 9.5 s, 7 messages behind)"
        assert awaited([failing, behind, unknown]) == "waiting for the updates of m.b and 2 more tables (the disk is full)"
        assert awaited([unknown]) == f"waiting for the update log {log.settings['brokers']} (no answer yet)"


@pytest.mark.parametrize("how", ["the progress raises", "the server is closed"])
def test_a_deployment_that_ends_while_it_waits_leaves_nothing_behind(how: str, document: Make, log: Log) -> None:
    assert log.memory is not None
    log.memory.away = True

    class Stopping(NoProgress):
        def advance(self, tag: str, rows: int) -> None:
            if how == "the progress raises" and server.updates():  # it waits
                raise NotReadyError("the service is stopping")

    server = hps.HPS(document(ready_lag_s=0.5, ready_wait_s=PATIENCE_S), deploy_models=False)
    with server, ThreadPoolExecutor(1) as pool:
        deploying = pool.submit(server.deploy, "ranker", progress=Stopping())
        if how == "the server is closed":
            wait_until(server.updates, "the deployment to wait")
            server.close()
        with pytest.raises(NotReadyError, match=r"the service is stopping|the parameter server is closed"):
            deploying.result(PATIENCE_S)
        assert (server.models, server.updates(), feeds()) == ((), [], [])


BOTH = {"user", "item"}


@pytest.mark.parametrize(
    ("filters", "followed"),
    [
        ((["^hps_.+$"], ["nothing"]), BOTH),  # HugeCTR's default
        ((["nothing"], [".+"]), BOTH),
        ((["^ranker$"], []), BOTH),
        ((["rank"], []), BOTH),
        (([], [r"ranker\.user$"]), {"user"}),
        ((["^rank$", "other"], []), set()),
    ],
)
def test_filters_say_which_tables_follow(filters: Any, followed: set[str], document: Make) -> None:
    whole = document()
    whole["volatile_db"]["update_filters"], whole["persistent_db"]["update_filters"] = filters
    with hps.HPS(whole) as server:
        assert {update.table for update in server.updates()} == followed


@pytest.mark.parametrize(
    ("host", "group", "named"),
    [("rocks_db", "", "hps.persistent.{host}"), ("hash_map", "", "hps.volatile.{host}"), ("rocks_db", "mine", "mine")],
)
def test_positions_are_committed_under_hugectrs_names(host: str, group: str, named: str, document: Make, log: Log) -> None:
    assert log.memory is not None
    with hps.HPS(document(host, group=group, max_commit_interval=1)) as server:
        positions = log.publish(1)
        caught_up(server, positions)
    committed = log.memory.committed[named.format(host=os.uname().nodename)]
    assert {str(at): one for at, one in committed.items()} == {**positions["user"], **positions["item"]}


def test_what_is_wrong_with_the_log_is_said_before_anything_is_loaded(document: Make) -> None:
    whole = document(type="kafka_message_queue", brokers="127.0.0.1:1", config={"no.such.setting": 1})
    with pytest.raises(hps.ConfigError, match=r"no\.such\.setting"):
        hps.HPS(whole)
