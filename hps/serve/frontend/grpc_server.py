"""gRPC in a frontend, by grpc.aio: admits calls, reads their messages within limits, and ends them with a status.

Import this in a frontend's process only, after the fork: the library's threads do not survive one.
"""

import asyncio
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Collection
from contextlib import aclosing, suppress
from typing import Any, Final

import grpc
import grpc.aio

from hps.configuration.load import ServiceConfig
from hps.errors import InvalidInputError, NotReadyError
from hps.ground.small_files import read_small
from hps.serve.frontend.frontend import Frontend
from hps.serve.frontend.grpc_calls import GrpcCall
from hps.serve.frontend.grpc_methods import LOAD, METHODS, WATCH, Method
from hps.serve.http.http_answer import RequestError, message_of, release_frames, status_of

_MOST_METADATA: Final = 1 << 14
_MOST_STREAMS: Final = 256
_MOST_UNKNOWN: Final = 16  # calls of a connection at a time that need a token and have none
_MOST_MESSAGE: Final = 1500  # characters of an error
_CODES: Final = {  # of HTTP's status; see https://grpc.github.io/grpc/core/md_doc_statuscodes.html
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.UNIMPLEMENTED,
    421: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_INTERNAL_FOR_LOAD: Final = (400, 404)  # as in Triton, whose examples expect it


def _options(settings: ServiceConfig, connections: int) -> list[tuple[str, int]]:
    # The library refuses a message by its size before it reads it, also by its decompressed size, and a call beyond the streams
    # of a connection. By default it would end connections whose client pings more than once in five minutes.
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _MOST_STREAMS),
        ("grpc.max_metadata_size", _MOST_METADATA),
        ("grpc.absolute_max_metadata_size", _MOST_METADATA),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", int(1000 * settings.keep_alive_s)),
        ("grpc.server_handshake_timeout_ms", int(1000 * settings.request_timeout_s)),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ]


