"""Pooled lookups on a GPU: bags of resident keys against a plain gather-and-sum of known rows, and of misses from the hash map.

Beside ours stand, in the same run: the best of several plain kernels that add up the same rows of the same memory, their
places known (`benchmarks/pooled_anchor.py`), and torch's `embedding_bag` over whole tables, one call a table. The bags are
those of MLPerf's DLRM-DCNv2: 26 tables of 1 to 100 keys a sample. Figures are of one launch within a CUDA graph of many, each
with other keys, unless they say otherwise. Every answer is checked against float64.

Each part has a time limit. A part that fails becomes a row with its error, and the others go on.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pooled_anchor, served
from benchmarks.harness import Report, add, part, time_calls
from benchmarks.served import document

HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_ALPHA = 1.05
_VALUES = "value = ((key * 2654435761LL + column * 40503) >> 7) & 0xFFFFFF"
_KEYS_IN_FLIGHT = 1 << 23  # of the batches of a case, so that no small batch stays in the L2 cache


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables."""
    import torch

    report.about |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, "torch": torch.__version__}
    rows = 1 << (14 if quick else 20)
    cases = [(128, HOTNESS, [(4096, _ALPHA), (4096, 0.0), (256, _ALPHA), (256, 0.0)])]
    cases += [(dim, HOTNESS, [(4096, _ALPHA), (4096, 0.0)]) for dim in (32, 64)]
    for dim, hotness, batches in cases:
        part(report, f"resident, dim {dim}", 60, partial(_resident, report, rows, dim, hotness, batches))
    one = partial(_resident, report, 8 * rows, 128, (20,), [(4096, _ALPHA), (4096, 0.0)])
    part(report, "resident, one table", 40, one)
    with tempfile.TemporaryDirectory(prefix="hps-pooled-", dir=os.environ.get("HPS_BENCH_DIR")) as directory:
        part(report, "a tenth cached", 90, partial(_cached, report, Path(directory), 10_000 if quick else 200_000))
    _summary(report)


def _summary(report: Report) -> None:
    """Print what one wants to know first."""
    for row in report.rows:
        axes, figures = row["axes"], row["figures"]
        if "of_anchor" in figures:
            what = f"{axes['tables']} tables x {axes['batch']} bags, dim {axes['dim']}, alpha {axes['alpha']}, {axes['bags']}"
            rate = f"{figures['mkeys_per_s']:.0f} M keys/s, {figures['us']:.1f} us"
            print(f"= {what}: {rate}, {figures['of_anchor']:.3f} of the anchor", flush=True)
        elif "hit_rate" in figures:
            print(f"= a tenth cached: {axes} {figures}", flush=True)
        elif "error" in figures:
            print(f"= {axes['work']}: {figures['error']}", flush=True)


