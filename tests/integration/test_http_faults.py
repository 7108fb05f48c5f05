"""Slow, broken and greedy clients, stuck and failing lookups: each ends in its own error, and nothing stays behind."""

import asyncio
import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hps.errors import DatabaseTimeoutError, DeviceError, DeviceMemoryError, UnknownDeviceError, WorkspaceTimeoutError
from hps.service.lookup_threads import MAX_WAITING
from hps.service.server import _WatchedConnection
from hps.types import TableSpec
from tests.fakes.fake_parameter_server import FakeParameterServer
from tests.servers.running_service import document_of, model_of, running_service, wait_until

LOOKUP = b'{"tables": {"item": [1]}}'
PATH = "/v1/models/m/lookup"
BIG = 200_000


def document(**service):
    limits = {"max_body_bytes": 1_000_000, "max_keys_per_request": 1000, "lookup_threads": 2, "request_timeout_s": 20}
    return document_of(model_of("m", ["nowhere"], {"item": 3}), service={**limits, **service})


@pytest.fixture
def fake():
    server = FakeParameterServer("m", [TableSpec("m", "item", 3, 0.0, 1000)])
    server.rows[0][1] = np.array([1, 2, 3], np.float32)
    return server


@pytest.fixture
def held(fake):
    """Holds every lookup until `held.release` is set; `held.entered` says that there is one."""
    held = SimpleNamespace(entered=threading.Event(), release=threading.Event())
    fake.on_lookup = lambda: (held.entered.set(), held.release.wait(20))
    return held


def raising(error):
    def fail():
        raise error

    return fail


