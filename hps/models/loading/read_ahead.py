"""Reads the rows of sparse model files ahead of their use, within a few chunks of memory."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hps.errors import ModelFileError
from hps.models.files import SparseModel, extend_checksum, join_checksums
from hps.models.sealed import SealedModel
from hps.types import FloatArray, KeyArray

_READ_TIMEOUT_S = 600.0  # for one chunk, far beyond a file system's own timeouts

Allocate = Callable[..., np.ndarray]


class Chunk(NamedTuple):
    """Some rows of a model, in arrays that the next chunk may overwrite."""

    first_row: int
    keys: KeyArray  # (n,)
    vectors: FloatArray  # (n, dim)
    checksum: str  # of these rows alone, as `extend_checksum` computes it; empty if nobody asked


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
    with closing(read_chunks(model, ranges, allocate)) as chunks:
        for chunk in chunks:
            yield chunk.first_row, chunk.keys, chunk.vectors


def read_chunks(
    model: SparseModel | SealedModel, ranges: Iterable[tuple[int, int]], allocate: Allocate = np.empty, *, sums: bool = False
) -> Generator[Chunk, None, None]:
    """As `read_ahead`; with `sums`, the reading threads compute the checksum of each chunk, too.

    Raises:
        ModelFileError: as in `OpenedFile`, or a chunk took too long. Earlier rows are of unchanged files.
    """
    # A chunk is read in parts of a size that suits the file system. One buffer more than chunks ahead, so that all threads read
    # while the caller uses the last chunk.
    length = min(model.chunk_rows, model.rows)
    free = deque(
        (allocate((length,), np.int64), allocate((length, model.dim), np.float32)) for _ in range(model.chunks_ahead + 1)
    )
    pending: deque[tuple[int, int, tuple[KeyArray, FloatArray], list[Future[None]], Future[str] | None]] = deque()
    remaining = iter(ranges)
    pool = ThreadPoolExecutor(model.parallel_reads, thread_name_prefix="hps-model-reader")
    stuck = False
    try:
        while True:
            while free and (bounds := next(remaining, None)) is not None:
                start, count = bounds[0], bounds[1] - bounds[0]
                buffer = free.popleft()
                parts = model.parts(start, buffer[0][:count], buffer[1][:count])
                reading = [pool.submit(part) for part in parts]
                sum_ = partial(_checksum, reading, buffer[0][:count], buffer[1][:count])
                pending.append((start, count, buffer, reading, pool.submit(sum_) if sums else None))
            if not pending:
                return
            start, count, buffer, reading, summing = pending.popleft()
            done, late = wait(_all_of(reading, summing), _READ_TIMEOUT_S, FIRST_EXCEPTION)
            for part in done:
                part.result()
            if stuck := bool(late):
                raise ModelFileError(
                    f"reading {model.place}: rows from {start} on did not arrive within {_READ_TIMEOUT_S:.0f} s"
                )
            yield Chunk(start, buffer[0][:count], buffer[1][:count], summing.result() if summing else "")
            free.append(buffer)
    finally:
        pool.shutdown(wait=not stuck, cancel_futures=True)  # a stuck read would never end


def _all_of(reading: list[Future[None]], summing: Future[str] | None) -> list[Future[Any]]:
    return [*reading, summing] if summing else [*reading]


def _checksum(reading: Sequence[Future[None]], keys: KeyArray, vectors: FloatArray) -> str:
    """Compute the checksum of a chunk once it is read; its parts were started before, so some thread reads each."""
    for part in reading:
        part.result(_READ_TIMEOUT_S)
    return extend_checksum("", keys, vectors)


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
    with closing(read_chunks(model, chunk_ranges(model, 0, model.rows), sums=True)) as chunks:
        for chunk in chunks:
            checksum = join_checksums(checksum, chunk.checksum, chunk.keys, chunk.vectors)
            yield model.owned(chunk.keys, chunk.vectors)
    model.check_content(checksum)
    return checksum
