"""Rows in fewer bits on a GPU: hits alone, keys by popularity over the link, bags; beside float32 in the same run.

A cache has the memory of a float32 cache for a tenth of the rows, less the index where that is on the device. `mixed` are
batches of power-law keys after 600 of them; `link` reads the hash map's buckets and rows, `index` has the buckets on the
device, `dense` is a table that needs none. `cold_rows` is a plain kernel that reads as many rows of the same size in ascending
order after other work on the device: what the link allows a lookup with as many misses.

Of each configuration, 16,384 vectors are compared with those of the CPU, bit for bit.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import cupy
import numpy as np
import torch
from numba import njit

from benchmarks.gpu_timing import back_to_back
from benchmarks.harness import Report, add, part, time_calls
from hps.cache.cuda.cache import CupyCache
from hps.ground.rows import decode, encode
from hps.stores.hash_map.database import HashMapDatabase
from hps.tensors.bags import Combiner, Pooling
from hps.tensors.batch import Batch
from hps.types import FloatArray, KeyArray, TableSpec

_DIM = 128
_ALPHA = 1.05
_BATCH = 1 << 18
_CHECKED = 1 << 14
_OUTS = {"float32": torch.float32, "float16": torch.float16}
_COLD = r"""
typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(256)
cold_rows(u64 base, const unsigned* rows, unsigned n, unsigned row_bytes, uint4* out) {
    const unsigned lane = threadIdx.x % 32, warp = (blockIdx.x * 256 + threadIdx.x) / 32, warps = gridDim.x * 8;
    const unsigned parts = (row_bytes + 12) / 16;
    for (unsigned i = 8 * warp; i < n; i += 8 * warps) {
        uint4 value[8];
#pragma unroll
        for (unsigned r = 0; r < 8; ++r) {
            const u64 at = (base + static_cast<u64>(rows[min(i + r, n - 1)]) * row_bytes) & ~15ull;
            if (lane < parts) value[r] = __ldcv(reinterpret_cast<const uint4*>(at + 16 * lane));
        }
#pragma unroll
        for (unsigned r = 0; r < 8; ++r) {
            if (lane < parts && i + r < n) out[static_cast<u64>(i + r) * 32 + lane] = value[r];
        }
    }
}
"""


@njit(nogil=True)
def _fill(keys, vectors):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        x = np.uint64(keys[i]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(12345)
        for j in range(vectors.shape[1]):
            x ^= x << np.uint64(13)
            x ^= x >> np.uint64(7)
            x ^= x << np.uint64(17)
            vectors[i, j] = np.float32(np.int64(x >> np.uint64(40))) * np.float32(2.0**-23) - np.float32(1.0)


def vectors_of(keys: KeyArray) -> FloatArray:
    vectors: FloatArray = np.empty((keys.size, _DIM), np.float32)
    _fill(keys, vectors)
    return vectors


def run(report: Report, quick: bool) -> None:
    """Measure all formats and paths; `quick` takes a small table."""
    report.about |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    rows = 1 << (16 if quick else 24)
    wanted = os.environ.get("HPS_ROW_DTYPES", "float32,float16,int8").split(",")
    for row_dtype in wanted:
        for dense in (False, True):
            about = f"{row_dtype}{', dense' if dense else ''}"
            table = part(report, f"filling {about}", 60, partial(_Table, rows, row_dtype, dense))
            if table is None:
                continue
            for path in ("dense",) if dense else ("link", "index"):
                part(report, f"mixed, {path}, {about}", 60, partial(_mixed, report, table, path, quick))
            if not dense:
                part(report, f"hits, {about}", 60, partial(_hits, report, table, quick))
                part(report, f"bags, {about}", 30, partial(_bags, report, table, quick))
            part(report, f"closing {about}", 30, table.close)


class _Table:
    """A table in the hash map, and caches of it. *One per thread.*"""

    def __init__(self, rows: int, row_dtype: str, dense: bool) -> None:
        self.rows, self.row_dtype = rows, row_dtype
        self.spec = TableSpec("bench", "items", _DIM, 0.0, 1 << 21, "", row_dtype)
        self.database = HashMapDatabase()
        self.database.open_table(self.spec.tag, self.spec.width)
        self.database.reserve(self.spec.tag, rows, [np.arange(rows)] if dense else ())
        step = 1 << 17

        def made(start: int) -> tuple[KeyArray, FloatArray]:
            keys = np.arange(start, min(start + step, rows))
            return keys, encode("filling", vectors_of(keys), row_dtype)

        made(0)
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
            for keys, encoded in pool.map(made, range(0, rows, step)):
                self.database.insert(self.spec.tag, keys, encoded)
        self.by_rank = torch.from_numpy(np.random.default_rng(31337).permutation(rows)).cuda()

    def cache(self, path: str) -> CupyCache:
        """A cache with the memory of a float32 one for a tenth of the rows."""
        pair = 128 + 14 * 4 * self.spec.width
        size = self.rows * 0.1 * (128 + 14 * 4 * _DIM) / 14
        if path == "index":
            size -= HashMapDatabase.index_bytes(self.rows)
        cache = CupyCache.create([self.spec], [int(14 * size / pair)], 0)
        host = self.database.host_table(self.spec.tag)
        if host is None or cache.attach(0, host, True, index=path == "index") is not None:
            raise RuntimeError("the cache cannot read the table")
        return cache

    def traffic(self, n: int, random: Any) -> Any:
        """Keys whose popularity falls with rank."""
        g = 1.0 - _ALPHA
        u = torch.rand(n, dtype=torch.float64, device="cuda", generator=random)
        ranks = ((u * (float(self.rows) ** g - 1.0) + 1.0) ** (1.0 / g)).to(torch.int64)
        return self.by_rank[ranks.clamp_(max=self.rows - 1)]

    def check(self, keys: Any, out: Any) -> None:
        """Compare vectors with those of the CPU."""
        asked = keys[:_CHECKED].cpu().numpy()
        stored = decode(encode("checking", vectors_of(asked), self.row_dtype), _DIM, self.row_dtype)
        wanted = torch.from_numpy(stored).to(out.dtype)
        whole = torch.int32 if out.dtype is torch.float32 else torch.int16
        if not torch.equal(out[: asked.size].cpu().view(whole), wanted.view(whole)):
            raise RuntimeError(f"wrong vectors of {self.row_dtype}")

    def close(self) -> bool:
        self.database.close()
        return True


def _mixed(report: Report, table: _Table, path: str, quick: bool) -> bool:
    n, calls, batches = (4096, 5, 20) if quick else (_BATCH, 40, 600)
    random = torch.Generator("cuda").manual_seed(report.seed)
    cache = table.cache(path)
    try:
        lookup, out = cache.create_lookup(), torch.empty((n, _DIM), device="cuda")
        missed = 0

        def ask(keys: Any) -> None:
            nonlocal missed
            _ask(lookup, Batch.of(0, keys, out))
            missed += sum(lookup.linked)

        for _ in range(batches):
            ask(table.traffic(n, random))
        g, held = 1.0 - _ALPHA, cache.stats(0).capacity_rows
        ideal = (float(min(held, table.rows)) ** g - 1.0) / (float(table.rows) ** g - 1.0)
        asked = [table.traffic(n, random) for _ in range(calls)]

        def timed(i: int) -> None:
            ask(asked[i])
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        missed = 0
        waiting = time_calls(timed, calls, warmup=0)
        hit_rate = 1.0 - missed / (calls * n)
        table.check(asked[-1], out)
        asked = [table.traffic(n, random) for _ in range(calls)]

        def enqueued(i: int) -> None:
            lookup.enqueue(Batch.of(0, asked[i], out))
            torch.cuda.synchronize()

        without = time_calls(enqueued, calls, warmup=0)
        table.check(asked[-1], out)
        misses = round((1.0 - hit_rate) * n)
        figures = {
            "cache_rows": held,
            "hit_rate": hit_rate,
            "of_ideal": hit_rate / ideal,
            "p50_us": 1e6 * waiting.p50_s,
            "mkeys_per_s": n / waiting.p50_s / 1e6,
            "enqueued_mkeys_per_s": n / without.p50_s / 1e6,
            "cold_rows_us": _cold_rows_us(table, misses),
            "misses": misses,
        }
        add(report, {"work": "mixed", "row_dtype": table.row_dtype, "path": path, "keys": n}, figures)
    finally:
        cache.close()
    return True


def _cold_rows_us(table: _Table, n: int) -> float:
    """Microseconds of reading n rows of pinned memory of the table's size in ascending order, after other work."""
    row_bytes = 4 * table.spec.width
    memory = cupy.cuda.alloc_pinned_memory(table.rows * row_bytes + 64)
    np.frombuffer(memory, np.uint8, table.rows * row_bytes)[::4096] = 1
    kernel = cupy.RawKernel(_COLD, "cold_rows")
    random, out = np.random.default_rng(5), cupy.empty((max(n, 1), 32, 4), np.uint32)
    other = cupy.empty(1 << 28, np.uint32)
    seconds = []
    for i in range(9):
        rows = cupy.asarray(np.sort(random.choice(table.rows, max(n, 1), replace=False)).astype(np.uint32))
        other.fill(i)
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        kernel((66,), (256,), (np.uint64(memory.ptr), rows, np.uint32(max(n, 1)), np.uint32(row_bytes), out))
        stop.record()
        stop.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, stop))
    return 1e3 * float(np.median(seconds))


