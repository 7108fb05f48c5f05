"""Row files beside RocksDB and the hash map: loads, starts, swaps, lookups of rows in memory, absent, changed, on the disk.

All answer in turn with the same keys, so that whatever disturbs the machine meets all; every answer is checked. Rates of one
thread are by processor time, which other processes disturb less, all others by the clock. `ratio` compares medians; above 1,
row files are faster. A load is `served` at its first answer, `durable` once the database is closed. `cold` is a lookup after a
start without a page in memory; its peers are RocksDB with a multi-get in one thread, and with the threads that it uses once it
has found its rows cold; its limit are as many reads of a page by io_uring.

HPS_BENCH_ROWS (4,000,000) and HPS_BENCH_DIM (32) size the table, HPS_BENCH_LARGE_ROWS (0: left out) and HPS_BENCH_LARGE_DIM
(128) another, for loads, starts and swaps.

Axes: what · table rows · dim · batch · threads · the share of rows that were changed.
"""

import ctypes
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.harness import Report, memory_bytes, require, scratch, take_turns
from hps.ground.threads.thread_pool import DISK_POOL, POOL
from hps.models.sealing import seal_version

KINDS = ("row_files", "rocks_db", "hash_map")
BATCHES = (1_000, 10_000, 100_000)
_LIMIT_S = 1800
_CHANGED = 100  # one row of so many
_WRITTEN_ROWS = 1_000
_WRITE_EVERY_S = 0.02
_PHASE_S = 0.25  # lookups beside a writer, and without one


