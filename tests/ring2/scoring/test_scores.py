"""Whole models in this process and over HTTP: tables and network are one version, and a network can harm only its own requests.

The scores are made so that mixing shows: version v has vectors v times as large and a network that divides by v.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest

import hps
from hps.engine.session import CachedSession
from hps.scoring.scorer import Scorer
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.versions import deployment
from tests.fakes import entry_points
from tests.fakes.networks import ArrayNetwork
from tests.servers.running_service import RunningService, document_of, model_of, running_service, samples
from tests.servers.served_process import ServedProcess

ROWS, DIM = 500, 4
KEYS = np.arange(ROWS)
SAID = {"format": "arrays", "file": "dense.json", "inputs": {"item": {"table": "item"}, "age": {}}, "outputs": ["score"]}


def rows_of(version: float) -> tuple[np.ndarray, np.ndarray]:
    return KEYS, np.repeat((version * KEYS).astype(np.float32)[:, None], DIM, 1)


def network(version: float, **more: Any) -> bytes:
    return json.dumps({"factor": 1 / version, **more}).encode()


def write(place: Path, version: int, content: bytes | None = None, said: Any = SAID, **more: Any) -> None:
    with_network = {"network": (said, content or network(version))}
    hps.write_version(place / "m" / str(version), {"item": rows_of(version)}, **{**with_network, **more})


def wanted(keys: Any, age: Any, version: int) -> np.ndarray:
    return DIM * np.asarray(keys) + np.asarray(age) / version


def check(found: hps.Scores, keys: Any, age: Any) -> str:
    np.testing.assert_allclose(found["score"], wanted(keys, age, int(found.version)), rtol=1e-6)
    return found.version


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The engine `arrays`, of another package, here and in processes that are started."""
    directory = tmp_path_factory.mktemp("engine")
    entry_points.install(directory, "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("PYTHONPATH", f"{directory}:{Path(hps.__file__).parents[1]}")
        yield


@pytest.fixture
def opened() -> list[ArrayNetwork]:
    ArrayNetwork.opened.clear()
    return ArrayNetwork.opened


@pytest.fixture
def until(tmp_path: Path) -> Iterator[Path]:
    """The file whose removal ends what hangs."""
    file = tmp_path / "until"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    write(place, 1)
    model = model_of("m", ["item"], {"item": DIM}, hit_rate_threshold=1.1, max_batch_size=64)
    (place / "m" / "model.json").write_text(json.dumps(model))
    return place


def document(place: Path, **more: Any) -> dict[str, Any]:
    return document_of(model_repository=str(place), **more)


def model_json(place: Path, **more: Any) -> None:
    file = place / "m" / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def ask(server: hps.HPS, keys: Any = (1, 2, 3), **more: Any) -> str:
    ages = np.arange(len(keys), dtype=np.float32)
    return check(server.score("m", {"item": np.asarray(keys), "age": ages}, **more), keys, ages)


def test_the_heap_is_trimmed_when_a_network_ends(
    repository: Path, opened: list[ArrayNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[list[bool]] = []
    monkeypatch.setattr(deployment, "trim_heap", lambda: ended.append([one.closed for one in opened]))
    with hps.HPS(document(repository)) as server:
        assert ask(server) == "1"
        server.undeploy("m")
        assert ended == [[True]]
        server.deploy("m", "1")
        server.undeploy("m")
        assert ended == [[True], [True, True]]


def test_deploying_and_rolling_back_move_tables_and_network(repository: Path, opened: list[ArrayNetwork]) -> None:
    write(repository, 2)
    write(repository, 3)
    with hps.HPS(document(repository)) as server:
        assert ask(server) == "3"
        for version in ("1", "3", "2"):
            server.deploy("m", version)
            assert ask(server) == version
        server.rollback("m")
        assert ask(server) == "3"
        assert [one.closed for one in opened] == [False, True, False]  # of 3, 1 and 2: that of 3 is kept, as its tables are


def test_several_versions_answer_beside_each_other(repository: Path) -> None:
    write(repository, 2)
    model_json(repository, version_policy={"all": {}})
    with hps.HPS(document(repository)) as server:
        assert [ask(server, version=version) for version in ("1", "2", None)] == ["1", "2", "2"]
        server.undeploy("m", "2")
        assert ask(server) == "1"
        with pytest.raises(hps.UnknownVersionError):
            ask(server, version="2")


def test_a_delta_keeps_the_network_of_its_base_or_has_its_own(repository: Path) -> None:
    write(repository, 2, delta_of="1", network=None)  # rows twice as large, and the network of version 1
    with hps.HPS(document(repository)) as server:
        found = server.score("m", {"item": KEYS[:3], "age": np.ones(3, np.float32)})
        assert (found.version, found["score"].tolist()) == ("2", (2 * DIM * KEYS[:3] + 1).tolist())
        write(repository, 3, delta_of="2")
        server.deploy("m", "3")
        assert ask(server) == "3"


def test_the_network_of_the_models_entry_serves_versions_without_one(repository: Path) -> None:
    write(repository, 2, network=None)
    (repository / "m" / "2" / "dense.json").write_bytes(network(2))
    model_json(repository, dense=SAID)
    with hps.HPS(document(repository)) as server:
        assert ask(server) == "2"
        server.deploy("m", "1")
        assert ask(server) == "1"


def test_versions_that_are_configured_one_by_one_have_their_networks(tmp_path: Path) -> None:
    entries = []
    for number in (1, 2):
        hps.write_sparse_model(tmp_path / f"item{number}", rows_of(number))
        (tmp_path / f"dense{number}.json").write_bytes(network(number))
        dense = {**SAID, "file": str(tmp_path / f"dense{number}.json")}
        entries.append({"version": str(number), "sparse_files": [str(tmp_path / f"item{number}")], "dense": dense})
    model = model_of("m", [tmp_path / "item1"], {"item": DIM}, hit_rate_threshold=1.1, dense=entries[0]["dense"])
    with hps.HPS(document_of({**model, "versions": entries[1:]})) as server:
        for version in ("2", "1", "2"):
            server.deploy("m", version)
            assert ask(server) == version


@pytest.mark.parametrize(
    ("content", "said", "error", "message"),
    [
        (b"no json", {}, hps.ModelFileError, "it is not JSON"),
        (network(2, does="memory"), {}, hps.CapacityError, "it does not fit on the device"),
        (network(2), {"format": "torchscript"}, hps.ModelFileError, "no archive of PyTorch"),
        (network(2), {"inputs": {"item": {"table": "itme"}}}, hps.ModelFileError, 'is of table "itme", expected one of item'),
        (network(2), {"inputs": {"item": {"table": "item", "hotness": 2}}}, hps.ModelFileError, "has 2 keys a sample"),
    ],
)
def test_a_version_with_a_wrong_network_leaves_the_serving_one(
    repository: Path, content: bytes, said: Any, error: Any, message: str
) -> None:
    with hps.HPS(document(repository)) as server:
        write(repository, 2, content, {**SAID, **said})
        for _ in range(2):
            with pytest.raises(error, match=message):
                server.deploy("m", "2")
            assert ask(server) == "1"
        write(repository, 3)
        server.deploy("m", "3")
        assert ask(server) == "3"


def test_a_network_that_fails_when_it_is_warmed_leaves_nothing_open(
    repository: Path, opened: list[ArrayNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    closes, closed = CachedSession.close, set[int]()

    def close(session: CachedSession, *timeout_s: float) -> bool:
        closed.add(id(session))
        return closes(session, *timeout_s)

    with hps.HPS(document(repository)) as server:
        write(repository, 2, network(2))
        monkeypatch.setattr(Scorer, "warm", Mock(side_effect=hps.NetworkError("warming")))
        monkeypatch.setattr(CachedSession, "close", close)
        for count in (1, 2):
            with pytest.raises(hps.NetworkError, match="warming"):
                server.deploy("m", "2")
            assert (len(closed), opened[-1].closed) == (count, True)
        assert ask(server) == "1"
        monkeypatch.undo()
        server.deploy("m", "2")
        assert ask(server) == "2"


@pytest.mark.parametrize(
    ("samples", "doing"), [(0, "opening"), (1, "opening"), (3, "opening"), (16, "warming"), (64, "warming")]
)
def test_a_network_that_hangs_when_it_is_deployed_fails_its_deployment(
    repository: Path, opened: list[ArrayNetwork], until: Path, samples: int, doing: str
) -> None:
    hanging = {**SAID, "open_timeout_s": 0.2}
    with hps.HPS(document(repository)) as server:
        write(repository, 2, network(2, does="hang", until=str(until), samples=samples), hanging)
        for _ in range(2):
            with pytest.raises(hps.NetworkError, match=rf"^{doing}.*not ended within 0.2 s \(dense.open_timeout_s\)"):
                server.deploy("m", "2")
            assert ask(server) == "1"
        write(repository, 3)
        server.deploy("m", "3")
        assert ask(server) == "3"
        until.unlink()
        wait_until(lambda: len(opened) == 4 and opened[1].closed + opened[2].closed + opened[3].closed == 2, "they are freed")
        server.deploy("m", "2")
        assert ask(server) == "2"


def test_a_process_ends_while_networks_hang(repository: Path, until: Path) -> None:
    write(repository, 2, network(2, does="hang", until=str(until), samples=1), {**SAID, "open_timeout_s": 0.1})
    write(repository, 3, network(3, does="hang", until=str(until)))
    program = f"""
import threading
import hps
import hps.versions.deployment as deployment

deployment.DRAIN_S = 0.1
server = hps.HPS({document(repository)!r}, deploy_models=False)
try:
    server.deploy("m", "2")
except hps.NetworkError as error:
    print(error)
server.deploy("m", "3")
scores = threading.Thread(target=server.score, args=("m", {{"item": [1, 2], "age": [0.0, 0.0]}}), daemon=True)
scores.start()
while not [one for one in server.model("m").scores._scorers[0].network_seconds().values() if one > 0]:
    pass
server.close()
print("closed", scores.is_alive())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "not ended within 0.1 s" in ended.stdout
    assert "closed True" in ended.stdout
    assert until.exists()


def test_another_file_is_another_version_and_the_same_file_is_not(repository: Path, opened: list[ArrayNetwork]) -> None:
    (repository / "m" / "1" / "version.json").unlink()
    model_json(repository, dense=SAID)
    with hps.HPS(document(repository)) as server:
        assert ask(server) == "1"
        before = len(opened)
        server.deploy("m", "1")
        assert len(opened) == before
        file = repository / "m" / "1" / "dense.json"
        file.unlink()
        file.write_bytes(network(0.5))
        server.deploy("m", "1")
        found = server.score("m", {"item": KEYS[:2], "age": np.zeros(2, np.float32)})
        assert found["score"].tolist() == [0, 2 * DIM]
        assert len(opened) == before + 1


def test_other_settings_need_no_other_network(repository: Path, opened: list[ArrayNetwork]) -> None:
    with hps.HPS(document(repository)) as server:
        ask(server)
        text = json.loads((repository / "m" / "1" / "version.json").read_text())
        text["dense"]["dynamic_batching"] = False
        (repository / "m" / "1" / "version.json").write_text(json.dumps(text))
        deployed = server.deploy("m", "1")
        assert deployed.config.dense is not None
        assert not deployed.config.dense.dynamic_batching
        assert ask(server) == "1"
        assert len(opened) == 1


def test_what_cannot_be_scored_is_refused(repository: Path, tmp_path: Path) -> None:
    hps.write_sparse_model(tmp_path / "plain", rows_of(1))
    plain = model_of("plain", [tmp_path / "plain"], {"item": DIM})
    with hps.HPS(document_of(plain, model_repository=str(repository))) as server:
        with pytest.raises(hps.UnknownModelError, match="it has no network; configure `dense`"):
            server.score("plain", {"item": KEYS})
        with pytest.raises(hps.UnknownModelError):
            server.score("other", {"item": KEYS})
        with pytest.raises(hps.UnknownDeviceError):
            ask(server, device_id=3)
        with pytest.raises(hps.InvalidInputError, match="input 'age' is missing"):
            server.score("m", {"item": KEYS[:2]})


def post(service: RunningService, path: str, said: Any, **more: Any) -> Any:
    return service.client.post(path, json=said, **more)


def rows(service: RunningService, keys: Any = (1, 2), **more: Any) -> Any:
    return post(service, "/v1/models/m/score", {"user": {"age": 1}, "items": [{"item": int(key)} for key in keys], **more})


def test_scores_over_http_name_their_version(repository: Path) -> None:
    with running_service(document(repository)) as service:
        answer = rows(service, [3, 5])
        assert answer.json() == {"model": "m", "version": "1", "outputs": {"score": [13.0, 21.0]}}
        write(repository, 2)
        assert post(service, "/v1/models/m/deploy", {"version": "2"}).status_code == 200
        assert rows(service, [3]).json() == {"model": "m", "version": "2", "outputs": {"score": [12.5]}}
        inputs = [("item", "INT64", 3), ("age", "FP32", 1)]
        said = {"inputs": [{"name": name, "datatype": kind, "shape": [1], "data": [one]} for name, kind, one in inputs]}
        output = {"name": "score", "datatype": "FP32", "shape": [1], "data": [12.5]}
        of_version = post(service, "/v2/models/m/versions/2/infer", said).json()
        assert of_version == {"model_name": "m", "model_version": "2", "outputs": [output]}


def test_networks_are_described_and_their_vectors_can_be_looked_up(repository: Path) -> None:
    with running_service(document(repository)) as service:
        metadata = service.client.get("/v2/models/m").json()
        assert {one["name"]: one["datatype"] for one in metadata["inputs"]} == {"item": "INT64", "age": "FP32"}
        assert [one["name"] for one in metadata["outputs"]] == ["score"]
        config = service.client.get("/v2/models/m/config").json()
        assert [one["name"] for one in config["input"]] == ["item", "age"]
        assert config["max_batch_size"] == 64
        lookup = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [3]}], "parameters": {"vectors": True}}
        assert post(service, "/v2/models/m/infer", lookup).json()["outputs"][0]["data"] == [3.0] * DIM
        assert post(service, "/v1/models/m/lookup", {"tables": {"item": [3]}}).status_code == 200


@pytest.mark.parametrize(
    ("does", "message"), [("nan", "is not a number"), ("raise", "ValueError: the network's own"), ("short", "shape")]
)
@pytest.mark.parametrize("batching", [True, False])
def test_a_network_that_fails_is_500_and_the_service_goes_on(repository: Path, does: str, message: str, batching: bool) -> None:
    write(repository, 2, network(2, does=does), {**SAID, "dynamic_batching": batching})
    with running_service(document(repository)) as service:
        answers = [rows(service) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [500] * 3
        assert all(message in answer.text for answer in answers), answers[0].text
        assert len({answer.json()["request_id"] for answer in answers}) == 3
        assert post(service, "/v1/models/m/deploy", {"version": "1"}).status_code == 200
        assert rows(service).json()["version"] == "1"
        figures = samples(service)
        reason = "nan" if does == "nan" else "network"
        assert figures["hps_score_failed_requests_total", "m", reason] == 3
        assert figures["hps_score_requests_total", "m"] == (4 if does == "nan" else 1)


def test_a_network_that_does_not_fit_is_507(repository: Path) -> None:
    with running_service(document(repository)) as service:
        write(repository, 2, network(2, does="memory"))
        answer = post(service, "/v1/models/m/deploy", {"version": "2"})
        assert (answer.status_code, "it does not fit on the device" in answer.text) == (507, True), answer.text
        assert rows(service).json()["version"] == "1"


def test_scores_are_counted(repository: Path) -> None:
    with running_service(document(repository)) as service:
        for count in (1, 2, 5):
            assert rows(service, range(count)).status_code == 200
        figures = samples(service)
        assert figures["hps_score_requests_total", "m"] == figures["hps_score_batches_total", "m"] == 3
        assert figures["hps_score_samples_total", "m"] == 8
        assert figures["hps_score_lookup_seconds_count", "m"] == figures["hps_score_network_seconds_count", "m"] == 3
        assert figures["hps_score_late_requests_total", "m"] == 0


def test_a_network_that_hangs_refuses_requests_of_its_own_model_alone(repository: Path, until: Path) -> None:
    write(repository, 2, network(2, does="hang", until=str(until)))
    hps.write_version(repository / "n" / "1", {"item": rows_of(1)}, network=(SAID, network(1)))
    (repository / "n" / "model.json").write_text((repository / "m" / "model.json").read_text().replace('"m"', '"n"'))

    def ready(path: str) -> int:
        return int(service.client.get(path).status_code)

    with running_service(document(repository, service={"request_timeout_s": 0.3})) as service:
        for count in (1, 2):
            hung = rows(service)
            assert (hung.status_code, "within 0.3 s" in hung.text) == (504, True), hung.text
            wait_until(lambda: ready("/v2/models/m/ready") == 503, "the model says that its network hangs")
            assert ready("/v2/models/m/versions/2/ready") == 503
            for _ in range(3):
                refused = rows(service)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
                assert "a call of its network has been under way for" in refused.text
            assert samples(service)["hps_score_refused_requests_total", "m"] == 3 * count
            assert [ready(f"/v2/{what}") for what in ("models/n/ready", "health/ready", "health/live")] == [200] * 3
            other = {"user": {"age": 1}, "items": [{"item": 3}, {"item": 4}]}
            assert post(service, "/v1/models/n/score", other).json()["outputs"]["score"] == [13.0, 17.0]
            assert post(service, "/v1/models/m/lookup", {"tables": {"item": [3]}}).status_code == 200
            until.unlink()
            wait_until(lambda: ready("/v2/models/m/ready") == 200, "the network is back")
            assert rows(service).json()["version"] == "2"
            until.touch()
        until.unlink()
        assert samples(service)["hps_score_refused_requests_total", "n"] == 0


def test_a_model_is_undeployed_and_deployed_while_its_network_hangs(
    repository: Path, until: Path, opened: list[ArrayNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.versions.deployment.DRAIN_S", 0.05)
    write(repository, 2, network(2, does="hang", until=str(until)))
    with running_service(document(repository)) as service, ThreadPoolExecutor(4) as pool:
        asked, hanging = [], []
        for _ in range(2):
            assert post(service, "/v1/models/m/deploy", {"version": "2"}).status_code == 200
            hanging.append(opened[-1])
            asked.append(pool.submit(rows, service))
            wait_until(lambda: 2 in opened[-1].calls, "the network hangs")
            asked.append(pool.submit(rows, service))
            batches = service.app.lifecycle.opened.model("m").scores._batchers[0]
            wait_until(lambda batches=batches: batches.waiting, "the second request waits behind it")
            assert service.client.post("/v1/models/m/undeploy").status_code == 200
            assert rows(service).status_code == 404
            assert post(service, "/v1/models/m/deploy", {"version": "1"}).status_code == 200
            assert rows(service).json()["version"] == "1"
            assert not any(one.closed for one in hanging)
        until.unlink()
        assert [one.result().json()["version"] for one in asked] == ["2", "1"] * 2
        wait_until(lambda: sum(one.closed for one in opened) == len(opened) - 1, "the networks are freed")
        assert rows(service).json()["version"] == "1"


class Clients:
    """Ask for scores without a pause, and check every answer."""

    def __init__(self, url: str, count: int) -> None:
        self.url, self.stop = url, threading.Event()
        self.wrong, self.versions = list[str](), list[str]()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    @property
    def answered(self) -> int:
        return len(self.versions)

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as client:
            while not self.stop.is_set():
                keys, age = rng.integers(0, ROWS, rng.integers(1, 9)).tolist(), int(rng.integers(0, 50))
                said = {"user": {"age": age}, "items": [{"item": key} for key in keys]}
                try:
                    found = client.post("/v1/models/m/score", json=said).raise_for_status().json()
                    np.testing.assert_allclose(found["outputs"]["score"], wanted(keys, age, int(found["version"])), rtol=1e-5)
                    self.versions.append(found["version"])
                except httpx.HTTPStatusError as error:
                    self.wrong.append(f"{error.response.status_code} {error.response.text}")
                except Exception as error:  # noqa: BLE001 - each is a failure of the test
                    self.wrong.append(repr(error))


def swapped(url: str, swaps: int) -> None:
    with Clients(url, 16) as clients:
        for number in range(swaps):
            before, version = clients.answered, str(1 + (number + 1) % 2)
            httpx.post(f"{url}/v1/models/m/deploy", json={"version": version}, timeout=PATIENCE_S).raise_for_status()
            wait_until(lambda before=before: clients.answered > before or clients.wrong, "scores are answered")
    assert clients.wrong == []
    assert set(clients.versions) == {"1", "2"}


def test_no_answer_mixes_versions_while_they_are_swapped(repository: Path, tmp_path: Path) -> None:
    write(repository, 2)
    with ServedProcess(document(repository), tmp_path, 1) as served:
        swapped(served.url, 10)
