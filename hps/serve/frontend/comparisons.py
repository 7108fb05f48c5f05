"""Compares both versions' answers to the requests of a canary or shadow, in a frontend, after the client has its answer.

A request that a rollout compares is sent to the other version once its own answer is on its way. Its slot has its keys and its
answer, and is freed when both versions have answered, so that nothing is copied on the way of the answer. One such request is
under way at a time, and at most fifty a second begin while clients wait for answers; further ones wait in a queue that is
bounded in number and bytes, and is emptied as soon as another request finds no slot.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hps.errors import HPSError, NotReadyError
from hps.serve.frontend.answers import EncodedAnswer, Plan
from hps.serve.frontend.lookups import Placed, read_cached
from hps.serve.frontend.pending import Lookup, decode
from hps.serve.frontend.rollouts import FrontendRollout
from hps.serve.frontend.scores import PlacedScores
from hps.serve.http.http_answer import OverloadedError
from hps.serve.logs.requests import Served

if TYPE_CHECKING:
    from hps.serve.frontend.exchange import EngineExchange

_log = logging.getLogger(__name__)
_BUSY_PAUSE_S: Final = 0.02


class Comparisons:
    """Requests of one frontend that wait for the other version's answer, and the one under way. *One event loop.*

    It is the `Requester` of what it posts.

    Args:
        loop: returns the event loop.
    """

    def __init__(
        self, exchange: "EngineExchange", loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.get_running_loop
    ) -> None:
        self._exchange = exchange
        self._loop = loop
        self._began = 0.0  # the last one
        self._waits = False
        self._queue: deque[_Compared] = deque()
        self._bytes = 0
        self._current: _Compared | None = None

    def add(self, rollout: FrontendRollout, lookup: Lookup) -> None:
        """Queue an answered request, before its requester has its slot."""
        size = self._exchange.slots.size_of(lookup.slot) + len(lookup.body) + len(lookup.raw)
        full = len(self._queue) >= rollout.queue_requests or self._bytes + size > rollout.queue_bytes
        if full or self._exchange.slots.crowded:
            rollout.counts.compared.dropped += 1
            return
        self._exchange.share_slot(lookup.slot)
        self._bytes += size
        self._queue.append(_Compared(rollout, lookup, lookup.slot, size))
        if self._current is None and len(self._queue) == 1:
            self._loop().call_soon(self._next)

    def drop_all(self) -> bool:
        """Drop what waits, for requests that need its memory; return whether there was any."""
        dropped = bool(self._queue)
        while self._queue:
            compared = self._queue.popleft()
            compared.rollout.counts.compared.dropped += 1
            self._release(compared)
        return dropped

    def _next(self) -> None:
        """Post the next request to the other version; while clients wait for answers, not too soon after the last one."""
        while self._queue and self._current is None and not self._waits:
            now = self._loop().time()
            if self._exchange.pending and now < self._began + _BUSY_PAUSE_S:
                self._waits = True
                self._loop().call_later(self._began + _BUSY_PAUSE_S - now, self._resume)
                return
            self._began = now
            compared = self._current = self._queue.popleft()
            try:
                lookup = compared.second = self._read(compared)
                if lookup.plan is None:
                    if self._exchange.transforms.starts(lookup):
                        return
                    decode(lookup, self._exchange.settings.max_keys_per_request)
            except Exception as error:  # noqa: BLE001 - no client waits for it
                _report(error)
                self._fail(compared)
            else:
                self.retry_slot()

    def _resume(self) -> None:
        self._waits = False
        self._next()

    def _read(self, compared: "_Compared") -> Lookup:
        """Read a request as the other version does."""
        exchange, first, rollout = self._exchange, compared.lookup, compared.rollout
        version = rollout.old if first.version is rollout.new else rollout.new
        target, served = first.target, Served()
        served.id = first.served.id
        # The counts of a version are of requests whose answers clients got: these go to counts of their own.
        lookup = Lookup(self, target, served, version.uncounted(), first.text)
        most = exchange.settings.max_keys_per_request
        if (plan := first.plan) is not None:
            if version.tables.transform is None:
                lookup.plan = read_cached(first.text, None, version.tables, most).plan
            if lookup.plan is None:
                keys = exchange.region.view[compared.slot + plan.keys_at : compared.slot + plan.keys_at + plan.keys_bytes]
                lookup.body, lookup.json_bytes = first.text + bytes(keys), len(first.text)
        else:
            lookup.body, lookup.json_bytes = first.body, first.json_bytes
            lookup.transform, lookup.raw, lookup.raw_json_bytes = first.transform, first.raw, first.raw_json_bytes
        return lookup

    def _post(self, compared: "_Compared", lookup: Lookup) -> None:
        exchange, view, there = self._exchange, self._exchange.region.view, compared.slot
        layout = _layout(lookup)
        slot = exchange.try_slot(layout.size)
        if slot < 0:
            raise OverloadedError("memory", "comparing a request: got no slot")
        lookup.slot = slot
        if (to := lookup.plan) is not None and (of := compared.lookup.plan) is not None:
            view[slot + to.keys_at : slot + to.keys_at + to.keys_bytes] = view[
                there + of.keys_at : there + of.keys_at + of.keys_bytes
            ]
        # No client waits for it, and a version that hangs is found out by several, one after another.
        lookup.due = time.perf_counter() + exchange.settings.request_timeout_s / 4
        exchange.post(lookup)

    def _fail(self, compared: "_Compared") -> None:
        """Count a request that the other version failed, which of a shadow is its error."""
        compared.rollout.counts.new.errors += compared.lookup.version is compared.rollout.old
        self._end(compared, failed=True)

    def _end(self, compared: "_Compared", *, failed: bool = False) -> None:
        if failed:
            compared.rollout.counts.compared.failed += 1
        self._current = None
        compared.second = None
        self._release(compared)
        if self._queue:
            self._loop().call_soon(self._next)

    def _release(self, compared: "_Compared") -> None:
        self._bytes -= compared.size
        self._exchange.release(compared.slot)

    # -- `pending.Requester`, called by the exchange ----------------------------------------------------------------------

    def retry_slot(self) -> None:
        """Post the request under way, which has been decoded."""
        compared = self._current
        if compared is None or (lookup := compared.second) is None:
            return
        try:
            self._post(compared, lookup)
        except Exception as error:  # noqa: BLE001 - no client waits for it; there is no room, or no engine
            _report(error)
            self._exchange.disown(lookup)
            self._end(compared, failed=True)

    def reserve_bytes(self, size: int, what: str = "") -> None:
        """Do nothing: the queue is bounded."""

    def wait_with(self, body: bytes | bytearray) -> None:
        """Give up a lookup that was to be retried."""
        self.refuse(NotReadyError("comparing a request: its version was retired"))

    def answered(self, lookup: Lookup, slot: int, deferred: int) -> None:
        """Do nothing: the exchange calls `compare`."""

    def encoded(self, lookup: Lookup, slot: int, deferred: int, answer: EncodedAnswer) -> None:
        """Do nothing: the exchange calls `compare`."""

    def compare(self, lookup: Lookup, slot: int, work_ns: int) -> None:
        """Compare the other version's answer, in this slot, with the one that the client got, and release both slots."""
        compared, region = self._current, self._exchange.region
        if compared is not None and lookup is compared.second:
            first, rollout = compared.lookup, compared.rollout
            answers = [of.arrays(region, at) for of, at in ((_layout(first), compared.slot), (_layout(lookup), slot))]
            if first.version is rollout.new:
                answers.reverse()
            else:
                rollout.counts.new.succeeded(work_ns, work_ns)
            rollout.counts.compared.compare(answers[0], answers[1])
            del answers
            self._end(compared)
        self._exchange.release(slot)

    def refuse(self, error: Exception) -> None:
        compared = self._current
        if compared is None:
            return
        if (lookup := compared.second) is not None:
            self._exchange.disown(lookup)
        if isinstance(error, NotReadyError) or not self._exchange.connected:  # no version's failure
            self._end(compared, failed=True)
        else:
            self._fail(compared)


class _Compared:
    """A request whose own answer is on its way."""

    __slots__ = ("lookup", "rollout", "second", "size", "slot")

    def __init__(self, rollout: FrontendRollout, lookup: Lookup, slot: int, size: int) -> None:
        self.rollout, self.lookup, self.slot, self.size = rollout, lookup, slot, size
        self.second: Lookup | None = None


def _report(error: Exception) -> None:
    if not isinstance(error, HPSError):
        _log.error("comparing a request failed unexpectedly", exc_info=error)


def _layout(lookup: Lookup) -> Plan | Placed | PlacedScores:
    found = lookup.plan if lookup.plan is not None else lookup.placed
    if found is None:
        raise HPSError("comparing a request: it has no layout")
    return found
