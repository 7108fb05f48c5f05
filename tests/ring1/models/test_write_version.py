"""Versions on this machine are written whole or not at all, with a manifest that fits them."""

import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.errors import InvalidInputError, ModelFileError
from hps.models.manifest import FileCheck, read_manifest
from hps.models.repository import list_versions
from hps.models.sources import ModelSources
from hps.models.writer import write_version
from hps.types import FloatArray, KeyArray
from tests.tables.table_loads import DIM, KEYS, VECTORS

ROWS = (KEYS[:10], VECTORS[:10])


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_version_is_its_tables_and_what_says_by_what_they_are_whole(tmp_path: Path) -> None:
    tables, positions = {"item": ROWS, "deep/user": [ROWS, (KEYS[10:], VECTORS[10:])]}, {"item": {"0": "17", "topic/1": "9"}}
    before_us = time.time_ns() // 1000
    write_version(tmp_path / "shop" / "1", tables, note="first", updates=positions)
    after_us = time.time_ns() // 1000
    written = files_of(tmp_path / "shop" / "1")
    manifest = read_manifest(str(tmp_path / "shop" / "1"), ModelSources())
    assert manifest is not None
    assert (manifest.delta_of, manifest.note, manifest.updates) == ("", "first", positions)
    assert manifest.written_at_us is not None
    assert before_us <= manifest.written_at_us <= after_us
    assert written.pop("version.json")
    assert dict(manifest.files) == {
        name: FileCheck(size_bytes=len(data), crc32=f"{zlib.crc32(data):08x}") for name, data in written.items()
    }
    assert written == {
        **{"item/key": KEYS[:10].tobytes(), "item/emb_vector": VECTORS[:10].tobytes()},
        **{"deep/user/key": np.append(KEYS[:10], KEYS[10:]).tobytes(), "deep/user/emb_vector": VECTORS.tobytes()},
    }
    tables = {"item": ROWS, "user": (KEYS[:0], VECTORS[:0])}
    write_version(f"file://{tmp_path}/shop/2", tables, delta_of="1", deleted={"item": KEYS[:3]})
    written = files_of(tmp_path / "shop" / "2")
    assert written["item/deleted"] == KEYS[:3].tobytes()
    assert written["user/deleted"] == written["user/key"] == written["user/emb_vector"] == b""  # also if there are none
    manifest = read_manifest(str(tmp_path / "shop" / "2"), ModelSources())
    assert manifest is not None
    assert manifest.delta_of == "1"


def test_a_version_that_is_there_stays_and_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    write_version(tmp_path / "1", {"item": ROWS})
    before = files_of(tmp_path)
    with pytest.raises(ModelFileError, match=f"{tmp_path}/1: it exists"):
        write_version(tmp_path / "1", {"item": (KEYS, VECTORS)})

    def meanwhile() -> Iterator[tuple[KeyArray, FloatArray]]:
        yield ROWS
        assert list(list_versions(str(tmp_path), ModelSources())) == ["1"]  # nothing is seen before all is there
        write_version(tmp_path / "2", {"item": ROWS})
        yield KEYS, VECTORS

    def broken() -> Iterator[tuple[KeyArray, FloatArray]]:
        yield ROWS
        raise OSError("the source broke")

    with pytest.raises(ModelFileError, match=rf"renaming .* to {tmp_path}/2: Directory not empty"):
        write_version(tmp_path / "2", {"item": meanwhile()})
    written = files_of(tmp_path / "2")
    assert written.pop("version.json") != before.pop("1/version.json")  # another time
    assert written == {name[2:]: data for name, data in before.items()}
    with pytest.raises(OSError, match="the source broke"):
        write_version(tmp_path / "3", {"user": ROWS, "item": broken()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_version_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the names in directories between that of the version and those of its files."""
    synced: set[str] = set()
    sync, rename, renamed = os.fsync, os.rename, []

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def noted_rename(old: str, new: str) -> None:
        renamed.append((new, {os.path.relpath(path, old) for path in synced}))
        rename(old, new)
        synced.clear()

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    network = {"format": "onnx", "file": "networks/n.onnx", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
    write_version(tmp_path / "1", {"item": ROWS, "deep/user": ROWS}, network=(network, b"a network"))
    [(new, before)] = renamed
    assert new == f"{tmp_path}/1"
    assert {".", "item", "deep", "deep/user", "networks"} <= before
    assert str(tmp_path) in synced


@pytest.mark.parametrize(
    ("version", "tables", "options", "message"),
    [
        *(("v1", {"item": ROWS}, {}, "got version 'v1'"), ("01", {"item": ROWS}, {}, "got version '01'")),
        ("2", {"item": ROWS}, {"delta_of": "latest"}, "delta_of 'latest'"),
        ("2", {"item": ROWS}, {"deleted": {"item": KEYS}}, "expected those of a delta"),
        ("2", {"item": ROWS}, {"delta_of": "1", "deleted": {"user": KEYS}}, "got deleted keys of .'user'."),
        ("2", {"item": (KEYS[:0], VECTORS[:0])}, {}, "got no rows"),
        ("2", {"item": (KEYS, VECTORS[:, : DIM - 1][:5])}, {}, "expected .n,. and .n, "),
        *(
            ("2", {"item": ROWS}, {"updates": wrong}, "got updates")
            for wrong in ({"other": {"0": "17"}}, {"item": {"0": 17}}, {"item": {"zero": "17"}})
        ),
    ],
)
def test_what_is_no_version_is_not_written(
    tmp_path: Path, version: str, tables: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidInputError, ModelFileError), match=message):
        write_version(tmp_path / version, tables, **options)
    assert list(tmp_path.iterdir()) == []
