"""Threads that look keys up in an `HPS` of this process, tracing one lookup in eight for its stages."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from hps.errors import HPSError, InvalidInputError, MissingDependencyError, UnknownModelError
from hps.ground.registry import install_hint
from hps.ground.threads.workers import call_in_thread
from hps.models.deltas import DeltaModel, open_table_files
from hps.models.sources import ModelSources
from hps.parameter_server import HPS
from hps.statistics.tracing import STAGES, traced
from hps.tensors.bags import Bags
from hps.tools.profiling import http_load
from hps.tools.profiling.counters import LOOKUP, Counters, StageTimes
from hps.tools.profiling.http_load import LoadResult
from hps.tools.profiling.keys import MOST_ROWS, KeyPool
from hps.tools.profiling.profile import Row, compare
from hps.tools.profiling.times import TimeHistogram
from hps.types import KeyArray

TRACED_OF = 8
_START_S = 60.0  # until all threads of a run have started
_OUTSIDE = "outside"


_Stages: TypeAlias = dict[str, TimeHistogram]


class InProcess:
    """Profiles one model of an `HPS`. *One thread.*

    Args:
        model: empty: the only one.
        tables: tables to look up; empty: all.
        hotness: keys per bag; 0: every key gets a vector.
        device_id: device whose embedding cache is asked; None: the least busy one.
        on_device: keys and vectors are in GPU memory.

    Raises:
        UnknownModelError, UnknownTableError: no such model or table, or several models and none was named.
        MissingDependencyError: CuPy is missing.
    """

    def __init__(
        self,
        server: HPS,
        model: str = "",
        tables: Sequence[str] = (),
        hotness: int = 0,
        device_id: int | None = None,
        on_device: bool = False,
    ) -> None:
        if not model and len(server.models) != 1:
            raise UnknownModelError(f"profiling: the configuration has the models {server.models}; --model chooses one")
        self._server, self.model = server, model or server.models[0]
        self._deployment = server.model(self.model)
        self.tables = list(tables) or [table.table_name for table in self._deployment.tables]
        self._specs = {name: self._deployment.tables[self._deployment.table_index(name)] for name in self.tables}
        self._device_id, self._hotness = device_id, hotness
        self._cupy = _cupy() if on_device else None

    @property
    def most_keys(self) -> int:
        """Maximum number of keys of each table in a lookup."""
        return min(spec.max_keys for spec in self._specs.values())

    def known_keys(self) -> dict[str, tuple[int, KeyArray | None]]:
        """Return the number of keys in each table's model files, and the keys: (rows,) int64; None if it is a delta version.

        Raises:
            ModelFileError: the files cannot be read.
        """
        version = self._server.catalog.version(self.model, self._deployment.version)
        sources, keys = ModelSources(self._server.config.model_source), {}
        for name, spec in self._specs.items():
            index = self._deployment.table_index(name)
            source, ids = version.sources[index], None
            rows = self._deployment.rows[index]
            files = open_table_files(source, spec.dim, sources=sources) if rows <= MOST_ROWS else None
            if files is not None and not isinstance(files, DeltaModel):
                ids = np.empty(files.rows, np.int64)
                for start, chunk in files.keys.key_chunks():
                    ids[start : start + chunk.size] = chunk
                if (share := self._deployment.tables[index].share) is not None:
                    ids = ids[share.owns(ids)]
                rows = ids.size
            keys[name] = (rows, ids)
        return keys

    def measure(
        self, keys: dict[str, KeyArray], batch: int, concurrency: int, seconds: float, rate: float | None, warm_up_s: float
    ) -> Row:
        """Look keys up on several threads for a while.

        Args:
            keys: (n,) int64 by table.
            batch: keys of each table per lookup.

        Raises:
            InvalidInputError: a lookup has more keys than the model is configured for.
        """
        pool = KeyPool(keys, batch)
        self._call(pool.take(0))()  # raise for wrong input here, instead of counting every lookup as a failure
        numbers = count()
        if warm_up_s:
            self._run(pool, concurrency, warm_up_s, rate, numbers)
        before = self._counters()
        results, timed = zip(*self._run(pool, concurrency, seconds, rate, numbers), strict=True)
        after = self._counters()
        stages = {stage: TimeHistogram().merge([of_thread[stage] for of_thread in timed]) for stage in timed[0]}
        return Row.of(
            LoadResult().merge(results),
            batch=batch,
            tables=len(self.tables),
            concurrency=concurrency,
            rate=rate,
            stages={stage: _stage(times, stages[LOOKUP]) for stage, times in stages.items() if len(times)},
            tiers=after.tiers_since(before),
            default_keys=after.defaults_since(before),
        )

    def check(self, keys: dict[str, KeyArray], batch: int) -> None:
        """Compare vectors of the same keys, as `compare`."""
        compare(lambda keys_: self._server.lookup_tables(keys_, self.model, self._device_id), KeyPool(keys, batch), 0)

    def _counters(self) -> Counters:
        return Counters({"server": asdict(self._server.stats())}, self.model, self.tables)

    def _call(self, keys: dict[str, Any]) -> Callable[[], object]:
        server, model, device_id = self._server, self.model, self._device_id
        if self._cupy is not None:
            return self._call_on_device(self._cupy, keys)
        if self._hotness:
            bags = {table: Bags(keys.reshape(-1, self._hotness)) for table, keys in keys.items()}
            return lambda: server.lookup_pooled(bags, model, device_id)
        return lambda: server.lookup_tables(keys, model, device_id)

    def _call_on_device(self, cupy: Any, host_keys: dict[str, KeyArray]) -> Callable[[], object]:
        """Prepare a lookup with keys and vectors on the GPU; it ends when the vectors are there."""
        server, model, hotness, device = self._server, self.model, self._hotness, cupy.cuda.Device(self._device_id or 0)
        with device:
            keys = {table: cupy.asarray(part) for table, part in host_keys.items()}
            out = {table: cupy.empty((part.size, self._specs[table].dim), np.float32) for table, part in keys.items()}

        def call() -> None:
            with device:
                if hotness:
                    bags = {table: Bags(part.reshape(-1, hotness)) for table, part in keys.items()}
                    server.lookup_pooled(bags, model, self._device_id)
                else:
                    server.lookup_tables(keys, model, self._device_id, out=out)
                cupy.cuda.get_current_stream().synchronize()

        return call

    def _run(
        self, pool: KeyPool, concurrency: int, seconds: float, rate: float | None, numbers: "count[int]"
    ) -> list[tuple[LoadResult, _Stages]]:
        ready = threading.Barrier(concurrency + 1, timeout=_START_S)
        clock: list[int] = []  # when the schedule begins
        drive = partial(self._drive, pool, ready, clock, count(), numbers, seconds, rate)
        drives = [call_in_thread("profile", drive) for _ in range(concurrency)]
        clock.append(time.perf_counter_ns() + 1_000_000)
        ready.wait()
        return [thread.result() for thread in drives]

    def _drive(
        self,
        pool: KeyPool,
        ready: threading.Barrier,
        clock: list[int],
        schedule: "count[int]",  # lookups taken from the schedule
        numbers: "count[int]",
        seconds: float,
        rate: float | None,
    ) -> tuple[LoadResult, _Stages]:
        """Look keys up, one lookup after the other, until the end; runs on a thread."""
        result = LoadResult(seconds=seconds)
        stages = {stage: TimeHistogram() for stage in (LOOKUP, *STAGES, _OUTSIDE)}
        ready.wait()
        end = clock[0] + int(seconds * 1e9)
        last = end + int(http_load.DRAIN_S * 1e9)
        last_ns, own_ns = time.perf_counter_ns(), 0
        while (due := clock[0] + int(next(schedule) * 1e9 / rate) if rate else time.perf_counter_ns()) < end:
            number = next(numbers)
            call = self._call(pool.take(number))
            now = idle = time.perf_counter_ns()
            own_ns += idle - last_ns
            last_ns = idle
            if now > last:  # the server cannot hold the rate: the remaining lookups have waited this long
                result.failures["no answer"] += 1
                result.failed.add(now - due)
                result.times.add(now - due)
                continue
            while now < due:
                time.sleep((due - now) / 1e9)
                now = time.perf_counter_ns()
            start_ns = due if rate else now
            if rate:
                result.lateness.add(now - max(due, idle))
            try:
                if number % TRACED_OF:
                    call()
                    ended = time.perf_counter_ns()
                else:
                    ended = self._trace(call, stages)
            except InvalidInputError:
                raise
            except HPSError as error:
                result.failures[type(error).__name__] += 1
                last_ns = time.perf_counter_ns()
                result.failed.add(last_ns - start_ns)
                continue
            last_ns = ended
            result.times.add(ended - start_ns)
            result.in_time += ended <= end
        result.busy_s = own_ns / 1e9
        return result, stages

    @staticmethod
    def _trace(call: Callable[[], object], stages: _Stages) -> int:
        """Make a call and record the times of its stages. Returns its end time."""
        with traced() as trace:
            start_ns = time.perf_counter_ns()
            call()
            ended = time.perf_counter_ns()
        spent: dict[str, int] = {}
        for span in trace.spans:
            spent[span.stage] = spent.get(span.stage, 0) + span.ended_ns - span.began_ns
        for stage, ns in spent.items():
            stages[stage].add(ns)
        stages[LOOKUP].add(ended - start_ns)
        stages[_OUTSIDE].add(max(0, ended - start_ns - sum(spent.values())))
        return ended


def _stage(times: TimeHistogram, lookups: TimeHistogram) -> StageTimes:
    p50, p99 = times.quantiles_s((0.5, 0.99))
    mean = times.total_s / len(times)
    return StageTimes(len(times), times.total_s / lookups.total_s if lookups.total_s else 0.0, 1e6 * mean, 1e6 * p50, 1e6 * p99)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MissingDependencyError(f"keys on the device: CuPy is needed: {error}; {install_hint('cuda12')}") from error
    return cupy
