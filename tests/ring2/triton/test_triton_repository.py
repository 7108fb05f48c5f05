"""Triton's model repository, model configuration and statistics extensions, asked with Triton's own client and without."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import hps
from hps.testing.waiting import wait_until
from tests.servers.running_service import RunningService, document_of, model_of, running_service

DIM = 4
ROWS = 200


def write(directory: Path, name: str, content: int) -> str:
    place = directory / name / "1" / "item.model"
    place.parent.mkdir(parents=True, exist_ok=True)
    hps.write_sparse_model(place, (np.arange(ROWS), np.full((ROWS, DIM), content, np.float32)), overwrite=True)
    return str(place)


@pytest.fixture
def document(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(mode: str, *names: str, **service: Any) -> dict[str, Any]:
        more = {"cache_refresh_percentage_per_iteration": 1.0, "num_of_worker_buffer_in_pool": 2, "keep_versions": 0}
        models = [model_of(name, [write(tmp_path, name, 1)], {"item": DIM}, **more) for name in names]
        service = {"model_control_mode": mode, "repository_poll_s": 0.05, **service}
        return document_of(*models, persistent=tmp_path / "rocksdb", service=service)

    return make


@pytest.fixture
def explicit(document: Callable[..., dict[str, Any]]) -> Iterator[RunningService]:
    with running_service(document("explicit", "simple", "other", load_models=["other"]), grpc=True) as service:
        yield service


@pytest.fixture
def client(explicit: RunningService) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(explicit.url.removeprefix("http://")) as client:
        yield client


def answer(service: RunningService, name: str = "simple") -> list[float]:
    return service.client.post(f"/v1/models/{name}/lookup", json={"tables": {"item": [7]}}).json()["tables"]["item"][0]


def states(service: RunningService, **body: Any) -> dict[tuple[str, str], str]:
    index = service.client.post("/v2/repository/index", json=body).json()
    return {(one["name"], one["version"]): one["state"] for one in index}


def load(service: RunningService, name: str = "simple", config: str | None = None) -> httpx.Response:
    body = {} if config is None else {"json": {"parameters": {"config": config}}}
    return service.client.post(f"/v2/repository/models/{name}/load", **body)


def unload(service: RunningService, name: str = "simple", **body: Any) -> httpx.Response:
    return service.client.post(f"/v2/repository/models/{name}/unload", **body)


@pytest.mark.parametrize("library", [triton, triton_grpc])
def test_a_client_of_triton_controls_models(explicit: RunningService, library: Any) -> None:
    """As its examples simple_http_model_control.py and simple_grpc_model_control.py do."""
    address = explicit.grpc if library is triton_grpc else explicit.url.removeprefix("http://")
    with library.InferenceServerClient(address) as client:

        def size() -> int:
            config = client.get_model_config("simple")
            return int(config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size)

        assert client.is_model_ready("other")
        assert not client.is_model_ready("simple")
        for _ in range(2):
            client.load_model("simple")
            assert client.is_model_ready("simple", "1")
            client.load_model("simple", config='{"max_batch_size":"16"}')
            assert size() == 16
            client.load_model("simple")
            assert size() == 1000, "as it is configured: the other was for once"
            for name, arguments in (
                ("simple", {"config": '"parameters": {"config": {{"max_batch_size": "16"}}}'}),
                ("simple", {"config": "{}", "files": {"file:" + "A" * 256: b"a"}}),
                ("never_heard_of", {}),
            ):
                with pytest.raises(InferenceServerException, match=f"failed to load '{name}', failed to poll from") as raised:
                    client.load_model(name, **arguments)
                over_http = "404" if name == "never_heard_of" else "400"
                assert raised.value.status() == ("StatusCode.INTERNAL" if library is triton_grpc else over_http)
            for name in ("simple", "simple", "never_heard_of"):
                client.unload_model(name, unload_dependents=True)
            assert not client.is_model_ready("simple")
    assert 'status="500"' not in explicit.client.get("/metrics").text, "they are no bugs of ours"


def test_what_a_load_generator_of_triton_asks_for(client: triton.InferenceServerClient) -> None:
    """The requests of perf_analyzer's start and of one of its measurements, in their order."""
    assert client.is_server_live(query_params={"test_1": 1, "test_2": 2})
    assert client.is_server_ready()
    metadata, config = client.get_model_metadata("other"), client.get_model_config("other")
    assert config["max_batch_size"] > 0, "the shapes of the metadata begin with the batch"
    assert [tensor["name"] for tensor in metadata["inputs"]] == [tensor["name"] for tensor in config["input"]]
    with pytest.raises(InferenceServerException, match="Request for unknown model"):
        client.get_model_metadata("never_heard_of")
    optional = {tensor["name"] for tensor in config["input"] if tensor.get("optional")}
    assert [tensor["shape"] for tensor in metadata["inputs"] if tensor["name"] not in optional] == [[1, -1], [1, 1]]
    before = client.get_inference_statistics("other")["model_stats"][0]
    keys, numkeys = triton.InferInput("KEYS", [1, 3], "INT64"), triton.InferInput("NUMKEYS", [1, 1], "INT32")
    keys.set_data_from_numpy(np.array([[1, 2, 3]]))
    numkeys.set_data_from_numpy(np.array([[3]], np.int32))
    for _ in range(5):
        client.infer("other", [keys, numkeys])
    after = client.get_inference_statistics("other")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 5
    assert after["execution_count"] == after["inference_stats"]["success"]["count"]


