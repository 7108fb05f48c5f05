"""The parent of the processes: from when fronts get connections, what signals do, and what follows the end of a child."""

import os
import select
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hps.configuration.load import load_configuration
from hps.regions import layout
from hps.regions.layout import Memory
from hps.serve.frontend import supervisor
from hps.serve.frontend.supervisor import Supervisor
from tests.fakes.clock import Clock
from tests.servers.running_service import document_of, model_of

TERM, INT, HUP, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL
FRONTS, ENGINE = (101, 102), 103
DRAIN_S = 50.0


def test_a_front_gets_no_connections_before_it_listens() -> None:
    with (
        supervisor.bind("127.0.0.1", 0, shared=True) as place,
        supervisor.bind_shared(place) as first,
        supervisor.bind_shared(place),
    ):
        first.listen()
        for _ in range(32):  # by their ports, about half would go to the other
            with socket.create_connection(place.getsockname()):
                first.accept()[0].close()


def test_a_port_is_taken_while_the_system_remembers_connections_of_another_program_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()):
        other.accept()[0].close()
        port = other.getsockname()[1]
        other.close()
        with supervisor.bind("127.0.0.1", port, shared=True) as place, supervisor.bind_shared(place) as front:
            assert front.getsockname()[1] == port


class Parent:
    """A supervisor whose children exist in its books alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(1000.0)
        self._told: list[tuple[int, int]] = []
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=self.clock))
        monkeypatch.setattr("hps.serve.frontend.supervisor.os.kill", lambda *told: self._told.append(told))
        settings = {"max_held_bytes": 1 << 20, "max_body_bytes": 1 << 16}
        configuration = load_configuration(document_of(model_of("m", ["nowhere"], {"item": 4}), service=settings))
        self.supervisor = Supervisor(configuration, "127.0.0.1", 0, len(FRONTS))
        self.children = self.supervisor._children
        self.children.update({child: number for number, child in enumerate(FRONTS)} | {ENGINE: -1})
        self.publish(blocked="")

    def publish(self, blocked: str) -> None:
        page = Memory(self.supervisor.shared.snapshot)
        layout.write_text(page, 0, {"blocked": blocked, "settings": {"drain_s": DRAIN_S}}, layout.MOST_SNAPSHOT_BYTES)

    def signal(self, number: int) -> None:
        self.supervisor._on_signal(number, None)

    def begin(self) -> float:
        """Begin to stop, and return after how many seconds the fronts will end."""
        self.stop_at = self.supervisor._start_stop()
        return self.stop_at - self.clock.now

    def goes_on(self, seconds: float = 0.0) -> list[tuple[int, int]]:
        """Let time pass; return who is told what. The service has not ended."""
        self.clock.now += seconds
        assert self.supervisor._continue_stop(self.stop_at) is (not self.children)
        return self.take()

    def take(self) -> list[tuple[int, int]]:
        """Signals that were sent, by process, since they were taken last."""
        told, self._told = self._told, []
        return told

    def close(self) -> None:
        self.supervisor._close_reserved()
        shared = self.supervisor.shared
        for region in (*shared.regions, *shared.events, *shared.loop_events, shared.snapshot):
            os.close(region)
        self.supervisor._directory.cleanup()


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    made = Parent(monkeypatch)
    yield made
    made.close()


ALL = [(child, USR1) for child in (*FRONTS, ENGINE)]
FRONTS_END = [(child, TERM) for child in FRONTS]


def test_a_signal_drains_then_ends_the_fronts_and_after_them_the_engine(parent: Parent) -> None:
    parent.signal(TERM)
    assert parent.begin() == DRAIN_S
    assert parent.take() == ALL
    for seconds, told in ((DRAIN_S - 0.1, []), (0.1, FRONTS_END), (1, [])):
        assert parent.goes_on(seconds) == told
    for child in FRONTS:
        assert parent.goes_on(1) == [], "it is told once"
        del parent.children[child]
    assert [parent.goes_on(), parent.goes_on(1)] == [[(ENGINE, TERM)], []]
    del parent.children[ENGINE]
    assert parent.goes_on() == []


@pytest.mark.parametrize("second", [TERM, INT])
@pytest.mark.parametrize("begun", [True, False])
def test_a_second_signal_hurries(parent: Parent, second: int, begun: bool) -> None:
    parent.signal(TERM)
    if begun:
        assert parent.begin() == DRAIN_S
        assert parent.goes_on(1) == ALL
    parent.signal(second)
    if not begun:
        assert parent.begin() == 0
    assert parent.goes_on() == ([] if begun else ALL) + FRONTS_END
    parent.signal(second)
    assert parent.goes_on() == []


@pytest.mark.parametrize("why", ["SIGINT", "not ready", "no engine", "no page"])
def test_nothing_is_drained_where_nobody_waits_for_it(parent: Parent, why: str) -> None:
    if why == "not ready":
        parent.publish(blocked="the service is starting")
    elif why == "no engine":
        del parent.children[ENGINE]
    elif why == "no page":
        Memory(parent.supervisor.shared.snapshot).words[:] = 0
    parent.signal(INT if why == "SIGINT" else TERM)
    assert parent.begin() == 0
    assert parent.goes_on()[-len(FRONTS) :] == FRONTS_END


def test_those_who_do_not_end_are_killed(parent: Parent) -> None:
    parent.signal(INT)
    parent.begin()
    parent.goes_on()
    del parent.children[FRONTS[0]]
    assert parent.goes_on(supervisor._STOP_S) == []
    assert parent.goes_on(0.1) == [(FRONTS[1], KILL), (ENGINE, KILL)]


def test_a_reload_is_asked_of_the_engine_each_time(parent: Parent) -> None:
    for _ in range(2):
        parent.signal(HUP)
        assert parent.take() == [(ENGINE, HUP)]
    del parent.children[ENGINE]
    parent.signal(HUP)
    assert (parent.take(), bool(parent.supervisor._stopping)) == ([], False)


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_process_that_dies_again_and_again_is_started_later_and_later(parent: Parent, number: int) -> None:
    def after(lived_s: float) -> float:
        parent.supervisor._started[number] = parent.clock.now
        parent.clock.now += lived_s
        return parent.supervisor._restart_time(number, KILL) - parent.clock.now

    assert [after(1) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert after(30) == 30
    assert [after(30.1), after(1)] == [0, 1], "one that has lived long begins anew"
    assert parent.supervisor._code == 0


def test_the_death_of_the_engine_is_told_to_every_front_and_that_of_a_front_to_none(parent: Parent) -> None:
    shared = parent.supervisor.shared
    parent.supervisor._started |= dict.fromkeys((-1, 0, 1), 0.0)
    for number, told in ((0, False), (-1, True), (1, False), (-1, True)):
        for region in shared.regions:
            Memory(region)[layout.ENGINE_EPOCH] = 7
        parent.supervisor._restart_time(number, KILL)
        assert [Memory(region)[layout.ENGINE_EPOCH] for region in shared.regions] == [0 if told else 7] * len(FRONTS)
        for event in shared.events:
            assert select.select([event], [], [], 0)[0] == ([event] if told else [])
            assert not told or os.eventfd_read(event) == 1


@pytest.mark.parametrize(
    ("stopping", "child", "status", "code", "stops"),
    [
        (False, -1, 3 << 8, 3, True),  # it says itself why
        (False, -1, 0, 0, True),
        (True, -1, 3 << 8, 3, True),
        (True, -1, KILL, 1, True),
        (False, -1, KILL, 0, False),
        (False, 0, 3 << 8, 0, False),
        (True, 0, KILL, 0, True),
    ],
)
def test_the_code_is_that_of_the_engine(
    parent: Parent, stopping: bool, child: int, status: int, code: int, stops: bool
) -> None:
    parent.supervisor._started[child] = 0.0
    if stopping:
        parent.signal(TERM)
    again: Any = parent.supervisor._restart_time(child, status)
    assert (again is None, bool(parent.supervisor._stopping), parent.supervisor._code) == (stops, stops, code)
