"""Models of a running server that are changed over HTTP and by commands: what is answered, logged and refused."""

import json
import logging
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.configuration.load import load_configuration
from hps.serve.engine.app import Application
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.frontend.supervisor import bind
from hps.serve.server import Server
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.tools.cli.app import app
from tests.fakes.gated_file_system import Gate, gates
from tests.servers.running_service import RunningService, document_of, model_of, running_service
from tests.servers.served_process import ServedProcess

DIM, ROWS = 4, 200


def write(directory: Path, version: int, dim: int = DIM) -> str:
    keys = np.arange(ROWS)
    hps.write_sparse_model(directory, (keys, np.full((ROWS, dim), version, np.float32)), overwrite=True)
    return str(directory)


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A model with versions 1, which is served at the start, and 2, and 3 whose files do not exist."""
    model = model_of("shop", [write(tmp_path / "1", 1)], {"item": DIM}, gpucacheper=1.0, hit_rate_threshold=1.1)
    places = {2: write(tmp_path / "2", 2), 3: str(tmp_path / "nowhere")}
    model["versions"] = [{"version": version, "sparse_files": [place]} for version, place in places.items()]
    model["version_policy"] = {"specific": {"versions": [1]}}
    return document_of(model, persistent=tmp_path / "rocksdb")


@pytest.fixture
def service(content: dict[str, Any]) -> Iterator[RunningService]:
    with running_service(content) as service:
        yield service


@pytest.fixture
def gate(content: dict[str, Any]) -> Iterator[Gate]:
    """Before the files of version 2: its load waits."""
    with gates("two") as [gate]:
        gate.hold_from = 0
        version = content["models"][0]["versions"][0]
        version["sparse_files"] = [f"gate://two{version['sparse_files'][0]}"]
        yield gate


def served(service: RunningService) -> float:
    answer = service.client.post("/v1/models/shop/lookup", json={"tables": {"item": [7]}})
    found: float = answer.raise_for_status().json()["tables"]["item"][0][0]
    return found


def listed(service: RunningService) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    answer = service.client.get("/v1/models").raise_for_status().json()
    return next(one for one in answer["models"] if one["name"] == "shop"), answer["changes"]


def run(*arguments: str, **environment: str) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", **environment})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_version_is_deployed_rolled_back_and_taken_out(service: RunningService) -> None:
    client, base = service.client, "/v1/models/shop"
    answer = client.post(f"{base}/deploy", content=b'{"version": "2"}').json()
    assert (answer["model"], answer["version"], answer["status"], answer["by"]) == ("shop", "2", 200, "127.0.0.1 (loopback)")
    model, changes = listed(service)
    [version] = [one for one in model["versions"] if one["state"] == "serving"]
    assert (model["state"], model["devices"], len(changes)) == ("ready", [0], 1)
    assert (version["version"], version["rows"]) == ("2", ROWS)
    assert version["size_bytes"].keys() == {"embedding_cache", "volatile_db", "persistent_db"}
    assert version["size_bytes"]["volatile_db"] == ROWS * DIM * 4
    for verb, body, now in (
        ("refresh", {}, "2"),
        ("rollback", {}, "1"),
        ("deploy", {"version": 2, "force": True}, "2"),
        ("undeploy", {"version": 2}, "1"),
    ):
        assert client.post(f"{base}/{verb}", json=body).json()["version"] == now
        assert served(service) == int(now)
    counters = service.app.lifecycle.serving.metrics.table("shop", "item")  # type: ignore[union-attr]
    assert listed(service)[0]["hit_rates"]["embedding_cache"] == pytest.approx(counters.hits[0] / 4)
    answer = client.post(f"{base}/undeploy")
    assert (answer.status_code, "version" in answer.json()) == (200, False)
    assert client.post(f"{base}/lookup", json={"tables": {"item": [7]}}).status_code == 404
    assert client.post(f"{base}/deploy").json()["version"] == "1", "by its policy"


def test_a_config_takes_the_place_of_the_configured_one(service: RunningService, tmp_path: Path) -> None:
    entry = model_of("shop", [write(tmp_path / "4", 4)], {"item": DIM}, version="4")
    assert service.client.post("/v1/models/shop/deploy", json={"config": entry}).json()["version"] == "4"
    assert served(service) == 4
    other = model_of("other", [write(tmp_path / "5", 5)], {"item": DIM})
    del other["model"]
    assert service.client.post("/v1/models/other/deploy", json={"config": other}).json()["version"] == "1"
    assert service.client.get("/v1/models").json()["models"][1]["name"] == "other"


REFUSED = [
    ("shop/deploy", {"version": 7}, 404, "version '7'"),
    ("nope/deploy", {}, 404, "'nope'"),
    ("nope/undeploy", {}, 404, "'nope'"),
    ("nope/rollback", {}, 404, "'nope'"),
    ("nope/refresh", {}, 404, "'nope'"),
    ("shop/deploy", {"version": 3}, 400, "nowhere"),
    ("shop/undeploy", {"version": "1"}, 409, "only one"),
    ("shop/undeploy", {"version": "2"}, 404, "version '2'"),
    ("shop/rollback", {}, 409, "no version to go back to"),
    ("shop/deploy", {"versoin": 2}, 400, "versoin"),
    ("shop/deploy", {"version": 2.0}, 400, "version"),
    ("shop/deploy", {"force": "yes"}, 400, "force"),
    ("shop/deploy", [], 400, "expected a JSON object"),
    ("shop/deploy", {"config": {"model": "other"}}, 400, "'other'"),
    ("shop/deploy", {"config": {"sparse_filse": []}}, 400, "sparse_filse"),
]


def test_what_is_refused_changes_nothing(service: RunningService) -> None:
    for path, body, status, text in REFUSED:
        answer = service.client.post(f"/v1/models/{path}", json=body)
        assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text
        assert served(service) == 1
        assert service.client.get("/v2/health/ready").status_code == 200


def test_a_change_goes_on_beside_lookups_and_is_seen(content: dict[str, Any], gate: Gate) -> None:
    content["service"] = {"model_control_mode": "explicit", "load_models": ["*"]}
    with running_service(content) as service:
        answer = service.client.post("/v1/models/shop/deploy?wait=false", json={"version": 2})
        assert (answer.status_code, "status" in answer.json()) == (202, False)
        assert gate.entered.wait(PATIENCE_S)
        assert served(service) == 1
        assert service.client.get("/v2/health/ready").status_code == 200, "a server that was ready stays so"

        [change] = listed(service)[1]
        assert (change["table"]["name"], change["table"]["rows"], change["table"]["rows_done"]) == ("item", ROWS, 0)
        changes = [f"/v1/models/shop/{verb}?wait=false" for verb in ("deploy", "undeploy", "rollback")]
        for path in (*changes, "/v2/repository/models/shop/load", "/v2/repository/models/shop/unload"):
            refused = service.client.post(path)
            assert (refused.status_code, "under way" in refused.json()["error"]) == (409, True)
        gate.release.set()
        wait_until(lambda: "status" in listed(service)[1][0], "the change has ended")
        [change] = listed(service)[1]
        assert (change["status"], change["version"], served(service)) == (200, "2", 2)


def test_a_service_that_others_reach_allows_no_change_without_an_admin_token(content: dict[str, Any]) -> None:
    application = Application(Lifecycle(load_configuration(content)))
    with bind("0.0.0.0", 0) as listener:
        Server(application, listener)
        assert not application.authorization.loopback, "also for clients that come by 127.0.0.1"
    with bind("127.0.0.1", 0) as listener:
        Server(application, listener)
        assert application.authorization.loopback


CHANGES = [("POST", f"/v1/models/shop/{verb}") for verb in ("deploy", "undeploy", "rollback", "unpin", "refresh")]
CHANGES += [("POST", "/v1/models/shop/tables/item/rows"), ("DELETE", "/v1/models/shop/tables/item/rows/7")]


def test_every_change_needs_the_admin_token(content: dict[str, Any]) -> None:
    """What else a token or a browser's page may is shown in tests/ring1/serve/test_authorization.py."""
    content["service"] = {"bearer_token": "t-look", "admin_token": "t-change"}
    with running_service(content) as service:
        assert [service.client.get(f"/v2/health/{path}").status_code for path in ("live", "ready")] == [200, 200]
        reads = [("GET", path) for path in ("/v1/models", "/v2", "/metrics", "/openapi.json", "/v1/stats", "/page/nope")]
        for method, path in (*CHANGES, *reads, ("POST", "/v1/models/shop/lookup"), ("POST", "/v2/models/shop/infer")):
            for sent, status in (("", 401), ("Bearer t-wrong", 401), ("Basic t-look", 401), ("bearer t-look", 403)):
                if status == 401 or (method, path) in CHANGES:
                    answer = service.client.request(
                        method, path, content=b"{}", headers={"authorization": sent} if sent else {}
                    )
                    assert (answer.status_code, "t-" in answer.text) == (status, False), (method, path, sent)
                    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        service.client.headers["authorization"] = "Bearer t-change"
        assert served(service) == 1
        assert service.client.post("/v1/models/shop/deploy", json={"version": 2}).status_code == 200
        assert listed(service)[0]["versions"][-1]["version"] == "2"


