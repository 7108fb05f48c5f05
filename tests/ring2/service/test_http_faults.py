"""Slow, broken and greedy clients, stuck and failing lookups: each ends in its own error, and nothing stays behind."""

import gzip
import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from hps.errors import DatabaseTimeoutError, DeviceError, DeviceMemoryError, UnknownDeviceError, WorkspaceTimeoutError
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec
from tests.fakes.fake_parameter_server import FakeParameterServer
from tests.servers.running_service import document_of, model_of, running_service, samples

LOOKUP = b'{"tables": {"item": [1]}}'
PATH = "/v1/models/m/lookup"
BIG = 200_000


def document(**service):
    limits = {"max_body_bytes": 1_000_000, "max_keys_per_request": 1000, "lookup_threads": 2, "request_timeout_s": 20}
    return document_of(model_of("m", ["nowhere"], {"item": 3}), service=limits | service)


@pytest.fixture
def serving(fake):
    """Serves the fake with these settings; nothing of any request may be left at the end."""

    @contextmanager
    def serving(**settings):
        with running_service(document(**settings), fake) as service:
            yield service
            wait_until(lambda: service.is_idle, "nothing of any request is left")

    return serving


@pytest.fixture
def fake():
    server = FakeParameterServer("m", [TableSpec("m", "item", 3, 0.0, 1_000_000)])
    server.rows[0][1] = np.array([1, 2, 3], np.float32)
    return server


@pytest.fixture
def held(fake):
    """Holds every lookup until `held.release` is set; `held.entered` says that there is one."""
    held = SimpleNamespace(entered=threading.Event(), release=threading.Event())
    fake.on_lookup = lambda: (held.entered.set(), held.release.wait(PATIENCE_S))
    return held


