"""Models in S3: the same answers as from anywhere, and every fault of a store an error that names address, cause and cure."""

import functools
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import HPSError, ModelFileChangedError, ModelFileError, ModelSourceError
from hps.filesystems.s3 import S3FileSystem
from hps.models.files import open_sparse_model
from hps.models.sources import ModelSources
from tests.contracts.filesystem_contract import noise
from tests.contracts.models_in_object_stores import ModelsInObjectStores
from tests.servers.misbehaving_proxy import (
    Answer,
    Before,
    Drop,
    Fault,
    MisbehavingProxy,
    Reheaded,
    Request,
    Reset,
    Silence,
    Trickle,
    Truncate,
    after,
    always,
    first,
)
from tests.servers.s3_server import S3Server, know_only_moto, s3_server

pytestmark = pytest.mark.s3

DIM = 8
SIZE = 300_000
IMPATIENT: dict[str, Any] = {"timeout_s": 0.5, "deadline_s": 3.0, "max_attempts": 3}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    know_only_moto(monkeypatch)
    return s3_server()


@pytest.fixture
def root(server: S3Server) -> str:
    """The URI of a directory in a new bucket."""
    return f"s3://{server.new_bucket()}/models"


@pytest.fixture
def file(server: S3Server, root: str) -> str:
    """An object of SIZE bytes of noise."""
    server.put(f"{root}/item/key", noise(SIZE))
    return f"{root}/item/key"


@pytest.fixture(scope="module")
def shared_proxy() -> Iterator[MisbehavingProxy]:
    with MisbehavingProxy(s3_server().port) as proxy:
        yield proxy


@pytest.fixture
def proxy(server: S3Server, shared_proxy: MisbehavingProxy) -> MisbehavingProxy:
    """One of the module, because a boto3 client takes long to make; it begins each test with good manners."""
    shared_proxy.rule = lambda request: None
    shared_proxy.requests = []
    return shared_proxy


@pytest.fixture(autouse=True)
def _no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, "hps"):
        yield
    assert not [record for record in caplog.records if record.name.startswith("hps") and "secret" in record.getMessage()]


def patient(proxy: MisbehavingProxy) -> S3FileSystem:
    """For faults that answer at once: however slow this machine is, no timeout is in the way."""
    return filesystem_at(proxy.url, timeout_s=20, deadline_s=40, max_attempts=4)


def impatient(proxy: MisbehavingProxy) -> S3FileSystem:
    """For faults that take as long as they are let."""
    return filesystem_at(proxy.url, **IMPATIENT)


@functools.cache
def filesystem_at(url: str, **settings: Any) -> S3FileSystem:
    return S3FileSystem(ModelSourceConfig(s3_endpoint_url=url, **settings))


@functools.cache
def sources_at(url: str, **settings: Any) -> ModelSources:
    return ModelSources(ModelSourceConfig(s3_endpoint_url=url, **settings))


def read(filesystem: S3FileSystem, path: str, offset: int = 0, size: int = SIZE, version: str = "") -> bytes:
    buffer = bytearray(size)
    filesystem.read_into(path, offset, memoryview(buffer), version)
    return bytes(buffer)


def write(filesystem: S3FileSystem, path: str, content: bytes) -> None:
    writer = filesystem.create(path)
    try:
        writer.write(memoryview(content))
        writer.commit()
    finally:
        writer.abort()


def is_get(request: Request) -> bool:
    return request.method == "GET" and "list-type" not in request.path


