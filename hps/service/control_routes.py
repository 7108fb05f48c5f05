"""The routes beside the lookups: health, metadata, metrics and the OpenAPI document. These are FastAPI's."""

import math
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client.registry import Collector

from hps import __version__
from hps.deployment import Deployment
from hps.service import schemas
from hps.service.http_metrics import HTTPMetrics
from hps.service.lifecycle import Lifecycle
from hps.service.load_progress import ModelStatus
from hps.service.lookup_routes import VERSION, check_version

_UNREADY: dict[int | str, dict[str, Any]] = {
    400: {"model": schemas.ErrorAnswer, "description": schemas.ERRORS[400]},
    503: {"model": schemas.ServerReady, "description": "Not ready; `reason` and `models` say why."},
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer, "description": schemas.ERRORS[status]} for status in (401, 404, 503)
}


def add_routes(app: FastAPI, lifecycle: Lifecycle, metrics: HTTPMetrics) -> None:
    """Add the routes to a FastAPI application; every error they raise is an `HPSError`."""

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
        answers = not strict and lifecycle.settled
        response.status_code = 200 if answers else 503
        return schemas.ServerReady(ready=answers, reason=reason, models=[_status(one) for one in lifecycle.loads.models()])

    @app.get("/v2", tags=["metadata"], responses={401: _ERRORS[401]})
    async def server_metadata() -> schemas.ServerMetadata:
        """The server, and the names of its models."""
        server = lifecycle.opened()
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
        check_version(model, version)
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
        check_version(model, version)
        return schemas.ModelReady(ready=True, name=model)

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses={401: _ERRORS[401]})
    async def prometheus_metrics(request: Request) -> Response:
        """Counters of lookups, tiers and requests, for Prometheus."""
        server = lifecycle.opened()
        others: list[Collector] = [lifecycle.loads, *([server.metrics.registry] if server else [])]
        text, content_type = metrics.expose(request.headers.get("accept", ""), others)
        return Response(text, headers={"content-type": content_type})

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas.describe_lookups(document)
            _drop_validation_errors(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _drop_validation_errors(document: dict[str, Any]) -> None:
    """FastAPI describes 422 for every parameter; ours are strings, and errors are `{"error": message}`."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _status(status: ModelStatus) -> schemas.ModelStatus:
    return schemas.ModelStatus(
        name=status.name,
        state=status.state,
        percent=status.percent,
        reason=status.reason or None,
        retry_in_s=status.retry_in_s,
        tables=[
            schemas.TableStatus(
                name=table.name,
                state=table.state,
                rows=load.rows if load else None,
                rows_done=load.rows_done if load else None,
                size_bytes=load.size_bytes if load else None,
                bytes_done=load.bytes_done if load else None,
                rows_per_s=load.rows_per_s if load else None,
                seconds_left=load.seconds_left if load else None,
            )
            for table in status.tables
            for load in (table.load,)
        ],
    )


def _metadata(name: str, deployment: Deployment) -> schemas.ModelMetadata:
    tables = deployment.tables
    return schemas.ModelMetadata(
        name=name,
        versions=[VERSION],
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
