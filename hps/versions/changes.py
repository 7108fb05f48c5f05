"""A change of a model, and the progress of its tables."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from hps.errors import HPSError
from hps.ground.progress import FailureProgress, NoProgress, Progress, TableProgress
from hps.types import split_tag
from hps.versions.desired import DesiredVersion

LoadState = Literal["waiting", "loading", "done", "failed"]


@dataclass(slots=True)
class LoadingTable:
    """The load of one table. `load` is None before it starts, and for a table that needs no reading."""

    name: str
    state: LoadState = "waiting"
    tag: str = ""
    load: TableProgress | None = None

    @property
    def percent(self) -> int:
        return 100 if self.state == "done" else self.load.percent if self.load else 0


@dataclass(eq=False)
class Change:
    """A change of a model, running or finished, and the `Progress` of its load. One thread writes it, others read it.

    Attributes:
        doing: a participle such as `deploying`.
        number: sequence number of the change in this process.
        what, by: request and client; empty for a local change.
        tables: tables that the change loads, by name.
        version: serving version after the change; empty if none.
        fingerprint: of the files of the version that it last began to put into service.
        error: reason of the failure; empty otherwise.
        status: HTTP status of the response to its request, once finished.
        pin, ended_pin: the pins that it made and ended, if any.
        held: why the version that was asked for does not serve although it is loaded: its checks hold it; empty otherwise.
        accepts: a person lets the version serve whatever its checks find.
        beside: the version is to be available beside the serving one, for a rollout.
        since: start, in seconds since the epoch.
        thread: thread that makes the change, if another thread started it.
        waiting: what the change waits for, once its tables are loaded; empty if nothing.
        proceed: called during the load; raises to end it.
    """

    model: str
    doing: str
    number: int
    what: str = ""
    by: str = ""
    tables: dict[str, LoadingTable] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    version: str = ""
    fingerprint: str = ""
    error: str = ""
    status: int | None = None
    pin: DesiredVersion | None = None
    ended_pin: DesiredVersion | None = None
    held: str = ""
    accepts: bool = False
    beside: bool = False
    since: float = field(default_factory=time.time)
    thread: threading.Thread | None = None
    waiting: str = ""
    listener: Progress = field(default_factory=NoProgress)
    proceed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._ended: float | None = None
        self._lock = threading.Lock()
        self._rows = 0  # of the versions loaded before the current one

    @property
    def rows_loaded(self) -> int:
        """Rows read from files into the databases so far."""
        with self._lock:
            return self._rows + sum(table.load.rows_done for table in self.tables.values() if table.load is not None)

    @property
    def under_way(self) -> bool:
        return self._ended is None

    @property
    def seconds(self) -> float:
        """Duration, so far or in total."""
        return (self.clock() if self._ended is None else self._ended) - self._started

    def expect(self, tables: Iterable[str]) -> None:
        """Start the load of these tables."""
        rows = self.rows_loaded
        with self._lock:
            self._rows, self.tables = rows, {name: LoadingTable(name) for name in tables}

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """Start reading a table. Earlier tables are done, read or not."""
        self.listener.start(tag, rows, size_bytes)
        with self._lock:
            table = self.tables.setdefault(name := _table_of(tag), LoadingTable(name))
            for other in self.tables.values():
                if other is table:
                    break
                other.state = "done"
            table.state, table.tag, table.load = "loading", tag, TableProgress(rows, size_bytes, self.clock)

    def advance(self, tag: str, rows: int) -> None:
        """Report rows written to the databases."""
        self.proceed()
        self.listener.advance(tag, rows)
        if (table := self.tables.get(_table_of(tag))) is not None and table.load is not None:
            table.load.advance(rows)

    def finish(self, tag: str) -> None:
        """Report that all rows of a table are in the databases."""
        self.listener.finish(tag)
        with self._lock:
            if (table := self.tables.get(_table_of(tag))) is not None:
                table.state = "done"
                if table.load is not None:
                    table.load.end()

    def wait_for(self, what: str) -> None:
        """Report what the change waits for; empty if nothing."""
        self.waiting = what

    def end(self, error: BaseException | None = None) -> None:
        """Record the outcome, and notify the listener of an unfinished table."""
        unfinished = ""
        with self._lock:
            for table in self.tables.values():
                if error is None:
                    table.state = "done"
                elif table.state == "loading":
                    table.state, unfinished = "failed", table.tag
                    if table.load is not None:
                        table.load.end()
        if unfinished and isinstance(self.listener, FailureProgress):
            self.listener.fail(unfinished)
        self.error, self._ended = "" if error is None else cause_of(error)[0], self.clock()


def cause_of(error: BaseException) -> tuple[str, BaseException | None]:
    """Return the reason to show to users; also the error itself if it is a bug, for the log only."""
    if isinstance(error, HPSError | MemoryError):
        return str(error) or "not enough memory", None
    return "internal error; the log has the details", error


def _table_of(tag: str) -> str:
    return (split_tag(tag) or ("", "", tag))[2]
