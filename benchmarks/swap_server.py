"""The server that `bench_swaps` measures: the service of a configuration, whose model is changed as standard input says.

python -m benchmarks.swap_server PORT PS_JSON     then a line of JSON for each command, which is answered by a line of JSON:

{"do": "deploy", "version": "2"}   {"do": "rollback"}     the moments of the change, in seconds of time.perf_counter
{"do": "measure"}                                         what the process has and holds
"""

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hps.configuration.load import load_configuration
from hps.parameter_server import HPS
from hps.serve.engine.app import Application
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.server import Server, listen

MODEL = "swapped"
_RETIRED_S = 60.0


def change(server: HPS, command: dict[str, str]) -> dict[str, float]:
    """Change what serves; say when it began, took over, was done, and when nothing of the old version was left."""
    old, moments, done = server.model(MODEL), {"began": time.perf_counter()}, threading.Event()

    def watch() -> None:
        while not done.is_set() and server.model(MODEL) is old:
            moments["takes_over"] = time.perf_counter()
            time.sleep(0.001)
        moments["took_over"] = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        server.deploy(MODEL, command["version"]) if command["do"] == "deploy" else server.rollback(MODEL)
        moments["done"] = time.perf_counter()
    finally:
        done.set()
        watcher.join()
    deadline = moments["done"] + _RETIRED_S
    while any(one.state == "retiring" for one in server.versions(MODEL)):
        if time.perf_counter() > deadline:
            raise RuntimeError(f"the old version was still there after {_RETIRED_S:g} s")
        time.sleep(0.002)
    return moments | {"retired": time.perf_counter()}


def measure(server: HPS) -> dict[str, Any]:
    """What the process has: memory as it is and after `malloc_trim`, descriptors, threads, objects; files of RocksDB."""
    gc.collect()
    figures: dict[str, Any] = {"rss_untrimmed_bytes": _resident_bytes()}
    ctypes.CDLL(None).malloc_trim(0)
    figures |= {
        "rss_bytes": _resident_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "python_objects": len(gc.get_objects()),
    }
    if server.config.persistent_db.type == "rocks_db":
        files = [path for path in Path(server.config.persistent_db.path).rglob("*") if path.is_file()]
        figures["disk_files"] = len(files)
        figures["disk_bytes"] = sum(path.stat().st_size for path in files)
        figures["manifest_bytes"] = sum(path.stat().st_size for path in files if path.name.startswith("MANIFEST"))
    if any(cache.device == "cuda" for cache in server.model(MODEL).caches):
        import cupy

        free, total = cupy.cuda.runtime.memGetInfo()
        figures |= {"gpu_used_bytes": total - free, "gpu_pool_bytes": cupy.get_default_memory_pool().total_bytes()}
    return figures


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def obey(app: Application, service: Server) -> None:
    """Do what standard input says until it ends."""
    lifecycle = app.lifecycle
    while lifecycle.serving is None and lifecycle.failure is None:
        time.sleep(0.01)
    server = lifecycle.serving
    print(json.dumps({"ready": server is not None, "error": str(lifecycle.failure)}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = measure(server) if command["do"] == "measure" else change(server, command)
        except Exception as error:  # noqa: BLE001 - whoever commands hears of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    service.stop()


def main(port: str, path: str) -> None:
    """Serve until standard input ends."""
    app = Application(Lifecycle(load_configuration(path)))
    service = Server(app, listen("127.0.0.1", int(port)))
    threading.Thread(target=obey, args=(app, service), daemon=True).start()
    service.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
