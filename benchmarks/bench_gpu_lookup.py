"""Whole lookups from Python on a GPU, by how they are asked for; misses from the hash map; the warm-up of a table.

Small lookups take mostly Python's time: `calls` counts the Python functions of one. Tables are static, so every key is
resident. The ways take turns, so that each meets the same clocks; a time is from Python until the host knows that the device
is done. Beside each stands torch's `index_select` of the same rows, one launch a table, in the same run; beside the warm-up, a
plain copy of the same bytes from pinned memory.
"""

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import cupyx
import numpy as np
import torch

import hps
from benchmarks import served
from benchmarks.gpu import wake
from benchmarks.harness import Report, gpu_facts, microseconds, require, scratch, seconds_of, take_turns
from hps.models.loading.warm_up import warm_up
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from hps.tools.profiling.workloads import power_law_keys
from hps.torch import LookupLayer

_SETS, _SEED = 8, 1
Ways = dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]]
"""By name: a lookup of the i-th set of keys, and its vectors, in any shape and place."""


def run(report: Report, quick: bool) -> None:
    """Measure one table and 26, then misses and the warm-up."""
    report.about = gpu_facts()
    calls = 200 if quick else 3000
    with scratch("gpu-lookup") as place:
        for tables, n, dim, rows in ((1, 4096, 32, 200_000), (26, 1024, 16, 20_000), (26, 100, 16, 20_000)):
            work = partial(_resident, report, place, tables, n, dim, rows, calls)
            report.part(f"{tables} x {n} keys", 120, work)
        report.part("misses", 90, partial(_synchronous_misses, report, place, calls))
        report.part("warm-up", 240, partial(_warm_up, report, place, 0.2e9 if quick else 10e9))


def _configuration(place: Path, dims: list[int], rows: int, **settings: Any) -> dict[str, Any]:
    files = [place / f"{dim}-{rows}" for dim in dims]
    for file, dim in zip(files, dims, strict=True):
        if not file.exists():
            write_sparse_model(file, sample_chunks(rows, dim, _SEED))
    return served.document(served.model(files, dims, "bench", **{"max_batch_size": 16_384, **settings}), device="cuda")


def _on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array.cpu().numpy() if hasattr(array, "cpu") else array


