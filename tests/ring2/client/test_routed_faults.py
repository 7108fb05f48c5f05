"""Servers that are silent: a routed lookup gives each a part of its time, and asks others for the rest."""

import asyncio
import socket
from contextlib import ExitStack

import numpy as np
import pytest

import hps
from tests.ring1.client.test_client_faults import Ask, _outcome
from tests.ring1.client.test_client_faults import ask as ask  # a fixture
from tests.servers.scripted_server import ScriptedServer, half, refused, silent, vectors_of

KEYS = np.arange(300)
CALLS = lambda client: [lambda: client.lookup(KEYS, "m", "item")] * 4  # noqa: E731


@pytest.mark.parametrize("place", [0, 2])  # asked and read first, and last
def test_a_silent_server_does_not_take_the_time_of_the_others(ask: Ask, place: int) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer([silent] * 20 * (nth == place))) for nth in range(3)]
        for one in ask([server.url for server in servers], CALLS, route="keys", timeout_s=4.0):
            np.testing.assert_array_equal(one, vectors_of(KEYS))
        asked = [len(server.requests) for server in servers]
        assert asked[place] < 4, asked  # it rests
        assert all(count >= 4 for nth, count in enumerate(asked) if nth != place), asked


@pytest.mark.parametrize("place", [0, 2])
def test_a_server_that_accepts_no_connection_does_not_take_the_time_of_the_others(ask: Ask, place: int) -> None:
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # its queue is full: the kernel answers no other one
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        servers = [stack.enter_context(ScriptedServer()) for _ in range(2)]
        addresses = [server.url for server in servers]
        addresses.insert(place, f"http://127.0.0.1:{full.getsockname()[1]}")
        for one in ask(addresses, CALLS, route="keys", timeout_s=4.0):
            np.testing.assert_array_equal(one, vectors_of(KEYS))
        assert all(len(server.requests) >= 4 for server in servers)


def test_connections_that_a_routed_lookup_holds_are_free_after_any_failure() -> None:
    with (
        ScriptedServer([refused(400, "wrong"), silent, half] * 3) as one,
        ScriptedServer() as other,
        hps.connect([one.url, other.url], route="keys", connections=1, timeout_s=4.0) as client,
    ):
        outcomes = [asyncio.run(_outcome(lambda: client.lookup(np.arange(100), "m", "item"))) for _ in range(8)]
        assert type(outcomes[0]) is hps.InvalidInputError
        for found in outcomes[1:]:
            assert isinstance(found, np.ndarray), found
