"""A tabletop of faults: of each, the alert that fires, the line in the log and the metric that name it, and the end of it.

Every fault is a real one, and what Prometheus is given is what the service says of itself meanwhile; see `Timeline`. The alerts
at the end of a phase are all that fire: none is missing, and none misleads.
"""

import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import hps
from hps.configuration.load import UpdateSourceConfig
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.serve.frontend import exchange
from hps.testing.waiting import wait_until
from hps.types import TableSpec
from hps.updates.publisher import Publisher, open_writer
from tests.fakes.fake_parameter_server import FakeParameterServer
from tests.fakes.full_device import FullDevice
from tests.fakes.memory_log import MemoryLog
from tests.ring2.stores.rocks_db.test_rocks_db_faults import mounted
from tests.servers.alert_rules import Timeline, scrape
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import RunningService, document_of, model_of, running_service

ROWS, DIM = 2000, 4
KEYS = np.arange(ROWS)
LOOKUP, ROUTE = "/v1/models/shop/lookup", "/v1/models/{model}/lookup"
pytestmark = pytest.mark.promtool
BEFORE, FAULT, AFTER = 120, 30, 100  # minutes


class Tabletop:
    """Serves, and keeps the timeline of one fault. *For one test.*"""

    def __init__(self, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.stack = ExitStack()
        self._directory = directory
        self._log = caplog
        self._replicas: dict[str, httpx.Client] = {}

    def write(self, name: str = "1", dim: int = DIM, value: float = 1.0) -> str:
        """Model files of one table."""
        hps.write_sparse_model(self._directory / name, (KEYS, np.full((ROWS, dim), value, np.float32)), overwrite=True)
        return str(self._directory / name)

    def serve(
        self, *, model: Any = (), parameter_server: Any = None, persistent: Path | None = None, **more: Any
    ) -> RunningService:
        """Start a replica: over its own RocksDB, without an embedding cache unless `model` says otherwise."""
        name = f"hps-{len(self._replicas) + 1}"
        entry = model_of("shop", [self.write()], {"item": DIM}, gpucache=False, max_batch_size=ROWS) | dict(model)
        document = document_of(entry, persistent=persistent or self._directory / name) | more
        self._life = self.stack.enter_context(ExitStack())
        self._start = lambda: self._life.enter_context(running_service(document, parameter_server))
        service = self._start()
        self._replicas[name] = service.client
        self.timeline = Timeline(self._directory, self._replicas)
        return service

    def restart(self) -> RunningService:
        """End the replica that was started last, and start it again."""
        self._life.close()
        service = self._start()
        self._replicas[list(self._replicas)[-1]] = service.client
        return service

    def value(self, name: str, **labels: str) -> float:
        """What the first replica said last."""
        return self.timeline.now.value(name, **labels)

    def said(self, pattern: str, level: str = "WARNING") -> None:
        """There is such a line in the log, or soon will be: late tables are looked for once a second."""
        wait_until(
            lambda: any(record.levelname == level and re.search(pattern, record.getMessage()) for record in self._log.records),
            f"a line of the log says {pattern!r}",
        )

    def silent(self, text: str) -> None:
        assert text not in self._log.text

    def before(self, work: Callable[[], object]) -> None:
        """Hours in which nothing is wrong."""
        self.timeline.phase(BEFORE, work)

    def fault(self, work: Callable[[], object], *alerts: str) -> None:
        """Half an hour of the fault, at the end of which these alerts fire."""
        self.timeline.phase(FAULT, work, alerts)

    def after(self, work: Callable[[], object]) -> None:
        """Hours in which nothing is wrong any more; then promtool judges all of it."""
        self.timeline.phase(AFTER, work)
        self.timeline.check()


@pytest.fixture
def tabletop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Tabletop]:
    caplog.set_level("INFO", "hps")
    tabletop = Tabletop(tmp_path, caplog)
    with tabletop.stack:
        yield tabletop


