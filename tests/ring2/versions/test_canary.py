"""Canaries and shadows under load: shares, clients that stay on their side, versions that fail or slow, and answers."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc
from typer.testing import CliRunner

import hps
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app
from hps.versions.canary.plan import SenderSelection
from tests.ring2.versions.test_checks_in_process import engine as engine  # a fixture
from tests.servers.load import Load
from tests.servers.running_service import document_of, model_of, running_service, samples
from tests.servers.served_process import ServedProcess

ROWS, DIM, CLIENTS = 500, 8, 32
KEYS = np.arange(ROWS, dtype=np.int64) * 7
FIRST = np.random.default_rng(5).standard_normal((ROWS, DIM)).astype(np.float32)
CHECKS = {"checks": False}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "repository" / "ranker"
    hps.write_version(home / "1", {"item": (KEYS, FIRST)})
    (home / "model.json").write_text(json.dumps(model_of("ranker", ["item"], {"item": DIM})))
    return home


def document(home: Path, place: str = "rocksdb") -> dict[str, Any]:
    return document_of(persistent=home.parent.parent / place, model_repository=str(home.parent))


class Asker:
    """A client with one connection for each thread."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._connections:
            connection.close()

    def ask(
        self, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, dict[str, Any]]:
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(self._address, timeout=30)
            self._connections.append(self._local.connection)
        connection: http.client.HTTPConnection = self._local.connection
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, content, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def version(self, user: str) -> str:
        """Look a row up for a user, check the answer against the version that it names, and return that."""
        body = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [7]}]}
        status, answer = self.ask("/v2/models/ranker/infer", body, {"x-user-id": user})
        assert status == 200, answer
        wanted = FIRST[1] + (answer["model_version"] == "2")
        np.testing.assert_allclose(answer["outputs"][0]["data"], wanted, rtol=1e-5)
        return str(answer["model_version"])


def sides(url: str, users: range) -> dict[int, str]:
    with Asker(url) as asker, ThreadPoolExecutor(CLIENTS) as pool:
        return dict(zip(users, pool.map(lambda user: asker.version(f"user-{user}"), users), strict=True))


def deploy(url: str, **body: Any) -> dict[str, Any]:
    with Asker(url) as asker:
        status, answer = asker.ask("/v1/models/ranker/deploy", body)
    assert status == 200, answer
    return answer


def rollout(url: str) -> dict[str, Any]:
    with Asker(url) as asker:
        [model] = asker.ask("/v1/models")[1]["models"]
    found: dict[str, Any] = model["rollout"]
    return found


def test_users_keep_their_side_between_processes_replicas_restarts_and_steps(home: Path, tmp_path: Path) -> None:
    hps.write_version(home / "2", {"item": (KEYS, FIRST + 1)})
    users = range(4000)
    selection = SenderSelection("ranker", "2", 0.05)
    wanted = {user: "2" if selection.takes(b"user-%d" % user) else "1" for user in users}
    assert abs(Counter(wanted.values())["2"] / len(users) - 0.05) < 0.005
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = ServedProcess(document(home, "one_db"), tmp_path / "one", 2)
    two = ServedProcess(document(home, "two_db"), tmp_path / "two", 2)
    with one, two:
        for replica in (one, two):
            deploy(replica.url, version="1")
            assert deploy(replica.url, version="2", canary=0.05)["version"] == "1"
            assert sides(replica.url, users) == wanted
        one.stop()
        one.start()
        assert sides(one.url, users) == wanted
        assert rollout(one.url)["state"] == "running"
        deploy(one.url, canary=0.2)
        later = sides(one.url, users)
        assert {user for user, version in wanted.items() if version == "2"} < {user for user in users if later[user] == "2"}


# -- versions of a network, in this process -------------------------------------------------------------------------------


