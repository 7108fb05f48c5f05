"""Runs the transforms of requests in threads of a frontend, so that a slow one delays no other client."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

from hps.ground.threads.workers import WorkQueue
from hps.serve.frontend.pending import Lookup
from hps.serve.http.http_answer import OverloadedError, RequestError
from hps.serve.protocol.transformed import RawRequest, transformed
from hps.tensors.transforms import Transform

_THREADS: Final = 2
_MOST_WAITING: Final = 256


class TransformRuns:
    """The requests of a frontend that are being transformed. *One event loop*, and its threads.

    Each version's transform has threads of its own. A function that does not return keeps its thread; once it has all, requests
    to this version are late.

    Args:
        go_on: decodes a lookup whose body has been transformed.
    """

    def __init__(self, go_on: Callable[[Lookup], None]) -> None:
        self._go_on = go_on
        self._queues: WeakKeyDictionary[Transform, WorkQueue] = WeakKeyDictionary()
        self._under_way: set[int] = set()

    def start(self, lookup: Lookup, request: RawRequest, transform: Transform) -> None:
        """Transform a request; then `go_on` and `Requester.retry_slot` are called, or `Requester.refuse`.

        Raises:
            OverloadedError: too many requests wait for their transforms.
        """
        loop = asyncio.get_running_loop()
        queue = self._queues.get(transform)
        if queue is None:
            queue = self._queues[transform] = WorkQueue("transforms", _MOST_WAITING, _THREADS, self)
            queue.stop_with(transform)

        def run() -> None:
            if number not in self._under_way:  # its client is gone, or its time is over
                return
            found: tuple[bytes, int] | Exception
            try:
                found = transformed(request, transform)
            except Exception as error:  # noqa: BLE001 - the client gets it
                found = error
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(finish, found)

        def finish(found: tuple[bytes, int] | Exception) -> None:
            timer.cancel()
            requester = lookup.requester
            if number not in self._under_way:
                return
            self._under_way.discard(number)
            if requester is None:
                return
            try:
                if isinstance(found, Exception):
                    lookup.version.counts.failed(lookup.began_ns)
                    raise found
                lookup.body, lookup.json_bytes = found
                self._go_on(lookup)
                requester.retry_slot()
            except Exception as error:  # noqa: BLE001 - the client gets an answer
                requester.refuse(error)

        number = id(lookup)
        timeout_s = transform.config.timeout_s
        function = transform.config.function
        late = RequestError(
            504, f"the transform {function} has not ended within {timeout_s:g} s (models[].transform.timeout_s)"
        )
        self._under_way.add(number)
        if not queue.submit(run):
            self._under_way.discard(number)
            raise OverloadedError("threads", f"{_MOST_WAITING} requests wait for their transforms; send this one again later")
        timer = loop.call_later(timeout_s, finish, late)

    def close(self) -> None:
        """End the threads; those in a function that does not return are left to the exit of the process."""
        self._under_way.clear()
        for queue in list(self._queues.values()):
            queue.abandon(0.1)

    # -- `WorkCounts`: errors and refusals are those of requests, and counted as such ------------------------------------------

    def show_queue(self, work: str, waiting: Callable[[], int]) -> None: ...

    def count_dropped(self, work: str) -> None: ...

    def count_failed(self, work: str) -> None: ...
