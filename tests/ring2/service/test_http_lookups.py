"""Lookups over HTTP from a real parameter server, by curl and Triton's client: hash map, RocksDB and embedding cache below."""

import dataclasses
import gzip
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import hps
from hps.testing.waiting import wait_until
from hps.versions.live_models import LiveModels
from tests.servers.running_service import document_of, model_of, running_service, samples

ROWS = 500
DIMS = {"user": 4, "item": 7}
DEFAULTS = [0.5, -2.0]
USER = b'{"name": "user", "datatype": "INT64", "shape": [1], "data": [1]}'
LOOKUP, INFER = "/v1/models/ranker/lookup", "/v2/models/ranker/infer"
GZIP = {"content-encoding": "gzip"}


def vectors_of(keys, dim):
    keys = np.asarray(keys, np.int64)
    return (keys[:, None] * 8 + np.arange(dim)).astype(np.float32)


def configuration(directory, **service):
    model = model_of(
        "ranker",
        [directory / f"{table}.model" for table in DIMS],
        DIMS,
        default_value_for_each_table=DEFAULTS,
        maxnum_catfeature_query_per_table_per_sample=[1, 4],
        gpucacheper=0.3,
        hit_rate_threshold=1.1,
        num_of_worker_buffer_in_pool=4,
    )
    limits = {"max_body_bytes": 100_000, "max_keys_per_request": 3000, **service}
    return document_of(model, persistent=directory / "rocksdb", service=limits)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    keys = np.arange(-10, ROWS - 10, dtype=np.int64)
    for table, dim in DIMS.items():
        hps.write_sparse_model(directory / f"{table}.model", (keys, vectors_of(keys, dim)))
    return directory


@pytest.fixture(scope="module")
def service(directory):
    with running_service(configuration(directory)) as service:
        yield service


@pytest.fixture
def client(service):
    return service.client


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_requests_are_answered(client, encoding):
    compress = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    body = compress(b'{"tables": {"user": [' + b", ".join([b"1"] * 1000) + b"]}}")
    response = client.post(LOOKUP, content=body, headers={"content-encoding": encoding})
    np.testing.assert_array_equal(np.float32(response.json()["tables"]["user"]), np.tile(vectors_of([1], 4), (1000, 1)))


