"""The loading state of each model and table: one record, which readiness, the log and the metrics report."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hps.configuration.load import ModelConfig
from hps.progress import FailureProgress, Progress, TableProgress, time_text
from hps.service.schemas import ModelState, ModelStatus, TableState, TableStatus
from hps.types import split_tag


@dataclass(slots=True)
class _TableEntry:
    name: str
    state: TableState = "waiting"
    tag: str = ""  # by which the loading knows it
    load: TableProgress | None = None  # None: nothing of it had to be read, or its turn has not come

    @property
    def percent(self) -> int:
        return 100 if self.state == "done" else self.load.percent if self.load else 0

    def status(self) -> TableStatus:
        return (
            TableStatus(name=self.name, state=self.state)
            if self.load is None
            else table_status(self.name, self.state, self.load)
        )


def table_status(name: str, state: TableState, load: TableProgress) -> TableStatus:
    """How far the load of a table is, as HTTP says it."""
    return TableStatus(
        name=name,
        state=state,
        rows=load.rows,
        rows_done=load.rows_done,
        size_bytes=load.size_bytes,
        bytes_done=load.bytes_done,
        rows_per_s=load.rows_per_s,
        seconds_left=load.seconds_left,
    )


@dataclass(slots=True)
class _ModelEntry:
    tables: dict[str, _TableEntry]  # by name
    state: ModelState = "waiting"
    cause: str = ""
    retry_at: float | None = None
    failures: int = 0
    started: float = 0.0
    seconds: float = 0.0


class ModelStates(Collector):
    """The state of every configured model and its tables. *Thread-safe*; one thread loads the models, one after the other.

    A `Progress`: the loading reports tables to it, `Lifecycle` reports models. A model that somebody else deploys is ready,
    too, and a model that somebody undeploys is no longer mentioned.

    Args:
        models: those to be loaded.
        deployed: returns the names of the models in service now.
        listener: gets the same reports about tables.
        proceed: called at each report about rows; what it raises ends the loading.
        clock: seconds from any start.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        deployed: Callable[[], Collection[str]],
        listener: Progress,
        proceed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {one.model: _entry(one) for one in models}
        self._deployed = deployed
        self._listener = listener
        self._proceed = proceed
        self._clock = clock
        self._lock = threading.Lock()

    # -- reports of the loading, about tables -------------------------------------------------------------------------

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """A table is about to be read. The tables of its model before it are done, whether or not they had to be read."""
        self._proceed()
        self._listener.start(tag, rows, size_bytes)
        with self._lock:
            tables, name = self._tables_of(tag)
            for other, table in tables.items():
                if other == name:
                    table.state, table.tag, table.load = "loading", tag, TableProgress(rows, size_bytes, self._clock)
                    break
                table.state = "done"

    def advance(self, tag: str, rows: int) -> None:
        """More rows are in the databases."""
        self._listener.advance(tag, rows)
        tables, name = self._tables_of(tag)
        if name in tables and (load := tables[name].load) is not None:
            load.advance(rows)
        self._proceed()

    def finish(self, tag: str) -> None:
        """All rows of a table are in the databases."""
        self._listener.finish(tag)
        with self._lock:
            tables, name = self._tables_of(tag)
            if (table := tables.get(name)) is not None:
                table.state = "done"
                if table.load is not None:
                    table.load.end()

    # -- reports of the lifecycle, about models -----------------------------------------------------------------------

    def add(self, model: ModelConfig) -> None:
        """Make a model known that is to be loaded, too."""
        with self._lock:
            self._models.setdefault(model.model, _entry(model))

    def forget(self, name: str) -> None:
        """A model is not to be loaded any more, or is to be made known anew."""
        with self._lock:
            self._models.pop(name, None)

    def given_up(self, name: str) -> None:
        """A model is not to be loaded any more; it may be being tried at this moment."""
        with self._lock:
            if name in self._models:
                self._models[name].state = "ready"  # as one that was undeployed

    def model_started(self, name: str) -> None:
        """A model is about to be loaded, for the first time or again."""
        with self._lock:
            model = self._models[name]
            model.state, model.retry_at, model.started = "loading", None, self._clock()
            for table in model.tables.values():
                table.state, table.load = "waiting", None

    def model_ready(self, name: str) -> float:
        """A model is in service. Returns the seconds that its loading took."""
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
            for table in model.tables.values():
                if table.state == "loading":
                    unfinished, table.state = table.tag, "failed"
                    if table.load is not None:
                        table.load.end()
        if unfinished is not None and isinstance(self._listener, FailureProgress):
            self._listener.fail(unfinished)

    def _tables_of(self, tag: str) -> tuple[dict[str, _TableEntry], str]:
        """The tables of the model that a tag belongs to, if it was to be loaded at the start, and the name of the tag's own."""
        model, _, table = split_tag(tag) or ("", "", tag)
        return (self._models[model].tables if model in self._models else {}), table

    # -- what is reported ---------------------------------------------------------------------------------------------

    def models(self) -> list[ModelStatus]:
        """The state of every model."""
        deployed = self._deployed()
        with self._lock:
            known = [self._status(name, model, name in deployed) for name, model in self._models.items()]
        others = [
            ModelStatus(name=name, state="ready", percent=100, tables=[]) for name in deployed if name not in self._models
        ]
        return [status for status in known if status is not None] + others

    def reason(self, name: str) -> str:
        """Why a model is not ready; empty when it is, or when it is not meant to be."""
        status = next((one for one in self.models() if one.name == name), None)
        if status is None or status.reason is None:
            return ""
        return f"loading failed: {status.reason}" if status.state == "failed" else status.reason

    def summary(self) -> str:
        """Why not all models are ready; empty when they are."""
        models = self.models()
        parts = [status.reason or "" for status in models if status.state == "loading"]
        if not parts and any(status.state == "waiting" for status in models):
            parts = ["loading"]
        if parts:
            tables = [table for status in models for table in status.tables]
            done = sum(table.state == "done" for table in tables)
            parts.append(f"{done} of {len(tables)} tables")
        if failed := [status for status in models if status.state == "failed"]:
            causes = "; ".join(f"{status.name}: {status.reason}" for status in failed)
            parts.append(f"{len(failed)} of {len(models)} models failed: {causes}")
        return "; ".join(parts)

    def collect(self) -> Iterable[Metric]:
        """Yield all of it in Prometheus' form."""
        labels = ["model", "table"]
        rows = GaugeMetricFamily("hps_load_rows", "Rows that the last load of a table had to read.", labels=labels)
        rows_done = GaugeMetricFamily("hps_loaded_rows", "Rows of it that are in the databases.", labels=labels)
        size = GaugeMetricFamily("hps_load_bytes", "Bytes that the last load of a table had to read.", labels=labels)
        size_done = GaugeMetricFamily("hps_loaded_bytes", "Bytes of it that are in the databases.", labels=labels)
        ready = GaugeMetricFamily("hps_model_ready", "1 while a model is in service.", labels=["model"])
        seconds = GaugeMetricFamily("hps_load_seconds", "Time of the last load of a model, so far.", labels=["model"])
        failures = CounterMetricFamily("hps_load_failures", "Loads of a model that failed.", labels=["model"])
        for status in self.models():
            ready.add_metric([status.name], status.state == "ready")
            for table in status.tables:
                where = [status.name, table.name]
                for family, value in (
                    (rows, table.rows),
                    (rows_done, table.rows_done),
                    (size, table.size_bytes),
                    (size_done, table.bytes_done),
                ):
                    if value is not None:
                        family.add_metric(where, value)
        with self._lock:
            for name, model in self._models.items():
                running = model.state == "loading"
                seconds.add_metric([name], self._clock() - model.started if running else model.seconds)
                failures.add_metric([name], model.failures)
        yield from (ready, rows, rows_done, size, size_done, seconds, failures)

    def _status(self, name: str, model: _ModelEntry, deployed: bool) -> ModelStatus | None:
        tables = [table.status() for table in model.tables.values()]
        if deployed:
            model.state = "ready"  # whoever deployed it; once it is undeployed, it is not one that failed
            return ModelStatus(name=name, state="ready", percent=100, tables=tables)
        if model.state == "ready":  # it was undeployed
            return None
        retry_in_s = None if model.retry_at is None else max(0.0, model.retry_at - self._clock())
        return ModelStatus(
            name=name,
            state=model.state,
            percent=sum(table.percent for table in model.tables.values()) // len(model.tables),
            reason=_reason(name, model, retry_in_s),
            retry_in_s=retry_in_s,
            tables=tables,
        )


def _entry(model: ModelConfig) -> _ModelEntry:
    return _ModelEntry({spec.table_name: _TableEntry(spec.table_name) for spec in model.tables})


def _reason(name: str, model: _ModelEntry, retry_in_s: float | None) -> str:
    if model.state == "failed":
        return model.cause if retry_in_s is None else f"{model.cause}; next try in {time_text(retry_in_s)}"
    if model.state == "waiting":
        return "waiting for the models before it"
    for table in model.tables.values():
        if table.state == "loading" and table.load is not None:
            return f"loading {name}.{table.name}: {table.load}"
    return f"loading {name}"
