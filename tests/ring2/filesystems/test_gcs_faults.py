"""Files in Google Cloud Storage, on an emulator; and what it alone answers: refusals, tokens, uploads that are interrupted.

The emulator does little of it, so most answers are written by hand, as Google documents them: no test here has seen the real
service. The sources are https://cloud.google.com/storage/docs/json_api/v1/status-codes and
https://cloud.google.com/storage/docs/performing-resumable-uploads.
"""

import base64
import gc
import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import google.auth
import google_crc32c
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.oauth2 import service_account

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
from hps.filesystems import gcs
from hps.filesystems.gcs import GcsFileSystem as Gcs
from hps.models.manifest import write_file
from hps.testing.filesystems import noise
from hps.testing.waiting import wait_until
from tests.servers.gcs_server import GcsServer
from tests.servers.misbehaving_proxy import Answer, Drop, Fault, Request, Silence, always, first
from tests.servers.misbehaving_proxy import MisbehavingProxy as Proxy
from tests.tables.object_store_contract import ObjectStoreContract
from tests.tables.object_store_faults import OPERATIONS, SIZE, ObjectStoreFaults, name_of, read

pytestmark = pytest.mark.gcs


CHUNK = 1 << 18


@pytest.fixture
def server(gcs_server: GcsServer) -> GcsServer:
    return gcs_server


def query(request: Request) -> dict[str, str]:
    """The parameters of a request."""
    return {name: values[0] for name, values in parse_qs(urlsplit(request.path).query).items()}


def refusal(status: int, reason: str, message: str) -> Answer:
    """An error as the JSON API words it: https://cloud.google.com/storage/docs/json_api/v1/status-codes"""
    causes = [{"domain": "global", "reason": reason, "message": message}]
    body = json.dumps({"error": {"code": status, "message": message, "errors": causes}})
    return Answer(status, body.encode(), {"Content-Type": "application/json; charset=UTF-8"})


class TestGcs(ObjectStoreFaults):
    store = Gcs
    version_header = "x-goog-generation"
    overloaded = "got HTTP 500; GCS is overloaded or limits the rate"
    unreachable = "(Connection refused|.*not known|.*resolution|.*no answer).*; check that the host"

    @pytest.fixture(autouse=True)
    def _small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gcs, "_PART_BYTES", CHUNK)

    def is_read(self, request: Request) -> bool:
        return query(request).get("alt") == "media"

    def condition(self, request: Request) -> str | None:
        return query(request).get("ifGenerationMatch")


def test_a_reason_that_passes_is_tried_again_and_in_the_end_told(proxy: Proxy, patient: Gcs, file: str) -> None:
    for operation in OPERATIONS.values():
        proxy.rule = always(refusal(403, "rateLimitExceeded", "Too fast"))
        with pytest.raises(ModelSourceError, match=r"got HTTP 403 \(Too fast\).*limits the rate.*tried 4 times"):
            operation(patient, file)
        proxy.rule = first(2, refusal(403, "rateLimitExceeded", "Too fast"))
        operation(patient, file)


def test_answers_of_no_object_store_are_refused(proxy: Proxy, patient: Gcs, file: str) -> None:
    said = "Bucket is a requester pays bucket but no user project provided."
    compressed = json.dumps({"size": "100", "generation": "1", "contentEncoding": "gzip"}).encode()
    for answer, error, message in (
        (
            Answer(200, b"<html>Please log in</html>", {"Content-Type": "text/html"}),
            *(ModelSourceError, "not one of Google Cloud Storage"),
        ),
        (Answer(302, b"", {"Location": "http://127.0.0.1:1/"}), ModelFileError, r"got HTTP 302.*gcs_endpoint_url"),
        (Answer(200, compressed), ModelFileError, "Content-Encoding gzip.*upload it without compression"),
        (refusal(400, "required", said), ModelFileError, rf"{file}: got HTTP 400 \({said}\)"),
    ):
        proxy.rule = always(answer)
        with pytest.raises(error, match=message):
            patient.status(file)


def crc_of(content: bytes) -> str:
    return base64.b64encode(struct.pack(">I", google_crc32c.value(content))).decode()


ANONYMOUS = "Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object."


