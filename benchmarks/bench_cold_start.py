"""The first lookup after an installation, in process and over HTTP.

`cold` starts with no compiled kernel, `warm` with those of the start before, `ahead` with what `hps compile --baseline` left.
Seconds of all processors are given beside the seconds that a person waits: on a busy machine the first say more.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Report, scratch

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
    """Measure all of it; `quick` measures one start in process."""
    report.about["load_average"] = os.getloadavg()[0]
    firsts = {"in process": _first_lookup} if quick else {"in process": _first_lookup, "hps serve": _first_served}

    def add(directory: Path, work: str, start: str) -> None:
        report.add({"work": f"first lookup, {work}", "code": "now", "start": start}, firsts[work](directory, start))

    for _ in range(1 if quick else 3):
        for work in firsts:
            with scratch("cold-start") as directory:
                for start in ("cold", "warm"):
                    add(directory, work, start)
    with scratch("cold-start") as directory:
        command = [sys.executable, "-m", "hps", "compile", "--baseline"]
        began, used = time.monotonic(), _processor_seconds()
        subprocess.run(command, env=_environment(directory), check=True, capture_output=True, timeout=_LIMIT_S)
        report.add({"work": "hps compile --baseline"}, _seconds(began, used))
        for work in firsts:
            add(directory, work, "ahead")
        size = sum(path.stat().st_size for path in directory.rglob("*.code"))
        report.add({"work": "machine code of all kernels, one Python version"}, {"bytes": size})


def _environment(directory: Path) -> dict[str, str]:
    """Copy the package without compiled kernels, once for each directory."""
    if not (directory / "site").exists():
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("hps", "cuda"):
            shutil.copytree(ROOT / part, directory / "site" / part, ignore=ignored)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "HPS_"))}
    return kept | {"PYTHONPATH": str(directory / "site"), "NUMBA_CACHE_DIR": str(directory / "kernels"), "HOME": str(directory)}


def _processor_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _seconds(began: float, used: float) -> dict[str, float]:
    return {"wall_s": time.monotonic() - began, "processor_s": _processor_seconds() - used}


def _first_lookup(directory: Path, start: str) -> dict[str, float]:
    where = directory / f"process-{start}"
    where.mkdir()
    command = [sys.executable, "-c", _FIRST, str(where)]
    environment = _environment(directory)
    began, used = time.monotonic(), _processor_seconds()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=_LIMIT_S, cwd=directory)
    return _seconds(began, used) | {"wall_s": float(done.stdout)}  # not the end of the process


def _first_served(directory: Path, start: str) -> dict[str, float]:
    """Do what `make serve` does: make a sample model, serve it, and ask for it."""
    import httpx

    where, environment = directory / f"serve-{start}", _environment(directory)
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