def write(home: Path, version: int, **says: Any) -> None:
    said = {"format": "arrays", "file": "dense.json", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
    hps.write_version(home / str(version), {"item": (KEYS, FIRST)}, network=(said, json.dumps(says).encode()))


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    home = tmp_path / "repository" / "ranker"
    write(home, 1)
    (home / "model.json").write_text(json.dumps(model_of("ranker", ["item"], {"item": DIM}, **CHECKS)))
    return home


SCORES = FIRST[[1, 2]].sum(1)


def scoring(asker: Asker) -> Callable[[np.random.Generator], list[object]]:
    def score(rng: np.random.Generator) -> list[object]:
        body = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [2], "data": [7, 14]}]}
        headers = {"x-user-id": f"user-{rng.integers(1 << 30)}"}
        status, answer = asker.ask("/v2/models/ranker/infer", body, headers)
        if status != 200:
            return [(status, answer)]
        found = answer["outputs"][0]["data"]
        return [] if np.allclose(found, SCORES, rtol=1e-4) else [found]

    return score


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"does": "raise"}, "error rate of version 2"),
        ({"does": "nan"}, "error rate of version 2"),
        ({"does": "slow", "seconds": 0.05}, "p99 of version 2"),
        ({"factor": 1.00004}, "difference of version 2"),
    ],
    ids=["fails", "answers NaN", "slows", "differs"],
)
def test_a_version_that_breaks_a_bound_is_rolled_back_by_itself_and_no_request_is_lost(
    scored: Path, says: dict[str, Any], reason: str
) -> None:
    with running_service(document(scored)) as service, Asker(service.url) as asker:
        write(scored, 2, **says)
        status_of = service.app.lifecycle.server.rollout
        with Load(scoring(asker), CLIENTS) as load:
            load.more()
            deploy(service.url, canary=0.05, max_difference=1e-5)
            wait_until(lambda: status_of("ranker").record.state == "rolled back", "the version is rolled back")
            load.more()
        assert load.problems == []
        status = status_of("ranker")
        assert status.record.reason.startswith(reason)
        assert status.record.by == "itself"
        wait_until(
            lambda: [version.version for version in service.app.lifecycle.server.versions("ranker")] == ["1"], "it is out"
        )
        assert samples(service)["hps_rollout_ends_total", "ranker", "rolled_back"] == 1
        assert service.frontend.exchange.check_integrity() == service.app.lifecycle.server.check() == []


def test_a_request_whose_new_version_hangs_is_answered_by_the_serving_one(scored: Path, tmp_path: Path) -> None:
    until = tmp_path / "hangs"
    until.touch()
    service_settings = {"service": {"request_timeout_s": 2.0}}
    with running_service({**document(scored), **service_settings}) as service, Asker(service.url) as asker:
        write(scored, 2, does="hang", until=str(until))
        deploy(service.url, canary=1.0, steps=[{"share": 0.999}])
        assert scoring(asker)(np.random.default_rng(0)) == []
        until.unlink()


@pytest.mark.parametrize("asked", [{"canary": 0.05}, {"shadow": 0.5}], ids=["canary", "shadow"])
def test_a_version_that_hangs_is_rolled_back_by_itself_and_no_request_is_lost(
    scored: Path, tmp_path: Path, asked: dict[str, float]
) -> None:
    until = tmp_path / "hangs"
    until.touch()
    service_settings = {"service": {"request_timeout_s": 2.0}}
    with running_service({**document(scored), **service_settings}) as service, Asker(service.url) as asker:
        write(scored, 2, does="hang", until=str(until))
        status_of = service.app.lifecycle.server.rollout
        with Load(scoring(asker), CLIENTS) as load:
            deploy(service.url, **asked)
            wait_until(lambda: status_of("ranker").record.state == "rolled back", "the version is rolled back")
            load.more()
        assert load.problems == []
        assert status_of("ranker").record.reason.startswith("error rate of version 2 is 100.0%")
        until.unlink()
        wait_until(lambda: service.is_idle, "every slot is free")


def test_a_shadow_changes_no_answer_and_counts_what_differs(scored: Path) -> None:
    with running_service(document(scored)) as service, Asker(service.url) as asker:
        write(scored, 2, factor=1.5)
        with Load(scoring(asker), CLIENTS) as load:
            load.more()
            deploy(service.url, shadow=0.5)
            status = service.app.lifecycle.server.rollout
            wait_until(lambda: status("ranker").counts.compared.requests >= 50, "requests are compared")
        assert load.problems == []
        compared = status("ranker").counts.compared
        assert compared.identical == compared.failed == 0
        assert compared.difference == pytest.approx(0.5, rel=1e-3)
        assert compared.correlation == pytest.approx(1.0, abs=1e-6)
        wait_until(lambda: service.is_idle, "every slot is free")


