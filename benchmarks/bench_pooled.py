"""Pooled lookups on a GPU: bags of resident keys against a plain gather-and-sum of known rows, and of misses from the hash map.

Beside ours stand, in the same run: the best of several plain kernels that add up the same rows of the same memory, their
places known (`benchmarks/pooled_anchor.py`), and torch's `embedding_bag` over whole tables, one call a table. The bags are
those of MLPerf's DLRM-DCNv2: 26 tables of 1 to 100 keys a sample. Figures are of one launch within a CUDA graph of many, each
with other keys, unless they say otherwise. Every answer is checked against float64.

Each part has a time limit. A part that fails becomes a row with its error, and the others go on.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from torch.nn.functional import embedding_bag

import hps
from benchmarks import pooled_anchor
from benchmarks.gpu import back_to_back, one_call, popular_keys, slots_of_resident_keys, torch_back_to_back
from benchmarks.harness import ALPHA, HOTNESS, Report, gpu_facts, ideal_hit_rate, ranks_of, require, scratch, time_calls
from benchmarks.served import document, model
from hps.cache.cuda.cache import CupyCache
from hps.models.writer import write_sparse_model
from hps.tensors.batch import pooled_batch
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from hps.types import TableSpec

_VALUES = "value = ((key * 2654435761LL + column * 40503) >> 7) & 0xFFFFFF"
_RATIOS = {"of_anchor": "seconds", "one_call_of_anchor": "one_call_s"}
_KEYS_IN_FLIGHT = 1 << 23  # of the batches of a case, so that no small batch stays in the L2 cache


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables."""
    report.about |= gpu_facts()
    rows = 1 << (14 if quick else 20)
    cases = [(128, HOTNESS, [(4096, ALPHA), (4096, 0.0), (256, ALPHA), (256, 0.0)])]
    cases += [(dim, HOTNESS, [(4096, ALPHA), (4096, 0.0)]) for dim in (32, 64)]
    for dim, hotness, batches in cases:
        report.part(f"resident, dim {dim}", 60, partial(_resident, report, rows, dim, hotness, batches))
    one = partial(_resident, report, 8 * rows, 128, (20,), [(4096, ALPHA), (4096, 0.0)])
    report.part("resident, one table", 40, one)
    with scratch("pooled") as directory:
        report.part("a tenth cached", 90, partial(_cached, report, directory, 10_000 if quick else 200_000))


