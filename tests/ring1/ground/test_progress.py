"""What is said of a load: by the log, by readiness and by the metrics."""

import logging
import random
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

import hps
from hps.ground.progress import LogProgress, TableProgress, count_text, size_text, time_text
from hps.serve.engine.readiness import Readiness
from hps.statistics.prometheus import expose
from hps.versions.changes import Change
from hps.versions.deployment import Deployment
from hps.versions.live_models import LiveModels
from tests.fakes.clock import Clock
from tests.servers.running_service import document_of, model_of
from tests.tables.table_loads import Events

TAG = "hps_et.m.item"


@pytest.fixture
def clock() -> Clock:
    return Clock(100)


def test_sizes_counts_and_times_are_written_as_people_say_them() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 99_949: "99.9 kB", 99_960: "100 kB", 2.8e9: "2.8 GB", 5e15: "5000 TB"}
    assert {size: size_text(size) for size in sizes} == sizes
    assert [count_text(count) for count in (0, 950, 1_234_567)] == ["0", "950", "1.2 M"]
    expected = {0.4: "0 s", 5: "5 s", 99: "99 s", 100: "2 min", 5900: "98 min", 9000: "2.5 h"}
    assert {seconds: time_text(seconds) for seconds in expected} == expected


def test_a_table_tells_its_share_rates_and_time_left(clock: Clock) -> None:
    table = TableProgress(1000, 24_000_000, clock)
    assert str(table) == "0 % (0 B of 24.0 MB, starting)"
    for _ in range(4):
        clock.now += 1.0
        table.advance(100)
    assert (table.percent, table.bytes_done, table.rows_per_s, table.bytes_per_s) == (40, 9_600_000, 100, 2_400_000)
    assert str(table) == "40 % (9.6 MB of 24.0 MB, 2.4 MB/s, 6 s left)"


def test_the_rate_is_that_of_the_last_seconds(clock: Clock) -> None:
    table = TableProgress(10_000, 10_000, clock)
    for rows in [10] * 20 + [100] * 20:  # it got faster
        clock.now += 1.0
        table.advance(rows)
    assert table.rows_per_s == 100
    clock.now += 10.0  # and slower
    assert 40 < table.rows_per_s < 60


def test_a_source_that_stops_is_seen(clock: Clock) -> None:
    table = TableProgress(1000, 24_000_000, clock)
    clock.now += 11
    assert table.seconds_left is None
    assert str(table) == "0 % (0 B of 24.0 MB, nothing moves)"


def test_a_table_whose_rows_are_all_there_is_finishing_until_its_clock_stops(clock: Clock) -> None:
    table = TableProgress(1000, 24_000_000, clock)
    clock.now += 2
    table.advance(1000)
    clock.now += 3  # RocksDB merges
    assert (table.rows_per_s, table.seconds_left, table.time_text) == (500, 0.0, "finishing")
    table.end()
    clock.now += 100
    assert (table.rows_per_s, table.time_text) == (200, "in 5.0 s")


def test_an_empty_table_divides_by_nothing(clock: Clock) -> None:
    table = TableProgress(0, 0, clock)
    assert (table.percent, table.bytes_done, table.rows_per_s, table.bytes_per_s, table.seconds_left) == (0, 0, 0, 0, None)
    table.end()
    assert table.rows_per_s == 0


def test_log_progress_tells_now_and_then(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = LogProgress(interval_s=5.0, clock=clock)
    progress.start(TAG, 1000, 24_000_000)
    for _ in range(10):
        clock.now += 1.0
        progress.advance(TAG, 100)
    progress.finish(TAG)
    assert [record.getMessage() for record in caplog.records] == [
        f"{TAG}: 1000 rows, 24.0 MB.",
        f"{TAG}: 500 of 1000 rows, 100 rows/s, 50 % (12.0 MB of 24.0 MB, 2.4 MB/s, 5 s left).",
        f"{TAG}: 1000 rows in 10.0 s, 100 rows/s, 2.4 MB/s.",
    ]


class Listener(Events):
    def fail(self, tag: str) -> None:
        self.told.append(("fail", tag))


def models(**tables: list[str]) -> Any:
    named = [model_of(name, ["nowhere"] * len(names), dict.fromkeys(names, 4)) for name, names in tables.items()]
    return hps.load_configuration(document_of(*named)).models


class Loads:
    """`LiveModels` that load as a service lets them, and the `Readiness` that shows them."""

    def __init__(self, clock: Clock, **tables: list[str]) -> None:
        self.listener = Listener()
        self.live = LiveModels(clock=clock)
        for model in models(**tables):
            self.live.expect(model)
        self.progress = Readiness(lambda: self.live)

    def start(self, name: str) -> Change:
        change = self.live.start_change(name, "deploying")
        change.listener = self.listener
        return change

    def serve(self, name: str) -> None:
        self.live.serving = {**self.live.serving, name: cast(Deployment, None)}

    def end(self, change: Change, error: Exception | None = None) -> None:
        if error is None:
            self.serve(change.model)
        else:
            self.live.record_failure(change.model, error)
        self.live.finish_change(change, error)

    def states(self) -> dict[str, tuple[str, int]]:
        return {status.name: (status.state, status.percent) for status in self.progress.models()}

    def tables(self, name: str) -> list[str]:
        (status,) = (status for status in self.progress.models() if status.name == name)
        return [table.state for table in status.tables]

    def samples(self) -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *sample.labels.values()): sample.value
            for metric in text_string_to_metric_families(expose(self.progress.families()).decode())
            for sample in metric.samples
        }