def test_a_model_that_cannot_be_loaded_is_given_up_when_it_is_unloaded(
    document: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    configuration = document("explicit", "simple", "other", load_models=["*"])
    shutil.rmtree(tmp_path / "simple")
    with running_service(configuration, ready=False) as service:
        ready = service.client.get
        wait_until(lambda: ready("/v2/health/ready", params={"strict": "false"}).status_code == 200, "it settles")
        assert ready("/v2/health/ready").status_code == 503
        [entry] = [one for one in service.client.post("/v2/repository/index").json() if one["name"] == "simple"]
        assert (entry["state"], "simple/1/item.model" in entry["reason"]) == ("UNAVAILABLE", True)
        assert unload(service).status_code == 200
        assert ready("/v2/health/ready").status_code == 200
        write(tmp_path, "simple", 1)
        assert load(service).status_code == 200
        assert answer(service) == [1] * DIM


def test_models_to_load_are_checked(document: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    content = document("explicit", "simple", load_models=["nobody"])
    with pytest.raises(hps.ConfigError, match=r"no model 'nobody', which service\.load_models names"):
        hps.load_configuration(content)
    content["service"] = {"load_models": ["simple"]}
    with pytest.raises(hps.ConfigError, match="expected none unless model_control_mode is explicit"):
        hps.load_configuration(content)


def test_what_a_client_got_as_configuration_can_be_sent_back(explicit: RunningService) -> None:
    load(explicit)
    config = explicit.client.get("/v2/models/simple/config").json()
    config["max_batch_size"] = 17
    config["parameters"]["gpucacheper"]["string_value"] = "0.5"
    assert load(explicit, config=json.dumps(config)).status_code == 200
    assert explicit.client.get("/v2/models/simple/versions/1/config").json() == config
    assert load(explicit, config='{"instance_group": [{"count": 2, "gpus": [0, 1]}]}').status_code == 200
    assert explicit.app.lifecycle.server.model("simple").devices == (0, 1)  # type: ignore[union-attr]


REFUSED_CONFIGS = [
    ("{", 400, "not JSON"),
    ("[]", 400, "expected a JSON object"),
    ('{"gpucacheper": 7, "nonsense": 1}', 400, "2 problems"),
    ('{"name": "other"}', 400, "name: got 'other', expected 'simple'"),
    ('{"backend": "onnxruntime"}', 400, "expected 'hps'"),
    ('{"parameters": {"gpucacheper": 1}}', 400, "expected as in"),
    ('{"embedding_vecsize_per_table": [5]}', 409, r"got widths \(5,\).* cannot change under the same version"),
    ('{"sparse_files": ["/nowhere/item.model"]}', 400, "/nowhere/item.model"),
]


def test_what_cannot_be_loaded_changes_nothing(explicit: RunningService) -> None:
    for path, body, status in REFUSED_REQUESTS:
        response = explicit.client.post(f"/v2/repository/{path}", content=body)
        assert (response.status_code, bool(response.json()["error"])) == (status, True), (path, body[:80])
    assert states(explicit, ready=True) == {("other", "1"): "READY"}
    response = explicit.client.get("/v2/repository/index")
    assert (response.status_code, response.headers["allow"], "expected POST" in response.text) == (405, "POST", True)
    load(explicit)
    before = explicit.client.get("/v2/models/simple/config").json()
    for config, status, says in REFUSED_CONFIGS:
        response = load(explicit, config=config)
        assert response.status_code == status, config
        assert re.search(f"^failed to load 'simple', .*{says}", response.json()["error"], re.DOTALL), response.text
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
    ("index", b"{", 400),
    ("index", b'{"ready": "yes"}', 400),
    ("models/simple/load", b"[]", 400),
    ("models/simple/load", b'{"parameters": {"config": 7}}', 400),
    ("models/simple/load", b'{"parameters": {"config": "{}", "file:1/item.model/key": "AA=="}}', 400),
    ("models/simple/load", b'{"parameters": {"config": "%s"}}' % (b" " * (1 << 20)), 413),
    ("models/simple/unload", b'{"parameters": {"unload_dependents": 1}}', 400),
    ("mine/models/simple/load", b"", 400),
    ("mine/models/simple/unload", b"", 400),
]


def test_statistics_tell_versions_and_outcomes_apart(explicit: RunningService, tmp_path: Path) -> None:
    load(explicit)
    for _ in range(3):
        answer(explicit)
    explicit.client.post("/v1/models/simple/lookup", json={"tables": {"nothing": [1]}})
    [one] = explicit.client.get("/v2/models/simple/versions/1/stats").json()["model_stats"]
    times = one["inference_stats"]
    assert (one["name"], one["version"], one["inference_count"]) == ("simple", "1", 3)
    assert (times["success"]["count"], times["fail"]["count"]) == (3, 1)
    parts = sum(times[part]["ns"] for part in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < times["compute_infer"]["ns"] < parts == times["success"]["ns"]
    assert times["cache_hit"]["count"] == times["cache_miss"]["count"] == 0
    assert one["batch_stats"][0]["compute_infer"] == times["compute_infer"]
    assert one["last_inference"] > 1.6e12
    assert one["memory_usage"][0]["byte_size"] >= ROWS * DIM * 4
    every = explicit.client.get("/v2/models/stats").json()["model_stats"]
    assert {one["name"] for one in every} == {"simple", "other"}
    write(tmp_path, "simple", 2)
    load(explicit)
    [one] = explicit.client.get("/v2/models/simple/stats").json()["model_stats"]
    assert one["inference_count"] == 0, "of the deployment that serves"
    for path in ("nobody/stats", "simple/versions/9/stats", "simple/versions/9/config"):
        assert explicit.client.get(f"/v2/models/{path}").status_code == 404


def test_models_are_not_controlled_unless_the_mode_is_explicit(document: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    for mode in ("none", "poll"):
        with running_service(document(mode, "simple")) as service:
            for refused in (load(service), unload(service)):
                assert refused.status_code == 503
                assert "explicit model load / unload is not allowed if polling is enabled" in refused.json()["error"]
            assert states(service) == {("simple", "1"): "READY"}
            assert answer(service) == [1] * DIM
            if mode == "poll":  # it serves new versions by itself
                write(tmp_path, "simple", 2)
                wait_until(lambda service=service: answer(service) == [2] * DIM, "the files are served")
                assert service.client.get("/v2/health/ready").status_code == 200
    with running_service(document("explicit", "simple")) as service:
        assert service.client.get("/v2/health/ready").status_code == 200, "it names no model"
        assert states(service, ready=True) == {}