def look_up(service: RunningService, keys: Any = KEYS[:100], times: int = 30, status: int = 200) -> None:
    for _ in range(times):
        answer = service.client.post(LOOKUP, json={"tables": {"item": np.asarray(keys).tolist()}})
        assert answer.status_code == status, answer.text


@pytest.mark.redis
@pytest.mark.parametrize("promotes", [False, True])
def test_redis_gone(tabletop, tmp_path, promotes):
    """Reads fail; where lookups promote, the first promotion fails, and then the table is not read before it is dropped."""
    redis = tabletop.stack.enter_context(RedisServer(tmp_path / "redis"))
    volatile = {"type": "redis_cluster", "address": redis.address, "num_partitions": 4, "cache_missed_embeddings": promotes}
    service = tabletop.serve(volatile_db=volatile)
    server = service.app.lifecycle.server
    tabletop.before(lambda: look_up(service))
    redis.kill()
    look_up(service, times=1)
    server.drain()
    operation = "write" if promotes else "read"

    def errors():
        return scrape(service.client).value("hps_tier_errors_total", operation=operation, tier="volatile_db")

    def work():
        before = errors()
        look_up(service)
        wait_until(lambda: look_up(service, times=1) or errors() > before + 1, "it was tried again")

    labels = f'{{instance="hps-1",operation="{operation}",tier="volatile_db"}}'
    quarantine = ['HPSTableQuarantined{instance="hps-1",job="hps",tag="hps_et.shop.item"}'] * promotes
    tabletop.fault(work, f"HPSTierSkipped{labels}", f"HPSTierErrors{labels}", *quarantine)
    assert tabletop.value("hps_tier_available", operation=operation, tier="volatile_db") == 0
    tabletop.said(rf"{operation}s (of|to) volatile_db \(redis_cluster\): redis 127\.0\.0\.1:\d+: connecting failed")
    redis.start()

    def healed():
        look_up(service, times=1)
        now = scrape(service.client)
        return all(now.value("hps_tier_available", operation=one, tier="volatile_db") for one in ("read", "write")) and (
            not promotes or not now.value("hps_table_quarantined")
        )

    wait_until(healed, "Redis is used again")
    tabletop.after(lambda: look_up(service))


def test_token_wrong(tabletop):
    service = tabletop.serve(service={"bearer_token": "the-right-one"})
    service.client.headers["Authorization"] = "Bearer the-right-one"
    tabletop.before(lambda: look_up(service))

    def with_the_old_token():
        for _ in range(10):
            wrong = {"Authorization": "Bearer one-of-last-week"}
            assert service.client.post(LOOKUP, json={"tables": {"item": [1]}}, headers=wrong).status_code == 401

    tabletop.fault(
        lambda: (with_the_old_token(), look_up(service)), f'HPSTokenRefused{{instance="hps-1",route="{ROUTE}",status="401"}}'
    )
    assert tabletop.value("hps_http_requests_total", route=ROUTE, status="401") == 10
    tabletop.said(rf"answering 401 to 127\.0\.0\.1: POST {LOOKUP}: the header .* has the wrong token")
    tabletop.silent("last-week")
    tabletop.silent("the-right-one")
    tabletop.after(lambda: look_up(service))


def deploy(service: RunningService, status: int = 200) -> None:
    """Deploy version 2."""
    answer = service.client.post("/v1/models/shop/deploy", json={"version": "2"})
    assert answer.status_code == status, answer.text
    look_up(service)


def with_two_versions(tabletop: Tabletop, **second: Any) -> dict[str, Any]:
    """Settings of a model whose second version is there, and is not served."""
    versions = [{"version": 2, "sparse_files": [tabletop.write("2", **second)]}]
    return {"versions": versions, "version_policy": {"specific": {"versions": [1]}}}