def test_chunked_requests_are_answered(client):
    pieces = iter([b'{"tables": {"u', b'ser": [1', b", 2]}}"])
    response = client.post(LOOKUP, content=pieces)
    np.testing.assert_array_equal(np.float32(response.json()["tables"]["user"]), vectors_of([1, 2], 4))


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "says"),
    [
        ("POST", "/v1/models/nope/lookup", b'{"tables": {"user": [1]}}', {}, 404, "'nope'"),
        ("POST", "/v2/models/nope/infer", b"{}", {}, 404, "'nope'"),
        ("POST", "/v2/models/ranker/versions/2/infer", b"{}", {}, 404, "got version '2', deployed: 1"),
        ("POST", LOOKUP, b"not json", {}, 400, "not JSON"),
        ("POST", LOOKUP, b'{"tables": {"user": [1]}, "device": 4}', {}, 404, "got device 4, expected one of"),
        ("POST", INFER, b'{"inputs": [%s], "parameters": {"DeviceID": "4"}}' % USER, {}, 404, "got device 4"),
        ("POST", INFER, b"{}", {"inference-header-content-length": "3"}, 400, "within the body of 2"),
        ("POST", LOOKUP, b"x" * 100_001, {}, 413, "expected at most 100000 (service.max_body_bytes)"),
        ("POST", LOOKUP, iter([b"x" * 60_000, b"y" * 60_000]), {}, 413, "expected at most 100000"),
        ("POST", LOOKUP, gzip.compress(b" " * 100_001), GZIP, 413, "decompresses to more"),
        ("POST", LOOKUP, gzip.compress(b"{}")[:-9], GZIP, 400, "cut short"),
        ("POST", LOOKUP, gzip.compress(b"{}") + b"more", GZIP, 400, "4 bytes before the body"),
        ("POST", LOOKUP, b"{}", {"content-encoding": "deflate"}, 400, "decompressing the request"),
        ("POST", LOOKUP, b"{}", {"content-encoding": "br"}, 415, "got Content-Encoding 'br', expected gzip, deflate"),
        ("GET", LOOKUP, b"", {}, 405, f"got GET {LOOKUP}, expected POST"),
        ("POST", "/v2", b"", {}, 405, "got POST /v2, expected GET"),
        ("GET", "/nothing/here", b"", {}, 404, "got GET /nothing/here, which is not served"),
        ("GET", "/v2/models/nope", b"", {}, 404, "'nope'"),
        ("GET", "/v2/models/nope/ready", b"", {}, 404, "'nope'"),
        ("GET", "/v2/models/ranker/versions/7", b"", {}, 404, "got version '7'"),
        ("GET", "/v2/models/ranker/versions/7/ready", b"", {}, 404, "got version '7'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_request_gets_its_status_and_an_error_that_says_why(client, method, path, content, headers, status, says):
    response = client.request(method, path, content=content, headers=headers)
    assert response.status_code == status
    assert list(response.json()) == ["error", "request_id"]
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert says in response.json()["error"]
    if status == 405:
        assert response.headers["allow"] in says


EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
]


def test_metadata_names_the_triton_shape_and_the_tables(client):
    assert client.get("/v2").json() == {
        "name": "triton",
        "version": hps.__version__,
        "extensions": EXTENSIONS,
        "models": ["ranker"],
    }
    metadata = client.get("/v2/models/ranker").json()
    assert metadata == client.get("/v2/models/ranker/versions/1").json()
    assert metadata == {
        "name": "ranker",
        "versions": ["1"],
        "platform": "hps",
        "inputs": [
            {"name": "KEYS", "datatype": "INT64", "shape": [1, -1]},
            {"name": "NUMKEYS", "datatype": "INT32", "shape": [1, 2]},
            {"name": "OFFSETS", "datatype": "INT64", "shape": [1, -1]},
            {"name": "WEIGHTS", "datatype": "FP32", "shape": [1, -1]},
        ],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1]}],
        "tables": [
            {"name": "user", "dim": 4, "max_keys": 1000, "default_value": 0.5},
            {"name": "item", "dim": 7, "max_keys": 4000, "default_value": -2.0},
        ],
    }


def test_health_says_ready(client):
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/ranker/ready").json() == {"name": "ranker", "ready": True}
    assert client.get("/v2/models/ranker/versions/1/ready").json() == {"name": "ranker", "ready": True}


def test_metrics_count_requests_once_and_keys_by_tier(service):
    route, before = "/v1/models/{model}/lookup", samples(service)
    for _ in range(5):
        service.client.post(LOOKUP, json={"tables": {"item": [1, 2, 3]}})
    service.client.post(LOOKUP, content=b"wrong")
    counted = {
        ("hps_http_requests_total", route, "200"): 5,
        ("hps_http_requests_total", route, "400"): 1,
        ("hps_http_request_seconds_count", route): 6,
        ("hps_http_request_seconds_bucket", "+Inf", route): 6,
        ("hps_lookup_keys_total", "ranker", "item"): 15,
        ("hps_device_lookups_total", "cpu", "ranker"): 5,
    }
    after = samples(service)
    assert {name: after[name] - before.get(name, 0) for name in counted} == counted
    assert after[("hps_ready",)] == 1
    assert after[("process_resident_memory_bytes",)] > 0


