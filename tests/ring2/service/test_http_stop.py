"""A service that stops: it says so, answers until others have noticed, and loses no request that has reached it."""

import asyncio
import json
from http.client import HTTPResponse

import numpy as np
import pytest

from hps.service.fronts import connection as connections
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.ring2.service.test_http_faults import LOOKUP, WHOLE, document, fake, head, held
from tests.servers.running_service import running_service, samples

__all__ = ["fake", "held"]
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
    received = b"".join(iter(lambda: connection.recv(65536), b""))
    answers = received.split(b"HTTP/1.1 ")[1:]
    assert [json.loads(one.partition(b"\r\n\r\n")[2]) for one in answers] == [ANSWER] * count
    return [b"connection: close" in one.lower() for one in answers]


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
        (other_end,) = service.front.connections.order

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
        (other_end,) = service.front.connections.order
        assert other_end.front.settings.keep_alive_s == 75 > 60, "longer than load balancers keep theirs"
        service.server.stop("SIGINT", force=True)
        assert connection.recv(1) == b""
