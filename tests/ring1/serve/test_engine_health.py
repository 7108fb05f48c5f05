"""Whether the engine is ready, for all that watch it: one poll for them all, and none without them."""

import asyncio
from contextlib import aclosing

import pytest

from hps.errors import NotReadyError
from hps.serve.frontend import engine_health as engine_health
from hps.serve.frontend.engine_health import EngineHealth
from hps.serve.http.http_answer import RequestError
from hps.testing.waiting import wait_until_async
from tests.servers.on_loop import beside


class Engine:
    """The connections to an engine.

    Attributes:
        ready: None: nobody is there.
        answers: whether it answers lookups of this front; if not, it is not asked.
        asked: number of questions.
    """

    def __init__(self) -> None:
        self.ready: bool | None = True
        self.answers = True
        self.asked = 0

    def check_ready(self, path: str) -> None:
        if not self.answers:
            raise NotReadyError(path)

    async def fetch_answer(self, request: bytes) -> tuple[int, bytes]:
        assert request.startswith(b"GET /v2/health/ready HTTP/1.1\r\n")
        self.asked += 1
        await asyncio.sleep(0)
        if self.ready is None:
            raise RequestError(503, "the parameter server is being started again")
        return 200 if self.ready else 503, b""


class Watcher:
    """A call that watches."""

    def __init__(self, health: EngineHealth) -> None:
        self.seen: list[bool] = []
        self.task = asyncio.ensure_future(self._watch(health))

    async def _watch(self, health: EngineHealth) -> None:
        async with aclosing(health.watch()) as found:
            async for ready in found:
                self.seen.append(ready)

    async def end(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


@beside()
async def test_all_watchers_see_each_change_once_by_the_polls_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "_POLL_S", 0.001)
    engine = Engine()
    health = EngineHealth(engine, engine.check_ready)  # type: ignore[arg-type]
    watchers = [Watcher(health) for _ in range(500)]
    wanted = []
    for ready in (True, False, None, True):
        engine.ready = ready
        if bool(ready) not in wanted[-1:]:
            wanted.append(bool(ready))
        asked = engine.asked
        await wait_until_async(lambda: engine.asked > asked + 2, "it is asked")  # noqa: B023
        assert all(watcher.seen == wanted for watcher in watchers)
    assert health.watchers == 500
    for watcher in watchers:
        await watcher.end()
    assert health.watchers == 0


@beside()
async def test_many_that_come_at_once_take_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "_POLL_S", 1000)
    engine = Engine()
    health = EngineHealth(engine, engine.check_ready)  # type: ignore[arg-type]
    watchers = [Watcher(health) for _ in range(4000)]
    await wait_until_async(lambda: all(watcher.seen == [True] for watcher in watchers), "all know it")
    late = Watcher(health)
    await wait_until_async(lambda: late.seen == [True], "the late one knows it, too")
    assert engine.asked == 1
    for watcher in [*watchers, late]:
        await watcher.end()
    engine.ready = False
    again = Watcher(health)  # nobody has polled meanwhile
    await wait_until_async(lambda: again.seen == [False], "it is asked again")
    assert engine.asked == 2
    await again.end()


@beside()
async def test_the_engine_is_asked_by_nobody_once_the_last_watcher_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "_POLL_S", 0.001)
    engine = Engine()
    health = EngineHealth(engine, engine.check_ready)  # type: ignore[arg-type]
    before = len(asyncio.all_tasks())
    watcher = Watcher(health)
    await wait_until_async(lambda: engine.asked > 1, "it is asked")
    await watcher.end()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before


@beside()
async def test_an_engine_that_answers_no_lookups_of_this_front_is_not_ready() -> None:
    engine = Engine()
    health = EngineHealth(engine, engine.check_ready)  # type: ignore[arg-type]
    assert await health.is_ready()
    engine.answers = False
    assert not await health.is_ready()
    assert engine.asked == 1
