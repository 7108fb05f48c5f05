"""Files in Amazon S3 and compatible stores (MinIO, Ceph), through boto3."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import unquote

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
from hps.filesystems.base import FileStatus, FileWriter, replaced, without_secrets
from hps.filesystems.failures import S3_MEANINGS, class_names, translated
from hps.filesystems.object_store import (
    ObjectAddress,
    ObjectStore,
    ObjectWriter,
    RangeRefusedError,
    range_mismatch,
)
from hps.filesystems.retries import ReadTarget

_DEFAULT_REGION = "us-east-1"
_RECEIVE_BYTES = 1 << 19  # at a time
_FIRST_PART_BYTES = 8 << 20
_PARTS_OF_A_SIZE = 1000  # then they double, so that the 10,000 parts of an S3 upload reach its limit of 5 TB
_ABSENT = {"NoSuchKey", "404"}
_PRECONDITION = {"PreconditionFailed", "412"}
_NO_SUCH_RANGE = _ABSENT | _PRECONDITION | {"InvalidRange", "416"}

_URI = re.compile(r"(s3a?|https)://([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)
_REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
# Today's form, the older `s3-<region>`, dual-stack, and no region at all, which was us-east-1.
_HOST = re.compile(rf"(?:(.+)\.)?s3(?:[.-](?:dualstack\.?)?({_REGION}))?\.amazonaws\.com(?:\.cn)?(?::443)?", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")  # new ones have 63 characters and no capitals; old ones may
_FORMS = "s3://bucket/key, https://bucket.s3.region.amazonaws.com/key or https://s3.region.amazonaws.com/bucket/key"


def s3_address(uri: str) -> ObjectAddress:
    """Parse an address.

    The key of `s3://` is literal, including `%`, `?` and `#`; an https address is percent-decoded.

    Raises:
        ModelFileError: it is not an address of S3, has no bucket, or carries credentials, a query or a version. The message
            does not repeat possible secrets.
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

    The version of an object is its ETag, which every read requires; a replacement with the same bytes may keep it. Credentials,
    profile and, unless the address names one, the region come from boto3's standard chain.
    """

    client_errors = (ClientError, BotoCoreError, ResponseParserError, OSError, ValueError)

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._config = Config(
            connect_timeout=self.settings.timeout_s,
            read_timeout=self.settings.timeout_s,
            max_pool_connections=max(32, 2 * self.settings.parallel_reads),  # several tables may be loaded at a time
            retries={"mode": "standard", "total_max_attempts": 1},
            tcp_keepalive=True,
            response_checksum_validation="when_required",  # a range has none
            user_agent_extra="hps",
        )
        self._clients: dict[str, Any] = {}  # by region

    def create(self, path: str) -> FileWriter:
        return _S3Writer(self, self._object(path, "writing"))

    def client(self, address: ObjectAddress) -> Any:
        """Return the boto3 client for the region of an address, made on first use."""
        client = self._clients.get(address.region)
        if client is None:
            # Without a lock, because credentials may come over the network; of two made at once, one is kept. A session of its
            # own, because sessions are not thread-safe and the default one is the application's.
            session = boto3.session.Session()
            client = session.client(
                "s3",
                region_name=address.region or session.region_name or _DEFAULT_REGION,
                endpoint_url=self.settings.s3_endpoint_url or None,
                config=self._config,
            )
            client.meta.events.register_first("needs-retry.s3", _raise_refusal)
            client = self._clients.setdefault(address.region, client)
        return client

    def _address(self, uri: str) -> ObjectAddress:
        return s3_address(uri)

    def _failure(self, doing: str, address: ObjectAddress, error: Exception) -> ModelFileError:
        client = self._clients.get(address.region)
        # Without the user and password of its URL.
        endpoint = "the endpoint" if client is None else str(client.meta.endpoint_url).rpartition("@")[2].rpartition("://")[2]
        line, answer, region = class_names(error), "", ""
        if isinstance(error, ClientError):
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            message = " ".join(str(_details(error).get("Message", "")).split())[:200]
            line = f"HTTP {status} {error_code(error)}"
            answer = line + (f": {message}" if message else "")
            region = _region(address, client, error, endpoint)
        fields = {"endpoint": endpoint, "answer": answer, "region": region, "bucket": address.bucket}
        return translated(f"{doing} {address.uri}", line, S3_MEANINGS, name=type(error).__name__, **fields)

    def _find(self, address: ObjectAddress) -> FileStatus | None:
        client = self.client(address)
        try:
            head = client.head_object(Bucket=address.bucket, Key=address.key)
        except ClientError as error:
            if (code := error_code(error)) in _ABSENT:
                return None
            if code.isdigit() and int(code) < 500:  # the response to HEAD has no body: a GET returns the reason
                client.get_object(Bucket=address.bucket, Key=address.key, Range="bytes=0-0")["Body"].close()
            raise
        if not head.get("ETag") or "ContentLength" not in head:
            raise ModelFileError(
                f"opening {address.uri}: got an answer without size or ETag; check that the endpoint is one of S3"
            )
        return FileStatus(head["ContentLength"], head["ETag"])

    def _pages(self, address: ObjectAddress, most: int) -> Iterator[list[str]]:
        pages = self.client(address).get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=address.bucket, Prefix=address.prefix, Delimiter="/", MaxKeys=most):
            if "IsTruncated" not in page:  # S3 always sends it; botocore takes an empty body for an empty page
                raise ModelSourceError(f"listing {address.uri}: S3 answered with an empty page; try again")
            keys = [entry["Key"] for entry in page.get("Contents", ())]
            yield keys + [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]

    def _range(self, address: ObjectAddress, offset: int, end: int, version: str, target: ReadTarget) -> str:
        query = {"Range": f"bytes={offset}-{end - 1}"} | ({"IfMatch": version} if version else {})
        try:
            answer = self.client(address).get_object(Bucket=address.bucket, Key=address.key, **query)
        except ClientError as error:
            if (code := error_code(error)) in _NO_SUCH_RANGE:
                raise RangeRefusedError(code) from error
            raise
        with closing(answer["Body"]) as body:
            if why := range_mismatch(answer.get("ContentRange", ""), answer["ContentLength"], offset, end):
                raise ModelSourceError(f"reading {address.uri}: {why}")
            for piece in body.iter_chunks(_RECEIVE_BYTES):
                target.write(piece)
        return str(answer.get("ETag", ""))

    def _put(self, address: ObjectAddress, content: bytes, version: str) -> str:
        # AWS checks both conditions since 2024, as do MinIO and Ceph; a store that ignores them lets the last writer win.
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        try:
            answer = self.client(address).put_object(Bucket=address.bucket, Key=address.key, Body=content, **condition)
        except ClientError as error:
            if error_code(error) in _ABSENT | _PRECONDITION:
                raise replaced(address.uri, version) from error
            raise
        return str(answer["ETag"])

    def _remove(self, address: ObjectAddress) -> None:
        self.client(address).delete_object(Bucket=address.bucket, Key=address.key)


def error_code(error: BaseException | None) -> str:
    """Return S3's error code; digits if a response had no body; empty without a response."""
    return str(_details(error).get("Code", "")) if isinstance(error, ClientError) else ""


