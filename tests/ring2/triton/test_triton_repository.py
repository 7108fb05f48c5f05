"""Triton's model repository, model configuration and statistics extensions, asked with Triton's own client and without."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import hps
from hps.ground.progress import NoProgress
from hps.testing.waiting import wait_until
from hps.versions import deployment as deployment_module
from hps.versions import live_models
from tests.servers.running_service import RunningService, document_of, model_of, running_service

DIM = 4
ROWS = 200


def write(directory: Path, name: str, content: int, version: int | None = None) -> str:
    place = directory / name / str(version or 1) / "item.model"
    place.parent.mkdir(parents=True, exist_ok=True)
    hps.write_sparse_model(place, (np.arange(ROWS), np.full((ROWS, DIM), content, np.float32)), overwrite=True)
    return str(place)


@pytest.fixture
def document(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(mode: str, *names: str, load: list[str] | None = None, **more: Any) -> dict[str, Any]:
        changes = {"cache_refresh_percentage_per_iteration": 1.0, "num_of_worker_buffer_in_pool": 2, **more}
        models = [model_of(name, [write(tmp_path, name, 1)], {"item": DIM}, **changes) for name in names]
        service = {"model_control_mode": mode, "repository_poll_s": 0.05, **({"load_models": load} if load else {})}
        return document_of(*models, persistent=tmp_path / "rocksdb", service=service)

    return make


@pytest.fixture
def explicit(document: Callable[..., dict[str, Any]]) -> Iterator[RunningService]:
    with running_service(document("explicit", "simple", "other", load=["other"], keep_versions=0)) as service:
        yield service


@pytest.fixture
def client(explicit: RunningService) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(explicit.url.removeprefix("http://")) as client:
        yield client


def answer(service: RunningService, name: str = "simple", key: int = 7) -> list[float]:
    return service.client.post(f"/v1/models/{name}/lookup", json={"tables": {"item": [key]}}).json()["tables"]["item"][0]


def states(service: RunningService, **body: Any) -> dict[tuple[str, str], str]:
    index = service.client.post("/v2/repository/index", json=body).json()
    return {(one["name"], one["version"]): one["state"] for one in index}


def load(service: RunningService, name: str = "simple", config: str | None = None) -> httpx.Response:
    body = {} if config is None else {"json": {"parameters": {"config": config}}}
    return service.client.post(f"/v2/repository/models/{name}/load", **body)


def unload(service: RunningService, name: str = "simple", **body: Any) -> httpx.Response:
    return service.client.post(f"/v2/repository/models/{name}/unload", **body)


def test_a_client_of_triton_controls_models(client: triton.InferenceServerClient) -> None:
    assert {one["name"] for one in client.get_model_repository_index()} == {"simple", "other"}
    assert client.is_model_ready("other")
    assert not client.is_model_ready("simple")
    client.load_model("simple")
    assert client.is_model_ready("simple")
    assert client.is_model_ready("simple", "1")
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("simple", config='"parameters": {"config": {{"max_batch_size": "16"}}}')
    client.load_model("simple", config='{"max_batch_size":"16"}')
    assert client.get_model_config("simple")["max_batch_size"] == 16
    client.load_model("simple")
    assert client.get_model_config("simple")["max_batch_size"] == 1000, "as it is configured: the other was for once"
    client.unload_model("simple", unload_dependents=True)
    assert not client.is_model_ready("simple")
    client.unload_model("simple")
    client.unload_model("never_heard_of")
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("never_heard_of")


def test_what_a_load_generator_of_triton_asks_for(client: triton.InferenceServerClient) -> None:
    """The requests of perf_analyzer's start and of one of its measurements, in their order."""
    assert client.is_server_live(query_params={"test_1": 1, "test_2": 2})
    assert client.is_server_ready()
    metadata = client.get_model_metadata("other")
    config = client.get_model_config("other")
    assert config["max_batch_size"] > 0, "the shapes of the metadata begin with the batch"
    assert [tensor["name"] for tensor in metadata["inputs"]] == [tensor["name"] for tensor in config["input"]]
    with pytest.raises(InferenceServerException, match="Request for unknown model"):
        client.get_model_metadata("never_heard_of")
    optional = {tensor["name"] for tensor in config["input"] if tensor.get("optional")}
    assert [tensor["shape"] for tensor in metadata["inputs"] if tensor["name"] not in optional] == [[1, -1], [1, 1]]
    assert {"model_repository", "model_configuration", "statistics"} <= set(client.get_server_metadata()["extensions"])
    before = client.get_inference_statistics("other")["model_stats"][0]
    keys, numkeys = triton.InferInput("KEYS", [1, 3], "INT64"), triton.InferInput("NUMKEYS", [1, 1], "INT32")
    keys.set_data_from_numpy(np.array([[1, 2, 3]]))
    numkeys.set_data_from_numpy(np.array([[3]], np.int32))
    for _ in range(5):
        client.infer("other", [keys, numkeys])
    after = client.get_inference_statistics("other")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 5
    assert after["execution_count"] == after["inference_stats"]["success"]["count"]


