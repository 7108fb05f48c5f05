"""Embeddings that several processes hold together are saved and packaged by all of them, or by none."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import hps
from hps.testing.waiting import PATIENCE_S
from tests.ring1.torch.test_quantised import score
from tests.servers.child_processes import ROOT, ChildProcesses
from tests.servers.sharded_rank import DIMS, Net, examples, jagged


class Job(NamedTuple):
    """What some ranks have made in a directory, and the answers of each by scenario; a rank that dies lacks its last one."""

    place: Path
    answers: list[dict[str, Any]]

    def of(self, scenario: str) -> list[Any]:
        return [answers[scenario] for answers in self.answers if scenario in answers]


def run(scenarios: str, world: int, place: Path) -> Job:
    children = ChildProcesses()
    command = [sys.executable, "-W", "ignore", "-m", "tests.servers.sharded_rank", scenarios, place]
    try:
        started = [children.start(*command, rank, world, cwd=ROOT, stdout=subprocess.DEVNULL) for rank in range(world)]
        said = [one.communicate(timeout=2 * PATIENCE_S)[1] for one in started]
    finally:
        children.end()
    if any(process.returncode not in (0, 9) for process in started):
        raise AssertionError("\n".join(said))
    answers = [place / f"{rank}.json" for rank in range(world)]
    return Job(place, [json.loads(answer.read_text()) if answer.exists() else {} for answer in answers])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three ranks, of which the last dies in the end: starting them costs more than what they do."""
    return run("saved,packaged,failing,dying", 3, tmp_path_factory.mktemp("sharded"))


def table(place: Path, name: str, dim: int) -> dict[int, list[float]]:
    keys, rows = np.fromfile(place / name / "key", np.int64), np.fromfile(place / name / "emb_vector", np.float32)
    return dict(zip(keys.tolist(), rows.reshape(-1, dim).tolist(), strict=True))


def versions(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("[0-9]*"))


def check_saved(job: Job, world: int) -> None:
    place = job.place / "saved"
    assert job.of("saved") == [["1", "2", "3", str(place / "m")]] * world
    net = Net()
    for name, dim in DIMS.items():
        rows = net.get_submodule(name).weight.detach()  # type: ignore[union-attr,operator]
        assert table(place / "m" / "1", name, dim) == dict(enumerate(rows.tolist()))
        assert table(place / "m" / "2", name, dim) == dict(enumerate((2 * rows).tolist()))
        changed = {"by_row": [0, 4, 9], "by_column": [3], "plain": []}[name]
        assert table(place / "m" / "3", name, dim) == {number: (2 * rows[number]).tolist() for number in changed}
    assert json.loads((place / "m" / "model.json").read_text())["sparse_files"] == list(DIMS)


def check_packaged(job: Job, world: int) -> None:
    inputs, place = ["ids", "tags"], job.place / "packaged"
    assert job.of("packaged") == [[["1", True, inputs], ["2", True, inputs]]] * world
    assert versions(place / "m") == ["1", "2"]
    ids, tags = (torch.cat([example, example.flip(0)]) for example in examples())
    ids[1] = 3  # the padding of a table, which lookups ignore
    found = score(place, {"ids": ids, "tags": tags})
    assert found.version == "2"
    np.testing.assert_allclose(found["score"], Net()(ids, tags).detach(), atol=1e-6)


def check_dead(job: Job, scenario: str, dead: int) -> None:
    assert [scenario in answers for answers in job.answers] == [rank != dead for rank in range(len(job.answers))]
    assert all(f"rank {dead} does not answer" in one for one in job.of(scenario))
    assert not versions(job.place / scenario / "m")
    assert not (job.place / scenario / "m" / "model.json").exists()


def test_rows_columns_and_copies_are_saved_as_whole_tables(job: Job) -> None:
    check_saved(job, 3)


def test_a_module_with_sharded_embeddings_is_packaged(job: Job) -> None:
    check_packaged(job, 3)


def test_a_rank_that_fails_fails_all_of_them_and_leaves_nothing(job: Job) -> None:
    found, place = job.of("failing"), job.place / "failing"
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
    assert versions(place / "m") == ["1", "2"]
    assert not list(place.rglob("*.tmp"))


def test_a_rank_that_dies_leaves_no_version(job: Job) -> None:
    check_dead(job, "dying", 2)


def test_bags_that_torchrec_shards_are_packaged_and_converted(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    (first, *others) = run("torchrec_bags", 2, tmp_path).of("torchrec_bags")
    assert others == [first]
    assert first[:2] == [["1", "2"], [True, True]]
    sparse = jagged(7)
    bags = {name: hps.Bags(sparse[name].values(), sparse[name].offsets()) for name in "fghi"}
    np.testing.assert_allclose(score(tmp_path / "torchrec_bags", bags)["score"], first[2], atol=1e-6)