def _resident(report: Report, place: Path, tables: int, n: int, dim: int, rows: int, calls: int) -> None:
    rng = np.random.default_rng(report.seed)
    config = _configuration(place, [dim] * tables, rows, embedding_cache_type="static")
    with hps.HPS(config) as server, ExitStack() as stack:
        sets = [np.stack([rng.integers(0, rows, n) for _ in range(tables)]) for _ in range(_SETS)]
        table = torch.from_numpy(sample_vectors(np.arange(rows), dim, _SEED)).cuda()
        ways = (_one_table if tables == 1 else _many_tables)(server, stack, sets, dim, table)
        for name, (look_up, answer) in ways.items():
            for i, keys in enumerate(sets):
                look_up(i)
                torch.cuda.synchronize()
                require(
                    np.array_equal(_on_host(answer(i)).reshape(-1, dim), sample_vectors(keys.reshape(-1), dim, _SEED)), name
                )
        wake(0.5)
        only = {name: look_up for name, (look_up, _answer) in ways.items()}
        taken = take_turns(only, calls, warmup=calls // 5, wait=torch.cuda.synchronize)
        peer = microseconds(taken["torch index_select"])["p50_us"]
        for name, seconds in taken.items():
            figures = {**microseconds(seconds), "peer": f"{tables} torch index_select + sync", "peer_p50_us": peer}
            axes = {"work": name, "tables": tables, "keys": n, "dim": dim, "hit_rate": 1.0}
            report.add(axes, {**figures, "calls": _python_calls(only[name])})


def _python_calls(look_up: Callable[[int], Any]) -> int:
    counted = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        look_up(0)
    finally:
        sys.setprofile(None)
    return counted - 1  # without the way's own


def _one_table(server: hps.HPS, stack: ExitStack, sets: list[np.ndarray], dim: int, table: Any) -> Ways:
    n = sets[0].size
    host = [keys[0] for keys in sets]
    of_torch, of_cupy = [torch.from_numpy(keys).cuda() for keys in host], [cupy.asarray(keys) for keys in host]
    out = torch.empty(n, dim, device="cuda")
    prepared = [stack.enter_context(server.prepare({0: keys}, "bench", out={0: out})) for keys in of_torch]
    buffered = [stack.enter_context(server.prepare({0: n}, "bench")) for _ in sets]
    for lookup, keys in zip(buffered, of_cupy, strict=True):
        lookup.keys[0][:] = keys
    layer, answers = LookupLayer(server, "bench", 0, dim), [out]

    def with_arrays(keys: list[Any], to: Any) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
        return (lambda i: server.lookup_fromdlpack(keys[i % _SETS], to, "bench", 0), lambda _i: to)

    def returned(call: Callable[[int], Any]) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
        def look_up(i: int) -> None:
            answers[0] = call(i)

        return look_up, lambda _i: answers[0]

    return {
        "lookup_fromdlpack, torch CUDA tensors": with_arrays(of_torch, out),
        "lookup_fromdlpack, CuPy arrays": with_arrays(of_cupy, cupy.empty((n, dim), np.float32)),
        "lookup_fromdlpack, NumPy arrays": with_arrays(host, np.empty((n, dim), np.float32)),
        "lookup_fromdlpack, NumPy arrays, output pinned": with_arrays(host, cupyx.empty_pinned((n, dim), np.float32)),
        "lookup, NumPy keys": returned(lambda i: server.lookup(host[i % _SETS], "bench", 0)),
        "prepared, torch CUDA tensors": (lambda i: prepared[i % _SETS].run(), lambda _i: out),
        "prepared, buffers": (lambda i: buffered[i % _SETS].run(), lambda i: buffered[i].vectors[0]),
        "layer": returned(lambda i: layer(of_torch[i % _SETS])),
        "torch index_select": (lambda i: torch.index_select(table, 0, of_torch[i % _SETS], out=out), lambda _i: out),
    }


def _many_tables(server: hps.HPS, stack: ExitStack, sets: list[np.ndarray], dim: int, table: Any) -> Ways:
    tables, n = sets[0].shape
    names = [f"t{index}" for index in range(tables)]
    keys = [dict(zip(names, torch.from_numpy(part).cuda().unbind(0), strict=True)) for part in sets]
    cupy_keys = [dict(zip(names, cupy.asarray(part), strict=True)) for part in sets]
    outs = {name: torch.empty(n, dim, device="cuda") for name in names}
    cupy_outs = {name: cupy.empty((n, dim), cupy.float32) for name in names}
    joined = [torch.from_numpy(part.reshape(-1)).cuda() for part in sets]
    vectors, counts = torch.empty(tables * n * dim, device="cuda"), [n] * tables
    prepared = [stack.enter_context(server.prepare(part, "bench", out=outs)) for part in keys]
    buffered = [stack.enter_context(server.prepare(dict.fromkeys(names, n), "bench")) for _ in sets]
    for lookup, part in zip(buffered, sets, strict=True):
        lookup.all_keys.set(part.reshape(-1))  # type: ignore[union-attr]

    def of_tables(found: Mapping[str, Any]) -> Callable[[int], Any]:
        return lambda _i: np.concatenate([_on_host(vectors) for vectors in found.values()])

    def select(i: int) -> None:
        for name, part in keys[i % _SETS].items():
            torch.index_select(table, 0, part, out=outs[name])

    return {
        "lookup_tables, torch CUDA tensors": (
            lambda i: server.lookup_tables(keys[i % _SETS], "bench", out=outs),
            of_tables(outs),
        ),
        "lookup_tables, CuPy arrays": (
            lambda i: server.lookup_tables(cupy_keys[i % _SETS], "bench", out=cupy_outs),
            of_tables(cupy_outs),
        ),
        "lookup_concatenated, torch CUDA tensors": (
            lambda i: server.lookup_concatenated(joined[i % _SETS], counts, vectors, "bench"),
            lambda _i: vectors,
        ),
        "prepared, torch CUDA tensors": (lambda i: prepared[i % _SETS].run(), of_tables(outs)),
        "prepared, buffers": (lambda i: buffered[i % _SETS].run(), lambda i: buffered[i].all_vectors),
        "torch index_select": (select, of_tables(outs)),
    }


def _synchronous_misses(report: Report, place: Path, calls: int) -> None:
    """A cache of less than a hundredth of the rows, warmed by traffic: misses are fetched while the caller waits."""
    rows, n, dim, alpha = 630_000, 2000, 16, 1.2
    rng = np.random.default_rng(report.seed)
    config = _configuration(place, [dim], rows, gpucacheper=0.008, cache_refresh_percentage_per_iteration=0.0)
    with hps.HPS(config) as server:
        warm = calls // 5
        sets = [power_law_keys(rng, n, rows, alpha) for _ in range(calls + warm)]
        tensors = [torch.from_numpy(keys).cuda() for keys in sets]
        out = torch.empty(n, dim, device="cuda")

        def look_up(i: int) -> None:
            server.lookup_fromdlpack(tensors[warm + i], out, "bench", 0)

        counters = server.metrics.table("bench", "t0")
        wake(1.0)
        for i in range(-warm, 0):
            look_up(i)
        requested, hits = counters.keys, counters.hits[0]
        seconds = take_turns({"": look_up}, calls, warmup=0, wait=torch.cuda.synchronize)[""]
        hit_rate = (counters.hits[0] - hits) / (counters.keys - requested)
        for i in range(min(200, calls)):
            look_up(i)
            require(np.array_equal(out.cpu().numpy(), sample_vectors(sets[warm + i], dim, _SEED)))
    axes = {"work": "synchronous misses from the hash map", "tables": 1, "keys": n, "dim": dim, "alpha": alpha}
    report.add({**axes, "hit_rate": hit_rate}, microseconds(seconds))


def _warm_up(report: Report, place: Path, size_bytes: float) -> None:
    """Fill a cache from files in page cache, beside plain copies from pinned memory."""
    dim = 128
    rows = int(size_bytes / (4 * dim))
    for left in place.iterdir():
        shutil.rmtree(left, ignore_errors=True)
    config = _configuration(place, [dim], rows, cache_refresh_percentage_per_iteration=0.0)
    config["volatile_db"] = {"type": "disabled"}
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(pinned, device="cuda")
    copies = take_turns({"": lambda _i: on_device.copy_(pinned, non_blocking=True)}, 8, wait=torch.cuda.synchronize)[""]
    copied = pinned.numel() / float(np.median(copies))
    with hps.HPS(config) as server:
        deployment = server.model("bench")
        [cache] = deployment.caches
        model = hps.open_sparse_model(config["models"][0]["sparse_files"][0], dim)
        torch.cuda.synchronize()
        fill = lambda: (warm_up(cache, 0, deployment.tables[0], model, 1.0), torch.cuda.synchronize())  # noqa: E731
        seconds = seconds_of(fill)
        keys = np.random.default_rng(report.seed).integers(0, rows, 10_000)
        vectors, found = server.lookup(keys, "bench", 0, return_found=True)
        require(np.array_equal(vectors[found], sample_vectors(keys[found], dim, _SEED)), "a vector of the warm cache")
    rate = rows * dim * 4 / seconds
    figures = {
        "seconds": seconds,
        "gb_per_s": rate / 1e9,
        "pinned_copy_gb_per_s": copied / 1e9,
        "of_pinned_copy": rate / copied,
    }
    axes = {"work": "warm-up from local disk in page cache", "rows": rows, "dim": dim}
    report.add(axes, {**figures, "resident_share": float(found.mean())})
