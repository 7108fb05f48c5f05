"""The life of the parameter server behind the service: it opens the tiers, loads one model after the other, and closes."""

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hps.configuration.load import Configuration, ModelConfig
from hps.errors import (
    ConfigError,
    DatabaseCorruptError,
    DatabaseError,
    HPSError,
    ModelFileChangedError,
    ModelSourceError,
    NotReadyError,
    TableWidthError,
)
from hps.parameter_server import HPS
from hps.progress import LogProgress, Progress, time_text
from hps.service.model_states import ModelStates

_log = logging.getLogger(__name__)

STOPPING = "shutting down"
"""Why a service that stops is not ready."""

FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""The first and the longest wait before a model is tried again, after a failure that may pass. Each failure doubles it."""

_MAY_PASS = (ModelSourceError, ModelFileChangedError, DatabaseError)
_STAYS = (DatabaseCorruptError, TableWidthError)


class _FailedModel(NamedTuple):
    """A model that could not be loaded."""

    model: ModelConfig
    error: Exception
    failures: int
    due: float  # the time.monotonic of the next try; infinite: there is none


class Lifecycle:
    """Loads a parameter server without blocking the event loop, says what is ready, and closes it. *Thread-safe.*

    Each model answers as soon as it is loaded. One that cannot be loaded does not stop the others: it is not ready, and is
    tried again when the cause may pass by itself. Loading as a whole fails when the databases cannot be opened, or when no
    model at all can be loaded.

    Args:
        configuration: what to load.
        parameter_server: one that is loaded already; the caller closes it.
        progress: gets reports of the loading; by default they are logged.
        force: load the models' files even where a database holds them already; its online updates are lost.
        first_retry_s: how long to wait before a failed model is tried again.
        on_open: is told the parameter server that it makes, before any model is loaded; what it raises ends the service.

    Attributes:
        configuration: as given; the service replaces it where it takes over changes of its file.
        states: the progress of each model, for people and for Prometheus.
        opened: the parameter server once its databases are open, ready or not: its metrics are worth reading even then.
        serving: the parameter server while lookups of every model are answered, else None; then `server_of` says why.
        failure: what ended the loading as a whole, if something did.
        leaving: whether the service is about to stop, and not ready for that reason; lookups are still answered.
    """

    def __init__(
        self,
        configuration: Configuration,
        parameter_server: HPS | None = None,
        progress: Progress | None = None,
        *,
        force: bool = False,
        first_retry_s: float = FIRST_RETRY_S,
        on_open: Callable[[HPS], object] = lambda server: None,
    ) -> None:
        self.configuration = configuration
        self._owned = parameter_server is None
        self.opened = self.serving = parameter_server
        self.failure: BaseException | None = None
        self.leaving = False
        self._force = force
        self._first_retry_s = first_retry_s
        self._on_open = on_open
        self._stopping = threading.Event()
        models = [one for one in configuration.models if self._loads(one.model)] if self._owned else []
        self.states = ModelStates(
            models,
            lambda: server.models if (server := self.opened) else (),
            progress or LogProgress(),
            self.end_when_stopping,
        )
        self._blocked = "not started" if self._owned else ""  # why nothing at all is answered
        self._all_tried = not self._owned
        self._given_up: set[str] = set()  # models that somebody has unloaded before they were loaded
        self._changing = threading.Lock()  # the loading may end while the service stops
        self._loader: threading.Thread | None = None
        self._changes: queue.SimpleQueue[ModelConfig | str | None] = queue.SimpleQueue()  # None wakes the loader

    @property
    def settled(self) -> bool:
        """Whether lookups of every model are answered, except of those that failed."""
        return not (self.leaving or self._blocked) and (self._all_tried or not self.states.summary())

    @property
    def not_ready_reason(self) -> str:
        """Why lookups of some or all models are not answered, or soon will not be; empty when all are."""
        return self._blocked or (STOPPING if self.leaving else "" if self.serving else self.states.summary())

    @property
    def server(self) -> HPS:
        """The parameter server, whichever models it has.

        Raises:
            NotReadyError: it is being opened, failed or is closed.
        """
        if (server := self.opened) is None or self._blocked:
            raise NotReadyError(f"the parameter server is not ready: {self._blocked}")
        return server

    def server_of(self, model_name: str) -> HPS:
        """The parameter server, for a lookup of a model. Does not check that there is such a model.

        Raises:
            NotReadyError: the parameter server is being opened, failed or is closed; or the model waits, is being loaded or
                failed. The message says which, and why.
        """
        server = self.server
        if model_name not in server.models and (reason := self.states.reason(model_name)):
            raise NotReadyError(f"model {model_name!r} is not ready: {reason}")
        return server

    def start(self) -> None:
        """Begin to load."""
        if self._owned:
            self._blocked = "opening the databases"
            self._loader = threading.Thread(target=self._load, name="hps-load", daemon=True)
            self._loader.start()

    def give_up(self, name: str) -> None:
        """Do not load a model that was to be loaded at the start, if it is not loaded yet."""
        self._given_up.add(name)
        self.states.given_up(name)

    def fail(self, reason: str) -> None:
        """Stop answering for good, for a reason that only a restart removes."""
        with self._changing:
            self._blocked, self.serving = reason, None

    def change(self, deploy: Iterable[ModelConfig], undeploy: Iterable[str]) -> None:
        """Load these models and take those out of service, in the background, after what is being loaded already.

        Of a model that is in service, or that only clients load, the entry is replaced, for later deployments. A model that is
        loaded or cannot be loaded does not make a service unready that was ready.
        """
        for model in deploy:
            self._given_up.discard(model.model)
            if self._loads(model.model):
                self.states.add(model)
            self._changes.put(model)
        for name in undeploy:
            self._changes.put(name)

    def leave(self) -> None:
        """Turn not ready, and load no more: the service stops soon. Lookups are still answered."""
        self.leaving = True
        self._stopping.set()
        self._changes.put(None)

    def refuse(self) -> None:
        """Answer no new lookups: the service is stopping."""
        self.leave()
        self.fail(STOPPING)

    def close(self, timeout_s: float) -> bool:
        """Stop loading and close the parameter server; False when that takes longer. Blocks."""
        self.refuse()
        if not self._owned:
            return True
        deadline = time.monotonic() + timeout_s
        if self._loader:
            self._loader.join(timeout_s)
        with self._changing:
            server, self.opened = self.opened, None
        if server:  # closing waits for a model that is being loaded
            closer = threading.Thread(target=server.close, name="hps-close", daemon=True)
            closer.start()
            closer.join(max(0.0, deadline - time.monotonic()))
            return not closer.is_alive()
        return self._loader is None or not self._loader.is_alive()

    def end_when_stopping(self) -> None:
        """Raise a NotReadyError if the service is stopping; to be called by what takes long."""
        if self._stopping.is_set():
            raise NotReadyError("the service is stopping")

    def _load(self) -> None:
        started = time.monotonic()
        try:
            server = HPS(self.configuration, deploy_models=False)
            models = self._opened(server)
        except BaseException as error:  # noqa: BLE001 - the end of a thread: `failure` carries it to the caller of serve
            self._end(error)
            return
        with self._changing:
            stopped = self._stopping.is_set()
            if not stopped:
                self.opened, self._blocked = server, ""
        if stopped:
            server.close()
            return
        failed = [one for model in models if (one := self._deploy(server, model))]
        if self._stopping.is_set():
            return
        if failed and not server.models:
            self._end(_all_failed(failed))
            with self._changing:
                self.opened = None
            server.close()
            return
        seconds, names = time.monotonic() - started, ", ".join(server.models)
        if failed:
            _log.warning("ready after %.1f s: %s; not ready: %s", seconds, names, self.states.summary())
        else:
            _log.info("ready after %.1f s: %s", seconds, names)
        self._all_tried = True
        if self.configuration.service.model_control_mode == "poll":
            threading.Thread(target=self._poll, args=(server,), name="hps-poll", daemon=True).start()
        self._tend(server, failed)

    def _tend(self, server: HPS, failed: list[_FailedModel]) -> None:
        """Try those again whose cause may pass, as each is due, and make the changes that come, until the service stops."""
        while not self._stopping.is_set():
            if not failed:
                with self._changing:
                    if not self._blocked:
                        self.serving = server
            first = min(failed, key=lambda one: one.due, default=None)
            due = math.inf if first is None else first.due
            try:
                change = self._changes.get(timeout=min(max(0.0, due - time.monotonic()), LONGEST_RETRY_S))
            except queue.Empty:
                if first is not None and first.due <= time.monotonic():
                    failed.remove(first)
                    if again := self._deploy(server, first.model, first.failures):
                        failed.append(again)
                continue
            if change is None:
                continue
            name = change if isinstance(change, str) else change.model
            failed = [one for one in failed if one.model.model != name]
            if isinstance(change, str):
                self._undeploy(server, name)
                continue
            server.catalog.add(change)
            if name not in server.models and self._loads(name):
                self.states.forget(name)  # the entry that could not be loaded
                if again := self._deploy(server, change):
                    failed.append(again)

    def _poll(self, server: HPS) -> None:
        """Look at the models' files again and again, at times that differ from those of other replicas."""
        while not self._stopping.wait(self.configuration.service.repository_poll_s * random.uniform(0.9, 1.1)):
            started = time.monotonic()
            try:
                outcome = server.poll(progress=self.states)
            except Exception as error:  # noqa: BLE001 - polling goes on
                cause, bug = _describe(error)
                _log.error("polling failed: %s", cause, exc_info=bug)
                continue
            for name, failure in outcome.items():
                if failure is None:
                    _log.info("polling changed model %s after %.1f s", name, time.monotonic() - started)
                elif not self._stopping.is_set():
                    cause, bug = _describe(failure)
                    _log.error("polling could not change model %s: %s", name, cause, exc_info=bug)

    def _opened(self, server: HPS) -> list[ModelConfig]:
        """Tell of the parameter server, and return the models that are loaded at the start."""
        try:
            self._on_open(server)
            models = [server.catalog.model(name) for name in server.catalog.names if self._loads(name)]
        except BaseException:
            server.close()
            raise
        for name, problem in server.catalog.problems.items():
            _log.error("model %s of the repository is left out: %s", name, problem)
        return models

    def _loads(self, name: str) -> bool:
        """Whether a model is loaded at the start."""
        settings = self.configuration.service
        return settings.model_control_mode != "explicit" or not {"*", name}.isdisjoint(settings.load_models)

    def _deploy(self, server: HPS, model: ModelConfig, failures: int = 0) -> _FailedModel | None:
        """Load one model and report the outcome. Returns the failure; None when there was none or the service is stopping."""
        name = model.model
        if self._stopping.is_set() or name in server.models or name in self._given_up:  # somebody else has changed it
            return None
        self.states.add(model)
        self.states.model_started(name)
        try:
            server.deploy(model.model, progress=self.states, force=self._force)
        except Exception as error:  # noqa: BLE001 - reported as the state of the model; the others go on
            if self._stopping.is_set():
                _log.info("loading model %s was stopped: %s", name, error)
                return None
            return self._report(model, error, failures + 1)
        _log.info("model %s is ready after %.1f s", name, self.states.model_ready(name))
        return None

    def _undeploy(self, server: HPS, name: str) -> None:
        self.states.forget(name)
        started = time.monotonic()
        try:
            if name in server.models:
                server.undeploy(name)
        except HPSError as error:
            _log.error("taking model %s out of service failed: %s", name, error)
        else:
            _log.info("model %s is out of service after %.1f s", name, time.monotonic() - started)

    def _report(self, model: ModelConfig, error: Exception, failures: int) -> _FailedModel:
        pause = math.inf
        if isinstance(error, _MAY_PASS) and not isinstance(error, _STAYS):
            pause = min(self._first_retry_s * 2.0 ** min(failures - 1, 32), LONGEST_RETRY_S)
            pause *= random.uniform(0.75, 1.0)  # so that replicas that failed together do not come back together
        cause, bug = _describe(error)
        again = (
            f"trying again in {time_text(pause)}" if pause < math.inf else "not trying again: the cause does not pass by itself"
        )
        _log.error("loading model %s failed: %s; %s", model.model, cause, again, exc_info=bug)
        self.states.model_failed(model.model, cause, pause if pause < math.inf else None)
        return _FailedModel(model, error, failures, time.monotonic() + pause)

    def _end(self, error: BaseException) -> None:
        """Report that the loading as a whole failed."""
        cause, bug = _describe(error)
        with self._changing:
            if self._stopping.is_set():
                _log.info("loading was stopped: %s", error)
                return
            self._blocked, self.failure = f"loading failed: {cause}", error
        _log.error("loading failed: %s", cause, exc_info=bug)


def _describe(error: BaseException) -> tuple[str, BaseException | None]:
    """What people are told of an error; and the error itself where it is a bug, for the log alone."""
    if isinstance(error, HPSError | MemoryError):
        return str(error) or "not enough memory", None
    return "internal error; the log has the details", error


def _all_failed(failed: list[_FailedModel]) -> BaseException:
    """What to raise when no model could be loaded."""
    first = failed[0].error
    if len(failed) == 1 or not isinstance(first, HPSError) or isinstance(first, ConfigError):
        return first
    causes = "".join(f"\n  {one.model.model}: {one.error}" for one in failed)
    return type(first)(f"none of {len(failed)} models could be loaded:{causes}")
