"""Access control: the rights and limits of clients, and what is allowed on loopback without a token."""

import hashlib
import ipaddress
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from starlette.types import Scope

from hps.configuration.load import ServiceConfig
from hps.configuration.tokens import Right, TokenConfig
from hps.serve.http.http_answer import RequestError

CERTIFICATE: Final = "hps.certificate"
"""Key in a request's scope for the names in the client's certificate."""

Administration: TypeAlias = Literal["off", "loopback", "token", "certificate or token"]
"""What a change of models needs; `loopback` is a client on this machine. Nobody makes one if it is `off`."""

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_CHANGEABLE = ("/v1/models/", "/v2/repository/")
_INDEX = re.compile(r"/v2/repository/([^/]+/)?index")  # in Triton a POST, but it only reads
_ROWS = re.compile(r"/v1/models/[^/]*/tables/[^/]*/rows(/[^/]*)?")
ROW_FILES: Final = "/v1/row-files/"
_SHARED = "/v2/systemsharedmemory/"  # of tensors of lookups
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
"""Headers that proxies add."""

_CURE = "set service.admin_token or HPS_ADMIN_TOKEN, and send 'Authorization: Bearer <admin token>'"


def is_change(method: str, path: str) -> bool:
    """Return True if a request other than a lookup changes models or rows, or costs as much as a change."""
    return path.startswith("/v1/debug/") or (
        method not in _READS and path.startswith(_CHANGEABLE) and not _INDEX.fullmatch(path)
    )


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return True if a bound address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def exposures(settings: ServiceConfig, host: str) -> list[str]:
    """Return warnings about an address that is reachable without a token or without TLS."""
    found = []
    if not is_loopback(host):
        if not (settings.bearer_token or settings.tokens_path or settings.tls_client_ca_path):
            cure = "set service.tokens_path or service.bearer_token"
            found.append(f"everyone who reaches {host} may look up, and read metrics, without a token; {cure}")
        if not settings.tls_certificate_path:
            cure = "set service.tls_certificate_path, or put a proxy with TLS in front"
            found.append(f"tokens, keys and vectors are sent to and from {host} unencrypted; {cure}")
    return found


class _Bucket:
    """A token bucket: holds at most `size`, gains `rate` a second. *One per event loop.*"""

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate, self.size = rate, size
        self._level, self._at = size, now

    def level(self, now: float) -> float:
        self._level = min(self.size, self._level + self.rate * (now - self._at))
        self._at = now
        return self._level

    def take(self, count: float) -> None:
        # A lookup is admitted by its head, and its keys are counted once they are known. So the level may become negative, and
        # the client's next requests are refused until it has recovered.
        self._level -= count


class Identity:
    """A client with a known token or certificate. *One per event loop.*"""

    def __init__(
        self, name: str, label: str, rights: Iterable[Right], requests: _Bucket | None = None, keys: _Bucket | None = None
    ) -> None:
        self.name, self.label, self.rights = name, label, frozenset(rights)
        self._requests, self.keys = requests, keys  # limits, if any

    def count(self, now: float) -> None:
        """Count a request; raise RequestError 429 if it exceeds a limit."""
        for bucket, least, key in ((self._requests, 1.0, "requests_per_s"), (self.keys, 0.0, "keys_per_s")):
            if bucket is not None and (level := bucket.level(now)) < least:
                wait_s = max(1, math.ceil((least - level) / bucket.rate))
                message = f"{self.label}: got more than its {key} allows; send the request again in {wait_s} s"
                raise RequestError(429, message, (b"retry-after", b"%d" % wait_s))
        if self._requests is not None:
            self._requests.take(1)


