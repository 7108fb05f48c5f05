"""A front process: reads what clients ask, posts lookups to the owner, and sends its answers."""

import asyncio
import gc
import json
import logging
import os
import secrets
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import uvloop

from hps.configuration.load import Configuration, ServiceConfig
from hps.configuration.tokens import TokenConfig
from hps.errors import HPSError, NotReadyError, UnknownModelError, UnknownVersionError
from hps.ground.numba_kernels import compile_kernels
from hps.regions import layout
from hps.regions.board import FRONT_KERNELS
from hps.regions.exchange import arm, completions, post, store_word
from hps.regions.layout import ANSWERED, FAILED, RETIRED, RING, FrontDescriptors, Memory
from hps.service.authorization import CERTIFICATE, Authorization
from hps.service.fronts.connection import Beginning, Connection
from hps.service.fronts.connections import UNREAD_S, ClientConnection, Connections
from hps.service.fronts.heads import Head
from hps.service.fronts.lookups import FrontVersion, LaidOut, Placed, Plan, plan_of
from hps.service.fronts.proxy import OwnerConnections
from hps.service.fronts.shared_memory import MARK, Segments, SharedTensors, shared_tensors
from hps.service.fronts.sharing import body_bytes
from hps.service.fronts.slots import Slots
from hps.service.fronts.tls import TLS
from hps.service.held_memory import SMALL_BYTES, HeldMemory
from hps.service.http_answer import (
    JSON,
    HTTPAnswer,
    OverloadedError,
    RequestError,
    error_answer,
    release_frames,
)
from hps.service.http_metrics import HTTPMetrics, InferenceCounts, are_figures, counted_as
from hps.service.logs.lines import fields, use
from hps.service.logs.lookup_report import report_of
from hps.service.logs.requests import POLLED, RequestLog, Served, new_ids, request_id
from hps.service.logs.spans import spans_of
from hps.service.protocol.json_lookup import decode_lookup
from hps.service.protocol.json_size import SMALL_JSON_BYTES, parsed_bytes
from hps.service.protocol.open_inference import lay_out_body, parse_header_length
from hps.service.protocol.request_checks import ModelTables
from hps.service.protocol.schemas import LOOKUP
from hps.service.refusals import Refusals
from hps.service.request_body import MOST_OBJECT_BYTES, check_encoding, too_large
from hps.service.routes.rows import row_target
from hps.service.targets import LookupTarget, lookup_target
from hps.statistics.tracing import LookupTrace, Span, TableAnswers
from hps.types import TableSpec

_log = logging.getLogger(__name__)

_TICK_S: Final = 0.5
_FIGURES_S: Final = 0.2
_SLOT_WAIT_S: Final = 1.0
_RETIRED_PAUSE_S: Final = 0.005
_SPIN_NS: Final = 100_000
_STOP_S: Final = 10.0
_STOP_TICK_S: Final = 0.02
_PAGE_WORD: Final = layout.PAGE_VERSION // 8
BACKLOG: Final = 2048
MOST_PENDING: Final = RING // 2
"""Maximum number of lookups that the owner works on for one front."""


