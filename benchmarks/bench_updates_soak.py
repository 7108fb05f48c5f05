"""A replica that follows a log for long: 100,000 rows of 32 floats a second, and the memory, descriptors and threads it takes.

The service looks 256 keys up 250 times a second meanwhile, for a client that checks every answer. Every few seconds memory,
descriptors, threads, files and the lag are sampled. *early* is the second tenth of the time, *late* the last one, each as the
median of its samples (of the lag the 99th percentile, too); *growth* is late to early. Messages of the stream are trimmed
behind the replica. Those of a topic of Tansu, the broker of the tests, do not expire, and from some 50,000 on it answers too
late: a soak with Kafka is therefore short.

`python -m benchmarks.bench_updates_soak --minutes 20` says for how long.
"""

import argparse
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_updates import MESSAGE_ROWS, PATIENCE_S, ROWS_PER_S, TOPIC, processes, publish, scene
from benchmarks.bench_writes import read, server
from benchmarks.harness import RESULTS, Report

_ROWS, _SAMPLE_S, _SLICE_S = 100_000, 2.0, 20.0
_MINUTES = {"kafka": 2.0, "redis_stream": 20.0}


def run(report: Report, quick: bool) -> None:
    """Soak with each log."""
    for kind, minutes in _MINUTES.items():
        soak(report, kind, 0.5 if quick else minutes)


def soak(report: Report, kind: str, minutes: float) -> None:
    """Let a replica follow a log for some minutes, and add a row of each thing that should not grow."""
    settings = {"compression.type": "lz4"} if kind == "kafka" else {}
    with scene(kind, _ROWS, for_publishers=settings) as (source, document), processes(2) as pool:
        directory = Path(document["models"][0]["sparse_files"][0]).parent
        with server("service", directory) as (port, process):
            publishing = pool.submit(publish, source, TOPIC, 60 * minutes, _ROWS, 0)
            samples: list[dict[str, float]] = []
            lookups: list[float] = []
            reading = None
            while not publishing.done():
                if reading is None or reading.done():
                    lookups += reading.result()["times"] if reading else []
                    reading = pool.submit(read, directory, port, _SLICE_S, report.seed + len(samples))
                samples.append(_sample(port, process, directory))
                time.sleep(_SAMPLE_S)
            messages = len(publishing.result())
            lookups += reading.result(PATIENCE_S)["times"] if reading else []
            deadline = time.monotonic() + PATIENCE_S
            while (status := _updates(port))["behind"] != 0:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{status}")
                time.sleep(0.1)
    if status["rows"] != messages * MESSAGE_ROWS or status["dead_letters"] or status["problem"]:
        raise AssertionError(f"{status} after {messages} messages of {MESSAGE_ROWS} rows")
    axes = {"work": "soak", "log": kind, "minutes": minutes, "rows_per_s": ROWS_PER_S}
    figures = {"rows": status["rows"], "lookups": len(lookups), "stale_rows": status["stale_rows"]}
    report.add({**axes, "what": "all"}, {**figures, "lookup_p99_ms": 1e3 * float(np.quantile(lookups, 0.99))})
    tenth = max(1, len(samples) // 10)
    for what in samples[0]:
        early, late = ([one[what] for one in part] for part in (samples[tenth : 2 * tenth], samples[-tenth:]))
        row = {"early": float(np.median(early)), "late": float(np.median(late)), "most": max(one[what] for one in samples)}
        row |= {"early_p99": float(np.quantile(early, 0.99)), "late_p99": float(np.quantile(late, 0.99))}
        row |= {"growth": row["late"] / row["early"]} if row["early"] else {}
        report.add({**axes, "what": what}, row)


def _sample(port: int, process: int, directory: Path) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    files = [path.stat().st_size for path in (directory / "rocksdb").rglob("*") if path.is_file()]
    updates = _updates(port)
    return {
        "memory_mb": int(status["VmRSS"].split()[0]) / 1e3,
        "descriptors": sum(1 for _ in Path(f"/proc/{process}/fd").iterdir()),
        "threads": int(status["Threads"]),
        "rocksdb_mb": sum(files) / 1e6,
        "lag_s": updates["lag_s"] or 0.0,
        "behind_messages": updates["behind"] or 0,
    }


def _updates(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/updates", timeout=30) as answer:
        (table,) = json.loads(answer.read())["tables"]
    return dict(table)


def main() -> None:
    """Soak for as long as one likes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_updates_soak", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--log", choices=_MINUTES, nargs="+", default=["redis_stream"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    report = Report("updates_soak")
    for kind in chosen.log:
        soak(report, kind, chosen.minutes)
    report.show()
    print(report.write(chosen.out))


if __name__ == "__main__":
    main()
