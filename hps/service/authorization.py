"""Who may look up, and who may change models and rows: tokens, and what loopback allows without one."""

import hmac
import ipaddress
import re
from collections.abc import Mapping

from starlette.types import Scope

from hps.configuration.load import ServiceConfig
from hps.service.http_answer import RequestError

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_CHANGEABLE = ("/v1/models/", "/v2/repository/")
_INDEX = re.compile(r"/v2/repository/([^/]+/)?index")  # a POST, as Triton has it, that reads
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
_CURE = "set service.admin_token or HPS_ADMIN_TOKEN, and send 'Authorization: Bearer <admin token>'"


def is_change(method: str, path: str) -> bool:
    """Whether a request that is no lookup changes models or rows."""
    return method not in _READS and path.startswith(_CHANGEABLE) and not _INDEX.fullmatch(path)


def is_loopback(host: str) -> bool:
    """Whether an address that a server is bound to can be reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Authorization:
    """Checks the tokens of requests. *One per event loop.*

    Without an `admin_token`, changes are allowed only while the server listens on loopback: who can connect then works on this
    machine. Two kinds of strangers can be behind such a connection, and are refused: a proxy's clients, where the proxy says
    that it is one, and pages in a browser, which names their origin with each request that is no GET.

    Args:
        settings: have the tokens, until `configure` changes them.

    Attributes:
        guarded: whether lookups need a token.
        loopback: whether the server is bound to loopback; unknown, and so false, until it says so.
    """

    def __init__(self, settings: ServiceConfig) -> None:
        self.loopback = False
        self.configure(settings)

    def configure(self, settings: ServiceConfig) -> None:
        """Use the tokens of these settings from now on."""
        self._bearer, self._admin = settings.bearer_token.encode(), settings.admin_token.encode()
        self.guarded = bool(self._bearer)

    def check_lookup(self, headers: Mapping[bytes, bytes]) -> None:
        """Let a request pass that changes nothing.

        Raises:
            RequestError: 401, it has neither the bearer token nor the admin token.
        """
        if self.guarded and not (self._has(headers, self._bearer) | self._has(headers, self._admin)):
            raise _unauthorized("<token>")

    def check_change(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Let a request pass that changes something, and say who sent it: the address that connected, and by what right.

        Raises:
            RequestError: 401, a token is missing or wrong; 403, what it has does not allow changes. The message says why.
        """
        client = scope["client"][0] if scope.get("client") else "an unknown address"
        if self._admin:
            if self._has(headers, self._admin):
                return f"{client} (admin token)"
            if self._has(headers, self._bearer):
                raise _forbidden("the bearer token allows lookups, expected the admin token")
            raise _unauthorized("<admin token>")
        if not self.loopback:
            raise _forbidden(f"changes are off: the server does not listen on loopback alone and has no admin token; {_CURE}")
        self.check_lookup(headers)
        if forwarded := next((name for name in _FORWARDED if name in headers), None):
            raise _forbidden(
                f"got the header {forwarded.decode()!r}: without an admin token, no proxy may stand in between; {_CURE}"
            )
        if (origin := headers.get(b"origin")) is not None and origin.lower() not in _own_origins(scope):
            raise _forbidden(f"got Origin {origin[:120].decode('latin-1')!r}: pages of others may change nothing; {_CURE}")
        return f"{client} (loopback)"

    @staticmethod
    def _has(headers: Mapping[bytes, bytes], token: bytes) -> bool:
        scheme, _, got = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(got.strip(), token) and scheme.lower() == b"bearer" and token != b""


def _own_origins(scope: Scope) -> set[bytes]:
    """Of the pages of this server, by its own names: a page of others may have any name that leads here (DNS rebinding)."""
    port = (scope.get("server") or ("", 0))[1]
    return {f"http://{host}:{port}".encode() for host in ("127.0.0.1", "localhost", "[::1]")}


def _unauthorized(token: str) -> RequestError:
    message = f"the header 'Authorization: Bearer {token}' is missing or has the wrong token"
    return RequestError(401, message, (b"www-authenticate", b"Bearer"))


def _forbidden(reason: str) -> RequestError:
    return RequestError(403, f"changing models: {reason}")
