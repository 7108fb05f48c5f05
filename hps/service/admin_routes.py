"""The routes by which people change the models of a running server; `hps models`, `hps deploy` and the like call them."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from hps.configuration.load import ModelConfig, override_model
from hps.errors import InvalidInputError, UnknownModelError
from hps.parameter_server import HPS
from hps.service import schemas
from hps.service.lifecycle import Lifecycle
from hps.service.lookup_threads import LookupThreads
from hps.service.model_changes import ModelChange, ModelChanges
from hps.service.model_states import table_status
from hps.service.request_body import described_object, read_object

CHANGE: str = "hps.change"
"""Where a request's scope has its `Change`."""

_Wait = Annotated[bool, Query(description="`false` answers 202 at once; GET /v1/models then tells how the change goes on.")]


def admin_routes(
    lifecycle: Lifecycle, changes: ModelChanges, threads: LookupThreads, responses: dict[int | str, dict[str, Any]]
) -> APIRouter:
    """Make the routes.

    Args:
        lifecycle: of the parameter server.
        changes: run what takes long.
        threads: where databases are asked how much they hold.
        responses: descriptions of errors by status.
    """
    errors: dict[int | str, dict[str, Any]] = {status: responses[status] for status in (400, 401, 403, 404, 409, 503, 507)}
    errors[202] = {"model": schemas.ChangeAnswer, "description": "The change is under way."}
    changing: dict[str, Any] = {"responses": errors, "response_model_exclude_none": True}
    router = APIRouter(prefix="/v1", tags=["models"])

    async def run(
        name: str, detail: str, request: Request, response: Response, wait: bool, call: Callable[[HPS, ModelChange], str]
    ) -> schemas.ChangeAnswer:
        server, change = lifecycle.server, request.scope[CHANGE]
        change.what = f"{change.what} {detail}".rstrip()
        one = await changes.run(name, change, lambda progress: call(server, progress), wait=wait, others=server.change_of(name))
        if one.status is None:
            response.status_code = 202
        return _answer(one)

    @router.get("/models", responses={status: responses[status] for status in (401, 503)}, response_model_exclude_none=True)
    async def list_models() -> schemas.ModelList:
        """All models and their versions, what they hold in each tier, and the changes of them."""
        models = await threads.run(_models, lifecycle)
        return schemas.ModelList(models=models, changes=[_answer(one) for one in changes.latest.values()])

    @router.get("/updates", responses={status: responses[status] for status in (401, 503)})
    async def list_updates() -> schemas.UpdateList:
        """How far every table is that follows a log of updates, in every version in service or about to take over."""
        found = await threads.run(lambda: lifecycle.server.updates())
        return schemas.UpdateList(tables=[schemas.FollowedTable(**asdict(one)) for one in found])

    @router.post("/models/{model}/deploy", **changing, openapi_extra=described_object(schemas.DeployRequest))
    async def deploy(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Load a version of a model beside the one that serves, and let it take over."""
        body = await read_object(request, schemas.DeployRequest)
        wanted = model if body.config is None else _configured(model, body.config)
        detail = (
            f"version {body.version or 'by its policy'}{', forced' * body.force}{', with a config' * (body.config is not None)}"
        )

        def call(server: HPS, progress: ModelChange) -> str:
            return server.deploy(wanted, body.version, progress=progress, force=body.force).version

        return await run(model, detail, request, response, wait, call)

    @router.post("/models/{model}/undeploy", **changing, openapi_extra=described_object(schemas.UndeployRequest))
    async def undeploy(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Take a model, or one of its versions, out of service."""
        body = await read_object(request, schemas.UndeployRequest)

        def call(server: HPS, _: ModelChange) -> str:
            server.undeploy(model, body.version)
            return server.model(model).version if model in server.models else ""

        return await run(model, f"version {body.version}" if body.version else "", request, response, wait, call)

    @router.post("/models/{model}/rollback", **changing)
    async def rollback(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Let the version serve again that was replaced last."""
        return await run(model, "", request, response, wait, lambda server, _: server.rollback(model).version)

    @router.post("/models/{model}/refresh", **changing)
    async def refresh(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Read the vectors of all resident keys of a model again, on every device."""

        def call(server: HPS, _: ModelChange) -> str:
            server.refresh(model)
            return server.model(model).version

        return await run(model, "", request, response, wait, call)

    return router


def _configured(name: str, entry: dict[str, Any]) -> ModelConfig:
    """Check an entry of `models`, which may leave out the name of its model.

    Raises:
        ConfigError: anything in it is wrong.
        InvalidInputError: it is of another model.
    """
    if entry.get("model", name) != name:
        raise InvalidInputError(f"reading 'config': got model {str(entry['model'])[:120]!r}, expected {name[:120]!r}")
    return override_model(name, None, entry)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _answer(one: ModelChange) -> schemas.ChangeAnswer:
    status, change = one.status, one.change
    loading = one.table if status is None else None
    return schemas.ChangeAnswer(
        number=one.number,
        model=one.model,
        what=change.what,
        by=change.who,
        since=_time(one.since),
        seconds=change.seconds,
        status=status,
        version=one.version or None,
        error=change.error or None,
        table=table_status(loading[0], "loading", loading[1]) if loading else None,
    )


def _models(lifecycle: Lifecycle) -> list[schemas.ModelDetails]:
    server = lifecycle.server
    return [
        schemas.ModelDetails(
            name=one.name,
            state=one.state,
            reason=one.reason,
            devices=_devices(server, one.name),
            hit_rates=server.metrics.hit_rates(one.name),
            versions=_versions(server, one.name),
        )
        for one in lifecycle.states.models()
    ]


def _devices(server: HPS, name: str) -> list[int]:
    try:
        return list(server.model(name).devices)
    except UnknownModelError:
        return []


def _versions(server: HPS, name: str) -> list[schemas.VersionStatus]:
    try:
        found = server.versions(name)
    except UnknownModelError:  # it waits, is being loaded, or failed
        return []
    return [
        schemas.VersionStatus(
            version=one.version, state=one.state, since=_time(one.since), rows=one.rows, size_bytes=one.size_bytes
        )
        for one in found
    ]
