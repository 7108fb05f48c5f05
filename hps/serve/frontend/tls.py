"""TLS of fronts: the context for new connections, made of files that are read again, and the names in client certificates."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Coroutine, Generator, Mapping
from types import coroutine
from typing import Any, Final, Protocol, TypeVar

from hps.configuration.load import ServiceConfig
from hps.errors import ConfigError
from hps.ground.small_files import FileMarks

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDENTIFYING: Final = ("DNS", "URI", "email")


class Handshaking(Protocol):
    """A connection that begins with a handshake."""

    transport: asyncio.Transport

    def secured(self, transport: asyncio.Transport) -> None:
        """The handshake is done; the client is reached by another transport from now on."""

    def not_secured(self, why: str) -> None:
        """The handshake has failed; empty: the client has gone."""


class TLS:
    """Makes connections secure, by a certificate that is read again when its files change. *One event loop.*

    A connection keeps the certificate that it began with.

    Args:
        settings: name the files.
        log_level: of the line about a new certificate; another front says the same.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(self, settings: ServiceConfig, log_level: int | None = None) -> None:
        self._settings = settings
        self._level = log_level
        self._marks = FileMarks(settings.tls_certificate_path, settings.tls_key_path, settings.tls_client_ca_path)
        self._context = context_of(settings)
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self) -> bool:
        """Read the files again if they have changed; wrong ones change nothing. Call this twice a second.

        Returns:
            Whether new connections use another certificate.
        """
        if not self._marks.changed():
            return False
        try:
            self._context = context_of(self._settings)
        except ConfigError as error:
            _log.log(self._level or logging.ERROR, "new connections go on with the certificate as it was: %s", error)
            return False
        path = self._settings.tls_certificate_path
        _log.log(self._level or logging.INFO, "new connections use the certificate in %s as it is now", path)
        return True

    def begin(self, connection: Handshaking, settings: ServiceConfig) -> None:
        """Begin the handshake of a connection. Call this from its `connection_made`; the settings have the timeouts."""
        loop = asyncio.get_running_loop()
        handshake = loop.start_tls(
            connection.transport,
            connection,  # type: ignore[arg-type]  # asyncio's stubs know no other kinds
            self._context,
            server_side=True,
            ssl_handshake_timeout=settings.request_timeout_s,
            ssl_shutdown_timeout=settings.answer_timeout_s,
        )
        # Its first step gives the transport to TLS. It is taken now, since the transport is read from as soon as
        # `connection_made` returns; from Python 3.12 on that would be an eager task.
        done = handshake.send(None)
        task = loop.create_task(self._end(_resumed(handshake, done), connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _end(handshake: Awaitable[asyncio.Transport | None], connection: Handshaking) -> None:
        why = ""
        try:
            secure = await handshake
        except ssl.SSLError as error:
            why = str(getattr(error, "verify_message", "") or error.reason or error)
        except OSError:  # the client has gone, or takes too long
            pass
        else:
            if secure is not None and not secure.is_closing():
                connection.secured(secure)
                return
        connection.not_secured(why)


@coroutine
def _resumed(begun: Coroutine[Any, Any, _T], waits_for: Any) -> Generator[Any, Any, _T]:
    """Go on with a coroutine whose first step has yielded something to wait for."""
    yield waits_for
    ended: _T = yield from begun
    return ended


def context_of(settings: ServiceConfig) -> ssl.SSLContext:
    """Make a context of the configured files.

    Raises:
        ConfigError: they cannot be used; the message says which and why.
    """
    certificate, key, ca = settings.tls_certificate_path, settings.tls_key_path, settings.tls_client_ca_path
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    what, paths = "tls_certificate_path", " and ".join(filter(None, (certificate, key)))
    try:
        # An encrypted key is an error; without a password the terminal would be asked for one.
        context.load_cert_chain(certificate, key or None, password=lambda: "")
        if ca:
            what, paths = "tls_client_ca_path", ca
            context.load_verify_locations(cafile=ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError("service", [f"{what}: cannot use {paths}: {reason}; expected PEM files"]) from error
    return context


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in a client's certificate: the common name of its subject, then the alternative ones."""
    found = certificate or {}
    names = [value for part in found.get("subject", ()) for kind, value in part if kind == "commonName"]
    names += [value for kind, value in found.get("subjectAltName", ()) if kind in _IDENTIFYING]
    return tuple(dict.fromkeys(names))
