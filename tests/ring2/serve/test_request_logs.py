"""What is said of each request over HTTP: its id, its access line, slow and failed lookups, and the report that it asks for."""

import json
from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
import tritonclient.http as triton

import hps
from hps.errors import DatabaseError
from hps.ground.log_limits import LineLimit
from hps.statistics.tracing import STAGES
from hps.testing.waiting import wait_until
from tests.ring2.serve.test_http_faults import fake
from tests.servers.running_service import document_of, model_of, running_service

__all__ = ["fake"]
LOOKUP, INFER = "/v1/models/m/lookup", "/v2/models/m/infer"
DIMS = {"user": 2, "item": 3}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    keys = np.arange(100, dtype=np.int64)
    for table, dim in DIMS.items():
        hps.write_sparse_model(directory / table, (keys, np.repeat(keys.astype(np.float32)[:, None], dim, axis=1)))
    sources = [directory / table for table in DIMS]
    return document_of(model_of("m", sources, DIMS, gpucacheper=0.5, hit_rate_threshold=1.1), persistent=directory / "rocksdb")


@pytest.fixture
def serve(document, caplog):
    """Serve with these settings of `service`, and collect the fields of lines: `serve(**settings) as (client, lines)`."""

    @contextmanager
    def serving(level="INFO", server=None, **settings):
        caplog.set_level(level, "hps")

        def lines(logger, count=1):
            """Lines of this logger, once there are as many; they come after the answer."""
            found = lambda: [record for record in caplog.records if record.name == logger]  # noqa: E731
            wait_until(lambda: len(found()) >= count, f"{count} lines of {logger}")
            return found()

        with running_service({**document, "service": settings}, server) as service:
            caplog.clear()
            yield service.client, lines

    return serving


def test_each_request_has_an_access_line(serve):
    with serve("DEBUG") as (client, lines):
        body = json.dumps({"tables": {"item": [1, 2, 999], "user": [3]}})
        answer = client.post(LOOKUP, content=body, headers={"X-Request-Id": "abc-1"})
        client.get("/v2/models/m/ready")
        client.post("/v1/models/nope%0AERROR/lookup", content="{}")
        client.get("/no%0Asuch")
        found = [line.fields for line in lines("hps.access", 4)]
    assert min(one.pop("seconds") for one in found) > 0
    expected = {"request_id": "abc-1", "method": "POST", "route": "/v1/models/{model}/lookup", "status": 200, "keys": 4}
    expected |= {"bytes_in": len(body), "bytes_out": len(answer.content), "model": "m", "version": "1", "client": "127.0.0.1"}
    assert expected.items() <= found[0].items()
    assert 0 <= found[0]["hit_rate"] <= 1
    assert found[0]["item.keys"] == 3, "in debug it says how the lookup was answered"
    assert (found[1]["model"], found[1]["route"]) == ("m", "/v2/models/{model}/ready")
    assert (found[2]["status"], "nope" in found[2]["error"]) == (404, True)
    assert (found[3]["route"], found[3]["path"]) == ("unknown", "/no\nsuch")
    assert [one["request_id"] for one in found[1:]] == sorted({one["request_id"] for one in found[1:]})


def test_access_lines_are_bounded_and_count_those_left_out_and_may_be_off(serve, monkeypatch):
    class EveryFifth(LineLimit):
        def take(self):  # whatever the time
            self.asked = getattr(self, "asked", 0) + 1
            return self.asked % 5 == 1

    with serve(access_log_per_s=0) as (client, lines):
        assert list(client.post(LOOKUP, content=b'{"tables": {"item": [1]}}').json()) == ["tables"]
        client.post(LOOKUP, content=b"{")
        assert lines("hps.access", 0) == []
    monkeypatch.setattr("hps.serve.logs.requests.LineLimit", EveryFifth)
    with serve() as (client, lines):
        for _ in range(6):
            client.get("/v2")
        found = [line.fields for line in lines("hps.access", 2)]
    assert [one.get("left_out") for one in found] == [None, 4]
    assert not any(name.startswith("item.") for one in found for name in one)


REQUESTS = [
    ("POST", LOOKUP, b'{"tables": {"item": [1]}}', 200),
    ("POST", LOOKUP, b"", 400),
    ("GET", "/v2", b"", 200),
    ("GET", "/v2/models/nope", b"", 404),
    ("GET", "/v1/models/m/tables/item/rows/5", b"", 200),
    ("GET", "/nowhere", b"", 404),
    ("PUT", LOOKUP, b"", 405),
]


