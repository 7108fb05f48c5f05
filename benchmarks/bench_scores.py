"""Scores of a whole model over HTTP: with and without batches, beside a plain FastAPI application around the torch module.

A DLRM of 26 tables is packaged and served. Clients send requests of some samples, back to back, and compare every answer with
the module's. Three services answer in turn: `hps` with `dynamic_batching`, `hps` without, and `plain`
(`plain_score_server.py`), whose tables are on the device. `per_request` is one user with a history of 100 keys and 2,048
candidates, given once or with each candidate. On a GPU, `device` is what a call in process takes: a captured graph of lookups
and network beside the network alone on ready vectors and the lookups alone.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hps
import hps.torch
from benchmarks.dlrm import DLRM, FEATURES
from benchmarks.harness import Report, add, part
from benchmarks.served import address_of
from hps.tools.profiling.http_load import HttpLoad, LoadResult

_TABLES, _DIM = 26, 128
_POOL = 64  # different requests
_TOLERANCE = 2e-3  # of TF32 and of other batch sizes
_PORT = 8460


class Requests:
    """Requests for scores, and the right answers. *Immutable*, and picklable."""

    def __init__(self, module: DLRM, samples: int, rows: int, form: str) -> None:
        rng = np.random.default_rng(1)
        self.requests, self.answers = [], []
        tables = len(module.emb)
        for _ in range(_POOL):
            keys = rng.integers(0, rows, (samples, tables))
            dense = rng.random((samples, FEATURES), np.float32)
            with torch.inference_mode():
                self.answers.append(module(torch.from_numpy(dense), torch.from_numpy(keys)).numpy())
            if form == "plain":
                self.requests.append(_post("/score", keys.tobytes() + dense.tobytes()))
            else:
                self.requests.append(binary_request("m", {"dense": dense, "keys": keys}))

    def request(self, number: int) -> list[bytes]:
        return [self.requests[number % _POOL]]

    def check(self, number: int, head: bytes, body: memoryview) -> str:
        expected = self.answers[number % _POOL]
        got = np.frombuffer(body[len(body) - expected.nbytes :], np.float32)
        worst = float(np.abs(got - expected).max())
        return "" if worst <= _TOLERANCE else f"off by {worst:.3g}"


def binary_request(model: str, arrays: dict[str, np.ndarray]) -> bytes:
    """Make a request with binary tensors, and ask for binary outputs."""
    names = {"int64": "INT64", "float32": "FP32"}
    inputs = [
        {
            "name": name,
            "datatype": names[one.dtype.name],
            "shape": list(one.shape),
            "parameters": {"binary_data_size": one.nbytes},
        }
        for name, one in arrays.items()
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = text + b"".join(one.tobytes() for one in arrays.values())
    return _post(f"/v2/models/{model}/infer", body, f"Inference-Header-Content-Length: {len(text)}\r\n")


def _post(path: str, body: bytes, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _load(requests: Any, port: int, connections: int, seconds: float, results: Any) -> None:
    load = HttpLoad(address_of(port), connections, requests.request, requests.check)
    load.run(0.5)
    results.put(load.run(seconds))


def load(requests: Any, port: int, processes: int, connections: int, seconds: float) -> LoadResult:
    """Load a service from several processes; every answer is checked."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    share = max(1, connections // processes)
    workers = [context.Process(target=_load, args=(requests, port, share, seconds, results)) for _ in range(processes)]
    for one in workers:
        one.start()
    found = [results.get(timeout=seconds + 60) for _ in workers]
    for one in workers:
        one.join()
    return LoadResult().merge(found)