class RequestHead(Protocol):
    """What is known of a request before its body."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Mapping[bytes, bytes]: ...


class Requester(Protocol):
    """Who asked for a lookup. A front calls exactly one of the three that end it."""

    def slot_free(self) -> None:
        """There may be a slot now: call `Front.take_slot` again."""

    def hold(self, size: int, what: str) -> None:
        """Hold so many bytes for the lookup in the memory of the front, instead of what was held before.

        Raises:
            RequestError, OverloadedError: there is no memory for it.
        """

    def wait_with(self, body: bytes | bytearray) -> None:
        """The lookup starts again with this body, once there is a slot."""

    def answered(self, lookup: "Lookup", slot: int, deferred: int) -> None:
        """The lookup ends: the vectors of its plan are in this slot, which the requester has to release."""

    def encoded(
        self,
        lookup: "Lookup",
        slot: int,
        deferred: int,
        text: Sequence[bytes],
        binary: Sequence[memoryview],
        length: int | None,
    ) -> None:
        """The lookup ends: the answer is this text, of a `length` if `binary` data follows it, which is in this slot."""

    def refuse(self, error: Exception) -> None:
        """The lookup ends with an error."""


@dataclass(slots=True, eq=False)
class Lookup:
    """A lookup from its head to its answer. *One event loop.*

    Attributes:
        requester: None once it is gone.
        text: JSON part of a planned lookup.
        body, json_bytes: body of every other, and the length of its JSON part; None if all of it is JSON.
    """

    requester: Requester | None
    target: LookupTarget
    served: Served
    version: FrontVersion
    text: bytes
    plan: Plan | None = None
    placed: Placed | None = None
    body: bytes | bytearray = b""
    json_bytes: int | None = None
    traced: bool = False
    report: bool = False
    slot: int = -1
    device: int | None = None
    began_ns: int = 0
    posted_ns: int = 0
    due: float = 0.0
    slot_due: float = 0.0
    shared: SharedTensors | None = None


class Front:
    """One front process. *One event loop.*

    Args:
        number: which of the fronts it is.
        shared: what all fronts share with the owner; each has its share of the limits.
        configuration: has the settings of the service until the page has others.
        spins: whether to spin while lookups are under way, rather than sleep.
        loopback: whether only clients of this machine can connect.

    Attributes:
        leaving: whether the service is stopping, so that each answer tells its client to reconnect.
    """

    def __init__(
        self,
        number: int,
        shared: FrontDescriptors,
        configuration: Configuration,
        *,
        spins: bool,
        loopback: bool,
    ) -> None:
        self.number = number
        compile_kernels(*FRONT_KERNELS)
        self.region = region = Memory(shared.regions[number])
        self.page = Memory(shared.page, writable=False)
        self._event = shared.events[number]
        self._owner_event = shared.loop_events[number % len(shared.loop_events)]
        self._fronts = len(shared.regions)
        self._spins = spins
        self.leaving = False
        self.slots = Slots(region.size)
        self.refusals = Refusals()
        settings = configuration.service
        self.memory = HeldMemory(settings.max_held_bytes)
        self.connections = Connections(settings.max_connections)
        self.authorization = Authorization(settings, share=1 / self._fronts)
        self.authorization.loopback = loopback
        self.tls = TLS(settings, logging.DEBUG if number else None) if settings.tls_certificate_path else None
        self.grpc_tls: TLS | None = None
        self._tokens: list[dict[str, Any]] = []
        self.metrics = HTTPMetrics(self.refusals)
        self._spans = spans_of(configuration)
        self._requests = RequestLog(settings, self._spans)
        self._new_id = new_ids()
        self.owner = OwnerConnections(shared.path)
        self.segments = Segments()
        self._pending: dict[int, Lookup] = {}
        self._waiting: deque[tuple[Lookup, Requester]] = deque()
        self._counts: dict[str, InferenceCounts] = {}  # by `counted_as`
        self._models: dict[str, dict[str, FrontVersion]] = {}
        self._serving: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._blocked = "the service is starting"
        self._page_version = -1
        self._found = np.zeros(RING, np.int64)
        self._tail = 0
        self._epoch = 0
        self._connected = False
        self._spinning = False
        self._spun_ns = 0
        self._ticks: dict[str, asyncio.TimerHandle] = {}
        self.settings = settings
        self._configure(settings)
        found = layout.read_text(region, layout.FIGURES, layout.FIGURES_BYTES - layout.PAGE_TEXT)
        if found is not None and are_figures(found[1]):  # those of the front before it
            self.metrics.add(found[1]["http"])
            for name, values in found[1]["inference"].items():
                self._counts[name] = InferenceCounts(*values)
        region[layout.FIGURES] = region[layout.FIGURES] & ~1
        self._begin_epoch()

    def _configure(self, settings: ServiceConfig) -> None:
        before, self.settings = self.settings, settings
        how = "log_format", "log_level"  # only where it has changed: the command line stands above the configuration
        use(*(None if getattr(before, key) == getattr(settings, key) else getattr(settings, key) for key in how))
        self.authorization.configure(settings, [TokenConfig.model_validate(one) for one in self._tokens])
        self._requests.configure(settings)
        self.memory.limit_to(body_bytes(settings, self._fronts))
        self._max_keys = settings.max_keys_per_request
        self.connections.limit_to(-(-settings.max_connections // self._fronts))

    # -- the owner --------------------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        """Ask the owner for empty rings; what is under way is posted again once it has them."""
        region = self.region
        self._connected = False
        self._tail = 0
        self._epoch = 1 + secrets.randbits(62)  # the last one may be garbage, if that front was broken into
        store_word(region.address + layout.SUBMITTED, 0)
        store_word(region.address + layout.FRONT_EPOCH, self._epoch)
        self._wake_owner()

    def _wake_owner(self) -> None:
        os.eventfd_write(self._owner_event, 1)

    def _look_at_owner(self) -> None:
        """Follow an owner that has begun our epoch, or is another one."""
        epoch = self.region[layout.OWNER_EPOCH]
        if self._connected:
            if epoch != self._epoch:
                _log.warning(
                    "front %d: the owner of the tiers is gone; %d lookups wait for it", self.number, len(self._pending)
                )
                self._begin_epoch()
        elif epoch == self._epoch:
            self._connected = True
            for lookup in list(self._pending.values()):
                if lookup.requester is None:
                    del self._pending[lookup.slot]
                    self.release(lookup.slot)
                else:
                    self._submit(lookup)

    def read_page_if_changed(self) -> None:
        if self.page[layout.PAGE_VERSION] != self._page_version:
            self._read_page()

    def _read_page(self) -> None:
        found = layout.read_text(self.page, 0, layout.MOST_PAGE_BYTES)
        if found is None or found[0] == self._page_version:
            return
        self._page_version, page = found
        self._serving, self._reasons, self._blocked = page["serving"], page["reasons"], page["blocked"]
        settings = ServiceConfig.model_validate(page["settings"])
        if settings != self.settings or page["tokens"] != self._tokens:
            self._tokens = page["tokens"]
            self._configure(settings)
        self.segments.follow(page["shared_memory"])
        models: dict[str, dict[str, FrontVersion]] = {}
        for name, versions in page["models"].items():
            models[name] = {}
            for number, one in versions.items():
                serials = {int(device): serial for device, serial in one["serials"]}
                before = self._models.get(name, {}).get(number)
                if before is not None and before.serials == serials:
                    models[name][number] = before
                    continue
                tables = tuple(TableSpec(**table) for table in one["tables"])
                counts = self._counts.setdefault(counted_as(name, number, serials), InferenceCounts())
                models[name][number] = FrontVersion(ModelTables(name, tables, number, one["keys_per_sample"]), serials, counts)
        self._models = models
        if not self._blocked:  # a new owner begins without models
            self._counts = {
                key: one.counts
                for name, versions in models.items()
                for number, one in versions.items()
                if (key := counted_as(name, number, one.serials)) in self._counts
            }

    def _version(self, target: LookupTarget) -> FrontVersion:
        """Return what answers a lookup.

        Raises:
            NotReadyError, UnknownModelError, UnknownVersionError: nothing does.
        """
        if self._blocked:
            raise NotReadyError(f"the parameter server is not ready: {self._blocked}")
        name, number = target.model_name, target.version
        versions = self._models.get(name)
        if versions is None or name not in self._serving:
            if reason := self._reasons.get(name):
                raise NotReadyError(f"model {name!r} is not ready: {reason}")
            known = ", ".join(self._serving) or "none"
            raise UnknownModelError(f"looking up model {name!r}: it is not deployed; deployed: {known}")
        if number is None:
            number = self._serving[name]
        if (found := versions.get(number)) is None:
            known = ", ".join(versions)
            raise UnknownVersionError(f"looking up model {name!r}: got version {number[:40]!r}, deployed: {known}")
        return found

    # -- requests ---------------------------------------------------------------------------------------------------------

    def served(self) -> Served:
        served = Served()
        served.id = self._new_id()
        return served

    def begin(self, client: str, head: RequestHead, target: LookupTarget | None, served: Served, started: float) -> bool:
        """Note a request's id, and decide what to log of it; return whether `end` has to be told."""
        headers = head.headers
        if (b"x-request-id" in headers or b"traceparent" in headers) and (named := request_id(headers)):
            served.id = named
        if target is None:
            return False
        served.model, served.version = target.model_name, target.version
        if watched := started >= self._requests.quiet_until:
            self._requests.begin(served, self._scope(head, client), headers)
        return watched

    def check(self, head: Head, served: Served, client: str, server: Any, certificate: Sequence[str]) -> None:
        """Refuse a request by its head, or the names in its client's certificate, alone.

        Args:
            server: the address that the client has connected to.

        Raises:
            RequestError, HPSError: it is refused.
        """
        self.read_page_if_changed()
        target = lookup_target(head.path)
        if head.length > (most := self.most_bytes(head)):
            raise too_large(f"Content-Length is {head.length}", most)
        if b"content-encoding" in head.headers:
            check_encoding(head.headers)
        if self.authorization.asks or certificate:
            self.authorize(head.headers, certificate, served, target)
        if target is None:
            if not 0 <= head.length <= SMALL_BYTES:  # the owner checks rights, but no memory is held for strangers before
                scope = {**self._scope(head, client), "server": server, CERTIFICATE: certificate}
                self.authorization.check(scope, head.headers, served.identity)
            return
        if head.method != "POST":
            got = f"got {head.method} {head.path[:300]}"
            raise RequestError(405, f"{got}, expected POST", (b"allow", b"POST"))
        self._version(target)

    def authorize(
        self, headers: Mapping[bytes, bytes], certificate: Sequence[str], served: Served, target: LookupTarget | None
    ) -> None:
        """Note who sent a request, check the rights of a lookup, and the limits of every request.

        Raises:
            RequestError: it is refused.
            NotReadyError: the owner has not said yet which tokens there are.
        """
        identity = served.identity = self.authorization.find(headers, certificate)
        if target is None:
            self.authorization.count(identity)  # its rights are checked by the owner
            return
        if self._page_version < 0:
            raise NotReadyError(f"the parameter server is not ready: {self._blocked}")
        self.authorization.admit(identity, "lookup", headers, certificate)

    def page_if_same(self, headers: Mapping[bytes, bytes]) -> int:
        """Return the version of the page if all that follows from headers follows from the same ones again; else -1."""
        same = not (self.authorization.asks or b"x-request-id" in headers or b"traceparent" in headers)
        return self._page_version if same else -1

    def holds(self, last: Beginning, started: float) -> bool:
        """Whether a request that begins like another one may be begun `again`."""
        page = self._page_version
        return last.page == page and self.page.longs[_PAGE_WORD] == page and started < self._requests.quiet_until

    def again(self, requester: Requester, last: Beginning, served: Served) -> Lookup:
        """Begin a planned lookup like another one."""
        began, plan = time.perf_counter_ns(), last.plan
        return Lookup(requester, last.target, served, last.version, last.text, plan, device=plan.device, began_ns=began)

    def most_bytes(self, head: Head) -> int:
        """Return the limit of a request's body, as sent and decompressed."""
        most = self.settings.max_body_bytes
        known = lookup_target(head.path) is not None or row_target(head.path) is not None
        return most if known else min(most, MOST_OBJECT_BYTES)

    def text_bytes(self, head: Head) -> int:
        """Return the length of the JSON part of a binary lookup; -1 for every other request.

        Raises:
            InvalidInputError: it is no length.
        """
        target = lookup_target(head.path)
        if target is None or target.route == LOOKUP or b"content-encoding" in head.headers:
            return -1
        size = parse_header_length(head.headers.get(b"inference-header-content-length"), head.length)
        return size if size is not None and size < SMALL_JSON_BYTES else -1

    def planned(self, requester: Requester, target: LookupTarget, served: Served, text: bytes, size: int) -> Lookup | None:
        """Begin a binary lookup whose JSON part has arrived; None if the rest of its body has to be read first.

        Args:
            size: of the body.
        """
        if served.traced or (self.settings.shared_memory_bytes and MARK in text):
            return None
        version = self._version(target)
        began = time.perf_counter_ns()
        plan = plan_of(text, version.tables, self._max_keys)
        if plan is None:
            return None
        if size != len(text) + plan.keys_bytes:
            return None  # the generic path says what is wrong with it
        lookup = Lookup(requester, target, served, version, text, plan, device=plan.device, began_ns=began)
        served.version = version.tables.version
        self.authorization.take_keys(served.identity, plan.keys_bytes // 8)
        return lookup

    def decoded(
        self,
        requester: Requester,
        target: LookupTarget,
        served: Served,
        body: bytes | bytearray,
        length: bytes | None,
        shared: SharedTensors | None = None,
    ) -> Lookup:
        """Decode a lookup whose body has arrived.

        Args:
            length: of its JSON part, as written; None if all of it is JSON.
            shared: its tensors in shared memory.

        Raises:
            HPSError: it is refused.
        """
        version = self._version(target)
        lookup = Lookup(requester, target, served, version, b"", body=body, began_ns=time.perf_counter_ns())
        if shared is not None:
            lookup.shared, lookup.text, lookup.json_bytes = shared, shared.text, len(shared.text)
            lookup.plan = None if served.traced else plan_of(shared.text, version.tables, self._max_keys)
            if lookup.plan is not None:
                served.version, lookup.device = version.tables.version, lookup.plan.device
                self.authorization.take_keys(served.identity, lookup.plan.keys_bytes // 8)
                return lookup
            if shared.size_bytes > (most := self.settings.max_body_bytes):
                raise too_large(f"its tensors in shared memory have {shared.size_bytes} bytes", most)
            requester.hold(len(body) + shared.size_bytes, "reading the request")
            lookup.body = self.segments.body_of(shared)
        elif target.route != LOOKUP:
            try:
                lookup.json_bytes = parse_header_length(length, len(body))
            except HPSError:
                version.counts.failed(lookup.began_ns)
                raise
        self._decode(lookup)
        self.authorization.take_keys(served.identity, lookup.placed.keys if lookup.placed is not None else 0)
        return lookup

    def shared_tensors(
        self, target: LookupTarget, body: bytes | bytearray, length: bytes | None, client: str, headers: Mapping[bytes, bytes]
    ) -> SharedTensors | None:
        """Find the tensors in shared memory of a request; None if there are none, or if it is off."""
        if not self.settings.shared_memory_bytes or target.route == LOOKUP:
            return None
        return shared_tensors(body, parse_header_length(length, len(body)), client, headers)

    def _decode(self, lookup: Lookup) -> None:
        version, body, header = lookup.version, lookup.body, lookup.json_bytes
        request: Any
        try:
            if (len(body) if header is None else header) > SMALL_JSON_BYTES and lookup.requester is not None:
                size = len(body) + parsed_bytes(memoryview(body)[:header], self._max_keys)
                lookup.requester.hold(size, "parsing the request")
            if lookup.target.route == LOOKUP:
                request = decode_lookup(body, version.tables, self._max_keys)
            else:
                request = LaidOut(lay_out_body(body, header, version.tables, self._max_keys))
        except HPSError:
            version.counts.failed(lookup.began_ns)
            raise
        lookup.served.version = version.tables.version
        lookup.report = request.wants_report
        lookup.traced = lookup.served.traced or request.wants_report
        lookup.device = request.device_id
        lookup.placed = Placed(request, lookup.traced)
        if lookup.requester is not None:
            lookup.requester.hold(len(body) + request.held_bytes, "answering the request")

    def take_slot(self, lookup: Lookup) -> bool:
        """Take a slot; False if there is none now: the requester is told when to try again.

        Raises:
            RequestError: 413, no slot is as large.
            NotReadyError: the slab is not this front's: an owner may still write answers of the front before it.
        """
        if not self._connected:
            self._expect_owner()
        plan, placed = lookup.plan, lookup.placed
        size = plan.end if plan is not None else placed.size  # type: ignore[union-attr]
        if size > self.slots.largest:
            limit = f"expected at most {self.slots.largest} (from service.max_held_bytes)"
            raise RequestError(413, f"answering the request: it takes {size} bytes of memory, {limit}; send fewer keys at once")
        requester = lookup.requester
        slot = -1 if len(self._pending) >= MOST_PENDING else self.slots.take(size)
        if slot < 0:
            if requester is not None:
                lookup.slot_due = lookup.slot_due or time.monotonic() + _SLOT_WAIT_S
                self._waiting.append((lookup, requester))
            return False
        lookup.slot, lookup.slot_due = slot, 0.0
        return True

    def _expect_owner(self) -> None:
        self._look_at_owner()
        if not self._connected:
            raise NotReadyError("the parameter server is being started again; send the request again later")

    def keys_of(self, lookup: Lookup) -> memoryview:
        """Return where the keys of a planned lookup go."""
        plan, slot = lookup.plan, lookup.slot
        start = slot + plan.keys_at  # type: ignore[union-attr]
        return self.region.view[start : start + plan.keys_bytes]  # type: ignore[union-attr]

    def post(self, lookup: Lookup) -> None:
        """Submit a lookup whose slot has its keys, or gets them here.

        Raises:
            HPSError: it is refused.
        """
        if not self._connected:
            self._expect_owner()
        plan, placed, slot = lookup.plan, lookup.placed, lookup.slot
        lookup.device = lookup.version.device(lookup.device)
        serial = lookup.version.serials[lookup.device]
        if plan is not None:
            descriptor = plan.descriptor
            self.region.view[slot : slot + len(descriptor)] = descriptor
            self.region.longs[slot >> 3] = serial
            if lookup.shared is not None:
                self.segments.read(lookup.shared, self.keys_of(lookup))
        elif placed is not None:
            placed.write(self.region, slot, serial)
        now = time.perf_counter_ns()
        lookup.posted_ns = now
        lookup.due = lookup.due or now * 1e-9 + self.settings.request_timeout_s
        self._pending[slot] = lookup
        self._submit(lookup)

    def _submit(self, lookup: Lookup) -> None:
        if post(self.region.address, lookup.slot):  # the owner sleeps, and nobody else wakes it
            if self._spins or len(self._pending) == 1:
                self._wake_owner()
            else:
                self.loop.call_soon(self._wake_owner)  # for all that this turn of the event loop posts
        if self._spins:
            self._spun_ns = time.perf_counter_ns()
            if not self._spinning:
                self._spinning = True
                self.loop.call_soon(self._spin)

    def _spin(self) -> None:
        self._drain()
        if self._pending and time.perf_counter_ns() - self._spun_ns < _SPIN_NS:
            self.loop.call_soon(self._spin)
        else:
            self._spinning = False
            self._arm()

    def _woken(self) -> None:
        os.eventfd_read(self._event)
        self._look_at_owner()
        self._drain()
        if not self._spinning:
            self._arm()

    def _arm(self) -> None:
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
        for slot in slots:
            lookup = self._pending.pop(slot, None)
            if lookup is None:
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
            lookup.version.counts.succeeded(lookup.began_ns, lookup.posted_ns, began, ended, resumed)
            if lookup.plan is None or lookup.shared is not None:
                self._answer_placed(lookup, requester, began, ended, resumed)
                return
            deferred = longs[at + layout.DEFERRED // 8]
            lookup.slot = -1
            requester.answered(lookup, slot, deferred)
            return
        if status == RETIRED:
            self._again(lookup)
            return
        if status == FAILED:
            raise self._failure(lookup)
        raise HPSError(f"the owner refused a descriptor (status {status})")

    def _aside(self, lookup: Lookup) -> Any:
        """Read what the owner has written aside."""
        at, words = lookup.slot >> 3, self.region.words
        start, size = int(words[at + layout.ASIDE // 8]), int(words[at + layout.ASIDE_USED // 8])
        if not 0 < size <= self.region.size:
            return None
        return json.loads(bytes(self.region.view[lookup.slot + start : lookup.slot + start + size]))

    def _failure(self, lookup: Lookup) -> Exception:
        found = self._aside(lookup) or {}
        lookup.version.counts.failed(lookup.began_ns)
        message, status = (
            found.get("message", "internal error; the log of the service has the details"),
            found.get("status", 500),
        )
        if status == 500:  # a bug
            identity = lookup.served.id.decode()
            _log.error("a lookup failed unexpectedly; the owner has logged why", extra=fields(request_id=identity))
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
        if placed is not None and lookup.traced and (found := self._aside(lookup)) is not None:
            trace = LookupTrace()
            trace.tables.update({name: TableAnswers(**counts) for name, counts in found["tables"].items()})
            trace.spans += [Span(*span) for span in found["spans"]]
            served.trace, served.lookup_ns, served.keys = trace, resumed - lookup.began_ns, placed.keys
            served.queue_ns, served.infer_ns = began - lookup.posted_ns, ended - began
            if lookup.report:
                report = report_of(trace, served.queue_ns, served.infer_ns)
        text: Sequence[bytes] = ()
        binary: Sequence[memoryview] = ()
        length: int | None = None
        if placed is not None:
            pieces, binary, length = placed.encode(report, lookup.device or 0)
            text = [*pieces]
        elif (plan := lookup.plan) is not None:
            view = self.region.view[lookup.slot + plan.vectors_at : lookup.slot + plan.end]
            text, binary, length = (plan.text,), (view,), len(plan.text)
        if lookup.shared is not None and length is not None:
            text, binary, length = self.segments.answer(lookup.shared, text, binary, length)
        lookup.version.counts.output_ns += time.perf_counter_ns() - resumed
        slot, lookup.slot = lookup.slot, -1
        requester.encoded(lookup, slot, deferred, text, binary, length)

    def _again(self, lookup: Lookup) -> None:
        """Look up again what a retired deployment did not answer: another version may have taken over."""
        before, slot = lookup.version, lookup.slot
        body, json_bytes = lookup.body, lookup.json_bytes
        if lookup.plan is not None:
            body, json_bytes = lookup.text + bytes(self.keys_of(lookup)), len(lookup.text)
        lookup.slot = -1
        self.release(slot)
        lookup.plan, lookup.body, lookup.json_bytes = None, body, json_bytes
        self._read_page()
        version = self._version(lookup.target)
        if version is before and time.perf_counter() < lookup.due:
            self.loop.call_later(_RETIRED_PAUSE_S, self._retry, lookup)
            return
        if version is before:
            raise NotReadyError(f"model {lookup.target.model_name!r} is not ready: it was undeployed")
        self._retry(lookup)

    def _retry(self, lookup: Lookup) -> None:
        requester = lookup.requester
        if requester is None:
            return
        try:
            lookup.version = self._version(lookup.target)
            self._decode(lookup)
            if self.take_slot(lookup):
                self.post(lookup)
            else:
                requester.wait_with(lookup.body)
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            requester.refuse(error)

    def disown(self, lookup: Lookup) -> None:
        """Forget the requester of a lookup. The slot of one that was posted is the owner's until it is completed."""
        lookup.requester = None
        if lookup.slot >= 0 and self._pending.get(lookup.slot) is not lookup:
            self.release(lookup.slot)
            lookup.slot = -1

    def release(self, slot: int) -> None:
        """Take a slot back that neither the owner nor a client uses."""
        self.slots.give_back(slot)
        if self._waiting:
            self.loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        """Let the first that waits for a slot try again."""
        while self._waiting:
            lookup, requester = self._waiting.popleft()
            if lookup.requester is not requester:
                continue
            requester.slot_free()
            if self._waiting and self._waiting[-1][0] is lookup:  # still no room: first come, first served
                self._waiting.rotate(1)
            return

    def _no_slot(self) -> OverloadedError:
        if (pending := len(self._pending)) >= MOST_PENDING:
            limit = f"expected at most {MOST_PENDING}; send the request again later"
            return OverloadedError("threads", f"{pending} lookups are under way, {limit}")
        used = f"other requests hold {self.slots.used} bytes of {self.region.size} (from service.max_held_bytes)"
        return OverloadedError("memory", f"answering the request: {used}; send the request again later")

    # -- answers ----------------------------------------------------------------------------------------------------------

    def without_owner(self, head: Head | None) -> HTTPAnswer:
        """Answer a request that the owner's application did not take.

        Raises:
            NotReadyError: the request needs it.
        """
        if head is not None and head.path == "/v2/health/live" and head.method in ("GET", "HEAD"):
            return HTTPAnswer(200, [JSON], (b'{"live":true}',))
        raise NotReadyError("the parameter server is being started again; send the request again later")

    def error_answer(self, error: Exception, client: str, head: Head | None, served: Served) -> HTTPAnswer:
        self.note_error(error, client, head, served)
        answer = error_answer(error, served.id.decode())
        release_frames(error)
        return answer

    def note_error(self, error: Exception, client: str, head: RequestHead | None, served: Served) -> None:
        """Count and log an error with which a request ends."""
        served.failed(error)
        identity = served.id.decode()
        line = f"{head.method} {head.path[:300]}" if head is not None else "a request"
        if isinstance(error, OverloadedError):
            self.refusals.refuse(error.reason, error, identity)
        elif isinstance(error, RequestError) and error.status in (401, 403):
            self.refusals.deny(error.status, client or "an unknown address", f"{line}: {error}", identity)
        if not isinstance(error, HPSError | MemoryError):
            _log.error("serving %s failed unexpectedly", line, exc_info=error, extra=fields(request_id=identity))

    def end(
        self, client: str, head: RequestHead | None, route: str, served: Served, status: int, started: float, *, watched: bool
    ) -> None:
        """Count and log a request that has ended."""
        seconds = time.perf_counter() - started
        who = "" if served.identity is None else self.authorization.counted(served.identity)
        self.metrics.count(route, status, seconds, who)
        if head is not None and (watched or served.error is not None):
            self._requests.end(served, self._scope(head, client), route, status, seconds)
        elif head is None or head.path not in POLLED:
            self._requests.left_out += 1

    def _scope(self, head: RequestHead, client: str) -> MutableMapping[str, Any]:
        return {
            "type": "http",
            "method": head.method,
            "path": head.path,
            "client": (client, 0) if client else None,
            "scheme": "http" if self.tls is None else "https",
        }

    # -- connections ------------------------------------------------------------------------------------------------------

    def opened(self, connection: ClientConnection) -> None:
        connections = self.connections
        if len(connections.order) >= connections.most:
            limit = connections.full()
            least_missed = connections.least_missed()
            if least_missed is None:
                self.refusals.refuse("connections", limit)
                connection.refuse_connection()
                return
            least_missed.close()
        connections.order[connection] = None

    def closed(self, connection: ClientConnection) -> None:
        self.connections.order.pop(connection, None)

    def _look(self) -> None:
        """Do what is due twice a second."""
        now = time.monotonic()
        settings = self.settings
        self.read_page_if_changed()
        self._look_at_owner()
        for tls in (self.tls, self.grpc_tls):
            if tls is not None:
                tls.look()
        for one in list(self.connections.order):
            one.look(now, settings.request_timeout_s, settings.answer_timeout_s, settings.keep_alive_s)
        if self.slots.crowded:
            for one in list(self.connections.order):
                one.end_unread(now - UNREAD_S)
        self.connections.look()
        clock = time.perf_counter()
        for lookup in [one for one in self._pending.values() if one.due < clock and one.requester is not None]:
            requester, limit = lookup.requester, settings.request_timeout_s
            if requester is not None:
                lookup.version.counts.failed(lookup.began_ns)
                requester.refuse(RequestError(504, f"the lookup did not end within {limit:g} s (service.request_timeout_s)"))
        while self._waiting and self._waiting[0][0].slot_due < now:
            lookup, requester = self._waiting.popleft()
            if lookup.requester is requester:
                requester.refuse(self._no_slot())
        self._ticks["look"] = self.loop.call_later(_TICK_S, self._look)

    # -- figures ----------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return what this front, and those before it in its place, have counted."""
        inference = {
            name: [counts.successes, counts.failures, counts.input_ns, counts.queue_ns, counts.infer_ns,
                                   counts.output_ns, counts.failure_ns, counts.last_ns]
            for name, counts in self._counts.items() if counts.last_ns
        }  # fmt: skip
        return {
            "http": self.metrics.figures(),
            "inference": inference,
            "cpu_ns": time.process_time_ns(),
            "connections": len(self.connections.order),
            "pending": len(self._pending),
            "held_bytes": self.memory.held + self.slots.used,
        }

    def publish(self) -> None:
        """Publish the figures."""
        layout.write_text(self.region, layout.FIGURES, self.figures(), layout.FIGURES_BYTES - layout.PAGE_TEXT)

    def _publish_often(self) -> None:
        self.publish()
        self._ticks["publish"] = self.loop.call_later(_FIGURES_S, self._publish_often)

    # -- life -------------------------------------------------------------------------------------------------------------

    def run(self, listener: socket.socket, grpc_listener: socket.socket | None = None) -> None:
        """Serve until SIGTERM. Blocks."""
        uvloop.run(self._run(listener, grpc_listener))

    async def _run(self, listener: socket.socket, grpc_listener: socket.socket | None) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGUSR1, self.leave)
        for number in (signal.SIGINT, signal.SIGHUP):  # the parent says what they mean
            loop.add_signal_handler(number, lambda: None)
        await self.start(listener, grpc_listener)
        gc.collect()
        gc.freeze()
        await stopping.wait()
        await self.stop(_STOP_S)
        self.close()

    async def start(self, listener: socket.socket, grpc_listener: socket.socket | None = None) -> None:
        """Begin to serve HTTP, and gRPC if it has a listener, on this event loop."""
        loop = self.loop = asyncio.get_running_loop()
        loop.add_reader(self._event, self._woken)
        self._arm()
        self._read_page()
        self._servers = [(listener, await loop.create_server(lambda: Connection(self), sock=listener, backlog=BACKLOG))]
        if grpc_listener is not None:
            from hps.service.fronts.grpc_calls import grpc_connection  # of an extra

            if self.tls is not None:
                self.grpc_tls = TLS(self.settings, logging.DEBUG, "h2")
            server = await loop.create_server(lambda: grpc_connection(self), sock=grpc_listener, backlog=BACKLOG)
            self._servers.append((grpc_listener, server))
        self._look()
        self._publish_often()

    def leave(self) -> None:
        """Let every connection close after its next answer."""
        self.leaving = True

    async def stop(self, timeout_s: float) -> None:
        """Stop listening once the queues of the listeners are empty, since closing resets unaccepted connections; then wait
        until the requests that are under way have their answers.
        """
        self.leave()
        queued = select.poll()
        for listener, _ in self._servers:
            queued.register(listener, select.POLLIN)
        turns = 0
        while queued.poll(0) and turns < BACKLOG:
            turns += 1
            await asyncio.sleep(0)  # each turn of the event loop accepts at least one connection
        for _, server in self._servers:
            server.close()
        since = time.monotonic()
        while self.connections.order and time.monotonic() - since < timeout_s:
            for connection in list(self.connections.order):
                connection.close_if_quiet()
            await asyncio.sleep(_STOP_TICK_S)

    def close(self) -> None:
        """End what is left, and publish the last figures."""
        for left in list(self.connections.order):
            left.transport.abort()
        for tick in self._ticks.values():
            tick.cancel()
        self.loop.remove_reader(self._event)
        self.owner.close()
        self.publish()
        if self._spans is not None:
            self._spans.close()
