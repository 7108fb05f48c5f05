"""Slow, broken and greedy clients, stuck and failing lookups: each ends in its own error, and nothing stays behind."""

import gc
import gzip
import json
import socket
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from hps.errors import DatabaseTimeoutError, DeviceError, DeviceMemoryError, UnknownDeviceError, WorkspaceTimeoutError
from hps.service.fronts import exchange
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import TableSpec
from tests.fakes.fake_parameter_server import FakeParameterServer
from tests.servers.running_service import document_of, model_of, running_service

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
    fake.on_lookup = lambda: (held.entered.set(), held.release.wait(PATIENCE_S))
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


def test_an_error_that_is_in_a_frame_of_its_own_traceback_is_freed(fake):
    def fail():
        try:
            raise DeviceError("the device is gone")
        except DeviceError as error:
            cause = error
        failure = DatabaseTimeoutError("the disk is slow")
        errors.extend((weakref.ref(failure), weakref.ref(cause)))
        raise failure from cause

    errors = []
    fake.on_lookup = fail
    gc.disable()
    try:
        with running_service(document(), fake) as service:
            assert service.client.post(PATH, content=LOOKUP).status_code == 503
            wait_until(lambda: not any(error() for error in errors), "both errors are freed")
    finally:
        gc.enable()


@pytest.mark.parametrize("path", [PATH, "/v2/health/live"])
def test_a_body_that_does_not_come_is_408_also_where_none_is_taken(fake, path):
    with running_service(document(request_timeout_s=5), fake) as service, service.connect() as connection:
        connection.sendall(head(path, Content_Length=100) + b"half")
        status, answer = read_answer(connection)
        assert status == 408
        assert answer["error"] == "the request body did not arrive within 5 s (service.request_timeout_s)"
        assert closes(connection)
        assert service.is_idle
        assert service.client.post(PATH, content=LOOKUP).status_code == 200