def models_are_not_controlled(service: RunningService) -> None:
    for refused in (load(service), unload(service)):
        assert refused.status_code == 503
        assert "explicit model load / unload is not allowed if polling is enabled" in refused.json()["error"]
    assert states(service) == {("simple", "1"): "READY"}
    assert answer(service) == [1] * DIM


def test_models_are_not_controlled_in_mode_none(document: Callable[..., dict[str, Any]]) -> None:
    with running_service(document("none", "simple")) as service:
        models_are_not_controlled(service)


def test_an_explicit_start_that_names_no_model_is_ready_without_any(document: Callable[..., dict[str, Any]]) -> None:
    with running_service(document("explicit", "simple")) as service:
        assert service.client.get("/v2/health/ready").status_code == 200
        assert states(service, ready=True) == {}


def test_a_model_that_cannot_be_loaded_is_given_up_when_it_is_unloaded(
    document: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    configuration = document("explicit", "simple", "other", load=["*"])
    shutil.rmtree(tmp_path / "simple")
    with running_service(configuration, ready=False) as service:
        wait_until(lambda: service.client.get("/v2/health/ready", params={"strict": "false"}).status_code == 200, "it settles")
        assert service.client.get("/v2/health/ready").status_code == 503
        [entry] = [one for one in service.client.post("/v2/repository/index").json() if one["name"] == "simple"]
        assert (entry["state"], "simple/1/item.model" in entry["reason"]) == ("UNAVAILABLE", True)
        assert unload(service).status_code == 200
        assert service.client.get("/v2/health/ready").status_code == 200
        write(tmp_path, "simple", 1)
        assert load(service).status_code == 200
        assert answer(service) == [1] * DIM


def test_a_repository_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(hps.ModelFileError, match="nowhere"),
        running_service(document_of(model_repository=str(tmp_path / "nowhere"))),
    ):
        pass


@pytest.mark.parametrize(
    ("service", "says"),
    [
        ({"model_control_mode": "explicit", "load_models": ["nobody"]}, "no model 'nobody', which service.load_models names"),
        ({"load_models": ["simple"]}, "expected none unless model_control_mode is explicit"),
    ],
)
def test_models_to_load_are_checked(document: Callable[..., dict[str, Any]], service: dict[str, Any], says: str) -> None:
    with pytest.raises(hps.ConfigError, match=says):
        hps.load_configuration({**document("none", "simple"), "service": service})


def test_other_settings_keep_what_was_written_online(explicit: RunningService) -> None:
    load(explicit)
    server = explicit.app.lifecycle.server
    server.insert([7], np.full((1, DIM), 9, np.float32), "simple", "item")
    for config in ('{"max_batch_size": 3}', '{"gpucacheper": 0.01}', '{"gpucache": false}', None):
        assert load(explicit, config=config).status_code == 200
        assert answer(explicit) == [9] * DIM, config
    assert load(explicit, config='{"instance_group": [{"count": 2, "gpus": [0, 1]}]}').status_code == 200
    assert server.model("simple").devices == (0, 1)


