"""A model of 10 GB from local disk: the rates of its load, the memory that it takes, and starts that need not load.

Keys are in random order, the worst case for RocksDB. Every start is a process of its own, which then looks up a random sample
of keys, absent ones among them, and checks each vector. `beyond_tiers_mb` is the peak of that process less what the hash map
says it holds; it includes the interpreter, compiled kernels and RocksDB. `table_readers_mb` of it are the indices and filters
of RocksDB's files once all is loaded. They grow with the table, so they count as the tier's, and `of_limit` compares the rest.

Axes: tiers (RocksDB or the hash map, alone, without an embedding cache) · dim · rows · start. The hash map gets as many rows as
fit into half of the memory that is free.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_vectors
from hps.types import FloatArray, KeyArray

SEED = 1
ODD = -7046029254386353131  # times a range: distinct keys, in no order
LIMIT_BYTES = 256 << 20

_START = """
import json, sys, time
import numpy as np
import hps
from hps.stores.rocks_db.database import RocksDatabase
from hps.tools.cli.tables.sample import sample_vectors
from hps.models.loading.table_load import TableLoad

path, rows, dim, sample, odd = sys.argv[1], *map(int, sys.argv[2:])

def peak_mb():  # not getrusage's, which begins with the peak of the process that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024 / 1e6

imported_mb = peak_mb()
merge_s, reports = 0.0, []
finish_load, run = RocksDatabase.finish_load, TableLoad.run

def timed_finish(self, tag):
    global merge_s
    start = time.perf_counter()
    finish_load(self, tag)
    merge_s += time.perf_counter() - start

def kept_report(self):
    reports.append(run(self))
    return reports[-1]

RocksDatabase.finish_load, TableLoad.run = timed_finish, kept_report
start = time.perf_counter()
with hps.HPS(path) as server:
    start_s = time.perf_counter() - start
    start_peak_mb = peak_mb()
    rng = np.random.default_rng(2)
    step, seconds = 20_000, 0.0
    for _ in range(sample // step):
        numbers = rng.integers(-rows // 100, rows, step)
        start = time.perf_counter()
        vectors, found = server.lookup(numbers * np.int64(odd), "large", "table", return_found=True)
        seconds += time.perf_counter() - start
        present = numbers >= 0
        assert (found == present).all()
        assert (vectors[present] == sample_vectors(numbers[present] * np.int64(odd), dim, 1)).all()
        assert (vectors[~present] == 0).all()
    deployment = server.model("large")
    tiers = readers = 0
    for database in deployment.chain.databases:
        if isinstance(database, RocksDatabase):
            family = database._engine.family("hps_et.large.table")
            readers = database._engine.figure(family, "estimate-table-readers-mem")
        else:
            stats = database.stats("hps_et.large.table")
            tiers += stats.vector_bytes + stats.overhead_bytes
loaded = sum(load.rows for load in reports[0].loads)
figures = {"start_s": start_s, "load_table_s": reports[0].seconds, "merge_s": merge_s, "rows_loaded": loaded}
if loaded:
    size_bytes = rows * (8 + 4 * dim)
    figures |= {"vectors_per_s": rows / reports[0].seconds, "mb_per_s": size_bytes / reports[0].seconds / 1e6}
beyond_mb = start_peak_mb - tiers / 1e6
figures |= {
    "tiers_mb": tiers / 1e6, "beyond_tiers_mb": beyond_mb, "beyond_tiers_and_readers_mb": beyond_mb - readers / 1e6,
    "of_which_imports_mb": imported_mb,
    "table_readers_mb": readers / 1e6, "lookup_keys_per_s": sample // step * step / seconds,
    "vectors_checked": sample // step * step,
}
print(json.dumps(figures))
"""


def run(report: Report, quick: bool) -> None:
    """Load 20 M rows x 32 (2.7 GB), then 20.6 M x 128 (10.7 GB; 32 GB of disk in all, which is freed again)."""
    for dim, rows in ((32, 300_000), (128, 100_000)) if quick else ((32, 20_000_000), (128, 20_600_000)):
        with tempfile.TemporaryDirectory(prefix="hps-large-load-", dir=os.environ.get("HPS_BENCH_DIR")) as directory:
            _one_width(report, Path(directory), dim, rows, 100_000 if quick else 1_000_000)


def _one_width(report: Report, place: Path, dim: int, rows: int, sample: int) -> None:
    started = time.perf_counter()
    write_sparse_model(place / "t.model", _chunks(rows, dim))
    report.add({"work": "write", "dim": dim, "rows": rows}, {"start_s": time.perf_counter() - started})
    rocks = {"persistent_db": {"type": "rocks_db", "path": str(place / "rocksdb")}, "volatile_db": {"type": "disabled"}}
    for start in ("first", "second", "touched files"):
        if start == "touched files":
            for name in ("key", "emb_vector"):
                os.utime(place / "t.model" / name)
        figures = _start(place, rocks, rows, dim, sample)
        loads = figures["rows_loaded"]
        if loads != (rows if start == "first" else 0):
            raise SystemExit(f"{start} start: {loads} rows were loaded")
        figures["of_limit"] = figures["beyond_tiers_and_readers_mb"] * 1e6 / LIMIT_BYTES
        report.add({"work": "start", "tiers": "rocks_db", "dim": dim, "rows": rows, "start": start}, figures)
    fitting = min(rows, _free_bytes() // 2 // (28 + 4 * dim))
    if fitting < rows:
        for name, row_bytes in (("key", 8), ("emb_vector", 4 * dim)):
            os.truncate(place / "t.model" / name, fitting * row_bytes)
    memory = {"volatile_db": {"type": "hash_map"}, "persistent_db": {"type": "disabled"}}
    figures = _start(place, memory, fitting, dim, sample)
    figures["of_limit"] = figures["beyond_tiers_mb"] * 1e6 / LIMIT_BYTES
    report.add({"work": "start", "tiers": "hash_map", "dim": dim, "rows": fitting, "start": "first"}, figures)


def _chunks(rows: int, dim: int) -> Iterator[tuple[KeyArray, FloatArray]]:
    for start in range(0, rows, 50_000):
        keys = np.arange(start, min(start + 50_000, rows), dtype=np.int64) * np.int64(ODD)
        yield keys, sample_vectors(keys, dim, SEED)


def _free_bytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def _start(place: Path, databases: dict[str, Any], rows: int, dim: int, sample: int) -> dict[str, Any]:
    model = {
        "model": "large",
        "sparse_files": [str(place / "t.model")],
        "embedding_table_names": ["table"],
        "embedding_vecsize_per_table": [dim],
        "maxnum_catfeature_query_per_table_per_sample": [100],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": 1024,
        "gpucache": False,
    }
    (place / "ps.json").write_text(json.dumps({"device": "cpu", "supportlonglong": True, **databases, "models": [model]}))
    arguments = [str(place / "ps.json"), *map(str, (rows, dim, sample, ODD))]
    done = subprocess.run(
        [sys.executable, "-c", _START, *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=1800
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
