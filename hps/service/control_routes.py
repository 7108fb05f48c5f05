"""The routes beside the lookups: health, metadata, metrics and the OpenAPI document. These are FastAPI's."""

import math
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from hps import __version__
from hps.deployment import Deployment
from hps.service import schemas
from hps.service.http_metrics import HTTPMetrics
from hps.service.lifecycle import Lifecycle
from hps.service.lookup_routes import VERSION, check_version

_UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": schemas.Ready, "description": "Not ready; `reason` says why."}}
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
    async def ready(response: Response) -> schemas.Ready:
        """Whether lookups are answered: only after everything is loaded. Needs no token."""
        if lifecycle.ready:
            return schemas.Ready(ready=True)
        response.status_code = 503
        return schemas.Ready(ready=False, reason=lifecycle.not_ready_reason)

    @app.get("/v2", tags=["metadata"], responses={401: _ERRORS[401]})
    async def server_metadata() -> schemas.ServerMetadata:
        """The server, and the names of its models."""
        models = list(lifecycle.server().models) if lifecycle.ready else []
        return schemas.ServerMetadata(name="hps", version=__version__, extensions=["binary_tensor_data"], models=models)

    @app.get("/v2/models/{model}", tags=["metadata"], responses=_ERRORS)
    async def model_metadata(model: str) -> schemas.ModelMetadata:
        """A model's inputs, outputs and tables."""
        return _metadata(model, lifecycle.server().model(model))

    @app.get("/v2/models/{model}/versions/{version}", tags=["metadata"], responses=_ERRORS)
    async def model_version_metadata(model: str, version: str) -> schemas.ModelMetadata:
        """A model's inputs, outputs and tables."""
        deployment = lifecycle.server().model(model)
        check_version(model, version)
        return _metadata(model, deployment)

    @app.get("/v2/models/{model}/ready", tags=["health"], responses=_ERRORS, response_model_exclude_none=True)
    async def model_ready(model: str) -> schemas.ModelReady:
        """Whether lookups of a model are answered."""
        lifecycle.server().model(model)
        return schemas.ModelReady(ready=True, name=model)

    @app.get(
        "/v2/models/{model}/versions/{version}/ready", tags=["health"], responses=_ERRORS, response_model_exclude_none=True
    )
    async def model_version_ready(model: str, version: str) -> schemas.ModelReady:
        """Whether lookups of a model are answered."""
        lifecycle.server().model(model)
        check_version(model, version)
        return schemas.ModelReady(ready=True, name=model)

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses={401: _ERRORS[401]})
    async def prometheus_metrics(request: Request) -> Response:
        """Counters of lookups, tiers and requests, for Prometheus."""
        server = lifecycle.loaded()
        text, content_type = metrics.expose(request.headers.get("accept", ""), [server.metrics.registry] if server else [])
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
