"""Where the microseconds of a lookup of resident keys go, by where keys and output are.

    python -m benchmarks.lookup_steps

First the whole lookup, unwatched (p50, p99, with a wait for the device, as `gpu_lookup` measures it), then its steps: the
median of what each takes in one lookup, in microseconds. Steps that stand below another and further in are part of it. Watching
a step costs 0.2 us for each in it. The last column leaves out the copy from pinned memory to the caller's array: it is no
answer, but what a lookup of host arrays takes besides.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hps
import hps.cache.cuda.lookup as cuda_lookup
import hps.parameter_server as parameter_server
from benchmarks.bench_gpu_lookup import _check, _configuration, _microseconds, ways_to_look_up
from hps.cache.cuda.lookup import CupyLookup
from hps.cache.cuda.tensors import TensorReader
from hps.lookup.session import CachedSession, _LookupPool

# What is watched: the label, its owner, its name. What another version of the code does not have is left out.
STEPS: list[tuple[str, Any, str]] = [
    ("whole call", hps.HPS, "lookup_fromdlpack"),
    ("whole call", hps.HPS, "lookup"),
    ("  segment", parameter_server, "tensor_segment"),
    ("  session.lookup", CachedSession, "lookup"),
    ("    take a workspace", _LookupPool, "take"),
    ("    query", CupyLookup, "query"),
    ("      begin", CupyLookup, "begin"),
    ("        reader.start", TensorReader, "start"),
    ("        reader.keys", TensorReader, "keys"),
    ("        reader.output", TensorReader, "output"),
    ("        reader.place", TensorReader, "place"),
    ("        choose stream", CupyLookup, "_choose_stream"),
    ("      launch query", CupyLookup, "launch_query"),
    ("        launch", cuda_lookup, "launch"),
    ("      wait", CupyLookup, "_synchronise"),
    ("    finish", CupyLookup, "finish"),
    ("    count", CachedSession, "_count"),
    ("np.copyto, keys and output", np, "copyto"),
    ("event records", cuda_lookup.runtime, "eventRecord"),
    ("event waits", cuda_lookup.runtime, "streamWaitEvent"),
]


@contextmanager
def watched(spent: dict[str, int]) -> Iterator[None]:
    """Add to `spent` the nanoseconds of every step."""

    def timed(label: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                spent[label] += time.perf_counter_ns() - start

        return step

    originals = [(label, owner, name, getattr(owner, name)) for label, owner, name in STEPS if hasattr(owner, name)]
    for label, owner, name, original in originals:
        setattr(owner, name, timed(label, original))
    try:
        yield
    finally:
        for _label, owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def output_left_in_pinned_memory() -> Iterator[None]:
    """Leave out the copy of large arrays."""
    original = np.copyto

    def copyto(target: np.ndarray, source: np.ndarray) -> None:
        if target.nbytes <= 1 << 16:
            original(target, source)

    np.copyto = copyto  # type: ignore[assignment]
    try:
        yield
    finally:
        np.copyto = original  # type: ignore[assignment]


def medians(look_up: Callable[[int], Any], calls: int) -> dict[str, float]:
    """Microseconds of each step in one lookup; the median."""
    spent = dict.fromkeys([label for label, _owner, _name in STEPS], 0)
    rows = []
    with watched(spent):
        for i in range(calls):
            spent.update(dict.fromkeys(spent, 0))
            look_up(i)
            torch.cuda.synchronize()
            rows.append(list(spent.values()))
    return dict(zip(spent, np.median(rows[calls // 5 :], axis=0) / 1e3, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--calls", type=int, default=3000)
    arguments = parser.parse_args()
    rows, n, dim, calls = 200_000, arguments.keys, arguments.dim, arguments.calls
    rng = np.random.default_rng(1)
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory, hps.HPS(_configuration(Path(directory), [dim], rows)) as server:
        resident = server.model("bench").caches[0].dump(0)
        sets = [rng.choice(resident, n) for _ in range(16)]
        ways = ways_to_look_up(server, torch, sets, dim)
        for work, look_up in ways.items():
            for i, keys in enumerate(sets):
                _check(look_up(i), keys, dim)
            whole = _microseconds(torch, lambda i, look_up=look_up: (look_up(i), torch.cuda.synchronize()), calls)
            print(f"{work:48} p50 {whole['p50_us']:7.1f} us   p99 {whole['p99_us']:7.1f} us", flush=True)
            columns[work] = medians(look_up, calls)
        with output_left_in_pinned_memory():
            look_up = ways["lookup_fromdlpack, NumPy arrays"]
            whole = _microseconds(torch, lambda i: (look_up(i), torch.cuda.synchronize()), calls)
            work = "NumPy, output not copied (no answer)"
            print(f"{work:48} p50 {whole['p50_us']:7.1f} us   p99 {whole['p99_us']:7.1f} us", flush=True)
            columns[work] = medians(look_up, calls)
    print(f"\n{n} keys, dim {dim}; us of each step: " + " | ".join(columns))
    for label in dict.fromkeys(label for label, _owner, _name in STEPS):
        print(f"{label:28}" + "".join(f"{column[label]:9.2f}" for column in columns.values()))


if __name__ == "__main__":
    main()