def test_an_answer_says_how_many_keys_it_left_to_the_background(directory, tmp_path, caplog):
    document = configuration(directory)
    document["persistent_db"]["path"] = str(tmp_path / "rocksdb")
    del document["models"][0]["hit_rate_threshold"]
    with running_service(document) as service:
        user = np.arange(9).tolist()
        binary = {"parameters": {"binary_data_output": True}}

        def ask(new, *, path=LOOKUP, more=None):
            body = {"tables": {"user": [*user, *new], "item": [1]}, **(more or {})}
            if path != LOOKUP:
                keys = {"name": "user", "datatype": "INT64", "shape": [9 + len(new)], "data": [*user, *new]}
                body = {"inputs": [keys], **(more or {})}
            answer = service.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer

        ask([])
        server = service.app.lifecycle.server
        assert server.drain()
        assert "x-deferred-keys" not in ask([]).headers  # they are resident
        fresh = iter(range(100, 200))
        assert "sets no hit_rate_threshold" not in caplog.text
        assert ask([next(fresh)]).headers["x-deferred-keys"] == "1"
        assert ask([next(fresh)], path="/v2/models/ranker/infer").headers["x-deferred-keys"] == "1"
        assert ask([next(fresh)], path="/v2/models/ranker/infer", more=binary).headers["x-deferred-keys"] == "1"
        reported = ask([next(fresh)], more={"report": True})
        assert reported.headers["x-deferred-keys"] == "1"
        assert reported.json()["report"]["tables"]["user"]["deferred"] == 1
        assert "x-deferred-keys" not in ask([next(fresh), next(fresh)]).headers  # 9 of 11: complete
        assert caplog.text.count("sets no hit_rate_threshold") == 1


def test_paths_that_are_not_served_share_one_label(service):
    for path in ("/a", "/b", "/v2/models/x/y/z"):
        service.client.get(path)
    found = samples(service)
    assert found["hps_http_requests_total", "unknown", "404"] >= 3
    assert not [name for name in found if "/a" in name]


def test_metrics_speak_openmetrics_where_asked(client):
    response = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.count("# EOF") == 1


def test_a_bearer_token_guards_all_but_health_and_static_files(directory, tmp_path):
    document = configuration(directory, bearer_token="s3cret")
    document["persistent_db"]["path"] = str(tmp_path / "rocksdb")
    with running_service(document) as service:
        client = service.client
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v2/health/ready").status_code == 200
        lookup = {"tables": {"user": [1]}}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}, {"authorization": "s3cret"}):
            for path in (
                "/v2",
                "/v2/models/ranker",
                "/v2/models/ranker/ready",
                "/metrics",
                "/openapi.json",
                "/v1/stats",
                "/page/nope",
            ):
                response = client.get(path, headers=headers)
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                assert "s3cret" not in response.text
            assert client.post(LOOKUP, json=lookup, headers=headers).status_code == 401
            assert client.post(INFER, content=b"{}", headers=headers).status_code == 401
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} s3cret"}
            assert client.get("/metrics", headers=headers).status_code == 200
            assert client.post(LOOKUP, json=lookup, headers=headers).status_code == 200


# -- NVIDIA's Triton client, unchanged --------------------------------------------------------------------------------


@pytest.fixture
def triton_client(service):
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        yield client


def tensor(name, array, datatype, binary):
    infer_input = triton.InferInput(name, array.shape, datatype)
    infer_input.set_data_from_numpy(array, binary_data=binary)
    return infer_input


def keys_and_numkeys(users, items, binary):
    counts = np.array([[users.size, items.size]], np.int32)
    keys = np.concatenate([users, items]).reshape(1, -1)
    return [tensor("KEYS", keys, "INT64", binary), tensor("NUMKEYS", counts, "INT32", binary)]


