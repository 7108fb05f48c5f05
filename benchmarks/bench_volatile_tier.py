"""A Redis that is away at the start, or comes back empty: starts, and lookups while it is filled again.

One table of `rows` rows, in RocksDB and in Redis, without an embedding cache. One thread looks up 1,000 keys at a time: with
Redis whole, with RocksDB alone, and from the moment in which Redis is emptied until it is whole again; each phase has its
figures, and every vector is checked. Then Redis is emptied and filled by `refresh`, and without lookups beside it. Phases
alternate, and figures are medians over the rounds. Those to quote: `to_load`, the duration of a fill, from the loss on, beside
that of the start which loaded the same rows into an empty Redis; and `p50_to_rocks_db`, the lookups while it is filled beside
those of RocksDB alone.

Starts: the same configuration with Redis away, and without Redis, in turn, RocksDB complete.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.harness import Report
from hps.testing.waiting import wait_until
from tests.servers.redis_server import RedisServer

DIM = 32
KEYS = 1000
SETS = 64
PHASE_S = 2.0
ROUNDS = 3
STARTS = 20


def run(report: Report, quick: bool) -> None:
    """Measure starts and fills."""
    rows = 50_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        keys = np.arange(rows, dtype=np.int64)
        hps.write_sparse_model(place / "t", (keys, _vectors(keys)))
        redis = RedisServer(place / "redis")
        _starts(report, place, redis, 3 if quick else STARTS)
        try:
            redis.start()
            _fills(report, place, redis, rows, 0.5 if quick else PHASE_S, 1 if quick else ROUNDS)
        finally:
            redis.kill()


def _vectors(keys: Any) -> Any:
    return (keys[:, None] + np.arange(DIM) / 64).astype(np.float32)


def _document(place: Path, redis: RedisServer | None) -> dict[str, Any]:
    model = {
        "model": "m",
        "sparse_files": [str(place / "t")],
        "embedding_vecsize_per_table": [DIM],
        "embedding_table_names": ["t"],
        "maxnum_catfeature_query_per_table_per_sample": [1],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": KEYS,
        "gpucache": False,
    }
    volatile = {"type": "disabled"} if redis is None else {"type": "redis", "address": redis.address}
    persistent = {"type": "rocks_db", "path": str(place / "rocks_db")}
    return {"supportlonglong": True, "device": "cpu", "volatile_db": volatile, "persistent_db": persistent, "models": [model]}


def _starts(report: Report, place: Path, redis: RedisServer, count: int) -> None:
    with hps.HPS(_document(place, None)):
        pass  # loads RocksDB
    seconds: dict[str, list[float]] = {"away": [], "none": []}
    for _ in range(count):
        for which, server in (("away", redis), ("none", None)):
            began = time.perf_counter()
            with hps.HPS(_document(place, server)) as started:
                seconds[which].append(time.perf_counter() - began)
                _check(started, np.arange(0, KEYS))
                if bool(started.degraded) != (which == "away"):
                    raise SystemExit(f"got degraded {started.degraded}; nothing is measured")
    figures = {f"{which}_{name}_s": take(some) for which, some in seconds.items() for name, take in _TAKEN.items()}
    report.add({"phase": "starts", "starts": count}, figures)


_TAKEN: dict[str, Callable[[list[float]], float]] = {"p50": lambda some: float(np.median(some)), "max": max}


def _check(server: hps.HPS, keys: Any) -> None:
    if not np.array_equal(server.lookup(keys, "m", "t"), _vectors(keys)):
        raise SystemExit("a lookup gave a wrong vector; nothing is measured")


class _Lookups:
    """A thread that looks up until it is told to end. The time of the checks is not counted."""

    def __init__(self, server: hps.HPS, rows: int) -> None:
        rng = np.random.default_rng(1)
        self._sets = [rng.integers(0, rows, KEYS) for _ in range(SETS)]
        self._server, self._ends = server, threading.Event()
        self.seconds: list[float] = []
        self._wrong = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Lookups":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            keys = self._sets[len(self.seconds) % SETS]
            began = time.perf_counter()
            vectors = self._server.lookup(keys, "m", "t")
            self.seconds.append(time.perf_counter() - began)
            self._wrong += not np.array_equal(vectors, _vectors(keys))

    def figures(self) -> dict[str, float]:
        if self._wrong or not self.seconds:
            raise SystemExit(f"{self._wrong} of {len(self.seconds)} lookups were wrong; nothing is measured")
        return {
            "lookups": len(self.seconds),
            "p50_ms": 1e3 * float(np.median(self.seconds)),
            "p99_ms": 1e3 * float(np.quantile(self.seconds, 0.99)),
            "mean_ms": 1e3 * float(np.mean(self.seconds)),
        }


def _fills(report: Report, place: Path, redis: RedisServer, rows: int, phase_s: float, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {}
    with redis.client() as client, hps.HPS(_document(_beside(place), None)) as alone:
        for _ in range(rounds):
            client.flushall()
            began = time.perf_counter()
            with hps.HPS(_document(place, redis)) as server:
                found.setdefault("load", []).append({"seconds": time.perf_counter() - began})
                for phase, figures in _round(server, alone, client, rows, phase_s, found["load"][-1]["seconds"]):
                    found.setdefault(phase, []).append(figures)
                _check(server, np.arange(0, KEYS))
    for phase, each in found.items():
        medians = {name: float(np.median([one[name] for one in each])) for name in each[0]}
        report.add({"phase": phase, "rows": rows, "rounds": rounds}, medians)


def _round(
    server: hps.HPS, alone: hps.HPS, client: Any, rows: int, phase_s: float, load_s: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield phases and their figures."""

    def whole() -> bool:
        return not server.degraded and sum(client.hlen(key) for key in client.scan_iter("hps_et{*}v")) == rows

    def filled(how: Callable[[], object]) -> dict[str, float]:
        client.flushall()
        began = time.perf_counter()
        how()
        wait_until(whole, "Redis is filled")
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "to_load": seconds / load_s}

    before: dict[str, dict[str, float]] = {}
    for phase, one in (("redis", server), ("rocks_db", alone)):
        with _Lookups(one, rows) as lookups:
            time.sleep(phase_s)
        before[phase] = lookups.figures()
        yield phase, before[phase]
    for phase, how in (("filled", lambda: None), ("filled by refresh", lambda: server.refresh("m"))):
        with _Lookups(server, rows) as lookups:
            figures = filled(how) | lookups.figures()
        for other, known in before.items():
            figures |= {f"{name}_to_{other}": figures[f"{name}_ms"] / known[f"{name}_ms"] for name in ("p50", "p99", "mean")}
        yield phase, figures
    yield "filled without lookups", filled(lambda: None)


def _beside(place: Path) -> Path:
    """A directory with the same files, for another RocksDB."""
    other = place / "beside"
    other.mkdir()
    (other / "t").symlink_to(place / "t")
    return other
