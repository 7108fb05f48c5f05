"""Captured lookups on a GPU: what the device works for one whose keys are resident, or all but a few, beside the query alone.

Many lookups with other keys each are one graph of torch's, and its time is divided by their number. Keys that are to be missing
are erased before each replay. Every float of every answer is compared on the device.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.bench_misses import Table, check
from benchmarks.gpu_timing import torch_graph, wake
from benchmarks.harness import Report, add, part
from hps.tensors.batch import Batch

_ROUNDS = 9


def run(report: Report, quick: bool) -> None:
    """Measure lookups of 6 M rows in a cache of 2^23; `quick` takes few."""
    report.about |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    rows = 1 << 17 if quick else 6_000_000
    for dim in (32, 128):
        table = part(report, f"filling {rows} rows x {dim}", 90, partial(Table, rows, dim))
        if table is not None:
            for path in ("link", "index"):
                part(report, f"lookups of {rows} rows x {dim}, {path}", 120, partial(_lookups, report, table, path, quick))
            table.close()


def _lookups(report: Report, table: Table, path: str, quick: bool) -> None:
    cache = table.cache(path, 1 << 17 if quick else 1 << 23)
    lookup = cache.create_lookup()
    for start in range(0, table.rows, 1 << 18):
        keys = np.arange(start, min(start + (1 << 18), table.rows), dtype=np.int64)
        cache.insert(0, keys, table.vectors(keys))
    resident = torch.from_numpy(cache.dump(0)).cuda()
    for n in (8192, 1 << 16) if quick else (8192, 1 << 16, 1 << 20):
        calls = 4 if quick else max(4, (1 << 23) // n // 16)
        order = torch.randperm(resident.numel(), device="cuda")
        places = torch.randint(resident.numel() - 65_536, (calls, n), device="cuda")
        outs = torch.full((calls, n, table.dim), torch.nan, device="cuda")

        def time(keys: Any, alone: bool, erased: Any = None, outs: Any = outs) -> float:
            batches = [Batch.of(0, one, out) for one, out in zip(keys, outs, strict=True)]
            lookup.prepare(batches[0])
            graph = torch_graph([partial(_launch, lookup, batch, alone) for batch in batches])
            times = []
            for _ in range(_ROUNDS):
                if erased is not None:
                    cache.erase(0, erased)
                outs.fill_(torch.nan)
                wake(0.02)
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop) * 1e3 / len(batches))
                check(keys.reshape(-1), outs.view(-1, table.dim))
            return float(np.median(times))

        kept = resident[order[places]]
        alone, captured = time(kept, True), time(kept, False)
        axes = {"work": "captured lookup", "path": path, "keys": n, "dim": table.dim, "rows": table.rows}
        add(
            report,
            axes,
            {"query_us": alone, "captured_us": captured, "of_query": alone / captured, "m_keys_per_s": n / captured},
        )
        absent = resident[order[-65_536:]]
        for missing in (1, 10, 100, 1000, 3000, 16_384):
            if missing > n or missing * calls > absent.numel():
                continue
            some = kept.clone()
            fresh = absent[: missing * calls].view(calls, missing)
            some[:, torch.randperm(n, device="cuda")[:missing]] = fresh
            with_misses = time(some, False, fresh.cpu().numpy().reshape(-1))
            add(report, {**axes, "missing": missing}, {"captured_us": with_misses, "more_us": with_misses - captured})
        del outs
    cache.close()


def _launch(lookup: Any, batch: Batch, alone: bool) -> None:
    captured = torch.cuda.is_current_stream_capturing()
    if alone:
        lookup.begin(batch, captured)
        lookup.launch_query()
    else:
        lookup.enqueue(batch, captured)
