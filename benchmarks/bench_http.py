"""The HTTP service on loopback, one process, 1,000 keys x dim 32: binary tensors, JSON tensors, and the hop to a thread.

Limit of binary tensors: a raw ASGI application that returns the same bytes. Limit of JSON: a bare orjson route that does the
same parsing and serialising without a check or a thread. All servers run at once under the same uvicorn and are measured in
turn, round after round; figures are medians of the rounds, ratios are of those. Processor time a request, of the server's
process alone, is beside them, as it suffers less from whatever else the machine does.

The load is made by wrk where it is installed, else by a Python process that sends and receives on as many sockets, which
takes away from what a server could do: the report says which.
"""

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.harness import Report
from benchmarks.http_servers import HOPS
from hps.models.sample import sample_vectors
from hps.models.writer import write_sparse_model

_ROWS, _DIM, _KEYS = 100_000, 32, 1_000
_ROTATION = 8
_INFER, _LOOKUP = "/v2/models/m/infer", "/v1/models/m/lookup"
_START_S = 60.0
_SECONDS = 1  # of load in a round


@dataclass(frozen=True)
class _Request:
    """A kind of request: rotating bodies, and what is common to them."""

    path: str
    bodies: list[bytes]
    headers: dict[str, str]


@dataclass(frozen=True)
class _Load:
    """What a comparison sends: closed loops on so many connections."""

    form: str
    request: _Request
    connections: int
    directory: Path