def test_every_answer_has_the_id_of_its_request(serve):
    """With an id of its own, with that of its trace, with one that is none, and with none."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    given = [({"X-Request-Id": "abc"}, "abc"), ({"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}, trace)]
    made = set()
    with serve() as (client, _):
        for method, path, content, status in REQUESTS:
            for headers, expected in (*given, ({"X-Request-Id": "<script>"}, None), ({}, None)):
                answer = client.request(method, path, content=content, headers=headers)
                found = answer.headers["x-request-id"]
                assert (answer.status_code, expected) in ((status, None), (status, found))
                assert status < 400 or answer.json()["request_id"] == found
                if expected is None:
                    assert len(found) == 32
                    made.add(found)
    assert len(made) == 2 * len(REQUESTS)


def test_a_change_and_a_bug_are_logged_with_the_id(serve, fake):
    fake.on_lookup = lambda: 1 // 0
    with serve(server=fake) as (client, lines):
        named = {"X-Request-Id": "abc"}
        assert client.post(LOOKUP, content=b'{"tables": {"item": [1]}}', headers=named).status_code == 500
        client.post("/v1/models/m/refresh", headers=named)
        said = [lines(f"hps.serve.{one}")[0] for one in ("frontend.exchange", "logs.changes")]
        assert lines("hps.serve.engine.batches")[0].exc_info[0] is ZeroDivisionError
    assert [one.fields for one in said] == [{"request_id": "abc"}] * 2


def test_a_slow_lookup_is_logged_with_its_tables_and_stages(serve):
    with serve("WARNING", slow_lookup_ms=1e-6) as (client, lines):
        client.post(LOOKUP, content=b'{"tables": {"item": [1, 2], "user": [999]}}', headers={"X-Request-Id": "abc"})
        (line,) = lines("hps.serve.logs.requests")
    assert line.getMessage() == "a lookup of model m took longer than 1e-06 ms (service.slow_lookup_ms)"
    assert (line.levelname, line.fields["request_id"], line.fields["keys"]) == ("WARNING", "abc", 3)
    assert sorted(line.fields["tables"].split(",")) == ["item", "user"]
    assert line.fields["item.keys"] == 2
    assert line.fields["user.defaults"] == 1
    assert line.fields["us.query"] > 0


def test_a_lookup_that_fails_is_logged_with_its_id_and_a_wrong_one_is_not(serve, fake):
    with serve("WARNING", fake) as (client, lines):
        client.post(LOOKUP, content=b"{")
        fake.on_lookup = Mock(side_effect=DatabaseError("fetching: Redis is away"))
        for _ in range(30):
            assert client.post(LOOKUP, content=b'{"tables": {"item": [1]}}', headers={"X-Request-Id": "abc"}).status_code == 503
        found = lines("hps.serve.logs.requests")
    assert found[0].getMessage() == "a lookup of model m failed: fetching: Redis is away"
    assert found[0].fields == {"request_id": "abc", "status": 503}
    assert len(found) < 30


@pytest.mark.parametrize(("binary", "bags"), [(True, False), (False, True), (True, True)])
def test_the_report_of_an_inference_is_in_its_parameters(serve, binary, bags):
    with serve(access_log_per_s=0) as (client, _), triton.InferenceServerClient(client.base_url.netloc.decode()) as other:
        keys = triton.InferInput("item", [1, 3], "INT64")
        keys.set_data_from_numpy(np.array([[1, 2, 999]], np.int64), binary_data=binary)
        parameters = {"combiner": "sum"} if bags else {}
        outputs = [triton.InferRequestedOutput("item", binary_data=binary)]
        plain, reported = (
            other.infer("m", [keys], outputs=outputs, parameters=parameters | more) for more in ({}, {"report": True})
        )
        np.testing.assert_array_equal(plain.as_numpy("item"), reported.as_numpy("item"))
        assert "parameters" not in plain.get_response()
        numbers = reported.get_response()["parameters"]
        tiers = ("embedding_cache", "volatile_db", "persistent_db", "linked", "defaults", "deferred")
        assert numbers["item.keys"] == sum(numbers[f"item.{tier}"] for tier in tiers) == 3
        assert {name.removeprefix("us.") for name in numbers if name.startswith("us.")} <= {*STAGES, "queue", "lookup"}
        assert numbers["us.lookup"] >= numbers["us.query"] > 0
        assert numbers["item.defaults"] == 1
        assert numbers["hit_rate"] == pytest.approx(numbers["item.embedding_cache"] / 3, abs=1e-4)
        refused = {"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [1]}], "parameters": {"report": 1}}
        assert "'report' is an integer (1), expected true or false" in client.post(INFER, json=refused).json()["error"]


@pytest.mark.parametrize("request_of", [lambda keys: {"tables": {"item": keys}}, lambda keys: {"bags": {"item": [keys]}}])
def test_the_report_of_a_json_lookup_is_beside_the_vectors(serve, request_of):
    with serve(access_log_per_s=0) as (client, _):
        answer = client.post(LOOKUP, json={**request_of([1, 2, 999]), "report": True}).json()
        assert list(answer) == ["tables", "report"]
        report = answer["report"]
        table = report["tables"]["item"]
        assert (table["keys"], table["defaults"]) == (3, 1)
        assert report["hit_rate"] == pytest.approx(table["embedding_cache"] / 3, abs=1e-4)
        assert report["us"]["lookup"] > 0
        assert client.post(LOOKUP, json={**request_of([1]), "report": False}).json().keys() == {"tables"}
        assert "'report' is a string" in client.post(LOOKUP, json={**request_of([1]), "report": "x"}).json()["error"]
