"""Files of this machine."""

import os
import stat
from pathlib import Path

import pytest

from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.local import LocalFileSystem
from hps.testing.filesystems import FileSystemContract
from hps.testing.waiting import wait_until


class TestLocalFileSystem(FileSystemContract):
    @pytest.fixture
    def filesystem(self) -> LocalFileSystem:
        return LocalFileSystem()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/root"  # paths are what most other tests use

    def put(self, path: str, content: bytes) -> None:
        """Write beside and rename, as a careful writer does."""
        target = Path(path.removeprefix("file://"))
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(target.name + ".new")
        new.write_bytes(content)
        new.rename(target)


def test_every_form_of_a_local_address_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Percent signs of a URI are decoded, and those of a path are not; a relative path counts from the working directory."""
    for name, size in (("key", 24), ("a b", 1), ("a%20b", 2)):
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "link").symlink_to("key")
    monkeypatch.chdir(tmp_path)
    forms = [f"{form}{tmp_path}/key" for form in ("file://", "FILE://", "file:", "file://localhost", "")]
    for form, size in (
        *((form, 24) for form in (*forms, "key", f"{tmp_path}/link")),
        *((f"file://{tmp_path}/a%20b", 1), (f"{tmp_path}/a%20b", 2)),
    ):
        assert LocalFileSystem().status(form).size_bytes == size, form


def test_what_is_no_file_is_refused_and_waited_for_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    for name, error, message in (
        *(("broken", ModelFileNotFoundError, "broken"), ("circle", ModelFileError, "circle")),
        *(("pipe", ModelFileError, "not a regular file"), ("x" * 300, ModelFileError, "too long")),
    ):
        with pytest.raises(error, match=message):
            LocalFileSystem().status(f"{tmp_path}/{name}")
    with pytest.raises(ModelFileError, match="pipe"):
        LocalFileSystem().read_into(f"{tmp_path}/pipe", 0, memoryview(bytearray(8)))


@pytest.mark.parametrize("uri", ["file://server/share/key", "file://server"])
def test_a_uri_of_another_host_is_refused(uri: str) -> None:
    with pytest.raises(ModelFileError, match=r"'server'.*file:///absolute/path"):
        LocalFileSystem().exists(uri)


def test_a_time_that_is_put_back_hides_no_write(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"before")
    status, before = path.stat(), LocalFileSystem().status(str(path)).version

    def seen() -> bool:  # within the same tick of the clock nothing can be seen
        path.write_bytes(b"behind")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return LocalFileSystem().status(str(path)).version != before

    wait_until(seen, "the write is seen")


def test_a_replacement_that_keeps_the_time_has_another_version(tmp_path: Path) -> None:
    path, other = tmp_path / "key", tmp_path / "other"
    path.write_bytes(b"old")
    other.write_bytes(b"new")
    os.utime(path, ns=(10**18, 10**18))
    os.utime(other, ns=(10**18, 10**18))
    before = LocalFileSystem().status(str(path)).version
    other.rename(path)
    assert LocalFileSystem().status(str(path)).version != before


def test_a_file_is_durable_before_it_has_its_name_and_the_name_before_the_commit_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, sync, replace = [], os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name[:5]}")

    def noted_replace(old: str, new: str) -> None:
        replace(old, new)
        steps.append(f"rename {Path(old).name[:5]} {Path(new).name}")

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    whole = ["sync .key.", "rename .key. key", "sync model"]
    writer = LocalFileSystem().create(f"{tmp_path}/model/key")
    writer.write(memoryview(b"x"))
    assert steps == []
    writer.commit()
    assert steps == whole
    LocalFileSystem().replace(f"{tmp_path}/model/key", b"y", LocalFileSystem().status(f"{tmp_path}/model/key").version)
    assert steps == whole * 2


@pytest.mark.parametrize("name", ["nul\0name", "surrogate\ud800name"])
def test_a_name_that_no_file_can_have_is_a_model_file_error(tmp_path: Path, name: str) -> None:
    filesystem = LocalFileSystem()
    for call in (filesystem.exists, filesystem.status, filesystem.list, filesystem.create, filesystem.delete):
        with pytest.raises(ModelFileError, match="no file can have this name"):
            call(f"{tmp_path}/{name}")


def test_what_may_not_be_read_says_so_and_is_not_called_absent(tmp_path: Path) -> None:
    path = tmp_path / "closed" / "key"
    path.parent.mkdir()
    path.write_bytes(b"12345678")
    filesystem = LocalFileSystem()
    user = os.geteuid()
    path.chmod(0)
    path.parent.chmod(0)
    if user == 0:  # root may read everything
        os.seteuid(65534)
    try:
        for call in (filesystem.exists, filesystem.status, filesystem.list, filesystem.create, filesystem.delete):
            with pytest.raises(ModelFileError, match="permission denied; let the user that runs hps read it") as raised:
                call(str(path))
            assert not isinstance(raised.value, ModelFileNotFoundError)
        with pytest.raises(ModelFileError, match="permission denied"):
            filesystem.read_into(str(path), 0, memoryview(bytearray(8)))
    finally:
        os.seteuid(user)
        path.parent.chmod(stat.S_IRWXU)


def test_a_link_to_a_file_that_nobody_writes_to_leaves_its_version(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"abc")
    os.chmod(path, 0o444)
    before = LocalFileSystem().status(str(path)).version
    os.link(path, tmp_path / "link")
    assert LocalFileSystem().status(str(path)).version == before
    (tmp_path / "link").unlink()
    assert LocalFileSystem().status(str(path)).version == before
    os.chmod(path, 0o644)
    assert LocalFileSystem().status(str(path)).version != before