class Rows:
    """Keys in random order; a row's elements follow from its key and a version."""

    def __init__(self, rng: np.random.Generator, rows: int, dim: int) -> None:
        self.rng, self.dim = rng, dim
        distinct = np.unique(rng.integers(-(2**62), 2**62, rows + rows // 50, dtype=np.int64))
        self.keys = rng.permutation(distinct)[:rows]

    def of(self, keys: np.ndarray) -> np.ndarray:
        base = (keys.view(np.uint64) >> np.uint64(40)).astype(np.float32)
        return base[:, None] + np.arange(self.dim, dtype=np.float32)

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.keys.tofile(directory / "key")
        with open(directory / "emb_vector", "wb") as file:
            for start in range(0, self.keys.size, step := 1 << 20):
                self.of(self.keys[start : start + step]).tofile(file)

    def batches(self, size: int, count: int) -> list[np.ndarray]:
        return [self.rng.choice(self.keys, size) for _ in range(count)]

    def absent(self, size: int, count: int) -> list[np.ndarray]:
        return [self.rng.integers(-(2**62), 2**62, size) for _ in range(count)]


def document(directory: Path, kind: str, rows: Rows) -> dict[str, Any]:
    model = {
        "model": "m",
        "sparse_files": [str(directory / "t.model")],
        "embedding_table_names": ["t"],
        "embedding_vecsize_per_table": [rows.dim],
        "maxnum_catfeature_query_per_table_per_sample": [1],
        "default_value_for_each_table": [0.5],
        "deployed_device_list": [0],
        "max_batch_size": 1 << 20,
        "gpucache": False,
    }
    (directory / kind).mkdir(exist_ok=True)
    tiers = {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": kind, "path": str(directory / kind)}}
    if kind == "hash_map":
        tiers = {"volatile_db": {"type": kind}, "persistent_db": {"type": "disabled"}}
    return {"supportlonglong": True, "device": "cpu", **tiers, "models": [model]}


def fetcher(server: Any, rows: Rows, sets: list[np.ndarray], *, present: bool = True) -> Callable[[int], None]:
    """Return a call of the database that checks its answers."""
    chain, table = server.model("m").chain, server.model("m").tables[0]
    database, tag = chain.databases[-1], table.tag
    out, found = np.empty((sets[0].size, rows.dim), np.float32), np.empty(sets[0].size, np.bool_)

    def call(i: int) -> None:
        found[:] = False
        database.fetch(tag, sets[i % len(sets)], out, found)

    for i in range(len(sets)):
        call(i)
        require(found.all() if present else not found.any(), "which keys are found")
        require(not present or np.array_equal(out, rows.of(sets[i])))
    return call


def figures(seconds: dict[str, np.ndarray], batch: int) -> dict[str, float]:
    medians = {name: float(np.median(taken)) for name, taken in seconds.items()}
    first = medians["row_files"]
    result = {f"{name}_rows_per_s": batch / median for name, median in medians.items()}
    result["row_files_p99_s"] = float(np.quantile(seconds["row_files"], 0.99))
    return result | {f"ratio_to_{name}": median / first for name, median in medians.items() if name != "row_files"}


def run(report: Report, quick: bool) -> None:
    """Measure, in a temporary directory that is removed."""
    count = 100_000 if quick else int(os.environ.get("HPS_BENCH_ROWS", "4_000_000"))
    rows = Rows(np.random.default_rng(report.seed), count, int(os.environ.get("HPS_BENCH_DIM", "32")))
    rounds = 3 if quick else 15
    with scratch("row-files") as directory:
        rows.write(directory / "t.model")
        axes = {"table_rows": count, "dim": rows.dim}
        parts = (_compile, _load, _start, _cold, _lookups, _in_process, _changed)
        for part in parts:
            report.part(part.__name__.strip("_"), _LIMIT_S, lambda part=part: part(report, directory, rows, axes, rounds))
    large = 200_000 if quick else int(os.environ.get("HPS_BENCH_LARGE_ROWS", "0"))
    if large:
        report.part(
            "large", _LIMIT_S, lambda: _large(report, rows.rng, large, int(os.environ.get("HPS_BENCH_LARGE_DIM", "128")))
        )
        report.part("swaps", _LIMIT_S, lambda: _swaps(report, rows.rng, (1_000, large), rows.dim, 2 + rounds // 3))


def _compile(_report: Report, _directory: Path, rows: Rows, _axes: dict[str, Any], _rounds: int) -> None:
    few = Rows(rows.rng, 1_000, rows.dim)
    with scratch("row-files-few") as place:
        few.write(place / "t.model")
        for kind in KINDS:
            with hps.HPS(document(place, kind, few)) as server:
                require(np.array_equal(server.lookup(few.keys, "m", "t"), few.of(few.keys)))


def _load(
    report: Report, directory: Path, rows: Rows, axes: dict[str, Any], _rounds: int, kinds: tuple[str, ...] = KINDS
) -> None:
    probe, result, taken = rows.batches(1_000, 1)[0], {}, {}
    for kind in kinds:
        start = time.perf_counter()
        with hps.HPS(document(directory, kind, rows)) as server:
            require(np.array_equal(server.lookup(probe, "m", "t"), rows.of(probe)))
            taken["served", kind] = time.perf_counter() - start
        taken["durable", kind] = time.perf_counter() - start
        size = sum(file.stat().st_size for file in (directory / kind).rglob("*") if file.is_file())
        result |= {f"{kind}_{until}_s": taken[until, kind] for until in ("served", "durable")}
        result |= {f"{kind}_rows_per_s": rows.keys.size / taken["served", kind], f"{kind}_bytes_a_row": size / rows.keys.size}
    ratios = {f"ratio_{until}": taken[until, "rocks_db"] / taken[until, "row_files"] for until in ("served", "durable")}
    report.add({"what": "load", **axes}, result | ratios)


def _start(
    report: Report, directory: Path, rows: Rows, axes: dict[str, Any], rounds: int, kinds: tuple[str, ...] = KINDS
) -> None:
    """Restart to the first answer, in this process, where everything is imported and compiled."""
    probe = rows.batches(1_000, 1)[0]

    def start(kind: str) -> None:
        with hps.HPS(document(directory, kind, rows)) as server:
            require(np.array_equal(server.lookup(probe, "m", "t"), rows.of(probe)))

    taken = take_turns({kind: lambda i, kind=kind: start(kind) for kind in kinds}, max(3, rounds // 4), warmup=1)
    medians = {f"{kind}_s": float(np.median(seconds)) for kind, seconds in taken.items()}
    report.add({"what": "start to the first answer", **axes}, medians)


def _large(report: Report, rng: np.random.Generator, count: int, dim: int) -> None:
    rows, kinds = Rows(rng, count, dim), ("row_files", "rocks_db")
    axes = {"table_rows": count, "dim": dim}
    with scratch("row-files-large") as directory:
        rows.write(directory / "t.model")
        _load(report, directory, rows, axes, 1, kinds)
        _start(report, directory, rows, axes, 20, kinds[:1])


def _swaps(report: Report, rng: np.random.Generator, sizes: tuple[int, ...], dim: int, rounds: int) -> None:
    """Deploy sealed versions of different sizes, in place of a small one."""
    with scratch("row-files-swaps") as directory:
        versions = {str(number): Rows(rng, size, dim) for number, size in enumerate((1_000, *sizes), 1)}
        for number, rows in versions.items():
            rows.write(directory / "m" / number / "t")
            seal_version(directory / "m" / number, replace=True)
        chosen = document(directory, "row_files", versions["1"])
        model = chosen["models"][0]
        model |= {"sparse_files": ["t"], "version_path": str(directory / "m")}
        model["version_policy"] = {"specific": {"versions": [1]}}
        taken: dict[str, list[float]] = {number: [] for number in versions}
        grown: dict[str, list[int]] = {number: [] for number in versions}
        with hps.HPS(chosen) as server:
            for _ in range(rounds):
                for number, rows in reversed(versions.items()):
                    before, start = memory_bytes("RssAnon"), time.perf_counter()
                    server.deploy("m", number)
                    taken[number].append(time.perf_counter() - start)
                    grown[number].append(memory_bytes("RssAnon") - before)
                    keys = rows.batches(100, 1)[0]
                    require(np.array_equal(server.lookup(keys, "m", "t"), rows.of(keys)))
        for number, size in enumerate(sizes, 2):
            found = {"swap_s": float(np.median(taken[str(number)])), "grown_bytes": float(np.median(grown[str(number)]))}
            report.add({"what": "swap of a version", "table_rows": size, "dim": dim}, found)


@contextmanager
def servers(directory: Path, rows: Rows) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        yield {kind: stack.enter_context(hps.HPS(document(directory, kind, rows))) for kind in KINDS}


def _lookups(report: Report, directory: Path, rows: Rows, axes: dict[str, Any], rounds: int) -> None:
    with servers(directory, rows) as both:
        for threads in (1, POOL.limit):
            POOL.limit_to(threads)
            clock = time.thread_time if threads == 1 else time.perf_counter
            for what in ("warm", "absent"):
                for batch in BATCHES:
                    sets = (rows.batches if what == "warm" else rows.absent)(batch, max(4, 400_000 // batch))
                    calls = {kind: fetcher(server, rows, sets, present=what == "warm") for kind, server in both.items()}
                    taken = take_turns(calls, rounds, clock=clock)
                    report.add({"what": what, **axes, "batch": batch, "threads": threads}, figures(taken, batch))
            POOL.limit_to(0)


def _in_process(report: Report, directory: Path, rows: Rows, axes: dict[str, Any], rounds: int) -> None:
    """`HPS.lookup` without an embedding cache and without a volatile database."""
    with servers(directory, rows) as both:
        POOL.limit_to(1)
        for batch in BATCHES:
            sets = rows.batches(batch, max(4, 400_000 // batch))
            for server in both.values():
                require(all(np.array_equal(server.lookup(keys, "m", "t"), rows.of(keys)) for keys in sets))
            calls = {kind: lambda i, one=one: one.lookup(sets[i % len(sets)], "m", "t") for kind, one in both.items()}  # noqa: B023
            taken = take_turns(calls, rounds, clock=time.thread_time)
            report.add({"what": "in process", **axes, "batch": batch, "threads": 1}, figures(taken, batch))
        POOL.limit_to(0)


def _changed(report: Report, directory: Path, rows: Rows, axes: dict[str, Any], rounds: int) -> None:
    """Row files with rows that were changed online, in turn with the same files unchanged, and with a writer beside them."""
    shutil.copytree(directory / "row_files", (copy := directory / "changed") / "row_files")
    (copy / "t.model").symlink_to(directory / "t.model")
    changed = rows.rng.choice(rows.keys, rows.keys.size // _CHANGED, replace=False)
    ended, writes = threading.Event(), threading.Event()
    with hps.HPS(document(directory, "row_files", rows)) as first, hps.HPS(document(copy, "row_files", rows)) as second:

        def write() -> None:
            for at in cycle(range(0, changed.size, _WRITTEN_ROWS)):
                if ended.wait(_WRITE_EVERY_S):
                    return
                if writes.is_set():
                    second.insert(changed[at : at + _WRITTEN_ROWS], rows.of(changed[at : at + _WRITTEN_ROWS]), "m", "t")

        second.insert(changed, rows.of(changed), "m", "t")
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        POOL.limit_to(1)
        for batch in BATCHES:
            sets = rows.batches(batch, max(4, 400_000 // batch))
            calls = {"row_files": fetcher(second, rows, sets), "unchanged": fetcher(first, rows, sets)}
            of_batch = {**axes, "batch": batch, "threads": 1, "changed": 1 / _CHANGED}
            found = figures(take_turns(calls, 2 * rounds, clock=time.thread_time), batch)
            report.add({"what": "changed", **of_batch}, found)
            taken: dict[str, list[float]] = {"row_files": [], "without_a_writer": []}
            for turn in range(2 * rounds):
                (writes.clear, writes.set)[turn % 2]()
                time.sleep(2 * _WRITE_EVERY_S)
                until = time.perf_counter() + _PHASE_S
                while (start := time.perf_counter()) < until:
                    calls["row_files"](len(taken["row_files"]))
                    taken["row_files" if turn % 2 else "without_a_writer"].append(time.perf_counter() - start)
            writes.clear()
            found = figures({name: np.array(seconds) for name, seconds in taken.items()}, batch)
            report.add({"what": "beside a writer", **of_batch}, found)
        ended.set()
        writer.join()
        POOL.limit_to(0)
    shutil.rmtree(copy)


def drop_from_memory(directory: Path) -> None:
    """Drop the pages of files that no process has mapped."""
    for path in directory.rglob("*"):
        if path.suffix in (".rows", ".sst"):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # pages that are still to be written stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _cold(report: Report, directory: Path, rows: Rows, axes: dict[str, Any], rounds: int) -> None:
    """The second lookup of a start without a page in memory; of files in use, the kernel would drop few pages."""
    batch = 1_000
    ways = {"row_files": ("row_files", 32), "rocks_db": ("rocks_db", 32), "rocks_db_one_thread": ("rocks_db", 1)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    pages, depths = 0, []
    for _ in range(rounds):
        for name, (kind, threads) in ways.items():
            DISK_POOL.limit_to(threads)
            before, keys = rows.batches(batch, 2)
            drop_from_memory(directory)
            with hps.HPS(document(directory, kind, rows)) as server:
                require(np.array_equal(server.lookup(before, "m", "t"), rows.of(before)))
                start = time.perf_counter()
                answer = server.lookup(keys, "m", "t")
                taken[name].append(time.perf_counter() - start)
                require(np.array_equal(answer, rows.of(keys)))
                if kind == "row_files":
                    deployment = server.model("m")
                    file = deployment.chain.databases[-1].stats(deployment.tables[0].tag).file
                    pages += file.cold_pages
                    depths.append(file.depth.total_s / max(1, file.depth.count))
        drop_from_memory(directory)
        if seconds := raw_read_seconds(next((directory / "row_files").rglob("*.rows")), rows.rng, batch):
            taken.setdefault("io_uring", []).append(seconds)
    DISK_POOL.limit_to(32)
    found = figures({name: np.array(seconds) for name, seconds in taken.items()}, batch)
    seen = {"cold_pages_a_start": pages / rounds, "mean_depth": float(np.mean(depths))}
    report.add({"what": "cold", **axes, "batch": batch}, {**found, "row_files_s": float(np.median(taken["row_files"])), **seen})


def raw_read_seconds(path: Path, rng: np.random.Generator, count: int) -> float | None:
    """Return how long io_uring takes for reads of `count` random pages at once, around the page cache; None without it."""
    libc, entries = ctypes.CDLL(None, use_errno=True), 1 << (count - 1).bit_length()
    parameters = (ctypes.c_uint32 * 30)()  # struct io_uring_params
    if (ring := libc.syscall(425, entries, ctypes.byref(parameters))) < 0:
        return None
    try:
        submitted, completed = parameters[10:20], parameters[20:30]  # offsets of head, tail, mask, ..., array or entries
        queue = mmap.mmap(ring, submitted[6] + 4 * entries, offset=0)
        answers = mmap.mmap(ring, completed[5] + 16 * parameters[1], offset=0x8000000)
        work = np.frombuffer(mmap.mmap(ring, 64 * entries, offset=0x10000000), np.uint64).reshape(entries, 8)
        buffer = np.frombuffer(mmap.mmap(-1, 4096 * count), np.uint8)
        with open(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as file:
            pages = rng.integers(0, path.stat().st_size // 4096, count).astype(np.uint64)
            work[:count] = 0
            work[:count, 0] = 22 | file.fileno() << 32  # IORING_OP_READ
            work[:count, 1], work[:count, 3] = 4096 * pages, 4096  # offset, length
            work[:count, 2] = buffer.ctypes.data + 4096 * np.arange(count, dtype=np.uint64)
            np.frombuffer(queue, np.uint32, entries, submitted[6])[:] = np.arange(entries)
            start = time.perf_counter()
            np.frombuffer(queue, np.uint32, 1, submitted[1])[0] = count
            done = libc.syscall(426, ring, count, count, 1, None, 0)  # submit all, and wait for all
            seconds = time.perf_counter() - start
        results = np.frombuffer(answers, np.int32, 4 * count, completed[5])[2::4]
        require(done == count and (results == 4096).all(), "reads by io_uring")
        return seconds
    finally:
        os.close(ring)
