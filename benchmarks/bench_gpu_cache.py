"""The kernels of the CuPy embedding cache on a GPU, beside a plain gather and torch's: queries and insertions.

Limit of a query: a plain kernel that copies the same vectors from known slots (`plain_gather`), over the same rotation of
batches. `back to back` is the time of one launch within a CUDA graph of many, each with other keys; `one call` is that of a
graph of one launch, from its launch until the host knows that it is done. Scores are written and rows are checked, as always.
"""

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch
from cupy_backends.cuda.api import runtime

from benchmarks.gpu import PLAIN, TUNED, back_to_back, one_call, plain_gather, slots_of_resident_keys, vectors_of
from benchmarks.harness import ALPHA, Report, require
from hps.cache.cuda.cache import CupyCache
from hps.cache.cuda.kernels import SLOTS
from hps.tensors.batch import Batch
from hps.tools.profiling.workloads import power_law_ranks
from hps.types import KeyArray, TableSpec


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables."""
    properties = runtime.getDeviceProperties(0)
    report.about |= {
        "gpu": properties["name"].decode(),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "l2_bytes": properties["l2CacheSize"],
    }
    rng = np.random.default_rng(report.seed)
    rows = 1 << (17 if quick else 23)
    for dim in (32, 128):
        _kernels(report, rng, rows, dim, quick)
        for static in (True, False):
            _whole_tables(report, np.random.default_rng(report.seed), (1 << 14) if quick else 6_000_000, dim, static)


def _whole_tables(report: Report, rng: np.random.Generator, rows: int, dim: int, static: bool) -> None:
    """Queries of a table all of whose rows are resident, of both kinds; the dynamic cache has 2.8 slots a row."""
    capacity = rows if static else 2 * SLOTS * (rows // 5)
    cache = CupyCache.create([TableSpec("bench", "item", dim, 0.0, 1 << 20)], [capacity], 0, static=static)
    ids = rng.permutation(2 * rows)[:rows].astype(np.int64)
    for part in np.array_split(ids, 16):
        keys = cupy.asarray(part)
        cache.insert(0, keys, vectors_of(keys, dim))
    cache.mark_complete(complete=static)
    require(cache.check_integrity() == [] and cache.stats(0).unplaced == 0)
    resident, slots = slots_of_resident_keys(cache, 0)
    by_key = np.argsort(resident)
    known = ids, slots[by_key[np.minimum(np.searchsorted(resident[by_key], ids), resident.size - 1)]]
    if not static:  # but for the few that were evicted
        stays = resident[by_key[np.minimum(np.searchsorted(resident[by_key], ids), resident.size - 1)]] == ids
        known = known[0][stays], known[1][stays]
    for n, alpha in (
        [(4096, 0.0)] if rows < 1 << 20 else [(n, alpha) for n in (1 << 13, 1 << 16, 1 << 20) for alpha in (0.0, ALPHA)]
    ):
        _queries(report, rng, cache, known, n, alpha, "query of a whole table")
    cache.close()


def _kernels(report: Report, rng: np.random.Generator, rows: int, dim: int, quick: bool) -> None:
    """Queries of resident keys and insertions; 6.4 M of 2^23 rows are inserted, so a few are evicted."""
    cache = CupyCache.create([TableSpec("bench", "item", dim, 0.0, 1 << 20)], [rows], 0)
    ids = rng.permutation(2 * rows)[: rows * 6_400_000 >> 23].astype(np.int64)
    for part in np.array_split(ids, 16):
        keys = cupy.asarray(part)
        cache.insert(0, keys, vectors_of(keys, dim))
    resident, slots = slots_of_resident_keys(cache, 0)
    order = rng.permutation(resident.size)
    resident, slots = resident[order], slots[order]
    cases = [(1 << 20, 0.0), (1 << 20, ALPHA), *((1 << power, 0.0) for power in range(10, 20))]
    for n, alpha in [(4096, 0.0), (4096, ALPHA)] if quick else cases:
        _queries(report, rng, cache, (resident, slots), n, alpha)
    for n in (4096,) if quick else (1 << 20, 1 << 16):
        _inserts(report, rng, cache, n)
    cache.close()


def _queries(
    report: Report,
    rng: np.random.Generator,
    cache: CupyCache,
    known: tuple[KeyArray, np.ndarray],
    n: int,
    alpha: float,
    work: str = "query",
) -> None:
    resident, slots = known
    dim, table = cache.tables[0].dim, cache.memory.open[0]  # type: ignore[index]
    batches = max(8, min(256, (1 << 24) // n))
    picks = [power_law_ranks(rng, n, resident.size, alpha) for _ in range(batches)]
    keys, places = [cupy.asarray(resident[pick]) for pick in picks], [cupy.asarray(slots[pick]) for pick in picks]
    out = cupy.empty((n, dim), cupy.float32)
    lookup = cache.create_lookup()

    def query(batch: Any) -> Callable[[], None]:
        def launch() -> None:
            lookup.start(Batch.of(0, batch, out), captured=True)
            lookup.launch_query()

        return launch

    def gather(batch: Any, variant: tuple[int, str]) -> Callable[[], None]:
        return plain_gather(variant, batch, table.rows, out)

    for batch in keys[:4]:
        out.fill(cupy.nan)
        require(lookup.query(Batch.of(0, batch, out)) == 0 and bool((out == vectors_of(batch, dim)).all()))
    out.fill(cupy.nan)
    gather(places[0], PLAIN)()
    require(bool((out == vectors_of(keys[0], dim)).all()))

    ours = back_to_back([query(batch) for batch in keys]), one_call(query(keys[0]))
    plain = back_to_back([gather(batch, PLAIN) for batch in places]), one_call(gather(places[0], PLAIN))
    tuned = back_to_back([gather(batch, TUNED) for batch in places])
    stats = cache.stats(0)
    figures = {
        "bytes_of_rows": stats.size_bytes / (4 * dim * stats.resident_rows),
        "mkeys_per_s": n / ours[0] / 1e6,
        "gather_mkeys_per_s": n / plain[0] / 1e6,
        "of_gather": plain[0] / ours[0],
        "of_tuned_gather": tuned / ours[0],
        "one_call_s": ours[1],
        "gather_one_call_s": plain[1],
        "one_call_of_gather": plain[1] / ours[1],
        "torch_index_select_mkeys_per_s": n / _index_select(table.rows, places, out) / 1e6,
    }
    axes = {"work": work, "kind": "static" if cache.static else "dynamic", "dim": dim, "batch": n, "alpha": alpha}
    report.add({**axes, "resident": stats.resident_rows}, figures)


def _index_select(rows: int, places: list[Any], out: Any) -> float:
    """Seconds of torch's gather of the same rows, launched one after the other."""
    size = int(max(int(place.max()) for place in places)) + 1
    memory = cupy.cuda.UnownedMemory(rows, size * out.shape[1] * 4, None, 0)
    table = torch.from_dlpack(cupy.ndarray((size, out.shape[1]), np.float32, cupy.cuda.MemoryPointer(memory, 0)))
    indices = [torch.from_dlpack(place.astype(np.int64)) for place in places]
    result = torch.from_dlpack(out)
    seconds = []
    for _ in range(8):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for index in indices:
            torch.index_select(table, 0, index, out=result)
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3 / len(indices))
    return float(np.median(seconds))


