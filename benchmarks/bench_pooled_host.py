"""Pooled lookups in host memory: bags through the NumPy cache against rows that are added up, and torch's `embedding_bag`."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.bench_pooled import HOTNESS, check_sums, configuration
from benchmarks.harness import Report, time_calls
from hps.tools.profiling.workloads import power_law_keys

_ALPHA = 1.05


def run(report: Report, quick: bool) -> None:
    """Measure a model of 26 tables and one of a single table, everything resident; `quick` takes small tables."""
    import torch

    report.about |= {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    for hotness, rows in ((HOTNESS, 20_000), ((20,), 200_000)):
        for dim in (32,) if quick else (32, 128):
            with tempfile.TemporaryDirectory(prefix="hps-pooled-") as directory:
                _measure(report, Path(directory), hotness, rows // 100 if quick else rows, dim)


def _measure(report: Report, place: Path, hotness: tuple[int, ...], rows: int, dim: int) -> None:
    import torch
    from torch.nn.functional import embedding_bag

    from hps.tools.cli.tables.sample import sample_vectors

    batch = 256
    rng = np.random.default_rng(report.seed)
    whole = {"gpucacheper": 1.0, "cache_refresh_percentage_per_iteration": 1.0}
    config = configuration(place, [dim] * len(hotness), rows, hotness, **whole) | {"device": "cpu"}
    keys = [power_law_keys(rng, batch * hot, rows, _ALPHA) for hot in hotness]
    offsets = [np.arange(batch + 1) * hot for hot in hotness]
    weights = [torch.from_numpy(sample_vectors(np.arange(rows), dim, t)) for t in range(len(hotness))]
    on_torch = [(torch.from_numpy(each), torch.from_numpy(where)) for each, where in zip(keys, offsets, strict=True)]
    out = np.empty((batch, dim * len(hotness)), np.float32)
    all_keys, counts = np.concatenate(keys), [each.size for each in keys]
    vectors = np.empty((all_keys.size, dim), np.float32)
    ends = np.cumsum([0, *counts])
    bags = {f"t{t}": hps.Bags(each, where) for t, (each, where) in enumerate(zip(keys, offsets, strict=True))}

    with hps.HPS(config) as server:

        def pooled(_i: int) -> Any:
            return server.lookup_pooled(bags, "bench", out=out)

        def added_up(_i: int) -> Any:
            server.lookup_concatenated(all_keys, counts, vectors, "bench")
            for t, where in enumerate(offsets):
                np.add.reduceat(vectors[ends[t] : ends[t + 1]], where[:-1], axis=0, out=out[:, t * dim : (t + 1) * dim])
            return out

        def theirs(_i: int) -> Any:
            sums = [
                embedding_bag(each, weight, where, mode="sum", include_last_offset=True)
                for (each, where), weight in zip(on_torch, weights, strict=True)
            ]
            return torch.cat(sums, 1).numpy()

        p50_s = {}
        for name, way in (("pooled", pooled), ("rows", added_up), ("torch", theirs)):
            out.fill(np.nan)
            found = way(0)
            for t, hot in enumerate(hotness):
                check_sums(keys[t], hot, dim, t, found[:, t * dim : (t + 1) * dim])
            p50_s[name] = min(time_calls(way, 40).p50_s for _ in range(3))
    figures = {
        "mkeys_per_s": all_keys.size / p50_s["pooled"] / 1e6,
        **{f"{name}_p50_us": seconds * 1e6 for name, seconds in p50_s.items()},
        "of_rows": p50_s["rows"] / p50_s["pooled"],
        "of_torch": p50_s["torch"] / p50_s["pooled"],
        "answer_bytes": out.nbytes,
        "rows_bytes": vectors.nbytes,
    }
    report.add({"tables": len(hotness), "batch": batch, "dim": dim, "rows": rows, "alpha": _ALPHA}, figures)