def head(path=PATH, **headers):
    lines = [f"POST {path} HTTP/1.1", "Host: x", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


WHOLE = head(Content_Length=len(LOOKUP)) + LOOKUP


def read_answer(connection):
    """The status and the JSON of one answer; None when the connection closes without one."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65536)
        if not chunk:
            return None
        received += chunk
    start, _, rest = received.partition(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in start.split(b"\r\n") if line.lower().startswith(b"content-length"))
    while len(rest) < size:
        rest += connection.recv(65536)
    return int(start.split()[1]), json.loads(rest)


def closes(connection):
    """Whether the server closes the connection (with an end or a reset) within the socket's timeout."""
    with suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def is_idle(service):
    """Nothing of any request is left: no lookup, no body."""
    return service.app._threads.pending == 0 and service.app._bodies.held_bytes == 0


@pytest.mark.parametrize("path", [PATH, "/v2/health/live"])
def test_a_body_that_does_not_come_is_408_also_where_none_is_taken(fake, path):
    with running_service(document(request_timeout_s=0.2), fake) as service, service.connect() as connection:
        connection.sendall(head(path, Content_Length=100) + b"half")
        status, answer = read_answer(connection)
        assert status == 408
        assert answer == {"error": "the request body did not arrive within 0.2 s (service.request_timeout_s)"}
        assert closes(connection)
        assert is_idle(service)
        assert service.client.post(PATH, content=LOOKUP).status_code == 200


def test_a_client_that_goes_away_in_mid_body_leaves_nothing(fake):
    with running_service(document(), fake) as service:
        for framing in ({"Content_Length": BIG}, {"Transfer_Encoding": "chunked"}):
            with service.connect() as connection:
                connection.sendall(head(**framing))
                piece = b"x" * (BIG // 2)
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if "Transfer_Encoding" in framing else piece)
                wait_until(lambda: service.app._bodies.held_bytes > 0, "the body is being read")
        wait_until(lambda: is_idle(service), "the body is dropped")
        wait_until(lambda: service.connections == 0, "the connection is gone")
        assert (
            'hps_http_requests_total{route="/v1/models/{model}/lookup",status="499"} 2.0' in service.client.get("/metrics").text
        )
        assert fake.lookups == 0


def test_a_client_that_goes_away_during_its_lookup_leaves_nothing(fake, held):
    with running_service(document(), fake) as service:
        with service.connect() as connection:
            connection.sendall(WHOLE)
            assert held.entered.wait(20)
        held.release.set()
        wait_until(lambda: is_idle(service), "the lookup ended")
        assert service.client.post(PATH, content=LOOKUP).status_code == 200


def test_a_declared_length_above_the_limit_is_413_before_the_body_is_read(fake):
    with running_service(document(), fake) as service, service.connect() as connection:
        connection.sendall(head(Content_Length=10**18, Expect="100-continue"))
        status, answer = read_answer(connection)
        assert status == 413
        assert f"Content-Length is {10**18}, expected at most 1000000" in answer["error"]


def test_a_client_that_writes_its_whole_body_before_it_reads_gets_the_413(fake):
    with running_service(document(), fake) as service:
        assert service.client.post(PATH, content=b"x" * 3_000_000).status_code == 413
        assert service.client.post(PATH, content=iter([b"x" * 1000] * 3000)).status_code == 413
        assert is_idle(service)


def test_bodies_share_a_bound_on_memory(fake):
    with running_service(document(max_body_bytes=100_000), fake) as service:
        connections = [service.connect() for _ in range(9)]
        try:
            for connection in connections[:8]:
                connection.sendall(head(Content_Length=100_000) + b"x" * 99_999)
            wait_until(lambda: service.app._bodies.held_bytes == 8 * 99_999, "eight bodies are held")
            connections[8].sendall(head(Content_Length=100_000) + b"x" * 99_999)
            status, answer = read_answer(connections[8])
            assert status == 503
            assert "the bodies of other requests hold 799992 bytes, expected at most 800000" in answer["error"]
            assert service.client.post(PATH, content=LOOKUP).status_code == 200  # small ones go on
        finally:
            for connection in connections:
                connection.close()
        wait_until(lambda: is_idle(service), "the bodies are dropped")


@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_bodies_that_were_answered_make_room_for_others(fake, encoding):
    """Many times as much as may be held at once, one after the other."""
    body = LOOKUP + b" " * 90_000
    headers = {"Content-Encoding": encoding} if encoding else {}
    with running_service(document(max_body_bytes=100_000), fake) as service:
        for _ in range(30):
            answer = service.client.post(PATH, content=gzip.compress(body) if encoding else body, headers=headers)
            assert answer.status_code == 200, answer.text
        assert is_idle(service)


def test_half_a_head_and_silence_are_dropped(fake):
    with (
        running_service(document(request_timeout_s=0.3), fake) as service,
        service.connect() as silent,
        service.connect() as half,
        service.connect() as second_half,
    ):
        half.sendall(b"POST /v1/models/m/lookup HTTP/1.1\r\nHost: ")
        second_half.sendall(WHOLE)
        assert read_answer(second_half)[0] == 200
        second_half.sendall(b"POST /v1/mo")
        assert closes(silent)
        assert closes(half)
        assert closes(second_half)
        wait_until(lambda: service.connections == 0, "the connections are gone")


def test_an_endless_head_is_dropped(fake):
    with running_service(document(), fake) as service, service.connect() as connection:
        connection.sendall(b"POST /v1/models/m/lookup HTTP/1.1\r\n")
        with suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"X: " + b"y" * 1000 + b"\r\n")
                time.sleep(0.001)
        assert closes(connection)
        assert service.client.post(PATH, content=LOOKUP).status_code == 200


def test_a_client_that_does_not_read_its_answer_is_dropped(fake):
    body = b'{"tables": {"item": [%s]}}' % b", ".join([b"1"] * 1000)
    with running_service(document(request_timeout_s=0.3), fake) as service, service.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1)
        with suppress(TimeoutError, ConnectionError):
            for _ in range(2000):  # until the buffers of both sides are full
                connection.sendall(head(Content_Length=len(body)) + body)
        wait_until(lambda: service.connections == 0, "the connection is gone")
        wait_until(lambda: is_idle(service), "its lookups are done")


def test_a_connection_that_idles_with_empty_lines_is_dropped(fake):
    with running_service(document(request_timeout_s=0.3), fake) as service, service.connect() as connection:
        connection.sendall(WHOLE)
        assert read_answer(connection)[0] == 200
        connection.sendall(b"\r\n")  # which ends uvicorn's own wait for the next request
        assert closes(connection)


def test_uvicorn_is_extended_only_by_callbacks_of_asyncio_and_httptools():
    callbacks = {"on_headers_complete", "on_message_complete"}
    extended = {name for name in vars(_WatchedConnection) if hasattr(HttpToolsProtocol, name) and not name.startswith("__")}
    assert callbacks < extended <= callbacks | set(dir(asyncio.Protocol))


