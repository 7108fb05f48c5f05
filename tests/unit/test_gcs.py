"""Files in Google Cloud Storage, on an emulator."""

import uuid
from collections.abc import Iterator

import pytest

from hps.config_tiers import ModelSourceConfig
from hps.filesystems.gcs import GcsFileSystem
from tests.contracts.filesystem_contract import FileSystemContract
from tests.gcs_server import GcsServer

pytestmark = pytest.mark.gcs


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def filesystem(server: GcsServer) -> GcsFileSystem:
    return GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=server.url))


@pytest.fixture
def root() -> str:
    return f"gs://models/{uuid.uuid4().hex}"


class TestGcsFileSystem(FileSystemContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: GcsServer) -> None:
        self.server = server

    @pytest.fixture
    def filesystem(self, server: GcsServer) -> GcsFileSystem:
        return GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=server.url))

    @pytest.fixture
    def root(self) -> str:
        return f"gs://models/{uuid.uuid4().hex}/root"

    def put(self, path: str, content: bytes) -> None:
        self.server.put(path, content)
