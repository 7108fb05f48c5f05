"""The CuPy embedding cache on a GPU: its kernels against a plain gather and torch's, its calls, and the hit rate of traffic.

Limit of a query: a plain kernel that copies the same vectors from known slots (`plain_gather`), over the same rotation of
batches. `back to back` is the time of one launch within a CUDA graph of many, each with other keys; `one call` is that of a
graph of one launch, from its launch until the host knows that it is done. Scores are written and rows are checked, as always.
"""

import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch
from cupy_backends.cuda.api import driver, runtime

from benchmarks.gpu_timing import back_to_back, one_call, slots_of_resident_keys
from benchmarks.harness import Report, time_calls
from hps.cache.cuda.cache import CupyCache
from hps.cache.cuda.lookup import CupyLookup
from hps.tensors.batch import Batch
from hps.tools.profiling.workloads import power_law_ranks
from hps.types import FloatArray, KeyArray, TableSpec

_ALPHA = 1.05
_GATHER = r"""
extern "C" __global__ void __launch_bounds__(256)
gather(const unsigned* slots, const float4* rows, float4* out, unsigned n, unsigned units) {
    const unsigned first = blockIdx.x * 32 + threadIdx.x / 8, stride = gridDim.x * 32, member = threadIdx.x % 8;
    size_t row[AHEAD];
    float4 value[AHEAD];
    for (int j = 0; j < AHEAD; ++j) row[j] = first + j * stride < n ? slots[first + j * stride] : 0;
#pragma unroll 4
    for (unsigned unit = member; unit < units; unit += 8) {
        for (int j = 0; j < AHEAD; ++j) value[j] = rows[row[j] * units + unit];
        for (int j = 0; j < AHEAD; ++j) {
            const unsigned i = first + j * stride;
            if (i < n) STORE(out + size_t(i) * units + unit, value[j]);
        }
    }
}
"""
_VALUE = cupy.ElementwiseKernel(
    "int64 key, int32 column", "float32 value", "value = ((key * 2654435761LL + column * 40503) >> 7) & 0xFFFFFF", "value_of"
)
_PLAIN, _TUNED = (1, "*(p) = (v)"), (2, "__stcs(p, v)")


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
    _calls(report, rng, quick)
    _misses(report, rng, quick)
    _filling(report, rng, quick)
    _hit_rate(report, rng, 1 << (16 if quick else 24), 100 if quick else 2400)


def _vectors(keys: Any, dim: int) -> Any:
    return _VALUE(keys[:, None], cupy.arange(dim, dtype=cupy.int32)[None, :])


def _check(good: bool) -> None:
    if not good:
        raise RuntimeError("an answer is wrong: nothing is recorded")


def _table(name: str, dim: int) -> TableSpec:
    return TableSpec("bench", name, dim, 0.0, 1 << 20)


def _kernels(report: Report, rng: np.random.Generator, rows: int, dim: int, quick: bool) -> None:
    """Queries of resident keys and insertions; 6.4 M of 2^23 rows are inserted, so a few are evicted."""
    cache = CupyCache.create([_table("item", dim)], [rows], 0)
    ids = rng.permutation(2 * rows)[: rows * 6_400_000 >> 23].astype(np.int64)
    for part in np.array_split(ids, 16):
        keys = cupy.asarray(part)
        cache.insert(0, keys, _vectors(keys, dim))
    resident, slots = slots_of_resident_keys(cache, 0)
    order = rng.permutation(resident.size)
    resident, slots = resident[order], slots[order]
    cases = [(1 << 20, 0.0), (1 << 20, _ALPHA), *((1 << power, 0.0) for power in range(10, 20))]
    for n, alpha in [(4096, 0.0), (4096, _ALPHA)] if quick else cases:
        _queries(report, rng, cache, (resident, slots), n, alpha)
    for n in (4096,) if quick else (1 << 20, 1 << 16):
        _inserts(report, rng, cache, n)
    cache.close()


