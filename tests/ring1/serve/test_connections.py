"""How many connections a front has, and which is closed for a new one."""

import resource
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from hps.serve.frontend import connections
from hps.serve.frontend.connections import Connections
from tests.fakes.clock import Clock

NOW = 100.0


@dataclass(eq=False)
class Peer:
    """What is asked of a connection. The default has sent requests, and sends none now."""

    name: str
    completed: bool = True
    used: bool = False
    waiting: bool = True
    idle: bool = True
    opened: float = 0.0
    unread_since: float = float("inf")


busy = partial(Peer, waiting=False, idle=False)
unknown = partial(Peer, completed=False)
"""One that has sent no complete request."""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setattr(connections, "time", type("Time", (), {"monotonic": Clock(NOW)}))
    return Connections(4)


@pytest.mark.parametrize(
    ("peers", "closed"),
    [
        ([Peer("a"), Peer("b")], "a"),
        ([Peer("a", used=True), Peer("b")], "b"),
        ([Peer("a", used=True), Peer("b", used=True)], "a"),
        ([busy("a"), Peer("b")], "b"),
        ([busy("a"), busy("b")], None),
        # those without a request go before those with one; among them those without headers, then the oldest
        ([Peer("a"), unknown("b"), unknown("c")], "b"),
        ([Peer("a"), unknown("b", idle=False), unknown("c")], "c"),
        ([Peer("a"), unknown("b", idle=False), unknown("c", idle=False)], "b"),
        # whose request is on its way has a moment, and takes no more than half from the others
        ([unknown("a", idle=False, opened=NOW - 0.4), Peer("b"), Peer("c"), Peer("d")], "b"),
        ([unknown("a", idle=False, opened=NOW - 0.4), Peer("b"), Peer("c"), busy("d")], None),
        ([unknown("a", idle=False, opened=NOW - 0.6), Peer("b"), Peer("c"), busy("d")], "a"),
        # who does not read goes before those that have just sent a request
        ([busy("a"), busy("b", unread_since=NOW - 0.5), busy("c", unread_since=NOW - 0.6)], "c"),
        ([busy("a", unread_since=NOW - 0.3), busy("b")], None),
        ([Peer("a", used=True), busy("b", unread_since=NOW - 0.5)], "b"),
        ([Peer("a"), busy("b", unread_since=NOW - 0.5)], "a"),
    ],
)
def test_the_least_missed_connection_is_closed(pool: Connections, peers: list[Any], closed: str | None) -> None:
    pool.order = dict.fromkeys(peers)
    for _ in range(2):
        found: Any = pool.find_replaceable()
        assert (found and found.name) == closed


def test_connections_that_were_used_go_behind_the_others(pool: Connections) -> None:
    peers: Any = [Peer(name) for name in "abcd"]
    pool.order = dict.fromkeys(peers)
    for used, order in (("a", "bcda"), ("", "bcda"), ("bd", "cabd")):
        for peer in peers:
            peer.used = peer.name in used
        pool.poll()
        assert "".join(one.name for one in pool.order) == order  # type: ignore[attr-defined]
        assert not any(peer.used for peer in peers)


def test_connections_take_at_most_half_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    none = resource.RLIM_INFINITY
    for limits, wanted, raised, found in (
        ((1024, 4096), 500, [], 500),  # twice as many fit
        ((1024, 4096), 512, [], 512),
        ((1024, 4096), 513, [(1026, 4096)], 513),
        ((1024, 4096), 9999, [(4096, 4096)], 2048),
        ((1024, none), 9999, [(19998, none)], 9999),
        ((none, none), 9999, [], 9999),
        ((1, 1), 9, [], 1),
    ):
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limits, asked=asked: asked.append(limits))
        assert (Connections(wanted).most, asked) == (found, raised)
