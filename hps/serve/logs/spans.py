"""OpenTelemetry spans: one per request, with a child per stage of its lookup.

The packages of the extra `otel` are imported only if an endpoint is configured. Spans wait in a bounded queue for a thread of
the SDK and are dropped when it is full, so that serving is not slowed down.
Attributes follow https://opentelemetry.io/docs/specs/semconv/http/http-spans/ and .../db/database-spans/ where these apply.
"""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Scope

from hps.configuration.load import Configuration
from hps.ground.registry import install_hint
from hps.ground.threads.workers import new_thread
from hps.ground.version import __version__
from hps.statistics.tracing import LookupTrace

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)
_SYSTEMS: Final = {"redis_cluster": "redis", "rocks_db": "rocksdb"}
_PATH: Final = "/v1/traces"
_CLOSE_S: Final = 2.0


class RequestSpan:
    """The span of one request. *Used only by its event loop.*"""

    __slots__ = ("_clock_ns", "_span", "_spans", "sampled", "trace_id")

    def __init__(self, span: "Span", spans: "RequestSpans") -> None:
        self._span = span
        self._spans = spans
        # Stages are timed by the monotonic clock, spans by the wall clock. The difference is taken once per request, so that a
        # step of the wall clock cannot tear the stages of a request apart.
        self._clock_ns = time.time_ns() - time.perf_counter_ns()
        self.sampled = span.is_recording()  # whether it is exported
        self.trace_id = b"%032x" % span.get_span_context().trace_id  # 32 hexadecimal digits

    def end(self, name: str, status: int, attributes: Mapping[str, Any], trace: LookupTrace | None) -> None:
        """End the span with an HTTP status, and add the spans of the stages. Attributes that are None are left out."""
        self._span.update_name(name)
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(self._spans.error)
        if trace is not None:
            self._spans.add_stages(self._span, trace, self._clock_ns)
        self._span.end()


class RequestSpans:
    """Makes the spans of requests, and exports them by OTLP over HTTP. *One per event loop*; any thread may call `close`.

    OpenTelemetry's SDK reads the environment variables `OTEL_*`: service name, further attributes, sampler, headers and
    certificates of the endpoint, queue size.

    Args:
        configuration: has `service.otlp_endpoint`, and names the databases.

    Attributes:
        disabled: whether the environment disables it (`OTEL_SDK_DISABLED`).
        error: status of the span of a failed request.

    Raises:
        ImportError: the extra `otel` is not installed.
    """

    def __init__(self, configuration: Configuration) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import NoOpTracer, SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        base = configuration.service.otlp_endpoint.rstrip("/")
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "hps"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(base if base.endswith(_PATH) else base + _PATH)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("hps", __version__)
        self.disabled = isinstance(self._tracer, NoOpTracer)
        self._kinds, self._within, self._extract = SpanKind, set_span_in_context, TraceContextTextMapPropagator().extract
        self.error = Status(StatusCode.ERROR)
        kinds = {"volatile_db": configuration.volatile_db.type, "persistent_db": configuration.persistent_db.type}
        self._systems = {tier: _SYSTEMS.get(kind, kind) for tier, kind in kinds.items()}

    def start(self, scope: Scope, headers: Mapping[bytes, bytes]) -> RequestSpan:
        """Start the span of a request as a child of its `traceparent`."""
        carrier = {
            name.decode(): headers[name].decode("latin-1") for name in (b"traceparent", b"tracestate") if name in headers
        }
        parent = self._extract(carrier)
        return RequestSpan(self._tracer.start_span(scope["method"], parent, self._kinds.SERVER), self)

    def add_stages(self, parent: "Span", trace: LookupTrace, clock_ns: int) -> None:
        """Add a span for each stage. `clock_ns` converts its times to nanoseconds since 1970."""
        within = self._within(parent)
        for stage in trace.spans:
            attributes: dict[str, Any] = {"hps.keys": stage.keys}
            if stage.table:
                attributes["hps.table"] = stage.table
            system = self._systems.get(stage.stage)
            if system is not None:
                attributes |= {"db.system.name": system, "db.operation.name": "fetch", "db.operation.batch.size": stage.keys}
                if stage.table:
                    attributes["db.collection.name"] = stage.table
            kind = self._kinds.INTERNAL if system is None else self._kinds.CLIENT
            span = self._tracer.start_span(stage.stage, within, kind, attributes, start_time=stage.began_ns + clock_ns)
            span.end(stage.ended_ns + clock_ns)

    def close(self) -> None:
        """Export the queued spans, with a short timeout. Blocks."""
        closer = new_thread("spans", self._provider.shutdown, lasting=False)
        closer.start()
        closer.join(_CLOSE_S)
        if closer.is_alive():
            _log.warning("the OTLP endpoint did not take the last traces within %g s; they are lost", _CLOSE_S)


def spans_of(configuration: Configuration) -> RequestSpans | None:
    """Make the configured exporter of spans; return None if none is configured or the extra is missing."""
    if not configuration.service.otlp_endpoint:
        return None
    try:
        spans = RequestSpans(configuration)
        return None if spans.disabled else spans
    except ImportError as error:
        message = "no traces are sent to service.otlp_endpoint: %s; install the exporter: %s"  # it may contain a password
        _log.warning(message, error, install_hint("otel"))
        return None
