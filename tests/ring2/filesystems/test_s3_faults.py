"""Objects in S3, as moto's server has them; and what S3 alone answers: its refusals, and its uploads in parts."""

import functools
import logging
from collections.abc import Callable, Iterator

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.s3 import S3FileSystem as S3
from hps.models.manifest import write_file
from hps.testing.filesystems import noise
from tests.servers.misbehaving_proxy import Answer, Before, Drop, Fault, Request, after, always, first
from tests.servers.misbehaving_proxy import MisbehavingProxy as Proxy
from tests.servers.s3_server import S3Server, know_only_moto, s3_server
from tests.tables.object_store_contract import ObjectStoreContract
from tests.tables.object_store_faults import OPERATIONS, SIZE, ObjectStoreFaults, read

pytestmark = pytest.mark.s3


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    know_only_moto(monkeypatch)
    return s3_server()


@pytest.fixture(autouse=True)
def _no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, "hps"):
        yield
    assert not [record for record in caplog.records if record.name.startswith("hps") and "secret" in record.getMessage()]


def is_commit(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.path


def refusal(status: int, code: str, extra: str = "", headers: dict[str, str] | None = None) -> Callable[[Request], Fault]:
    """Answer every request as S3 refuses: with a body, but for HEAD, which has none."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>What {code} says.</Message>{extra}</Error>".encode()
    return always(Answer(status, body, {"Content-Type": "application/xml", **(headers or {})}))


class TestS3(ObjectStoreFaults):
    store = S3
    version_header = "ETag"
    overloaded = r"127\.0\.0\.1:\d+ failed \(HTTP 500.*check that it runs"
    unreachable = r"\S+ (broke off or cannot be reached|did not answer).*model_source.s3_endpoint_url"

    def is_read(self, request: Request) -> bool:
        return request.method == "GET" and "list-type" not in request.path

    def condition(self, request: Request) -> str | None:
        return request.headers["If-Match"]


@pytest.mark.parametrize("code", ["SlowDown", "InternalError", "RequestTimeout", "OperationAborted", "Throttling", "Other"])
def test_what_s3_says_of_a_failure_tells_whether_it_passes(proxy: Proxy, patient: S3, file: str, code: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>Wait.</Message></Error>".encode()
    proxy.rule = first(1, Answer(400, body))
    if code == "Other":
        with pytest.raises(ModelFileError, match=r"refused \(HTTP 400 Other: Wait\.\)"):
            read(patient, file)
    else:
        assert read(patient, file) == noise(SIZE)


def test_what_is_written_through_failures_is_whole(proxy: Proxy, patient: S3, server: S3Server, root: str) -> None:
    content = noise(17_000_000)
    faults = iter([Answer(500), None, Drop(), None, Answer(503), None, Drop(after_asking=True), None, Answer(500)])
    proxy.rule = lambda request: next(faults, None)
    write_file(patient, f"{root}/file", content)
    assert server.get(f"{root}/file") == content
    assert next(faults, "used up") == "used up"


def test_a_failed_write_leaves_the_old_object_and_no_parts(proxy: Proxy, patient: S3, server: S3Server, file: str) -> None:
    proxy.rule = after(1, Answer(500), lambda request: request.method == "PUT")
    with pytest.raises(ModelSourceError, match=f"writing {file}"):
        write_file(patient, file, noise(17_000_000))
    assert server.get(file) == noise(SIZE)
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=file.split("/")[2])


def test_a_commit_whose_answer_is_lost_is_found_done_and_one_that_somebody_ended_an_error(
    proxy: Proxy, patient: S3, server: S3Server, root: str, file: str
) -> None:
    content, gone = noise(9_000_000), b"<Error><Code>NoSuchUpload</Code></Error>"  # S3's answer to a second commit, not moto's
    faults = iter([Drop(after_asking=True), Answer(404, gone)])
    proxy.rule = lambda request: next(faults) if is_commit(request) else None
    write_file(patient, f"{root}/file", content)
    assert server.get(f"{root}/file") == content
    assert len([request for request in proxy.requests if is_commit(request)]) == 2
    proxy.rule = always(Answer(404, gone), is_commit)
    with pytest.raises(ModelFileError, match=rf"writing {file}: .*NoSuchUpload"):
        write_file(patient, file, content)
    assert server.get(file) == noise(SIZE)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(403, "AccessDenied"), r"not allowed \(HTTP 403 AccessDenied: What AccessDenied says\.\); grant s3:GetObject"),
        (refusal(403, "InvalidAccessKeyId"), "does not know the access key .*check AWS_ACCESS_KEY_ID"),
        (refusal(403, "SignatureDoesNotMatch"), "secret access key is wrong .*AWS_SECRET_ACCESS_KEY"),
        *((refusal(code, "ExpiredToken"), "credentials have expired .*ExpiredToken.*renew them") for code in (400, 403)),
        (refusal(403, "RequestTimeTooSkewed"), "clock differs .*set the clock"),
        (
            refusal(301, "PermanentRedirect", "", {"x-amz-bucket-region": "eu-central-1"}),
            "is in region eu-central-1, 127.0.0.1:.* was asked as .*AWS_DEFAULT_REGION",
        ),
        (
            refusal(400, "AuthorizationHeaderMalformed", "<Region>eu-central-1</Region>"),
            "is in region eu-central-1, .*AWS_DEFAULT_REGION",
        ),
        (refusal(301, "PermanentRedirect"), "is in another region.*AWS_DEFAULT_REGION"),
        (refusal(400, "IllegalLocationConstraintException"), "is in another region.*AWS_DEFAULT_REGION"),
        (always(Answer(403)), "not allowed .*s3:ListBucket .*an object that is not there"),
        (refusal(418, "Teapot"), r"refused \(HTTP 418 Teapot: What Teapot says\.\)"),
        (always(Answer(200, b"<html>Please log in", {"Content-Type": "text/html"})), ""),
    ],
    ids=lambda value: "" if callable(value) else value[:24],
)
def test_a_refusal_names_cause_and_cure(
    proxy: Proxy, patient: S3, file: str, answer: Callable[[Request], Fault], message: str
) -> None:
    proxy.rule = answer
    everywhere = "grant s3:GetObject" in message or "another region" in message
    for operation in OPERATIONS if everywhere else ("status", "read_into"):
        proxy.requests.clear()
        with pytest.raises(ModelFileError, match=rf"s3://.*: .*{message}" if everywhere else f"{file}: .*{message}") as raised:
            OPERATIONS[operation](patient, file)
        assert "testing" not in str(raised.value)
        if message:
            assert not isinstance(raised.value, ModelSourceError)
            assert len(proxy.requests) <= 2  # nothing is tried again; after a HEAD, a GET asks for the reason


def test_a_wrong_region_in_the_address_is_named(proxy: Proxy, patient: S3, file: str) -> None:
    proxy.rule = refusal(301, "PermanentRedirect", "", {"x-amz-bucket-region": "eu-central-1"})
    address = f"https://{file.split('/')[2]}.s3.us-west-2.amazonaws.com/models/item/key"
    with pytest.raises(ModelFileError, match=rf"{address}: .*in region eu-central-1, .*name it in the address"):
        patient.status(address)
    assert any("/us-west-2/s3/" in request.headers["Authorization"] for request in proxy.requests)


def test_a_write_that_ends_as_another_object_is_an_error(proxy: Proxy, patient: S3, server: S3Server, file: str) -> None:
    proxy.rule = always(Before(lambda: server.put(file, b"another's")), lambda request: request.method == "HEAD")
    with pytest.raises(ModelFileError, match=rf"writing {file}: got an object of 9 bytes, .*expected 5 bytes.*another writer"):
        write_file(patient, file, b"ours.")


@functools.cache
def filesystem_at(url: str) -> S3:
    """One for all tests, because a boto3 client takes long to make."""
    return S3(ModelSourceConfig(s3_endpoint_url=url))


@pytest.fixture
def filesystem(server: S3Server) -> S3:
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
    filesystem = S3(ModelSourceConfig(s3_endpoint_url=s3_server().url))
    with pytest.raises(ModelFileError, match=rf"opening s3://{bucket}/key: .*credentials.*AWS_ACCESS_KEY_ID.*AWS_PROFILE"):
        filesystem.status(f"s3://{bucket}/key")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ModelFileError, match=r"credentials.*\(ProfileNotFound\).*AWS_PROFILE"):
        S3().status(f"s3://{bucket}/key")


def test_buckets_are_found_where_the_settings_or_the_environment_say(
    server: S3Server, filesystem: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dotted = f"{bucket}.with.dots"
    server.client.create_bucket(Bucket=dotted)
    server.put(f"s3://{dotted}/key", b"123")
    for address in (f"s3://{dotted}/key", f"https://{dotted}.s3.us-east-1.amazonaws.com/key"):
        assert filesystem.status(address).size_bytes == 3
    with pytest.raises(ModelFileNotFoundError, match="there is no bucket 'no-such-bucket' at 127"):
        filesystem.delete("s3://no-such-bucket/model/key")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    assert S3().status(f"s3://{dotted}/key").size_bytes == 3


def test_an_endpoint_or_a_region_that_cannot_be_one_is_an_error_without_the_password(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://user:secret-word@127.0.0.1:9"
    settings = ModelSourceConfig(s3_endpoint_url=url, timeout_s=0.5, deadline_s=3, max_attempts=2)
    with pytest.raises(ModelFileError) as raised:
        S3(settings).status(f"s3://{bucket}/key")
    assert "secret-word" not in str(raised.value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "not a region")
    with pytest.raises(ModelFileError, match=rf"s3://{bucket}/key: .*region"):
        S3().status(f"s3://{bucket}/key")
