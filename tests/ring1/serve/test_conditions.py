"""What is wrong with a server, worst first, and since when."""

import threading
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

import hps
from hps.ground.threads.workers import THREADS
from hps.serve.engine.conditions import RUNBOOKS, ConditionWatch, conditions
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.protocol.schemas import ModelStatus
from hps.statistics.snapshot import (
    FailedCheck,
    Latency,
    ModelStatistics,
    ServerStatistics,
    TableStatistics,
    TierStatistics,
    VersionChecks,
)
from hps.testing.waiting import PATIENCE_S
from tests.fakes.clock import Clock
from tests.servers.running_service import document_of, model_of


def tier(name: str, *, available: bool = True) -> TierStatistics:
    return TierStatistics(name, "", "", 0, None, 0, 0, 0, 0, 0, 0, available, 0.0)


def database(available: bool) -> TierStatistics:
    return tier("persistent_db", available=available)


def served(
    *tables: tuple[bool, ...], held: bool = False, lag_s: float | None = 0.0, rollout: dict[str, str] | None = None
) -> ServerStatistics:
    """Statistics of a model whose tables have a cache, and databases that are available or not."""
    found = tuple(
        TableStatistics(f"table{number}", 4, 1, 0, 0, 0, 0, "", (tier("embedding_cache"), *map(database, available)))
        for number, available in enumerate(tables)
    )
    failed = (FailedCheck("vectors", "item", "hold", "alignment 0.01"), FailedCheck("scores", "", "hold", "correlation -1"))
    checks = (VersionChecks("8", "held", "7", 0.0, 1.0, 3, 0, failed), VersionChecks("7", "passed", "6", 0.0, 1.0, 4, 0, ()))
    versions = (("7", "serving"), ("8", "held" if held else "kept"))
    model = ModelStatistics("ads", "7", versions, 0.0, Latency(), {}, 1, 0, found, checks=checks, rollout=rollout)
    return ServerStatistics("0", 0.0, 0, (model,), (), {}, {"ads.item": lag_s})


def server_behind(*lags_s: float) -> ServerStatistics:
    """Statistics of a server whose tables are behind their log of updates."""
    return replace(served(), updates={f"shop.{number}": lag_s for number, lag_s in enumerate(lags_s)})


NOTHING: dict[str, Any] = {"not_ready": "", "broken": "", "degraded": "", "models": [], "failures": {}, "server": None}


def found(**given: Any) -> list[tuple[str, str, str, str]]:
    entries = conditions(**{**NOTHING, **given})
    assert not any(entry.others for entry in entries)
    return [(entry.level, entry.name, ", ".join(entry.models), entry.text) for entry in entries]


CAUSES = "vectors of item: alignment 0.01; scores: correlation -1"
BEHIND = "behind the log of updates:"
HELD = ("warning", "version held", "ads", f"version 8 is held by its checks: {CAUSES}")
KEPT_ON = ("warning", "deploy failed", "ads", "version 7 serves on; the last deployment failed: no file")
UNREAD = "no database answers for table1: lookups of keys that the cache lacks fail"
ROLLED_BACK = {"mode": "canary", "state": "rolled back", "version": "8", "serving": "7", "reason": "p99 of version 8 is 9 ms"}
BACK = ("warning", "rolled back", "ads", "the canary of version 8: p99 of version 8 is 9 ms")
FAILED = ModelStatus(name="feed", state="failed", percent=0, reason="no such file", tables=[])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"server": served((True, True), (), lag_s=None)}, []),
        ({"server": served((False, True))}, []),  # its chip says so; `degraded` says why
        ({"server": served((True,), (False, False))}, [("error", "lookups fail", "ads", UNREAD)]),
        ({"server": served(held=True)}, [HELD]),
        ({"server": served(held=True), "failures": {"ads": "no file"}}, [HELD, KEPT_ON]),  # of a later version
        ({"server": served(), "failures": {"ads": "no file"}}, [KEPT_ON]),
        ({"server": served(rollout=ROLLED_BACK)}, [BACK]),
        ({"server": served(rollout={**ROLLED_BACK, "reason": ""})}, []),  # a person did it
        ({"server": served(rollout={**ROLLED_BACK, "state": "running"})}, []),
        ({"server": served(rollout={**ROLLED_BACK, "serving": "6"})}, []),  # version 7 was deployed since
        ({"server": served(lag_s=60.0)}, []),
        ({"server": served(lag_s=60.5)}, [("warning", "updates late", "", f"{BEHIND} ads.item 60 s")]),
        ({"server": server_behind(61.0, 90.0)}, [("warning", "updates late", "", f"{BEHIND} shop.1 90 s, shop.0 61 s")]),
        ({"models": [FAILED]}, [("error", "model failed", "feed", "no such file")]),
        ({"models": [FAILED], "not_ready": "1 of 2 models failed"}, [("error", "not ready", "", "1 of 2 models failed")]),
    ],
)  # fmt: skip
def test_a_condition_is_named(given: dict[str, Any], expected: list[tuple[str, ...]]) -> None:
    assert found(**given) == expected


