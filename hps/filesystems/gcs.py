"""Files in Google Cloud Storage, through google-cloud-storage and the session of google-auth that it is built on."""

import base64
import io
import logging
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import google.auth
import google_crc32c
from google.api_core.exceptions import NotFound
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage import Client
from requests import HTTPError as RefusedError
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileWriter
from hps.filesystems.gcs_errors import FAILURES, gcs_failure, unusable_credentials
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

_log = logging.getLogger(__name__)
T = TypeVar("T")

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_CONNECTIONS = 64  # that are kept; several tables may be loaded at a time
_PART_BYTES = 8 << 20  # a multiple of 256 KiB, as the service demands
_CONTENT_TYPE = "application/octet-stream"
_INCOMPLETE = 308
_NO_SUCH_RANGE = (404, 412, 416)

_FORMS = "gs://bucket/object or https://storage.googleapis.com/bucket/object"
# https://cloud.google.com/storage/docs/buckets#naming, without what only Google's own reserve.
_BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_URI = re.compile(
    rf"(?:(?i:gs)://|(?i:https://storage\.(?:googleapis|cloud\.google)\.com)(?::443)?/)({_BUCKET})(?:/(.*))?"
    rf"|(?i:https://)((?i:{_BUCKET}))(?i:\.storage\.googleapis\.com)(?::443)?(?:/(.*))?",
    re.DOTALL,
)


def gcs_address(uri: str) -> ObjectAddress:
    """Take a URI apart. A `gs` URI is literal; percent signs of an `https` address are decoded.

    Raises:
        ModelFileError: it is not the address of an object in GCS. The message does not repeat what may be secret.
    """
    match = _URI.fullmatch(uri)
    literal = uri[:5].lower() == "gs://"
    if match is None or (not literal and ("?" in uri or "#" in uri)):
        raise ModelFileError(
            f"opening {without_secrets(uri)}: this is no address of an object in GCS, expected {_FORMS}; signed links are not "
            "read, and another endpoint is set as model_source.gcs_endpoint_url"
        )
    bucket, name = match[1] or match[3].lower(), (match[2] or match[4] or "").rstrip("/")
    if not literal:
        name = unquote(name, errors="surrogateescape").rstrip("/")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(f"opening {uri!r}: got an object name that is not Unicode text; no object can have it") from error
    if name in (".", "..") or re.search(r"[\0\r\n]", name):
        raise ModelFileError(f"opening {uri!r}: got object name {name!r}, which no object can have")
    return ObjectAddress(uri, bucket, name)