def is_commit(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.path


def refusal(status: int, code: str, extra: str = "", headers: dict[str, str] | None = None) -> Callable[[Request], Fault]:
    """Answer every request as S3 refuses: with a body, but for HEAD, which has none."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>What {code} says.</Message>{extra}</Error>".encode()
    return always(Answer(status, body, {"Content-Type": "application/xml", **(headers or {})}))


OPERATIONS: dict[str, Callable[[S3FileSystem, str], object]] = {
    "exists": lambda filesystem, path: filesystem.exists(path),
    "status": lambda filesystem, path: filesystem.status(path),
    "read_into": lambda filesystem, path: read(filesystem, path),
    "list": lambda filesystem, path: filesystem.list(path.rpartition("/")[0]),
    "write": lambda filesystem, path: write(filesystem, f"{path}-2", b"x"),
    "delete": lambda filesystem, path: filesystem.delete(path),
}


class TestModelsInS3(ModelsInObjectStores):
    store = S3FileSystem

    def sources(self, url: str, **settings: Any) -> ModelSources:
        return sources_at(url, **settings)


# -- failures that pass --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", [Answer(500), Drop()])
def test_a_failure_that_passes_is_not_seen_by_any_operation(
    proxy: MisbehavingProxy, file: str, operation: str, fault: Fault
) -> None:
    proxy.rule = first(2, fault)
    OPERATIONS[operation](patient(proxy), file)
    assert len(proxy.requests) >= 3


@pytest.mark.parametrize("code", ["SlowDown", "InternalError", "RequestTimeout", "OperationAborted", "Throttling", "Other"])
def test_what_s3_says_of_a_failure_tells_whether_it_passes(proxy: MisbehavingProxy, file: str, code: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>Wait.</Message></Error>".encode()
    proxy.rule = first(1, Answer(400, body))
    if code == "Other":
        with pytest.raises(ModelFileError, match=r"refused \(HTTP 400 Other: Wait\.\)"):
            read(patient(proxy), file)
    else:
        assert read(patient(proxy), file) == noise(SIZE)


def test_what_is_written_through_failures_is_whole(proxy: MisbehavingProxy, server: S3Server, root: str) -> None:
    content = noise(17_000_000)
    faults = iter([Answer(500), None, Drop(), None, Answer(503), None, Drop(after_asking=True), None, Answer(500)])
    proxy.rule = lambda request: next(faults, None)
    write(patient(proxy), f"{root}/file", content)
    assert server.get(f"{root}/file") == content
    assert next(faults, "used up") == "used up"


def test_a_commit_whose_answer_is_lost_is_found_done(proxy: MisbehavingProxy, server: S3Server, root: str) -> None:
    content, gone = noise(9_000_000), b"<Error><Code>NoSuchUpload</Code></Error>"  # S3's answer to a second commit, not moto's
    faults = iter([Drop(after_asking=True), Answer(404, gone)])
    proxy.rule = lambda request: next(faults) if is_commit(request) else None
    write(patient(proxy), f"{root}/file", content)
    assert server.get(f"{root}/file") == content
    assert len([request for request in proxy.requests if is_commit(request)]) == 2


def test_a_commit_of_an_upload_that_somebody_ended_is_an_error(proxy: MisbehavingProxy, server: S3Server, file: str) -> None:
    proxy.rule = always(Answer(404, b"<Error><Code>NoSuchUpload</Code></Error>"), is_commit)
    with pytest.raises(ModelFileError, match=rf"writing {file}: .*NoSuchUpload"):
        write(patient(proxy), file, noise(9_000_000))
    assert server.get(file) == noise(SIZE)


def test_a_truncated_body_is_continued_where_it_ended(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = first(2, Truncate(100_000), is_get)
    assert read(patient(proxy), file, 10, SIZE - 20) == noise(SIZE)[10:-10]
    ranges = [request.headers["Range"] for request in proxy.requests]
    assert ranges == [f"bytes={start}-{SIZE - 11}" for start in (10, 100_010, 200_010)]
    pinned = {request.headers["If-Match"] for request in proxy.requests[1:]}
    assert pinned == {patient(proxy).status(file).version}  # what is continued is of the version that was begun


def test_connections_are_used_again(proxy: MisbehavingProxy, file: str) -> None:
    filesystem = patient(proxy)
    filesystem.status(file)
    before = proxy.connections
    for _ in range(10):
        assert read(filesystem, file, 1, SIZE - 1) == noise(SIZE)[1:]
        filesystem.status(file)
    assert proxy.connections == before


def test_a_connection_reset_in_the_body_is_continued(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = first(2, Reset(100_000), is_get)
    assert read(patient(proxy), file) == noise(SIZE)
    assert len(proxy.requests) == 3


def test_a_body_that_trickles_is_given_up_for_another(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = first(1, Trickle(after_bytes=1000), is_get)
    filesystem = filesystem_at(proxy.url, timeout_s=3, deadline_s=6)
    assert read(filesystem, file) == noise(SIZE)
    assert len(proxy.requests) == 2


def test_a_stall_in_the_body_is_continued(proxy: MisbehavingProxy, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S3FileSystem, "receive_bytes", 100_000)
    proxy.rule = first(1, Trickle(pause_s=600, after_bytes=101_000), is_get)
    filesystem = filesystem_at(proxy.url, timeout_s=1, deadline_s=40)
    assert read(filesystem, file) == noise(SIZE)
    assert proxy.requests[-1].headers["Range"].startswith("bytes=100000-")


# -- failures that do not pass -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_store_that_fails_for_ever_is_a_source_error(proxy: MisbehavingProxy, file: str, operation: str) -> None:
    proxy.rule = always(Answer(500, b"<Error><Code>InternalError</Code><Message>We are sorry.</Message></Error>"))
    with pytest.raises(ModelSourceError, match=r"s3://.*127\.0\.0\.1:\d+ failed \(HTTP 500.*check that it runs.*tried 4 times"):
        OPERATIONS[operation](patient(proxy), file)
    assert len(proxy.requests) == 4


@pytest.mark.parametrize(
    "fault", [Silence(), Drop(), Reset(0), Truncate(0), Trickle(), Trickle(pause_s=600)], ids=lambda fault: str(fault)
)
def test_a_read_that_never_succeeds_ends_at_its_deadline(proxy: MisbehavingProxy, file: str, fault: Fault) -> None:
    proxy.rule = always(fault)
    started = time.monotonic()
    with pytest.raises(ModelSourceError, match=rf"reading {file}: .*; check .*tried"):
        read(impatient(proxy), file)
    assert time.monotonic() - started < 60  # 3 s; far less than for ever
    assert len(proxy.requests) <= 3


def test_nobody_holds_a_buffer_whose_read_has_ended(
    proxy: MisbehavingProxy, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hps")  # a record would hold the error, and that the frames of the read
    proxy.rule = always(Trickle(after_bytes=1000))
    buffer = bytearray(SIZE)
    try:
        impatient(proxy).read_into(file, 0, memoryview(buffer))
    except ModelSourceError as error:
        message = str(error)
    assert "the body broke off" in message
    gc.collect()
    buffer.clear()  # a BufferError while anybody still has a view of it


@pytest.mark.parametrize("operation", ["status", "read_into", "write"])
def test_a_host_that_never_answers_is_given_up(file: str, operation: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = ModelSourceConfig(s3_endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}", **IMPATIENT)
        with pytest.raises(
            ModelSourceError, match=r"s3://.*(did not answer in time|no answer in).*check that (it|the host) is right"
        ):
            OPERATIONS[operation](S3FileSystem(settings), file)


def test_a_head_that_trickles_is_given_up(server: S3Server) -> None:
    """No timeout of a socket ends this one: there always is another byte in time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        filesystem = S3FileSystem(
            ModelSourceConfig(s3_endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}", **IMPATIENT)
        )

        stopping = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
                    while not stopping.wait(0.05):
                        connection.sendall(b"x")
                except OSError:
                    return

        threading.Thread(target=trickle, daemon=True).start()
        with pytest.raises(ModelSourceError, match=r"opening s3://bucket/key: no answer in"):
            filesystem.status("s3://bucket/key")
        stopping.set()


def test_a_port_where_nobody_listens_is_a_source_error(file: str) -> None:
    with socket.socket() as held:  # bound, so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        sources = sources_at(f"http://127.0.0.1:{held.getsockname()[1]}", **IMPATIENT)
        with pytest.raises(
            ModelSourceError, match=rf"{file}: 127\.0\.0\.1:\d+ .*cannot be reached.*model_source.s3_endpoint_url"
        ):
            open_sparse_model(file.removesuffix("/key"), DIM, sources=sources)


def test_a_failed_write_leaves_the_old_object_and_no_parts(proxy: MisbehavingProxy, server: S3Server, file: str) -> None:
    proxy.rule = after(1, Answer(500), lambda request: request.method == "PUT")
    with pytest.raises(ModelSourceError, match=f"writing {file}"):
        write(patient(proxy), file, noise(17_000_000))
    assert server.get(file) == noise(SIZE)
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=file.split("/")[2])


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_refusal_is_told_by_every_operation_at_once(proxy: MisbehavingProxy, file: str, operation: str) -> None:
    filesystem = patient(proxy)
    for answer, message in (
        (refusal(403, "AccessDenied"), "not allowed .*; grant s3:GetObject"),
        (refusal(400, "ExpiredToken"), "credentials have expired .*; renew them"),
        (refusal(301, "PermanentRedirect"), "in another region.*AWS_DEFAULT_REGION"),
    ):
        proxy.requests.clear()
        proxy.rule = answer
        with pytest.raises(ModelFileError, match=rf"s3://.*: .*{message}") as raised:
            OPERATIONS[operation](filesystem, file)
        assert not isinstance(raised.value, ModelSourceError)
        assert len(proxy.requests) <= 2  # nothing is tried again; after a HEAD, a GET asks for the reason


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(403, "AccessDenied"), r"not allowed \(HTTP 403 AccessDenied: What AccessDenied says\.\); grant s3:GetObject"),
        (refusal(403, "InvalidAccessKeyId"), "does not know the access key .*check AWS_ACCESS_KEY_ID"),
        (refusal(403, "SignatureDoesNotMatch"), "secret access key is wrong .*AWS_SECRET_ACCESS_KEY"),
        (refusal(400, "ExpiredToken"), "credentials have expired .*ExpiredToken.*renew them"),
        (refusal(403, "ExpiredToken"), "credentials have expired .*ExpiredToken.*renew them"),
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
        (refusal(418, "Teapot"), r"refused \(HTTP 418 Teapot: What Teapot says\.\)"),
    ],
    ids=lambda value: "" if callable(value) else value[:24],
)
def test_a_refusal_names_cause_and_cure(
    proxy: MisbehavingProxy, file: str, answer: Callable[[Request], Fault], message: str
) -> None:
    proxy.rule = answer
    for operation in ("status", "read_into"):
        with pytest.raises(ModelFileError, match=rf"{file}: .*{message}") as raised:
            OPERATIONS[operation](patient(proxy), file)
        assert "testing" not in str(raised.value)


