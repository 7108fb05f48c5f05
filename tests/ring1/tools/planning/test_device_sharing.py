"""Predicted hit rates and rates of several devices, against single caches, and where the answer is known."""

from bisect import bisect_right
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np
import pytest

from hps.cache.base import MOST_SHARERS, NEAR_SHARE
from hps.cache.cuda.geometry import bytes_on_device
from hps.cache.cuda.kernels import pairs_for
from hps.configuration.load import load_configuration
from hps.statistics.key_traces import KeyTrace, sample_hashes
from hps.tools.planning.device_sharing import ALL_TABLES, SHARINGS, forecast_sharings, predict_reads, reasons_against
from hps.tools.planning.forecast import Forecast
from hps.tools.planning.hit_rates import cache_hit_rate
from hps.tools.planning.memory import ServedVersion, planned_needs
from hps.tools.planning.read_rates import Reads, seconds_per_key
from hps.tools.planning.row_formats import needs_by_format
from hps.tools.profiling.workloads import power_law_keys
from tests.servers.running_service import document_of, model_of

ROWS, KEYS, BATCH = 40_000, 450_000, 500
CAPACITY = 2_000


def recording(keys, lookups=None, rate=1.0, table="t"):
    lookups = np.arange(keys.size) // BATCH if lookups is None else lookups
    kept = sample_hashes(keys) < np.uint64(min(int(rate * 2**64), 2**64 - 1))
    return KeyTrace("m", table, keys[kept], lookups[kept], rate, 1.0, False, keys.size)


def lookups_of(*batches):
    return recording(np.concatenate(batches), np.repeat(np.arange(len(batches)), [batch.size for batch in batches]))


@pytest.fixture(scope="module")
def keys():
    return power_law_keys(np.random.default_rng(3), KEYS, ROWS, 1.05)


@pytest.fixture(scope="module")
def trace(keys):
    return recording(keys)


def predicted(sharing, trace, devices, capacity=CAPACITY, rows=ROWS, drawn=False):
    private = capacity // 8 if sharing == "hot" else 0
    common = capacity if sharing == "replicate" else min(devices * (capacity - private), rows)
    return predict_reads(sharing, trace, common, devices, private, drawn=drawn)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_partition_is_one_larger_cache_with_its_share_of_the_hits_local(trace, devices):
    reads, hit_rate = predicted("partition", trace, devices), cache_hit_rate(trace, devices * CAPACITY)
    assert (reads.hit_rate, reads.host) == (pytest.approx(hit_rate), 1.0 - hit_rate)
    assert (reads.local, reads.neighbour) == pytest.approx((hit_rate / devices, hit_rate * (devices - 1) / devices))
    if devices == 1:
        assert predicted("replicate", trace, 1) == reads == Reads(hit_rate, 0.0, 1.0 - hit_rate)


