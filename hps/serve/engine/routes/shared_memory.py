"""Routes of Triton's system shared memory extension."""

from typing import Any

from fastapi import APIRouter, Request, Response

from hps.serve.http.request_body import described_object, read_object
from hps.serve.http.shared_memory import SharedMemoryRegistry, check_local
from hps.serve.protocol.triton_schemas import RegionStatus, RegisterRequest


def shared_memory_routes(registry: SharedMemoryRegistry, responses: dict[int | str, dict[str, Any]]) -> APIRouter:
    router = APIRouter(prefix="/v2/systemsharedmemory", tags=["shared memory"], responses=responses)

    def check(request: Request) -> None:
        check_local(request.client.host if request.client else "", dict(request.scope["headers"]))

    def status_of(name: str | None) -> list[RegionStatus]:
        return [
            RegionStatus(name=it.name, key=it.key, offset=it.offset, byte_size=it.byte_size) for it in registry.regions(name)
        ]

    @router.get("/status")
    async def shared_memory_status(request: Request) -> list[RegionStatus]:
        """List the registered regions."""
        check(request)
        return status_of(None)

    @router.get("/region/{region}/status")
    async def shared_memory_region_status(region: str, request: Request) -> list[RegionStatus]:
        """Describe one region."""
        check(request)
        return status_of(region)

    @router.post("/region/{region}/register", response_class=Response, openapi_extra=described_object(RegisterRequest))
    async def register_shared_memory(region: str, request: Request) -> Response:
        """Register a segment of /dev/shm, for tensors of requests from this machine."""
        check(request)
        wanted = await read_object(request, RegisterRequest)
        registry.register(region, wanted.key, wanted.offset, wanted.byte_size)
        return Response(b"{}", media_type="application/json")

    @router.post("/region/{region}/unregister", response_class=Response)
    async def unregister_shared_memory(region: str, request: Request) -> Response:
        """Forget a region. The segment stays."""
        check(request)
        registry.unregister(region)
        return Response(b"{}", media_type="application/json")

    @router.post("/unregister", response_class=Response)
    async def unregister_all_shared_memory(request: Request) -> Response:
        """Forget all regions."""
        check(request)
        registry.unregister(None)
        return Response(b"{}", media_type="application/json")

    return router