@pytest.mark.parametrize(("status", "reason"), [(401, "required"), (403, "forbidden")])
def test_no_permission_without_credentials_says_how_to_give_them(
    proxy: Proxy, patient: Gcs, file: str, status: int, reason: str
) -> None:
    proxy.rule = always(refusal(status, reason, ANONYMOUS))
    for operation in (patient.status, patient.exists, patient.list, patient.delete):
        with pytest.raises(
            ModelFileError, match=rf"{file}: .*Anonymous.*no Google credentials were found.*gcloud auth"
        ) as error:
            operation(file)
        assert not isinstance(error.value, ModelSourceError)
    with pytest.raises(ModelFileError, match=f"reading {file}: .*no Google credentials were found"):
        read(patient, file)
    assert len(proxy.requests) == 5  # none is tried twice


@pytest.fixture(scope="module")
def key() -> str:
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


class TokenHost:
    """Issues tokens, and demands the newest one before it lets a request through."""

    def __init__(self, proxy: Proxy) -> None:
        self.issued = 0
        self.demanded = 1
        self.answer: Fault | None = None
        proxy.rule = self.rule

    def rule(self, request: Request) -> Fault | None:
        if request.path == "/token":
            self.issued += 1
            token = json.dumps({"access_token": f"SECRET-{self.issued}", "expires_in": 3600, "token_type": "Bearer"})
            return self.answer or Answer(200, token.encode(), {"Content-Type": "application/json"})
        if request.headers.get("Authorization") != f"Bearer SECRET-{self.demanded}":
            return refusal(401, "authError", "Invalid Credentials")
        return None


@pytest.fixture
def token_host(proxy: Proxy) -> TokenHost:
    return TokenHost(proxy)


class Account(Gcs):
    """Asks with a service account, also over plain http."""

    def __init__(self, url: str, key: str, **settings: Any) -> None:
        super().__init__(ModelSourceConfig(**({"timeout_s": 20, "deadline_s": 40} | settings)))
        info = {"client_email": "reader@project.iam.gserviceaccount.com", "token_uri": f"{url}/token", "private_key": key}
        account = service_account.Credentials.from_service_account_info(info, scopes=["scope"])
        self.client = gcs.storage_client(url, account)


def test_a_token_is_asked_for_once_and_again_when_it_is_refused(
    proxy: Proxy, token_host: TokenHost, key: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login somebody password something\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))  # which does not replace the token
    filesystem = Account(proxy.url, key)
    for _ in range(3):
        assert read(filesystem, file) == noise(SIZE)
    assert filesystem.status(file).size_bytes == SIZE
    assert token_host.issued == 1
    token_host.demanded = 2
    assert read(filesystem, file) == noise(SIZE)
    assert token_host.issued == 2


REVOKED = Answer(400, b'{"error": "invalid_grant", "error_description": "Token has been revoked."}')


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (None, ModelFileError, "reading .*Invalid Credentials.*expired or revoked"),
        (REVOKED, ModelFileError, "revoked"),
        (Answer(401, b'{"error": "invalid_client", "access_token": "SECRET"}'), ModelFileError, "invalid_client.*renew them"),
        (Silence(), ModelSourceError, "no answer|timed out"),
    ],
    ids=name_of,
)
def test_a_host_that_gives_no_token_that_helps_is_an_error_within_the_deadline(
    proxy: Proxy, token_host: TokenHost, key: str, file: str, answer: Fault, kind: type[ModelFileError], why: str
) -> None:
    token_host.answer, token_host.demanded = answer, -1
    hasty = {"timeout_s": 0.5, "deadline_s": 3, "max_attempts": 2} if answer else {}
    with pytest.raises(ModelFileError, match=why) as error:
        read(Account(proxy.url, key, **hasty), file)
    assert type(error.value) is kind
    assert "SECRET" not in str(error.value)
    assert answer or token_host.issued == 2


def test_an_account_without_permission_is_told_the_role(proxy: Proxy, token_host: TokenHost, key: str, file: str) -> None:
    said = "reader@project.iam.gserviceaccount.com does not have storage.objects.get access (or it may not exist)."
    proxy.rule = lambda request: token_host.rule(request) if request.path == "/token" else refusal(403, "forbidden", said)
    with pytest.raises(ModelFileError, match=r"reader@project.*roles/storage\.objectViewer") as error:
        read(Account(proxy.url, key), file)
    assert "SECRET" not in str(error.value)


