"""What the service turns away, and why: counted for alerts, and in the log, so that both name the limit or the client."""

import logging
import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from hps.service.logs import fields

_LOG_PAUSE_S = 60.0
_log = logging.getLogger(__name__)


class OnceAMinute(logging.Filter):
    """Lets each message below ERROR pass once a minute, with the number of those in between. *Thread-safe* as logging is.

    Clients cause these messages, as many as they like.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[object, tuple[float, int]] = {}  # by its format: when it passed, how often it did not since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        if record.levelno >= logging.ERROR:
            return True
        since, dropped = self._passed.get(record.msg, (float("-inf"), 0))
        now = time.monotonic()
        if now - since < _LOG_PAUSE_S:
            self._passed[record.msg] = (since, dropped + 1)
            return False
        self._passed[record.msg] = (now, 0)
        if dropped:
            record.msg = f"{record.msg} ({dropped} more since the last such line)"
        return True


_log.addFilter(OnceAMinute())

REFUSED = {
    "threads": "refusing requests, service.lookup_threads are busy: %s",
    "memory": "refusing requests, service.max_held_bytes are held: %s",
    "connections": "refusing connections, all are busy: %s",
    "changes": "refusing changes of models: %s",
    "workspaces": "refusing lookups, num_of_worker_buffer_in_pool are busy: %s",
}
"""The limits for which a request is refused, and what the log says; each line once a minute."""

ABORTED = {
    "answer": "closing the connection of %s, which does not read its answer: %s",
    "headers": "closing the connection of %s, which does not end the headers of a request: %s",
    "memory": "closing the connection of %s, for whose request there is no memory: %s",
}
"""Why a connection is closed amid a request, and what the log says; each line once a minute."""


class Refusals(Collector):
    """Counts and logs what is refused or aborted. *One per event loop*, which alone calls it.

    Attributes:
        refused, aborted: how often, by reason.
    """

    def __init__(self) -> None:
        self.refused = dict.fromkeys(REFUSED, 0)
        self.aborted = dict.fromkeys(ABORTED, 0)

    def refuse(self, reason: str, what: object, request_id: str | None = None) -> None:
        """Count a request that is refused with 503 for a limit, one of `REFUSED`; `what` is for the log."""
        self.refused[reason] += 1
        _log.warning(REFUSED[reason], what, extra=fields(request_id=request_id))

    def abort(self, reason: str, client: str, what: str) -> None:
        """Count a connection that is aborted for one of `ABORTED`; who and `what` are for the log."""
        self.aborted[reason] += 1
        _log.warning(ABORTED[reason], client, what)

    def deny(self, status: int, client: str, what: str, request_id: str | None) -> None:
        """Log a request that has not the right token. It is counted by its route and status, as every request is."""
        _log.warning("answering %d to %s: %s", status, client, what, extra=fields(request_id=request_id))

    def collect(self) -> Iterable[Metric]:
        """Yield the counts in Prometheus' form."""
        for name, text, counts in (
            ("hps_http_refused", "Requests refused with 503, by the limit that was reached.", self.refused),
            ("hps_http_aborted_connections", "Connections closed amid a request, by what was waited for.", self.aborted),
        ):
            family = CounterMetricFamily(name, text, labels=["reason"])
            for reason, count in counts.items():
                family.add_metric([reason], count)
            yield family