@pytest.mark.parametrize(
    ("binary_in", "binary_out", "compression"),
    [(True, True, None), (True, None, "gzip"), (False, True, "deflate"), (False, False, "gzip"), (True, False, "deflate")],
)
def test_the_shape_of_tritons_hps_backend(triton_client, binary_in, binary_out, compression):
    users, items = np.array([3, 1, 4]), np.array([15, 92, 65, 9999])
    outputs = None if binary_out is None else [triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out)]
    answer = triton_client.infer(
        "ranker",
        keys_and_numkeys(users, items, binary_in),
        outputs=outputs,
        request_id="7",
        parameters={"found": True},
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    expected = np.concatenate([vectors_of(users, 4).ravel(), vectors_of(items[:3], 7).ravel(), np.full(7, -2, np.float32)])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), expected)
    assert answer.as_numpy("FOUND0").tolist() == [True] * 6 + [False]
    assert answer.get_response()["id"] == "7"
    assert answer.get_response()["model_name"] == "ranker"
    assert answer.get_response()["parameters"] == {"NumSample": 1, "DeviceID": 0}  # 7 keys, at most 5 a sample


@pytest.mark.parametrize(("users_binary", "items_binary", "binary_out"), [(True, False, True), (False, True, False)])
def test_one_input_a_table_and_the_found_mask_in_the_form_each_asks_for(triton_client, users_binary, items_binary, binary_out):
    users, items = np.array([3, 1, 4]), np.array([[15, 9999], [65, 35]])
    inputs = [tensor("user", users, "INT64", users_binary), tensor("item", items, "INT64", items_binary)]
    forms = {"item": binary_out, "item.found": not binary_out, "user": binary_out}
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name, binary in forms.items()]
    answer = triton_client.infer("ranker", inputs, model_version="1", outputs=outputs)
    np.testing.assert_array_equal(answer.as_numpy("user"), vectors_of(users, 4))
    expected = vectors_of(items.ravel(), 7).reshape(2, 2, 7)
    expected[0, 1] = -2
    np.testing.assert_array_equal(answer.as_numpy("item"), expected)
    np.testing.assert_array_equal(answer.as_numpy("item.found"), [[True, False], [True, True]])


@pytest.fixture(scope="module")
def two_devices(directory, tmp_path_factory):
    """Stands for a server with two devices: the vectors in the cache of the second differ from those in the first's by 1000."""
    document = configuration(directory)
    document["persistent_db"]["path"] = str(tmp_path_factory.mktemp("two") / "rocksdb")
    server = hps.HPS(document)
    one = server.model("ranker")
    sessions = {0: one.session(0), 1: one.renew(one.config, one.tables)[0]}
    for device, session in sessions.items():
        for index, dim in enumerate(DIMS.values()):
            session.cache.insert(index, np.arange(3), vectors_of(np.arange(3), dim) + 1000 * device)
    server.live = LiveModels({"ranker": dataclasses.replace(one, sessions=sessions)})
    with running_service(document, server) as service:
        yield service
    server.close()


def test_requests_are_answered_by_both_devices_in_turn_or_by_the_one_that_they_name(two_devices):
    users, items = np.array([0, 1]), np.array([2])
    expected = np.concatenate([vectors_of(users, 4).ravel(), vectors_of(items, 7).ravel()])
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=True)]

    def device_of(answer):
        device = answer.get_response()["parameters"]["DeviceID"]
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), expected + 1000 * device)
        return device

    with triton.InferenceServerClient(two_devices.url.removeprefix("http://")) as client:
        inputs = keys_and_numkeys(users, items, binary=True)
        assert sorted(device_of(client.infer("ranker", inputs, outputs=outputs)) for _ in range(6)) == [0, 0, 0, 1, 1, 1]
        for device in (0, "1", 1, "0"):
            answer = client.infer("ranker", inputs, outputs=outputs, parameters={"DeviceID": device})
            assert device_of(answer) == int(device)


def test_a_lost_device_answers_only_those_who_name_it(two_devices, monkeypatch):
    def device_of(**named):
        answer = two_devices.client.post(LOOKUP, json={"tables": {"item": [2]}, **named}).json()
        return round((answer["tables"]["item"][0][0] - vectors_of([2], 7)[0, 0]) / 1000)

    def answering():
        return {device_of() for _ in range(6)}

    sessions = two_devices.app.lifecycle.server.model("ranker").sessions
    for lost, other in ((1, 0), (0, 1)):
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(sessions[lost], "lost", True)
            wait_until(lambda other=other: answering() == {other}, "the fronts know")
            assert device_of(device=lost) == lost
            meanwhile.setattr(sessions[other], "lost", True)
            wait_until(lambda: answering() == {0, 1}, "both are lost")
        wait_until(lambda: answering() == {0, 1}, "both are there")


