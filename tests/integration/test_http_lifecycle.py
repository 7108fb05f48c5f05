"""The life of the service: loading, ready, failed, stopped; in this process and as `hps serve`."""

import json
import os
import re
import shlex
import signal
import socket
import threading

import httpx
import numpy as np
import pytest

import hps
from hps.progress import LogProgress
from hps.service.lifecycle import Lifecycle
from hps.service.server import listen
from tests.servers.running_service import RunningService, document_of, model_of, running_service, wait_until

EXIT_S = 60


@pytest.fixture
def document(tmp_path):
    keys = np.arange(100, dtype=np.int64)
    hps.write_sparse_model(tmp_path / "item.model", (keys, np.repeat(keys.astype(np.float32)[:, None], 3, axis=1)))
    return document_of(model_of("m", [tmp_path / "item.model"], {"item": 3}), persistent=tmp_path / "rocksdb")


class HeldProgress(LogProgress):
    """Holds the loading at the start of a table until it is released."""

    def __init__(self):
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def advance(self, tag, rows):
        self.entered.set()
        assert self.release.wait(EXIT_S)
        super().advance(tag, rows)


@pytest.fixture
def held(document):
    """A service whose loading is held."""
    progress = HeldProgress()
    service = RunningService(Lifecycle(hps.load_configuration(document), progress=progress))
    service.start()
    assert progress.entered.wait(EXIT_S)
    yield service, progress
    progress.release.set()
    assert service.stop()


def test_while_it_loads_it_is_live_and_counts_and_is_not_ready(held):
    service, progress = held
    client = service.client
    assert client.get("/v2/health/live").status_code == 200
    ready = client.get("/v2/health/ready")
    assert ready.status_code == 503
    assert ready.json()["reason"] == "loading m.item: 0 % (0 B of 2.0 kB, starting); 0 of 1 tables"
    assert client.get("/v2").json()["models"] == []
    assert "hps_ready 0.0" in client.get("/metrics").text
    for response in (
        client.get("/v2/models/m"),
        client.get("/v2/models/m/ready"),
        client.post("/v1/models/m/lookup", json={"tables": {"item": [1]}}),
        client.post("/v2/models/m/infer", content=b"{}"),
    ):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "model 'm' is not ready: loading m.item: 0 % (0 B of 2.0 kB, starting)" in response.json()["error"]
    assert client.post("/v1/models/other/lookup", json={"tables": {"item": [1]}}).status_code == 404
    progress.release.set()
    wait_until(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready")
    assert client.post("/v1/models/m/lookup", json={"tables": {"item": [7]}}).json() == {"tables": {"item": [[7, 7, 7]]}}
    assert "hps_ready 1.0" in client.get("/metrics").text


def test_stopping_ends_the_loading(held):
    service, progress = held
    service.server.stop()
    wait_until(lambda: service.app.lifecycle.not_ready_reason == "shutting down", "it stops")
    progress.release.set()
    service._thread.join(EXIT_S)
    assert not service._thread.is_alive()
    assert service.app.lifecycle.opened is None


def test_what_was_held_open_is_closed_when_the_service_stops(document):
    with running_service(document) as service:
        server = service.app.lifecycle.opened
    with pytest.raises(hps.NotReadyError):
        server.lookup([1], "m", "item")
    with hps.HPS(document) as again:  # RocksDB's lock is free
        assert again.lookup([5], "m", "item").tolist() == [[5, 5, 5]]


def test_a_parameter_server_of_the_callers_stays_open(document):
    with hps.HPS(document) as server:
        with running_service(document, server) as service:
            assert service.client.get("/v2/health/ready").status_code == 200
        assert server.lookup([5], "m", "item").tolist() == [[5, 5, 5]]


@pytest.fixture
def serve(tmp_path, children):
    """Start `hps serve` on a free port, unless one is given; its standard error goes to a file."""

    def serve(document, port=0):
        path, log = tmp_path / "ps.json", tmp_path / "log"
        path.write_text(json.dumps(document))
        with log.open("wb") as stderr:
            return children.hps("serve", path, "--port", port, stderr=stderr, env={**os.environ, "COLUMNS": "300"}), log

    return serve


def said(log, pattern):
    wait_until(lambda: re.search(pattern, log.read_text()), f"the log says {pattern}")
    return re.search(pattern, log.read_text())


def test_serve_prints_a_curl_that_answers_and_ends_with_0_on_sigterm(document, serve):
    process, log = serve(document)
    command = shlex.split(said(log, r"try: (curl .*)")[1])
    url, body = command[2], command[command.index("-d") + 1]
    answer = httpx.post(url, content=body)
    assert answer.json() == {"tables": {"item": [[1, 1, 1], [2, 2, 2], [3, 3, 3]]}}
    process.send_signal(signal.SIGTERM)
    assert process.wait(EXIT_S) == 0
    assert "Traceback" not in log.read_text()


def test_serve_ends_on_an_interrupt_too(document, serve):
    process, log = serve(document)
    said(log, "listening on http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    assert process.wait(EXIT_S) in (0, 130)
    assert "Traceback" not in log.read_text()


def test_serve_fails_when_a_model_cannot_be_loaded(document, serve):
    document["models"][0]["sparse_files"] = ["/nowhere/item.model"]
    process, log = serve(document)
    assert process.wait(EXIT_S) == 2
    assert "/nowhere/item.model" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_serve_fails_before_it_loads_when_the_port_is_taken(document, serve):
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        process, log = serve(document, port)
        assert process.wait(EXIT_S) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in log.read_text()
    assert "loading" not in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("host", "says"), [("203.0.113.1", "Cannot assign"), ("no.such.host.invalid", "cannot listen on no.such")]
)
def test_an_address_that_is_not_ours_is_a_configuration_error(host, says):
    with pytest.raises(hps.ConfigError, match=says):
        listen(host, 0)


def test_ipv6_is_listened_on_where_it_is_there():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with listen("::1", 0) as listener:
        assert listener.family == socket.AF_INET6
