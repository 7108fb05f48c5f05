"""The HTTP service on loopback, one process, 1,000 keys x dim 32: binary tensors, JSON tensors,.

Limit of binary tensors: a raw ASGI application that returns the same bytes. Limit of JSON: a bare orjson route that does the
same parsing and serialising without a check or a thread. All servers run at once under the same uvicorn and are measured in
turn, round after round. Figures are medians of the rounds, and ratios are ratios of medians. The processor time of the server
for each request stands beside them, as it suffers less from whatever else the machine does.

Keys in bags, 50 of hotness 20 at dim 128, are asked of the same cache twice: for a vector each, and for a vector a bag.

The load comes from one Python process (`hps.tools.profiling.http_load`), which takes processor time away from the
servers where cores are few.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.harness import Report
from benchmarks.served import address_of, document, head, model, server
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_vectors
from hps.tools.profiling.http_load import HttpLoad

_ROWS, _DIM, _KEYS = 100_000, 32, 1_000
_ROTATION = 8
_BAGS, _HOTNESS, _WIDE = 50, 20, 128
_INFER, _LOOKUP = "/v2/models/m/infer", "/v1/models/m/lookup"
_SECONDS = 1.0  # of load in a round


@dataclass(frozen=True)
class _Request:
    """A kind of request: rotating bodies, and what is common to them."""

    path: str
    bodies: list[bytes]
    headers: dict[str, str]


@dataclass(frozen=True)
class _Target:
    """A server under load."""

    port: int
    pid: int


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes short rounds."""
    rounds = 1 if quick else 5
    rng = np.random.default_rng(report.seed)
    keys = [rng.integers(0, _ROWS, _KEYS) for _ in range(_ROTATION)]
    requests = {"binary": _binary(keys), "json": _json(keys), "curl": _curl(keys)}
    report.about |= {"load": "python", "rounds": rounds, "load_average_before": os.getloadavg()[0], "niceness": os.nice(0)}
    with (
        tempfile.TemporaryDirectory(prefix="hps-bench-http-") as name,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client,
    ):
        directory = Path(name)
        _write_models(directory)
        with _servers(directory) as targets:
            _check(targets, requests, keys)
            service = ("embedding_cache/own", "hash_map/own")
            comparisons = [("binary", 4, ("raw", *service))]
            if not quick:
                comparisons += [("binary", 1, ("raw", *service)), ("binary", 32, ("raw", *service))]
            comparisons += [("json", 4, ("orjson", *service)), ("curl", 4, ("orjson", *service))]
            for form, connections, servers in comparisons:
                samples: dict[str, list[dict[str, float]]] = {server: [] for server in servers}
                for _ in range(rounds):
                    for server in servers:
                        samples[server].append(_measure(client, targets[server], requests[form], connections))
                _add_rows(report, {"form": form, "connections": connections, "batch": _KEYS, "dim": _DIM}, samples)
            _compare_bags(report, client, targets["wide"], keys, rounds)


def _compare_bags(report: Report, client: ProcessPoolExecutor, target: _Target, keys: list[Any], rounds: int) -> None:
    """Ask for the vectors of keys, and for the sums of bags of them, which must be equal."""
    requests = {form: _table(keys, parameters) for form, parameters in (("rows", {}), ("bags", {"combiner": "sum"}))}
    answers = {form: _exchange(target.port, request, request.bodies[0]) for form, request in requests.items()}
    vectors = {
        form: np.frombuffer(answer[int(headers["inference-header-content-length"]) :], np.float32)
        for form, (headers, answer) in answers.items()
    }
    expected = vectors["rows"].reshape(_BAGS, _HOTNESS, _WIDE).sum(1)
    np.testing.assert_allclose(vectors["bags"].reshape(_BAGS, _WIDE), expected, rtol=1e-5, atol=1e-5)
    samples: dict[str, list[dict[str, float]]] = {form: [] for form in requests}
    for _ in range(rounds):
        for form, request in requests.items():
            samples[form].append(_measure(client, target, request, 4))
            samples[form][-1]["answer_bytes"] = len(answers[form][1])
    axes = {"form": "binary", "connections": 4, "batch": _KEYS, "dim": _WIDE, "hotness": _HOTNESS}
    _add_rows(report, axes, {f"embedding_cache/own/{form}": taken for form, taken in samples.items()})


def _table(keys: list[Any], parameters: dict[str, Any]) -> _Request:
    size = {"binary_data_size": 8 * _KEYS}
    inputs = [{"name": "t0", "shape": [_BAGS, _HOTNESS], "datatype": "INT64", "parameters": size}]
    text = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}})
    return _Request(_INFER, [text + part.tobytes() for part in keys], {"Inference-Header-Content-Length": str(len(text))})


def _binary(keys: list[Any]) -> _Request:
    counts = np.array([[_KEYS]], np.int32)
    text = orjson.dumps(
        {
            "inputs": [
                {"name": "KEYS", "shape": [1, _KEYS], "datatype": "INT64", "parameters": {"binary_data_size": 8 * _KEYS}},
                {"name": "NUMKEYS", "shape": [1, 1], "datatype": "INT32", "parameters": {"binary_data_size": 4}},
            ],
            "parameters": {"binary_data_output": True},
        }
    )
    bodies = [text + part.tobytes() + counts.tobytes() for part in keys]
    return _Request(_INFER, bodies, {"Inference-Header-Content-Length": str(len(text))})