def test_the_worst_condition_is_the_first() -> None:
    server = served((False,), held=True, lag_s=99.0)
    names = [name for _, name, *_ in found(server=server, not_ready="a", broken="b", degraded="c")]
    assert names == ["not ready", "restart needed", "lookups fail", "degraded", "version held", "updates late"]


def failed(*reasons: tuple[str, str]) -> list[ModelStatus]:
    return [FAILED.model_copy(update={"name": name, "reason": reason}) for name, reason in reasons]


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (failed(("ads", "no room"), ("feed", "no room")), ("no room", ())),
        (failed(("ads", "no room"), ("feed", "no file")), ("ads: no room", ("feed: no file",))),
    ],
)
def test_what_has_happened_to_many_models_is_one_condition(
    models: list[ModelStatus], expected: tuple[str, tuple[str, ...]]
) -> None:
    [entry] = conditions(**{**NOTHING, "models": models})
    assert (entry.name, entry.models, (entry.text, entry.others)) == ("model failed", ("ads", "feed"), expected)


def test_two_held_versions_of_a_model_are_one_condition() -> None:
    server = served(held=True)
    [ads] = server.models
    versions = (*ads.versions, ("9", "held"))
    checks = (*ads.checks, replace(ads.checks[0], version="9"))
    [entry] = conditions(**{**NOTHING, "server": replace(server, models=(replace(ads, versions=versions, checks=checks),))})
    text = "version {} is held by its checks: " + CAUSES
    assert (entry.models, entry.text, entry.others) == (("ads",), text.format(8), (text.format(9),))


def test_every_condition_has_a_runbook() -> None:
    server = served((False,), held=True, lag_s=99.0, rollout=ROLLED_BACK)
    given = {"not_ready": "a", "broken": "b", "degraded": "c"}
    entries = found(server=server, **given) + found(models=[FAILED]) + found(server=served(), failures={"ads": "d"})
    names = {name for _, name, *_ in entries}
    assert names == set(RUNBOOKS)
    page = (resources.files("hps.serve") / "page" / "runbooks.html").read_text()
    assert [place for place in RUNBOOKS.values() if f' id="{place}">' not in page] == []


@pytest.fixture
def lifecycle() -> Lifecycle:
    """A service that is starting."""
    return Lifecycle(hps.load_configuration(document_of(model_of("ads", ["nowhere"], {"item": 4}))))


def test_a_thread_that_has_ended_is_a_condition(lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(THREADS, "problem", "thread load ended")
    names = {entry.name: entry.text for entry in ConditionWatch(lifecycle).find(None)}
    assert names["restart needed"] == "thread load ended"


def test_conditions_are_watched_while_nobody_asks(lifecycle: Lifecycle, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, clock = threading.Event(), Clock(5.0)

    def now() -> float:
        looked.set()
        return clock()

    monkeypatch.setattr("hps.serve.engine.conditions._EVERY_S", 0.001)
    watch = ConditionWatch(lifecycle, now)
    watch.start()
    assert looked.wait(PATIENCE_S)
    watch.close()
    clock.now = 60.0
    assert [(entry.name, entry.since_s) for entry in watch.find(None)] == [("not ready", 5.0)]


def test_a_condition_lasts_since_it_was_seen_without_a_gap(lifecycle: Lifecycle) -> None:
    clock = Clock()
    watch = ConditionWatch(lifecycle, clock)

    def since() -> dict[str, float]:
        return {entry.name: entry.since_s for entry in watch.find(served(held=held))}

    held = False
    began = clock()
    assert since() == {"not ready": began}
    clock.now += 5
    held = True
    assert since() == {"not ready": began, "version held": began + 5}
    clock.now += 5
    held = False
    assert since() == {"not ready": began}
    clock.now += 5
    held = True
    assert since() == {"not ready": began, "version held": began + 15}
