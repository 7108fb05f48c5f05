"""A real Azurite for tests, on a free port, ended with the test run: Microsoft's emulator of Azure Blob Storage."""

import importlib.util
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.servers.program import Program
from tests.servers.redis_server import free_ports

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # published; of any emulator


def what_is_missing() -> str | None:
    """Return why it cannot run here."""
    if not all(importlib.util.find_spec(name) for name in ("azure", "azure.storage", "azure.storage.blob")):
        return "azure-storage-blob is not installed"
    return None if shutil.which("azurite-blob") else "no azurite-blob on the PATH"


class Azurite(Program):
    """One process that keeps its blobs in memory."""

    scheme = "az"

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        super().__init__(Path(self._directory.name) / "log")
        self.port = 0
        self.client: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connection_string(self, url: str = "") -> str:
        """Return how to connect, perhaps by a proxy."""
        place = f"{url or self.url}/{ACCOUNT}"
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={place};"

    def start(self) -> Self:
        from azure.core.exceptions import AzureError
        from azure.storage.blob import BlobServiceClient

        for attempt in range(5):  # another process may take the port between the look and the start
            [self.port] = free_ports(1)
            options = ("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
            place = ("--blobHost", "127.0.0.1", "--blobPort", self.port)
            self.launch("azurite-blob", *options, *place, cwd=self._directory.name)
            self.client = BlobServiceClient.from_connection_string(self.connection_string(), retry_total=0)
            try:
                self.wait_until(self.client.get_service_properties, AzureError)
            except RuntimeError:
                if attempt == 4:
                    raise
            else:
                break
        return self

    def stop(self) -> None:
        self.kill()
        self._directory.cleanup()

    def new_bucket(self) -> str:
        """Make a container, and tell its name."""
        name = f"container-{uuid.uuid4().hex}"
        self.client.create_container(name)
        return name

    def put(self, uri: str, content: bytes) -> None:
        """Write a blob by its az:// URI, without the code under test; replaces what is there."""
        self._blob(uri).upload_blob(content, overwrite=True)

    def get(self, uri: str) -> bytes | None:
        """A blob's content, or None."""
        blob = self._blob(uri)
        return blob.download_blob().readall() if blob.exists() else None

    def _blob(self, uri: str) -> Any:
        container, _, name = uri.removeprefix("az://").partition("/")
        return self.client.get_blob_client(container, name)

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """One for all tests; each makes a container of its own."""
    with Azurite() as server:
        yield server
