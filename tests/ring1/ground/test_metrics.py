import numpy as np
import pytest

from hps.errors import DatabaseError, UnknownVersionError
from hps.statistics.metrics import TIERS, LookupTimes, Metrics
from hps.statistics.prometheus import expose
from hps.statistics.snapshot import Latency
from hps.statistics.times import Times


def test_counters_of_a_table_are_shown_under_their_names_its_model_and_its_tiers():
    metrics = Metrics()
    counters = metrics.table("ranker", "item")
    counters.hits[:], counters.misses[:] = [1, 2, 3], [4, 5, 6]
    counters.keys, counters.defaults, counters.deferred, counters.linked = 1, 2, 3, 4
    metrics.table("retrieval", "item").keys = 7

    def shown(name, model, **labels):
        return metrics.registry.get_sample_value(f"hps_{name}_total", {"model": model, "table": "item", **labels})

    assert [shown("hits", "ranker", tier=tier) for tier in TIERS] == [1, 2, 3]
    assert [shown("misses", "ranker", tier=tier) for tier in TIERS] == [4, 5, 6]
    assert [shown(f"{name}_keys", "ranker") for name in ("lookup", "default", "deferred", "linked")] == [1, 2, 3, 4]
    assert shown("lookup_keys", "retrieval") == 7


def test_a_thread_that_outlives_its_model_adds_no_series():
    metrics = Metrics()
    for model in ("a", "ab", "b"):
        metrics.models.begin(model)

    def count(model):
        metrics.table(model, "t").keys += 1
        metrics.device(model, 0).lookups += 1
        metrics.lookup_times(model).total.add(1)
        metrics.fetch_times(model, "volatile_db").add(1)
        metrics.observe_visible(model, "t", np.ones(1), np.ones(1, np.int64))
        metrics.promoted.labels(model, "t").inc()
        metrics.tier_errors.labels(model, "volatile_db", "read").inc()
        metrics.table_quarantined.labels(f"hps_et.{model}@2.t").set(1)

    def text():
        return expose(metrics.families()).decode()

    empty = text()
    kept = metrics.table("a", "t")
    for model in ("a", "ab", "b"):
        count(model)
    assert all(text().count(f'model="{model}"') > 5 for model in ("a", "ab", "b"))
    metrics.models.end("a")
    count("a")  # late
    kept.keys += 1
    assert 'model="a"' not in text()
    assert "hps_et.a@2.t" not in text()
    assert "hps_et.ab@2.t" in text()
    metrics.models.begin("a")
    count("a")
    assert 'hps_lookup_keys_total{model="a",table="t"} 1' in text()
    for model in ("a", "ab", "b"):
        metrics.models.end(model)
    assert text() == empty


def test_a_duration_on_a_bound_counts_below_it_added_alone_or_with_others():
    bounds_ns = [1_000, 25_000, 5_000_000_000]
    durations = [ns + more for ns in bounds_ns for more in (-1, 0, 1)]
    alone, together = Times(), LookupTimes()
    for ns in durations:
        alone.add(ns)
        together.recent.extend([ns, 0, 0, 0, ns])
    latency, stages = together.latencies()
    assert alone.latency() == latency == stages["finish"]
    below = dict(latency.buckets)
    assert [below[ns / 1e9] for ns in bounds_ns] == [2, 5, 8]
    assert latency.count == 9
    assert together.latencies()[0] == latency  # nothing counts twice
    together.recent.extend([1, 1, 1, 1, 1])
    assert together.latencies()[0].count == 10


def test_hit_rates_are_those_of_all_tables_of_one_model():
    metrics = Metrics()
    for model, table, hits, misses in (
        ("a", "t", 1, 9),
        ("b", "t", 3, 1),
        ("b", "u", 0, 4),
        ("b", "v", 3, 1),
        ("c", "t", 7, 0),
    ):
        counters = metrics.table(model, table)
        counters.hits[0], counters.misses[0] = hits, misses
    assert [metrics.hit_rates(model).get("embedding_cache") for model in "abcd"] == [0.1, 0.5, 1.0, None]


def test_queues_of_the_same_work_are_added_up_while_they_live():
    class Queue(list):
        def waiting(self):
            return sum(self)

    metrics, queues = Metrics(), [Queue([1]), Queue([20]), Queue([300]), Queue()]
    for queue in queues:
        metrics.show_queue("insertion" if queue else "promotion", queue.waiting)
    assert metrics.queues() == {"insertion": 321, "promotion": 0}
    del queue, queues[1]
    assert metrics.queues() == {"insertion": 301, "promotion": 0}


def test_changes_are_counted_by_outcome_and_those_of_unknown_versions_not_at_all():
    metrics = Metrics()

    def change(error=None):
        with metrics.changing("deploy", done="m", failed=""):
            if error:
                raise error

    for _ in range(3):
        change()
    with pytest.raises(DatabaseError):
        change(DatabaseError("down"))
    with pytest.raises(UnknownVersionError):
        change(UnknownVersionError("version 9"))
    lines = [line for line in expose(metrics.families()).decode().splitlines() if line.startswith("hps_model_changes_total")]
    expected = [("", "failed", 1.0), ("m", "done", 3.0), ("m", "failed", 0.0)]
    start = 'hps_model_changes_total{change="deploy",model='
    assert sorted(lines) == [f'{start}"{model}",outcome="{outcome}"}} {count}' for model, outcome, count in expected]


def test_rows_from_a_clock_that_is_ahead_were_visible_at_once():
    metrics = Metrics()
    metrics.observe_visible("m", "t", np.array([-3600.0, 0.001, 0.5, 1e6]), np.array([1, 20, 300, 4000]))
    values = {
        sample.labels["le"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "hps_update_visible_seconds_bucket"
    }
    assert [values[bound] for bound in ("0.001", "0.2", "0.5", "3600", "+Inf")] == [21, 21, 321, 321, 4321]
    total = metrics.registry.get_sample_value("hps_update_visible_seconds_sum", {"model": "m", "table": "t"})
    assert total == pytest.approx(0.02 + 150 + 4e9)


def test_latencies_add_up_and_their_quantiles_lie_on_bounds_and_between():
    one = Latency(4, 4.0, ((1.0, 2), (2.0, 4)))
    assert Latency().plus(one) == one.plus(Latency()) == one
    three = one.plus(one).plus(one)
    assert (three.count, three.total_s, three.buckets) == (12, 12.0, ((1.0, 6), (2.0, 12)))
    assert three.since(one) == one.plus(one)
    assert [one.quantile_s(share) for share in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1.0, 1.5, 2.0]
    assert Latency(4, 9.0, ((1.0, 1), (2.0, 1))).quantile_s(0.99) == 2.0  # beyond the last bound
    assert Latency(4, 9.0, ((1.0, 2), (2.0, 2), (3.0, 4))).quantile_s(0.5) == 1.0  # nothing lies between 1 and 2
