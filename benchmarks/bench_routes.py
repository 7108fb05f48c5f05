"""`route="keys"` over three servers: hit rates of their caches, and what routing costs a call.

Popular keys follow a power law (exponent 1.05) over the rows of one table. Three servers with caches of a tenth of the rows
each, asked by key; the same, asked one after the other for everything; and one server whose cache has three tenths. Hit rates
are those of the second half of the lookups. Calls are timed with keys that all caches have, in one table and in 26: medians of
rounds that alternate between the clients, of which the best tenth is given, as in `bench_client`. All vectors are compared with
the model's.
"""

import tempfile
import time
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import httpx
import numpy as np

import hps
from benchmarks.harness import Report
from benchmarks.served import document, model
from tests.servers.served_process import ServedProcess

_ROWS, _DIM, _ALPHA = 200_000, 32, 1.05
_KEYS = 1_000
_TABLES = {f"t{table}": np.arange(_KEYS) + table * 7 for table in range(26)}
_SMALL_ROWS = 2_000
_CALLS = 20  # of a round


def _vectors(keys: np.ndarray) -> np.ndarray:
    return (keys[:, None] + np.arange(_DIM) / 64).astype(np.float32)


def _counted(url: str) -> tuple[float, float]:
    """Hits and keys of a server's cache since its start."""
    hits = misses = 0.0
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if 'tier="embedding_cache"' in name:
            hits += float(value) if name.startswith("hps_hits_total{") else 0.0
            misses += float(value) if name.startswith("hps_misses_total{") else 0.0
    return hits, hits + misses


def run(report: Report, quick: bool) -> None:
    """Measure hit rates and times; `quick` asks less."""
    batches = 400 if quick else 4000
    rng = np.random.default_rng(report.seed)
    weights = np.arange(1, _ROWS + 1) ** -_ALPHA
    popular = rng.permutation(_ROWS)
    with tempfile.TemporaryDirectory(prefix="hps-bench-routes-") as name, ExitStack() as stack:
        directory = Path(name)
        keys = np.arange(_ROWS)
        hps.write_sparse_model(directory / "item.model", (keys, _vectors(keys)))
        hps.write_sparse_model(directory / "small.model", (keys[:_SMALL_ROWS], _vectors(keys[:_SMALL_ROWS])))
        servers: dict[str, list[str]] = {}
        for kind, count, share in (("routed", 3, 0.1), ("in turn", 3, 0.1), ("one", 1, 0.3)):
            urls = []
            for nth in range(count):
                place = directory / f"{kind}-{nth}"
                place.mkdir()
                entry = model([directory / "item.model"], [_DIM], gpucacheper=share)
                small = model([directory / "small.model"] * 26, [_DIM] * 26, name="small")
                urls.append(stack.enter_context(ServedProcess(document(entry, small), place)).url)
            servers[kind] = urls
        routed = stack.enter_context(hps.connect(servers["routed"], route="keys"))
        turns = cycle([stack.enter_context(hps.connect(url)) for url in servers["in turn"]])
        one = stack.enter_context(hps.connect(servers["one"]))
        before: dict[str, list[tuple[float, float]]] = {}
        for nth in range(batches):
            if nth == batches // 2:
                before = {kind: [_counted(url) for url in urls] for kind, urls in servers.items()}
            asked = popular[rng.choice(_ROWS, _KEYS, p=weights / weights.sum())]
            wanted = _vectors(asked)
            for client in (routed, next(turns), one):
                if not np.array_equal(client.lookup(asked, "m", "t0"), wanted):
                    raise SystemExit("wrong vectors")
        for kind, urls in servers.items():
            after = [_counted(url) for url in urls]
            hits, total = (sum(a[i] - b[i] for a, b in zip(after, before[kind], strict=True)) for i in (0, 1))
            report.add({"work": "hit rate", "servers": kind, "alpha": _ALPHA}, {"hit_rate": hits / total, "keys": total})
        for tables in (1, 26):
            asked = dict(list(_TABLES.items())[:tables])
            rounds: dict[str, list[tuple[float, float]]] = {"routed": [], "one": []}
            for _ in range(2 if quick else 60):
                for kind, client in (("routed", routed), ("one", one)):
                    rounds[kind].append(_round(client, asked))
            best = {kind: np.quantile(of_kind, 0.1, axis=0).tolist() for kind, of_kind in rounds.items()}
            for kind, (p50_s, cpu_s) in best.items():
                times = {"p50_us": 1e6 * p50_s, "cpu_us": 1e6 * cpu_s, "relative": p50_s / best["one"][0]}
                report.add({"work": "call", "servers": kind, "tables": tables, "keys": _KEYS}, times)


def _round(client: hps.Client, asked: dict[str, np.ndarray]) -> tuple[float, float]:
    """Return the median time of a call and the caller's processor time for one, in seconds."""
    for table, vectors in client.lookup_tables(asked, "small").items():
        if not np.array_equal(vectors, _vectors(asked[table])):
            raise SystemExit("wrong vectors")
    seconds = np.empty(_CALLS)
    began_cpu = time.process_time()
    for nth in range(_CALLS):
        began = time.perf_counter()
        client.lookup_tables(asked, "small")
        seconds[nth] = time.perf_counter() - began
    return float(np.median(seconds)), (time.process_time() - began_cpu) / _CALLS
