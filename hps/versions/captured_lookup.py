"""A lookup as a CUDA graph that follows its model from version to version."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from hps.errors import NotReadyError
from hps.lookup.session import RecordedLookup
from hps.versions.deployment import Deployment


class CapturedLookup:
    """A captured lookup of fixed tensors. *One per thread.* A context manager; created by `HPS.capture`.

    Every replay that starts after an `insert` has returned reads the new vectors. After another version has taken over, the
    next replay captures the lookup again from that version.

    Until closed, it keeps the version it was captured from in memory, even after `undeploy`.
    """

    def __init__(self, serving: Callable[[], Deployment], record: Callable[[Deployment], RecordedLookup]) -> None:
        self._serving = serving
        self._record = record
        self._deployment = serving()
        self._recorded: RecordedLookup | None = record(self._deployment)

    def replay(self) -> None:
        """Look up the keys that the tensor holds when the stream reaches the graph. Does not wait.

        Runs on the current stream of the keys' framework.

        Raises:
            NotReadyError: closed.
            DatabaseError: the database failed in an earlier replay, so unread keys got the default vector.
            UnknownModelError: the model was undeployed.
            InvalidInputError: the serving version cannot answer without waiting.
        """
        if self._recorded is None:
            raise NotReadyError("replaying a captured lookup: it is closed; capture another")
        if (serving := self._serving()) is not self._deployment:
            recorded = self._record(serving)
            self._recorded.close()
            self._deployment, self._recorded = serving, recorded
        self._recorded.launch()

    def close(self) -> None:
        """Free the graph after its last replay. Idempotent."""
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
