"""Replicas behind a plain TCP balancer that follows readiness are stopped and started in turn: no request fails.

`HPS_ROLLING_STOPS=200` stops them that often; each stop takes about five seconds.
"""

import csv
import http.client
import json
import os
import select
import signal
import time
from contextlib import ExitStack

import httpx
import numpy as np
import pytest

import hps
from hps.testing.waiting import wait_until
from tests.servers.load import Load
from tests.servers.running_service import document_of, model_of

STOPS = int(os.environ.get("HPS_ROLLING_STOPS", "6"))
ROWS, DIM = 1000, 4
DRAIN_S = 1
BALANCER = """
defaults
    mode tcp
    retries 0
    timeout connect 2s
    timeout client 30s
    timeout server 30s
    timeout check 5s
frontend lookups
    bind {host}.1:8000
    default_backend replicas
frontend states
    mode http
    bind {host}.1:8404
    stats enable
    stats uri /
backend replicas
    option httpchk GET /v2/health/ready
    default-server check inter 100ms fall 2 rise 1
    server a {host}.2:8000
    server b {host}.3:8000
"""


class Client:
    """Looks up keys one request after the other, as `requests` and `urllib3` do: what fails is not sent again.

    Args:
        address: of the balancer.
        keep_alive: use a connection for as long as the server allows.
        pause_s: between two requests.
    """

    def __init__(self, address: str, *, keep_alive: bool, pause_s: float) -> None:
        self.connection = http.client.HTTPConnection(address, 8000, timeout=20)
        self.headers = {} if keep_alive else {"Connection": "close"}
        self.pause_s = pause_s

    def look_up(self, rng: np.random.Generator) -> list[object]:
        time.sleep(self.pause_s)
        if self.connection.sock and select.select([self.connection.sock], [], [], 0)[0]:
            self.connection.close()  # the server did, before any byte of this request was sent
        keys = rng.integers(0, ROWS, 2).tolist()
        try:
            self.connection.request("POST", "/v1/models/m/lookup", json.dumps({"tables": {"item": keys}}), self.headers)
            response = self.connection.getresponse()
            body = response.read()
        except BaseException:
            self.connection.close()
            raise
        right = response.status == 200 and json.loads(body) == {"tables": {"item": [[key] * DIM for key in keys]}}
        return [] if right else [(response.status, body)]


@pytest.mark.haproxy
def test_no_request_fails_while_replicas_are_stopped_and_started(tmp_path, children, record_property):
    host = f"127.{16 + os.getpid() % 200}.{time.monotonic_ns() // 1000 % 250}"  # ports of our own
    keys = np.arange(ROWS)
    hps.write_sparse_model(tmp_path / "item.model", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    document = document_of(model_of("m", [tmp_path / "item.model"], {"item": DIM}), service={"drain_s": DRAIN_S})
    (tmp_path / "ps.json").write_text(json.dumps(document))
    (tmp_path / "haproxy.cfg").write_text(BALANCER.format(host=host))
    replicas = {}

    def start(name):
        address = f"{host}.{'?ab'.index(name) + 1}"
        with (tmp_path / name).open("a") as log:
            replicas[name] = children.hps("serve", tmp_path / "ps.json", "--host", address, "--port", "8000", stderr=log)

    def up(name):
        assert replicas[name].poll() is None, (tmp_path / name).read_text()
        states = csv.DictReader(httpx.get(f"http://{host}.1:8404/;csv").text.splitlines())
        return any(row["svname"] == name and row["status"] == "UP" for row in states)

    start("a")
    start("b")
    for name, number in (("a", 2), ("b", 3)):
        wait_until(lambda number=number: ready(f"http://{host}.{number}:8000"), f"replica {name} is ready")
    children.start("haproxy", "-f", tmp_path / "haproxy.cfg")
    wait_until(lambda: ready(f"http://{host}.1:8000"), "the balancer answers")

    kinds = [(True, 0.005)] * 3 + [(False, 0.005)] * 3 + [(True, 2.5 * DRAIN_S)]
    clients = [Client(f"{host}.1", keep_alive=keep_alive, pause_s=pause_s) for keep_alive, pause_s in kinds]
    with ExitStack() as stack:
        for client in clients:
            stack.callback(client.connection.close)
        loads = [stack.enter_context(Load(client.look_up, 1)) for client in clients]
        for stop in range(STOPS):
            name = "ab"[stop % 2]
            for load in loads[:-1]:
                load.more(1)
            replicas[name].send_signal(signal.SIGTERM)
            assert replicas[name].wait(60) == 0, (tmp_path / name).read_text()
            start(name)
            wait_until(lambda name=name: up(name), f"replica {name} is up again")
            assert [load.problems for load in loads if load.problems] == [], f"after {stop + 1} stops"
    assert [load.problems for load in loads if load.problems] == []
    record_property("requests", sum(load.done for load in loads))


def ready(url):
    try:
        return httpx.get(f"{url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False
