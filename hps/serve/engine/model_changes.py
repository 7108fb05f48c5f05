"""Runs model changes requested over HTTP, each on its own thread: the event loop does not wait."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial

from starlette.types import Scope

from hps.ground.threads.workers import call_in_thread
from hps.serve.http.http_answer import OverloadedError, status_of
from hps.serve.logs.changes import log_change, request_line
from hps.serve.logs.lines import fields
from hps.serve.logs.requests import SERVED, Served
from hps.versions.changes import Change
from hps.versions.live_models import LiveModels

_log = logging.getLogger(__name__)
MOST_AT_ONCE = 4


async def change_model(
    live: LiveModels, model: str, doing: str, scope: Scope, call: Callable[[], str], *, detail: str = "", wait: bool = True
) -> Change:
    """Start a change, and wait for its end if `wait`. It continues after the client disconnects.

    Args:
        call: makes the change, and returns the version that serves afterwards.

    Raises:
        ConflictError: another change of the model is under way.
        OverloadedError: too many changes of other models are under way.
        HPSError: the change failed, if `wait`.
    """
    if sum(change.under_way for change in live.requested.values() if change.model != model) >= MOST_AT_ONCE:
        raise OverloadedError("changes", f"changing model {model!r}: {MOST_AT_ONCE} models are being changed; try again later")
    served: Served = scope[SERVED]
    change = live.start_change(model, doing, f"{request_line(scope)} {detail}".rstrip(), served.who)
    served.outlived = True

    def finish(error: BaseException | None) -> None:
        change.status = 200 if error is None else status_of(error)
        live.finish_change(change, error)
        if change.status == 500:
            _log.error("%s failed unexpectedly", change.what, exc_info=error, extra=fields(request_id=served.id.decode()))
        outcome = "done" if error is None else f"failed ({change.status})"
        log_change(change.what, change.by, served.id, outcome, change.error, change.seconds)

    def work() -> None:
        change.thread = threading.current_thread()
        try:
            change.version = call()
        except BaseException as error:
            finish(error)
            raise
        finish(None)

    start = partial(call_in_thread, f"change-{model[:40]}", work)
    if wait:
        await asyncio.wrap_future(start())  # in no variable: an error's traceback would refer to it by this frame
    else:
        start()
    return change