def test_a_token_is_not_sent_in_the_clear(
    proxy: Proxy, patient: Gcs, key: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"type": "service_account", "client_email": "a@b", "token_uri": f"{proxy.url}/token", "private_key": key}
    (tmp_path / "key.json").write_text(json.dumps(info))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    assert read(patient, file) == noise(SIZE)
    assert proxy.requests
    assert all(request.path != "/token" and "Authorization" not in request.headers for request in proxy.requests)


def test_a_search_for_credentials_that_gets_no_answer_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask the metadata server of a cloud machine, whose address Google's library reads when it is imported."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    stopping, asked = threading.Event(), []
    monkeypatch.setattr(google.auth, "default", lambda **_: asked.append(1) or stopping.wait())
    filesystem = Gcs(ModelSourceConfig(timeout_s=0.2, deadline_s=0.5, max_attempts=2))
    try:
        with pytest.raises(ModelSourceError, match="looking for Google credentials: no answer"):
            filesystem.status("gs://models/key")
    finally:
        stopping.set()
    assert 1 <= len(asked) <= 2


class Uploads:
    """Resumable uploads as documented: https://cloud.google.com/storage/docs/performing-resumable-uploads

    Attributes:
        content: what was kept.
        whole: whether the upload is complete.
        on_chunk: asked for each chunk that comes: how many of its bytes are kept, and what is answered in place of the truth.
    """

    def __init__(self, proxy: Proxy) -> None:
        self.content = bytearray()
        self.whole = self.removed = self.cancelled = False
        self.on_chunk: Callable[[int], tuple[int | None, Fault | None]] = lambda number: (None, None)
        self.chunks = 0
        self.hashes: list[str] = []
        self.crc: str | None = None
        self.url = proxy.url
        proxy.rule = self.rule

    def rule(self, request: Request) -> Fault:
        if request.method == "POST":
            return Answer(200, b"", {"Location": f"{self.url}/upload/storage/v1/b/models/o?upload_id=SECRET"})
        if request.method == "DELETE":
            self.cancelled |= "upload_id" in query(request)
            self.removed |= request.path.startswith("/storage/v1/b/models/o/file")
            return Answer(204)
        assert query(request) == {"upload_id": "SECRET"}
        bounds, _, total = request.headers["Content-Range"].removeprefix("bytes ").partition("/")
        if bounds == "*":
            return self.state()
        low, high = map(int, bounds.split("-"))
        assert high - low + 1 == len(request.body)
        assert low <= len(self.content), "what was sent does not go on where the service stands"
        assert total != "*" or len(request.body) % (1 << 18) == 0
        kept, fault = self.on_chunk(self.chunks)
        self.chunks += 1
        self.content += request.body[len(self.content) - low : kept]  # the service ignores what it has already
        self.whole = str(len(self.content)) == total
        if "X-Goog-Hash" in request.headers:
            self.hashes.append(request.headers["X-Goog-Hash"])
        return fault or self.state()

    def state(self) -> Fault:
        if not self.whole:
            return Answer(308, b"", {"Range": f"bytes=0-{len(self.content) - 1}"} if self.content else {})
        crc = self.crc or crc_of(bytes(self.content))
        return Answer(200, json.dumps({"size": str(len(self.content)), "crc32c": crc, "generation": "7"}).encode())


