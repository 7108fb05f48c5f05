"""moto's S3 server as a process of its own, and an environment in which boto3 finds nothing but it.

@pytest.fixture
def server(monkeypatch):
    know_only_moto(monkeypatch)
    return s3_server()
"""

import atexit
import functools
import secrets
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Self

import boto3.session
import pytest

from tests.servers.program import Program

_PROGRAM = """
import logging, os, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
application = DomainDispatcherApplication(create_backend_app)
one_at_a_time = threading.Lock()


def atomic(environ, start_response):
    # A conditional write is answered alone, as S3 does it: moto compares and stores in two steps.
    if environ["REQUEST_METHOD"] != "PUT" or not {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys():
        return application(environ, start_response)
    with one_at_a_time:
        return list(application(environ, start_response))


server = make_server("127.0.0.1", 0, atomic, threaded=True, request_handler=MotoRequestHandler)
os.environ["MOTO_PORT"] = str(server.port)
print(server.port, flush=True)
server.serve_forever()
"""


class S3Server(Program):
    """One process of moto's server, which chooses its port itself."""

    scheme = "s3"

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        super().__init__(Path(self._directory.name) / "log")
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @functools.cached_property
    def client(self) -> Any:
        """A boto3 client that bypasses the code under test."""
        session = boto3.session.Session("testing", "testing", region_name="us-east-1")
        return session.client("s3", endpoint_url=self.url)

    def start(self) -> Self:
        self.launch(sys.executable, "-c", _PROGRAM, stderr=None)
        self.wait_until(lambda: self.log_file.read_text().partition("\n")[1])
        self.port = int(self.log_file.read_text().partition("\n")[0])
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.wait_until(lambda: opener.open(f"{self.url}/moto-api/", timeout=60).close() or True)
        return self

    def new_bucket(self) -> str:
        """Make an empty bucket and return its name."""
        name = f"models-{secrets.token_hex(6)}"
        self.client.create_bucket(Bucket=name)
        return name

    def put(self, uri: str, content: bytes) -> None:
        """Write an object by its s3:// URI."""
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def get(self, uri: str) -> bytes:
        """Read an object by its s3:// URI."""
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        content: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return content


@functools.cache
def s3_server() -> S3Server:
    """The server of this test run, started at the first call and ended with the process."""
    server = S3Server().start()
    atexit.register(server.kill)
    return server


def know_only_moto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give boto3 credentials that moto takes, and hide the machine's own configuration from it."""
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "PROFILE", "DEFAULT_PROFILE", "REGION", "DEFAULT_REGION", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    values = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
