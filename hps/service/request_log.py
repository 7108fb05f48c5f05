"""What is known and logged of each request: its id, the access line, slow lookups, and lookups that failed.

Lines are bounded a second, so that neither clients nor a broken tier fill a disk.
"""

import logging
import math
import re
import secrets
import time
from collections.abc import Mapping
from itertools import count
from typing import Any, Final

from starlette.types import Scope

from hps.configuration.load import ServiceConfig
from hps.errors import HPSError, NotReadyError
from hps.service.logs import escaped, fields
from hps.service.lookup_report import LookupReport, report_of
from hps.service.request_spans import RequestSpan, RequestSpans
from hps.tracing import LookupTrace

SERVED: Final = "hps.request"
"""The member of a request's scope that holds its `Served`."""

_access = logging.getLogger("hps.access")
_log = logging.getLogger(__name__)

_MOST_PROBLEM_LINES_PER_S = 5
_MOST_TEXT = 300  # characters of a client's
POLLED: Final = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics", "/v1/stats"})
"""Paths that are asked again and again by machines: their lines are of level debug."""
_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}").fullmatch
_TRACEPARENT = re.compile(  # https://www.w3.org/TR/trace-context/#traceparent-header
    rb"(?!ff|00-.{52}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
).fullmatch

made_id: Final = map((secrets.token_hex(8).encode() + b"%016x").__mod__, count(secrets.randbits(48))).__next__
"""Makes the id of a request whose client gave none: 32 hexadecimal digits, as of a trace; the first half is the process's."""


