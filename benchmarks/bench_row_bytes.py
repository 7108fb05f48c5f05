"""Rows per GB in each row format: in the hash map, in Redis and in RocksDB.

Measured, not computed: of the hash map the growth of the process' resident memory, in a process of its own for each format; of
Redis the growth of `used_memory` and of the server's resident memory; of RocksDB the blocks of its files after the merge of a
load. Rows are read back and compared before a figure is added. `ratio_to_float32` compares rows per GB (10^9 bytes).

Axes: tier · row_dtype · dim · table rows.
"""

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, memory_bytes
from hps.ground.rows import decode, encode
from hps.stores.base import Database, LoadRecord
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.redis.database import RedisDatabase
from hps.stores.rocks_db.database import RocksDatabase
from hps.types import ROW_DTYPES, TableSpec
from tests.servers.redis_server import RedisServer

DIM = 128
_CHUNK = 10_000


def run(report: Report, quick: bool) -> None:
    rows = 50_000 if quick else 1_000_000
    for tier, measure in (("hash_map", _hash_map), ("redis_cluster", _redis), ("rocks_db", _rocks_db)):
        per_gb = {}
        for row_dtype in ROW_DTYPES:
            spec = TableSpec("bench", "item", DIM, 0.0, rows, row_dtype=row_dtype)
            figures = measure(spec, rows)
            per_gb[row_dtype] = rows / figures["size_bytes"] * 1e9
            figures |= {
                "bytes_per_row": figures["size_bytes"] / rows,
                "rows_per_gb": per_gb[row_dtype],
                "ratio_to_float32": per_gb[row_dtype] / per_gb["float32"],
            }
            report.add({"tier": tier, "row_dtype": row_dtype, "dim": DIM, "table_rows": rows}, figures)


def _chunks(rows: int, dim: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield distinct random keys and vectors, the same for each format."""
    keys = np.random.default_rng(1).permutation(rows * 3)[:rows].astype(np.int64)
    for start in range(0, rows, _CHUNK):
        some = keys[start : start + _CHUNK]
        yield some, np.random.default_rng(start).standard_normal((some.size, dim), np.float32)


def _load(database: Database, spec: TableSpec, rows: int) -> None:
    database.open_table(spec.tag, spec.width)
    database.reserve(spec.tag, rows)
    done = 0
    for keys, vectors in _chunks(rows, spec.dim):
        done += keys.size
        database.load_chunk(spec.tag, keys, encode("loading", vectors, spec.row_dtype), LoadRecord("bench", done, rows))
    database.finish_load(spec.tag)


def _check(database: Database, spec: TableSpec, rows: int) -> None:
    """Compare the rows of the first chunk with their vectors, within what the format rounds."""
    keys, vectors = next(_chunks(rows, spec.dim))
    stored, found = np.empty((keys.size, spec.width), np.float32), np.zeros(keys.size, np.bool_)
    if database.fetch(spec.tag, keys, stored, found) != keys.size or database.size(spec.tag) != rows:
        raise RuntimeError(f"{database.kind}: rows of {spec.tag} are missing")
    if np.abs(decode(stored, spec.dim, spec.row_dtype) - vectors).max() > 0.03:
        raise RuntimeError(f"{database.kind}: rows of {spec.tag} are not those that were loaded")


def _hash_map(spec: TableSpec, rows: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(_hash_map_here, (spec, rows)).get(timeout=600)


def _hash_map_here(spec: TableSpec, rows: int) -> dict[str, Any]:
    with closing(HashMapDatabase()) as database:
        warm = TableSpec("bench", "warm", spec.dim, 0.0, 1, row_dtype=spec.row_dtype)
        _load(database, warm, _CHUNK)  # kernels and buffers
        _check(database, warm, _CHUNK)
        database.drop_table(warm.tag)
        before = memory_bytes()
        _load(database, spec, rows)
        size = memory_bytes() - before
        _check(database, spec, rows)
        return {"size_bytes": size}


def _redis(spec: TableSpec, rows: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as directory,
        RedisServer(Path(directory)) as server,
        closing(RedisDatabase(server.address, timeout_s=60, read_timeout_s=60)) as database,
        server.client() as client,
    ):
        before = client.info("memory")
        _load(database, spec, rows)
        after = client.info("memory")
        _check(database, spec, rows)
        resident = after["used_memory_rss"] - before["used_memory_rss"]
        return {"size_bytes": after["used_memory"] - before["used_memory"], "resident_bytes": resident}


def _rocks_db(spec: TableSpec, rows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        with closing(RocksDatabase(directory)) as database:
            _load(database, spec, rows)
            _check(database, spec, rows)
        return {"size_bytes": sum(file.stat().st_blocks * 512 for file in Path(directory).rglob("*.sst"))}
