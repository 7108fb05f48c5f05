"""Canaries and shadows in a frontend: which version answers a request, and what is counted of both."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from hps.serve.logs.requests import Served
from hps.versions.canary.counts import RolloutCounts
from hps.versions.canary.plan import SenderSelection

if TYPE_CHECKING:
    from hps.serve.frontend.pending import Lookup
    from hps.serve.frontend.published import FrontendVersion

_SERVER_ERROR: Final = 500


class FrontendRollout:
    """A running canary or shadow of a model. *One event loop.*

    Args:
        published: its entry in the snapshot (`Rollouts.published`).
        counts: those of the same rollout in an earlier snapshot, or of the process that this one replaces.

    Attributes:
        old, new: the serving and the new version.
        ended: it counts nothing any more; the serving version still answers what the new one fails.
    """

    def __init__(
        self, model: str, published: Mapping[str, Any], old: "FrontendVersion", new: "FrontendVersion", counts: RolloutCounts
    ) -> None:
        self.id: str = published["id"]
        self.counts = counts
        self.old, self.new = old, new
        self.ended = False
        self.queue_requests: int = published["queue_requests"]
        self.queue_bytes: int = published["queue_bytes"]
        self._header: bytes = published["header"].encode()
        self._selection = SenderSelection(model, published["version"], published["share"])
        self._shadows = published["mode"] == "shadow"
        self._compares = self._shadows or published["compare"]

    def _takes(self, served: Served) -> bool:
        headers = served.headers
        # Some clients and proxies send the header empty, or with spaces that others remove (RFC 9110, section 5.5).
        sender = b"" if headers is None else headers.get(self._header, b"").strip()
        return self._selection.takes(sender or served.id)

    def version_of(self, served: Served) -> "FrontendVersion":
        """Return the version that answers a request which names none."""
        selected = not (self._shadows or served.falls_back) and self._takes(served)
        return self.new if selected and self.new.ready else self.old

    def answered(self, lookup: "Lookup", ns: int, work_ns: int) -> bool:
        """Count an answered request; return True if the other version shall answer it, too.

        Args:
            ns: time from its hand-over to the engine to its answer. A shadow has none to compare: it is handed over late.
            work_ns: time in the engine.
        """
        if self.ended:
            return False
        served, is_new = lookup.served, lookup.version is self.new
        (self.counts.new if is_new else self.counts.old).succeeded(work_ns if self._shadows else ns, work_ns)
        if served.falls_back:
            if served.falls_back < _SERVER_ERROR:  # the client's request was right: the new version alone refused it
                self.counts.new.errors += 1
            return False
        return self._compares and self.new.ready and (is_new if not self._shadows else not is_new and self._takes(served))

    def failed(self, lookup: "Lookup", status: int) -> bool:
        """Count a failed request; return True if the serving version shall answer it instead."""
        if lookup.version is self.new:
            self.counts.new.errors += status >= _SERVER_ERROR and not self.ended
            lookup.served.falls_back = status
            return True
        self.counts.old.errors += status >= _SERVER_ERROR
        return False
