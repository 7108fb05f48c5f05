"""The life of the parameter server behind the service: loaded in the background, ready, closed."""

import logging
import threading
import time
from collections.abc import Callable

from hps.config import Configuration
from hps.errors import HPSError, NotReadyError
from hps.parameter_server import HPS
from hps.progress import LogProgress, Progress

_log = logging.getLogger(__name__)


class Lifecycle:
    """Loads a parameter server without blocking the event loop, says whether it is ready, closes it. *Thread-safe.*

    Args:
        configuration: what to load.
        parameter_server: one that is loaded already; it stays open when the service stops.
        progress: told how far the loading is.
    """

    def __init__(
        self, configuration: Configuration, parameter_server: HPS | None = None, progress: Progress | None = None
    ) -> None:
        self._configuration = configuration
        self._progress = progress or LogProgress()
        self._owned = parameter_server is None
        self._server = parameter_server
        self._not_ready = "" if parameter_server else "not started"
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._changing = threading.Lock()  # a server may get ready while the service stops
        self._loader: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        """Whether lookups are answered."""
        return not self._not_ready

    @property
    def not_ready_reason(self) -> str:
        """Why lookups are not answered; empty when they are."""
        return self._not_ready

    @property
    def failure(self) -> BaseException | None:
        """What ended the loading, if something did."""
        return self._failure

    def server(self) -> HPS:
        """The parameter server.

        Raises:
            NotReadyError: it is loading, failed or is closed; the message says which.
        """
        if self._server is None or self._not_ready:
            raise NotReadyError(f"the parameter server is not ready: {self._not_ready}")
        return self._server

    def loaded(self) -> HPS | None:
        """The parameter server once it is loaded, ready or not; its metrics are worth reading even when a device failed."""
        return self._server

    def start(self) -> None:
        """Begin to load."""
        if self._owned and self._loader is None:
            self._not_ready = "loading"
            self._loader = threading.Thread(target=self._load, name="hps-load", daemon=True)
            self._loader.start()

    def fail(self, reason: str) -> None:
        """Stop answering for good, because of something that only a restart heals."""
        with self._changing:
            self._not_ready = reason

    def refuse(self) -> None:
        """Answer no new lookups: the service stops."""
        with self._changing:
            self._stopping.set()
            self._not_ready = "shutting down"

    def close(self, timeout_s: float) -> bool:
        """Stop loading, or close the parameter server; False when that takes longer. Blocks."""
        self.refuse()
        if not self._owned:
            return True
        deadline = time.monotonic() + timeout_s
        if self._loader:
            self._loader.join(timeout_s)
        with self._changing:
            server, self._server = self._server, None
        if server:
            closer = threading.Thread(target=server.close, name="hps-close", daemon=True)
            closer.start()
            closer.join(max(0.0, deadline - time.monotonic()))
            return not closer.is_alive()
        return self._loader is None or not self._loader.is_alive()

    def _load(self) -> None:
        started = time.monotonic()
        try:
            server = HPS(self._configuration, progress=_Progress(self._progress, self._say, self._stopping))
        except BaseException as error:  # noqa: BLE001 - a thread's end: `failure` carries it to whoever serves
            if self._stopping.is_set():
                _log.info("loading was stopped: %s", error)
                return
            self._failure = error
            self._not_ready = f"loading failed: {error if isinstance(error, HPSError) else 'internal error; see the log'}"
            _log.error("loading failed: %s", error, exc_info=None if isinstance(error, HPSError) else error)
            return
        with self._changing:
            if not self._stopping.is_set():
                self._server, self._not_ready = server, ""
                _log.info("ready after %.1f s: %s", time.monotonic() - started, ", ".join(server.models))
                return
        server.close()

    def _say(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._not_ready = reason


class _Progress:
    """Passes the progress on, puts it into the readiness, and ends the loading when the service stops."""

    def __init__(self, progress: Progress, say: Callable[[str], None], stopping: threading.Event) -> None:
        self._progress = progress
        self._say = say
        self._stopping = stopping
        self._total = self._loaded = 0

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        self._progress.start(tag, rows, size_bytes)
        self._total, self._loaded = rows, 0
        self._tell(tag)

    def advance(self, tag: str, rows: int) -> None:
        self._progress.advance(tag, rows)
        self._loaded += rows
        self._tell(tag)

    def finish(self, tag: str) -> None:
        self._progress.finish(tag)
        self._say("loading")

    def _tell(self, tag: str) -> None:
        if self._stopping.is_set():
            raise NotReadyError("the service stops")
        self._say(f"loading {tag}: {100 * self._loaded // max(self._total, 1)} %")
