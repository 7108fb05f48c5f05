"""The methods of gRPC that a frontend serves: `inference.GRPCInferenceService`, health and reflection."""

from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from hps.errors import InvalidInputError, NotReadyError
from hps.serve.frontend.grpc_calls import GrpcCall, GrpcLookup
from hps.serve.http.http_answer import RequestError, message_of, status_of
from hps.serve.protocol.grpc_inference import stream_error, streamed
from hps.serve.protocol.grpc_messages import FILES, POOL, message

INFERENCE: Final = "/inference.GRPCInferenceService"
WATCH: Final = "/grpc.health.v1.Health/Watch"
LOAD: Final = f"{INFERENCE}/RepositoryModelLoad"
_REFLECTION: Final = ("/grpc.reflection.v1.ServerReflection", "/grpc.reflection.v1alpha.ServerReflection")
_NOT_FOUND: Final = 5  # code of gRPC
_HealthResponse: Final = message("grpc.health.v1.HealthCheckResponse")
_ReflectionRequest: Final = message("grpc.reflection.v1.ServerReflectionRequest")
_ReflectionResponse: Final = message("grpc.reflection.v1.ServerReflectionResponse")
_SERVICES: Final = [f"{file.package}.{service.name}" for file in FILES.values() for service in file.service]


class Method(NamedTuple):
    """A method. It has either `answer` or `watch`; both take and return messages as bytes."""

    answer: Callable[[GrpcCall, bytes], Awaitable[bytes]] | None  # answers a message
    watch: Callable[[GrpcCall, bytes], AsyncGenerator[bytes, None]] | None = None  # answers a message many times
    infers: bool = False  # its messages are lookups
    streams: bool = False  # clients send several messages, each of which is answered
    guarded: bool = False  # it needs a token, which is checked here


# -- lookups --------------------------------------------------------------------------------------------------------------


async def _infer(call: GrpcCall, data: bytes) -> bytes:
    return await GrpcLookup(call, len(data)).answer(data)


async def _infer_streamed(call: GrpcCall, data: bytes) -> bytes:
    try:
        call.frontend.authorization.count(call.identity)
        return streamed(await GrpcLookup(call, len(data)).answer(data))
    except Exception as error:  # noqa: BLE001 - the stream goes on
        return stream_error(message_of(error))


# -- server, models and repository ----------------------------------------------------------------------------------------


async def _live(call: GrpcCall, request: Any) -> Any:
    try:
        status, _ = await call.request("GET", "/v2/health/live")
    except RequestError:  # the frontend lives, while the engine is being restarted
        status = 200
    return {"live": status == 200}


async def _ready(call: GrpcCall, request: Any) -> Any:
    return {"ready": await call.frontend.engine_health.is_ready()}


async def _model_ready(call: GrpcCall, request: Any) -> Any:
    try:
        await call.request_json("GET", _model_path(request, "/ready"))
    except (RequestError, NotReadyError) as error:
        if status_of(error) not in (404, 503):
            raise
        return {"ready": False}  # as Triton, also for a model that it does not know
    return {"ready": True}


async def _server_metadata(call: GrpcCall, request: Any) -> Any:
    return await call.request_json("GET", "/v2")


async def _model_metadata(call: GrpcCall, request: Any) -> Any:
    return await call.request_json("GET", _model_path(request))


async def _model_config(call: GrpcCall, request: Any) -> Any:
    return {"config": await call.request_json("GET", _model_path(request, "/config"))}


async def _model_statistics(call: GrpcCall, request: Any) -> Any:
    return await call.request_json("GET", _model_path(request, "/stats") if request.name else "/v2/models/stats")


async def _repository_index(call: GrpcCall, request: Any) -> Any:
    return {"models": await call.request_json("POST", f"{_repository(request)}/index", {"ready": request.ready})}


async def _load(call: GrpcCall, request: Any) -> Any:
    parameters = {}
    for name, value in request.parameters.items():
        given = getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        parameters[name] = b64encode(given).decode() if isinstance(given, bytes) else given
    path = f"{_repository(request)}/models/{quote(request.model_name, safe='')}/load"
    await call.request_json("POST", path, {"parameters": parameters})
    return {}