class _Tables:
    """Whole tables, and a cache that holds all of their rows; keys are 0 to rows - 1. *One per thread.*"""

    def __init__(self, rows: int, dim: int, count: int) -> None:
        import cupy

        from benchmarks.gpu_timing import slots_of_resident_keys
        from hps.cache.cuda.cache import CupyCache
        from hps.types import TableSpec

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
        import cupy

        columns = cupy.arange(self.dim, dtype=cupy.int64)[None, :] + 1000 * table
        exact = cupy.empty((keys.size // hotness, self.dim), cupy.float64)
        for start in range(0, exact.shape[0], 1024):  # not all terms at once
            asked = keys[start * hotness : (start + 1024) * hotness]
            terms = self.values(asked[:, None], columns).astype(cupy.float64)
            if weights is not None:
                terms *= weights[start * hotness : (start + 1024) * hotness, None]
            exact[start : start + 1024] = terms.reshape(-1, hotness, self.dim).sum(axis=1)  # terms are never negative
        terms_rounded = hotness if hotness > 1 or weights is not None else 0
        return bool((cupy.abs(found - exact) <= terms_rounded * 2.0**-23 * exact).all())

    def close(self) -> None:
        """Give the memory back."""
        import cupy
        import torch

        self.cache.close()
        self.whole, self.places, self.known = [], [], []
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()


class _Batch:
    """Keys of one batch in one array, by table, and where their rows lie in the cache."""

    def __init__(self, tables: _Tables, hotness: Sequence[int], batch: int, alpha: float, random: Any) -> None:
        import cupy

        g = 1.0 - alpha
        drawn, places = [], []
        for table, each in enumerate(hotness):
            known = tables.known[table]
            u = random.random(batch * each)
            ranks = ((u * (float(known.size) ** g - 1.0) + 1.0) ** (1.0 / g)) if alpha else u * known.size
            drawn.append(known[cupy.minimum(ranks.astype(cupy.int64), known.size - 1)])
            places.append(tables.places[table][drawn[-1]])
        self.all_keys = cupy.concatenate(drawn)
        self.all_places = cupy.concatenate(places)
        ends = np.cumsum([batch * each for each in hotness])
        self.spans = [slice(int(end) - batch * each, int(end)) for end, each in zip(ends, hotness, strict=True)]
        self.keys = [self.all_keys[span] for span in self.spans]


def _resident(report: Report, rows: int, dim: int, hotness: Sequence[int], cases: Sequence[tuple[int, float]]) -> None:
    """Bags of resident keys, by batch and popularity."""
    start = time.perf_counter()
    tables = _Tables(rows, dim, len(hotness))
    print(f"# {len(hotness)} tables of {rows} rows x {dim}: {time.perf_counter() - start:.1f} s", flush=True)
    try:
        for batch, alpha in cases:
            name = f"resident, {len(hotness)} tables, dim {dim}, batch {batch}, alpha {alpha}"
            part(report, name, 30, partial(_case, report, tables, hotness, batch, alpha))
    finally:
        tables.close()


def _case(report: Report, tables: _Tables, hotness: Sequence[int], batch: int, alpha: float) -> None:
    import cupy

    random = cupy.random.default_rng(report.seed)
    keys = batch * sum(hotness)
    batches = [_Batch(tables, hotness, batch, alpha, random) for _ in range(max(4, min(64, _KEYS_IN_FLIGHT // keys)))]
    out = cupy.empty((batch, tables.dim * len(hotness)), cupy.float32)
    axes = {"tables": len(hotness), "batch": batch, "dim": tables.dim, "alpha": alpha, "rows": tables.rows}
    moved = 4 * tables.dim * (keys + batch * len(hotness))

    def check(what: str, each: _Batch, weights: Any = None) -> None:
        for table, hot in enumerate(hotness):
            found = out[:, table * tables.dim : (table + 1) * tables.dim]
            if not tables.right(table, each.keys[table], hot, found, None if weights is None else weights[table]):
                raise RuntimeError(f"{what}: the sums of table {table} are wrong; nothing is recorded")
        out.fill(cupy.nan)

    def rates(seconds: float) -> dict[str, float]:
        return {"us": seconds * 1e6, "mkeys_per_s": keys / seconds / 1e6, "gb_per_s": moved / seconds / 1e9}

    anchor = _anchor(tables, hotness, batches, out, check)
    add(report, axes | {"bags": "plain kernel"}, rates(anchor["seconds"]) | anchor)
    kinds = ["offsets", "fixed hotness", "weights"] if alpha and batch == 4096 else ["offsets"]
    for kind in kinds:
        name = f"ours, {kind}, batch {batch}, alpha {alpha}, dim {tables.dim}"
        found = part(report, name, 30, partial(_ours, tables, hotness, batches, out, check, kind))
        if found is not None:
            ratio = {"of_anchor": anchor["seconds"] / found["seconds"]}
            if "one_call_s" in found:
                ratio["one_call_of_anchor"] = anchor["one_call_s"] / found["one_call_s"]
            add(report, axes | {"bags": kind}, rates(found["seconds"]) | ratio | found)
    name = "torch embedding_bag"
    call = partial(_torch_bags, tables, hotness, batches, out, check)
    found = part(report, f"{name}, batch {batch}, dim {tables.dim}", 30, call)
    if found is not None:
        ratio = {"of_anchor": anchor["seconds"] / found["seconds"]}
        add(report, axes | {"bags": name}, rates(found["seconds"]) | ratio | found)


_Check = Callable[..., None]


def _offsets(batch: int, hotness: Sequence[int], dtype: Any) -> list[Any]:
    import cupy

    return [cupy.arange(batch + 1, dtype=dtype) * dtype(each) for each in hotness]


def _anchor(tables: _Tables, hotness: Sequence[int], batches: list[_Batch], out: Any, check: _Check) -> dict[str, Any]:
    """The best of the plain kernels: seconds of one launch, and which it is."""
    import cupy

    from benchmarks.gpu_timing import back_to_back, one_call

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
    import hps
    from hps.tensors.bags import pooled_batch

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
    import cupy

    from benchmarks.gpu_timing import back_to_back, one_call

    batch = len(out)
    offsets = None if kind == "fixed hotness" else _offsets(batch, hotness, np.int64)
    weights = None
    if kind == "weights":
        random = cupy.random.default_rng(2)
        weights = [random.random(batch * hot, dtype=cupy.float32) for hot in hotness]
    lookup = tables.cache.create_lookup()

    def call(each: _Batch) -> None:
        missing = lookup.query(_pooled(tables, hotness, each, offsets, weights, out))
        lookup.finish()
        if missing:
            raise RuntimeError(f"{missing} keys are missing: nothing is recorded")

    for each in batches[:2]:
        out.fill(cupy.nan)
        call(each)
        cupy.cuda.Device().synchronize()
        check(f"ours, {kind}", each, weights)

    def whole(i: int) -> None:
        call(batches[i % len(batches)])
        cupy.cuda.get_current_stream().synchronize()

    calls = time_calls(whole, 100)
    figures: dict[str, Any] = {"call_p50_us": calls.p50_s * 1e6, "call_p99_us": calls.p99_s * 1e6}

    def launch(batch: Any) -> None:
        lookup.begin(batch)
        lookup.launch_pool("pool")

    try:  # what the device does of it; the streams of the tensors are those that work is captured on
        asked = [_pooled(tables, hotness, each, offsets, weights, out) for each in batches]
        seconds = back_to_back([partial(launch, each) for each in asked])
        check(f"ours in a graph, {kind}", batches[-1], weights)
        return {"seconds": seconds, "one_call_s": one_call(partial(launch, asked[0]))} | figures
    except Exception as error:  # noqa: BLE001 - the calls' time stands for it
        print(f"# in a graph: {type(error).__name__}: {error}; the time of calls stands for the device's", flush=True)
        return {"seconds": calls.p50_s, "in_a_graph": f"{type(error).__name__}: {error}"[:200]} | figures


def _torch_bags(tables: _Tables, hotness: Sequence[int], batches: list[_Batch], out: Any, check: _Check) -> dict[str, Any]:
    """torch's `embedding_bag` over whole tables: in a graph of its calls, and from Python."""
    import torch
    from torch.nn.functional import embedding_bag

    from benchmarks.gpu_timing import torch_back_to_back

    weights = [torch.from_dlpack(table) for table in tables.whole]
    offsets = [torch.from_dlpack(each) for each in _offsets(len(out), hotness, np.int64)]
    keys = [[torch.from_dlpack(part) for part in each.keys] for each in batches]
    results: list[Any] = []

    def call(i: int) -> None:
        results[:] = [
            embedding_bag(asked, weight, offset, mode="sum", include_last_offset=True)
            for asked, weight, offset in zip(keys[i % len(keys)], weights, offsets, strict=True)
        ]

    def whole(i: int) -> None:
        call(i)
        torch.cuda.synchronize()

    whole(0)
    torch.cat(results, 1, out=torch.from_dlpack(out))
    torch.cuda.synchronize()
    check("torch", batches[0])
    calls = time_calls(whole, 50)
    figures = {"call_p50_us": calls.p50_s * 1e6, "call_p99_us": calls.p99_s * 1e6}
    few = [partial(call, i) for i in range(min(len(keys), 8))]  # a call makes dozens of launches
    try:
        return {"seconds": torch_back_to_back(few)} | figures
    except Exception as error:  # noqa: BLE001 - the calls' time stands for it
        print(f"# in a graph: {type(error).__name__}: {error}; the time of calls stands for it", flush=True)
        return {"seconds": calls.p50_s, "in_a_graph": f"{type(error).__name__}: {error}"[:200]} | figures


def configuration(place: Path, dims: Sequence[int], rows: int, hotness: Sequence[int], **model: Any) -> dict[str, Any]:
    """A server with a table for each width, all in the hash map alone; their files are written once."""
    from hps.models.writer import write_sparse_model
    from hps.tools.cli.tables.sample import sample_chunks

    names = [f"t{table}" for table in range(len(dims))]
    for table, (name, dim) in enumerate(zip(names, dims, strict=True)):
        if not (place / name).exists():
            write_sparse_model(place / name, sample_chunks(rows, dim, table))
    settings = {"maxnum_catfeature_query_per_table_per_sample": list(hotness), "max_batch_size": 4096}
    settings |= {"gpucacheper": 0.1, "cache_refresh_percentage_per_iteration": 0.0, **model}
    return document(served.model([place / name for name in names], dims, "bench", **settings), device="cuda")


def check_sums(keys: np.ndarray, hotness: int, dim: int, seed: int, found: np.ndarray) -> None:
    """Compare (B, dim) sums of B x hotness keys of a sample model with those of float64."""
    from hps.tools.cli.tables.sample import sample_vectors

    terms = sample_vectors(keys, dim, seed).reshape(-1, hotness, dim)
    exact, size = terms.sum(1, dtype=np.float64), np.abs(terms).sum(1, dtype=np.float64)
    if not np.all(np.abs(found - exact) <= hotness * 2.0**-23 * size):
        raise RuntimeError(f"the sums of table {seed} are wrong; nothing is recorded")


def _cached(report: Report, place: Path, rows: int) -> None:
    """Caches of a tenth of the rows above the hash map, warmed by traffic: bags, and rows beside them."""
    import torch

    import hps

    start = time.perf_counter()
    config = configuration(place, [128] * len(HOTNESS), rows, HOTNESS, gpucacheper=0.1, miss_path="link")
    print(f"# files of 26 tables of {rows} rows: {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    with hps.HPS(config) as server:
        print(f"# server: {time.perf_counter() - start:.1f} s", flush=True)
        for wait in (True, False):
            part(report, f"a tenth cached, wait={wait}", 45, partial(_traffic, report, server, torch, rows, wait))


def _traffic(report: Report, server: Any, torch: Any, rows: int, wait: bool) -> None:
    """Batches by popularity, other keys each time: bags and rows in turn, after the cache was warmed by such."""
    import hps

    batch, dim, warm, calls = 4096, 128, 30, 16
    random = torch.Generator("cuda").manual_seed(report.seed + wait)
    by_rank = torch.from_numpy(np.random.default_rng(31337).permutation(rows)).cuda()
    counts = [batch * hot for hot in HOTNESS]
    out = torch.empty(batch, dim * len(HOTNESS), device="cuda")
    vectors = torch.empty(sum(counts), dim, device="cuda")
    offsets = [torch.arange(batch + 1, device="cuda") * hot for hot in HOTNESS]
    g = 1.0 - _ALPHA

    def draw() -> Any:
        u = torch.rand(sum(counts), dtype=torch.float64, device="cuda", generator=random)
        return by_rank[((u * (float(rows) ** g - 1.0) + 1.0) ** (1.0 / g)).to(torch.int64).clamp_(max=rows - 1)]

    def bags(keys: Any) -> None:
        asked = {f"t{t}": hps.Bags(part, offsets[t]) for t, part in enumerate(torch.split(keys, counts))}
        server.lookup_pooled(asked, "bench", 0, out=out, wait=wait)

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
                asked, sums = keys.cpu().numpy(), out.cpu().numpy()
                ends = np.cumsum(counts)
                for t, hot in enumerate(HOTNESS):
                    check_sums(asked[ends[t] - counts[t] : ends[t]], hot, dim, t, sums[:, t * dim : (t + 1) * dim])
    after = answered()
    ideal = (float(rows // 10) ** g - 1.0) / (float(rows) ** g - 1.0)
    figures = {
        "p50_ms": float(np.median(seconds["bags"])) * 1e3,
        "rows_p50_ms": float(np.median(seconds["rows"])) * 1e3,
        "mkeys_per_s": sum(counts) / float(np.median(seconds["bags"])) / 1e6,
        "hit_rate": (after[1] - before[1]) / max(1, after[0] - before[0]),
        "ideal_hit_rate": ideal,
    }
    axes = {"tables": len(HOTNESS), "batch": batch, "dim": dim, "alpha": _ALPHA, "rows": rows, "cache": 0.1, "wait": wait}
    add(report, axes, figures)
