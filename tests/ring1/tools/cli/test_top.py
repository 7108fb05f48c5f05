"""`hps top` on screens of every width."""

import io
import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from rich.console import Console

from hps import errors
from hps.statistics.snapshot import Latency, ModelStatistics, ServerStatistics, TableStatistics, TierStatistics
from hps.tools.cli.server import top
from hps.tools.cli.server.top import shown
from tests.fakes.clock import Clock, Pauses

LONG = "a_name_that_is_far_longer_than_anybody_should_have_made_it_and_yet_here_it_is_in_full"


def answer(at_s, done):
    """An answer of GET /v1/stats, after so many lookups of 250 keys."""
    latency = Latency(done, done * 0.0005, ((0.001, done),))
    tiers = (
        TierStatistics(
            "embedding_cache", "cpu", "cpu", 24_300, 25_000, 3_400_000, 0, 200 * done, 50 * done, 0, done, True, 0.0
        ),
        TierStatistics("volatile_db", "hash_map", "", 50_000, None, 7_200_000, 0, 40 * done, 10 * done, None, None, True, 0.0),
    )
    tables = tuple(TableStatistics(name, 32, 50_000, 250 * done, done, 0, 0, "copy", tiers) for name in ("item", LONG))
    stages = dict.fromkeys(("query", "volatile_db", "insert"), latency)
    model = ModelStatistics("m", "1", (("1", "serving"),), 0.0, latency, stages, 4, 1, tables)
    server = ServerStatistics("0", 0.0, 1 << 28, (model,), (), {}, {})
    service = {"ready": True, "degraded": "", "fronts": 2, "connections": 40, "pending": 3, "held_bytes": 1 << 16}
    return {
        "at_s": at_s,
        "time_s": 1e9 + at_s,
        "server": asdict(server),
        "service": service,
        "conditions": [],
        "models": [],
        "problems": [],
    }


@pytest.mark.parametrize("width", [80, 120, 10_000])
def test_no_figure_is_cut(width):
    screen = Console(width=width, record=True, file=io.StringIO())
    screen.print(shown("http://127.0.0.1:8000", answer(2.0, 2000), answer(0.0, 0)))
    text = screen.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    row = " ".join(line.removeprefix("item") for line in text.splitlines() if line.startswith("item"))
    assert " ".join(row.split()) == "32 50.0 k 250 k 80.0% 80.0% 0.4% 24.3 k of 25.0 k 1.0 k 3.4 MB 7.2 MB"
    assert "2 fronts: 40 connections, 3 lookups under way, 65.5 kB held for clients" in text
    assert (LONG in text) == (width > 160)  # else it is folded
    assert "persistent" not in text
    assert "degraded" not in text


def test_conditions_are_below_the_state_and_problems_are_folded():
    screen = Console(width=120, record=True, file=io.StringIO())
    now = answer(2.0, 2000)
    conditions = (
        ("degraded", [], "redis_cluster is away", []),
        ("version held", ["ads", "feed"], "ads: alignment 0.01", ["feed: alignment 0.02"]),
        ("deploy failed", [f"m{number}" for number in range(12)], "no file", []),
    )
    now["conditions"] = [
        {"level": "warning", "name": name, "models": models, "text": text, "others": others}
        for name, models, text, others in conditions
    ]
    problem = {"first_s": 1.0, "time_s": 9.0, "level": "warning", "count": 148, "text": "reads of volatile_db failed"}
    now["problems"] = [problem] * 10
    screen.print(shown("http://127.0.0.1:8000", now, answer(0.0, 0)))
    lines = screen.export_text().splitlines()
    assert lines[1:4] == [
        "degraded: redis_cluster is away",
        "version held: ads, feed: ads: alignment 0.01 (1 more)",
        "deploy failed: m0, m1, m2, m3, m4, m5, m6, m7, m8, m9 and 2 more: no file",
    ]
    times = [time.strftime("%H:%M:%S", time.localtime(at)) for at in (9, 1)]
    assert lines.count(f"{times[0]} warning (148 times since {times[1]}): reads of volatile_db failed") == 8
    assert "2 more kinds of problems" in lines


def test_rates_and_shares_are_those_between_two_answers():
    before, now = answer(10.0, 1000), answer(12.0, 3000)
    [was], [model] = before["server"]["models"], now["server"]["models"]
    for stage, at, then in (("query", 1.0, 7.0), ("volatile_db", 1.0, 2.0), ("insert", 5.0, 6.0), ("unique", 2.0, 4.0)):
        for figures, total_s in ((was, at), (model, then)):
            figures["stages"][stage] = {**figures["lookups"], "total_s": total_s}
    was["tables"][0]["defaults"], model["tables"][0]["defaults"] = 1000, 6000
    model["tables"][0]["tiers"][1]["available"] = False
    now["models"] = [
        {"name": "m", "state": "ready", "percent": 100},
        {"name": "slow", "state": "loading", "percent": 7, "reason": "3 tables"},
    ]
    now["problems"] = [{"first_s": 1.0, "time_s": 1.0, "level": "critical", "count": 2, "text": "lost"}]
    screen = Console(width=10_000, record=True, file=io.StringIO())
    screen.print(shown("http://127.0.0.1:8000", now, before))
    lines = [" ".join(line.split()) for line in screen.export_text().splitlines()]
    assert "m 1 1.0 k 500 us 950 us 990 us 1 of 4 query 60%, unique 20%, volatile 10%" in lines
    assert "item 32 50.0 k 250 k 80.0% 80.0% 1.0% 24.3 k of 25.0 k 1.0 k 3.4 MB not read" in lines
    assert "slow: loading, 7 %: 3 tables" in lines
    assert any("critical (2 times since" in line for line in lines)
    screen.print(shown("http://127.0.0.1:8000", now, {**before, "server": {**before["server"], "models": []}}))
    assert "m 1 1.5 k 500 us" in " ".join(screen.export_text().split()), "it was not there before: all of its lookups are new"


