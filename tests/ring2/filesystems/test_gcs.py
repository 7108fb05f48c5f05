"""Files in Google Cloud Storage, on an emulator."""

import gc

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.filesystems import gcs
from hps.filesystems.gcs import GcsFileSystem
from hps.testing.filesystems import noise
from tests.servers.gcs_server import GcsServer
from tests.servers.misbehaving_proxy import MisbehavingProxy
from tests.tables.object_store_contract import ObjectStoreContract

pytestmark = pytest.mark.gcs


@pytest.fixture
def server(gcs_server: GcsServer) -> GcsServer:
    return gcs_server


@pytest.fixture
def filesystem(server: GcsServer) -> GcsFileSystem:
    return GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=server.url))


@pytest.fixture
def bucket(server: GcsServer) -> str:
    return server.new_bucket()


class TestGcsFileSystem(ObjectStoreContract):
    scheme = "gs"
    forms = (
        "gs://{}/a b/key",
        "GS://{}/a b/key",
        "https://storage.googleapis.com/{}/a%20b/key",
        "https://storage.cloud.google.com/{}/a%20b/key",
        "https://{}.storage.googleapis.com/a%20b/key",
    )


def test_the_emulator_of_the_environment_is_used_unless_an_endpoint_is_configured(
    server: GcsServer, filesystem: GcsFileSystem, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(f"gs://{bucket}/file", b"x")
    for form in ("http://127.0.0.1:{}", "127.0.0.1:{}"):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", form.format(server.port))
        assert GcsFileSystem().status(f"gs://{bucket}/file").size_bytes == 1
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=f"{server.url}/")).exists(f"gs://{bucket}")
    filesystem.delete("gs://no-such-bucket/model/key")  # what is in no bucket need not be removed


CHUNK = 1 << 18


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "_PART_BYTES", CHUNK)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(
    ("size", "step"), [(CHUNK - 1, 9_000), (CHUNK, CHUNK), (CHUNK + 1, 9_000), (2 * CHUNK, 10 * CHUNK), (3 * CHUNK + 7, CHUNK)]
)
def test_what_is_uploaded_in_chunks_arrives_whole(
    filesystem: GcsFileSystem, server: GcsServer, bucket: str, size: int, step: int
) -> None:
    content, path = noise(size), f"gs://{bucket}/file"
    writer = filesystem.create(path)
    for start in range(0, size, step):
        writer.write(memoryview(content)[start : start + step])
        assert server.get(path) is None
    writer.commit()
    assert server.get(path) == content


@pytest.mark.usefixtures("_small_chunks")
def test_an_upload_whose_writer_is_lost_is_not_completed(server: GcsServer, filesystem: GcsFileSystem, bucket: str) -> None:
    writer = filesystem.create(f"gs://{bucket}/file")
    writer.write(memoryview(noise(3 * CHUNK)))
    parts = writer._parts
    del writer
    gc.collect()
    server.put(f"gs://{bucket}/later", b"x")
    assert server.get(f"gs://{bucket}/file") is None
    parts.dropped = True  # as abort would, which ends the thread
    parts.waiting.put(b"")


def test_a_small_file_takes_one_request(server: GcsServer, bucket: str) -> None:
    with MisbehavingProxy(server.port) as proxy:
        writer = GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=proxy.url)).create(f"gs://{bucket}/file")
        writer.write(memoryview(noise(100_000)))
        writer.commit()
        assert len(proxy.requests) == 1
    assert server.get(f"gs://{bucket}/file") == noise(100_000)
