"""Routes of Triton's model repository extension: index, load, unload; and the configuration of a model."""

import logging
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, cast

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from hps.configuration.load import override_model
from hps.errors import ConfigError, HPSError, InvalidInputError, UnknownModelError
from hps.parameter_server import HPS
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.engine.model_changes import change_model
from hps.serve.http.http_answer import RequestError, status_of
from hps.serve.http.request_body import described_object, read_object
from hps.serve.protocol.request_checks import parse_object
from hps.serve.protocol.score_requests import described
from hps.serve.protocol.transformed import described_with
from hps.serve.protocol.triton_config import entry_changes, triton_config
from hps.serve.protocol.triton_schemas import (
    IndexedVersion,
    IndexRequest,
    IndexState,
    LoadParameters,
    LoadRequest,
    UnloadRequest,
)

_log = logging.getLogger(__name__)
_Name = Annotated[str, Path(description="Name of the model.")]


def repository_routes(lifecycle: Lifecycle, responses: dict[int | str, dict[str, Any]]) -> APIRouter:
    router = APIRouter(tags=["repository"], responses=responses)

    @router.post("/v2/repository/index", response_model_exclude_none=True, openapi_extra=described_object(IndexRequest))
    async def repository_index(request: Request) -> list[IndexedVersion]:
        """List all known versions of all models, in service or not. The body may be empty."""
        wanted = await read_object(request, IndexRequest)
        return await run_in_threadpool(_index, lifecycle.server, wanted.ready)

    @router.post("/v2/repository/{repository}/index", response_model_exclude_none=True, include_in_schema=False)
    async def named_repository_index(repository: str, request: Request) -> list[IndexedVersion]:
        return await repository_index(request)

    @router.post("/v2/repository/models/{model}/load", response_class=Response, openapi_extra=described_object(LoadRequest))
    async def load_model(model: _Name, request: Request) -> None:
        """Load a model, or its changes. The body may be empty. Answers when it is in service."""
        _refuse_unless_explicit(lifecycle)
        try:
            wanted = await read_object(request, LoadRequest)
            load = partial(_load, lifecycle, model, wanted.parameters)
            doing = "rolling back" if wanted.parameters.rollback else "deploying"
            await change_model(lifecycle.server.live, model, doing, request.scope, load)
        except HPSError as error:
            refused = isinstance(error, InvalidInputError | ConfigError | UnknownModelError)
            phrase = "failed to poll from model repository: " if refused else ""  # Triton's clients expect this phrase
            raise RequestError(status_of(error), f"failed to load {model[:120]!r}, {phrase}{error}") from error

    @router.post("/v2/repository/models/{model}/unload", response_class=Response, openapi_extra=described_object(UnloadRequest))
    async def unload_model(model: _Name, request: Request) -> None:
        """Take all versions of a model out of service. The body may be empty."""
        _refuse_unless_explicit(lifecycle)
        await read_object(request, UnloadRequest)
        unload = partial(_unload, lifecycle, model)
        await change_model(lifecycle.server.live, model, "undeploying", request.scope, unload)

    @router.post("/v2/repository/{repository}/models/{model}/load", include_in_schema=False)
    @router.post("/v2/repository/{repository}/models/{model}/unload", include_in_schema=False)
    async def change_in_named_repository(repository: str, model: str) -> None:
        raise InvalidInputError(f"'repository_name' specification is not supported: got repository {repository[:120]!r}")

    @router.get("/v2/models/{model}/config")
    async def model_config(model: _Name) -> dict[str, Any]:
        """Return a model's configuration as Triton's `ModelConfig` (model_config.proto)."""
        return _config(lifecycle.server_of(model), model, None)

    @router.get("/v2/models/{model}/versions/{version}/config")
    async def model_version_config(model: _Name, version: str) -> dict[str, Any]:
        """Return a version's configuration as Triton's `ModelConfig`."""
        return _config(lifecycle.server_of(model), model, version)

    return router


def _refuse_unless_explicit(lifecycle: Lifecycle) -> None:
    mode = lifecycle.configuration.service.model_control_mode
    if mode != "explicit":
        text = "explicit model load / unload is not allowed if polling is enabled"
        raise RequestError(503, f"{text}: service.model_control_mode is {mode!r}, expected 'explicit'")


def _index(server: HPS, ready: bool) -> list[IndexedVersion]:
    return [
        IndexedVersion(
            name=entry.model,
            version=entry.version or None,
            state=cast("IndexState", entry.state.upper()),
            reason=entry.reason or None,
        )
        for entry in server.index()
        if entry.state == "ready" or not ready
    ]


def _load(lifecycle: Lifecycle, name: str, parameters: LoadParameters) -> str:
    """Deploy a model as configured, or with changes for this time only; or begin or end a canary or shadow."""
    server, config = lifecycle.server, parameters.config
    server.catalog.scan()
    if parameters.promote:
        return server.promote(name, accept=parameters.accept).version
    if parameters.rollback:
        return server.rollback(name).version
    if parameters.canary is not None or parameters.shadow is not None:
        canary, shadow = (None if text is None else _share(text) for text in (parameters.canary, parameters.shadow))
        return server.deploy(
            name, parameters.version, progress=lifecycle.progress(), accept=parameters.accept, canary=canary, shadow=shadow
        ).version
    if config is None:
        return server.deploy(name, progress=lifecycle.progress(), pin=False).version
    changes = entry_changes(name, parse_object(config.encode()))
    known = server.catalog.model(name) if name in server.catalog.names else None
    entry = override_model(name, known, changes)
    return server.deploy(entry, progress=lifecycle.progress(), remember=False, pin=False).version


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(f"reading a share: got {text[:40]!r}, expected a number such as 0.05") from None


def _unload(lifecycle: Lifecycle, name: str) -> str:
    server = lifecycle.server
    with suppress(UnknownModelError):  # as in Triton, silent about a model that is not in service
        server.undeploy(name)
    server.live.stop_expecting(name)
    return ""


def _config(server: HPS, name: str, version: str | None) -> dict[str, Any]:
    deployment = server.model(name, version)
    scores = deployment.scores
    network = None if scores is None else described(scores.opened.features, scores.opened.outputs)
    if network is not None:
        network = described_with(deployment.transform, network[0]), network[1]
    return triton_config(deployment.config, network, on_cuda=deployment.session(None).on_cuda)