def _resident(table: _Table, quick: bool) -> tuple[CupyCache, Any]:
    held = min(table.rows, 1 << (14 if quick else 22))
    cache = CupyCache.create([table.spec], [2 * held], 0)
    keys = np.random.default_rng(7).permutation(table.rows)[:held]
    step = 1 << 18
    for start in range(0, held, step):
        some = keys[start : start + step]
        cache.insert(0, some, encode("filling", vectors_of(some), table.row_dtype))
    return cache, torch.from_numpy(np.intersect1d(keys, cache.dump(0))).cuda()


def _hits(report: Report, table: _Table, quick: bool) -> bool:
    cache, known = _resident(table, quick)
    try:
        for n in (1 << 10,) if quick else (1 << 12, 1 << 16, 1 << 20):
            asked = [known[torch.randint(0, known.numel(), (n,), device="cuda")] for _ in range(8)]
            for name, dtype in _OUTS.items():
                lookup, outs = cache.create_lookup(), [torch.empty((n, _DIM), dtype=dtype, device="cuda") for _ in asked]

                arrays = [(cupy.asarray(some), cupy.asarray(out)) for some, out in zip(asked, outs, strict=True)]

                def launch(i: int, lookup: Any = lookup, arrays: Any = arrays) -> None:
                    lookup.begin(Batch.of(0, *arrays[i]))
                    lookup.launch_query()

                def whole(i: int, lookup: Any = lookup, arrays: Any = arrays) -> None:
                    _ask(lookup, Batch.of(0, *arrays[i % 8]))
                    torch.cuda.synchronize()

                one_call = time_calls(whole, 40)
                table.check(asked[7], outs[7])
                seconds = back_to_back([partial(launch, i) for i in range(8)])
                figures = {"us": 1e6 * seconds, "mkeys_per_s": n / seconds / 1e6, "one_call_us": 1e6 * one_call.p50_s}
                add(report, {"work": "hits", "row_dtype": table.row_dtype, "out": name, "keys": n}, figures)
    finally:
        cache.close()
    return True


