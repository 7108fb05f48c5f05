"""Online writes over HTTP beside lookups: 50,000 rows of 32 floats a second, and the times of lookups at a fixed rate.

One process looks 256 keys up 250 times a second, and counts the time from the moment that a lookup is due. Another one writes
rows as binary tensors, as fast as 50,000 rows a second are due. Idle and beside writes are measured in turn, round after round,
and each quantile is the median of those of the rounds. Every answer is checked: a vector says of which key and generation it
is, and a lookup that starts after the answer to a write must show its generation or a later one.

Where a machine has few cores, the two processes take processor time away from the server. The case `elsewhere` says how much:
there the writer sends its bodies to a raw ASGI application that only reads them.
"""

import os
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, scratch
from benchmarks.served import address_of, binary_post, document, float_tail, hps_serve, model, server
from hps.models.writer import write_sparse_model
from hps.tools.profiling.http_load import HttpLoad, LoadResult

_ROWS, _DIM, _KEYS = 100_000, 32, 256
_LOOKUPS_PER_S, _ROWS_PER_S = 250, 50_000
_LOOKUP_CONNECTIONS, _WRITE_CONNECTIONS = 4, 2
_WARM_S = 1.0


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes short rounds."""
    rounds, seconds = (1, 2.0) if quick else (9, 3.0)
    report.about |= {"rounds": rounds, "seconds": seconds, "load_average_before": os.getloadavg()[0], "niceness": os.nice(0)}
    with scratch("writes") as directory, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as clients:
        configuration = write_model(directory)
        with hps_serve(configuration, directory) as service, server("raw", directory) as elsewhere:
            target, other = service.port, elsewhere.port
            cases = {
                "idle": (0, target),
                "elsewhere": (1000, other),
                "beside, 1000 rows": (1000, target),
                "beside, 100 rows": (100, target),
            }
            samples: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
            for number in range(rounds):
                for case, (batch, writes_to) in cases.items():
                    reading = clients.submit(read, directory, target, seconds, report.seed + number)
                    writing: Future[dict[str, Any]] | None = None
                    if batch:
                        writing = clients.submit(write, directory, writes_to, seconds, batch, counted=writes_to == target)
                    samples[case].append(reading.result(seconds + 60) | (writing.result(seconds + 60) if writing else {}))
            add_rows(report, {"tiers": "embedding_cache/hash_map/rocks_db"}, samples)


def read(directory: Path, port: int, seconds: float, seed: int) -> dict[str, Any]:
    """Look keys up at a fixed rate, and check every answer. Returns the times."""
    acknowledged = np.load(directory / "acknowledged.npy", mmap_mode="r")
    rng = np.random.default_rng(seed)
    requested: dict[int, Any] = {}

    def request(number: int) -> tuple[bytes]:
        keys = rng.integers(0, _ROWS, _KEYS)
        requested[number] = (keys, acknowledged[keys])
        return (binary_post("/v2/models/m/infer", {"t0": keys}),)

    def check(number: int, _: bytes, answer: memoryview) -> str:
        keys, least = requested.pop(number)
        vectors = float_tail(answer, _DIM * _KEYS).reshape(_KEYS, _DIM)
        if not (
            np.array_equal(vectors[:, 0], keys) and (vectors[:, 1:] == vectors[:, 1:2]).all() and (vectors[:, 1] >= least).all()
        ):
            raise AssertionError("a lookup got a vector that is torn, foreign or older than an acknowledged write")
        return ""

    load = HttpLoad(address_of(port), _LOOKUP_CONNECTIONS, request, check)
    _run(load, _WARM_S, _LOOKUPS_PER_S)
    return {"times": _run(load, seconds, _LOOKUPS_PER_S).times}


def write(directory: Path, port: int, seconds: float, batch: int, *, counted: bool) -> dict[str, Any]:
    """Write batches of rows, one generation after the other, and note for the other process what was acknowledged."""
    acknowledged = np.load(directory / "acknowledged.npy", mmap_mode="r+")
    keys = np.random.default_rng(batch).permutation(_ROWS).reshape(-1, batch)
    sent: dict[int, tuple[Any, int]] = {}

    def request(number: int) -> tuple[bytes]:
        place = number % len(keys)
        generation = int(acknowledged[keys[place]].max()) + 1
        sent[number] = (keys[place], generation)
        vectors = np.full((batch, _DIM), generation, np.float32)
        vectors[:, 0] = keys[place]
        return (binary_post("/v1/models/m/tables/t0/rows", {"KEYS": keys[place], "VECTORS": vectors}),)

    def check(number: int, *_: object) -> str:
        part, generation = sent.pop(number)
        if counted:
            acknowledged[part] = generation
        return ""

    load = HttpLoad(address_of(port), _WRITE_CONNECTIONS, request, check)
    _run(load, _WARM_S / 2, _ROWS_PER_S / batch)
    times = _run(load, seconds + _WARM_S / 2, _ROWS_PER_S / batch).times
    return {"write_times": times, "rows_per_s": len(times) * batch / (seconds + _WARM_S / 2)}


def _run(load: HttpLoad, seconds: float, rate: float) -> LoadResult:
    """Send requests at a fixed rate; all must be answered."""
    result = load.run(seconds, rate)
    if result.failures:
        raise RuntimeError(f"at {rate:g} requests a second: {dict(result.failures)}")
    return result


def write_model(directory: Path) -> dict[str, Any]:
    """Write a model whose vectors are of generation 0; return its configuration."""
    keys = np.arange(_ROWS)
    vectors = np.zeros((_ROWS, _DIM), np.float32)
    vectors[:, 0] = keys
    write_sparse_model(directory / "item.model", (keys, vectors))
    np.save(directory / "acknowledged.npy", np.zeros(_ROWS, np.int32))
    (directory / "answer.bin").write_bytes(b"{}")
    persistent = {"type": "rocks_db", "path": str(directory / "rocksdb")}
    return document(model([directory / "item.model"], [_DIM]), persistent_db=persistent)


def add_rows(report: Report, axes: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> None:
    """Add a row for each case, with the ratio of its p99 to the idle one of the same run."""
    idle = _quantile(samples["idle"], "times", 0.99)
    for case, taken in samples.items():
        figures = {"p50_s": _quantile(taken, "times", 0.5), "p99_s": _quantile(taken, "times", 0.99)}
        figures["p99_to_idle"] = figures["p99_s"] / idle
        if "rows_per_s" in taken[0]:
            figures["rows_per_s"] = float(np.mean([sample["rows_per_s"] for sample in taken]))
            figures["write_p50_s"] = _quantile(taken, "write_times", 0.5)
            figures["write_p99_s"] = _quantile(taken, "write_times", 0.99)
        report.add({**axes, "writes": case, "lookups_per_s": _LOOKUPS_PER_S, "keys": _KEYS, "dim": _DIM}, figures)


def _quantile(taken: list[dict[str, Any]], figure: str, share: float) -> float:
    return float(np.median([sample[figure].quantiles_s([share])[0] for sample in taken]))
