"""Writes objects to S3: small ones at once, larger ones in parts, seen by nobody before the last step."""

import hashlib
import time
from contextlib import suppress
from typing import Any

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.filesystems.base import FileWriter
from hps.filesystems.retries import retried
from hps.filesystems.s3_addresses import S3Address
from hps.filesystems.s3_client import S3Client
from hps.filesystems.s3_errors import error_code

_FIRST_PART_BYTES = 8 << 20
_PARTS_OF_A_SIZE = 1000  # then they double, so that the 10,000 parts that S3 allows hold the 5 TB that it allows


class S3Writer(FileWriter):
    """An object that is being written; a part of it is held here. *One thread.*

    A killed process leaves the parts that it has sent, until a lifecycle rule of the bucket (AbortIncompleteMultipartUpload)
    drops them.
    """

    def __init__(self, client: S3Client, settings: ModelSourceConfig, address: S3Address) -> None:
        self._client = client
        self._settings = settings
        self._address = address
        self._pending = bytearray()
        self._size = 0
        self._upload = ""
        self._parts: list[dict[str, Any]] = []
        self._ended = False

    def write(self, data: memoryview) -> None:
        data = data.cast("B")
        while data:
            room = part_bytes(len(self._parts)) - len(self._pending)
            self._pending += data[:room]
            self._size += len(data[:room])
            data = data[room:]
            if len(self._pending) == part_bytes(len(self._parts)):
                self._send_part()

    def commit(self) -> None:
        if self._upload:
            if self._pending:
                self._send_part()
            etag = self._complete()
        else:
            etag = self._call("put_object", Body=bytes(self._pending))["ETag"]
        self._ended = True
        # The size alone would also be right of an older object; another's ETag means that somebody writes at the same time.
        head = self._call("head_object")
        if head["ContentLength"] != self._size or head["ETag"] != etag:
            raise ModelFileError(
                f"writing {self._address.uri}: got an object of {head['ContentLength']} bytes, ETag {head['ETag']}, wanted "
                f"{self._size} bytes, ETag {etag}; see that nobody else writes it, and write it again"
            )

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._pending = bytearray()
        if self._upload:
            with suppress(ModelFileError):
                deadline = time.monotonic() + self._settings.timeout_s
                self._client.call(
                    "ending", self._address, deadline, "abort_multipart_upload", Key=self._address.key, UploadId=self._upload
                )

    def _send_part(self) -> None:
        if not self._upload:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        number = len(self._parts) + 1
        answer = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=self._pending)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._pending = bytearray()  # a new one: a call that was left behind may still read the old

    def _complete(self) -> str:
        try:
            answer = self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": self._parts})
        except ModelFileError as error:
            # An answer that got lost: what was asked for once may be done, and then cannot be done again.
            etag = _etag_of_parts([part["ETag"] for part in self._parts])
            if error_code(error.__cause__) == "NoSuchUpload" and self._call("head_object")["ETag"] == etag:
                return etag
            raise
        return str(answer["ETag"])

    def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        def attempt(left: float) -> dict[str, Any]:
            deadline = time.monotonic() + left
            return self._client.call("writing", self._address, deadline, operation, Key=self._address.key, **parameters)

        return retried(self._settings, attempt)


def part_bytes(number: int) -> int:
    """How long the part of this number (from 0 on) is, unless it is the last."""
    return _FIRST_PART_BYTES << (number // _PARTS_OF_A_SIZE)


def _etag_of_parts(etags: list[str]) -> str:
    """The ETag of an object that was put together of parts, unless it is encrypted with a key of its own (SSE-KMS)."""
    digests = b"".join(bytes.fromhex(digest) for etag in etags if len(digest := etag.strip('"')) == 32)
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"'