def test_every_wire_routes_alike_and_a_named_version_is_not_routed(scored: Path) -> None:
    settings = {"service": {"model_control_mode": "explicit", "load_models": ["*"]}}
    with running_service({**document(scored), **settings}, grpc=True) as service, Asker(service.url) as asker:
        write(scored, 2, factor=2.0)
        client, channel = triton.InferenceServerClient(service.grpc), grpc.insecure_channel(service.grpc)
        load = pb_grpc.GRPCInferenceServiceStub(channel).RepositoryModelLoad
        load(load_of(canary="0.3"))
        keys = np.array([7, 14])
        tensor = triton.InferInput("item", [2], "INT64")
        tensor.set_data_from_numpy(keys)

        def over_grpc(headers: dict[str, str], version: str = "") -> tuple[str, list[float]]:
            answer = client.infer("ranker", [tensor], headers=headers, model_version=version)
            return answer.get_response().model_version, answer.as_numpy("score").tolist()

        def over_http(headers: dict[str, str], version: str = "") -> tuple[str, list[float]]:
            place = f"/v2/models/ranker{f'/versions/{version}' if version else ''}/infer"
            body = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [2], "data": keys.tolist()}]}
            status, answer = asker.ask(place, body, headers)
            assert status == 200, answer
            return answer["model_version"], answer["outputs"][0]["data"]

        def as_rows(headers: dict[str, str]) -> tuple[str, list[float]]:
            status, answer = asker.ask("/v1/models/ranker/score", {"items": [{"item": 7}, {"item": 14}]}, headers)
            assert status == 200, answer
            return answer["version"], answer["outputs"]["score"]

        selection = SenderSelection("ranker", "2", 0.3)
        for number in range(20):
            wanted = "2" if selection.takes(b"user-%d" % number) else "1"
            for name in ("x-user-id", "x-request-id"):
                for wire in (over_grpc, over_http, as_rows):
                    version, scores = wire({name: f"user-{number}"})
                    assert version == wanted
                    np.testing.assert_allclose(np.ravel(scores), SCORES * int(version), rtol=1e-4)
            for wire in (over_grpc, over_http):
                assert wire({"x-user-id": f"user-{number}"}, "1")[0] == "1"
        assert service.app.lifecycle.server.rollout("ranker").counts.old.requests > 0
        load(load_of(promote=True))
        assert over_grpc({})[0] == "2"
        client.close()
        channel.close()


def load_of(**parameters: Any) -> Any:
    request = pb.RepositoryModelLoadRequest(model_name="ranker")
    for name, value in parameters.items():
        setattr(request.parameters[name], "bool_param" if value is True else "string_param", value)
    return request


def test_the_commands_begin_change_and_end_a_canary(tmp_path: Path) -> None:
    home = tmp_path / "repository" / "ranker"
    write(home, 1)
    (home / "model.json").write_text(json.dumps(model_of("ranker", ["item"], {"item": DIM})))

    def run(*arguments: str) -> str:
        return " ".join(CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "HPS_URL": service.url}).output.split())

    with running_service(document(home)) as service:
        assert "no canary or shadow is under way; start one with `hps deploy ranker --canary 5%`" in run("promote", "ranker")
        write(home, 2, factor=-1.0)
        assert "`hps deploy ranker --canary 5% --accept`" in run("deploy", "ranker", "--canary", "5%")
        began = run("deploy", "ranker", "--canary", "5%", "--accept", "--max-error-rate", "2%")
        assert began.startswith("ranker: version 1 serves (deploy")
        assert "ranker: canary of version 2 gets 5 % of the requests; version 1 0 requests" in began
        assert "gets 50 % of the requests, step 1 of 2" in run("deploy", "ranker", "--steps", "50%:1h:10,100%")
        write(home, 3, factor=1.0)
        told = run("deploy", "ranker", "--version", "3", "--canary", "5%")
        assert "`hps promote ranker` or `hps rollback ranker` ends it" in told
        assert run("rollback", "ranker").startswith("ranker: version 1 serves (rollback")
        assert "canary of version 2 is rolled back by 127.0.0.1" in run("models")
        assert "shadow of version 3 gets 5 % of the requests" in run("deploy", "ranker", "--shadow", "5%")
        assert run("promote", "ranker").startswith("ranker: version 3 serves (promote")
        assert "expected a share such as 5% or 0.05" in run("deploy", "ranker", "--canary", "many")
        assert "expected a time such as 10m" in run("deploy", "ranker", "--steps", "5%:x")
