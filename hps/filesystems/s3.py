"""Files in Amazon S3 and in what speaks its protocol (MinIO, Ceph), through boto3."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileWriter
from hps.filesystems.object_store import (
    BodyBrokenError,
    ObjectAddress,
    ObjectStore,
    ObjectWriter,
    RangeAnswer,
    RangeRefusedError,
    without_secrets,
)
from hps.filesystems.retries import retried, within
from hps.filesystems.s3_errors import FAILURES, error_code, s3_failure

_DEFAULT_REGION = "us-east-1"
_FIRST_PART_BYTES = 8 << 20
_PARTS_OF_A_SIZE = 1000  # then they double, so that the 10,000 parts that S3 allows hold the 5 TB that it allows
_NO_SUCH_RANGE = {"PreconditionFailed", "412", "InvalidRange", "416"}

_URI = re.compile(r"(s3a?|https)://([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)
_REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
# Today's form, `s3-<region>` of old ones, dual-stack, and no region at all, which was us-east-1.
_HOST = re.compile(rf"(?:(.+)\.)?s3(?:[.-](?:dualstack\.)?({_REGION}))?\.amazonaws\.com(?:\.cn)?(?::443)?", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")  # new ones have 63 characters and no capitals; old ones may
_FORMS = "s3://bucket/key, https://bucket.s3.region.amazonaws.com/key or https://s3.region.amazonaws.com/bucket/key"


def s3_address(uri: str) -> ObjectAddress:
    """Take an address apart.

    The key of `s3://` is taken as it stands, also `%`, `?` and `#` in it; an https address is percent-decoded.

    Raises:
        ModelFileError: it is not an address of S3, has no bucket, or carries credentials, a query or a version. The message
            does not repeat what may be secret.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise _refused(uri, "this is no address of an S3 object")
    scheme, host, key = match.groups()
    if "@" in host or (":" in host and "@" in key):  # a secret key may have slashes
        raise _refused(uri, "it carries credentials, which belong in AWS's configuration or environment")
    bucket, region = host, ""
    if scheme.lower() == "https":
        if "?" in uri or "#" in uri:
            raise _refused(
                uri, "it has a query or a fragment; signed links and links to versions are not read (write ? as %3F)"
            )
        if (parts := _HOST.fullmatch(host)) is None:
            raise _refused(uri, f"{host!r} is no host of S3 that is known here")
        try:
            key = unquote(key, errors="strict")
        except UnicodeDecodeError as error:
            raise _refused(uri, "its percent signs do not decode to UTF-8") from error
        bucket, region = parts[1], (parts[2] or "").lower()
        if not bucket:
            bucket, _, key = key.partition("/")
    if not bucket:
        raise _refused(uri, "it names no bucket")
    if not _BUCKET.fullmatch(bucket):
        raise _refused(uri, f"no bucket can be called {bucket!r}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise _refused(ascii(uri), "a character of the key has no UTF-8 form") from error
    return ObjectAddress(uri, bucket, key.rstrip("/"), region)


def _refused(uri: str, why: str) -> ModelFileError:
    return ModelFileError(f"opening {without_secrets(uri)}: {why}; expected {_FORMS}")


class S3FileSystem(ObjectStore):
    """Reads and writes objects by `s3://` or https address. *Thread-safe.*

    The version of an object is its ETag, which every read of it demands; a replacement of the same bytes may keep it.
    Credentials, profile and, where an address names none, the region come from boto3's standard chain.
    """

    receive_bytes = 1 << 19

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._client = _S3Client(self.settings)

    def create(self, path: str) -> FileWriter:
        """Begin to write an object."""
        return _S3Writer(self._client, self.settings, self._object(path, "writing"))

    def _address(self, uri: str) -> ObjectAddress:
        return s3_address(uri)

    def _find(self, doing: str, address: ObjectAddress, deadline: float) -> FileStatus | None:
        try:
            head = self._client.call(doing, address, deadline, "head_object", Key=address.key)
        except ModelFileNotFoundError:
            return None
        except ModelSourceError:
            raise
        except ModelFileError as error:
            if error_code(error.__cause__).isdigit():  # the answer to HEAD has no body: a GET learns the reason
                answer = self._client.call(doing, address, deadline, "get_object", Key=address.key, Range="bytes=0-0")
                answer["Body"].close()
            raise
        if not head.get("ETag") or "ContentLength" not in head:
            raise ModelFileError(
                f"{doing} {address.uri}: got an answer without size or ETag; check that the endpoint is one of S3"
            )
        return FileStatus(head["ContentLength"], head["ETag"])

    def _page(self, doing: str, address: ObjectAddress, most: int, token: str, deadline: float) -> tuple[list[str], str]:
        query: dict[str, Any] = {"Prefix": address.prefix, "Delimiter": "/", "MaxKeys": most}
        if token:
            query["ContinuationToken"] = token
        page = self._client.call(doing, address, deadline, "list_objects_v2", **query)
        if "IsTruncated" not in page:  # S3 always says it; botocore takes an empty body for an empty page
            raise ModelSourceError(f"{doing} {address.uri}: S3 answered with an empty page; try again")
        keys = [entry["Key"] for entry in page.get("Contents", ())]
        prefixes = [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
        return keys + prefixes, page.get("NextContinuationToken", "")

    @contextmanager
    def _range(self, address: ObjectAddress, offset: int, end: int, version: str, deadline: float) -> Iterator[RangeAnswer]:
        query = {"Key": address.key, "Range": f"bytes={offset}-{end - 1}"} | ({"IfMatch": version} if version else {})
        try:
            answer = self._client.call("reading", address, deadline, "get_object", **query)
        except ModelFileError as error:
            code = error_code(error.__cause__)
            if isinstance(error, ModelFileNotFoundError) or code in _NO_SUCH_RANGE:
                raise RangeRefusedError(code) from error
            raise
        body = answer["Body"]

        def receive(size: int) -> bytes:
            if (left_s := deadline - time.monotonic()) < self.settings.timeout_s:
                _wait_at_most(body, left_s)
            try:
                piece: bytes = body.read(size)
            except (BotoCoreError, HTTPError, OSError) as error:
                raise BodyBrokenError(type(error).__name__) from error
            return piece

        # A timeout of a socket bounds the wait for one byte, but botocore waits for as many as it is asked for, however slowly
        # they come. From the deadline on, no byte is waited for.
        watchdog = threading.Timer(deadline - time.monotonic(), _wait_at_most, (body, 0.0))
        watchdog.daemon = True
        watchdog.start()
        try:
            yield RangeAnswer(
                answer.get("ETag", ""), answer.get("ContentRange", ""), int(answer.get("ContentLength", 0)), receive
            )
        finally:
            watchdog.cancel()
            body.close()

    def _remove(self, address: ObjectAddress, deadline: float) -> None:
        self._client.call("removing", address, deadline, "delete_object", Key=address.key)


def _wait_at_most(body: Any, seconds: float) -> None:
    with suppress(AttributeError, OSError):  # the body has ended meanwhile
        body.set_socket_timeout(max(seconds, 0.001))


class _S3Client:
    """One boto3 client for each region, made at first use. *Thread-safe.*

    It tries nothing again, and does not follow an answer that says that the bucket is in another region.
    """

    def __init__(self, settings: ModelSourceConfig) -> None:
        self._endpoint_url = settings.s3_endpoint_url or None
        self._config = Config(
            connect_timeout=settings.timeout_s,
            read_timeout=settings.timeout_s,
            max_pool_connections=max(32, 2 * settings.parallel_reads),  # several tables may be loaded at a time
            retries={"mode": "standard", "total_max_attempts": 1},
            tcp_keepalive=True,
            response_checksum_validation="when_required",  # a range has none
            user_agent_extra="hps",
        )
        self._clients: dict[str, Any] = {}

    def call(self, doing: str, address: ObjectAddress, deadline: float, operation: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the boto3 client, in a thread that is left behind at the deadline.

        The thread bounds what boto3 has no timeout for: name servers, sources of credentials, an answer whose head trickles.

        Args:
            doing: for messages, e.g. `reading`.
            address: gives the region and the parameter `Bucket`.
            deadline: by `time.monotonic`.
            operation: e.g. `get_object`.
            parameters: of the operation; a body must not be changed any more, also after an error.

        Raises:
            ModelSourceError: no answer, or a failure that may pass.
            ModelFileError: S3 refused; the error of boto3 is its cause.
        """
        client: Any = None

        def ask() -> dict[str, Any]:
            nonlocal client
            client = self._client(address.region)
            answer: dict[str, Any] = getattr(client, operation)(Bucket=address.bucket, **parameters)
            return answer

        try:
            return within(f"{doing} {address.uri}", deadline, ask)
        except ModelFileError:
            raise
        except FAILURES as error:
            raise s3_failure(doing, address, client, error) from error

    def _client(self, region: str) -> Any:
        client = self._clients.get(region)
        if client is None:
            # Without a lock, because credentials may come over the network; of two made at once, one is kept. A session of its
            # own, because sessions are not thread-safe and the default one is the application's.
            session = boto3.session.Session()
            client = session.client(
                "s3",
                region_name=region or session.region_name or _DEFAULT_REGION,
                endpoint_url=self._endpoint_url,
                config=self._config,
            )
            client.meta.events.register_first("needs-retry.s3", _raise_refusal)
            client = self._clients.setdefault(region, client)
        return client


def _raise_refusal(response: tuple[Any, dict[str, Any]] | None, operation: Any, **_: Any) -> None:
    """Raise what S3 refused, before botocore asks another region.

    botocore asks where the bucket is by HeadBucket, whose redirection it follows in the same way: without end, if no answer
    names the region (seen in 1.44). And whoever reads models from another region than they think pays for every byte.
    """
    if response is not None and response[0].status_code >= 300:
        raise ClientError(response[1], operation.name)


class _S3Writer(ObjectWriter):
    """An object that is being written to S3. *One thread.*

    A killed process leaves the parts that it has sent, until a lifecycle rule of the bucket (AbortIncompleteMultipartUpload)
    drops them.
    """

    def __init__(self, client: _S3Client, settings: ModelSourceConfig, address: ObjectAddress) -> None:
        super().__init__(settings, address)
        self._client = client
        self._parts: list[dict[str, Any]] = []

    def _part_bytes(self) -> int:
        return part_bytes(len(self._parts))

    def _send(self, part: bytes) -> None:
        if not self._upload:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        number = len(self._parts) + 1
        answer = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=part)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})

    def _finish(self, part: bytes) -> None:
        if self._upload:
            self._send(part)
            etag = self._complete()
            self._upload = ""
        else:
            etag = self._call("put_object", Body=part)["ETag"]
        # The size alone would also be right of an older object; another's ETag means that somebody writes at the same time.
        head = self._call("head_object")
        if head["ContentLength"] != self._size_bytes or head["ETag"] != etag:
            raise ModelFileError(
                f"writing {self._address.uri}: got an object of {head['ContentLength']} bytes, ETag {head['ETag']}, expected "
                f"{self._size_bytes} bytes, ETag {etag}; check that nobody else writes it, and write it again"
            )

    def _complete(self) -> str:
        try:
            answer = self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": self._parts})
        except ModelFileError as error:
            # The answer to an earlier attempt may be lost. It did then what cannot be done again.
            etag = _etag_of_parts([part["ETag"] for part in self._parts])
            if error_code(error.__cause__) == "NoSuchUpload" and self._call("head_object")["ETag"] == etag:
                return etag
            raise
        return str(answer["ETag"])

    def _cancel(self) -> None:
        query = {"Key": self._address.key, "UploadId": self._upload}
        deadline = time.monotonic() + self._settings.timeout_s
        with suppress(ModelFileError):
            self._client.call("ending", self._address, deadline, "abort_multipart_upload", **query)

    def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        def attempt(deadline: float) -> dict[str, Any]:
            return self._client.call("writing", self._address, deadline, operation, Key=self._address.key, **parameters)

        return retried(self._settings, attempt)


def part_bytes(number: int) -> int:
    """How long the part of this number (from 0 on) is, unless it is the last."""
    return _FIRST_PART_BYTES << (number // _PARTS_OF_A_SIZE)


def _etag_of_parts(etags: list[str]) -> str:
    """The ETag of an object that was put together of parts, unless it is encrypted with a key of its own (SSE-KMS)."""
    digests = b"".join(bytes.fromhex(digest) for etag in etags if len(digest := etag.strip('"')) == 32)
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"'