class GcsFileSystem(ObjectStore):
    """Reads and writes objects by `gs://bucket/object`, or by the https addresses of the same. *Thread-safe.*

    The version of an object is its generation. Google's Application Default Credentials say who asks; they are looked for at
    first use. Without any, objects that everybody may read are read.
    """

    receive_bytes = 1 << 18  # of one receive; http.client allocates as much each time

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._client = _GcsClient(self.settings)

    def create(self, path: str) -> FileWriter:
        """Begin to upload an object."""
        return _GcsWriter(self._client, self.settings, self._object(path, "writing"))

    def _address(self, uri: str) -> ObjectAddress:
        return gcs_address(uri)

    def _find(self, doing: str, address: ObjectAddress, deadline: float) -> FileStatus | None:
        def ask(access: GcsAccess, timeout: float) -> Any:
            return access.client.bucket(address.bucket).get_blob(address.key, timeout=timeout, retry=None)

        blob = self._client.ask(doing, address, deadline, ask)
        if blob is None:
            return None
        if blob.content_encoding not in (None, "", "identity"):
            raise ModelFileError(
                f"{doing} {address.uri}: it is stored with Content-Encoding {blob.content_encoding}, of which no range can be "
                "read; upload it without compression (gsutil cp without -z and -Z)"
            )
        if blob.size is None or blob.generation is None:
            raise ModelSourceError(f"{doing} {address.uri}: got an answer that is not one of Google Cloud Storage")
        return FileStatus(blob.size, str(blob.generation))

    def _page(self, doing: str, address: ObjectAddress, most: int, token: str, deadline: float) -> tuple[list[str], str]:
        def ask(access: GcsAccess, timeout: float) -> tuple[list[str], str]:
            found = access.client.list_blobs(
                address.bucket,
                prefix=address.prefix,
                delimiter="/",
                page_size=most,
                page_token=token or None,
                fields="items(name),prefixes,nextPageToken",
                timeout=timeout,
                retry=None,
            )
            names = [blob.name for blob in next(found.pages, ())]
            return names + sorted(found.prefixes), found.next_page_token or ""

        try:
            return self._client.ask(doing, address, deadline, ask)
        except ModelFileNotFoundError as error:
            raise ModelFileNotFoundError(
                f"{doing} {address.uri}: there is no bucket {address.bucket!r}; create it, or correct the address"
            ) from error

    @contextmanager
    def _range(self, address: ObjectAddress, offset: int, end: int, version: str, deadline: float) -> Iterator[RangeAnswer]:
        # The library's own downloads tell neither which range came nor bound how slowly it comes.
        path = f"download/storage/v1/b/{quote(address.bucket, safe='')}/o/{quote(address.key, safe='')}"
        query = {"alt": "media"} | ({"ifGenerationMatch": version} if version else {})
        headers = {"Range": f"bytes={offset}-{end - 1}", "Accept-Encoding": "identity"}

        def ask(access: GcsAccess, timeout: float) -> Any:
            url = f"{access.endpoint}/{path}"
            answer = access.session.get(url, params=query, headers=headers, timeout=timeout, stream=True)
            if answer.status_code not in (200, 206):
                answer.content  # noqa: B018 - read while time is bounded; the connection can then be used again
                if answer.status_code not in _NO_SUCH_RANGE:
                    raise RefusedError(response=answer)
            if time.monotonic() > deadline:  # nobody waits for it any more
                answer.close()
            return answer

        answer = self._client.ask("reading", address, deadline, ask)

        def receive(size: int) -> bytes:
            try:
                piece: bytes = answer.raw.read1(size, decode_content=False)
            except (HTTPError, OSError, ValueError) as error:
                raise BodyBrokenError(type(error).__name__) from error
            return piece

        try:
            if answer.status_code in _NO_SUCH_RANGE:
                raise RangeRefusedError(f"HTTP {answer.status_code}")
            # An emulator or a cache may not heed the condition. A generation is a number; without the header, trust it.
            generation = answer.headers.get("x-goog-generation", version)
            length = int(answer.headers.get("Content-Length", 0))
            yield RangeAnswer(generation, answer.headers.get("Content-Range", ""), length, receive)
        finally:
            answer.close()

    def _remove(self, address: ObjectAddress, deadline: float) -> None:
        def ask(access: GcsAccess, timeout: float) -> None:
            with suppress(NotFound):
                access.client.bucket(address.bucket).blob(address.key).delete(timeout=timeout, retry=None)

        self._client.ask("removing", address, deadline, ask)


class GcsAccess:
    """An endpoint and who asks there. *Thread-safe*, as google-cloud-storage shares a session between threads, too.

    Args:
        endpoint: scheme and host, without a slash at the end.
        credentials: of google-auth; None where there are none.

    Attributes:
        session: sends requests with a valid token.
        client: of google-cloud-storage, on the same session.
    """

    def __init__(self, endpoint: str, credentials: Any = None) -> None:
        self.endpoint = endpoint
        self.anonymous = credentials is None
        # A refused token is renewed once. There is none to renew without credentials.
        renewal = {"refresh_status_codes": ()} if self.anonymous else {"max_refresh_attempts": 1}
        self.session: Any = AuthorizedSession(credentials or AnonymousCredentials(), **renewal)
        self.session.auth = lambda request: request  # otherwise a password of ~/.netrc replaces the token
        self.session.max_redirects = 0
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS))
        # `_http` is documented, and may change: pyproject.toml limits the version. Without it the client makes a session of its
        # own, in which none of this is set.
        used = self.session.credentials
        options = {"api_endpoint": endpoint, "universe_domain": used.universe_domain}
        self.client: Any = Client(project=None, credentials=used, client_options=options, _http=self.session)


