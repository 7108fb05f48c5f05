"""FastAPI's routes: health, metadata, metrics, models; and the OpenAPI document of all routes."""

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.types import Scope

from hps.errors import HPSError, InvalidInputError, NotReadyError, UnknownModelError, UnknownVersionError
from hps.ground.threads.workers import THREADS
from hps.ground.version import __version__
from hps.parameter_server import HPS
from hps.serve.engine.call_threads import CallThreads
from hps.serve.engine.lifecycle import STOPPING, Lifecycle
from hps.serve.engine.routes.repository import repository_routes
from hps.serve.engine.routes.statistics import statistics_routes
from hps.serve.engine.shared_text import SharedText
from hps.serve.http.http_answer import HTTPAnswer, RequestError
from hps.serve.http.http_metrics import HTTPMetrics, InferenceStatistics
from hps.serve.protocol import schemas
from hps.serve.protocol.score_requests import described
from hps.serve.protocol.transformed import described_with
from hps.statistics.prometheus import Family, expose

_Responses = dict[int | str, dict[str, Any]]

_ERROR = schemas.ErrorAnswer.__name__
# A reference by name: FastAPI would build a validator of the model for each status of each route, which doubles the start.
_ERROR_CONTENT = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_ERROR}"}}}

ERRORS: _Responses = {
    status: {"content": _ERROR_CONTENT, "description": text}
    for status, text in {
        400: "The request is wrong.",
        401: "The token is missing or wrong.",
        403: "The token or certificate lacks the right, or changes are off; the message says why.",
        404: "There is no such model, version or table.",
        408: "The body did not arrive in time.",
        409: "The state of the model does not allow the change, or another one is under way; or the database is read-only.",
        413: "The body is too large, or has too many keys.",
        415: "The body is compressed with something other than gzip or deflate.",
        416: "The file has no such range.",
        421: "Keys belong to a share of the table that another server holds.",
        429: "More than the token's limit allows. Retry-After says when to try again.",
        500: "A bug; the log has the details.",
        503: "Loading, stopping or overloaded, or a database failed. Retry-After says when to try again.",
        504: "The lookup did not end in time.",
        507: "The model does not fit in memory, on disk or on the device.",
    }.items()
}
_UNAUTHORIZED: _Responses = {401: ERRORS[401]}
_OF_MODELS: _Responses = {status: ERRORS[status] for status in (401, 404, 503)}
_OF_CHANGES: _Responses = {status: error for status, error in ERRORS.items() if status not in (415, 416, 421, 504)}
_EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
]
_NOT_LIVE = {"model": schemas.Live, "description": "A thread has ended unexpectedly; only a restart helps."}
_NOT_READY = {"model": schemas.ServerReady, "description": "Not ready; `reason` and `models` say why."}

_LOOKUP_ERRORS = {status: ERRORS[status] for status in ERRORS if status not in (409, 416, 507)}
_ROW_ERRORS = {status: ERRORS[status] for status in ERRORS if status not in (416, 507)}

lookups = APIRouter()
"""Lookup and row routes, only for the OpenAPI document: the application serves them without FastAPI."""

_BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_INFER: dict[str, Any] = {
    "tags": ["lookups"],
    "summary": "Look up keys by the Open Inference Protocol v2",
    "response_model": schemas.InferenceResponse,
    "description": "Binary data is fastest; Inference-Header-Content-Length is the length of the JSON part before it.",
    "responses": {**_LOOKUP_ERRORS, 200: {"description": "The vectors.", **_BINARY}},
    "openapi_extra": {"requestBody": _BINARY},
}
_HEADER_LENGTH = Header(
    None, alias="Inference-Header-Content-Length", description="Length of the JSON part in bytes, if binary data follow it."
)


