"""A soak: clients look vectors up without pause while models are reloaded and Redis is killed and started again.

Every vector is compared with what its key must have. Lookups of a model that is being reloaded may be refused; nothing else
may be, since RocksDB below has every row. `HPS_SOAK_S` is how long it lasts (default 900).
"""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.harness import Report
from hps.models.sample import sample_chunks, sample_vectors
from tests.servers.redis_server import RedisServer

ROWS, DIM, KEYS, CLIENTS = 100_000, 16, 1000, 4
RESTART_S, RELOAD_S, SAMPLE_S = 60.0, 45.0, 5.0
MODELS = ("steady", "reloaded")


def _configuration(place: Path, redis: RedisServer) -> dict[str, Any]:
    def model(name: str) -> dict[str, Any]:
        return {
            "model": name,
            "sparse_files": [str(place / "table.model")],
            "embedding_table_names": ["table"],
            "embedding_vecsize_per_table": [DIM],
            "maxnum_catfeature_query_per_table_per_sample": [1],
            "default_value_for_each_table": [-1.0],
            "deployed_device_list": [0],
            "max_batch_size": KEYS,
            "gpucacheper": 0.05,
            "hit_rate_threshold": 1.1,
            "num_of_worker_buffer_in_pool": CLIENTS,
        }

    return {
        "device": "cpu",
        "volatile_db": {
            "type": "redis_cluster",
            "address": redis.address,
            "num_partitions": 4,
            "cache_missed_embeddings": True,
        },
        "persistent_db": {"type": "rocks_db", "path": str(place / "rocksdb")},
        "models": [model(name) for name in MODELS],
    }


class _Client(threading.Thread):
    """Looks random keys up, one in ten absent, and checks the answers."""

    def __init__(self, server: hps.HPS, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.stop, self.rng = server, stop, np.random.default_rng(seed)
        self.vectors = self.lookups = self.refused = self.failed = self.wrong = 0
        self.slowest_s = 0.0
        self.errors: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            keys = self.rng.integers(0, ROWS + ROWS // 10, KEYS)
            start = time.perf_counter()
            try:
                got, found = self.server.lookup(keys, MODELS[self.rng.integers(0, 2)], "table", return_found=True)
            except (hps.UnknownModelError, hps.NotReadyError):
                self.refused += 1
                continue
            except hps.HPSError as error:
                self.failed += 1
                self.errors.append(str(error))
                continue
            self.slowest_s = max(self.slowest_s, time.perf_counter() - start)
            present = keys < ROWS
            right = (found == present).all() and (got[present] == sample_vectors(keys[present], DIM, 1)).all()
            self.wrong += not (right and (got[~present] == -1).all())
            self.lookups += 1
            self.vectors += KEYS


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _connections(port: int) -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {line.split()[9] for line in lines if int(line.split()[2].split(":")[1], 16) == port}
    held = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            held.add(str(link.readlink()).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    return len(inodes & held)


def run(report: Report, quick: bool) -> None:
    """Soak for 15 minutes: 4 clients, a model reloaded every 45 s, Redis killed and started every minute."""
    lasts_s = 20.0 if quick else float(os.environ.get("HPS_SOAK_S", "900"))
    with tempfile.TemporaryDirectory(prefix="hps-soak-") as directory:
        place = Path(directory)
        hps.write_sparse_model(place / "table.model", sample_chunks(ROWS, DIM, 1))
        with RedisServer(place / "redis") as redis, hps.HPS(_configuration(place, redis)) as server:
            stop = threading.Event()
            clients = [_Client(server, seed, stop) for seed in range(CLIENTS)]
            for client in clients:
                client.start()
            begin = time.monotonic()
            restart_at, reload_at = begin + (5 if quick else RESTART_S), begin + (7 if quick else RELOAD_S)
            restarts = reloads = 0
            samples: list[tuple[float, float, int]] = []
            while (now := time.monotonic()) < begin + lasts_s:
                samples.append((now - begin, _resident_mb(), _connections(redis.port)))
                if now >= restart_at:
                    redis.kill()
                    time.sleep(3)
                    redis.start()
                    restart_at, restarts = restart_at + RESTART_S, restarts + 1
                if now >= reload_at:
                    server.undeploy("reloaded")
                    server.deploy(server.config.models[1])
                    reload_at, reloads = reload_at + RELOAD_S, reloads + 1
                time.sleep(SAMPLE_S / (5 if quick else 1))
            stop.set()
            for client in clients:
                client.join(30)
            report.about = {"errors": [error for c in clients for error in c.errors][:20]}
    for second, resident_mb, connections in samples:
        report.add({"work": "sample", "second": second}, {"resident_mb": resident_mb, "redis_connections": connections})
    third = len(samples) // 3
    middle, last = (sorted(mb for _, mb, _ in part)[third // 2] for part in (samples[third : 2 * third], samples[2 * third :]))
    figures = {
        "vectors_checked": sum(client.vectors for client in clients),
        "wrong_answers": sum(client.wrong for client in clients),
        "failed_lookups": sum(client.failed for client in clients),
        "refused_while_reloading": sum(client.refused for client in clients),
        "slowest_lookup_s": max(client.slowest_s for client in clients),
        "redis_restarts": restarts,
        "model_reloads": reloads,
        "resident_mb_middle_third": middle,
        "resident_mb_last_third": last,
        "most_connections": max(count for _, _, count in samples),
        "last_connections": samples[-1][2],
    }
    report.add({"work": "soak", "seconds": lasts_s, "clients": CLIENTS, "keys": KEYS, "dim": DIM}, figures)
