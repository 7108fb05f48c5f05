"""The load generator: what it counts is what the server did, and a slow server cannot hide."""

import pytest

from hps.client.addresses import read_addresses
from hps.errors import InvalidInputError
from hps.tools.profiling.http_load import HttpLoad
from tests.servers.timed_server import Answer, timed_server


def load(server, connections=2, body=b"x" * 10, check=lambda number, head, answer: ""):
    request = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return HttpLoad(*read_addresses(server.url), connections, lambda number: (request, memoryview(body)), check)


def test_loops_count_what_the_server_counted_and_an_open_one_sends_as_many_as_are_due():
    for rate in (None, 100.0):
        with timed_server() as server:
            result = load(server).run(0.4, rate)
        assert len(result.times) == len(server.lookups) > 0
        assert not result.failures
        assert 0 < result.in_time <= len(result.times)
        if rate:
            assert len(result.times) == len(result.lateness) == 40


def test_a_rate_that_the_server_cannot_hold_shows_in_the_times():
    with timed_server(lambda number: Answer(service_s=0.01)) as server:
        result = load(server, 4).run(0.5, 200.0)
    assert len(result.times) == 100
    assert result.times.largest_s > 0.01 * 100 - 0.5  # the last answer comes after the work on all; it was due at 0.5 s
    median, most = result.times.quantiles_s([0.5, 0.9])
    assert median > 0.01 * 50 - 0.25
    assert most > 0.01 * 90 - 0.45


def test_a_stall_counts_for_all_that_were_due_meanwhile():
    with timed_server(lambda number: Answer(service_s=0.4 if number == 10 else 0.0)) as server:
        result = load(server, 1).run(0.6, 100.0)
    # Of those that were due in the first 0.2 s of the stall, at least 19 waited for 0.2 s or longer.
    assert result.times.quantiles_s([1 - 19 / 60])[0] >= 0.19


def test_what_has_no_answer_at_the_end_is_a_failure_and_a_time(monkeypatch):
    monkeypatch.setattr("hps.tools.profiling.http_load.DRAIN_S", 0.1)
    with timed_server(lambda number: Answer(service_s=0.05)) as server:
        result = load(server, 1).run(0.5, 100.0)
    assert result.failures["no answer"] >= 50 - 0.7 / 0.05
    assert len(result.times) == 50
    assert len(result.failed) == result.failures["no answer"]


@pytest.mark.parametrize("rate", [None, 100.0])
def test_refusals_and_wrong_answers_are_counted_apart(rate):
    with timed_server(lambda number: Answer(503 if number % 2 else 200)) as server:
        result = load(server, 1).run(0.3, rate)
    refused, asked = result.failures["status 503"], len(server.lookups)
    assert refused == len(result.failed) == asked // 2
    assert len(result.times) == asked - refused
    with timed_server() as server:
        result = load(server, 1, check=lambda number, head, answer: "" if len(answer) == 3 else "wrong").run(0.1, rate)
    assert (len(result.times), result.failures["wrong"]) == (0, len(server.lookups))


@pytest.mark.parametrize("rate", [None, 50.0])
def test_a_connection_that_is_lost_is_counted_and_made_anew(rate):
    with timed_server(lambda number: Answer(0 if number == 3 else 200)) as server:
        result = load(server, 1).run(0.5, rate)
    assert result.failures == {"connection lost": 1}
    assert len(result.times) == len(server.lookups) - 1 > 3


@pytest.mark.parametrize("rate", [None, 50.0])
def test_a_server_that_dies_is_counted_until_the_end(rate):
    def answer(number):
        if number < 5:
            return Answer()
        server.shutdown()
        server.server_close()
        return Answer(0)

    with timed_server(answer) as server:
        result = load(server, 1).run(0.6, rate)
    assert result.failures["no connection"] >= 1
    assert result.failures["connection lost"] == 1
    assert len(result.times) == 5 + result.failures["no answer"]
    if rate:
        assert result.failures["no answer"] >= 30 - 6 - 1  # all that were due, and not only those that could be sent


def test_bodies_and_answers_larger_than_a_socket_takes():
    body = bytes(range(256)) * 40_000
    with timed_server(lambda number: Answer(body=body)) as server:
        result = load(server, 1, body, lambda number, head, answer: "" if answer == body else "torn").run(0.3)
        assert len(result.times) == len(server.lookups) > 0
    assert not result.failures
    assert set(server.lookups) == {len(body)}
    with pytest.raises(InvalidInputError, match="got 501 connections"):
        load(server, 501)