def test_models_and_tables_go_from_waiting_to_ready(clock: Clock) -> None:
    loads = Loads(clock, shop=["user", "item", "shop"], ads=["ad"])
    progress = loads.progress
    assert progress.summary() == "loading; 0 of 4 tables"
    assert loads.states() == {"shop": ("waiting", 0), "ads": ("waiting", 0)}

    shop = loads.start("shop")
    assert progress.summary() == "loading shop; 0 of 4 tables"
    shop.start("hps_et.shop.item", 1000, 24_000_000)  # user: the databases have it already
    clock.now += 4
    shop.advance("hps_et.shop.item", 400)
    assert loads.tables("shop") == ["done", "loading", "waiting"]
    assert loads.states() == {"shop": ("loading", 46), "ads": ("waiting", 0)}
    said = "loading shop.item: 40 % (9.6 MB of 24.0 MB, 2.4 MB/s, 6 s left)"
    assert progress.reason("shop") == said
    assert progress.reason("ads") == "waiting for the models before it"
    assert progress.reason("nobody") == ""
    assert progress.summary() == f"{said}; 1 of 4 tables"

    shop.advance("hps_et.shop.item", 600)
    shop.finish("hps_et.shop.item")
    assert progress.summary() == "loading shop; 2 of 4 tables"  # the last table, or the caches
    loads.end(shop)
    assert shop.seconds == 4.0
    assert loads.states()["shop"] == ("ready", 100)
    loads.end(loads.start("ads"))
    assert progress.summary() == progress.reason("shop") == ""


def test_a_table_that_is_started_twice_counts_anew_and_the_listener_is_told(clock: Clock) -> None:
    """The volatile database is filled from the persistent one after that was filled from the files."""
    loads = Loads(clock, m=["item"])
    load = loads.start("m")
    load.start(TAG, 10, 240)
    load.advance(TAG, 10)
    load.finish(TAG)
    load.start(TAG, 4, 96)
    load.advance(TAG, 1)
    assert loads.states() == {"m": ("loading", 25)}
    assert loads.samples()["hps_loaded_rows", "m", "item"] == 1
    load.advance(TAG, 3)
    load.finish(TAG)
    loads.end(load, hps.DeviceMemoryError("a cache does not fit"))  # no table failed
    assert loads.listener.told == [
        *(("start", TAG, 10, 240), ("advance", TAG, 10), ("finish", TAG)),
        *(("start", TAG, 4, 96), ("advance", TAG, 1), ("advance", TAG, 3), ("finish", TAG)),
    ]


def test_a_failed_model_says_why_and_when_it_is_tried_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    loads = Loads(clock, a=["x", "y"], b=["z"])
    loads.live.first_retry_s = 20.0
    progress = loads.progress
    load = loads.start("a")
    load.start("hps_et.a.x", 10, 240)
    load.advance("hps_et.a.x", 5)
    clock.now += 2
    loads.end(load, hps.ModelSourceError("no answer"))
    assert loads.listener.told[-1] == ("fail", "hps_et.a.x")
    clock.now += 5
    (status, _) = progress.models()
    assert (status.state, status.reason, status.retry_in_s) == ("failed", "no answer; next try in 15 s", 15.0)
    assert progress.reason("a") == "loading failed: no answer; next try in 15 s"
    assert loads.tables("a") == ["failed", "waiting"]
    loads.serve("b")
    assert progress.summary() == "1 of 2 models failed: a: no answer; next try in 15 s"
    assert loads.samples()["hps_load_failures_total", "a"] == 1
    assert loads.samples()["hps_load_seconds", "a"] == 2

    load = loads.start("a")
    assert progress.models()[0].retry_in_s is None
    assert progress.summary() == "loading a; 0 of 3 tables"
    loads.end(load)
    assert progress.summary() == ""
    assert loads.samples()["hps_load_failures_total", "a"] == 1


def test_metrics_are_there_before_anything_is_loaded_and_follow_it(clock: Clock) -> None:
    loads = Loads(clock, m=["item"])
    before = {("hps_model_ready", "m"): 0, ("hps_load_seconds", "m"): 0, ("hps_load_failures_total", "m"): 0}
    assert loads.samples() == before
    load = loads.start("m")
    load.start(TAG, 10, 240)
    load.advance(TAG, 4)
    clock.now += 3
    assert loads.samples() == before | {
        ("hps_load_rows", "m", "item"): 10,
        ("hps_loaded_rows", "m", "item"): 4,
        ("hps_load_bytes", "m", "item"): 240,
        ("hps_loaded_bytes", "m", "item"): 96,
        ("hps_load_seconds", "m"): 3,
    }
    loads.serve("m")
    assert loads.samples()["hps_model_ready", "m"] == 1
