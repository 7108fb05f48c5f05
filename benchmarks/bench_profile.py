"""`hps profile` against wrk, an independent load generator, and against a plain loop of lookups in process.

Both generators send the same bytes to the same server, in turn, round after round, over as many connections, each request when
the one before is answered. The server is the service, or a plain ASGI application that returns as many bytes and does nothing
for them (`paced`: 5 ms later): what is measured there is the generators, uvicorn and the kernel. Figures are medians over the
rounds, and so are ratios, those of `hps profile` to wrk in one round.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_writes import server, write_model
from benchmarks.harness import Report
from hps.parameter_server import HPS
from hps.profiling.in_process import InProcess
from hps.profiling.service import Service

_ROWS, _DIM, _BODIES = 100_000, 32, 64
_LOADS = {"echo": ((100, 1), (100, 8)), "paced": ((100, 8),), "service": ((100, 1), (100, 8), (1000, 8))}
_FIGURES = ("requests_per_s", "p50_ms", "p99_ms")
_WRK = """
local head, text, size = {head}, {text}, {size}
local requests, place = {{}}, 0
init = function()
  local file = io.open("{keys}", "rb")
  for i = 1, {bodies} do requests[i] = head .. text .. file:read(size) end
  file:close()
end
request = function() place = place % {bodies} + 1; return requests[place] end
done = function(summary, latency, _)
  local e = summary.errors
  local errors = e.connect + e.read + e.write + e.status + e.timeout
  io.write(string.format('{{"requests": %d, "seconds": %f, "p50_us": %f, "p99_us": %f, "errors": %d}}\\n', summary.requests,
    summary.duration / 1e6, latency:percentile(50), latency:percentile(99), errors))
end
"""


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes short rounds."""
    rounds, seconds = (1, 1.0) if quick else (7, 1.0)
    report.about |= {"rounds": rounds, "seconds": seconds, "load_average_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="hps-bench-profile-") as name:
        directory = Path(name) / "m"
        write_model(directory)
        metadata = {"tables": [{"name": "item", "dim": _DIM}]}
        (directory / "metadata.json").write_text(json.dumps(metadata))
        for target in ("echo", "paced", "service"):
            with server(target, directory) as (port, _):
                for batch, connections in _LOADS[target]:
                    _compare(report, directory, target, port, batch, connections, rounds, seconds)
        _compare_in_process(report, directory, rounds, seconds)


def _compare(
    report: Report, directory: Path, target: str, port: int, batch: int, connections: int, rounds: int, seconds: float
) -> None:
    url = f"http://127.0.0.1:{port}"
    keys = np.random.default_rng(report.seed).integers(0, _ROWS, _BODIES * batch)
    np.save(directory / "keys.npy", keys)
    keys.tofile(directory / "keys.bin")
    requests = Service(url, model="m")._requests({"item": keys}, batch)
    head, text = (
        f'"{part.decode()}"'.replace("\r\n", "\\r\\n") for part in (requests.head, requests.text.replace(b'"', b'\\"'))
    )
    script = _WRK.format(head=head, text=text, size=8 * batch, bodies=_BODIES, keys=directory / "keys.bin")
    (directory / "wrk.lua").write_text(script)
    taken: dict[str, list[dict[str, float]]] = {"wrk": [], "profile": []}
    for number in range(2 * rounds):  # the two of a round follow each other, for the machine is never still
        tool = ("wrk", "profile")[(number + number // 2) % 2]  # each is the first as often as the other
        taken[tool].append({"wrk": _wrk, "profile": _profile}[tool](directory, url, batch, connections, seconds))
    wrk, profile = (
        {figure: statistics.median(one[figure] for one in taken[tool]) for figure in _FIGURES} for tool in ("wrk", "profile")
    )
    pairs = list(zip(taken["wrk"], taken["profile"], strict=True))
    ratios = {figure: [ours[figure] / theirs[figure] for theirs, ours in pairs] for figure in _FIGURES}
    report.add(
        {"target": target, "batch": batch, "dim": _DIM, "connections": connections},
        {
            **{f"profile_{figure}": value for figure, value in profile.items()},
            **{f"wrk_{figure}": value for figure, value in wrk.items()},
            **{f"ratio_{figure}": statistics.median(ratios[figure]) for figure in _FIGURES},
            "generator_busy": statistics.median(one["busy"] for one in taken["profile"]),
        },
    )


def _wrk(directory: Path, url: str, batch: int, connections: int, seconds: float) -> dict[str, float]:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{round(seconds)}s", "-s", str(directory / "wrk.lua"), url]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 30).stdout
    found = json.loads(output.strip().splitlines()[-1])
    if found["errors"]:
        raise RuntimeError(f"wrk has seen errors: {output}")
    per_s = found["requests"] / found["seconds"]
    return {"requests_per_s": per_s, "p50_ms": found["p50_us"] / 1e3, "p99_ms": found["p99_us"] / 1e3}


def _profile(directory: Path, url: str, batch: int, connections: int, seconds: float) -> dict[str, float]:
    options = {"model": "m", "batch": batch, "concurrency": connections, "seconds": round(seconds), "warmup": 0}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    files = ["--keys", str(directory / "keys.npy"), "--json", str(directory / "profile.json")]
    command = [sys.executable, "-m", "hps", "profile", url, *arguments, *files]
    subprocess.run(command, capture_output=True, check=True, timeout=seconds + 60)
    (row,) = json.loads((directory / "profile.json").read_text())["rows"]
    times = row["latency"]
    return {
        "requests_per_s": row["lookups_per_s"],
        "p50_ms": times["p50_ms"],
        "p99_ms": times["p99_ms"],
        "busy": row["generator_busy"],
    }


def _compare_in_process(report: Report, directory: Path, rounds: int, seconds: float) -> None:
    """One thread of a profile, and a loop around the same call."""
    with HPS(directory / "ps.json") as parameter_server:
        target = InProcess(parameter_server, "m")
        for batch in (100, 1000):
            keys = {"item": np.random.default_rng(report.seed).integers(0, _ROWS, _BODIES * batch)}
            profiled, plain = [], []
            for _ in range(rounds):
                profiled.append(target.measure(keys, batch, 1, seconds / 2, None, 0.1).lookups_per_s)
                plain.append(_plain_loop(parameter_server, keys["item"].reshape(_BODIES, batch), seconds / 2))
            per_s, loop_per_s = statistics.median(profiled), statistics.median(plain)
            figures = {
                "profile_requests_per_s": per_s,
                "loop_requests_per_s": loop_per_s,
                "ratio_requests_per_s": per_s / loop_per_s,
            }
            report.add({"target": "in process", "batch": batch, "dim": _DIM, "connections": 1}, figures)


def _plain_loop(parameter_server: HPS, batches: Any, seconds: float) -> float:
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        parameter_server.lookup_tables({"item": batches[done % len(batches)]}, "m")
        done += 1
    return done / (time.perf_counter() - start)
