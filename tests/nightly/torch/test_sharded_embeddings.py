"""Sharded embeddings in jobs of other sizes, with FSDP's shards, with torchrec's rows, and of which the leader dies."""

from pathlib import Path

import numpy as np
import pytest

from tests.ring2.torch.test_sharded_embeddings import check_dead, check_packaged, check_saved, run, table
from tests.servers.sharded_rank import DIMS, ROWS, Net


@pytest.mark.parametrize("world", [1, 2])
def test_one_and_two_ranks_save_and_package(tmp_path: Path, world: int) -> None:
    job = run("saved,packaged", world, tmp_path)
    check_saved(job, world)
    check_packaged(job, world)


def test_a_leader_that_dies_leaves_no_version(tmp_path: Path) -> None:
    check_dead(run("dying_leader", 3, tmp_path), "dying_leader", 0)


def test_what_fsdp_shards_is_saved_and_packaged(tmp_path: Path) -> None:
    refused = "InvalidInputError: packaging top.weight: got a DTensor outside of the embeddings, expected a tensor; gather it"
    assert run("wrapped", 3, tmp_path).of("wrapped") == [["1", True, refused]] * 3
    net, place = Net(), tmp_path / "wrapped"
    for name, dim in DIMS.items():
        rows = net.get_submodule(name).weight.detach()  # type: ignore[union-attr,operator]
        assert table(place / "m" / "1", name, dim) == dict(enumerate(rows.tolist()))
        assert table(place / "net" / "1", name, dim) == dict(enumerate(rows.tolist()))


@pytest.mark.parametrize(("scenario", "world"), [("torchrec_rows", 3), ("torchrec_dtensors", 2)])
def test_tables_that_torchrec_shards_are_saved(tmp_path: Path, scenario: str, world: int) -> None:
    pytest.importorskip("torchrec")
    whole = {name: np.full((ROWS, 8), np.nan, np.float32) for name in ("by_row", "by_column", "by_table")}
    for one in run(scenario, world, tmp_path).of(scenario):
        for name, row, column, values in one:
            part = np.array(values, np.float32)
            whole[name][row : row + part.shape[0], column : column + part.shape[1]] = part
    for name, rows in whole.items():
        assert table(tmp_path / scenario / "m" / "1", name, 8) == dict(enumerate(rows.tolist()))