async def _unload(call: GrpcCall, request: Any) -> Any:
    await call.request_json("POST", f"{_repository(request)}/models/{quote(request.model_name, safe='')}/unload", {})
    return {}


def _repository(request: Any) -> str:
    return f"/v2/repository/{quote(request.repository_name, safe='')}" if request.repository_name else "/v2/repository"


def _model_path(request: Any, after: str = "") -> str:
    version = f"/versions/{quote(request.version, safe='')}" if request.version else ""
    return f"/v2/models/{quote(request.name, safe='')}{version}{after}"


def _forwarded(name: str, function: Callable[[GrpcCall, Any], Awaitable[Any]]) -> Method:
    """Return the method of this name. Its function takes the request, and returns the response as JSON values."""
    kinds = message(f"inference.{name}Request"), message(f"inference.{name}Response")

    async def answer(call: GrpcCall, data: bytes) -> bytes:
        found = await function(call, _parsed(kinds[0], data))
        return _serialized(ParseDict(found, kinds[1](), ignore_unknown_fields=True))

    return Method(answer)


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidInputError(f"reading the request: it is not a {kind.DESCRIPTOR.full_name}") from error


def _serialized(answer: Any) -> bytes:
    data: bytes = answer.SerializeToString()
    return data


# -- health and reflection ------------------------------------------------------------------------------------------------


def _checked_service(data: bytes) -> bool:
    """Return whether a `HealthCheckRequest` names the server or one of its services."""
    name = _parsed(message("grpc.health.v1.HealthCheckRequest"), data).service
    return not name or name in _SERVICES


def _status(*, ready: bool) -> bytes:
    return _serialized(_HealthResponse(status="SERVING" if ready else "NOT_SERVING"))


async def _check(call: GrpcCall, data: bytes) -> bytes:
    if not _checked_service(data):
        raise RequestError(404, f"got an unknown service, expected one of {', '.join(_SERVICES)}")
    return _status(ready=await call.frontend.engine_health.is_ready())


async def _watch(call: GrpcCall, data: bytes) -> AsyncGenerator[bytes, None]:
    known = _checked_service(data)
    if not known:
        yield _serialized(_HealthResponse(status="SERVICE_UNKNOWN"))
    async with aclosing(call.frontend.engine_health.watch()) as found:  # until the client ends the call
        async for ready in found:
            if known:
                yield _status(ready=ready)


async def _reflect(call: GrpcCall, data: bytes) -> bytes:
    request = _parsed(_ReflectionRequest, data)
    answer = _ReflectionResponse(valid_host=request.host, original_request=request)
    file = None
    match request.WhichOneof("message_request"):
        case "list_services":
            for name in _SERVICES:
                answer.list_services_response.service.add(name=name)
            return _serialized(answer)
        case "file_by_filename":
            file = FILES.get(request.file_by_filename)
        case "file_containing_symbol":
            symbol = request.file_containing_symbol
            for name in (symbol, symbol.rpartition(".")[0]):  # the pool does not know methods
                with suppress(KeyError):
                    file = file or FILES[POOL.FindFileContainingSymbol(name).name]
    if file is not None:
        answer.file_descriptor_response.file_descriptor_proto.append(_serialized(file))
    else:
        answer.error_response.error_code, answer.error_response.error_message = _NOT_FOUND, "not found"
    return _serialized(answer)


METHODS: Final[dict[str, Method]] = {
    f"{INFERENCE}/ModelInfer": Method(_infer, infers=True, guarded=True),
    f"{INFERENCE}/ModelStreamInfer": Method(_infer_streamed, infers=True, streams=True, guarded=True),
    "/grpc.health.v1.Health/Check": Method(_check),
    WATCH: Method(None, _watch),
    **{f"{path}/ServerReflectionInfo": Method(_reflect, streams=True, guarded=True) for path in _REFLECTION},
}
"""By path."""
for _name, _function in {
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
}.items():
    METHODS[f"{INFERENCE}/{_name}"] = _forwarded(_name, _function)
