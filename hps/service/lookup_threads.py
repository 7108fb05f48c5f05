"""The threads that lookups run on, so that the event loop never waits for a database.

Most of the cost of a hop to a thread is handing over the interpreter lock, twice a hop: each hand-over wakes a sleeping
thread, and nothing runs meanwhile. The two together take as long as a lookup of a thousand resident keys, so calls share
hand-overs. The calls of one turn of the event loop are handed over together at its end, to a single thread while that thread
keeps up, and it reports all results at once when it runs out of calls.

A long call delays the others by at most a tick of a millisecond: calls that have waited for a tick get further threads, and
every tick collects unreported results. A call that arrives while a long one runs gets a thread at once.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from hps.ground.workers import new_thread
from hps.service.held_memory import HeldMemory
from hps.service.http_answer import OverloadedError, RequestError

_T = TypeVar("_T")

MAX_WAITING = 256
"""Maximum number of waiting calls; further requests are refused. At 0.1 ms a lookup the last one waits about 25 ms."""

_TICK_S = 0.001
_LONG_S = 0.0005  # calls that have run for longer are not waited for


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: "asyncio.Future[Any]"
    submitted_s: float
    held: int
    late: bool = False
    result: Any = None
    error: BaseException | None = None


class LookupThreads:
    """Runs calls on a fixed number of threads for one event loop. *One per event loop.*

    Args:
        threads: number of calls that run at once.
        timeout_s: timeout of a call, including its wait for a thread.
        max_waiting: number of calls that may wait for a thread.
        what: name of a call in messages.
        memory: counts what calls hold that have timed out and still run.

    Attributes:
        pending: calls that run or wait.
    """

    def __init__(
        self, threads: int, timeout_s: float, memory: HeldMemory, max_waiting: int = MAX_WAITING, what: str = "lookup"
    ) -> None:
        self._what = what
        self._memory = memory
        self.limit_to(timeout_s)
        self._limit = threads + max_waiting
        # Used only by the event loop.
        self.pending = 0
        self._submitted: list[_Call] = []
        self._unanswered: dict[_Call, None] = {}  # in order of submission
        self._ticking = False
        # Shared with the threads: single operations of a deque are atomic.
        self._waiting: deque[_Call] = deque()
        self._done: deque[_Call] = deque()
        self._sleepers: deque[threading.Lock] = deque()  # a thread sleeps on its lock until another removes and releases it
        self._last_start_s = 0.0
        self._closing = False
        self._threads = [new_thread(f"{what}-{place}", self._work) for place in range(threads)]
        for thread in self._threads:
            thread.start()

    def limit_to(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, function: Callable[..., _T], *arguments: Any, held: int = 0) -> _T:
        """Run `function(*arguments)` on a thread, and return or raise its result.

        Args:
            held: bytes that the call holds and the caller counts. If it times out, they count here until the call ends.

        Raises:
            OverloadedError: too many calls are waiting.
            RequestError: 504, it did not end in time. If it had begun, its thread runs on until it ends.
        """
        if self.pending >= self._limit:
            limit = f"expected at most {self._limit}; send the request again later"
            raise OverloadedError("threads", f"{self.pending} {self._what}s run or wait, {limit}")
        loop = asyncio.get_running_loop()
        call = _Call(function, arguments, loop.create_future(), time.monotonic(), held)
        self.pending += 1
        self._unanswered[call] = None
        if not self._submitted:
            loop.call_soon(self._hand_over)
        self._submitted.append(call)
        if not self._ticking:
            self._ticking = True
            loop.call_later(_TICK_S, self._tick, loop)
        try:
            result: _T = await call.future
        finally:
            del call  # holds the error, whose traceback refers to this frame
        return result

    def close(self, timeout_s: float) -> bool:
        """Finish all calls, then end the threads; False on timeout. Blocks."""
        deadline = time.monotonic() + timeout_s
        self._closing = True
        self._wake(len(self._threads))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _hand_over(self) -> None:
        calls, self._submitted = self._submitted, []
        self._waiting.extend(calls)
        if len(self._sleepers) == len(self._threads) or time.monotonic() - self._last_start_s > _LONG_S:
            self._wake(1)

    def _wake(self, count: int) -> None:
        try:
            for _ in range(count):
                self._sleepers.pop().release()
        except IndexError:  # all are awake, and look for waiting calls before they sleep
            pass

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._settle()
        now = time.monotonic()
        while self._unanswered and now - (oldest := next(iter(self._unanswered))).submitted_s > self._timeout_s:
            del self._unanswered[oldest]
            if not oldest.future.done():
                text = f"the {self._what} did not end within {self._timeout_s:g} s (service.request_timeout_s)"
                oldest.future.set_exception(RequestError(504, text))
                try:
                    self._waiting.remove(oldest)
                    self.pending -= 1
                except ValueError:  # a thread has it
                    oldest.late = True
                    self._memory.held += oldest.held
        with suppress(IndexError):  # a thread took the last one meanwhile
            if self._waiting and now - self._waiting[0].submitted_s > _TICK_S:
                self._wake(len(self._waiting))
        self._ticking = self.pending > 0
        if self._ticking:
            loop.call_later(_TICK_S, self._tick, loop)

    def _settle(self) -> None:
        while self._done:
            call = self._done.popleft()
            self.pending -= 1
            self._unanswered.pop(call, None)
            if call.late:
                self._memory.held -= call.held
            if call.future.done():  # timed out, or its request was cancelled
                continue
            if call.error is None:
                call.future.set_result(call.result)
            else:
                call.future.set_exception(call.error)

    def _work(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        loop: asyncio.AbstractEventLoop | None = None  # a thread with results to collect
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:
                if loop is not None:
                    with suppress(RuntimeError):  # the event loop is closed: no request waits
                        loop.call_soon_threadsafe(self._settle)
                    loop = None
                if self._closing:
                    return
                self._sleepers.append(turn)
                if self._waiting or self._closing:  # since our check: the event loop may not have seen us asleep
                    self._wake(1)
                turn.acquire()
                continue
            loop = call.future.get_loop()
            if not call.future.done():  # else it timed out or was cancelled while it waited
                self._last_start_s = time.monotonic()
                try:
                    call.result = call.function(*call.arguments)
                except StopIteration as error:  # a future rejects it
                    call.error = RuntimeError("a lookup raised StopIteration")
                    call.error.__cause__ = error
                except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
                    call.error = error
            self._done.append(call)
            del call  # holds its buffers
