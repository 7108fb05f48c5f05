"""The life of the service: loading, ready, failed, stopped; in this process and as `hps serve`."""

import json
import logging
import os
import re
import shlex
import signal
import sys
import threading

import httpx
import numpy as np
import pytest

import hps
from hps.ground.progress import LogProgress
from hps.ground.workers import THREADS, new_thread
from hps.service.lifecycle import Lifecycle
from hps.service.server import listen
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.running_service import RunningService, document_of, model_of, running_service, samples


@pytest.fixture
def document(tmp_path):
    keys = np.arange(100, dtype=np.int64)
    hps.write_sparse_model(tmp_path / "item.model", (keys, np.repeat(keys.astype(np.float32)[:, None], 3, axis=1)))
    model, service = model_of("m", [tmp_path / "item.model"], {"item": 3}), {"drain_s": 0}
    return document_of(model, persistent=tmp_path / "rocksdb", service=service)


class HeldProgress(LogProgress):
    """Holds the loading at the start of a table until it is released."""

    def __init__(self):
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def advance(self, tag, rows):
        self.entered.set()
        assert self.release.wait(PATIENCE_S)
        super().advance(tag, rows)


@pytest.fixture
def held(document):
    """A service whose loading is held."""
    progress = HeldProgress()
    document["service"]["drain_s"] = 3600
    service = RunningService(Lifecycle(hps.load_configuration(document), progress=progress))
    service.start()
    assert progress.entered.wait(PATIENCE_S)
    yield service, progress
    progress.release.set()
    assert service.stop()


def test_where_a_recording_cannot_begin_the_databases_are_closed(document, tmp_path):
    lifecycle = Lifecycle(hps.load_configuration(document))
    lifecycle.on_open.append(lambda server: server.record_trace(tmp_path / "no" / "directory"))
    lifecycle.start()
    wait_until(lambda: lifecycle.failure, "it has failed")
    assert isinstance(lifecycle.failure, hps.ModelFileError)
    hps.HPS(document).close()  # RocksDB has no two owners


