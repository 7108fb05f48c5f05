"""The base of HTTP servers of tests: a thread for each connection, and no word of clients that go away."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound="QuietServer")


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name of the base
        """Say nothing."""


class QuietServer(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, handler: type[QuietHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_address[1]

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away."""


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Serve until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
