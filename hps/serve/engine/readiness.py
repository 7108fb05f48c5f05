"""Loading progress of models for operators and Prometheus: a view of `LiveModels`."""

from collections.abc import Callable, Iterator

from hps.ground.kernels.compilations import COMPILATIONS
from hps.ground.progress import time_text
from hps.serve.protocol.schemas import ModelState, ModelStatus, TableStatus
from hps.statistics.prometheus import Family, family, label_text
from hps.versions.changes import LoadingTable
from hps.versions.live_models import LifecycleState, LiveModels, ModelLifecycle

_STATES: dict[LifecycleState, ModelState] = {"wanted": "waiting", "loading": "loading", "failed": "failed", "serving": "ready"}


class Readiness:
    """Shows the models that serve or are to serve. *Thread-safe.*"""

    def __init__(self, live: Callable[[], LiveModels]) -> None:
        self._live = live

    def models(self) -> list[ModelStatus]:
        return [_model_status(life) for life in self._live().models()]

    def reason(self, name: str) -> str:
        """Why a model is not ready; empty if it is, or need not be."""
        status = next((model for model in self.models() if model.name == name), None)
        if status is None or status.reason is None:
            return ""
        return f"loading failed: {status.reason}" if status.state == "failed" else status.reason

    def summary(self) -> str:
        """Why not all models are ready; empty if they are."""
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

    def families(self) -> Iterator[Family]:
        lives = self._live().models()
        models = [(label_text(["model"], [life.name]), life) for life in lives]
        loads = [
            (label_text(("model", "table"), (life.name, table.name)), table.load)
            for life in lives
            for table in life.tables
            if table.load is not None
        ]
        ready = [(where, life.state == "serving") for where, life in models]
        yield family("gauge", "hps_model_ready", "1 while a model is in service.", ready)
        for name, text, attribute in (
            ("hps_load_rows", "Rows to read in the last load of a table.", "rows"),
            ("hps_loaded_rows", "Rows of the last load that are in the databases.", "rows_done"),
            ("hps_load_bytes", "Bytes to read in the last load of a table.", "size_bytes"),
            ("hps_loaded_bytes", "Bytes of the last load that are in the databases.", "bytes_done"),
        ):
            yield family("gauge", name, text, [(where, getattr(load, attribute)) for where, load in loads])
        seconds = [(where, life.load_seconds) for where, life in models]
        yield family("gauge", "hps_load_seconds", "Duration of the last load of a model, so far or in total.", seconds)
        failures = [(where, life.failures) for where, life in models]
        yield family("counter", "hps_load_failures", "Failed loads of a model.", failures)


def table_status(table: LoadingTable) -> TableStatus:
    if (load := table.load) is None:
        return TableStatus(name=table.name, state=table.state)
    return TableStatus(
        name=table.name,
        state=table.state,
        rows=load.rows,
        rows_done=load.rows_done,
        size_bytes=load.size_bytes,
        bytes_done=load.bytes_done,
        rows_per_s=load.rows_per_s,
        seconds_left=load.seconds_left,
    )


def _model_status(life: ModelLifecycle) -> ModelStatus:
    ready = life.state == "serving"
    percent = 100 if ready else sum(table.percent for table in life.tables) // max(1, len(life.tables))
    return ModelStatus(
        name=life.name,
        state=_STATES[life.state],
        percent=percent,
        reason=None if ready else _reason(life),
        retry_in_s=life.retry_in_s,
        tables=[table_status(table) for table in life.tables],
    )


def _reason(life: ModelLifecycle) -> str:
    if life.failure is not None:
        retry = "" if life.retry_in_s is None else f"; next try in {time_text(life.retry_in_s)}"
        return life.failure.cause + retry
    if life.state == "wanted":
        return "waiting for the models before it"
    if compiling := COMPILATIONS.progress:  # perhaps kernels of another model, which this one waits for
        return compiling
    if life.waiting:
        return life.waiting
    for table in life.tables:
        if table.state == "loading" and table.load is not None:
            return f"loading {life.name}.{table.name}: {table.load}"
    return f"loading {life.name}"
