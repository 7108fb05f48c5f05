"""Drives workers by MLCommons LoadGen, as MLPerf's inference benchmarks do.

It needs `pip install mlcommons-loadgen`. Source: https://github.com/mlcommons/inference/tree/master/loadgen.
"""

import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

_END_S = 10.0
Answer = Callable[[Sequence[int], Callable[[], None]], None]
"""Answers queries of the library; calls its second argument when the answers are complete, and may check them after that."""


def missing() -> str:
    """Return why LoadGen cannot be used, empty if it can."""
    try:
        import mlperf_loadgen  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def drive(
    scenario: str,
    workers: Sequence[Callable[[], AbstractContextManager[Answer]]],
    library: int,
    *,
    rate: float,
    seconds: float,
    bound_s: float,
    most: int = 1,
) -> dict[str, Any]:
    """Run a scenario, and return what LoadGen's summary says of it.

    Args:
        scenario: `server`: queries arrive as a Poisson process, and 99 % have to be answered within the bound; or `offline`:
            all are there at once.
        workers: each is entered by a thread of its own.
        library: number of different queries.
        rate: queries per second that are offered; `offline`, that are expected.
        most: queries that a worker takes at once, if so many have arrived.
    """
    import mlperf_loadgen as loadgen

    settings = loadgen.TestSettings()
    settings.scenario = loadgen.TestScenario.Server if scenario == "server" else loadgen.TestScenario.Offline
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = int(1000 * seconds)
    settings.min_query_count = 1
    if scenario == "server":
        settings.server_target_qps = rate
        settings.server_target_latency_ns = int(1e9 * bound_s)
        settings.server_target_latency_percentile = 0.99
    else:
        settings.offline_expected_qps = rate
    issued: queue.SimpleQueue[Any] = queue.SimpleQueue()  # LoadGen's thread must not wait
    errors: list[BaseException] = []

    def complete(taken: Sequence[tuple[int, int]]) -> None:
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(identity, 0, 0) for identity, _index in taken])

    def work(worker: Callable[[], AbstractContextManager[Answer]]) -> None:
        with worker() as answer:
            ended = False
            while not ended and (first := issued.get()) is not None:
                taken = [first]
                while len(taken) < most and not ended and not issued.empty():
                    try:
                        following = issued.get_nowait()
                    except queue.Empty:
                        break
                    ended = following is None
                    taken += [] if ended else [following]
                done = partial(complete, taken)
                try:
                    answer([index for _identity, index in taken], done)
                except Exception as error:  # noqa: BLE001 - raised below
                    errors.append(error)
                    done()  # else LoadGen waits for ever

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    with tempfile.TemporaryDirectory(prefix="hps-loadgen-") as logs:
        output = loadgen.LogOutputSettings()
        output.outdir = logs
        log = loadgen.LogSettings()
        log.log_output = output
        tested = loadgen.ConstructSUT(
            lambda samples: [issued.put((sample.id, sample.index)) for sample in samples], lambda: None
        )
        samples = loadgen.ConstructQSL(library, library, lambda _indices: None, lambda _indices: None)
        try:
            loadgen.StartTestWithLogSettings(tested, samples, settings, log)
        finally:
            loadgen.DestroyQSL(samples)
            loadgen.DestroySUT(tested)
            for _ in threads:
                issued.put(None)
            for thread in threads:
                thread.join(_END_S)
        summary = (Path(logs) / "mlperf_log_summary.txt").read_text()
    if errors:
        raise errors[0]
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in summary.splitlines()) if value}
    p99_ns = found.get("99.00 percentile latency (ns)")
    return {
        "result": found["Result is"],
        "queries_per_s": float(found.get("Completed samples per second") or found["Samples per second"]),
        "p99_ms": None if p99_ns is None else int(p99_ns) / 1e6,
    }
