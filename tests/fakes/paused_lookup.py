"""A lookup that stops where it reads its keys, as one does whose thread gets no processor."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

import hps
from hps.tensors.batch import Batch
from hps.types import KeyArray


class PausedBatch(Batch):
    """A batch of one table whose keys come late."""

    def __init__(self, table: int, keys: KeyArray, dim: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._keys = (keys,)
        outs, founds = (np.zeros((keys.size, dim), np.float32),), (np.zeros(keys.size, np.bool_),)
        super().__init__((table,), (keys.size,), self._keys, outs, founds)

    @property
    def keys(self) -> tuple[KeyArray, ...]:  # type: ignore[override]
        self.reached.set()
        assert self.go_on.wait(60)
        return self._keys

    @keys.setter
    def keys(self, keys: tuple[KeyArray, ...]) -> None: ...


@contextmanager
def paused_lookup(server: hps.HPS, model: str, batch: PausedBatch) -> Iterator[Future[int | None]]:
    """Begin to look the batch up in the version that serves; the lookup goes on at the latest at the end."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.lookup_batch, server.model(model), batch)
        try:
            assert batch.reached.wait(60)
            yield running
        finally:
            batch.go_on.set()
