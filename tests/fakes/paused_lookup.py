"""A lookup that stops where it reads its keys, as one does whose thread gets no processor."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

import hps
from hps.tensors.segments import Segment
from hps.types import KeyArray


class PausedSegment(Segment):
    """A segment whose keys come late."""

    def __init__(self, table: int, keys: KeyArray, dim: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._keys = keys
        super().__init__(table, keys, np.zeros((keys.size, dim), np.float32), np.zeros(keys.size, np.bool_), keys.size)

    @property
    def keys(self) -> KeyArray:  # type: ignore[override]
        self.reached.set()
        assert self.go_on.wait(60)
        return self._keys

    @keys.setter
    def keys(self, keys: KeyArray) -> None: ...


@contextmanager
def paused_lookup(server: hps.HPS, model: str, segment: PausedSegment) -> Iterator[Future[int | None]]:
    """Begin to look the segment up in the version that serves; the lookup goes on at the latest at the end."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.lookup_segments, server.model(model), [segment])
        try:
            assert segment.reached.wait(60)
            yield running
        finally:
            segment.go_on.set()
