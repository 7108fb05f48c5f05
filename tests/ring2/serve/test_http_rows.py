"""Online writes over HTTP: after the answer no path returns the old vector; a body with any fault in it writes nothing."""

import gzip
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.versions.deployment import Deployment
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import RunningService, document_of, model_of, running_service

ROWS, DIM = 500, 8
ROUTE = "/v1/models/shop/tables/item/rows"
KINDS: dict[str, dict[str, Any]] = {
    "direct": {"gpucache": False},
    "cached": {"gpucacheper": 1.0, "hit_rate_threshold": 1.1, "cache_refresh_percentage_per_iteration": 1.0},
    "static": {"embedding_cache_type": "static"},
}


def vectors_of(keys: Any, generation: int) -> np.ndarray:
    """Vectors that say of which key and generation they are."""
    vectors = np.empty((len(keys), DIM), np.float32)
    vectors[:, ::2], vectors[:, 1::2] = np.asarray(keys)[:, None], generation
    return vectors


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(kind: str = "cached", **more: Any) -> dict[str, Any]:
        keys = np.arange(ROWS)
        for version in (1, 2):
            hps.write_sparse_model(tmp_path / str(version), (keys, vectors_of(keys, -version)), overwrite=True)
        more |= {"num_of_worker_buffer_in_pool": 4, "max_batch_size": 5000, "version_policy": {"specific": {"versions": [1]}}}
        more["versions"] = [{"version": 2, "sparse_files": [str(tmp_path / "2")]}]
        return model_of("shop", [tmp_path / "1"], {"item": DIM}, **KINDS[kind], **more)

    return make


@pytest.fixture
def service(tmp_path: Path, model: Callable[..., dict[str, Any]]) -> Iterator[RunningService]:
    with running_service(document_of(model(), persistent=tmp_path / "rocksdb")) as service:
        yield service


TIERS = ["direct map", "cached rocks", "static map+rocks", pytest.param("cached redis+rocks", marks=pytest.mark.redis)]


@pytest.fixture(params=TIERS)
def tiers(request: pytest.FixtureRequest, tmp_path: Path, model: Callable[..., dict[str, Any]]) -> Iterator[RunningService]:
    """A service of each kind of model, and of each kind of host tiers."""
    kind, host = request.param.split()
    document = document_of(model(kind), persistent=tmp_path / "rocksdb" if "rocks" in host else None)
    with ExitStack() as stack:
        if host == "rocks":
            document["volatile_db"] = {"type": "disabled"}
        if "redis" in host:
            redis = stack.enter_context(RedisServer(tmp_path))
            document["volatile_db"] = {"type": "redis_cluster", "address": redis.address, "num_partitions": 4}
        yield stack.enter_context(running_service(document))


def binary(keys: Any, vectors: Any = None) -> dict[str, Any]:
    """A request with binary tensors, as httpx takes it."""
    inputs, body = [], b""
    for name, kind, given, dtype in (("KEYS", "INT64", keys, np.int64), ("VECTORS", "FP32", vectors, np.float32)):
        if given is not None:
            array = np.asarray(given, dtype)
            size = {"binary_data_size": array.nbytes}
            inputs.append({"name": name, "datatype": kind, "shape": list(array.shape), "parameters": size})
            body += array.tobytes()
    text = json.dumps({"inputs": inputs}).encode()
    return {"content": text + body, "headers": {"Inference-Header-Content-Length": str(len(text))}}


def as_json(keys: Any, vectors: Any = None) -> dict[str, Any]:
    content = {"keys": np.asarray(keys).tolist()} | ({} if vectors is None else {"vectors": np.asarray(vectors).tolist()})
    return {"content": json.dumps(content)}


def by_lookup(service: RunningService, keys: np.ndarray) -> np.ndarray:
    answer = service.client.post("/v1/models/shop/lookup", json={"tables": {"item": keys.tolist()}})
    return np.array(answer.raise_for_status().json()["tables"]["item"], np.float32)


def by_row(service: RunningService, keys: np.ndarray) -> np.ndarray:
    rows = [service.client.get(f"{ROUTE}/{key}").raise_for_status().json() for key in keys.tolist()]
    assert [row["key"] for row in rows] == keys.tolist()
    return np.array([row["vector"] for row in rows], np.float32)


def in_process(service: RunningService, keys: np.ndarray) -> np.ndarray:
    server = service.app.lifecycle.serving
    assert server is not None
    return server.lookup(keys, "shop", "item")


PATHS = (by_lookup, by_row, in_process)


