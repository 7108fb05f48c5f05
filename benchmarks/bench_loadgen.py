"""MLCommons' LoadGen drives a served DLRM: the scenarios Server and Offline, with synthetic data.

A sample is a request of 100 to 700 pairs of a user and an item, 270 on average, as in MLPerf's DLRM; keys are drawn by a power
law. Server: requests arrive as a Poisson process of a target rate, and 99 % have to be answered within 60 ms. Offline: all are
there at once. LoadGen's log says whether a run is valid by its settings, which are in the results: they are shorter than those
of a submission. Every answer is compared with the module's.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

import hps.torch
from benchmarks import loadgen
from benchmarks.dlrm import DLRM, FEATURES
from benchmarks.harness import Report, require, scratch
from benchmarks.served import address_of, binary_post, float_tail, hps_serve

_SAMPLES = 512  # different ones, in memory
_BOUND_S = 0.06


def run(report: Report, quick: bool) -> None:
    """Measure; on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report.about |= {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "bound_ms": 1e3 * _BOUND_S}
    tables, rows, dim = (4, 1_000, 16) if quick else (26, 40_000, 64)
    torch.manual_seed(1)
    module = DLRM(tables, rows, dim).eval()
    rate = float(os.environ.get("HPS_LOADGEN_RATE") or (2000 if device == "cuda" else 100 if not quick else 50))
    connections, fronts = (16, 4) if (os.cpu_count() or 2) >= 16 else (8, 1)
    report.about["fronts"] = fronts
    with scratch("loadgen") as directory:
        examples = (torch.rand(8, FEATURES), torch.randint(0, rows, (8, tables)))
        package = directory / "models" / "m" / "1"
        hps.torch.package(module, package, examples, settings={"max_batch_size": 8192, "gpucacheper": 1.0})
        requests, answers, pairs = _samples(module, rows, report.seed)
        with hps_serve(directory / "models", directory, fronts=fronts) as service:
            worker = partial(_connection, service.port, requests, answers)
            with worker() as answer:
                for index in range(_SAMPLES):
                    answer([index], lambda: None)
            for scenario, seconds in (("server", 2.0 if quick else 30.0), ("offline", 2.0 if quick else 20.0)):
                offered = rate if scenario == "server" else 16 * rate
                drive = partial(loadgen.drive, scenario, [worker] * connections, _SAMPLES)
                found = report.part(scenario, 120, partial(drive, rate=offered, seconds=seconds, bound_s=_BOUND_S))
                if found is not None:
                    target = rate if scenario == "server" else None
                    axes = {"scenario": scenario, "target_s": target, "seconds": seconds, "pairs": pairs}
                    rates = {"requests_s": found.pop("queries_per_s")}
                    report.add(axes, {**found, **rates, "pairs_s": pairs * rates["requests_s"]})


def _samples(module: DLRM, rows: int, seed: int) -> tuple[list[bytes], list[np.ndarray], int]:
    rng = np.random.default_rng(seed)
    requests, answers, pairs = [], [], 0
    for _ in range(_SAMPLES):
        count = int(np.clip(rng.normal(270, 110), 100, 700))
        keys = np.minimum(rng.zipf(1.2, (count, len(module.emb))) - 1, rows - 1)
        dense = rng.random((count, FEATURES), np.float32)
        with torch.inference_mode():
            answers.append(module(torch.from_numpy(dense), torch.from_numpy(keys)).numpy())
        requests.append(binary_post("/v2/models/m/infer", {"dense": dense, "keys": keys}))
        pairs += count
    return requests, answers, pairs // _SAMPLES


@contextmanager
def _connection(port: int, requests: Sequence[bytes], answers: Sequence[np.ndarray]) -> Iterator[loadgen.Answer]:
    """Open a connection; one that sends requests and checks their answers."""
    buffer = bytearray(1 << 16)
    view = memoryview(buffer)
    with address_of(port).open(5.0) as connection:

        def answer(indices: Sequence[int], done: Callable[[], None]) -> None:
            for index in indices:
                connection.sendall(requests[index])
                have, size = 0, 1
                while have < size:
                    have += connection.recv_into(view[have:])
                    if size == 1 and (end := buffer.find(b"\r\n\r\n", 0, have)) >= 0:
                        at = buffer.lower().index(b"\r\ncontent-length:") + 17
                        size = end + 4 + int(buffer[at : buffer.index(b"\r\n", at)])
                done()
                require(buffer[9:12] == b"200", f"status of {bytes(buffer[:size])!r}")
                expected: Any = answers[index]
                require(np.allclose(float_tail(view[:size], expected.size), expected, atol=1e-4), "a score")

        yield answer
