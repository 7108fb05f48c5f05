"""Small files beside the persistent database are whole after a loss of power, and each model has its own."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hps
from hps.versions import kept_files as kept_files_module
from hps.versions.kept_files import KeptFiles, kept_files
from tests.fakes.memory_database import MemoryDatabase, PersistentMemoryDatabase


@pytest.fixture
def kept(tmp_path: Path) -> KeptFiles:
    return KeptFiles(tmp_path, "hps-pins")


def test_what_is_written_last_is_read_until_it_is_removed_and_a_write_that_fails_changes_nothing(kept: KeptFiles) -> None:
    kept.remove("m")
    assert kept.read("m") is None
    for version in ("1", "2"):
        kept.write("m", {"version": version})
        assert json.loads(kept.read("m") or b"") == {"version": version}
    assert [path.name for path in (kept.directory or Path()).iterdir()] == ["m.json"], "nothing else is left"
    with pytest.raises(TypeError):
        kept.write("m", {"version": object()})
    assert json.loads(kept.read("m") or b"") == {"version": "2"}
    kept.path("m").write_bytes(bytes((1 << 16) + 1))
    assert len(kept.read("m") or b"") == 1 << 16, "no more is read than a small file has"
    for _ in range(2):
        kept.remove("m")
        assert kept.read("m") is None


def test_models_have_files_of_their_own_whatever_their_names_are(kept: KeptFiles) -> None:
    names = ["m", "M", "a/b", "..", "a b", "ü"]
    for name in names:
        kept.write(name, {"model": name})
    assert [json.loads(kept.read(name) or b"")["model"] for name in names] == names
    assert {kept.path(name).parent for name in names} == {kept.directory}


def test_content_is_on_disk_before_the_name(kept: KeptFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power there is the file before or the new one, never an empty one."""
    steps: list[Any] = []
    fsync, replace, sync_directory = os.fsync, Path.replace, kept_files_module.sync_directory

    def note_fsync(descriptor: int) -> None:
        steps.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        steps.append(("replace", target.name))
        return replace(path, target)

    def note_directory(directory: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            sync_directory(directory)
        steps.append(("directory", directory.name))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    monkeypatch.setattr(kept_files_module, "sync_directory", note_directory)
    for content in ({"version": "1"}, {"version": "1000"}):
        steps.clear()
        kept.write("m", content)
        assert steps == [("fsync", len(json.dumps(content))), ("replace", "m.json"), ("directory", "hps-pins")]
    steps.clear()
    kept.remove("m")
    assert steps == [("directory", "hps-pins")], "a removal is made durable, too"
    assert kept.read("m") is None


def test_who_may_not_write_keeps_nothing(kept: KeptFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nowhere = KeptFiles(None, "hps-pins")
    nowhere.write("m", {})
    nowhere.remove("m")
    assert (nowhere.read("m"), list(tmp_path.iterdir())) == (None, [])
    kept.write("m", {"version": "1"})
    reading = KeptFiles(tmp_path, "hps-pins", read_only=True)
    reading.write("m", {"version": "2"})
    reading.remove("m")
    assert json.loads(reading.read("m") or b"") == {"version": "1"}


def test_a_place_that_cannot_be_read_or_emptied_is_an_error_and_no_missing_file(kept: KeptFiles, tmp_path: Path) -> None:
    (tmp_path / "hps-fleet").write_text("no directory")
    other = KeptFiles(tmp_path, "hps-fleet")
    assert other.read("m") is None
    with pytest.raises(OSError, match=r"exists|directory"):
        other.write("m", {})
    kept.path("m").mkdir(parents=True)
    with pytest.raises(hps.DatabaseError, match=r"reading .*m.json of model 'm'"):
        kept.read("m")
    with pytest.raises(hps.DatabaseError, match=r"removing .* a restart would use it"):
        kept.remove("m")


@pytest.mark.parametrize("read_only", [False, True])
def test_the_files_lie_beside_the_persistent_database(tmp_path: Path, read_only: bool) -> None:
    persistent: Any = PersistentMemoryDatabase()
    persistent.directory, persistent.read_only = tmp_path, read_only
    chain: Any = SimpleNamespace(databases=[MemoryDatabase(), persistent])
    kept = kept_files(chain, "hps-fleet")
    assert (kept.directory, kept.read_only) == (tmp_path / "hps-fleet", read_only)
    chain = SimpleNamespace(databases=[MemoryDatabase()])
    assert kept_files(chain, "hps-fleet").directory is None
