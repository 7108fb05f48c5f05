"""MLCommons' LoadGen drives a served DLRM: the scenarios Server and Offline, with synthetic data.

A sample is a request of 100 to 700 pairs of a user and an item, 270 on average, as in MLPerf's DLRM; keys are drawn by a power
law. Server: requests arrive as a Poisson process of a target rate, and 99 % have to be answered within 60 ms. Offline: all are
there at once. LoadGen's log says whether a run is valid by its settings, which are in the results: they are shorter than those
of a submission.

It needs `pip install mlcommons-loadgen`. Source: https://github.com/mlcommons/inference/tree/master/loadgen.
"""

import os
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import mlperf_loadgen as loadgen
import numpy as np
import torch

import hps.torch
from benchmarks.bench_scores import binary_request, served
from benchmarks.dlrm import DLRM, FEATURES
from benchmarks.harness import Report, add, part
from benchmarks.served import address_of

_SAMPLES = 512  # different ones, in memory
_PORT = 8470
_BOUND_NS = 60_000_000
_PLACES = {"server": loadgen.TestScenario.Server, "offline": loadgen.TestScenario.Offline}


class Service:
    """Sends LoadGen's queries to a service over HTTP, from as many threads as connections, and checks every answer."""

    def __init__(self, requests: list[bytes], answers: list[np.ndarray], port: int, connections: int) -> None:
        self._requests, self._answers = requests, answers
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wrong = 0
        self._threads = [threading.Thread(target=self._work, args=(port,), daemon=True) for _ in range(connections)]
        for one in self._threads:
            one.start()

    def issue(self, samples: list[Any]) -> None:
        """Take queries; LoadGen's thread must not wait."""
        for one in samples:
            self._queue.put((one.id, one.index))

    def warm_up(self) -> None:
        """Send each request once."""
        for index in range(len(self._requests)):
            self._queue.put((None, index))
        while not self._queue.empty():
            time.sleep(0.01)
        time.sleep(0.2)

    def flush(self) -> None:
        """Do nothing: all is sent as it comes."""

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for one in self._threads:
            one.join(10)

    def _work(self, port: int) -> None:
        connection = address_of(port).open(5.0)
        buffer = bytearray(1 << 16)
        view = memoryview(buffer)
        while (query := self._queue.get()) is not None:
            identity, index = query
            connection.sendall(self._requests[index])
            have, size = 0, 1
            while have < size:
                have += connection.recv_into(view[have:])
                if size == 1 and (end := buffer.find(b"\r\n\r\n", 0, have)) >= 0:
                    at = buffer.lower().index(b"\r\ncontent-length:") + 17
                    size = end + 4 + int(buffer[at : buffer.index(b"\r\n", at)])
            expected = self._answers[index]
            if buffer[9:12] != b"200":
                self.wrong += 1
                print(bytes(buffer[:size]), flush=True)
            elif not np.allclose(np.frombuffer(buffer, np.float32, expected.size, size - expected.nbytes), expected, atol=1e-4):
                self.wrong += 1
            if identity is not None:
                loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(identity, 0, 0)])


def _samples(module: DLRM, rows: int, seed: int) -> tuple[list[bytes], list[np.ndarray], int]:
    rng = np.random.default_rng(seed)
    requests, answers, pairs = [], [], 0
    tables = len(module.emb)
    for _ in range(_SAMPLES):
        count = int(np.clip(rng.normal(270, 110), 100, 700))
        keys = np.minimum(rng.zipf(1.2, (count, tables)) - 1, rows - 1)
        dense = rng.random((count, FEATURES), np.float32)
        with torch.inference_mode():
            answers.append(module(torch.from_numpy(dense), torch.from_numpy(keys)).numpy())
        requests.append(binary_request("m", {"dense": dense, "keys": keys}))
        pairs += count
    return requests, answers, pairs // _SAMPLES


def _drive(report: Report, scenario: str, service: Service, pairs: int, rate: float, seconds: float, logs: Path) -> None:
    settings = loadgen.TestSettings()
    settings.scenario = _PLACES[scenario]
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = int(1000 * seconds)
    settings.min_query_count = 1
    if scenario == "server":
        settings.server_target_qps = rate
        settings.server_target_latency_ns = _BOUND_NS
        settings.server_target_latency_percentile = 0.99
    else:
        settings.offline_expected_qps = 16 * rate
    output = loadgen.LogOutputSettings()
    output.outdir = str(logs)
    log = loadgen.LogSettings()
    log.log_output = output
    sut = loadgen.ConstructSUT(service.issue, service.flush)
    library = loadgen.ConstructQSL(_SAMPLES, _SAMPLES, lambda indices: None, lambda indices: None)
    try:
        loadgen.StartTestWithLogSettings(sut, library, settings, log)
    finally:
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(sut)
    summary = (logs / "mlperf_log_summary.txt").read_text()
    found = dict(line.split(":", 1) for line in summary.splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in found.items()}
    p99 = found.get("99.00 percentile latency (ns)")
    figures = {
        "result": found["Result is"],
        "requests_s": float(found.get("Completed samples per second") or found["Samples per second"]),
        "p99_ms": None if p99 is None else int(p99) / 1e6,
        "wrong": service.wrong,
    }
    figures["pairs_s"] = pairs * figures["requests_s"]
    axes = {"scenario": scenario, "target_s": rate if scenario == "server" else None, "seconds": seconds, "pairs": pairs}
    add(report, axes, figures)


def run(report: Report, quick: bool) -> None:
    """Measure; on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report.about["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report.about["loadgen"] = loadgen.__version__ if hasattr(loadgen, "__version__") else ""
    report.about["bound_ms"] = _BOUND_NS / 1e6
    cores = os.cpu_count() or 2
    tables, rows, dim = (4, 1_000, 16) if quick else (26, 40_000, 64)
    torch.manual_seed(1)
    module = DLRM(tables, rows, dim).eval()
    rate = float(os.environ.get("HPS_LOADGEN_RATE") or (1500 if device == "cuda" else 100 if not quick else 50))
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        examples = (torch.rand(8, FEATURES), torch.randint(0, rows, (8, tables)))
        hps.torch.package(module, place / "models" / "m" / "1", examples, settings={"max_batch_size": 8192, "gpucacheper": 1.0})
        requests, answers, pairs = _samples(module, rows, report.seed)
        with served(["hps", "serve", str(place / "models"), "--port", str(_PORT)], _PORT, place / "log"):
            for scenario, seconds in (("server", 2.0 if quick else 30.0), ("offline", 2.0 if quick else 20.0)):
                logs = place / scenario
                logs.mkdir()
                service = Service(requests, answers, _PORT, 16 if cores >= 16 else 8)
                service.warm_up()
                drive = lambda s=service, n=scenario, t=seconds, to=logs: _drive(report, n, s, pairs, rate, t, to)  # noqa: E731
                part(report, scenario, 120, drive)
                service.close()
