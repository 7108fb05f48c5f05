"""The routes of Triton's statistics extension."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from hps.databases.base import PersistentDatabase, SharedDatabase
from hps.deployment import Deployment
from hps.service.http_metrics import InferenceCounts, InferenceStatistics
from hps.service.lifecycle import Lifecycle
from hps.service.triton_schemas import (
    BatchDurations,
    Duration,
    InferenceDurations,
    MemoryType,
    MemoryUsage,
    ModelStatistics,
    VersionStatistics,
)

_NEVER = Duration(count=0, ns=0)


def statistics_routes(
    lifecycle: Lifecycle, statistics: InferenceStatistics, responses: dict[int | str, dict[str, Any]]
) -> APIRouter:
    """Make the routes.

    Args:
        lifecycle: of the parameter server.
        statistics: of its inferences.
        responses: their errors, to be described.
    """
    router = APIRouter(tags=["statistics"], responses=responses)

    async def answer(deployments: list[Deployment]) -> ModelStatistics:
        counted = [(one, statistics.of(one)) for one in deployments]
        return await run_in_threadpool(lambda: ModelStatistics(model_stats=[_statistics(*one) for one in counted]))

    @router.get("/v2/models/stats")
    async def all_statistics() -> ModelStatistics:
        """Statistics of all versions in service."""
        return await answer(lifecycle.server.in_service())

    @router.get("/v2/models/{model}/stats")
    async def model_statistics(model: str) -> ModelStatistics:
        """Statistics of the versions of a model that are in service."""
        server = lifecycle.server_of(model)
        server.model(model)
        return await answer(server.in_service(model))

    @router.get("/v2/models/{model}/versions/{version}/stats")
    async def version_statistics(model: str, version: str) -> ModelStatistics:
        """Statistics of a version in service."""
        return await answer([lifecycle.server_of(model).model(model, version)])

    return router


def _statistics(deployment: Deployment, counts: InferenceCounts) -> VersionStatistics:
    done, last_s = counts.successes, 0.0
    if counts.last_ns:
        last_s = time.time() - (time.perf_counter_ns() - counts.last_ns) / 1e9
    of_model = {
        "compute_input": Duration(count=done, ns=counts.input_ns),
        "compute_infer": Duration(count=done, ns=counts.infer_ns),
        "compute_output": Duration(count=done, ns=counts.output_ns),
    }
    return VersionStatistics(
        name=deployment.config.model,
        version=deployment.version,
        last_inference=int(last_s * 1000),
        inference_count=done,
        execution_count=done,
        inference_stats=InferenceDurations(
            success=Duration(count=done, ns=counts.input_ns + counts.queue_ns + counts.infer_ns + counts.output_ns),
            fail=Duration(count=counts.failures, ns=counts.failure_ns),
            queue=Duration(count=done, ns=counts.queue_ns),
            **of_model,
            cache_hit=_NEVER,
            cache_miss=_NEVER,
        ),
        batch_stats=[BatchDurations(batch_size=1, **of_model)] if done else [],
        memory_usage=_memory(deployment),
    )


def _memory(deployment: Deployment) -> list[MemoryUsage]:
    """What the vectors of a version take in this process: in its caches, and in a database in memory."""
    tables = range(len(deployment.tables))
    used: dict[tuple[MemoryType, int], int] = {("CPU", 0): 0}
    for device_id, session in deployment.sessions.items():
        if session.cache is None:
            continue
        size = sum(session.cache.stats(index).size_bytes for index in tables)
        if session.on_cuda:
            used["GPU", device_id] = size
        elif device_id == deployment.devices[0]:  # on the CPU all device ids share one cache
            used["CPU", 0] += size
    for database in deployment.chain.databases:
        if not isinstance(database, PersistentDatabase | SharedDatabase):
            used["CPU", 0] += sum(database.stats(table.tag).vector_bytes for table in deployment.tables)
    return [MemoryUsage(type=kind, id=number, byte_size=size) for (kind, number), size in used.items()]
