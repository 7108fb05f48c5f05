"""Small lookups from Python on a GPU, whose time is mostly Python's: bare, prepared, and through a layer of torch's.

Tables are static, so every key is resident. Calls that are compared take turns, so that each meets the same clocks; a time is
from Python until the host knows that the device is done. `calls` counts the Python functions of one call.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks import served
from benchmarks.bench_layers import in_turn, of_calls
from benchmarks.harness import Report, add, part
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors

_Ways = Mapping[str, tuple[Callable[[int], Any], Callable[[int], np.ndarray]]]
"""By name: a lookup of the i-th set of keys, and its vectors, flat, on the host."""
_SETS, _SEED = 8, 1


def run(report: Report, quick: bool) -> None:
    """Measure one table and 26."""
    import torch

    report.about = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    calls = 200 if quick else 3000
    with tempfile.TemporaryDirectory(prefix="hps-prepared-", dir=os.environ.get("HPS_BENCH_DIR")) as directory:
        place = Path(directory)
        part(report, "one table", 90, partial(_measured, report, place, 1, 4096, 32, calls))
        for n in (100, 1000):
            part(report, f"26 tables of {n} keys", 120, partial(_measured, report, place, 26, n, 16, calls))


def _measured(report: Report, place: Path, tables: int, n: int, dim: int, calls: int) -> None:
    rows = 200_000 if tables == 1 else 20_000
    file = place / f"{dim}-{rows}"
    if not file.exists():
        write_sparse_model(file, sample_chunks(rows, dim, _SEED))
    whole = {"embedding_cache_type": "static", "max_batch_size": 4096}
    config = served.document(served.model([file] * tables, [dim] * tables, "bench", **whole), device="cuda")
    rng = np.random.default_rng(report.seed)
    with hps.HPS(config) as server, ExitStack() as stack:
        sets = [np.stack([rng.integers(0, rows, n) for _ in range(tables)]) for _ in range(_SETS)]
        ways = (_one_table if tables == 1 else _many_tables)(server, stack, sets, dim)
        for name, (look_up, found) in ways.items():
            for i, keys in enumerate(sets):
                look_up(i)
                if not np.array_equal(found(i).reshape(-1, dim), sample_vectors(keys.reshape(-1), dim, _SEED)):
                    raise RuntimeError(f"{name}: an answer is wrong: nothing is recorded")
        figures = of_calls(in_turn({name: look_up for name, (look_up, _found) in ways.items()}, calls))
        for name, (look_up, _found) in ways.items():
            times = {kind: figures[f"{name}_{kind}"] for kind in ("p50_us", "p99_us")}
            axes = {"work": name, "tables": tables, "keys": n, "dim": dim}
            add(report, axes, {**times, "calls": _python_calls(look_up)})


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


def _on_host(tensor: Any) -> np.ndarray:
    found: np.ndarray = tensor.get() if hasattr(tensor, "get") else tensor.cpu().numpy()
    return found


def _one_table(server: hps.HPS, stack: ExitStack, sets: list[np.ndarray], dim: int) -> _Ways:
    import cupy
    import torch

    from hps.torch import LookupLayer

    n = sets[0].size
    of_torch, of_cupy = [torch.from_numpy(keys[0]).cuda() for keys in sets], [cupy.asarray(keys[0]) for keys in sets]
    out, cupy_out = torch.empty(n, dim, device="cuda"), cupy.empty((n, dim), cupy.float32)
    prepared = [stack.enter_context(server.prepare({0: keys}, "bench", out={0: out})) for keys in of_torch]
    buffered = [stack.enter_context(server.prepare({0: n}, "bench")) for _ in sets]
    for lookup, keys in zip(buffered, of_cupy, strict=True):
        lookup.keys[0][:] = keys
    layer, answers = LookupLayer(server, "bench", 0, dim), [out]
    table = torch.from_numpy(sample_vectors(np.arange(200_000), dim, _SEED)).cuda()

    def through_layer(i: int) -> None:
        answers[0] = layer(of_torch[i % _SETS])

    return {
        "lookup_fromdlpack, torch": (
            lambda i: server.lookup_fromdlpack(of_torch[i % _SETS], out, "bench", 0),
            lambda _i: _on_host(out),
        ),
        "lookup_fromdlpack, CuPy": (
            lambda i: server.lookup_fromdlpack(of_cupy[i % _SETS], cupy_out, "bench", 0),
            lambda _i: _on_host(cupy_out),
        ),
        "prepared, torch": (lambda i: prepared[i % _SETS].run(), lambda _i: _on_host(out)),
        "prepared, buffers": (lambda i: buffered[i % _SETS].run(), lambda i: _on_host(buffered[i].vectors[0])),
        "layer": (through_layer, lambda _i: _on_host(answers[0])),
        "torch index_select": (
            lambda i: torch.index_select(table, 0, of_torch[i % _SETS], out=out),
            lambda _i: _on_host(out),
        ),
    }


def _many_tables(server: hps.HPS, stack: ExitStack, sets: list[np.ndarray], dim: int) -> _Ways:
    import cupy
    import torch

    tables, n = sets[0].shape
    names = [f"t{table}" for table in range(tables)]
    keys = [dict(zip(names, torch.from_numpy(each).cuda().unbind(0), strict=True)) for each in sets]
    cupy_keys = [dict(zip(names, cupy.asarray(each), strict=True)) for each in sets]
    outs = {name: torch.empty(n, dim, device="cuda") for name in names}
    cupy_outs = {name: cupy.empty((n, dim), cupy.float32) for name in names}
    runs = [torch.from_numpy(each.reshape(-1)).cuda() for each in sets]
    whole, counts = torch.empty(tables * n * dim, device="cuda"), [n] * tables
    prepared = [stack.enter_context(server.prepare(each, "bench", out=outs)) for each in keys]
    buffered = [stack.enter_context(server.prepare(dict.fromkeys(names, n), "bench")) for _ in sets]
    for lookup, each in zip(buffered, sets, strict=True):
        lookup.all_keys.set(each.reshape(-1))  # type: ignore[union-attr]

    def of_tables(found: Mapping[str, Any]) -> np.ndarray:
        return np.concatenate([_on_host(one) for one in found.values()])

    return {
        "lookup_tables, torch": (
            lambda i: server.lookup_tables(keys[i % _SETS], "bench", out=outs),
            lambda _i: of_tables(outs),
        ),
        "lookup_tables, CuPy": (
            lambda i: server.lookup_tables(cupy_keys[i % _SETS], "bench", out=cupy_outs),
            lambda _i: of_tables(cupy_outs),
        ),
        "lookup_concatenated, torch": (
            lambda i: server.lookup_concatenated(runs[i % _SETS], counts, whole, "bench"),
            lambda _i: _on_host(whole),
        ),
        "prepared, torch": (lambda i: prepared[i % _SETS].run(), lambda _i: of_tables(outs)),
        "prepared, buffers": (lambda i: buffered[i % _SETS].run(), lambda i: _on_host(buffered[i].all_vectors)),
    }
