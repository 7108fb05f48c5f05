"""Swaps of a 1 M x 32 model under an HTTP load: latency beside them, and what they leave behind.

A server process swaps a model again and again, back to back: between two version numbers, between two contents of the same
version (its files are replaced), or by rolling back and forth. 64 connections in two other processes send requests of 100 keys
at random moments, together 500 a second: an open loop, far below what the server can do (some 5,000 a second on two cores), so
that the load is the same beside a swap and without one. A request counts from the moment when it was due.

Every answer is compared bit for bit with those of both contents: it is wholly of one, or it is wrong. A request that was sent
after a swap had taken over and answered before the next one began to is of the content that was served then.

*Steady* is without a swap: before the first one, after swap 20 and after the last. *Load* is from the beginning of a swap to
the moment in which it takes over, *retirement* from there until nothing of the old version is left; a request belongs to every
phase that it overlaps. `median_s` is how long a phase takes; of `all`, the takeover itself. Memory is read after
`malloc_trim(0)`, since glibc keeps what was freed.

Axes: tiers (hash_map, with rocks_db, with an embedding cache) · change · rows · dim · swaps.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from benchmarks.harness import Report
from benchmarks.served import document, model
from benchmarks.swap_clients import FAILED, WRONG, Load, paced_load
from benchmarks.swap_server import MODEL
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from tests.servers.redis_server import free_ports

_DIM, _KEYS, _CONTENTS = 32, 100, (1, 2)
_CLIENTS, _CONNECTIONS, _BODIES = 2, 64, 64
_EARLY = 20  # the swap whose latency and resources the last one's are compared with
TIERS: dict[str, dict[str, Any]] = {
    "hash_map": {"gpucache": False},
    "hash_map+rocks_db": {"gpucache": False},
    "cache+hash_map": {"gpucache": True},
    "cache+hash_map+rocks_db": {"gpucache": True},
}
CHANGES = ("versions", "files", "rollback")


def run(report: Report, quick: bool) -> None:
    """Swap versions on all kinds of tiers, and one of them in the other ways, too."""
    sizes = {"rows": 10_000, "swaps": 22, "steady_s": 1.0} if quick else {"rows": 1_000_000, "swaps": 200, "steady_s": 10.0}
    for tiers, change in [
        *((tiers, CHANGES[0]) for tiers in TIERS),
        ("cache+hash_map", CHANGES[1]),
        ("cache+hash_map", CHANGES[2]),
    ]:
        measure(report, tiers, change, **sizes)


def measure(
    report: Report,
    tiers: str,
    change: str,
    *,
    rows: int,
    swaps: int,
    steady_s: float,
    rate: float = 500.0,
    device: str = "auto",
    limit_s: float = 570.0,
) -> None:
    """Swap a model under load, and add a row.

    Args:
        steady_s: length of each of the three steady stretches.
        limit_s: after so long no further swap begins.
    """
    with tempfile.TemporaryDirectory(prefix="hps-bench-swaps-") as name:
        directory = Path(name)
        for content in _CONTENTS:
            write_sparse_model(directory / str(content) / "item.model", sample_chunks(rows, _DIM, content))
        (path := directory / "ps.json").write_text(json.dumps(_configuration(directory, tiers, change, device)))
        _serve_content(directory, 1)
        with _server(path) as (port, command):
            with _clients(port, rows, rate, report.seed) as results:
                told: list[dict[str, float]] = []
                steady, resources = [_stretch(steady_s)], {}
                started, number = time.monotonic(), 0
                while number < swaps and time.monotonic() - started < limit_s - 3 * steady_s:
                    number += 1
                    content = 2 - number % 2  # version 2 serves at the start
                    if change == "files":
                        _serve_content(directory, content)
                    to = {"do": "deploy", "version": str(content if change == "versions" else 1)}
                    if change == "rollback":
                        to = {"do": "rollback"} if number > 1 else {"do": "deploy", "version": "1"}
                    told.append({**command(**to), "content": content})
                    if number in (_EARLY, swaps):
                        steady.append(_stretch(steady_s))
                        resources[number] = command(do="measure")
                if number not in resources:
                    steady.append(_stretch(steady_s))
                    resources[number] = command(do="measure")
            report.about |= {"dim": _DIM, "batch": _KEYS, "connections": _CONNECTIONS, "requests_per_s": rate}
            axes = {"tiers": tiers, "change": change, "rows": rows, "swaps": number}
            _add_rows(report, axes, results(), told, steady, resources)


def _configuration(directory: Path, tiers: str, change: str, device: str) -> dict[str, Any]:
    entry = model(
        [directory / "served" / "item.model"],
        [_DIM],
        MODEL,
        versions=[{"version": "2", "sparse_files": [str(directory / "2" / "item.model")]}],
        keep_versions=int(change == "rollback"),  # what is kept is not loaded again
        max_batch_size=_KEYS,
        gpucacheper=0.5,
        cache_refresh_percentage_per_iteration=0.1,
        **TIERS[tiers],
    )
    rocks = {"persistent_db": {"type": "rocks_db", "path": str(directory / "rocksdb")}} if "rocks_db" in tiers else {}
    return document(entry, device=device, **rocks)


def _serve_content(directory: Path, content: int) -> None:
    """Put other files in the place of those of version 1, in one step."""
    (link := directory / "next").symlink_to(directory / str(content))
    link.rename(directory / "served")


def _stretch(seconds: float) -> tuple[float, float]:
    start = time.perf_counter()
    time.sleep(seconds)
    return start, time.perf_counter()


@contextmanager
def _server(path: Path) -> Iterator[tuple[int, Any]]:
    (port,) = free_ports(1)
    log = (path.parent / "server.log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.swap_server", str(port), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )

    def heard() -> dict[str, Any]:
        line = process.stdout.readline() if process.stdout else ""
        answer: dict[str, Any] = json.loads(line or '{"error": "the server ended"}')
        if answer.get("error", "None") != "None":
            log.seek(0)
            raise RuntimeError(f"{answer['error']}\n{log.read()[-3000:]}")
        return answer

    def command(**what: str) -> dict[str, Any]:
        if process.stdin:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        return heard()

    try:
        heard()
        yield port, command
    finally:
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            log.close()


@contextmanager
def _clients(port: int, rows: int, rate: float, seed: int) -> Iterator[Any]:
    """Load the server until the block ends; the function that it yields then returns what the clients saw."""
    context = get_context("spawn")
    stop, pipes, processes = context.Event(), [], []
    try:
        for number in range(_CLIENTS):
            keys = np.random.default_rng(seed + number).integers(0, rows, (_BODIES, _KEYS))
            requests = [_request(part) for part in keys]
            answers = [[sample_vectors(part, _DIM, content).tobytes() for content in _CONTENTS] for part in keys]
            load = Load(port, requests, answers, _CONNECTIONS // _CLIENTS, rate / _CLIENTS, seed + number)
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(target=paced_load, args=(load, stop, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)

        def results() -> npt.NDArray[np.float64]:
            outcomes = [pipe.recv() for pipe in pipes if pipe.poll(60)]
            if errors := [error for _, texts in outcomes for error in texts]:
                print("\n".join(errors), file=sys.stderr)
            return np.concatenate([array for array, _ in outcomes])

        time.sleep(3.0)  # until they have started
        yield results
        stop.set()
    finally:
        if not stop.is_set():
            for process in processes:
                process.kill()


def _request(keys: npt.NDArray[np.int64]) -> bytes:
    header = orjson.dumps(
        {
            "inputs": [
                {"name": "KEYS", "shape": [1, _KEYS], "datatype": "INT64", "parameters": {"binary_data_size": 8 * _KEYS}},
                {"name": "NUMKEYS", "shape": [1, 1], "datatype": "INT32", "parameters": {"binary_data_size": 4}},
            ],
            "parameters": {"binary_data_output": True},
        }
    )
    body = header + keys.tobytes() + np.array([_KEYS], np.int32).tobytes()
    head = (
        f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(header)}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _add_rows(
    report: Report,
    axes: dict[str, Any],
    seen: npt.NDArray[np.float64],  # (n, 4), as of `paced_load`
    told: Sequence[dict[str, float]],
    steady: Sequence[tuple[float, float]],
    resources: dict[int, dict[str, float]],
) -> None:
    """Add a row of what was answered, one of the latency in each phase, and one of each resource, early and at last."""
    due, sent, done, content = seen.T
    stale = 0
    for one, following in zip(told, [*told[1:], {"takes_over": np.inf}], strict=True):
        within = (sent > one["took_over"]) & (done < following["takes_over"])
        stale += int(np.count_nonzero(content[within] != one["content"] - 1))
    failed, wrong = (int(np.count_nonzero(content == outcome)) for outcome in (FAILED, WRONG))
    outcome = {"requests": due.size, "failed": failed, "wrong": wrong, "of_another_version": stale}
    takeover_s = float(np.median([one["took_over"] - one["takes_over"] for one in told]))
    report.add({**axes, "what": "all"}, {**outcome, "median_s": takeover_s})
    phases = {
        "load": [(one["began"], one["takes_over"]) for one in told],
        "retirement": [(one["takes_over"], one["retired"]) for one in told],
        "swap": [(one["began"], one["retired"]) for one in told],
        "steady": steady,
        **{f"steady after {number}": [span] for number, span in zip((0, *resources), steady, strict=True)},
    }
    for phase, spans in phases.items():
        chosen = np.zeros(due.size, np.bool_)
        for start, end in spans:
            chosen |= (due < end) & (done > start)
        figures: dict[str, Any] = {"requests": int(np.count_nonzero(chosen))}
        for name, quantile in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999)):
            figures[name] = 1e3 * float(np.quantile((done - due)[chosen], quantile))
        report.add({**axes, "what": phase}, {**figures, "median_s": float(np.median([end - start for start, end in spans]))})
    early, last = (resources[number] for number in (min(resources), max(resources)))
    for name, value in last.items():
        growth = value / early[name] if early[name] else 1.0
        report.add({**axes, "what": name}, {f"after_{min(resources)}": early[name], "at_last": value, "growth": growth})
