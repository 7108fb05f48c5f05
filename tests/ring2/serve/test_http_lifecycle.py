"""The life of the service: loading, ready, failed, stopped; in this process and as `hps serve`."""

import json
import logging
import re
import shlex
import signal
import sys
import threading

import httpx
import numpy as np
import pytest

import hps
from hps.ground.threads.workers import THREADS, new_thread
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.frontend.supervisor import bind
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.gated_file_system import gates
from tests.servers.running_service import RunningService, document_of, model_of, running_service, samples
from tests.servers.served_process import ServedProcess


@pytest.fixture
def document(tmp_path):
    keys = np.arange(100, dtype=np.int64)
    hps.write_sparse_model(tmp_path / "item.model", (keys, np.repeat(keys.astype(np.float32)[:, None], 3, axis=1)))
    model, service = model_of("m", [tmp_path / "item.model"], {"item": 3}), {"drain_s": 0}
    return document_of(model, persistent=tmp_path / "rocksdb", service=service)


@pytest.fixture
def held(document, tmp_path):
    """A service whose loading is held, and what releases it."""
    with gates("held") as (gate,):
        gate.hold_from = 0
        document["models"][0]["sparse_files"] = [f"gate://held{tmp_path}/item.model"]
        document["service"]["drain_s"] = 3600
        service = RunningService(Lifecycle(hps.load_configuration(document)))
        service.start()
        assert gate.entered.wait(PATIENCE_S)
        yield service, gate.release
        gate.release.set()
        assert service.stop()


def test_where_a_recording_cannot_begin_the_databases_are_closed(document, tmp_path):
    lifecycle = Lifecycle(hps.load_configuration(document))
    lifecycle.on_open.append(lambda server: server.record_trace(tmp_path / "no" / "directory"))
    lifecycle.start()
    wait_until(lambda: lifecycle.failure, "it has failed")
    assert isinstance(lifecycle.failure, hps.ModelFileError)
    hps.HPS(document).close()  # RocksDB has no two owners


