"""The sparse stage of MLPerf's DLRMv3, shaped like it: 8,048 rows of 512 float16 a query, out of host memory.

The rows of one table are in the hash map of this process, which is the authority; the GPU reads misses there in place. Its
cache holds a tenth of them. A query has the ids of a user's history, 6,000, and of 2,048 candidates, all drawn by the same law:
power-law popularity (alpha 1.05) by a random permutation of the ids; or uniform, for which a cache does little.

- `sustained`: threads that look up 1, 4 or 16 queries in one call, call after call. Limit: `torch.index_select` of as many rows
  of a table in device memory.
- `loadgen`: MLCommons LoadGen, scenario Server, with DLRMv3's bound: 99 % within 80 ms. A worker takes all queries that have
  arrived, up to 16, copies their keys from pinned host memory, and looks them up in one call. The sparse stage alone, and with
  a `dense stand-in`: matrix products of about as many FLOPs as DLRMv3's network, which they are not.

All bits of every answer are compared with what its keys say: after the clock of a `sustained` round has stopped; under LoadGen
as part of a worker's turn, after the query counts as answered.

`HPS_DLRMV3_ROWS`, `_SECONDS` (of a run of LoadGen; MLPerf wants 600), `_SHARING` (for two GPUs: values of `device_sharing`, by
comma) and `_LIMIT_S` (no further part begins then) change the run. LoadGen needs `pip install mlcommons-loadgen`.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit

import hps
from benchmarks import loadgen
from benchmarks.harness import ALPHA, Report, ranks_of
from benchmarks.served import document, model
from hps.configuration.load import load_configuration
from hps.types import TableSpec

_MODEL, _TABLE = "dlrm", "item_id"
_CACHE_SHARE = 0.1
_BOUND_S = 0.08
_MOST_ROWS = 60_000_000
_MEMORY_SHARE = 0.6  # of what is free
_FILL_ROWS = 1 << 15
_OUTPUT_BYTES = 8 << 30  # of the answers of one sustained round, which are all kept to be checked
_WORD = r"""
__device__ __forceinline__ unsigned word_of(unsigned key, unsigned place) {
    unsigned x = key * 0x9E3779B1u + place * 0x85EBCA77u;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    x ^= x >> 13;
    return x & 0xBFFFBFFFu;
}
extern "C" __global__ void __launch_bounds__(256)
count_wrong(const long long* keys, const unsigned* words, unsigned long long n, unsigned width, unsigned long long* wrong) {
    unsigned found = 0;
    for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < n * width; i += gridDim.x * 256ull) {
        found += words[i] != word_of(static_cast<unsigned>(keys[i / width]), static_cast<unsigned>(i % width));
    }
    if (found) atomicAdd(wrong, static_cast<unsigned long long>(found));
}
"""


@dataclass(frozen=True)
class Shape:
    """What is measured, and how long. *Immutable.*

    Attributes:
        most: queries that are looked up in one call at most.
        rate: queries a second that are offered to each device.
        library: different queries in host memory.
        hidden, layers: of the dense stand-in: `layers` times (dim -> hidden -> dim).
    """

    rows: int
    history: int = 6000
    candidates: int = 2048
    dim: int = 512
    most: int = 16
    rate: float = 1500.0
    library: int = 16_384
    warm_s: float = 10.0
    sustained_s: float = 1.5
    loadgen_s: float = 20.0
    hidden: int = 4096
    layers: int = 4

    @property
    def keys(self) -> int:
        """Keys of a query."""
        return self.history + self.candidates

    @property
    def dense_flops(self) -> int:
        """FLOPs of the dense stand-in for one query."""
        return self.layers * 2 * 2 * self.keys * self.dim * self.hidden


def shape_of(quick: bool) -> Shape:
    """Return what to measure: as many rows as memory allows, up to 60 M; `quick` takes few."""
    wanted = int(os.environ.get("HPS_DLRMV3_ROWS") or 0)
    if quick:
        small = {"history": 96, "candidates": 32, "most": 4, "rate": 50.0, "library": 256, "warm_s": 0.5, "hidden": 64}
        return Shape(wanted or 20_000, **small, sustained_s=0.2, loadgen_s=2.0)  # type: ignore[arg-type]
    seconds = float(os.environ.get("HPS_DLRMV3_SECONDS") or 20.0)
    return Shape(wanted or min(_MOST_ROWS, int(_MEMORY_SHARE * _free_bytes()) // (2 * Shape(0).dim)), loadgen_s=seconds)


def _free_bytes() -> int:
    """Memory that this process may still take, by the machine and by its control group."""
    with open("/proc/meminfo") as lines:
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


# -- vectors ---------------------------------------------------------------------------------------------------------------


@njit(inline="always")
def _word(key, place):  # type: ignore[no-untyped-def]
    """Two float16 below 2: as `word_of` of the kernel."""
    x = np.uint32(np.uint32(key * np.uint32(0x9E3779B1)) + np.uint32(place * np.uint32(0x85EBCA77)))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x2C1B3C6D))
    x = np.uint32(x ^ (x >> np.uint32(13)))
    return np.uint32(x & np.uint32(0xBFFFBFFF))


@njit(nogil=True)
def fill_words(first, words):  # type: ignore[no-untyped-def]
    """Write the rows of the keys from `first` on: words (n, width) uint32, two float16 each."""
    for i in range(words.shape[0]):
        key = np.uint32(first + i)
        for j in range(words.shape[1]):
            words[i, j] = _word(key, np.uint32(j))


@njit(nogil=True)
def count_wrong_words(keys, words):  # type: ignore[no-untyped-def]
    """Count the words of (n, width) uint32 that are not those of their keys, (n,) int64."""
    wrong = 0
    for i in range(keys.size):
        key = np.uint32(keys[i])
        for j in range(words.shape[1]):
            wrong += words[i, j] != _word(key, np.uint32(j))
    return wrong


class Check:
    """Counts the wrong words of answers, on the device that they are on. *One per thread.*"""

    def __init__(self, device: Any) -> None:
        self._wrong = torch.zeros(1, dtype=torch.int64, device=device)
        self._kernel = None
        self.rows = 0
        if device.type == "cuda":
            import cupy

            from hps.cache.cuda.device import stream_of

            self._cupy, self._stream_of = cupy, stream_of
            with cupy.cuda.Device(device.index):
                self._kernel = cupy.RawModule(code=_WORD).get_function("count_wrong")

    def add(self, keys: Any, out: Any) -> None:
        """Compare answers, (n, dim) float16, on the current stream; does not wait."""
        self.rows += keys.numel()
        if self._kernel is None:
            self._wrong += count_wrong_words(keys.numpy(), out.numpy().view(np.uint32))
            return
        device = out.device.index
        arguments = (
            keys.data_ptr(),
            out.data_ptr(),
            np.uint64(keys.numel()),
            np.uint32(out.shape[1] // 2),
            self._wrong.data_ptr(),
        )
        with self._cupy.cuda.Device(device), self._stream_of(torch.cuda.current_stream(device).cuda_stream):
            self._kernel((1024,), (256,), arguments)

    def end(self) -> int:
        """Wait, and return how many rows were compared since the last call.

        Raises:
            RuntimeError: a word was wrong.
        """
        _wait()  # for all streams
        wrong, rows, self.rows = int(self._wrong.item()), self.rows, 0
        self._wrong.zero_()
        _wait()
        if wrong:
            raise RuntimeError(f"{wrong} words of {rows} rows are wrong: nothing is recorded")
        return rows


def check_itself(device: Any, dim: int) -> None:
    """See that a right answer passes, and that one wrong bit in the last word does not."""
    keys = torch.tensor([0, 7, 2**31, 59_999_999])
    words: np.ndarray = np.empty((4, dim // 2), np.uint32)
    for row, key in enumerate(keys.tolist()):
        fill_words(key, words[row : row + 1])
    out = torch.from_numpy(words.view(np.float16)).to(device)
    check = Check(device)
    check.add(keys.to(device), out)
    check.end()
    words[-1, -1] ^= 1
    check.add(keys.to(device), torch.from_numpy(words.view(np.float16)).to(device))
    try:
        check.end()
    except RuntimeError:
        return
    raise RuntimeError("the check passes a wrong answer")


# -- the table -------------------------------------------------------------------------------------------------------------


def fill(database: Any, spec: TableSpec, rows: int) -> None:
    """Give an empty hash map the rows of keys 0 to `rows` - 1: a dense table, as torch's tables are.

    Threads write the vectors where the rows will lie, since first touches of memory are most of the time; the insertion copies
    each onto itself.
    """
    database.open_table(spec.tag, spec.width)
    database.reserve(spec.tag, rows, [np.arange(rows)])
    _buckets, slabs = database._table(spec.tag).memory
    words = slabs.extents[0].pages.words().view(np.uint32)[: rows * spec.width].reshape(rows, spec.width)

    def made(first: int) -> int:
        fill_words(first, words[first : first + _FILL_ROWS])
        return first

    made(0)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        for first in pool.map(made, range(0, rows, _FILL_ROWS)):
            some = words[first : first + _FILL_ROWS]
            database.insert(spec.tag, np.arange(first, first + len(some)), some.view(np.float32))


class Traffic:
    """Draws keys on a device. *One per thread.*"""

    def __init__(self, rows: int, device: Any, seed: int) -> None:
        self._rows, self._device = rows, device
        self._random = torch.Generator(device).manual_seed(seed)
        shuffled = torch.Generator(device).manual_seed(31337)  # the same on all devices, so that they agree on what is popular
        self._by_rank = torch.randperm(rows, device=device, generator=shuffled)

    def keys(self, n: int, law: str = "power law") -> Any:
        """Return n keys; see `hps.tools.profiling.workloads`."""
        if law == "uniform":
            return torch.randint(self._rows, (n,), device=self._device, generator=self._random)
        uniform = torch.rand(n, dtype=torch.float64, device=self._device, generator=self._random)
        return self._by_rank[ranks_of(uniform, self._rows).long().clamp_(max=self._rows - 1)]


class Server:
    """An `hps.HPS` with the table, and devices to ask. A context manager.

    Model files of the right size that have no content, of which nothing is read, let a model be deployed over rows that are in
    the hash map already.
    """

    def __init__(self, shape: Shape, devices: Sequence[Any], seed: int) -> None:
        self.shape, self.devices = shape, list(devices)
        self._closing = ExitStack()
        place = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="hps-dlrmv3-")))
        for name, row_bytes in (("key", 8), ("emb_vector", 4 * shape.dim)):
            with (place / name).open("wb") as file:
                file.truncate(row_bytes * shape.rows)
        self._place = place
        self.hps = self._closing.enter_context(hps.HPS(self._document({}), deploy_models=False))
        self.traffic = [Traffic(shape.rows, device, seed + i) for i, device in enumerate(self.devices)]

    def _document(self, settings: dict[str, Any]) -> dict[str, Any]:
        on_gpu = self.devices[0].type == "cuda"
        entry = model(
            [self._place],
            [self.shape.dim],
            _MODEL,
            embedding_table_names=[_TABLE],
            row_dtype="float16",
            gpucacheper=_CACHE_SHARE,
            cache_refresh_percentage_per_iteration=0.0,
            max_batch_size=self.shape.most * self.shape.keys,
            miss_path="link" if on_gpu else "auto",
            deployed_device_list=list(range(len(self.devices))),
            **settings,
        )
        return document(
            entry,
            device="cuda" if on_gpu else "cpu",
            volatile_db={"type": "hash_map", "initialize_after_startup": False},
        )

    def fill(self) -> float:
        """Fill the hash map; returns seconds."""
        start = time.perf_counter()
        fill(self.hps._chain.databases[0], self.hps.config.models[0].tables[0], self.shape.rows)
        return time.perf_counter() - start

    def deploy(self, sharing: str) -> float:
        """Deploy the model with new caches over the rows that are there; returns seconds."""
        settings = {"device_sharing": sharing} if sharing else {}
        start = time.perf_counter()
        self.hps.deploy(load_configuration(self._document(settings)).models[0])
        return time.perf_counter() - start

    def look_up(self, keys: Any, out: Any, device: int) -> None:
        """Look keys up, and wait."""
        self.hps.lookup_fromdlpack(keys, out, _MODEL, 0, device)

    def counted(self) -> tuple[int, int]:
        """Keys that were asked so far, and those that the embedding caches had."""
        with self.hps.metrics.lock:
            counters = self.hps.metrics.table(_MODEL, _TABLE)
            return counters.keys, counters.hits[0]

    def held_rows(self) -> int:
        """Rows that all caches have room for."""
        return int(sum(cache.stats(0).capacity_rows for cache in self.hps.model(_MODEL).caches))

    def close(self) -> None:
        """Close the server, and remove the files."""
        self._closing.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@contextmanager
def _hit_rate(server: Server, figures: dict[str, Any]) -> Iterator[None]:
    keys, hits = server.counted()
    yield
    requested, found = server.counted()
    figures["hit_rate"] = (found - hits) / max(requested - keys, 1)


def _wait() -> None:
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)


def _stream(device: Any) -> Any:
    """A context in which torch works on a new stream of a GPU."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


