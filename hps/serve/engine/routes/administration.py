"""Routes that change the models of a running server, called by operators and by `hps models`, `hps deploy` and the like."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query, Request, Response

from hps.configuration.load import ModelConfig, override_model
from hps.errors import HPSError, InvalidInputError, NotReadyError, UnknownModelError
from hps.parameter_server import HPS
from hps.serve.engine.call_threads import CallThreads
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.engine.model_changes import change_model
from hps.serve.engine.readiness import table_status
from hps.serve.http.request_body import described_object, read_object
from hps.serve.logs.changes import log_change, request_line
from hps.serve.logs.requests import SERVED, Served
from hps.serve.protocol import schemas
from hps.versions.changes import Change
from hps.versions.checks.report import CheckReport
from hps.versions.desired import DesiredVersion
from hps.versions.live_models import REFRESHING

_ROLLOUT_OPTIONS = {"steps", "header", "max_error_rate", "max_p99_factor", "max_difference", "least_requests"}
_Wait = Annotated[bool, Query(description="`false` answers 202 at once; poll GET /v1/models for the outcome.")]


def admin_routes(lifecycle: Lifecycle, threads: CallThreads, responses: dict[int | str, dict[str, Any]]) -> APIRouter:
    """Make the routes. threads: threads that read the sizes of databases."""
    errors: dict[int | str, dict[str, Any]] = {status: responses[status] for status in (400, 401, 403, 404, 409, 503, 507)}
    errors[202] = {"model": schemas.ChangeAnswer, "description": "The change is under way."}
    changing: dict[str, Any] = {"responses": errors, "response_model_exclude_none": True}
    router = APIRouter(prefix="/v1", tags=["models"])

    async def run(
        name: str,
        doing: str,
        request: Request,
        response: Response,
        wait: bool,
        call: Callable[[HPS], str],
        detail: str = "",
    ) -> schemas.ChangeAnswer:
        server = lifecycle.server
        change = await change_model(server.live, name, doing, request.scope, partial(call, server), detail=detail, wait=wait)
        if change.under_way:
            response.status_code = 202
        return change_status(change, lifecycle.degraded)

    @router.get("/models", responses={status: responses[status] for status in (401, 503)}, response_model_exclude_none=True)
    async def list_models() -> schemas.ModelList:
        """List all models and versions, their sizes in each tier, and their changes."""
        models, degraded = await threads.run(_models, lifecycle), lifecycle.degraded
        changes = [change_status(change, degraded) for change in lifecycle.live.requested.values()]
        return schemas.ModelList(models=models, changes=changes)

    @router.get("/updates", responses={status: responses[status] for status in (401, 503)})
    async def list_updates() -> schemas.UpdateList:
        """Report how far each table has followed its update log, in every version in service or about to take over."""
        found = await threads.run(lambda: lifecycle.server.updates())
        return schemas.UpdateList(tables=[schemas.FollowedTable(**asdict(table)) for table in found])

    @router.get("/debug/requests/{model}", responses={status: responses[status] for status in (400, 401, 403, 404)})
    async def recorded_requests(model: str) -> schemas.RecordedRequests:
        """Return a sample of the requests for scores that a model answered, if its configuration allows to keep them."""
        server = lifecycle.server_of(model)
        return schemas.RecordedRequests(requests=await threads.run(lambda: server.recorded_requests(model)))

    @router.get("/debug/check", responses={status: responses[status] for status in (401, 403, 503)})
    async def check_integrity() -> schemas.IntegrityReport:
        """Check the invariants of versions, caches and databases. Reads all indices; needs the right `admin`."""
        return schemas.IntegrityReport(findings=await threads.run(lambda: lifecycle.server.check()))

    @router.post("/models/{model}/deploy", name="deploy", **changing, openapi_extra=described_object(schemas.DeployRequest))
    async def deployment(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Load a version of a model beside the serving one, and switch over to it; or try it out on a share of the requests.

        Pins the model to `version`; without it, ends the pin. With `canary` or `shadow`, the serving version serves on.
        """
        body = await read_object(request, schemas.DeployRequest)
        wanted = model if body.config is None else _configured(model, body.config)
        detail = f"version {body.version or 'by its policy'}{', forced' * body.force}{', accepted' * body.accept}"
        detail += ", with a config" * (body.config is not None)
        for mode, share in (("canary", body.canary), ("shadow", body.shadow)):
            detail += "" if share is None else f", as a {mode} of {100 * share:.3g} %"
        options = body.model_dump(include=_ROLLOUT_OPTIONS, exclude_none=True)

        def call(server: HPS) -> str:
            return server.deploy(
                wanted,
                body.version,
                progress=lifecycle.progress(),
                force=body.force,
                accept=body.accept,
                canary=body.canary,
                shadow=body.shadow,
                options=options,
            ).version

        return await run(model, "deploying", request, response, wait, call, detail)

    @router.post("/models/{model}/undeploy", **changing, openapi_extra=described_object(schemas.UndeployRequest))
    async def undeploy(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Take a model, or one of its versions, out of service."""
        body = await read_object(request, schemas.UndeployRequest)

        def call(server: HPS) -> str:
            server.undeploy(model, body.version)
            return server.model(model).version if model in server.models else ""

        detail = f"version {body.version}" if body.version else ""
        return await run(model, "undeploying", request, response, wait, call, detail)

    @router.post("/models/{model}/promote", **changing, openapi_extra=described_object(schemas.PromoteRequest))
    async def promote(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Let the version of the canary or shadow that is under way serve all requests."""
        body = await read_object(request, schemas.PromoteRequest)
        detail = "accepted" * body.accept
        return await run(
            model,
            "deploying",
            request,
            response,
            wait,
            lambda server: server.promote(model, accept=body.accept).version,
            detail,
        )

    @router.post("/models/{model}/rollback", **changing)
    async def rollback(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """End the canary or shadow that is under way; without one, roll back to the previous version, and pin the model to it.

        Polling and restarts take no newer one.
        """
        return await run(model, "rolling back", request, response, wait, lambda server: server.rollback(model).version)

    @router.post("/models/{model}/unpin", **changing)
    async def unpin(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """End the pin of a model to a version, and deploy what its `version_policy` selects."""

        def call(server: HPS) -> str:
            return server.unpin(model, progress=lifecycle.progress()).version

        return await run(model, "deploying", request, response, wait, call)

    @router.post(
        "/models/{model}/fleet",
        responses={status: errors[status] for status in (400, 401, 403, 404, 409, 503)},
        response_model_exclude_none=True,
        openapi_extra=described_object(schemas.FleetRequest),
    )
    async def fleet(model: str, request: Request) -> schemas.FleetAnswer:
        """Change what every replica serves: write the `serving.json` of a model. Answers before replicas follow."""
        body = await read_object(request, schemas.FleetRequest)
        if body.version is not None and body.change not in ("deploy", "canary"):
            raise InvalidInputError(f"reading 'version': got one with change {body.change!r}, expected it only with 'deploy'")
        options = body.model_dump(include=_ROLLOUT_OPTIONS, exclude_none=True)
        if body.change != "canary" and (options or body.canary is not None or body.shadow is not None):
            raise InvalidInputError(
                f"reading the request: got a canary or shadow with change {body.change!r}, expected 'canary'"
            )
        served: Served = request.scope[SERVED]
        what = f"{request_line(request.scope)} {body.change} {body.version or ''}".rstrip()
        outcome, cause, began = "failed", "", time.monotonic()
        try:
            await threads.run(
                lambda: lifecycle.server.change_fleet(
                    model, body.change, body.version, canary=body.canary, shadow=body.shadow, options=options
                )
            )
            outcome = "done"
        except HPSError as error:
            cause = str(error)
            raise
        finally:
            log_change(what, served.who, served.id, outcome, cause, time.monotonic() - began)
        lifecycle.follow_soon()
        status = _fleet(lifecycle.server, model)
        if status is None:
            raise NotReadyError(f"changing what the fleet serves of model {model!r}: it was written, and this replica left it")
        return status

    @router.post("/models/{model}/refresh", **changing)
    async def refresh(model: str, request: Request, response: Response, wait: _Wait = True) -> schemas.ChangeAnswer:
        """Reread the vectors of all resident keys of a model, on every device.

        First fills its tables in the volatile database again, at full speed, where that lost rows.
        """

        def call(server: HPS) -> str:
            server.refresh(model)
            return server.model(model).version

        return await run(model, REFRESHING, request, response, wait, call)

    return router


def _configured(name: str, entry: dict[str, Any]) -> ModelConfig:
    """Check an entry of `models`, which may omit the model's name. Raises ConfigError or InvalidInputError."""
    if entry.get("model", name) != name:
        raise InvalidInputError(f"reading 'config': got model {str(entry['model'])[:120]!r}, expected {name[:120]!r}")
    return override_model(name, None, entry)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def change_status(change: Change, degraded: str) -> schemas.ChangeAnswer:
    under_way = change.under_way
    loading = next((table for table in list(change.tables.values()) if table.load and table.state == "loading"), None)
    return schemas.ChangeAnswer(
        number=change.number,
        model=change.model,
        what=change.what,
        by=change.by,
        since=_time(change.since),
        seconds=change.seconds,
        status=None if under_way else change.status,
        version=change.version or None,
        error=change.error or None,
        table=table_status(loading) if under_way and loading else None,
        rows=change.rows_loaded,
        pinned=_pin(change.pin),
        unpinned=_pin(change.ended_pin),
        degraded=(None if under_way else degraded) or None,
    )


def _pin(pin: DesiredVersion | None) -> schemas.PinStatus | None:
    if pin is None:
        return None
    by = cast("Literal['rollback', 'deploy', 'canary']", pin.by)
    return schemas.PinStatus(version=pin.version, by=by, since=_time(pin.since), text=str(pin), problem=pin.problem or None)


def _fleet(server: HPS, model: str) -> schemas.FleetAnswer | None:
    if (status := server.fleet(model)) is None:
        return None
    document = status.document
    return schemas.FleetAnswer(
        wanted=document.version,
        previous=document.previous,
        withdrawn=list(document.withdrawn),
        by=document.by,
        since=_time(document.since),
        number=document.number,
        serving=status.serving,
        follows=status.follows,
        pending=status.pending,
        reason=status.reason or None,
        age_s=status.age_s,
    )


def _rollout(server: HPS, model: str) -> schemas.RolloutAnswer | None:
    status = server.rollout(model)
    return None if status is None else schemas.RolloutAnswer.model_validate(status.described())


def _checks(report: CheckReport | None) -> schemas.ChecksStatus | None:
    if report is None:
        return None
    return schemas.ChecksStatus(
        verdict=report.verdict,
        against=report.against or None,
        at=_time(report.at),
        seconds=report.seconds,
        reason=report.reason or None,
        checks=[
            schemas.CheckStatus(
                check=found.check,
                table=found.table or None,
                outcome=found.outcome,
                policy=found.policy,
                text=found.text or None,
                figures=dict(found.figures),
            )
            for found in report.checks
        ],
    )


def _models(lifecycle: Lifecycle) -> list[schemas.ModelDetails]:
    server = lifecycle.server
    found = []
    for model in lifecycle.states.models():
        devices, versions, share = [], [], None
        with suppress(UnknownModelError):  # it is waiting, loading or failed
            versions = server.versions(model.name)
            deployment = server.model(model.name)
            devices, share = list(deployment.devices), deployment.config.share
        found.append(
            schemas.ModelDetails(
                name=model.name,
                state=model.state,
                reason=model.reason,
                devices=devices,
                hit_rates=server.metrics.hit_rates(model.name),
                versions=[
                    schemas.VersionStatus(
                        version=it.version,
                        state=it.state,
                        since=_time(it.since),
                        rows=it.rows,
                        size_bytes=it.size_bytes,
                        stale_copies=list(it.stale_copies),
                        checks=_checks(it.checks),
                    )
                    for it in versions
                ],
                pinned=_pin(server.pin(model.name)),
                shard=None if share is None else schemas.ShardMetadata(index=share.index, of=share.of),
                fleet=_fleet(server, model.name),
                rollout=_rollout(server, model.name),
            )
        )
    return found
