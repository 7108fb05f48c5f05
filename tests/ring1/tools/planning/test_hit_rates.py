"""Predicted hit rates, against the caches themselves, and against what is known of ideal ones."""

import math
from collections import OrderedDict

import numpy as np
import pytest

from hps.configuration.load import load_configuration
from hps.models.writer import write_sparse_model
from hps.parameter_server import HPS
from hps.statistics.key_traces import KeyTrace, sample_hashes
from hps.tools.cli.tables.sample import sample_chunks
from hps.tools.planning.forecast import Forecast, _least
from hps.tools.planning.hit_rates import cache_hit_rate, ideal_hit_rates, predict
from hps.tools.planning.memory import ServedVersion
from hps.tools.planning.power_law import fitted_alpha, power_law_trace
from hps.tools.profiling.workloads import power_law_keys, power_law_ranks
from hps.types import TableSpec
from tests.servers.running_service import document_of, model_of

ROWS, KEYS, BATCH = 20_000, 200_000, 1000
SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
TABLE = TableSpec("m", "t", 4, 0.0, BATCH)


def asked_keys(name, keys=KEYS, rows=ROWS):
    rng = np.random.default_rng(3)
    if name != "shifting":
        return power_law_keys(rng, keys, rows, float(name))
    shifts = np.arange(keys) // (keys // 40) * (rows // 400)  # what was most popular is forgotten, and others come up
    return rng.permutation(rows)[(power_law_ranks(rng, keys, rows, 1.05) + shifts) % rows]