@dataclass(frozen=True)
class _Target:
    """A server under load."""

    server: str
    process: "subprocess.Popen[bytes]"
    port: int


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes short rounds."""
    rounds = 1 if quick else 5
    rng = np.random.default_rng(report.seed)
    keys = [rng.integers(0, _ROWS, _KEYS) for _ in range(_ROTATION)]
    requests = {"binary": _binary(keys), "json": _json(keys), "curl": _curl(keys)}
    report.about["load"] = "wrk" if shutil.which("wrk") else "python"
    report.about["rounds"] = rounds
    report.about["load_average_before"] = os.getloadavg()[0]
    report.about["niceness"] = os.nice(0)
    with tempfile.TemporaryDirectory(prefix="hps-bench-http-") as name:
        directory = Path(name)
        _write_models(directory)
        with _servers(directory) as targets:
            _check(targets, requests, keys)
            service = ("embedding_cache/own", "hash_map/own")
            hops = tuple(f"embedding_cache/{hop}" for hop in HOPS if hop != "own")
            for connections in (4,) if quick else (4, 1, 32):
                load = _Load("binary", requests["binary"], connections, directory)
                servers = ("raw", *service, *hops) if connections == 4 else ("raw", *service)
                _compare(report, load, {server: targets[server] for server in servers}, rounds)
            for form in ("json", "curl"):
                load = _Load(form, requests[form], 4, directory)
                _compare(report, load, {server: targets[server] for server in ("orjson", *service)}, rounds)


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
    return _Request(_LOOKUP, [orjson.dumps({"tables": {"item": part.tolist()}}) for part in keys], {})


def _write_models(directory: Path) -> None:
    keys = np.arange(_ROWS, dtype=np.int64)
    vectors = sample_vectors(keys, _DIM)
    write_sparse_model(directory / "item.model", (keys, vectors))
    np.save(directory / "vectors.npy", vectors)
    (directory / "answer.bin").write_bytes(vectors[: _KEYS + 1].tobytes()[: 4 * _DIM * _KEYS + 144])
    for name, cached in (("cached", True), ("uncached", False)):
        (directory / name).mkdir()
        model = {
            "model": "m",
            "sparse_files": [str(directory / "item.model")],
            "embedding_table_names": ["item"],
            "embedding_vecsize_per_table": [_DIM],
            "maxnum_catfeature_query_per_table_per_sample": [1],
            "default_value_for_each_table": [0.0],
            "deployed_device_list": [0],
            "max_batch_size": _KEYS,
            "gpucache": cached,
            "gpucacheper": 1.0,
            "hit_rate_threshold": 1.1,
            "cache_refresh_percentage_per_iteration": 1.0,
            "num_of_worker_buffer_in_pool": 8,
        }
        document = {"supportlonglong": True, "device": "cpu", "volatile_db": {"type": "hash_map"}, "models": [model]}
        (directory / name / "ps.json").write_text(json.dumps(document))


@contextmanager
def _servers(directory: Path) -> Iterator[dict[str, _Target]]:
    """Start every server, and wait until all answer."""
    commands = {
        "raw": ("raw", directory),
        "orjson": ("orjson", directory),
        "hash_map/own": ("service", directory / "uncached", "own"),
        **{f"embedding_cache/{hop}": ("service", directory / "cached", hop) for hop in HOPS},
    }
    targets: dict[str, _Target] = {}
    try:
        for name, (kind, place, *hop) in commands.items():
            port = _free_port()
            command = [sys.executable, "-m", "benchmarks.http_servers", kind, str(port), str(place), *hop]
            targets[name] = _Target(kind, subprocess.Popen(command, stderr=subprocess.DEVNULL), port)
        for target in targets.values():
            _wait_until_ready(target)
        yield targets
    finally:
        for target in targets.values():
            target.process.terminate()
        for target in targets.values():
            target.process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_ready(target: _Target) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        if target.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server {target.server} on port {target.port} did not get ready")
        try:
            with socket.create_connection(("127.0.0.1", target.port), 1) as connection:
                connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if target.server != "service" or connection.recv(100).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.1)


def _check(targets: dict[str, _Target], requests: dict[str, _Request], keys: list[Any]) -> None:
    """Every server that looks vectors up answers every body with the right ones."""
    for name, target in targets.items():
        for form, request in requests.items():
            if name == "raw" or (name == "orjson" and form == "binary"):
                continue
            for body, part in zip(request.bodies, keys, strict=True):
                expected = sample_vectors(part, _DIM)
                headers, answer = _exchange(target.port, request, body)
                if form == "binary":
                    vectors = np.frombuffer(answer[int(headers["inference-header-content-length"]) :], np.float32)
                elif form == "json":
                    vectors = np.array(orjson.loads(answer)["outputs"][0]["data"], np.float32)
                else:
                    vectors = np.array(orjson.loads(answer)["tables"]["item"], np.float32)
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


def _compare(report: Report, load: _Load, targets: dict[str, _Target], rounds: int) -> None:
    """Measure targets in turn, and add a row for each, with its ratio to the first, the limit."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    for _ in range(rounds):
        for name, target in targets.items():
            before = _processor_s(target.process.pid)
            sample = _send(load, target.port)
            sample["processor_us_per_request"] = 1e6 * (_processor_s(target.process.pid) - before) / sample["requests"]
            samples[name].append(sample)
    medians = {
        name: {figure: statistics.median(sample[figure] for sample in taken) for figure in taken[0]}
        for name, taken in samples.items()
    }
    limit = next(iter(medians.values()))["requests_per_s"]
    for name, figures in medians.items():
        server, _, hop = name.partition("/")
        axes = {"form": load.form, "connections": load.connections, "batch": _KEYS, "dim": _DIM, "tier": server}
        report.add(
            {**axes, "hop": hop} if hop else axes,
            {
                "requests_per_s": figures["requests_per_s"],
                "ratio_to_limit": figures["requests_per_s"] / limit,
                "vectors_per_s": figures["requests_per_s"] * _KEYS,
                "p50_s": figures["p50_s"],
                "p99_s": figures["p99_s"],
                "processor_us_per_request": figures["processor_us_per_request"],
            },
        )


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _send(load: _Load, port: int) -> dict[str, float]:
    return _send_by_wrk(load, port) if shutil.which("wrk") else _send_by_python(load, port)


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def _send_by_wrk(load: _Load, port: int) -> dict[str, float]:
    request, directory = load.request, load.directory
    for place, body in enumerate(request.bodies):
        (directory / f"body{place}").write_bytes(body)
    headers = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in request.headers.items())
    script = directory / "load.lua"
    script.write_text(
        f"""wrk.method = "POST"
{headers}local requests, place = {{}}, 0
init = function()
  for i = 0, {len(request.bodies) - 1} do
    local file = io.open("{directory}/body" .. i, "rb")
    requests[i] = wrk.format(nil, nil, nil, file:read("*a"))
    file:close()
  end
end
request = function()
  place = (place + 1) % {len(request.bodies)}
  return requests[place]
end
"""
    )
    url = f"http://127.0.0.1:{port}{request.path}"
    command = ["wrk", "-t1", f"-c{load.connections}", f"-d{_SECONDS}s", "--latency", "-s", str(script), url]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS + 30).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        raise RuntimeError(f"{url} failed under load:\n{text}")

    return {
        "requests": float(_found(r"(\d+) requests in", text)[1]),
        "requests_per_s": float(_found(r"Requests/sec:\s+([\d.]+)", text)[1]),
        "p50_s": _percentile(50, text),
        "p99_s": _percentile(99, text),
    }


def _percentile(percent: int, text: str) -> float:
    found = _found(rf"\b{percent}%\s+([\d.]+)(us|ms|s|m)\b", text)
    return float(found[1]) * _UNITS[found[2]]


def _found(pattern: str, text: str) -> "re.Match[str]":
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"wrk did not say {pattern}:\n{text}")
    return found


def _send_by_python(load: _Load, port: int) -> dict[str, float]:
    """A client process: one thread, `connections` sockets, each with one request under way."""
    source = Path(__file__).with_name("http_load.py")
    request = load.request
    given = {"port": port, "path": request.path, "headers": request.headers}
    given |= {"connections": load.connections, "seconds": _SECONDS}
    bodies = [body.hex() for body in request.bodies]
    text = json.dumps({**given, "bodies": bodies})
    done = subprocess.run(
        [sys.executable, str(source)], input=text, capture_output=True, text=True, check=True, timeout=_SECONDS + 30
    )
    sample: dict[str, float] = json.loads(done.stdout)
    return sample
