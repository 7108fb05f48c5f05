"""The file of a network: found, checked and identified like those of tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import DenseConfig, load_dense
from hps.filesystems.local import LocalFileSystem
from hps.models.manifest import FileCheck, read_manifest
from hps.models.network_file import NetworkFile
from hps.models.repository import VersionFiles, network_of, version_files
from hps.models.sources import ModelSources

SAID = {"format": "onnx", "file": "dense.onnx", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
ROWS = {"item": (np.arange(3), np.ones((3, 2), np.float32))}
SOURCES = ModelSources()


def said(**changes: Any) -> DenseConfig:
    return load_dense({**SAID, **changes})


def network(version: Path, base: DenseConfig | None = None) -> NetworkFile:
    found = version_files(version.name, str(version), ["item"], SOURCES, base).network
    assert found is not None
    return found


@pytest.fixture
def version(tmp_path: Path) -> Path:
    hps.write_version(tmp_path / "1", ROWS, network=(SAID, b"a network"))
    return tmp_path / "1"


def test_a_version_has_the_network_that_was_written_with_it(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = network(version, said(file="other"))
    assert (found.config, found.place) == (said(), f"{version}/dense.onnx")
    assert found.read(SOURCES) == b"a network"
    manifest = read_manifest(str(version), SOURCES)
    assert manifest is not None
    assert manifest.files["dense.onnx"] == FileCheck(size_bytes=9, crc32="a98fbbdd")
    content, other = bytes(range(256)) * 5, version.parent / "2"
    hps.write_version(other, ROWS, network=(said(file="./networks/dense.onnx"), content))
    monkeypatch.setattr(LocalFileSystem, "part_bytes", 100)
    assert network(other).read(SOURCES) == content
    with pytest.raises(hps.ConfigError, match="unknown key; did you mean outputs"):
        hps.write_version(version.parent / "3", ROWS, network=({**SAID, "output": ["s"]}, b"a network"))
    assert not (version.parent / "3").exists()


def test_another_content_size_or_no_file_is_refused(version: Path) -> None:
    (version / "dense.onnx").write_bytes(b"b network")
    with pytest.raises(hps.ModelFileError, match=r"dense\.onnx: its content has CRC-32 [0-9a-f]{8}, expected the a98fbbdd"):
        network(version).read(SOURCES)
    (version / "dense.onnx").write_bytes(b"a longer network")
    for ask in ("read", "fingerprint"):
        with pytest.raises(hps.ModelFileError, match=r"dense\.onnx.* got 16 bytes|16"):
            getattr(network(version), ask)(SOURCES)
    (version / "dense.onnx").write_bytes(b"")
    with pytest.raises(hps.ModelFileError, match="got an empty file"):
        NetworkFile(said(), f"{version}/dense.onnx").read(SOURCES)
    (version / "dense.onnx").unlink()
    for ask in ("read", "fingerprint"):
        with pytest.raises(hps.ModelFileNotFoundError, match=r"dense\.onnx"):
            getattr(network(version), ask)(SOURCES)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "dense.onnx"
    place.write_bytes(bytes(1000))
    monkeypatch.setattr(LocalFileSystem, "part_bytes", 100)
    read_into = LocalFileSystem.read_into

    def changing(self: LocalFileSystem, path: str, offset: int, *rest: Any) -> None:
        if offset == 500:
            place.unlink()
            place.write_bytes(bytes(1001))
        read_into(self, path, offset, *rest)

    monkeypatch.setattr(LocalFileSystem, "read_into", changing)
    with pytest.raises(hps.ModelFileChangedError):
        NetworkFile(said(), str(place)).read(SOURCES)


def test_the_fingerprint_follows_the_file_and_what_is_said_of_it(tmp_path: Path) -> None:
    place = tmp_path / "dense.onnx"
    place.write_bytes(b"1")

    def fingerprint(**changes: Any) -> str:
        return NetworkFile(said(**changes), str(place)).fingerprint(SOURCES)

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(dynamic_batching=False, max_queue_delay_us=5, refuse_nan=False) == first  # nothing to open again
    others = [
        fingerprint(outputs=["a"]),
        fingerprint(inputs={"item": {"table": "item", "pooling": "sum"}}),
        fingerprint(format="pt2"),
    ]
    place.unlink()
    place.write_bytes(b"22")
    others.append(fingerprint())
    assert len({first, *others}) == 5


def test_a_manifest_with_another_network_is_refused(version: Path) -> None:
    text = json.loads((version / "version.json").read_text())
    text["dense"]["inputs"]["item"]["tabel"] = 1
    (version / "version.json").write_text(json.dumps(text))
    with pytest.raises(hps.ModelFileError, match=r"version\.json: dense\.inputs\.item\.tabel: "):
        network(version)


def test_a_delta_has_its_own_network_or_that_of_its_base(tmp_path: Path) -> None:
    hps.write_version(tmp_path / "1", ROWS, network=(SAID, b"first"))
    hps.write_version(tmp_path / "2", ROWS, delta_of="1")
    hps.write_version(tmp_path / "3", ROWS, delta_of="2", network=(said(outputs=["other"]), b"third"))
    hps.write_version(tmp_path / "4", ROWS, delta_of="3")
    hps.write_version(tmp_path / "5", ROWS)

    def of(version: str, dense: DenseConfig | None = None) -> str:
        def find(number: str) -> VersionFiles:
            return version_files(number, str(tmp_path / number), ["item"], SOURCES, dense)

        found = network_of(version, find)
        return "" if found is None else found.place.removeprefix(f"{tmp_path}/")

    assert [of(str(number)) for number in range(1, 6)] == [f"{place}/dense.onnx" for place in "1133"] + [""]
    assert of("5", said(file="f")) == "5/f"  # the model's, for whole versions that name none
    assert of("2", said(file="f")) == "1/dense.onnx"
