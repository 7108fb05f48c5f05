"""How Google Cloud Storage is reached: its endpoint, and the credentials of this machine."""

import logging
import threading
from concurrent.futures import Future
from typing import Any

import google.auth
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
from google.auth.transport.requests import Request
from google.cloud import storage

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
from hps.filesystems.retries import within

_log = logging.getLogger(__name__)

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
GIVE_CREDENTIALS = (
    "let GOOGLE_APPLICATION_CREDENTIALS name a key file, run `gcloud auth application-default login`, "
    "or run on Google Cloud with a service account"
)


class GcsAccess:
    """An endpoint and who asks there. *Thread-safe*: two threads that find a token expired each get a valid one.

    Args:
        endpoint: scheme and host, without a slash at the end.
        credentials: of Google's library; none where there are none.

    Attributes:
        endpoint: as given.
        anonymous: whether there are no credentials.
    """

    def __init__(self, endpoint: str, credentials: Any = None) -> None:
        self.endpoint = endpoint
        self.anonymous = credentials is None
        self._credentials = credentials

    def headers(self, method: str, url: str, *, afresh: bool = False) -> dict[str, str]:
        """What authorises a request; `afresh` after a token was refused.

        May ask for a token first, and waits as long as its host takes: a caller sets the deadline.

        Raises:
            ModelFileError: there is no token to be had.
        """
        headers: dict[str, str] = {}
        if not self.anonymous:
            try:
                if afresh:
                    self._credentials.refresh(_ask_for_token)
                self._credentials.before_request(_ask_for_token, method, url, headers)
            except GoogleAuthError as error:
                raise unusable(error) from error
        return headers


class GcsAccessFinder:
    """Finds the access once, at first use, and again if that failed. *Thread-safe.*

    Args:
        settings: the endpoint, if it is not Google's.
    """

    def __init__(self, settings: ModelSourceConfig) -> None:
        self._settings = settings
        self._choosing = threading.Lock()
        self._found: Future[GcsAccess] | None = None

    def get(self, seconds: float) -> GcsAccess:
        """Give the access; one thread looks for it, others wait for that thread.

        Raises:
            ModelFileError: credentials are there and cannot be used.
            ModelSourceError: they were not found out in time.
        """
        with self._choosing:
            mine = self._found is None
            found = self._found = self._found or Future()
        if mine:
            try:
                found.set_result(find_access(self._settings, seconds))
            except BaseException as error:
                self._found = None
                found.set_exception(error)
                raise
        try:
            return found.result(seconds)
        except TimeoutError as error:
            raise ModelSourceError(f"looking for Google credentials: nothing found out in {seconds:.1f} s") from error


def find_access(settings: ModelSourceConfig, seconds: float) -> GcsAccess:
    """Find the endpoint and Application Default Credentials, which may ask the metadata server of a cloud machine.

    The endpoint is the configured one, else STORAGE_EMULATOR_HOST, else Google's; the rule is the library's. Over plain
    http, which emulators speak, no credentials are looked for: a token must not be sent in the clear.

    Raises:
        ModelFileError: credentials are there and cannot be used.
        ModelSourceError: the metadata server did not answer in time.
    """
    default: str = storage.Client.create_anonymous_client().api_endpoint
    endpoint = (settings.gcs_endpoint_url or default).rstrip("/")
    if "://" not in endpoint:  # STORAGE_EMULATOR_HOST=host:port, as other Google libraries take it
        endpoint = f"http://{endpoint}"
    if endpoint.startswith("http://"):
        return GcsAccess(endpoint)
    try:
        credentials, _ = within("looking for Google credentials", seconds, lambda: google.auth.default(scopes=_SCOPES))
    except ModelFileError:
        raise  # of `within`; it is an OSError, too
    except DefaultCredentialsError as error:
        # The same class says that a key file is missing or broken, which must not end in anonymous access.
        if "default credentials were not found" not in str(error):
            raise unusable(error) from error
        _log.info("No Google credentials were found: reading GCS without any, which public buckets allow.")
        return GcsAccess(endpoint)
    except (GoogleAuthError, OSError, ValueError) as error:
        raise unusable(error) from error
    return GcsAccess(endpoint, credentials)


def _ask_for_token(*arguments: Any, **named: Any) -> Any:
    request: Any = Request  # a session of its own: it is asked rarely
    return request()(*arguments, **named)


def unusable(error: Exception) -> ModelFileError:
    """The error for credentials that are there and do not work. Only what Google's library says first is quoted: the rest
    may be an answer that holds a token."""
    said = str(error.args[0]) if error.args else type(error).__name__
    message = f"using Google credentials: {said[:300].rstrip('. ')}"
    if isinstance(error, TransportError) or getattr(error, "retryable", False):
        return ModelSourceError(f"{message}; see that the host which issues tokens can be reached from here")
    return ModelFileError(f"{message}; they may be expired or revoked: renew them, or {GIVE_CREDENTIALS}")