class _GcsClient:
    """Asks the service. *Thread-safe.* It finds out who asks at first use, and again if that failed; it tries nothing again."""

    def __init__(self, settings: ModelSourceConfig) -> None:
        self._settings = settings
        self._access: GcsAccess | None = None

    def ask(self, doing: str, address: ObjectAddress, deadline: float, question: Callable[[GcsAccess, float], T]) -> T:
        """Call `question` with the access and a timeout in seconds, in a thread that is left behind at the deadline.

        The thread bounds what has no timeout: name servers, hosts that issue tokens, an answer whose head trickles.

        Raises:
            ModelSourceError: no answer, or a failure that may pass.
            ModelFileError: the service refused; the error of Google's library is its cause.
        """
        access = self._access or self._find(deadline)
        timeout = min(self._settings.timeout_s, max(deadline - time.monotonic(), 0.001))
        try:
            return within(f"{doing} {address.uri}", deadline, lambda: question(access, timeout))
        except ModelFileError:
            raise
        except FAILURES as error:
            raise gcs_failure(f"{doing} {address.uri}", error, anonymous=access.anonymous) from error

    def _find(self, deadline: float) -> GcsAccess:
        """Find the endpoint and Application Default Credentials, which may ask the metadata server of a cloud machine.

        The endpoint is the configured one, else STORAGE_EMULATOR_HOST, else Google's; the rule is the library's. Over plain
        http, which emulators speak, no credentials are looked for: a token must not be sent in the clear.

        Raises:
            ModelFileError: there are credentials and they cannot be used.
            ModelSourceError: the metadata server did not answer in time.
        """
        endpoint: str = (self._settings.gcs_endpoint_url or Client.create_anonymous_client().api_endpoint).rstrip("/")
        if "://" not in endpoint:  # STORAGE_EMULATOR_HOST=host:port, as other Google libraries take it
            endpoint = f"http://{endpoint}"

        def find() -> GcsAccess:
            credentials = None
            try:
                if not endpoint.startswith("http://"):
                    credentials, _ = google.auth.default(scopes=_SCOPES)
            except DefaultCredentialsError as error:
                # The same class says that a key file is missing or broken, which must not end in anonymous access.
                if "default credentials were not found" not in str(error):
                    raise
            return GcsAccess(endpoint, credentials)

        try:
            found = within("looking for Google credentials", deadline, find)
        except ModelFileError:
            raise  # of `within`; it is an OSError, too
        except (GoogleAuthError, OSError, ValueError) as error:
            raise unusable_credentials(error) from error
        # Without a lock, because credentials may come over the network; of two that were found at once, one is kept.
        if self._access is None:
            self._access = found
            if found.anonymous and endpoint.startswith("https://"):
                _log.info("No Google credentials were found: reading GCS without any, which public buckets allow.")
        return self._access


