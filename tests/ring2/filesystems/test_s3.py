"""Objects in S3, as moto's server has them."""

import functools

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.s3 import S3FileSystem
from tests.servers.s3_server import S3Server, know_only_moto, s3_server
from tests.tables.object_store_contract import ObjectStoreContract

pytestmark = pytest.mark.s3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    know_only_moto(monkeypatch)
    return s3_server()


@functools.cache
def filesystem_at(url: str) -> S3FileSystem:
    """One for all tests, because a boto3 client takes long to make."""
    return S3FileSystem(ModelSourceConfig(s3_endpoint_url=url))


@pytest.fixture
def filesystem(server: S3Server) -> S3FileSystem:
    return filesystem_at(server.url)


@pytest.fixture
def bucket(server: S3Server) -> str:
    return server.new_bucket()


class TestS3FileSystem(ObjectStoreContract):
    scheme = "s3"
    forms = (
        "s3://{}/a b/key",
        "S3://{}/a b/key",
        "s3a://{}/a b/key",
        "https://{}.s3.us-east-1.amazonaws.com/a%20b/key",
        "https://s3.us-east-1.amazonaws.com/{}/a%20b/key",
        "https://{}.s3.amazonaws.com/a%20b/key",
    )


def test_without_credentials_the_cure_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    filesystem = S3FileSystem(ModelSourceConfig(s3_endpoint_url=s3_server().url))
    with pytest.raises(ModelFileError, match=rf"opening s3://{bucket}/key: .*credentials.*AWS_ACCESS_KEY_ID.*AWS_PROFILE"):
        filesystem.status(f"s3://{bucket}/key")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ModelFileError, match=r"credentials.*\(ProfileNotFound\).*AWS_PROFILE"):
        S3FileSystem().status(f"s3://{bucket}/key")


def test_buckets_are_found_where_the_settings_or_the_environment_say(
    server: S3Server, filesystem: S3FileSystem, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dotted = f"{bucket}.with.dots"
    server.client.create_bucket(Bucket=dotted)
    server.put(f"s3://{dotted}/key", b"123")
    for address in (f"s3://{dotted}/key", f"https://{dotted}.s3.us-east-1.amazonaws.com/key"):
        assert filesystem.status(address).size_bytes == 3
    with pytest.raises(ModelFileNotFoundError, match="there is no bucket 'no-such-bucket' at 127"):
        filesystem.delete("s3://no-such-bucket/model/key")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    assert S3FileSystem().status(f"s3://{dotted}/key").size_bytes == 3


def test_an_endpoint_or_a_region_that_cannot_be_one_is_an_error_without_the_password(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://user:secret-word@127.0.0.1:9"
    settings = ModelSourceConfig(s3_endpoint_url=url, timeout_s=0.5, deadline_s=3, max_attempts=2)
    with pytest.raises(ModelFileError) as raised:
        S3FileSystem(settings).status(f"s3://{bucket}/key")
    assert "secret-word" not in str(raised.value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "not a region")
    with pytest.raises(ModelFileError, match=rf"s3://{bucket}/key: .*region"):
        S3FileSystem().status(f"s3://{bucket}/key")