def _inserts(report: Report, rng: np.random.Generator, cache: CupyCache, n: int) -> None:
    dim, table = cache.tables[0].dim, cache.memory.open[0]  # type: ignore[index]
    lookup, resident = cache.create_lookup(), cache.dump(0)

    for kind in ("resident", "new"):
        choice = [rng.choice(resident, n, replace=False) for _ in range(4)]
        keys = [cupy.asarray(part if kind == "resident" else part + (1 << 40) * (1 + i)) for i, part in enumerate(choice)]
        vectors = [vectors_of(part, dim) for part in keys]
        before = cache.stats(0)
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        stream = cupy.cuda.get_current_stream().ptr
        start.record()
        for part, rows in zip(keys, vectors, strict=True):
            lookup.changes.launch_insert(table, part.data.ptr, rows.data.ptr, 0, n, 3, lookup.insert_arguments, stream)
        stop.record()
        stop.synchronize()
        seconds = cupy.cuda.get_elapsed_time(start, stop) / 1e3 / len(keys)
        if kind == "resident":
            out = cupy.empty((n, dim), cupy.float32)
            require(lookup.query(Batch.of(0, keys[-1], out)) == 0 and bool((out == vectors[-1]).all()))
        after = cache.stats(0)
        require((after.inserts - before.inserts == 0) == (kind == "resident"), "the number of inserted rows")
        figures = {"mkeys_per_s": n / seconds / 1e6, "evictions": after.evictions - before.evictions}
        report.add({"work": f"insert {kind}", "dim": dim, "batch": n}, figures)
