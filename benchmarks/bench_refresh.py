"""Lookups beside a refresh: their latency while the whole cache is read again from the hash map, against idle.

A cache of `rows` resident keys stands above a hash map that holds them all. Before each refresh a part of the map's rows is
replaced behind the cache's back. A vector encodes its key and its generation, so that one that is torn, foreign, older or
newer than it may be is seen; after the last, whole refresh all must be of the newest. Phases alternate: idle, then beside a
refresh, which is ended with the phase. The figure to quote is `p99_ratio`, the median over the rounds of the p99 beside a
refresh to that of the idle phase before it. Target: at most 1.5. `whole_s` is how long a refresh of all rows takes at the rate
that was measured.

Runs on a GPU where there is one, else on the CPU with fewer rows. Tensors on the device are torch's, where that is installed.
It takes HPS_BENCH_SECONDS (110): the last phase, beside a whole refresh at the default share, gets what the others have left.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Report, gpu_facts
from hps.cache.base import EmbeddingCache
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.refresher import Refresher, RefreshSettings
from hps.engine.session import CachedSession, SessionSettings
from hps.errors import NotReadyError
from hps.ground.threads.open_calls import OpenCalls
from hps.statistics.metrics import TIERS, Metrics
from hps.stores.hash_map.database import HashMapDatabase
from hps.tensors.batch import Batch, table_batch
from hps.types import TableSpec
from hps.versions.tiers import choose_cache

KEYS = 4096
RATE = 1000  # lookups a second where they are paced
KEY_SETS = 32
CHECK_EVERY = 8  # lookups
GENERATIONS = 16
CHANGED = 8  # one row of so many is replaced before a refresh
LOAD = 0.5  # how full the cache is: nearly every row then finds a place
STEP = 1 << 17  # rows written at once
IDLE_S, BESIDE_S = 1.5, 3.0  # of a phase

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_BACK = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))


def run(report: Report, quick: bool) -> None:
    """Measure each kind of lookup beside refreshes of the default and of the whole share."""
    end = time.perf_counter() + (10.0 if quick else float(os.environ.get("HPS_BENCH_SECONDS", "110")))
    scale = 0.1 if quick else 1.0
    device = choose_cache("auto").device
    if device == "cuda":
        report.about |= gpu_facts()
    stage = Stage.make(device, 50_000 if quick else 10_000_000 if device == "cuda" else 1_000_000, 32)
    kinds: list[tuple[str, int | None]] = [("host", RATE), ("host", None)]
    if device == "cuda" and find_spec("torch"):
        kinds.append(("device", None))
    usual = RefreshSettings().share
    try:
        _alone(report, stage)
        for place, rate in kinds:
            for share, rounds in ((usual, 3), (1.0, 1)):
                if end - time.perf_counter() > rounds * scale * (IDLE_S + BESIDE_S):
                    _beside(report, stage, _Lookups(stage, place, rate), share, [scale * BESIDE_S] * rounds, scale * IDLE_S)
        left = end - time.perf_counter() - IDLE_S
        _beside(report, stage, _Lookups(stage, *kinds[0]), usual, [max(left, BESIDE_S)], scale * IDLE_S)
        stage.refresh_all()
    finally:
        stage.close()


@dataclass
class Stage:
    """A cache, the map below it, and what each row has to be. Row i has key `keys[i]`."""

    device: str
    keys: npt.NDArray[np.int64]  # (rows,)
    table: TableSpec
    database: HashMapDatabase
    chain: DatabaseChain
    session: CachedSession
    refresher: Refresher
    sets: list[npt.NDArray[np.int64]]  # rows of the lookups, each (KEYS,), all resident
    newest: npt.NDArray[np.uint8] = field(repr=False)  # (rows,) generation in the map
    oldest: npt.NDArray[np.uint8] = field(repr=False)  # (rows,) the oldest that the cache may still have
    round: int = 1

    @classmethod
    def make(cls, device: str, rows: int, dim: int) -> "Stage":
        table = TableSpec("bench", "t", dim, -1.0, KEYS)
        metrics = Metrics()
        database = HashMapDatabase()
        chain = DatabaseChain(None, database, metrics=metrics)
        chain.open_table(table)
        database.reserve(table.tag, rows)
        cache = choose_cache(device).create([table], [int(rows / LOAD)], 0)
        coalescer = FetchCoalescer(chain.fetch, metrics)
        session = CachedSession([table], cache, chain, coalescer, SessionSettings(hit_rate_threshold=1.1), metrics)
        refresher = _refresher(table, cache, chain)
        keys = (np.arange(rows, dtype=np.uint64) * _SPREAD).view(np.int64)
        generations = np.zeros(rows, np.uint8)
        stage = cls(device, keys, table, database, chain, session, refresher, [], generations, generations.copy())
        stage._write(np.arange(rows), cache.insert)
        resident = (cache.dump(0).view(np.uint64) * _BACK).astype(np.int64)
        if resident.size < 0.99 * rows:
            raise SystemExit(f"{resident.size} of {rows} rows are resident; nothing is measured")
        rng = np.random.default_rng(1)
        stage.sets = [rng.choice(resident, KEYS) for _ in range(KEY_SETS)]
        return stage

    def change(self) -> None:
        """Replace a part of the map's rows; the cache keeps the old ones."""
        changed = np.arange(self.round % CHANGED, self.keys.size, CHANGED)
        self.newest[changed] = (self.newest[changed] + 1) % GENERATIONS
        self.round += 1
        self._write(changed)

    def end_refresh(self) -> None:
        """End the refresh that runs, if one does, and make ready for another."""
        self.refresher.close()
        self.refresher = _refresher(self.table, self.session.cache, self.chain)

    def refresh_all(self) -> int:
        """Refresh at full speed, and see that the cache has what the map has; returns how many rows."""
        report = self.refresher.refresh(1.0)["t"]
        self.oldest[:] = self.newest
        lookups = _Lookups(self, "host", None)
        for nth in range(KEY_SETS):
            lookups.check(nth)
        if report.erased:
            raise SystemExit(f"the refresh erased {report.erased} rows that the map has; nothing is measured")
        return report.updated

    @property
    def refreshed(self) -> int:
        """Rows that refreshes have fetched: lookups hit the cache."""
        return self.chain.metrics.table("bench", "t").hits[TIERS.index("persistent_db")]

    def check(self, rows: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32]) -> None:
        """Raise unless each vector is whole, of its key and of a generation that it may have."""
        first = vectors[:, 0].astype(np.int64)
        generation = first % GENERATIONS
        right = (vectors == vectors[:, :1]).all(axis=1)
        right &= first // GENERATIONS == _code(self.keys[rows])
        newest = self.newest[rows].astype(np.int64)
        right &= (newest - generation) % GENERATIONS <= (newest - self.oldest[rows]) % GENERATIONS
        if not right.all():
            raise SystemExit(f"{np.count_nonzero(~right)} of {rows.size} vectors are wrong; nothing is measured")

    def axes(self, work: str) -> dict[str, Any]:
        """Axes of a row of the results."""
        return {"work": work, "device": self.device, "rows": self.keys.size, "dim": self.table.dim}

    def close(self) -> None:
        self.refresher.close()
        self.session.close()
        self.chain.close()

    def _write(self, rows: npt.NDArray[np.int64], also: Callable[..., object] | None = None) -> None:
        def write(start: int) -> None:
            chosen = rows[start : start + STEP]
            keys = self.keys[chosen]
            first = (_code(keys) * GENERATIONS + self.newest[chosen]).astype(np.float32)
            vectors = np.repeat(first[:, None], self.table.dim, axis=1)
            self.database.insert(self.table.tag, keys, vectors)
            if also is not None:
                also(0, keys, vectors)

        with ThreadPoolExecutor(8) as writers:
            for done in writers.map(write, range(0, rows.size, STEP)):
                del done


