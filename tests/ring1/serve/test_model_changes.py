"""Changes of models that are asked for: made once, recorded, and not ended with their clients."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hps.errors import ConflictError, DatabaseError
from hps.serve.engine.model_changes import MOST_AT_ONCE, change_model
from hps.serve.http.http_answer import OverloadedError
from hps.serve.logs.requests import SERVED
from hps.testing.waiting import PATIENCE_S, wait_until, wait_until_async
from hps.versions.changes import Change
from hps.versions.live_models import LiveModels

REQUEST = SimpleNamespace(id=b"request", who="127.0.0.1", outlived=False)
"""What `change_model` uses of a served request."""


async def change(live: LiveModels, call: Callable[[], str], model: str = "shop", **settings: Any) -> Change:
    scope = {"method": "POST", "path": f"/v1/models/{model}/deploy", SERVED: REQUEST}
    return await change_model(live, model, "deploying", scope, call, **settings)


def failing() -> str:
    raise DatabaseError("the disk is full")


def test_a_change_is_made_by_a_thread_of_its_own():
    live, threads = LiveModels(), []

    def call() -> str:
        threads.append(threading.current_thread().name)
        with live.changing("shop", "deploying"):  # continues the change
            return "7"

    done = asyncio.run(change(live, call))
    assert (done.version, done.status, done.error, done.under_way) == ("7", 200, "", False)
    assert threads == ["hps-change-shop"]


def test_a_failed_change_is_recorded_and_its_error_freed():
    live = LiveModels()

    async def fail() -> weakref.ref[BaseException]:
        (error,) = await asyncio.gather(change(live, failing), return_exceptions=True)
        assert isinstance(error, DatabaseError)
        return weakref.ref(error)

    gc.disable()
    try:
        error = asyncio.run(fail())
        live.requested["shop"].thread.join(PATIENCE_S)  # its frames refer to the error
        assert error() is None
    finally:
        gc.enable()
    failed = live.requested["shop"]
    assert (failed.status, failed.error, failed.under_way) == (503, "the disk is full", False)


def test_a_change_outlives_its_client():
    live, gate = LiveModels(), threading.Event()

    async def disconnected() -> None:
        request = asyncio.ensure_future(change(live, lambda: str(gate.wait(PATIENCE_S))))
        await wait_until_async(lambda: live.requested, "it is asked for")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    asyncio.run(disconnected())
    assert live.requested["shop"].under_way
    gate.set()
    wait_until(lambda: live.requested["shop"].status == 200, "the change ended")
    assert live.requested["shop"].version == "True"


def test_one_change_of_a_model_and_four_models_at_a_time():
    live, gate = LiveModels(), threading.Event()

    async def many() -> None:
        for i in range(MOST_AT_ONCE):
            assert (await change(live, lambda: str(gate.wait(PATIENCE_S)), f"shop-{i}", wait=False)).under_way
        with pytest.raises(ConflictError, match="under way"):
            await change(live, failing, "shop-0")
        with pytest.raises(OverloadedError, match="4 models are being changed"):
            await change(live, failing)

    try:
        asyncio.run(many())
    finally:
        gate.set()
    wait_until(lambda: not any(one.under_way for one in live.requested.values()), "the changes ended")
