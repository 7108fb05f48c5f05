"""Embeddings that several processes hold together are saved and packaged by all of them, or by none."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from tests.servers.child_processes import ROOT, ChildProcesses
from tests.servers.running_service import document_of
from tests.servers.sharded_rank import DIMS, ROWS, Net, examples, jagged

Run = Callable[[str, int], list[Any]]
SECONDS = 150  # of a job; torch waits for 60 s for a rank that does not answer


@pytest.fixture
def run(tmp_path: Path, children: ChildProcesses) -> Run:
    """Runs a scenario on some ranks; returns the answer of each, None from one that died."""

    def start(scenario: str, world: int) -> list[Any]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.servers.sharded_rank", scenario, tmp_path]
        started = [children.start(*command, rank, world, cwd=ROOT, stdout=subprocess.DEVNULL) for rank in range(world)]
        said = [one.communicate(timeout=SECONDS)[1] for one in started]
        answers = [tmp_path / f"{rank}.json" for rank in range(world)]
        if not all(one.exists() or process.returncode == 9 for one, process in zip(answers, started, strict=True)):
            raise AssertionError("\n".join(said))
        return [json.loads(one.read_text()) if one.exists() else None for one in answers]

    return start


def table(place: Path, name: str, dim: int) -> dict[int, list[float]]:
    keys, rows = np.fromfile(place / name / "key", np.int64), np.fromfile(place / name / "emb_vector", np.float32)
    return dict(zip(keys.tolist(), rows.reshape(-1, dim).tolist(), strict=True))


def versions(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("[0-9]*"))


OTHER_WORLDS = [pytest.param(world, marks=pytest.mark.slow) for world in (1, 2)]


@pytest.mark.parametrize("world", [*OTHER_WORLDS, 3])
def test_rows_columns_and_copies_are_saved_as_whole_tables(tmp_path: Path, run: Run, world: int) -> None:
    assert run("saved", world) == [["1", "2", "3", str(tmp_path / "m")]] * world
    net = Net()
    for name, dim in DIMS.items():
        rows = net.get_submodule(name).weight.detach()  # type: ignore[union-attr,operator]
        assert table(tmp_path / "m" / "1", name, dim) == dict(enumerate(rows.tolist()))
        assert table(tmp_path / "m" / "2", name, dim) == dict(enumerate((2 * rows).tolist()))
        changed = {"by_row": [0, 4, 9], "by_column": [3], "plain": []}[name]
        assert table(tmp_path / "m" / "3", name, dim) == {number: (2 * rows[number]).tolist() for number in changed}
    assert json.loads((tmp_path / "m" / "model.json").read_text())["sparse_files"] == list(DIMS)


def score(place: Path, inputs: Any) -> hps.Scores:
    with hps.HPS(document_of(model_repository=str(place))) as server:
        return server.score("m", inputs)


@pytest.mark.parametrize("world", [*OTHER_WORLDS, 3])
def test_a_module_with_sharded_embeddings_is_packaged(tmp_path: Path, run: Run, world: int) -> None:
    inputs = ["by_row", "by_column", "tags"]
    assert run("packaged", world) == [[["1", True, inputs], ["2", True, inputs]]] * world
    assert versions(tmp_path / "m") == ["1", "2"]
    ids, tags = (torch.cat([one, one.flip(0)]) for one in examples())
    ids[1] = 3  # the padding of a table, which lookups ignore
    found = score(tmp_path, {"by_row": ids[:, 0], "by_column": ids[:, 1], "tags": tags})
    assert found.version == "2"
    np.testing.assert_allclose(found["score"], Net()(ids, tags).detach(), atol=1e-6)


def test_a_rank_that_fails_fails_all_of_them_and_leaves_nothing(tmp_path: Path, run: Run) -> None:
    found = run("failing", 3)
    names = "got 2 names of outputs, expected 1"
    expected = {
        "a rank": ["rank 2 failed: MemoryError: no memory for rows"] * 3,
        "after it": ["nothing"] * 3,
        "the leader": ["1: it exists; write another version"] * 3,
        "a rank in package": [f"rank 1 failed: packaging: {names}", names, f"rank 1 failed: packaging: {names}"],
        "the leader in package": [names, f"rank 0 failed: packaging: {names}", f"rank 0 failed: packaging: {names}"],
        "late": ["rank 1 does not answer", "rank 0 does not answer", ""],  # the last one gives up by itself, or is told
        "after all": ["nothing"] * 3,
    }
    for what, messages in expected.items():
        for rank, message in enumerate(messages):
            assert message in found[rank][what], (what, rank)
    assert "nothing" not in {one["late"] for one in found}
    assert versions(tmp_path / "m") == ["1", "2"]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(("scenario", "dead"), [("dying", 2), pytest.param("dying_leader", 0, marks=pytest.mark.slow)])
def test_a_rank_that_dies_leaves_no_version(tmp_path: Path, run: Run, scenario: str, dead: int) -> None:
    found = run(scenario, 3)
    assert found.pop(dead) is None
    assert all(f"rank {dead} does not answer" in one for one in found)
    assert not versions(tmp_path / "m")
    assert not (tmp_path / "m" / "model.json").exists()


@pytest.mark.slow
def test_what_fsdp_shards_is_saved_and_packaged(tmp_path: Path, run: Run) -> None:
    refused = "InvalidInputError: packaging top.weight: got a DTensor outside of the embeddings, expected a tensor; gather it"
    assert run("wrapped", 3) == [["1", True, refused]] * 3
    net = Net()
    for name, dim in DIMS.items():
        rows = net.get_submodule(name).weight.detach()  # type: ignore[union-attr,operator]
        assert table(tmp_path / "m" / "1", name, dim) == dict(enumerate(rows.tolist()))
        assert table(tmp_path / "net" / "1", name, dim) == dict(enumerate(rows.tolist()))


def test_bags_that_torchrec_shards_are_packaged_and_converted(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("torchrec")
    (first, *others) = run("torchrec_bags", 2)
    assert others == [first]
    assert first[:2] == [["1", "2"], [True, True]]
    sparse = jagged(7)
    bags = {name: hps.Bags(sparse[name].values(), sparse[name].offsets()) for name in "fghi"}
    np.testing.assert_allclose(score(tmp_path, bags)["score"], first[2], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "world"), [("torchrec_rows", 3), ("torchrec_dtensors", 2)])
def test_tables_that_torchrec_shards_are_saved(tmp_path: Path, run: Run, scenario: str, world: int) -> None:
    pytest.importorskip("torchrec")
    whole = {name: np.full((ROWS, 8), np.nan, np.float32) for name in ("by_row", "by_column", "by_table")}
    for one in run(scenario, world):
        for name, row, column, values in one:
            part = np.array(values, np.float32)
            whole[name][row : row + part.shape[0], column : column + part.shape[1]] = part
    for name, rows in whole.items():
        assert table(tmp_path / "m" / "1", name, 8) == dict(enumerate(rows.tolist()))
