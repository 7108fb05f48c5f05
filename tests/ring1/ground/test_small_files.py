"""Changes of files are noticed, however they are made."""

import os
from pathlib import Path

from hps.ground.small_files import FileMarks


def changed(marks: FileMarks) -> bool:
    return any(marks.changed() for _ in range(3))


def test_a_file_that_is_written_replaced_removed_or_made_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    marks = FileMarks(str(path), "")
    assert not changed(marks)
    path.write_text("one")
    assert changed(marks)
    path.write_text("two")
    assert changed(marks)
    (tmp_path / "new").write_text("old")
    os.utime(tmp_path / "new", ns=(0, path.stat().st_mtime_ns))
    (tmp_path / "new").replace(path)
    assert changed(marks)
    assert not changed(marks)
    path.unlink()
    assert changed(marks)


def test_a_swapped_link_to_a_directory_is_a_change_as_kubernetes_makes_it(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_text(name)
    data, file = tmp_path / "..data", tmp_path / "tls.crt"
    data.symlink_to("first")
    file.symlink_to("..data/tls.crt")
    marks = FileMarks(str(file))
    (tmp_path / "..data_tmp").symlink_to("second")
    (tmp_path / "..data_tmp").replace(data)
    assert changed(marks)
    assert file.read_text() == "second"


def test_a_change_is_told_once_and_not_before_it_is_over(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("1")
    marks = FileMarks(str(one), str(two))
    one.write_text("12")
    assert not marks.changed()
    two.write_text("12")
    assert [marks.changed() for _ in range(4)] == [False, True, False, False]