def test_after_the_answer_no_path_returns_the_old_vector(tiers: RunningService) -> None:
    new = np.array([7, 8, ROWS + 5, 2**53 + 1, -(2**63)])
    for path in PATHS:  # so that caches have what they may
        np.testing.assert_array_equal(path(tiers, new[:2]), vectors_of(new[:2], -1))
    for generation, form in enumerate((binary, as_json, binary), 1):
        twice = np.concatenate([vectors_of(new, 99), vectors_of(new, generation)])  # of a key the last vector counts
        answer = tiers.client.post(ROUTE, **form(np.tile(new, 2), twice))
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"model": "shop", "version": "1", "table": "item", "rows": 10}
        for path in PATHS:
            np.testing.assert_array_equal(path(tiers, new), vectors_of(new, generation))
    assert tiers.client.request("DELETE", ROUTE, **binary(new[1:3])).json()["rows"] == 2
    assert tiers.client.request("DELETE", ROUTE, **as_json(new[3:])).json()["rows"] == 2
    assert tiers.client.delete(f"{ROUTE}/{new[0]}").json()["rows"] == 1
    for path in PATHS:
        assert not path(tiers, new).any(), "the default vector"
    np.testing.assert_array_equal(by_lookup(tiers, np.arange(20, 30)), vectors_of(range(20, 30), -1))


def test_a_version_is_written_to_by_its_name_and_keeps_its_rows_to_itself(service: RunningService) -> None:
    assert service.client.post("/v1/models/shop/deploy", json={"version": 2}).json()["version"] == "2"
    keys = np.array([3])
    assert service.client.post(ROUTE, **as_json(keys, vectors_of(keys, 9))).json()["version"] == "2"
    answer = service.client.post(f"{ROUTE}?version=1", **as_json(keys, vectors_of(keys, 7)))
    assert answer.json()["version"] == "1"
    for version, generation in ((2, 9), (1, 7)):
        row = service.client.get(f"{ROUTE}/3?version={version}").json()
        assert (row["version"], row["vector"]) == (str(version), vectors_of(keys, generation)[0].tolist())
    np.testing.assert_array_equal(by_lookup(service, keys), vectors_of(keys, 9))
    assert service.client.post("/v1/models/shop/undeploy", json={"version": "1"}).status_code == 200
    assert service.client.post(f"{ROUTE}?version=1", **as_json(keys, vectors_of(keys, 7))).status_code == 404


