"""The one budget for all memory that clients can make the service hold."""

from hps.service.http_answer import OverloadedError, RequestError

SMALL_BYTES = 65_536
"""What is no larger may use all of the budget, anything else three quarters: small requests go on being answered."""


class HeldMemory:
    """Counts the bytes that are held for clients. *One per event loop*, which alone changes it.

    They are: what was received and is not answered, what it is decompressed and parsed to, the vectors of an answer and its
    text, and what a client has not read of its answer.

    Args:
        limit_bytes: what may be held.

    Attributes:
        held: bytes that are held now. Whoever holds a little adds to it, and subtracts it again, without asking.
        limit, large_limit: what may be held after a small request got its share, and after a larger one did.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held = 0
        self.limit_to(limit_bytes)

    def limit_to(self, limit_bytes: int) -> None:
        """Change what may be held. What is held already stays."""
        self.limit = limit_bytes
        self.large_limit = limit_bytes * 3 // 4

    def take(self, size: int, what: str) -> int:
        """Hold this many bytes more, and return their number; the caller subtracts it from `held` in the end.

        Raises:
            RequestError: 413, they would not fit if nothing else was held.
            OverloadedError: they do not fit now.
        """
        limit = self.limit if size <= SMALL_BYTES else self.large_limit
        if size > limit:
            limits = f"expected at most {limit} (from service.max_held_bytes)"
            raise RequestError(413, f"{what}: it takes up to {size} bytes of memory, {limits}; send fewer keys at once")
        if self.held + size > limit:
            raise self.full(what, limit)
        self.held += size
        return size

    def full(self, what: str, limit: int) -> OverloadedError:
        """The error of a request for which there is no memory now."""
        held = f"other requests hold {self.held} bytes, expected at most {limit} (from service.max_held_bytes)"
        return OverloadedError("memory", f"{what}: {held}; send the request again later")