def _ask(lookup: Any, batch: Batch) -> None:
    if lookup.query(batch):
        raise RuntimeError("keys are left for the host")
    lookup.finish()


def _bags(report: Report, table: _Table, quick: bool) -> bool:
    bags, hotness = (64, 8) if quick else (1 << 14, 64)
    cache, known = _resident(table, quick)
    try:
        keys = known[torch.randint(0, known.numel(), (bags * hotness,), device="cuda")]
        out = torch.empty((bags, _DIM), device="cuda")
        pooling = Pooling(bags, None, hotness, None, Combiner.SUM, 0.0, None)
        lookup = cache.create_lookup()

        def ask(_i: int) -> None:
            _ask(lookup, Batch.of(0, keys, out, None, keys.numel(), pooling))
            torch.cuda.synchronize()

        timing = time_calls(ask, 40)
        asked = keys[: 64 * hotness].cpu().numpy()
        stored = decode(encode("checking", vectors_of(asked), table.row_dtype), _DIM, table.row_dtype)
        sums = stored.astype(np.float64).reshape(64, hotness, _DIM).sum(1)
        np.testing.assert_allclose(out[:64].cpu().numpy(), sums, rtol=1e-4, atol=1e-4)
        figures = {"us": 1e6 * timing.p50_s, "mkeys_per_s": bags * hotness / timing.p50_s / 1e6}
        add(report, {"work": "bags", "row_dtype": table.row_dtype, "keys": bags * hotness}, figures)
    finally:
        cache.close()
    return True
