"""Files in Google Cloud Storage, through google-cloud-storage."""

import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from http.client import IncompleteRead
from typing import Any, TypeVar
from urllib.parse import unquote

import google.auth
import requests
from google.api_core.exceptions import (
    GoogleAPICallError,
    NotFound,
    PreconditionFailed,
    RequestRangeNotSatisfiable,
    RetryError,
)
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage import Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
from hps.filesystems.base import FileStatus, FileWriter, replaced, without_secrets
from hps.filesystems.failures import GCS_MEANINGS, GIVE_CREDENTIALS, class_names, translated
from hps.filesystems.object_store import (
    ObjectAddress,
    ObjectStore,
    ObjectWriter,
    RangeRefusedError,
    range_mismatch,
)
from hps.filesystems.retries import ReadTarget, bounded
from hps.ground.threads.workers import call_in_thread

_log = logging.getLogger(__name__)
T = TypeVar("T")
_thread = threading.local()  # `target`: buffer that this thread reads into; `cancel`: cancels the upload that it started

_CLIENT_ERRORS = (
    GoogleAPICallError,
    RetryError,
    GoogleAuthError,
    InvalidResponse,
    DataCorruption,
    requests.RequestException,
    HTTPError,
    OSError,
    ValueError,
)
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_CONNECTIONS = 64  # kept connections; several tables may be loaded at a time
_RECEIVE_BYTES = 1 << 18  # at a time; a part at once takes 4 MB for each reader, and a few percent longer
_AS_BYTES: dict[str, Any] = {"content_type": "application/octet-stream"}
_PART_BYTES = 8 << 20  # a multiple of 256 KiB, as the service requires

_FORMS = "gs://bucket/object or https://storage.googleapis.com/bucket/object"
# https://cloud.google.com/storage/docs/buckets#naming, without the rules for Google's reserved names.
_BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_URI = re.compile(
    rf"(?:(?i:gs)://|(?i:https://storage\.(?:googleapis|cloud\.google)\.com)(?::443)?/)({_BUCKET})(?:/(.*))?"
    rf"|(?i:https://)((?i:{_BUCKET}))(?i:\.storage\.googleapis\.com)(?::443)?(?:/(.*))?",
    re.DOTALL,
)