def test_every_change_is_one_line_of_who_what_and_how_long(service: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hps.serve.logs.changes")
    client, base = service.client, "/v1/models/shop"

    def changes() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "hps.serve.logs.changes"]

    client.post(f"{base}/deploy", json={"version": 2})
    client.post(f"{base}/deploy", json={"version": 3})
    client.post(f"{base}/deploy?wait=false", json={"version": 1, "force": True})
    wait_until(lambda: len(changes()) == 3, "the change is logged")
    client.post(f"{base}/deploy", content=b"{")
    client.post("/v2/repository/models/a%0Ab/load", headers={"x": "y"})
    client.get("/v1/models")
    client.post("/v2/repository/index")
    expected = [
        r"POST /v1/models/shop/deploy version 2, by 127\.0\.0\.1 \(loopback\): done after \d+\.\d s",
        r"POST /v1/models/shop/deploy version 3, by .*: failed \(400\): opening sparse model .*nowhere.* after \d+\.\d s",
        r"POST /v1/models/shop/deploy version 1, forced, by .*: done after \d+\.\d s",
        r"POST /v1/models/shop/deploy, by .*: status 400: reading the request: it is not JSON.* after \d+\.\d s",
        r"POST /v2/repository/models/a\\nb/load, by .*: status \d+.* after \d+\.\d s",
    ]
    for record, pattern in zip(changes(), expected, strict=True):
        assert re.fullmatch(pattern, record.message), record.message


