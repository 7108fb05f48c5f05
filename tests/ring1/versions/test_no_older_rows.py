"""In every order of threads with one preemption, no lookup gets an older row; more orders are in tests/nightly/versions."""

import importlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hps
from hps.cache.cpu.cache import NumpyCache, NumpyLookup
from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.models.writer import write_sparse_model
from hps.updates.base import Partition
from hps.updates.feed import UpdateFeed
from hps.updates.framing import encode
from hps.versions.live_models import LiveModels
from tests.fakes.interleavings import Schedule, cooperative, schedules
from tests.fakes.memory_log import MemoryBroker
from tests.servers.running_service import document_of, model_of

KEY, NONE = np.zeros(1, np.int64), np.empty(0, np.int64)
TOPIC = Partition("hps_et.m.t", 0)
NO_CACHE, COLD, WARM = {"gpucache": False}, {"init_ec": False}, {"init_ec": True}
WAITING = ("engine.fences", "versions.live_models", "versions.deployment", "ground.threads.open_calls")


class Server:
    """A parameter server with a persistent database alone beside an update log. Schedules run its threads.

    A thread gives way before it reads or writes a cache, before and after it reads the database, and before a takeover.
    """

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self._schedule: Schedule | None = None
        self._newest = 0
        waiting = cooperative(self._step)
        for name in WAITING:
            known = vars(importlib.import_module(f"hps.{name}").threading)
            patch.setattr(f"hps.{name}.threading", SimpleNamespace(**known | vars(waiting)))
        patch.setattr("hps.engine.session.queue", SimpleNamespace(SimpleQueue=waiting.SimpleQueue, Empty=queue.Empty))
        patch.setattr("hps.versions.live_models.new_thread", self._new_thread)
        patch.setattr("hps.updates.feed._clock", lambda: 1.0)
        patch.setattr(UpdateFeed, "start", UpdateFeed._start_following)
        patch.setitem(IMPLEMENTATIONS["update_log"], "memory", BuiltIn("tests.fakes.memory_log:MemoryLog"))
        patch.setitem(IMPLEMENTATIONS["database"], "memory", BuiltIn("tests.fakes.memory_database:PersistentMemoryDatabase"))
        self._broker = MemoryBroker()
        self._broker.create(TOPIC.topic)
        patch.setitem(MemoryBroker.by_name, "here", self._broker)

        write_sparse_model(directory / "t.model", (KEY, np.zeros((1, 1), np.float32)))
        settings = {"hit_rate_threshold": 1.1, "gpucacheper": 1.0, "cache_refresh_percentage_per_iteration": 1.0}
        model = model_of("m", [str(directory / "t.model")], {"t": 1}, **settings)
        document = document_of(model, update_source={"type": "memory", "brokers": "here", "poll_timeout_ms": 1})
        document |= {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "memory", "path": str(directory)}}
        self._hps = hps.HPS(document, deploy_models=False)
        (database,) = self._hps._chain.databases
        patch.setattr(database, "fetch", self._stepping(database.fetch, after=True))
        for owner, name in ((NumpyCache, "update"), (NumpyLookup, "query"), (LiveModels, "serve")):
            patch.setattr(owner, name, self._stepping(getattr(owner, name)))

    def explore(self, before: dict[str, bool], after: dict[str, bool], preemptions: int) -> int:
        """Change settings beside an update and two lookups, in every order; return the number of orders."""
        count = 0
        for schedule in schedules(preemptions):
            count += 1
            self._deploy(before)
            self._newest += 1
            row = np.full((1, 1), self._newest, np.float32)
            self._broker.append(TOPIC, encode(KEY, row, NONE, sequence=self._newest))
            seen: list[float] = []
            self._schedule = schedule
            schedule.spawn(lambda seen=seen: seen.extend(self._look_up() for _ in range(2)))
            schedule.spawn(lambda: self._deploy(after))
            for feed in list(self._hps._updates._feeds):
                schedule.spawn(lambda feed=feed: self._follow(feed))
            schedule.run()
            self._schedule = None
            seen.append(self._look_up())
            assert seen == sorted(seen), f"{seen} in the order {schedule.taken}"
            assert seen[-1] == self._newest, f"{seen} in the order {schedule.taken}"
        return count

    def _look_up(self) -> float:
        return float(self._hps.lookup(KEY, "m", "t")[0, 0])

    def _follow(self, feed: UpdateFeed) -> None:
        """Apply what the log has, as the feed's thread would."""
        (table,) = feed._tables.values()
        feed._run_once()
        while table.batch:
            self._step(lambda: table.refused_by is not feed._target)
            feed._run_once()

    def _deploy(self, settings: dict[str, bool]) -> None:
        self._hps.deploy(self._hps.config.models[0].model_copy(update=settings))

    def _step(self, until: Callable[[], object] = lambda: True) -> None:
        if self._schedule is not None:
            self._schedule.step(until)

    def _stepping(self, call: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            self._step()
            result = call(*arguments, **named)
            if after:
                self._step()
            return result

        return stepped

    def _new_thread(self, _name: str, work: Callable[[], object], lasting: bool) -> Any:
        assert not lasting
        return SimpleNamespace(start=work if self._schedule is None else lambda: self._schedule.spawn(work))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        yield Server(tmp_path_factory.mktemp("versions"), patch)


def test_time_goes_forward_in_every_order(server: Server) -> None:
    assert server.explore(NO_CACHE, WARM, preemptions=1) > 20
