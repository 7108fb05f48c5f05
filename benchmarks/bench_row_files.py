"""Row files beside RocksDB and the hash map: loads, starts, and lookups of rows in memory, absent, changed, or on the disk.

All answer in turn with the same keys, so that whatever disturbs the machine meets all; every answer is checked. Rates of one
thread are by processor time, which other processes disturb less, all others by the clock. `ratio` compares medians; above 1,
row files are faster. `cold` is a lookup after a start without a page in memory; its peers are RocksDB with a multi-get in one
thread, and with the threads that it uses once it has found its rows cold.

HPS_BENCH_ROWS (4,000,000) and HPS_BENCH_DIM (32) size the table.

Axes: what · table rows · dim · batch · threads · the share of rows that were changed.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.harness import Report, memory_bytes, require, scratch, take_turns
from hps.ground.threads.thread_pool import DISK_POOL, POOL

KINDS = ("row_files", "rocks_db", "hash_map")
BATCHES = (1_000, 10_000, 100_000)
_LIMIT_S = 1800
_CHANGED = 100  # one row of so many
_WRITTEN_ROWS = 1_000
_WRITE_EVERY_S = 0.02


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
        directory.mkdir()
        self.keys.tofile(directory / "key")
        with open(directory / "emb_vector", "wb") as file:
            for start in range(0, self.keys.size, step := 1 << 20):
                self.of(self.keys[start : start + step]).tofile(file)

    def batches(self, size: int, count: int) -> list[np.ndarray]:
        return [self.rng.choice(self.keys, size) for _ in range(count)]

    def absent(self, size: int, count: int) -> list[np.ndarray]:
        return [self.rng.integers(2**62, 2**63 - 1, size) for _ in range(count)]


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
    with scratch("row-files") as directory:
        rows.write(directory / "t.model")
        axes = {"table_rows": count, "dim": rows.dim}
        for part in (_load, _start, _cold, _lookups, _in_process, _changed):
            report.part(
                part.__name__.strip("_"), _LIMIT_S, lambda part=part: part(report, directory, rows, axes, 3 if quick else 20)
            )


def _load(report: Report, directory: Path, rows: Rows, axes: dict[str, Any], rounds: int) -> None:
    few = Rows(rows.rng, 1_000, rows.dim)
    with scratch("row-files-few") as place:
        few.write(place / "t.model")
        for kind in KINDS:  # compiles the kernels
            with hps.HPS(document(place, kind, few)) as server:
                require(np.array_equal(server.lookup(few.keys, "m", "t"), few.of(few.keys)))
    taken, probe = {}, rows.batches(1_000, 1)[0]
    for kind in KINDS:
        start = time.perf_counter()
        with hps.HPS(document(directory, kind, rows)) as server:
            taken[kind] = time.perf_counter() - start
            require(np.array_equal(server.lookup(probe, "m", "t"), rows.of(probe)))
    sizes = {kind: sum(file.stat().st_size for file in (directory / kind).rglob("*") if file.is_file()) for kind in KINDS}
    result = {f"{kind}_rows_per_s": rows.keys.size / seconds for kind, seconds in taken.items()}
    result |= {f"{kind}_bytes_a_row": size / rows.keys.size for kind, size in sizes.items() if size}
    report.add({"what": "load", **axes}, {**result, "ratio_to_rocks_db": taken["rocks_db"] / taken["row_files"]})


def _start(report: Report, directory: Path, rows: Rows, axes: dict[str, Any], rounds: int) -> None:
    """Restart to the first answer, in this process, where everything is imported and compiled."""
    probe = rows.batches(1_000, 1)[0]

    def start(kind: str) -> float:
        with hps.HPS(document(directory, kind, rows)) as server:
            require(np.array_equal(server.lookup(probe, "m", "t"), rows.of(probe)))
            return memory_bytes()

    taken = take_turns({kind: lambda i, kind=kind: start(kind) for kind in KINDS}, max(3, rounds // 4), warmup=1)
    medians = {f"{kind}_s": float(np.median(seconds)) for kind, seconds in taken.items()}
    report.add({"what": "start to the first answer", **axes}, medians)


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
    """Row files with rows that were changed online, and beside a writer, in turn with the same files unchanged."""
    shutil.copytree(directory / "row_files", (copy := directory / "changed") / "row_files")
    (copy / "t.model").symlink_to(directory / "t.model")
    changed = rows.rng.choice(rows.keys, rows.keys.size // _CHANGED, replace=False)
    ended = threading.Event()
    with hps.HPS(document(directory, "row_files", rows)) as first, hps.HPS(document(copy, "row_files", rows)) as second:
        for start in range(0, changed.size, 50_000):
            second.insert(changed[start : start + 50_000], rows.of(changed[start : start + 50_000]), "m", "t")

        def write() -> None:
            at = 0
            while not ended.wait(_WRITE_EVERY_S):
                piece = changed[at : at + _WRITTEN_ROWS]
                second.insert(piece, rows.of(piece), "m", "t")
                at = at + _WRITTEN_ROWS if at + _WRITTEN_ROWS < changed.size else 0

        writer = threading.Thread(target=write, daemon=True)
        POOL.limit_to(1)
        for what in ("changed", "beside a writer"):
            if what == "beside a writer":
                writer.start()
            for batch in BATCHES:
                sets = rows.batches(batch, max(4, 400_000 // batch))
                calls = {"row_files": fetcher(second, rows, sets), "unchanged": fetcher(first, rows, sets)}
                taken = take_turns(calls, 5 * rounds, warmup=len(sets), clock=time.thread_time)
                report.add({"what": what, **axes, "batch": batch, "threads": 1, "changed": 1 / _CHANGED}, figures(taken, batch))
        ended.set()
        writer.join()
        POOL.limit_to(0)


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
    DISK_POOL.limit_to(32)
    found = figures({name: np.array(seconds) for name, seconds in taken.items()}, batch)
    seen = {"cold_pages_a_start": pages / rounds, "mean_depth": float(np.mean(depths))}
    report.add({"what": "cold", **axes, "batch": batch}, {**found, "row_files_s": float(np.median(taken["row_files"])), **seen})
