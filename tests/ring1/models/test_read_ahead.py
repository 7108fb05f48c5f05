"""Reading ahead: the right rows in order, within three buffers, and nothing left behind."""

from pathlib import Path

import numpy as np
import pytest

from hps.errors import ModelFileError
from hps.filesystems.local import LocalFileSystem
from hps.models.files import SparseModel, open_sparse_model
from hps.models.loading.read_ahead import read_ahead
from hps.models.writer import write_sparse_model
from hps.testing.waiting import wait_until
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors
from tests.tables.table_loads import readers

ROWS, DIM, CHUNK_ROWS = 1000, 4, 64
RANGES = [(start, min(start + CHUNK_ROWS, ROWS)) for start in range(0, ROWS, CHUNK_ROWS)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SparseModel:
    monkeypatch.setattr("hps.models.files.CHUNK_BYTES", CHUNK_ROWS * (8 + 4 * DIM))
    monkeypatch.setattr(LocalFileSystem, "parallel_reads", 2)  # on any number of cores
    write_sparse_model(tmp_path / "m", sample_chunks(ROWS, DIM, seed=1))
    return open_sparse_model(tmp_path / "m", DIM)


@pytest.mark.parametrize("ranges", [RANGES, RANGES[::-1], [(0, 1), (990, 1000), (3, 67), (3, 67)], [(999, 1000)], []])
def test_every_range_comes_in_its_turn(model: SparseModel, ranges: list[tuple[int, int]]) -> None:
    got = []
    for start, keys, vectors in read_ahead(model, ranges):
        np.testing.assert_array_equal(keys, np.arange(start, start + keys.size))
        np.testing.assert_array_equal(vectors, sample_vectors(keys, DIM, 1))
        got.append((start, start + keys.size))
    assert got == ranges
    assert readers() == []


def test_a_chunk_stays_as_it_is_while_it_is_lent(model: SparseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads ahead are done by the time the chunk is looked at again."""
    read: list[int] = []

    class Announcing(LocalFileSystem):
        def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
            super().read_into(path, offset, buffer, version)
            read.append(offset)

    monkeypatch.setattr("hps.filesystems.local.LocalFileSystem", Announcing)
    for i, (_, keys, vectors) in enumerate(read_ahead(open_sparse_model(model.place, DIM), RANGES)):
        ahead = 2 * min(i + 3, len(RANGES))  # two files of three chunks: the buffer of a fourth is lent
        wait_until(lambda ahead=ahead: len(read) >= ahead, "the next chunks are read")
        np.testing.assert_array_equal(vectors, sample_vectors(keys, DIM, 1))
        assert len(read) == ahead


def test_closing_ends_the_reading(model: SparseModel) -> None:
    chunks = read_ahead(model, RANGES)
    next(chunks)
    assert readers()
    chunks.close()
    assert readers() == []


def test_an_error_comes_in_the_turn_of_its_range(model: SparseModel) -> None:
    chunks = read_ahead(model, [(0, 10), (995, 1005), (10, 20)])
    assert next(chunks)[0] == 0
    with pytest.raises(ModelFileError, match="ends at byte"):
        next(chunks)
    assert readers() == []
