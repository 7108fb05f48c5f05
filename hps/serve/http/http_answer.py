"""Answers to requests, and the status of every error."""

from collections.abc import Sequence
from typing import NamedTuple

import orjson

from hps.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    DatabaseError,
    DeadlineError,
    DeviceError,
    HPSError,
    InvalidInputError,
    MisplacedKeysError,
    MissingDependencyError,
    ModelFileError,
    ModelSourceError,
    NetworkBusyError,
    NotReadyError,
    ReadOnlyError,
    TooManyKeysError,
    UnknownDeviceError,
    UnknownModelError,
    UnknownTableError,
    VersionHeldError,
    WorkspaceTimeoutError,
)

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
BINARY: Header = (b"content-type", b"application/octet-stream")
CLIENT = b"hps-client"
"""Header with the client's address in requests from a frontend to the engine's application."""
CLIENT_CERTIFICATE = b"hps-client-certificate"
"""Header with the names in the client's certificate, a JSON list, likewise."""
DEFERRED_KEYS = b"x-deferred-keys"
"""Header with the number of keys that got the default vector and are fetched in the background."""

STATUS_OF_ERROR: dict[type[BaseException], int] = {
    InvalidInputError: 400,
    ConfigError: 400,
    MissingDependencyError: 400,
    ModelFileError: 400,
    UnknownModelError: 404,
    UnknownTableError: 404,
    UnknownDeviceError: 404,
    ConflictError: 409,
    ReadOnlyError: 409,
    VersionHeldError: 409,
    TooManyKeysError: 413,
    MisplacedKeysError: 421,
    CapacityError: 507,
    NotReadyError: 503,
    ModelSourceError: 503,
    WorkspaceTimeoutError: 503,
    NetworkBusyError: 503,
    DeadlineError: 504,
    DatabaseError: 503,
    DeviceError: 503,
    MemoryError: 503,
}
"""Status by nearest error class; 500 for all others. A `RequestError` carries its own."""


class RequestError(HPSError):
    """A request cannot be served, for a reason specific to HTTP."""

    def __init__(self, status: int, message: str, *headers: Header) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class OverloadedError(RequestError):
    """A request is refused with 503 because a limit is reached.

    Attributes:
        reason: the limit, one of `refusals.REFUSED`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(503, message)
        self.reason = reason


class HTTPAnswer(NamedTuple):
    """Status, headers without Content-Length, and the body in pieces, which are sent without a copy.

    The answer occupies `held` bytes of `MemoryBudget` until it is sent.
    """

    status: int
    headers: list[Header]
    chunks: Sequence[bytes | memoryview]
    held: int = 0


def status_of(error: BaseException) -> int:
    if isinstance(error, RequestError):
        return error.status
    return next((STATUS_OF_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_OF_ERROR), 500)


def release_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes, whose frames refer to the request, and perhaps to the error."""
    chain: list[BaseException | None] = [error]
    while chain:
        if (raised := chain.pop()) is not None:
            chain += [raised.__cause__, raised.__context__]
            raised.__traceback__ = raised.__cause__ = raised.__context__ = None


def error_answer(error: BaseException, request_id: str) -> HTTPAnswer:
    """Answer a request that raised `error`: status, and `{"error": message}` as in the protocol, with the request id."""
    status, headers = status_of(error), [JSON]
    if isinstance(error, RequestError):
        headers += error.headers
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return HTTPAnswer(status, headers, (orjson.dumps({"error": message_of(error), "request_id": request_id}),))


def message_of(error: BaseException) -> str:
    if isinstance(error, HPSError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory for the answer; send fewer keys at once"
    return "internal error; the log of the service has the details"