def test_while_it_loads_it_is_live_and_counts_and_is_not_ready(held):
    service, progress = held
    client = service.client
    assert client.get("/v2/health/live").status_code == 200
    ready = client.get("/v2/health/ready")
    assert ready.status_code == 503
    assert ready.json()["reason"] == "loading m.item: 0 % (0 B of 2.0 kB, starting); 0 of 1 tables"
    assert client.get("/v2").json()["models"] == []
    assert samples(service)["hps_ready",] == 0
    loading = "model 'm' is not ready: loading m.item: 0 % (0 B of 2.0 kB, starting)"
    wait_until(lambda: loading in client.post("/v1/models/m/lookup", content=b"{}").text, "the front knows it")
    for response in (
        client.get("/v2/models/m"),
        client.get("/v2/models/m/ready"),
        client.post("/v1/models/m/lookup", json={"tables": {"item": [1]}}),
        client.post("/v2/models/m/infer", content=b"{}"),
    ):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert loading in response.json()["error"]
    assert client.post("/v1/models/other/lookup", json={"tables": {"item": [1]}}).status_code == 404
    progress.release.set()
    wait_until(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready")
    assert client.post("/v1/models/m/lookup", json={"tables": {"item": [7]}}).json() == {"tables": {"item": [[7, 7, 7]]}}
    assert samples(service)["hps_ready",] == 1


def test_a_process_that_lost_a_thread_is_not_live_and_says_which(document):
    with running_service(hps.load_configuration(document)) as service:
        assert service.client.get("/v2/health/live").json() == {"live": True}
        threads = [new_thread(name, lambda: [][0], lasting=name == "needed") for name in ("needed", "single")]
        for thread in reversed(threads):
            thread.start()
            thread.join(PATIENCE_S)
        answer = service.client.get("/v2/health/live")
        assert answer.status_code == 503
        assert answer.json()["live"] is False
        assert "hps-needed" in answer.json()["reason"]
        assert service.client.get("/v2/health/ready").status_code == 200  # lookups are answered until the restart
        found = samples(service)
        assert [found["hps_threads_ended_total", name] for name in ("hps-needed", "hps-single")] == [1, 1]
        problems = service.client.get("/v1/stats").json()["problems"]
        assert [one["level"] for one in problems if "hps-needed" in one["text"]] == ["error"]
    THREADS.clear()


def test_stopping_ends_the_loading_and_does_not_drain(held):
    service, progress = held
    service.server.stop(drain=True)
    wait_until(lambda: service.app.lifecycle.not_ready_reason == "shutting down", "it stops")
    progress.release.set()
    service._thread.join(PATIENCE_S)
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

    def serve(document, port=0, *options):
        path, log = tmp_path / "ps.json", tmp_path / "log"
        path.write_text(json.dumps(document))
        with log.open("wb") as stderr:
            environment = {**os.environ, "COLUMNS": "300"}
            process = children.hps("serve", path, "--port", port, *options, stderr=stderr, env=environment, real=True)
        return process, log

    return serve


def said(log, pattern):
    wait_until(lambda: re.search(pattern, log.read_text()), f"the log says {pattern}")
    return re.search(pattern, log.read_text())


def test_lookups_go_on_after_signals(document):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with running_service(document) as service:
            threads = [one for one in threading.enumerate() if one.name.startswith("hps-lookup-")]
            assert threads
            for turn in range(3):
                for one in threads:
                    signal.pthread_kill(one.ident, signal.SIGUSR1)
                answer = service.client.post("/v1/models/m/lookup", json={"tables": {"item": [turn]}})
                assert answer.json() == {"tables": {"item": [[turn] * 3]}}
            assert all(one.is_alive() for one in threads)
    finally:
        signal.signal(signal.SIGUSR1, before)


LATE_FRONT = """
import sys
from hps.cli.app import main
from hps.service.fronts.front import Front
from hps.testing.waiting import PATIENCE_S, wait_until
start = Front.start
async def late(front, *listeners):
    wait_until(lambda: "m.item: 100 rows in" in open(sys.argv[2] + ".log").read(), "the owner has loaded")
    sys.stderr.write("the front listens late\\n")
    await start(front, *listeners)
Front.start = late
main()
"""


def test_a_service_is_ready_when_its_fronts_listen(document, tmp_path, children):
    path, log = tmp_path / "ps.json", tmp_path / "ps.json.log"
    path.write_text(json.dumps(document))
    with log.open("wb") as stderr:
        children.start(sys.executable, "-c", LATE_FRONT, "serve", path, "--port", 0, "--fronts", 1, stderr=stderr)
    url = said(log, r"ready; try: curl -s (http://[\d.:]+)/")[1]
    assert log.read_text().index("listens late") < log.read_text().index("ready; try")
    assert httpx.get(f"{url}/v2/health/live").status_code == 200


def test_serve_prints_a_curl_that_answers_and_logs_each_step_of_its_end(document, serve):
    document["service"]["drain_s"] = 3600
    process, log = serve(document)
    url = said(log, r"listening on (\S+);")[1]
    command = shlex.split(said(log, r"try: (curl .*)")[1])
    answer = httpx.post(command[2], content=command[command.index("-d") + 1])
    assert answer.json() == {"tables": {"item": [[1, 1, 1], [2, 2, 2], [3, 3, 3]]}}
    process.send_signal(signal.SIGTERM)
    said(log, "SIGTERM: not ready from now on; requests are answered for 3600 s more")
    assert httpx.get(f"{url}/v2/health/ready").status_code == 503
    process.send_signal(signal.SIGTERM)  # ends the draining
    assert process.wait(PATIENCE_S) == 0
    steps = "SIGTERM: no longer listening", "requests have ended", "the databases are closed", "stopped, .* s after SIGTERM"
    found = [re.search(f"INFO hps.service.*: {step}", log.read_text()) for step in steps]
    assert all(found), log.read_text()
    assert sorted(found, key=lambda one: one.start()) == found
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("host", "says"), [("203.0.113.1", "Cannot assign"), ("no.such.host.invalid", "cannot listen on no.such")]
)
def test_an_address_that_is_not_ours_is_a_configuration_error(host, says):
    with pytest.raises(hps.ConfigError, match=says):
        listen(host, 0)


# -- a configuration that is read again -----------------------------------------------------------------------------------


@pytest.fixture
def edit(document, tmp_path, caplog):
    """Serve, then change the document and have it read again: `edit(change, says)` waits for the log to say that."""
    for name, dim in (("a", 2), ("b", 2)):
        keys = np.arange(10, dtype=np.int64)
        hps.write_sparse_model(tmp_path / name, (keys, np.repeat(keys.astype(np.float32)[:, None], dim, axis=1)))
    path = tmp_path / "ps.json"
    caplog.set_level(logging.INFO)
    with running_service(document) as service:

        def edit(change, *says):
            before = len(caplog.text)
            change(document)
            path.write_text(json.dumps(document))
            service.server.reload(path)
            wait_until(lambda: all(re.search(one, caplog.text[before:]) for one in says), f"the log says {says}")
            return caplog.text[before:]

        yield edit, service.client
    assert not [record for record in caplog.get_records("call") if record.exc_info]


