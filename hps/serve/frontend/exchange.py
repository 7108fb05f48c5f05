"""A frontend's side of its region: allocates slots, posts lookups to the engine, and takes its answers."""

import asyncio
import json
import logging
import os
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hps.configuration.load import ServiceConfig
from hps.errors import HPSError, NotReadyError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.regions import layout
from hps.regions.exchange import arm, completions, post, store_word
from hps.regions.layout import ANSWERED, FAILED, HEADER_BYTES, RETIRED, RING, SLAB, FrontendDescriptors
from hps.regions.loop_state import FRONTEND_KERNELS
from hps.serve.frontend.answers import EncodedAnswer, Plan
from hps.serve.frontend.comparisons import Comparisons
from hps.serve.frontend.pending import Lookup, Requester, decode
from hps.serve.frontend.published import Published
from hps.serve.frontend.shared_memory import Segments
from hps.serve.frontend.transforming import TransformRuns
from hps.serve.http.http_answer import OverloadedError, RequestError, status_of
from hps.serve.logs.lines import fields
from hps.serve.logs.lookup_report import report_of
from hps.statistics.tracing import LookupTrace, Span, TableAnswers

_log = logging.getLogger(__name__)

_SLOT_WAIT_S: Final = 1.0
_RETIRED_PAUSE_S: Final = 0.005
_SPIN_NS: Final = 100_000
_LEAST_ORDER: Final = 12  # of slots: 4 KB
_ENGINE_EPOCH: Final = layout.ENGINE_EPOCH // 8
_CHECK: Final = (0, 0, 0, HEADER_BYTES, 0)
"""Header of a request that names no deployment: its id, flags, segments, place and size of the scratch."""
MOST_PENDING: Final = RING // 2
"""Maximum number of posted lookups of one frontend."""


class Slots:
    """Slots of powers of two bytes in the slab of a region of `size` bytes. *One per event loop.*"""

    # Buddies are joined only if there is no room otherwise, since most requests have the size of earlier ones. The slot that
    # was freed last is allocated first: it is still in the processor's caches, to which a device writes, too.

    def __init__(self, size: int) -> None:
        self._free: list[list[int]] = [[] for _ in range(64)]
        self._order: dict[int, int] = {}  # of allocated slots
        self.size = size - SLAB
        start, left = 0, self.size
        while left >= 1 << _LEAST_ORDER:
            order = left.bit_length() - 1
            self._free[order].append(start)
            start += 1 << order
            left -= 1 << order
        self._most = max((order for order, free in enumerate(self._free) if free), default=0)
        self.largest = 1 << self._most  # the largest possible slot
        self.used = 0  # bytes of allocated slots
        self.crowded = False  # more than half is allocated; slow clients then get no slot

    def allocate(self, size: int) -> int:
        """Return the offset of a slot, a multiple of 4,096; -1 if there is no room now."""
        order = max(_LEAST_ORDER, (size - 1).bit_length())
        if order > self._most:
            return -1
        free = self._free[order]
        if not free and not self._split(order) and not (self._join() and (free or self._split(order))):
            return -1
        place = free.pop()
        self._order[place] = order
        self.used += 1 << order
        self.crowded = 2 * self.used > self.size
        return SLAB + place

    def free(self, slot: int) -> None:
        place = slot - SLAB
        order = self._order.pop(place)
        self.used -= 1 << order
        self.crowded = 2 * self.used > self.size
        self._free[order].append(place)

    def check_integrity(self) -> list[str]:
        """Return a sentence for each broken invariant: slots and free places cover the slab once, and are counted."""
        places = [(place, order) for order, free in enumerate(self._free) for place in free]
        findings, end = [], 0
        for place, order in sorted([*places, *self._order.items()]):
            if place != end:
                findings.append(f"slots: got a place at {place}, expected one at {end}")
            end = place + (1 << order)
        if end != self.size >> _LEAST_ORDER << _LEAST_ORDER:
            findings.append(f"slots: {end} bytes are free or taken, of {self.size}")
        if (taken := sum(1 << order for order in self._order.values())) != self.used:
            findings.append(f"slots: {taken} bytes are taken, but {self.used} are counted")
        return findings

    def size_of(self, slot: int) -> int:
        """Return the bytes of an allocated slot."""
        return 1 << self._order[slot - SLAB]

    def is_allocated(self, slot: int) -> bool:
        return slot - SLAB in self._order

    def _split(self, order: int) -> bool:
        larger = next((above for above in range(order + 1, self._most + 1) if self._free[above]), 0)
        if not larger:
            return False
        place = self._free[larger].pop()
        for half in range(larger - 1, order - 1, -1):
            self._free[half].append(place + (1 << half))
        self._free[order].append(place)
        return True

    def _join(self) -> bool:
        """Join free buddies; return True if there were any."""
        joined = False
        for order in range(_LEAST_ORDER, self._most):
            free = set(self._free[order])
            pairs = [place for place in free if not place >> order & 1 and place | 1 << order in free]
            if pairs:
                left = free.difference(pairs, [place | 1 << order for place in pairs])
                self._free[order][:] = sorted(left)  # in place: `allocate` refers to it
                self._free[order + 1] += pairs
                joined = True
        return joined


