"""Objects of Google Cloud Storage that are being written."""

import base64
import re
import struct
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import google_crc32c

from hps.config_tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileWriter
from hps.filesystems.gcs_address import GcsAddress
from hps.filesystems.gcs_http import Answer, GcsHttp
from hps.filesystems.retries import retried

CHUNK_BYTES = 8 << 20  # a multiple of 256 KiB, as the service wants; larger ones are hardly faster
_CONTENT_TYPE = "application/octet-stream"
_INCOMPLETE = 308


class GcsWriter(FileWriter):
    """An object that is being uploaded. *One thread.*

    What fits one chunk is sent in one request by `commit`; the rest in a resumable upload, whose object appears with its last
    chunk. The service and this client both compare checksums. An upload that is never committed nor aborted is dropped by the
    service after a week. https://cloud.google.com/storage/docs/performing-resumable-uploads

    Args:
        http: asks the service.
        settings: attempts and deadlines.
        address: of the object.
    """

    def __init__(self, http: GcsHttp, settings: ModelSourceConfig, address: GcsAddress) -> None:
        self._http = http
        self._settings = settings
        self._address = address
        self._doing = f"writing {address.uri}"
        self._waiting = bytearray()
        self._sent = 0  # bytes before those
        self._crc = 0
        self._session = ""  # path and query of the resumable upload; who knows it may write to it
        self._ended = False

    def write(self, data: memoryview) -> None:
        """Append bytes; each full chunk is sent once it is known not to be the last."""
        done = 0
        while done < len(data):
            if len(self._waiting) == CHUNK_BYTES:
                self._send_waiting(last=False)
            count = min(CHUNK_BYTES - len(self._waiting), len(data) - done)
            self._waiting += data[done : done + count]
            done += count

    def commit(self) -> None:
        """Make the object whole; it replaces one of the same name."""
        if self._session:
            made = self._send_waiting(last=True)
        else:
            body = bytes(self._waiting)
            self._crc = google_crc32c.extend(self._crc, body)
            made = retried(self._settings, lambda seconds: self._upload_at_once(body, seconds))
            self._sent = len(body)
        self._ended = True
        self._check(made)

    def abort(self) -> None:
        """Cancel the upload; it is tried once, since the service forgets it by itself."""
        if self._ended:
            return
        self._ended = True
        self._waiting.clear()
        if self._session:
            with (
                suppress(ModelFileError),
                self._http.ask(
                    self._doing, self._settings.timeout_s, "DELETE", self._session, expected=(200, 204, 404, 410, 499)
                ),
            ):
                pass

    def _upload_at_once(self, body: bytes, seconds: float) -> dict[str, Any]:
        with self._http.ask(
            self._doing,
            seconds,
            "POST",
            f"upload/storage/v1/{self._address.objects_path}",
            parameters={"uploadType": "media", "name": self._address.name},
            headers={"Content-Type": _CONTENT_TYPE, "X-Goog-Hash": self._checksum},
            body=body,
        ) as answer:
            return answer.json()

    def _send_waiting(self, *, last: bool) -> dict[str, Any]:
        """Send what waits; gives what the service says of the object after the last chunk."""
        if not self._session:
            self._session = retried(self._settings, self._begin)
        chunk = bytes(self._waiting)  # its own: a request that was given up may still be reading it
        self._crc = google_crc32c.extend(self._crc, chunk)
        self._waiting.clear()
        made = _Chunk(self, chunk, last).send()
        self._sent += len(chunk)
        return made

    def _begin(self, seconds: float) -> str:
        with self._http.ask(
            self._doing,
            seconds,
            "POST",
            f"upload/storage/v1/{self._address.objects_path}",
            parameters={"uploadType": "resumable", "name": self._address.name},
            headers={"X-Upload-Content-Type": _CONTENT_TYPE},
            expected=(200, 201),
        ) as answer:
            # The host is the one that was asked; an emulator or a gateway may give a name of its own for it.
            place = urlsplit(answer.headers.get("Location", ""))
        if not place.path:
            raise ModelSourceError(f"{self._doing}: the service began an upload and did not say where")
        return f"{place.path.lstrip('/')}?{place.query}"

    @property
    def _checksum(self) -> str:
        return f"crc32c={base64.b64encode(struct.pack('>I', self._crc)).decode()}"

    def _check(self, made: dict[str, Any]) -> None:
        """Compare what the service says that it has; the object is removed if that is not what was sent."""
        size, crc = made.get("size"), made.get("crc32c")
        if size == str(self._sent) and (crc is None or f"crc32c={crc}" == self._checksum):
            return
        if generation := made.get("generation"):
            with (
                suppress(ModelFileError),
                self._http.ask(
                    self._doing,
                    self._settings.timeout_s,
                    "DELETE",
                    f"storage/v1/{self._address.object_path}",
                    parameters={"ifGenerationMatch": str(generation)},
                    expected=(200, 204),
                ),
            ):
                pass
        raise ModelFileError(
            f"{self._doing}: the service has {size} bytes with checksum {crc}, wanted {self._sent} with "
            f"{self._checksum.removeprefix('crc32c=')}: it was damaged on the way and has been removed; write it again"
        )


class _Chunk:
    """A chunk on its way, which may take several requests: the service may keep a part, and says how much that is."""

    def __init__(self, writer: GcsWriter, chunk: bytes, last: bool) -> None:
        self._writer = writer
        self._doing = writer._doing
        self._chunk = chunk
        self._first = self._kept = writer._sent
        self._end = writer._sent + len(chunk)
        self._total = str(self._end) if last else "*"
        self._unsure = False

    def send(self) -> dict[str, Any]:
        try:
            return retried(self._writer._settings, self._attempt)
        except ModelFileNotFoundError as error:
            raise ModelFileError(f"{self._doing}: the service dropped the upload; write it again from the start") from error

    def _attempt(self, seconds: float) -> dict[str, Any]:
        """One request for what is missing, after one for how much that is where the last one failed."""
        if self._unsure:
            made = self._put(seconds, b"", f"bytes */{self._total}")
            if made is not None:
                return made
        self._unsure = True
        piece = self._chunk[self._kept - self._first :] if self._kept > self._first else self._chunk
        made = self._put(seconds, piece, f"bytes {self._kept}-{self._end - 1}/{self._total}")
        if made is None:
            raise ModelSourceError(f"{self._doing}: the service kept {self._kept} of {self._end} bytes")
        return made

    def _put(self, seconds: float, piece: bytes, content_range: str) -> dict[str, Any] | None:
        """What the service says once it has all of the chunk, None before."""
        headers = {"Content-Range": content_range, "Content-Type": _CONTENT_TYPE}
        if self._total != "*":
            headers["X-Goog-Hash"] = self._writer._checksum
        with self._writer._http.ask(
            self._doing, seconds, "PUT", self._writer._session, headers=headers, body=piece, expected=(200, 201, _INCOMPLETE)
        ) as answer:
            if answer.status != _INCOMPLETE:
                return answer.json()
            self._note_kept(answer)
            answer.json()  # so that the connection can be used again
        return {} if self._kept == self._end and self._total == "*" else None

    def _note_kept(self, answer: Answer) -> None:
        match = re.fullmatch(r"bytes=0-(\d+)", answer.headers.get("Range", ""))
        self._kept = int(match[1]) + 1 if match else 0
        if not self._first <= self._kept <= self._end:
            raise ModelFileError(
                f"{self._doing}: the service kept {self._kept} bytes, wanted {self._first} to {self._end}; "
                "write it again from the start"
            )
