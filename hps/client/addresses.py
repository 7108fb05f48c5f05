"""Addresses of servers: `http://host:port`, `https://host:port` and `unix:///path`."""

import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from hps.errors import InvalidInputError

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server. *Immutable.*"""

    text: str  # without slashes at its end, and without secrets; routing by key identifies servers by it
    host: str
    port: int
    path: str  # of a unix socket; empty for TCP
    prefix: str  # of the paths of all requests, behind some proxies
    tls: ssl.SSLContext | None  # None: plain text

    @property
    def authority(self) -> str:
        """Value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.tls else "http"] else f"{host}:{self.port}"

    def open(self, timeout_s: float) -> socket.socket:
        """Connect.

        Raises:
            OSError: the server cannot be reached; TimeoutError: within the time.
        """
        if self.path:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(timeout_s)
                connection.connect(self.path)
            except BaseException:
                connection.close()
                raise
            return connection
        connection = socket.create_connection((self.host, self.port), timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection if self.tls is None else self.tls.wrap_socket(connection, server_hostname=self.host)
        except BaseException:
            connection.close()
            raise


def read_addresses(
    given: str | Sequence[str],
    tls: ssl.SSLContext | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
) -> tuple[Address, ...]:
    """Read addresses.

    Args:
        tls: context of `https://` addresses; None: one with the system's certificate authorities, or `ca_file`, and the
            client's `certificate` and key, if any.

    Raises:
        InvalidInputError: an address or a file is wrong.
    """
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise InvalidInputError("connecting to a server: got no address, expected at least one")
    if tls is None and (ca_file or certificate or any(text.startswith("https:") for text in texts)):
        tls = _context(ca_file, certificate)
    return tuple(_read(text, tls) for text in texts)


def _context(ca_file: str | os.PathLike[str] | None, certificate: str | os.PathLike[str] | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise InvalidInputError(f"reading the certificate authorities {ca_file}: {error.strerror or error}") from error
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, password=lambda: "")  # or the terminal would be asked for one
        except OSError as error:
            reason = error.strerror or error
            raise InvalidInputError(f"reading the certificate {os.fsdecode(certificate)}: {reason}") from error
    return context


def _read(text: str, tls: ssl.SSLContext | None) -> Address:
    expected = "expected for instance http://127.0.0.1:8000, https://host or unix:///run/hps.sock"
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname or ""
        if parts.username is not None or parts.password is not None:
            raise InvalidInputError("connecting to a server: got an address with a user, expected none; pass token=...")
    except ValueError as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"connecting to a server: got address {text[:200]!r} ({error}), {expected}") from None
    good = text.isprintable() and " " not in text and not parts.query and not parts.fragment
    if good and parts.scheme == "unix" and not host and parts.path:
        return Address(text, "localhost", 80, unquote(parts.path), "", None)
    if not good or parts.scheme not in _PORTS or not host or port == 0:
        raise InvalidInputError(f"connecting to a server: got address {text[:200]!r}, {expected}")
    secure = parts.scheme == "https"
    return Address(text.rstrip("/"), host, port or _PORTS[parts.scheme], "", parts.path.rstrip("/"), tls if secure else None)