def test_wrong_width_deployed(tabletop):
    service = tabletop.serve(model=with_two_versions(tabletop, dim=DIM + 1))
    tabletop.before(lambda: look_up(service))
    tabletop.fault(lambda: deploy(service, 400), 'HPSDeployFailed{change="deploy",instance="hps-1",model="shop"}')
    assert tabletop.value("hps_model_changes_total", change="deploy", model="shop", outcome="failed") == 1
    assert tabletop.value("hps_model_version", model="shop", version="1", state="serving") == 1
    tabletop.said(r"POST /v1/models/shop/deploy version 2.*127\.0\.0\.1.*: failed \(400\): .*width")
    tabletop.write("2")
    tabletop.after(lambda: deploy(service))


def test_stale_replica(tabletop):
    model = with_two_versions(tabletop, value=2.0)
    fresh, stale = tabletop.serve(model=model), tabletop.serve(model=model)

    def on_both():
        look_up(fresh)
        look_up(stale)

    tabletop.before(on_both)
    deploy(fresh)
    tabletop.fault(on_both, 'HPSReplicasDisagree{model="shop"}')
    assert tabletop.value("hps_model_version", model="shop", version="2", state="serving") == 1
    tabletop.said("POST /v1/models/shop/deploy version 2.*: done after", "INFO")  # by hps-1 alone
    deploy(stale)
    tabletop.after(on_both)


def test_disk_full(tabletop, tmp_path):
    disk = tabletop.stack.enter_context(mounted(tmp_path / "disk", (b"none", b"tmpfs", 0, b"size=16m")))
    service = tabletop.serve(persistent=disk / "rocksdb")

    def write_rows():
        rows = {"keys": KEYS.tolist(), "vectors": np.full((ROWS, DIM), 3.0).tolist()}
        return service.client.post("/v1/models/shop/tables/item/rows", json=rows).status_code

    def work(status):
        look_up(service)
        assert status in [write_rows() for _ in range(12)]

    tabletop.before(lambda: work(200))
    with (disk / "filler").open("wb") as filler:
        filler.write(bytes(shutil.disk_usage(disk).free - 100_000))
    wait_until(lambda: write_rows() == 503, "the disk is full")
    tabletop.fault(
        lambda: work(503),
        'HPSTierSkipped{instance="hps-1",operation="write",tier="persistent_db"}',
        'HPSTierErrors{instance="hps-1",operation="write",tier="persistent_db"}',
        'HPSServerErrors{instance="hps-1"}',
        'HPSHitRateFell{instance="hps-1",model="shop",table="item",tier="volatile_db"}',  # rows that may be too new are dropped
    )
    assert tabletop.value("hps_tier_available", operation="write", tier="persistent_db") == 0
    tabletop.said(r"writes to persistent_db \(rocks_db\): .*No space left on device")
    (disk / "filler").unlink()
    wait_until(lambda: write_rows() == 200, "the database takes rows again")
    tabletop.after(lambda: work(200))


def test_hot_table_evicted(tabletop):
    volatile = {"type": "hash_map", "num_partitions": 1, "overflow_margin": 500, "cache_missed_embeddings": True}
    service = tabletop.serve(volatile_db=volatile)
    hot = KEYS[:200]
    server = service.app.lifecycle.server
    look_up(service, hot)
    server.drain()
    tabletop.before(lambda: look_up(service, hot))

    def with_others():
        for start in range(200, ROWS, 300):
            look_up(service, KEYS[start : start + 300], 1)
            server.drain()
            look_up(service, hot, 1)

    tabletop.fault(
        with_others,
        'HPSHitRateFell{instance="hps-1",model="shop",table="item",tier="volatile_db"}',
        'HPSEvicting{instance="hps-1",model="shop",table="item"}',
    )
    assert tabletop.value("hps_misses_total", model="shop", table="item", tier="volatile_db") > 1000
    assert tabletop.value("hps_tier_evictions_total", model="shop", table="item", tier="volatile_db") > 1000
    tabletop.said(r"hash map: table 'hps_et.shop.item' is full, \d+ rows were evicted .* at most 500 rows", "INFO")
    tabletop.after(lambda: look_up(service, hot))


