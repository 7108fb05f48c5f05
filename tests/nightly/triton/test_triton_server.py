"""Triton itself answers from `hps.triton`: every vector equals that of a direct lookup, bit for bit."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

import hps
from hps.testing.waiting import wait_until
from tests.servers.redis_server import free_ports
from tests.servers.running_service import document_of, model_of
from tests.servers.triton_server import TritonServer, add_model, configuration_of

pytestmark = pytest.mark.triton
DIMS = {"item": 16, "user": 5, "tag": 1}
ROWS = 2000
REQUESTS = 1000


def write(place: Path, content: int, version: str = "1") -> list[str]:
    random = np.random.default_rng(content)
    made = []
    for name, dim in DIMS.items():
        made.append(str(place / version / f"{name}.model"))
        vectors = random.standard_normal((ROWS, dim), np.float32)
        hps.write_sparse_model(made[-1], (np.arange(ROWS), vectors), overwrite=True)
    return made


def document(place: Path, content: int, name: str = "ranker", **more: object) -> dict:
    model = model_of(name, write(place, content), DIMS, hit_rate_threshold=1.1, gpucacheper=0.1, **more)
    return document_of(model, persistent=place / "rocksdb")


def stated(place: Path, document: dict) -> Path:
    place.write_text(json.dumps(document))
    return place


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "repository"
    place.mkdir()
    return place


@pytest.fixture
def server(children, repository):
    started = []

    def start(*names: str) -> TritonServer:
        started.append(TritonServer(children, repository, tuple(free_ports(2))))
        for name in names:
            started[0].http.load_model(name)
        return started[0]

    yield start
    if started:
        started[0].stop()


@pytest.fixture
def direct(tmp_path: Path):
    """The same tables, looked up in this process."""
    (tmp_path / "direct").mkdir()
    with hps.HPS(document(tmp_path / "direct", 1)) as opened:
        yield opened


def tensors(client, arrays: dict[str, np.ndarray]) -> list:
    kinds = {np.dtype(np.int64): "INT64", np.dtype(np.int32): "INT32", np.dtype(np.float32): "FP32"}
    made = []
    for name, array in arrays.items():
        made.append(client.InferInput(name, list(array.shape), kinds[array.dtype]))
        made[-1].set_data_from_numpy(array)
    return made


def ask(client, model: str, arrays: dict[str, np.ndarray], *outputs: str) -> list[np.ndarray]:
    kind = grpc if isinstance(client, grpc.InferenceServerClient) else http
    wanted = [kind.InferRequestedOutput(name) for name in outputs]
    answer = client.infer(model, tensors(kind, arrays), outputs=wanted)
    return [answer.as_numpy(name) for name in outputs]


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def test_a_thousand_answers_equal_those_of_a_direct_lookup(server, repository, direct, tmp_path):
    ps = stated(tmp_path / "ps.json", document(tmp_path, 1))
    add_model(repository, "ranker", configuration_of(ps))
    triton = server("ranker")
    random = np.random.default_rng(0)
    with grpc.InferenceServerClient(triton.grpc_address) as by_grpc, ThreadPoolExecutor(8) as threads:

        def request(number: int, client: Any) -> None:
            if number % 4 in (0, 1):  # as HugeCTR's backend
                keys = {name: cases[number][name].reshape(-1) for name in DIMS}
                counts = np.array([[key.size for key in keys.values()]], np.int32)
                [vectors] = ask(
                    client, "ranker", {"KEYS": np.concatenate([*keys.values()])[None], "NUMKEYS": counts}, "OUTPUT0"
                )
                parts = [direct.lookup(one, "ranker", name).reshape(-1) for name, one in keys.items()]
                same(vectors, np.concatenate(parts)[None])
                return
            keys = {name: cases[number][name] for name in [*DIMS][: 1 + number % 3]}
            for name, vectors in zip(keys, ask(client, "ranker", keys, *keys), strict=True):
                expected = direct.lookup(keys[name].reshape(-1), "ranker", name)
                same(vectors, expected.reshape(*keys[name].shape, DIMS[name]))

        def case() -> dict[str, np.ndarray]:  # of some keys that no tier has; a row has one key of each table, or none
            rows = int(random.integers(1, 200))
            return {
                name: random.integers(-50, ROWS + 50, (rows, int(random.integers(0, 2) or name == "item"))) for name in DIMS
            }

        cases = [case() for _ in range(REQUESTS)]
        answers = [threads.submit(request, number, by_grpc) for number in range(0, REQUESTS, 2)]
        for number in range(1, REQUESTS, 2):  # the client for HTTP stays in its thread
            request(number, triton.http)
        for answer in answers:
            answer.result()
    assert triton.stop() == 0
    assert "Traceback" not in triton.log.read_text()


def test_models_are_loaded_and_unloaded_and_what_cannot_be_loaded_says_why(server, repository, tmp_path):
    ps = stated(tmp_path / "ps.json", document(tmp_path, 1))
    other = stated(tmp_path / "other.json", document_of(model_of("other", write(tmp_path / "o", 7), DIMS)))
    add_model(repository, "ranker", configuration_of(ps))
    add_model(repository, "other", configuration_of(other, instances=3))
    triton = server("ranker", "other")

    def answer(model: str) -> float:
        return float(ask(triton.http, model, {"tag": np.array([[5]])}, "tag")[0][0, 0, 0])

    def content(number: int) -> float:
        random = np.random.default_rng(number)
        return float([random.standard_normal((ROWS, dim), np.float32) for dim in DIMS.values()][-1][5, 0])

    assert answer("ranker") == content(1)
    assert [answer("other") for _ in range(30)] == [content(7)] * 30
    for content_number in (2, 3):  # a second round, too
        triton.http.unload_model("ranker")
        wait_until(lambda: not triton.http.is_model_ready("ranker"), "the model is unloaded")
        ps.write_text("{")
        with pytest.raises(InferenceServerException, match=r"ps\.json"):
            triton.http.load_model("ranker")
        stated(ps, document(tmp_path, content_number))
        triton.http.load_model("ranker")
        assert answer("ranker") == content(content_number)
        assert answer("other") == content(7)
    triton.http.load_model("ranker")  # of which nothing has changed in Triton's repository: nothing happens
    (repository / "ranker" / "1" / "model.py").touch()
    with pytest.raises(InferenceServerException, match="rocksdb"):  # its next process opens it before the present one ends
        triton.http.load_model("ranker")
    assert answer("ranker") == content(3)
    for content_number in (8, 9):
        write(tmp_path / "o", content_number)
        (repository / "other" / "1" / "model.py").touch()
        triton.http.load_model("other")
        assert answer("other") == content(content_number)


def test_a_new_version_takes_over_while_the_model_is_loaded(server, repository, tmp_path):
    versions = document(tmp_path / "v", 1)
    versions["models"][0]["version_path"] = str(tmp_path / "v")
    versions["models"][0]["sparse_files"] = [f"{name}.model" for name in DIMS]
    versions["service"] = {"model_control_mode": "poll", "repository_poll_s": 0.1}
    add_model(repository, "ranker", configuration_of(stated(tmp_path / "ps.json", versions)))
    triton = server("ranker")
    for number in (2, 3):
        write(tmp_path / "v", number, str(number))
        random = np.random.default_rng(number)
        expected = random.standard_normal((ROWS, 16), np.float32)[:1]
        wait_until(
            lambda expected=expected: np.array_equal(
                ask(triton.http, "ranker", {"item": np.array([[0]])}, "item")[0][0], expected
            ),
            "the version takes over",
        )
