import numpy as np

from hps.statistics.metrics import TIERS, Metrics
from hps.statistics.prometheus import expose


def test_counters_of_a_table_are_shown_under_its_model_and_its_tiers():
    metrics = Metrics()
    counters = metrics.table("ranker", "item")
    counters.hits[:], counters.misses[:] = [1, 2, 3], [4, 5, 6]
    metrics.table("retrieval", "item").keys = 7

    def shown(name, model, **labels):
        return metrics.registry.get_sample_value(f"hps_{name}_total", {"model": model, "table": "item", **labels})

    assert [shown("hits", "ranker", tier=tier) for tier in TIERS] == [1, 2, 3]
    assert [shown("misses", "ranker", tier=tier) for tier in TIERS] == [4, 5, 6]
    assert [shown("lookup_keys", model) for model in ("ranker", "retrieval")] == [0, 7]


def test_a_thread_that_outlives_its_model_adds_no_series():
    metrics = Metrics()
    for model in ("a", "ab", "b"):
        metrics.models.begin(model)

    def count(model):
        metrics.table(model, "t").keys += 1
        metrics.device(model, 0).lookups += 1
        metrics.lookup_times(model).whole.add(1)
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
