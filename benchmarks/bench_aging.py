"""Rows that age: what it costs that 1 M rows expire at the same moment, and what it costs while none does.

`expiry`: all online rows of a table were written at one time. From their expiry on, lookups of 256 keys go on at a fixed rate,
each answer is judged by that time, and the processor time of all other threads is counted until every tier has removed the
rows. `memory`: resident bytes of a process with `row_ttl_s`, beside one without. `lookups`: lookups a second of resident keys
with `row_ttl_s`, as a ratio to the same without, round after round in one process.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.harness import Report, scratch
from hps.stores.base import RowChanges

DIM, KEYS, RATE = 16, 256, 100
TTL_S = 3600.0
GRACE_US = 1_000_000
BATCH = 1 << 16
IDLE_S = 5.0
TIERS = {
    "hash_map": ("hash_map", None),
    "hash_map/rocks_db": ("hash_map", "rocks_db"),
}


def run(report: Report, quick: bool) -> None:
    """Measure all tiers; `quick` takes few rows."""
    rows = 20_000 if quick else 1_000_000
    report.about |= {"rows": rows, "dim": DIM, "load_average_before": os.getloadavg()[0]}
    for tiers in TIERS:
        report.part(f"expiry {tiers}", 400, lambda tiers=tiers: _expiry(report, tiers, rows))
    report.part("memory", 400, lambda: _memory(report, rows))
    report.part("lookups", 400, lambda: _lookups(report, rows, 3 if quick else 15))


@contextmanager
def _server(directory: Path, tiers: str, ttl_s: float, rows: int) -> Iterator[hps.HPS]:
    """Serve a table whose files have as many other rows; so many are resident in its cache."""
    volatile, persistent = TIERS[tiers]
    hps.write_sparse_model(directory / "t", (np.arange(-rows, 0), np.zeros((rows, DIM), np.float32)))
    document: dict[str, Any] = {
        "supportlonglong": True,
        "device": "cpu",
        "volatile_db": {"type": volatile},
        "models": [
            {
                "model": "m",
                "sparse_files": [str(directory / "t")],
                "embedding_table_names": ["t"],
                "embedding_vecsize_per_table": [DIM],
                "maxnum_catfeature_query_per_table_per_sample": [4096],
                "default_value_for_each_table": [0.0],
                "deployed_device_list": [0],
                "gpucacheper": 2.0,
                "hit_rate_threshold": 1.1,
                "row_ttl_s": ttl_s,
            }
        ],
    }
    if persistent:
        document["persistent_db"] = {"type": persistent, "path": str(directory / persistent)}
    with hps.HPS(document) as server:
        yield server


def _vectors(keys: np.ndarray) -> np.ndarray:
    return (keys[:, None] % 1000 + np.arange(1, DIM + 1)).astype(np.float32)


def _write(server: hps.HPS, rows: int, written_us: int, first: int = 0) -> None:
    deployment = server.model("m")
    deployment.chain.follow_log(deployment.tables[0])
    for start in range(first, first + rows, BATCH):
        keys = np.arange(start, min(start + BATCH, first + rows))
        deployment.apply(0, RowChanges(keys, _vectors(keys), np.full(keys.size, written_us)), {})


def _look(server: hps.HPS, rng: np.random.Generator, rows: int, expires_us: int) -> tuple[int, float]:
    """Look random keys up and judge the answer; return how many were there, and the seconds."""
    keys = rng.integers(0, rows, KEYS)
    began, before = time.perf_counter(), time.time_ns() // 1000
    vectors, found = server.lookup(keys, "m", "t", return_found=True)
    after, seconds = time.time_ns() // 1000, time.perf_counter() - began
    if not np.array_equal(vectors, np.where(found[:, None], _vectors(keys), 0)):
        raise AssertionError("a wrong vector")
    if (before > expires_us + GRACE_US and found.any()) or (after < expires_us and not found.all()):
        raise AssertionError(f"at {(before - expires_us) / 1e6} s from the expiry, {found.sum()} rows were answered")
    return int(found.sum()), seconds


def _expiry(report: Report, tiers: str, rows: int) -> None:
    rng = np.random.default_rng(report.seed)
    with scratch("aging") as directory, _server(directory, tiers, TTL_S, rows) as server:
        began = time.perf_counter()
        _write(server, rows // 10, time.time_ns() // 1000, first=rows)  # these stay
        lead_s = IDLE_S + 40 * (time.perf_counter() - began)
        expires_us = time.time_ns() // 1000 + round(lead_s * 1e6)
        _write(server, rows, expires_us - round(TTL_S * 1e6))
        if time.time_ns() // 1000 > expires_us - 2_000_000:
            raise AssertionError(f"writing took longer than {lead_s} s")
        times: dict[str, list[float]] = {"idle": [], "beside": []}
        gone_s = cpu_s = 0.0
        used_before = time.process_time() - time.thread_time()
        while True:
            now_us = time.time_ns() // 1000
            if now_us < expires_us:
                used_before, phase = time.process_time() - time.thread_time(), "idle"
            else:
                phase = "beside"
            found, seconds = _look(server, rng, rows, expires_us)
            times[phase].append(seconds)
            if phase == "beside" and not found and not gone_s:
                gone_s = (time.time_ns() // 1000 - expires_us) / 1e6
            expired = server.metrics.registry.get_sample_value("hps_expired_rows_total", {"model": "m", "table": "t"})
            if expired == rows:
                cpu_s = time.process_time() - time.thread_time() - used_before
                break
            time.sleep(max(0.0, 1 / RATE - seconds))
        removed_s = (time.time_ns() // 1000 - expires_us) / 1e6
    idle, beside = (np.quantile(times[phase], [0.5, 0.99]) * 1e3 for phase in ("idle", "beside"))
    report.add(
        {"work": "expiry", "tiers": tiers, "rows": rows},
        {
            "answered_as_absent_after_s": gone_s,
            "removed_after_s": removed_s,
            "background_cpu_s": cpu_s,
            "cpu_us_per_row": cpu_s / rows * 1e6,
            "idle_p50_ms": idle[0],
            "idle_p99_ms": idle[1],
            "beside_p50_ms": beside[0],
            "beside_p99_ms": beside[1],
            "beside_worst_ms": max(times["beside"]) * 1e3,
        },
    )


def resident_bytes(rows: int, ttl_s: float) -> int:
    """Return the resident bytes that online rows take in a process of their own."""
    with scratch("aging") as directory, _server(directory, "hash_map", ttl_s, rows) as server:
        _write(server, 1000, time.time_ns() // 1000)
        before = _resident()
        _write(server, rows, time.time_ns() // 1000)
        return _resident() - before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory(report: Report, rows: int) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        without, aging = (pool.submit(resident_bytes, rows, ttl_s).result(300) for ttl_s in (0.0, TTL_S))
    report.add(
        {"work": "memory", "tiers": "hash_map", "rows": rows},
        {"bytes_a_row": aging / rows, "bytes_a_row_without": without / rows, "further_bytes_a_row": (aging - without) / rows},
    )


def _lookups(report: Report, rows: int, rounds: int) -> None:
    rng = np.random.default_rng(report.seed)
    with (
        scratch("aging") as first,
        scratch("aging") as second,
        _server(first, "hash_map", 0.0, rows) as without,
        _server(second, "hash_map", TTL_S, rows) as aging,
    ):
        for server in (without, aging):
            _write(server, rows, time.time_ns() // 1000)
        for count in (KEYS, 4096):
            sets = [rng.integers(0, rows, count) for _ in range(16)]
            rates: dict[bool, list[float]] = {False: [], True: []}
            for server in (without, aging):
                for keys in sets:
                    if not server.lookup(keys, "m", "t", return_found=True)[1].all():
                        raise AssertionError("a row is missing")
            for _ in range(rounds):
                for ages, server in ((False, without), (True, aging)):
                    began, done = time.perf_counter(), 0
                    while time.perf_counter() - began < 0.4:
                        for keys in sets:
                            server.lookup(keys, "m", "t")
                        done += len(sets)
                    rates[ages].append(done / (time.perf_counter() - began))
            ratio = float(np.median(np.array(rates[True]) / np.array(rates[False])))
            report.add(
                {"work": "lookups", "tiers": "embedding_cache/hash_map", "batch": count},
                {"lookups_per_s": np.median(rates[True]), "lookups_per_s_without": np.median(rates[False]), "ratio": ratio},
            )