class _GcsWriter(ObjectWriter):
    """An object that is being uploaded. *One thread.*

    What fits into one part is sent in one request; more in a resumable upload, whose object appears with its last part. The
    service refuses an object whose checksum differs, and what it says that it has is compared, too. The service drops an upload
    that is neither committed nor aborted after a week.
    """

    def __init__(self, client: _GcsClient, settings: ModelSourceConfig, address: ObjectAddress) -> None:
        super().__init__(settings, address)
        self._client = client
        self._doing = f"writing {address.uri}"
        # `_upload` is path and query of the session; who knows them may write.
        self._kept = 0  # bytes that the service has
        self._crc = 0

    def _part_bytes(self) -> int:
        return _PART_BYTES

    def _send(self, part: bytes) -> None:
        if not self._upload:
            self._upload = self._ask(self._begin)
        self._crc = google_crc32c.extend(self._crc, part)
        self._transmit(part)

    def _finish(self, part: bytes) -> None:
        self._crc = google_crc32c.extend(self._crc, part)
        checksum = base64.b64encode(struct.pack(">I", self._crc)).decode()

        def send_whole(access: GcsAccess, timeout: float) -> dict[str, Any]:
            blob = self._blob(access)
            blob.upload_from_string(part, content_type=_CONTENT_TYPE, checksum="crc32c", timeout=timeout, retry=None)
            return {"size": blob.size, "crc32c": blob.crc32c, "generation": blob.generation}

        made = self._transmit(part, checksum) if self._upload else self._ask(send_whole)
        self._upload = ""
        # Compared with what the service says that it has; the object is removed if that is not what was sent.
        size, crc, generation = made.get("size"), made.get("crc32c", checksum), made.get("generation")
        if str(size) == str(self._size_bytes) and crc == checksum:
            return
        if generation:
            self._try_once(
                lambda access, timeout: self._blob(access).delete(
                    if_generation_match=int(generation), timeout=timeout, retry=None
                )
            )
        raise ModelFileError(
            f"{self._doing}: the service has {size} bytes with checksum {crc}, expected {self._size_bytes} with {checksum}: "
            "they were damaged on the way; write it again"
        )

    def _cancel(self) -> None:
        place = self._upload
        self._try_once(lambda access, timeout: access.session.delete(f"{access.endpoint}{place}", timeout=timeout))

    def _try_once(self, question: Callable[[GcsAccess, float], object]) -> None:
        with suppress(ModelFileError):
            self._client.ask("writing", self._address, time.monotonic() + self._settings.timeout_s, question)

    def _begin(self, access: GcsAccess, timeout: float) -> str:
        place: str = self._blob(access).create_resumable_upload_session(content_type=_CONTENT_TYPE, timeout=timeout, retry=None)
        # The host is the one that was asked: an emulator or a gateway may give a name of its own for it.
        return urlunsplit(urlsplit(place)._replace(scheme="", netloc=""))

    def _transmit(self, part: bytes, checksum: str = "") -> dict[str, Any]:
        """Send the next bytes of a resumable upload; a checksum of all bytes says that these are the last.

        The service may keep only some of them, and says how many it has; the next attempt goes on from there.
        https://cloud.google.com/storage/docs/performing-resumable-uploads
        """
        first, end = self._kept, self._kept + len(part)
        total = str(end) if checksum else "*"
        headers = {"Content-Type": _CONTENT_TYPE} | ({"X-Goog-Hash": f"crc32c={checksum}"} if checksum else {})
        place = self._upload
        unsure = False

        def put(deadline: float, bounds: str, body: bytes) -> dict[str, Any] | None:
            """Send these bytes, or none to ask how many arrived; once all have, what the service says of the object."""

            def send(access: GcsAccess, timeout: float) -> tuple[int, dict[str, Any] | None]:
                answer = access.session.put(
                    f"{access.endpoint}{place}",
                    data=io.BytesIO(body) if body else None,  # sent in pieces, each with the timeout to itself
                    headers={**headers, "Content-Range": f"bytes {bounds}/{total}"},
                    timeout=timeout,
                    allow_redirects=False,
                )
                if answer.status_code in (200, 201):
                    return end, answer.json()
                if answer.status_code != _INCOMPLETE:
                    raise RefusedError(response=answer)
                match = re.fullmatch(r"bytes=0-(\d+)", answer.headers.get("Range", ""))
                kept = int(match[1]) + 1 if match else 0
                if not first <= kept <= end:
                    raise ModelFileError(
                        f"{self._doing}: the service kept {kept} bytes, expected {first} to {end}; write it again from "
                        "the start"
                    )
                return kept, {} if kept == end and not checksum else None

            # Noted here: a thread that was left behind must not change it.
            self._kept, made = self._client.ask("writing", self._address, deadline, send)
            return made

        def attempt(deadline: float) -> dict[str, Any]:
            nonlocal unsure
            made = put(deadline, "*", b"") if unsure else None  # how much arrived of what failed
            unsure = True
            if made is None:
                made = put(deadline, f"{self._kept}-{end - 1}", part[self._kept - first :])
            if made is None:
                raise ModelSourceError(f"{self._doing}: the service kept {self._kept} of {end} bytes")
            return made

        try:
            return retried(self._settings, attempt)
        except ModelFileNotFoundError as error:
            raise ModelFileError(f"{self._doing}: the service dropped the upload; write it again from the start") from error

    def _blob(self, access: GcsAccess) -> Any:
        return access.client.bucket(self._address.bucket).blob(self._address.key)

    def _ask(self, question: Callable[[GcsAccess, float], T]) -> T:
        return retried(self._settings, lambda deadline: self._client.ask("writing", self._address, deadline, question))
