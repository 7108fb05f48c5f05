"""What it costs to count and to time lookups: resident keys on the NumPy cache, in process.

One row for each size of a lookup: as it is (`p50_us`), with a trace on, and by a session that neither counts nor times
anything, which no configuration gives. With HPS_BENCH_BEFORE, another checkout with a `.venv` of its own, also by that one:
`ratio` is its time through ours, so 0.97 is 3 % slower than before. All take turns in rounds of some milliseconds, and of each
the best round counts, since whatever disturbs a measurement slows it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hps
from hps.tensors.segments import Segment

if TYPE_CHECKING:
    from benchmarks.harness import Report

HERE = Path(__file__).parents[1]
ROWS, DIM, TABLES = 20_000, 32, 26
CASES = {"1": (1, 1), "64": (1, 64), "1000": (1, 1000), "26x1": (TABLES, 1), "26x1000": (TABLES, 1000)}  # tables, keys of each


def run(report: "Report", quick: bool) -> None:
    """Run the benchmark."""
    rounds, calls = (4, 20) if quick else (60, 2000)
    before = os.environ.get("HPS_BENCH_BEFORE")
    with ExitStack() as stack:
        ours = stack.enter_context(_child(HERE))
        variants = {name: (ours, name) for name in ("counted", "uncounted", "traced")}
        if before:
            variants["before"] = stack.enter_context(_child(Path(before))), "counted"
        for case, (tables, keys) in CASES.items():
            best = dict.fromkeys(variants, np.inf)
            for number in range(rounds):
                for name in list(variants)[:: 1 if number % 2 else -1]:
                    ask, variant = variants[name]
                    best[name] = min(best[name], ask(case, variant, max(20, calls // (tables * (1 + keys // 100)))))
            now = best["counted"]
            figures = {
                "p50_us": now,
                "uncounted_us": best["uncounted"],
                "counting_us": now - best["uncounted"],
                "trace_us": best["traced"] - now,
            }
            if before:
                figures |= {"before_us": best["before"], "ratio": best["before"] / now}
            report.add({"tables": tables, "keys": keys, "dim": DIM}, figures)


@contextmanager
def _child(checkout: Path) -> Iterator[Callable[[str, str, int], float]]:
    """A process with the package of a checkout; what asks it for a round: returns the median time of a call in us."""
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else sys.executable), __file__]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("a pipe is missing")

        def ask(*what: Any) -> float:
            stdin.write(json.dumps(what) + "\n")
            stdin.flush()
            return float(stdout.readline())

        try:
            yield ask
        finally:
            stdin.close()
            process.wait(60)


def _serve_rounds() -> None:
    """Answer rounds that are asked for on the standard input."""
    with tempfile.TemporaryDirectory() as directory, hps.HPS(_configuration(Path(directory))) as server:
        [cache] = server.model("bench").caches
        session = server.model("bench").session(0)
        rng = np.random.default_rng(1)
        resident = [cache.dump(index) for index in range(TABLES)]
        chosen = {case: [rng.choice(keys, n, replace=False) for keys in resident[:t]] for case, (t, n) in CASES.items()}

        def lookup(case: str) -> Callable[[], Any]:
            keys = chosen[case]
            if len(keys) == 1:
                return lambda: server.lookup(keys[0], "bench", 0)
            by_table = dict(enumerate(keys))
            return lambda: server.lookup_tables(by_table, "bench")

        for case, keys in chosen.items():
            answer = lookup(case)()
            rows = [answer] if len(keys) == 1 else list(answer.values())
            if not all(np.array_equal(got[:, 0], wanted.astype(np.float32)) for got, wanted in zip(rows, keys, strict=True)):
                raise RuntimeError("the cache gave a wrong answer; no figure is recorded")
        as_it_is = type(session).lookup
        for line in sys.stdin:
            case, variant, calls = json.loads(line)
            call = lookup(case)
            if variant == "uncounted":
                type(session).lookup = _lookup_uncounted  # type: ignore[method-assign]
            elif variant == "traced":
                call = _traced(call)
            times = np.empty(calls)
            for number in range(calls):
                began = time.perf_counter_ns()
                call()
                times[number] = time.perf_counter_ns() - began
            type(session).lookup = as_it_is  # type: ignore[method-assign]
            print(np.median(times) / 1e3, flush=True)


def _traced(call: Callable[[], Any]) -> Callable[[], Any]:
    from hps.tracing import traced  # a checkout from before may have none

    def traced_call() -> Any:
        with traced():
            return call()

    return traced_call


def _lookup_uncounted(session: Any, segments: list[Segment], _began_ns: int = 0) -> None:
    """What `CachedSession.lookup` does for resident keys, without counts and times."""
    for segment in segments:
        if segment.n > session._max_keys[segment.table]:
            raise RuntimeError("too many keys")
    lookup = session._lookups.take()
    try:
        lookup.query(segments)
        lookup.finish()
    finally:
        session._lookups.give_back(lookup)


def _configuration(directory: Path) -> dict[str, Any]:
    keys = np.arange(ROWS)
    hps.write_sparse_model(directory / "t", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    model = {
        "model": "bench",
        "sparse_files": [str(directory / "t")] * TABLES,
        "embedding_table_names": [f"t{index}" for index in range(TABLES)],
        "embedding_vecsize_per_table": [DIM] * TABLES,
        "maxnum_catfeature_query_per_table_per_sample": [1] * TABLES,
        "default_value_for_each_table": [0.0] * TABLES,
        "deployed_device_list": [0],
        "max_batch_size": 10_000,
        "gpucacheper": 1.0,
        "cache_refresh_percentage_per_iteration": 1.0,
        "hit_rate_threshold": 1.1,
    }
    return {"supportlonglong": True, "device": "cpu", "volatile_db": {"type": "hash_map"}, "models": [model]}


if __name__ == "__main__":
    _serve_rounds()
