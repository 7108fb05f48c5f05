"""The page at `/`, the API page at `/docs`, and `GET /v1/stats`, the data of the first."""

import time
from collections.abc import Callable
from importlib import resources
from typing import Any, Final

import orjson
from fastapi import APIRouter, Response

from hps.serve.engine.call_threads import CallThreads
from hps.serve.engine.conditions import ConditionWatch
from hps.serve.engine.history import History
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.engine.routes.administration import change_status
from hps.serve.engine.routes.pages import PAGES, PARTS
from hps.serve.engine.shared_text import SharedText
from hps.serve.http.authorization import Authorization
from hps.serve.http.http_metrics import HTTPMetrics
from hps.serve.logs.problems import RecentProblems

_MOST_CHANGES: Final = 20
_KEPT_S: Final = 0.25  # an answer takes about 1 ms for 26 tables
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
    watch: ConditionWatch,
    history: History,
    authorization: Authorization,
    threads: CallThreads,
    responses: dict[int | str, dict[str, Any]],
) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/stats", tags=["metrics"], responses={401: responses[401]}, response_class=Response)
    async def stats() -> Response:
        """Return the data of the page at `/`: counts since the start, sizes, times, loading, and recent warnings and errors.

        `server` is `HPS.stats()`, null while the databases are being opened; all others are of this process. `conditions` are
        what needs a person, worst first; `problems` are warnings and errors folded by kind, latest first; `changes` is the last
        requested change of each model, latest first. All counts are since the start: for rates, divide the difference of two
        answers by that of their `at_s`, the server's clock in seconds. An answer is shared by all requests within a quarter of
        a second.
        """
        return Response(await shared.get(), headers={"content-type": "application/json", "cache-control": "no-store"})

    @router.get("/v1/history", tags=["metrics"], responses={401: responses[401]}, response_class=Response)
    async def history_since_start() -> Response:
        """Return counts at regular times since the start, at most a few hundred, for the charts of the page at `/`.

        `points` are in the order of time, the last is of now. Each has `at_s`, by the clock of `/v1/stats`, and counts since
        the start over the models in service: `keys`, `hits` and `misses` of embedding caches, and `latency`. A count falls
        when a model is undeployed.
        """
        return Response(await past.get(), headers={"content-type": "application/json", "cache-control": "no-store"})

    def past_text() -> bytes:
        return orjson.dumps({"at_s": time.monotonic(), "points": history.points()})

    past = SharedText(past_text, threads, _KEPT_S)

    def text() -> bytes:
        opened, now_s = lifecycle.opened, time.time()
        server = opened.stats() if opened is not None else None
        reason, degraded = lifecycle.not_ready_reason, lifecycle.degraded
        changes = sorted(lifecycle.live.requested.values(), key=lambda change: -change.number)[:_MOST_CHANGES]
        state = {
            "at_s": time.monotonic(),
            "time_s": now_s,
            "server": server,
            "service": {
                "ready": not reason,
                "reason": reason,
                "degraded": degraded,
                "administration": authorization.administration,
                "requests": metrics.requests(),
                **metrics.gauges(),
            },
            "conditions": watch.find(server),
            "models": [model.model_dump(exclude_none=True) for model in lifecycle.states.models()],
            "changes": [change_status(change, degraded).model_dump(exclude_none=True) for change in changes],
            "problems": problems.entries(),
        }
        return orjson.dumps(state)

    shared = SharedText(text, threads, _KEPT_S)
    folder = resources.files("hps.serve") / "page"
    for path, name in (*PAGES.items(), *((f"/page/{name}", name) for name in PARTS)):
        router.get(path, include_in_schema=False)(_static((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]]))
    return router


def _static(content: bytes, kind: str) -> Callable[[], Response]:
    def answer() -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return answer
