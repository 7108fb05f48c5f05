"""What a miss of the GPU's cache costs when its vector is in the hash map: read in place over the link, or fetched and copied.

`link` is a cache that is attached to the hash map, `index` one that keeps the map's index on the device, `copy` one that is not
attached, `link, dense` one that is attached to a dense table of the same keys, and `file` one that is attached to a row file of
them, in page cache. `int8` rows have elements of 0 to 255. Limit of the misses: a plain kernel that
copies the same pinned rows from known addresses in ascending order, in the same run; in the order of the keys it is given
beside it. It runs many times in a row, so that translations of addresses are at hand; where keys come by popularity, `link_us`
is what it takes for the rows that such a lookup misses, after other work on the device.

Every float of every timed answer is compared on the device. The start of a row file is timed from opening the database to a
cache that is attached and has a tenth of the rows.

Each part has a time limit. A part that fails becomes a row with its error, and the others go on.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cupy
import numpy as np
import torch
from numba import njit

from benchmarks.gpu import popular_keys, wake
from benchmarks.harness import ALPHA, Report, gpu_facts, ideal_hit_rate, microseconds, require
from hps.cache.cuda.cache import CupyCache
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.session import CachedSession, SessionSettings
from hps.errors import HPSError
from hps.ground.hashing import mix
from hps.ground.memory.host_tables import FileLayout, HostTable
from hps.ground.rows import encode
from hps.statistics.metrics import Metrics
from hps.stores.base import LoadRecord
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.hash_map.layout import U0, row_of, search, vector_of
from hps.stores.row_files.database import RowFilesDatabase
from hps.stores.row_files.row_file import RowFile
from hps.tensors.batch import Batch
from hps.types import FloatArray, KeyArray, TableSpec

_DEVICE = "cuda"
_KERNELS = r"""
// A group of lanes copies AHEAD rows, all their loads in flight before the first store.
extern "C" __global__ void __launch_bounds__(256)
gather(const unsigned long long* addresses, float4* out, unsigned n, unsigned units) {
    const unsigned lanes = units < 32 ? units : 32;
    const unsigned first = (blockIdx.x * 256 + threadIdx.x) / lanes * AHEAD;
    const float4* row[AHEAD];
    float4 value[AHEAD];
#pragma unroll
    for (unsigned j = 0; j < AHEAD; ++j) row[j] = first + j < n ? reinterpret_cast<const float4*>(addresses[first + j]) : 0;
    for (unsigned unit = threadIdx.x % lanes; unit < units; unit += lanes) {
#pragma unroll
        for (unsigned j = 0; j < AHEAD; ++j) if (row[j]) value[j] = row[j][unit];
#pragma unroll
        for (unsigned j = 0; j < AHEAD; ++j) if (row[j]) out[size_t(first + j) * units + unit] = value[j];
    }
}

extern "C" __global__ void __launch_bounds__(256)
count_wrong(const long long* keys, const float* out, size_t n, unsigned dim, unsigned most, unsigned long long* wrong) {
    unsigned found = 0;
    for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n * dim; i += gridDim.x * 256ull) {
        const long long value = keys[i / dim] * 2654435761ll + static_cast<long long>(i % dim) * 40503ll;
        const unsigned j = i % dim;
        const unsigned expected = most == 255 && j < 2 ? j * 255 : (value >> 7) & most;
        found += !(out[i] == static_cast<float>(expected));
    }
    if (found) atomicAdd(wrong, static_cast<unsigned long long>(found));
}
"""


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables."""
    report.about |= gpu_facts()
    tables = [(1 << 17, 128), (1 << 17, 32)] if quick else [(1 << 24, 128), (1 << 24, 32), (1 << 22, 128)]
    for rows, dim, dense in [(*table, dense) for table in tables for dense in (False, True)]:
        about = f"{rows} {'dense ' if dense else ''}rows x {dim}"
        table = report.part(f"filling {about}", 90, partial(Table, rows, dim, dense))
        if table is None:
            continue
        for path in ("link",) if dense else ("link", "index"):
            report.part(f"misses, {path}, {about}", 60, partial(_misses, report, table, path, quick))
        if rows != 1 << 22:
            if not dense:
                report.part(f"misses, {about}", 45, partial(_misses, report, table, "copy", quick))
            for path in ("link",) if dense else ("link", "index", "copy"):
                report.part(f"mixed, {path}, {about}", 45, partial(_mixed, report, table, path, quick))
                report.part(f"4,096 keys, {path}, {about}", 30, partial(_small, report, table, path, quick))
        report.part(f"closing {about}", 30, table.close)


