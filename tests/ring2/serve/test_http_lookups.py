"""Lookups over HTTP from a real parameter server, by curl and Triton's client: hash map, RocksDB and embedding cache below.

What every wire answers and refuses is in test_wires.py.
"""

import dataclasses
import gzip
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPResponse

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
USER = b'{"name": "user", "datatype": "INT64", "shape": [1], "data": [1]}'
LOOKUP, INFER = "/v1/models/ranker/lookup", "/v2/models/ranker/infer"
GZIP = {"content-encoding": "gzip"}


def vectors_of(keys, dim):
    return (np.asarray(keys, np.int64)[:, None] * 8 + np.arange(dim)).astype(np.float32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    keys = np.arange(-10, ROWS - 10, dtype=np.int64)
    for table, dim in DIMS.items():
        hps.write_sparse_model(directory / f"{table}.model", (keys, vectors_of(keys, dim)))
    return directory


@pytest.fixture(scope="module")
def configuration(directory, tmp_path_factory):
    """A configuration with a RocksDB of its own."""

    def configuration(**service):
        more = {"gpucacheper": 0.3, "hit_rate_threshold": 1.1, "num_of_worker_buffer_in_pool": 4}
        more |= {"default_value_for_each_table": [0.5, -2.0], "maxnum_catfeature_query_per_table_per_sample": [1, 4]}
        model = model_of("ranker", [directory / f"{table}.model" for table in DIMS], DIMS, **more)
        limits = {"max_body_bytes": 100_000, "max_keys_per_request": 3000, **service}
        return document_of(model, persistent=tmp_path_factory.mktemp("database") / "rocksdb", service=limits)

    return configuration


@pytest.fixture(scope="module")
def service(configuration):
    with running_service(configuration()) as service:
        yield service


WRONG = [
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
    ("POST", "/v2", b"", {}, 405, "got POST /v2, expected GET, HEAD"),
    ("POST", "/v2/health/live", b"", {}, 405, "got POST /v2/health/live, expected GET, HEAD"),
    ("GET", "/nothing/here", b"", {}, 404, "got GET /nothing/here, which is not served"),
    ("GET", "/v2/models/nope", b"", {}, 404, "'nope'"),
    ("GET", "/v2/models/nope/ready", b"", {}, 404, "'nope'"),
    ("GET", "/v2/models/ranker/versions/7", b"", {}, 404, "got version '7'"),
    ("GET", "/v2/models/ranker/versions/7/ready", b"", {}, 404, "got version '7'"),
]


def test_a_wrong_request_gets_its_status_and_an_error_that_says_why(service):
    for method, path, content, headers, status, says in WRONG:
        response = service.client.request(method, path, content=content, headers=headers)
        error = response.json()
        assert (response.status_code, list(error)) == (status, ["error", "request_id"]), (method, path, error)
        assert error["request_id"] == response.headers["x-request-id"]
        assert says in error["error"]
        assert response.headers.get("allow", "") in says
    found = samples(service)  # paths that are not served share one label
    assert found["hps_http_requests_total", "unknown", "404"] >= 1
    assert not [name for name in found if "/nothing" in str(name)]


def test_head_is_answered_as_get_without_a_body(service):
    """On one connection, so that a body would be the next answer."""
    ready = "/v2/health/ready", "/v2/models/ranker/ready", "/v2/models/ranker/versions/1/ready"
    with service.connect() as connection:
        others = "/v2/health/live", "/v2/health/ready?strict=false", "/v2", "/v2/models/nope/ready", "/", "/none"
        for path in (*ready, *others, "/v1/models/ranker/tables/user/rows/7", "/v1/models/ranker/tables/user/rows/x"):
            expected = service.client.get(path)
            for _ in range(2):
                connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                response = HTTPResponse(connection, method="HEAD")
                response.begin()
                got = response.status, response.getheader("content-length"), response.getheader("content-type")
                assert got == (expected.status_code, str(len(expected.content)), expected.headers["content-type"]), path
    assert samples(service)["hps_http_requests_total", "/v2/health/live", "200"] >= 2


def test_metadata_names_the_triton_shape_and_the_tables(service):
    def get(path):
        return service.client.get(f"/v2{path}").json()

    assert (get("")["name"], get("")["version"], get("")["models"]) == ("triton", hps.__version__, ["ranker"])
    extensions = {"binary_tensor_data", "model_configuration", "model_repository", "model_repository(unload_dependents)"}
    assert set(get("")["extensions"]) == {*extensions, "statistics"}
    metadata = get("/models/ranker")
    assert metadata == get("/models/ranker/versions/1")
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("ranker", ["1"], "hps")
    inputs = {one["name"]: (one["datatype"], one["shape"]) for one in metadata["inputs"]}
    assert inputs == {
        name: (kind, [1, size])
        for name, kind, size in (
            ("KEYS", "INT64", -1),
            ("NUMKEYS", "INT32", 2),
            ("OFFSETS", "INT64", -1),
            ("WEIGHTS", "FP32", -1),
        )
    }
    assert metadata["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1]}]
    tables = [("user", 4, 1000, 0.5), ("item", 7, 4000, -2.0)]
    assert [(one["name"], one["dim"], one["max_keys"], one["default_value"]) for one in metadata["tables"]] == tables
    assert (get("/health/live"), get("/health/ready")) == ({"live": True}, {"ready": True})
    assert get("/models/ranker/ready") == get("/models/ranker/versions/1/ready") == {"name": "ranker", "ready": True}


def test_metrics_count_requests_once_and_keys_by_table(service):
    route, before = "/v1/models/{model}/lookup", samples(service)
    for _ in range(5):
        service.client.post(LOOKUP, json={"tables": {"item": [1, 2, 3]}})
    service.client.post(LOOKUP, content=b"wrong")
    counted = {("hps_http_requests_total", route, "200"): 5, ("hps_http_requests_total", route, "400"): 1}
    counted |= {("hps_http_request_seconds_count", route): 6, ("hps_http_request_seconds_bucket", "+Inf", route): 6}
    counted |= {("hps_lookup_keys_total", "ranker", "item"): 15, ("hps_device_lookups_total", "cpu", "ranker"): 5}
    after = samples(service)
    assert {name: after[name] - before.get(name, 0) for name in counted} == counted
    assert (after["hps_ready",], after["process_resident_memory_bytes",] > 0) == (1, True)
    response = service.client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.count("# EOF") == 1


def test_an_answer_says_how_many_keys_it_left_to_the_background(configuration):
    document = configuration()
    document["models"][0]["hit_rate_threshold"] = 0.9
    fresh = iter(range(100, 200))
    with running_service(document) as service:

        def deferred(new, path=LOOKUP, **more):
            keys = [*range(9), *(next(fresh) for _ in range(new))]
            tensor = {"name": "user", "datatype": "INT64", "shape": [len(keys)], "data": keys}
            body = {"tables": {"user": keys, "item": [1]}} if path == LOOKUP else {"inputs": [tensor]}
            answer = service.client.post(path, json=body | more)
            assert answer.status_code == 200, answer.text
            if more.get("report"):
                assert answer.json()["report"]["tables"]["user"]["deferred"] == 1
            return answer.headers.get("x-deferred-keys")

        deferred(0)
        assert service.app.lifecycle.server.drain()
        assert deferred(0) is None, "they are resident"
        assert deferred(1) == deferred(1, INFER) == deferred(1, report=True) == "1"
        assert deferred(1, INFER, parameters={"binary_data_output": True}) == "1"
        assert deferred(2) is None, "9 of 11: complete"


def tensor(name, array, binary=True):
    datatype = {"i8": "INT64", "i4": "INT32", "f4": "FP32"}[array.dtype.str[1:]]
    infer_input = triton.InferInput(name, array.shape, datatype)
    infer_input.set_data_from_numpy(array, binary_data=binary)
    return infer_input


@pytest.mark.parametrize(
    ("binary_in", "binary_out", "compression"),
    [(True, None, "gzip"), (False, True, "deflate"), (True, False, None)],
)
def test_the_shape_of_tritons_hps_backend(service, binary_in, binary_out, compression):
    users, items = np.array([3, 1, 4]), np.array([15, 92, 65, 9999])
    inputs = [
        tensor("KEYS", np.append(users, items)[None], binary_in),
        tensor("NUMKEYS", np.array([[3, 4]], np.int32), binary_in),
    ]
    outputs = None if binary_out is None else [triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out)]
    options = {f"{way}_compression_algorithm": compression for way in ("request", "response")}
    options |= {"request_id": "7", "parameters": {"found": True}, "outputs": outputs}
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        answer = client.infer("ranker", inputs, **options)
    expected = np.concatenate([vectors_of(users, 4).ravel(), vectors_of(items[:3], 7).ravel(), np.full(7, -2, np.float32)])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), expected)
    assert answer.as_numpy("FOUND0").tolist() == [True] * 6 + [False]
    said = answer.get_response()
    assert (said["id"], said["model_name"]) == ("7", "ranker")
    assert said["parameters"] == {"NumSample": 1, "DeviceID": 0}  # 7 keys, at most 5 a sample


