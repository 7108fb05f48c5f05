"""HTTP over one and over two devices of a host: binary tensors, and which sizes of request two devices answer faster.

Two services of the same configuration but for `deployed_device_list`, [0] and [0, 1], are measured in turn, round after round,
by closed loops in processes of their own. Figures are medians of the rounds. `loop_busy` is the share of time that the thread
of the event loop was on a processor: near 1, the loop is the limit, and no device helps. `shares` are the lookups of each
device.

Axes: keys of a request; `dim`; `output`, the vectors or the found-mask alone, for which the device does the same work and the
answer is small; `hit_rate`, below 1 with a hash map that has the rest; `workers`, lookups that run at once on a device
(`num_of_worker_buffer_in_pool`). It runs without a second GPU, too: on the CPU all devices share one cache.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_http import free_port
from benchmarks.harness import Report
from benchmarks.http_devices_load import Load, drive
from hps.models.sample import sample_vectors
from hps.models.writer import write_sparse_model

_ROWS, _MISSING_ROWS = 500_000, 2_000_000
_HOT = 100_000  # keys that stay resident
_CACHED_OF_MISSING = 0.1
_WARMED = 0.3  # of the rows: those hot keys and some more, so that no set of the cache is full
_MOST_KEYS = 1 << 20
_START_S, _LEAD_S = 120.0, 0.2
_CLIENTS, _CLIENTS_OF_LARGE = 8, 4


@dataclass(frozen=True)
class _Model:
    """A model of both services: its table, and how much of it is cached."""

    dim: int
    workers: int
    hit_rate: float = 1.0

    @property
    def name(self) -> str:
        return f"dim{self.dim}-workers{self.workers}-hits{round(100 * self.hit_rate)}"

    @property
    def rows(self) -> int:
        return _ROWS if self.hit_rate == 1 else _MISSING_ROWS

    def load(self, directory: Path, keys: int, output: str, device: int | None = None) -> Load:
        ranges = ((self.hit_rate, 0, _HOT), (1 - self.hit_rate, _HOT, self.rows))
        return Load(self.name, directory / f"{self.dim}.npy", keys, output, ranges, device)


_SIZES = (1 << 10, 1 << 14, 1 << 17, _MOST_KEYS)
CASES = [
    *((_Model(dim, 1), keys, output) for dim in (32, 128) for keys in _SIZES for output in ("OUTPUT0", "FOUND0")),
    *((_Model(32, 1, 0.9), keys, output) for keys in _SIZES[-2:] for output in ("OUTPUT0", "FOUND0")),
    *((_Model(dim, 4), _SIZES[-2], output) for dim in (32, 128) for output in ("OUTPUT0", "FOUND0")),
]
ROUNDS = 3


@dataclass(frozen=True)
class _Counters:
    """Lookups by device, hits of the embedding cache, and keys."""

    lookups: dict[str, float]
    hits: float
    keys: float


@dataclass(frozen=True)
class _Service:
    process: "subprocess.Popen[bytes]"
    port: int

    def counters(self, model: str) -> "_Counters":
        """The counters of a model."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        lines = [line for line in text.splitlines() if f'model="{model}"' in line]

        def values(start: str) -> list[tuple[str, float]]:
            return [(line, float(line.rpartition(" ")[2])) for line in lines if line.startswith(start)]

        devices = {line.partition('device="')[2].partition('"')[0]: n for line, n in values("hps_device_lookups_total")}
        hits = sum(n for line, n in values("hps_hits_total") if "embedding_cache" in line)
        return _Counters(devices, hits, sum(n for _, n in values("hps_lookup_keys_total")))

    def loop_s(self) -> float:
        """Processor time of the main thread, which runs the event loop."""
        fields = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes few and small requests."""
    cases = [case for case in CASES if not quick or case[1] < 1 << 17]
    rounds, seconds = (1, 0.3) if quick else (ROUNDS, 0.7)
    report.about |= {"rounds": rounds, "seconds": seconds, "clients": _CLIENTS, "hot_keys": _HOT}
    with (
        tempfile.TemporaryDirectory(prefix="hps-bench-devices-") as name,
        ProcessPoolExecutor(_CLIENTS, mp_context=get_context("spawn")) as clients,
    ):
        directory = Path(name)
        models = list(dict.fromkeys(model for model, _, _ in cases))
        _write(directory, models)
        with _services(directory) as services:
            _warm_up(clients, services, directory, models, report.seed)
            for model, keys, output in cases:
                load = model.load(directory, keys, output)
                samples: dict[int, list[dict[str, Any]]] = {devices: [] for devices in services}
                for _ in range(rounds):
                    for devices, service in services.items():
                        samples[devices].append(_measure(clients, service, load, report.seed, seconds))
                _add_row(report, model, load, samples)


def _write(directory: Path, models: list[_Model]) -> None:
    """Write the files of all tables, and the configurations of both services."""
    entries = []
    for model in models:
        source = directory / f"{model.dim}-{model.rows}.model"
        if not source.exists():
            keys = np.arange(model.rows, dtype=np.int64)
            vectors = sample_vectors(keys, model.dim)
            write_sparse_model(source, (keys, vectors))
            if model.rows == max(one.rows for one in models if one.dim == model.dim):
                np.save(directory / f"{model.dim}.npy", vectors)
        entries.append(
            {
                "model": model.name,
                "sparse_files": [str(source)],
                "embedding_vecsize_per_table": [model.dim],
                "maxnum_catfeature_query_per_table_per_sample": [1],
                "default_value_for_each_table": [0.0],
                "max_batch_size": _MOST_KEYS,
                "gpucacheper": 1.0 if model.hit_rate == 1 else _CACHED_OF_MISSING,
                "cache_refresh_percentage_per_iteration": _WARMED,
                "hit_rate_threshold": 1.0,
                "num_of_worker_buffer_in_pool": model.workers,
                "workspace_timeout_s": 60.0,
            }
        )
    limits = {"max_keys_per_request": _MOST_KEYS, "max_held_bytes": 32 << 30, "request_timeout_s": 60.0, "lookup_threads": 16}
    for devices in (1, 2):
        deployed = [{**entry, "deployed_device_list": list(range(devices))} for entry in entries]
        document = {"supportlonglong": True, "volatile_db": {"type": "hash_map"}, "service": limits, "models": deployed}
        (directory / str(devices)).mkdir()
        (directory / str(devices) / "ps.json").write_text(json.dumps(document))


@contextmanager
def _services(directory: Path) -> Iterator[dict[int, _Service]]:
    """Start both services, by their number of devices, and wait until they are ready."""
    services: dict[int, _Service] = {}
    try:
        for devices in (1, 2):
            port, place = free_port(), directory / str(devices)
            command = [sys.executable, "-m", "benchmarks.http_servers", "service", str(port), str(place)]
            with (place / "log").open("wb") as log:
                services[devices] = _Service(subprocess.Popen(command, stdout=log, stderr=log), port)
        deadline = time.monotonic() + _START_S
        for devices, service in services.items():
            while not _ready(service):
                if service.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((directory / str(devices) / "log").read_text())
                time.sleep(0.2)
        yield services
    finally:
        for service in services.values():
            service.process.terminate()
        for service in services.values():
            service.process.wait(60)


def _ready(service: _Service) -> bool:
    try:
        connection = HTTPConnection("127.0.0.1", service.port, timeout=5)
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _warm_up(
    clients: ProcessPoolExecutor, services: dict[int, _Service], directory: Path, models: list[_Model], seed: int
) -> None:
    """Ask every device of every service for the hot keys, and let every client draw its keys."""
    for model in models:
        for devices, service in services.items():
            for device in range(devices):
                load = model.load(directory, _MOST_KEYS, "FOUND0", device)
                start = [clients.submit(drive, load, service.port, seed, place, time.time(), 0.1) for place in range(_CLIENTS)]
                for one in start:
                    one.result(120)


def _measure(
    clients: ProcessPoolExecutor, service: _Service, load: Load, seed: int, seconds: float, lead_s: float = _LEAD_S
) -> dict[str, Any]:
    large = load.keys == _MOST_KEYS
    span_s = 3 * seconds if large else seconds
    start_at_s = time.time() + lead_s
    running = [
        clients.submit(drive, load, service.port, seed, place, start_at_s, span_s)
        for place in range(_CLIENTS_OF_LARGE if large else _CLIENTS)
    ]
    time.sleep(max(0.0, start_at_s - time.time()))
    before, begun, loop_s = service.counters(load.model), time.perf_counter(), service.loop_s()
    time.sleep(max(0.0, start_at_s + span_s - time.time()))
    loop_busy = (service.loop_s() - loop_s) / (time.perf_counter() - begun)
    after = service.counters(load.model)
    results = [one.result(120) for one in running]
    if not all(in_time for in_time, _ in results):
        return _measure(clients, service, load, seed, seconds, 2 * lead_s)
    times = [one for _, taken in results for one in taken] or [float("nan")]
    lookups = {device: count - before.lookups[device] for device, count in after.lookups.items()}
    return {
        "requests_per_s": len(times) / span_s,
        "p50_s": float(np.quantile(times, 0.5)),
        "p99_s": float(np.quantile(times, 0.99)),
        "loop_busy": loop_busy,
        "hits": (after.hits - before.hits) / max(1.0, after.keys - before.keys),
        "shares": {device: count / max(1, sum(lookups.values())) for device, count in lookups.items()},
    }


def _add_row(report: Report, model: _Model, load: Load, samples: dict[int, list[dict[str, Any]]]) -> None:
    """Add the medians of a case; the ratio is of the medians."""
    figures: dict[str, Any] = {}
    for devices, taken in samples.items():
        medians = {name: statistics.median(sample[name] for sample in taken) for name in taken[0] if name != "shares"}
        figures |= {f"{name}_of_{devices}": value for name, value in medians.items()}
    shares = {device: statistics.median(one["shares"][device] for one in samples[2]) for device in samples[2][0]["shares"]}
    report.add(
        {
            "keys": load.keys,
            "dim": model.dim,
            "output": "vectors" if load.output == "OUTPUT0" else "found",
            "hit_rate": model.hit_rate,
            "workers": model.workers,
        },
        {
            "ratio": figures["requests_per_s_of_2"] / figures["requests_per_s_of_1"],
            "vectors_per_s_of_2": figures["requests_per_s_of_2"] * load.keys,
            **figures,
            "shares": " ".join(f"{device}:{share:.3f}" for device, share in shares.items()),
        },
    )
