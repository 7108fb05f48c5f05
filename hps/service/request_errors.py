"""Errors of the HTTP service alone, below the tree of `hps/errors.py`.

    HPSError
    ├── InvalidInputError                             400, from the codecs: the bytes are not a request
    └── RequestError
        ├── UnauthorizedError                         401
        ├── UnknownRouteError                         404
        ├── MethodNotAllowedError                     405
        ├── BodyTimeoutError         (TimeoutError)   408
        ├── BodyTooLargeError                         413
        ├── UnsupportedEncodingError                  415
        ├── OverloadedError                           503
        └── LookupTimeoutError       (TimeoutError)   504

`hps/service/app.py` maps every error to its status.
"""

from hps.errors import HPSError


class RequestError(HPSError):
    """A request cannot be served, for a reason that only HTTP knows."""


class UnauthorizedError(RequestError):
    """The bearer token is missing or wrong."""


class UnknownRouteError(RequestError):
    """Nothing is served under this path."""


class MethodNotAllowedError(RequestError):
    """The path is served, with other methods: `allowed` names them as the header `Allow` does."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTimeoutError(RequestError, TimeoutError):
    """The request body did not arrive in time."""


class BodyTooLargeError(RequestError):
    """The request body, as sent or decompressed, is above the limit."""


class UnsupportedEncodingError(RequestError):
    """The request body is compressed in a way that is not understood."""


class OverloadedError(RequestError):
    """Too many lookups wait, or too many bytes of bodies are held: come back later."""


class LookupTimeoutError(RequestError, TimeoutError):
    """A lookup did not end in time. It may still be running; its answer is thrown away."""