def _json(keys: list[Any]) -> _Request:
    def body(part: Any) -> bytes:
        inputs = [
            {"name": "KEYS", "shape": [1, _KEYS], "datatype": "INT64", "data": part.tolist()},
            {"name": "NUMKEYS", "shape": [1, 1], "datatype": "INT32", "data": [_KEYS]},
        ]
        return orjson.dumps({"inputs": inputs})

    return _Request(_INFER, [body(part) for part in keys], {})


def _curl(keys: list[Any]) -> _Request:
    return _Request(_LOOKUP, [orjson.dumps({"tables": {"t0": part.tolist()}}) for part in keys], {})


def _write_models(directory: Path) -> None:
    keys = np.arange(_ROWS, dtype=np.int64)
    vectors = sample_vectors(keys, _DIM)
    write_sparse_model(directory / "item.model", (keys, vectors))
    np.save(directory / "vectors.npy", vectors)
    (directory / "answer.bin").write_bytes(vectors[: _KEYS + 1].tobytes()[: 4 * _DIM * _KEYS + 144])
    write_sparse_model(directory / "wide.model", (keys, sample_vectors(keys, _WIDE)))
    for name, cached, file, dim in (
        ("cached", True, "item", _DIM),
        ("uncached", False, "item", _DIM),
        ("wide", True, "wide", _WIDE),
    ):
        (directory / name).mkdir()
        entry = model([directory / f"{file}.model"], [dim], gpucache=cached, max_batch_size=_KEYS)
        (directory / name / "ps.json").write_text(json.dumps(document(entry)))


@contextmanager
def _servers(directory: Path) -> Iterator[dict[str, _Target]]:
    """Start every server, and wait until all answer."""
    places = {
        "raw": ("raw", directory),
        "orjson": ("orjson", directory),
        "hash_map/own": ("service", directory / "uncached"),
        "embedding_cache/own": ("service", directory / "cached"),
        "wide": ("service", directory / "wide"),
    }
    with ExitStack() as stack:
        yield {name: _Target(*stack.enter_context(server(*place))) for name, place in places.items()}


def _check(targets: dict[str, _Target], requests: dict[str, _Request], keys: list[Any]) -> None:
    """Check that every server that looks up vectors answers every body with the right ones."""
    for name, target in targets.items():
        for form, request in requests.items():
            if name in ("raw", "wide") or (name == "orjson" and form == "binary"):
                continue
            for body, part in zip(request.bodies, keys, strict=True):
                expected = sample_vectors(part, _DIM)
                headers, answer = _exchange(target.port, request, body)
                if form == "binary":
                    vectors = np.frombuffer(answer[int(headers["inference-header-content-length"]) :], np.float32)
                elif form == "json":
                    vectors = np.array(orjson.loads(answer)["outputs"][0]["data"], np.float32)
                else:
                    vectors = np.array(orjson.loads(answer)["tables"]["t0"], np.float32)
                if not np.array_equal(vectors.reshape(-1, _DIM), expected):
                    raise AssertionError(f"{name} answers {form} wrongly")


def _exchange(port: int, request: _Request, body: bytes) -> tuple[dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", request.path, body, request.headers)
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(f"{request.path}: status {response.status}: {answer[:300]!r}")
    connection.close()
    return {name.lower(): value for name, value in response.getheaders()}, answer


def _measure(client: ProcessPoolExecutor, target: _Target, request: _Request, connections: int) -> dict[str, float]:
    before = _processor_s(target.pid)
    sample = client.submit(_load, target.port, request, connections).result(_SECONDS + 30)
    sample["processor_us_per_request"] = 1e6 * (_processor_s(target.pid) - before) / sample["requests"]
    return sample


def _load(port: int, request: _Request, connections: int) -> dict[str, float]:
    """Load a server for some seconds, rotating the bodies; in a process of its own."""
    text_length = request.headers.get("Inference-Header-Content-Length")
    length = None if text_length is None else int(text_length)
    requests = [head(request.path, len(body), length) + body for body in request.bodies]
    load = HttpLoad(address_of(port), connections, lambda number: (requests[number % len(requests)],), lambda *_: "")
    result = load.run(_SECONDS)
    if result.failures:
        raise RuntimeError(f"loading {request.path}: {dict(result.failures)}")
    p50_s, p99_s = result.times.quantiles_s((0.5, 0.99))
    return {"requests": len(result.times), "requests_per_s": result.in_time / _SECONDS, "p50_s": p50_s, "p99_s": p99_s}


def _add_rows(report: Report, axes: dict[str, Any], samples: dict[str, list[dict[str, float]]]) -> None:
    """Add a row of medians for each server, with its ratio to the first, the limit."""
    medians = {
        server: {figure: statistics.median(sample[figure] for sample in taken) for figure in taken[0]}
        for server, taken in samples.items()
    }
    limit = next(iter(medians.values()))["requests_per_s"]
    for name, figures in medians.items():
        where = dict(zip(("tier", "hop", "answer"), name.split("/"), strict=False))
        report.add(
            {**axes, **where},
            {
                "requests_per_s": figures["requests_per_s"],
                "ratio_to_limit": figures["requests_per_s"] / limit,
                "vectors_per_s": figures["requests_per_s"] * _KEYS,
                "p50_s": figures["p50_s"],
                "p99_s": figures["p99_s"],
                "processor_us_per_request": figures["processor_us_per_request"],
                **({"answer_bytes": figures["answer_bytes"]} if "answer_bytes" in figures else {}),
            },
        )


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