def test_while_it_loads_it_is_live_and_counts_and_is_not_ready(held):
    service, release = held
    client = service.client
    assert client.get("/v2/health/live").status_code == 200
    ready = client.get("/v2/health/ready")
    assert (ready.status_code, client.get("/v2").json()["models"], samples(service)["hps_ready",]) == (503, [], 0)
    assert ready.json()["reason"].startswith("loading m.item: 0 % (0 B of 2.0 kB, starting); 0 of 1 tables")
    loading = "model 'm' is not ready: loading m.item: 0 % (0 B of 2.0 kB, starting)"
    wait_until(lambda: loading in client.post("/v1/models/m/lookup", content=b"{}").text, "the front knows it")
    for response in (
        client.get("/v2/models/m"),
        client.get("/v2/models/m/ready"),
        client.post("/v1/models/m/lookup", json={"tables": {"item": [1]}}),
        client.post("/v2/models/m/infer", content=b"{}"),
    ):
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert loading in response.json()["error"]
    assert client.post("/v1/models/other/lookup", json={"tables": {"item": [1]}}).status_code == 404
    release.set()
    wait_until(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready")
    assert client.post("/v1/models/m/lookup", json={"tables": {"item": [7]}}).json() == {"tables": {"item": [[7, 7, 7]]}}
    assert samples(service)["hps_ready",] == 1


def test_stopping_ends_the_loading_and_does_not_drain(held):
    service, release = held
    service.server.stop(drain=True)
    wait_until(lambda: service.app.lifecycle.not_ready_reason == "shutting down", "it stops")
    release.set()
    service._thread.join(PATIENCE_S)
    assert not service._thread.is_alive()
    assert service.app.lifecycle.opened is None


def test_a_process_that_lost_a_thread_is_not_live_and_says_which(document):
    with running_service(hps.load_configuration(document)) as service:
        assert service.client.get("/v2/health/live").json() == {"live": True}
        threads = [new_thread(name, lambda: [][0], lasting=name == "needed") for name in ("needed", "single")]
        for thread in reversed(threads):
            thread.start()
            thread.join(PATIENCE_S)
        answer = service.client.get("/v2/health/live")
        assert (answer.status_code, answer.json()["live"], "hps-needed" in answer.json()["reason"]) == (503, False, True)
        assert service.client.get("/v2/health/ready").status_code == 200  # lookups are answered until the restart
        found = samples(service)
        assert [found["hps_threads_ended_total", name] for name in ("hps-needed", "hps-single")] == [1, 1]
        problems = service.client.get("/v1/stats").json()["problems"]
        assert [problem["level"] for problem in problems if "hps-needed" in problem["text"]] == ["error"]
    THREADS.clear()


def test_a_parameter_server_of_the_callers_stays_open_and_one_of_its_own_is_closed(document):
    with running_service(document) as service:
        server = service.app.lifecycle.opened
    with pytest.raises(hps.NotReadyError):
        server.lookup([1], "m", "item")
    with hps.HPS(document) as server:  # RocksDB's lock is free
        with running_service(document, server):
            pass
        assert server.lookup([5], "m", "item").tolist() == [[5, 5, 5]]
    for host, says in (("203.0.113.1", "Cannot assign"), ("no.such.host.invalid", "cannot listen on no.such")):
        with pytest.raises(hps.ConfigError, match=says):
            bind(host, 0)


def test_lookups_go_on_after_signals(document):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with running_service(document) as service:
            threads = [one for one in threading.enumerate() if one.name.startswith("hps-lookup-")]
            assert threads
            for turn in range(3):
                for thread in threads:
                    signal.pthread_kill(thread.ident, signal.SIGUSR1)
                answer = service.client.post("/v1/models/m/lookup", json={"tables": {"item": [turn]}})
                assert answer.json() == {"tables": {"item": [[turn] * 3]}}
            assert all(thread.is_alive() for thread in threads)
    finally:
        signal.signal(signal.SIGUSR1, before)


LATE_FRONT = """
import sys
from hps.tools.cli.app import main
from hps.serve.frontend.frontend import Frontend
from hps.testing.waiting import PATIENCE_S, wait_until
start = Frontend.start
async def late(front, *listeners):
    wait_until(lambda: "m.item: 100 rows in" in open(sys.argv[2] + ".log").read(), "the engine has loaded")
    sys.stderr.write("the front listens late\\n")
    await start(front, *listeners)
Frontend.start = late
main()
"""


def test_a_service_is_ready_when_its_fronts_listen(document, tmp_path, children):
    path, log = tmp_path / "ps.json", tmp_path / "ps.json.log"
    path.write_text(json.dumps(document))
    with log.open("wb") as stderr:
        children.start(sys.executable, "-c", LATE_FRONT, "serve", path, "--port", 0, "--fronts", 1, stderr=stderr)
    wait_until(lambda: "ready; try" in log.read_text(), "it is ready")
    assert log.read_text().index("listens late") < log.read_text().index("ready; try")


def test_serve_prints_a_curl_that_answers_and_logs_each_step_of_its_end(document, tmp_path):
    with ServedProcess(document, tmp_path) as served:
        command = shlex.split(re.search(r"try: (curl .*)", served.log())[1])
        answer = httpx.post(command[2], content=command[command.index("-d") + 1])
        assert answer.json() == {"tables": {"item": [[1, 1, 1], [2, 2, 2], [3, 3, 3]]}}
        served.stop(signal.SIGTERM)
        steps = ("no longer listening", "requests have ended", "the databases are closed", "stopped, .* s after SIGTERM")
        assert re.search(".*".join(f"INFO hps.serve.*: .*{step}" for step in steps), served.log(), re.DOTALL), served.log()
        assert "Traceback" not in served.log()


@pytest.fixture
def edit(document, tmp_path, caplog):
    """Serve, then change the document and have it read again: `edit(change, says)` waits for the log to say that."""
    for name in "ab":
        hps.write_sparse_model(tmp_path / name, (np.arange(10), np.ones((10, 2), np.float32)))
    path = tmp_path / "ps.json"
    caplog.set_level(logging.INFO)
    with running_service(document) as service:

        def edit(change, *says):
            before = len(caplog.text)
            change(document)
            path.write_text(json.dumps(document))
            service.server.reload(path)
            wait_until(lambda: all(re.search(say, caplog.text[before:]) for say in says), f"the log says {says}")
            return caplog.text[before:]

        yield edit, service.client
    assert not [record for record in caplog.get_records("call") if record.exc_info]


def test_tokens_and_limits_change_while_it_serves(edit):
    edit, client = edit

    def refused(*keys, **headers):
        answer = client.post("/v1/models/m/lookup", json={"tables": {"item": keys}}, headers=headers)
        return "" if answer.status_code == 200 else answer.json()["error"]

    def change(*says, **settings):
        return edit(lambda document: document["service"].update(settings), *says)

    says = ("max_keys_per_request is 1, was 1000000", "bearer_token is an")
    assert "secret-1" not in change(*says, bearer_token="secret-1", max_keys_per_request=1, log_level="debug")
    assert "token" in refused(1)
    client.headers["authorization"] = "Bearer secret-1"
    assert "expected at most 1" in refused(1, 2)
    limits = {"max_body_bytes": 35_000, "max_held_bytes": 70_000, "request_timeout_s": 3.5, "max_keys_per_request": 9}
    change("max_body_bytes is 35000", "max_keys_per_request is 9, was 1", **limits)
    assert refused(1, 2) == ""
    assert "keys" in refused(*[1] * 9000)
    assert "expected at most 35000" in refused(*[1] * 20_000)
    assert "nothing in it has changed" in change("nothing in it has changed")


def test_models_come_and_go_while_it_serves(edit, tmp_path):
    """What becomes of each change of an entry is shown in tests/ring1/serve/test_reload.py."""
    edit, client = edit
    a, b = (model_of(name, [tmp_path / name], {"item": 2}) for name in "ab")
    missing = {**a, "sparse_files": [str(tmp_path / "nowhere")]}

    def models(change, *says):
        edit(lambda document: change(document["models"]), *says)

    models(lambda listed: listed.extend([missing, b]), "model a is new", "loading model a failed", "model b is ready")
    response = client.get("/v2/models/a/ready")
    assert (response.status_code, "nowhere" in response.text) == (503, True)
    assert client.get("/v2/health/ready").status_code == 200
    models(lambda listed: listed.__setitem__(1, a), "model a is tried as it is now", "model a is ready after")
    models(lambda listed: listed.pop(0), "model m is gone", "model m is out of service")
    for name, status in (("m", 404), ("a", 200), ("b", 200)):
        assert client.post(f"/v1/models/{name}/lookup", json={"tables": {"item": [1]}}).status_code == status
    models(lambda listed: listed.append({**missing, "model": "c"}), "loading model c failed")
    models(lambda listed: listed.pop(), "model c is gone", "model c is out of service")
    assert client.get("/v2/models/c/ready").status_code == 404


def test_a_wrong_configuration_changes_nothing(edit):
    edit, client = edit

    def change(document):
        document["service"].update(bearer_token="new", max_held_bytes=1)
        document["models"][0]["gpucacheper"] = "much"

    edit(change, "nothing changes: .*", r"service.max_held_bytes: got 1", r"models\[0\].gpucacheper")
    edit(lambda document: document.clear(), "nothing changes")
    assert client.post("/v1/models/m/lookup", json={"tables": {"item": [1]}}).status_code == 200


def test_lines_have_the_format_of_the_configuration_and_the_level_of_the_command_line(document, tmp_path):
    document["service"] |= {"log_format": "json", "log_level": "error", "keep_alive_s": "70"}
    document["model_source"] = {"timeout_s": "9"}
    with ServedProcess(document, tmp_path, 1, "--log-level", "info") as served:
        lines = [json.loads(line) for line in served.log().splitlines()]
        [notice] = [line for line in lines if line["logger"] == "hps.configuration.load"]
        assert (notice["level"], "model_source.timeout_s, service.keep_alive_s" in notice["message"]) == ("info", True)
        assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
        for settings, told, line in (
            ({"log_format": "text", "access_log_per_s": 3}, "INFO .*log_format is text, was json", "INFO .*request_id=abc"),
            ({"log_format": "json"}, '"changed: service.log_format is json', '"request_id": "def"'),
            ({"log_level": "critical"}, "service.log_level differs", '"request_id": "ghi"'),
        ):
            document["service"] |= settings
            (tmp_path / "ps.json").write_text(json.dumps(document))
            served.tell(signal.SIGHUP, told)
            httpx.get(f"{served.url}/v2", headers={"X-Request-Id": re.search("abc|def|ghi", line)[0]})
            wait_until(lambda line=line: re.search(line, served.log()), f"the log says {line}")
        served.stop(signal.SIGTERM)
        assert json.loads(served.log().splitlines()[-1])["level"] == "info"
        assert "Traceback" not in served.log()
