"""Converts errors of Google's libraries into errors that name the address, the cause and the cure."""

import ssl
from http.client import IncompleteRead
from typing import Any

import requests
from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.auth.exceptions import GoogleAuthError, TransportError
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from urllib3.exceptions import HTTPError

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError

FAILURES = (
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
"""Exceptions of requests to the service. `gcs_failure` converts them."""

_PASSING = {408, 429, 500, 502, 503, 504}
_PASSING_REASONS = {"rateLimitExceeded", "userRateLimitExceeded", "backendError", "internalError"}
_GIVE_CREDENTIALS = (
    "let GOOGLE_APPLICATION_CREDENTIALS name a key file, run `gcloud auth application-default login`, "
    "or run on Google Cloud with a service account"
)


def gcs_failure(what: str, bucket: str, error: Exception, *, anonymous: bool) -> ModelFileError:
    """Convert an error to one with cause and cure.

    Args:
        what: the operation, e.g. `reading gs://bucket/key`.
        error: one of `FAILURES`.
        anonymous: whether there are no credentials.
    """
    if isinstance(error, RetryError) and isinstance(error.cause, Exception):
        error = error.cause
    if isinstance(error, DataCorruption):
        return ModelFileError(f"{what}: the checksum differs: the content was damaged in transfer; write it again")
    if isinstance(error, GoogleAuthError):
        return unusable_credentials(error)
    answer = getattr(error, "response", None)
    if isinstance(error, requests.JSONDecodeError):
        return ModelSourceError(
            f"{what}: got an answer that is not one of Google Cloud Storage; check model_source.gcs_endpoint_url"
        )
    if isinstance(answer, requests.Response):
        return _refusal(what, bucket, answer, anonymous=anonymous)
    cure = "check that the host is right, runs and can be reached from here"
    if isinstance(error, requests.exceptions.SSLError | ssl.SSLError):
        cure = "check that the host's certificate is valid and that its issuer is known here"
    return ModelSourceError(f"{what}: {_cause(error)}; {cure}")


def unusable_credentials(error: Exception) -> ModelFileError:
    """Return the error for credentials that do not work.

    It quotes only the first words of Google's library: the rest may be a response that holds a token.
    """
    said = str(error.args[0]) if error.args else type(error).__name__
    message = f"using Google credentials: {said[:300].rstrip('. ')}"
    if isinstance(error, TransportError) or getattr(error, "retryable", False):
        return ModelSourceError(f"{message}; check that the host which issues tokens can be reached from here")
    return ModelFileError(f"{message}; they may be expired or revoked: renew them, or {_GIVE_CREDENTIALS}")


def _refusal(what: str, bucket: str, answer: requests.Response, *, anonymous: bool) -> ModelFileError:
    """Return the error for a status code. https://cloud.google.com/storage/docs/json_api/v1/status-codes"""
    status, (said, reasons) = answer.status_code, _said(answer)
    message = f"{what}: got HTTP {status}" + (f" ({said})" if said else "")
    if status in _PASSING or reasons & _PASSING_REASONS:
        return ModelSourceError(f"{message}; GCS is overloaded or limits the rate of requests")
    if status in (404, 410) and "upload_id=" in str(answer.url):
        return ModelFileError(f"{message}; the service dropped the upload: write it again from the start")
    if status == 404:  # a missing object is no failure
        return ModelFileNotFoundError(f"{what}: there is no bucket {bucket!r}; create it, or correct the address")
    if status in (401, 403) and anonymous:
        return ModelFileError(f"{message}; no Google credentials were found, and the object is not public: {_GIVE_CREDENTIALS}")
    if status == 401:
        return ModelFileError(f"{message}; the Google credentials are expired or revoked: renew them, or {_GIVE_CREDENTIALS}")
    if status == 403:
        return ModelFileError(
            f"{message}; the account may not do this: grant it roles/storage.objectViewer on the bucket to read, "
            "roles/storage.objectUser to write"
        )
    return ModelFileError(f"{message}; expected an answer of Google Cloud Storage: check model_source.gcs_endpoint_url")


def _said(answer: requests.Response) -> tuple[str, set[str]]:
    """Return message and reasons of a refusal. The libraries' own messages quote the URL, which for an upload is a secret."""
    try:
        error: Any = answer.json()["error"]
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
