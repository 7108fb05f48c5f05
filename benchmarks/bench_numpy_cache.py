"""The NumPy embedding cache: queries against a plain gather, modifications, hit rate of power-law traffic, and DLPack.

Limit of a query: `numpy.take` of the same vectors from known rows into the same output, over the same rotation of batches.
Limit of the hit rate: that of the most popular keys, as many as the cache holds (perfect frequency knowledge).
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch.utils.dlpack import to_dlpack

from benchmarks.harness import Report, time_calls
from hps.cache.cpu.cache import NumpyCache
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.session import CachedSession, DirectSession, Session, SessionSettings
from hps.ground.hashing import mix, scale
from hps.ground.threads.thread_pool import POOL, available_threads
from hps.statistics.metrics import Metrics
from hps.stores.hash_map.database import HashMapDatabase
from hps.tensors.array_checks import as_keys, as_output
from hps.tensors.batch import Batch
from hps.tools.profiling.workloads import power_law_keys
from hps.types import FloatArray, KeyArray, TableSpec

_ALPHA = 1.05
_ROTATION = 8


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables. One thread works, but for large lookups that are all misses."""
    POOL.limit_to(1)
    rng = np.random.default_rng(report.seed)
    sizes = [(2_000, 1_000)] if quick else [(2_000, 1_000), (1 << 20, 1_000), (1 << 20, 100_000)]
    for rows, n in sizes:
        for dim in (32,) if quick else (16, 32, 128):
            for alpha in (0.0, _ALPHA):
                _queries(report, rng, rows, n, dim, alpha)
    _many_tables(report, rng, 2_000 if quick else 50_000)
    _while_writing(report, rng, 2_000 if quick else 100_000)
    for resident in (True, False):
        _inserts(report, rng, 5_000 if quick else 1 << 20, resident)
    _misses(report, rng)
    _hit_rate(report, rng, 1 << (14 if quick else 20))
    _adoption(report)
    for dim in (32,) if quick else (32, 128):
        _shared_misses(report, rng, 1 << (18 if quick else 22), dim)


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
    asked = [Batch.of(0, keys, out) for keys in batches]
    calls = 400 if n < 10_000 else 12

    def query(i: int) -> int:
        return lookup.query(asked[i % _ROTATION])

    for i, keys in enumerate(batches):
        out.fill(np.nan)
        _check(query(i) == 0 and np.array_equal(out, _vectors(keys, dim)))
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


def _many_tables(report: Report, rng: np.random.Generator, rows: int) -> None:
    tables, n, dim = 26, 1024, 16
    cache = NumpyCache.create([TableSpec("bench", f"t{i}", dim, 0.0, n) for i in range(tables)], [2 * rows] * tables, 0)
    for table in range(tables):
        keys = rng.permutation(4 * rows)[:rows]
        cache.insert(table, keys, _vectors(keys, dim))
    lookup = cache.create_lookup()
    outs = [[np.empty((n, dim), np.float32) for _ in range(tables)] for _ in range(_ROTATION)]
    keys_of = [[rng.choice(cache.dump(table), n) for table in range(tables)] for _ in range(_ROTATION)]
    rotation = [Batch(range(tables), [n] * tables, asked, out) for asked, out in zip(keys_of, outs, strict=True)]
    for batch in rotation:
        _check(lookup.query(batch) == 0)
        _check(all(np.array_equal(out, _vectors(keys, dim)) for keys, out in zip(batch.keys, batch.outs, strict=True)))
    timing = time_calls(lambda i: lookup.query(rotation[i % _ROTATION]), 500)
    report.add({"work": "query of 26 tables", "rows": rows, "batch": tables * n, "dim": dim, "alpha": 0.0}, timing.as_dict())


