"""Threads for calls that wait for databases, so that the event loop does not."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from hps.ground.threads.workers import new_thread
from hps.serve.http.http_answer import OverloadedError, RequestError
from hps.serve.http.memory_budget import MemoryBudget

_T = TypeVar("_T")


class CallThreads:
    """Runs calls on a fixed number of threads for one event loop. *One per event loop.*

    Args:
        timeout_s: timeout of a call, including its wait for a thread.
        max_waiting: limit on calls that wait for a thread.
        what: name of a call in messages.

    Attributes:
        pending: calls that run or wait.
    """

    def __init__(self, threads: int, timeout_s: float, memory: MemoryBudget, max_waiting: int, what: str) -> None:
        self._what = what
        self._memory = memory
        self._limit = threads + max_waiting
        self.limit_to(timeout_s)
        self.pending = 0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = [new_thread(f"{what}-{place}", self._work) for place in range(threads)]
        for thread in self._threads:
            thread.start()

    def limit_to(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, function: Callable[..., _T], *arguments: Any, held: int = 0) -> _T:
        """Run `function(*arguments)` on a thread, and return or raise its result.

        Args:
            held: bytes that the caller has reserved for this call; they are released at its end.

        Raises:
            OverloadedError: too many calls are waiting.
            RequestError: 504, it did not end in time. A running call keeps its thread until it ends.
        """
        if self.pending >= self._limit:
            self._memory.used -= held
            limit = f"expected at most {self._limit}; send the request again later"
            raise OverloadedError("threads", f"{self.pending} {self._what}s run or wait, {limit}")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_T] = loop.create_future()
        call = _Call([partial(function, *arguments)], loop, ended, held)
        self.pending += 1
        self._calls.put(call)
        try:
            if not (await asyncio.wait([ended], timeout=self._timeout_s))[0]:
                if call.take() is not None:  # not started
                    self._end(call, None, None)
                raise RequestError(
                    504, f"the {self._what} did not end within {self._timeout_s:g} s (service.request_timeout_s)"
                )
            return ended.result()
        finally:
            del call, ended  # they refer to the error, whose traceback refers to this frame

    def close(self, timeout_s: float) -> bool:
        """Finish all calls, then end the threads; False on timeout. Blocks."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _end(self, call: "_Call", result: Any, error: BaseException | None) -> None:
        self.pending -= 1
        self._memory.used -= call.held
        if call.ended.done():  # its request was cancelled
            return
        if error is None:
            call.ended.set_result(result)
        else:
            call.ended.set_exception(error)
            call.ended.exception()  # marks it as retrieved: the request may be gone

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if (run := call.take()) is not None:
                result: Any = None
                error: BaseException | None = None
                try:
                    result = run()
                except StopIteration as stop:  # a future refuses it
                    error = RuntimeError("a call raised StopIteration")
                    error.__cause__ = stop
                except BaseException as raised:  # noqa: BLE001 - it is raised where the call is awaited
                    error = raised
                with suppress(RuntimeError):  # the event loop is closed
                    call.loop.call_soon_threadsafe(self._end, call, result, error)
                del result, error
            del call, run  # they refer to buffers


class _Call(NamedTuple):
    waiting: list[Callable[[], Any]]
    loop: asyncio.AbstractEventLoop
    ended: "asyncio.Future[Any]"
    held: int

    def take(self) -> Callable[[], Any] | None:
        """Return the function to run; None if it was taken before."""
        try:
            return self.waiting.pop()
        except IndexError:
            return None
