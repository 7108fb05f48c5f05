"""How far the loading of each model and table is: one state, which readiness, log, terminal and metrics tell."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hps.configuration.load import ModelConfig
from hps.progress import FailureProgress, Progress, TableProgress, time_text

ModelState = Literal["waiting", "loading", "ready", "failed"]
TableState = Literal["waiting", "loading", "done", "failed"]


@dataclass(frozen=True, slots=True)
class TableStatus:
    """How far a table is. Immutable. Without `load`, nothing of it had to be read, or it was not its turn yet."""

    name: str
    state: TableState
    load: TableProgress | None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """How far a model is. Immutable.

    Attributes:
        percent: of its tables, each counting the same; 100 once it is ready.
        reason: what it waits for, how far it is, or why it failed; empty when it is ready.
        retry_in_s: when a failed one is tried again; None: it is not.
    """

    name: str
    state: ModelState
    percent: int
    reason: str
    retry_in_s: float | None
    tables: tuple[TableStatus, ...]


@dataclass(slots=True)
class _Table:
    name: str
    state: TableState = "waiting"
    load: TableProgress | None = None


@dataclass(slots=True)
class _Model:
    tables: dict[str, _Table]  # by tag
    state: ModelState = "waiting"
    cause: str = ""
    retry_at: float | None = None
    failures: int = 0
    started: float = 0.0
    seconds: float = 0.0


class LoadProgress(Collector):
    """The state of every configured model and its tables. *Thread-safe*; models are loaded one after the other, by one thread.

    A `Progress`: told of tables by the loading, of models by `Lifecycle`. A model that others deploy is ready as well, and one
    that they undeploy is not mentioned any more.

    Args:
        models: those to be loaded.
        deployed: names of the models in service now.
        listener: told what this is told about tables.
        clock: seconds from any start.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        deployed: Callable[[], Collection[str]],
        listener: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {one.model: _Model({spec.tag: _Table(spec.table_name) for spec in one.tables}) for one in models}
        self._model_of = {tag: name for name, model in self._models.items() for tag in model.tables}
        self._deployed = deployed
        self._listener = listener
        self._clock = clock
        self._lock = threading.Lock()

    # -- told by the loading of tables --------------------------------------------------------------------------------

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """A table is about to be read; those of its model before it are done, whether there was something to read or not."""
        self._listener.start(tag, rows, size_bytes)
        with self._lock:
            tables = self._models[self._model_of[tag]].tables
            for other, table in tables.items():
                if other == tag:
                    table.state, table.load = "loading", TableProgress(rows, size_bytes, self._clock)
                    break
                table.state = "done"

    def advance(self, tag: str, rows: int) -> None:
        """More rows are in the databases."""
        self._listener.advance(tag, rows)
        if (load := self._models[self._model_of[tag]].tables[tag].load) is not None:
            load.advance(rows)

    def finish(self, tag: str) -> None:
        """All rows of a table are in the databases."""
        self._listener.finish(tag)
        with self._lock:
            table = self._models[self._model_of[tag]].tables[tag]
            table.state = "done"
            if table.load is not None:
                table.load.end()

    # -- told by who deploys models -----------------------------------------------------------------------------------

    def model_started(self, name: str) -> None:
        """A model is about to be loaded, maybe again."""
        with self._lock:
            model = self._models[name]
            model.state, model.retry_at, model.started = "loading", None, self._clock()
            for table in model.tables.values():
                table.state, table.load = "waiting", None

    def model_ready(self, name: str) -> float:
        """A model is in service; returns the seconds that it took."""
        with self._lock:
            model = self._models[name]
            model.state, model.seconds = "ready", self._clock() - model.started
            for table in model.tables.values():
                table.state = "done"
            return model.seconds

    def model_failed(self, name: str, cause: str, retry_in_s: float | None = None) -> None:
        """A model could not be loaded."""
        unfinished = None
        with self._lock:
            model, now = self._models[name], self._clock()
            model.state, model.cause, model.seconds = "failed", cause, now - model.started
            model.failures += 1
            model.retry_at = None if retry_in_s is None else now + retry_in_s
            for tag, table in model.tables.items():
                if table.state == "loading":
                    unfinished, table.state = tag, "failed"
                    if table.load is not None:
                        table.load.end()
        if unfinished is not None and isinstance(self._listener, FailureProgress):
            self._listener.fail(unfinished)

    # -- asked by who tells it ----------------------------------------------------------------------------------------

    def models(self) -> list[ModelStatus]:
        """The state of every model."""
        deployed = self._deployed()
        with self._lock:
            known = [self._status(name, model, name in deployed) for name, model in self._models.items()]
        others = [ModelStatus(name, "ready", 100, "", None, ()) for name in deployed if name not in self._models]
        return [status for status in known if status is not None] + others

    def reason(self, name: str) -> str:
        """Why a model is not ready; empty when it is, or when nobody wants it to be."""
        deployed = name in self._deployed()
        with self._lock:
            status = self._status(name, self._models[name], deployed) if name in self._models else None
        if status is None:
            return ""
        return f"loading failed: {status.reason}" if status.state == "failed" else status.reason

    def summary(self) -> str:
        """Why not all models are ready; empty when they are."""
        models = self.models()
        loading = [status.reason for status in models if status.state == "loading"]
        if not loading and any(status.state == "waiting" for status in models):
            loading = ["loading"]
        failed = [status for status in models if status.state == "failed"]
        if loading:
            tables = [table for status in models for table in status.tables]
            done = sum(table.state == "done" for table in tables)
            loading.append(f"{done} of {len(tables)} tables")
        if failed:
            causes = "; ".join(f"{status.name}: {status.reason}" for status in failed)
            loading.append(f"{len(failed)} of {len(models)} models failed: {causes}")
        return "; ".join(loading)

    def collect(self) -> Iterable[Metric]:
        """Yield all of it in Prometheus' form."""
        labels = ["model", "table"]
        rows = GaugeMetricFamily("hps_load_rows", "Rows that the last load of a table has to read.", labels=labels)
        rows_done = GaugeMetricFamily("hps_loaded_rows", "Rows of it that are in the databases.", labels=labels)
        size = GaugeMetricFamily("hps_load_bytes", "Bytes that the last load of a table has to read.", labels=labels)
        size_done = GaugeMetricFamily("hps_loaded_bytes", "Bytes of it that are in the databases.", labels=labels)
        ready = GaugeMetricFamily("hps_model_ready", "1 while a model is in service.", labels=["model"])
        seconds = GaugeMetricFamily("hps_load_seconds", "Time of the last load of a model, so far.", labels=["model"])
        failures = CounterMetricFamily("hps_load_failures", "Loads of a model that failed.", labels=["model"])
        for status in self.models():
            ready.add_metric([status.name], status.state == "ready")
            for table in status.tables:
                if (load := table.load) is not None:
                    where = [status.name, table.name]
                    rows.add_metric(where, load.rows)
                    rows_done.add_metric(where, load.rows_done)
                    size.add_metric(where, load.size_bytes)
                    size_done.add_metric(where, load.bytes_done)
        with self._lock:
            for name, model in self._models.items():
                running = model.state == "loading"
                seconds.add_metric([name], self._clock() - model.started if running else model.seconds)
                failures.add_metric([name], model.failures)
        yield from (ready, rows, rows_done, size, size_done, seconds, failures)

    def _status(self, name: str, model: _Model, deployed: bool) -> ModelStatus | None:
        tables = tuple(TableStatus(table.name, table.state, table.load) for table in model.tables.values())
        if deployed:
            model.state = "ready"  # whoever deployed it; when it is undeployed, it is not one that failed
            return ModelStatus(name, "ready", 100, "", None, tables)
        if model.state == "ready":  # it was, and was undeployed
            return None
        shares = [100 if one.state == "done" else one.load.percent if one.load else 0 for one in tables]
        retry_in_s = None if model.retry_at is None else max(0.0, model.retry_at - self._clock())
        reason = _reason(name, model, tables, retry_in_s)
        return ModelStatus(name, model.state, sum(shares) // max(len(shares), 1), reason, retry_in_s, tables)


def _reason(name: str, model: _Model, tables: Sequence[TableStatus], retry_in_s: float | None) -> str:
    if model.state == "failed":
        again = "" if retry_in_s is None else f"; tried again in {time_text(retry_in_s)}"
        return model.cause + again
    if model.state == "waiting":
        return "waiting for the models before it"
    for table in tables:
        if table.state == "loading" and table.load is not None:
            return f"loading {name}.{table.name}: {table.load}"
    return f"loading {name}"