def control_app(
    lifecycle: Lifecycle,
    metrics: HTTPMetrics,
    statistics: InferenceStatistics,
    error_answer: Callable[[Exception, Scope], HTTPAnswer],
    threads: CallThreads,
    routers: Iterable[APIRouter] = (),
    families: Callable[[], Iterable[Family]] = tuple,
) -> FastAPI:
    """Make the FastAPI application of these routes and those of `routers`.

    Args:
        threads: the thread that writes the metrics.
        families: returns metrics of `routers`.
    """

    async def answer_error(request: Request, error: Exception) -> Response:
        """Answer an error. FastAPI raises unexpected errors again afterwards."""
        got = f"got {request.method} {request.url.path[:300]}"
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                allowed = (error.headers or {}).get("Allow", "GET").replace("GET", "GET, HEAD")  # see `Application`
                error = RequestError(405, f"{got}, expected {allowed}", (b"allow", allowed.encode()))
            else:
                error = RequestError(404, f"{got}, which is not served; /openapi.json lists the routes")
        elif isinstance(error, RequestValidationError):
            problems = (
                f"{problem['loc'][-1]}: {problem['msg']}, got {str(problem['input'])[:40]!r}" for problem in error.errors()
            )
            error = InvalidInputError(f"{got}: {'; '.join(problems)}")
        elif isinstance(error, UnknownModelError) and not isinstance(error, UnknownVersionError):
            error = UnknownModelError(f"Request for unknown model: {error}")  # Triton's clients expect this phrase
        answer = error_answer(error, request.scope)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(b"".join(answer.chunks), answer.status, headers)

    app = FastAPI(
        title="hps",
        version=__version__,
        description="Vectors of embedding tables by int64 keys: Open Inference Protocol v2, and JSON for curl.",
        docs_url=None,  # our own offline page is in status_routes
        redoc_url=None,
        exception_handlers=dict.fromkeys((HPSError, HTTPException, RequestValidationError, Exception), answer_error),
    )

    @app.get("/v2/health/live", tags=["health"], responses={503: _NOT_LIVE}, response_model_exclude_none=True)
    async def live(response: Response) -> schemas.Live:
        """Report whether the process answers, with all the threads that it needs. If not, restart it. Needs no token."""
        if THREADS.problem:
            response.status_code = 503
            return schemas.Live(live=False, reason=THREADS.problem)
        return schemas.Live(live=True)

    @app.get(
        "/v2/health/ready", tags=["health"], responses={400: ERRORS[400], 503: _NOT_READY}, response_model_exclude_none=True
    )
    async def ready(
        response: Response,
        strict: Annotated[bool, Query(description="`false` ignores models that cannot be loaded.")] = True,
    ) -> schemas.ServerReady:
        """Report whether lookups of every model are answered and, if not, the loading progress. Needs no token."""
        reason, degraded = lifecycle.not_ready_reason, lifecycle.degraded or None
        if not reason:
            return schemas.ServerReady(ready=True, degraded=degraded)
        settled = not strict and lifecycle.settled
        response.status_code = 200 if settled else 503
        return schemas.ServerReady(ready=settled, reason=reason, models=lifecycle.states.models(), degraded=degraded)

    @app.get("/v2", tags=["metadata"], responses=_UNAUTHORIZED)
    async def server_metadata() -> schemas.ServerMetadata:
        """Describe the server and list its models."""
        server = lifecycle.opened
        models = [] if server is None else list(server.models)
        # Triton's own example client accepts no other name.
        shared = ["system_shared_memory"] if lifecycle.configuration.service.shared_memory_bytes else []
        extensions = [*_EXTENSIONS, *shared]
        return schemas.ServerMetadata(name="triton", version=__version__, extensions=extensions, models=models)

    app.include_router(repository_routes(lifecycle, _OF_CHANGES))
    app.include_router(statistics_routes(lifecycle, statistics, _OF_MODELS))

    @app.get("/v2/models/{model}", tags=["metadata"], responses=_OF_MODELS, response_model_exclude_unset=True)
    async def model_metadata(model: str) -> schemas.ModelMetadata:
        """Describe a model's inputs, outputs and tables."""
        return _metadata(lifecycle.server_of(model), model, None)

    @app.get(
        "/v2/models/{model}/versions/{version}", tags=["metadata"], responses=_OF_MODELS, response_model_exclude_unset=True
    )
    async def model_version_metadata(model: str, version: str) -> schemas.ModelMetadata:
        """Describe the inputs, outputs and tables of a version."""
        return _metadata(lifecycle.server_of(model), model, version)

    @app.get("/v2/models/{model}/ready", tags=["health"], responses=_OF_MODELS, response_model_exclude_none=True)
    async def model_ready(model: str) -> schemas.ModelReady:
        """Report whether lookups of a model are answered, and its network does not hang."""
        return _model_ready(lifecycle, model, None)

    @app.get(
        "/v2/models/{model}/versions/{version}/ready", tags=["health"], responses=_OF_MODELS, response_model_exclude_none=True
    )
    async def model_version_ready(model: str, version: str) -> schemas.ModelReady:
        """Report whether lookups of a version are answered, and its network does not hang."""
        return _model_ready(lifecycle, model, version)

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses=_UNAUTHORIZED)
    async def prometheus_metrics(request: Request) -> Response:
        """Return the metrics of lookups, tiers and requests, for Prometheus."""
        _, content_type = choose_encoder(request.headers.get("accept", ""))
        text = texts[content_type.startswith("application/openmetrics-text")]
        return Response(await text.get(), headers={"content-type": content_type})

    def metrics_text(openmetrics: bool) -> bytes:
        server = lifecycle.opened
        triton = statistics.families() if lifecycle.configuration.service.triton_metrics else ()
        of_server = server.metrics.families() if server else ()
        return expose(
            [*metrics.families(), *families(), *triton, *lifecycle.states.families(), *of_server], openmetrics=openmetrics
        )

    texts = [SharedText(partial(metrics_text, openmetrics), threads) for openmetrics in (False, True)]

    for router in routers:
        app.include_router(router)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            routes = [*app.routes, *lookups.routes]
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=routes)
            for methods in document["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)  # of FastAPI's errors; ours are `{"error": message}`
                    # FastAPI's title is the name of the function; the first sentence of its docstring says more.
                    if operation["operationId"].startswith(operation["summary"].lower().replace(" ", "_") + "_"):
                        title, *rest = re.split(r"\.(?:\s+|$)", operation.pop("description"), maxsplit=1)
                        operation |= {"summary": title, **({"description": rest[0]} if any(rest) else {})}
            named = document["components"]["schemas"] | {_ERROR: schemas.ErrorAnswer.model_json_schema()}
            document["components"]["schemas"] = {
                name: named[name] for name in sorted(named) if name not in ("HTTPValidationError", "ValidationError")
            }
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's "Extending OpenAPI" has it
    return app


@lookups.post(schemas.INFER, operation_id="infer", **_INFER)
def infer(model: str, request: schemas.InferenceRequest, header_length: int = _HEADER_LENGTH) -> None: ...


@lookups.post(schemas.INFER_VERSION, operation_id="infer_version", **_INFER | {"summary": "Look up keys in one version"})
def infer_version(model: str, version: str, request: schemas.InferenceRequest, header_length: int = _HEADER_LENGTH) -> None: ...


@lookups.post(
    schemas.LOOKUP,
    operation_id="lookup",
    tags=["lookups"],
    responses=_LOOKUP_ERRORS,
    summary="Look up keys with curl",
    response_model=schemas.LookupResponse,
    response_description="The vectors.",
)
def lookup(model: str, request: schemas.LookupRequest) -> None: ...


@lookups.post(
    schemas.SCORE,
    operation_id="score",
    tags=["lookups"],
    responses=_LOOKUP_ERRORS,
    summary="Score samples with curl",
    description="Of models that have a network (`dense`): look up, and run it.",
    response_model=schemas.ScoreAnswer,
    response_description="The outputs of the network, by name.",
)
def score(model: str, request: schemas.ScoreRequest) -> None: ...


@lookups.post(
    schemas.ROWS,
    operation_id="insert_rows",
    tags=["rows"],
    responses=_ROW_ERRORS,
    summary="Add or replace rows in every tier",
    description="Send bulk writes as binary inputs `KEYS` INT64 [n] and `VECTORS` FP32 [n, dim], like an inference.",
    response_model=schemas.RowsAnswer,
    openapi_extra={"requestBody": _BINARY},
)
def insert_rows(
    model: str, table: str, request: schemas.RowsRequest, version: str | None = None, header_length: int = _HEADER_LENGTH
) -> None: ...


@lookups.delete(
    schemas.ROWS,
    operation_id="delete_rows",
    tags=["rows"],
    responses=_ROW_ERRORS,
    summary="Delete rows from every tier",
    description="Send bulk deletions as the binary input `KEYS` INT64 [n].",
    response_model=schemas.RowsAnswer,
    openapi_extra={"requestBody": _BINARY},
)
def delete_rows(
    model: str, table: str, request: schemas.KeysRequest, version: str | None = None, header_length: int = _HEADER_LENGTH
) -> None: ...


@lookups.get(
    schemas.ROW,
    operation_id="row",
    tags=["rows"],
    responses=_OF_MODELS,
    summary="One row, which tier has it, and when it was written",
    response_model=schemas.RowAnswer,
)
def row(model: str, table: str, key: int, version: str | None = None) -> None: ...


@lookups.delete(
    schemas.ROW,
    operation_id="delete_row",
    tags=["rows"],
    responses=_ROW_ERRORS,
    summary="Delete one row from every tier",
    response_model=schemas.RowsAnswer,
)
def delete_row(model: str, table: str, key: int, version: str | None = None) -> None: ...


def _model_ready(lifecycle: Lifecycle, model: str, version: str | None) -> schemas.ModelReady:
    deployment = lifecycle.server_of(model).model(model, version)
    if lifecycle.leaving:
        raise NotReadyError(f"model {model!r} is not ready: {STOPPING}")
    if reason := deployment.refuses or lifecycle.unpublished(deployment.config.model, deployment.version):
        raise NotReadyError(f"model {model!r} is not ready: {reason}")
    if deployment.scores is not None:
        deployment.scores.refuse_if_busy(lifecycle.configuration.service.request_timeout_s)
    return schemas.ModelReady(ready=True, name=model)


def _metadata(server: HPS, name: str, version: str | None) -> schemas.ModelMetadata:
    deployment = server.model(name, version)
    tables = deployment.tables
    inputs = [
        schemas.TensorMetadata(name="KEYS", datatype="INT64", shape=[1, -1]),
        schemas.TensorMetadata(name="NUMKEYS", datatype="INT32", shape=[1, len(tables)]),
        schemas.TensorMetadata(name="OFFSETS", datatype="INT64", shape=[1, -1]),
        schemas.TensorMetadata(name="WEIGHTS", datatype="FP32", shape=[1, -1]),
    ]
    outputs = [schemas.TensorMetadata(name="OUTPUT0", datatype="FP32", shape=[-1])]
    if (scores := deployment.scores) is not None:
        given, made = described(scores.opened.features, scores.opened.outputs)
        inputs, outputs = (
            [schemas.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.full_shape) for tensor in tensors]
            for tensors in (described_with(deployment.transform, given), made)
        )
    elif deployment.transform is not None:
        inputs = [
            schemas.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.full_shape)
            for tensor in described_with(deployment.transform, [])
        ] + inputs
    share = deployment.config.share
    return schemas.ModelMetadata(
        **({} if share is None else {"shard": schemas.ShardMetadata(index=share.index, of=share.of)}),
        name=name,
        versions=[version.version for version in server.versions(name) if version.state in ("serving", "available", "held")],
        platform="hps",
        inputs=inputs,
        outputs=outputs,
        tables=[
            schemas.TableMetadata(
                name=table.table_name,
                dim=table.dim,
                max_keys=table.max_keys,
                default_value=table.default_value if math.isfinite(table.default_value) else None,
            )
            for table in tables
        ],
    )