@pytest.fixture
def uploads(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Uploads:
    monkeypatch.setattr(gcs, "_PART_BYTES", 2 * CHUNK)
    return Uploads(proxy)


def test_an_upload_whose_last_answer_is_lost_is_whole_unless_it_was_damaged(patient: Gcs, uploads: Uploads) -> None:
    uploads.on_chunk = lambda number: (None, Drop() if number == 1 else None)
    write_file(patient, "gs://models/file", noise(3 * CHUNK))
    assert uploads.content == noise(3 * CHUNK)
    uploads.content, uploads.crc = bytearray(), "AAAAAA=="
    with pytest.raises(ModelFileError, match=r"writing gs://models/file: the checksum differs: .*write it again"):
        write_file(patient, "gs://models/file", noise(3 * CHUNK))
    assert uploads.removed


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (refusal(404, "notFound", "Not Found"), "the service dropped the upload"),
        (Answer(410), "got HTTP 410"),
        (Answer(308, b"", {"Range": "bytes=0-99"}), "100 bytes have already been updated"),
        (refusal(400, "invalid", "Provided CRC32C does not match"), "does not match"),
        (refusal(403, "forbidden", "no storage.objects.create access"), "no storage.objects.create access"),
        (refusal(503, "backendError", "Try again"), "got HTTP 503"),
        (Silence(), "no answer"),
        *((None, str(size)) for size in (2 * CHUNK + 1, 7 * CHUNK)),  # it is aborted
    ],
    ids=name_of,
)
def test_an_upload_that_cannot_go_on_or_is_aborted_is_cancelled(
    patient: Gcs, hasty: Gcs, uploads: Uploads, fault: Fault | None, why: str
) -> None:
    if fault is None:
        writer = patient.create("gs://models/file")
        writer.write(memoryview(noise(int(why))))
        writer.abort()
    else:
        goes_on = isinstance(fault, Silence) or (isinstance(fault, Answer) and fault.status == 503)  # until the deadline
        uploads.on_chunk = lambda number: (None, None) if number == 0 else (0, fault)
        with pytest.raises(ModelFileError, match=rf"writing gs://models/file: .*{why}") as error:
            write_file(hasty if goes_on else patient, "gs://models/file", noise(5 * CHUNK))
        assert "SECRET" not in str(error.value)
    assert not uploads.whole
    wait_until(lambda: uploads.cancelled, "the thread of the upload cancels it")


@pytest.mark.parametrize(
    ("kept", "fault"), [(None, Drop()), (0, refusal(503, "backendError", "Try again")), (CHUNK, Drop())], ids=name_of
)
def test_an_upload_goes_on_where_the_service_stands(patient: Gcs, uploads: Uploads, kept: int | None, fault: Fault) -> None:
    content = noise(5 * CHUNK + 99)
    failing = {0, 2, 4}
    uploads.on_chunk = lambda number: (kept, fault) if number in failing else (None, None)
    write_file(patient, "gs://models/file", content)
    assert uploads.content == content
    assert (uploads.whole, uploads.cancelled) == (True, False)
    assert set(uploads.hashes) == {f"crc32c={crc_of(content)}"}


@pytest.fixture
def filesystem(server: GcsServer) -> Gcs:
    return Gcs(ModelSourceConfig(gcs_endpoint_url=server.url))


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
    server: GcsServer, filesystem: Gcs, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(f"gs://{bucket}/file", b"x")
    for form in ("http://127.0.0.1:{}", "127.0.0.1:{}"):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", form.format(server.port))
        assert Gcs().status(f"gs://{bucket}/file").size_bytes == 1
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert Gcs(ModelSourceConfig(gcs_endpoint_url=f"{server.url}/")).exists(f"gs://{bucket}")
    filesystem.delete("gs://no-such-bucket/model/key")  # what is in no bucket need not be removed


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "_PART_BYTES", CHUNK)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(
    ("size", "step"), [(CHUNK - 1, 9_000), (CHUNK, CHUNK), (CHUNK + 1, 9_000), (2 * CHUNK, 10 * CHUNK), (3 * CHUNK + 7, CHUNK)]
)
def test_what_is_uploaded_in_chunks_arrives_whole(
    filesystem: Gcs, server: GcsServer, bucket: str, size: int, step: int
) -> None:
    content, path = noise(size), f"gs://{bucket}/file"
    writer = filesystem.create(path)
    for start in range(0, size, step):
        writer.write(memoryview(content)[start : start + step])
        assert server.get(path) is None
    writer.commit()
    assert server.get(path) == content


@pytest.mark.usefixtures("_small_chunks")
def test_an_upload_whose_writer_is_lost_is_not_completed(server: GcsServer, filesystem: Gcs, bucket: str) -> None:
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
    with Proxy(server.port) as proxy:
        writer = Gcs(ModelSourceConfig(gcs_endpoint_url=proxy.url)).create(f"gs://{bucket}/file")
        writer.write(memoryview(noise(100_000)))
        writer.commit()
        assert len(proxy.requests) == 1
    assert server.get(f"gs://{bucket}/file") == noise(100_000)
