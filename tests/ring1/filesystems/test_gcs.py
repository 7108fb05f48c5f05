"""Credentials for Google Cloud Storage, without any store; ring2/filesystems/test_gcs_faults.py asks an emulator."""

import logging
from pathlib import Path

import pytest
import requests

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
from hps.filesystems import gcs
from hps.filesystems.gcs import GcsFileSystem


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
