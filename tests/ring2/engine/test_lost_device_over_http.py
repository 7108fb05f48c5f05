"""What a service says and answers while a device is lost; and Redis, which answers in its place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hps
from hps.testing.waiting import wait_until
from tests.fakes.full_device import FullDevice
from tests.ring1.engine.test_lost_device import KEYS, check
from tests.ring1.engine.test_lost_device import document as document
from tests.ring1.engine.test_lost_device import model as model
from tests.ring1.engine.test_lost_device import served as served  # fixtures
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import RunningService, document_of, running_service, samples

LOOKUP = {"tables": {"item": KEYS[:8].tolist()}}


@pytest.mark.redis
def test_redis_alone_answers_without_the_device(served: Callable[..., hps.HPS], tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        tier = {"type": "redis_cluster", "address": redis.address, "num_partitions": 2}
        for more in ({}, {"initialize_after_startup": False}):  # loaded, and kept
            FullDevice.broken = False
            server = served({"volatile_db": {**tier, **more}})
            FullDevice.broken = True
            check(server, 0)
            server.close()


def failed(service: RunningService) -> tuple[float, str | None]:
    """`hps_device_failed`, and `degraded`."""
    return samples(service)[("hps_device_failed",)], service.client.get("/v2/health/ready").json().get("degraded")


def ask(service: RunningService) -> Any:
    return service.client.post("/v1/models/shop/lookup", json=LOOKUP)


PATHS = (
    "/v1/models /v2/models/shop /v2/models/shop/versions/1 /v2/models/shop/stats /v1/stats /v1/models/shop/tables/item/rows/3"
)


def test_the_service_says_that_it_is_degraded(document: dict[str, Any]) -> None:
    with running_service(document) as service:
        assert failed(service) == (0, None)
        before = ask(service).json()
        FullDevice.broken = True
        degraded = "device cpu is lost: an illegal memory access was encountered; restart the service"
        assert failed(service) == (1, degraded)  # no lookup has met it yet
        for path in ("/v1/models", *PATHS.split()):
            assert service.client.get(path).status_code == 200, path
            answer = ask(service)
            assert (answer.status_code, answer.json()) == (200, before)
        [version] = service.client.get("/v1/models").json()["models"][0]["versions"]
        assert set(version["size_bytes"]) == {"volatile_db", "persistent_db"}
        ready = service.client.get("/v2/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "degraded": degraded})
        FullDevice.broken = False
        assert failed(service) == (0, None)


def test_it_says_so_also_while_another_model_is_not_ready(model: dict[str, Any], tmp_path: Path) -> None:
    missing = {**model, "model": "ads", "sparse_files": [str(tmp_path / "nowhere")]}
    with running_service(document_of(model, missing), ready=False) as service:
        ready = lambda query="": service.client.get(f"/v2/health/ready{query}")  # noqa: E731 - asked again
        wait_until(lambda: "1 of 2 models failed" in ready().json().get("reason", ""), "one has failed")
        FullDevice.broken = True
        for query, status in (("", 503), ("?strict=false", 200)):
            assert "device cpu is lost" in ready(query).json()["degraded"]
            assert ready(query).status_code == status


def test_a_model_that_no_database_can_answer_is_not_ready(document: dict[str, Any], model: dict[str, Any]) -> None:
    cached = {**model, "model": "cached", "embedding_cache_type": "stochastic"}
    with running_service({**document, "models": [*document["models"], cached]}) as service:
        FullDevice.broken = True
        reason = "device cpu is lost (an illegal memory access was encountered), and no database holds every row"
        for query in ("", "?strict=false"):
            ready = service.client.get(f"/v2/health/ready{query}")
            assert (ready.status_code, ready.json()["reason"]) == (503, f"model 'cached': {reason}; restart the service")
        assert samples(service)[("hps_ready",)] == 0
        answer = service.client.get("/v2/models/cached/ready")
        assert (answer.status_code, reason in answer.json()["error"]) == (503, True)
        assert service.client.get("/v2/models/shop/ready").status_code == ask(service).status_code == 200
        FullDevice.broken = False
        assert service.client.get("/v2/health/ready").json() == {"ready": True}