def test_what_is_not_http_is_refused(fake):
    with running_service(document(), fake) as service, service.connect() as connection:
        connection.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_lookup_that_takes_too_long_is_504_and_its_thread_comes_back(fake, held):
    with running_service(document(request_timeout_s=0.2, lookup_threads=1), fake) as service:
        response = service.client.post(PATH, content=LOOKUP)
        assert response.status_code == 504
        assert response.json() == {"error": "the lookup did not end within 0.2 s (service.request_timeout_s)"}
        assert service.app._threads.pending == 1
        assert service.client.get("/v2/health/live").status_code == 200
        held.release.set()
        wait_until(lambda: is_idle(service), "the thread is back")
        assert service.client.post(PATH, content=LOOKUP).status_code == 200


def test_more_lookups_than_may_wait_are_503_with_retry_after(fake, held):
    limit = 2 + MAX_WAITING
    with running_service(document(lookup_threads=2), fake) as service, ExitStack() as stack:
        connections = [stack.enter_context(service.connect()) for _ in range(limit)]
        for connection in connections:
            connection.sendall(WHOLE)
        wait_until(lambda: service.app._threads.pending == limit, "all but two lookups wait")
        response = service.client.post(PATH, content=LOOKUP)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert f"{limit} lookups run or wait, expected at most {limit}" in response.json()["error"]
        assert service.client.get("/v2/health/ready").status_code == 200
        held.release.set()
        assert [read_answer(connection)[0] for connection in connections] == [200] * limit


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkspaceTimeoutError("all workspaces are busy"), 503),
        (DatabaseTimeoutError("Redis did not answer"), 503),
        (UnknownDeviceError("no device 7"), 404),
        (DeviceMemoryError("4 GB do not fit"), 503),
        (MemoryError(), 503),
    ],
)
def test_a_lookup_that_fails_is_answered_by_its_status(fake, error, status):
    fake.on_lookup = raising(error)
    with running_service(document(), fake) as service:
        response = service.client.post(PATH, content=LOOKUP)
        assert response.status_code == status
        assert response.json()["error"] == (str(error) or "not enough memory for the answer; send fewer keys at once")
        assert ("retry-after" in response.headers) == (status == 503)
        assert service.client.get("/v2/health/ready").status_code == 200


def test_a_failed_device_turns_readiness_false(fake):
    fake.on_lookup = raising(DeviceError("CUDA error 700: an illegal memory access was encountered"))
    with running_service(document(), fake) as service:
        assert service.client.post(PATH, content=LOOKUP).status_code == 503
        response = service.client.get("/v2/health/ready")
        assert response.status_code == 503
        assert "CUDA error 700" in response.json()["reason"]
        assert service.client.get("/v2/health/live").status_code == 200
        assert service.client.post(PATH, content=LOOKUP).status_code == 503


@pytest.mark.parametrize("path", [PATH, "/v2/models/m/infer"])
def test_a_bug_is_500_without_a_stack_trace_and_logged_with_one(fake, path, caplog):
    fake.on_lookup = raising(ZeroDivisionError("secret detail"))
    body = LOOKUP if path == PATH else b'{"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [1]}]}'
    with running_service(document(), fake) as service:
        response = service.client.post(path, content=body)
        assert response.status_code == 500
        assert response.json() == {"error": "internal error; the log of the service has the details"}
        assert "ZeroDivisionError: secret detail" in caplog.text
        fake.on_lookup = lambda: None
        assert service.client.post(path, content=body).status_code == 200


def test_a_bug_of_a_control_route_is_500_without_a_stack_trace(fake, caplog):
    fake.model = lambda name: 1 // 0
    with running_service(document(), fake) as service:
        response = service.client.get("/v2/models/m")
        assert response.status_code == 500
        assert response.json() == {"error": "internal error; the log of the service has the details"}
        wait_until(lambda: "ZeroDivisionError" in caplog.text, "the bug is logged")  # after it is answered


def test_stopping_lets_running_lookups_answer_and_refuses_new_ones(fake, held):
    with running_service(document(), fake) as service, ThreadPoolExecutor(2) as clients:
        running = clients.submit(service.client.post, PATH, content=LOOKUP)
        assert held.entered.wait(20)
        service.server.stop()
        wait_until(lambda: refuses(service), "the service refuses connections")
        held.release.set()
        assert running.result(20).status_code == 200
    assert not fake.closed  # it is ours


def refuses(service):
    try:
        service.connect().close()
    except ConnectionError:
        return True
    return False
