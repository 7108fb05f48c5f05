"""Spans of requests, as a receiver of OTLP over HTTP gets them; and that nobody waits for one that is away."""

import gzip
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import hps
from hps.ground.registry import install_hint
from hps.testing.waiting import PATIENCE_S
from tests.servers.running_service import document_of, model_of, running_service

LOOKUP = "/v1/models/m/lookup"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEYS = {"tables": {"item": [1, 2, 999]}}


@pytest.fixture
def document(tmp_path):
    hps.write_sparse_model(tmp_path / "item", (np.arange(100), np.zeros((100, 3), np.float32)))
    model = model_of("m", [tmp_path / "item"], {"item": 3}, gpucache=False, hit_rate_threshold=1.1)
    return document_of(model, persistent=tmp_path / "rocksdb")


@contextmanager
def receiver():
    """A receiver of OTLP over HTTP: its address, and the requests that it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()


def values(attributes):
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in attributes}


def test_a_request_is_a_span_and_its_stages_are_spans_below(document, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=ranker-eu")
    monkeypatch.setattr("hps.serve.logs.spans._CLOSE_S", PATIENCE_S)  # a service that stops exports the last spans
    with receiver() as (url, got):
        document["service"] = {"otlp_endpoint": url + "/", "access_log_per_s": 0}
        with running_service(document) as service:
            traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "abc"}
            assert service.client.post(LOOKUP, json=KEYS, headers=traced).status_code == 200
            made = service.client.post(LOOKUP, json={}).headers["x-request-id"]
            unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            assert service.client.post(LOOKUP, json=KEYS, headers=unsampled).status_code == 200
            service.client.get("/v2/health/live")
    assert {path for path, _ in got} == {"/v1/traces"}
    resources = [resource for _, message in got for resource in message.resource_spans]
    assert {values(resource.resource.attributes)["service.name"] for resource in resources} == {"ranker-eu"}
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    first, failed = [span for span in spans if span.kind == span.SPAN_KIND_SERVER]
    assert first.name == failed.name == "POST /v1/models/{model}/lookup"
    assert (first.trace_id.hex(), first.parent_span_id.hex(), failed.trace_id.hex()) == (TRACE, PARENT, made)
    expected = {"http.response.status_code": 200, "http.request.method": "POST", "http.route": "/v1/models/{model}/lookup"}
    assert (expected | {"hps.model": "m", "hps.keys": 3, "hps.request_id": "abc"}).items() <= values(first.attributes).items()
    assert values(failed.attributes)["http.response.status_code"] == 400
    stages = {span.name: span for span in spans if span.parent_span_id == first.span_id}
    assert len(spans) == 2 + len(stages)
    for span in stages.values():
        assert span.trace_id == first.trace_id
        assert first.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= first.end_time_unix_nano
    fetch = stages["persistent_db"]
    said = values(fetch.attributes)
    assert fetch.kind == fetch.SPAN_KIND_CLIENT
    assert (said["db.system.name"], said["db.operation.batch.size"]) == ("rocksdb", said["hps.keys"])


@pytest.mark.parametrize("kind", ["down", "silent"])
def test_a_receiver_that_is_away_changes_nothing_for_requests(document, kind, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    before = set(threading.enumerate())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":  # it accepts connections, and never answers
            listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with running_service({**document, "service": {"otlp_endpoint": endpoint}}) as service:
            statuses = {service.client.post(LOOKUP, json=KEYS).status_code for _ in range(300)}
            assert statuses == {200}
    lines = [record.message for record in caplog.records if record.name.startswith("opentelemetry")]
    assert sum("dropping" in line for line in lines) <= 20  # however many spans are
    assert 1 <= len(lines) < 100  # for 300 requests; attempts to export have one a second
    for thread in set(threading.enumerate()) - before:  # it draws random pauses, which Hypothesis takes for a test's
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread


def test_a_service_without_an_endpoint_imports_nothing_of_the_extra():
    code = (
        "import sys, hps.serve.server, hps.tools.cli.app; from hps.serve.logs.spans import spans_of; "
        "from hps.configuration.models import Configuration, ServiceConfig; "
        "assert spans_of(Configuration.model_construct(service=ServiceConfig())) is None; "
        "print(sum(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


@pytest.mark.parametrize(("missing", "disabled"), [(True, "false"), (False, "true")])
def test_a_service_goes_on_without_the_extra_or_where_the_environment_says_so(document, missing, disabled, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:s3cret@127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
    if missing:
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with running_service(document) as service:
        answer = service.client.post(LOOKUP, json=KEYS)
        assert (answer.status_code, len(answer.headers["x-request-id"])) == (200, 32)
        assert set(answer.headers["x-request-id"]) != {"0"}
    assert (install_hint("otel") in caplog.text) == missing
    assert "s3cret" not in caplog.text
