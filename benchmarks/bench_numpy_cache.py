"""The NumPy embedding cache: queries against a plain gather, modifications, hit rate of power-law traffic.

Limit of a query: `numpy.take` of the same vectors from known rows into the same output, over the same rotation of batches.
Limit of the hit rate: that of the most popular keys, as many as the cache holds (perfect frequency knowledge).
"""

import numpy as np

from benchmarks.harness import ALPHA, Report, ideal_hit_rate, require, time_calls
from hps.cache.cpu.cache import NumpyCache
from hps.ground.threads.thread_pool import POOL
from hps.tensors.batch import Batch
from hps.tools.profiling.workloads import power_law_keys
from hps.types import FloatArray, KeyArray, TableSpec

_ROTATION = 8


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables. One thread works."""
    POOL.limit_to(1)
    rng = np.random.default_rng(report.seed)
    sizes = [(2_000, 1_000)] if quick else [(2_000, 1_000), (1 << 20, 1_000), (1 << 20, 100_000)]
    for rows, n in sizes:
        for dim in (32,) if quick else (16, 32, 128):
            for alpha in (0.0, ALPHA):
                _queries(report, rng, rows, n, dim, alpha)
    for resident in (True, False):
        _inserts(report, rng, 5_000 if quick else 1 << 20, resident)
    _hit_rate(report, rng, 1 << (14 if quick else 20))


def _vectors(keys: KeyArray, dim: int) -> FloatArray:
    return (keys[:, None] * 31 + np.arange(dim)).astype(np.float32)


def _filled(rng: np.random.Generator, rows: int, dim: int) -> tuple[NumpyCache, KeyArray]:
    """A cache twice as large as its content, and the resident keys."""
    cache = NumpyCache.create([TableSpec("bench", "item", dim, 0.0, 1 << 20)], [2 * rows], 0)
    keys = rng.permutation(4 * rows)[:rows]
    cache.insert(0, keys, _vectors(keys, dim))
    return cache, cache.dump(0)


def _batches(rng: np.random.Generator, resident: KeyArray, n: int, alpha: float) -> list[KeyArray]:
    shuffled = rng.permutation(resident)
    return [shuffled[power_law_keys(rng, n, resident.size, alpha)] for _ in range(_ROTATION)]


def _queries(report: Report, rng: np.random.Generator, rows: int, n: int, dim: int, alpha: float) -> None:
    cache, resident = _filled(rng, rows, dim)
    batches = _batches(rng, resident, n, alpha)
    lookup, out = cache.create_lookup(), np.empty((n, dim), np.float32)
    requested = [Batch.of(0, keys, out) for keys in batches]
    calls = 400 if n < 10_000 else 12

    def query(i: int) -> int:
        return lookup.query(requested[i % _ROTATION])

    for i, keys in enumerate(batches):
        out.fill(np.nan)
        require(query(i) == 0 and np.array_equal(out, _vectors(keys, dim)))
    rank = np.argsort(resident)
    places = [rank[np.searchsorted(resident, keys, sorter=rank)] for keys in batches]
    known = _vectors(resident, dim)
    rounds = [  # taken in turns, so that both meet the same neighbours
        (time_calls(query, calls), time_calls(lambda i: np.take(known, places[i % _ROTATION], 0, out, "clip"), calls))
        for _ in range(5)
    ]
    timing = min((queried for queried, _ in rounds), key=lambda queried: queried.p50_s)
    ratio = float(np.median([gathered.p50_s / queried.p50_s for queried, gathered in rounds]))
    axes = {"work": "query", "rows": rows, "batch": n, "dim": dim, "alpha": alpha}
    report.add(axes, timing.as_dict() | {"mkeys_per_s": n / timing.p50_s / 1e6, "of_gather": ratio})


def _inserts(report: Report, rng: np.random.Generator, rows: int, resident: bool) -> None:
    n, dim = min(rows, 65_536), 32
    cache, keys = _filled(rng, rows, dim)
    batches = [rng.choice(keys, n) if resident else rng.integers(1 << 40, 1 << 60, n) for _ in range(_ROTATION)]
    vectors = [_vectors(batch, dim) for batch in batches]
    before = cache.stats(0).inserts
    timing = time_calls(lambda i: cache.insert(0, batches[i % _ROTATION], vectors[i % _ROTATION]), 24, warmup=0)
    require(resident == (cache.stats(0).inserts == before))
    axes = {"work": "insert resident" if resident else "insert new", "rows": rows, "batch": n, "dim": dim}
    report.add(axes, timing.as_dict() | {"mkeys_per_s": n / timing.p50_s / 1e6})


def _hit_rate(report: Report, rng: np.random.Generator, rows: int) -> None:
    batch, calls = 4096, 4 * rows // 4096
    cache = NumpyCache.create([TableSpec("bench", "item", 1, 0.0, batch)], [rows // 10], 0)
    capacity = cache.stats(0).capacity_rows
    lookup, out = cache.create_lookup(), np.empty((batch, 1), np.float32)
    ideal = ideal_hit_rate(capacity, rows)
    for phase in ("warm-up", "after warm-up", "after all keys changed"):
        keys = power_law_keys(rng, calls * batch, rows, ALPHA) + (1 << 40) * (phase == "after all keys changed")
        missing = 0
        for start in range(0, keys.size, batch):
            missing += lookup.query(Batch.of(0, keys[start : start + batch], out))
            for missed in lookup.unique():
                missed.buffer()[:] = _vectors(missed.keys, 1)
                found = np.ones(missed.keys.size, np.bool_)
                missed.scatter(found)
                missed.insert(found)
            require(np.array_equal(out, _vectors(keys[start : start + batch], 1)))
        hit_rate = 1 - missing / keys.size
        axes = {"work": f"hit rate {phase}", "rows": rows, "capacity": capacity, "batch": batch, "alpha": ALPHA}
        report.add(axes, {"hit_rate": hit_rate, "of_ideal": hit_rate / ideal})
