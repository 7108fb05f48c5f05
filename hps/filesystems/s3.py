"""Files in Amazon S3 and in what speaks its protocol (MinIO, Ceph), through boto3."""

import re
import time
from dataclasses import dataclass
from typing import Any

from urllib3.exceptions import HTTPError

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed
from hps.filesystems.retries import retried
from hps.filesystems.s3_addresses import S3Address, s3_address, s3_object
from hps.filesystems.s3_client import S3Client
from hps.filesystems.s3_errors import error_code
from hps.filesystems.s3_writer import S3Writer

_PIECE_BYTES = 1 << 20  # asked of a socket at a time: more than it has at once
_PAGE_NAMES, _MOST_PAGES = 1000, 100
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(slots=True)
class _Reading:
    """What is still to be read of a part. *One thread.*"""

    address: S3Address
    offset: int
    rest: memoryview
    version: str


class S3FileSystem(FileSystem):
    """Reads and writes objects by `s3://` or https address. *Thread-safe.*

    A directory is a prefix: it exists as long as an object's key begins with its name and a slash. The version of an object is
    its ETag, which every read of it demands; a replacement of the same bytes may keep it.
    """

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._client = S3Client(self.settings)

    def exists(self, path: str) -> bool:
        """Tell whether an object or prefix is there. A bucket that is not there is an error, since nothing can be put there."""
        address = s3_address(path)

        def attempt(left: float) -> bool:
            deadline = time.monotonic() + left
            found = address.key and self._head("looking for", address, deadline) is not None
            return bool(found) or self._is_directory("looking for", address, deadline)

        return retried(self.settings, attempt)

    def status(self, path: str) -> FileStatus:
        """Size and ETag of an object."""
        address = s3_object(path, "opening")
        return retried(self.settings, lambda left: self._status("opening", address, time.monotonic() + left))

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` from byte `offset`. What broke off is continued where it did, from the same version."""
        reading = _Reading(s3_object(path, "reading"), offset, buffer, version)
        if buffer.nbytes:
            retried(self.settings, lambda left: self._read(reading, left))

    def list(self, path: str) -> list[str]:
        """Names of the objects and prefixes right below a prefix, sorted; at most 100,000."""
        address = s3_address(path)
        return sorted(retried(self.settings, lambda left: self._names(address, time.monotonic() + left)))

    def create(self, path: str) -> FileWriter:
        """Begin to write an object: small ones are put at once, larger ones part by part."""
        return S3Writer(self._client, self.settings, s3_object(path, "writing"))

    def delete(self, path: str) -> None:
        """Remove an object."""
        address = s3_object(path, "removing")

        def attempt(left: float) -> None:
            self._client.call("removing", address, time.monotonic() + left, "delete_object", Key=address.key)

        retried(self.settings, attempt)

    def _head(self, doing: str, address: S3Address, deadline: float) -> dict[str, Any] | None:
        try:
            return self._client.call(doing, address, deadline, "head_object", Key=address.key)
        except ModelFileNotFoundError:
            return None
        except ModelSourceError:
            raise
        except ModelFileError as error:
            if error_code(error.__cause__).isdigit():  # the answer to HEAD has no body: GET is told the reason
                answer = self._client.call(doing, address, deadline, "get_object", Key=address.key, Range="bytes=0-0")
                answer["Body"].close()
            raise

    def _status(self, doing: str, address: S3Address, deadline: float) -> FileStatus:
        head = self._head(doing, address, deadline)
        if head is None:
            raise self._absent(doing, address, deadline)
        if not head.get("ETag") or "ContentLength" not in head:
            raise ModelFileError(
                f"{doing} {address.uri}: got an answer without size or ETag; see that the endpoint is one of S3"
            )
        return FileStatus(head["ContentLength"], head["ETag"])

    def _is_directory(self, doing: str, address: S3Address, deadline: float) -> bool:
        """Whether something is below a prefix; a bucket always is a directory.

        Raises:
            ModelFileNotFoundError: there is no such bucket.
        """
        prefix = f"{address.key}/" if address.key else ""
        page = self._client.call(doing, address, deadline, "list_objects_v2", Prefix=prefix, MaxKeys=1)
        return not prefix or bool(page.get("Contents"))

    def _absent(self, doing: str, address: S3Address, deadline: float) -> ModelFileError:
        if self._is_directory(doing, address, deadline):
            return ModelFileError(f"{doing} {address.uri}: it is a directory (a prefix of objects), wanted an object")
        return ModelFileNotFoundError(f"{doing} {address.uri}: there is no such object in bucket {address.bucket!r}")

    def _names(self, address: S3Address, deadline: float) -> set[str]:
        prefix = f"{address.key}/" if address.key else ""
        names: set[str] = set()
        query: dict[str, Any] = {"Prefix": prefix, "Delimiter": "/", "MaxKeys": _PAGE_NAMES}
        for _ in range(_MOST_PAGES):
            page = self._client.call("listing", address, deadline, "list_objects_v2", **query)
            names.update(entry["Key"][len(prefix) :] for entry in page.get("Contents", ()))
            names.update(entry["Prefix"][len(prefix) : -1] for entry in page.get("CommonPrefixes", ()))
            if not page.get("IsTruncated"):
                break
            query["ContinuationToken"] = page["NextContinuationToken"]
        else:
            raise ModelFileError(f"listing {address.uri}: it holds more than {len(names)} names, which no model does")
        if names or not prefix:
            return names - {""}  # some tools put an empty object where the directory is
        if self._head("listing", address, deadline) is not None:
            raise ModelFileError(f"listing {address.uri}: it is an object, wanted a directory (a prefix of objects)")
        raise ModelFileNotFoundError(f"listing {address.uri}: there is no such directory: no object in it")

    def _read(self, reading: _Reading, left: float) -> None:
        # Half of what is left, so that a connection that trickles is given up in time for another one.
        deadline = time.monotonic() + min(left, max(left / 2, self.settings.timeout_s))
        answer = self._get(reading, deadline)
        body = answer["Body"]
        try:
            self._check(reading, answer)
            self._fill(reading, body, deadline)
        except HTTPError as error:
            raise _broken_off(reading, type(error).__name__) from error
        finally:
            body.close()

    def _get(self, reading: _Reading, deadline: float) -> dict[str, Any]:
        address, start, end = reading.address, reading.offset, reading.offset + len(reading.rest)
        wanted = {"Key": address.key, "Range": f"bytes={start}-{end - 1}"}
        if reading.version:
            wanted["IfMatch"] = reading.version
        try:
            return self._client.call("reading", address, deadline, "get_object", **wanted)
        except ModelFileNotFoundError as error:
            raise self._absent("reading", address, deadline) from error
        except ModelFileError as error:
            code = error_code(error.__cause__)
            if code in ("PreconditionFailed", "412"):
                raise changed(address.uri, reading.version) from error
            if code in ("InvalidRange", "416"):
                now = self._status("reading", address, deadline)
                if reading.version and now.version != reading.version:
                    raise changed(address.uri, reading.version, now.version) from error
                raise _too_short(reading, now.size_bytes) from error
            raise

    def _check(self, reading: _Reading, answer: dict[str, Any]) -> None:
        """See that the answer is of the version and the range that were asked for, before a byte of it is used."""
        uri, end = reading.address.uri, reading.offset + len(reading.rest)
        version = answer.get("ETag", "")
        if reading.version and version != reading.version:
            raise changed(uri, reading.version, version)
        reading.version = version
        match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
        first, last = (int(match[1]), int(match[2])) if match else (0, int(answer.get("ContentLength", 0)) - 1)
        if first == reading.offset and last == end - 1:
            return
        if match and first == reading.offset and last < end - 1:
            raise _too_short(reading, last + 1)
        raise ModelFileError(
            f"reading {uri}: got bytes {first} to {last + 1}, wanted bytes {reading.offset} to {end}; the server does not "
            "serve ranges as S3 does"
        )

    def _fill(self, reading: _Reading, body: Any, deadline: float) -> None:
        # botocore's own reads end when all that was asked for is there, however slowly it comes; read1 is one call of recv.
        stream = body._raw_stream
        while reading.rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _broken_off(reading, "it came too slowly")
            if left < self.settings.timeout_s:
                body.set_socket_timeout(left)
            piece = stream.read1(min(len(reading.rest), _PIECE_BYTES))
            if not piece:
                raise _broken_off(reading, "it ended early")
            reading.rest[: len(piece)] = piece
            reading.rest = reading.rest[len(piece) :]
            reading.offset += len(piece)


def _broken_off(reading: _Reading, how: str) -> ModelSourceError:
    return ModelSourceError(
        f"reading {reading.address.uri}: the body broke off ({how}), {len(reading.rest)} bytes of a part are missing; see the "
        "network and the store; where they are slow, lower model_source.parallel_reads or raise its deadline_s"
    )


def _too_short(reading: _Reading, size: int) -> ModelFileError:
    return ModelFileError(
        f"reading {reading.address.uri}: it ends at byte {size}, wanted bytes {reading.offset} to "
        f"{reading.offset + len(reading.rest)}; it was cut short, or is being replaced"
    )
