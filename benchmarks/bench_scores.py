"""Scores of a whole model over HTTP: with and without batches, beside a plain FastAPI application around the torch module.

A DLRM of 26 tables is packaged and served. Clients send requests of some samples, back to back, and compare every answer with
the module's. Three services answer in turn: `hps` with `dynamic_batching`, `hps` without, and `plain`
(`http_servers.py`), whose tables are on the device. `per_request` is one user with a history of 100 keys and 2,048
candidates, given once or with each candidate; a batch has up to 8 of them. On a GPU, `device` is what a call in process takes:
a captured graph of lookups and network beside the network alone on ready vectors and the lookups alone.
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hps
import hps.torch
from benchmarks.dlrm import DLRM, FEATURES
from benchmarks.harness import Report, require, scratch, take_turns
from benchmarks.served import SERVICE, Running, address_of, binary_post, float_tail, head, hps_serve, server
from hps.tools.profiling.http_load import HttpLoad, LoadResult

_TABLES, _DIM = 26, 128
_POOL = 64  # different requests
_TOLERANCE = 2e-3  # of TF32 and of other batch sizes


class Requests:
    """Requests of one kind in turn, and the right answers. *Immutable*, and picklable."""

    def __init__(self, requests: list[bytes], answers: list[np.ndarray], tolerance: float = _TOLERANCE) -> None:
        self.requests, self.answers, self._tolerance = requests, answers, tolerance

    def request(self, number: int) -> list[bytes]:
        return [self.requests[number % len(self.requests)]]

    def check(self, number: int, _head: bytes, body: memoryview) -> str:
        expected = self.answers[number % len(self.answers)]
        worst = float(np.abs(float_tail(body, expected.size) - expected).max())
        return "" if worst <= self._tolerance else f"off by {worst:.3g}"


def _requests_of(module: DLRM, samples: int, rows: int, *, raw: bool) -> Requests:
    rng = np.random.default_rng(1)
    requests, answers = [], []
    for _ in range(_POOL):
        keys = rng.integers(0, rows, (samples, len(module.emb)))
        dense = rng.random((samples, FEATURES), np.float32)
        with torch.inference_mode():
            answers.append(module(torch.from_numpy(dense), torch.from_numpy(keys)).numpy())
        if raw:
            body = keys.tobytes() + dense.tobytes()
            requests.append(head("/score", len(body)) + body)
        else:
            requests.append(binary_post("/v2/models/m/infer", {"dense": dense, "keys": keys}))
    return Requests(requests, answers)


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
    for worker in workers:
        worker.start()
    found = [results.get(timeout=seconds + 60) for _ in workers]
    for worker in workers:
        worker.join()
    return LoadResult().merge(found)


def _figures(result: LoadResult, seconds: float) -> dict[str, Any]:
    p50, p99 = (1e3 * quantile for quantile in result.times.quantiles_s([0.5, 0.99]))
    failures = sum(result.failures.values())
    return {"requests_s": result.in_time / seconds, "p50_ms": p50, "p99_ms": p99, "failures": failures}


def _packaged(module: nn.Module, place: Path, examples: Any, device: str, most: int = 4096, **more: Any) -> None:
    settings = {"max_batch_size": most, "gpucacheper": 1.0, **({"embedding_cache_type": "static"} if device == "cuda" else {})}
    hps.torch.package(module, str(place), examples, settings=settings, **more)


def _document(repository: Path, device: str) -> dict[str, Any]:
    return {"model_repository": str(repository), "device": device, "service": SERVICE}


def _http(report: Report, place: Path, device: str, rows: int, tables: int, dim: int, seconds: float, turns: int) -> None:
    torch.manual_seed(1)
    module = DLRM(tables, rows, dim).eval()
    examples = (torch.rand(8, FEATURES), torch.randint(0, rows, (8, tables)))
    torch.save(module, place / "module.pt")
    for name, batching in (("batched", True), ("alone", False)):
        _packaged(module, place / name / "m" / "1", examples, device, dynamic_batching=batching)
    cores = os.cpu_count() or 2
    processes = 8 if cores >= 16 else 2
    fronts = max(1, min(4, cores - 2))
    services: dict[str, Callable[[], AbstractContextManager[Running]]] = {
        name: lambda name=name: hps_serve(_document(place / name, device), place / name, fronts=fronts)  # type: ignore[misc]
        for name in ("batched", "alone")
    }
    services["plain"] = lambda: server("scores", place)
    for turn in range(turns):
        for name, start in services.items():
            with start() as service:
                for samples, connections in ((32, 64), (32, 1), (1, 64), (256, 16)):
                    requests = _requests_of(module, samples, rows, raw=name == "plain")
                    result = load(requests, service.port, min(processes, connections), connections, seconds)
                    axes = {"work": "http", "service": name, "samples": samples, "clients": connections, "turn": turn}
                    figures = _figures(result, seconds)
                    report.add(axes, {**figures, "samples_s": samples * figures["requests_s"]})
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


def _per_request(report: Report, place: Path, device: str, rows: int, seconds: float) -> None:
    torch.manual_seed(2)
    module, candidates = Ranker(rows, 32).eval(), 2048
    history, age = torch.randint(0, rows, (1, 100)), torch.tensor([0.31])
    item = torch.randint(0, rows, (candidates,))
    repeated = {"history": history.repeat(candidates, 1), "age": age.repeat(candidates), "item": item}
    once = {"history": history, "age": age, "item": item}
    ranking = place / "ranking"
    examples = {name: tensor[:8] for name, tensor in repeated.items()}
    hotness = {"history": 100, "item": 1}
    most = 8 * candidates
    _packaged(module, ranking / "m" / "1", examples, device, most, per_request=("history", "age"), hotness=hotness)
    with torch.inference_mode():
        expected = module(**repeated).numpy()
    processes, fronts = (8, 4) if (os.cpu_count() or 2) >= 16 else (1, 1)
    with hps_serve(_document(ranking, device), ranking, fronts=fronts) as service:
        for turn, clients in itertools.product(range(2), (4, 32)):
            for name, given in (("once", once), ("with each candidate", repeated)):
                request = binary_post("/v2/models/m/infer", {key: tensor.numpy() for key, tensor in given.items()})
                result = load(Requests([request], [expected], 1e-4), service.port, min(processes, clients), clients, seconds)
                axes = {"work": "per_request", "user": name, "clients": clients, "turn": turn}
                report.add(axes, {**_figures(result, seconds), "request_bytes": len(request)})


def _seconds(call: Callable[[], Any], calls: int = 200) -> float:
    return float(np.median(take_turns({"": lambda _i: call()}, calls, warmup=10, wait=torch.cuda.synchronize)[""]))


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


def _device(report: Report, place: Path, rows: int, batch: int) -> None:
    """Calls in process on a GPU."""
    torch.manual_seed(1)
    module = torch.load(place / "module.pt", weights_only=False).eval()
    with hps.HPS({"model_repository": str(place / "batched"), "device": "cuda"}) as deployed:
        plain = module.cuda()
        dense = torch.rand(batch, FEATURES, device="cuda")
        keys = torch.randint(0, rows, (batch, len(module.emb)), device="cuda")
        vectors = [torch.empty(batch, _DIM, device="cuda") for _ in module.emb]
        columns = [keys[:, table].contiguous() for table in range(len(module.emb))]
        with torch.inference_mode():
            expected = plain(dense, keys)
            for table, embedding in enumerate(plain.emb):
                vectors[table].copy_(embedding(columns[table]))
        names = [f"emb_{table}" for table in range(len(module.emb))]
        requested, outs = dict(zip(names, columns, strict=True)), dict(zip(names, vectors, strict=True))

        def lookups_and_network() -> torch.Tensor:
            deployed.lookup_tables(requested, "m", 0, out=outs, wait=False)
            return plain.scores(dense, vectors)

        require(torch.allclose(lookups_and_network(), expected, atol=_TOLERANCE), "a score of lookups and network")
        graphs = {
            "network": _graph(lambda: plain.scores(dense, vectors)),
            "lookups": _graph(lambda: deployed.lookup_tables(requested, "m", 0, out=outs, wait=False)),
            "lookups and network": _graph(lookups_and_network),
            "torch, whole module": _graph(lambda: plain(dense, keys)),
        }
        times = {(name, True): _seconds(graph.replay) for name, graph in graphs.items()}
        given = {"dense": dense.cpu().numpy(), "keys": keys.cpu().numpy()}
        with torch.inference_mode():
            answer = deployed.score("m", given)["score"]
            require(np.abs(answer - expected.cpu().numpy()).max() <= _TOLERANCE, "a score of HPS.score")
            times["HPS.score from host arrays", False] = _seconds(lambda: deployed.score("m", given), 100)
            eager = _seconds(lambda: plain(torch.tensor(given["dense"]).cuda(), keys).cpu(), 100)
            times["torch, whole module, eager", False] = eager
        for (name, captured), seconds in times.items():
            report.add({"work": "device", "what": name, "batch": batch, "captured": captured}, {"us": 1e6 * seconds})


def run(report: Report, quick: bool) -> None:
    """Measure; on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report.about["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report.about["torch"] = torch.__version__
    rows, seconds = (1_000, 0.3) if quick else (20_000, 3.0)
    tables, dim = (4, 16) if quick else (_TABLES, _DIM if device == "cuda" else 32)
    with scratch("scores") as place:
        turns = 2 if device == "cpu" and not quick else 1
        report.part("http", 480, lambda: _http(report, place, device, rows, tables, dim, seconds, turns))
        report.part("per_request", 240, lambda: _per_request(report, place, device, rows, seconds))
        if device == "cuda":
            for batch in (256, 2048):
                report.part("device", 90, lambda batch=batch: _device(report, place, rows, batch))