class GrpcServer(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """The gRPC server of a frontend, at an address that other frontends share. *One event loop.*"""

    def __init__(self, frontend: Frontend, address: tuple[str, int]) -> None:
        self._frontend = frontend
        self._address = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        self._calls: set[GrpcCall] = set()
        self._unknown: Counter[str] = Counter()  # calls without a token, by connection
        self._unsent: dict[GrpcCall, float] = {}  # calls whose answer is being sent, and since when
        self._renewed: Any = None  # a new certificate that the library has not requested yet
        self._handlers = {path: self._handler_of(path, method) for path, method in METHODS.items()}

    async def start(self) -> None:
        """Listen, with the current settings: the library cannot change them later."""
        # It logs a traceback for each client that disconnects before its answer is sent. Errors of handlers are logged here.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        settings = self._frontend.settings
        self._server = grpc.aio.server(options=_options(settings, self._frontend.connections.most))
        self._server.add_generic_rpc_handlers((self,))
        if settings.tls_certificate_path:
            credentials = grpc.dynamic_ssl_server_credentials(
                _certificate_of(settings), self._take_renewed, require_client_authentication=bool(settings.tls_client_ca_path)
            )
            self._server.add_secure_port(self._address, credentials)
        else:
            self._server.add_insecure_port(self._address)
        await self._server.start()

    def renew_certificate(self) -> None:
        self._renewed = _certificate_of(self._frontend.settings)

    def _take_renewed(self) -> Any:
        """Return a new certificate, or None. Called by the library's threads at each handshake."""
        renewed, self._renewed = self._renewed, None
        return renewed

    def poll(self, now: float) -> None:
        """End calls that take too long; `now` is a time of `time.monotonic`. Called twice a second."""
        settings = self._frontend.settings
        for call in list(self._calls):
            # The library does not report a partly received message of a stream, for which it keeps memory.
            name = "keep_alive_s" if call.streams else "request_timeout_s"
            if call.reads_since and now - call.reads_since > (limit_s := getattr(settings, name)):
                call.end_with(RequestError(408, f"the message did not arrive within {limit_s:g} s (service.{name})"))
        lagging = {call.peer: call for call, since in self._unsent.items() if now - since > settings.answer_timeout_s}
        for call in lagging.values():
            limit = f"no progress in {settings.answer_timeout_s:g} s (service.answer_timeout_s)"
            self._frontend.refusals.abort("answer", call.client or "an unknown address", limit)
        if lagging:
            _disconnect(lagging)

    async def stop(self, timeout_s: float) -> None:
        """Tell clients to reconnect, and wait until running calls have their answers."""
        for call in self._calls:
            if call.waits:
                call.end_with(NotReadyError("the service is stopping; connect again"))
        await self._server.stop(timeout_s)

    # -- calls ------------------------------------------------------------------------------------------------------------

    def service(self, details: Any) -> Any:
        """Return the handler of a call. Called by the library."""
        handler = self._handlers.get(details.method)
        return handler or self._handler_of(details.method, None)

    def _handler_of(self, path: str, method: Method | None) -> Any:
        async def answer_one(_: Any, context: Any) -> bytes | None:
            return await self._serve(path, method, context)

        async def answer_many(_: Any, context: Any) -> None:
            await self._serve(path, method, context)

        if method is None or not (method.streams or method.watch):
            return grpc.stream_unary_rpc_method_handler(answer_one)
        return grpc.stream_stream_rpc_method_handler(answer_many)

    async def _serve(self, path: str, method: Method | None, context: Any) -> bytes | None:
        """Serve a call; return its answer unless its method has many."""
        call = GrpcCall(self._frontend, path, context)
        self._calls.add(call)
        context.add_done_callback(lambda _: self._end(call))
        try:
            if method is None:
                raise RequestError(405, f"got {path[:300]!r}, which is not served; reflection lists the services")
            call.admit(infers=method.infers, guarded=method.guarded)
            if call.identity is None and (self._frontend.authorization.requires_tokens or path == WATCH):
                self._count_unknown(call)
            return await self._answer(call, method)
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the latter if an answer could not be sent any more
            reason = call.cancellation_error()
            if reason is None:
                raise  # the client has disconnected
            error = reason
        except Exception as failure:  # noqa: BLE001 - the client gets an answer
            error = failure
        self._report(call, method, error)
        release_frames(error)
        code = _CODES.get(status_of(error), grpc.StatusCode.INTERNAL)
        if path == LOAD and status_of(error) in _INTERNAL_FOR_LOAD:
            code = grpc.StatusCode.INTERNAL
        await context.abort(code, message_of(error)[:_MOST_MESSAGE], (("x-request-id", call.request_id.decode()),))
        return None

    async def _answer(self, call: GrpcCall, method: Method) -> bytes | None:
        respond, watch = method.answer, method.watch
        if method.streams and respond is not None:
            call.streams = True
            while (data := await call.read()) is not None:
                await self._write(call, await respond(call, data))
                call.release_messages()
            return None
        if (data := await call.read()) is None:
            limit = f"at most {self._frontend.settings.max_body_bytes} bytes (service.max_body_bytes)"
            raise InvalidInputError(f"got no message, or one that is too large, expected one of {limit}")
        if respond is not None:
            answer = await respond(call, data)
            self._unsent[call] = time.monotonic()
            return answer
        if watch is not None:
            call.waits = True
            async with aclosing(watch(call, data)) as answers:
                async for answer in answers:
                    await self._write(call, answer)
        return None

    async def _write(self, call: GrpcCall, answer: bytes) -> None:
        self._unsent[call] = time.monotonic()
        await call.context.write(answer)
        del self._unsent[call]

    def _count_unknown(self, call: GrpcCall) -> None:
        if self._unknown[call.peer] >= _MOST_UNKNOWN:
            limit = f"expected at most {_MOST_UNKNOWN} calls at a time of a connection without a token"
            raise RequestError(429, f"{call.head.path}: got one more, {limit}; end one, or send a token")
        self._unknown[call.peer] += 1
        call.unknown = True

    def _report(self, call: GrpcCall, method: Method | None, error: Exception) -> None:
        """Count and log the error of a call, unless its lookup has done so."""
        if call.reported is error:
            return
        frontend, served = self._frontend, self._frontend.served()
        served.identity, call.request_id = call.identity, served.id
        frontend.record_error(error, call.client, call.head, served)
        if method is None or method.infers:  # others are counted by the engine's application
            route = "unknown" if method is None else call.head.path
            frontend.finish_request(call.client, call.head, route, served, status_of(error), call.started, watched=False)

    def _end(self, call: GrpcCall) -> None:
        self._calls.discard(call)
        self._unsent.pop(call, None)
        if call.unknown:
            self._unknown[call.peer] -= 1
            if not self._unknown[call.peer]:
                del self._unknown[call.peer]
        call.close()


def _certificate_of(settings: ServiceConfig) -> Any:
    """Read the certificate's files, which `tls.context_of` has checked."""
    chain, ca = read_small(settings.tls_certificate_path), settings.tls_client_ca_path
    key = read_small(settings.tls_key_path) if settings.tls_key_path else chain
    return grpc.ssl_server_certificate_configuration([(key, chain)], read_small(ca) if ca else None)


def _disconnect(peers: Collection[str]) -> None:
    """Shut down the connections of these addresses."""
    # A call whose client does not read ends only with its connection: the library queues even the status of an abort behind
    # the answer, and has no function that closes a connection. So its sockets are looked up among the process's descriptors.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it is closed by now, or listens
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = connection.getpeername()[:2]
                    host = host.removeprefix("::ffff:")  # the library may accept IPv4 on a socket of IPv6
                    if f"ipv4:{host}:{port}" in peers or f"ipv6:%5B{host}%5D:{port}" in peers:
                        connection.shutdown(socket.SHUT_RDWR)
