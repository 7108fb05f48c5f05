"""TLS of frontends: makes contexts from the certificate files, reloads changed ones, and reads names in client certificates."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Coroutine, Generator, Mapping
from types import coroutine
from typing import Any, Final, Protocol, TypeVar

from hps.configuration.load import ServiceConfig
from hps.errors import ConfigError
from hps.ground.small_files import FileMarks

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDENTIFYING: Final = ("DNS", "URI", "email")
_SOON_S: Final = 3 * 86400.0
_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL's x509_vfy.h


class Handshaking(Protocol):
    """A connection that begins with a handshake."""

    transport: asyncio.Transport

    def finish_handshake(self, transport: asyncio.Transport) -> None:
        """Use this transport from now on."""

    def fail_handshake(self, reason: str) -> None:
        """End the connection. The reason is empty if the client has disconnected."""


class TLS:
    """Secures connections, and reloads the certificate when its files change. *One event loop.*

    Open connections keep their certificate.

    Args:
        log_level: of lines about a certificate, which each frontend would log; default: by what they say.

    Attributes:
        expires_at: end of the certificate that new connections use, in seconds since 1970; None if unknown.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(self, settings: ServiceConfig, log_level: int | None = None) -> None:
        self._settings = settings
        self._level = log_level
        self._marks = FileMarks(settings.tls_certificate_path, settings.tls_key_path, settings.tls_client_ca_path)
        self._use(context_of(settings))
        self._tasks: set[asyncio.Task[None]] = set()

    def _use(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.expires_at = expiry_of(context, self._settings.tls_certificate_path)
        self._warned = False

    def poll(self) -> bool:
        """Reload changed files, unless they are invalid; return True if so. Called twice a second."""
        if self.expires_at is not None and not self._warned and self.expires_at < time.time() + _SOON_S:
            self._warned = True
            path, end = self._settings.tls_certificate_path, time.strftime("%F %T UTC", time.gmtime(self.expires_at))
            _log.log(self._level or logging.WARNING, "the certificate in %s is valid until %s: replace it", path, end)
        if not self._marks.changed():
            return False
        try:
            self._use(context_of(self._settings))
        except ConfigError as error:
            _log.log(self._level or logging.ERROR, "new connections keep the previous certificate: %s", error)
            return False
        path = self._settings.tls_certificate_path
        _log.log(self._level or logging.INFO, "new connections use the certificate in %s as it is now", path)
        return True

    def start_handshake(self, connection: Handshaking, settings: ServiceConfig) -> None:
        """Start the handshake of a connection, with the timeouts of these settings. Called by its `connection_made`."""
        loop = asyncio.get_running_loop()
        handshake = loop.start_tls(
            connection.transport,
            connection,  # type: ignore[arg-type]  # asyncio's stubs know no other kinds
            self._context,
            server_side=True,
            ssl_handshake_timeout=settings.request_timeout_s,
            ssl_shutdown_timeout=settings.answer_timeout_s,
        )
        # The first step hands the transport to TLS. It has to run before `connection_made` returns, since the event loop
        # then reads from the transport, and would pass the ClientHello to HTTP. Python 3.12 has eager tasks for this.
        awaited = handshake.send(None)
        task = loop.create_task(self._handshake(_resume(handshake, awaited), connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _handshake(handshake: Awaitable[asyncio.Transport | None], connection: Handshaking) -> None:
        reason = ""
        try:
            secure = await handshake
        except ssl.SSLError as error:
            reason = str(getattr(error, "verify_message", "") or error.reason or error)
        except OSError:  # the client has disconnected, or takes too long
            pass
        else:
            if secure is not None and not secure.is_closing():
                connection.finish_handshake(secure)
                return
        connection.fail_handshake(reason)


@coroutine
def _resume(started: Coroutine[Any, Any, _T], awaited: Any) -> Generator[Any, Any, _T]:
    """Resume a coroutine whose first step has yielded an awaitable."""
    yield awaited
    result: _T = yield from started
    return result


def context_of(settings: ServiceConfig) -> ssl.SSLContext:
    """Make a context from the configured files; raise ConfigError if one cannot be used."""
    certificate, key, ca = settings.tls_certificate_path, settings.tls_key_path, settings.tls_client_ca_path
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    key_name, paths = "tls_certificate_path", " and ".join(filter(None, (certificate, key)))
    try:
        # An encrypted key shall be an error; without this password OpenSSL would prompt on the terminal.
        context.load_cert_chain(certificate, key or None, password=lambda: "")
        if ca:
            key_name, paths = "tls_client_ca_path", ca
            context.load_verify_locations(cafile=ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError("service", [f"{key_name}: cannot use {paths}: {reason}; expected PEM files"]) from error
    return context


def expiry_of(context: ssl.SSLContext, certificate_path: str) -> float | None:
    """Return when the certificate of a server's context expires, in seconds since 1970; None if it names no server.

    Python's `ssl` decodes a certificate only for its peer, so a client in memory shakes hands with the context.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cafile=certificate_path)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (asking, answering, asking):  # the last step verifies the certificate
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return None
    found = asking.getpeercert()
    return None if not found else float(ssl.cert_time_to_seconds(str(found["notAfter"])))


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in a client's certificate: the common name of its subject, then the alternative ones."""
    found = certificate or {}
    names = [value for part in found.get("subject", ()) for kind, value in part if kind == "commonName"]
    names += [value for kind, value in found.get("subjectAltName", ()) if kind in _IDENTIFYING]
    return tuple(dict.fromkeys(names))