def test_devices_answer_in_turn_or_as_named_and_a_lost_one_those_alone_who_name_it(configuration, monkeypatch):
    """Vectors in the cache of a second device of the same processor differ from those in the first's by 1000."""
    document = configuration()
    with hps.HPS(document) as server:
        one = server.model("ranker")
        sessions = {0: one.session(0), 1: one.renew(one.config, one.tables)[0]}
        for device, session in sessions.items():
            session.cache.insert(1, np.arange(3), vectors_of(np.arange(3), 7) + 1000 * device)
        server.live = LiveModels({"ranker": dataclasses.replace(one, sessions=sessions)})
        with running_service(document, server) as service:

            def device_of(**named):
                answer = service.client.post(LOOKUP, json={"tables": {"item": [2]}, **named}).json()
                return round((answer["tables"]["item"][0][0] - vectors_of([2], 7)[0, 0]) / 1000)

            def answering():
                return sorted(device_of() for _ in range(6))

            def lose(meanwhile, device):
                meanwhile.setattr(sessions[device], "lost", True)
                notify(device)

            def notify(device):
                for changed in sessions[device].on_loss:
                    changed()

            assert answering() == [0, 0, 0, 1, 1, 1]
            assert [device_of(device=named) for named in (0, 1, 1, 0)] == [0, 1, 1, 0]
            for lost, other in ((1, 0), (0, 1)):
                with monkeypatch.context() as meanwhile:
                    lose(meanwhile, lost)
                    wait_until(lambda other=other: answering() == [other] * 6, "the fronts know")
                    assert device_of(device=lost) == lost
                    lose(meanwhile, other)
                    wait_until(lambda: answering() == [0, 0, 0, 1, 1, 1], "both are lost")
                notify(lost)
                wait_until(lambda: answering() == [0, 0, 0, 1, 1, 1], "both are there")


