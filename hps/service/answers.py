"""What a lookup route answers, and how it is sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import Send

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
BINARY: Header = (b"content-type", b"application/octet-stream")


@dataclass(slots=True)
class Answer:
    """A response: its status, headers without Content-Length, and body in pieces, which are sent as they are."""

    status: int
    headers: list[Header]
    chunks: Sequence[bytes | memoryview] = field(default=(), repr=False)

    async def send(self, send: Send, *, close: bool = False) -> None:
        """Send it. The pieces must not change until the client has read them.

        Args:
            close: send all of it but the end of the message: the caller has something to do before the connection closes.
        """
        size = sum(map(len, self.chunks))
        headers = [*self.headers, (b"content-length", str(size).encode())]
        if close:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        last = len(self.chunks) - 1
        for place, chunk in enumerate(self.chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": close or place < last})


def json_answer(status: int, value: Any, headers: Sequence[Header] = ()) -> Answer:
    """Answer with a small JSON value."""
    return Answer(status, [JSON, *headers], (orjson.dumps(value),))