def test_commands_change_a_running_server(content: dict[str, Any], tmp_path: Path) -> None:
    content["service"] = {"admin_token": "t-change"}
    config, token = tmp_path / "ps.json", tmp_path / "token"
    config.write_text(json.dumps(content))
    token.write_text("t-change\n")
    with ServedProcess(config, tmp_path) as server:
        environment = {"HPS_URL": server.url, "HPS_ADMIN_TOKEN": "t-change"}
        done = run("deploy", "shop", "--version", "2", **environment)
        assert re.match(r"shop: version 2 serves \(deploy, 200 rows loaded, \d+\.\d s\); pinned", done.stdout), done.stderr
        table = run("models", **environment).stdout
        assert re.search(r"shop +2 +serving, pinned by deploy, \S+ +200 +\S+ k?B +3\.2 kB +\S+ k?B", table), table
        for command, says in (
            ("rollback", "version 1 serves (rollback"),
            ("refresh", "version 1 serves (refresh"),
            ("undeploy", "out of service (undeploy"),
        ):
            assert run(command, "shop", **environment).stdout.startswith(f"shop: {says}")
        options = ("--config", str(config), "--no-wait", "--token-file", str(token))
        done = run("deploy", "shop", "--url", server.url, *options)
        assert (done.exit_code, done.stdout) == (0, "shop: in progress; `hps models` shows its state\n")
        for token_arguments, text in (([], "missing"), (["--token", "x"], "wrong token")):
            done = run("deploy", "shop", "--url", server.url, *token_arguments)
            assert (done.exit_code, text in done.stderr) == (2, True)


def test_a_command_shows_how_far_a_load_is(content: dict[str, Any], gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running_service(content) as service, ThreadPoolExecutor(1) as pool:
        deploying = pool.submit(run, "deploy", "shop", "--version", "2", "--url", service.url)
        assert gate.entered.wait(PATIENCE_S)
        wait_until(lambda: "under way for" in run("models", service.url).stdout, "the change is shown")
        gate.release.set()
        result = deploying.result()
        assert result.exit_code == 0
        assert result.stdout.startswith("shop: version 2 serves (deploy, 200 rows loaded, ")
        assert f"shop.item: {ROWS} rows in " in caplog.text, "also those loaded since the last answer of the server"
        assert served(service) == 2


REFUSED_COMMANDS = [
    (["deploy", "shop", "--version", "7"], 2, "version '7'"),
    (["deploy", "shop", "--version", "3"], 2, "nowhere"),
    (["rollback", "nope"], 2, "'nope'"),
    (["rollback", "shop"], 1, "no version to go back to"),
    (["deploy", "a/b c?"], 2, "not served"),
    (["deploy", "shop", "--config", "/nowhere"], 2, "/nowhere"),
]


def test_a_refusal_is_a_message_and_a_code(service: RunningService) -> None:
    for arguments, code, text in REFUSED_COMMANDS:
        result = run(*arguments, "--url", service.url)
        assert (result.exit_code, text in result.stderr, "Traceback" in result.stderr) == (code, True, False), result.stderr
    listed = json.loads(run("models", service.url, "--json").stdout)
    assert sorted(one["status"] for one in listed["changes"]) == [404, 409]


def test_a_server_that_is_not_there_is_named_and_no_token_follows_a_redirect() -> None:
    for url, code, text in (
        ("localhost:8000", 2, "expected for instance http://"),
        ("http://127.0.0.1:9", 1, "is the server running there?"),
    ):
        result = run("models", url)
        assert (result.exit_code, text in result.stderr) == (code, True)

    def redirect() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 302 x\r\nLocation: /elsewhere\r\nContent-Length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(redirect)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = run("undeploy", "shop", "--url", url, HPS_ADMIN_TOKEN="t-change")
    assert (result.exit_code, "no answer of hps serve" in result.stderr) == (1, True)
