"""A gRPC call in a frontend: its client, its memory, and a lookup by `ModelInfer`.

A lookup takes the same slots as over HTTP. Everything else is requested from the engine's application, whose JSON answer
becomes a message, so that both protocols agree.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import orjson

from hps.errors import InvalidInputError
from hps.ground.http1 import Headers, repeated_header_message
from hps.ground.memory.bounded_cache import BoundedCache
from hps.serve.frontend.answers import EncodedAnswer
from hps.serve.frontend.frontend import Frontend
from hps.serve.frontend.pending import Lookup
from hps.serve.frontend.proxy import forwarded
from hps.serve.frontend.published import LookupTarget
from hps.serve.http.authorization import Identity
from hps.serve.http.http_answer import DEFERRED_KEYS, RequestError, status_of
from hps.serve.http.http_metrics import DISCONNECTED
from hps.serve.protocol.grpc_inference import InferAnswer, read_infer_request, write_infer_answer

_CALL_BYTES: Final = 16_384  # of a call's objects, here and in the library, beside its headers
_HEADER_BYTES: Final = 250  # of the objects of a header, beside its text
_NOT_FORWARDED: Final = (b"grpc-", b"content-type", b"host")


class CallHead(NamedTuple):
    """The head of a call, with the attributes of `http1.Head` (`RequestHead`)."""

    path: str
    headers: Mapping[bytes, bytes]
    method: str = "POST"


class GrpcCall:
    """One call, whose context is of grpc.aio. *One event loop.*"""

    def __init__(self, frontend: Frontend, path: str, context: Any) -> None:
        self.frontend = frontend
        self.context = context
        # Binary metadata may have line feeds, and headers are forwarded to the engine as lines.
        pairs = [(name, value) for name, value in context.invocation_metadata() if isinstance(value, str)]
        self.headers = Headers([(name.encode(), value.encode()) for name, value in pairs])
        self.head = CallHead(path, self.headers)
        self.peer: str = context.peer()  # address of the connection
        self.client = unquote(self.peer).partition(":")[2].rpartition(":")[0].strip("[]")  # IP address
        # Names in the client's certificate.
        self.certificate = _names(context.auth_context()) if frontend.settings.tls_client_ca_path else ()
        self.identity: Identity | None = None
        self.task = asyncio.current_task()
        self.started = time.perf_counter()
        self.request_id = b""  # of the last answered request
        self.reads_since = 0.0  # start of waiting for a message, or 0
        self.waits = self.streams = self.unknown = False
        self.ends_with: Exception | None = None  # reason for which `end_with` has cancelled the task
        self.reported: Exception | None = None  # already counted and logged
        self._held = self._metadata_bytes = 0

    def admit(self, *, infers: bool, guarded: bool) -> None:
        """Check metadata, token and rights before any message is read.

        Args:
            infers: whether its messages are lookups.
            guarded: whether a call that is no lookup needs a token; for forwarded calls the engine's application decides.
        """
        frontend, headers = self.frontend, self.headers
        if headers.repeated:
            raise InvalidInputError(repeated_header_message(headers))
        size = _CALL_BYTES + sum(_HEADER_BYTES + len(name) + len(value) for name, value in headers.items())
        self.reserve_bytes(size, "reading the headers", spare=True)
        self._metadata_bytes = size
        frontend.published.poll()
        if frontend.authorization.requires_tokens or self.certificate:
            served = frontend.served()
            try:
                frontend.authorize(headers, self.certificate, served, LookupTarget(self.head.path, "") if infers else None)
            finally:
                self.identity = served.identity
            if guarded and self.identity is None:
                frontend.authorization.admit(None, None, headers, self.certificate)

    async def read(self) -> bytes | None:
        """Wait for the next message, and count its memory; None at the end, or if the library has refused it."""
        self.waits, self.reads_since = True, time.monotonic()
        data = await self.context.read()
        self.waits, self.reads_since = False, 0.0
        if not isinstance(data, bytes):
            return None
        self.reserve_bytes(len(data))
        return data

    def end_with(self, error: Exception) -> None:
        """End the call with an error, also while it waits."""
        if self.ends_with is None and self.task is not None:
            self.ends_with = error
            self.task.cancel()

    def reserve_bytes(self, size: int, what: str = "reading the request", *, spare: bool = False) -> None:
        """Reserve further bytes, or raise RequestError or OverloadedError."""
        self._held += self.frontend.memory.reserve(size, what, spare=spare)

    def count_answer(self, size: int) -> None:
        """Count the memory of an answer until it is sent. It exists already, so only later requests can be refused for it."""
        self.frontend.memory.used += size
        self._held += size

    def release_messages(self) -> None:
        """Release the memory of a stream's message and of its answer."""
        self.frontend.memory.used -= self._held - self._metadata_bytes
        self._held = self._metadata_bytes

    def cancellation_error(self) -> Exception | None:
        """Return why the task is cancelled: the error of `end_with`, or a deadline; None if the client has disconnected."""
        if self.ends_with is None and self.context.time_remaining() == 0:
            self.ends_with = RequestError(504, "the deadline of the call has passed")
        return self.ends_with

    def close(self) -> None:
        self.frontend.memory.used -= self._held
        self._held = 0

    # -- the engine's application -----------------------------------------------------------------------------------------

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request to the engine's application; return status and body.

        Raises:
            RequestError: 503, the engine is not running.
            NotReadyError: readiness is requested, and the engine does not answer lookups of this frontend.
        """
        self.frontend.check_ready(path)
        headers = [(b"host", b"hps"), *(line for line in self.headers.items() if not line[0].startswith(_NOT_FORWARDED))]
        request = forwarded(method, path.encode(), headers, body, self.client, self.certificate)
        return await self.frontend.engine.fetch_answer(request)

    async def request_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Request JSON from the engine's application; raise RequestError if it refuses."""
        status, text = await self.request(method, path, b"" if body is None else orjson.dumps(body))
        found = orjson.loads(text) if text else {}
        if status >= 400:
            raise RequestError(status, found.get("error", f"status {status}"))
        return found


