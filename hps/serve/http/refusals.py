"""Counts and logs refused requests and aborted connections."""

import logging
from collections.abc import Iterator

from hps.errors import HPSError
from hps.ground.log_limits import OnceAMinute
from hps.serve.http.http_answer import OverloadedError, RequestError
from hps.serve.logs.lines import fields
from hps.statistics.prometheus import Family, family, label_text

_log = logging.getLogger(__name__)
_log.addFilter(OnceAMinute())

REFUSED = {
    "threads": "refusing requests, service.lookup_threads are busy: %s",
    "memory": "refusing requests, service.max_held_bytes are held: %s",
    "connections": "refusing connections, all are busy: %s",
    "changes": "refusing changes of models: %s",
    "workspaces": "refusing lookups, num_of_worker_buffer_in_pool are busy: %s",
}
"""Log line by limit; logged once a minute."""

ABORTED = {
    "answer": "closing the connection of %s, which does not read its answer: %s",
    "handshake": "closing the connection of %s, whose TLS handshake failed: %s",
    "headers": "closing the connection of %s, which does not end the headers of a request: %s",
    "memory": "closing the connection of %s, for whose request there is no memory: %s",
}
"""Log line by reason for closing a connection during a request; logged once a minute."""


class Refusals:
    """Counts and logs refusals. *One per event loop*; only the loop calls it."""

    def __init__(self) -> None:
        self.refused = dict.fromkeys(REFUSED, 0)
        self.aborted = dict.fromkeys(ABORTED, 0)

    def refuse(self, reason: str, details: object, request_id: str | None = None) -> None:
        """Count a request that is refused with 503 because of a limit, one of `REFUSED`, and log the details."""
        self.refused[reason] += 1
        _log.warning(REFUSED[reason], details, extra=fields(request_id=request_id))

    def abort(self, reason: str, client: str, details: str) -> None:
        """Count a connection that is aborted for one of the reasons of `ABORTED`, and log the details."""
        self.aborted[reason] += 1
        _log.warning(ABORTED[reason], client, details)

    def record_error(self, error: Exception, request: str, client: str, request_id: str) -> None:
        """Count and log an error with which a request ends: a limit, missing rights, or a bug."""
        if isinstance(error, OverloadedError):
            self.refuse(error.reason, error, request_id)
        elif isinstance(error, RequestError) and error.status in (401, 403):
            details = fields(request_id=request_id)
            _log.warning("answering %d to %s: %s", error.status, client, f"{request}: {error}", extra=details)
        if not isinstance(error, HPSError | MemoryError):
            _log.error("serving %s failed unexpectedly", request, exc_info=error, extra=fields(request_id=request_id))

    def families(self) -> Iterator[Family]:
        for name, text, counts in (
            ("hps_http_refused", "Requests refused with 503, by the limit that was reached.", self.refused),
            ("hps_http_aborted_connections", "Connections closed during a request, by cause.", self.aborted),
        ):
            yield family("counter", name, text, [(label_text(["reason"], [reason]), n) for reason, n in counts.items()])
