"""The differences of two sparse models make the newer one of the older one, and say nothing else."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.errors import ModelFileChangedError
from hps.models import files
from hps.models.deltas import TableSource, open_table_files
from hps.models.differences import differences, rows_of
from hps.models.files import open_sparse_model
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model, write_version

DIM = 3


def write(directory: Path, rows: list[tuple[int, int]], dim: int = DIM):
    """A model of (key, value) rows whose vectors hold the bits of the value."""
    keys = np.array([key for key, _ in rows], np.int64)
    vectors = np.array([[value] * dim for _, value in rows], np.uint32).view(np.float32).reshape(-1, dim)
    write_sparse_model(directory, (keys, vectors), overwrite=True)
    return open_sparse_model(directory, dim)


def found(old, new) -> tuple[dict[int, int], set[int], int]:
    changed: dict[int, int] = {}
    deleted: set[int] = set()
    rows = 0
    for difference in differences(old, new):
        values = difference.vectors.view(np.uint32)[:, 0].tolist()
        assert not changed.keys() & set(difference.keys.tolist())  # each key once
        changed |= dict(zip(difference.keys.tolist(), values, strict=True))
        deleted |= set(difference.deleted.tolist())
        rows += difference.rows
    return changed, deleted, rows


ROWS = st.lists(st.tuples(st.sampled_from([0, 1, 2, -1, 2**63 - 1, -(2**63)]), st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(old=ROWS, new=ROWS, chunk_rows=st.sampled_from([1, 2, 100]))
def test_they_make_the_newer_of_the_older(tmp_path_factory: pytest.TempPathFactory, old, new, chunk_rows: int) -> None:
    place, patch = tmp_path_factory.mktemp("models"), pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(files, "CHUNK_BYTES", chunk_rows * (8 + 4 * DIM))
        changed, deleted, rows = found(write(place / "old", old), write(place / "new", new))
    before, after = dict(old), dict(new)
    assert changed == {key: value for key, value in after.items() if before.get(key) != value}
    assert deleted == before.keys() - after.keys()
    assert rows == len(new)


@pytest.mark.parametrize(("dim", "element"), [(1, 0), (2, -1), (5, 0), (5, -1)])
def test_one_bit_of_one_element_is_a_difference(tmp_path: Path, dim: int, element: int) -> None:
    keys, vectors = np.arange(1000, dtype=np.int64), np.zeros((1000, dim), np.float32)
    write_sparse_model(tmp_path / "old", (keys, vectors))
    vectors[7, element] = -0.0  # equal to 0.0 as a number
    vectors[9, element] = np.nan
    write_sparse_model(tmp_path / "new", (keys[::-1].copy(), vectors[::-1].copy()))
    old, new = (open_sparse_model(tmp_path / name, dim) for name in ("old", "new"))
    assert set(found(old, new)[0]) == {7, 9}
    assert found(new, new)[:2] == ({}, set())
    write_sparse_model(tmp_path / "old", (keys, vectors), overwrite=True)
    with pytest.raises(ModelFileChangedError):
        list(rows_of(old))


def test_a_version_that_is_a_delta_is_compared_whole(tmp_path: Path) -> None:
    keys, vectors = np.arange(10, dtype=np.int64), np.zeros((10, DIM), np.float32)
    write_version(tmp_path / "1", {"item": (keys, vectors)})
    write_version(tmp_path / "2", {"item": (keys[:2], vectors[:2] + 1)}, delta_of="1", deleted={"item": keys[9:]})
    base = TableSource(str(tmp_path / "1" / "item"))
    new = open_table_files(TableSource(str(tmp_path / "2" / "item"), base=base), DIM, sources=ModelSources())
    changed, deleted, _ = found(open_sparse_model(tmp_path / "1" / "item", DIM), new)
    assert (set(changed), deleted) == ({0, 1}, {9})
