"""The memory budget for requests and answers."""

from hps.serve.http.http_answer import OverloadedError, RequestError

SMALL_BYTES = 65_536
"""Requests up to this size may use the entire budget, larger ones three quarters, so that small ones still get answers."""


class MemoryBudget:
    """Counts the memory of requests and answers. *One per event loop*; only the loop changes it.

    Counted are received bytes until they are answered, their decompressed and parsed forms, and answers until they are sent.

    Args:
        limit_bytes: the budget.

    Attributes:
        used: bytes counted now. Small amounts are added and subtracted directly.
        kept: bytes that connections keep between requests, as of the last count.
        limit, large_limit: bounds on the sum of both, for a small and for a larger request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.used = self.kept = 0
        self.limit_to(limit_bytes)

    def limit_to(self, limit_bytes: int) -> None:
        """Change the budget. Counted bytes are unaffected."""
        self.limit = limit_bytes
        self.large_limit = limit_bytes * 3 // 4

    def reserve(self, size: int, what: str, *, spare: bool = False) -> int:
        """Count further bytes, and return their number, which the caller subtracts from `used` in the end.

        Args:
            what: purpose, for errors.
            spare: whether to leave the last quarter of the budget even to a small request, as many unknown clients may send it.

        Raises:
            RequestError: 413, they exceed the budget by themselves.
            OverloadedError: they do not fit now.
        """
        # Large requests leave a quarter to small ones, which would otherwise be refused whenever a few large ones are served.
        limit = self.limit if size <= SMALL_BYTES and not spare else self.large_limit
        if size > limit:
            limits = f"expected at most {limit} (from service.max_held_bytes)"
            raise RequestError(413, f"{what}: it takes up to {size} bytes of memory, {limits}; send fewer keys at once")
        if self.used + self.kept + size > limit:
            held = f"other requests hold {self.used + self.kept} bytes, expected at most {limit} (from service.max_held_bytes)"
            raise OverloadedError("memory", f"{what}: {held}; send the request again later")
        self.used += size
        return size
