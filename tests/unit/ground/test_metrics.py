from hps.statistics.metrics import TIERS, Metrics


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
