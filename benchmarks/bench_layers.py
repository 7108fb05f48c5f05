"""What the layers of `hps.torch` add to the calls beneath them, on a GPU: a lookup of 4,096 keys, eager and in a CUDA graph.

Calls that are compared take turns, so that each meets the same clocks. Times of calls are from Python until the host knows that
the device is done. Each part has a time limit. A part that fails becomes a row with its error, and the others go on.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.bench_pooled import HOTNESS, check_sums, configuration
from benchmarks.harness import Report, add, part

_KEYS = 4096


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` makes few calls."""
    import torch

    report.about |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, "torch": torch.__version__}
    calls = 100 if quick else 2000
    with tempfile.TemporaryDirectory(prefix="hps-layers-", dir=os.environ.get("HPS_BENCH_DIR")) as directory:
        for dim in (32, 128):
            place = Path(directory) / str(dim)
            part(report, f"one table, dim {dim}", 60, partial(_one_table, report, place, dim, calls))
        part(report, "collection", 60, partial(_collection, report, Path(directory) / "26", calls // 4))
    for row in report.rows:
        print(f"= {row['axes']}: {row['figures']}", flush=True)


def _configuration(place: Path, dims: Sequence[int], rows: int, hotness: Sequence[int]) -> dict[str, Any]:
    place.mkdir()
    whole = {"gpucacheper": 1.0, "cache_refresh_percentage_per_iteration": 1.0, "miss_path": "link"}
    return configuration(place, dims, rows, hotness, **whole)


def in_turn(ways: Mapping[str, Callable[[int], Any]], calls: int) -> dict[str, np.ndarray]:
    """Seconds of `calls` calls of each way until the device is done, made in turn."""
    import torch

    from benchmarks.gpu_timing import wake

    seconds = {name: np.empty(calls) for name in ways}
    wake(0.5)
    for i in range(calls + calls // 5):
        for name, way in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            way(i)
            torch.cuda.synchronize()
            seconds[name][i % calls] = time.perf_counter() - start
    return seconds


def of_calls(seconds: Mapping[str, np.ndarray]) -> dict[str, float]:
    figures = {}
    for name, each in seconds.items():
        figures[f"{name}_p50_us"] = float(np.median(each)) * 1e6
        figures[f"{name}_p99_us"] = float(np.quantile(each, 0.99)) * 1e6
    return figures


def _one_table(report: Report, place: Path, dim: int, calls: int) -> None:
    """A layer of one table beside the bare lookup and torch's `embedding`."""
    import torch
    from torch.nn.functional import embedding

    from hps.tools.cli.tables.sample import sample_vectors

    rows = 200_000
    from hps.torch import LookupLayer

    with hps.HPS(_configuration(place, [dim], rows, [1])) as server, torch.no_grad():
        resident = server.model("bench").caches[0].dump(0)
        rng = np.random.default_rng(report.seed)
        sets = [torch.from_numpy(rng.choice(resident, _KEYS)).cuda() for _ in range(16)]
        weight = torch.from_numpy(sample_vectors(np.arange(rows), dim, 0)).cuda()
        out = torch.empty(_KEYS, dim, device="cuda")
        layer = LookupLayer(server, "bench", 0, dim)
        unwaited = LookupLayer(server, "bench", 0, dim, wait=False)

        def check(keys: Any, found: Any) -> None:
            torch.cuda.synchronize()
            if not torch.equal(found, weight[keys]):
                raise RuntimeError("an answer is wrong: nothing is recorded")

        ways: dict[str, Callable[[int], Any]] = {
            "layer": lambda i: layer(sets[i % 16]),
            "lookup": lambda i: server.lookup_fromdlpack(sets[i % 16], out, "bench", 0) or out,
            "new_output_and_lookup": lambda i: _into_new(server, sets[i % 16], dim),
            "embedding": lambda i: embedding(sets[i % 16], weight),
        }
        for i in range(16):
            for way in ways.values():
                out.fill_(torch.nan)
                check(sets[i], way(i))
        figures = of_calls(in_turn(ways, calls))
        figures["layer_more_us"] = figures["layer_p50_us"] - figures["lookup_p50_us"]
        axes = {"work": "4,096 keys", "dim": dim, "keys": _KEYS}
        add(report, axes | {"how": "eager"}, figures)
        bare = partial(server.lookup_fromdlpack, out_tensor=out, model_name="bench", table_id=0, wait=False)
        compared = partial(_graphs, unwaited, bare, out, embedding, weight, sets, check, calls)
        if (figures := part(report, f"captured, dim {dim}", 30, compared)) is not None:
            add(report, axes | {"how": "captured"}, figures)
        del compared, bare


def _into_new(server: Any, keys: Any, dim: int) -> Any:
    import torch

    out = torch.empty(_KEYS, dim, device="cuda")
    server.lookup_fromdlpack(keys, out, "bench", 0)
    return out


def _graphs(
    layer: Any, bare: Any, out: Any, embedding: Any, weight: Any, sets: Sequence[Any], check: Callable[..., None], calls: int
) -> dict[str, float]:
    """Replays of three graphs of one lookup each: wall time of one, and what the device takes for each of many in a row."""
    import torch

    keys = sets[0].clone()
    results: dict[str, Any] = {}
    forwards: dict[str, Callable[[], Any]] = {
        "layer": lambda: layer(keys),
        "lookup": lambda: bare(keys) or out,
        "embedding": lambda: embedding(keys, weight),
    }
    graphs = {}
    for name, forward in forwards.items():
        graphs[name], results[name] = _captured(forward)
        for asked in sets:
            keys.copy_(asked)
            results[name].fill_(torch.nan)
            graphs[name].replay()
            check(asked, results[name])
    figures = of_calls(in_turn({name: lambda _i, graph=graph: graph.replay() for name, graph in graphs.items()}, calls))
    many = 200
    device: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(15):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(many):
                graph.replay()
            stop.record()
            stop.synchronize()
            device[name].append(start.elapsed_time(stop) * 1e3 / many)
    figures |= {f"{name}_device_us": float(np.median(each)) for name, each in device.items()}
    figures["layer_more_us"] = figures["layer_p50_us"] - figures["lookup_p50_us"]
    figures["layer_more_device_us"] = figures["layer_device_us"] - figures["lookup_device_us"]
    for graph in graphs.values():
        graph.reset()
    return figures


def _collection(report: Report, place: Path, calls: int) -> None:
    """A collection of 26 features with MLPerf's numbers of keys, beside the bare pooled lookup and torch's `embedding_bag`s."""
    import torch
    from torch.nn.functional import embedding_bag

    from hps.tools.cli.tables.sample import sample_vectors

    rows, dim, batch, count = 20_000, 32, 1024, len(HOTNESS)
    from hps.torch import BagTable, EmbeddingBagCollection

    with hps.HPS(_configuration(place, [dim] * count, rows, HOTNESS)) as server, torch.no_grad():
        rng = np.random.default_rng(report.seed)
        resident = [server.model("bench").caches[0].dump(t) for t in range(count)]
        keys = [torch.from_numpy(rng.choice(resident[t], (batch, hot))).cuda() for t, hot in enumerate(HOTNESS)]
        weights = [torch.from_numpy(sample_vectors(np.arange(rows), dim, t)).cuda() for t in range(count)]
        bags = {f"t{t}": hps.Bags(each) for t, each in enumerate(keys)}
        features = {f"f{t}": each for t, each in enumerate(keys)}
        out = torch.empty(batch, dim * count, device="cuda")
        tables = [BagTable(f"t{t}", [f"f{t}"], dim) for t in range(count)]
        waited, unwaited = (EmbeddingBagCollection(server, "bench", tables, wait=wait) for wait in (True, False))

        def check(found: Any) -> None:
            torch.cuda.synchronize()
            for t, hot in enumerate(HOTNESS):
                sums = (found[f"f{t}"] if isinstance(found, Mapping) else found[:, t * dim : (t + 1) * dim]).cpu().numpy()
                check_sums(keys[t].cpu().numpy().reshape(-1), hot, dim, t, sums)

        def theirs() -> dict[str, Any]:
            pairs = enumerate(zip(keys, weights, strict=True))
            return {f"f{t}": embedding_bag(each, weight, mode="sum") for t, (each, weight) in pairs}

        def bare(wait: bool) -> Any:
            return server.lookup_pooled(bags, "bench", 0, out=out, wait=wait)

        axes = {"work": "26 features", "dim": dim, "batch": batch}
        eager: dict[str, Callable[[], Any]] = {
            "layer": lambda: waited(features),
            "lookup": lambda: bare(True),
            "embedding_bags": theirs,
        }
        for way in eager.values():
            check(way())
        figures = of_calls(in_turn({name: lambda _i, way=way: way() for name, way in eager.items()}, calls))
        figures["layer_more_us"] = figures["layer_p50_us"] - figures["lookup_p50_us"]
        add(report, axes | {"how": "eager"}, figures)

        forwards = {"layer": lambda: unwaited(features), "lookup": lambda: bare(False), "embedding_bags": theirs}
        graphs = {}
        for name, forward in forwards.items():
            graph = part(report, f"capturing {name} of 26 features", 30, partial(_checked, forward, check))
            if graph is not None:
                graphs[name] = graph
        figures = of_calls(in_turn({name: lambda _i, graph=graph: graph.replay() for name, graph in graphs.items()}, calls))
        if {"layer", "lookup"} <= graphs.keys():
            figures["layer_more_us"] = figures["layer_p50_us"] - figures["lookup_p50_us"]
        add(report, axes | {"how": "captured"}, figures)
        for graph in graphs.values():
            graph.reset()


def _captured(forward: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a call that ran before, and what it writes to."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward()
    return graph, found


def _checked(forward: Callable[[], Any], check: Callable[[Any], None]) -> Any:
    graph, found = _captured(forward)
    graph.replay()
    check(found)
    return graph
