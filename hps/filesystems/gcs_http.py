"""Requests to the JSON API of Google Cloud Storage, each within a deadline.

Google's own library reads a body in chunks, without a limit on how long one takes, and copies it twice. This goes through the
same HTTP client, which knows proxies and certificates, and reads one receive at a time. Whether threads may share a session of
that client is left open (https://github.com/psf/requests/issues/2766): each request takes one for itself and gives it back.
"""

import io
import json
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests
from urllib3.exceptions import HTTPError

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.gcs_access import GIVE_CREDENTIALS, GcsAccess, GcsAccessFinder
from hps.filesystems.retries import within

_RECEIVE_BYTES = 256 << 10  # of one receive; http.client allocates as much each time
_LONGEST_ANSWER = 16 << 20  # of JSON: a page of 1000 names is below 2 MB
_PASSING = {408, 429, 500, 502, 503, 504}
_PASSING_REASONS = {"rateLimitExceeded", "userRateLimitExceeded", "backendError", "internalError"}


class Answer:
    """One answer of the service. *One thread.*

    Attributes:
        status: of HTTP.
        headers: by name, in any case.
    """

    def __init__(self, doing: str, response: requests.Response, deadline: float) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self._doing = doing
        self._response = response
        self._deadline = deadline

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the body's next bytes.

        Raises:
            ModelSourceError: the body ends early or breaks off, or the deadline passed.
        """
        done = 0
        while done < len(buffer):
            piece = self._receive(min(len(buffer) - done, _RECEIVE_BYTES))
            if not piece:
                raise ModelSourceError(f"{self._doing}: the answer broke off after {done} of {len(buffer)} bytes")
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def json(self) -> dict[str, Any]:
        """The body of an answer that should be a JSON object; empty where it is anything else.

        Raises:
            ModelSourceError: as in `read_into`.
        """
        body = bytearray()
        while len(body) < _LONGEST_ANSWER and (piece := self._receive(_RECEIVE_BYTES)):
            body += piece
        try:
            value = json.loads(body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _receive(self, size: int) -> bytes:
        """At most `size` bytes, as soon as there are any: a body that trickles in is noticed at the deadline."""
        if time.monotonic() > self._deadline:
            raise ModelSourceError(f"{self._doing}: the answer was not complete at the deadline; the connection is too slow")
        try:
            piece: bytes = self._response.raw.read1(size, decode_content=False)
        except (HTTPError, OSError, ValueError) as error:
            raise ModelSourceError(f"{self._doing}: the answer broke off: {_cause(error)}") from error
        return piece


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    url: str
    parameters: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class GcsHttp:
    """Asks the service. *Thread-safe.*

    Args:
        settings: timeouts.
        access: finds the endpoint and credentials.
    """

    def __init__(self, settings: ModelSourceConfig, access: GcsAccessFinder) -> None:
        self._settings = settings
        self._access = access
        self._idle: deque[requests.Session] = deque()

    @contextmanager
    def ask(
        self,
        doing: str,
        seconds: float,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        expected: tuple[int, ...] = (200,),
    ) -> Iterator[Answer]:
        """Send a request and give the answer, which must be read in the `with` block.

        Args:
            doing: for messages, e.g. `reading gs://b/m/key`.
            seconds: until the answer must have been read.
            method: of HTTP.
            path: below the endpoint, e.g. `storage/v1/b/name/o`.
            parameters: of the query.
            headers: further ones.
            body: to send.
            expected: status codes that are given to the caller; others are raised.

        Raises:
            ModelFileNotFoundError: 404.
            ModelSourceError: no answer, or one that may be another the next time.
            ModelFileError: a refusal.
        """
        deadline = time.monotonic() + seconds
        access = self._access.get(seconds)
        for afresh in (False, True):
            session = self._take()
            request = _Request(method, f"{access.endpoint}/{path}", parameters or {}, headers or {}, body)
            response = self._send(doing, deadline, session, request, access, afresh=afresh)
            try:
                answer = Answer(doing, response, deadline)
                if answer.status in expected:
                    yield answer
                    return
                error = _refusal(doing, answer, access)
                if answer.status != 401 or afresh or access.anonymous:
                    raise error
            finally:
                # A connection whose answer was read to its end has gone back to the session; others are closed here.
                response.close()
                self._idle.append(session)

    def _take(self) -> requests.Session:
        try:
            return self._idle.pop()
        except IndexError:
            session = requests.Session()
            session.auth = _leave_as_it_is
            return session

    def _send(
        self,
        doing: str,
        deadline: float,
        session: requests.Session,
        request: _Request,
        access: GcsAccess,
        *,
        afresh: bool,
    ) -> requests.Response:
        """Send, within the deadline whatever hangs: the name service, a token's host, headers that trickle in.

        A session whose request failed is dropped, with its connections.
        """
        left = max(deadline - time.monotonic(), 0.001)
        timeout = min(self._settings.timeout_s, left)

        def send() -> requests.Response:
            response = session.request(
                request.method,
                request.url,
                params=request.parameters,
                data=io.BytesIO(request.body) if request.body else None,  # sent in pieces, each with the timeout to itself
                headers={
                    "Accept-Encoding": "identity",
                    **request.headers,
                    **access.headers(request.method, request.url, afresh=afresh),
                },
                timeout=(timeout, timeout),
                stream=True,
                allow_redirects=False,
            )
            if time.monotonic() > deadline:  # nobody waits for it any more
                response.close()
            return response

        try:
            return within(doing, left, send)
        except ModelFileError:
            raise
        except (requests.RequestException, HTTPError, OSError) as error:
            session.close()
            raise ModelSourceError(f"{doing}: {_cause(error)}; {_cure(error)}") from error


def _leave_as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keeps requests from putting a password of ~/.netrc in the place of the token."""
    return request


def _refusal(doing: str, answer: Answer, access: GcsAccess) -> ModelFileError:
    """The error that an answer stands for. https://cloud.google.com/storage/docs/json_api/v1/status-codes"""
    error = answer.json().get("error")
    details = error if isinstance(error, dict) else {}
    said = str(details.get("message") or "").strip()[:300]
    causes = details.get("errors")
    reasons = {str(cause.get("reason")) for cause in causes if isinstance(cause, dict)} if isinstance(causes, list) else set()
    message = f"{doing}: got HTTP {answer.status}" + (f" ({said})" if said else "")
    if answer.status in _PASSING or reasons & _PASSING_REASONS:
        return ModelSourceError(f"{message}; GCS is overloaded or limits the rate of requests")
    if answer.status == 404:
        return ModelFileNotFoundError(f"{message}; see that the bucket and the path are right")
    if answer.status in (401, 403) and access.anonymous:
        return ModelFileError(f"{message}; no Google credentials were found, and the object is not public: {GIVE_CREDENTIALS}")
    if answer.status == 401:
        return ModelFileError(f"{message}; the Google credentials are expired or revoked: renew them, or {GIVE_CREDENTIALS}")
    if answer.status == 403:
        return ModelFileError(
            f"{message}; the account may not do this: grant it roles/storage.objectViewer on the bucket to read, "
            "roles/storage.objectUser to write"
        )
    return ModelFileError(f"{message}; wanted an answer of Google Cloud Storage: see model_source.gcs_endpoint_url")


def _cause(error: BaseException) -> str:
    """What happened at the bottom. The errors above it quote the request, whose query may be a secret."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:300]


def _cure(error: BaseException) -> str:
    if isinstance(error, requests.exceptions.SSLError | ssl.SSLError):
        return "see that the host's certificate is valid and its issuer known here"
    return "see that the host is right, runs and can be reached from here"
