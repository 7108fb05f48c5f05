"""Life cycle of the parameter server behind the service: opens the tiers, loads the models in turn, and closes."""

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from hps.configuration.load import Configuration, ModelConfig
from hps.errors import ConfigError, ConflictError, HPSError, NotReadyError
from hps.ground.kernels.compilations import COMPILATIONS
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.progress import FailureProgress, LogProgress, Progress, time_text
from hps.ground.threads.workers import new_thread
from hps.parameter_server import HPS
from hps.serve.engine.readiness import Readiness
from hps.versions.catalog import absent_models, can_be_empty
from hps.versions.changes import cause_of
from hps.versions.live_models import FIRST_RETRY_S, LONGEST_RETRY_S, LiveModels, is_transient
from hps.versions.tiers import choose_cache, served_kernels

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

STOPPING = "shutting down"
"""Why a stopping service is not ready."""

_LONGEST_WAIT_S = 300.0
_BUSY_WAIT_S = 1.0  # while another thread changes a model that is to be loaded


class _StoppableProgress:
    """Ends a load when the service stops."""

    def __init__(self, listener: Progress, proceed: Callable[[], None]) -> None:
        self._listener = listener
        self._proceed = proceed

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        self._proceed()
        self._listener.start(tag, rows, size_bytes)

    def advance(self, tag: str, rows: int) -> None:
        self._listener.advance(tag, rows)
        self._proceed()

    def finish(self, tag: str) -> None:
        self._listener.finish(tag)

    def fail(self, tag: str) -> None:
        if isinstance(self._listener, FailureProgress):
            self._listener.fail(tag)


