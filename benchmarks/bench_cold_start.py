"""The first lookup after an installation, in process and over HTTP; kernels for the baseline beside those for this processor.

`cold` starts with no compiled kernel, `warm` with those of the start before, `ahead` with what `hps compile --baseline` left.
`HPS_BEFORE=CHECKOUT` measures another checkout in the same run. Seconds of all processors are given beside the seconds that a
person waits: on a busy machine the first say more. The kernels run in two processes in turn, and the answers of both are equal.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Report

ROOT = Path(__file__).parents[1]
_LIMIT_S = 300.0
_FIRST = """
import os, sys, time
began = time.time()
import numpy as np
import hps
keys = np.arange(1000, dtype=np.int64)
vectors = np.random.default_rng(1).random((1000, 16), np.float32)
model = sys.argv[1] + "/t.model"
os.makedirs(model)
keys.tofile(model + "/key")
vectors.tofile(model + "/emb_vector")
table = {"model": "m", "sparse_files": [model], "embedding_table_names": ["t"], "embedding_vecsize_per_table": [16],
    "maxnum_catfeature_query_per_table_per_sample": [100], "default_value_for_each_table": [0.0], "deployed_device_list": [0],
    "max_batch_size": 100, "gpucache": True, "gpucacheper": 0.5, "hit_rate_threshold": 1.1}
document = {"supportlonglong": True, "volatile_db": {"type": "hash_map"}, "device": "cpu",
    "persistent_db": {"type": "rocks_db", "path": sys.argv[1] + "/db"}, "models": [table]}
with hps.HPS(document) as server:
    answer = server.lookup(np.arange(1200), "m", "t")
    assert (answer[:1000] == vectors).all() and not answer[1000:].any()
    print(time.time() - began)
"""


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` measures two kernels in two rounds, and one start."""
    report.about["load_average"] = os.getloadavg()[0]
    checkouts = {"now": ROOT}
    if before := os.environ.get("HPS_BEFORE"):
        checkouts["before"] = Path(before)
    for _ in range(1 if quick else 3):
        for code, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as directory:
                for start in ("cold", "warm"):
                    _add_start(report, code, "in process", start, _first_lookup(checkout, Path(directory), start))
            with tempfile.TemporaryDirectory() as directory:
                for start in () if quick else ("cold", "warm"):
                    _add_start(report, code, "hps serve", start, _first_served(checkout, Path(directory), start))
    with tempfile.TemporaryDirectory() as directory:
        environment = _environment(ROOT, Path(directory))
        command = [sys.executable, "-m", "hps", "compile", "--baseline"]
        began, used = time.monotonic(), _processor_seconds()
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=_LIMIT_S)
        report.add({"work": "hps compile --baseline"}, _seconds(began, used))
        for work in ("in process",) if quick else ("in process", "hps serve"):
            first = _first_lookup if work == "in process" else _first_served
            _add_start(report, "now", work, "ahead", first(ROOT, Path(directory), "ahead"))
        size = sum(path.stat().st_size for path in Path(directory).rglob("*.code"))
        report.add({"work": "machine code of all kernels, one Python version"}, {"bytes": size})
    _compare_processors(report, quick)


def _add_start(report: Report, code: str, work: str, start: str, figures: dict[str, float]) -> None:
    report.add({"work": f"first lookup, {work}", "code": code, "start": start}, figures)


def _environment(checkout: Path, directory: Path) -> dict[str, str]:
    """Copy the package without compiled kernels, once for each directory."""
    if not (directory / "site").exists():
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("hps", "cuda", "benchmarks"):
            shutil.copytree(checkout / part, directory / "site" / part, ignore=ignored)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "HPS_"))}
    return kept | {"PYTHONPATH": str(directory / "site"), "NUMBA_CACHE_DIR": str(directory / "kernels"), "HOME": str(directory)}


def _processor_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _seconds(began: float, used: float) -> dict[str, float]:
    return {"wall_s": time.monotonic() - began, "processor_s": _processor_seconds() - used}


