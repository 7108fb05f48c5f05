"""RocksDB: fetching, loading, inserting and scanning, each against bare rocksdict doing the same in the same run.

Calls of ours and of the peer alternate, so that a noisy machine disturbs both alike. `ratio_to_x` compares medians of wall
clock time, `cpu_ratio_to_x` those of the calling thread's CPU time, which other processes disturb less; above 1, ours is
faster. The peer of `fetch` is the whole path with rocksdict: keys sorted, one multi-get with the whole table in a block cache,
values joined and scattered to an array. Ours has no block cache. Loads are timed once and write to disk,
so their figures vary most.

Axes: what · table rows · dim · batch (keys of a call, rows of a chunk) · hit_rate · threads · alpha.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rocksdict

from benchmarks.harness import Report, require, scratch
from hps.models.loading.table_load import LoadFeed
from hps.stores.base import LoadRecord
from hps.stores.rocks_db.database import RocksDatabase
from hps.tools.profiling.workloads import power_law_keys
from hps.types import TableSpec

TAG = "hps_et.bench.item"
CHUNK_BYTES = 16 << 20  # of a model file's chunk


class Peer:
    """A table in bare rocksdict. `fetch`, `load`, `insert` and `scan` are what a short script would write."""

    def __init__(self, path: Path, dim: int) -> None:
        block = rocksdict.BlockBasedOptions()
        block.set_bloom_filter(10, False)
        block.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
        block.set_block_cache(rocksdict.Cache(1 << 30))
        self.options = rocksdict.Options(raw_mode=True)
        self.options.create_if_missing(True)
        self.options.set_block_based_table_factory(block)
        self.options.set_compression_type(rocksdict.DBCompressionType.none())
        self.path, self.dim = path, dim
        self.db = rocksdict.Rdict(str(path), self.options)
        self.table: Any = self.db.create_column_family(TAG, self.options)

    def load(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        order = np.argsort(keys.byteswap().view(np.uint64))
        writer = rocksdict.SstFileWriter(self.options)
        staged = self.path / "staged.sst"
        writer.open(str(staged))
        values = vectors[order].view(f"V{4 * self.dim}").ravel().tolist()
        deque(map(writer.__setitem__, keys[order].view("V8").tolist(), values), maxlen=0)
        writer.finish()
        self.table.ingest_external_file([str(staged)])
        staged.unlink(missing_ok=True)

    def fetch(self, keys: np.ndarray, out: np.ndarray, found: np.ndarray) -> None:
        order = np.argsort(keys.byteswap().view(np.uint64))
        values = self.table.get(keys[order].view("V8").tolist(), bytes(4 * self.dim))
        out[order] = np.frombuffer(b"".join(values), np.float32).reshape(-1, self.dim)

    def insert(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.set_default_column_family(self.db.get_column_family_handle(TAG))
        values = vectors.view(f"V{4 * self.dim}").ravel().tolist()
        deque(map(batch.__setitem__, keys.view("V8").tolist(), values), maxlen=0)
        self.db.write(batch)
        self.db.flush_wal(True)

    def scan(self) -> int:
        return len(deque(self.table.items(), maxlen=1)) and self.table.property_int_value("rocksdb.estimate-num-keys")

    def close(self) -> None:
        self.table.close()
        self.db.close()


def alternate(calls: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each call, taken in turns: (rounds, 2), of wall clock and of this thread's CPU; the first two are not kept."""
    seconds = {name: np.empty((rounds, 2)) for name in calls}
    for i in range(-2, rounds):
        for name, call in calls.items():
            start = time.perf_counter(), time.thread_time()
            call(i)
            if i >= 0:
                seconds[name][i] = time.perf_counter() - start[0], time.thread_time() - start[1]
    return seconds


def figures(seconds: dict[str, np.ndarray], rows: int) -> dict[str, float]:
    """The rate of `ours` and of each other, and the ratios to them by wall clock and by CPU time."""
    wall, cpu = np.median(seconds["ours"], axis=0)
    result = {
        "rows_per_s": rows / float(wall),
        "p50_s": float(wall),
        "p99_s": float(np.quantile(seconds["ours"][:, 0], 0.99)),
        "rows_per_cpu_s": rows / float(cpu),
    }
    for name, taken in seconds.items():
        if name != "ours":
            other_wall, other_cpu = np.median(taken, axis=0)
            result[f"{name}_rows_per_s"] = rows / float(other_wall)
            result[f"ratio_to_{name}"] = float(other_wall / wall)
            result[f"cpu_ratio_to_{name}"] = float(other_cpu / cpu)
    return result


