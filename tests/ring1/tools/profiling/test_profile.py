"""The figures of a profile: what servers counted, and bounds."""

import json
import re
from dataclasses import asdict

import pytest

from hps.errors import InvalidInputError
from hps.statistics.snapshot import Latency, ModelStatistics, ServerStatistics, TableStatistics, TierStatistics
from hps.tools.cli.pictures import draw_profile
from hps.tools.profiling.counters import Counters, TierKeys
from hps.tools.profiling.http_load import LoadResult
from hps.tools.profiling.profile import Bounds, Profile, Row


def row(milliseconds=(1, 2, 3), tiers=None, failures=(), rate=None):
    result = LoadResult(seconds=2.0, in_time=len(milliseconds))
    for millisecond in milliseconds:
        result.times.add(millisecond * 1_000_000)
    result.failures.update(failures)
    return Row.of(result, batch=10, tables=2, concurrency=1, rate=rate, stages={}, tiers=tiers or {}, default_keys=0)


HALF_HIT = {"tiers": {"embedding_cache": TierKeys(0.5, 9)}}


@pytest.mark.parametrize(
    ("bounds", "of", "missed"),
    [
        *[(Bounds(), {}, ""), (Bounds(p50_ms=2.01, p99_ms=3.01, min_keys_per_s=30, min_hit_rate=0.5), HALF_HIT, "")],
        *[(Bounds(p50_ms=1.9), {}, "p50 is 2.0"), (Bounds(p99_ms=2.9), {}, "p99 is 3.0")],
        (Bounds(p99_ms=2.9), {"milliseconds": ()}, "p99 is 0.000"),
        *[(Bounds(min_keys_per_s=31), {}, "30 keys/s"), (Bounds(min_hit_rate=0.6), HALF_HIT, "hit rate is 0.5")],
        (Bounds(min_hit_rate=0.6), {}, "no hit rate"),
        (Bounds(), {"failures": ["status 503"]}, "25.00% failed .1 x status 503."),
        (Bounds(max_failure_share=0.25), {"failures": ["status 503"]}, ""),
    ],
)
def test_bounds_of_throughput_and_latency(bounds, of, missed):
    profile, one = Profile("ps.json", {}), row()
    assert (one.lookups, one.lookups_per_s, one.keys_per_s) == (3, 1.5, 30)
    times = one.latency
    assert (times.mean_ms, times.p50_ms, times.p99_ms, times.max_ms) == pytest.approx((2, 2, 3, 3), rel=1e-3)
    profile.add(row(**of), bounds)
    assert len(profile.missed) == bool(missed)
    if missed:
        assert re.search(missed, profile.missed[0])
    assert json.loads(json.dumps(asdict(profile)))["rows"][0]["batch"] == 10


def test_counters_are_those_of_the_model_its_tables_and_the_time_between():
    def counters(done):
        """After so many rounds of ten lookups of `m`, each 0.3 s, of which its stage took 0.15 s."""
        whole = Latency(10 * done, 3.0 * done, ((0.1, 0), (0.2, 0), (0.4, 10 * done)))
        stage = Latency(10 * done, 1.5 * done, ((0.1, 0), (0.2, 10 * done), (0.4, 10 * done)))
        tier = TierStatistics("embedding_cache", "cpu", "cpu", 0, 0, 0, 0, 30 * done, 10 * done, 0, 0, True, 0.0)
        counted = (4, 9, 40 * done, done, 0, 0, "copy", (tier,))
        tables = tuple(TableStatistics(name, *counted) for name in ("item", "user", "other"))
        counted = ("1", (("1", "serving"),), 0.0, whole, {"query": stage}, 4, 1, tables)
        server = ServerStatistics("0", 0.0, 0, tuple(ModelStatistics(name, *counted) for name in "nm"), (), {}, {})
        return Counters({"server": asdict(server)}, "m", ["item", "user"])

    after, before = counters(3), counters(1)
    assert after.tiers_since(before) == {"embedding_cache": TierKeys(0.75, 160)}
    assert after.defaults_since(before) == 4
    stages = after.stages_since(before)
    assert list(stages) == ["lookup", "query"]
    query = stages["query"]
    assert (query.count, query.share) == (20, pytest.approx(0.5))
    assert (query.mean_us, query.p50_us, query.p99_us) == pytest.approx((150_000, 150_000, 199_000))  # between its bounds


def test_requests_of_a_model_and_of_one_version_are_counted_together():
    def counters(done):
        latency = asdict(Latency(10 * done, 1.0 * done, ((0.1, 0), (0.2, 10 * done))))
        names = ("{model}/infer", "{model}/versions/{version}/infer", "{model}/ready")
        requests = [{"route": f"/v2/models/{name}", "latency": latency} for name in names]
        return Counters({"service": {"requests": requests}}, "m", [])

    stages = counters(3).stages_since(counters(1))
    assert [(name, times.count, times.share) for name, times in stages.items()] == [("http", 40, 1.0)]
    assert stages["http"].mean_us == pytest.approx(100_000)
    none = Counters({}, "m", ["item"])  # of a server without statistics
    assert (none.tiers_since(none), none.defaults_since(none), none.stages_since(none)) == ({}, 0, {})


@pytest.mark.parametrize("rates", [(None,), (100.0, 200.0)])
def test_pictures(tmp_path, rates):
    profile = Profile("ps.json", {"model": "m", "workload": "uniform"})
    for rate in rates:
        profile.add(row(rate=rate), Bounds())
    draw_profile(tmp_path / "a.svg", profile)
    assert ("at a fixed rate" if rates[0] else "share of the lookups") in (tmp_path / "a.svg").read_text()  # in a comment
    with pytest.raises(InvalidInputError, match="drawing"):
        draw_profile(tmp_path / "missing" / "a.svg", profile)