def gcs_address(uri: str) -> ObjectAddress:
    """Parse a URI. A `gs` URI is literal; percent signs of an `https` address are decoded.

    Raises:
        ModelFileError: it is not the address of an object in GCS. The message does not repeat possible secrets.
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

    The version of an object is its generation. Google's Application Default Credentials are found on first use, and again after
    a failure. Without credentials, public objects can be read.
    """

    client_errors = _CLIENT_ERRORS

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self.client: Any = None
        self.anonymous = False
        self._per_request: dict[str, Any] = {"timeout": self.settings.timeout_s, "retry": None}

    def create(self, path: str) -> FileWriter:
        return _GcsWriter(self, self._object(path, "writing"))

    def request_once(self, doing: str, address: ObjectAddress, seconds: float, call: Callable[[], T]) -> T:
        """Call a function with a client, on a thread that is abandoned after `seconds`."""
        self.connect(seconds)
        return super().request_once(doing, address, seconds, call)

    def connect(self, seconds: float) -> None:
        """Find the endpoint and Application Default Credentials, which may query the metadata server of a cloud machine.

        The endpoint is the configured one, else STORAGE_EMULATOR_HOST, else Google's, by the library's rule. Over plain http,
        as emulators use it, no credentials are looked for: a token must not be sent in the clear.

        Raises:
            ModelFileError: there are credentials and they cannot be used.
            ModelSourceError: the metadata server did not answer in time.
        """
        if self.client is not None:
            return
        endpoint: str = (self.settings.gcs_endpoint_url or Client.create_anonymous_client().api_endpoint).rstrip("/")
        if "://" not in endpoint:  # STORAGE_EMULATOR_HOST=host:port, as other Google libraries accept it
            endpoint = f"http://{endpoint}"

        def find() -> Any:
            try:
                return None if endpoint.startswith("http://") else google.auth.default(scopes=_SCOPES)[0]
            except DefaultCredentialsError as error:
                # The same class reports a missing or broken key file, which must not fall back to anonymous access.
                if "default credentials were not found" not in str(error):
                    raise
            return None

        try:
            credentials = bounded("looking for Google credentials", seconds, self.threads, find)
        except ModelFileError:
            raise  # of `bounded`; it is an OSError, too
        except (GoogleAuthError, OSError, ValueError) as error:
            raise _unusable_credentials(error) from error
        # Without a lock, because credentials may come over the network; of two found at once, one is kept.
        if self.client is None:
            self.anonymous = credentials is None
            self.client = storage_client(endpoint, credentials)
            if self.anonymous and endpoint.startswith("https://"):
                _log.info("No Google credentials were found: reading GCS without any, which public buckets allow.")

    def blob(self, address: ObjectAddress) -> Any:
        """Return the library's object for an address; requires a client."""
        return self.client.bucket(address.bucket).blob(address.key)

    def _address(self, uri: str) -> ObjectAddress:
        return gcs_address(uri)

    def _failure(self, doing: str, address: ObjectAddress, error: Exception) -> ModelFileError:
        if isinstance(error, RetryError) and isinstance(error.cause, Exception):
            error = error.cause
        if isinstance(error, GoogleAuthError):
            return _unusable_credentials(error)
        line, answer, response = class_names(error), "", getattr(error, "response", None)
        if isinstance(response, requests.Response):
            message, reasons = _message_of(response)
            answer = f"got HTTP {response.status_code}" + (f" ({message})" if message else "")
            states = ["upload"] * ("upload_id=" in str(response.url)) + ["anonymous"] * self.anonymous
            line += " ".join([f" HTTP {response.status_code}", *sorted(reasons), *states])
        fields = {"answer": answer, "bucket": address.bucket, "cause": _cause(error)}
        return translated(f"{doing} {address.uri}", line, GCS_MEANINGS, **fields)

    def _find(self, address: ObjectAddress) -> FileStatus | None:
        blob = self.client.bucket(address.bucket).get_blob(address.key, **self._per_request)
        if blob is None:
            return None
        if blob.content_encoding not in (None, "", "identity"):
            raise ModelFileError(
                f"opening {address.uri}: it is stored with Content-Encoding {blob.content_encoding}, of which no range can be "
                "read; upload it without compression (gsutil cp without -z and -Z)"
            )
        if blob.size is None or blob.generation is None:
            raise ModelSourceError(f"opening {address.uri}: got an answer that is not one of Google Cloud Storage")
        return FileStatus(blob.size, str(blob.generation))

    def _pages(self, address: ObjectAddress, most: int) -> Iterator[list[str]]:
        found = self.client.list_blobs(
            address.bucket,
            prefix=address.prefix,
            delimiter="/",
            page_size=most,
            fields="items(name),prefixes,nextPageToken",
            **self._per_request,
        )
        for page in found.pages:
            yield [*(blob.name for blob in page), *found.prefixes]

    def _range(self, address: ObjectAddress, offset: int, end: int, version: str, target: ReadTarget) -> str:
        blob = self.blob(address)
        _thread.target = target
        try:
            blob.download_to_file(
                target,
                start=offset,
                end=end - 1,
                if_generation_match=int(version) if version else None,
                raw_download=True,
                checksum=None,
                **self._per_request,
            )
        except (NotFound, PreconditionFailed, RequestRangeNotSatisfiable) as error:
            raise RangeRefusedError(f"HTTP {error.code}") from error
        # An emulator or a cache may ignore the condition. A generation is a number; without the header, trust it.
        return str(blob.generation or version)

    def _put(self, address: ObjectAddress, content: bytes, version: str) -> str:
        blob = self.blob(address)
        try:
            blob.upload_from_string(
                content, if_generation_match=int(version or 0), checksum="crc32c", **_AS_BYTES, **self._per_request
            )
        except PreconditionFailed as error:
            raise replaced(address.uri, version) from error
        return str(blob.generation)

    def _remove(self, address: ObjectAddress) -> None:
        with suppress(NotFound):
            self.blob(address).delete(**self._per_request)


def _unusable_credentials(error: Exception) -> ModelFileError:
    """Return the error for credentials that do not work.

    It quotes only the first words of Google's library: the rest may be a response that holds a token.
    """
    message = str(error.args[0]) if error.args else type(error).__name__
    message = f"using Google credentials: {message[:300].rstrip('. ')}"
    if isinstance(error, TransportError) or getattr(error, "retryable", False):
        return ModelSourceError(f"{message}; check that the host which issues tokens can be reached from here")
    return ModelFileError(f"{message}; they may be expired or revoked: renew them, or {GIVE_CREDENTIALS}")


def _message_of(response: requests.Response) -> tuple[str, set[str]]:
    """Return message and reasons of a refusal. The libraries' own messages quote the URL, which for an upload is a secret."""
    try:
        error: Any = response.json()["error"]
        reasons = {str(cause["reason"]) for cause in error.get("errors", ())}
        return str(error.get("message", "")).strip()[:300], reasons
    except (ValueError, LookupError, TypeError, AttributeError, requests.RequestException):
        return "", set()