class _Tables:
    """Whole tables, and a cache that holds all of their rows; keys are 0 to rows - 1. *One per thread.*"""

    def __init__(self, rows: int, dim: int, count: int) -> None:
        self.rows, self.dim = rows, dim
        self.specs = [TableSpec("bench", f"t{table}", dim, 0.0, 1 << 24) for table in range(count)]
        self.cache = CupyCache.create(self.specs, [rows * 10 // 7] * count, 0)
        self.values = cupy.ElementwiseKernel("int64 key, int64 column", "float32 value", _VALUES, "value_of_key")
        self.whole = []  # (rows, dim) float32 each
        self.places = []  # (rows,) int32 each: where the cache has the row of a key
        self.known = []  # (k,) int64 each: keys that are resident, in no order
        keys = cupy.arange(rows, dtype=cupy.int64)
        order = np.random.default_rng(31337).permutation(rows)
        for table in range(count):
            self.whole.append(self.values(keys[:, None], cupy.arange(dim, dtype=cupy.int64)[None, :] + 1000 * table))
            self.cache.insert(table, keys, self.whole[-1])
            resident, slots = slots_of_resident_keys(self.cache, table)
            if resident.size < 0.9 * rows:
                raise RuntimeError(f"{resident.size} of {rows} rows are resident: the cache is too small")
            place = np.full(rows, -1, np.int32)
            place[resident] = slots
            self.places.append(cupy.asarray(place))
            self.known.append(cupy.asarray(order[place[order] >= 0]))

    def right(self, table: int, keys: Any, hotness: int, found: Any, weights: Any = None) -> bool:
        """Whether (B, dim) sums of B x hotness keys are those of float64, to 1 ulp a term; exact for one key without weight."""
        columns = cupy.arange(self.dim, dtype=cupy.int64)[None, :] + 1000 * table
        exact = cupy.empty((keys.size // hotness, self.dim), cupy.float64)
        for start in range(0, exact.shape[0], 1024):  # not all terms at once
            requested = keys[start * hotness : (start + 1024) * hotness]
            terms = self.values(requested[:, None], columns).astype(cupy.float64)
            if weights is not None:
                terms *= weights[start * hotness : (start + 1024) * hotness, None]
            exact[start : start + 1024] = terms.reshape(-1, hotness, self.dim).sum(axis=1)  # terms are never negative
        terms_rounded = hotness if hotness > 1 or weights is not None else 0
        return bool((cupy.abs(found - exact) <= terms_rounded * 2.0**-23 * exact).all())

    def close(self) -> None:
        """Give the memory back."""
        self.cache.close()
        self.whole, self.places, self.known = [], [], []
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()


class _Batch:
    """Keys of one batch in one array, by table, and where their rows lie in the cache."""

    def __init__(self, tables: _Tables, hotness: Sequence[int], batch: int, alpha: float, random: Any) -> None:
        drawn, places = [], []
        for table, each in enumerate(hotness):
            known = tables.known[table]
            uniform = random.random(batch * each)
            ranks = ranks_of(uniform, known.size, alpha) - 1 if alpha else uniform * known.size
            drawn.append(known[cupy.minimum(ranks.astype(cupy.int64), known.size - 1)])
            places.append(tables.places[table][drawn[-1]])
        self.all_keys = cupy.concatenate(drawn)
        self.all_places = cupy.concatenate(places)
        ends = np.cumsum([batch * each for each in hotness])
        self.spans = [slice(int(end) - batch * each, int(end)) for end, each in zip(ends, hotness, strict=True)]
        self.keys = [self.all_keys[span] for span in self.spans]


def _resident(report: Report, rows: int, dim: int, hotness: Sequence[int], cases: Sequence[tuple[int, float]]) -> None:
    """Bags of resident keys, by batch and popularity."""
    tables = _Tables(rows, dim, len(hotness))
    try:
        for batch, alpha in cases:
            name = f"resident, {len(hotness)} tables, dim {dim}, batch {batch}, alpha {alpha}"
            report.part(name, 30, partial(_case, report, tables, hotness, batch, alpha))
    finally:
        tables.close()


def _case(report: Report, tables: _Tables, hotness: Sequence[int], batch: int, alpha: float) -> None:
    random = cupy.random.default_rng(report.seed)
    keys = batch * sum(hotness)
    batches = [_Batch(tables, hotness, batch, alpha, random) for _ in range(max(4, min(64, _KEYS_IN_FLIGHT // keys)))]
    out = cupy.empty((batch, tables.dim * len(hotness)), cupy.float32)
    axes = {"tables": len(hotness), "batch": batch, "dim": tables.dim, "alpha": alpha, "rows": tables.rows}
    moved = 4 * tables.dim * (keys + batch * len(hotness))

    def check(what: str, each: _Batch, weights: Any = None) -> None:
        for table, hot in enumerate(hotness):
            found = out[:, table * tables.dim : (table + 1) * tables.dim]
            own_weights = None if weights is None else weights[table]
            require(tables.right(table, each.keys[table], hot, found, own_weights), f"{what}: a sum of table {table}")
        out.fill(cupy.nan)

    def rates(seconds: float) -> dict[str, float]:
        return {"us": seconds * 1e6, "mkeys_per_s": keys / seconds / 1e6, "gb_per_s": moved / seconds / 1e9}

    anchor = _anchor(tables, hotness, batches, out, check)
    report.add(axes | {"bags": "plain kernel"}, rates(anchor["seconds"]) | anchor)
    kinds = ["offsets", "fixed hotness", "weights"] if alpha and batch == 4096 else ["offsets"]
    for kind in kinds:
        name = f"ours, {kind}, batch {batch}, alpha {alpha}, dim {tables.dim}"
        found = report.part(name, 30, partial(_ours, tables, hotness, batches, out, check, kind))
        if found is not None:
            ratio = {name: anchor[of] / found[of] for name, of in _RATIOS.items()}
            report.add(axes | {"bags": kind}, rates(found["seconds"]) | ratio | found)
    name = "torch embedding_bag"
    call = partial(_torch_bags, tables, hotness, batches, out, check)
    found = report.part(f"{name}, batch {batch}, dim {tables.dim}", 30, call)
    if found is not None:
        ratio = {"of_anchor": anchor["seconds"] / found["seconds"]}
        report.add(axes | {"bags": name}, rates(found["seconds"]) | ratio | found)


_Check = Callable[..., None]


def _offsets(batch: int, hotness: Sequence[int], dtype: Any) -> list[Any]:
    return [cupy.arange(batch + 1, dtype=dtype) * dtype(each) for each in hotness]


def _anchor(tables: _Tables, hotness: Sequence[int], batches: list[_Batch], out: Any, check: _Check) -> dict[str, Any]:
    """The best of the plain kernels: seconds of one launch, and which it is."""
    dim, count = tables.dim, len(out)
    module = cupy.RawModule(code=pooled_anchor.SOURCE, options=("-std=c++17",))
    offsets = _offsets(count, hotness, np.int32)
    memory = [table.rows for table in tables.cache.memory.tables()]
    best: dict[str, Any] = {"seconds": np.inf}
    for ahead, run_of in pooled_anchor.VARIANTS:
        kernel = module.get_function(f"add_up_{dim // 4}_{ahead}")
        launches, kept = [], []
        for each in batches:
            places = each.all_places.data.ptr
            addresses = [
                (memory[t], places + 4 * span.start, offsets[t].data.ptr, out.data.ptr + 4 * dim * t)
                for t, span in enumerate(each.spans)
            ]
            parts, blocks = pooled_anchor.plan(addresses, count, hotness, dim, dim * len(hotness), run_of)
            on_device = cupy.asarray(parts.view(np.uint8)), cupy.asarray(blocks)
            kept.append(on_device)
            launches.append(pooled_anchor.launcher(kernel, *on_device, blocks.size))
        out.fill(cupy.nan)
        launches[0]()
        check(f"anchor {ahead}, {run_of}", batches[0])
        seconds = back_to_back(launches)
        if seconds < best["seconds"]:
            best = {"seconds": seconds, "one_call_s": one_call(launches[0]), "rows_ahead": ahead, "keys_a_group": run_of}
    return best


def _pooled(tables: _Tables, hotness: Sequence[int], each: _Batch, offsets: Any, weights: Any, out: Any) -> Any:
    """The batch of a lookup of bags with one output for all tables."""
    bags = {
        table: hps.Bags(
            keys if offsets is not None else keys.reshape(-1, hot),
            None if offsets is None else offsets[table],
            None if weights is None else weights[table],
        )
        for table, (keys, hot) in enumerate(zip(each.keys, hotness, strict=True))
    }
    return pooled_batch(bags, out, int, tables.specs, on_cuda=True)


def _ours(tables: _Tables, hotness: Sequence[int], batches: list[_Batch], out: Any, check: _Check, kind: str) -> dict[str, Any]:
    """Pooled lookups through the cache: on the device, and whole calls from Python."""
    batch = len(out)
    offsets = None if kind == "fixed hotness" else _offsets(batch, hotness, np.int64)
    weights = None
    if kind == "weights":
        random = cupy.random.default_rng(2)
        weights = [random.random(batch * hot, dtype=cupy.float32) for hot in hotness]
    lookup = tables.cache.create_lookup()

    def call(each: _Batch) -> None:
        require(lookup.query(_pooled(tables, hotness, each, offsets, weights, out)) == 0, "the number of missing keys")
        lookup.finish()

    for each in batches[:2]:
        out.fill(cupy.nan)
        call(each)
        cupy.cuda.Device().synchronize()
        check(f"ours, {kind}", each, weights)

    def whole(i: int) -> None:
        call(batches[i % len(batches)])
        cupy.cuda.get_current_stream().synchronize()

    figures = time_calls(whole, 100).as_us("call_")

    def launch(batch: Any) -> None:
        lookup.start(batch)
        lookup.launch_pool("pool")

    # what the device does of it; the streams of the tensors are those that work is captured on
    requested = [_pooled(tables, hotness, each, offsets, weights, out) for each in batches]
    seconds = back_to_back([partial(launch, each) for each in requested])
    check(f"ours in a graph, {kind}", batches[-1], weights)
    return {"seconds": seconds, "one_call_s": one_call(partial(launch, requested[0]))} | figures


def _torch_bags(tables: _Tables, hotness: Sequence[int], batches: list[_Batch], out: Any, check: _Check) -> dict[str, Any]:
    """torch's `embedding_bag` over whole tables: in a graph of its calls, and from Python."""
    weights = [torch.from_dlpack(table) for table in tables.whole]
    offsets = [torch.from_dlpack(each) for each in _offsets(len(out), hotness, np.int64)]
    keys = [[torch.from_dlpack(part) for part in each.keys] for each in batches]
    results: list[Any] = []

    def call(i: int) -> None:
        results[:] = [
            embedding_bag(requested, weight, offset, mode="sum", include_last_offset=True)
            for requested, weight, offset in zip(keys[i % len(keys)], weights, offsets, strict=True)
        ]

    def whole(i: int) -> None:
        call(i)
        torch.cuda.synchronize()

    whole(0)
    torch.cat(results, 1, out=torch.from_dlpack(out))
    torch.cuda.synchronize()
    check("torch", batches[0])
    figures = time_calls(whole, 50).as_us("call_")
    few = [partial(call, i) for i in range(min(len(keys), 8))]  # a call makes dozens of launches
    return {"seconds": torch_back_to_back(few)} | figures


def check_sums(keys: np.ndarray, hotness: int, dim: int, seed: int, found: np.ndarray) -> None:
    """Compare (B, dim) sums of B x hotness keys of a sample model with those of float64."""
    terms = sample_vectors(keys, dim, seed).reshape(-1, hotness, dim)
    exact, size = terms.sum(1, dtype=np.float64), np.abs(terms).sum(1, dtype=np.float64)
    require(np.all(np.abs(found - exact) <= hotness * 2.0**-23 * size), f"a sum of table {seed}")


def _cached(report: Report, place: Path, rows: int) -> None:
    """Caches of a tenth of the rows above the hash map, warmed by traffic: bags, and rows beside them."""
    files = [place / f"t{table}" for table in range(len(HOTNESS))]
    for table, file in enumerate(files):
        write_sparse_model(file, sample_chunks(rows, 128, table))
    settings = {"maxnum_catfeature_query_per_table_per_sample": list(HOTNESS), "max_batch_size": 4096, "miss_path": "link"}
    settings |= {"gpucacheper": 0.1, "cache_refresh_percentage_per_iteration": 0.0}
    config = document(model(files, [128] * len(HOTNESS), "bench", **settings), device="cuda")
    with hps.HPS(config) as server:
        for wait in (True, False):
            report.part(f"a tenth cached, wait={wait}", 45, partial(_traffic, report, server, rows, wait=wait))


def _traffic(report: Report, server: hps.HPS, rows: int, *, wait: bool) -> None:
    """Batches by popularity, other keys each time: bags and rows in turn, after the cache was warmed by such."""
    batch, dim, warm, calls = 4096, 128, 30, 16
    random = torch.Generator("cuda").manual_seed(report.seed + wait)
    by_rank = torch.from_numpy(np.random.default_rng(31337).permutation(rows)).cuda()
    counts = [batch * hot for hot in HOTNESS]
    out = torch.empty(batch, dim * len(HOTNESS), device="cuda")
    vectors = torch.empty(sum(counts), dim, device="cuda")
    offsets = [torch.arange(batch + 1, device="cuda") * hot for hot in HOTNESS]

    def draw() -> Any:
        return popular_keys(by_rank, sum(counts), random)

    def bags(keys: Any) -> None:
        requested = {f"t{t}": hps.Bags(part, offsets[t]) for t, part in enumerate(torch.split(keys, counts))}
        server.lookup_pooled(requested, "bench", 0, out=out, wait=wait)

    def plain(keys: Any) -> None:
        server.lookup_concatenated(keys, counts, vectors, "bench", 0, wait=wait)

    def answered() -> tuple[int, int]:
        server.metrics.hit_rates("bench")  # which counts what nobody waited for
        counters = [server.metrics.table("bench", f"t{t}") for t in range(len(HOTNESS))]
        return sum(each.keys for each in counters), sum(each.hits[0] for each in counters)

    for _ in range(warm):
        bags(draw())
    torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {"bags": [], "rows": []}
    before = answered()
    for i in range(calls):
        for name, way in (("bags", bags), ("rows", plain)):
            keys = draw()
            out.fill_(torch.nan)
            torch.cuda.synchronize()
            start = time.perf_counter()
            way(keys)
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            if i in (0, calls - 1) and name == "bags":
                requested, sums = keys.cpu().numpy(), out.cpu().numpy()
                ends = np.cumsum(counts)
                for t, hot in enumerate(HOTNESS):
                    check_sums(requested[ends[t] - counts[t] : ends[t]], hot, dim, t, sums[:, t * dim : (t + 1) * dim])
    after = answered()
    figures = {
        "p50_ms": float(np.median(seconds["bags"])) * 1e3,
        "rows_p50_ms": float(np.median(seconds["rows"])) * 1e3,
        "mkeys_per_s": sum(counts) / float(np.median(seconds["bags"])) / 1e6,
        "hit_rate": (after[1] - before[1]) / max(1, after[0] - before[0]),
        "ideal_hit_rate": ideal_hit_rate(rows // 10, rows),
    }
    axes = {"tables": len(HOTNESS), "batch": batch, "dim": dim, "alpha": ALPHA, "rows": rows, "cache": 0.1, "wait": wait}
    report.add(axes, figures)
