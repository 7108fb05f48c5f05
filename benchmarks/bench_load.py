"""Loading sparse model files: filling databases, and the memory that it takes.

Axes: what is filled, dim, the order of the keys in the file (RocksDB takes ascending ones in one piece). Limit, in the same
run: the same database fed from memory. What reading takes is measured by `sources`.
Memory: a process of its own loads a table; its peak is counted beyond what it held before and beyond the table's own memory.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.harness import Report, memory_bytes, scratch, seconds_of
from hps.configuration.load import PersistentDbConfig, VolatileDbConfig
from hps.ground.registry import implementation
from hps.models.files import SparseModel, open_sparse_model
from hps.models.loading.read_ahead import read_ahead
from hps.models.loading.table_load import LoadTargets, TableLoad
from hps.models.writer import write_sparse_model
from hps.stores.base import Database, LoadRecord
from hps.tools.cli.tables.sample import sample_vectors
from hps.types import FloatArray, KeyArray, TableSpec

_REPEATS = 3
_SEED = 1


def run(report: Report, quick: bool) -> None:
    """Measure reading, filling and memory; every answer is checked first."""
    with scratch("load") as directory:
        rows = 200_000 if quick else 1_000_000
        for dim, order in (
            ((32, "ascending"), (32, "random")) if quick else ((32, "ascending"), (32, "random"), (128, "random"))
        ):
            count = rows * 32 // dim
            source = _write(directory / f"{order}-{dim}", count, dim, order)
            for kind in ("hash_map", "rocks_db", "both") if dim == 32 else ("both",):
                _filling(report, source, dim, order, kind, directory)
            shutil.rmtree(source)
        for count in (100_000, 400_000) if quick else (1_000_000, 4_000_000):
            source = _write(directory / "memory", count, 32, "random")
            for kind in ("hash_map", "rocks_db"):
                _memory(report, source, count, kind, directory)
            shutil.rmtree(source)


def _keys(start: int, stop: int, order: str) -> KeyArray:
    keys = np.arange(start, stop, dtype=np.int64)
    return keys if order == "ascending" else keys * np.int64(-7046029254386353131)  # odd: a permutation of the int64s


def _write(path: Path, rows: int, dim: int, order: str) -> str:
    def chunks() -> Iterator[tuple[KeyArray, FloatArray]]:
        for start in range(0, rows, 100_000):
            keys = _keys(start, min(start + 100_000, rows), order)
            yield keys, sample_vectors(keys, dim, _SEED)

    write_sparse_model(path, chunks())
    return str(path)


def _table(dim: int) -> TableSpec:
    return TableSpec("bench", "load", dim, 0.0, 1 << 20)


def _load(table: TableSpec, source: str, databases: list[Database]) -> None:
    TableLoad(table, source, LoadTargets(tuple(databases))).run()


def _chunks(model: SparseModel) -> list[tuple[KeyArray, FloatArray]]:
    """All rows of a model in memory, in chunks."""
    starts = range(0, model.rows, model.chunk_rows)
    ranges = [(start, min(start + model.chunk_rows, model.rows)) for start in starts]
    return [(keys.copy(), vectors.copy()) for _, keys, vectors in read_ahead(model, ranges)]


# -- filling ----------------------------------------------------------------------------------------------------------


@contextmanager
def _databases(kind: str, directory: Path) -> Iterator[list[Database]]:
    """Fresh databases: `hash_map`, `rocks_db`, or both."""
    made: list[Database] = []
    path = tempfile.mkdtemp(prefix="rocksdb-", dir=directory)
    try:
        if kind in ("hash_map", "both"):
            config = VolatileDbConfig(type="hash_map", num_partitions=1, allocation_rate=64 << 20)
            made.append(implementation("database", "hash_map").from_config(config))
        if kind in ("rocks_db", "both"):
            config = PersistentDbConfig(type="rocks_db", path=f"{path}/db")
            made.append(implementation("database", "rocks_db").from_config(config))
        yield made
    finally:
        for database in made:
            database.close()
        shutil.rmtree(path)


def _filling(report: Report, source: str, dim: int, order: str, kind: str, directory: Path) -> None:
    table = _table(dim)
    model = open_sparse_model(source, dim)
    chunks = _chunks(model)

    def from_files() -> float:
        with _databases(kind, directory) as databases:
            seconds = seconds_of(lambda: _load(table, source, databases))
            for database in databases:
                _check(database, table, model.rows, order)
        return seconds

    def from_memory() -> float:
        with _databases(kind, directory) as databases:
            for database in databases:
                database.open_table(table.tag, dim)

            def feed() -> None:
                done = 0
                for keys, vectors in chunks:
                    done += keys.size
                    for database in databases:
                        database.load_chunk(table.tag, keys, vectors, LoadRecord("memory", done, model.rows))
                for database in databases:
                    database.finish_load(table.tag)

            return seconds_of(feed)

    times = [(from_files(), from_memory()) for _ in range(_REPEATS)]
    files, memory = (min(column) for column in zip(*times, strict=True))
    report.add(
        {"work": "load", "into": kind, "dim": dim, "order": order, "rows": model.rows},
        {
            "vectors_per_s": model.rows / files,
            "gb_per_s": model.size_bytes / files / 1e9,
            "of_limit": memory / files,
            "limit": "the same databases fed from memory",
        },
    )


def _check(database: Database, table: TableSpec, rows: int, order: str) -> None:
    picks = np.random.default_rng(_SEED).integers(0, rows, 10_000)
    keys = _keys(0, rows, order)[picks]
    out, found = np.empty((keys.size, table.dim), np.float32), np.zeros(keys.size, np.bool_)
    database.fetch(table.tag, keys, out, found)
    if not found.all() or not np.array_equal(out, sample_vectors(keys, table.dim, _SEED)):
        raise SystemExit(f"{database.kind}: wrong answer after the load")


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory(report: Report, source: str, rows: int, kind: str, directory: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_load", source, kind, str(directory)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    report.add({"work": "memory", "into": kind, "dim": 32, "order": "random", "rows": rows}, json.loads(ran.stdout))


def _measure_memory(source: str, kind: str, directory: Path) -> None:
    """Load in this process and print its peak: first a small table, so that code and engines are there already."""
    with tempfile.TemporaryDirectory(dir=directory) as small:
        _write(Path(small) / "m", 1000, 32, "random")
        with _databases(kind, directory) as databases:
            _load(TableSpec("bench", "small", 32, 0.0, 1000), f"{small}/m", databases)
            Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
            before = memory_bytes("VmRSS")
            seconds = seconds_of(lambda: _load(_table(32), source, databases))
            peak = memory_bytes("VmHWM")
            stats = databases[0].stats(_table(32).tag)
            own = stats.vector_bytes + max(stats.overhead_bytes, 0) if kind == "hash_map" else 0
    figures = {
        "peak_mb": (peak - before) / 1e6,
        "tier_mb": own / 1e6,
        "beyond_tier_mb": (peak - before - own) / 1e6,
        "of_limit": (peak - before - own) / (256 << 20),
        "limit": "256 MB",
        "seconds": seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    _measure_memory(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
