"""Servers start without a Redis that is away, take it in when it comes, and one of them fills it again where it lost rows."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.errors import DatabaseError, HPSError
from hps.stores.redis.layout import RedisLayout
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of, running_service

pytestmark = pytest.mark.redis
DIMS = {"user": 4, "item": 7}
KEYS = np.arange(3000)
ABSENT = KEYS + 10**9


def vectors_of(dim: int, content: int = 1) -> np.ndarray:
    return (KEYS[:, None] * 16 + np.arange(dim) + content * 100_000).astype(np.float32)


def check(server: hps.HPS, content: int = 1) -> None:
    """Every key has its vector, and an absent one the default."""
    answer = server.lookup_tables(dict.fromkeys(DIMS, np.concatenate([KEYS, ABSENT[:2]])), "ranker")
    for table, dim in DIMS.items():
        np.testing.assert_array_equal(answer[table][:-2], vectors_of(dim, content))
        assert not answer[table][-2:].any()


class Fleet:
    """Replicas over one Redis, each with a RocksDB of its own, or with none."""

    def __init__(self, directory: Path, servers: ExitStack) -> None:
        self._directory, self._servers = directory, servers
        self.redis = RedisServer(directory / "redis", "--appendonly", "yes", "--appendfsync", "always")
        servers.callback(self.redis.kill)
        for content in (1, 2):
            for table, dim in DIMS.items():
                hps.write_sparse_model(directory / "versions" / str(content) / table, (KEYS, vectors_of(dim, content)))

    def document(self, replica: str = "a", *, rocks: bool = True, **changes: Any) -> dict[str, Any]:
        place = str(self._directory / "versions")
        entry = {"version_path": place, "version_policy": {"specific": {"versions": [1]}}, "gpucache": False, **changes}
        model = model_of("ranker", list(DIMS), DIMS, max_batch_size=4000, **entry)
        volatile = {"type": "redis", "address": self.redis.address, "num_partitions": 3}
        persistent = self._directory / f"rocks-{replica}" if rocks else None
        return document_of(model, volatile_db=volatile, persistent=persistent)

    def start(self, *arguments: Any, **changes: Any) -> hps.HPS:
        return self._servers.enter_context(hps.HPS(self.document(*arguments, **changes)))

    def rows(self) -> int:
        """Rows of all tables in Redis."""
        with self.redis.client() as client:
            return sum(client.hlen(key) for key in client.scan_iter("hps_et{*}v"))

    def empty(self) -> None:
        with self.redis.client() as client:
            client.flushall()

    def restart_empty(self) -> None:
        """Let Redis come back as one that has lost its disk."""
        self.redis.kill()
        for file in (self.redis.directory / "appendonlydir").glob("*"):
            file.unlink()
        self.redis.start()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr("hps.versions.volatile_tier.POLL_S", 0.05)
    monkeypatch.setattr("hps.versions.volatile_tier._PIECE_ROWS", 500)
    with ExitStack() as servers:
        yield Fleet(tmp_path, servers)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result


def whole(*servers: hps.HPS) -> Callable[[], bool]:
    return lambda: not any(server.degraded for server in servers)


def test_a_server_starts_without_redis_and_takes_it_in_when_it_comes(fleet: Fleet) -> None:
    for _ in range(3):
        with hps.HPS(fleet.document()) as server:
            check(server)
            (text,) = server.degraded
            assert text.startswith("redis_cluster is away: redis: none of 1 nodes answered")
    server = fleet.start()
    fleet.redis.start()
    wait_until(whole(server), "Redis is taken in")
    assert fleet.rows() == len(DIMS) * KEYS.size
    check(server)
    hits = {tier.tier: tier.hits for tier in server.stats().models[0].tables[0].tiers}
    assert hits["volatile_db"] == KEYS.size


def test_health_page_and_metrics_say_that_redis_is_away(fleet: Fleet) -> None:
    with running_service(fleet.document()) as service:
        ready = service.client.get("/v2/health/ready")
        assert ready.status_code == 200
        assert ready.json()["degraded"].startswith("redis_cluster is away")
        assert "redis_cluster is away" in service.client.get("/v1/stats").json()["service"]["degraded"]
        metrics = service.client.get("/metrics").text
        assert "hps_degraded 1" in metrics
        (line,) = [
            splitline for splitline in metrics.splitlines() if re.match('hps_tier_available.*"read".*volatile_db', splitline)
        ]
        assert line.endswith(" 0")
        output = run("deploy", "ranker", "--url", service.url).output
        assert "ranker: degraded: redis_cluster is away" in output
        assert "`hps refresh ranker` refills lost rows immediately" in output
        assert "degraded: redis_cluster is away" in run("top", service.url, "--once", "--interval", "0.3").output
        fleet.redis.start()
        wait_until(lambda: service.client.get("/v2/health/ready").json() == {"ready": True}, "it is whole")
        assert "hps_degraded 0" in service.client.get("/metrics").text
        assert "degraded" not in run("refresh", "ranker", "--url", service.url).output


def test_a_write_without_redis_is_not_answered_with_the_older_row_that_redis_comes_back_with(fleet: Fleet) -> None:
    fleet.redis.start()
    key = KEYS[5:6]
    for version in (7, 8):  # also where this process is known in Redis as one that wrote
        with hps.HPS(fleet.document()) as server:
            server.insert(key, np.full((1, 4), version, np.float32), "ranker", "user")
    fleet.redis.kill()
    server = fleet.start()
    server.insert(key, np.full((1, 4), 9, np.float32), "ranker", "user")
    server.delete(KEYS[6:7], "ranker", "user")
    fleet.redis.start()
    for _ in range(3):
        np.testing.assert_array_equal(server.lookup(KEYS[5:7], "ranker", "user"), [[9] * 4, [0] * 4])
    wait_until(whole(server), "Redis is taken in")
    np.testing.assert_array_equal(server.lookup(KEYS[5:7], "ranker", "user"), [[9] * 4, [0] * 4])
    assert fleet.rows() == len(DIMS) * KEYS.size - 1


@pytest.mark.parametrize("restarts", [False, True])
def test_one_of_two_replicas_fills_an_emptied_redis_again(fleet: Fleet, restarts: bool) -> None:
    fleet.redis.start()
    servers = [fleet.start(name) for name in "ab"]
    for _ in range(2):  # the second time, too
        assert fleet.rows() == len(DIMS) * KEYS.size
        if restarts:
            fleet.restart_empty()
        else:
            fleet.empty()
        wait_until(lambda: any(server.degraded for server in servers) or fleet.rows(), "it is noticed")

        def filled() -> bool:
            for server in servers:
                check(server)
            return whole(*servers)() and fleet.rows() == len(DIMS) * KEYS.size

        wait_until(filled, "it is filled")


def test_a_partition_that_was_lost_is_filled_again(fleet: Fleet) -> None:
    """As of a cluster, one node of which came back empty."""
    fleet.redis.start()
    server = fleet.start()
    with fleet.redis.client() as client:
        layouts = [
            RedisLayout.of(tag.decode().split("{")[1].split("/p0}")[0], 4, 3) for tag in client.scan_iter("hps_et{*/p0}v")
        ]
        for layout in layouts:
            client.unlink(layout.partitions[1].values, layout.partitions[1].mark)
    assert fleet.rows() < len(DIMS) * KEYS.size
    wait_until(lambda: fleet.rows() == len(DIMS) * KEYS.size, "it is filled")
    wait_until(whole(server), "it is whole")
    check(server)


def test_writes_while_redis_is_filled_win(fleet: Fleet) -> None:
    fleet.redis.start()
    server = fleet.start()
    expected = vectors_of(4)
    for content in range(20):
        if content % 5 == 0:
            fleet.empty()
        some = slice(content, None, 50)
        expected[some] = content
        server.insert(KEYS[some], expected[some], "ranker", "user")
        np.testing.assert_array_equal(server.lookup(KEYS, "ranker", "user"), expected)
    wait_until(lambda: whole(server)() and fleet.rows() == len(DIMS) * KEYS.size, "it is filled")
    np.testing.assert_array_equal(server.lookup(KEYS, "ranker", "user"), expected)


def test_refresh_fills_redis_at_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.versions.volatile_tier.POLL_S", 3600.0)
    fleet.redis.start()
    server = fleet.start()
    fleet.empty()
    server.refresh("ranker")
    assert fleet.rows() == len(DIMS) * KEYS.size
    assert server.degraded == []
    fleet.redis.kill()
    server.refresh("ranker")  # from RocksDB
    check(server)


def test_a_version_is_deployed_while_redis_is_down_and_is_in_redis_afterwards(fleet: Fleet) -> None:
    fleet.redis.start()
    server = fleet.start()
    fleet.redis.kill()
    server.deploy("ranker", "2")
    check(server, 2)
    assert server.degraded
    server.rollback("ranker")
    check(server, 1)
    server.deploy("ranker", "2")
    fleet.redis.start()
    wait_until(whole(server), "Redis is taken in")
    check(server, 2)
    server.deploy("ranker", "1")
    check(server, 1)
    wait_until(whole(server), "both versions are in Redis")
    assert fleet.rows() == 2 * len(DIMS) * KEYS.size


def test_with_redis_alone_the_files_are_loaded_again_and_no_key_counts_as_absent_before(fleet: Fleet) -> None:
    fleet.redis.start()
    servers = [fleet.start(rocks=False) for _ in range(2)]
    for emptied in (fleet.empty, fleet.restart_empty):
        emptied()

        def loaded() -> bool:
            for server in servers:
                try:
                    check(server)
                except DatabaseError:
                    return False
            return whole(*servers)()

        wait_until(loaded, "it is loaded")
        assert fleet.rows() == len(DIMS) * KEYS.size


def test_with_redis_alone_writes_that_were_not_lost_are_not_replaced_by_the_files(fleet: Fleet) -> None:
    fleet.redis.start()
    server = fleet.start(rocks=False)
    server.insert(KEYS[:1], np.full((1, 4), 9, np.float32), "ranker", "user")
    with fleet.redis.client() as client:
        (key,) = client.scan_iter("hps_et{*user*/p0}m")
        client.unlink(key, key[:-1] + b"v")
    wait_until(lambda: any("deploy the model with force" in text for text in server.degraded), "it is said")
    with pytest.raises(DatabaseError):
        server.lookup(KEYS, "ranker", "user")


def test_a_server_with_redis_alone_does_not_start_without_it(fleet: Fleet) -> None:
    with pytest.raises(HPSError, match="none of 1 nodes answered"):
        fleet.start(rocks=False)


def test_a_static_cache_needs_no_redis(fleet: Fleet) -> None:
    server = fleet.start(rocks=False, embedding_cache_type="static", gpucache=True)
    check(server)
    assert server.degraded
    fleet.redis.start()
    wait_until(whole(server), "Redis is taken in")
    check(server)
