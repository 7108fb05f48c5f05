"""A large table end to end: made, loaded into hash map, RocksDB and cache, looked up, started again; and what memory it took.

The memory beyond the tiers is the process's peak less what hash map and cache say they hold; it includes the interpreter,
compiled kernels, and RocksDB's index and filter blocks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report

DIM = 32
LOOKUPS = 300
KEYS = 20_000

_SERVE = """
import json, resource, sys, time
import numpy as np
import hps
from hps.models.sample import sample_vectors

path, rows, dim, lookups, n = sys.argv[1], *map(int, sys.argv[2:])
imported_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
start = time.perf_counter()
with hps.HPS(path) as server:
    start_s = time.perf_counter() - start
    rng = np.random.default_rng(1)
    seconds = 0.0
    for _ in range(lookups):
        keys = rng.integers(-1000, rows + 1000, n)
        start = time.perf_counter()
        vectors, found = server.lookup(keys, "large", "table", return_found=True)
        seconds += time.perf_counter() - start
        present = (keys >= 0) & (keys < rows)
        assert (found == present).all()
        assert (vectors[present] == sample_vectors(keys[present], dim, 1)).all()
        assert (vectors[~present] == 0).all()
    deployment = server.model("large")
    volatile = deployment.chain.databases[0].stats("hps_et.large.table")
    cache_bytes = deployment.caches[0].stats(0).size_bytes
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
tiers_mb = (volatile.vector_bytes + volatile.overhead_bytes + cache_bytes) / 1e6
print(json.dumps({
    "start_s": start_s, "rows_per_s": rows / start_s, "peak_mb": peak_mb, "tiers_mb": tiers_mb,
    "beyond_tiers_mb": peak_mb - tiers_mb, "of_which_imports_mb": imported_mb,
    "hash_map_bytes_a_row_beyond_vectors": volatile.overhead_bytes / volatile.rows,
    "lookup_keys_per_s": lookups * n / seconds, "vectors_checked": lookups * n,
}))
"""


def _run(program: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run(report: Report, quick: bool) -> None:
    """Make, load and serve 20 M rows x 32 (2.7 GB of files; 9 GB of disk in all)."""
    rows = 200_000 if quick else 20_000_000
    with tempfile.TemporaryDirectory(prefix="hps-large-", dir=os.environ.get("HPS_BENCH_DIR")) as directory:
        place = Path(directory)
        start = time.perf_counter()
        command = ["create-model", str(place / "t.model"), "--rows", str(rows), "--dim", str(DIM), "--seed", "1"]
        subprocess.run([sys.executable, "-m", "hps", *command], check=True, capture_output=True, timeout=1800)
        report.add({"work": "create-model", "rows": rows, "dim": DIM}, {"seconds": time.perf_counter() - start})
        model = {
            "model": "large",
            "sparse_files": [str(place / "t.model")],
            "embedding_table_names": ["table"],
            "embedding_vecsize_per_table": [DIM],
            "maxnum_catfeature_query_per_table_per_sample": [100],
            "default_value_for_each_table": [0.0],
            "deployed_device_list": [0],
            "max_batch_size": 1024,
            "gpucacheper": 0.1,
            "hit_rate_threshold": 1.1,
        }
        config = {
            "device": "cpu",
            "volatile_db": {"type": "hash_map"},
            "persistent_db": {"type": "rocks_db", "path": str(place / "rocksdb")},
            "models": [model],
        }
        (place / "ps.json").write_text(json.dumps(config))
        for work in ("first start: load both databases", "second start: RocksDB is whole"):
            figures = _run(_SERVE, str(place / "ps.json"), str(rows), str(DIM), str(LOOKUPS), str(KEYS))
            report.add({"work": work, "rows": rows, "dim": DIM}, figures)