def request_id(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The id that a client gave its request: `X-Request-Id`, else the trace id of `traceparent`; None without a valid one."""
    given = headers.get(b"x-request-id")
    if given is not None and _GIVEN(given):
        return given
    parent = headers.get(b"traceparent")
    if parent is not None and (found := _TRACEPARENT(parent)):
        return found[1]
    return None


def _level_of(scope: Scope) -> int:
    return logging.DEBUG if scope["path"] in POLLED else logging.INFO


class Served:
    """What is known of one request. *Used by its event loop alone.*

    Attributes:
        id: of the request: printable ASCII, at most 64 characters.
        logged: whether it has an access line for sure.
        traced: whether its lookup is to be traced, whatever its client asks for.
        span: of OpenTelemetry; None where it has none.
        bytes_in, bytes_out: of the bodies.
        model, version: that it names, or that answered.
        keys: that were looked up; known where it is traced.
        lookup_ns: from the body to the vectors.
        trace: of its lookup, where that was traced.
        queue_ns, infer_ns: that its lookup waited for a thread, and took.
        error: the text of the error that it was answered with. Not the error itself: its traceback would keep the body.
        unsaid: whether nothing else says that its lookup failed.
    """

    bytes_in = bytes_out = lookup_ns = queue_ns = infer_ns = 0  # of the class, so that a request pays for what it sets
    logged = traced = unsaid = False
    span: RequestSpan | None = None
    model: str | None = None
    version: str | None = None
    keys: int | None = None
    trace: LookupTrace | None = None
    error: str | None = None

    id: bytes

    def failed(self, error: Exception) -> None:
        """Note what it is answered with."""
        self.error = str(error)
        # Of no lookup, or logged already as a bug, or said by the readiness.
        self.unsaid = self.model is not None and isinstance(error, HPSError) and not isinstance(error, NotReadyError)

    @property
    def report(self) -> LookupReport | None:
        """What the trace says; None where there is none."""
        return report_of(self.trace, self.queue_ns, self.infer_ns) if self.trace is not None else None


class LineRate:
    """Lets so many lines pass in each second. *One per event loop.*

    Attributes:
        per_s: how many.
        until: when the next second begins, by `time.perf_counter`.
    """

    def __init__(self, per_s: int) -> None:
        self.per_s = per_s
        self._second = self._passed = 0

    @property
    def until(self) -> float:
        return self._second + 1.0

    def take(self) -> bool:
        """Whether a line may be written now; it counts."""
        second = int(time.perf_counter())
        if second != self._second:
            self._second, self._passed = second, 0
        self._passed += 1
        return self._passed <= self.per_s


class RequestLog:
    """Logs requests. *One per event loop.*

    Args:
        settings: the limits, until `configure` changes them.
        spans: where each request gets a span; None where nobody collects them.

    Attributes:
        quiet_until: of requests that come before that, by `time.perf_counter`, nothing is said unless they fail: the lines of
            this second are used up.
        left_out: requests since the last access line that have none.
    """

    def __init__(self, settings: ServiceConfig, spans: RequestSpans | None) -> None:
        self._spans = spans
        self._lines, self._failed = LineRate(0), LineRate(0)
        self._slow, self._problems = LineRate(_MOST_PROBLEM_LINES_PER_S), LineRate(_MOST_PROBLEM_LINES_PER_S)
        self.left_out = self._slow_left_out = self._problems_left_out = 0
        self.configure(settings)

    def configure(self, settings: ServiceConfig) -> None:
        """Use these limits from now on."""
        self._lines.per_s = self._failed.per_s = settings.access_log_per_s
        self._slow_ms = settings.slow_lookup_ms
        self._slow_ns = settings.slow_lookup_ms * 1e6
        self._always = self._spans is not None or settings.slow_lookup_ms > 0
        self.quiet_until = 0.0 if self._always or settings.access_log_per_s else math.inf

    def begin(self, served: Served, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Decide what will be said of a request; to be called unless it is `quiet_until` later."""
        served.traced = self._slow_ns > 0
        if self._lines.per_s:
            if self._lines.take():
                if _access.isEnabledFor(_level_of(scope)):
                    served.logged = served.traced = True
            elif not self._always:
                self.quiet_until = self._lines.until
        if self._spans is not None and scope["path"] not in POLLED:
            served.span = span = self._spans.begin(scope, headers)
            served.traced |= span.sampled
            if request_id(headers) is None:
                served.id = span.trace_id

    def end(self, served: Served, scope: Scope, route: str, status: int, seconds: float) -> None:
        """Log a request that is answered; to be called where `begin` was, or where it failed."""
        if served.unsaid and status >= 500:
            self._say_failed(served, status)
        if served.span is not None and served.span.sampled:
            self._end_span(served.span, served, scope, route, status)
        if 0 < self._slow_ns < served.lookup_ns:
            self._say_slow(served)
        if served.logged or (status >= 400 and self._failed.take()):
            if _access.isEnabledFor(_level_of(scope)):
                self._say(served, scope, route, status, seconds)
        elif scope["path"] not in POLLED:
            self.left_out += 1

    def _say(self, served: Served, scope: Scope, route: str, status: int, seconds: float) -> None:
        left_out, self.left_out = self.left_out, 0
        client, report = scope.get("client"), served.report
        more: dict[str, Any] = fields(
            request_id=served.id.decode(),
            trace_id=served.span.trace_id.decode() if served.span is not None else None,
            method=scope["method"],
            route=route,
            path=None if route != "unknown" else scope["path"][:_MOST_TEXT],
            status=status,
            seconds=round(seconds, 6),
            bytes_in=served.bytes_in,
            bytes_out=served.bytes_out,
            model=(served.model or scope.get("path_params", {}).get("model") or "")[:_MOST_TEXT] or None,
            version=served.version and served.version[:_MOST_TEXT],
            keys=served.keys,
            hit_rate=report and report.hit_rate,
            client=client and client[0],
            error=served.error and served.error[:_MOST_TEXT],
            left_out=left_out or None,
        )
        if report is not None and _access.isEnabledFor(logging.DEBUG):
            more["fields"] |= report.flat()
        _access.log(_level_of(scope), "request", extra=more)

    def _end_span(self, span: RequestSpan, served: Served, scope: Scope, route: str, status: int) -> None:
        client, report = scope.get("client"), served.report
        attributes = {
            "http.request.method": scope["method"],
            "http.route": None if route == "unknown" else route,
            "url.path": escaped(scope["path"][:_MOST_TEXT]),
            "url.scheme": scope.get("scheme"),
            "http.response.status_code": status,
            "http.request.body.size": served.bytes_in,
            "http.response.body.size": served.bytes_out,
            "client.address": client and client[0],
            "hps.request_id": served.id.decode(),
            "hps.model": served.model and escaped(served.model[:_MOST_TEXT]),
            "hps.version": served.version and escaped(served.version[:_MOST_TEXT]),
            "hps.keys": served.keys,
            "hps.hit_rate": report and report.hit_rate,
        }
        span.end(f"{scope['method']} {route}", status, attributes, served.trace)

    def _say_slow(self, served: Served) -> None:
        if not self._slow.take():
            self._slow_left_out += 1
            return
        left_out, self._slow_left_out = self._slow_left_out, 0
        report = served.report
        more = fields(
            request_id=served.id.decode(),
            version=served.version,
            seconds=round(served.lookup_ns / 1e9, 6),
            keys=served.keys,
            tables=",".join(report.tables) if report else None,
            left_out=left_out or None,
        )
        if report is not None:
            more["fields"] |= report.flat()
        limit = f"{self._slow_ms:g} ms (service.slow_lookup_ms)"
        _log.warning("a lookup of model %s took longer than %s", served.model, limit, extra=more)

    def _say_failed(self, served: Served, status: int) -> None:
        if not self._problems.take():
            self._problems_left_out += 1
            return
        left_out, self._problems_left_out = self._problems_left_out, 0
        more = fields(request_id=served.id.decode(), status=status, left_out=left_out or None)
        _log.warning("a lookup of model %s failed: %s", served.model, served.error, extra=more)