@pytest.mark.parametrize("devices", [2, 4])
def test_sharings_are_in_order(trace, devices):
    replicate, partition, hot = (predicted(sharing, trace, devices) for sharing in SHARINGS)
    for reads in (replicate, partition, hot):
        assert reads.local + reads.neighbour + reads.host == pytest.approx(1.0)
    assert replicate.neighbour == 0.0
    assert replicate.hit_rate + 0.02 < hot.hit_rate < partition.hit_rate
    assert hot.local > partition.local + 0.1
    assert 0 < hot.neighbour < partition.neighbour
    assert hot.hit_rate == pytest.approx(cache_hit_rate(trace, devices * CAPACITY * 7 // 8))


def test_a_replica_sees_every_nth_lookup_whatever_their_numbers(trace):
    rates = []
    for device in range(3):
        own = trace.lookups % 3 == device
        part = KeyTrace("m", "t", trace.keys[own], trace.lookups[own], 1.0, 1.0, False, trace.asked // 3)
        rates.append(cache_hit_rate(part, CAPACITY))
    assert len(set(rates)) == 3
    spread = KeyTrace("m", "t", trace.keys, trace.lookups * 3, 1.0, 1.0, False, trace.asked)  # of several models
    for one in (trace, spread):
        assert predicted("replicate", one, 3).hit_rate == pytest.approx(sum(rates) / 3)


def test_drawn_keys_are_not_divided(trace):
    hit_rate = cache_hit_rate(trace, CAPACITY)
    assert predicted("replicate", trace, 4, drawn=True) == Reads(hit_rate, 0.0, 1.0 - hit_rate)
    divided, drawn = predicted("hot", trace, 4), predicted("hot", trace, 4, drawn=True)
    assert drawn.host == divided.host
    assert 0 < drawn.local - divided.local < 0.02  # keys that come up first do so once, not on each device


@pytest.mark.parametrize("sharing", SHARINGS)
def test_shares_are_found_in_samples(keys, trace, sharing):
    whole, sampled = (predicted(sharing, one, 3) for one in (trace, recording(keys, rate=0.4)))
    assert (sampled.local, sampled.neighbour) == pytest.approx((whole.local, whole.neighbour), abs=0.03)
    assert sampled.host == pytest.approx(whole.host, abs=0.02)


@pytest.mark.parametrize("devices", [2, 3])
def test_popular_rows_become_local_on_every_device(devices):
    """Of 2,000 rows half are a neighbour's; the private cache has 142 sets of 14, of which 71 would not hold them."""
    popular, twice = (lookups_of(*[np.arange(0, 64_000, step)] * 20) for step in (64, 32))
    assert predicted("hot", popular, devices, 16_000, 64_000) == Reads(1.0, 0.0, 0.0)
    assert predicted("partition", popular, devices, 16_000, 64_000).local == pytest.approx(1 / devices)
    assert devices > 2 or predicted("hot", twice, devices, 16_000, 64_000).neighbour < 0.01


@pytest.mark.parametrize("devices", [2, 3])
def test_private_caches_are_filled_from_hits_on_neighbours(devices):
    """Each device finds rows of others there once: the first device again, since its first lookup found them in no cache."""
    reads = predicted("hot", lookups_of(*[np.arange(3000)] * 2 * devices), devices, 64_000, 64_000)
    # Of the second half of the lookups, one finds rows at neighbours: the second of the first device.
    assert reads.neighbour == pytest.approx((devices - 1) / devices / devices, rel=0.05)
    assert reads.local == pytest.approx(1.0 - reads.neighbour)
    batches = [np.arange(1000) + 1000 * number for number in range(4)]
    reads = predicted("hot", lookups_of(*batches, *batches), 2, 64_000, 64_000)  # what follows the first half are all hits
    assert (reads.neighbour, reads.host) == (pytest.approx(0.5, rel=0.05), 0.0)


def test_a_sample_with_too_many_popular_keys_leaves_owners_their_hits():
    popular = np.tile(np.arange(60), 40)
    trace = KeyTrace("m", "t", popular, np.arange(popular.size) // 60, 0.1, 1.0, False, popular.size)
    assert predicted("hot", trace, 2, 1120) == Reads(0.5, 0.5, 0.0)  # ten times as many misses of private caches as keys


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_hit_rate_threshold_is_the_models_and_no_keys_and_no_cache_hit_nothing(trace, sharing):
    assert predicted(sharing, recording(np.empty(0, np.int64)), 3) == Reads(0.0, 0.0, 1.0)
    assert predicted(sharing, trace, 3, capacity=0) == Reads(0.0, 0.0, 1.0)
    hit_rate = cache_hit_rate(trace, CAPACITY, 0.5)
    assert hit_rate != cache_hit_rate(trace, CAPACITY)
    if sharing != "hot":
        assert predict_reads(sharing, trace, CAPACITY, 1, threshold=0.5).hit_rate == hit_rate


def version_of(dims, share=0.05, rows=ROWS, **entry):
    model = model_of("m", ["nowhere"] * len(dims), dims, gpucacheper=share, **entry)
    return ServedVersion(load_configuration(document_of(model)).models[0], (rows,) * len(dims))


def test_tables_are_predicted_with_their_rows_and_rates(keys, trace):
    version = version_of({"t": 32, "u": 128}, hit_rate_threshold=0.5)
    other = recording(np.random.default_rng(4).integers(0, ROWS, KEYS // 3), table="u")
    found = forecast_sharings([Forecast(version, [trace, other])], 3)
    assert [(one.table, one.sharing) for one in found] == [(table, s) for table in ("t", "u", ALL_TABLES) for s in SHARINGS]
    private_rows = int(NEAR_SHARE * 2000)
    rows = {"replicate": (2000, 0), "partition": (6000, 0), "hot": (6000 - 3 * private_rows, private_rows)}
    rates = attrgetter("hit_rate", "local", "neighbour", "host")
    for one, dim, own in zip(found[:6], [32] * 3 + [128] * 3, [trace] * 3 + [other] * 3, strict=True):
        common, private = rows[one.sharing]
        assert rates(one) == rates(predict_reads(one.sharing, own, common, 3, private, 0.5))
        assert (one.devices, one.capacity_rows) == (3, common)
        assert one.keys_per_s == pytest.approx(1 / seconds_per_key(Reads(one.local, one.neighbour, one.host), 4 * dim))
    for t, u, both in zip(found[:3], found[3:6], found[6:], strict=True):  # three quarters of the keys are of the first
        assert rates(both) == pytest.approx(0.75 * np.array(rates(t)) + 0.25 * np.array(rates(u)))
        assert both.keys_per_s == pytest.approx(1 / (0.75 / t.keys_per_s + 0.25 / u.keys_per_s))
        assert (both.size_bytes, both.capacity_rows) == (t.size_bytes + u.size_bytes, t.capacity_rows + u.capacity_rows)


def configured(sharing, share, kind="dynamic", dim=32):
    """A version of two tables on four devices, and the forecast of its configuration."""
    options = {"deployed_device_list": [0, 1, 2, 3], "device_sharing": sharing, "embedding_cache_type": kind}
    version = replace(version_of({"t": dim, "u": 4}, share, **options), rows=(30_000, 10_000))
    configuration = load_configuration(document_of(version.config.model_dump(), device="cuda"))
    return configuration, version, Forecast(version, [], 1.05, on_cuda=True)


@pytest.mark.parametrize(
    ("sharing", "kind", "share"),
    [
        *[("replicate", "dynamic", 0.5), ("partition", "dynamic", 0.1), ("partition", "dynamic", 1.0)],
        *[("partition", "static", 0.5), ("hot", "dynamic", 0.1), ("hot", "dynamic", 1.0)],
    ],
)
def test_a_configured_sharing_has_the_memory_and_the_hit_rate_of_the_plan(sharing, kind, share):
    """The buckets of all rows are on each device, and no more rows than there are."""
    configuration, version, forecast = configured(sharing, share, kind)
    needs = [need.need for need in planned_needs(configuration, [version], True) if need.device == 0]
    planned = {need.table: need.size_bytes for need in needs if need.table}
    found = {one.table: one for one in forecast_sharings([forecast], 4) if one.sharing == sharing}
    for table in forecast.tables:
        one = found[table.table]
        assert one.size_bytes == planned[one.table]
        assert (one.capacity_rows, one.hit_rate) == (table.configured.capacity_rows, table.configured.hit_rate)
        assert one.capacity_rows <= table.rows
    assert found[ALL_TABLES].size_bytes == sum(planned.values())


@pytest.mark.parametrize("sharing", SHARINGS)
def test_row_formats_hit_as_the_configured_sharing_does(sharing):
    configuration, version, forecast = configured(sharing, 0.1, dim=4096)  # rows that pages of 2 MB hardly round up
    formats = needs_by_format(configuration, [version], True, [forecast])
    found = {one.table: one.hit_rates for one in formats if one.hit_rates}
    assert found["t"]["float32"] == pytest.approx(forecast.tables[0].configured.hit_rate, abs=0.01)
    devices = 1 if sharing == "replicate" else 4
    for own, words, packed in zip(forecast.tables, (4096, 4), (1025, 2), strict=True):  # values of 8 bits, and a scale
        near = pairs_for(int(NEAR_SHARE * 0.1 * own.rows)) if sharing == "hot" else 0
        size = partial(lambda width, rows, near: bytes_on_device(pairs_for(rows), width, devices, near), near=near)
        most = bisect_right(range(own.rows + 1), size(words, own.configured.capacity_rows), key=partial(size, packed)) - 1
        assert found[own.table]["int8"] == forecast.hit_rate_at(own.table, most)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_static_cache_holds_every_row(trace, devices):
    version = version_of({"t": 32}, embedding_cache_type="static")
    replicate, partition = forecast_sharings([Forecast(version, [trace])], devices)
    assert (replicate.sharing, replicate.local, replicate.neighbour, replicate.host) == ("replicate", 1.0, 0.0, 0.0)
    assert (partition.sharing, partition.neighbour, partition.host) == ("partition", 1.0 - 1.0 / devices, 0.0)
    assert (partition.local, partition.hit_rate, partition.certain) == (1.0 / devices, 1.0, True)
    assert reasons_against(version, devices) == {"hot": "embedding_cache_type is static, whose cache holds every row"}


def test_more_devices_than_can_share_rows_cache_by_themselves(trace):
    version = version_of({"t": 4}, deployed_device_list=list(range(MOST_SHARERS + 1)), device_sharing="partition")
    forecast = Forecast(version, [trace], on_cuda=True)
    found = {sharing.sharing: sharing.capacity_rows for sharing in forecast_sharings([forecast], MOST_SHARERS)}
    partitioned = CAPACITY - int(NEAR_SHARE * CAPACITY)
    assert found == {"replicate": CAPACITY, "partition": MOST_SHARERS * CAPACITY, "hot": MOST_SHARERS * partitioned}
    assert [sharing.sharing for sharing in forecast_sharings([forecast], MOST_SHARERS + 1)] == ["replicate"]
    assert set(reasons_against(version, MOST_SHARERS + 1).values()) == {"at most 15 devices share rows"}
    assert forecast.tables[0].configured.capacity_rows == CAPACITY


@pytest.mark.parametrize(
    ("rows", "share", "refused"),
    [(1 << 31, 0.5, {"partition"}), (1 << 31, 0.4, set()), (3 << 31, 0.5, {"partition", "hot"})],
)
def test_tables_of_too_many_rows_are_not_shared(rows, share, refused):
    reasons = reasons_against(version_of({"t": 4}, share, rows=rows), 2)
    assert set(reasons) == refused
    assert all("expected at most 2,147,483,647" in reason for reason in reasons.values())


@pytest.mark.parametrize(("row_dtype", "row_bytes"), [("float32", 512), ("int8", 132)])
def test_rates_are_those_of_rows_as_they_are_stored(keys, row_dtype, row_bytes):
    version = version_of({"t": 128}, row_dtype=[row_dtype])
    [one, *_] = forecast_sharings([Forecast(version, [recording(keys[:20_000])])], 2)
    assert one.keys_per_s == pytest.approx(1 / seconds_per_key(Reads(one.local, one.neighbour, one.host), row_bytes))


def test_shares_of_too_few_keys_are_uncertain_and_all_tables_as_uncertain_as_one_of_them(keys):
    """2,000 rows hold 200 and more of the keys of a sample of a quarter, the private cache of 62 does not."""
    recordings = [recording(keys), recording(keys, rate=0.25, table="u")]
    found = forecast_sharings([Forecast(version_of({"t": 4, "u": 4}), recordings)], 2)
    assert {(one.table, one.sharing) for one in found if not one.certain} == {("u", "hot"), (ALL_TABLES, "hot")}


@pytest.mark.parametrize("options", [{"fit": True}, {"alpha": 1.05}])
def test_replicas_of_a_power_law_hit_as_one_device_does(trace, options):
    forecast = Forecast(version_of({"t": 4}), [trace] if "fit" in options else [], **options)
    assert forecast_sharings([forecast], 8)[0].hit_rate == forecast.tables[0].configured.hit_rate