class Replica:
    """A server that gives these answers, or fails so, and then is left."""

    addresses = ("http://127.0.0.1:8000",)

    def __init__(self, *answers):
        self._answers = [*answers, KeyboardInterrupt()]

    def ask(self, path):
        assert path == "/v1/stats"
        given = self._answers.pop(0)
        if isinstance(given, BaseException):
            raise given
        return given


@pytest.fixture
def screen(monkeypatch):
    """A terminal, on which pauses take no time."""
    terminal = Console(width=120, height=40, force_terminal=True, color_system=None, file=io.StringIO())
    clock = Clock(100.0)
    monkeypatch.setattr(top.console, "screen", lambda: terminal)
    monkeypatch.setattr(top, "time", SimpleNamespace(**vars(time) | {"monotonic": clock, "sleep": Pauses(99, clock).wait}))
    return terminal


def test_a_server_that_restarts_is_waited_for_and_its_counts_begin_again(screen):
    restarted = answer(1.0, 50)
    restarted["server"]["started"] = 7.0
    away = errors.RemoteConnectionError("nobody listens there")
    with pytest.raises(KeyboardInterrupt):
        top.top_command.__wrapped__(Replica(answer(0.0, 1000), answer(2.0, 3000), away, restarted), 2.0)
    text = screen.file.getvalue()
    assert "nobody listens there" in text
    assert "the last answer is 2 s old" in text
    assert " 1.0 k " in text
    assert "-" in text.rpartition("most time in")[2]
    assert not re.search(r"-\d", text.rpartition("most time in")[2]), "a count that began again is no negative rate"


def test_a_server_that_stays_away_is_given_up(screen):
    away = [errors.RemoteConnectionError("nobody listens there")] * 50
    with pytest.raises(errors.RemoteConnectionError):
        top.top_command.__wrapped__(Replica(answer(0.0, 0), *away), 2.0)
    assert "the last answer is 60 s old" in screen.file.getvalue()


def test_both_versions_of_a_canary_have_their_figures():
    screen = Console(width=120, record=True, file=io.StringIO())
    now = answer(2.0, 2000)
    old, new = ({"version": version, "requests": 900, "error_rate": 0.0, "p50_ms": 0.3, "p99_ms": 1.5} for version in "12")
    rollout = {"mode": "canary", "state": "running", "share": 0.25, "step": 1, "steps": [{}, {}], "reason": "", "serving": "1"}
    rollout |= {"since": datetime.fromtimestamp(now["time_s"] - 7300, UTC).isoformat(), "seconds": 100.0}
    now["server"]["models"][0]["rollout"] = {**rollout, "versions": [old, {**new, "error_rate": 0.5, "p50_ms": None}]}
    screen.print(shown("http://127.0.0.1:8000", now, answer(0.0, 0)))
    lines = [" ".join(line.split()) for line in screen.export_text().splitlines()]
    assert lines[lines.index("m: canary, 25 % of the requests, step 1 of 2") :][2:4] == [
        "version 1 900 0.0% 300 us 1.5 ms",
        "version 2 900 50.0% - 1.5 ms",
    ]
    now["server"]["models"][0]["rollout"] |= {"state": "rolled back", "reason": "p99 of version 2 is 9 ms"}
    back = "m: canary, rolled back: p99 of version 2 is 9 ms"
    for change, is_shown in ({}, True), ({"serving": "3"}, False), ({"seconds": 7000.0}, True):  # two hours and minutes ago
        now["server"]["models"][0]["rollout"] |= change
        screen.print(shown("http://127.0.0.1:8000", now, answer(0.0, 0)))
        assert (back in screen.export_text()) == is_shown, change


def test_a_server_of_an_older_release_is_shown():
    screen = Console(width=120, record=True, file=io.StringIO())
    now = answer(2.0, 2000)
    now["service"] |= {"ready": False, "reason": "m is loading", "degraded": "redis_cluster is away"}
    now["problems"] = [{"time_s": 9.0, "level": "warning", "count": 2, "text": "reads failed"}]
    for name in ("time_s", "conditions"):
        del now[name]
    for name in ("rollout", "checks", "fleet"):
        del now["server"]["models"][0][name]
    screen.print(shown("http://127.0.0.1:8000", now, answer(0.0, 0)))
    lines = screen.export_text().splitlines()
    assert lines[1:3] == ["not ready: m is loading", "degraded: redis_cluster is away"]
    assert f"{time.strftime('%H:%M:%S', time.localtime(9))} warning (2 times): reads failed" in lines
