"""`hps serve` of a repository: its rows are in row files, which the next server finds again."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.models.writer import write_version
from hps.tools.cli.tables.sample import sample_vectors
from tests.ring1.tools.cli.test_cli import run
from tests.servers.served_process import ServedProcess

KEYS = np.arange(3000)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "models" / "shop"
    write_version(place / "1", {"item": (KEYS, sample_vectors(KEYS, 8, 1))})
    entry = {"sparse_files": ["item"], "embedding_table_names": ["item"], "embedding_vecsize_per_table": [8]}
    entry |= {"maxnum_catfeature_query_per_table_per_sample": [50], "default_value_for_each_table": [0.0]}
    (place / "model.json").write_text(json.dumps(entry | {"max_batch_size": 64, "deployed_device_list": [0]}))
    return place.parent


@pytest.fixture
def served(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedProcess]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HPS_ADMIN_TOKEN", "secret")
    (tmp_path / "first").mkdir()
    with ServedProcess(repository, tmp_path / "first") as process:
        yield process


def directory_of(process: ServedProcess) -> Path:
    line = next(line for line in process.log().splitlines() if "row files of" in line)
    return Path(line.partition(" are in ")[2].partition(";")[0])


def test_a_server_that_is_killed_finds_its_rows_again_with_what_was_written_online(served: ServedProcess) -> None:
    ours = directory_of(served)
    with hps.connect(served.url, token="secret") as client:
        np.testing.assert_array_equal(client.lookup(KEYS, "shop", "item"), sample_vectors(KEYS, 8, 1))
        client.insert([7], np.full((1, 8), 7.0), "shop", "item")
    served.tell(signal.SIGHUP, "nothing in it has changed")
    served.stop(signal.SIGKILL)
    served.start()
    assert directory_of(served) == ours
    assert "all were there" in served.log()
    with hps.connect(served.url) as client:
        expected = sample_vectors(KEYS, 8, 1)
        expected[7] = 7.0
        np.testing.assert_array_equal(client.lookup(KEYS, "shop", "item"), expected)
    served.stop()
    result = run("check-database", ours, code=0)
    assert "3,000 rows of 8 floats can be read" in result.stdout


def test_two_servers_share_the_file_of_a_sealed_version(served: ServedProcess, repository: Path, tmp_path: Path) -> None:
    run("seal", repository / "shop" / "1", code=0)
    (tmp_path / "second").mkdir()
    with ServedProcess(repository, tmp_path / "second") as second:
        ours, theirs = directory_of(served), directory_of(second)
        assert (ours.name, theirs.name, ours.parent) == ("0", "1", theirs.parent)
        [file] = (theirs / "tables").glob("*.rows")
        assert file.samefile(repository / "shop" / "1" / "item" / "rows"), "linked, not copied"
        for process in (served, second):
            with hps.connect(process.url) as client:
                np.testing.assert_array_equal(client.lookup(KEYS, "shop", "item"), sample_vectors(KEYS, 8, 1))
