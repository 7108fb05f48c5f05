"""The threads of the administration, so that its event loop never waits for a database."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from hps.ground.workers import new_thread
from hps.service.held_memory import HeldMemory
from hps.service.http_answer import OverloadedError, RequestError

_T = TypeVar("_T")


class CallThreads:
    """Runs calls on a fixed number of threads for one event loop. *One per event loop.*

    Args:
        threads: number of calls that run at once.
        timeout_s: timeout of a call, including its wait for a thread.
        max_waiting: number of calls that may wait for a thread.
        what: name of a call in messages.
        memory: counts what calls hold.

    Attributes:
        pending: calls that run or wait.
    """

    def __init__(self, threads: int, timeout_s: float, memory: HeldMemory, max_waiting: int, what: str) -> None:
        self._what = what
        self._memory = memory
        self._limit = threads + max_waiting
        self.limit_to(timeout_s)
        self.pending = 0
        self._calls: queue.SimpleQueue[list[Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = [new_thread(f"{what}-{place}", self._work) for place in range(threads)]
        for thread in self._threads:
            thread.start()

    def limit_to(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, function: Callable[..., _T], *arguments: Any, held: int = 0) -> _T:
        """Run `function(*arguments)` on a thread, and return or raise its result.

        Args:
            held: bytes that the caller has taken from the memory for this call; they are given back when it has ended.

        Raises:
            OverloadedError: too many calls are waiting.
            RequestError: 504, it did not end in time. If it had begun, its thread runs on until it ends.
        """
        if self.pending >= self._limit:
            self._memory.held -= held
            limit = f"expected at most {self._limit}; send the request again later"
            raise OverloadedError("threads", f"{self.pending} {self._what}s run or wait, {limit}")
        call: Future[_T] = Future()
        ended = asyncio.wrap_future(call)
        ended.add_done_callback(partial(self._count_ended, held))
        self.pending += 1
        waiting: list[Callable[[], None]] = [partial(_run, call, partial(function, *arguments))]
        self._calls.put(waiting)
        try:
            _, running = await asyncio.wait([ended], timeout=self._timeout_s)
            if running:
                if call.cancel():  # it does not run
                    waiting.clear()
                raise RequestError(
                    504, f"the {self._what} did not end within {self._timeout_s:g} s (service.request_timeout_s)"
                )
            return ended.result()
        finally:
            del call, ended, waiting  # they hold the error, whose traceback refers to this frame

    def close(self, timeout_s: float) -> bool:
        """Finish all calls, then end the threads; False on timeout. Blocks."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _count_ended(self, held: int, ended: "asyncio.Future[Any]") -> None:
        self.pending -= 1
        self._memory.held -= held
        if not ended.cancelled():
            ended.exception()  # nobody may wait for it any more

    def _work(self) -> None:
        while (waiting := self._calls.get()) is not None:
            for run in list(waiting):
                run()
                del run  # it holds buffers
            del waiting


def _run(call: "Future[Any]", function: Callable[[], Any]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        call.set_result(function())
    except StopIteration as error:  # no future takes it
        failure = RuntimeError("a call raised StopIteration")
        failure.__cause__ = error
        call.set_exception(failure)
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
        call.set_exception(error)
    finally:
        del call, function  # the traceback of an error refers to this frame