class Table:
    """The rows of a benchmark, and checked calls of a database that holds them."""

    def __init__(self, rng: np.random.Generator, rows: int, dim: int) -> None:
        self.rng, self.rows, self.dim = rng, rows, dim
        distinct = np.unique(rng.integers(-(2**63), 2**63 - 1, rows + rows // 50, dtype=np.int64))
        self.keys = rng.permutation(distinct)[:rows]
        self.absent = np.setdiff1d(distinct, self.keys)
        self.vectors = rng.random((rows, dim), np.float32)

    def fetcher(self, database: Any, batch: int, alpha: float = 0.0, hit_rate: float = 1.0) -> Callable[[int], None]:
        """A call that fetches `batch` keys, one of many prepared sets; every set is checked when it is first fetched."""
        picks = [power_law_keys(self.rng, batch, self.rows, alpha) for _ in range(max(8, 200_000 // batch))]
        hits = [self.rng.random(batch) < hit_rate for _ in picks]
        sets = [
            np.where(hit, self.keys[pick], self.rng.choice(self.absent, batch)) for pick, hit in zip(picks, hits, strict=True)
        ]
        out, found = np.empty((batch, self.dim), np.float32), np.empty(batch, np.bool_)

        def call(i: int) -> None:
            found[:] = False
            database(sets[i % len(sets)], out, found)

        for i in range(len(sets)):
            call(i)
            require(np.array_equal(out[hits[i]], self.vectors[picks[i]][hits[i]]))
        return call

    def load(self, database: RocksDatabase) -> float:
        """Load as a model is loaded; returns seconds."""
        start = time.perf_counter()
        record = LoadRecord("bench", 0, self.rows)
        feed = LoadFeed(database, TableSpec("bench", "item", self.dim, 0.0, 1), record, self.rows)
        for low in range(0, self.rows, step := CHUNK_BYTES // (8 + 4 * self.dim)):
            vectors = self.vectors[low : low + step]
            feed.add(low, self.keys[low : low + step], vectors, vectors)
        feed.end()
        return time.perf_counter() - start


def run(report: Report, quick: bool) -> None:
    """Measure, in a temporary directory that is removed."""
    rounds = 4 if quick else 24
    rng = np.random.default_rng(report.seed)
    with scratch("rocks-db") as directory:
        for dim, rows in ((32, 1_000_000), (16, 1_000_000), (128, 300_000)):
            table = Table(rng, rows // 20 if quick else rows, dim)
            _one_dim(report, directory, table, rounds, detailed=dim == 32)


def _one_dim(report: Report, directory: Path, table: Table, rounds: int, *, detailed: bool) -> None:
    axes = {"table_rows": table.rows, "dim": table.dim}
    peer = Peer(directory / "peer", table.dim)
    start = time.perf_counter()
    peer.load(table.keys, table.vectors)
    one_file = table.rows / (time.perf_counter() - start)
    database = RocksDatabase(directory / "ours")
    database.open_table(TAG, table.dim)
    load_s = table.load(database)
    load = {
        "rows_per_s": table.rows / load_s,
        "one_file_rows_per_s": one_file,
        "ratio_to_one_file": table.rows / load_s / one_file,
    }
    start = time.perf_counter()
    database.finish_load(TAG)
    merge_s = time.perf_counter() - start
    report.add({"what": "load", **axes}, load)
    report.add({"what": "load + finish_load", **axes}, {"rows_per_s": table.rows / (load_s + merge_s), "merge_s": merge_s})
    peer.fetch(table.keys, np.empty_like(table.vectors), np.empty(0))  # fills its cache
    for batch in (1_000, 10_000, 100_000):
        fetches = {"ours": partial(database.fetch, TAG), "sorted": peer.fetch}
        calls = {name: table.fetcher(fetch, batch) for name, fetch in fetches.items()}
        taken = alternate(calls, rounds if batch < 100_000 else rounds // 4)
        report.add(
            {"what": "fetch", **axes, "batch": batch, "hit_rate": 1.0, "threads": 1, "alpha": 0.0}, figures(taken, batch)
        )
    if detailed:
        _detailed(report, table, database, peer, rounds)
    database.close()
    peer.close()
    shutil.rmtree(directory / "ours")
    shutil.rmtree(directory / "peer")


def _detailed(report: Report, table: Table, database: RocksDatabase, peer: Peer, rounds: int) -> None:
    axes = {"table_rows": table.rows, "dim": table.dim}
    for alpha, hit_rate in ((1.05, 1.0), (0.0, 0.5), (0.0, 0.0)):
        fetches = {"ours": partial(database.fetch, TAG), "sorted": peer.fetch}
        calls = {name: table.fetcher(fetch, 10_000, alpha, hit_rate) for name, fetch in fetches.items()}
        taken = alternate(calls, rounds // 2)
        axis = {"batch": 10_000, "hit_rate": hit_rate, "threads": 1, "alpha": alpha}
        report.add({"what": "fetch", **axes, **axis}, figures(taken, 10_000))

    def by_threads(threads: int) -> float:
        calls = [table.fetcher(partial(database.fetch, TAG), 10_000) for _ in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            list(pool.map(lambda call: [call(i) for i in range(rounds)], calls))
            return threads * rounds * 10_000 / (time.perf_counter() - start)

    one, two = by_threads(1), by_threads(2)
    axis = {"batch": 10_000, "hit_rate": 1.0, "threads": 2, "alpha": 0.0}
    report.add({"what": "fetch", **axes, **axis}, {"rows_per_s": two, "ratio_to_one_thread": two / one})

    def scan(i: int) -> None:
        require(sum(keys.size for keys, _ in database.scan(TAG, 100_000)) == table.rows, "the number of rows of a scan")

    taken = alternate({"ours": scan, "items": lambda i: peer.scan()}, 3)
    report.add({"what": "scan", **axes, "batch": 100_000}, figures(taken, table.rows))

    def part(i: int) -> slice:
        return slice((i + 2) * 10_000 % table.rows, (i + 2) * 10_000 % table.rows + 10_000)

    writes = {
        "ours": lambda i: database.insert(TAG, table.keys[part(i)], table.vectors[part(i)]),
        "write_batch": lambda i: peer.insert(table.keys[part(i)], table.vectors[part(i)]),
    }
    report.add({"what": "insert", **axes, "batch": 10_000}, figures(alternate(writes, rounds // 2), 10_000))