class Authorization:
    """Checks the tokens and certificates of requests. *One per event loop.*

    Tokens are those of the settings, which have no limits, and those of `service.tokens_path`.

    Args:
        settings: their tokens apply until `configure` changes them.
        share: this process's share of each limit; 0 disables limits.
        clock: returns monotonic seconds.

    Attributes:
        guarded: whether lookups need a token or a known certificate.
        asks: whether any request needs one.
        loopback: whether the server is bound to loopback.
    """

    # Without an `admin_token` and without a file of tokens, changes are allowed only while the server listens on loopback,
    # where every client runs on this machine. Two kinds of remote clients reach loopback all the same, and are refused: those
    # behind a proxy that adds its headers, and web pages, whose browser sends their origin with every request but GET.

    def __init__(self, settings: ServiceConfig, share: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.loopback = False
        self._share, self._clock = share, clock
        self._buckets: dict[tuple[str, str, float, float], _Bucket] = {}
        self.configure(settings)

    def configure(self, settings: ServiceConfig, entries: Sequence[TokenConfig] = ()) -> None:
        """Use these tokens, and those of `service.tokens_path`. Unchanged limits keep their level."""
        bearer, admin = settings.bearer_token, settings.admin_token
        self.guarded = bool(bearer or settings.tokens_path)  # lookups need a token or a known certificate
        self._by_rights = bool(admin or settings.tokens_path)
        self.requires_tokens = bool(bearer or admin or settings.tokens_path)  # some requests need one
        self._by_digest: dict[bytes, Identity] = {}
        self._by_certificate: dict[str, Identity] = {}
        before, self._buckets = self._buckets, {}  # reused below, since a reload must not refill them
        if bearer:
            self._by_digest[_digest(bearer.encode())] = Identity("bearer token", "the bearer token", ["lookup"])
        if admin:
            self._by_digest[_digest(admin.encode())] = Identity(
                "admin token", "the admin token", ["lookup", "write", "files", "admin"]
            )
        for entry in entries:
            requests = self._bucket(before, entry.name, "requests", entry.requests_per_s, entry.burst)
            keys = self._bucket(before, entry.name, "keys", entry.keys_per_s, None)
            identity = Identity(entry.name, f"token {entry.name}", entry.rights, requests, keys)
            self._by_digest |= {bytes.fromhex(digest): identity for digest in entry.sha256}
            self._by_certificate |= dict.fromkeys(entry.certificate, identity)

    def _bucket(
        self,
        before: Mapping[tuple[str, str, float, float], _Bucket],
        name: str,
        kind: str,
        rate: float | None,
        burst: float | None,
    ) -> _Bucket | None:
        if rate is None or not self._share:
            return None
        rate, size = rate * self._share, max(1.0, (burst or rate) * self._share)
        key = name, kind, rate, size
        bucket = self._buckets[key] = before.get(key) or _Bucket(rate, size, self._clock())
        return bucket

    @property
    def administration(self) -> Administration:
        """What a change of models needs."""
        if not self._by_rights:
            return "loopback" if self.loopback else "off"
        if any("admin" in identity.rights for identity in self._by_certificate.values()):
            return "certificate or token"
        return "token" if any("admin" in identity.rights for identity in self._by_digest.values()) else "off"

    def find(self, headers: Mapping[bytes, bytes], certificate: Sequence[str] = ()) -> Identity | None:
        """Identify a client by its token, or without one by the names in its valid certificate; return None if unknown."""
        if (given := headers.get(b"authorization")) is not None:
            scheme, _, token = given.partition(b" ")
            # Digests are compared, so that the duration reveals nothing about a token.
            return self._by_digest.get(_digest(token.strip())) if scheme.lower() == b"bearer" else None
        known = next((self._by_certificate[name] for name in certificate if name in self._by_certificate), None)
        if known is None and certificate and not self.guarded:
            return Identity(certificate[0], f"certificate {certificate[0]}", ())
        return known

    def counted(self, identity: Identity | None) -> str:
        """Return the name under which requests are counted: that of a known token, else empty."""
        return identity.name if identity is not None and self.guarded else ""

    def admit(
        self, identity: Identity | None, right: Right | None, headers: Mapping[bytes, bytes], certificate: Sequence[str] = ()
    ) -> None:
        """Authorize a request that changes nothing, and count it.

        Args:
            identity: the client, from `find`.
            right: the necessary right; None if every known client may send it.

        Raises:
            RequestError: 401, it has no valid token; 403, its token or certificate does not allow it; 429, too many.
        """
        if self.guarded:
            if identity is None:
                raise _unknown(headers, certificate, "<token>")
            if right is not None and right not in identity.rights:
                raise _lacking(identity, right)
        self.count(identity)

    def count(self, identity: Identity | None) -> None:
        """Count a request in the limits of its client; raise RequestError 429 if it exceeds one."""
        if identity is not None and self._share:
            identity.count(self._clock())

    def take_keys(self, identity: Identity | None, keys: int) -> None:
        """Count the keys of an admitted lookup. If they exceed the limit, later requests are refused."""
        if identity is not None and identity.keys is not None:
            identity.keys.take(keys)

    def check_lookup(self, headers: Mapping[bytes, bytes], certificate: Sequence[str] = ()) -> Identity | None:
        """Authorize a lookup as `admit`, and return its client."""
        identity = self.find(headers, certificate)
        self.admit(identity, "lookup", headers, certificate)
        return identity

    def check(self, scope: Scope, headers: Mapping[bytes, bytes], identity: Identity | None) -> str:
        """Authorize a request other than a lookup. Return the client that makes a change; empty if it changes nothing."""
        if is_change(scope["method"], scope["path"]):
            return self.check_change(scope, headers)
        if scope["path"].startswith(ROW_FILES):
            self._check_files(headers, identity, scope.get(CERTIFICATE, ()))
            return ""
        looks_up = _ROWS.fullmatch(scope["path"]) or scope["path"].startswith(_SHARED)
        self.admit(identity, "lookup" if looks_up else None, headers, scope.get(CERTIFICATE, ()))
        return ""

    def _check_files(self, headers: Mapping[bytes, bytes], identity: Identity | None, certificate: Sequence[str] = ()) -> None:
        """Authorize reading a row file: all rows of a table, so the right to look up is not enough where there are tokens."""
        if not self.requires_tokens:
            return
        if identity is None:
            raise _unknown(headers, certificate, "<token with the right files>")
        if "files" not in identity.rights:
            raise _lacking(identity, "files")

    def check_change(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Authorize a change, and return its client: the address and the kind of authorization.

        Raises:
            RequestError: 401, the token is missing or wrong; 403, the token does not allow changes. The message says why.
        """
        client = scope["client"][0] if scope.get("client") else "an unknown address"
        certificate = scope.get(CERTIFICATE, ())
        if self._by_rights:
            right: Right = "write" if _ROWS.fullmatch(scope["path"]) else "admin"
            if (identity := self.find(headers, certificate)) is None:
                raise _unknown(headers, certificate, f"<token with the right {right}>")
            if right not in identity.rights:
                raise _lacking(identity, right)
            return f"{client} ({identity.label.removeprefix('the ')})"
        if not self.loopback:
            raise _forbidden(f"changes are off: the server does not listen on loopback alone and has no admin token; {_CURE}")
        self.check_lookup(headers, certificate)
        if forwarded := next((name for name in FORWARDED if name in headers), None):
            raise _forbidden(f"got the header {forwarded.decode()!r}: without an admin token, proxies change nothing; {_CURE}")
        if (origin := headers.get(b"origin")) is not None and origin.lower() not in _server_origins(scope):
            raise _forbidden(f"got Origin {origin[:120].decode('latin-1')!r}: pages of other origins change nothing; {_CURE}")
        return f"{client} (loopback)"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _server_origins(scope: Scope) -> set[bytes]:
    """Return the origins of this server's own pages."""
    # By fixed names: any other name may resolve to this address, too (DNS rebinding).
    port = (scope.get("server") or ("", 0))[1]
    hosts = ("127.0.0.1", "localhost", "[::1]")
    return {f"{scheme}://{host}:{port}".encode() for scheme in ("http", "https") for host in hosts}


def _unknown(headers: Mapping[bytes, bytes], certificate: Sequence[str], token: str) -> RequestError:
    if certificate and b"authorization" not in headers:
        return RequestError(403, f"no entry of service.tokens_path has the certificate of {certificate[0]!r:.120}")
    message = f"the header 'Authorization: Bearer {token}' is missing or has the wrong token"
    return RequestError(401, message, (b"www-authenticate", b"Bearer"))


def _lacking(identity: Identity, right: Right) -> RequestError:
    return RequestError(403, f"{identity.label} lacks the right {right!r}, expected a token with it")


def _forbidden(reason: str) -> RequestError:
    return RequestError(403, f"changing models: {reason}")