def _while_writing(report: Report, rng: np.random.Generator, rows: int) -> None:
    """Queries beside a thread that updates the same table without pause."""
    n, dim = 10_000, 32
    cache, resident = _filled(rng, rows, dim)
    batches = _batches(rng, resident, n, 0.0)
    lookup, out = cache.create_lookup(), np.empty((n, dim), np.float32)

    def query(i: int) -> None:
        lookup.query(Batch.of(0, batches[i % _ROTATION], out))

    quiet = time_calls(query, 300)
    done, updated, vectors = threading.Event(), 0, _vectors(resident, dim)

    def update() -> None:
        nonlocal updated
        while not done.is_set():
            cache.update(0, resident, vectors)
            updated += resident.size

    writer = threading.Thread(target=update)
    writer.start()
    try:
        busy = time_calls(query, 300)
    finally:
        done.set()
        writer.join(timeout=60)
    query(0)
    _check(updated > 0 and np.array_equal(out, _vectors(batches[0], dim)))
    axes = {"work": "query beside updates", "rows": rows, "batch": n, "dim": dim, "alpha": 0.0}
    report.add(axes, busy.as_dict() | {"of_quiet": quiet.p50_s / busy.p50_s})


def _inserts(report: Report, rng: np.random.Generator, rows: int, resident: bool) -> None:
    n, dim = min(rows, 65_536), 32
    cache, keys = _filled(rng, rows, dim)
    batches = [rng.choice(keys, n) if resident else rng.integers(1 << 40, 1 << 60, n) for _ in range(_ROTATION)]
    vectors = [_vectors(batch, dim) for batch in batches]
    before = cache.stats(0).inserts
    timing = time_calls(lambda i: cache.insert(0, batches[i % _ROTATION], vectors[i % _ROTATION]), 24, warmup=0)
    _check(resident == (cache.stats(0).inserts == before))
    axes = {"work": "insert resident" if resident else "insert new", "rows": rows, "batch": n, "dim": dim}
    report.add(axes, timing.as_dict() | {"mkeys_per_s": n / timing.p50_s / 1e6})


def _misses(report: Report, rng: np.random.Generator) -> None:
    """What a lookup with misses adds to its query, besides the fetch and the insertion."""
    dim = 32
    for n, missing in ((1_000, 100), (1_000, 1_000), (100_000, 10_000)):
        cache, resident = _filled(rng, 200_000, dim)
        absent = rng.integers(1 << 40, 1 << 60, missing)
        keys = rng.permutation(np.concatenate([rng.choice(resident, n - missing), rng.choice(absent, missing)]))
        lookup, out = cache.create_lookup(), np.empty((n, dim), np.float32)
        _check(lookup.query(Batch.of(0, keys, out)) == missing)

        def answer(_: int) -> None:
            for missed in lookup.unique():  # noqa: B023
                missed.scatter(np.ones(missed.keys.size, np.bool_))

        (missed,) = lookup.unique()
        _check(np.array_equal(np.sort(missed.keys), np.setdiff1d(keys, resident)))
        missed.buffer()[:] = _vectors(missed.keys, dim)
        answer(0)
        _check(np.array_equal(out, _vectors(keys, dim)))
        for work, call in (("unique", lambda _: lookup.unique()), ("unique and scatter", answer)):  # noqa: B023
            report.add({"work": work, "batch": n, "missing": missing, "dim": dim}, time_calls(call, 300).as_dict())


@njit
def _lru_hits(keys, clock, tags, used):  # type: ignore[no-untyped-def]
    """Exact LRU within sets of 14."""
    hits = 0
    for key in keys:
        index, clock, victim, hit = scale(mix(key), tags.shape[0]), clock + 1, 0, False
        for way in range(tags.shape[1]):
            if used[index, way] and tags[index, way] == key:
                victim, hit = way, True
                break
            if used[index, way] < used[index, victim]:
                victim = way
        tags[index, victim], used[index, victim] = key, clock
        hits += hit
    return hits, clock


