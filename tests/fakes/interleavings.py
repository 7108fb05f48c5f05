"""Threads that take turns, one step at a time, in every order with few preemptions."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any


def _ready() -> bool:
    return True


class _Stopped(BaseException):
    """Ends the threads of a schedule that is given up."""


class Schedule:
    """Runs threads one at a time. A thread goes on until it waits, or until the choices say that another preempts it.

    Args:
        choices: of each place at which several threads could go on, which did; further ones: the first.
        preemptions: how often a thread that could go on gives way, at most.

    Attributes:
        taken: pairs of the choice made and the number of threads to choose from.
        now: number of steps so far.
    """

    def __init__(self, choices: list[int], preemptions: int) -> None:
        self.taken: list[tuple[int, int]] = []
        self.now = 0
        self._choices = choices
        self._preemptions = preemptions
        self._waits: dict[threading.Thread, Callable[[], object]] = {}
        self._turns: dict[threading.Thread, threading.Semaphore] = {}
        self._ended = threading.Semaphore(0)
        self._error: BaseException | None = None

    def spawn(self, work: Callable[[], object]) -> None:
        def run() -> None:
            me = threading.current_thread()
            self._turns[me].acquire()
            try:
                if self._error is None:
                    work()
            except _Stopped:
                pass
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self._error = self._error or error
            del self._waits[me]
            self._pass_on(None)

        thread = threading.Thread(target=run, daemon=True)
        self._turns[thread] = threading.Semaphore(0)
        self._waits[thread] = _ready
        thread.start()

    def run(self) -> None:
        """Run all threads to their ends; raise the first error of one."""
        self._pass_on(None)
        self._ended.acquire()
        for thread in self._turns:
            thread.join()
        if self._error is not None:
            raise self._error

    def step(self, until: Callable[[], object] = _ready) -> None:
        """Let others go first, and wait until a condition holds. Does nothing in a thread of the test itself."""
        me = threading.current_thread()
        if me not in self._waits:
            return
        self._waits[me] = until
        self._pass_on(me)
        if self._error is not None:
            raise _Stopped

    def _pass_on(self, me: threading.Thread | None) -> None:
        self.now += 1
        able = [one for one, until in self._waits.items() if self._error is not None or until()]
        if me in able:
            able.remove(me)
            able = [me, *able] if self._preemptions else [me]
        if not able:
            if self._waits:
                self._error = AssertionError("each thread waits for another one")
                able = list(self._waits)
            else:
                self._ended.release()
                return
        choice = 0
        if len(able) > 1 and self._error is None:
            choice = self._choices[len(self.taken)] if len(self.taken) < len(self._choices) else 0
            self.taken.append((choice, len(able)))
        chosen = able[choice]
        if chosen is me:
            return
        self._preemptions -= me in able
        self._turns[chosen].release()
        if me is not None:
            self._turns[me].acquire()


def schedules(preemptions: int) -> Iterator[Schedule]:
    """Yield every schedule, each to be run before the next is asked for."""
    choices: list[int] = []
    while True:
        yield (schedule := Schedule(choices, preemptions))
        taken = schedule.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        choices = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]


def cooperative(step: Callable[..., None]) -> SimpleNamespace:
    """What waits in `threading` and `queue`, made to wait in a schedule. Without a limit of time."""

    class Condition:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

        def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
            if not predicate():
                step(predicate)
            return True

        def notify_all(self) -> None: ...

    class Event:
        def __init__(self) -> None:
            self._set = False

        def set(self) -> None:
            self._set = True

        def wait(self, timeout: float | None = None) -> bool:
            step(lambda: self._set)
            return True

    class SimpleQueue(list[Any]):
        put = list.append
        qsize = list.__len__

        def get(self, timeout: float | None = None) -> Any:
            if not self:
                step(lambda: self)
            return self.pop(0)

    return SimpleNamespace(Condition=Condition, Event=Event, SimpleQueue=SimpleQueue)
