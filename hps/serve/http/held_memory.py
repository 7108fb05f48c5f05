"""The single memory budget for everything that clients make the service hold."""

from hps.serve.http.http_answer import OverloadedError, RequestError

SMALL_BYTES = 65_536
"""Requests up to this size may use the entire budget, larger ones three quarters: small requests still get answers."""


class HeldMemory:
    """Counts the bytes that are held for clients. *One per event loop*; only the loop changes it.

    These are bytes received and not yet answered, their decompressed and parsed forms, the vectors and text of answers, and the
    unread part of sent answers.

    Args:
        limit_bytes: the budget.

    Attributes:
        held: bytes held now. Small amounts are added and subtracted directly.
        kept: bytes that connections keep between requests, as they were counted last.
        limit, large_limit: bounds on both, including a new small or larger request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held = self.kept = 0
        self.limit_to(limit_bytes)

    def limit_to(self, limit_bytes: int) -> None:
        """Change the budget. Bytes already held are unaffected."""
        self.limit = limit_bytes
        self.large_limit = limit_bytes * 3 // 4

    def take(self, size: int, what: str, *, spare: bool = False) -> int:
        """Hold this many more bytes, and return their number; the caller subtracts it from `held` afterwards.

        Args:
            spare: whether to spare the last quarter of the budget even if they are few: many strangers may ask for them.

        Raises:
            RequestError: 413, they exceed the budget by themselves.
            OverloadedError: they do not fit now.
        """
        limit = self.limit if size <= SMALL_BYTES and not spare else self.large_limit
        if size > limit:
            limits = f"expected at most {limit} (from service.max_held_bytes)"
            raise RequestError(413, f"{what}: it takes up to {size} bytes of memory, {limits}; send fewer keys at once")
        if self.held + self.kept + size > limit:
            raise self.full(what, limit)
        self.held += size
        return size

    def full(self, what: str, limit: int) -> OverloadedError:
        held = f"other requests hold {self.held + self.kept} bytes, expected at most {limit} (from service.max_held_bytes)"
        return OverloadedError("memory", f"{what}: {held}; send the request again later")