def _hit_rate(report: Report, rng: np.random.Generator, rows: int) -> None:
    batch, calls = 4096, 4 * rows // 4096
    cache = NumpyCache.create([TableSpec("bench", "item", 1, 0.0, batch)], [rows // 10], 0)
    capacity = cache.stats(0).capacity_rows
    lookup, out = cache.create_lookup(), np.empty((batch, 1), np.float32)
    tags, used, clock = np.zeros((capacity // 14, 14), np.int64), np.zeros((capacity // 14, 14), np.int64), 0
    ideal = ((capacity + 1.0) ** (1 - _ALPHA) - 1) / (rows ** (1 - _ALPHA) - 1)
    for phase in ("warm-up", "after warm-up", "after all keys changed"):
        keys = power_law_keys(rng, calls * batch, rows, _ALPHA) + (1 << 40) * (phase == "after all keys changed")
        missing = 0
        for start in range(0, keys.size, batch):
            missing += lookup.query(Batch.of(0, keys[start : start + batch], out))
            for missed in lookup.unique():
                missed.buffer()[:] = _vectors(missed.keys, 1)
                found = np.ones(missed.keys.size, np.bool_)
                missed.scatter(found)
                missed.insert(found)
            _check(np.array_equal(out, _vectors(keys[start : start + batch], 1)))
        lru, clock = _lru_hits(keys, clock, tags, used)
        hit_rate = 1 - missing / keys.size
        axes = {"work": f"hit rate {phase}", "rows": rows, "capacity": capacity, "batch": batch, "alpha": _ALPHA}
        figures = {"hit_rate": hit_rate, "of_ideal": hit_rate / ideal, "plain_lru_of_ideal": lru / keys.size / ideal}
        report.add(axes, figures)


def _adoption(report: Report) -> None:
    array, vectors = np.arange(1000), np.empty((1000, 32), np.float32)
    tensor, outputs = torch.from_numpy(array), torch.from_numpy(vectors)
    capsule = to_dlpack(tensor)
    cases: list[tuple[str, Callable[[int], Any]]] = [
        ("numpy keys", lambda _: as_keys(array)),
        ("torch keys", lambda _: as_keys(tensor)),
        ("capsule of keys", lambda _: as_keys(capsule)),
        ("numpy output", lambda _: as_output(vectors, 1000, 32)),
        ("torch output", lambda _: as_output(outputs, 1000, 32)),
        ("numpy.from_dlpack of torch, for comparison", lambda _: np.from_dlpack(tensor)),
    ]
    for name, call in cases:
        adopted = call(0)
        _check(adopted.ctypes.data in (array.ctypes.data, vectors.ctypes.data))
        report.add({"work": f"adopt {name}"}, time_calls(call, 20_000, warmup=1000).as_dict())


def _shared_misses(report: Report, rng: np.random.Generator, rows: int, dim: int) -> None:
    """Distinct keys of a hash map, none or few of them resident, through sessions, by one thread and by all."""
    table, metrics, database = TableSpec("bench", "item", dim, 0.0, 1 << 20), Metrics(), HashMapDatabase()
    chain = DatabaseChain(database, None, metrics=metrics)
    chain.open_table(table)
    database.reserve(table.tag, rows)
    for start in range(0, rows, 1 << 18):
        keys = np.arange(start, start + (1 << 18))
        database.insert(table.tag, keys, _vectors(keys, dim))
    settings, coalescer = SessionSettings(hit_rate_threshold=1.1), FetchCoalescer(chain.fetch, metrics)
    sessions: dict[str, Session] = {"none": DirectSession([table], chain, metrics)}
    for share in (0.0, 0.1):
        cache = NumpyCache.create([table], [int(share * rows)], 0)
        sessions[f"{share:.0%} of rows"] = CachedSession([table], cache, chain, coalescer, settings, metrics)
    for n in (10, 1000, 65_536, 262_144):
        out = np.empty((n, dim), np.float32)
        for name, session in sessions.items():
            seconds: dict[int, list[float]] = {1: [], available_threads(): []}
            for _ in range(5 if n > 1000 else 100):
                for threads in seconds:
                    POOL.limit_to(threads)
                    keys = rng.choice(rows, n, replace=False)
                    began = time.perf_counter()
                    session.run(Batch.of(0, keys, out))
                    seconds[threads].append(time.perf_counter() - began)
                    _check(np.array_equal(out, _vectors(keys, dim)))
            for threads, each in seconds.items():
                figures = {"M_keys_per_s": n / float(np.median(each)) / 1e6, "ratio": np.median(seconds[1]) / np.median(each)}
                report.add({"part": "misses", "n": n, "dim": dim, "cache": name, "threads": threads}, figures)
    for session in sessions.values():
        session.close()
    chain.close()
    POOL.end()


def _check(answer: bool) -> None:
    if not answer:
        raise RuntimeError("the cache gave a wrong answer; no figure is recorded")