def sampled(keys, rate):
    kept = sample_hashes(keys) < np.uint64(min(int(rate * 2**64), 2**64 - 1))
    return KeyTrace("m", "t", keys[kept], (np.arange(keys.size) // BATCH)[kept], rate, 1.0, False, keys.size)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "t"
    write_sparse_model(directory, sample_chunks(ROWS, 4, 0))
    return directory


def measured_hit_rate(model, keys, share, threshold):
    entry = model_of("m", [model], {"t": 4}, max_batch_size=BATCH, gpucacheper=share, hit_rate_threshold=threshold)
    with HPS(document_of(entry)) as server:
        counters, before = server.metrics.table("m", "t"), 0
        for start in range(0, keys.size, BATCH):
            if start == keys.size // 2:
                before = counters.hits[0]
            server.lookup(keys[start : start + BATCH], "m", "t")
            server.model("m").session(None).drain(60)  # else the hit rate is that of a fast or a slow machine
        return (counters.hits[0] - before) / (keys.size / 2)


@pytest.mark.parametrize(("name", "threshold"), [("1.2", 0.9), ("shifting", 1.1)])
def test_predicted_hit_rates_are_measured(model, name, threshold):
    """`nightly/tools/planning` does it with a sample of a larger table, as users do."""
    keys, share = asked_keys(name), 0.1
    [one] = predict(sampled(keys, 0.5), [math.ceil(share * ROWS)], threshold)
    assert one.hit_rate == pytest.approx(measured_hit_rate(model, keys, share, threshold), abs=0.02)


@pytest.mark.parametrize("share", [0.003, 0.3])
def test_a_whole_recording_is_replayed_as_it_was(model, share):
    keys = asked_keys("shifting")
    hit_rate = cache_hit_rate(sampled(keys, 1.0), math.ceil(share * ROWS), 1.1)
    assert hit_rate == pytest.approx(measured_hit_rate(model, keys, share, 1.1), abs=0.0005)


@pytest.mark.parametrize("name", ["0.99", "1.2"])
def test_power_laws_are_predicted_without_a_recording(model, name):
    law = power_law_trace(TABLE, ROWS, float(name), BATCH)
    whole = sampled(asked_keys(name), 1.0)
    for share in SHARES:
        rows = math.ceil(share * ROWS)
        assert cache_hit_rate(law, rows) == pytest.approx(cache_hit_rate(whole, rows), abs=0.02), share


@pytest.mark.parametrize("alpha", ["0.99", "1.2"])
def test_exponents_are_found_in_samples(alpha):
    keys = asked_keys(alpha, 1_500_000, 200_000)
    assert fitted_alpha(sampled(keys, 0.1)) == pytest.approx(float(alpha), abs=0.1)
    assert fitted_alpha(sampled(keys, 1.0)) == pytest.approx(float(alpha), abs=0.03)


def test_ideal_hit_rates_are_those_of_lru():
    keys, rows = power_law_keys(np.random.default_rng(5), 20_000, 3000, 0.9), [1, 30, 500, 3000]
    for most, predicted in zip(rows, ideal_hit_rates(sampled(keys, 1.0), rows), strict=True):
        cache, hits = OrderedDict(), 0
        for place, key in enumerate(keys.tolist()):
            hits += key in cache and place >= keys.size // 2
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > most:
                cache.popitem(last=False)
        assert predicted == pytest.approx(hits / (keys.size / 2), abs=1e-9)


def test_ideal_hit_rates_are_found_in_samples_and_nothing_hits_nothing():
    keys, rows = asked_keys("0.99", 1_000_000, 200_000), [math.ceil(share * 200_000) for share in SHARES]
    np.testing.assert_allclose(ideal_hit_rates(sampled(keys, 0.1), rows), ideal_hit_rates(sampled(keys, 1.0), rows), atol=0.04)
    nothing = sampled(np.empty(0, np.int64), 0.5)
    assert [cache_hit_rate(nothing, 100), *ideal_hit_rates(nothing, [100])] == [0.0, 0.0]
    assert cache_hit_rate(sampled(np.arange(100), 1.0), 0) == 0.0


def recording(table, keys, seconds=1.0, asked=None, model="m"):
    return KeyTrace(model, table, np.arange(keys), np.arange(keys), 1.0, seconds, False, keys if asked is None else asked)


def version_of(tables, per_sample):
    entry = model_of("m", ["nowhere"] * len(tables), dict.fromkeys(tables, 4), gpucacheper=0.1)
    entry["maxnum_catfeature_query_per_table_per_sample"] = per_sample
    return ServedVersion(load_configuration(document_of(entry)).models[0], (1000,) * len(tables))


def test_of_several_recordings_of_a_table_the_longest_is_used():
    recordings = [recording("t", 300, 3.0), recording("t", 900, 4.5), recording("t", 500), recording("t", 5000, model="other")]
    for order in ([0, 1, 2, 3], [1, 2, 0, 3], [3, 2, 0, 1]):
        [table] = Forecast(version_of("t", [1]), [recordings[place] for place in order]).tables
        assert (table.recorded, table.keys_per_s) == (True, 200)


def test_tables_count_by_their_recorded_rates_only_if_all_were_recorded(monkeypatch):
    version, rates = version_of("abc", [1, 2, 1]), {"a": 0.0, "b": 1.0, "c": 0.5}
    monkeypatch.setattr("hps.tools.planning.forecast.cache_hit_rate", lambda trace, rows, threshold: rates[trace.table])
    some = [recording("a", 100), recording("b", 100, asked=300)]
    assert Forecast(version, some, 1.1).hit_rate(0.1) == (2 * 1.0 + 1 * 0.5) / 4
    assert Forecast(version, some).hit_rate(0.1) == 300 / 400  # the third is left out
    assert Forecast(version, [*some, recording("c", 100, asked=600)], 1.1).hit_rate(0.1) == (300 + 600 * 0.5) / 1000


@pytest.mark.parametrize("goal", [0.001, 0.123456, 0.5, 0.9999, 1.0])
def test_the_share_for_a_goal_reaches_it_and_is_hardly_larger(goal):
    share = _least(lambda share: share, goal)
    assert goal <= share <= min(1.0, 1.03 * goal + 2e-4)
    assert _least(lambda share: 0.999 * share * goal, goal) is None