@contextlib.contextmanager
def served(command: list[str], port: int, log: Path) -> Any:
    """Run a service until it is not needed any more."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-3000:])
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1).status == 200:
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError("not ready: " + log.read_text()[-3000:])
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def _packaged(module: nn.Module, place: Path, examples: Any, device: str, **more: Any) -> None:
    settings = {"max_batch_size": 4096, "gpucacheper": 1.0, **({"embedding_cache_type": "static"} if device == "cuda" else {})}
    hps.torch.package(module, str(place), examples, settings=settings, **more)


def _configuration(repository: Path, place: Path, device: str) -> Path:
    place.write_text(
        json.dumps({"model_repository": str(repository), "device": device, "service": {"access_log_per_s": 0, "drain_s": 0}})
    )
    return place


def _http(report: Report, scratch: Path, device: str, rows: int, tables: int, dim: int, seconds: float) -> None:
    torch.manual_seed(1)
    module = DLRM(tables, rows, dim).eval()
    examples = (torch.rand(8, FEATURES), torch.randint(0, rows, (8, tables)))
    torch.save(module, scratch / "module.pt")
    for name, batching in (("batched", True), ("alone", False)):
        _packaged(module, scratch / name / "m" / "1", examples, device, dynamic_batching=batching)
    cores = os.cpu_count() or 2
    processes = 8 if cores >= 16 else 2
    fronts = str(max(1, min(4, cores - 2)))
    services: dict[str, list[str]] = {
        name: ["hps", "serve", str(_configuration(scratch / name, scratch / f"{name}.json", device)), "--fronts", fronts]
        for name in ("batched", "alone")
    }
    services["plain"] = ["benchmarks.plain_score_server", str(scratch / "module.pt"), device]
    for turn in range(2 if device == "cpu" else 1):
        for name, command in services.items():
            port = _PORT + turn
            command = [*command, str(port)] if name == "plain" else [*command, "--port", str(port)]
            with served(command, port, scratch / f"{name}.log"):
                for samples, connections in ((32, 64), (32, 1), (1, 64), (256, 16)):
                    requests = Requests(module, samples, rows, name)
                    result = load(requests, port, min(processes, connections), connections, seconds)
                    axes = {"work": "http", "service": name, "samples": samples, "clients": connections, "turn": turn}
                    figures = {
                        "requests_s": result.in_time / seconds,
                        "samples_s": samples * result.in_time / seconds,
                        "p50_ms": 1e3 * result.times.quantiles_s([0.5])[0],
                        "p99_ms": 1e3 * result.times.quantiles_s([0.99])[0],
                        "failures": sum(result.failures.values()),
                    }
                    add(report, axes, figures)
                    if result.failures:
                        print(result.failures)


class Ranker(nn.Module):
    """Ranks candidates for a user with a history."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(rows, dim, mode="mean")
        self.item = nn.Embedding(rows, dim)
        self.top = nn.Sequential(nn.Linear(2 * dim + 1, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, history: torch.Tensor, age: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        features = torch.cat([self.history(history), self.item(item), age[:, None]], 1)
        return torch.sigmoid(self.top(features)).squeeze(1)


class _Same:
    def __init__(self, request: bytes, expected: np.ndarray) -> None:
        self._request, self._expected = request, expected

    def request(self, number: int) -> list[bytes]:
        return [self._request]

    def check(self, number: int, head: bytes, body: memoryview) -> str:
        got = np.frombuffer(body[len(body) - self._expected.nbytes :], np.float32)
        return "" if np.allclose(got, self._expected, atol=1e-5) else "another score"


def _per_request(report: Report, scratch: Path, device: str, rows: int, seconds: float) -> None:
    torch.manual_seed(2)
    module, candidates = Ranker(rows, 32).eval(), 2048
    history, age = torch.randint(0, rows, (1, 100)), torch.tensor([0.31])
    item = torch.randint(0, rows, (candidates,))
    repeated = {"history": history.repeat(candidates, 1), "age": age.repeat(candidates), "item": item}
    once = {"history": history, "age": age, "item": item}
    place = scratch / "ranking"
    examples = {name: one[:8] for name, one in repeated.items()}
    _packaged(module, place / "m" / "1", examples, device, per_request=("history", "age"), hotness={"history": 100, "item": 1})
    with torch.inference_mode():
        expected = module(**repeated).numpy()
    config = _configuration(place, scratch / "ranking.json", device)
    with served(["hps", "serve", str(config), "--port", str(_PORT + 5)], _PORT + 5, scratch / "ranking.log"):
        for turn in range(2):
            for name, given in (("once", once), ("with each candidate", repeated)):
                request = binary_request("m", {key: one.numpy() for key, one in given.items()})
                result = load(_Same(request, expected), _PORT + 5, 1, 4, seconds)
                figures = {
                    "requests_s": result.in_time / seconds,
                    "p50_ms": 1e3 * result.times.quantiles_s([0.5])[0],
                    "p99_ms": 1e3 * result.times.quantiles_s([0.99])[0],
                    "failures": sum(result.failures.values()),
                    "request_bytes": len(request),
                }
                add(report, {"work": "per_request", "user": name, "turn": turn}, figures)


def _seconds(call: Callable[[], Any], calls: int = 200) -> float:
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def _device(report: Report, scratch: Path, rows: int, batch: int) -> None:
    """Calls in process on a GPU."""
    torch.manual_seed(1)
    module = torch.load(scratch / "module.pt", weights_only=False).eval()
    document = {"model_repository": str(scratch / "batched"), "device": "cuda"}
    with hps.HPS(document) as server:
        plain = module.cuda()
        dense = torch.rand(batch, FEATURES, device="cuda")
        keys = torch.randint(0, rows, (batch, len(module.emb)), device="cuda")
        vectors = [torch.empty(batch, _DIM, device="cuda") for _ in module.emb]
        columns = [keys[:, table].contiguous() for table in range(len(module.emb))]
        with torch.inference_mode():
            expected = plain(dense, keys)
            for table, one in enumerate(plain.emb):
                vectors[table].copy_(one(columns[table]))
        names = [f"emb_{table}" for table in range(len(module.emb))]
        asked, outs = dict(zip(names, columns, strict=True)), dict(zip(names, vectors, strict=True))

        def lookups_and_network() -> torch.Tensor:
            server.lookup_tables(asked, "m", 0, out=outs, wait=False)
            return plain.scores(dense, vectors)

        if not torch.allclose(lookups_and_network(), expected, atol=_TOLERANCE):
            raise RuntimeError("lookups and network answer otherwise")
        graphs = {
            "network": _graph(lambda: plain.scores(dense, vectors)),
            "lookups": _graph(lambda: server.lookup_tables(asked, "m", 0, out=outs, wait=False)),
            "lookups and network": _graph(lookups_and_network),
            "torch, whole module": _graph(lambda: plain(dense, keys)),
        }
        for name, graph in graphs.items():
            add(
                report, {"work": "device", "what": name, "batch": batch, "captured": True}, {"us": 1e6 * _seconds(graph.replay)}
            )
        given = {"dense": dense.cpu().numpy(), "keys": keys.cpu().numpy()}
        with torch.inference_mode():
            answer = server.score("m", given)["score"]
            if np.abs(answer - expected.cpu().numpy()).max() > _TOLERANCE:
                raise RuntimeError("HPS.score answers otherwise")
            host = _seconds(lambda: server.score("m", given), 100)
            eager = _seconds(lambda: plain(torch.tensor(given["dense"]).cuda(), keys).cpu(), 100)
        add(
            report,
            {"work": "device", "what": "HPS.score from host arrays", "batch": batch, "captured": False},
            {"us": 1e6 * host},
        )
        add(
            report,
            {"work": "device", "what": "torch, whole module, eager", "batch": batch, "captured": False},
            {"us": 1e6 * eager},
        )


def run(report: Report, quick: bool) -> None:
    """Measure; on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report.about["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report.about["torch"] = torch.__version__
    rows, seconds = (1_000, 0.3) if quick else (20_000, 3.0)
    tables, dim = (4, 16) if quick else (_TABLES, _DIM if device == "cuda" else 32)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        part(report, "http", 240, lambda: _http(report, scratch, device, rows, tables, dim, seconds))
        part(report, "per_request", 120, lambda: _per_request(report, scratch, device, rows, seconds))
        if device == "cuda":
            for batch in (256, 2048):
                part(report, "device", 90, lambda batch=batch: _device(report, scratch, rows, batch))
