"""A checkpoint that torchrec and torch write with three ranks, as a source of `hps import`."""

from pathlib import Path

import numpy as np
import pytest

from hps.models.importing.checkpoint import find_tables, list_arrays
from tests.tables.trainer_dumps import TORCHREC_TABLES, sharded_checkpoint, torchrec_checkpoint


def test_torchrec_tables_of_three_ranks_come_back_whole(tmp_path: Path) -> None:
    """Sharded by rows, by columns, and whole on one rank; the same tables as those that other tests write by hand."""
    pytest.importorskip("torchrec")
    tables = torchrec_checkpoint(tmp_path / "dump")
    found = find_tables(tmp_path / "dump", TORCHREC_TABLES)
    assert found.keys() == tables.keys()
    for name, table in found.items():
        keys, vectors = zip(*((keys, vectors.copy()) for keys, vectors in table.chunks()), strict=True)
        assert np.array_equal(np.concatenate(keys), np.arange(len(tables[name])))
        assert np.array_equal(np.concatenate(vectors), tables[name])
    sharded_checkpoint(tmp_path / "by hand")
    assert set(list_arrays(tmp_path / "by hand")) <= set(list_arrays(tmp_path / "dump"))
