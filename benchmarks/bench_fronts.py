"""Measures lookups over HTTP with front processes, beside one process, under closed-loop load whose answers are checked.

    python -m benchmarks.bench_fronts --generator PROGRAM --device cpu --cells 1x1000 --connections 1,16 --fronts 0,2
    python -m benchmarks.bench_fronts --form json,lookup --connections 8 --fronts 2 --baseline CHECKOUT --turns 5

PROGRAM is called with `PORT NPORTS CONNS THREADS TABLES KEYS ROWS SECONDS CHECK TRUNC MODEL` and prints a JSON object:
rps, p50_us, p99_us, wrong, errors and checked. It loads with binary tensors. Element c of key k of table t is then the float32
with the bits t << 23 | k << 5 | c, so every vector says whose it is.

JSON comes from `--threads` processes of `hps.tools.profiling.http_load`, which compare every answer with the first one to
the same request; that one is compared with sample vectors. `json` asks `/v2/models/m/infer`, `lookup` asks
`/v1/models/m/lookup`.

With --baseline another checkout is measured in turn. With --beside, a second program of the same kind loads the service with
larger requests meanwhile. With --slow, that many clients are slow (see `benchmarks.slow_clients`).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.harness import Report, add
from benchmarks.served import address_of, head
from hps.tools.cli.tables.sample import sample_vectors
from hps.tools.profiling.http_load import HttpLoad, LoadResult

DIM = 32
POOL = 16
_PATHS = {"json": "/v2/models/m/infer", "lookup": "/v1/models/m/lookup"}
_SETTLE_S = 1.0


def write_model(place: Path, tables: int, rows: int, *, sample: bool = False) -> list[str]:
    """Write tables whose vectors say whose they are, or sample vectors, which are usual numbers in JSON."""
    files = []
    for table in range(tables):
        directory = place / f"t{table}.model"
        directory.mkdir(parents=True)
        np.arange(rows, dtype="<i8").tofile(directory / "key")
        bits = np.uint32(table << 23) | np.arange(rows * DIM, dtype=np.uint32)
        (sample_vectors(np.arange(rows), DIM) if sample else bits).tofile(directory / "emb_vector")
        files.append(str(directory))
    return files


def configuration(files: list[str], arguments: argparse.Namespace, most: int) -> dict[str, object]:
    tables = len(files)
    found: dict[str, object] = {
        "supportlonglong": True,
        "device": arguments.device,
        "volatile_db": {"type": "hash_map"},
        "models": [
            {
                "model": "m",
                "sparse_files": files,
                "embedding_table_names": [f"t{table}" for table in range(tables)],
                "embedding_vecsize_per_table": [DIM] * tables,
                "maxnum_catfeature_query_per_table_per_sample": [max(most, 1)] * tables,
                "default_value_for_each_table": [0.0] * tables,
                "deployed_device_list": arguments.devices,
                "max_batch_size": 4,
                "gpucache": arguments.device != "none",
                "gpucacheper": arguments.cached,
                "hit_rate_threshold": 1.1,
                "num_of_worker_buffer_in_pool": arguments.workspaces,
                **({"embedding_cache_type": arguments.cache_type} if arguments.cache_type else {}),
            }
        ],
        "service": {"access_log_per_s": 0, "drain_s": 0, **getattr(arguments, "service", {})},
    }
    if arguments.rocks_db:
        found["persistent_db"] = {"type": "rocks_db", "path": str(Path(arguments.rocks_db))}
        if arguments.rocks_db_alone:
            found["volatile_db"] = {"type": "disabled"}
    return found


class Service:
    """A running `hps serve`."""

    def __init__(self, checkout: str, config: Path, fronts: int | None, port: int, log: Path, *more: str) -> None:
        command = [sys.executable, "-m", "hps", "serve", str(config), "--port", str(port), *more]
        if fronts is not None:
            command += ["--fronts", str(fronts)]
        self.log = log
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([checkout, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
        }
        self.process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, cwd=checkout, env=environment)
        for _ in range(1200):
            if self.process.poll() is not None:
                raise SystemExit(log.read_text()[-3000:])
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1).status == 200:
                    break
            time.sleep(0.1)
        else:
            raise SystemExit("not ready: " + log.read_text()[-3000:])
        time.sleep(0.5)

    def cpu_s(self) -> float:
        """Return the processor time of all its processes."""
        parent = self.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        ticks = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13] for one in (parent, *children)]
        return sum(int(tick) for one in ticks for tick in one) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()


class JSONRequests:
    """Requests of one table as JSON, and the right answer to each. *Immutable*, and picklable."""

    def __init__(self, form: str, port: int, keys: int, rows: int) -> None:
        rng = np.random.default_rng(1)
        self.port, self.requests, self.answers = port, [], []
        for _ in range(POOL):
            asked = rng.integers(0, rows, keys)
            tensor = {"name": "t0", "shape": [keys], "datatype": "INT64", "data": asked.tolist()}
            body = orjson.dumps({"tables": {"t0": asked.tolist()}} if form == "lookup" else {"inputs": [tensor]})
            self.requests.append(head(_PATHS[form], len(body)) + body)
            request = urllib.request.Request(f"http://127.0.0.1:{port}{_PATHS[form]}", body, method="POST")
            answer = urllib.request.urlopen(request, timeout=10).read()
            found = orjson.loads(answer)
            vectors = found["tables"]["t0"] if form == "lookup" else found["outputs"][0]["data"]
            if not np.array_equal(np.array(vectors, np.float32).reshape(-1, DIM), sample_vectors(asked, DIM)):
                raise SystemExit(f"wrong vectors in {form}")
            self.answers.append(answer)

    def load(self, connections: int, seconds: float) -> LoadResult:
        """Load the service; every answer is compared."""

        def check(number: int, _head: bytes, body: memoryview) -> str:
            return "" if bytes(body) == self.answers[number % POOL] else "wrong"

        load = HttpLoad(address_of(self.port), connections, lambda number: (self.requests[number % POOL],), check)
        return load.run(seconds)


def load_json(requests: JSONRequests, connections: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the service from several processes."""
    processes = min(arguments.threads, connections)
    shares = [connections // processes + (place < connections % processes) for place in range(processes)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        list(pool.map(requests.load, shares, [0.2] * processes))
        first, *others = pool.map(requests.load, shares, [arguments.seconds] * processes)
    result = first.merge(others)
    p50_s, p99_s = result.times.quantiles_s((0.5, 0.99))
    wrong = result.failures.pop("wrong", 0)
    return {
        "rps": result.in_time / result.seconds, "n": len(result.times), "p50_us": 1e6 * p50_s, "p99_us": 1e6 * p99_s,
        "wrong": wrong, "errors": result.failures.total(), "checked": len(result.times), "cpu": result.busy_s / result.seconds,
    }  # fmt: skip


def load_binary(
    arguments: argparse.Namespace, tables: int, keys: int, connections: int, seconds: float, threads: int
) -> "subprocess.Popen[str]":
    command = [arguments.generator, arguments.port, 0, connections, threads, tables, keys]
    command += [arguments.key_rows or arguments.rows, seconds, arguments.check, 0, "m"]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: "subprocess.Popen[str]", service: Service) -> dict[str, Any]:
    printed, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"{said[-500:]}\n{service.log.read_text()[-2000:]}")
    found: dict[str, Any] = json.loads(printed)
    return found