# -- bags -------------------------------------------------------------------------------------------------------------


def by_kind(name, array, binary=True):
    return tensor(name, array, {"i8": "INT64", "i4": "INT32", "f4": "FP32"}[array.dtype.str[1:]], binary)


@pytest.mark.parametrize(("numkeys", "weighted", "binary"), [(True, False, True), (False, True, False), (True, True, True)])
def test_concatenated_bags_are_the_columns_of_one_output(service, triton_client, numkeys, weighted, binary):
    rng = np.random.default_rng(2)
    keys = [rng.integers(-10, ROWS, 40) for _ in DIMS]
    offsets = [np.sort(np.append(rng.integers(0, 41, 19), [0, 40])) for _ in DIMS]  # some bags are empty
    weights = [rng.normal(size=40).astype(np.float32) if weighted else None for _ in DIMS]
    inputs = [by_kind("KEYS", np.concatenate(keys), binary), by_kind("OFFSETS", np.array(offsets), binary)]
    inputs += [by_kind("WEIGHTS", np.concatenate(weights), binary)] if weighted else []
    inputs += [by_kind("NUMKEYS", np.array([[40, 40]], np.int32), binary)] if numkeys else []
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
    answer = triton_client.infer("ranker", inputs, outputs=outputs, parameters={"combiner": "mean", "item.combiner": "sqrtn"})
    bags = {
        name: hps.Bags(*given, combiner=combiner)
        for name, combiner, *given in zip(DIMS, ("mean", "sqrtn"), keys, offsets, weights, strict=True)
    }
    columns = service.app.lifecycle.serving.lookup_pooled(bags, "ranker")
    np.testing.assert_allclose(answer.as_numpy("OUTPUT0"), np.hstack([*columns.values()]), 2e-6, 1e-2)
    assert answer.get_response()["parameters"] == {"NumSample": 20, "DeviceID": 0}


def test_a_combiner_makes_bags_of_rows_of_keys(triton_client):
    keys = np.random.default_rng(4).integers(0, ROWS - 10, (50, 20))
    assert triton_client.infer("ranker", [by_kind("item", keys)]).as_numpy("item").shape == (50, 20, 7)
    bags = triton_client.infer("ranker", [by_kind("item", keys)], parameters={"combiner": "sum"}).as_numpy("item")
    np.testing.assert_array_equal(bags, [vectors_of(one, 7).sum(0) for one in keys])


@pytest.mark.parametrize("binary", [True, False])
def test_no_bags_and_empty_bags_are_answered(triton_client, binary):
    for count in (0, 3):
        offsets = np.zeros((2, count + 1), np.int64)
        inputs = [by_kind("KEYS", np.empty(0, np.int64), binary), by_kind("OFFSETS", offsets, binary)]
        outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
        answer = triton_client.infer("ranker", inputs, outputs=outputs).get_output("OUTPUT0")
        assert answer["shape"] == [count, sum(DIMS.values())]
        assert binary or answer["data"] == [0.0] * count * sum(DIMS.values())