def test_rows_of_keys_are_bags_with_a_combiner_and_all_their_vectors_are_held(service, monkeypatch):
    """A fourth of the limit is for small requests; keys whose rows do not fit are refused before they are looked up."""
    keys = np.random.default_rng(4).integers(0, ROWS - 10, (50, 60))
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        ask = partial(client.infer, "ranker", [tensor("item", keys)])
        assert ask().as_numpy("item").shape == (50, 60, 7)
        bags = ask(parameters={"combiner": "sum"}).as_numpy("item")
        np.testing.assert_array_equal(bags, [vectors_of(key, 7).sum(0) for key in keys])
        monkeypatch.setattr(service.frontend.memory, "large_limit", 4 * 7 * 3000)
        with pytest.raises(InferenceServerException, match="answering the request: it takes up to") as caught:
            ask(parameters={"combiner": "sum"})
    assert (caught.value.status(), service.held) == ("413", 0)


def test_large_answers_keep_their_vectors_until_slow_clients_have_read_them(tmp_path):
    keys, dim, asked = np.arange(64), 128, 8000  # 4 MB an answer
    hps.write_sparse_model(tmp_path / "t.model", (keys, vectors_of(keys, dim)))
    model = model_of("wide", [tmp_path / "t.model"], {"t": dim}, max_batch_size=asked, num_of_worker_buffer_in_pool=4)
    with running_service(document_of(model)) as service:

        def ask(client):
            with triton.InferenceServerClient(service.url.removeprefix("http://")) as quick:
                for nth in range(12):
                    part = np.full(asked, (client + 5 * nth) % 64)
                    assert (quick.infer("wide", [tensor("t", part)]).as_numpy("t") == vectors_of(part[:1], dim)).all()
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
