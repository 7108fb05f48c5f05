"""Files in Google Cloud Storage, on an emulator."""

import gc
import logging
import threading
from pathlib import Path

import pytest
import requests

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
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


# -- addresses ----------------------------------------------------------------------------------------------------------------


def test_what_is_in_no_bucket_need_not_be_removed(filesystem: GcsFileSystem) -> None:
    filesystem.delete("gs://no-such-bucket/model/key")


# -- uploads ------------------------------------------------------------------------------------------------------------------

CHUNK = 1 << 18


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "_PART_BYTES", CHUNK)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("step", [1000, CHUNK, 10 * CHUNK])
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
    del writer
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "hps-gcs-upload":
            thread.join(1)
    assert server.get(f"gs://{bucket}/file") is None


def test_a_small_file_takes_one_request(server: GcsServer, bucket: str) -> None:
    with MisbehavingProxy(server.port) as proxy:
        writer = GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=proxy.url)).create(f"gs://{bucket}/file")
        writer.write(memoryview(noise(100_000)))
        writer.commit()
        assert len(proxy.requests) == 1
    assert server.get(f"gs://{bucket}/file") == noise(100_000)


# -- connections, endpoint, credentials ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "127.0.0.1:{}"])
def test_the_emulator_of_the_environment_is_used(
    server: GcsServer, bucket: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", form.format(server.port))
    server.put(f"gs://{bucket}/file", b"x")
    assert GcsFileSystem().status(f"gs://{bucket}/file").size_bytes == 1


def test_the_configured_endpoint_goes_before_the_environment(
    server: GcsServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=f"{server.url}/")).exists(f"gs://{bucket}")


@pytest.fixture
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.mark.usefixtures("_no_credentials")
def test_without_credentials_access_is_anonymous_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = GcsFileSystem(ModelSourceConfig(timeout_s=20, deadline_s=40, max_attempts=1))
    asked: list[tuple[str, str | None]] = []

    def send(session: requests.Session, request: requests.PreparedRequest, **_: object) -> requests.Response:
        if "/o/key" in str(request.url):
            asked.append((str(request.url), request.headers.get("Authorization")))
        raise requests.ConnectionError("nobody is asked by this test")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, gcs.__name__):
        patch.setattr(requests.Session, "send", send)
        for _ in range(3):
            with pytest.raises(ModelSourceError, match="nobody is asked"):
                filesystem.status("gs://models/key")
    assert len(asked) == 3
    assert all(url.startswith("https://storage.googleapis.com/") and not token for url, token in asked)
    assert [record.message for record in caplog.records if record.name == gcs.__name__] == [
        "No Google credentials were found: reading GCS without any, which public buckets allow."
    ]


@pytest.mark.usefixtures("_no_credentials")
@pytest.mark.parametrize("content", [None, "", "{}", '{"type": "service_account", "private_key": "SECRET"}'])
def test_a_key_file_that_cannot_be_used_is_an_error_and_not_anonymous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "key.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(ModelFileError, match=r"Google credentials.*key\.json.*GOOGLE_APPLICATION_CREDENTIALS") as error:
        GcsFileSystem().status("gs://models/key")
    assert "SECRET" not in str(error.value)
