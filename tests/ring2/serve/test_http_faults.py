"""Slow, broken and greedy clients, stuck and failing lookups: each ends in its own error, and nothing stays behind."""

import asyncio
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

from hps.cache.base import EmbeddingCache
from hps.errors import DatabaseTimeoutError, DeviceError, DeviceMemoryError, UnknownDeviceError, WorkspaceTimeoutError
from hps.serve.frontend import connection as connections
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


def received_on(connection):
    """All answers on a connection that the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b"")).split(b"HTTP/1.1 ")[1:]


def answers_until_the_end(connection):
    """Their statuses."""
    return [int(one[:3]) for one in received_on(connection)]


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


def test_a_cache_without_a_batch_driver_is_answered_by_the_threads_of_the_engine(serving, fake):
    fake.cache_class = type("OtherCache", (EmbeddingCache,), {"device": "cpu"})  # of another package, without `BatchAnswers`
    with serving() as service:
        assert service.client.post(PATH, content=LOOKUP).status_code == 200
    assert fake.lookups == 1


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


KEYS = b'{"tables": {"item": [' + b"1," * 999 + b"1]}}"
LARGE = head(Content_Length=BIG) + LOOKUP + b" " * (BIG - len(LOOKUP))
SENT = {
    "one": [WHOLE],
    "in two pieces": [WHOLE[:-9], WHOLE[-9:]],
    "chunked": [head(Transfer_Encoding="chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(LOOKUP), LOOKUP)],
    "large": [LARGE],
    "large behind others": [WHOLE * 3 + LARGE],  # more than is parsed at once
    "answers of more than the socket takes": [(head(Content_Length=len(KEYS)) + KEYS) * 60],
    "FastAPI": [b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"],
}


@pytest.mark.parametrize("sent", SENT)
def test_a_client_that_sends_whole_requests_and_ends_its_side_gets_every_answer(serving, held, sent):
    with serving() as service, service.connect() as connection:
        if "answers" in sent:
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
        memory, body = service.frontend.memory, b"x" * 90_000
        for others, status in ((memory.large_limit // 8, 400), (memory.large_limit - 50_000, 503)):
            memory.used += others
            answer = service.client.post(PATH, content=body)
            assert answer.status_code == status
            assert service.client.post(PATH, content=LOOKUP).status_code == 200  # small ones go on
            memory.used -= others
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
    with serving(answer_timeout_s=600) as service, ExitStack() as stack:
        slots, order = service.frontend.exchange.slots, service.frontend.connections.order
        for _ in range(2):
            connection = stack.enter_context(service.connect())
            connection.setblocking(False)
            with suppress(BlockingIOError):
                for _ in range(2000):
                    connection.sendall(head(Content_Length=len(KEYS)) + KEYS)
        wait_until(lambda: sum(one._unread > 0 for one in list(order)) == 2, "it was noticed that nothing is read")
        kept, gone = order
        kept._unread_since = time.monotonic() + 60
        assert kept._slot >= 0
        assert gone._slot >= 0
        others = slots.size // 2 + 1

        def take(size):
            slots.used += size
            slots.crowded = 2 * slots.used > slots.size

        take(others)
        wait_until(lambda: gone not in order, "its slot is wanted")
        assert kept in order
        assert gone._slot == -1
        take(-others)
        kept._unread_since = time.monotonic() - 60
        for _ in range(2):
            look = service.frontend._ticks["poll"]
            wait_until(lambda look=look: service.frontend._ticks["poll"] is not look, "all connections were looked at")
        assert kept in order
        take(others)
        wait_until(lambda: kept not in order, "its slot is wanted, too")
        assert slots.used == others
        take(-others)
        assert service.frontend.refusals.aborted["answer"] == 2


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
    def fails(method, path, content=b""):
        caplog.clear()
        response = service.client.request(method, path, content=content)
        assert response.status_code == 500, response.text
        assert response.json()["error"] == "internal error; the log of the service has the details"
        wait_until(lambda: "ZeroDivisionError: secret detail" in caplog.text, "the bug is logged")

    tensor = b'{"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [1]}]}'
    caplog.set_level("INFO")
    with serving() as service:
        wait_until(lambda: "ready; try" in caplog.text, "the service has asked for the model itself")
        bug = Mock(side_effect=ZeroDivisionError("secret detail"))
        for path, content in ((PATH, LOOKUP), ("/v2/models/m/infer", tensor)):
            fake.on_lookup = bug
            fails("POST", path, content)
            fake.on_lookup = lambda: None
            assert service.client.post(path, content=content).status_code == 200
        fake.model = bug
        fails("GET", "/v2/models/m")
        del fake.model


# -- a service that stops ----------------------------------------------------------------------------------------------


ANSWER = {"tables": {"item": [[1, 2, 3]]}}


@pytest.fixture
def service(fake):
    """A service that drains until it is told a second time to stop."""
    with running_service(document(drain_s=3600), fake) as service:
        wait_until(lambda: service.server._loop, "the event loop runs")
        yield service


def drain(service):
    service.server.stop("SIGTERM", drain=True)
    wait_until(lambda: service.app.lifecycle.leaving, "it drains")


def refuses(service):
    try:
        service.connect().close()
    except ConnectionError:
        return True
    return False


def answer_on(connection):
    """The body of the next answer, and whether it says that the connection closes."""
    response = HTTPResponse(connection)
    response.begin()
    assert response.status == 200
    return json.loads(response.read()), response.will_close


def answers_on(connection, count):
    """As `answer_on`, of several answers; nothing may follow them but the end."""
    answers = received_on(connection)
    assert [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers] == [ANSWER] * count
    return [b"connection: close" in answer.lower() for answer in answers]


def in_event_loop(service, function):
    """Call a function between two turns of the event loop."""

    async def call():
        function()

    return asyncio.run_coroutine_threadsafe(call(), service.server._loop).result(60)


def test_while_it_drains_it_is_not_ready_and_answers_on_old_and_new_connections(service):
    with service.connect() as busy, service.connect() as idle, service.connect() as late:
        for connection in (busy, idle):
            connection.sendall(WHOLE)
            assert answer_on(connection) == (ANSWER, False)
        assert service.client.get("/v2").headers.get("connection") is None
        drain(service)
        for path in ("health/ready", "health/ready?strict=false", "models/m/ready", "models/m/versions/1/ready"):
            response = service.client.get(f"/v2/{path}")
            assert (response.status_code, "shutting down" in response.text) == (503, True)
            assert response.headers["connection"] == "close"
        assert service.client.get("/v2/health/live").status_code == 200
        assert samples(service)["hps_ready",] == 0
        with service.connect() as new:
            for connection in (busy, late, new):
                connection.sendall(WHOLE)
                assert answers_on(connection, 1) == [True]
        idle.setblocking(False)
        with pytest.raises(BlockingIOError):
            idle.recv(1)
        idle.settimeout(20)
        service.server.stop("SIGTERM", drain=True)  # the second one
        assert idle.recv(1) == b""
        wait_until(lambda: refuses(service), "the service refuses connections")


@pytest.mark.parametrize(("before", "padding"), [(0, 0), (1, 4000), (3, 0), (3, 4000)])  # parsed, or set aside
def test_requests_that_wait_for_earlier_ones_are_answered_before_the_connection_closes(service, held, before, padding):
    request = WHOLE.replace(b": %d" % len(LOOKUP), b": %d" % (len(LOOKUP) + padding)) + b" " * padding
    with service.connect() as connection:
        connection.sendall(request * before)
        if before:
            assert held.entered.wait(PATIENCE_S)
        drain(service)
        connection.sendall(request * (8 - before))
        assert held.entered.wait(PATIENCE_S)
        held.release.set()
        assert answers_on(connection, 8) == [False] * 7 + [True]


def test_connections_that_were_not_accepted_yet_are_answered(service):
    clients = []

    def connect_and_stop():
        for _ in range(50):
            clients.append(service.connect())
            clients[-1].sendall(WHOLE)
        service.server.stop()

    in_event_loop(service, connect_and_stop)
    for client in clients:
        with client:
            assert answers_on(client, 1) == [True]


def test_a_connection_is_not_closed_over_bytes_that_have_arrived(service):
    with service.connect() as connection:
        connection.sendall(WHOLE)
        answer_on(connection)
        (other_end,) = service.frontend.connections.order

        def send_and_close():
            connection.sendall(WHOLE)
            other_end.close_if_quiet()

        in_event_loop(service, send_and_close)
        assert answer_on(connection) == (ANSWER, False)
        in_event_loop(service, other_end.close_if_quiet)
        assert connection.recv(1) == b""


@pytest.mark.parametrize("sent", [b"", WHOLE[:20], WHOLE[: -len(LOOKUP)], WHOLE[:-1]])
def test_a_request_that_has_begun_is_waited_for(service, sent, monkeypatch):
    monkeypatch.setattr(connections, "_FIRST_REQUEST_S", 20)
    with service.connect() as connection:
        connection.sendall(sent)
        wait_until(lambda: service.connections == 1, "the connection is there")
        service.server.stop()
        wait_until(lambda: refuses(service), "the service refuses connections")
        connection.sendall(WHOLE[len(sent) :])
        assert answers_on(connection, 1) == [True]


def test_an_answer_that_is_not_read_yet_is_not_cut_off(fake):
    fake.rows[0] = {key: np.full(3, key, np.float32) for key in range(1000)}
    body = json.dumps({"tables": {"item": list(range(1000)) * 300}}).encode()
    large = document(max_keys_per_request=1_000_000, max_body_bytes=10_000_000)
    with running_service(large, fake) as service, service.connect() as connection:
        connection.sendall(head(Content_Length=len(body)) + body)
        wait_until(lambda: fake.lookups, "it is looked up")
        service.server.stop()
        wait_until(lambda: refuses(service), "the service refuses connections")
        assert len(answer_on(connection)[0]["tables"]["item"]) == 300_000


def test_idle_connections_are_closed_after_their_time_and_when_the_service_stops_without_draining(fake):
    with running_service(document(keep_alive_s=0.1), fake) as service, service.connect() as connection:
        connection.sendall(WHOLE)
        assert answers_on(connection, 1) == [False]
    with running_service(document(drain_s=3600), fake) as service, service.connect() as connection:
        connection.sendall(WHOLE)
        answer_on(connection)
        (other_end,) = service.frontend.connections.order
        assert other_end.frontend.settings.keep_alive_s == 75 > 60, "longer than load balancers keep theirs"
        service.server.stop("SIGINT", force=True)
        assert connection.recv(1) == b""
