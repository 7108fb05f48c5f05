"""Measures lookups over HTTP with front processes, beside one process, under a closed-loop load generator that checks vectors.

    python -m benchmarks.bench_fronts GENERATOR --device cpu --cells 1x1000 --connections 1,16 --fronts 0,2

GENERATOR is a program `PORT NPORTS CONNS THREADS TABLES KEYS ROWS SECONDS CHECK TRUNC MODEL` that prints a JSON object:
rps, p50_us, p99_us, wrong, errors and checked. Element c of key k of table t is the float32 with the bits
t << 23 | k << 5 | c, so every vector says whose it is. With --baseline another checkout is measured in turn.
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
from pathlib import Path

import numpy as np

DIM = 32


def write_model(place: Path, tables: int, rows: int) -> list[str]:
    files = []
    for table in range(tables):
        directory = place / f"t{table}.model"
        directory.mkdir(parents=True)
        np.arange(rows, dtype="<i8").tofile(directory / "key")
        values = np.uint32(table << 23) | np.arange(rows * DIM, dtype=np.uint32)
        values.tofile(directory / "emb_vector")
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
        "service": {"access_log_per_s": 0, "drain_s": 0},
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

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    cells = [tuple(map(int, cell.split("x"))) for cell in arguments.cells.split(",")]
    tables, most = max(count for count, _ in cells), max(keys for _, keys in cells)
    results: list[dict[str, object]] = []
    here = str(Path(__file__).resolve().parents[1])
    kinds: list[tuple[str, str, int | None]] = [("this", here, int(fronts)) for fronts in arguments.fronts.split(",")]
    if arguments.baseline:
        kinds.insert(0, ("before", arguments.baseline, None))
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        files = write_model(Path(scratch), tables, arguments.rows)
        config = Path(scratch) / "ps.json"
        config.write_text(json.dumps(configuration(files, arguments, most)))
        for turn in range(arguments.turns):
            for kind, checkout, fronts in kinds:
                service = Service(checkout, config, fronts, arguments.port, Path(scratch) / "log")
                try:
                    for count, keys in cells:
                        for connections in map(int, arguments.connections.split(",")):
                            load = [arguments.generator, arguments.port, 0, connections, arguments.threads, count, keys]
                            load += [arguments.key_rows or arguments.rows, arguments.seconds, arguments.check, 0, "m"]
                            done = subprocess.run(list(map(str, load)), capture_output=True, text=True, check=False)
                            if done.returncode:
                                print(done.stderr[-500:], service.log.read_text()[-2000:])
                                continue
                            found = json.loads(done.stdout)
                            if found["wrong"]:
                                raise SystemExit(f"wrong vectors: {found}")
                            row = {"kind": kind, "fronts": fronts, "turn": turn, "tables": count, "keys": keys,
                                   "connections": connections, **found}  # fmt: skip
                            results.append(row)
                            print(
                                f"{kind:7} fronts {fronts!s:4} {count:2} x {keys:5} on {connections:3}: {found['rps']:8.0f}/s "
                                f"p50 {found['p50_us']:8.0f} p99 {found['p99_us']:8.0f} us, {found['errors']} errors, "
                                f"checked {found['checked']}",
                                flush=True,
                            )
                finally:
                    service.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator")
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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fronts", default="0,2")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--check", type=int, default=10)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--baseline", default="")
    parser.add_argument("--port", type=int, default=8210)
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    results = measure(arguments)
    if arguments.out:
        settings = {
            name: value for name, value in vars(arguments).items() if name not in ("generator", "scratch", "baseline", "out")
        }
        Path(arguments.out).write_text(json.dumps({"settings": settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
