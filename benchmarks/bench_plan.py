"""Predicted against measured hit rates of embedding caches, and what a recording costs lookups.

Keys of a power law (0.99, 1.2), or of one whose popularity drifts through the ids, are looked up in caches of five sizes; the
prediction has what a recording at a rate of 0.1 would hold of them. Caches are the NumPy cache and, where there is a GPU, the
CuPy cache, whose rules differ. `recording` looks up resident keys without and with a recording, in turn, call by call.
"""

import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report
from benchmarks.served import document, model
from hps.ground.registry import implementation
from hps.models.writer import write_sparse_model
from hps.parameter_server import HPS
from hps.statistics.key_traces import KeyTrace, read_traces
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from hps.tools.planning.hit_rates import predict
from hps.tools.planning.power_law import fitted_alpha
from hps.tools.profiling.workloads import power_law_keys, power_law_ranks

_DIM, _BATCH, _RATE, _THRESHOLD = 16, 1000, 0.1, 1.1
_SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
_SHIFTS = 40


def run(report: Report, quick: bool) -> None:
    """Measure both; `quick` takes small tables and few keys."""
    rows, keys = (50_000, 400_000) if quick else (500_000, 8_000_000)
    report.about |= {"rows": rows, "keys": keys, "batch": _BATCH, "rate": _RATE, "load_average_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="hps-bench-plan-") as name:
        write_sparse_model(Path(name) / "t", sample_chunks(rows, _DIM, 0))
        devices = ["cpu"]
        try:
            if (reason := implementation("cache", "cuda").unavailable_reason()) is None:
                devices.append("cuda")
            else:
                report.about["no_gpu"] = reason
        except ImportError as error:
            report.about["no_gpu"] = str(error)
        rng = np.random.default_rng(report.seed)
        for workload in ("power law 0.99", "power law 1.2", "shifting"):
            requested = _keys(rng, workload, keys, rows)
            trace = _recorded(Path(name), requested)
            for device in devices:
                for share in _SHARES:
                    _hit_rates(report, Path(name), device, workload, requested, trace, share, rows)
        for tables in (1, 26):
            _recording(report, Path(name), tables, rows, 100 if quick else 3000)


def _keys(rng: np.random.Generator, workload: str, n: int, rows: int) -> np.ndarray:
    if workload != "shifting":
        return power_law_keys(rng, n, rows, float(workload.split()[-1]))
    shifts = np.arange(n) // (n // _SHIFTS) * (rows // 400)
    return rng.permutation(rows)[(power_law_ranks(rng, n, rows, 1.05) + shifts) % rows]


def _config(directory: Path, device: str, tables: int, share: float) -> dict[str, Any]:
    entry = model(
        [directory / "t"] * tables,
        [_DIM] * tables,
        maxnum_catfeature_query_per_table_per_sample=[10] * tables,
        gpucacheper=share,
        cache_refresh_percentage_per_iteration=1.0 if share == 1.0 else 0.0,
        hit_rate_threshold=_THRESHOLD,
    )
    return document(entry, device=device)


def _recorded(directory: Path, requested: np.ndarray) -> KeyTrace:
    """What `record_trace` records of the keys, without a cache that takes time."""
    path = directory / "keys.trace"
    path.unlink(missing_ok=True)
    with HPS(_config(directory, "cpu", 1, 0.01)) as server, server.record_trace(path, rate=_RATE):
        for start in range(0, requested.size, _BATCH):
            server.lookup(requested[start : start + _BATCH], "m", 0)
    (trace,) = read_traces(path)
    if trace.asked != requested.size:
        raise RuntimeError(f"recorded {trace.asked} keys, expected {requested.size}")
    return trace


def _hit_rates(
    report: Report, directory: Path, device: str, workload: str, requested: np.ndarray, trace: KeyTrace, share: float, rows: int
) -> None:
    start = time.perf_counter()
    (predicted,) = predict(trace, [math.ceil(share * rows)], _THRESHOLD)
    seconds = time.perf_counter() - start
    with HPS(_config(directory, device, 1, share)) as server:
        half, before = requested.size // 2, 0
        for start_row in range(0, requested.size, _BATCH):
            if start_row >= half and not before:
                before = server.metrics.table("m", "t0").hits[0]
            keys = requested[start_row : start_row + _BATCH]
            vectors = server.lookup(keys, "m", 0)
            if start_row % (100 * _BATCH) == 0 and not np.array_equal(vectors, sample_vectors(keys, _DIM, 0)):
                raise RuntimeError("wrong vectors")
        measured = (server.metrics.table("m", "t0").hits[0] - before) / (requested.size - half)
    report.add(
        {"work": "hit rate", "device": device, "keys": workload, "cache_share": share},
        {
            "measured": measured,
            "predicted": predicted.hit_rate,
            "error": None if abs(predicted.hit_rate - measured) <= 0.02 else "more than 0.02",
            "difference": predicted.hit_rate - measured,
            "ideal_lru": predicted.ideal,
            "fitted_alpha": fitted_alpha(trace),
            "predict_s": seconds,
        },
    )
    if report.rows[-1]["figures"]["error"] is None:
        del report.rows[-1]["figures"]["error"]


def _recording(report: Report, directory: Path, tables: int, rows: int, calls: int) -> None:
    rng = np.random.default_rng(report.seed)
    batches = [{index: rng.integers(0, rows // 2, _BATCH) for index in range(tables)} for _ in range(8)]
    with HPS(_config(directory, "cpu", tables, 1.0)) as server:

        def timed(number: int) -> float:
            start = time.perf_counter()
            server.lookup_tables(batches[number % 8], "m", 0)
            return time.perf_counter() - start

        for number in range(32):
            timed(number)
        for rate in (0.01, 0.1, 1.0):
            recorder = server.record_trace(directory / f"cost{tables}-{rate}.trace", rate=rate)
            seconds = np.empty((calls // tables + 100, 2))
            for number in range(len(seconds)):
                for with_recording in (number % 2, 1 - number % 2):
                    server._recorder = recorder if with_recording else None
                    seconds[number, with_recording] = timed(number)
            server._recorder = None
            recorder.close()
            without, beside = np.median(seconds, axis=0)
            report.add(
                {"work": "recording", "device": "cpu", "tables": tables, "rate": rate},
                {"lookup_us": 1e6 * without, "recorded_us": 1e6 * beside, "ratio": beside / without},
            )
