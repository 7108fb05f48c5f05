"""Whole lookups from Python on a GPU: torch CUDA tensors in and out, misses from the hash map, and the warm-up of a table.

Beside each figure stands what it is compared with in the same run: torch's `index_select` of the same rows, one launch a
table, or a plain copy of the same bytes from pinned memory.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks import served
from benchmarks.harness import Report, time_calls
from benchmarks.served import document
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from hps.tools.profiling.workloads import power_law_keys

SEED = 1


def run(report: Report, quick: bool) -> None:
    """Measure the rows of a whole lookup and of the warm-up."""
    import torch

    gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    report.about = {"gpu": torch.cuda.get_device_name(0), "listed": gpu.stdout.strip(), "cuda": torch.version.cuda}
    calls = 200 if quick else 3000
    with tempfile.TemporaryDirectory(prefix="hps-gpu-", dir=os.environ.get("HPS_BENCH_DIR")) as directory:
        place = Path(directory)
        _one_table(report, place, torch, calls)
        _many_tables(report, place, torch, calls)
        _synchronous_misses(report, place, torch, calls)
        _warm_up(report, place, torch, 0.2e9 if quick else 10e9)


def _configuration(place: Path, dims: list[int], rows: int, **model: Any) -> dict[str, Any]:
    names = [f"t{index}" for index in range(len(dims))]
    for name, dim in zip(names, dims, strict=True):
        if not (place / f"{name}-{dim}-{rows}").exists():
            write_sparse_model(place / f"{name}-{dim}-{rows}", sample_chunks(rows, dim, SEED))
    files = [place / f"{name}-{dim}-{rows}" for name, dim in zip(names, dims, strict=True)]
    return document(served.model(files, dims, "bench", **{"max_batch_size": 16_384, **model}), device="cuda")


def _wake(torch: Any) -> None:
    """Keep the GPU busy for a second: an idle one has low clocks, which take longer to rise than a short warm-up."""
    square = torch.ones(4096, 4096, device="cuda")
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        torch.mm(square, square)
        torch.cuda.synchronize()


def _microseconds(torch: Any, call: Callable[[int], Any], calls: int) -> dict[str, float]:
    _wake(torch)
    timing = time_calls(call, calls, warmup=calls // 5)
    return {"p50_us": timing.p50_s * 1e6, "p99_us": timing.p99_s * 1e6}


def _check(out: Any, keys: np.ndarray, dim: int) -> None:
    on_host = out.cpu().numpy() if hasattr(out, "cpu") else out.get() if hasattr(out, "get") else out
    if not np.array_equal(on_host.reshape(keys.size, dim), sample_vectors(keys, dim, SEED)):
        raise SystemExit("a lookup gave wrong vectors; nothing is measured")


def _key_sets(torch: Any, draw: Callable[[], np.ndarray], count: int = 16) -> list[tuple[np.ndarray, Any]]:
    return [(keys, torch.from_numpy(keys).cuda()) for keys in (draw() for _ in range(count))]


def _one_table(report: Report, place: Path, torch: Any, calls: int) -> None:
    rows, n, dim = 200_000, 4096, 32
    rng = np.random.default_rng(report.seed)
    with hps.HPS(_configuration(place, [dim], rows)) as server:
        resident = server.model("bench").caches[0].dump(0)
        sets = [rng.choice(resident, n) for _ in range(16)]
        measured = {}
        for work, look_up in ways_to_look_up(server, torch, sets, dim).items():
            for i, keys in enumerate(sets):
                _check(look_up(i), keys, dim)

            def ours(i: int, look_up: Callable[[int], Any] = look_up) -> None:
                look_up(i)
                torch.cuda.synchronize()

            measured[work] = _microseconds(torch, ours, calls)
        table = torch.from_numpy(sample_vectors(np.arange(rows), dim, SEED)).cuda()
        on_device, out = [torch.from_numpy(keys).cuda() for keys in sets], torch.empty(n, dim, device="cuda")

        def theirs(i: int) -> None:
            torch.index_select(table, 0, on_device[i % 16], out=out)
            torch.cuda.synchronize()

        peer = _microseconds(torch, theirs, calls)
    of_torch = measured["lookup_fromdlpack, torch CUDA tensors"]["p50_us"]
    for work, figures in measured.items():
        axes = {"work": work, "tables": 1, "keys": n, "dim": dim, "hit_rate": 1.0}
        others = {"peer": "torch index_select + sync", "peer_p50_us": peer["p50_us"]}
        more = figures["p50_us"] - of_torch
        report.add(axes, {**figures, **others, "more_than_torch_us": more, "target_p50_us": 35 if "NumPy" in work else 25})


def ways_to_look_up(server: hps.HPS, torch: Any, sets: list[np.ndarray], dim: int) -> dict[str, Callable[[int], Any]]:
    """Lookups of sets of keys of one table, by where keys and output are; each gives the output for the i-th set."""
    import cupy
    import cupyx

    def with_tensors(keys: list[Any], out: Any) -> Callable[[int], Any]:
        def look_up(i: int) -> Any:
            server.lookup_fromdlpack(keys[i % len(keys)], out, "bench", 0)
            return out

        return look_up

    n = sets[0].size
    return {
        "lookup_fromdlpack, torch CUDA tensors": with_tensors(
            [torch.from_numpy(keys).cuda() for keys in sets], torch.empty(n, dim, device="cuda")
        ),
        "lookup_fromdlpack, CuPy arrays": with_tensors([cupy.asarray(keys) for keys in sets], cupy.empty((n, dim), np.float32)),
        "lookup_fromdlpack, NumPy arrays": with_tensors(sets, np.empty((n, dim), np.float32)),
        "lookup_fromdlpack, NumPy arrays, output pinned": with_tensors(sets, cupyx.empty_pinned((n, dim), np.float32)),
        "lookup, NumPy keys": lambda i: server.lookup(sets[i % len(sets)], "bench", 0),
    }


def _many_tables(report: Report, place: Path, torch: Any, calls: int) -> None:
    rows, n, dim, tables = 20_000, 1024, 16, 26
    rng = np.random.default_rng(report.seed)
    config = _configuration(place, [dim] * tables, rows)
    with hps.HPS(config) as server:
        resident = [server.model("bench").caches[0].dump(t) for t in range(tables)]
        sets = [{f"t{t}": rng.choice(resident[t], n) for t in range(tables)} for _ in range(8)]
        on_device = [{name: torch.from_numpy(keys).cuda() for name, keys in each.items()} for each in sets]
        outs = {f"t{t}": torch.empty(n, dim, device="cuda") for t in range(tables)}
        for each, tensors in zip(sets, on_device, strict=True):
            server.lookup_tables(tensors, "bench", out=outs)
            for name, keys in each.items():
                _check(outs[name], keys, dim)
        weights = {f"t{t}": torch.from_numpy(sample_vectors(np.arange(rows), dim, SEED)).cuda() for t in range(tables)}

        def ours(i: int) -> None:
            server.lookup_tables(on_device[i % 8], "bench", out=outs)
            torch.cuda.synchronize()

        def theirs(i: int) -> None:
            for name, tensor in on_device[i % 8].items():
                torch.index_select(weights[name], 0, tensor, out=outs[name])
            torch.cuda.synchronize()

        counts = [n] * tables
        runs = [torch.cat(list(tensors.values())) for tensors in on_device]
        whole = torch.empty(tables * n * dim, device="cuda")
        for each, run in zip(sets, runs, strict=True):
            server.lookup_concatenated(run, counts, whole, "bench")
            for t, keys in enumerate(each.values()):
                _check(whole[t * n * dim : (t + 1) * n * dim].view(n, dim), keys, dim)

        def concatenated(i: int) -> None:
            server.lookup_concatenated(runs[i % 8], counts, whole, "bench")
            torch.cuda.synchronize()

        mine, peer = _microseconds(torch, ours, calls), _microseconds(torch, theirs, calls)
        one_run = _microseconds(torch, concatenated, calls)
    for work, measured in (("lookup_concatenated", one_run), ("lookup_tables", mine)):
        axes = {"work": f"{work}, torch CUDA tensors", "tables": tables, "keys": n, "dim": dim, "hit_rate": 1.0}
        theirs_us = peer["p50_us"]
        report.add(axes, {**measured, "peer": "26 torch index_select + sync", "peer_p50_us": theirs_us, "target_p50_us": 90})


def _synchronous_misses(report: Report, place: Path, torch: Any, calls: int) -> None:
    rows, n, dim, alpha = 630_000, 2000, 16, 1.2
    rng = np.random.default_rng(report.seed)
    config = _configuration(place, [dim], rows, gpucacheper=0.008, cache_refresh_percentage_per_iteration=0.0)
    with hps.HPS(config) as server:
        sets = _key_sets(torch, lambda: power_law_keys(rng, n, rows, alpha), calls + calls // 5)
        out = torch.empty(n, dim, device="cuda")
        for _keys, tensor in sets[: calls // 5]:  # warmed by traffic
            server.lookup_fromdlpack(tensor, out, "bench", 0)
        counters = server.metrics.table("bench", "t0")
        asked, hits = counters.keys, counters.hits[0]

        def ours(i: int) -> None:
            server.lookup_fromdlpack(sets[calls // 5 + i][1], out, "bench", 0)
            torch.cuda.synchronize()

        _wake(torch)
        timing = time_calls(ours, calls, warmup=0)
        hit_rate = (counters.hits[0] - hits) / (counters.keys - asked)
        for keys, tensor in sets[:200]:
            server.lookup_fromdlpack(tensor, out, "bench", 0)
            _check(out, keys, dim)
    axes = {
        "work": "synchronous misses from the hash map",
        "tables": 1,
        "keys": n,
        "dim": dim,
        "alpha": alpha,
        "hit_rate": hit_rate,
    }
    figures = {"p50_us": timing.p50_s * 1e6, "p99_us": timing.p99_s * 1e6, "target_p50_us": 150, "target_p99_us": 300}
    report.add(axes, figures)


def _warm_up(report: Report, place: Path, torch: Any, size_bytes: float) -> None:
    dim = 128
    rows = int(size_bytes / (4 * dim))
    for left in place.iterdir():
        shutil.rmtree(left, ignore_errors=True)
    config = _configuration(place, [dim], rows, cache_refresh_percentage_per_iteration=0.0, gpucacheper=1.0)
    config["volatile_db"] = {"type": "disabled"}
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(pinned, device="cuda")
    copies = 8
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(copies):
        on_device.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    copy_bytes_per_s = copies * pinned.numel() / (time.perf_counter() - start)
    from hps.models.loading.warm_up import warm_up

    with hps.HPS(config) as server:
        deployment = server.model("bench")
        [cache] = deployment.caches
        model = hps.open_sparse_model(config["models"][0]["sparse_files"][0], dim)
        torch.cuda.synchronize()
        start = time.perf_counter()
        warm_up(cache, 0, deployment.tables[0], model, 1.0)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        keys = np.random.default_rng(report.seed).integers(0, rows, 10_000)
        vectors, found = server.lookup(keys, "bench", 0, return_found=True)
        if not np.array_equal(vectors[found], sample_vectors(keys[found], dim, SEED)):
            raise SystemExit("the warmed cache gave wrong vectors; nothing is measured")
        resident = float(found.mean())
    bytes_per_s = rows * dim * 4 / seconds
    axes = {"work": "warm-up from local disk in page cache", "rows": rows, "dim": dim}
    figures = {
        "seconds": seconds,
        "gb_per_s": bytes_per_s / 1e9,
        "pinned_copy_gb_per_s": copy_bytes_per_s / 1e9,
        "of_pinned_copy": bytes_per_s / copy_bytes_per_s,
        "target_of_pinned_copy": 0.3,
        "resident_share": resident,
    }
    report.add(axes, figures)
