"""Objects in S3, as moto's server has them."""

import functools
import os

import numpy as np
import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.s3 import S3FileSystem, part_bytes
from tests.contracts.filesystem_contract import FileSystemContract, noise
from tests.s3_server import S3Server, know_only_moto, s3_server

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


class TestS3FileSystem(FileSystemContract):
    @pytest.fixture
    def filesystem(self, server: S3Server) -> S3FileSystem:
        return filesystem_at(server.url)

    @pytest.fixture
    def root(self, bucket: str) -> str:
        return f"s3://{bucket}/root"

    def put(self, path: str, content: bytes) -> None:
        s3_server().put(path, content)


# -- addresses -----------------------------------------------------------------------------------------------------


def test_every_form_of_address_names_the_object(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    server.put(f"s3://{bucket}/a model/key", noise(24))
    forms = (
        f"s3://{bucket}/a model/key",
        f"S3://{bucket}/a model/key",
        f"s3a://{bucket}/a model/key",
        f"https://{bucket}.s3.us-east-1.amazonaws.com/a%20model/key",
        f"https://s3.us-east-1.amazonaws.com/{bucket}/a%20model/key",
        f"https://{bucket}.s3.amazonaws.com/a%20model/key",
    )
    for form in forms:
        assert filesystem.status(form).size_bytes == 24, form
        assert filesystem.list(form.removesuffix("/key")) == ["key"], form


@pytest.mark.parametrize("key", ["a%20b", "a+b", "what?x=1#y", "Grüße/日本", "a b&c=d", "=;:@!$'()*,~"])
def test_an_odd_key_is_written_and_found_as_it_stands(
    server: S3Server, filesystem: S3FileSystem, bucket: str, key: str
) -> None:
    writer = filesystem.create(f"s3://{bucket}/root/{key}/file")
    writer.write(memoryview(b"12345"))
    writer.commit()
    assert server.get(f"s3://{bucket}/root/{key}/file") == b"12345"
    assert filesystem.status(f"s3://{bucket}/root/{key}/file").size_bytes == 5
    assert filesystem.list(f"s3://{bucket}/root/{key}") == ["file"]


def test_a_dotted_bucket_is_served(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    dotted = f"{bucket}.with.dots"
    server.client.create_bucket(Bucket=dotted)
    server.put(f"s3://{dotted}/key", b"123")
    assert filesystem.status(f"s3://{dotted}/key").size_bytes == 3
    assert filesystem.status(f"https://{dotted}.s3.us-east-1.amazonaws.com/key").size_bytes == 3


def test_the_environment_names_the_endpoint_where_the_settings_do_not(
    server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    server.put(f"s3://{bucket}/key", b"123")
    assert S3FileSystem().status(f"s3://{bucket}/key").size_bytes == 3


# -- directories ---------------------------------------------------------------------------------------------------


def test_a_bucket_is_a_directory_also_an_empty_one(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    for root in (f"s3://{bucket}", f"s3://{bucket}/"):
        assert filesystem.exists(root)
        assert filesystem.list(root) == []
        with pytest.raises(ModelFileError, match=r"bucket .* itself, expected an object"):
            filesystem.status(root)
    server.put(f"s3://{bucket}/a/b", b"x")
    assert filesystem.list(f"s3://{bucket}") == ["a"]


def test_a_marker_that_stands_for_a_directory_is_not_listed(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    server.put(f"s3://{bucket}/root/", b"")
    assert filesystem.exists(f"s3://{bucket}/root")
    assert filesystem.exists(f"s3://{bucket}/root/")
    with pytest.raises(ModelFileError, match="directory"):
        filesystem.status(f"s3://{bucket}/root/")
    server.put(f"s3://{bucket}/root/key", b"x")
    assert filesystem.list(f"s3://{bucket}/root/") == ["key"]


def test_a_long_directory_is_listed_page_by_page_and_an_endless_one_refused(
    server: S3Server, filesystem: S3FileSystem, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hps.filesystems.object_store._PAGE_NAMES", 4)
    names = [f"file-{number}" for number in range(9)]
    for name in names:
        server.put(f"s3://{bucket}/root/{name}", b"")
    assert filesystem.list(f"s3://{bucket}/root") == names
    monkeypatch.setattr("hps.filesystems.object_store._MOST_PAGES", 1)
    with pytest.raises(ModelFileError, match=f"s3://{bucket}/root.*more than 4 names"):
        filesystem.list(f"s3://{bucket}/root")


# -- what is missing -----------------------------------------------------------------------------------------------


def test_a_missing_bucket_is_named_by_every_operation(filesystem: S3FileSystem) -> None:
    path = "s3://no-such-bucket/model/key"
    calls = (filesystem.exists, filesystem.status, filesystem.list, filesystem.delete)
    for call in calls:
        with pytest.raises(ModelFileNotFoundError, match=f"{path}: there is no bucket 'no-such-bucket' at 127.0.0.1:"):
            call(path)
    with pytest.raises(ModelFileNotFoundError, match=f"reading {path}: there is no bucket"):
        filesystem.read_into(path, 0, memoryview(bytearray(8)))
    writer = filesystem.create(path)
    writer.write(memoryview(b"x"))
    with pytest.raises(ModelFileNotFoundError, match=f"writing {path}: there is no bucket"):
        writer.commit()


def test_a_directory_in_place_of_a_file_is_said_to_be_one(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    server.put(f"s3://{bucket}/model/key/part-0", b"x")
    with pytest.raises(ModelFileError, match="it is a directory") as raised:
        filesystem.status(f"s3://{bucket}/model/key")
    assert not isinstance(raised.value, ModelFileNotFoundError)
    with pytest.raises(ModelFileError, match="it is a directory"):
        filesystem.read_into(f"s3://{bucket}/model/key", 0, memoryview(bytearray(8)))


def test_a_read_of_a_file_that_became_shorter_is_a_change(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    server.put(f"s3://{bucket}/key", noise(1000))
    version = filesystem.status(f"s3://{bucket}/key").version
    server.put(f"s3://{bucket}/key", noise(10))
    with pytest.raises(ModelFileError, match="changed"):
        filesystem.read_into(f"s3://{bucket}/key", 500, memoryview(bytearray(8)), version)


# -- writing -------------------------------------------------------------------------------------------------------


def test_a_long_file_is_sent_in_parts_and_an_abort_leaves_none(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    writer = filesystem.create(f"s3://{bucket}/file")
    writer.write(memoryview(noise(9_000_000)))
    uploads = server.client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in uploads] == ["file"]
    writer.abort()
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=bucket)
    assert filesystem.list(f"s3://{bucket}") == []


def test_parts_grow_so_that_ten_thousand_hold_five_terabytes() -> None:
    sizes = [part_bytes(number) for number in range(10_000)]
    assert sizes[0] == 8 << 20
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30
    assert max(sizes[:1000]) == 8 << 20  # models of usual size need little memory


def test_a_write_of_more_dimensions_is_taken_by_its_bytes(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer = filesystem.create(f"s3://{bucket}/file")
    writer.write(array.data)
    writer.commit()
    assert server.get(f"s3://{bucket}/file") == array.tobytes()


# -- connections, configuration ---------------------------------------------------------------------------------


def test_no_descriptor_stays_open(server: S3Server, filesystem: S3FileSystem, bucket: str) -> None:
    server.put(f"s3://{bucket}/key", noise(100_000))
    filesystem.read_into(f"s3://{bucket}/key", 0, memoryview(bytearray(100_000)))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        filesystem.read_into(f"s3://{bucket}/key", 1, memoryview(bytearray(99_999)))
        filesystem.status(f"s3://{bucket}/key")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_without_credentials_the_cure_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    filesystem = S3FileSystem(ModelSourceConfig(s3_endpoint_url=s3_server().url))
    with pytest.raises(ModelFileError, match=rf"opening s3://{bucket}/key: .*credentials.*AWS_ACCESS_KEY_ID.*AWS_PROFILE"):
        filesystem.status(f"s3://{bucket}/key")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ModelFileError, match=r"credentials.*\(ProfileNotFound\).*AWS_PROFILE"):
        S3FileSystem().status(f"s3://{bucket}/key")


def test_a_region_that_cannot_be_one_is_a_model_file_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "not a region")
    with pytest.raises(ModelFileError, match=rf"s3://{bucket}/key: .*region"):
        S3FileSystem().status(f"s3://{bucket}/key")


def test_a_password_in_the_endpoint_is_not_repeated(bucket: str) -> None:
    settings = ModelSourceConfig(
        s3_endpoint_url="http://user:secret-word@127.0.0.1:9", timeout_s=0.5, deadline_s=3, max_attempts=2
    )
    with pytest.raises(ModelFileError) as raised:
        S3FileSystem(settings).status(f"s3://{bucket}/key")
    assert "secret-word" not in str(raised.value)