@pytest.mark.parametrize(
    ("offsets", "parameters", "status", "says"),
    [
        (np.array([0, 2, 1, 3]), {}, "400", "never to fall"),
        (np.array([0, 3]), {"combiner": "max"}, "400", "got combiner 'max'"),
        (np.array([0, 3]), {"nope.combiner": "sum"}, "404", "'nope'"),
        (np.r_[np.zeros(3001, np.int32), np.int32(3)], {}, "413", "got 3001 bags"),
        (np.zeros(10_000_000, np.int64), {}, "413", "service.max_body_bytes"),
    ],
)
def test_wrong_bags_are_refused_and_the_service_goes_on(service, triton_client, offsets, parameters, status, says):
    inputs = [by_kind("item", np.arange(3)), by_kind("item.offsets", offsets)]
    with pytest.raises(InferenceServerException, match=says) as caught:
        triton_client.infer("ranker", inputs, parameters=parameters)
    assert caught.value.status() == status
    answer = triton_client.infer("ranker", [by_kind("item", np.array([[1]]))], parameters={"combiner": "sum"})
    np.testing.assert_array_equal(answer.as_numpy("item"), vectors_of([1], 7))
    # The rest of a body that is too large may still arrive, and is thrown away.
    wait_until(lambda: service.held == 0, "nothing is held any more")


@pytest.mark.parametrize("empty", [{"shape": [10**15, 0], "data": []}, {"shape": [1, 10**15], "data": [1]}])
def test_numbers_in_a_shape_reserve_no_memory(service, empty):
    inputs = [{"name": "item", "datatype": "INT64", **empty}]
    response = service.client.post(INFER, json={"inputs": inputs, "parameters": {"combiner": "sum"}})
    assert response.status_code in (400, 413)
    assert service.held == 0


def test_the_vectors_of_all_keys_are_held_while_bags_are_looked_up(service, triton_client, monkeypatch):
    """A fourth of the limit is for small requests; keys whose rows do not fit are refused before they are looked up."""
    inputs = [by_kind("item", np.zeros((1, 3000), np.int64))]
    assert triton_client.infer("ranker", inputs, parameters={"combiner": "sum"}).as_numpy("item").shape == (1, 7)
    monkeypatch.setattr(service.front.memory, "large_limit", 4 * 7 * 3000)
    with pytest.raises(InferenceServerException, match="answering the request: it takes up to") as caught:
        triton_client.infer("ranker", inputs, parameters={"combiner": "sum"})
    assert caught.value.status() == "413"
    assert service.held == 0


# -- answers so large that their memory is used again -----------------------------------------------------------------


def test_large_answers_keep_their_vectors_until_slow_clients_have_read_them(tmp_path):
    keys, dim, asked = np.arange(64), 128, 8000  # 4 MB an answer
    hps.write_sparse_model(tmp_path / "t.model", (keys, vectors_of(keys, dim)))
    model = model_of("wide", [tmp_path / "t.model"], {"t": dim}, max_batch_size=asked, num_of_worker_buffer_in_pool=4)
    with running_service(document_of(model)) as service:

        def ask(client):
            with triton.InferenceServerClient(service.url.removeprefix("http://")) as quick:
                for nth in range(12):
                    part = np.full(asked, (client + 5 * nth) % 64)
                    found = quick.infer("wide", [tensor("t", part, "INT64", True)]).as_numpy("t")
                    assert (found == vectors_of(part[:1], dim)).all()
            return True

        body = b'{"inputs": [{"name": "t", "datatype": "INT64", "shape": [8000], "parameters": {"binary_data_size": 64000}}]'
        body += b', "parameters": {"binary_data_output": true}}'
        head = b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % (len(body) + 64000)
        head += b"Inference-Header-Content-Length: %d\r\n\r\n" % len(body)
        with ExitStack() as stack, ThreadPoolExecutor(4) as clients:
            slow = [stack.enter_context(service.connect()) for _ in range(4)]
            for key, connection in enumerate(slow):
                connection.sendall(head + body + np.full(asked, key).tobytes())
                assert connection.recv(10)
            assert all(clients.map(ask, range(4)))
            for key, connection in enumerate(slow):
                connection.shutdown(socket.SHUT_WR)  # it closes after the answer
                answer = b"".join(iter(partial(connection.recv, 1 << 20), b""))
                vectors = np.frombuffer(answer[-4 * dim * asked :], np.float32).reshape(-1, dim)
                assert (vectors == vectors_of([key], dim)).all()
