"""A client of a running server, for commands that ask, change or measure it."""

import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import urllib3

from hps.errors import HPSError, InvalidInputError, NotReadyError

_WRONG_INPUT = frozenset({400, 401, 403, 404, 413})
_ANSWER_S = 30.0


class RunningServer:
    """A running server, by HTTP. *One thread.*

    Args:
        url: address of the server or its proxy.
        token: token with the rights that the requests need; empty for none.
        certificate: PEM file of a client certificate and its key.

    Raises:
        InvalidInputError: the URL is invalid, or the certificate cannot be used.
    """

    def __init__(self, url: str, token: str, certificate: str | os.PathLike[str] | None = None) -> None:
        try:
            self.address = urlsplit(url)
            known = self.address.scheme in ("http", "https") and self.address.hostname and self.address.port != 0
        except ValueError:
            known = False
        if not known or not url.isprintable() or " " in url:
            raise InvalidInputError(
                f"reading the URL of a server: got {url!r:.200}, expected for instance http://127.0.0.1:8000"
            )
        try:
            token.encode("latin-1")
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"reading the token of a server: {error.reason} at character {error.start}") from None
        self._url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        context = ssl.create_default_context()
        if certificate is not None:
            try:
                context.load_cert_chain(certificate, password=lambda: "")  # or the terminal would be asked for one
            except OSError as error:
                reason = error.strerror or error
                raise InvalidInputError(f"reading the certificate {os.fsdecode(certificate)}: {reason}") from error
        self._http = urllib3.PoolManager(retries=False, timeout=_ANSWER_S, ssl_context=context)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, without following redirects.

        Raises:
            NotReadyError: no answer.
        """
        try:
            headers = {**self.headers, **(headers or {})}
            return self._http.request(method, self._url + path, body=body, headers=headers, redirect=False)
        except (urllib3.exceptions.HTTPError, OSError, UnicodeError) as error:
            raise NotReadyError(f"asking {self._url}: {error}; is the server running there?") from error

    def ask(self, path: str, method: str = "GET", body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send and receive JSON objects.

        Raises:
            InvalidInputError, HPSError: the server refused the request; with its message.
            NotReadyError: no answer.
        """
        content = None if body is None else json.dumps(body).encode()
        answer = self.request(method, path, content, {"Content-Type": "application/json"})
        try:
            found: Any = json.loads(answer.data)
        except ValueError:
            found = None
        if not isinstance(found, dict) or 300 <= answer.status < 400:
            raise HPSError(f"asking {self._url}{path}: got status {answer.status}, which is no answer of hps serve")
        if answer.status >= 400:
            raise refusal(answer.status, str(found.get("error", found)))
        return found


def refusal(status: int, text: str) -> HPSError:
    """Make the error for a refused request."""
    return (InvalidInputError if status in _WRONG_INPUT else HPSError)(f"{text} (status {status})")