class HeldBackLog(MemoryLog):
    """A log whose reader needs time for each message."""

    pause_s = 0.0

    def poll(self, timeout_s, most_bytes):
        messages = super().poll(timeout_s, most_bytes)
        time.sleep(self.pause_s * len(messages))
        return messages


@pytest.fixture
def logs(monkeypatch):
    """Settings of an update source, but for its broker."""
    monkeypatch.setitem(IMPLEMENTATIONS["update_log"], "memory", BuiltIn(f"{__name__}:HeldBackLog"))
    monkeypatch.setitem(IMPLEMENTATIONS["update_log_writer"], "memory", BuiltIn("tests.fakes.memory_log:MemoryLogWriter"))
    monkeypatch.setattr("hps.updates.feed._LATE_S", 0.5)
    monkeypatch.setattr(HeldBackLog, "pause_s", 0.0)
    return {"type": "memory", "poll_timeout_ms": 20, "max_batch_size": 1}


def lag_s(service):
    [status] = service.app.lifecycle.server.updates()
    return status.lag_s


def grow_late(service):
    since = lag_s(service)
    wait_until(lambda: lag_s(service) > since + 0.5, "the lag grows")


def test_lag_growing(tabletop, logs):
    source = {**logs, "brokers": "tabletop"}
    publisher = Publisher(
        open_writer(UpdateSourceConfig(**source)), "hps_et.shop.item", dim=DIM, create_partitions=1, owned=True
    )
    tabletop.stack.callback(publisher.close)
    service = tabletop.serve(update_source=source)

    def publish(messages):
        for key in range(messages):
            publisher.insert(KEYS[key : key + 1], np.full((1, DIM), 5, np.float32))
            publisher.flush()
        look_up(service)

    def publish_and_wait():
        publish(10)
        wait_until(lambda: lag_s(service) == 0, "nothing is behind")

    tabletop.before(publish_and_wait)
    HeldBackLog.pause_s = 0.05
    publish(200)
    wait_until(lambda: lag_s(service) > 0.6, "the table is late")
    labels = '{instance="hps-1",model="shop",table="item"}'
    tabletop.fault(lambda: grow_late(service), f"HPSUpdatesLate{labels}", f"HPSUpdatesFallBehind{labels}")
    assert tabletop.value("hps_update_lag_seconds", model="shop", table="item") > 0.6
    tabletop.said(r"updates of model 'shop', table 'item' are late: lag 1 s, \d+ messages behind")
    HeldBackLog.pause_s = 0.0
    publish_and_wait()
    tabletop.after(publish_and_wait)


