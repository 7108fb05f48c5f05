"""Access control: tokens, and what loopback allows without one."""

import hmac
import ipaddress
import re
from collections.abc import Mapping

from starlette.types import Scope

from hps.configuration.load import ServiceConfig
from hps.service.http_answer import RequestError

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_CHANGEABLE = ("/v1/models/", "/v2/repository/")
_INDEX = re.compile(r"/v2/repository/([^/]+/)?index")  # in Triton a POST, but it only reads
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
_CURE = "set service.admin_token or HPS_ADMIN_TOKEN, and send 'Authorization: Bearer <admin token>'"


def is_change(method: str, path: str) -> bool:
    """Whether a request other than a lookup changes models or rows."""
    return method not in _READS and path.startswith(_CHANGEABLE) and not _INDEX.fullmatch(path)


def is_loopback(host: str) -> bool:
    """Whether a bound address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Authorization:
    """Checks the tokens of requests. *One per event loop.*

    Without an `admin_token`, changes are allowed only while the server listens on loopback, where every client runs on this
    machine. Two kinds of strangers can reach it all the same and are refused: clients behind a proxy, if the proxy adds its
    headers, and web pages, whose browser sends their origin with every request other than GET.

    Args:
        settings: have the tokens, until `configure` changes them.

    Attributes:
        guarded: whether lookups need a token.
        loopback: whether the server is bound to loopback; False until it is bound.
    """

    def __init__(self, settings: ServiceConfig) -> None:
        self.loopback = False
        self.configure(settings)

    def configure(self, settings: ServiceConfig) -> None:
        self._bearer, self._admin = settings.bearer_token.encode(), settings.admin_token.encode()
        self.guarded = bool(self._bearer)

    def check_lookup(self, headers: Mapping[bytes, bytes]) -> None:
        """Authorize a request that changes nothing.

        Raises:
            RequestError: 401, it has neither the bearer token nor the admin token.
        """
        if self.guarded and not (self._has(headers, self._bearer) | self._has(headers, self._admin)):
            raise _unauthorized("<token>")

    def check_change(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Authorize a change, and return who sent it: the address and the kind of authorization.

        Raises:
            RequestError: 401, the token is missing or wrong; 403, the token does not allow changes. The message says why.
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
            raise _forbidden(f"got the header {forwarded.decode()!r}: without an admin token, proxies change nothing; {_CURE}")
        if (origin := headers.get(b"origin")) is not None and origin.lower() not in _own_origins(scope):
            raise _forbidden(f"got Origin {origin[:120].decode('latin-1')!r}: pages of other origins change nothing; {_CURE}")
        return f"{client} (loopback)"

    @staticmethod
    def _has(headers: Mapping[bytes, bytes], token: bytes) -> bool:
        scheme, _, got = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(got.strip(), token) and scheme.lower() == b"bearer" and token != b""


def _own_origins(scope: Scope) -> set[bytes]:
    """Return the origins of this server's own pages, by name: foreign names may resolve here, too (DNS rebinding)."""
    port = (scope.get("server") or ("", 0))[1]
    return {f"http://{host}:{port}".encode() for host in ("127.0.0.1", "localhost", "[::1]")}


def _unauthorized(token: str) -> RequestError:
    message = f"the header 'Authorization: Bearer {token}' is missing or has the wrong token"
    return RequestError(401, message, (b"www-authenticate", b"Bearer"))


def _forbidden(reason: str) -> RequestError:
    return RequestError(403, f"changing models: {reason}")