def _cause(error: BaseException) -> str:
    """Return the root cause. The errors above it quote the request, whose query may be a secret."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, IncompleteRead):
        return f"the body broke off ({error})"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:300]


def storage_client(endpoint: str, credentials: Any = None) -> Client:
    """Make a client of google-cloud-storage; without credentials it is anonymous."""
    # A refused token is renewed once, which needs credentials.
    renewal: dict[str, Any] = {"max_refresh_attempts": 1} if credentials else {"refresh_status_codes": ()}
    session: Any = AuthorizedSession(credentials or AnonymousCredentials(), **renewal)
    # The environment (proxies, certificates) is read once, not for each request, and ~/.netrc never: its password would replace
    # the token.
    environment = session.merge_environment_settings(endpoint, {}, None, None, None)
    session.proxies, session.verify, session.trust_env = environment["proxies"], environment["verify"], False
    session.max_redirects = 0
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS))
    session.hooks["response"] += [_receive, partial(_record_upload, session)]
    # `_http` is documented, but may change: pyproject.toml limits the version. Without it the client makes its own session,
    # which lacks these settings.
    options = {"api_endpoint": endpoint, "universe_domain": session.credentials.universe_domain}
    return Client(project=None, credentials=session.credentials, client_options=options, _http=session)


def _receive(answer: requests.Response, **_: Any) -> None:
    """Check the range of an answer, and copy its body."""
    # In a hook of the session, since the library checks no range, and reads a body 8 KB at a time or all at once.
    requested = re.fullmatch(r"bytes=(\d+)-(\d+)", str(answer.request.headers.get("Range", "")))
    if not requested or answer.status_code not in (200, 206):
        return
    try:
        length = int(answer.headers.get("Content-Length", 0))
        if why := range_mismatch(answer.headers.get("Content-Range", ""), length, int(requested[1]), int(requested[2]) + 1):
            raise requests.exceptions.InvalidHeader(why)
        for piece in answer.raw.stream(_RECEIVE_BYTES, decode_content=False):
            _thread.target.write(piece)
    except BaseException:
        answer.close()
        raise


def _record_upload(session: requests.Session, answer: requests.Response, **_: Any) -> None:
    """Record how to cancel an upload, whose URL the library does not publish.

    https://cloud.google.com/storage/docs/performing-resumable-uploads#cancel-upload
    """
    if answer.request.method == "POST" and "uploadType=resumable" in str(answer.url) and "Location" in answer.headers:
        _thread.cancel = partial(session.delete, answer.headers["Location"])


class _Parts:
    """The file that the library's upload reads, a part at a time. *Two threads*: one puts, one reads."""

    # The library's own `Blob.open` is not used: it completes an upload whenever it is collected.

    def __init__(self) -> None:
        self.waiting: queue.Queue[bytes] = queue.Queue(1)
        self.dropped = False
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        """Return the next part; one shorter than `size` is the last."""
        part = self.waiting.get()
        if self.dropped:
            raise ConnectionAbortedError("the upload was dropped")
        self._position += len(part)
        return part


class _GcsWriter(ObjectWriter):
    """An object that is being uploaded. *One thread.*

    An object of one part is sent in one request, a longer one by the library's resumable upload, on its own thread. The service
    rejects an object whose checksum differs. A failed or aborted upload is cancelled in the background; the service drops that
    of a killed process after a week.
    """

    def __init__(self, store: GcsFileSystem, address: ObjectAddress) -> None:
        super().__init__(address)
        self._store = store
        self._parts = _Parts()
        self._upload: Future[None] | None = None
        self._how = {
            **_AS_BYTES,
            "checksum": "crc32c",
            "timeout": store.settings.timeout_s,
        }

    def part_bytes(self) -> int:
        return _PART_BYTES

    def commit(self) -> None:
        part = self.take_pending()

        def send() -> None:
            self._store.blob(self._address).upload_from_string(part, retry=None, **self._how)

        if self._upload is None:
            self._store.request("writing", self._address, send)
        else:
            self._put(part)
            if len(part) == _PART_BYTES:
                self._put(b"")
            self._store.request_once("writing", self._address, 2 * self._store.settings.deadline_s, self._upload.result)

    def abort(self) -> None:
        self.take_pending()
        self._parts.dropped = True
        with suppress(queue.Full):
            self._parts.waiting.put_nowait(b"")

    def _send(self, part: bytes) -> None:
        if self._upload is None:
            self._upload = call_in_thread("gcs-upload", self._transmit)
        self._put(part)

    def _transmit(self) -> None:
        self._store.connect(self._store.settings.deadline_s)
        retry = DEFAULT_RETRY.with_delay(initial=0.1, maximum=5.0).with_timeout(self._store.settings.deadline_s)
        blob = self._store.blob(self._address)
        blob.chunk_size = _PART_BYTES
        try:
            blob.upload_from_file(self._parts, retry=retry, **self._how)
        except Exception:
            if cancel := getattr(_thread, "cancel", None):
                with suppress(*_CLIENT_ERRORS):
                    cancel(timeout=self._store.settings.timeout_s)
            raise

    def _put(self, part: bytes) -> None:
        upload: Any = self._upload

        def put() -> None:
            while not upload.done():
                with suppress(queue.Full):
                    self._parts.waiting.put(part, timeout=0.05)
                    return
            upload.result()  # raises the cause of its end

        self._store.request_once("writing", self._address, self._store.settings.deadline_s, put)
