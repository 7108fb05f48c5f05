"""docs/runbooks.md is followed, word by word: each fault is a real one, its alert fires, the commands find it and mend it.

What Prometheus is given is what the replica says of itself meanwhile; the alerts at the end of a phase are all that fire.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

import hps
from hps.testing.waiting import wait_until
from tests.fakes.full_device import FullDevice
from tests.ring1.engine.test_lost_device import document as document  # fixtures
from tests.ring1.engine.test_lost_device import model as model
from tests.ring2.stores.rocks_db.test_rocks_db_faults import mounted
from tests.ring2.versions.test_checks_in_process import FIRST, KEYS, SHUFFLED, retrained
from tests.servers.alert_rules import Timeline, scrape
from tests.servers.certificates import Authority
from tests.servers.redis_server import RedisServer
from tests.servers.runbooks import Runbook, sections
from tests.servers.running_service import document_of, model_of, running_service
from tests.servers.served_process import ServedProcess

DIM = FIRST.shape[1]
BEFORE, FAULT, AFTER = 120, 30, 100  # minutes
MANY = 200  # lookups, of which one that a busy machine delays is less than 1 %
RESTART = "kill {}"  # a supervisor starts it again
LOOKUP = "/v1/models/ranking/lookup"
pytestmark = pytest.mark.promtool


class OnCall:
    """A served replica, the runbook of one fault, and the timeline that promtool judges. *For one test.*

    Attributes:
        service: the replica, of a polled repository with the model `ranking`.
        timeline: what it says of itself.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.repository, self.data = directory / "models", directory / "data"

    def publish(self, version: int, vectors: np.ndarray, keys: np.ndarray = KEYS) -> None:
        hps.write_version(self.repository / "ranking" / str(version), {"item": (keys, vectors)})

    def serve(self, title: str, *, disks: bool = False, kind: str = "rocks_db", service: Any = (), **more: Any) -> None:
        """Serve version 1, and open a runbook."""
        self.publish(1, FIRST)
        entry = model_of("ranking", ["item"], {"item": DIM}, gpucache=False, max_batch_size=10_000)
        (self.repository / "ranking" / "model.json").write_text(json.dumps(entry))
        polled = {"model_control_mode": "poll", "repository_poll_s": 0.1, "drain_s": 0, **dict(service)}
        places = {"persistent": self.data / "rows", "kind": kind, "model_repository": str(self.repository)}
        self.service = self.stack.enter_context(ServedProcess(document_of(**places, service=polled) | more, self.directory))
        self.client = self.stack.enter_context(httpx.Client(base_url=self.service.url, timeout=30))
        self.timeline = Timeline(self.directory, {"hps-1": self.client}, disks=disks)
        self.title = title

    def runbook(self, **variables: object) -> Runbook:
        known = {"HPS_URL": self.service.url, "MODEL": "ranking", "CONFIG": self.directory / "ps.json", "DATA": self.data}
        return Runbook(self.title, self.directory / "bin", **known, RESTART=RESTART.format(self.service.pid), **variables)

    def look_up(self, vectors: np.ndarray = FIRST, keys: np.ndarray = KEYS[:50], times: int = 1) -> None:
        for _ in range(times):
            answer = self.client.post(LOOKUP, json={"tables": {"item": keys.tolist()}})
            assert answer.status_code == 200, answer.text
            np.testing.assert_array_equal(np.array(answer.json()["tables"]["item"], np.float32), vectors[keys // 7])

    def states(self) -> dict[str, str]:
        """The state of each version."""
        [model] = self.client.get("/v1/models").json()["models"]
        return {version["version"]: version["state"] for version in model["versions"]}

    def ready(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.client.get("/v2/health/ready").json()
        except httpx.TransportError:
            return {}
        return answer

    def logs(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.service.log()), f"the log says {pattern!r}")

    def end(self, book: Runbook, vectors: np.ndarray = FIRST) -> None:
        """It is over, all steps were followed, and no alert fires any more."""
        wait_until(lambda: self.look_up(vectors) or book.is_over(), "it is over")  # type: ignore[func-returns-value]
        assert not book.left
        self.timeline.phase(AFTER, lambda: self.look_up(vectors, times=MANY))
        self.timeline.check()


@pytest.fixture
def on_call(tmp_path: Path) -> Iterator[OnCall]:
    with ExitStack() as stack:
        yield OnCall(tmp_path, stack)


def test_a_bad_version(on_call: OnCall) -> None:
    on_call.serve("A bad version")
    book = on_call.runbook()
    on_call.timeline.phase(BEFORE, lambda: on_call.look_up(times=MANY))

    def publish() -> None:
        on_call.publish(2, wrong := retrained())  # passes, and is wrong
        wait_until(lambda: on_call.states().get("2") == "serving", "version 2 serves")
        on_call.publish(3, SHUFFLED)
        wait_until(lambda: on_call.states().get("3") == "held", "version 3 is held")
        on_call.look_up(wrong, times=MANY)

    on_call.timeline.phase(FAULT, publish, ('HPSVersionHeld{instance="hps-1",model="ranking",version="3"}',))
    on_call.logs("version 3 is held, and 2 serves: vectors of item: alignment ")
    assert 'id="hpsversionheld"' in on_call.client.get("/runbooks").text, "where the alert leads"
    assert "version 3 is held: vectors of item: alignment" in book.follow("Find out")
    assert not book.is_over()
    book.follow("Mend, if a wrong version serves")
    on_call.look_up(FIRST)
    assert not book.is_over()
    book.follow("Mend, if a version is held")
    on_call.look_up(SHUFFLED)
    book.follow("Mend, once a good version is there")
    on_call.end(book, SHUFFLED)


def redis_tier(server: RedisServer, **more: Any) -> dict[str, Any]:
    return {"type": "redis_cluster", "address": server.address, "num_partitions": 4, **more}


@pytest.mark.redis
def test_redis_gone_and_then_empty(on_call: OnCall) -> None:
    server = on_call.stack.enter_context(RedisServer(on_call.directory / "redis"))
    on_call.serve("Redis gone or empty", volatile_db=redis_tier(server))
    book = on_call.runbook(REDIS=f"redis://{server.address}")
    on_call.timeline.phase(BEFORE, lambda: on_call.look_up(times=MANY))
    server.kill()

    def skipped() -> float:
        on_call.look_up()
        now = scrape(on_call.client)
        return now.value("hps_degraded") and not now.value("hps_tier_available", operation="read", tier="volatile_db")

    def work() -> None:
        wait_until(skipped, "Redis is skipped")
        before = scrape(on_call.client).value("hps_tier_errors_total", tier="volatile_db")
        errors = lambda: on_call.look_up() or scrape(on_call.client).value("hps_tier_errors_total", tier="volatile_db")  # noqa: E731
        wait_until(lambda: errors() > before, "it was tried again")
        on_call.look_up(times=MANY)

    labels = '{instance="hps-1",operation="read",tier="volatile_db"}'
    degraded = 'HPSDegraded{instance="hps-1"}'
    on_call.timeline.phase(FAULT, work, (degraded, f"HPSTierErrors{labels}", f"HPSTierSkipped{labels}"))
    on_call.logs(r"reads of volatile_db \(redis_cluster\): redis 127\.0\.0\.1:\d+: connecting failed")
    said = book.follow("Find out")
    assert "degraded" in said
    assert "Connection refused" in said
    assert not book.is_over()
    server.start()
    book.follow("Mend")
    on_call.end(book)
    with server.client() as client:
        assert sum(client.hlen(key) for key in client.keys("*v")) == KEYS.size


def test_a_wrong_prefix(on_call: OnCall) -> None:
    on_call.serve("Wrong prefix")
    wrong, right = f"{on_call.repository}-pord", str(on_call.repository)
    Path(wrong).mkdir()
    on_call.timeline.phase(BEFORE, lambda: on_call.look_up(times=MANY))
    config = on_call.directory / "ps.json"
    config.write_text(config.read_text().replace(right, wrong))
    on_call.service.stop()
    on_call.service.start(ready=False)

    def found_none() -> None:
        wait_until(lambda: "no model to serve" in on_call.ready().get("reason", ""), "it has found none")

    found_none()
    on_call.timeline.phase(FAULT, found_none, ('HPSNoModel{instance="hps-1"}', "HPSNoReplicaReady", "HPSReplicaLost"))
    on_call.logs(f"no model to serve: looked in {wrong} for <model>/model.json")
    book = on_call.runbook(WRONG=wrong, RIGHT=right)
    said = book.follow("Find out")
    assert said.count(f"looked in {wrong}") == 2
    assert not book.is_over()
    book.follow("Mend")
    on_call.service.start_again()
    on_call.end(book)


def fill(path: Path) -> None:
    """Write a file until the disk has no space left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def test_a_full_disk(on_call: OnCall) -> None:
    disk = on_call.stack.enter_context(mounted(on_call.directory / "data", (b"none", b"tmpfs", 0, b"size=64m")))
    on_call.serve("Disk full", disks=True, kind="row_files", volatile_db={"type": "disabled"})
    keys = np.arange(100_000, dtype=np.int64) * 7
    on_call.publish(2, np.tile(FIRST, (50, 1)), keys)
    wait_until(lambda: on_call.states().get("2") == "serving", "version 2 serves")
    on_call.publish(3, np.tile(FIRST, (50, 1)), keys)
    wait_until(lambda: on_call.states() == {"2": "kept", "3": "serving"}, "version 3 serves")

    def write(count: int = 500) -> int:
        rows = {"keys": KEYS[:count].tolist(), "vectors": FIRST[:count].tolist()}
        return on_call.client.post("/v1/models/ranking/tables/item/rows", json=rows).status_code

    def space() -> float:
        now = scrape(on_call.client)
        return now.values.get('hps_disk_free_bytes{tier="persistent_db"}', 0) / 64 / 2**20

    wait_until(lambda: space() > 0.2, "there is room")
    on_call.timeline.phase(BEFORE, lambda: (on_call.look_up(times=MANY), write()))

    def work() -> None:
        fill(disk / "filler")
        wait_until(lambda: write() == 503, "writes are refused")
        for _ in range(12):
            write()
        on_call.look_up(times=MANY)
        wait_until(lambda: space() < 0.1, "the metric knows")

    tier = '{instance="hps-1",operation="write",tier="persistent_db"}'
    alerts = (f"HPSTierSkipped{tier}", f"HPSTierErrors{tier}", 'HPSServerErrors{instance="hps-1"}')
    on_call.timeline.phase(FAULT, work, ('HPSDiskFillsUp{instance="hps-1",tier="persistent_db"}', *alerts))
    on_call.logs(r"writes to persistent_db \(row_files\): .*No space left on device")
    book = on_call.runbook(KEPT="2")
    said = book.follow("Find out")
    assert "100%" in said
    assert "kept" in said
    assert not book.is_over()
    book.follow("Mend")
    wait_until(lambda: write() == 200, "writes are taken")
    wait_until(lambda: space() > 0.1, "the metric knows")
    on_call.end(book)


BUSY = """
local function now() local t = redis.call('TIME') return t[1] * 1000000 + t[2] end
local start = now()
while now() - start < 150000 do end
"""


@contextmanager
def looking_up(on_call: OnCall) -> Iterator[None]:
    """Clients look up meanwhile."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            on_call.look_up()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.redis
def test_p99_rises(on_call: OnCall) -> None:
    server = on_call.stack.enter_context(RedisServer(on_call.directory / "redis"))
    on_call.serve("p99 rises", volatile_db=redis_tier(server))
    book = on_call.runbook(REDIS=f"redis://{server.address}", TABLE="item")
    on_call.timeline.phase(BEFORE, lambda: on_call.look_up(times=MANY))
    ended = threading.Event()

    def somebody_else() -> None:
        try:
            with server.client(socket_timeout=60, retry=None) as client:
                connection = client.connection_pool.get_connection()
                while not ended.is_set():
                    connection.send_command("EVAL", BUSY, 0)
                    connection.read_response()
        except redis.ConnectionError:
            ended.set()

    script = threading.Thread(target=somebody_else)
    script.start()
    on_call.stack.callback(script.join)
    on_call.stack.callback(ended.set)
    on_call.timeline.phase(FAULT, lambda: on_call.look_up(times=30), ('HPSSlowLookups{instance="hps-1",model="ranking"}',))
    with looking_up(on_call):
        said = book.follow("Find out")
    assert re.search(r"volatile \d+%", said), said
    assert "EVAL" in said
    assert not book.is_over()
    book.follow("Mend")
    assert ended.wait(60)
    on_call.end(book)


def test_one_gpu_lost(document: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The device is simulated: a cache that fails in every call, as CuPy's does after an illegal access."""

    def look_up(service: Any) -> None:
        assert service.client.post("/v1/models/shop/lookup", json={"tables": {"item": [1, 2]}}).status_code == 200

    replicas: dict[str, httpx.Client] = {}
    timeline = Timeline(tmp_path, replicas)
    with running_service(document) as service:
        replicas["hps-1"] = service.client
        book = Runbook("One GPU lost", tmp_path / "bin", HPS_URL=service.url, RESTART="true")
        timeline.phase(BEFORE, lambda: look_up(service))
        FullDevice.broken = True
        timeline.phase(FAULT, lambda: look_up(service), ('HPSDegraded{instance="hps-1"}', 'HPSDeviceFailed{instance="hps-1"}'))
        said = book.follow("Find out")
        assert "is lost: an illegal memory access was encountered" in said
        assert "hps_device_failed 1" in said
        assert not book.is_over()
        book.follow("Mend")
    assert [record for record in caplog.records if "is lost" in record.getMessage()]
    FullDevice.broken = False  # as by a reset or another host
    with running_service(document) as service:
        replicas["hps-1"] = service.client
        book.set(HPS_URL=service.url)
        wait_until(book.is_over, "it is over")
        timeline.phase(AFTER, lambda: look_up(service))
    timeline.check()
    assert not book.left


@pytest.mark.openssl
def test_a_certificate_expires(on_call: OnCall, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(on_call.directory)
    pair = authority.sign("hps", days=30)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    on_call.serve(
        "A certificate expires", service={"tls_certificate_path": str(pair.certificate), "tls_key_path": str(pair.key)}
    )
    on_call.timeline.phase(BEFORE, lambda: on_call.look_up(times=MANY))
    changed = "new connections use the certificate"
    authority.sign("hps", days=2)
    on_call.logs(changed)
    on_call.timeline.phase(FAULT, lambda: on_call.look_up(times=MANY), ('HPSCertificateExpires{instance="hps-1"}',))
    on_call.logs(f"WARNING.*the certificate in {pair.certificate} is valid until")
    new, places = authority.sign("hps", "new", days=30), {"CERTIFICATE": pair.certificate, "KEY": pair.key}
    book = on_call.runbook(**places, NEW_CERTIFICATE=new.certificate, NEW_KEY=new.key)
    assert book.follow("Find out").count("notAfter=") == 2
    assert not book.is_over()
    book.follow("Mend")
    on_call.end(book)


def test_every_runbook_is_followed() -> None:
    source = Path(__file__).read_text()
    assert [title for title in sections() if f'"{title}"' not in source] == []