def _names(context: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """Return the names in a client's certificate, in the order of `tls.names_in`."""
    kinds = ("x509_common_name", "peer_dns", "peer_uri", "peer_email")
    return tuple(dict.fromkeys(name.decode() for kind in kinds for name in context.get(kind, ())))


class GrpcLookup:
    """A lookup by `ModelInfer`, or by one message of `ModelStreamInfer`. *One event loop.*"""

    def __init__(self, call: GrpcCall, size: int) -> None:
        self._call = call
        self._frontend = frontend = call.frontend
        self._served = served = frontend.served()
        served.identity, served.bytes_in = call.identity, size
        self._started = time.perf_counter()
        self._watched = False
        self._held = 0
        self._lookup: Lookup | None = None
        self._keys: Sequence[bytes | memoryview] = ()
        self._deferred = 0
        self._message: asyncio.Future[bytes] = frontend.loop.create_future()

    async def answer(self, data: bytes) -> bytes:
        """Return the `ModelInferResponse`. Errors are counted and logged here, and raised."""
        frontend, call, served = self._frontend, self._call, self._served
        status = DISCONNECTED
        try:
            self._post(data)
            message = await self._message
            status = 200
            metadata = [("x-request-id", served.id.decode())]
            if self._deferred:
                metadata.append((DEFERRED_KEYS.decode(), str(self._deferred)))
            # Trailing, since initial metadata would take another round through the library's threads.
            call.context.set_trailing_metadata(tuple(metadata))
            return message
        except asyncio.CancelledError:  # the client has disconnected, or `cancellation_error` has a reason
            if (error := call.cancellation_error()) is not None:
                status = status_of(error)
                call.reported = error
                frontend.record_error(error, call.client, call.head, served)
            if self._lookup is not None and status != DISCONNECTED:
                self._lookup.version.counts.failed(self._lookup.began_ns)
            raise
        except Exception as error:
            status, call.reported = status_of(error), error
            frontend.record_error(error, call.client, call.head, served)
            raise
        finally:
            call.request_id = served.id
            lookup, self._lookup = self._lookup, None
            if lookup is not None:
                frontend.exchange.disown(lookup)
            self.reserve_bytes(0)
            frontend.finish_request(
                call.client, call.head, call.head.path, served, status, self._started, watched=self._watched
            )

    def _post(self, data: bytes) -> None:
        frontend, call, served = self._frontend, self._call, self._served
        request = read_infer_request(data)
        target = LookupTarget(call.head.path, request.model_name, request.version or None)
        self._watched = frontend.start_request(call.client, call.head, target, served, self._started)
        lookup = frontend.start_planned(self, target, served, request.text, len(request.text) + sum(map(len, request.binary)))
        if lookup is None:
            length = b"%d" % len(request.text)
            lookup = frontend.start_decoded(self, target, served, b"".join((request.text, *request.binary)), length)
        self._lookup, self._keys = lookup, request.binary
        self._take_slot(lookup)

    def _take_slot(self, lookup: Lookup) -> None:
        exchange = self._frontend.exchange
        if not exchange.take_slot(lookup):
            return
        if lookup.plan is not None:
            target, at = exchange.keys_of(lookup), 0
            for piece in self._keys:
                target[at : at + len(piece)] = piece
                at += len(piece)
        self._keys = ()
        exchange.post(lookup)

    # -- `pending.Requester`, called by the exchange ----------------------------------------------------------------------

    def retry_slot(self) -> None:
        if self._lookup is not None:
            try:
                self._take_slot(self._lookup)
            except Exception as error:  # noqa: BLE001 - the client gets an answer
                self.refuse(error)

    def reserve_bytes(self, size: int, what: str = "reading the request") -> None:
        memory = self._frontend.memory
        memory.used -= self._held
        self._held = 0
        if size:
            self._held = memory.reserve(size, what)

    def wait_with(self, body: bytes | bytearray) -> None:
        """Do nothing: the lookup has its body."""

    def answered(self, lookup: Lookup, slot: int, deferred: int) -> None:
        if lookup.plan is not None:
            start = slot + lookup.plan.vectors_at
            tensors = self._frontend.exchange.region.view[start : slot + lookup.plan.end]
            self._finish(_cached_answer(lookup.plan.text), tensors, slot, deferred)

    def encoded(self, lookup: Lookup, slot: int, deferred: int, answer: EncodedAnswer) -> None:
        text, pieces = b"".join(answer.text), b"".join(answer.binary)
        start = 0 if text else answer.text_bytes or 0  # if there is no text, the first piece contains it
        self._finish(write_infer_answer(text or pieces[:start]), memoryview(pieces)[start:], slot, deferred)

    def _finish(self, answer: InferAnswer, tensors: memoryview, slot: int, deferred: int) -> None:
        """Copy an answer out of its slot, since the library may keep the message until a slow client has read it."""
        self._lookup = None
        message = answer.joined(tensors)
        self._frontend.exchange.release(slot)
        self._call.count_answer(len(message))
        self._served.bytes_out, self._deferred = len(message), deferred
        if not self._message.done():
            self._message.set_result(message)

    def refuse(self, error: Exception) -> None:
        if not self._message.done():
            self._message.set_exception(error)


_cached_answer = BoundedCache(
    write_infer_answer,
    lambda answer, text: 1000 + len(text) + sum(map(len, answer.heads)) + 80 * len(answer.heads),
)