def test_a_wrong_region_in_the_address_is_named(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = refusal(301, "PermanentRedirect", "", {"x-amz-bucket-region": "eu-central-1"})
    bucket = file.split("/")[2]
    address = f"https://{bucket}.s3.us-west-2.amazonaws.com/models/item/key"
    with pytest.raises(ModelFileError, match=rf"{address}: .*in region eu-central-1, .*name it in the address"):
        patient(proxy).status(address)
    assert any("/us-west-2/s3/" in request.headers["Authorization"] for request in proxy.requests)


def test_a_refusal_that_says_nothing_tells_what_it_may_mean(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = always(Answer(403))
    with pytest.raises(ModelFileError, match=rf"opening {file}: not allowed .*s3:ListBucket .*an object that is not there"):
        patient(proxy).status(file)


def test_what_is_no_s3_is_an_error(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = always(Answer(200, b"<html>Please log in", {"Content-Type": "text/html"}))
    for operation in ("status", "read_into", "list"):
        with pytest.raises(ModelFileError, match="s3://"):
            OPERATIONS[operation](patient(proxy), file)


# -- what was asked for, and nothing else --------------------------------------------------------------------------


def test_an_answer_without_the_range_is_refused(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = always(Reheaded({"Content-Range": None}, 200), is_get)
    with pytest.raises(ModelFileError, match=rf"reading {file}: got bytes 0 to 100, expected bytes 50 to 150; .*ranges"):
        read(patient(proxy), file, 50, 100)
    assert read(patient(proxy), file) == noise(SIZE)  # the whole object is the range that was asked for


def test_an_answer_of_another_range_is_refused(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = always(Reheaded({"Content-Range": f"bytes 51-150/{SIZE}"}), is_get)
    with pytest.raises(ModelFileError, match="got bytes 51 to 151, expected bytes 50 to 150"):
        read(patient(proxy), file, 50, 100)


def test_an_answer_of_another_version_is_refused_also_where_conditions_are_ignored(proxy: MisbehavingProxy, file: str) -> None:
    filesystem = patient(proxy)
    version = filesystem.status(file).version
    proxy.rule = always(Reheaded({"ETag": '"another"'}), is_get)
    with pytest.raises(ModelFileChangedError, match=rf"reading {file}: it changed"):
        read(filesystem, file, version=version)


def test_an_object_that_is_replaced_between_two_pieces_of_a_read_is_a_change(
    proxy: MisbehavingProxy, server: S3Server, file: str
) -> None:
    faults = iter([Truncate(1000), Before(lambda: server.put(file, noise(SIZE, seed=2)))])
    proxy.rule = lambda request: next(faults, None)
    with pytest.raises(ModelFileChangedError, match=rf"reading {file}: it changed"):
        read(patient(proxy), file)


def test_a_write_that_ends_as_another_object_is_an_error(proxy: MisbehavingProxy, server: S3Server, file: str) -> None:
    proxy.rule = always(Before(lambda: server.put(file, b"another's")), lambda request: request.method == "HEAD")
    with pytest.raises(ModelFileError, match=rf"writing {file}: got an object of 9 bytes, .*expected 5 bytes.*nobody else"):
        write(patient(proxy), file, b"ours.")


# -- models --------------------------------------------------------------------------------------------------------


def test_an_address_with_secrets_is_refused_without_them(server: S3Server) -> None:
    for source in ("s3://AKIA:secret@bucket/item", "https://bucket.s3.us-east-1.amazonaws.com/item?X-Amz-Signature=secret"):
        with pytest.raises(HPSError) as raised:
            open_sparse_model(source, DIM, sources=sources_at(server.url))
        assert "secret" not in str(raised.value)