class EngineExchange:
    """Posts the lookups of one frontend. With `spins`, it spins while lookups are pending. *One event loop.*"""

    def __init__(
        self, number: int, shared: FrontendDescriptors, published: Published, settings: ServiceConfig, *, spins: bool
    ) -> None:
        compile_kernels(*FRONTEND_KERNELS)
        self._number = number
        self.region = layout.map_region(shared.regions[number])
        self._event = shared.events[number]
        self._engine_event = shared.loop_events[number % len(shared.loop_events)]
        self._published = published
        self._spins = spins
        self.settings = settings
        self.slots = Slots(self.region.size)
        self.segments = Segments()  # shared memory of clients
        self.pending: dict[int, Lookup] = {}  # posted lookups, by slot
        self._waiting: deque[tuple[Lookup, Requester]] = deque()
        self.comparisons = Comparisons(self)
        self.transforms = TransformRuns(self)
        self._shared_slots: set[int] = set()  # with two users: the requester that sends the answer, and a comparison
        self._found = np.zeros(RING, np.int64)
        self._tail = 0
        self._epoch = 0
        self._connected = self._was_connected = False
        self._check = -1  # slot of an unanswered check
        self._check_since = 0.0
        self._answers = False  # whether the engine has answered a check of this epoch
        self._spinning = False
        self._spun_ns = 0
        self._start_epoch()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._event, self._woken)
        self._arm()

    def close(self) -> None:
        self.transforms.close()
        self._loop.remove_reader(self._event)

    def poll(self, now: float) -> None:
        """Follow the engine, and refuse lookups that have waited too long; `now` is a time of `time.monotonic`."""
        self._follow_engine()
        clock, limit = time.perf_counter(), self.settings.request_timeout_s
        for lookup in list(self.pending.values()):
            rollout = lookup.version.rollout
            tried = self._connected and rollout is not None and lookup.version is rollout.new
            if tried and clock - 1e-9 * lookup.posted_ns > limit / 2 and self.falls_back(lookup, 504):
                lookup.version.counts.failed(lookup.began_ns)
                # The slot stays the engine's until it is completed.
                self.pending[lookup.slot] = replace(lookup, requester=None)
                self.repeat(lookup)
            elif lookup.due < clock and (requester := lookup.requester) is not None:
                lookup.version.counts.failed(lookup.began_ns)
                if self._connected:  # else the engine is gone, which is no version's failure
                    self.falls_back(lookup, 504)
                requester.refuse(RequestError(504, f"the lookup did not end within {limit:g} s (service.request_timeout_s)"))
        while self._waiting and self._waiting[0][0].slot_due < now:
            lookup, requester = self._waiting.popleft()
            if lookup.requester is requester:
                requester.refuse(self._no_slot())

    # -- the engine -------------------------------------------------------------------------------------------------------

    def _start_epoch(self) -> None:
        """Request empty rings from the engine; pending lookups are posted again once it has them."""
        # Epochs keep answers of an earlier engine, or to an earlier process of this frontend, apart from later ones: until the
        # engine has written this number back, it may still complete old slots, and nothing is posted.
        region = self.region
        self._connected = self._answers = False
        self._tail = 0
        self._epoch = 1 + secrets.randbits(62)  # not the last one plus 1: a compromised frontend may have written garbage
        store_word(region.address + layout.SUBMITTED, 0)
        store_word(region.address + layout.FRONTEND_EPOCH, self._epoch)
        self._wake_engine()

    def _wake_engine(self) -> None:
        os.eventfd_write(self._engine_event, 1)

    def _follow_engine(self) -> None:
        """Connect to an engine that has started our epoch, or disconnect from one that has exited."""
        epoch = self.region[layout.ENGINE_EPOCH]
        if self._connected:
            if epoch != self._epoch:
                _log.warning(
                    "frontend %d: engine process exited; %d lookups queued until it restarts", self._number, len(self.pending)
                )
                self._start_epoch()
        elif epoch == self._epoch:
            self._connected = self._was_connected = True
            if self._check >= 0:
                self.release(self._check)
            self._check = -1
            self.check()
            for lookup in list(self.pending.values()):
                if lookup.requester is None:
                    del self.pending[lookup.slot]
                    self.release(lookup.slot)
                else:
                    lookup.posted_ns = time.perf_counter_ns()
                    self._submit(lookup)

    def check(self) -> None:
        """Post a request that names no deployment, unless one is pending. Its answer shows that lookups are answered."""
        if not self._connected or self._check >= 0:
            return
        slot = -1 if len(self.pending) >= MOST_PENDING else self.slots.allocate(HEADER_BYTES)
        if slot >= 0:  # else there are lookups, whose answers show the same
            self.region.longs[slot >> 3 : (slot >> 3) + len(_CHECK)] = array("q", _CHECK)
            self._check, self._check_since = slot, time.monotonic()
            if post(self.region.address, slot):
                self._wake_engine()

    @property
    def connected(self) -> bool:
        """Whether there is an engine that knows this frontend."""
        return self._connected

    def unready_reason(self) -> str:
        """Return why the engine does not answer lookups of this frontend; empty if it does. Posts another check."""
        if not self._connected:
            self._follow_engine()
        if not self._connected:
            return self.unavailable()
        late_s, limit_s = time.monotonic() - self._check_since, self.settings.request_timeout_s
        if not self._answers:
            return "the parameter server is not ready: its first answer to this frontend is awaited"
        if self._check >= 0 and late_s > limit_s:
            return f"the parameter server has not answered this frontend for {late_s:.0f} s; lookups end after {limit_s:g} s"
        self.check()
        return ""

    def unavailable(self) -> str:
        """Return why there is no engine, for errors."""
        if blocked := self._published.blocked or ("" if self._was_connected else "the service is starting"):
            return f"the parameter server is not ready: {blocked}"
        return "the parameter server is being started again; send the request again later"

    # -- posting ----------------------------------------------------------------------------------------------------------

    def take_slot(self, lookup: Lookup) -> bool:
        """Take a slot for a lookup. If there is none, queue it for `Requester.retry_slot`, and return False.

        Raises:
            RequestError: 413, no slot is as large.
            NotReadyError: the engine has not started this frontend's epoch, and may still write to the slab.
        """
        if not self._connected:
            self._require_engine()
        plan, placed = lookup.plan, lookup.placed
        if plan is None and placed is None:  # it is being transformed
            return False
        size = plan.size if plan is not None else placed.size  # type: ignore[union-attr]
        if size > self.slots.largest:
            limit = f"expected at most {self.slots.largest} (from service.max_held_bytes)"
            raise RequestError(413, f"answering the request: it takes {size} bytes of memory, {limit}; send fewer keys at once")
        requester = lookup.requester
        slot = self.try_slot(size)
        if slot < 0 and self.comparisons.drop_all():
            slot = self.try_slot(size)
        if slot < 0:
            if requester is not None:
                lookup.slot_due = lookup.slot_due or time.monotonic() + _SLOT_WAIT_S
                self._waiting.append((lookup, requester))
            return False
        lookup.slot, lookup.slot_due = slot, 0.0
        return True

    def try_slot(self, size: int) -> int:
        """Return a slot; -1 if there is none now."""
        return -1 if len(self.pending) >= MOST_PENDING else self.slots.allocate(size)

    def share_slot(self, slot: int) -> None:
        """Give a slot a second user: it is freed when both have released it."""
        self._shared_slots.add(slot)

    def _require_engine(self) -> None:
        self._follow_engine()
        if not self._connected:
            raise NotReadyError(self.unavailable())

    def keys_of(self, lookup: Lookup) -> memoryview:
        plan, slot = lookup.plan, lookup.slot
        start = slot + plan.keys_at  # type: ignore[union-attr]
        return self.region.view[start : start + plan.keys_bytes]  # type: ignore[union-attr]

    def post(self, lookup: Lookup) -> None:
        """Write the descriptor of a lookup, and keys that are not in its slot yet, and submit it."""
        if not self._connected:
            self._require_engine()
        plan, placed, slot = lookup.plan, lookup.placed, lookup.slot
        lookup.device = lookup.version.device(lookup.device)
        deployment_id = lookup.version.deployment_ids[lookup.device]
        if plan is not None:
            descriptor = plan.descriptor
            self.region.view[slot : slot + len(descriptor)] = descriptor
            self.region.longs[slot >> 3] = deployment_id
            if lookup.shared is not None:
                self.segments.read(lookup.shared, self.keys_of(lookup))
        elif placed is not None:
            placed.write(self.region, slot, deployment_id)
        now = time.perf_counter_ns()
        lookup.posted_ns = now
        lookup.due = lookup.due or now * 1e-9 + self.settings.request_timeout_s
        self.pending[slot] = lookup
        self._submit(lookup)

    def _submit(self, lookup: Lookup) -> None:
        # One wake for all that this turn of the event loop posts: a write to an eventfd costs more than posting. The first
        # lookup of a quiet frontend is not held back for it.
        if post(self.region.address, lookup.slot):
            if self._spins or len(self.pending) == 1:
                os.eventfd_write(self._engine_event, 1)
            else:
                self._loop.call_soon(self._wake_engine)
        if self._spins:
            self._spun_ns = time.perf_counter_ns()
            if not self._spinning:
                self._spinning = True
                self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        self._drain()
        if self.pending and time.perf_counter_ns() - self._spun_ns < _SPIN_NS:
            self._loop.call_soon(self._spin)
        else:
            self._spinning = False
            self._arm()

    # -- answers ----------------------------------------------------------------------------------------------------------

    def _woken(self) -> None:
        os.eventfd_read(self._event)
        if not self._connected or self.region.longs[_ENGINE_EPOCH] != self._epoch:
            self._follow_engine()
        self._drain()
        if not self._spinning:
            self._arm()

    def _arm(self) -> None:
        # `arm` asks to be woken, and only then reads how many completions there are, with a full barrier between: one that
        # came before the engine could see the question is found here, and one that comes later wakes.
        address = self.region.address
        while arm(address) != self._tail and self._connected:
            self._drain()

    def _drain(self) -> None:
        if not self._connected:
            return
        count = completions(self.region.address, self._tail, self._found)
        if not count:
            return
        slots = self._found[:count].tolist()
        self._tail += count
        # A slot is released here, or handed to the requester with its answer, which releases it once the client has it.
        for slot in slots:
            lookup = self.pending.pop(slot, None)
            if lookup is None:
                if slot == self._check:
                    self._check, self._answers = -1, True
                    self.release(slot)
                continue
            if lookup.requester is None:
                self.release(slot)
                continue
            try:
                self._answer(lookup)
            except Exception as error:  # noqa: BLE001 - the client gets an answer
                if lookup.requester is not None:
                    lookup.requester.refuse(error)

    def _answer(self, lookup: Lookup) -> None:
        requester, slot, longs = lookup.requester, lookup.slot, self.region.longs
        if requester is None:
            return
        at = slot >> 3
        status = longs[at + layout.STATUS // 8]
        if status == ANSWERED:
            resumed = time.perf_counter_ns()
            began, ended = longs[at + layout.BEGAN_NS // 8], longs[at + layout.ENDED_NS // 8]
            if (rollout := lookup.version.rollout) is not None and lookup.target.version is None:
                if requester is self.comparisons:
                    lookup.slot = -1
                    self.comparisons.compare(lookup, slot, ended - began)
                    return
                if rollout.answered(lookup, resumed - lookup.posted_ns, ended - began):
                    self.comparisons.add(rollout, lookup)
            if (plan := lookup.plan) is not None and plan.layout is not None:
                begin = slot + plan.vectors_at - len(plan.text)
                plan.layout.convert(self.region.bytes[begin : begin + plan.layout.size])
            lookup.version.counts.succeeded(lookup.began_ns, lookup.posted_ns, began, ended, resumed)
            if plan is None or lookup.shared is not None:
                self._answer_placed(lookup, requester, began, ended, resumed)
                return
            deferred = longs[at + layout.DEFERRED // 8]
            lookup.slot = -1
            requester.answered(lookup, slot, deferred)
            return
        if status == RETIRED:
            if requester is self.comparisons:
                raise NotReadyError("comparing a request: its version was retired")
            self._retry_retired(lookup)
            return
        if status == FAILED:
            error = self._failure(lookup)
            if lookup.version.rollout is None or not self.falls_back(lookup, status_of(error)):
                raise error
            self.release(slot)
            self.repeat(lookup)
            return
        raise HPSError(f"the engine refused a descriptor (status {status})")

    def _read_scratch(self, lookup: Lookup) -> Any:
        """Read the JSON that the engine has written to the scratch of a slot."""
        at, words = lookup.slot >> 3, self.region.words
        start, size = int(words[at + layout.SCRATCH // 8]), int(words[at + layout.SCRATCH_USED // 8])
        if not 0 < size <= self.region.size:
            return None
        return json.loads(bytes(self.region.view[lookup.slot + start : lookup.slot + start + size]))

    def _failure(self, lookup: Lookup) -> Exception:
        found = self._read_scratch(lookup) or {}
        lookup.version.counts.failed(lookup.began_ns)
        message = found.get("message", "internal error; the log of the service has the details")
        status = found.get("status", 500)
        if status == 500:  # a bug
            identity = lookup.served.id.decode()
            _log.error("a lookup failed unexpectedly; the log of the engine has the details", extra=fields(request_id=identity))
        if found.get("reason"):
            error = OverloadedError(found["reason"], message)
            error.status = status
            return error
        return RequestError(status, message)

    def _answer_placed(self, lookup: Lookup, requester: Requester, began: int, ended: int, resumed: int) -> None:
        placed, served, words = lookup.placed, lookup.served, self.region.words
        at = lookup.slot >> 3
        deferred = int(words[at + layout.DEFERRED // 8])
        report = None
        if placed is not None and lookup.traced and (found := self._read_scratch(lookup)) is not None:
            trace = LookupTrace()
            trace.tables.update({name: TableAnswers(**counts) for name, counts in found["tables"].items()})
            trace.spans += [Span(*span) for span in found["spans"]]
            served.trace, served.lookup_ns, served.keys = trace, resumed - lookup.began_ns, placed.keys
            served.queue_ns, served.infer_ns = began - lookup.posted_ns, ended - began
            if lookup.report:
                report = report_of(trace, served.queue_ns, served.infer_ns)
        if placed is not None:
            answer = placed.encode(report, lookup.device or 0)
        else:
            plan: Plan = lookup.plan  # type: ignore[assignment]
            view = self.region.view[lookup.slot + plan.vectors_at : lookup.slot + plan.end]
            answer = EncodedAnswer((plan.text,), (view,), len(plan.text))
        if lookup.shared is not None and answer.text_bytes is not None:
            answer = self.segments.without_shared(lookup.shared, answer)
        lookup.version.counts.output_ns += time.perf_counter_ns() - resumed
        slot, lookup.slot = lookup.slot, -1
        requester.encoded(lookup, slot, deferred, answer)

    def falls_back(self, lookup: Lookup, status: int) -> bool:
        """Count the failure of a version of a rollout; return True if the serving version shall answer the lookup instead."""
        rollout = lookup.version.rollout
        if rollout is None or lookup.requester in (None, self.comparisons) or lookup.target.version is not None:
            return False
        return rollout.failed(lookup, status)

    def _take_body(self, lookup: Lookup) -> None:
        """Take the body of a lookup out of its slot, which is the caller's from then on."""
        if lookup.plan is not None:
            lookup.body, lookup.json_bytes = lookup.text + bytes(self.keys_of(lookup)), len(lookup.text)
        lookup.plan, lookup.slot = None, -1

    def repeat(self, lookup: Lookup, then: Callable[[Lookup], None] | None = None) -> None:
        """Let the serving version answer a lookup that the new version of a canary did not.

        Args:
            then: as of `TransformRuns.starts`.
        """
        self._take_body(lookup)
        self._retry(lookup, then)

    def _retry_retired(self, lookup: Lookup) -> None:
        """Retry a lookup of a retired deployment: another version may serve now."""
        before, slot = lookup.version, lookup.slot
        self._take_body(lookup)
        self.release(slot)
        self._published.poll()
        version = self._published.version_of(lookup.target, lookup.served)
        if version is before and time.perf_counter() < lookup.due:
            self._loop.call_later(_RETIRED_PAUSE_S, self._retry, lookup)
            return
        if version is before:
            raise NotReadyError(f"model {lookup.target.model_name!r} is not ready: it was undeployed")
        self._retry(lookup)

    def _retry(self, lookup: Lookup, then: Callable[[Lookup], None] | None = None) -> None:
        requester = lookup.requester
        if requester is None:
            return
        try:
            lookup.version = self._published.version_of(lookup.target, lookup.served)
            if self.transforms.starts(lookup, then):
                requester.wait_with(lookup.body)
                return
            decode(lookup, self.settings.max_keys_per_request)
            if then is not None:
                then(lookup)
            if self.take_slot(lookup):
                self.post(lookup)
            else:
                requester.wait_with(lookup.body)
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            requester.refuse(error)

    def check_integrity(self) -> list[str]:
        """Return a sentence for each broken invariant: those of the slots, and that no posted slot is free."""
        posted = [*self.pending, *([self._check] if self._check >= 0 else [])]
        free = [slot for slot in posted if not self.slots.is_allocated(slot)]
        return self.slots.check_integrity() + [f"exchange: slot {slot} is posted, but free" for slot in free]

    def disown(self, lookup: Lookup) -> None:
        """Forget the requester of a lookup. A posted slot belongs to the engine until it is completed."""
        lookup.requester = None
        if lookup.slot >= 0 and self.pending.get(lookup.slot) is not lookup:
            self.release(lookup.slot)
            lookup.slot = -1

    def release(self, slot: int) -> None:
        """Free a slot that neither the engine nor a client uses."""
        if self._shared_slots and slot in self._shared_slots:
            self._shared_slots.remove(slot)
            return
        self.slots.free(slot)
        if self._waiting:
            self._loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        """Let the first waiting lookup retry to take a slot."""
        while self._waiting:
            lookup, requester = self._waiting.popleft()
            if lookup.requester is not requester:
                continue
            requester.retry_slot()
            if self._waiting and self._waiting[-1][0] is lookup:  # still no room: first come, first served
                self._waiting.rotate(1)
            return

    def _no_slot(self) -> OverloadedError:
        if (pending := len(self.pending)) >= MOST_PENDING:
            limit = f"expected at most {MOST_PENDING}; send the request again later"
            return OverloadedError("threads", f"{pending} lookups are under way, {limit}")
        used = f"other requests hold {self.slots.used} bytes of {self.region.size} (from service.max_held_bytes)"
        return OverloadedError("memory", f"answering the request: {used}; send the request again later")
