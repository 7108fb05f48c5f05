"""The HTTP service on loopback, one process, 1,000 keys x dim 32: binary tensors and JSON.

Limit of binary tensors: a raw ASGI application that returns the same bytes. Limit of JSON: a bare orjson route that does the
same parsing and serialising without a check or a thread. All servers run at once and are measured in turn, round after round.
Figures are medians of the rounds, and ratios are ratios of medians. The processor time of the server for each request stands
beside them, as it suffers less from whatever else the machine does.

Keys in bags, 50 of hotness 20 at dim 128, are asked of the same cache twice: for a vector each, and for a vector a bag.

The load comes from one Python process (`hps.tools.profiling.http_load`), which takes processor time away from the servers where
cores are few.
"""

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.harness import Report, require, scratch
from benchmarks.served import Running, address_of, binary_post, document, float_tail, hps_serve, json_post, model, server
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_vectors
from hps.tools.profiling.http_load import HttpLoad

_ROWS, _DIM, _KEYS = 100_000, 32, 1_000
_ROTATION = 8
_BAGS, _HOTNESS, _WIDE = 50, 20, 128
_INFER, _LOOKUP = "/v2/models/m/infer", "/v1/models/m/lookup"
_SECONDS = 1.0  # of load in a round
_SERVICE = ("embedding_cache/own", "hash_map/own")


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes short rounds."""
    rounds = 1 if quick else 5
    rng = np.random.default_rng(report.seed)
    keys = [rng.integers(0, _ROWS, _KEYS) for _ in range(_ROTATION)]
    requests = {
        "binary": [binary_post(_INFER, {"t0": part}) for part in keys],
        "json": [json_post(_INFER, {"inputs": [_tensor(part)]}) for part in keys],
        "curl": [json_post(_LOOKUP, {"tables": {"t0": part.tolist()}}) for part in keys],
    }
    report.about |= {"load": "python", "rounds": rounds, "load_average_before": os.getloadavg()[0], "niceness": os.nice(0)}
    with scratch("http") as directory, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client:
        _write_models(directory)
        with _servers(directory) as targets:
            _check(targets, requests, keys)
            comparisons = [("binary", 4, "raw"), ("json", 4, "orjson"), ("curl", 4, "orjson")]
            for form, connections, limit in comparisons + ([] if quick else [("binary", 1, "raw"), ("binary", 32, "raw")]):
                axes = {"form": form, "connections": connections, "batch": _KEYS, "dim": _DIM}
                ways = {name: (targets[name], requests[form]) for name in (limit, *_SERVICE)}
                _compare(report, client, axes, ways, rounds)
            _compare_bags(report, client, targets["wide"], keys, rounds)


def _tensor(keys: Any) -> dict[str, Any]:
    return {"name": "t0", "shape": [keys.size], "datatype": "INT64", "data": keys.tolist()}


def _compare_bags(report: Report, client: ProcessPoolExecutor, target: Running, keys: list[Any], rounds: int) -> None:
    """Ask for the vectors of keys, and for the sums of bags of them, which must be equal."""
    bags = [{"t0": part.reshape(_BAGS, _HOTNESS)} for part in keys]
    requests = {
        "rows": [binary_post(_INFER, part) for part in bags],
        "bags": [binary_post(_INFER, part, combiner="sum") for part in bags],
    }
    answers = {form: _answer(target.port, bodies[0]) for form, bodies in requests.items()}
    rows, sums = float_tail(answers["rows"], _KEYS * _WIDE), float_tail(answers["bags"], _BAGS * _WIDE)
    np.testing.assert_allclose(sums.reshape(_BAGS, _WIDE), rows.reshape(_BAGS, _HOTNESS, _WIDE).sum(1), rtol=1e-5, atol=1e-5)
    axes = {"form": "binary", "connections": 4, "batch": _KEYS, "dim": _WIDE, "hotness": _HOTNESS}
    ways = {f"embedding_cache/own/{form}": (target, bodies) for form, bodies in requests.items()}
    _compare(report, client, axes, ways, rounds)


def _write_models(directory: Path) -> None:
    keys = np.arange(_ROWS, dtype=np.int64)
    vectors = sample_vectors(keys, _DIM)
    write_sparse_model(directory / "item.model", (keys, vectors))
    np.save(directory / "vectors.npy", vectors)
    (directory / "answer.bin").write_bytes(vectors[: _KEYS + 1].tobytes()[: 4 * _DIM * _KEYS + 144])
    write_sparse_model(directory / "wide.model", (keys, sample_vectors(keys, _WIDE)))


@contextmanager
def _servers(directory: Path) -> Iterator[dict[str, Running]]:
    """Start every server, and wait until all answer."""
    services = {
        "hash_map/own": (False, "item", _DIM),
        "embedding_cache/own": (True, "item", _DIM),
        "wide": (True, "wide", _WIDE),
    }
    with ExitStack() as stack:
        found = {kind: stack.enter_context(server(kind, directory)) for kind in ("raw", "orjson")}
        for name, (cached, file, dim) in services.items():
            (place := directory / name.replace("/", "-")).mkdir()
            configuration = document(model([directory / f"{file}.model"], [dim], gpucache=cached, max_batch_size=_KEYS))
            found[name] = stack.enter_context(hps_serve(configuration, place))
        yield found


def _check(targets: dict[str, Running], requests: dict[str, list[bytes]], keys: list[Any]) -> None:
    """Check that every server that looks up vectors answers every body with the right ones."""
    for name, target in targets.items():
        for form, bodies in requests.items():
            if name in ("raw", "wide") or (name == "orjson" and form == "binary"):
                continue
            for body, part in zip(bodies, keys, strict=True):
                answer = _answer(target.port, body)
                if form == "binary":
                    vectors = float_tail(answer, _KEYS * _DIM)
                else:
                    found = orjson.loads(answer)
                    vectors = np.array(found["outputs"][0]["data"] if form == "json" else found["tables"]["t0"], np.float32)
                require(np.array_equal(vectors.reshape(-1, _DIM), sample_vectors(part, _DIM)), f"{form} of {name}")


def _answer(port: int, request: bytes) -> memoryview:
    """Return the body of the answer to one request."""
    bodies: list[memoryview] = []

    def keep(_number: int, _head: bytes, body: memoryview) -> str:
        bodies.append(memoryview(bytes(body)))
        return ""

    result = HttpLoad(address_of(port), 1, lambda _number: (request,), keep).run(0.001)
    require(bodies and not result.failures, f"the status of an answer ({dict(result.failures)})")
    return bodies[0]


def _compare(
    report: Report,
    client: ProcessPoolExecutor,
    axes: dict[str, Any],
    ways: dict[str, tuple[Running, list[bytes]]],
    rounds: int,
) -> None:
    """Load servers in turn; add a row of medians for each, with its ratio to the first, the limit."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (target, requests) in ways.items():
            before = target.processor_s()
            sample = client.submit(_load, target.port, requests, axes["connections"]).result(_SECONDS + 30)
            answered = sample.pop("answered")
            taken[name].append(sample | {"processor_us_per_request": 1e6 * (target.processor_s() - before) / answered})
    limit = 0.0
    for name, samples in taken.items():
        figures = {figure: statistics.median(sample[figure] for sample in samples) for figure in samples[0]}
        limit = limit or figures["requests_per_s"]
        where = dict(zip(("tier", "hop", "answer"), name.split("/"), strict=False))
        rates = {"ratio_to_limit": figures["requests_per_s"] / limit, "vectors_per_s": figures["requests_per_s"] * _KEYS}
        report.add({**axes, **where}, {**figures, **rates})


def _load(port: int, requests: list[bytes], connections: int) -> dict[str, float]:
    """Load a server for some seconds, rotating the requests; in a process of its own."""
    sizes = [0]

    def measure(_number: int, _head: bytes, body: memoryview) -> str:
        sizes[0] = len(body)
        return ""

    load = HttpLoad(address_of(port), connections, lambda number: (requests[number % len(requests)],), measure)
    result = load.run(_SECONDS)
    require(not result.failures, f"the status of an answer ({dict(result.failures)})")
    p50_s, p99_s = result.times.quantiles_s((0.5, 0.99))
    rates = {"answered": len(result.times), "requests_per_s": result.in_time / _SECONDS}
    return {**rates, "p50_s": p50_s, "p99_s": p99_s, "answer_bytes": sizes[0]}
