"""Objects of Google Cloud Storage that are being written."""

import base64
import re
import struct
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import google_crc32c

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileWriter
from hps.filesystems.gcs_address import GcsAddress
from hps.filesystems.gcs_http import Answer, GcsHttp
from hps.filesystems.retries import retried

CHUNK_BYTES = 8 << 20  # a multiple of 256 KiB, as the service wants
_CONTENT_TYPE = "application/octet-stream"
_INCOMPLETE = 308


class GcsWriter(FileWriter):
    """An object that is being uploaded. *One thread.*

    What fits one chunk is sent in one request by `commit`; more in a resumable upload, whose object appears with its last
    chunk. The service refuses a last chunk whose checksum is not that of the whole; what it says that it has is compared, too.
    An upload that is neither committed nor aborted is dropped by the service after a week.

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
        self._upload: _ResumableUpload | None = None
        self._size = 0  # with those that wait
        self._crc = 0  # without them
        self._ended = False

    def write(self, data: memoryview) -> None:
        """Append bytes; a full chunk is sent once it is known not to be the last."""
        done = 0
        while done < len(data):
            if len(self._waiting) == CHUNK_BYTES:
                self._upload = self._upload or _ResumableUpload(self._http, self._settings, self._address)
                self._upload.send(self._take())
            count = min(CHUNK_BYTES - len(self._waiting), len(data) - done)
            self._waiting += data[done : done + count]
            self._size += count
            done += count

    def commit(self) -> None:
        """Make the object whole; it replaces one of the same name."""
        chunk = self._take()
        checksum = base64.b64encode(struct.pack(">I", self._crc)).decode()
        if self._upload:
            made = self._upload.send(chunk, checksum)
        else:
            made = retried(self._settings, lambda seconds: self._send_whole(chunk, checksum, seconds))
        self._ended = True
        self._check(made, checksum)

    def abort(self) -> None:
        """Cancel the upload; it is tried once, since the service forgets it by itself."""
        if not self._ended:
            self._ended = True
            self._waiting.clear()
            if self._upload:
                self._upload.cancel()

    def _take(self) -> bytes:
        """What waits, as bytes of its own: a request that was given up may still be sending them."""
        chunk = bytes(self._waiting)
        self._waiting.clear()
        self._crc = google_crc32c.extend(self._crc, chunk)
        return chunk

    def _send_whole(self, body: bytes, checksum: str, seconds: float) -> dict[str, Any]:
        with self._http.ask(
            self._doing,
            seconds,
            "POST",
            f"upload/storage/v1/{self._address.objects_path}",
            parameters={"uploadType": "media", "name": self._address.name},
            headers={"Content-Type": _CONTENT_TYPE, "X-Goog-Hash": f"crc32c={checksum}"},
            body=body,
        ) as answer:
            return answer.json()

    def _check(self, made: dict[str, Any], checksum: str) -> None:
        """Compare what the service says that it has; the object is removed if that is not what was sent."""
        size, crc = made.get("size"), made.get("crc32c", checksum)
        if size == str(self._size) and crc == checksum:
            return
        if generation := made.get("generation"):
            path, exactly_it = f"storage/v1/{self._address.object_path}", {"ifGenerationMatch": str(generation)}
            asking = self._http.ask(
                self._doing, self._settings.timeout_s, "DELETE", path, parameters=exactly_it, expected=(200, 204)
            )
            with suppress(ModelFileError), asking:
                pass
        raise ModelFileError(
            f"{self._doing}: the service says that it has {size} bytes with checksum {crc}, wanted {self._size} with "
            f"{checksum}: they were damaged on the way; write it again"
        )


class _ResumableUpload:
    """An upload in chunks. *One thread.* https://cloud.google.com/storage/docs/performing-resumable-uploads

    The service may keep a part of a chunk, and says how much it has; the next request goes on from there.
    """

    def __init__(self, http: GcsHttp, settings: ModelSourceConfig, address: GcsAddress) -> None:
        self._http = http
        self._settings = settings
        self._address = address
        self._doing = f"writing {address.uri}"
        self._kept = 0  # bytes that the service has
        self._session = retried(settings, self._begin)  # path and query; who knows them may write

    def send(self, chunk: bytes, checksum: str = "") -> dict[str, Any]:
        """Send the next bytes. A checksum of all bytes says that these are the last; gives what the service then says.

        Raises:
            ModelFileError: they were not taken.
        """
        first, end = self._kept, self._kept + len(chunk)
        total = str(end) if checksum else "*"
        headers = {"Content-Type": _CONTENT_TYPE} | ({"X-Goog-Hash": f"crc32c={checksum}"} if checksum else {})
        unsure = False

        def put(seconds: float, place: str, body: bytes = b"") -> dict[str, Any] | None:
            """What the service says of the object once it has all of these bytes, None before."""
            with self._http.ask(
                self._doing,
                seconds,
                "PUT",
                self._session,
                headers={**headers, "Content-Range": f"bytes {place}/{total}"},
                body=body,
                expected=(200, 201, _INCOMPLETE),
            ) as answer:
                said = answer.json()  # read in any case, so that the connection can be used again
                if answer.status != _INCOMPLETE:
                    return said
                self._note_kept(answer, first, end)
            return {} if self._kept == end and not checksum else None

        def attempt(seconds: float) -> dict[str, Any]:
            nonlocal unsure
            made = put(seconds, "*") if unsure else None  # how much arrived of what failed
            unsure = True
            if made is None:
                made = put(seconds, f"{self._kept}-{end - 1}", chunk[self._kept - first :])
            if made is None:
                raise ModelSourceError(f"{self._doing}: the service kept {self._kept} of {end} bytes")
            return made

        try:
            return retried(self._settings, attempt)
        except ModelFileNotFoundError as error:
            raise ModelFileError(f"{self._doing}: the service dropped the upload; write it again from the start") from error

    def cancel(self) -> None:
        """Drop what was sent, if the service answers."""
        gone = (200, 204, 404, 410, 499)
        asking = self._http.ask(self._doing, self._settings.timeout_s, "DELETE", self._session, expected=gone)
        with suppress(ModelFileError), asking:
            pass

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
            answer.json()
            # The host is the one that was asked: an emulator or a gateway may give a name of its own for it.
            place = urlsplit(answer.headers.get("Location", ""))
        if not place.path:
            raise ModelSourceError(f"{self._doing}: the service began an upload and did not say where")
        return f"{place.path.lstrip('/')}?{place.query}"

    def _note_kept(self, answer: Answer, first: int, end: int) -> None:
        match = re.fullmatch(r"bytes=0-(\d+)", answer.headers.get("Range", ""))
        self._kept = int(match[1]) + 1 if match else 0
        if not first <= self._kept <= end:
            raise ModelFileError(
                f"{self._doing}: the service kept {self._kept} bytes, wanted {first} to {end}; write it again from the start"
            )