def test_tokens_limits_and_the_log_level_change_while_it_serves(edit):
    edit, client = edit
    path, body = "/v1/models/m/lookup", {"tables": {"item": [1, 2]}}
    assert client.post(path, json=body).status_code == 200
    new = {"bearer_token": "secret-1", "max_keys_per_request": 1, "log_level": "debug"}
    said = edit(
        lambda document: document["service"].update(new), "max_keys_per_request is 1, was 1000000", "bearer_token is an"
    )
    assert "secret-1" not in said
    assert client.post(path, json=body).status_code == 401
    headers = {"Authorization": "Bearer secret-1"}
    response = client.post(path, json=body, headers=headers)
    assert (response.status_code, "expected at most 1" in response.text) == (413, True)
    limits = {"max_body_bytes": 5, "max_held_bytes": 70_000, "request_timeout_s": 3.5, "max_keys_per_request": 9}
    edit(lambda document: document["service"].update(limits), "max_body_bytes is 5", "max_keys_per_request is 9, was 1")
    assert "expected at most 5" in client.post(path, json=body, headers=headers).text
    edit(lambda document: document["service"].update(max_body_bytes=35_000), "max_body_bytes is 35000")
    assert client.post(path, json=body, headers=headers).status_code == 200
    held = client.post(path, json={"tables": {"item": [1] * 3000 + [2] * 6000}}, headers=headers)
    assert (held.status_code, "keys" in held.text) == (413, True)
    assert "nothing in it has changed" in edit(lambda _: None, "nothing in it has changed")


def test_models_come_and_go_while_it_serves(edit, tmp_path):
    edit, client = edit
    a, b = (model_of(name, [tmp_path / name], {"item": 2}) for name in "ab")

    def look_up(name):
        return client.post(f"/v1/models/{name}/lookup", json={"tables": {"item": [1]}})

    missing = {**a, "sparse_files": [str(tmp_path / "nowhere")]}
    edit(
        lambda document: document["models"].extend([missing, b]), "model a is new", "loading model a failed", "model b is ready"
    )
    assert look_up("b").json() == {"tables": {"item": [[1, 1]]}}
    response = client.get("/v2/models/a/ready")
    assert (response.status_code, "nowhere" in response.text) == (503, True)
    assert client.get("/v2/health/ready").status_code == 200
    edit(lambda document: document["models"].__setitem__(1, a), "model a is tried as it is now", "model a is ready after")
    assert look_up("a").status_code == 200
    edit(lambda document: document["models"].pop(0), "model m is gone", "model m is out of service")
    assert look_up("m").status_code == 404
    assert look_up("a").status_code == look_up("b").status_code == 200
    edit(lambda document: document["models"].append({**missing, "model": "c"}), "loading model c failed")
    edit(lambda document: document["models"].pop(), "model c is gone", "model c is out of service")
    assert client.get("/v2/models/c/ready").status_code == 404
    versions = [{"version": "2", "sparse_files": [str(tmp_path / "b")]}]
    edit(lambda document: document["models"][0].update(versions=versions), "model a has other versions; .*hps deploy a")
    assert client.get("/v2/models/a").json()["versions"] == ["1"]


def test_a_wrong_configuration_changes_nothing(edit):
    edit, client = edit

    def change(document):
        document["service"].update(bearer_token="new", max_held_bytes=1)
        document["models"][0]["gpucacheper"] = "much"

    edit(change, "nothing changes: .*", r"service.max_held_bytes: got 1", r"models\[0\].gpucacheper")
    assert client.post("/v1/models/m/lookup", json={"tables": {"item": [1]}}).status_code == 200
    edit(lambda document: document.clear(), "nothing changes")
    assert client.post("/v1/models/m/lookup", json={"tables": {"item": [1]}}).status_code == 200


def test_lines_have_the_format_of_the_configuration_and_the_level_of_the_command_line(document, serve, tmp_path):
    document["service"] |= {"log_format": "json", "log_level": "error", "keep_alive_s": "70"}
    document["model_source"] = {"timeout_s": "9"}
    process, log = serve(document, 0, "--log-level", "info")
    url = said(log, r"listening on (http://[\d.:]+);")[1]
    said(log, "ready; try")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    notices = [line for line in lines if line["logger"] == "hps.configuration.load"]
    assert [line["level"] for line in notices] == ["info"]
    assert "model_source.timeout_s, service.keep_alive_s" in notices[0]["message"]
    assert "listening on" in lines[0]["message"]
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)

    def read_again(says, **service):
        before = len(log.read_text())
        document["service"] |= service
        (tmp_path / "ps.json").write_text(json.dumps(document))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: re.search(says, log.read_text()[before:]), f"the log says {says}")

    read_again("INFO .*log_format is text, was json", log_format="text", access_log_per_s=3)
    httpx.get(f"{url}/v2", headers={"X-Request-Id": "abc"})
    said(log, "INFO .*request_id=abc")
    read_again('"changed: service.log_format is json', log_format="json")
    httpx.get(f"{url}/v2", headers={"X-Request-Id": "def"})
    said(log, '"request_id": "def"')
    read_again("service.log_level differs", log_level="critical")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert json.loads(log.read_text().splitlines()[-1])["level"] == "info"
    assert "Traceback" not in log.read_text()
