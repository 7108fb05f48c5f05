"""Reads the rows of sparse model files ahead of their use, within a few chunks of memory."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing

import numpy as np

from hps.errors import ModelFileError
from hps.models.files import SparseModel, extend_checksum
from hps.models.sealed import SealedModel
from hps.types import FloatArray, KeyArray

_READ_TIMEOUT_S = 600.0  # for one chunk, far beyond a file system's own timeouts

Allocate = Callable[..., np.ndarray]


def read_ahead(
    model: SparseModel | SealedModel, ranges: Iterable[tuple[int, int]], allocate: Allocate = np.empty
) -> Generator[tuple[int, KeyArray, FloatArray], None, None]:
    """Yield (first row, keys, vectors) of each range of rows, none longer than a chunk, while threads read the next ones.

    The next chunk may overwrite the arrays. Closing the generator stops reading.

    Args:
        allocate: makes arrays by shape and dtype; `EmbeddingCache.host_buffer` for a cache.

    Raises:
        ModelFileError: as in `OpenedFile`, or a chunk took too long. Earlier rows are of unchanged files.
    """
    # A chunk is read in parts of a size that suits the file system. One buffer more than chunks ahead, so that all threads read
    # while the caller uses the last chunk.
    length = min(model.chunk_rows, model.rows)
    free = deque(
        (allocate((length,), np.int64), allocate((length, model.dim), np.float32)) for _ in range(model.chunks_ahead + 1)
    )
    pending: deque[tuple[int, int, tuple[KeyArray, FloatArray], list[Future[None]]]] = deque()
    remaining = iter(ranges)
    pool = ThreadPoolExecutor(model.parallel_reads, thread_name_prefix="hps-model-reader")
    stuck = False
    try:
        while True:
            while free and (bounds := next(remaining, None)) is not None:
                start, count = bounds[0], bounds[1] - bounds[0]
                buffer = free.popleft()
                parts = model.parts(start, buffer[0][:count], buffer[1][:count])
                pending.append((start, count, buffer, [pool.submit(part) for part in parts]))
            if not pending:
                return
            start, count, buffer, reading = pending.popleft()
            done, late = wait(reading, _READ_TIMEOUT_S, FIRST_EXCEPTION)
            for part in done:
                part.result()
            if stuck := bool(late):
                raise ModelFileError(
                    f"reading {model.place}: rows from {start} on did not arrive within {_READ_TIMEOUT_S:.0f} s"
                )
            yield start, buffer[0][:count], buffer[1][:count]
            free.append(buffer)
    finally:
        pool.shutdown(wait=not stuck, cancel_futures=True)  # a stuck read would never end


def chunk_ranges(model: SparseModel | SealedModel, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cut the rows [first, last) into chunks."""
    return ((start, min(start + model.chunk_rows, last)) for start in range(first, last, model.chunk_rows))


def read_rows(model: SparseModel | SealedModel) -> Generator[tuple[KeyArray, FloatArray], None, str]:
    """Yield the rows of the model's share, then compare the files with `version.json`. The next chunk may overwrite the arrays.

    Returns:
        The checksum of all rows; see `extend_checksum`.

    Raises:
        ModelFileError: the files changed, cannot be read, or are not those that were written.
    """
    checksum = 16 * "0"
    with closing(read_ahead(model, chunk_ranges(model, 0, model.rows))) as chunks:
        for _, keys, vectors in chunks:
            checksum = extend_checksum(checksum, keys, vectors)
            yield model.owned(keys, vectors)
    model.check_content(checksum)
    return checksum
