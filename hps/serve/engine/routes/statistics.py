"""The routes of Triton's statistics extension."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from hps.parameter_server import HPS
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.http.http_metrics import InferenceCounts, InferenceStatistics
from hps.serve.protocol.triton_schemas import (
    BatchDurations,
    Duration,
    InferenceDurations,
    MemoryType,
    MemoryUsage,
    StatisticsAnswer,
    VersionStatistics,
)
from hps.statistics.metrics import TIERS
from hps.statistics.snapshot import ModelStatistics
from hps.versions.deployment import Deployment

_NEVER = Duration(count=0, ns=0)


def statistics_routes(
    lifecycle: Lifecycle, statistics: InferenceStatistics, responses: dict[int | str, dict[str, Any]]
) -> APIRouter:
    router = APIRouter(tags=["statistics"], responses=responses)

    async def answer(server: HPS, deployments: list[Deployment]) -> StatisticsAnswer:
        counted = [(deployment, statistics.of(deployment)) for deployment in deployments]
        model = server.statistics.model

        def read() -> StatisticsAnswer:
            return StatisticsAnswer(model_stats=[_statistics(served, model(served), counts) for served, counts in counted])

        return await run_in_threadpool(read)

    @router.get("/v2/models/stats")
    async def all_statistics() -> StatisticsAnswer:
        """Return the statistics of all versions in service."""
        return await answer(lifecycle.server, lifecycle.server.in_service())

    @router.get("/v2/models/{model}/stats")
    async def model_statistics(model: str) -> StatisticsAnswer:
        """Return the statistics of a model's versions in service."""
        server = lifecycle.server_of(model)
        server.model(model)
        return await answer(server, server.in_service(model))

    @router.get("/v2/models/{model}/versions/{version}/stats")
    async def version_statistics(model: str, version: str) -> StatisticsAnswer:
        """Return the statistics of a version in service."""
        server = lifecycle.server_of(model)
        return await answer(server, [server.model(model, version)])

    return router


def _statistics(deployment: Deployment, held: ModelStatistics, counts: InferenceCounts) -> VersionStatistics:
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
        memory_usage=_memory(deployment, held),
    )


def _memory(deployment: Deployment, held: ModelStatistics) -> list[MemoryUsage]:
    """Return the memory that a version takes in this process: its caches, and vectors in an in-memory database."""
    in_memory = {database.kind for database in deployment.chain.databases if database.in_process}
    used: dict[tuple[MemoryType, int], int] = {("CPU", 0): 0}
    for tier in (tier for table in held.tables for tier in table.tiers):
        if tier.tier == TIERS[0]:
            place: tuple[MemoryType, int] = ("CPU", 0) if tier.device == "cpu" else ("GPU", int(tier.device))
            used[place] = used.get(place, 0) + (tier.vector_bytes or 0) + (tier.overhead_bytes or 0)
        elif tier.kind in in_memory:
            used["CPU", 0] += tier.vector_bytes or 0
    return [MemoryUsage(type=kind, id=number, byte_size=size) for (kind, number), size in used.items()]