def test_a_write_beside_a_take_over_is_in_the_version_that_serves(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, keys, insert = service.app.lifecycle.serving, np.array([3]), Deployment.insert
    assert server is not None
    written = []

    def insert_beside(self: Deployment, *arguments: Any) -> None:
        insert(self, *arguments)
        written.append(self.version)
        if len(written) == 1:
            server.deploy("shop", "2")

    monkeypatch.setattr(Deployment, "insert", insert_beside)
    assert service.client.post(ROUTE, **binary(keys, vectors_of(keys, 9))).json()["version"] == "2"
    assert written == ["1", "2"]
    for path in PATHS:
        np.testing.assert_array_equal(path(service, keys), vectors_of(keys, 9))


def test_a_row_says_which_tier_has_it_and_when_it_was_written(tmp_path: Path, model: Callable[..., dict[str, Any]]) -> None:
    with running_service(document_of(model(init_ec=False), persistent=tmp_path / "rocksdb")) as service:

        def row(key: int) -> Any:
            return service.client.get(f"{ROUTE}/{key}").json()

        assert row(7)["tier"] == "volatile_db"
        by_lookup(service, np.array([7]))
        counters = service.app.lifecycle.serving.metrics.table("shop", "item")  # type: ignore[union-attr]
        counted = [*counters.hits, *counters.misses]
        assert (row(7)["tier"], row(7)["found"], row(7)["version"]) == ("embedding_cache", True, "1")
        absent = {"tier": None, "found": False, "vector": [0.0] * DIM, "written_at": None}
        assert absent.items() <= row(-7).items()
        assert [*counters.hits, *counters.misses] == counted, "no lookup"
        before = time.time_ns() // 1000
        service.client.post(ROUTE, **binary([5], vectors_of([5], 1)))
        written, after = row(5), time.time_ns() // 1000
        assert before <= written["written_at_us"] <= after
        assert datetime.fromisoformat(written["written_at"]).timestamp() == pytest.approx(written["written_at_us"] / 1e6)
        assert row(6)["written_at_us"] < before, "when it was loaded"


GOOD = np.arange(3)
FAULTS: list[tuple[int, dict[str, Any], str]] = [  # the others are in ring1/serve/test_row_writes.py
    (400, {"json": {"keys": [1, 2], "vectors": [[0] * DIM, [0] * (DIM - 1)]}}, r"\[7, 8\]"),
    (400, binary(GOOD, np.zeros((3, DIM + 1))), r"got shape \[3, 9\]"),
    (400, binary(GOOD, np.where(np.arange(3)[:, None] == 2, np.nan, vectors_of(GOOD, 1))), r"row 2 \(key 2\)"),
    (413, binary(np.arange(101), vectors_of(np.arange(101), 1)), "expected at most 100"),
]
WRONG = [
    ("POST", "/v1/models/nope/tables/item/rows", 404, "'nope'"),
    ("POST", "/v1/models/shop/tables/nope/rows", 404, "'nope'"),
    ("POST", f"{ROUTE}?version=7", 404, "'7'"),
    ("POST", f"{ROUTE}?versoin=1", 400, "versoin"),
    ("PUT", ROUTE, 405, "POST, DELETE"),
    ("POST", f"{ROUTE}/5", 405, "GET, HEAD, DELETE"),
    ("GET", f"{ROUTE}/x", 400, "'x'"),
    ("GET", f"{ROUTE}/{2**63}", 400, "64-bit"),
    ("GET", f"{ROUTE}/٥", 400, "64-bit"),
    ("DELETE", f"{ROUTE}/--5", 400, "64-bit"),
    ("GET", f"{ROUTE}/5/6", 404, "not served"),
    ("DELETE", ROUTE, 400, "not JSON"),
]


def test_a_request_with_a_fault_writes_nothing(tmp_path: Path, model: Callable[..., dict[str, Any]]) -> None:
    with running_service(document_of(model(), service={"max_rows_per_write": 100})) as service:
        for status, request, text in FAULTS:
            answer = service.client.post(ROUTE, **request)
            assert (answer.status_code, bool(re.search(text, answer.json()["error"]))) == (status, True), answer.text
        good = as_json(GOOD, vectors_of(GOOD, 1))
        for method, path, status, text in WRONG:
            answer = service.client.request(method, path, **(good if method == "POST" else {}))
            assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text
        np.testing.assert_array_equal(by_lookup(service, np.arange(120)), vectors_of(np.arange(120), -1))


def test_nan_is_written_where_it_is_not_refused_and_read_as_null(tmp_path: Path, model: Callable[..., dict[str, Any]]) -> None:
    with running_service(document_of(model(), persistent=tmp_path / "rocksdb", service={"refuse_nan": False})) as service:
        assert service.client.post(ROUTE, **binary([5], np.full((1, DIM), np.nan))).status_code == 200
        assert service.client.get(f"{ROUTE}/5").json()["vector"] == [None] * DIM
        answer = service.client.post(ROUTE, json={"keys": [5], "vectors": [[1e39] * DIM]})
        assert answer.status_code == 400, "no infinity comes out of a number"


def test_what_no_database_keeps_is_a_conflict_or_refused(tmp_path: Path, model: Callable[..., dict[str, Any]]) -> None:
    document = document_of(model(), persistent=tmp_path / "rocksdb")
    with hps.HPS(document):
        pass
    document["persistent_db"]["read_only"] = True
    with running_service(document) as service:
        for _ in range(10):  # more than a circuit breaker bears
            answer = service.client.post(ROUTE, **as_json(GOOD, vectors_of(GOOD, 1)))
            assert (answer.status_code, "read_only" in answer.json()["error"]) == (409, True)
        assert service.client.delete(f"{ROUTE}/1").status_code == 409
        for path in PATHS:
            np.testing.assert_array_equal(path(service, GOOD), vectors_of(GOOD, -1))
    with running_service(document_of(model("static"))) as service:
        answer = service.client.post(ROUTE, **as_json(GOOD, vectors_of(GOOD, 1)))
        assert (answer.status_code, "persistent_db" in answer.json()["error"]) == (400, True)


def test_writes_of_any_size_are_a_line_at_once_and_then_a_sum(
    service: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hps.serve.logs.changes")
    lines = lambda: [record.message for record in caplog.records if record.name == "hps.serve.logs.changes"]  # noqa: E731
    keys, says = np.arange(4000), "writing rows of shop.item, by 127.0.0.1 (loopback): "
    for generation, form in enumerate((binary, as_json)):
        request = form(keys, vectors_of(keys, generation))
        text = request["content"] if isinstance(request["content"], bytes) else request["content"].encode()
        headers = {**request.get("headers", {}), "content-encoding": "gzip"}
        assert service.client.post(ROUTE, content=gzip.compress(text), headers=headers).status_code == 200
        np.testing.assert_array_equal(in_process(service, keys), vectors_of(keys, generation))
    assert service.held == 0
    service.client.post(ROUTE, json={"keys": [1]})
    service.client.delete(f"{ROUTE}/1")
    first, last = (
        f"{says}{sums}" for sums in ("1 requests, 4000 rows written, 0 deleted", "3 requests, 4000 rows written, 1 deleted")
    )
    assert lines() == [first]
    assert service.stop()
    assert lines() == [first, f"{last}, 1 requests failed"]