def test_what_is_written_while_settings_change_is_served(explicit: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    load(explicit)
    server = explicit.app.lifecycle.server
    refresh = deployment_module.refresh

    def written(keys: list[int]) -> None:
        server.insert(keys, np.full((len(keys), DIM), 9, np.float32), "simple", "item")

    def refresh_between_writes(*arguments: Any) -> None:
        written([7])
        refresh(*arguments)
        written([8])
        server.delete([9], "simple", "item")

    monkeypatch.setattr(deployment_module, "refresh", refresh_between_writes)
    assert load(explicit, config='{"max_batch_size": 3}').status_code == 200
    assert [answer(explicit, key=key)[0] for key in (6, 7, 8, 9)] == [1, 9, 9, 0]


def test_what_a_client_got_as_configuration_can_be_sent_back(explicit: RunningService) -> None:
    load(explicit)
    config = explicit.client.get("/v2/models/simple/config").json()
    config["max_batch_size"] = 17
    config["parameters"]["gpucacheper"]["string_value"] = "0.5"
    assert load(explicit, config=json.dumps(config)).status_code == 200
    changed = explicit.client.get("/v2/models/simple/versions/1/config").json()
    assert changed == config


REFUSED_CONFIGS = [
    ("{", 400, "not JSON"),
    ("[]", 400, "expected a JSON object"),
    ('{"gpucacheper": 7, "nonsense": 1}', 400, "2 problems"),
    ('{"name": "other"}', 400, "name: got 'other', expected 'simple'"),
    ('{"backend": "onnxruntime"}', 400, "expected 'hps'"),
    ('{"parameters": {"gpucacheper": 1}}', 400, "expected as in"),
    ('{"embedding_vecsize_per_table": [5]}', 409, r"got widths \(5,\).* cannot change under the same version"),
    ('{"embedding_table_names": ["user"]}', 409, "cannot change under the same version"),
    ('{"embedding_cache_type": "static"}', 409, "cannot change under the same version"),
    ('{"sparse_files": ["/nowhere/item.model"]}', 400, "/nowhere/item.model"),
]


def test_a_configuration_that_cannot_be_loaded_changes_nothing(explicit: RunningService) -> None:
    load(explicit)
    before = explicit.client.get("/v2/models/simple/config").json()
    for config, status, says in REFUSED_CONFIGS:
        response = load(explicit, config=config)
        assert response.status_code == status, config
        assert response.json()["error"].startswith("failed to load 'simple', ")
        assert re.search(says, response.json()["error"], re.DOTALL), response.text
        assert explicit.client.get("/v2/models/simple/config").json() == before
        assert answer(explicit) == [1] * DIM
        assert load(explicit).status_code == 200


def test_a_whole_entry_loads_a_model_that_is_not_configured(explicit: RunningService, tmp_path: Path) -> None:
    entry = model_of("new", [write(tmp_path, "new", 3)], {"item": DIM})
    del entry["model"]
    assert load(explicit, "new", json.dumps(entry)).status_code == 200
    assert answer(explicit, "new") == [3] * DIM
    assert unload(explicit, "new").status_code == 200
    assert states(explicit)["new", "1"] == "UNAVAILABLE"
    assert load(explicit, "new").status_code == 200
    del entry["sparse_files"]
    assert "sparse_files" in load(explicit, "newer", json.dumps(entry)).json()["error"]


REFUSED_REQUESTS = [
    ("/v2/repository/index", b"{", 400),
    ("/v2/repository/index", b'{"ready": "yes"}', 400),
    ("/v2/repository/models/simple/load", b"[]", 400),
    ("/v2/repository/models/simple/load", b'{"parameters": {"config": 7}}', 400),
    ("/v2/repository/models/simple/load", b'{"parameters": {"config": "{}", "file:1/item.model/key": "AA=="}}', 400),
    ("/v2/repository/models/simple/load", b'{"parameters": {"config": "%s"}}' % (b" " * (1 << 20)), 413),
    ("/v2/repository/models/simple/unload", b'{"parameters": {"unload_dependents": 1}}', 400),
    ("/v2/repository/mine/models/simple/load", b"", 400),
    ("/v2/repository/mine/models/simple/unload", b"", 400),
]


def test_requests_that_are_wrong_are_refused(explicit: RunningService) -> None:
    for path, body, status in REFUSED_REQUESTS:
        response = explicit.client.post(path, content=body)
        assert (response.status_code, bool(response.json()["error"])) == (status, True), (path, body[:80])
        assert states(explicit, ready=True) == {("other", "1"): "READY"}


def test_a_route_says_which_method_it_takes(explicit: RunningService) -> None:
    response = explicit.client.get("/v2/repository/index")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "expected POST" in response.json()["error"]


class Gate(NoProgress):
    """Holds the loading of a model's tables until it is opened."""

    def __init__(self, service: RunningService) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        service.app.lifecycle.progress = lambda: self  # type: ignore[method-assign]

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        self.entered.set()
        assert self.opened.wait(60)


def test_a_load_is_seen_while_it_runs_and_outlives_its_client(explicit: RunningService) -> None:
    gate = Gate(explicit)
    with httpx.Client(base_url=explicit.url, timeout=httpx.Timeout(60, read=0.5)) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post("/v2/repository/models/simple/load")
    assert gate.entered.wait(60)
    assert states(explicit)["simple", "1"] == "LOADING"
    assert explicit.client.get("/v2/health/ready").status_code == 200, "a server that was ready stays so"
    assert answer(explicit, "other") == [1] * DIM
    for refused in (load(explicit), unload(explicit)):
        assert refused.status_code == 409
        assert "deploying it is under way" in refused.json()["error"]
    gate.opened.set()
    wait_until(lambda: states(explicit)["simple", "1"] == "READY", "it is loaded")
    assert answer(explicit) == [1] * DIM


def test_statistics_tell_versions_and_outcomes_apart(explicit: RunningService, tmp_path: Path) -> None:
    load(explicit)
    for _ in range(3):
        answer(explicit)
    explicit.client.post("/v1/models/simple/lookup", json={"tables": {"nothing": [1]}})
    [one] = explicit.client.get("/v2/models/simple/versions/1/stats").json()["model_stats"]
    assert (one["name"], one["version"], one["inference_count"]) == ("simple", "1", 3)
    times = one["inference_stats"]
    assert (times["success"]["count"], times["fail"]["count"]) == (3, 1)
    parts = sum(times[part]["ns"] for part in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < times["compute_infer"]["ns"] < parts == times["success"]["ns"]
    assert times["cache_hit"]["count"] == times["cache_miss"]["count"] == 0
    assert one["batch_stats"][0]["compute_infer"] == times["compute_infer"]
    assert one["last_inference"] > 1.6e12
    assert one["memory_usage"][0]["byte_size"] >= ROWS * DIM * 4
    names = {one["name"] for one in explicit.client.get("/v2/models/stats").json()["model_stats"]}
    assert names == {"simple", "other"}
    write(tmp_path, "simple", 2)
    load(explicit)
    [one] = explicit.client.get("/v2/models/simple/stats").json()["model_stats"]
    assert one["inference_count"] == 0, "of the deployment that serves"
    for path in ("/v2/models/nobody/stats", "/v2/models/simple/versions/9/stats", "/v2/models/simple/versions/9/config"):
        assert explicit.client.get(path).status_code == 404


def test_statistics_of_deployments_that_are_gone_do_not_accumulate(explicit: RunningService, tmp_path: Path) -> None:
    for content in range(2, 7):
        load(explicit)
        assert answer(explicit)
        write(tmp_path, "simple", content)
    load(explicit)
    answer(explicit)
    wait_until(lambda: len(explicit.front.published.counts) <= 2, "only what serves is counted")


# -- polling -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def versions(tmp_path: Path) -> Callable[..., Any]:
    """A parameter server with one model, whose versions are directories."""

    def make(**more: Any) -> hps.HPS:
        write(tmp_path, "simple", 1, 1)
        model = model_of("simple", ["item.model"], {"item": DIM}, version_path=str(tmp_path / "simple"), **more)
        return hps.HPS(document_of(model, persistent=tmp_path / "rocksdb"))

    return make


def content(server: hps.HPS) -> float:
    return float(server.lookup([7], "simple", "item")[0, 0])


def test_polling_deploys_what_is_new_and_once(versions: Callable[..., Any], tmp_path: Path) -> None:
    with versions() as server:
        assert server.poll() == {}
        write(tmp_path, "simple", 2, 2)
        assert server.poll() == {"simple": None}
        assert content(server) == 2
        write(tmp_path, "simple", 3, 2)
        assert server.poll() == {"simple": None}
        assert content(server) == 3
        assert server.poll() == {}
        server.undeploy("simple")
        assert server.poll() == {}, "what somebody did is not undone; test_pins.py has roll-backs"
        assert server.models == ()


def test_polling_tries_broken_files_again_after_a_pause_or_a_change(
    versions: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with versions() as server:
        place = Path(write(tmp_path, "simple", 2, 2))
        (place / "emb_vector").write_bytes((place / "emb_vector").read_bytes()[:-4])
        assert server.poll() == {}, "files that do not fit are not deployed at all"
        assert content(server) == 1
        write(tmp_path, "simple", 2, 2)
        failing = True

        def deploy(*arguments: Any, **named: Any) -> Any:
            if failing:
                raise hps.DeviceMemoryError("no room")
            return honest(*arguments, **named)

        honest = server._deployer._deploy
        monkeypatch.setattr(server._deployer, "_deploy", deploy)
        assert isinstance(server.poll()["simple"], hps.DeviceMemoryError)
        assert server.poll() == {}, "not at once"
        [entry] = [one for one in server.index() if one.version == "2"]
        assert (entry.state, entry.reason) == ("unavailable", "no room")
        write(tmp_path, "simple", 3, 2)
        assert "simple" in server.poll(), "the files are others"
        monkeypatch.setattr(server.live, "_clock", lambda: time.monotonic() + live_models.LONGEST_RETRY_S)
        failing = False
        assert server.poll() == {"simple": None}, "the pause is over"
        assert content(server) == 3


def put(repository: Path, name: str, number: int) -> None:
    """A version of a model, which describes itself."""
    write(repository, name, number, number)
    entry = model_of(name, ["item.model"], {"item": DIM})
    del entry["model"]
    (repository / name / "model.json").write_text(json.dumps(entry))


def test_a_model_that_cannot_be_polled_does_not_stop_the_others(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name in ("a", "b"):
        put(repository, name, 1)
    document = document_of(persistent=tmp_path / "rocksdb", model_repository=str(repository))
    with hps.HPS(document, deploy_models=False) as server:
        assert server.poll() == {"a": None, "b": None}
        (repository / "a" / "model.json").write_text("{")
        put(repository, "b", 2)
        put(repository, "c", 3)
        assert server.poll() == {"b": None, "c": None}
        assert set(server.models) == {"a", "b", "c"}, "what cannot be read is left as it is"
        assert [one.state for one in server.index() if one.model == "a"] == ["ready"]
        shutil.rmtree(repository / "b")
        assert server.poll() == {"b": None}
        assert set(server.models) == {"a", "c"}
        entry = json.loads((repository / "c" / "model.json").read_text())
        (repository / "c" / "model.json").write_text(json.dumps({**entry, "gpucache": False}))
        assert server.poll() == {"c": None}
        assert not server.model("c").caches
        assert server.poll() == {}


def test_a_model_that_is_new_in_the_repository_can_be_deployed_by_name(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, "a", 1)
    with hps.HPS(document_of(model_repository=str(repository))) as server:
        for name in ("b", "c"):
            put(repository, name, 1)
            assert server.deploy(name).version == "1"
            assert server.lookup([7], name, "item")[0, 0] == 1
        put(repository, "broken", 1)
        (repository / "broken" / "model.json").write_text("{")
        with pytest.raises(hps.HPSError, match=r"model\.json"):
            server.deploy("broken")
        with pytest.raises(hps.UnknownModelError, match="it is not configured; configured are: a, b, c"):
            server.deploy("d")


def test_a_service_that_polls_serves_new_versions_by_itself(
    document: Callable[..., dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_service(document("poll", "simple", keep_versions=0)) as service:
        models_are_not_controlled(service)
        write(tmp_path, "simple", 2)
        wait_until(lambda: answer(service) == [2] * DIM, "the files are served")
        assert service.client.get("/v2/health/ready").status_code == 200
