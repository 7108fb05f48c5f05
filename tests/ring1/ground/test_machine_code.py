"""Files of machine code: whole, of exactly these sources, and never of others."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hps.ground.kernels import machine_code

NAME, KEY, CODE = "one.code", "key of a kernel", bytes(range(200))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package and a home of this test's own; returns the directory that code goes to."""
    monkeypatch.setattr(machine_code, "_PACKAGE", tmp_path / "hps")
    monkeypatch.setattr(machine_code, "_name", lambda: "hps-kernels-ours")
    monkeypatch.setattr(machine_code._config, "CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cached = machine_code.directory
    cached.cache_clear()
    yield tmp_path / "hps" / "__pycache__" / "hps-kernels-ours"
    cached.cache_clear()


def test_code_is_read_by_its_own_name_and_key(home: Path) -> None:
    assert machine_code.read(NAME, KEY) is None
    assert machine_code.write(NAME, KEY, CODE)
    assert machine_code.read(NAME, KEY) == CODE
    assert machine_code.read(NAME, "another key") is None
    assert [path.name for path in home.iterdir()] == [NAME], "nothing is left half written"


def test_a_full_disk_keeps_nothing_half_and_what_was_there(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    machine_code.write(NAME, KEY, CODE)
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", refuse)
        assert not machine_code.write(NAME, KEY, b"newer")
    assert "cannot keep a compiled kernel" in caplog.text
    assert [path.name for path in home.iterdir()] == [NAME]
    assert machine_code.read(NAME, KEY) == CODE


@pytest.mark.parametrize("damaged", [b"", CODE[:40], "cut", "changed"])
def test_a_damaged_file_counts_as_missing_and_is_replaced(home: Path, damaged: bytes | str) -> None:
    machine_code.write(NAME, KEY, CODE)
    whole = (home / NAME).read_bytes()
    changes = {"cut": whole[:-1], "changed": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]}
    (home / NAME).write_bytes(changes[damaged] if isinstance(damaged, str) else damaged)
    assert machine_code.read(NAME, KEY) is None
    machine_code.write(NAME, KEY, CODE)
    assert machine_code.read(NAME, KEY) == CODE


def test_code_of_other_sources_counts_as_missing_even_in_this_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_name", lambda: "hps-kernels-theirs")
    machine_code.write(NAME, KEY, CODE)
    monkeypatch.setattr(machine_code, "_name", lambda: "hps-kernels-ours")
    home.parent.joinpath("hps-kernels-theirs").rename(home)
    assert machine_code.read(NAME, KEY) is None


@pytest.mark.parametrize("named", [True, False])
def test_what_the_user_compiled_precedes_what_the_installation_brings(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    machine_code.write(NAME, KEY, b"brought")
    own = tmp_path / ("named" if named else "home/.cache/hps")
    if named:
        monkeypatch.setattr(machine_code._config, "CACHE_DIR", str(own))
    monkeypatch.setattr(machine_code, "directory", lambda: own / "hps-kernels-ours")
    (own / "hps-kernels-ours").mkdir(parents=True)
    assert machine_code.read(NAME, KEY) == b"brought"
    machine_code.write(NAME, KEY, b"own")
    assert machine_code.read(NAME, KEY) == b"own"


@pytest.mark.parametrize(("mode", "named"), [(0o700, ""), (0o777, ""), (0o700, "/dev/null/named")])
def test_a_temporary_directory_that_others_may_write_to_is_not_trusted(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mode: int, named: str
) -> None:
    monkeypatch.setattr(machine_code._config, "CACHE_DIR", named)
    for unwritable in (tmp_path / "hps", tmp_path / "home"):
        unwritable.touch()  # nothing can be made below a file, not even by root
    shared = tmp_path / f"hps-kernels-{os.getuid()}"
    shared.mkdir()
    shared.chmod(mode)
    assert machine_code.write(NAME, KEY, CODE) == (mode == 0o700)
    assert bool([*shared.iterdir()]) == (mode == 0o700)
    assert ("they go to" if mode == 0o700 else "every start compiles them again") in caplog.text
    assert f"cannot keep compiled kernels in {named or home.parent}" in caplog.text
    assert "Set NUMBA_CACHE_DIR to a directory that this user can write to" in caplog.text


def test_a_user_without_write_access_keeps_code_at_home(home: Path, tmp_path: Path) -> None:
    (tmp_path / "hps").touch()
    assert machine_code.write(NAME, KEY, CODE)
    assert [path.name for path in (tmp_path / "home/.cache/hps/hps-kernels-ours").iterdir()] == [NAME]
    assert machine_code.read(NAME, KEY) == CODE


def test_the_machine_code_of_older_sources_is_bounded(home: Path) -> None:
    old = [home.with_name(f"hps-kernels-{number}") for number in range(6)]
    for age, directory in enumerate(old):
        (directory / "hps_0").mkdir(parents=True)
        os.utime(directory, (86400 - age, 86400 - age))  # of 1970
    just_used = home.with_name("hps-kernels-used")
    just_used.mkdir()
    machine_code.write(NAME, KEY, CODE)
    assert set(home.parent.iterdir()) == {home, just_used, *old[:3]}