# -- sustained -------------------------------------------------------------------------------------------------------------


def sustained(server: Server, threads: int, queries: int, seconds: float, law: str = "power law") -> dict[str, Any]:
    """Look up `queries` queries a call, from `threads` threads for each device, for some seconds; all answers are checked."""
    shape, devices = server.shape, server.devices
    n, workers = queries * shape.keys, threads * len(devices)
    calls = max(1, min(256, _OUTPUT_BYTES // (2 * n * shape.dim) // workers))
    outs = [
        torch.full((calls, n, shape.dim), torch.nan, dtype=torch.float16, device=devices[worker % len(devices)])
        for worker in range(workers)
    ]
    checks = [Check(device) for device in devices]
    times: list[float] = []
    figures: dict[str, Any] = {}

    def work(worker: int, keys: Any) -> None:
        device = worker % len(devices)
        with _stream(devices[device]):
            for call in range(calls):
                start = time.perf_counter()
                server.look_up(keys[call], outs[worker][call], device)
                times.append(time.perf_counter() - start)

    took, rounds = 0.0, 0
    with ThreadPoolExecutor(workers) as pool, _hit_rate(server, figures):
        while rounds < 2 or took < seconds:
            requested = [server.traffic[worker % len(devices)].keys(calls * n, law).view(calls, n) for worker in range(workers)]
            _wait()
            start = time.perf_counter()
            list(pool.map(work, range(workers), requested))
            took, rounds = took + time.perf_counter() - start, rounds + 1
            for worker, (keys, out) in enumerate(zip(requested, outs, strict=True)):
                checks[worker % len(devices)].add(keys.view(-1), out.view(-1, shape.dim))
                out.fill_(torch.nan)
            for check in checks:
                check.end()
    answered = rounds * workers * calls
    p50, p99 = (1e3 * float(np.quantile(times, share)) for share in (0.5, 0.99))
    rates = {"mrows_per_s": answered * n / took / 1e6, "queries_per_s": answered * queries / took}
    return {**rates, "p50_ms": p50, "p99_ms": p99, **figures}


def warm_up(server: Server, law: str = "power law") -> dict[str, Any]:
    """Let traffic pass until the hit rate stays; returns the last figures."""
    end, before, tried = time.perf_counter() + server.shape.warm_s, -1.0, 0
    while True:
        figures = sustained(server, 4, server.shape.most, server.shape.warm_s / 10, law)
        tried += 1
        if time.perf_counter() > end or (tried > 2 and figures["hit_rate"] - before < 5e-4):
            return figures
        before = figures["hit_rate"]


def index_select(server: Server) -> dict[str, Any]:
    """What torch takes for as many rows of a table in the memory of the first device: the limit."""
    shape, device = server.shape, server.devices[0]
    n = shape.most * shape.keys
    table = torch.zeros((max(1, int(_CACHE_SHARE * shape.rows)), shape.dim), dtype=torch.float16, device=device)
    keys = torch.randint(len(table), (8, n), device=device)
    out = torch.empty((n, shape.dim), dtype=torch.float16, device=device)
    seconds = []
    for i in range(24):
        _wait()
        start = time.perf_counter()
        torch.index_select(table, 0, keys[i % 8], out=out)
        _wait()
        seconds.append(time.perf_counter() - start)
    return {"mrows_per_s": n / float(np.median(seconds[4:])) / 1e6}


# -- queries that arrive -------------------------------------------------------------------------------------------------------


class Library:
    """Queries in host memory, pinned for a GPU: keys (library, keys of a query) int64."""

    def __init__(self, server: Server) -> None:
        shape = server.shape
        pinned = server.devices[0].type == "cuda"
        self.keys = torch.empty((shape.library, shape.keys), dtype=torch.int64, pin_memory=pinned)
        self._traffic = server.traffic[0]

    def draw(self) -> "Library":
        """Draw others."""
        for start in range(0, len(self.keys), 1024):
            some = self.keys[start : start + 1024]
            some.copy_(self._traffic.keys(some.numel()).view(some.shape))
        return self


class DenseStandIn:
    """Matrix products in bfloat16 of `Shape.dense_flops` a query on its vectors. No network: they stand in for one's time."""

    def __init__(self, shape: Shape, device: Any) -> None:
        random = torch.Generator(device).manual_seed(1)
        sizes = [(shape.dim, shape.hidden), (shape.hidden, shape.dim)] * shape.layers
        self._weights = [
            (torch.randn(size, device=device, generator=random) / size[0] ** 0.5).to(torch.bfloat16) for size in sizes
        ]

    def __call__(self, vectors: Any) -> Any:
        """Enqueue them on the current stream."""
        x = vectors.to(torch.bfloat16)
        for weight in self._weights:
            x = torch.mm(x, weight)
        return x


class Worker:
    """Answers queries that arrived together with one lookup, and checks each. *One per thread.*"""

    def __init__(self, server: Server, library: Library, device: int, dense: Any = None) -> None:
        shape, place = server.shape, server.devices[device]
        self._server, self._library, self._device, self._dense = server, library, device, dense
        self._keys = torch.empty(shape.most * shape.keys, dtype=torch.int64, device=place)
        self._out = torch.empty((shape.most * shape.keys, shape.dim), dtype=torch.float16, device=place)
        self._place = place
        self.check = Check(place)

    @contextmanager
    def working(self) -> Iterator[loadgen.Answer]:
        """Work on a stream of its own."""
        with _stream(self._place):
            yield self.answer

    def answer(self, queries: Sequence[int], done: Callable[[], None]) -> None:
        """Answer queries of the library; `done` is called when the answer is complete on the device."""
        n = self._server.shape.keys
        keys, out = self._keys[: len(queries) * n], self._out[: len(queries) * n]
        for i, query in enumerate(queries):
            keys[i * n : (i + 1) * n].copy_(self._library.keys[query], non_blocking=True)
        self._server.look_up(keys, out, self._device)
        if self._dense is not None:
            self._dense(out)
            if self._place.type == "cuda":
                torch.cuda.current_stream(self._place).synchronize()
        done()
        self.check.add(keys, out)


def under_loadgen(
    server: Server, library: Library, rate: float, seconds: float, threads: int, dense: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Run LoadGen's scenario Server at a target rate."""
    library.draw()
    devices = len(server.devices)
    workers = [Worker(server, library, i % devices, dense[i % devices] if dense else None) for i in range(threads * devices)]
    for worker in workers:  # what is made by the first lookup of a size
        with worker.working() as answer:
            answer(range(server.shape.most), lambda: None)
    figures: dict[str, Any] = {}
    with _hit_rate(server, figures):
        of_run = loadgen.drive(
            "server",
            [worker.working for worker in workers],
            len(library.keys),
            rate=rate,
            seconds=seconds,
            bound_s=_BOUND_S,
            most=server.shape.most,
        )
    for worker in workers:
        worker.check.end()
    return of_run | figures


def dense_alone(server: Server, dense: Any) -> dict[str, Any]:
    """Milliseconds of the stand-in for one query of a full batch."""
    shape, device = server.shape, server.devices[0]
    out = torch.zeros((shape.most * shape.keys, shape.dim), dtype=torch.float16, device=device)
    seconds = []
    for _ in range(8):
        _wait()
        start = time.perf_counter()
        dense(out)
        _wait()
        seconds.append((time.perf_counter() - start) / shape.most)
    each = float(np.median(seconds[3:]))
    return {"queries_per_s": 1.0 / each, "p50_ms": 1e3 * each, "gflop": shape.dense_flops / 1e9}


# -- all of it -------------------------------------------------------------------------------------------------------------


class _Parts:
    """Runs parts one after the other while time is left, and records what they return."""

    def __init__(self, report: Report, limit_s: float) -> None:
        self._report, self._end = report, time.monotonic() + limit_s

    def __call__(self, axes: dict[str, Any], limit_s: int, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        name = ", ".join([axes["work"], *(f"{name} {value}" for name, value in axes.items() if name != "work" and value != "")])
        if time.monotonic() > self._end:
            self._report.add(axes, {"result": "left out: no time was left"})
            return None
        figures: dict[str, Any] | None = self._report.part(name, limit_s, call)
        if figures is not None:
            self._report.add(axes, figures)
        return figures


def run(report: Report, quick: bool) -> None:
    """Measure; on the GPUs that there are, else on the CPU, which says nothing but that it works."""
    shape = shape_of(quick)
    cuda = torch.cuda.is_available()
    count = min(2, torch.cuda.device_count()) if cuda else 1
    devices = [torch.device("cuda", i) for i in range(count)] if cuda else [torch.device("cpu")]
    modes = [""]
    if count == 2:
        modes = (os.environ.get("HPS_DLRMV3_SHARING") or "partition,hot,replicate").split(",")
    parts = _Parts(report, float(os.environ.get("HPS_DLRMV3_LIMIT_S") or 210.0))
    report.about |= {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "devices": count,
        "rows": shape.rows,
        "table_gb": 2 * shape.dim * shape.rows / 1e9,
        "dim": shape.dim,
        "keys_of_a_query": shape.keys,
        "alpha": ALPHA,
        "cache_share_of_each_device": _CACHE_SHARE,
        "bound_ms": 1e3 * _BOUND_S,
        "gflop_of_the_dense_stand_in": shape.dense_flops / 1e9,
        "loadgen_s": shape.loadgen_s,
    }
    for device in devices:
        check_itself(device, shape.dim)
    with Server(shape, devices, report.seed) as server:
        filled = report.part("filling", 170, server.fill)
        if filled is None:
            return
        report.about["fill_s"] = round(filled, 1)
        parts({"work": "index_select, on the device"}, 30, partial(index_select, server))
        library = Library(server)
        for sharing in modes:
            _measured(parts, report, server, library, sharing)


def _measured(parts: _Parts, report: Report, server: Server, library: Library, sharing: str) -> None:
    """Measure one way of sharing the rows among devices."""
    shape, axes = server.shape, {"devices": len(server.devices), "sharing": sharing}
    about = sharing or server.devices[0].type
    deployed = report.part(f"deploying, {about}", 120, partial(server.deploy, sharing))
    if deployed is None:
        return
    report.about[f"deploy_s, {about}"] = round(deployed, 1)
    report.about[f"cache_rows, {about}"] = server.held_rows()
    full = 4 if server.devices[0].type == "cuda" else 2
    ways = [(threads, queries) for threads in (1, full) for queries in (1, 4, shape.most)]
    if len(server.devices) > 1:
        ways = [(full, shape.most)]
    for law, lookups in (("uniform", [(full, shape.most)]), ("power law", ways)):
        if report.part(f"warming up, {about}, {law}", 60, partial(warm_up, server, law)) is None:
            return
        for threads, queries in lookups:
            each = {"work": "sustained", **axes, "threads": threads, "queries": queries, "ids": law}
            parts(each, 30, partial(sustained, server, threads, queries, shape.sustained_s, law))
    rate = shape.rate * len(server.devices)
    offered = {**axes, "threads": 2, "queries": f"up to {shape.most}", "ids": "power law", "rate": rate}
    if missing := loadgen.missing():
        print(f"# LoadGen is left out: {missing}; pip install mlcommons-loadgen", flush=True)
        report.about["loadgen"] = "left out: not installed"
        return
    limit_s = int(3 * shape.loadgen_s) + 60

    def drive(work: str, rate: float, dense: Sequence[Any] | None = None) -> dict[str, Any] | None:
        call = partial(under_loadgen, server, library, rate, shape.loadgen_s, 2, dense)
        return parts({"work": work, **offered, "rate": rate}, limit_s, call)

    drive("loadgen, sparse stage", rate)
    dense = [DenseStandIn(shape, device) for device in server.devices]
    parts({"work": "dense stand-in alone", **axes, "queries": shape.most}, 30, partial(dense_alone, server, dense[0]))
    found = drive("loadgen, with the dense stand-in", rate, dense)
    if found and found["result"] != "VALID":
        drive("loadgen, with the dense stand-in", 0.75 * rate, dense)
