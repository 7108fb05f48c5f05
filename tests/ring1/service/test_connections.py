"""Which connection gives way to a new one: examples of the rule, from the longest without a complete request to the latest."""

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hps.service.fronts.connections import Connections

AGO = 100.0


class Stand(SimpleNamespace):
    """Stands for a connection, as a key of the order."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def connection(kind: str) -> Any:
    """A connection, by words about it.

    `known` has sent a complete request, `used` one since the last look; `sends` a part of one now; `new` was opened just now;
    `busy` waits for its answer; `lags-10` has read nothing of it for 10 s.
    """
    words = kind.split()
    lags = next((float(word.removeprefix("lags-")) for word in words if word.startswith("lags-")), None)
    now = time.monotonic()
    return Stand(
        kind=kind,
        waiting="busy" not in words and lags is None,
        completed="known" in words or "busy" in words or lags is not None,
        idle="sends" not in words and "busy" not in words and lags is None,
        used="used" in words,
        opened=now + AGO if "new" in words else now - AGO,
        unread_since=math.inf if lags is None else now - lags,
    )


@pytest.mark.parametrize(
    ("most", "kinds", "gives_way"),
    [
        (4, ["busy", "busy", "busy", "busy"], None),
        (4, ["busy", "silent", "sends", "known"], "silent"),
        (4, ["sends 1", "sends 2", "silent", "busy"], "silent"),  # it has not even sent headers
        (4, ["sends 1", "sends 2", "known", "busy"], "sends 1"),
        (4, ["sends new", "sends new", "sends new", "busy"], None),  # each has a moment
        (4, ["sends new", "silent new", "busy", "busy"], "silent new"),
        (4, ["known used", "known 1", "known 2", "busy"], "known 1"),
        (4, ["known used 1", "known used 2", "known used 3", "known used 4"], "known used 1"),
        (6, ["sends new", "sends new", "sends new", "known 1", "known 2", "known 3"], None),  # half is kept for known ones
        (6, ["sends new", "sends new", "known 1", "known 2", "known 3", "known 4"], "known 1"),  # more than half are known
        (4, ["lags-10", "lags-100", "lags-50", "busy"], "lags-100"),
        (4, ["lags-0.1", "lags-0.2", "busy", "busy"], None),  # they have just begun
        (4, ["known used", "lags-10", "busy", "busy"], "lags-10"),
        (4, ["known", "lags-10", "busy", "busy"], "known"),
        (4, ["sends new", "known used", "lags-10", "busy"], "lags-10"),
    ],
)
def test_the_least_missed_connection_gives_way(most: int, kinds: list[str], gives_way: str | None) -> None:
    connections = Connections(most)
    connections.order = dict.fromkeys(map(connection, kinds))
    found = connections.least_missed()
    assert (None if found is None else found.kind) == gives_way


def test_a_look_puts_those_that_were_used_behind_the_others() -> None:
    connections = Connections(4)
    for _ in range(2):
        connections.order = dict.fromkeys(map(connection, ["known used 1", "silent", "known used 2", "busy"]))
        connections.look()
        assert [one.kind for one in connections.order] == ["silent", "busy", "known used 1", "known used 2"]
        assert not any(one.used for one in connections.order)