def _first_lookup(checkout: Path, directory: Path, start: str) -> dict[str, float]:
    where = directory / f"process-{start}"
    where.mkdir()
    command = [sys.executable, "-c", _FIRST, str(where)]
    environment = _environment(checkout, directory)
    began, used = time.monotonic(), _processor_seconds()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=_LIMIT_S, cwd=directory)
    return _seconds(began, used) | {"wall_s": float(done.stdout)}  # not the end of the process


def _first_served(checkout: Path, directory: Path, start: str) -> dict[str, float]:
    """Do what `make serve` does: make a sample model, serve it, and ask for it."""
    import httpx

    where, environment = directory / f"serve-{start}", _environment(checkout, directory)
    where.mkdir()
    began, used = time.monotonic(), _processor_seconds()
    hps = [sys.executable, "-m", "hps"]
    made = [*hps, "create-model", "sample/item.model", "--rows", "50000", "--dim", "32"]
    for command in (made, [*hps, "init", "sample", "--output", "ps.json"]):
        subprocess.run(command, cwd=where, env=environment, check=True, capture_output=True, timeout=_LIMIT_S)
    log = where / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*hps, "serve", "ps.json", "--port", "0"], cwd=where, env=environment, stdout=file, stderr=file
        )
    try:
        answer = None
        while answer is None or answer.status_code != 200:
            if server.poll() is not None or time.monotonic() - began > _LIMIT_S:
                raise RuntimeError(f"hps serve: {log.read_text()}")
            time.sleep(0.02)
            if url := re.search(r"http://[\d.]+:\d+", log.read_text()):
                try:
                    answer = httpx.post(f"{url[0]}/v1/models/sample/lookup", json={"tables": {"item": [1, 2]}})
                except httpx.ConnectError:
                    continue
        wall_s = time.monotonic() - began
        if len(answer.json()["tables"]["item"]) != 2:
            raise RuntimeError(f"a wrong answer: {answer.text}")
    finally:
        server.terminate()
        server.wait(60)
    return _seconds(began, used) | {"wall_s": wall_s}


# -- kernels for the baseline ------------------------------------------------------------------------------------------

_WORKER = "from benchmarks.bench_cold_start import serve_kernels; serve_kernels()"


