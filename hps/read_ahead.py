"""Reads a sparse model ahead of whoever inserts it, within a few chunks of memory."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from hps.errors import ModelFileError
from hps.model_files import SparseModel
from hps.types import FloatArray, KeyArray

_READS_AHEAD = 4 if (os.cpu_count() or 1) >= 8 else 2
"""Chunks being read or waiting while one is inserted: with that one, three or five buffers of CHUNK_BYTES in all. A thread
reads 8 GB/s from the page cache; a GPU takes more than two of them give."""

_READ_TIMEOUT_S = 600.0  # of one chunk, far beyond what a file system's own timeouts allow


Allocate = Callable[..., np.ndarray]


def read_ahead(
    model: SparseModel, ranges: Iterable[tuple[int, int]], allocate: Allocate = np.empty
) -> Generator[tuple[int, KeyArray, FloatArray], None, None]:
    """Yield (first row, keys, vectors) of each range of rows, none longer than a chunk, while threads read the next ones.

    The arrays are lent: they are filled anew once the next chunk is asked for. Closing the generator ends the reading.

    Args:
        model: the files.
        ranges: of rows.
        allocate: makes the arrays, by shape and dtype: `EmbeddingCache.host_buffer` where they go to a cache.
    """
    length = min(model.chunk_rows, model.rows)
    free = deque((allocate((length,), np.int64), allocate((length, model.dim), np.float32)) for _ in range(_READS_AHEAD + 1))
    pending: deque[tuple[int, int, tuple[KeyArray, FloatArray], Future[None]]] = deque()
    remaining = iter(ranges)
    pool = ThreadPoolExecutor(_READS_AHEAD, thread_name_prefix="hps-model-reader")
    stuck = False
    try:
        while True:
            while free and (bounds := next(remaining, None)) is not None:
                start, count = bounds[0], bounds[1] - bounds[0]
                buffer = free.popleft()
                pending.append((start, count, buffer, pool.submit(model.read, start, buffer[0][:count], buffer[1][:count])))
            if not pending:
                return
            start, count, buffer, reading = pending.popleft()
            stuck = not wait([reading], _READ_TIMEOUT_S).done
            if stuck:
                raise ModelFileError(f"reading {model.place}: rows from {start} on did not come in {_READ_TIMEOUT_S:.0f} s")
            reading.result()
            yield start, buffer[0][:count], buffer[1][:count]
            free.append(buffer)
    finally:
        pool.shutdown(wait=not stuck, cancel_futures=True)
