"""Runs the transforms of requests in threads of a frontend, so that a slow one delays no other client."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from hps.errors import HPSError, NotReadyError
from hps.ground.threads.workers import WorkQueue
from hps.serve.frontend.pending import Lookup, decode
from hps.serve.http.http_answer import OverloadedError, RequestError, status_of
from hps.serve.protocol.json_size import SMALL_JSON_BYTES, parsed_bytes
from hps.serve.protocol.transformed import RawRequest, read_raw, transformed
from hps.tensors.transforms import Transform

if TYPE_CHECKING:
    from hps.serve.frontend.exchange import EngineExchange

_THREADS: Final = 2
_MOST_WAITING: Final = 256


class TransformRuns:
    """The requests of a frontend that are being transformed. *One event loop*, and its threads.

    Each version's transform has threads of its own. A function that does not return keeps its thread; once it has all, requests
    to this version are late.
    """

    def __init__(self, exchange: "EngineExchange") -> None:
        self._exchange = exchange
        self._queues: WeakKeyDictionary[Transform, WorkQueue] = WeakKeyDictionary()
        self._under_way: set[int] = set()
        self._numbers = count()

    def starts(self, lookup: Lookup, then: Callable[[Lookup], None] | None = None) -> bool:
        """Start the transform of a lookup, which then goes on by itself; return False if its body can be decoded now.

        It ends with `Requester.retry_slot`, or with `Requester.refuse`, unless the serving version answers instead.

        Args:
            then: called once it is decoded; what it raises is the client's answer.

        Raises:
            HPSError: the request is invalid, or too many wait for their transforms.
        """
        transform = lookup.version.tables.transform
        if lookup.transform is not None:
            if transform is not None and transform.config == lookup.transform:
                return False
            # Another version's transform has made this body, whose keys may mean something else here.
            lookup.body, lookup.json_bytes = lookup.raw, lookup.raw_json_bytes
            lookup.transform, lookup.raw = None, b""
        if transform is None or lookup.target.is_json:
            return False
        most, body, requester = self._exchange.settings.max_keys_per_request, lookup.body, lookup.requester
        try:
            if len(body) > SMALL_JSON_BYTES and requester is not None:
                size = parsed_bytes(memoryview(body)[: lookup.json_bytes], most)
                requester.reserve_bytes(2 * len(body) + size, "parsing the request")
            request = read_raw(body, lookup.json_bytes, transform, most)
            if request is None:
                return False
            lookup.placed = None
            self._start(lookup, request, transform, then)
        except HPSError:
            lookup.version.counts.failed(lookup.began_ns)
            raise
        return True

    def _start(self, lookup: Lookup, request: RawRequest, transform: Transform, then: Callable[[Lookup], None] | None) -> None:
        loop, settings = asyncio.get_running_loop(), self._exchange.settings
        queue = self._queues.get(transform)
        if queue is None:
            queue = self._queues[transform] = WorkQueue("transforms", _MOST_WAITING, _THREADS, self)
            queue.stop_with(transform)

        def run() -> None:
            if number not in self._under_way:  # its time is over
                return
            found: tuple[bytes, int] | Exception = b"", 0
            try:
                if lookup.requester is not None:  # else its client is gone
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
                try:
                    if isinstance(found, Exception):
                        lookup.version.counts.failed(lookup.began_ns)
                        raise found
                    lookup.transform = transform.config
                    lookup.raw, lookup.raw_json_bytes = lookup.body, lookup.json_bytes
                    lookup.body, lookup.json_bytes = found
                    decode(lookup, settings.max_keys_per_request)
                except Exception as error:
                    # Too little memory is no version's failure.
                    if isinstance(error, OverloadedError) or not self._exchange.falls_back(lookup, status_of(error)):
                        raise
                    self._exchange.repeat(lookup, then)
                    return
                if then is not None:
                    then(lookup)
                requester.retry_slot()
            except Exception as error:  # noqa: BLE001 - the client gets an answer
                requester.refuse(error)

        number = next(self._numbers)
        late: HPSError
        if transform.importing:
            timeout_s = settings.request_timeout_s
            late = NotReadyError(f"model {lookup.target.model_name!r} is not ready: its transform is being imported")
        else:
            timeout_s = transform.config.timeout_s
            text = f"the transform {transform.config.function} has not ended within {timeout_s:g} s"
            late = RequestError(504, f"{text} (models[].transform.timeout_s)")
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
