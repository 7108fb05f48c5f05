"""Request ids, and the log lines of requests: access, slow lookups, failed lookups.

Lines per second are bounded, so that neither clients nor a failing tier fill the disk.
"""

import logging
import math
import re
import secrets
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

from starlette.types import Scope

from hps.configuration.load import ServiceConfig
from hps.errors import HPSError, NotReadyError
from hps.ground.log_limits import LineLimit
from hps.serve.logs.lines import escaped, fields
from hps.serve.logs.lookup_report import LookupBreakdown, report_of
from hps.serve.logs.spans import RequestSpan, RequestSpans
from hps.statistics.tracing import LookupTrace

SERVED: Final = "hps.request"
"""Member of a request's scope that holds its `Served`."""

_access = logging.getLogger("hps.access")
_log = logging.getLogger(__name__)

_MOST_PROBLEM_LINES_PER_S = 5
_MOST_TEXT = 300  # maximum characters of a client's id
POLLED: Final = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics", "/v1/stats", "/v1/history"})
"""Paths that machines poll: logged at level debug."""
_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}").fullmatch
_TRACEPARENT = re.compile(  # https://www.w3.org/TR/trace-context/#traceparent-header
    rb"(?!ff|00-.{52}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
).fullmatch


def new_ids() -> Callable[[], bytes]:
    """Return a function that makes request ids: 32 hexadecimal digits, like a trace id, of which the first half is constant."""
    return map((secrets.token_hex(8).encode() + b"%016x").__mod__, count(secrets.randbits(48))).__next__


def request_id(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the client's request id: `X-Request-Id`, else the trace id of `traceparent`; None if neither is valid."""
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
    """State of one request. *Used only by its event loop.*"""

    # Defaults are on the class, so that a request pays only for the attributes that it sets.
    id: bytes  # printable ASCII, at most 64 characters
    identity: Any = None  # the client's token or certificate, which has a `name`
    who = ""  # client that requests a change, and its authorization
    model: str | None = None
    version: str | None = None  # as requested, then as answered
    bytes_in = bytes_out = 0  # sizes of the bodies
    error: str | None = None  # text of the error in the answer
    unready = False  # the service, or its model, was not ready
    outlived = False  # it has started a change that continues without it and logs its own line
    logged = False  # it is chosen for an access line
    unlogged = False  # its failed lookup is not logged elsewhere
    headers: Mapping[bytes, bytes] | None = None  # of a lookup: a canary may select by one
    falls_back = 0  # status of the new version's error, after which the serving version answers
    span: RequestSpan | None = None
    traced = False  # its lookup is to be traced, also if the client does not request it
    trace: LookupTrace | None = None
    keys: int | None = None  # their number, if traced
    lookup_ns = 0  # from the body to the vectors
    queue_ns = infer_ns = 0  # wait for a thread, and duration of the lookup

    def failed(self, error: Exception) -> None:
        self.error = str(error)  # the error itself would keep the body alive by its traceback
        self.unready = isinstance(error, NotReadyError)
        # Bugs are logged elsewhere, with their traceback.
        self.unlogged = self.model is not None and isinstance(error, HPSError) and not self.unready

    @property
    def report(self) -> LookupBreakdown | None:
        return report_of(self.trace, self.queue_ns, self.infer_ns) if self.trace is not None else None


class RequestLog:
    """Logs requests. *One per event loop.*

    Args:
        settings: the limits, until `configure` changes them.
        spans: makes a span for each request; None without OpenTelemetry.

    Attributes:
        quiet_until: time of `time.perf_counter` until which only failures are logged, since this second's lines are used up.
        left_out: number of requests without an access line since the last line.
    """

    def __init__(self, settings: ServiceConfig, spans: RequestSpans | None) -> None:
        self._spans = spans
        self._lines, self._failed = LineLimit(0, 1.0), LineLimit(0, 1.0)
        self._unready = LineLimit(1, 1.0)  # while a service starts, every request gets the same answer
        self._slow, self._problems = LineLimit(_MOST_PROBLEM_LINES_PER_S, 1.0), LineLimit(_MOST_PROBLEM_LINES_PER_S, 1.0)
        self.left_out = 0
        self.configure(settings)

    def configure(self, settings: ServiceConfig) -> None:
        self._lines.lines = self._failed.lines = settings.access_log_per_s
        self._unready.lines = min(1, settings.access_log_per_s)
        self._slow_ms = settings.slow_lookup_ms
        self._slow_ns = settings.slow_lookup_ms * 1e6
        self._always = self._spans is not None or settings.slow_lookup_ms > 0
        self.quiet_until = 0.0 if self._always or settings.access_log_per_s else math.inf

    def start(self, served: Served, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Decide what to log of a request. Not called before `quiet_until`."""
        served.traced = self._slow_ns > 0
        if self._lines.lines:
            if self._lines.take():
                if _access.isEnabledFor(_level_of(scope)):
                    served.logged = served.traced = True
            elif not self._always:
                # Until then callers skip `start` and `finish`: one comparison is all that logging costs a request.
                self.quiet_until = self._lines.until
        if self._spans is not None and scope["path"] not in POLLED:
            served.span = span = self._spans.start(scope, headers)
            served.traced |= span.sampled
            if request_id(headers) is None:
                served.id = span.trace_id

    def finish(self, served: Served, scope: Scope, route: str, status: int, seconds: float) -> None:
        """Log an answered request. Called if `start` was called or the request failed."""
        if served.unlogged and status >= 500:
            self._log_failed(served, status)
        if served.span is not None and served.span.sampled:
            self._end_span(served.span, served, scope, route, status)
        if 0 < self._slow_ns < served.lookup_ns:
            self._log_slow(served)
        if served.unready and scope["path"] not in POLLED:
            logged = self._unready.take()
        else:
            logged = served.logged or (status >= 400 and self._failed.take())
        if logged:
            if _access.isEnabledFor(_level_of(scope)):
                self._log_access(served, scope, route, status, seconds)
        elif scope["path"] not in POLLED:
            self.left_out += 1

    def _log_access(self, served: Served, scope: Scope, route: str, status: int, seconds: float) -> None:
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
            who=served.identity and served.identity.name,
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

    def _log_slow(self, served: Served) -> None:
        if not self._slow.take():
            return
        report = served.report
        more = fields(
            request_id=served.id.decode(),
            version=served.version,
            seconds=round(served.lookup_ns / 1e9, 6),
            keys=served.keys,
            tables=",".join(report.tables) if report else None,
            left_out=self._slow.left_out or None,
        )
        if report is not None:
            more["fields"] |= report.flat()
        limit = f"{self._slow_ms:g} ms (service.slow_lookup_ms)"
        _log.warning("a lookup of model %s took longer than %s", served.model, limit, extra=more)

    def _log_failed(self, served: Served, status: int) -> None:
        if not self._problems.take():
            return
        more = fields(request_id=served.id.decode(), status=status, left_out=self._problems.left_out or None)
        _log.warning("a lookup of model %s failed: %s", served.model, served.error, extra=more)