class Lifecycle:
    """Loads a parameter server off the event loop, reports readiness, and closes it. *Thread-safe.*

    One thread loads the models at the start, retries failed ones, polls the catalog, and applies changes of the configuration.
    Two others read the serving documents of a fleet, and follow them. Each model answers as soon as it is loaded. A model that
    cannot be loaded does not stop the others. Causes that may pass are retried with rising pauses and never end the process.
    Others end it: the databases cannot be opened, or no model can be loaded.

    Args:
        parameter_server: an already loaded one; the caller closes it.
        progress: receives loading progress; by default it is logged.
        force: load the model files even if a database has them; online updates are lost.
        first_retry_s: wait before the first retry of a failed model.

    Attributes:
        on_open: called with the new parameter server before a model is loaded; an exception ends the service.
        on_change: called when `blocked` or the models to load have changed.
        unpublished: returns which version in service is not published to the frontends, and why; empty if all are. Takes
            optionally a model and a version.
        configuration: replaced when changes of its file are applied.
        live: states of the models; those of the parameter server once it is opened.
        states: a view of them for operators and Prometheus.
        opened: the parameter server once its databases are open, ready or not.
        serving: the parameter server while lookups of every model are answered; otherwise None.
        failure: error that ended the process's loading.
        leaving: whether the service is about to stop; lookups are still answered.
    """

    def __init__(
        self,
        configuration: Configuration,
        parameter_server: HPS | None = None,
        progress: Progress | None = None,
        *,
        force: bool = False,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self.configuration = configuration
        self._owned = parameter_server is None
        self.opened = self.serving = parameter_server
        self.failure: BaseException | None = None
        self.leaving = False
        self._force = force
        self._first_retry_s = first_retry_s
        self._progress = _StoppableProgress(progress or LogProgress(), self._end_when_stopping)
        self.on_open: list[Callable[[HPS], object]] = []
        self.on_change: list[Callable[[], object]] = []
        self.unpublished: Callable[..., str] = lambda *version: ""
        self._stopping = threading.Event()
        self.live = LiveModels() if parameter_server is None else parameter_server.live
        self.states = Readiness(lambda: self.live)
        for model in configuration.models if self._owned else ():
            if self._loads(model.model):
                self.live.expect(model)
        self._found: set[str] = set()  # names in the catalog at the last search
        self._broken: set[str] = set()  # names with invalid entries at the last search
        self._absent: set[str] = set()  # names in `load_models` but not in the catalog
        self._lack = ""  # why models are lacking
        self._blocked = "the service is starting"  # why no request is answered
        self._all_tried = not self._owned
        self._changing = threading.Lock()  # loading may end while the service stops
        self._loader: threading.Thread | None = None
        self._changes: queue.SimpleQueue[ModelConfig | str | None] = queue.SimpleQueue()  # None wakes the loader
        self._documents_read = threading.Event()  # since they were last followed

    @property
    def settled(self) -> bool:
        """Whether lookups are answered for every model that has not failed, and for at least one model."""
        blocked = self.leaving or self._blocked or self.unpublished() or self.live.refused()
        has_models = self.live.serving or not self._owned or can_be_empty(self.configuration.service)
        return not blocked and bool(has_models) and (self._all_tried or not self.states.summary())

    @property
    def blocked(self) -> str:
        """Why no lookup is answered; empty if lookups are."""
        starting = self._blocked and self.failure is None and not self._stopping.is_set()
        return (COMPILATIONS.progress if starting else "") or self._blocked

    @property
    def not_ready_reason(self) -> str:
        """Why lookups of a model are not answered, or soon will not be; empty if all are."""
        reason = self.blocked or (STOPPING if self.leaving else "" if self.serving else self.states.summary())
        return reason or self._lacking() or self._left_out() or self.unpublished() or self.live.refused()

    @property
    def degraded(self) -> str:
        """Lost devices of models in service, and problems of the volatile database; empty without any."""
        lost = [
            f"device {device} is lost: {failure}; restart the service" for device, failure in self.live.lost_devices().items()
        ]
        return "; ".join(lost + ([] if self.opened is None else self.opened.degraded))

    @property
    def server(self) -> HPS:
        """The parameter server, whatever the states of its models.

        Raises:
            NotReadyError: it is being opened, failed or closed.
        """
        if (server := self.opened) is None or self._blocked:
            raise NotReadyError(f"the parameter server is not ready: {self.blocked}")
        return server

    def server_of(self, model_name: str) -> HPS:
        """Return the parameter server for a lookup of a model. Does not check that the model exists.

        Raises:
            NotReadyError: the parameter server is being opened, failed or closed; or the model is waiting, loading or failed.
        """
        server = self.server
        if model_name not in server.models and (reason := self.states.reason(model_name)):
            raise NotReadyError(f"model {model_name!r} is not ready: {reason}")
        return server

    def start(self) -> None:
        if self.opened is not None:
            compile_kernels(*served_kernels(self.configuration, self.opened.cache_class))
            for notify in self.on_open:
                notify(self.opened)
            self._block("")
            self._follow_fleet(self.opened)
        elif self._owned:
            self._block("loading the kernels")
            self._loader = new_thread("load", self._load)
            self._loader.start()

    def _block(self, reason: str) -> None:
        self._blocked = reason
        self._notify()

    def _notify(self) -> None:
        for notify in self.on_change:
            notify()

    def change(self, deploy: Iterable[ModelConfig], undeploy: Iterable[str]) -> None:
        """Queue models to load and to undeploy, behind the current loading.

        The entry of a model that is in service, or that only clients load, is replaced for later deployments. A ready
        service stays ready while the model is loaded, and if that fails.
        """
        for model in deploy:
            self._changes.put(model)
        for name in undeploy:
            self._changes.put(name)

    def leave(self) -> None:
        """Turn not ready and stop loading. Lookups are still answered."""
        self.leaving = True
        self._stopping.set()
        self._changes.put(None)
        self._documents_read.set()

    def refuse(self) -> None:
        """Answer no new lookups: the service is stopping."""
        self.leave()
        with self._changing:
            self._blocked, self.serving = STOPPING, None
        self._block(STOPPING)

    def close(self, timeout_s: float) -> bool:
        """Stop loading and close the parameter server. Return False on timeout. Blocks."""
        self.refuse()
        if not self._owned:
            return True
        deadline = time.monotonic() + timeout_s
        if self._loader:
            self._loader.join(timeout_s)
        with self._changing:
            server, self.opened = self.opened, None
        if server:  # which waits for a model that is loading
            closer = new_thread("close", server.close, lasting=False)
            closer.start()
            closer.join(max(0.0, deadline - time.monotonic()))
            return not closer.is_alive()
        return self._loader is None or not self._loader.is_alive()

    def progress(self) -> Progress:
        """Return progress for a requested change: it is logged, and a stop of the service ends the load."""
        return _StoppableProgress(LogProgress(), self._end_when_stopping)

    def _end_when_stopping(self) -> None:
        if self._stopping.is_set():
            raise NotReadyError("the service is stopping")

    def _load(self) -> None:
        started = time.monotonic()
        try:
            compile_kernels(*served_kernels(self.configuration, choose_cache(self.configuration.device, quiet=True)))
            self._block("opening the databases")
            server = self._retried(partial(HPS, self.configuration, deploy_models=False))
            self._opened(server)
        except BaseException as error:  # noqa: BLE001 - the end of a thread: `failure` carries it to the caller of serve
            self._end(error)
            return
        with self._changing:
            stopped = self._stopping.is_set()
            if not stopped:
                self.live, self.opened = server.live, server
        if stopped:
            server.close()
            return
        self._block("")
        self._follow_fleet(server)
        outcomes = {name: self._deploy(server, name) for name in server.live.due()}
        errors = {name: failed for name, failed in outcomes.items() if failed is not None}
        if self._stopping.is_set():
            return
        if errors and not server.models and not _may_pass(server.live, errors):
            self._end(_all_failed(errors))
            with self._changing:
                self.opened = None
            server.close()
            return
        seconds, names = time.monotonic() - started, ", ".join(server.models)
        if errors:
            _log.warning("ready after %.1f s: %s; not ready: %s", seconds, names or "no model", self.states.summary())
        elif not (self._lacking() or self._left_out()):  # otherwise `_maintain` logs them
            _log.info("ready after %.1f s: %s", seconds, names)
        self._all_tried = True
        self._maintain(server)

    def _maintain(self, server: HPS) -> None:
        """Retry failed models, poll the catalog, and apply queued changes, until the service stops."""
        poll_at, find_at, pause_s = self._next_poll(), math.inf, self._first_retry_s
        while not self._stopping.is_set():
            states = {life.state for life in server.live.models()}
            now = time.monotonic()
            lacking = self._lacking()
            if not lacking and states <= {"serving"}:
                with self._changing:
                    if not self._blocked:
                        self.serving = server
            if lack := (lacking and self._lack) or self._left_out():
                if find_at == math.inf:
                    pause_s *= random.uniform(0.75, 1.0)
                    find_at, pause_s = now + pause_s, min(2 * pause_s, LONGEST_RETRY_S)
                    _log.error("%s; looking again in %s", lack, time_text(find_at - now))
            else:
                find_at, pause_s = math.inf, self._first_retry_s
            if find_at <= now:
                self._find_models(server)
                find_at = math.inf
            elif due := [name for name, at in server.live.due().items() if at <= now]:
                self._deploy(server, due[0])
            elif poll_at <= now:
                self._report("polling", partial(server.poll, progress=self._progress))
                poll_at = self._next_poll()
            else:
                longest_s = _BUSY_WAIT_S if "loading" in states else _LONGEST_WAIT_S
                wait_s = min(longest_s, *(max(0.0, at - now) for at in (poll_at, find_at, *server.live.due().values())))
                with suppress(queue.Empty):
                    self._apply(server, self._changes.get(timeout=wait_s))

    def follow_soon(self) -> None:
        """Wake the thread that deploys the versions of the serving documents."""
        self._documents_read.set()

    def _follow(self, server: HPS) -> None:
        """Deploy the versions of the serving documents whenever they were read, until the service stops."""
        while not self._stopping.is_set():
            if self._documents_read.wait(_LONGEST_WAIT_S) and not self._stopping.is_set():
                self._documents_read.clear()
                self._report("following the fleet", partial(server.follow, progress=self._progress))

    def _follow_fleet(self, server: HPS) -> None:
        new_thread("read-documents", partial(self._read_documents, server)).start()
        new_thread("follow-documents", partial(self._follow, server)).start()

    def _read_documents(self, server: HPS) -> None:
        """Read the serving documents periodically, until the service stops."""
        while not self._stopping.wait(self.configuration.service.repository_poll_s * random.uniform(0.9, 1.1)):
            try:
                server.read_documents()
            except Exception as error:  # noqa: BLE001 - reading goes on
                cause, bug = cause_of(error)
                _log.error("reading the serving documents failed: %s", cause, exc_info=bug)
            self.follow_soon()

    def _apply(self, server: HPS, change: ModelConfig | str | None) -> None:
        if isinstance(change, str):
            self._undeploy(server, change)
        elif change is not None:
            server.catalog.add(change)
            if change.model not in server.models and self._loads(change.model):
                server.live.expect(change)
                self._notify()

    def _next_poll(self) -> float:
        """Return the time of the next poll, jittered so that replicas poll at different times."""
        service = self.configuration.service
        if service.model_control_mode != "poll":
            return math.inf
        return time.monotonic() + service.repository_poll_s * random.uniform(0.9, 1.1)

    def _report(self, what: str, deploy: Callable[[], dict[str, Exception | None]]) -> None:
        """Call `deploy`, and log the outcome by model."""
        started = time.monotonic()
        try:
            outcome = deploy()
        except Exception as error:  # noqa: BLE001 - it is tried again
            cause, bug = cause_of(error)
            _log.error("%s failed: %s", what, cause, exc_info=bug)
            return
        for name, failure in outcome.items():
            if failure is None:
                _log.info("%s changed model %s after %.1f s", what, name, time.monotonic() - started)
            elif not self._stopping.is_set():
                cause, bug = cause_of(failure)
                _log.error("%s could not change model %s: %s", what, name, cause, exc_info=bug)

    def _opened(self, server: HPS) -> None:
        """Announce the parameter server, and queue the models that are loaded at the start."""
        server.live.first_retry_s = self._first_retry_s
        try:
            for notify in self.on_open:
                notify(server)
            self._want(server, self._retried(lambda: server.catalog.names, versioned=True))
        except BaseException:
            server.close()
            raise

    def _retried(self, call: Callable[[], _T], *, versioned: bool = False) -> _T:
        """Call until it succeeds, with rising pauses. Raise an error that does not pass by itself.

        Args:
            versioned: see `is_transient`.
        """
        pause_s = self._first_retry_s
        while True:
            try:
                return call()
            except HPSError as error:
                if not is_transient(error, versioned=versioned):
                    raise
                pause_s *= random.uniform(0.75, 1.0)
                _log.error("%s; trying again in %s", error, time_text(pause_s))
                self._block(f"{error}; next try in {time_text(pause_s)}")
                if self._stopping.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _want(self, server: HPS, names: Sequence[str]) -> None:
        """Wait for the models of the catalog to serve, and find out which of those that should are not there."""
        known = {life.name for life in server.live.models()}
        for name in names:
            if self._loads(name) and name not in known | self._found:  # what others have undeployed stays so
                server.live.expect(server.catalog.model(name))
        self._found.update(names)
        self._broken = {name for name in server.catalog.problems if self._loads(name)} | (self._broken & {*names})
        self._absent = {*self.configuration.service.load_models} - {"*", *names}
        self._lack = absent_models(self.configuration.service, server.catalog)
        self._notify()

    def _lacking(self) -> str:
        """Why a model that should be in service is neither in service nor coming; empty if none is lacking."""
        if not self._owned or self._blocked:
            return ""
        known = {life.name for life in self.live.models()}
        if self._absent - known or not (known or can_be_empty(self.configuration.service)):
            return self._lack or "no model is in service"
        return ""

    def _left_out(self) -> str:
        """Models left out because their entries were invalid at the last search, and why; empty if none is."""
        if (server := self.opened) is None or not self._broken:
            return ""
        reasons = {}
        for name in sorted(self._broken - {*server.live.serving}):
            coming = "" if name in self._found else "it is looked for"  # between its discovery and its load
            reasons[name] = server.catalog.problems.get(name) or self.states.reason(name) or coming
        return "; ".join(f"model {name!r} is left out: {reason}" for name, reason in reasons.items() if reason)

    def _find_models(self, server: HPS) -> None:
        """Search for models that are lacking: they may have been published meanwhile."""
        try:
            server.catalog.scan()
            self._want(server, server.catalog.names)
        except HPSError as error:
            self._lack = str(error)

    def _loads(self, name: str) -> bool:
        settings = self.configuration.service
        return settings.model_control_mode != "explicit" or not {"*", name}.isdisjoint(settings.load_models)

    def _deploy(self, server: HPS, name: str) -> Exception | None:
        """Load a model and log the outcome. Return its error; None also after a stop or another thread's change."""
        started = time.monotonic()
        if self._stopping.is_set() or name not in server.live.due():  # another thread has changed it
            return None
        before = server.live.failure(name)
        try:
            server.deploy(name, progress=self._progress, force=self._force, pin=False)
        except Exception as error:  # noqa: BLE001 - reported as the state of the model; the others go on
            if self._stopping.is_set():
                _log.info("loading model %s was stopped: %s", name, error)
                return None
            if server.live.failure(name) is before:  # it did not start
                if isinstance(error, ConflictError):
                    return None
                server.live.record_failure(name, error)
            cause, bug = cause_of(error)
            retry = "not trying again: the cause does not pass by itself"
            if (failure := server.live.failure(name)) and failure.is_transient:
                retry = f"trying again in {time_text(max(0.0, failure.due - time.monotonic()))}"
            _log.error("loading model %s failed: %s; %s", name, cause, retry, exc_info=bug)
            return error
        _log.info("model %s is ready after %.1f s", name, time.monotonic() - started)
        return None

    def _undeploy(self, server: HPS, name: str) -> None:
        server.live.stop_expecting(name)
        started = time.monotonic()
        try:
            if name in server.models:
                server.undeploy(name)
        except HPSError as error:
            _log.error("taking model %s out of service failed: %s", name, error)
        else:
            _log.info("model %s is out of service after %.1f s", name, time.monotonic() - started)

    def _end(self, error: BaseException) -> None:
        cause, bug = cause_of(error)
        with self._changing:
            if self._stopping.is_set():
                _log.info("loading was stopped: %s", error)
                return
            self._blocked, self.failure = f"loading failed: {cause}", error
        self._notify()
        _log.error("loading failed: %s", cause, exc_info=bug)


def _may_pass(live: LiveModels, errors: Iterable[str]) -> bool:
    """Return True if one of these models, none of which could be loaded, is tried again."""
    return any((failure := live.failure(name)) is not None and failure.is_transient for name in errors)


def _all_failed(errors: dict[str, Exception]) -> BaseException:
    first = next(iter(errors.values()))
    if len(errors) == 1 or not isinstance(first, HPSError) or isinstance(first, ConfigError):
        return first
    causes = "".join(f"\n  {name}: {error}" for name, error in errors.items())
    return type(first)(f"none of {len(errors)} models could be loaded:{causes}")
