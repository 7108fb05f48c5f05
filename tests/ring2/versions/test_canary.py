"""Canaries and shadows under load: shares, clients that stay on their side, versions that fail or slow, and answers."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import pytest

import hps
from hps.testing.waiting import wait_until
from hps.versions.canary.plan import Selection
from tests.fakes import entry_points
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
    selection = Selection("ranker", "2", 0.05)
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


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        entry_points.install(directory, "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
        yield


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