def _compare_processors(report: Report, quick: bool) -> None:
    """Time kernels for this processor and for the baseline, in several pairs of processes that take turns."""
    ratios: dict[str, list[float]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(1 if quick else 5):
            workers = {name: _start_worker(name, Path(directory)) for name in ("native", "baseline")}
            try:
                for case in list(_cases())[: 2 if quick else None]:
                    taken = _take_turns(workers, case, 3 if quick else 31)
                    ratios.setdefault(case, []).append(median(taken["native"]) / median(taken["baseline"]))
                    for name, seconds in taken.items():
                        times.setdefault(case, {}).setdefault(name, []).append(median(seconds))
            finally:
                for worker in workers.values():
                    worker.kill()
                    worker.wait()
    for case, found in ratios.items():
        native, baseline = (1e6 * median(times[case][name]) for name in ("native", "baseline"))
        figures = {"native_us": native, "baseline_us": baseline, "of_native": median(found)}
        report.add({"kernel": case}, figures | {"least_of_native": min(found), "most_of_native": max(found)})


def _start_worker(name: str, directory: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, name],
        env=_environment(ROOT, directory),
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _take_turns(workers: "dict[str, subprocess.Popen[str]]", case: str, turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in workers}
    answers = set()
    for turn in range(turns):
        for name in sorted(workers, reverse=bool(turn % 2)):
            seconds, digest = _ask(workers[name], case)
            answers.add(digest)
            if turn:
                times[name].append(seconds)
    if len(answers) != 1:
        raise RuntimeError(f"{case}: the answers differ")
    return times


def _ask(worker: "subprocess.Popen[str]", case: str) -> tuple[float, str]:
    worker.stdin.write(case + "\n")  # type: ignore[union-attr]
    worker.stdin.flush()  # type: ignore[union-attr]
    seconds, digest = worker.stdout.readline().split()  # type: ignore[union-attr]
    return float(seconds), digest


def serve_kernels() -> None:
    """Run cases named on standard input; print seconds and a hash of the answer of each."""
    from hps.ground.kernels import machine_code

    if sys.argv[1] == "baseline":
        machine_code.choose_baseline()
    else:
        machine_code.refuse_baseline()
    made: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in made:
            made[case] = _cases()[case]()
            made[case]()
        began = time.perf_counter()
        answer = made[case]()
        seconds = time.perf_counter() - began
        print(seconds, hashlib.sha256(np.ascontiguousarray(answer).tobytes()).hexdigest(), flush=True)


def _cases() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return what makes each case, whose call returns its answer. Keys stay few enough that one thread answers."""
    cases: dict[str, Callable[[], Callable[[], Any]]] = {}
    for dim in (16, 32, 128):
        cases[f"hash map: fetch 8,192 of 100,000 rows, dim {dim}"] = lambda dim=dim: _fetch(dim)  # type: ignore[misc]
    cases["hash map: replace 8,192 rows, dim 32"] = lambda: _replace(32)
    cases["cache: query 8,192 resident keys, dim 32"] = lambda: _query(32)
    cases["cache: query 8,192 resident keys, dim 128"] = lambda: _query(128)
    cases["key sets: 8,192 keys, distinct"] = _distinct
    cases["key sets: add 8,192 keys"] = _added
    cases["key sets: match 8,192 keys"] = _matched
    for dim in (16, 128):
        cases[f"codec: write 8,192 rows, dim {dim}"] = lambda dim=dim: _written(dim)  # type: ignore[misc]
        cases[f"codec: read 8,192 rows, dim {dim}"] = lambda dim=dim: _read(dim)  # type: ignore[misc]
        for combiner in ("sum", "mean"):
            cases[f"pooling: {combiner} of 8,192 keys in bags of 8, dim {dim}"] = (
                lambda dim=dim, combiner=combiner: _pooled(dim, combiner)  # type: ignore[misc]
            )
    cases["RocksDB: order of 8,192 changes"] = _ordered
    return cases


def _keys(count: int = 8192, among: int = 100_000) -> Any:
    return np.random.default_rng(5).integers(0, among, count)


def _rows(keys: Any, dim: int) -> Any:
    return (keys[:, None] * 31 + np.arange(dim)).astype(np.float32)


def _filled(dim: int) -> Any:
    from hps.stores.hash_map.database import HashMapDatabase

    database, keys = HashMapDatabase(), np.arange(100_000)
    database.open_table("t", dim)
    database.insert("t", keys, _rows(keys, dim))
    return database


def _fetch(dim: int) -> Callable[[], Any]:
    database, keys, out = _filled(dim), _keys(), np.empty((8192, dim), np.float32)

    def fetch() -> Any:
        found = np.zeros(8192, np.bool_)
        database.fetch("t", keys, out, found)
        return out

    if not (fetch() == _rows(keys, dim)).all():
        raise RuntimeError("a wrong vector")
    return fetch


def _replace(dim: int) -> Callable[[], Any]:
    database, keys = _filled(dim), np.unique(_keys())
    rows = _rows(keys, dim)

    def replace() -> Any:
        database.insert("t", keys, rows)
        return rows

    return replace


def _query(dim: int) -> Callable[[], Any]:
    from hps.cache.cpu import kernels
    from hps.cache.cpu.cache import NumpyCache
    from hps.types import TableSpec

    cache = NumpyCache([TableSpec("m", "t", dim, 0.0, 8192)], [400_000])
    all_keys, keys = np.arange(100_000), _keys()
    cache.insert(0, all_keys, _rows(all_keys, dim))
    table, out, missing = cache.open_tables()[0], np.zeros((8192, dim), np.float32), np.empty(8192, np.int64)

    def query() -> Any:
        kernels.query(table.lines, table.vectors, table.state, keys, out, np.empty(0, np.bool_), missing, dim, 0)
        return out

    return query


def _distinct() -> Callable[[], Any]:
    from hps.ground.key_sets import DistinctKeys

    keys, places, inverse, found = _keys(8192, 5000), np.arange(8192), np.empty(8192, np.int64), DistinctKeys()
    return lambda: found.find(keys, places, inverse)[inverse]


def _added() -> Callable[[], Any]:
    from hps.ground.key_sets import KeySet

    keys = _keys(8192, 5000)
    return lambda: KeySet(8192).add(keys)


def _matched() -> Callable[[], Any]:
    from hps.ground.key_sets import KeyPlaces

    places, keys = KeyPlaces(np.arange(0, 10_000, 2)), _keys(8192, 10_000)
    return lambda: places.match(keys)[0]


def _written(dim: int) -> Callable[[], Any]:
    from hps.stores.redis.codec import FIELD_BYTES, write_rows

    keys, order = _keys(), np.arange(8192)
    rows, header = _rows(keys, dim).view(np.uint8), np.frombuffer(b"$%d\r\n" % (4 * dim), np.uint8)
    buffer = np.zeros(8192 * (FIELD_BYTES + header.size + 4 * dim + 2), np.uint8)

    def write() -> Any:
        write_rows(keys, order, header, rows, buffer, 0)
        return buffer

    return write


def _read(dim: int) -> Callable[[], Any]:
    from hps.stores.redis.codec import HITS, read_rows

    header = b"$%d\r\n" % (4 * dim)
    vectors = _rows(_keys(), dim)
    reply = np.frombuffer(b"*8192\r\n" + b"".join(header + row.tobytes() + b"\r\n" for row in vectors), np.uint8)
    order, out, found = np.arange(8192), np.zeros((8192, 4 * dim), np.uint8), np.zeros(8192, np.bool_)
    head = np.frombuffer(header, np.uint8)

    def read() -> Any:
        state = np.zeros(4, np.int64)
        read_rows(reply, 0, reply.size, state, order, head, out, found)
        if state[HITS] != 8192:
            raise RuntimeError("not read")
        return out

    if not (read() == vectors.view(np.uint8)).all():
        raise RuntimeError("a wrong vector")
    return read


def _pooled(dim: int, combiner: str) -> Callable[[], Any]:
    from hps.cache.cpu.cache import NumpyCache
    from hps.cache.cpu.pooling import pool
    from hps.types import TableSpec

    cache = NumpyCache([TableSpec("m", "t", dim, 0.0, 8192)], [400_000])
    all_keys, keys = np.arange(100_000), _keys()
    cache.insert(0, all_keys, _rows(all_keys % 64, dim))
    table, out, missing = cache.open_tables()[0], np.zeros((1024, dim), np.float32), np.empty(8192, np.int64)
    bags = (np.empty(0, np.int64), 8, np.empty(0, np.float32), ("sum", "mean").index(combiner), 0.0, False, 0)

    def pooled() -> Any:
        pool(table.lines, table.vectors, table.state, keys, *bags, 0, 1024, np.empty((3, dim), np.float32), out, missing, 0)
        return out

    return pooled


def _ordered() -> Callable[[], Any]:
    from hps.stores.rocks_db.change_order import _SETS, _WAYS, _judge, _note

    keys, sequences = _keys(), np.arange(1, 8193)
    known_keys, known, bounds = (
        np.zeros((_SETS, _WAYS), np.int64),
        np.zeros((_SETS, _WAYS), np.int64),
        np.zeros(_SETS, np.int64),
    )
    verdicts = np.empty(8192, np.uint8)

    def order() -> Any:
        _note(keys, sequences, known_keys, known, bounds)
        _judge(keys, sequences, known_keys, known, bounds, verdicts)
        return verdicts

    return order