def test_gpu_memory_gone_at_a_deployment(tabletop, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cpu", BuiltIn("tests.fakes.full_device:FullDevice"))
    monkeypatch.setattr(FullDevice, "free_rows", ROWS)
    service = tabletop.serve(model={"gpucache": True, "gpucacheper": 0.6, **with_two_versions(tabletop)})
    tabletop.before(lambda: look_up(service))
    failed = 'HPSDeployFailed{change="deploy",instance="hps-1",model="shop"}'
    tabletop.fault(lambda: deploy(service, 503), failed, 'HPSServerErrors{instance="hps-1"}')
    assert tabletop.value("hps_model_changes_total", change="deploy", model="shop", outcome="failed") == 1
    tabletop.said(r"deploy version 2.*: failed \(503\): .*embedding cache.* free")
    FullDevice.free_rows *= 2
    tabletop.after(lambda: deploy(service))


def test_a_device_that_fails_in_a_lookup(tabletop, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cpu", BuiltIn("tests.fakes.full_device:FullDevice"))
    monkeypatch.setattr(FullDevice, "broken", False)
    cached = {"gpucache": True, "gpucacheper": 0.6}
    service = tabletop.serve(model=cached)
    tabletop.before(lambda: look_up(service))
    FullDevice.broken = True
    tabletop.fault(lambda: look_up(service), 'HPSDeviceFailed{instance="hps-1"}')
    assert tabletop.value("hps_device_failed") == 1
    tabletop.said("device 0 is lost .*illegal memory access", "ERROR")
    FullDevice.broken = False
    service = tabletop.restart()
    tabletop.after(lambda: look_up(service))


class Flood:
    """Clients of a slow server, each of which sends something and waits. *For one test.*"""

    def __init__(self, tabletop: Tabletop, **service: Any) -> None:
        self._fake = FakeParameterServer("shop", [TableSpec("shop", "item", DIM, 0.0, 1000)])
        self._go_on = threading.Event()
        self._clients = tabletop.stack.enter_context(ExitStack())
        tabletop.stack.callback(self._go_on.set)
        self._fake.on_lookup = lambda: self._go_on.wait(60) and None
        self.service = tabletop.serve(parameter_server=self._fake, service=service)

    def send(self, count: int, content: bytes, *headers: str) -> list[socket.socket]:
        """Send a lookup, each time on a connection of its own."""
        lines = [f"POST {LOOKUP} HTTP/1.1", "Host: x", *(headers or [f"Content-Length: {len(content)}"]), "", ""]
        connections = []
        for _ in range(count):
            connections.append(self._clients.enter_context(self.service.connect()))
            connections[-1].sendall("\r\n".join(lines).encode() + content)
        return connections

    def ease(self) -> None:
        """All that was sent is answered, or gone."""
        self._go_on.set()
        self._clients.close()
        wait_until(lambda: self.service.connections <= 1, "the connections are gone")

    def quiet(self) -> None:
        self._go_on.set()
        look_up(self.service)
        self._go_on.clear()


MOST_PENDING = 100


def many_lookups(flood: Flood) -> None:
    flood.send(280, b'{"tables": {"item": [1]}}')
    wait_until(lambda: flood.service.frontend.refusals.refused["threads"] == 280 - MOST_PENDING, "the others are refused")


def large_bodies(flood: Flood) -> None:
    flood.send(3, b"x" * 600_000, "Content-Length: 900000")


def many_connections(flood: Flood) -> None:
    flood.send(20, b'{"tables": {"item": [1]}}')  # complete: requests that are sent in part would be closed for others
    wait_until(lambda: flood.service.requests == 20, "all lookups run or wait")
    (late,) = flood.send(1, b"")
    assert late.recv(12) == b"HTTP/1.1 503"


@pytest.mark.parametrize(
    ("reason", "limits", "work", "also"),
    [
        ("threads", {"lookup_threads": 2}, many_lookups, True),
        ("memory", {"max_held_bytes": 2_000_000, "max_body_bytes": 1_000_000}, large_bodies, True),
        ("connections", {"max_connections": 20}, many_connections, False),
    ],
    ids=["threads", "memory", "connections"],
)
def test_flood(tabletop, reason, limits, work, also, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_PENDING", MOST_PENDING)
    flood = Flood(tabletop, **limits)
    tabletop.before(flood.quiet)

    def all_at_once():
        work(flood)
        wait_until(lambda: flood.service.frontend.refusals.refused[reason], "something is refused")
        flood.ease()

    alerts = [f'HPSOverloaded{{instance="hps-1",reason="{reason}"}}'] + ['HPSServerErrors{instance="hps-1"}'] * also
    tabletop.fault(all_at_once, *alerts)
    assert tabletop.value("hps_http_refused_total", reason=reason) >= 1
    tabletop.said(f"refusing .*{ {'threads': 'lookup_threads', 'memory': 'max_held_bytes'}.get(reason, 'max_connections') }")
    tabletop.after(flood.quiet)