def _details(error: ClientError) -> dict[str, Any]:
    details: dict[str, Any] = error.response.get("Error", {})
    return details


def _region(address: ObjectAddress, client: Any, error: ClientError, endpoint: str) -> str:
    """Describe where a bucket is that is not in the region of the request."""
    headers: dict[str, str] = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    theirs = headers.get("x-amz-bucket-region") or str(_details(error).get("Region", ""))
    where = f"is in region {theirs}" if theirs else "is in another region, or not here at all"
    cure = "name it in the address" if address.region else "set AWS_DEFAULT_REGION to it, or give the https address that has it"
    return f"{where}, {endpoint} was asked as {client.meta.region_name}; {cure}"


def _raise_refusal(response: tuple[Any, dict[str, Any]] | None, operation: Any, **_: Any) -> None:
    """Raise S3's refusal before botocore tries another region."""
    # botocore finds the bucket's region by HeadBucket, whose redirection it follows in the same way: endlessly, if no response
    # names the region (seen in 1.44). Besides, reads from an unexpected region cost money for every byte.
    if response is not None and response[0].status_code >= 300:
        raise ClientError(response[1], operation.name)


class _S3Writer(ObjectWriter):
    """An object that is being written to S3, at once or in parts. *One thread.*

    A killed process leaves its parts until a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) drops them.
    """

    # boto3's own transfers are not used: they read from a file, on threads that the interpreter waits for when it exits.

    def __init__(self, store: S3FileSystem, address: ObjectAddress) -> None:
        super().__init__(address)
        self._store = store
        self._parts: list[dict[str, Any]] = []
        self._upload = ""
        self._size_bytes = 0

    def part_bytes(self) -> int:
        return part_bytes(len(self._parts))

    def commit(self) -> None:
        part = self.take_pending()
        if self._upload:
            self._send(part)
            etag = self._complete()
            self._upload = ""
        else:
            self._size_bytes = len(part)
            etag = self._call("put_object", Body=part)["ETag"]
        # An older object may have the same size; a different ETag reveals a concurrent writer.
        head = self._call("head_object")
        if head["ContentLength"] != self._size_bytes or head["ETag"] != etag:
            raise ModelFileError(
                f"writing {self._address.uri}: got an object of {head['ContentLength']} bytes, ETag {head['ETag']}, expected "
                f"{self._size_bytes} bytes, ETag {etag}; check for another writer, and write it again"
            )

    def abort(self) -> None:
        self.take_pending()
        if self._upload:
            with suppress(ModelFileError):
                self._call("abort_multipart_upload", UploadId=self._upload)
            self._upload = ""

    def _send(self, part: bytes) -> None:
        if not self._upload:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        number = len(self._parts) + 1
        answer = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=part)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._size_bytes += len(part)

    def _complete(self) -> str:
        """Complete the upload; return the ETag of the object."""
        parts = {"Parts": self._parts}
        try:
            return str(self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts)["ETag"])
        except ModelFileError as error:
            # An attempt whose answer was lost may have completed it.
            etag = etag_of_parts([part["ETag"] for part in self._parts])
            if error_code(error.__cause__) == "NoSuchUpload" and self._call("head_object")["ETag"] == etag:
                return etag
            raise

    def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        def call() -> dict[str, Any]:
            method = getattr(self._store.client(self._address), operation)
            answer: dict[str, Any] = method(Bucket=self._address.bucket, Key=self._address.key, **parameters)
            return answer

        return self._store.request("writing", self._address, call)


def part_bytes(number: int) -> int:
    """Return the size of part `number` (from 0) unless it is the last."""
    return _FIRST_PART_BYTES << (number // _PARTS_OF_A_SIZE)


def etag_of_parts(etags: list[str]) -> str:
    """Return the ETag of an object uploaded in parts, unless SSE-KMS encrypts it: the MD5 of their MD5s, and their number."""
    digests = b"".join(bytes.fromhex(digest) for etag in etags if re.fullmatch("[0-9a-f]{32}", digest := etag.strip('"')))
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"'