def _queries(
    report: Report, rng: np.random.Generator, cache: CupyCache, known: tuple[KeyArray, np.ndarray], n: int, alpha: float
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
            lookup.begin(Batch.of(0, batch, out))
            lookup.launch_query()

        return launch

    def gather(batch: Any, kernel: tuple[int, str]) -> Callable[[], None]:
        handle, ahead = _gather(kernel)
        pointers, sizes = np.array([batch.data.ptr, table.rows, out.data.ptr], np.uint64), np.array([n, dim // 4], np.uint32)
        places_of = [pointers.ctypes.data + 8 * i for i in range(3)] + [sizes.ctypes.data + 4 * i for i in range(2)]
        arguments = np.array(places_of, np.uint64)

        def launch() -> None:
            keep = (pointers, sizes)
            stream = cupy.cuda.get_current_stream().ptr
            blocks = -(-n // (32 * ahead))
            driver.launchKernel(handle, blocks, 1, 1, 256, 1, 1, 0, stream, arguments.ctypes.data, 0)
            del keep

        return launch

    for batch in keys[:4]:
        out.fill(cupy.nan)
        _check(lookup.query(Batch.of(0, batch, out)) == 0 and bool((out == _vectors(batch, dim)).all()))
    out.fill(cupy.nan)
    gather(places[0], _PLAIN)()
    _check(bool((out == _vectors(keys[0], dim)).all()))

    ours = back_to_back([query(batch) for batch in keys]), one_call(query(keys[0]))
    plain = back_to_back([gather(batch, _PLAIN) for batch in places]), one_call(gather(places[0], _PLAIN))
    tuned = back_to_back([gather(batch, _TUNED) for batch in places])
    first, later = _first_touch(cache, query, keys)
    figures = {
        "mkeys_per_s": n / ours[0] / 1e6,
        "gather_mkeys_per_s": n / plain[0] / 1e6,
        "of_gather": plain[0] / ours[0],
        "of_tuned_gather": tuned / ours[0],
        "one_call_s": ours[1],
        "gather_one_call_s": plain[1],
        "one_call_of_gather": plain[1] / ours[1],
        "torch_index_select_mkeys_per_s": n / _index_select(table.rows, places, out) / 1e6,
        "writing_scores_of_gather": plain[0] / first,
        "first_touch_of_later": later / first,
    }
    report.add({"work": "query", "dim": dim, "batch": n, "alpha": alpha, "resident": resident.size}, figures)


_compiled: dict[tuple[int, str], tuple[int, int, Any]] = {}


def _gather(kernel: tuple[int, str]) -> tuple[int, int]:
    if kernel not in _compiled:
        ahead, store = kernel
        code = f"#define AHEAD {ahead}\n#define STORE(p, v) {store}\n{_GATHER}"
        function = cupy.RawModule(code=code).get_function("gather")
        _compiled[kernel] = function.kernel.ptr, ahead, function
    return _compiled[kernel][:2]


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


def _first_touch(cache: CupyCache, query: Callable[[Any], Callable[[], None]], keys: list[Any]) -> tuple[float, float]:
    """Seconds of a query after all scores were reset, so that every hit writes one, and of the next of the same keys.

    Before either, so much is read that nothing of what was done before is left in the L2 cache.
    """
    table = cache.memory.open[0]  # type: ignore[index]
    memory = cupy.cuda.UnownedMemory(table.buckets, 128 * table.pairs, None, 0)
    headers = cupy.ndarray((2 * table.pairs, 8), np.int64, cupy.cuda.MemoryPointer(memory, 0))[:, 0]
    others, total = cupy.zeros(1 << 27, cupy.float32), cupy.zeros((), cupy.float32)
    seconds = []
    for batch in keys[:8]:
        headers &= 0xFFFFFFFF
        launch, both = query(batch), []
        for _ in range(2):
            others.sum(out=total)
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            launch()
            stop.record()
            both.append((start, stop))
        stop.synchronize()
        seconds.append([cupy.cuda.get_elapsed_time(*events) / 1e3 for events in both])
    first, later = np.median(seconds, axis=0)
    return float(first), float(later)


def _inserts(report: Report, rng: np.random.Generator, cache: CupyCache, n: int) -> None:
    dim, table = cache.tables[0].dim, cache.memory.open[0]  # type: ignore[index]
    lookup, resident = cache.create_lookup(), cache.dump(0)

    def insert(keys: Any, vectors: Any) -> Callable[[], None]:
        def launch() -> None:
            stream = cupy.cuda.get_current_stream().ptr
            lookup.changes.launched = False  # nothing runs, and an event of before cannot be captured
            arguments = (keys.data.ptr, vectors.data.ptr, 0, n, 3, lookup.insert_arguments, stream)
            lookup.changes.launch_insert(table, *arguments)

        return launch

    for kind in ("resident", "new"):
        choice = [rng.choice(resident, n, replace=False) for _ in range(4)]
        keys = [cupy.asarray(part if kind == "resident" else part + (1 << 40) * (1 + i)) for i, part in enumerate(choice)]
        vectors = [_vectors(part, dim) for part in keys]
        before = cache.stats(0)
        if kind == "resident":
            seconds = back_to_back([insert(*pair) for pair in zip(keys, vectors, strict=True)])
            events = tuple(cupy.cuda.Event(disable_timing=True) for _ in range(2))
            lookup.changes._events = events  # the old ones belong to the graph
            lookup.changes.order._last, lookup.changes.order.pending = 0, False
            out = cupy.empty((n, dim), cupy.float32)
            _check(lookup.query(Batch.of(0, keys[-1], out)) == 0 and bool((out == vectors[-1]).all()))
        else:
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            for pair in zip(keys, vectors, strict=True):
                insert(*pair)()
            stop.record()
            stop.synchronize()
            seconds = cupy.cuda.get_elapsed_time(start, stop) / 1e3 / len(keys)
        after = cache.stats(0)
        _check((after.inserts - before.inserts == 0) == (kind == "resident"))
        figures = {"mkeys_per_s": n / seconds / 1e6, "evictions": after.evictions - before.evictions}
        report.add({"work": f"insert {kind}", "dim": dim, "batch": n}, figures)


def _calls(report: Report, rng: np.random.Generator, quick: bool) -> None:
    """Query and finish of resident keys, from Python: what the cache costs a lookup."""
    for tables, n, dim in [(1, 4096, 32), (1, 4096, 128), (26, 1024, 16)]:
        specs = [_table(f"t{i}", dim) for i in range(tables)]
        cache = CupyCache.create(specs, [1000 if quick else 100_000] * tables, 0)
        lookup = cache.create_lookup()
        rotation: dict[str, list[Batch]] = {"torch": [], "host": []}
        for table in range(tables):
            keys = np.arange(cache.stats(table).capacity_rows // 2)
            cache.insert(table, keys, _vectors(cupy.asarray(keys), dim).get())
        for _ in range(8):
            keys, sizes = [rng.choice(cache.dump(table), n) for table in range(tables)], [n] * tables
            outs = [np.empty((n, dim), np.float32) for _ in range(tables)]
            rotation["host"].append(Batch(range(tables), sizes, keys, outs))
            places = [torch.empty(n, dim, device="cuda") for _ in range(tables)]
            rotation["torch"].append(Batch(range(tables), sizes, [torch.from_numpy(one).cuda() for one in keys], places))
        for place, batches in rotation.items():
            axes = {"work": f"cache calls, {place} tensors", "tables": tables, "batch": n, "dim": dim}
            report.add(axes, _time_lookups(lookup, dim, batches))
        cache.close()
    indices, table = torch.randint(0, 100_000, (4096,), device="cuda"), torch.empty(100_000, 32, device="cuda")

    def select(_i: int) -> None:
        torch.index_select(table, 0, indices)
        torch.cuda.synchronize()

    report.add({"work": "torch index_select + sync", "tables": 1, "batch": 4096, "dim": 32}, time_calls(select, 2000).as_dict())


def _time_lookups(lookup: CupyLookup, dim: int, rotation: list[Batch]) -> dict[str, float]:
    def call(i: int) -> int:
        missing = lookup.query(rotation[i % 8])
        lookup.finish()
        return missing

    _check(all(call(i) == 0 for i in range(8)))
    _check(all(_right(*both, dim) for both in zip(rotation[7].keys, rotation[7].outs, strict=True)))
    return time_calls(call, 2000).as_dict()


def _right(asked: Any, answered: Any, dim: int) -> bool:
    keys, out = cupy.asarray(asked), cupy.asarray(answered)
    return bool((out == _vectors(keys, dim)).all())


def _misses(report: Report, rng: np.random.Generator, quick: bool) -> None:
    """2,000 keys of which 300 are missing, answered by a database that takes no time."""
    dim, n, missing = 16, 2000, 300
    cache = CupyCache.create([_table("item", dim)], [1 << 22], 0)  # so large that nothing is evicted
    keys = np.arange(400_000)
    cache.insert(0, keys, _vectors(cupy.asarray(keys), dim).get())
    resident, lookup = cache.dump(0), cache.create_lookup()
    out = torch.empty(n, dim, device="cuda")
    calls = 20 if quick else 1000
    batches = []
    for i in range(calls + 3):
        batch = np.concatenate([rng.choice(resident, n - missing), (1 << 30) + rng.integers(0, 250, missing) + 1000 * i])
        batches.append(torch.from_numpy(rng.permutation(batch)).cuda())
    fresh = iter(batches)

    def call(_i: int) -> None:
        lookup.query(Batch.of(0, next(fresh), out))
        for missed in lookup.unique():
            found = np.ones(missed.keys.size, np.bool_)
            missed.buffer()[:, 0] = missed.keys
            missed.stage(0, missed.keys.size)
            missed.scatter(found)
            missed.insert(found)
        lookup.finish()
        torch.cuda.current_stream().synchronize()

    timing = time_calls(call, calls)
    last = batches[-1]
    absent = last >= 1 << 30
    _check(bool((out[absent, 0] == last[absent].float()).all()))
    _check(bool((cupy.asarray(out[~absent]) == _vectors(cupy.asarray(last[~absent]), dim)).all()))
    report.add({"work": "cache calls, 300 of 2,000 keys missing", "batch": n, "dim": dim}, timing.as_dict())


def _filling(report: Report, rng: np.random.Generator, quick: bool) -> None:
    """Insertion of host arrays, as a warm-up does it, against a plain copy from pinned memory."""
    rows, dim = (100_000 if quick else 4_000_000), 128
    cache = CupyCache.create([_table("item", dim)], [rows * 3 // 2], 0)
    keys = rng.permutation(4 * rows)[:rows]
    vectors: FloatArray = np.zeros((rows, dim), np.float32)
    vectors[:, 0] = keys
    start = time.perf_counter()
    cache.insert(0, keys, vectors)
    seconds = time.perf_counter() - start
    _check(cache.stats(0).inserts == rows)
    pinned = cupy.cuda.alloc_pinned_memory(1 << 28)
    target, stream = cupy.empty(1 << 28, cupy.uint8), cupy.cuda.Stream(non_blocking=True)

    def copy(_i: int) -> None:
        runtime.memcpyAsync(target.data.ptr, pinned.ptr, 1 << 28, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()

    copied = (1 << 28) / time_calls(copy, 10).p50_s
    rate = (vectors.nbytes + keys.nbytes) / seconds
    report.add(
        {"work": "insert host arrays", "dim": dim, "batch": rows}, {"gb_per_s": rate / 1e9, "of_pinned_copy": rate / copied}
    )
    cache.close()


def _hit_rate(report: Report, rng: np.random.Generator, rows: int, batches: int) -> None:
    """Traffic fills a cache of a tenth of the rows: each batch's misses are inserted. The last quarter is counted."""
    n, dim, capacity = 1 << 16, 1, rows // 10
    cache = CupyCache.create([_table("item", dim)], [capacity], 0)
    lookup, out = cache.create_lookup(), cupy.empty((n, dim), cupy.float32)
    ids = cupy.asarray(rng.permutation(rows))
    hits = asked = 0
    random = cupy.random.default_rng(7)
    g = 1.0 - _ALPHA
    for batch in range(batches):
        ranks = ((random.random(n) * (float(rows) ** g - 1.0) + 1.0) ** (1.0 / g)).astype(cupy.int64)
        missing = lookup.query(Batch.of(0, ids[cupy.minimum(ranks, rows - 1)], out))
        for missed in lookup.unique():
            found = np.ones(missed.keys.size, np.bool_)
            missed.buffer()[...] = 0
            missed.stage(0, missed.keys.size)
            missed.scatter(found)
            missed.insert(found)
        lookup.finish()
        if batch >= batches * 3 // 4:
            hits += n - missing
            asked += n
    ideal = (float(capacity) ** g - 1.0) / (float(rows) ** g - 1.0)
    figures = {"hit_rate": hits / asked, "ideal_hit_rate": ideal, "of_ideal": hits / asked / ideal, "keys_before": batches * n}
    report.add({"work": "hit rate of traffic", "rows": rows, "capacity": capacity, "alpha": _ALPHA, "batch": n}, figures)
    cache.close()
