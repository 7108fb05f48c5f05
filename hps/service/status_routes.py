"""The page at `/`, the page of the API at `/docs`, and `GET /v1/stats`, which has all that the first one shows."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any, Final

import orjson
from fastapi import APIRouter, Response

from hps.service.http_metrics import HTTPMetrics
from hps.service.lifecycle import Lifecycle
from hps.service.logs import RecentProblems

_KEPT_S: Final = 0.25  # an answer takes about 1 ms of the event loop for 26 tables
_PAGES: Final = {"/": "index.html", "/docs": "api.html"}
_PARTS: Final = ("page.css", "dom.js", "figures.js", "page.js", "api.js")
OPEN_PATHS: Final = frozenset({*_PAGES, *(f"/page/{name}" for name in _PARTS)})
"""What needs no token: files that are the same for every server. What they show comes from routes that need it."""

_TYPES: Final = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def status_routes(
    lifecycle: Lifecycle,
    metrics: HTTPMetrics,
    problems: RecentProblems,
    service: Callable[[], dict[str, Any]],
    responses: dict[int | str, dict[str, Any]],
) -> APIRouter:
    """Make the routes.

    Args:
        lifecycle: of the parameter server.
        metrics: of its requests.
        problems: of late.
        service: what the service itself holds now.
        responses: descriptions of errors by status.
    """
    router = APIRouter()

    kept, kept_at = b"", -math.inf

    @router.get("/v1/stats", tags=["metrics"], responses={401: responses[401]}, response_class=Response)
    async def stats() -> Response:
        """What the page at `/` shows: counts since the start, sizes, times, loading, and the last warnings and errors.

        `server` is what `HPS.stats()` returns, null while the databases are being opened; `service`, `models` and `problems`
        are of this process. Everything is counted since the start: whoever wants rates subtracts two answers, and their
        `at_s`, seconds of the server's clock. One answer serves all who ask within a quarter of a second.
        """
        nonlocal kept, kept_at
        if time.monotonic() - kept_at > _KEPT_S:
            kept, kept_at = orjson.dumps(state()), time.monotonic()
        return Response(kept, headers={"content-type": "application/json", "cache-control": "no-store"})

    def state() -> dict[str, Any]:
        opened = lifecycle.opened
        return {
            "at_s": time.monotonic(),
            "server": opened.stats() if opened is not None else None,
            "service": {
                "ready": not lifecycle.not_ready_reason,
                "reason": lifecycle.not_ready_reason,
                "requests": metrics.requests(),
                **service(),
            },
            "models": [one.model_dump(exclude_none=True) for one in lifecycle.states.models()],
            "problems": [asdict(one) for one in problems.entries()],
        }

    folder = resources.files("hps.service") / "page"
    for path, name in (*_PAGES.items(), *((f"/page/{name}", name) for name in _PARTS)):
        router.get(path, include_in_schema=False)(_static((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]]))
    return router


def _static(content: bytes, kind: str) -> Callable[[], Response]:
    def answer() -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return answer