@contextlib.contextmanager
def larger(arguments: argparse.Namespace, service: Service, figures: dict[str, Any]) -> Iterator[None]:
    """Load the service with larger requests meanwhile, and add their figures."""
    shape, _, connections = arguments.beside.partition(":")
    tables, keys = map(int, shape.split("x"))
    process = load_binary(arguments, tables, keys, int(connections), arguments.seconds + 2 * _SETTLE_S, 1)
    time.sleep(_SETTLE_S)
    yield
    found = result_of(process, service)
    if found["wrong"]:
        raise SystemExit(f"wrong vectors: {found}")
    figures |= {f"beside_{name}": found[name] for name in ("rps", "p50_us", "p99_us")}


@contextlib.contextmanager
def slow(arguments: argparse.Namespace, service: Service, figures: dict[str, Any]) -> Iterator[None]:
    """Let slow clients connect to the service, and stay meanwhile."""
    command = [sys.executable, "-m", "benchmarks.slow_clients", str(arguments.port), str(arguments.slow)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdin is None or process.stdout is None:
        raise SystemExit("no pipes")
    process.stdout.readline()  # all are connected
    time.sleep(_SETTLE_S)
    yield
    process.stdin.close()
    figures |= json.loads(process.stdout.read())
    process.wait(30)


def measure(arguments: argparse.Namespace, report: Report) -> None:
    cells = [tuple(map(int, cell.split("x"))) for cell in arguments.cells.split(",")]
    beside = [tuple(map(int, arguments.beside.partition(":")[0].split("x")))] if arguments.beside else []
    tables, most = max(count for count, _ in cells + beside), max(keys for _, keys in cells + beside)
    here = str(Path(__file__).resolve().parents[1])
    kinds: list[tuple[str, str, int | None]] = [("this", here, int(fronts)) for fronts in arguments.fronts.split(",")]
    if arguments.baseline:
        kinds.insert(0, ("before", arguments.baseline, None))
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        configs = {}
        for form in arguments.form.split(","):
            place = Path(scratch) / form
            place.mkdir()
            files = write_model(place, tables, arguments.rows, sample=form != "binary")
            configs[form] = place / "ps.json"
            configs[form].write_text(json.dumps(configuration(files, arguments, most)))
        for turn in range(arguments.turns):
            for form, config in configs.items():
                for kind, checkout, fronts in kinds:
                    service = Service(checkout, config, fronts, arguments.port, Path(scratch) / "log")
                    axes = {"form": form, "kind": kind, "fronts": fronts, "turn": turn}
                    try:
                        _measure_service(arguments, report, service, axes, cells)
                    finally:
                        service.stop()


def _measure_service(
    arguments: argparse.Namespace, report: Report, service: Service, axes: dict[str, Any], cells: list[tuple[int, ...]]
) -> None:
    disturbed: dict[str, Callable[..., Any]] = {}
    if arguments.beside:
        disturbed[f"{arguments.beside} beside"] = larger
    if arguments.slow:
        disturbed[f"{arguments.slow} slow clients"] = slow
    for count, keys in cells:
        for connections in map(int, arguments.connections.split(",")):
            where = {**axes, "tables": count, "keys": keys, "connections": connections}
            for meanwhile, disturb in {"": None, **disturbed}.items():
                figures: dict[str, Any] = {}
                with disturb(arguments, service, figures) if disturb is not None else contextlib.nullcontext():
                    before = service.cpu_s()
                    if axes["form"] == "binary":
                        process = load_binary(arguments, count, keys, connections, arguments.seconds, arguments.threads)
                        found = result_of(process, service)
                    else:
                        requests = JSONRequests(axes["form"], arguments.port, keys, arguments.rows)
                        before = service.cpu_s()
                        found = load_json(requests, connections, arguments)
                    cpu_s = service.cpu_s() - before
                if found["wrong"]:
                    raise SystemExit(f"wrong vectors: {found}")
                figures = {**found, "service_cpu_us": 1e6 * cpu_s / max(1, found["n"]), **figures}
                add(report, {**where, "beside": meanwhile} if disturbed else where, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", default="", help="the program that loads with binary requests")
    parser.add_argument("--form", default="binary", help="of requests: binary, json, lookup")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--cache-type", default="")
    parser.add_argument("--cached", type=float, default=1.0)
    parser.add_argument("--workspaces", type=int, default=2)
    parser.add_argument("--rocks-db", default="")
    parser.add_argument("--rocks-db-alone", action="store_true")
    parser.add_argument("--cells", default="1x1000")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--key-rows", type=int, default=0)
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--threads", type=int, default=2, help="of the generator; for JSON, processes")
    parser.add_argument("--fronts", default="0,2")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--check", type=int, default=10, help="compare every n-th binary answer")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--baseline", default="", help="another checkout")
    parser.add_argument("--beside", default="", help="TABLESxKEYS:CONNECTIONS of larger requests meanwhile")
    parser.add_argument("--slow", type=int, default=0, help="slow clients meanwhile")
    parser.add_argument("--service", type=json.loads, default={}, help="further settings of the service, as JSON")
    parser.add_argument("--port", type=int, default=8210)
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--out", default="", help="name of the results file in benchmarks/results")
    arguments = parser.parse_args()
    places = ("generator", "scratch", "baseline", "out")
    settings = {name: value for name, value in vars(arguments).items() if name not in places}
    report = Report(arguments.out, about={"settings": settings, "load_average_before": os.getloadavg()[0]})
    measure(arguments, report)
    if arguments.out:
        report.write()


if __name__ == "__main__":
    main()
