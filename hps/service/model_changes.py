"""Changes of models that take long, each on a thread of its own: neither lookups nor the event loop wait for them."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from hps.errors import ConflictError, HPSError
from hps.progress import LogProgress, TableProgress
from hps.service.change_log import Change
from hps.service.http_answer import OverloadedError, status_of
from hps.service.logs import fields
from hps.types import split_tag

_log = logging.getLogger(__name__)
MOST_AT_ONCE = 4
_MOST_REMEMBERED = 256


@dataclass(slots=True, eq=False)
class ModelChange:
    """A change of a model, under way or ended; a `Progress` of its loading. Its thread writes, others read.

    Attributes:
        number: the changes of a service are numbered.
        model, change: what is changed, who does it.
        table: the table that is being loaded, and how far that is.
        status: as HTTP has it, once the change has ended.
        version: that serves then; empty where none does.
        error: why it failed.
        since: when it began, in seconds since the epoch.
    """

    number: int
    model: str
    change: Change
    proceed: Callable[[], None]
    table: tuple[str, TableProgress] | None = None
    status: int | None = None
    version: str = ""
    error: BaseException | None = None
    since: float = field(default_factory=time.time)
    _lines: LogProgress = field(default_factory=LogProgress)

    def start(self, tag: str, rows: int, size_bytes: int) -> None:
        """A table is about to be read."""
        self.proceed()
        self._lines.start(tag, rows, size_bytes)
        self.table = ((split_tag(tag) or ("", "", tag))[2], TableProgress(rows, size_bytes))

    def advance(self, tag: str, rows: int) -> None:
        """More rows are in the databases."""
        self._lines.advance(tag, rows)
        if self.table:
            self.table[1].advance(rows)
        self.proceed()

    def finish(self, tag: str) -> None:
        """All rows of the table are."""
        self._lines.finish(tag)
        if self.table:
            self.table[1].end()

    def run(self, call: Callable[["ModelChange"], str]) -> None:
        """Make the change, and log how it ended."""
        status = 200
        try:
            self.version = call(self)
        except BaseException as error:  # noqa: BLE001 - the end of a thread: who waits for it raises the error
            self.error, status = error, status_of(error)
            self.change.error = str(error) if isinstance(error, HPSError | MemoryError) else "internal error"
            if status == 500:
                more = fields(request_id=self.change.request_id)
                _log.error("%s failed unexpectedly", self.change.what, exc_info=error, extra=more)
        self.change.end("done" if self.error is None else f"failed ({status})")
        self.status = status  # the last one: whoever sees it sees the others


class ModelChanges:
    """Runs changes of models, one of a model at a time and a few in all. *One per event loop.*

    A change goes on when the client that asked for it goes away.

    Args:
        proceed: called at each report about rows that are loaded; what it raises ends the change.

    Attributes:
        latest: of each model, the change that is under way or ended last.
    """

    def __init__(self, proceed: Callable[[], None]) -> None:
        self.latest: dict[str, ModelChange] = {}
        self._proceed = proceed
        self._numbers = count(1)

    async def run(
        self, model: str, change: Change, call: Callable[[ModelChange], str], *, wait: bool = True, others: str = ""
    ) -> ModelChange:
        """Begin a change, and wait for its end if `wait`.

        Args:
            call: makes it, and returns the version that serves then; it may report to the change as to a `Progress`.
            others: what somebody else does to the model, if anything.

        Raises:
            ConflictError: another change of the model is under way.
            OverloadedError: too many changes of other models are.
            HPSError: what the change raised, if `wait`.
        """
        under_way = [one for one in self.latest.values() if one.status is None]
        if others or any(one.model == model for one in under_way):
            what = others or "changing"
            raise ConflictError(f"changing model {model!r}: {what} it is under way; try again when that has ended")
        if len(under_way) >= MOST_AT_ONCE:
            what = f"{MOST_AT_ONCE} models are being changed; try again later"
            raise OverloadedError("changes", f"changing model {model!r}: {what}")
        one = ModelChange(next(self._numbers), model, change, self._proceed)
        while len(self.latest) >= _MOST_REMEMBERED:
            del self.latest[next(name for name, old in self.latest.items() if old.status is not None)]
        self.latest.pop(model, None)
        self.latest[model] = one
        change.kept = True
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            one.run(call)
            with suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=work, name=f"hps-change-{model[:40]}", daemon=True).start()
        if wait:
            await ended.wait()
            if one.error is not None:
                raise one.error
        return one