def test_a_client_that_goes_away_in_mid_body_leaves_nothing(fake):
    with running_service(document(), fake) as service:
        for framing in ({"Content_Length": BIG}, {"Transfer_Encoding": "chunked"}):
            with service.connect() as connection:
                connection.sendall(head(**framing))
                piece = b"x" * (BIG // 2)
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if "Transfer_Encoding" in framing else piece)
                wait_until(lambda: service.held >= BIG // 2, "the body is being read")
        wait_until(lambda: service.is_idle, "the body is dropped")
        wait_until(lambda: service.connections == 0, "the connection is gone")
        assert (
            'hps_http_requests_total{route="/v1/models/{model}/lookup",status="499"} 2\n' in service.client.get("/metrics").text
        )
        assert fake.lookups == 0


def answers_until_the_end(connection):
    """The statuses of all answers on a connection that the server closes."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return [int(one[:3]) for one in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "sent",
    [
        [WHOLE],
        [WHOLE] * 3,
        [head(Content_Length=len(LOOKUP)), LOOKUP],
        [head(Transfer_Encoding="chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(LOOKUP), LOOKUP)],
        [head(Content_Length=BIG) + LOOKUP + b" " * (BIG - len(LOOKUP))],
        [WHOLE * 3 + head(Content_Length=BIG) + LOOKUP + b" " * (BIG - len(LOOKUP))],  # more than is parsed at once
        [b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"],
    ],
    ids=["one", "three", "in two pieces", "chunked", "large", "large behind others", "FastAPI"],
)
def test_a_client_that_sends_whole_requests_and_ends_its_side_gets_every_answer(fake, held, sent):
    with running_service(document(), fake) as service, service.connect() as connection:
        for piece in sent:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        if b"/lookup" in sent[0]:
            assert held.entered.wait(PATIENCE_S)
        held.release.set()
        assert answers_until_the_end(connection) == [200] * b"".join(sent).count(b"HTTP/1.1")
        wait_until(lambda: service.connections == 0 and service.is_idle, "nothing of it is left")


@pytest.mark.parametrize("sent", [b"", WHOLE[:-1], WHOLE[:20]], ids=["nothing", "part of a body", "part of a head"])
def test_a_client_that_ends_its_side_within_a_request_is_disconnected(fake, sent):
    with running_service(document(), fake) as service, service.connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert answers_until_the_end(connection) == []
        wait_until(lambda: service.connections == 0 and service.is_idle, "nothing of it is left")
        assert fake.lookups == 0


def test_an_answer_that_is_being_sent_reaches_a_client_that_ends_its_side(fake):
    answer = b'{"tables": {"item": [' + b"1," * 999 + b"1]}}"
    with running_service(document(), fake) as service, service.connect() as connection:
        request = head(Content_Length=len(answer)) + answer
        for _ in range(60):  # more than the socket takes
            connection.sendall(request)
        wait_until(lambda: fake.lookups > 1, "answers are being sent")
        connection.shutdown(socket.SHUT_WR)
        assert answers_until_the_end(connection) == [200] * 60


def test_connections_with_complete_requests_are_not_closed_for_new_ones(fake, held):
    with running_service(document(max_connections=20), fake) as service, ExitStack() as stack:
        busy = [stack.enter_context(service.connect()) for _ in range(20)]
        for connection in busy:
            connection.sendall(WHOLE)
        wait_until(lambda: service.requests == 20, "every lookup has begun, or waits")
        for _ in range(3):
            with service.connect() as late:
                assert read_answer(late) == (503, {"error": "too many connections; send the request again later"})
        held.release.set()
        for connection in busy:
            assert read_answer(connection)[0] == 200


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
        wait_until(lambda: service.is_idle, "the rest of the body was dropped")


def test_requests_share_a_bound_on_memory_that_leaves_room_for_small_ones(fake):
    with running_service(document(max_body_bytes=100_000, max_held_bytes=2_000_000), fake) as service:
        limit = service.front.memory.large_limit
        for others, status in ((limit // 8, 400), (limit - 50_000, 503)):
            service.front.memory.held += others
            with service.connect() as connection:
                connection.sendall(head(Content_Length=90_000) + b"x" * 89_999)
                if status == 400:
                    wait_until(lambda others=others: service.front.memory.held > others, "the body arrives")
                    connection.sendall(b"x")
                got, answer = read_answer(connection)
            assert got == status
            if status == 503:
                assert f"expected at most {limit} (from service.max_held_bytes); send the request again" in answer["error"]
            assert service.client.post(PATH, content=LOOKUP).status_code == 200  # small ones go on
            service.front.memory.held -= others
        wait_until(lambda: service.is_idle, "the bodies are dropped")


def test_bodies_that_were_answered_make_room_for_others(fake):
    """Many times as much as may be held at once, one after the other."""
    body, headers = gzip.compress(LOOKUP + b" " * 90_000), {"Content-Encoding": "gzip"}
    with running_service(document(max_body_bytes=100_000), fake) as service:
        for _ in range(30):
            answer = service.client.post(PATH, content=body, headers=headers)
            assert answer.status_code == 200, answer.text
        assert service.is_idle


def test_half_a_head_and_silence_are_dropped(fake):
    with (
        running_service(document(request_timeout_s=5), fake) as service,
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


def test_clients_that_do_not_read_give_up_their_slots_when_these_run_short(fake):
    body = b'{"tables": {"item": [%s]}}' % b", ".join([b"1"] * 1000)
    with running_service(document(answer_timeout_s=600), fake) as service, ExitStack() as stack:
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
        assert service.front.refusals.aborted["answer"] == 2


def test_a_connection_that_idles_with_empty_lines_is_dropped(fake):
    with running_service(document(keep_alive_s=4), fake) as service, service.connect() as connection:
        connection.sendall(WHOLE)
        assert read_answer(connection)[0] == 200
        connection.sendall(b"\r\n")
        assert closes(connection)


def test_trailers_are_no_headers(fake):
    with running_service(document(bearer_token="secret"), fake) as service, service.connect() as connection:
        body = b"%x\r\n%s\r\n0\r\nAuthorization: Bearer secret\r\n\r\n" % (len(LOOKUP), LOOKUP)
        connection.sendall(head(Transfer_Encoding="chunked") + body)
        assert read_answer(connection)[0] == 401


def test_more_lookups_than_may_wait_are_503_with_retry_after(fake, held, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_PENDING", 20)
    with running_service(document(lookup_threads=2), fake) as service, ExitStack() as stack:
        connections = [stack.enter_context(service.connect()) for _ in range(20)]
        for connection in connections:
            connection.sendall(WHOLE)
        wait_until(lambda: service.requests == 20, "all but two lookups wait")
        response = service.client.post(PATH, content=LOOKUP)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "20 lookups are under way, expected at most 20" in response.json()["error"]
        assert service.client.get("/v2/health/ready").status_code == 200
        held.release.set()
        assert [read_answer(connection)[0] for connection in connections] == [200] * 20
        wait_until(lambda: service.is_idle, "nothing is left")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkspaceTimeoutError("all workspaces are busy"), 503),
        (DatabaseTimeoutError("Redis did not answer"), 503),
        (UnknownDeviceError("no device 7"), 404),
        (DeviceError("CUDA error 700: an illegal memory access was encountered"), 503),
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


@pytest.mark.parametrize("path", [PATH, "/v2/models/m/infer"])
def test_a_bug_is_500_without_a_stack_trace_and_logged_with_one(fake, path, caplog):
    fake.on_lookup = raising(ZeroDivisionError("secret detail"))
    body = LOOKUP if path == PATH else b'{"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [1]}]}'
    with running_service(document(), fake) as service:
        response = service.client.post(path, content=body)
        assert response.status_code == 500
        assert response.json()["error"] == "internal error; the log of the service has the details"
        assert "ZeroDivisionError: secret detail" in caplog.text
        fake.on_lookup = lambda: None
        assert service.client.post(path, content=body).status_code == 200


def test_a_bug_of_a_control_route_is_500_without_a_stack_trace(fake, caplog):
    fake.model = lambda *_: 1 // 0
    with running_service(document(), fake) as service:
        response = service.client.get("/v2/models/m")
        assert response.status_code == 500
        assert response.json()["error"] == "internal error; the log of the service has the details"
        wait_until(lambda: "ZeroDivisionError" in caplog.text, "the bug is logged")  # after it is answered