def head(path=PATH, **headers):
    lines = [f"POST {path} HTTP/1.1", "Host: x", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


WHOLE = head(Content_Length=len(LOOKUP)) + LOOKUP


def read_answer(connection):
    """The status and the JSON of one answer."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def answers_until_the_end(connection):
    """The statuses of all answers on a connection that the server closes."""
    received = b"".join(iter(lambda: connection.recv(65536), b""))
    return [int(one[:3]) for one in received.split(b"HTTP/1.1 ")[1:]]


def closes(connection):
    """Whether the server closes the connection (with an end or a reset) within the socket's timeout."""
    with suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


@pytest.mark.parametrize("path", [PATH, "/v2/health/live"])
def test_a_body_that_does_not_come_is_408_also_where_none_is_taken(serving, path):
    with serving(request_timeout_s=5) as service, service.connect() as connection:
        connection.sendall(head(path, Content_Length=100) + b"half")
        status, answer = read_answer(connection)
        assert status == 408
        assert answer["error"] == "the request body did not arrive within 5 s (service.request_timeout_s)"
        assert closes(connection)
        assert service.client.post(PATH, content=LOOKUP).status_code == 200


def test_a_client_that_goes_away_in_mid_body_leaves_nothing(serving, fake):
    piece = b"x" * (BIG // 2)
    chunked = head(Transfer_Encoding="chunked") + b"%x\r\n%s\r\n" % (len(piece), piece)
    with serving() as service:
        for sent in (head(Content_Length=BIG) + piece, chunked):
            with service.connect() as connection:
                connection.sendall(sent)
                wait_until(lambda: service.held >= BIG // 2, "the body is being read")
        wait_until(lambda: service.is_idle and service.connections == 0, "body and connection are gone")
        assert samples(service)["hps_http_requests_total", "/v1/models/{model}/lookup", "499"] == 2
        assert fake.lookups == 0


LARGE = head(Content_Length=BIG) + LOOKUP + b" " * (BIG - len(LOOKUP))
SENT = {
    "one": [WHOLE],
    "in two pieces": [WHOLE[:-9], WHOLE[-9:]],
    "chunked": [head(Transfer_Encoding="chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(LOOKUP), LOOKUP)],
    "large": [LARGE],
    "large behind others": [WHOLE * 3 + LARGE],  # more than is parsed at once
    "more than the socket takes": [WHOLE * 3, *[LARGE] * 60],
    "FastAPI": [b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"],
}


@pytest.mark.parametrize("sent", SENT)
def test_a_client_that_sends_whole_requests_and_ends_its_side_gets_every_answer(serving, held, sent):
    with serving() as service, service.connect() as connection:
        if len(SENT[sent]) > 9:
            held.release.set()
        for piece in SENT[sent]:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        if sent != "FastAPI":
            assert held.entered.wait(PATIENCE_S)
        held.release.set()
        assert answers_until_the_end(connection) == [200] * b"".join(SENT[sent]).count(b"HTTP/1.1")
        wait_until(lambda: service.connections == 0, "the connection is gone")


def test_a_client_that_ends_its_side_within_a_request_is_disconnected(serving, fake):
    with serving() as service:
        for sent in (b"", WHOLE[:-1], WHOLE[:20]):
            with service.connect() as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                assert answers_until_the_end(connection) == []
        wait_until(lambda: service.connections == 0, "the connections are gone")
        assert fake.lookups == 0


def test_connections_with_complete_requests_are_not_closed_for_new_ones(serving, held):
    with serving(max_connections=20) as service, ExitStack() as stack:
        busy = [stack.enter_context(service.connect()) for _ in range(20)]
        for connection in busy:
            connection.sendall(WHOLE)
        wait_until(lambda: service.requests == 20, "every lookup has begun, or waits")
        for _ in range(3):
            with service.connect() as late:
                assert read_answer(late) == (503, {"error": "too many connections; send the request again later"})
        held.release.set()
        assert [read_answer(connection)[0] for connection in busy] == [200] * 20


def test_a_body_that_is_too_large_is_413_before_it_is_read_and_to_a_client_that_reads_last(serving):
    with serving() as service, service.connect() as connection:
        connection.sendall(head(Content_Length=10**18, Expect="100-continue"))
        status, answer = read_answer(connection)
        assert status == 413
        assert f"Content-Length is {10**18}, expected at most 1000000" in answer["error"]
        for body in (b"x" * 3_000_000, iter([b"x" * 1000] * 3000)):
            assert service.client.post(PATH, content=body).status_code == 413


def test_requests_share_a_bound_on_memory_that_leaves_room_for_small_ones(serving):
    with serving(max_body_bytes=100_000, max_held_bytes=2_000_000) as service:
        memory, body = service.front.memory, b"x" * 90_000
        for others, status in ((memory.large_limit // 8, 400), (memory.large_limit - 50_000, 503)):
            memory.held += others
            answer = service.client.post(PATH, content=body)
            assert answer.status_code == status
            assert service.client.post(PATH, content=LOOKUP).status_code == 200  # small ones go on
            memory.held -= others
        says = f"expected at most {memory.large_limit} (from service.max_held_bytes); send the request again"
        assert says in answer.json()["error"]


def test_bodies_that_were_answered_make_room_for_others(serving):
    """Many times as much as may be held at once, one after the other."""
    body, headers = gzip.compress(LOOKUP + b" " * 90_000), {"Content-Encoding": "gzip"}
    with serving(max_body_bytes=100_000) as service:
        for _ in range(30):
            answer = service.client.post(PATH, content=body, headers=headers)
            assert answer.status_code == 200, answer.text


def test_half_a_head_silence_and_empty_lines_are_dropped(serving):
    with serving(request_timeout_s=5, keep_alive_s=4) as service, ExitStack() as stack:
        clients = [stack.enter_context(service.connect()) for _ in range(4)]
        for connection, whole, rest in zip(clients, (0, 0, 1, 1), (b"", WHOLE[:40], WHOLE[:11], b"\r\n"), strict=True):
            connection.sendall(WHOLE * whole)
            if whole:
                assert read_answer(connection)[0] == 200
            connection.sendall(rest)
        assert all(map(closes, clients))
        wait_until(lambda: service.connections == 0, "the connections are gone")


def test_clients_that_do_not_read_give_up_their_slots_when_these_run_short(serving):
    body = b'{"tables": {"item": [%s]}}' % b", ".join([b"1"] * 1000)
    with serving(answer_timeout_s=600) as service, ExitStack() as stack:
        slots, order = service.front.exchange.slots, service.front.connections.order
        for _ in range(2):
            connection = stack.enter_context(service.connect())
            connection.setblocking(False)
            with suppress(BlockingIOError):
                for _ in range(2000):
                    connection.sendall(head(Content_Length=len(body)) + body)
        wait_until(lambda: sum(one._unread > 0 for one in list(order)) == 2, "it was noticed that nothing is read")
        kept, gone = order
        kept._unread_since = time.monotonic() + 60
        assert kept._slot >= 0
        assert gone._slot >= 0
        others = slots.size // 2 + 1
        slots.used += others
        wait_until(lambda: gone not in order, "its slot is wanted")
        assert kept in order
        assert gone._slot == -1
        slots.used -= others
        kept._unread_since = time.monotonic() - 60
        for _ in range(2):
            look = service.front._ticks["look"]
            wait_until(lambda look=look: service.front._ticks["look"] is not look, "all connections were looked at")
        assert kept in order
        slots.used += others
        wait_until(lambda: kept not in order, "its slot is wanted, too")
        assert slots.used == others
        slots.used -= others
        assert service.front.refusals.aborted["answer"] == 2


def test_trailers_are_no_headers(serving):
    with serving(bearer_token="secret") as service, service.connect() as connection:
        body = b"%x\r\n%s\r\n0\r\nAuthorization: Bearer secret\r\n\r\n" % (len(LOOKUP), LOOKUP)
        connection.sendall(head(Transfer_Encoding="chunked") + body)
        assert read_answer(connection)[0] == 401


FAILURES = [
    (WorkspaceTimeoutError("all workspaces are busy"), 503),
    (DatabaseTimeoutError("Redis did not answer"), 503),
    (UnknownDeviceError("no device 7"), 404),
    (DeviceError("CUDA error 700: an illegal memory access was encountered"), 503),
    (DeviceMemoryError("4 GB do not fit"), 503),
    (MemoryError(), 503),
]


def test_a_lookup_that_fails_is_answered_by_its_status(serving, fake):
    fake.on_lookup = Mock(side_effect=[error for error, _ in FAILURES])
    with serving() as service:
        for error, status in FAILURES:
            response = service.client.post(PATH, content=LOOKUP)
            assert response.status_code == status
            assert response.json()["error"] == (str(error) or "not enough memory for the answer; send fewer keys at once")
            assert ("retry-after" in response.headers) == (status == 503)
        assert service.client.get("/v2/health/ready").status_code == 200


def test_a_bug_is_500_without_a_stack_trace_and_logged_with_one(serving, fake, caplog):
    fake.on_lookup = fake.model = Mock(side_effect=ZeroDivisionError("secret detail"))
    tensor = b'{"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [1]}]}'
    requests = [("POST", PATH, LOOKUP), ("POST", "/v2/models/m/infer", tensor), ("GET", "/v2/models/m", b"")]
    with serving() as service:
        for method, path, content in requests:
            caplog.clear()
            response = service.client.request(method, path, content=content)
            assert response.status_code == 500
            assert response.json()["error"] == "internal error; the log of the service has the details"
            wait_until(lambda: "ZeroDivisionError: secret detail" in caplog.text, "the bug is logged")
        fake.on_lookup = lambda: None
        assert all(service.client.post(path, content=body).status_code == 200 for _, path, body in requests[:2])
