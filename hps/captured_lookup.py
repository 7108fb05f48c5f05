"""A lookup as a CUDA graph that follows its model from version to version."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from hps.deployment import Deployment
from hps.errors import NotReadyError
from hps.lookup.session import RecordedLookup


class CapturedLookup:
    """A lookup of fixed tensors as a CUDA graph. *One per thread.* A context manager; made by `HPS.capture`.

    It answers from what the model has when it is replayed: every replay that starts after an `insert` has returned gets the new
    vectors. When another version of the model has taken over, the next replay captures the lookup anew, from that.

    An open one keeps the version that it was captured from in memory, also when that was undeployed: so close it.
    """

    def __init__(self, serving: Callable[[], Deployment], record: Callable[[Deployment], RecordedLookup]) -> None:
        self._serving = serving
        self._record = record
        self._deployment = serving()
        self._recorded: RecordedLookup | None = record(self._deployment)

    def replay(self) -> None:
        """Look up the keys that the tensor has when the stream gets there; on the stream that the keys' framework works on now.

        It waits for nothing.

        Raises:
            NotReadyError: it was closed.
            DatabaseError: an earlier replay gave keys the default vector because nobody could read theirs.
            UnknownModelError: the model was undeployed.
            InvalidInputError: the version that serves now does not answer without waiting.
        """
        if self._recorded is None:
            raise NotReadyError("replaying a captured lookup: it is closed; capture another")
        if (serving := self._serving()) is not self._deployment:
            recorded = self._record(serving)
            self._recorded.close()
            self._deployment, self._recorded = serving, recorded
        self._recorded.launch()

    def close(self) -> None:
        """Free the graph, once its last replay has ended. Closing twice changes nothing."""
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
