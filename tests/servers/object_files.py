"""A read-only object store over a directory, which counts what it sends: moto reads the whole object for each range."""

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.quiet_http import QuietHandler, QuietServer, running


class ObjectFiles(QuietServer):
    """S3 by path-style addresses: the bucket is the first directory. Files must not change.

    Attributes:
        sent: bytes of ranges so far, by key.
        before: called with key, start and stop before a range is sent; may wait or raise.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(_Handler)
        self.directory = directory
        self.counting = threading.Lock()
        self.sent: dict[str, int] = {}
        self.before: Callable[[str, int, int], None] = lambda key, start, stop: None


class _Handler(QuietHandler):
    server: ObjectFiles

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "list-type" in query:
            self._list(unquote(url.path).strip("/"), query.get("prefix", [""])[0])
            return
        key = unquote(url.path).strip("/")
        path = self.server.directory / key
        if not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        size = path.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
        head = {"ETag": f'"{size:032x}"', "Accept-Ranges": "bytes"}
        if wanted:
            head["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if self.command == "HEAD":
            self._answer(200, b"", {**head, "Content-Length": str(size)})
            return
        self.server.before(key, start, stop)
        with self.server.counting:  # before it is sent: a client that has it may look at once
            self.server.sent[key] = self.server.sent.get(key, 0) + stop - start
        with path.open("rb") as file:
            file.seek(start)
            self._answer(206 if wanted else 200, file.read(stop - start), head)

    do_HEAD = do_GET

    def _list(self, bucket: str, prefix: str) -> None:
        place = self.server.directory / bucket / prefix
        entries = sorted(place.iterdir()) if place.is_dir() else []
        listed = [
            f"<CommonPrefixes><Prefix>{escape(prefix + entry.name)}/</Prefix></CommonPrefixes>"
            if entry.is_dir()
            else f"<Contents><Key>{escape(prefix + entry.name)}</Key><Size>{entry.stat().st_size}</Size></Contents>"
            for entry in entries
        ]
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(listed)}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def object_files(directory: Path) -> AbstractContextManager[ObjectFiles]:
    """Serve the objects of a directory."""
    return running(ObjectFiles(directory))