# -- a table, and the caches above it ----------------------------------------------------------------------------------


@njit(nogil=True)
def _fill(keys, vectors, most):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        base = keys[i] * 2654435761
        for j in range(vectors.shape[1]):
            vectors[i, j] = np.float32(((base + j * 40503) >> 7) & most)
        if most == 255:  # the elements are their codes
            vectors[i, 0], vectors[i, 1] = 0, 255


@njit(nogil=True)
def _find(layout, keys, addresses):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        bucket, entry = search(layout, mix(keys[i]), keys[i])
        addresses[i] = vector_of(layout, row_of(bucket, entry)) if bucket else U0


class Table:
    """Rows 0 to `rows` - 1 in the hash map; their vectors can be computed from their keys. *One per thread.*

    Attributes:
        most: bits of the largest element.
    """

    def __init__(self, rows: int, dim: int, dense: bool = False, row_dtype: str = "float32") -> None:
        self.rows = rows
        self.dense = dense
        self.dim = dim
        self.spec = TableSpec("bench", f"items{dim}", dim, 0.0, 1 << 20, row_dtype=row_dtype)
        self.most = 0xFF if row_dtype == "int8" else 0xFFFFFF
        self.host: HostTable | None = None
        self._caches: list[CupyCache] = []
        self._sessions: dict[str, tuple[CachedSession, Metrics]] = {}
        self.database: HashMapDatabase | RowFilesDatabase = self._filled()
        ids = np.random.default_rng(31337).permutation(rows).astype(np.int64, copy=False)
        self.by_rank = torch.from_numpy(ids).to(_DEVICE)

    def _filled(self) -> HashMapDatabase | RowFilesDatabase:
        rows, database = self.rows, HashMapDatabase()
        database.open_table(self.spec.tag, self.spec.width)
        database.reserve(self.spec.tag, rows, [np.arange(rows)] if self.dense else ())
        step = 1 << 18
        with ThreadPoolExecutor(6) as pool:  # a batch is written while the next ones are made
            made = [pool.submit(self._batch, start, min(start + step, rows)) for start in range(0, min(rows, 6 * step), step)]
            for start in range(0, rows, step):
                database.insert(self.spec.tag, *made.pop(0).result())
                later = start + 6 * step
                if later < rows:
                    made.append(pool.submit(self._batch, later, min(later + step, rows)))
        return database

    def _batch(self, start: int, stop: int) -> tuple[KeyArray, FloatArray]:
        keys = np.arange(start, stop, dtype=np.int64)
        return keys, encode("filling", self.vectors(keys), self.spec.row_dtype)

    def axes(self, path: str, n: int) -> dict[str, Any]:
        """Axes of a row of the results."""
        axes = {"path": f"{path}, dense" if self.dense else path, "keys": n, "dim": self.dim, "rows": self.rows}
        return axes if self.spec.row_dtype == "float32" else axes | {"row_dtype": self.spec.row_dtype}

    def vectors(self, keys: KeyArray) -> FloatArray:
        """The rows of keys, (n, dim)."""
        vectors = np.empty((keys.size, self.dim), np.float32)
        _fill(keys, vectors, self.most)
        return vectors

    def cache(self, path: str, capacity: int = 0) -> CupyCache:
        """A new cache for so many rows, or a tenth of all, over the link or not."""
        cache = CupyCache.create([self.spec], [capacity or self.rows // 10], 0)
        self._caches.append(cache)
        if path != "copy":
            start = time.perf_counter()
            self.host = self.database.host_table(self.spec.tag)
            refusal = (
                "this database has none such"
                if self.host is None
                else cache.attach(0, self.host, authoritative=True, index=path == "index")
            )
            if refusal:
                raise RuntimeError(f"the table cannot be read in place: {refusal}")
            print(f"# attached in {time.perf_counter() - start:.1f} s", flush=True)
        return cache

    def session(self, path: str) -> tuple[CachedSession, Metrics]:
        """The session of a path; the first call makes it, with an empty cache."""
        if path not in self._sessions:
            self._sessions[path] = self.new_session(self.cache(path))
        return self._sessions[path]

    def new_session(self, cache: CupyCache) -> tuple[CachedSession, Metrics]:
        """A session over a cache; every lookup is complete."""
        metrics = Metrics()
        chain = DatabaseChain(self.database, None, metrics=metrics)
        chain.open_table(self.spec)
        coalescer = FetchCoalescer(chain.fetch, metrics)
        return CachedSession([self.spec], cache, chain, coalescer, SessionSettings(hit_rate_threshold=1.1), metrics), metrics

    def addresses(self, keys: KeyArray) -> np.ndarray:
        """Where the rows of keys lie: (n,) uint64."""
        layout = None if self.host is None else self.host.layout()
        if layout is None:
            raise RuntimeError("the table is not pinned")
        if layout.file is not None:
            return self._addresses_in(layout.file, keys)
        found = np.empty(keys.size, np.uint64)
        with ThreadPoolExecutor(8) as pool:
            pairs = zip(np.array_split(keys, 8), np.array_split(found, 8), strict=True)
            list(pool.map(lambda pair: _find(layout.words, *pair), pairs))
        if not found.all():
            raise RuntimeError("a key is not in the table: the layout is not what this benchmark takes it for")
        return found

    def _addresses_in(self, file: FileLayout, keys: KeyArray) -> np.ndarray:
        raise RuntimeError("the table is in a hash map")

    def close(self) -> None:
        """Give the memory of both sides back."""
        self._sessions = {}
        for cache in self._caches:
            cache.close()
        self.database.close()
        torch.cuda.empty_cache()


class FileTable(Table):
    """Likewise, in a row file of a directory of its own."""

    def _filled(self) -> RowFilesDatabase:
        self._directory = TemporaryDirectory()
        database = RowFilesDatabase(self._directory.name)
        database.open_table(self.spec.tag, self.spec.width)
        step = 1 << 20
        for start in range(0, self.rows, step):
            batch = self._batch(start, min(start + step, self.rows))
            database.load_chunk(self.spec.tag, *batch, LoadRecord("bench", self.rows, self.rows))
        database.finish_load(self.spec.tag)
        return database

    def _addresses_in(self, file: FileLayout, keys: KeyArray) -> np.ndarray:
        """Where the records of keys lie, behind which the rows do."""
        mapped = RowFile(next(Path(self._directory.name).glob("tables/*.rows")))
        with ThreadPoolExecutor(8) as pool:
            numbers = np.concatenate(list(pool.map(mapped.numbers, np.array_split(keys, 8))))
        found: np.ndarray = file.records + numbers.astype(np.uint64) * np.uint64(file.record_bytes)
        return found

    def start(self, report: Report) -> None:
        """Time a start, up to a cache with a tenth of the rows; earlier caches are closed."""
        super().close()
        warm = self.by_rank[: self.rows // 10].cpu().numpy()
        begun = time.perf_counter()
        self.database = RowFilesDatabase(self._directory.name)
        self.database.open_table(self.spec.tag, self.spec.width)
        figures = {"open_s": time.perf_counter() - begun}
        cache = CupyCache.create([self.spec], [self.rows // 10], 0)
        self._caches.append(cache)
        allocated = time.perf_counter()
        if refusal := cache.attach(0, self.database.host_table(self.spec.tag), authoritative=True):
            raise RuntimeError(f"the table cannot be read in place: {refusal}")
        figures["attach_s"] = time.perf_counter() - allocated
        buffer, step = cache.host_buffer((1 << 16, self.spec.width), np.float32), 1 << 16
        for first in range(0, warm.size, step):
            keys = warm[first : first + step]
            found = np.zeros(keys.size, np.bool_)
            self.database.fetch(self.spec.tag, keys, buffer[: keys.size], found)
            require(bool(found.all()), "a row that is loaded")
            cache.insert(0, keys, buffer[: keys.size])
        figures["all_s"] = time.perf_counter() - begun
        keys = self.by_rank[:4096].contiguous()
        out = torch.full((4096, self.dim), torch.nan, device=_DEVICE)
        lookup = cache.create_lookup()
        lookup.query(Batch.of(0, keys, out))
        lookup.finish()
        check(keys, out, self.most)
        report.add({"work": "start", **self.axes("file", warm.size)}, figures)

    def close(self) -> None:
        super().close()
        self._directory.cleanup()


def files(report: Report, quick: bool) -> None:
    """Measure a row file beside the hash map of the same rows."""
    for rows, dim, row_dtype in [(1 << 17, 128, "float32")] if quick else [(1 << 24, 128, "float32"), (1 << 24, 128, "int8")]:
        for kind, path in ((Table, "index"), (FileTable, "file")):
            about = f"{rows} {row_dtype} rows x {dim}, {path}"
            table = report.part(f"filling {about}", 120, partial(kind, rows, dim, row_dtype=row_dtype))
            if table is None:
                continue
            report.part(f"misses, {about}", 60, partial(_misses, report, table, path, quick))
            report.part(f"mixed, {about}", 45, partial(_mixed, report, table, path, quick))
            if isinstance(table, FileTable):
                report.part(f"start, {about}", 60, partial(table.start, report))
            report.part(f"closing {about}", 30, table.close)


@lru_cache
def _kernel(name: str, ahead: int = 1) -> Any:
    return cupy.RawModule(code=f"#define AHEAD {ahead}\n{_KERNELS}").get_function(name)


def check(keys: Any, out: Any, most: int = 0xFFFFFF) -> None:
    """Compare every float of (n, dim) answers with what their keys say."""
    n, dim = out.shape
    wrong = torch.zeros(1, dtype=torch.int64, device=_DEVICE)
    arguments = (keys.data_ptr(), out.data_ptr(), np.uint64(n), np.uint32(dim), np.uint32(most), wrong.data_ptr())
    _kernel("count_wrong")((2048,), (256,), arguments)
    require(not wrong.item(), f"an answer ({int(wrong.item())} of {n * dim} floats)")


def _seconds(call: Callable[[int], Any], calls: int) -> float:
    """Seconds of one of `calls` calls in a row, until the device is done with all of them."""
    wake()
    start = time.perf_counter()
    for i in range(calls):
        call(i)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def _each(call: Callable[[int], Any], calls: int) -> dict[str, float]:
    """Median and 99th percentile of calls that each wait for the device."""

    def waited(i: int) -> None:
        call(i)
        torch.cuda.synchronize()

    return _answers(waited, calls)


def _answers(call: Callable[[int], Any], calls: int) -> dict[str, float]:
    """Median and 99th percentile of calls that wait for their answers; admissions that nobody waits for end between them."""
    wake()
    seconds = []
    for i in range(calls):
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return microseconds(seconds)


# -- misses --------------------------------------------------------------------------------------------------------------


def _misses(report: Report, table: Table, path: str, quick: bool) -> None:
    """Distinct keys that were never asked for, against a gather of the same rows."""
    cache = table.cache(path)
    session, _metrics = table.new_session(cache)
    lookup = cache.create_lookup()
    fresh = torch.randperm(table.rows, device=_DEVICE)
    start = 0

    def query(batch: Batch) -> None:
        left = lookup.query(batch)
        lookup.finish()
        if left or list(lookup.linked) != [batch.sizes[0]]:
            raise RuntimeError(
                f"{left} of {batch.sizes[0]} keys were left for the host, {list(lookup.linked)} came over the link"
            )

    def enqueue(batch: Batch) -> None:
        lookup.enqueue(batch)

    def through_the_session(batch: Batch) -> None:
        session.run(batch)

    ways = {"": through_the_session} if path == "copy" else {"": query, "enqueued_": enqueue}
    for n, share in ((512, 0.2), (4096, 0.5)) if quick else ((4096, 0.1), (32_768, 0.2), (262_144, 0.65)):
        sets = int(table.rows * share) // n
        warm = min(5, max(1, sets // 10))
        calls = min(16 if path == "copy" else 150, (sets - warm) // (1 + len(ways)))
        keys = fresh[start : start + sets * n].view(-1, n)
        start += int(table.rows * share)
        outs = torch.full((calls, n, table.dim), torch.nan, device=_DEVICE)

        batches = [Batch.of(0, requested, outs[max(i - warm, 0) % calls]) for i, requested in enumerate(keys)]

        def ask(base: int, way: Callable[[Batch], None], i: int, batches: list[Batch] = batches) -> None:
            way(batches[base + i])

        _seconds(partial(ask, 0, ways[""]), warm)
        figures: dict[str, Any] = _each(partial(ask, warm, ways[""]), calls)
        base = warm
        for name, way in ways.items():
            base += calls
            outs.fill_(torch.nan)
            try:
                seconds = _seconds(partial(ask, base, way), calls)
            except HPSError as error:  # this cache cannot do that
                figures[f"{name}error"] = str(error)
                continue
            check(keys[base : base + calls].reshape(-1), outs.view(-1, table.dim), table.most)
            figures[f"{name}mkeys_per_s"] = n / seconds / 1e6
        figures |= _gathered(table, keys[base : base + calls], outs, figures)
        report.add({"work": "misses", **table.axes(path, n)}, figures)
        del outs, batches, ask


def _gathered(table: Table, keys: Any, outs: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """What a plain kernel takes for the same rows, in the order of their place and in that of the keys."""
    layout = None if table.host is None else table.host.layout()
    if layout is None or layout.file is not None or table.spec.row_dtype != "float32":
        return {}  # the plain kernel reads rows of whole units
    calls, n = keys.shape
    found = table.addresses(keys.cpu().numpy().reshape(-1)).reshape(calls, n)
    order = np.argsort(found, axis=1)
    lists = {
        "gather": (np.take_along_axis(found, order, 1), torch.gather(keys, 1, torch.from_numpy(order).to(_DEVICE))),
        "random_gather": (found, keys),
    }
    units = table.dim // 4
    figures = {f"{name}_mkeys_per_s": 0.0 for name in lists}
    for name, (addresses, requested) in lists.items():
        on_device = torch.from_numpy(addresses.view(np.int64)).to(_DEVICE)
        for ahead in (1, 4):
            kernel, blocks = _kernel("gather", ahead), -(-n // (256 // min(units, 32) * ahead))

            def call(i: int, kernel: Any = kernel, blocks: int = blocks, addresses: Any = on_device) -> None:
                arguments = (addresses[i].data_ptr(), outs[i].data_ptr(), np.uint32(n), np.uint32(units))
                kernel((blocks,), (256,), arguments)

            outs.fill_(torch.nan)
            call(0)
            rate = n / min(_seconds(call, calls), _seconds(call, calls)) / 1e6
            check(requested.reshape(-1), outs.view(-1, table.dim))
            if rate > figures[f"{name}_mkeys_per_s"]:
                figures[f"{name}_mkeys_per_s"] = rate
                if name == "gather":
                    figures["gather_p50_us"] = _each(call, calls)["p50_us"]
    for name in ("", "enqueued_"):
        if rate := ours.get(f"{name}mkeys_per_s"):
            figures[f"{name}of_gather"] = rate / figures["gather_mkeys_per_s"]
    return figures | {"p50_of_gather": figures["gather_p50_us"] / ours["p50_us"]}


# -- traffic -------------------------------------------------------------------------------------------------------------


def _traffic(table: Table, n: int, batches: int, random: Any) -> list[Any]:
    return [popular_keys(table.by_rank, n, random) for _ in range(batches)]


def _mixed(report: Report, table: Table, path: str, quick: bool) -> None:
    """Batches of power-law keys through the session: the cache is warmed by them, and measured after 200 and 600 of them."""
    n, calls = (4096, 10) if quick else (262_144, 30)
    session, metrics = table.session(path)
    counters = metrics.table("bench", table.spec.table_name)
    lookup = session.cache.create_lookup()  # type: ignore[union-attr]
    random = torch.Generator(_DEVICE).manual_seed(report.seed)
    ideal = ideal_hit_rate(table.rows // 10, table.rows)
    outs = torch.full((calls, n, table.dim), torch.nan, device=_DEVICE)

    def warm(batches: int) -> float:
        """Let traffic pass; returns its hit rate."""
        missed, before = 0, counters.misses[0]
        for keys in _traffic(table, n, batches, random):
            batch = Batch.of(0, keys, outs[0])
            if path == "copy":
                session.run(batch)
                continue
            lookup.query(batch)
            lookup.finish()
            missed += sum(lookup.linked)
        return 1.0 - (counters.misses[0] - before if path == "copy" else missed) / (batches * n)

    done = 0
    for after in (200, 600):
        while done < after:
            hit_rate = warm(20)
            done += 20
        figures: dict[str, Any] = {"hit_rate": hit_rate, "of_ideal": hit_rate / ideal}
        batches = _traffic(table, n, calls, random)

        def ask(way: Callable[[Batch], None], i: int) -> None:
            way(Batch.of(0, batches[i], outs[i]))  # noqa: B023 - called within this pass

        figures |= _each(partial(ask, lambda batch: session.run(batch)), calls)
        ways = {"": lambda batch: session.run(batch)}
        if path != "copy":
            ways["enqueued_"] = lambda batch: lookup.enqueue(batch)
        for name, way in ways.items():
            batches = _traffic(table, n, calls, random)
            outs.fill_(torch.nan)
            admitted = session.cache.stats(0).inserts  # type: ignore[union-attr]
            try:
                seconds = _seconds(partial(ask, way), calls)
            except HPSError as error:
                figures[f"{name}error"] = str(error)
                continue
            check(torch.cat(batches), outs.view(-1, table.dim), table.most)
            admitted = session.cache.stats(0).inserts - admitted  # type: ignore[union-attr]
            figures[f"{name}mkeys_per_s"] = n / seconds / 1e6
            figures[f"{name}admitted_per_key"] = admitted / (calls * n)
        if path not in ("copy", "file") and table.spec.row_dtype == "float32":
            needed = _link_us(table, session.cache, _traffic(table, n, 5, random), outs[0])  # type: ignore[arg-type]
            figures |= {"link_us": needed, "of_link": needed / (n / figures["mkeys_per_s"])}
        done += 3 * calls // 20 * 20
        report.add({"work": "mixed", **table.axes(path, n), "alpha": ALPHA, "batches_before": after}, figures)


def _link_us(table: Table, cache: CupyCache, batches: Sequence[Any], out: Any) -> float:
    """What a plain kernel takes for the distinct rows that lookups of these keys miss, in the order of their place."""
    resident, scratch = np.sort(cache.dump(0)), torch.empty(1 << 28, device=_DEVICE)
    units, measured = table.dim // 4, []
    for keys in batches:
        distinct = np.unique(keys.cpu().numpy())
        missed = distinct[~np.isin(distinct, resident, assume_unique=True)]
        addresses = torch.from_numpy(np.sort(table.addresses(missed)).view(np.int64)).to(_DEVICE)
        kernel, blocks = _kernel("gather"), -(-missed.size // (256 // min(units, 32)))
        scratch.zero_()  # translations of host addresses are no longer at hand
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        kernel((blocks,), (256,), (addresses.data_ptr(), out.data_ptr(), np.uint32(missed.size), np.uint32(units)))
        stop.record()
        torch.cuda.synchronize()
        measured.append(1e3 * start.elapsed_time(stop))
    return float(np.median(measured[1:]))


# -- small lookups -------------------------------------------------------------------------------------------------------


def _draws(
    resident: KeyArray, rows: int, n: int, missing: int, calls: int, rng: np.random.Generator
) -> tuple[list[Any], list[Any]]:
    """Sets of n resident keys, to be asked in turn; and one set a call of which `missing` keys were never asked before."""
    hits = [torch.from_numpy(rng.choice(resident, n)).to(_DEVICE) for _ in range(16)]
    absent = np.ones(rows, np.bool_)
    absent[resident] = False
    fresh = rng.permutation(np.flatnonzero(absent))[: missing * calls].reshape(-1, missing)
    some = [rng.permutation(np.concatenate([rng.choice(resident, n - missing), part])) for part in fresh]
    return hits, [torch.from_numpy(keys).to(_DEVICE) for keys in some]


def _ratios(hits: dict[str, float], some: dict[str, float]) -> dict[str, float]:
    figures = {f"hits_{name}": value for name, value in hits.items()} | some
    return figures | {"p50_ratio": some["p50_us"] / hits["p50_us"], "p99_ratio": some["p99_us"] / hits["p99_us"]}


def _small(report: Report, table: Table, path: str, quick: bool) -> None:
    """4,096 resident keys through the session, and 4,096 of which a tenth is missing, others each time."""
    n, calls = (512, 30) if quick else (4096, 1000)
    session, _metrics = table.session(path)
    cache: Any = session.cache
    rng = np.random.default_rng(report.seed)
    hits, some = _draws(cache.dump(0), table.rows, n, n // 10, calls + 20, rng)
    outs = torch.full((16, n, table.dim), torch.nan, device=_DEVICE)

    def timed(sets: Sequence[Any]) -> dict[str, float]:
        for keys in sets[:20]:
            session.run(Batch.of(0, keys, outs[0]))
        sets = sets[20:] if len(sets) > 20 else sets
        batches = [Batch.of(0, keys, outs[i % 16]) for i, keys in enumerate(sets)]
        figures = _answers(lambda i: session.run(batches[i % len(sets)]), calls)
        for i in range(calls - 16, calls):
            check(sets[i % len(sets)], outs[i % len(sets) % 16], table.most)
        return figures

    axes = table.axes(path, n)
    report.add({"work": "session, 10 % missing", **axes}, _ratios(timed(hits), timed(some)))
