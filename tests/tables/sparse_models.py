"""Reads sparse models chunk by chunk, through the same parts as a load."""

from collections.abc import Iterator

import numpy as np

from hps.models.files import SparseModel
from hps.types import FloatArray, KeyArray


def chunks_of(model: SparseModel, chunk_rows: int | None = None, start_row: int = 0) -> Iterator[tuple[KeyArray, FloatArray]]:
    """Yield the rows from `start_row` on in file order; each chunk is read when it is asked for."""
    model.verify()
    step = chunk_rows or model.chunk_rows
    for start in range(start_row, model.rows, step):
        count = min(step, model.rows - start)
        keys, vectors = np.empty(count, np.int64), np.empty((count, model.dim), np.float32)
        for part in model.parts(start, keys, vectors):
            part()
        yield keys, vectors
