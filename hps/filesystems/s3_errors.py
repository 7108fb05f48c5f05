"""Converts errors of S3 and boto3 into errors that name the address, the cause and the cure."""

from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.object_store import ObjectAddress

FAILURES = (ClientError, BotoCoreError, ResponseParserError, OSError, ValueError)
"""Exceptions of boto3 calls, except programming errors. `s3_failure` converts them."""

_MISSING_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
_BROKEN = (BotoConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError, OSError)
_TIMEOUTS = (ReadTimeoutError, ConnectTimeoutError)
_PASSING_CODES = {
    *("InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling"),
    "ConditionalRequestConflict",  # another write of the object was under way
}
_REGION_CODES = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect"}
_RENEW = "renew them (aws sso login, a new session token, or the role of this machine)"
_WRONG = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or the profile, and the endpoint"
_ALLOW = (
    "grant s3:GetObject on the objects and s3:ListBucket on the bucket (without the latter S3 gives the same answer for an "
    "object that is not there); to write also s3:PutObject, s3:AbortMultipartUpload and s3:DeleteObject"
)

# Meaning of the codes of S3: (cause, cure).
_REFUSALS = {
    "AccessDenied": ("not allowed", _ALLOW),
    "ExpiredToken": ("the credentials have expired", _RENEW),
    "InvalidAccessKeyId": ("S3 does not know the access key", _WRONG),
    "InvalidToken": ("the session token is not valid", _WRONG),
    "SignatureDoesNotMatch": ("the secret access key is wrong", _WRONG),
    "RequestTimeTooSkewed": ("this machine's clock differs too much from S3's", "set the clock"),
    "InvalidObjectState": ("the object is archived", "restore it from Glacier first"),
    "NoSuchUpload": (
        "the upload has ended: by an attempt whose answer was lost, or by somebody else",
        "write the model again; check the bucket's lifecycle rules",
    ),
    "403": ("not allowed", _ALLOW),
}


def error_code(error: BaseException | None) -> str:
    """Return S3's error code; digits if a response had no body; empty without a response."""
    return str(_details(error).get("Code", "")) if isinstance(error, ClientError) else ""


def s3_failure(doing: str, address: ObjectAddress, client: Any, error: Exception) -> ModelFileError:
    """Convert an error to one with cause and cure.

    Args:
        doing: e.g. `reading`.
        client: the boto3 client that raised it; None if there is none yet.
        error: one of `FAILURES`.
    """
    what = f"{doing} {address.uri}"
    if isinstance(error, ClientError):
        return _answered(what, address, client, error)
    if isinstance(error, _MISSING_CREDENTIALS):
        return ModelFileError(
            f"{what}: AWS credentials are missing or cannot be obtained ({type(error).__name__}); set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine a role"
        )
    if isinstance(error, SSLError):
        return ModelSourceError(
            f"{what}: no TLS connection to {_endpoint(client)} (its certificate is not trusted here, or it speaks no TLS); "
            "check the endpoint and AWS_CA_BUNDLE"
        )
    if isinstance(error, _BROKEN):
        how = (
            "did not answer in time"
            if isinstance(error, _TIMEOUTS)
            else f"broke off or cannot be reached ({type(error).__name__})"
        )
        return ModelSourceError(
            f"{what}: {_endpoint(client)} {how}; check that it is right (model_source.s3_endpoint_url, AWS_ENDPOINT_URL), runs "
            "and can be reached from here"
        )
    # The rest are configuration errors: an endpoint that is no URL, an impossible region.
    return ModelFileError(
        f"{what}: boto3 cannot ask {_endpoint(client)} ({type(error).__name__}); check endpoint, region and profile"
    )


def _answered(what: str, address: ObjectAddress, client: Any, error: ClientError) -> ModelFileError:
    code, status = error_code(error), int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = " ".join(str(_details(error).get("Message", "")).split())[:200]
    answer = f"HTTP {status} {code}" + (f": {said}" if said else "")
    if status >= 500 or status in (408, 429) or code in _PASSING_CODES:
        return ModelSourceError(f"{what}: {_endpoint(client)} failed ({answer}); check that it runs and is not overloaded")
    if code == "NoSuchBucket":
        return ModelFileNotFoundError(
            f"{what}: there is no bucket {address.bucket!r} at {_endpoint(client)}; check name, endpoint and account"
        )
    if code in _REGION_CODES or status in (301, 302, 307):
        return ModelFileError(f"{what}: {_region(address, client, error)}")
    if code in ("NoSuchKey", "404"):
        return ModelFileNotFoundError(f"{what}: there is no such object in bucket {address.bucket!r}")
    cause, cure = _REFUSALS.get(code, ("refused", "see what S3 said"))
    return ModelFileError(f"{what}: {cause} ({answer}); {cure}")


def _region(address: ObjectAddress, client: Any, error: ClientError) -> str:
    headers: dict[str, str] = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    theirs = headers.get("x-amz-bucket-region") or str(_details(error).get("Region", ""))
    where = f"is in region {theirs}" if theirs else "is in another region, or not here at all"
    how = "name it in the address" if address.region else "set AWS_DEFAULT_REGION to it, or give the https address that has it"
    return f"bucket {address.bucket!r} {where}, {_endpoint(client)} was asked as {client.meta.region_name}; {how}"


def _details(error: ClientError) -> dict[str, Any]:
    details: dict[str, Any] = error.response.get("Error", {})
    return details


def _endpoint(client: Any) -> str:
    """Return the endpoint's host, without the user and password of its URL."""
    return "the endpoint" if client is None else str(client.meta.endpoint_url).rpartition("@")[2].rpartition("://")[2]
