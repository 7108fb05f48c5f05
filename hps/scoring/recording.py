"""A sample of the requests for scores that a deployment answers, kept in memory with the consent of its configuration."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from hps.scoring.features import OFFSETS, WEIGHTS, InputValues
from hps.scoring.packing import PackedRequest
from hps.scoring.scorer import Request
from hps.scoring.signature import Signature

_PAUSE_S: Final = 0.1  # between two recorded requests, so that the sample is of minutes
_MOST_SHARE: Final = 0.01  # of the time; a request of a million keys takes a tenth of a second
_MOST_BYTES: Final = 64 << 20


class RequestRecorder:
    """Keeps the last requests, at most ten a second and 1 % of the time, as `requests.jsonl` has them. *Thread-safe.*

    Args:
        count: most requests to keep; of large ones fewer, 64 MB of text.
        features: record features that are no keys, too.
        max_samples: `max_batch_size` of the model.
    """

    def __init__(
        self,
        signature: Signature,
        max_samples: int,
        model: str,
        count: int,
        *,
        features: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signature, self._max_samples, self._model = signature, max_samples, model
        self._count = count
        sources = (source for lookup in signature.lookups for source in (lookup.keys, lookup.offsets, lookup.weights) if source)
        keys = {source.name for source in sources}
        recorded = (feature.is_lookup or features or feature.name in keys for feature in signature.features)
        self._places = [place for place, is_recorded in enumerate(recorded) if is_recorded]
        self._clock = clock
        self._due = clock()
        self._lock = threading.Lock()
        self._lines: deque[str] = deque()
        self._bytes = 0

    def see(self, request: Request) -> None:
        """Record a request if the pause since the last one is over. Its values are copied."""
        if self._clock() < self._due or not self._lock.acquire(blocking=False):
            return
        try:
            began = self._clock()
            self._due = began + _PAUSE_S
            if isinstance(request, PackedRequest):
                request = request.unpacked(self._signature, self._max_samples, self._model)
            inputs: dict[str, Any] = {}
            for place in self._places:
                inputs |= _listed(self._signature.features[place].name, request.given[place])
            line = json.dumps({"inputs": inputs})
            self._lines.append(line)
            self._bytes += len(line)
            while len(self._lines) > self._count or self._bytes > _MOST_BYTES:
                self._bytes -= len(self._lines.popleft())
            self._due = max(self._due, began + (self._clock() - began) / _MOST_SHARE)
        finally:
            self._lock.release()

    def lines(self) -> list[str]:
        """Return the recorded requests, the oldest first."""
        with self._lock:
            return list(self._lines)


def _listed(name: str, given: InputValues) -> Mapping[str, Any]:
    parts = ((name, given.values), (name + OFFSETS, given.offsets), (name + WEIGHTS, given.weights))
    return {part: values.tolist() for part, values in parts if values is not None and given.rows}
