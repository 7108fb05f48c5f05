"""The routes beside the lookups: health, metadata, metrics and the OpenAPI document. These are FastAPI's."""

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import Scope

from hps import __version__
from hps.deployment import Deployment
from hps.errors import HPSError, InvalidInputError
from hps.service import schemas
from hps.service.http_answer import HTTPAnswer, RequestError
from hps.service.http_metrics import HTTPMetrics
from hps.service.lifecycle import Lifecycle

_UNREADY: dict[int | str, dict[str, Any]] = {
    400: {"model": schemas.ErrorAnswer, "description": schemas.ERRORS[400]},
    503: {"model": schemas.ServerReady, "description": "Not ready; `reason` and `models` say why."},
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer, "description": schemas.ERRORS[status]} for status in (401, 404, 503)
}


def control_app(
    lifecycle: Lifecycle,
    metrics: HTTPMetrics,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    error_answer: Callable[[Exception, Scope], HTTPAnswer],
) -> FastAPI:
    """Make the FastAPI application of these routes.

    Args:
        lifecycle: what the routes report.
        metrics: what `/metrics` exposes, beside the metrics of the models and of the parameter server.
        lifespan: entered when the service starts, left when it stops.
        error_answer: the answer to an error that was raised while the request of a scope was served.
    """

    async def answer_error(request: Request, error: Exception) -> Response:
        """FastAPI raises an unexpected error again after this answer."""
        got = f"got {request.method} {request.url.path[:300]}"
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                error = RequestError(405, f"{got}, expected GET", (b"allow", b"GET"))
            else:
                error = RequestError(404, f"{got}, which is not served; /openapi.json lists the routes")
        elif isinstance(error, RequestValidationError):
            problems = (f"{one['loc'][-1]}: {one['msg']}, got {str(one['input'])[:40]!r}" for one in error.errors())
            error = InvalidInputError(f"{got}: {'; '.join(problems)}")
        answer = error_answer(error, request.scope)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        return Response(b"".join(answer.chunks), answer.status, headers)

    app = FastAPI(
        title="hps",
        version=__version__,
        description="Vectors of embedding tables by int64 keys: Open Inference Protocol v2, and JSON for curl.",
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers=dict.fromkeys((HPSError, HTTPException, RequestValidationError, Exception), answer_error),
    )

    @app.get("/v2/health/live", tags=["health"])
    async def live() -> schemas.Live:
        """Whether the process answers. Needs no token."""
        return schemas.Live(live=True)

    @app.get("/v2/health/ready", tags=["health"], responses=_UNREADY, response_model_exclude_none=True)
    async def ready(
        response: Response,
        strict: Annotated[bool, Query(description="`false` leaves out the models that cannot be loaded.")] = True,
    ) -> schemas.ServerReady:
        """Whether lookups of every model are answered; how far the loading is, if not. Needs no token."""
        reason = lifecycle.not_ready_reason
        if not reason:
            return schemas.ServerReady(ready=True)
        settled = not strict and lifecycle.settled
        response.status_code = 200 if settled else 503
        return schemas.ServerReady(ready=settled, reason=reason, models=lifecycle.states.models())

    @app.get("/v2", tags=["metadata"], responses={401: _ERRORS[401]})
    async def server_metadata() -> schemas.ServerMetadata:
        """The server, and the names of its models."""
        server = lifecycle.opened
        models = [] if server is None else list(server.models)
        return schemas.ServerMetadata(name="hps", version=__version__, extensions=["binary_tensor_data"], models=models)

    @app.get("/v2/models/{model}", tags=["metadata"], responses=_ERRORS)
    async def model_metadata(model: str) -> schemas.ModelMetadata:
        """A model's inputs, outputs and tables."""
        return _metadata(model, lifecycle.server_of(model).model(model))

    @app.get("/v2/models/{model}/versions/{version}", tags=["metadata"], responses=_ERRORS)
    async def model_version_metadata(model: str, version: str) -> schemas.ModelMetadata:
        """A model's inputs, outputs and tables."""
        deployment = lifecycle.server_of(model).model(model)
        schemas.check_version(model, version)
        return _metadata(model, deployment)

    @app.get("/v2/models/{model}/ready", tags=["health"], responses=_ERRORS, response_model_exclude_none=True)
    async def model_ready(model: str) -> schemas.ModelReady:
        """Whether lookups of a model are answered."""
        lifecycle.server_of(model).model(model)
        return schemas.ModelReady(ready=True, name=model)

    @app.get(
        "/v2/models/{model}/versions/{version}/ready", tags=["health"], responses=_ERRORS, response_model_exclude_none=True
    )
    async def model_version_ready(model: str, version: str) -> schemas.ModelReady:
        """Whether lookups of a model are answered."""
        lifecycle.server_of(model).model(model)
        schemas.check_version(model, version)
        return schemas.ModelReady(ready=True, name=model)

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses={401: _ERRORS[401]})
    async def prometheus_metrics(request: Request) -> Response:
        """Counters of lookups, tiers and requests, for Prometheus."""
        server = lifecycle.opened
        others: list[Collector] = [lifecycle.states, *([server.metrics.registry] if server else [])]
        text, content_type = metrics.expose(request.headers.get("accept", ""), others)
        return Response(text, headers={"content-type": content_type})

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas.describe_lookups(document)
            _drop_validation_errors(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's "Extending OpenAPI" has it
    return app


def _drop_validation_errors(document: dict[str, Any]) -> None:
    """FastAPI describes a 422 for every parameter; ours are strings, and our errors are `{"error": message}`."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _metadata(name: str, deployment: Deployment) -> schemas.ModelMetadata:
    tables = deployment.tables
    return schemas.ModelMetadata(
        name=name,
        versions=[schemas.VERSION],
        platform="hps",
        inputs=[
            schemas.TensorMetadata(name="KEYS", datatype="INT64", shape=[1, -1]),
            schemas.TensorMetadata(name="NUMKEYS", datatype="INT32", shape=[1, len(tables)]),
        ],
        outputs=[schemas.TensorMetadata(name="OUTPUT0", datatype="FP32", shape=[-1])],
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
