"""gRPC in a front: the calls of `inference.GRPCInferenceService`, health and reflection, over HTTP/2.

`ModelInfer` is a lookup like those over HTTP, from the same slots. Everything else is asked of the owner's application, and its
JSON answer becomes a message, so that both protocols say the same.
Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

import asyncio
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import quote

import orjson
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from hps.errors import InvalidInputError, NotReadyError
from hps.ground.http1 import Headers, given_twice
from hps.ground.memory.bounded_cache import BoundedCache
from hps.serve.frontend.answers import EncodedAnswer
from hps.serve.frontend.http2 import HTTP2Connection, Stream, literal
from hps.serve.frontend.proxy import forwarded
from hps.serve.frontend.published import LookupTarget
from hps.serve.http.authorization import Identity
from hps.serve.http.http_answer import DEFERRED_KEYS, RequestError, message_of, status_of
from hps.serve.http.http_metrics import DISCONNECTED
from hps.serve.http.request_body import inflate, inflated_bytes, too_large
from hps.serve.protocol.grpc_inference import InferAnswer, read_infer_request, stream_head, write_infer_answer
from hps.serve.protocol.grpc_messages import FILES, POOL, message

if TYPE_CHECKING:
    from hps.serve.frontend.frontend import Front
    from hps.serve.frontend.pending import Lookup

_PREFIX_BYTES: Final = 5
_HEAD: Final = b"\x88" + literal(b"content-type", b"application/grpc")  # :status 200
_DONE: Final = literal(b"grpc-status", b"0")
_ENCODINGS: Final = literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST_TIMEOUT_DIGITS: Final = 8
_MOST_MESSAGE: Final = 1500
_CALL_BYTES: Final = 4096  # of the objects of a call, beside its headers
_HEADER_BYTES: Final = 250  # of the objects of a header, beside its text
_MESSAGE_BYTES: Final = 64  # of the objects of a message, beside its bytes
_MOST_UNKNOWN: Final = 16  # calls of a connection at a time that need a token and have none
_CODES: Final = {  # of HTTP's status; see https://grpc.github.io/grpc/core/md_doc_statuscodes.html
    400: 3,  # INVALID_ARGUMENT
    401: 16,  # UNAUTHENTICATED
    403: 7,  # PERMISSION_DENIED
    404: 5,  # NOT_FOUND
    405: 12,  # UNIMPLEMENTED
    408: 4,  # DEADLINE_EXCEEDED
    409: 9,  # FAILED_PRECONDITION
    413: 8,  # RESOURCE_EXHAUSTED
    415: 12,
    429: 8,
    503: 14,  # UNAVAILABLE
    504: 4,
    507: 8,
}
_INTERNAL: Final = 13
_HealthResponse: Final = message("grpc.health.v1.HealthCheckResponse")
_StreamResponse: Final = message("inference.ModelStreamInferResponse")
_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
_WATCH: Final = "/grpc.health.v1.Health/Watch"
_LOAD: Final = "/inference.GRPCInferenceService/RepositoryModelLoad"
_OF_CLIENTS: Final = (_CODES[400], _CODES[404])  # codes that are INTERNAL for a load, as in Triton, whose examples expect it


class CallHead(NamedTuple):
    """What is known of a call before its first message, named as in a `Head` of HTTP/1.1."""

    path: str
    headers: Mapping[bytes, bytes]
    method: str = "POST"


class GrpcCall:
    """One call: what its stream is for. *One event loop.*

    Attributes:
        connection, head, client: of it.
        identity: who sent it, if known.
    """

    identity: Identity | None = None  # on the class: a call pays only for those it sets
    _message: bytearray | None = None  # one that is not complete
    _missing = _held = 0
    _compressed = False
    _inference: "GrpcInference | None" = None
    _task: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _started = _ended = False  # sent headers; sent trailers, or lost
    _unknown = False  # one of those that a connection has few of
    _slot = -1

    def __init__(self, connection: HTTP2Connection, stream: Stream, headers: Headers) -> None:
        self.front = cast("Front", connection.front)
        self.client = connection.client
        self.connection, self._stream = connection, stream
        path = headers.get(b":path", b"").decode("latin-1")
        self.head = CallHead(path, headers)
        self._prefix = bytearray()
        self._messages: deque[bytes | bytearray] = deque()
        self._since = time.monotonic()
        self._method = _METHODS.get(path, _UNKNOWN)
        try:
            self._admit(headers)
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            self.fail(error)

    def _admit(self, headers: Headers) -> None:
        if headers.repeated:
            raise InvalidInputError(given_twice(headers))
        if headers.get(b":method") != b"POST" or not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self._end(b"\x08\x03415" + literal(b"content-length", b"0"))
            return
        self._hold(call_bytes(headers), "reading the headers", spare=True)
        if self._method is _UNKNOWN:
            raise RequestError(405, f"got {self.head.path[:300]!r}, which is not served; reflection lists the services")
        front, certificate = self.front, self.connection.certificate
        front.published.poll()
        if front.authorization.asks or certificate:
            served = front.served()
            try:
                front.authorize(headers, certificate, served, LookupTarget(self.head.path, "") if self._method.infers else None)
            finally:
                self.identity = served.identity
            if self._method.guarded and served.identity is None:  # the owner checks rights of all that are no lookups
                front.authorization.admit(None, None, headers, certificate)
        if self.identity is None and (front.authorization.asks or self._method.path == _WATCH):
            connection = self.connection
            if connection.unknown >= _MOST_UNKNOWN:
                limit = f"expected at most {_MOST_UNKNOWN} calls at a time of a connection without a token"
                raise RequestError(429, f"{self._method.path}: got one more, {limit}; end one, or send a token")
            connection.unknown += 1
            self._unknown = True
        if (timeout := headers.get(b"grpc-timeout")) is not None:
            seconds = _seconds(timeout)
            if seconds < self.front.settings.request_timeout_s or self._method.streams:
                self._timer = self.front.loop.call_later(seconds, self._expire)

    @property
    def streams(self) -> bool:
        """Whether the client sends several messages."""
        return self._method.streams

    def _expire(self) -> None:
        if self._ended:
            return
        error = RequestError(504, "the deadline of the call has passed")
        if self._task is not None:
            self._task.cancel()
        if (inference := self._inference) is not None:
            self._inference = None
            inference.give_up(error)
            self._fail(error, inference.request_id)
        else:
            self.fail(error)

    # -- the request ------------------------------------------------------------------------------------------------------

    def data(self, data: memoryview) -> None:
        if self._ended:
            return
        try:
            while len(data):
                data = self._take(data)
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            self.fail(error)
            return
        if not self._messages:  # otherwise a client that streams has to wait
            self.connection.grant(self._stream)

    def _take(self, data: memoryview) -> memoryview:
        """Take what belongs to one message; return the rest."""
        if self._message is None:
            prefix = self._prefix
            if not prefix:
                self._since = time.monotonic()
            missing = _PREFIX_BYTES - len(prefix)
            prefix += data[:missing]
            data = data[missing:]
            if len(prefix) < _PREFIX_BYTES:
                return data
            size = int.from_bytes(prefix[1:], "big")
            self._compressed = prefix[0] == 1
            prefix.clear()
            if size > (most := self.front.settings.max_body_bytes):
                raise too_large(f"got a message of {size} bytes", most)
            self._hold(size + _MESSAGE_BYTES)
            if size <= len(data):
                self._arrived(bytes(data[:size]))
                return data[size:]
            self._message, self._missing = bytearray(size), size
        start = len(self._message) - self._missing
        size = min(self._missing, len(data))
        self._message[start : start + size] = data[:size]
        self._missing -= size
        if not self._missing:
            whole, self._message = self._message, None
            self._arrived(whole)
        return data[size:]

    def _arrived(self, data: bytes | bytearray) -> None:
        if self._compressed:
            encoding = self.head.headers.get(b"grpc-encoding", b"identity")
            if encoding not in (b"gzip", b"deflate"):
                raise RequestError(
                    415, f"got a message compressed by {encoding[:40].decode('latin-1')!r}, expected gzip or deflate"
                )
            most = self.front.settings.max_body_bytes
            self._hold(bound := inflated_bytes(data, most))
            inflated = inflate({b"content-encoding": encoding}, data, most)
            self._hold(len(inflated) - bound - len(data))
            data = inflated
        if self._messages and not self._method.streams:
            raise InvalidInputError("got two messages, expected one")
        self._messages.append(data)
        if self._method.streams:
            self._next()

    def end(self) -> None:
        """The client sends nothing more."""
        if self._ended:
            return
        if self._message is not None or self._prefix:
            self.fail(InvalidInputError("the last message is cut short"))
        elif not self._messages and not self._method.streams:
            self.fail(InvalidInputError("got no message, expected one"))
        else:
            self._next()

    def sent(self) -> None:
        self._next()

    def look(self, now: float, request_s: float) -> None:
        waits = not self._stream.ended and (not self._method.streams or self._message is not None)
        if waits and not self._ended and now - self._since > request_s:
            self.fail(RequestError(408, f"the message did not arrive within {request_s:g} s (service.request_timeout_s)"))

    def _next(self) -> None:
        """Answer the next message, unless one is being answered or the client does not read; end the call after the last."""
        method = self._method
        while not self._ended and self._inference is None and self._task is None:
            if method.streams and not self.connection.is_clear(self._stream):
                return
            if not self._messages:
                if self._stream.ended and method.streams:
                    self._end(_DONE if self._started else _HEAD + _DONE)
                self.connection.grant(self._stream)
                return
            data = self._messages.popleft()
            if method.infers:
                self._inference = GrpcInference(self)
                self._inference.start(data)
                return
            try:
                request = method.request.FromString(bytes(data))
            except DecodeError:
                self.fail(InvalidInputError(f"reading the request: it is not a {method.request.DESCRIPTOR.full_name}"))
                return
            if method.streams:
                self._hold(-len(data) - _MESSAGE_BYTES)
                self.reply(method.each(request))
            else:
                self._task = self.front.loop.create_task(self._answer(method.answers(self, request)))

    def _hold(self, size: int, what: str = "reading the request", *, spare: bool = False) -> None:
        """Hold so many bytes more; if negative, less."""
        if size > 0:
            self.front.memory.take(size, what, spare=spare)
        else:
            self.front.memory.held += size
        self._held += size

    # -- the answer -------------------------------------------------------------------------------------------------------

    async def _answer(self, answers: AsyncIterator[Any]) -> None:
        try:
            async for answer in answers:
                self.reply(answer)
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            self.fail(error)
        else:
            self._end(_DONE)

    def reply(self, answer: Any) -> None:
        """Send a message."""
        data = answer.SerializeToString()
        self._send((b"\0" + len(data).to_bytes(4, "big"), data))

    def _send(self, pieces: Sequence[bytes | memoryview], head: bytes = _HEAD, tail: bytes = b"") -> None:
        if not self._ended:
            self._ended = bool(tail)
            self.connection.send(self._stream, b"" if self._started else head, pieces, tail)
            self._started = True

    def _end(self, tail: bytes) -> None:
        if not self._ended:
            self._ended = True
            self.connection.send(self._stream, tail=tail)

    def answered(self, answer: InferAnswer, tensors: Sequence[memoryview], slot: int, more: bytes) -> None:
        """Send the answer of a lookup. Its tensors are in a slot, which is released afterwards."""
        if self._method.streams:  # the slot is needed again before the call ends
            self._finish_inference()
            copies = b"".join(piece for pair in zip(answer.heads, tensors, strict=True) for piece in pair)
            self.front.exchange.release(slot)
            head = stream_head(answer.size)
            self._send((b"\0" + (len(head) + answer.size).to_bytes(4, "big") + head, copies), _HEAD + more)
            return
        self._slot = slot
        pieces: list[bytes | memoryview] = [b"\0" + answer.size.to_bytes(4, "big") + answer.heads[0], tensors[0]]
        for head, tensor in zip(answer.heads[1:], tensors[1:], strict=True):
            pieces += (head, tensor)
        self._send(pieces, _HEAD + more, _DONE)

    def refused(self, error: Exception, request_id: bytes) -> None:
        """Answer a lookup that failed."""
        if self._method.streams:
            self._finish_inference()
            self.reply(_StreamResponse(error_message=message_of(error)))
        else:
            self._fail(error, request_id)

    def _finish_inference(self) -> None:
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.finish(200)
            self._hold(-inference.message_bytes - _MESSAGE_BYTES)

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        if self._ended:
            return
        served, now = self.front.served(), time.perf_counter()
        served.identity = self.identity
        self.front.note_error(error, self.client, self.head, served)
        if self._method.infers or self._method is _UNKNOWN:  # others are counted by the owner's application
            self.front.end(self.client, self.head, self._method.path or "unknown", served, status_of(error), now, watched=False)
        self._fail(error, served.id)

    def _fail(self, error: Exception, request_id: bytes) -> None:
        code = _CODES.get(status_of(error), _INTERNAL)
        if self._method.path == _LOAD and code in _OF_CLIENTS:
            code = _INTERNAL
        tail = b"" if self._started else _HEAD
        tail += literal(b"grpc-status", b"%d" % code) + literal(b"grpc-message", _percent_encoded(message_of(error)))
        if not self._started:
            tail += literal(b"x-request-id", request_id)
        if code == 12:
            tail += _ENCODINGS
        self._end(tail)

    # -- the end ----------------------------------------------------------------------------------------------------------

    def lost(self) -> None:
        self._ended = True
        if self._inference is not None:
            self._inference.give_up()
        if self._task is not None:
            self._task.cancel()

    def closed(self) -> None:
        if self._inference is not None:
            self._inference.close()
        self._hold(-self._held)
        self._messages.clear()
        if self._unknown:
            self.connection.unknown -= 1
        if self._timer is not None:
            self._timer.cancel()
        if self._slot >= 0:
            slot, self._slot = self._slot, -1
            self.front.exchange.release(slot)

    # -- the owner's application ------------------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Ask the owner's application; return status and body.

        Raises:
            RequestError: 503, it is not there.
            NotReadyError: it is asked whether it is ready, and does not answer lookups of this front.
        """
        self.front.check_ready(path)
        own = (b":", b"grpc-", b"content-type", b"host")
        lines = [(name, value) for name, value in self.head.headers.items() if not name.startswith(own)]
        headers = [(b"host", b"hps"), *lines]
        request = forwarded(method, path.encode(), headers, body, self.client, self.connection.certificate)
        return await self.front.owner.answer_of(request)

    async def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask the owner's application for JSON.

        Raises:
            RequestError: it refuses.
        """
        status, text = await self.ask(method, path, b"" if body is None else orjson.dumps(body))
        found = orjson.loads(text) if text else {}
        if status >= 400:
            raise RequestError(status, found.get("error", f"status {status}"))
        return found


class GrpcInference:
    """A lookup by `ModelInfer`. *One event loop.*"""

    message_bytes = _held = 0
    _watched = _finished = False
    _lookup: "Lookup | None" = None
    _keys: Sequence[bytes | memoryview] = ()

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._front = front = call.front
        self._served = front.served()
        self._served.identity = call.identity
        self._began = time.perf_counter()

    def start(self, data: bytes | bytearray) -> None:
        front, served, head = self._front, self._served, self._call.head
        served.bytes_in = self.message_bytes = len(data)
        try:
            if self._call.streams:
                front.authorization.count(self._call.identity)
            request = read_infer_request(data)
            target = LookupTarget(head.path, request.model_name, request.version or None)
            self._watched = front.begin(self._call.client, head, target, served, self._began)
            size = len(request.text) + request.size
            lookup = front.planned(self, target, served, request.text, size)
            if lookup is None:
                length = b"%d" % len(request.text)
                lookup = front.decoded(self, target, served, b"".join((request.text, *request.binary)), length)
            self._lookup, self._keys = lookup, request.binary
            self.slot_free()
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            self.refuse(error)

    def slot_free(self) -> None:
        front, lookup = self._front, self._lookup
        if lookup is None:
            return
        try:
            if not front.exchange.take_slot(lookup):
                return
            if lookup.plan is not None:
                room, at = front.exchange.keys_of(lookup), 0
                for piece in self._keys:
                    room[at : at + len(piece)] = piece
                    at += len(piece)
            self._keys = ()
            front.exchange.post(lookup)
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            self.refuse(error)

    @property
    def request_id(self) -> bytes:
        return self._served.id

    def hold(self, size: int, what: str = "reading the request") -> None:
        memory = self._front.memory
        memory.held -= self._held
        self._held = 0
        if size:
            self._held = memory.take(size, what)

    def wait_with(self, body: bytes | bytearray) -> None:
        """The lookup has its body itself."""

    def answered(self, lookup: "Lookup", slot: int, deferred: int) -> None:
        plan, view = lookup.plan, self._front.exchange.region.view
        if plan is None:
            return
        answer = _answer_of(plan.text)
        tensors, start = [], slot + plan.vectors_at
        for size in answer.sizes:
            tensors.append(view[start : start + size])
            start += size
        self._answer(answer, tensors, slot, deferred)

    def encoded(self, lookup: "Lookup", slot: int, deferred: int, answer: EncodedAnswer) -> None:
        binary = answer.binary
        if answer.text:
            message, tensors = write_infer_answer(b"".join(answer.text)), [*binary]
        else:  # one piece of memory has it all
            start = answer.text_bytes or 0
            message, tensors = write_infer_answer(bytes(binary[0][:start])), []
            for size in message.sizes:
                tensors.append(binary[0][start : start + size])
                start += size
        self._answer(message, tensors, slot, deferred)

    def _answer(self, answer: InferAnswer, tensors: Sequence[memoryview], slot: int, deferred: int) -> None:
        self._lookup = None
        self._served.bytes_out = answer.size
        more = literal(b"x-request-id", self._served.id)
        if deferred:
            more += literal(DEFERRED_KEYS, b"%d" % deferred)
        self._call.answered(answer, tensors, slot, more)

    def refuse(self, error: Exception) -> None:
        self._disown()
        self._front.note_error(error, self._call.client, self._call.head, self._served)
        self.finish(status_of(error))
        self._call.refused(error, self.request_id)

    def close(self) -> None:
        """The call has ended: with the answer, or without waiting for it."""
        if self._lookup is not None:
            self.give_up()
        self.finish(200)

    def give_up(self, error: Exception | None = None) -> None:
        """End without an answer: the client is gone, or its deadline has passed."""
        if error is not None:
            self._front.note_error(error, self._call.client, self._call.head, self._served)
            if self._lookup is not None:
                self._lookup.version.counts.failed(self._lookup.began_ns)
        self._disown()
        self.finish(DISCONNECTED if error is None else status_of(error))

    def _disown(self) -> None:
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            self._front.exchange.disown(lookup)

    def finish(self, status: int) -> None:
        """Count and log the lookup, once."""
        if self._finished:
            return
        self._finished = True
        self.hold(0)
        self._front.end(
            self._call.client, self._call.head, self._call.head.path, self._served, status, self._began, watched=self._watched
        )


_answer_of = BoundedCache(
    write_infer_answer,
    lambda answer, text: 1000 + len(text) + sum(map(len, answer.heads)) + 80 * len(answer.heads),
)


def call_bytes(headers: Mapping[bytes, bytes]) -> int:
    """Return an upper bound on what a call takes beside its messages."""
    return _CALL_BYTES + sum(_HEADER_BYTES + len(name) + len(value) for name, value in headers.items())


def _seconds(timeout: bytes) -> float:
    digits, unit = timeout[:-1], _UNITS.get(timeout[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _MOST_TIMEOUT_DIGITS:
        raise InvalidInputError(f"got grpc-timeout {timeout[:40].decode('latin-1')!r}, expected up to 8 digits and a unit")
    return int(digits) * unit


def _percent_encoded(text: str) -> bytes:
    return quote(text[:_MOST_MESSAGE], safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()


# -- methods --------------------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """A method that is served.

    Attributes:
        request: class of its requests.
        answers: makes the answers to a request.
        each: answers one message of a stream of them.
        infers: whether its messages are lookups.
        streams: whether clients send several messages.
        guarded: whether it takes the right to look up; the owner's application knows what others take.
    """

    path: str
    request: Any = None
    answers: Callable[[GrpcCall, Any], AsyncIterator[Any]] = cast(Any, None)
    each: Callable[[Any], Any] = cast(Any, None)
    infers: bool = False
    streams: bool = False
    guarded: bool = False


async def _live(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    try:
        status, _ = await call.ask("GET", "/v2/health/live")
    except RequestError:  # the front answers, and the owner is being started again
        status = 200
    yield message("inference.ServerLiveResponse")(live=status == 200)


async def _ready(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    yield message("inference.ServerReadyResponse")(ready=await call.front.owner_health.is_ready())


async def _model_ready(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    try:
        await call.json("GET", _model_path(request, "/ready"))
    except (RequestError, NotReadyError) as error:
        if status_of(error) not in (404, 503):
            raise
        yield message("inference.ModelReadyResponse")(ready=False)  # as Triton, also for a model that it does not know
    else:
        yield message("inference.ModelReadyResponse")(ready=True)


async def _server_metadata(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    yield _parsed("ServerMetadataResponse", await call.json("GET", "/v2"))


async def _model_metadata(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    yield _parsed("ModelMetadataResponse", await call.json("GET", _model_path(request)))


async def _model_config(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    yield _parsed("ModelConfigResponse", {"config": await call.json("GET", _model_path(request, "/config"))})


async def _model_statistics(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    path = _model_path(request, "/stats") if request.name else "/v2/models/stats"
    yield _parsed("ModelStatisticsResponse", await call.json("GET", path))


async def _repository_index(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    found = await call.json("POST", f"/v2/repository{_repository(request)}/index", {"ready": request.ready})
    yield _parsed("RepositoryIndexResponse", {"models": found})


async def _load(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    parameters = {}
    for name, value in request.parameters.items():
        given = getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        parameters[name] = b64encode(given).decode() if isinstance(given, bytes) else given
    path = f"/v2/repository{_repository(request)}/models/{quote(request.model_name, safe='')}/load"
    await call.json("POST", path, {"parameters": parameters})
    yield message("inference.RepositoryModelLoadResponse")()


async def _unload(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    await call.json("POST", f"/v2/repository{_repository(request)}/models/{quote(request.model_name, safe='')}/unload", {})
    yield message("inference.RepositoryModelUnloadResponse")()


def _repository(request: Any) -> str:
    return f"/{quote(request.repository_name, safe='')}" if request.repository_name else ""


def _model_path(request: Any, after: str = "") -> str:
    version = f"/versions/{quote(request.version, safe='')}" if request.version else ""
    return f"/v2/models/{quote(request.name, safe='')}{version}{after}"


def _parsed(name: str, found: Any) -> Any:
    return ParseDict(found, message(f"inference.{name}")(), ignore_unknown_fields=True)


async def _check(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    if request.service and request.service not in _SERVICES:
        raise RequestError(404, f"got service {request.service[:120]!r}, expected one of {', '.join(_SERVICES)}")
    yield _HealthResponse(status=_status(await call.front.owner_health.is_ready()))


async def _watch(call: GrpcCall, request: Any) -> AsyncIterator[Any]:
    if request.service and request.service not in _SERVICES:
        yield _HealthResponse(status="SERVICE_UNKNOWN")
        await asyncio.Event().wait()  # until the client ends the call
    async with aclosing(call.front.owner_health.watch()) as found:
        async for ready in found:
            yield _HealthResponse(status=_status(ready))


def _status(ready: bool) -> str:
    return "SERVING" if ready else "NOT_SERVING"


def _reflect(package: str, request: Any) -> Any:
    answer = message(f"{package}.ServerReflectionResponse")(valid_host=request.host, original_request=request)
    file = None
    match request.WhichOneof("message_request"):
        case "list_services":
            for name in _SERVICES:
                answer.list_services_response.service.add(name=name)
            return answer
        case "file_by_filename":
            file = FILES.get(request.file_by_filename)
        case "file_containing_symbol":
            symbol = request.file_containing_symbol
            for one in (symbol, symbol.rpartition(".")[0]):  # the pool does not know methods
                with suppress(KeyError):
                    file = file or FILES[POOL.FindFileContainingSymbol(one).name]
    if file is not None:
        answer.file_descriptor_response.file_descriptor_proto.append(file.SerializeToString())
    else:
        answer.error_response.error_code, answer.error_response.error_message = _CODES[404], "not found"
    return answer


_SERVICES: Final = [f"{file.package}.{service.name}" for file in FILES.values() for service in file.service]
_ANSWERS: Final[dict[str, Callable[[GrpcCall, Any], AsyncIterator[Any]]]] = {
    "ServerLive": _live,
    "ServerReady": _ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _model_metadata,
    "ModelConfig": _model_config,
    "ModelStatistics": _model_statistics,
    "RepositoryIndex": _repository_index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
    "Check": _check,
    "Watch": _watch,
}
_UNKNOWN: Final = Method("")


def _methods() -> dict[str, Method]:
    found = {}
    for file in FILES.values():
        for service in file.service:
            for method in service.method:
                path = f"/{file.package}.{service.name}/{method.name}"
                found[path] = Method(
                    path,
                    message(f"{file.package}.{method.input_type}"),
                    cast(Any, _ANSWERS.get(method.name)),
                    partial(_reflect, file.package),
                    method.name in ("ModelInfer", "ModelStreamInfer"),
                    method.client_streaming,
                    method.name not in _ANSWERS,
                )
    return found


_METHODS: Final = _methods()


def grpc_connection(front: "Front") -> HTTP2Connection:
    """Make a connection whose streams are calls."""
    return HTTP2Connection(front, GrpcCall)