def _refresher(table: TableSpec, cache: EmbeddingCache, chain: DatabaseChain) -> Refresher:
    return Refresher([table], [cache], chain, RefreshSettings(), OpenCalls("the benchmark"), chain.metrics)


def _code(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """20 bits of a key: with its generation they are a whole number that float32 holds."""
    code: npt.NDArray[np.int64] = (keys.view(np.uint64) >> np.uint64(44)).astype(np.int64)
    return code


def _alone(report: Report, stage: Stage) -> None:
    """The refresh itself, with no lookups beside it."""
    stage.change()
    start = time.perf_counter()
    rows = stage.refresher.refresh(1.0)["t"].updated
    seconds = time.perf_counter() - start
    stage.refresh_all()
    start = time.perf_counter()
    stage.session.cache.dump(0)
    figures = {"whole_s": seconds, "refreshed_mrows_per_s": rows / seconds / 1e6, "dump_s": time.perf_counter() - start}
    report.add({**stage.axes("refresh alone"), "share": 1.0}, figures)


def _beside(report: Report, stage: Stage, lookups: "_Lookups", share: float, beside_s: list[float], idle_s: float) -> None:
    """Lookups of one kind; `beside_s` has a round for each element, which takes at most so many seconds."""
    lookups.run(until=_after(idle_s / 2))  # warm
    idle, beside, ratios = [], [], []
    seconds, refreshed, whole = 0.0, 0, 0
    for most_s in beside_s:
        stage.change()
        idle.append(lookups.run(until=_after(idle_s)))
        with ThreadPoolExecutor(1) as refreshing:
            before, start, over = stage.refreshed, time.perf_counter(), _after(most_s)
            refresh = refreshing.submit(stage.refresher.refresh, share)
            beside.append(lookups.run(until=lambda refresh=refresh, over=over: refresh.done() or over()))
            seconds += time.perf_counter() - start
            refreshed += stage.refreshed - before
            whole += refresh.done()
            stage.end_refresh()
        with suppress(NotReadyError):  # it was ended
            refresh.result()
        ratios.append(float(np.quantile(beside[-1], 0.99) / np.quantile(idle[-1], 0.99)))
    figures: dict[str, Any] = {}
    for name, each in (("idle", np.concatenate(idle)), ("beside", np.concatenate(beside))):
        for quantile, written in ((0.5, "p50"), (0.99, "p99"), (0.999, "p999")):
            figures[f"{name}_{written}_us"] = float(np.quantile(each, quantile) * 1e6)
        figures[f"{name}_lookups"] = each.size
    figures |= {"p99_ratio": float(np.median(ratios)), "p99_ratios": [round(ratio, 3) for ratio in ratios], "target": 1.5}
    figures |= {"refreshed_mrows_per_s": refreshed / seconds / 1e6, "whole_s": stage.keys.size * seconds / max(refreshed, 1)}
    loop = f"{lookups.rate}/s" if lookups.rate else "back to back"
    axes = {**stage.axes("lookups beside a refresh"), "place": lookups.place, "loop": loop, "keys": KEYS, "share": share}
    report.add({**axes, "whole_refreshes": whole}, figures)


class _Lookups:
    """Lookups of one thread, checked between the timed ones. Tensors of `device` are torch's."""

    def __init__(self, stage: Stage, place: str, rate: int | None) -> None:
        self.place, self.rate = place, rate
        self._stage = stage
        self._period_s = None if rate is None else 1 / rate
        keys = [stage.keys[rows] for rows in stage.sets]
        self._out: Any = np.empty((KEYS, stage.table.dim), np.float32)
        self._wait: Callable[[], None] = lambda: None
        if place == "device":
            import torch

            self._wait = torch.cuda.synchronize
            self._out = torch.empty((KEYS, stage.table.dim), dtype=torch.float32, device="cuda")
            tensors = [torch.from_numpy(part).cuda() for part in keys]
            dim = stage.table.dim
            self._batches = [table_batch(0, dim, tensor, self._out, on_cuda=True, with_found=False) for tensor in tensors]
        else:
            self._batches = [Batch.of(0, part, self._out) for part in keys]

    def check(self, nth: int) -> None:
        self._lookup(nth)
        out = self._out if isinstance(self._out, np.ndarray) else self._out.cpu().numpy()
        self._stage.check(self._stage.sets[nth], out)

    def run(self, until: Callable[[], bool]) -> npt.NDArray[np.float64]:
        """Seconds of each lookup; a paced one that could not begin in time counts from when it should have begun."""
        seconds = []
        due = time.perf_counter()
        nth = 0
        while not until():
            if self._period_s is None:
                start = time.perf_counter()
            else:
                due += self._period_s
                left = due - time.perf_counter()
                if left > 0:
                    time.sleep(left)
                start = time.perf_counter() if left > 0 else due
            self._lookup(nth % KEY_SETS)
            seconds.append(time.perf_counter() - start)
            nth += 1
            if nth % CHECK_EVERY == 0:
                self.check(nth // CHECK_EVERY % KEY_SETS)
        return np.array(seconds)

    def _lookup(self, nth: int) -> None:
        self._stage.session.run(self._batches[nth])
        self._wait()


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end
