"""Directories for the row files of repositories that are served: who takes which, and when none is taken."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hps.configuration.load import load_configuration
from hps.errors import InvalidInputError
from hps.tools.cli import state_directories
from hps.tools.cli.state_directories import completed, state_directory
from tests.ring1.tools.cli.test_cli import run, words


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "hps"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return repository_at(tmp_path / "models")


def repository_at(place: Path) -> Path:
    (place / "shop").mkdir(parents=True)
    (place / "shop" / "model.json").write_text("{}")
    return place


def path_of(source: Any) -> Path:
    return Path(load_configuration(source).persistent_db.path)


def test_a_server_takes_its_directory_again_and_a_second_one_another(home: Path, repository: Path) -> None:
    with state_directory(repository, None) as (first, notes), state_directory(repository, None) as (second, _):
        assert path_of(first).parent.parent == home
        assert [path_of(first).name, path_of(second).name] == ["0", "1"]
        assert notes == [f"row files of {repository} are in {path_of(first)}; --state DIR names another place"]
    with state_directory(repository, None) as (again, _):
        assert path_of(again) == path_of(first)
    with state_directory(repository_at(repository.parent / "others"), None) as (other, _):
        assert path_of(other).parent != path_of(first).parent


def test_the_path_of_a_repository_is_what_counts_however_it_is_written(
    home: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    with state_directory(repository, None) as (absolute, _):
        pass
    for written in ("models", "models/", "./models/../models"):
        with state_directory(Path(written), None) as (source, _):
            assert path_of(source) == path_of(absolute)
    with state_directory(Path("s3://bucket/models"), None) as (remote, _):
        assert load_configuration(remote).model_repository == "s3://bucket/models"
        record = json.loads((path_of(remote).parent / "repository.json").read_text())
    assert record == {"repository": "s3://bucket/models"}


def test_a_child_that_lives_on_keeps_the_directory_of_its_parent(home: Path, repository: Path) -> None:
    with state_directory(repository, None):
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.close(tell)
            os.read(told, 1)
            os._exit(0)
        os.close(told)
    with state_directory(repository, None) as (source, _):
        assert path_of(source).name == "1"
    os.close(tell)
    os.waitpid(child, 0)
    with state_directory(repository, None) as (source, _):
        assert path_of(source).name == "0"


def test_a_given_place_is_used_or_refused(home: Path, repository: Path, tmp_path: Path) -> None:
    with state_directory(repository, tmp_path / "disk") as (source, _):
        assert path_of(source).parent.parent == tmp_path / "disk"
    (tmp_path / "file").touch()
    with (
        pytest.raises(InvalidInputError, match=f"--state {tmp_path}/file: .*Not a directory"),
        state_directory(repository, tmp_path / "file"),
    ):
        pass
    assert not home.exists()


@pytest.mark.parametrize("base", [None, "state"])
def test_a_configuration_keeps_its_databases(home: Path, tmp_path: Path, base: str | None) -> None:
    config = tmp_path / "ps.json"
    config.write_text("{}")
    assert completed(config) == config
    if base is None:
        with state_directory(config, None) as (source, notes):
            assert (source, notes) == (config, [])
    else:
        result = run("serve", config, "--state", tmp_path / base, code=2)
        assert "names its databases itself; set persistent_db.path there" in words(result.stderr)
    assert not home.exists()


def test_without_a_place_for_files_rows_are_held_in_memory_and_a_line_says_so(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(reason: str) -> None:
        with state_directory(repository, None) as (source, [note]):
            configuration = load_configuration(source)
        assert reason in note
        assert "--state DIR" in note
        assert (configuration.persistent_db.type, configuration.volatile_db.type) == ("disabled", "parallel_hash_map")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    check("Not a directory")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(Path, "home", without_home)
    check("this user has no home directory")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:40 / {tmp_path}/of\\040all rw,noatime shared:1 - nfs4 host:/ rw\n"
    )
    monkeypatch.setattr(state_directories, "_MOUNTS", mounts)
    monkeypatch.setenv("XDG_STATE_HOME", f"{tmp_path}/of all/me")
    check("on a network file system (nfs4)")
    assert completed(repository) == {"model_repository": str(repository)}


def without_home() -> Path:
    raise RuntimeError("no home directory")


def test_files_of_a_repository_that_is_gone_are_named_and_left(home: Path, repository: Path, tmp_path: Path) -> None:
    gone, used = repository_at(tmp_path / "gone"), repository_at(tmp_path / "used")
    with state_directory(gone, None) as (source, _):
        kept = path_of(source)
        kept.mkdir()
    with state_directory(used, None):
        for place in (gone, used):
            (place / "shop" / "model.json").unlink()
            (place / "shop").rmdir()
            place.rmdir()
        with state_directory(repository, None) as (_, notes):
            assert notes[1:] == [f"{kept.parent} has row files of {gone}, which is gone; remove it"]
    assert kept.is_dir()


def test_what_would_be_served_is_what_is_checked_and_planned(home: Path, repository: Path) -> None:
    planned = completed(repository)
    assert not home.exists()
    with state_directory(repository, None) as (source, _):
        assert planned == source
